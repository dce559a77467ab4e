//! Azure: the scheduled events of the instance metadata service.
//!
//! In: `metadata/scheduledevents`, asked every `preempt.poll`, and this machine's name. Out: a notice while there is an event that takes this machine away; the earliest counts. What can fail: no answer, no name, something
//! else than a list of events; three failures in a row make the source blind. The first question of a machine's life switches the service on, which may take two minutes: until then the source is blind, and sees after it.

use std::time::Duration;

use http::{Method, StatusCode};
use serde::Deserialize;
use serde_json::Value;

use super::http::{Answer, Client, shown};
use super::{Board, Seen, Sight};
use crate::config::PreemptConfig;

const SOURCE: &str = "azure";

/// Types of events after which the machine's memory is gone. Freeze, Reboot and Redeploy are events that it has to live through.
const TAKES_AWAY: [&str; 2] = ["Preempt", "Terminate"];

/// Every request needs it.
const HEADERS: [(&str, &str); 1] = [("metadata", "true")];

/// Looks for ever.
pub(super) async fn watch(config: PreemptConfig, board: Board) {
    let mut server = Server {
        client: Client::new(),
        url: config.azure_url.clone(),
        vm: config.azure_vm.clone(),
        notice: config.notice,
    };
    let mut sight = Sight::new(&board, SOURCE);
    let mut ticks = super::every(config.poll);
    loop {
        ticks.tick().await;
        let seen = server.look().await;
        sight.saw(seen, config.notice);
    }
}

struct Server {
    client: Client,
    url: String,
    /// This machine's name, as soon as it is known.
    vm: Option<String>,
    /// Time that is left where an event does not say.
    notice: Duration,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Events {
    /// Each is read by itself: one that is not understood hides no other.
    events: Vec<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Event {
    event_type: String,
    resources: Vec<String>,
    /// Anything at all: an event that does not say its time is one.
    #[serde(default)]
    not_before: Value,
}

impl Server {
    async fn look(&mut self) -> Result<Seen, String> {
        let vm = match &self.vm {
            Some(vm) => vm,
            None => self.vm.insert(name(&self.client, &self.url).await?),
        };
        let url = format!(
            "{}/metadata/scheduledevents?api-version=2020-07-01",
            self.url
        );
        let answer = self.client.probe(Method::GET, &url, &HEADERS).await?;
        seen(&answer, vm, self.notice)
    }
}

/// This machine's name in the events' lists of resources.
async fn name(client: &Client, url: &str) -> Result<String, String> {
    let url = format!("{url}/metadata/instance/compute/name?api-version=2021-02-01&format=text");
    let answer = client.probe(Method::GET, &url, &HEADERS).await?;
    match answer.status {
        StatusCode::OK if !answer.body.is_empty() => Ok(answer.body),
        _ => Err(answer.is_not("this machine's name (preempt.azure_vm may say it)")),
    }
}

/// What the events say of this machine.
fn seen(answer: &Answer, vm: &str, notice: Duration) -> Result<Seen, String> {
    let not_that = |why: String| format!("{}: {why}", answer.is_not("a list of events"));
    if answer.status != StatusCode::OK {
        return Err(answer.is_not("a list of events"));
    }
    let events: Events =
        serde_json::from_str(&answer.body).map_err(|error| not_that(error.to_string()))?;
    let read: Vec<Result<Event, _>> = events
        .events
        .into_iter()
        .map(serde_json::from_value)
        .collect();
    let not_understood = read.iter().find_map(|event| event.as_ref().err());
    let not_understood = not_understood.map(|error| not_that(error.to_string()));
    // Azure does not tell names apart by case alone.
    let is_ours = |event: &Event| {
        let mut resources = event.resources.iter();
        TAKES_AWAY.contains(&event.event_type.as_str())
            && resources.any(|name| name.eq_ignore_ascii_case(vm))
    };
    let ours = read.iter().flatten().filter(|event| is_ours(event));
    let timed = ours.map(|event| {
        let time = event.not_before.as_str().filter(|text| !text.is_empty());
        let then = time.and_then(|time| httpdate::parse_http_date(time).ok());
        let text = format!(
            "{} of {vm}, not before {}",
            event.event_type,
            time.unwrap_or("now")
        );
        (then.and_then(|then| answer.time_until(then)), shown(&text))
    });
    match (
        timed.min_by_key(|(left, _)| left.unwrap_or(notice)),
        not_understood,
    ) {
        (Some((left, text)), _) => Ok(Seen::Notice { left, text }),
        (None, Some(why)) => Err(why),
        (None, None) => Ok(Seen::Silence("there is no such event any more")),
    }
}
