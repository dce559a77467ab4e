//! Stores without conditional creates: a scheduler numbers the starts of the job (`job.epoch`), and nothing rests on who created an object first.

use serde_json::{Value, json};

use super::preflight::{told as told_of, wrong};
use super::support::scene::{Scene, TARGET, Watched, assert_failed, cause, told};
use super::support::supervised::{Job, REQUEUE, Supervised, until_status};
use super::support::{Target, step_of};

/// A store that takes whatever is put, and replaces what stands there.
fn overwriting() -> Value {
    json!({"op": "PutObject", "always": true, "action": {"ignore_conditions": true}})
}

fn scene() -> Scene {
    let scene = Scene::new(&[]);
    scene.server.set_rules(&json!([overwriting()]));
    scene
}

/// One start of the job, under `run`.
fn start(job: &Job<'_>, epoch: &str) -> Supervised {
    let (saver, mut command) = job.command("");
    command.env("CKPTSTREAM_EPOCH", epoch);
    Supervised::start((saver, command))
}

fn digests(said: &[String]) -> Vec<String> {
    let lines = said.iter().filter(|line| line.contains(" digest "));
    lines.cloned().collect()
}

#[test]
fn a_job_is_saved_ended_and_goes_on_in_its_next_epoch() {
    let scene = scene();
    let args = format!("{TARGET} --steps 400");
    let job = Job::new(&scene, &args);
    let mut seen = Vec::new();
    for epoch in ["7", "8"] {
        let mut run = start(&job, epoch);
        let reached = seen.last().map_or(0, |line: &String| step_of(line));
        run.wait_for("step ");
        run.wait_for("step ");
        run.process.signal("TERM");
        let ended = run.ends();
        assert_eq!(ended.code, REQUEUE, "{ended:?}");
        let steps = digests(&ended.said);
        let first = step_of(steps.first().expect("steps"));
        assert!(
            (reached..=reached + 1).contains(&first),
            "{reached} {first}"
        );
        seen.extend(steps);
    }
    assert_eq!(scene.images("job"), [2, 1]);

    // Whoever does not know the epoch, or knows an earlier one, starts nothing.
    for (epoch, code, says) in [
        ("7", 204, "epoch 8 was begun by process"),
        ("-1", 2, "--epoch"),
        ("10000000000000000", 2, "9999999999999999"),
    ] {
        let refused = start(&job, epoch).ends();
        let code = if code == 2 { 202 } else { code };
        assert_eq!(refused.code, code, "{epoch}: {refused:?}");
        assert!(refused.stderr.contains(says), "{epoch}: {refused:?}");
        assert_eq!(digests(&refused.said), [""; 0]);
    }
    let refused = job.start().ends();
    assert_eq!(refused.code, 203, "{refused:?}");
    assert!(refused.stderr.contains("set job.epoch"), "{refused:?}");
    assert_eq!(digests(&refused.said), [""; 0]);

    let last = start(&job, "9").ends();
    assert_eq!(last.code, 0, "{last:?}");
    seen.extend(digests(&last.said));
    let mut alone = Target::start(&scene.node, &args);
    while alone.next_line().is_some() {}
    let undisturbed = alone.digest_lines();
    seen.dedup();
    assert_eq!(seen, undisturbed);
}

/// The first start does not know that there is another: its node was cut off, say.
#[test]
fn an_earlier_epoch_saves_nothing_once_a_later_one_has_begun() {
    let scene = scene();
    let mut first = scene.target();
    first.wait_for("step 2 ");
    let save = |target: &Target, epoch: u32, more: &str| {
        format!("checkpoint --epoch {epoch} --pid {} {more}", target.pid())
    };
    scene
        .saver("job", "")
        .cli
        .ok(&save(&first, 1, "--then resume"));

    // It is behind BEGIN when the later one begins.
    scene.server.set_rules(&json!([
        overwriting(),
        {"op": "UploadPart", "key_contains": &format!("/{}/gpu-", first.pid()), "always": true, "action": {"delay_after_ms": 1500}},
    ]));
    let saver = scene.saver("job", "").unhurried();
    let late = Watched::start(&saver.cli, &save(&first, 1, ""));
    late.until_phase("stream");
    let mut second = scene.target();
    second.wait_for("step 1 ");
    let other = scene.saver("job", "").unhurried();
    other.cli.ok(&save(&second, 2, "--then resume --take-over"));
    let fenced = late.wait();
    assert_eq!(fenced.code, 15, "{fenced:?}");
    assert!(cause(&fenced).contains("fenced"), "{fenced:?}");
    assert_eq!(saver.calls("cuCheckpointOperationComplete"), 0);
    assert_eq!(scene.images("job"), [2, 1]);

    // And before the lock.
    let mut third = scene.target();
    third.wait_for("step 1 ");
    let saver = scene.saver("job", "");
    let refused = saver.cli.run(&save(&third, 1, ""));
    assert_eq!(
        (refused.code, told(&refused)),
        (4, Some("running")),
        "{refused:?}"
    );
    assert!(
        cause(&refused).contains("epoch 2 was begun by process"),
        "{refused:?}"
    );
    assert_eq!(saver.calls("cuCheckpointProcessLock"), 0);
    scene.must_compute_on(&mut third);
    scene.must_compute_on(&mut second);
}

/// Nobody can be kept from what is this save's, so all of it is looked at once more before the driver lets go of the memory.
#[test]
fn what_was_removed_behind_the_commit_is_no_image() {
    let scene = scene();
    for (op, key) in [
        ("gpu", "gpu-"),
        ("manifest", "manifest.json"),
        ("table", ".frames.json"),
    ] {
        let mut target = scene.target();
        target.wait_for("step 1 ");
        // Objects are looked at when they have landed, too; what is small is not.
        let nth = if op == "gpu" { 2 } else { 1 };
        let ending = if op == "gpu" { ".zst" } else { key };
        scene.server.set_rules(&json!([
            overwriting(),
            {"op": "HeadObject", "key_contains": ending, "per_key": true, "nth": nth, "action": {"status": 404, "code": "NoSuchKey"}},
        ]));
        let saver = scene.saver(op, "");
        let lost = saver
            .cli
            .run(&format!("checkpoint --epoch 1 --pid {}", target.pid()));
        assert_failed(
            op,
            &lost,
            12,
            "commit",
            &["looked at again after the commit"],
        );
        assert_eq!(saver.calls("cuCheckpointOperationComplete"), 0, "{lost:?}");
        scene.server.set_rules(&json!([overwriting()]));
        let listed = scene.saver(op, "").cli.ok("list");
        assert_eq!(listed["images"][0]["standing"], "dropped", "{listed}");
        target.kill();
    }
}

#[test]
fn a_store_whose_listings_are_late_is_refused_before_the_lock() {
    let scene = scene();
    let mut target = scene.target();
    target.wait_for("step 1 ");
    scene.server.set_rules(&json!([
        overwriting(),
        {"op": "ListObjectsV2", "always": true, "action": {"stale_ms": 60000}},
    ]));
    let saver = scene.saver("job", "");
    let run = saver
        .cli
        .run(&format!("checkpoint --epoch 1 --pid {}", target.pid()));
    assert_eq!((run.code, told(&run)), (3, Some("running")), "{run:?}");
    assert!(cause(&run).contains("does not list"), "{run:?}");
    assert_eq!(saver.calls("cuCheckpointProcessLock"), 0);
    scene.must_compute_on(&mut target);
    let run = scene.saver("job", "").cli.run("preflight --epoch 1");
    assert_eq!(run.code, 3, "{run:?}");
    assert!(
        wrong(&run).contains(&"failed store.list-fresh".to_owned()),
        "{run:?}"
    );
}

#[test]
fn preflight_names_the_key_and_is_content_with_it() {
    let scene = scene();
    let run = scene.saver("job", "").cli.run("preflight");
    assert_eq!(run.code, 3, "{run:?}");
    let told = told_of(&run, "store.conditional-create");
    assert!(told.contains("job.epoch"), "{told}");
    let run = scene.saver("job", "").cli.run("preflight --epoch 12");
    assert_eq!(run.code, 0, "{run:?}");
    let told = told_of(&run, "store.conditional-create");
    assert!(
        told.contains("ignores If-None-Match") && told.contains("this is 12"),
        "{told}"
    );
}

/// What is refused at first can be had once the starts of the job are numbered: nothing stands there that would be in the way.
#[test]
fn a_log_does_not_begin_where_it_cannot_go_on() {
    let scene = scene();
    let job = Job::new(&scene, TARGET);
    let refused = job.start().ends();
    assert_eq!(refused.code, 203, "{refused:?}");
    assert!(refused.stderr.contains("job.epoch"), "{refused:?}");
    assert_eq!(refused.said, [""; 0], "it is not started");
    let mut target = scene.target();
    target.wait_for("step 1 ");
    let save = format!("checkpoint --pid {}", target.pid());
    let refused = scene.saver("job", "").cli.run(&save);
    assert_eq!(refused.code, 3, "{refused:?}");
    assert!(cause(&refused).contains("job.epoch"), "{refused:?}");
    scene.must_compute_on(&mut target);
    scene.saver("job", "").cli.ok(&format!("{save} --epoch 1"));
    assert_eq!(scene.images("job"), [1]);
}

/// `prune` and `gc` of every job would take them all from whoever has them.
#[test]
fn an_epoch_is_that_of_one_job() {
    let scene = scene();
    for command in ["prune", "gc"] {
        let saver = scene.saver("job", "");
        let run = saver.cli.command(command);
        let words: Vec<_> = run.get_args().map(ToOwned::to_owned).collect();
        let words = words
            .into_iter()
            .filter(|word| word != "--job" && word != "job");
        let mut without = std::process::Command::new(run.get_program());
        without.args(words).args(["--epoch", "3"]).env_clear();
        without.envs(
            run.get_envs()
                .filter_map(|(key, value)| Some((key, value?))),
        );
        let output = without.output().expect("the binary starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("epoch 3") && said.contains("--job"), "{said}");
    }
}

/// Whoever takes a later epoch for anything keeps the earlier start from saving, and that is known before the notice.
#[test]
fn a_supervision_that_is_behind_says_so() {
    let scene = scene();
    let job = Job::new(&scene, TARGET).with("[preempt]\nprobe_every = \"1s\"\n");
    let mut run = start(&job, "1");
    run.wait_for("step 1 ");
    let mut other = scene.target();
    other.wait_for("step 1 ");
    let saver = scene.saver("job", "");
    saver.cli.ok(&format!(
        "checkpoint --then resume --take-over --epoch 2 --pid {}",
        other.pid()
    ));
    until_status(&scene, |report| {
        let trouble = report.store_trouble.as_deref();
        trouble.is_some_and(|why| why.contains("epoch 2 was begun"))
    });
    run.process.signal("TERM");
    let ended = run.ends();
    assert_eq!(ended.code, 204, "{ended:?}");
    assert_eq!(scene.images("job"), [1], "the other one's");
}

/// Whoever forgets the number is not told to try the same again.
#[test]
fn what_a_dead_saver_left_is_put_in_order_with_the_number() {
    let scene = scene();
    let mut target = scene.target();
    target.wait_for("step 1 ");
    let save = format!("checkpoint --epoch 1 --pid {}", target.pid());
    let killed = scene
        .saver("job", "")
        .cli
        .dying_at("prepare:announced=kill");
    assert_eq!(killed.run(&save).code, -1);
    let refused = scene.saver("job", "").cli.run("recover");
    assert_eq!(refused.code, 3, "{refused:?}");
    assert!(
        refused.report.to_string().contains("set job.epoch"),
        "{refused:?}"
    );
    scene.saver("job", "").cli.ok("recover --epoch 1");
    scene.saver("job", "").cli.ok(&save);
    assert_eq!(scene.images("job"), [1]);
}

/// Attempts and images go as on every store, as long as nobody else has the epoch.
#[test]
fn upkeep_is_done_by_whoever_has_the_epoch() {
    let scene = scene();
    let mut target = scene.target();
    target.wait_for("step 1 ");
    for _ in 0..3 {
        let save = format!("checkpoint --epoch 1 --then resume --pid {}", target.pid());
        scene.saver("job", "").cli.ok(&save);
    }
    let refused = scene.saver("job", "").cli.run("prune --grace 0s");
    assert_eq!(refused.code, 3, "{refused:?}");
    assert!(refused.stderr.contains("set job.epoch"), "{refused:?}");
    let saver = scene.saver("job", "");
    saver.cli.ok("prune --grace 0s --epoch 1");
    let pruned = saver.cli.ok("gc --grace 0s --epoch 1");
    assert!(pruned.to_string().contains("removed"), "{pruned}");
    let listed = scene.saver("job", "").cli.ok("list");
    let standings = listed["images"].as_array().expect("images").iter();
    let standings: Vec<&str> = standings.filter_map(|it| it["standing"].as_str()).collect();
    assert_eq!(standings, ["usable", "usable", "dropped"], "{listed}");
    scene.saver("job", "").cli.ok("verify");
}
