//! Device ↔ ring, one OS thread per GPU, stream-ordered.
//!
//! Out: chunk after chunk of an extent is enqueued as long as a ring buffer is free, the oldest copy is waited for, and its buffer goes to the compressors. Back: verified chunks
//! arrive in any order, are enqueued at their place, and their buffers return to the ring once the copy has happened. What can fail: the driver; a closed ring.

use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};

use super::PipelineError;
use super::gauge::Gauge;
use crate::driver::{BufferPool, CopyQueue, Extent, PoolBuf};
use crate::plan::Chunks;
use crate::progress::LaneMeter;

/// A chunk on its way: raw bytes in a ring buffer.
#[derive(Debug)]
pub(super) struct RawChunk {
    /// Which lane.
    pub(super) lane: usize,
    /// Which chunk of the lane's extent.
    pub(super) index: u64,
    /// Holds the chunk at its start.
    pub(super) buffer: PoolBuf,
    /// Length of the chunk in bytes.
    pub(super) len: usize,
}

/// What a copy thread works with.
#[derive(Debug)]
pub(super) struct CopyLane<'a> {
    pub(super) lane: usize,
    pub(super) chunks: Chunks,
    pub(super) chunk_len: u64,
    pub(super) ring: &'a BufferPool,
    pub(super) meter: &'a LaneMeter,
    pub(super) gauge: &'a Gauge,
}

impl CopyLane<'_> {
    /// Copies a whole extent out, in order. At least two copies are under way whenever two ring buffers are free.
    pub(super) fn copy_out(
        &self,
        mut queue: CopyQueue,
        extent: Extent,
        out: &Sender<RawChunk>,
    ) -> Result<(), PipelineError> {
        queue.bind(extent)?;
        let count = self.chunks.count();
        let mut next = 0;
        while next < count || !queue.is_empty() {
            while next < count && queue.has_room() {
                let Some(buffer) = self.next_buffer(queue.is_empty())? else {
                    break;
                };
                let (offset, len) = self.place(next);
                queue.copy_out(buffer, offset, len)?;
                next += 1;
            }
            let started = Instant::now();
            let Some(copied) = queue.wait_oldest()? else {
                continue;
            };
            self.gauge.busy(copied.len as u64, started.elapsed());
            self.meter
                .copied
                .fetch_add(copied.len as u64, std::sync::atomic::Ordering::Relaxed);
            let index = copied.offset / self.chunk_len;
            let chunk = RawChunk {
                lane: self.lane,
                index,
                buffer: copied.buffer,
                len: copied.len,
            };
            if out.send(chunk).is_err() {
                return Err(PipelineError::Cancelled);
            }
        }
        queue.finish()?;
        Ok(())
    }

    /// Copies verified chunks in, in the order of their arrival. The extent becomes known after `primed` was told that the ring is full (or holds all there is). Returns
    /// when every chunk of the extent was copied and the stream synchronized without an error.
    pub(super) fn copy_in(
        &self,
        mut queue: CopyQueue,
        input: &Receiver<RawChunk>,
        primed: &Sender<()>,
        extent: &Receiver<Extent>,
    ) -> Result<(), PipelineError> {
        let count = self.chunks.count();
        let ahead = count.min(self.ring.count() as u64);
        let mut prefetched = Vec::new();
        while (prefetched.len() as u64) < ahead {
            prefetched.push(self.next_chunk(input)?);
        }
        // Nobody listens any more once one lane was enough.
        let _only_the_first_matters = primed.try_send(());
        let extent = extent.recv().map_err(|_closed| PipelineError::Cancelled)?;
        queue.bind(extent)?;
        let mut arrived = prefetched.into_iter();
        let mut enqueued = 0;
        while enqueued < count || !queue.is_empty() {
            while enqueued < count && queue.has_room() {
                let chunk = match arrived.next() {
                    Some(chunk) => chunk,
                    None if queue.is_empty() => self.next_chunk(input)?,
                    None => match input.try_recv() {
                        Ok(chunk) => chunk,
                        Err(_empty_or_closed) => break,
                    },
                };
                let (offset, len) = self.place(chunk.index);
                queue.copy_in(chunk.buffer, offset, len)?;
                enqueued += 1;
            }
            let started = Instant::now();
            if let Some(copied) = queue.wait_oldest()? {
                self.gauge.busy(copied.len as u64, started.elapsed());
                self.meter
                    .copied
                    .fetch_add(copied.len as u64, std::sync::atomic::Ordering::Relaxed);
            }
        }
        queue.finish()?;
        Ok(())
    }

    /// A ring buffer. While copies are under way it is only taken when one is free: waiting for the oldest copy is better use of the time.
    fn next_buffer(&self, must_have: bool) -> Result<Option<PoolBuf>, PipelineError> {
        if let Some(buffer) = self.ring.try_acquire() {
            return Ok(Some(buffer));
        }
        if !must_have {
            return Ok(None);
        }
        let (buffer, waited) = self
            .ring
            .acquire()
            .map_err(|_closed| PipelineError::Cancelled)?;
        self.gauge.blocked(waited);
        Ok(Some(buffer))
    }

    fn next_chunk(&self, input: &Receiver<RawChunk>) -> Result<RawChunk, PipelineError> {
        let started = Instant::now();
        let chunk = input.recv().map_err(|_closed| PipelineError::Cancelled)?;
        self.gauge.starved(started.elapsed());
        Ok(chunk)
    }

    /// Offset and length of a chunk in its extent.
    fn place(&self, index: u64) -> (u64, usize) {
        let range = self.chunks.range(index);
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        (range.start, len)
    }
}
