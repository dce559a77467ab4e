//! Bytes that come from elsewhere than a GPU, and how many there are is known at their end.
//!
//! In: whatever a [`Source`] reads. Out: chunks, in order, into the same compressors and parts as those of GPUs. What can fail: the source; a run that was given up, which a source that waits has to look for.

use std::sync::atomic::Ordering;
use std::time::Instant;

use crossbeam_channel::Sender;

use super::PipelineError;
use super::abort::Abort;
use super::copy::RawChunk;
use super::gauge::Gauge;
use crate::driver::{BufferPool, PoolBuf};
use crate::failpoint;
use crate::progress::LaneMeter;

/// Where the bytes of a lane come from, if not from a GPU.
pub trait Source: Send + std::fmt::Debug {
    /// Chunk buffers that it may keep while it asks for another one, in a ring of so many. They are not lent to parts, which would wait for chunks that wait for them.
    fn holds(&self, ring_len: usize) -> usize;

    /// Hands over chunk after chunk, each of [`SourceOut::chunk_len`] bytes but the last. Returns how many bytes there were.
    ///
    /// # Errors
    /// What broke the bytes off, or [`PipelineError::Cancelled`].
    fn run(self: Box<Self>, out: &mut SourceOut<'_>) -> Result<u64, PipelineError>;
}

/// Takes the chunks of a source.
#[derive(Debug)]
pub struct SourceOut<'a> {
    lane: usize,
    /// Of the next chunk.
    index: u64,
    ring: &'a BufferPool,
    meter: &'a LaneMeter,
    gauge: &'a Gauge,
    out: &'a Sender<RawChunk>,
    abort: &'a Abort,
    /// When the last chunk went.
    since: Instant,
}

impl<'a> SourceOut<'a> {
    pub(super) fn new(
        lane: usize,
        (ring, meter, gauge): (&'a BufferPool, &'a LaneMeter, &'a Gauge),
        (out, abort): (&'a Sender<RawChunk>, &'a Abort),
    ) -> Self {
        Self {
            lane,
            index: 0,
            ring,
            meter,
            gauge,
            out,
            abort,
            since: Instant::now(),
        }
    }

    /// Bytes of every chunk but the last.
    pub fn chunk_len(&self) -> usize {
        self.ring.buffer_len()
    }

    /// Chunk buffers that there are. Two have to be left for what was handed over.
    pub fn ring_len(&self) -> usize {
        self.ring.count()
    }

    /// A buffer for a chunk, once there is one.
    ///
    /// # Errors
    /// [`PipelineError::Cancelled`].
    pub fn buffer(&mut self) -> Result<PoolBuf, PipelineError> {
        let (buffer, waited) = self
            .ring
            .acquire()
            .map_err(|_closed| PipelineError::Cancelled)?;
        self.gauge.blocked(waited);
        self.since += waited;
        Ok(buffer)
    }

    /// A buffer for a chunk, if one is free.
    pub fn try_buffer(&mut self) -> Option<PoolBuf> {
        self.ring.try_acquire()
    }

    /// The next chunk: the first `len` bytes of the buffer.
    ///
    /// # Errors
    /// [`PipelineError::Cancelled`].
    pub fn chunk(&mut self, buffer: PoolBuf, len: usize) -> Result<(), PipelineError> {
        failpoint::pass("stream:chunk copied");
        self.gauge.busy(len as u64, self.since.elapsed());
        self.meter.copied.fetch_add(len as u64, Ordering::Relaxed);
        let chunk = RawChunk {
            lane: self.lane,
            index: self.index,
            buffer,
            len,
        };
        self.index += 1;
        let sent = self.out.send(chunk);
        self.since = Instant::now();
        sent.map_err(|_closed| PipelineError::Cancelled)
    }

    /// To be asked now and then while nothing comes.
    ///
    /// # Errors
    /// [`PipelineError::Cancelled`] when the run was given up.
    pub fn check(&self) -> Result<(), PipelineError> {
        match self.abort.is_set() {
            true => Err(PipelineError::Cancelled),
            false => Ok(()),
        }
    }
}
