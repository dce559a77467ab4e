//! Copies between an extent and pinned buffers: asynchronous, on the stream that the driver gave for that GPU, and for the way in on more of our own.
//!
//! In: a buffer and an offset. Out: the same buffer, once the copy has really happened. What can fail: any call. After a failure nothing is known about the copies, so the queue is
//! good for nothing more: every later call answers that first error, and the buffers stay with the queue. When it is dropped, the streams are synchronized before a buffer
//! goes back, and a buffer whose copy may still run is leaked rather than reused.
//!
//! The driver's Complete synchronizes the streams that it gave, and no other. So our own streams start behind the driver's, and [`CopyQueue::finish`] synchronizes every one of them.
//!
//! A queue belongs to one OS thread. Its events are made before the target is locked; from BEGIN on it only enqueues and waits. A bound queue keeps the extent mapped.

use std::collections::VecDeque;
use std::ffi::c_uint;
use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUevent, CUstream};

use super::numa::Node;
use super::process::Mapping;
use super::{Driver, DriverError, Extent, PoolBuf, PoolSlice};

/// CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING: waiting sleeps, and nothing is timed.
const EVENT_FLAGS: c_uint = 1 | 2;
/// CU_STREAM_NON_BLOCKING.
const STREAM_FLAGS: c_uint = 1;
/// CUDA_ERROR_NOT_READY: what an event answers that was not passed yet.
const NOT_READY: u32 = 600;

/// Streams for the way out: the driver's alone. One keeps the copy engine busy, which has the next copy in its queue already.
pub const STREAMS_OUT: usize = 1;
/// Streams for the way in, the driver's included: into the mapping, copies on one stream leave a gap between each other, and 2 to 4 streams were measured best (A10G); the fewest of them, because
/// each is one more to synchronize.
pub const STREAMS_IN: usize = 2;

/// Copies of one GPU, oldest first.
#[derive(Debug)]
pub struct CopyQueue<B = PoolBuf> {
    driver: Arc<Driver>,
    device: usize,
    spare_events: Vec<Event>,
    under_way: VecDeque<UnderWay<B>>,
    /// Beside the one that the extent brings.
    own_streams: Vec<Stream>,
    /// Where our own streams start, on the driver's.
    start: Event,
    /// Copies enqueued so far, which take turns on the streams.
    enqueued: usize,
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
pub struct Copied<B = PoolBuf> {
    /// The buffer, now ours again.
    pub buffer: B,
    /// Where in the extent, in bytes.
    pub offset: u64,
    /// How many bytes.
    pub len: usize,
}

#[derive(Debug)]
struct UnderWay<B> {
    event: Event,
    copied: Copied<B>,
}

/// Host memory that a copy reads or writes.
pub trait HostMemory: sealed::Sealed {}

impl HostMemory for PoolBuf {}
impl HostMemory for PoolSlice {}

mod sealed {
    use std::ffi::c_void;

    use super::{PoolBuf, PoolSlice};

    /// Only memory of a pool: it stays where it is as long as its owner lives.
    pub trait Sealed {
        /// Address of the first byte.
        fn address(&self) -> *mut c_void;
        /// Length in bytes.
        fn len(&self) -> usize;
    }

    impl Sealed for PoolBuf {
        fn address(&self) -> *mut c_void {
            self.as_device_visible()
        }

        fn len(&self) -> usize {
            <[u8]>::len(self)
        }
    }

    impl Sealed for PoolSlice {
        fn address(&self) -> *mut c_void {
            self.as_device_visible()
        }

        fn len(&self) -> usize {
            <[u8]>::len(self)
        }
    }
}

#[derive(Debug)]
struct Event(CUevent);

// SAFETY: an event is a handle; the driver allows its use from any thread.
unsafe impl Send for Event {}

#[derive(Debug)]
struct Stream(CUstream);

// SAFETY: a stream is a handle; the driver allows its use from any thread.
unsafe impl Send for Stream {}

impl<B: HostMemory> CopyQueue<B> {
    /// A queue for up to `depth` copies under way on `device`, which take turns on so many `streams` (at least 1, the driver's; see [`STREAMS_OUT`] and [`STREAMS_IN`]), not
    /// bound to an extent yet. The device's context must be retained.
    ///
    /// # Errors
    /// [`DriverError::Call`] when an event or a stream cannot be made.
    pub fn prepare(
        driver: &Arc<Driver>,
        device: usize,
        depth: usize,
        streams: usize,
    ) -> Result<Self, DriverError> {
        driver.make_current(device)?;
        let new_event = || {
            let mut event: CUevent = std::ptr::null_mut();
            // SAFETY: the out pointer is valid for the call.
            driver.check("cuEventCreate", unsafe {
                (driver.api.event_create)(&raw mut event, EVENT_FLAGS)
            })?;
            Ok::<_, DriverError>(Event(event))
        };
        let mut queue = Self {
            driver: Arc::clone(driver),
            device,
            spare_events: Vec::with_capacity(depth),
            under_way: VecDeque::with_capacity(depth),
            own_streams: Vec::new(),
            start: new_event()?,
            enqueued: 0,
            bound: None,
            failed: None,
        };
        for _ in 0..depth {
            queue.spare_events.push(new_event()?);
        }
        for _ in 1..streams {
            queue.own_streams.push(Stream(new_stream(driver)?));
        }
        Ok(queue)
    }

    /// Binds the queue to the extent that it copies from or to, and the calling thread to the GPU's context and to the processors near it.
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
        self.driver.devices()[self.device]
            .node
            .inspect(Node::settle);
        let started = self.driver.make_current(self.device).and_then(|()| {
            // What the driver itself may have enqueued on its stream comes before every copy, on whatever stream.
            let (start, given) = (self.start.0, extent.mapping.stream);
            if !self.own_streams.is_empty() {
                // SAFETY: event and stream are valid and of the same context.
                let recorded = unsafe { (self.driver.api.event_record)(start, given) };
                self.driver.check("cuEventRecord", recorded)?;
            }
            self.own_streams.iter().try_for_each(|own| {
                // SAFETY: as above; no flags.
                let behind = unsafe { (self.driver.api.stream_wait_event)(own.0, start, 0) };
                self.driver.check("cuStreamWaitEvent", behind)
            })
        });
        self.settle(started)?;
        self.bound = Some(extent);
        Ok(())
    }

    /// Whether no copy is under way.
    pub fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Copies that are under way, or done but not waited for.
    pub fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// Whether another copy may be enqueued.
    pub fn has_room(&self) -> bool {
        !self.spare_events.is_empty()
    }

    /// Enqueues a copy of the first `len` bytes of `buffer` to `offset` of the extent, and returns at once.
    ///
    /// # Errors
    /// [`DriverError::Call`]; the buffer is then kept until the queue is dropped.
    ///
    /// # Panics
    /// When the queue is not bound or has no room, the range is outside the extent, or `len` is longer than the buffer.
    pub fn copy_in(&mut self, buffer: B, offset: u64, len: usize) -> Result<(), DriverError> {
        self.enqueue(Direction::In, buffer, offset, len)
    }

    /// Waits for the oldest copy. `None` when none is under way.
    ///
    /// # Errors
    /// [`DriverError::Call`]; the buffer is then kept until the queue is dropped.
    pub fn wait_oldest(&mut self) -> Result<Option<Copied<B>>, DriverError> {
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

    /// Whether the oldest copy has happened, without waiting for it. There is none: it has.
    ///
    /// # Errors
    /// [`DriverError::Call`]; the buffer is then kept until the queue is dropped.
    pub fn oldest_is_done(&mut self) -> Result<bool, DriverError> {
        self.usable()?;
        let Some(oldest) = self.under_way.front() else {
            return Ok(true);
        };
        // SAFETY: as in `wait_oldest`.
        let code = unsafe { (self.driver.api.event_query)(oldest.event.0) };
        if code == NOT_READY {
            return Ok(false);
        }
        let asked = self.driver.check("cuEventQuery", code);
        self.settle(asked)?;
        Ok(true)
    }

    /// Synchronizes the streams: after success every copy has happened.
    ///
    /// # Errors
    /// [`DriverError::Call`] of any copy that went wrong on a stream.
    pub fn finish(&mut self) -> Result<(), DriverError> {
        self.usable()?;
        let drained = self.drain();
        self.settle(drained)
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

    fn checked_range(&self, buffer: &B, offset: u64, len: usize) -> (CUdeviceptr, CUstream) {
        let extent = self.bound.as_ref();
        let extent = extent.expect("a copy queue is bound before it copies");
        let mapping = &extent.mapping;
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
        let turn = self.enqueued % (1 + self.own_streams.len());
        let stream = self.streams(extent).nth(turn).unwrap_or(mapping.stream);
        (mapping.base + offset, stream)
    }

    fn enqueue(
        &mut self,
        direction: Direction,
        buffer: B,
        offset: u64,
        len: usize,
    ) -> Result<(), DriverError> {
        self.usable()?;
        let (device, stream) = self.checked_range(&buffer, offset, len);
        let event = self
            .spare_events
            .pop()
            .expect("no more copies under way than the queue was prepared for");
        let (host, raw_event) = (buffer.address(), event.0);
        self.enqueued += 1;
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

impl<B> CopyQueue<B> {
    /// Synchronizes the streams, whatever went wrong before: even a copy without an event has happened then.
    fn drain(&mut self) -> Result<(), DriverError> {
        let Some(extent) = &self.bound else {
            return Ok(());
        };
        for stream in self.streams(extent) {
            // SAFETY: our own streams live as long as this queue, the driver's as long as the extent, which we hold.
            self.driver.check("cuStreamSynchronize", unsafe {
                (self.driver.api.stream_synchronize)(stream)
            })?;
        }
        while let Some(done) = self.under_way.pop_front() {
            self.spare_events.push(done.event);
        }
        Ok(())
    }

    /// The streams that copies of this extent take turns on, the driver's first.
    fn streams(&self, extent: &Extent) -> impl Iterator<Item = CUstream> {
        let own = self.own_streams.iter().map(|stream| stream.0);
        std::iter::once(extent.mapping.stream).chain(own)
    }
}

impl CopyQueue {
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
}

impl<B> Drop for CopyQueue<B> {
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
        for stream in self.own_streams.drain(..) {
            // SAFETY: the stream is ours; what may still run on it runs on.
            let _ended_with_the_context = unsafe { (self.driver.api.stream_destroy)(stream.0) };
        }
        for event in self.spare_events.drain(..).chain([Event(self.start.0)]) {
            // SAFETY: the event is ours and no copy waits for it.
            let _ended_with_the_context = unsafe { (self.driver.api.event_destroy)(event.0) };
        }
    }
}

/// A stream of the device whose context is current.
fn new_stream(driver: &Driver) -> Result<CUstream, DriverError> {
    let mut stream: CUstream = std::ptr::null_mut();
    // SAFETY: the out pointer is valid for the call.
    driver.check("cuStreamCreate", unsafe {
        (driver.api.stream_create)(&raw mut stream, STREAM_FLAGS)
    })?;
    Ok(stream)
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
        let stream = new_stream(driver).inspect_err(|_failed| {
            // SAFETY: allocated above, used by nobody.
            let _reported_by_the_first_error = unsafe { (driver.api.mem_free)(base) };
        })?;
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
        let mut queue = CopyQueue::prepare(driver, 0, 2, STREAMS_OUT).unwrap();
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
    fn our_own_stream_starts_behind_the_drivers_and_is_synchronized_too() {
        let driver = fake::driver();
        let pool = BufferPool::new(2, 32, None).unwrap();
        let memory = DeviceMemory::allocate(&driver, 0, 64).unwrap();
        let mut queue = CopyQueue::prepare(&driver, 0, 2, STREAMS_IN).unwrap();
        let extra = u32::try_from(STREAMS_IN).unwrap() - 1;
        queue.bind(memory.extent()).unwrap();
        assert_eq!(fake::calls("cuStreamWaitEvent"), extra);
        queue.copy_in(pool.try_acquire().unwrap(), 0, 32).unwrap();
        queue.copy_in(pool.try_acquire().unwrap(), 32, 32).unwrap();
        queue.finish().unwrap();
        assert_eq!(fake::calls("cuStreamSynchronize"), 1 + extra);
        drop(queue);
        assert_eq!(fake::calls("cuStreamDestroy"), extra);
        assert_eq!(fake::calls("cuEventDestroy"), 3);
    }

    #[test]
    fn a_look_at_the_oldest_copy_does_not_wait() {
        let driver = fake::driver();
        let pool = BufferPool::new(1, 64, None).unwrap();
        let (mut queue, _extent) = bound(&driver);
        assert!(queue.oldest_is_done().unwrap(), "there is none");
        queue.copy_out(pool.try_acquire().unwrap(), 0, 64).unwrap();
        fake::answer("cuEventQuery", NOT_READY);
        assert!(!queue.oldest_is_done().unwrap());
        fake::answer("cuEventQuery", 0);
        assert!(queue.oldest_is_done().unwrap());
        fake::answer("cuEventQuery", 700);
        assert_eq!(code(&queue.oldest_is_done().unwrap_err()), 700);
        assert_eq!(code(&queue.wait_oldest().unwrap_err()), 700);
        assert_eq!(fake::calls("cuEventSynchronize"), 0);
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
