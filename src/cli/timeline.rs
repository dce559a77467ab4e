//! `--timeline FILE`: the file is there before anything is touched, and is written when everything is over, also when it failed.
//!
//! In: a path whose ending says the format, and a run. Out: the file. What can fail: a path that cannot be written (exit 2, before anything else); later only a warning, because
//! what became of the job counts.

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use crate::error::{ExitCode, Failure, Phase};
use crate::progress::Meter;
use crate::timeline::{Recorder, Run, Sampler, html, trace};

/// Where the timeline goes, and in which format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TimelinePath {
    path: PathBuf,
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    /// A page for any browser.
    Html,
    /// Chrome's trace events.
    Trace,
}

/// Why a path is no place for a timeline.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the file's name must end in .html (a page for any browser) or in .json (a trace for Perfetto and chrome://tracing)"
)]
pub(super) struct UnknownEnding;

/// The file cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot create the timeline {path} (--timeline)")]
struct NotCreated {
    path: String,
    #[source]
    source: std::io::Error,
}

impl TimelinePath {
    /// Reads the format off the ending.
    ///
    /// # Errors
    /// It is another one than `.html` and `.json`.
    pub(super) fn new(path: PathBuf) -> Result<Self, UnknownEnding> {
        let ending = path
            .extension()
            .map(|ending| ending.to_string_lossy().to_lowercase());
        let format = match ending.as_deref() {
            Some("html") => Format::Html,
            Some("json") => Format::Trace,
            _ => return Err(UnknownEnding),
        };
        Ok(Self { path, format })
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

/// A run that is recorded.
#[derive(Debug)]
pub(super) struct Recording {
    target: TimelinePath,
    file: File,
    recorder: Arc<Recorder>,
    meter: Arc<Meter>,
    sampler: Sampler,
}

impl Recording {
    /// Makes the file, and records from now on; `started` is when the run began.
    ///
    /// # Errors
    /// Exit 2 when the file cannot be made.
    pub(super) fn start(target: &TimelinePath, started: Instant) -> Result<Self, Failure> {
        let file = File::create(target.path()).map_err(|source| {
            let path = target.path().display().to_string();
            let cause = NotCreated { path, source };
            Failure::new(ExitCode::Config, Phase::Config, cause)
        })?;
        let recorder = Recorder::new(started);
        let meter = Meter::recorded(Arc::clone(&recorder));
        let sampler = Sampler::start(&recorder, &meter);
        Ok(Self {
            target: target.clone(),
            file,
            recorder,
            meter,
            sampler,
        })
    }

    /// The meter that tells it everything.
    pub(super) fn meter(&self) -> Arc<Meter> {
        Arc::clone(&self.meter)
    }

    /// Writes the file.
    pub(super) fn end(self, run: Run) {
        drop(self.sampler);
        let timeline = self.recorder.timeline(run);
        let out = BufWriter::new(self.file);
        let written = match self.target.format {
            Format::Html => html::write(&timeline, out),
            Format::Trace => trace::write(&timeline, out),
        };
        if let Err(error) = written {
            let path = self.target.path().display();
            tracing::warn!("the timeline {path} could not be written: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ending_is_the_format() {
        for (name, format) in [("a.html", Format::Html), ("b/c.JSON", Format::Trace)] {
            let path = TimelinePath::new(name.into()).expect(name);
            assert_eq!(path.format, format, "{name}");
        }
        for name in ["a", "a.txt", "html", ".html", "a.html.gz"] {
            assert_eq!(TimelinePath::new(name.into()), Err(UnknownEnding), "{name}");
        }
    }
}
