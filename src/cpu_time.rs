//! What computing has cost so far, in time that a processor spent on it, and how much the machine had left.
//!
//! In: the kernel's clocks. Out: durations since a thread or the process began, to be subtracted from each other. Unlike time on the wall they say what a piece of work took, and not
//! what the neighbours did meanwhile; those show in what the machine has left. Only that can be missing, where there is no `/proc/stat` that says it.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity};
use rustix::time::{ClockId, clock_gettime};

/// Of this thread, user and system.
pub(crate) fn of_thread() -> Duration {
    read(ClockId::ThreadCPUTime)
}

/// Of all threads of this process, those that ended too.
pub(crate) fn of_process() -> Duration {
    read(ClockId::ProcessCPUTime)
}

/// The time since the machine started of all processors that this process may use, in ticks of the kernel's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MachineTime {
    /// Without any work, for whomever.
    pub(crate) idle: u64,
    /// All of it.
    pub(crate) total: u64,
}

impl MachineTime {
    /// What `/proc/stat` says now. Its lines of processors come first, and the rest, which can be long, is not asked for.
    pub(crate) fn now() -> Option<Self> {
        let allowed = sched_getaffinity(None).ok()?;
        Self::parse(BufReader::new(File::open("/proc/stat").ok()?), &allowed)
    }

    fn parse(stat: impl BufRead, allowed: &CpuSet) -> Option<Self> {
        let mut sum: Option<Self> = None;
        for line in stat.lines() {
            let line = line.ok()?;
            let Some((number, fields)) = line
                .strip_prefix("cpu")
                .and_then(|line| line.split_once(' '))
            else {
                break;
            };
            // The first line has no number: it is the sum of all.
            let number: Option<usize> = number.parse().ok();
            if number.is_some_and(|it| it < CpuSet::MAX_CPU && allowed.is_set(it)) {
                let time = Self::of_processor(fields)?;
                sum = Some(match sum {
                    None => time,
                    Some(sum) => sum.plus(time)?,
                });
            }
        }
        sum
    }

    fn plus(self, other: Self) -> Option<Self> {
        Some(Self {
            idle: self.idle.checked_add(other.idle)?,
            total: self.total.checked_add(other.total)?,
        })
    }

    /// One line: user, nice, system, idle, iowait, irq, softirq, steal, and guest times that are in user's and nice's already (proc_stat(5)).
    fn of_processor(fields: &str) -> Option<Self> {
        let fields = fields.split_ascii_whitespace().take(8);
        let ticks: Option<Vec<u64>> = fields.map(|field| field.parse().ok()).collect();
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

    fn parse(stat: &str, allowed: &[usize]) -> Option<MachineTime> {
        let mut set = CpuSet::new();
        allowed.iter().for_each(|it| set.set(*it));
        MachineTime::parse(stat.as_bytes(), &set)
    }

    #[test]
    fn only_what_we_may_use_counts_and_guests_do_not_count_twice() {
        let stat = "cpu  9 9 9 9 9 9 9 9 9 9\n\
                    cpu0 10 1 5 100 7 2 3 4 50 60\n\
                    cpu1 0 0 0 1000 0 0 0 0 0 0\n\
                    cpu2 1 0 0 2 0 0 0 0 0 0\n\
                    intr 1 2 3 4 5\n";
        let (idle, total) = (107, 132);
        assert_eq!(parse(stat, &[0]), Some(MachineTime { idle, total }));
        let (idle, total) = (109, 135);
        assert_eq!(parse(stat, &[0, 2]), Some(MachineTime { idle, total }));
        assert_eq!(parse(stat, &[7]), None);
        let overflow = format!("cpu0 1 2 3 {} 5\n", u64::MAX);
        for wrong in [
            "",
            "cpu",
            "cpu  1 2 3",
            "cpu0 1 2 3",
            "cpu0 1 2 3 x 5",
            &overflow,
        ] {
            assert_eq!(parse(wrong, &[0]), None, "{wrong}");
        }
    }
}
