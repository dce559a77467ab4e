//! HTTP as metadata servers speak it: one small request, one small answer, on a connection of its own.
//!
//! In: a URL, a few headers, how long it may take. Out: status, ETag, body, and the server's idea of now. What can fail: no connection, no answer in time, no HTTP, a body that is too long. No proxy is asked, whatever the
//! environment says, and no redirect is followed: the server is on this machine's own link, or it is none. A connection is not kept, because one that has died in silence would cost a look.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{DATE, ETAG};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::client::legacy::Client as Hyper;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

use crate::error::one_line;

/// Longest time of a request that has nothing to wait for.
pub(super) const PROBE_MAX: Duration = Duration::from_secs(2);

/// Longest body, in bytes: what is asked for is a word or a few events.
const BODY_LEN_MAX: usize = 64 << 10;

/// A request that waits for a minute finds out in less whether there is still somebody: idle time, pause and number of the kernel's questions.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(5), Duration::from_secs(2), 3);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum HttpError {
    #[error("this cannot be asked")]
    Request(#[from] http::Error),
    #[error("no answer in {0:?}")]
    Timeout(Duration),
    #[error("no answer")]
    Connection(#[from] hyper_util::client::legacy::Error),
    #[error("the answer does not end well")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Asks metadata servers.
#[derive(Debug, Clone)]
pub(super) struct Client(Hyper<HttpConnector, Empty<Bytes>>);

impl Client {
    pub(super) fn new() -> Self {
        let mut connector = HttpConnector::new();
        let (idle, pause, count) = KEEPALIVE;
        connector.set_keepalive(Some(idle));
        connector.set_keepalive_interval(Some(pause));
        connector.set_keepalive_retries(Some(count));
        let hyper = Hyper::builder(TokioExecutor::new())
            .pool_max_idle_per_host(0)
            .build(connector);
        Self(hyper)
    }

    /// Asks, for [`PROBE_MAX`] at most; a failure is told in one line that names what was asked.
    pub(super) async fn probe(
        &self,
        method: Method,
        url: &str,
        headers: &[(&str, &str)],
    ) -> Result<Answer, String> {
        self.ask(method, url, headers, PROBE_MAX).await
    }

    /// Asks, and waits for at most `timeout` until the whole answer is there.
    pub(super) async fn ask(
        &self,
        method: Method,
        url: &str,
        headers: &[(&str, &str)],
        timeout: Duration,
    ) -> Result<Answer, String> {
        let asked = tokio::time::timeout(timeout, self.ask_patiently(&method, url, headers)).await;
        let answer = asked.unwrap_or(Err(HttpError::Timeout(timeout)));
        answer.map_err(|error| format!("{method} {url}: {}", one_line(&error)))
    }

    async fn ask_patiently(
        &self,
        method: &Method,
        url: &str,
        headers: &[(&str, &str)],
    ) -> Result<Answer, HttpError> {
        let mut request = Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let answer = self.0.request(request.body(Empty::new())?).await?;
        let (head, body) = answer.into_parts();
        let body = Limited::new(body, BODY_LEN_MAX).collect().await;
        let body = body.map_err(HttpError::Body)?.to_bytes();
        Ok(Answer {
            asked: format!("{method} {url}"),
            status: head.status,
            headers: head.headers,
            body: String::from_utf8_lossy(&body).trim().to_owned(),
        })
    }
}

/// What a metadata server said.
#[derive(Debug)]
pub(super) struct Answer {
    asked: String,
    pub(super) status: StatusCode,
    headers: HeaderMap,
    /// Without blanks around it.
    pub(super) body: String,
}

impl Answer {
    /// The answer's ETag.
    pub(super) fn etag(&self) -> Option<String> {
        let etag = self.headers.get(ETAG)?.to_str().ok()?;
        Some(etag.to_owned())
    }

    /// Time from now until `then`; `None` where that is past. Now is what the server says, which has made the other time, too: this machine's clock may be anything. The header has whole seconds, so that the next one is
    /// surely not past yet.
    pub(super) fn time_until(&self, then: SystemTime) -> Option<Duration> {
        let date = self.headers.get(DATE).and_then(|date| date.to_str().ok());
        let date = date.and_then(|date| httpdate::parse_http_date(date).ok());
        let next = date.and_then(|date| date.checked_add(Duration::from_secs(1)));
        let now = next.unwrap_or_else(SystemTime::now);
        let left = then.duration_since(now).ok();
        left.filter(|left| !left.is_zero())
    }

    /// That this is no answer to what was asked; says the beginning of it.
    pub(super) fn is_not(&self, expected: &str) -> String {
        let Self { asked, status, .. } = self;
        let start = shown(&self.body);
        format!("{asked}: expected {expected}, and it is {status}, {start:?}")
    }
}

/// What a server said, as people may see it: its beginning, and nothing that moves a terminal's cursor.
pub(super) fn shown(text: &str) -> String {
    let chars = text.chars().filter(|c| !c.is_control());
    chars.take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(date: Option<&str>) -> Answer {
        let mut headers = HeaderMap::new();
        if let Some(date) = date {
            headers.insert(DATE, date.parse().unwrap());
        }
        Answer {
            asked: String::new(),
            status: StatusCode::OK,
            headers,
            body: String::new(),
        }
    }

    #[test]
    fn time_is_counted_by_the_servers_clock() {
        let then = httpdate::parse_http_date("Mon, 19 Sep 2016 18:29:47 GMT").unwrap();
        let left = |date: &str| answer(Some(date)).time_until(then);
        let secs = |secs| Some(Duration::from_secs(secs));
        assert_eq!(left("Mon, 19 Sep 2016 18:29:16 GMT"), secs(30));
        assert_eq!(left("Mon, 19 Sep 2016 18:29:45 GMT"), secs(1));
        assert_eq!(left("Mon, 19 Sep 2016 18:29:46 GMT"), None);
        assert_eq!(left("Mon, 19 Sep 2016 19:00:00 GMT"), None);
        // By this machine's clock it is long past, and in an hour, respectively.
        for date in [Some("yesterday"), None] {
            assert_eq!(answer(date).time_until(then), None);
            let hour = Duration::from_secs(3600);
            let left = answer(date).time_until(SystemTime::now() + hour).unwrap();
            assert!(left <= hour && left > hour / 2, "{left:?}");
        }
    }
}
