//! An image read without a GPU: verified whole, or printed; and what a restore needs of the same.
//!
//! In: an image of the job. Out: the certainty that every chunk is what was saved, or its raw bytes in order. What can fail: there is no image (6), the store cannot be
//! reached (3), a byte is not what was saved (20). Nothing is changed anywhere, but that an image that was read back is marked so.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::in_order::{Ahead, InOrderError, write_in_order};
use crate::codec::Decoder;
use crate::driver::{BufferPool, Driver, DriverError, GpuUuid};
use crate::error::{ExitCode, Failure, Phase, TargetState};
use crate::image::{Image, ImageError, ImageRef, Stored, image_id};
use crate::job_log::JobLog;
use crate::manifest::{FrameTable, HOST, read_back_key};
use crate::outcome::{Bytes, LaneOutcome, Outcome, PhaseSeconds};
use crate::phases::PhaseClock;
use crate::pipeline::{self, Destination, LoadLane, LoadResources, Loaded, PipelineError};
use crate::plan::{self, LoadPlan, LoadSettings, PlanError, fetch_buffer_len, plan_load};
use crate::progress::LaneMeter;
use crate::sealed::{Sealed, SealedError};
use crate::session::{Interrupted, Session};
use crate::store::{Key, Store};
use crate::writer::{now_ms, tool};

/// The verdict does not wait for longer.
const MARK_TIMEOUT: Duration = Duration::from_secs(5);

/// Reads every chunk of an image and compares its digest. Needs no GPU.
///
/// # Errors
/// Exit 6 without an image, 3 when the store cannot be reached, 20 when a byte is not what was saved.
pub fn verify(session: &Session, image: ImageRef) -> Result<Outcome, Failure> {
    let clock = PhaseClock::start(&session.meter, Phase::Read);
    let (image, skipped, _warned_of) = open_image(session, image).map_err(reads_only)?;
    let loaded = load_nowhere(session, &image)
        .map_err(|error| Failure::new(error.code(), Phase::Read, error))?;
    if !skipped.is_empty() {
        let image = image_id(image.generation);
        let cause = NewerIsDamaged { image, skipped };
        return Err(Failure::new(ExitCode::RestoreRefused, Phase::Read, cause));
    }
    mark_read_back(session, &image);
    Ok(Outcome {
        stages: loaded.stages,
        slowest_stage: loaded.slowest_stage,
        memory_planned: load_plan(session, &image, Which::All).map_or(0, |plan| plan.total_bytes),
        ..outcome_of(session, &image, Vec::new(), clock.finish())
    })
}

/// Says in the store that the image was read back, which keeps one such image from being pruned. Who may not write there verifies all the same.
fn mark_read_back(session: &Session, image: &Image) {
    let marked = session.wait(async {
        let key = Key::of_job(&session.config.job, &read_back_key(&image.attempt));
        let key = key.map_err(|error| error.to_string())?;
        let mark = serde_json::json!({"format": 1, "tool": tool(), "at_ms": now_ms()});
        let put = session.store.put_if_absent(&key, mark.to_string().into());
        match tokio::time::timeout(MARK_TIMEOUT, put).await {
            Ok(Ok(_created_or_there)) => Ok(()),
            Ok(Err(error)) => Err(crate::error::one_line(&error)),
            Err(_elapsed) => Err(format!("no answer within {MARK_TIMEOUT:?}")),
        }
    });
    if let Err(why) = marked {
        tracing::info!("it is not noted in the store that the image was read back: {why}");
    }
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
    let (image, _skipped, _sealed) = open_image(session, image).map_err(reads_only)?;
    let extent = choose_extent(&image, gpu)
        .map_err(|error| Failure::new(ExitCode::Config, Phase::Read, error))?;
    cat_extent(session, extent, out).map_err(|error| {
        let code = match &error {
            InOrderError::Load(error) => error.code(),
            InOrderError::Write(_) => ExitCode::Preflight,
        };
        Failure::new(code, Phase::Read, error)
    })?;
    Ok(outcome_of(session, &image, Vec::new(), clock.finish()))
}

/// The exit code of a plan that cannot be: memory that the parts, or the store, cannot hold is refused (3), the rest is configuration (2).
pub(crate) fn plan_code(error: &PlanError) -> ExitCode {
    match error {
        PlanError::PartSizeTooSmall { .. } | PlanError::ObjectTooLong { .. } => ExitCode::Preflight,
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
        image: image_id(image.generation),
        attempt: image.attempt.clone(),
        skipped: Vec::new(),
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

/// The image, the newer ones that were passed over, and a newer save that is sealed.
pub(crate) fn open_image(
    session: &Session,
    which: ImageRef,
) -> Result<(Image, Vec<String>, Option<SealedSave>), Failure> {
    let sealed = sealed_save(session);
    if let Some(sealed) = &sealed {
        tracing::warn!("{sealed}");
    }
    let opened = session.wait(Image::open(&*session.store, &session.config.job, which));
    let (image, skipped, sealed) = match (opened, sealed) {
        (Ok((image, skipped)), sealed) => (image, skipped, sealed),
        (Err(ImageError::NoImage { .. }), Some(sealed)) => {
            return Err(Failure::new(ExitCode::RestoreRefused, Phase::Read, sealed));
        }
        (Err(error), _) => {
            let code = match error {
                ImageError::NoImage { .. } => ExitCode::NothingToRestore,
                _ => ExitCode::RestoreRefused,
            };
            return Err(Failure::new(code, Phase::Read, error));
        }
    };
    let skipped: Vec<String> = skipped.iter().map(ToString::to_string).collect();
    for skip in &skipped {
        tracing::warn!("skipped image {skip}");
    }
    Ok((image, skipped, sealed))
}

/// A save in the spill that is newer than every image of the job, or that cannot be ruled out.
fn sealed_save(session: &Session) -> Option<SealedSave> {
    let config = session.config.spill.place.as_ref()?;
    let job = &session.config.job;
    let path = config.path.display().to_string();
    let found = session.wait(async {
        let waiting = Sealed::waiting(config, job).await?;
        if waiting.is_empty() {
            return Ok(false);
        }
        // A store that cannot be read is told by who reads it next.
        let log = JobLog::read(&*session.store, job).await;
        Ok(log.map_or(true, |log| {
            waiting.iter().any(|sealed| sealed.is_ahead_of(&log))
        }))
    });
    match found {
        Ok(false) => None,
        Ok(true) => Some(SealedSave::Waits {
            job: job.to_string(),
            path,
        }),
        Err(source) => Some(SealedSave::Unknown { path, source }),
    }
}

/// See [`sealed_save`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum SealedSave {
    #[error(
        "the newest save of job {job} is sealed in {path} (spill.path) and is no image yet; run `ckptstream resume`, or name an older image with --image and --into-fresh"
    )]
    Waits { job: String, path: String },
    #[error("it cannot be known whether the newest save is sealed in {path} (spill.path)")]
    Unknown {
        path: String,
        #[source]
        source: SealedError,
    },
}

/// An older image verifies, but the newest does not: nobody should take that for good news.
#[derive(Debug, thiserror::Error)]
#[error("image {image} verifies, but it is not the newest; passed over: {}", skipped.join("; "))]
struct NewerIsDamaged {
    image: String,
    skipped: Vec<String>,
}

/// A command that only reads answers 3, not 20, when the store cannot be reached.
pub(super) fn reads_only(failure: Failure) -> Failure {
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

/// Why an image could not be read through.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadFailed {
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

impl LoadFailed {
    /// What a command that only reads answers: 20 when the image is damaged, 2 when the budget is too small, 3 when something else is in the way.
    fn code(&self) -> ExitCode {
        match self {
            Self::Pipeline(PipelineError::Frame { .. }) => ExitCode::RestoreRefused,
            Self::Pipeline(PipelineError::Store(error)) if error.is_about_the_object() => {
                ExitCode::RestoreRefused
            }
            Self::Plan(error) => plan_code(error),
            _ => ExitCode::Preflight,
        }
    }
}

/// Reads and verifies every chunk, and keeps none.
pub(super) fn load_nowhere(session: &Session, image: &Image) -> Result<Loaded, LoadFailed> {
    let plan = load_plan(session, image, Which::All)?;
    let lanes = lanes(session, image, &plan, None)?;
    let resources = resources(
        session,
        &plan,
        Arc::clone(&session.store) as Arc<dyn Store>,
        session.cancel.clone(),
        None,
    )?;
    match pipeline::load(&lanes, resources, Destination::Nowhere) {
        Err(_) if session.cancel.is_cancelled() => Err(Interrupted.into()),
        outcome => Ok(outcome?),
    }
}

/// The same for one object without an image.
pub(crate) fn read_object(
    session: &Session,
    key: &Key,
    etag: Option<String>,
    table: &FrameTable,
) -> Result<(), LoadFailed> {
    let shape = plan::LoadLane {
        raw_len: table.raw_len,
        chunk_len: table.chunk_len,
        frame_len_max: table.frame_len_max(),
        frames_len: table.frames_len(),
    };
    let plan = plan_load(&[shape], &load_settings(session))?;
    let chunk_len = usize::try_from(table.chunk_len).unwrap_or(usize::MAX);
    let lane = LoadLane {
        key: key.clone(),
        etag,
        table,
        raw_len: table.raw_len,
        chunk_len: table.chunk_len,
        ring: pool(plan.ring_chunks, chunk_len, None)?,
        meter: LaneMeter::new("object", table.raw_len),
    };
    let store = Arc::clone(&session.store) as Arc<dyn Store>;
    let resources = resources(session, &plan, store, session.cancel.clone(), None)?;
    pipeline::load(&[lane], resources, Destination::Nowhere)?;
    Ok(())
}

/// Which of an image's objects are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    All,
    /// Those of GPUs.
    Gpus,
}

impl Which {
    fn of(self, image: &Image) -> impl Iterator<Item = Stored<'_>> {
        let stored = image.stored();
        stored.filter(move |stored| self == Self::All || stored.extent.device != HOST)
    }
}

fn shape(stored: &Stored<'_>) -> plan::LoadLane {
    plan::LoadLane {
        raw_len: stored.extent.raw_len,
        chunk_len: stored.extent.chunk_len,
        frame_len_max: stored.table.frame_len_max(),
        frames_len: stored.table.frames_len(),
    }
}

pub(super) fn load_plan(
    session: &Session,
    image: &Image,
    which: Which,
) -> Result<LoadPlan, PlanError> {
    let shapes: Vec<plan::LoadLane> = which.of(image).map(|stored| shape(&stored)).collect();
    plan_load(&shapes, &load_settings(session))
}

fn load_settings(session: &Session) -> LoadSettings {
    let pipeline = &session.config.pipeline;
    LoadSettings {
        memory_budget: pipeline.memory_budget,
        budget_is_set: pipeline.memory_budget_is_set,
        threads: pipeline.threads,
        parallelism: session.config.store.parallelism,
    }
}

/// The lanes of a load; `to` names the driver and the GPU of each lane, when the bytes go to any.
pub(super) fn lanes<'a>(
    session: &Session,
    image: &'a Image,
    plan: &LoadPlan,
    to: Option<(&Arc<Driver>, &[usize])>,
) -> Result<Vec<LoadLane<'a>>, LoadFailed> {
    let mut lanes = Vec::new();
    let which = match to {
        Some(_) => Which::Gpus,
        None => Which::All,
    };
    for (index, stored) in which.of(image).enumerate() {
        let Stored {
            extent,
            table,
            etag,
        } = stored;
        let chunk_len = usize::try_from(extent.chunk_len).unwrap_or(usize::MAX);
        let label = match extent.device.as_str() {
            HOST => HOST.to_owned(),
            _ => format!("GPU {index}"),
        };
        lanes.push(LoadLane {
            key: Key::of_job(&session.config.job, &extent.object.key)?,
            etag: etag.map(str::to_owned),
            table,
            raw_len: extent.raw_len,
            chunk_len: extent.chunk_len,
            ring: pool(
                plan.ring_chunks,
                chunk_len,
                to.map(|(driver, gpus)| (driver, gpus[index])),
            )?,
            meter: LaneMeter::new(label, extent.raw_len),
        });
    }
    session
        .meter
        .announce(lanes.iter().map(|lane| Arc::clone(&lane.meter)).collect());
    Ok(lanes)
}

pub(super) fn resources(
    session: &Session,
    plan: &LoadPlan,
    store: Arc<dyn Store>,
    cancel: CancellationToken,
    to: Option<(&Arc<Driver>, &[usize])>,
) -> Result<LoadResources, LoadFailed> {
    let buffer_len = usize::try_from(fetch_buffer_len(plan.fetch_len_max)).unwrap_or(usize::MAX);
    // Shared by all lanes, so beside one GPU of them: pinned for all, near to that one.
    let beside = to.and_then(|(driver, gpus)| Some((driver, *gpus.first()?)));
    let mut decoders = Vec::new();
    for _ in 0..plan.threads {
        decoders.push(Decoder::new()?);
    }
    Ok(LoadResources {
        store,
        runtime: session.runtime.clone(),
        decoders,
        fetch_buffers: pool(plan.fetch_buffers, buffer_len, beside)?,
        patience: match to {
            // A restore that is given up ends the target.
            Some(_) => session.config.store.retry_timeout,
            None => Duration::ZERO,
        },
        fetch_len_max: plan.fetch_len_max,
        meter: Arc::clone(&session.meter),
        cancel,
    })
}

/// Buffers, pinned for copies to a GPU if there is one and if they can be.
fn pool(
    count: usize,
    buffer_len: usize,
    beside: Option<(&Arc<Driver>, usize)>,
) -> Result<BufferPool, DriverError> {
    match beside {
        Some(beside) => BufferPool::within_limits(count, count, buffer_len, beside),
        None => BufferPool::new(count, buffer_len, None),
    }
}

/// Why there is nothing to print.
#[derive(Debug, thiserror::Error)]
enum NoSuchExtent {
    #[error("{gpu} holds no data in image {} (--gpu); it has {there}", image_id(*generation))]
    OtherGpu {
        gpu: GpuUuid,
        generation: u64,
        there: String,
    },
    #[error("image {} holds no data", image_id(*generation))]
    NoData { generation: u64 },
    #[error("image {} has several GPUs; choose one with --gpu: {there}", image_id(*generation))]
    Several { generation: u64, there: String },
}

fn choose_extent(image: &Image, gpu: Option<GpuUuid>) -> Result<Stored<'_>, NoSuchExtent> {
    let generation = image.generation;
    let mut extents = Which::Gpus.of(image);
    let there = || {
        let names: Vec<&str> = Which::Gpus
            .of(image)
            .map(|stored| stored.extent.device.as_str())
            .collect();
        names.join(", ")
    };
    let Some(gpu) = gpu else {
        return match (extents.next(), extents.next()) {
            (Some(only), None) => Ok(only),
            (None, _) => Err(NoSuchExtent::NoData { generation }),
            _ => Err(NoSuchExtent::Several {
                generation,
                there: there(),
            }),
        };
    };
    let found = extents.find(|stored| stored.extent.device == gpu.to_string());
    found.ok_or_else(|| NoSuchExtent::OtherGpu {
        gpu,
        generation,
        there: there(),
    })
}

/// Most ranges ahead of the one that is being written.
const CAT_READ_AHEAD: usize = 4;

fn cat_extent(
    session: &Session,
    stored: Stored<'_>,
    out: &mut dyn Write,
) -> Result<(), InOrderError> {
    let plan = plan_load(&[shape(&stored)], &load_settings(session)).map_err(LoadFailed::from)?;
    let ahead = Ahead {
        ranges: plan.fetch_buffers.clamp(1, CAT_READ_AHEAD),
        range_len: plan.fetch_len_max,
        batches: CAT_READ_AHEAD.min(plan.threads as usize).max(1),
    };
    let all = 0..stored.extent.raw_len;
    write_in_order(session, &*session.store, stored, all, ahead, out)
}
