//! `--timeline FILE`, through the real binary: made before anything is touched, written whatever became of the job.

use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::support::scene::{Scene, assert_failed};

/// The trace's events of this kind.
fn events<'a>(trace: &'a Value, kind: &str) -> Vec<&'a Value> {
    let events = trace["traceEvents"].as_array().expect("events");
    events.iter().filter(|event| event["ph"] == kind).collect()
}

fn names(trace: &Value) -> Vec<String> {
    let named = events(trace, "M")
        .into_iter()
        .filter(|event| event["name"] == "thread_name");
    named
        .map(|event| event["args"]["name"].as_str().expect("a name").to_owned())
        .collect()
}

fn trace(path: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(path).expect("a trace")).expect("JSON")
}

#[test]
fn a_save_and_a_restore_show_every_thread_phase_and_byte() {
    let scene = Scene::new(&[]);
    let dir = TempDir::new().expect("a temporary folder");
    let path = |name: &str| dir.path().join(name).display().to_string();
    let mut target = scene.target();
    target.wait_for("step 2 ");
    let (out, back, read) = (path("out.json"), path("back.json"), path("read.html"));
    let cli = scene.saver("job", "").cli;
    let saved = cli.ok(&format!(
        "checkpoint --pid {} --timeline {out}",
        target.pid()
    ));
    cli.ok(&format!("restore --pid {} --timeline {back}", target.pid()));
    cli.ok(&format!("verify --timeline {read}"));

    let out = trace(&out);
    let there = names(&out);
    for name in [
        "phases",
        "copy-0",
        "copy-1",
        "compress-0",
        "compress-1",
        "upload",
        "upload 0",
    ] {
        assert!(
            there.iter().any(|found| found == name),
            "{name} is not in {there:?}"
        );
    }
    let phases: Vec<&str> = events(&out, "X")
        .iter()
        .filter(|event| event["cat"] == "phase")
        .filter_map(|event| event["name"].as_str())
        .collect();
    assert_eq!(
        phases,
        [
            "config", "prepare", "lock", "begin", "stream", "land", "commit", "complete"
        ]
    );
    for stage in ["copy", "compress", "upload"] {
        // Requests have a name of their own, and are in no sum.
        let is_request = |event: &Value| {
            event["name"]
                .as_str()
                .is_some_and(|name| name.starts_with("upload "))
        };
        // Whatever it mostly did: the wire may wait for more while a request moves its bytes.
        let start = format!("{stage},");
        let is_of_stage = |event: &Value| {
            event["cat"]
                .as_str()
                .is_some_and(|cat| cat.starts_with(&start))
        };
        let threads = |event: &&&Value| is_of_stage(event) && !is_request(event);
        let bytes: u64 = events(&out, "X")
            .iter()
            .filter(threads)
            .filter_map(|event| event["args"]["bytes"].as_u64())
            .sum();
        let told = saved["stages"]
            .as_array()
            .expect("stages")
            .iter()
            .find(|told| told["stage"] == stage);
        assert_eq!(
            Some(bytes),
            told.and_then(|told| told["bytes"].as_u64()),
            "{stage}"
        );
    }
    assert!(!events(&out, "C").is_empty(), "no counters");
    let marks: Vec<&str> = events(&out, "i")
        .iter()
        .filter_map(|event| event["cat"].as_str())
        .collect();
    assert_eq!(marks, ["first", "last"]);

    let there = names(&trace(&back));
    for name in ["download", "download 0", "decompress-0", "copy-0", "copy-1"] {
        assert!(
            there.iter().any(|found| found == name),
            "{name} is not in {there:?}"
        );
    }
    let page = fs::read_to_string(&read).expect("a page");
    assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));
    assert!(
        page.contains("<h1>verify job, image 00000003</h1>")
            && page.contains("The slowest stage was ")
    );
}

#[test]
fn a_file_that_cannot_be_made_is_refused_before_the_target_is_touched() {
    let scene = Scene::new(&[]);
    let target = scene.target();
    let saver = scene.saver("job", "");
    let run = saver.cli.run(&format!(
        "checkpoint --pid {} --timeline /nowhere/page.html",
        target.pid()
    ));
    assert_failed(
        "no such folder",
        &run,
        2,
        "config",
        &["/nowhere/page.html", "--timeline"],
    );
    assert_eq!(saver.calls("cuInit"), 0, "the driver was asked");
    let run = saver.cli.run("verify --timeline page.txt");
    assert_failed("no such format", &run, 2, "config", &[".html", ".json"]);
}

#[test]
fn a_save_that_fails_has_a_timeline_that_says_why() {
    let scene = Scene::new(&[]);
    let rules = json!([
        {"op": "UploadPart", "times": 2, "always": true, "action": {"status": 503, "code": "SlowDown"}},
        {"op": "UploadPart", "always": true, "action": {"status": 403, "code": "AccessDenied"}},
    ]);
    scene.server.set_rules(&rules);
    let dir = TempDir::new().expect("a temporary folder");
    let file = dir.path().join("lost.json");
    let target = scene.target();
    let save = format!(
        "checkpoint --pid {} --timeline {}",
        target.pid(),
        file.display()
    );
    let run = scene.saver("job", "").cli.run(&save);
    assert_failed("refused", &run, 12, "stream", &["AccessDenied"]);
    let trace = trace(&file.display().to_string());
    let failure = trace["otherData"]["failure"].as_str().expect("a failure");
    assert!(
        failure.contains("stream failed (exit 12)") && failure.contains("AccessDenied"),
        "{failure}"
    );
    let marks: Vec<&str> = events(&trace, "i")
        .iter()
        .filter_map(|event| event["cat"].as_str())
        .collect();
    assert!(marks.contains(&"slow down"), "{marks:?}");
    assert!(
        events(&trace, "X")
            .iter()
            .any(|event| event["cat"] == "compress,busy")
    );
}

#[test]
fn a_timeline_that_cannot_be_written_does_not_fail_the_save() {
    // A device that takes no byte, behind a name with an ending.
    let dir = TempDir::new().expect("a temporary folder");
    let full = dir.path().join("full.html");
    std::os::unix::fs::symlink("/dev/full", &full).expect("a link");
    let scene = Scene::new(&[]);
    let target = scene.target();
    let save = format!(
        "checkpoint --pid {} --timeline {}",
        target.pid(),
        full.display()
    );
    let run = scene.saver("job", "").cli.run(&save);
    assert_eq!(run.code, 0, "{run:?}");
    assert!(
        run.stderr.contains("could not be written"),
        "{}",
        run.stderr
    );
    assert_eq!(scene.images("job"), [1]);
}
