//! Planes → blocks: our own writer of compressed frames.
//!
//! In: a chunk and the filter that the sample chose. Out: a frame whose content is that filter's, unit by unit: the planes of `width × 128 KiB` raw bytes one after another,
//! then the bytes that fill no element. A plane is one block, or, where zeros lie in long runs, several:
//!
//! ```text
//! raw          a plane that Huffman codes would not shorten enough
//! RLE          a run of zeros, a piece of one value, a unit that is all zero (which is not even split)
//! compressed   literals only, Huffman-coded in four streams, no sequences; "treeless" where the table of the last such block serves
//! ```
//!
//! Everything is decided on a sample of each block, because a full histogram takes longer than the coding itself. So a table may lack a symbol that the sample did not
//! see: neighbours of those seen get codes in advance, and where that was not enough the block is done again from its full histogram.
//!
//! What can fail: the frame growing beyond the room given, for which there is no other word than `None`.

use std::ops::Range;

use super::super::checksum::Summing;
use super::super::huffman::{Code, Coder};
use super::super::planes::{self, Filter, PLANE_LEN};
use super::super::sample::{entropy_bits, histogram, sampled_histogram};
use super::super::zeros;
use super::{BLOCK_HEADER_LEN, BLOCK_LEN_MAX, BlockType, block_header, hand_header};
use crate::codec::Crc64;

/// Bytes of a block that its histogram is taken from.
const SAMPLE_LEN: usize = 8 * 1024;
/// Shorter pieces are raw: a table and four streams would outweigh what they save.
const CODED_LEN_MIN: usize = 256;
/// Shortest runs of zeros that get a block of their own between raw blocks.
const ZERO_RUN_MIN_RAW: usize = 256;
/// And between coded ones, where every interruption costs more time than the zeros do.
const ZERO_RUN_MIN_CODED: usize = 512;
/// With fewer zeros than this share (one in so many) in the sample there are no long runs of them.
const ZERO_SHARE_MIN: u32 = 50;
/// The table of the last block is kept while it costs at most this much more than one for this block's sample would.
const REUSE_FACTOR: f32 = 1.015;
/// At least so many bits a byte any Huffman code loses.
const LOSS_BITS_MIN: f32 = 0.03;
/// A block that codes shorten by less than this share (one in so many) is not worth a decoder's time.
const GAIN_MIN: usize = 32;
/// Symbols below and above one that was seen which get a code too, and the weight of a seen one against theirs.
const WIDEN_BELOW: usize = 8;
const WIDEN_ABOVE: usize = 3;
const SEEN_WEIGHT: u32 = 16;
/// Literals header (5) and "no sequences" (1).
const LITERALS_HEADER_LEN: usize = 5;
/// Room that the coder may use behind what it leaves there.
const CODER_SLACK: usize = 64;

/// A frame in the making. Its checksum is taken as it grows, while the bytes are in the cache.
#[derive(Debug)]
pub(super) struct Growing<'a> {
    out: &'a mut [u8],
    len: usize,
    /// Where the newest block header stands; it says so if the block is the last, so nothing from it on is summed yet.
    newest: Option<usize>,
    summed: usize,
    crc64: Summing,
}

impl<'a> Growing<'a> {
    pub(super) fn new(out: &'a mut [u8]) -> Self {
        Self {
            out,
            len: 0,
            newest: None,
            summed: 0,
            crc64: Summing::new(),
        }
    }

    /// The room left.
    pub(super) fn rest(&mut self) -> &mut [u8] {
        &mut self.out[self.len..]
    }

    /// So many bytes were written to the start of the room.
    pub(super) fn advance(&mut self, len: usize) {
        self.len += len;
    }

    pub(super) fn put(&mut self, bytes: &[u8]) -> Option<()> {
        self.rest().get_mut(..bytes.len())?.copy_from_slice(bytes);
        self.advance(bytes.len());
        Some(())
    }

    fn header(&mut self, block_type: BlockType, len: usize) -> Option<()> {
        self.newest = Some(self.len);
        self.put(&block_header(block_type, len, false))
    }

    fn raw(&mut self, block: &[u8]) -> Option<()> {
        self.header(BlockType::Raw, block.len())?;
        self.put(block)
    }

    fn rle(&mut self, value: u8, len: usize) -> Option<()> {
        self.header(BlockType::Rle, len)?;
        self.put(&[value])
    }

    /// Sums what is final.
    pub(super) fn sum(&mut self) {
        let end = self.newest.unwrap_or(self.len);
        self.crc64.update(&self.out[self.summed..end]);
        self.summed = end;
    }

    /// Marks the last block, if the blocks are ours. An empty frame gets an empty block.
    fn end_blocks(&mut self) -> Option<()> {
        if self.newest.is_none() {
            self.header(BlockType::Raw, 0)?;
        }
        if let Some(newest) = self.newest.take() {
            self.out[newest] |= 1;
        }
        Some(())
    }

    /// Length and checksum of the whole.
    pub(super) fn finish(mut self) -> (usize, Crc64) {
        self.newest = None;
        self.sum();
        (self.len, self.crc64.finish())
    }
}

/// Writes frames; one per thread.
#[derive(Debug)]
pub(super) struct Writer {
    planes: Box<[u8]>,
    blocks: BlockWriter,
}

impl Writer {
    pub(super) fn new() -> Self {
        Self {
            planes: vec![0; 4 * PLANE_LEN].into(),
            blocks: BlockWriter::new(),
        }
    }

    /// Writes the chunk's frame but for the content checksum, which the header promises if `has_checksum`. Planes of more than `dense_bits` bits a byte stay raw. Each
    /// unit is shown to `see` just before it is split, so that it is in the cache then, or comes into it in order.
    pub(super) fn write(
        &mut self,
        (filter, dense_bits): (Filter, f32),
        chunk: &[u8],
        has_checksum: bool,
        out: &mut Growing<'_>,
        mut see: impl FnMut(&[u8]),
    ) -> Option<()> {
        out.put(&hand_header(chunk.len(), has_checksum))?;
        self.blocks.start(dense_bits);
        let mut dense_planes = 0;
        for unit in chunk.chunks(filter.width() * PLANE_LEN) {
            see(unit);
            if zeros::is_zero(unit) {
                for piece in unit.chunks(BLOCK_LEN_MAX) {
                    out.rle(0, piece.len())?;
                }
            } else {
                dense_planes = self.unit(filter, unit, dense_planes, out)?;
            }
            out.sum();
        }
        out.end_blocks()
    }

    /// Writes a unit that is not all zero, of which so many planes, the first ones, are expected to stay raw; and says how many did.
    fn unit(
        &mut self,
        filter: Filter,
        unit: &[u8],
        expected_dense: usize,
        out: &mut Growing<'_>,
    ) -> Option<usize> {
        let width = filter.width();
        if width == 1 {
            self.blocks.plane(unit, out)?;
            return Some(0);
        }
        let plane_len = unit.len() / width;
        let (body, tail) = unit.split_at(plane_len * width);
        let mut dense_planes = 0;
        if plane_len > 0 {
            // Planes that were raw in the last unit are split straight into the frame.
            let framed_len = BLOCK_HEADER_LEN + plane_len;
            let direct = if out.rest().len() >= expected_dense * framed_len {
                expected_dense.min(width - 1)
            } else {
                0
            };
            let scratch = self.planes[direct * plane_len..].chunks_exact_mut(plane_len);
            let framed = out.rest().chunks_exact_mut(framed_len);
            let framed = framed.map(|block| &mut block[BLOCK_HEADER_LEN..]);
            let mut targets = framed.take(direct).chain(scratch);
            let mut parts: [&mut [u8]; 4] = std::array::from_fn(|plane| match plane < width {
                true => targets.next().unwrap_or_default(),
                false => &mut [],
            });
            planes::split(filter, body, &mut parts);
            let blocks = &self.blocks;
            if parts[..direct].iter().all(|plane| blocks.is_dense(plane)) {
                for _ in 0..direct {
                    out.header(BlockType::Raw, plane_len)?;
                    out.advance(plane_len);
                }
                dense_planes = direct;
            } else {
                let framed = out.rest().chunks_exact(framed_len);
                let scratch = self.planes.chunks_exact_mut(plane_len);
                for (block, plane) in framed.zip(scratch).take(direct) {
                    plane.copy_from_slice(&block[BLOCK_HEADER_LEN..]);
                }
            }
            let planes = self.planes.chunks_exact(plane_len).take(width);
            for (index, plane) in planes.enumerate().skip(dense_planes) {
                let is_dense = self.blocks.plane(plane, out)?;
                if is_dense && index == dense_planes {
                    dense_planes += 1;
                }
            }
        }
        if !tail.is_empty() {
            out.raw(tail)?;
        }
        Some(dense_planes)
    }
}

/// Writes one plane after another of the same frame.
#[derive(Debug)]
struct BlockWriter {
    coder: Coder,
    dense_bits: f32,
    /// The last table that this frame carries: what a treeless block refers to.
    sent: Option<Sent>,
    /// Symbols that a full histogram of this frame met.
    met: [bool; 256],
    zero_runs: Vec<Range<u32>>,
}

#[derive(Debug)]
struct Sent {
    code: Code,
    /// Bits a byte that it lost against the entropy of what it was made for.
    loss_bits: f32,
}

impl Sent {
    /// Whether it is about as good for what was counted as a new one would be.
    fn serves(&self, counted: &[u32; 256]) -> bool {
        let like_new = entropy_bits(counted) + self.loss_bits;
        bits_a_byte(&self.code, counted).is_some_and(|bits| bits <= REUSE_FACTOR * like_new)
    }
}

/// What a byte takes in this code; `None` when one has no code, or there is none.
fn bits_a_byte(code: &Code, counted: &[u32; 256]) -> Option<f32> {
    let total: u32 = counted.iter().sum();
    let bits = code.cost_bits(counted)?;
    (total > 0).then(|| bits as f32 / total as f32)
}

impl BlockWriter {
    fn new() -> Self {
        Self {
            coder: Coder::new(),
            dense_bits: 0.0,
            sent: None,
            met: [false; 256],
            zero_runs: Vec::new(),
        }
    }

    fn start(&mut self, dense_bits: f32) {
        self.dense_bits = dense_bits;
        self.sent = None;
        self.met = [false; 256];
    }

    /// Whether this plane, which is split into the frame already, may stay there raw.
    fn is_dense(&self, plane: &[u8]) -> bool {
        let histogram = sampled_histogram(plane, SAMPLE_LEN / 2);
        !has_zero_runs(&histogram) && entropy_bits(&histogram) > self.dense_bits
    }

    /// Writes a plane, and says whether it became one raw block.
    fn plane(&mut self, plane: &[u8], out: &mut Growing<'_>) -> Option<bool> {
        let sample = sampled_histogram(plane, SAMPLE_LEN);
        let mut runs = std::mem::take(&mut self.zero_runs);
        runs.clear();
        if has_zero_runs(&sample) {
            zeros::zero_runs(plane, ZERO_RUN_MIN_RAW, &mut runs);
        }
        let mut counted = without_zeros(&sample, &runs, plane);
        let is_dense = entropy_bits(&counted) > self.dense_bits;
        if !is_dense && !runs.is_empty() {
            runs.retain(|run| run.len() >= ZERO_RUN_MIN_CODED || run.len() == plane.len());
            counted = without_zeros(&sample, &runs, plane);
        }

        let start = out.len;
        let mut at = 0;
        for run in &runs {
            let run = run.start as usize..run.end as usize;
            self.piece(&plane[at..run.start], is_dense, &counted, out)?;
            out.rle(0, run.len())?;
            at = run.end;
        }
        self.piece(&plane[at..], is_dense, &counted, out)?;
        self.zero_runs = runs;
        Some(out.len - start == BLOCK_HEADER_LEN + plane.len())
    }

    fn piece(
        &mut self,
        piece: &[u8],
        is_dense: bool,
        counted: &[u32; 256],
        out: &mut Growing<'_>,
    ) -> Option<()> {
        let Some(first) = piece.first() else {
            return Some(());
        };
        if is_dense || piece.len() < CODED_LEN_MIN {
            return out.raw(piece);
        }
        if is_only(*first, piece) {
            return out.rle(*first, piece.len());
        }
        let written = match &self.sent {
            Some(sent) if sent.serves(counted) => self.coded(piece, None, out),
            _ => {
                let new = self.code(counted);
                new.and_then(|new| self.coded(piece, Some(new), out))
            }
        };
        if written.is_some() {
            return Some(());
        }
        // A symbol without a code, most likely: once more, knowing them all.
        let full = histogram(piece);
        for (met, count) in self.met.iter_mut().zip(&full) {
            *met |= *count > 0;
        }
        let new = self.code(&full);
        match new.and_then(|new| self.coded(piece, Some(new), out)) {
            Some(()) => Some(()),
            None => out.raw(piece),
        }
    }

    /// A code for what was counted, with codes for symbols that may well occur too.
    fn code(&self, counted: &[u32; 256]) -> Option<Sent> {
        let mut widened = counted.map(|count| count * SEEN_WEIGHT);
        for symbol in (0..256).filter(|symbol| counted[*symbol] > 0) {
            let near = symbol.saturating_sub(WIDEN_BELOW)..=(symbol + WIDEN_ABOVE).min(255);
            for weight in &mut widened[near] {
                *weight = (*weight).max(1);
            }
        }
        widened[0] = widened[0].max(1);
        for (weight, met) in widened.iter_mut().zip(&self.met) {
            *weight = (*weight).max(u32::from(*met));
        }
        let code = Code::of(&widened)?;
        let loss_bits = bits_a_byte(&code, counted)? - entropy_bits(counted);
        Some(Sent {
            code,
            loss_bits: loss_bits.max(LOSS_BITS_MIN),
        })
    }

    /// Writes a compressed block with this new table, or with the one last sent. `None` leaves the frame as it was: a symbol has no code, the block is not
    /// shorter than the piece, or it does not fit.
    fn coded(&mut self, piece: &[u8], new: Option<Sent>, out: &mut Growing<'_>) -> Option<()> {
        let code = &new.as_ref().or(self.sent.as_ref())?.code;
        let table = match &new {
            Some(new) => new.code.header(),
            None => &[],
        };
        let rest = out.rest();
        let room = rest.len().min(piece.len() + CODER_SLACK);
        let (head, streams) = rest[..room]
            .split_at_mut_checked(BLOCK_HEADER_LEN + LITERALS_HEADER_LEN + table.len())?;
        let streams_len = self.coder.encode(code, piece, streams)?;
        let literals_len = table.len() + streams_len;
        let block_len = LITERALS_HEADER_LEN + literals_len + 1;
        if block_len > piece.len() - piece.len() / GAIN_MIN || streams_len == streams.len() {
            return None;
        }
        streams[streams_len] = 0; // no sequences
        let (block, head) = head.split_at_mut(BLOCK_HEADER_LEN);
        let (literals, head) = head.split_at_mut(LITERALS_HEADER_LEN);
        block.copy_from_slice(&block_header(BlockType::Compressed, block_len, false));
        literals.copy_from_slice(&literals_header(piece.len(), literals_len, new.is_some()));
        head.copy_from_slice(table);
        out.newest = Some(out.len);
        out.advance(BLOCK_HEADER_LEN + block_len);
        if new.is_some() {
            self.sent = new;
        }
        Some(())
    }
}

/// Four streams, lengths of 18 bits (RFC 8878, section 3.1.1.3.1.1).
fn literals_header(raw_len: usize, coded_len: usize, has_table: bool) -> [u8; LITERALS_HEADER_LEN] {
    const FOUR_STREAMS_18_BITS: u64 = 3 << 2;
    let literals_type = if has_table { 2 } else { 3 };
    let header =
        literals_type | FOUR_STREAMS_18_BITS | (raw_len as u64) << 4 | (coded_len as u64) << 22;
    let [h0, h1, h2, h3, h4, ..] = header.to_le_bytes();
    [h0, h1, h2, h3, h4]
}

fn has_zero_runs(sample: &[u32; 256]) -> bool {
    sample[0] * ZERO_SHARE_MIN > sample.iter().sum()
}

/// The sample's histogram without the zeros that these runs take out of the blocks. Zeros that stay in them still count, or the table would be wrong for them.
fn without_zeros(sample: &[u32; 256], runs: &[Range<u32>], plane: &[u8]) -> [u32; 256] {
    let mut counted = *sample;
    let taken: u64 = runs.iter().map(|run| run.len() as u64).sum();
    let total: u64 = sample.iter().copied().map(u64::from).sum();
    let taken_of_sample = (taken * total).checked_div(plane.len() as u64).unwrap_or(0);
    let taken_of_sample = u32::try_from(taken_of_sample).unwrap_or(u32::MAX);
    counted[0] = counted[0].saturating_sub(taken_of_sample);
    if counted.iter().all(|count| *count == 0) && taken < plane.len() as u64 {
        return histogram(plane);
    }
    counted
}

/// Whether all bytes have this value; most often the first few say no.
fn is_only(value: u8, bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == value)
}
