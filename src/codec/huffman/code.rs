//! From a histogram to a code: lengths by Huffman's algorithm, none over 11 bits, and the canonical codes that zstd's decoders give them.
//!
//! In: how often each byte occurs. Out: a [`Code`] with its description. What can fail: fewer than two symbols, or lengths that no description can express.

use std::cell::OnceCell;

use super::CODE_BITS_MAX;
use super::header::{self, Header};

/// A complete prefix code over bytes, and its description. The same histogram always gives the same code.
#[derive(Clone)]
pub struct Code {
    /// Length of each symbol's code in bits; 0 for a symbol without one.
    pub(super) lengths: [u8; 256],
    /// The codes, right-aligned. A byte holds them all: those of one length and over are numbered from 0, and there are 256 symbols at most.
    pub(super) codes: [u8; 256],
    /// Mean of a symbol's length over the histogram, and the variance.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "only vector kernels are chosen by it")
    )]
    pub(super) mean_bits: f64,
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "only vector kernels are chosen by it")
    )]
    pub(super) variance: f64,
    /// Made when it is asked for: not every block has a description in front of it.
    header: OnceCell<Header>,
}

impl std::fmt::Debug for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Code")
            .field("lengths", &self.lengths)
            .finish_non_exhaustive()
    }
}

/// Leaves per depth, index = depth.
type DepthCounts = [u16; CODE_BITS_MAX as usize + 1];

impl Code {
    /// The code for symbols that occur as `histogram` says. None when fewer than two symbols occur, or when the format cannot describe the code.
    pub fn of(histogram: &[u32; 256]) -> Option<Self> {
        let mut keys = [0u64; 256];
        let mut used = 0;
        for (symbol, &count) in (0u64..).zip(histogram) {
            // Without a branch: which symbols occur is not predictable.
            keys[used] = u64::from(count) << 8 | symbol;
            used += usize::from(count > 0);
        }
        if used < 2 {
            return None;
        }
        let keys = &mut keys[..used];
        keys.sort_unstable();

        let depth_counts = limit(&depths(keys));
        let mut lengths = [0; 256];
        let mut rarest_first = keys.iter();
        let (mut total, mut bits, mut squares) = (0.0, 0.0, 0.0);
        for (length, &count) in (0..=CODE_BITS_MAX).zip(&depth_counts).rev() {
            for &key in rarest_first.by_ref().take(count.into()) {
                lengths[(key & 0xff) as usize] = length;
                let (count, length) = ((key >> 8) as f64, f64::from(length));
                total += count;
                bits += count * length;
                squares += count * length * length;
            }
        }
        let header = OnceCell::new();
        if !header::is_surely_possible(&lengths) {
            _ = header.set(header::of(&lengths)?);
        }
        let mean_bits: f64 = bits / total;
        let codes = canonical(&lengths, &depth_counts);
        Some(Self {
            codes,
            lengths,
            mean_bits,
            variance: squares / total - mean_bits * mean_bits,
            header,
        })
    }

    /// The code's description as it stands in front of the bit strings: a Huffman_Tree_Description.
    pub fn header(&self) -> &[u8] {
        let make = || header::of(&self.lengths).expect("what cannot be described is no code");
        self.header.get_or_init(make).bytes()
    }

    /// Bits that symbols which occur as `histogram` says take in this code; None when one of them has no code.
    pub fn cost_bits(&self, histogram: &[u32; 256]) -> Option<u64> {
        let mut bits = 0;
        let mut without_code = 0;
        for (&count, &length) in histogram.iter().zip(&self.lengths) {
            bits += u64::from(count) * u64::from(length);
            without_code |= if length == 0 { count } else { 0 };
        }
        (without_code == 0).then_some(bits)
    }
}

/// Leaves per depth of a Huffman tree over ascending `keys` (count << 8 | symbol); those too deep are counted at the limit.
///
/// Leaves and inner nodes each come up in ascending order of weight, so the two lightest are always at the heads of two queues.
/// Symbols rarer than a code at the limit stands for count as if they were about that frequent, so that few come out too deep: over samples of 8 Ki symbols with
/// unseen neighbours counted once, 7/8 of it gave codes within 0.03 % of the shortest on average; rare symbols left alone, up to 0.26 %.
fn depths(keys: &[u64]) -> DepthCounts {
    let leaves = keys.len();
    let total: u64 = keys.iter().map(|key| key >> 8).sum();
    let least = (total * 7 / 8) >> CODE_BITS_MAX;
    let leaf_weight = |leaf: usize| (keys[leaf] >> 8).max(least);
    let inner = leaves - 1;
    let mut weights = [0u64; 256];
    // Parent of a leaf or inner node: index of an inner node.
    let mut leaf_parents = [0u8; 256];
    let mut inner_parents = [0u8; 256];
    let (mut leaf, mut head) = (0, 0);
    for made in 0..inner {
        let mut weight = 0;
        let parent = u8::try_from(made).expect("at most 255 inner nodes");
        for _ in 0..2 {
            let take_leaf = leaf < leaves && (head == made || leaf_weight(leaf) <= weights[head]);
            if take_leaf {
                weight += leaf_weight(leaf);
                leaf_parents[leaf] = parent;
                leaf += 1;
            } else {
                weight += weights[head];
                inner_parents[head] = parent;
                head += 1;
            }
        }
        weights[made] = weight;
    }
    let mut inner_depths = [0u8; 256];
    for node in (0..inner - 1).rev() {
        inner_depths[node] = inner_depths[usize::from(inner_parents[node])].saturating_add(1);
    }
    let mut counts = DepthCounts::default();
    for &parent in &leaf_parents[..leaves] {
        let depth = inner_depths[usize::from(parent)].saturating_add(1);
        counts[usize::from(depth.min(CODE_BITS_MAX))] += 1;
    }
    counts
}

/// Makes a complete code of depths that were cut off at the limit: each step hangs one leaf from the limit beside the deepest leaf above the limit.
fn limit(clamped: &DepthCounts) -> DepthCounts {
    let mut counts = *clamped;
    let deepest = usize::from(CODE_BITS_MAX);
    let room: u32 = 1 << CODE_BITS_MAX;
    let taken: u32 = (0..)
        .zip(&counts)
        .map(|(depth, &count)| (u32::from(count) << deepest) >> depth)
        .sum();
    // Every step frees one of the 2^11 places.
    for _ in room..taken {
        let depth = (1..deepest)
            .rev()
            .find(|&depth| counts[depth] > 0)
            .expect("256 leaves fit 2^11 places");
        counts[depth] -= 1;
        counts[depth + 1] += 2;
        counts[deepest] -= 1;
    }
    counts
}

/// The codes that a decoder infers: longest first from 0 up, in symbol order where lengths are equal.
fn canonical(lengths: &[u8; 256], depth_counts: &DepthCounts) -> [u8; 256] {
    let mut next = [0u16; CODE_BITS_MAX as usize + 1];
    let mut first = 0;
    for length in (1..next.len()).rev() {
        next[length] = first;
        first = (first + depth_counts[length]) >> 1;
    }
    let mut codes = [0; 256];
    for (code, &length) in codes.iter_mut().zip(lengths) {
        if length > 0 {
            let next = &mut next[usize::from(length)];
            *code = (*next & 0xff) as u8;
            *next += 1;
        }
    }
    codes
}
