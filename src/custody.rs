//! A target in our hands: who it is, what is written down about it, and who lets it go if we die.
//!
//! In: a pid. Out: a [`Custody`], held by one ckptstream at a time. What can fail: there is no such process, somebody else has it, the journal cannot be written; all before the target is touched. After BEGIN nothing here fails.

use std::path::Path;

use crate::config::Config;
use crate::error::ExitCode;
use crate::guard::Guard;
use crate::journal::{self, Head, Journal, JournalError, Step};
use crate::session::Session;
use crate::store::Store;
use crate::target::{Target, TargetError};
use crate::writer::ProcessIdentity;

/// A target that nobody else has.
#[derive(Debug)]
pub struct Custody {
    /// Who it is.
    pub target: Target,
    journal: Journal,
    guard: Option<Guard>,
}

/// The target cannot be taken in hand.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CustodyError {
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error(transparent)]
    Journal(#[from] JournalError),
}

impl CustodyError {
    /// Somebody else has it.
    pub(crate) fn is_held(&self) -> bool {
        matches!(self, Self::Journal(JournalError::Held { .. }))
    }
}

impl Custody {
    /// Takes a process in hand; `command` is what is to be done with it.
    pub(crate) fn take(session: &Session, pid: u32, command: &str) -> Result<Self, CustodyError> {
        let target = Target::look(pid)?;
        let by = ProcessIdentity::ours()?;
        let config: &Config = &session.config;
        let head = |target| Head {
            format: journal::FORMAT,
            command: command.to_owned(),
            job: config.job.to_string(),
            store: session.store.describe(),
            spill: config.spill.place.as_ref().map(|place| place.path.clone()),
            by,
            target,
        };
        let journal = Journal::open(&config.state_dir(), &target, head)?;
        let guard = session.guard.as_deref();
        let guard =
            guard.and_then(|program| Self::start_guard(session, program, &target, &journal));
        Ok(Self {
            target,
            journal,
            guard,
        })
    }

    fn start_guard(
        session: &Session,
        program: &Path,
        target: &Target,
        journal: &Journal,
    ) -> Option<Guard> {
        // A lock that was granted to the dead comes within its own timeout, or not at all.
        let patience = session.config.driver.lock_timeout;
        match Guard::start(program, target, journal.path(), patience) {
            Ok(guard) => Some(guard),
            Err(error) => {
                tracing::warn!(
                    "nobody unlocks the target if we die: no guard can be started ({error})"
                );
                None
            }
        }
    }

    /// Writes down a step before it is taken.
    pub(crate) fn step(&self, step: &Step) -> Result<(), JournalError> {
        self.journal.step(step)
    }

    /// Writes down a step that is taken in any case.
    pub(crate) fn note(&self, step: Step) {
        self.journal.note(step);
    }

    /// What was noted is written, within reason.
    pub(crate) fn flush(&self) {
        self.journal.flush();
    }

    /// From now on the target may be locked, with its memory its own: it is to be unlocked if we die.
    pub(crate) fn may_be_locked(&self) {
        if let Some(guard) = &self.guard {
            guard.arm();
        }
    }

    /// From now on it must not be unlocked by anybody, or need not.
    pub(crate) fn must_not_be_unlocked(&self) {
        if let Some(guard) = &self.guard {
            guard.disarm();
        }
    }

    /// Lets go. What a verdict leaves to be done stays written down, for `recover`.
    pub(crate) fn end(self, verdict: ExitCode) {
        match verdict {
            ExitCode::Spilled
            | ExitCode::Lost
            | ExitCode::CommitUnknown
            | ExitCode::CommittedTargetAstray
            | ExitCode::Fenced
            | ExitCode::HostMemoryNotSaved
            | ExitCode::RestoreFailed => self.journal.flush(),
            _ => self.journal.end(),
        }
    }
}
