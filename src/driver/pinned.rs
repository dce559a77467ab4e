//! Host memory in equal buffers, page-locked when a GPU copies into it.
//!
//! In: how many buffers of what length (chunks for the ring, frames, parts). Out: [`PoolBuf`]s, each owned by whoever holds it and back in the pool when dropped. What can fail: pinning
//! (the driver or the kernel's memlock limit), at construction only; waiting for a buffer after the pool was closed.
//!
//! The memory is ordinary memory that is then registered, not `cuMemHostAlloc`'s: registering touched memory is the cheaper of the two (design notes), and the same pool
//! serves commands that run without a GPU. It is not write-combined: the CPU reads every byte of it. It is mapped afresh, asked for in huge pages and touched by several threads,
//! because page by page the kernel gives less than 2 GB/s; those threads run on the NUMA node of the GPU that the memory is for, so that it lies there.

use std::ffi::c_void;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use rustix::process::{Resource, getrlimit};

use super::numa::Node;
use super::{Driver, DriverCode, DriverError};

/// Length and alignment of a huge page.
const HUGE_PAGE: usize = 2 << 20;
/// Least length of a page; every one is touched.
const PAGE: usize = 4 << 10;
/// Bytes that make another touching thread worth its start.
const TOUCH_LEN: usize = 16 << 20;
/// CU_MEMHOSTREGISTER_PORTABLE: pinned for every context, not only the current one.
const REGISTER_PORTABLE: u32 = 1;

/// A fixed number of equal buffers, all allocated at once. Cloning shares the pool.
#[derive(Debug, Clone)]
pub struct BufferPool {
    inner: Arc<Inner>,
}

/// The pool was closed while somebody waited for a buffer: the run is being given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the buffer pool is closed")]
pub struct PoolClosed;

/// One buffer of a [`BufferPool`]. Dropping it gives it back.
#[derive(Debug)]
pub struct PoolBuf {
    inner: Arc<Inner>,
    index: usize,
}

/// A part of a buffer, to read, beside others that read theirs. The buffer goes back to its pool when the last of them is dropped.
#[derive(Debug, Clone)]
pub struct PoolSlice {
    buffer: Arc<PoolBuf>,
    range: Range<usize>,
}

#[derive(Debug)]
struct Inner {
    region: Region,
    count: usize,
    buffer_len: usize,
    free: Mutex<Free>,
    returned: Condvar,
}

#[derive(Debug)]
struct Free {
    indices: Vec<usize>,
    closed: bool,
}

impl Free {
    /// No buffer is free, and one may still come.
    fn is_worth_a_wait(&self) -> bool {
        self.indices.is_empty() && !self.closed
    }
}

/// The driver has no such host memory, or may not have it.
fn is_too_much(error: &DriverError) -> bool {
    matches!(
        error.code(),
        Some(DriverCode::OUT_OF_MEMORY | DriverCode::NOT_PERMITTED)
    )
}

/// What bounds pinned host memory here, for messages.
fn memory_limits() -> String {
    let memlock = getrlimit(Resource::Memlock).current;
    let memlock = memlock.map_or("none".to_owned(), |bytes| format!("{bytes} bytes"));
    let cgroup = std::fs::read_to_string("/sys/fs/cgroup/memory.max")
        .or_else(|_v1| std::fs::read_to_string("/sys/fs/cgroup/memory/memory.limit_in_bytes"));
    let cgroup = cgroup.unwrap_or_else(|_unknown| "unknown".to_owned());
    format!(
        "memlock limit (ulimit -l): {memlock}; cgroup memory limit: {}",
        cgroup.trim()
    )
}

/// One mapping of our own, registered with the driver if there is one.
#[derive(Debug)]
struct Region {
    /// Inside the mapping, at the start of a huge page.
    base: NonNull<u8>,
    len: usize,
    mapping: NonNull<u8>,
    mapping_len: usize,
    registered_with: Option<Arc<Driver>>,
}

// SAFETY: the region is plain memory; who may touch which part is settled by PoolBuf ownership (one owner per index).
unsafe impl Send for Region {}
// SAFETY: as above; a shared Region gives out no reference into the memory.
unsafe impl Sync for Region {}

impl BufferPool {
    /// A pool of `count` buffers of `buffer_len` bytes (both at least 1), touched. With `beside` it is for copies of that device (by its index): near it, and pinned for
    /// every GPU; the device's context must be retained.
    ///
    /// # Errors
    /// [`DriverError::HostMemory`] when the memory cannot be had, [`DriverError::Pin`] when it cannot be pinned.
    pub fn new(
        count: usize,
        buffer_len: usize,
        beside: Option<(&Arc<Driver>, usize)>,
    ) -> Result<Self, DriverError> {
        let len = count.saturating_mul(buffer_len).max(1);
        let region = Region::new(len, beside)?;
        Ok(Self {
            inner: Arc::new(Inner {
                region,
                count,
                buffer_len,
                free: Mutex::new(Free {
                    indices: (0..count).rev().collect(),
                    closed: false,
                }),
                returned: Condvar::new(),
            }),
        })
    }

    /// As [`BufferPool::new`], beside a device, but where the limits on pinned memory are too low with fewer buffers (at least `least`), and where nothing can be pinned with memory that is not: copies are
    /// slower then. What gave way is told in the log.
    ///
    /// # Errors
    /// As [`BufferPool::new`]; [`DriverError::Pin`] only when the driver says something else than that the memory is too much.
    pub fn within_limits(
        count: usize,
        least: usize,
        buffer_len: usize,
        beside: (&Arc<Driver>, usize),
    ) -> Result<Self, DriverError> {
        let mut fewer = count;
        loop {
            let error = match Self::new(fewer, buffer_len, Some(beside)) {
                Err(error @ DriverError::Pin { .. }) if is_too_much(&error) => error,
                made => return made,
            };
            let limits = memory_limits();
            let why = crate::error::one_line(&error);
            if fewer <= least {
                tracing::warn!(
                    "host memory for copies cannot be pinned, so they are slower: {why} ({limits})"
                );
                return Self::new(count, buffer_len, None);
            }
            fewer = (fewer / 2).max(least);
            tracing::warn!(
                "host memory for copies: {why} ({limits}); trying {fewer} buffers instead of {count}"
            );
        }
    }

    /// Waits for a buffer. The second value is how long that took.
    ///
    /// # Errors
    /// [`PoolClosed`] once [`BufferPool::close`] was called.
    pub fn acquire(&self) -> Result<(PoolBuf, Duration), PoolClosed> {
        self.acquire_unless(|_out| false)
    }

    /// As [`BufferPool::acquire`], and waits too while `is_full` says so of the number of buffers that are out. It is asked again whenever one comes back, and at
    /// [`BufferPool::look_again`]. Few buffers that go round stay in the processor's cache.
    ///
    /// # Errors
    /// As [`BufferPool::acquire`].
    pub fn acquire_unless(
        &self,
        is_full: impl Fn(usize) -> bool,
    ) -> Result<(PoolBuf, Duration), PoolClosed> {
        let started = Instant::now();
        let free = self.inner.lock();
        let free = self.inner.returned.wait_while(free, |free| {
            let out = self.inner.count - free.indices.len();
            free.is_worth_a_wait() || !free.closed && is_full(out)
        });
        let free = free.unwrap_or_else(PoisonError::into_inner);
        self.take(free).map(|buffer| (buffer, started.elapsed()))
    }

    /// Waits for a buffer, so long at most. `None` when none was returned in that time.
    ///
    /// # Errors
    /// [`PoolClosed`] once [`BufferPool::close`] was called.
    pub fn acquire_within(&self, patience: Duration) -> Result<Option<PoolBuf>, PoolClosed> {
        let free = self.inner.lock();
        let waited = self
            .inner
            .returned
            .wait_timeout_while(free, patience, |free| free.is_worth_a_wait());
        let (free, _timed_out) = waited.unwrap_or_else(PoisonError::into_inner);
        if free.is_worth_a_wait() {
            return Ok(None);
        }
        self.take(free).map(Some)
    }

    /// A buffer if one is free now and the pool is open.
    pub fn try_acquire(&self) -> Option<PoolBuf> {
        self.take(self.inner.lock()).ok()
    }

    /// A free buffer; none is free in a closed pool.
    fn take(&self, mut free: MutexGuard<'_, Free>) -> Result<PoolBuf, PoolClosed> {
        let index = free.indices.pop().filter(|_| !free.closed);
        index.map_or(Err(PoolClosed), |index| {
            Ok(PoolBuf {
                inner: Arc::clone(&self.inner),
                index,
            })
        })
    }

    /// Makes waits of [`BufferPool::acquire_unless`] ask again.
    pub fn look_again(&self) {
        // Whoever has asked and does not wait yet holds the lock.
        drop(self.inner.lock());
        self.inner.returned.notify_all();
    }

    /// Ends every wait, now and later.
    pub fn close(&self) {
        self.inner.lock().closed = true;
        self.inner.returned.notify_all();
    }

    /// Takes back [`BufferPool::close`], for another run with the same buffers.
    pub fn open_again(&self) {
        self.inner.lock().closed = false;
    }

    /// Buffers in the pool or out of it.
    pub fn count(&self) -> usize {
        self.inner.count
    }

    /// Length of each buffer in bytes.
    pub fn buffer_len(&self) -> usize {
        self.inner.buffer_len
    }

    /// Handles on the pool, buffers in use not counted.
    #[cfg(test)]
    pub(crate) fn handle_count(&self) -> usize {
        Arc::strong_count(&self.inner) - (self.count() - self.free_count())
    }

    /// Buffers that are in the pool now.
    pub(crate) fn free_count(&self) -> usize {
        self.inner.lock().indices.len()
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PoolBuf {
    fn start(&self) -> NonNull<u8> {
        // SAFETY: index < count, so the offset is inside the one mapping of at least count * buffer_len bytes.
        unsafe {
            self.inner
                .region
                .base
                .add(self.index * self.inner.buffer_len)
        }
    }

    /// Address of the first byte, for the driver.
    pub(super) fn as_device_visible(&self) -> *mut c_void {
        self.start().as_ptr().cast()
    }
}

impl Deref for PoolBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: this buffer is the only owner of its index, the memory was mapped as zeros and lives as long as `inner`. A copy by the
        // driver into it is under way only while a CopyQueue owns the buffer, which gives out no reference.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.inner.buffer_len) }
    }
}

impl AsRef<[u8]> for PoolBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl DerefMut for PoolBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and `&mut self` makes the reference unique.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.inner.buffer_len) }
    }
}

impl PoolSlice {
    /// These bytes of a buffer.
    ///
    /// # Panics
    /// When the range is not inside the buffer.
    pub fn new(buffer: Arc<PoolBuf>, range: Range<usize>) -> Self {
        assert!(
            buffer.get(range.clone()).is_some(),
            "bytes {range:?} of a buffer of {}",
            buffer.len()
        );
        Self { buffer, range }
    }

    /// Address of the first byte, for the driver.
    pub(super) fn as_device_visible(&self) -> *mut c_void {
        self.buffer
            .as_device_visible()
            .wrapping_byte_add(self.range.start)
    }
}

impl Deref for PoolSlice {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer[self.range.clone()]
    }
}

impl Drop for PoolBuf {
    fn drop(&mut self) {
        self.inner.lock().indices.push(self.index);
        self.inner.returned.notify_one();
    }
}

impl Region {
    fn new(len: usize, beside: Option<(&Arc<Driver>, usize)>) -> Result<Self, DriverError> {
        let no_memory = || DriverError::HostMemory { len };
        // A shorter one has no room for a huge page, wherever it starts.
        let slack = if len < HUGE_PAGE { 0 } else { HUGE_PAGE };
        let mapping_len = len.checked_add(slack).ok_or_else(no_memory)?;
        // SAFETY: a new private mapping, at an address that the kernel chooses, touches nothing that is there.
        let mapping = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                mapping_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        let mapping = mapping
            .ok()
            .and_then(|address| NonNull::new(address.cast()));
        let mapping: NonNull<u8> = mapping.ok_or_else(no_memory)?;
        let to_huge_page = match slack {
            0 => 0,
            _ => mapping.align_offset(HUGE_PAGE).min(slack),
        };
        let mut region = Self {
            // SAFETY: at most `slack` bytes into a mapping that is `slack` bytes longer than the region.
            base: unsafe { mapping.add(to_huge_page) },
            len,
            mapping,
            mapping_len,
            registered_with: None,
        };
        region.ask_for_huge_pages();
        let node = beside.and_then(|(driver, device)| driver.devices()[device].node.as_ref());
        region.touch(node);
        if let Some((driver, device)) = beside {
            region
                .register(driver, device)
                .map_err(|source| DriverError::Pin {
                    len,
                    source: Box::new(source),
                })?;
        }
        Ok(region)
    }

    /// For the whole huge pages of the region and nothing behind them, so that no more memory is taken than was planned.
    fn ask_for_huge_pages(&self) {
        let whole = self.len - self.len % HUGE_PAGE;
        if whole > 0 {
            // SAFETY: the range is inside our mapping, and the advice changes no byte of it.
            let asked = unsafe { madvise(self.base.as_ptr().cast(), whole, Advice::LinuxHugepage) };
            if let Err(error) = asked {
                tracing::debug!(%error, "no huge pages for buffers");
            }
        }
    }

    /// Makes the kernel give every page now: a page fault after BEGIN would be paid inside the notice. The kernel puts a page where the thread runs that touches it first.
    fn touch(&mut self, node: Option<&Node>) {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = self.len.div_ceil(TOUCH_LEN).min(processors);
        let share = self.len.div_ceil(threads).next_multiple_of(HUGE_PAGE);
        if threads == 1 && node.is_none() {
            return self.touch_share(0..self.len);
        }
        let region = &*self;
        std::thread::scope(|scope| {
            for start in (0..self.len).step_by(share) {
                let range = start..self.len.min(start + share);
                let settle_and_touch = {
                    let range = range.clone();
                    move || {
                        node.inspect(|node| node.settle());
                        region.touch_share(range);
                    }
                };
                let spawned = std::thread::Builder::new().spawn_scoped(scope, settle_and_touch);
                if spawned.is_err() {
                    // No thread to be had: then this one does it, from wherever it runs.
                    region.touch_share(range);
                }
            }
        });
    }

    /// Writes to every page that starts in this range of the region; each share is one thread's.
    fn touch_share(&self, range: Range<usize>) {
        for offset in range.step_by(PAGE) {
            // SAFETY: the offset is inside the mapping, and nobody else has this share yet. Volatile, or the store of a zero over a zero is removed.
            unsafe { self.base.add(offset).write_volatile(0) };
        }
    }

    fn register(&mut self, driver: &Arc<Driver>, device: usize) -> Result<(), DriverError> {
        driver.make_current(device)?;
        let address = self.base.as_ptr().cast::<c_void>();
        // SAFETY: the range is our own mapping, and stays until `drop` has unregistered it.
        driver.check("cuMemHostRegister", unsafe {
            (driver.api.mem_host_register)(address, self.len, REGISTER_PORTABLE)
        })?;
        self.registered_with = Some(Arc::clone(driver));
        Ok(())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(driver) = self.registered_with.take() {
            let address = self.base.as_ptr().cast::<c_void>();
            // SAFETY: registered by us, once. No copy is under way: every buffer is back, and a buffer under a copy is owned by a CopyQueue.
            let code = driver
                .make_current(0)
                .map(|()| unsafe { (driver.api.mem_host_unregister)(address) });
            if !matches!(code, Ok(0)) {
                // Memory that the driver still knows must not be used for anything else.
                tracing::warn!(
                    ?code,
                    "cannot unpin the ring; its memory is kept until exit"
                );
                return;
            }
        }
        // SAFETY: mapped in `new` with this length, and no buffer is left.
        if let Err(error) = unsafe { munmap(self.mapping.as_ptr().cast(), self.mapping_len) } {
            tracing::warn!(%error, "cannot give memory back");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn buffers_do_not_overlap_and_come_back() {
        let pool = BufferPool::new(3, 64, None).unwrap();
        let mut taken: Vec<PoolBuf> = (0..3).map(|_| pool.acquire().unwrap().0).collect();
        assert!(pool.try_acquire().is_none());
        for (value, buffer) in (1_u8..).zip(&mut taken) {
            buffer.fill(value);
        }
        for (value, buffer) in (1_u8..).zip(&taken) {
            assert!(buffer.iter().all(|&byte| byte == value));
            assert_eq!(buffer.len(), 64);
        }
        drop(taken);
        assert_eq!(pool.free_count(), 3);
    }

    #[test]
    fn a_long_pool_is_zeros_from_the_start_of_a_huge_page_on() {
        // Long enough for several touching threads, and for a tail that is no huge page.
        let (count, len) = (3, TOUCH_LEN + 5000);
        let pool = BufferPool::new(count, len, None).unwrap();
        let taken: Vec<PoolBuf> = (0..count).map(|_| pool.acquire().unwrap().0).collect();
        assert!(taken[0].as_ptr().addr().is_multiple_of(HUGE_PAGE));
        for buffer in &taken {
            assert!(buffer.len() == len && buffer.iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn memory_that_is_not_to_be_had_is_no_answer_of_the_driver() {
        let error = BufferPool::new(usize::MAX, 2, None).unwrap_err();
        assert!(matches!(error, DriverError::HostMemory { len: usize::MAX }));
        assert_eq!(error.code(), None);
    }

    #[test]
    fn a_wait_may_have_a_limit() {
        let pool = BufferPool::new(1, 16, None).unwrap();
        let moment = Duration::from_millis(1);
        let held = pool.acquire_within(moment).unwrap();
        assert!(held.is_some());
        assert!(pool.acquire_within(moment).unwrap().is_none());
        drop(held);
        assert!(pool.acquire_within(moment).unwrap().is_some());
        pool.close();
        assert_eq!(pool.acquire_within(moment).err(), Some(PoolClosed));
    }

    #[test]
    fn a_wait_asks_again_whether_enough_are_out() {
        let pool = BufferPool::new(3, 16, None).unwrap();
        let limit = Arc::new(AtomicUsize::new(1));
        let _held = pool.acquire().unwrap();
        let wait = || {
            let (pool, limit) = (pool.clone(), Arc::clone(&limit));
            let (asked, was_asked) = std::sync::mpsc::channel();
            let waiter = std::thread::spawn(move || {
                let is_full = |out: usize| {
                    let is_full = out >= limit.load(Ordering::Relaxed);
                    let _nobody_listens_any_more = asked.send(is_full);
                    is_full
                };
                pool.acquire_unless(is_full).map(|(buffer, _waited)| buffer)
            });
            assert!(was_asked.recv().unwrap(), "it waits");
            waiter
        };
        let waiter = wait();
        limit.store(2, Ordering::Relaxed);
        pool.look_again();
        let second = waiter.join().unwrap().unwrap();
        let waiter = wait();
        drop(second);
        let _second = waiter.join().unwrap().unwrap();
        let waiter = wait();
        pool.close();
        assert_eq!(waiter.join().unwrap().err(), Some(PoolClosed));
    }

    #[test]
    fn closing_ends_a_wait() {
        let pool = BufferPool::new(1, 16, None).unwrap();
        let held = pool.acquire().unwrap();
        let waiter = std::thread::spawn({
            let pool = pool.clone();
            move || pool.acquire().map(|_| ())
        });
        pool.close();
        assert_eq!(waiter.join().unwrap(), Err(PoolClosed));
        drop(held);
        assert!(pool.try_acquire().is_none());
    }
}
