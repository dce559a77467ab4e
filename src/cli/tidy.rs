//! `gc`, `prune` and `recover`: what was removed or put in order, and what was left and why.
//!
//! In: what the library did, job by job. Out: a listing for the report. Nothing here can fail.

use serde::Serialize;

use super::report::Rows;
use super::units::size;
use crate::error::{ExitCode, TargetState};
use crate::recover::{Recovered, Row};
use crate::upkeep::{Fate, Upkeep};

/// What happens in a bucket without us: uploads that nobody completes cost money, and no listing of objects shows them.
const LIFECYCLE_RULE: &str = r#"{"Rules":[{"ID":"ckptstream-unfinished-uploads","Status":"Enabled","Filter":{"Prefix":""},"AbortIncompleteMultipartUpload":{"DaysAfterInitiation":7}}]}"#;

/// Of one job, or of all.
#[derive(Debug, Serialize)]
pub(super) struct UpkeepListing {
    jobs: Vec<Upkeep>,
    removed: Removed,
    /// A rule for the bucket that aborts what no `gc` ever comes to. It never concerns objects.
    lifecycle_rule: serde_json::Value,
}

#[derive(Debug, Default, Serialize)]
struct Removed {
    attempts: u64,
    objects: u64,
    bytes: u64,
    uploads: u64,
}

impl UpkeepListing {
    pub(super) fn new(jobs: Vec<Upkeep>) -> Self {
        let mut removed = Removed::default();
        let rows = jobs.iter().flat_map(|job| &job.attempts);
        for row in rows.filter(|row| row.fate == Fate::Removed) {
            removed.attempts += 1;
            removed.objects += row.objects;
            removed.bytes += row.bytes;
            removed.uploads += row.uploads;
        }
        Self {
            jobs,
            removed,
            lifecycle_rule: serde_json::from_str(LIFECYCLE_RULE).unwrap_or_default(),
        }
    }

    /// Something could not be done.
    pub(super) fn code(&self) -> ExitCode {
        let mut rows = self.jobs.iter().flat_map(|job| &job.attempts);
        match rows.any(|row| row.failed) {
            true => ExitCode::Preflight,
            false => ExitCode::Ok,
        }
    }

    /// What could not be done.
    pub(super) fn left(&self) -> Vec<String> {
        let rows = self.jobs.iter().flat_map(|job| &job.attempts);
        let failed = rows.filter(|row| row.failed);
        failed
            .map(|row| format!("attempt {}: {}", row.attempt, row.reason))
            .collect()
    }

    /// The job, when it is one.
    pub(super) fn job(&self) -> Option<String> {
        match self.jobs.as_slice() {
            [only] => Some(only.job.clone()),
            _ => None,
        }
    }

    /// The table for people.
    pub(super) fn text(&self) -> String {
        let mut rows = Rows::default();
        for job in &self.jobs {
            let dry = if job.dry_run {
                ", a dry run: nothing was changed"
            } else {
                ""
            };
            rows.add("job", format!("{}{dry}", job.job));
            for row in &job.attempts {
                let image = row.image.as_deref().unwrap_or("-");
                let fate = match row.fate {
                    Fate::Kept => "kept",
                    Fate::Dropped => "dropped",
                    Fate::Removed => "removed",
                };
                rows.add(fate, format!("{}  {image:<8}  {}", row.attempt, row.reason));
            }
        }
        let Removed {
            attempts,
            objects,
            bytes,
            uploads,
        } = self.removed;
        rows.add(
            "removed",
            format!(
                "{attempts} attempts: {objects} objects, {}, {uploads} unfinished uploads",
                size(bytes)
            ),
        );
        rows.add("lifecycle", format!("for the bucket: {LIFECYCLE_RULE}"));
        rows.text
    }
}

/// `recover`.
#[derive(Debug, Serialize)]
pub(super) struct RecoveredListing(pub(super) Recovered);

impl RecoveredListing {
    /// The targets, as of every other command.
    pub(super) fn states(&self) -> Vec<TargetState> {
        let states = self.0.targets.iter().filter(|row| row.pid != 0);
        let states = states.map(|row| TargetState {
            pid: row.pid,
            state: row.state.clone(),
        });
        states.collect()
    }

    /// What is not in order.
    pub(super) fn left(&self) -> Vec<String> {
        let left = self.0.targets.iter().filter(|row| row.code != ExitCode::Ok);
        left.map(|row| format!("process {}: {}", row.pid, row.verdict))
            .collect()
    }

    /// The table for people.
    pub(super) fn text(&self) -> String {
        let mut rows = Rows::default();
        for row in &self.0.targets {
            let Row {
                pid,
                name,
                state,
                job,
                command,
                ..
            } = row;
            rows.add(
                "target",
                format!("pid {pid} {name}, {state}; {command} of job {job}"),
            );
            rows.add("done", row.done);
            rows.add("verdict", &row.verdict);
            rows.add("next", row.next);
        }
        if self.0.targets.is_empty() {
            let dir = &self.0.state_dir;
            rows.line(format!(
                "no saver that died has left anything in {dir} (job.state_dir)"
            ));
        }
        rows.text
    }
}
