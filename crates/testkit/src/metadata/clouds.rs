//! The manners of the three metadata servers: what a request must bring along, and what its answer looks like.
//!
//! In: a request, the script. Out: an answer. EC2 wants a token that has not expired (401), Compute Engine and Azure a header (403, 400); Compute Engine lets a request wait until its value changes. Cannot fail: a
//! request that is not as it must be is answered so.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use percent_encoding::percent_decode_str;

use super::Dropped;
use super::script::Script;
use crate::log::boottime_us;
use crate::script::ScriptFile;

/// How often a waiting request looks whether its value has changed.
const WAIT_CHECK: Duration = Duration::from_millis(10);
/// Longest time that EC2 gives a token.
const TOKEN_TTL_S_MAX: u64 = 21_600;

type Answer = Response<Full<Bytes>>;

/// The state of the servers that is no script: the tokens that were given out, and when they end.
#[derive(Default)]
pub(super) struct Clouds {
    tokens: Mutex<HashMap<String, Token>>,
}

struct Token {
    given_at: Instant,
    ttl: Duration,
}

impl Clouds {
    /// Answers as the cloud does whose path it is.
    pub(super) async fn answer<B>(
        &self,
        req: &Request<B>,
        script: &ScriptFile<Script>,
    ) -> Result<Answer, Dropped> {
        let path = req.uri().path();
        if path == "/latest/api/token" {
            return Ok(self.give_token(req));
        }
        if req.method() != Method::GET {
            return Ok(text(StatusCode::METHOD_NOT_ALLOWED, ""));
        }
        Ok(if path.starts_with("/latest/") {
            let lifetime = script.with(|script| script.token_lifetime);
            if !self.is_admitted(header(req, "x-aws-ec2-metadata-token"), lifetime) {
                return Ok(text(StatusCode::UNAUTHORIZED, ""));
            }
            value(path, script)
        } else if path.starts_with("/computeMetadata/v1/") {
            if header(req, "metadata-flavor") != Some("Google") {
                let why = "Missing Metadata-Flavor:Google header.";
                return Ok(text(StatusCode::FORBIDDEN, why));
            }
            compute_engine(path, &Query::of(req), script).await?
        } else if path.starts_with("/metadata/") {
            let refusal = |why| Ok(text(StatusCode::BAD_REQUEST, why));
            if header(req, "metadata") != Some("true") {
                return refusal(
                    "{\"error\":\"Bad request. Required metadata header not specified\"}",
                );
            }
            if Query::of(req).get("api-version").is_none() {
                return refusal("{\"error\":\"Bad request. api-version was not specified\"}");
            }
            value(path, script)
        } else if path.starts_with("/v2/credentials/") {
            // A container's own, which asks for nothing.
            value(path, script)
        } else {
            text(StatusCode::NOT_FOUND, "")
        })
    }

    fn give_token<B>(&self, req: &Request<B>) -> Answer {
        if req.method() != Method::PUT {
            return text(StatusCode::METHOD_NOT_ALLOWED, "");
        }
        let ttl_s = header(req, "x-aws-ec2-metadata-token-ttl-seconds");
        let ttl_s = ttl_s.and_then(|text| text.parse::<u64>().ok());
        let Some(ttl_s) = ttl_s.filter(|ttl_s| (1..=TOKEN_TTL_S_MAX).contains(ttl_s)) else {
            return text(StatusCode::BAD_REQUEST, "");
        };
        let token = Token {
            given_at: Instant::now(),
            ttl: Duration::from_secs(ttl_s),
        };
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        tokens.retain(|_, token| token.is_valid(None));
        // The time, so that a server on the same port later does not know it.
        let name = format!("testkit-{}-{}==", boottime_us(), tokens.len());
        tokens.insert(name.clone(), token);
        let mut answer = text(StatusCode::OK, &name);
        if let Ok(ttl) = HeaderValue::from_str(&ttl_s.to_string()) {
            let name = HeaderName::from_static("x-aws-ec2-metadata-token-ttl-seconds");
            answer.headers_mut().insert(name, ttl);
        }
        answer
    }

    fn is_admitted(&self, token: Option<&str>, lifetime: Option<Duration>) -> bool {
        let tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        let token = token.and_then(|token| tokens.get(token));
        token.is_some_and(|token| token.is_valid(lifetime))
    }
}

impl Token {
    fn is_valid(&self, lifetime: Option<Duration>) -> bool {
        self.given_at.elapsed() < lifetime.unwrap_or(self.ttl).min(self.ttl)
    }
}

/// What the path holds now, at once or when it is another value than the client has. A request that waits when another script comes into force, in which its value is the same, is dropped: the next one meets that script's rules.
async fn compute_engine(
    path: &str,
    query: &Query<'_>,
    script: &ScriptFile<Script>,
) -> Result<Answer, Dropped> {
    let waits = query.get("wait_for_change").as_deref() == Some("true");
    let timeout_s = query.get("timeout_sec").and_then(|text| text.parse().ok());
    let timeout = timeout_s.map(Duration::from_secs);
    let began = Instant::now();
    let mut known = query.get("last_etag");
    let mut version = None;
    loop {
        let (body, now) = script.with_version(|script| script.value(path));
        let Some(body) = body else {
            return Ok(text(StatusCode::NOT_FOUND, ""));
        };
        let etag = format!("{:016x}", twox_hash::XxHash64::oneshot(0, body.as_bytes()));
        // Without an ETag the value that the request finds is the one that it knows.
        let is_new = known.get_or_insert_with(|| etag.clone()) != &etag;
        if waits && !is_new && timeout.is_none_or(|timeout| began.elapsed() < timeout) {
            if *version.get_or_insert(now) != now {
                return Err(Dropped);
            }
            tokio::time::sleep(WAIT_CHECK).await;
            continue;
        }
        let mut answer = text(StatusCode::OK, &body);
        let headers = answer.headers_mut();
        headers.insert("metadata-flavor", HeaderValue::from_static("Google"));
        if let Ok(etag) = HeaderValue::from_str(&etag) {
            headers.insert(http::header::ETAG, etag);
        }
        return Ok(answer);
    }
}

fn value(path: &str, script: &ScriptFile<Script>) -> Answer {
    match script.with(|script| script.value(path)) {
        Some(body) => text(StatusCode::OK, &body),
        None => text(StatusCode::NOT_FOUND, ""),
    }
}

fn text(status: StatusCode, body: &str) -> Answer {
    let mut answer = Response::new(Full::from(body.to_owned()));
    *answer.status_mut() = status;
    answer
}

fn header<'a, B>(req: &'a Request<B>, name: &str) -> Option<&'a str> {
    req.headers().get(name)?.to_str().ok()
}

/// A request's query.
struct Query<'a>(&'a str);

impl<'a> Query<'a> {
    fn of<B>(req: &'a Request<B>) -> Self {
        Self(req.uri().query().unwrap_or(""))
    }

    fn get(&self, name: &str) -> Option<String> {
        let mut members = self
            .0
            .split('&')
            .filter_map(|member| member.split_once('='));
        let (_, text) = members.find(|(member, _)| *member == name)?;
        Some(percent_decode_str(text).decode_utf8_lossy().into_owned())
    }
}
