//! The shape of a frame: one chunk as one zstd frame, whoever made it.
//!
//! ```text
//! header | block | block | … | [content checksum]
//! ```
//! In: a chunk. Out ([`Encoder`]): the cheapest of the frames that it may become. All zero: RLE blocks, and nothing else is done for it. Not worth compressing: raw
//! blocks, of which nothing is written at all: [`raw_pieces`] puts header, block headers and slices of the chunk in a row. Otherwise a compressed frame, behind a
//! [`Filter`] or not. Back ([`Decoder`]): header and extent are checked against what the frame table promised *before* anything is decoded; then the blocks that we
//! write are read by hand and anything else by libzstd, into the caller's buffer and nowhere else, and the digest is compared.
//!
//! Every frame, however made, is one that any zstd reads with its default limits (checked against the `zstd` tool: hand-made frames with longer blocks or
//! larger windows are refused by it): content size present, no dictionary, blocks of at most 128 KiB, and a window of at most 8 MiB. A frame with a filter decodes to the
//! filter's content, unit by unit (`docs/format.md`), and has no matches further back than 128 KiB. Content checksums (XXH64) stand in the frames of an encoder that may use no filter:
//! they are for other tools. Anywhere else they would cost a third of what a raw frame costs, and the digest and the store's checksum cover the same bytes.
//!
//! What can fail: making a context (memory), and the way back ([`FrameError`]). Encoding cannot: where compression fails, the frame is raw.

mod encode;
mod libzstd;
mod read;
mod write;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash64;

use super::planes::{Filter, PLANE_LEN};
use super::{Crc64, Digest};

pub use encode::{Body, Encoded, Encoder, EncoderError, FilterChoice, Level, PlaneCoder, Settings};
pub use read::{Decoder, DecoderError};

/// How a frame was made. All three are valid zstd frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FrameKind {
    /// RLE blocks of a chunk that is all zero.
    Zero,
    /// Raw blocks.
    Raw,
    /// Compressed.
    Zstd,
}

impl FrameKind {
    /// How a frame of this kind, behind this filter, was made; in a word.
    pub fn name(self, filter: Filter) -> &'static str {
        match (self, filter) {
            (FrameKind::Zero, _) => "zero",
            (FrameKind::Raw, _) => "raw",
            (FrameKind::Zstd, Filter::None) => "zstd",
            (FrameKind::Zstd, Filter::Planes2) => "2 planes",
            (FrameKind::Zstd, Filter::Planes2Rotated) => "2 planes, rotated",
            (FrameKind::Zstd, Filter::Planes4) => "4 planes",
            (FrameKind::Zstd, Filter::Planes4Rotated) => "4 planes, rotated",
        }
    }
}

const MAGIC: u32 = 0xFD2F_B528;
/// Blocks longer than this are not valid zstd.
pub(super) const BLOCK_LEN_MAX: usize = 128 * 1024;
/// A plane of a full unit is one block.
const _: () = assert!(PLANE_LEN == BLOCK_LEN_MAX);
/// Largest window that we write or accept; libzstd's own decoders promise to take it whatever their limits.
const WINDOW_LOG_MAX: u32 = 23;
const WINDOW_LEN_MAX: u64 = 1 << WINDOW_LOG_MAX;
/// Largest window of a frame with a filter: a reader undoes the filter unit by unit and needs no more history than that.
const FILTERED_WINDOW_LOG: u32 = 17;
/// Magic, descriptor, window, content size.
pub(super) const HAND_HEADER_LEN: usize = 10;
pub(super) const BLOCK_HEADER_LEN: usize = 3;
const CONTENT_CHECKSUM_LEN: usize = 4;

/// Longest chunk, in bytes: what the image format allows.
pub const CHUNK_LEN_MAX: u64 = 64 << 20;
/// Shortest chunk length, in bytes, that the image format allows (an extent's last chunk may be shorter).
pub const CHUNK_LEN_MIN: u64 = 1 << 20;

/// Most bytes of any frame of a chunk of `raw_len` bytes: that of its raw frame with a content checksum.
pub const fn frame_bound(raw_len: usize) -> usize {
    raw_frame_len(raw_len, true)
}

/// Bytes of the raw frame of a chunk of `raw_len` bytes.
pub const fn raw_frame_len(raw_len: usize, has_checksum: bool) -> usize {
    let blocks_len = raw_block_count(raw_len) * BLOCK_HEADER_LEN + raw_len;
    HAND_HEADER_LEN + blocks_len + checksum_len(has_checksum)
}

/// Bytes behind the blocks.
const fn checksum_len(has_checksum: bool) -> usize {
    if has_checksum {
        CONTENT_CHECKSUM_LEN
    } else {
        0
    }
}

/// Fewest bytes of any valid frame with a content size: header 6, one block 3.
pub const FRAME_LEN_MIN: u32 = 9;

/// An empty frame still has one (empty) block.
const fn raw_block_count(raw_len: usize) -> usize {
    match raw_len.div_ceil(BLOCK_LEN_MAX) {
        0 => 1,
        count => count,
    }
}

const CHECKSUM_FLAG: u8 = 1 << 2;
const RESERVED_FLAG: u8 = 1 << 3;
const SINGLE_SEGMENT_FLAG: u8 = 1 << 5;
const DICTIONARY_FLAGS: u8 = 0b11;

/// Frames without matches need no history: a 128 KiB window lets a streaming reader get by with less than 1 MiB, whatever the chunk's length.
pub(super) fn hand_header(raw_len: usize, has_checksum: bool) -> [u8; HAND_HEADER_LEN] {
    const FOUR_BYTE_SIZE: u8 = 0x80; // no dictionary
    const WINDOW_128_KIB: u8 = (17 - 10) << 3;
    let [m0, m1, m2, m3] = MAGIC.to_le_bytes();
    let [s0, s1, s2, s3] = u32::try_from(raw_len)
        .expect("a chunk is at most 64 MiB long")
        .to_le_bytes();
    let flag = if has_checksum { CHECKSUM_FLAG } else { 0 };
    let descriptor = FOUR_BYTE_SIZE | flag;
    [m0, m1, m2, m3, descriptor, WINDOW_128_KIB, s0, s1, s2, s3]
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockType {
    Raw = 0,
    Rle = 1,
    Compressed = 2,
}

fn block_header(block_type: BlockType, len: usize, last: bool) -> [u8; BLOCK_HEADER_LEN] {
    let len = u32::try_from(len).expect("a block is at most 128 KiB long");
    let [h0, h1, h2, _] = (u32::from(last) | (block_type as u32) << 1 | len << 3).to_le_bytes();
    [h0, h1, h2]
}

/// The low 32 bits of the content's XXH64, in the making.
#[derive(Debug)]
struct ContentChecksum(XxHash64);

impl ContentChecksum {
    fn new() -> Self {
        Self(XxHash64::with_seed(0))
    }

    fn update(&mut self, bytes: &[u8]) {
        std::hash::Hasher::write(&mut self.0, bytes);
    }

    fn finish(&self) -> u32 {
        let [c0, c1, c2, c3, ..] = std::hash::Hasher::finish(&self.0).to_le_bytes();
        u32::from_le_bytes([c0, c1, c2, c3])
    }
}

/// What stands between the blocks' contents of a raw frame: before block `index` of `raw_len` bytes.
pub(super) fn raw_block_header(raw_len: usize, index: usize) -> [u8; BLOCK_HEADER_LEN] {
    let start = index * BLOCK_LEN_MAX;
    let len = (raw_len - start).min(BLOCK_LEN_MAX);
    block_header(BlockType::Raw, len, start + len == raw_len)
}

/// The raw frame of `chunk` as pieces that share its memory: header and block headers in pieces of their own, slices of the chunk between them, and the `checksum` that the
/// encoder said ([`Body::Raw`]), if it did.
pub fn raw_pieces(chunk: Bytes, checksum: Option<u32>) -> impl Iterator<Item = Bytes> {
    /// The header of every block but the last.
    static FULL_BLOCK: [u8; BLOCK_HEADER_LEN] = {
        let [h0, h1, h2, ..] = (BLOCK_LEN_MAX << 3).to_le_bytes();
        [h0, h1, h2]
    };
    let raw_len = chunk.len();
    let count = raw_block_count(raw_len);
    let blocks = (0..count).flat_map(move |index| {
        let header = raw_block_header(raw_len, index);
        let before = match index {
            0 => Bytes::from([&hand_header(raw_len, checksum.is_some()), &header[..]].concat()),
            _ if index + 1 < count => Bytes::from_static(&FULL_BLOCK),
            _ => Bytes::copy_from_slice(&header),
        };
        let start = index * BLOCK_LEN_MAX;
        let end = raw_len.min(start + BLOCK_LEN_MAX);
        [before, chunk.slice(start..end)]
    });
    let checksum = checksum.map(|checksum| Bytes::copy_from_slice(&checksum.to_le_bytes()));
    blocks.chain(checksum).filter(|piece| !piece.is_empty())
}

/// Writes the frame of [`raw_pieces`] to the start of `out`, and says how long it is: [`raw_frame_len`].
///
/// # Panics
/// When `out` is shorter than that.
pub fn write_raw(chunk: &[u8], checksum: Option<u32>, out: &mut [u8]) -> usize {
    let mut len = 0;
    let mut put = |bytes: &[u8]| {
        out[len..len + bytes.len()].copy_from_slice(bytes);
        len += bytes.len();
    };
    put(&hand_header(chunk.len(), checksum.is_some()));
    for index in 0..raw_block_count(chunk.len()) {
        put(&raw_block_header(chunk.len(), index));
        put(&chunk[index * BLOCK_LEN_MAX..chunk.len().min((index + 1) * BLOCK_LEN_MAX)]);
    }
    if let Some(checksum) = checksum {
        put(&checksum.to_le_bytes());
    }
    len
}

/// A frame is not the one that the frame table promised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// No zstd frame starts here.
    #[error("not a zstd frame: it starts with {found:#010x}, a frame with {MAGIC:#010x}")]
    Magic {
        /// The first four bytes, little-endian.
        found: u32,
    },
    /// The frame's header is cut off or uses a reserved bit.
    #[error("zstd frame header is damaged")]
    Header,
    /// The header does not say how long the content is.
    #[error("frame states no content size")]
    NoContentSize,
    /// The header says another length than the table.
    #[error("frame states a content of {found} bytes; the chunk has {expected}")]
    ContentSize {
        /// Bytes that the header states.
        found: u64,
        /// Bytes of the chunk.
        expected: u64,
    },
    /// The frame asks for more history than any frame of ours with its filter.
    #[error("frame asks for a window of {found} bytes; at most {max} are allowed")]
    Window {
        /// Bytes that the header asks for.
        found: u64,
        /// Most bytes that are allowed.
        max: u64,
    },
    /// The frame needs a dictionary; none of ours does.
    #[error("frame needs a dictionary")]
    Dictionary,
    /// The frame ends elsewhere than the table says.
    #[error("frame ends after {found} bytes; the frame table says {expected}")]
    Span {
        /// Bytes up to the frame's end.
        found: usize,
        /// Bytes given.
        expected: usize,
    },
    /// The blocks cannot be decoded, or the content checksum differs.
    #[error("frame does not decode: {reason}")]
    Damaged {
        /// libzstd's words.
        reason: &'static str,
    },
    /// The frame decoded to another length than its header states.
    #[error("frame decoded to {found} bytes; the chunk has {expected}")]
    Len {
        /// Bytes decoded.
        found: usize,
        /// Bytes of the chunk.
        expected: usize,
    },
    /// The bytes are not the ones that were saved.
    #[error("chunk has digest {found}; the frame table says {expected}")]
    Digest {
        /// Digest of what was decoded.
        found: Digest,
        /// Digest in the frame table.
        expected: Digest,
    },
}

/// What a frame's header says, once it is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    /// Bytes up to the first block.
    len: usize,
    /// Whether a content checksum ends the frame.
    has_checksum: bool,
}

/// Checks a frame's header (RFC 8878, section 3.1.1.1) before anything is done for it.
fn check_header(frame: &[u8], filter: Filter, raw_len: u64) -> Result<Header, FrameError> {
    let (magic, rest) = frame.split_first_chunk().ok_or(FrameError::Header)?;
    let magic = u32::from_le_bytes(*magic);
    if magic != MAGIC {
        return Err(FrameError::Magic { found: magic });
    }
    let (descriptor, rest) = rest.split_first().ok_or(FrameError::Header)?;
    let single_segment = descriptor & SINGLE_SEGMENT_FLAG != 0;
    if descriptor & RESERVED_FLAG != 0 {
        return Err(FrameError::Header);
    }
    if descriptor & DICTIONARY_FLAGS != 0 {
        return Err(FrameError::Dictionary);
    }
    let has_checksum = descriptor & CHECKSUM_FLAG != 0;
    let (window_len, rest) = if single_segment {
        (None, rest)
    } else {
        let (window, rest) = rest.split_first().ok_or(FrameError::Header)?;
        let base = 1u64 << (10 + (window >> 3));
        (Some(base + base / 8 * u64::from(window & 7)), rest)
    };
    let (size_len, added) = match (descriptor >> 6, single_segment) {
        (0, true) => (1, 0),
        (0, false) => return Err(FrameError::NoContentSize),
        (1, _) => (2, 256),
        (2, _) => (4, 0),
        _ => (8, 0),
    };
    let mut size = [0; 8];
    size[..size_len].copy_from_slice(rest.get(..size_len).ok_or(FrameError::Header)?);
    let content_size = u64::from_le_bytes(size).saturating_add(added);

    // One segment is its own window; without a filter it is decoded in place, so that it costs no memory.
    let (window_len, max) = match filter {
        Filter::None => (window_len.unwrap_or(0), WINDOW_LEN_MAX),
        _ => (window_len.unwrap_or(content_size), 1 << FILTERED_WINDOW_LOG),
    };
    if window_len > max {
        return Err(FrameError::Window {
            found: window_len,
            max,
        });
    }
    if content_size != raw_len {
        return Err(FrameError::ContentSize {
            found: content_size,
            expected: raw_len,
        });
    }
    Ok(Header {
        len: frame.len() - rest.len() + size_len,
        has_checksum,
    })
}

/// What the frame of an all-zero chunk is. All but an extent's last chunk have one length, so the last one made is nearly always the next one too.
#[derive(Debug)]
struct ZeroFrame {
    raw_len: usize,
    frame: Vec<u8>,
    digest: Digest,
    crc64: Crc64,
}

impl ZeroFrame {
    /// Of a chunk that is known to be all zero and not empty.
    fn of(chunk: &[u8], has_checksum: bool) -> Self {
        let mut frame = hand_header(chunk.len(), has_checksum).to_vec();
        for index in 0..raw_block_count(chunk.len()) {
            let start = index * BLOCK_LEN_MAX;
            let len = (chunk.len() - start).min(BLOCK_LEN_MAX);
            let last = start + len == chunk.len();
            frame.extend_from_slice(&block_header(BlockType::Rle, len, last));
            frame.push(0);
        }
        if has_checksum {
            let mut checksum = ContentChecksum::new();
            checksum.update(chunk);
            frame.extend_from_slice(&checksum.finish().to_le_bytes());
        }
        Self {
            raw_len: chunk.len(),
            digest: Digest::of(chunk),
            crc64: Crc64::of(&frame),
            frame,
        }
    }
}

#[cfg(test)]
mod tests;
