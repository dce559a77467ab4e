//! The story back: read → check → verify → restore → stream → complete → unlock. Also the commands that read an image without a GPU.
//!
//! In: an image of the job, and a suspended process. Out: the process runs on with the very bytes. What exists if we fail:
//!
//! | step | target | exit |
//! |---|---|---|
//! | read, check, verify | as found; the driver was only asked for its state | 6 (proved that there is none), 20 |
//! | restore and stream | RESTORING: to be ended, then restored again elsewhere | 21 |
//! | complete | LOCKED: innocent, and unlocked | 21 if that fails too |
//!
//! No byte reaches a GPU before its chunk was verified. Complete is called only when every chunk was copied and every stream synchronized without an error. A
//! restore that failed is never repeated on the same process.

mod gpu_map;
mod in_order;
mod read;
mod sealed;
mod whole;

use std::collections::BTreeMap;
use std::error::Error;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::checkpoint::{DYING_TIMEOUT, look};
use crate::config::Verify;
use crate::custody::{Custody, CustodyError};
use crate::driver::{
    CheckpointedProcess, CopyQueue, Driver, DriverError, Extent, GpuUuid, LockedProcess, PoolSlice,
    RestoringProcess, RunningProcess, STREAMS_IN,
};
use crate::error::{ExitCode, Failure, Phase};
use crate::failpoint;
use crate::image::{Image, ImageRef, image_id};
use crate::job_log::{Entry, JobLog};
use crate::journal::Step;
use crate::manifest::{CaptureMode, ImageKind, Manifest};
use crate::outcome::Outcome;
use crate::ownership::{self, Ownership, OwnershipError, WhileSaved};
use crate::phases::PhaseClock;
use crate::pipeline::{self, Destination, LoadLane, LoadResources, Loaded, PipelineError};
use crate::session::{Interrupted, Session};
use crate::store::{Key, Store};
use crate::target::{Target, TargetError};
use crate::upkeep::pins;
use crate::watchdog;
use crate::writer::random_hex;
use gpu_map::{GpuPairs, is_identity, map_gpus};
use read::{LoadFailed, Which, lanes, load_nowhere, load_plan, resources};

pub use read::{cat, verify};
pub(crate) use read::{open_image, outcome_of, plan_code, read_object};
pub use whole::{RestoredTree, Streams, restore_tree};

/// Clean-up must not hold back the verdict for longer.
const UNPIN_TIMEOUT: Duration = Duration::from_secs(5);

/// What is to be restored, and how.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// Which image.
    pub image: ImageRef,
    /// The process came up suspended on purpose: the image need not be of this very one.
    pub into_fresh: bool,
    /// It came up on GPUs of this node, so the driver has none to move it from.
    pub started_here: bool,
    /// Nothing is written to the store: the process is a copy beside the job, not its next life.
    pub read_only: bool,
    /// What to do while another writer saves the job.
    pub while_saved: WhileSaved,
}

/// Puts an image back into a suspended process and lets it run; or, where the process is of a tree whose save broke off behind the seal, what is sealed back into the whole tree. Unless it is `read_only`, the job is opened first: whoever saved it until then is fenced.
///
/// # Errors
/// A [`Failure`] with the code of PROTOCOL section 6, the target as looked up, and the cause.
pub fn restore(session: &Session, pid: u32, wanted: Wanted) -> Result<Outcome, Failure> {
    let _named = tracing::error_span!("restore", trace = random_hex::<16>()).entered();
    let mut clock = PhaseClock::start(&session.meter, Phase::Read);
    // What waits for its whole tree is newer than any image of it.
    let waits = match (wanted.image, wanted.into_fresh) {
        (ImageRef::Latest, false) => sealed::find(session, pid),
        _ => None,
    };
    if let Some(tree) = waits {
        let given = sealed::give_back(session, &mut clock, &tree);
        return Ok(Outcome {
            seconds: clock.finish(),
            ..given?
        });
    }
    let custody = take_custody(session, pid)?;
    let work = AssertUnwindSafe(|| put_back(session, &mut clock, &custody, wanted));
    let done = catch_unwind(work).unwrap_or_else(|panic| {
        // What is done to the driver catches its own panics: here nothing was.
        Err(Failure::new(
            ExitCode::RestoreRefused,
            clock.phase(),
            PipelineError::of_story(panic.as_ref()),
        ))
    });
    custody.end(ExitCode::of(&done));
    Ok(Outcome {
        seconds: clock.finish(),
        ..done?
    })
}

/// The process, which nobody else has.
fn take_custody(session: &Session, pid: u32) -> Result<Custody, Failure> {
    Custody::take(session, pid, "restore").map_err(|error| {
        let code = match &error {
            CustodyError::Target(TargetError::Thread { .. } | TargetError::Ourselves { .. }) => {
                ExitCode::Config
            }
            error if error.is_held() => ExitCode::NotOurs,
            _ => ExitCode::RestoreRefused,
        };
        Failure::new(code, Phase::Read, error)
    })
}

fn put_back(
    session: &Session,
    clock: &mut PhaseClock,
    custody: &Custody,
    wanted: Wanted,
) -> Result<Outcome, Failure> {
    let target = &custody.target;
    failpoint::pass("restore:target known");
    // The image is read while the driver comes up: neither needs the other, and each may take seconds.
    let (read, held) = std::thread::scope(|scope| {
        let holding = scope.spawn(|| Held::take(target));
        let read = read_image(session, wanted);
        (
            read,
            holding.join().unwrap_or_else(|panic| resume_unwind(panic)),
        )
    });
    let chosen = read?;
    failpoint::pass("restore:image read");
    let done = put_back_chosen(session, clock, custody, wanted, &chosen, held);
    if let Some(Taken { ours, pin }) = &chosen.taken {
        unpin(session, pin);
        if done.as_ref().is_err_and(|failure| !may_run(failure)) {
            give_up_the_job(session, ours);
        }
    }
    done
}

/// The process has its memory, or may have it: whoever unlocks it, by hand or by `recover`, goes on with the job.
fn may_run(failure: &Failure) -> bool {
    failure.code == ExitCode::RestoreFailed
        && matches!(failure.phase, Phase::Complete | Phase::Unlock)
}

fn put_back_chosen(
    session: &Session,
    clock: &mut PhaseClock,
    custody: &Custody,
    wanted: Wanted,
    chosen: &Chosen,
    held: Result<Held, DriverError>,
) -> Result<Outcome, Failure> {
    let (image, into_fresh) = (&chosen.image, wanted.into_fresh);
    let target = &custody.target;
    let (driver, pairs, suspended) = check(session, target, &image.manifest, into_fresh, held)
        .map_err(|cause| refused(Phase::Read, cause))?;
    failpoint::pass("restore:checked");
    let verify = session
        .config
        .restore
        .verify
        .unwrap_or_else(|| default_verify(image.manifest.kind, into_fresh));
    if verify == Verify::All {
        load_nowhere(session, image).map_err(|error| refused(Phase::Read, error.into()))?;
    }
    failpoint::pass("restore:verified");
    let suspended_since = clock.enter(Phase::Restore);
    let process = vec![(custody, suspended)];
    let ways = Ways {
        pairs: &pairs,
        moves: !wanted.started_here,
    };
    let loaded = bring_back(session, clock, &driver, process, image, ways, None)?;
    Ok(Outcome {
        skipped: chosen.skipped.clone(),
        seconds_locked: suspended_since.elapsed().as_secs_f64(),
        stages: loaded.stages,
        slowest_stage: loaded.slowest_stage,
        memory_planned: load_plan(session, image, Which::Gpus).map_or(0, |plan| plan.total_bytes),
        ..outcome_of(session, image, vec![look(&driver, target)], Vec::new())
    })
}

/// From CHECKPOINTED to RUNNING, with the bytes of an image that was read and checked; `processes` are those of the image, in its order, and none runs before all have their memory. `must_come_before` is called when they have, and do
/// not run yet; with it nobody unlocks them before, whatever becomes of us, nor after it where it says `false`.
///
/// # Errors
/// Exit 20 while the driver was not asked yet, 21 after.
pub(crate) fn bring_back(
    session: &Session,
    clock: &mut PhaseClock,
    driver: &Arc<Driver>,
    processes: Vec<(&Custody, CheckpointedProcess)>,
    image: &Image,
    ways: Ways<'_>,
    must_come_before: Option<&mut dyn FnMut() -> bool>,
) -> Result<Loaded, Failure> {
    if clock.phase() != Phase::Restore {
        clock.enter(Phase::Restore);
    }
    let (custodies, suspended): (Vec<&Custody>, Vec<CheckpointedProcess>) =
        processes.into_iter().unzip();
    let refused = |cause| refused(Phase::Restore, cause);
    let point = PointOfNoReturn::before(session);
    let prepare = AssertUnwindSafe(|| {
        let transfer = Transfer::prepare(session, driver, image, ways.pairs, &point)?;
        failpoint::pass("restore:prepared");
        Ok(transfer)
    });
    let transfer = catch_unwind(prepare)
        .unwrap_or_else(|panic| Err(PipelineError::of_story(panic.as_ref()).into()))
        .map_err(refused)?;
    for custody in &custodies {
        custody.note(Step::Restore);
    }
    let run = AssertUnwindSafe(|| transfer.run(driver, || Ok(suspended), ways, &point));
    let done = catch_unwind(run)
        .unwrap_or_else(|panic| Err(PipelineError::of_story(panic.as_ref()).into()));
    let failed = |phase: Phase, cause: Box<dyn Error + Send + Sync>| {
        let mut failure = Failure::new(ExitCode::RestoreFailed, phase, cause);
        let targets = custodies.iter();
        failure.targets = targets
            .map(|custody| look(driver, &custody.target))
            .collect();
        failure
    };
    let (restoring, loaded) = match done {
        Ok(done) => done,
        Err(cause) if point.is_passed() => return Err(failed(Phase::Restore, cause)),
        Err(cause) => return Err(refused(cause)),
    };
    let ended = catch_unwind(AssertUnwindSafe(
        || -> Result<(), Box<dyn Error + Send + Sync>> {
            failpoint::pass("restore:all copied");
            clock.enter(Phase::Complete);
            // Nobody unlocks one while another may not have its memory.
            let may_be_unlocked = custodies.len() == 1 && must_come_before.is_none();
            let mut locked = Vec::with_capacity(restoring.len());
            for (custody, restoring) in custodies.iter().zip(restoring) {
                custody.note(Step::RestoreComplete);
                if may_be_unlocked {
                    custody.may_be_locked();
                }
                let call = "the driver's complete (cuCheckpointOperationComplete)";
                let one = watchdog::watch(call, watchdog::USUAL, || restoring.complete())?;
                locked.push(one.unlocks_when_dropped(may_be_unlocked));
            }
            if let Some(deed) = must_come_before {
                failpoint::pass("restore:locked for good");
                if !deed() {
                    let pid = custodies.first().map_or(0, |custody| custody.target.pid);
                    return Err(StaysLocked { pid }.into());
                }
            }
            for custody in &custodies {
                custody.may_be_locked();
            }
            let locked: Vec<LockedProcess> = locked
                .into_iter()
                .map(|one| one.unlocks_when_dropped(true))
                .collect();
            failpoint::pass("restore:completed");
            clock.enter(Phase::Unlock);
            for (custody, locked) in custodies.iter().zip(locked) {
                let call = "the driver's unlock (cuCheckpointProcessUnlock)";
                watchdog::watch(call, watchdog::USUAL, || locked.let_go())?;
                custody.must_not_be_unlocked();
            }
            failpoint::pass("restore:unlocked");
            for custody in &custodies {
                let target = &custody.target;
                match RunningProcess::attach(driver, target.pid) {
                    // It ran to its end before it was looked at.
                    Err(_) if target.ends_within(DYING_TIMEOUT) => {}
                    looked => drop(looked?),
                }
            }
            Ok(())
        },
    ));
    let ended = ended.unwrap_or_else(|panic| Err(PipelineError::of_story(panic.as_ref()).into()));
    ended.map_err(|cause| failed(clock.phase(), cause))?;
    Ok(loaded)
}

/// From stored GPUs to those that are present.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ways<'a> {
    /// Stored and present GPU; what is not named stays where it is.
    pub(crate) pairs: &'a [(GpuUuid, GpuUuid)],
    /// The process knows itself on the stored GPUs, and the driver has to move it.
    pub(crate) moves: bool,
}

impl Ways<'_> {
    /// Everything stays where it is.
    pub(crate) const STAY: Self = Ways {
        pairs: &[],
        moves: false,
    };
}

/// What must come before the process runs did not.
#[derive(Debug, thiserror::Error)]
#[error("process {pid} has its memory and stays locked")]
struct StaysLocked {
    pid: u32,
}

/// Everything that a transfer to GPUs needs, in hand before the driver is asked.
struct Transfer<'a> {
    /// The lanes of each process.
    lanes_of: Vec<Range<usize>>,
    /// The present GPU of each lane.
    gpus: Vec<usize>,
    lanes: Vec<LoadLane<'a>>,
    queues: Vec<CopyQueue<PoolSlice>>,
    resources: LoadResources,
}

impl<'a> Transfer<'a> {
    fn prepare(
        session: &Session,
        driver: &Arc<Driver>,
        image: &'a Image,
        pairs: &[(GpuUuid, GpuUuid)],
        point: &PointOfNoReturn,
    ) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let plan = load_plan(session, image, Which::Gpus)?;
        let gpus = destinations(driver, image, pairs)?;
        let to = Some((driver, gpus.as_slice()));
        let lanes = lanes(session, image, &plan, to)?;
        let queues = gpus
            .iter()
            .map(|&device| CopyQueue::prepare(driver, device, plan.ring_chunks, STREAMS_IN))
            .collect::<Result<Vec<_>, _>>()?;
        let store = Arc::clone(&session.store_after_begin);
        let resources = resources(session, &plan, store, point.cancel.clone(), to)?;
        let mut next = 0;
        let lanes_of = image.manifest.processes.iter().map(|process| {
            let first = next;
            next += process.extents.len();
            first..next
        });
        Ok(Self {
            lanes_of: lanes_of.collect(),
            gpus,
            lanes,
            queues,
            resources,
        })
    }

    /// Asks the driver as soon as the first chunks wait in the rings and there are processes to ask for, those of the image in its order, and copies everything in.
    fn run(
        self,
        driver: &Driver,
        suspended: impl FnOnce() -> Result<Vec<CheckpointedProcess>, PipelineError> + Send,
        ways: Ways<'_>,
        point: &PointOfNoReturn,
    ) -> Result<(Vec<RestoringProcess>, Loaded), Box<dyn Error + Send + Sync>> {
        let (lanes_of, gpus, lanes) = (self.lanes_of, self.gpus, self.lanes);
        let mut restoring = Vec::with_capacity(lanes_of.len());
        let mut no_memory = None;
        let begin = || {
            let suspended = suspended()?;
            // A restore that runs out of GPU memory leaves the target stuck for ever: looked at as late as can be.
            let needs = gpus
                .iter()
                .copied()
                .zip(lanes.iter().map(|lane| lane.raw_len));
            if let Err(error) = must_have_memory(driver, needs) {
                no_memory = Some(error);
                return Err(PipelineError::Cancelled);
            }
            if !point.pass() {
                return Err(PipelineError::Cancelled);
            }
            let pairs = match ways.moves && !is_identity(ways.pairs) {
                true => ways.pairs,
                false => &[],
            };
            let mut extents = Vec::with_capacity(lanes.len());
            for (suspended, range) in suspended.into_iter().zip(&lanes_of) {
                let call = "the driver's restore (cuCheckpointProcessRestore)";
                let process =
                    watchdog::watch(call, watchdog::USUAL, || suspended.begin_restore(pairs))?;
                failpoint::pass("restore:begun");
                let (gpus, lanes) = (&gpus[range.clone()], &lanes[range.clone()]);
                extents.extend(match_extents(process.extents(), gpus, lanes)?);
                restoring.push(process);
            }
            Ok(extents)
        };
        let loaded = if lanes.is_empty() {
            // No GPU held data: there is nothing to fetch, and the driver still has to be asked.
            begin().map(|_none: Vec<Extent>| Loaded {
                stages: Vec::new(),
                slowest_stage: None,
            })
        } else {
            let destination = Destination::Gpus {
                queues: self.queues,
                begin: Box::new(begin),
            };
            pipeline::load(&lanes, self.resources, destination)
        };
        match (loaded, no_memory) {
            (_, Some(no_memory)) => Err(no_memory),
            (Ok(loaded), None) => Ok((restoring, loaded)),
            (Err(PipelineError::Cancelled), None) if !point.is_passed() => Err(Interrupted.into()),
            (Err(error), None) => Err(error.into()),
        }
    }
}

/// Up to here a signal gives the restore up; from here on it changes nothing, because a restore that is given up ends the target.
struct PointOfNoReturn {
    /// Whoever is first decides: the signal or the one who passes.
    is_decided: Arc<AtomicBool>,
    is_passed: AtomicBool,
    /// Cancelled by a signal that came first.
    cancel: CancellationToken,
    signal: tokio::task::JoinHandle<()>,
}

impl PointOfNoReturn {
    fn before(session: &Session) -> Self {
        let is_decided = Arc::new(AtomicBool::new(false));
        let cancel = CancellationToken::new();
        let (signalled, decided, given_up) = (
            session.cancel.clone(),
            Arc::clone(&is_decided),
            cancel.clone(),
        );
        let signal = session.runtime.spawn(async move {
            signalled.cancelled().await;
            if !decided.swap(true, Ordering::SeqCst) {
                given_up.cancel();
            }
        });
        Self {
            is_decided,
            is_passed: AtomicBool::new(false),
            cancel,
            signal,
        }
    }

    /// To be called right before the driver is asked. Whether no signal came first.
    fn pass(&self) -> bool {
        let is_first = !self.is_decided.swap(true, Ordering::SeqCst);
        self.is_passed.store(is_first, Ordering::SeqCst);
        is_first
    }

    /// Whether the driver may have been asked.
    fn is_passed(&self) -> bool {
        self.is_passed.load(Ordering::SeqCst)
    }
}

impl Drop for PointOfNoReturn {
    fn drop(&mut self) {
        self.signal.abort();
    }
}

/// Whether the image was made of this very process.
pub(crate) fn is_saved_process(manifest: &Manifest, target: &Target) -> bool {
    manifest.host.boot_id == target.boot_id
        && manifest
            .processes
            .iter()
            .any(|saved| saved.pid == target.pid && saved.start_time == target.start_time)
}

/// A refusal before the driver was asked: nothing was changed. A memory budget that is too small is configuration.
fn refused(phase: Phase, cause: Box<dyn Error + Send + Sync>) -> Failure {
    let plan = match cause.downcast_ref::<LoadFailed>() {
        Some(LoadFailed::Plan(error)) => Some(error),
        _ => cause.downcast_ref(),
    };
    let code = plan.map_or(ExitCode::RestoreRefused, plan_code);
    Failure::new(code, phase, cause)
}

/// Where a process cannot be made again, every chunk is verified before the driver is asked.
fn default_verify(kind: ImageKind, into_fresh: bool) -> Verify {
    match kind {
        ImageKind::Gpu if !into_fresh => Verify::All,
        _ => Verify::Stream,
    }
}

/// Why this image does not go into this process.
#[derive(Debug, thiserror::Error)]
enum CheckError {
    #[error(
        "a GPU-only image goes into a process that is there: give --pid, and --into-fresh for one that came up suspended on purpose"
    )]
    NeedsAProcess,
    #[error(
        "a GPU-only image goes back only into the process that its save suspended (pid {saved_pid}); process {pid} is another one; \
         for a process that came up suspended on purpose give --into-fresh"
    )]
    AnotherProcess { saved_pid: u32, pid: u32 },
    #[error("this version restores images of one process; image has {count}")]
    ProcessCount { count: usize },
    #[error(
        "the image is of kind {kind}, and brings its processes along: restore it without --pid"
    )]
    Kind { kind: ImageKind },
    #[error(
        "image {} is not the job's newest, {}: the process has computed on since, and its host memory does not fit the older \
         GPU memory; restore the newest, or give --into-fresh for a process that came up suspended on purpose",
        image_id(*generation),
        image_id(*newest)
    )]
    NotTheNewest { generation: u64, newest: u64 },
    #[error(
        "attempt {attempt} to save the process began on {host} after image {}, and what became of it is not known ({place}): the process may be newer than the image; \
         run `ckptstream resume` or `ckptstream recover` there first, or give --into-fresh for a process that came up suspended on purpose",
        image_id(*generation)
    )]
    SavedSince {
        generation: u64,
        attempt: String,
        host: String,
        place: String,
    },
    #[error("image {} was pruned while it was opened; restore again", image_id(*generation))]
    Dropped { generation: u64 },
    #[error("the image was captured in {mode} mode, which this version cannot restore")]
    Mode { mode: CaptureMode },
    #[error("{uuid} is no GPU of this node")]
    NoGpu { uuid: String },
    #[error(
        "{} has {free} bytes free, and the image needs {needed} there; free GPU memory, or choose another GPU with --gpu-map",
        uuid
    )]
    Memory {
        uuid: GpuUuid,
        free: u64,
        needed: u64,
    },
}

/// An older GPU-only image under a newer host memory computes on wrong, with all digests right.
fn must_be_the_newest(
    session: &Session,
    image: &Image,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let log = session.wait(JobLog::read(&*session.store, &session.config.job))?;
    // What cannot be read may be an image.
    let may_be_image = |entry: &Entry| {
        matches!(
            entry,
            Entry::Image(_) | Entry::Unknown { .. } | Entry::Damaged { .. }
        )
    };
    let newest = log.entries().rev().find(|(_, entry)| may_be_image(entry));
    if let Some((newest, _)) = newest.filter(|(newest, _)| *newest != image.generation) {
        return Err(CheckError::NotTheNewest {
            generation: image.generation,
            newest,
        }
        .into());
    }
    // Nor must a save have begun since that may be sealed somewhere: the process may be as that one left it.
    let since = log.entries().rev().find_map(|(slot, entry)| match entry {
        Entry::Saving(saving) if slot > image.generation => Some(saving),
        _ => None,
    });
    match since.filter(|saving| !log.is_dropped(&saving.attempt)) {
        Some(saving) => Err(CheckError::SavedSince {
            generation: image.generation,
            attempt: saving.attempt.clone(),
            host: saving.by.host.clone(),
            place: saving
                .spill
                .clone()
                .unwrap_or_else(|| "no spill".to_owned()),
        }
        .into()),
        None => Ok(()),
    }
}

/// An image that is ours to restore.
struct Chosen {
    /// Verified up to its data objects.
    image: Image,
    /// The newer ones that were passed over.
    skipped: Vec<String>,
    /// `None` of one that is only read.
    taken: Option<Taken>,
}

/// The job is ours.
struct Taken {
    ours: Ownership,
    /// What keeps `prune` from removing the image.
    pin: Key,
}

/// Chooses, opens the job, and chooses again if the log has grown: an image that is committed meanwhile is not overlooked, and none can be later, because whoever could commit it is fenced.
fn read_image(session: &Session, wanted: Wanted) -> Result<Chosen, Failure> {
    let chosen = choose(session, wanted)?;
    if wanted.read_only {
        let (image, skipped) = chosen;
        return Ok(Chosen {
            image,
            skipped,
            taken: None,
        });
    }
    let mut ours = take_the_job(session, wanted.while_saved)?;
    match pin_what_is_chosen(session, wanted, &mut ours, chosen) {
        Ok((image, skipped, pin)) => Ok(Chosen {
            image,
            skipped,
            taken: Some(Taken { ours, pin }),
        }),
        Err(failure) => {
            give_up_the_job(session, &ours);
            Err(failure)
        }
    }
}

/// The image that is wanted, and the newer ones that were passed over.
fn choose(session: &Session, wanted: Wanted) -> Result<(Image, Vec<String>), Failure> {
    let is_named = matches!(wanted.image, ImageRef::Generation(_));
    let (image, skipped, sealed) = open_image(session, wanted.image)?;
    // An older image under a newer host memory computes on wrong; and nobody means an older one who does not name it.
    if let Some(sealed) = sealed.filter(|_| !(is_named && wanted.into_fresh)) {
        return Err(refused(Phase::Read, sealed.into()));
    }
    if !wanted.into_fresh {
        must_be_the_newest(session, &image).map_err(|cause| refused(Phase::Read, cause))?;
    }
    Ok((image, skipped))
}

/// What was committed until the job was opened is seen now, and nothing can be any more: the choice is made again if there is something newer.
fn pin_what_is_chosen(
    session: &Session,
    wanted: Wanted,
    ours: &mut Ownership,
    (image, skipped): (Image, Vec<String>),
) -> Result<(Image, Vec<String>, Key), Failure> {
    let newest = ours.log().images().first().map(|(newest, _)| *newest);
    let is_latest = matches!(wanted.image, ImageRef::Latest);
    let (image, skipped) = match newest {
        Some(newest) if is_latest && newest != image.generation => choose(session, wanted)?,
        _ => (image, skipped),
    };
    let since = ours
        .log()
        .entries()
        .rev()
        .find_map(|(slot, entry)| match entry {
            Entry::Saving(saving) if slot > image.generation => Some(saving),
            _ => None,
        });
    if let Some(saving) = since.filter(|saving| !ours.log().is_dropped(&saving.attempt))
        && let Some(place) = &saving.spill
    {
        tracing::warn!(
            "attempt {} began on {} after this image, and may be sealed in {place}; the job goes on without it now",
            saving.attempt,
            saving.by.host
        );
    }
    let pin = pin_and_look(session, ours, &image)?;
    Ok((image, skipped, pin))
}

/// Nothing came of it: whoever saved the job before may go on, unless it was ours before.
fn give_up_the_job(session: &Session, ours: &Ownership) {
    if session.ours.is_some() {
        return;
    }
    let giving_up = ours.give_up(&*session.store_after_begin);
    let given_up = session.wait(async { tokio::time::timeout(UNPIN_TIMEOUT, giving_up).await });
    if !matches!(given_up, Ok(Ok(()))) {
        tracing::warn!("the job stays opened in its log, although nothing was restored");
    }
}

/// Waits for whoever saves the job, and opens it.
fn take_the_job(session: &Session, while_saved: WhileSaved) -> Result<Ownership, Failure> {
    let (store, job) = (&*session.store, &session.config.job);
    session.wait(async {
        if let Some(ours) = &session.ours {
            let mut ours = ours.lock().await;
            ours.must_be_ours(store).await.map_err(not_ours)?;
            return Ok(ours.clone());
        }
        let log = ownership::wait_for_savers(store, job, while_saved, &session.cancel).await;
        let log = log.map_err(not_ours)?;
        ownership::must_begin_in_order(session, &log)
            .await
            .map_err(not_ours)?;
        let writer = random_hex::<16>();
        let ours = Ownership::open(store, job, &writer, log).await;
        failpoint::pass("restore:job opened");
        ours.map_err(not_ours)
    })
}

/// Pins the image, then looks whether it is still there to be read, and the job still ours.
fn pin_and_look(session: &Session, ours: &mut Ownership, image: &Image) -> Result<Key, Failure> {
    let (store, job) = (&*session.store, &session.config.job);
    let pin = session.wait(pins::pin(store, job, &image.attempt));
    let pin = pin.map_err(|error| refused(Phase::Read, error.into()))?;
    failpoint::pass("restore:pinned");
    let looked = match session.wait(ours.must_be_ours(store)) {
        Ok(log) if log.is_dropped(&image.attempt) => {
            let generation = image.generation;
            Err(refused(
                Phase::Read,
                CheckError::Dropped { generation }.into(),
            ))
        }
        Ok(_log) => Ok(()),
        Err(error) => Err(not_ours(error)),
    };
    match looked {
        Ok(()) => Ok(pin),
        Err(failure) => {
            unpin(session, &pin);
            Err(failure)
        }
    }
}

fn not_ours(error: OwnershipError) -> Failure {
    let code = match error.code() {
        ExitCode::NotOurs => ExitCode::NotOurs,
        _ => ExitCode::RestoreRefused,
    };
    Failure::new(code, Phase::Read, error)
}

/// What cannot be deleted ages.
fn unpin(session: &Session, pin: &Key) {
    let deleting = session.store_after_begin.delete(pin);
    let deleted = session.wait(async { tokio::time::timeout(UNPIN_TIMEOUT, deleting).await });
    if !matches!(deleted, Ok(Ok(()))) {
        tracing::warn!("{pin} stays in the store, and keeps the image from being pruned for a day");
    }
}

/// The driver, up, and the suspended process. Of the process nothing but its state was asked.
struct Held {
    driver: Arc<Driver>,
    /// With every context retained.
    suspended: Result<CheckpointedProcess, DriverError>,
}

impl Held {
    fn take(target: &Target) -> Result<Self, DriverError> {
        let driver = Driver::open()?;
        driver.require_custom_storage()?;
        let suspended = CheckpointedProcess::attach(&driver, target.pid);
        let suspended = suspended.and_then(|suspended| {
            driver.retain_contexts()?;
            Ok(suspended)
        });
        Ok(Self { driver, suspended })
    }
}

/// Everything that can be known before the driver is asked to restore.
fn check(
    session: &Session,
    target: &Target,
    manifest: &Manifest,
    into_fresh: bool,
    held: Result<Held, DriverError>,
) -> Result<(Arc<Driver>, GpuPairs, CheckpointedProcess), Box<dyn Error + Send + Sync>> {
    let (kind, mode) = (manifest.kind, manifest.capture.mode);
    if kind != ImageKind::Gpu {
        return Err(CheckError::Kind { kind }.into());
    }
    if mode != CaptureMode::CustomStorage {
        return Err(CheckError::Mode { mode }.into());
    }
    let [saved] = manifest.processes.as_slice() else {
        let count = manifest.processes.len();
        return Err(CheckError::ProcessCount { count }.into());
    };
    if !into_fresh && !is_saved_process(manifest, target) {
        let (saved_pid, pid) = (saved.pid, target.pid);
        return Err(CheckError::AnotherProcess { saved_pid, pid }.into());
    }
    let Held { driver, suspended } = held?;
    tell_of_another_driver(manifest, &driver);
    let wanted = &session.config.driver.gpu_map;
    let pairs = map_gpus(saved, driver.devices(), wanted)?;
    let suspended = suspended?;
    must_fit(&driver, manifest, &pairs)?;
    session.check_cancelled()?;
    Ok((driver, pairs, suspended))
}

fn tell_of_another_driver(manifest: &Manifest, driver: &Driver) {
    let saved_by = manifest.capture.driver_version.as_deref();
    if saved_by != driver.driver_version() {
        let unknown = "an unknown version";
        tracing::warn!(
            "the image was saved under driver {}, this is {}",
            saved_by.unwrap_or(unknown),
            driver.driver_version().unwrap_or(unknown)
        );
    }
}

/// What the image has of GPUs would have room now. Looked at again right before the driver is asked; here it spares a download that would be for nothing.
fn must_fit(
    driver: &Driver,
    manifest: &Manifest,
    pairs: &GpuPairs,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let mut needs = Vec::new();
    for extent in manifest.gpu_extents() {
        let device = present_device(driver, pairs, &extent.device)?;
        needs.push((device, extent.raw_len));
    }
    must_have_memory(driver, needs.into_iter())
}

/// Every GPU (by index) has so many bytes free now, of all that are needed there.
fn must_have_memory(
    driver: &Driver,
    needs: impl Iterator<Item = (usize, u64)>,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let mut of_devices = BTreeMap::<usize, u64>::new();
    for (device, needed) in needs {
        let sum = of_devices.entry(device).or_default();
        *sum = sum.saturating_add(needed);
    }
    for (device, needed) in of_devices {
        let free = driver.free_memory(device)?;
        if free < needed {
            let uuid = driver.devices()[device].uuid;
            return Err(CheckError::Memory { uuid, free, needed }.into());
        }
    }
    Ok(())
}

/// Index of the present GPU that a stored one is mapped to.
fn present_device(
    driver: &Driver,
    pairs: &[(GpuUuid, GpuUuid)],
    stored: &str,
) -> Result<usize, CheckError> {
    let no_gpu = || CheckError::NoGpu {
        uuid: stored.to_owned(),
    };
    let old: GpuUuid = stored.parse().ok().ok_or_else(no_gpu)?;
    let new = pairs
        .iter()
        .find(|(from, _)| *from == old)
        .map_or(old, |&(_, new)| new);
    let devices = driver.devices();
    let index = devices.iter().position(|device| device.uuid == new);
    index.ok_or_else(no_gpu)
}

/// The present GPU of each lane, in the order of the image's extents.
fn destinations(
    driver: &Driver,
    image: &Image,
    pairs: &[(GpuUuid, GpuUuid)],
) -> Result<Vec<usize>, CheckError> {
    image
        .manifest
        .gpu_extents()
        .map(|extent| present_device(driver, pairs, &extent.device))
        .collect()
}

/// Brings the driver's extents into the order of the lanes; their lengths must be the stored ones.
fn match_extents(
    extents: &[Extent],
    gpus: &[usize],
    lanes: &[LoadLane<'_>],
) -> Result<Vec<Extent>, PipelineError> {
    let mismatch = |what: String| PipelineError::Extents { what };
    if extents.len() != lanes.len() {
        return Err(mismatch(format!(
            "the driver gave memory on {} GPUs, and the image has {}",
            extents.len(),
            lanes.len()
        )));
    }
    let matched = gpus.iter().zip(lanes).map(|(&device, lane)| {
        let found = extents.iter().find(|extent| extent.device == device);
        let extent = found.ok_or_else(|| {
            mismatch(format!(
                "the driver gave no memory on GPU {device}, where {} belongs",
                lane.key
            ))
        })?;
        if extent.len != lane.raw_len {
            return Err(mismatch(format!(
                "the driver gave {} bytes on {}, and {} holds {}",
                extent.len, extent.uuid, lane.key, lane.raw_len
            )));
        }
        Ok(extent.clone())
    });
    matched.collect()
}
