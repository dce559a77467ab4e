//! The final word: exit codes, and the error that carries one.
//!
//! In: an error of a layer (driver, store, plan, manifest, codec, config). Out: a [`Failure`], which says what a script
//! should do ([`ExitCode`]), where it happened ([`Phase`]), why (the cause chain), and what was looked up about the target afterwards.
//! The layers keep their own enums; only the two stories and the command line make a `Failure`.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Exit codes of every command. The numbers are a contract with schedulers' scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum ExitCode {
    /// Done as asked.
    Ok = 0,
    /// Usage or configuration error; nothing was touched.
    Config = 2,
    /// Preflight refused: something needed is absent; nothing was touched.
    Preflight = 3,
    /// The job or the target belongs to someone else.
    NotOurs = 4,
    /// The save does not fit into the notice, and was refused: the target runs.
    DoesNotFit = 5,
    /// Nothing to restore: proved that there is no image, or the job finished.
    NothingToRestore = 6,
    /// Nothing to save: the target ended by itself, or is already suspended under a committed image.
    NothingToSave = 7,
    /// Failed before BEGIN, or the job was given back: the target runs (looked up).
    RolledBack = 10,
    /// Failed after BEGIN, and sealed in the spill: `resume` finishes it.
    Spilled = 11,
    /// Failed after BEGIN, nothing preserved; the target's state is said exactly.
    Lost = 12,
    /// The commit's outcome is unknown: the store cannot be reached.
    CommitUnknown = 13,
    /// Committed, but the target is not as asked.
    CommittedTargetAstray = 14,
    /// Another writer took the job after BEGIN.
    Fenced = 15,
    /// Suspended and alive; its GPU memory is in an image, its host memory in the process alone.
    HostMemoryNotSaved = 16,
    /// Restore refused before the driver was touched.
    RestoreRefused = 20,
    /// Restore failed after the driver was touched: end the target and restore again.
    RestoreFailed = 21,
}

impl ExitCode {
    /// Every code, in ascending order, for documentation and tests.
    pub const ALL: &'static [ExitCode] = &[
        ExitCode::Ok,
        ExitCode::Config,
        ExitCode::Preflight,
        ExitCode::NotOurs,
        ExitCode::DoesNotFit,
        ExitCode::NothingToRestore,
        ExitCode::NothingToSave,
        ExitCode::RolledBack,
        ExitCode::Spilled,
        ExitCode::Lost,
        ExitCode::CommitUnknown,
        ExitCode::CommittedTargetAstray,
        ExitCode::Fenced,
        ExitCode::HostMemoryNotSaved,
        ExitCode::RestoreRefused,
        ExitCode::RestoreFailed,
    ];

    /// As exit statuses of `run` and `watch`, whose others are the job's, verdicts begin here.
    pub const VERDICTS_FROM: u8 = 200;

    /// What a command's result means.
    pub(crate) fn of<T>(result: &Result<T, Failure>) -> Self {
        result
            .as_ref()
            .map_or_else(|failure| failure.code, |_| ExitCode::Ok)
    }

    /// The one with this number.
    pub fn from_code(code: u8) -> Option<Self> {
        let mut all = Self::ALL.iter().copied();
        all.find(|known| known.code() == code)
    }

    /// The process exit status.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// What a script does next, as the JSON result's `next` says it.
    pub fn next(self) -> &'static str {
        match self {
            ExitCode::Ok
            | ExitCode::DoesNotFit
            | ExitCode::NothingToRestore
            | ExitCode::NothingToSave
            | ExitCode::NotOurs
            | ExitCode::Fenced => "none",
            ExitCode::Config | ExitCode::Preflight => "fix-config",
            ExitCode::RolledBack => "retry",
            ExitCode::Spilled => "resume",
            ExitCode::Lost | ExitCode::CommitUnknown | ExitCode::RestoreRefused => "human",
            ExitCode::CommittedTargetAstray => "end-process",
            ExitCode::RestoreFailed | ExitCode::HostMemoryNotSaved => "restore",
        }
    }

    /// `true` when the same command may succeed later without anybody changing anything.
    pub fn is_retryable(self) -> bool {
        matches!(self, ExitCode::RolledBack | ExitCode::RestoreFailed)
    }

    /// What the code means, in a few words for the last line on stderr.
    pub fn meaning(self) -> &'static str {
        match self {
            ExitCode::Ok => "done as asked",
            ExitCode::Config => "usage or configuration error",
            ExitCode::Preflight => "refused beforehand",
            ExitCode::NotOurs => "the job or the target belongs to someone else",
            ExitCode::DoesNotFit => "does not fit into the notice",
            ExitCode::NothingToRestore => "nothing to restore",
            ExitCode::NothingToSave => "nothing to save",
            ExitCode::RolledBack => "nothing was saved, the target runs on",
            ExitCode::Spilled => "not in the store yet, sealed in the spill",
            ExitCode::Lost => "nothing was preserved, and the target does not run",
            ExitCode::CommitUnknown => "commit unknown",
            ExitCode::CommittedTargetAstray => "committed, but the target is not as asked",
            ExitCode::Fenced => "another writer took the job",
            ExitCode::HostMemoryNotSaved => "suspended, its host memory not saved",
            ExitCode::RestoreRefused => "refused before the driver was touched",
            ExitCode::RestoreFailed => "failed after the driver was touched",
        }
    }

    /// What a person does next, for the last line on stderr.
    pub fn advice(self) -> &'static str {
        match self {
            ExitCode::Ok | ExitCode::NothingToSave => "nothing to do",
            ExitCode::Config => "correct the flag or key that it names",
            ExitCode::Preflight => "correct what it names, then try again",
            ExitCode::NotOurs | ExitCode::Fenced => "do not requeue the job from here",
            ExitCode::DoesNotFit => "let the job use its own time",
            ExitCode::NothingToRestore => "start the job afresh",
            ExitCode::RolledBack => "try again later",
            ExitCode::Spilled => {
                "run `ckptstream resume` with the same configuration where the spill can be read"
            }
            ExitCode::Lost => {
                "take a target that is checkpointing as lost, because what the driver does with it once ckptstream is gone is not documented; a person must decide"
            }
            ExitCode::CommitUnknown => "run `ckptstream list` when the store can be reached again",
            ExitCode::CommittedTargetAstray => {
                "the image is good: end the target, then restore it elsewhere"
            }
            ExitCode::HostMemoryNotSaved => {
                "run `ckptstream restore --pid` on this node while the process lives"
            }
            ExitCode::RestoreRefused => "read the cause; nothing was changed",
            ExitCode::RestoreFailed => "end the target, then restore again",
        }
    }
}

/// Where in the life of a save or a restore something happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Phase {
    /// Flags, configuration, and everything else before the store or the driver is asked.
    Config,
    /// Everything that can fail or take time while the target still runs.
    Prepare,
    /// The driver's lock.
    Lock,
    /// The driver's checkpoint call, up to its return.
    Begin,
    /// Chunks flow from the GPUs to the store.
    Stream,
    /// What the GPUs held, of all processes of a tree, is sealed in the store, and let go.
    Seal,
    /// CRIU's images flow to the store.
    Dump,
    /// Uploads are completed and looked at.
    Land,
    /// Frame tables, manifest and the log entry.
    Commit,
    /// Everything is written once more, to the spill, because the store did not take it.
    Spill,
    /// `cuCheckpointOperationComplete` and the look at the state after it.
    Complete,
    /// An image is read and checked; the driver is not touched yet.
    Read,
    /// The driver was asked to restore; chunks flow to the GPUs.
    Restore,
    /// The driver's unlock.
    Unlock,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Config => "config",
            Phase::Prepare => "prepare",
            Phase::Lock => "lock",
            Phase::Begin => "begin",
            Phase::Stream => "stream",
            Phase::Seal => "seal",
            Phase::Dump => "dump",
            Phase::Land => "land",
            Phase::Commit => "commit",
            Phase::Spill => "spill",
            Phase::Complete => "complete",
            Phase::Read => "read",
            Phase::Restore => "restore",
            Phase::Unlock => "unlock",
        })
    }
}

/// A target process as it was looked up after the fact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TargetState {
    /// Process id in our pid namespace.
    pub pid: u32,
    /// `running`, `locked`, `checkpointing`, `checkpointed`, `restoring`, `failed`, `gone` or `unknown`.
    pub state: String,
}

/// A command that did not do what was asked, with everything that is known about it.
#[derive(Debug)]
pub struct Failure {
    /// What a script should conclude.
    pub code: ExitCode,
    /// Where it happened.
    pub phase: Phase,
    /// Why: the first error; its sources are the cause chain.
    pub cause: Box<dyn std::error::Error + Send + Sync + 'static>,
    /// The image's place in the job's log, when it was committed before the failure.
    pub generation: Option<u64>,
    /// Targets as looked up after the failure; empty when none was touched.
    pub targets: Vec<TargetState>,
    /// Clean-up that failed too. Never in place of the cause.
    pub attached: Vec<String>,
    /// What is to be known besides.
    pub notes: Vec<String>,
}

impl Failure {
    /// A failure with this code in this phase, nothing known about targets yet.
    pub fn new(
        code: ExitCode,
        phase: Phase,
        cause: impl Into<Box<dyn std::error::Error + Send + Sync + 'static>>,
    ) -> Self {
        Self {
            code,
            phase,
            cause: cause.into(),
            generation: None,
            targets: Vec::new(),
            attached: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// The cause and its sources, outermost first.
    pub fn cause_chain(&self) -> Vec<String> {
        chain(self.cause.as_ref())
    }
}

/// An error and its sources, outermost first.
pub fn chain(error: &(dyn std::error::Error + 'static)) -> Vec<String> {
    std::iter::successors(Some(error), |error| error.source())
        .map(ToString::to_string)
        .collect()
}

/// An error and its sources in one line, outermost first.
pub fn one_line(error: &(dyn std::error::Error + 'static)) -> String {
    chain(error).join(": ")
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed (exit {})", self.phase, self.code.code())
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(self.cause.as_ref())
    }
}
