//! A timeline as Chrome's trace events, for <https://ui.perfetto.dev> and `chrome://tracing`.
//!
//! In: a [`Timeline`]. Out: one JSON object. What can fail: only the writer.
//!
//! Threads are tracks of "complete" events, counters are counter events (bytes as rates), phases have a track of their own, marks are instant events. A span that was
//! made of several says so in its `args`.

use std::io::{self, Write};

use serde_json::{Value, json};

use super::summary::seconds_of;
use super::{Kind, MOVED, Span, StageTimeline, Summary, Timeline, TrackTimeline, why};

/// Everything is one process.
const PID: u32 = 1;
/// The track of the phases.
const PHASES_TID: u32 = 1;

/// Writes the timeline.
///
/// # Errors
/// The writer's.
pub fn write(timeline: &Timeline, mut out: impl Write) -> io::Result<()> {
    let run = &timeline.run;
    let bytes = run.bytes.unwrap_or_default();
    let about = json!({
        "command": run.command,
        "subject": run.subject,
        "failure": run.failure,
        "verdict": Summary::of(timeline).verdict,
        "raw_bytes": bytes.raw,
        "stored_bytes": bytes.stored,
        "began_ms": timeline.began_ms,
        "marks_left_out": timeline.marks_left_out,
    });
    write!(
        out,
        "{{\"displayTimeUnit\":\"ms\",\"otherData\":{about},\"traceEvents\":["
    )?;
    let mut events = Events {
        out: &mut out,
        is_first: true,
    };
    events.name(
        "process_name",
        0,
        &format!("ckptstream {} {}", run.command, run.subject),
    )?;
    events.name("thread_name", PHASES_TID, "phases")?;
    for span in &timeline.phases {
        events.put(&json!({
            "ph": "X", "pid": PID, "tid": PHASES_TID, "name": span.phase.to_string(), "cat": "phase",
            "ts": micros(span.start_ns), "dur": micros(span.end_ns.saturating_sub(span.start_ns)),
        }))?;
    }
    let mut tid = PHASES_TID;
    for stage in &timeline.stages {
        for (track, is_request) in with_kind(stage) {
            tid += 1;
            events.name("thread_name", tid, &track.name)?;
            events.put(&json!({
                "ph": "M", "pid": PID, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid},
            }))?;
            for span in &track.spans {
                events.put(&complete(timeline, stage, track, is_request, span, tid))?;
            }
        }
    }
    for series in &timeline.series {
        let points = match series.chart {
            MOVED => rates(&series.points),
            _ => series.points.clone(),
        };
        for (at_ns, value) in points {
            events.put(&json!({
                "ph": "C", "pid": PID, "name": format!("{}: {}", series.chart, series.name), "ts": micros(at_ns),
                "args": {"value": value},
            }))?;
        }
    }
    for mark in &timeline.marks {
        events.put(&json!({
            "ph": "i", "s": "g", "pid": PID, "tid": PHASES_TID, "name": format!("{}: {}", mark.kind, mark.text), "cat": mark.kind,
            "ts": micros(mark.at_ns),
        }))?;
    }
    writeln!(out, "\n]}}")?;
    out.flush()
}

/// Bytes per second, between neighbouring points of a cumulative counter. One that was set back has begun anew.
pub(super) fn rates(points: &[(u64, f64)]) -> Vec<(u64, f64)> {
    let between = |pair: &[(u64, f64)]| {
        let [(from_ns, before), (to_ns, after)] = pair else {
            return None;
        };
        let seconds = seconds_of(to_ns.saturating_sub(*from_ns));
        (seconds > 0.0).then(|| (*to_ns, (after - before).max(0.0) / seconds))
    };
    points.windows(2).filter_map(between).collect()
}

/// The tracks of a stage, and whether they are requests.
fn with_kind(stage: &StageTimeline) -> impl Iterator<Item = (&TrackTimeline, bool)> {
    let threads = stage.tracks.iter().map(|track| (track, false));
    threads.chain(stage.requests.iter().map(|track| (track, true)))
}

fn complete(
    timeline: &Timeline,
    stage: &StageTimeline,
    track: &TrackTimeline,
    is_request: bool,
    span: &Span,
    tid: u32,
) -> Value {
    let name = &stage.account.stage;
    let label = span.label().and_then(|label| track.labels.get(label));
    let lane = span.lane().and_then(|lane| timeline.lanes.get(lane));
    let longest = [
        (span.busy_ns, Kind::Busy),
        (span.starved_ns, Kind::Starved),
        (span.blocked_ns, Kind::Blocked),
    ]
    .into_iter()
    .max_by_key(|(ns, _)| *ns)
    .map_or(Kind::Busy, |(_, kind)| kind);
    let kind = match longest {
        Kind::Busy => "busy",
        Kind::Starved => "starved",
        Kind::Blocked => "blocked",
    };
    let title = match (longest, label, span.number()) {
        (Kind::Busy, _, Some(number)) if is_request => format!("{name} {number}"),
        (Kind::Busy, Some(label), _) => (*label).to_owned(),
        _ => kind.to_owned(),
    };
    json!({
        "ph": "X", "pid": PID, "tid": tid, "name": title, "cat": format!("{name},{kind}"),
        "ts": micros(span.start_ns), "dur": micros(span.end_ns - span.start_ns),
        "args": {
            "why": why(name, longest), "bytes": span.bytes, "pieces": span.count, "gpu": lane, "label": label,
            "busy_us": micros(span.busy_ns), "starved_us": micros(span.starved_ns), "blocked_us": micros(span.blocked_ns),
        },
    })
}

/// The format's unit of time.
fn micros(ns: u64) -> f64 {
    (seconds_of(ns) * 1e9).round() / 1e3
}

struct Events<'a, W: Write> {
    out: &'a mut W,
    is_first: bool,
}

impl<W: Write> Events<'_, W> {
    fn put(&mut self, event: &Value) -> io::Result<()> {
        let comma = if std::mem::take(&mut self.is_first) {
            ""
        } else {
            ","
        };
        write!(self.out, "{comma}\n{event}")
    }

    fn name(&mut self, what: &str, tid: u32, name: &str) -> io::Result<()> {
        self.put(&json!({"ph": "M", "pid": PID, "tid": tid, "name": what, "args": {"name": name}}))
    }
}
