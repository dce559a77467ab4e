//! The thread that looks at counters.
//!
//! In: the meter and the recorder's probes, looked at now and then. Out: points, kept by the recorder. What can fail: the start of the thread; then there are no counters, and the work goes on.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;

use super::Recorder;
use crate::progress::Meter;

/// Looks until it is dropped.
#[derive(Debug)]
pub struct Sampler {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// Starts to look.
    pub fn start(recorder: &Arc<Recorder>, meter: &Arc<Meter>) -> Self {
        let (stop, stopped) = mpsc::channel::<()>();
        let (recorder, meter) = (Arc::clone(recorder), Arc::clone(meter));
        let work = move || {
            loop {
                let every = recorder.sample(&meter);
                if !matches!(stopped.recv_timeout(every), Err(RecvTimeoutError::Timeout)) {
                    recorder.sample(&meter);
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("timeline".to_owned())
            .spawn(work);
        if let Err(error) = &thread {
            tracing::warn!("the timeline will have no counters: {error}");
        }
        Self {
            stop: Some(stop),
            thread: thread.ok(),
        }
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A sampler that panicked has nothing to say to the work.
            let _ = thread.join();
        }
    }
}
