//! How long a stage worked, starved or was blocked.
//!
//! In: durations, from every thread of the stage. Out: a [`StageOutcome`]. The slowest stage is the one that the others wait for: stages before it are blocked,
//! stages behind it starve, so it is the one that waited least.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
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
        let per_worker = |ns: &AtomicU64| Duration::from_nanos(ns.load(Ordering::Relaxed)).as_secs_f64() / f64::from(self.workers);
        let bytes = self.bytes.load(Ordering::Relaxed);
        let busy_seconds = per_worker(&self.busy_ns);
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let rate = if busy_seconds > 0.0 { bytes as f64 / busy_seconds } else { 0.0 };
        StageOutcome {
            stage: self.stage.to_owned(),
            bytes,
            busy_seconds,
            starved_seconds: per_worker(&self.starved_ns),
            blocked_seconds: per_worker(&self.blocked_ns),
            rate,
        }
    }
}

/// How full a stage that works for others is: requests on the wire out of those that there is room for. Below half of them it counts as waiting.
#[derive(Debug)]
pub(super) struct Occupancy {
    room: usize,
    state: Mutex<Occupied>,
}

#[derive(Debug)]
struct Occupied {
    count: usize,
    since: Instant,
    waited: Duration,
}

impl Occupancy {
    /// Nothing on the wire yet, room for `room` requests.
    pub(super) fn new(room: usize) -> Self {
        Self { room, state: Mutex::new(Occupied { count: 0, since: Instant::now(), waited: Duration::ZERO }) }
    }

    /// A request goes out.
    pub(super) fn enter(&self) {
        self.change(|count| count + 1);
    }

    /// A request is answered.
    pub(super) fn leave(&self) {
        self.change(|count| count.saturating_sub(1));
    }

    /// Time below half of the room, up to now.
    pub(super) fn waited(&self) -> Duration {
        self.change(|count| count)
    }

    fn change(&self, next: impl FnOnce(usize) -> usize) -> Duration {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if state.count * 2 < self.room {
            let elapsed = now.duration_since(state.since);
            state.waited += elapsed;
        }
        state.since = now;
        state.count = next(state.count);
        state.waited
    }
}

/// The stage that waited least, if anything flowed.
pub(super) fn slowest(stages: &[StageOutcome]) -> Option<String> {
    let waited = |stage: &StageOutcome| stage.starved_seconds + stage.blocked_seconds;
    let flowed = stages.iter().filter(|stage| stage.bytes > 0);
    flowed.min_by(|a, b| waited(a).total_cmp(&waited(b))).map(|stage| stage.stage.clone())
}

fn add(counter: &AtomicU64, time: Duration) {
    counter.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
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
        let upload = Gauge::new("upload", 1);
        upload.busy(50, Duration::from_secs(4));
        upload.starved(Duration::from_secs(6));
        let stages = [copy.outcome(), compress.outcome(), upload.outcome()];
        assert_eq!(slowest(&stages).as_deref(), Some("compress"));
        assert!((stages[1].busy_seconds - 9.0).abs() < 1e-9, "divided by the workers");
        assert!((stages[0].rate - 100.0).abs() < 1e-9);
    }

    #[test]
    fn nothing_flowed_nothing_is_slowest() {
        assert_eq!(slowest(&[Gauge::new("copy", 1).outcome()]), None);
    }
}
