//! The GPUs' memory of a whole tree on drivers without custom storage: the driver copies it into each process's own host memory, and back.
//!
//! In: locked processes. Out: suspended ones, whose memory CRIU takes with the rest; and the way back. What can fail: the driver; a copy that fails gives those before it their memory back, and unlocks all.

use std::error::Error;
use std::time::Duration;

use super::{Around, keep_first};
use crate::checkpoint::DYING_TIMEOUT;
use crate::custody::Custody;
use crate::driver::{CheckpointedProcess, DriverError, LockedProcess, ProcessState};
use crate::error::{Failure, Phase, one_line};
use crate::failpoint;
use crate::journal::Step;
use crate::watchdog;

/// The driver copies GPU memory to host memory at 1 to 2 GB/s.
const STAGING_USUAL: Duration = Duration::from_secs(300);

/// The driver copies every member's GPU memory into its host memory, one after the other. Where it does not, those before get theirs back, and all are unlocked.
pub(super) fn stage_all(
    around: &Around<'_>,
    locked: Vec<LockedProcess>,
) -> Result<Vec<CheckpointedProcess>, Failure> {
    let mut staged = Vec::with_capacity(locked.len());
    let mut waiting = locked.into_iter();
    let mut failed = None;
    for (custody, process) in around.custodies.iter().zip(waiting.by_ref()) {
        if let Err(error) = custody.step(&Step::Stage) {
            failed = Some((Some(process), error.into()));
            break;
        }
        custody.must_not_be_unlocked();
        let call = "the driver's checkpoint to host memory (cuCheckpointProcessCheckpoint)";
        match watchdog::watch(call, STAGING_USUAL, || process.stage()) {
            Ok(process) => staged.push(process),
            Err(mut error) => {
                let locked = error.locked.take();
                // What is staged has a way back, whatever the driver says.
                staged.extend(error.staged.take());
                let cause: Box<dyn Error + Send + Sync> = error.into();
                failed = Some((locked, cause));
                break;
            }
        }
        failpoint::pass("stage:one staged");
    }
    let Some((locked, cause)) = failed else {
        return Ok(staged);
    };
    let mut attached = Vec::new();
    // Those that were not staged wait for those that were: none runs before all have their memory.
    if let Err(error) = unstage_and_unlock(around, staged) {
        attached.push(one_line(error.as_ref()));
    }
    for process in locked.into_iter().chain(waiting) {
        attached.extend(process.unlock().err().map(|error| one_line(&error)));
    }
    let mut failure = around.failed(Phase::Begin, cause);
    failure.attached.extend(attached);
    Err(failure)
}

/// No member is unlocked before all have their memory.
pub(super) fn unstage_and_unlock(
    around: &Around<'_>,
    staged: Vec<CheckpointedProcess>,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let mut first: Option<Box<dyn Error + Send + Sync>> = None;
    let has_ended = |custody: &Custody| custody.target.ends_within(DYING_TIMEOUT);
    let custodies = &around.custodies[..staged.len()];
    let mut locked = Vec::with_capacity(staged.len());
    for (custody, process) in custodies.iter().zip(staged) {
        custody.note(Step::Restore);
        let call = "the driver's restore from host memory (cuCheckpointProcessRestore)";
        match watchdog::watch(call, STAGING_USUAL, || process.unstage(&[])) {
            Ok(process) => {
                custody.note(Step::RestoreComplete);
                locked.push((custody, process));
            }
            Err(_) if has_ended(custody) => {}
            Err(error) => keep_first(&mut first, error),
        }
        failpoint::pass("give-back:one has its memory");
    }
    if let Some(error) = first {
        return Err(error);
    }
    for (custody, process) in locked {
        custody.may_be_locked();
        let call = "the driver's unlock (cuCheckpointProcessUnlock)";
        match watchdog::watch(call, watchdog::USUAL, || process.let_go()) {
            Ok(()) => custody.must_not_be_unlocked(),
            Err(_) if has_ended(custody) => {}
            Err(error) => keep_first(&mut first, error),
        }
    }
    if let Some(error) = first {
        return Err(error);
    }
    for custody in custodies {
        let pid = custody.target.pid;
        match around.driver.state(pid) {
            Ok(ProcessState::Running) => {}
            Err(_) if custody.target.ends_within(DYING_TIMEOUT) => {}
            Ok(found) => {
                let needed = ProcessState::Running;
                return Err(DriverError::WrongState { pid, found, needed }.into());
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
