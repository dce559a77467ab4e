//! How long a stage worked, starved or was blocked.
//!
//! In: durations, from every thread of the stage, or requests on the wire. Out: a [`StageOutcome`] each, and every duration to the timeline, when there is one. The slowest
//! stage is the one that was busy longest: the others waited for it, before it for room, behind it for input.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::driver::BufferPool;
use crate::outcome::StageOutcome;
use crate::progress::Meter;
use crate::timeline::{Kind, Probe, StageLog, Watch};

/// Counters of one stage.
#[derive(Debug)]
pub(super) struct Gauge {
    stage: &'static str,
    workers: u32,
    timeline: Option<StageLog>,
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
            timeline: None,
            bytes: AtomicU64::new(0),
            busy_ns: AtomicU64::new(0),
            starved_ns: AtomicU64::new(0),
            blocked_ns: AtomicU64::new(0),
        }
    }

    /// The same, told to the timeline of this meter, if it has one.
    pub(super) fn recorded(mut self, meter: &Meter) -> Self {
        let recorder = meter.recorder();
        self.timeline = recorder.map(|recorder| recorder.stage(self.stage, self.workers));
        self
    }

    /// `bytes` were worked on for so long, up to now.
    pub(super) fn busy(&self, bytes: u64, time: Duration) {
        self.worked(bytes, time, None, None);
    }

    /// The same of a chunk of this lane, which was coded so.
    pub(super) fn busy_as(&self, lane: usize, label: &'static str, bytes: u64, time: Duration) {
        self.worked(bytes, time, Some(lane), Some(label));
    }

    /// Waited so long for input, up to now.
    pub(super) fn starved(&self, time: Duration) {
        add(&self.starved_ns, time);
        if let Some(timeline) = &self.timeline {
            timeline.spent(Kind::Starved, time, 0, None, None);
        }
    }

    /// Waited so long for room in the next stage, up to now.
    pub(super) fn blocked(&self, time: Duration) {
        add(&self.blocked_ns, time);
        if let Some(timeline) = &self.timeline {
            timeline.spent(Kind::Blocked, time, 0, None, None);
        }
    }

    fn worked(&self, bytes: u64, time: Duration, lane: Option<usize>, label: Option<&'static str>) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        add(&self.busy_ns, time);
        if let Some(timeline) = &self.timeline {
            timeline.spent(Kind::Busy, time, bytes, lane, label);
        }
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
    timeline: Option<StageLog>,
    state: Mutex<WireState>,
}

/// A request on the wire.
#[derive(Debug)]
pub(super) struct Request {
    /// Which of the places on the wire it has, counted from 0.
    place: usize,
    /// Its lane, and the number of its part or first frame.
    what: (usize, u64),
    started: Instant,
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
    /// Which places on the wire are taken.
    places: Vec<bool>,
}

impl Wire {
    /// Nothing on the wire yet, room for `room` requests.
    pub(super) fn new(stage: &'static str, room: usize) -> Self {
        Self {
            stage,
            timeline: None,
            state: Mutex::new(WireState {
                room,
                count: 0,
                bytes: 0,
                since: Instant::now(),
                draining: false,
                busy: Duration::ZERO,
                waiting: Duration::ZERO,
                moving: Duration::ZERO,
                places: Vec::new(),
            }),
        }
    }

    /// The same, told to the timeline of this meter, if it has one.
    pub(super) fn recorded(mut self, meter: &Meter) -> Self {
        let recorder = meter.recorder();
        self.timeline = recorder.map(|recorder| recorder.stage(self.stage, 1));
        self
    }

    /// From now on there is room for so many requests.
    pub(super) fn set_room(&self, room: usize) {
        self.account(0).room = room;
    }

    /// A request goes out, for this lane; `number` is that of the part or of the first frame.
    pub(super) fn enter(&self, lane: usize, number: u64) -> Request {
        let mut state = self.account(0);
        state.count += 1;
        let free = state.places.iter().position(|is_taken| !is_taken);
        let place = free.unwrap_or(state.places.len());
        match free {
            Some(place) => state.places[place] = true,
            None => state.places.push(true),
        }
        Request {
            place,
            what: (lane, number),
            started: state.since,
        }
    }

    /// The request ended, and moved so many bytes; 0 when it failed.
    pub(super) fn leave(&self, request: &Request, bytes: u64) {
        let mut state = self.account(bytes);
        state.count = state.count.saturating_sub(1);
        state.bytes += bytes;
        state.places[request.place] = false;
        drop(state);
        if let Some(timeline) = &self.timeline {
            timeline.request(request.place, request.started, request.what, bytes);
        }
    }

    /// The last request is out.
    pub(super) fn drain(&self) {
        self.account(0).draining = true;
    }

    /// The stage's account up to now.
    pub(super) fn outcome(&self) -> StageOutcome {
        let state = self.account(0);
        StageOutcome {
            stage: self.stage.to_owned(),
            bytes: state.bytes,
            busy_seconds: state.busy.as_secs_f64(),
            starved_seconds: state.waiting.as_secs_f64(),
            blocked_seconds: 0.0,
            rate: rate(state.bytes, state.moving.as_secs_f64()),
        }
    }

    /// Books the time since the last change, at whose end so many bytes have been moved.
    fn account(&self, bytes: u64) -> MutexGuard<'_, WireState> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let elapsed = now.duration_since(state.since);
        let is_moving = state.count > 0;
        if is_moving {
            state.moving += elapsed;
        }
        let kind = if is_moving && (state.draining || state.count * 2 >= state.room) {
            state.busy += elapsed;
            Kind::Busy
        } else {
            state.waiting += elapsed;
            Kind::Starved
        };
        state.since = now;
        if let Some(timeline) = &self.timeline {
            timeline.was(kind, elapsed, now, bytes);
            timeline.moving(state.moving);
        }
        state
    }
}

/// Lets the timeline of this meter, if it has one, look at how many buffers of each pool are in use, as long as the answer lives.
pub(super) fn watch_pools(
    meter: &Meter,
    pools: impl IntoIterator<Item = (String, BufferPool)>,
) -> Option<Watch> {
    let recorder = meter.recorder()?;
    let probe = |(name, pool): (String, BufferPool)| {
        Probe::buffers(format!("{name}, of {}", pool.count()), move || {
            pool.count() - pool.free_count()
        })
    };
    Some(recorder.watch(pools.into_iter().map(probe).collect()))
}

/// What the stages of several runs did, one run after the other.
pub(crate) fn all_runs(runs: impl IntoIterator<Item = Vec<StageOutcome>>) -> Vec<StageOutcome> {
    let mut all: Vec<StageOutcome> = Vec::new();
    for stage in runs.into_iter().flatten() {
        match all.iter_mut().find(|seen| seen.stage == stage.stage) {
            None => all.push(stage),
            Some(seen) => {
                seen.bytes += stage.bytes;
                seen.busy_seconds += stage.busy_seconds;
                seen.starved_seconds += stage.starved_seconds;
                seen.blocked_seconds += stage.blocked_seconds;
                seen.rate = rate(seen.bytes, seen.busy_seconds);
            }
        }
    }
    all
}

/// The stage that was busy longest, if anything flowed.
pub(crate) fn slowest(stages: &[StageOutcome]) -> Option<String> {
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
    use std::sync::Arc;

    use super::*;
    use crate::timeline::{Recorder, Run};

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
    fn the_timeline_has_the_same_sums() {
        let recorder = Recorder::new(Instant::now());
        let meter = Meter::recorded(Arc::clone(&recorder));
        let compress = Gauge::new("compress", 2).recorded(&meter);
        let wire = Wire::new("upload", 1).recorded(&meter);
        let both_out = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let (compress, wire, both_out) = (&compress, &wire, &both_out);
                scope.spawn(move || {
                    for number in 0..5000 {
                        let request = wire.enter(thread, number);
                        if number == 0 {
                            both_out.wait();
                        }
                        compress.starved(Duration::from_micros(number % 90));
                        compress.busy_as(thread, "raw", 64, Duration::from_micros(90));
                        compress.busy(0, Duration::from_micros(2));
                        compress.blocked(Duration::from_micros(number % 7));
                        wire.leave(&request, 64);
                    }
                });
            }
        });
        let outcomes = [compress.outcome(), wire.outcome()];
        let timeline = recorder.timeline(Run::default());
        for (outcome, stage) in outcomes.iter().zip(&timeline.stages) {
            let recorded = &stage.account;
            assert_eq!(
                (&recorded.stage, recorded.bytes),
                (&outcome.stage, outcome.bytes)
            );
            let pairs = [
                (recorded.busy_seconds, outcome.busy_seconds),
                (recorded.starved_seconds, outcome.starved_seconds),
                (recorded.blocked_seconds, outcome.blocked_seconds),
            ];
            for (recorded, counted) in pairs {
                // Each event of the wire is cut to whole nanoseconds from the begin.
                assert!(
                    (recorded - counted).abs() < 1e-6 * counted.max(1.0),
                    "{recorded}, not {counted}"
                );
            }
            assert!((recorded.rate / outcome.rate - 1.0).abs() < 1e-3);
        }
        assert_eq!(
            timeline.stages[1].requests.len(),
            2,
            "as many as there were at once"
        );
    }

    #[test]
    fn pools_that_were_watched_are_let_go() {
        let recorder = Recorder::new(Instant::now());
        let meter = Meter::recorded(recorder);
        let pool = BufferPool::new(2, 64, None).unwrap();
        let watched = watch_pools(&meter, [("ring".to_owned(), pool.clone())]);
        assert_eq!(pool.handle_count(), 2);
        drop(watched);
        assert_eq!(pool.handle_count(), 1);
    }

    #[test]
    fn nothing_flowed_nothing_is_slowest() {
        assert_eq!(slowest(&[Gauge::new("copy", 1).outcome()]), None);
    }

    #[test]
    fn a_wire_that_could_take_more_waits_until_no_more_comes() {
        let pass = || std::thread::sleep(Duration::from_millis(2));
        let wire = Wire::new("upload", 4);
        let first = wire.enter(0, 1);
        pass();
        let few = wire.outcome();
        assert!(few.busy_seconds == 0.0 && few.starved_seconds > 0.0);
        let second = wire.enter(0, 2);
        let before = wire.outcome();
        pass();
        let half = wire.outcome();
        assert!(half.busy_seconds > 0.0);
        assert!((half.starved_seconds - before.starved_seconds).abs() < f64::EPSILON);
        wire.leave(&first, 10);
        wire.drain();
        let before = wire.outcome();
        pass();
        let drained = wire.outcome();
        assert!(
            drained.busy_seconds > before.busy_seconds,
            "the rest is its own"
        );
        wire.leave(&second, 10);
        assert!(wire.outcome().bytes == 20 && wire.outcome().rate > 0.0);
    }
}
