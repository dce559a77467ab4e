//! A server's script: a file that may change while the server runs.
//!
//! In: a path, and what reads the file's text. Out: the script in force, read again whenever the file's time, length or inode has changed; what was counted in the old one is gone then. A file that cannot be read
//! or understood stops the server at the start; later it leaves the old script in force and is reported on standard error.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

/// Largest file that is read.
const FILE_LEN_MAX: u64 = 1 << 20;

/// Why a text is not a script.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FormatError {
    #[error("it is not what such a file holds")]
    Json(#[from] serde_json::Error),
    #[error("rule {index}, counted from 0: {reason}")]
    Rule { index: usize, reason: String },
    #[error("{0}")]
    Other(String),
}

/// Why a rules file was not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ScriptError {
    #[error("rules file {path} cannot be read")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("rules file {path} is longer than {FILE_LEN_MAX} bytes")]
    TooLong { path: PathBuf },
    #[error("rules file {path} was not accepted")]
    Format { path: PathBuf, source: FormatError },
}

type Parse<S> = fn(&[u8]) -> Result<S, FormatError>;

/// The script in force.
pub(crate) struct ScriptFile<S> {
    path: Option<PathBuf>,
    parse: Parse<S>,
    state: Mutex<State<S>>,
}

struct State<S> {
    stamp: Option<Stamp>,
    /// Scripts that were read after the first one.
    version: u64,
    script: S,
}

#[derive(PartialEq, Eq)]
struct Stamp {
    modified: Option<SystemTime>,
    len: u64,
    inode: u64,
}

impl<S: Default> ScriptFile<S> {
    /// Reads the file; without one the script is the usual one, and stays so.
    pub(crate) fn open(path: Option<PathBuf>, parse: Parse<S>) -> Result<Self, ScriptError> {
        let mut state = State {
            stamp: None,
            version: 0,
            script: S::default(),
        };
        if let Some(path) = &path {
            state.stamp = stamp(path);
            state.script = load(path, parse)?;
        }
        Ok(Self {
            path,
            parse,
            state: Mutex::new(state),
        })
    }

    /// Looks into the script that is in force now.
    pub(crate) fn with<T>(&self, look: impl FnOnce(&mut S) -> T) -> T {
        self.with_version(look).0
    }

    /// Looks into the script that is in force now; another one has another number.
    pub(crate) fn with_version<T>(&self, look: impl FnOnce(&mut S) -> T) -> (T, u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(path) = &self.path {
            state.refresh(path, self.parse);
        }
        (look(&mut state.script), state.version)
    }
}

impl<S> State<S> {
    #[expect(
        clippy::print_stderr,
        reason = "a test server's only place to complain"
    )]
    fn refresh(&mut self, path: &Path, parse: Parse<S>) {
        let now = stamp(path);
        if now == self.stamp {
            return;
        }
        match load(path, parse) {
            Ok(script) => {
                self.script = script;
                self.version += 1;
            }
            Err(error) => eprintln!(
                "testkit: the old rules stay in force: {}",
                crate::server::chain(&error)
            ),
        }
        self.stamp = now;
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let meta = std::fs::metadata(path).ok()?;
    Some(Stamp {
        modified: meta.modified().ok(),
        len: meta.len(),
        inode: meta.ino(),
    })
}

fn load<S>(path: &Path, parse: Parse<S>) -> Result<S, ScriptError> {
    let read_error = |source| ScriptError::Read {
        path: path.to_owned(),
        source,
    };
    if std::fs::metadata(path).map_err(read_error)?.len() > FILE_LEN_MAX {
        return Err(ScriptError::TooLong {
            path: path.to_owned(),
        });
    }
    let text = std::fs::read(path).map_err(read_error)?;
    parse(&text).map_err(|source| ScriptError::Format {
        path: path.to_owned(),
        source,
    })
}
