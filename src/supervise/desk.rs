//! Where a supervision can be spoken to: `ckptstream status` asks what it is doing, `ckptstream notify` brings a notice and waits for the verdict.
//!
//! In: connections to a unix socket, each with one line of JSON. Out: one line of JSON each, a [`Report`] or a [`Verdict`]. What can fail: the socket cannot be made; whoever asks is gone. A question that makes no sense is answered with what is wrong with it.
//!
//! Only our own user may connect: the socket's mode is 0600.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::tally::Ever;
use crate::error::Phase;
use crate::preempt::Board;

/// Longest question, in bytes.
const QUESTION_LEN_MAX: u64 = 4096;
/// A question has to come within this time.
const QUESTION_WITHIN: Duration = Duration::from_secs(5);
/// What it is doing it can say at any time.
const STATUS_WITHIN: Duration = Duration::from_secs(10);
/// Whoever waits for a verdict is answered before we end, within reason.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// What is asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case")]
pub enum Question {
    /// What it is doing.
    Status,
    /// The node goes away; the answer is the verdict.
    Notify {
        /// Seconds until then; `None` is `preempt.notice`.
        left_seconds: Option<f64>,
    },
}

/// What a supervision is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Doing {
    /// It puts this node in order, and waits for other writers, or for the job to come up.
    #[default]
    Settling,
    /// It brings the job back from an image.
    Restoring,
    /// It waits for notices.
    Watching,
    /// It saves the job.
    Saving,
    /// The job has ended, or was ended.
    Ended,
}

/// A supervision, as `status` tells of it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Report {
    /// The job's name.
    pub job: String,
    /// Pid of ckptstream.
    pub pid: u32,
    /// Pid of the job's first process; `None` before it is started.
    pub job_pid: Option<u32>,
    /// What is done now.
    pub doing: Doing,
    /// Everything that a save needs is prepared.
    pub armed: bool,
    /// Bytes of host memory that are held for it.
    pub armed_bytes: u64,
    /// Why it is not prepared.
    pub not_armed: Option<String>,
    /// What the drill at the job's start came to (`preempt.drill`).
    pub drill: Option<String>,
    /// Why the store would not take a save, when it was looked at last (`preempt.probe_every`).
    pub store_trouble: Option<String>,
    /// Notices that stand.
    pub notices: Vec<StandingNotice>,
    /// Sources that see nothing.
    pub blind: Vec<BlindSource>,
    /// Notices heard so far.
    pub notices_heard: u64,
    /// Images committed so far.
    pub saves_committed: u64,
    /// Saves that failed so far.
    pub saves_failed: u64,
    /// Saves without a notice that were skipped so far.
    pub saves_skipped: u64,
    /// Seconds for which the job stood still so far.
    pub seconds_locked: f64,
    /// Seconds from the last notice to the driver's lock.
    pub notice_to_lock_seconds: f64,
    /// Seconds from the last notice to the end of its save.
    pub notice_to_commit_seconds: f64,
    /// Bytes of GPU memory that were saved so far.
    pub bytes_raw: u64,
    /// Bytes that they took in the store.
    pub bytes_stored: u64,
    /// Store requests that were tried again so far, by the kind of the cause: `slow down`, `not found`, `fault`.
    pub retries: BTreeMap<String, u64>,
    /// Uploads that could not be aborted so far; `ckptstream gc` does it later.
    pub failed_aborts: u64,
    /// Notices of all lives of the job.
    pub ever: Ever,
    /// The newest image of this supervision.
    pub image: Option<String>,
    /// Why the last save failed, if it did.
    pub last_failure: Option<String>,
    /// Seconds since the start.
    pub running_seconds: f64,
}

/// A notice that stands.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StandingNotice {
    /// Who says so.
    pub source: String,
    /// What was said.
    pub text: String,
    /// Until the node goes away; negative when it should be gone.
    pub left_seconds: f64,
}

/// A source that sees nothing.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BlindSource {
    /// Which.
    pub source: String,
    /// Why.
    pub why: String,
}

/// What became of the job after a notice.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// As the exit codes of the other commands: 0 saved, 5 refused, 7 the job had ended, …
    pub exit_code: u8,
    /// Where it failed, if it did.
    pub phase: Option<Phase>,
    /// The image.
    pub image: Option<String>,
    /// Why it is not 0, outermost first.
    pub cause: Vec<String>,
}

/// An answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// To [`Question::Status`].
    Status(Box<Report>),
    /// To [`Question::Notify`].
    Verdict(Verdict),
    /// The question makes no sense.
    Error(String),
}

/// A verdict, and whose it is.
#[derive(Debug)]
struct Concluded {
    /// As many notices had been raised when it was looked at them.
    raised: u64,
    verdict: Verdict,
}

/// Whatever is raised after the end is too late.
const ALL_NOTICES: u64 = u64::MAX;

/// The socket, and what stands behind it. Dropped, it is removed.
#[derive(Debug)]
pub(super) struct Desk {
    shared: Shared,
    path: Option<PathBuf>,
}

#[derive(Debug, Clone)]
struct Shared {
    board: Board,
    /// Of a notice that does not say.
    notice: Duration,
    started: Instant,
    report: Arc<watch::Sender<Report>>,
    /// All that were told, in their order: who waits for one does not get the next.
    verdicts: Arc<watch::Sender<Vec<Concluded>>>,
    waiting: Arc<AtomicUsize>,
}

impl Desk {
    /// Without a socket: it keeps the report alone.
    pub(super) fn new(board: &Board, notice: Duration, job: &str) -> Self {
        let report = Report {
            job: job.to_owned(),
            pid: std::process::id(),
            ..Report::default()
        };
        Self {
            shared: Shared {
                board: board.clone(),
                notice,
                started: Instant::now(),
                report: Arc::new(watch::Sender::new(report)),
                verdicts: Arc::default(),
                waiting: Arc::default(),
            },
            path: None,
        }
    }

    /// Listens from now on.
    ///
    /// # Errors
    /// The socket cannot be made, or another supervision of the job listens there.
    pub(super) fn listen(&mut self, runtime: &Handle, path: &Path) -> io::Result<()> {
        let _inside = runtime.enter();
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir)?;
        }
        // What a dead one has left may be taken, and nothing else.
        if let Ok(there) = std::fs::symlink_metadata(path) {
            if std::os::unix::net::UnixStream::connect(path).is_ok() {
                return Err(io::Error::new(
                    io::ErrorKind::AddrInUse,
                    "another ckptstream listens there, and supervises this job",
                ));
            }
            if !there.file_type().is_socket() {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "what is there is no socket",
                ));
            }
            std::fs::remove_file(path)?;
        }
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        self.path = Some(path.to_owned());
        let shared = self.shared.clone();
        runtime.spawn(async move {
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => {
                        tokio::spawn(serve(stream, shared.clone()));
                    }
                    Err(error) => {
                        tracing::warn!("a connection to the socket failed: {error}");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                }
            }
        });
        Ok(())
    }

    /// What tells of it at any time.
    pub(super) fn teller(&self) -> impl Fn() -> Report + Clone + Send + Sync + 'static {
        let shared = self.shared.clone();
        move || shared.told()
    }

    /// To change what is told from elsewhere.
    pub(super) fn reporter(&self) -> Arc<watch::Sender<Report>> {
        Arc::clone(&self.shared.report)
    }

    /// Changes what `status` tells.
    pub(super) fn report(&self, change: impl FnOnce(&mut Report)) {
        self.shared.report.send_modify(change);
    }

    /// Answers whoever has brought one of the first `raised` notices, and has no answer yet.
    pub(super) fn conclude(&self, raised: u64, verdict: Verdict) {
        let concluded = Concluded { raised, verdict };
        self.shared
            .verdicts
            .send_modify(|told| told.push(concluded));
    }

    /// The same for everybody: there will be no other.
    pub(super) fn conclude_all(&self, verdict: Verdict) {
        self.conclude(ALL_NOTICES, verdict);
    }

    /// Waits until everybody has been answered, within reason.
    pub(super) async fn close(&self) {
        let until = Instant::now() + ANSWER_WITHIN;
        while self.shared.waiting.load(Ordering::SeqCst) > 0 && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        if let Some(path) = &self.path
            && let Err(error) = std::fs::remove_file(path)
        {
            tracing::debug!("{} stays: {error}", path.display());
        }
    }
}

impl Shared {
    fn told(&self) -> Report {
        let standing = self.board.standing();
        let now = Instant::now();
        let left = |at: Instant| match at.checked_duration_since(now) {
            Some(left) => left.as_secs_f64(),
            None => -now.duration_since(at).as_secs_f64(),
        };
        let mut report = self.report.borrow().clone();
        report.notices_heard = standing.raised();
        report.notices = standing
            .notices()
            .map(|notice| StandingNotice {
                source: notice.source.to_owned(),
                text: notice.text.clone(),
                left_seconds: left(notice.gone_at),
            })
            .collect();
        report.blind = standing
            .blind()
            .map(|(source, why)| BlindSource {
                source: source.to_owned(),
                why: why.to_owned(),
            })
            .collect();
        report.running_seconds = self.started.elapsed().as_secs_f64();
        report
    }

    async fn verdict(&self, left_seconds: Option<f64>) -> Answer {
        let left = match left_seconds.map(Duration::try_from_secs_f64) {
            None => self.notice,
            Some(Ok(left)) => left,
            Some(Err(error)) => return Answer::Error(format!("left_seconds: {error}")),
        };
        let mut verdicts = self.verdicts.subscribe();
        self.board.raise("socket", left, "ckptstream notify");
        // A notice that stood already, and was dealt with, is not dealt with again.
        let raised = self.board.standing().raised();
        let mut verdict = None;
        let told = verdicts.wait_for(|told| {
            let first = told.iter().find(|told| told.raised >= raised);
            verdict = first.map(|told| told.verdict.clone());
            verdict.is_some()
        });
        let _told = told.await.map(drop);
        verdict.map_or_else(|| Answer::Error("it has ended".to_owned()), Answer::Verdict)
    }
}

async fn serve(stream: UnixStream, shared: Shared) {
    shared.waiting.fetch_add(1, Ordering::SeqCst);
    if let Err(error) = answer(stream, &shared).await {
        tracing::debug!("nobody hears the answer: {error}");
    }
    shared.waiting.fetch_sub(1, Ordering::SeqCst);
}

async fn answer(stream: UnixStream, shared: &Shared) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut line = Vec::new();
    let mut asking = BufReader::new(read.take(QUESTION_LEN_MAX));
    let asked = tokio::time::timeout(QUESTION_WITHIN, asking.read_until(b'\n', &mut line)).await;
    let answer = match asked.map(|read| read.map(|_| serde_json::from_slice(&line))) {
        Ok(Ok(Ok(Question::Status))) => Answer::Status(Box::new(shared.told())),
        Ok(Ok(Ok(Question::Notify { left_seconds }))) => shared.verdict(left_seconds).await,
        Ok(Ok(Err(error))) => Answer::Error(format!("not a question: {error}")),
        Ok(Err(error)) => return Err(error),
        Err(_elapsed) => Answer::Error("no question came".to_owned()),
    };
    let mut line = serde_json::to_vec(&answer)?;
    line.push(b'\n');
    write.write_all(&line).await?;
    write.shutdown().await
}

/// Asks the supervision that listens there.
///
/// # Errors
/// Nobody listens, or it ended before it answered.
pub fn ask(path: &Path, question: &Question) -> io::Result<Answer> {
    use std::io::{BufRead, Write};
    let mut stream = std::os::unix::net::UnixStream::connect(path)?;
    let mut line = serde_json::to_vec(question)?;
    line.push(b'\n');
    if let Question::Status = question {
        stream.set_read_timeout(Some(STATUS_WITHIN))?;
    }
    stream.write_all(&line)?;
    let mut answer = String::new();
    match std::io::BufReader::new(stream).read_line(&mut answer) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            let why = format!("no answer within {STATUS_WITHIN:?}: is it stopped?");
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        read => read?,
    };
    if answer.is_empty() {
        let why = "it ended before it answered";
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why));
    }
    Ok(serde_json::from_str(&answer)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn desk() -> (Desk, Board) {
        let board = Board::default();
        (Desk::new(&board, Duration::from_secs(30), "train"), board)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn questions_are_answered_and_nonsense_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("made/train.sock");
        let (mut desk, _board) = desk();
        desk.listen(&Handle::current(), &path).unwrap();
        desk.report(|report| report.doing = Doing::Watching);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let asked = path.clone();
        let answer = tokio::task::spawn_blocking(move || ask(&asked, &Question::Status));
        let Answer::Status(report) = answer.await.unwrap().unwrap() else {
            panic!("no report");
        };
        assert_eq!(
            (report.job.as_str(), report.doing),
            ("train", Doing::Watching)
        );

        let raw = |text: &'static str| {
            let path = path.clone();
            tokio::task::spawn_blocking(move || {
                use std::io::{Read, Write};
                let mut stream = std::os::unix::net::UnixStream::connect(path).unwrap();
                stream.write_all(text.as_bytes()).unwrap();
                stream.shutdown(std::net::Shutdown::Write).unwrap();
                let mut answer = String::new();
                stream.read_to_string(&mut answer).unwrap();
                answer
            })
        };
        for nonsense in [
            "",
            "{}\n",
            "status\n",
            "{\"ask\":\"notify\",\"left_seconds\":-1}\n",
        ] {
            let answer = raw(nonsense).await.unwrap();
            assert!(answer.contains("\"error\""), "{nonsense:?}: {answer}");
        }
        // Two cannot supervise one job here.
        let (mut second, _) = self::desk();
        assert!(second.listen(&Handle::current(), &path).is_err());
        drop(desk);
        assert!(!path.exists());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn who_brings_a_notice_hears_the_verdict_that_comes_after_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("train.sock");
        let (mut desk, board) = desk();
        desk.listen(&Handle::current(), &path).unwrap();
        let before = Verdict {
            exit_code: 10,
            ..Verdict::default()
        };
        desk.conclude(0, before);
        let notify = Question::Notify {
            left_seconds: Some(20.0),
        };
        let asking = tokio::task::spawn_blocking(move || ask(&path, &notify));
        let mut changes = board.subscribe();
        changes
            .wait_for(|standing| standing.earliest().is_some())
            .await
            .unwrap();
        let verdict = Verdict {
            image: Some("00000003".to_owned()),
            ..Verdict::default()
        };
        desk.conclude(1, verdict.clone());
        // The job ends of the signal that it has, before anybody has looked.
        desk.conclude_all(Verdict {
            exit_code: 7,
            ..Verdict::default()
        });
        desk.close().await;
        match asking.await.unwrap().unwrap() {
            Answer::Verdict(heard) => assert_eq!(heard, verdict),
            other => panic!("{other:?}"),
        }
    }
}
