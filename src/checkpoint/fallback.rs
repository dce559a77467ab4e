//! What becomes of a target whose save lies in the spill: it is let go, it gets its memory back, or the save is uploaded after it.
//!
//! In: a sealed save, and the target's memory still mapped. Out: a verdict. What can fail: the driver (then the save stays sealed, whatever became of the target), the disk, the store.
//!
//! | we die | what exists |
//! |---|---|
//! | before the seal is broken | a sealed save, which `resume` finishes |
//! | after it | nothing of the save; the target is locked with its memory, or runs |
//!
//! A target is given back at most once, from bytes that were read back, and only if no image of the attempt can come into being: the seal is broken before the target runs, or the attempt given up in the job's log. Where neither can be had it stays locked.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::spill::{SealedSave, Spill};
use super::{Afterwards, Around, Committed, Then, complete, look, lost};
use crate::config::OnFailure;
use crate::driver::{CheckpointingProcess, LockedProcess};
use crate::error::{ExitCode, Failure, Phase, one_line};
use crate::failpoint;
use crate::job_log::{JobLog, LogError};
use crate::journal::Step;
use crate::phases::PhaseClock;
use crate::restore::{self, Ways};
use crate::resume::upload_sealed;
use crate::sealed::{NotSealed, Sealed};
use crate::session::Session;
use crate::store::StoreError;

/// How long the log may take to say that the job is still ours. A store that has just failed is not waited for.
const LOOK_TIMEOUT: Duration = Duration::from_secs(5);

/// What says that the save is sealed, while the target is given back.
enum Seal {
    Whole,
    MayBeBroken,
    /// It could not be broken, and why. The job's log says that the attempt is given up, so nobody makes an image of it.
    Ignored(String),
    /// It could not be broken, and why. It may become an image.
    Stays(String),
}

/// The store failed, and the spill has the save. What went wrong first stays the cause.
pub(super) fn sealed(
    around: Around<'_>,
    clock: &mut PhaseClock,
    spill: &Spill,
    begun: CheckpointingProcess,
    save: &SealedSave,
    mut failure: Failure,
) -> Failure {
    let (driver, target) = (around.driver, around.target);
    let may_be_given_back = match around.on_failure {
        OnFailure::GiveBack => why_not_given_back(around, &failure),
        _ => Err(None),
    };
    around.custody.note(Step::Sealed);
    let completed = complete(around, begun);
    failpoint::pass("spill:completed");
    failure.code = ExitCode::Spilled;
    match (completed, may_be_given_back) {
        (Ok(suspended), Ok(())) => {
            around.custody.note(Step::GiveBack);
            around.custody.flush();
            let reading = spill.session(around.session);
            let mut seal = Seal::Whole;
            let mut unseal = || {
                seal = Seal::MayBeBroken;
                let Err(error) = spill.unseal(around.session, save) else {
                    return true;
                };
                let is_given_up = give_up(around);
                seal = match is_given_up {
                    true => Seal::Ignored(one_line(&error)),
                    false => Seal::Stays(one_line(&error)),
                };
                is_given_up
            };
            let process = vec![(around.custody, suspended)];
            let given = restore::bring_back(
                &reading,
                clock,
                driver,
                process,
                &save.image,
                Ways::STAY,
                Some(&mut unseal),
            );
            match given {
                Ok(_loaded) => {
                    failpoint::pass("give-back:running");
                    failure.code = ExitCode::RolledBack;
                    failure
                        .notes
                        .push("the target was given its memory back".to_owned());
                    match seal {
                        Seal::Ignored(why) => failure.attached.push(format!(
                            "{} was given up and could not be removed: {why}",
                            spill.place_of(around.session, save)
                        )),
                        _ => spill.clear_away(around.session),
                    }
                }
                Err(not_given) => {
                    let why = one_line(not_given.cause.as_ref());
                    failure
                        .attached
                        .push(format!("the target did not get its memory back: {why}"));
                    match seal {
                        Seal::MayBeBroken => {
                            failure.code = let_go_if_unsealed(around, spill, save);
                        }
                        Seal::Stays(why) => failure.attached.push(format!(
                            "neither {} could be removed ({why}) nor the attempt be given up in the job's log: with either the target can run; `ckptstream recover` tries it again",
                            spill.place_of(around.session, save)
                        )),
                        Seal::Whole | Seal::Ignored(_) => {}
                    }
                }
            }
        }
        (Ok(_suspended), Err(why)) => failure
            .attached
            .extend(why.map(|why| format!("the target was not given its memory back: {why}"))),
        (Err(error), _) => failure
            .attached
            .push(format!("the target is not as asked: {}", one_line(&error))),
    }
    if failure.code == ExitCode::Spilled {
        failure.notes.push(spill.note());
    }
    failure.targets = vec![look(driver, target)];
    failure
}

/// Says in the job's log that the attempt is given up. Whether that stands there.
fn give_up(around: Around<'_>) -> bool {
    let dropping = around.attempt.drop_it(around.session);
    let dropped = around
        .session
        .wait(async { tokio::time::timeout(LOOK_TIMEOUT, dropping).await });
    matches!(dropped, Ok(Ok(())))
}

/// A defect of ours struck when the target had its memory already: once the seal is broken it is let go.
fn let_go_if_unsealed(around: Around<'_>, spill: &Spill, save: &SealedSave) -> ExitCode {
    let (driver, target) = (around.driver, around.target);
    let (job, attempt) = (&around.session.config.job, &save.sealed.entry.attempt);
    let sealed = around
        .session
        .wait(Sealed::read(spill.store(), job, attempt));
    match sealed {
        Ok(None) => {}
        Ok(Some(_)) => return ExitCode::Spilled,
        Err(_unknown) => return ExitCode::Lost,
    }
    if let Ok(locked) = LockedProcess::attach(driver, target.pid)
        && let Err(error) = locked.let_go()
    {
        let why = one_line(&error);
        tracing::error!("the target has its memory, and could not be unlocked: {why}");
    }
    match look(driver, target).state.as_str() {
        "running" => ExitCode::RolledBack,
        _ => ExitCode::Lost,
    }
}

/// An image of a job that ran on must not come into being, and a job that somebody else has must not run.
fn why_not_given_back(around: Around<'_>, failure: &Failure) -> Result<(), Option<String>> {
    if failure.code == ExitCode::CommitUnknown {
        let why = "its image may exist, and the store does not say";
        return Err(Some(why.to_owned()));
    }
    why_others_have_it(around)
}

/// A job that somebody else has, or may have, must not run here.
fn why_others_have_it(around: Around<'_>) -> Result<(), Option<String>> {
    let (session, attempt) = (around.session, around.attempt);
    let log = session.wait(async {
        let reading = JobLog::read(&*session.store_after_begin, &session.config.job);
        tokio::time::timeout(LOOK_TIMEOUT, reading).await
    });
    if let Ok(Err(LogError::Store {
        source: StoreError::Fenced { what, .. },
        ..
    })) = log
    {
        return Err(Some(what));
    }
    let Ok(Ok(log)) = log else {
        // As long as our own word holds nobody else opens the job, unless somebody insists.
        return match attempt.word_ends {
            Some(ends) if Instant::now() < ends => Ok(()),
            _ => Err(Some(
                "whether somebody else has the job cannot be read".to_owned(),
            )),
        };
    };
    match log.opened_by_another(attempt.next_slot, &attempt.nonce) {
        Some((_slot, there)) => Err(Some(there.describe())),
        None => Ok(()),
    }
}

/// Neither the store nor the spill has the save.
pub(super) fn not_sealed(
    mut failure: Failure,
    error: &(dyn Error + Send + Sync + 'static),
) -> Failure {
    let why = one_line(error);
    failure
        .attached
        .push(format!("the spill failed too: {why}"));
    if let Some(NotSealed::Unknown { .. }) = error.downcast_ref() {
        // It may be found by `resume`: the attempt is not given up.
        failure.phase = Phase::Spill;
        let note = "whether the save is sealed is not known; `ckptstream resume` finds out";
        failure.notes.push(note.to_owned());
    }
    failure
}

/// `spill.when = "always"`: the GPUs are released, or the target runs again, before the store is asked.
pub(super) fn upload_afterwards(
    around: Around<'_>,
    clock: &mut PhaseClock,
    spill: &Spill,
    begun: CheckpointingProcess,
    save: SealedSave,
    (locked_at, memory_planned): (Instant, u64),
) -> Result<(Committed, Afterwards), Failure> {
    let Around {
        session,
        driver,
        target,
        ..
    } = around;
    around.custody.note(Step::Sealed);
    clock.enter(Phase::Complete);
    let may_run = match around.then {
        Then::Resume | Then::ResumeUnlessDue => why_others_have_it(around),
        Then::Suspend => Ok(()),
    };
    let completed = complete(around, begun);
    failpoint::pass("spill:completed");
    let suspended_at = Instant::now();
    let afterwards = match (completed, around.then) {
        (Ok(suspended), Then::Suspend) => Ok(Afterwards::Suspended(suspended)),
        (Ok(_suspended), Then::Resume | Then::ResumeUnlessDue) if may_run.is_err() => {
            let why = may_run.err().flatten().unwrap_or_default();
            Err(lost(driver, target, Phase::Restore, why.into()))
        }
        (Ok(suspended), Then::Resume | Then::ResumeUnlessDue) => {
            let reading = spill.session(session);
            let process = vec![(around.custody, suspended)];
            restore::bring_back(
                &reading,
                clock,
                driver,
                process,
                &save.image,
                Ways::STAY,
                None,
            )
            .map(|_loaded| Afterwards::Runs {
                since: Instant::now(),
            })
        }
        (Err(error), _) => Err(lost(driver, target, Phase::Complete, error.into())),
    };
    // The save goes on to its end, whatever signals come.
    let uploading = Session {
        cancel: CancellationToken::new(),
        store: Arc::clone(&session.store_after_begin) as _,
        ..session.clone()
    };
    let image = session.wait(upload_sealed(
        &uploading,
        spill.store(),
        &save.sealed,
        clock,
    ));
    match (image, afterwards) {
        (Ok(image), Ok(afterwards)) => {
            let committed = Committed {
                image,
                landed: Vec::new(),
                stages: save.stages,
                slowest_stage: save.slowest_stage,
                locked_at,
                suspended_at,
                memory_planned,
            };
            Ok((committed, afterwards))
        }
        (Ok(image), Err(failure)) => Err(Failure {
            code: ExitCode::CommittedTargetAstray,
            generation: Some(image.generation),
            targets: vec![look(driver, target)],
            ..failure
        }),
        (Err(mut failure), afterwards) => {
            failure.code = match failure.code {
                ExitCode::NotOurs => ExitCode::Fenced,
                ExitCode::RestoreRefused => match look(driver, target).state.as_str() {
                    "running" => ExitCode::RolledBack,
                    _ => ExitCode::Lost,
                },
                _ => ExitCode::Spilled,
            };
            if failure.code == ExitCode::Spilled {
                failure.notes.push(spill.note());
            }
            if let Err(astray) = afterwards {
                let why = one_line(astray.cause.as_ref());
                failure
                    .attached
                    .push(format!("the target is not as asked: {why}"));
            }
            failure.targets = vec![look(driver, target)];
            Err(failure)
        }
    }
}
