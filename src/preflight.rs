//! Whether a save of this job would work from here, found out before it is needed: the store, this node, the target.
//!
//! In: the configuration, perhaps a target. Out: a list of [`Check`]s, each with what was found, why it matters and what mends it. Nothing can fail: what fails is what was looked for.
//!
//! The store is asked with the very requests of a save, under the prefix of an attempt that is never announced; what it leaves when it dies is `gc`'s. The target is looked at and not touched. It ends within [`LIMIT`],
//! whatever hangs. Only a [`drill`] locks the target, lets it go again, and sends a small image; it takes as much longer.

mod bucket;
mod drill;
mod node;
mod smi;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::error::{ExitCode, Failure, TargetState, one_line};
use crate::progress::Meter;
use crate::session::Session;
use crate::watchdog;

use node::Node;

/// All of it takes no longer.
pub const LIMIT: Duration = Duration::from_secs(20);

/// The store's part of it, which leaves time to clean up.
const STORE_LIMIT: Duration = Duration::from_secs(14);

/// Certificates, credentials and a directory are there within this time.
const OPEN_LIMIT: Duration = Duration::from_secs(8);

/// The driver may take this long to come up.
const NODE_LIMIT: Duration = Duration::from_secs(18);

/// How one thing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// As it should be.
    Ok,
    /// A save works; something beside it does not.
    Warning,
    /// A save would fail.
    Failed,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// `store.…`, `node.…`, `target.…` or `deadline.…`.
    pub name: &'static str,
    /// How it is.
    pub state: State,
    /// What was found.
    pub found: String,
    /// Why it matters.
    pub why: &'static str,
    /// The key, flag, right or command that mends it; `None` where nothing is to be mended.
    pub mend: Option<String>,
}

/// Everything that was found.
#[derive(Debug, Clone, Serialize)]
pub struct Findings {
    /// The job.
    pub job: String,
    /// In the order in which they were looked at.
    pub checks: Vec<Check>,
    /// Bytes per second that the store took.
    pub upload_rate: Option<f64>,
    /// Bytes per second that it gave.
    pub download_rate: Option<f64>,
    /// What a drill touched, as looked up afterwards.
    #[serde(skip)]
    pub targets: Vec<TargetState>,
    /// A drill could not let it go again.
    #[serde(skip)]
    pub is_lost: bool,
}

impl Findings {
    /// 0, or 3 when a save would fail; 12 when a drill has left its target locked.
    pub fn code(&self) -> ExitCode {
        match self.worst() {
            _ if self.is_lost => ExitCode::Lost,
            State::Failed => ExitCode::Preflight,
            State::Ok | State::Warning => ExitCode::Ok,
        }
    }

    fn worst(&self) -> State {
        let states = self.checks.iter().map(|check| check.state);
        states.max().unwrap_or(State::Ok)
    }
}

/// What is known of a check before it is made.
#[derive(Debug)]
struct Subject {
    name: &'static str,
    why: &'static str,
    /// What it is when it is not as it should be.
    gravity: State,
    /// What mends it where the failure does not say.
    mend: &'static str,
}

impl Subject {
    fn ok(&self, found: impl Into<String>) -> Check {
        Check {
            name: self.name,
            state: State::Ok,
            found: found.into(),
            why: self.why,
            mend: None,
        }
    }

    fn wrong(&self, found: impl Into<String>) -> Check {
        self.wrong_to_mend(found, self.mend)
    }

    fn wrong_to_mend(&self, found: impl Into<String>, mend: impl Into<String>) -> Check {
        Check {
            state: self.gravity,
            mend: Some(mend.into()).filter(|mend: &String| !mend.is_empty()),
            ..self.ok(found)
        }
    }

    /// It works, and is worth a word.
    fn warning(&self, found: impl Into<String>, mend: impl Into<String>) -> Check {
        Check {
            state: State::Warning,
            ..self.wrong_to_mend(found, mend)
        }
    }
}

const CONNECT: Subject = Subject {
    name: "store.connect",
    why: "without credentials, a region and certificates that are trusted no request is made",
    gravity: State::Failed,
    mend: "see store.url, store.endpoint and the credentials' chain",
};

/// What it needs to look around.
#[derive(Debug)]
pub struct Surroundings {
    /// What the user asked for.
    pub config: Config,
    /// Carries the network.
    pub runtime: Handle,
    /// Progress.
    pub meter: Arc<Meter>,
    /// Ends it.
    pub cancel: CancellationToken,
    /// The process that is to be saved, if it is known.
    pub pid: Option<u32>,
    /// The program whose `guard` command unlocks the target if a drill dies; `None` is nobody.
    pub guard: Option<PathBuf>,
}

/// Looks at everything.
pub fn preflight(around: &Surroundings) -> Findings {
    look(around).0
}

/// Looks at everything, then locks the target, lets it go, and sends a small image.
pub fn drill(around: Surroundings, pid: u32) -> Findings {
    drill_in_turn(around, pid, &Mutex::default())
}

/// The same beside somebody else who wants the target: it has the target only as long as it holds `hands`, and does not take it any more once it is cancelled.
pub(crate) fn drill_in_turn(around: Surroundings, pid: u32, hands: &Mutex<()>) -> Findings {
    let around = Surroundings {
        pid: Some(pid),
        ..around
    };
    let (mut findings, session) = look(&around);
    drill::rehearse(session.as_ref(), pid, hands, &mut findings);
    findings
}

/// What was found, and the session that it was found with.
fn look(around: &Surroundings) -> (Findings, Option<Session>) {
    let job = around.config.job.to_string();
    let started = Instant::now();
    // The driver may take seconds to come up, or hang: meanwhile the store is asked.
    let (config, pid) = (around.config.clone(), around.pid);
    let looking = watchdog::aside("node", move || Node::look(&config, pid));
    let opened = open(around);
    let (mut checks, rates) = match &opened {
        Ok(session) => bucket::look(session, started + STORE_LIMIT),
        Err(found) => (
            vec![CONNECT.wrong(found.as_str())],
            bucket::Rates::default(),
        ),
    };
    let left = (started + NODE_LIMIT).saturating_duration_since(Instant::now());
    let node = match looking.map(|looking| looking.within(left)) {
        Ok(Some(node)) => node,
        Ok(None) => Node::hangs(started.elapsed()),
        Err(error) => Node::without_a_thread(&error),
    };
    checks.extend(node.checks_with(&around.config, rates.upload));
    let findings = Findings {
        job,
        checks,
        upload_rate: rates.upload,
        download_rate: rates.download,
        targets: Vec::new(),
        is_lost: false,
    };
    (findings, opened.ok())
}

/// The session, or why there is none. Certificates, credentials and directories may lie where nobody answers.
fn open(around: &Surroundings) -> Result<Session, String> {
    let (config, runtime) = (around.config.clone(), around.runtime.clone());
    let (meter, cancel) = (Arc::clone(&around.meter), around.cancel.clone());
    let guard = around.guard.clone();
    let open = move || {
        let session = Session::open(config, runtime, meter, cancel)?;
        Ok::<_, Failure>(Session { guard, ..session })
    };
    let opening = watchdog::aside("open", open);
    match opening.map(|opening| opening.within(OPEN_LIMIT)) {
        Ok(Some(opened)) => opened.map_err(|failure| one_line(failure.cause.as_ref())),
        Ok(None) => Err(format!(
            "certificates, credentials or the store's directory do not answer within {OPEN_LIMIT:?}"
        )),
        Err(error) => Err(format!("a thread cannot be started: {error}")),
    }
}
