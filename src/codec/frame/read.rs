//! Frame → chunk.
//!
//! In: a frame that nobody vouches for, and what the frame table says about it. Out: the chunk, in the caller's buffer. Frames of the shape that [`write`](super::write)
//! gives, libzstd's Huffman-only ones among them, are read by our own reader: raw planes are joined from where they lie, Huffman codes are undone several at a time, and
//! each unit's digest is taken while it is in the cache. The reader gives up at anything else, for whatever reason, and libzstd reads the frame from its start: it knows all of the
//! format, and the reasons. Where the reader does not give up, libzstd would give the same bytes (the tests say so).
//!
//! Our reader passes over the content checksum: the digest covers the same bytes. What can fail: [`FrameError`].

use std::fmt;

use super::super::digest::Digesting;
use super::super::huffman::Table;
use super::super::planes::{self, Filter, PLANE_LEN};
use super::libzstd::Decompressor;
use super::{
    BLOCK_HEADER_LEN, BLOCK_LEN_MAX, BlockType, FrameError, Header, check_header, checksum_len,
};
use crate::codec::Digest;

/// Reads frames; one per thread.
pub struct Decoder {
    reader: Reader,
    libzstd: Decompressor,
}

/// No decoder could be made: memory is short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("libzstd cannot make a decoder: out of memory")]
pub struct DecoderError;

impl Decoder {
    /// Bytes of memory that one decoder takes at most: a unit, libzstd's context and its window for frames with a filter. Frames without one are decoded in place.
    /// A test holds the number to the library.
    pub const CONTEXT_BYTES: u64 = 3 << 19;

    /// A decoder.
    ///
    /// # Errors
    /// When memory is short.
    pub fn new() -> Result<Self, DecoderError> {
        Ok(Self {
            reader: Reader::new(),
            libzstd: Decompressor::new().ok_or(DecoderError)?,
        })
    }

    /// Fills `out` with the chunk that `frame` holds behind `filter`, if `frame` is exactly one frame, of exactly `out.len()` raw bytes, with this digest.
    ///
    /// # Errors
    /// [`FrameError`] names what differs; `out` then has unspecified content that must not be used.
    pub fn decode(
        &mut self,
        frame: &[u8],
        filter: Filter,
        digest: Digest,
        out: &mut [u8],
    ) -> Result<(), FrameError> {
        let header = check_header(frame, filter, out.len() as u64)?;
        let found = match self.reader.read(frame, header, filter, out) {
            Some(found) => found,
            None => {
                self.read_with_libzstd(frame, filter, out)?;
                Digest::of(out)
            }
        };
        if found != digest {
            return Err(FrameError::Digest {
                found,
                expected: digest,
            });
        }
        Ok(())
    }

    /// Bytes of memory that it takes at this moment.
    #[cfg(test)]
    pub(super) fn sizeof(&self) -> usize {
        self.reader.content.len() + self.libzstd.sizeof()
    }

    fn read_with_libzstd(
        &mut self,
        frame: &[u8],
        filter: Filter,
        out: &mut [u8],
    ) -> Result<(), FrameError> {
        if filter == Filter::None {
            return self.libzstd.whole(frame, out);
        }
        let width = filter.width();
        let mut content = self.libzstd.content(frame)?;
        for unit in out.chunks_mut(width * PLANE_LEN) {
            let scratch = &mut self.reader.content[..unit.len()];
            content.read(scratch)?;
            let plane_len = unit.len() / width;
            let parts = planes_of(scratch, plane_len, &[None; 4]);
            join_unit(filter, &parts, &scratch[plane_len * width..], unit);
        }
        content.finish()
    }
}

impl fmt::Debug for Decoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decoder").finish_non_exhaustive()
    }
}

/// The planes of a unit's content, those that lie elsewhere taken from there.
fn planes_of<'a>(
    content: &'a [u8],
    plane_len: usize,
    elsewhere: &[Option<&'a [u8]>; 4],
) -> [&'a [u8]; 4] {
    std::array::from_fn(|plane| {
        let start = plane * plane_len;
        elsewhere[plane]
            .or_else(|| content.get(start..start + plane_len))
            .unwrap_or_default()
    })
}

fn join_unit(filter: Filter, parts: &[&[u8]; 4], tail: &[u8], unit: &mut [u8]) {
    let body_len = unit.len() - tail.len();
    let (body, end) = unit.split_at_mut(body_len);
    if !body.is_empty() {
        planes::join(filter, parts, body);
    }
    end.copy_from_slice(tail);
}

/// Our own reader of our own frames.
pub(super) struct Reader {
    table: Table,
    content: Box<[u8]>,
}

/// What a block holds.
enum Block<'a> {
    Raw(&'a [u8]),
    Rle {
        value: u8,
        len: usize,
    },
    /// Huffman-coded literals and nothing else: the streams of the table last read, and how many bytes they give.
    Literals {
        streams: &'a [u8],
        len: usize,
    },
}

impl Block<'_> {
    fn len(&self) -> usize {
        match self {
            Block::Raw(bytes) => bytes.len(),
            Block::Rle { len, .. } | Block::Literals { len, .. } => *len,
        }
    }
}

/// The blocks of a frame, not looked at yet.
struct Blocks<'a> {
    rest: &'a [u8],
    /// Whether this frame brought a table yet, which later blocks may refer to.
    has_table: bool,
    ended: bool,
}

impl Reader {
    pub(super) fn new() -> Self {
        Self {
            table: Table::new(),
            content: vec![0; 4 * PLANE_LEN].into(),
        }
    }

    /// The digest of the chunk that now fills `out`. `None` when the frame is not of our shape, or damaged.
    pub(super) fn read(
        &mut self,
        frame: &[u8],
        header: Header,
        filter: Filter,
        out: &mut [u8],
    ) -> Option<Digest> {
        let blocks_end = frame.len().checked_sub(checksum_len(header.has_checksum))?;
        let mut blocks = Blocks {
            rest: frame.get(header.len..blocks_end)?,
            has_table: false,
            ended: false,
        };
        let mut digest = Digesting::new();
        for unit in out.chunks_mut(filter.width() * PLANE_LEN) {
            match filter {
                Filter::None => self.plain_unit(&mut blocks, unit)?,
                _ => self.unit(&mut blocks, filter, unit)?,
            }
            digest.update(unit);
        }
        // The last block may be an empty one.
        if !blocks.ended && blocks.next(&mut self.table)?.len() > 0 {
            return None;
        }
        (blocks.ended && blocks.rest.is_empty()).then(|| digest.finish())
    }

    fn plain_unit(&mut self, blocks: &mut Blocks<'_>, mut unit: &mut [u8]) -> Option<()> {
        while !unit.is_empty() {
            let block = blocks.next(&mut self.table)?;
            let (part, rest) = unit.split_at_mut_checked(block.len())?;
            if part.is_empty() {
                return None;
            }
            self.fill(&block, part)?;
            unit = rest;
        }
        Some(())
    }

    fn unit(&mut self, blocks: &mut Blocks<'_>, filter: Filter, unit: &mut [u8]) -> Option<()> {
        let width = filter.width();
        let plane_len = unit.len() / width;
        let mut elsewhere = [None; 4];
        let mut at = 0;
        // So many zeros from the start are not written to the content yet: a unit that is all zero needs no join.
        let mut zeros = 0;
        while at < unit.len() {
            let block = blocks.next(&mut self.table)?;
            let len = block.len();
            if len == 0 || len > unit.len() - at {
                return None;
            }
            match block {
                Block::Rle { value: 0, .. } if zeros == at => zeros += len,
                // A plane that is one raw block stays where it is.
                Block::Raw(plane) if len == plane_len && at % len == 0 && at / len < width => {
                    elsewhere[at / len] = Some(plane);
                }
                _ => {
                    let mut content = std::mem::take(&mut self.content);
                    let filled = self.fill(&block, &mut content[at..at + len]);
                    self.content = content;
                    filled?;
                }
            }
            at += len;
        }
        if zeros == unit.len() {
            unit.fill(0);
            return Some(());
        }
        self.content[..zeros].fill(0);
        let parts = planes_of(&self.content, plane_len, &elsewhere);
        let tail = &self.content[plane_len * width..unit.len()];
        join_unit(filter, &parts, tail, unit);
        Some(())
    }

    /// Writes what the block holds, which is as long as `out`.
    fn fill(&self, block: &Block<'_>, out: &mut [u8]) -> Option<()> {
        match block {
            Block::Raw(bytes) => out.copy_from_slice(bytes),
            Block::Rle { value, .. } => out.fill(*value),
            Block::Literals { streams, .. } => {
                if !self.table.decode(streams, out) {
                    return None;
                }
            }
        }
        Some(())
    }
}

impl<'a> Blocks<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        Some(taken)
    }

    fn next(&mut self, table: &mut Table) -> Option<Block<'a>> {
        if self.ended {
            return None;
        }
        let header: [u8; BLOCK_HEADER_LEN] = self.take(BLOCK_HEADER_LEN)?.try_into().ok()?;
        let [h0, h1, h2] = header;
        let header = u32::from_le_bytes([h0, h1, h2, 0]);
        self.ended = header & 1 == 1;
        let len = (header >> 3) as usize;
        if len > BLOCK_LEN_MAX {
            return None;
        }
        match header >> 1 & 3 {
            raw if raw == BlockType::Raw as u32 => self.take(len).map(Block::Raw),
            rle if rle == BlockType::Rle as u32 => {
                let value = *self.take(1)?.first()?;
                Some(Block::Rle { value, len })
            }
            compressed if compressed == BlockType::Compressed as u32 => {
                let block = self.take(len)?;
                self.literals(block, table)
            }
            _ => None,
        }
    }

    /// A compressed block of Huffman-coded literals in four streams, without sequences (RFC 8878, section 3.1.1.3).
    fn literals(&mut self, block: &'a [u8], table: &mut Table) -> Option<Block<'a>> {
        const WITH_TABLE: u8 = 2;
        const TREELESS: u8 = 3;
        let first = *block.first()?;
        let (header_len, size_bits) = match first >> 2 & 3 {
            1 => (3, 10),
            2 => (4, 14),
            3 => (5, 18),
            _ => return None,
        };
        let mut header = [0; 8];
        header[..header_len].copy_from_slice(block.get(..header_len)?);
        let sizes = u64::from_le_bytes(header) >> 4;
        let mask = (1u64 << size_bits) - 1;
        let len = usize::try_from(sizes & mask).ok()?;
        let coded_len = usize::try_from(sizes >> size_bits & mask).ok()?;
        let (mut streams, sequences) = block[header_len..].split_at_checked(coded_len)?;
        if sequences != [0] || len > BLOCK_LEN_MAX {
            return None;
        }
        match first & 3 {
            WITH_TABLE => {
                // A table that does not read leaves none.
                self.has_table = false;
                let table_len = table.read(streams)?;
                streams = streams.get(table_len..)?;
                self.has_table = true;
            }
            TREELESS if self.has_table => {}
            _ => return None,
        }
        Some(Block::Literals { streams, len })
    }
}
