//! ckptstream evicts a GPU job into object storage inside its pre-emption notice, and brings it back byte for byte.
//!
//! # The life of a chunk
//!
//! Out: `driver/process.rs` yields extents → `plan.rs` cuts chunks → `pipeline/copy.rs` fills a pinned buffer → `codec/frame.rs` makes a frame and returns the
//! buffer → `pipeline/pack.rs` packs parts → `store/` uploads → `manifest.rs` records → `checkpoint.rs` commits, then `driver/process.rs` completes.
//! Back: the same files from last to first.
//!
//! # Words
//!
//! The same word means the same thing everywhere: in names, comments, messages and documents.
//!
//! | word | means | so not |
//! |---|---|---|
//! | target | the CUDA process that is saved or restored; `pid` is its id in our pid namespace | job, client |
//! | lock, checkpoint, restore, unlock | what the driver does, named as its `cuCheckpointProcess*` calls | freeze, dump, thaw |
//! | BEGIN | the driver's checkpoint call: after it there is no way back | |
//! | complete | `cuCheckpointOperationComplete`: the driver may let its memory go. Of S3 always "complete upload" | finish |
//! | landed | of an object: its upload is complete, and a look at it found length and checksum as we hold them | uploaded, which is said of acknowledged parts |
//! | commit | the `image` entry is made in the job's log; without it there is no image | publish |
//! | roll back | the target runs again after a failure | undo |
//! | image | what is stored: log entry, manifest, data objects | snapshot, checkpoint as a noun |
//! | process state | what the driver says of a target: running, locked, checkpointed, failed | phase, which is a step of ours |
//! | device ordinal, GPU UUID | a GPU's index in this process; its lasting identity, as manifests have it | GPU id |
//! | primary context | the context per GPU that is retained for the copies | session |
//! | stream | a CUDA stream, nothing else | |
//! | extent | one contiguous range of a GPU's memory, as the driver gives it | region, segment |
//! | chunk | a slice of an extent, all of one length but the last: the unit of copies and compression | block, page |
//! | lane | the way of one extent through the pipeline: its ring of buffers, its packer, its object | |
//! | pinned buffer | page-locked host memory for one chunk | staging buffer |
//! | frame | a self-contained zstd frame: one chunk, compressed | blob |
//! | part | an S3 multipart part: a slice of an object's bytes that need not begin or end with a frame | chunk |
//! | key | the prefix and a relative name, joined in one place | path |
//! | manifest | the list of extents, chunks, objects, digests of an image | index |
//! | generation, attempt | an image's place in its job's log; the nonce of one try to make it | |
//! | stage | one step of the pipeline, with its threads or tasks | worker |
//! | budget, permit | bytes that may be held; the owned right to hold some | limit, token |
//! | checksum, digest | what the store checks (CRC64NVME, CRC32C); what we check end to end (XXH3-128) | hash |
//! | emulated driver | the stand-in for libcuda with the same C ABI | mock, which would be inside the process |
//!
//! Suffixes: `_len` bytes of content, `_bytes` other amounts of bytes, `_count` how many, `_index` from 0, `_number` from 1, `_offset` bytes from the start
//! of what is named. Times are `Duration` and `Instant`; in files they end in `_ms`.

pub mod bench;
pub mod checkpoint;
pub mod cli;
pub mod codec;
pub mod config;
mod cpu_time;
pub mod custody;
pub mod driver;
pub mod error;
pub mod failpoint;
pub mod guard;
pub mod host;
pub mod image;
pub mod job_log;
pub mod journal;
pub mod manifest;
pub mod outcome;
pub mod ownership;
pub mod phases;
pub mod pipeline;
pub mod plan;
pub mod preempt;
pub mod preflight;
pub mod progress;
pub mod recover;
pub mod restore;
pub mod resume;
pub mod sealed;
pub mod session;
pub mod store;
pub mod supervise;
pub mod target;
pub mod timeline;
pub mod upkeep;
pub mod watchdog;
pub mod writer;
