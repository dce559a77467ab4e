//! The pipeline: extents to objects and back, bounded everywhere, first error stops all.
//!
//! ```text
//! save   GPU ─copy▶ ring ─threads▶ frame ─pack▶ part ─tokio▶ store        one copy thread and one packer per GPU,
//! load   store ─tokio▶ fetch buffer ─threads▶ ring ─copy▶ GPU             threads and connections shared by all
//! ```
//!
//! In: lanes (one per extent), buffers that were all allocated before the target was locked, a store. Out: what was stored per lane, or the certainty that every chunk was
//! verified and copied; and how long each stage worked, starved or was blocked. What can fail: [`PipelineError`]; the first error closes the buffer pools and
//! cancels the transfers, every thread and task is joined, and that first error is returned. Nothing waits without a bound: a stage waits for a buffer, and a
//! buffer comes back when the next stage is done with it.

mod abort;
mod alone;
mod copy;
mod effort;
mod gauge;
mod haste;
mod lend;
mod load;
#[cfg(test)]
mod network;
mod pack;
mod part;
mod save;
mod source;
mod stage;
mod transfer;
mod window;
mod witness;

pub(crate) use abort::panic_message;
pub use alone::{AloneLane, copy_in_alone, copy_out_alone};
pub(crate) use gauge::{all_runs, slowest};
pub use load::{Destination, LoadLane, LoadResources, Loaded, load};
pub use save::{Origin, SaveLane, SaveResources, Saved, SavedLane, save};
pub use source::{Source, SourceOut};
pub use witness::Witness;

use crate::codec::FrameError;
use crate::driver::DriverError;
use crate::plan::PART_COUNT_MAX;
use crate::store::StoreError;

/// Why a transfer stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// The driver did not do what it was asked.
    #[error("the driver failed during the transfer")]
    Driver(#[from] DriverError),
    /// The store did not take or give bytes.
    #[error("the store failed during the transfer")]
    Store(#[from] StoreError),
    /// Bytes that come from elsewhere than a GPU did not come to their end.
    #[error("the bytes to save broke off")]
    Source(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A stored frame is not the chunk that the frame table promised.
    #[error("chunk {chunk} of {key} is damaged")]
    Frame {
        /// The object.
        key: String,
        /// Index of the chunk in its extent.
        chunk: u64,
        /// What is wrong with it.
        #[source]
        source: FrameError,
    },
    /// The target's memory changed between two readings: what was copied may be of no moment at all.
    #[error(
        "chunk {chunk} of {key} is not what it was when it was read before; the memory did not stand still, and the save is void"
    )]
    NotStill {
        /// The object.
        key: String,
        /// Index of the chunk in its extent.
        chunk: u64,
    },
    /// The driver's extents are not the stored ones.
    #[error("{what}")]
    Extents {
        /// What differs.
        what: String,
    },
    /// An object turned out longer than its upload can take; a plan that was made from the GPU's memory leaves no such object.
    #[error(
        "the object needs more than {PART_COUNT_MAX} parts of {part_len} bytes; set a larger store.part_size"
    )]
    TooManyParts {
        /// Length of every part but the last, in bytes.
        part_len: usize,
    },
    /// The system gave no thread.
    #[error(
        "cannot start thread {name}; raise the limits on processes (ulimit -u, the cgroup's pids.max) or lower pipeline.threads"
    )]
    Thread {
        /// What the thread was to be called: its stage, and its number.
        name: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A stage panicked: a defect of ours.
    #[error("the {stage} stage panicked: {message}")]
    Panic {
        /// Which stage.
        stage: &'static str,
        /// The panic's message.
        message: String,
    },
    /// The caller gave the transfer up.
    #[error("cancelled")]
    Cancelled,
}

impl PipelineError {
    /// A panic of the story around the pipeline.
    pub(crate) fn of_story(panic: &(dyn std::any::Any + Send)) -> Self {
        Self::Panic {
            stage: "story",
            message: panic_message(panic),
        }
    }
}
