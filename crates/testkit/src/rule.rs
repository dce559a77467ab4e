//! What the rules of all servers have in common: which of the requests that match fire, and the parts of an answer.
//!
//! In: members of a rule as written, requests in their order. Out: checked parts; per request the first rule that fires. Every rule that matches counts the request, whether or not an earlier rule fired. What can
//! fail: a member out of range, or two that contradict each other.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

/// Keys that a rule tells apart; requests for further keys do not fire it.
const KEYS_MAX: usize = 65_536;
/// Longest delay: an hour is beyond any test, and keeps time arithmetic in range.
const DELAY_MS_MAX: u64 = 3_600_000;

/// Which of the requests that match a rule fire it, counted from 1.
#[derive(Clone, Copy)]
enum When {
    Nth(u64),
    From(u64),
    Every(u64),
    Always,
}

/// The members of a rule that say when it fires, as written.
pub(crate) struct RawWhen {
    pub(crate) nth: Option<u64>,
    pub(crate) from: Option<u64>,
    pub(crate) every: Option<u64>,
    pub(crate) always: bool,
    pub(crate) times: Option<u64>,
}

#[derive(Default)]
struct Counter {
    seen: u64,
    fired: u64,
}

/// A rule, and how often it matched and fired.
pub(crate) struct Counted<R> {
    pub(crate) rule: R,
    when: When,
    /// How often the rule fires at most.
    times: u64,
    counters: HashMap<String, Counter>,
}

impl<R> Counted<R> {
    /// A rule that has counted nothing yet.
    pub(crate) fn new(rule: R, raw: &RawWhen) -> Result<Self, String> {
        let always = raw.always.then_some(When::Always);
        let mut whens = [
            raw.nth.map(When::Nth),
            raw.from.map(When::From),
            raw.every.map(When::Every),
            always,
        ]
        .into_iter()
        .flatten();
        let (Some(when), None) = (whens.next(), whens.next()) else {
            return Err("give exactly one of `nth`, `from`, `every` and `always`".to_owned());
        };
        if matches!(when, When::Nth(0) | When::From(0) | When::Every(0)) {
            return Err("counting starts at 1".to_owned());
        }
        Ok(Self {
            rule,
            when,
            times: raw.times.unwrap_or(u64::MAX),
            counters: HashMap::new(),
        })
    }

    /// Counts a request; true when the rule fires. Firing is only counted when it `may_fire`.
    fn count(&mut self, key: String, may_fire: bool) -> bool {
        if self.counters.len() >= KEYS_MAX && !self.counters.contains_key(&key) {
            return false;
        }
        let counter = self.counters.entry(key).or_default();
        counter.seen += 1;
        let due = match self.when {
            When::Nth(k) => counter.seen == k,
            When::From(k) => counter.seen >= k,
            When::Every(k) => counter.seen.is_multiple_of(k),
            When::Always => true,
        };
        let fires = due && may_fire && counter.fired < self.times;
        counter.fired += u64::from(fires);
        fires
    }
}

/// Counts a request and gives the first rule that fires for it, with its index in the file. `key` says under which name a rule counts the request, `None` where it does not match.
pub(crate) fn first_that_fires<R>(
    rules: &mut [Counted<R>],
    key: impl Fn(&R) -> Option<String>,
) -> Option<(usize, &R)> {
    let mut first = None;
    for (index, counted) in rules.iter_mut().enumerate() {
        if let Some(key) = key(&counted.rule)
            && counted.count(key, first.is_none())
        {
            first = Some((index, &counted.rule));
        }
    }
    first
}

/// What is answered.
pub(crate) enum Reply {
    /// Whatever the server answers by itself.
    Usual,
    /// This status and body.
    Fixed { status: StatusCode, body: String },
    /// Nothing: the connection is closed.
    Drop,
    /// Nothing: the connection stays open.
    Stall,
}

/// The status of an answer that a rule gives; 200 if it names none.
pub(crate) fn status(status: Option<u16>) -> Result<StatusCode, String> {
    let status = status.unwrap_or(200);
    if !(200..=599).contains(&status) {
        return Err(format!("status {status} is not in 200 to 599"));
    }
    StatusCode::from_u16(status).map_err(|error| format!("status {status}: {error}"))
}

/// The name of a header.
pub(crate) fn header_name(text: &str) -> Result<HeaderName, String> {
    text.parse().map_err(|error| format!("`{text}`: {error}"))
}

/// Headers that a rule sets on an answer; `None` takes one out.
pub(crate) type SetHeaders = Vec<(HeaderName, Option<HeaderValue>)>;

/// The headers of an answer; an empty value takes one out.
pub(crate) fn headers(written: &BTreeMap<String, String>) -> Result<SetHeaders, String> {
    let checked = written.iter().map(|(name, value)| {
        let value = match value.as_str() {
            "" => None,
            text => {
                Some(HeaderValue::from_str(text).map_err(|error| format!("`{text}`: {error}"))?)
            }
        };
        Ok((header_name(name)?, value))
    });
    checked.collect()
}

/// Puts a rule's headers on an answer.
pub(crate) fn set_headers(headers: &mut HeaderMap, set: &SetHeaders) {
    for (name, value) in set {
        headers.remove(name);
        if let Some(value) = value {
            headers.insert(name, value.clone());
        }
    }
}

/// A time in milliseconds, for the member `name`.
pub(crate) fn delay(name: &str, ms: Option<u64>) -> Result<Option<Duration>, String> {
    match ms {
        Some(ms) if ms > DELAY_MS_MAX => Err(format!("`{name}` {ms} is more than {DELAY_MS_MAX}")),
        ms => Ok(ms.map(Duration::from_millis)),
    }
}

/// Waits, where there is something to wait for.
pub(crate) async fn sleep(delay: Option<Duration>) {
    if let Some(delay) = delay {
        tokio::time::sleep(delay).await;
    }
}
