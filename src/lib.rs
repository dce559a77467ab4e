//! ckptstream evicts a GPU job into object storage inside its pre-emption notice, and brings it back byte for byte.
//!
//! # The life of a chunk
//!
//! Out: `driver/process.rs` yields extents → `plan.rs` cuts chunks → `pipeline/copy.rs` fills a pinned buffer → `codec/frame.rs` makes a frame and returns the
//! buffer → `pipeline/pack.rs` packs parts → `store/` uploads → `manifest.rs` records → `checkpoint.rs` commits, then `driver/process.rs` completes.
//! Back: the same files from last to first.

pub mod checkpoint;
pub mod cli;
pub mod codec;
pub mod config;
pub mod driver;
pub mod error;
pub mod image;
pub mod job_log;
pub mod manifest;
pub mod outcome;
pub mod phases;
pub mod pipeline;
pub mod plan;
pub mod progress;
pub mod restore;
pub mod session;
pub mod store;
pub mod target;
