//! Notices of pre-emption: every source in good times, with garbage, silence, errors, late, twice, and with what only it does.
//!
//! A [`Case`] is a list of steps: what happens to its source, and what must come to stand on the board then. Every step waits for what it wants with much patience, and nothing is measured. Where a look must do more than one thing,
//! as to get a new token, `preempt.poll` is so long that there is no second look. The cases of a source run at the same time, in a process of their own: watching takes its signals over.
//!
//! Where a column is empty the source's module says so, and what comes nearest to it. `socket` has no board that a test could look at: it is asked through a supervision.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ckptstream::config::{Config, Environment, Overrides, RawConfig};
use ckptstream::preempt::{Board, Notice as Heard, Standing, watch};
use futures::future::join_all;
use rustix::process::{Signal, getpid, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::support::MetadataServer;

/// A file that appears.
mod file;
/// The metadata servers of three clouds.
mod metadata;
/// Signals.
mod signals;
/// `ckptstream notify`.
mod socket;

/// How long a step waits for what it wants: longer than a request for a change that is never answered.
const PATIENCE: Duration = Duration::from_secs(150);

/// How long it waits where there must be no second look, which [`LONG_POLL`] puts off for longer.
const PATIENCE_WITH_ONE_LOOK: Duration = Duration::from_secs(45);

/// More of `[preempt]` for it.
const LONG_POLL: &str = "poll = \"60s\"";

/// `preempt.notice` of all cases.
const NOTICE: Duration = Duration::from_secs(40);

/// Time from now to the end of the node where a source says one; nobody takes it for [`NOTICE`].
const TOLD: Duration = Duration::from_secs(600);

/// A step of a case; all of them speak of its source.
enum Step {
    /// The server answers so from its first request on; a first step only.
    Begins(Value),
    /// The server answers so from now on.
    Answers(Value),
    /// The server's port refuses connections.
    Stops,
    /// The server is back.
    StartsAgain,
    /// The path was asked with this status so often since the last [`Step::Answers`].
    Asked(&'static str, u64, usize),
    /// The path was asked since then with this in its query.
    AskedFor(&'static str, &'static str),
    /// The path was never asked.
    NeverAsked(&'static str),
    /// Something happens where `preempt.file` is.
    Does(Box<dyn Fn(&Path)>),
    /// This process gets a signal.
    Gets(Signal),
    /// The job is to have it, and none before it.
    ForTheJob(Signal),
    /// A notice stands: its text has this in it, and this much time was left when it was heard first.
    Notice(&'static str, Left),
    /// None stands any more.
    NoNotice,
    /// The source is blind, and says this.
    Blind(&'static str),
    /// It is not, any more.
    Sees,
    /// Nothing stands, was ever raised, or was ever blind.
    Quiet,
    /// The source was never blind.
    NeverBlind,
    /// So many notices were raised so far.
    Raised(u64),
}

use Step::*;

/// How much time a notice gives.
#[derive(Clone, Copy)]
enum Left {
    /// What the configuration says: exactly that.
    Configured,
    /// What the source said, less what has passed.
    Told,
    /// It was heard with more, and is down to this by now.
    CutTo(Duration),
}

use Left::{Configured, CutTo, Told};

struct Case {
    name: String,
    source: &'static str,
    /// More of `[preempt]`.
    config: &'static str,
    steps: Vec<Step>,
}

fn case(name: &str, source: &'static str, config: &'static str, steps: Vec<Step>) -> Case {
    Case {
        name: format!("{source}: {name}"),
        source,
        config,
        steps,
    }
}

/// Never dropped, because that waits for a look that does not return.
fn runtime() -> &'static tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(2).enable_all().build();
    Box::leak(Box::new(runtime.unwrap()))
}

/// Runs all cases at once.
fn run(cases: Vec<Case>) {
    runtime().block_on(join_all(cases.iter().map(perform)));
}

/// What is watched, and what it is watched from.
struct Watched {
    board: Board,
    /// Sources that were blind at any time.
    ever_blind: Arc<Mutex<BTreeSet<&'static str>>>,
    for_the_job: UnboundedReceiver<Signal>,
    /// `preempt.file`, in a folder of its own.
    file: PathBuf,
    _dir: TempDir,
}

/// Starts watching, with all metadata servers at `url`.
fn start(config: &str, url: &str) -> Watched {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("folder/notice");
    std::fs::create_dir(dir.path().join("folder")).unwrap();
    let poll = if config.contains("poll =") {
        ""
    } else {
        "poll = \"100ms\""
    };
    let text = format!(
        "[preempt]\n{config}\n{poll}\nnotice = \"{}s\"\nfile = \"{}\"\naws_url = \"{url}\"\ngcp_url = \"{url}\"\nazure_url = \"{url}/\"\n",
        NOTICE.as_secs(),
        file.display()
    );
    let overrides = Overrides {
        job: Some("train".to_owned()),
        store: Some("s3://bucket".to_owned()),
        ..Overrides::default()
    };
    let raw = RawConfig::parse(&text).unwrap();
    let config = Config::resolve(&overrides, &raw, &Environment::read()).unwrap();
    let board = Board::default();
    let ever_blind = Arc::<Mutex<BTreeSet<&'static str>>>::default();
    let (noted, mut changes) = (Arc::clone(&ever_blind), board.subscribe());
    tokio::spawn(async move {
        while changes.changed().await.is_ok() {
            let standing = changes.borrow_and_update().clone();
            noted
                .lock()
                .unwrap()
                .extend(standing.blind().map(|(source, _)| source));
        }
    });
    let runtime = tokio::runtime::Handle::current();
    let for_the_job = watch(&runtime, &config.preempt, &board).unwrap();
    Watched {
        board,
        ever_blind,
        for_the_job,
        file,
        _dir: dir,
    }
}

/// Waits until the board is so.
async fn until(
    what: &str,
    board: &Board,
    patience: Duration,
    is_so: impl Fn(&Standing) -> bool,
) -> Standing {
    let mut changes = board.subscribe();
    let waited = tokio::time::timeout(patience, changes.wait_for(|standing| is_so(standing))).await;
    let standing = waited.map(|standing| standing.map(|standing| standing.clone()));
    match standing {
        Ok(Ok(standing)) => standing,
        _ => panic!("{what}: {:?}", board.standing()),
    }
}

async fn perform(case: &Case) {
    let Case {
        name,
        source,
        config,
        steps,
    } = case;
    let patience = if config.contains(LONG_POLL) {
        PATIENCE_WITH_ONE_LOOK
    } else {
        PATIENCE
    };
    let mut server = match steps.first() {
        Some(Begins(script)) => MetadataServer::start(script),
        _ => MetadataServer::start(&json!({})),
    };
    let mut watched = start(config, &server.endpoint);
    let mut answered_before = 0;
    for (index, step) in steps.iter().enumerate() {
        let what = format!("{name}, step {index}");
        match step {
            Begins(_) => assert_eq!(index, 0, "{what}"),
            Answers(script) => {
                answered_before = server.requests().len();
                server.set_script(script);
            }
            Stops => server.stop(),
            StartsAgain => server.start_again(),
            Asked(path, status, count) => {
                let asked = |line: &Value| line["path"] == *path && line["status"] == *status;
                requested(&what, &server, answered_before, asked, *count).await;
            }
            AskedFor(path, part) => {
                let asked = |line: &Value| {
                    line["path"] == *path && line["query"].as_str().unwrap_or("").contains(part)
                };
                requested(&what, &server, answered_before, asked, 1).await;
            }
            NeverAsked(path) => {
                let requests = server.requests();
                assert!(requests.iter().all(|line| line["path"] != *path), "{what}");
            }
            Does(deed) => deed(&watched.file),
            Gets(signal) => kill_process(getpid(), *signal).unwrap(),
            ForTheJob(signal) => {
                let next = tokio::time::timeout(patience, watched.for_the_job.recv()).await;
                assert_eq!(next, Ok(Some(*signal)), "{what}");
            }
            must_stand => watched.must(&what, source, patience, must_stand).await,
        }
    }
}

impl Watched {
    /// Waits for what must come to stand on the board, or looks that nothing did.
    async fn must(&self, what: &str, source: &str, patience: Duration, step: &Step) {
        let board = &self.board;
        let notice_of = |standing: &Standing| {
            let mut notices = standing.notices();
            notices.find(|notice| notice.source == source).cloned()
        };
        let is_blind = |standing: &Standing| standing.blind().any(|(blind, _)| blind == source);
        let was_blind = || self.ever_blind.lock().unwrap().contains(source);
        let given = |notice: &Heard| notice.gone_at - notice.heard_at;
        match step {
            Notice(text, left) => {
                let standing = until(what, board, patience, |standing| {
                    notice_of(standing).is_some_and(|notice| match left {
                        // What has passed since it was heard is not measured.
                        CutTo(left) => notice.gone_at <= Instant::now() + *left,
                        Configured | Told => true,
                    })
                })
                .await;
                let notice = notice_of(&standing).unwrap();
                assert!(notice.text.contains(text), "{what}: {notice:?}");
                let given = given(&notice);
                match left {
                    Configured => assert_eq!(given, NOTICE, "{what}"),
                    Told => assert!(TOLD / 4 < given && given <= TOLD, "{what}: {given:?}"),
                    CutTo(_) => {}
                }
            }
            NoNotice => drop(
                until(what, board, patience, |standing| {
                    notice_of(standing).is_none()
                })
                .await,
            ),
            Blind(part) => {
                let standing = until(what, board, patience, is_blind).await;
                let (_, why) = standing
                    .blind()
                    .find(|(blind, _)| *blind == source)
                    .unwrap();
                assert!(why.contains(part), "{what}: {why}");
                // The hint is for a token that does not come, and for nothing else.
                assert_eq!(
                    why.contains("hop limit"),
                    *part == "hop limit",
                    "{what}: {why}"
                );
            }
            Sees => drop(until(what, board, patience, |standing| !is_blind(standing)).await),
            Quiet => {
                let standing = board.standing();
                assert_eq!(standing.raised(), 0, "{what}: {standing:?}");
                assert!(!was_blind(), "{what}");
            }
            NeverBlind => assert!(!was_blind(), "{what}"),
            Raised(count) => assert_eq!(board.standing().raised(), *count, "{what}"),
            _ => unreachable!("{what}: a deed"),
        }
    }
}

/// Waits until the server has had `count` such requests after the first `before` ones.
async fn requested(
    what: &str,
    server: &MetadataServer,
    before: usize,
    is_so: impl Fn(&Value) -> bool,
    count: usize,
) {
    let asked = async {
        while server
            .requests()
            .iter()
            .skip(before)
            .filter(|line| is_so(line))
            .count()
            < count
        {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let waited = tokio::time::timeout(PATIENCE, asked).await;
    assert!(waited.is_ok(), "{what}: {:#?}", server.requests());
}
