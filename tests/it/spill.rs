//! A save that the store does not take goes to the spill, and from there into the store later: nothing is lost, and nothing counts as an image before it is one.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::s3_server::has_credentials;
use crate::support::scene::{Saver, Scene, Watched, assert_failed, cause, told, until};
use crate::support::{Run, Target};

/// Requests that a save makes after BEGIN.
const SITES: [(&str, &str); 5] = [
    ("UploadPart", ".zst"),
    ("CompleteMultipartUpload", ".zst"),
    ("PutObject", ".frames.json"),
    ("PutObject", "manifest"),
    ("PutObject", "/log/00000003"),
];

fn refuse((op, key): (&str, &str)) -> Value {
    let action = json!({"status": 403, "code": "AccessDenied"});
    json!([{"op": op, "key_contains": key, "action": action, "always": true}])
}

/// A place to spill to, and the binary that knows it.
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

    /// A target that was saved while the store refused this.
    fn spilled(&self, site: (&str, &str)) -> (Target, Run) {
        let mut target = self.scene.target();
        target.wait_for("step 2 ");
        self.scene.server.set_rules(&refuse(site));
        let saver = self.saver("");
        let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
        self.scene.server.set_rules(&json!([]));
        assert_eq!(run.code, 11, "{site:?}: {run:?}");
        assert_eq!(told(&run), Some("checkpointed"), "{site:?}: {run:?}");
        assert_eq!(run.report["next"], "resume", "{site:?}");
        assert_eq!(saver.calls("cuCheckpointOperationComplete"), 1, "{site:?}");
        assert_eq!(
            self.scene.images("job"),
            [0_u64; 0],
            "{site:?}: sealed is no image"
        );
        (target, run)
    }

    fn files(&self) -> Vec<PathBuf> {
        files(self.place.path())
    }
}

/// Everything below a directory but directories and what is there to be locked.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a directory");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths
        .flat_map(|path| match path.is_dir() {
            true => files(&path),
            false if path.extension().is_some_and(|ending| ending == "lock") => Vec::new(),
            false => vec![path],
        })
        .collect()
}

#[test]
fn what_the_store_refuses_after_begin_is_sealed_and_becomes_the_image_later() {
    for site in SITES {
        let spilling = Spilling::new();
        let (mut target, run) = spilling.spilled(site);
        assert!(
            cause(&run).contains("store") || cause(&run).contains("log"),
            "{run:?}"
        );
        assert!(
            run.stderr.contains("resume it before this node goes away"),
            "{run:?}"
        );

        let cli = spilling.saver("").cli;
        let resumed = cli.ok("resume");
        assert_eq!(resumed["generation"], 3, "{site:?}: {resumed}");
        assert_eq!(spilling.scene.images("job"), [1], "{site:?}");
        assert_eq!(
            spilling.files(),
            Vec::<PathBuf>::new(),
            "{site:?}: nothing is left"
        );
        cli.ok("verify");
        let again = cli.run("resume");
        assert_eq!(again.code, 7, "{again:?}");

        cli.ok(&format!("restore --pid {}", target.pid()));
        spilling.scene.must_compute_on(&mut target);
        spilling.scene.must_have_computed_rightly(target);
    }
}

#[test]
fn a_save_that_the_store_takes_leaves_nothing_in_the_spill() {
    let spilling = Spilling::new();
    let target = spilling.scene.target();
    spilling
        .saver("")
        .cli
        .ok(&format!("checkpoint --pid {}", target.pid()));
    assert_eq!(spilling.files(), Vec::<PathBuf>::new());
}

#[test]
fn without_room_the_save_goes_on_and_says_that_there_is_no_spill() {
    let spilling = Spilling::new();
    let scene = &spilling.scene;
    let file = spilling.place.path().join("file");
    std::fs::write(&file, b"").expect("a file");
    let config = format!("[spill]\npath = \"{}/in it\"\n", file.display());

    let target = scene.target();
    let saver = scene.saver_with("job", "", &config);
    let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stderr.contains("there is no spill"), "{run:?}");

    let target = scene.target();
    scene.server.set_rules(&refuse(SITES[0]));
    let saver = scene.saver_with("other", "", &config);
    // The target is held as long as there is time.
    let args = format!("checkpoint --deadline 4s --pid {}", target.pid());
    let run = saver.cli.run(&args);
    scene.server.set_rules(&json!([]));
    assert_failed("no spill", &run, 12, "stream", &["the deadline has come"]);
    scene.must_not_be_committed("other", &saver);
}

#[test]
fn a_damaged_spill_never_becomes_an_image() {
    // Two objects, two tables, a manifest.
    for index in 0..5 {
        // A store of its own: what has landed there is whole, whatever becomes of the spill.
        let spilling = Spilling::new();
        let (_target, _) = spilling.spilled(SITES[0]);
        let mut paths = spilling.files();
        paths.retain(|path| !path.ends_with("sealed.json"));
        paths.sort();
        assert_eq!(paths.len(), 5, "{paths:?}");
        let path = &paths[index];
        let good = std::fs::read(path).expect("readable");
        let mut flipped = good.clone();
        flipped[good.len() / 2] ^= 1;
        for bad in [&flipped[..], &good[..good.len() - 1]] {
            std::fs::write(path, bad).expect("writable");
            let run = spilling.saver("").cli.run("resume");
            assert_eq!(run.code, 20, "{}: {run:?}", path.display());
            assert_eq!(
                spilling.scene.images("job"),
                [0_u64; 0],
                "{}",
                path.display()
            );
        }
        std::fs::write(path, good).expect("writable");
        spilling.saver("").cli.ok("resume");
        spilling.saver("").cli.ok("verify");
    }
}

#[test]
fn a_target_that_dies_while_it_is_spilled_is_not_sealed() {
    let spilling = Spilling::new();
    let mut target = spilling.scene.target();
    // All eight chunks have gone to the store once.
    spilling.scene.server.set_rules(&refuse(SITES[1]));
    let saver = spilling.saver_of_driver("fault=cuMemcpyDtoHAsync#12=kill-target", "");
    let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
    spilling.scene.server.set_rules(&json!([]));
    assert_failed("it dies", &run, 12, "land", &[]);
    assert!(run.stderr.contains("the spill failed too"), "{run:?}");
    until(|| target.has_ended());
    spilling.scene.must_not_be_committed("job", &saver);
    let resumed = spilling.saver("").cli.run("resume");
    assert_eq!(resumed.code, 7, "{resumed:?}");
}

#[test]
fn who_takes_the_job_while_a_sealed_save_is_uploaded_has_it() {
    if !has_credentials("spill::who_takes_the_job_while_a_sealed_save_is_uploaded_has_it") {
        return;
    }
    let spilling = Spilling::new();
    let _target = spilling.spilled(SITES[0]);
    let theirs = json!({"format": 1, "entry": "open", "writer": "somebody else"});
    spilling.scene.put_entry("job", 3, &theirs);
    // It is not there yet when the log is read first.
    let late = json!([{"op": "GetObject", "key_contains": "/log/00000003", "nth": 1, "action": {"status": 404, "code": "NoSuchKey"}}]);
    spilling.scene.server.set_rules(&late);
    let run = spilling.saver("").cli.run("resume");
    spilling.scene.server.set_rules(&json!([]));
    assert_failed("taken", &run, 4, "commit", &["opened the job"]);
    assert_eq!(spilling.scene.images("job"), [0_u64; 0]);
}

#[test]
fn a_restore_that_is_refused_fences_nobody() {
    let spilling = Spilling::new();
    let scene = &spilling.scene;
    scene.save("job");
    let mut target = scene.target();
    scene.server.set_rules(&refuse(SITES[0]));
    let checkpoint = format!("checkpoint --pid {}", target.pid());
    let run = spilling.saver("").cli.run(&checkpoint);
    scene.server.set_rules(&json!([]));
    assert_eq!(run.code, 11, "{run:?}");
    // On another node, which does not see the spill, somebody tries the image before, and has no room for it.
    let fresh = scene.fresh();
    let hog = Target::start(&scene.node, "--gpus 2 --bytes 61MiB --fill zeros --steps 0");
    let restore = format!("restore --pid {} --into-fresh", fresh.pid());
    let refused = scene.saver("job", "").cli.run(&restore);
    assert_failed("no room", &refused, 20, "read", &["bytes free"]);
    hog.kill();
    drop(fresh);
    let cli = spilling.saver("").cli;
    cli.ok("resume");
    cli.ok(&format!("restore --pid {}", target.pid()));
    scene.must_compute_on(&mut target);
}

#[test]
fn a_restore_that_failed_with_the_memory_in_place_keeps_the_job() {
    let spilling = Spilling::new();
    let scene = &spilling.scene;
    scene.save("job");
    let target = scene.target();
    scene.server.set_rules(&refuse(SITES[0]));
    let checkpoint = format!("checkpoint --pid {}", target.pid());
    let run = spilling.saver("").cli.run(&checkpoint);
    scene.server.set_rules(&json!([]));
    assert_eq!(run.code, 11, "{run:?}");
    // Elsewhere the image before goes into a process that is not unlocked: whoever does that goes on with the job.
    let fresh = scene.fresh();
    let elsewhere = scene
        .saver("job", "fault=cuCheckpointProcessUnlock#1=code:999")
        .cli;
    let restore = format!("restore --pid {} --into-fresh", fresh.pid());
    let failed = elsewhere.run(&restore);
    assert_failed("not unlocked", &failed, 21, "unlock", &[]);
    let resumed = spilling.saver("").cli.run("resume");
    assert_failed("it may run", &resumed, 4, "read", &[]);
    assert_eq!(scene.images("job"), [1]);
}

#[test]
fn a_sealed_save_does_not_set_back_a_job_that_went_on() {
    let spilling = Spilling::new();
    let (_target, _) = spilling.spilled(SITES[0]);
    spilling.scene.save("job");
    let run = spilling.saver("").cli.run("resume");
    assert_failed("overtaken", &run, 4, "read", &["set the job back"]);
    assert_eq!(spilling.scene.images("job"), [1]);
    let is_sealed = |path: &PathBuf| path.ends_with("sealed.json");
    assert!(
        spilling.files().iter().any(is_sealed),
        "the sealed save stays"
    );
}

#[test]
fn a_resume_that_is_killed_or_refused_is_taken_up_again() {
    let spilling = Spilling::new();
    let (_target, _) = spilling.spilled(SITES[0]);
    for site in SITES {
        spilling.scene.server.set_rules(&refuse(site));
        let run = spilling.saver("").cli.run("resume");
        assert_eq!(run.code, 11, "{site:?}: {run:?}");
        let stall = json!([{"op": site.0, "key_contains": site.1, "action": {"stall": true}, "always": true}]);
        spilling.scene.server.set_rules(&stall);
        let saver = spilling.saver("");
        let watched = Watched::start(&saver.cli, "resume");
        let is_small = site.1 == "manifest" || site.1.starts_with("/log/");
        watched.until_phase(if is_small { "commit" } else { "stream" });
        watched.signal("KILL");
        assert_eq!(watched.wait().code, -1);
        spilling.scene.server.set_rules(&json!([]));
        assert_eq!(spilling.scene.images("job"), [0_u64; 0], "{site:?}");
    }
    spilling.saver("").cli.ok("resume");
    assert_eq!(spilling.scene.images("job"), [1]);
    spilling.saver("").cli.ok("verify");
    assert_eq!(spilling.files(), Vec::<PathBuf>::new());
}

#[test]
fn with_a_deadline_the_store_is_tried_while_the_spill_still_fits() {
    let spilling = Spilling::new();
    let path = spilling.place.path().display();
    let config = format!("retry_timeout = \"60s\"\n[spill]\npath = \"{path}\"\n");
    let save = |job: &str, deadline: &str| {
        let target = spilling.scene.target();
        let saver = spilling.scene.saver_with(job, "", &config);
        let args = format!("checkpoint --pid {} --deadline {deadline}", target.pid());
        (saver.cli.run(&args), target)
    };
    let stall = json!([{"op": "UploadPart", "always": true, "action": {"stall": true}}]);
    spilling.scene.server.set_rules(&stall);
    let (run, _target) = save("job", "8s");
    assert_eq!(run.code, 11, "{run:?}");
    assert!(cause(&run).contains("the deadline has come"), "{run:?}");

    // With less time there is none for both.
    spilling.scene.server.set_rules(&json!([]));
    let (run, _target) = save("other", "3s");
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stderr.contains("would need"), "{run:?}");
    spilling.saver("").cli.ok("resume");
}

#[test]
fn a_commit_whose_answer_was_lost_is_found_by_the_resume() {
    if !has_credentials("spill::a_commit_whose_answer_was_lost_is_found_by_the_resume") {
        return;
    }
    let spilling = Spilling::new();
    let target = spilling.scene.target();
    let lost = json!([{"op": "PutObject", "key_contains": "/log/00000003", "always": true, "action": {"apply": true, "drop": true}}]);
    spilling.scene.server.set_rules(&lost);
    let run = spilling
        .saver("")
        .cli
        .run(&format!("checkpoint --pid {}", target.pid()));
    spilling.scene.server.set_rules(&json!([]));
    // Either the retries have seen the entry, or the save is sealed as well.
    assert!([0, 11].contains(&run.code), "{run:?}");
    // The job goes on from the image elsewhere: that does not make the image a step back.
    let open = json!({"format": 1, "entry": "open", "writer": "f".repeat(32)});
    spilling.scene.put_entry("job", 4, &open);
    let resumed = spilling.saver("").cli.run("resume");
    assert_eq!(
        resumed.code,
        if run.code == 11 { 0 } else { 7 },
        "{resumed:?}"
    );
    assert_eq!(spilling.scene.images("job"), [1], "one save, one image");
    assert_eq!(spilling.files(), Vec::<PathBuf>::new());
}

#[test]
fn all_sealed_saves_of_a_job_become_images() {
    let spilling = Spilling::new();
    let _first = spilling.spilled(SITES[0]);
    let (_second, run) = spilling.spilled(("PutObject", "/log/00000005"));
    assert!(run.stderr.contains("waits in the spill"), "{run:?}");
    spilling.saver("").cli.ok("resume");
    assert_eq!(spilling.scene.images("job"), [2, 1]);
    spilling.saver("").cli.ok("verify");
    assert_eq!(spilling.files(), Vec::<PathBuf>::new());
}

#[test]
fn one_process_at_a_time_uses_the_spill_of_a_job() {
    let spilling = Spilling::new();
    let _target = spilling.spilled(SITES[0]);
    let lock = spilling.place.path().join("spill~/.uploads~/job.lock");
    let held = std::fs::File::open(lock).expect("the lock");
    held.lock().expect("nobody holds it");
    let run = spilling.saver("").cli.run("resume");
    assert_failed(
        "in use",
        &run,
        11,
        "read",
        &["another save or resume of job job"],
    );
    let target = spilling.scene.target();
    let run = spilling
        .saver("")
        .cli
        .run(&format!("checkpoint --pid {}", target.pid()));
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stderr.contains("there is no spill"), "{run:?}");
}

#[test]
fn a_save_is_resumed_into_the_store_that_it_was_sealed_for() {
    let spilling = Spilling::new();
    let _target = spilling.spilled(SITES[0]);
    let cli = spilling.saver("").cli.in_store("s3://images/elsewhere");
    let run = cli.run("resume");
    assert_failed(
        "elsewhere",
        &run,
        3,
        "read",
        &["s3://images/store", "s3://images/elsewhere", "attempt.json"],
    );
    spilling.saver("").cli.ok("resume");
}

#[test]
fn a_directory_is_a_store_like_any_other() {
    let scene = Scene::new(&[]);
    let place = TempDir::new().expect("a temporary folder");
    let url = format!("file://{}", place.path().display());
    let cli = || scene.saver("job", "").cli.in_store(&url);
    let mut target = scene.target();
    target.wait_for("step 2 ");
    cli().ok(&format!("checkpoint --pid {}", target.pid()));
    cli().ok("verify");
    assert_eq!(cli().ok("list")["images"].as_array().map(Vec::len), Some(1));
    cli().ok(&format!("restore --pid {}", target.pid()));
    scene.must_compute_on(&mut target);
    scene.must_have_computed_rightly(target);

    // One that is not mounted holds no proof of anything.
    let absent = scene
        .saver("job", "")
        .cli
        .in_store(&format!("{url}/absent"));
    assert_eq!(absent.run("list").code, 3);
    let fresh = scene.fresh();
    let run = absent.run(&format!("restore --pid {} --into-fresh", fresh.pid()));
    assert_eq!(run.code, 3, "{run:?}");
}

#[test]
fn nobody_gets_an_older_image_while_a_newer_save_waits() {
    let spilling = Spilling::new();
    let scene = &spilling.scene;
    // Nothing but the sealed save: that is no proof that there is none.
    let (mut target, _) = spilling.spilled(SITES[0]);
    let fresh = scene.fresh();
    let cli = spilling.saver("").cli;
    let into_fresh = format!("restore --pid {} --into-fresh", fresh.pid());
    let run = cli.run(&into_fresh);
    assert_failed("no image yet", &run, 20, "read", &["ckptstream resume"]);
    assert_eq!(cli.run("verify").code, 20);
    let run = cli.run(&format!("checkpoint --pid {}", target.pid()));
    assert_eq!(
        (run.code, &run.report["next"]),
        (11, &json!("resume")),
        "{run:?}"
    );
    cli.ok("resume");
    cli.ok(&format!("restore --pid {}", target.pid()));
    scene.must_compute_on(&mut target);

    // The very process, saved once more, and sealed: the image in the store is older than its host memory.
    scene.server.set_rules(&refuse(SITES[0]));
    let run = cli.run(&format!("checkpoint --pid {}", target.pid()));
    scene.server.set_rules(&json!([]));
    assert_eq!(run.code, 11, "{run:?}");
    for args in [
        format!("restore --pid {}", target.pid()),
        into_fresh.clone(),
    ] {
        let run = cli.run(&args);
        assert_failed(&args, &run, 20, "read", &["ckptstream resume"]);
    }
    // Who names it means it.
    cli.ok(&format!("{into_fresh} --image 00000003 --read-only"));
    cli.ok("resume");
    cli.ok(&format!("restore --pid {}", target.pid()));
    scene.must_compute_on(&mut target);
    scene.must_have_computed_rightly(target);
}
