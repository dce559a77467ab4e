//! What a bench tells: one row per stage and per whole run, under which conditions, and what it means.
//!
//! In: what was measured. Out: plain data, which the command line prints as a table or as JSON. Nothing here can fail.

use serde::Serialize;

use super::flow::Run;
use super::measure::{Took, gb, median};
use super::stages::Pass;
use super::verdict::{Floor, Measured, Node, Verdict};
use crate::outcome::StageOutcome;

/// Everything that was measured, and what it means.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Where.
    pub machine: Machine,
    /// How.
    pub conditions: Conditions,
    /// Every stage alone.
    pub stages: Vec<StageRate>,
    /// Whole saves and loads; none without a GPU.
    pub pipeline: Vec<PipelineRate>,
    /// What it means.
    pub verdict: Verdict,
    /// What could not be removed from the store, in words.
    pub left_behind: Vec<String>,
}

/// The machine that was measured.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// Processors that this process may use.
    pub cores: u32,
    /// Their name; empty when the system does not say.
    pub processor: String,
    /// The GPUs of the bench.
    pub gpus: Vec<GpuInfo>,
    /// Version of the kernel's GPU driver; `None` without one, as with the emulated driver.
    pub driver_version: Option<String>,
}

/// One GPU.
#[derive(Debug, Clone, Serialize)]
pub struct GpuInfo {
    /// Index in this process.
    pub ordinal: u32,
    /// Product name.
    pub name: String,
    /// Its lasting identity.
    pub uuid: String,
    /// Total memory in bytes.
    pub memory_len: u64,
}

/// What the figures were taken under.
#[derive(Debug, Clone, Serialize)]
pub struct Conditions {
    /// Bytes of memory per GPU that were moved.
    pub size: u64,
    /// Bytes of data made; repeated where the memory is longer.
    pub tile_len: u64,
    /// Runs of which each figure is the median.
    pub runs: u32,
    /// Small and quick.
    pub quick: bool,
    /// `null`, `memory` or `store`.
    pub to: String,
    /// The store in words.
    pub store: String,
    /// Bytes per chunk.
    pub chunk_len: u64,
    /// Bytes per part.
    pub part_len: u64,
    /// Chunk buffers per GPU.
    pub ring_chunks: usize,
    /// Threads of the codec.
    pub threads: u32,
    /// Requests at once.
    pub parallelism: u32,
    /// Bytes of host memory that may be used.
    pub memory_budget: u64,
    /// Wall seconds for driver and contexts.
    pub driver_seconds: f64,
}

/// One stage alone.
#[derive(Debug, Clone, Serialize)]
pub struct StageRate {
    /// `raw-copy-out`, `copy-out`, `raw-copy-in`, `copy-in`, `zero-scan`, `digest`, `checksum`, `compress`, `decompress`, `upload`, `download`.
    pub stage: &'static str,
    /// Kind of data, where the rate depends on it.
    pub data: Option<String>,
    /// Threads or requests at once.
    pub at_once: u32,
    /// Bytes of a run: raw ones of the codec, stored ones of the wire.
    pub bytes: u64,
    /// Bytes per second, median; `None` of an upload that is swallowed.
    pub rate: Option<f64>,
    /// CPU seconds per GB (10⁹ bytes), median.
    pub cpu_seconds_per_gb: f64,
    /// Stored bytes per raw byte, of the codec.
    pub stored_share: Option<f64>,
    /// Rate per rate of the copy engine, of the copies.
    pub share_of_raw: Option<f64>,
}

/// The whole pipeline, one way, with one kind of data.
#[derive(Debug, Clone, Serialize)]
pub struct PipelineRate {
    /// `out` or `in`.
    pub direction: &'static str,
    /// Kind of data.
    pub data: String,
    /// Raw bytes, of all GPUs.
    pub raw: u64,
    /// Stored bytes.
    pub stored: u64,
    /// Wall seconds, median.
    pub seconds: f64,
    /// Wall seconds of each run.
    pub runs: Vec<f64>,
    /// Raw bytes per second.
    pub rate: f64,
    /// CPU seconds per raw GB (10⁹ bytes), median.
    pub cpu_seconds_per_gb: f64,
    /// Wall seconds for buffers and contexts before the first byte, median.
    pub prepare_seconds: f64,
    /// The floor that the stages alone give.
    pub floor: Floor,
    /// Seconds of the floor per second of the run: 1 is as fast as can be.
    pub share_of_floor: f64,
    /// The stage that the others waited for, in the last run.
    pub slowest_stage: Option<String>,
    /// Account of each stage, of the last run.
    pub stages: Vec<StageOutcome>,
    /// Bytes of host memory that the plan allowed.
    pub memory_planned: u64,
}

/// A row of runs that all moved the same bytes.
pub(super) fn row(
    stage: &'static str,
    data: Option<&str>,
    at_once: u32,
    bytes: u64,
    runs: &[Took],
) -> StageRate {
    let passes: Vec<Pass> = runs
        .iter()
        .map(|took| Pass { bytes, took: *took })
        .collect();
    pass_row(stage, data, at_once, &passes)
}

/// A row of passes.
pub(super) fn pass_row(
    stage: &'static str,
    data: Option<&str>,
    at_once: u32,
    passes: &[Pass],
) -> StageRate {
    let rates = passes
        .iter()
        .map(|pass| gb(pass.bytes) * 1e9 / pass.took.seconds.max(1e-9));
    let costs = passes
        .iter()
        .map(|pass| pass.took.cpu_seconds / gb(pass.bytes.max(1)));
    StageRate {
        stage,
        data: data.map(str::to_owned),
        at_once,
        bytes: passes.last().map_or(0, |pass| pass.bytes),
        rate: Some(median(rates)),
        cpu_seconds_per_gb: median(costs),
        stored_share: None,
        share_of_raw: None,
    }
}

/// The row of a way's runs; the way learns what a run took.
pub(super) fn pipeline_row(
    direction: &'static str,
    data: &str,
    node: Node,
    way: &mut Measured,
    runs: Vec<Run>,
) -> PipelineRate {
    let raw = node.gpu_bytes * u64::from(node.gpus);
    let seconds = median(runs.iter().map(|run| run.took.seconds));
    let prepare_seconds = median(runs.iter().map(|run| run.prepare_seconds));
    let cpu_seconds = median(runs.iter().map(|run| run.took.cpu_seconds));
    let walls = runs.iter().map(|run| run.took.seconds).collect();
    let last = runs.into_iter().last();
    let stored = last.as_ref().map_or(0, |run| run.stored);
    way.costs.stored_share = gb(stored) / gb(raw);
    way.run = Some((node, seconds));
    way.prepare_seconds += prepare_seconds;
    let floor = way.costs.floor(node);
    PipelineRate {
        direction,
        data: data.to_owned(),
        raw,
        stored,
        seconds,
        runs: walls,
        rate: gb(raw) * 1e9 / seconds.max(1e-9),
        cpu_seconds_per_gb: cpu_seconds / gb(raw),
        prepare_seconds,
        floor,
        share_of_floor: floor.seconds() / seconds.max(1e-9),
        slowest_stage: last.as_ref().and_then(|run| run.slowest_stage.clone()),
        memory_planned: last.as_ref().map_or(0, |run| run.memory_planned),
        stages: last.map(|run| run.stages).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_the_median_of_its_runs() {
        let took = |seconds| Took {
            seconds,
            cpu_seconds: 2.0 * seconds,
        };
        let row = row(
            "digest",
            None,
            2,
            1_000_000_000,
            &[took(1.0), took(4.0), took(2.0)],
        );
        assert!((row.rate.unwrap() - 5e8).abs() < 1.0);
        assert!((row.cpu_seconds_per_gb - 4.0).abs() < 1e-9);
    }
}
