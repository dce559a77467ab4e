//! What this node can do, without a target: every stage alone, the whole pipeline both ways, and what that means for a notice.
//!
//! In: GPU memory of our own (or none), filled with chosen data; a store, or one in this process. Out: a [`Report`]. What can fail: what a save and a restore can fail of, and
//! bytes that come back different. Nothing stays behind: the objects lie under `<job>/bench-<nonce>/` and are removed at the end, also of a bench that failed or was stopped.
//!
//! ```text
//! GPU memory ◀─fill─ tile        copy out, copy in          beside the engine's own rate
//!                    tile        zero scan, digest, checksum, codec both ways     on one thread and on all
//!                    parts       upload, download           to --to null | memory | store
//! GPU memory ─ring─ frames ─ parts ─▶ store and back        by pipeline::save and load, beside the floor that the stages alone give
//! ```
//!
//! The host holds the pipeline's buffers (the memory budget), one tile of at most 256 MiB, and its frames. A store that swallows serves a tile's frames over and over, so
//! a restore of any size needs no more.

mod data;
mod device;
mod flow;
mod measure;
mod place;
mod report;
mod stages;
mod verdict;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio_util::sync::CancellationToken;

use crate::codec::frame::EncoderError;
use crate::codec::{DecoderError, FrameError};
use crate::codec::{Effort, Level};
use crate::config::Config;
use crate::driver::{Driver, DriverError, PoolClosed};
use crate::error::{ExitCode, Failure, Phase};
use crate::pipeline::PipelineError;
use crate::plan::{PlanError, SavePlan};
use crate::progress::Meter;
use crate::restore::plan_code;
use crate::session::Interrupted;
use crate::store::{BadKey, StoreError};

pub use data::{Data, DataError, Kind};
pub use place::To;
pub use report::{Conditions, GpuInfo, Machine, PipelineRate, Report, StageRate};
pub use verdict::{Costs, Estimate, Floor, Limit, Node, StageCost, Verdict};

use device::{Direction, Gpus};
use flow::{Coder, Flow, save_plan};
use measure::{Took, gb, timed};
use place::Place;
use report::{pass_row, pipeline_row, row};
use stages::{Pass, Passes};
use verdict::{Basis, Measured};
use wire::Amount;

/// Bytes of data made at most; above the caches of any processor, so that the stages read from memory as they do in a save.
const TILE_LEN_MAX: u64 = 256 << 20;
/// What upload and download send, over and over; also the longest part of theirs.
const WIRE_LEN: usize = 64 << 20;
/// Bytes that one run of the wire moves at most.
const WIRE_RUN_BYTES: u64 = 1 << 30;
/// Memory per GPU that the bench takes unless it is told.
const SIZE_DEFAULT: u64 = 4 << 30;
const SIZE_QUICK: u64 = 64 << 20;
const RUNS_DEFAULT: u32 = 3;

/// What to measure.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What fills the memory, one after the other.
    pub data: Vec<Data>,
    /// Bytes per GPU; `None` takes 4 GiB, or what half of the free memory is.
    pub size: Option<u64>,
    /// How many GPUs; `None` takes all.
    pub gpus: Option<u32>,
    /// Without any: the stages that need none.
    pub no_gpu: bool,
    /// Which store.
    pub to: To,
    /// Runs of each measurement, of which the median counts; `None` takes 3.
    pub runs: Option<u32>,
    /// Everything small and once: seconds instead of minutes, figures to match.
    pub quick: bool,
    /// The node that the verdict is for; `None` takes this one, its GPUs full.
    pub node: Option<Node>,
    /// How long the notice is.
    pub notice: Duration,
}

/// What the bench works with.
#[derive(Clone, Copy)]
pub struct Surroundings<'a> {
    /// Memory, threads, compression, store, job.
    pub config: &'a Config,
    /// Carries the network.
    pub runtime: &'a tokio::runtime::Handle,
    /// Progress of the runs.
    pub meter: &'a Arc<Meter>,
    /// Cancelled to stop the bench.
    pub cancel: &'a CancellationToken,
    /// Told of each step as it begins.
    pub tell: &'a dyn Fn(&str),
}

impl std::fmt::Debug for Surroundings<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Surroundings")
            .field("config", self.config)
            .finish_non_exhaustive()
    }
}

/// Why a bench did not come to its end.
#[derive(Debug, thiserror::Error)]
enum BenchError {
    #[error("the data cannot be had")]
    Data(#[from] DataError),
    #[error("{asked} GPUs are asked for (--gpus), and this node has {there}")]
    TooFewGpus { asked: u32, there: usize },
    #[error("{size} bytes of GPU memory (--size) are less than one chunk of {chunk_len} bytes")]
    SizeTooSmall { size: u64, chunk_len: u64 },
    #[error(
        "GPU {device} has no {len} bytes for the bench; lower --size, or leave GPUs out with --gpus"
    )]
    GpuMemory {
        device: usize,
        len: u64,
        #[source]
        source: DriverError,
    },
    #[error("the driver failed; --no-gpu measures without one")]
    Driver(#[from] DriverError),
    #[error("the buffers do not fit")]
    Plan(#[from] PlanError),
    #[error("the compressor cannot be set up")]
    Encoder(#[from] EncoderError),
    #[error("the decompressor cannot be set up")]
    Decoder(#[from] DecoderError),
    #[error("a frame that was just made does not decode; this is a defect of ckptstream")]
    Frame(#[from] FrameError),
    #[error("a key of the bench is not legal")]
    Key(#[from] BadKey),
    #[error("the store failed")]
    Store(#[from] StoreError),
    #[error("the pipeline failed")]
    Pipeline(#[from] PipelineError),
    #[error("the bench was given up")]
    Closed(#[from] PoolClosed),
    #[error("GPU {device} does not hold what was put into it, near byte {offset}")]
    Different { device: usize, offset: u64 },
    #[error("stopped by a signal")]
    Interrupted,
}

impl BenchError {
    /// Nothing is saved and nothing is lost by a bench: 2 for what was asked, 20 for bytes that differ, 3 for all else.
    fn code(&self) -> ExitCode {
        match self {
            Self::Data(_) | Self::TooFewGpus { .. } | Self::SizeTooSmall { .. } => ExitCode::Config,
            Self::Plan(error) => plan_code(error),
            Self::Different { .. }
            | Self::Frame(_)
            | Self::Pipeline(PipelineError::Frame { .. }) => ExitCode::RestoreRefused,
            _ => ExitCode::Preflight,
        }
    }
}

/// Measures this node.
///
/// # Errors
/// Exit 2 for settings that cannot be, 3 when driver, memory or store are in the way or a signal came, 20 when bytes come back different. Objects in the store are removed in
/// any case; what could not be is attached.
pub fn run(around: Surroundings<'_>, settings: &Settings) -> Result<Report, Failure> {
    let opened = around.runtime.block_on(Place::open(
        settings.to,
        around.config,
        around.cancel,
        around.meter,
    ));
    let place = opened.map_err(|error| failure(around, error.into()))?;
    let measured = Bench::new(around, settings, &place).and_then(Bench::measure);
    let left_behind = around.runtime.block_on(place.clean());
    match measured {
        Ok(report) => Ok(Report {
            left_behind,
            ..report
        }),
        Err(error) => {
            let mut failure = failure(around, error);
            failure.attached = left_behind;
            Err(failure)
        }
    }
}

fn failure(around: Surroundings<'_>, error: BenchError) -> Failure {
    if around.cancel.is_cancelled() {
        // Whatever failed, failed because of that.
        return Failure::new(ExitCode::Preflight, Phase::Stream, Interrupted);
    }
    Failure::new(error.code(), Phase::Stream, error)
}

/// A bench under way.
struct Bench<'a> {
    around: Surroundings<'a>,
    settings: &'a Settings,
    place: &'a Place,
    gpus: Option<Gpus>,
    plan: SavePlan,
    conditions: Conditions,
    stages: Vec<StageRate>,
    pipeline: Vec<PipelineRate>,
}

/// What one kind of data measured, for the verdict.
struct Ways {
    out: Measured,
    back: Measured,
}

impl<'a> Bench<'a> {
    /// Plans, and takes the GPUs' memory.
    fn new(
        around: Surroundings<'a>,
        settings: &'a Settings,
        place: &'a Place,
    ) -> Result<Self, BenchError> {
        (around.tell)("driver, contexts, memory");
        let config = around.config;
        let (driver, took) = timed(|| open_driver(settings))?;
        let memory_lens: Vec<u64> = driver
            .iter()
            .flat_map(|(driver, count)| driver.devices()[..*count].iter().map(|gpu| gpu.memory_len))
            .collect();
        // Without a GPU the buffers are those of one that is as large as what is measured.
        let planned_for = if memory_lens.is_empty() {
            vec![SIZE_DEFAULT]
        } else {
            memory_lens
        };
        let plan = save_plan(config, &planned_for)?;
        let (size, tile_len) = sizes(settings, driver.as_ref(), plan.chunk_len)?;
        let gpus = driver
            .map(|(driver, count)| {
                Gpus::allocate(&driver, count, size, config.pipeline.threads, around.cancel)
            })
            .transpose()?;
        let conditions = Conditions {
            size,
            tile_len,
            runs: settings
                .runs
                .unwrap_or(if settings.quick { 1 } else { RUNS_DEFAULT }),
            quick: settings.quick,
            to: settings.to.to_string(),
            store: place.store.describe(),
            chunk_len: plan.chunk_len,
            part_len: plan.part_len,
            ring_chunks: plan.ring_chunks,
            threads: plan.threads,
            parallelism: config.store.parallelism,
            memory_budget: config.pipeline.memory_budget,
            driver_seconds: took.seconds,
        };
        Ok(Self {
            around,
            settings,
            place,
            gpus,
            plan,
            conditions,
            stages: Vec::new(),
            pipeline: Vec::new(),
        })
    }

    fn measure(mut self) -> Result<Report, BenchError> {
        let mut out = Vec::new();
        let mut back = Vec::new();
        for (index, data) in self.settings.data.iter().enumerate() {
            self.step(&format!(
                "{data}: making {} MiB",
                self.conditions.tile_len >> 20
            ))?;
            let threads = self.around.config.pipeline.threads as usize;
            let tile = data.tile(self.tile_len(), threads)?;
            if index == 0 {
                self.copies(&tile)?;
                self.checks(&tile)?;
                self.wire()?;
            }
            if let Some(gpus) = &self.gpus {
                self.step(&format!("{data}: filling the GPUs"))?;
                gpus.fill(&tile)?;
            }
            let ways = self.kind(&data.to_string(), &tile)?;
            out.push(ways.out);
            back.push(ways.back);
        }
        let machine = self.machine();
        let node = self.settings.node.unwrap_or_else(|| this_node(&machine));
        let basis = Basis {
            link: self.settings.to == To::Store,
            gpus: self.gpus.is_some(),
        };
        Ok(Report {
            verdict: Verdict::new(node, self.settings.notice, basis, &out, &back),
            machine,
            conditions: self.conditions,
            stages: self.stages,
            pipeline: self.pipeline,
            left_behind: Vec::new(),
        })
    }

    /// Tells of a step, unless there shall be no more.
    fn step(&self, text: &str) -> Result<(), BenchError> {
        if self.around.cancel.is_cancelled() {
            return Err(BenchError::Interrupted);
        }
        (self.around.tell)(text);
        Ok(())
    }

    fn tile_len(&self) -> usize {
        usize::try_from(self.conditions.tile_len).unwrap_or(usize::MAX)
    }

    fn chunk_len(&self) -> usize {
        usize::try_from(self.plan.chunk_len).unwrap_or(usize::MAX)
    }

    /// One thread, and all of them.
    fn thread_counts(&self) -> Vec<u32> {
        let all = self.conditions.threads.max(1);
        if all == 1 { vec![1] } else { vec![1, all] }
    }

    fn passes(&self, threads: u32) -> Passes {
        Passes {
            threads: threads as usize,
            at_least: Duration::from_millis(if self.settings.quick { 20 } else { 400 }),
        }
    }

    /// Repeats a measurement.
    fn repeated<T>(
        &self,
        mut once: impl FnMut() -> Result<T, BenchError>,
    ) -> Result<Vec<T>, BenchError> {
        (0..self.conditions.runs.max(1))
            .map(|_| {
                if self.around.cancel.is_cancelled() {
                    return Err(BenchError::Interrupted);
                }
                once()
            })
            .collect()
    }

    fn flow<'b>(&'b self, gpus: &'b Gpus) -> Flow<'b> {
        Flow {
            config: self.around.config,
            runtime: self.around.runtime,
            meter: self.around.meter,
            cancel: self.around.cancel,
            gpus,
            plan: &self.plan,
        }
    }

    /// The copies alone, beside the engine's own rate: raw and through the ring in turn, so that both see the same machine. What the GPUs hold is lost.
    fn copies(&mut self, tile: &[u8]) -> Result<(), BenchError> {
        let Some(gpus) = &self.gpus else {
            return Ok(());
        };
        // Memory that was never written may have no pages yet.
        gpus.fill(tile)?;
        let flow = self.flow(gpus);
        let count = u32::try_from(gpus.extents().len()).unwrap_or(u32::MAX);
        let bytes = self.conditions.size * u64::from(count);
        let mut rows = Vec::new();
        for (direction, raw_stage, stage) in [
            (Direction::Out, "raw-copy-out", "copy-out"),
            (Direction::In, "raw-copy-in", "copy-in"),
        ] {
            self.step(stage)?;
            let pairs =
                self.repeated(|| Ok((gpus.copy_raw(direction)?, flow.copy_alone(direction)?)))?;
            let (raw, ring): (Vec<Took>, Vec<Took>) = pairs.into_iter().unzip();
            let raw = row(raw_stage, None, count, bytes, &raw);
            let mut ring = row(stage, None, count, bytes, &ring);
            ring.share_of_raw = ring.rate.zip(raw.rate).map(|(ring, raw)| ring / raw);
            rows.extend([raw, ring]);
        }
        self.stages.append(&mut rows);
        Ok(())
    }

    /// Zero scan, digest, checksum.
    fn checks(&mut self, tile: &[u8]) -> Result<(), BenchError> {
        let chunk_len = self.chunk_len();
        let coder = Coder::new(self.around.config, Effort::FIRST);
        // A chunk of zeros is looked at by the encoder, and nothing else is done for it.
        let all = self.conditions.threads as usize;
        let zeros = Data::Kind(Kind::Zero).tile(tile.len(), all)?;
        let mut rows = Vec::new();
        for threads in self.thread_counts() {
            let passes = self.passes(threads);
            self.step(&format!("zero scan, digest, checksum, {threads} at once"))?;
            let scans = self.repeated(|| passes.encode(&zeros, chunk_len, &coder))?;
            let digests = self.repeated(|| passes.digest(tile, chunk_len))?;
            let checksums = self.repeated(|| passes.checksum(tile, chunk_len))?;
            for (stage, passes) in [
                ("zero-scan", scans),
                ("digest", digests),
                ("checksum", checksums),
            ] {
                rows.push(pass_row(stage, None, threads, &passes));
            }
        }
        self.stages.append(&mut rows);
        Ok(())
    }

    /// Upload and download alone.
    fn wire(&mut self) -> Result<(), BenchError> {
        let part_len = usize::try_from(self.plan.part_len).unwrap_or(usize::MAX);
        let part_len = part_len.min(WIRE_LEN);
        // Random: a store that compresses or deduplicates gains nothing from it.
        let len = WIRE_LEN / part_len * part_len;
        let bytes =
            Bytes::from(Data::Kind(Kind::Random).tile(len, self.conditions.threads as usize)?);
        // Buffers of the downloads are the bench's own and stay within the budget.
        let in_budget = self.conditions.memory_budget / part_len as u64;
        let at_once = u64::from(self.conditions.parallelism).min(in_budget.max(1));
        let (bytes_max, time_max) = if self.settings.quick {
            (WIRE_LEN as u64, Duration::from_millis(300))
        } else {
            (WIRE_RUN_BYTES, Duration::from_secs(3))
        };
        let amount = Amount {
            part_len,
            at_once: usize::try_from(at_once).unwrap_or(1),
            parts_max: bytes_max.div_ceil(part_len as u64),
            time_max,
        };
        self.step(&format!("upload and download, --to {}", self.settings.to))?;
        let runtime = self.around.runtime;
        let mut kept = None;
        let uploads = self.repeated(|| {
            runtime.block_on(self.place.clean());
            let (key, moved) = amount.upload(runtime, self.place, &bytes)?;
            kept = Some((key, moved.bytes));
            Ok(moved)
        })?;
        let Some((key, mut len)) = kept else {
            return Ok(());
        };
        if self.place.swallows() {
            len = bytes_max;
            self.place.serve(&key, bytes.clone(), len);
        }
        let downloads = self.repeated(|| amount.download(runtime, self.place, &key, len))?;
        runtime.block_on(self.place.clean());
        let at_once = u32::try_from(at_once).unwrap_or(u32::MAX);
        for (stage, moved) in [("upload", uploads), ("download", downloads)] {
            let passes: Vec<Pass> = moved
                .iter()
                .map(|moved| Pass {
                    bytes: moved.bytes,
                    took: moved.took,
                })
                .collect();
            let mut row = pass_row(stage, None, at_once, &passes);
            if stage == "upload" && self.place.swallows() {
                row.rate = None;
            }
            self.stages.push(row);
        }
        Ok(())
    }

    /// The codec, and the whole pipeline both ways, with one kind of data that the GPUs hold already.
    fn kind(&mut self, data: &str, tile: &[u8]) -> Result<Ways, BenchError> {
        let stored_share = self.codec(data, tile)?;
        let mut ways = Ways {
            out: self.measured(data, "compress", stored_share, "copy-out", "upload"),
            back: self.measured(data, "decompress", stored_share, "copy-in", "download"),
        };
        if self.around.config.compression.settings.level == Level::Auto {
            // A run may leave chunks as they are where that is faster: the floor is that of the better way.
            let raw_share = self.codec_at(data, "compress-least", tile, Effort::LEAST)?;
            let raw = self.measured(data, "compress-least", raw_share, "copy-out", "upload");
            let node = Node {
                gpus: 1,
                gpu_bytes: self.conditions.size,
            };
            if raw.costs.floor(node).seconds() < ways.out.costs.floor(node).seconds() {
                ways.out = raw;
            }
        }
        let Some(gpus) = &self.gpus else {
            return Ok(ways);
        };
        let flow = self.flow(gpus);
        let runtime = self.around.runtime;

        self.step(&format!("{data}: the whole pipeline out"))?;
        let mut stored = Vec::new();
        let runs_out = self.repeated(|| {
            runtime.block_on(self.place.clean());
            let (run, lanes) = flow.out(self.place)?;
            stored = lanes;
            Ok(run)
        })?;
        if self.place.swallows() {
            self.step(&format!("{data}: making what is read back"))?;
            stored = flow.served(self.place, self.conditions.tile_len)?;
        }
        self.step(&format!("{data}: the whole pipeline in"))?;
        gpus.scribble()?;
        let runs_back = self.repeated(|| flow.back(&self.place.store, &stored))?;
        self.step(&format!("{data}: comparing"))?;
        gpus.compare(tile)?;
        runtime.block_on(self.place.clean());

        let node = self.measured_node(gpus);
        for (direction, way, runs) in [
            ("out", &mut ways.out, runs_out),
            ("in", &mut ways.back, runs_back),
        ] {
            let rate = pipeline_row(direction, data, node, way, runs);
            self.pipeline.push(rate);
        }
        Ok(ways)
    }

    fn measured_node(&self, gpus: &Gpus) -> Node {
        Node {
            gpus: u32::try_from(gpus.extents().len()).unwrap_or(u32::MAX),
            gpu_bytes: self.conditions.size,
        }
    }

    /// The encoder alone, trying as hard as `effort` says, all threads at once. Stored bytes per raw byte.
    fn codec_at(
        &mut self,
        data: &str,
        stage: &'static str,
        tile: &[u8],
        effort: Effort,
    ) -> Result<f64, BenchError> {
        let chunk_len = self.chunk_len();
        let coder = Coder::new(self.around.config, effort);
        self.step(&format!("{data}: {stage}"))?;
        let stored: usize = coder.stored_lens(tile, chunk_len)?.sum();
        let stored_share = gb(stored as u64) / gb(tile.len() as u64);
        let threads = self.conditions.threads.max(1);
        let passes = self.passes(threads);
        let encoded = self.repeated(|| passes.encode(tile, chunk_len, &coder))?;
        let mut row = pass_row(stage, Some(data), threads, &encoded);
        row.stored_share = Some(stored_share);
        self.stages.push(row);
        Ok(stored_share)
    }

    /// The codec alone, both ways. Stored bytes per raw byte.
    fn codec(&mut self, data: &str, tile: &[u8]) -> Result<f64, BenchError> {
        let chunk_len = self.chunk_len();
        let coder = Coder::new(self.around.config, Effort::FIRST);
        self.step(&format!("{data}: codec"))?;
        let frames = coder.frames(tile, chunk_len)?;
        let stored: u64 = frames.iter().map(flow::Frame::stored_len).sum();
        let stored_share = gb(stored) / gb(tile.len() as u64);
        let mut rows = Vec::new();
        for threads in self.thread_counts() {
            let passes = self.passes(threads);
            let encoded = self.repeated(|| passes.encode(tile, chunk_len, &coder))?;
            let decoded = self.repeated(|| passes.decode(tile, chunk_len, &coder, &frames))?;
            for (stage, passes) in [("compress", encoded), ("decompress", decoded)] {
                let mut row = pass_row(stage, Some(data), threads, &passes);
                row.stored_share = Some(stored_share);
                rows.push(row);
            }
        }
        self.stages.append(&mut rows);
        Ok(stored_share)
    }

    /// The costs of one way, from the stages that were measured so far; the codec's with all threads at work, as they are in a run.
    fn measured(
        &self,
        data: &str,
        codec: &'static str,
        stored_share: f64,
        copy: &'static str,
        wire: &'static str,
    ) -> Measured {
        let all = self.conditions.threads.max(1);
        let find = |stage: &str, data: Option<&str>, at_once: Option<u32>| {
            self.stages.iter().find(|row| {
                row.stage == stage
                    && row.data.as_deref() == data
                    && at_once.is_none_or(|at_once| row.at_once == at_once)
            })
        };
        let cost = |row: Option<&StageRate>| row.map_or(0.0, |row| row.cpu_seconds_per_gb);
        let copy_row = find(copy, None, None);
        let wire_row = find(wire, None, None);
        let cpu_per_gb = vec![
            StageCost {
                stage: "copy",
                cpu_seconds: cost(copy_row),
            },
            StageCost {
                stage: codec,
                cpu_seconds: cost(find(codec, Some(data), Some(all))),
            },
            StageCost {
                stage: wire,
                cpu_seconds: cost(wire_row) * stored_share,
            },
        ];
        Measured {
            data: data.to_owned(),
            costs: Costs {
                // All GPUs were copied at once: the rate of one.
                copy_rate: copy_row.and_then(|row| Some(row.rate? / f64::from(row.at_once.max(1)))),
                cpu_per_gb,
                stored_share,
                link_rate: wire_row
                    .filter(|_| self.settings.to == To::Store)
                    .and_then(|row| row.rate),
                cores: all_cores(),
            },
            run: None,
            prepare_seconds: self.conditions.driver_seconds,
        }
    }

    fn machine(&self) -> Machine {
        let devices = self.gpus.iter().flat_map(|gpus| {
            let count = gpus.extents().len();
            gpus.driver().devices()[..count].iter()
        });
        Machine {
            cores: all_cores(),
            processor: processor(),
            gpus: devices
                .map(|device| GpuInfo {
                    ordinal: device.ordinal,
                    name: device.name.clone(),
                    uuid: device.uuid.to_string(),
                    memory_len: device.memory_len,
                })
                .collect(),
            driver_version: self
                .gpus
                .as_ref()
                .and_then(|gpus| gpus.driver().driver_version().map(str::to_owned)),
        }
    }
}

/// The driver with its contexts, and how many of its GPUs take part; `None` when none shall.
fn open_driver(settings: &Settings) -> Result<Option<(Arc<Driver>, usize)>, BenchError> {
    if settings.no_gpu {
        return Ok(None);
    }
    let driver = Driver::open()?;
    let there = driver.devices().len();
    let count = match settings.gpus {
        Some(asked) if asked as usize > there => {
            return Err(BenchError::TooFewGpus { asked, there });
        }
        Some(asked) => asked as usize,
        None => there,
    };
    driver.retain_contexts()?;
    Ok(Some((driver, count)))
}

/// Bytes per GPU, and bytes of the tile: whole chunks, whole tiles.
fn sizes(
    settings: &Settings,
    driver: Option<&(Arc<Driver>, usize)>,
    chunk_len: u64,
) -> Result<(u64, u64), BenchError> {
    let default = if settings.quick {
        SIZE_QUICK
    } else {
        SIZE_DEFAULT
    };
    let size = match (settings.size, driver) {
        (Some(size), _) => size,
        (None, None) => default,
        (None, Some((driver, count))) => {
            let free = (0..*count).map(|device| driver.free_memory(device));
            let least = free.collect::<Result<Vec<_>, _>>()?.into_iter().min();
            default.min(least.unwrap_or(default) / 2)
        }
    };
    whole_tiles(size, chunk_len).ok_or(BenchError::SizeTooSmall { size, chunk_len })
}

/// The size cut down to whole tiles, and the tile; `None` when not even one chunk fits.
fn whole_tiles(size: u64, chunk_len: u64) -> Option<(u64, u64)> {
    let tile_len = size.min(TILE_LEN_MAX) / chunk_len * chunk_len;
    (tile_len > 0).then(|| (size / tile_len * tile_len, tile_len))
}

/// The node that was measured, its GPUs full; without a GPU one of 80 GB.
fn this_node(machine: &Machine) -> Node {
    Node {
        gpus: u32::try_from(machine.gpus.len()).unwrap_or(u32::MAX).max(1),
        gpu_bytes: machine
            .gpus
            .iter()
            .map(|gpu| gpu.memory_len)
            .max()
            .unwrap_or(80_000_000_000),
    }
}

fn all_cores() -> u32 {
    std::thread::available_parallelism()
        .map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX))
}

fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text
        .lines()
        .find_map(|line| line.strip_prefix("model name"));
    name.map_or("", |rest| rest.trim_start_matches([' ', '\t', ':']))
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn memory_is_measured_in_whole_tiles_of_whole_chunks() {
        assert_eq!(
            whole_tiles(4096 * MIB, 16 * MIB),
            Some((4096 * MIB, 256 * MIB))
        );
        assert_eq!(
            whole_tiles(1000 * MIB, 16 * MIB),
            Some((768 * MIB, 256 * MIB))
        );
        assert_eq!(whole_tiles(70 * MIB, 16 * MIB), Some((64 * MIB, 64 * MIB)));
        assert_eq!(whole_tiles(15 * MIB, 16 * MIB), None);
    }

    #[test]
    fn without_a_gpu_the_verdict_is_for_one_of_80_gb() {
        let machine = Machine {
            cores: 2,
            processor: String::new(),
            gpus: Vec::new(),
            driver_version: None,
        };
        assert_eq!(
            this_node(&machine),
            Node {
                gpus: 1,
                gpu_bytes: 80_000_000_000
            }
        );
    }
}
