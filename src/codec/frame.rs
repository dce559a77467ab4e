//! One chunk to one frame, and back.
//!
//! Out: [`Encoder`] looks at a chunk and makes the cheapest of three frames. All zero: RLE blocks, without reading on to the compressor. Incompressible (by a
//! sample, or because zstd gained too little): raw blocks. Otherwise: zstd. Back: [`Decoder`] checks the frame's header and extent against what the frame
//! table promised *before* it decodes, decodes into the caller's buffer and nowhere else, and compares the digest.
//!
//! Every frame, however made, is one that any zstd reads with its default limits (checked against the `zstd` tool: hand-made frames with longer blocks or
//! larger windows are refused by it): content size and content checksum present, no dictionary, blocks of at most 128 KiB, and a window of at most 8 MiB.
//!
//! What can fail: making a context (memory), and the way back ([`FrameError`]). Encoding cannot: where the compressor fails, the frame is raw.

use std::fmt;

use serde::{Deserialize, Serialize};
use twox_hash::XxHash64;
use zstd::zstd_safe::{CCtx, CParameter, DCtx, find_frame_compressed_size, get_error_name};

use super::Digest;

/// How hard the compressor tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Level {
    /// Not at all: zero chunks become RLE frames, all others raw frames.
    None,
    /// zstd 1, the default: on tensors higher levels cost a multiple and gain next to nothing.
    #[default]
    Fast,
    /// This zstd level, [`Level::ZSTD_MIN`] to [`Level::ZSTD_MAX`]; below 1 the faster ones.
    Zstd(i32),
    /// zstd 9, for links that are slower than compression. On bf16-like weights it gains 2 % over zstd 1 at 1/30 of the speed (30 MB/s per thread); level 12 gains
    /// half a percent more for twice the time and four times the memory, higher ones make a thread slower than 10 MB/s.
    MaxRatio,
}

impl Level {
    /// Fastest level that a user may ask for.
    pub const ZSTD_MIN: i32 = -1000;
    /// Slowest level that zstd has.
    pub const ZSTD_MAX: i32 = 22;

    fn zstd_level(self) -> Option<i32> {
        match self {
            Level::None => None,
            Level::Fast => Some(1),
            Level::Zstd(level) => Some(level),
            Level::MaxRatio => Some(9),
        }
    }

    /// Bytes of memory that one [`Encoder`] of this level takes at most, its output buffer not counted. Measured with libzstd 1.5.7; a test holds
    /// the numbers to the library.
    pub fn context_bytes(self) -> u64 {
        const MIB: u64 = 1 << 20;
        match self.zstd_level() {
            None => 0,
            // zstd takes 0 for its own default, 3.
            Some(0 | 2..=4) => 3 * MIB,
            Some(..=1) => MIB,
            Some(5..=8) => 8 * MIB,
            Some(9..=11) => 32 * MIB,
            Some(12..=16) => 80 * MIB,
            Some(17..) => 160 * MIB,
        }
    }
}

/// How a frame was made. All three are valid zstd frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FrameKind {
    /// RLE blocks of a chunk that is all zero.
    Zero,
    /// Raw blocks.
    Raw,
    /// Made by the compressor.
    Zstd,
}

/// What was done to a chunk's bytes before they were compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Filter {
    /// Nothing: the frames decode to the raw extent.
    #[default]
    None,
}

const MAGIC: u32 = 0xFD2F_B528;
/// Blocks longer than this are not valid zstd.
pub(super) const BLOCK_LEN_MAX: usize = 128 * 1024;
/// Largest window that we write or accept; libzstd's own decoders promise to take it whatever their limits.
const WINDOW_LOG_MAX: u32 = 23;
const WINDOW_LEN_MAX: u64 = 1 << WINDOW_LOG_MAX;
/// Levels from here on would take a larger window by themselves.
const WINDOW_CAPPED_FROM_LEVEL: i32 = 20;
/// Magic, descriptor, window, content size.
pub(super) const HAND_HEADER_LEN: usize = 10;
pub(super) const BLOCK_HEADER_LEN: usize = 3;
const CONTENT_CHECKSUM_LEN: usize = 4;

/// Longest chunk, in bytes: what the image format allows.
pub const CHUNK_LEN_MAX: u64 = 64 << 20;
/// Shortest chunk length, in bytes, that the image format allows (an extent's last chunk may be shorter).
pub const CHUNK_LEN_MIN: u64 = 1 << 20;

/// Most bytes of any frame that [`Encoder::encode`] makes of a chunk of `raw_len` bytes: that of its raw frame.
pub const fn frame_bound(raw_len: usize) -> usize {
    let block_count = raw_len.div_ceil(BLOCK_LEN_MAX);
    // An empty frame still has one (empty) block.
    let block_count = if block_count == 0 { 1 } else { block_count };
    HAND_HEADER_LEN + block_count * BLOCK_HEADER_LEN + raw_len + CONTENT_CHECKSUM_LEN
}

/// Fewest bytes of any valid frame with a content size and a content checksum: header 6, one block 3, checksum 4.
pub const FRAME_LEN_MIN: u32 = 13;

/// What [`Encoder::encode`] says about the frame it made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoded {
    /// Its length in bytes.
    pub len: usize,
    /// How it was made.
    pub kind: FrameKind,
    /// Digest of the raw chunk.
    pub digest: Digest,
}

/// No compressor could be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EncoderError {
    /// The level is none of zstd's.
    #[error("zstd level {level} is out of range; compression.mode takes {min} to {max}", min = Level::ZSTD_MIN, max = Level::ZSTD_MAX)]
    Level {
        /// The level asked for.
        level: i32,
    },
    /// libzstd could not set itself up.
    #[error("libzstd cannot make a context: {reason}")]
    Context {
        /// libzstd's words.
        reason: &'static str,
    },
}

/// Makes frames; one per thread.
pub struct Encoder {
    /// `None` for [`Level::None`].
    compressor: Option<CCtx<'static>>,
    /// The last zero frame: all but an extent's last chunk have one length, so it is nearly always the next one too.
    zero: Option<ZeroFrame>,
}

struct ZeroFrame {
    raw_len: usize,
    frame: Vec<u8>,
    digest: Digest,
}

impl Encoder {
    /// An encoder of this level. It takes [`Level::context_bytes`] of memory, most of it at the first chunk; [`Encoder::warm_up`] takes it at once.
    ///
    /// # Errors
    /// When the level is out of range or memory is short.
    pub fn new(level: Level) -> Result<Self, EncoderError> {
        let compressor = level.zstd_level().map(new_compressor).transpose()?;
        Ok(Self {
            compressor,
            zero: None,
        })
    }

    /// Makes libzstd allocate now what chunks of `chunk_len` bytes need, so that nothing is allocated for the first time later.
    ///
    /// # Errors
    /// When memory is short.
    pub fn warm_up(&mut self, chunk_len: usize) -> Result<(), EncoderError> {
        let Some(compressor) = &mut self.compressor else {
            return Ok(());
        };
        let mut frame = vec![0; frame_bound(chunk_len)];
        compressor
            .compress2(frame.as_mut_slice(), &vec![0; chunk_len])
            .map(drop)
            .map_err(context_error)
    }

    /// Writes one frame that holds `chunk`, which is at most [`CHUNK_LEN_MAX`] bytes long, to the start of `out`; what is behind it is unspecified.
    ///
    /// # Panics
    /// When `out` is shorter than [`frame_bound`] of the chunk's length.
    pub fn encode(&mut self, chunk: &[u8], out: &mut [u8]) -> Encoded {
        debug_assert!(chunk.len() as u64 <= CHUNK_LEN_MAX);
        let bound = frame_bound(chunk.len());
        assert!(
            out.len() >= bound,
            "a frame of {} bytes needs {bound} bytes of room, not {}",
            chunk.len(),
            out.len()
        );

        if !chunk.is_empty() && is_zero(chunk) {
            let zero = self.zero_frame(chunk);
            out[..zero.frame.len()].copy_from_slice(&zero.frame);
            return Encoded {
                len: zero.frame.len(),
                kind: FrameKind::Zero,
                digest: zero.digest,
            };
        }
        // Digest before compression: it brings the chunk into the cache in order.
        let digest = Digest::of(chunk);
        let compressed = self
            .compressor
            .as_mut()
            .and_then(|compressor| compress(compressor, chunk, &mut out[..bound]));
        let (len, kind) = match compressed {
            Some(len) => (len, FrameKind::Zstd),
            None => (write_raw_frame(chunk, out), FrameKind::Raw),
        };
        Encoded { len, kind, digest }
    }

    fn zero_frame(&mut self, chunk: &[u8]) -> &ZeroFrame {
        let known = self.zero.take().filter(|zero| zero.raw_len == chunk.len());
        self.zero.insert(known.unwrap_or_else(|| ZeroFrame {
            raw_len: chunk.len(),
            frame: zero_frame(chunk),
            digest: Digest::of(chunk),
        }))
    }
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder")
            .field("compresses", &self.compressor.is_some())
            .finish_non_exhaustive()
    }
}

fn context_error(code: usize) -> EncoderError {
    EncoderError::Context {
        reason: get_error_name(code),
    }
}

fn new_compressor(level: i32) -> Result<CCtx<'static>, EncoderError> {
    if !(Level::ZSTD_MIN..=Level::ZSTD_MAX).contains(&level) {
        return Err(EncoderError::Level { level });
    }
    let mut compressor = CCtx::try_create().ok_or(EncoderError::Context {
        reason: "out of memory",
    })?;
    let mut set = |parameter| compressor.set_parameter(parameter).map_err(context_error);
    set(CParameter::CompressionLevel(level))?;
    if level >= WINDOW_CAPPED_FROM_LEVEL {
        set(CParameter::WindowLog(WINDOW_LOG_MAX))?;
    }
    set(CParameter::ContentSizeFlag(true))?;
    set(CParameter::ChecksumFlag(true))?;
    Ok(compressor)
}

/// A slice comparison is the C library's `memcmp`, which is as fast as memory also in a debug build.
fn is_zero(bytes: &[u8]) -> bool {
    static ZEROS: [u8; 4096] = [0; 4096];
    bytes
        .chunks(ZEROS.len())
        .all(|piece| piece == &ZEROS[..piece.len()])
}

/// Compresses the chunk if that is worth it, and says how long the frame is; `None` leaves `out` with unspecified content.
fn compress(compressor: &mut CCtx<'static>, chunk: &[u8], out: &mut [u8]) -> Option<usize> {
    // Gaining less than a twentieth is not worth a decoder's time, nor the next such chunk's encoding.
    let worth_it = |raw_len: usize, stored_len: &usize| *stored_len < raw_len - raw_len / 20;

    if looks_random(chunk) {
        // A histogram does not see repetitions: let the compressor try one stretch.
        let start = (chunk.len() - TRIAL_LEN) / 2;
        let trial = compressor.compress2(out, &chunk[start..start + TRIAL_LEN]);
        trial
            .ok()
            .filter(|stored_len| worth_it(TRIAL_LEN, stored_len))?;
    }
    let stored_len = compressor.compress2(out, chunk).ok()?;
    Some(stored_len).filter(|stored_len| worth_it(chunk.len(), stored_len))
}

/// Stretch that is compressed to confirm that a chunk is incompressible: small against a chunk, long enough for repetitions within a few KiB to show.
const TRIAL_LEN: usize = 16 * 1024;
/// Bytes of a chunk that go into the histogram; enough that its entropy is known within 0.02 bits.
const SAMPLE_LEN: usize = 16 * 1024;
/// One cache line at a time.
const SAMPLE_RUN_LEN: usize = 64;
/// A prime, so that sampled runs are spread over rows of any length.
const SAMPLE_SHIFT: usize = 4099;
/// Bits per byte above which order-0 coding gains less than 2 %.
const RANDOM_ENTROPY: f64 = 7.9;
/// Shorter chunks are cheap enough to just compress.
const SAMPLED_LEN_MIN: usize = 256 * 1024;

/// Whether bytes sampled evenly over the chunk are spread so evenly over their 256 values that coding them gains nothing.
fn looks_random(chunk: &[u8]) -> bool {
    if chunk.len() < SAMPLED_LEN_MIN {
        return false;
    }
    let run_distance = chunk.len() / (SAMPLE_LEN / SAMPLE_RUN_LEN);
    let mut histogram = [0u32; 256];
    for (index, stretch) in chunk.chunks_exact(run_distance).enumerate() {
        // Not at a fixed distance, or rows of a power of two would show the same column every time.
        let start = index * SAMPLE_SHIFT % (run_distance - SAMPLE_RUN_LEN);
        for byte in &stretch[start..start + SAMPLE_RUN_LEN] {
            histogram[usize::from(*byte)] += 1;
        }
    }
    let total = f64::from(histogram.iter().sum::<u32>());
    let entropy: f64 = histogram
        .iter()
        .filter(|count| **count > 0)
        .map(|count| f64::from(*count) / total)
        .map(|share| -share * share.log2())
        .sum();
    entropy > RANDOM_ENTROPY
}

/// Returns the frame's length.
fn write_raw_frame(chunk: &[u8], out: &mut [u8]) -> usize {
    let mut out = Cursor { out, len: 0 };
    out.put(&hand_header(chunk.len(), true));
    for index in 0..chunk.len().div_ceil(BLOCK_LEN_MAX).max(1) {
        let start = index * BLOCK_LEN_MAX;
        out.put(&raw_block_header(chunk.len(), index));
        out.put(&chunk[start..chunk.len().min(start + BLOCK_LEN_MAX)]);
    }
    write_content_checksum(chunk, &mut out);
    out.len
}

/// The start of a buffer, filled from left to right.
struct Cursor<'a> {
    out: &'a mut [u8],
    len: usize,
}

impl Cursor<'_> {
    fn put(&mut self, bytes: &[u8]) {
        let end = self.len + bytes.len();
        self.out[self.len..end].copy_from_slice(bytes);
        self.len = end;
    }
}

/// The frame of a chunk that is known to be all zero and not empty.
fn zero_frame(chunk: &[u8]) -> Vec<u8> {
    let blocks = chunk.chunks(BLOCK_LEN_MAX);
    let mut frame =
        vec![0; HAND_HEADER_LEN + blocks.len() * (BLOCK_HEADER_LEN + 1) + CONTENT_CHECKSUM_LEN];
    let mut out = Cursor {
        out: &mut frame,
        len: 0,
    };
    out.put(&hand_header(chunk.len(), true));
    let mut blocks = blocks.peekable();
    while let Some(block) = blocks.next() {
        let last = blocks.peek().is_none();
        out.put(&block_header(BlockType::Rle, block.len(), last));
        out.put(&[0]);
    }
    write_content_checksum(chunk, &mut out);
    frame
}

/// Frames without matches need no history: a 128 KiB window lets a streaming reader get by with less than 1 MiB, whatever the chunk's length.
pub(super) fn hand_header(raw_len: usize, has_checksum: bool) -> [u8; HAND_HEADER_LEN] {
    const FOUR_BYTE_SIZE: u8 = 0x80; // no dictionary
    const WINDOW_128_KIB: u8 = (17 - 10) << 3;
    let [m0, m1, m2, m3] = MAGIC.to_le_bytes();
    let size = u32::try_from(raw_len).expect("a chunk is at most 64 MiB long");
    let [s0, s1, s2, s3] = size.to_le_bytes();
    let flag = if has_checksum { CHECKSUM_FLAG } else { 0 };
    let descriptor = FOUR_BYTE_SIZE | flag;
    [m0, m1, m2, m3, descriptor, WINDOW_128_KIB, s0, s1, s2, s3]
}

#[derive(Clone, Copy)]
enum BlockType {
    Raw = 0,
    Rle = 1,
}

fn block_header(block_type: BlockType, len: usize, last: bool) -> [u8; BLOCK_HEADER_LEN] {
    let len = u32::try_from(len).expect("a block is at most 128 KiB long");
    let header = u32::from(last) | (block_type as u32) << 1 | len << 3;
    let [h0, h1, h2, _] = header.to_le_bytes();
    [h0, h1, h2]
}

/// What stands before the content of block `index` in the raw frame of a chunk.
pub(super) fn raw_block_header(raw_len: usize, index: usize) -> [u8; BLOCK_HEADER_LEN] {
    let start = index * BLOCK_LEN_MAX;
    let len = (raw_len - start).min(BLOCK_LEN_MAX);
    block_header(BlockType::Raw, len, start + len == raw_len)
}

/// The low 32 bits of the content's XXH64.
fn write_content_checksum(chunk: &[u8], out: &mut Cursor<'_>) {
    let low = XxHash64::oneshot(0, chunk).to_le_bytes();
    out.put(&low[..CONTENT_CHECKSUM_LEN]);
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
    /// The frame asks for more history than any frame of ours.
    #[error("frame asks for a window of {found} bytes; at most {WINDOW_LEN_MAX} are allowed")]
    Window {
        /// Bytes that the header asks for.
        found: u64,
    },
    /// The frame needs a dictionary; none of ours does.
    #[error("frame needs a dictionary")]
    Dictionary,
    /// The frame carries no content checksum; all of ours do.
    #[error("frame carries no content checksum")]
    NoContentChecksum,
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

/// Reads frames; one per thread.
pub struct Decoder {
    context: DCtx<'static>,
}

/// No decoder could be made: memory is short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("libzstd cannot make a decoder: out of memory")]
pub struct DecoderError;

impl Decoder {
    /// Bytes of memory that one decoder takes at most; it decodes in place, so the window costs nothing. A test holds the number to the library.
    pub const CONTEXT_BYTES: u64 = 256 << 10;

    /// A decoder.
    ///
    /// # Errors
    /// When memory is short.
    pub fn new() -> Result<Self, DecoderError> {
        let context = DCtx::try_create().ok_or(DecoderError)?;
        Ok(Self { context })
    }

    /// Fills `out` with the chunk that `frame` holds, if `frame` is exactly one frame, of exactly `out.len()` raw bytes, with this digest.
    ///
    /// # Errors
    /// [`FrameError`] names what differs; `out` then has unspecified content that must not be used.
    pub fn decode(
        &mut self,
        frame: &[u8],
        digest: Digest,
        out: &mut [u8],
    ) -> Result<(), FrameError> {
        check_header(frame, out.len() as u64)?;
        let damaged = |code| FrameError::Damaged {
            reason: get_error_name(code),
        };
        let span = find_frame_compressed_size(frame).map_err(damaged)?;
        if span != frame.len() {
            return Err(FrameError::Span {
                found: span,
                expected: frame.len(),
            });
        }
        let decoded_len = self.context.decompress(out, frame).map_err(damaged)?;
        if decoded_len != out.len() {
            return Err(FrameError::Len {
                found: decoded_len,
                expected: out.len(),
            });
        }
        let found = Digest::of(out);
        if found != digest {
            return Err(FrameError::Digest {
                found,
                expected: digest,
            });
        }
        Ok(())
    }
}

impl fmt::Debug for Decoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decoder").finish_non_exhaustive()
    }
}

const CHECKSUM_FLAG: u8 = 1 << 2;
const RESERVED_FLAG: u8 = 1 << 3;
const SINGLE_SEGMENT_FLAG: u8 = 1 << 5;
const DICTIONARY_FLAGS: u8 = 0b11;

/// Checks a frame's header (RFC 8878, section 3.1.1.1) before libzstd is asked to do anything for it.
fn check_header(frame: &[u8], raw_len: u64) -> Result<(), FrameError> {
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
    if descriptor & CHECKSUM_FLAG == 0 {
        return Err(FrameError::NoContentChecksum);
    }

    let rest = if single_segment {
        rest
    } else {
        let (window, rest) = rest.split_first().ok_or(FrameError::Header)?;
        let base = 1u64 << (10 + (window >> 3));
        let window_len = base + base / 8 * u64::from(window & 7);
        if window_len > WINDOW_LEN_MAX {
            return Err(FrameError::Window { found: window_len });
        }
        rest
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
    if content_size != raw_len {
        return Err(FrameError::ContentSize {
            found: content_size,
            expected: raw_len,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
