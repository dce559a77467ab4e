//! What the measured rates mean for a node: the floor, the limit, whether a notice is long enough.
//!
//! In: what each stage costs by itself, and what a whole run took. Out: seconds, and a sentence. Nothing here measures, and nothing can fail.
//!
//! ```text
//! floor = max( bytes of a GPU ÷ rate of its copy engine,  CPU seconds of all stages ÷ cores,  stored bytes ÷ link )
//! ```
//!
//! No pipeline can be faster than its floor. What a run took beyond it, as a factor, is taken along when other GPUs are reckoned: a node of another size has
//! another floor, and the same pipeline.

use std::time::Duration;

use serde::Serialize;

use super::measure::gb;

/// GPUs and the bytes on each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Node {
    /// How many GPUs.
    pub gpus: u32,
    /// Bytes of memory of each.
    pub gpu_bytes: u64,
}

impl Node {
    fn bytes(self) -> u64 {
        self.gpu_bytes.saturating_mul(u64::from(self.gpus))
    }
}

/// What moving data takes, stage by stage, each measured alone.
#[derive(Debug, Clone, Serialize)]
pub struct Costs {
    /// Bytes per second of one GPU's copies; `None` without a GPU.
    pub copy_rate: Option<f64>,
    /// CPU seconds per raw GB, by stage.
    pub cpu_per_gb: Vec<StageCost>,
    /// Stored bytes per raw byte.
    pub stored_share: f64,
    /// Stored bytes per second of the link; `None` where the store is in this process.
    pub link_rate: Option<f64>,
    /// Processors.
    pub cores: u32,
}

/// One stage's CPU seconds per raw GB.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct StageCost {
    /// Which stage.
    pub stage: &'static str,
    /// CPU seconds per GB (10⁹ bytes) of raw data.
    pub cpu_seconds: f64,
}

/// The three bounds, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Floor {
    /// The copy engines.
    pub copy: f64,
    /// All processors together.
    pub cpu: f64,
    /// The link.
    pub link: f64,
}

/// What bounds a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Limit {
    /// The GPUs' copy engines.
    Copy,
    /// The processors.
    Cpu,
    /// The link to the store.
    Link,
}

impl Floor {
    /// The largest of the three.
    pub fn seconds(self) -> f64 {
        self.copy.max(self.cpu).max(self.link)
    }

    /// Which one that is.
    pub fn limit(self) -> Limit {
        if self.link >= self.copy && self.link >= self.cpu {
            Limit::Link
        } else if self.copy >= self.cpu {
            Limit::Copy
        } else {
            Limit::Cpu
        }
    }
}

impl Costs {
    /// The floor of a node whose GPUs are full.
    pub fn floor(&self, node: Node) -> Floor {
        let raw_gb = gb(node.bytes());
        let cpu_seconds: f64 = self.cpu_per_gb.iter().map(|cost| cost.cpu_seconds).sum();
        let over = |bytes_gb: f64, rate: Option<f64>| match rate {
            Some(rate) if rate > 0.0 => bytes_gb * 1e9 / rate,
            _ => 0.0,
        };
        Floor {
            copy: over(gb(node.gpu_bytes), self.copy_rate),
            cpu: raw_gb * cpu_seconds / f64::from(self.cores.max(1)),
            link: over(raw_gb * self.stored_share, self.link_rate),
        }
    }

    /// The stage that bounds: `copy`, the network's name for it, or the stage that takes most of the processors.
    fn slowest(&self, floor: Floor, network: &'static str) -> &'static str {
        match floor.limit() {
            Limit::Copy => "copy",
            Limit::Link => network,
            Limit::Cpu => {
                let costs = self.cpu_per_gb.iter();
                let most = costs.max_by(|a, b| a.cpu_seconds.total_cmp(&b.cpu_seconds));
                most.map_or("nothing", |cost| cost.stage)
            }
        }
    }
}

/// One way of one kind of data, as it was measured.
#[derive(Debug, Clone)]
pub(super) struct Measured {
    /// What it is called.
    pub(super) data: String,
    pub(super) costs: Costs,
    /// Wall seconds of a whole run over `node`; `None` when there was none.
    pub(super) run: Option<(Node, f64)>,
    /// Wall seconds before the first byte.
    pub(super) prepare_seconds: f64,
}

/// What a kind of data takes on the node that was asked for.
#[derive(Debug, Clone, Serialize)]
pub struct Estimate {
    /// Kind of data.
    pub data: String,
    /// Seconds for a whole save or restore, start to end.
    pub seconds: f64,
    /// Seconds of the floor.
    pub floor_seconds: f64,
    /// The stage that the others wait for.
    pub slowest_stage: &'static str,
    /// What that stage is bound by.
    pub limit: Limit,
    /// Whether it fits the notice.
    pub fits: bool,
    /// Seconds to spare; below zero, seconds too many.
    pub spare_seconds: f64,
}

impl Measured {
    /// The estimate for a node: its floor, times what a run took over its own.
    fn estimate(&self, node: Node, notice: Duration, network: &'static str) -> Estimate {
        let floor = self.costs.floor(node);
        let factor = self.run.map_or(1.0, |(ran_on, seconds)| {
            let least = self.costs.floor(ran_on).seconds();
            // A run below its own floor is noise of the measurement.
            if least > 0.0 {
                (seconds / least).max(1.0)
            } else {
                1.0
            }
        });
        let seconds = self.prepare_seconds + floor.seconds() * factor;
        let spare_seconds = notice.as_secs_f64() - seconds;
        Estimate {
            data: self.data.clone(),
            seconds,
            floor_seconds: floor.seconds(),
            slowest_stage: self.costs.slowest(floor, network),
            limit: floor.limit(),
            fits: spare_seconds >= 0.0,
            spare_seconds,
        }
    }
}

/// The answer.
#[derive(Debug, Clone, Serialize)]
pub struct Verdict {
    /// For which node.
    pub node: Node,
    /// The notice, in seconds.
    pub notice_seconds: f64,
    /// Saves, by kind of data.
    pub out: Vec<Estimate>,
    /// Restores, by kind of data.
    #[serde(rename = "in")]
    pub back: Vec<Estimate>,
    /// `true` when every kind fits.
    pub fits: bool,
    /// All of it in words.
    pub sentence: String,
    /// What would help.
    pub advice: String,
}

/// How much of it was measured, for the sentence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Basis {
    /// The link to the store was.
    pub(super) link: bool,
    /// The GPUs were.
    pub(super) gpus: bool,
}

impl Verdict {
    /// The answer for a node, from one measurement per kind of data and way. At least one kind was measured.
    pub(super) fn new(
        node: Node,
        notice: Duration,
        basis: Basis,
        out: &[Measured],
        back: &[Measured],
    ) -> Self {
        let out: Vec<Estimate> = out
            .iter()
            .map(|kind| kind.estimate(node, notice, "upload"))
            .collect();
        let back: Vec<Estimate> = back
            .iter()
            .map(|kind| kind.estimate(node, notice, "download"))
            .collect();
        let worst = out.iter().max_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let advice = worst.map_or("", |worst| advice(worst, basis));
        Self {
            node,
            notice_seconds: notice.as_secs_f64(),
            fits: out.iter().all(|kind| kind.fits),
            sentence: sentence(node, notice, basis, &out),
            advice: advice.to_owned(),
            out,
            back,
        }
    }
}

/// `Slowest stage: upload. 8 GPUs of 141.0 GB are saved in 61 s (bf16) to 98 s (random); that fits a notice of 120 s with 22 s to spare.`
fn sentence(node: Node, notice: Duration, basis: Basis, out: &[Estimate]) -> String {
    let mut by_time: Vec<&Estimate> = out.iter().collect();
    by_time.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let (Some(best), Some(worst)) = (by_time.first(), by_time.last()) else {
        return "Nothing was measured.".to_owned();
    };
    let gpus = match node.gpus {
        1 => "1 GPU".to_owned(),
        count => format!("{count} GPUs"),
    };
    let seconds = if by_time.len() == 1 {
        format!("{:.1} s ({})", worst.seconds, worst.data)
    } else {
        format!(
            "{:.1} s ({}) to {:.1} s ({})",
            best.seconds, best.data, worst.seconds, worst.data
        )
    };
    let notice = notice.as_secs_f64();
    let fits = if worst.fits {
        format!(
            "that fits a notice of {notice:.0} s with {:.1} s to spare",
            worst.spare_seconds
        )
    } else if best.fits {
        let too_long: Vec<&str> = by_time
            .iter()
            .filter(|kind| !kind.fits)
            .map(|kind| kind.data.as_str())
            .collect();
        format!(
            "a notice of {notice:.0} s is too short for {}, by {:.1} s",
            too_long.join(" and "),
            -worst.spare_seconds
        )
    } else {
        format!(
            "a notice of {notice:.0} s is too short, by {:.1} s at least",
            -best.spare_seconds
        )
    };
    let missing = match (basis.link, basis.gpus) {
        (true, true) => "",
        (false, true) => " The way to the store is not counted (--to store counts it).",
        (true, false) => " Copies off the GPU are not counted (--no-gpu).",
        (false, false) => {
            " Neither the way to the store (--to store) nor copies off the GPU (--no-gpu) are counted."
        }
    };
    format!(
        "Slowest stage: {}. {gpus} of {:.1} GB are saved in {seconds}; {fits}.{missing}",
        worst.slowest_stage,
        gb(node.gpu_bytes)
    )
}

fn advice(worst: &Estimate, basis: Basis) -> &'static str {
    match worst.limit {
        Limit::Copy => {
            "the copy engines are the limit: nothing on the host makes them faster; less data on the GPUs does"
        }
        Limit::Link => {
            "the link is the limit: a faster one, a store nearer by, or fewer bytes (compression.mode = \"max-ratio\" where processors are idle)"
        }
        Limit::Cpu if basis.link => {
            "the processors are the limit: more of them for ckptstream (cpuset, pipeline.threads), or less work per byte (compression.mode = \"none\" if the link takes all bytes)"
        }
        Limit::Cpu => {
            "the processors are the limit: more of them for ckptstream (cpuset, pipeline.threads); --to store shows whether the link is slower still"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: u64 = 100_000_000_000;
    const BOTH: Basis = Basis {
        link: true,
        gpus: true,
    };

    fn costs() -> Costs {
        Costs {
            copy_rate: Some(50e9),
            cpu_per_gb: vec![
                StageCost {
                    stage: "copy",
                    cpu_seconds: 0.1,
                },
                StageCost {
                    stage: "compress",
                    cpu_seconds: 0.3,
                },
            ],
            stored_share: 0.5,
            link_rate: Some(10e9),
            cores: 16,
        }
    }

    fn node(gpus: u32) -> Node {
        Node {
            gpus,
            gpu_bytes: GPU,
        }
    }

    fn measured(costs: Costs, run: Option<(Node, f64)>) -> Measured {
        Measured {
            data: "bf16".to_owned(),
            costs,
            run,
            prepare_seconds: 1.0,
        }
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn the_floor_is_the_largest_bound() {
        // 100 GB: copy 2 s, CPU 40 s / 16 = 2.5 s, link 5 s.
        let floor = costs().floor(node(1));
        assert!(close(floor.copy, 2.0) && close(floor.cpu, 2.5) && close(floor.link, 5.0));
        assert!(close(floor.seconds(), 5.0));
        assert_eq!(floor.limit(), Limit::Link);
        // Every GPU has a copy engine of its own; processors and link are shared.
        let floor = costs().floor(node(8));
        assert!(close(floor.copy, 2.0) && close(floor.cpu, 20.0) && close(floor.link, 40.0));
    }

    #[test]
    fn the_slowest_stage_is_what_bounds() {
        let mut costs = costs();
        let slowest = |costs: &Costs| costs.slowest(costs.floor(node(1)), "upload");
        assert_eq!(slowest(&costs), "upload");
        costs.link_rate = None;
        assert_eq!(slowest(&costs), "compress");
        costs.cores = 64;
        assert_eq!(slowest(&costs), "copy");
        costs.copy_rate = None;
        assert_eq!(slowest(&costs), "compress");
    }

    #[test]
    fn an_estimate_takes_the_overhead_of_the_run_along() {
        // Its floor is 5 s on one GPU; it took 6 s, so 8 GPUs take 1.2 times their floor of 40 s, and a second before.
        let kind = measured(costs(), Some((node(1), 6.0)));
        let estimate = kind.estimate(node(8), Duration::from_secs(60), "upload");
        assert!(close(estimate.seconds, 49.0), "{estimate:?}");
        assert!(close(estimate.spare_seconds, 11.0) && estimate.fits);
        let estimate = kind.estimate(node(8), Duration::from_secs(48), "upload");
        assert!(close(estimate.spare_seconds, -1.0) && !estimate.fits);
        // Nothing is promised below the floor.
        let kind = measured(costs(), Some((node(1), 4.0)));
        let estimate = kind.estimate(node(1), Duration::from_secs(60), "upload");
        assert!(close(estimate.seconds, 6.0), "{estimate:?}");
    }

    #[test]
    fn the_sentence_says_who_is_slowest_how_long_and_whether_it_fits() {
        let mut random = measured(costs(), None);
        random.data = "random".to_owned();
        random.costs.stored_share = 1.0;
        let kinds = [random, measured(costs(), None)];
        let say = |notice, basis| {
            Verdict::new(node(1), Duration::from_secs(notice), basis, &kinds, &[]).sentence
        };
        assert_eq!(
            say(30, BOTH),
            "Slowest stage: upload. 1 GPU of 100.0 GB are saved in 6.0 s (bf16) to 11.0 s (random); that fits a notice of 30 s with 19.0 s to spare."
        );
        assert!(say(10, BOTH).contains("a notice of 10 s is too short for random, by 1.0 s"));
        assert!(say(4, BOTH).contains("a notice of 4 s is too short, by 2.0 s at least"));
        let alone = Basis {
            link: false,
            gpus: false,
        };
        assert!(say(30, alone).ends_with("are counted."));
        let verdict = Verdict::new(node(1), Duration::from_secs(10), BOTH, &kinds, &[]);
        assert!(!verdict.fits && verdict.out[1].fits);
        assert!(verdict.advice.contains("link"));
    }
}
