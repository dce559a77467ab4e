//! What fills the memory: bytes that compress like the real ones, made on the spot.
//!
//! In: a [`Kind`], or a file. Out: a [`Tile`], some hundred MiB at most, which is repeated over each GPU's memory. What can fail: reading the file ([`DataError`]).
//!
//! The synthetic kinds are random numbers with the distributions of real tensors: a scale per row for weights, rows that were never touched in Adam's moments, pages of a KV
//! cache that are mostly empty. Their ratios are held against those of real weights in `docs/bench.md`. A stripe is a pure function of kind and place, so threads share the work.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::LazyLock;
use std::thread;

/// Bytes that one call makes; a multiple of every row and page below.
const STRIPE_LEN: usize = 1 << 20;
/// Values in a row that shares one scale: the hidden size of a small model.
const ROW_VALUES: usize = 384;
/// Bytes of a KV cache page.
const PAGE_LEN: usize = 64 << 10;
/// Values of one attention head, each with a scale of its own.
const CHANNELS: usize = 128;

/// Data that is made here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Nothing but zeros.
    Zero,
    /// Bytes that no coder makes shorter.
    Random,
    /// Weights in bf16.
    Bf16,
    /// Weights in fp32.
    Fp32,
    /// Weights in fp16.
    Fp16,
    /// fp32 master weights and Adam's two moments, a third each.
    Adam,
    /// A paged KV cache in bf16, a tenth of it filled.
    Kv,
    /// A served model: 45 % bf16 weights, 45 % KV cache, 5 % zeros, 5 % activations.
    Image,
    /// Weights quantized to int8, a scale per row.
    Int8,
}

impl Kind {
    /// Every kind, in the order of the help text.
    pub const ALL: [Self; 9] = [
        Self::Zero,
        Self::Random,
        Self::Bf16,
        Self::Fp32,
        Self::Fp16,
        Self::Adam,
        Self::Kv,
        Self::Image,
        Self::Int8,
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Zero => "zero",
            Self::Random => "random",
            Self::Bf16 => "bf16",
            Self::Fp32 => "fp32",
            Self::Fp16 => "fp16",
            Self::Adam => "adam",
            Self::Kv => "kv",
            Self::Image => "image",
            Self::Int8 => "int8",
        }
    }

    /// Fills stripe `index` of `count`.
    fn write(self, index: usize, count: usize, out: &mut [u8]) {
        let mut numbers = Numbers::of(index as u64);
        match self {
            // Written, not only allocated: pages that were never written are all one page, which is in every cache.
            Self::Zero => out.fill(0),
            Self::Random => {
                for word in out.chunks_mut(8) {
                    word.copy_from_slice(&numbers.next().to_le_bytes()[..word.len()]);
                }
            }
            Self::Bf16 => weights(&mut numbers, out, |value, _| bf16(value).to_le_bytes()),
            Self::Fp32 => weights(&mut numbers, out, fp32),
            Self::Fp16 => weights(&mut numbers, out, |value, _| fp16(value).to_le_bytes()),
            Self::Int8 => quantized(&mut numbers, out),
            Self::Kv => pages(index, &mut numbers, out),
            Self::Adam => match share(index, count) {
                master if master < 1.0 / 3.0 => weights(&mut numbers, out, fp32),
                first if first < 2.0 / 3.0 => moments(&mut numbers, first * 3.0 - 1.0, out, |m| m),
                second => moments(&mut numbers, second * 3.0 - 2.0, out, |m| m * m),
            },
            Self::Image => match share(index, count) {
                model if model < 0.45 => Self::Bf16.write(index, count, out),
                cache if cache < 0.90 => Self::Kv.write(index, count, out),
                free if free < 0.95 => out.fill(0),
                _ => {
                    for pair in out.chunks_exact_mut(2) {
                        pair.copy_from_slice(&bf16(numbers.normal()).to_le_bytes());
                    }
                }
            },
        }
    }
}

/// The middle of a stripe, as a share of all.
#[expect(clippy::cast_precision_loss, reason = "a share")]
fn share(index: usize, count: usize) -> f32 {
    (index as f32 + 0.5) / count as f32
}

/// What to fill memory with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Data {
    /// Made here.
    Kind(Kind),
    /// A file's bytes, repeated.
    File(PathBuf),
}

impl FromStr for Data {
    type Err = std::convert::Infallible;

    /// A kind's name, or else a path.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let kind = Kind::ALL.into_iter().find(|kind| kind.name() == text);
        Ok(kind.map_or_else(|| Self::File(text.into()), Self::Kind))
    }
}

impl fmt::Display for Data {
    /// The kind, or the file's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kind(kind) => f.write_str(kind.name()),
            Self::File(path) => {
                let name = path.file_name().unwrap_or(path.as_os_str());
                f.write_str(&name.to_string_lossy())
            }
        }
    }
}

/// A file that memory cannot be filled with.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// It cannot be read.
    #[error("cannot read {} (--data takes {}, or a file)", path.display(), names())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// It has no bytes.
    #[error("{} is empty (--data)", path.display())]
    Empty {
        /// Which file.
        path: PathBuf,
    },
}

fn names() -> String {
    Kind::ALL.map(Kind::name).join(", ")
}

impl Data {
    /// `len` bytes of it.
    ///
    /// # Errors
    /// A file that cannot be read, or is empty.
    pub fn tile(&self, len: usize, threads: usize) -> Result<Vec<u8>, DataError> {
        match self {
            Self::Kind(kind) => Ok(synthetic(*kind, len, threads)),
            Self::File(path) => {
                let unreadable = |source| DataError::Unreadable {
                    path: path.clone(),
                    source,
                };
                let file = File::open(path).map_err(unreadable)?;
                let mut tile = Vec::with_capacity(len);
                file.take(len as u64)
                    .read_to_end(&mut tile)
                    .map_err(unreadable)?;
                if tile.is_empty() {
                    return Err(DataError::Empty { path: path.clone() });
                }
                while tile.len() < len {
                    let more = (len - tile.len()).min(tile.len());
                    tile.extend_from_within(..more);
                }
                Ok(tile)
            }
        }
    }
}

fn synthetic(kind: Kind, len: usize, threads: usize) -> Vec<u8> {
    let mut tile = vec![0; len];
    let count = len.div_ceil(STRIPE_LEN);
    let per_thread = count.div_ceil(threads.max(1)).max(1);
    thread::scope(|scope| {
        for (number, share) in tile.chunks_mut(per_thread * STRIPE_LEN).enumerate() {
            scope.spawn(move || {
                for (index, stripe) in share.chunks_mut(STRIPE_LEN).enumerate() {
                    kind.write(number * per_thread + index, count, stripe);
                }
            });
        }
    });
    tile
}

/// Spread of the scales of rows, as a factor of e: what gives the exponents of trained weights their entropy.
const ROW_SPREAD: f32 = 0.25;
/// Deviation of a usual weight.
const WEIGHT_DEVIATION: f32 = 0.05;

/// Rows of normal values, each under its own scale.
fn weights<const LEN: usize>(
    numbers: &mut Numbers,
    out: &mut [u8],
    encode: impl Fn(f32, &mut Numbers) -> [u8; LEN],
) {
    for row in out.chunks_mut(ROW_VALUES * LEN) {
        let scale = WEIGHT_DEVIATION * (ROW_SPREAD * numbers.normal()).exp();
        for place in row.chunks_exact_mut(LEN) {
            let value = numbers.normal() * scale;
            place.copy_from_slice(&encode(value, numbers));
        }
    }
}

/// Rows of one of Adam's moments, of a model whose first half is an embedding: most of its rows were never touched.
fn moments(numbers: &mut Numbers, place: f32, out: &mut [u8], shape: impl Fn(f32) -> f32) {
    for row in out.chunks_mut(ROW_VALUES * 4) {
        let is_touched = place > 0.52 || numbers.uniform() < 0.3;
        if !is_touched {
            row.fill(0);
            continue;
        }
        let scale = (1.5 * numbers.normal() - 11.0).exp();
        for place in row.chunks_exact_mut(4) {
            let value = shape(numbers.normal() * scale);
            place.copy_from_slice(&fp32(value, numbers));
        }
    }
}

/// One page of every ten is filled, any of the ten.
fn pages(index: usize, numbers: &mut Numbers, out: &mut [u8]) {
    const EVERY: u64 = 10;
    let first = (index * (STRIPE_LEN / PAGE_LEN)) as u64;
    for (number, page) in (first..).zip(out.chunks_mut(PAGE_LEN)) {
        // The ten may lie in two stripes, which must choose alike.
        let chosen = Numbers::of(!(number / EVERY)).next() % EVERY;
        if number % EVERY != chosen {
            page.fill(0);
            continue;
        }
        for head in page.chunks_mut(CHANNELS * 2) {
            for (value, scale) in head.chunks_exact_mut(2).zip(&*CHANNEL_SCALES) {
                value.copy_from_slice(&bf16(numbers.normal() * scale).to_le_bytes());
            }
        }
    }
}

static CHANNEL_SCALES: LazyLock<[f32; CHANNELS]> = LazyLock::new(|| {
    let mut numbers = Numbers::of(u64::MAX >> 1);
    [(); CHANNELS].map(|()| (0.7 * numbers.normal()).exp())
});

#[expect(
    clippy::cast_possible_truncation,
    reason = "the cast is what quantizes"
)]
fn quantized(numbers: &mut Numbers, out: &mut [u8]) {
    for row in out.chunks_mut(ROW_VALUES) {
        // The largest of so many normal values is near 3 deviations, and becomes 127.
        let scale = 127.0 / (3.0 + 0.3 * numbers.normal().abs());
        for place in row {
            let value = numbers.normal() * scale;
            // The cast cuts off and stops at the ends, so half a step away from zero is the nearest.
            *place = ((value + 0.5_f32.copysign(value)) as i8).to_le_bytes()[0];
        }
    }
}

/// The value; the end of its mantissa is noise, which would repeat if it came from the table of normal values.
fn fp32(value: f32, numbers: &mut Numbers) -> [u8; 4] {
    (value.to_bits() & 0xffff_0000 | u32::from(numbers.lane())).to_le_bytes()
}

/// The nearest bf16, ties to even; the value is finite.
fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// The nearest fp16 of a value below 65504; what is below its normal range becomes subnormal.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "both parts fit by construction"
)]
fn fp16(value: f32) -> u16 {
    let sign = (value.to_bits() >> 16) as u16 & 0x8000;
    let magnitude = value.abs();
    if magnitude < 6.103_515_6e-5 {
        return sign | (magnitude * 16_777_216.0).round() as u16;
    }
    let bits = magnitude.to_bits();
    let rounded = bits + 0xfff + ((bits >> 13) & 1);
    // The exponent's bias goes from 127 to 15.
    sign | ((rounded - (112 << 23)) >> 13) as u16
}

/// SplitMix64, dealt out in lanes of 16 bits: numbers that depend on nothing but their place.
struct Numbers {
    state: u64,
    lanes: u64,
    lanes_left: u32,
    normal: &'static [f32; QUANTILES],
}

impl Numbers {
    /// The numbers of a place.
    fn of(place: u64) -> Self {
        Self {
            state: place.wrapping_mul(0xd134_2543_de82_ef95) ^ 0x5851_f42d_4c95_7f2d,
            lanes: 0,
            lanes_left: 0,
            normal: &NORMAL,
        }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    #[expect(clippy::cast_possible_truncation, reason = "the lowest lane is wanted")]
    fn lane(&mut self) -> u16 {
        if self.lanes_left == 0 {
            self.lanes = self.next();
            self.lanes_left = 4;
        }
        let lane = self.lanes as u16;
        self.lanes >>= 16;
        self.lanes_left -= 1;
        lane
    }

    /// Evenly between 0 and 1.
    fn uniform(&mut self) -> f32 {
        f32::from(self.lane()) / 65_536.0
    }

    /// Normally distributed, with deviation 1.
    fn normal(&mut self) -> f32 {
        self.normal[usize::from(self.lane())]
    }
}

const QUANTILES: usize = 1 << 16;

/// Quantiles of the standard normal distribution at the middles of equal steps, walked outwards from the median: dz = dp / density(z).
static NORMAL: LazyLock<Box<[f32; QUANTILES]>> = LazyLock::new(|| {
    let half = QUANTILES / 2;
    let mut table = Box::new([0.0; QUANTILES]);
    let root_two_pi = std::f64::consts::TAU.sqrt();
    let slope = |z: f64| root_two_pi * (z * z / 2.0).exp() / 65_536.0;
    let mut z = slope(0.0) / 2.0;
    for step in 0..half {
        #[expect(clippy::cast_possible_truncation, reason = "a table of f32")]
        let quantile = z as f32;
        table[half + step] = quantile;
        table[half - 1 - step] = -quantile;
        z += slope(z + slope(z) / 2.0);
    }
    table
});

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    fn ratio(tile: &[u8]) -> f64 {
        let stored = zstd::bulk::compress(tile, 1).unwrap();
        tile.len() as f64 / stored.len() as f64
    }

    #[test]
    fn made_data_compresses_like_the_real() {
        // zstd level 1 on real weights: bf16 1.28, fp32 1.09, fp16 1.09, Adam 1.42, KV cache 12, served model 2.37, int8 1.09.
        for (kind, least, most) in [
            (Kind::Zero, 1000.0, 1e9),
            (Kind::Random, 0.99, 1.001),
            (Kind::Bf16, 1.26, 1.30),
            (Kind::Fp32, 1.06, 1.11),
            (Kind::Fp16, 1.06, 1.11),
            (Kind::Adam, 1.35, 1.45),
            (Kind::Kv, 11.0, 13.0),
            (Kind::Image, 2.25, 2.45),
            (Kind::Int8, 1.07, 1.11),
        ] {
            // Stripes of Adam state and of images differ: as many as show each.
            let stripes = if matches!(kind, Kind::Adam | Kind::Image) {
                20
            } else {
                4
            };
            let tile = Data::Kind(kind).tile(stripes * STRIPE_LEN, 2).unwrap();
            let ratio = ratio(&tile);
            assert!((least..most).contains(&ratio), "{}: {ratio}", kind.name());
        }
    }

    /// Bits per byte of the bytes at every second place, each element first rotated left by one bit: bf16's exponents.
    fn exponent_bits(tile: &[u8]) -> f64 {
        let mut histogram = [0_u32; 256];
        for pair in tile.chunks_exact(2) {
            let element = u16::from_le_bytes([pair[0], pair[1]]).rotate_left(1);
            histogram[usize::from(element.to_be_bytes()[0])] += 1;
        }
        let total = f64::from(histogram.iter().sum::<u32>());
        let shares = histogram.iter().map(|count| f64::from(*count) / total);
        shares
            .filter(|share| *share > 0.0)
            .map(|share| -share * share.log2())
            .sum()
    }

    #[test]
    fn exponents_of_made_weights_have_the_entropy_of_real_ones() {
        let tile = Data::Kind(Kind::Bf16).tile(STRIPE_LEN, 1).unwrap();
        // Real: 16 bits become 10.6, 8 of which are sign and mantissa.
        let bits = exponent_bits(&tile);
        assert!((2.5..2.75).contains(&bits), "{bits}");
    }

    #[test]
    fn a_tile_is_the_same_on_any_number_of_threads() {
        let tile = |threads| {
            Data::Kind(Kind::Image)
                .tile(3 * STRIPE_LEN, threads)
                .unwrap()
        };
        let alone = tile(1);
        assert!(alone == tile(2) && alone == tile(7));
    }

    #[test]
    fn fp16_is_the_nearest() {
        for (value, bits) in [
            (0.0, 0),
            (1.0, 0x3c00),
            (-2.0, 0xc000),
            (0.099_975_586, 0x2e66),
            (6.103_515_6e-5, 0x0400),
            (5.960_464_5e-8, 0x0001),
            (65504.0, 0x7bff),
        ] {
            assert_eq!(fp16(value), bits, "{value}");
        }
    }

    #[test]
    fn a_name_is_a_kind_and_all_else_a_file() {
        let parse = |text: &str| text.parse::<Data>().unwrap();
        for kind in Kind::ALL {
            assert_eq!(parse(kind.name()), Data::Kind(kind));
        }
        let file = parse("dir/weights.bin");
        assert_eq!(file, Data::File("dir/weights.bin".into()));
        assert_eq!(file.to_string(), "weights.bin");
        assert!(matches!(file.tile(1, 1), Err(DataError::Unreadable { .. })));
    }
}
