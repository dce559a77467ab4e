//! Every driver call that fails, in every way that the header knows and in ones that it does not: what ckptstream concludes, what it says about the target, and what it
//! leaves alone.

use std::collections::HashSet;
use std::process::Command;

use crate::support::scene::{Scene, Watched, assert_failed, cause, told, until};
use crate::support::{Ckptstream, Target};

/// Codes of the header, and two that no header has.
const CODES: [u32; 11] = [1, 2, 3, 201, 304, 401, 600, 801, 802, 999, 12345];

/// A call of the driver that fails.
struct Site {
    /// `FUNCTION#K`.
    call: &'static str,
    code: i32,
    phase: &'static str,
    /// What the report says about the target; none where it was not touched.
    told: Option<&'static str>,
}

const fn site(
    call: &'static str,
    code: i32,
    phase: &'static str,
    told: Option<&'static str>,
) -> Site {
    Site {
        call,
        code,
        phase,
        told,
    }
}

/// Too little memory to pin: it does with less.
fn is_got_over(site: &Site, code: u32) -> bool {
    function(site) == "cuMemHostRegister" && code == 2
}

/// The function's name without the number of the call.
fn function(site: &Site) -> &'static str {
    site.call.split('#').next().expect("a name")
}

#[test]
fn without_memory_to_pin_it_goes_on_with_less() {
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    for (fault, words) in [
        ("cuMemHostRegister#1=code:2", "buffers instead of"),
        ("cuMemHostRegister#*=code:800", "cannot be pinned"),
    ] {
        let saver = scene.saver("job", &format!("fault={fault}"));
        let args = format!("checkpoint --pid {} --then resume", target.pid());
        let run = saver.cli.run(&args);
        assert_eq!(run.code, 0, "{fault}: {run:?}");
        for words in [words, "memlock limit", "host memory"] {
            assert!(run.stderr.contains(words), "{fault}: no {words} in {run:?}");
        }
        saver.cli.ok("verify");
    }
    scene.must_compute_on(&mut target);
    scene.must_have_computed_rightly(target);
}

#[test]
fn before_begin_every_code_leaves_the_target_running() {
    let sites = [
        site("cuInit#1", 3, "prepare", None),
        site("cuCheckpointProcessGetState#1", 3, "prepare", None),
        site("cuDevicePrimaryCtxRetain#1", 3, "prepare", Some("running")),
        site("cuDevicePrimaryCtxRetain#2", 3, "prepare", Some("running")),
        site("cuMemHostRegister#2", 3, "prepare", Some("running")),
        site("cuEventCreate#1", 3, "prepare", Some("running")),
        site("cuCheckpointProcessLock#1", 10, "lock", Some("running")),
        site(
            "cuCheckpointProcessCheckpoint#1",
            10,
            "begin",
            Some("running"),
        ),
    ];
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    for site in &sites {
        for code in CODES.into_iter().filter(|code| !is_got_over(site, *code)) {
            let what = format!("{} answers {code}", site.call);
            let saver = scene.saver("job", &format!("fault={}=code:{code}", site.call));
            let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
            let answered = format!("({code})");
            assert_failed(
                &what,
                &run,
                site.code,
                site.phase,
                &[function(site), &answered],
            );
            assert_eq!(told(&run), site.told, "{what}");
            assert_eq!(
                saver.calls("cuCheckpointOperationComplete"),
                0,
                "{what}: Complete without an image"
            );
        }
        scene.must_compute_on(&mut target);
    }
    assert_eq!(scene.images("job"), [0_u64; 0]);
    assert_no_open_uploads(&scene);
    scene.must_have_computed_rightly(target);
}

/// Every upload that was opened was aborted.
fn assert_no_open_uploads(scene: &Scene) {
    let keys = |operation: &str| -> HashSet<String> {
        let requests = scene.server.requests(operation);
        requests
            .iter()
            .map(|line| line["key"].to_string())
            .collect()
    };
    let mut ended = keys("AbortMultipartUpload");
    ended.extend(keys("CompleteMultipartUpload"));
    assert_eq!(keys("CreateMultipartUpload"), ended);
}

#[test]
fn during_the_transfer_every_code_is_the_end_of_the_save() {
    let sites = [
        site("cuMemcpyDtoHAsync#1", 12, "stream", Some("checkpointing")),
        site("cuMemcpyDtoHAsync#6", 12, "stream", Some("checkpointing")),
        site("cuEventSynchronize#3", 12, "stream", Some("checkpointing")),
        site("cuStreamSynchronize#2", 12, "stream", Some("checkpointing")),
    ];
    after_begin(&sites, &CODES);
}

#[test]
fn once_the_driver_has_begun_a_failure_that_is_rare_is_told_as_well() {
    let sites = [
        site("cuStreamGetCtx#1", 12, "begin", Some("checkpointing")),
        site("cuEventRecord#2", 12, "stream", Some("checkpointing")),
    ];
    after_begin(&sites, &[201, 999]);
}

/// Each code at each site, on a target of its own: nothing is committed, Complete is not called, and the target is as it is told.
fn after_begin(sites: &[Site], codes: &[u32]) {
    let scene = Scene::new(&[]);
    for site in sites {
        for code in codes {
            let what = format!("{} answers {code}", site.call);
            let target = scene.target();
            let saver = scene.saver("job", &format!("fault={}=code:{code}", site.call));
            let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
            let answered = format!("({code})");
            assert_failed(
                &what,
                &run,
                site.code,
                site.phase,
                &[function(site), &answered],
            );
            assert_eq!(told(&run), site.told, "{what}");
            assert_eq!(told(&run), Some(scene.state_of(&target).as_str()), "{what}");
            scene.must_not_be_committed("job", &saver);
        }
    }
    assert_no_open_uploads(&scene);
}

#[test]
fn a_lie_of_the_driver_about_begin_is_looked_through() {
    let scene = Scene::new(&[]);
    // It says no and has begun: there is no handle, so there is no way back.
    let target = scene.target();
    let saver = scene.saver(
        "job",
        "fault=cuCheckpointProcessCheckpoint#1=after-code:999",
    );
    let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
    assert_failed("begun all the same", &run, 12, "begin", &["(999)"]);
    assert_eq!(told(&run), Some("checkpointing"));
    assert_eq!(scene.state_of(&target), "checkpointing");
    scene.must_not_be_committed("job", &saver);

    // It says yes and has done nothing, or says that it locked and has not.
    let mut target = scene.target();
    for fault in [
        "cuCheckpointProcessCheckpoint#1=code:0",
        "cuCheckpointProcessLock#1=code:0",
    ] {
        let saver = scene.saver("job", &format!("fault={fault}"));
        let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
        assert_failed(fault, &run, 10, "begin", &[]);
        assert_eq!(told(&run), Some("running"), "{fault}");
        scene.must_compute_on(&mut target);
        scene.must_not_be_committed("job", &saver);
    }
    scene.must_have_computed_rightly(target);
}

#[test]
fn a_target_that_cannot_be_unlocked_is_not_called_running() {
    let scene = Scene::new(&[]);
    // It locks, says that it did not, and so is not ours to unlock; or it does not unlock.
    for (fault, phase, attached) in [
        (
            "fault=cuCheckpointProcessLock#1=after-code:999",
            "lock",
            false,
        ),
        (
            "fault=cuCheckpointProcessCheckpoint#1=code:2;fault=cuCheckpointProcessUnlock#1=code:999",
            "begin",
            true,
        ),
    ] {
        let target = scene.target();
        let saver = scene.saver("job", fault);
        let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
        assert_failed(fault, &run, 12, phase, &[]);
        assert_eq!(told(&run), Some("locked"), "{fault}");
        assert_eq!(scene.state_of(&target), "locked", "{fault}");
        let says = run.report["attached"]
            .to_string()
            .contains("cuCheckpointProcessUnlock");
        assert_eq!(says, attached, "{run:?}");
        scene.must_not_be_committed("job", &saver);
    }
}

#[test]
fn a_state_that_cannot_be_looked_up_is_unknown() {
    let scene = Scene::new(&[]);
    let target = scene.target();
    // The look is made three times.
    let look = |number: u32| format!("fault=cuCheckpointProcessGetState#{number}=code:999");
    let looks = [look(2), look(3), look(4)].join(";");
    let fault = &format!("fault=cuMemcpyDtoHAsync#2=code:999;{looks}");
    let run = scene
        .saver("job", fault)
        .cli
        .run(&format!("checkpoint --pid {}", target.pid()));
    assert_failed(fault, &run, 12, "stream", &["cuMemcpyDtoHAsync"]);
    assert_eq!(told(&run), Some("unknown"));
}

#[test]
fn complete_that_fails_takes_nothing_from_the_committed_image() {
    let scene = Scene::new(&[]);
    for code in CODES {
        for (action, state) in [("code", "checkpointing"), ("after-code", "checkpointed")] {
            let what = format!("Complete, {action} {code}");
            let job = format!("{action}-{code}");
            let mut target = scene.target();
            target.wait_for("step 2 ");
            let saver = scene.saver(
                &job,
                &format!("fault=cuCheckpointOperationComplete#1={action}:{code}"),
            );
            let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
            let answered = format!("({code})");
            let parts = ["cuCheckpointOperationComplete", &answered];
            assert_failed(&what, &run, 14, "complete", &parts);
            assert_eq!(run.report["image"], "00000003", "{what}");
            assert_eq!(told(&run), Some(state), "{what}");
            assert_eq!(scene.state_of(&target), state, "{what}");
            // Spent, whatever it answered.
            assert_eq!(saver.calls("cuCheckpointOperationComplete"), 1, "{what}");
            assert_eq!(scene.images(&job), [1], "{what}");
            saver.cli.ok("verify");
        }
    }
}

/// Sites of a restore into the very process that was saved, before the driver is asked to restore.
#[test]
fn before_the_driver_restores_every_code_is_a_refusal() {
    let sites = [
        site("cuInit#1", 20, "read", None),
        site("cuCheckpointProcessGetState#1", 20, "read", None),
        site("cuDevicePrimaryCtxRetain#1", 20, "read", None),
        site("cuMemGetInfo#1", 20, "read", None),
        site("cuMemHostRegister#1", 20, "restore", None),
        site("cuEventCreate#1", 20, "restore", None),
    ];
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    target.wait_for("step 2 ");
    let cli = scene.saver("job", "").cli;
    cli.ok(&format!("checkpoint --pid {}", target.pid()));
    for site in &sites {
        for code in CODES.into_iter().filter(|code| !is_got_over(site, *code)) {
            let what = format!("{} answers {code}", site.call);
            let saver = scene.saver("job", &format!("fault={}=code:{code}", site.call));
            let run = saver.cli.run(&format!("restore --pid {}", target.pid()));
            let answered = format!("({code})");
            assert_failed(
                &what,
                &run,
                site.code,
                site.phase,
                &[function(site), &answered],
            );
            assert_eq!(told(&run), site.told, "{what}");
            assert_eq!(saver.calls("cuCheckpointProcessRestore"), 0, "{what}");
        }
        assert_eq!(scene.state_of(&target), "checkpointed", "{}", site.call);
    }
    cli.ok(&format!("restore --pid {}", target.pid()));
    scene.must_compute_on(&mut target);
    scene.must_have_computed_rightly(target);
}

#[test]
fn while_restoring_every_code_is_the_end_of_the_target() {
    let sites = [
        site(
            "cuCheckpointProcessRestore#1",
            21,
            "restore",
            Some("checkpointed"),
        ),
        site("cuMemcpyHtoDAsync#1", 21, "restore", Some("restoring")),
        site("cuMemcpyHtoDAsync#6", 21, "restore", Some("restoring")),
        site("cuEventSynchronize#3", 21, "restore", Some("restoring")),
        site("cuStreamSynchronize#2", 21, "restore", Some("restoring")),
    ];
    while_restoring(&sites, &CODES, 0);
}

#[test]
fn complete_and_unlock_of_a_restore_are_not_tried_again() {
    let complete = [site(
        "cuCheckpointOperationComplete#1",
        21,
        "complete",
        Some("restoring"),
    )];
    while_restoring(&complete, &CODES, 1);
    let unlock = [site(
        "cuCheckpointProcessUnlock#1",
        21,
        "unlock",
        Some("locked"),
    )];
    while_restoring(&unlock, &CODES, 1);
    // Attached, looked at behind Complete, behind Unlock.
    let looks = [site(
        "cuCheckpointProcessGetState#2",
        21,
        "complete",
        Some("locked"),
    )];
    while_restoring(&looks, &[1, 999], 1);
}

/// Each code at each site, on a fresh target of its own: it fails, Complete is called as often as it may, the target is as it is told, and the image is as good as
/// before: the next fresh process takes it.
fn while_restoring(sites: &[Site], codes: &[u32], complete_calls: usize) {
    let scene = Scene::new(&[]);
    let saved = scene.save("job");
    for site in sites {
        for code in codes {
            let what = format!("{} answers {code}", site.call);
            let fresh = scene.fresh();
            let saver = scene.saver("job", &format!("fault={}=code:{code}", site.call));
            let run = saver
                .cli
                .run(&format!("restore --pid {} --into-fresh", fresh.pid()));
            let answered = format!("({code})");
            assert_failed(
                &what,
                &run,
                site.code,
                site.phase,
                &[function(site), &answered],
            );
            assert_eq!(told(&run), site.told, "{what}");
            assert_eq!(told(&run), Some(scene.state_of(&fresh).as_str()), "{what}");
            assert_eq!(
                saver.calls("cuCheckpointProcessRestore"),
                1,
                "{what}: one try"
            );
            let calls = saver.calls("cuCheckpointOperationComplete");
            assert_eq!(calls, complete_calls, "{what}: Complete");
            assert!(
                saver.calls("cuCheckpointProcessUnlock") <= complete_calls,
                "{what}"
            );
        }
    }
    let mut fresh = scene.fresh();
    scene
        .saver("job", "")
        .cli
        .ok(&format!("restore --pid {} --into-fresh", fresh.pid()));
    scene.must_compute_on(&mut fresh);
    let mut seen = saved;
    seen.extend(fresh.kill());
    seen.dedup();
    scene.must_be_the_steps_of_the_job(&seen);
}

#[test]
fn resume_that_fails_leaves_a_good_image_and_says_where_the_target_is() {
    let scene = Scene::new(&[]);
    for (fault, phase, state) in [
        // The pools of the save come first; these are the restore's.
        (
            "cuCheckpointProcessRestore#1=code:2",
            "restore",
            "checkpointed",
        ),
        ("cuMemcpyHtoDAsync#2=code:999", "restore", "restoring"),
        (
            "cuCheckpointOperationComplete#2=code:999",
            "complete",
            "restoring",
        ),
        ("cuCheckpointProcessUnlock#1=code:999", "unlock", "locked"),
        ("cuMemHostRegister#3=code:999", "restore", "checkpointed"),
    ] {
        let target = scene.target();
        let job = fault.replace(['#', '=', ':'], "-");
        let saver = scene.saver(&job, &format!("fault={fault}"));
        let run = saver
            .cli
            .run(&format!("checkpoint --pid {} --then resume", target.pid()));
        assert_failed(fault, &run, 14, phase, &[]);
        assert_eq!(run.report["image"], "00000003", "{fault}");
        assert_eq!(told(&run), Some(state), "{fault}");
        assert_eq!(scene.state_of(&target), state, "{fault}");
        assert_eq!(scene.images(&job), [1], "{fault}");
        saver.cli.ok("verify");
    }
}

#[test]
fn resume_that_fails_leaves_no_upload_open_for_a_gpu_without_data() {
    let scene = Scene::new(&[]);
    let mut target = Target::start(&scene.node, "--gpus 1 --bytes 2MiB --seed 4 --step-ms 20");
    target.wait_for("step 1 ");
    let saver = scene.saver("job", "fault=cuCheckpointProcessRestore#1=code:2");
    let run = saver
        .cli
        .run(&format!("checkpoint --pid {} --then resume", target.pid()));
    assert_failed("resume", &run, 14, "restore", &[]);
    assert_no_open_uploads(&scene);
}

#[test]
fn a_target_that_cannot_be_locked_in_time_runs_on() {
    let scene = Scene::new(&[]);
    // Stopped: no lock is even tried.
    let mut target = scene.target();
    target.signal("STOP");
    let saver = scene.saver("job", "");
    let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
    assert_failed("stopped", &run, 3, "prepare", &["is stopped", "kill -CONT"]);
    assert_eq!(saver.calls("cuCheckpointProcessLock"), 0);
    target.signal("CONT");
    scene.must_compute_on(&mut target);

    // Stopped between our look and the lock: the driver gives up.
    let saver = scene.saver_with(
        "job",
        "fault=cuCheckpointProcessLock#1=stall:1500",
        "[driver]\nlock_timeout = \"200ms\"\n",
    );
    let running = Watched::start(&saver.cli, &format!("checkpoint --pid {}", target.pid()));
    running.until_phase("lock");
    target.signal("STOP");
    let run = running.wait();
    target.signal("CONT");
    let parts = ["cuCheckpointProcessLock", "(600)", "driver.lock_timeout"];
    assert_failed("stopped later", &run, 10, "lock", &parts);
    assert_eq!(told(&run), Some("running"));
    scene.must_compute_on(&mut target);
    scene.must_not_be_committed("job", &saver);
    scene.must_have_computed_rightly(target);
}

#[test]
fn a_target_that_dies_makes_the_save_void() {
    let scene = Scene::new(&[]);
    for (fault, code, phase) in [
        // Gone before anything was asked of it.
        ("cuCheckpointProcessLock#1=kill-target", 7, "lock"),
        ("cuCheckpointProcessCheckpoint#1=kill-target", 12, "begin"),
        ("cuMemcpyDtoHAsync#1=kill-target", 12, "commit"),
        ("cuMemcpyDtoHAsync#7=kill-target", 12, "commit"),
        ("cuStreamSynchronize#1=kill-target", 12, "commit"),
    ] {
        let mut target = scene.target();
        let saver = scene.saver("job", &format!("fault={fault}"));
        let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
        assert_failed(fault, &run, code, phase, &[]);
        assert_eq!(told(&run), Some("gone"), "{fault}");
        scene.must_not_be_committed("job", &saver);
        until(|| target.has_ended());
    }

    // It dies behind the commit: the image was taken while it lived, and stands.
    let target = scene.target();
    let saver = scene.saver("late", "fault=cuCheckpointOperationComplete#1=kill-target");
    let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
    assert_failed("killed at Complete", &run, 14, "complete", &[]);
    assert_eq!(
        (told(&run), &run.report["image"]),
        (Some("gone"), &"00000003".into())
    );
    let mut fresh = scene.fresh();
    saver_of(&scene, "late").ok(&format!("restore --pid {} --into-fresh", fresh.pid()));
    scene.must_compute_on(&mut fresh);
}

fn saver_of(scene: &Scene, job: &str) -> Ckptstream {
    scene.saver(job, "").cli
}

#[test]
fn a_saver_that_dies_leaves_the_image_before_it() {
    let scene = Scene::new(&[]);
    let saved = scene.save("job");
    for fault in [
        "cuCheckpointProcessLock#1=kill-caller",
        "cuCheckpointProcessCheckpoint#1=kill-caller",
        "cuMemcpyDtoHAsync#1=kill-caller",
        "cuMemcpyDtoHAsync#8=kill-caller",
        "cuStreamSynchronize#2=kill-caller",
    ] {
        let target = scene.target();
        let saver = scene.saver("job", &format!("fault={fault}"));
        let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
        assert_eq!(
            (run.code, run.report),
            (-1, serde_json::Value::Null),
            "{fault}"
        );
        assert_eq!(saver.calls("cuCheckpointOperationComplete"), 0, "{fault}");
        assert_eq!(scene.images("job"), [1], "{fault}");
        let verified = saver_of(&scene, "job").ok("verify");
        assert_eq!(verified["image"], "00000003", "{fault}");
    }
    let mut fresh = scene.fresh();
    saver_of(&scene, "job").ok(&format!("restore --pid {} --into-fresh", fresh.pid()));
    scene.must_compute_on(&mut fresh);
    let mut seen = saved;
    seen.extend(fresh.kill());
    seen.dedup();
    scene.must_be_the_steps_of_the_job(&seen);

    // And between the commit and Complete: the image is there.
    let target = scene.target();
    let saver = scene.saver("job", "fault=cuCheckpointOperationComplete#1=kill-caller");
    assert_eq!(
        saver
            .cli
            .run(&format!("checkpoint --pid {}", target.pid()))
            .code,
        -1
    );
    assert_eq!(scene.images("job"), [2, 1]);
    // Every saver, the restore among them, has opened the job.
    let newest = scene.generations("job")[0];
    let verified = saver_of(&scene, "job").ok("verify");
    assert_eq!(verified["generation"], newest);
}

#[test]
fn a_signal_before_begin_rolls_back_and_after_it_changes_nothing() {
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    for signal in ["INT", "TERM", "HUP"] {
        // While the driver locks, which nothing can interrupt: then it is unlocked again. And earlier: not even locked.
        for (stalled, phase, lock_calls) in [
            ("cuCheckpointProcessLock#1", "lock", 1),
            ("cuMemHostRegister#1", "prepare", 0),
        ] {
            let what = format!("{signal} during {stalled}");
            let saver = scene.saver("job", &format!("fault={stalled}=stall:700"));
            let running = Watched::start(&saver.cli, &format!("checkpoint --pid {}", target.pid()));
            running.until_phase(phase);
            running.signal(signal);
            let run = running.wait();
            assert_failed(&what, &run, 10, phase, &[]);
            // Or cancelled in the middle of a request, when it came that early.
            let why = cause(&run);
            assert!(
                why.contains("stopped by a signal") || why.contains("cancelled"),
                "{what}: {why}"
            );
            assert_eq!(saver.calls("cuCheckpointProcessLock"), lock_calls, "{what}");
            assert_eq!(
                saver.calls("cuCheckpointProcessUnlock"),
                lock_calls,
                "{what}"
            );
            assert_eq!(saver.calls("cuCheckpointProcessCheckpoint"), 0, "{what}");
            assert_eq!(told(&run), Some("running"), "{what}");
            scene.must_compute_on(&mut target);
        }
    }
    assert_eq!(scene.images("job"), [0_u64; 0]);
    assert_no_open_uploads(&scene);

    let saver = scene.saver("job", "d2h=8MiB");
    let args = format!("checkpoint --pid {} --then resume", target.pid());
    let running = Watched::start(&saver.cli, &args);
    until(|| saver.calls("cuMemcpyDtoHAsync") > 0);
    for signal in ["INT", "TERM", "HUP", "INT"] {
        running.signal(signal);
    }
    let run = running.wait();
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(
        (told(&run), scene.images("job")),
        (Some("running"), vec![1])
    );
    saver_of(&scene, "job").ok("verify");
    scene.must_compute_on(&mut target);
    scene.must_have_computed_rightly(target);
}

#[test]
fn a_signal_gives_a_restore_up_before_the_driver_is_asked_and_not_after() {
    let scene = Scene::new(&[]);
    let mut seen = scene.save("job");
    let mut fresh = scene.fresh();
    let args = format!("restore --pid {} --into-fresh", fresh.pid());

    // Behind the two seek tables no byte arrives, so that nothing waits for the driver yet.
    scene.server.set_rules(&serde_json::json!([
        {"op": "GetObject", "key_contains": ".zst", "from": 3, "action": {"delay_before_ms": 3000}},
    ]));
    let saver = scene.saver("job", "");
    let running = Watched::start(&saver.cli, &args);
    until(|| saver.calls("cuEventCreate") > 0);
    running.signal("TERM");
    let run = running.wait();
    assert_failed("early", &run, 20, "restore", &["stopped by a signal"]);
    assert_eq!(saver.calls("cuCheckpointProcessRestore"), 0);
    assert_eq!(scene.state_of(&fresh), "checkpointed");
    scene.server.set_rules(&serde_json::json!([]));

    let saver = scene.saver("job", "h2d=8MiB");
    let running = Watched::start(&saver.cli, &args);
    until(|| saver.calls("cuMemcpyHtoDAsync") > 0);
    running.signal("INT");
    running.signal("TERM");
    let run = running.wait();
    assert_eq!((run.code, told(&run)), (0, Some("running")), "{run:?}");
    scene.must_compute_on(&mut fresh);
    seen.extend(fresh.kill());
    seen.dedup();
    scene.must_be_the_steps_of_the_job(&seen);
}

#[test]
fn a_driver_that_is_too_old_is_named_and_the_target_computes_on() {
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    for (api, parts) in [
        (
            "13000",
            &["13.0", "13.4", "cuCheckpointOperationComplete"][..],
        ),
        (
            "13030",
            &["13.3", "13.4", "R615", "cuCheckpointOperationComplete"],
        ),
        ("12040", &["12.4", "13.4", "cuCheckpointProcessLock"]),
    ] {
        let saver = scene.saver("job", &format!("api={api}"));
        let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
        assert_failed(api, &run, 3, "prepare", parts);
        assert_eq!(saver.calls("cuCheckpointProcessLock"), 0, "{api}");
        scene.must_compute_on(&mut target);
    }
    assert!(
        scene.server.all_requests().is_empty(),
        "the store was asked for nothing"
    );
    scene.must_have_computed_rightly(target);
}

#[test]
fn without_libcuda_only_what_needs_it_is_refused() {
    let scene = Scene::new(&[]);
    scene.save("job");
    let bare = Ckptstream::new(&scene.server, "job");
    let mut target = scene.target();
    let run = bare.run(&format!("checkpoint --pid {}", target.pid()));
    assert_failed(
        "checkpoint",
        &run,
        3,
        "prepare",
        &["libcuda.so.1 is not found", "NVIDIA driver"],
    );
    scene.must_compute_on(&mut target);
    let fresh = scene.fresh();
    let run = bare.run(&format!("restore --pid {} --into-fresh", fresh.pid()));
    assert_failed("restore", &run, 20, "read", &["libcuda.so.1 is not found"]);
    for command in ["list", "verify", "inspect"] {
        bare.ok(command);
    }
}

#[test]
fn a_process_that_is_no_target_is_refused() {
    let scene = Scene::new(&[]);
    let saver = scene.saver("job", "");
    let checkpoint = |pid: u32| saver.cli.run(&format!("checkpoint --pid {pid}"));

    let run = checkpoint(u32::from(u16::MAX) << 6);
    assert_failed("unknown pid", &run, 7, "prepare", &["does not exist"]);
    let run = checkpoint(std::process::id());
    assert_failed("no CUDA process", &run, 3, "prepare", &["no CUDA state"]);

    let mut target = scene.target();
    let threads = std::fs::read_dir(format!("/proc/{}/task", target.pid())).expect("its threads");
    let thread = threads
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
        .find(|tid| *tid != target.pid())
        .expect("a CUDA process has several threads");
    let run = checkpoint(thread);
    let advice = format!("give --pid {}", target.pid());
    assert_failed(
        "a thread",
        &run,
        2,
        "prepare",
        &["is a thread of process", &advice],
    );
    scene.must_compute_on(&mut target);

    // Its own pid is only known to itself: a shell that becomes it.
    let mut own = Command::new("sh");
    let command = saver.cli.command("checkpoint --json --pid");
    let words: Vec<String> = command
        .get_args()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let line = format!(
        "exec {} {} $$ {}",
        env!("CARGO_BIN_EXE_ckptstream"),
        words[..3].join(" "),
        words[3..].join(" ")
    );
    own.args(["-c", &line]).env_clear();
    for (key, value) in command.get_envs() {
        own.env(key, value.unwrap_or_default());
    }
    let output = own.output().expect("a shell");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("is ckptstream itself"));
    assert!(
        scene.server.all_requests().is_empty(),
        "the store was asked for nothing"
    );
}

#[test]
fn a_target_that_is_suspended_already_is_somebodys() {
    let scene = Scene::new(&[]);
    // Left locked by somebody else.
    let target = scene.target();
    let other = scene.saver("other", "fault=cuCheckpointProcessCheckpoint#1=kill-caller");
    assert_eq!(
        other
            .cli
            .run(&format!("checkpoint --pid {}", target.pid()))
            .code,
        -1
    );
    let saver = scene.saver("job", "");
    let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
    assert_failed("locked", &run, 4, "prepare", &["is locked, not running"]);
    assert_eq!(
        saver.calls("cuCheckpointProcessUnlock"),
        0,
        "undo only our own lock"
    );
    assert_eq!(scene.state_of(&target), "locked");

    // Suspended under an image of its job, and under one of another job.
    let target = scene.target();
    saver.cli.ok(&format!("checkpoint --pid {}", target.pid()));
    let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
    assert_failed(
        "checkpointed",
        &run,
        7,
        "prepare",
        &["is checkpointed, not running"],
    );
    let run = scene
        .saver("elsewhere", "")
        .cli
        .run(&format!("checkpoint --pid {}", target.pid()));
    assert_failed(
        "checkpointed",
        &run,
        4,
        "prepare",
        &["is checkpointed, not running"],
    );
    assert_eq!(scene.images("job"), [1]);
    assert_eq!(scene.images("elsewhere"), [0_u64; 0]);

    // A restore into a process that runs, and one into a process that another image was made of.
    let mut running = scene.target();
    let saver = scene.saver("job", "");
    let run = saver
        .cli
        .run(&format!("restore --pid {} --into-fresh", running.pid()));
    assert_failed(
        "restore, running",
        &run,
        20,
        "read",
        &["is running, not checkpointed"],
    );
    let run = saver.cli.run(&format!("restore --pid {}", running.pid()));
    assert_failed("restore, another", &run, 20, "read", &["--into-fresh"]);
    let fresh = scene.fresh();
    let run = saver.cli.run(&format!("restore --pid {}", fresh.pid()));
    assert_failed(
        "restore, unasked",
        &run,
        20,
        "read",
        &["is another one", "--into-fresh"],
    );
    assert_eq!(saver.calls("cuCheckpointProcessRestore"), 0);
    scene.must_compute_on(&mut running);
}
