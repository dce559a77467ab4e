//! The saves of a supervised job: at a notice, and in passing.
//!
//! In: a notice, or the interval; what is prepared. Out: what became of the job, as a [`Saved`]. What can fail: as a save does; each failure is one of these words.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::arming::{Taken, gpu_process};
use super::process::JobProcess;
use super::{Doing, Supervisor, UnderWay, Watch, tell};
use crate::checkpoint::{self, Armed, Then};
use crate::config::DeadlinePolicy;
use crate::driver::DriverError;
use crate::error::{ExitCode, Failure, Phase, one_line};
use crate::image::ImageRef;
use crate::outcome::Outcome;
use crate::ownership::{OwnershipError, WhileSaved};
use crate::preempt::{Notice, Standing};
use crate::restore::{self, Wanted};
use crate::resume;
use crate::session::Session;
use crate::upkeep;

/// So often a refusal that may pass is asked about again, for one notice.
const REFUSALS_MAX: u32 = 3;

/// A job whose GPU process has ended may take so long to end.
const ENDS_SOON: Duration = Duration::from_secs(2);

/// A save in passing that takes longer to be prepared is none.
const PREPARED_WITHIN: Duration = Duration::from_secs(600);

/// What a save has led to.
pub(super) enum Saved {
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

impl Supervisor<'_> {
    /// One save before the node goes away.
    pub(super) fn save_for(&self, notice: &Notice, job: &JobProcess, watch: &mut Watch) -> Saved {
        self.desk.report(|report| report.doing = Doing::Saving);
        if self.whole {
            if let Some(failure) = self.tree_does_not_fit(self.due(notice), watch) {
                match self.session.config.preempt.policy {
                    DeadlinePolicy::Try => tell("the save is begun all the same", &failure),
                    // A tree has no spill.
                    DeadlinePolicy::Refuse | DeadlinePolicy::Spill => {
                        return Saved::Refused(failure);
                    }
                }
            }
            let session = self.session.for_one_transfer(None);
            let saved = self.save_tree(&session, job, watch, Then::Suspend);
            return saved.unwrap_or_else(|failure| self.failed(&session, job, watch, failure));
        }
        // Another one may come meanwhile.
        let due = || self.due(notice);
        let mut prepared = match self.prepared(job, watch, || Some(due())) {
            Ok(prepared) => prepared,
            Err(failure) => return self.failed(&self.session, job, watch, failure),
        };
        let deadline = due();
        let used = prepared.used_memory().ok();
        if let Some(failure) = does_not_fit(deadline, watch.rate, used) {
            match self.session.config.preempt.policy {
                DeadlinePolicy::Refuse => {
                    watch.arming.leave(prepared);
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
        self.count_requests(&session);
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
            Err(failure) => self.failed(&session, job, watch, failure),
        }
    }

    /// One save of the job's whole tree. Nothing of it is prepared beforehand.
    fn save_tree(
        &self,
        session: &Session,
        job: &JobProcess,
        watch: &mut Watch,
        then: Then,
    ) -> Result<Saved, Failure> {
        let _follows = self.follow_notices(session);
        let shown = (self.show)(session);
        let begun_at = Instant::now();
        let root = job.tree_root();
        let saved = checkpoint::checkpoint_tree(session, root, then, WhileSaved::TakeOver);
        drop(shown);
        self.count_requests(session);
        match saved {
            Ok(outcome) => {
                self.desk.report(|report| {
                    report.notice_to_commit_seconds = begun_at.elapsed().as_secs_f64();
                });
                watch.remember(&outcome);
                watch.locked_before = Some(outcome.seconds_locked);
                Ok(Saved::Committed(Box::new(outcome)))
            }
            Err(failure) => {
                // It may have stood still all the time.
                watch.locked_before = Some(begun_at.elapsed().as_secs_f64());
                Err(failure)
            }
        }
    }

    /// The notices that stand are a save's deadline, those that come during it, too; one that is withdrawn leaves the others.
    fn follow_notices(&self, session: &Session) -> UnderWay {
        let mut changes = self.board.subscribe();
        let margin = self.session.config.preempt.margin;
        let following = session.clone();
        let follow = move |standing: &Standing| {
            following.set_deadline(standing.earliest().map(|it| it.due(margin)));
        };
        follow(&changes.borrow_and_update());
        UnderWay(self.session.runtime.spawn(async move {
            while changes.changed().await.is_ok() {
                follow(&changes.borrow_and_update());
            }
        }))
    }

    /// What was prepared, or else is prepared now, as long as `deadline` has a moment that is to come.
    fn prepared(
        &self,
        job: &JobProcess,
        watch: &mut Watch,
        deadline: impl Fn() -> Option<Instant>,
    ) -> Result<Armed, Failure> {
        let failed = |code: ExitCode, why: String| Err(Failure::new(code, Phase::Prepare, why));
        let is_over = || deadline().is_none_or(|deadline| Instant::now() >= deadline);
        let armed = match watch.arming.take(&deadline) {
            Taken::Ready(armed) => Some(*armed),
            Taken::Nothing => None,
            Taken::Coming => {
                return failed(
                    ExitCode::RolledBack,
                    "what a save needs is still being prepared".to_owned(),
                );
            }
        };
        let driver = self.driver.open()?;
        // The job may have come by another GPU process since; a look that fails is no reason to give anything away.
        let found = gpu_process(&driver, job);
        match (armed, &found) {
            (Some(armed), Ok(Some(pid))) if armed.pid() == *pid => return Ok(armed),
            (Some(armed), Ok(None)) if armed.target_lives() => return Ok(armed),
            (Some(armed), Err(failure)) if failure.code != ExitCode::Preflight => return Ok(armed),
            (Some(armed), _) => watch.arming.leave(armed),
            (None, _) => {}
        }
        let Some(pid) = found? else {
            let why = format!(
                "the job (pid {}) uses no GPU, so there is nothing to save",
                job.pid
            );
            return failed(ExitCode::Preflight, why);
        };
        // What was prepared before has the target, and the spill, until it is given back.
        while watch.arming.is_leaving() && !is_over() {
            std::thread::sleep(Duration::from_millis(1));
        }
        if is_over() {
            let why = "there is no time left, by preempt.margin before the node's end";
            return failed(ExitCode::DoesNotFit, why.to_owned());
        }
        let session = self.session.for_one_transfer(None);
        let _follows = self.follow_notices(&session);
        checkpoint::arm(session, pid)
    }

    /// What a save that failed means.
    fn failed(
        &self,
        session: &Session,
        job: &JobProcess,
        watch: &mut Watch,
        failure: Failure,
    ) -> Saved {
        let mut targets = failure.targets.iter();
        let is_gone = !failure.targets.is_empty() && targets.all(|it| it.state == "gone");
        match failure.code {
            // Its end is on the way to us.
            ExitCode::NothingToSave | ExitCode::RolledBack | ExitCode::Lost
                if is_gone && self.ends_soon(job) || job.status().is_some() =>
            {
                Saved::JobEnded
            }
            // A shell outlives what it has started, and has its own word to say.
            ExitCode::Lost if is_gone => Saved::RunsOn(failure),
            ExitCode::NothingToSave | ExitCode::RolledBack => Saved::RunsOn(failure),
            // What was wrong may pass, as a process that is stopped, or a job that is just coming up.
            ExitCode::Preflight if watch.refusals < REFUSALS_MAX && !never_will(&failure) => {
                watch.refusals += 1;
                Saved::RunsOn(failure)
            }
            ExitCode::Config | ExitCode::Preflight | ExitCode::DoesNotFit => {
                watch.refusals = 0;
                Saved::Refused(failure)
            }
            // The target is somebody else's for the moment; the job is ours, or it is not.
            ExitCode::NotOurs if !self.is_fenced() => Saved::RunsOn(failure),
            ExitCode::Spilled => match resume::resume(session) {
                Ok(outcome) => Saved::Committed(Box::new(outcome)),
                Err(_still_sealed) => Saved::Stuck(failure),
            },
            ExitCode::CommittedTargetAstray => Saved::Astray(failure),
            _ => Saved::Stuck(failure),
        }
    }

    /// Its GPU process is gone; whether it is, too.
    fn ends_soon(&self, job: &JobProcess) -> bool {
        let ended = async { tokio::time::timeout(ENDS_SOON, job.ended()).await };
        self.session.wait(ended).is_ok()
    }

    /// Somebody else has opened the job since we did. Where the store does not say, nobody has.
    fn is_fenced(&self) -> bool {
        let looked = self.with_ours(async |ours, store| ours.must_be_ours(store).await.map(drop));
        matches!(looked, Some(Err(OwnershipError::Fenced { .. })))
    }

    /// Why a save of the whole tree will be late: it has as much to save as the last time, or as its GPUs have in use if that is more. What of its memory CRIU leaves out does not show beforehand.
    fn tree_does_not_fit(&self, deadline: Instant, watch: &Watch) -> Option<Failure> {
        // Without an earlier save, which has brought the driver up, there is no rate.
        let saved = watch.saved?;
        let used = self.driver.open().ok()?.used_memory_of_all().ok()?;
        let used = used.into_iter().fold(0, u64::saturating_add);
        does_not_fit(deadline, watch.rate, Some(used.max(saved)))
    }

    /// A save after which the job goes on. [`Saved::Committed`], [`Saved::RunsOn`] and `None`, which is a save that was skipped: it does.
    pub(super) fn save_in_passing(&self, job: &JobProcess, watch: &mut Watch) -> Option<Saved> {
        if let Some(why) = self.takes_too_much(watch) {
            tracing::warn!("the save in passing is skipped: {why}");
            self.desk.report(|report| report.saves_skipped += 1);
            return None;
        }
        self.desk.report(|report| report.doing = Doing::Saving);
        if self.whole {
            let session = self.session.for_one_transfer(None);
            let saved = self.save_tree(&session, job, watch, Then::ResumeUnlessDue);
            let saved = saved.unwrap_or_else(|failure| {
                self.failed_in_passing(job, watch, Some((&session, job.pid)), failure)
            });
            watch.last_in_passing = Instant::now();
            self.look_after_images(watch);
            return Some(saved);
        }
        // A notice that comes while it is prepared is dealt with at once.
        let long = Instant::now() + PREPARED_WITHIN;
        let patience = || match self.board.standing().earliest() {
            Some(_notice) => None,
            None => Some(long),
        };
        let prepared = match self.prepared(job, watch, patience) {
            Ok(prepared) => prepared,
            Err(failure) => return Some(self.failed_in_passing(job, watch, None, failure)),
        };
        let begun_at = Instant::now();
        let (session, pid) = (prepared.session().clone(), prepared.pid());
        let follows = self.follow_notices(&session);
        let shown = (self.show)(&session);
        let saved = match prepared.save(Then::ResumeUnlessDue) {
            Ok(outcome) => {
                watch.remember(&outcome);
                watch.locked_before = Some(outcome.seconds_locked);
                Saved::Committed(Box::new(outcome))
            }
            Err(failure) => {
                // It may have stood still all the time.
                watch.locked_before = Some(begun_at.elapsed().as_secs_f64());
                self.failed_in_passing(job, watch, Some((&session, pid)), failure)
            }
        };
        watch.last_in_passing = Instant::now();
        drop((shown, follows));
        self.count_requests(&session);
        self.look_after_images(watch);
        Some(saved)
    }

    /// What a save in passing that failed means: the job is to run.
    fn failed_in_passing(
        &self,
        job: &JobProcess,
        watch: &mut Watch,
        begun: Option<(&Session, u32)>,
        failure: Failure,
    ) -> Saved {
        let runs = |failure: &Failure| {
            let mut targets = failure.targets.iter();
            !failure.targets.is_empty() && targets.all(|it| it.state.as_str() == "running")
        };
        let (session, pid) = match begun {
            // The disk has the save, and it will be uploaded from there.
            Some(_) if failure.code == ExitCode::Spilled && runs(&failure) => {
                return Saved::RunsOn(failure);
            }
            Some(begun) => begun,
            None => (&self.session, job.pid),
        };
        match self.failed(session, job, watch, failure) {
            Saved::Refused(failure) => Saved::RunsOn(failure),
            // It was sealed with its process suspended, and is an image by now.
            Saved::Committed(outcome) => {
                let wanted = Wanted {
                    image: ImageRef::Latest,
                    into_fresh: false,
                    started_here: false,
                    read_only: false,
                    while_saved: WhileSaved::Wait,
                };
                match restore::restore(session, pid, wanted) {
                    Ok(restored) => Saved::Committed(Box::new(Outcome {
                        targets: restored.targets,
                        ..*outcome
                    })),
                    Err(failure) => Saved::Astray(Failure {
                        generation: Some(outcome.generation),
                        ..failure
                    }),
                }
            }
            other => other,
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

    /// Saves that lie in the spill are uploaded, and old images go, in the background. What fails is told, and no more.
    fn look_after_images(&self, watch: &mut Watch) {
        let is_under_way = |thread: &JoinHandle<()>| !thread.is_finished();
        if watch.upkeep.as_ref().is_some_and(is_under_way) {
            return;
        }
        let session = self.session.for_one_transfer(None);
        let (on_the_side, ending) = (Arc::clone(&self.on_the_side), self.ending.clone());
        let upkeep = std::thread::Builder::new().name("upkeep".to_owned());
        let upkeep = upkeep.spawn(move || {
            let _on_the_side = on_the_side;
            let cancel = session.cancel.clone();
            let _ends = UnderWay(session.runtime.spawn(async move {
                ending.cancelled().await;
                cancel.cancel();
            }));
            finish_sealed(&session);
            if let Err(failure) = upkeep::prune(&session, false) {
                let why = one_line(failure.cause.as_ref());
                tracing::warn!("old images were not pruned: {why}");
            }
        });
        watch.upkeep = upkeep.ok();
    }

    /// What became of a save's requests, whatever became of it.
    fn count_requests(&self, session: &Session) {
        self.desk.report(|report| {
            for (cause, count) in session.meter.retries_by_cause() {
                *report.retries.entry(cause.to_owned()).or_default() += count;
            }
            report.failed_aborts += session.meter.failed_aborts.load(Ordering::Relaxed);
        });
    }

    pub(super) fn count(&self, saved: &Saved) {
        self.desk.report(|report| match saved {
            Saved::Committed(outcome) => {
                report.saves_committed += 1;
                report.seconds_locked += outcome.seconds_locked;
                report.bytes_raw += outcome.bytes.raw;
                report.bytes_stored += outcome.bytes.stored;
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
            self.saved = Some(outcome.bytes.raw);
        }
    }
}

/// Why a save of so many bytes will be late, by the rate of the last one.
fn does_not_fit(deadline: Instant, rate: Option<f64>, used: Option<u64>) -> Option<Failure> {
    let (rate, used) = (rate?, used?);
    let left = deadline.saturating_duration_since(Instant::now());
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    let needed = Duration::try_from_secs_f64(used as f64 / rate).unwrap_or(Duration::MAX);
    (needed > left).then(|| {
        let why = format!(
            "{} MiB of memory need {:.1} s at the {:.0} MiB/s of the last save, and {:.1} s are left (preempt.deadline_policy)",
            used >> 20,
            needed.as_secs_f64(),
            rate / f64::from(1 << 20),
            left.as_secs_f64()
        );
        Failure::new(ExitCode::DoesNotFit, Phase::Prepare, why)
    })
}

/// The driver is the same in a second.
fn never_will(failure: &Failure) -> bool {
    let error = failure.cause.downcast_ref::<DriverError>();
    matches!(error, Some(DriverError::NoCustomStorage { .. }))
}

/// Uploads what lies in the spill, if there is one.
pub(super) fn finish_sealed(session: &Session) {
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
