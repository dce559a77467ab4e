//! `drill`: a real lock and unlock, and a small image there and back. Whatever fails, the target runs on, or is said not to.

use serde_json::json;

use super::preflight::{told as told_of, wrong};
use super::support::scene::{Scene, cause, told};
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
