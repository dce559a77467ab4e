//! The rules file of `testkit metadata`, checked: what each path holds, and which requests are answered otherwise. `docs/testkit.md` describes it.
//!
//! In: JSON. Out: the body that a path has now, per request the first rule that fires. What can fail: anything that is not exactly the format.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{Method, Request};
use serde::Deserialize;
use serde_json::Value;

use crate::rule::{self, Counted, RawWhen, Reply, SetHeaders, first_that_fires};
use crate::script::FormatError;

/// What paths hold where the file does not say: a machine that nobody wants to take away.
const USUAL: [(&str, &str); 4] = [
    ("/computeMetadata/v1/instance/preempted", "FALSE"),
    ("/computeMetadata/v1/instance/maintenance-event", "NONE"),
    (
        "/metadata/scheduledevents",
        "{\"DocumentIncarnation\":1,\"Events\":[]}",
    ),
    ("/metadata/instance/compute/name", "vm-0"),
];

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct RawScript {
    token_lifetime_ms: Option<u64>,
    values: BTreeMap<String, Value>,
    rules: Vec<RawRule>,
}

/// A value of a list of them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawChange {
    #[serde(default)]
    after_ms: u64,
    value: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRule {
    path: String,
    method: Option<String>,
    query_contains: Option<String>,
    nth: Option<u64>,
    from: Option<u64>,
    every: Option<u64>,
    #[serde(default)]
    always: bool,
    times: Option<u64>,
    action: RawAction,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawAction {
    delay_before_ms: Option<u64>,
    status: Option<u16>,
    body: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    #[serde(default)]
    drop: bool,
    #[serde(default)]
    stall: bool,
}

/// What a rule does to a request.
pub(super) struct Action {
    pub(super) delay_before: Option<Duration>,
    pub(super) reply: Reply,
    /// Headers set on the answer.
    pub(super) headers: SetHeaders,
}

struct Rule {
    path: String,
    method: Option<Method>,
    query_contains: Option<String>,
    action: Arc<Action>,
}

/// What a path holds from some time after its first request on; `None` is nothing, 404.
struct Change {
    after: Duration,
    body: Option<String>,
}

#[derive(Default)]
struct Held {
    asked_first: Option<Instant>,
    changes: Vec<Change>,
}

/// The script in force.
#[derive(Default)]
pub(super) struct Script {
    /// After this long a token is refused, however long it was asked for.
    pub(super) token_lifetime: Option<Duration>,
    values: HashMap<String, Held>,
    rules: Vec<Counted<Rule>>,
}

impl Script {
    /// Reads a script.
    pub(super) fn parse(text: &[u8]) -> Result<Self, FormatError> {
        let raw: RawScript = serde_json::from_slice(text)?;
        let mut values = HashMap::new();
        for (path, value) in raw.values {
            let changes = changes(value)
                .map_err(|reason| FormatError::Other(format!("value of {path}: {reason}")))?;
            let held = Held {
                asked_first: None,
                changes,
            };
            values.insert(path, held);
        }
        let rules = raw.rules.into_iter().enumerate().map(|(index, raw)| {
            raw.check()
                .map_err(|reason| FormatError::Rule { index, reason })
        });
        Ok(Self {
            token_lifetime: rule::delay("token_lifetime_ms", raw.token_lifetime_ms)
                .map_err(FormatError::Other)?,
            values,
            rules: rules.collect::<Result<_, _>>()?,
        })
    }

    /// Counts a request and gives the first rule that fires for it, with its index in the file.
    pub(super) fn decide<B>(&mut self, req: &Request<B>) -> Option<(usize, Arc<Action>)> {
        let first = first_that_fires(&mut self.rules, |rule| rule.matches(req).then(String::new));
        first.map(|(index, rule)| (index, Arc::clone(&rule.action)))
    }

    /// What a path holds now; `None` where there is nothing.
    pub(super) fn value(&mut self, path: &str) -> Option<String> {
        let Some(held) = self.values.get_mut(path) else {
            let usual = USUAL.iter().find(|(usual, _)| *usual == path);
            return usual.map(|(_, body)| (*body).to_owned());
        };
        let since = held.asked_first.get_or_insert_with(Instant::now).elapsed();
        let mut passed = held.changes.iter().rev();
        passed.find(|change| change.after <= since)?.body.clone()
    }
}

/// The values of a path one after the other.
fn changes(value: Value) -> Result<Vec<Change>, String> {
    let Value::Array(list) = value else {
        let body = body(value);
        return Ok(vec![Change {
            after: Duration::ZERO,
            body,
        }]);
    };
    let mut changes: Vec<Change> = Vec::new();
    for entry in list {
        let raw: RawChange = serde_json::from_value(entry).map_err(|error| error.to_string())?;
        let after = rule::delay("after_ms", Some(raw.after_ms))?.unwrap_or_default();
        if changes.last().is_some_and(|last| last.after >= after) {
            return Err("`after_ms` has to grow".to_owned());
        }
        changes.push(Change {
            after,
            body: body(raw.value),
        });
    }
    Ok(changes)
}

/// Text as it is, nothing for null, anything else as JSON.
fn body(value: Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(text),
        document => Some(document.to_string()),
    }
}

impl Rule {
    fn matches<B>(&self, req: &Request<B>) -> bool {
        (self.path == "*" || self.path == req.uri().path())
            && self
                .method
                .as_ref()
                .is_none_or(|method| method == req.method())
            && self
                .query_contains
                .as_ref()
                .is_none_or(|part| req.uri().query().unwrap_or("").contains(part))
    }
}

impl RawRule {
    fn check(self) -> Result<Counted<Rule>, String> {
        if self.path != "*" && !self.path.starts_with('/') {
            return Err("`path` is a whole path, or *".to_owned());
        }
        let method = self.method.map(|method| {
            Method::from_bytes(method.as_bytes()).map_err(|error| format!("`{method}`: {error}"))
        });
        let when = RawWhen {
            nth: self.nth,
            from: self.from,
            every: self.every,
            always: self.always,
            times: self.times,
        };
        let rule = Rule {
            path: self.path,
            method: method.transpose()?,
            query_contains: self.query_contains,
            action: Arc::new(self.action.check()?),
        };
        Counted::new(rule, &when)
    }
}

impl RawAction {
    fn check(self) -> Result<Action, String> {
        let is_fixed = self.status.is_some() || self.body.is_some();
        let reply = match (is_fixed, self.drop, self.stall) {
            (false, false, false) => Reply::Usual,
            (true, false, false) => Reply::Fixed {
                status: rule::status(self.status)?,
                body: self.body.unwrap_or_default(),
            },
            (false, true, false) => Reply::Drop,
            (false, false, true) => Reply::Stall,
            _ => {
                return Err(
                    "an answer (`status`, `body`), `drop` and `stall` exclude each other"
                        .to_owned(),
                );
            }
        };
        Ok(Action {
            delay_before: rule::delay("delay_before_ms", self.delay_before_ms)?,
            reply,
            headers: rule::headers(&self.headers)?,
        })
    }
}
