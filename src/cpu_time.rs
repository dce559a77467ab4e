//! What computing has cost so far, in time that a processor spent on it.
//!
//! In: the kernel's clocks. Out: durations since a thread or the process began, to be subtracted from each other. Nothing here can fail. Unlike time on the wall it
//! says what a piece of work took, and not what the neighbours did meanwhile.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Of this thread, user and system.
pub(crate) fn of_thread() -> Duration {
    read(ClockId::ThreadCPUTime)
}

/// Of all threads of this process, those that ended too.
pub(crate) fn of_process() -> Duration {
    read(ClockId::ProcessCPUTime)
}

fn read(clock: ClockId) -> Duration {
    // The kernel gives no negative time.
    Duration::try_from(clock_gettime(clock)).unwrap_or_default()
}
