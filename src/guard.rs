//! A small process beside the saver, which unlocks the target if the saver dies while the target is locked and its memory is its own.
//!
//! In: a pid with its start time, and one letter at a time from the saver. Out: a target that runs. What can fail: the driver; then the target stays locked, and `recover` says so.
//!
//! | the saver dies | the guard |
//! |---|---|
//! | before it asked for the lock, or from BEGIN on | does nothing |
//! | between the two, or after the Complete of a restore | unlocks, if the target is locked |
//!
//! It is another program run, not a fork: a fork of a process with threads and a driver can do next to nothing. It has a process group of its own and takes no notice of signals that end the saver.

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::driver::{Driver, DriverError, LockedProcess, ProcessState};
use crate::journal::lock_named;
use crate::target::{Target, TargetError};

/// The letters.
const ARM: u8 = b'a';
const DISARM: u8 = b'd';
const END: u8 = b'e';

/// How long a guard that is not needed any more may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// Pause between two looks at a target that may be locked yet.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The saver's end.
#[derive(Debug)]
pub struct Guard {
    child: Child,
    letters: Mutex<ChildStdin>,
}

impl Guard {
    /// Starts `program guard` for this target, whose journal we hold. A lock that was asked for may come so late.
    ///
    /// # Errors
    /// Those of starting a process.
    pub fn start(
        program: &Path,
        target: &Target,
        journal: &Path,
        patience: Duration,
    ) -> io::Result<Self> {
        let mut child = Command::new(program)
            .arg("guard")
            .args(["--pid", &target.pid.to_string()])
            .args(["--start-time", &target.start_time.to_string()])
            .arg("--journal")
            .arg(journal)
            .args(["--patience-ms", &patience.as_millis().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // A terminal's Ctrl-C, and a scheduler's signal to the group, are for the saver.
            .process_group(0)
            .spawn()?;
        let letters = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(Self {
            child,
            letters: Mutex::new(letters),
        })
    }

    /// From now on a locked target is to be unlocked if we die.
    pub fn arm(&self) {
        self.tell(ARM);
    }

    /// From now on nothing is to be done.
    pub fn disarm(&self) {
        self.tell(DISARM);
    }

    fn tell(&self, letter: u8) {
        let mut letters = self.letters.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = letters.write_all(&[letter]) {
            tracing::warn!(
                "nobody unlocks the target if we die: the guard does not listen ({error})"
            );
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.tell(END);
        // It ends at once; one that does not must not hold up a verdict.
        let started = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if started.elapsed() > END_TIMEOUT {
                let _ended = self.child.kill();
                let _status = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// What a guard has to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guarded {
    /// The saver ended by itself, or died when there was nothing to do.
    Nothing,
    /// The saver died, and the target was unlocked.
    Unlocked,
    /// The saver died, and the target is not locked.
    NotLocked,
}

/// The guard could not do its work.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// The target cannot be looked at.
    #[error("the target cannot be looked at")]
    Target(#[from] TargetError),
    /// Its pid is another process's by now.
    #[error("process {pid} is not the one that was to be guarded")]
    Another {
        /// The pid.
        pid: u32,
    },
    /// The journal cannot be looked at.
    #[error("the target's journal cannot be looked at")]
    Journal(#[from] io::Error),
    /// The driver.
    #[error("the target was not unlocked")]
    Driver(#[from] DriverError),
}

/// The guard itself: listens until the saver ends, then does what there is to do.
///
/// # Errors
/// [`GuardError`]: the target may be locked still.
pub fn guard(
    letters: &mut dyn Read,
    (pid, start_time): (u32, u64),
    journal: &Path,
    patience: Duration,
) -> Result<Guarded, GuardError> {
    let target = Target::look(pid)?;
    if target.start_time != start_time {
        return Err(GuardError::Another { pid });
    }
    if !must_act(letters) {
        return Ok(Guarded::Nothing);
    }
    let driver = Driver::open()?;
    let started = Instant::now();
    loop {
        if !target.is_alive() {
            return Ok(Guarded::NotLocked);
        }
        // Somebody else may have taken the target in hand by now: then its lock is theirs.
        let Some(held) = lock_named(journal)? else {
            return Ok(Guarded::NotLocked);
        };
        match driver.state(pid) {
            Ok(ProcessState::Locked) => {
                LockedProcess::attach(&driver, pid)?.let_go()?;
                return Ok(Guarded::Unlocked);
            }
            // The driver may grant the lock to the dead yet.
            Ok(ProcessState::Running) | Err(_) if started.elapsed() < patience => {}
            Ok(_) => return Ok(Guarded::NotLocked),
            Err(error) => return Err(error.into()),
        }
        drop(held);
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Whether the saver died while it was armed.
fn must_act(letters: &mut dyn Read) -> bool {
    let mut is_armed = false;
    let mut letter = [0];
    loop {
        match letters.read(&mut letter) {
            Ok(0) => return is_armed,
            Ok(_) => match letter[0] {
                ARM => is_armed = true,
                END => return false,
                _ => is_armed = false,
            },
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return is_armed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_death_while_armed_is_acted_upon() {
        for (letters, acts) in [
            (&[][..], false),
            (&[ARM], true),
            (&[ARM, DISARM], false),
            (&[ARM, DISARM, ARM], true),
            (&[ARM, END], false),
        ] {
            assert_eq!(must_act(&mut &letters[..]), acts, "{letters:?}");
        }
    }

    #[test]
    fn another_process_of_the_same_pid_is_left_alone() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let target = Target::look(child.id()).unwrap();
        let later = target.start_time + 1;
        let journal = tempfile::NamedTempFile::new().unwrap();
        let of_another = (target.pid, later);
        let refused = guard(&mut &[ARM][..], of_another, journal.path(), Duration::ZERO);
        assert!(
            matches!(refused, Err(GuardError::Another { .. })),
            "{refused:?}"
        );
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
