//! stderr, shared by progress and logs.
//!
//! In: finished lines. Out: the same lines, above the bars when there are any. Nothing here fails: a stderr that is gone must not end a save.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use indicatif::MultiProgress;
use tracing_subscriber::fmt::MakeWriter;

/// A handle to stderr; clones write to the same place.
#[derive(Debug, Clone, Default)]
pub(super) struct Console {
    bars: Arc<Mutex<Option<MultiProgress>>>,
}

impl Console {
    /// From now on lines go above these bars; `None` when they are gone.
    pub(super) fn set_bars(&self, bars: Option<MultiProgress>) {
        *self.bars.lock().unwrap_or_else(PoisonError::into_inner) = bars;
    }

    /// Writes one line.
    pub(super) fn line(&self, text: &str) {
        self.put(format!("{text}\n").as_bytes());
    }

    fn put(&self, bytes: &[u8]) {
        let bars = self
            .bars
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        // One write per line keeps lines of several processes apart.
        let write = || drop(io::stderr().write_all(bytes));
        match bars {
            Some(bars) => bars.suspend(write),
            None => write(),
        }
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.put(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Console {
    type Writer = Self;

    fn make_writer(&self) -> Self::Writer {
        self.clone()
    }
}
