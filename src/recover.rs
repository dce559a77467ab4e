//! What savers that died have left behind on this node, put in order as far as that is safe.
//!
//! In: the journals of this node, the targets as the driver tells of them, the job's log, the spill. Out: a [`Row`] for every target, which says what it is, what was done, and what there is left to do. What can fail: nothing of it
//! stops the rest; what cannot be found out is said.
//!
//! | state | and | is done |
//! |---|---|---|
//! | LOCKED | the journal says that the lock was ours | unlocked |
//! | LOCKED | it does not, or its owner lives | nothing |
//! | CHECKPOINTING | | nothing: what the driver does with it is not documented. Said: whether the save is durable |
//! | CHECKPOINTED | a durable copy, nobody opened the job since | nothing; `restore --pid` brings it back |
//! | CHECKPOINTED | somebody opened the job since | nothing; it lives elsewhere |
//! | CHECKPOINTED | of a tree, staged, no image, nobody opened the job since | its tree goes on, all of it get their memory back from their own host memory, and are unlocked |
//! | CHECKPOINTED | of a tree, what its GPUs held is sealed in the store | nothing; `restore --pid` of the root brings the tree back |
//! | CHECKPOINTED | of a tree, and committed | nothing; the image is restored elsewhere, and this tree is to be ended |
//! | LOCKED | of a tree in which another one has not its memory | nothing: it would run without the other |
//! | RESTORING, FAILED | | nothing; it can only be ended |
//! | RUNNING, gone, pid used again | | the attempt is given up in the log, its uploads aborted, the journal removed |
//!
//! With `end` the processes that can only be ended are ended.

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;
use serde::Serialize;

use crate::checkpoint::DYING_TIMEOUT;
use crate::config::JobName;
use crate::driver::{CheckpointedProcess, Driver, DriverError, LockedProcess, ProcessState};
use crate::error::{ExitCode, Failure, Phase, one_line};
use crate::failpoint;
use crate::host::ProcessTree;
use crate::image::image_id;
use crate::job_log::{AppendError, Entry, JobLog, append_dropped};
use crate::journal::{self, Found, Left, Step, TargetRecord};
use crate::pipeline::PipelineError;
use crate::sealed::{SPILL_DIRECTORY, Sealed};
use crate::session::Session;
use crate::store::Store;
use crate::store::file::FileStore;
use crate::target::{Target, TargetError};
use crate::writer::{ProcessIdentity, random_hex};

/// How long the store may take to say one thing; `recover` is for people who wait.
const STORE_TIMEOUT: Duration = Duration::from_secs(20);

/// What `recover` may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RecoverOptions {
    /// Only this target.
    pub pid: Option<u32>,
    /// End processes that can only be ended.
    pub end: bool,
}

/// Every target that was looked at.
#[derive(Debug, Serialize)]
pub struct Recovered {
    /// Where journals are kept (`job.state_dir`).
    pub state_dir: String,
    /// In order of their journals.
    #[serde(rename = "recovered")]
    pub targets: Vec<Row>,
}

impl Recovered {
    /// What a script has to know: the gravest of all.
    pub fn code(&self) -> ExitCode {
        const GRAVEST_FIRST: [ExitCode; 10] = [
            ExitCode::Lost,
            ExitCode::RestoreFailed,
            ExitCode::Fenced,
            ExitCode::CommittedTargetAstray,
            ExitCode::Spilled,
            ExitCode::HostMemoryNotSaved,
            ExitCode::RestoreRefused,
            ExitCode::NotOurs,
            ExitCode::Preflight,
            ExitCode::RolledBack,
        ];
        let there = GRAVEST_FIRST
            .into_iter()
            .find(|code| self.targets.iter().any(|row| row.code == *code));
        there.unwrap_or(ExitCode::Ok)
    }
}

/// One target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Row {
    /// Its pid; 0 of a journal that cannot be read.
    pub pid: u32,
    /// Command name.
    pub name: String,
    /// As looked up: `running`, `locked`, …, `gone`, `unknown`.
    pub state: String,
    /// The job.
    pub job: String,
    /// What was under way: `checkpoint` or `restore`.
    pub command: String,
    /// The save's attempt, as far as it came.
    pub attempt: Option<String>,
    /// The image that it became.
    pub image: Option<String>,
    /// What was done: `nothing`, `unlocked`, `closed`, `ended`.
    pub done: &'static str,
    /// What that means.
    pub verdict: String,
    /// What a script does next.
    pub next: &'static str,
    /// The same as an exit code.
    #[serde(skip)]
    pub code: ExitCode,
}

/// Looks at every journal of this node, and puts in order what can be.
///
/// # Errors
/// Exit 3 when the journals cannot be read.
pub fn recover(
    session: &Session,
    job: Option<&JobName>,
    options: RecoverOptions,
) -> Result<Recovered, Failure> {
    let dir = session.config.state_dir();
    let found = journal::all(&dir)
        .map_err(|error| Failure::new(ExitCode::Preflight, Phase::Read, error))?;
    let mut work = Work {
        session,
        driver: None,
        options,
        of_trees: of_trees(&found),
    };
    let mut targets = Vec::new();
    for found in found {
        let (pid, of) = match &found {
            Found::Alive(head) => (head.target.pid, head.job.as_str()),
            Found::Dead(left) => (left.head.target.pid, left.head.job.as_str()),
            Found::Damaged { .. } => (0, ""),
        };
        let is_asked_for = options.pid.is_none_or(|asked| asked == pid)
            && job.is_none_or(|job| of.is_empty() || job.as_str() == of);
        if is_asked_for {
            let name = match &found {
                Found::Dead(left) => left.head.target.name.clone(),
                Found::Alive(_) | Found::Damaged { .. } => String::new(),
            };
            let job = of.to_owned();
            let row = catch_unwind(AssertUnwindSafe(|| work.look(found)));
            targets.push(row.unwrap_or_else(|panic| gone_wrong(pid, name, job, panic.as_ref())));
        }
    }
    Ok(Recovered {
        state_dir: dir.display().to_string(),
        targets,
    })
}

/// A defect of ours, caught: the other targets are looked at all the same.
fn gone_wrong(pid: u32, name: String, job: String, panic: &(dyn Any + Send)) -> Row {
    let why = PipelineError::of_story(panic);
    Row {
        pid,
        name,
        state: "unknown".to_owned(),
        job,
        command: String::new(),
        attempt: None,
        image: None,
        done: "nothing",
        verdict: format!("{why}; its journal stays, so that it can be tried again"),
        next: ExitCode::RolledBack.next(),
        code: ExitCode::RolledBack,
    }
}

struct Work<'a> {
    session: &'a Session,
    /// Opened when the first target needs it.
    driver: Option<Result<Arc<Driver>, DriverError>>,
    options: RecoverOptions,
    /// The targets of each attempt to save a tree.
    of_trees: BTreeMap<String, Vec<Member>>,
}

/// A target that is saved together with others.
struct Member {
    record: TargetRecord,
    is_staged: bool,
}

/// Whoever died at work on a tree had all of its targets.
fn of_trees(found: &[Found]) -> BTreeMap<String, Vec<Member>> {
    let mut trees = BTreeMap::<String, Vec<Member>>::new();
    for found in found {
        let Found::Dead(left) = found else { continue };
        if let (Some((attempt, _)), true) = (attempt_of(left), is_of_tree(left)) {
            trees.entry(attempt.to_owned()).or_default().push(Member {
                record: left.head.target.clone(),
                is_staged: is_staged(left),
            });
        }
    }
    trees
}

/// What is known of a save beyond its target.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Durable {
    /// Generation of its image.
    image: Option<u64>,
    /// It is sealed in the spill.
    is_sealed: bool,
    /// What the GPUs of its tree held is sealed in the store.
    gpus_are_sealed: bool,
    /// Who has the job since.
    opened_since: Option<String>,
    /// Why the log, or the spill, says nothing.
    unknown: Option<String>,
    /// It may be sealed for all that is known.
    may_be_sealed: bool,
}

/// What there is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deed {
    Nothing,
    Unlock,
    /// Let its tree go on, have the driver copy all memory back from host memory, and unlock it.
    Unstage,
    /// Give the attempt up, and forget about it.
    Close,
    /// There is nothing to be done ever again.
    Forget,
}

impl Work<'_> {
    fn look(&mut self, found: Found) -> Row {
        match found {
            Found::Alive(head) => Row {
                pid: head.target.pid,
                name: head.target.name,
                state: "unknown".to_owned(),
                job: head.job,
                command: head.command.clone(),
                attempt: None,
                image: None,
                done: "nothing",
                verdict: format!(
                    "ckptstream {} (process {}) is at work on it",
                    head.command, head.by.pid
                ),
                next: "none",
                // Only who asked for this very target wants to hear that it is not theirs.
                code: match self.options.pid {
                    Some(_) => ExitCode::NotOurs,
                    None => ExitCode::Ok,
                },
            },
            Found::Damaged { path, what } => Row {
                pid: 0,
                name: String::new(),
                state: "unknown".to_owned(),
                job: String::new(),
                command: String::new(),
                attempt: None,
                image: None,
                done: "nothing",
                verdict: format!("the journal {} cannot be read: {what}", path.display()),
                next: "human",
                code: ExitCode::Preflight,
            },
            Found::Dead(left) => self.dead(left),
        }
    }

    fn dead(&mut self, left: Left) -> Row {
        let recorded = &left.head.target;
        if let Err(why) = can_be_looked_at(&left) {
            return Row {
                pid: recorded.pid,
                name: recorded.name.clone(),
                state: "unknown".to_owned(),
                job: left.head.job.clone(),
                command: left.head.command.clone(),
                attempt: attempt_of(&left).map(|(attempt, _)| attempt.to_owned()),
                image: None,
                done: "nothing",
                verdict: why,
                next: "human",
                code: ExitCode::Preflight,
            };
        }
        let target = Target::look(recorded.pid)
            .ok()
            .filter(|target| recorded.is(target));
        let state = target.as_ref().map(|target| self.state_of(target));
        let durable = self.durable(&left);
        let (deed, code, verdict) = judge(state, &left, &durable);
        let mut row = Row {
            pid: recorded.pid,
            name: recorded.name.clone(),
            state: match state {
                Some(Some(state)) => state.to_string(),
                Some(None) => "unknown".to_owned(),
                None => "gone".to_owned(),
            },
            job: left.head.job.clone(),
            command: left.head.command.clone(),
            attempt: attempt_of(&left).map(|(attempt, _)| attempt.to_owned()),
            image: durable.image.map(image_id),
            done: "nothing",
            verdict,
            next: next_of(code, state, is_of_tree(&left)),
            code,
        };
        match (deed, target) {
            (Deed::Unlock, Some(target)) => match self.break_seal(&left, &durable) {
                Ok(()) => self.unlock_with_all(&mut row, &target, &left),
                Err(why) => {
                    row.verdict = format!(
                        "it was to be given back, and would run while its save is sealed: {why}"
                    );
                    (row.code, row.next) = (ExitCode::Spilled, ExitCode::Spilled.next());
                }
            },
            (Deed::Unstage, Some(target)) => {
                self.unstage_all(&left);
                self.unlock_with_all(&mut row, &target, &left);
            }
            (Deed::Nothing, Some(target)) if self.options.end && row.next == "end-process" => {
                end(&mut row, &target, tree_of(&left));
            }
            _ => {}
        }
        // What runs or is gone has nothing more to do with the save.
        if matches!(deed, Deed::Close) || row.done == "unlocked" {
            self.close(&mut row, left, &durable);
        } else if deed == Deed::Forget || row.done == "ended" {
            forget(&mut row, left);
        }
        row
    }

    fn state_of(&mut self, target: &Target) -> Option<ProcessState> {
        let driver = self.driver.get_or_insert_with(Driver::open).as_ref();
        driver.ok()?.state(target.pid).ok()
    }

    /// A target that was being given back must not run while its save can still become an image.
    fn break_seal(&self, left: &Left, durable: &Durable) -> Result<(), String> {
        let (true, Some(path), Some((attempt, _))) =
            (durable.is_sealed, &left.head.spill, attempt_of(left))
        else {
            return Ok(());
        };
        let job = JobName::new(&left.head.job).map_err(|error| error.to_string())?;
        let key = Sealed::key(&job, attempt).map_err(|error| error.to_string())?;
        let disk = FileStore::look_into_spill(path, SPILL_DIRECTORY);
        match disk.map_err(|error| one_line(&error))? {
            Some(disk) => self.session.wait(async {
                let claim = disk.claim(job.as_str()).await;
                let claim = claim.map_err(|error| one_line(&error))?;
                // Whoever resumes it now makes an image of it.
                let _claim = claim.ok_or("another save or resume uses the spill")?;
                let deleted = disk.delete(&key).await;
                deleted.map_err(|error| one_line(&error))
            }),
            None => Ok(()),
        }
    }

    /// The targets that were saved together with this one, it included, as far as they are there.
    fn together_with(&self, left: &Left) -> Vec<(Target, bool)> {
        let attempt = attempt_of(left).map(|(attempt, _)| attempt);
        let members = attempt.and_then(|attempt| self.of_trees.get(attempt));
        let there = members.into_iter().flatten().filter_map(|member| {
            let target = Target::look(member.record.pid).ok()?;
            let is_it = member.record.is(&target);
            is_it.then_some((target, member.is_staged))
        });
        there.collect()
    }

    /// All of the tree that are suspended get their memory back; none is unlocked.
    fn unstage_all(&mut self, left: &Left) {
        // The tree may have been stopped for the dump, and with it the driver's own thread. Whoever is gone is not stopped.
        let together = self.together_with(left);
        let went_on = match tree_of(left) {
            Some(tree) => tree.go_on(),
            None => together
                .iter()
                .try_for_each(|(target, _)| target.signal(Signal::CONT)),
        };
        if let Err(error) = went_on {
            tracing::warn!("the tree may be stopped still: {error}");
        }
        for (target, is_staged) in together {
            if !is_staged || self.state_of(&target) != Some(ProcessState::Checkpointed) {
                continue;
            }
            if let Some(Ok(driver)) = &self.driver {
                let unstaged = CheckpointedProcess::attach(driver, target.pid)
                    .and_then(|process| process.unstage(&[]));
                if let Err(error) = unstaged {
                    let why = one_line(&error);
                    tracing::error!("process {} did not get its memory: {why}", target.pid);
                }
                failpoint::pass("recover:one has its memory");
            }
        }
    }

    /// Unlocks it, unless another of its tree has not its memory.
    fn unlock_with_all(&mut self, row: &mut Row, target: &Target, left: &Left) {
        for (other, _) in self.together_with(left) {
            let state = self.state_of(&other);
            if !matches!(state, Some(ProcessState::Locked | ProcessState::Running)) {
                let state = state.map_or_else(|| "unknown".to_owned(), |state| state.to_string());
                row.verdict = format!(
                    "process {} of its tree is {state}, and this one would run without it",
                    other.pid
                );
                (row.code, row.next) = (ExitCode::Lost, ExitCode::Lost.next());
                return;
            }
        }
        let driver = match self.driver.get_or_insert_with(Driver::open) {
            Ok(driver) => Arc::clone(driver),
            Err(_) => return,
        };
        let unlocked = LockedProcess::attach(&driver, target.pid).and_then(LockedProcess::unlock);
        failpoint::pass("recover:unlocked");
        match unlocked {
            Ok(_running) => {
                row.done = "unlocked";
                row.state = ProcessState::Running.to_string();
            }
            Err(error) => {
                row.verdict = format!("it could not be unlocked: {}", one_line(&error));
                (row.code, row.next) = (ExitCode::Lost, ExitCode::Lost.next());
            }
        }
    }

    /// What log and spill know of the save.
    fn durable(&self, left: &Left) -> Durable {
        let mut durable = Durable::default();
        let Some((attempt, next_slot)) = attempt_of(left) else {
            return durable;
        };
        let job = match self.job_of(left) {
            Ok(job) => job,
            Err(why) => {
                durable.unknown = Some(why);
                return durable;
            }
        };
        match self.is_sealed(left, &job, attempt) {
            Ok(is_sealed) => durable.is_sealed = is_sealed,
            Err(why) => {
                durable.may_be_sealed = true;
                durable.unknown = Some(why);
            }
        }
        let store = &*self.session.store;
        if is_of_tree(left) {
            let reading = Sealed::read(store, &job, attempt);
            let read = self
                .session
                .wait(async { tokio::time::timeout(STORE_TIMEOUT, reading).await });
            match read {
                Ok(Ok(sealed)) => durable.gpus_are_sealed = sealed.is_some(),
                Ok(Err(error)) => durable.unknown = Some(one_line(&error)),
                Err(_elapsed) => {
                    durable.unknown =
                        Some(format!("the store did not answer within {STORE_TIMEOUT:?}"));
                }
            }
        }
        let log = self
            .session
            .wait(async { tokio::time::timeout(STORE_TIMEOUT, JobLog::read(store, &job)).await });
        let log = match log {
            Ok(Ok(log)) => log,
            Ok(Err(error)) => {
                durable.unknown = Some(one_line(&error));
                return durable;
            }
            Err(_elapsed) => {
                durable.unknown =
                    Some(format!("the store did not answer within {STORE_TIMEOUT:?}"));
                return durable;
            }
        };
        durable.image = log.entries().find_map(|(slot, entry)| match entry {
            Entry::Image(image) if image.attempt == attempt => Some(slot),
            _ => None,
        });
        durable.opened_since = log
            .opened_by_another(next_slot, attempt)
            .map(|(_slot, there)| there.describe());
        durable
    }

    /// Whether the spill has the save whole. Where it cannot be looked at, it may.
    fn is_sealed(&self, left: &Left, job: &JobName, attempt: &str) -> Result<bool, String> {
        let Some(path) = &left.head.spill else {
            return Ok(false);
        };
        let disk = FileStore::look_into_spill(path, SPILL_DIRECTORY);
        let Some(disk) = disk.map_err(|error| one_line(&error))? else {
            return Ok(false);
        };
        let reading = Sealed::read(&disk, job, attempt);
        let read = self
            .session
            .wait(async { tokio::time::timeout(STORE_TIMEOUT, reading).await });
        match read {
            Ok(Ok(sealed)) => Ok(sealed.is_some()),
            Ok(Err(error)) => Err(one_line(&error)),
            Err(_elapsed) => Err(format!("{} does not answer", path.display())),
        }
    }

    /// The journal's job, when its store is the one that we know.
    fn job_of(&self, left: &Left) -> Result<JobName, String> {
        let (theirs, ours) = (&left.head.store, self.session.store.describe());
        if *theirs != ours {
            return Err(format!(
                "its store is {theirs}, and {ours} is configured (store.url)"
            ));
        }
        JobName::new(&left.head.job).map_err(|error| error.to_string())
    }

    fn close(&self, row: &mut Row, left: Left, durable: &Durable) {
        let (Some((attempt, next_slot)), None, false) = (
            attempt_of(&left),
            durable.image,
            durable.is_sealed && row.done != "unlocked",
        ) else {
            return forget(row, left);
        };
        let job = self
            .job_of(&left)
            .map_err(|why| (ExitCode::RolledBack, why));
        let closed = job.and_then(|job| {
            let closing = self.give_up(&job, attempt, next_slot);
            let closed = self
                .session
                .wait(async { tokio::time::timeout(STORE_TIMEOUT, closing).await });
            closed.unwrap_or_else(|_elapsed| {
                let why = format!("the store did not answer within {STORE_TIMEOUT:?}");
                Err((ExitCode::RolledBack, why))
            })
        });
        match closed {
            Ok(()) => forget(row, left),
            Err((code, why)) => {
                row.verdict = format!(
                    "{}; its attempt is still open in the store: {why}",
                    row.verdict
                );
                if row.code == ExitCode::Ok {
                    (row.code, row.next) = (code, code.next());
                }
            }
        }
    }

    /// Closes an attempt; or what that means to a script, and why it could not be done.
    async fn give_up(
        &self,
        job: &JobName,
        attempt: &str,
        next_slot: u64,
    ) -> Result<(), (ExitCode, String)> {
        let store = &*self.session.store;
        let later = |why: String| (ExitCode::RolledBack, why);
        match append_dropped(store, job, next_slot, &random_hex::<16>(), attempt).await {
            Ok(_) => {}
            // It came about after all, and is nobody's to clean up; or the job is another's, and so is its log.
            Err(error @ AppendError::Fenced { .. }) => {
                let log = JobLog::read(store, job).await;
                return match log.is_ok_and(|log| log.is_image(attempt)) {
                    true => Ok(()),
                    false => Err(later(one_line(&error))),
                };
            }
            // The same configuration would fail again.
            Err(error @ AppendError::Unfit { .. }) => {
                return Err((ExitCode::Preflight, one_line(&error)));
            }
            Err(error) => return Err(later(one_line(&error))),
        }
        failpoint::pass("recover:dropped");
        let prefix = format!("{job}/data/{attempt}/");
        let aborted = store.abort_uploads_under(&prefix).await;
        aborted.map(drop).map_err(|error| later(one_line(&error)))
    }
}

fn forget(row: &mut Row, left: Left) {
    if row.done == "nothing" {
        row.done = "closed";
    }
    if let Err(error) = left.settle() {
        row.verdict = format!("{}; its journal stays: {error}", row.verdict);
    }
}

fn end(row: &mut Row, target: &Target, tree: Option<ProcessTree>) {
    if let Some(Err(error)) = tree.map(|tree| tree.end(DYING_TIMEOUT)) {
        tracing::warn!(
            "not all of the tree of {} could be ended: {error}",
            target.pid
        );
    }
    match target.kill() {
        Ok(()) if target.ends_within(DYING_TIMEOUT) => {
            row.done = "ended";
            row.state = "gone".to_owned();
            row.verdict = format!("{}; it was ended", row.verdict);
            row.next = match row.code {
                ExitCode::Spilled => "resume",
                ExitCode::CommittedTargetAstray | ExitCode::RestoreFailed => "restore",
                _ => "none",
            };
        }
        Ok(()) => row.verdict = format!("{}; it does not end", row.verdict),
        Err(error) => row.verdict = format!("{}; it could not be ended: {error}", row.verdict),
    }
}

/// A target of another node, or of another pid namespace, is not gone because its pid is not here.
fn can_be_looked_at(left: &Left) -> Result<(), String> {
    let (by, recorded) = (&left.head.by, &left.head.target);
    let ours = ProcessIdentity::ours().map_err(|error| one_line(&error))?;
    if recorded.boot_id != ours.boot_id {
        // Of this node, it ended with that boot.
        return match by.host == ours.host {
            true => Ok(()),
            false => Err(format!(
                "it is on {}; run `ckptstream recover` there",
                by.host
            )),
        };
    }
    if by.pid_namespace != ours.pid_namespace {
        let why = "it is in another pid namespace; run `ckptstream recover` in the container that it runs in, or on its node";
        return Err(why.to_owned());
    }
    match Target::look(recorded.pid) {
        Err(error @ TargetError::Look { .. }) => Err(one_line(&error)),
        _ => Ok(()),
    }
}

/// The save, and the slot of the log from which others may have come.
fn attempt_of(left: &Left) -> Option<(&str, u64)> {
    left.steps.iter().find_map(|step| match step {
        Step::Attempt { attempt, next_slot } => Some((attempt.as_str(), *next_slot)),
        _ => None,
    })
}

/// Whether the driver was asked to copy this target's memory into its own host memory.
fn is_staged(left: &Left) -> bool {
    left.steps.contains(&Step::Stage)
}

/// Whether the save was of its whole tree.
fn is_of_tree(left: &Left) -> bool {
    root_of(left).is_some()
}

/// Root of the tree, and when that was started.
fn root_of(left: &Left) -> Option<(u32, u64)> {
    left.steps.iter().find_map(|step| match step {
        Step::Tree { root, root_start } => Some((*root, *root_start)),
        _ => None,
    })
}

/// The tree of a whole save, as far as its root is still there.
fn tree_of(left: &Left) -> Option<ProcessTree> {
    let (root, start) = root_of(left)?;
    let tree = ProcessTree::look(root).ok()?;
    (tree.root().start_time == start).then_some(tree)
}

/// The gravest of the codes says what to do, but for a suspended target that has a durable copy.
fn next_of(code: ExitCode, state: Option<Option<ProcessState>>, is_of_tree: bool) -> &'static str {
    match (code, state) {
        (ExitCode::CommittedTargetAstray, Some(_)) if is_of_tree => "end-process",
        (ExitCode::CommittedTargetAstray, Some(Some(ProcessState::Checkpointed))) => "restore",
        (ExitCode::Fenced | ExitCode::RestoreFailed, Some(_)) => "end-process",
        (ExitCode::RestoreRefused, _) => "restore",
        _ => code.next(),
    }
}

/// The table of the module. `None` is a target that is gone, `Some(None)` one whose state cannot be looked up.
fn judge(
    state: Option<Option<ProcessState>>,
    left: &Left,
    durable: &Durable,
) -> (Deed, ExitCode, String) {
    use ProcessState as S;
    let is_restore = left.head.command == "restore";
    // What is noted may come late: whoever was to be restored and is locked was restored by us.
    let was_locked = left.steps.iter().any(|step| {
        matches!(
            step,
            Step::Lock
                | Step::Unlock
                | Step::Begin
                | Step::Stage
                | Step::GiveBack
                | Step::Restore
                | Step::RestoreComplete
        )
    });
    // The notes are written behind the steps: one of the three is there.
    let is_given_back = !is_restore
        && left
            .steps
            .iter()
            .any(|step| matches!(step, Step::GiveBack | Step::Restore | Step::RestoreComplete))
        && !left
            .steps
            .iter()
            .any(|step| matches!(step, Step::Committed { .. }));
    let copy = match durable {
        Durable {
            image: Some(generation),
            ..
        } => Some((
            ExitCode::CommittedTargetAstray,
            format!("image {} is committed", image_id(*generation)),
        )),
        Durable {
            is_sealed: true, ..
        } => Some((
            ExitCode::Spilled,
            "the save is sealed in the spill".to_owned(),
        )),
        Durable {
            gpus_are_sealed: true,
            ..
        } => Some((
            ExitCode::HostMemoryNotSaved,
            "what the GPUs of its tree held is sealed in the store".to_owned(),
        )),
        _ => None,
    };
    let unknown = durable.unknown.as_ref().map_or_else(
        || "nothing of the save is durable".to_owned(),
        |why| format!("whether the save is durable is not known ({why})"),
    );
    match (state, copy) {
        (None, Some((ExitCode::Spilled, told))) => (Deed::Nothing, ExitCode::Spilled, told),
        (None, Some((ExitCode::HostMemoryNotSaved, _))) => {
            let told = "the target is gone, and with it what the sealed memory of its GPUs belongs to";
            (Deed::Close, ExitCode::Ok, told.to_owned())
        }
        (None, Some((_, told))) => (Deed::Forget, ExitCode::Ok, told),
        (None, None) if durable.may_be_sealed => (
            Deed::Nothing,
            ExitCode::RolledBack,
            format!("the target is gone, and {unknown}"),
        ),
        (None, None) => (Deed::Close, ExitCode::Ok, "the target is gone".to_owned()),
        (Some(Some(S::Running)), _) => (Deed::Close, ExitCode::Ok, "the target runs".to_owned()),
        (Some(Some(S::Locked)), _) if is_given_back && durable.opened_since.is_some() => {
            let told = "the target was to be given back, and the job lives elsewhere since: it must not run";
            (Deed::Nothing, ExitCode::Fenced, told.to_owned())
        }
        (Some(Some(S::Locked)), _) if is_given_back && durable.unknown.is_some() => (
            Deed::Nothing,
            ExitCode::Preflight,
            format!("the target was to be given back, and {unknown}"),
        ),
        (Some(Some(S::Locked)), _) if was_locked => (
            Deed::Unlock,
            ExitCode::Ok,
            "the target was locked by us, with its memory its own".to_owned(),
        ),
        (Some(Some(S::Locked)), _) => (
            Deed::Nothing,
            ExitCode::NotOurs,
            "the target is locked, and not by us".to_owned(),
        ),
        (Some(Some(S::Restoring | S::Failed)), _) if is_restore => (
            Deed::Nothing,
            ExitCode::RestoreFailed,
            "the target got a part of its memory; it can only be ended, and the image be restored again"
                .to_owned(),
        ),
        (Some(Some(S::Checkpointed)), _) if durable.opened_since.is_some() => {
            let who = durable.opened_since.clone().unwrap_or_default();
            let told = format!("{who} since: the job lives elsewhere, and this process is to be ended");
            (Deed::Nothing, ExitCode::Fenced, told)
        }
        (Some(Some(S::Checkpointed)), Some((ExitCode::CommittedTargetAstray, told)))
            if is_of_tree(left) =>
        {
            let told = format!("{told}, of the whole tree; this one is to be ended");
            (Deed::Nothing, ExitCode::CommittedTargetAstray, told)
        }
        (Some(Some(S::Checkpointed)), None)
            if is_of_tree(left) && durable.unknown.is_some() =>
        (
            Deed::Nothing,
            ExitCode::Preflight,
            format!("the target was saved with its tree, and {unknown}"),
        ),
        (Some(Some(S::Checkpointed)), None) if is_staged(left) => (
            Deed::Unstage,
            ExitCode::Ok,
            "the target had its memory in host memory, and no image came about".to_owned(),
        ),
        (Some(Some(S::Checkpointed)), _) if is_restore => (
            Deed::Nothing,
            ExitCode::RestoreRefused,
            "the driver was not asked to restore it yet; restore it again".to_owned(),
        ),
        (Some(Some(S::Checkpointed)), Some((code, told))) => {
            let what = match (code, root_of(left)) {
                (ExitCode::Spilled, _) => "`ckptstream resume` finishes it, and `ckptstream restore --pid` brings the target back".to_owned(),
                (_, Some((root, _))) => format!("`ckptstream restore --pid {root}` brings the tree back"),
                _ => "`ckptstream restore --pid` brings the target back".to_owned(),
            };
            (Deed::Nothing, code, format!("{told}; {what}"))
        }
        (Some(Some(S::Checkpointing)), Some((ExitCode::HostMemoryNotSaved, told))) => (
            Deed::Nothing,
            ExitCode::Lost,
            format!("{told}, and this process did not let it go; the tree can only be ended"),
        ),
        (Some(Some(S::Checkpointing)), Some((code, told))) => (
            Deed::Nothing,
            code,
            format!("{told}; this process can only be ended"),
        ),
        (Some(Some(state)), _) => (
            Deed::Nothing,
            ExitCode::Lost,
            format!("the target is {state}, and {unknown}"),
        ),
        (Some(None), _) => (
            Deed::Nothing,
            ExitCode::Preflight,
            "the driver does not tell the target's state".to_owned(),
        ),
    }
}

#[cfg(test)]
mod tests;
