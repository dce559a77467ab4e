//! Where the parts of an upload lie in its file, and how they come to lie one behind the other.
//!
//! In: parts in any order, of which all of ours but the last are as long as each other. Out: an offset for each, which no other part has; in the end a file whose bytes are the object's. Parts of equal lengths are written where
//! they stay. What can fail: the file system; receipts that do not fit what was sent.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::READ_LEN;
use super::names::Doing;
use crate::store::{Key, PART_LEN_MIN, PartNumber, PartReceipt, StoreError, flaw_of_parts};

/// Offset at which a part is kept whose place is not known yet: behind any object, and within the file sizes of common file systems (16 TiB with ext4).
const FAR: u64 = 8 << 40;

#[derive(Debug)]
pub(super) struct Upload {
    pub(super) key: Key,
    pub(super) file: Arc<File>,
    /// Length of the longest part so far. All parts of ours but the last are as long as each other, and then each is written where it stays.
    pub(super) stride: u64,
    /// Where parts are, or are being written.
    pub(super) places: BTreeMap<PartNumber, Range<u64>>,
    /// Those that are there.
    pub(super) parts: BTreeMap<PartNumber, Placed>,
}

impl Upload {
    /// A place for a part, which no other part has: where it belongs in an object of equal parts, or behind everything. The first one to come may be the short last one, and
    /// then where it belongs is not known: unless it is number 1 it goes far away, and is moved when the upload is completed.
    pub(super) fn place(&mut self, number: PartNumber, len: u64) -> u64 {
        if self.places.is_empty() && number.get() > 1 {
            self.stride = 0;
            self.places.insert(number, FAR..FAR.saturating_add(len));
            return FAR;
        }
        self.stride = self.stride.max(len);
        let others = || self.places.iter().filter(|(other, _)| **other != number);
        let belongs = (u64::from(number.get()) - 1).saturating_mul(self.stride);
        let range = belongs..belongs.saturating_add(len);
        let is_free =
            others().all(|(_, taken)| taken.end <= range.start || range.end <= taken.start);
        let offset = match is_free {
            true => belongs,
            false => others().map(|(_, taken)| taken.end).max().unwrap_or(0),
        };
        self.places
            .insert(number, offset..offset.saturating_add(len));
        offset
    }
}

/// A part in the upload's file.
#[derive(Debug, Clone)]
pub(super) struct Placed {
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) crc64: u64,
    pub(super) etag: String,
}

/// The parts that these receipts name.
pub(super) fn named_parts(
    open: &Upload,
    receipts: &[PartReceipt],
    doing: Doing<'_>,
) -> Result<Vec<Placed>, StoreError> {
    let sent = |number| {
        let part = open.parts.get(&number)?;
        Some((part.etag.as_str(), part.len))
    };
    if let Some((_, what)) = flaw_of_parts(receipts, PART_LEN_MIN, sent) {
        return Err(doing.refused(what));
    }
    let named = receipts.iter();
    Ok(named
        .map(|receipt| open.parts[&receipt.number].clone())
        .collect())
}

/// Copies the parts that went far away to where they belong, if all others are where they belong. Whether that was all.
pub(super) fn bring_near(file: &File, parts: &[Placed]) -> io::Result<bool> {
    let mut end = 0;
    let mut far = Vec::new();
    for part in parts {
        if part.offset >= FAR {
            far.push((part, end));
        } else if part.offset != end {
            return Ok(false);
        }
        end += part.len;
    }
    for (part, to) in far {
        copy(file, part, file, to)?;
    }
    Ok(true)
}

/// Parts of unequal lengths, one behind the other.
pub(super) fn join(from: &File, parts: &[Placed], to: &File) -> io::Result<()> {
    let mut end = 0;
    for part in parts {
        copy(from, part, to, end)?;
        end += part.len;
    }
    Ok(())
}

pub(super) fn copy(from: &File, part: &Placed, to: &File, offset: u64) -> io::Result<()> {
    let mut buffer = vec![0; READ_LEN];
    let mut done = 0;
    while done < part.len {
        let len = usize::try_from(part.len - done).map_or(READ_LEN, |left| left.min(READ_LEN));
        from.read_exact_at(&mut buffer[..len], part.offset + done)?;
        to.write_all_at(&buffer[..len], offset + done)?;
        done += len as u64;
    }
    Ok(())
}
