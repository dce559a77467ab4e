//! A timeline as one page that any browser opens, without a network and without anything beside it.
//!
//! In: a [`Timeline`]. Out: HTML with its style and script inside; the summary on top is plain text and needs no script. What can fail: only the writer.
//!
//! Everything that was not written here, names of jobs and messages of stores, is escaped, and the page's own policy forbids it to load or send anything.

use std::io::{self, Write};

use serde_json::{Value, json};

use super::summary::{percent, rate_text, seconds_of, seconds_text, size_text};
use super::trace::rates;
use super::{Kind, MOVED, Span, StageShare, StageTimeline, Summary, Timeline, TrackTimeline, why};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
/// Counters are averaged over a part of the run, or over this time if that is longer: chunks pass in steps, and steps are no rates.
const WINDOWS: f64 = 80.0;
const WINDOW_SECONDS_MIN: f64 = 0.1;

/// Writes the timeline.
///
/// # Errors
/// The writer's.
pub fn write(timeline: &Timeline, mut out: impl Write) -> io::Result<()> {
    let summary = Summary::of(timeline);
    let run = &timeline.run;
    let title = format!("{} {}", run.command, run.subject);
    let title = escaped(title.trim());
    write!(
        out,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>{title}: timeline</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
    )?;
    headline(&mut out, timeline, &summary, &title)?;
    writeln!(out, "<div class=\"tables\">")?;
    phases(&mut out, &summary)?;
    stages(&mut out, &summary)?;
    writeln!(out, "</div>")?;
    let data = in_script(&data(timeline).to_string());
    write!(
        out,
        "<section>\n<div id=\"tools\"><p>Wheel: zoom. Drag: zoom into that part. Shift and drag: move. Double click: all of it.</p>\
         <button id=\"all\" type=\"button\">All</button><button id=\"theme\" type=\"button\">Dark or light</button></div>\n\
         <div id=\"legend\"></div>\n<div id=\"plot\"><canvas id=\"canvas\"></canvas><div id=\"tip\" hidden></div></div>\n\
         <noscript><p>The picture needs the script of this page; the figures above do not.</p></noscript>\n</section>\n"
    )?;
    marks(&mut out, timeline)?;
    write!(
        out,
        "<script type=\"application/json\" id=\"data\">{data}</script>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n"
    )?;
    out.flush()
}

fn headline(
    out: &mut impl Write,
    timeline: &Timeline,
    summary: &Summary,
    title: &str,
) -> io::Result<()> {
    let mut facts = vec![("in all", seconds_text(summary.total_seconds))];
    if let Some(stage) = summary.slowest.and_then(|index| summary.stages.get(index)) {
        facts.push(("slowest stage", escaped(&stage.account.stage)));
    }
    if let Some(bytes) = timeline.run.bytes {
        facts.push(("raw", size_text(bytes.raw)));
        facts.push(("stored", size_text(bytes.stored)));
        if bytes.raw > 0 {
            let share = Ratio(bytes.stored, bytes.raw).share();
            facts.push(("of raw stored", percent(share)));
        }
    }
    writeln!(out, "<header>\n<h1>{title}</h1>")?;
    if let Some(failure) = &timeline.run.failure {
        writeln!(out, "<p class=\"failure\">Failed: {}</p>", escaped(failure))?;
    }
    writeln!(
        out,
        "<p class=\"verdict\">{}</p>\n<dl>",
        escaped(&summary.verdict)
    )?;
    for (name, value) in facts {
        writeln!(out, "<div><dt>{name}</dt><dd>{value}</dd></div>")?;
    }
    writeln!(out, "</dl>\n</header>")
}

fn phases(out: &mut impl Write, summary: &Summary) -> io::Result<()> {
    writeln!(
        out,
        "<section>\n<h2>Seconds per phase</h2>\n<table class=\"phases\">"
    )?;
    for (phase, seconds) in &summary.phases {
        let share = seconds / summary.total_seconds.max(f64::MIN_POSITIVE);
        writeln!(
            out,
            "<tr><th>{phase}</th><td>{}</td><td>{}</td><td class=\"bar\"><i class=\"phase\" style=\"width:{}%\"></i></td></tr>",
            seconds_text(*seconds),
            percent(share),
            width(share)
        )?;
    }
    writeln!(out, "</table>\n</section>")
}

fn stages(out: &mut impl Write, summary: &Summary) -> io::Result<()> {
    writeln!(
        out,
        "<section>\n<h2>What the stages did</h2>\n<table class=\"stages\">\n<tr><th></th><th>bytes in</th><th>rate at work</th><th>at work</th>\
         <th>no input</th><th>no room</th><th class=\"bar\"></th><th class=\"why\">waited because</th></tr>"
    )?;
    for (index, stage) in summary.stages.iter().enumerate() {
        let class = if summary.slowest == Some(index) {
            " class=\"slowest\""
        } else {
            ""
        };
        writeln!(
            out,
            "<tr{class}><th>{}</th><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td class=\"bar\"><i class=\"busy\" style=\"width:{}%\">\
             </i><i class=\"blocked\" style=\"width:{}%\"></i><i class=\"starved\" style=\"width:{}%\"></i></td><td class=\"why\">{}</td></tr>",
            escaped(&stage.account.stage),
            size_text(stage.account.bytes),
            rate_text(stage.account.rate),
            percent(stage.busy),
            percent(stage.starved),
            percent(stage.blocked),
            width(stage.busy),
            width(stage.blocked),
            width(stage.starved),
            escaped(stage.why.unwrap_or_default()),
        )?;
    }
    writeln!(out, "</table>")?;
    for stage in summary
        .stages
        .iter()
        .filter(|stage| !stage.labels.is_empty())
    {
        writeln!(out, "<p>{}</p>", escaped(&coded(stage)))?;
    }
    writeln!(out, "</section>")
}

/// `compress: zero 12 chunks (48 MiB, 0.01 s), raw …`
fn coded(stage: &StageShare) -> String {
    let ways = stage.labels.iter().map(|way| {
        format!(
            "{} {} chunks ({} in {} of CPU threads)",
            way.label,
            way.count,
            size_text(way.bytes),
            seconds_text(seconds_of(way.busy_ns))
        )
    });
    let ways: Vec<String> = ways.collect();
    format!("{}: {}.", stage.account.stage, ways.join(", "))
}

fn marks(out: &mut impl Write, timeline: &Timeline) -> io::Result<()> {
    if timeline.marks.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "<section>\n<details>\n<summary>What happened when ({})</summary>\n<table class=\"marks\">",
        timeline.marks.len()
    )?;
    for mark in &timeline.marks {
        writeln!(
            out,
            "<tr><td>{:.3} s</td><th>{}</th><td>{}</td></tr>",
            seconds_of(mark.at_ns),
            escaped(mark.kind),
            escaped(&mark.text)
        )?;
    }
    writeln!(out, "</table>")?;
    if timeline.marks_left_out > 0 {
        writeln!(
            out,
            "<p>And {} more, which were not kept.</p>",
            timeline.marks_left_out
        )?;
    }
    writeln!(out, "</details>\n</section>")
}

/// What the script draws. Times in microseconds.
fn data(timeline: &Timeline) -> Value {
    let phases = timeline
        .phases
        .iter()
        .map(|span| json!([span.phase.to_string(), us(span.start_ns), us(span.end_ns)]));
    let stages = timeline.stages.iter().map(stage_data);
    let window = seconds_of(u64::try_from(timeline.total.as_nanos()).unwrap_or(u64::MAX)) / WINDOWS;
    let series = timeline.series.iter().map(|series| {
        let points = match series.chart {
            MOVED => rates(&series.points),
            _ => series.points.clone(),
        };
        let points = smoothed(&points, window.max(WINDOW_SECONDS_MIN));
        let points = points
            .iter()
            .map(|(at_ns, value)| json!([us(*at_ns), value]));
        json!({"chart": series.chart, "name": series.name, "points": points.collect::<Vec<_>>()})
    });
    let marks = timeline
        .marks
        .iter()
        .map(|mark| json!([us(mark.at_ns), mark.kind, mark.text]));
    json!({
        "total": u64::try_from(timeline.total.as_micros()).unwrap_or(u64::MAX),
        "phases": phases.collect::<Vec<_>>(),
        "stages": stages.collect::<Vec<_>>(),
        "lanes": timeline.lanes,
        "series": series.collect::<Vec<_>>(),
        "bytesChart": MOVED,
        "marks": marks.collect::<Vec<_>>(),
    })
}

fn stage_data(stage: &StageTimeline) -> Value {
    let name = &stage.account.stage;
    let tracks =
        |tracks: &[TrackTimeline]| -> Vec<Value> { tracks.iter().map(track_data).collect() };
    json!({
        "name": name,
        "starved": why(name, Kind::Starved),
        "blocked": why(name, Kind::Blocked),
        "tracks": tracks(&stage.tracks),
        "requests": tracks(&stage.requests),
    })
}

fn track_data(track: &TrackTimeline) -> Value {
    let spans: Vec<Value> = track.spans.iter().map(span_data).collect();
    json!({"name": track.name, "labels": track.labels, "spans": spans})
}

/// Begin, length, the three kinds of time, bytes, pieces, lane, label, number; -1 where there is none.
fn span_data(span: &Span) -> Value {
    let or_none = |index: Option<usize>| index.map_or(json!(-1), |index| json!(index));
    json!([
        us(span.start_ns),
        us(span.end_ns - span.start_ns),
        us(span.busy_ns),
        us(span.starved_ns),
        us(span.blocked_ns),
        span.bytes,
        span.count,
        or_none(span.lane()),
        or_none(span.label()),
        span.number().map_or(json!(-1), |number| json!(number)),
    ])
}

/// Each value averaged over a window around its moment.
fn smoothed(points: &[(u64, f64)], window_seconds: f64) -> Vec<(u64, f64)> {
    let middle = |index: usize| {
        let at = seconds_of(points[index].0);
        let is_near =
            |point: &&(u64, f64)| (seconds_of(point.0) - at).abs() <= window_seconds / 2.0;
        let back = points[..index].iter().rev().take_while(is_near);
        let near = back.chain(points[index..].iter().take_while(is_near));
        // The looks are equally far apart but for the scheduler's moods.
        let (count, sum) = near.fold((0.0, 0.0), |(count, sum), point| {
            (count + 1.0, sum + point.1)
        });
        let mean = sum / f64::max(count, 1.0);
        (points[index].0, (mean * 100.0).round() / 100.0)
    };
    (0..points.len()).map(middle).collect()
}

/// Microseconds: nothing shorter is seen on a screen.
fn us(ns: u64) -> u64 {
    ns / 1000
}

/// A share as a CSS width.
fn width(share: f64) -> String {
    format!("{:.2}", (share * 100.0).clamp(0.0, 100.0))
}

/// Two counts whose ratio is shown.
struct Ratio(u64, u64);

impl Ratio {
    #[expect(clippy::cast_precision_loss, reason = "shown with two digits")]
    fn share(&self) -> f64 {
        self.0 as f64 / self.1 as f64
    }
}

/// Text for an element or an attribute.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// JSON that no HTML parser can take for the end of its script.
fn in_script(json: &str) -> String {
    json.replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
}
