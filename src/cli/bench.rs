//! `bench`: what was asked for, and the table of what was measured.
//!
//! In: the flags. Out: the library's settings; and its report as text, one row per stage and per whole run, the verdict last. What can fail: a value of the wrong form.

use std::fmt::Write as _;
use std::str::FromStr;
use std::time::Duration;

use bytesize::ByteSize;
use clap::{Args as ClapArgs, ValueEnum};

use super::args::TimelineArgs;
use super::units::{float, size};
use crate::bench::{Data, Kind, Node, PipelineRate, Report, Settings, StageRate, To};
use crate::config::{Overrides, RawConfig};

/// What is measured unless it is told: the ends (nothing to send, nothing to gain) and what GPUs hold.
const DATA_DEFAULT: [Kind; 4] = [Kind::Zero, Kind::Random, Kind::Bf16, Kind::Image];

/// `bench`
#[derive(Debug, ClapArgs)]
pub(super) struct BenchArgs {
    /// What fills the memory: zero, random, bf16, fp32, fp16, adam, kv, image, int8, or a file, which is repeated; may be given several times [default: zero random bf16 image]
    #[arg(long, value_name = "KIND|FILE")]
    data: Vec<String>,

    /// Memory per GPU that is moved [default: 4GiB, or half of what is free; with --quick 64MiB]
    #[arg(long, value_name = "SIZE")]
    size: Option<ByteSize>,

    /// How many GPUs [default: all]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    gpus: Option<u32>,

    /// Measure without a GPU: the stages that need none, no whole pipeline
    #[arg(long, conflicts_with = "gpus")]
    no_gpu: bool,

    /// Store that is measured: null swallows, memory keeps, both in this process; store is the configured one, in which nothing stays
    #[arg(long, value_name = "WHERE", value_enum, default_value_t = ToChoice::Null)]
    to: ToChoice,

    /// Runs of each measurement; the median counts [default: 3; with --quick 1]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=99))]
    runs: Option<u32>,

    /// Everything small and once: a look that takes seconds
    #[arg(long)]
    quick: bool,

    /// GPUs that the verdict is for, such as 8x141GB [default: this node's, full]
    #[arg(long = "for", value_name = "COUNTxSIZE")]
    node: Option<GpuNode>,

    /// Notice that a save must fit into, such as 90s
    #[arg(long, value_name = "TIME", default_value = "120s", value_parser = humantime::parse_duration)]
    notice: Duration,

    #[command(flatten)]
    pub(super) timeline: TimelineArgs,
}

/// `--to`
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ToChoice {
    /// Swallows what comes and serves what it is asked for
    Null,
    /// Keeps everything in this process's memory
    Memory,
    /// The configured store (store.url)
    Store,
}

/// `8x141GB`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct GpuNode(Node);

impl FromStr for GpuNode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || "expected COUNTxSIZE, such as 8x141GB".to_owned();
        let (count, size) = text.split_once('x').ok_or_else(bad)?;
        let gpus: u32 = count
            .parse()
            .ok()
            .filter(|count| *count > 0)
            .ok_or_else(bad)?;
        let size: ByteSize = size.parse().map_err(|_no_size| bad())?;
        match size.as_u64() {
            0 => Err(bad()),
            gpu_bytes => Ok(Self(Node { gpus, gpu_bytes })),
        }
    }
}

impl BenchArgs {
    /// The library's settings.
    pub(super) fn settings(&self) -> Settings {
        let data = self.data.iter().map(|text| match text.parse::<Data>() {
            Ok(data) => data,
            Err(never) => match never {},
        });
        let mut data: Vec<Data> = data.collect();
        if data.is_empty() {
            data.extend(DATA_DEFAULT.map(Data::Kind));
        }
        Settings {
            data,
            size: self.size.map(|size| size.as_u64()),
            gpus: self.gpus,
            no_gpu: self.no_gpu,
            to: match self.to {
                ToChoice::Null => To::Null,
                ToChoice::Memory => To::Memory,
                ToChoice::Store => To::Store,
            },
            runs: self.runs,
            quick: self.quick,
            node: self.node.map(|node| node.0),
            notice: self.notice,
        }
    }

    /// A bench that goes to no store needs neither store nor job; names that stand for none let the rest be resolved.
    pub(super) fn fill_in(&self, overrides: &mut Overrides, raw: &RawConfig) {
        if raw.job.name.is_none() {
            overrides.job.get_or_insert_with(|| "bench".to_owned());
        }
        if self.to != ToChoice::Store && raw.store.url.is_none() {
            let in_process = || "s3://in-this-process".to_owned();
            overrides.store.get_or_insert_with(in_process);
        }
    }
}

/// The report as text.
pub(super) fn text(report: &Report) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let mut line = |words: String| {
        let _ = writeln!(text, "{}", words.trim_end());
    };
    let (machine, conditions) = (&report.machine, &report.conditions);
    line(format!(
        "node      {} cores, {}",
        machine.cores, machine.processor
    ));
    for gpu in &machine.gpus {
        line(format!(
            "          GPU {}: {}, {}, {}",
            gpu.ordinal,
            gpu.name,
            size(gpu.memory_len),
            gpu.uuid
        ));
    }
    let runs = match conditions.runs {
        1 => "1 run".to_owned(),
        count => format!("medians of {count} runs"),
    };
    line(format!(
        "measured  {} per GPU (a tile of {}, repeated), {runs}{}",
        size(conditions.size),
        size(conditions.tile_len),
        if conditions.quick {
            ", --quick: figures to match"
        } else {
            ""
        }
    ));
    line(format!(
        "with      --to {} ({}), {} codec threads, {} requests at once, chunks {}, parts {}, ring {} chunks, memory budget {}",
        conditions.to,
        conditions.store,
        conditions.threads,
        conditions.parallelism,
        size(conditions.chunk_len),
        size(conditions.part_len),
        conditions.ring_chunks,
        size(conditions.memory_budget)
    ));
    line(String::new());
    line(format!(
        "{:<14} {:<12} {:>7} {:>12} {:>10} {:>8}   GB = 10^9 bytes",
        "stage alone", "data", "at once", "rate", "CPU-s/GB", "stored"
    ));
    report.stages.iter().for_each(|row| line(stage_line(row)));
    if !report.pipeline.is_empty() {
        line(String::new());
        line(format!(
            "{:<14} {:<12} {:>7} {:>12} {:>10} {:>8} {:>9} {:>9}   slowest stage",
            "whole pipeline", "data", "seconds", "rate", "CPU-s/GB", "stored", "floor", "of floor"
        ));
        report
            .pipeline
            .iter()
            .for_each(|row| line(pipeline_line(row)));
    }
    line(String::new());
    let node = report.verdict.node;
    let gpu_bytes = size(node.gpu_bytes);
    line(format!("for       {} x {gpu_bytes}, full", node.gpus));
    for (way, estimates) in [
        ("save", &report.verdict.out),
        ("restore", &report.verdict.back),
    ] {
        for estimate in estimates {
            line(format!(
                "{way:<9} {:<12} {:>8.1} s  floor {:.1} s, slowest stage: {}",
                estimate.data, estimate.seconds, estimate.floor_seconds, estimate.slowest_stage
            ));
        }
    }
    line(format!("verdict   {}", report.verdict.sentence));
    line(format!("advice    {}", report.verdict.advice));
    for left in &report.left_behind {
        line(format!("left      {left}"));
    }
    text
}

fn stage_line(row: &StageRate) -> String {
    let rate = row
        .rate
        .map_or_else(|| "swallowed".to_owned(), gb_per_second);
    let stored = row.stored_share.map_or_else(String::new, percent);
    let of_raw = row
        .share_of_raw
        .map_or_else(String::new, |share| format!("   {} of raw", percent(share)));
    format!(
        "{:<14} {:<12} {:>7} {rate:>12} {:>10.3} {stored:>8}{of_raw}",
        row.stage,
        row.data.as_deref().unwrap_or(""),
        row.at_once,
        row.cpu_seconds_per_gb
    )
}

fn pipeline_line(row: &PipelineRate) -> String {
    format!(
        "{:<14} {:<12} {:>7.3} {:>12} {:>10.3} {:>8} {:>7.3} s {:>9}   {}",
        row.direction,
        row.data,
        row.seconds,
        gb_per_second(row.rate),
        row.cpu_seconds_per_gb,
        percent(float(row.stored) / float(row.raw.max(1))),
        row.floor.seconds(),
        percent(row.share_of_floor),
        row.slowest_stage.as_deref().unwrap_or("-")
    )
}

fn gb_per_second(rate: f64) -> String {
    format!("{:.2} GB/s", rate / 1e9)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_a_count_and_a_size() {
        let node = |text: &str| text.parse::<GpuNode>().map(|node| node.0);
        let (gpus, gpu_bytes) = (8, 141_000_000_000);
        assert_eq!(node("8x141GB"), Ok(Node { gpus, gpu_bytes }));
        assert_eq!(node("1x80GiB").map(|node| node.gpu_bytes), Ok(80 << 30));
        for bad in [
            "", "8", "x", "0x80GB", "8x", "8x0", "-1x80GB", "8x80GX", "8 x 80GB",
        ] {
            assert!(node(bad).is_err(), "{bad:?}");
        }
    }
}
