//! Where a job runs on this node, written down: a supervision that is killed leaves it running, and the next one must not start it a second time.
//!
//! In: the job's process. Out: `<state_dir>/<job>.job.json` as long as it is supervised. What can fail: the directory cannot be written to, which is told.

use std::io;
use std::path::{Path, PathBuf};

use super::replace;
use crate::config::Config;
use crate::writer::ProcessIdentity;

/// The file, which says which process the job is.
#[derive(Debug)]
pub(super) struct Whereabouts {
    path: PathBuf,
}

impl Whereabouts {
    pub(super) fn of(config: &Config) -> Self {
        let name = format!("{}.job.json", config.job);
        Self {
            path: config.state_dir().join(name),
        }
    }

    /// The process of an earlier supervision that may still run.
    ///
    /// # Errors
    /// The file is there and says nothing that makes sense.
    pub(super) fn left_behind(&self) -> io::Result<Option<ProcessIdentity>> {
        let text = match std::fs::read(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let job: ProcessIdentity = serde_json::from_slice(&text)?;
        let ours = ProcessIdentity::ours().map_err(io::Error::other)?;
        let is_here = job.boot_id == ours.boot_id && job.pid_namespace == ours.pid_namespace;
        Ok((is_here && !job.is_known_dead()).then_some(job))
    }

    /// The file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes down the job's process.
    pub(super) fn note(&self, pid: u32) {
        let noted = ProcessIdentity::of(pid)
            .map_err(io::Error::other)
            .and_then(|job| replace(&self.path, &serde_json::to_vec(&job)?));
        if let Err(error) = noted {
            tracing::warn!(
                "a later run on this node will not know of process {pid}: {}: {error}",
                self.path.display()
            );
        }
    }

    /// The job is not supervised any more, because it has ended or was ended.
    pub(super) fn forget(&self) {
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::debug!("{} stays: {error}", self.path.display());
            }
            _ => {}
        }
    }
}
