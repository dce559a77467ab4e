//! `drill`: a real lock and unlock, and a small image there and back. Whatever fails, the target runs on, or is said not to. And the same at the start of a supervised job (`preempt.drill`), which must not harm it.

use std::time::{Duration, Instant};

use serde_json::json;

use super::preflight::{told as told_of, wrong};
use super::support::process::PATIENCE;
use super::support::scene::{Scene, TARGET, cause, told, until};
use super::support::supervised::{Ended, Job, REQUEUE, Supervised, status};
use super::support::{Run, Target};

/// The checks of a drill that preflight has not, with their states.
fn rehearsed(run: &Run) -> Vec<String> {
    let checks = run.report["checks"].as_array().cloned().unwrap_or_default();
    let word = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let words = checks
        .iter()
        .map(|check| format!("{} {}", word(&check["state"]), word(&check["name"])));
    let of_drill = |words: &String| {
        ["target.lock", "target.unlock", "store.image"]
            .iter()
            .any(|name| words.ends_with(name))
    };
    words.filter(of_drill).collect()
}

fn drill(scene: &Scene, target: &Target, driver: &str) -> Run {
    let cli = scene.saver("job", driver).cli;
    cli.run(&format!("drill --pid {}", target.pid()))
}

/// No object and no upload of the job is left.
fn must_be_clean(scene: &Scene) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let left = runtime.block_on(async {
        use ckptstream::store::Store;
        let store = scene.store().await;
        let objects = store.list("job/").await.expect("the server runs");
        let uploads = store
            .abort_uploads_under("job/")
            .await
            .expect("the server runs");
        (objects.len(), uploads)
    });
    assert_eq!(left, (0, 0), "objects and uploads that are left");
}

#[test]
fn where_all_is_well_the_target_was_locked_and_runs_on_and_nothing_is_left() {
    if !crate::support::s3_server::has_credentials(
        "drill::where_all_is_well_the_target_was_locked_and_runs_on_and_nothing_is_left",
    ) {
        return;
    }
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    target.wait_for("step 1 ");
    let saver = scene.saver("job", "");
    let run = saver.cli.run(&format!("drill --pid {}", target.pid()));
    assert_eq!((run.code, wrong(&run)), (0, Vec::new()), "{run:?}");
    assert_eq!(
        rehearsed(&run),
        ["ok target.lock", "ok target.unlock", "ok store.image"],
        "{run:?}"
    );
    assert_eq!(told(&run), Some("running"), "{run:?}");
    assert!(
        told_of(&run, "target.lock").contains("driver.lock_timeout"),
        "{run:?}"
    );
    for (call, count) in [
        ("cuCheckpointProcessLock", 1),
        ("cuCheckpointProcessUnlock", 1),
        ("cuCheckpointProcessCheckpoint", 0),
    ] {
        assert_eq!(saver.calls(call), count, "{call}");
    }
    scene.must_compute_on(&mut target);
    scene.must_have_computed_rightly(target);
    must_be_clean(&scene);
}

#[test]
fn a_lock_that_runs_into_its_timeout_is_told_and_the_target_runs_on() {
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    let run = drill(&scene, &target, "fault=cuCheckpointProcessLock#1=code:600");
    assert_eq!(run.code, 3, "{run:?}");
    assert_eq!(rehearsed(&run), ["failed target.lock", "ok store.image"]);
    assert_eq!(told(&run), Some("running"), "{run:?}");
    let told = told_of(&run, "target.lock");
    assert!(
        told.contains("is running, looked up") && told.contains("driver.lock_timeout"),
        "{told}"
    );
    scene.must_compute_on(&mut target);
    scene.must_have_computed_rightly(target);
}

#[test]
fn a_target_that_is_not_unlocked_is_told_and_recover_lets_it_go() {
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    let run = drill(
        &scene,
        &target,
        "fault=cuCheckpointProcessUnlock#1=code:999",
    );
    assert_eq!(run.code, 12, "{run:?}");
    assert_eq!(told(&run), Some("locked"), "{run:?}");
    assert!(
        wrong(&run).contains(&"failed target.unlock".to_owned()),
        "{run:?}"
    );
    assert!(cause(&run).contains("ckptstream recover"), "{run:?}");
    let recover = format!("recover --pid {}", target.pid());
    scene.saver("job", "").cli.ok(&recover);
    scene.must_compute_on(&mut target);
    scene.must_have_computed_rightly(target);
}

/// An answer that says no is no proof that the target does not run.
#[test]
fn a_target_that_runs_whatever_the_unlock_answered_is_not_called_lost() {
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    let fault = "fault=cuCheckpointProcessUnlock#1=after-code:999";
    let run = drill(&scene, &target, fault);
    assert_eq!((run.code, told(&run)), (0, Some("running")), "{run:?}");
    scene.must_compute_on(&mut target);
}

#[test]
fn a_drill_that_dies_between_lock_and_unlock_is_followed_by_its_guard() {
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    let cli = scene.saver("job", "").cli;
    let run = cli
        .dying_at("drill:locked=kill")
        .run(&format!("drill --pid {}", target.pid()));
    assert_eq!(run.code, -1, "it did not die: {run:?}");
    scene.must_compute_on(&mut target);
    let recover = format!("recover --pid {}", target.pid());
    scene.saver("job", "").cli.ok(&recover);
    scene.must_have_computed_rightly(target);
}

#[test]
fn a_store_that_does_not_take_the_image_or_spoils_it_is_told() {
    if !crate::support::s3_server::has_credentials(
        "drill::a_store_that_does_not_take_the_image_or_spoils_it_is_told",
    ) {
        return;
    }
    for (action, says) in [
        (
            json!({"status": 403, "code": "AccessDenied"}),
            "AccessDenied",
        ),
        // After every check of the server.
        (json!({"wire": "flip-stored-bit", "bytes": 4096}), "damaged"),
    ] {
        let scene = Scene::new(&[]);
        let rule = json!({"op": "UploadPart", "key_contains": "drill.zst", "always": true, "action": action});
        scene.server.set_rules(&json!([rule]));
        let mut target = scene.target();
        let run = drill(&scene, &target, "");
        assert_eq!(run.code, 3, "{action}: {run:?}");
        assert_eq!(wrong(&run), ["failed store.image"], "{action}: {run:?}");
        assert!(
            told_of(&run, "store.image").contains(says),
            "{action}: {run:?}"
        );
        scene.must_compute_on(&mut target);
        must_be_clean(&scene);
    }
}

/// What preflight found out is not tried once more.
#[test]
fn what_cannot_be_is_not_tried() {
    let scene = Scene::new(&[]);
    scene.server.set_rules(
        &json!([{"op": "ListObjectsV2", "always": true, "action": {"status": 403, "code": "AccessDenied"}}]),
    );
    let mut target = scene.target();
    let run = drill(&scene, &target, "");
    assert_eq!(
        rehearsed(&run),
        ["ok target.lock", "ok target.unlock", "failed store.image"],
        "{run:?}"
    );
    assert!(
        told_of(&run, "store.image").contains("because of store.list"),
        "{run:?}"
    );
    scene.must_compute_on(&mut target);
    let gone = scene.saver("job", "").cli.run("drill --pid 4194303");
    assert_eq!(
        (gone.code, rehearsed(&gone)),
        (
            3,
            vec![
                "failed target.lock".to_owned(),
                "failed store.image".to_owned()
            ]
        )
    );
}

/// A driver without custom storage cannot save, and locks and unlocks all the same.
#[test]
fn without_custom_storage_the_lock_is_tried_too() {
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    let run = drill(&scene, &target, "api=13030");
    assert_eq!(run.code, 3, "{run:?}");
    assert_eq!(wrong(&run), ["failed node.driver"], "{run:?}");
    assert_eq!(
        rehearsed(&run),
        ["ok target.lock", "ok target.unlock", "ok store.image"]
    );
    scene.must_compute_on(&mut target);
}

/// A job whose start has a drill.
fn drilled_job<'a>(scene: &'a Scene, more: &str) -> Job<'a> {
    Job::new(scene, TARGET).with(&format!("[preempt]\ndrill = true\n{more}"))
}

/// Waits until the drill is over and a save is prepared. What the drill came to.
fn drilled(scene: &Scene, run: &mut Supervised) -> String {
    run.wait_for("step 1 ");
    let started = Instant::now();
    loop {
        let report = status(scene);
        if let (Some(line), true) = (report.drill, report.armed) {
            return line;
        }
        assert!(started.elapsed() < PATIENCE, "{:?}", report.not_armed);
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The node goes away: the job is saved at the first try, whatever became of the drill. How it ended, and after what time.
fn must_be_saved(scene: &Scene, run: Supervised) -> (Ended, Duration) {
    let noticed = Instant::now();
    run.process.signal("TERM");
    let ended = run.ends();
    let took = noticed.elapsed();
    assert_eq!(ended.code, REQUEUE, "{ended:?}");
    assert!(!ended.stderr.contains("tried again"), "{ended:?}");
    assert_eq!(scene.images("job"), [1], "{ended:?}");
    scene.saver("job", "").cli.ok("verify");
    let steps = ended.said.iter().filter(|line| line.contains(" digest "));
    let steps: Vec<String> = steps.cloned().collect();
    scene.must_be_the_steps_of_the_job(&steps);
    (ended, took)
}

/// Keys of the small images that were asked for so.
fn small_images(scene: &Scene, operation: &str) -> Vec<String> {
    let requests = scene.server.requests(operation);
    let keys = requests.iter().filter_map(|it| it["key"].as_str());
    let keys = keys.filter(|key| key.ends_with("/drill.zst"));
    keys.map(str::to_owned).collect()
}

#[test]
fn a_supervised_job_has_one_drill_and_then_a_save_is_prepared() {
    let scene = Scene::new(&[]);
    let mut run = drilled_job(&scene, "").start();
    let line = drilled(&scene, &mut run);
    for words in ["locked within", "came back with every digest right"] {
        assert!(line.contains(words), "{line}");
    }
    let text = scene.saver("job", "").cli.command("status").output();
    let text = String::from_utf8(text.expect("it runs").stdout).expect("text");
    assert!(text.contains(&format!("drill     {line}\n")), "{text}");
    // It goes on for a while, and is not locked once more.
    for _ in 0..50 {
        run.wait_for("step ");
    }
    for call in ["cuCheckpointProcessLock", "cuCheckpointProcessUnlock"] {
        assert_eq!(run.calls(call), 1, "{call}");
    }
    assert_eq!(small_images(&scene, "CompleteMultipartUpload").len(), 1);
    assert_eq!(
        small_images(&scene, "DeleteObject"),
        small_images(&scene, "CompleteMultipartUpload")
    );
    must_be_saved(&scene, run);
}

/// Without the key nobody touches the job.
#[test]
fn a_job_whose_start_has_no_drill_is_not_locked() {
    let scene = Scene::new(&[]);
    let mut run = Job::new(&scene, TARGET).start();
    run.wait_for("step 1 ");
    until(|| status(&scene).armed);
    assert_eq!(status(&scene).drill, None);
    assert_eq!(run.calls("cuCheckpointProcessLock"), 0);
}

#[test]
fn a_drill_that_fails_is_told_with_what_mends_it_and_the_job_goes_on() {
    let denied = json!({"status": 403, "code": "AccessDenied"});
    for (driver, rules, says) in [
        (
            "fault=cuCheckpointProcessLock#1=code:600",
            json!([]),
            "raise driver.lock_timeout",
        ),
        (
            "fault=cuCheckpointProcessUnlock#1=code:999",
            json!([]),
            "was unlocked afterwards",
        ),
        (
            "",
            json!([{"op": "UploadPart", "key_contains": "drill.zst", "always": true, "action": denied}]),
            "s3:PutObject",
        ),
    ] {
        let scene = Scene::new(&[]);
        scene.server.set_rules(&rules);
        let mut run = Supervised::start(drilled_job(&scene, "").command(driver));
        let line = drilled(&scene, &mut run);
        assert!(line.starts_with("a save would fail: "), "{line}");
        assert!(line.contains(says), "{line}");
        let (ended, _took) = must_be_saved(&scene, run);
        let told = ended.stderr.lines();
        let told: Vec<&str> = told.filter(|line| line.contains("preempt.drill")).collect();
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].contains(&line), "{told:?}");
    }
}

/// The driver's lock cannot be called off, so it is waited for. What the drill does with the store is not.
#[test]
fn a_notice_during_a_drill_waits_for_its_lock_and_for_nothing_else() {
    let stalled = |key: &str| json!([{"op": "UploadPart", "key_contains": key, "always": true, "action": {"stall": true}}]);
    for (what, driver, rules) in [
        // Its process is in the hands of the drill.
        (
            "lock",
            "fault=cuCheckpointProcessLock#1=stall:1500",
            json!([]),
        ),
        // Both would be tried for 10 s and more.
        ("drill.zst", "", stalled("drill.zst")),
        ("preflight.zst", "", stalled("preflight.zst")),
    ] {
        let scene = Scene::new(&[]);
        scene.server.set_rules(&rules);
        let (saver, command) = drilled_job(&scene, "").command(driver);
        let mut run = Supervised::start((saver.patient(), command));
        run.wait_for("step 1 ");
        until(|| match what {
            "lock" => is_about_to_lock(&scene),
            key => scene
                .server
                .requests("UploadPart")
                .iter()
                .any(|it| it["key"].as_str().is_some_and(|found| found.ends_with(key))),
        });
        assert_eq!(status(&scene).drill, None, "{what}: it is under way");
        let (_ended, took) = must_be_saved(&scene, run);
        // Longer than the rest of the lock takes, and less than the 5 s for which the end waits for what goes on.
        assert!(took < Duration::from_secs(4), "{what}: {took:?}");
    }
}

/// A drill has written down that it locks its target.
fn is_about_to_lock(scene: &Scene) -> bool {
    let files = std::fs::read_dir(scene.state_dir()).into_iter().flatten();
    let texts = files.filter_map(|file| std::fs::read_to_string(file.ok()?.path()).ok());
    texts
        .into_iter()
        .any(|text| text.contains("\"drill\"") && text.contains("\"lock\""))
}
