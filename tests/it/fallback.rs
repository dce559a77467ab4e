//! What becomes of a target when the store fails after BEGIN: it is held, given back, or abandoned, as was asked for, and never silently lost.

use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::support::Target;
use super::support::scene::{Saver, Scene, Watched, assert_failed, told};

fn refuse(op: &str, key: &str) -> Value {
    let action = json!({"status": 403, "code": "AccessDenied"});
    json!([{"op": op, "key_contains": key, "action": action, "always": true}])
}

/// Of everything that a save asks of the store after BEGIN.
const SITES: [(&str, &str); 4] = [
    ("UploadPart", ".zst"),
    ("CompleteMultipartUpload", ".zst"),
    ("PutObject", "manifest"),
    ("PutObject", "/log/00000003"),
];

fn target(scene: &Scene) -> Target {
    let mut target = scene.target();
    target.wait_for("step 2 ");
    target
}

fn holding(scene: &Scene) -> Saver {
    scene.saver_with("job", "", "[spill]\non_failure = \"hold\"\n")
}

/// A node with a place to spill to.
struct Spilling {
    scene: Scene,
    place: TempDir,
}

impl Spilling {
    fn new() -> Self {
        Self {
            scene: Scene::new(&[]),
            place: TempDir::new().expect("a temporary folder"),
        }
    }

    fn saver(&self, more: &str) -> Saver {
        self.saver_of_driver("", more)
    }

    fn saver_of_driver(&self, driver: &str, more: &str) -> Saver {
        let path = self.place.path().display();
        let config = format!("[spill]\npath = \"{path}\"\n{more}");
        self.scene.saver_with("job", driver, &config)
    }

    fn must_be_empty(&self) {
        let data = self.place.path().join("spill~/job/data");
        let left = std::fs::read_dir(data).map_or(0, Iterator::count);
        assert_eq!(left, 0, "something is left in the spill");
    }
}

#[test]
fn a_target_is_held_until_the_store_takes_it() {
    for (op, key) in SITES {
        let scene = Scene::new(&[]);
        let mut target = target(&scene);
        scene.server.set_rules(&refuse(op, key));
        let saver = holding(&scene);
        let held = Watched::start(&saver.cli, &format!("checkpoint --pid {}", target.pid()));
        held.until_said("the target is held");
        // Longer than the patience with a store that is not held.
        std::thread::sleep(Duration::from_secs(1));
        assert_eq!(scene.images("job"), [0_u64; 0], "{op}");
        scene.server.set_rules(&json!([]));
        let run = held.wait();
        assert_eq!(run.code, 0, "{op}: {run:?}");
        assert_eq!(scene.images("job"), [1], "{op}");
        let cli = scene.saver("job", "").cli;
        cli.ok("verify");
        cli.ok(&format!("restore --pid {}", target.pid()));
        scene.must_compute_on(&mut target);
        scene.must_have_computed_rightly(target);
    }
}

#[test]
fn without_a_spill_a_target_is_held_unless_something_else_is_asked_for() {
    let scene = Scene::new(&[]);
    let target = target(&scene);
    scene.server.set_rules(&refuse("UploadPart", ".zst"));
    let saver = scene.saver_with("job", "", "[spill]\n");
    let held = Watched::start(&saver.cli, &format!("checkpoint --pid {}", target.pid()));
    held.until_said("the target is held");
    // One signal, and another one, change nothing.
    held.signal("TERM");
    // Two that come before the first was taken are one.
    held.until_said("asks to stop");
    held.signal("TERM");
    held.until_said("is noted already");
    scene.server.set_rules(&json!([]));
    assert_eq!(held.wait().code, 0);
}

#[test]
fn whoever_insists_abandons_the_target() {
    let scene = Scene::new(&[]);
    let target = target(&scene);
    scene.server.set_rules(&refuse("UploadPart", ".zst"));
    let saver = holding(&scene);
    let args = format!("checkpoint --force-abandon --pid {}", target.pid());
    let held = Watched::start(&saver.cli, &args);
    held.until_said("the target is held");
    held.signal("INT");
    std::thread::sleep(Duration::from_millis(300));
    held.signal("INT");
    let run = held.wait();
    assert_failed("abandoned", &run, 12, "stream", &["cancelled"]);
    assert_eq!(told(&run), Some(scene.state_of(&target).as_str()));
    scene.server.set_rules(&json!([]));
    scene.must_not_be_committed("job", &saver);
}

#[test]
fn a_held_target_is_lost_only_with_the_deadline() {
    let scene = Scene::new(&[]);
    let target = target(&scene);
    scene.server.set_rules(&refuse("UploadPart", ".zst"));
    let saver = holding(&scene);
    let args = format!("checkpoint --deadline 3s --pid {}", target.pid());
    let run = saver.cli.run(&args);
    assert_failed("held", &run, 12, "stream", &["the deadline has come"]);
    scene.server.set_rules(&json!([]));
    scene.must_not_be_committed("job", &saver);
}

#[test]
fn a_target_is_given_back_when_the_store_fails() {
    for (op, key) in SITES {
        let spilling = Spilling::new();
        let scene = &spilling.scene;
        let mut target = target(scene);
        scene.server.set_rules(&refuse(op, key));
        // The default of a save after which the target is to run on.
        let saver = spilling.saver("");
        let args = format!("checkpoint --then resume --pid {}", target.pid());
        let run = saver.cli.run(&args);
        scene.server.set_rules(&json!([]));
        assert_eq!(run.code, 10, "{op}: {run:?}");
        assert_eq!(told(&run), Some("running"), "{op}");
        assert_eq!(
            saver.calls("cuCheckpointProcessRestore"),
            1,
            "{op}: one try"
        );
        scene.must_compute_on(&mut target);
        scene.must_have_computed_rightly(target);
        // No image of it comes into being any more.
        assert_eq!(scene.images("job"), [0_u64; 0], "{op}");
        let resumed = spilling.saver("").cli.run("resume");
        assert_eq!(resumed.code, 7, "{op}: {resumed:?}");
        spilling.must_be_empty();
    }
}

#[test]
fn a_target_that_cannot_be_given_back_stays_sealed() {
    let spilling = Spilling::new();
    let scene = &spilling.scene;
    let target = target(scene);
    scene.server.set_rules(&refuse("UploadPart", ".zst"));
    let saver = spilling.saver_of_driver(
        "fault=cuCheckpointProcessRestore#1=code:2",
        "on_failure = \"give-back\"\n",
    );
    let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
    scene.server.set_rules(&json!([]));
    assert_eq!(run.code, 11, "{run:?}");
    assert!(
        run.stderr.contains("did not get its memory back"),
        "{run:?}"
    );
    assert_eq!(told(&run), Some(scene.state_of(&target).as_str()));
    spilling.saver("").cli.ok("resume");
    assert_eq!(scene.images("job"), [1]);
}

#[test]
fn a_job_that_somebody_else_has_is_not_given_back() {
    let spilling = Spilling::new();
    let scene = &spilling.scene;
    let (target, other) = (target(scene), target(scene));
    let hang = json!([{"op": "UploadPart", "key_contains": format!("/{}/", target.pid()), "always": true, "action": {"status": 500, "code": "InternalError"}}]);
    scene.server.set_rules(&hang);
    let saver = spilling.saver("on_failure = \"give-back\"\n");
    let failing = Watched::start(&saver.cli, &format!("checkpoint --pid {}", target.pid()));
    failing.until_phase("stream");
    let cli = scene.saver("job", "").cli;
    cli.ok(&format!("checkpoint --take-over --pid {}", other.pid()));
    let run = failing.wait();
    assert_eq!(run.code, 11, "{run:?}");
    assert!(
        run.stderr.contains("was not given its memory back"),
        "{run:?}"
    );
    assert_eq!(saver.calls("cuCheckpointProcessRestore"), 0);
    // Nor does its image set the job back.
    let resumed = spilling.saver("").cli.run("resume");
    assert_eq!(resumed.code, 4, "{resumed:?}");
    assert_eq!(scene.images("job"), [1]);
}

#[test]
fn a_target_whose_image_may_exist_is_not_given_back() {
    let spilling = Spilling::new();
    let scene = &spilling.scene;
    let target = target(scene);
    // The entry stands, and no answer says so.
    let lost = json!([{"op": "PutObject", "key_contains": "/log/00000003", "always": true, "action": {"apply": true, "drop": true}}]);
    scene.server.set_rules(&lost);
    let saver = spilling.saver("on_failure = \"give-back\"\n");
    let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
    scene.server.set_rules(&json!([]));
    assert_eq!(
        (run.code, told(&run)),
        (11, Some("checkpointed")),
        "{run:?}"
    );
    assert!(run.stderr.contains("its image may exist"), "{run:?}");
    assert_eq!(saver.calls("cuCheckpointProcessRestore"), 0);
    spilling.saver("").cli.ok("resume");
    assert_eq!(scene.images("job"), [1]);
}

#[test]
fn a_save_that_was_fenced_is_not_sealed() {
    let spilling = Spilling::new();
    let scene = &spilling.scene;
    let (target, other) = (target(scene), target(scene));
    let saver = spilling.saver_of_driver("d2h=2MiB", "");
    let slow = Watched::start(&saver.cli, &format!("checkpoint --pid {}", target.pid()));
    slow.until_phase("stream");
    let cli = scene.saver("job", "").cli;
    cli.ok(&format!("checkpoint --take-over --pid {}", other.pid()));
    let run = slow.wait();
    assert_failed("fenced", &run, 15, "commit", &["opened the job"]);
    assert_eq!(saver.calls("cuCheckpointOperationComplete"), 0);
    let resumed = spilling.saver("").cli.run("resume");
    assert_eq!(resumed.code, 7, "{resumed:?}");
}

#[test]
fn every_save_can_go_to_the_spill_first() {
    for then in ["suspend", "resume"] {
        let spilling = Spilling::new();
        let scene = &spilling.scene;
        let mut target = target(scene);
        let saver = spilling.saver("when = \"always\"\n");
        let args = format!("checkpoint --then {then} --pid {}", target.pid());
        let report = saver.cli.ok(&args);
        assert_eq!(scene.images("job"), [1], "{then}");
        spilling.must_be_empty();
        let cli = scene.saver("job", "").cli;
        cli.ok("verify");
        if then == "suspend" {
            assert_eq!(report["targets"][0]["state"], "checkpointed");
            cli.ok(&format!("restore --pid {}", target.pid()));
        }
        scene.must_compute_on(&mut target);
        scene.must_have_computed_rightly(target);
    }
}

#[test]
fn a_save_that_went_to_the_spill_first_is_resumed_when_the_store_fails() {
    let spilling = Spilling::new();
    let scene = &spilling.scene;
    let mut target = target(scene);
    scene.server.set_rules(&refuse("UploadPart", ".zst"));
    let saver = spilling.saver("when = \"always\"\n");
    let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
    scene.server.set_rules(&json!([]));
    assert_eq!(
        (run.code, told(&run)),
        (11, Some("checkpointed")),
        "{run:?}"
    );
    spilling.saver("").cli.ok("resume");
    let cli = scene.saver("job", "").cli;
    cli.ok(&format!("restore --pid {}", target.pid()));
    scene.must_compute_on(&mut target);
    scene.must_have_computed_rightly(target);
}

#[test]
fn a_seal_that_cannot_be_broken_is_given_up_in_the_log() {
    let spilling = Spilling::new();
    let scene = &spilling.scene;
    let mut target = target(scene);
    scene.server.set_rules(&refuse("UploadPart", ".zst"));
    let saver = spilling.saver("");
    // The disk fails when the target has its memory back.
    let cli = saver.cli.dying_at("restore:locked for good=disk-error");
    let run = cli.run(&format!("checkpoint --then resume --pid {}", target.pid()));
    scene.server.set_rules(&json!([]));
    assert_eq!((run.code, told(&run)), (10, Some("running")), "{run:?}");
    assert!(
        run.stderr.contains("was given up and could not be removed"),
        "{run:?}"
    );
    scene.must_compute_on(&mut target);
    scene.must_have_computed_rightly(target);
    let resumed = spilling.saver("").cli.run("resume");
    assert_ne!(resumed.code, 0, "{resumed:?}");
    assert_eq!(scene.images("job"), [0_u64; 0]);
}
