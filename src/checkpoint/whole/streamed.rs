//! The GPUs' memory of a whole tree through custom storage: begin all → stream → land → seal → complete all; and back into the very same processes.
//!
//! In: locked processes, the memory of a save. Out: suspended ones, whose GPUs' memory is sealed in the store; and the way back. What can fail: the driver, the store.
//!
//! | we die, or fail | what exists |
//! |---|---|
//! | before the first BEGIN | locked processes |
//! | before the seal | processes whose memory is mapped by us: lost |
//! | a BEGIN that is refused after others | those that were begun are sealed, completed and given back, and all are unlocked |
//! | sealed | suspended processes, or some that Complete left astray; their memory can be read back |
//!
//! Nothing is completed before what all processes held is sealed; then Complete is tried on every one.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::{Around, keep_first};
use crate::checkpoint::commit::{Captured, Tabled, Written, write_manifest, write_tables};
use crate::checkpoint::memory::Memory;
use crate::checkpoint::{expect_still, land};
use crate::config::OnFailure;
use crate::custody::Custody;
use crate::driver::{
    CheckpointedProcess, CheckpointingProcess, Extent, LockedProcess, ProcessState,
};
use crate::error::{ExitCode, Failure, Phase, one_line};
use crate::failpoint;
use crate::image::Image;
use crate::journal::Step;
use crate::manifest::sealed_manifest_key;
use crate::outcome::StageOutcome;
use crate::phases::PhaseClock;
use crate::pipeline::{self, SavedLane, all_runs};
use crate::restore::{self, Ways};
use crate::sealed;
use crate::session::Session;
use crate::store::{Key, Store};
use crate::watchdog;

/// What the GPUs held, in the store.
pub(super) struct Sealed {
    /// As a reader would open it, but that no log names it.
    pub(super) image: Image,
    /// For the manifest of the whole image.
    pub(super) objects: Vec<Tabled>,
    /// Keys of the data objects.
    pub(super) landed: Vec<Key>,
    pub(super) stages: Vec<StageOutcome>,
    /// From the first byte to the seal.
    pub(super) took: Duration,
}

/// Brings every process to CHECKPOINTED, with its GPUs' memory sealed in the store.
pub(super) fn seal_all(
    around: &Around<'_>,
    clock: &mut PhaseClock,
    locked: Vec<LockedProcess>,
    memory: &mut Memory,
) -> Result<(Vec<CheckpointedProcess>, Sealed), Failure> {
    match begin_all(around, locked) {
        Ok(begun) => {
            let sealed = seal(around, clock, &begun, memory)?;
            around.is_sealed.store(true, Ordering::Relaxed);
            let completed = complete_all(around, begun);
            completed
                .map(|processes| (processes, sealed))
                .map_err(|cause| around.failed(Phase::Seal, cause))
        }
        Err(refused) => Err(give_up(around, clock, memory, refused)),
    }
}

/// A process whose checkpoint the driver did not begin.
struct Refused {
    /// Those before it.
    begun: Vec<CheckpointingProcess>,
    /// It, if it is locked still, and those behind it.
    locked: Vec<LockedProcess>,
    cause: Box<dyn Error + Send + Sync>,
}

/// One after the other: the driver is asked for nothing else meanwhile.
fn begin_all(
    around: &Around<'_>,
    locked: Vec<LockedProcess>,
) -> Result<Vec<CheckpointingProcess>, Refused> {
    let mut begun = Vec::with_capacity(locked.len());
    let mut waiting = locked.into_iter();
    for (custody, process) in around.custodies.iter().zip(waiting.by_ref()) {
        let (locked, cause) = match custody.step(&Step::Begin) {
            Err(error) => (Some(process), error.into()),
            Ok(()) => {
                custody.must_not_be_unlocked();
                let call = "the driver's checkpoint (cuCheckpointProcessCheckpoint)";
                match watchdog::watch(call, watchdog::USUAL, || process.begin_checkpoint()) {
                    Ok(process) => {
                        begun.push(process);
                        failpoint::pass("begin:one begun");
                        continue;
                    }
                    Err(mut error) => (error.locked.take(), error.into()),
                }
            }
        };
        return Err(Refused {
            begun,
            locked: locked.into_iter().chain(waiting).collect(),
            cause,
        });
    }
    Ok(begun)
}

/// The driver refused one: those that it has begun get their memory back, and all are unlocked.
fn give_up(
    around: &Around<'_>,
    clock: &mut PhaseClock,
    memory: &mut Memory,
    refused: Refused,
) -> Failure {
    let Refused {
        begun,
        locked,
        cause,
    } = refused;
    let custodies = &around.custodies[..begun.len()];
    let mut given: Result<(), Box<dyn Error + Send + Sync>> = Ok(());
    if !begun.is_empty() {
        tracing::warn!(
            "{} of {} processes were begun, and are given their memory back",
            begun.len(),
            around.custodies.len()
        );
        given = seal(around, clock, &begun, memory)
            .map_err(|failure| failure.cause)
            .and_then(|sealed| {
                let processes = complete_all(around, begun)?;
                for custody in custodies {
                    custody.note(Step::GiveBack);
                    custody.flush();
                }
                bring_back(around, clock, &sealed.image, custodies, processes)
            });
    }
    let mut attached = Vec::new();
    attached.extend(given.err().map(|error| {
        format!(
            "what was begun did not get its memory back: {}",
            one_line(error.as_ref())
        )
    }));
    // Locked processes are innocent, whatever became of the others.
    for process in locked.into_iter().rev() {
        attached.extend(process.unlock().err().map(|error| one_line(&error)));
    }
    for custody in around.custodies {
        custody.must_not_be_unlocked();
    }
    let mut failure = around.failed(Phase::Begin, cause);
    failure.attached.extend(attached);
    failure
}

/// Streams what the processes hold, and seals it.
fn seal(
    around: &Around<'_>,
    clock: &mut PhaseClock,
    begun: &[CheckpointingProcess],
    memory: &mut Memory,
) -> Result<Sealed, Failure> {
    let session = around.session;
    let since = clock.enter(Phase::Stream);
    // What has no other place is stored at last, or never.
    if session.config.spill.on_failure != Some(OnFailure::Abandon) {
        session.store_after_begin.hold(true);
    }
    let sealed = stream_and_seal(around, clock, begun, memory);
    session.store_after_begin.hold(false);
    let (image, objects, landed, stages) = sealed.map_err(|cause| Failure {
        // Of one that died meanwhile, too: it had computed on what is lost now.
        code: ExitCode::Lost,
        ..around.failed(clock.phase(), cause)
    })?;
    for custody in &around.custodies[..begun.len()] {
        custody.note(Step::Sealed);
        custody.flush();
    }
    failpoint::pass("seal:sealed");
    Ok(Sealed {
        image,
        objects,
        landed,
        stages,
        took: since.elapsed(),
    })
}

type Landed = (Image, Vec<Tabled>, Vec<Key>, Vec<StageOutcome>);

fn stream_and_seal(
    around: &Around<'_>,
    clock: &mut PhaseClock,
    begun: &[CheckpointingProcess],
    memory: &mut Memory,
) -> Result<Landed, Box<dyn Error + Send + Sync>> {
    let (session, driver, attempt) = (around.session, around.driver, around.attempt);
    let store = &session.store_after_begin;
    let mut lanes: Vec<SavedLane> = Vec::new();
    let mut runs = Vec::new();
    for round in rounds(begun) {
        let into = Arc::clone(store) as Arc<dyn Store>;
        let dealt = memory.deal_out(session, round, into, &attempt.uploads);
        let Some((in_run, encoders, resources)) = dealt else {
            unreachable!("a run was prepared for every process");
        };
        let saved = pipeline::save(in_run, encoders, resources)?;
        lanes.extend(saved.lanes);
        runs.push(saved.stages);
    }
    failpoint::pass("stream:all acknowledged");

    clock.enter(Phase::Land);
    let etags = land(session, &**store, &lanes)?;
    let landed = lanes.iter().map(|lane| lane.key.clone()).collect();
    failpoint::pass("land:all landed");

    clock.enter(Phase::Seal);
    let members = &around.members()[..begun.len()];
    for target in members {
        expect_still(driver, target, ProcessState::Checkpointing)?;
    }
    let into = (&**store as &dyn Store, attempt.uploads.as_slice());
    let objects = write_tables(session, driver, into, lanes, etags)?;
    let captured = Captured::gpus(driver, members.to_vec());
    let into = (&**store as &dyn Store, sealed_manifest_key(&attempt.nonce));
    let Written { entry, image } =
        write_manifest(session, &captured, attempt, into, objects.clone())?;
    let sealed = sealed::Sealed {
        format: sealed::FORMAT,
        job: session.config.job.to_string(),
        store: session.store.describe(),
        next_slot: attempt.next_slot,
        entry,
    };
    session.wait(sealed.put(&**store, &session.config.job))?;
    Ok((image, objects, landed, all_runs(runs)))
}

/// What is copied at once: of each GPU, what one process has there.
fn rounds(begun: &[CheckpointingProcess]) -> Vec<Vec<(usize, &Extent)>> {
    let mut rounds: Vec<Vec<(usize, &Extent)>> = Vec::new();
    for (member, process) in begun.iter().enumerate() {
        for extent in process.extents() {
            let is_taken = |round: &Vec<(usize, &Extent)>| {
                round.iter().any(|(_, other)| other.device == extent.device)
            };
            match rounds.iter_mut().find(|round| !is_taken(round)) {
                Some(round) => round.push((member, extent)),
                None => rounds.push(vec![(member, extent)]),
            }
        }
    }
    rounds
}

/// Complete is tried on every one.
fn complete_all(
    around: &Around<'_>,
    begun: Vec<CheckpointingProcess>,
) -> Result<Vec<CheckpointedProcess>, Box<dyn Error + Send + Sync>> {
    let mut first = None;
    let mut completed = Vec::with_capacity(begun.len());
    for (custody, process) in around.custodies.iter().zip(begun) {
        custody.note(Step::Complete);
        let call = "the driver's complete (cuCheckpointOperationComplete)";
        match watchdog::watch(call, watchdog::USUAL, || process.complete()) {
            Ok(process) => completed.push(process),
            Err(error) => keep_first(&mut first, error),
        }
        failpoint::pass("seal:one completed");
    }
    match first {
        None => Ok(completed),
        Some(error) => Err(error),
    }
}

/// Every process gets back what was sealed, and then all are unlocked. No signal stops that.
pub(super) fn bring_back(
    around: &Around<'_>,
    clock: &mut PhaseClock,
    image: &Image,
    custodies: &[Custody],
    processes: Vec<CheckpointedProcess>,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let session = Session {
        cancel: CancellationToken::new(),
        ..around.session.clone()
    };
    let processes = custodies.iter().zip(processes).collect();
    let driver = around.driver;
    restore::bring_back(&session, clock, driver, processes, image, Ways::STAY, None)
        .map(drop)
        .map_err(|failure| failure.cause)
}
