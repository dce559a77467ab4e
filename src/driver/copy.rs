//! Copies between an extent and pinned buffers: asynchronous, in order, on the one stream that the driver gave for that GPU.
//!
//! In: a buffer and an offset. Out: the same buffer, once the copy has really happened. What can fail: any call. After a failure nothing is known about the copies, so the queue is
//! good for nothing more: every later call answers that first error, and the buffers stay with the queue. When it is dropped, the stream is synchronized before a buffer
//! goes back, and a buffer whose copy may still run is leaked rather than reused.
//!
//! A queue belongs to one OS thread. Its events are made before the target is locked; from BEGIN on it only enqueues and waits. A bound queue keeps the extent mapped.

use std::collections::VecDeque;
use std::ffi::c_uint;
use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUevent, CUstream};

use super::process::Mapping;
use super::{Driver, DriverError, Extent, PoolBuf};

/// CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING: waiting sleeps, and nothing is timed.
const EVENT_FLAGS: c_uint = 1 | 2;
/// CU_STREAM_NON_BLOCKING.
const STREAM_FLAGS: c_uint = 1;

/// Copies of one GPU, oldest first.
#[derive(Debug)]
pub struct CopyQueue {
    driver: Arc<Driver>,
    device: usize,
    spare_events: Vec<Event>,
    under_way: VecDeque<UnderWay>,
    bound: Option<Extent>,
    failed: Option<DriverError>,
}

#[derive(Debug, Clone, Copy)]
enum Direction {
    Out,
    In,
}

/// A copy that has happened.
#[derive(Debug)]
pub struct Copied {
    /// The buffer, now ours again.
    pub buffer: PoolBuf,
    /// Where in the extent, in bytes.
    pub offset: u64,
    /// How many bytes.
    pub len: usize,
}

#[derive(Debug)]
struct UnderWay {
    event: Event,
    copied: Copied,
}

#[derive(Debug)]
struct Event(CUevent);

// SAFETY: an event is a handle; the driver allows its use from any thread.
unsafe impl Send for Event {}

impl CopyQueue {
    /// A queue for up to `depth` copies under way on `device`, not bound to an extent yet. The device's context must be retained.
    ///
    /// # Errors
    /// [`DriverError::Call`] when an event cannot be made.
    pub fn prepare(driver: &Arc<Driver>, device: usize, depth: usize) -> Result<Self, DriverError> {
        driver.make_current(device)?;
        let mut queue = Self {
            driver: Arc::clone(driver),
            device,
            spare_events: Vec::with_capacity(depth),
            under_way: VecDeque::with_capacity(depth),
            bound: None,
            failed: None,
        };
        for _ in 0..depth {
            let mut event: CUevent = std::ptr::null_mut();
            // SAFETY: the out pointer is valid for the call.
            driver.check("cuEventCreate", unsafe {
                (driver.api.event_create)(&raw mut event, EVENT_FLAGS)
            })?;
            queue.spare_events.push(Event(event));
        }
        Ok(queue)
    }

    /// Binds the queue to the extent that it copies from or to, and the calling thread to the GPU's context.
    ///
    /// # Errors
    /// [`DriverError::Call`] when the context cannot be made current.
    ///
    /// # Panics
    /// When the extent is on another GPU than the queue was prepared for, or copies of another extent are under way.
    pub fn bind(&mut self, extent: Extent) -> Result<(), DriverError> {
        assert_eq!(
            extent.device, self.device,
            "a copy queue is bound to an extent of its own GPU"
        );
        assert!(
            self.is_empty(),
            "a copy queue is bound while nothing is under way"
        );
        self.usable()?;
        let current = self.driver.make_current(self.device);
        self.settle(current)?;
        self.bound = Some(extent);
        Ok(())
    }

    /// Whether no copy is under way.
    pub fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Whether another copy may be enqueued.
    pub fn has_room(&self) -> bool {
        !self.spare_events.is_empty()
    }

    /// Enqueues a copy of `len` bytes at `offset` of the extent into the start of `buffer`, and returns at once.
    ///
    /// # Errors
    /// [`DriverError::Call`]; the buffer is then kept until the queue is dropped.
    ///
    /// # Panics
    /// When the queue is not bound or has no room, the range is outside the extent, or `len` is longer than the buffer.
    pub fn copy_out(
        &mut self,
        buffer: PoolBuf,
        offset: u64,
        len: usize,
    ) -> Result<(), DriverError> {
        self.enqueue(Direction::Out, buffer, offset, len)
    }

    /// Enqueues a copy of the first `len` bytes of `buffer` to `offset` of the extent, and returns at once.
    ///
    /// # Errors
    /// [`DriverError::Call`]; the buffer is then kept until the queue is dropped.
    ///
    /// # Panics
    /// As [`CopyQueue::copy_out`].
    pub fn copy_in(&mut self, buffer: PoolBuf, offset: u64, len: usize) -> Result<(), DriverError> {
        self.enqueue(Direction::In, buffer, offset, len)
    }

    /// Waits for the oldest copy. `None` when none is under way.
    ///
    /// # Errors
    /// [`DriverError::Call`]; the buffer is then kept until the queue is dropped.
    pub fn wait_oldest(&mut self) -> Result<Option<Copied>, DriverError> {
        self.usable()?;
        let Some(oldest) = self.under_way.front() else {
            return Ok(None);
        };
        // SAFETY: the event is ours and was recorded behind the copy: a queue that could not record one is not usable.
        let waited = self.driver.check("cuEventSynchronize", unsafe {
            (self.driver.api.event_synchronize)(oldest.event.0)
        });
        self.settle(waited)?;
        let done = self.under_way.pop_front();
        Ok(done.map(|done| {
            self.spare_events.push(done.event);
            done.copied
        }))
    }

    /// Synchronizes the stream: after success every copy has happened.
    ///
    /// # Errors
    /// [`DriverError::Call`] of any copy that went wrong on the stream.
    pub fn finish(&mut self) -> Result<(), DriverError> {
        self.usable()?;
        let drained = self.drain();
        self.settle(drained)
    }

    /// Synchronizes the stream, whatever went wrong before: even a copy without an event has happened then.
    fn drain(&mut self) -> Result<(), DriverError> {
        let Some(extent) = &self.bound else {
            return Ok(());
        };
        // SAFETY: the stream is alive as long as the extent is, which we hold.
        self.driver.check("cuStreamSynchronize", unsafe {
            (self.driver.api.stream_synchronize)(extent.mapping.stream)
        })?;
        while let Some(done) = self.under_way.pop_front() {
            self.spare_events.push(done.event);
        }
        Ok(())
    }

    /// # Errors
    /// The error that made the queue good for nothing.
    fn usable(&self) -> Result<(), DriverError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Remembers the first error.
    fn settle(&mut self, outcome: Result<(), DriverError>) -> Result<(), DriverError> {
        if let Err(error) = &outcome {
            self.failed.get_or_insert_with(|| error.clone());
        }
        outcome
    }

    fn checked_range(&self, buffer: &PoolBuf, offset: u64, len: usize) -> (CUdeviceptr, CUstream) {
        let extent = self.bound.as_ref();
        let mapping = &extent
            .expect("a copy queue is bound before it copies")
            .mapping;
        assert!(
            len <= buffer.len(),
            "a copy of {len} bytes does not fit a buffer of {}",
            buffer.len()
        );
        let end = offset.checked_add(len as u64);
        assert!(
            end.is_some_and(|end| end <= mapping.len),
            "a copy of {len} bytes at {offset} leaves the extent of {}",
            mapping.len
        );
        (mapping.base + offset, mapping.stream)
    }

    fn enqueue(
        &mut self,
        direction: Direction,
        buffer: PoolBuf,
        offset: u64,
        len: usize,
    ) -> Result<(), DriverError> {
        self.usable()?;
        let (device, stream) = self.checked_range(&buffer, offset, len);
        let event = self
            .spare_events
            .pop()
            .expect("no more copies under way than the queue was prepared for");
        let (host, raw_event) = (buffer.as_device_visible(), event.0);
        // Owned by the queue from here on, whatever the driver answers: the copy may run.
        self.under_way.push_back(UnderWay {
            event,
            copied: Copied {
                buffer,
                offset,
                len,
            },
        });
        let api = &self.driver.api;
        let (call, code) = match direction {
            // SAFETY: the target is `len` bytes of a buffer that this queue owns until the copy has happened; the source is inside the extent, which is mapped while we hold it.
            Direction::Out => ("cuMemcpyDtoHAsync", unsafe {
                (api.memcpy_dtoh_async)(host, device, len, stream)
            }),
            // SAFETY: as above, with source and target exchanged.
            Direction::In => ("cuMemcpyHtoDAsync", unsafe {
                (api.memcpy_htod_async)(device, host, len, stream)
            }),
        };
        let enqueued = self.driver.check(call, code).and_then(|()| {
            // SAFETY: event and stream are valid and of the same context.
            self.driver.check("cuEventRecord", unsafe {
                (self.driver.api.event_record)(raw_event, stream)
            })
        });
        self.settle(enqueued)
    }
}

impl Drop for CopyQueue {
    fn drop(&mut self) {
        let drained = self.driver.make_current(self.device).and_then(|()| {
            if self.under_way.is_empty() {
                Ok(())
            } else {
                self.drain()
            }
        });
        if let Err(error) = drained {
            tracing::warn!(%error, buffers = self.under_way.len(), "copies may still run; their buffers are leaked");
            std::mem::forget(std::mem::take(&mut self.under_way));
        }
        for event in self.spare_events.drain(..) {
            // SAFETY: the event is ours and no copy waits for it.
            let _ended_with_the_context = unsafe { (self.driver.api.event_destroy)(event.0) };
        }
    }
}

/// GPU memory of our own, for benches and checks of the copy path: an [`Extent`] without a target. It is freed once this and every clone of the extent are dropped.
#[derive(Debug)]
pub struct DeviceMemory {
    extent: Extent,
}

/// An allocation and its stream.
#[derive(Debug)]
struct Allocation {
    driver: Arc<Driver>,
    device: usize,
    base: CUdeviceptr,
    stream: CUstream,
}

// SAFETY: base and stream are handles into the driver, which synchronizes their use; they are only read, and freed once by the one who drops this.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl DeviceMemory {
    /// Allocates `len` bytes (at least 1) on a GPU, with a stream of its own. The content is not set.
    ///
    /// # Errors
    /// [`DriverError::Call`] of the allocation or of the stream.
    pub fn allocate(driver: &Arc<Driver>, device: usize, len: usize) -> Result<Self, DriverError> {
        driver.make_current(device)?;
        let mut base: CUdeviceptr = 0;
        // SAFETY: the out pointer is valid for the call.
        driver.check("cuMemAlloc", unsafe {
            (driver.api.mem_alloc)(&raw mut base, len)
        })?;
        let mut stream: CUstream = std::ptr::null_mut();
        // SAFETY: the out pointer is valid for the call.
        let made = driver.check("cuStreamCreate", unsafe {
            (driver.api.stream_create)(&raw mut stream, STREAM_FLAGS)
        });
        if let Err(error) = made {
            // SAFETY: allocated above, used by nobody.
            let _reported_by_the_first_error = unsafe { (driver.api.mem_free)(base) };
            return Err(error);
        }
        let owner = Allocation {
            driver: Arc::clone(driver),
            device,
            base,
            stream,
        };
        Ok(Self {
            extent: Extent {
                device,
                uuid: driver.devices()[device].uuid,
                len: len as u64,
                mapping: Mapping {
                    base,
                    len: len as u64,
                    stream,
                    _owner: Arc::new(owner),
                },
            },
        })
    }

    /// The memory as an extent.
    pub fn extent(&self) -> Extent {
        self.extent.clone()
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.driver.make_current(self.device).is_ok() {
            // SAFETY: stream and memory are ours, and no extent of them is left; synchronizing first ends every copy that a queue may have left.
            unsafe {
                (self.driver.api.stream_synchronize)(self.stream);
                (self.driver.api.stream_destroy)(self.stream);
                (self.driver.api.mem_free)(self.base);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{BufferPool, fake};

    fn bound(driver: &Arc<Driver>) -> (CopyQueue, Extent) {
        let memory = DeviceMemory::allocate(driver, 0, 64).unwrap();
        let mut queue = CopyQueue::prepare(driver, 0, 2).unwrap();
        queue.bind(memory.extent()).unwrap();
        (queue, memory.extent())
    }

    fn code(error: &DriverError) -> u32 {
        error.code().unwrap().0
    }

    #[test]
    fn a_buffer_whose_copy_has_no_event_is_not_given_out() {
        let driver = fake::driver();
        let pool = BufferPool::new(2, 64, None).unwrap();
        let (mut queue, _extent) = bound(&driver);
        queue.copy_out(pool.try_acquire().unwrap(), 0, 64).unwrap();
        fake::answer("cuEventRecord", 999);
        let refused = queue.copy_out(pool.try_acquire().unwrap(), 0, 64);
        assert_eq!(code(&refused.unwrap_err()), 999);
        fake::answer("cuEventRecord", 0);
        // A caller that ignores the error learns nothing but the error.
        assert_eq!(code(&queue.wait_oldest().unwrap_err()), 999);
        assert_eq!(code(&queue.finish().unwrap_err()), 999);
        assert_eq!(fake::calls("cuEventSynchronize"), 0);
        assert_eq!(pool.free_count(), 0);
        drop(queue);
        assert_eq!(fake::calls("cuStreamSynchronize"), 1);
        assert_eq!(pool.free_count(), 2);
    }

    #[test]
    fn buffers_stay_away_when_the_stream_cannot_be_synchronized() {
        let driver = fake::driver();
        let pool = BufferPool::new(1, 64, None).unwrap();
        let (mut queue, _extent) = bound(&driver);
        queue.copy_in(pool.try_acquire().unwrap(), 0, 64).unwrap();
        fake::answer("cuStreamSynchronize", 700);
        assert_eq!(code(&queue.finish().unwrap_err()), 700);
        drop(queue);
        assert_eq!(pool.free_count(), 0);
    }

    #[test]
    #[should_panic(expected = "nothing is under way")]
    fn binding_anew_under_a_copy_is_a_defect() {
        let driver = fake::driver();
        let pool = BufferPool::new(1, 64, None).unwrap();
        let (mut queue, extent) = bound(&driver);
        queue.copy_out(pool.try_acquire().unwrap(), 0, 64).unwrap();
        let _panics = queue.bind(extent);
    }

    #[test]
    fn memory_is_freed_behind_the_last_extent() {
        let driver = fake::driver();
        let (queue, extent) = bound(&driver);
        drop(extent);
        assert_eq!(fake::calls("cuMemFree"), 0);
        drop(queue);
        assert_eq!(fake::calls("cuMemFree"), 1);
        assert_eq!(fake::calls("cuStreamDestroy"), 1);
    }
}
