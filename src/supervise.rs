//! The story of a supervised job: settle this node → restore it or start it → watch → save → end.
//!
//! In: a command, or a process that runs already; notices; the job's log. Out: the job's own end, or a committed image and the job ended. What exists if we die, or fail, at each step:
//!
//! | step | the job | exit |
//! |---|---|---|
//! | settle, wait for another writer, open | not started | 200 + 2, 3, 4 or 10 |
//! | choose: it is not proved that there is no image, or it cannot be restored | not started | 200 + 20 |
//! | restore | its new process is ended; the image stays, and is `bad` after three runs | 200 + 21 |
//! | watch | runs; it goes on without us if we are killed | its own |
//! | a notice, and the save does not fit, or is refused | runs, and has the signal | its own |
//! | a save that failed before BEGIN, or was given back | runs; tried again while there is time | its own |
//! | a save that failed after BEGIN | as the save says; it is not ended | 200 + 11 to 15 |
//! | committed | ended; started again elsewhere by whoever reads `job.requeue_exit_code` | that |
//!
//! The job is started afresh only on proof that there is no image, or that it finished. It is ended only after the commit of an image that can be restored without it.

mod arming;
mod begin;
mod desk;
mod drill;
mod finding;
mod lookout;
mod metrics;
mod process;
mod saving;
mod service;
mod tally;
mod whereabouts;

use std::any::Any;
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::checkpoint::{self, Asked};
use crate::config::Source;
use crate::error::{ExitCode, Failure, Phase, one_line};
use crate::image::{Image, image_id};
use crate::journal;
use crate::outcome::Outcome;
use crate::ownership::{Ownership, OwnershipError};
use crate::preempt::{Board, Notice};
use crate::session::Session;
use crate::store::{Store, StoreError};

pub use desk::{Answer, Doing, Question, Report, Verdict, ask};
pub use finding::Sought;
pub use process::{JobProcess, Status};
pub use service::Ready;
pub use tally::Ever;

use arming::{Arming, WarmDriver};
use desk::Desk;
use lookout::Lookout;
use saving::Saved;
use whereabouts::Whereabouts;

/// A job that ends badly so soon after a restore counts as one that was not restored.
const SETTLES_WITHIN: Duration = Duration::from_secs(10);

/// How long a process may take to die.
const ENDS_WITHIN: Duration = Duration::from_secs(30);

/// What becomes of a notice is written down within this time, or not at all.
const COUNTED_WITHIN: Duration = Duration::from_secs(2);

/// What is done on the side is waited for at the end, within reason.
const ON_THE_SIDE_ENDS_WITHIN: Duration = Duration::from_secs(5);

/// What is to be said in the job's log is said within this time, and within what a notice leaves, but not in less than the least.
const LOGGED_WITHIN: Duration = Duration::from_secs(30);
const LOGGED_WITHIN_LEAST: Duration = Duration::from_secs(2);

/// Pause before a save that failed is tried again.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// How a supervised job ended.
#[derive(Debug)]
pub enum End {
    /// By itself.
    Job(Status),
    /// It was saved as this image, and then ended.
    Saved(String),
    /// A notice came before it was started, or found.
    NotStarted,
}

/// What a supervision works with.
pub struct Supervisor<'a> {
    /// Its signals end nothing but what comes before the job.
    session: Session,
    /// Where the notices are.
    board: Board,
    /// Signals that the job is to have.
    for_the_job: mpsc::UnboundedReceiver<Signal>,
    /// Shows a transfer's progress as long as what it returns lives.
    show: &'a dyn Fn(&Session) -> Box<dyn Any>,
    desk: Desk,
    driver: WarmDriver,
    /// Held by every thread that does something on the side; nothing ends before them.
    on_the_side: Arc<()>,
    /// They are to end.
    ending: CancellationToken,
    /// The notice that is being dealt with, as the store knows it.
    noted: Option<JoinHandle<Option<String>>>,
    /// Saves are of the job's whole tree.
    whole: bool,
    /// Who hears that the job runs.
    ready: Option<Ready>,
}

impl std::fmt::Debug for Supervisor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Supervisor")
            .field("board", &self.board)
            .finish_non_exhaustive()
    }
}

/// Something of the runtime's that ends when this does.
#[derive(Debug)]
struct UnderWay(JoinHandle<()>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What happens to a job that is watched.
enum Event {
    Ended(Status),
    Signal(Signal),
    Notice(Notice),
    /// It is time for a save without a notice.
    Interval,
    /// It is time to look after what is prepared.
    Tend,
}

/// Why nothing is prepared where saves are of whole trees.
const NOT_ARMED_WHOLE: &str = "the whole tree is saved, which is prepared at the notice";

/// What goes on from one save to the next.
#[derive(Debug)]
struct Watch {
    arming: Arming,
    /// Bytes of GPU memory per second, from the notice to the commit, of the last save.
    rate: Option<f64>,
    /// Bytes of the last save.
    saved: Option<u64>,
    /// Times that a save was refused for this notice, for a reason that may pass.
    refusals: u32,
    /// As many notices were raised when the last one was refused.
    refused: u64,
    /// Not before this moment.
    not_before: Option<Instant>,
    next_interval: Option<Instant>,
    /// Seconds for which the last save in passing kept the job.
    locked_before: Option<f64>,
    /// When it ended.
    last_in_passing: Instant,
    /// Under way after a save in passing.
    upkeep: Option<std::thread::JoinHandle<()>>,
    /// A signal or a notice came: what becomes of the job then tells nothing of its image.
    is_disturbed: bool,
}

impl Watch {
    fn new(arming: Arming, next_interval: Option<Instant>) -> Self {
        Self {
            arming,
            rate: None,
            saved: None,
            refusals: 0,
            refused: 0,
            not_before: None,
            next_interval,
            locked_before: None,
            last_in_passing: Instant::now(),
            upkeep: None,
            is_disturbed: false,
        }
    }
}

impl<'a> Supervisor<'a> {
    /// Makes everything ready, and listens (`preempt.socket`) where that is wanted.
    ///
    /// # Errors
    /// Exit 3 when the socket cannot be made: nobody could bring a notice.
    pub fn new(
        session: Session,
        board: Board,
        for_the_job: mpsc::UnboundedReceiver<Signal>,
        show: &'a dyn Fn(&Session) -> Box<dyn Any>,
        ready: Option<Ready>,
    ) -> Result<Self, Failure> {
        // Every save needs it, and it is too late to say so at the notice.
        journal::make_dir(&session.config.state_dir())
            .map_err(|error| Failure::new(ExitCode::Preflight, Phase::Prepare, error))?;
        let preempt = &session.config.preempt;
        let mut desk = Desk::new(&board, preempt.notice, session.config.job.as_str());
        if preempt.sources.contains(&Source::Socket) {
            let path = session.config.socket();
            desk.listen(&session.runtime, &path).map_err(|error| {
                let why = format!("{} (preempt.socket): {error}", path.display());
                let code = match error.kind() {
                    std::io::ErrorKind::AddrInUse => ExitCode::NotOurs,
                    _ => ExitCode::Preflight,
                };
                Failure::new(code, Phase::Prepare, why)
            })?;
        }
        let told = &session.config.metrics;
        if let Some(address) = told.listen
            && let Err(error) = metrics::serve(&session.runtime, address, &desk)
        {
            tracing::error!("metrics.listen = {address}: {error}");
        }
        if let Some(path) = &told.textfile {
            metrics::write_now_and_then(&session.runtime, path, &desk);
        }
        service::begin(&session.runtime);
        let supervisor = Self {
            session,
            board,
            for_the_job,
            show,
            desk,
            driver: WarmDriver::warm_up(),
            on_the_side: Arc::default(),
            ending: CancellationToken::new(),
            noted: None,
            whole: false,
            ready,
        };
        supervisor.count_what_was_before();
        Ok(supervisor)
    }

    /// Starts the job, or restores it, and stays with it until it ends.
    ///
    /// # Errors
    /// A [`Failure`] with the code of PROTOCOL section 6, of whatever kept us from doing one or the other.
    pub fn run(mut self, program: &OsString, args: &[OsString]) -> Result<End, Failure> {
        let ended = self.run_to_the_end(program, args);
        self.conclude(ended)
    }

    /// Stays with a job that runs already, or comes up within this time.
    ///
    /// # Errors
    /// As [`Supervisor::run`].
    pub fn watch(mut self, sought: &Sought, wait: Duration) -> Result<End, Failure> {
        let ended = self.watch_to_the_end(sought, wait);
        self.conclude(ended)
    }

    fn run_to_the_end(&mut self, program: &OsString, args: &[OsString]) -> Result<End, Failure> {
        self.whole = checkpoint::saves_whole_trees(&self.session.config, Asked::ForAJob);
        self.must_be_restorable()?;
        self.must_not_run_already()?;
        match self.begin(program, args) {
            Ok((job, from)) => self.watch_over(&job, from.as_ref()),
            Err(failure) => {
                self.give_up_the_job();
                if self.must_not_begin() {
                    // Whatever there is in the store is all that there is.
                    tracing::info!("not started: {}", one_line(failure.cause.as_ref()));
                    return Ok(End::NotStarted);
                }
                Err(failure)
            }
        }
    }

    fn watch_to_the_end(&mut self, sought: &Sought, wait: Duration) -> Result<End, Failure> {
        self.whole = checkpoint::saves_whole_trees(&self.session.config, Asked::ForAJob);
        self.must_be_restorable()?;
        let Some(job) = self.find(sought, wait)? else {
            return Ok(End::NotStarted);
        };
        self.take_the_job()?;
        self.watch_over(&job, None)
    }

    /// In the background: the store has the counts of earlier lives.
    fn count_what_was_before(&self) {
        let store = Arc::clone(&self.session.store_for_clean_up);
        let (job, reporter) = (self.session.config.job.clone(), self.desk.reporter());
        self.session.runtime.spawn(async move {
            match tally::ever(&*store, &job).await {
                Ok(ever) => reporter.send_modify(|report| report.ever = ever),
                Err(error) => {
                    tracing::debug!("earlier notices are not known: {}", one_line(&error))
                }
            }
        });
    }

    /// Writes down that there is a notice, beside its save.
    fn note(&mut self, notice: &Notice) {
        if self.noted.is_some() {
            return;
        }
        let store = Arc::clone(&self.session.store_for_clean_up);
        let (job, notice) = (self.session.config.job.clone(), notice.clone());
        self.noted = Some(self.session.runtime.spawn(async move {
            let heard = tally::heard(&*store, &job, &notice).await;
            heard
                .inspect_err(|error| {
                    tracing::warn!("the notice is not counted: {}", one_line(error))
                })
                .ok()
        }));
    }

    /// Writes down what became of it.
    fn write_verdict(&mut self, verdict: &Verdict) {
        if let Some(noted) = self.noted.take() {
            let store = Arc::clone(&self.session.store_for_clean_up);
            let job = &self.session.config.job;
            let telling = async {
                if let Ok(Some(nonce)) = noted.await {
                    tally::over(&*store, job, &nonce, verdict).await?;
                }
                Ok::<_, StoreError>(())
            };
            let told = self
                .session
                .wait(async { tokio::time::timeout(COUNTED_WITHIN, telling).await });
            if !matches!(told, Ok(Ok(()))) {
                tracing::warn!("what became of the notice is not counted");
            }
        }
    }

    /// Whoever has brought a notice hears what became of it.
    fn conclude(&mut self, ended: Result<End, Failure>) -> Result<End, Failure> {
        self.desk.report(|report| report.doing = Doing::Ended);
        service::end();
        let verdict = match &ended {
            Ok(End::Saved(image)) => Verdict {
                image: Some(image.clone()),
                ..Verdict::default()
            },
            Ok(End::NotStarted) => Verdict {
                exit_code: ExitCode::NothingToSave.code(),
                cause: vec!["the job was not started".to_owned()],
                ..Verdict::default()
            },
            Ok(End::Job(status)) => Verdict {
                exit_code: ExitCode::NothingToSave.code(),
                cause: vec![format!("the job {status}")],
                ..Verdict::default()
            },
            Err(failure) => verdict_of(failure),
        };
        self.write_verdict(&verdict);
        self.desk.conclude_all(verdict);
        if let Some(path) = &self.session.config.metrics.textfile
            && let Err(error) = metrics::write(path, &self.desk.teller()())
        {
            tracing::warn!("metrics.textfile: {error}");
        }
        self.session.wait(self.desk.close());
        self.end_what_is_on_the_side();
        ended
    }

    /// What is prepared or looked after in the background needs the network, which ends with us.
    fn end_what_is_on_the_side(&self) {
        self.ending.cancel();
        let until = Instant::now() + ON_THE_SIDE_ENDS_WITHIN;
        while Arc::strong_count(&self.on_the_side) > 1 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A job that is ended must be restorable from what is in the store.
    fn must_be_restorable(&self) -> Result<(), Failure> {
        let run = &self.session.config.run;
        if self.whole || !run.restore_command.is_empty() || run.allow_gpu_only {
            return Ok(());
        }
        let why = "an image of GPU memory alone cannot be restored when the job's process is gone: install CRIU 4.1 or newer (host.criu), so that the whole tree is saved, or set job.restore_command to a program that comes up suspended, or job.allow_gpu_only = true to have the job saved and not ended";
        Err(Failure::new(ExitCode::Preflight, Phase::Prepare, why))
    }

    /// Nothing came of it: whoever had the job before may go on.
    fn give_up_the_job(&self) {
        let given_up = self.with_ours(async |ours, store| ours.give_up(store).await);
        if let Some(Err(error)) = given_up {
            tracing::warn!("the job stays opened in its log: {}", one_line(&error));
        }
    }

    /// Something to do with the job's log. `None` where the job is not ours, or where the store did not answer in time, which is told.
    fn with_ours<T>(&self, deed: impl AsyncFn(&mut Ownership, &dyn Store) -> T) -> Option<T> {
        let ours = self.session.ours.as_ref()?;
        let store = &*self.session.store_for_clean_up;
        // Whoever waits for us does not wait for a store that does not answer.
        let notice = self.board.standing();
        let left = notice.earliest().map_or(LOGGED_WITHIN, |notice| {
            notice.gone_at.saturating_duration_since(Instant::now())
        });
        let limit = left.clamp(LOGGED_WITHIN_LEAST, LOGGED_WITHIN);
        let doing = async {
            let mut ours = ours.lock().await;
            deed(&mut ours, store).await
        };
        let done = self
            .session
            .wait(async { tokio::time::timeout(limit, doing).await });
        if done.is_err() {
            tracing::warn!("the job's log does not have our word: no answer within {limit:.1?}");
        }
        done.ok()
    }

    fn watch_over(&mut self, job: &JobProcess, from: Option<&Image>) -> Result<End, Failure> {
        let whereabouts = Whereabouts::of(&self.session.config);
        whereabouts.note(job.pid);
        let ended = self.watch_until_the_end(job, from);
        // A job that was left as it is stays where it is.
        if job.status().is_some() || ended.is_ok() {
            whereabouts.forget();
        }
        ended
    }

    fn watch_until_the_end(
        &mut self,
        job: &JobProcess,
        from: Option<&Image>,
    ) -> Result<End, Failure> {
        let restored_at = Instant::now();
        let interval = self.session.config.run.interval;
        let next_interval = move || interval.map(|interval| Instant::now() + interval);
        let arming = Arming::new(&self.session, self.driver.clone(), &self.on_the_side);
        let mut watch = Watch::new(arming, next_interval());
        let lookout = Lookout::begin(&self.session, self.desk.reporter());
        let whole = self.whole;
        self.desk.report(|report| {
            report.job_pid = Some(job.pid);
            report.not_armed = whole.then(|| NOT_ARMED_WHOLE.to_owned());
        });
        service::ready(self.ready.take());
        loop {
            self.desk.report(|report| report.doing = Doing::Watching);
            match self.next_event(job, &watch) {
                Event::Ended(status) => {
                    let is_settled = restored_at.elapsed() >= SETTLES_WITHIN || watch.is_disturbed;
                    watch.arming.stand_down_at_once();
                    let from = from.filter(|_| !is_settled);
                    return match (from, status) {
                        (Some(image), Status::Exited(1..) | Status::Signalled(_)) => {
                            Err(self.did_not_settle(image, status))
                        }
                        _ => Ok(self.ended_by_itself(status)),
                    };
                }
                Event::Signal(signal) => {
                    watch.is_disturbed = true;
                    job.signal(signal);
                }
                Event::Tend => {
                    if self.whole {
                        continue;
                    }
                    if watch.arming.tend(job, lookout.sees_the_store()) {
                        self.tell_of(&watch.arming);
                    }
                }
                Event::Notice(notice) => {
                    let raised = self.board.standing().raised();
                    self.note(&notice);
                    watch.is_disturbed = true;
                    let saved = self.save_for(&notice, job, &mut watch);
                    self.count(&saved);
                    match saved {
                        Saved::Committed(outcome) => return self.end(job, &outcome),
                        Saved::Astray(failure) => return self.end_astray(job, failure),
                        Saved::JobEnded => {
                            let status = self.session.wait(job.ended());
                            return Ok(self.ended_by_itself(status));
                        }
                        Saved::RunsOn(failure) if self.may_try_again(&notice) => {
                            tell(
                                "the save failed, and the job runs; it is tried again",
                                &failure,
                            );
                            watch.not_before = Some(Instant::now() + TRY_AGAIN_AFTER);
                        }
                        Saved::Refused(failure) | Saved::RunsOn(failure) => {
                            tell(
                                "the job is not saved, and has the rest of the time for itself",
                                &failure,
                            );
                            watch.refused = raised;
                            job.signal(Signal::TERM);
                            let verdict = verdict_of(&failure);
                            self.write_verdict(&verdict);
                            self.desk.conclude(raised, verdict);
                        }
                        Saved::Stuck(failure) => return Err(failure),
                    }
                }
                Event::Interval => {
                    watch.next_interval = next_interval();
                    let Some(saved) = self.save_in_passing(job, &mut watch) else {
                        continue;
                    };
                    self.count(&saved);
                    match saved {
                        Saved::Committed(outcome) if is_suspended(&outcome) => {
                            return self.end(job, &outcome);
                        }
                        Saved::Committed(outcome) => tracing::info!(
                            "image {} is committed, and the job runs on",
                            outcome.image
                        ),
                        Saved::JobEnded => {}
                        Saved::RunsOn(failure) | Saved::Refused(failure) => {
                            tell("the job was not saved, and runs on", &failure);
                        }
                        Saved::Astray(failure) => return self.end_astray(job, failure),
                        Saved::Stuck(failure) => return Err(failure),
                    }
                }
            }
        }
    }

    /// There is time for another save.
    fn may_try_again(&self, notice: &Notice) -> bool {
        Instant::now() + TRY_AGAIN_AFTER < self.due(notice)
    }

    /// When a save for this notice has to be over, by those that stand now.
    fn due(&self, notice: &Notice) -> Instant {
        let standing = self.board.standing();
        let notice = standing.earliest().unwrap_or(notice);
        notice.due(self.session.config.preempt.margin)
    }

    fn tell_of(&self, arming: &Arming) {
        let bytes = arming.memory_planned();
        if let Some(bytes) = bytes {
            tracing::info!(
                "a save is prepared, and holds {} MiB of host memory",
                bytes >> 20
            );
        }
        self.desk.report(|report| {
            report.armed = bytes.is_some();
            report.armed_bytes = bytes.unwrap_or(0);
            report.not_armed = arming.why_not().map(str::to_owned);
            report.drill = arming.drilled().map(str::to_owned);
        });
    }

    /// Waits for what comes next.
    fn next_event(&mut self, job: &JobProcess, watch: &Watch) -> Event {
        let mut changes = self.board.subscribe();
        let for_the_job = &mut self.for_the_job;
        let at = |moment: Option<Instant>| async move {
            match moment {
                Some(moment) => tokio::time::sleep_until(moment.into()).await,
                None => std::future::pending().await,
            }
        };
        let (refused, not_before) = (watch.refused, watch.not_before);
        let mut withdrawals = self.board.subscribe();
        self.session.runtime.block_on(async {
            let notice = async {
                // Without a timer where none is needed: one that is due now comes later than one that was due before, and a notice would wait behind every save in passing.
                if not_before.is_some_and(|moment| moment > Instant::now()) {
                    at(not_before).await;
                }
                loop {
                    let standing = changes.borrow_and_update().clone();
                    if standing.raised() > refused
                        && let Some(notice) = standing.earliest()
                    {
                        return notice.clone();
                    }
                    if changes.changed().await.is_err() {
                        std::future::pending::<()>().await;
                    }
                }
            };
            // Whoever has been told that the node goes away is not saved in passing: the job has the time for itself.
            let interval = async {
                at(watch.next_interval).await;
                while withdrawals.borrow_and_update().earliest().is_some() {
                    if withdrawals.changed().await.is_err() {
                        std::future::pending::<()>().await;
                    }
                }
            };
            tokio::select! {
                biased;
                status = job.ended() => Event::Ended(status),
                notice = notice => Event::Notice(notice),
                Some(signal) = for_the_job.recv() => Event::Signal(signal),
                () = interval => Event::Interval,
                () = at(Some(watch.arming.next_look())) => Event::Tend,
            }
        })
    }

    fn ended_by_itself(&self, status: Status) -> End {
        self.finished(status);
        End::Job(status)
    }

    /// The image is committed: the job's process is not needed any more, if the image can be restored without it.
    fn end(&self, job: &JobProcess, outcome: &Outcome) -> Result<End, Failure> {
        let astray = |code: ExitCode, why: String| Failure {
            generation: Some(outcome.generation),
            targets: outcome.targets.clone(),
            ..Failure::new(code, Phase::Complete, why)
        };
        let (image, pid) = (&outcome.image, job.pid);
        if !self.whole && self.session.config.run.restore_command.is_empty() {
            let why = format!(
                "image {image} is committed, and the job's host memory is in process {pid} alone, which stays suspended (job.allow_gpu_only)"
            );
            return Err(astray(ExitCode::HostMemoryNotSaved, why));
        }
        if !job.end(ENDS_WITHIN) {
            let why = format!("image {image} is committed, and process {pid} does not end");
            return Err(astray(ExitCode::CommittedTargetAstray, why));
        }
        Ok(End::Saved(image.clone()))
    }

    /// The image is committed, and the driver did not do its last step, or the process is gone.
    fn end_astray(&self, job: &JobProcess, failure: Failure) -> Result<End, Failure> {
        let can_be_restored = self.whole || !self.session.config.run.restore_command.is_empty();
        match failure.generation {
            Some(generation) if can_be_restored && job.end(ENDS_WITHIN) => {
                tell("the image is committed, and the job was ended", &failure);
                Ok(End::Saved(image_id(generation)))
            }
            _ => Err(failure),
        }
    }

    /// The job ended by itself. One that a signal ended may be wanted back.
    fn finished(&self, status: Status) {
        let Status::Exited(code) = status else {
            tracing::warn!("the job {status}; its images stay what they are");
            return;
        };
        let told = self.with_ours(async |ours, store| {
            ours.must_be_ours(store).await?;
            ours.finish(store, Some(code)).await
        });
        match told {
            Some(Err(OwnershipError::Fenced { what, .. })) => {
                tracing::warn!("the job {status} here, and lives elsewhere: {what}");
            }
            Some(Err(error)) => tracing::error!(
                "the job {status}, and its log does not say so: {}",
                one_line(&error)
            ),
            _ => {}
        }
    }
}

/// It was saved in passing, and a notice came before it could run on.
fn is_suspended(outcome: &Outcome) -> bool {
    outcome
        .targets
        .iter()
        .all(|target| target.state == "checkpointed")
}

/// Replaces a file: a reader sees the old one or the new one.
fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    std::fs::write(&new, text)?;
    std::fs::rename(&new, path)
}

fn verdict_of(failure: &Failure) -> Verdict {
    Verdict {
        exit_code: failure.code.code(),
        phase: Some(failure.phase),
        image: failure.generation.map(image_id),
        cause: failure.cause_chain(),
    }
}

fn tell(what: &str, failure: &Failure) {
    tracing::error!(
        "{what} (exit {}): {}",
        failure.code.code(),
        one_line(failure.cause.as_ref())
    );
}
