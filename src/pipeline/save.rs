//! Save: extents, and bytes from elsewhere, → objects. Wires copy threads, compressors, packers and uploads, and joins them all.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tracing::Instrument;

use super::PipelineError;
use super::abort::Abort;
use super::copy::{CopyLane, RawChunk};
use super::effort::Pacer;
use super::gauge::{Gauge, slowest, watch_pools};
use super::haste::Haste;
use super::lend::Lender;
use super::pack::{
    FrameBytes, FrameRecord, PackedFrame, PackedObject, Packer, Packing, PartJob, SharedPacker,
};
use super::source::{Source, SourceOut};
use super::stage::spawn;
use super::transfer::{UploadTarget, Uploader, task_panicked};
use super::witness::Witness;
use crate::codec::{Body, Crc64, Encoded, Encoder};
use crate::cpu_time;
use crate::driver::{BufferPool, CopyQueue, Extent, PoolBuf};
use crate::failpoint;
use crate::manifest::FrameTable;
use crate::outcome::StageOutcome;
use crate::plan::Chunks;
use crate::progress::{LaneMeter, Meter};
use crate::store::{Key, PartReceipt, Store, UploadId, crc64_of_parts};

/// Where a lane's bytes come from.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "there are few lanes, and a box would be allocated after BEGIN"
)]
pub enum Origin {
    /// An extent of a GPU.
    Gpu {
        /// Copies from it; prepared, not bound yet.
        queue: CopyQueue,
        /// Where the bytes are.
        extent: Extent,
    },
    /// Somewhere else; how many there are is known at their end.
    Source(Box<dyn Source>),
}

/// Bytes and the object that they become.
#[derive(Debug)]
pub struct SaveLane {
    /// The bytes.
    pub origin: Origin,
    /// Buffers of one chunk each, for this lane alone; pinned for its GPU.
    pub ring: BufferPool,
    /// Without frames yet, of the resources' chunk length, and with room for the GPU's whole memory: [`FrameTable::new`] made it before the target was locked.
    pub table: FrameTable,
    /// Key of the object.
    pub key: Key,
    /// The multipart upload that was opened under it.
    pub upload: UploadId,
    /// What its chunks were in an earlier run, where there may be more than one.
    pub witness: Option<Arc<Witness>>,
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
    /// Chunk length in bytes.
    pub chunk_len: u64,
    /// Buffers of one frame each, more than there are compressors.
    pub frame_buffers: BufferPool,
    /// Bytes of every part but an object's last.
    pub part_len: usize,
    /// Buffers for what is copied into parts: enough for one part per lane and one more.
    pub pack_buffers: BufferPool,
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

/// Chunks that wait for each compressor. Copying further ahead would gain nothing and fill one cold buffer after the other, where few that go round stay in the processor's cache.
const CHUNKS_READY: usize = 2;

/// Streams every lane to the store, with one compressor thread per encoder, of which there is at least one.
///
/// # Errors
/// The first [`PipelineError`] of any stage, after all threads and tasks have ended. The uploads are then open still: the caller aborts them. The buffer pools are closed.
pub fn save(
    lanes: Vec<SaveLane>,
    encoders: &mut [Encoder],
    resources: SaveResources,
) -> Result<Saved, PipelineError> {
    let mut pools = vec![
        resources.frame_buffers.clone(),
        resources.pack_buffers.clone(),
    ];
    pools.extend(lanes.iter().map(|lane| lane.ring.clone()));
    let abort = Arc::new(Abort::new(
        pools,
        tokio_util::sync::CancellationToken::new(),
    ));
    let meter = Arc::clone(&resources.meter);
    let copy_gauge = Gauge::new("copy", lanes.len()).recorded(&meter);
    let code_gauge = Gauge::new("compress", encoders.len()).recorded(&meter);
    let ring_chunks = lanes
        .iter()
        .map(|lane| lane.ring.count() as u64)
        .sum::<u64>();
    let ring_bytes = ring_chunks.saturating_mul(resources.chunk_len);
    let rings = lanes.iter().map(|lane| {
        let name = format!("ring of {}", lane.meter.label);
        (name, lane.ring.clone())
    });
    let frames = ("frames".to_owned(), resources.frame_buffers.clone());
    let parts = ("parts".to_owned(), resources.pack_buffers.clone());
    let _watched = watch_pools(&meter, rings.chain([frames, parts]));

    let (parts_out, parts_in) = unbounded_channel();
    let work = Work::divide(lanes, encoders.len(), &resources, &parts_out);
    drop(parts_out);
    let uploader = Uploader::new(&resources, work.targets.clone(), work.lent_bytes, &abort);
    let wire = Arc::clone(&uploader.wire);
    let uploads = resources
        .runtime
        .spawn(uploader.run(parts_in).in_current_span());

    let pacer = Arc::new(Pacer::new(ring_bytes));
    let haste = Haste::new(&work.targets, &meter);
    let _watched_too = pacer.watched(&meter);
    let compressors = Compressors {
        targets: &work.targets,
        witnesses: &work.witnesses,
        packers: &work.packers,
        frame_buffers: &resources.frame_buffers,
        gauge: &code_gauge,
        pacer: &pacer,
        haste: &haste,
    };
    let (chunks_out, chunks_in) = bounded(CHUNKS_READY * encoders.len());
    std::thread::scope(|scope| {
        for copier in work.copiers {
            let (abort, gauge, chunks_out) = (&*abort, &copy_gauge, chunks_out.clone());
            let (packer, chunk_len) = (&work.packers[copier.lane], resources.chunk_len);
            spawn(scope, abort, ("copy", copier.number()), move || {
                copier.run(chunk_len, gauge, packer, (&chunks_out, abort))
            });
        }
        drop(chunks_out);
        for (index, encoder) in encoders.iter_mut().enumerate() {
            let (abort, compressors, chunks_in) = (&*abort, &compressors, chunks_in.clone());
            spawn(scope, abort, ("compress", index), move || {
                compressors.run(encoder, &chunks_in)
            });
        }
        drop(chunks_in);
    });

    // The packers hold the senders: the uploader ends when they are gone.
    let objects: Vec<_> = work.packers.into_iter().map(SharedPacker::finish).collect();
    let receipts = resources.runtime.block_on(uploads).unwrap_or_else(|error| {
        abort.fail(task_panicked("upload", error));
        Vec::new()
    });
    abort.result()?;

    let stages = vec![copy_gauge.outcome(), code_gauge.outcome(), wire.outcome()];
    let slowest_stage = slowest(&stages);
    Ok(Saved {
        lanes: put_together(work.targets, objects, receipts)?,
        stages,
        slowest_stage,
    })
}

/// The lanes, taken apart for the stages. All in the order of the lanes.
struct Work {
    copiers: Vec<Copier>,
    packers: Vec<SharedPacker>,
    targets: Vec<UploadTarget>,
    witnesses: Vec<Option<Arc<Witness>>>,
    /// Bytes that parts hold without pack buffers, at least, when all loans are out.
    lent_bytes: usize,
}

impl Work {
    fn divide(
        lanes: Vec<SaveLane>,
        compressors: usize,
        resources: &SaveResources,
        parts: &UnboundedSender<PartJob>,
    ) -> Self {
        // Every compressor has a frame buffer before it takes a chunk, and one more moves.
        let frames = Lender::new(&resources.frame_buffers, compressors + 1);
        let chunk_len = usize::try_from(resources.chunk_len).unwrap_or(usize::MAX);
        let mut ring_loans = 0;
        let mut work = Self {
            copiers: Vec::with_capacity(lanes.len()),
            packers: Vec::with_capacity(lanes.len()),
            targets: Vec::with_capacity(lanes.len()),
            witnesses: Vec::with_capacity(lanes.len()),
            lent_bytes: 0,
        };
        for (index, lane) in lanes.into_iter().enumerate() {
            let table = match &lane.origin {
                Origin::Gpu { extent, .. } => lane.table.for_extent(extent.len),
                Origin::Source(_) => lane.table.open_ended(),
            };
            let held = match &lane.origin {
                Origin::Gpu { .. } => 0,
                Origin::Source(source) => source.holds(lane.ring.count()),
            };
            let packing = Packing::of(resources, &frames, &lane.ring, held);
            ring_loans += packing.ring.limit();
            let packer = Packer::new(index, table, packing, parts.clone());
            work.packers.push(SharedPacker::new(packer));
            work.targets.push(UploadTarget {
                key: lane.key,
                upload: lane.upload,
                meter: Arc::clone(&lane.meter),
            });
            work.witnesses.push(lane.witness);
            work.copiers.push(Copier {
                lane: index,
                origin: lane.origin,
                ring: lane.ring,
                meter: lane.meter,
            });
        }
        work.lent_bytes = ring_loans.min(frames.limit()).saturating_mul(chunk_len);
        work
    }
}

/// What one copy thread owns.
struct Copier {
    lane: usize,
    origin: Origin,
    ring: BufferPool,
    meter: Arc<LaneMeter>,
}

impl Copier {
    fn run(
        self,
        chunk_len: u64,
        gauge: &Gauge,
        packer: &SharedPacker,
        (out, abort): (&Sender<RawChunk>, &Abort),
    ) -> Result<(), PipelineError> {
        match self.origin {
            Origin::Gpu { queue, extent } => {
                let copy = CopyLane {
                    lane: self.lane,
                    chunks: Chunks::new(extent.len, chunk_len),
                    chunk_len,
                    ring: &self.ring,
                    meter: &self.meter,
                    gauge,
                };
                copy.copy_out(queue, extent, out)
            }
            Origin::Source(source) => {
                let (ring, meter) = (&self.ring, &self.meter);
                let mut out = SourceOut::new(self.lane, (ring, meter, gauge), (out, abort));
                packer.ends_at(source.run(&mut out)?)
            }
        }
    }

    /// Names its thread.
    fn number(&self) -> usize {
        match &self.origin {
            Origin::Gpu { extent, .. } => extent.device,
            Origin::Source(_) => self.lane,
        }
    }
}

fn put_together(
    targets: Vec<UploadTarget>,
    objects: Vec<Option<PackedObject>>,
    receipts: Vec<Vec<PartReceipt>>,
) -> Result<Vec<SavedLane>, PipelineError> {
    let lanes = targets.into_iter().zip(objects).zip(receipts);
    let lanes = lanes.map(|((target, object), parts)| {
        let object = object.ok_or(PipelineError::Cancelled)?;
        let crc64 = crc64_of_parts(&parts);
        Ok(SavedLane {
            key: target.key,
            upload: target.upload,
            parts,
            len: object.len,
            crc64,
            table: object.table,
        })
    });
    lanes.collect()
}

/// What the compressor threads share.
struct Compressors<'a> {
    targets: &'a [UploadTarget],
    witnesses: &'a [Option<Arc<Witness>>],
    packers: &'a [SharedPacker],
    frame_buffers: &'a BufferPool,
    gauge: &'a Gauge,
    pacer: &'a Pacer,
    haste: &'a Haste<'a>,
}

impl Compressors<'_> {
    /// One thread: takes a frame buffer first and a chunk then, so that the oldest chunk of a lane always has a frame buffer.
    fn run(&self, encoder: &mut Encoder, chunks: &Receiver<RawChunk>) -> Result<(), PipelineError> {
        let mut spare = None;
        // Time without work since the last chunk.
        let mut idle = Duration::ZERO;
        loop {
            let mut frame = match spare.take() {
                Some(frame) => frame,
                None => {
                    let (frame, waited) = self
                        .frame_buffers
                        .acquire()
                        .map_err(|_closed| PipelineError::Cancelled)?;
                    self.gauge.blocked(waited);
                    idle += waited;
                    frame
                }
            };
            let waiting = Instant::now();
            let Ok(chunk) = chunks.recv() else {
                return Ok(());
            };
            let waited = waiting.elapsed();
            self.gauge.starved(waited);
            idle += waited;

            let (lane, index, len) = (chunk.lane, chunk.index, chunk.len);
            let (started, cpu_before) = (Instant::now(), cpu_time::of_thread());
            let encoded = encoder.encode(&chunk.buffer[..len], &mut frame, self.pacer.effort());
            self.must_be_still(lane, index, &encoded)?;
            failpoint::pass("stream:chunk coded");
            let busy = started.elapsed();
            let coding = encoded.kind.name(encoded.filter);
            self.gauge.busy_as(lane, coding, len as u64, busy);
            let computing = cpu_time::of_thread().saturating_sub(cpu_before);
            let stored = || self.acknowledged();
            let lens = (len as u64, encoded.len() as u64);
            self.pacer.note(lens, idle, busy, computing, stored);
            let meter = &self.targets[lane].meter;
            meter.coded.fetch_add(len as u64, Ordering::Relaxed);
            if self.haste.is_needed() {
                encoder.hurry();
            }

            let (packed, left) = in_buffers(chunk, frame, &encoded);
            spare = left;
            idle = self.pack(lane, index, packed)?;
            failpoint::pass("stream:chunk packed");
        }
    }

    fn must_be_still(
        &self,
        lane: usize,
        index: u64,
        encoded: &Encoded,
    ) -> Result<(), PipelineError> {
        match &self.witnesses[lane] {
            Some(witness) if !witness.is_the_same(index, encoded.digest) => {
                Err(PipelineError::NotStill {
                    key: self.targets[lane].key.to_string(),
                    chunk: index,
                })
            }
            _ => Ok(()),
        }
    }

    /// Packing counts as work; waiting for a pack buffer does not. Says how long that was.
    fn pack(&self, lane: usize, index: u64, frame: PackedFrame) -> Result<Duration, PipelineError> {
        let started = Instant::now();
        let blocked = self.packers[lane].push(index, frame)?;
        self.gauge.blocked(blocked);
        let packing = started.elapsed().saturating_sub(blocked);
        self.gauge.busy(0, packing);
        Ok(blocked)
    }

    /// Bytes that the store has acknowledged.
    fn acknowledged(&self) -> u64 {
        let stored = |target: &UploadTarget| target.meter.stored.load(Ordering::Relaxed);
        self.targets.iter().map(stored).sum()
    }
}

/// The frame in the buffer that holds it, and the frame buffer if that is left. A raw frame stays in the ring, any other leaves it at once.
fn in_buffers(
    chunk: RawChunk,
    frame: PoolBuf,
    encoded: &Encoded,
) -> (PackedFrame, Option<PoolBuf>) {
    let record = FrameRecord {
        stored_len: u32::try_from(encoded.len()).unwrap_or(u32::MAX),
        raw_len: u32::try_from(chunk.len).unwrap_or(u32::MAX),
        kind: encoded.kind,
        filter: encoded.filter,
        digest: encoded.digest,
    };
    let (bytes, left) = match encoded.body {
        Body::Written { .. } => (FrameBytes::Written(frame), None),
        Body::Raw { checksum } => {
            let chunk = chunk.buffer;
            (FrameBytes::Raw { chunk, checksum }, Some(frame))
        }
    };
    let packed = PackedFrame {
        bytes,
        crc64: encoded.crc64,
        record,
    };
    (packed, left)
}

#[cfg(test)]
mod tests;
