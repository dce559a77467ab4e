//! Compute Engine: the metadata values `instance/preempted` and `instance/maintenance-event`, each watched by a request that waits for its change.
//!
//! In: the two values. Out: a notice each, while the one is TRUE and the other TERMINATE_ON_HOST_MAINTENANCE; neither says how much time is left. What can fail: no answer, or a value that is none of those known; three
//! failures in a row make that value's source blind.
//!
//! The first request does not wait, so that a notice that stands is seen at once, and neither does the one after a failure. After one that the server drops it is asked again at once, after further ones with a pause of `preempt.poll`, or 2 s where that is less; so often is the server asked
//! at most, too, where it answers requests that should wait.

use std::time::{Duration, Instant};

use super::http::{Answer, Client, PROBE_MAX};
use super::{Board, Seen, Sight};
use crate::config::PreemptConfig;
use http::{Method, StatusCode};

/// How long a request waits for a change.
const WAIT: Duration = Duration::from_secs(60);

/// A value of the instance that can be a notice.
#[derive(Debug, Clone, Copy)]
pub(super) struct Watched {
    source: &'static str,
    path: &'static str,
    silent: &'static [&'static str],
    notice: &'static str,
}

/// The machine is being taken away. On newer machines the value changes two minutes before ACPI tells the system, on others with it.
const PREEMPTED: Watched = Watched {
    source: "gcp preempted",
    path: "instance/preempted",
    silent: &["FALSE"],
    notice: "TRUE",
};

/// The host is. A machine with GPUs cannot migrate.
const MAINTENANCE: Watched = Watched {
    source: "gcp maintenance",
    path: "instance/maintenance-event",
    silent: &["NONE", "MIGRATE_ON_HOST_MAINTENANCE"],
    notice: "TERMINATE_ON_HOST_MAINTENANCE",
};

/// All that is watched, each by itself.
pub(super) const ALL: [Watched; 2] = [PREEMPTED, MAINTENANCE];

/// Looks for ever.
pub(super) async fn watch(watched: Watched, config: PreemptConfig, board: Board) {
    let mut server = Server {
        client: Client::new(),
        url: format!("{}/computeMetadata/v1/{}", config.gcp_url, watched.path),
        known: None,
    };
    let mut sight = Sight::new(&board, watched.source);
    let pause_max = config.poll.min(PROBE_MAX);
    let mut may_hurry = true;
    loop {
        let (began, waits) = (Instant::now(), server.known.is_some());
        let answer = server.ask().await;
        let seen = answer.and_then(|answer| watched.seen(&answer));
        let early = pause_max.saturating_sub(began.elapsed());
        let pause = match &seen {
            Ok(_) if waits => {
                may_hurry = true;
                early
            }
            Ok(_) if server.known.is_some() => Duration::ZERO,
            // There is nothing to wait with.
            Ok(_) => pause_max,
            Err(_) => {
                server.known = None;
                let hurries = std::mem::take(&mut may_hurry) || early.is_zero();
                if hurries { Duration::ZERO } else { pause_max }
            }
        };
        sight.saw(seen, config.notice);
        tokio::time::sleep(pause).await;
    }
}

struct Server {
    client: Client,
    url: String,
    /// ETag of the value that was seen last.
    known: Option<String>,
}

impl Server {
    /// Asks for the value: for another one than is known.
    async fn ask(&mut self) -> Result<Answer, String> {
        let (url, timeout) = match self.known.take() {
            Some(etag) => {
                let etag: String = url::form_urlencoded::byte_serialize(etag.as_bytes()).collect();
                let wait_s = WAIT.as_secs();
                let query = format!("wait_for_change=true&timeout_sec={wait_s}&last_etag={etag}");
                (format!("{}?{query}", self.url), WAIT + PROBE_MAX)
            }
            None => (self.url.clone(), PROBE_MAX),
        };
        let headers = [("metadata-flavor", "Google")];
        let answer = self
            .client
            .ask(Method::GET, &url, &headers, timeout)
            .await?;
        self.known = answer.etag();
        Ok(answer)
    }
}

impl Watched {
    fn seen(&self, answer: &Answer) -> Result<Seen, String> {
        if answer.status == StatusCode::OK && self.silent.contains(&answer.body.as_str()) {
            return Ok(Seen::Silence("the value has changed back"));
        }
        if answer.status != StatusCode::OK || answer.body != self.notice {
            let silent = self.silent.join(", ");
            return Err(answer.is_not(&format!("{silent} or {}", self.notice)));
        }
        Ok(Seen::Notice {
            left: None,
            text: format!("{} is {}", self.path, self.notice),
        })
    }
}
