//! Where a job runs on this node, written down: a supervision that is killed leaves it running, and the next one must not start it a second time.
//!
//! In: the job's process. Out: `<state_dir>/<job>.job.json` as long as it is supervised. What can fail: the directory cannot be written to, which is told.

use std::io;
use std::path::PathBuf;

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

    /// The process of an earlier supervision that may still run. What cannot be read tells of none.
    pub(super) fn left_behind(&self) -> Option<ProcessIdentity> {
        let text = std::fs::read(&self.path).ok()?;
        let job: ProcessIdentity = serde_json::from_slice(&text).ok()?;
        let ours = ProcessIdentity::ours().ok()?;
        let is_here = job.boot_id == ours.boot_id && job.pid_namespace == ours.pid_namespace;
        (is_here && !job.is_known_dead()).then_some(job)
    }

    /// Writes down the job's process.
    pub(super) fn note(&self, pid: u32) {
        let noted = ProcessIdentity::of(pid)
            .map_err(io::Error::other)
            .and_then(|job| std::fs::write(&self.path, serde_json::to_vec(&job)?));
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
