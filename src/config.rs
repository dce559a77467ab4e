//! What the user asked for, resolved.
//!
//! In: one TOML file and the flags that override it. Out: a [`Config`] with every value checked and nothing left to interpret.
//! What can fail: an unknown key, a value out of range, two explicit values that exclude each other; each error names the key or flag.

use std::time::Duration;

use crate::codec::Level;
use crate::driver::GpuUuid;

/// Everything a command needs to know, checked.
#[derive(Debug, Clone)]
pub struct Config {
    /// The job that images belong to.
    pub job: JobName,
    /// Where images are kept.
    pub store: StoreConfig,
    /// Memory and threads of the pipeline.
    pub pipeline: PipelineConfig,
    /// How chunks are compressed.
    pub compression: CompressionConfig,
    /// How the CUDA driver is asked.
    pub driver: DriverConfig,
    /// How images are read back.
    pub restore: RestoreConfig,
    /// Time from now until the node is gone, when known (`--deadline`).
    pub deadline: Option<Duration>,
}

/// Name of a job: 1 to 128 of `[A-Za-z0-9._-]`, not starting with a dot.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobName(String);

/// `[store]`
#[derive(Debug, Clone)]
pub struct StoreConfig {
    /// Bucket name.
    pub bucket: String,
    /// Prefix inside the bucket, without leading or trailing `/`; may be empty.
    pub prefix: String,
    /// Endpoint URL of an S3-compatible store; `None` is AWS.
    pub endpoint: Option<String>,
    /// Region; `None` asks the SDK's chain.
    pub region: Option<String>,
    /// Bucket in the path (`true`) or in the host name.
    pub path_style: bool,
    /// Part size in bytes, 5 MiB to 5 GiB; `None` derives it from the GPUs' memory.
    pub part_size: Option<u64>,
    /// Requests in flight at once, 1 to 256.
    pub parallelism: u32,
    /// What goes with every part.
    pub checksum: PartChecksum,
    /// Sign the bodies too (SHA-256 over every byte), for stores and policies that demand it.
    pub sign_payload: bool,
    /// How long one operation is tried, attempts and pauses together.
    pub retry_timeout: Duration,
    /// Limit for making a connection.
    pub connect_timeout: Duration,
    /// Limit for one attempt of a small request (everything but parts and ranges).
    pub request_timeout: Duration,
    /// A part or range that moves no byte for so long is given up and tried again.
    pub stall_timeout: Duration,
}

/// The checksum that goes with every part as a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartChecksum {
    /// CRC64NVME, full object.
    Crc64Nvme,
    /// None, for stores that refuse it; our own digests decide in any case.
    None,
}

/// `[pipeline]`
#[derive(Debug, Clone)]
pub struct PipelineConfig {
    /// Chunk length in bytes, a power of two from 1 MiB to 64 MiB; `None` derives it from the GPUs' memory.
    pub chunk_size: Option<u64>,
    /// Bytes of host memory for ring, frames, parts and tables together.
    pub memory_budget: u64,
    /// `true` when the user set `memory_budget` (a derived one may be raised to what the plan needs, a set one may not).
    pub memory_budget_is_set: bool,
    /// Threads that compress or decompress, 1 to 1024.
    pub threads: u32,
}

/// `[compression]`
#[derive(Debug, Clone)]
pub struct CompressionConfig {
    /// Which effort.
    pub level: Level,
}

/// `[driver]`
#[derive(Debug, Clone)]
pub struct DriverConfig {
    /// How long the driver may take to lock the target; 1 ms to 1 h (0 would mean for ever to the driver).
    pub lock_timeout: Duration,
    /// Stored GPU to present GPU, as the user wants it (`--gpu-map`).
    pub gpu_map: Vec<(GpuUuid, GpuUuid)>,
}

/// `[restore]`
#[derive(Debug, Clone)]
pub struct RestoreConfig {
    /// When chunks are verified; `None` picks by kind of image (PROTOCOL section 3).
    pub verify: Option<Verify>,
}

/// When a restore verifies chunks. No chunk reaches a GPU unverified in either.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verify {
    /// Every chunk of the image is read and digested before the driver is asked.
    All,
    /// Every chunk is verified as it arrives.
    Stream,
}
