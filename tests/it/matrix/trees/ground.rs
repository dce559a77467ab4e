//! A tree and a store, for one cell after the other; and the looks at what a failure has left.

use std::path::Path;
use std::process::Command as Program;

use serde_json::Value;

use super::{
    Alone, Cell, Command, Criu, CriuFault, Driver, Fault, JOB, JOBS, Mode, NAMES, Request,
    RequestFault, Run, Saver, Seen, Tree, Verdict, cause, end_namespace, is_alive, is_done,
    must_agree_with_itself, must_tell_of_open_uploads, run_to_its_end, until,
};

/// For faults that pass, on a busy machine.
const PATIENT: &str = "retry_timeout = \"30s\"\n";
/// For faults that stay.
const IMPATIENT: &str = "retry_timeout = \"1s\"\n";

/// The binary as it saves trees in this mode.
pub(super) fn saver(tree: &Tree, driver: &str, store: &str, host: &str) -> Saver {
    let save = match tree.mode {
        Mode::Staged => "auto",
        Mode::Streamed => "always",
    };
    let host = format!("save = \"{save}\"\ngrown_files = \"truncate\"\n{host}");
    tree.saver_with(driver, store, &host)
}

/// A tree that was restored, by one of its processes; ended when dropped.
struct Restored(u32);

impl Restored {
    fn of(pid: u32) -> Option<Self> {
        state_in_proc(pid).map(|_state| Self(pid))
    }
}

impl Drop for Restored {
    fn drop(&mut self) {
        end_namespace(self.0.into());
    }
}

pub(super) struct Ground {
    tree: Tree,
    is_restored: bool,
    /// A running tree, and its two processes.
    running: Option<(Alone, [u32; 2])>,
    images: usize,
    seen: Seen,
}

impl Ground {
    pub(super) fn new(cell: &Cell) -> Self {
        let tree = Tree::of(cell.mode, &JOBS).expect("CRIU is there");
        let is_restored = cell.row.command == Command::Restore;
        let mut ground = Self {
            tree,
            is_restored,
            running: None,
            images: 0,
            seen: Seen::default(),
        };
        if is_restored {
            let (alone, _) = ground.start();
            let cli = saver(&ground.tree, "", "", "").cli;
            let saved = run_to_its_end(&cli, &format!("checkpoint --pid {}", alone.pid()));
            assert_eq!(saved.code, 0, "{saved:?}");
            ground.images = 1;
        }
        ground
    }

    pub(super) fn is_for(&self, cell: &Cell) -> bool {
        let is_restored = cell.row.command == Command::Restore;
        (self.tree.mode, self.is_restored) == (cell.mode, is_restored)
    }

    /// Every step that was printed.
    pub(super) fn leave(mut self) -> Seen {
        self.running = None;
        self.note_what_was_printed();
        self.seen
    }

    /// The digests are kept; the plain process has counted on, and on.
    fn note_what_was_printed(&mut self) {
        for (index, name) in NAMES.into_iter().enumerate() {
            self.seen.add_steps(index, self.tree.steps(name));
        }
        let counted = self.tree.lines("plain");
        let expected: Vec<String> = (1..=counted.len()).map(|it| it.to_string()).collect();
        assert_eq!(counted, expected, "the plain process");
    }

    fn start(&mut self) -> (Alone, [u32; 2]) {
        self.note_what_was_printed();
        for name in [NAMES[0], NAMES[1], "plain"] {
            let _none = std::fs::remove_file(self.tree.path(name));
        }
        let alone = self.tree.start();
        self.tree.reaches(2);
        let pids = NAMES.map(|name| {
            let lines = self.tree.lines(name);
            let ready = lines
                .iter()
                .find_map(|line| line.strip_prefix("ready pid "));
            let pid = ready.and_then(|pid| pid.parse().ok());
            pid.expect("its first line")
        });
        if pids[0] > pids[1] {
            // Pids began anew in between, and ckptstream would take the second one first.
            drop(alone);
            return self.start();
        }
        (alone, pids)
    }

    /// Whether it can serve another cell.
    pub(super) fn try_cell(&mut self, cell: &Cell) -> bool {
        let command = cell.row.command;
        let running = match command {
            Command::Restore => None,
            Command::Save | Command::SaveInPassing => {
                let running = self.running.take();
                Some(running.unwrap_or_else(|| self.start()))
            }
        };
        let root = running.as_ref().map(|(alone, _)| alone.pid());
        let (saver, run) = self.run(cell, root);
        let restored = match (command, run.code) {
            (Command::Restore, 0) => told_pids(&run).into_iter().find_map(Restored::of),
            _ => None,
        };
        self.tree.scene.server.set_rules(&Value::Array(Vec::new()));
        let requests = self.tree.scene.server.all_requests();
        let pids = match &running {
            Some((_, pids)) => *pids,
            None => told_pids(&run),
        };
        let expected = &cell.row.expected;
        let verdict = expected.iter().find(|verdict| verdict.is_of(&run, pids));
        let verdict = verdict.unwrap_or_else(|| {
            let (code, phase, cause) = (run.code, &run.report["phase"], cause(&run));
            let (told, stderr) = (&run.report["targets"], &run.stderr);
            panic!(
                "{code} in {phase}, {pids:?} told as {told}, not {expected:?}: {cause}; {stderr}"
            )
        });
        must_agree_with_itself(&run);
        self.must_have_failed(cell, &saver, &requests);
        must_tell_of_open_uploads(false, &run, &requests);
        must_be_in_order(cell, &saver, &requests, verdict);
        if command != Command::Restore {
            must_be_closed(&run, &requests, verdict);
        }
        self.must_be_found(pids, verdict);
        if let Some(root) = root {
            // Nobody ends a tree that is not committed.
            let is_ended = command == Command::Save && verdict.code == 0;
            let is_there = state_in_proc(root).is_some();
            assert_eq!(is_there, !is_ended, "the tree's root");
        }
        if command == Command::Restore || (command, verdict.code) == (Command::Save, 0) {
            let is_left = verdict.code == 0 && command == Command::Restore;
            assert_eq!(is_alive(self.tree.dir.path()), is_left, "the tree");
        }
        if restored.is_some() {
            drop(restored);
            until(|| !is_alive(self.tree.dir.path()));
            self.note_what_was_printed();
        }
        self.must_have_images(command, verdict);
        let is_as_before = verdict.found == ["running"; 2];
        if let (Some(running), true) = (running, is_as_before) {
            self.running = Some(running);
        }
        // What is left suspended is not to meet another save in its log.
        command == Command::Restore || matches!(verdict.code, 0 | 3 | 10)
    }

    fn run(&self, cell: &Cell, root: Option<u32>) -> (Saver, Run) {
        let driver: String = cell.faults().filter_map(Fault::driver).collect();
        let rules: Vec<Value> = cell.faults().filter_map(Fault::rule).collect();
        let passes = |fault| !matches!(fault, Request(_, how) if how != RequestFault::AnswerLost);
        let patience = match cell.faults().all(passes) {
            true => PATIENT,
            false => IMPATIENT,
        };
        let host = cell.faults().find_map(|fault| match fault {
            Criu(verb, how) => Some(self.failing_criu(verb, how)),
            _ => None,
        });
        let saver = saver(&self.tree, &driver, patience, &host.unwrap_or_default());
        self.tree.scene.server.forget_requests();
        self.tree.scene.server.set_rules(&Value::Array(rules));
        let args = match (cell.row.command, root) {
            (Command::Save, Some(root)) => format!("checkpoint --take-over --pid {root}"),
            (Command::SaveInPassing, Some(root)) => {
                format!("checkpoint --take-over --then resume --pid {root}")
            }
            _ => "restore --take-over".to_owned(),
        };
        let run = run_to_its_end(&saver.cli, &args);
        (saver, run)
    }

    /// A program in place of CRIU, that fails at this command.
    fn failing_criu(&self, verb: &str, how: CriuFault) -> String {
        let (path, mark) = (self.tree.path("criu.sh"), self.tree.path("criu-failed"));
        let _none = std::fs::remove_file(&mark);
        let (criu, mark) = (self.tree.criu.display(), mark.display());
        let first = self.tree.path(NAMES[0]);
        let fails = match how {
            CriuFault::Fails => "echo no >&2; exit 1".to_owned(),
            CriuFault::FailsOnce => format!("[ $(wc -l <{mark}) = 1 ] && exit 1"),
            CriuFault::Denies => format!("{criu} \"$@\"; exit 1"),
            CriuFault::Pretends => "exit 0".to_owned(),
            CriuFault::Death => format!(
                "kill -9 $(sed -n 's/^ready pid //p' {}); exit 1",
                first.display()
            ),
        };
        let script = format!(
            "#!/bin/sh\ncase $1 in {verb}) echo failed >>{mark}; {fails};; esac\nexec {criu} \"$@\"\n"
        );
        std::fs::write(&path, script).expect("a script");
        let status = Program::new("chmod").arg("+x").arg(&path).status();
        assert!(status.is_ok_and(|status| status.success()));
        format!("criu = \"{}\"", path.display())
    }

    /// The cell's failure has taken place.
    fn must_have_failed(&self, cell: &Cell, saver: &Saver, requests: &[Value]) {
        let is_there = match cell.row.fault {
            Driver(call, how) => {
                let function = call.split('#').next().unwrap_or_default();
                let answer = match how {
                    super::Call::Answers(code) | super::Call::Denies(code) => Some(code),
                    super::Call::Pretends => Some(0),
                    super::Call::Death => None,
                };
                saver.trace().iter().any(|line| {
                    let is_it = answer.is_none_or(|answer| line["result"] == answer);
                    line["call"] == function && is_it
                })
            }
            Criu(..) => self.tree.path("criu-failed").exists(),
            Request(..) => {
                let rules = cell.faults().filter_map(Fault::rule).count();
                requests.iter().any(|request| request["fault"] == rules - 1)
            }
        };
        assert!(is_there, "the failure did not take place");
    }

    /// The processes are as the verdict has them.
    fn must_be_found(&self, pids: [u32; 2], verdict: &Verdict) {
        let all = pids.into_iter().zip(verdict.found);
        for (pid, state) in all.filter(|(_, state)| *state != "running") {
            if state == "gone" {
                until(|| state_in_proc(pid).is_none());
                continue;
            }
            // What may be committed must not go on; all else does, as far as it can.
            let is_stopped = state_in_proc(pid) == Some('T');
            assert_eq!(is_stopped, verdict.code == 13, "{pid} is stopped");
            if is_stopped {
                let kill = format!("kill -CONT {pid}");
                let _sent = Program::new("sh").args(["-c", &kill]).status();
            }
            assert_eq!(self.tree.scene.state_of_process(pid), state, "{pid}");
        }
        // A process that is locked finishes one step at most.
        let more = |index: usize| match verdict.found[index] {
            "running" => self.tree.reached(NAMES[index]) + 3,
            _ => 0,
        };
        self.tree.reach([more(0), more(1)]);
        if verdict.found == ["running"; 2] {
            let counted = self.tree.lines("plain").len();
            until(|| self.tree.lines("plain").len() > counted);
        }
    }

    fn must_have_images(&mut self, command: Command, verdict: &Verdict) {
        let images = self.tree.scene.images(JOB).len();
        let added = images - self.images;
        self.images = images;
        let allowed = verdict.images_added(command);
        assert!(allowed.contains(&added), "{added} images more");
        if added > 0 {
            let verified = run_to_its_end(&saver(&self.tree, "", "", "").cli, "verify");
            assert_eq!(verified.code, 0, "{verified:?}");
        }
    }
}

/// The processes that a restore tells of, by their pids here; where it tells of none there is none.
fn told_pids(run: &Run) -> [u32; 2] {
    let pid = |index: usize| {
        let pid = run.report["targets"][index]["pid"].as_u64();
        pid.and_then(|pid| u32::try_from(pid).ok())
    };
    [pid(0), pid(1)].map(|pid| pid.unwrap_or(u32::MAX))
}

/// As the kernel has it; `None` of a process that has ended.
fn state_in_proc(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
    let state = stat.ok()?.rsplit_once(") ")?.1.chars().next();
    state.filter(|state| *state != 'Z')
}

/// Behind `open` and `saving` the log says what came of it: an image, or that there will be none; and nothing, where one may be made of it yet.
fn must_be_closed(run: &Run, requests: &[Value], verdict: &Verdict) {
    let entries = requests.iter().filter(|request| {
        let key = request["key"].as_str().unwrap_or_default();
        request["op"] == "PutObject" && key.contains("/log/") && is_done(request)
    });
    let tells = run.report["attached"].to_string();
    let tells = tells.contains("stays open in the job's log");
    match (verdict.code, verdict.phase) {
        (13, _) | (_, "prepare") => {}
        (16, _) => assert_eq!(entries.count(), 2, "entries of a save that is sealed"),
        _ => assert!(
            entries.count() == 3 || tells,
            "the save stays open: {}",
            run.report
        ),
    }
}

/// Nothing is given up before it is kept, nothing runs before all have their memory, and nothing is tried twice.
fn must_be_in_order(cell: &Cell, saver: &Saver, requests: &[Value], verdict: &Verdict) {
    let trace = saver.trace();
    let calls = |name: &str| -> Vec<&Value> {
        let lines = trace.iter().filter(|line| line["call"] == name);
        lines.collect()
    };
    let begins = |lines: &[&Value]| lines.iter().filter_map(|it| it["t_us"].as_u64()).min();
    let ends = |lines: &[&Value]| lines.iter().filter_map(|it| it["end_us"].as_u64()).max();
    let completes = calls("cuCheckpointOperationComplete");
    let restores = calls("cuCheckpointProcessRestore");
    let unlocks = calls("cuCheckpointProcessUnlock");
    if cell.row.command == Command::Restore {
        assert!(restores.is_empty() || verdict.code != 20, "Restore, and 20");
        let may_complete = verdict.code == 0 || ["complete", "unlock"].contains(&verdict.phase);
        assert!(may_complete || completes.is_empty(), "Complete, and copies");
    } else if let Some(first) = begins(&completes) {
        let sealed = requests.iter().find(|request| {
            let key = request["key"].as_str().unwrap_or_default();
            request["op"] == "PutObject" && key.ends_with("/sealed.json") && is_done(request)
        });
        let sealed = sealed.and_then(|request| request["end_us"].as_u64());
        assert!(
            sealed.is_some_and(|sealed| sealed <= first),
            "Complete, and no seal"
        );
    }
    if let (Some(restored), Some(unlocked)) = (ends(&restores), begins(&unlocks)) {
        assert!(
            restored <= unlocked,
            "one runs before all have their memory"
        );
    }
    for call in &restores {
        let again = restores.iter().filter(|it| it["target"] == call["target"]);
        assert_eq!(again.count(), 1, "Restore is asked for again");
    }
}
