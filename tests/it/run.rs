//! A job under `run`: saved and ended when the node goes away, restored on the next one, and never started twice over its own image.

use std::process::Command;
use std::time::{Duration, Instant};

use ckptstream::supervise::{Answer, Doing, Question, Report, ask};
use serde_json::{Value, json};

use super::support::process::Process;
use super::support::s3_server::{has_credentials, testkit};
use super::support::scene::{Scene, TARGET, until};
use super::support::supervised::{Job, REQUEUE, Supervised, notified, status, until_status};
use super::support::{Target, step_of};

/// The lines of one life of the job that tell a digest.
fn digests(said: &[String]) -> Vec<String> {
    let lines = said.iter().filter(|line| line.contains(" digest "));
    lines.cloned().collect()
}

#[test]
fn a_job_is_saved_ended_and_goes_on_where_it_was() {
    let scene = Scene::new(&[]);
    let args = format!("{TARGET} --steps 400");
    let job = Job::new(&scene, &args);
    let mut first = job.start();
    first.wait_for("step 3 ");
    first.process.signal("TERM");
    let first = first.ends();
    assert_eq!(first.code, REQUEUE, "{first:?}");
    assert!(
        first.stderr.contains("is committed, and the job was ended"),
        "{first:?}"
    );
    assert_eq!(scene.images("job"), [1]);

    let second = job.start().ends();
    assert_eq!(second.code, 0, "{second:?}");
    let reached = step_of(digests(&first.said).last().expect("steps"));
    let went_on = step_of(digests(&second.said).first().expect("steps"));
    assert!(
        (reached..=reached + 1).contains(&went_on),
        "{reached} {went_on}"
    );

    let mut alone = Target::start(&scene.node, &args);
    while alone.next_line().is_some() {}
    let undisturbed = alone.digest_lines();
    let mut seen = digests(&first.said);
    seen.extend(digests(&second.said));
    seen.dedup();
    assert_eq!(seen, undisturbed);

    // It finished: the next one is another job under the same name.
    let mut third = job.start();
    third.wait_for("ready");
    third.wait_for("step 0 ");
}

#[test]
fn its_own_status_is_passed_on() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET);
    for (script, code) in [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137)] {
        let state = scene.state_dir();
        let config = format!(
            "\n[job]\nallow_gpu_only = true\nstate_dir = \"{}\"\n",
            state.display()
        );
        let saver = scene.saver_with("job", "", &config);
        let mut command = saver.cli.command("run");
        command.args(["--", "sh", "-c", script]);
        let ended = Supervised::start((saver, command)).ends();
        assert_eq!(ended.code, code, "{script}: {ended:?}");
    }
    let (saver, mut command) = job.command("");
    command.args(["--steps", "nonsense"]);
    assert_eq!(Supervised::start((saver, command)).ends().code, 2);
}

#[test]
fn what_cannot_be_restored_is_not_started() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET);
    let refused = Supervised::start(job.command_with("", false)).ends();
    assert_eq!(refused.code, 203, "{refused:?}");
    assert!(
        refused.stderr.contains("job.restore_command"),
        "{refused:?}"
    );
    assert_eq!(refused.said, [""; 0]);

    // An image that it cannot go on from is no reason to start it afresh.
    scene.save("job");
    let job = job.with("allow_gpu_only = true\n");
    let refused = Supervised::start(job.command_with("", false)).ends();
    assert_eq!(refused.code, 220, "{refused:?}");
    assert_eq!(refused.said, [""; 0]);
    // Nor is a store that does not answer.
    let rules =
        json!([{"op": "*", "always": true, "action": {"status": 403, "code": "AccessDenied"}}]);
    scene.server.set_rules(&rules);
    let refused = job.start().ends();
    assert!([203, 220].contains(&refused.code), "{refused:?}");
    assert_eq!(refused.said, [""; 0]);
}

#[test]
fn a_save_that_fails_gives_the_job_back_and_is_tried_again() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET);
    // The first two locks are not granted.
    let driver =
        "fault=cuCheckpointProcessLock#1=code:600;fault=cuCheckpointProcessLock#2=code:600";
    let mut run = Supervised::start(job.command(driver));
    run.wait_for("step 2 ");
    run.process.signal("USR1");
    let ended = run.ends();
    assert_eq!(ended.code, REQUEUE, "{ended:?}");
    assert!(ended.stderr.contains("it is tried again"), "{ended:?}");
    assert_eq!(scene.images("job"), [1]);
}

#[test]
fn a_second_signal_changes_nothing_and_a_job_that_ends_is_no_failure() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET);
    let mut run = job.start();
    run.wait_for("step 2 ");
    for name in ["HUP", "CONT", "TERM", "TERM", "USR1"] {
        run.process.signal(name);
        std::thread::sleep(Duration::from_millis(5));
    }
    let ended = run.ends();
    assert_eq!(ended.code, REQUEUE, "{ended:?}");
    assert_eq!(scene.images("job"), [1], "one save");
}

#[test]
fn twenty_preemptions_at_random_moments_change_no_digest() {
    let scene = Scene::new(&[]);
    let args = format!("{TARGET} --steps 1500");
    let job = Job::new(&scene, &args);
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut seen, mut codes) = (Vec::new(), Vec::new());
    while scene.images("job").len() < 20 {
        let mut run = job.start();
        // Before it is ready, while it is restored, between two steps, within one.
        match random.u32(0..4) {
            0 => std::thread::sleep(Duration::from_millis(random.u64(0..60))),
            steps => {
                for _ in 0..=steps {
                    run.wait_for("step ");
                }
                std::thread::sleep(Duration::from_micros(random.u64(0..5000)));
            }
        }
        run.process.signal(["TERM", "USR1"][random.usize(0..2)]);
        let ended = run.ends();
        // Without its handlers ckptstream dies of the signal, and a job that has not come to its GPU is given it: both are started again.
        assert!(
            [REQUEUE, 143, 138, -1].contains(&ended.code),
            "seed {seed}: {codes:?} {ended:?}"
        );
        codes.push(ended.code);
        seen.extend(digests(&ended.said));
        assert!(codes.len() < 120, "seed {seed}: {codes:?}");
    }
    let last = job.start().ends();
    assert_eq!(last.code, 0, "seed {seed}: {last:?}");
    seen.extend(digests(&last.said));
    let mut alone = Target::start(&scene.node, &args);
    while alone.next_line().is_some() {}
    let undisturbed = alone.digest_lines();
    // A step may be told twice, in two lives, and with one digest.
    seen.dedup();
    assert_eq!(seen, undisturbed, "seed {seed}");
}

#[test]
fn a_notice_from_the_socket_is_answered_with_the_verdict() {
    let scene = Scene::new(&[]);
    let metrics = scene.state_dir().with_extension("prom");
    let config = format!("[metrics]\ntextfile = \"{}\"\n", metrics.display());
    let job = Job::new(&scene, TARGET).with(&config);
    let asks = || {
        let config = format!("\n[job]\nstate_dir = \"{}\"\n", scene.state_dir().display());
        scene.saver_with("job", "", &config)
    };
    let nobody = asks().cli.run("status");
    assert_eq!(nobody.code, 3, "{nobody:?}");
    let mut run = job.start();
    run.wait_for("step 2 ");
    // It gets ready by itself.
    let armed = loop {
        let status = asks().cli.ok("status")["status"].clone();
        if status["armed"] == true {
            break status;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(armed["doing"], "watching", "{armed}");
    assert_eq!(armed["job_pid"], json!(run.job_pid), "{armed}");
    assert!(armed["armed_bytes"].as_u64() > Some(1 << 20), "{armed}");
    run.wait_for("step ");
    let told = asks().cli.ok("notify --left 30s");
    assert_eq!(told["image"], "00000003", "{told}");
    let ended = run.ends();
    assert_eq!(ended.code, REQUEUE, "{ended:?}");
    assert_eq!(scene.images("job"), [1]);
    let nobody = asks().cli.run("notify");
    assert_eq!(nobody.code, 3, "the socket is gone: {nobody:?}");
    let metrics = std::fs::read_to_string(&metrics).expect("metrics");
    for line in [
        "notices_heard_total{job=\"job\"} 1",
        "saves_committed_total{job=\"job\"} 1",
    ] {
        assert!(metrics.contains(line), "{metrics}");
    }
    // The next life knows of it.
    let mut next = job.start();
    next.wait_for("resumed ");
    loop {
        let status = asks().cli.ok("status")["status"].clone();
        if status["ever"] == json!({"heard": 1, "missed": 0}) {
            break;
        }
        assert_eq!(status["ever"]["heard"], 0, "{status}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn two_cannot_supervise_one_job_on_a_node() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET);
    let mut first = job.start();
    first.wait_for("step 1 ");
    let second = job.start().ends();
    assert_eq!(second.code, 204, "{second:?}");
    first.wait_for("step ");
}

#[test]
fn who_starts_the_job_elsewhere_fences_the_one_that_runs() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET).with("[preempt]\nsources = [\"signals\"]\n");
    let mut first = job.start();
    first.wait_for("step 1 ");
    let mut second = job.elsewhere().start();
    second.wait_for("step 1 ");
    // The first one is told that its node goes away, too late: the job is the second one's.
    first.process.signal("TERM");
    let first = first.ends();
    assert_eq!(first.code, 204, "{first:?}");
    assert_eq!(scene.images("job"), [0_u64; 0]);
    second.process.signal("TERM");
    let second = second.ends();
    assert_eq!(second.code, REQUEUE, "{second:?}");
    assert_eq!(scene.images("job"), [1]);
}

#[test]
fn a_job_is_saved_in_passing_and_a_newer_notice_shortens_the_time() {
    let scene = Scene::new(&[]);
    let notice = scene.state_dir().with_extension("notice");
    let config = format!(
        "interval = \"1s\"\ninterval_share = 100\n[preempt]\nsources = [\"file\", \"signals\"]\nfile = \"{}\"\npoll = \"100ms\"\n",
        notice.display()
    );
    let job = Job::new(&scene, TARGET).with(&config);
    let mut run = job.start();
    while scene.images("job").len() < 2 {
        run.wait_for("step ");
    }
    std::fs::write(&notice, "60s").expect("a notice");
    let ended = run.ends();
    assert_eq!(ended.code, REQUEUE, "{ended:?}");
    std::fs::remove_file(&notice).expect("the notice");
    assert!(ended.stderr.contains("notice from file"), "{ended:?}");
    let images = scene.images("job").len();
    assert!(images >= 3, "{images}");
    // What was computed on after a save in passing was computed rightly.
    scene.must_be_the_steps_of_the_job(&{
        let mut seen = digests(&ended.said);
        seen.dedup();
        seen
    });
}

#[test]
fn a_process_that_runs_already_is_watched() {
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    target.wait_for("step 1 ");
    let job = Job::new(&scene, TARGET);
    let (saver, _) = job.command("");
    let command = saver.cli.command(&format!("watch --pid {}", target.pid()));
    let run = Supervised::start((saver, command));
    target.wait_for_steps(5);
    run.process.signal("USR1");
    let ended = run.ends();
    assert_eq!(ended.code, REQUEUE, "{ended:?}");
    assert_eq!(scene.images("job"), [1]);
    while target.next_line().is_some() {}
    assert!(target.has_ended());
    let (saver, _) = job.command("");
    let command = saver.cli.command(&format!("watch --pid {}", target.pid()));
    assert_eq!(Supervised::start((saver, command)).ends().code, 207);
}

/// A supervision that looks for its job, and listens already.
fn looking_for(job: &Job<'_>, sought: &str) -> Supervised {
    let (saver, _) = job.command("");
    let command = saver.cli.command(&format!("watch {sought}"));
    let run = Supervised::start((saver, command));
    let path = job.state.join("job.sock");
    until(|| ask(&path, &Question::Status).is_ok());
    run
}

#[test]
fn a_job_that_comes_up_later_is_found_by_its_command_or_its_cgroup() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET);
    let dir = tempfile::TempDir::new().expect("a temporary folder");
    let name = dir.path().file_name().expect("a name").to_string_lossy();
    let program = dir.path().join(format!("train{name}"));
    std::os::unix::fs::symlink(testkit(), &program).expect("another name");
    let procs = dir.path().join("cgroup.procs");
    let by_command = format!("--command train{name} --wait 10m");
    let by_cgroup = format!("--cgroup {} --wait 10m", dir.path().display());
    for sought in [&by_command, &by_cgroup] {
        let run = looking_for(&job, sought);
        let mut command = Command::new(&program);
        command.arg("target").args(TARGET.split_whitespace());
        scene.node.apply(command.env_clear());
        let mut target = Process::start(&mut command);
        std::fs::write(&procs, target.pid().to_string()).expect("a cgroup");
        while target
            .next_line()
            .is_some_and(|line| !line.starts_with("step 5 "))
        {}
        let path = scene.state_dir().join("job.sock");
        until(|| match ask(&path, &Question::Status) {
            Ok(Answer::Status(report)) => report.job_pid == Some(target.pid()),
            other => panic!("{other:?}"),
        });
        run.process.signal("USR1");
        let ended = run.ends();
        assert_eq!(ended.code, REQUEUE, "{ended:?}");
        until(|| target.has_ended());
        std::fs::remove_file(&procs).expect("no cgroup any more");
    }
    assert_eq!(scene.images("job"), [2, 1]);
}

#[test]
fn a_job_that_is_not_there_is_waited_for_until_a_notice_comes() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET);
    let (saver, _) = job.command("");
    let command = saver.cli.command("watch --command /no/such/job");
    let ended = Supervised::start((saver, command)).ends();
    assert_eq!(ended.code, 207, "{ended:?}");
    assert!(ended.stderr.contains("--wait"), "{ended:?}");
    let run = looking_for(&job, "--command /no/such/job --wait 10m");
    assert_eq!(notified(&scene, None).exit_code, 7);
    let ended = run.ends();
    assert_eq!(ended.code, REQUEUE, "{ended:?}");
    // Whoever stopped it at a terminal is not told to start it again.
    let run = looking_for(&job, "--command /no/such/job --wait 10m");
    run.process.signal("INT");
    assert_eq!(run.ends().code, 207);
    // Nobody took the job from whoever has it.
    if has_credentials("run::a_job_that_is_not_there_is_waited_for_until_a_notice_comes") {
        assert_eq!(scene.log_len("job"), 0);
    }
}

#[test]
fn several_that_could_be_the_job_are_named() {
    let scene = Scene::new(&[]);
    let targets = [scene.target(), scene.target()];
    let dir = tempfile::TempDir::new().expect("a temporary folder");
    let pids = targets.each_ref().map(|target| target.pid().to_string());
    std::fs::write(dir.path().join("cgroup.procs"), pids.join("\n")).expect("a cgroup");
    let job = Job::new(&scene, TARGET);
    let (saver, _) = job.command("");
    let command = format!("watch --cgroup {} --wait 10m", dir.path().display());
    let command = saver.cli.command(&command);
    let ended = Supervised::start((saver, command)).ends();
    assert_eq!(ended.code, 203, "{ended:?}");
    for part in [&*pids[0], &pids[1], "testkit", "--pid"] {
        assert!(ended.stderr.contains(part), "{part}: {ended:?}");
    }
}

#[test]
fn an_image_that_no_run_can_restore_is_bad_and_the_one_before_it_is_taken() {
    let scene = Scene::new(&[]);
    scene.save("job");
    scene.save("job");
    let job = Job::new(&scene, TARGET);
    // Of the very process that restores; the job's own never calls it.
    let failing = "fault=cuCheckpointProcessRestore#*=code:999";
    for number in 1..=2 {
        let ended = Supervised::start(job.command(failing)).ends();
        assert_eq!(ended.code, 221, "{ended:?}");
        let said = format!("failed to restore in {number} of 3 runs");
        assert!(ended.stderr.contains(&said), "{ended:?}");
        assert_eq!(scene.images("job").len(), 2);
    }
    // The third run calls it bad, and fails on the older one, too.
    let ended = Supervised::start(job.command(failing)).ends();
    assert_eq!(ended.code, 221, "{ended:?}");
    assert!(ended.stderr.contains("is not tried any more"), "{ended:?}");
    let mut run = job.start();
    run.wait_for("resumed ");
    run.process.signal("TERM");
    let ended = run.ends();
    assert_eq!(ended.code, REQUEUE, "{ended:?}");
    assert!(
        ended.stderr.contains("image 00000003 is restored"),
        "{ended:?}"
    );
}

/// Where a save can be held up for a while: by the store, or by the driver.
const PHASES: [(&str, &str, &str); 7] = [
    ("prepare", "PutObject", "attempt.json"),
    ("announce", "PutObject", "/log/00000002"),
    ("lock", "", "cuCheckpointProcessLock"),
    ("begin", "", "cuCheckpointProcessCheckpoint"),
    ("stream", "UploadPart", ".zst"),
    ("land", "CompleteMultipartUpload", ".zst"),
    ("commit", "PutObject", "manifest.json"),
];

/// What happens meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    SecondSignal,
    ShorterNotice,
    /// Of a signal.
    JobDies,
    /// With [`ITS_STATUS`], which is its own affair.
    JobExits,
}

/// What nobody else ends with.
const ITS_STATUS: i32 = 3;

fn held_up(phase: (&str, &str, &str), meanwhile: Meanwhile) {
    let (name, operation, what) = phase;
    let told = format!("{name}, {meanwhile:?}");
    let scene = Scene::new(&[]);
    let its_end = scene.state_dir().with_extension("status");
    let args = format!("{TARGET} --exit-when {}", its_end.display());
    let job =
        Job::new(&scene, &args).with("[preempt]\nnotice = \"60s\"\ncontexts = \"at-notice\"\n");
    let driver = match operation {
        "" => format!("fault={what}#1=stall:700"),
        _ => String::new(),
    };
    let mut run = Supervised::start(job.command(&driver));
    run.wait_for("step 2 ");
    if !operation.is_empty() {
        let action = json!({"delay_before_ms": 700});
        scene.server.set_rules(&json!([
            {"op": operation, "key_contains": what, "nth": 1, "action": action},
        ]));
    }
    run.process.signal("TERM");
    std::thread::sleep(Duration::from_millis(350));
    match meanwhile {
        Meanwhile::SecondSignal => run.process.signal("TERM"),
        Meanwhile::ShorterNotice => {
            let verdict = notified(&scene, Some(30.0));
            assert_eq!((verdict.exit_code, verdict.cause), (0, vec![]), "{told}");
        }
        Meanwhile::JobDies => run.end_the_job(),
        Meanwhile::JobExits => {
            std::fs::write(&its_end, format!("{ITS_STATUS}\n")).expect("a status");
        }
    }
    let ended = run.ends();
    let images = scene.images("job").len();
    let its_own = match meanwhile {
        Meanwhile::JobDies => Some(137),
        Meanwhile::JobExits => Some(ITS_STATUS),
        Meanwhile::SecondSignal | Meanwhile::ShorterNotice => None,
    };
    if let Some(its_own) = its_own {
        // If the save had looked at it for the last time there is an image, and it is as good as ended by us.
        let code = if images == 1 { REQUEUE } else { its_own };
        assert_eq!(ended.code, code, "{told}: {ended:?}");
        assert!(images == 0 || name == "commit", "{told}: {images}");
    } else {
        assert_eq!(ended.code, REQUEUE, "{told}: {ended:?}");
        assert_eq!(images, 1, "{told}");
    }
    if its_end.exists() {
        std::fs::remove_file(&its_end).expect("the status");
    }
    // Whatever happened, the next start is right: from the image, or afresh.
    let mut next = job.start();
    next.wait_for(if images == 1 { "resumed " } else { "ready " });
    next.wait_for("step ");
}

#[test]
fn what_happens_while_a_save_is_under_way_does_no_harm() {
    for phase in PHASES {
        std::thread::scope(|scope| {
            for meanwhile in [
                Meanwhile::SecondSignal,
                Meanwhile::ShorterNotice,
                Meanwhile::JobDies,
                Meanwhile::JobExits,
            ] {
                scope.spawn(move || held_up(phase, meanwhile));
            }
        });
    }
}

#[test]
fn a_notice_that_becomes_too_short_ends_the_save_in_time() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET).with("[preempt]\nnotice = \"60s\"\nmargin = \"500ms\"\n");
    // Its requests would be tried for two minutes.
    let mut run = job.start_patiently();
    run.wait_for("step 2 ");
    scene.server.set_rules(&json!([
        {"op": "UploadPart", "always": true, "action": {"stall": true}},
    ]));
    run.process.signal("TERM");
    std::thread::sleep(Duration::from_millis(300));
    let started = Instant::now();
    let verdict = notified(&scene, Some(1.5));
    // Nothing else would have ended it before: a minute is left by the first notice.
    assert!(
        started.elapsed() < Duration::from_secs(30),
        "{:?}",
        started.elapsed()
    );
    assert_eq!(verdict.exit_code, 12, "{verdict:?}");
    let ended = run.ends();
    assert_eq!(ended.code, 212, "{ended:?}");
    assert_eq!(scene.images("job"), [0_u64; 0]);
}

#[test]
fn a_job_that_finishes_while_its_save_is_prepared_is_finished() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, &format!("{TARGET} --steps 60"));
    let job = job.with("[preempt]\nnotice = \"10min\"\ncontexts = \"at-notice\"\n");
    let mut run = job.start();
    run.wait_for("step 2 ");
    // Nothing is saved before it has come to its end.
    scene.server.set_rules(&json!([
        {"op": "PutObject", "key_contains": "attempt.json", "always": true, "action": {"stall": true}},
    ]));
    run.process.signal("TERM");
    let ended = run.ends();
    assert_eq!(ended.code, 0, "{ended:?}");
    assert!(
        ended.said.last().expect("lines").starts_with("done "),
        "{ended:?}"
    );
    scene.server.set_rules(&json!([]));
    let mut next = job.start();
    next.wait_for("ready ");
}

#[test]
fn a_save_that_does_not_fit_is_refused_and_the_job_has_the_signal() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET).with("interval = \"1s\"\n");
    let mut run = job.start();
    // The first save in passing tells the rate, and is slow.
    scene.server.set_rules(&json!([
        {"op": "UploadPart", "always": true, "action": {"delay_before_ms": 900}},
    ]));
    while scene.images("job").is_empty() {
        run.wait_for("step ");
    }
    scene.server.set_rules(&json!([]));
    // It took half of the job's time, so the next one is left out.
    while status(&scene).saves_skipped == 0 {
        std::thread::sleep(Duration::from_millis(20));
    }
    let verdict = notified(&scene, Some(2.1));
    assert_eq!(verdict.exit_code, 5, "{verdict:?}");
    let ended = run.ends();
    assert_eq!(ended.code, 143, "the job's own end: {ended:?}");
    assert!(
        ended.stderr.contains("preempt.deadline_policy"),
        "{ended:?}"
    );
}

#[test]
fn a_job_that_fails_goes_on_from_its_last_image() {
    if !has_credentials("run::a_job_that_fails_goes_on_from_its_last_image") {
        return;
    }
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET);
    let mut run = job.start();
    run.wait_for("step 2 ");
    run.process.signal("TERM");
    assert_eq!(run.ends().code, REQUEUE);
    // A job that ends badly as soon as it was restored counts against the image, and is not finished.
    let mut run = job.start();
    run.wait_for("resumed ");
    run.end_the_job();
    let ended = run.ends();
    assert_eq!(ended.code, 221, "{ended:?}");
    assert!(ended.stderr.contains("in 1 of 3 runs"), "{ended:?}");
    // One that failed otherwise is wanted back, too.
    let failed = json!({"format": 1, "entry": "finished", "writer": "f".repeat(32), "status": 3});
    let next = scene.log_len("job") + 1;
    scene.put_entry("job", next, &failed);
    let mut run = job.start();
    run.wait_for("resumed ");
    // One that did well is not.
    drop(run);
    let done = json!({"format": 1, "entry": "finished", "writer": "f".repeat(32), "status": 0});
    let next = scene.log_len("job") + 1;
    scene.put_entry("job", next, &done);
    let mut run = job.start();
    run.wait_for("ready ");
}

#[test]
fn a_job_that_outlived_its_supervision_is_not_started_again() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET);
    let mut first = job.start();
    first.wait_for("step 2 ");
    first.process.kill();
    let second = job.start().ends();
    assert_eq!(second.code, 204, "{second:?}");
    assert!(second.stderr.contains("watch --pid"), "{second:?}");
    // It can be taken over, saved, and go on from there.
    let pid = first.job_pid.expect("it said so");
    let (saver, _) = job.command("");
    let command = saver.cli.command(&format!("watch --pid {pid}"));
    let third = Supervised::start((saver, command));
    let verdict = notified(&scene, None);
    assert_eq!(verdict.exit_code, 0, "{verdict:?}");
    let third = third.ends();
    assert_eq!(third.code, REQUEUE, "{third:?}");
    let mut fourth = job.start();
    fourth.wait_for("resumed ");
}

#[test]
fn a_notice_before_the_start_starts_nothing() {
    let scene = Scene::new(&[]);
    let notice = scene.state_dir().with_extension("notice");
    std::fs::write(&notice, "").expect("a notice");
    let config = format!(
        "[preempt]\nsources = [\"file\"]\nfile = \"{}\"\npoll = \"100ms\"\n",
        notice.display()
    );
    let job = Job::new(&scene, TARGET).with(&config);
    // The log is slow to be read, so that the file has been looked at.
    scene.server.set_rules(&json!([
        {"op": "GetObject", "key_contains": "/log/", "always": true, "action": {"delay_before_ms": 600}},
    ]));
    let ended = job.start().ends();
    assert_eq!(ended.code, REQUEUE, "{ended:?}");
    assert_eq!(ended.said, [""; 0]);
}

#[test]
fn a_notice_ends_the_wait_for_another_writer() {
    if !has_credentials("run::a_notice_ends_the_wait_for_another_writer") {
        return;
    }
    let scene = Scene::new(&[]);
    let saving = json!({
        "format": 1, "entry": "saving", "writer": "f".repeat(32), "attempt": "f".repeat(32), "seconds": 3600, "spill": null,
        "by": {"host": "elsewhere", "boot_id": "0", "pid_namespace": 1, "pid": 1, "start_time": 1},
    });
    scene.put_entry("job", 1, &saving);
    let job = Job::new(&scene, TARGET);
    let run = job.start();
    let verdict = notified(&scene, None);
    assert_eq!(verdict.exit_code, 7, "{verdict:?}");
    let ended = run.ends();
    assert_eq!(ended.code, REQUEUE, "{ended:?}");
    assert_eq!(ended.said, [""; 0]);
}

#[test]
fn a_notice_that_comes_while_a_watch_waits_for_another_writer_takes_the_job_over() {
    if !has_credentials(
        "run::a_notice_that_comes_while_a_watch_waits_for_another_writer_takes_the_job_over",
    ) {
        return;
    }
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    target.wait_for("step 1 ");
    let saving = json!({
        "format": 1, "entry": "saving", "writer": "f".repeat(32), "attempt": "f".repeat(32), "seconds": 3600, "spill": null,
        "by": {"host": "elsewhere", "boot_id": "0", "pid_namespace": 1, "pid": 1, "start_time": 1},
    });
    scene.put_entry("job", 1, &saving);
    let job = Job::new(&scene, TARGET);
    let (saver, _) = job.command("");
    let command = saver.cli.command(&format!("watch --pid {}", target.pid()));
    let run = Supervised::start((saver, command));
    let verdict = notified(&scene, None);
    assert_eq!(verdict.exit_code, 0, "{verdict:?}");
    let ended = run.ends();
    assert_eq!(ended.code, REQUEUE, "{ended:?}");
    assert_eq!(scene.images("job"), [1]);
}

#[test]
fn a_store_that_hangs_while_a_save_is_prepared_takes_no_more_than_the_notice() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET).with("[preempt]\nnotice = \"3s\"\n");
    // Its own requests would be tried for two minutes.
    let (saver, command) = job.command("");
    let saver = saver.unhurried();
    // Four such requests find out whether a log may begin there.
    scene.server.set_rules(&json!([
        {"op": "PutObject", "key_contains": "attempt.json", "from": 5, "action": {"stall": true}},
    ]));
    let mut run = Supervised::start((saver, command));
    run.wait_for("step 2 ");
    run.process.signal("TERM");
    let started = Instant::now();
    let ended = run.ends();
    // The job has the signal in the end, and dies of it.
    assert_eq!(ended.code, 143, "{ended:?}");
    assert!(
        started.elapsed() < Duration::from_secs(40),
        "{:?}",
        started.elapsed()
    );
}

#[test]
fn a_notice_ends_a_restore_and_costs_the_image_nothing() {
    let scene = Scene::new(&[]);
    scene.save("job");
    let job = Job::new(&scene, TARGET);
    let (saver, command) = job.command("");
    let text = saver.cli.config_text();
    let (start, _) = text.split_once("restore_command").expect("a command");
    // A process that does not come up.
    let sleeping = format!("{start}restore_command = [\"sleep\", \"600\"]\n");
    let run = Supervised::start((saver.with_config(&sleeping), command));
    until_status(&scene, |report| report.doing == Doing::Restoring);
    run.process.signal("TERM");
    let ended = run.ends();
    assert_eq!(ended.code, REQUEUE, "{ended:?}");
    // Both objects are looked at twice, read once to verify them, and once more when the driver has begun.
    for (from, read) in [(1, 0), (5, 4), (7, 6)] {
        scene.server.forget_requests();
        scene.server.set_rules(&json!([
            {"op": "GetObject", "key_contains": ".zst", "from": from, "action": {"stall": true}},
        ]));
        let (saver, command) = job.command("");
        let saver = saver.patient();
        let text = format!("{}\n[restore]\nverify = \"all\"\n", saver.cli.config_text());
        let run = Supervised::start((saver.with_config(&text), command));
        until(|| {
            let requests = scene.server.requests("GetObject");
            let of_objects = requests.iter().filter(|get| {
                let key = get["key"].as_str().unwrap_or_default();
                key.ends_with(".zst")
            });
            of_objects.count() == read && !requests.is_empty()
        });
        std::thread::sleep(Duration::from_millis(200));
        run.process.signal("TERM");
        let ended = run.ends();
        assert_eq!(ended.code, REQUEUE, "{from}: {ended:?}");
        assert!(ended.stderr.contains("was not started"), "{ended:?}");
        assert!(!ended.stderr.contains("of 3 runs"), "{ended:?}");
    }
    scene.server.set_rules(&json!([]));
    let mut next = job.start();
    next.wait_for("resumed ");
}

#[test]
fn a_save_in_passing_that_is_spilled_is_uploaded_later_and_the_job_runs() {
    let scene = Scene::new(&[]);
    let spill = scene.state_dir().with_extension("spill");
    std::fs::create_dir(&spill).expect("a directory");
    let config = "interval = \"1s\"\ninterval_share = 100\n[preempt]\ndeadline_policy = \"try\"\n";
    let job = Job::new(&scene, TARGET).with(config);
    let (saver, command) = job.command("");
    let always = format!("path = \"{}\"\nwhen = \"always\"", spill.display());
    let text = saver.cli.config_text();
    let text = text.replace("on_failure = \"abandon\"", &always);
    scene.server.set_rules(&json!([
        {"op": "UploadPart", "always": true, "action": {"status": 403, "code": "AccessDenied"}},
    ]));
    let mut run = Supervised::start((saver.with_config(&text), command));
    until_status(&scene, |report| report.saves_failed >= 1);
    assert_eq!(scene.images("job"), [0_u64; 0]);
    run.wait_for("step ");
    scene.server.set_rules(&json!([]));
    until_status(&scene, |report| report.saves_committed >= 1);
    run.process.signal("TERM");
    let ended = run.ends();
    assert_eq!(ended.code, REQUEUE, "{ended:?}");
    assert!(ended.stderr.contains("and runs on"), "{ended:?}");
    let mut seen = digests(&ended.said);
    seen.dedup();
    scene.must_be_the_steps_of_the_job(&seen);
    let mut next = job.start();
    next.wait_for("resumed ");
}

#[test]
fn saves_in_passing_that_take_longer_than_their_interval_let_a_notice_in() {
    let scene = Scene::new(&[]);
    let config = "interval = \"1s\"\ninterval_share = 100\n[preempt]\ndeadline_policy = \"try\"\n";
    let job = Job::new(&scene, TARGET).with(config);
    let (saver, command) = job.command("");
    let mut run = Supervised::start((saver.unhurried(), command));
    run.wait_for("step 1 ");
    scene.server.set_rules(&json!([
        {"op": ["UploadPart", "CompleteMultipartUpload"], "always": true, "action": {"delay_before_ms": 700}},
    ]));
    until_status(&scene, |report| report.saves_committed >= 1);
    run.process.signal("TERM");
    let ended = run.ends();
    assert_eq!(ended.code, REQUEUE, "{ended:?}");
    // The one that was under way, or the notice's: after a commit there is nothing more to save.
    let after = ended.stderr.split("notice from signal").nth(1);
    let begun = after.expect("a notice").matches("s begin").count();
    assert!(begun <= 1, "{ended:?}");
}

#[test]
fn a_job_that_runs_after_its_restorer_was_killed_is_not_started_again() {
    let scene = Scene::new(&[]);
    scene.save("job");
    let job = Job::new(&scene, TARGET);
    let (saver, mut command) = job.command("");
    command.env("CKPTSTREAM_FAILPOINT", "restore:completed=kill");
    let mut first = Supervised::start((saver, command));
    // The guard lets it run.
    first.wait_for("resumed ");
    let second = job.start().ends();
    assert_eq!(second.code, 204, "{second:?}");
    assert!(
        second.stderr.contains("runs on this node already"),
        "{second:?}"
    );
    first.end_the_job();
    // What says nothing that makes sense proves nothing either.
    let path = scene.state_dir().join("job.job.json");
    std::fs::write(&path, "{").expect("a file");
    let third = job.start().ends();
    assert_eq!(third.code, 204, "{third:?}");
    assert!(third.stderr.contains("job.job.json"), "{third:?}");
}

#[test]
fn a_notice_without_any_time_leaves_the_job_the_signal_and_its_bringer_a_verdict() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET);
    let mut run = job.start();
    run.wait_for("step 1 ");
    until_status(&scene, |report| report.armed);
    let verdict = notified(&scene, Some(1.0));
    assert_ne!(verdict.exit_code, 0, "{verdict:?}");
    assert!(!verdict.cause.is_empty(), "{verdict:?}");
    let ended = run.ends();
    assert_eq!(ended.code, 143, "{ended:?}");
    assert_eq!(scene.images("job"), [0_u64; 0]);
}

#[test]
fn a_job_that_was_refused_is_not_saved_in_passing_until_it_is_lost() {
    let scene = Scene::new(&[]);
    let notice = scene.state_dir().with_extension("notice");
    let config = format!(
        "interval = \"1s\"\ninterval_share = 40\n[preempt]\nsources = [\"file\", \"socket\"]\nfile = \"{}\"\npoll = \"100ms\"\n",
        notice.display()
    );
    let job = Job::new(&scene, TARGET).with(&config);
    let (saver, _) = job.command("");
    // The signal that it is given means nothing to this one.
    let script = format!("trap '' TERM; exec {} target {TARGET}", testkit().display());
    let mut command = saver.cli.command("run");
    command.args(["--", "sh", "-c", &script]);
    let mut run = Supervised::start((saver.unhurried(), command));
    // The first save keeps the job so long that the next ones are left out for a while: none is under way at the notice.
    scene.server.set_rules(&json!([
        {"op": "UploadPart", "always": true, "action": {"delay_before_ms": 2000}},
    ]));
    until_status(&scene, |report| report.saves_skipped >= 1);
    std::fs::write(&notice, "2100ms").expect("a notice");
    until_status(&scene, |report| report.saves_failed >= 1);
    let committed = scene.images("job").len();
    // The while is over, and more intervals, in which nothing may happen.
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(scene.images("job").len(), committed);
    run.wait_for("step ");
    run.wait_for("step ");
    scene.server.set_rules(&json!([]));
    std::fs::remove_file(&notice).expect("the notice");
    until(|| scene.images("job").len() > committed);
    drop(run);
}

#[test]
fn a_store_that_would_not_take_a_save_is_told_of_before_the_notice() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET).with("[preempt]\nprobe_every = \"100ms\"\n");
    let mut run = job.start();
    run.wait_for("step 1 ");
    scene.server.set_rules(&json!([
        {"op": "*", "always": true, "action": {"status": 403, "code": "AccessDenied"}},
    ]));
    let says = |report: &Report, what: &str| {
        let trouble = report.store_trouble.as_deref();
        trouble.is_some_and(|why| why.contains(what))
    };
    until_status(&scene, |report| says(report, "AccessDenied"));
    scene.server.set_rules(&json!([]));
    until_status(&scene, |report| report.store_trouble.is_none());
    let mut second = job.elsewhere().start();
    second.wait_for("step 1 ");
    until_status(&scene, |report| says(report, "can save nothing any more"));
}

#[test]
fn a_socket_is_made_over_nothing_else() {
    let scene = Scene::new(&[]);
    let file = scene.state_dir().with_extension("file");
    std::fs::write(&file, "dear").expect("a file");
    let config = format!("[preempt]\nsocket = \"{}\"\n", file.display());
    let ended = Job::new(&scene, TARGET).with(&config).start().ends();
    assert_eq!(ended.code, 203, "{ended:?}");
    assert!(ended.stderr.contains("preempt.socket"), "{ended:?}");
    assert_eq!(std::fs::read_to_string(&file).expect("a file"), "dear");
}

#[test]
fn all_that_is_logged_of_a_save_names_it() {
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    target.wait_for("step 1 ");
    let failing = json!({"status": 500, "code": "InternalError"});
    scene.server.set_rules(&json!([
        {"op": "UploadPart", "nth": 1, "action": failing},
        {"op": "CompleteMultipartUpload", "nth": 1, "action": failing},
        {"op": "PutObject", "key_contains": "attempt.json", "nth": 1, "action": failing},
    ]));
    let pid = target.pid();
    let saver = scene.saver("job", "");
    let line = format!("checkpoint --pid {pid} --progress json --log-level debug");
    let told = saver.cli.command(&line).output().expect("it runs");
    assert!(told.status.success(), "{told:?}");
    let claimed = scene
        .server
        .requests("PutObject")
        .into_iter()
        .find_map(|put| {
            let key = put["key"].as_str()?.to_owned();
            let (start, _) = key.split_once("/attempt.json")?;
            Some(start.rsplit('/').next()?.to_owned())
        });
    let claimed = claimed.expect("a claim");
    let stderr = String::from_utf8(told.stderr).expect("text");
    let lines = stderr
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"));
    let logged: Vec<Value> = lines
        .filter(|line: &Value| line["event"] == "log")
        .collect();
    let of_requests = logged.iter().filter(|line| {
        let message = line["message"].as_str().unwrap_or_default();
        message.starts_with("trying again")
    });
    assert!(of_requests.count() >= 3, "{stderr}");
    for line in &logged {
        assert_eq!(line["trace"], claimed, "{line}");
    }
}

#[test]
fn whoever_gave_a_pipe_hears_that_the_job_runs_and_not_before() {
    let scene = Scene::new(&[]);
    scene.save("job");
    let job = Job::new(&scene, TARGET);
    let ready = scene.state_dir().with_extension("ready");
    let with_fd_3 = |command: &Command| {
        let mut shell = Command::new("sh");
        let script = format!("exec \"$0\" \"$@\" 3>{}", ready.display());
        shell.args(["-c", &script]).arg(command.get_program());
        shell.args(command.get_args()).env_clear();
        shell.envs(
            command
                .get_envs()
                .filter_map(|(name, value)| Some((name, value?))),
        );
        shell
    };
    let (saver, command) = job.command("");
    let mut words: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
    let run = words
        .iter()
        .position(|word| word == "run")
        .expect("it runs");
    words.splice(run + 1..run + 1, ["--ready-fd".into(), "3".into()]);
    let mut with_ready = Command::new(command.get_program());
    with_ready.args(&words);
    with_ready.envs(
        command
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?))),
    );
    // The image is slow to be read.
    scene.server.set_rules(&json!([
        {"op": "GetObject", "key_contains": ".zst", "always": true, "action": {"delay_before_ms": 300}},
    ]));
    let run = Supervised::start((saver.unhurried(), with_fd_3(&with_ready)));
    until_status(&scene, |report| report.doing == Doing::Restoring);
    let said = || std::fs::read_to_string(&ready).unwrap_or_default();
    let before = said();
    until(|| !said().is_empty());
    assert_eq!((before.as_str(), said().as_str()), ("", "\n"));
    let restored = status(&scene);
    assert!(
        restored.job_pid.is_some() && restored.doing != Doing::Restoring,
        "{restored:?}"
    );
    drop(run);
}
