//! The failure matrix of whole process trees: two processes that use GPUs and a plain one, saved and rebuilt by a real CRIU, staged and streamed.
//!
//! As for one process, what must follow is data, in [`save`] and [`restore`], derived from what PROTOCOL and the exit codes promise. A tree that is given back serves the next cell.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use serde_json::{Value, json};

use super::{NODE, ONLY, is_done, must_agree_with_itself, must_tell_of_open_uploads};
use crate::support::scene::{Saver, cause, until};
use crate::support::tree::{Alone, Jobs, Mode, Tree, criu, done as run_to_its_end};
use crate::support::tree::{end_namespace, is_alive};
use crate::support::{Node, Run, Target, step_of};

/// One tree at work.
mod ground;
/// The sections of the document.
pub(super) mod page;
/// What fails in a restore.
mod restore;
/// What fails in a save.
mod save;

/// A chunk or two on each GPU. They take their time, because they run beside every cell; and the number of processes of the tree is always the same, so that calls can be counted.
const JOBS: Jobs = Jobs {
    first: "--bytes 2MiB --seed 1 --step-ms 30",
    second: "--gpus 2 --bytes 1MiB --fill weights --seed 2 --step-ms 30",
    count: "exec perl -e 'select(undef, undef, undef, 0.02), syswrite(STDOUT, ++$i . \"\\n\") while 1'",
};
/// The same jobs, without the time that they take.
const UNDISTURBED: [&str; 2] = [
    "--bytes 2MiB --seed 1",
    "--gpus 2 --bytes 1MiB --fill weights --seed 2",
];
/// The files that they write.
const NAMES: [&str; 2] = ["a", "b"];
const JOB: &str = "job";
/// Cells that are tried at a time. CRIU works, more than it waits.
const THREADS: usize = 3;

/// What ckptstream is asked to do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Command {
    /// `checkpoint`: the tree is ended.
    Save,
    /// `checkpoint --then resume`.
    SaveInPassing,
    /// `restore` of the newest image.
    Restore,
}

/// What must follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Verdict {
    code: i32,
    /// Where it failed; empty where it did as asked.
    phase: &'static str,
    /// How the two processes are found.
    found: [&'static str; 2],
    /// Both are told, as they are found. Where nothing was touched, or there is nothing left, nobody need be.
    is_told: bool,
}

/// Done as asked.
const fn done(found: [&'static str; 2]) -> Verdict {
    ends(0, "", found)
}

const fn ends(code: i32, phase: &'static str, found: [&'static str; 2]) -> Verdict {
    Verdict {
        code,
        phase,
        found,
        is_told: true,
    }
}

/// Failed before any process was touched, or with none left.
const fn untold(code: i32, phase: &'static str, found: [&'static str; 2]) -> Verdict {
    Verdict {
        is_told: false,
        ..ends(code, phase, found)
    }
}

impl Verdict {
    /// Whether this is what a command answered.
    fn is_of(&self, run: &Run, pids: [u32; 2]) -> bool {
        let is_there = self.code == 0 || run.report["phase"] == self.phase;
        let told = run.report["targets"].as_array().cloned();
        let told = told.unwrap_or_default();
        let is_so = |target: &Value| {
            let index = pids.iter().position(|pid| target["pid"] == *pid);
            index.is_some_and(|index| target["state"] == self.found[index])
        };
        let all_are_told = !self.is_told || told.len() == pids.len();
        run.code == self.code && is_there && all_are_told && told.iter().all(is_so)
    }

    fn images_added(&self, command: Command) -> &'static [usize] {
        match (command, self.code) {
            (Command::Restore, _) => &[0],
            (_, 0 | 14) => &[1],
            (_, 13) => &[0, 1],
            _ => &[0],
        }
    }
}

/// How a driver call fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Call {
    /// It answers this code, and has done nothing.
    Answers(u32),
    /// It answers this code, and has done its work.
    Denies(u32),
    /// It answers success, and has done nothing.
    Pretends,
    /// The process that it is about dies just before.
    Death,
}

/// How CRIU fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CriuFault {
    /// It does nothing, and says so.
    Fails,
    /// The same, the first time only.
    FailsOnce,
    /// It does its work, and says that it has failed.
    Denies,
    /// It does nothing, and says that it is done.
    Pretends,
    /// It fails, and the first process has died meanwhile.
    Death,
}

/// How a request to the store fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RequestFault {
    /// 403, for good.
    Refused,
    /// Done once, and not answered.
    AnswerLost,
    /// Done, and never answered.
    AnswersLost,
    /// The store is not reached any more.
    Unreachable,
}

/// Requests of one kind.
#[derive(Clone, Copy, Debug)]
struct Site {
    op: &'static str,
    /// A part of their keys.
    key: &'static str,
    /// The first one that fails, from 1.
    first: u32,
    /// What they are for.
    what: &'static str,
}

const fn site(op: &'static str, key: &'static str, first: u32, what: &'static str) -> Site {
    Site {
        op,
        key,
        first,
        what,
    }
}

/// One thing that fails.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// `FUNCTION#K`: the K-th in the life of ckptstream, or every one (`*`).
    Driver(&'static str, Call),
    /// This command of CRIU's.
    Criu(&'static str, CriuFault),
    Request(Site, RequestFault),
}

use CriuFault::{Denies as CriuDenies, Fails as CriuFails, Pretends as CriuPretends};
use Fault::{Criu, Driver, Request};

impl Fault {
    fn driver(self) -> Option<String> {
        let Self::Driver(call, how) = self else {
            return None;
        };
        let action = match how {
            Call::Answers(code) => format!("code:{code}"),
            Call::Denies(code) => format!("after-code:{code}"),
            Call::Pretends => "code:0".to_owned(),
            Call::Death => "kill-target".to_owned(),
        };
        Some(format!("fault={call}={action};"))
    }

    fn rule(self) -> Option<Value> {
        let Self::Request(site, how) = self else {
            return None;
        };
        let lost = json!({"apply": true, "drop": true});
        let (when, action) = match how {
            RequestFault::Refused => ("from", json!({"status": 403, "code": "AccessDenied"})),
            RequestFault::AnswerLost => ("nth", lost),
            RequestFault::AnswersLost => ("from", lost),
            RequestFault::Unreachable => ("from", json!({"drop": true})),
        };
        Some(json!({"op": site.op, "key_contains": site.key, when: site.first, "action": action}))
    }
}

/// What fails, and what must follow.
struct Row {
    modes: &'static [Mode],
    command: Command,
    /// What ckptstream is about.
    made_in: &'static str,
    fault: Fault,
    /// What leads up to it.
    behind: Vec<Fault>,
    /// Several where time decides.
    expected: Vec<Verdict>,
}

const BOTH: &[Mode] = &[Mode::Staged, Mode::Streamed];
const STAGED: &[Mode] = &[Mode::Staged];
const STREAMED: &[Mode] = &[Mode::Streamed];

fn row(modes: &'static [Mode], fault: Fault, expected: Verdict) -> Row {
    Row {
        modes,
        command: Command::Save,
        made_in: "",
        fault,
        behind: Vec::new(),
        expected: vec![expected],
    }
}

/// These rows, each with the phase that it is made in.
fn of_phases<const COUNT: usize>(phases: [(&'static str, Vec<Row>); COUNT]) -> Vec<Row> {
    let rows = phases.into_iter().flat_map(|(made_in, rows)| {
        let rows = rows.into_iter();
        rows.map(move |row| Row { made_in, ..row })
    });
    rows.collect()
}

impl Row {
    fn behind(mut self, fault: Fault) -> Self {
        self.behind.push(fault);
        self
    }

    fn or(mut self, verdict: Verdict) -> Self {
        self.expected.push(verdict);
        self
    }
}

fn rows() -> Vec<Row> {
    let mut rows = save::rows();
    rows.extend(restore::rows());
    rows
}

/// A row in one mode.
struct Cell {
    name: String,
    mode: Mode,
    row: Row,
}

/// Those of one kind together: they share a tree.
fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for mode in BOTH {
        for row in rows() {
            if row.modes.contains(mode) {
                let (command, said) = (row.command, page::said(&row));
                cells.push(Cell {
                    name: format!("tree {mode:?} {command:?}: {said}"),
                    mode: *mode,
                    row,
                });
            }
        }
    }
    cells.sort_by_key(|cell| (cell.mode, cell.row.command == Command::Restore));
    cells
}

impl Cell {
    fn faults(&self) -> impl Iterator<Item = Fault> {
        let behind = self.row.behind.iter().copied();
        behind.chain([self.row.fault])
    }
}

#[test]
fn every_failure_of_a_tree_ends_as_the_table_says() {
    if criu().is_none() {
        return;
    }
    let only = std::env::var(ONLY).unwrap_or_default();
    let mut cells = cells();
    cells.retain(|cell| cell.name.contains(&only));
    let next = Mutex::new(cells.iter());
    let failed = Mutex::new(Vec::new());
    let seen = Mutex::new(Seen::default());
    let work = || {
        let mut ground: Option<ground::Ground> = None;
        let leave = |ground: Option<ground::Ground>| {
            if let Some(ground) = ground {
                seen.lock().expect("no holder panics").add(ground.leave());
            }
        };
        loop {
            let cell = next.lock().expect("no holder panics").next();
            let Some(cell) = cell else { break };
            if !ground.as_ref().is_some_and(|ground| ground.is_for(cell)) {
                leave(ground.take());
            }
            let tried = catch_unwind(AssertUnwindSafe(|| {
                ground
                    .get_or_insert_with(|| ground::Ground::new(cell))
                    .try_cell(cell)
            }));
            match tried {
                Ok(true) => {}
                Ok(false) => leave(ground.take()),
                Err(panic) => {
                    let word = panic.downcast_ref::<&str>().copied();
                    let why = panic.downcast_ref::<String>().map(String::as_str);
                    let why = why.or(word).unwrap_or("no message");
                    let why = format!("{}: {why}", cell.name);
                    failed.lock().expect("no holder panics").push(why);
                    // What it left would be taken for the next one's.
                    ground = None;
                }
            }
        }
        leave(ground.take());
    };
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(work);
        }
    });
    let failed = failed.into_inner().expect("no holder panics");
    let count = failed.len();
    assert!(failed.is_empty(), "{count} cells:\n{}", failed.join("\n"));
    let Seen(seen) = seen.into_inner().expect("no holder panics");
    for (args, steps) in UNDISTURBED.into_iter().zip(seen) {
        Target::check_undisturbed(&Node::new(NODE), args, steps.into_values());
    }
}

/// Every step that the two jobs printed, in whichever tree.
#[derive(Default)]
struct Seen([BTreeMap<u64, String>; 2]);

impl Seen {
    fn add(&mut self, other: Self) {
        for (name, steps) in other.0.into_iter().enumerate() {
            self.add_steps(name, steps.into_values());
        }
    }

    fn add_steps(&mut self, name: usize, lines: impl IntoIterator<Item = String>) {
        for line in lines {
            let step = step_of(&line);
            let first = self.0[name].entry(step).or_insert_with(|| line.clone());
            assert_eq!(*first, line, "one step has two digests");
        }
    }
}

/// A call of the checkpoint functions, or a request, that is new in the product needs a row here.
#[test]
fn every_call_and_every_request_of_a_tree_has_a_row() {
    for mode in BOTH {
        let Some(tree) = Tree::of(*mode, &JOBS) else {
            return;
        };
        let must_have_rows = |command: Command, saver: &Saver| {
            let rows = rows();
            let of = |fault: &dyn Fn(Fault) -> bool| {
                let is_restore = command == Command::Restore;
                rows.iter().any(|row| {
                    let is_its = (row.command == Command::Restore) == is_restore;
                    is_its && row.modes.contains(mode) && fault(row.fault)
                })
            };
            for line in saver.trace() {
                let call = line["call"].as_str().expect("a name");
                let is_known = |fault| matches!(fault, Driver(name, _) if name.starts_with(call));
                let is_checkpoints = call.starts_with("cuCheckpoint");
                assert!(!is_checkpoints || of(&is_known), "{command:?} calls {call}");
            }
            for line in tree.scene.server.all_requests() {
                let text = |member: &str| line[member].as_str().unwrap_or_default().to_owned();
                let (op, key) = (text("op"), text("key"));
                let is_known = |fault| matches!(fault, Request(site, _) if site.op == op && key.contains(site.key));
                // What is left over is cleaned up, whatever comes of it.
                let is_known = op == "AbortMultipartUpload" || of(&is_known);
                assert!(is_known, "{mode:?}: {command:?} asks for {op} {key}");
            }
        };
        let alone = tree.start();
        tree.reaches(3);
        // A log that has nothing yet is read in another way.
        let checkpoint = format!("checkpoint --pid {}", alone.pid());
        let cli = ground::saver(&tree, "", "", "").cli;
        let saved = run_to_its_end(&cli, &format!("{checkpoint} --then resume"));
        assert_eq!(saved.code, 0, "{saved:?}");
        tree.scene.server.forget_requests();
        let saver = ground::saver(&tree, "", "", "");
        let saved = run_to_its_end(&saver.cli, &checkpoint);
        assert_eq!(saved.code, 0, "{saved:?}");
        must_have_rows(Command::Save, &saver);
        drop(alone);

        tree.scene.server.forget_requests();
        let saver = ground::saver(&tree, "", "", "");
        let restored = run_to_its_end(&saver.cli, "restore");
        assert_eq!(restored.code, 0, "{restored:?}");
        must_have_rows(Command::Restore, &saver);
        let pid = restored.report["targets"][0]["pid"].as_u64();
        end_namespace(pid.expect("a pid"));
    }
}
