//! The rules file's format, checked: JSON in, [`Rule`]s whose parts do not contradict each other out. `docs/testkit.md` describes it.
//!
//! What can fail: anything that is not exactly the format, an operation that does not exist included, so that a rule with a slip of the
//! pen does not merely never fire.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderName};
use serde::Deserialize;

use super::body::{BodyFault, BodyFaultKind};
use super::op::{self, Target};
use super::store::Hints;
use crate::rule::{self, Counted, RawWhen, Reply, SetHeaders, delay, header_name};
use crate::script::FormatError;

/// Reads a list of rules.
pub(super) fn parse(text: &[u8]) -> Result<Vec<Counted<Rule>>, FormatError> {
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

/// What a rule does to a request. Checked: the parts do not contradict each other.
pub(super) struct Action {
    pub(super) delay_before: Option<Duration>,
    pub(super) delay_after: Option<Duration>,
    /// The store carries the request out.
    pub(super) apply: bool,
    pub(super) reply: Reply,
    /// Headers set on the answer.
    pub(super) headers: SetHeaders,
    pub(super) on_request: Option<BodyFault>,
    pub(super) on_response: Option<BodyFault>,
    pub(super) hints: Hints,
}

/// A rule.
pub(super) struct Rule {
    ops: Vec<String>,
    key_contains: Option<String>,
    header: Option<(HeaderName, String)>,
    without_header: Option<HeaderName>,
    /// Requests are counted for each key by itself.
    per_key: bool,
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

    /// Under which name the rule counts a request.
    pub(super) fn key(&self, target: &Target) -> String {
        let key = target.key.clone().filter(|_| self.per_key);
        key.unwrap_or_default()
    }
}

impl RawRule {
    fn check(self) -> Result<Counted<Rule>, String> {
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
        let when = RawWhen {
            nth: self.nth,
            from: self.from,
            every: self.every,
            always: self.always,
            times: self.times,
        };
        let rule = Rule {
            ops,
            key_contains: self.key_contains,
            header,
            without_header: self
                .without_header
                .as_deref()
                .map(header_name)
                .transpose()?,
            per_key: self.per_key,
            action: Arc::new(self.action.check()?),
        };
        Counted::new(rule, &when)
    }
}

impl RawAction {
    fn check(self) -> Result<Action, String> {
        let reply = self.reply()?;
        let (on_request, on_response, flip_stored) = self.wire_fault()?;
        if self.apply && matches!(reply, Reply::Usual) {
            return Err(
                "`apply` goes with `status`, `body`, `empty`, `drop` or `stall`".to_owned(),
            );
        }
        Ok(Action {
            delay_before: delay("delay_before_ms", self.delay_before_ms)?,
            delay_after: delay("delay_after_ms", self.delay_after_ms)?,
            apply: self.apply || matches!(reply, Reply::Usual),
            reply,
            headers: rule::headers(&self.headers)?,
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
            (false, false, false) => return Ok(Reply::Usual),
            (true, false, false) => {}
            _ => {
                return Err(
                    "an answer (`status`, `body`, `empty`), `drop` and `stall` exclude each other"
                        .to_owned(),
                );
            }
        }
        let status = rule::status(self.status)?;
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

/// An S3 error document.
pub(super) fn error_xml(code: &str, message: &str) -> String {
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
