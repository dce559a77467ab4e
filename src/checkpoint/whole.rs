//! The story out for a whole process tree, on drivers without custom storage: lock all → stage all → CRIU dump, streamed → land → commit → end the tree.
//!
//! In: the root of a running tree, one or more of whose processes use GPUs. Out: a committed image of all of it, and the tree ended (or running again, `--then resume`).
//!
//! | step | image | the tree | exit |
//! |---|---|---|---|
//! | prepare | nothing | running, untouched | 2, 3, 4, 7 or 10 |
//! | lock all | nothing | unlocked again, the last one first; after a kill a guard unlocks each | 10 |
//! | stage all | nothing | GPU memory is in host memory: given back, and unlocked | 10, else 12 |
//! | dump, land | parts that no log entry names | stopped: let go on, given back, unlocked | 10, else 12 |
//! | commit, answer lost | unknown | stopped | 13 |
//! | another writer has the job | another's | stopped | 15 |
//! | committed | this one | ended, or given back | 0, else 14 |
//!
//! The bytes are in the tree's own host memory all the while, so until the commit every failure has a way back. The driver's own thread lives in the tree: it goes on before the driver is asked.

mod prepare;

use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::attempt::Attempt;
use super::commit::{Captured, CapturedTree, commit};
use super::memory::HostMemory;
use super::{Then, is_given_up, land, look, may_go_on, named, not_begun};
use crate::config::{Config, DriverMode, HostSave};
use crate::custody::Custody;
use crate::driver::{
    CheckpointedProcess, Driver, DriverError, LockedProcess, ProcessState, RunningProcess,
};
use crate::error::{ExitCode, Failure, Phase, TargetState, one_line};
use crate::failpoint;
use crate::host::{Capture, Criu, CriuError, DumpRoot, ImagesDir, ProcessTree, Watch, wanted_by};
use crate::image::Image;
use crate::journal::Step;
use crate::manifest::{CaptureMode, HostFiles};
use crate::outcome::{Outcome, StageOutcome};
use crate::ownership::WhileSaved;
use crate::phases::PhaseClock;
use crate::pipeline::{self, PipelineError, Saved};
use crate::restore;
use crate::session::Session;
use crate::target::Target;
use crate::watchdog;
use prepare::{Prepared, prepare};

pub(crate) use prepare::gpu_users;

/// How long a dump may take when there is no deadline.
const DUMP_LIMIT: Duration = Duration::from_secs(3600);
/// How long an ended tree may take to be gone.
const END_LIMIT: Duration = Duration::from_secs(30);
/// The driver copies GPU memory to host memory at 1 to 2 GB/s.
const STAGING_USUAL: Duration = Duration::from_secs(300);

/// Whether saves are of the whole tree: they are asked for, or this driver has no other.
pub(super) fn is_asked_for(config: &Config) -> bool {
    match (config.driver.mode, config.host.save) {
        (DriverMode::Staged, _) | (_, HostSave::Always) => true,
        (DriverMode::CustomStorage, _) | (_, HostSave::Never) => false,
        (DriverMode::Auto, HostSave::Auto) => {
            Criu::find(&config.host).is_ok()
                && Driver::open().is_ok_and(|driver| {
                    driver.require_custom_storage().is_err() && driver.require_checkpoint().is_ok()
                })
        }
    }
}

/// Saves the tree of this root.
///
/// # Errors
/// A [`Failure`] with the code of PROTOCOL section 6, the targets as looked up, and the cause.
pub(super) fn checkpoint(
    session: &Session,
    root: u32,
    then: Then,
    while_saved: WhileSaved,
    nonce: &str,
) -> Result<Outcome, Failure> {
    let _named = named(nonce).entered();
    let mut clock = PhaseClock::start(&session.meter, Phase::Prepare);
    let prepared = prepare(session, root, while_saved, nonce)?;
    let saved = save(session, &mut clock, then, prepared);
    Ok(Outcome {
        seconds: clock.finish(),
        ..saved?
    })
}

/// What every step works with.
struct Around<'a> {
    session: &'a Session,
    driver: &'a Arc<Driver>,
    /// As it was before the lock.
    tree: &'a ProcessTree,
    custodies: &'a [Custody],
}

impl Around<'_> {
    fn root(&self) -> &Target {
        self.tree.root()
    }

    fn targets(&self) -> Vec<TargetState> {
        let looked = self.custodies.iter();
        looked
            .map(|custody| look(self.driver, &custody.target))
            .collect()
    }

    /// A failure, with the members as they are now: 10 where all that there are run.
    fn failed(&self, phase: Phase, cause: Box<dyn Error + Send + Sync>) -> Failure {
        let targets = self.targets();
        let is = |target: &TargetState, state: &str| target.state == state;
        let all_are = |state: &str| targets.iter().all(|it| is(it, state) || is(it, "gone"));
        let code = match () {
            () if all_are("gone") => ExitCode::NothingToSave,
            // One that ended by itself meanwhile is nobody's failure.
            () if all_are("running") => ExitCode::RolledBack,
            () => ExitCode::Lost,
        };
        Failure {
            targets,
            ..Failure::new(code, phase, cause)
        }
    }
}

fn save(
    session: &Session,
    clock: &mut PhaseClock,
    then: Then,
    prepared: Prepared,
) -> Result<Outcome, Failure> {
    let Prepared {
        driver,
        criu,
        tree,
        members,
        attempt,
        mut memory,
        expected,
    } = prepared;
    let (custodies, running): (Vec<Custody>, Vec<RunningProcess>) = members.into_iter().unzip();
    let around = Around {
        session,
        driver: &driver,
        tree: &tree,
        custodies: &custodies,
    };
    let work = AssertUnwindSafe(|| {
        save_locked(&around, clock, then, running, |clock| {
            dump_and_commit(&around, clock, &criu, &attempt, &mut memory, expected)
        })
    });
    let saved = catch_unwind(work).unwrap_or_else(|panic| {
        // What is staged stays so, and is written down: `recover` gives it back.
        let cause = PipelineError::of_story(panic.as_ref());
        let failure = around.failed(clock.phase(), cause.into());
        Err(match clock.phase() {
            // The tree is ended behind the commit alone.
            Phase::Complete => Failure {
                code: ExitCode::CommittedTargetAstray,
                ..failure
            },
            _ => failure,
        })
    });
    let code = match &saved {
        Ok(_) => ExitCode::Ok,
        Err(failure) => failure.code,
    };
    let result = match saved {
        Ok(saved) => {
            // Of a tree that was ended there is nothing to look at.
            let targets = match saved.runs {
                true => around.targets(),
                false => Vec::new(),
            };
            Ok(Outcome {
                seconds_locked: saved
                    .free_again
                    .duration_since(saved.locked_at)
                    .as_secs_f64(),
                stages: saved.dumped.stages,
                slowest_stage: saved.dumped.slowest_stage,
                memory_planned: memory.planned(),
                ..restore::outcome_of(session, &saved.dumped.image, targets, Vec::new())
            })
        }
        Err(mut failure) => {
            let left = attempt.close(session, &[], is_given_up(&failure));
            failure.attached.extend(left);
            Err(failure)
        }
    };
    for custody in custodies {
        custody.end(code);
    }
    result
}

/// A save that is committed.
struct SavedTree {
    dumped: Dumped,
    /// The tree goes on; else it was ended.
    runs: bool,
    locked_at: Instant,
    free_again: Instant,
}

/// From the first lock on.
fn save_locked(
    around: &Around<'_>,
    clock: &mut PhaseClock,
    then: Then,
    running: Vec<RunningProcess>,
    dump_and_commit: impl FnOnce(&mut PhaseClock) -> Result<(ProcessTree, Dumped), Failure>,
) -> Result<SavedTree, Failure> {
    let locked_at = clock.enter(Phase::Lock);
    let locked = lock_all(around, running)?;
    failpoint::pass("lock:locked");
    clock.enter(Phase::Begin);
    let staged = stage_all(around, locked)?;
    let done = catch_unwind(AssertUnwindSafe(|| {
        failpoint::pass("stage:all staged");
        dump_and_commit(clock)
    }));
    let done = done.unwrap_or_else(|panic| {
        let code = match clock.phase() {
            Phase::Commit => ExitCode::CommitUnknown,
            _ => ExitCode::Lost,
        };
        let cause = PipelineError::of_story(panic.as_ref());
        Err(Failure::new(code, clock.phase(), cause))
    });
    let (tree, dumped) = match done {
        Ok(done) => done,
        Err(failure) => return Err(give_back(around, clock, staged, failure)),
    };
    let is_to_run = match then {
        Then::Suspend => false,
        Then::Resume => true,
        Then::ResumeUnlessDue => around.session.deadline().is_none(),
    };
    clock.enter(match is_to_run {
        true => Phase::Restore,
        false => Phase::Complete,
    });
    let ended = match is_to_run {
        true => bring_back(around, staged),
        false => end(around, &tree),
    };
    ended.map_err(|cause| Failure {
        generation: Some(dumped.image.generation),
        targets: around.targets(),
        ..Failure::new(ExitCode::CommittedTargetAstray, clock.phase(), cause)
    })?;
    Ok(SavedTree {
        dumped,
        runs: is_to_run,
        locked_at,
        free_again: Instant::now(),
    })
}

/// Locks every member. One that cannot be locked unlocks those before it, the last one first.
fn lock_all(
    around: &Around<'_>,
    running: Vec<RunningProcess>,
) -> Result<Vec<LockedProcess>, Failure> {
    let session = around.session;
    let mut locked = Vec::with_capacity(running.len());
    let all = around.custodies.iter().zip(running);
    let result = all
        .map(|(custody, running)| {
            may_go_on(session)?;
            custody.step(&Step::Lock)?;
            custody.may_be_locked();
            let timeout = session.config.driver.lock_timeout;
            let call = "the driver's lock (cuCheckpointProcessLock)";
            let done = watchdog::watch(call, timeout, || running.lock(timeout));
            locked.push(done.inspect_err(|_error| custody.must_not_be_unlocked())?);
            Ok(())
        })
        .collect::<Result<Vec<()>, Box<dyn Error + Send + Sync>>>()
        .and_then(|_all| {
            may_go_on(session)?;
            // One that came up since would compute on, and be torn away from the others.
            let users = gpu_users(around.driver, around.root().pid)?;
            let known = |pid: &u32| around.custodies.iter().any(|it| it.target.pid == *pid);
            match users.into_iter().find(|(pid, _)| !known(pid)) {
                Some((pid, _)) => Err(NewGpuUser { pid }.into()),
                None => Ok(()),
            }
        });
    match result {
        Ok(()) => Ok(locked),
        Err(cause) => {
            let mut attached = Vec::new();
            for process in locked.into_iter().rev() {
                attached.extend(process.unlock().err().map(|error| one_line(&error)));
            }
            for custody in around.custodies {
                custody.must_not_be_unlocked();
            }
            let mut failure = match around.custodies {
                // What it means to be refused is told apart there.
                [only] => not_begun(session, around.driver, &only.target, Phase::Lock, cause),
                _ => around.failed(Phase::Lock, cause),
            };
            failure.attached.extend(attached);
            Err(failure)
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("process {pid} of the tree began to use a GPU while the others were locked; save again")]
struct NewGpuUser {
    pid: u32,
}

/// The driver copies every member's GPU memory into its host memory, one after the other. Where it does not, those before get theirs back, and all are unlocked.
fn stage_all(
    around: &Around<'_>,
    locked: Vec<LockedProcess>,
) -> Result<Vec<CheckpointedProcess>, Failure> {
    let mut staged = Vec::with_capacity(locked.len());
    let mut waiting = locked.into_iter();
    let mut failed = None;
    for (custody, process) in around.custodies.iter().zip(waiting.by_ref()) {
        if let Err(error) = custody.step(&Step::Stage {
            root: around.root().pid,
            root_start: around.root().start_time,
        }) {
            failed = Some((Some(process), error.into()));
            break;
        }
        custody.must_not_be_unlocked();
        let call = "the driver's checkpoint to host memory (cuCheckpointProcessCheckpoint)";
        match watchdog::watch(call, STAGING_USUAL, || process.stage()) {
            Ok(process) => staged.push(process),
            Err(mut error) => {
                let locked = error.locked.take();
                let cause: Box<dyn Error + Send + Sync> = error.into();
                failed = Some((locked, cause));
                break;
            }
        }
        failpoint::pass("stage:one staged");
    }
    let Some((locked, cause)) = failed else {
        return Ok(staged);
    };
    let mut attached = Vec::new();
    for process in locked.into_iter().chain(waiting) {
        attached.extend(process.unlock().err().map(|error| one_line(&error)));
    }
    if let Err(error) = unstage_and_unlock(around, staged) {
        attached.push(one_line(error.as_ref()));
    }
    let mut failure = around.failed(Phase::Begin, cause);
    failure.attached.extend(attached);
    Err(failure)
}

/// What CRIU and the pipeline made of the tree.
struct Dumped {
    image: Image,
    stages: Vec<StageOutcome>,
    slowest_stage: Option<String>,
}

/// The tree's images flow to the store; what has landed becomes an image. The tree is stopped then.
fn dump_and_commit(
    around: &Around<'_>,
    clock: &mut PhaseClock,
    criu: &Criu,
    attempt: &Attempt,
    memory: &mut HostMemory,
    expected: u64,
) -> Result<(ProcessTree, Dumped), Failure> {
    let session = around.session;
    // A failure here says how things stand when it was given back; until then the code is that of what is lost if it cannot be.
    let failed = |phase: Phase, cause: Box<dyn Error + Send + Sync>| {
        Failure::new(ExitCode::Lost, phase, cause)
    };
    clock.enter(Phase::Stream);
    let dumping = dump(around, criu, attempt, memory, expected);
    let (saved, files) = dumping.map_err(|cause| failed(Phase::Stream, cause))?;
    let Saved {
        lanes,
        stages,
        slowest_stage,
    } = saved;
    failpoint::pass("stream:all acknowledged");
    let tree = ProcessTree::look(around.root().pid);
    let tree = tree.map_err(|error| failed(Phase::Stream, error.into()))?;

    clock.enter(Phase::Land);
    let store = &*session.store_after_begin;
    let etags = land(session, store, &lanes).map_err(|error| failed(Phase::Land, error.into()))?;
    failpoint::pass("land:all landed");

    clock.enter(Phase::Commit);
    may_go_on(session).map_err(|cause| failed(Phase::Commit, cause))?;
    for custody in around.custodies {
        if !custody.target.is_alive() {
            let pid = custody.target.pid;
            let died = super::VoidError::Died { pid };
            return Err(failed(Phase::Commit, died.into()));
        }
    }
    // What goes on after the dump would be ended under an older image of itself.
    if let Some(process) = tree.processes().iter().find(|it| !is_stopped(it)) {
        let pid = process.pid;
        return Err(failed(Phase::Commit, NotStill { pid }.into()));
    }
    let captured = Captured {
        driver: around.driver,
        mode: CaptureMode::Staged,
        members: around.custodies.iter().map(|it| &it.target).collect(),
        tree: Some(CapturedTree {
            root: tree.root().own_pid(),
            pids: tree.own_pids(),
            stdio: tree.root().standard_streams(),
            criu: criu.version.clone(),
            files: HostFiles {
                wanted: wanted_by(&tree),
                ..files
            },
        }),
    };
    let image = commit(session, &captured, attempt, lanes, etags).map_err(|error| Failure {
        code: error.code(),
        ..failed(Phase::Commit, error.into())
    })?;
    for custody in around.custodies {
        custody.note(Step::Committed {
            generation: image.generation,
        });
    }
    let dumped = Dumped {
        image,
        stages,
        slowest_stage,
    };
    Ok((tree, dumped))
}

fn is_stopped(process: &Target) -> bool {
    process.why_not_scheduled() == Some("stopped")
}

#[derive(Debug, thiserror::Error)]
#[error(
    "process {pid} of the tree was dumped, and is not stopped any more: somebody let it go on (SIGCONT); the save is void"
)]
struct NotStill {
    pid: u32,
}

/// CRIU writes, the pipeline reads. What CRIU says comes first: when it has failed, what it wrote is of no moment.
fn dump(
    around: &Around<'_>,
    criu: &Criu,
    attempt: &Attempt,
    memory: &mut HostMemory,
    expected: u64,
) -> Result<(Saved, HostFiles), Box<dyn Error + Send + Sync>> {
    let session = around.session;
    let dir = ImagesDir::make()?;
    let watch = Arc::new(Watch::default());
    let (files_out, files_in) = mpsc::channel();
    let capture = Capture::listen(dir.path(), Arc::clone(&watch), files_out)?;
    let Some(open) = attempt.uploads.first() else {
        unreachable!("an upload was opened for the host memory");
    };
    let source = (Box::new(capture) as _, expected);
    let (lane, encoders, resources) = memory.lane(session, source, open);
    let run = criu.dump(DumpRoot::of(around.root())?, dir.path(), DUMP_LIMIT)?;
    failpoint::pass("dump:begun");
    let (ran, saved) = std::thread::scope(|scope| {
        let running = scope.spawn(|| {
            // Until the commit there is a way back, so a signal is obeyed.
            run.wait(&watch, || may_go_on(session).is_err())
        });
        let saved = pipeline::save(vec![lane], encoders, resources);
        if saved.is_err() {
            watch.give_up();
        }
        let ran = running.join();
        (
            ran.unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            saved,
        )
    });
    if ran.is_err() || saved.is_err() {
        may_go_on(session)?;
    }
    match (ran, saved) {
        // The pipeline failed by itself, and has ended it.
        (Err(CriuError::GivenUp { .. }), Err(error))
        | (Err(CriuError::Failed { .. }), Err(error @ PipelineError::Store(_))) => {
            Err(error.into())
        }
        (Err(error), _) => Err(error.into()),
        (Ok(()), Err(error)) => Err(error.into()),
        (Ok(()), Ok(saved)) => Ok((saved, files_in.recv()?)),
    }
}

/// No image will be: every member gets its memory back, and runs. Not where an image may exist, or the job is another's.
fn give_back(
    around: &Around<'_>,
    clock: &mut PhaseClock,
    staged: Vec<CheckpointedProcess>,
    failure: Failure,
) -> Failure {
    if matches!(failure.code, ExitCode::CommitUnknown | ExitCode::Fenced) {
        return Failure {
            targets: around.targets(),
            ..failure
        };
    }
    clock.enter(Phase::Restore);
    let given = bring_back(around, staged);
    let looked = around.failed(failure.phase, failure.cause);
    let mut failure = Failure {
        attached: failure.attached,
        notes: failure.notes,
        ..looked
    };
    match given {
        Ok(()) => failure
            .notes
            .push("the tree was given its GPU memory back".to_owned()),
        Err(error) => failure.attached.push(format!(
            "the tree did not get its GPU memory back: {}",
            one_line(error.as_ref())
        )),
    }
    failure
}

/// The tree goes on, every member gets its memory back, and then all are unlocked.
fn bring_back(
    around: &Around<'_>,
    staged: Vec<CheckpointedProcess>,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    // Whoever has ended is not stopped; those whose parent has ended are no descendants any more.
    let now = ProcessTree::look(around.root().pid);
    for tree in now.iter().chain([around.tree]) {
        if let Err(error) = tree.go_on() {
            tracing::warn!("a process of the tree may be stopped still: {error}");
        }
    }
    unstage_and_unlock(around, staged)
}

/// No member is unlocked before all have their memory.
fn unstage_and_unlock(
    around: &Around<'_>,
    staged: Vec<CheckpointedProcess>,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let mut first: Option<Box<dyn Error + Send + Sync>> = None;
    let has_ended = |custody: &Custody| custody.target.ends_within(super::DYING_TIMEOUT);
    let mut locked = Vec::with_capacity(staged.len());
    for (custody, process) in around.custodies.iter().zip(staged) {
        custody.note(Step::Restore);
        let call = "the driver's restore from host memory (cuCheckpointProcessRestore)";
        match watchdog::watch(call, STAGING_USUAL, || process.unstage(&[])) {
            Ok(process) => {
                custody.note(Step::RestoreComplete);
                locked.push((custody, process));
            }
            Err(_) if has_ended(custody) => {}
            Err(error) => keep_first(&mut first, error),
        }
        failpoint::pass("give-back:one has its memory");
    }
    if let Some(error) = first {
        return Err(error);
    }
    for (custody, process) in locked {
        custody.may_be_locked();
        let call = "the driver's unlock (cuCheckpointProcessUnlock)";
        match watchdog::watch(call, watchdog::USUAL, || process.let_go()) {
            Ok(()) => custody.must_not_be_unlocked(),
            Err(_) if has_ended(custody) => {}
            Err(error) => keep_first(&mut first, error),
        }
    }
    if let Some(error) = first {
        return Err(error);
    }
    for custody in around.custodies {
        let pid = custody.target.pid;
        match around.driver.state(pid) {
            Ok(ProcessState::Running) => {}
            Err(_) if custody.target.ends_within(super::DYING_TIMEOUT) => {}
            Ok(found) => {
                let needed = ProcessState::Running;
                return Err(DriverError::WrongState { pid, found, needed }.into());
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The first failure is told in the end, the others at once.
fn keep_first(first: &mut Option<Box<dyn Error + Send + Sync>>, error: DriverError) {
    match first {
        Some(_) => tracing::error!("another process of the tree: {}", one_line(&error)),
        None => *first = Some(error.into()),
    }
}

/// The image is committed: the tree is ended.
fn end(around: &Around<'_>, tree: &ProcessTree) -> Result<(), Box<dyn Error + Send + Sync>> {
    for custody in around.custodies {
        custody.note(Step::EndTree);
        custody.flush();
    }
    match tree.end(END_LIMIT)? {
        true => Ok(()),
        false => Err(StillThere.into()),
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the tree was ended (SIGKILL), and is not gone after {END_LIMIT:?}")]
struct StillThere;
