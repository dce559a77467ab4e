//! The memory of a save: planned, allocated, pinned and touched before the target is locked, dealt out to the GPUs that hold data, and to a tree's host memory, after.
//!
//! In: the settings, every GPU's total memory (the worst case, from which lengths follow) and what it uses now (an estimate, from which numbers of buffers follow); the same of the tree. Out: the pipeline's lanes and resources. What can fail: a plan that does not fit,
//! memory that is not to be had; never after BEGIN.
//!
//! A save is made in several runs, one after the other: one that may be spilled goes over the GPUs' memory twice at most; of processes that share a GPU each has its own run; host memory comes last. Buffers and encoders serve again; what a run uses up is prepared for all.

use std::error::Error;
use std::sync::Arc;

use super::attempt::{Holds, OpenUpload};
use crate::codec::Encoder;
use crate::config::Config;
use crate::driver::{BufferPool, CopyQueue, Device, Driver, DriverError, Extent, STREAMS_OUT};
use crate::error::{ExitCode, Failure, Phase};
use crate::manifest::{FrameTable, HOST};
use crate::pipeline::{Origin, SaveLane, SaveResources, Source, Witness};
use crate::plan::{PACK_LEN, RING_CHUNKS_MIN, SavePlan, SaveSettings, plan_save};
use crate::progress::LaneMeter;
use crate::restore::plan_code;
use crate::session::{Interrupted, Session};
use crate::store::Store;

/// Copies under way on a GPU: two keep its copy engine busy, the others bridge a thread that is late. The rest of the ring is for what parts hold.
const COPIES_UNDER_WAY: usize = 4;

/// Plans a save of whatever these GPUs may hold.
///
/// # Errors
/// Exit 2 or 3, see [`plan_code`].
pub(crate) fn plan(config: &Config, driver: &Driver) -> Result<SavePlan, Failure> {
    let devices = driver.devices().iter();
    let gpu_memory: Vec<u64> = devices.map(|device| device.memory_len).collect();
    plan_for(config, &gpu_memory)
}

/// The same for lanes that may have so many bytes each.
fn plan_for(config: &Config, lens: &[u64]) -> Result<SavePlan, Failure> {
    let pipeline = &config.pipeline;
    let settings = SaveSettings {
        part_size: config.store.part_size,
        limits: config.store.limits,
        chunk_size: pipeline.chunk_size,
        memory_budget: pipeline.memory_budget,
        budget_is_set: pipeline.memory_budget_is_set,
        threads: pipeline.threads,
        parallelism: config.store.parallelism,
        context_bytes: config.compression.settings.context_bytes(),
    };
    plan_save(lens, &settings)
        .map_err(|error| Failure::new(plan_code(&error), Phase::Prepare, error))
}

/// Every byte that the pipeline will need, in hand before the target is locked.
pub(super) struct Memory {
    plan: SavePlan,
    /// One per GPU; none where no GPU's memory is copied by us.
    rings: Vec<BufferPool>,
    /// For a tree's host memory.
    host: Option<Host>,
    encoders: Vec<Encoder>,
    frame_buffers: BufferPool,
    pack_buffers: BufferPool,
    /// One per run.
    provisions: Vec<Provisions>,
    /// One per GPU, where there may be more than one run.
    witnesses: Vec<Arc<Witness>>,
}

/// What one run over the GPUs uses up, an entry per GPU each.
struct Provisions {
    queues: Vec<CopyQueue>,
    /// With room for the GPU's whole memory.
    tables: Vec<FrameTable>,
}

/// What a tree's host memory goes through: one lane, whose length shows at its end.
struct Host {
    ring: BufferPool,
    expected: u64,
}

/// Chunk buffers that a source needs at least: two for what it has handed over, one for short files, one for a long one.
const SOURCE_CHUNKS_MIN: usize = 4;

/// Bytes that a tree has at most, and by the look of it now.
#[derive(Debug, Clone, Copy)]
pub(super) struct TreeLen {
    pub(super) most: u64,
    pub(super) expected: u64,
}

impl Memory {
    /// Retains the GPUs' contexts (each takes time and GPU memory, so not before the target is known to be one), and allocates what can be used of the plan, for so many
    /// `runs` over the GPUs: no more than their memory `in_use` now can fill, or than all of it can.
    pub(super) fn allocate(
        session: &Session,
        driver: &Arc<Driver>,
        plan: SavePlan,
        runs: usize,
        in_use: bool,
    ) -> Result<Self, Box<dyn Error + Send + Sync>> {
        driver.retain_contexts()?;
        session.check_cancelled()?;
        let used = match in_use {
            true => driver.used_memory_of_all()?,
            false => driver.devices().iter().map(|gpu| gpu.memory_len).collect(),
        };
        let plan = plan.for_memory_in_use(&used);
        let chunk_len = plan.chunk_len;
        let witness = |gpu: &Device| {
            let chunks = gpu.memory_len.div_ceil(chunk_len);
            Arc::new(Witness::new(usize::try_from(chunks).unwrap_or(usize::MAX)))
        };
        let mut memory = Self::buffers(session, plan, Some((driver, runs)), None)?;
        // The same bytes are read twice.
        if runs > 1 {
            memory.witnesses = driver.devices().iter().map(witness).collect();
        }
        Ok(memory)
    }

    /// The same for a whole tree, whose host memory comes last, in a lane of its own. `gpus` are the driver and the number of processes that use it, where their GPUs' memory is copied by us.
    ///
    /// # Errors
    /// Exit 2 or 3, see [`plan_code`]; memory that is not to be had (3); a signal (10).
    pub(super) fn allocate_for_tree(
        session: &Session,
        gpus: Option<(&Arc<Driver>, usize)>,
        tree: TreeLen,
    ) -> Result<Self, Failure> {
        let refused = |cause: Box<dyn Error + Send + Sync>| {
            let code = match cause.is::<Interrupted>() {
                true => ExitCode::RolledBack,
                false => ExitCode::Preflight,
            };
            Failure::new(code, Phase::Prepare, cause)
        };
        let (mut lens, mut used) = (Vec::new(), Vec::new());
        if let Some((driver, _members)) = gpus {
            lens.extend(driver.devices().iter().map(|gpu| gpu.memory_len));
            used = driver
                .retain_contexts()
                .and_then(|()| driver.used_memory_of_all())
                .map_err(|error| refused(error.into()))?;
        }
        lens.push(tree.most);
        used.push(tree.expected);
        let plan = plan_for(&session.config, &lens)?.for_memory_in_use(&used);
        Self::buffers(session, plan, gpus, Some(tree.expected)).map_err(refused)
    }

    fn buffers(
        session: &Session,
        plan: SavePlan,
        gpus: Option<(&Arc<Driver>, usize)>,
        host: Option<u64>,
    ) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let len = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut rings = Vec::new();
        let mut provisions = Vec::new();
        if let Some((driver, runs)) = gpus {
            for device in 0..driver.devices().len() {
                session.check_cancelled()?;
                rings.push(BufferPool::within_limits(
                    plan.ring_chunks,
                    RING_CHUNKS_MIN.min(plan.ring_chunks),
                    len(plan.chunk_len),
                    (driver, device),
                )?);
            }
            let prepared = (0..runs).map(|_| Provisions::prepare(driver, &plan));
            provisions = prepared.collect::<Result<_, _>>()?;
        }
        let host = match host {
            Some(expected) => {
                let count = plan.ring_chunks.max(SOURCE_CHUNKS_MIN);
                let ring = BufferPool::new(count, len(plan.chunk_len), None)?;
                Some(Host { ring, expected })
            }
            None => None,
        };
        let settings = session.config.compression.settings;
        let encoders = Encoder::team(settings, plan.threads as usize, len(plan.chunk_len))?;
        let frame_buffers = BufferPool::new(plan.frame_buffers, plan.frame_len_max, None)?;
        let pack_buffers = BufferPool::new(plan.pack_buffers, len(PACK_LEN), None)?;
        Ok(Self {
            plan,
            rings,
            host,
            encoders,
            frame_buffers,
            pack_buffers,
            provisions,
            witnesses: Vec::new(),
        })
    }

    /// Bytes of host memory that are planned.
    pub(super) fn planned(&self) -> u64 {
        self.plan.total_bytes
    }

    /// One run: the lanes of these extents, each of the process of this index, at most one for each GPU, each to one of these `uploads` in this store, with encoders and resources. `None` when there are no provisions for one more.
    pub(super) fn deal_out<'e>(
        &mut self,
        session: &Session,
        extents: impl IntoIterator<Item = (usize, &'e Extent)>,
        store: Arc<dyn Store>,
        uploads: &[OpenUpload],
    ) -> Option<(Vec<SaveLane>, &mut [Encoder], SaveResources)> {
        let Provisions { queues, tables } = self.provisions.pop()?;
        let mut per_device: Vec<_> = queues.into_iter().zip(tables).map(Some).collect();
        let mut lanes = Vec::new();
        for (member, extent) in extents {
            let taken = per_device.get_mut(extent.device).and_then(Option::take);
            let holds = Holds::Gpu {
                member,
                device: extent.device,
            };
            let open = uploads.iter().find(|open| open.holds == holds);
            let (Some((queue, table)), Some(open)) = (taken, open) else {
                unreachable!("the driver layer gives at most one extent for each of its devices");
            };
            let meter = LaneMeter::new(format!("GPU {}", extent.device), extent.len);
            lanes.push(SaveLane {
                origin: Origin::Gpu {
                    queue,
                    extent: extent.clone(),
                },
                ring: self.rings[extent.device].clone(),
                table,
                key: open.key.clone(),
                upload: open.upload.clone(),
                witness: self.witnesses.get(extent.device).cloned(),
                meter,
            });
        }
        Some(self.run(session, lanes, store))
    }

    /// The run over a tree's host memory, which this source reads, to this upload. `None` where it was not prepared for.
    pub(super) fn deal_out_host(
        &mut self,
        session: &Session,
        source: Box<dyn Source>,
        store: Arc<dyn Store>,
        open: &OpenUpload,
    ) -> Option<(Vec<SaveLane>, &mut [Encoder], SaveResources)> {
        let Host { ring, expected } = self.host.as_ref()?;
        let lane = SaveLane {
            origin: Origin::Source(source),
            ring: ring.clone(),
            table: FrameTable::new(*expected, self.plan.chunk_len),
            key: open.key.clone(),
            upload: open.upload.clone(),
            witness: None,
            meter: LaneMeter::new(HOST, *expected),
        };
        Some(self.run(session, vec![lane], store))
    }

    /// What every run has in common.
    fn run(
        &mut self,
        session: &Session,
        lanes: Vec<SaveLane>,
        store: Arc<dyn Store>,
    ) -> (Vec<SaveLane>, &mut [Encoder], SaveResources) {
        session
            .meter
            .announce(lanes.iter().map(|lane| Arc::clone(&lane.meter)).collect());
        // A run that failed has closed them.
        let rings = self.rings.iter();
        let rings = rings.chain(self.host.as_ref().map(|host| &host.ring));
        for pool in rings.chain([&self.frame_buffers, &self.pack_buffers]) {
            pool.open_again();
        }
        let plan = &self.plan;
        let resources = SaveResources {
            store,
            runtime: session.runtime.clone(),
            chunk_len: plan.chunk_len,
            frame_buffers: self.frame_buffers.clone(),
            part_len: usize::try_from(plan.part_len).unwrap_or(usize::MAX),
            pack_buffers: self.pack_buffers.clone(),
            parallelism: session.config.store.parallelism as usize,
            meter: Arc::clone(&session.meter),
        };
        (lanes, &mut self.encoders, resources)
    }
}

impl Provisions {
    fn prepare(driver: &Arc<Driver>, plan: &SavePlan) -> Result<Self, DriverError> {
        let depth = plan.ring_chunks.min(COPIES_UNDER_WAY);
        let devices = driver.devices();
        let queues =
            (0..devices.len()).map(|device| CopyQueue::prepare(driver, device, depth, STREAMS_OUT));
        let tables = devices.iter();
        let tables = tables.map(|gpu| FrameTable::new(gpu.memory_len, plan.chunk_len));
        Ok(Self {
            queues: queues.collect::<Result<_, _>>()?,
            tables: tables.collect(),
        })
    }
}
