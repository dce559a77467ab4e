//! The final word of a command: one structure, printed as a table for people or as one JSON object.
//!
//! In: an [`Outcome`] or a [`Failure`]. Out: a [`RunReport`]; its JSON and its text say the same. What can fail: only stdout itself.

use std::fmt::Write as _;
use std::io::{self, Write};

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::bench;
use super::findings::PreflightListing;
use super::images::{ImageListing, Inspection, JobListing};
use super::supervise::{NotifyOutcome, StatusListing};
use super::tidy::{RecoveredListing, UpkeepListing};
use super::units::{size, sizes, whole};
use crate::bench::Report;
use crate::error::{ExitCode, Failure, Phase, TargetState};
use crate::image::image_id;
use crate::outcome::{Bytes, LaneOutcome, Outcome, PhaseSeconds, StageOutcome};

/// What a command did, or why it did not.
#[derive(Debug, Serialize)]
pub(super) struct RunReport {
    /// The command as typed; `None` when the command line was not understood.
    command: Option<&'static str>,
    /// The same as `exit_code == 0`, in a word.
    result: Verdict,
    exit_code: u8,
    /// What the exit code means, in words.
    meaning: &'static str,
    /// Where it ended: the last phase, or the one that failed.
    phase: Option<Phase>,
    job: Option<String>,
    image: Option<String>,
    generation: Option<u64>,
    targets: Vec<TargetState>,
    /// Wall seconds of the whole command.
    elapsed_seconds: f64,
    /// Why it failed, outermost first; empty when it did not.
    cause: Vec<String>,
    /// Clean-up that failed too.
    attached: Vec<String>,
    /// What is to be known besides.
    notes: Vec<String>,
    /// What a script does next.
    next: &'static str,
    /// The same command may succeed later without anybody changing anything.
    retryable: bool,
    #[serde(flatten)]
    body: Body,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    Failed,
}

/// What is particular to a kind of command.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Body {
    Transfer(Box<Transfer>),
    Images(ImageListing),
    Jobs(JobListing),
    Inspection(Box<Inspection>),
    Bench(Box<Report>),
    Upkeep(UpkeepListing),
    Recovered(RecoveredListing),
    Preflight(PreflightListing),
    Status(StatusListing),
    Notified(NotifyOutcome),
    Failed {},
}

/// A save, a restore, or a reading back.
#[derive(Debug, Serialize)]
struct Transfer {
    attempt: String,
    bytes: Bytes,
    #[serde(serialize_with = "by_phase")]
    seconds: Vec<PhaseSeconds>,
    seconds_locked: f64,
    devices: Vec<LaneOutcome>,
    skipped: Vec<String>,
    stages: Vec<StageOutcome>,
    slowest_stage: Option<String>,
    retries: u64,
    memory_planned: u64,
}

/// What a command that did as asked has to tell.
#[derive(Debug)]
pub(super) enum Done {
    /// A save, a restore, or a reading back.
    Transfer(Outcome),
    /// `list` of one job.
    Images(ImageListing),
    /// `list` of the store.
    Jobs(JobListing),
    /// `inspect`.
    Inspection(Box<Inspection>),
    /// `bench`.
    Bench(Box<Report>),
    /// `gc` and `prune`.
    Upkeep(UpkeepListing),
    /// `recover`.
    Recovered(RecoveredListing),
    /// `preflight`.
    Preflight(PreflightListing),
    /// `status`.
    Status(StatusListing),
    /// `notify`.
    Notified(NotifyOutcome),
}

impl Done {
    /// What it means to a script. A look that was made as asked may have found what is not in order.
    pub(super) fn code(&self) -> ExitCode {
        match self {
            Self::Recovered(listing) => listing.0.code(),
            Self::Upkeep(listing) => listing.code(),
            Self::Preflight(listing) => listing.code(),
            _ => ExitCode::Ok,
        }
    }
}

/// `{"prepare": 0.5, "lock": 0.01}`, in order.
fn by_phase<S: Serializer>(seconds: &[PhaseSeconds], serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(seconds.len()))?;
    for entry in seconds {
        map.serialize_entry(&entry.phase, &entry.seconds)?;
    }
    map.end()
}

impl RunReport {
    /// The report of a command that did as asked.
    pub(super) fn done(command: &'static str, done: Done, elapsed_seconds: f64) -> Self {
        let mut report = Self::empty(Some(command), done.code(), elapsed_seconds);
        report.body = match done {
            Done::Transfer(outcome) => {
                report.phase = outcome.seconds.last().map(|entry| entry.phase);
                report.job = Some(outcome.job);
                report.image = Some(outcome.image).filter(|image| !image.is_empty());
                report.generation = Some(outcome.generation).filter(|of| *of > 0);
                report.targets = outcome.targets;
                Body::Transfer(Box::new(Transfer {
                    attempt: outcome.attempt,
                    bytes: outcome.bytes,
                    seconds: outcome.seconds,
                    seconds_locked: outcome.seconds_locked,
                    devices: outcome.lanes,
                    skipped: outcome.skipped,
                    stages: outcome.stages,
                    slowest_stage: outcome.slowest_stage,
                    retries: outcome.retries,
                    memory_planned: outcome.memory_planned,
                }))
            }
            Done::Images(listing) => {
                report.job = Some(listing.job.clone());
                Body::Images(listing)
            }
            Done::Jobs(listing) => Body::Jobs(listing),
            Done::Inspection(inspection) => {
                report.job = Some(inspection.manifest.job.clone());
                report.image = Some(image_id(inspection.generation));
                report.generation = Some(inspection.generation);
                Body::Inspection(inspection)
            }
            Done::Bench(measured) => Body::Bench(measured),
            Done::Upkeep(listing) => {
                report.job = listing.job();
                report.cause = listing.left();
                Body::Upkeep(listing)
            }
            Done::Recovered(listing) => {
                report.targets = listing.states();
                report.cause = listing.left();
                Body::Recovered(listing)
            }
            Done::Preflight(listing) => {
                report.job = Some(listing.0.job.clone());
                report.cause = listing.failures();
                report.targets.clone_from(&listing.0.targets);
                Body::Preflight(listing)
            }
            Done::Status(listing) => {
                report.job = Some(listing.status.job.clone());
                Body::Status(listing)
            }
            Done::Notified(outcome) => {
                report.image = outcome.verdict.image.clone();
                Body::Notified(outcome)
            }
        };
        report
    }

    /// The report of a command that failed.
    pub(super) fn failed(
        command: Option<&'static str>,
        failure: &Failure,
        job: Option<String>,
        elapsed_seconds: f64,
    ) -> Self {
        Self {
            phase: Some(failure.phase),
            job,
            image: failure.generation.map(image_id),
            generation: failure.generation,
            targets: failure.targets.clone(),
            cause: failure.cause_chain(),
            attached: failure.attached.clone(),
            notes: failure.notes.clone(),
            ..Self::empty(command, failure.code, elapsed_seconds)
        }
    }

    fn empty(command: Option<&'static str>, code: ExitCode, elapsed_seconds: f64) -> Self {
        Self {
            command,
            result: if code == ExitCode::Ok {
                Verdict::Ok
            } else {
                Verdict::Failed
            },
            exit_code: code.code(),
            meaning: code.meaning(),
            phase: None,
            job: None,
            image: None,
            generation: None,
            targets: Vec::new(),
            elapsed_seconds,
            cause: Vec::new(),
            attached: Vec::new(),
            notes: Vec::new(),
            next: code.next(),
            retryable: code.is_retryable(),
            body: Body::Failed {},
        }
    }

    /// Writes the result to stdout: one JSON object, or the table. A failure has no table; its words go to stderr.
    ///
    /// # Errors
    /// Those of `out`.
    pub(super) fn print(&self, as_json: bool, out: &mut dyn Write) -> io::Result<()> {
        if as_json {
            serde_json::to_writer(&mut *out, self)?;
            writeln!(out)?;
        } else {
            out.write_all(self.text().as_bytes())?;
        }
        out.flush()
    }

    /// The report as a JSON line for `--progress json`, marked as the last one.
    ///
    /// # Errors
    /// A number that JSON cannot hold.
    pub(super) fn result_line(&self) -> serde_json::Result<String> {
        #[derive(Serialize)]
        struct Line<'a> {
            event: &'static str,
            #[serde(flatten)]
            report: &'a RunReport,
        }
        serde_json::to_string(&Line {
            event: "result",
            report: self,
        })
    }

    /// What stderr says about a failure: clean-up and targets first, the verdict last.
    pub(super) fn failure_lines(&self, advice: &str) -> Vec<String> {
        let also = self
            .attached
            .iter()
            .map(|line| format!("ckptstream: also failed: {line}"));
        let notes = self.notes.iter().map(|line| format!("ckptstream: {line}"));
        let targets = self
            .targets
            .iter()
            .map(|target| format!("ckptstream: target pid {} is {}", target.pid, target.state));
        let phase = self
            .phase
            .map_or_else(String::new, |phase| format!(" in phase {phase}"));
        let image = self
            .image
            .as_ref()
            .map_or_else(String::new, |image| format!(" (image {image})"));
        let command = self
            .command
            .map_or_else(String::new, |command| format!("{command} "));
        let last = format!(
            "ckptstream: {command}failed{phase}, exit {} ({}){image}: {}; next: {advice}",
            self.exit_code,
            self.meaning,
            one_line(&self.cause.join(": "))
        );
        also.chain(notes).chain(targets).chain([last]).collect()
    }

    fn text(&self) -> String {
        match &self.body {
            Body::Transfer(transfer) => self.transfer_text(transfer),
            Body::Images(listing) => listing.text(),
            Body::Jobs(listing) => listing.text(),
            Body::Inspection(inspection) => inspection.text(),
            Body::Bench(measured) => bench::text(measured),
            Body::Upkeep(listing) => listing.text(),
            Body::Recovered(listing) => listing.text(),
            Body::Preflight(listing) => listing.text(),
            Body::Status(listing) => listing.text(),
            Body::Notified(outcome) => outcome.text(),
            Body::Failed {} => String::new(),
        }
    }

    fn transfer_text(&self, transfer: &Transfer) -> String {
        let mut rows = Rows::default();
        let image = self.image.as_deref().unwrap_or("-");
        let job = self.job.as_deref().unwrap_or("-");
        rows.add(
            "image",
            format!("{image} of job {job}, attempt {}", transfer.attempt),
        );
        rows.add("bytes", sizes(transfer.bytes.raw, transfer.bytes.stored));
        for device in &transfer.devices {
            rows.add(
                "",
                format!("{}  {}", device.device, sizes(device.raw, device.stored)),
            );
        }
        for target in &self.targets {
            rows.add("target", format!("pid {} {}", target.pid, target.state));
        }
        if !self.targets.is_empty() {
            rows.add("locked", format!("{:.2} s", transfer.seconds_locked));
        }
        let phases: Vec<String> = transfer
            .seconds
            .iter()
            .map(|entry| format!("{} {:.2} s", entry.phase, entry.seconds))
            .collect();
        rows.add(
            "phases",
            format!("{} (all {:.2} s)", phases.join(", "), self.elapsed_seconds),
        );
        for stage in &transfer.stages {
            rows.add(
                "stage",
                format!(
                    "{:<10} {:>10}/s  {:>10}, busy {:.2} s, waited for input {:.2} s, for the next stage {:.2} s",
                    stage.stage,
                    size(whole(stage.rate)),
                    size(stage.bytes),
                    stage.busy_seconds,
                    stage.starved_seconds,
                    stage.blocked_seconds
                ),
            );
        }
        if let Some(slowest) = &transfer.slowest_stage {
            rows.add("slowest", slowest.clone());
        }
        rows.add(
            "memory",
            format!("{} planned", size(transfer.memory_planned)),
        );
        if transfer.retries > 0 {
            rows.add("retries", transfer.retries.to_string());
        }
        for skipped in &transfer.skipped {
            rows.add("skipped", skipped.clone());
        }
        rows.text
    }
}

/// Messages of other systems may hold line breaks; the last line must stay one.
fn one_line(text: &str) -> String {
    text.split(['\n', '\r'])
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Lines of a table, most of them with a name in front.
#[derive(Debug, Default)]
pub(super) struct Rows {
    pub(super) text: String,
}

impl Rows {
    pub(super) fn add(&mut self, name: &str, value: impl AsRef<str>) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.text, "{name:<9} {}", value.as_ref());
    }

    pub(super) fn line(&mut self, line: impl AsRef<str>) {
        self.text.push_str(line.as_ref().trim_end());
        self.text.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome() -> Outcome {
        Outcome {
            job: "train".to_owned(),
            generation: 7,
            image: "00000007".to_owned(),
            attempt: "ab".repeat(16),
            targets: vec![TargetState {
                pid: 42,
                state: "checkpointed".to_owned(),
            }],
            bytes: Bytes {
                raw: 4 << 30,
                stored: 2 << 30,
            },
            seconds: vec![
                PhaseSeconds {
                    phase: Phase::Prepare,
                    seconds: 0.5,
                },
                PhaseSeconds {
                    phase: Phase::Stream,
                    seconds: 1.5,
                },
            ],
            seconds_locked: 2.0,
            lanes: vec![LaneOutcome {
                device: "GPU-x".to_owned(),
                raw: 4 << 30,
                stored: 2 << 30,
            }],
            stages: vec![StageOutcome {
                stage: "copy".to_owned(),
                bytes: 4 << 30,
                busy_seconds: 1.0,
                starved_seconds: 0.0,
                blocked_seconds: 0.25,
                rate: 4e9,
            }],
            slowest_stage: Some("upload".to_owned()),
            skipped: Vec::new(),
            retries: 3,
            memory_planned: 256 << 20,
        }
    }

    #[test]
    fn json_and_table_say_the_same() {
        let report = RunReport::done("checkpoint", Done::Transfer(outcome()), 3.0);
        let json = serde_json::to_value(&report).expect("json");
        assert_eq!(json["result"], "ok");
        assert_eq!(json["exit_code"], 0);
        assert_eq!(json["image"], "00000007");
        assert_eq!(json["targets"][0]["state"], "checkpointed");
        assert_eq!(json["bytes"]["raw"], 4u64 << 30);
        assert_eq!(json["seconds"]["stream"], 1.5);
        assert_eq!(json["slowest_stage"], "upload");
        assert_eq!(json["next"], "none");
        let mut text = Vec::new();
        report
            .print(false, &mut text)
            .expect("a Vec takes everything");
        let text = String::from_utf8(text).expect("text");
        for part in [
            "00000007 of job train",
            "4.0 GiB raw, 2.0 GiB stored, ratio 2.00",
            "pid 42 checkpointed",
            "locked    2.00 s",
            "stream 1.50 s",
            "upload",
        ] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }

    #[test]
    fn a_failure_ends_in_one_line_with_the_chain_and_what_to_do() {
        let cause = crate::config::ConfigError::File {
            path: "x.toml".into(),
            source: Box::new(crate::config::ConfigError::Syntax {
                line: 3,
                message: "bad\nworse".to_owned(),
            }),
        };
        let mut failure = Failure::new(ExitCode::Config, Phase::Config, cause);
        failure.targets.push(TargetState {
            pid: 9,
            state: "running".to_owned(),
        });
        failure.attached.push("abort upload".to_owned());
        let report = RunReport::failed(Some("checkpoint"), &failure, Some("j".to_owned()), 0.1);
        let lines = report.failure_lines(failure.code.advice());
        assert_eq!(lines.len(), 3);
        assert_eq!(
            lines[2],
            "ckptstream: checkpoint failed in phase config, exit 2 (usage or configuration error): the configuration file x.toml is not valid: \
             line 3: not valid TOML: bad worse; next: correct the flag or key that it names"
        );
        let json = serde_json::to_value(&report).expect("json");
        assert_eq!(
            (&json["result"], &json["exit_code"], &json["phase"]),
            (&"failed".into(), &2.into(), &"config".into())
        );
        assert_eq!(json["cause"].as_array().map(Vec::len), Some(2));
        let line: serde_json::Value =
            serde_json::from_str(&report.result_line().expect("line")).expect("json");
        assert_eq!(
            (&line["event"], &line["exit_code"]),
            (&"result".into(), &2.into())
        );
    }
}
