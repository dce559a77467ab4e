//! Scripted faults: what the k-th call of a function does instead of, or before, its work.
//!
//! In: rules of the form `FUNCTION#K=ACTION` from the configuration, and each call as it is made. Out: the action for that call.
//! Rules apply in the process whose environment holds them, so a saver's variable scripts the saver's calls.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use crate::codes::Code;

/// What a rule does to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Answers this code and does no work.
    Code(Code),
    /// Does the work, then answers this code whatever came of it.
    AfterCode(Code),
    /// Sleeps before the work.
    Stall(Duration),
    /// Ends the process that the call is about with SIGKILL, waits until it is gone, then goes on.
    KillTarget,
    /// Ends the calling process with SIGKILL before the work.
    KillCaller,
}

/// One `fault=` pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rule {
    function: String,
    /// The 1-based number of the call in this process; none is every call.
    call: Option<u64>,
    action: Action,
}

impl Rule {
    /// Parses `FUNCTION#K=ACTION`.
    ///
    /// # Errors
    /// A phrase saying what the rule should look like.
    pub(crate) fn parse(text: &str) -> Result<Rule, String> {
        let form = "should be FUNCTION#K=ACTION with K a number from 1 or *";
        let (place, action) = text.split_once('=').ok_or(form)?;
        let (function, call) = place.trim().split_once('#').ok_or(form)?;
        if !function.starts_with("cu") {
            return Err(format!("{function:?} is no driver function"));
        }
        let call = match call {
            "*" => None,
            k => Some(k.parse().ok().filter(|&k: &u64| k > 0).ok_or(form)?),
        };
        let action = match action.trim().split_once(':') {
            Some(("code", n)) => Action::Code(Code(n.parse().map_err(|e| format!("code: {e}"))?)),
            Some(("after-code", n)) => {
                Action::AfterCode(Code(n.parse().map_err(|e| format!("code: {e}"))?))
            }
            Some(("stall", ms)) => Action::Stall(Duration::from_millis(
                ms.parse().map_err(|e| format!("stall: {e}"))?,
            )),
            None if action.trim() == "kill-target" => Action::KillTarget,
            None if action.trim() == "kill-caller" => Action::KillCaller,
            _ => {
                return Err(
                    "the action is code:N, after-code:N, stall:MS, kill-target or kill-caller"
                        .to_owned(),
                );
            }
        };
        Ok(Rule {
            function: base_name(function).to_owned(),
            call,
            action,
        })
    }
}

/// The name without its version suffix: rules and traces name `cuMemAlloc`, whichever of its versions is called.
pub(crate) fn base_name(name: &str) -> &str {
    match name.rsplit_once("_v") {
        Some((base, digits))
            if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) =>
        {
            base
        }
        _ => name,
    }
}

/// Counts the calls of each function that a rule names.
#[derive(Debug, Default)]
pub(crate) struct Counter(Mutex<HashMap<String, u64>>);

impl Counter {
    /// Counts one call of `function` (a base name) and gives the actions for it, in the order of the rules.
    pub(crate) fn count(&self, rules: &[Rule], function: &str) -> Vec<Action> {
        if !rules.iter().any(|r| r.function == function) {
            return Vec::new();
        }
        let mut calls = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let call = calls.entry(function.to_owned()).or_insert(0);
        *call += 1;
        rules
            .iter()
            .filter(|r| r.function == function && r.call.is_none_or(|k| k == *call))
            .map(|r| r.action)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kth_call_and_every_call() {
        let rules = [
            Rule::parse("cuMemAlloc_v2#2=code:2").unwrap(),
            Rule::parse("cuInit#*=stall:5").unwrap(),
            Rule::parse("cuMemAlloc#2=kill-target").unwrap(),
        ];
        let counter = Counter::default();
        assert_eq!(counter.count(&rules, "cuMemAlloc"), []);
        assert_eq!(
            counter.count(&rules, "cuMemAlloc"),
            [Action::Code(Code(2)), Action::KillTarget]
        );
        assert_eq!(counter.count(&rules, "cuMemAlloc"), []);
        assert_eq!(
            counter.count(&rules, "cuInit"),
            [Action::Stall(Duration::from_millis(5))]
        );
        assert_eq!(
            counter.count(&rules, "cuInit"),
            [Action::Stall(Duration::from_millis(5))]
        );
        assert_eq!(counter.count(&rules, "cuMemFree"), []);
    }

    #[test]
    fn wrong_rules_are_refused() {
        for text in [
            "cuInit",
            "cuInit=code:1",
            "cuInit#0=code:1",
            "cuInit#1=code:x",
            "init#1=code:1",
            "cuInit#1=burn",
        ] {
            assert!(Rule::parse(text).is_err(), "{text}");
        }
        assert_eq!(
            Rule::parse("cuInit#1=after-code:12345").unwrap().action,
            Action::AfterCode(Code(12345))
        );
    }

    #[test]
    fn only_version_suffixes_are_cut() {
        assert_eq!(base_name("cuMemcpyDtoHAsync_v2"), "cuMemcpyDtoHAsync");
        assert_eq!(base_name("cuStreamGetCtx"), "cuStreamGetCtx");
        assert_eq!(base_name("cu_vx"), "cu_vx");
    }
}
