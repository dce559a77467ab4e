//! Counters that the pipeline writes and the command line reads.
//!
//! In: bytes as they pass each stage. Out: the same numbers, to whoever draws a bar or prints a line. Nothing here can fail,
//! and nothing here waits: a meter that nobody reads costs one relaxed addition per chunk.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::error::Phase;
use crate::timeline::Recorder;

/// Progress of one GPU's extent. All values in bytes of the raw extent, except `stored`.
///
/// A save goes `copied` → `coded` → `acknowledged`, a restore `fetched` → `coded` → `copied`, a reading back `fetched` → `coded`; the counter of a step that
/// is not on the way stays 0.
#[derive(Debug, Default)]
pub struct LaneMeter {
    /// What to call it: `GPU 0` and the like.
    pub label: String,
    /// Raw bytes that this lane has to move.
    pub total: u64,
    /// Restore: frames fetched from the store.
    pub fetched: AtomicU64,
    /// Copied off the GPU (save) or onto it (restore).
    pub copied: AtomicU64,
    /// Through the codec: compressed (save), or decompressed and verified (restore).
    pub coded: AtomicU64,
    /// Save: in parts that the store has acknowledged. What is acknowledged has not landed before its upload is complete and was looked at.
    pub acknowledged: AtomicU64,
    /// Compressed bytes acknowledged by (save) or received from (restore) the store.
    pub stored: AtomicU64,
}

impl LaneMeter {
    /// A meter for one lane of `total` raw bytes.
    pub fn new(label: impl Into<String>, total: u64) -> Arc<Self> {
        Arc::new(Self {
            label: label.into(),
            total,
            ..Self::default()
        })
    }
}

/// Progress of a whole save or restore.
#[derive(Debug, Default)]
pub struct Meter {
    state: Mutex<MeterState>,
    /// Keeps the timeline, when somebody wants one.
    recorder: Option<Arc<Recorder>>,
    /// Parts on their way to the store, or ranges on their way from it, at this moment.
    pub in_flight: AtomicU32,
    /// Requests that were tried again since the start.
    pub retries: AtomicU64,
    /// How often the store asked for fewer requests.
    pub slow_downs: AtomicU64,
    /// Uploads that could not be aborted, and stay in the store.
    pub failed_aborts: AtomicU64,
}

#[derive(Debug, Default)]
struct MeterState {
    phases: Vec<Phase>,
    lanes: Vec<Arc<LaneMeter>>,
    due: Option<Instant>,
    retries: BTreeMap<&'static str, u64>,
}

/// One look at a [`Meter`].
#[derive(Debug, Clone)]
pub struct MeterView {
    /// Every phase entered so far, in order; the last is under way. Kept whole so that a reader that looks seldom misses none.
    pub phases: Vec<Phase>,
    /// The lanes, in the order they were announced.
    pub lanes: Vec<Arc<LaneMeter>>,
    /// Requests on the wire.
    pub in_flight: u32,
    /// Requests tried again.
    pub retries: u64,
    /// How often the store asked for fewer requests.
    pub slow_downs: u64,
}

impl MeterView {
    /// The phase under way; `None` before the first.
    pub fn phase(&self) -> Option<Phase> {
        self.phases.last().copied()
    }

    /// The counters of all lanes together, by name.
    pub fn totals(&self) -> [(&'static str, u64); 5] {
        let sum = |counter: fn(&LaneMeter) -> &AtomicU64| {
            let counters = self.lanes.iter().map(|lane| counter(lane));
            counters
                .map(|counter| counter.load(Ordering::Relaxed))
                .sum()
        };
        [
            ("fetched", sum(|lane| &lane.fetched)),
            ("copied", sum(|lane| &lane.copied)),
            ("coded", sum(|lane| &lane.coded)),
            ("acknowledged", sum(|lane| &lane.acknowledged)),
            ("stored", sum(|lane| &lane.stored)),
        ]
    }
}

impl Meter {
    /// A meter with no lanes yet.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// A meter whose run is recorded.
    pub fn recorded(recorder: Arc<Recorder>) -> Arc<Self> {
        Arc::new(Self {
            recorder: Some(recorder),
            ..Self::default()
        })
    }

    /// Keeps the timeline, when somebody wants one.
    pub fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.recorder.as_ref()
    }

    /// Counts a request that is tried again for a cause of this kind; `what` says more, when somebody wants to know.
    pub fn retried(&self, kind: &'static str, what: impl FnOnce() -> String) {
        self.retries.fetch_add(1, Ordering::Relaxed);
        *self.lock().retries.entry(kind).or_default() += 1;
        if let Some(recorder) = &self.recorder {
            recorder.mark(kind, what());
        }
    }

    /// The transfer has to be over by then, if that is known; it may change while it is under way.
    pub fn set_due(&self, due: Option<Instant>) {
        self.lock().due = due;
    }

    /// See [`Meter::set_due`].
    pub fn due(&self) -> Option<Instant> {
        self.lock().due
    }

    /// Announces the phase that begins now.
    pub fn enter(&self, phase: Phase) {
        if let Some(recorder) = &self.recorder {
            recorder.enter(phase);
        }
        self.lock().phases.push(phase);
    }

    /// Announces the lanes of the transfer that begins now, in place of any before.
    pub fn announce(&self, lanes: Vec<Arc<LaneMeter>>) {
        if let Some(recorder) = &self.recorder {
            recorder.name_lanes(lanes.iter().map(|lane| lane.label.clone()).collect());
        }
        self.lock().lanes = lanes;
    }

    /// Requests that were tried again, by the kind of the cause.
    pub fn retries_by_cause(&self) -> BTreeMap<&'static str, u64> {
        self.lock().retries.clone()
    }

    /// What the meter says now.
    pub fn view(&self) -> MeterView {
        let state = self.lock();
        MeterView {
            phases: state.phases.clone(),
            lanes: state.lanes.clone(),
            in_flight: self.in_flight.load(Ordering::Relaxed),
            retries: self.retries.load(Ordering::Relaxed),
            slow_downs: self.slow_downs.load(Ordering::Relaxed),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, MeterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
