//! Buffers that parts hold instead of a copy.
//!
//! In: a buffer whose bytes go to the store as they stand. Out: [`Bytes`] that own it, or the buffer back when no loan is free: then its bytes are copied. The buffer returns to its pool when the
//! last part that holds a slice of it is acknowledged. Nothing can fail, and nothing waits.
//!
//! A pool needs some of its buffers to keep the stages before it moving, however long the store holds parts (see [`super::pack`]); a limit on its loans leaves it those.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

use crate::driver::{BufferPool, PoolBuf};

/// The loans of one pool. Cloning shares them.
#[derive(Debug, Clone)]
pub(super) struct Lender {
    limit: usize,
    out: Arc<AtomicUsize>,
}

/// A buffer in the hands of parts.
struct Loan {
    buffer: PoolBuf,
    len: usize,
    out: Arc<AtomicUsize>,
}

impl Lender {
    /// Lends all buffers of `pool` but `kept`.
    pub(super) fn new(pool: &BufferPool, kept: usize) -> Self {
        Self {
            limit: pool.count().saturating_sub(kept),
            out: Arc::default(),
        }
    }

    /// Most buffers that are lent at once.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// The first `len` bytes of `buffer`, without a copy.
    ///
    /// # Errors
    /// The buffer itself, when no loan is free.
    pub(super) fn lend(&self, buffer: PoolBuf, len: usize) -> Result<Bytes, PoolBuf> {
        let one_more = |out| (out < self.limit).then_some(out + 1);
        match self
            .out
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more)
        {
            Ok(_) => Ok(Bytes::from_owner(Loan {
                buffer,
                len,
                out: Arc::clone(&self.out),
            })),
            Err(_all_are_out) => Err(buffer),
        }
    }
}

impl AsRef<[u8]> for Loan {
    fn as_ref(&self) -> &[u8] {
        &self.buffer[..self.len]
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        // The buffer itself goes back right behind this, without waiting for anything.
        self.out.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loan_ends_with_its_last_slice_and_never_takes_what_is_kept() {
        let pool = BufferPool::new(3, 64, None).unwrap();
        let lender = Lender::new(&pool, 2);
        assert_eq!(lender.limit(), 1);
        let (mut buffer, _) = pool.acquire().unwrap();
        buffer[..4].copy_from_slice(b"four");
        let bytes = lender.lend(buffer, 4).unwrap();
        let slice = bytes.slice(1..3);
        drop(bytes);
        assert_eq!((&slice[..], pool.free_count()), (&b"ou"[..], 2));
        let refused = lender.lend(pool.acquire().unwrap().0, 4).unwrap_err();
        drop(refused);
        drop(slice);
        assert_eq!(pool.free_count(), 3);
        assert!(lender.lend(pool.acquire().unwrap().0, 4).is_ok());
    }

    #[test]
    fn a_pool_of_what_is_kept_lends_nothing() {
        let pool = BufferPool::new(2, 64, None).unwrap();
        for kept in [2, 3] {
            let lender = Lender::new(&pool, kept);
            assert!(lender.lend(pool.acquire().unwrap().0, 1).is_err());
        }
    }
}
