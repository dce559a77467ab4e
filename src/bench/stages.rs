//! The stages that need no GPU and no store, each alone: codec, digest, checksum, the look for zeros.
//!
//! In: a tile of data, and how many threads. Out: what a pass took, and how much shorter the data became. What can fail: a context of the codec; a frame that does not decode.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::BenchError;
use super::device::in_threads;
use super::flow::Coder;
use super::measure::{Took, timed};
use crate::codec::{Crc64, Digest};

/// One measured pass of a stage.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pass {
    /// Raw bytes that went through.
    pub(super) bytes: u64,
    pub(super) took: Took,
}

/// How the passes are made.
#[derive(Debug, Clone, Copy)]
pub(super) struct Passes {
    pub(super) threads: usize,
    /// A pass goes over the tile until so much time is over, at least once.
    pub(super) at_least: Duration,
}

impl Passes {
    /// Threads take one chunk of `tile` after the other; `thread` makes what each does with its chunks, given index and bytes.
    fn over<W>(
        self,
        tile: &[u8],
        chunk_len: usize,
        thread: impl Fn() -> Result<W, BenchError>,
    ) -> Result<Pass, BenchError>
    where
        W: FnMut(usize, &[u8]) -> Result<(), BenchError> + Send,
    {
        // Contexts and buffers are made and touched before the clock runs.
        let workers = (0..self.threads)
            .map(|_| thread())
            .collect::<Result<Vec<W>, _>>()?;
        let chunks: Vec<&[u8]> = tile.chunks(chunk_len).collect();
        let (next, bytes) = (AtomicUsize::new(0), AtomicU64::new(0));
        let (chunks, next, counted) = (&chunks, &next, &bytes);
        let started = Instant::now();
        let ((), took) = timed(|| {
            in_threads(workers.into_iter().map(|mut work| {
                move || loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= chunks.len() && started.elapsed() >= self.at_least {
                        return Ok(());
                    }
                    let index = index % chunks.len();
                    work(index, chunks[index])?;
                    counted.fetch_add(chunks[index].len() as u64, Ordering::Relaxed);
                }
            }))
        })?;
        Ok(Pass {
            bytes: bytes.into_inner(),
            took,
        })
    }

    /// Digests alone.
    pub(super) fn digest(self, tile: &[u8], chunk_len: usize) -> Result<Pass, BenchError> {
        self.over(tile, chunk_len, || {
            Ok(|_index: usize, chunk: &[u8]| {
                std::hint::black_box(Digest::of(chunk));
                Ok(())
            })
        })
    }

    /// Checksums alone.
    pub(super) fn checksum(self, tile: &[u8], chunk_len: usize) -> Result<Pass, BenchError> {
        self.over(tile, chunk_len, || {
            Ok(|_index: usize, chunk: &[u8]| {
                std::hint::black_box(Crc64::of(chunk));
                Ok(())
            })
        })
    }

    /// Chunks to frames.
    pub(super) fn encode(
        self,
        tile: &[u8],
        chunk_len: usize,
        coder: &Coder,
    ) -> Result<Pass, BenchError> {
        self.over(tile, chunk_len, || {
            let mut encode = coder.encoder(chunk_len)?;
            Ok(move |_index: usize, chunk: &[u8]| {
                encode.frame(chunk);
                Ok(())
            })
        })
    }

    /// Frames to chunks. `frames` are those of the tile.
    pub(super) fn decode(
        self,
        tile: &[u8],
        chunk_len: usize,
        coder: &Coder,
        frames: &[super::flow::Frame],
    ) -> Result<Pass, BenchError> {
        self.over(tile, chunk_len, || {
            let mut decoder = coder.decoder(chunk_len)?;
            Ok(move |index: usize, chunk: &[u8]| decoder.chunk(&frames[index], chunk.len()))
        })
    }
}
