//! Who may have what: an image goes back only where it belongs, and a target belongs to whoever holds it.

use serde_json::Value;

use super::support::scene::{Scene, assert_failed, cause, until};
use super::support::{Ckptstream, Node, S3Server, Target};

#[test]
fn an_older_image_does_not_go_under_newer_host_memory() {
    let scene = Scene::new(&[]);
    let cli = &scene.saver("job", "").cli;
    let mut target = scene.target();
    let pid = target.pid();
    target.wait_for("step 2 ");
    cli.ok(&format!("checkpoint --pid {pid} --then resume"));
    target.wait_for("step 4 ");
    cli.ok(&format!("checkpoint --pid {pid}"));

    let saver = scene.saver("job", "");
    let run = saver.cli.run(&format!("restore --pid {pid} --image 3"));
    assert_eq!(run.code, 20, "{run:?}");
    let cause = cause(&run);
    assert!(
        cause.contains("00000003") && cause.contains("00000006"),
        "{cause}"
    );
    assert_eq!(saver.calls("cuCheckpointProcessRestore"), 0);
    // The newest is another matter, and so is a process that has no memory of its own yet.
    cli.ok(&format!("restore --pid {pid} --image 6"));
    scene.must_compute_on(&mut target);
    scene.must_have_computed_rightly(target);
    let mut fresh = scene.fresh();
    cli.ok(&format!(
        "restore --pid {} --image 3 --into-fresh",
        fresh.pid()
    ));
    scene.must_compute_on(&mut fresh);
}

#[test]
fn a_target_that_another_saver_took_is_theirs_and_saved() {
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    target.wait_for("step 2 ");
    let checkpoint = format!("checkpoint --pid {}", target.pid());
    // It sees a running target, and comes to the lock only when the other one is done.
    let late = scene.saver("job", "fault=cuCheckpointProcessLock#1=stall:4000");
    let slow = late.cli.spawn(&checkpoint);
    until(|| late.calls("cuEventCreate") > 0);
    let elsewhere = tempfile::TempDir::new().expect("a temporary folder");
    let refused = scene.saver("job", "").cli.run(&checkpoint);
    assert_failed("held", &refused, 4, "prepare", &["is at work on process"]);
    // One that does not know of the other: the driver itself keeps them apart.
    let state_dir = format!("[job]\nstate_dir = \"{}\"\n", elsewhere.path().display());
    let stranger = scene.saver_with("job", "", &state_dir);
    stranger.cli.ok(&format!("{checkpoint} --take-over"));
    let run = slow.wait();
    assert_eq!(run.code, 7, "{run:?}");
    assert_eq!(run.report["targets"][0]["state"], "checkpointed");
    assert_eq!(scene.images("job"), [1]);

    // Under another job's name it is not ours, whatever the image.
    let other = scene.saver("other", "").cli.run(&checkpoint);
    assert_eq!(other.code, 4, "{other:?}");
}

#[test]
fn a_gpu_without_data_needs_no_place() {
    let server = S3Server::start(&[]);
    let home = Node::new("gpus=2;memory=64MiB");
    let args = "--gpus 1 --bytes 3MiB --seed 12 --step-ms 20";
    let mut target = Target::start(&home, args);
    target.wait_for_steps(2);
    let cli = Ckptstream::new(&server, "job").on(&home);
    cli.ok(&format!("checkpoint --pid {}", target.pid()));
    let mut seen = target.kill();

    // One GPU is all that the job had data on, and all that the other node has.
    let away = Node::new("gpus=1;memory=64MiB");
    let mut fresh = Target::start(&home, &format!("{args} --suspended"));
    let cli = Ckptstream::new(&server, "job").on(&away);
    cli.ok(&format!("restore --pid {} --into-fresh", fresh.pid()));
    fresh.wait_for_steps(2);
    seen.extend(fresh.kill());
    Target::check_undisturbed(&Node::new("gpus=1;memory=64MiB"), args, seen);
}

#[test]
fn gpu_memory_that_is_missing_at_the_last_moment_is_seen_before_the_driver_is_asked() {
    let scene = Scene::new(&[]);
    scene.save("job");
    let fresh = scene.fresh();
    // Somebody takes the memory: another process on the same GPUs.
    let hog = Target::start(&scene.node, "--gpus 2 --bytes 61MiB --fill zeros --steps 0");
    let saver = scene.saver("job", "");
    let run = saver
        .cli
        .run(&format!("restore --pid {} --into-fresh", fresh.pid()));
    assert_eq!(run.code, 20, "{run:?}");
    assert!(cause(&run).contains("bytes free"), "{run:?}");
    assert_eq!(saver.calls("cuCheckpointProcessRestore"), 0);
    hog.kill();
    let cli = &scene.saver("job", "").cli;
    cli.ok(&format!("restore --pid {} --into-fresh", fresh.pid()));
}

#[test]
fn a_budget_that_a_restore_cannot_keep_is_configuration() {
    let scene = Scene::new(&[]);
    scene.save("job");
    let fresh = scene.fresh();
    let cli = Ckptstream::new(&scene.server, "job")
        .on(&scene.node)
        .config("pipeline.memory_budget = '1MiB'\n");
    let run = cli.run(&format!("restore --pid {} --into-fresh", fresh.pid()));
    assert_eq!(run.code, 2, "{run:?}");
    assert_eq!(run.report["next"], Value::from("fix-config"));
}
