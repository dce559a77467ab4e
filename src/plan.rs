//! Pure arithmetic: extents to chunks, frames to fetches, memory to buffers. No I/O, no threads.
//!
//! A save is planned before Lock, from each GPU's total memory, because after BEGIN nothing may be allocated and nothing may turn out not to fit: the part
//! length is chosen from the worst case (no chunk compresses), so that an object can never need more than 10,000 parts, and every buffer that the pipeline
//! will use is counted against the memory budget. A restore is planned from the manifest and the frame tables before the driver is asked.
//!
//! In: byte counts and settings. Out: [`SavePlan`], [`LoadPlan`], [`Chunks`], [`FetchGroup`]s. What can fail: [`PlanError`], which names the value, the least or
//! greatest one that works, and the key.
//!
//! # Memory of a plan
//!
//! ```text
//! save     gpus × ring_chunks × chunk_len + frame_buffers × frame_len_max + pack_buffers × PACK_LEN + threads × context_bytes + table_bytes
//! restore  Σ ring_chunks × chunk_len      + fetch_buffers × fetch_buffer_len                        + threads × context_bytes + table_bytes
//! ```
//!
//! The least plan keeps everything moving (two chunks per GPU, so that copy and compression overlap; one frame per thread and one being packed; pack buffers for one part per GPU
//! being filled and one under way). What the budget allows beyond it is dealt out in turns, a part's worth each.
//!
//! A part that is saved has no memory of its own: it is slices of chunk buffers (what does not compress), of frame buffers (what does), and of pack buffers (what is copied, because it is short or no
//! buffer could be lent). How the data will be is not known, so each of the three holds half of the parts that may be in flight and the one being filled: whatever the data are, their own
//! kind and the pack buffers together hold all.

use std::ops::Range;

use crate::codec::Decoder;
use crate::codec::frame::{CHUNK_LEN_MAX, CHUNK_LEN_MIN};
use crate::codec::frame_bound;
use crate::manifest::{FRAME_COUNT_MAX, object_len_max};

const MIB: u64 = 1 << 20;

/// S3's limit on the parts of one upload.
pub const PART_COUNT_MAX: u64 = 10_000;
/// S3's least length of every part but the last, 5 MiB.
pub const PART_LEN_MIN: u64 = 5 * MIB;
/// S3's greatest part length, 5 GiB.
pub const PART_LEN_MAX: u64 = 5 << 30;

/// What a store takes of one upload. Stores differ in it (`store.kind`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartLimits {
    /// Bytes of every part but the last, at least.
    pub len_min: u64,
    /// Bytes of a part, at most.
    pub len_max: u64,
    /// Parts, at most; [`PART_COUNT_MAX`] or fewer.
    pub count_max: u64,
    /// Bytes of an object, at most.
    pub object_len_max: u64,
}

impl PartLimits {
    /// Those of S3 itself, which are the widest that our part numbers and lengths have.
    pub const S3: Self = Self {
        len_min: PART_LEN_MIN,
        len_max: PART_LEN_MAX,
        count_max: PART_COUNT_MAX,
        object_len_max: PART_COUNT_MAX * PART_LEN_MAX,
    };

    /// Bytes of the longest object that these parts can make.
    fn longest_object(&self) -> u64 {
        let parts = self.count_max.saturating_mul(self.len_max);
        parts.min(self.object_len_max)
    }

    /// The shortest parts, in whole MiB, that an object of so many bytes fits.
    pub fn least_part_len(&self, object_len: u64) -> u64 {
        whole_mib(object_len.div_ceil(self.count_max))
            .max(self.len_min)
            .min(self.len_max)
    }
}

fn whole_mib(len: u64) -> u64 {
    len.div_ceil(MIB).saturating_mul(MIB)
}

/// Default part length unless the GPU is too large for it: enough for a connection to reach its speed.
const PART_LEN_DEFAULT: u64 = 16 * MIB;
/// Parts that a default length aims at, in tenths of those that the store takes, so that frame headers and seek table fit too.
const PART_COUNT_TENTHS: u64 = 9;
const CHUNK_LEN_DEFAULT: u64 = 4 * MIB;
/// Default chunk length for GPUs above [`LARGE_GPU_BYTES`]: a copy engine of 55 GB/s loses 4 % to the gaps between copies of this length and 6 % to those of 4 MiB; codecs are the faster
/// the shorter the chunks are, because more of them stay in the processor's cache (measured on an H200).
const CHUNK_LEN_LARGE: u64 = 8 * MIB;
const LARGE_GPU_BYTES: u64 = 32 << 30;
/// Length of a pack buffer in bytes. Every part may leave the last of its pack buffers nearly empty, so they are short against a part.
pub const PACK_LEN: u64 = MIB;
/// Requests in flight that memory is planned for on the smallest machine, and for each thread more: memory grows with the processors, as networks do. `store.parallelism` is the limit.
const REQUESTS_MIN: usize = 8;
const REQUESTS_PER_THREAD: usize = 4;
/// More than this many chunks in flight per GPU, not counting those that parts hold, only hides what the next stage cannot do.
const RING_CHUNKS_MAX: usize = 8;
/// Two: one is copied while the other is compressed.
pub(crate) const RING_CHUNKS_MIN: usize = 2;
/// A GPU is taken to use at least so much, 64 MiB, whatever the driver counts: buffers for that are cheap, and without them an estimate that is off would cost the rate.
const USED_MIN: u64 = 64 * MIB;
/// Memory of one frame in a table. Most is needed while it is encoded or read: 22 bytes as columns (stored length 4, kind 1, filter 1, digest 16), at most 43 as JSON, and slack for a column that
/// grows while it is read. While it is loaded it is the columns and at most one [`FetchGroup`] of 32 bytes: 54.
const TABLE_BYTES_PER_FRAME: u64 = 80;
/// Default bytes of one ranged read.
const FETCH_LEN_DEFAULT: u64 = 16 * MIB;
/// Chunks start at multiples of this many bytes in a fetch buffer: a cache line, which copy engines and digests like.
pub const LANDING_ALIGN: usize = 64;

/// An extent cut into chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunks {
    extent_len: u64,
    chunk_len: u64,
}

impl Chunks {
    /// Chunks of `chunk_len` bytes, the last one perhaps shorter. An empty extent has none.
    ///
    /// # Panics
    /// When `chunk_len` is 0.
    pub fn new(extent_len: u64, chunk_len: u64) -> Self {
        assert!(chunk_len > 0, "a chunk holds at least one byte");
        Self {
            extent_len,
            chunk_len,
        }
    }

    /// How many.
    pub fn count(&self) -> u64 {
        self.extent_len.div_ceil(self.chunk_len)
    }

    /// Bytes of the extent that the chunk holds; empty from [`Chunks::count`] on.
    pub fn range(&self, index: u64) -> Range<u64> {
        let edge = |index: u64| index.saturating_mul(self.chunk_len).min(self.extent_len);
        edge(index)..edge(index.saturating_add(1))
    }
}

/// What the user and the node give for a save.
#[derive(Debug, Clone)]
pub struct SaveSettings {
    /// `store.part_size` in bytes; `None` derives it.
    pub part_size: Option<u64>,
    /// What the store takes of an upload.
    pub limits: PartLimits,
    /// `pipeline.chunk_size` in bytes; `None` derives it.
    pub chunk_size: Option<u64>,
    /// Bytes of host memory that may be used.
    pub memory_budget: u64,
    /// Whether the user set `pipeline.memory_budget`: a set one is a limit, a derived one is raised to what the least plan needs.
    pub budget_is_set: bool,
    /// Threads that compress, at least 1.
    pub threads: u32,
    /// Parts in flight at once, at least 1.
    pub parallelism: u32,
    /// Bytes that each compressing thread's context takes ([`Settings::context_bytes`](crate::codec::Settings::context_bytes)).
    pub context_bytes: u64,
}

/// Every buffer of a save, and how an extent becomes parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavePlan {
    /// Bytes of raw data per chunk, the same for all GPUs.
    pub chunk_len: u64,
    /// Bytes of every part but an object's last.
    pub part_len: u64,
    /// Most bytes of a frame.
    pub frame_len_max: usize,
    /// Pinned chunk buffers per GPU, at least 2.
    pub ring_chunks: usize,
    /// Buffers of `frame_len_max` in the whole process, at least `threads` + 1.
    pub frame_buffers: usize,
    /// Buffers of [`PACK_LEN`] in the whole process, at least a part's worth per GPU and one more.
    pub pack_buffers: usize,
    /// Threads that compress; fewer than asked for when the budget is small.
    pub threads: u32,
    /// Bytes for the frame tables of all GPUs.
    pub table_bytes: u64,
    /// Bytes of all of this together: at most the memory budget, if that was set.
    pub total_bytes: u64,
}

impl SavePlan {
    /// The same plan with no more buffers than GPUs that use so much memory now (bytes, one number per GPU) can fill: to touch and pin what a small save leaves empty takes longer
    /// than the save. Chunk and part length stay, and so does what keeps everything moving, because the numbers are an estimate: with more memory than that the save is slower, not wrong.
    #[must_use]
    pub fn for_memory_in_use(self, gpu_used: &[u64]) -> Self {
        let filled = |len: u64, buffer_len: u64| {
            let count = Chunks::new(len.max(USED_MIN), buffer_len).count();
            usize::try_from(count).unwrap_or(usize::MAX)
        };
        let in_all = |buffer_len: u64| {
            let counts = gpu_used.iter().map(|used| filled(*used, buffer_len));
            counts.fold(0, usize::saturating_add)
        };
        let largest = gpu_used.iter().copied().max().unwrap_or(0);
        let at_most = |planned: usize, useful: usize, least: usize| planned.min(useful.max(least));
        let ring_chunks = at_most(
            self.ring_chunks,
            filled(largest, self.chunk_len),
            RING_CHUNKS_MIN,
        );
        let frame_buffers = at_most(
            self.frame_buffers,
            in_all(self.chunk_len),
            self.threads as usize + 1,
        );
        let pack_buffers = at_most(
            self.pack_buffers,
            in_all(PACK_LEN),
            (gpu_used.len() + 1) * count_of(self.part_len, PACK_LEN),
        );
        let spared = [
            product(
                (self.ring_chunks - ring_chunks) * gpu_used.len(),
                self.chunk_len,
            ),
            product(
                self.frame_buffers - frame_buffers,
                self.frame_len_max as u64,
            ),
            product(self.pack_buffers - pack_buffers, PACK_LEN),
        ];
        Self {
            ring_chunks,
            frame_buffers,
            pack_buffers,
            total_bytes: self.total_bytes - sum(&spared),
            ..self
        }
    }
}

/// What cannot be planned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A GPU's worst case does not fit the store's parts of the length that the user set.
    #[error(
        "store.part_size of {value} bytes cannot hold a GPU of {memory_len} bytes in {count_max} parts; it must be at least {least} bytes"
    )]
    PartSizeTooSmall {
        /// The length set, in bytes.
        value: u64,
        /// The least length that works, in bytes.
        least: u64,
        /// Memory of the GPU that needs it, in bytes.
        memory_len: u64,
        /// Parts that the store takes.
        count_max: u64,
    },
    /// A part length that the store does not take.
    #[error(
        "store.part_size of {value} bytes; the store takes {len_min} to {len_max} (store.kind)"
    )]
    PartSize {
        /// The length set, in bytes.
        value: u64,
        /// The least length that the store takes, in bytes.
        len_min: u64,
        /// The greatest, in bytes.
        len_max: u64,
    },
    /// More memory than an object of the store can hold in the worst case.
    #[error(
        "a GPU of {memory_len} bytes may need an object of {object_len} bytes, the store takes {longest} at most; \
         see store.kind, store.part_count_max and store.object_size_max"
    )]
    ObjectTooLong {
        /// Memory of the GPU in bytes.
        memory_len: u64,
        /// Its object in the worst case, in bytes.
        object_len: u64,
        /// Bytes of the longest object that the store takes.
        longest: u64,
    },
    /// A chunk length that the image format does not have.
    #[error(
        "pipeline.chunk_size of {value} bytes; it must be a power of two from {CHUNK_LEN_MIN} to {CHUNK_LEN_MAX}"
    )]
    ChunkSize {
        /// The length set, in bytes.
        value: u64,
    },
    /// So many chunks that a frame table cannot list them.
    #[error(
        "pipeline.chunk_size of {value} bytes cuts a GPU of {memory_len} bytes into more than {FRAME_COUNT_MAX} chunks; it must be at least {least} bytes"
    )]
    ChunkSizeTooSmall {
        /// The length set, in bytes.
        value: u64,
        /// The least length that works, in bytes.
        least: u64,
        /// Memory of the GPU that needs it, in bytes.
        memory_len: u64,
    },
    /// More memory than one object of the format can hold.
    #[error("a GPU of {memory_len} bytes does not fit one object of the image format")]
    GpuTooLarge {
        /// Memory of the GPU in bytes.
        memory_len: u64,
    },
    /// The user's memory budget is below what the least plan needs.
    #[error("pipeline.memory_budget of {set} bytes; this needs at least {least} bytes")]
    BudgetTooSmall {
        /// The budget set, in bytes.
        set: u64,
        /// What the least plan needs, in bytes.
        least: u64,
    },
}

/// Plans a save of GPUs with so much total memory each (bytes; every GPU that may hold data).
///
/// # Errors
/// When a setting cannot hold the worst case; see [`PlanError`].
pub fn plan_save(gpu_memory: &[u64], settings: &SaveSettings) -> Result<SavePlan, PlanError> {
    let largest = gpu_memory.iter().copied().max().unwrap_or(0);
    let chunk_len = choose_chunk_len(largest, settings.chunk_size)?;
    let part_len = choose_part_len(largest, chunk_len, settings.part_size, &settings.limits)?;
    let frame_len_max = usize::try_from(chunk_len)
        .map(frame_bound)
        .map_err(|_no_address_space| PlanError::ChunkSize { value: chunk_len })?;
    let table_bytes = gpu_memory
        .iter()
        .map(|len| Chunks::new(*len, chunk_len).count() * TABLE_BYTES_PER_FRAME)
        .fold(0, u64::saturating_add);

    let gpus = gpu_memory.len();
    let pack_buffers_per_part = count_of(part_len, PACK_LEN);
    let least = SavePlan {
        chunk_len,
        part_len,
        frame_len_max,
        ring_chunks: RING_CHUNKS_MIN,
        frame_buffers: 0,
        pack_buffers: (gpus + 1) * pack_buffers_per_part,
        threads: 0,
        table_bytes,
        total_bytes: 0,
    };
    let total_of = |plan: &SavePlan| {
        let ring = (gpus as u64).saturating_mul(product(plan.ring_chunks, chunk_len));
        let frames = product(plan.frame_buffers, frame_len_max as u64);
        let packs = product(plan.pack_buffers, PACK_LEN);
        let contexts = u64::from(plan.threads).saturating_mul(settings.context_bytes);
        sum(&[ring, frames, packs, contexts, table_bytes])
    };

    let budget = Budget::of(settings.memory_budget, settings.budget_is_set);
    let with_threads = |threads: u32| SavePlan {
        threads,
        frame_buffers: threads as usize + 1,
        ..least.clone()
    };
    let threads =
        budget.most_threads(settings.threads, |threads| total_of(&with_threads(threads)))?;
    let mut plan = with_threads(threads);

    // Half of those in flight, and one per GPU that is being filled.
    let lent_parts = planned_requests(settings.parallelism, threads).div_ceil(2) + gpus;
    let chunks_per_part = count_of(part_len, chunk_len);
    let lent_chunks = lent_parts * chunks_per_part;
    let ring_step = chunks_per_part.div_ceil(gpus.max(1));
    let ring_chunks_max = RING_CHUNKS_MAX + lent_chunks.div_ceil(gpus.max(1));
    let frame_buffers_max = 2 * threads as usize + lent_chunks;
    let pack_buffers_max = least.pack_buffers.max(lent_parts * pack_buffers_per_part);
    deal_out(
        &mut plan,
        budget.bytes,
        &total_of,
        &[
            &|plan| grow_by(&mut plan.ring_chunks, ring_step, ring_chunks_max),
            &|plan| grow_by(&mut plan.frame_buffers, chunks_per_part, frame_buffers_max),
            &|plan| {
                grow_by(
                    &mut plan.pack_buffers,
                    pack_buffers_per_part,
                    pack_buffers_max,
                )
            },
            // What is left when no part's worth fits any more.
            &|plan| grow_by(&mut plan.ring_chunks, 1, ring_chunks_max),
            &|plan| grow_by(&mut plan.frame_buffers, 1, frame_buffers_max),
        ],
    );
    plan.total_bytes = total_of(&plan);
    Ok(plan)
}

/// Requests in flight that memory is planned for.
fn planned_requests(parallelism: u32, threads: u32) -> usize {
    let by_machine = REQUESTS_MIN + REQUESTS_PER_THREAD.saturating_mul(threads as usize);
    by_machine.min(parallelism as usize)
}

fn choose_chunk_len(largest: u64, set: Option<u64>) -> Result<u64, PlanError> {
    let fits = |chunk_len: u64| Chunks::new(largest, chunk_len).count() <= FRAME_COUNT_MAX;
    let least = || {
        let lens = CHUNK_LEN_MIN.trailing_zeros()..=CHUNK_LEN_MAX.trailing_zeros();
        lens.map(|log| 1 << log)
            .find(|len| fits(*len))
            .ok_or(PlanError::GpuTooLarge {
                memory_len: largest,
            })
    };
    let Some(value) = set else {
        let default = if largest > LARGE_GPU_BYTES {
            CHUNK_LEN_LARGE
        } else {
            CHUNK_LEN_DEFAULT
        };
        return Ok(default.max(least()?));
    };
    if !value.is_power_of_two() || !(CHUNK_LEN_MIN..=CHUNK_LEN_MAX).contains(&value) {
        return Err(PlanError::ChunkSize { value });
    }
    if !fits(value) {
        return Err(PlanError::ChunkSizeTooSmall {
            value,
            least: least()?,
            memory_len: largest,
        });
    }
    Ok(value)
}

fn choose_part_len(
    largest: u64,
    chunk_len: u64,
    set: Option<u64>,
    limits: &PartLimits,
) -> Result<u64, PlanError> {
    let worst = object_len_max(largest, chunk_len);
    let longest = limits.longest_object();
    if worst > longest {
        return Err(PlanError::ObjectTooLong {
            memory_len: largest,
            object_len: worst,
            longest,
        });
    }
    let least = limits.least_part_len(worst);
    let Some(value) = set else {
        let count = (limits.count_max * PART_COUNT_TENTHS / 10).max(1);
        let default = whole_mib(largest.div_ceil(count)).max(PART_LEN_DEFAULT);
        return Ok(default.max(least).min(limits.len_max));
    };
    let (len_min, len_max) = (limits.len_min, limits.len_max);
    if !(len_min..=len_max).contains(&value) {
        return Err(PlanError::PartSize {
            value,
            len_min,
            len_max,
        });
    }
    if worst.div_ceil(value) > limits.count_max {
        return Err(PlanError::PartSizeTooSmall {
            value,
            least,
            memory_len: largest,
            count_max: limits.count_max,
        });
    }
    Ok(value)
}

/// One extent to restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadLane {
    /// Length of the extent in bytes.
    pub raw_len: u64,
    /// Bytes of raw data per chunk.
    pub chunk_len: u64,
    /// Length of its longest frame in bytes.
    pub frame_len_max: u32,
    /// Length of all its frames in bytes.
    pub frames_len: u64,
}

/// What the user and the node give for a restore.
#[derive(Debug, Clone)]
pub struct LoadSettings {
    /// Bytes of host memory that may be used.
    pub memory_budget: u64,
    /// Whether the user set `pipeline.memory_budget`: a set one is a limit, a derived one is raised to what the least plan needs.
    pub budget_is_set: bool,
    /// Threads that decompress, at least 1.
    pub threads: u32,
    /// Reads in flight at once, at least 1.
    pub parallelism: u32,
}

/// Every buffer of a restore.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadPlan {
    /// Most bytes of one ranged read: whole frames, at least the longest one.
    pub fetch_len_max: u64,
    /// Pinned chunk buffers per extent (each of its extent's chunk length), at least 2.
    pub ring_chunks: usize,
    /// Buffers of [`fetch_buffer_len`] in the whole process, at least 2: one is decoded while the other is filled.
    pub fetch_buffers: usize,
    /// Threads that decompress; fewer than asked for when the budget is small.
    pub threads: u32,
    /// Bytes for the frame tables of all extents.
    pub table_bytes: u64,
    /// Bytes of all of this together: at most the memory budget, if that was set.
    pub total_bytes: u64,
}

/// Plans a restore of these extents.
///
/// # Errors
/// [`PlanError::BudgetTooSmall`].
///
/// # Panics
/// When a chunk length is 0; verified manifests have none.
pub fn plan_load(lanes: &[LoadLane], settings: &LoadSettings) -> Result<LoadPlan, PlanError> {
    /// One is decoded while the other is filled.
    const FETCH_BUFFERS_MIN: usize = 2;

    let longest_frame = lanes
        .iter()
        .map(|lane| u64::from(lane.frame_len_max))
        .max()
        .unwrap_or(0);
    let table_bytes = lanes
        .iter()
        .map(|lane| Chunks::new(lane.raw_len, lane.chunk_len).count() * TABLE_BYTES_PER_FRAME)
        .fold(0, u64::saturating_add);
    let chunk_lens: Vec<u64> = lanes.iter().map(|lane| lane.chunk_len).collect();
    let total_of = |plan: &LoadPlan| {
        let ring = product(plan.ring_chunks, sum(&chunk_lens));
        let fetches = product(plan.fetch_buffers, fetch_buffer_len(plan.fetch_len_max));
        let contexts = u64::from(plan.threads).saturating_mul(Decoder::CONTEXT_BYTES);
        sum(&[ring, fetches, contexts, table_bytes])
    };

    let budget = Budget::of(settings.memory_budget, settings.budget_is_set);
    // No longer than the longest object: a small one does not fill a buffer.
    let longest_object = lanes.iter().map(|lane| lane.frames_len).max().unwrap_or(0);
    let mut least = LoadPlan {
        fetch_len_max: FETCH_LEN_DEFAULT.min(longest_object).max(longest_frame),
        ring_chunks: RING_CHUNKS_MIN,
        fetch_buffers: FETCH_BUFFERS_MIN,
        threads: 1,
        table_bytes,
        total_bytes: 0,
    };
    if total_of(&least) > budget.bytes {
        // Short reads cost requests; too much memory costs the restore.
        least.fetch_len_max = longest_frame.max(MIB.min(longest_object));
    }
    let with_threads = |threads| LoadPlan {
        threads,
        ..least.clone()
    };
    let threads =
        budget.most_threads(settings.threads, |threads| total_of(&with_threads(threads)))?;
    let mut plan = with_threads(threads);

    let requests = planned_requests(settings.parallelism, threads);
    // Two neighbours among the reads are longer together than one may be, or they would be one.
    let reads = |lane: &LoadLane| 2 * lane.frames_len.div_ceil(plan.fetch_len_max.max(1));
    let reads = lanes.iter().map(reads).fold(0, u64::saturating_add);
    let fetch_buffers_max = (requests + lanes.len())
        .min(usize::try_from(reads).unwrap_or(usize::MAX))
        .max(FETCH_BUFFERS_MIN);
    let chunks = |lane: &LoadLane| Chunks::new(lane.raw_len, lane.chunk_len).count();
    let chunks = lanes.iter().map(chunks).max().unwrap_or(0);
    // Every decompressor fills one while those before it wait for their copies. Twice as many were no faster on an H200: decompressors then waited less and took longer.
    let ring_chunks_max = (RING_CHUNKS_MAX + (threads as usize).div_ceil(lanes.len().max(1)))
        .min(usize::try_from(chunks).unwrap_or(usize::MAX));
    deal_out(
        &mut plan,
        budget.bytes,
        &total_of,
        &[
            &|plan| grow(&mut plan.fetch_buffers, fetch_buffers_max),
            &|plan| grow(&mut plan.ring_chunks, ring_chunks_max),
        ],
    );
    plan.total_bytes = total_of(&plan);
    Ok(plan)
}

/// Length of a buffer for reads of at most `fetch_len_max` bytes, whose raw frames land without their block headers at multiples of [`LANDING_ALIGN`]: a raw frame is as long as its chunk, so
/// there are few of them.
pub fn fetch_buffer_len(fetch_len_max: u64) -> u64 {
    let raw_frames_max = fetch_len_max / CHUNK_LEN_MIN + 1;
    let align = LANDING_ALIGN as u64;
    let len = fetch_len_max.saturating_add(raw_frames_max * align);
    len.checked_next_multiple_of(align).unwrap_or(len)
}

/// Consecutive whole frames of one object that one ranged read brings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchGroup {
    /// Which frames, from 0.
    pub frames: Range<usize>,
    /// Their bytes in the object.
    pub bytes: Range<u64>,
}

/// Groups an object's frames, given their lengths in order, into reads of at most `fetch_len_max` bytes. A frame that is longer than that by itself gets a read
/// of its own; [`plan_load`] leaves none.
pub fn fetch_groups(frame_lens: &[u32], fetch_len_max: u64) -> Vec<FetchGroup> {
    let mut groups: Vec<FetchGroup> = Vec::new();
    let mut offset = 0;
    for (index, len) in frame_lens.iter().enumerate() {
        let end = offset + u64::from(*len);
        match groups.last_mut() {
            Some(group) if end - group.bytes.start <= fetch_len_max => {
                group.frames.end = index + 1;
                group.bytes.end = end;
            }
            _ => groups.push(FetchGroup {
                frames: index..index + 1,
                bytes: offset..end,
            }),
        }
        offset = end;
    }
    groups
}

/// How much memory there is, and whether that is the user's word.
struct Budget {
    bytes: u64,
    is_set: bool,
}

impl Budget {
    fn of(bytes: u64, is_set: bool) -> Self {
        Self { bytes, is_set }
    }

    /// The most threads up to `wanted` whose least plan, by `total_of`, fits. One thread always fits a budget that was derived.
    fn most_threads(
        &self,
        wanted: u32,
        mut total_of: impl FnMut(u32) -> u64,
    ) -> Result<u32, PlanError> {
        let fitting = (1..=wanted.max(1))
            .rev()
            .find(|threads| total_of(*threads) <= self.bytes);
        match fitting {
            Some(threads) => Ok(threads),
            None if self.is_set => Err(PlanError::BudgetTooSmall {
                set: self.bytes,
                least: total_of(1),
            }),
            None => Ok(1),
        }
    }
}

/// Takes turns in growing a plan, until no step fits the budget or none grows any more.
fn deal_out<P: Clone>(
    plan: &mut P,
    budget_bytes: u64,
    total_of: &dyn Fn(&P) -> u64,
    steps: &[&dyn Fn(&mut P) -> bool],
) {
    let mut grew = true;
    while grew {
        grew = false;
        for step in steps {
            let mut larger = plan.clone();
            if step(&mut larger) && total_of(&larger) <= budget_bytes {
                *plan = larger;
                grew = true;
            }
        }
    }
}

fn grow(count: &mut usize, max: usize) -> bool {
    grow_by(count, 1, max)
}

/// As many as `step` more, up to `max`.
fn grow_by(count: &mut usize, step: usize, max: usize) -> bool {
    let larger = max.min(*count + step);
    let grows = *count < larger;
    *count = larger.max(*count);
    grows
}

/// How many of `unit_len` hold `len`.
fn count_of(len: u64, unit_len: u64) -> usize {
    usize::try_from(len.div_ceil(unit_len)).unwrap_or(usize::MAX)
}

fn product(count: usize, bytes: u64) -> u64 {
    (count as u64).saturating_mul(bytes)
}

fn sum(bytes: &[u64]) -> u64 {
    bytes.iter().copied().fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests;
