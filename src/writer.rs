//! Who writes: this process as others can know it, and names that nobody else has.
//!
//! In: the kernel. Out: random hex digits, labels, an identity by which a process on the same node finds out that this one is dead. What can fail: the look at ourselves, and the store where it is asked.

use std::time::{SystemTime, UNIX_EPOCH};

use futures::future::try_join_all;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};

use crate::config::JobName;
use crate::manifest::{AttemptClaim, FORMAT};
use crate::store::{Key, PutOutcome, Store, StoreError};
use crate::target::{TargetError, boot_id, pid_namespace, start_time};

/// A process, beyond its pid: another one never has all of these.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// Name of its node. A label.
    pub host: String,
    /// The kernel's id of the boot.
    pub boot_id: String,
    /// Inode of the pid namespace that `pid` is meant in.
    pub pid_namespace: u64,
    /// Its pid there.
    pub pid: u32,
    /// Clock ticks between boot and its start.
    pub start_time: u64,
}

/// What claims a prefix of the store for an attempt of ours.
pub(crate) fn claim(job: &JobName, attempt: &str) -> AttemptClaim {
    AttemptClaim {
        format: FORMAT,
        job: job.to_string(),
        attempt: attempt.to_owned(),
        tool: tool(),
        host: host_name(),
        pid: std::process::id(),
        created_ms: now_ms(),
    }
}

/// How often that is tried at most, each time with a fresh object: connections that stand already bring requests closer together than the first ones.
pub(crate) const CONTESTS: u32 = 4;

/// Creates one object so many times at once, with other bytes each. How many are told that they were first: one, where creates are atomic.
pub(crate) async fn winners_at_once(
    store: &dyn Store,
    key: &Key,
    contestants: usize,
) -> Result<usize, StoreError> {
    let puts = (0..contestants).map(|number| {
        let body = format!(
            "{{\"contestant\":{number},\"note\":\"created by several requests at once, to see whether the store lets exactly one of them be first; nothing reads it\"}}\n"
        );
        store.put_if_absent(key, body.into())
    });
    let outcomes = try_join_all(puts).await?;
    let created = outcomes.iter().filter(|it| **it == PutOutcome::Created);
    Ok(created.count())
}

impl ProcessIdentity {
    /// Ourselves.
    ///
    /// # Errors
    /// [`TargetError`] where `/proc` cannot be read.
    pub fn ours() -> Result<Self, TargetError> {
        Self::of(std::process::id())
    }

    /// A process of our pid namespace.
    ///
    /// # Errors
    /// [`TargetError`] where it has ended, or cannot be looked at.
    pub fn of(pid: u32) -> Result<Self, TargetError> {
        Ok(Self {
            host: host_name(),
            boot_id: boot_id()?,
            pid_namespace: pid_namespace()?,
            pid,
            start_time: start_time(pid)?,
        })
    }

    /// It ran on this node, in our pid namespace, and has ended. `false` also where that cannot be known.
    pub fn is_known_dead(&self) -> bool {
        let (Ok(boot_id), Ok(pid_namespace)) = (boot_id(), pid_namespace()) else {
            return false;
        };
        if boot_id != self.boot_id || pid_namespace != self.pid_namespace {
            return false;
        }
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else {
            return false;
        };
        if test_kill_process(pid) == Err(Errno::SRCH) {
            return true;
        }
        // A zombie has ended. Of a process that we may not look at nothing is known.
        match start_time(self.pid) {
            Ok(there) => there != self.start_time,
            Err(TargetError::Ended { .. }) => true,
            Err(_) => false,
        }
    }

    /// It runs on this node, in our pid namespace. `false` also where that cannot be known.
    pub fn is_known_alive(&self) -> bool {
        let is_here = boot_id().is_ok_and(|boot_id| boot_id == self.boot_id)
            && pid_namespace().is_ok_and(|namespace| namespace == self.pid_namespace);
        is_here && start_time(self.pid).is_ok_and(|there| there == self.start_time)
    }
}

/// Random bits in hex digits: enough of them name an attempt for good, a few make a key fresh within it.
pub(crate) fn random_hex<const LEN: usize>() -> String {
    let mut bytes = [0_u8; LEN];
    let mut filled = 0;
    while filled < LEN {
        // The kernel's pool is there from early boot on, and a request of this size is never cut short but by a signal.
        filled +=
            rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())
                .unwrap_or(0);
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The program, for the labels of what is written.
pub(crate) fn tool() -> String {
    concat!("ckptstream ", env!("CARGO_PKG_VERSION")).to_owned()
}

pub(crate) fn host_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

/// Milliseconds since 1970 by our own clock: a label, nothing is ordered by it.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| {
            u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_was_here_and_has_ended_is_known_to_be_dead() {
        let ours = ProcessIdentity::ours().unwrap();
        assert!(!ours.is_known_dead());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        let gone = ProcessIdentity {
            pid,
            ..ours.clone()
        };
        assert!(gone.is_known_dead());
        let earlier = ProcessIdentity {
            start_time: ours.start_time - 1,
            ..ours.clone()
        };
        assert!(earlier.is_known_dead(), "our pid was another process's");
        for elsewhere in [
            ProcessIdentity {
                boot_id: "another".to_owned(),
                ..gone.clone()
            },
            ProcessIdentity {
                pid_namespace: 0,
                ..gone.clone()
            },
        ] {
            assert!(!elsewhere.is_known_dead(), "{elsewhere:?}");
        }
    }
}
