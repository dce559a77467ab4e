//! Device memory by address, and page-locked host memory.

use super::{Driver, HostRange, Pointee, WINDOW_BASE, WINDOW_SHIFT, window_start};
use crate::codes::{Answer, Code};
use crate::extent::Extent;
use crate::remote;
use crate::work::Piece;

impl Driver {
    /// Allocates device memory and gives its address.
    ///
    /// # Errors
    /// `INVALID_VALUE` for no bytes; `OUT_OF_MEMORY` if the GPU has not as many left, counting every process on the node.
    pub(crate) fn alloc(&self, ordinal: usize, len: u64) -> Answer<u64> {
        if len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let (free, _) = self.memory(ordinal);
        let granularity = self.config.granularity;
        if len
            .checked_next_multiple_of(granularity)
            .is_none_or(|span| span > free)
        {
            return Err(Code::OUT_OF_MEMORY);
        }
        let window = self.window(ordinal);
        let mut model = self.model();
        let gpu = &mut model.gpus[ordinal];
        let allocation = gpu
            .space
            .alloc(len, granularity, window)
            .ok_or(Code::OUT_OF_MEMORY)?;
        let grown = gpu
            .ensure_backing(window, self.config)
            .and_then(|backing| backing.grow(gpu.space.end()));
        if let Err(code) = grown {
            gpu.space.free(allocation.offset);
            return Err(code);
        }
        model.publish(ordinal);
        Ok(window_start(ordinal) + allocation.offset)
    }

    /// Frees the allocation that starts at `address`, after the work that may use it.
    pub(crate) fn free(&self, address: u64) -> Answer {
        let (ordinal, offset) = self.place_of(address).ok_or(Code::INVALID_VALUE)?;
        self.synchronize_device(ordinal)?;
        let mut model = self.model();
        let gpu = &mut model.gpus[ordinal];
        let allocation = gpu.space.free(offset).ok_or(Code::INVALID_VALUE)?;
        if let Some(backing) = &gpu.backing {
            backing.discard(allocation.offset, allocation.span)?;
        }
        model.publish(ordinal);
        Ok(())
    }

    /// Free and total bytes of a GPU, every process on the node counted.
    pub(crate) fn memory(&self, ordinal: usize) -> (u64, u64) {
        let total = self.config.gpus[ordinal].memory;
        (
            total.saturating_sub(remote::resident_bytes(self.uuid(ordinal), None)),
            total,
        )
    }

    fn place_of(&self, address: u64) -> Option<(usize, u64)> {
        let offset = address.checked_sub(WINDOW_BASE)?;
        let ordinal = usize::try_from(offset >> WINDOW_SHIFT).ok()?;
        (ordinal < self.config.gpus.len()).then_some((ordinal, offset & ((1 << WINDOW_SHIFT) - 1)))
    }

    /// What an address points to.
    pub(crate) fn pointee(&self, address: u64) -> Answer<Pointee> {
        let model = self.model();
        if let Some((ordinal, offset)) = self.place_of(address) {
            let allocation = model.gpus[ordinal]
                .space
                .find(offset)
                .ok_or(Code::INVALID_VALUE)?;
            let base = window_start(ordinal) + allocation.offset;
            return Ok(Pointee::Allocation {
                ordinal,
                base,
                allocation,
            });
        }
        if let Some(extent) = model.extents.find(address) {
            return Ok(Pointee::Extent {
                base: extent.base,
                len: extent.len,
            });
        }
        let host = usize::try_from(address).map_err(|_too_large| Code::INVALID_VALUE)?;
        let (&base, range) = model
            .host
            .range(..=host)
            .next_back()
            .ok_or(Code::INVALID_VALUE)?;
        if host - base < range.len {
            Ok(Pointee::Host {
                base,
                len: range.len,
            })
        } else {
            Err(Code::INVALID_VALUE)
        }
    }

    /// The device memory of a range, for work on a stream of GPU `stream_ordinal`, and where it lies in an extent.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a range that is not inside one allocation or extent; `INVALID_CONTEXT` for an extent of another GPU.
    pub(crate) fn resolve(
        &self,
        address: u64,
        len: usize,
        stream_ordinal: usize,
    ) -> Answer<(Vec<Piece>, Option<u64>)> {
        let model = self.model();
        if let Some((ordinal, offset)) = self.place_of(address) {
            let gpu = &model.gpus[ordinal];
            let allocation = gpu.space.find(offset).ok_or(Code::INVALID_VALUE)?;
            let inside = offset - allocation.offset;
            if inside
                .checked_add(len as u64)
                .is_none_or(|end| end > allocation.len)
            {
                return Err(Code::INVALID_VALUE);
            }
            let backing = gpu.backing.clone().ok_or(Code::INVALID_VALUE)?;
            return Ok((
                vec![Piece {
                    backing,
                    offset,
                    len,
                }],
                None,
            ));
        }
        let extent: &Extent = model.extents.find(address).ok_or(Code::INVALID_VALUE)?;
        let pieces = extent
            .pieces(address - extent.base, len)
            .ok_or(Code::INVALID_VALUE)?;
        if extent.stream.ordinal != stream_ordinal {
            return Err(Code::INVALID_CONTEXT);
        }
        Ok((pieces, Some(address - extent.base)))
    }

    pub(crate) fn add_host(&self, start: usize, len: usize, flags: u32, is_ours: bool) -> Answer {
        let end = start
            .checked_add(len)
            .filter(|_| len > 0)
            .ok_or(Code::INVALID_VALUE)?;
        let mut model = self.model();
        if let Some((&base, range)) = model.host.range(..end).next_back()
            && base + range.len > start
        {
            return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        model.host.insert(
            start,
            HostRange {
                len,
                is_ours,
                flags,
            },
        );
        Ok(())
    }

    /// Forgets a range by its start and gives its length; `is_ours` must be as it was added.
    pub(crate) fn remove_host(&self, start: usize, is_ours: bool) -> Option<usize> {
        let mut model = self.model();
        model.host.get(&start).filter(|r| r.is_ours == is_ours)?;
        model.host.remove(&start).map(|r| r.len)
    }

    /// The flags of the page-locked range that holds this byte.
    pub(crate) fn host_flags(&self, address: usize) -> Option<u32> {
        let model = self.model();
        let (&base, range) = model.host.range(..=address).next_back()?;
        (address - base < range.len).then_some(range.flags)
    }

    /// Whether a host range is page-locked from end to end, so that copies of it need not wait.
    pub(crate) fn is_page_locked(&self, start: usize, len: usize) -> bool {
        let model = self.model();
        let mut at = start;
        while at < start + len {
            match model.host.range(..=at).next_back() {
                Some((&base, range)) if at - base < range.len => at = base + range.len,
                _ => return false,
            }
        }
        true
    }
}
