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

use std::collections::HashMap;
use std::error::Error;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::StreamExt;
use tokio_util::sync::CancellationToken;

use crate::checkpoint::look;
use crate::codec::Decoder;
use crate::config::Verify;
use crate::driver::{
    BufferPool, CheckpointedProcess, CopyQueue, Device, Driver, DriverError, Extent, GpuUuid,
    RestoringProcess,
};
use crate::error::{ExitCode, Failure, Phase, TargetState};
use crate::image::{Image, ImageError, ImageRef};
use crate::manifest::{DeviceRecord, ExtentRecord, FrameTable, ImageKind, Manifest, ProcessRecord};
use crate::outcome::{Bytes, LaneOutcome, Outcome, PhaseSeconds};
use crate::phases::PhaseClock;
use crate::pipeline::{self, Destination, LoadLane, LoadResources, Loaded, PipelineError};
use crate::plan::{self, FetchGroup, LoadPlan, LoadSettings, PlanError, fetch_groups, plan_load};
use crate::progress::LaneMeter;
use crate::session::{Interrupted, Session};
use crate::store::{Key, Store};
use crate::target::{Target, TargetError};

/// Puts an image back into a suspended process and lets it run.
///
/// # Errors
/// A [`Failure`] with the code of PROTOCOL section 6, the target as looked up, and the cause.
pub fn restore(
    session: &Session,
    pid: u32,
    image: ImageRef,
    into_fresh: bool,
) -> Result<Outcome, Failure> {
    let mut clock = PhaseClock::start(&session.meter, Phase::Read);
    let target = Target::look(pid).map_err(|error| {
        let code = match error {
            TargetError::Thread { .. } | TargetError::Ourselves { .. } => ExitCode::Config,
            _ => ExitCode::RestoreRefused,
        };
        Failure::new(code, Phase::Read, error)
    })?;
    let image = open_image(session, image)?;
    let (driver, pairs, suspended) = check(session, &target, &image.manifest, into_fresh)
        .map_err(|cause| refused(Phase::Read, cause))?;
    let verify = session
        .config
        .restore
        .verify
        .unwrap_or_else(|| default_verify(image.manifest.kind, into_fresh));
    if verify == Verify::All {
        load_nowhere(session, &image).map_err(|error| refused(Phase::Read, error.into()))?;
    }
    let suspended_since = clock.enter(Phase::Restore);
    let loaded = bring_back(
        session, &mut clock, &driver, &target, suspended, &image, &pairs,
    )?;
    Ok(Outcome {
        seconds_locked: suspended_since.elapsed().as_secs_f64(),
        stages: loaded.stages,
        slowest_stage: loaded.slowest_stage,
        memory_planned: load_plan(session, &image).map_or(0, |plan| plan.total_bytes),
        ..outcome_of(
            session,
            &image,
            vec![look(&driver, &target)],
            clock.finish(),
        )
    })
}

/// Reads every chunk of an image and compares its digest. Needs no GPU.
///
/// # Errors
/// Exit 6 without an image, 3 when the store cannot be reached, 20 when a byte is not what was saved.
pub fn verify(session: &Session, image: ImageRef) -> Result<Outcome, Failure> {
    let clock = PhaseClock::start(&session.meter, Phase::Read);
    let image = open_image(session, image).map_err(reads_only)?;
    let loaded = load_nowhere(session, &image).map_err(|error| {
        let code = match &error {
            LoadFailed::Pipeline(PipelineError::Store(error)) if !error.is_about_the_object() => {
                ExitCode::Preflight
            }
            LoadFailed::Plan(error) => plan_code(error),
            _ => ExitCode::RestoreRefused,
        };
        Failure::new(code, Phase::Read, error)
    })?;
    Ok(Outcome {
        stages: loaded.stages,
        slowest_stage: loaded.slowest_stage,
        memory_planned: load_plan(session, &image).map_or(0, |plan| plan.total_bytes),
        ..outcome_of(session, &image, Vec::new(), clock.finish())
    })
}

/// Writes the raw extent of one GPU, verified chunk by chunk, in order. `gpu` may be left out when the image has one extent. Needs no GPU.
///
/// # Errors
/// As [`verify`]; exit 2 when the GPU is none of the image's. What was written before the error is right as far as it goes.
pub fn cat(
    session: &Session,
    image: ImageRef,
    gpu: Option<GpuUuid>,
    out: &mut dyn Write,
) -> Result<Outcome, Failure> {
    let clock = PhaseClock::start(&session.meter, Phase::Read);
    let image = open_image(session, image).map_err(reads_only)?;
    let (extent, table) = choose_extent(&image, gpu)
        .map_err(|error| Failure::new(ExitCode::Config, Phase::Read, error))?;
    cat_extent(session, extent, table, out)
        .map_err(|error| Failure::new(ExitCode::RestoreRefused, Phase::Read, error))?;
    Ok(outcome_of(session, &image, Vec::new(), clock.finish()))
}

/// From CHECKPOINTED to RUNNING, with the bytes of an image that was read and checked.
///
/// # Errors
/// Exit 20 while the driver was not asked yet, 21 after.
pub(crate) fn bring_back(
    session: &Session,
    clock: &mut PhaseClock,
    driver: &Arc<Driver>,
    target: &Target,
    suspended: CheckpointedProcess,
    image: &Image,
    pairs: &[(GpuUuid, GpuUuid)],
) -> Result<Loaded, Failure> {
    if clock.phase() != Phase::Restore {
        clock.enter(Phase::Restore);
    }
    let refused = |cause| refused(Phase::Restore, cause);
    let point = PointOfNoReturn::before(session);
    let transfer = Transfer::prepare(session, driver, image, pairs, &point).map_err(refused)?;
    let failed = |phase: Phase, cause: Box<dyn Error + Send + Sync>| {
        let mut failure = Failure::new(ExitCode::RestoreFailed, phase, cause);
        failure.targets = vec![look(driver, target)];
        failure
    };
    let mut asked = false;
    let (restoring, loaded) = match transfer.run(suspended, pairs, &point, &mut asked) {
        Ok(done) => done,
        Err(error) if asked => return Err(failed(Phase::Restore, error.into())),
        Err(PipelineError::Cancelled) => return Err(refused(Interrupted.into())),
        Err(error) => return Err(refused(error.into())),
    };
    clock.enter(Phase::Complete);
    let completed = restoring.complete();
    let locked = completed.map_err(|error| failed(Phase::Complete, error.into()))?;
    clock.enter(Phase::Unlock);
    let unlocked = locked.unlock();
    unlocked.map_err(|error| failed(Phase::Unlock, error.into()))?;
    Ok(loaded)
}

/// Everything that a transfer to GPUs needs, in hand before the driver is asked.
struct Transfer {
    /// The present GPU of each lane.
    gpus: Vec<usize>,
    lanes: Vec<LoadLane>,
    queues: Vec<CopyQueue>,
    resources: LoadResources,
}

impl Transfer {
    fn prepare(
        session: &Session,
        driver: &Arc<Driver>,
        image: &Image,
        pairs: &[(GpuUuid, GpuUuid)],
        point: &PointOfNoReturn,
    ) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let plan = load_plan(session, image)?;
        let gpus = destinations(driver, image, pairs)?;
        let lanes = lanes(session, image, &plan, Some(driver))?;
        let queues = gpus
            .iter()
            .map(|&device| CopyQueue::prepare(driver, device, plan.ring_chunks))
            .collect::<Result<Vec<_>, _>>()?;
        let store = Arc::clone(&session.store_after_begin);
        let resources = resources(session, &plan, store, point.cancel.clone())?;
        Ok(Self {
            gpus,
            lanes,
            queues,
            resources,
        })
    }

    /// Asks the driver as soon as the first chunks wait in the rings, and copies everything in.
    fn run(
        self,
        suspended: CheckpointedProcess,
        pairs: &[(GpuUuid, GpuUuid)],
        point: &PointOfNoReturn,
        asked: &mut bool,
    ) -> Result<(RestoringProcess, Loaded), PipelineError> {
        let (gpus, lanes) = (self.gpus, self.lanes);
        let mut restoring = None;
        let begin = || {
            if !point.pass() {
                return Err(PipelineError::Cancelled);
            }
            *asked = true;
            let process = suspended.begin_restore(if is_identity(pairs) { &[] } else { pairs })?;
            let extents = match_extents(process.extents(), &gpus, &lanes)?;
            restoring = Some(process);
            Ok(extents)
        };
        let loaded = if lanes.is_empty() {
            // No GPU held data: there is nothing to fetch, and the driver still has to be asked.
            begin().map(|_none: Vec<Extent>| Loaded {
                stages: Vec::new(),
                slowest_stage: None,
            })?
        } else {
            let destination = Destination::Gpus {
                queues: self.queues,
                begin: Box::new(begin),
            };
            pipeline::load(&lanes, self.resources, destination)?
        };
        let Some(restoring) = restoring else {
            unreachable!("a load that succeeded has asked the driver");
        };
        Ok((restoring, loaded))
    }
}

/// Up to here a signal gives the restore up; from here on it changes nothing, because a restore that is given up ends the target.
struct PointOfNoReturn {
    /// Whoever is first decides: the signal or the one who passes.
    is_decided: Arc<AtomicBool>,
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
            cancel,
            signal,
        }
    }

    /// Whether no signal came first.
    fn pass(&self) -> bool {
        !self.is_decided.swap(true, Ordering::SeqCst)
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

/// The exit code of a plan that cannot be: a part size that cannot hold the memory is refused (3), the rest is configuration (2).
pub(crate) fn plan_code(error: &PlanError) -> ExitCode {
    match error {
        PlanError::PartSizeTooSmall { .. } => ExitCode::Preflight,
        _ => ExitCode::Config,
    }
}

/// What a run over this image tells, before stages and times of its own are filled in.
pub(crate) fn outcome_of(
    session: &Session,
    image: &Image,
    targets: Vec<TargetState>,
    seconds: Vec<PhaseSeconds>,
) -> Outcome {
    let lanes = image.manifest.extents().map(|extent| LaneOutcome {
        device: extent.device.clone(),
        raw: extent.raw_len,
        stored: extent.object.len,
    });
    Outcome {
        job: session.config.job.to_string(),
        generation: image.generation,
        image: format!("{:08}", image.generation),
        attempt: image.attempt.clone(),
        targets,
        bytes: Bytes {
            raw: image.manifest.raw_len(),
            stored: image.manifest.stored_len(),
        },
        seconds,
        seconds_locked: 0.0,
        lanes: lanes.collect(),
        stages: Vec::new(),
        slowest_stage: None,
        retries: session.meter.view().retries,
        memory_planned: 0,
    }
}

fn refused(phase: Phase, cause: Box<dyn Error + Send + Sync>) -> Failure {
    // A signal before the driver was asked leaves everything as it was found, like every other refusal.
    Failure::new(ExitCode::RestoreRefused, phase, cause)
}

fn open_image(session: &Session, which: ImageRef) -> Result<Image, Failure> {
    let opened = session.wait(Image::open(&*session.store, &session.config.job, which));
    let (image, skipped) = opened.map_err(|error| {
        let code = if matches!(error, ImageError::NoImage { .. }) {
            ExitCode::NothingToRestore
        } else {
            ExitCode::RestoreRefused
        };
        Failure::new(code, Phase::Read, error)
    })?;
    for skip in skipped {
        tracing::warn!("skipped image {skip}");
    }
    Ok(image)
}

/// A command that only reads answers 3, not 20, when the store cannot be reached.
fn reads_only(failure: Failure) -> Failure {
    let unreachable = failure
        .cause
        .downcast_ref::<ImageError>()
        .is_some_and(|error| matches!(error, ImageError::Unreachable { .. }));
    if unreachable {
        Failure {
            code: ExitCode::Preflight,
            ..failure
        }
    } else {
        failure
    }
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
        "a GPU-only image goes back only into the process that its save suspended (pid {saved_pid}); process {pid} is another one; \
         for a process that came up suspended on purpose give --into-fresh"
    )]
    AnotherProcess { saved_pid: u32, pid: u32 },
    #[error("this version restores images of one process; image has {count}")]
    ProcessCount { count: usize },
    #[error("the image is of kind {kind}, which this version cannot restore")]
    Kind { kind: ImageKind },
    #[error("{0}")]
    Gpus(String),
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

type GpuPairs = Vec<(GpuUuid, GpuUuid)>;

/// Everything that can be known before the driver is asked.
fn check(
    session: &Session,
    target: &Target,
    manifest: &Manifest,
    into_fresh: bool,
) -> Result<(Arc<Driver>, GpuPairs, CheckpointedProcess), Box<dyn Error + Send + Sync>> {
    if manifest.kind != ImageKind::Gpu {
        return Err(CheckError::Kind {
            kind: manifest.kind,
        }
        .into());
    }
    let [saved] = manifest.processes.as_slice() else {
        return Err(CheckError::ProcessCount {
            count: manifest.processes.len(),
        }
        .into());
    };
    if !into_fresh && !is_saved_process(manifest, target) {
        return Err(CheckError::AnotherProcess {
            saved_pid: saved.pid,
            pid: target.pid,
        }
        .into());
    }
    let driver = Driver::open()?;
    driver.require_custom_storage()?;
    let pairs = map_gpus(
        &saved.devices,
        driver.devices(),
        &session.config.driver.gpu_map,
        &needs(saved),
    )?;
    let suspended = CheckpointedProcess::attach(&driver, target.pid)?;
    driver.retain_contexts()?;
    for extent in &saved.extents {
        let device = present_device(&driver, &pairs, &extent.device)?;
        let free = driver.free_memory(device)?;
        if free < extent.raw_len {
            return Err(CheckError::Memory {
                uuid: driver.devices()[device].uuid,
                free,
                needed: extent.raw_len,
            }
            .into());
        }
    }
    session.check_cancelled()?;
    Ok((driver, pairs, suspended))
}

/// Bytes that each stored GPU must take up again.
fn needs(saved: &ProcessRecord) -> HashMap<String, u64> {
    saved
        .extents
        .iter()
        .map(|extent| (extent.device.clone(), extent.raw_len))
        .collect()
}

/// Maps every stored GPU to a present one of the same chip: as the user says, else itself, else the lowest PCI id that is left and large enough.
fn map_gpus(
    stored: &[DeviceRecord],
    present: &[Device],
    wanted: &[(GpuUuid, GpuUuid)],
    needs: &HashMap<String, u64>,
) -> Result<GpuPairs, CheckError> {
    let fail = |text: String| CheckError::Gpus(format!("{text}; {}", table(stored, present)));
    let mut stored_uuids = Vec::with_capacity(stored.len());
    for device in stored {
        stored_uuids.push(
            device
                .uuid
                .parse::<GpuUuid>()
                .map_err(|error| fail(error.to_string()))?,
        );
    }
    for (old, new) in wanted {
        if !stored_uuids.contains(old) {
            return Err(fail(format!(
                "--gpu-map names {old}, which is no GPU of the image"
            )));
        }
        if !present.iter().any(|device| device.uuid == *new) {
            return Err(fail(format!(
                "--gpu-map names {new}, which is no GPU of this node"
            )));
        }
    }
    let mut pairs: GpuPairs = Vec::with_capacity(stored.len());
    // Users' wishes first, identities next: what is left over must not take their places.
    for (&old, record) in stored_uuids.iter().zip(stored) {
        let explicit = wanted
            .iter()
            .find(|(from, _)| *from == old)
            .map(|&(_, new)| new);
        let identity = present
            .iter()
            .find(|device| device.uuid == old)
            .map(|device| device.uuid);
        if let Some(new) =
            explicit.or(identity.filter(|new| !wanted.iter().any(|(_, taken)| taken == new)))
        {
            if pairs.iter().any(|&(_, taken)| taken == new) {
                return Err(fail(format!("two GPUs of the image map to {new}")));
            }
            let device = present.iter().find(|device| device.uuid == new);
            if device.is_some_and(|device| !same_chip(record, device)) {
                return Err(fail(format!("{new} is another chip than {old} was")));
            }
            pairs.push((old, new));
        }
    }
    let mut by_pci: Vec<&Device> = present.iter().collect();
    by_pci.sort_by(|a, b| a.pci.cmp(&b.pci));
    for (&old, record) in stored_uuids.iter().zip(stored) {
        if pairs.iter().any(|&(from, _)| from == old) {
            continue;
        }
        let needed = needs.get(&record.uuid).copied().unwrap_or(0);
        let free = by_pci.iter().find(|device| {
            same_chip(record, device)
                && device.memory_len >= needed
                && !pairs.iter().any(|&(_, taken)| taken == device.uuid)
        });
        let new = free.ok_or_else(|| fail(format!("no GPU of this node is left for {old}")))?;
        pairs.push((old, new.uuid));
    }
    Ok(pairs)
}

/// The driver restores onto the same chip type only. Name and compute capability together tell it, and keep an emulated image off hardware.
fn same_chip(stored: &DeviceRecord, present: &Device) -> bool {
    stored.chip == present.chip && stored.name == present.name
}

fn table(stored: &[DeviceRecord], present: &[Device]) -> String {
    let old = stored
        .iter()
        .map(|gpu| format!("{} ({}, {})", gpu.uuid, gpu.name, gpu.chip));
    let new = present
        .iter()
        .map(|gpu| format!("{} ({}, {}, {})", gpu.uuid, gpu.name, gpu.chip, gpu.pci));
    format!("the image has {}; this node has {}", list(old), list(new))
}

fn list(items: impl Iterator<Item = String>) -> String {
    let items: Vec<String> = items.collect();
    if items.is_empty() {
        "no GPU".to_owned()
    } else {
        items.join(", ")
    }
}

fn is_identity(pairs: &[(GpuUuid, GpuUuid)]) -> bool {
    pairs.iter().all(|(old, new)| old == new)
}

/// Index of the present GPU that a stored one is mapped to.
fn present_device(
    driver: &Driver,
    pairs: &[(GpuUuid, GpuUuid)],
    stored: &str,
) -> Result<usize, CheckError> {
    let old: GpuUuid = stored
        .parse()
        .map_err(|error: crate::driver::BadGpuUuid| CheckError::Gpus(error.to_string()))?;
    let new = pairs
        .iter()
        .find(|(from, _)| *from == old)
        .map_or(old, |&(_, new)| new);
    let index = driver
        .devices()
        .iter()
        .position(|device| device.uuid == new);
    index.ok_or_else(|| CheckError::Gpus(format!("{new} is no GPU of this node")))
}

/// The present GPU of each lane, in the order of the image's extents.
fn destinations(
    driver: &Driver,
    image: &Image,
    pairs: &[(GpuUuid, GpuUuid)],
) -> Result<Vec<usize>, CheckError> {
    image
        .manifest
        .extents()
        .map(|extent| present_device(driver, pairs, &extent.device))
        .collect()
}

/// Brings the driver's extents into the order of the lanes; their lengths must be the stored ones.
fn match_extents(
    extents: &[Extent],
    gpus: &[usize],
    lanes: &[LoadLane],
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
        Ok(*extent)
    });
    matched.collect()
}

/// Why an image could not be read through.
#[derive(Debug, thiserror::Error)]
enum LoadFailed {
    #[error("the image does not verify")]
    Pipeline(#[from] PipelineError),
    #[error("the image cannot be read within the memory budget")]
    Plan(#[from] PlanError),
    #[error("host memory for the transfer is not to be had")]
    Memory(#[from] DriverError),
    #[error("libzstd cannot be set up")]
    Decoder(#[from] crate::codec::DecoderError),
    #[error("a key of the image is not legal")]
    Key(#[from] crate::store::BadKey),
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
}

/// Reads and verifies every chunk, and keeps none.
fn load_nowhere(session: &Session, image: &Image) -> Result<Loaded, LoadFailed> {
    let plan = load_plan(session, image)?;
    let lanes = lanes(session, image, &plan, None)?;
    let resources = resources(
        session,
        &plan,
        Arc::clone(&session.store),
        session.cancel.clone(),
    )?;
    match pipeline::load(&lanes, resources, Destination::Nowhere) {
        Err(PipelineError::Cancelled) if session.cancel.is_cancelled() => Err(Interrupted.into()),
        outcome => Ok(outcome?),
    }
}

fn load_plan(session: &Session, image: &Image) -> Result<LoadPlan, PlanError> {
    let shapes: Vec<plan::LoadLane> = image
        .manifest
        .extents()
        .zip(image.tables.iter().flatten())
        .map(|(extent, table)| plan::LoadLane {
            raw_len: extent.raw_len,
            chunk_len: extent.chunk_len,
            frame_len_max: table.frame_len_max(),
        })
        .collect();
    let pipeline = &session.config.pipeline;
    let settings = LoadSettings {
        memory_budget: pipeline.memory_budget,
        budget_is_set: pipeline.memory_budget_is_set,
        threads: pipeline.threads,
        parallelism: session.config.store.parallelism,
    };
    plan_load(&shapes, &settings)
}

fn lanes(
    session: &Session,
    image: &Image,
    plan: &LoadPlan,
    driver: Option<&Arc<Driver>>,
) -> Result<Vec<LoadLane>, LoadFailed> {
    let mut lanes = Vec::new();
    let tables = image.tables.iter().flatten();
    let stored = image.manifest.extents().zip(tables).zip(&image.etags);
    for (index, ((extent, table), etag)) in stored.enumerate() {
        let chunk_len = usize::try_from(extent.chunk_len).unwrap_or(usize::MAX);
        lanes.push(LoadLane {
            key: Key::of_job(&session.config.job, &extent.object.key)?,
            etag: etag.clone(),
            frames: table.entries().collect(),
            raw_len: extent.raw_len,
            chunk_len: extent.chunk_len,
            ring: BufferPool::new(plan.ring_chunks, chunk_len, driver)?,
            meter: LaneMeter::new(format!("GPU {index}"), extent.raw_len),
        });
    }
    session
        .meter
        .announce(lanes.iter().map(|lane| Arc::clone(&lane.meter)).collect());
    Ok(lanes)
}

fn resources(
    session: &Session,
    plan: &LoadPlan,
    store: Arc<dyn Store>,
    cancel: CancellationToken,
) -> Result<LoadResources, LoadFailed> {
    let fetch_len = usize::try_from(plan.fetch_len_max).unwrap_or(usize::MAX);
    let mut decoders = Vec::new();
    for _ in 0..plan.threads {
        decoders.push(Decoder::new()?);
    }
    Ok(LoadResources {
        store,
        runtime: session.runtime.clone(),
        decoders,
        fetch_buffers: BufferPool::new(plan.fetch_buffers, fetch_len, None)?,
        meter: Arc::clone(&session.meter),
        cancel,
    })
}

/// Why there is nothing to print.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct NoSuchExtent(String);

fn choose_extent(
    image: &Image,
    gpu: Option<GpuUuid>,
) -> Result<(&ExtentRecord, &FrameTable), NoSuchExtent> {
    let mut extents = image.manifest.extents().zip(image.tables.iter().flatten());
    let names = || list(image.manifest.extents().map(|extent| extent.device.clone()));
    match gpu {
        Some(gpu) => {
            let found = extents.find(|(extent, _)| extent.device == gpu.to_string());
            found.ok_or_else(|| {
                NoSuchExtent(format!(
                    "{gpu} holds no data in image {:08} (--gpu); it has {}",
                    image.generation,
                    names()
                ))
            })
        }
        None => match (extents.next(), extents.next()) {
            (Some(only), None) => Ok(only),
            (None, _) => Err(NoSuchExtent(format!(
                "image {:08} holds no data",
                image.generation
            ))),
            _ => Err(NoSuchExtent(format!(
                "image {:08} has several GPUs; choose one with --gpu: {}",
                image.generation,
                names()
            ))),
        },
    }
}

/// Why an extent was not printed to its end.
#[derive(Debug, thiserror::Error)]
enum CatFailed {
    #[error("the image cannot be read")]
    Load(#[from] LoadFailed),
    #[error("cannot write the extent")]
    Write(#[from] std::io::Error),
}

impl From<PipelineError> for CatFailed {
    fn from(error: PipelineError) -> Self {
        Self::Load(error.into())
    }
}

/// Ranges ahead of the one that is being written.
const CAT_READ_AHEAD: usize = 4;
/// Bytes per range, at least one frame.
const CAT_FETCH_LEN: u64 = 16 << 20;

fn cat_extent(
    session: &Session,
    extent: &ExtentRecord,
    table: &FrameTable,
    out: &mut dyn Write,
) -> Result<(), CatFailed> {
    let key = Key::of_job(&session.config.job, &extent.object.key).map_err(LoadFailed::from)?;
    let frames: Vec<_> = table.entries().collect();
    let lens: Vec<u32> = frames.iter().map(|frame| frame.stored_len).collect();
    let groups = fetch_groups(&lens, CAT_FETCH_LEN.max(u64::from(table.frame_len_max())));
    let (store, cat_key) = (&session.store, &key);
    let fetch = |group: FetchGroup| async move {
        let len = usize::try_from(group.bytes.end - group.bytes.start).unwrap_or(usize::MAX);
        let mut bytes = vec![0; len];
        store
            .get_range(cat_key, group.bytes.clone(), None, &mut bytes)
            .await?;
        Ok::<_, PipelineError>((group, bytes))
    };
    let mut fetched = Box::pin(
        futures::stream::iter(groups)
            .map(fetch)
            .buffered(CAT_READ_AHEAD),
    );
    let mut decoder = Decoder::new().map_err(LoadFailed::from)?;
    let mut chunk = vec![0; usize::try_from(extent.chunk_len).unwrap_or(usize::MAX)];
    while let Some(next) = session.wait(fetched.next()) {
        let (group, bytes) = next?;
        let mut rest = bytes.as_slice();
        for frame in &frames[group.frames] {
            let (stored, behind) = rest.split_at(frame.stored_len as usize);
            rest = behind;
            let raw = &mut chunk[..frame.raw_len as usize];
            decoder
                .decode(stored, frame.digest, raw)
                .map_err(|source| PipelineError::Frame {
                    key: key.to_string(),
                    chunk: frame.index,
                    source,
                })?;
            out.write_all(raw)?;
        }
    }
    out.flush()?;
    Ok(())
}
