//! What the memory of an emulated training job looks like, as a pure function of position and key.
//!
//! In: a fill kind, a position (seed, GPU, block) and a 64-bit key. Out: the bytes of one block. Nothing can fail. The words of a block come
//! from a counter-based generator, so a block costs about as much as writing it and needs no state but its key.
//!
//! `weights` cycles through the tensors of mixed-precision training: bf16 weights, the fp32 master copy, Adam's two moments. `mixed` puts
//! zero pools and incompressible stretches between them.

use std::path::PathBuf;
use std::sync::LazyLock;

use clap::ValueEnum;

/// What the name of a file follows in `--fill`.
const FILE_PREFIX: &str = "file:";

/// How the memory of one GPU is filled.
#[derive(Debug, Clone, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fill {
    /// Trained-looking tensors: bf16, fp32 and Adam state, a quarter each of the latter's two moments
    Weights,
    /// Zeros, and they stay zeros
    Zeros,
    /// Incompressible bytes
    Random,
    /// 60 % weights, 25 % zero pools, 15 % incompressible stretches
    Mixed,
    /// The bytes of a file, which are held and not computed on (see [`super::file`])
    #[value(skip)]
    File(PathBuf),
}

impl Fill {
    /// Parses a kind by its name, or `file:PATH`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text.strip_prefix(FILE_PREFIX) {
            Some("") => Err(format!(
                "`{FILE_PREFIX}` needs the path of a file behind it"
            )),
            Some(path) => Ok(Self::File(PathBuf::from(path))),
            None => Self::from_str(text, false).map_err(|_error| {
                format!("`{text}` is none of weights, zeros, random, mixed, {FILE_PREFIX}PATH")
            }),
        }
    }

    /// The number that stands for this kind in a stored job header. A file is in none: its memory is held, byte for byte.
    pub(crate) fn code(&self) -> u64 {
        match self {
            Self::File(_) => 0,
            Self::Weights => 1,
            Self::Zeros => 2,
            Self::Random => 3,
            Self::Mixed => 4,
        }
    }

    /// The kind that a stored job header names; `None` for a number that no kind has.
    pub(crate) fn from_code(code: u64) -> Option<Self> {
        [Self::Weights, Self::Zeros, Self::Random, Self::Mixed]
            .into_iter()
            .find(|fill| fill.code() == code)
    }
}

/// What one tensor is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    /// A pool that the job has not used yet.
    Zeros,
    /// Incompressible bytes.
    Random,
    /// Normal weights in bf16.
    Bf16,
    /// Normal weights in fp32.
    Fp32,
    /// Adam's first moment: small, a scale per row, some rows never touched.
    AdamM,
    /// Adam's second moment: the same, never negative.
    AdamV,
    /// What a file says. It stays as it is.
    Held,
}

impl Content {
    /// Whether steps change it.
    pub(crate) fn is_computed_on(self) -> bool {
        !matches!(self, Self::Zeros | Self::Held)
    }
}

/// Blocks that share one tensor: 4 MiB of it with full-sized blocks, so that a zero pool holds whole chunks of the default size.
const TENSOR_BLOCK_COUNT: u64 = 4;
/// What a bf16 job keeps for each parameter, one tensor after the other.
const WEIGHTS: [Content; 4] = [Content::Bf16, Content::Fp32, Content::AdamM, Content::AdamV];
/// 12 tensors of weights, 5 zero pools, 3 incompressible stretches, spread so that a small GPU also gets some of each.
const MIXED: [Content; 20] = {
    use Content::{AdamM, AdamV, Bf16, Fp32, Random, Zeros};
    [
        Bf16, Fp32, Zeros, Random, AdamM, AdamV, Zeros, Bf16, Fp32, Random, //
        Zeros, AdamM, AdamV, Zeros, Bf16, Fp32, Random, Zeros, AdamM, AdamV,
    ]
};
/// Bytes in a row of an Adam tensor: 384 floats, the hidden size of a small model.
const ROW_LEN: usize = 384 * 4;

/// The content and the scale (standard deviation of its weights) of the tensor that a block belongs to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tensor {
    pub(crate) content: Content,
    sigma: f32,
}

impl Tensor {
    /// The tensor at `block_index` of `gpu_index`.
    pub(crate) fn at(fill: &Fill, seed: u64, gpu_index: usize, block_index: u64) -> Self {
        let tensor_index = block_index / TENSOR_BLOCK_COUNT;
        let content = match fill {
            Fill::Zeros => Content::Zeros,
            Fill::Random => Content::Random,
            Fill::Weights => pick(&WEIGHTS, tensor_index),
            Fill::Mixed => pick(&MIXED, tensor_index),
            Fill::File(_) => Content::Held,
        };
        let key = mix(mix(seed, gpu_index as u64), tensor_index);
        // Between 0.01 and 0.06, where the layers of trained transformers lie.
        let sigma = 0.01 + 0.05 * f32::from(low16(key)) / 65_536.0;
        Self { content, sigma }
    }

    /// Writes the tensor's bytes over the whole of `block`: the same bytes for the same key. What is held is not written.
    pub(crate) fn write(self, key: u64, block: &mut [u8]) {
        match self.content {
            Content::Zeros => block.fill(0),
            Content::Held => {}
            Content::Random => write_words(block, |index| random(key, index)),
            Content::Bf16 => {
                let normal = &*NORMAL;
                write_words(block, |index| {
                    let bits = random(key, index);
                    [0, 16, 32, 48].into_iter().fold(0, |word, shift| {
                        word | u64::from(bf16(normal.at(low16(bits >> shift)) * self.sigma))
                            << shift
                    })
                });
            }
            Content::Fp32 => {
                let normal = &*NORMAL;
                write_words(block, |index| {
                    two_floats(random(key, index), |lane| normal.at(lane) * self.sigma)
                });
            }
            Content::AdamM => write_rows(key, block, |moment| moment),
            Content::AdamV => write_rows(key, block, |moment| moment * moment),
        }
    }
}

/// A key from two numbers, such that neither can be told from it and near inputs give unrelated keys.
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    random(random(a, 1) ^ b, 2)
}

/// Writes Adam rows: each is either untouched (zeros) or normal under its own power of two, passed through `shape`.
fn write_rows(key: u64, block: &mut [u8], shape: impl Fn(f32) -> f32) {
    let normal = &*NORMAL;
    let mut words_before = 0;
    for (row_index, row) in block.chunks_mut(ROW_LEN).enumerate() {
        let row_bits = random(!key, row_index as u64);
        if row_bits >> 62 == 0 {
            row.fill(0);
        } else {
            // Gradients of trained models spread over orders of magnitude: 2 octaves of deviation around 2^-13.
            let scale = (2.0 * normal.at(low16(row_bits)) - 13.0).round().exp2();
            write_words(row, |index| {
                two_floats(random(key, words_before + index), |lane| {
                    shape(normal.at(lane) * scale)
                })
            });
        }
        words_before += (ROW_LEN / 8) as u64;
    }
}

/// Fills `bytes` with little-endian words by index; the last may be cut.
fn write_words(bytes: &mut [u8], word: impl Fn(u64) -> u64) {
    let mut words = bytes.chunks_exact_mut(8);
    let mut index = 0;
    for place in &mut words {
        place.copy_from_slice(&word(index).to_le_bytes());
        index += 1;
    }
    let tail = words.into_remainder();
    let tail_len = tail.len();
    tail.copy_from_slice(&word(index).to_le_bytes()[..tail_len]);
}

/// Two fp32 values from one random word: of each half the upper bits choose the value, the lower become the end of its mantissa, which is
/// noise in trained tensors and would repeat if it came from a table.
fn two_floats(bits: u64, value: impl Fn(u16) -> f32) -> u64 {
    [0, 32].into_iter().fold(0, |word, shift| {
        let half = bits >> shift;
        let float = value(low16(half >> 16)).to_bits() & 0xffff_0000;
        word | (u64::from(float) | u64::from(low16(half))) << shift
    })
}

/// The nearest bf16, ties to even; the value is finite.
fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    low16(u64::from((bits + 0x7fff + ((bits >> 16) & 1)) >> 16))
}

/// The `index`-th word of the stream that `key` names (Wang Yi's wyrand: one wide multiplication a word).
fn random(key: u64, index: u64) -> u64 {
    let counter = key.wrapping_add((index.wrapping_add(1)).wrapping_mul(0xa076_1d64_78bd_642f));
    let product = u128::from(counter) * u128::from(counter ^ 0xe703_7ed1_a0b4_28db);
    fold(product)
}

/// The two halves of a wide number, as one word.
#[expect(
    clippy::cast_possible_truncation,
    reason = "each half is what is wanted"
)]
pub(crate) fn fold(wide: u128) -> u64 {
    (wide >> 64) as u64 ^ wide as u64
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the low lane is what is wanted"
)]
fn low16(bits: u64) -> u16 {
    bits as u16
}

fn pick(cycle: &[Content], index: u64) -> Content {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "below the length of a short array"
    )]
    let place = (index % cycle.len() as u64) as usize;
    cycle[place]
}

/// Quantiles of the standard normal distribution at the middles of 65,536 equal steps.
struct Normal(Box<[f32; 65_536]>);

impl Normal {
    fn at(&self, lane: u16) -> f32 {
        self.0[usize::from(lane)]
    }
}

static NORMAL: LazyLock<Normal> = LazyLock::new(|| {
    let step = 1.0 / 65_536.0;
    // dz/dp = 1 / density(z), walked by midpoints from the median outwards; the distribution is symmetric.
    let per_step = |z: f64| step * (std::f64::consts::TAU).sqrt() * (z * z / 2.0).exp();
    let mut table = Box::new([0.0; 65_536]);
    let mut z = per_step(0.0) / 2.0;
    for lane in 0..32_768 {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a table of single precision"
        )]
        let quantile = z as f32;
        table[32_768 + lane] = quantile;
        table[32_767 - lane] = -quantile;
        z += per_step(z + per_step(z) / 2.0);
    }
    Normal(table)
});

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 1 << 20;

    /// The ratio of zstd level 1 over one block of every tensor of `contents`.
    fn ratio(contents: &[Content]) -> f64 {
        let mut raw = Vec::new();
        for (key, &content) in contents.iter().enumerate() {
            let mut block = vec![0xff; LEN];
            Tensor {
                content,
                sigma: 0.03,
            }
            .write(key as u64, &mut block);
            raw.extend_from_slice(&block);
        }
        let stored = zstd::bulk::compress(&raw, 1).expect("compress in memory");
        raw.len() as f64 / stored.len() as f64
    }

    #[test]
    fn compressibility_is_that_of_real_tensors() {
        // Real weights under zstd level 1: bf16 1.28, fp32 1.09, Adam state with its master copy 1.42.
        let bf16 = ratio(&[Content::Bf16]);
        assert!((1.20..1.36).contains(&bf16), "bf16 {bf16}");
        let fp32 = ratio(&[Content::Fp32]);
        assert!((1.05..1.14).contains(&fp32), "fp32 {fp32}");
        let adam = ratio(&[Content::Fp32, Content::AdamM, Content::AdamV]);
        assert!((1.25..1.60).contains(&adam), "adam {adam}");
        let random = ratio(&[Content::Random]);
        assert!((0.99..1.001).contains(&random), "random {random}");
        let zeros = ratio(&[Content::Zeros]);
        assert!(zeros > 1000.0, "zeros {zeros}");
    }

    #[test]
    fn weights_are_normal_under_their_scale() {
        let mut block = vec![0; LEN];
        Tensor {
            content: Content::Bf16,
            sigma: 0.5,
        }
        .write(9, &mut block);
        let values: Vec<f64> = block
            .chunks_exact(2)
            .map(|pair| {
                f64::from(f32::from_bits(
                    u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16,
                ))
            })
            .collect();
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let deviation = (values.iter().map(|value| value * value).sum::<f64>() / count).sqrt();
        let within_one = values.iter().filter(|value| value.abs() < 0.5).count() as f64 / count;
        assert!(mean.abs() < 0.005, "mean {mean}");
        assert!((deviation - 0.5).abs() < 0.01, "deviation {deviation}");
        assert!(
            (within_one - 0.683).abs() < 0.01,
            "within one deviation {within_one}"
        );
    }

    #[test]
    fn second_moment_is_finite_and_never_negative() {
        let mut block = vec![0; LEN];
        Tensor {
            content: Content::AdamV,
            sigma: 0.03,
        }
        .write(4, &mut block);
        let mut zero_count = 0;
        for bytes in block.chunks_exact(4) {
            let value =
                f32::from_bits(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
            assert!(value.is_finite() && value.is_sign_positive(), "{value}");
            zero_count += usize::from(value == 0.0);
        }
        let zero_share = zero_count as f64 / (LEN / 4) as f64;
        assert!(
            (0.15..0.35).contains(&zero_share),
            "untouched rows {zero_share}"
        );
    }

    #[test]
    fn every_length_is_filled_and_follows_the_key() {
        for content in [
            Content::Random,
            Content::Bf16,
            Content::Fp32,
            Content::AdamM,
            Content::AdamV,
        ] {
            let tensor = Tensor {
                content,
                sigma: 0.03,
            };
            let mut whole = vec![0; 4099];
            tensor.write(1, &mut whole);
            for len in [0, 1, 7, 8, 9, 1535, 1537, 4098] {
                let mut part = vec![0; len];
                tensor.write(1, &mut part);
                assert_eq!(
                    part,
                    whole[..len],
                    "{content:?} of {len} bytes is a prefix of the longer one"
                );
            }
            let mut other = vec![0; 4099];
            tensor.write(2, &mut other);
            assert_ne!(other, whole, "{content:?} follows the key");
        }
    }

    #[test]
    fn mixed_has_its_shares_and_codes_come_back() {
        let share = |wanted: fn(Content) -> bool| {
            MIXED.into_iter().filter(|&content| wanted(content)).count()
        };
        assert_eq!(share(|content| content == Content::Zeros), 5);
        assert_eq!(share(|content| content == Content::Random), 3);
        for fill in [Fill::Weights, Fill::Zeros, Fill::Random, Fill::Mixed] {
            assert_eq!(Fill::from_code(fill.code()), Some(fill));
        }
        assert_eq!(Fill::from_code(0), None);
    }
}
