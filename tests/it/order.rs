//! The order of events, read from outside: the driver's call trace and the S3 server's log, joined by CLOCK_BOOTTIME.
//!
//! The rules are functions over records, so that they can be shown to refuse what is wrong: a check that accepts everything would pass as well.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{Ckptstream, Node, S3Server, Target, json_lines};

/// Microseconds of CLOCK_BOOTTIME.
type Micros = u64;

/// An extent that the driver gave, with its stream.
#[derive(Debug, Clone)]
struct Given {
    device: String,
    stream: u64,
    bytes: u64,
}

/// An asynchronous copy that was carried out.
#[derive(Debug, Clone)]
struct Copy {
    device: String,
    stream: u64,
    offset: u64,
    bytes: u64,
    enqueued: Micros,
    done: Micros,
}

/// A driver call.
#[derive(Debug, Clone)]
struct Call {
    name: String,
    result: u64,
    /// Of a call about a stream.
    stream: Option<u64>,
    start: Micros,
    end: Micros,
}

/// A request to the store.
#[derive(Debug, Clone)]
struct Request {
    op: String,
    key: String,
    status: u64,
    /// Created with `If-None-Match: *`.
    is_conditional: bool,
    start: Micros,
    end: Micros,
}

/// What one process asked of the driver and of the store.
#[derive(Debug, Clone)]
struct Records {
    extents: Vec<Given>,
    copies: Vec<Copy>,
    calls: Vec<Call>,
    requests: Vec<Request>,
}

/// Fails with what is wrong.
macro_rules! demand {
    ($holds:expr, $($words:tt)+) => {
        if !$holds {
            return Err(format!($($words)+));
        }
    };
}

type Verdict = Result<(), String>;

/// Everything that a save must keep to.
fn check_save(records: &Records) -> Verdict {
    let begun = records.only_call("cuCheckpointProcessCheckpoint")?;
    let complete = records.only_call("cuCheckpointOperationComplete")?;
    let unlocks = records
        .calls
        .iter()
        .any(|call| call.name == "cuCheckpointProcessUnlock");
    demand!(!unlocks, "it was tried to unlock a target that is saved");
    check_copies(records, begun, complete)?;

    let parts = records.requests_of("UploadPart", "");
    let completions = records.requests_of("CompleteMultipartUpload", "");
    let tables = records.requests_of("PutObject", ".frames.json");
    let manifest = records.requests_of("PutObject", "/manifest.json");
    let entry: Vec<&Request> = records
        .requests_of("PutObject", ".json")
        .into_iter()
        // The writer announces itself before the lock.
        .filter(|put| put.key.contains("/log/") && put.start >= begun.end)
        .collect();

    let keys: BTreeSet<&str> = parts.iter().map(|part| part.key.as_str()).collect();
    let of_keys = |requests: &[&Request]| -> Vec<String> {
        let mut keys: Vec<String> = requests.iter().map(|request| request.key.clone()).collect();
        keys.sort();
        keys
    };
    let expected: Vec<String> = keys.iter().map(ToString::to_string).collect();
    demand!(
        keys.len() == records.extents.len(),
        "{} extents went into {} objects",
        records.extents.len(),
        keys.len()
    );
    demand!(
        of_keys(&completions) == expected,
        "not every upload was completed, once"
    );
    let looks: Vec<&Request> = records
        .requests_of("HeadObject", "")
        .into_iter()
        .filter(|look| keys.contains(look.key.as_str()))
        .collect();
    demand!(
        of_keys(&looks) == expected,
        "not every object was looked at, once"
    );
    demand!(
        tables.len() == expected.len(),
        "{} frame tables for {} objects",
        tables.len(),
        expected.len()
    );
    demand!(manifest.len() == 1, "{} manifests", manifest.len());
    demand!(entry.len() == 1, "{} log entries", entry.len());

    let steps = [
        ("a part", parts.as_slice()),
        ("a completion", &completions),
        ("a look", &looks),
        ("a frame table", &tables),
        ("the manifest", &manifest),
        ("the image entry", &entry),
    ];
    for (name, requests) in steps {
        let refused = requests.iter().find(|request| request.status != 200);
        demand!(refused.is_none(), "{name} was not answered 200");
    }
    for put in tables.iter().chain(&manifest).chain(&entry) {
        demand!(put.is_conditional, "{} may overwrite", put.key);
    }
    let first_part = parts.iter().map(|part| part.start).min();
    demand!(first_part >= Some(begun.end), "a part before BEGIN");
    for pair in steps.windows(2) {
        let [(before, earlier), (after, later)] = pair else {
            unreachable!("windows of two")
        };
        for request in *later {
            // An object is looked at once its own upload is completed. Every other step waits for all of the one before.
            let is_late = |other: &&Request| {
                other.end > request.start && (*after != "a look" || other.key == request.key)
            };
            demand!(
                !earlier.iter().any(is_late),
                "{after} was asked for before {before} was answered"
            );
        }
    }
    demand!(
        entry[0].end <= complete.start,
        "Complete was called before the image entry was answered"
    );

    let spans: Vec<_> = parts.iter().map(|part| (part.start, part.end)).collect();
    demand!(
        spans.len() < 2 || most_at_once(&spans) >= 2,
        "no two parts were under way at once"
    );
    Ok(())
}

/// Everything that a restore must keep to, as far as driver and store see it.
fn check_restore(records: &Records) -> Verdict {
    let begun = records.only_call("cuCheckpointProcessRestore")?;
    let complete = records.only_call("cuCheckpointOperationComplete")?;
    let unlock = records.only_call("cuCheckpointProcessUnlock")?;
    check_copies(records, begun, complete)?;
    demand!(
        complete.end <= unlock.start,
        "Unlock was called before Complete had answered"
    );
    let manifest = records.requests_of("GetObject", "/manifest.json");
    let read = manifest.iter().map(|get| get.end).max();
    demand!(
        read.is_some_and(|read| read <= begun.start),
        "the driver was asked before the manifest was read"
    );
    // It opens the job and pins the image before the driver is asked, and removes the pin.
    let is_allowed = |request: &&Request| match request.op.as_str() {
        "GetObject" | "HeadObject" => true,
        "PutObject" => {
            let is_its_own = request.key.contains("/log/") || request.key.contains("/pins/");
            is_its_own && request.is_conditional && request.end <= begun.start
        }
        "DeleteObject" => request.key.contains("/pins/"),
        _ => false,
    };
    let writes = records.requests.iter().find(|request| !is_allowed(request));
    demand!(writes.is_none(), "a restore that writes: {writes:?}");
    Ok(())
}

/// Copies between BEGIN and Complete: each extent whole and once, on the driver's stream for it (which Complete synchronizes) or on one that we synchronized, two at a time.
fn check_copies(records: &Records, begun: &Call, complete: &Call) -> Verdict {
    let mut by_device: BTreeMap<&str, Vec<&Copy>> = BTreeMap::new();
    for copy in &records.copies {
        by_device.entry(&copy.device).or_default().push(copy);
        let given = records
            .extents
            .iter()
            .find(|extent| extent.stream == copy.stream);
        let is_synchronized = |call: &Call| {
            call.name == "cuStreamSynchronize"
                && call.stream == Some(copy.stream)
                && call.result == 0
                && (copy.done..=complete.start).contains(&call.end)
        };
        demand!(
            given.map_or_else(
                || records.calls.iter().any(is_synchronized),
                |extent| extent.device == copy.device
            ),
            "a copy of {} on stream {}, which the driver did not give for it and nobody synchronized",
            copy.device,
            copy.stream
        );
        demand!(begun.end <= copy.enqueued, "a copy before BEGIN");
        demand!(
            copy.done <= complete.start,
            "Complete was called before a copy was done"
        );
    }
    for extent in &records.extents {
        let mut copies = by_device.remove(extent.device.as_str()).unwrap_or_default();
        copies.sort_by_key(|copy| copy.offset);
        let mut end = 0;
        for copy in &copies {
            demand!(
                copy.offset == end,
                "{} is not copied exactly once at {end}",
                extent.device
            );
            end += copy.bytes;
        }
        demand!(
            end == extent.bytes,
            "{} is copied up to {end} of {}",
            extent.device,
            extent.bytes
        );
        let spans: Vec<_> = copies
            .iter()
            .map(|copy| (copy.enqueued, copy.done))
            .collect();
        demand!(
            spans.len() < 2 || most_at_once(&spans) >= 2,
            "{} is copied chunk by chunk, never two at once",
            extent.device
        );
    }
    Ok(())
}

/// The greatest number of spans that share a moment.
fn most_at_once(spans: &[(Micros, Micros)]) -> usize {
    let at = |moment: Micros| {
        let open = spans
            .iter()
            .filter(|(start, end)| *start <= moment && moment < *end);
        open.count()
    };
    spans.iter().map(|&(start, _)| at(start)).max().unwrap_or(0)
}

impl Records {
    /// Reads a trace and a log. The trace must be of one process; `since` leaves out earlier requests.
    fn read(trace: &[Value], log: &[Value], since: Micros) -> Self {
        let number = |line: &Value, key: &str| line[key].as_u64().unwrap_or_default();
        let text = |line: &Value, key: &str| line[key].as_str().unwrap_or_default().to_owned();
        let given = trace.iter().filter_map(|line| line["extents"].as_array());
        let copies = trace.iter().filter(|line| line["call"] == "copy-done");
        let calls = trace.iter().filter(|line| line["call"] != "copy-done");
        Self {
            extents: given
                .flatten()
                .map(|extent| Given {
                    device: text(extent, "device"),
                    stream: number(extent, "stream"),
                    bytes: number(extent, "bytes"),
                })
                .collect(),
            copies: copies
                .map(|line| Copy {
                    device: text(line, "device"),
                    stream: number(line, "stream"),
                    offset: number(line, "offset"),
                    bytes: number(line, "bytes"),
                    enqueued: number(line, "enqueued_us"),
                    done: number(line, "done_us"),
                })
                .collect(),
            calls: calls
                .map(|line| Call {
                    name: text(line, "call"),
                    result: number(line, "result"),
                    stream: line["stream"].as_u64(),
                    start: number(line, "t_us"),
                    end: number(line, "end_us"),
                })
                .collect(),
            requests: log
                .iter()
                .map(|line| Request {
                    op: text(line, "op"),
                    key: text(line, "key"),
                    status: number(line, "status"),
                    is_conditional: line["if_none_match"] == true,
                    start: number(line, "t_us"),
                    end: number(line, "end_us"),
                })
                .filter(|request| request.start >= since)
                .collect(),
        }
    }

    fn only_call(&self, name: &str) -> Result<&Call, String> {
        let calls: Vec<&Call> = self.calls.iter().filter(|call| call.name == name).collect();
        match calls.as_slice() {
            [call] if call.result == 0 => Ok(call),
            _ => Err(format!(
                "{name} was not called once with success: {calls:?}"
            )),
        }
    }

    fn requests_of(&self, op: &str, key_end: &str) -> Vec<&Request> {
        let requests = self.requests.iter();
        requests
            .filter(|request| request.op == op && request.key.ends_with(key_end))
            .collect()
    }
}

/// A save and a restore of `gpus` GPUs with 12 MiB each. Copies and answers take their time, so that what does not wait for them shows, and what overlaps does too.
fn observe(gpus: u64) -> (Records, Records) {
    let server = S3Server::start(&[]);
    server.set_rules(&json!([
        {"op": "UploadPart", "always": true, "action": {"delay_after_ms": 300}},
        {"op": ["CompleteMultipartUpload", "HeadObject", "PutObject"], "always": true, "action": {"delay_after_ms": 15}},
    ]));
    let dir = TempDir::new().expect("a temporary folder");
    let node = Node::new(&format!("gpus={gpus};memory=64MiB"));
    let traced = |name: &str| {
        let trace = dir.path().join(name);
        let slow = format!("d2h=64MiB;h2d=64MiB;trace={}", trace.display());
        let cli = Ckptstream::new(&server, "job")
            .on(&node.with(&slow))
            .config("pipeline.chunk_size = '1MiB'\nstore.part_size = '5MiB'\n");
        (cli, trace)
    };
    let target = Target::start(
        &node,
        &format!("--gpus {gpus} --bytes 12MiB --fill random --steps 0"),
    );
    let (cli, trace) = traced("save");
    cli.ok(&format!("checkpoint --pid {}", target.pid()));
    let saved = Records::read(&json_lines(&trace), &server.all_requests(), 0);
    let end = saved.requests.iter().map(|request| request.end).max();

    let (cli, trace) = traced("restore");
    cli.ok(&format!("restore --pid {}", target.pid()));
    let since = end.expect("the save made requests");
    let restored = Records::read(&json_lines(&trace), &server.all_requests(), since);
    (saved, restored)
}

fn holds_for(gpus: u64) {
    let (saved, restored) = observe(gpus);
    for (name, records, verdict) in [
        ("save", &saved, check_save(&saved)),
        ("restore", &restored, check_restore(&restored)),
    ] {
        assert_eq!(verdict, Ok(()), "{name}: {records:#?}");
        assert_eq!(Ok(records.extents.len()), usize::try_from(gpus));
        assert_eq!(records.copies.len(), 12 * records.extents.len());
    }
    assert_eq!(
        saved.requests_of("UploadPart", "").len(),
        3 * saved.extents.len()
    );
}

#[test]
fn a_save_of_one_gpu_is_in_order() {
    holds_for(1);
}

#[test]
fn a_save_of_two_gpus_is_in_order() {
    holds_for(2);
}

#[test]
fn a_save_of_eight_gpus_is_in_order() {
    holds_for(8);
}

/// A save of two GPUs as it should be, with time to spare between its steps.
fn a_good_save() -> Records {
    let request = |op: &str, key: &str, start: Micros, end: Micros| Request {
        op: op.to_owned(),
        key: key.to_owned(),
        status: 200,
        is_conditional: op == "PutObject",
        start,
        end,
    };
    let call = |name: &str, start: Micros| Call {
        name: name.to_owned(),
        result: 0,
        stream: None,
        start,
        end: start + 5,
    };
    let mut records = Records {
        extents: Vec::new(),
        copies: Vec::new(),
        calls: vec![
            call("cuCheckpointProcessLock", 80),
            call("cuCheckpointProcessCheckpoint", 90),
            call("cuCheckpointOperationComplete", 900),
        ],
        requests: Vec::new(),
    };
    for (device, stream) in [("a", 7), ("b", 8)] {
        records.extents.push(Given {
            device: device.to_owned(),
            stream,
            bytes: 25,
        });
        for (offset, bytes, enqueued, done) in
            [(0, 10, 100, 120), (10, 10, 105, 140), (20, 5, 125, 150)]
        {
            records.copies.push(Copy {
                device: device.to_owned(),
                stream,
                offset,
                bytes,
                enqueued,
                done,
            });
        }
        let key = format!("j/data/n/1/gpu-{device}.0.zst");
        records.requests.extend([
            request("UploadPart", &key, 200, 240),
            request("UploadPart", &key, 210, 250),
            request("CompleteMultipartUpload", &key, 300, 310),
            request("HeadObject", &key, 400, 410),
            request("PutObject", &key.replace(".zst", ".frames.json"), 500, 510),
        ]);
    }
    records.requests.extend([
        request("PutObject", "j/data/n/manifest.json", 600, 610),
        request("PutObject", "j/log/00000001.json", 10, 20),
        request("PutObject", "j/log/00000002.json", 30, 40),
        request("PutObject", "j/log/00000003.json", 700, 710),
    ]);
    records
}

/// Applies a change to the good save; the check must refuse it with these words.
fn refuses(words: &str, change: impl FnOnce(&mut Records)) {
    let mut records = a_good_save();
    change(&mut records);
    let verdict = check_save(&records).expect_err(words);
    assert!(
        verdict.contains(words),
        "{verdict:?} does not say {words:?}"
    );
}

/// The first request of an operation whose key ends so.
fn find<'a>(records: &'a mut Records, op: &str, key_end: &str) -> &'a mut Request {
    let mut requests = records.requests.iter_mut();
    requests
        .find(|request| request.op == op && request.key.ends_with(key_end))
        .expect("the good save has it")
}

#[test]
fn the_rules_accept_a_good_save() {
    assert_eq!(check_save(&a_good_save()), Ok(()));
}

#[test]
fn the_rules_refuse_a_wrong_order() {
    let before = |op: &'static str, key_end: &'static str, start: Micros| {
        move |records: &mut Records| {
            let request = find(records, op, key_end);
            (request.start, request.end) = (start, start + 5);
        }
    };
    refuses("Complete was called before the image entry", |records| {
        records.calls[2].start = 705;
    });
    refuses(
        "the image entry was asked for before the manifest",
        before("PutObject", "/00000003.json", 605),
    );
    refuses(
        "the manifest was asked for before a frame table",
        before("PutObject", "/manifest.json", 505),
    );
    refuses(
        "a frame table was asked for before a look",
        before("PutObject", "gpu-b.0.frames.json", 405),
    );
    refuses(
        "a look was asked for before a completion",
        before("HeadObject", "", 305),
    );
    refuses(
        "a completion was asked for before a part",
        before("UploadPart", "gpu-b.0.zst", 305),
    );
    refuses("a part before BEGIN", before("UploadPart", "", 90));
}

#[test]
fn the_rules_refuse_a_save_that_lacks_something() {
    let without = |op: &'static str, key_end: &'static str| {
        move |records: &mut Records| {
            let key = find(records, op, key_end).key.clone();
            records
                .requests
                .retain(|request| request.op != op || request.key != key);
        }
    };
    refuses(
        "not every upload was completed",
        without("CompleteMultipartUpload", ""),
    );
    refuses("not every object was looked at", without("HeadObject", ""));
    refuses("1 frame tables", without("PutObject", ".frames.json"));
    refuses("0 manifests", without("PutObject", "/manifest.json"));
    refuses("0 log entries", without("PutObject", "/00000003.json"));
    refuses("2 extents went into 1 objects", without("UploadPart", ""));
    refuses(
        "cuCheckpointOperationComplete was not called once",
        |records| {
            records.calls.truncate(2);
        },
    );
    refuses(
        "cuCheckpointOperationComplete was not called once",
        |records| {
            records.calls[2].result = 999;
        },
    );
    refuses("a part was not answered 200", |records| {
        find(records, "UploadPart", "").status = 500;
    });
    refuses("a look was not answered 200", |records| {
        find(records, "HeadObject", "").status = 404;
    });
    refuses("may overwrite", |records| {
        find(records, "PutObject", "/00000003.json").is_conditional = false;
    });
}

#[test]
fn the_rules_refuse_a_save_that_unlocks() {
    refuses("unlock a target that is saved", |records| {
        let mut unlock = records.calls[1].clone();
        "cuCheckpointProcessUnlock".clone_into(&mut unlock.name);
        // Refused or not.
        unlock.result = 401;
        records.calls.push(unlock);
    });
}

#[test]
fn the_rules_refuse_wrong_copies() {
    refuses("on stream 8, which the driver did not give", |records| {
        records.copies[0].stream = 8;
    });
    refuses("on stream 0, which the driver did not give", |records| {
        records.copies[0].stream = 0;
    });
    refuses("never two at once", |records| {
        for (start, copy) in [(100, 0), (110, 1), (120, 2)] {
            let copy = &mut records.copies[copy];
            (copy.enqueued, copy.done) = (start, start + 10);
        }
    });
    refuses("not copied exactly once at 10", |records| {
        records.copies.remove(1);
    });
    refuses("not copied exactly once at 20", |records| {
        records.copies[2].offset = 15;
    });
    refuses("copied up to 20 of 25", |records| {
        records.copies.remove(2);
    });
    refuses("a copy before BEGIN", |records| {
        records.copies[0].enqueued = 94
    });
    refuses("before a copy was done", |records| {
        records.copies[5].done = 901
    });
}

#[test]
fn the_rules_accept_a_stream_of_our_own_once_it_was_synchronized() {
    let with_call_at = |start: Micros, result: u64| {
        let mut records = a_good_save();
        records.copies[2].stream = 9;
        records.calls.push(Call {
            name: "cuStreamSynchronize".to_owned(),
            result,
            stream: Some(9),
            start,
            end: start + 5,
        });
        check_save(&records)
    };
    assert_eq!(with_call_at(150, 0), Ok(()));
    for verdict in [
        with_call_at(140, 0),
        with_call_at(150, 700),
        with_call_at(900, 0),
    ] {
        let verdict = verdict.expect_err("not synchronized");
        assert!(
            verdict.contains("on stream 9, which the driver did not give"),
            "{verdict}"
        );
    }
}

#[test]
fn the_rules_refuse_parts_one_by_one() {
    refuses("no two parts were under way at once", |records| {
        let parts = records
            .requests
            .iter_mut()
            .filter(|request| request.op == "UploadPart");
        for (start, part) in (200..).step_by(10).zip(parts) {
            (part.start, part.end) = (start, start + 10);
        }
    });
}

#[test]
fn the_rules_refuse_a_wrong_restore() {
    let good = || {
        let mut records = a_good_save();
        records.calls[0].name = "cuCheckpointProcessUnlock".to_owned();
        (records.calls[0].start, records.calls[0].end) = (910, 915);
        records.calls[1].name = "cuCheckpointProcessRestore".to_owned();
        records.requests = vec![Request {
            op: "GetObject".to_owned(),
            key: "j/data/n/manifest.json".to_owned(),
            status: 200,
            is_conditional: false,
            start: 10,
            end: 20,
        }];
        records
    };
    assert_eq!(check_restore(&good()), Ok(()));
    let refuses = |words: &str, change: &dyn Fn(&mut Records)| {
        let mut records = good();
        change(&mut records);
        let verdict = check_restore(&records).expect_err(words);
        assert!(
            verdict.contains(words),
            "{verdict:?} does not say {words:?}"
        );
    };
    refuses("before Complete had answered", &|records| {
        records.calls[0].start = 904;
    });
    refuses("before the manifest was read", &|records| {
        records.requests[0].end = 91;
    });
    refuses("a restore that writes", &|records| {
        let put = find(&mut a_good_save(), "PutObject", "").clone();
        records.requests.push(put);
    });
    refuses("before a copy was done", &|records| {
        records.copies[5].done = 901;
    });
    refuses("which the driver did not give", &|records| {
        records.copies[0].stream = 8;
    });
}
