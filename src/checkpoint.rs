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
//! | committed | this one | checkpointed, or looked up | 0, else 14 |
//!
//! Everything that can fail or take time comes before the lock; nothing is allocated or looked up for the first time after BEGIN. Complete is called only
//! for an image that is committed: it is the moment at which the GPU's bytes are lost. Failing clean-up is attached to the cause, never put in its place.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures::future::join_all;
use tokio_util::sync::CancellationToken;

use crate::codec::Encoder;
use crate::driver::{
    BufferPool, CheckpointedProcess, CheckpointingProcess, CopyQueue, Device, Driver, DriverError,
    LockedProcess, ProcessState, RunningProcess,
};
use crate::error::{ExitCode, Failure, Phase, TargetState};
use crate::image::{self, Image, ImageRef, LoadError};
use crate::job_log::{self, CommitError, ImageEntry, JobLog};
use crate::manifest::{
    AttemptClaim, Capture, CaptureMode, DeviceRecord, ExtentRecord, FORMAT, FrameTable, Host,
    ImageKind, Manifest, ObjectRecord, ProcessRecord,
};
use crate::outcome::{Outcome, StageOutcome};
use crate::phases::PhaseClock;
use crate::pipeline::{self, SaveLane, SaveResources, Saved, SavedLane};
use crate::plan::{SavePlan, SaveSettings, plan_save};
use crate::progress::LaneMeter;
use crate::restore;
use crate::session::{Interrupted, Session, code_before_begin};
use crate::store::{Key, PutOutcome, Store, StoreError, UploadId};
use crate::target::{Target, TargetError};

/// Clean-up of unfinished uploads must not hold back the verdict for longer.
const ABORT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a target may take to die before its state counts as unknown.
const DYING_TIMEOUT: Duration = Duration::from_secs(1);

/// What becomes of the target after the commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// It stays suspended, its GPUs released.
    Suspend,
    /// It gets its memory back from the image that was just stored, and runs on.
    Resume,
}

/// Saves a running CUDA process.
///
/// # Errors
/// A [`Failure`] with the code of PROTOCOL section 6, the targets as looked up, and the cause.
pub fn checkpoint(session: &Session, pid: u32, then: Then) -> Result<Outcome, Failure> {
    let mut clock = PhaseClock::start(&session.meter, Phase::Prepare);
    let (driver, target, running) = take_in_hand(session, pid)?;
    let attempt = Attempt::open(session, &driver, &target)?;
    let outcome = save(session, &mut clock, &driver, &target, &attempt, running);
    let (committed, suspended) = match outcome {
        Ok(saved) => saved,
        Err(mut failure) => {
            failure.attached.extend(attempt.abort_uploads(session, &[]));
            return Err(failure);
        }
    };
    let free_again = match then {
        Then::Suspend => committed.suspended_at,
        Then::Resume => resume(
            session,
            &mut clock,
            &driver,
            &target,
            suspended,
            &committed.image,
        )?,
    };
    Ok(report(
        clock, session, &driver, &target, committed, free_again,
    ))
}

/// A committed image, and how it came about.
struct Committed {
    image: Image,
    stages: Vec<StageOutcome>,
    slowest_stage: Option<String>,
    locked_at: Instant,
    suspended_at: Instant,
    memory_planned: u64,
}

/// Everything from the last preparations to CHECKPOINTED.
fn save(
    session: &Session,
    clock: &mut PhaseClock,
    driver: &Arc<Driver>,
    target: &Target,
    attempt: &Attempt,
    running: RunningProcess,
) -> Result<(Committed, CheckpointedProcess), Failure> {
    let memory = Memory::allocate(session, driver, attempt.plan.clone())
        .map_err(|cause| without_memory(driver, target, cause))?;
    let memory_planned = memory.plan.total_bytes;

    let locked_at = clock.enter(Phase::Lock);
    let locked = lock(session, driver, target, running)?;

    clock.enter(Phase::Begin);
    let begun = begin(driver, target, locked)?;

    clock.enter(Phase::Stream);
    let lost =
        |phase: Phase, cause: Box<dyn Error + Send + Sync>| lost(driver, target, phase, cause);
    let (lanes, resources) = memory.into_pipeline(session, &begun, attempt);
    let Saved {
        lanes,
        stages,
        slowest_stage,
    } = pipeline::save(lanes, resources).map_err(|error| lost(Phase::Stream, error.into()))?;

    clock.enter(Phase::Land);
    let etags = land(session, &lanes).map_err(|error| lost(Phase::Land, error.into()))?;
    let leftovers = attempt.abort_uploads(session, &lanes);
    for leftover in leftovers {
        tracing::warn!("{leftover}");
    }

    clock.enter(Phase::Commit);
    expect_still(driver, target, ProcessState::Checkpointing)
        .map_err(|error| lost(Phase::Commit, error.into()))?;
    let image =
        commit(session, driver, target, attempt, lanes, etags).map_err(|error| Failure {
            code: error.code(),
            ..lost(Phase::Commit, error.into())
        })?;

    clock.enter(Phase::Complete);
    let suspended = begun.complete().map_err(|error| Failure {
        code: ExitCode::CommittedTargetAstray,
        generation: Some(image.generation),
        ..lost(Phase::Complete, error.into())
    })?;
    let committed = Committed {
        image,
        stages,
        slowest_stage,
        locked_at,
        suspended_at: Instant::now(),
        memory_planned,
    };
    Ok((committed, suspended))
}

/// The driver, the target's identity, and the target itself, running.
fn take_in_hand(
    session: &Session,
    pid: u32,
) -> Result<(Arc<Driver>, Target, RunningProcess), Failure> {
    let refused = |code: ExitCode, cause: Box<dyn Error + Send + Sync>| {
        Failure::new(code, Phase::Prepare, cause)
    };
    let target = Target::look(pid).map_err(|error| {
        let code = match error {
            TargetError::Gone { .. } => ExitCode::NothingToSave,
            TargetError::Thread { .. } | TargetError::Ourselves { .. } => ExitCode::Config,
            _ => ExitCode::Preflight,
        };
        refused(code, error.into())
    })?;
    let driver = Driver::open().map_err(|error| refused(ExitCode::Preflight, error.into()))?;
    driver
        .require_custom_storage()
        .map_err(|error| refused(ExitCode::Preflight, error.into()))?;
    if target.is_stopped() {
        return Err(refused(ExitCode::Preflight, Box::new(Stopped { pid })));
    }
    let running = RunningProcess::attach(&driver, pid).map_err(|error| {
        let code = match &error {
            DriverError::WrongState {
                found: ProcessState::Checkpointed,
                ..
            } if suspended_under_an_image(session, &target) => ExitCode::NothingToSave,
            DriverError::WrongState {
                found: ProcessState::Failed,
                ..
            } => ExitCode::Preflight,
            DriverError::WrongState { .. } => ExitCode::NotOurs,
            _ => ExitCode::Preflight,
        };
        refused(code, error.into())
    })?;
    // The mapping will live in these contexts; each takes time and GPU memory, so not before the target is known to be one.
    driver
        .retain_contexts()
        .map_err(|error| refused(ExitCode::Preflight, error.into()))?;
    Ok((driver, target, running))
}

/// A stopped process cannot answer the lock.
#[derive(Debug, thiserror::Error)]
#[error(
    "process {pid} is stopped, so the driver cannot lock it; continue it first (kill -CONT {pid}), or thaw its cgroup"
)]
struct Stopped {
    pid: u32,
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

/// This save's own prefix in the store: its name, its place in the log, an open upload per GPU.
struct Attempt {
    nonce: String,
    next_slot: u64,
    plan: SavePlan,
    uploads: Vec<OpenUpload>,
}

/// A multipart upload for the extent that a GPU may turn out to hold.
struct OpenUpload {
    device: usize,
    key: Key,
    upload: UploadId,
}

impl Attempt {
    /// Plans, claims a prefix, reads the log, opens the uploads. On failure nothing of it stays but the claim.
    fn open(session: &Session, driver: &Driver, target: &Target) -> Result<Self, Failure> {
        let plan = plan(session, driver)?;
        let mut attempt = Self {
            nonce: nonce(),
            next_slot: 0,
            plan,
            uploads: Vec::new(),
        };
        match session.wait(attempt.claim(session, driver, target)) {
            Ok(()) => Ok(attempt),
            Err(cause) => {
                let code = if session.cancel.is_cancelled() {
                    ExitCode::RolledBack
                } else {
                    cause.code()
                };
                let mut failure = Failure::new(code, Phase::Prepare, cause);
                failure.targets = vec![look(driver, target)];
                failure.attached = attempt.abort_uploads(session, &[]);
                Err(failure)
            }
        }
    }

    async fn claim(
        &mut self,
        session: &Session,
        driver: &Driver,
        target: &Target,
    ) -> Result<(), OpenError> {
        let job = &session.config.job;
        let claim = AttemptClaim {
            format: FORMAT,
            job: job.to_string(),
            attempt: self.nonce.clone(),
            tool: tool(),
            host: host_name(),
            pid: std::process::id(),
            created_ms: now_ms(),
        };
        let key =
            Key::of_job(job, &crate::manifest::claim_key(&self.nonce)).map_err(OpenError::Key)?;
        let put = session.store.put_if_absent(&key, claim.encode().into());
        if put.await? == PutOutcome::AlreadyExists {
            let key = key.to_string();
            return Err(OpenError::Claimed { key });
        }
        // The commit rests on it, so it is tried, not assumed: a second claim with other bytes must be turned away.
        let second = AttemptClaim {
            created_ms: claim.created_ms + 1,
            ..claim
        };
        let put = session.store.put_if_absent(&key, second.encode().into());
        if put.await? == PutOutcome::Created {
            return Err(OpenError::Unconditional {
                store: session.store.describe(),
            });
        }
        self.next_slot = JobLog::read(&*session.store, job)
            .await
            .map_err(OpenError::Log)?
            .next_slot();

        let nonce = self.nonce.as_str();
        let opened = join_all(driver.devices().iter().enumerate().map(
            |(device, gpu)| async move {
                let relative = format!(
                    "data/{nonce}/{}/gpu-{}.{}.zst",
                    target.pid,
                    bare_uuid(gpu),
                    short_nonce()
                );
                let key = Key::of_job(job, &relative).map_err(OpenError::Key)?;
                let upload = session.store.begin_upload(&key).await?;
                Ok::<_, OpenError>(OpenUpload {
                    device,
                    key,
                    upload,
                })
            },
        ));
        let mut failed = None;
        let opened = opened.await;
        for outcome in opened {
            match outcome {
                Ok(upload) => self.uploads.push(upload),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Aborts every upload whose object did not land; says which could not be aborted.
    fn abort_uploads(&self, session: &Session, landed: &[SavedLane]) -> Vec<String> {
        let unused = self
            .uploads
            .iter()
            .filter(|open| landed.iter().all(|lane| lane.key != open.key));
        let aborts = unused.map(|open| async move {
            let aborted = session
                .store_after_begin
                .abort_upload(&open.key, &open.upload)
                .await;
            aborted.err().map(|error| {
                format!(
                    "an unfinished upload stays in the store: {}",
                    crate::error::chain(&error).join(": ")
                )
            })
        });
        let all =
            session.wait(async { tokio::time::timeout(ABORT_TIMEOUT, join_all(aborts)).await });
        match all {
            Ok(outcomes) => outcomes.into_iter().flatten().collect(),
            Err(_elapsed) => vec![format!(
                "unfinished uploads stay in the store: they could not be aborted within {ABORT_TIMEOUT:?}"
            )],
        }
    }
}

/// Why an attempt could not be opened.
#[derive(Debug, thiserror::Error)]
enum OpenError {
    #[error("the store does not accept this save")]
    Store(#[from] StoreError),
    #[error("the job's log cannot be read")]
    Log(#[source] job_log::LogError),
    #[error("a key of this save is not legal")]
    Key(#[source] crate::store::BadKey),
    #[error("{key} is claimed by another save")]
    Claimed { key: String },
    #[error(
        "{store} ignores If-None-Match: it overwrote an object that a conditional write must leave alone, so two savers could both commit; \
         use a store with conditional writes (store.url, store.endpoint)"
    )]
    Unconditional { store: String },
}

impl OpenError {
    fn code(&self) -> ExitCode {
        match self {
            Self::Store(error) => code_before_begin(error),
            Self::Log(job_log::LogError::Store { source, .. }) => code_before_begin(source),
            Self::Log(_) | Self::Key(_) | Self::Unconditional { .. } => ExitCode::Preflight,
            Self::Claimed { .. } => ExitCode::NotOurs,
        }
    }
}

fn plan(session: &Session, driver: &Driver) -> Result<SavePlan, Failure> {
    let pipeline = &session.config.pipeline;
    let settings = SaveSettings {
        part_size: session.config.store.part_size,
        chunk_size: pipeline.chunk_size,
        memory_budget: pipeline.memory_budget,
        budget_is_set: pipeline.memory_budget_is_set,
        threads: pipeline.threads,
        parallelism: session.config.store.parallelism,
        context_bytes: session.config.compression.level.context_bytes(),
    };
    let gpu_memory: Vec<u64> = driver
        .devices()
        .iter()
        .map(|device| device.memory_len)
        .collect();
    plan_save(&gpu_memory, &settings)
        .map_err(|error| Failure::new(restore::plan_code(&error), Phase::Prepare, error))
}

/// Every byte that the pipeline will need, in hand before the target is locked.
struct Memory {
    plan: SavePlan,
    rings: Vec<BufferPool>,
    queues: Vec<CopyQueue>,
    encoders: Vec<Encoder>,
    frame_buffers: BufferPool,
    part_buffers: BufferPool,
}

impl Memory {
    fn allocate(
        session: &Session,
        driver: &Arc<Driver>,
        plan: SavePlan,
    ) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let len = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut rings = Vec::new();
        let mut queues = Vec::new();
        for device in 0..driver.devices().len() {
            session.check_cancelled()?;
            rings.push(BufferPool::new(
                plan.ring_chunks,
                len(plan.chunk_len),
                Some(driver),
            )?);
            queues.push(CopyQueue::prepare(driver, device, plan.ring_chunks)?);
        }
        let mut encoders = Vec::new();
        for _ in 0..plan.threads {
            let mut encoder = Encoder::new(session.config.compression.level)?;
            encoder.warm_up(len(plan.chunk_len))?;
            encoders.push(encoder);
        }
        let frame_buffers = BufferPool::new(plan.frame_buffers, plan.frame_len_max, None)?;
        let part_buffers = BufferPool::new(plan.part_buffers, len(plan.part_len), None)?;
        Ok(Self {
            plan,
            rings,
            queues,
            encoders,
            frame_buffers,
            part_buffers,
        })
    }

    /// Deals the buffers out to the GPUs that hold data.
    fn into_pipeline(
        self,
        session: &Session,
        begun: &CheckpointingProcess,
        attempt: &Attempt,
    ) -> (Vec<SaveLane>, SaveResources) {
        let mut per_device: Vec<Option<(BufferPool, CopyQueue)>> =
            self.rings.into_iter().zip(self.queues).map(Some).collect();
        let mut lanes = Vec::new();
        for extent in begun.extents() {
            let taken = per_device.get_mut(extent.device).and_then(Option::take);
            let open = attempt
                .uploads
                .iter()
                .find(|open| open.device == extent.device);
            let (Some((ring, queue)), Some(open)) = (taken, open) else {
                unreachable!("the driver layer gives at most one extent for each of its devices");
            };
            let meter = LaneMeter::new(format!("GPU {}", extent.device), extent.len);
            lanes.push(SaveLane {
                queue,
                extent: *extent,
                ring,
                key: open.key.clone(),
                upload: open.upload.clone(),
                meter,
            });
        }
        session
            .meter
            .announce(lanes.iter().map(|lane| Arc::clone(&lane.meter)).collect());
        let resources = SaveResources {
            store: Arc::clone(&session.store_after_begin),
            runtime: session.runtime.clone(),
            encoders: self.encoders,
            chunk_len: self.plan.chunk_len,
            frame_buffers: self.frame_buffers,
            part_buffers: self.part_buffers,
            parallelism: session.config.store.parallelism as usize,
            meter: Arc::clone(&session.meter),
        };
        (lanes, resources)
    }
}

fn lock(
    session: &Session,
    driver: &Driver,
    target: &Target,
    running: RunningProcess,
) -> Result<LockedProcess, Failure> {
    let rolled_back =
        |cause: Box<dyn Error + Send + Sync>| not_begun(driver, target, Phase::Lock, cause);
    session
        .check_cancelled()
        .map_err(|error| rolled_back(error.into()))?;
    let locked = running
        .lock(session.config.driver.lock_timeout)
        .map_err(|error| rolled_back(error.into()))?;
    // The last moment at which a signal can be obeyed.
    if let Err(interrupted) = session.check_cancelled() {
        let unlocked = locked.unlock();
        let mut failure = rolled_back(interrupted.into());
        failure.attached.extend(failed_unlock(Some(unlocked)));
        return Err(failure);
    }
    Ok(locked)
}

/// Says that the roll back failed, if it did.
fn failed_unlock(unlocked: Option<Result<RunningProcess, DriverError>>) -> Option<String> {
    unlocked?
        .err()
        .map(|error| format!("the target could not be unlocked: {error}"))
}

fn begin(
    driver: &Driver,
    target: &Target,
    locked: LockedProcess,
) -> Result<CheckpointingProcess, Failure> {
    locked.begin_checkpoint().map_err(|mut error| {
        let unlocked = error.locked.take().map(LockedProcess::unlock);
        // A target that runs was not locked in truth, whatever the driver said.
        let is_running = matches!(error.state, Ok(ProcessState::Running));
        if unlocked.is_some() || is_running {
            let mut failure = not_begun(driver, target, Phase::Begin, error.into());
            failure.attached.extend(failed_unlock(unlocked));
            failure
        } else {
            lost(driver, target, Phase::Begin, error.into())
        }
    })
}

/// The buffers are not to be had, or a signal came while they were made. The target was not touched.
fn without_memory(
    driver: &Driver,
    target: &Target,
    cause: Box<dyn Error + Send + Sync>,
) -> Failure {
    let is_interrupted = cause.is::<Interrupted>();
    let failure = not_begun(driver, target, Phase::Prepare, cause);
    if is_interrupted {
        return failure;
    }
    Failure {
        code: ExitCode::Preflight,
        ..failure
    }
}

/// A failure before BEGIN. The code claims RUNNING only if that was looked up.
fn not_begun(
    driver: &Driver,
    target: &Target,
    phase: Phase,
    cause: Box<dyn Error + Send + Sync>,
) -> Failure {
    let found = look(driver, target);
    let code = match found.state.as_str() {
        "running" => ExitCode::RolledBack,
        "gone" => ExitCode::NothingToSave,
        _ => ExitCode::Lost,
    };
    let mut failure = Failure::new(code, phase, cause);
    failure.targets = vec![found];
    failure
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
    let state = match driver.state(target.pid) {
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
    match driver.state(target.pid) {
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
fn land(session: &Session, lanes: &[SavedLane]) -> Result<Vec<Option<String>>, LoadError> {
    let store = &*session.store_after_begin;
    let landing = lanes.iter().map(|lane| async move {
        let crc64 = lane.crc64.value();
        let completed =
            store.complete_upload(&lane.key, &lane.upload, &lane.parts, lane.len, crc64);
        completed.await.map_err(LoadError::Store)?;
        image::prove_landed(store, &lane.key, lane.len, lane.crc64).await
    });
    session.wait(futures::future::try_join_all(landing))
}

/// Why a landed save was not committed.
#[derive(Debug, thiserror::Error)]
enum CommitFailed {
    #[error("the frame tables or the manifest were not stored")]
    Store(#[from] StoreError),
    #[error("{key} exists already, with other bytes")]
    Taken { key: String },
    #[error("a key of this save is not legal")]
    Key(#[from] crate::store::BadKey),
    #[error("the manifest that we wrote does not verify; this is a defect of ckptstream")]
    Manifest(#[from] crate::manifest::ManifestError),
    #[error("the image was not entered into the job's log")]
    Log(#[source] Box<CommitError>),
}

impl CommitFailed {
    fn code(&self) -> ExitCode {
        let Self::Log(error) = self else {
            return ExitCode::Lost;
        };
        match **error {
            CommitError::Fenced { .. } => ExitCode::Fenced,
            CommitError::Unreachable { .. } => ExitCode::CommitUnknown,
            _ => ExitCode::Lost,
        }
    }
}

/// Frame tables, then the manifest, then the one entry that makes the image.
fn commit(
    session: &Session,
    driver: &Driver,
    target: &Target,
    attempt: &Attempt,
    lanes: Vec<SavedLane>,
    etags: Vec<Option<String>>,
) -> Result<Image, CommitFailed> {
    let job = &session.config.job;
    let store = &*session.store_after_begin;
    let mut tables = Vec::with_capacity(lanes.len());
    let mut extents = Vec::with_capacity(lanes.len());
    let mut to_put = Vec::with_capacity(lanes.len() + 1);
    for lane in lanes {
        let device = attempt
            .uploads
            .iter()
            .find(|open| open.key == lane.key)
            .map(|open| &driver.devices()[open.device]);
        let Some(device) = device else {
            unreachable!("every lane was made from an open upload")
        };
        let object_key = relative_key(job, &lane.key);
        let table_key = format!("{}.frames.json", object_key.trim_end_matches(".zst"));
        let encoded = lane.table.encode();
        extents.push(ExtentRecord {
            device: device.uuid.to_string(),
            raw_len: lane.table.raw_len,
            chunk_len: lane.table.chunk_len,
            object: ObjectRecord {
                key: object_key,
                len: lane.len,
                crc64: lane.crc64,
            },
            table: FrameTable::record(&encoded, table_key.clone()),
        });
        to_put.push((Key::of_job(job, &table_key)?, encoded));
        tables.push(lane.table);
    }
    let manifest = manifest(session, driver, target, attempt, extents);
    let encoded = manifest.encode();
    let manifest_digest = crate::manifest::digest_of(&encoded);
    let manifest_len = encoded.len();
    // What does not verify must not be committed: the reader is our own, asked beforehand.
    Manifest::decode_and_verify(&encoded, job.as_str(), &attempt.nonce)?;
    let manifest_key = crate::manifest::manifest_key(&attempt.nonce);
    let (raw_len, stored_len) = (manifest.raw_len(), manifest.stored_len());

    session.wait(async {
        let puts = to_put
            .into_iter()
            .map(|(key, bytes)| put_new(store, key, bytes));
        futures::future::try_join_all(puts).await?;
        put_new(store, Key::of_job(job, &manifest_key)?, encoded).await?;
        let entry = ImageEntry {
            writer: attempt.nonce.clone(),
            manifest_len: manifest_len as u64,
            attempt: attempt.nonce.clone(),
            manifest_key,
            manifest_digest,
            kind: manifest.kind,
            raw_len,
            stored_len,
            created_ms: manifest.created_ms,
            tool: tool(),
        };
        let generation = job_log::append_image(store, job, attempt.next_slot, &entry)
            .await
            .map_err(|error| CommitFailed::Log(Box::new(error)))?;
        Ok(Image {
            generation,
            attempt: attempt.nonce.clone(),
            manifest_digest,
            manifest,
            tables: vec![tables],
            etags,
        })
    })
}

async fn put_new(store: &dyn Store, key: Key, bytes: Vec<u8>) -> Result<(), CommitFailed> {
    match store.put_if_absent(&key, bytes.into()).await? {
        PutOutcome::Created => Ok(()),
        PutOutcome::AlreadyExists => Err(CommitFailed::Taken {
            key: key.to_string(),
        }),
    }
}

fn manifest(
    session: &Session,
    driver: &Driver,
    target: &Target,
    attempt: &Attempt,
    extents: Vec<ExtentRecord>,
) -> Manifest {
    Manifest {
        format: FORMAT,
        features: Vec::new(),
        tool: tool(),
        job: session.config.job.to_string(),
        kind: ImageKind::Gpu,
        attempt: attempt.nonce.clone(),
        created_ms: now_ms(),
        capture: Capture {
            mode: CaptureMode::CustomStorage,
            driver_version: driver.driver_version().map(str::to_owned),
            driver_api: driver.api_version(),
        },
        host: Host {
            name: host_name(),
            boot_id: target.boot_id.clone(),
        },
        processes: vec![ProcessRecord {
            pid: target.pid,
            start_time: target.start_time,
            ns_pids: target.ns_pids.clone(),
            name: target.name.clone(),
            devices: driver.devices().iter().map(device_record).collect(),
            extents,
        }],
    }
}

fn device_record(device: &Device) -> DeviceRecord {
    DeviceRecord {
        uuid: device.uuid.to_string(),
        name: device.name.clone(),
        chip: device.chip.clone(),
        memory_len: device.memory_len,
        pci: device.pci.clone(),
        ordinal: device.ordinal,
    }
}

/// Brings the target back from the image that was just committed. No signal stops that.
fn resume(
    session: &Session,
    clock: &mut PhaseClock,
    driver: &Arc<Driver>,
    target: &Target,
    suspended: CheckpointedProcess,
    image: &Image,
) -> Result<Instant, Failure> {
    // What failed before the driver was asked has not looked at the target; the verdict has to.
    let astray = |failure: Failure| Failure {
        code: ExitCode::CommittedTargetAstray,
        generation: Some(image.generation),
        targets: vec![look(driver, target)],
        ..failure
    };
    // The image is committed: bringing the target back is not given up for a signal.
    let surroundings = Session {
        cancel: CancellationToken::new(),
        ..session.clone()
    };
    restore::bring_back(&surroundings, clock, driver, target, suspended, image, &[])
        .map_err(astray)?;
    Ok(Instant::now())
}

fn report(
    clock: PhaseClock,
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
            clock.finish(),
        )
    }
}

/// The key as the manifest has it: relative to the job.
fn relative_key(job: &crate::config::JobName, key: &Key) -> String {
    key.as_str()
        .strip_prefix(job.as_str())
        .unwrap_or(key.as_str())
        .trim_start_matches('/')
        .to_owned()
}

fn bare_uuid(device: &Device) -> String {
    device
        .uuid
        .to_string()
        .trim_start_matches("GPU-")
        .to_owned()
}

/// 128 random bits: the name of an attempt.
fn nonce() -> String {
    random_hex::<16>()
}

/// Enough for a key that is fresh within its attempt.
fn short_nonce() -> String {
    random_hex::<4>()
}

fn random_hex<const LEN: usize>() -> String {
    let mut bytes = [0_u8; LEN];
    let mut filled = 0;
    while filled < LEN {
        // The kernel's pool is there from early boot on, and a request of this size is never cut short but by a signal.
        filled +=
            rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())
                .unwrap_or(0);
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn tool() -> String {
    concat!("ckptstream ", env!("CARGO_PKG_VERSION")).to_owned()
}

fn host_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| {
            u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
        })
}
