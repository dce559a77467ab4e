//! The story out: lock → checkpoint → stream → land → commit → complete.
//!
//! In: a running CUDA process. Out: a committed image, and the process suspended with its GPUs released (or running again, `--then resume`).
//!
//! What exists if we die, or fail, at each step:
//!
//! | step | image | target | exit |
//! |---|---|---|---|
//! | prepare | nothing; perhaps open uploads and a claim under the attempt's own prefix | running, untouched | 2, 3, 4, 7 or 10 |
//! | lock | nothing | the guard unlocks; after a kill it stays locked | 10 |
//! | begin, refused | nothing | looked up: locked → unlocked | 10, else 12 |
//! | stream, land | parts and objects that no log entry names | suspended, memory mapped by us | 12 |
//! | commit, answer lost | unknown until somebody reads the log | suspended, memory mapped by us | 13 |
//! | sealed in the spill | none yet; `resume` makes it | checkpointed, or looked up | 11 |
//! | given back from the spill | none, and none will be | runs | 10 |
//! | committed | this one | checkpointed, or looked up | 0, else 14 |
//!
//! Everything that can fail or take time comes before the lock; nothing is allocated or looked up for the first time after BEGIN. Complete is called only
//! for an image that is committed, or a save that is sealed: it is the moment at which the GPU's bytes are lost. Failing clean-up is attached to the cause, never put in its place.

mod attempt;
mod commit;
mod drill;
mod fallback;
mod memory;
mod spill;
mod whole;

use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tracing::Span;

use crate::config::{Config, OnFailure, SpillWhen};
use crate::custody::{Custody, CustodyError};
use crate::driver::{
    CheckpointedProcess, CheckpointingProcess, Driver, DriverCode, DriverError, LockedProcess,
    ProcessState, RunningProcess,
};
use crate::error::{ExitCode, Failure, Phase, TargetState};
use crate::failpoint;
use crate::image::{self, Image, ImageRef, LoadError};
use crate::journal::Step;
use crate::outcome::{Outcome, StageOutcome};
use crate::ownership::WhileSaved;
use crate::phases::PhaseClock;
use crate::pipeline::{self, PipelineError, Saved, SavedLane};
use crate::restore::{self, Ways};
use crate::sealed::Sealed;
use crate::session::{Interrupted, Session};
use crate::store::{Key, Store};
use crate::target::{Target, TargetError};
use crate::watchdog;
use crate::writer::random_hex;
use attempt::{Attempt, Planned};
use commit::{Captured, CommitFailed, commit, write_tables};
pub(crate) use drill::{lock_and_unlock, small_image};
use memory::Memory;
pub(crate) use memory::plan;
use spill::{NoSpill, Spill};
pub(crate) use whole::gpu_users;

/// How long a target may take to die before its state counts as unknown.
pub(crate) const DYING_TIMEOUT: Duration = Duration::from_secs(1);

/// What becomes of the target after the commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// It stays suspended, its GPUs released.
    Suspend,
    /// It gets its memory back from the image that was just stored, and runs on.
    Resume,
    /// The same, unless a deadline is known by then: the node goes away, and there is nothing to run on for.
    ResumeUnlessDue,
}

/// Saves a running CUDA process.
///
/// # Errors
/// A [`Failure`] with the code of PROTOCOL section 6, the targets as looked up, and the cause.
pub fn checkpoint(
    session: &Session,
    pid: u32,
    then: Then,
    while_saved: WhileSaved,
) -> Result<Outcome, Failure> {
    let while_saved = match (session.deadline(), while_saved) {
        // The node goes away: there is no time to wait for others.
        (Some(_), WhileSaved::Wait) => WhileSaved::TakeOver,
        (_, wanted) => wanted,
    };
    let nonce = random_hex::<16>();
    if saves_whole_trees(&session.config, Asked::ByHand) {
        return whole::checkpoint(session, pid, then, while_saved, &nonce);
    }
    let _named = named(&nonce).entered();
    let mut clock = PhaseClock::start(&session.meter, Phase::Prepare);
    let custody = take_custody(session, pid, "checkpoint")?;
    let wanted = Wanted {
        nonce,
        then,
        while_saved: Some(while_saved),
    };
    let result = checkpoint_in_custody(session, &mut clock, &custody, wanted);
    custody.end(ExitCode::of(&result));
    Ok(Outcome {
        seconds: clock.finish(),
        ..result?
    })
}

/// Saves the whole tree of a running process, one or more of which use GPUs.
///
/// # Errors
/// As [`checkpoint`].
pub fn checkpoint_tree(
    session: &Session,
    root: u32,
    then: Then,
    while_saved: WhileSaved,
) -> Result<Outcome, Failure> {
    whole::checkpoint(session, root, then, while_saved, &random_hex::<16>())
}

/// Who asks for a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// `checkpoint`.
    ByHand,
    /// `run` or `watch`, for a job that is to go on elsewhere.
    ForAJob,
}

/// Whether saves are of whole process trees: they are asked for; or CRIU is there, and this driver has no others, or nothing else could bring the job back.
pub fn saves_whole_trees(config: &Config, asked: Asked) -> bool {
    whole::is_asked_for(config, asked)
}

fn checkpoint_in_custody(
    session: &Session,
    clock: &mut PhaseClock,
    custody: &Custody,
    wanted: Wanted,
) -> Result<Outcome, Failure> {
    let then = wanted.then;
    let prepared = prepare(session, clock.phase(), custody, wanted)?;
    save_prepared(session, clock, custody, then, prepared)
}

/// All that is said about a save names it, by the name of its prefix in the store.
fn named(nonce: &str) -> Span {
    tracing::error_span!("save", trace = nonce)
}

/// What a save is prepared for.
#[derive(Debug)]
struct Wanted {
    /// Name of its attempt.
    nonce: String,
    then: Then,
    /// `None`: nothing is announced yet, because nobody knows when the save begins; the job is opened already.
    while_saved: Option<WhileSaved>,
}

/// All that a save needs, while the target still runs untouched.
struct Prepared {
    driver: Arc<Driver>,
    running: RunningProcess,
    attempt: Attempt,
    memory: Memory,
    spill: Result<Option<Spill>, NoSpill>,
}

/// Everything that can fail or take time before the lock.
fn prepare(
    session: &Session,
    phase: Phase,
    custody: &Custody,
    wanted: Wanted,
) -> Result<Prepared, Failure> {
    let target = &custody.target;
    let driver = open_driver()?;
    driver
        .require_custom_storage()
        .map_err(|error| Failure::new(ExitCode::Preflight, Phase::Prepare, error))?;
    let running = take_in_hand(session, &driver, target)?;
    let told = |panic: Box<dyn std::any::Any + Send>| {
        panicked(session, &driver, target, phase, panic.as_ref())
    };
    let opened = catch_unwind(AssertUnwindSafe(|| {
        failpoint::pass("prepare:target known");
        let plan = plan(&session.config, &driver)?;
        // A save that may be spilled reads the GPUs' memory once more for that.
        let runs = 1 + usize::from(session.config.spill.place.is_some());
        // A target that is not saved at once may use more memory by then.
        let in_use = wanted.while_saved.is_some();
        // The store is asked while contexts and buffers are made: neither needs the other, and each may take a second.
        let (nonce, while_saved, span) = (wanted.nonce, wanted.while_saved, Span::current());
        std::thread::scope(|scope| {
            let opening = scope.spawn(|| {
                let _named = span.entered();
                let objects = Planned::of_gpus(&driver, 0, &custody.target);
                Attempt::open(session, &driver, custody, nonce, while_saved, &objects)
            });
            let allocate =
                AssertUnwindSafe(|| Memory::allocate(session, &driver, plan, runs, in_use));
            let memory = catch_unwind(allocate);
            let attempt = opening.join().unwrap_or_else(|panic| resume_unwind(panic));
            Ok::<_, Failure>((attempt?, memory))
        })
    }));
    let (attempt, memory) = opened.unwrap_or_else(|panic| Err(told(panic)))?;
    let ready = catch_unwind(AssertUnwindSafe(|| {
        let memory = memory
            .unwrap_or_else(|panic| resume_unwind(panic))
            .map_err(|cause| without_memory(session, &driver, target, cause))?;
        failpoint::pass("prepare:memory ready");
        let on_failure = on_failure(session, wanted.then);
        let spill = Spill::prepare(session, &driver, target, &attempt, on_failure);
        Ok((memory, spill))
    }));
    match ready.unwrap_or_else(|panic| Err(told(panic))) {
        Ok((memory, spill)) => Ok(Prepared {
            driver,
            running,
            attempt,
            memory,
            spill,
        }),
        Err(mut failure) => {
            let left = attempt.close(session, &[], is_given_up(&failure));
            failure.attached.extend(left);
            Err(failure)
        }
    }
}

/// From the lock on.
fn save_prepared(
    session: &Session,
    clock: &mut PhaseClock,
    custody: &Custody,
    then: Then,
    prepared: Prepared,
) -> Result<Outcome, Failure> {
    let Prepared {
        driver,
        running,
        attempt,
        memory,
        spill,
    } = prepared;
    let target = &custody.target;
    let on_failure = on_failure(session, then);
    let spill = match spill {
        Ok(Some(spill)) => spill.leave_time(session, &driver, on_failure).map(Some),
        spill => spill,
    };
    let saved = catch_unwind(AssertUnwindSafe(|| {
        let around = Around {
            session,
            driver: &driver,
            custody,
            target,
            attempt: &attempt,
            spill: spill.as_ref().ok().and_then(Option::as_ref),
            then,
            on_failure,
        };
        save(around, clock, running, memory)
    }));
    let saved = saved.unwrap_or_else(|panic| {
        Err(panicked(
            session,
            &driver,
            target,
            clock.phase(),
            panic.as_ref(),
        ))
    });
    if let Ok(Some(spill)) = &spill {
        spill.give_back(session);
        // Unfinished uploads are still to be aborted.
        session.try_until_the_deadline();
    }
    let (committed, afterwards) = match saved {
        Ok(saved) => saved,
        Err(mut failure) => {
            let left = attempt.close(session, &[], is_given_up(&failure));
            failure.attached.extend(left);
            failure.notes.extend(spill.err().map(|NoSpill(why)| why));
            return Err(failure);
        }
    };
    let free_again = match (afterwards, then) {
        (Afterwards::Runs { since }, _) => Ok(since),
        (Afterwards::Suspended(_), Then::Suspend) => Ok(committed.suspended_at),
        (Afterwards::Suspended(_), Then::ResumeUnlessDue) if session.deadline().is_some() => {
            Ok(committed.suspended_at)
        }
        (Afterwards::Suspended(suspended), Then::Resume | Then::ResumeUnlessDue) => {
            let image = &committed.image;
            resume(session, clock, &driver, custody, suspended, image)
        }
    };
    // Whatever became of the target, uploads for GPUs without data are not left in the store.
    for leftover in attempt.abort_uploads(session, &committed.landed) {
        tracing::warn!("{leftover}");
    }
    let free_again = free_again?;
    let outcome = report(session, &driver, target, committed, free_again);
    must_be_as_asked(outcome, then)
}

/// A save that is prepared: from a notice to the lock there is nothing left to do but to announce it. It holds the pinned buffers, an open upload per GPU and, with a spill, room on the disk; the target runs untouched.
pub struct Armed {
    session: Session,
    custody: Custody,
    prepared: Prepared,
    since: Instant,
}

impl std::fmt::Debug for Armed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Armed")
            .field("custody", &self.custody)
            .field("since", &self.since)
            .finish_non_exhaustive()
    }
}

/// Prepares a save of a running CUDA process whose job is ours ([`Session::ours`]). The session is this save's alone ([`Session::for_one_transfer`]).
///
/// # Errors
/// As [`checkpoint`] before the lock.
pub fn arm(session: Session, pid: u32) -> Result<Armed, Failure> {
    let nonce = random_hex::<16>();
    let _named = named(&nonce).entered();
    let custody = take_custody(&session, pid, "checkpoint")?;
    let wanted = Wanted {
        nonce,
        then: Then::Suspend,
        while_saved: None,
    };
    match prepare(&session, Phase::Prepare, &custody, wanted) {
        Ok(prepared) => Ok(Armed {
            session,
            custody,
            prepared,
            since: Instant::now(),
        }),
        Err(failure) => {
            custody.end(failure.code);
            Err(failure)
        }
    }
}

impl Armed {
    /// The surroundings of the save.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// How long it has been prepared.
    pub fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// Bytes of host memory that it holds, pinned or not.
    pub fn memory_planned(&self) -> u64 {
        self.prepared.memory.planned()
    }

    /// Bytes that all GPUs have in use now.
    ///
    /// # Errors
    /// The driver's.
    pub fn used_memory(&self) -> Result<u64, DriverError> {
        let used = self.prepared.driver.used_memory_of_all()?;
        Ok(used.into_iter().sum())
    }

    /// It has a spill, or is to have none.
    pub fn has_its_spill(&self) -> bool {
        self.prepared.spill.is_ok()
    }

    /// The very process still lives.
    pub fn target_lives(&self) -> bool {
        self.custody.target.is_alive()
    }

    /// The target's pid.
    pub fn pid(&self) -> u32 {
        self.custody.target.pid
    }

    /// The save goes to the spill at once, and is uploaded from there.
    pub fn spill_first(&mut self) {
        self.session.config.spill.when = SpillWhen::Always;
    }

    /// Saves the target, by the deadline of its session.
    ///
    /// # Errors
    /// As [`checkpoint`].
    pub fn save(self, then: Then) -> Result<Outcome, Failure> {
        let Self {
            session,
            custody,
            mut prepared,
            ..
        } = self;
        let _named = named(&prepared.attempt.nonce).entered();
        let mut clock = PhaseClock::start(&session.meter, Phase::Prepare);
        let announced = prepared
            .attempt
            .announce_now(&session, &prepared.driver, &custody);
        let result = match announced {
            Ok(()) => save_prepared(&session, &mut clock, &custody, then, prepared),
            Err(failure) => {
                if let Ok(Some(spill)) = &prepared.spill {
                    spill.give_back(&session);
                }
                Err(failure)
            }
        };
        custody.end(ExitCode::of(&result));
        Ok(Outcome {
            seconds: clock.finish(),
            ..result?
        })
    }

    /// Gives back what it holds; nothing was saved.
    pub fn stand_down(self) {
        let session = &self.session;
        for leftover in self.prepared.attempt.close(session, &[], false) {
            tracing::warn!("{leftover}");
        }
        if let Ok(Some(spill)) = &self.prepared.spill {
            spill.give_back(session);
        }
        self.custody.end(ExitCode::Ok);
    }
}

/// A committed image, and how it came about.
struct Committed {
    image: Image,
    /// Keys of its data objects.
    landed: Vec<Key>,
    stages: Vec<StageOutcome>,
    slowest_stage: Option<String>,
    locked_at: Instant,
    suspended_at: Instant,
    memory_planned: u64,
}

/// Where the target is after a save that worked.
enum Afterwards {
    Suspended(CheckpointedProcess),
    /// It has its memory back.
    Runs {
        since: Instant,
    },
}

/// What every step of a save works with.
#[derive(Clone, Copy)]
struct Around<'a> {
    session: &'a Session,
    driver: &'a Arc<Driver>,
    custody: &'a Custody,
    target: &'a Target,
    attempt: &'a Attempt,
    /// Where the save goes when the store does not take it.
    spill: Option<&'a Spill>,
    then: Then,
    on_failure: OnFailure,
}

/// What becomes of the target when the store fails after BEGIN. Never the destructive way, unless it was asked for.
fn on_failure(session: &Session, then: Then) -> OnFailure {
    let spill = &session.config.spill;
    spill.on_failure.unwrap_or(match (&spill.place, then) {
        (Some(_), Then::Suspend) => OnFailure::Spill,
        (Some(_), Then::Resume | Then::ResumeUnlessDue) => OnFailure::GiveBack,
        (None, _) => OnFailure::Hold,
    })
}

/// No image of the attempt exists, and none will: not of one whose commit is unknown, or that `resume` may finish.
fn is_given_up(failure: &Failure) -> bool {
    let may_be_sealed = failure.phase == Phase::Spill;
    !may_be_sealed
        && !matches!(
            failure.code,
            ExitCode::Spilled
                | ExitCode::CommitUnknown
                | ExitCode::Fenced
                | ExitCode::CommittedTargetAstray
                | ExitCode::HostMemoryNotSaved
        )
}

/// Everything from the last preparations to CHECKPOINTED, or further.
fn save(
    around: Around<'_>,
    clock: &mut PhaseClock,
    running: RunningProcess,
    mut memory: Memory,
) -> Result<(Committed, Afterwards), Failure> {
    let Around {
        session,
        driver,
        target,
        spill,
        ..
    } = around;
    let memory_planned = memory.planned();

    let locked_at = clock.enter(Phase::Lock);
    let locked = lock(session, driver, around.custody, running)?;
    if let Some(spill) = spill {
        spill.top_up(session, driver);
    }
    failpoint::pass("lock:locked");

    clock.enter(Phase::Begin);
    let begun = begin(session, driver, around.custody, locked)?;
    failpoint::pass("begin:begun");

    let has_place = spill.is_some() && around.on_failure != OnFailure::Hold;
    if !has_place && around.on_failure != OnFailure::Abandon {
        session.store_after_begin.hold(true);
    }
    if let (Some(spill), SpillWhen::Always) = (spill, session.config.spill.when) {
        clock.enter(Phase::Spill);
        match spill.seal(session, driver, target, around.attempt, &begun, &mut memory) {
            Ok(save) => {
                drop(memory);
                return fallback::upload_afterwards(
                    around,
                    clock,
                    spill,
                    begun,
                    save,
                    (locked_at, memory_planned),
                );
            }
            Err(error) => {
                let why = crate::error::one_line(error.as_ref());
                tracing::warn!("the spill failed, so the save goes to the store at once: {why}");
                session.try_until_the_deadline();
            }
        }
    }

    let kept = keep(around, clock, &begun, &mut memory);
    session.try_until_the_deadline();
    session.store_after_begin.hold(false);
    let Kept {
        image,
        landed,
        stages,
        slowest_stage,
    } = match (kept, spill) {
        (Ok(kept), _) => kept,
        // What another writer has is not ours to keep, what was given up cannot be resumed, and what the driver did not give once it does not give again.
        (Err(failure), Some(spill))
            if failure.code != ExitCode::Fenced
                && !is_no_image_ever(failure.cause.as_ref())
                && !is_the_drivers(failure.cause.as_ref()) =>
        {
            clock.enter(Phase::Spill);
            let sealed = spill.seal(session, driver, target, around.attempt, &begun, &mut memory);
            drop(memory);
            return Err(match sealed {
                Ok(save) => fallback::sealed(around, clock, spill, begun, &save, failure),
                Err(error) => fallback::not_sealed(failure, error.as_ref()),
            });
        }
        (Err(failure), _) => return Err(failure),
    };

    clock.enter(Phase::Complete);
    let suspended = complete(around, begun).map_err(|error| Failure {
        code: ExitCode::CommittedTargetAstray,
        generation: Some(image.generation),
        ..lost(driver, target, Phase::Complete, error.into())
    })?;
    failpoint::pass("complete:completed");
    let committed = Committed {
        image,
        landed,
        stages,
        slowest_stage,
        locked_at,
        suspended_at: Instant::now(),
        memory_planned,
    };
    Ok((committed, Afterwards::Suspended(suspended)))
}

/// The end of the save for the driver: the GPUs' memory is let go.
fn complete(
    around: Around<'_>,
    begun: CheckpointingProcess,
) -> Result<CheckpointedProcess, DriverError> {
    around.custody.note(Step::Complete);
    let call = "the driver's complete (cuCheckpointOperationComplete)";
    watchdog::watch(call, watchdog::USUAL, || begun.complete())
}

/// A committed image, and what made it.
struct Kept {
    image: Image,
    landed: Vec<Key>,
    stages: Vec<StageOutcome>,
    slowest_stage: Option<String>,
}

/// Stream, land, commit.
fn keep(
    around: Around<'_>,
    clock: &mut PhaseClock,
    begun: &CheckpointingProcess,
    memory: &mut Memory,
) -> Result<Kept, Failure> {
    let Around {
        session,
        driver,
        target,
        attempt,
        ..
    } = around;
    let lost =
        |phase: Phase, cause: Box<dyn Error + Send + Sync>| lost(driver, target, phase, cause);
    let store = Arc::clone(&session.store_after_begin);

    clock.enter(Phase::Stream);
    let dealt = memory.deal_out(
        session,
        begun.extents().iter().map(|extent| (0, extent)),
        Arc::clone(&store) as _,
        &attempt.uploads,
    );
    let Some((lanes, encoders, resources)) = dealt else {
        unreachable!("provisions were made for one run at least");
    };
    let Saved {
        lanes,
        stages,
        slowest_stage,
    } = pipeline::save(lanes, encoders, resources)
        .map_err(|error| lost(Phase::Stream, error.into()))?;
    failpoint::pass("stream:all acknowledged");

    clock.enter(Phase::Land);
    let etags = land(session, &*store, &lanes).map_err(|error| lost(Phase::Land, error.into()))?;
    let landed = lanes.iter().map(|lane| lane.key.clone()).collect();
    failpoint::pass("land:all landed");

    clock.enter(Phase::Commit);
    expect_still(driver, target, ProcessState::Checkpointing)
        .map_err(|error| lost(Phase::Commit, error.into()))?;
    failpoint::pass("commit:target stood still");
    let captured = Captured::gpus(driver, vec![target]);
    let into = (&*store as &dyn Store, attempt.uploads.as_slice());
    let image = write_tables(session, driver, into, lanes, etags)
        .and_then(|landed| commit(session, &captured, attempt, landed))
        .map_err(|error| Failure {
            code: error.code(),
            ..lost(Phase::Commit, error.into())
        })?;
    around.custody.note(Step::Committed {
        generation: image.generation,
    });
    Ok(Kept {
        image,
        landed,
        stages,
        slowest_stage,
    })
}

/// Whether the attempt was given up in the log.
fn is_no_image_ever(cause: &(dyn Error + Send + Sync + 'static)) -> bool {
    let error = cause.downcast_ref::<CommitFailed>();
    error.is_some_and(CommitFailed::is_given_up)
}

/// Whether the copies failed.
fn is_the_drivers(cause: &(dyn Error + Send + Sync + 'static)) -> bool {
    let error = cause.downcast_ref::<PipelineError>();
    matches!(error, Some(PipelineError::Driver(_)))
}

/// The target, which nobody else has.
fn take_custody(session: &Session, pid: u32, command: &str) -> Result<Custody, Failure> {
    Custody::take(session, pid, command).map_err(custody_failure)
}

fn custody_failure(error: CustodyError) -> Failure {
    match error {
        CustodyError::Target(error) => target_failure(error),
        error if error.is_held() => Failure::new(ExitCode::NotOurs, Phase::Prepare, error),
        error => Failure::new(ExitCode::Preflight, Phase::Prepare, error),
    }
}

/// The target cannot be looked at.
fn target_failure(error: TargetError) -> Failure {
    let code = match error {
        TargetError::Gone { .. } | TargetError::Ended { .. } => ExitCode::NothingToSave,
        TargetError::Thread { .. } | TargetError::Ourselves { .. } => ExitCode::Config,
        _ => ExitCode::Preflight,
    };
    Failure::new(code, Phase::Prepare, error)
}

fn open_driver() -> Result<Arc<Driver>, Failure> {
    Driver::open().map_err(|error| Failure::new(ExitCode::Preflight, Phase::Prepare, error))
}

/// The target, running.
fn take_in_hand(
    session: &Session,
    driver: &Arc<Driver>,
    target: &Target,
) -> Result<RunningProcess, Failure> {
    let pid = target.pid;
    let refused = |code: ExitCode, cause: Box<dyn Error + Send + Sync>| {
        Failure::new(code, Phase::Prepare, cause)
    };
    if let Some(what) = target.why_not_scheduled() {
        let stopped = Stopped { pid, what };
        return Err(refused(ExitCode::Preflight, Box::new(stopped)));
    }
    RunningProcess::attach(driver, pid).map_err(|error| {
        let code = match &error {
            DriverError::WrongState {
                found: ProcessState::Checkpointed,
                ..
            } if suspended_under_an_image(session, target) => ExitCode::NothingToSave,
            DriverError::WrongState {
                found: ProcessState::Checkpointed,
                ..
            } if is_sealed(session) => ExitCode::Spilled,
            DriverError::WrongState {
                found: ProcessState::Failed,
                ..
            } => ExitCode::Preflight,
            DriverError::WrongState { .. } => ExitCode::NotOurs,
            // It ended between the two looks.
            _ if target.ends_within(DYING_TIMEOUT) => ExitCode::NothingToSave,
            _ => ExitCode::Preflight,
        };
        refused(code, error.into())
    })
}

/// A stopped process cannot answer the lock.
#[derive(Debug, thiserror::Error)]
#[error(
    "process {pid} is {what}, so the driver cannot lock it; continue it first (kill -CONT {pid}), or thaw its cgroup"
)]
struct Stopped {
    pid: u32,
    what: &'static str,
}

/// Whether the job's newest image was made of this very process.
fn suspended_under_an_image(session: &Session, target: &Target) -> bool {
    let newest = session.wait(Image::open(
        &*session.store,
        &session.config.job,
        ImageRef::Latest,
    ));
    newest.is_ok_and(|(image, _skipped)| restore::is_saved_process(&image.manifest, target))
}

/// Whether a save of the job waits in the spill.
fn is_sealed(session: &Session) -> bool {
    let Some(config) = &session.config.spill.place else {
        return false;
    };
    let waiting = session.wait(Sealed::waiting(config, &session.config.job));
    waiting.is_ok_and(|waiting| !waiting.is_empty())
}

fn lock(
    session: &Session,
    driver: &Driver,
    custody: &Custody,
    running: RunningProcess,
) -> Result<LockedProcess, Failure> {
    let target = &custody.target;
    let not_begun = |cause: Box<dyn Error + Send + Sync>| {
        not_begun(session, driver, target, Phase::Lock, cause)
    };
    may_go_on(session).map_err(not_begun)?;
    custody
        .step(&Step::Lock)
        .map_err(|error| not_begun(error.into()))?;
    custody.may_be_locked();
    let lock_timeout = session.config.driver.lock_timeout;
    let call = "the driver's lock (cuCheckpointProcessLock)";
    let locked = watchdog::watch(call, lock_timeout, || running.lock(lock_timeout));
    let locked = locked.map_err(|error| {
        custody.must_not_be_unlocked();
        not_begun(error.into())
    })?;
    // The last moment at which a signal can be obeyed, and at which a pid that was used again can be let go.
    let reason: Box<dyn Error + Send + Sync> = if !target.is_alive() {
        VoidError::Died { pid: target.pid }.into()
    } else if let Err(reason) = may_go_on(session) {
        reason
    } else {
        return Ok(locked);
    };
    let unlocked = locked.unlock();
    custody.must_not_be_unlocked();
    Err(after_unlock(not_begun(reason), unlocked))
}

/// As long as there is a way back: nobody has asked us to stop, and there is time left.
fn may_go_on(session: &Session) -> Result<(), Box<dyn Error + Send + Sync>> {
    session.check_cancelled()?;
    match session.deadline() {
        Some(deadline) if Instant::now() >= deadline => Err(Box::new(TooLate)),
        _ => Ok(()),
    }
}

/// What is begun past its deadline could only be lost.
#[derive(Debug, thiserror::Error)]
#[error("the deadline has come, and nothing is saved yet (--deadline, preempt.notice)")]
struct TooLate;

/// Says that the roll back failed, if it did: the target is then held by us, and stays so.
fn after_unlock(mut failure: Failure, unlocked: Result<RunningProcess, DriverError>) -> Failure {
    let Err(error) = unlocked else { return failure };
    let chain = crate::error::one_line(&error);
    failure
        .attached
        .push(format!("the target could not be unlocked: {chain}"));
    failure
}

fn begin(
    session: &Session,
    driver: &Driver,
    custody: &Custody,
    locked: LockedProcess,
) -> Result<CheckpointingProcess, Failure> {
    let target = &custody.target;
    if let Err(error) = custody.step(&Step::Begin) {
        let unlocked = locked.unlock();
        custody.must_not_be_unlocked();
        let failure = not_begun(session, driver, target, Phase::Begin, error.into());
        return Err(after_unlock(failure, unlocked));
    }
    custody.must_not_be_unlocked();
    let call = "the driver's checkpoint (cuCheckpointProcessCheckpoint)";
    let begun = watchdog::watch(call, watchdog::USUAL, || locked.begin_checkpoint());
    begun.map_err(|mut error| {
        let unlocked = error.locked.take().map(|locked| {
            custody.may_be_locked();
            let unlocked = locked.unlock();
            custody.must_not_be_unlocked();
            unlocked
        });
        // A target that runs was not locked in truth, whatever the driver said.
        let is_running = matches!(error.state, Ok(ProcessState::Running));
        match unlocked {
            Some(unlocked) => {
                let failure = not_begun(session, driver, target, Phase::Begin, error.into());
                after_unlock(failure, unlocked)
            }
            None if is_running => not_begun(session, driver, target, Phase::Begin, error.into()),
            None => lost(driver, target, Phase::Begin, error.into()),
        }
    })
}

/// Contexts or buffers are not to be had, or a signal came while they were made. The target was not touched.
fn without_memory(
    session: &Session,
    driver: &Driver,
    target: &Target,
    cause: Box<dyn Error + Send + Sync>,
) -> Failure {
    let is_interrupted = cause.is::<Interrupted>();
    let failure = not_begun(session, driver, target, Phase::Prepare, cause);
    if is_interrupted {
        return failure;
    }
    Failure {
        code: ExitCode::Preflight,
        ..failure
    }
}

/// A failure before BEGIN. The code claims RUNNING only if that was looked up; a target that somebody else holds is theirs, or saved already.
fn not_begun(
    session: &Session,
    driver: &Driver,
    target: &Target,
    phase: Phase,
    cause: Box<dyn Error + Send + Sync>,
) -> Failure {
    let found = look(driver, target);
    let code = match found.state.as_str() {
        "running" => ExitCode::RolledBack,
        "gone" => ExitCode::NothingToSave,
        "checkpointed" if suspended_under_an_image(session, target) => ExitCode::NothingToSave,
        "checkpointing" | "checkpointed" | "restoring" => ExitCode::NotOurs,
        "locked" if was_refused_by_state(cause.as_ref()) => ExitCode::NotOurs,
        // Locked by us all the same, failed, or unknown.
        _ => ExitCode::Lost,
    };
    let mut failure = Failure::new(code, phase, cause);
    failure.targets = vec![found];
    failure
}

/// Whether the driver turned our call down because of the target's state: somebody else was first.
fn was_refused_by_state(cause: &(dyn Error + Send + Sync + 'static)) -> bool {
    let error = cause.downcast_ref::<DriverError>();
    error.and_then(DriverError::code) == Some(DriverCode::ILLEGAL_STATE)
}

/// A defect of ours, caught: the verdict still says how things stand.
fn panicked(
    session: &Session,
    driver: &Driver,
    target: &Target,
    phase: Phase,
    panic: &(dyn std::any::Any + Send),
) -> Failure {
    let cause = Box::new(PipelineError::of_story(panic));
    match phase {
        Phase::Prepare | Phase::Lock => not_begun(session, driver, target, phase, cause),
        Phase::Commit => Failure {
            code: ExitCode::CommitUnknown,
            ..lost(driver, target, phase, cause)
        },
        Phase::Spill => Failure {
            notes: vec![
                "whether the save is sealed is not known; `ckptstream resume` finds out".to_owned(),
            ],
            ..lost(driver, target, phase, cause)
        },
        Phase::Complete => Failure {
            code: ExitCode::CommittedTargetAstray,
            ..lost(driver, target, phase, cause)
        },
        // Given back, if it runs.
        Phase::Unlock => not_begun(session, driver, target, phase, cause),
        _ => lost(driver, target, phase, cause),
    }
}

/// A failure after BEGIN: there is no way back, and nothing is preserved.
fn lost(
    driver: &Driver,
    target: &Target,
    phase: Phase,
    cause: Box<dyn Error + Send + Sync>,
) -> Failure {
    let mut failure = Failure::new(ExitCode::Lost, phase, cause);
    failure.targets = vec![look(driver, target)];
    failure
}

/// The target's state as it is now, in the words of the JSON result.
pub(crate) fn look(driver: &Driver, target: &Target) -> TargetState {
    let state = match driver.state_for_a_verdict(target.pid) {
        Ok(state) if target.is_alive() => state.to_string(),
        Ok(_of_a_pid_used_again) => "gone".to_owned(),
        // A process that is being killed answers nothing, and is gone a moment later.
        Err(_) if target.ends_within(DYING_TIMEOUT) => "gone".to_owned(),
        Err(_) => "unknown".to_owned(),
    };
    TargetState {
        pid: target.pid,
        state,
    }
}

/// What was copied counts only if the target lived and stood still all the while.
fn expect_still(driver: &Driver, target: &Target, needed: ProcessState) -> Result<(), VoidError> {
    if !target.is_alive() {
        return Err(VoidError::Died { pid: target.pid });
    }
    match driver.state_for_a_verdict(target.pid) {
        Ok(found) if found == needed => Ok(()),
        Ok(found) => Err(VoidError::State {
            pid: target.pid,
            found,
            needed,
        }),
        Err(source) => Err(VoidError::Look {
            pid: target.pid,
            source,
        }),
    }
}

/// The attempt is void: what was copied may be garbage with good digests.
#[derive(Debug, thiserror::Error)]
enum VoidError {
    #[error("process {pid} died while its memory was copied; the copy is void")]
    Died { pid: u32 },
    #[error("process {pid} is {found} and not {needed}; the copy is void")]
    State {
        pid: u32,
        found: ProcessState,
        needed: ProcessState,
    },
    #[error("the state of process {pid} cannot be looked up; the copy is void")]
    Look {
        pid: u32,
        #[source]
        source: DriverError,
    },
}

/// Completes every upload, and looks at every object. Returns the store's tags for them.
fn land(
    session: &Session,
    store: &dyn Store,
    lanes: &[SavedLane],
) -> Result<Vec<Option<String>>, LoadError> {
    let landing = lanes.iter().map(|lane| async move {
        let crc64 = lane.crc64.value();
        let completed =
            store.complete_upload(&lane.key, &lane.upload, &lane.parts, lane.len, crc64);
        completed.await.map_err(LoadError::Store)?;
        failpoint::pass("land:upload completed");
        image::prove_landed(store, &lane.key, lane.len, lane.crc64).await
    });
    session.wait(futures::future::try_join_all(landing))
}

/// Brings the target back from the image that was just committed. No signal stops that.
fn resume(
    session: &Session,
    clock: &mut PhaseClock,
    driver: &Arc<Driver>,
    custody: &Custody,
    suspended: CheckpointedProcess,
    image: &Image,
) -> Result<Instant, Failure> {
    // What failed before the driver was asked has not looked at the target; the verdict has to.
    let astray = |failure: Failure| Failure {
        code: ExitCode::CommittedTargetAstray,
        generation: Some(image.generation),
        targets: vec![look(driver, &custody.target)],
        ..failure
    };
    // The image is committed: bringing the target back is not given up for a signal.
    let surroundings = Session {
        cancel: CancellationToken::new(),
        ..session.clone()
    };
    let process = vec![(custody, suspended)];
    restore::bring_back(
        &surroundings,
        clock,
        driver,
        process,
        image,
        Ways::STAY,
        None,
    )
    .map_err(astray)?;
    Ok(Instant::now())
}

/// A target that was to stay suspended has to be there. One that was to run on may have come to its end.
fn must_be_as_asked(outcome: Outcome, then: Then) -> Result<Outcome, Failure> {
    let is_gone = outcome.targets.iter().any(|target| target.state == "gone");
    if !is_gone || then != Then::Suspend {
        return Ok(outcome);
    }
    let why = "the target died when its memory had been let go";
    let code = ExitCode::CommittedTargetAstray;
    Err(Failure {
        generation: Some(outcome.generation),
        targets: outcome.targets,
        ..Failure::new(code, Phase::Complete, why)
    })
}

fn report(
    session: &Session,
    driver: &Driver,
    target: &Target,
    saved: Committed,
    free_again: Instant,
) -> Outcome {
    Outcome {
        seconds_locked: free_again.duration_since(saved.locked_at).as_secs_f64(),
        stages: saved.stages,
        slowest_stage: saved.slowest_stage,
        memory_planned: saved.memory_planned,
        ..restore::outcome_of(
            session,
            &saved.image,
            vec![look(driver, target)],
            Vec::new(),
        )
    }
}
