//! What a GPU's chunks were when they were read first: memory that stands still is the same when it is read again.
//!
//! In: a chunk's index and digest, of any run over the extent. Out: whether it is what it was. Nothing here can fail, and nothing is allocated after it was made.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::codec::Digest;

/// 64 bits of every chunk's digest, once it was read.
#[derive(Debug)]
pub struct Witness(Vec<AtomicU64>);

/// No chunk was seen yet.
const UNSEEN: u64 = 0;

impl Witness {
    /// For so many chunks at most.
    pub fn new(chunk_count: usize) -> Self {
        Self((0..chunk_count).map(|_| AtomicU64::new(UNSEEN)).collect())
    }

    /// Whether the chunk is what it was when it was read first, if it was.
    pub(super) fn is_the_same(&self, index: u64, digest: Digest) -> bool {
        let slot = usize::try_from(index)
            .ok()
            .and_then(|index| self.0.get(index));
        let Some(slot) = slot else {
            return true;
        };
        let seen = digest.low_bits() | 1;
        let first = slot.compare_exchange(UNSEEN, seen, Ordering::Relaxed, Ordering::Relaxed);
        first.is_ok() || first == Err(seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_that_was_read_is_not_forgotten() {
        let witness = Witness::new(2);
        let (one, other) = (Digest::of(b"one"), Digest::of(b"other"));
        assert!(witness.is_the_same(0, one));
        assert!(witness.is_the_same(0, one));
        assert!(!witness.is_the_same(0, other));
        assert!(witness.is_the_same(1, other), "never read before");
        assert!(
            witness.is_the_same(7, other),
            "not among those that are kept"
        );
    }
}
