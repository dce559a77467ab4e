//! The story out for a whole process tree: lock all → begin all, stream, seal, complete all (or, without custom storage, stage all) → CRIU dump, streamed → land → commit → end the tree.
//!
//! In: the root of a running tree, one or more of whose processes use GPUs. Out: a committed image of all of it, and the tree ended (or running again, `--then resume`).
//!
//! | step | image | the tree | exit |
//! |---|---|---|---|
//! | prepare | nothing | running, untouched | 2, 3, 4, 7 or 10 |
//! | lock all | nothing | unlocked again, the last one first; after a kill a guard unlocks each | 10 |
//! | begin all, stream, seal | nothing | its memory is mapped by us; what was begun before one that is refused is sealed, and given back | 12; 10 of what was given back |
//! | stage all | nothing | GPU memory is in host memory: given back, and unlocked | 10, else 12 |
//! | dump, land | parts that no log entry names | CRIU is asked once more; then the tree is let go on, given back, unlocked | 10; else 16 where the GPUs' memory is sealed, 12 where it is not |
//! | commit, answer lost | unknown | stopped | 13 |
//! | another writer has the job | another's | stopped | 15 |
//! | committed | this one | ended, or given back | 0, else 14 |
//!
//! From the seal on (or, staged, all the while) the GPUs' bytes are somewhere, so until the commit every failure has a way back. The driver's own thread lives in the tree: it goes on before the driver is asked.

mod prepare;
mod staged;
mod streamed;

use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::attempt::{Attempt, Holds, OpenUpload};
use super::commit::{Captured, CapturedTree, commit, write_tables};
use super::memory::Memory;
use super::{
    Asked, Then, is_given_up, land, look, may_go_on, named, not_begun, was_refused_by_state,
};
use crate::config::{Config, DriverMode, HostSave};
use crate::custody::Custody;
use crate::driver::{CheckpointedProcess, Driver, DriverError, LockedProcess, RunningProcess};
use crate::error::{ExitCode, Failure, Phase, TargetState, one_line};
use crate::failpoint;
use crate::host::{Capture, Criu, CriuError, DumpRoot, ImagesDir, ProcessTree, Watch, wanted_by};
use crate::image::Image;
use crate::journal::Step;
use crate::manifest::{CaptureMode, HostFiles};
use crate::outcome::{Outcome, StageOutcome};
use crate::ownership::WhileSaved;
use crate::phases::PhaseClock;
use crate::pipeline::{self, PipelineError, Saved, all_runs, slowest};
use crate::restore;
use crate::session::Session;
use crate::store::{Key, Store};
use crate::target::Target;
use crate::watchdog;
use prepare::{Prepared, prepare};

pub(crate) use prepare::gpu_users;

/// How long a dump may take when there is no deadline.
const DUMP_LIMIT: Duration = Duration::from_secs(3600);
/// How long an ended tree may take to be gone.
const END_LIMIT: Duration = Duration::from_secs(30);
/// See [`super::saves_whole_trees`].
pub(super) fn is_asked_for(config: &Config, asked: Asked) -> bool {
    match (config.driver.mode, config.host.save) {
        (DriverMode::Staged, _) | (_, HostSave::Always) => true,
        (DriverMode::CustomStorage, _) | (_, HostSave::Never) => false,
        (DriverMode::Auto, HostSave::Auto) => {
            let has_a_way_back =
                !config.run.restore_command.is_empty() || config.run.allow_gpu_only;
            let must_be = asked == Asked::ForAJob && !has_a_way_back;
            Criu::find(&config.host).is_ok()
                && Driver::open().is_ok_and(|driver| {
                    driver.require_checkpoint().is_ok()
                        && (must_be || driver.require_custom_storage().is_err())
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
    criu: &'a Criu,
    mode: CaptureMode,
    /// As it was before the lock.
    tree: &'a ProcessTree,
    custodies: &'a [Custody],
    attempt: &'a Attempt,
    /// The store has the GPUs' memory of all members.
    is_sealed: AtomicBool,
}

impl Around<'_> {
    fn root(&self) -> &Target {
        self.tree.root()
    }

    fn members(&self) -> Vec<&Target> {
        self.custodies.iter().map(|it| &it.target).collect()
    }

    fn targets(&self) -> Vec<TargetState> {
        let looked = self.custodies.iter();
        looked
            .map(|custody| look(self.driver, &custody.target))
            .collect()
    }

    /// A failure, with the members as they are now: 10 where all that there are run, 16 where all are there, suspended, and their memory is sealed.
    fn failed(&self, phase: Phase, cause: Box<dyn Error + Send + Sync>) -> Failure {
        let targets = self.targets();
        let is = |target: &TargetState, state: &str| target.state == state;
        let all_are = |state: &str| targets.iter().all(|it| is(it, state) || is(it, "gone"));
        let code = match () {
            () if all_are("gone") => ExitCode::NothingToSave,
            // One that ended by itself meanwhile is nobody's failure.
            () if all_are("running") => ExitCode::RolledBack,
            // A tree of which one has died does not come back.
            () if targets.iter().all(|it| is(it, "checkpointed"))
                && self.is_sealed.load(Ordering::Relaxed) =>
            {
                ExitCode::HostMemoryNotSaved
            }
            () => ExitCode::Lost,
        };
        let mut failure = Failure::new(code, phase, cause);
        failure.targets = targets;
        if code == ExitCode::HostMemoryNotSaved {
            failure.notes.push(format!(
                "the GPUs' memory of the tree is sealed in the store: `ckptstream restore --pid {}` brings it back as long as this node, and the tree, are there",
                self.root().pid
            ));
        }
        failure
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
        mode,
        tree,
        members,
        attempt,
        mut memory,
    } = prepared;
    let (custodies, running): (Vec<Custody>, Vec<RunningProcess>) = members.into_iter().unzip();
    let around = Around {
        session,
        driver: &driver,
        criu: &criu,
        mode,
        tree: &tree,
        custodies: &custodies,
        attempt: &attempt,
        is_sealed: AtomicBool::new(false),
    };
    let work = AssertUnwindSafe(|| save_locked(&around, clock, then, running, &mut memory));
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
            // Those for GPUs without data, and for a dump that was not needed.
            for leftover in attempt.abort_uploads(session, &saved.dumped.landed) {
                tracing::warn!("{leftover}");
            }
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

/// Every member is suspended, and its GPUs' memory let go.
struct Suspended {
    processes: Vec<CheckpointedProcess>,
    gpus: Gpus,
}

/// Where the GPUs' memory is.
enum Gpus {
    /// In the host memory of the tree itself.
    Staged,
    /// In the store.
    Sealed(Box<streamed::Sealed>),
}

/// From the first lock on.
fn save_locked(
    around: &Around<'_>,
    clock: &mut PhaseClock,
    then: Then,
    running: Vec<RunningProcess>,
    memory: &mut Memory,
) -> Result<SavedTree, Failure> {
    let locked_at = clock.enter(Phase::Lock);
    let locked = lock_all(around, running)?;
    failpoint::pass("lock:locked");
    clock.enter(Phase::Begin);
    let suspended = match around.mode {
        CaptureMode::Staged => Suspended {
            processes: staged::stage_all(around, locked)?,
            gpus: Gpus::Staged,
        },
        CaptureMode::CustomStorage => {
            let (processes, sealed) = streamed::seal_all(around, clock, locked, memory)?;
            let gpus = Gpus::Sealed(Box::new(sealed));
            Suspended { processes, gpus }
        }
    };
    let done = catch_unwind(AssertUnwindSafe(|| {
        failpoint::pass("dump:all suspended");
        dump_and_commit(around, clock, memory, &suspended.gpus)
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
        Err(failure) => return Err(give_back(around, clock, suspended, failure)),
    };
    let is_to_run = match then {
        Then::Suspend => false,
        Then::Resume => true,
        Then::ResumeUnlessDue => around.session.deadline().is_none(),
    };
    let ended = match is_to_run {
        true => bring_back(around, clock, suspended),
        false => {
            clock.enter(Phase::Complete);
            end(around, &tree)
        }
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
                _ => {
                    let is_anothers = was_refused_by_state(cause.as_ref()) && attached.is_empty();
                    let failure = around.failed(Phase::Lock, cause);
                    match (is_anothers, failure.code) {
                        (true, ExitCode::Lost) => Failure {
                            code: ExitCode::NotOurs,
                            ..failure
                        },
                        _ => failure,
                    }
                }
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

/// What CRIU and the pipeline made of the tree.
struct Dumped {
    image: Image,
    /// Keys of its data objects.
    landed: Vec<Key>,
    stages: Vec<StageOutcome>,
    slowest_stage: Option<String>,
}

/// The tree's images flow to the store; what has landed becomes an image. The tree is stopped then.
fn dump_and_commit(
    around: &Around<'_>,
    clock: &mut PhaseClock,
    memory: &mut Memory,
    gpus: &Gpus,
) -> Result<(ProcessTree, Dumped), Failure> {
    let (session, attempt) = (around.session, around.attempt);
    // A failure here says how things stand when it was given back; until then the code is that of what is lost if it cannot be.
    let failed = |phase: Phase, cause: Box<dyn Error + Send + Sync>| {
        Failure::new(ExitCode::Lost, phase, cause)
    };
    clock.enter(Phase::Dump);
    let dumping = dump_or_once_more(around, memory);
    let (saved, files) = dumping.map_err(|cause| failed(Phase::Dump, cause))?;
    let Saved { lanes, stages, .. } = saved;
    failpoint::pass("dump:all acknowledged");
    let tree = ProcessTree::look(around.root().pid);
    let tree = tree.map_err(|error| failed(Phase::Dump, error.into()))?;

    clock.enter(Phase::Land);
    let store = &*session.store_after_begin;
    let etags = land(session, store, &lanes).map_err(|error| failed(Phase::Land, error.into()))?;
    let mut landed: Vec<Key> = lanes.iter().map(|lane| lane.key.clone()).collect();
    failpoint::pass("dump:all landed");

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
        mode: around.mode,
        members: around.members(),
        tree: Some(CapturedTree {
            root: tree.root().own_pid(),
            pids: tree.own_pids(),
            stdio: tree.root().standard_streams(),
            criu: around.criu.version.clone(),
            files: HostFiles {
                wanted: wanted_by(&tree),
                ..files
            },
        }),
    };
    let into = (store as &dyn Store, attempt.uploads.as_slice());
    let image = write_tables(session, around.driver, into, lanes, etags)
        .and_then(|mut objects| {
            if let Gpus::Sealed(sealed) = gpus {
                objects.extend_from_slice(&sealed.objects);
            }
            commit(session, &captured, attempt, objects)
        })
        .map_err(|error| Failure {
            code: error.code(),
            ..failed(Phase::Commit, error.into())
        })?;
    for custody in around.custodies {
        custody.note(Step::Committed {
            generation: image.generation,
        });
    }
    let mut runs = vec![stages];
    if let Gpus::Sealed(sealed) = gpus {
        landed.extend_from_slice(&sealed.landed);
        runs.insert(0, sealed.stages.clone());
    }
    let stages = all_runs(runs);
    let dumped = Dumped {
        image,
        landed,
        slowest_stage: slowest(&stages),
        stages,
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

/// A dump that CRIU gives up is tried once more, from the beginning and to another object.
fn dump_or_once_more(
    around: &Around<'_>,
    memory: &mut Memory,
) -> Result<(Saved, HostFiles), Box<dyn Error + Send + Sync>> {
    let uploads = around.attempt.uploads.iter();
    let mut uploads = uploads.filter(|open| open.holds == Holds::Host);
    let (Some(first), Some(second)) = (uploads.next(), uploads.next()) else {
        unreachable!("two uploads were opened for the host memory");
    };
    let cause = match dump(around, memory, first) {
        Ok(dumped) => return Ok(dumped),
        Err(cause) => cause,
    };
    let is_crius = matches!(cause.downcast_ref(), Some(CriuError::Failed { .. }));
    if !is_crius || may_go_on(around.session).is_err() {
        return Err(cause);
    }
    tracing::warn!("{}; it is asked once more", one_line(cause.as_ref()));
    around.tree.go_on()?;
    failpoint::pass("dump:once more");
    dump(around, memory, second)
}

/// CRIU writes, the pipeline reads. What CRIU says comes first: when it has failed, what it wrote is of no moment.
fn dump(
    around: &Around<'_>,
    memory: &mut Memory,
    open: &OpenUpload,
) -> Result<(Saved, HostFiles), Box<dyn Error + Send + Sync>> {
    let session = around.session;
    let dir = ImagesDir::make()?;
    let watch = Arc::new(Watch::default());
    let (files_out, files_in) = mpsc::channel();
    let capture = Capture::listen(dir.path(), Arc::clone(&watch), files_out)?;
    // Dropped behind the lane: it ends at once when nobody listens to it any more.
    let run = around
        .criu
        .dump(DumpRoot::of(around.root())?, dir.path(), DUMP_LIMIT)?;
    let store = Arc::clone(&session.store_after_begin) as Arc<dyn Store>;
    let dealt = memory.deal_out_host(session, Box::new(capture), store, open);
    let Some((lanes, encoders, resources)) = dealt else {
        unreachable!("memory was prepared for a tree");
    };
    failpoint::pass("dump:begun");
    let (ran, saved) = std::thread::scope(|scope| {
        let running = scope.spawn(|| {
            // Until the commit there is a way back, so a signal is obeyed.
            run.wait(&watch, || may_go_on(session).is_err())
        });
        let saved = pipeline::save(lanes, encoders, resources);
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
    suspended: Suspended,
    failure: Failure,
) -> Failure {
    if matches!(failure.code, ExitCode::CommitUnknown | ExitCode::Fenced) {
        return Failure {
            targets: around.targets(),
            ..failure
        };
    }
    let given = match does_not_fit(around, &suspended.gpus) {
        None => {
            for custody in around.custodies {
                custody.note(Step::GiveBack);
                custody.flush();
            }
            bring_back(around, clock, suspended)
        }
        Some(why) => {
            go_on(around);
            Err(why.into())
        }
    };
    let looked = around.failed(failure.phase, failure.cause);
    let mut failure = Failure {
        attached: failure.attached,
        notes: [failure.notes, looked.notes].concat(),
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

/// Why there is no time to read from the store what the tree is to be given back. Out of its own host memory it is given back whatever the time: the job ends of that no sooner.
fn does_not_fit(around: &Around<'_>, gpus: &Gpus) -> Option<NoTime> {
    let (Gpus::Sealed(sealed), Some(deadline)) = (gpus, around.session.deadline()) else {
        return None;
    };
    let left = deadline.saturating_duration_since(Instant::now());
    let needed = sealed.took;
    (left < needed).then_some(NoTime { needed, left })
}

#[derive(Debug, thiserror::Error)]
#[error(
    "reading it back takes {needed:.1?}, as storing it did, and {left:.1?} are left (--deadline, preempt.notice)"
)]
struct NoTime {
    needed: Duration,
    left: Duration,
}

/// The tree goes on, every member gets its memory back, and then all are unlocked.
fn bring_back(
    around: &Around<'_>,
    clock: &mut PhaseClock,
    suspended: Suspended,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    go_on(around);
    let Suspended { processes, gpus } = suspended;
    match gpus {
        Gpus::Staged => {
            clock.enter(Phase::Restore);
            staged::unstage_and_unlock(around, processes)
        }
        Gpus::Sealed(sealed) => {
            streamed::bring_back(around, clock, &sealed.image, around.custodies, processes)
        }
    }
}

fn go_on(around: &Around<'_>) {
    // Whoever has ended is not stopped; those whose parent has ended are no descendants any more.
    let now = ProcessTree::look(around.root().pid);
    for tree in now.iter().chain([around.tree]) {
        if let Err(error) = tree.go_on() {
            tracing::warn!("a process of the tree may be stopped still: {error}");
        }
    }
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
