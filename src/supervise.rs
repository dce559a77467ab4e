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
mod desk;
mod finding;
mod metrics;
mod process;
mod service;
mod tally;
mod whereabouts;

use std::any::Any;
use std::error::Error;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::sync::{Mutex, mpsc};

use crate::checkpoint::{self, Armed, Then};
use crate::config::{DeadlinePolicy, JobName, Source};
use crate::driver::ProcessState;
use crate::error::{ExitCode, Failure, Phase, one_line};
use crate::image::{Image, ImageError, ImageRef, image_id};
use crate::journal;
use crate::outcome::Outcome;
use crate::ownership::{self, Ownership, OwnershipError, WhileSaved};
use crate::preempt::{Board, Notice, Standing};
use crate::recover::{self, RecoverOptions};
use crate::restore::{self, Wanted};
use crate::resume;
use crate::session::Session;
use crate::store::{Key, PutOutcome, Store, StoreError};
use crate::upkeep;
use crate::writer::{ProcessIdentity, now_ms, random_hex};

pub use desk::{Answer, Doing, Question, Report, Verdict, ask};
pub use finding::Sought;
pub use process::{JobProcess, Status};
pub use tally::Ever;

use arming::{Arming, WarmDriver, gpu_process};
use desk::Desk;
use whereabouts::Whereabouts;

/// Tries to restore one image in one run. What fails twice on a node may do well on another.
const TRIES: u32 = 2;

/// Runs that fail to restore an image before it is called `bad`, and an older one is taken.
const FAILED_RUNS: u32 = 3;

/// A job that ends badly so soon after a restore counts as one that was not restored.
const SETTLES_WITHIN: Duration = Duration::from_secs(10);

/// How long a process may take to die.
const ENDS_WITHIN: Duration = Duration::from_secs(30);

/// What becomes of a notice is written down within this time, or not at all.
const COUNTED_WITHIN: Duration = Duration::from_secs(2);

/// Pause before a save that failed is tried again.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Pause between two looks at a process that comes up.
const LOOK_EVERY: Duration = Duration::from_millis(20);

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
    /// The notice that is being dealt with, as the store knows it.
    noted: Option<tokio::task::JoinHandle<Option<String>>>,
}

impl std::fmt::Debug for Supervisor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Supervisor")
            .field("board", &self.board)
            .finish_non_exhaustive()
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

/// What a save has led to.
enum Saved {
    /// The image is committed, and the process suspended.
    Committed(Box<Outcome>),
    /// The image is committed, and the process is not as it should be.
    Astray(Failure),
    /// There was nothing to save any more.
    JobEnded,
    /// The job runs; the save may be tried again.
    RunsOn(Failure),
    /// The job runs, and another try would not change that.
    Refused(Failure),
    /// The job does not run, and nobody here can do anything about it.
    Stuck(Failure),
}

/// What goes on from one save to the next.
#[derive(Debug)]
struct Watch {
    arming: Arming,
    /// Bytes of GPU memory per second, from the notice to the commit, of the last save.
    rate: Option<f64>,
    /// As many notices were raised when the last one was refused.
    refused: u64,
    /// Not before this moment.
    not_before: Option<Instant>,
    next_interval: Option<Instant>,
    /// Seconds for which the last save in passing kept the job.
    locked_before: Option<f64>,
    /// When it ended.
    last_in_passing: Instant,
    pruning: Option<std::thread::JoinHandle<()>>,
    /// A signal or a notice came: what becomes of the job then tells nothing of its image.
    is_disturbed: bool,
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
            noted: None,
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
        self.must_be_restorable()?;
        self.must_not_run_already()?;
        let opened = self.open_unless_there_is_a_notice();
        if self.session.cancel.is_cancelled() || self.board.standing().earliest().is_some() {
            // Whatever there is in the store is all that there is.
            self.give_up_the_job();
            return Ok(End::NotStarted);
        }
        opened?;
        match self.begin(program, args) {
            Ok((job, from)) => self.watch_over(&job, from.as_ref()),
            Err(failure) => {
                self.give_up_the_job();
                Err(failure)
            }
        }
    }

    fn watch_to_the_end(&mut self, sought: &Sought, wait: Duration) -> Result<End, Failure> {
        self.must_be_restorable()?;
        let Some(job) = self.find(sought, wait)? else {
            return Ok(End::NotStarted);
        };
        self.open_the_job()?;
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

    /// Writes down what became of it, and tells whoever brought it.
    fn tell_verdict(&mut self, verdict: Verdict) {
        if let Some(noted) = self.noted.take() {
            let store = Arc::clone(&self.session.store_for_clean_up);
            let job = &self.session.config.job;
            let telling = async {
                if let Ok(Some(nonce)) = noted.await {
                    tally::over(&*store, job, &nonce, &verdict).await?;
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
        self.desk.conclude(verdict);
    }

    /// Whoever has brought a notice hears what became of it.
    fn conclude(&mut self, ended: Result<End, Failure>) -> Result<End, Failure> {
        self.desk.report(|report| report.doing = Doing::Ended);
        service::end();
        self.tell_verdict(match &ended {
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
        });
        if let Some(path) = &self.session.config.metrics.textfile
            && let Err(error) = metrics::write(path, &self.desk.teller()())
        {
            tracing::warn!("metrics.textfile: {error}");
        }
        self.session.wait(self.desk.close());
        ended
    }

    /// A job that is ended must be restorable from what is in the store.
    fn must_be_restorable(&self) -> Result<(), Failure> {
        let run = &self.session.config.run;
        if !run.restore_command.is_empty() || run.allow_gpu_only {
            return Ok(());
        }
        let why = "an image of GPU memory alone cannot be restored when the job's process is gone: set job.restore_command to a program that comes up suspended, or job.allow_gpu_only = true to have the job saved and not ended";
        Err(Failure::new(ExitCode::Preflight, Phase::Prepare, why))
    }

    /// Everything before the job's start, which may wait for others; a notice ends it.
    fn open_unless_there_is_a_notice(&mut self) -> Result<(), Failure> {
        let (cancel, mut changes) = (self.session.cancel.clone(), self.board.subscribe());
        let cancelling = self.session.runtime.spawn(async move {
            let is_there = changes.wait_for(|standing| standing.earliest().is_some());
            if is_there.await.is_ok() {
                cancel.cancel();
            }
        });
        self.settle();
        let opened = self.open_the_job();
        cancelling.abort();
        opened
    }

    /// An earlier run that was killed has left the job running here.
    fn must_not_run_already(&self) -> Result<(), Failure> {
        let Some(job) = Whereabouts::of(&self.session.config).left_behind() else {
            return Ok(());
        };
        let pid = job.pid;
        let why = format!(
            "process {pid} of this job runs on this node already; where nobody watches over it any more, `ckptstream watch --pid {pid}` takes it over, and to have it restored instead it is to be ended first"
        );
        Err(Failure::new(ExitCode::NotOurs, Phase::Prepare, why))
    }

    /// What earlier runs have left on this node comes first: it may be newer than all that is in the store.
    fn settle(&self) {
        let session = &self.session;
        let options = RecoverOptions::default();
        match recover::recover(session, Some(&session.config.job), options) {
            Ok(recovered) => {
                for row in recovered.targets {
                    tracing::warn!("process {} ({}): {}", row.pid, row.state, row.verdict);
                }
            }
            Err(failure) => tracing::warn!(
                "what earlier runs left on this node is not known: {}",
                one_line(failure.cause.as_ref())
            ),
        }
        if session.config.spill.place.is_none() {
            return;
        }
        match resume::resume(session) {
            Ok(outcome) => tracing::warn!("the sealed save was finished: image {}", outcome.image),
            Err(failure) if failure.code == ExitCode::NothingToSave => {}
            Err(failure) => tracing::warn!(
                "a sealed save was not finished: {}",
                one_line(failure.cause.as_ref())
            ),
        }
    }

    /// Waits for whoever saves the job, then takes it: whoever had it until now is fenced.
    fn open_the_job(&mut self) -> Result<(), Failure> {
        let (store, job) = (&*self.session.store, &self.session.config.job);
        let cancel = &self.session.cancel;
        let opened = self.session.wait(async {
            let log = ownership::wait_for_savers(store, job, WhileSaved::Wait, cancel).await?;
            Ownership::open(store, job, &random_hex::<16>(), log).await
        });
        let ours = opened.map_err(|error| Failure::new(error.code(), Phase::Read, error))?;
        self.session.ours = Some(Arc::new(Mutex::new(ours)));
        Ok(())
    }

    /// Nothing came of it: whoever had the job before may go on.
    fn give_up_the_job(&self) {
        let given_up = self.with_ours(async |ours, store| ours.give_up(store).await);
        if let Some(Err(error)) = given_up {
            tracing::warn!("the job stays opened in its log: {}", one_line(&error));
        }
    }

    /// Something to do with the job's log.
    fn with_ours<T>(&self, deed: impl AsyncFn(&mut Ownership, &dyn Store) -> T) -> Option<T> {
        let ours = self.session.ours.as_ref()?;
        let store = &*self.session.store_for_clean_up;
        Some(self.session.wait(async {
            let mut ours = ours.lock().await;
            deed(&mut ours, store).await
        }))
    }

    /// The job's process: restored where there is an image, which comes with it, started where it is proved that there is none.
    fn begin(
        &self,
        program: &OsString,
        args: &[OsString],
    ) -> Result<(JobProcess, Option<Image>), Failure> {
        let mut tries_left = TRIES;
        loop {
            let Some(image) = self.newest()? else {
                tracing::warn!("starting the job: it has no image");
                let started = JobProcess::start(program, args).map_err(|error| {
                    let why = format!("{} cannot be started: {error}", program.display());
                    Failure::new(ExitCode::Preflight, Phase::Prepare, why)
                });
                return Ok((started?, None));
            };
            let mut failure = match self.restored(&image) {
                Ok(job) => return Ok((job, Some(image))),
                Err(failure) => failure,
            };
            if failure.code != ExitCode::RestoreFailed {
                return Err(failure);
            }
            tries_left -= 1;
            tracing::error!(
                "image {} was not restored: {}",
                image_id(image.generation),
                one_line(failure.cause.as_ref())
            );
            if tries_left == 0 {
                if !self.counts_as_bad(&image, &mut failure) {
                    return Err(failure);
                }
                tries_left = TRIES;
            }
        }
    }

    /// Counts a run that failed to restore an image; what came of that is added to the failure. Whether the image is bad now, which the third run says in the log: then there may be one before it.
    fn counts_as_bad(&self, image: &Image, failure: &mut Failure) -> bool {
        let generation = image.generation;
        let why = one_line(failure.cause.as_ref());
        let counted = self.with_ours(async |ours, store| {
            let job = &self.session.config.job;
            let number = failed_run(store, job, &image.attempt, &why).await?;
            if number < FAILED_RUNS {
                return Ok(number);
            }
            ours.must_be_ours(store).await?;
            ours.call_bad(store, generation).await?;
            Ok::<_, Box<dyn Error + Send + Sync>>(number)
        });
        let id = image_id(generation);
        match counted {
            Some(Ok(FAILED_RUNS)) => {
                tracing::error!(
                    "image {id} failed to restore in {FAILED_RUNS} runs, and is not tried any more"
                );
                return true;
            }
            Some(Ok(number)) => failure.notes.push(format!(
                "image {id} failed to restore in {number} of {FAILED_RUNS} runs; start the job again, on another node if need be"
            )),
            Some(Err(error)) => failure.attached.push(format!(
                "that image {id} failed to restore was not written down: {}",
                one_line(error.as_ref())
            )),
            None => {}
        }
        false
    }

    /// The image that the job goes on from, or the proof that there is none.
    fn newest(&self) -> Result<Option<Image>, Failure> {
        let session = &self.session;
        match restore::open_image(session, ImageRef::Latest) {
            Ok((_, _, Some(sealed))) => {
                Err(Failure::new(ExitCode::RestoreRefused, Phase::Read, sealed))
            }
            Ok((image, ..)) => Ok(Some(image)),
            Err(failure) => match failure.cause.downcast_ref::<ImageError>() {
                Some(ImageError::NoImage { .. }) => Ok(None),
                _ => Err(Failure {
                    code: ExitCode::RestoreRefused,
                    ..failure
                }),
            },
        }
    }

    /// A new process with the image's bytes. On failure there is none.
    fn restored(&self, image: &Image) -> Result<JobProcess, Failure> {
        let refused = |why: String| Failure::new(ExitCode::RestoreRefused, Phase::Read, why);
        let config = &self.session.config;
        let id = image_id(image.generation);
        let Some((program, args)) = config.run.restore_command.split_first() else {
            return Err(refused(format!(
                "image {id} of job {} cannot be restored: set job.restore_command to a program that comes up suspended, or give the job another name to start it afresh",
                config.job
            )));
        };
        tracing::warn!("restoring the job from image {id}");
        self.desk.report(|report| report.doing = Doing::Restoring);
        let args: Vec<OsString> = args.iter().map(OsString::from).collect();
        let job = JobProcess::start(&program.into(), &args).map_err(|error| {
            refused(format!(
                "job.restore_command {program} cannot be started: {error}"
            ))
        })?;
        let restored = self.restore_into(&job);
        if restored.is_err() && !job.end(ENDS_WITHIN) {
            tracing::error!("process {} does not end", job.pid);
        }
        restored.map(|()| job)
    }

    fn restore_into(&self, job: &JobProcess) -> Result<(), Failure> {
        let pid = self.comes_up_suspended(job)?;
        let session = self.session.for_one_transfer(None);
        let _shown = (self.show)(&session);
        let wanted = Wanted {
            image: ImageRef::Latest,
            into_fresh: true,
            started_here: true,
            read_only: false,
            while_saved: WhileSaved::Wait,
        };
        let outcome = restore::restore(&session, pid, wanted)?;
        tracing::warn!(
            "image {} is restored into process {}",
            outcome.image,
            job.pid
        );
        Ok(())
    }

    /// Waits until the process is suspended, and can be given its memory. Its pid, or that of the process with the GPUs that came from it.
    fn comes_up_suspended(&self, job: &JobProcess) -> Result<u32, Failure> {
        let refused = |why: Box<dyn Error + Send + Sync>| {
            Failure::new(ExitCode::RestoreRefused, Phase::Read, why)
        };
        let timeout = self.session.config.run.restore_timeout;
        let until = Instant::now() + timeout;
        let driver = self.driver.open()?;
        loop {
            if let Some(status) = job.status() {
                let why = format!("job.restore_command {status} before it could be restored into");
                return Err(refused(why.into()));
            }
            if let Some(pid) = gpu_process(&driver, job)?
                && matches!(driver.state(pid), Ok(ProcessState::Checkpointed))
            {
                return Ok(pid);
            }
            if Instant::now() >= until {
                let why = format!(
                    "no process of job.restore_command is checkpointed after {timeout:?} (job.restore_timeout)"
                );
                return Err(refused(why.into()));
            }
            std::thread::sleep(LOOK_EVERY);
        }
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
        let mut watch = Watch {
            arming: Arming::new(&self.session, self.driver.clone()),
            rate: None,
            refused: 0,
            not_before: None,
            next_interval: next_interval(),
            locked_before: None,
            last_in_passing: Instant::now(),
            pruning: None,
            is_disturbed: false,
        };
        self.desk.report(|report| report.job_pid = Some(job.pid));
        service::ready();
        loop {
            self.desk.report(|report| report.doing = Doing::Watching);
            match self.next_event(job, &watch) {
                Event::Ended(status) => {
                    let is_settled = restored_at.elapsed() >= SETTLES_WITHIN || watch.is_disturbed;
                    watch.arming.stand_down();
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
                    if watch.arming.tend(job) {
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
                        Saved::RunsOn(failure) => {
                            tell(
                                "the save failed, and the job runs; it is tried again",
                                &failure,
                            );
                            watch.not_before = Some(Instant::now() + TRY_AGAIN_AFTER);
                        }
                        Saved::Refused(failure) => {
                            tell(
                                "the job is not saved, and has the rest of the time for itself",
                                &failure,
                            );
                            watch.refused = raised;
                            job.signal(Signal::TERM);
                            self.tell_verdict(verdict_of(&failure));
                        }
                        Saved::Stuck(failure) => return Err(failure),
                    }
                }
                Event::Interval => {
                    watch.next_interval = next_interval();
                    self.save_in_passing(job, &mut watch)?;
                }
            }
        }
    }

    /// A job that ends badly as soon as it has its memory was not restored: that counts against the image.
    fn did_not_settle(&self, image: &Image, status: Status) -> Failure {
        let id = image_id(image.generation);
        let why = format!(
            "the job {status} within {SETTLES_WITHIN:?} after it was restored from image {id}"
        );
        let mut failure = Failure::new(ExitCode::RestoreFailed, Phase::Unlock, why);
        self.counts_as_bad(image, &mut failure);
        failure
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
        self.session.runtime.block_on(async {
            let notice = async {
                at(not_before.or(Some(Instant::now()))).await;
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
            tokio::select! {
                biased;
                status = job.ended() => Event::Ended(status),
                notice = notice => Event::Notice(notice),
                Some(signal) = for_the_job.recv() => Event::Signal(signal),
                () = at(watch.next_interval) => Event::Interval,
                () = at(Some(watch.arming.next_look())) => Event::Tend,
            }
        })
    }

    /// One save before the node goes away.
    fn save_for(&self, notice: &Notice, job: &JobProcess, watch: &mut Watch) -> Saved {
        self.desk.report(|report| report.doing = Doing::Saving);
        let margin = self.session.config.preempt.margin;
        let mut prepared = match self.prepared(job, watch, notice.due(margin)) {
            Ok(prepared) => prepared,
            Err(failure) => return self.failed(&self.session, job, failure),
        };
        // Another one may have come meanwhile.
        let standing = self.board.standing();
        let deadline = standing.earliest().unwrap_or(notice).due(margin);
        if let Some(failure) = self.does_not_fit(deadline, watch.rate, &prepared) {
            match self.session.config.preempt.policy {
                DeadlinePolicy::Refuse => {
                    prepared.stand_down();
                    return Saved::Refused(failure);
                }
                DeadlinePolicy::Spill => {
                    tell("the save goes to the spill first", &failure);
                    prepared.spill_first();
                }
                DeadlinePolicy::Try => tell("the save is begun all the same", &failure),
            }
        }
        let session = prepared.session().clone();
        let _follows = self.follow_notices(&session);
        let shown = (self.show)(&session);
        let waited = notice.heard_at.elapsed().as_secs_f64();
        let saved = prepared.save(Then::Suspend);
        drop(shown);
        match saved {
            Ok(outcome) => {
                let prepare = outcome.seconds.iter();
                let prepare = prepare.filter(|it| it.phase == Phase::Prepare);
                let prepare: f64 = prepare.map(|it| it.seconds).sum();
                self.desk.report(|report| {
                    report.notice_to_lock_seconds = waited + prepare;
                    report.notice_to_commit_seconds = notice.heard_at.elapsed().as_secs_f64();
                });
                watch.remember(&outcome);
                Saved::Committed(Box::new(outcome))
            }
            Err(failure) => self.failed(&session, job, failure),
        }
    }

    /// The notices that stand are a save's deadline, those that come during it, too; one that is withdrawn leaves the others.
    fn follow_notices(&self, session: &Session) -> Following {
        let mut changes = self.board.subscribe();
        let margin = self.session.config.preempt.margin;
        let following = session.clone();
        let follow = move |standing: &Standing| {
            following.set_deadline(standing.earliest().map(|it| it.due(margin)));
        };
        follow(&changes.borrow_and_update());
        Following(self.session.runtime.spawn(async move {
            while changes.changed().await.is_ok() {
                follow(&changes.borrow_and_update());
            }
        }))
    }

    /// What was prepared, or else is prepared now.
    fn prepared(
        &self,
        job: &JobProcess,
        watch: &mut Watch,
        deadline: Instant,
    ) -> Result<Armed, Failure> {
        let armed = watch.arming.take(deadline);
        let driver = self.driver.open()?;
        // The job may have come by another GPU process since.
        let found = gpu_process(&driver, job);
        match (armed, &found) {
            (Some(armed), Ok(Some(pid))) if armed.pid() == *pid => return Ok(armed),
            (Some(armed), _) => armed.stand_down(),
            (None, _) => {}
        }
        let Some(pid) = found? else {
            let why = "the job uses no GPU, so there is nothing to save";
            return Err(Failure::new(ExitCode::Preflight, Phase::Prepare, why));
        };
        if Instant::now() >= deadline {
            let why = "the node should be gone by now";
            return Err(Failure::new(ExitCode::DoesNotFit, Phase::Prepare, why));
        }
        checkpoint::arm(self.session.for_one_transfer(Some(deadline)), pid)
    }

    /// What a save that failed means.
    fn failed(&self, session: &Session, job: &JobProcess, failure: Failure) -> Saved {
        match failure.code {
            // Its end is on the way to us.
            ExitCode::NothingToSave | ExitCode::RolledBack | ExitCode::Lost
                if job.status().is_some() =>
            {
                Saved::JobEnded
            }
            ExitCode::NothingToSave | ExitCode::RolledBack => Saved::RunsOn(failure),
            ExitCode::Config | ExitCode::Preflight | ExitCode::DoesNotFit => {
                Saved::Refused(failure)
            }
            ExitCode::Spilled => match resume::resume(session) {
                Ok(outcome) => Saved::Committed(Box::new(outcome)),
                Err(_still_sealed) => Saved::Stuck(failure),
            },
            ExitCode::CommittedTargetAstray => Saved::Astray(failure),
            _ => Saved::Stuck(failure),
        }
    }

    /// Why a save will be late, by the rate of the last one.
    fn does_not_fit(&self, deadline: Instant, rate: Option<f64>, armed: &Armed) -> Option<Failure> {
        let rate = rate?;
        let used = armed.used_memory().ok()?;
        let left = deadline.saturating_duration_since(Instant::now());
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let needed = Duration::try_from_secs_f64(used as f64 / rate).unwrap_or(Duration::MAX);
        (needed > left).then(|| {
            let why = format!(
                "{} MiB of GPU memory need {:.1} s at the {:.0} MiB/s of the last save, and {:.1} s are left (preempt.deadline_policy)",
                used >> 20,
                needed.as_secs_f64(),
                rate / f64::from(1 << 20),
                left.as_secs_f64()
            );
            Failure::new(ExitCode::DoesNotFit, Phase::Prepare, why)
        })
    }

    /// A save after which the job goes on.
    fn save_in_passing(&self, job: &JobProcess, watch: &mut Watch) -> Result<(), Failure> {
        if let Some(why) = self.takes_too_much(watch) {
            tracing::warn!("the save in passing is skipped: {why}");
            self.desk.report(|report| report.saves_skipped += 1);
            return Ok(());
        }
        self.desk.report(|report| report.doing = Doing::Saving);
        let long = Instant::now() + Duration::from_secs(3600);
        let saved = match self.prepared(job, watch, long) {
            Ok(prepared) => {
                let session = prepared.session().clone();
                let follows = self.follow_notices(&session);
                let shown = (self.show)(&session);
                let saved = prepared.save(Then::Resume);
                drop((shown, follows));
                saved
            }
            Err(failure) => Err(failure),
        };
        let saved = match saved {
            Ok(outcome) => {
                watch.remember(&outcome);
                watch.locked_before = Some(outcome.seconds_locked);
                watch.last_in_passing = Instant::now();
                self.prune(watch);
                tracing::info!("image {} is committed, and the job runs on", outcome.image);
                Saved::Committed(Box::new(outcome))
            }
            Err(failure) => match failure.code {
                ExitCode::NothingToSave | ExitCode::RolledBack | ExitCode::Lost
                    if job.status().is_some() =>
                {
                    Saved::JobEnded
                }
                ExitCode::RolledBack | ExitCode::Preflight | ExitCode::NothingToSave => {
                    tell("the job was not saved, and runs on", &failure);
                    Saved::RunsOn(failure)
                }
                _ => Saved::Stuck(failure),
            },
        };
        self.count(&saved);
        match saved {
            Saved::Stuck(failure) => Err(failure),
            _ => Ok(()),
        }
    }

    /// Why the next save would take more of the job's time than it may.
    fn takes_too_much(&self, watch: &Watch) -> Option<String> {
        let run = &self.session.config.run;
        let (locked, since) = (watch.locked_before?, watch.last_in_passing.elapsed());
        let share = 100.0 * locked / (since.as_secs_f64() + locked);
        (share > f64::from(run.interval_share)).then(|| {
            format!(
                "the last one kept the job for {locked:.1} s, {:.0} s ago; another one like it would take {share:.0} % of its time, and {} % are allowed (job.interval, job.interval_share)",
                since.as_secs_f64(),
                run.interval_share
            )
        })
    }

    /// Old images go, in the background. What fails is told, and no more.
    fn prune(&self, watch: &mut Watch) {
        if watch
            .pruning
            .as_ref()
            .is_some_and(|thread| !thread.is_finished())
        {
            return;
        }
        let session = self.session.for_one_transfer(None);
        let pruning = std::thread::Builder::new().name("prune".to_owned());
        let pruning = pruning.spawn(move || {
            if let Err(failure) = upkeep::prune(&session, false) {
                let why = one_line(failure.cause.as_ref());
                tracing::warn!("old images were not pruned: {why}");
            }
        });
        watch.pruning = pruning.ok();
    }

    fn count(&self, saved: &Saved) {
        self.desk.report(|report| match saved {
            Saved::Committed(outcome) => {
                report.saves_committed += 1;
                report.seconds_locked += outcome.seconds_locked;
                report.bytes_raw += outcome.bytes.raw;
                report.bytes_stored += outcome.bytes.stored;
                report.retries += outcome.retries;
                report.image = Some(outcome.image.clone());
                report.last_failure = None;
            }
            Saved::RunsOn(failure)
            | Saved::Refused(failure)
            | Saved::Astray(failure)
            | Saved::Stuck(failure) => {
                report.saves_failed += 1;
                report.last_failure = Some(one_line(failure.cause.as_ref()));
            }
            Saved::JobEnded => {}
        });
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
        if self.session.config.run.restore_command.is_empty() {
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
        let can_be_restored = !self.session.config.run.restore_command.is_empty();
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

/// Ends with the save.
struct Following(tokio::task::JoinHandle<()>);

impl Drop for Following {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Watch {
    fn remember(&mut self, outcome: &Outcome) {
        // What comes after the commit is not on the way of a save.
        let until_commit = outcome.seconds.iter();
        let until_commit =
            until_commit.take_while(|it| !matches!(it.phase, Phase::Complete | Phase::Restore));
        let seconds: f64 = until_commit.map(|it| it.seconds).sum();
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let raw = outcome.bytes.raw as f64;
        if raw > 0.0 && seconds > 0.0 {
            self.rate = Some(raw / seconds);
        }
    }
}

/// Notes beside an image that a run failed to restore it. Which run it is, from 1 to [`FAILED_RUNS`].
async fn failed_run(
    store: &dyn Store,
    job: &JobName,
    attempt: &str,
    why: &str,
) -> Result<u32, Box<dyn Error + Send + Sync>> {
    for number in 1..FAILED_RUNS {
        let relative = format!("data/{attempt}/restore-failed-{number}.json");
        let key = Key::of_job(job, &relative)?;
        let note = serde_json::json!({
            "why": why,
            "by": ProcessIdentity::ours()?,
            "created_ms": now_ms(),
        });
        let put = store.put_if_absent(&key, note.to_string().into());
        if put.await? == PutOutcome::Created {
            return Ok(number);
        }
    }
    Ok(FAILED_RUNS)
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
