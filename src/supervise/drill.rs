//! The drill of a supervised job (`preempt.drill`): what `ckptstream drill` does, once, as soon as the job uses its GPUs and before a save is prepared: both want the target, and as much host memory.
//!
//! In: the job's GPU process. Out: one line for the log and for `status`. What can fail: whatever a drill looks for. It is told, the job runs on, and a save is prepared all the same. A target that the driver did not unlock is let go as `ckptstream recover` does it.
//!
//! A save has the right of way. It stops the drill, and waits until the target is in nobody's hands, which the driver's lock may hold up for `driver.lock_timeout`. It does not wait for what the drill has sent to the store.

use std::io;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread::JoinHandle;

use tokio_util::sync::CancellationToken;

use crate::error::{ExitCode, one_line};
use crate::pipeline::PipelineError;
use crate::preflight::{self, Check, Findings, State, Surroundings};
use crate::progress::Meter;
use crate::recover::{self, RecoverOptions};
use crate::session::Session;

/// What is told of a drill that had to end.
pub(super) const STOPPED: &str = "stopped, because a save came";

/// A drill that is under way.
#[derive(Debug)]
pub(super) struct Drill {
    thread: JoinHandle<(ExitCode, String)>,
    cancel: CancellationToken,
    /// Held as long as the drill has the target.
    hands: Arc<Mutex<()>>,
}

impl Drill {
    /// Begins it. It has a client of the store for itself: what it provokes there teaches the saves nothing, and is not counted among their retries.
    ///
    /// # Errors
    /// The system has no thread left.
    pub(super) fn begin(session: &Session, pid: u32, on_the_side: &Arc<()>) -> io::Result<Self> {
        let hands = Arc::new(Mutex::new(()));
        let cancel = CancellationToken::new();
        let around = Surroundings {
            config: session.config.clone(),
            runtime: session.runtime.clone(),
            meter: Meter::new(),
            cancel: cancel.clone(),
            pid: Some(pid),
            guard: session.guard.clone(),
        };
        let drilling = std::thread::Builder::new().name("drill".to_owned());
        let (session, its_hands) = (session.for_one_transfer(None), Arc::clone(&hands));
        let on_the_side = Arc::clone(on_the_side);
        let thread = drilling.spawn(move || {
            let _on_the_side = on_the_side;
            let findings = preflight::drill_in_turn(around, pid, &its_hands);
            let mut line = in_one_line(&findings);
            if findings.is_lost {
                let _in_hand = its_hands.lock().unwrap_or_else(PoisonError::into_inner);
                line = format!("{line}; {}", let_go(&session, pid));
            }
            (findings.code(), line)
        })?;
        Ok(Self {
            thread,
            cancel,
            hands,
        })
    }

    pub(super) fn is_over(&self) -> bool {
        self.thread.is_finished()
    }

    /// Stops it. Whether the target is out of its hands, for good.
    pub(super) fn stop(&self) -> bool {
        self.cancel.cancel();
        !matches!(self.hands.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// Says what it came to, in one line.
    pub(super) fn tell(self) -> String {
        let panicked = |panic: Box<dyn std::any::Any + Send>| {
            let why = PipelineError::of_story(panic.as_ref());
            (ExitCode::Preflight, one_line(&why))
        };
        let (code, line) = self.thread.join().unwrap_or_else(panicked);
        match code {
            ExitCode::Ok => tracing::info!("the drill (preempt.drill): {line}"),
            ExitCode::Lost => tracing::error!("the drill (preempt.drill): {line}"),
            // What it was kept from it has not found out.
            _ if self.cancel.is_cancelled() => return STOPPED.to_owned(),
            _ => tracing::warn!("the drill (preempt.drill): {line}"),
        }
        line
    }
}

/// What a person wants to know of it: what fails, and what mends it; else how long it took.
fn in_one_line(findings: &Findings) -> String {
    let of = |state: State| findings.checks.iter().filter(move |it| it.state == state);
    let failed = of(State::Failed).map(|check| match &check.mend {
        Some(mend) => format!("{}: {}; {mend}", check.name, check.found),
        None => format!("{}: {}", check.name, check.found),
    });
    let failed: Vec<String> = failed.collect();
    if !failed.is_empty() {
        return format!("a save would fail: {}", failed.join("; "));
    }
    let is_told = |check: &&Check| ["target.lock", "store.image"].contains(&check.name);
    let told = findings.checks.iter().filter(is_told);
    let mut told: Vec<String> = told.map(|check| check.found.clone()).collect();
    let warnings: Vec<&str> = of(State::Warning).map(|check| check.name).collect();
    if !warnings.is_empty() {
        told.push(format!(
            "`ckptstream preflight` warns of {}",
            warnings.join(", ")
        ));
    }
    told.join("; ")
}

/// Has the target unlocked that the drill could not unlock. What came of it.
fn let_go(session: &Session, pid: u32) -> String {
    let options = RecoverOptions {
        pid: Some(pid),
        end: false,
    };
    match recover::recover(session, Some(&session.config.job), options) {
        Ok(recovered) => match recovered.targets.as_slice() {
            [row] if row.done == "unlocked" => format!("process {pid} was unlocked afterwards"),
            rows => {
                let verdicts = rows.iter().map(|row| row.verdict.as_str());
                let verdicts: Vec<&str> = verdicts.collect();
                format!("process {pid} is not let go: {}", verdicts.join("; "))
            }
        },
        Err(failure) => format!(
            "process {pid} is not let go: {}",
            one_line(failure.cause.as_ref())
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &'static str, state: State, found: &str, mend: Option<&str>) -> Check {
        Check {
            name,
            state,
            found: found.to_owned(),
            why: "",
            mend: mend.map(str::to_owned),
        }
    }

    fn told(checks: Vec<Check>) -> String {
        in_one_line(&Findings {
            job: "job".to_owned(),
            checks,
            upload_rate: None,
            download_rate: None,
            targets: Vec::new(),
            is_lost: false,
        })
    }

    #[test]
    fn a_line_has_what_fails_and_what_mends_it_or_else_what_was_measured() {
        let lock = || check("target.lock", State::Ok, "locked within 1.0 ms", None);
        let abort = || check("store.abort", State::Warning, "AccessDenied", Some("grant"));
        let listed = || check("store.list", State::Ok, "answers", None);
        assert_eq!(told(vec![listed(), lock()]), "locked within 1.0 ms");
        assert_eq!(
            told(vec![abort(), lock()]),
            "locked within 1.0 ms; `ckptstream preflight` warns of store.abort"
        );
        let late = check(
            "target.lock",
            State::Failed,
            "timed out",
            Some("raise driver.lock_timeout"),
        );
        let spoiled = check("store.image", State::Failed, "damaged", None);
        assert_eq!(
            told(vec![abort(), late, spoiled]),
            "a save would fail: target.lock: timed out; raise driver.lock_timeout; store.image: damaged"
        );
    }
}
