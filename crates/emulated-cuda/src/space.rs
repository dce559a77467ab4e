//! Where allocations lie in a GPU's address window.
//!
//! In: sizes and addresses of alloc and free calls. Out: offsets in the window. The place of an allocation is a pure function of the
//! sequence of calls (first fit), so a fresh process that makes the same calls gets the same addresses, which is what lets an image of one
//! process go into another.

use std::collections::BTreeMap;

/// Offsets are multiples of this: the page size, since an allocation is released by punching its pages out of the memory file.
const ALIGNMENT: u64 = 4096;

/// One live allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allocation {
    /// From the start of the window, in bytes.
    pub(crate) offset: u64,
    /// As it was asked for, in bytes.
    pub(crate) len: u64,
    /// What it takes in an extent: `len` rounded up to the granularity.
    pub(crate) span: u64,
}

/// The live allocations of one GPU, by offset.
#[derive(Debug, Default)]
pub(crate) struct Space {
    live: BTreeMap<u64, Allocation>,
    used: u64,
}

impl Space {
    /// Takes the first gap that holds `len` bytes rounded up to `granularity`; none if the window of `window` bytes has no such gap.
    pub(crate) fn alloc(&mut self, len: u64, granularity: u64, window: u64) -> Option<Allocation> {
        let span = len.checked_next_multiple_of(granularity)?;
        let room = span.checked_next_multiple_of(ALIGNMENT)?;
        let mut offset = 0;
        for next in self.live.values() {
            if next.offset - offset >= room {
                break;
            }
            offset = (next.offset + next.span).next_multiple_of(ALIGNMENT);
        }
        if offset.checked_add(room)? > window {
            return None;
        }
        let allocation = Allocation { offset, len, span };
        self.live.insert(offset, allocation);
        self.used += span;
        Some(allocation)
    }

    /// Gives up the allocation that starts at `offset`.
    pub(crate) fn free(&mut self, offset: u64) -> Option<Allocation> {
        let allocation = self.live.remove(&offset)?;
        self.used -= allocation.span;
        Some(allocation)
    }

    /// The allocation that holds the byte at `offset`.
    pub(crate) fn find(&self, offset: u64) -> Option<Allocation> {
        let (_, allocation) = self.live.range(..=offset).next_back()?;
        (offset - allocation.offset < allocation.len).then_some(*allocation)
    }

    /// All live allocations in address order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Allocation> + '_ {
        self.live.values().copied()
    }

    /// Bytes in use: the length of this GPU's extent.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// The least file length that holds every live allocation.
    pub(crate) fn end(&self) -> u64 {
        self.live
            .values()
            .next_back()
            .map_or(0, |a| (a.offset + a.span).next_multiple_of(ALIGNMENT))
    }

    /// Forgets every allocation.
    pub(crate) fn clear(&mut self) {
        self.live.clear();
        self.used = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u64 = 1 << 30;

    #[test]
    fn the_same_calls_give_the_same_offsets() {
        let run = || {
            let mut space = Space::default();
            let mut offsets = Vec::new();
            for step in 0..200_u64 {
                let len = 1 + crate::config::mix(step) % 70_000;
                offsets.push(space.alloc(len, 4096, WINDOW).unwrap().offset);
                if step % 3 == 2 {
                    space.free(offsets[usize::try_from(step / 2).unwrap()]);
                }
            }
            (offsets, space.iter().collect::<Vec<_>>())
        };
        assert_eq!(run(), run());
    }

    #[test]
    fn allocations_never_overlap_and_gaps_are_used_again() {
        let mut space = Space::default();
        let a = space.alloc(5000, 1, WINDOW).unwrap();
        let b = space.alloc(1, 1, WINDOW).unwrap();
        let c = space.alloc(4096, 1, WINDOW).unwrap();
        assert_eq!((a.offset, b.offset, c.offset), (0, 8192, 12288));
        assert_eq!(space.used(), 5000 + 1 + 4096);
        space.free(a.offset).unwrap();
        assert_eq!(space.alloc(8193, 1, WINDOW).unwrap().offset, 16384);
        assert_eq!(space.alloc(8192, 1, WINDOW).unwrap().offset, 0);
        assert_eq!(space.end(), 16384 + 12288);
    }

    #[test]
    fn granularity_counts_in_the_extent_but_not_in_the_bounds() {
        let mut space = Space::default();
        let a = space.alloc(1, 2 << 20, WINDOW).unwrap();
        assert_eq!((a.len, a.span, space.used()), (1, 2 << 20, 2 << 20));
        assert_eq!(space.find(0), Some(a));
        assert_eq!(space.find(1), None);
    }

    #[test]
    fn a_full_window_refuses() {
        let mut space = Space::default();
        assert!(space.alloc(WINDOW, 1, WINDOW).is_some());
        assert!(space.alloc(1, 1, WINDOW).is_none());
        assert!(space.alloc(u64::MAX, 4096, WINDOW).is_none());
        assert!(space.free(4096).is_none());
        space.clear();
        assert!(space.alloc(1, 1, WINDOW).is_some());
    }
}
