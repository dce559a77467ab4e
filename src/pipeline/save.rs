//! Save: extents → objects. Wires copy threads, compressors, packers and uploads, and joins them all.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, unbounded};
use tokio::sync::mpsc::unbounded_channel;

use super::PipelineError;
use super::abort::Abort;
use super::copy::{CopyLane, RawChunk};
use super::gauge::{Gauge, Wire, settle};
use super::pack::{FrameRecord, PackedFrame, PackedObject, Packer};
use super::transfer::{UploadTarget, Uploader, task_panicked};
use crate::codec::{Crc64, Encoder};
use crate::driver::{BufferPool, CopyQueue, Extent};
use crate::manifest::FrameTable;
use crate::outcome::StageOutcome;
use crate::plan::Chunks;
use crate::progress::{LaneMeter, Meter};
use crate::store::{Key, PartReceipt, Store, UploadId};

/// One extent and the object that it becomes.
#[derive(Debug)]
pub struct SaveLane {
    /// Copies from the extent's GPU; prepared, not bound yet.
    pub queue: CopyQueue,
    /// Where the bytes are.
    pub extent: Extent,
    /// Pinned buffers of one chunk each, for this GPU alone.
    pub ring: BufferPool,
    /// Key of the object.
    pub key: Key,
    /// The multipart upload that was opened under it.
    pub upload: UploadId,
    /// Progress.
    pub meter: Arc<LaneMeter>,
}

/// What all lanes share; everything that has a length was allocated before the target was locked.
#[derive(Debug)]
pub struct SaveResources {
    /// The store.
    pub store: Arc<dyn Store>,
    /// Runs the transfers.
    pub runtime: tokio::runtime::Handle,
    /// One compressor per thread.
    pub encoders: Vec<Encoder>,
    /// Chunk length in bytes.
    pub chunk_len: u64,
    /// Buffers of one frame each, more than there are encoders.
    pub frame_buffers: BufferPool,
    /// Buffers of one part each, at least one per lane.
    pub part_buffers: BufferPool,
    /// Parts in flight at once, at least 1.
    pub parallelism: usize,
    /// Progress.
    pub meter: Arc<Meter>,
}

/// All lanes, uploaded but not landed: the uploads are still to be completed.
#[derive(Debug)]
pub struct Saved {
    /// In the order of the input.
    pub lanes: Vec<SavedLane>,
    /// `copy`, `compress`, `upload`.
    pub stages: Vec<StageOutcome>,
    /// The stage that the others waited for.
    pub slowest_stage: Option<String>,
}

/// One object, as it will be once its upload is completed.
#[derive(Debug)]
pub struct SavedLane {
    /// Key of the object.
    pub key: Key,
    /// Its multipart upload.
    pub upload: UploadId,
    /// The parts, in order.
    pub parts: Vec<PartReceipt>,
    /// Length of the object in bytes.
    pub len: u64,
    /// CRC64NVME over the whole object.
    pub crc64: Crc64,
    /// Its frames.
    pub table: FrameTable,
}

/// Streams every lane to the store.
///
/// # Errors
/// The first [`PipelineError`] of any stage, after all threads and tasks have ended. The uploads are then open still: the caller aborts them.
pub fn save(lanes: Vec<SaveLane>, resources: SaveResources) -> Result<Saved, PipelineError> {
    let mut pools = vec![
        resources.frame_buffers.clone(),
        resources.part_buffers.clone(),
    ];
    pools.extend(lanes.iter().map(|lane| lane.ring.clone()));
    let abort = Arc::new(Abort::new(
        pools,
        tokio_util::sync::CancellationToken::new(),
    ));
    let copy_gauge = Gauge::new("copy", lanes.len());
    let code_gauge = Gauge::new("compress", resources.encoders.len());

    let (parts_out, parts_in) = unbounded_channel();
    let targets: Vec<UploadTarget> = lanes
        .iter()
        .map(|lane| UploadTarget {
            key: lane.key.clone(),
            upload: lane.upload.clone(),
            meter: Arc::clone(&lane.meter),
        })
        .collect();
    let parallelism = resources.parallelism.max(1);
    let spare_parts = resources.part_buffers.count().saturating_sub(lanes.len());
    let wire = Arc::new(Wire::new("upload", parallelism.min(spare_parts)));
    let uploader = Uploader {
        store: Arc::clone(&resources.store),
        targets: targets.clone(),
        parallelism,
        wire: Arc::clone(&wire),
        meter: Arc::clone(&resources.meter),
        abort: Arc::clone(&abort),
    };
    let uploads = resources.runtime.spawn(uploader.run(parts_in));

    let packers: Vec<Mutex<Packer>> = lanes
        .iter()
        .enumerate()
        .map(|(index, lane)| {
            let table = FrameTable::new(lane.extent.len, resources.chunk_len);
            Mutex::new(Packer::new(
                index,
                table,
                resources.part_buffers.clone(),
                parts_out.clone(),
            ))
        })
        .collect();
    drop(parts_out);

    let (chunks_out, chunks_in) = unbounded();
    let compressors = Compressors {
        targets: &targets,
        packers: &packers,
        frame_buffers: &resources.frame_buffers,
        gauge: &code_gauge,
    };
    std::thread::scope(|scope| {
        for (index, lane) in lanes.into_iter().enumerate() {
            let (abort, gauge, chunks_out) = (&*abort, &copy_gauge, chunks_out.clone());
            let chunk_len = resources.chunk_len;
            spawn(scope, format!("copy-{}", lane.extent.device), move || {
                abort.guard("copy", || {
                    let chunks = Chunks::new(lane.extent.len, chunk_len);
                    let copy = CopyLane {
                        lane: index,
                        chunks,
                        chunk_len,
                        ring: &lane.ring,
                        meter: &lane.meter,
                        gauge,
                    };
                    copy.copy_out(lane.queue, lane.extent, &chunks_out)
                });
            });
        }
        drop(chunks_out);
        for (index, encoder) in resources.encoders.into_iter().enumerate() {
            let (abort, compressors, chunks_in) = (&*abort, &compressors, chunks_in.clone());
            spawn(scope, format!("compress-{index}"), move || {
                abort.guard("compress", || compressors.run(encoder, &chunks_in))
            });
        }
        drop(chunks_in);
    });

    // The packers hold the senders: the uploader ends when they are gone.
    let objects: Vec<Option<PackedObject>> = packers
        .into_iter()
        .map(|packer| {
            packer
                .into_inner()
                .unwrap_or_else(PoisonError::into_inner)
                .finish()
        })
        .collect();
    let receipts = resources.runtime.block_on(uploads).unwrap_or_else(|error| {
        abort.fail(task_panicked("upload", error));
        Vec::new()
    });
    abort.result()?;

    let mut saved = Vec::with_capacity(targets.len());
    for ((target, object), parts) in targets.into_iter().zip(objects).zip(receipts) {
        let object = object.ok_or(PipelineError::Cancelled)?;
        saved.push(SavedLane {
            key: target.key,
            upload: target.upload,
            parts,
            len: object.len,
            crc64: object.crc64,
            table: object.table,
        });
    }
    let accounts = vec![copy_gauge.outcome(), code_gauge.outcome(), wire.outcome()];
    let (stages, slowest_stage) = settle(accounts);
    Ok(Saved {
        lanes: saved,
        stages,
        slowest_stage,
    })
}

/// What the compressor threads share.
struct Compressors<'a> {
    targets: &'a [UploadTarget],
    packers: &'a [Mutex<Packer>],
    frame_buffers: &'a BufferPool,
    gauge: &'a Gauge,
}

impl Compressors<'_> {
    /// One thread: takes a frame buffer first and a chunk then, so that the oldest chunk of a lane always has a frame buffer.
    fn run(&self, mut encoder: Encoder, chunks: &Receiver<RawChunk>) -> Result<(), PipelineError> {
        loop {
            let (mut frame, waited) = self
                .frame_buffers
                .acquire()
                .map_err(|_closed| PipelineError::Cancelled)?;
            self.gauge.blocked(waited);
            let idle = Instant::now();
            let Ok(chunk) = chunks.recv() else {
                return Ok(());
            };
            self.gauge.starved(idle.elapsed());
            let target = &self.targets[chunk.lane];
            let started = Instant::now();
            let encoded = encoder.encode(&chunk.buffer[..chunk.len], &mut frame);
            let record = FrameRecord {
                stored_len: u32::try_from(encoded.len).unwrap_or(u32::MAX),
                raw_len: u32::try_from(chunk.len).unwrap_or(u32::MAX),
                kind: encoded.kind,
                digest: encoded.digest,
            };
            let RawChunk {
                lane,
                index,
                buffer,
                len,
            } = chunk;
            drop(buffer);
            target.meter.coded.fetch_add(len as u64, Ordering::Relaxed);
            let encoded_at = Instant::now();
            self.gauge.busy(len as u64, encoded_at - started);
            // Packing counts as work; waiting for the lane's packer, or in it for a part buffer, does not.
            let mut packer = self.packers[lane]
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let packing_at = Instant::now();
            let blocked = packer.push(
                index,
                PackedFrame {
                    buffer: frame,
                    record,
                },
            )?;
            drop(packer);
            self.gauge.blocked(blocked + (packing_at - encoded_at));
            self.gauge
                .busy(0, packing_at.elapsed().saturating_sub(blocked));
        }
    }
}

/// Spawns a named thread; a thread that cannot be had is a panic of the whole run, caught by the caller's guard.
pub(super) fn spawn<'scope>(
    scope: &'scope std::thread::Scope<'scope, '_>,
    name: String,
    work: impl FnOnce() + Send + 'scope,
) {
    let spawned = std::thread::Builder::new()
        .name(name)
        .spawn_scoped(scope, work);
    if let Err(error) = spawned {
        panic!("cannot start a thread: {error}");
    }
}

/// The sending half of a channel of chunks.
pub(super) type ChunkSender = Sender<RawChunk>;
