//! How a supervised job comes to run: this node is settled → the job is opened → restored where it has an image, started where it is proved that there is none.
//!
//! In: a command; what earlier runs left on this node and in the store. Out: the job's process. What can fail: the store, another writer, the image, the command. A notice ends all of it, even a restore halfway: what the store has stays what it is.

use std::error::Error;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use super::arming::gpu_process;
use super::process::{JobProcess, Status};
use super::saving::finish_sealed;
use super::whereabouts::Whereabouts;
use super::{Doing, ENDS_WITHIN, SETTLES_WITHIN, Supervisor, UnderWay};
use crate::config::JobName;
use crate::driver::ProcessState;
use crate::error::{ExitCode, Failure, Phase, one_line};
use crate::image::{Image, ImageError, ImageRef, image_id};
use crate::manifest::ImageKind;
use crate::ownership::{self, Ownership, WhileSaved};
use crate::recover::{self, RecoverOptions};
use crate::restore::{self, Streams, Wanted};
use crate::session::Session;
use crate::store::{Key, PutOutcome, Store};
use crate::writer::{ProcessIdentity, now_ms, random_hex};

/// Tries to restore one image in one run. What fails twice on a node may do well on another.
const TRIES: u32 = 2;

/// Runs that fail to restore an image before it is called `bad`, and an older one is taken.
const FAILED_RUNS: u32 = 3;

/// Pause between two looks at a process that comes up.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The job's next life.
const NEWEST: Wanted = Wanted {
    image: ImageRef::Latest,
    into_fresh: true,
    started_here: false,
    read_only: false,
    while_saved: WhileSaved::Wait,
};

impl Supervisor<'_> {
    /// The job's process, and the image that it comes from, if it does.
    ///
    /// # Errors
    /// The job does not run. If [`Supervisor::must_not_begin`] says so, that is why.
    pub(super) fn begin(
        &mut self,
        program: &OsString,
        args: &[OsString],
    ) -> Result<(JobProcess, Option<Image>), Failure> {
        let cancel = self.session.cancel.clone();
        let _ends = self.at_a_notice(move || cancel.cancel());
        self.settle();
        self.open_the_job(&self.session.clone(), WhileSaved::Wait)?;
        self.restored_or_started(program, args)
    }

    /// The node goes away.
    pub(super) fn must_not_begin(&self) -> bool {
        self.session.cancel.is_cancelled() || self.board.standing().earliest().is_some()
    }

    /// Does this at a notice, as long as what it returns lives.
    fn at_a_notice(&self, then: impl FnOnce() + Send + 'static) -> UnderWay {
        let mut changes = self.board.subscribe();
        UnderWay(self.session.runtime.spawn(async move {
            let is_there = changes.wait_for(|standing| standing.earliest().is_some());
            if is_there.await.is_ok() {
                then();
            }
        }))
    }

    fn check_notices(&self) -> Result<(), Failure> {
        let interrupted = |error| Failure::new(ExitCode::RolledBack, Phase::Read, error);
        self.session.check_cancelled().map_err(interrupted)
    }

    /// An earlier run that was killed has left the job running here.
    pub(super) fn must_not_run_already(&self) -> Result<(), Failure> {
        let whereabouts = Whereabouts::of(&self.session.config);
        let refused = |why: String| Err(Failure::new(ExitCode::NotOurs, Phase::Prepare, why));
        let pid = match whereabouts.left_behind() {
            Ok(None) => return Ok(()),
            Ok(Some(job)) => job.pid,
            Err(error) => {
                return refused(format!(
                    "whether a process of this job runs on this node already is not known: {}: {error}; remove the file if none does",
                    whereabouts.path().display()
                ));
            }
        };
        let why = format!(
            "process {pid} of this job runs on this node already; where nobody watches over it any more, `ckptstream watch --pid {pid}` takes it over, and to have it restored instead it is to be ended first"
        );
        refused(why)
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
        finish_sealed(session);
    }

    /// Takes a job that runs already. A notice that comes while somebody else is waited for ends the waiting: then there is no time for it.
    pub(super) fn take_the_job(&mut self) -> Result<(), Failure> {
        let waiting = self.session.for_one_transfer(None);
        let cancel = waiting.cancel.clone();
        let ends = self.at_a_notice(move || cancel.cancel());
        let opened = self.open_the_job(&waiting, WhileSaved::Wait);
        drop(ends);
        match (opened, self.board.standing().earliest()) {
            (Err(_waited_for_nothing), Some(notice)) => {
                let due = notice.due(self.session.config.preempt.margin);
                let hurrying = self.session.for_one_transfer(Some(due));
                self.open_the_job(&hurrying, WhileSaved::TakeOver)
            }
            (opened, _) => opened,
        }
    }

    /// Deals with whoever saves the job as is wanted, then takes it: whoever had it until now is fenced.
    fn open_the_job(&mut self, session: &Session, while_saved: WhileSaved) -> Result<(), Failure> {
        let (store, job) = (&*session.store, &session.config.job);
        let cancel = &session.cancel;
        let opened = session.wait(async {
            let log = ownership::wait_for_savers(store, job, while_saved, cancel).await?;
            ownership::must_begin_in_order(session, &log).await?;
            Ownership::open(store, job, &random_hex::<16>(), log).await
        });
        let ours = opened.map_err(|error| Failure::new(error.code(), Phase::Read, error))?;
        self.session.ours = Some(Arc::new(Mutex::new(ours)));
        Ok(())
    }

    /// Restored where there is an image, which comes with it, started where it is proved that there is none.
    fn restored_or_started(
        &self,
        program: &OsString,
        args: &[OsString],
    ) -> Result<(JobProcess, Option<Image>), Failure> {
        let mut tries_left = TRIES;
        loop {
            let newest = self.newest()?;
            self.check_notices()?;
            let Some(image) = newest else {
                tracing::warn!("starting the job: it has no image");
                let started = match self.whole {
                    true => JobProcess::start_tree(program, args),
                    false => JobProcess::start(program, args),
                };
                let started = started.map_err(|error| {
                    let why = format!("{} cannot be started: {error}", program.display());
                    Failure::new(ExitCode::Preflight, Phase::Prepare, why)
                });
                return Ok((started?, None));
            };
            let mut failure = match self.restored(&image) {
                Ok(job) => return Ok((job, Some(image))),
                Err(failure) => failure,
            };
            // What a notice has ended tells nothing of the image.
            if failure.code != ExitCode::RestoreFailed || self.must_not_begin() {
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
        if image.manifest.kind == ImageKind::Whole {
            return self.restored_tree(image);
        }
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
        // It may run before we know of it, and it may be us who die.
        let whereabouts = Whereabouts::of(config);
        whereabouts.note(job.pid);
        let restored = self.restore_into(&job);
        if restored.is_err() {
            match job.end(ENDS_WITHIN) {
                true => whereabouts.forget(),
                false => tracing::error!("process {} does not end", job.pid),
            }
        }
        restored.map(|()| job)
    }

    /// The whole tree of an image, with the pids that it had. On failure there is none.
    fn restored_tree(&self, image: &Image) -> Result<JobProcess, Failure> {
        let id = image_id(image.generation);
        tracing::warn!("restoring the job, and its whole tree, from image {id}");
        self.desk.report(|report| report.doing = Doing::Restoring);
        let failed = |error| Failure::new(ExitCode::RestoreRefused, Phase::Restore, error);
        let program = std::env::current_exe().map_err(failed)?;
        let session = self.session.for_one_transfer(None);
        let _ends = self.ends_at_a_notice(&session);
        let _shown = (self.show)(&session);
        let (outcome, tree) = restore::restore_tree(&session, NEWEST, &program, Streams::Ours)?;
        let job = JobProcess::restored_tree(tree).map_err(failed)?;
        Whereabouts::of(&self.session.config).note(job.pid);
        tracing::warn!(
            "image {} is restored, the root of its tree is process {}",
            outcome.image,
            job.tree_root()
        );
        Ok(job)
    }

    /// A notice ends this restore.
    fn ends_at_a_notice(&self, session: &Session) -> UnderWay {
        let ended = session.clone();
        self.at_a_notice(move || {
            ended.cancel.cancel();
            // What the driver has begun is not waited for either: the process is of no use any more.
            ended.set_deadline(Some(Instant::now()));
        })
    }

    fn restore_into(&self, job: &JobProcess) -> Result<(), Failure> {
        let pid = self.comes_up_suspended(job)?;
        let session = self.session.for_one_transfer(None);
        let _ends = self.ends_at_a_notice(&session);
        let _shown = (self.show)(&session);
        let wanted = Wanted {
            started_here: true,
            ..NEWEST
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
            self.check_notices()?;
            if let Some(status) = job.status() {
                let why = format!("job.restore_command {status} before it could be restored into");
                return Err(refused(why.into()));
            }
            match gpu_process(&driver, job) {
                Ok(Some(pid)) if matches!(driver.state(pid), Ok(ProcessState::Checkpointed)) => {
                    return Ok(pid);
                }
                // A look that fails at a process that is just coming up says nothing.
                Ok(_) => {}
                Err(failure) if failure.code == ExitCode::RolledBack => {}
                Err(failure) => return Err(failure),
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

    /// A job that ends badly as soon as it has its memory was not restored: that counts against the image.
    pub(super) fn did_not_settle(&self, image: &Image, status: Status) -> Failure {
        let id = image_id(image.generation);
        let why = format!(
            "the job {status} within {SETTLES_WITHIN:?} after it was restored from image {id}"
        );
        let mut failure = Failure::new(ExitCode::RestoreFailed, Phase::Unlock, why);
        self.counts_as_bad(image, &mut failure);
        failure
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
        // A store without conditional creates would take it a second time.
        if store.head(&key).await?.is_some() {
            continue;
        }
        let put = store.put_if_absent(&key, note.to_string().into());
        if put.await? == PutOutcome::Created {
            return Ok(number);
        }
    }
    Ok(FAILED_RUNS)
}
