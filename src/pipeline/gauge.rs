//! How long a stage worked, starved or was blocked.
//!
//! In: durations, from every thread of the stage, or requests on the wire. Out: a [`StageOutcome`] each. The slowest stage is the one that the others wait for: stages
//! before it are blocked, stages behind it starve, so it is the one with the least slack.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::outcome::StageOutcome;

/// Counters of one stage.
#[derive(Debug)]
pub(super) struct Gauge {
    stage: &'static str,
    workers: u32,
    bytes: AtomicU64,
    busy_ns: AtomicU64,
    starved_ns: AtomicU64,
    blocked_ns: AtomicU64,
}

impl Gauge {
    /// A stage of `workers` threads (at least 1 is assumed).
    pub(super) fn new(stage: &'static str, workers: usize) -> Self {
        Self {
            stage,
            workers: u32::try_from(workers.max(1)).unwrap_or(u32::MAX),
            bytes: AtomicU64::new(0),
            busy_ns: AtomicU64::new(0),
            starved_ns: AtomicU64::new(0),
            blocked_ns: AtomicU64::new(0),
        }
    }

    /// `bytes` were worked on for so long.
    pub(super) fn busy(&self, bytes: u64, time: Duration) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        add(&self.busy_ns, time);
    }

    /// Waited so long for input.
    pub(super) fn starved(&self, time: Duration) {
        add(&self.starved_ns, time);
    }

    /// Waited so long for room in the next stage.
    pub(super) fn blocked(&self, time: Duration) {
        add(&self.blocked_ns, time);
    }

    /// The stage's account, seconds divided by its workers.
    pub(super) fn outcome(&self) -> StageAccount {
        let per_worker = |ns: &AtomicU64| {
            Duration::from_nanos(ns.load(Ordering::Relaxed)).as_secs_f64() / f64::from(self.workers)
        };
        let bytes = self.bytes.load(Ordering::Relaxed);
        let busy_seconds = per_worker(&self.busy_ns);
        let starved_seconds = per_worker(&self.starved_ns);
        let blocked_seconds = per_worker(&self.blocked_ns);
        StageAccount {
            outcome: StageOutcome {
                stage: self.stage.to_owned(),
                bytes,
                busy_seconds,
                starved_seconds,
                blocked_seconds,
                rate: rate(bytes, busy_seconds),
            },
            slack_seconds: starved_seconds + blocked_seconds,
        }
    }
}

/// A stage whose work is requests on the wire. It is busy while there is any, and has slack while fewer than half of those are out that there is room for.
#[derive(Debug)]
pub(super) struct Wire {
    stage: &'static str,
    room: usize,
    state: Mutex<WireState>,
}

#[derive(Debug)]
struct WireState {
    count: usize,
    bytes: u64,
    since: Instant,
    busy: Duration,
    idle: Duration,
    slack: Duration,
}

impl Wire {
    /// Nothing on the wire yet, room for `room` requests.
    pub(super) fn new(stage: &'static str, room: usize) -> Self {
        Self {
            stage,
            room,
            state: Mutex::new(WireState {
                count: 0,
                bytes: 0,
                since: Instant::now(),
                busy: Duration::ZERO,
                idle: Duration::ZERO,
                slack: Duration::ZERO,
            }),
        }
    }

    /// A request goes out.
    pub(super) fn enter(&self) {
        self.account().count += 1;
    }

    /// A request ended, and moved so many bytes.
    pub(super) fn leave(&self, bytes: u64) {
        let mut state = self.account();
        state.count = state.count.saturating_sub(1);
        state.bytes += bytes;
    }

    /// No request will follow: the time from now on is nobody's.
    pub(super) fn outcome(&self) -> StageAccount {
        let state = self.account();
        let busy_seconds = state.busy.as_secs_f64();
        StageAccount {
            outcome: StageOutcome {
                stage: self.stage.to_owned(),
                bytes: state.bytes,
                busy_seconds,
                starved_seconds: state.idle.as_secs_f64(),
                blocked_seconds: 0.0,
                rate: rate(state.bytes, busy_seconds),
            },
            slack_seconds: state.slack.as_secs_f64(),
        }
    }

    /// Books the time since the last change.
    fn account(&self) -> MutexGuard<'_, WireState> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let elapsed = now.duration_since(state.since);
        if state.count > 0 {
            state.busy += elapsed;
        } else {
            state.idle += elapsed;
        }
        if state.count * 2 < self.room {
            state.slack += elapsed;
        }
        state.since = now;
        state
    }
}

/// What a stage did, and how much more it could have done.
#[derive(Debug)]
pub(super) struct StageAccount {
    outcome: StageOutcome,
    slack_seconds: f64,
}

/// The accounts as the report has them, and the stage with the least slack, if anything flowed.
pub(super) fn settle(accounts: Vec<StageAccount>) -> (Vec<StageOutcome>, Option<String>) {
    let flowed = accounts.iter().filter(|account| account.outcome.bytes > 0);
    let slowest = flowed
        .min_by(|a, b| a.slack_seconds.total_cmp(&b.slack_seconds))
        .map(|account| account.outcome.stage.clone());
    let outcomes = accounts.into_iter().map(|account| account.outcome);
    (outcomes.collect(), slowest)
}

#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
fn rate(bytes: u64, seconds: f64) -> f64 {
    if seconds > 0.0 {
        bytes as f64 / seconds
    } else {
        0.0
    }
}

fn add(counter: &AtomicU64, time: Duration) {
    counter.fetch_add(
        u64::try_from(time.as_nanos()).unwrap_or(u64::MAX),
        Ordering::Relaxed,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_stage_is_the_one_that_waits_least() {
        let copy = Gauge::new("copy", 1);
        copy.busy(100, Duration::from_secs(1));
        copy.blocked(Duration::from_secs(9));
        let compress = Gauge::new("compress", 2);
        compress.busy(100, Duration::from_secs(18));
        compress.starved(Duration::from_secs(2));
        let (stages, slowest) = settle(vec![copy.outcome(), compress.outcome()]);
        assert_eq!(slowest.as_deref(), Some("compress"));
        assert!(
            (stages[1].busy_seconds - 9.0).abs() < 1e-9,
            "divided by the workers"
        );
        assert!((stages[0].rate - 100.0).abs() < 1e-9);
    }

    #[test]
    fn nothing_flowed_nothing_is_slowest() {
        let (_, slowest) = settle(vec![Gauge::new("copy", 1).outcome()]);
        assert_eq!(slowest, None);
    }

    #[test]
    fn a_wire_with_few_requests_is_busy_and_has_slack() {
        let wire = Wire::new("upload", 4);
        wire.enter();
        std::thread::sleep(Duration::from_millis(2));
        let few = wire.outcome();
        assert!(few.outcome.busy_seconds > 0.0 && few.slack_seconds >= few.outcome.busy_seconds);
        wire.enter();
        let before = wire.outcome();
        std::thread::sleep(Duration::from_millis(2));
        let after = wire.outcome();
        assert!(after.outcome.busy_seconds > before.outcome.busy_seconds);
        assert!(
            (after.slack_seconds - before.slack_seconds).abs() < f64::EPSILON,
            "half full is no slack"
        );
        wire.leave(10);
        assert_eq!(wire.outcome().outcome.bytes, 10);
    }
}
