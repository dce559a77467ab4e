//! Keeps what a run's threads say they did.
//!
//! In: durations that have just ended, each on the thread that spent them; requests; phases; marks; probes of what is in use. Out: a [`Timeline`]. Nothing here can fail. A thread writes to a
//! track of its own, behind a lock that nobody else takes before the end, into memory that was set aside when the recorder was made.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::track::{Log, Span};
use super::{
    BUFFERS, Event, IN_FLIGHT, Kind, LabelTotals, MOVED, Mark, PhaseSpan, Run, Series,
    StageTimeline, Timeline, TrackTimeline,
};
use crate::error::Phase;
use crate::outcome::StageOutcome;
use crate::progress::Meter;

/// Spans of all tracks together: 6 MiB, set aside at once, of which the kernel gives what is written to.
const SPANS_MAX: usize = 96 << 10;
/// Tracks besides those of the CPU threads: GPUs, requests at once. Threads beyond all these have only sums.
const TRACKS_BESIDES_THREADS: usize = 48;
/// Most marks: a store that is ill for long would fill the memory with retries.
const MARKS_MAX: usize = 256;
/// Most points of a counter. When one has as many, every second point of all goes, and half as many come.
const POINTS_MAX: usize = 1024;
/// Most often that counters are looked at.
const SAMPLE_EVERY: Duration = Duration::from_millis(20);

/// One run's recorder.
#[derive(Debug)]
pub struct Recorder {
    origin: Instant,
    began_ms: u64,
    state: Mutex<State>,
    counters: Mutex<Counters>,
}

#[derive(Debug, Default)]
struct State {
    /// Memory for tracks to come.
    spare: Vec<Vec<Span>>,
    stages: Vec<Arc<Stage>>,
    tracks: Vec<Arc<Track>>,
    phases: Vec<(Phase, u64)>,
    lanes: Vec<String>,
    marks: Vec<Mark>,
    marks_left_out: u64,
}

#[derive(Debug)]
struct Counters {
    every: Duration,
    series: Vec<Series>,
    probes: Vec<(u64, Vec<Probe>)>,
    /// Number of the next probes.
    next: u64,
}

/// A counter that somebody has to look at.
pub(crate) struct Probe {
    pub(crate) chart: &'static str,
    pub(crate) name: String,
    pub(crate) read: Box<dyn Fn() -> f64 + Send>,
}

impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Probe")
            .field("chart", &self.chart)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// Probes are looked at as long as this lives: what they look at is then let go.
#[derive(Debug)]
pub(crate) struct Watch {
    recorder: Arc<Recorder>,
    number: u64,
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut counters = self.recorder.counters();
        let (gone, kept) = std::mem::take(&mut counters.probes)
            .into_iter()
            .partition(|(number, _)| *number == self.number);
        counters.probes = kept;
        drop(counters);
        let _looked_at_without_the_lock: Vec<(u64, Vec<Probe>)> = gone;
    }
}

#[derive(Debug)]
struct Stage {
    name: &'static str,
    worker_count: u32,
    /// Of a stage on the wire: time with any request out, for the rate.
    moving: Mutex<Option<Duration>>,
}

#[derive(Debug)]
struct Track {
    stage: Arc<Stage>,
    name: String,
    owner: Owner,
    log: Mutex<Log>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Thread(ThreadId),
    /// The whole stage.
    Stage,
    /// A place on the wire, counted from 0.
    Place(usize),
}

thread_local! {
    /// This thread's track, which is nearly always the one that is asked for.
    static OWN: RefCell<Option<Arc<Track>>> = const { RefCell::new(None) };
}

/// Where a stage says what it did.
#[derive(Debug)]
pub(crate) struct StageLog {
    recorder: Arc<Recorder>,
    stage: Arc<Stage>,
}

impl StageLog {
    /// The calling thread has spent so long up to now, on so many bytes, of this lane, in this way.
    pub(crate) fn spent(
        &self,
        kind: Kind,
        time: Duration,
        bytes: u64,
        lane: Option<usize>,
        label: Option<&'static str>,
    ) {
        let end_ns = self.recorder.since_begin(Instant::now());
        let event = Event {
            kind,
            start_ns: end_ns.saturating_sub(nanos(time)),
            end_ns,
            bytes,
            lane,
            label,
            number: None,
            goes_on: false,
        };
        OWN.with_borrow_mut(|own| {
            let is_own = |track: &&mut Arc<Track>| Arc::ptr_eq(&track.stage, &self.stage);
            let track = match own.as_mut().filter(is_own) {
                Some(track) => track,
                None => own.insert(self.track_of_thread()),
            };
            track.lock().push(&event);
        });
    }

    /// The whole stage has been so, up to `now`.
    pub(crate) fn was(&self, kind: Kind, time: Duration, now: Instant, bytes: u64) {
        let end_ns = self.recorder.since_begin(now);
        let event = Event {
            kind,
            start_ns: end_ns.saturating_sub(nanos(time)),
            end_ns,
            bytes,
            lane: None,
            label: None,
            number: None,
            goes_on: true,
        };
        let name = || self.stage.name.to_owned();
        self.track(Owner::Stage, name).lock().push(&event);
    }

    /// A request on the wire has ended.
    pub(crate) fn request(&self, place: usize, started: Instant, what: (usize, u64), bytes: u64) {
        let (lane, number) = what;
        let event = Event {
            kind: Kind::Busy,
            start_ns: self.recorder.since_begin(started),
            end_ns: self.recorder.since_begin(Instant::now()),
            bytes,
            lane: Some(lane),
            label: (bytes == 0).then_some("failed"),
            number: Some(number),
            goes_on: false,
        };
        let name = || format!("{} {place}", self.stage.name);
        self.track(Owner::Place(place), name).lock().push(&event);
    }

    /// Requests have been out for so long in all.
    pub(crate) fn moving(&self, time: Duration) {
        *self
            .stage
            .moving
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(time);
    }

    fn track_of_thread(&self) -> Arc<Track> {
        let thread = std::thread::current();
        let name = || thread.name().unwrap_or("thread").to_owned();
        self.track(Owner::Thread(thread.id()), name)
    }

    fn track(&self, owner: Owner, name: impl FnOnce() -> String) -> Arc<Track> {
        let mut state = self.recorder.state();
        let found = state
            .tracks
            .iter()
            .find(|track| track.owner == owner && Arc::ptr_eq(&track.stage, &self.stage));
        if let Some(track) = found {
            return Arc::clone(track);
        }
        let track = Arc::new(Track {
            stage: Arc::clone(&self.stage),
            name: name(),
            owner,
            log: Mutex::new(Log::new(state.spare.pop().unwrap_or_default())),
        });
        state.tracks.push(Arc::clone(&track));
        track
    }
}

impl Track {
    fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn timeline(&self) -> TrackTimeline {
        let log = self.lock();
        TrackTimeline {
            name: self.name.clone(),
            spans: log.spans().to_vec(),
            labels: log.labels().iter().map(|totals| totals.label).collect(),
        }
    }
}

impl Recorder {
    /// A recorder of a run that began at `origin`. It is in phase `config` until somebody says otherwise.
    pub fn new(origin: Instant) -> Arc<Self> {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        // A save that resumes has the threads of both ways.
        let track_count = cpus.saturating_mul(2) + TRACKS_BESIDES_THREADS;
        let spans_per_track = SPANS_MAX / track_count;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let began_ms = now.unwrap_or_default().saturating_sub(origin.elapsed());
        Arc::new(Self {
            origin,
            began_ms: u64::try_from(began_ms.as_millis()).unwrap_or(u64::MAX),
            state: Mutex::new(State {
                spare: (0..track_count)
                    .map(|_| Vec::with_capacity(spans_per_track))
                    .collect(),
                tracks: Vec::with_capacity(track_count),
                phases: vec![(Phase::Config, 0)],
                ..State::default()
            }),
            counters: Mutex::new(Counters {
                every: SAMPLE_EVERY,
                series: Vec::new(),
                probes: Vec::new(),
                next: 0,
            }),
        })
    }

    /// A stage begins.
    pub(crate) fn stage(self: &Arc<Self>, name: &'static str, worker_count: u32) -> StageLog {
        let stage = Arc::new(Stage {
            name,
            worker_count,
            moving: Mutex::new(None),
        });
        self.state().stages.push(Arc::clone(&stage));
        StageLog {
            recorder: Arc::clone(self),
            stage,
        }
    }

    /// A phase begins.
    pub(crate) fn enter(&self, phase: Phase) {
        let now = self.since_begin(Instant::now());
        self.state().phases.push((phase, now));
    }

    /// What the lanes are called.
    pub(crate) fn name_lanes(&self, names: Vec<String>) {
        self.state().lanes = names;
    }

    /// Something happened.
    pub(crate) fn mark(&self, kind: &'static str, text: String) {
        let at_ns = self.since_begin(Instant::now());
        let mut state = self.state();
        if state.marks.len() < MARKS_MAX {
            state.marks.push(Mark { at_ns, kind, text });
        } else {
            state.marks_left_out += 1;
        }
    }

    /// These are looked at with every sample as long as the answer lives.
    pub(crate) fn watch(self: &Arc<Self>, probes: Vec<Probe>) -> Watch {
        let mut counters = self.counters();
        let number = counters.next;
        counters.next += 1;
        counters.probes.push((number, probes));
        drop(counters);
        Watch {
            recorder: Arc::clone(self),
            number,
        }
    }

    /// Looks at the meter and the probes. Returns when the next look is due.
    pub(super) fn sample(&self, meter: &Meter) -> Duration {
        let view = meter.view();
        let at_ns = self.since_begin(Instant::now());
        let mut counters = self.counters();
        for (name, value) in view.totals() {
            counters.add(MOVED, name, at_ns, float(value));
        }
        counters.add(IN_FLIGHT, "in flight", at_ns, f64::from(view.in_flight));
        let probes = std::mem::take(&mut counters.probes);
        for probe in probes.iter().flat_map(|(_, probes)| probes) {
            counters.add(probe.chart, &probe.name, at_ns, (probe.read)());
        }
        counters.probes = probes;
        counters.thin_out();
        counters.every
    }

    /// What was recorded up to now.
    pub fn timeline(&self, run: Run) -> Timeline {
        let total = self.origin.elapsed();
        let state = self.state();
        let ends = state.phases.iter().skip(1).map(|(_, start)| *start);
        let phases = state.phases.iter().zip(ends.chain([nanos(total)]));
        let phases = phases.map(|(&(phase, start_ns), end_ns)| PhaseSpan {
            phase,
            start_ns,
            end_ns,
        });
        let stages: Vec<StageTimeline> = state
            .stages
            .iter()
            .map(|stage| stage_timeline(stage, &state.tracks))
            // A way back that only reads has copiers that never come.
            .filter(|stage| !stage.tracks.is_empty())
            .collect();
        let mut marks = state.marks.clone();
        marks.extend(stages.iter().flat_map(ends_of_requests));
        marks.sort_by_key(|mark| mark.at_ns);
        // What never counted anything has no place in a chart.
        let is_alive = |series: &&Series| series.points.iter().any(|(_, value)| *value != 0.0);
        let series = self
            .counters()
            .series
            .iter()
            .filter(is_alive)
            .cloned()
            .collect();
        Timeline {
            run,
            began_ms: self.began_ms,
            total,
            phases: phases.collect(),
            stages,
            lanes: state.lanes.clone(),
            series,
            marks,
            marks_left_out: state.marks_left_out,
        }
    }

    fn since_begin(&self, moment: Instant) -> u64 {
        nanos(moment.saturating_duration_since(self.origin))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counters(&self) -> MutexGuard<'_, Counters> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Probe {
    /// How many buffers are in use, says `read`.
    pub(crate) fn buffers(name: String, read: impl Fn() -> usize + Send + 'static) -> Self {
        Self {
            chart: BUFFERS,
            name,
            read: Box::new(move || float(u64::try_from(read()).unwrap_or(u64::MAX))),
        }
    }
}

impl Counters {
    fn add(&mut self, chart: &'static str, name: &str, at_ns: u64, value: f64) {
        let known = self
            .series
            .iter_mut()
            .find(|series| series.chart == chart && series.name == name);
        match known {
            Some(series) => series.points.push((at_ns, value)),
            None => {
                let mut points = Vec::with_capacity(POINTS_MAX);
                points.push((at_ns, value));
                self.series.push(Series {
                    chart,
                    name: name.to_owned(),
                    points,
                });
            }
        }
    }

    fn thin_out(&mut self) {
        if self
            .series
            .iter()
            .all(|series| series.points.len() < POINTS_MAX)
        {
            return;
        }
        self.every *= 2;
        for series in &mut self.series {
            let mut index = 0;
            series.points.retain(|_| {
                index += 1;
                index % 2 == 0
            });
        }
    }
}

fn stage_timeline(stage: &Arc<Stage>, tracks: &[Arc<Track>]) -> StageTimeline {
    let mine = || {
        tracks
            .iter()
            .filter(|track| Arc::ptr_eq(&track.stage, stage))
    };
    let is_request = |track: &&Arc<Track>| matches!(track.owner, Owner::Place(_));
    let mut account = StageOutcome {
        stage: stage.name.to_owned(),
        bytes: 0,
        busy_seconds: 0.0,
        starved_seconds: 0.0,
        blocked_seconds: 0.0,
        rate: 0.0,
    };
    let mut labels: Vec<LabelTotals> = Vec::new();
    let per_worker =
        |ns: u64| Duration::from_nanos(ns).as_secs_f64() / f64::from(stage.worker_count);
    for track in mine().filter(|track| !is_request(track)) {
        let log = track.lock();
        let totals = log.totals();
        account.bytes += totals.bytes;
        account.busy_seconds += per_worker(totals.busy_ns);
        account.starved_seconds += per_worker(totals.starved_ns);
        account.blocked_seconds += per_worker(totals.blocked_ns);
        for label in log.labels() {
            match labels.iter_mut().find(|known| known.label == label.label) {
                Some(known) => {
                    known.count += label.count;
                    known.bytes += label.bytes;
                    known.busy_ns += label.busy_ns;
                }
                None => labels.push(*label),
            }
        }
    }
    let moving = *stage.moving.lock().unwrap_or_else(PoisonError::into_inner);
    let rate_seconds = moving.map_or(account.busy_seconds, |moving| moving.as_secs_f64());
    if rate_seconds > 0.0 {
        account.rate = float(account.bytes) / rate_seconds;
    }
    let by_name = |tracks: &mut Vec<&Arc<Track>>| {
        // Threads come to the recorder in any order; `copy-10` stands behind `copy-9`.
        tracks.sort_by_key(|track| (track.name.len(), track.name.clone()));
        tracks.iter().map(|track| track.timeline()).collect()
    };
    StageTimeline {
        account,
        tracks: by_name(&mut mine().filter(|track| !is_request(track)).collect()),
        requests: by_name(&mut mine().filter(is_request).collect()),
        labels,
    }
}

/// The first request of a stage, and the last that did what it was to do.
fn ends_of_requests(stage: &StageTimeline) -> Vec<Mark> {
    let spans = || stage.requests.iter().flat_map(|track| &track.spans);
    let first = spans().map(|span| span.start_ns).min();
    let last = spans()
        .filter(|span| span.bytes > 0)
        .map(|span| span.end_ns)
        .max();
    let name = &stage.account.stage;
    let mark = |at_ns, kind, what: &str| Mark {
        at_ns,
        kind,
        text: format!("{name}: {what}"),
    };
    let first = first.map(|at| mark(at, "first", "the first request goes out"));
    let last = last.map(|at| mark(at, "last", "the last answer is here"));
    first.into_iter().chain(last).collect()
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[expect(clippy::cast_precision_loss, reason = "for charts and rates")]
fn float(count: u64) -> f64 {
    count as f64
}
