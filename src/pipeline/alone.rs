//! The copy stage with nothing behind it, for `ckptstream bench`: what the GPU's copy engine and the ring can do by themselves.
//!
//! In: lanes. Out: every chunk was copied, its buffer given back at once. What can fail: the driver. It is the very copy thread of a save and a restore.

use std::sync::Arc;

use crossbeam_channel::{bounded, unbounded};
use tokio_util::sync::CancellationToken;

use super::PipelineError;
use super::abort::Abort;
use super::copy::{CopyLane, RawChunk, VerifiedChunk};
use super::gauge::Gauge;
use super::stage::spawn;
use crate::driver::{BufferPool, CopyQueue, Extent, HostMemory, PoolBuf, PoolSlice};
use crate::plan::Chunks;
use crate::progress::LaneMeter;

/// One GPU's memory and the ring beside it.
#[derive(Debug)]
pub struct AloneLane<B: HostMemory> {
    /// Copies from and to the extent's GPU; prepared, not bound yet.
    pub queue: CopyQueue<B>,
    /// The memory.
    pub extent: Extent,
    /// Pinned buffers of one chunk each.
    pub ring: BufferPool,
    /// Chunk length in bytes.
    pub chunk_len: u64,
}

impl<B: HostMemory> AloneLane<B> {
    fn chunks(&self) -> Chunks {
        Chunks::new(self.extent.len, self.chunk_len)
    }
}

/// Copies every lane out of its GPU, all at once.
///
/// # Errors
/// The first [`PipelineError`] of any lane.
pub fn copy_out_alone(lanes: Vec<AloneLane<PoolBuf>>) -> Result<(), PipelineError> {
    each_lane(lanes, |lane, abort, index, gauge, meter| {
        let (out, chunks) = unbounded();
        std::thread::scope(|scope| {
            spawn(scope, abort, ("drain", index), move || {
                chunks.iter().for_each(|chunk: RawChunk| drop(chunk.buffer));
                Ok(())
            });
            let copy = CopyLane {
                lane: index,
                chunks: lane.chunks(),
                chunk_len: lane.chunk_len,
                ring: &lane.ring,
                meter,
                gauge,
            };
            // An error must end the drain here: the scope waits for it.
            abort.guard("copy", || {
                let out = out;
                copy.copy_out(lane.queue, lane.extent.clone(), &out)
            });
        });
        Ok(())
    })
}

/// Copies onto every GPU, all at once: whatever its ring holds.
///
/// # Errors
/// The first [`PipelineError`] of any lane.
pub fn copy_in_alone(lanes: Vec<AloneLane<PoolSlice>>) -> Result<(), PipelineError> {
    each_lane(lanes, |lane, abort, index, gauge, meter| {
        let (chunks_out, chunks_in) = unbounded();
        let (primed_out, _primed) = bounded(1);
        let (extent_out, extent_in) = bounded(1);
        let chunks = lane.chunks();
        // The copy thread takes its extent from here.
        let _it_listens = extent_out.send(lane.extent.clone());
        let ring = &lane.ring;
        std::thread::scope(|scope| {
            spawn(scope, abort, ("feed", index), move || {
                for index_in_extent in 0..chunks.count() {
                    let (buffer, _waited) =
                        ring.acquire().map_err(|_closed| PipelineError::Cancelled)?;
                    let range = chunks.range(index_in_extent);
                    let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
                    let chunk = VerifiedChunk {
                        index: index_in_extent,
                        bytes: PoolSlice::new(Arc::new(buffer), 0..len),
                    };
                    chunks_out
                        .send(chunk)
                        .map_err(|_closed| PipelineError::Cancelled)?;
                }
                Ok(())
            });
            let copy = CopyLane {
                lane: index,
                chunks,
                chunk_len: lane.chunk_len,
                ring,
                meter,
                gauge,
            };
            // An error must end the feed here: the scope waits for it.
            abort.guard("copy", || {
                copy.copy_in(lane.queue, &chunks_in, 1, &primed_out, &extent_in)
            });
        });
        Ok(())
    })
}

/// Runs `work` in a thread per lane.
fn each_lane<B: HostMemory + Send>(
    lanes: Vec<AloneLane<B>>,
    work: impl Fn(AloneLane<B>, &Abort, usize, &Gauge, &LaneMeter) -> Result<(), PipelineError> + Sync,
) -> Result<(), PipelineError> {
    let pools = lanes.iter().map(|lane| lane.ring.clone()).collect();
    let abort = Arc::new(Abort::new(pools, CancellationToken::new()));
    let gauge = Gauge::new("copy", lanes.len());
    let work = &work;
    std::thread::scope(|scope| {
        for (index, lane) in lanes.into_iter().enumerate() {
            let (abort, gauge) = (&*abort, &gauge);
            let meter = LaneMeter::new("GPU", lane.extent.len);
            spawn(scope, abort, ("copy", index), move || {
                work(lane, abort, index, gauge, &meter)
            });
        }
    });
    abort.result()
}
