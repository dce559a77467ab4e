//! `ckptstream bench` as a script runs it: what it tells, and that nothing stays in the store.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::support::scene::{Watched, cause, until};
use crate::support::{Ckptstream, Node, S3Server};

const MIB: u64 = 1 << 20;

/// A bench of small things on two emulated GPUs.
fn small(server: &S3Server) -> Ckptstream {
    let node = Node::new("gpus=2;memory=128MiB");
    Ckptstream::new(server, "job")
        .on(&node)
        .config("pipeline.chunk_size = '1MiB'\npipeline.threads = 2\n")
}

fn rows<'a>(report: &'a Value, list: &str) -> &'a [Value] {
    report[list].as_array().expect("a list").as_slice()
}

fn number(row: &Value, name: &str) -> f64 {
    let number = row[name].as_f64();
    number.unwrap_or_else(|| panic!("{name} of {row}"))
}

/// The names in a column, each once.
fn names<'a>(rows: &'a [Value], column: &str) -> BTreeSet<&'a str> {
    rows.iter().filter_map(|row| row[column].as_str()).collect()
}

/// Every object that was made is deleted, every upload completed or aborted, and nothing lies outside of the bench's own prefix.
fn must_be_clean(server: &S3Server) {
    let done = |op: &str| -> Vec<Value> {
        let mut requests = server.requests(op);
        requests.retain(|request| {
            request["status"]
                .as_u64()
                .is_some_and(|status| status < 300)
        });
        requests
    };
    let keys = |ops: &[&str]| -> BTreeSet<String> {
        let requests = ops.iter().flat_map(|op| done(op));
        let keys = requests.map(|request| request["key"].as_str().expect("a key").to_owned());
        keys.collect()
    };
    let begun = keys(&["CreateMultipartUpload"]);
    assert!(!begun.is_empty(), "nothing was made");
    let (completed, aborted) = (
        keys(&["CompleteMultipartUpload"]),
        keys(&["AbortMultipartUpload"]),
    );
    let ended: BTreeSet<String> = completed.union(&aborted).cloned().collect();
    assert_eq!(begun, ended, "an upload stays open");
    let made: BTreeSet<String> = completed.union(&keys(&["PutObject"])).cloned().collect();
    let deleted = keys(&["DeleteObject"]);
    let left: Vec<&String> = made.difference(&deleted).collect();
    assert_eq!(left, [""; 0], "objects stay");
    for key in begun.iter().chain(&deleted) {
        assert!(key.starts_with("store/job/bench-"), "{key}");
    }
}

#[test]
fn a_quick_look_at_a_node_with_gpus() {
    let server = S3Server::start(&[]);
    let report = small(&server)
        .ok("bench --quick --size 20MiB --data bf16 --data zero --for 2x1GB --notice 1h");
    assert_eq!(
        server.all_requests(),
        [Value::Null; 0],
        "--to null asks nobody"
    );

    assert_eq!(report["conditions"]["size"], 20 * MIB);
    assert_eq!(rows(&report["machine"], "gpus").len(), 2);
    let stages = rows(&report, "stages");
    let expected = [
        "checksum",
        "compress",
        "compress-least",
        "copy-in",
        "copy-out",
        "decompress",
        "digest",
        "download",
        "raw-copy-in",
        "raw-copy-out",
        "upload",
        "zero-scan",
    ];
    assert_eq!(names(stages, "stage"), expected.into());
    for row in stages {
        let is_swallowed = row["stage"] == "upload";
        assert_eq!(row["rate"].is_null(), is_swallowed, "{row}");
        assert!(is_swallowed || number(row, "rate") > 0.0, "{row}");
        assert!(number(row, "cpu_seconds_per_gb") >= 0.0, "{row}");
    }
    let coded: Vec<&Value> = stages
        .iter()
        .filter(|row| row["stage"] == "compress")
        .collect();
    assert_eq!(coded.len(), 4, "two kinds, on one thread and on two");
    assert!((0.5..0.9).contains(&number(coded[0], "stored_share")));
    assert!(number(coded[2], "stored_share") < 0.01, "zeros");

    let pipeline = rows(&report, "pipeline");
    let ways: Vec<(&Value, &Value)> = pipeline
        .iter()
        .map(|row| (&row["direction"], &row["data"]))
        .collect();
    assert_eq!(
        json!(ways),
        json!([
            ["out", "bf16"],
            ["in", "bf16"],
            ["out", "zero"],
            ["in", "zero"]
        ])
    );
    for row in pipeline {
        assert_eq!(row["raw"], 40 * MIB);
        let floor = &row["floor"];
        let largest = ["copy", "cpu", "link"]
            .map(|part| number(floor, part))
            .into_iter()
            .fold(0.0, f64::max);
        let share = largest / number(row, "seconds");
        assert!(
            largest > 0.0 && (number(row, "share_of_floor") - share).abs() < 1e-9,
            "{row}"
        );
        assert!(row["slowest_stage"].is_string(), "{row}");
    }

    let verdict = &report["verdict"];
    assert_eq!(
        verdict["node"],
        json!({"gpus": 2, "gpu_bytes": 1_000_000_000})
    );
    assert_eq!(verdict["fits"], true);
    for kind in rows(verdict, "out").iter().chain(rows(verdict, "in")) {
        let sum = number(kind, "seconds") + number(kind, "spare_seconds");
        assert!((sum - 3600.0).abs() < 1e-6, "{kind}");
        assert!(
            number(kind, "seconds") >= number(kind, "floor_seconds"),
            "{kind}"
        );
    }
    let sentence = verdict["sentence"].as_str().expect("words");
    assert!(
        sentence.contains("2 GPUs of 1.0 GB") && sentence.contains("fits a notice of 3600 s"),
        "{sentence}"
    );
}

#[test]
fn a_quick_look_without_a_gpu_needs_no_driver() {
    let server = S3Server::start(&[]);
    // No node: the loader would find no libcuda.
    let cli = Ckptstream::new(&server, "job").config("pipeline.chunk_size = '1MiB'\n");
    let report =
        cli.ok("bench --quick --no-gpu --size 8MiB --data random --for 1x1000TB --notice 1s");
    assert_eq!(rows(&report, "pipeline"), [Value::Null; 0]);
    assert!(!names(rows(&report, "stages"), "stage").contains("copy-out"));
    let verdict = &report["verdict"];
    assert_eq!(verdict["fits"], false);
    assert!(
        verdict["sentence"]
            .as_str()
            .expect("words")
            .contains("too short")
    );

    let run = cli.run("bench --quick --size 8MiB --data random");
    assert_eq!(run.code, 3, "{run:?}");
    assert!(cause(&run).contains("--no-gpu"), "{run:?}");
}

#[test]
fn files_are_data_too_and_what_cannot_be_is_2() {
    let server = S3Server::start(&[]);
    let cli = small(&server);
    let file = tempfile::NamedTempFile::new().expect("a file");
    let empty = format!("bench --quick --size 4MiB --data {}", file.path().display());
    std::fs::write(file.path(), b"repeated ").expect("written");
    let report = cli.ok(&empty);
    assert!(number(&rows(&report, "pipeline")[0], "stored") < 1e6);
    std::fs::write(file.path(), b"").expect("written");
    for (args, part) in [
        (empty.as_str(), "--data"),
        ("bench --quick --data no-such-kind", "--data"),
        ("bench --quick --gpus 3", "--gpus"),
        ("bench --quick --size 1KiB", "--size"),
    ] {
        let run = cli.run(args);
        assert_eq!(run.code, 2, "{args}: {run:?}");
        assert!(cause(&run).contains(part), "{args}: {run:?}");
    }
}

#[test]
fn in_memory_and_through_the_store_nothing_stays() {
    let server = S3Server::start(&[]);
    let cli = small(&server);
    cli.ok("bench --quick --to memory --size 12MiB --data image");
    assert_eq!(
        server.all_requests(),
        [Value::Null; 0],
        "--to memory asks nobody"
    );

    let report =
        cli.ok("bench --quick --runs 2 --to store --size 12MiB --data image --data random");
    let upload = rows(&report, "stages")
        .iter()
        .find(|row| row["stage"] == "upload");
    assert!(number(upload.expect("a row"), "rate") > 0.0);
    assert!(number(&rows(&report, "pipeline")[0]["floor"], "link") > 0.0);
    assert_eq!(report["left_behind"], json!([]));
    must_be_clean(&server);
}

#[test]
fn a_signal_ends_it_and_nothing_stays() {
    let server = S3Server::start(&[]);
    let cli = small(&server);
    // The parts of the whole pipeline hang; those of the upload alone, which come first, do not.
    server.set_rules(&json!([{"op": "UploadPart", "key_contains": "gpu-", "always": true, "action": {"stall": true}}]));
    let bench = Watched::start(&cli, "bench --quick --to store --size 12MiB --data random");
    until(|| {
        let begun = server.requests("CreateMultipartUpload");
        begun.iter().any(|request| {
            request["key"]
                .as_str()
                .is_some_and(|key| key.contains("gpu-"))
        })
    });
    bench.signal("INT");
    let run = bench.wait();
    assert_eq!(run.code, 3, "{run:?}");
    assert!(cause(&run).contains("signal"), "{run:?}");
    assert_eq!(run.report["attached"], json!([]));
    must_be_clean(&server);
}

#[test]
fn a_store_that_fails_is_3_and_nothing_stays() {
    let server = S3Server::start(&[]);
    let cli = small(&server);
    server.set_rules(&json!([{"op": "CompleteMultipartUpload", "nth": 2, "action": {"status": 403, "code": "AccessDenied"}}]));
    let run = cli.run("bench --quick --to store --size 12MiB --data random");
    assert_eq!(run.code, 3, "{run:?}");
    must_be_clean(&server);
    drop(server);
    let cli = cli.config("store.retry_timeout = '1s'\n");
    let run = cli.run("bench --quick --to store --size 12MiB --data random");
    assert_eq!(run.code, 3, "{run:?}");
}

#[test]
fn bytes_that_come_back_different_are_20() {
    let server = S3Server::start(&[]);
    // A driver that copies nothing onto the GPU and says that it has.
    let node = Node::new("memory=64MiB").with("fault=cuMemcpyHtoDAsync#*=code:0");
    let cli = Ckptstream::new(&server, "job").on(&node);
    let run = cli.run("bench --quick --size 8MiB --data bf16");
    assert_eq!(run.code, 20, "{run:?}");
    assert!(cause(&run).contains("GPU 0 does not hold"), "{run:?}");
}
