//! Who may have what: an image goes back only where it belongs, and a target belongs to whoever holds it.

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::support::s3_server::has_credentials;
use super::support::scene::{Scene, Watched, assert_failed, cause, until};
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
fn an_image_does_not_go_under_what_a_later_save_may_have_left() {
    if !has_credentials("ownership::an_image_does_not_go_under_what_a_later_save_may_have_left") {
        return;
    }
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    let cli = &scene.saver("job", "").cli;
    cli.ok(&format!("checkpoint --pid {}", target.pid()));
    let attempt = "f".repeat(32);
    let saving = json!({"format": 1, "entry": "saving", "writer": attempt, "attempt": attempt, "seconds": 1, "spill": "/mnt/spill",
        "by": {"host": "elsewhere", "boot_id": "another", "pid_namespace": 1, "pid": 2, "start_time": 3}});
    scene.put_entry("job", 4, &saving);
    let restore = format!("restore --pid {}", target.pid());
    let run = cli.run(&restore);
    assert_failed("unknown", &run, 20, "read", &["/mnt/spill", "elsewhere"]);
    // Nothing became of it.
    let dropped = json!({"format": 1, "entry": "dropped", "writer": attempt, "attempt": attempt});
    scene.put_entry("job", 5, &dropped);
    cli.ok(&restore);
    scene.must_compute_on(&mut target);
}

#[test]
fn a_guard_leaves_alone_what_somebody_else_holds() {
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    // Locked, by one who died; and nobody's yet.
    let dying = scene.saver("job", "fault=cuCheckpointProcessCheckpoint#1=kill-caller");
    let died = dying.cli.run(&format!("checkpoint --pid {}", target.pid()));
    assert_eq!(
        (died.code, scene.state_of(&target)),
        (-1, "locked".to_owned())
    );
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", target.pid())).expect("it lives");
    let (_, fields) = stat.rsplit_once(')').expect("its name");
    let start_time = fields.split_whitespace().nth(19).expect("its start");
    let journal = tempfile::NamedTempFile::new().expect("a temporary file");
    let guard = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ckptstream"));
        scene.node.apply(&mut command);
        command
            .args(["guard", "--pid", &target.pid().to_string()])
            .args(["--start-time", start_time, "--patience-ms", "100"])
            .arg("--journal")
            .arg(journal.path())
            .stdin(Stdio::piped());
        let mut guard = command.spawn().expect("the binary starts");
        let mut letters = guard.stdin.take().expect("piped");
        letters.write_all(b"a").expect("it listens");
        // Its saver dies.
        drop(letters);
        assert!(guard.wait().expect("our child").success());
    };
    let held = std::fs::File::open(journal.path()).expect("the journal");
    held.lock().expect("nobody holds it");
    guard();
    assert_eq!(scene.state_of(&target), "locked");
    drop(held);
    guard();
    scene.must_compute_on(&mut target);
}

#[test]
fn gpu_memory_that_is_taken_while_the_image_is_fetched_is_seen_before_the_driver_is_asked() {
    let scene = Scene::new(&[]);
    scene.save("job");
    let fresh = scene.fresh();
    let restore = format!("restore --pid {} --into-fresh", fresh.pid());
    // There was enough when it looked first; now it makes the buffers for what is fetched.
    let saver = scene.saver("job", "fault=cuMemHostRegister#3=stall:4000");
    let slow = Watched::start(&saver.cli, &restore);
    until(|| saver.calls("cuEventCreate") > 0);
    let hog = Target::start(&scene.node, "--gpus 2 --bytes 61MiB --fill zeros --steps 0");
    let run = slow.wait();
    assert_failed("taken", &run, 20, "restore", &["bytes free"]);
    assert_eq!(saver.calls("cuCheckpointProcessRestore"), 0);
    hog.kill();
    scene.saver("job", "").cli.ok(&restore);
}

#[test]
fn a_restore_fences_whoever_saves_the_job() {
    let scene = Scene::new(&[]);
    scene.save("job");
    let (slow, mut fresh) = (scene.target(), scene.fresh());
    let saver = scene.saver("job", "d2h=2MiB");
    let saving = Watched::start(&saver.cli, &format!("checkpoint --pid {}", slow.pid()));
    saving.until_phase("stream");
    let args = format!("restore --pid {} --into-fresh --take-over", fresh.pid());
    scene.saver("job", "").cli.ok(&args);
    let fenced = saving.wait();
    assert_failed("fenced", &fenced, 15, "commit", &["opened the job"]);
    assert_eq!(saver.calls("cuCheckpointOperationComplete"), 0);
    assert_eq!(scene.images("job"), [1]);
    scene.must_compute_on(&mut fresh);
}

/// A restore of the job's only image (slots 1 to 3 of its log) behind whose own entry (slot 4) this one comes.
fn overtaken_restore(scene: &Scene, entry: &Value, code: i32, parts: &[&str]) {
    // Nobody reads beyond the first free slot, so that it is not seen before that one is taken.
    scene.put_entry("job", 5, entry);
    let fresh = scene.fresh();
    let saver = scene.saver("job", "");
    let run = saver
        .cli
        .run(&format!("restore --pid {} --into-fresh", fresh.pid()));
    assert_failed("overtaken", &run, code, "read", parts);
    assert_eq!(saver.calls("cuCheckpointProcessRestore"), 0);
    assert_eq!(scene.state_of(&fresh), "checkpointed");
}

#[test]
fn who_opens_the_job_while_a_restore_pins_has_it() {
    if !has_credentials("ownership::who_opens_the_job_while_a_restore_pins_has_it") {
        return;
    }
    let scene = Scene::new(&[]);
    scene.save("job");
    let theirs = json!({"format": 1, "entry": "open", "writer": "somebody else"});
    overtaken_restore(&scene, &theirs, 4, &["opened the job"]);
}

#[test]
fn an_image_that_is_dropped_before_its_pin_stands_is_not_restored() {
    if !has_credentials("ownership::an_image_that_is_dropped_before_its_pin_stands_is_not_restored")
    {
        return;
    }
    let scene = Scene::new(&[]);
    scene.save("job");
    let listed = scene.saver("job", "").cli.ok("list");
    let attempt = &listed["images"][0]["attempt"];
    let dropped = json!({"format": 1, "entry": "dropped", "writer": "prune", "attempt": attempt});
    overtaken_restore(&scene, &dropped, 20, &["was pruned"]);
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
