//! The rules file's format, checked: JSON in, [`Rule`]s whose parts do not contradict each other out. `docs/testkit.md` describes it.
//!
//! What can fail: anything that is not exactly the format, an operation that does not exist included, so that a rule with a slip of the
//! pen does not merely never fire.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::Deserialize;

use super::body::{BodyFault, BodyFaultKind};
use super::op::{self, Target};
use super::store::Hints;

/// Longest delay: an hour is beyond any test, and keeps time arithmetic in range.
const DELAY_MS_MAX: u64 = 3_600_000;

/// Why a text is not a list of rules.
#[derive(Debug, thiserror::Error)]
pub(super) enum FormatError {
    #[error("it is not a list of rules")]
    Json(#[from] serde_json::Error),
    #[error("rule {index}, counted from 0: {reason}")]
    Rule { index: usize, reason: String },
}

/// Reads a list of rules.
pub(super) fn parse(text: &[u8]) -> Result<Vec<Rule>, FormatError> {
    let raw: Vec<RawRule> = serde_json::from_slice(text)?;
    raw.into_iter()
        .enumerate()
        .map(|(index, raw)| {
            raw.check()
                .map_err(|reason| FormatError::Rule { index, reason })
        })
        .collect()
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

/// Which of the requests that match a rule fire it, counted from 1.
#[derive(Clone, Copy)]
pub(super) enum When {
    Nth(u64),
    From(u64),
    Every(u64),
    Always,
}

/// A rule.
pub(super) struct Rule {
    ops: Vec<String>,
    key_contains: Option<String>,
    header: Option<(HeaderName, String)>,
    without_header: Option<HeaderName>,
    /// Requests are counted for each key by itself.
    pub(super) per_key: bool,
    pub(super) when: When,
    /// How often the rule fires at most.
    pub(super) times: u64,
    pub(super) action: Arc<Action>,
}

impl Rule {
    /// Whether the rule counts a request.
    pub(super) fn matches(&self, target: &Target, headers: &HeaderMap) -> bool {
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
        let ops = match self.op {
            Ops::One(op) => vec![op],
            Ops::Many(ops) => ops,
        };
        if let Some(op) = ops
            .iter()
            .find(|op| *op != "*" && !op::NAMES.contains(&op.as_str()))
        {
            return Err(format!(
                "there is no operation `{op}`: use one of {} or *",
                op::NAMES.join(", ")
            ));
        }
        Ok(Rule {
            ops,
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
                            .map_err(|error| format!("`{text}`: {error}"))?,
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
            StatusCode::from_u16(status).map_err(|error| format!("status {status}: {error}"))?;
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
    text.parse().map_err(|error| format!("`{text}`: {error}"))
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
