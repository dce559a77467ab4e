//! Points at which a run can be made to die, so that what is left behind can be looked at.
//!
//! In: `CKPTSTREAM_FAILPOINT` in the environment, `POINT=ACTION` or `POINT=ACTION@N`: at the N-th time (from 1, the default) that the point is passed, `kill` raises SIGKILL on this very process, `panic` panics,
//! `io-error` fails from then on every request to the store and every access to the spill, `disk-error` only what goes to a directory.
//! Out: nothing, if the variable is not set: then passing a point costs one load. What can fail: a variable that says something else ends the program at the first point with a panic, because a trial that does not try
//! anything would count as passed.
//!
//! A point is named `step:what has just happened`. `docs/testkit.md` says how trials are made of them; `tests/it/crash.rs` passes through every one.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::process::{Signal, getpid, kill_process};

/// The variable.
pub const VARIABLE: &str = "CKPTSTREAM_FAILPOINT";

/// Of a save, in the order in which it passes them for the first time.
pub const SAVE: &[&str] = &[
    "prepare:target known",
    "prepare:claimed",
    "prepare:uploads open",
    "prepare:announced",
    "prepare:memory ready",
    "lock:locked",
    "begin:begun",
    "stream:chunk copied",
    "stream:chunk coded",
    "stream:chunk packed",
    "stream:part cut",
    "stream:part acknowledged",
    "stream:all acknowledged",
    "land:upload completed",
    "land:all landed",
    "commit:target stood still",
    "commit:tables stored",
    "commit:manifest stored",
    "commit:entered",
    "complete:completed",
];

/// Of a save that is spilled, beside those of a save.
pub const SPILL: &[&str] = &[
    "spill:room set aside",
    "spill:all written",
    "spill:all landed",
    "spill:manifest stored",
    "spill:sealed",
    "spill:completed",
];

/// Of a save that is spilled and given back, beside those of a spilled save and of a restore.
pub const GIVE_BACK: &[&str] = &[
    "restore:locked for good",
    "spill:unsealed",
    "give-back:running",
];

/// Of a spilled save that is resumed.
pub const RESUME: &[&str] = &[
    "resume:read",
    "resume:upload open",
    "resume:part acknowledged",
    "resume:upload completed",
    "resume:object landed",
    "resume:table stored",
    "resume:manifest stored",
    "resume:entered",
    "resume:cleared away",
    "resume:unsealed",
];

/// Of a drill.
pub const DRILL: &[&str] = &["drill:locked"];

/// Steps of the save of a whole tree, and of its restore, beside those that it shares with the others.
pub const WHOLE: &[&str] = &[
    "begin:one begun",
    "seal:sealed",
    "seal:one completed",
    "stage:one staged",
    "dump:all suspended",
    "dump:begun",
    "dump:once more",
    "dump:all acknowledged",
    "dump:all landed",
    "give-back:one has its memory",
    "restore:tree rebuilt",
    "restore:one has its memory",
];

/// Of a target that is put in order after its saver died.
pub const RECOVER: &[&str] = &["recover:unlocked", "recover:dropped"];

/// Of a restore.
pub const RESTORE: &[&str] = &[
    "restore:target known",
    "restore:job opened",
    "restore:pinned",
    "restore:image read",
    "restore:checked",
    "restore:verified",
    "restore:prepared",
    "restore:chunk landed",
    "restore:chunk verified",
    "restore:begun",
    "restore:chunk copied",
    "restore:all copied",
    "restore:completed",
    "restore:unlocked",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Kill,
    Panic,
    IoError,
    DiskError,
}

static STORES_FAIL: AtomicBool = AtomicBool::new(false);
static DIRECTORIES_FAIL: AtomicBool = AtomicBool::new(false);

/// Whether every access to a store of this kind fails by now.
pub(crate) fn io_fails(is_directory: impl FnOnce() -> bool) -> bool {
    STORES_FAIL.load(Ordering::Relaxed)
        || DIRECTORIES_FAIL.load(Ordering::Relaxed) && is_directory()
}

/// What was asked for.
#[derive(Debug)]
struct Armed {
    point: String,
    action: Action,
    left: AtomicU64,
}

/// A point is passed.
pub(crate) fn pass(point: &'static str) {
    static ARMED: OnceLock<Option<Armed>> = OnceLock::new();
    let armed = ARMED.get_or_init(|| {
        let text = std::env::var(VARIABLE).ok()?;
        let armed = Armed::parse(&text);
        Some(armed.unwrap_or_else(|| {
            panic!(
                "{VARIABLE} = {text:?}: POINT=kill, POINT=panic, POINT=io-error or POINT=disk-error, perhaps @N"
            )
        }))
    });
    if let Some(armed) = armed {
        armed.pass(point);
    }
}

impl Armed {
    fn parse(text: &str) -> Option<Self> {
        let (point, action) = text.split_once('=')?;
        let (action, count) = action.split_once('@').unwrap_or((action, "1"));
        let action = match action {
            "kill" => Action::Kill,
            "panic" => Action::Panic,
            "io-error" => Action::IoError,
            "disk-error" => Action::DiskError,
            _ => return None,
        };
        let count = count.parse().ok().filter(|count| *count > 0)?;
        let known = [
            SAVE, SPILL, GIVE_BACK, RESUME, DRILL, WHOLE, RECOVER, RESTORE,
        ]
        .concat();
        known.contains(&point).then(|| Self {
            point: point.to_owned(),
            action,
            left: AtomicU64::new(count),
        })
    }

    fn pass(&self, point: &str) {
        if self.point != point {
            return;
        }
        // Past the N-th time it wraps around, for good.
        if self.left.fetch_sub(1, Ordering::Relaxed) != 1 {
            return;
        }
        match self.action {
            Action::Panic => panic!("at {point}, as {VARIABLE} asks"),
            Action::IoError => STORES_FAIL.store(true, Ordering::Relaxed),
            Action::DiskError => DIRECTORIES_FAIL.store(true, Ordering::Relaxed),
            Action::Kill => {
                // It does not return; if the kernel refuses, the trial must not pass for one.
                let refused = kill_process(getpid(), Signal::KILL);
                panic!("SIGKILL at {point}: {refused:?}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_can_happen_is_armed() {
        let armed = Armed::parse("land:all landed=kill@3").unwrap();
        assert_eq!(
            (armed.point.as_str(), armed.action),
            ("land:all landed", Action::Kill)
        );
        assert_eq!(armed.left.into_inner(), 3);
        assert_eq!(
            Armed::parse("spill:sealed=panic")
                .unwrap()
                .left
                .into_inner(),
            1
        );
        assert_eq!(
            Armed::parse("begin:begun=io-error").unwrap().action,
            Action::IoError
        );
        for bad in [
            "",
            "spill:sealed",
            "spill:sealed=exit",
            "spill:sealed=kill@0",
            "spill:sealed=kill@x",
            "nowhere=kill",
        ] {
            assert!(Armed::parse(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn the_nth_time_is_the_only_one() {
        let armed = Armed::parse("spill:sealed=panic@2").unwrap();
        armed.pass("spill:sealed");
        armed.pass("spill:completed");
        let died =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| armed.pass("spill:sealed")));
        assert!(died.is_err());
        armed.pass("spill:sealed");
    }
}
