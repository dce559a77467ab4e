//! Where the seconds of a run went: what every thread and request was doing when, what was in use, and a page that shows it.
//!
//! In: the durations that the pipeline's gauges hear of anyway, the phases, the counters of the meter, looked at now and then. Out: a [`Timeline`], which is plain data, and two
//! pure functions that write it: [`html`](html::write), one page that any browser opens without a network, and [`trace`](trace::write), Chrome's trace format for
//! Perfetto. What can fail: only the file that the caller writes to.
//!
//! The memory is bounded whatever the run: each track has room for so many spans, made before the target is locked; when it is full, neighbours become one span that
//! keeps the sum of each kind of time. So totals are exact, and only the grain gets coarser. A run without a timeline pays one branch per chunk.

pub mod html;
mod recorder;
mod sampler;
mod summary;
pub mod trace;
mod track;

#[cfg(test)]
mod tests;

use std::time::Duration;

use crate::error::Phase;
use crate::outcome::{Bytes, StageOutcome};

pub use recorder::Recorder;
pub(crate) use recorder::{Probe, StageLog, Watch};
pub use sampler::Sampler;
pub use summary::{StageShare, Summary};
pub(crate) use track::{Event, Kind};
pub use track::{LabelTotals, Span};

/// What a run was, for the headline.
#[derive(Debug, Clone, Default)]
pub struct Run {
    /// The command, as typed.
    pub command: String,
    /// The job, or whatever else it was about.
    pub subject: String,
    /// Raw and stored bytes, when the run got so far.
    pub bytes: Option<Bytes>,
    /// Why it failed; `None` when it did not.
    pub failure: Option<String>,
}

/// One run, recorded.
#[derive(Debug, Clone)]
pub struct Timeline {
    /// What it was.
    pub run: Run,
    /// When it began, in milliseconds of the Unix epoch.
    pub began_ms: u64,
    /// How long it took. All moments below are nanoseconds from the begin.
    pub total: Duration,
    /// The phases, in order.
    pub phases: Vec<PhaseSpan>,
    /// The stages of the pipeline, in the order of their begin.
    pub stages: Vec<StageTimeline>,
    /// What the lanes are called.
    pub lanes: Vec<String>,
    /// Counters over time.
    pub series: Vec<Series>,
    /// What happened at one moment, in order.
    pub marks: Vec<Mark>,
    /// Marks for which there was no room.
    pub marks_left_out: u64,
}

/// One phase under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PhaseSpan {
    /// Which.
    pub phase: Phase,
    /// Its begin.
    pub start_ns: u64,
    /// Its end.
    pub end_ns: u64,
}

/// What one stage did.
#[derive(Debug, Clone)]
pub struct StageTimeline {
    /// Its account, as the result of the run has it.
    pub account: StageOutcome,
    /// One per thread; of a stage that works on the wire one for the whole stage.
    pub tracks: Vec<TrackTimeline>,
    /// Requests on the wire, as many tracks as there were at once. Their time is in no sum.
    pub requests: Vec<TrackTimeline>,
    /// How chunks were coded, with the sum of each way.
    pub labels: Vec<LabelTotals>,
}

/// What one thread or place on the wire did.
#[derive(Debug, Clone)]
pub struct TrackTimeline {
    /// Name of the thread.
    pub name: String,
    /// In order; none overlaps the next.
    pub spans: Vec<Span>,
    /// What [`Span::label`] counts.
    pub labels: Vec<&'static str>,
}

/// A counter over time.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Counters of one chart have one unit.
    pub chart: &'static str,
    /// What is counted.
    pub name: String,
    /// Moments and values, in order.
    pub points: Vec<(u64, f64)>,
}

/// Something that happened at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// When.
    pub at_ns: u64,
    /// One word.
    pub kind: &'static str,
    /// What exactly.
    pub text: String,
}

/// Chart of the bytes that passed each stage: cumulative, shown as rates.
pub(crate) const MOVED: &str = "bytes per second";
/// Chart of the buffers that somebody holds.
pub(crate) const BUFFERS: &str = "buffers in use";
/// Chart of the requests on the wire.
pub(crate) const IN_FLIGHT: &str = "requests in flight";
/// Chart of how hard chunks are compressed.
pub(crate) const EFFORT: &str = "effort, CPU s per GB less";

/// Why a stage could not go on, in words.
fn why(stage: &str, kind: Kind) -> &'static str {
    match (stage, kind) {
        (_, Kind::Busy) => "at work",
        ("copy", Kind::Blocked) => "every ring buffer is full: compression is behind",
        ("copy", Kind::Starved) => {
            "no verified chunk is there: download or decompression is behind"
        }
        ("compress", Kind::Starved) => "no chunk is there: the copies are behind",
        ("compress", Kind::Blocked) => "no frame or part buffer is free: the uploads are behind",
        ("upload", Kind::Starved) => {
            "too few full parts to keep the wire busy: compression is behind"
        }
        ("download", Kind::Starved) => {
            "too few free buffers to keep the wire busy: decompression is behind"
        }
        ("decompress", Kind::Starved) => "nothing is fetched yet: the downloads are behind",
        ("decompress", Kind::Blocked) => "every ring buffer is full: the copies are behind",
        (_, Kind::Starved) => "its input is empty",
        (_, Kind::Blocked) => "the next stage is full",
    }
}
