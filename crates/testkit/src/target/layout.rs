//! How a job lies in GPU memory: blocks, their stamps, and the header that describes the job.
//!
//! In: a [`Plan`]. Out: its blocks; the header as bytes and back. Fails on a header that is none, or of a job with other sizes.
//!
//! ```text
//! block:        number of its last step (u64) | state (u64) | content
//! header block: the same, with the header between state and content
//! header:       magic | seed | step count | number of GPUs | per GPU: size, fill kind (u64 each)
//! ```

use super::TargetError;
use super::args::{GpuPlan, Plan};
use super::file::FileBytes;
use super::fill::{Fill, Tensor};

/// Largest block: one copy of it is one update.
const BLOCK_LEN_MAX: u64 = 1 << 20;
/// Smallest block (but the last of a GPU): holds the longest header.
const BLOCK_LEN_MIN: u64 = 4096;
/// Small memories are cut into about this many blocks, so that a step still updates them in several copies.
const BLOCK_COUNT_AIM: u64 = 32;
/// A block is refreshed whole in one of this many steps and only stamped in the others, so that a step costs a fraction of the memory.
const REFRESH_PERIOD: u64 = 8;
/// Bytes of number and state.
pub(super) const STAMP_LEN: usize = 16;
const MAGIC: u64 = u64::from_le_bytes(*b"ckpt-job");
/// The stored step count of a job without an end.
const FOR_EVER: u64 = u64::MAX;
/// Bytes of the header before its two words per GPU.
const HEADER_FIXED_LEN: usize = 32;

/// Number and state of a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stamp {
    pub(super) step: u64,
    pub(super) state: u64,
}

impl Stamp {
    pub(super) fn encode(self) -> [u8; STAMP_LEN] {
        let mut bytes = [0; STAMP_LEN];
        bytes[..8].copy_from_slice(&self.step.to_le_bytes());
        bytes[8..].copy_from_slice(&self.state.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: [u8; STAMP_LEN]) -> Self {
        Self {
            step: word(&bytes, 0),
            state: word(&bytes, 1),
        }
    }
}

/// One block of one GPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    pub(super) gpu_index: usize,
    pub(super) index: u64,
    pub(super) offset: u64,
    pub(super) len: usize,
    pub(super) tensor: Tensor,
    pub(super) is_header: bool,
}

impl Block {
    /// Whether steps change it.
    pub(super) fn is_live(&self) -> bool {
        self.is_header || (self.tensor.content.is_computed_on() && self.len >= STAMP_LEN)
    }

    pub(super) fn is_refreshed_in(&self, step: u64) -> bool {
        self.tensor.content.is_computed_on() && (self.index + step).is_multiple_of(REFRESH_PERIOD)
    }
}

impl Plan {
    /// All blocks, in the order of the digest.
    pub(super) fn blocks(&self) -> impl Iterator<Item = Block> + use<> {
        let header_gpu = self.header_gpu();
        let seed = self.seed;
        self.gpus
            .clone()
            .into_iter()
            .enumerate()
            .flat_map(move |(gpu_index, gpu)| {
                let block_len = gpu.block_len();
                (0..gpu.bytes.div_ceil(block_len)).map(move |index| {
                    let offset = index * block_len;
                    #[expect(clippy::cast_possible_truncation, reason = "at most a MiB")]
                    let len = block_len.min(gpu.bytes - offset) as usize;
                    let tensor = Tensor::at(&gpu.fill, seed, gpu_index, index);
                    Block {
                        gpu_index,
                        index,
                        offset,
                        len,
                        tensor,
                        is_header: index == 0 && header_gpu == Some(gpu_index),
                    }
                })
            })
    }

    /// The first GPU whose memory holds a header; none when a file says what the memory is.
    fn header_gpu(&self) -> Option<usize> {
        let is_file = |gpu: &GpuPlan| matches!(gpu.fill, Fill::File(_));
        if self.gpus.iter().any(is_file) {
            return None;
        }
        let len = (STAMP_LEN + self.header_len()) as u64;
        self.gpus.iter().position(|gpu| gpu.bytes >= len)
    }

    /// For each GPU, the file that says what its memory is.
    pub(super) fn files(&self) -> Result<Vec<Option<FileBytes>>, TargetError> {
        let file_of = |gpu: &GpuPlan| match &gpu.fill {
            Fill::File(path) => FileBytes::open(path).map(Some),
            _ => Ok(None),
        };
        self.gpus.iter().map(file_of).collect()
    }

    pub(super) fn header_block(&self) -> Option<Block> {
        self.blocks().find(|block| block.is_header)
    }

    /// Bytes of the header, which follows its block's stamp; see [`Self::encode_header`].
    pub(super) fn header_len(&self) -> usize {
        HEADER_FIXED_LEN + 16 * self.gpus.len()
    }

    /// Magic, seed, step count, number of GPUs; then size and fill kind of each GPU: little-endian words.
    pub(super) fn encode_header(&self, place: &mut [u8]) {
        let fixed = [
            MAGIC,
            self.seed,
            self.step_count.unwrap_or(FOR_EVER),
            self.gpus.len() as u64,
        ];
        let per_gpu = self
            .gpus
            .iter()
            .flat_map(|gpu| [gpu.bytes, gpu.fill.code()]);
        for (place, word) in place
            .chunks_exact_mut(8)
            .zip(fixed.into_iter().chain(per_gpu))
        {
            place.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// The plan with what is stored, if the sizes are the same.
    pub(super) fn decode_header(&self, header: &[u8]) -> Result<Self, TargetError> {
        if word(header, 0) != MAGIC {
            return Err(TargetError::NoJob {
                found: word(header, 0),
            });
        }
        let gpu_count = word(header, 3);
        if gpu_count != self.gpus.len() as u64 {
            return Err(TargetError::OtherGpuCount {
                stored: gpu_count,
                given: self.gpus.len(),
            });
        }
        let gpus = self.gpus.iter().enumerate().map(|(gpu_index, gpu)| {
            let bytes = word(header, 4 + 2 * gpu_index);
            if bytes != gpu.bytes {
                return Err(TargetError::OtherSize {
                    gpu_index,
                    stored: bytes,
                    given: gpu.bytes,
                });
            }
            let code = word(header, 5 + 2 * gpu_index);
            let fill = Fill::from_code(code).ok_or(TargetError::UnknownFill { gpu_index, code })?;
            Ok(GpuPlan { bytes, fill })
        });
        Ok(Self {
            gpus: gpus.collect::<Result<_, _>>()?,
            seed: word(header, 1),
            step_count: Some(word(header, 2)).filter(|&step_count| step_count != FOR_EVER),
            ..*self
        })
    }
}

impl GpuPlan {
    /// Bytes in each block but the last: follows from the size alone, so that a process that knows only its command line finds them.
    fn block_len(&self) -> u64 {
        (self.bytes / BLOCK_COUNT_AIM)
            .next_power_of_two()
            .clamp(BLOCK_LEN_MIN, BLOCK_LEN_MAX)
    }
}

/// The `index`-th little-endian word.
pub(super) fn word(bytes: &[u8], index: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[8 * index..8 * index + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_the_memory() {
        for bytes in [
            1,
            4095,
            4096,
            4097,
            131_072,
            1 << 20,
            (40 << 20) + 1,
            3 << 30,
        ] {
            let plan = Plan {
                gpus: vec![GpuPlan {
                    bytes,
                    fill: Fill::Mixed,
                }],
                seed: 0,
                step_count: Some(0),
                step_pause_ms: 0,
                digest_every: 0,
            };
            let mut end = 0;
            for block in plan.blocks() {
                assert_eq!(block.offset, end);
                assert!(block.len as u64 <= BLOCK_LEN_MAX);
                end += block.len as u64;
            }
            assert_eq!(end, bytes);
        }
    }
}
