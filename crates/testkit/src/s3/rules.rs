//! The rules file: which requests fail, and how. Format: `docs/testkit.md`.
//!
//! In: a JSON list, read at the start and again whenever the file's time, length or inode changes. Out: per request the first rule that
//! fires, as an [`Action`] that was checked when the file was read. Every rule whose filter matches counts the request, whether or not
//! an earlier rule fired. A re-read starts all counters again. A file that cannot be read or understood stops the server at the start;
//! later it leaves the old rules in force and is reported on standard error.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::Deserialize;

use super::body::{BodyFault, BodyFaultKind};
use super::op::Target;
use super::store::Hints;

/// Largest rules file that is read.
const FILE_LEN_MAX: u64 = 1 << 20;
/// Keys that a `per_key` rule tells apart; requests for further keys do not fire it.
const KEYS_MAX: usize = 65_536;
/// Longest delay: an hour is beyond any test, and keeps time arithmetic in range.
const DELAY_MS_MAX: u64 = 3_600_000;

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
    #[error("rules file {path} is not a list of rules: {source}")]
    Parse {
        path: PathBuf,
        source: serde_json::Error,
    },
    #[error("rule {index} of {path}: {reason}")]
    Rule {
        path: PathBuf,
        index: usize,
        reason: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRule {
    op: Ops,
    key_contains: Option<String>,
    header: Option<HeaderFilter>,
    without_header: Option<String>,
    #[serde(default)]
    per_key: bool,
    nth: Option<u64>,
    from: Option<u64>,
    every: Option<u64>,
    #[serde(default)]
    always: bool,
    times: Option<u64>,
    action: RawAction,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ops {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HeaderFilter {
    name: String,
    #[serde(default)]
    contains: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawAction {
    delay_before_ms: Option<u64>,
    delay_after_ms: Option<u64>,
    #[serde(default)]
    apply: bool,
    status: Option<u16>,
    code: Option<String>,
    message: Option<String>,
    body: Option<String>,
    #[serde(default)]
    empty: bool,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    #[serde(default)]
    drop: bool,
    #[serde(default)]
    stall: bool,
    wire: Option<WireName>,
    of: Option<Side>,
    bytes: Option<u64>,
    #[serde(default)]
    ignore_conditions: bool,
    stale_ms: Option<u64>,
    keep_alive_ms: Option<u64>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum WireName {
    ResetAfter,
    StallAfter,
    CutAfter,
    FlipBit,
    ShortAfter,
    FlipStoredBit,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum Side {
    Request,
    Response,
}

/// What is answered.
pub(super) enum Reply {
    /// Whatever the store answers.
    Store,
    /// This status and body. The body is XML for S3 errors, or anything at all.
    Fixed { status: StatusCode, body: String },
    /// Nothing: the connection is closed.
    Drop,
    /// Nothing: the connection stays open.
    Stall,
}

/// What a rule does to a request. Checked: the parts do not contradict each other.
pub(super) struct Action {
    pub(super) delay_before: Option<Duration>,
    pub(super) delay_after: Option<Duration>,
    /// The store carries the request out.
    pub(super) apply: bool,
    pub(super) reply: Reply,
    /// Headers set on the answer; `None` takes the header out.
    pub(super) headers: Vec<(HeaderName, Option<HeaderValue>)>,
    pub(super) on_request: Option<BodyFault>,
    pub(super) on_response: Option<BodyFault>,
    pub(super) hints: Hints,
}

#[derive(Clone, Copy)]
enum When {
    Nth(u64),
    From(u64),
    Every(u64),
    Always,
}

struct Rule {
    ops: Vec<String>,
    key_contains: Option<String>,
    header: Option<(HeaderName, String)>,
    without_header: Option<HeaderName>,
    per_key: bool,
    when: When,
    times: u64,
    action: Arc<Action>,
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
            Err(error) => eprintln!("testkit s3: the old rules stay in force: {error}"),
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

impl Rule {
    fn matches(&self, target: &Target, headers: &HeaderMap) -> bool {
        self.ops.iter().any(|op| op == "*" || op == target.op)
            && self
                .key_contains
                .as_ref()
                .is_none_or(|part| target.key.as_ref().is_some_and(|key| key.contains(part)))
            && self.header.as_ref().is_none_or(|(name, part)| {
                headers
                    .get_all(name)
                    .iter()
                    .any(|value| value.to_str().is_ok_and(|value| value.contains(part)))
            })
            && self
                .without_header
                .as_ref()
                .is_none_or(|name| !headers.contains_key(name))
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
    let raw: Vec<RawRule> = serde_json::from_slice(&text).map_err(|source| RulesError::Parse {
        path: path.to_owned(),
        source,
    })?;
    raw.into_iter()
        .enumerate()
        .map(|(index, raw)| {
            raw.check()
                .map(|rule| Live {
                    rule,
                    counters: HashMap::new(),
                })
                .map_err(|reason| RulesError::Rule {
                    path: path.to_owned(),
                    index,
                    reason,
                })
        })
        .collect()
}

impl RawRule {
    fn check(self) -> Result<Rule, String> {
        let mut whens: Vec<When> = [
            self.nth.map(When::Nth),
            self.from.map(When::From),
            self.every.map(When::Every),
        ]
        .into_iter()
        .flatten()
        .collect();
        if self.always {
            whens.push(When::Always);
        }
        let [when] = whens[..] else {
            return Err("give exactly one of `nth`, `from`, `every` and `always`".to_owned());
        };
        if matches!(when, When::Nth(0) | When::From(0) | When::Every(0)) {
            return Err("counting starts at 1".to_owned());
        }
        let header = match self.header {
            Some(filter) => Some((header_name(&filter.name)?, filter.contains)),
            None => None,
        };
        Ok(Rule {
            ops: match self.op {
                Ops::One(op) => vec![op],
                Ops::Many(ops) => ops,
            },
            key_contains: self.key_contains,
            header,
            without_header: self
                .without_header
                .as_deref()
                .map(header_name)
                .transpose()?,
            per_key: self.per_key,
            when,
            times: self.times.unwrap_or(u64::MAX),
            action: Arc::new(self.action.check()?),
        })
    }
}

impl RawAction {
    fn check(self) -> Result<Action, String> {
        let reply = self.reply()?;
        let (on_request, on_response, flip_stored) = self.wire_fault()?;
        if self.apply && matches!(reply, Reply::Store) {
            return Err(
                "`apply` goes with `status`, `body`, `empty`, `drop` or `stall`".to_owned(),
            );
        }
        let headers = self
            .headers
            .iter()
            .map(|(name, value)| {
                let value = match value.as_str() {
                    "" => None,
                    text => Some(
                        HeaderValue::from_str(text)
                            .map_err(|_| format!("`{text}` is no header value"))?,
                    ),
                };
                Ok((header_name(name)?, value))
            })
            .collect::<Result<_, String>>()?;
        Ok(Action {
            delay_before: delay("delay_before_ms", self.delay_before_ms)?,
            delay_after: delay("delay_after_ms", self.delay_after_ms)?,
            apply: self.apply || matches!(reply, Reply::Store),
            reply,
            headers,
            on_request,
            on_response,
            hints: Hints {
                flip_stored,
                ignore_conditions: self.ignore_conditions,
                stale: delay("stale_ms", self.stale_ms)?,
                keep_alive: delay("keep_alive_ms", self.keep_alive_ms)?,
            },
        })
    }

    fn reply(&self) -> Result<Reply, String> {
        let fixed = self.status.is_some() || self.body.is_some() || self.empty;
        match (fixed, self.drop, self.stall) {
            (false, true, false) => return Ok(Reply::Drop),
            (false, false, true) => return Ok(Reply::Stall),
            (false, false, false) if self.code.is_some() => {
                return Err("`code` goes with `status`".to_owned());
            }
            (false, false, false) => return Ok(Reply::Store),
            (true, false, false) => {}
            _ => {
                return Err(
                    "an answer (`status`, `body`, `empty`), `drop` and `stall` exclude each other"
                        .to_owned(),
                );
            }
        }
        let status = self.status.unwrap_or(200);
        if !(200..=599).contains(&status) {
            return Err(format!("status {status} is not in 200 to 599"));
        }
        let status =
            StatusCode::from_u16(status).map_err(|_| format!("{status} is no HTTP status"))?;
        let body = match (&self.code, &self.body, self.empty) {
            (None, Some(body), false) => body.clone(),
            (None, None, true) => String::new(),
            (Some(code), None, false) => error_xml(
                code,
                self.message.as_deref().unwrap_or("injected by a rule"),
            ),
            _ => {
                return Err(
                    "give exactly one of `code` (an S3 error), `body` and `empty`".to_owned(),
                );
            }
        };
        Ok(Reply::Fixed { status, body })
    }

    #[expect(
        clippy::type_complexity,
        reason = "request fault, response fault, stored bit"
    )]
    fn wire_fault(&self) -> Result<(Option<BodyFault>, Option<BodyFault>, Option<u64>), String> {
        let Some(wire) = self.wire else {
            return match (self.of, self.bytes) {
                (None, None) => Ok((None, None, None)),
                _ => Err("`of` and `bytes` go with `wire`".to_owned()),
            };
        };
        if self.drop || self.stall {
            return Err("`wire` excludes `drop` and `stall`".to_owned());
        }
        let at = self.bytes.ok_or("`wire` needs `bytes`")?;
        let (kind, usual) = match wire {
            WireName::ResetAfter => (BodyFaultKind::Reset, Side::Request),
            WireName::StallAfter => (BodyFaultKind::Stall, Side::Request),
            WireName::CutAfter => (BodyFaultKind::Cut, Side::Response),
            WireName::FlipBit => (BodyFaultKind::Flip, Side::Response),
            WireName::ShortAfter if self.of == Some(Side::Request) => {
                return Err("`short-after` is for responses".to_owned());
            }
            WireName::ShortAfter => (BodyFaultKind::Short, Side::Response),
            WireName::FlipStoredBit if self.of.is_some() => {
                return Err("`flip-stored-bit` has no side".to_owned());
            }
            WireName::FlipStoredBit => return Ok((None, None, Some(at))),
        };
        let fault = Some(BodyFault { kind, at });
        Ok(match self.of.unwrap_or(usual) {
            Side::Request => (fault, None, None),
            Side::Response => (None, fault, None),
        })
    }
}

fn header_name(text: &str) -> Result<HeaderName, String> {
    text.parse()
        .map_err(|_| format!("`{text}` is no header name"))
}

fn delay(name: &str, ms: Option<u64>) -> Result<Option<Duration>, String> {
    match ms {
        Some(ms) if ms > DELAY_MS_MAX => Err(format!("`{name}` {ms} is more than {DELAY_MS_MAX}")),
        ms => Ok(ms.map(Duration::from_millis)),
    }
}

/// An S3 error document.
fn error_xml(code: &str, message: &str) -> String {
    let escape = |text: &str| {
        text.replace('&', "&amp;")
            .replace('<', "&lt;")
            .replace('>', "&gt;")
    };
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{}</Code><Message>{}</Message><RequestId>testkit</RequestId></Error>",
        escape(code),
        escape(message)
    )
}
