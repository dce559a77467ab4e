//! What the user of `testkit target` typed, and what follows from it.
//!
//! In: the command line. Out: a [`Plan`] with one size and one fill kind per GPU. Fails on a list that does not fit the number of GPUs.

use std::path::PathBuf;

use super::TargetError;
use super::fill::Fill;

/// Flags of `testkit target`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// GPUs to use, from device ordinal 0 on
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    gpus: u32,
    /// Memory per GPU, as "512MiB"; a comma list is one size per GPU, of which the last repeats; 0 = a GPU without memory
    #[arg(long, required = true, value_name = "SIZE[,SIZE...]", value_delimiter = ',', value_parser = crate::units::parse_size)]
    bytes: Vec<u64>,
    /// What the memory looks like: weights, zeros, random, mixed, or file:PATH (with --steps 0: the file's bytes, repeated where the memory
    /// is longer); a comma list is one kind per GPU, of which the last repeats
    #[arg(
        long,
        value_parser = Fill::parse,
        default_value = "mixed",
        value_name = "KIND[,KIND...]",
        value_delimiter = ','
    )]
    fill: Vec<Fill>,
    /// Decides every byte together with the other flags
    #[arg(long, default_value_t = 0, value_name = "S")]
    seed: u64,
    /// Steps to compute, then exit; 0 = hold the memory and compute nothing [default: for ever]
    #[arg(long, value_name = "K")]
    steps: Option<u64>,
    /// Milliseconds to pause after each step
    #[arg(long, default_value_t = 0, value_name = "MS")]
    step_ms: u64,
    /// Print a digest with every N-th step; 0 = only at the end
    #[arg(long, default_value_t = 1, value_name = "N")]
    digest_every: u64,
    /// Come up suspended, as after CRIU: wait to be restored, then go on from what the image holds
    #[arg(long)]
    pub(super) suspended: bool,
    /// Exit at once, whatever the process is doing, when this file is there, with the status that stands in its one line
    #[arg(long, value_name = "FILE")]
    pub(super) exit_when: Option<PathBuf>,
}

/// The memory and the work of a job, resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) gpus: Vec<GpuPlan>,
    pub(crate) seed: u64,
    /// `None` = for ever.
    pub(crate) step_count: Option<u64>,
    pub(crate) step_pause_ms: u64,
    /// 0 = only at the end.
    pub(crate) digest_every: u64,
}

/// The memory of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuPlan {
    pub(crate) bytes: u64,
    pub(crate) fill: Fill,
}

impl Args {
    /// Spreads the lists over the GPUs.
    ///
    /// # Errors
    /// A list with more entries than there are GPUs; a file that is to be computed on.
    pub(crate) fn plan(&self) -> Result<Plan, TargetError> {
        let gpu_count = self.gpus as usize;
        for (flag, len) in [("--bytes", self.bytes.len()), ("--fill", self.fill.len())] {
            if len > gpu_count {
                return Err(TargetError::ListTooLong {
                    flag,
                    len,
                    gpu_count,
                });
            }
        }
        let gpus: Vec<GpuPlan> = (0..gpu_count)
            .map(|index| GpuPlan {
                bytes: *at_or_last(&self.bytes, index),
                fill: at_or_last(&self.fill, index).clone(),
            })
            .collect();
        let has_file = gpus.iter().any(|gpu| matches!(gpu.fill, Fill::File(_)));
        if has_file && self.steps != Some(0) {
            return Err(TargetError::FileIsComputedOn);
        }
        Ok(Plan {
            gpus,
            seed: self.seed,
            step_count: self.steps,
            step_pause_ms: self.step_ms,
            digest_every: self.digest_every,
        })
    }
}

/// The entry at `index`, or the last one: clap gives neither list empty.
fn at_or_last<T>(list: &[T], index: usize) -> &T {
    &list[index.min(list.len() - 1)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn plan(line: &str) -> Result<Plan, TargetError> {
        Line::try_parse_from(std::iter::once("target").chain(line.split(' ')))
            .expect("the line parses")
            .args
            .plan()
    }

    #[test]
    fn lists_repeat_their_last_entry() {
        let plan = plan("--gpus 3 --bytes 1MiB,0 --fill random,zeros").expect("fits");
        let gpus: Vec<_> = plan.gpus.iter().map(|gpu| (gpu.bytes, &gpu.fill)).collect();
        assert_eq!(
            gpus,
            [
                (1 << 20, &Fill::Random),
                (0, &Fill::Zeros),
                (0, &Fill::Zeros)
            ]
        );
        assert_eq!(plan.step_count, None);
    }

    #[test]
    fn a_file_is_held_and_never_computed_on() {
        let held = plan("--bytes 1MiB --fill file:a=b.bin --steps 0").expect("fits");
        assert_eq!(held.gpus[0].fill, Fill::File("a=b.bin".into()));
        for steps in ["", " --steps 3"] {
            let error = plan(&format!("--bytes 1MiB --fill file:x{steps}")).expect_err("computes");
            assert!(error.to_string().contains("--steps 0"), "{error}");
        }
        for fill in ["file", "file:", "Weights", "noise"] {
            let line = ["target", "--bytes", "1MiB", "--fill", fill];
            assert!(Line::try_parse_from(line).is_err(), "{fill}");
        }
    }

    #[test]
    fn too_long_a_list_is_named() {
        let error = plan("--gpus 1 --bytes 1,2").expect_err("two sizes for one GPU");
        assert_eq!(error.to_string(), "--bytes has 2 entries for 1 GPUs");
    }
}
