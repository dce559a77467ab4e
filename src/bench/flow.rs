//! The bench's side of codec and pipeline: whole saves and loads, with the plans and budgets of real ones, and frames one by one.
//!
//! In: GPU memory, a place in a store, the configuration. Out: what a run took, and what it left in the store. What can fail: a plan that does not fit, memory, the pipeline.
//! Everything that the bench calls of `codec`, `plan` and `pipeline` stands in this file, except the digest and the checksum.

use std::sync::Arc;

use super::BenchError;
use super::device::Gpus;
use super::measure::{Took, timed};
use super::place::Place;
use crate::codec::frame::write_raw;
use crate::codec::{
    Body, Decoder, Digest, Effort, Encoded, Encoder, Filter, Settings, frame_bound,
};
use crate::config::Config;
use crate::driver::{BufferPool, CopyQueue, Extent, HostMemory, STREAMS_IN, STREAMS_OUT};
use crate::manifest::FrameTable;
use crate::outcome::StageOutcome;
use crate::pipeline::{
    AloneLane, Destination, LoadLane, LoadResources, Origin, PipelineError, SaveLane,
    SaveResources, copy_in_alone, copy_out_alone, load, save,
};
use crate::plan::{
    self, LoadSettings, PACK_LEN, SavePlan, SaveSettings, fetch_buffer_len, plan_load, plan_save,
};
use crate::progress::LaneMeter;
use crate::store::memory::MemoryStore;
use crate::store::{Key, Store};

/// Makes encoders and decoders as a save and a load make them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Coder {
    settings: Settings,
    effort: Effort,
}

/// An encoder and the buffer that it writes to.
pub(super) struct FrameEncoder {
    encoder: Encoder,
    effort: Effort,
    out: Vec<u8>,
}

/// A decoder and the buffer that it writes to.
pub(super) struct FrameDecoder {
    decoder: Decoder,
    out: Vec<u8>,
}

/// A frame and what decoding it takes.
#[derive(Debug)]
pub(super) struct Frame {
    bytes: Vec<u8>,
    filter: Filter,
    digest: Digest,
}

/// A buffer whose pages are there.
fn touched(len: usize) -> Vec<u8> {
    vec![0xA5; len]
}

impl Coder {
    /// A coder of the configured mode; in mode auto it tries as hard as `effort` says.
    pub(super) fn new(config: &Config, effort: Effort) -> Self {
        Self {
            settings: config.compression.settings,
            effort,
        }
    }

    pub(super) fn encoder(self, chunk_len: usize) -> Result<FrameEncoder, BenchError> {
        Ok(FrameEncoder {
            encoder: Encoder::team(self.settings, 1, chunk_len)?.swap_remove(0),
            effort: self.effort,
            out: touched(frame_bound(chunk_len)),
        })
    }

    pub(super) fn decoder(self, chunk_len: usize) -> Result<FrameDecoder, BenchError> {
        Ok(FrameDecoder {
            decoder: Decoder::new()?,
            out: touched(chunk_len),
        })
    }

    /// Lengths of the frames of a tile.
    pub(super) fn stored_lens(
        self,
        tile: &[u8],
        chunk_len: usize,
    ) -> Result<impl Iterator<Item = usize>, BenchError> {
        let mut encoder = self.encoder(chunk_len)?;
        let chunks = tile.chunks(chunk_len);
        Ok(chunks.map(move |chunk| encoder.frame(chunk).len()))
    }

    /// The frames of a tile.
    pub(super) fn frames(self, tile: &[u8], chunk_len: usize) -> Result<Vec<Frame>, BenchError> {
        let mut encoder = self.encoder(chunk_len)?;
        let frames = tile.chunks(chunk_len).map(|chunk| {
            let encoded = encoder.frame(chunk);
            let len = match encoded.body {
                Body::Written { len } => len,
                Body::Raw { checksum } => write_raw(chunk, checksum, &mut encoder.out),
            };
            Frame {
                bytes: encoder.out[..len].to_vec(),
                filter: encoded.filter,
                digest: encoded.digest,
            }
        });
        Ok(frames.collect())
    }
}

impl FrameEncoder {
    /// The chunk's frame, in `out` unless it is raw.
    pub(super) fn frame(&mut self, chunk: &[u8]) -> Encoded {
        self.encoder.encode(chunk, &mut self.out, self.effort)
    }
}

impl FrameDecoder {
    pub(super) fn chunk(&mut self, frame: &Frame, raw_len: usize) -> Result<(), BenchError> {
        let raw = &mut self.out[..raw_len];
        Ok(self
            .decoder
            .decode(&frame.bytes, frame.filter, frame.digest, raw)?)
    }
}

impl Frame {
    pub(super) fn stored_len(&self) -> u64 {
        self.bytes.len() as u64
    }
}

/// What a save takes on this node, by its GPUs' total memory.
pub(super) fn save_plan(config: &Config, gpu_memory: &[u64]) -> Result<SavePlan, BenchError> {
    let settings = SaveSettings {
        part_size: config.store.part_size,
        limits: config.store.limits,
        chunk_size: config.pipeline.chunk_size,
        memory_budget: config.pipeline.memory_budget,
        budget_is_set: config.pipeline.memory_budget_is_set,
        threads: config.pipeline.threads,
        parallelism: config.store.parallelism,
        context_bytes: config.compression.settings.context_bytes(),
    };
    Ok(plan_save(gpu_memory, &settings)?)
}

/// One run through the pipeline.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) took: Took,
    /// Wall seconds for buffers and contexts, before the run.
    pub(super) prepare_seconds: f64,
    pub(super) stored: u64,
    pub(super) stages: Vec<StageOutcome>,
    pub(super) slowest_stage: Option<String>,
    pub(super) memory_planned: u64,
}

/// An object in the store and its frames.
#[derive(Debug)]
pub(super) struct StoredLane {
    key: Key,
    table: FrameTable,
}

/// The surroundings of every run.
#[derive(Debug)]
pub(super) struct Flow<'a> {
    pub(super) config: &'a Config,
    pub(super) runtime: &'a tokio::runtime::Handle,
    pub(super) meter: &'a Arc<crate::progress::Meter>,
    pub(super) cancel: &'a tokio_util::sync::CancellationToken,
    pub(super) gpus: &'a Gpus,
    pub(super) plan: &'a SavePlan,
}

impl Flow<'_> {
    /// Saves every extent into `store` under these keys; the uploads are completed.
    fn save(
        &self,
        store: &Arc<dyn Store>,
        extents: Vec<Extent>,
        keys: &[Key],
    ) -> Result<(Run, Vec<StoredLane>), BenchError> {
        let (plan, driver) = (self.plan, self.gpus.driver());
        let len = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let ((lanes, mut encoders, resources), prepared) = timed(|| {
            let mut lanes = Vec::new();
            for ((extent, key), memory_len) in
                extents.into_iter().zip(keys).zip(self.gpus.memory_lens())
            {
                let upload = self.runtime.block_on(store.begin_upload(key))?;
                let queue =
                    CopyQueue::prepare(driver, extent.device, plan.ring_chunks, STREAMS_OUT)?;
                lanes.push(SaveLane {
                    ring: BufferPool::new(
                        plan.ring_chunks,
                        len(plan.chunk_len),
                        Some((driver, extent.device)),
                    )?,
                    table: FrameTable::new(memory_len, plan.chunk_len),
                    key: key.clone(),
                    upload,
                    witness: None,
                    meter: LaneMeter::new(format!("GPU {}", extent.device), extent.len),
                    origin: Origin::Gpu { queue, extent },
                });
            }
            let settings = self.config.compression.settings;
            let encoders: Vec<Encoder> =
                Encoder::team(settings, plan.threads as usize, len(plan.chunk_len))?;
            let resources = SaveResources {
                store: Arc::clone(store),
                runtime: self.runtime.clone(),
                chunk_len: plan.chunk_len,
                frame_buffers: BufferPool::new(plan.frame_buffers, plan.frame_len_max, None)?,
                part_len: len(plan.part_len),
                pack_buffers: BufferPool::new(plan.pack_buffers, len(PACK_LEN), None)?,
                parallelism: self.config.store.parallelism as usize,
                meter: Arc::clone(self.meter),
            };
            Ok::<_, BenchError>((lanes, encoders, resources))
        })?;
        let (saved, took) = timed(|| {
            let saved = save(lanes, &mut encoders, resources)?;
            let completed = saved.lanes.iter().map(|lane| {
                let crc64 = lane.crc64.value();
                store.complete_upload(&lane.key, &lane.upload, &lane.parts, lane.len, crc64)
            });
            self.runtime
                .block_on(futures::future::try_join_all(completed))?;
            Ok::<_, BenchError>(saved)
        })?;
        let run = Run {
            took,
            prepare_seconds: prepared.seconds,
            stored: saved.lanes.iter().map(|lane| lane.len).sum(),
            stages: saved.stages,
            slowest_stage: saved.slowest_stage,
            memory_planned: plan.total_bytes,
        };
        let lanes = saved.lanes.into_iter().map(|lane| StoredLane {
            key: lane.key,
            table: lane.table,
        });
        Ok((run, lanes.collect()))
    }

    /// One whole save of all GPUs.
    pub(super) fn out(&self, place: &Place) -> Result<(Run, Vec<StoredLane>), BenchError> {
        let extents = self.gpus.extents();
        let keys = extents
            .iter()
            .map(|extent| place.key(&format!("gpu-{}.zst", extent.device)))
            .collect::<Result<Vec<_>, _>>()?;
        self.save(&place.store, extents, &keys)
    }

    /// Objects in a store of no cost that hold what all GPUs hold: the first `tile_len` bytes are saved into memory, and served over and over.
    pub(super) fn served(
        &self,
        place: &Place,
        tile_len: u64,
    ) -> Result<Vec<StoredLane>, BenchError> {
        let mut first: Vec<Extent> = self.gpus.extents().into_iter().take(1).collect();
        let times = usize::try_from(first[0].len / tile_len).unwrap_or(1);
        first[0].len = tile_len;
        let memory = Arc::new(MemoryStore::new());
        let store: Arc<dyn Store> = Arc::clone(&memory) as Arc<dyn Store>;
        let key = place.key("tile.zst")?;
        let (run, mut saved) = self.save(&store, first, std::slice::from_ref(&key))?;
        let table = saved.remove(0).table;
        let object = self
            .runtime
            .block_on(memory.get(&key, usize::try_from(run.stored).unwrap_or(usize::MAX)))?;
        let frames_len: u64 = table.stored.iter().map(|len| u64::from(*len)).sum();
        // Behind the frames lies the seek table, which no load reads.
        let frames = object
            .unwrap_or_default()
            .slice(..usize::try_from(frames_len).unwrap_or(0));
        let repeated = repeated(&table, times);
        self.gpus
            .extents()
            .iter()
            .map(|extent| {
                let key = place.key(&format!("served-{}.zst", extent.device))?;
                place.serve(&key, frames.clone(), frames_len * times as u64);
                let table = repeated.clone();
                Ok(StoredLane { key, table })
            })
            .collect()
    }

    /// One whole load of these objects into the GPUs.
    pub(super) fn back(
        &self,
        store: &Arc<dyn Store>,
        stored: &[StoredLane],
    ) -> Result<Run, BenchError> {
        let driver = self.gpus.driver();
        let extents = self.gpus.extents();
        let chunk_len = self.plan.chunk_len;
        let settings = LoadSettings {
            memory_budget: self.config.pipeline.memory_budget,
            budget_is_set: self.config.pipeline.memory_budget_is_set,
            threads: self.config.pipeline.threads,
            parallelism: self.config.store.parallelism,
        };
        let shapes: Vec<plan::LoadLane> = stored
            .iter()
            .map(|lane| plan::LoadLane {
                raw_len: lane.table.raw_len,
                chunk_len,
                frame_len_max: lane.table.frame_len_max(),
                frames_len: lane.table.stored.iter().map(|len| u64::from(*len)).sum(),
            })
            .collect();
        let plan = plan_load(&shapes, &settings)?;
        let len = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let ((lanes, queues, resources), prepared) = timed(|| {
            let mut lanes = Vec::new();
            let mut queues = Vec::new();
            for (lane, extent) in stored.iter().zip(&extents) {
                queues.push(CopyQueue::prepare(
                    driver,
                    extent.device,
                    plan.ring_chunks,
                    STREAMS_IN,
                )?);
                lanes.push(LoadLane {
                    key: lane.key.clone(),
                    etag: None,
                    table: &lane.table,
                    raw_len: lane.table.raw_len,
                    chunk_len,
                    ring: BufferPool::new(
                        plan.ring_chunks,
                        len(chunk_len),
                        Some((driver, extent.device)),
                    )?,
                    meter: LaneMeter::new(format!("GPU {}", extent.device), lane.table.raw_len),
                });
            }
            let resources = LoadResources {
                patience: std::time::Duration::ZERO,
                store: Arc::clone(store),
                runtime: self.runtime.clone(),
                decoders: (0..plan.threads)
                    .map(|_| Decoder::new())
                    .collect::<Result<_, _>>()?,
                fetch_buffers: BufferPool::new(
                    plan.fetch_buffers,
                    len(fetch_buffer_len(plan.fetch_len_max)),
                    Some((driver, extents[0].device)),
                )?,
                fetch_len_max: plan.fetch_len_max,
                meter: Arc::clone(self.meter),
                cancel: self.cancel.clone(),
            };
            Ok::<_, BenchError>((lanes, queues, resources))
        })?;
        let destination = Destination::Gpus {
            queues,
            begin: Box::new(move || Ok(extents)),
        };
        let (loaded, took) = timed(|| load(&lanes, resources, destination))?;
        Ok(Run {
            took,
            prepare_seconds: prepared.seconds,
            stored: stored
                .iter()
                .flat_map(|lane| &lane.table.stored)
                .map(|len| u64::from(*len))
                .sum(),
            stages: loaded.stages,
            slowest_stage: loaded.slowest_stage,
            memory_planned: plan.total_bytes,
        })
    }

    /// The copy stage alone, out or in, with the ring that a save has.
    pub(super) fn copy_alone(
        &self,
        direction: super::device::Direction,
    ) -> Result<Took, BenchError> {
        let ((), took) = match direction {
            super::device::Direction::Out => {
                let lanes = self.alone(STREAMS_OUT)?;
                timed(|| copy_out_alone(lanes))
            }
            super::device::Direction::In => {
                let lanes = self.alone(STREAMS_IN)?;
                timed(|| copy_in_alone(lanes))
            }
        }
        .map_err(|error: PipelineError| BenchError::from(error))?;
        Ok(took)
    }

    /// The rings and queues of a run.
    fn alone<B: HostMemory>(&self, streams: usize) -> Result<Vec<AloneLane<B>>, BenchError> {
        let (plan, driver) = (self.plan, self.gpus.driver());
        let chunk_len = usize::try_from(plan.chunk_len).unwrap_or(usize::MAX);
        let extents = self.gpus.extents().into_iter();
        extents
            .map(|extent| {
                let beside = Some((driver, extent.device));
                Ok(AloneLane {
                    queue: CopyQueue::prepare(driver, extent.device, plan.ring_chunks, streams)?,
                    ring: BufferPool::new(plan.ring_chunks, chunk_len, beside)?,
                    chunk_len: plan.chunk_len,
                    extent,
                })
            })
            .collect()
    }
}

/// The table of an object that repeats another one's frames; all its chunks are whole.
fn repeated(table: &FrameTable, times: usize) -> FrameTable {
    FrameTable {
        raw_len: table.raw_len * times as u64,
        chunk_len: table.chunk_len,
        filters: table.filters.repeat(times),
        stored: table.stored.repeat(times),
        kinds: table.kinds.repeat(times),
        digests: table.digests.repeat(times),
    }
}
