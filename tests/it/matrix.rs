//! The failure matrix: every driver call and every request to the store that fails, in every way, in every phase that makes it; and the verdict and the state of things that
//! must follow.
//!
//! What must follow is data, in [`driver`] and [`store`]. It is derived from what the exit codes promise, not from what the program does. `docs/failure-matrix.md` is that data as [`page`] prints it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use serde_json::{Value, json};

use crate::support::scene::{Saver, Scene, Watched, cause, told, until};
use crate::support::{Node, Run, Target};

/// Driver calls that fail.
mod driver;
/// The matrix as a document.
mod page;
/// Requests to the store that fail.
mod store;
/// Whole process trees.
mod trees;

/// The job: 2 chunks on each of two GPUs. It takes its time, because one of it runs beside every cell.
const TARGET: &str = "--gpus 2 --bytes 2MiB --fill mixed --seed 23 --step-ms 40";
/// The same job, without the time that it takes.
const UNDISTURBED: &str = "--gpus 2 --bytes 2MiB --fill mixed --seed 23";
const JOB: &str = "job";
const NODE: &str = "gpus=2;memory=64MiB";
/// Cells that are tried at a time: they mostly wait.
const THREADS: usize = 6;
/// For faults that pass, on a busy machine. The first lines are of `[store]`.
const PATIENT: &str = "retry_timeout = \"30s\"\n";
/// Names a part of a cell's name: only such cells are tried.
const ONLY: &str = "MATRIX_ONLY";

/// What ckptstream is asked to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Command {
    /// `checkpoint` of a running target.
    Save,
    /// `restore --into-fresh` of the newest image.
    Restore,
}

/// What must follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Verdict {
    code: i32,
    /// Where it failed; empty where it did as asked.
    phase: &'static str,
    /// What is told of the target; nothing where it was not touched.
    told: Option<&'static str>,
    /// How the target is found afterwards.
    found: &'static str,
}

/// Done as asked.
const fn done(found: &'static str) -> Verdict {
    ends(0, "", found)
}

/// Failed, and the target is as it is told.
const fn ends(code: i32, phase: &'static str, found: &'static str) -> Verdict {
    Verdict {
        code,
        phase,
        told: Some(found),
        found,
    }
}

/// Failed before the target was touched: nothing is told of it.
const fn untouched(code: i32, phase: &'static str, found: &'static str) -> Verdict {
    Verdict {
        told: None,
        ..ends(code, phase, found)
    }
}

impl Verdict {
    /// The same where the last look at the target failed.
    const fn unseen(self) -> Self {
        Self {
            told: Some("unknown"),
            ..self
        }
    }

    /// Whether this is what a command answered.
    fn is_of(&self, run: &Run) -> bool {
        let is_there = self.code == 0 || run.report["phase"] == self.phase;
        run.code == self.code && is_there && told(run) == self.told
    }

    /// Images that a command with this verdict may have added to the job.
    fn images_added(&self, command: Command) -> &'static [usize] {
        match (command, self.code) {
            (Command::Save, 0 | 14) => &[1],
            (Command::Save, 13) => &[0, 1],
            _ => &[0],
        }
    }
}

/// When the store's rules come into force.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum InForce {
    FromTheStart,
    /// While the target's memory is copied: rules count no earlier request.
    FromTheStream,
}

/// What fails, as a trace shows it.
enum Failing {
    /// A call of this function, with this answer if it is one.
    Call {
        function: &'static str,
        answer: Option<u32>,
    },
    /// A request that the last rule had.
    Request,
}

/// One failure, and what must follow.
struct Cell {
    name: String,
    command: Command,
    /// Settings of ckptstream's driver.
    driver: String,
    /// Further lines of its configuration.
    config: String,
    rules: Vec<Value>,
    in_force: InForce,
    failing: Failing,
    /// Several where time decides.
    expected: Vec<Verdict>,
    /// An upload stays open, and is not told of.
    leaves_uploads: bool,
}

impl Cell {
    /// Which of the expected verdicts a command gave.
    fn verdict(&self, run: &Run) -> &Verdict {
        let verdict = self.expected.iter().find(|verdict| verdict.is_of(run));
        verdict.unwrap_or_else(|| {
            let (code, phase, cause) = (run.code, &run.report["phase"], cause(run));
            let told = told(run);
            panic!(
                "{code} in {phase}, target {told:?}, not {:?}: {cause}; {}",
                self.expected, run.stderr
            )
        })
    }
}

/// A node, a store and a job with images, for one cell after the other.
struct Ground {
    scene: Scene,
    /// How many.
    images: usize,
    running: Option<Target>,
    suspended: Option<Target>,
    /// The digests that all targets printed.
    seen: Vec<String>,
}

impl Ground {
    fn new() -> Self {
        let mut ground = Self {
            scene: Scene::new(&[]),
            images: 1,
            running: None,
            suspended: None,
            seen: Vec::new(),
        };
        let mut first = ground.start("");
        first.wait_for("step 1 ");
        let cli = ground.scene.saver(JOB, "").cli;
        cli.ok(&format!("checkpoint --pid {}", first.pid()));
        ground.seen.extend(first.kill());
        ground
    }

    fn start(&self, flag: &str) -> Target {
        Target::start(&self.scene.node, &format!("{TARGET} {flag}"))
    }

    fn try_cell(&mut self, cell: &Cell) {
        let target = match cell.command {
            Command::Save => self.running.take(),
            Command::Restore => self.suspended.take(),
        };
        let target = target.unwrap_or_else(|| match cell.command {
            Command::Save => self.start(""),
            Command::Restore => self.start("--suspended"),
        });
        let driver = &cell.driver;
        let saver = self.scene.saver_with(JOB, driver, &cell.config);
        let run = self.run(cell, &saver, target.pid());
        self.scene.server.set_rules(&json!([]));
        let requests = self.scene.server.all_requests();
        let verdict = cell.verdict(&run);
        must_agree_with_itself(&run);
        must_have_failed(cell, &saver, &requests);
        must_tell_of_open_uploads(cell.leaves_uploads, &run, &requests);
        must_complete_only_what_is_kept(cell, &saver, verdict);
        self.must_be_found(target, cell.command, verdict);
        self.must_have_images(cell.command, verdict);
    }

    fn run(&self, cell: &Cell, saver: &Saver, pid: u32) -> Run {
        self.scene.server.forget_requests();
        let args = match cell.command {
            Command::Save => format!("checkpoint --pid {pid}"),
            Command::Restore => format!("restore --into-fresh --pid {pid}"),
        };
        let rules = Value::from(cell.rules.clone());
        match cell.in_force {
            InForce::FromTheStart => {
                self.scene.server.set_rules(&rules);
                saver.cli.run(&args)
            }
            InForce::FromTheStream => {
                let running = Watched::start(&saver.cli, &args);
                running.until_phase("stream");
                self.scene.server.set_rules(&rules);
                running.wait()
            }
        }
    }

    /// The target is as the verdict has it; one to which nothing was done serves another cell.
    fn must_be_found(&mut self, mut target: Target, command: Command, verdict: &Verdict) {
        match verdict.found {
            "running" => self.scene.must_compute_on(&mut target),
            "gone" => until(|| target.has_ended()),
            state => assert_eq!(self.scene.state_of(&target), state, "the target"),
        }
        match (command, verdict.found, verdict.code) {
            (Command::Save, "running", _) => self.running = Some(target),
            (Command::Restore, "checkpointed", 20) => self.suspended = Some(target),
            _ => self.seen.extend(target.kill()),
        }
    }

    /// The job has the images of before, and the new one if the verdict says that there is one. A new one is whole.
    fn must_have_images(&mut self, command: Command, verdict: &Verdict) {
        let images = self.scene.images(JOB).len();
        let added = images - self.images;
        self.images = images;
        let allowed = verdict.images_added(command);
        assert!(allowed.contains(&added), "{added} images more");
        if added > 0 {
            self.scene.saver(JOB, "").cli.ok("verify");
        }
    }

    /// Every digest that its targets printed.
    fn into_seen(mut self) -> Vec<String> {
        if let Some(target) = self.running.take() {
            self.seen.extend(target.kill());
        }
        self.seen
    }
}

/// Exit status, JSON result and the last line of stderr say the same.
fn must_agree_with_itself(run: &Run) {
    assert_eq!(run.report["exit_code"], run.code, "the result's code");
    if run.code == 0 {
        return;
    }
    let phase = run.report["phase"].as_str().unwrap_or_default();
    let says = format!("failed in phase {phase}, exit {} ", run.code);
    let last = run.stderr.lines().last().unwrap_or_default();
    assert!(last.contains(&says), "no {says:?} in {last:?}");
}

/// The cell's failure has taken place.
fn must_have_failed(cell: &Cell, saver: &Saver, requests: &[Value]) {
    let is_there = match cell.failing {
        Failing::Call { function, answer } => saver.trace().iter().any(|line| {
            line["call"] == function && answer.is_none_or(|answer| line["result"] == answer)
        }),
        // Rules before the last one only lead up to it.
        Failing::Request => requests
            .iter()
            .any(|request| request["fault"] == cell.rules.len() - 1),
    };
    assert!(is_there, "the failure did not take place");
}

/// An upload that ckptstream knows of is completed or aborted; of one that stays open it tells, unless the table says otherwise.
fn must_tell_of_open_uploads(leaves_uploads: bool, run: &Run, requests: &[Value]) {
    let keys = |op: &str| -> Vec<&Value> {
        let of_op = requests.iter().filter(|request| request["op"] == op);
        of_op
            .filter(|request| is_done(request))
            .map(|request| &request["key"])
            .collect()
    };
    // An object that is there has ended its upload.
    let ended = [
        "AbortMultipartUpload",
        "CompleteMultipartUpload",
        "HeadObject",
    ]
    .map(keys);
    let is_ended = |key: &&Value| ended.iter().any(|keys| keys.contains(key));
    let begun = requests
        .iter()
        .filter(|request| request["op"] == "CreateMultipartUpload" && request["fault"].is_null())
        .map(|request| &request["key"]);
    let open: Vec<&Value> = begun.filter(|key| !is_ended(key)).collect();
    let tells = run.report["attached"].to_string().contains("in the store");
    let is_untold = !open.is_empty() && !tells;
    assert_eq!(is_untold, leaves_uploads, "{open:?}: {}", run.report);
}

/// The GPUs' memory is given up for an image that is committed, and given to a target for bytes that are all there; nothing is tried twice.
fn must_complete_only_what_is_kept(cell: &Cell, saver: &Saver, verdict: &Verdict) {
    let may_be_called = match cell.command {
        Command::Save => matches!(verdict.code, 0 | 14),
        Command::Restore => verdict.code == 0 || ["complete", "unlock"].contains(&verdict.phase),
    };
    let calls = saver.calls("cuCheckpointOperationComplete");
    assert_eq!(calls, usize::from(may_be_called), "calls of Complete");
    let restores = saver.calls("cuCheckpointProcessRestore");
    let is_restored = cell.command == Command::Restore && verdict.code != 20;
    assert_eq!(restores, usize::from(is_restored), "calls of Restore");
}

/// Whether the store did as it was asked. An answer that a rule gave says nothing.
fn is_done(request: &Value) -> bool {
    let is_success = |status: &Value| matches!(status.as_u64(), Some(200..300));
    let is_answered = request["fault"].is_null() && is_success(&request["status"]);
    is_answered || is_success(&request["applied"])
}

fn cells() -> Vec<Cell> {
    // Those that wait the longest first.
    let mut cells = store::cells();
    cells.extend(driver::cells());
    cells
}

#[test]
fn every_failure_ends_as_the_table_says() {
    let only = std::env::var(ONLY).unwrap_or_default();
    let mut cells = cells();
    cells.retain(|cell| cell.name.contains(&only));
    let next = Mutex::new(cells.iter());
    let (failed, seen) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    let work = || {
        let mut ground = Ground::new();
        loop {
            let cell = next.lock().expect("no holder panics").next();
            let Some(cell) = cell else { break };
            let tried = catch_unwind(AssertUnwindSafe(|| ground.try_cell(cell)));
            if let Err(panic) = tried {
                let why = panic.downcast_ref::<String>().cloned();
                let why = why.unwrap_or_else(|| "no message".to_owned());
                let mut failed = failed.lock().expect("no holder panics");
                failed.push(format!("{}: {why}", cell.name));
                drop(failed);
                // What it left would be taken for the next one's.
                ground = Ground::new();
            }
        }
        let lines = ground.into_seen();
        seen.lock().expect("no holder panics").extend(lines);
    };
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(work);
        }
    });
    let failed = failed.into_inner().expect("no holder panics");
    let count = failed.len();
    assert!(failed.is_empty(), "{count} cells:\n{}", failed.join("\n"));
    let seen = seen.into_inner().expect("no holder panics");
    Target::check_undisturbed(&Node::new(NODE), UNDISTURBED, seen);
}

/// A call or a request that is new in the product needs a row here.
#[test]
fn every_call_and_every_request_has_a_row() {
    let scene = Scene::new(&[]);
    let must_have_rows = |command: Command, saver: &Saver| {
        for line in saver.trace() {
            let call = line["call"].as_str().expect("a name");
            // What the stream's worker says of a copy.
            let is_known = call == "copy-done" || driver::knows(command, call);
            assert!(is_known, "{command:?} calls {call}");
        }
        for line in scene.server.all_requests() {
            let text = |member: &str| line[member].as_str().unwrap_or_default().to_owned();
            let (op, key) = (text("op"), text("key"));
            let is_known = store::knows(command, &op, &key);
            assert!(is_known, "{command:?} asks for {op} {key}");
        }
    };
    // As every cell's job, it has an image already.
    scene.save("job");
    scene.server.forget_requests();
    let mut target = scene.target();
    target.wait_for("step 1 ");
    let saver = scene.saver("job", "");
    saver.cli.ok(&format!("checkpoint --pid {}", target.pid()));
    must_have_rows(Command::Save, &saver);

    let saver = scene.saver("job", "");
    let fresh = scene.fresh();
    scene.server.forget_requests();
    let args = format!("restore --into-fresh --pid {}", fresh.pid());
    saver.cli.ok(&args);
    must_have_rows(Command::Restore, &saver);
}

#[test]
#[expect(clippy::print_stdout, reason = "the table is what it is for")]
fn the_document_is_the_table() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/failure-matrix.md");
    let page = page::text();
    println!("{page}");
    if std::env::var_os("UPDATE_DOCS").is_some_and(|value| value == "1") {
        std::fs::write(path, &page).expect("the document");
    }
    let there = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        there == page,
        "{path} is not what the table says: run this test with UPDATE_DOCS=1"
    );
}
