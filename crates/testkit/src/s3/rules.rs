//! The rules in force: which requests fail, and how.
//!
//! In: a JSON list, read at the start and again whenever the file's time, length or inode changes. Out: per request the first rule that
//! fires, as an [`Action`] that was checked when the file was read. Every rule whose filter matches counts the request, whether or not
//! an earlier rule fired. A re-read starts all counters again. A file that cannot be read or understood stops the server at the start;
//! later it leaves the old rules in force and is reported on standard error.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use http::HeaderMap;

use super::op::Target;
use super::rule_file::{self, Action, FormatError, Rule, When};

/// Largest rules file that is read.
const FILE_LEN_MAX: u64 = 1 << 20;
/// Keys that a `per_key` rule tells apart; requests for further keys do not fire it.
const KEYS_MAX: usize = 65_536;

/// Why a rules file was not taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum RulesError {
    #[error("rules file {path} cannot be read")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("rules file {path} is longer than {FILE_LEN_MAX} bytes")]
    TooLong { path: PathBuf },
    #[error("rules file {path} was not accepted")]
    Format { path: PathBuf, source: FormatError },
}

#[derive(Default)]
struct Counter {
    seen: u64,
    fired: u64,
}

struct Live {
    rule: Rule,
    counters: HashMap<String, Counter>,
}

#[derive(PartialEq, Eq)]
struct Stamp {
    modified: Option<SystemTime>,
    len: u64,
    inode: u64,
}

#[derive(Default)]
struct State {
    stamp: Option<Stamp>,
    live: Vec<Live>,
}

/// The rules in force.
pub(super) struct Rules {
    path: Option<PathBuf>,
    state: Mutex<State>,
}

impl Rules {
    /// Reads the file, or makes an empty set when there is none.
    pub(super) fn open(path: Option<PathBuf>) -> Result<Self, RulesError> {
        let mut state = State::default();
        if let Some(path) = &path {
            state.stamp = stamp(path);
            state.live = load(path)?;
        }
        Ok(Self {
            path,
            state: Mutex::new(state),
        })
    }

    /// Counts a request and gives the first rule that fires for it, with its index in the file.
    pub(super) fn decide(
        &self,
        target: &Target,
        headers: &HeaderMap,
    ) -> Option<(usize, Arc<Action>)> {
        let path = self.path.as_deref()?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.refresh(path);
        let mut first = None;
        for (index, live) in state.live.iter_mut().enumerate() {
            if live.rule.matches(target, headers)
                && live.count(target, first.is_none())
                && first.is_none()
            {
                first = Some((index, Arc::clone(&live.rule.action)));
            }
        }
        first
    }
}

impl State {
    #[expect(
        clippy::print_stderr,
        reason = "a test server's only place to complain"
    )]
    fn refresh(&mut self, path: &Path) {
        let now = stamp(path);
        if now == self.stamp {
            return;
        }
        match load(path) {
            Ok(live) => self.live = live,
            Err(error) => eprintln!(
                "testkit s3: the old rules stay in force: {}",
                super::chain(&error)
            ),
        }
        self.stamp = now;
    }
}

impl Live {
    /// Counts the request; true when the rule fires. Firing is only counted when it `may_fire`.
    fn count(&mut self, target: &Target, may_fire: bool) -> bool {
        let scope = if self.rule.per_key {
            target.key.clone().unwrap_or_default()
        } else {
            String::new()
        };
        if self.counters.len() >= KEYS_MAX && !self.counters.contains_key(&scope) {
            return false;
        }
        let counter = self.counters.entry(scope).or_default();
        counter.seen += 1;
        let due = match self.rule.when {
            When::Nth(k) => counter.seen == k,
            When::From(k) => counter.seen >= k,
            When::Every(k) => counter.seen.is_multiple_of(k),
            When::Always => true,
        };
        let fires = due && may_fire && counter.fired < self.rule.times;
        counter.fired += u64::from(fires);
        fires
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let meta = std::fs::metadata(path).ok()?;
    Some(Stamp {
        modified: meta.modified().ok(),
        len: meta.len(),
        inode: meta.ino(),
    })
}

fn load(path: &Path) -> Result<Vec<Live>, RulesError> {
    let read_error = |source| RulesError::Read {
        path: path.to_owned(),
        source,
    };
    if std::fs::metadata(path).map_err(read_error)?.len() > FILE_LEN_MAX {
        return Err(RulesError::TooLong {
            path: path.to_owned(),
        });
    }
    let text = std::fs::read(path).map_err(read_error)?;
    let rules = rule_file::parse(&text).map_err(|source| RulesError::Format {
        path: path.to_owned(),
        source,
    })?;
    Ok(rules
        .into_iter()
        .map(|rule| Live {
            rule,
            counters: HashMap::new(),
        })
        .collect())
}
