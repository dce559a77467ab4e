//! A drill: the target is really locked and unlocked, and a small image really goes up and comes back.
//!
//! In: a session, a target, and what was found until then. Out: three more checks, and the target as looked up. Nothing can fail: what fails is what was looked for.
//!
//! What preflight has found out already is not tried once more: a target that cannot be locked is not locked, and a store that does not answer is not sent an image.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Check, Findings, State, Subject};
use crate::checkpoint::{lock_and_unlock, small_image};
use crate::error::{ExitCode, Phase, one_line};
use crate::session::Session;

/// The small image goes up, and comes back, in this time.
const IMAGE_LIMIT: Duration = Duration::from_secs(20);

const LOCK: Subject = Subject {
    name: "target.lock",
    why: "a save begins with the driver's lock, which waits until the target's work on the GPUs has come to a stop",
    gravity: State::Failed,
    mend: "raise driver.lock_timeout, and see whether a process of the job waits for another one (NCCL) or is stopped",
};
const UNLOCK: Subject = Subject {
    name: "target.unlock",
    why: "a save that is given up before its point of no return lets the target run on",
    gravity: State::Failed,
    mend: "run `ckptstream recover`, which unlocks what a drill has left; a process that stays locked can only be ended",
};
const IMAGE: Subject = Subject {
    name: "store.image",
    why: "an image is what the GPU held only if every byte gets there and back",
    gravity: State::Failed,
    mend: "see the checks above, and `ckptstream bench`",
};

/// Makes the three checks. `hands` is held as long as the target is in ours.
pub(super) fn rehearse(
    session: Option<&Session>,
    pid: u32,
    hands: &Mutex<()>,
    findings: &mut Findings,
) {
    let failed = |prefix: &str| {
        let failed = |check: &&Check| check.state == State::Failed;
        let mut checks = findings.checks.iter().filter(failed);
        checks
            .find(|check| check.name.starts_with(prefix))
            .map(|check| check.name)
    };
    let (target, store) = (failed("target."), failed("store."));
    let not_tried = |subject: &Subject, because: &str| {
        subject.wrong_to_mend(
            format!("not tried, because of {because}"),
            format!("mend {because} first"),
        )
    };
    let Some(session) = session else {
        let because = store.unwrap_or("store.connect");
        findings.checks.push(not_tried(&LOCK, because));
        findings.checks.push(not_tried(&IMAGE, because));
        return;
    };
    match target {
        Some(because) => findings.checks.push(not_tried(&LOCK, because)),
        None => of_target(session, pid, hands, findings),
    }
    findings.checks.push(match store {
        Some(because) => not_tried(&IMAGE, because),
        None => of_store(session),
    });
}

fn of_target(session: &Session, pid: u32, hands: &Mutex<()>, findings: &mut Findings) {
    let _in_hand = hands.lock().unwrap_or_else(PoisonError::into_inner);
    // Whoever has asked us to stop may take the target as soon as it is in nobody's hands.
    if let Err(stopped) = session.check_cancelled() {
        findings.checks.push(LOCK.wrong(one_line(&stopped)));
        return;
    }
    // What was left of preflight's time is not the lock's.
    session.set_deadline(None);
    let limit = session.config.driver.lock_timeout;
    let limit = format!("driver.lock_timeout {}", humantime::format_duration(limit));
    let millis = |time: Duration| format!("{:.1} ms", time.as_secs_f64() * 1e3);
    let failure = match lock_and_unlock(session, pid) {
        Ok(let_go) => {
            let found = format!("locked within {} ({limit})", millis(let_go.lock));
            findings.checks.push(LOCK.ok(found));
            let found = format!(
                "process {pid} is {}, looked up; it was held for {}",
                let_go.target.state,
                millis(let_go.held)
            );
            findings.checks.push(UNLOCK.ok(found));
            findings.targets = vec![let_go.target];
            return;
        }
        Err(failure) => failure,
    };
    let mut found = one_line(failure.cause.as_ref());
    for target in &failure.targets {
        found = format!(
            "{found}; process {} is {}, looked up",
            target.pid, target.state
        );
    }
    for more in &failure.attached {
        found = format!("{found}; {more}");
    }
    if failure.phase == Phase::Unlock {
        findings.checks.push(LOCK.ok(format!("locked ({limit})")));
        findings.checks.push(UNLOCK.wrong(found));
    } else {
        findings
            .checks
            .push(LOCK.wrong(format!("{found} ({limit})")));
    }
    if failure.code == ExitCode::Lost {
        findings.is_lost = true;
    }
    findings.targets = failure.targets;
}

fn of_store(session: &Session) -> Check {
    session.set_deadline(Some(Instant::now() + IMAGE_LIMIT));
    #[expect(clippy::cast_precision_loss, reason = "told with one decimal")]
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    match small_image(session) {
        Err(error) => IMAGE.wrong(one_line(error.as_ref())),
        Ok(image) => {
            let found = format!(
                "{} of GPU memory went up as {} within {:.1} s, and came back with every digest right within {:.1} s",
                mib(image.raw),
                mib(image.stored),
                image.saved_in.as_secs_f64(),
                image.read_in.as_secs_f64()
            );
            match image.left.as_slice() {
                [] => IMAGE.ok(found),
                left => IMAGE.warning(
                    format!("{found}; {}", left.join("; ")),
                    "`ckptstream gc` removes what stays; see store.delete and store.abort",
                ),
            }
        }
    }
}
