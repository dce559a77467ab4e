//! Host memory in equal buffers, page-locked when a GPU copies into it.
//!
//! In: how many buffers of what length (chunks for the ring, frames, parts). Out: [`PoolBuf`]s, each owned by whoever holds it and back in the pool when dropped. What can fail: pinning
//! (the driver or the kernel's memlock limit), at construction only; waiting for a buffer after the pool was closed.
//!
//! The memory is ordinary memory that is then registered, not `cuMemHostAlloc`'s: registering touched memory is the cheaper of the two (design notes), and the same pool
//! serves commands that run without a GPU. It is not write-combined: the CPU reads every byte of it.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Driver, DriverError};

/// Alignment of the region: a huge page, so that the kernel can back it with few.
const REGION_ALIGN: usize = 2 << 20;
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

/// One allocation, registered with the driver if there is one.
#[derive(Debug)]
struct Region {
    base: NonNull<u8>,
    layout: Layout,
    registered_with: Option<Arc<Driver>>,
}

// SAFETY: the region is plain memory; who may touch which part is settled by PoolBuf ownership (one owner per index).
unsafe impl Send for Region {}
// SAFETY: as above; a shared Region gives out no reference into the memory.
unsafe impl Sync for Region {}

impl BufferPool {
    /// A pool of `count` buffers of `buffer_len` bytes (both at least 1), touched, and pinned with `driver` when one is given (device 0's context must be retained).
    ///
    /// # Errors
    /// [`DriverError::HostMemory`] when the memory cannot be had, [`DriverError::Pin`] when it cannot be pinned.
    pub fn new(
        count: usize,
        buffer_len: usize,
        driver: Option<&Arc<Driver>>,
    ) -> Result<Self, DriverError> {
        let len = count.saturating_mul(buffer_len).max(1);
        let region = Region::new(len, driver)?;
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

    /// Waits for a buffer. The second value is how long that took.
    ///
    /// # Errors
    /// [`PoolClosed`] once [`BufferPool::close`] was called.
    pub fn acquire(&self) -> Result<(PoolBuf, Duration), PoolClosed> {
        let started = Instant::now();
        let mut free = self.inner.lock();
        loop {
            if free.closed {
                return Err(PoolClosed);
            }
            if let Some(index) = free.indices.pop() {
                return Ok((
                    PoolBuf {
                        inner: Arc::clone(&self.inner),
                        index,
                    },
                    started.elapsed(),
                ));
            }
            free = self
                .inner
                .returned
                .wait(free)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A buffer if one is free now and the pool is open.
    pub fn try_acquire(&self) -> Option<PoolBuf> {
        let mut free = self.inner.lock();
        if free.closed {
            return None;
        }
        free.indices.pop().map(|index| PoolBuf {
            inner: Arc::clone(&self.inner),
            index,
        })
    }

    /// Ends every wait, now and later.
    pub fn close(&self) {
        self.inner.lock().closed = true;
        self.inner.returned.notify_all();
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
    fn lock(&self) -> std::sync::MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PoolBuf {
    fn start(&self) -> NonNull<u8> {
        // SAFETY: index < count, so the offset is inside the one allocation of count * buffer_len bytes.
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
        // SAFETY: this buffer is the only owner of its index, the memory was zeroed at allocation and lives as long as `inner`. A copy by the
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

impl Drop for PoolBuf {
    fn drop(&mut self) {
        self.inner.lock().indices.push(self.index);
        self.inner.returned.notify_one();
    }
}

impl Region {
    fn new(len: usize, driver: Option<&Arc<Driver>>) -> Result<Self, DriverError> {
        let no_memory = || DriverError::HostMemory { len };
        let layout = Layout::from_size_align(len, REGION_ALIGN)
            .ok()
            .ok_or_else(no_memory)?;
        // SAFETY: the layout has a length of at least 1.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(no_memory)?;
        let mut region = Self {
            base,
            layout,
            registered_with: None,
        };
        region.touch();
        if let Some(driver) = driver {
            region.register(driver).map_err(|source| DriverError::Pin {
                len,
                source: Box::new(source),
            })?;
        }
        Ok(region)
    }

    /// Makes the kernel give every page now: a page fault after BEGIN would be paid inside the notice.
    fn touch(&mut self) {
        for offset in (0..self.layout.size()).step_by(4096) {
            // SAFETY: the offset is inside the allocation, and nobody else has it yet. Volatile, or the store of a zero over a zero is removed.
            unsafe { self.base.add(offset).write_volatile(0) };
        }
    }

    fn register(&mut self, driver: &Arc<Driver>) -> Result<(), DriverError> {
        driver.make_current(0)?;
        let address = self.base.as_ptr().cast::<c_void>();
        // SAFETY: the range is our own allocation, and stays until `drop` has unregistered it.
        driver.check("cuMemHostRegister", unsafe {
            (driver.api.mem_host_register)(address, self.layout.size(), REGISTER_PORTABLE)
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
                // Memory that the driver still knows must not go back to the allocator.
                tracing::warn!(
                    ?code,
                    "cannot unpin the ring; its memory is kept until exit"
                );
                return;
            }
        }
        // SAFETY: allocated in `new` with this layout, and no buffer is left.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
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
    fn memory_that_is_not_to_be_had_is_no_answer_of_the_driver() {
        let error = BufferPool::new(usize::MAX, 2, None).unwrap_err();
        assert!(matches!(error, DriverError::HostMemory { len: usize::MAX }));
        assert_eq!(error.code(), None);
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
