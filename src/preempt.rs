//! Notices of pre-emption: who says that the node goes away, and when.
//!
//! In: signals, a file, metadata servers, a socket; each is watched by a source, any number of them at once. Out: a [`Board`] with the notices that stand: the first one starts a save, the earliest end is its deadline. What can fail: a source
//! that sees nothing any more is blind, which is told, and ends nothing.
//!
//! A notice that is raised again never gives more time than it gave before. One that is withdrawn (a file that is gone, an event that was cancelled) leaves the others.

mod aws;
mod azure;
mod file;
mod gcp;
mod http;
mod signals;

pub(crate) use signals::handled as handled_signals;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::time::{Interval, MissedTickBehavior};

use crate::config::{PreemptConfig, Source};

/// A node that is still there so long after its end was said does not go away for that notice: it was withdrawn, or a false alarm.
const EXPIRES_AFTER: Duration = Duration::from_secs(60);

/// How often a source may fail in a row before it counts as blind.
const FAILURES_UNTIL_BLIND: u32 = 3;

/// Somebody says that the node goes away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// Who: `signal`, `file`, `aws`, …
    pub source: &'static str,
    /// What was said, for people.
    pub text: String,
    /// When it was heard first.
    pub heard_at: Instant,
    /// When the node goes away.
    pub gone_at: Instant,
}

impl Notice {
    /// When a save has to be over that is to end so long before the node goes away.
    pub fn due(&self, margin: Duration) -> Instant {
        self.gone_at.checked_sub(margin).unwrap_or(self.gone_at)
    }

    fn has_expired(&self) -> bool {
        self.gone_at.elapsed() > EXPIRES_AFTER
    }
}

/// The notices that stand, and the sources that see nothing.
#[derive(Debug, Clone, Default)]
pub struct Standing {
    notices: BTreeMap<&'static str, Notice>,
    blind: BTreeMap<&'static str, String>,
    /// Notices that were raised so far, each once.
    raised: u64,
}

impl Standing {
    /// The notice whose end of the node is the earliest.
    pub fn earliest(&self) -> Option<&Notice> {
        self.notices().min_by_key(|notice| notice.gone_at)
    }

    /// All of them, by source.
    pub fn notices(&self) -> impl Iterator<Item = &Notice> {
        self.notices.values().filter(|notice| !notice.has_expired())
    }

    /// Sources that see nothing, and why.
    pub fn blind(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.blind
            .iter()
            .map(|(source, why)| (*source, why.as_str()))
    }

    /// How many notices were raised so far; a notice that is repeated counts once.
    pub fn raised(&self) -> u64 {
        self.raised
    }
}

/// Sources whose notices are events; those of the others are there until they are withdrawn.
const COME_ONCE: [&str; 2] = ["signal", "socket"];

/// Where sources put their notices. Clones are the same board.
#[derive(Debug, Clone, Default)]
pub struct Board(Arc<watch::Sender<Standing>>);

impl Board {
    /// A notice: the node goes away in `left`. The same source's notice before it stays where it gave less time.
    pub fn raise(&self, source: &'static str, left: Duration, text: &str) {
        let now = Instant::now();
        // A time beyond all calendars is no deadline.
        let gone_at = now
            .checked_add(left)
            .unwrap_or(now + Duration::from_secs(365 * 24 * 3600));
        self.0.send_if_modified(|standing| {
            // A new one is not a repetition of one that came to nothing; what is there as long as it lasts says the same again.
            let is_over =
                |source: &str, notice: &Notice| notice.has_expired() && COME_ONCE.contains(&source);
            standing
                .notices
                .retain(|source, notice| !is_over(source, notice));
            match standing.notices.get_mut(source) {
                Some(notice) if notice.gone_at <= gone_at => false,
                Some(notice) => {
                    tracing::warn!("{source}: {text}; {:.1} s are left now", left.as_secs_f64());
                    notice.gone_at = gone_at;
                    text.clone_into(&mut notice.text);
                    true
                }
                None => {
                    tracing::warn!(
                        "notice from {source}: {text}; {:.1} s are left",
                        left.as_secs_f64()
                    );
                    standing.raised += 1;
                    standing.notices.insert(
                        source,
                        Notice {
                            source,
                            text: text.to_owned(),
                            heard_at: now,
                            gone_at,
                        },
                    );
                    true
                }
            }
        });
    }

    /// The source's notice does not stand any more.
    pub fn withdraw(&self, source: &'static str, why: &str) {
        self.0.send_if_modified(|standing| {
            let was_there = standing.notices.remove(source).is_some();
            if was_there {
                tracing::warn!("the notice from {source} is withdrawn: {why}");
            }
            was_there
        });
    }

    /// The source sees nothing from now on, until it says otherwise.
    pub fn blind(&self, source: &'static str, why: &str) {
        self.0.send_if_modified(|standing| {
            let is_new = standing.blind.insert(source, why.to_owned()).is_none();
            if is_new {
                tracing::error!(
                    "{source} sees no notices now: {why}; the other sources are watched on"
                );
            }
            is_new
        });
    }

    /// The source sees again, or still.
    pub fn sees(&self, source: &'static str) {
        self.0.send_if_modified(|standing| {
            let was_blind = standing.blind.remove(source).is_some();
            if was_blind {
                tracing::warn!("{source} sees notices again");
            }
            was_blind
        });
    }

    /// What stands now.
    pub fn standing(&self) -> Standing {
        self.0.borrow().clone()
    }

    /// To wait for changes.
    pub fn subscribe(&self) -> watch::Receiver<Standing> {
        self.0.subscribe()
    }
}

/// What a look at a metadata server showed.
#[derive(Debug)]
enum Seen {
    /// No notice stands; why one that stood does not any more.
    Silence(&'static str),
    /// One stands. `left` is `None` where it does not say.
    Notice {
        left: Option<Duration>,
        text: String,
    },
}

/// Counts a source's failures in a row.
#[derive(Debug)]
struct Sight<'a> {
    board: &'a Board,
    source: &'static str,
    failures: u32,
}

impl<'a> Sight<'a> {
    fn new(board: &'a Board, source: &'static str) -> Self {
        Self {
            board,
            source,
            failures: 0,
        }
    }

    /// It was looked, whatever was seen.
    fn looked(&mut self) {
        self.failures = 0;
        self.board.sees(self.source);
    }

    /// It could not be looked.
    fn failed(&mut self, why: &str) {
        self.failures = self.failures.saturating_add(1);
        tracing::debug!(source = self.source, failures = self.failures, "{why}");
        if self.failures >= FAILURES_UNTIL_BLIND {
            self.board.blind(self.source, why);
        }
    }

    /// It was looked, and this was seen, or could not be. A notice that does not say its time leaves `notice`.
    fn saw(&mut self, seen: Result<Seen, String>, notice: Duration) {
        match seen {
            Ok(Seen::Silence(why)) => {
                self.looked();
                self.board.withdraw(self.source, why);
            }
            Ok(Seen::Notice { left, text }) => {
                self.looked();
                self.board.raise(self.source, left.unwrap_or(notice), &text);
            }
            Err(why) => self.failed(&why),
        }
    }
}

/// Ticks at once and then with at least `pause` between two.
fn every(pause: Duration) -> Interval {
    let mut ticks = tokio::time::interval(pause);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Watches all sources of the configuration from now on, on the runtime's threads. Signals that are no notices, and that the job should have, come out of the channel.
///
/// # Errors
/// The system refused a signal handler.
pub fn watch(
    runtime: &Handle,
    config: &PreemptConfig,
    board: &Board,
) -> io::Result<mpsc::UnboundedReceiver<rustix::process::Signal>> {
    let _inside = runtime.enter();
    let for_the_job = signals::watch(config, board)?;
    for source in &config.sources {
        let (config, board) = (config.clone(), board.clone());
        match source {
            Source::File => {
                // The configuration has it where the file is a source.
                if let Some(path) = config.file.clone() {
                    runtime.spawn(file::watch(path, config, board));
                }
            }
            Source::Aws => drop(runtime.spawn(aws::watch(config, board))),
            Source::Azure => drop(runtime.spawn(azure::watch(config, board))),
            Source::Gcp => {
                for watched in gcp::ALL {
                    runtime.spawn(gcp::watch(watched, config.clone(), board.clone()));
                }
            }
            // Signals are handled already, and the socket has a server of its own.
            Source::Signals | Source::Socket => {}
        }
    }
    Ok(for_the_job)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_earliest_end_of_the_notices_that_stand_is_the_deadline() {
        let board = Board::default();
        assert!(board.standing().earliest().is_none());
        board.raise("signal", 300 * SECOND, "SIGTERM");
        board.raise("aws", 25 * SECOND, "terminate");
        assert_eq!(board.standing().earliest().unwrap().source, "aws");
        board.withdraw("aws", "cancelled");
        assert_eq!(board.standing().earliest().unwrap().source, "signal");
        assert_eq!(board.standing().raised(), 2);
    }

    #[test]
    fn a_notice_that_is_repeated_gives_no_more_time() {
        let board = Board::default();
        board.raise("signal", 30 * SECOND, "SIGTERM");
        let first = board.standing().earliest().unwrap().gone_at;
        board.raise("signal", 60 * SECOND, "SIGTERM");
        assert_eq!(board.standing().earliest().unwrap().gone_at, first);
        board.raise("signal", 5 * SECOND, "SIGUSR1");
        let earliest = board.standing().earliest().unwrap().clone();
        assert!(earliest.gone_at < first);
        assert_eq!(earliest.text, "SIGUSR1");
        assert_eq!(board.standing().raised(), 1, "it is one notice");
        board.raise("file", Duration::MAX, "for ever");
    }

    #[test]
    fn a_notice_after_one_that_came_to_nothing_is_a_new_one() {
        let board = Board::default();
        board.raise("signal", SECOND, "SIGTERM");
        let expired = Instant::now() - EXPIRES_AFTER - SECOND;
        board.0.send_modify(|standing| {
            standing.notices.get_mut("signal").unwrap().gone_at = expired;
        });
        assert!(board.standing().earliest().is_none());
        board.raise("signal", 30 * SECOND, "SIGTERM");
        assert!(board.standing().earliest().is_some());
        assert_eq!(board.standing().raised(), 2);
    }

    #[test]
    fn a_source_is_blind_after_some_failures_in_a_row() {
        let board = Board::default();
        let mut sight = Sight::new(&board, "gcp");
        for _ in 0..2 {
            sight.failed("refused");
            sight.failed("refused");
            assert_eq!(board.standing().blind().count(), 0);
            sight.looked();
        }
        for _ in 0..3 {
            sight.failed("refused");
        }
        assert_eq!(board.standing().blind().next(), Some(("gcp", "refused")));
        sight.looked();
        assert_eq!(board.standing().blind().count(), 0);
    }
}
