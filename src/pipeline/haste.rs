//! Whether a save is late: then compression is what time allows, whatever the configuration asks for.
//!
//! In: bytes coded so far, the moment by which all of it has to be over. Out: one word, which is said once and stands. Nothing can fail.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::transfer::UploadTarget;
use crate::progress::Meter;

/// A rate is not known before this.
const KNOWN_AFTER: Duration = Duration::from_millis(200);
/// Of the time that is left, in per cent, what the rest may need by the rate so far: the last parts are still to be sent when all is coded.
const SHARE: u32 = 80;

/// See the module.
#[derive(Debug)]
pub(super) struct Haste<'a> {
    targets: &'a [UploadTarget],
    meter: &'a Meter,
    started: Instant,
    total: u64,
    is_needed: AtomicBool,
}

impl<'a> Haste<'a> {
    /// Begins now.
    pub(super) fn new(targets: &'a [UploadTarget], meter: &'a Meter) -> Self {
        Self {
            targets,
            meter,
            started: Instant::now(),
            total: targets.iter().map(|target| target.meter.total).sum(),
            is_needed: AtomicBool::new(false),
        }
    }

    /// From some chunk on it is.
    pub(super) fn is_needed(&self) -> bool {
        if self.is_needed.load(Ordering::Relaxed) {
            return true;
        }
        let (Some(due), now) = (self.meter.due(), Instant::now()) else {
            return false;
        };
        let coded = |target: &UploadTarget| target.meter.coded.load(Ordering::Relaxed);
        let coded = self.targets.iter().map(coded).sum();
        let left = due.saturating_duration_since(now);
        let needed = needed(now - self.started, coded, self.total).unwrap_or_default();
        let is_late = left.is_zero() || needed > left * SHARE / 100;
        if is_late && !self.is_needed.swap(true, Ordering::Relaxed) {
            tracing::info!(
                "the rest would take {:.1} s, and {:.1} s are left: from now on compression is what time allows",
                needed.as_secs_f64(),
                left.as_secs_f64()
            );
        }
        is_late
    }
}

/// Time that the rest needs, by what was done so far; `None` where that says nothing yet.
fn needed(elapsed: Duration, coded: u64, total: u64) -> Option<Duration> {
    if coded == 0 || elapsed < KNOWN_AFTER {
        return None;
    }
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    let share = total.saturating_sub(coded) as f64 / coded as f64;
    Some(Duration::try_from_secs_f64(elapsed.as_secs_f64() * share).unwrap_or(Duration::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_needs_what_the_rate_so_far_says() {
        let second = Duration::from_secs(1);
        assert_eq!(needed(second, 0, 100), None);
        assert_eq!(needed(KNOWN_AFTER / 2, 50, 100), None);
        assert_eq!(needed(second, 50, 100), Some(second));
        assert_eq!(needed(second, 20, 100), Some(4 * second));
        assert_eq!(needed(second, 100, 100), Some(Duration::ZERO));
        // More than was announced is no reason for anything.
        assert_eq!(needed(second, 200, 100), Some(Duration::ZERO));
        assert_eq!(needed(second, 1, u64::MAX), Some(Duration::MAX));
    }
}
