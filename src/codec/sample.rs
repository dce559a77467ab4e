//! What a few bytes of a chunk tell about all of it.
//!
//! In: a chunk, of which a few KiB are read. Out: how much of it is zero, and how many bits a byte of each plane takes behind each filter. Only a guess, so whoever
//! acts on it must be right for any bytes. Nothing here can fail.

use std::ops::Range;

use super::planes::{self, Filter};
use super::zeros;

/// Bytes of a chunk that are looked at: enough that a plane's entropy is known within 0.05 bits.
const SAMPLE_LEN: usize = 8 * 1024;
const PROBE_COUNT: usize = SAMPLE_LEN / Sample::RUN_LEN;
/// Most bytes that are read on from a probe to make up for probes that met zeros.
const LONG_RUN_LEN: usize = 1024;
/// Runs start at a multiple of this, so that elements are met whole.
const RUN_ALIGN: usize = 64;

/// Bytes of one chunk, those that lie among zeros only left out.
#[derive(Debug)]
pub(super) struct Sample {
    bytes: Box<[u8]>,
    len: usize,
    planes: Box<[u8]>,
    zero_share: f32,
    scattered_share: f32,
    /// Where in the chunk something was, in order.
    hits: Vec<usize>,
}

impl Sample {
    /// Two cache lines, which processors fetch together.
    pub(super) const RUN_LEN: usize = 128;

    pub(super) fn new() -> Self {
        Self {
            bytes: vec![0; SAMPLE_LEN].into(),
            len: 0,
            planes: vec![0; SAMPLE_LEN].into(),
            zero_share: 0.0,
            scattered_share: 0.0,
            hits: Vec::with_capacity(PROBE_COUNT),
        }
    }

    /// Looks at another chunk.
    pub(super) fn take(&mut self, chunk: &[u8]) {
        self.hits.clear();
        self.len = 0;
        self.zero_share = 0.0;
        self.scattered_share = 0.0;
        if chunk.len() < 2 * SAMPLE_LEN {
            self.hits.push(0);
            self.put(&chunk[..chunk.len().min(SAMPLE_LEN)]);
            return;
        }
        let distance = chunk.len() / PROBE_COUNT;
        let mut jitter = Jitter::default();
        for probe in 0..PROBE_COUNT {
            let start = probe * distance + jitter.below(distance - Self::RUN_LEN + 1);
            let start = start / RUN_ALIGN * RUN_ALIGN;
            let run = &chunk[start..start + Self::RUN_LEN];
            if !zeros::is_zero(run) {
                self.hits.push(start);
                self.put(run);
            }
        }
        let hit_count = self.hits.len();
        self.zero_share = 1.0 - share(hit_count, PROBE_COUNT);
        // Where little was found there is more to see beside it, without another miss of the cache.
        if hit_count > 0 && hit_count < PROBE_COUNT {
            let more = (SAMPLE_LEN - self.len) / hit_count;
            let more = more.clamp(Self::RUN_LEN, LONG_RUN_LEN) / Self::RUN_LEN * Self::RUN_LEN;
            let (mut seen, mut zeros) = (0, 0);
            for hit in 0..hit_count {
                let start = self.hits[hit] + Self::RUN_LEN;
                let beside = &chunk[start..chunk.len().min(start + more)];
                for run in beside.chunks_exact(Self::RUN_LEN) {
                    seen += 1;
                    if zeros::is_zero(run) {
                        zeros += 1;
                    } else if self.len + run.len() <= SAMPLE_LEN {
                        self.put(run);
                    }
                }
            }
            // Whole pages of zeros do not lie beside something more often than elsewhere.
            self.scattered_share = share(zeros, seen.max(1)).min(self.zero_share);
        }
    }

    fn put(&mut self, run: &[u8]) {
        self.bytes[self.len..self.len + run.len()].copy_from_slice(run);
        self.len += run.len();
    }

    /// Share of the chunk that lies among zeros only.
    pub(super) fn zero_share(&self) -> f32 {
        self.zero_share
    }

    /// Share of the chunk that lies among zeros only, but in runs too short to be passed over.
    pub(super) fn scattered_share(&self) -> f32 {
        self.scattered_share
    }

    /// A stretch of the chunk around something: the `index`-th of `count`, at most `len` bytes long, starting at a multiple of 64.
    pub(super) fn stretch(
        &self,
        chunk_len: usize,
        len: usize,
        index: usize,
        count: usize,
    ) -> Range<usize> {
        let hit = self
            .hits
            .get((2 * index + 1) * self.hits.len() / (2 * count));
        let start =
            hit.copied().unwrap_or(0).min(chunk_len.saturating_sub(len)) / RUN_ALIGN * RUN_ALIGN;
        start..chunk_len.min(start + len)
    }

    /// Bits that a byte of each plane takes behind this filter; of the first [`Filter::width`] planes.
    pub(super) fn bits(&mut self, filter: Filter) -> [f32; 4] {
        let width = filter.width();
        let plane_len = self.len / width;
        let mut bits = [0.0; 4];
        if plane_len == 0 {
            return bits;
        }
        let raw = &self.bytes[..plane_len * width];
        if width == 1 {
            bits[0] = plane_bits(raw);
            return bits;
        }
        let mut rest = self.planes[..raw.len()].chunks_exact_mut(plane_len);
        let mut parts: [&mut [u8]; 4] = std::array::from_fn(|_| rest.next().unwrap_or_default());
        planes::split(filter, raw, &mut parts);
        for (bits, plane) in bits.iter_mut().zip(&parts[..width]) {
            *bits = plane_bits(plane);
        }
        bits
    }
}

/// A symbol takes a bit at least, unless all are the same; and a sample knows fewer values than there are (Miller and Madow's correction).
fn plane_bits(plane: &[u8]) -> f32 {
    let histogram = histogram(plane);
    let values = histogram.iter().filter(|count| **count > 0).count();
    if values < 2 {
        return 0.0;
    }
    let unseen = share(values - 1, 2 * plane.len()) * std::f32::consts::LOG2_E;
    (entropy_bits(&histogram) + unseen).clamp(1.0, 8.0)
}

fn share(part: usize, whole: usize) -> f32 {
    part as f32 / whole as f32
}

/// A fixed sequence that is spread over rows of any length, so that data with a period does not show the same column every time.
#[derive(Debug, Default)]
pub(super) struct Jitter(usize);

impl Jitter {
    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(5).wrapping_add(1237);
        self.0 % bound
    }
}

/// How often each value stands in these bytes.
pub(super) fn histogram(bytes: &[u8]) -> [u32; 256] {
    // Four tables, or equal bytes in a row wait for each other's count.
    let mut counts = [[0u32; 256]; 4];
    let (fours, rest) = bytes.as_chunks::<4>();
    for four in fours {
        for (counts, byte) in counts.iter_mut().zip(four) {
            counts[usize::from(*byte)] += 1;
        }
    }
    for byte in rest {
        counts[0][usize::from(*byte)] += 1;
    }
    std::array::from_fn(|value| counts.iter().map(|counts| counts[value]).sum())
}

/// How often each value stands in about `want` of these bytes, taken as runs of a cache line spread over all of them.
pub(super) fn sampled_histogram(bytes: &[u8], want: usize) -> [u32; 256] {
    const LINE_LEN: usize = 64;
    if bytes.len() <= want {
        return histogram(bytes);
    }
    let line_count = want / LINE_LEN;
    let distance = bytes.len() / line_count;
    let mut counts = [[0u32; 256]; 4];
    let mut jitter = Jitter::default();
    for line in 0..line_count {
        let start = line * distance + jitter.below(distance - LINE_LEN + 1);
        for four in bytes[start..start + LINE_LEN].as_chunks::<4>().0 {
            for (counts, byte) in counts.iter_mut().zip(four) {
                counts[usize::from(*byte)] += 1;
            }
        }
    }
    std::array::from_fn(|value| counts.iter().map(|counts| counts[value]).sum())
}

/// Bits per byte below which no code can go on average, within 0.01.
pub(super) fn entropy_bits(histogram: &[u32; 256]) -> f32 {
    let total: u32 = histogram.iter().sum();
    if total == 0 {
        return 0.0;
    }
    let sum: f32 = histogram
        .iter()
        .filter(|count| **count > 0)
        .map(|count| {
            let count = *count as f32;
            count * log2(count)
        })
        .sum();
    log2(total as f32) - sum / total as f32
}

/// The base-2 logarithm within 0.005, for numbers of at least 1: the exponent as it stands, and a parabola for the mantissa.
fn log2(x: f32) -> f32 {
    let bits = x.to_bits();
    let exponent = (bits >> 23) as f32 - 127.0;
    let mantissa = f32::from_bits(bits & 0x007f_ffff | 0x3f80_0000);
    exponent + (-0.344_845 * mantissa + 2.024_658_6) * mantissa - 1.674_877_6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::sample_data::{random, text};

    const MIB: usize = 1 << 20;

    fn sample_of(chunk: &[u8]) -> Sample {
        let mut sample = Sample::new();
        // What the last chunk left behind must not show.
        sample.take(&random(9, 3 * MIB));
        sample.take(chunk);
        sample
    }

    #[test]
    fn entropies_are_near_the_true_ones() {
        let exact = |histogram: &[u32; 256]| -> f64 {
            let total = f64::from(histogram.iter().sum::<u32>());
            let shares = histogram.iter().filter(|count| **count > 0);
            shares
                .map(|count| f64::from(*count) / total)
                .map(|p| -p * p.log2())
                .sum()
        };
        for bytes in [random(1, 40_000), text(1, 40_000), vec![7; 40_000]] {
            let histogram = histogram(&bytes);
            let off = f64::from(entropy_bits(&histogram)) - exact(&histogram);
            assert!(off.abs() < 0.01, "{off}");
            assert_eq!(histogram.iter().sum::<u32>() as usize, bytes.len());
        }
        assert_eq!(entropy_bits(&[0; 256]), 0.0);
    }

    #[test]
    fn a_sample_is_like_the_whole() {
        assert!(sample_of(&random(1, 4 * MIB)).bits(Filter::None)[0] > 7.95);
        let text = text(1, 4 * MIB);
        let exact = plane_bits(&text);
        assert!((sample_of(&text).bits(Filter::None)[0] - exact).abs() < 0.1);
        // bf16-like: the upper byte takes few values.
        let mut weights = random(2, 4 * MIB);
        weights
            .iter_mut()
            .skip(1)
            .step_by(2)
            .for_each(|upper| *upper %= 4);
        let bits = sample_of(&weights).bits(Filter::Planes2);
        assert!(bits[0] > 7.9 && (bits[1] - 2.0).abs() < 0.05, "{bits:?}");
    }

    #[test]
    fn zeros_are_counted_and_left_out() {
        let mut chunk = vec![0; 4 * MIB];
        let filled = MIB..MIB + MIB / 2;
        chunk[filled.clone()].copy_from_slice(&random(3, MIB / 2));
        let mut sample = sample_of(&chunk);
        assert!((sample.zero_share() - 0.875).abs() < 0.02);
        assert!(sample.bits(Filter::None)[0] > 7.9);
        for index in 0..3 {
            let stretch = sample.stretch(chunk.len(), 16 << 10, index, 3);
            assert_eq!(stretch.len(), 16 << 10);
            assert!(filled.contains(&stretch.start));
        }
    }

    #[test]
    fn any_length_is_sampled() {
        let bytes = random(4, 5 * SAMPLE_LEN);
        for len in (0..300).chain([
            SAMPLE_LEN - 1,
            2 * SAMPLE_LEN - 1,
            2 * SAMPLE_LEN,
            5 * SAMPLE_LEN - 1,
        ]) {
            for zeros_from in [0, len / 2, len] {
                let mut chunk = bytes[..len].to_vec();
                chunk[zeros_from..].fill(0);
                let mut sample = sample_of(&chunk);
                for filter in Filter::ALL {
                    assert!(
                        sample
                            .bits(filter)
                            .iter()
                            .all(|bits| (0.0..=8.0).contains(bits))
                    );
                }
                let stretch = sample.stretch(len, 1000, 1, 2);
                assert!(stretch.end <= len && stretch.len() <= 1000);
                sampled_histogram(&chunk, 8192);
            }
        }
    }
}
