//! What a finished save or restore tells: the numbers behind the final table and the JSON result.
//!
//! In: counts and times that the stories and the pipeline measured. Out: plain data. The command line prints it; the library never does.

use serde::Serialize;

use crate::error::{Phase, TargetState};

/// A save or a restore that did what was asked.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// Job name.
    pub job: String,
    /// Place in the job's log.
    pub generation: u64,
    /// The image's ID: the generation in 8 digits. Empty, and the generation 0, of what was given back without becoming an image.
    pub image: String,
    /// The attempt's nonce, 32 hex digits.
    pub attempt: String,
    /// Newer images that were passed over because they cannot be used, with the reason; newest first.
    pub skipped: Vec<String>,
    /// Targets and their states as looked up at the end.
    pub targets: Vec<TargetState>,
    /// Raw and stored bytes.
    pub bytes: Bytes,
    /// Wall seconds per phase, each phase once, in order of its first beginning.
    pub seconds: Vec<PhaseSeconds>,
    /// Wall seconds from the driver's lock to RUNNING again, or to CHECKPOINTED when the target stays suspended.
    pub seconds_locked: f64,
    /// One entry per GPU that holds data.
    pub lanes: Vec<LaneOutcome>,
    /// One entry per stage of the pipeline, in order of flow.
    pub stages: Vec<StageOutcome>,
    /// Name of the stage that the others waited for; `None` when nothing flowed.
    pub slowest_stage: Option<String>,
    /// Store requests that were tried again.
    pub retries: u64,
    /// Bytes of host memory that the plan allowed.
    pub memory_planned: u64,
}

/// Bytes of an image.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Bytes {
    /// On the GPUs.
    pub raw: u64,
    /// In the store.
    pub stored: u64,
}

/// One phase's wall time.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct PhaseSeconds {
    /// Which.
    pub phase: Phase,
    /// Wall seconds.
    pub seconds: f64,
}

/// One GPU's share.
#[derive(Debug, Clone, Serialize)]
pub struct LaneOutcome {
    /// The GPU's UUID as stored.
    pub device: String,
    /// Raw bytes.
    pub raw: u64,
    /// Stored bytes.
    pub stored: u64,
}

/// One stage's work.
#[derive(Debug, Clone, Serialize)]
pub struct StageOutcome {
    /// `copy`, `compress`, `upload`; `download`, `decompress`, `copy`.
    pub stage: String,
    /// Bytes that went in.
    pub bytes: u64,
    /// Seconds of work, summed over the stage's threads, divided by their number.
    pub busy_seconds: f64,
    /// Seconds in which the stage could not go on because its input was empty, likewise.
    pub starved_seconds: f64,
    /// Seconds in which the stage could not go on because the next one was full, likewise.
    pub blocked_seconds: f64,
    /// Bytes per second while busy; 0 when it did nothing.
    pub rate: f64,
}
