use std::time::{Duration, Instant};

use serde_json::Value;

use super::*;
use crate::progress::{LaneMeter, Meter};

const EVIL: &str = "</script><script>alert('&\"')</script>";

/// A save that was recorded: two compressors, one of which coded two chunks, an upload, a phase and a retry. Every name that comes from outside is hostile.
fn recorded() -> Timeline {
    let origin = Instant::now()
        .checked_sub(Duration::from_secs(10))
        .expect("a clock of some age");
    let recorder = Recorder::new(origin);
    recorder.enter(Phase::Prepare);
    recorder.enter(Phase::Stream);
    recorder.name_lanes(vec![EVIL.to_owned()]);
    recorder.mark("retry", format!("attempt 1 failed: {EVIL}"));
    let compress = recorder.stage("compress", 2);
    compress.spent(Kind::Starved, Duration::from_millis(500), 0, None, None);
    compress.spent(
        Kind::Busy,
        Duration::from_millis(20),
        700,
        Some(0),
        Some("raw"),
    );
    compress.spent(
        Kind::Busy,
        Duration::from_millis(10),
        300,
        Some(0),
        Some("zero"),
    );
    std::thread::scope(|scope| {
        let work = || compress.spent(Kind::Blocked, Duration::from_millis(4), 0, None, None);
        let other = std::thread::Builder::new().name(EVIL.to_owned());
        other.spawn_scoped(scope, work).expect("a thread");
    });
    let upload = recorder.stage("upload", 1);
    upload.was(Kind::Busy, Duration::from_secs(2), Instant::now(), 500);
    upload.request(0, origin + Duration::from_secs(1), (0, 17), 500);
    upload.request(1, origin + Duration::from_secs(2), (0, 18), 0);
    upload.moving(Duration::from_secs(4));
    let meter = Meter::recorded(recorder.clone());
    meter.announce(vec![LaneMeter::new(EVIL, 1000)]);
    let watched = recorder.watch(vec![Probe::buffers("parts".to_owned(), || 3)]);
    recorder.sample(&meter);
    drop(watched);
    recorder.sample(&meter);
    recorder.timeline(Run {
        command: "checkpoint".to_owned(),
        subject: EVIL.to_owned(),
        bytes: Some(Bytes {
            raw: 1000,
            stored: 500,
        }),
        failure: Some(EVIL.to_owned()),
    })
}

fn page(timeline: &Timeline) -> String {
    let mut out = Vec::new();
    html::write(timeline, &mut out).expect("a Vec takes everything");
    String::from_utf8(out).expect("text")
}

fn page_data(page: &str) -> Value {
    let start = "<script type=\"application/json\" id=\"data\">";
    let (_, rest) = page.split_once(start).expect("the data");
    let (json, _) = rest.split_once("</script>").expect("its end");
    serde_json::from_str(json).expect("JSON")
}

#[test]
fn the_account_is_the_sum_of_what_the_threads_said() {
    let timeline = recorded();
    let [compress, upload] = &timeline.stages[..] else {
        panic!("{:?}", timeline.stages);
    };
    let is = |value: f64, expected: f64| {
        assert!((value - expected).abs() < 1e-9, "{value}, not {expected}")
    };
    is(compress.account.busy_seconds, 0.015);
    is(compress.account.starved_seconds, 0.25);
    is(compress.account.blocked_seconds, 0.002);
    assert_eq!(compress.account.bytes, 1000);
    assert_eq!((compress.tracks.len(), compress.requests.len()), (2, 0));
    let labels: Vec<_> = compress
        .labels
        .iter()
        .map(|way| (way.label, way.count, way.bytes))
        .collect();
    assert_eq!(labels, [("raw", 1, 700), ("zero", 1, 300)]);
    is(upload.account.busy_seconds, 2.0);
    // With any request out, not only while it counted as busy.
    is(upload.account.rate, 125.0);
    assert_eq!((upload.tracks.len(), upload.requests.len()), (1, 2));
    assert_eq!(upload.requests[0].spans[0].number(), Some(17));
    assert_eq!(upload.requests[1].labels, ["failed"]);
}

#[test]
fn phases_follow_one_another_from_the_begin_to_the_end() {
    let timeline = recorded();
    let phases: Vec<Phase> = timeline.phases.iter().map(|span| span.phase).collect();
    assert_eq!(phases, [Phase::Config, Phase::Prepare, Phase::Stream]);
    assert_eq!(timeline.phases[0].start_ns, 0);
    assert!(
        timeline
            .phases
            .windows(2)
            .all(|pair| pair[0].end_ns == pair[1].start_ns)
    );
    let end = timeline.phases.last().map(|span| u128::from(span.end_ns));
    assert_eq!(end, Some(timeline.total.as_nanos()));
}

#[test]
fn probes_are_looked_at_only_while_somebody_watches() {
    let timeline = recorded();
    let parts = timeline.series.iter().find(|series| series.name == "parts");
    let values: Vec<f64> = parts
        .expect("it was watched")
        .points
        .iter()
        .map(|(_, value)| *value)
        .collect();
    assert_eq!(values, [3.0]);
}

#[test]
fn counters_take_bounded_memory_and_cover_the_whole_run() {
    let recorder = Recorder::new(Instant::now());
    let meter = Meter::new();
    let first = recorder.sample(&meter);
    let _watched = recorder.watch(vec![Probe::buffers("ring".to_owned(), || 1)]);
    let mut last = first;
    for _ in 0..10_000 {
        last = recorder.sample(&meter);
    }
    assert!(last >= first * 8, "looked at as often as at first");
    let timeline = recorder.timeline(Run::default());
    assert_eq!(
        timeline.series.len(),
        1,
        "counters that stood still are no news"
    );
    let points = &timeline.series[0].points;
    assert!((256..=1024).contains(&points.len()), "{}", points.len());
    assert!(points.windows(2).all(|pair| pair[0].0 <= pair[1].0));
}

#[test]
fn marks_are_bounded_and_those_left_out_are_counted() {
    let recorder = Recorder::new(Instant::now());
    for _ in 0..1000 {
        recorder.mark("retry", "again".to_owned());
    }
    let timeline = recorder.timeline(Run::default());
    assert_eq!((timeline.marks.len(), timeline.marks_left_out), (256, 744));
}

#[test]
fn more_threads_than_tracks_have_sums_all_the_same() {
    let recorder = Recorder::new(Instant::now());
    let stage = recorder.stage("compress", 1000);
    std::thread::scope(|scope| {
        for _ in 0..1000 {
            let work = || stage.spent(Kind::Busy, Duration::from_millis(1), 1, None, None);
            scope.spawn(work).join().expect("it works");
        }
    });
    let timeline = recorder.timeline(Run::default());
    assert_eq!(timeline.stages[0].account.bytes, 1000);
    let with_spans = timeline.stages[0]
        .tracks
        .iter()
        .filter(|track| !track.spans.is_empty())
        .count();
    assert!((48..1000).contains(&with_spans), "{with_spans}");
}

#[test]
fn the_page_needs_nothing_and_says_it_all_in_text() {
    let page = page(&recorded());
    for outside in ["http:", "https:", "src=", "<link", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
    for tag in [
        "html", "head", "body", "style", "table", "section", "details", "dl",
    ] {
        let count = |text: String| page.matches(&text).count();
        assert_eq!(
            count(format!("<{tag}>")) + count(format!("<{tag} ")),
            count(format!("</{tag}>")),
            "{tag}"
        );
    }
    let text = page.split_once("<canvas").expect("a picture").0;
    for said in [
        "checkpoint",
        "Failed: ",
        "The slowest stage was upload",
        "prepare",
        "raw 1 chunks (700 B in 20 ms",
        "50 %",
        "125 B/s",
    ] {
        assert!(text.contains(said), "{said} is missing in {text}");
    }
}

#[test]
fn nothing_from_outside_becomes_part_of_the_page() {
    let page = page(&recorded());
    // Ours: the data and the program.
    assert_eq!(page.matches("<script").count(), 2);
    assert_eq!(page.matches("</script>").count(), 2);
    assert!(!page.contains("<script>alert"));
    let data = page_data(&page);
    assert_eq!(data["lanes"][0], EVIL);
    assert!(data["marks"].as_array().is_some_and(|marks| {
        marks
            .iter()
            .any(|mark| mark[2].as_str().is_some_and(|text| text.ends_with(EVIL)))
    }));
}

#[test]
fn the_picture_has_the_same_sums_as_the_table() {
    let timeline = recorded();
    let data = page_data(&page(&timeline));
    for (drawn, stage) in data["stages"]
        .as_array()
        .expect("stages")
        .iter()
        .zip(&timeline.stages)
    {
        let tracks = drawn["tracks"].as_array().expect("tracks");
        let spans = tracks
            .iter()
            .flat_map(|track| track["spans"].as_array().expect("spans"));
        let bytes: u64 = spans.map(|span| span[5].as_u64().expect("bytes")).sum();
        assert_eq!(bytes, stage.account.bytes, "{}", stage.account.stage);
    }
}

#[test]
fn the_trace_is_one_that_perfetto_loads() {
    let timeline = recorded();
    let mut out = Vec::new();
    trace::write(&timeline, &mut out).expect("a Vec takes everything");
    let trace: Value = serde_json::from_slice(&out).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    let of = |ph: &str| {
        events
            .iter()
            .filter(|event| event["ph"] == ph)
            .collect::<Vec<_>>()
    };
    for event in of("X") {
        let is_number = |key: &str| event[key].as_f64().is_some_and(|number| number >= 0.0);
        assert!(
            is_number("ts") && is_number("dur") && event["name"].is_string(),
            "{event}"
        );
    }
    assert_eq!(
        of("M")
            .iter()
            .filter(|event| event["name"] == "thread_name")
            .count(),
        1 + 2 + 3
    );
    assert!(of("C").iter().any(|event| event["args"]["value"] == 3.0));
    assert_eq!(of("i").len(), timeline.marks.len());
    let bytes: u64 = of("X")
        .iter()
        .filter(|event| {
            event["cat"]
                .as_str()
                .is_some_and(|cat| cat.starts_with("compress,"))
        })
        .filter_map(|event| event["args"]["bytes"].as_u64())
        .sum();
    assert_eq!(bytes, 1000);
    assert!(of("X").iter().any(|event| event["name"] == "upload 17"));
    assert!(trace["otherData"]["failure"] == EVIL);
}

#[test]
fn an_empty_run_has_a_page_and_a_trace() {
    let timeline = Recorder::new(Instant::now()).timeline(Run::default());
    assert!(page(&timeline).contains("Nothing flowed through the pipeline."));
    let mut out = Vec::new();
    trace::write(&timeline, &mut out).expect("a Vec takes everything");
    assert!(serde_json::from_slice::<Value>(&out).is_ok());
}

#[test]
fn a_counter_that_begins_anew_has_no_negative_rate() {
    let second = 1_000_000_000;
    let points = [
        (0, 0.0),
        (second, 50.0),
        (2 * second, 10.0),
        (3 * second, 40.0),
    ];
    let rates: Vec<f64> = trace::rates(&points)
        .iter()
        .map(|(_, rate)| *rate)
        .collect();
    assert_eq!(rates, [50.0, 0.0, 30.0]);
}
