//! How long a stage worked, starved or was blocked.
//!
//! In: durations, from every thread of the stage, or requests on the wire. Out: a [`StageOutcome`] each. The slowest stage is the one that was busy longest: the
//! others waited for it, before it for room, behind it for input.

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
    pub(super) fn outcome(&self) -> StageOutcome {
        let per_worker = |ns: &AtomicU64| {
            Duration::from_nanos(ns.load(Ordering::Relaxed)).as_secs_f64() / f64::from(self.workers)
        };
        let bytes = self.bytes.load(Ordering::Relaxed);
        let busy_seconds = per_worker(&self.busy_ns);
        StageOutcome {
            stage: self.stage.to_owned(),
            bytes,
            busy_seconds,
            starved_seconds: per_worker(&self.starved_ns),
            blocked_seconds: per_worker(&self.blocked_ns),
            rate: rate(bytes, busy_seconds),
        }
    }
}

/// A stage whose work is requests on the wire. It is busy while at least half of those are out that there is room for, and, once no more will come, while there is any:
/// with fewer it could do more, and waits.
#[derive(Debug)]
pub(super) struct Wire {
    stage: &'static str,
    state: Mutex<WireState>,
}

#[derive(Debug)]
struct WireState {
    room: usize,
    count: usize,
    bytes: u64,
    since: Instant,
    /// No request will follow those that are out.
    draining: bool,
    busy: Duration,
    waiting: Duration,
    /// With any request out, for the rate.
    moving: Duration,
}

impl Wire {
    /// Nothing on the wire yet, room for `room` requests.
    pub(super) fn new(stage: &'static str, room: usize) -> Self {
        Self {
            stage,
            state: Mutex::new(WireState {
                room,
                count: 0,
                bytes: 0,
                since: Instant::now(),
                draining: false,
                busy: Duration::ZERO,
                waiting: Duration::ZERO,
                moving: Duration::ZERO,
            }),
        }
    }

    /// From now on there is room for so many requests.
    pub(super) fn set_room(&self, room: usize) {
        self.account().room = room;
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

    /// The last request is out.
    pub(super) fn drain(&self) {
        self.account().draining = true;
    }

    /// The stage's account up to now.
    pub(super) fn outcome(&self) -> StageOutcome {
        let state = self.account();
        StageOutcome {
            stage: self.stage.to_owned(),
            bytes: state.bytes,
            busy_seconds: state.busy.as_secs_f64(),
            starved_seconds: state.waiting.as_secs_f64(),
            blocked_seconds: 0.0,
            rate: rate(state.bytes, state.moving.as_secs_f64()),
        }
    }

    /// Books the time since the last change.
    fn account(&self) -> MutexGuard<'_, WireState> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let elapsed = now.duration_since(state.since);
        let is_moving = state.count > 0;
        if is_moving {
            state.moving += elapsed;
        }
        if is_moving && (state.draining || state.count * 2 >= state.room) {
            state.busy += elapsed;
        } else {
            state.waiting += elapsed;
        }
        state.since = now;
        state
    }
}

/// The stage that was busy longest, if anything flowed.
pub(super) fn slowest(stages: &[StageOutcome]) -> Option<String> {
    let flowed = stages.iter().filter(|stage| stage.bytes > 0);
    flowed
        .max_by(|a, b| a.busy_seconds.total_cmp(&b.busy_seconds))
        .map(|stage| stage.stage.clone())
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
    fn the_slowest_stage_is_the_one_that_is_busy_longest() {
        let copy = Gauge::new("copy", 1);
        copy.busy(100, Duration::from_secs(1));
        // It was done early: that it did not wait to the end does not make it slow.
        copy.blocked(Duration::from_secs(3));
        let compress = Gauge::new("compress", 2);
        compress.busy(100, Duration::from_secs(18));
        compress.starved(Duration::from_secs(2));
        let stages = [copy.outcome(), compress.outcome()];
        assert_eq!(slowest(&stages).as_deref(), Some("compress"));
        assert!(
            (stages[1].busy_seconds - 9.0).abs() < 1e-9,
            "divided by the workers"
        );
        assert!((stages[0].rate - 100.0).abs() < 1e-9);
    }

    #[test]
    fn nothing_flowed_nothing_is_slowest() {
        assert_eq!(slowest(&[Gauge::new("copy", 1).outcome()]), None);
    }

    #[test]
    fn a_wire_that_could_take_more_waits_until_no_more_comes() {
        let pass = || std::thread::sleep(Duration::from_millis(2));
        let wire = Wire::new("upload", 4);
        wire.enter();
        pass();
        let few = wire.outcome();
        assert!(few.busy_seconds == 0.0 && few.starved_seconds > 0.0);
        wire.enter();
        let before = wire.outcome();
        pass();
        let half = wire.outcome();
        assert!(half.busy_seconds > 0.0);
        assert!((half.starved_seconds - before.starved_seconds).abs() < f64::EPSILON);
        wire.leave(10);
        wire.drain();
        let before = wire.outcome();
        pass();
        let drained = wire.outcome();
        assert!(
            drained.busy_seconds > before.busy_seconds,
            "the rest is its own"
        );
        wire.leave(10);
        assert!(wire.outcome().bytes == 20 && wire.outcome().rate > 0.0);
    }
}
