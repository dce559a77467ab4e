//! Device ↔ ring, one OS thread per GPU, stream-ordered.
//!
//! Out: chunk after chunk of an extent is enqueued as long as a ring buffer is free, the oldest copy is waited for, and its buffer goes to the compressors. Back: verified chunks
//! arrive in any order, are enqueued at their place, and their buffers return to the ring once the copy has happened. What can fail: the driver; a closed ring.
//!
//! The copy engine is to have its next copy before it is done with the one under way, so the thread waits for the oldest copy only while another is enqueued behind it (or nothing
//! more can be). With a single one under way it waits for a buffer, or a chunk, and looks at the copy from time to time.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

use super::PipelineError;
use super::gauge::Gauge;
use crate::driver::{BufferPool, Copied, CopyQueue, Extent, HostMemory, PoolBuf, PoolSlice};
use crate::failpoint;
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

/// A verified chunk on its way to a GPU: raw bytes in a ring buffer, or where they landed.
#[derive(Debug)]
pub(super) struct VerifiedChunk {
    /// Which chunk of the lane's extent.
    pub(super) index: u64,
    /// The chunk, no more.
    pub(super) bytes: PoolSlice,
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

/// Copies that keep the engine busy: the one under way, and the next.
const ENOUGH_UNDER_WAY: usize = 2;

/// A copy's time is looked at so many times while another one cannot be enqueued: a look costs microseconds, and a look too late leaves the engine idle for a part of a copy.
const LOOKS_PER_COPY: u32 = 4;
/// Shortest and longest time between two looks.
const LOOK_EVERY: (Duration, Duration) = (Duration::from_micros(50), Duration::from_micros(500));

/// How the copies of one lane go on.
struct Pace {
    /// When the copy that was last waited for had happened.
    last_done: Instant,
    /// Time between two looks at the only copy under way.
    look_every: Duration,
}

impl Pace {
    fn new() -> Self {
        Self {
            last_done: Instant::now(),
            look_every: LOOK_EVERY.0,
        }
    }

    /// A copy has happened, the next one after the last.
    fn done(&mut self) {
        let now = Instant::now();
        let took = now - self.last_done;
        self.look_every = (took / LOOKS_PER_COPY).clamp(LOOK_EVERY.0, LOOK_EVERY.1);
        self.last_done = now;
    }
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
        let mut pace = Pace::new();
        while next < count || !queue.is_empty() {
            while next < count && queue.has_room() {
                let Some(buffer) = self.next_buffer(&mut queue, &pace)? else {
                    break;
                };
                let (offset, len) = self.place(next);
                queue.copy_out(buffer, offset, len)?;
                next += 1;
            }
            let Some(copied) = self.wait_oldest(&mut queue, &mut pace)? else {
                continue;
            };
            failpoint::pass("stream:chunk copied");
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

    /// Copies verified chunks in, in the order of their arrival. The extent becomes known after `primed` was told that `ahead` of them (or all there are) wait. Returns when every chunk
    /// of the extent was copied and the streams synchronized without an error.
    pub(super) fn copy_in(
        &self,
        mut queue: CopyQueue<PoolSlice>,
        input: &Receiver<VerifiedChunk>,
        ahead: u64,
        primed: &Sender<()>,
        extent: &Receiver<Extent>,
    ) -> Result<(), PipelineError> {
        let count = self.chunks.count();
        let ahead = count.min(ahead);
        let mut prefetched = Vec::new();
        while (prefetched.len() as u64) < ahead {
            let started = Instant::now();
            prefetched.push(input.recv().map_err(|_closed| PipelineError::Cancelled)?);
            self.gauge.starved(started.elapsed());
        }
        // Nobody listens any more once one lane was enough.
        let _only_the_first_matters = primed.try_send(());
        let extent = extent.recv().map_err(|_closed| PipelineError::Cancelled)?;
        queue.bind(extent)?;
        let mut arrived = prefetched.into_iter();
        let mut enqueued = 0;
        let mut pace = Pace::new();
        while enqueued < count || !queue.is_empty() {
            while enqueued < count && queue.has_room() {
                let chunk = match arrived.next() {
                    Some(chunk) => chunk,
                    None => match self.next_chunk(&mut queue, &pace, input)? {
                        Some(chunk) => chunk,
                        None => break,
                    },
                };
                let (offset, len) = self.place(chunk.index);
                queue.copy_in(chunk.bytes, offset, len)?;
                enqueued += 1;
            }
            self.wait_oldest(&mut queue, &mut pace)?;
            failpoint::pass("restore:chunk copied");
        }
        queue.finish()?;
        Ok(())
    }

    /// Waits for the oldest copy, if one is under way.
    fn wait_oldest<B: HostMemory>(
        &self,
        queue: &mut CopyQueue<B>,
        pace: &mut Pace,
    ) -> Result<Option<Copied<B>>, PipelineError> {
        let started = Instant::now();
        let copied = queue.wait_oldest()?;
        if let Some(copied) = &copied {
            pace.done();
            self.gauge.busy(copied.len as u64, started.elapsed());
            self.meter
                .copied
                .fetch_add(copied.len as u64, Ordering::Relaxed);
        }
        Ok(copied)
    }

    /// A ring buffer, unless it is time to wait for the oldest copy.
    fn next_buffer(
        &self,
        queue: &mut CopyQueue,
        pace: &Pace,
    ) -> Result<Option<PoolBuf>, PipelineError> {
        if let Some(buffer) = self.ring.try_acquire() {
            return Ok(Some(buffer));
        }
        if queue.is_empty() {
            let (buffer, waited) = self
                .ring
                .acquire()
                .map_err(|_closed| PipelineError::Cancelled)?;
            self.gauge.blocked(waited);
            return Ok(Some(buffer));
        }
        self.meanwhile(queue, || {
            let buffer = self.ring.acquire_within(pace.look_every);
            buffer.map_err(|_closed| PipelineError::Cancelled)
        })
    }

    /// A verified chunk, unless it is time to wait for the oldest copy.
    fn next_chunk(
        &self,
        queue: &mut CopyQueue<PoolSlice>,
        pace: &Pace,
        input: &Receiver<VerifiedChunk>,
    ) -> Result<Option<VerifiedChunk>, PipelineError> {
        if let Ok(chunk) = input.try_recv() {
            return Ok(Some(chunk));
        }
        if queue.is_empty() {
            let started = Instant::now();
            let chunk = input.recv().map_err(|_closed| PipelineError::Cancelled)?;
            self.gauge.starved(started.elapsed());
            return Ok(Some(chunk));
        }
        self.meanwhile(queue, || match input.recv_timeout(pace.look_every) {
            Ok(chunk) => Ok(Some(chunk)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(PipelineError::Cancelled),
        })
    }

    /// What `look` brings before the only copy under way has happened; nothing at all when there are more.
    fn meanwhile<T, B: HostMemory>(
        &self,
        queue: &mut CopyQueue<B>,
        mut look: impl FnMut() -> Result<Option<T>, PipelineError>,
    ) -> Result<Option<T>, PipelineError> {
        if queue.under_way() >= ENOUGH_UNDER_WAY {
            return Ok(None);
        }
        let started = Instant::now();
        let mut found = None;
        while found.is_none() && !queue.oldest_is_done()? {
            found = look()?;
        }
        // The copy was under way all the while.
        self.gauge.busy(0, started.elapsed());
        Ok(found)
    }

    /// Offset and length of a chunk in its extent.
    fn place(&self, index: u64) -> (u64, usize) {
        let range = self.chunks.range(index);
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        (range.start, len)
    }
}
