//! GPU memory of our own, real or emulated: filled with the data, scribbled over, compared, and copied as fast as the engine can.
//!
//! In: a tile, which is repeated over each GPU's memory. Out: what the copies took, and the certainty that the memory holds the tile again. What can fail: the driver; memory that is
//! not to be had; bytes that came back different.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::BenchError;
use super::measure::{Took, timed};
use crate::driver::{BufferPool, CopyQueue, DeviceMemory, Driver, Extent, STREAMS_OUT};
use crate::plan::Chunks;

/// Bytes that one copy of the fill and the comparison moves.
const STRIPE_LEN: u64 = 16 << 20;
/// Copies of a worker under way: one moves while the processor works on the other.
const STRIPES_UNDER_WAY: usize = 2;
/// More workers on one GPU than this wait for its copy engine.
const WORKERS_MAX: usize = 8;
/// Bytes of a copy whose rate is taken for the engine's own: far above the lengths from which on the rate no longer grows (4 MiB on an H200).
const RAW_COPY_LEN: u64 = 32 << 20;
/// Such copies under way: the engine always has the next one.
const RAW_UNDER_WAY: usize = 3;

/// Which way a copy goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// Off the GPU.
    Out,
    /// Onto it.
    In,
}

/// The GPUs of the bench, and one allocation on each.
#[derive(Debug)]
pub(super) struct Gpus {
    driver: Arc<Driver>,
    memories: Vec<DeviceMemory>,
    threads: usize,
    cancel: CancellationToken,
}

#[derive(Debug, Clone, Copy)]
enum Work<'a> {
    Fill(&'a [u8]),
    Scribble,
    Compare(&'a [u8]),
}

impl Gpus {
    /// Allocates `len` bytes on each of the first `count` GPUs, whose contexts are retained.
    pub(super) fn allocate(
        driver: &Arc<Driver>,
        count: usize,
        len: u64,
        threads: u32,
        cancel: &CancellationToken,
    ) -> Result<Self, BenchError> {
        let memories = (0..count)
            .map(|device| {
                let bytes = usize::try_from(len).unwrap_or(usize::MAX);
                DeviceMemory::allocate(driver, device, bytes).map_err(|source| {
                    BenchError::GpuMemory {
                        device,
                        len,
                        source,
                    }
                })
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            driver: Arc::clone(driver),
            memories,
            threads: threads as usize,
            cancel: cancel.clone(),
        })
    }

    pub(super) fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// One per GPU.
    pub(super) fn extents(&self) -> Vec<Extent> {
        self.memories.iter().map(DeviceMemory::extent).collect()
    }

    /// Total memory of each GPU of the bench in bytes: what a plan is made from.
    pub(super) fn memory_lens(&self) -> Vec<u64> {
        let devices = self.driver.devices().iter().take(self.memories.len());
        devices.map(|device| device.memory_len).collect()
    }

    /// Fills every GPU with the tile, over and over.
    pub(super) fn fill(&self, tile: &[u8]) -> Result<(), BenchError> {
        self.each_stripe(Work::Fill(tile))
    }

    /// Overwrites everything, so that what is compared later was brought by the copies in between.
    pub(super) fn scribble(&self) -> Result<(), BenchError> {
        self.each_stripe(Work::Scribble)
    }

    /// Every GPU holds the tile, over and over.
    pub(super) fn compare(&self, tile: &[u8]) -> Result<(), BenchError> {
        self.each_stripe(Work::Compare(tile))
    }

    fn each_stripe(&self, work: Work<'_>) -> Result<(), BenchError> {
        let extents = self.extents();
        let workers = (self.threads / extents.len().max(1)).clamp(1, WORKERS_MAX);
        in_threads(extents.iter().flat_map(|extent| {
            (0..workers).map(move |worker| move || self.stripes_of(work, extent, worker, workers))
        }))
    }

    fn stripes_of(
        &self,
        work: Work<'_>,
        extent: &Extent,
        worker: usize,
        workers: usize,
    ) -> Result<(), BenchError> {
        let pool = BufferPool::new(
            STRIPES_UNDER_WAY,
            usize::try_from(STRIPE_LEN).unwrap_or(usize::MAX),
            Some((&self.driver, extent.device)),
        )?;
        let mut queue =
            CopyQueue::prepare(&self.driver, extent.device, STRIPES_UNDER_WAY, STREAMS_OUT)?;
        queue.bind(extent.clone())?;
        let stripes = Chunks::new(extent.len, STRIPE_LEN);
        let settle = |queue: &mut CopyQueue| -> Result<(), BenchError> {
            let Some(copied) = queue.wait_oldest()? else {
                return Ok(());
            };
            if let Work::Compare(tile) = work
                && !repeats(tile, copied.offset, &copied.buffer[..copied.len])
            {
                return Err(BenchError::Different {
                    device: extent.device,
                    offset: copied.offset,
                });
            }
            Ok(())
        };
        for index in (0..stripes.count()).skip(worker).step_by(workers) {
            if self.cancel.is_cancelled() {
                return Err(BenchError::Interrupted);
            }
            if !queue.has_room() {
                settle(&mut queue)?;
            }
            let range = stripes.range(index);
            let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
            let (mut buffer, _waited) = pool.acquire()?;
            match work {
                Work::Fill(tile) => repeat(tile, range.start, &mut buffer[..len]),
                Work::Scribble => buffer[..len].fill(0xA5),
                Work::Compare(_) => {
                    queue.copy_out(buffer, range.start, len)?;
                    continue;
                }
            }
            queue.copy_in(buffer, range.start, len)?;
        }
        while !queue.is_empty() {
            settle(&mut queue)?;
        }
        Ok(queue.finish()?)
    }

    /// Copies everything once, all GPUs at a time, in the largest copies that make sense, with nothing to do for the processor: the rate of the copy engine itself.
    pub(super) fn copy_raw(&self, direction: Direction) -> Result<Took, BenchError> {
        let lanes = self
            .extents()
            .into_iter()
            .map(|extent| {
                let copy_len = RAW_COPY_LEN.min(extent.len);
                let buffer_len = usize::try_from(copy_len).unwrap_or(usize::MAX);
                let pool = BufferPool::new(
                    RAW_UNDER_WAY,
                    buffer_len,
                    Some((&self.driver, extent.device)),
                )?;
                let queue =
                    CopyQueue::prepare(&self.driver, extent.device, RAW_UNDER_WAY, STREAMS_OUT)?;
                Ok((pool, queue, extent))
            })
            .collect::<Result<Vec<_>, BenchError>>()?;
        let ((), took) =
            timed(|| {
                in_threads(lanes.into_iter().map(|(pool, queue, extent)| {
                    move || copy_raw_one(direction, &pool, queue, extent)
                }))
            })?;
        Ok(took)
    }
}

fn copy_raw_one(
    direction: Direction,
    pool: &BufferPool,
    mut queue: CopyQueue,
    extent: Extent,
) -> Result<(), BenchError> {
    let copies = Chunks::new(extent.len, pool.buffer_len() as u64);
    queue.bind(extent)?;
    for index in 0..copies.count() {
        if !queue.has_room() {
            queue.wait_oldest()?;
        }
        let (buffer, _waited) = pool.acquire()?;
        let range = copies.range(index);
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        match direction {
            Direction::Out => queue.copy_out(buffer, range.start, len)?,
            Direction::In => queue.copy_in(buffer, range.start, len)?,
        }
    }
    Ok(queue.finish()?)
}

/// Runs each in a thread of its own; the first error of any.
pub(super) fn in_threads<W>(work: impl Iterator<Item = W>) -> Result<(), BenchError>
where
    W: FnOnce() -> Result<(), BenchError> + Send,
{
    std::thread::scope(|scope| {
        let running: Vec<_> = work.map(|work| scope.spawn(work)).collect();
        let mut outcome = Ok(());
        for thread in running {
            let ended = thread.join();
            let ended = ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            outcome = outcome.and(ended);
        }
        outcome
    })
}

/// Fills `out`, which lies at `offset` of a memory that repeats the tile.
fn repeat(tile: &[u8], offset: u64, out: &mut [u8]) {
    let mut start = place(tile, offset);
    let mut rest = out;
    while !rest.is_empty() {
        let len = (tile.len() - start).min(rest.len());
        let (filled, behind) = rest.split_at_mut(len);
        filled.copy_from_slice(&tile[start..start + len]);
        rest = behind;
        start = 0;
    }
}

/// Whether `bytes`, at `offset` of a memory, are what a repeated tile has there.
fn repeats(tile: &[u8], offset: u64, bytes: &[u8]) -> bool {
    let mut start = place(tile, offset);
    let mut rest = bytes;
    while !rest.is_empty() {
        let len = (tile.len() - start).min(rest.len());
        let (piece, behind) = rest.split_at(len);
        if piece != &tile[start..start + len] {
            return false;
        }
        rest = behind;
        start = 0;
    }
    true
}

fn place(tile: &[u8], offset: u64) -> usize {
    usize::try_from(offset % tile.len() as u64).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_repeats_from_any_place_and_one_wrong_byte_shows() {
        let tile = b"abcde";
        for offset in 0..11 {
            let mut out = [0; 13];
            repeat(tile, offset, &mut out);
            assert_eq!(out[0], tile[usize::try_from(offset).unwrap() % 5]);
            assert!(repeats(tile, offset, &out));
            out[12] ^= 1;
            assert!(!repeats(tile, offset, &out));
        }
    }
}
