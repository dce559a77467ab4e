//! What the service manager hears: that the job runs, that we live, that we end.
//!
//! In: `NOTIFY_SOCKET` and `WATCHDOG_USEC`, which systemd sets for a unit of `Type=notify`; a pipe of whoever started us (`--ready-fd`). Out: datagrams, and a newline. Without them, nothing; what fails is told at the debug level.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::runtime::Handle;

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(false, states) {
        tracing::debug!("the service manager does not hear: {error}");
    }
}

/// From now on the watchdog hears that the runtime's threads go on, twice as often as it wants.
pub(super) fn begin(runtime: &Handle) {
    let mut microseconds = 0;
    if !sd_notify::watchdog_enabled(false, &mut microseconds) {
        return;
    }
    let every = Duration::from_micros(microseconds / 2).max(Duration::from_millis(1));
    runtime.spawn(async move {
        loop {
            tell(&[NotifyState::Watchdog]);
            tokio::time::sleep(every).await;
        }
    });
}

/// Where to say that the job runs: a pipe, mostly, that whoever started us reads.
#[derive(Debug)]
pub struct Ready(File);

impl Ready {
    /// By the number that it has in this process. The job has it too, as all that whoever started us left open.
    ///
    /// # Errors
    /// Nothing is open there, or it cannot be written to.
    pub fn open(fd: u32) -> io::Result<Self> {
        let opened = OpenOptions::new()
            .write(true)
            .open(format!("/proc/self/fd/{fd}"));
        opened.map(Self)
    }

    /// Says so, with a newline.
    pub fn tell(mut self) {
        if let Err(error) = self.0.write_all(b"\n") {
            tracing::debug!("nobody hears that the job runs: {error}");
        }
    }
}

/// The job runs, and is watched over.
pub(super) fn ready(ready: Option<Ready>) {
    tell(&[NotifyState::Ready, NotifyState::Status("watching")]);
    if let Some(ready) = ready {
        ready.tell();
    }
}

/// The job has ended, or was ended.
pub(super) fn end() {
    tell(&[NotifyState::Stopping]);
}
