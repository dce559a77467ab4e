//! The memory of another process as it is mapped here, and the operations that mapped it.
//!
//! In: the published parts of a target's memory. Out: one contiguous range of device addresses per GPU. Addresses are only looked up, so an
//! extent needs no contiguous mapping: it is a list of stretches of the target's memory file.

use std::collections::{BTreeMap, HashMap};
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys::{CUcheckpointCustomStorageInfo, CUcheckpointCustomStoragePerDeviceData};

use crate::backing::Backing;
use crate::codes::{Answer, Code};
use crate::control::Part;
use crate::stream::Stream;
use crate::work::Piece;

/// Extents lie from here on, far from every GPU's window, and not canonical either.
const EXTENT_BASE: u64 = 0x0b00_0000_0000_0000;
/// Extents start on multiples of this, with a gap between two, so that running over an end is noticed.
const EXTENT_ALIGNMENT: u64 = 2 << 20;

/// One GPU of the target, mapped here.
#[derive(Debug)]
pub(crate) struct Extent {
    pub(crate) base: u64,
    pub(crate) len: u64,
    /// The stream that the driver gives for the copies; it names the GPU.
    pub(crate) stream: Arc<Stream>,
    backing: Arc<Backing>,
    /// Offset in the extent to the stretch of the memory file.
    parts: BTreeMap<u64, Part>,
    operation: u64,
}

impl Extent {
    /// The stretches of `len` bytes at `offset`; none if they are not all inside.
    pub(crate) fn pieces(&self, offset: u64, len: usize) -> Option<Vec<Piece>> {
        let end = offset
            .checked_add(len as u64)
            .filter(|&end| end <= self.len)?;
        let mut pieces = Vec::new();
        let first = self
            .parts
            .range(..=offset)
            .next_back()
            .map_or(0, |(&start, _)| start);
        for (&start, part) in self.parts.range(first..end) {
            let (from, to) = (start.max(offset), (start + part.len).min(end));
            if from < to {
                let len = usize::try_from(to - from).ok()?;
                pieces.push(Piece {
                    backing: Arc::clone(&self.backing),
                    offset: part.offset + (from - start),
                    len,
                });
            }
        }
        Some(pieces)
    }
}

/// A checkpoint or restore with custom storage that has begun and is not completed.
#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) handle: u64,
    /// The target, in our PID namespace.
    pub(crate) pid: i32,
    /// The number that the target knows it by.
    pub(crate) number: u32,
    pub(crate) streams: Vec<Arc<Stream>>,
    info: Info,
}

/// The struct that the driver allocates for the caller. It stays allocated for ever and is emptied when the operation ends: a program that
/// reads it afterwards finds nothing, rather than memory that now is something else.
#[derive(Debug)]
struct Info(NonNull<CUcheckpointCustomStorageInfo>);

// SAFETY: the pointer is to memory that is never freed; it is only written at the end of the operation, when the caller must not use it.
unsafe impl Send for Info {}

/// All extents and operations of this process.
#[derive(Debug, Default)]
pub(crate) struct Extents {
    by_base: BTreeMap<u64, Extent>,
    operations: HashMap<u64, Operation>,
    /// Bytes of address space given out so far; addresses are never used twice.
    given: u64,
}

impl Extents {
    /// The extent that holds this address.
    pub(crate) fn find(&self, address: u64) -> Option<&Extent> {
        let (_, extent) = self.by_base.range(..=address).next_back()?;
        (address - extent.base < extent.len).then_some(extent)
    }

    /// Maps one GPU's parts and gives the entry for the caller.
    pub(crate) fn add(
        &mut self,
        operation: u64,
        stream: Arc<Stream>,
        handle: u64,
        backing: Backing,
        parts: &[Part],
    ) -> Answer<CUcheckpointCustomStoragePerDeviceData> {
        let mut by_offset = BTreeMap::new();
        let mut len = 0_u64;
        for part in parts {
            let end = part
                .offset
                .checked_add(part.len)
                .ok_or(Code::ILLEGAL_ADDRESS)?;
            if end > backing.len() {
                return Err(Code::ILLEGAL_ADDRESS);
            }
            by_offset.insert(len, *part);
            len += part.len;
        }
        let base = EXTENT_BASE + self.given;
        self.given += len.next_multiple_of(EXTENT_ALIGNMENT) + EXTENT_ALIGNMENT;
        let size = usize::try_from(len).map_err(|_too_large| Code::ILLEGAL_ADDRESS)?;
        let extent = Extent {
            base,
            len,
            stream,
            backing: Arc::new(backing),
            parts: by_offset,
            operation,
        };
        self.by_base.insert(base, extent);
        let stream = std::ptr::without_provenance_mut(usize::try_from(handle).unwrap_or(0));
        Ok(CUcheckpointCustomStoragePerDeviceData {
            devPtr: base,
            size,
            stream,
        })
    }

    /// Notes an operation whose extents are all added, and gives the struct for its caller.
    pub(crate) fn begin(
        &mut self,
        handle: u64,
        (pid, number): (i32, u32),
        streams: Vec<Arc<Stream>>,
        devices: Vec<CUcheckpointCustomStoragePerDeviceData>,
    ) -> *mut CUcheckpointCustomStorageInfo {
        let count = u32::try_from(devices.len()).unwrap_or(u32::MAX);
        let devices = Box::leak(devices.into_boxed_slice());
        let info = Box::leak(Box::new(CUcheckpointCustomStorageInfo {
            handle: std::ptr::without_provenance_mut(usize::try_from(handle).unwrap_or(0)),
            perDeviceData: if count == 0 {
                std::ptr::null_mut()
            } else {
                devices.as_mut_ptr()
            },
            deviceCount: count,
        }));
        let info = NonNull::from(info);
        self.operations.insert(
            handle,
            Operation {
                handle,
                pid,
                number,
                streams,
                info: Info(info),
            },
        );
        info.as_ptr()
    }

    pub(crate) fn operation(&self, handle: u64) -> Option<&Operation> {
        self.operations.get(&handle)
    }

    pub(crate) fn any_operation(&self) -> Option<&Operation> {
        self.operations.values().next()
    }

    pub(crate) fn streams(&self, handle: u64) -> Option<&[Arc<Stream>]> {
        self.operations.get(&handle).map(|o| o.streams.as_slice())
    }

    pub(crate) fn has_stream(&self, id: u64) -> bool {
        self.by_base.values().any(|e| e.stream.id == id)
    }

    pub(crate) fn take_operation(&mut self, handle: u64) -> Option<Operation> {
        self.operations.remove(&handle)
    }

    /// Whether every extent of the operation is still mapped.
    pub(crate) fn is_whole(&self, operation: &Operation) -> bool {
        let mapped = self
            .by_base
            .values()
            .filter(|e| e.operation == operation.handle)
            .count();
        mapped == operation.streams.len()
    }

    /// Unmaps the extents of an operation and empties its struct.
    pub(crate) fn drop_operation(&mut self, operation: &Operation) {
        self.by_base
            .retain(|_, extent| extent.operation != operation.handle);
        let empty = CUcheckpointCustomStorageInfo {
            handle: std::ptr::null_mut(),
            perDeviceData: std::ptr::null_mut(),
            deviceCount: 0,
        };
        // SAFETY: the struct was leaked by `begin`, so the pointer is valid for ever, and the operation is over for its caller.
        unsafe { operation.info.0.write(empty) };
    }

    /// Unmaps what hangs on the primary context of a GPU that goes. The operation stays in the table; completing it is refused.
    pub(crate) fn drop_device(&mut self, ordinal: usize) {
        self.by_base
            .retain(|_, extent| extent.stream.ordinal != ordinal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Vram;

    #[test]
    fn an_extent_is_its_parts_in_a_row() {
        let backing = Backing::create(1 << 20, Vram::Lazy, None).unwrap();
        backing.grow(1 << 20).unwrap();
        let parts = [
            Part { offset: 0, len: 10 },
            Part {
                offset: 4096,
                len: 1,
            },
            Part {
                offset: 8192,
                len: 5,
            },
        ];
        let mut extents = Extents::default();
        let entry = extents
            .add(7, Stream::new(1, 0, 0, 0), 1, backing, &parts)
            .unwrap();
        assert_eq!(entry.size, 16);
        let extent = extents.find(entry.devPtr + 15).unwrap();
        assert!(extents.find(entry.devPtr + 16).is_none());
        let ranges = |offset, len| {
            let pieces = extent.pieces(offset, len)?;
            Some(pieces.iter().map(|p| (p.offset, p.len)).collect::<Vec<_>>())
        };
        assert_eq!(ranges(0, 16), Some(vec![(0, 10), (4096, 1), (8192, 5)]));
        assert_eq!(ranges(9, 3), Some(vec![(9, 1), (4096, 1), (8192, 1)]));
        assert_eq!(ranges(11, 5), Some(vec![(8192, 5)]));
        assert_eq!(ranges(12, 5), None);
        assert_eq!(ranges(16, 0), Some(vec![]));
    }

    #[test]
    fn parts_outside_the_file_are_refused() {
        let backing = Backing::create(1 << 20, Vram::Lazy, None).unwrap();
        backing.grow(4096).unwrap();
        let parts = [Part {
            offset: 4000,
            len: 97,
        }];
        let refused = Extents::default().add(7, Stream::new(1, 0, 0, 0), 1, backing, &parts);
        assert_eq!(refused.unwrap_err(), Code::ILLEGAL_ADDRESS);
    }
}
