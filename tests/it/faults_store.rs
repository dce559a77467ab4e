//! Every request to the store that fails, once and for good: a fault that passes costs nothing but time, one that stays ends the save with the truth told, and nothing is
//! ever taken for stored that is not.

use std::sync::Mutex;

use ckptstream::store::{Key, PutOutcome, Store};
use serde_json::{Value, json};

use crate::support::s3_server::has_credentials;
use crate::support::scene::{Saver, Scene, Watched, assert_failed, cause, told};
use crate::support::{Run, Target};

/// Requests that a save makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Site {
    op: &'static str,
    key: &'static str,
    phase: &'static str,
}

const CLAIM: Site = site("PutObject", "attempt.json", "prepare");
const LOG: Site = site("GetObject", "/log/", "prepare");
const OPEN: Site = site("PutObject", "/log/00000001", "prepare");
const ANNOUNCE: Site = site("PutObject", "/log/00000002", "prepare");
const CREATE: Site = site("CreateMultipartUpload", ".zst", "prepare");
const PART: Site = site("UploadPart", ".zst", "stream");
const COMPLETE: Site = site("CompleteMultipartUpload", ".zst", "land");
const HEAD: Site = site("HeadObject", ".zst", "land");
const TABLE: Site = site("PutObject", ".frames.json", "commit");
const MANIFEST: Site = site("PutObject", "manifest.json", "commit");
const COMMIT: Site = site("PutObject", "/log/00000003", "commit");

const fn site(op: &'static str, key: &'static str, phase: &'static str) -> Site {
    Site { op, key, phase }
}

/// What the store does instead of answering.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    Refused,
    Internal,
    SlowDown,
    OkWithError,
    OkWithNothing,
    /// Applied, and the answer is cut.
    CutAnswer,
    /// The body does not arrive whole.
    ResetRequest,
    Dropped,
    /// Applied, and not answered.
    AppliedThenDropped,
    Stalled,
    Late,
}

/// Those that a later attempt gets over, wherever they strike.
const PASSING: [Fault; 7] = [
    Fault::Internal,
    Fault::SlowDown,
    Fault::OkWithError,
    Fault::OkWithNothing,
    Fault::Dropped,
    Fault::AppliedThenDropped,
    Fault::Stalled,
];

impl Fault {
    fn action(self) -> Value {
        match self {
            Self::Refused => json!({"status": 403, "code": "AccessDenied"}),
            Self::Internal => json!({"status": 500, "code": "InternalError"}),
            Self::SlowDown => json!({"status": 503, "code": "SlowDown"}),
            Self::OkWithError => json!({"status": 200, "code": "InternalError"}),
            Self::OkWithNothing => json!({"status": 200, "empty": true}),
            Self::CutAnswer => json!({"wire": "cut-after", "bytes": 20}),
            Self::ResetRequest => json!({"wire": "reset-after", "bytes": 20}),
            Self::Dropped => json!({"drop": true}),
            Self::AppliedThenDropped => json!({"apply": true, "drop": true}),
            Self::Stalled => json!({"stall": true}),
            Self::Late => json!({"delay_before_ms": 200, "delay_after_ms": 100}),
        }
    }
}

fn rule(site: Site, fault: Fault, when: &str) -> Value {
    let mut rule = json!({"op": site.op, "key_contains": site.key, "action": fault.action()});
    rule[when] = if when == "always" {
        json!(true)
    } else {
        json!(1)
    };
    rule
}

/// Tries every case, four at a time: they mostly wait.
fn try_all<T: Sync>(cases: &[T], try_one: impl Fn(&T) + Sync) {
    let next = Mutex::new(cases.iter());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let case = next.lock().expect("no holder panics").next();
                    let Some(case) = case else { return };
                    try_one(case);
                }
            });
        }
    });
}

/// A target, and a save of it against a store with these rules.
fn save(scene: &Scene, rules: &[Value], config: &str) -> (Target, Saver, Run) {
    let target = scene.target();
    scene.server.set_rules(&Value::from(rules.to_vec()));
    let saver = scene.saver_with("job", "", config);
    let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
    scene.server.set_rules(&json!([]));
    (target, saver, run)
}

/// A save that was not stopped: one image, whole, and a target that goes on from it.
fn must_be_saved(what: &str, scene: &Scene, target: Target, run: &Run) {
    assert_eq!(run.code, 0, "{what}: {run:?}");
    assert_eq!(told(run), Some("checkpointed"), "{what}");
    assert_eq!(scene.images("job"), [1], "{what}: one entry");
    let cli = scene.saver("job", "").cli;
    cli.ok("verify");
    let mut target = target;
    cli.ok(&format!("restore --pid {}", target.pid()));
    scene.must_compute_on(&mut target);
    scene.must_have_computed_rightly(target);
}

#[test]
fn a_fault_that_passes_costs_nothing_but_time() {
    let mut cases = Vec::new();
    for site in [
        CLAIM, LOG, OPEN, ANNOUNCE, CREATE, PART, COMPLETE, HEAD, TABLE, MANIFEST, COMMIT,
    ] {
        cases.extend(PASSING.map(|fault| (site, fault)));
    }
    cases.extend([PART, COMMIT].map(|site| (site, Fault::Late)));
    cases.extend([LOG, CREATE, COMPLETE].map(|site| (site, Fault::CutAnswer)));
    cases.extend(
        [CLAIM, PART, COMPLETE, TABLE, MANIFEST, COMMIT].map(|site| (site, Fault::ResetRequest)),
    );
    try_all(&cases, |&(site, fault)| {
        let what = format!("{site:?} {fault:?} once");
        let scene = Scene::new(&[]);
        // Patient enough for a busy machine.
        let (target, _, run) = save(&scene, &[rule(site, fault, "nth")], PATIENT);
        if site == COMMIT {
            must_be_saved(&what, &scene, target, &run);
        } else {
            assert_eq!(run.code, 0, "{what}: {run:?}");
            assert_eq!(scene.images("job"), [1], "{what}: one entry");
            scene.saver("job", "").cli.ok("verify");
        }
        let struck = scene
            .server
            .all_requests()
            .iter()
            .any(|request| !request["fault"].is_null());
        assert!(struck, "{what}: the fault did not strike");
    });
}

/// Replaces the scene's limits.
const PATIENT: &str = "retry_timeout = \"30s\"";

#[test]
fn a_fault_that_stays_before_begin_leaves_the_target_running() {
    let faults = [
        Fault::Refused,
        Fault::Internal,
        Fault::SlowDown,
        Fault::OkWithError,
        Fault::OkWithNothing,
        Fault::Dropped,
        Fault::AppliedThenDropped,
        Fault::Stalled,
    ];
    let sites = [CLAIM, LOG, CREATE];
    let cases: Vec<_> = sites
        .iter()
        .flat_map(|site| faults.map(|fault| (*site, fault)))
        .collect();
    try_all(&cases, |&(site, fault)| {
        let what = format!("{site:?} {fault:?} always");
        let scene = Scene::new(&[]);
        let (mut target, saver, run) = save(&scene, &[rule(site, fault, "always")], "");
        let code = if fault == Fault::Refused { 3 } else { 10 };
        assert_failed(&what, &run, code, site.phase, &[site.op]);
        assert_eq!(told(&run), Some("running"), "{what}");
        assert_eq!(
            saver.calls("cuCheckpointProcessLock"),
            0,
            "{what}: locked for nothing"
        );
        scene.must_not_be_committed("job", &saver);
        scene.must_compute_on(&mut target);
        scene.must_have_computed_rightly(target);
        let aborted = scene.server.requests("AbortMultipartUpload").len();
        let begun = scene.server.requests("CreateMultipartUpload");
        let begun = begun
            .iter()
            .filter(|request| request["status"] == 200 && request["fault"].is_null());
        assert_eq!(aborted, begun.count(), "{what}: uploads stay open");
    });
}

#[test]
fn a_fault_that_stays_after_begin_commits_nothing_and_is_told() {
    let faults = [
        Fault::Refused,
        Fault::Internal,
        Fault::SlowDown,
        Fault::OkWithError,
        Fault::OkWithNothing,
        Fault::Dropped,
        Fault::Stalled,
    ];
    let sites = [PART, COMPLETE, HEAD, TABLE, MANIFEST, COMMIT];
    let mut cases: Vec<_> = sites
        .iter()
        .flat_map(|site| faults.map(|fault| (*site, fault)))
        .collect();
    cases.extend([PART, TABLE, MANIFEST].map(|site| (site, Fault::AppliedThenDropped)));
    try_all(&cases, |&(site, fault)| {
        let what = format!("{site:?} {fault:?} always");
        let scene = Scene::new(&[]);
        let (target, saver, run) = save(&scene, &[rule(site, fault, "always")], "");
        // What the store refused it did not do; of every other answer to the commit nobody knows.
        let code = if site == COMMIT && fault != Fault::Refused {
            13
        } else {
            12
        };
        assert_failed(&what, &run, code, site.phase, &[site.op]);
        assert_eq!(told(&run), Some("checkpointing"), "{what}");
        assert_eq!(scene.state_of(&target), "checkpointing", "{what}");
        scene.must_not_be_committed("job", &saver);
        if site == PART {
            assert_eq!(
                scene.server.requests("AbortMultipartUpload").len(),
                2,
                "{what}"
            );
        }
        assert_eq!(uploads_left(&run), 0, "{what}: {run:?}");
    });
}

/// Uploads that the report says could not be aborted.
fn uploads_left(run: &Run) -> usize {
    let attached = run.report["attached"].as_array().cloned();
    let lines = attached.unwrap_or_default();
    lines
        .iter()
        .filter(|line| line.to_string().contains("AbortMultipartUpload"))
        .count()
}

#[test]
fn an_answer_that_never_comes_is_settled_by_a_look() {
    let scene = Scene::new(&[]);
    // The object is there: that is what counts.
    let (target, _, run) = save(
        &scene,
        &[rule(COMPLETE, Fault::AppliedThenDropped, "always")],
        "",
    );
    must_be_saved("Complete", &scene, target, &run);

    let scene = Scene::new(&[]);
    let (target, _, run) = save(&scene, &[rule(COMPLETE, Fault::CutAnswer, "always")], "");
    must_be_saved("Complete, cut", &scene, target, &run);

    // The entry is there as well, but nobody can be asked: unknown, and said so. The target is not released.
    let scene = Scene::new(&[]);
    let rules = [rule(COMMIT, Fault::AppliedThenDropped, "always")];
    let (target, saver, run) = save(&scene, &rules, "");
    assert_failed("commit", &run, 13, "commit", &["ckptstream list"]);
    assert_eq!(told(&run), Some("checkpointing"));
    assert_eq!(scene.state_of(&target), "checkpointing");
    assert_eq!(saver.calls("cuCheckpointOperationComplete"), 0);
    assert_eq!(scene.images("job"), [1], "list tells how it ended");
}

#[test]
fn a_slot_that_is_said_to_be_taken_is_looked_at() {
    let taken = json!({
        "op": "PutObject", "key_contains": "/log/00000003", "nth": 1, "action": {"status": 412, "code": "PreconditionFailed"},
    });
    // Said to be taken, and it is empty; or it cannot be read: not after the log was, by four slots, and the first one once more for its kind.
    let unreadable = json!({"op": "GetObject", "key_contains": "/log/", "from": 6, "action": {"status": 500, "code": "InternalError"}});
    for rules in [vec![taken.clone()], vec![taken, unreadable]] {
        let scene = Scene::new(&[]);
        let (target, saver, run) = save(&scene, &rules, "");
        assert_failed("taken", &run, 13, "commit", &[]);
        assert_eq!(told(&run), Some(scene.state_of(&target).as_str()));
        scene.must_not_be_committed("job", &saver);
    }
}

/// Of a job that has no log yet it is asked whether it has one that goes by epochs.
#[test]
fn a_job_without_a_log_is_not_begun_unseen() {
    for (fault, code, says) in [
        (Fault::Refused, 3, "s3:ListBucket"),
        (Fault::Internal, 10, "InternalError"),
        (Fault::Stalled, 10, "ListObjectsV2"),
    ] {
        let scene = Scene::new(&[]);
        let rules = [json!({"op": "ListObjectsV2", "always": true, "action": fault.action()})];
        let (mut target, saver, run) = save(&scene, &rules, "");
        assert_failed("listing", &run, code, "prepare", &[says]);
        assert_eq!(saver.calls("cuCheckpointProcessLock"), 0);
        assert_eq!(scene.server.requests("PutObject").len(), 1, "the claim");
        scene.must_compute_on(&mut target);
    }
}

#[test]
fn clean_up_that_fails_is_attached_to_the_cause() {
    let abort = site("AbortMultipartUpload", ".zst", "stream");
    for fault in [Fault::Refused, Fault::Internal, Fault::Dropped] {
        for when in ["nth", "always"] {
            let what = format!("{fault:?} {when}");
            let scene = Scene::new(&[]);
            let rules = [
                rule(PART, Fault::Refused, "always"),
                rule(abort, fault, when),
            ];
            let (_target, saver, run) = save(&scene, &rules, "");
            assert_failed(&what, &run, 12, "stream", &["UploadPart", "AccessDenied"]);
            assert!(
                !cause(&run).contains("AbortMultipartUpload"),
                "{what}: {run:?}"
            );
            let left = match (fault, when) {
                (Fault::Refused, "nth") => 1,
                (_, "nth") => 0,
                _ => 2,
            };
            assert_eq!(uploads_left(&run), left, "{what}: {run:?}");
            scene.must_not_be_committed("job", &saver);
        }
    }
}

#[test]
fn the_deadline_counts_and_not_the_patience() {
    // With this patience the command would outlive the test.
    let patience = "retry_timeout = \"1h\"";
    let cases = [(CLAIM, 10), (PART, 12), (COMPLETE, 12), (COMMIT, 13)];
    let cases: Vec<_> = cases
        .iter()
        .flat_map(|case| [Fault::Internal, Fault::Stalled].map(|fault| (*case, fault)))
        .collect();
    try_all(&cases, |&((site, code), fault)| {
        let what = format!("{site:?} {fault:?}");
        let scene = Scene::new(&[]);
        let target = scene.target();
        scene
            .server
            .set_rules(&json!([rule(site, fault, "always")]));
        let saver = scene.saver_with("job", "", patience);
        let args = format!("checkpoint --deadline 3s --pid {}", target.pid());
        let run = saver.cli.run(&args);
        assert_failed(&what, &run, code, site.phase, &["deadline"]);
        scene.server.set_rules(&json!([]));
        scene.must_not_be_committed("job", &saver);
    });
}

/// Puts an entry of somebody else into the job's log.
async fn put_entry(store: &dyn Store, slot: u64, entry: &Value) {
    let key = Key::new(&format!("job/log/{slot:08}.json")).expect("a key");
    let put = store.put_if_absent(&key, entry.to_string().into()).await;
    assert_eq!(put.expect("the server runs"), PutOutcome::Created);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_writers_entry_is_passed_or_obeyed() {
    if !has_credentials("faults_store::another_writers_entry_is_passed_or_obeyed") {
        return;
    }
    let theirs = "ffffffffffffffffffffffffffffffff";
    let image = json!({
        "format": 1, "entry": "image", "writer": theirs, "attempt": theirs, "manifest_key": format!("data/{theirs}/manifest.json"),
        "manifest_len": 1000, "manifest_digest": "00000000000000000000000000000001", "kind": "gpu", "raw_len": 1, "stored_len": 1,
        "created_ms": 1, "tool": "another",
    });
    let saving = json!({"format": 1, "entry": "saving", "writer": theirs, "attempt": theirs, "seconds": 60, "spill": null,
        "by": {"host": "elsewhere", "boot_id": "another", "pid_namespace": 1, "pid": 2, "start_time": 3}});
    for (entry, code) in [
        (image, 0),
        (saving, 0),
        (
            json!({"format": 1, "entry": "bad", "writer": theirs, "generation": 7}),
            0,
        ),
        (json!({"format": 9, "entry": "of the future"}), 0),
        (json!("no entry at all"), 0),
        (json!({"format": 1, "entry": "open", "writer": theirs}), 15),
        (
            json!({"format": 1, "entry": "dropped", "writer": theirs, "attempt": theirs}),
            0,
        ),
        // Ours; filled in below.
        (
            json!({"format": 1, "entry": "dropped", "writer": theirs, "attempt": ""}),
            15,
        ),
    ] {
        let what = entry.to_string();
        let scene = Scene::new(&[]);
        let store = scene.store().await;
        let mut target = scene.target();
        let saver = scene.saver("job", "d2h=8MiB");
        let running = Watched::start(&saver.cli, &format!("checkpoint --pid {}", target.pid()));
        running.until_phase("stream");
        let mut entry = entry;
        if entry["attempt"] == "" {
            let attempts = store.list_dirs("job/data/").await.expect("a listing");
            assert_eq!(attempts.len(), 1);
            entry["attempt"] = attempts[0].clone().into();
        }
        put_entry(&store, 3, &entry).await;
        let run = running.wait();
        assert_eq!(run.code, code, "{what}: {run:?}");
        if code == 0 {
            assert_eq!(run.report["generation"], 4, "{what}");
            scene.saver("job", "").cli.ok("verify --image 4");
            scene.saver("job", "").cli.ok(&format!(
                "restore --pid {} --image 4 --take-over",
                target.pid()
            ));
            scene.must_compute_on(&mut target);
        } else {
            assert_failed(&what, &run, 15, "commit", &["fenced"]);
            assert_eq!(told(&run), Some("checkpointing"), "{what}");
            assert_eq!(scene.state_of(&target), "checkpointing", "{what}");
            scene.must_not_be_committed("job", &saver);
        }
    }
}

#[test]
fn a_writer_waits_for_the_one_before_it() {
    let scene = Scene::new(&[]);
    let (slow, quick) = (scene.target(), scene.target());
    let saver = scene.saver("job", "d2h=4MiB");
    let running = Watched::start(&saver.cli, &format!("checkpoint --pid {}", slow.pid()));
    running.until_phase("stream");
    let cli = scene.saver("job", "").cli;
    let refused = cli.run(&format!("checkpoint --pid {} --no-wait", quick.pid()));
    assert_failed(
        "busy",
        &refused,
        4,
        "prepare",
        &["is under way", "--take-over"],
    );
    cli.ok(&format!("checkpoint --pid {}", quick.pid()));
    let first = running.wait();
    assert_eq!(first.code, 0, "{first:?}");
    let generations = scene.generations("job");
    assert_eq!(generations.len(), 2);
    assert_eq!(first.report["generation"], generations[1], "it came first");
    cli.ok("verify");
}

#[test]
fn who_opens_the_job_before_a_save_is_announced_has_it() {
    if !has_credentials("faults_store::who_opens_the_job_before_a_save_is_announced_has_it") {
        return;
    }
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    let theirs = json!({"format": 1, "entry": "open", "writer": "somebody else"});
    scene.put_entry("job", 2, &theirs);
    // It is not there yet when the log is read first, and comes between our own `open` and the announcement.
    let late = json!({"op": "GetObject", "key_contains": "/log/00000002", "nth": 1, "action": {"status": 404, "code": "NoSuchKey"}});
    scene.server.set_rules(&json!([late]));
    let saver = scene.saver("job", "");
    let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
    scene.server.set_rules(&json!([]));
    assert_failed("overtaken", &run, 4, "prepare", &["opened the job"]);
    assert_eq!(saver.calls("cuCheckpointProcessLock"), 0);
    scene.must_not_be_committed("job", &saver);
    scene.must_compute_on(&mut target);
}

#[test]
fn who_takes_the_job_over_fences_whoever_saves_it() {
    let scene = Scene::new(&[]);
    let (slow, quick) = (scene.target(), scene.target());
    let saver = scene.saver("job", "d2h=4MiB");
    let running = Watched::start(&saver.cli, &format!("checkpoint --pid {}", slow.pid()));
    running.until_phase("stream");
    let cli = scene.saver("job", "").cli;
    cli.ok(&format!("checkpoint --pid {} --take-over", quick.pid()));
    let fenced = running.wait();
    assert_failed("fenced", &fenced, 15, "commit", &["opened the job"]);
    assert_eq!(told(&fenced), Some(scene.state_of(&slow).as_str()));
    assert_eq!(saver.calls("cuCheckpointOperationComplete"), 0);
    assert_eq!(scene.images("job"), [1]);
    cli.ok("verify");
}

#[test]
fn a_store_that_goes_away_is_told_from_an_absent_image() {
    let scene = Scene::new(&[]);
    scene.save("job");
    let fresh = scene.fresh();
    for (site, fault) in [
        (LOG, Fault::Refused),
        (LOG, Fault::OkWithError),
        (LOG, Fault::OkWithNothing),
        (site("GetObject", "manifest.json", "read"), Fault::Internal),
        (
            site("GetObject", "manifest.json", "read"),
            Fault::OkWithNothing,
        ),
        (site("GetObject", ".frames.json", "read"), Fault::Refused),
        (site("HeadObject", ".zst", "read"), Fault::Internal),
        (site("HeadObject", ".zst", "read"), Fault::OkWithNothing),
        (site("GetObject", ".zst", "read"), Fault::Internal),
        (site("GetObject", ".zst", "read"), Fault::Refused),
        (site("GetObject", ".zst", "read"), Fault::OkWithError),
        (site("GetObject", ".zst", "read"), Fault::CutAnswer),
    ] {
        let what = format!("{site:?} {fault:?}");
        let saver = scene.saver("job", "");
        scene
            .server
            .set_rules(&json!([rule(site, fault, "always")]));
        let verify = saver.cli.run("verify");
        assert_failed(&what, &verify, 3, "read", &[]);
        // Nothing of the driver was touched, whatever the store does; and no older image would be taken for it.
        let restore = saver
            .cli
            .run(&format!("restore --pid {} --into-fresh", fresh.pid()));
        assert_eq!(restore.code, 20, "{what}: {restore:?}");
        assert_eq!(saver.calls("cuCheckpointProcessRestore"), 0, "{what}");

        // And when it passes, nothing is left of it.
        scene.server.set_rules(&json!([rule(site, fault, "nth")]));
        if fault != Fault::Refused {
            saver.cli.ok("verify");
        }
        scene.server.set_rules(&json!([]));
    }
    let mut fresh = fresh;
    scene
        .saver("job", "")
        .cli
        .ok(&format!("restore --pid {} --into-fresh", fresh.pid()));
    scene.must_compute_on(&mut fresh);
}

#[test]
fn bytes_that_are_damaged_on_the_way_are_fetched_again_or_refused() {
    let scene = Scene::new(&[]);
    let mut seen = scene.save("job");
    let flip = |when: &str| {
        let action = json!({"wire": "flip-bit", "bytes": 100_000});
        let mut rule = json!({"op": "GetObject", "key_contains": ".zst", "action": action});
        rule[when] = json!(true);
        rule
    };
    // Behind the two seek tables, which are short.
    let mut once = flip("nth");
    once["nth"] = json!(3);

    let saver = scene.saver("job", "");
    scene.server.set_rules(&json!([flip("always")]));
    let run = saver.cli.run("verify");
    assert_failed("verify", &run, 20, "read", &[".zst is damaged"]);
    let fresh = scene.fresh();
    let run = saver
        .cli
        .run(&format!("restore --pid {} --into-fresh", fresh.pid()));
    assert!([20, 21].contains(&run.code), "{run:?}");
    assert_eq!(saver.calls("cuCheckpointOperationComplete"), 0);
    drop(fresh);

    // A chunk that comes when the driver has begun, and is damaged every time: first in the whole object, then alone.
    let from = |count: u64, at: u64| {
        let action = json!({"wire": "flip-bit", "bytes": at});
        json!({"op": "GetObject", "key_contains": ".zst", "from": count, "action": action})
    };
    scene
        .server
        .set_rules(&json!([from(5, 100), from(3, 2_000_000)]));
    let fresh = scene.fresh();
    let run = saver
        .cli
        .run(&format!("restore --pid {} --into-fresh", fresh.pid()));
    assert_eq!(run.code, 21, "{run:?}");
    assert_eq!(saver.calls("cuCheckpointOperationComplete"), 0);
    drop(fresh);

    scene.server.set_rules(&json!([once]));
    saver.cli.ok("verify");
    scene.server.set_rules(&json!([once]));
    let mut fresh = scene.fresh();
    let run = saver
        .cli
        .run(&format!("restore --pid {} --into-fresh", fresh.pid()));
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stderr.contains("fetching it again"), "{run:?}");
    scene.must_compute_on(&mut fresh);
    seen.extend(fresh.kill());
    seen.dedup();
    scene.must_be_the_steps_of_the_job(&seen);
}

#[test]
fn what_describes_an_image_is_read_again_before_it_counts_as_damaged() {
    let scene = Scene::new(&[]);
    scene.save("job");
    scene.save("job");
    let saver = scene.saver("job", "");
    // The first GET of a data object is of its seek table.
    for key in ["/log/0000000", "manifest.json", ".frames.json", ".zst"] {
        let action = json!({"wire": "flip-bit", "bytes": 9});
        let rule = json!({"op": "GetObject", "key_contains": key, "nth": 1, "action": action});
        scene.server.set_rules(&json!([rule]));
        scene.server.forget_requests();
        let mut fresh = scene.fresh();
        let args = format!("restore --pid {} --into-fresh", fresh.pid());
        let run = saver.cli.run(&args);
        assert_eq!(run.code, 0, "{key}: {run:?}");
        let reads = scene.server.requests("GetObject");
        let flipped = reads.iter().filter(|read| read["fault"] == 0).count();
        assert_eq!(flipped, 1, "{key}");
        // A restore looks twice in any case, verify does not.
        scene.server.set_rules(&json!([rule]));
        saver.cli.ok("verify");
        assert_eq!(run.report["image"], "00000006", "{key}");
        scene.must_compute_on(&mut fresh);
    }
}

#[test]
fn a_part_that_is_damaged_on_the_way_is_sent_again() {
    let scene = Scene::new(&[]);
    let rule = json!({"op": "UploadPart", "nth": 1, "action": {"wire": "flip-bit", "of": "request", "bytes": 1000}});
    let (target, _, run) = save(&scene, &[rule], PATIENT);
    must_be_saved("flipped part", &scene, target, &run);
    assert_ne!(run.report["retries"], 0);
}
