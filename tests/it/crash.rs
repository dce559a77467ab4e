//! Death at every step: of the saver, of the restorer, of whoever resumes. Afterwards a fresh process finds the old image or the new one, never neither and never a mixture, and what the dying one said of its target holds.

use std::cell::{Cell, RefCell};
use std::sync::Mutex;

use ckptstream::failpoint::{GIVE_BACK, RECOVER, RESTORE, RESUME, SAVE, SPILL};
use serde_json::json;
use tempfile::TempDir;

use crate::support::scene::{Saver, Scene, TARGET, told};
use crate::support::{Node, Run, Target, step_of};

/// How a trial ends its victim.
const ACTIONS: [&str; 3] = ["kill", "panic", "io-error"];

/// Names a part of a point's name: only deaths there are tried.
const ONLY: &str = "CRASH_ONLY";

/// One death.
#[derive(Debug, Clone, Copy)]
struct Death {
    point: &'static str,
    action: &'static str,
    /// At which passing, from 1.
    at: u64,
}

impl Death {
    fn failpoint(self) -> String {
        format!("{}={}@{}", self.point, self.action, self.at)
    }

    fn is_kill(self) -> bool {
        self.action == "kill"
    }

    /// The victim lives, and cannot reach a store any more.
    fn is_io_error(self) -> bool {
        self.action == "io-error"
    }
}

/// A node and a store for many trials, each with a job of its own.
struct Ground {
    scene: Scene,
    spill: TempDir,
    jobs: Cell<u32>,
    /// After so many steps a target is saved.
    steps: Cell<u64>,
    undisturbed: RefCell<Undisturbed>,
}

/// The same job, which nobody disturbs, as far as it was asked for.
struct Undisturbed {
    target: Target,
    lines: Vec<String>,
}

impl Ground {
    fn new() -> Self {
        Self {
            scene: Scene::new(&[]),
            spill: TempDir::new().expect("a temporary folder"),
            jobs: Cell::new(0),
            steps: Cell::new(1),
            undisturbed: RefCell::new(Undisturbed {
                target: Target::start(&Node::new("gpus=2;memory=64MiB"), TARGET),
                lines: Vec::new(),
            }),
        }
    }

    /// A job with one image of an earlier process.
    fn job(&self) -> String {
        let number = self.jobs.get();
        self.jobs.set(number + 1);
        let job = format!("job-{number}");
        self.scene.save(&job);
        job
    }

    fn saver(&self, job: &str) -> Saver {
        let path = self.spill.path().display();
        self.scene
            .saver_with(job, "", &format!("[spill]\npath = \"{path}\"\n"))
    }

    /// A target that has computed a little.
    fn target(&self) -> Target {
        let mut target = self.scene.target();
        target.wait_for(&format!("step {} ", self.steps.get()));
        target
    }

    fn dies(&self, job: &str, death: Death, args: &str) -> Run {
        let saver = self.saver(job);
        let run = saver.cli.dying_at(&death.failpoint()).run(args);
        if death.is_kill() {
            assert_eq!(run.code, -1, "{death:?} did not die: {run:?}");
        } else if death.is_io_error() {
            assert!(
                (0..=21).contains(&run.code),
                "{death:?}: no verdict: {run:?}"
            );
        } else {
            assert!(
                run.stderr.contains("panicked"),
                "{death:?} did not panic: {run:?}"
            );
            assert_ne!(run.code, 101, "{death:?}: no verdict: {run:?}");
        }
        run
    }

    /// What stands in the log verifies, and the newest image computes on rightly in a fresh process. Returns how many images there are.
    fn must_be_sound(&self, job: &str, death: Death) -> usize {
        let images = self.scene.images(job);
        assert!(images == [1] || images == [2, 1], "{death:?}: {images:?}");
        // On another node, which does not see the spill.
        let cli = self.scene.saver(job, "").cli;
        cli.ok("verify");
        let mut fresh = self.scene.fresh();
        // A copy beside the job: what is sealed elsewhere may still become its newest image.
        cli.ok(&format!(
            "restore --pid {} --into-fresh --read-only",
            fresh.pid()
        ));
        fresh.wait_for("step ");
        self.must_have_computed_rightly(fresh);
        images.len()
    }

    /// Every digest that it printed is that of a job that nobody disturbed.
    fn must_have_computed_rightly(&self, target: Target) {
        let seen = target.kill();
        assert!(!seen.is_empty(), "it printed no digest");
        let Undisturbed { target, lines } = &mut *self.undisturbed.borrow_mut();
        // It would take a share of the processors all the time.
        target.signal("CONT");
        for line in seen {
            let step = usize::try_from(step_of(&line)).expect("few steps");
            while lines.len() <= step {
                lines.push(target.wait_for("step "));
            }
            assert_eq!(line, lines[step]);
        }
        target.signal("STOP");
    }
}

/// Passing a point once in a while only: these deaths come at a later passing, too.
fn deaths(points: &'static [&'static str]) -> Vec<Death> {
    let only = std::env::var(ONLY).unwrap_or_default();
    let mut deaths = Vec::new();
    for point in points.iter().filter(|point| point.contains(&only)) {
        for action in ACTIONS {
            deaths.push(Death {
                point,
                action,
                at: 1,
            });
            if point.contains("chunk") {
                deaths.push(Death {
                    point,
                    action,
                    at: 5,
                });
            }
        }
    }
    deaths
}

/// Tries them all, some at a time.
fn try_all(deaths: Vec<Death>, try_one: impl Fn(&Ground, Death) + Sync) {
    // Who cannot reach a store is mostly waiting.
    let (waiting, busy): (Vec<_>, Vec<_>) = deaths.into_iter().partition(|it| it.is_io_error());
    let waiting = (12.min(waiting.len()), Mutex::new(waiting.into_iter()));
    let busy = (3.min(busy.len()), Mutex::new(busy.into_iter()));
    let (try_one, teams) = (&try_one, [&waiting, &busy]);
    std::thread::scope(|scope| {
        for (_, next) in teams.into_iter().flat_map(|team| vec![team; team.0]) {
            scope.spawn(move || {
                let ground = Ground::new();
                loop {
                    let death = next.lock().expect("no holder panics").next();
                    let Some(death) = death else { return };
                    try_one(&ground, death);
                }
            });
        }
    });
}

fn stage_of(death: Death) -> &'static str {
    death.point.split(':').next().unwrap_or_default()
}

#[test]
fn a_save_that_dies_leaves_the_old_image_or_the_new_one() {
    try_all(deaths(SAVE), save);
}

fn save(ground: &Ground, death: Death) {
    let job = ground.job();
    let mut target = ground.target();
    let run = ground.dies(&job, death, &format!("checkpoint --pid {}", target.pid()));
    let count = ground.must_be_sound(&job, death);
    let is_entered = stage_of(death) == "complete" || death.point == "commit:entered";
    assert_eq!(count, 1 + usize::from(is_entered), "{death:?}: {run:?}");
    if death.is_kill() {
        if stage_of(death) == "lock" {
            // Its guard lets it go, before anybody comes with `recover`.
            ground.scene.must_compute_on(&mut target);
        }
        must_be_recovered(ground, &job, death, is_entered, &target);
    }
    // All that needed the store was done by then.
    let is_prepared =
        death.is_io_error() && ["prepare:announced", "prepare:memory ready"].contains(&death.point);
    let is_untouched = stage_of(death) == "prepare" && !is_prepared;
    if is_untouched || death.is_kill() && stage_of(death) == "lock" {
        ground.scene.must_compute_on(&mut target);
        ground.must_have_computed_rightly(target);
    } else if !death.is_kill() {
        // The spill catches what fails after BEGIN and before the commit.
        let expected = match stage_of(death) {
            // The spill is out of reach, too.
            "prepare" | "lock" | "begin" | "stream" | "land" if death.is_io_error() => &[12][..],
            "commit" | "complete" if death.is_io_error() && is_entered => &[0],
            "commit" if death.is_io_error() => &[12, 13],
            "lock" => &[10],
            "begin" => &[12],
            "stream" | "land" => &[11, 12],
            "commit" => &[11, 12, 13],
            _ => &[14],
        };
        assert!(expected.contains(&run.code), "{death:?}: {run:?}");
        match told(&run) {
            Some("running") => {
                ground.scene.must_compute_on(&mut target);
                ground.must_have_computed_rightly(target);
            }
            Some(state) => assert_eq!(ground.scene.state_of(&target), state, "{death:?}"),
            None => panic!("{death:?}: nothing is said of the target: {run:?}"),
        }
    }
}

/// What `recover` says of a saver that was killed, and what it puts in order.
fn must_be_recovered(ground: &Ground, job: &str, death: Death, is_entered: bool, target: &Target) {
    let (code, next) = match (stage_of(death), is_entered) {
        ("prepare" | "lock", _) => (0, "none"),
        ("complete", _) => (14, "restore"),
        (_, true) => (14, "end-process"),
        (_, false) => (12, "human"),
    };
    let recover = format!("recover --pid {}", target.pid());
    let run = ground.saver(job).cli.run(&recover);
    assert_eq!(run.code, code, "{death:?}: {run:?}");
    let rows = run.report["recovered"].as_array().expect("rows").clone();
    // A saver that had not come to its journal has left none.
    if let [row] = rows.as_slice() {
        assert_eq!(row["next"], next, "{death:?}: {run:?}");
        assert_eq!(row["state"], run.report["targets"][0]["state"]);
    } else {
        assert!(rows.is_empty() && code == 0, "{death:?}: {run:?}");
    }
    if code == 0 {
        let again = ground.saver(job).cli.ok(&recover);
        assert_eq!(again["recovered"], json!([]), "{death:?}: it is settled");
    }
}

/// A save that the store did not take.
fn refuse_parts(ground: &Ground) {
    ground.scene.server.set_rules(&json!([{
        "op": "UploadPart", "key_contains": ".zst", "always": true,
        "action": {"status": 403, "code": "AccessDenied"},
    }]));
}

fn refuse_nothing(ground: &Ground) {
    ground.scene.server.set_rules(&json!([]));
}

#[test]
fn a_spill_that_dies_is_sealed_or_is_not_there() {
    try_all(deaths(SPILL), spill);
}

fn spill(ground: &Ground, death: Death) {
    let job = ground.job();
    let target = ground.target();
    refuse_parts(ground);
    let run = ground.dies(&job, death, &format!("checkpoint --pid {}", target.pid()));
    refuse_nothing(ground);
    assert_eq!(
        ground.must_be_sound(&job, death),
        1,
        "{death:?}: sealed is no image"
    );
    let resumed = ground.saver(&job).cli.run("resume");
    let is_sealed = matches!(death.point, "spill:sealed" | "spill:completed");
    assert_eq!(
        resumed.code,
        if is_sealed { 0 } else { 7 },
        "{death:?}: {run:?} {resumed:?}"
    );
    assert_eq!(
        ground.must_be_sound(&job, death),
        1 + usize::from(is_sealed),
        "{death:?}"
    );
    // The next save sweeps away what the dead one left.
    let target = ground.target();
    if !is_sealed {
        ground
            .saver(&job)
            .cli
            .ok(&format!("checkpoint --pid {}", target.pid()));
    }
    assert_eq!(spilled_files(ground, &job), 0, "{death:?}");
}

fn spilled_files(ground: &Ground, job: &str) -> usize {
    fn count(folder: &std::path::Path) -> usize {
        let entries = std::fs::read_dir(folder).into_iter().flatten();
        let paths = entries.map(|entry| entry.expect("an entry").path());
        paths
            .map(|path| if path.is_dir() { count(&path) } else { 1 })
            .sum()
    }
    count(&ground.spill.path().join("spill~").join(job))
}

#[test]
fn a_give_back_that_dies_leaves_a_sealed_save_or_a_target_that_runs() {
    let on_the_way = RESTORE
        .iter()
        .skip_while(|point| **point != "restore:prepared");
    let sealed = ["spill:sealed", "spill:completed"];
    for points in [
        sealed.to_vec(),
        on_the_way.copied().collect(),
        GIVE_BACK.to_vec(),
    ] {
        let points: &'static [&'static str] = Box::leak(points.into_boxed_slice());
        try_all(deaths(points), give_back);
    }
}

fn give_back(ground: &Ground, death: Death) {
    let job = ground.job();
    let mut target = ground.target();
    refuse_parts(ground);
    let args = format!("checkpoint --then resume --pid {}", target.pid());
    let run = ground.dies(&job, death, &args);
    refuse_nothing(ground);
    assert_eq!(ground.must_be_sound(&job, death), 1, "{death:?}");
    // Once the seal is broken the target has its memory: it is let go by whoever is left, the saver, its guard, or `recover`.
    let is_unguarded = death.is_kill() && death.point == "spill:unsealed";
    // Without store and spill the save can neither be unsealed nor given up.
    let is_locked = match death.is_io_error() {
        true => told(&run) == Some("locked"),
        false => is_unguarded || death.point == "restore:locked for good",
    };
    assert!(
        is_locked || !death.is_io_error() || death.point != "restore:locked for good",
        "{death:?}: {run:?}"
    );
    let is_its_own = !is_locked
        && matches!(
            death.point,
            "spill:unsealed" | "restore:completed" | "restore:unlocked" | "give-back:running"
        );
    if is_its_own && !death.is_kill() {
        assert_eq!(
            (run.code, told(&run)),
            (10, Some("running")),
            "{death:?}: {run:?}"
        );
    } else if !death.is_kill() {
        assert!([11, 12].contains(&run.code), "{death:?}: {run:?}");
        assert_eq!(told(&run), Some(ground.scene.state_of(&target).as_str()));
    }
    if is_locked {
        // Its memory is its own again: it may run, once nobody can make an image of the save any more.
        let recover = format!("recover --pid {}", target.pid());
        let recovered = ground.saver(&job).cli.ok(&recover);
        assert_eq!(recovered["recovered"][0]["done"], "unlocked");
    }
    let runs = is_its_own || is_locked;
    if runs {
        ground.scene.must_compute_on(&mut target);
        ground.must_have_computed_rightly(target);
    }
    let resumed = ground.saver(&job).cli.run("resume");
    let expected = if runs { 7 } else { 0 };
    assert_eq!(resumed.code, expected, "{death:?}: {run:?} {resumed:?}");
    let images = ground.must_be_sound(&job, death);
    assert_eq!(images, 1 + usize::from(!runs), "{death:?}");
}

#[test]
fn a_resume_that_dies_is_taken_up_again() {
    try_all(deaths(RESUME), resume);
}

fn resume(ground: &Ground, death: Death) {
    let job = ground.job();
    let target = ground.target();
    refuse_parts(ground);
    let spilled = ground
        .saver(&job)
        .cli
        .run(&format!("checkpoint --pid {}", target.pid()));
    refuse_nothing(ground);
    assert_eq!(spilled.code, 11, "{spilled:?}");
    let run = ground.dies(&job, death, "resume");
    ground.must_be_sound(&job, death);
    let again = ground.saver(&job).cli.run("resume");
    let is_done = death.point == "resume:unsealed";
    assert_eq!(
        again.code,
        if is_done { 7 } else { 0 },
        "{death:?}: {run:?} {again:?}"
    );
    assert_eq!(ground.must_be_sound(&job, death), 2, "{death:?}");
    assert_eq!(spilled_files(ground, &job), 0, "{death:?}");
}

#[test]
fn a_restore_that_dies_leaves_the_image_as_it_was() {
    try_all(deaths(RESTORE), restore);
}

fn restore(ground: &Ground, death: Death) {
    let job = ground.job();
    let mut fresh = ground.scene.fresh();
    let args = format!("restore --pid {} --into-fresh", fresh.pid());
    let run = ground.dies(&job, death, &args);
    assert_eq!(ground.must_be_sound(&job, death), 1, "{death:?}");
    if death.is_kill() {
        let is_unlocked = matches!(death.point, "restore:completed" | "restore:unlocked");
        if is_unlocked {
            // With its memory in place it is let go by the guard.
            fresh.wait_for("step ");
        }
        // Until it has come to the driver nothing is written down, because nothing was done.
        let is_untouched = RESTORE
            .iter()
            .take_while(|point| **point != "restore:chunk landed")
            .any(|point| *point == death.point);
        let expected = match death.point {
            _ if is_unlocked || is_untouched => 0,
            "restore:begun" | "restore:chunk copied" | "restore:all copied" => 21,
            _ => 20,
        };
        let recover = format!("recover --pid {}", fresh.pid());
        let recovered = ground.saver(&job).cli.run(&recover);
        assert_eq!(recovered.code, expected, "{death:?}: {recovered:?}");
        if expected == 21 {
            let ended = ground.saver(&job).cli.run(&format!("{recover} --end"));
            assert_eq!(ended.report["recovered"][0]["done"], "ended", "{ended:?}");
            assert_eq!(told(&ended), Some("gone"));
        }
    } else if death.is_io_error() && run.code == 0 {
        fresh.wait_for("step ");
        ground.must_have_computed_rightly(fresh);
    } else {
        assert!([20, 21].contains(&run.code), "{death:?}: {run:?}");
        if run.code == 20 {
            // Nothing was done to it: it can have the image still.
            ground.saver(&job).cli.ok(&args);
            fresh.wait_for("step ");
            ground.must_have_computed_rightly(fresh);
        }
    }
}

#[test]
fn a_recover_that_dies_is_done_again() {
    try_all(deaths(RECOVER), recover);
}

fn recover(ground: &Ground, death: Death) {
    let job = ground.job();
    let mut target = ground.target();
    refuse_parts(ground);
    // It leaves a target that has its memory, is locked, and whose save is sealed; nobody guards it.
    let before = Death {
        point: "restore:locked for good",
        action: "kill",
        at: 1,
    };
    let args = format!("checkpoint --then resume --pid {}", target.pid());
    ground.dies(&job, before, &args);
    refuse_nothing(ground);
    let args = format!("recover --pid {}", target.pid());
    let run = ground.dies(&job, death, &args);
    let again = ground.saver(&job).cli.ok(&args);
    assert_eq!(
        again["recovered"][0]["done"], "closed",
        "{death:?}: {run:?} {again}"
    );
    let settled = ground.saver(&job).cli.ok(&args);
    assert_eq!(settled["recovered"], json!([]), "{death:?}");
    ground.scene.must_compute_on(&mut target);
    ground.must_have_computed_rightly(target);
    let resumed = ground.saver(&job).cli.run("resume");
    assert_eq!(resumed.code, 7, "{death:?}: {resumed:?}");
    assert_eq!(ground.must_be_sound(&job, death), 1, "{death:?}");
}

#[test]
fn what_recover_finds_committed_stays_committed() {
    let ground = Ground::new();
    let job = ground.job();
    let target = ground.target();
    // The journal of a target that runs again, which is all that is left to be put in order.
    let death = Death {
        point: "restore:unlocked",
        action: "kill",
        at: 1,
    };
    let args = format!("checkpoint --then resume --pid {}", target.pid());
    ground.dies(&job, death, &args);
    let cli = ground.saver(&job).cli;
    let recovered = cli.ok(&format!("recover --pid {}", target.pid()));
    let row = &recovered["recovered"][0];
    assert_eq!(
        (&row["state"], &row["done"]),
        (&json!("running"), &json!("closed")),
        "{recovered}"
    );
    assert_eq!(cli.ok("list")["images"][0]["standing"], "usable");
    assert_eq!(ground.must_be_sound(&job, death), 2);
}

/// What tries a death.
type Try = fn(&Ground, Death);

/// Where a trial may happen, and what tries it.
const SCENES: [(&[&str], Try); 6] = [
    (SAVE, save),
    (SPILL, spill),
    (GIVE_BACK, give_back),
    (RESUME, resume),
    (RECOVER, recover),
    (RESTORE, restore),
];

/// A trial of `scripts/crash-trials.sh`: everything about it follows from its seed.
#[derive(Debug)]
struct Trial {
    seed: u64,
    death: Death,
    steps: u64,
    try_it: Try,
}

impl Trial {
    fn of(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut all: Vec<(&'static str, Try)> = Vec::new();
        for (points, try_it) in SCENES {
            all.extend(points.iter().map(|point| (*point, try_it)));
        }
        let (point, try_it) = all[random.usize(..all.len())];
        // As often as the point is passed in any case: eight chunks, two GPUs.
        let passes = match point {
            _ if point.contains("chunk") => 5,
            _ if ["part ", "object ", "table "]
                .iter()
                .any(|word| point.contains(word)) =>
            {
                2
            }
            _ => 1,
        };
        Self {
            seed,
            death: Death {
                point,
                action: ACTIONS[random.usize(..ACTIONS.len())],
                at: random.u64(1..=passes),
            },
            steps: random.u64(0..6),
            try_it,
        }
    }
}

/// `CRASH_TRIALS` trials with the seeds from `CRASH_SEED` on. One that fails says its seed, and `CRASH_TRIALS=1` with that seed is the same one again.
#[test]
#[ignore = "as many as CRASH_TRIALS says: scripts/crash-trials.sh"]
#[expect(clippy::print_stderr, reason = "seeds, for who runs the script")]
fn trials() {
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .and_then(|text| text.parse::<u64>().ok())
    };
    let count = number("CRASH_TRIALS").expect("CRASH_TRIALS: how many");
    let first = number("CRASH_SEED").unwrap_or_else(|| fastrand::u64(..1 << 32));
    let seeds = Mutex::new(first..first + count);
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut ground = Ground::new();
                loop {
                    let seed = seeds.lock().expect("no holder panics").next();
                    let Some(seed) = seed else { return };
                    let trial = Trial::of(seed);
                    ground.steps.set(trial.steps);
                    let tried = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                        (trial.try_it)(&ground, trial.death);
                    }));
                    if tried.is_err() {
                        eprintln!("failed: CRASH_SEED={seed} CRASH_TRIALS=1 ({trial:?})");
                        failed.lock().expect("no holder panics").push(trial.seed);
                        // What it left would be taken for the next one's.
                        ground = Ground::new();
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().expect("no holder panics");
    eprintln!(
        "{count} trials from seed {first} on, {} failed",
        failed.len()
    );
    assert!(failed.is_empty(), "seeds {failed:?}");
}
