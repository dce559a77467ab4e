//! The rules in force: which requests fail, and how.
//!
//! In: a rules file, see [`ScriptFile`]. Out: per request the first rule that fires, as an [`Action`] that was checked when the file was read.

use std::path::PathBuf;
use std::sync::Arc;

use http::HeaderMap;

use super::op::Target;
use super::rule_file::{self, Action, Rule};
use crate::rule::{Counted, first_that_fires};
use crate::script::{ScriptError, ScriptFile};

/// The rules in force.
pub(super) struct Rules(ScriptFile<Vec<Counted<Rule>>>);

impl Rules {
    /// Reads the file, or makes an empty set when there is none.
    pub(super) fn open(path: Option<PathBuf>) -> Result<Self, ScriptError> {
        ScriptFile::open(path, rule_file::parse).map(Self)
    }

    /// Counts a request and gives the first rule that fires for it, with its index in the file.
    pub(super) fn decide(
        &self,
        target: &Target,
        headers: &HeaderMap,
    ) -> Option<(usize, Arc<Action>)> {
        self.0.with(|rules| {
            let first = first_that_fires(rules, |rule| {
                rule.matches(target, headers).then(|| rule.key(target))
            });
            first.map(|(index, rule)| (index, Arc::clone(&rule.action)))
        })
    }
}
