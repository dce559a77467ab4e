//! Copies between an extent and pinned buffers: asynchronous, in order, on the one stream that the driver gave for that GPU.
//!
//! In: a buffer and an offset. Out: the same buffer, once the copy has really happened. What can fail: any call; then the stream is synchronized before a buffer is
//! freed, and a buffer whose copy may still run is leaked rather than reused.
//!
//! A queue belongs to one OS thread. Its events are made before the target is locked; from BEGIN on it only enqueues and waits.

use std::collections::VecDeque;
use std::ffi::c_uint;
use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUevent, CUstream};

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

    /// Index of the GPU in [`Driver::devices`].
    pub fn device(&self) -> usize {
        self.device
    }

    /// Binds the queue to the extent that it copies from or to, and the calling thread to the GPU's context.
    ///
    /// # Errors
    /// [`DriverError::Call`] when the context cannot be made current.
    ///
    /// # Panics
    /// When the extent is on another GPU than the queue was prepared for.
    pub fn bind(&mut self, extent: Extent) -> Result<(), DriverError> {
        assert_eq!(
            extent.device, self.device,
            "a copy queue is bound to an extent of its own GPU"
        );
        self.driver.make_current(self.device)?;
        self.bound = Some(extent);
        Ok(())
    }

    /// Copies under way.
    pub fn len(&self) -> usize {
        self.under_way.len()
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
    /// When there is no room, the range is outside the extent, or `len` is longer than the buffer.
    pub fn copy_out(
        &mut self,
        buffer: PoolBuf,
        offset: u64,
        len: usize,
    ) -> Result<(), DriverError> {
        let (source, stream) = self.checked_range(&buffer, offset, len);
        let target = buffer.as_device_visible();
        // SAFETY: the target is `len` bytes of a buffer that this queue owns until the copy's event has happened; the source is inside the mapped extent.
        let code = unsafe { (self.driver.api.memcpy_dtoh_async)(target, source, len, stream) };
        self.enqueued(
            "cuMemcpyDtoHAsync",
            code,
            Copied {
                buffer,
                offset,
                len,
            },
            stream,
        )
    }

    /// Enqueues a copy of the first `len` bytes of `buffer` to `offset` of the extent, and returns at once.
    ///
    /// # Errors
    /// [`DriverError::Call`]; the buffer is then kept until the queue is dropped.
    ///
    /// # Panics
    /// As [`CopyQueue::copy_out`].
    pub fn copy_in(&mut self, buffer: PoolBuf, offset: u64, len: usize) -> Result<(), DriverError> {
        let (target, stream) = self.checked_range(&buffer, offset, len);
        let source = buffer.as_device_visible();
        // SAFETY: the source is `len` bytes of a buffer that this queue owns until the copy's event has happened; the target is inside the mapped extent.
        let code = unsafe { (self.driver.api.memcpy_htod_async)(target, source, len, stream) };
        self.enqueued(
            "cuMemcpyHtoDAsync",
            code,
            Copied {
                buffer,
                offset,
                len,
            },
            stream,
        )
    }

    /// Waits for the oldest copy. `None` when none is under way.
    ///
    /// # Errors
    /// [`DriverError::Call`]; the buffer is then kept until the queue is dropped.
    pub fn wait_oldest(&mut self) -> Result<Option<Copied>, DriverError> {
        let Some(oldest) = self.under_way.front() else {
            return Ok(None);
        };
        // SAFETY: the event is ours and was recorded behind the copy.
        self.driver.check("cuEventSynchronize", unsafe {
            (self.driver.api.event_synchronize)(oldest.event.0)
        })?;
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
        let Some(extent) = self.bound else {
            return Ok(());
        };
        // SAFETY: the stream came from the driver for this operation, which is not complete while a queue is bound.
        self.driver.check("cuStreamSynchronize", unsafe {
            (self.driver.api.stream_synchronize)(extent.stream)
        })?;
        while let Some(done) = self.under_way.pop_front() {
            self.spare_events.push(done.event);
        }
        Ok(())
    }

    fn checked_range(&self, buffer: &PoolBuf, offset: u64, len: usize) -> (CUdeviceptr, CUstream) {
        let extent = self.bound.expect("a copy queue is bound before it copies");
        assert!(
            self.has_room(),
            "more copies under way than the queue was prepared for"
        );
        assert!(
            len <= buffer.len(),
            "a copy of {len} bytes does not fit a buffer of {}",
            buffer.len()
        );
        let end = offset.checked_add(len as u64);
        assert!(
            end.is_some_and(|end| end <= extent.len),
            "a copy of {len} bytes at {offset} leaves the extent of {}",
            extent.len
        );
        (extent.base + offset, extent.stream)
    }

    fn enqueued(
        &mut self,
        call: &'static str,
        code: super::sys::RawResult,
        copied: Copied,
        stream: CUstream,
    ) -> Result<(), DriverError> {
        let Some(event) = self.spare_events.pop() else {
            unreachable!("checked_range saw a spare event");
        };
        // Owned by the queue from here on, whatever the driver answered: the copy may run.
        let raw_event = event.0;
        self.under_way.push_back(UnderWay { event, copied });
        self.driver.check(call, code)?;
        // SAFETY: event and stream are valid and of the same context.
        self.driver.check("cuEventRecord", unsafe {
            (self.driver.api.event_record)(raw_event, stream)
        })
    }
}

impl Drop for CopyQueue {
    fn drop(&mut self) {
        let drained = self.driver.make_current(self.device).and_then(|()| {
            if self.under_way.is_empty() {
                Ok(())
            } else {
                self.finish()
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

/// GPU memory of our own, for benches and checks of the copy path: an [`Extent`] without a target.
#[derive(Debug)]
pub struct DeviceMemory {
    driver: Arc<Driver>,
    extent: Extent,
}

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
        let uuid = driver.devices()[device].uuid;
        Ok(Self {
            driver: Arc::clone(driver),
            extent: Extent {
                device,
                uuid,
                len: len as u64,
                base,
                stream,
            },
        })
    }

    /// The memory as an extent. Copies of it must be finished before this is dropped.
    pub fn extent(&self) -> Extent {
        self.extent
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.driver.make_current(self.extent.device).is_ok() {
            // SAFETY: stream and memory are ours; synchronizing first ends every copy that a queue may have left.
            unsafe {
                (self.driver.api.stream_synchronize)(self.extent.stream);
                (self.driver.api.stream_destroy)(self.extent.stream);
                (self.driver.api.mem_free)(self.extent.base);
            }
        }
    }
}
