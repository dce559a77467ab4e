//! `preflight` and `drill`: one line per check, and what mends those that are not as they should be.
//!
//! In: what the library found. Out: a listing for the report. Nothing here can fail.

use serde::Serialize;

use super::report::Rows;
use crate::error::ExitCode;
use crate::preflight::{Findings, State};

/// All checks of one job.
#[derive(Debug, Serialize)]
pub(super) struct PreflightListing(pub(super) Findings);

impl PreflightListing {
    /// 3 when a save would fail, 12 when a drill left its target locked.
    pub(super) fn code(&self) -> ExitCode {
        self.0.code()
    }

    /// What would make it fail.
    pub(super) fn failures(&self) -> Vec<String> {
        let checks = self.0.checks.iter();
        let failed = checks.filter(|check| check.state == State::Failed);
        failed
            .map(|check| match &check.mend {
                Some(mend) => format!("{}: {} ({mend})", check.name, check.found),
                None => format!("{}: {}", check.name, check.found),
            })
            .collect()
    }

    /// The table for people.
    pub(super) fn text(&self) -> String {
        let mut rows = Rows::default();
        let width = self.0.checks.iter().map(|check| check.name.len()).max();
        let width = width.unwrap_or(0);
        for check in &self.0.checks {
            let state = match check.state {
                State::Ok => "ok",
                State::Warning => "warning",
                State::Failed => "FAILED",
            };
            rows.add(state, format!("{:<width$}  {}", check.name, check.found));
            if check.state == State::Ok {
                continue;
            }
            rows.add("", format!("{:<width$}  why: {}", "", check.why));
            if let Some(mend) = &check.mend {
                rows.add("", format!("{:<width$}  mend: {mend}", ""));
            }
        }
        rows.text
    }
}
