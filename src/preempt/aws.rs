//! EC2: the spot instance action of the instance metadata service, version 2.
//!
//! In: `latest/meta-data/spot/instance-action`, asked every `preempt.poll` with a token. Out: a notice while there is an action; without one the answer is 404, which is healthy silence. What can fail: no answer, no
//! token, something else than an action; three failures in a row make the source blind. A token that has expired (401) is replaced within the same look.

use http::{HeaderValue, Method, StatusCode};
use serde_json::Value;

use super::http::{Answer, Client, shown};
use super::{Board, Seen, Sight};
use crate::config::PreemptConfig;

const SOURCE: &str = "aws";

/// The longest that EC2 gives a token.
const TOKEN_TTL_S: &str = "21600";

/// One that has expired, and its successor.
const TOKENS_PER_LOOK: usize = 2;

/// Looks for ever.
pub(super) async fn watch(config: PreemptConfig, board: Board) {
    let mut server = Server {
        client: Client::new(),
        url: config.aws_url.clone(),
        token: None,
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
    token: Option<String>,
}

impl Server {
    async fn look(&mut self) -> Result<Seen, String> {
        for _ in 0..TOKENS_PER_LOOK {
            let token = match self.token.take() {
                Some(token) => token,
                None => self.new_token().await?,
            };
            let answer = self.ask(&token).await;
            // A token that has expired is gone, and one whose question had no answer is still good.
            let has_expired =
                matches!(&answer, Ok(answer) if answer.status == StatusCode::UNAUTHORIZED);
            if !has_expired {
                self.token = Some(token);
                return seen(&answer?);
            }
        }
        Err(format!("{} refuses its own new tokens (401)", self.url))
    }

    async fn ask(&self, token: &str) -> Result<Answer, String> {
        let url = format!("{}/latest/meta-data/spot/instance-action", self.url);
        let headers = [("x-aws-ec2-metadata-token", token)];
        self.client.probe(Method::GET, &url, &headers).await
    }

    /// That the token is what fails is told apart from all else: its answer may take fewer hops than its question, and whoever reads of credentials looks in the wrong place.
    async fn new_token(&self) -> Result<String, String> {
        let url = format!("{}/latest/api/token", self.url);
        let headers = [("x-aws-ec2-metadata-token-ttl-seconds", TOKEN_TTL_S)];
        let answer = self.client.probe(Method::PUT, &url, &headers).await;
        let failed = |why: String| {
            format!(
                "no session token of the instance metadata service: {why}; in a container its hop limit has to be at least 2, and no policy may block the address"
            )
        };
        match answer {
            Ok(answer) if is_token(&answer) => Ok(answer.body),
            Ok(answer) => Err(failed(answer.is_not("a token"))),
            Err(why) => Err(failed(why)),
        }
    }
}

/// Whether it can be sent back.
fn is_token(answer: &Answer) -> bool {
    let is_sound = !answer.body.is_empty() && HeaderValue::from_str(&answer.body).is_ok();
    answer.status == StatusCode::OK && is_sound
}

/// What the answer says of this instance.
fn seen(answer: &Answer) -> Result<Seen, String> {
    let not_that = || answer.is_not("404, or an action and its time");
    match answer.status {
        StatusCode::NOT_FOUND => return Ok(Seen::Silence("there is no action any more")),
        StatusCode::OK => {}
        _ => return Err(not_that()),
    }
    let document: Value = serde_json::from_str(&answer.body).unwrap_or_default();
    // Known are terminate, stop and hibernate. A word that comes later takes the instance away, too, or it would not be here.
    let action = document["action"].as_str().filter(|text| !text.is_empty());
    let action = action.ok_or_else(not_that)?;
    let time = document["time"].as_str();
    let left = time.and_then(|time| humantime::parse_rfc3339(time).ok());
    Ok(Seen::Notice {
        left: left.and_then(|then| answer.time_until(then)),
        text: shown(&format!(
            "{action} at {}",
            time.unwrap_or("a time that is not said")
        )),
    })
}
