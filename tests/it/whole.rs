//! A whole process tree, on drivers with and without custom storage: saved with a real CRIU, ended, and brought back with its pids in a namespace of its own. Also what each failure on that road leaves: the tree computes on, or is named.
//!
//! Needs root, for namespaces and for CRIU; where there is none, or no CRIU, `TEST_CRIU` says `none` and nothing is tried, which scripts/test.sh tells.

use std::process::Command;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use super::support::process::PATIENCE;
use super::support::s3_server::has_credentials;
use super::support::supervised::{REQUEUE, Supervised, notified, until_status};
use super::support::tree::{Alone, Mode, Tree, done, end_namespace, is_alive, with_path};
use super::support::{Ckptstream, Run};

/// Microseconds of CLOCK_BOOTTIME, as in traces and logs.
fn now() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    u64::try_from(now.tv_sec * 1_000_000 + now.tv_nsec / 1000).expect("a time")
}

/// Begin of the first, and end of the last, of these lines of a trace or of a log, of which there are so many.
fn span(what: &str, lines: &[Value], count: usize, is_it: impl Fn(&Value) -> bool) -> (u64, u64) {
    let lines: Vec<&Value> = lines.iter().filter(|line| is_it(line)).collect();
    assert_eq!(lines.len(), count, "{what}: {lines:#?}");
    let starts = lines.iter().filter_map(|line| line["t_us"].as_u64());
    let ends = lines.iter().filter_map(|line| line["end_us"].as_u64());
    (starts.min().expect(what), ends.max().expect(what))
}

/// Each of these is over before the next begins.
fn in_order(spans: &[(&str, (u64, u64))]) {
    for pair in spans.windows(2) {
        let [(first, before), (second, after)] = pair else {
            unreachable!("pairs");
        };
        assert!(before.1 <= after.0, "{first} before {second}: {spans:?}");
    }
}

#[test]
fn a_tree_under_run_is_saved_ended_restored_and_goes_on_as_if_nothing_had_happened() {
    goes_on_under_run(Mode::Staged);
}

#[test]
fn a_tree_whose_gpu_memory_is_streamed_goes_on_as_if_nothing_had_happened() {
    goes_on_under_run(Mode::Streamed);
}

fn goes_on_under_run(mode: Mode) {
    let Some(tree) = Tree::new(mode) else { return };
    let first = tree.run("--steps 150");
    tree.reaches(20);
    first.process.signal("TERM");
    let first = first.ends();
    assert_eq!(first.code, REQUEUE, "{first:?}");
    assert_eq!(tree.scene.images("job"), [1]);
    let inspected = done(&tree.cli("", ""), "inspect");
    assert_eq!(
        inspected.report["manifest"]["kind"], "whole",
        "{inspected:?}"
    );

    // On another node the files are there, and nothing else.
    let second = tree.run("--steps 150").ends();
    assert_eq!(second.code, 0, "{second:?}");
    assert!(second.stderr.contains("its whole tree"), "{second:?}");
    assert_eq!(tree.lines("end"), ["done"]);
    tree.is_as_if_nothing_had_happened("--steps 150");
    // Step 0 is the memory as it was filled.
    for name in ["a", "b"] {
        assert_eq!(tree.steps(name).len(), 151, "{name}");
    }
}

#[test]
fn a_save_by_hand_and_a_restore_leave_a_tree_to_itself() {
    is_left_to_itself(Mode::Staged);
}

#[test]
fn a_tree_whose_gpu_memory_is_streamed_is_left_to_itself() {
    is_left_to_itself(Mode::Streamed);
}

fn is_left_to_itself(mode: Mode) {
    let Some(tree) = Tree::new(mode) else { return };
    let alone = tree.start();
    tree.reaches(5);
    let saver = tree.cli("", "shell_job = false");
    let saved = done(&saver, &format!("checkpoint --pid {}", alone.pid()));
    assert_eq!(saved.code, 0, "{saved:?}");
    assert!(!is_alive(tree.dir.path()), "the tree was not ended");
    drop(alone);
    let restored = done(&saver, "restore");
    assert_eq!(restored.code, 0, "{restored:?}");
    let targets = restored.report["targets"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    assert_eq!(targets.len(), 2, "{restored:?}");
    assert!(
        targets.iter().all(|it| it["state"] == "running"),
        "{restored:?}"
    );
    tree.computes_on();
    let pid = targets[0]["pid"].as_u64().expect("a pid");
    let namespace = std::fs::read_link(format!("/proc/{pid}/ns/pid")).expect("it runs");
    assert_ne!(
        namespace,
        std::fs::read_link("/proc/self/ns/pid").expect("ours")
    );
    end_namespace(pid);
    tree.is_as_if_nothing_had_happened("");
}

#[test]
fn a_save_in_passing_lets_the_tree_run_on() {
    runs_on_after_a_save_in_passing(Mode::Staged);
}

#[test]
fn a_tree_whose_gpu_memory_is_streamed_runs_on_after_a_save_in_passing() {
    runs_on_after_a_save_in_passing(Mode::Streamed);
}

fn runs_on_after_a_save_in_passing(mode: Mode) {
    let Some(tree) = Tree::new(mode) else { return };
    let alone = tree.start();
    tree.reaches(5);
    let saver = tree.cli("", "");
    let saved = done(
        &saver,
        &format!("checkpoint --pid {} --then resume", alone.pid()),
    );
    assert_eq!(saved.code, 0, "{saved:?}");
    tree.computes_on();
    assert_eq!(tree.scene.images("job"), [1]);
    drop(alone);
    tree.is_as_if_nothing_had_happened("");
}

#[test]
fn whatever_fails_before_the_commit_gives_the_tree_back() {
    let Some(tree) = Tree::new(Mode::Staged) else {
        return;
    };
    let alone = tree.start();
    tree.reaches(3);
    let checkpoint = format!("checkpoint --pid {}", alone.pid());
    let denied = |op: &str| json!([{"op": op, "always": true, "action": {"status": 403, "code": "AccessDenied"}}]);
    let nothing = json!([]);
    let lock_2 = "fault=cuCheckpointProcessLock#2=code:600";
    let stage_1 = "fault=cuCheckpointProcessCheckpoint#1=code:999";
    let stage_2 = "fault=cuCheckpointProcessCheckpoint#2=code:999";
    for (what, driver, host, rules, said) in [
        ("the second lock", lock_2, "", &nothing, "NOT_READY"),
        (
            "the first copy to host memory",
            stage_1,
            "",
            &nothing,
            "999",
        ),
        ("the second one", stage_2, "", &nothing, "999"),
        (
            "CRIU",
            "",
            "arguments = [\"--no-such-option\"]",
            &nothing,
            "criu dump",
        ),
        ("the upload", "", "", &denied("UploadPart"), "UploadPart"),
        (
            "its end",
            "",
            "",
            &denied("CompleteMultipartUpload"),
            "CompleteMultipartUpload",
        ),
    ] {
        tree.scene.server.set_rules(rules);
        let saver = tree.cli(driver, host);
        let failed = done(&saver, &checkpoint);
        assert_eq!(failed.code, 10, "{what}: {failed:?}");
        assert!(failed.stderr.contains(said), "{what}: {failed:?}");
        tree.scene.server.set_rules(&nothing);
        tree.computes_on();
        assert_eq!(tree.scene.images("job"), [0_u64; 0], "{what}");
    }
    for point in ["dump:all suspended", "dump:begun", "dump:all landed"] {
        let panics = tree.cli("", "").dying_at(&format!("{point}=panic"));
        let failed = done(&panics, &checkpoint);
        assert_eq!(failed.code, 10, "{point}: {failed:?}");
        tree.computes_on();
    }
    // And none of it keeps the next one.
    let saved = done(&tree.cli("", ""), &checkpoint);
    assert_eq!(saved.code, 0, "{saved:?}");
    drop(alone);
    tree.is_as_if_nothing_had_happened("");
}

#[test]
fn what_a_saver_that_dies_leaves_is_put_in_order() {
    let Some(tree) = Tree::new(Mode::Staged) else {
        return;
    };
    let alone = tree.start();
    tree.reaches(3);
    for point in [
        "stage:one staged",
        "dump:all suspended",
        "dump:all acknowledged",
        "dump:all landed",
        "commit:manifest stored",
    ] {
        let killed = tree.cli("", "").dying_at(&format!("{point}=kill"));
        let ended = done(&killed, &format!("checkpoint --pid {}", alone.pid()));
        assert_eq!(ended.code, -1, "{point}: {ended:?}");
        let saver = tree.saver("", "");
        let recovered = done(&saver.cli, "recover");
        assert_eq!(recovered.code, 0, "{point}: {recovered:?}");
        // None runs before all have their memory.
        let called = |name: &'static str| move |line: &Value| line["call"] == name;
        let (restores, unlocks) = ("cuCheckpointProcessRestore", "cuCheckpointProcessUnlock");
        let trace = saver.trace();
        // One that was locked alone is unlocked by its guard.
        if point != "stage:one staged" {
            in_order(&[
                ("restore", span(restores, &trace, 2, called(restores))),
                ("unlock", span(unlocks, &trace, 2, called(unlocks))),
            ]);
        }
        tree.computes_on();
        assert_eq!(tree.scene.images("job"), [0_u64; 0], "{point}");
    }
    // Once it is committed the tree is not to go on, and is named.
    let killed = tree.cli("", "").dying_at("commit:entered=kill");
    done(&killed, &format!("checkpoint --pid {}", alone.pid()));
    assert_eq!(tree.scene.images("job").len(), 1);
    let recovered = done(&tree.cli("", ""), "recover");
    assert_eq!(recovered.code, 14, "{recovered:?}");
    let rows = |run: &Run| {
        run.report["recovered"]
            .as_array()
            .cloned()
            .unwrap_or_default()
    };
    assert_eq!(rows(&recovered).len(), 2, "{recovered:?}");
    for row in rows(&recovered) {
        assert_eq!(row["done"], "nothing", "{recovered:?}");
        assert_eq!(row["next"], "end-process", "{recovered:?}");
    }
    let steps = (tree.steps("a").len(), tree.steps("b").len());
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(steps, (tree.steps("a").len(), tree.steps("b").len()));
    let ended = done(&tree.cli("", ""), "recover --end");
    for row in rows(&ended) {
        assert!(
            row["done"] == "ended" || row["state"] == "gone",
            "{ended:?}"
        );
    }
    assert!(!is_alive(tree.dir.path()), "a process is left");
}

#[test]
fn a_restore_that_fails_leaves_no_process_and_says_what_is_missing() {
    leaves_no_process(Mode::Staged);
}

#[test]
fn a_restore_of_streamed_gpu_memory_that_fails_leaves_no_process() {
    leaves_no_process(Mode::Streamed);
}

fn leaves_no_process(mode: Mode) {
    let Some(tree) = Tree::new(mode) else { return };
    let alone = tree.start();
    tree.reaches(5);
    let saved = done(
        &tree.cli("", ""),
        &format!("checkpoint --pid {}", alone.pid()),
    );
    assert_eq!(saved.code, 0, "{saved:?}");
    drop(alone);
    let refused = |what: &str, said: &str, code: i32, cli: &Ckptstream| {
        let failed = done(cli, "restore");
        assert_eq!(failed.code, code, "{what}: {failed:?}");
        assert!(failed.stderr.contains(said), "{what}: {failed:?}");
        assert!(!is_alive(tree.dir.path()), "{what}: a process is left");
    };
    // A file is gone, another one has grown.
    let (log, kept) = (tree.path("b"), tree.path("kept"));
    std::fs::rename(&log, &kept).expect("a file");
    let grown = std::fs::read_to_string(tree.path("a")).expect("a file");
    std::fs::write(tree.path("a"), format!("{grown}more\n")).expect("a file");
    refused("files", "is not there", 20, &tree.cli("", ""));
    refused("files", "grown_files", 20, &tree.cli("", ""));
    std::fs::rename(&kept, &log).expect("a file");
    std::fs::write(tree.path("a"), grown).expect("a file");

    refused(
        "CRIU",
        "criu restore",
        20,
        &tree.cli("", "arguments = [\"--no-such-option\"]"),
    );
    let restore = "fault=cuCheckpointProcessRestore#2=code:999";
    refused("the driver", "999", 21, &tree.cli(restore, ""));
    let gets = json!([{"op": "GetObject", "key_contains": ".zst", "always": true, "action": {"status": 403, "code": "AccessDenied"}}]);
    tree.scene.server.set_rules(&gets);
    refused("the store", "AccessDenied", 20, &tree.cli("", ""));
    tree.scene.server.set_rules(&json!([]));

    // Who restores dies: process 1 of the namespace ends everything.
    for point in [
        "restore:tree rebuilt",
        "restore:one has its memory",
        "restore:locked for good",
    ] {
        // Its plain process has run by then, and written.
        let cuts = "grown_files = \"truncate\"";
        let killed = tree.cli("", cuts).dying_at(&format!("{point}=kill"));
        let ended = done(&killed, "restore --take-over");
        assert_eq!(ended.code, -1, "{point}: {ended:?}");
        let started = Instant::now();
        while is_alive(tree.dir.path()) {
            assert!(started.elapsed() < PATIENCE, "{point}: a process is left");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    // The image is none the worse for it.
    let restored = done(
        &tree.cli("", "grown_files = \"truncate\""),
        "restore --take-over",
    );
    assert_eq!(restored.code, 0, "{restored:?}");
    tree.computes_on();
    let pid = restored.report["targets"][0]["pid"]
        .as_u64()
        .expect("a pid");
    end_namespace(pid);
    tree.is_as_if_nothing_had_happened("");
}

#[test]
fn the_object_of_a_tree_verifies_and_a_flipped_bit_is_found() {
    let Some(tree) = Tree::new(Mode::Staged) else {
        return;
    };
    let alone = tree.start();
    tree.reaches(3);
    let saved = done(
        &tree.cli("", ""),
        &format!("checkpoint --pid {}", alone.pid()),
    );
    assert_eq!(saved.code, 0, "{saved:?}");
    drop(alone);
    let verified = done(&tree.cli("", ""), "verify");
    assert_eq!(verified.code, 0, "{verified:?}");
    let flips = json!([{"op": "GetObject", "key_contains": ".zst", "always": true, "action": {"wire": "flip-bit", "bytes": 4096}}]);
    tree.scene.server.set_rules(&flips);
    let damaged = done(&tree.cli("", ""), "verify");
    assert_eq!(damaged.code, 20, "{damaged:?}");
    let refused = done(&tree.cli("", ""), "restore");
    assert_eq!(refused.code, 20, "{refused:?}");
    assert!(!is_alive(tree.dir.path()));
}

/// A CRIU that fails the first time that it is to dump, or every time.
fn failing_criu(tree: &Tree, always: bool) -> String {
    let path = tree.path("criu.sh");
    let criu = tree.criu.display();
    let mark = tree.path("failed-once");
    let (when, then) = match always {
        true => ("true".to_owned(), ":".to_owned()),
        false => (
            format!("[ ! -e {} ]", mark.display()),
            format!("touch {}", mark.display()),
        ),
    };
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *dump*--stream*) if {when}; then {then}; echo no >&2; exit 1; fi;; esac\nexec {criu} \"$@\"\n"
    );
    std::fs::write(&path, script).expect("a script");
    let status = Command::new("chmod").arg("+x").arg(&path).status();
    assert!(status.is_ok_and(|status| status.success()));
    format!("criu = \"{}\"", path.display())
}

#[test]
fn a_tree_whose_gpu_memory_is_streamed_is_given_back_whatever_fails() {
    let Some(tree) = Tree::new(Mode::Streamed) else {
        return;
    };
    let alone = tree.start();
    tree.reaches(3);
    let checkpoint = format!("checkpoint --pid {}", alone.pid());
    let denied = |op: &str| json!([{"op": op, "key_contains": "/host-", "always": true, "action": {"status": 403, "code": "AccessDenied"}}]);
    let nothing = json!([]);
    let lock_2 = "fault=cuCheckpointProcessLock#2=code:600";
    let begin_1 = "fault=cuCheckpointProcessCheckpoint#1=code:999";
    let begin_2 = "fault=cuCheckpointProcessCheckpoint#2=code:999";
    let criu = failing_criu(&tree, true);
    for (what, driver, host, rules, said) in [
        ("the second lock", lock_2, "", &nothing, "NOT_READY"),
        ("the first BEGIN", begin_1, "", &nothing, "999"),
        // The first process is sealed, and has to be brought back from the store.
        ("the second one", begin_2, "", &nothing, "999"),
        ("CRIU", "", &*criu, &nothing, "criu dump"),
        ("the upload", "", "", &denied("UploadPart"), "UploadPart"),
        (
            "its end",
            "",
            "",
            &denied("CompleteMultipartUpload"),
            "CompleteMultipartUpload",
        ),
    ] {
        tree.scene.server.set_rules(rules);
        let failed = done(&tree.cli(driver, host), &checkpoint);
        assert_eq!(failed.code, 10, "{what}: {failed:?}");
        assert!(failed.stderr.contains(said), "{what}: {failed:?}");
        assert_eq!(
            failed.stderr.contains("asked once more"),
            what == "CRIU",
            "{what}: {failed:?}"
        );
        tree.scene.server.set_rules(&nothing);
        tree.computes_on();
        assert_eq!(tree.scene.images("job"), [0_u64; 0], "{what}");
    }
    for point in ["dump:all suspended", "dump:begun", "dump:all landed"] {
        let panics = tree.cli("", "").dying_at(&format!("{point}=panic"));
        let failed = done(&panics, &checkpoint);
        assert_eq!(failed.code, 10, "{point}: {failed:?}");
        tree.computes_on();
    }
    // And none of it keeps the next one, in which CRIU works at the second try.
    let saved = done(&tree.cli("", &failing_criu(&tree, false)), &checkpoint);
    assert_eq!(saved.code, 0, "{saved:?}");
    assert!(saved.stderr.contains("asked once more"), "{saved:?}");
    drop(alone);
    tree.is_as_if_nothing_had_happened("");
    let inspected = done(&tree.cli("", ""), "inspect");
    let manifest = &inspected.report["manifest"];
    assert_eq!(manifest["kind"], "whole", "{inspected:?}");
    assert_eq!(
        manifest["capture"]["mode"], "custom-storage",
        "{inspected:?}"
    );
    assert_eq!(manifest["processes"].as_array().map(Vec::len), Some(2));
}

#[test]
fn what_is_sealed_goes_back_into_the_tree_that_it_is_of() {
    if !has_credentials("whole::what_is_sealed_goes_back_into_the_tree_that_it_is_of") {
        return;
    }
    let Some(tree) = Tree::new(Mode::Streamed) else {
        return;
    };
    let alone = tree.start();
    tree.reaches(3);
    let checkpoint = format!("checkpoint --pid {}", alone.pid());
    let back = |what: &str, pid: u32| {
        let restored = done(&tree.cli("", ""), &format!("restore --pid {pid}"));
        assert_eq!(restored.code, 0, "{what}: {restored:?}");
        assert!(restored.report["image"].is_null(), "{what}: {restored:?}");
        tree.computes_on();
        // Nobody makes an image of what it has computed on from.
        let last = tree.scene.last_entry("job");
        assert_eq!(last["entry"], "dropped", "{what}: {last}");
        assert_eq!(tree.scene.images("job"), [0_u64; 0], "{what}");
    };

    // CRIU fails, and what is sealed cannot be read just then.
    tree.scene.server.set_rules(&json!([{"op": "GetObject", "key_contains": ".zst", "always": true, "action": {"status": 403, "code": "AccessDenied"}}]));
    let failed = done(&tree.cli("", &failing_criu(&tree, true)), &checkpoint);
    tree.scene.server.set_rules(&json!([]));
    assert_eq!(failed.code, 16, "{failed:?}");
    assert_eq!(failed.report["next"], "restore", "{failed:?}");
    assert!(failed.stderr.contains("restore --pid"), "{failed:?}");
    let recovered = done(&tree.cli("", ""), "recover");
    assert_eq!(recovered.code, 16, "{recovered:?}");
    back("CRIU", alone.pid());

    // The deadline comes while the tree is dumped, and leaves no time to give anything back.
    tree.scene.server.set_rules(&json!([{"op": "UploadPart", "key_contains": "/host-", "always": true, "action": {"stall": true}}]));
    let patient = tree.saver("", "save = \"always\"").patient();
    let late = done(&patient.cli, &format!("{checkpoint} --deadline 6s"));
    tree.scene.server.set_rules(&json!([]));
    assert_eq!(late.code, 16, "{late:?}");
    assert!(late.stderr.contains("reading it back takes"), "{late:?}");
    back("the deadline", alone.pid());

    // The saver dies between the seal and the commit.
    for point in [
        "dump:all suspended",
        "dump:begun",
        "dump:all landed",
        // The first one is that of what is sealed.
        "commit:manifest stored@2",
    ] {
        let (name, count) = point.split_once('@').unwrap_or((point, "1"));
        let killed = tree.cli("", "").dying_at(&format!("{name}=kill@{count}"));
        let ended = done(&killed, &checkpoint);
        assert_eq!(ended.code, -1, "{point}: {ended:?}");
        let recovered = done(&tree.cli("", ""), "recover");
        assert_eq!(recovered.code, 16, "{point}: {recovered:?}");
        let rows = recovered.report["recovered"].as_array().cloned();
        let rows = rows.unwrap_or_default();
        assert_eq!(rows.len(), 2, "{point}: {recovered:?}");
        // A member's pid does as well as the root's.
        let member = rows[0]["pid"]
            .as_u64()
            .and_then(|pid| u32::try_from(pid).ok());
        back(point, member.expect("a pid"));
    }
    // Who gives it back dies in between.
    let killed = tree.cli("", "").dying_at("dump:all suspended=kill");
    done(&killed, &checkpoint);
    let killed = tree.cli("", "").dying_at("restore:locked for good=kill");
    let ended = done(&killed, &format!("restore --pid {}", alone.pid()));
    assert_eq!(ended.code, -1, "{ended:?}");
    let recovered = done(&tree.cli("", ""), "recover");
    assert_eq!(recovered.code, 0, "{recovered:?}");
    tree.computes_on();

    // Once somebody else has the job it is not to go on here.
    let killed = tree.cli("", "").dying_at("dump:all suspended=kill");
    done(&killed, &checkpoint);
    let open = json!({"format": 1, "entry": "open", "writer": "f".repeat(32)});
    tree.scene
        .put_entry("job", tree.scene.log_len("job") + 1, &open);
    let fenced = done(&tree.cli("", ""), &format!("restore --pid {}", alone.pid()));
    assert_eq!(fenced.code, 4, "{fenced:?}");
}

#[test]
fn a_tree_that_is_tied_to_others_is_refused_before_it_is_touched() {
    let Some(tree) = Tree::new(Mode::Staged) else {
        return;
    };
    // Of a session whose leader is none of it. Our own one's may be out of sight.
    let mut command = Command::new("setsid");
    command.args(["sh", "-c", "sh \"$0\" & echo $! >\"$1\"; wait"]);
    command.arg(tree.path("tree.sh")).arg(tree.path("tied.pid"));
    tree.scene.node.apply(command.env_clear());
    let _leader = Alone(with_path(command).spawn().expect("a shell"));
    tree.reaches(3);
    let saver = tree.saver("", "");
    let pid = std::fs::read_to_string(tree.path("tied.pid")).expect("its pid");
    let refused = done(&saver.cli, &format!("checkpoint --pid {}", pid.trim()));
    assert_eq!(refused.code, 3, "{refused:?}");
    assert!(refused.stderr.contains("host.shell_job"), "{refused:?}");
    assert_eq!(saver.calls("cuCheckpointProcessLock"), 0);
    tree.computes_on();
}

#[test]
fn a_tree_that_dies_behind_begin_is_lost_and_named() {
    let Some(tree) = Tree::new(Mode::Streamed) else {
        return;
    };
    let alone = tree.start();
    tree.reaches(3);
    // Without a place for it what the store does not take is lost (spill.on_failure is "abandon" here).
    tree.scene.server.set_rules(&json!([{"op": "UploadPart", "always": true, "action": {"status": 403, "code": "AccessDenied"}}]));
    let failed = done(
        &tree.cli("", ""),
        &format!("checkpoint --pid {}", alone.pid()),
    );
    assert_eq!(failed.code, 12, "{failed:?}");
    let targets = failed.report["targets"].as_array().cloned();
    assert!(
        targets.is_some_and(
            |all| all.len() == 2 && all.iter().all(|it| it["state"] == "checkpointing")
        ),
        "{failed:?}"
    );
    let recovered = done(&tree.cli("", ""), "recover --end");
    assert_eq!(recovered.code, 12, "{recovered:?}");
}

#[test]
fn a_streamed_save_of_a_tree_and_its_restore_are_in_order() {
    let Some(tree) = Tree::new(Mode::Streamed) else {
        return;
    };
    let alone = tree.start();
    tree.reaches(3);
    // What does not wait for an answer shows.
    tree.scene.server.set_rules(&json!([
        {"op": ["UploadPart", "CompleteMultipartUpload", "PutObject"], "always": true, "action": {"delay_after_ms": 15}},
    ]));
    let stat = format!("/proc/{}/stat", alone.pid());
    let watch = std::thread::spawn(move || {
        let is_there = || std::fs::read_to_string(&stat).is_ok_and(|text| !text.contains(") Z "));
        while is_there() {
            std::thread::sleep(Duration::from_micros(200));
        }
        now()
    });
    let saver = tree.saver("", "save = \"always\"");
    let saved = done(&saver.cli, &format!("checkpoint --pid {}", alone.pid()));
    assert_eq!(saved.code, 0, "{saved:?}");
    let died = watch.join().expect("it ends");
    drop(alone);
    let called = |name: &'static str| move |line: &Value| line["call"] == name;
    let asked = |op: &'static str, part: &'static str| {
        move |line: &Value| {
            let key = line["key"].as_str().unwrap_or_default();
            line["op"] == op && key.contains(part)
        }
    };
    let (trace, log) = (saver.trace(), tree.scene.server.all_requests());
    let calls = |name: &'static str| span(name, &trace, 2, called(name));
    let requests = |op: &'static str, part: &'static str, count: usize| {
        span(part, &log, count, asked(op, part))
    };
    // Two processes, of which one uses two GPUs; `open`, `saving` and `image`.
    let entered = log.iter().rfind(|line| asked("PutObject", "/log/")(line));
    let entered = entered.and_then(|line| Some((line["t_us"].as_u64()?, line["end_us"].as_u64()?)));
    in_order(&[
        ("lock", calls("cuCheckpointProcessLock")),
        ("begin", calls("cuCheckpointProcessCheckpoint")),
        ("gpus", requests("CompleteMultipartUpload", "/gpu-", 3)),
        ("manifest", requests("PutObject", "manifest.sealed.json", 1)),
        ("seal", requests("PutObject", "/sealed.json", 1)),
        ("complete", calls("cuCheckpointOperationComplete")),
        ("host", requests("UploadPart", "/host-", 1)),
        ("landed", requests("CompleteMultipartUpload", "/host-", 1)),
        ("manifest", requests("PutObject", "/manifest.json", 1)),
        ("commit", entered.expect("an entry")),
        ("death", (died, died)),
    ]);

    let saver = tree.saver("", "save = \"always\"");
    let restored = done(&saver.cli, "restore");
    assert_eq!(restored.code, 0, "{restored:?}");
    let trace = saver.trace();
    let calls = |name: &'static str| span(name, &trace, 2, called(name));
    in_order(&[
        ("restore", calls("cuCheckpointProcessRestore")),
        ("complete", calls("cuCheckpointOperationComplete")),
        ("unlock", calls("cuCheckpointProcessUnlock")),
    ]);
    tree.computes_on();
    let pid = restored.report["targets"][0]["pid"].as_u64();
    end_namespace(pid.expect("a pid"));
}

#[test]
fn a_tree_whose_save_does_not_fit_is_refused_and_has_the_signal() {
    let Some(tree) = Tree::new(Mode::Streamed) else {
        return;
    };
    let saver = tree.saver("", "").unhurried();
    let config = saver.cli.config_text();
    let config = config.replace("[job]\n", "[job]\ninterval = \"1s\"\n");
    let saver = saver.with_config(&config);
    let mut command = with_path(saver.cli.command("run"));
    command.arg("--").arg("sh").arg(tree.path("tree.sh"));
    // The first save in passing tells the rate, and keeps the job so long that the next one is left out: none is under way at the notice.
    tree.scene.server.set_rules(&json!([
        {"op": "UploadPart", "always": true, "action": {"delay_before_ms": 2000}},
    ]));
    let run = Supervised::start((saver, command));
    until_status(&tree.scene, |report| report.saves_skipped >= 1);
    let verdict = notified(&tree.scene, Some(3.0));
    assert_eq!(verdict.exit_code, 5, "{verdict:?}");
    let ended = run.ends();
    assert_eq!(ended.code, 143, "the job's own end: {ended:?}");
    assert!(
        ended.stderr.contains("preempt.deadline_policy"),
        "{ended:?}"
    );
    assert_eq!(tree.scene.images("job"), [1]);
}
