//! What computing has cost so far, in time that a processor spent on it, and how much the machine had left.
//!
//! In: the kernel's clocks. Out: durations since a thread or the process began, to be subtracted from each other. Unlike time on the wall they say what a piece of work took, and not
//! what the neighbours did meanwhile; those show in what the machine has left. Only that can be missing, where there is no `/proc/stat` that says it.

use std::fs;
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

/// The time of all of the machine's processors since it started, in ticks of the kernel's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MachineTime {
    /// Without any work, for whomever.
    pub(crate) idle: u64,
    /// All of it.
    pub(crate) total: u64,
}

impl MachineTime {
    /// What `/proc/stat` says now.
    pub(crate) fn now() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// The first line: user, nice, system, idle, iowait, irq, softirq, steal, and guest times that are in user's and nice's already (proc_stat(5)).
    fn parse(stat: &str) -> Option<Self> {
        let fields = stat.lines().next()?.strip_prefix("cpu ")?;
        let ticks: Option<Vec<u64>> = fields
            .split_ascii_whitespace()
            .take(8)
            .map(|field| field.parse().ok())
            .collect();
        let ticks = ticks?;
        let idle = ticks.get(3)?.checked_add(*ticks.get(4)?)?;
        let total = ticks
            .iter()
            .try_fold(0_u64, |sum, ticks| sum.checked_add(*ticks))?;
        Some(Self { idle, total })
    }
}

fn read(clock: ClockId) -> Duration {
    // The kernel gives no negative time.
    Duration::try_from(clock_gettime(clock)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_counts_and_guests_do_not_count_twice() {
        let stat = "cpu  10 1 5 100 7 2 3 4 50 60\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        let found = MachineTime::parse(stat);
        let (idle, total) = (107, 132);
        assert_eq!(found, Some(MachineTime { idle, total }));
        for wrong in [
            "",
            "cpu",
            "cpu  1 2 3",
            "cpu  1 2 3 x 5",
            "cpu0 1 2 3 4 5",
            "intr 1 2 3 4 5",
        ] {
            assert_eq!(MachineTime::parse(wrong), None, "{wrong}");
        }
        let overflow = format!("cpu  1 2 3 {} 5", u64::MAX);
        assert_eq!(MachineTime::parse(&overflow), None);
    }

    #[test]
    fn this_machine_tells_its_time() {
        let time = MachineTime::now().unwrap();
        assert!(time.total > 0 && time.idle <= time.total);
    }
}
