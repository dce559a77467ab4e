//! What the service manager hears: that the job runs, that we live, that we end.
//!
//! In: nothing but `NOTIFY_SOCKET` and `WATCHDOG_USEC`, which systemd sets for a unit of `Type=notify`. Out: datagrams. Without them, nothing; what fails is told at the debug level.

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

/// The job runs, and is watched over.
pub(super) fn ready() {
    tell(&[NotifyState::Ready, NotifyState::Status("watching")]);
}

/// The job has ended, or was ended.
pub(super) fn end() {
    tell(&[NotifyState::Stopping]);
}
