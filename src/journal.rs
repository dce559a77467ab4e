//! What is under way with a target on this node, written down before it is done, so that `recover` knows what a saver that died has left behind.
//!
//! In: steps. Out: `<state_dir>/<pid>.<start time>.journal`, one JSON object per line, locked as long as its owner lives: one ckptstream at a time is at work on a target. What can fail: the directory, a disk that is full, somebody
//! else at work ([`JournalError::Held`]). Up to BEGIN nothing is done that could not be written down; after it the journal has a thread of its own, and a failure only warns.
//!
//! | we die | what exists |
//! |---|---|
//! | at any step | the steps up to this one, in an unlocked file |
//! | after the end | no file |

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Sender};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{Access, FlockOperation, access, flock};
use serde::{Deserialize, Serialize};

use crate::target::Target;
use crate::writer::ProcessIdentity;

/// Version of the journals that this build writes and reads.
pub const FORMAT: u32 = 1;

/// Most bytes of a journal that are read, 1 MiB: a real one has a few lines.
const LEN_MAX: u64 = 1 << 20;

const ENDING: &str = ".journal";

/// How long the last lines may take to reach the file.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The first line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// [`FORMAT`].
    pub format: u32,
    /// `checkpoint` or `restore`.
    pub command: String,
    /// The job.
    pub job: String,
    /// The store, as it describes itself.
    pub store: String,
    /// Directory of the spill, if there is one.
    pub spill: Option<PathBuf>,
    /// The process that is at work.
    pub by: ProcessIdentity,
    /// The process that it is at work on.
    pub target: TargetRecord,
}

/// A target as a later process can know it again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetRecord {
    /// In the owner's pid namespace.
    pub pid: u32,
    /// Clock ticks between boot and its start.
    pub start_time: u64,
    /// The boot.
    pub boot_id: String,
    /// Command name.
    pub name: String,
}

impl TargetRecord {
    fn of(target: &Target) -> Self {
        Self {
            pid: target.pid,
            start_time: target.start_time,
            boot_id: target.boot_id.clone(),
            name: target.name.clone(),
        }
    }

    /// Whether this is the very process.
    pub fn is(&self, target: &Target) -> bool {
        *self == Self::of(target)
    }
}

/// A step, written down before it is taken unless its name says otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "kebab-case")]
pub enum Step {
    /// The save is this attempt.
    Attempt {
        /// Its nonce.
        attempt: String,
        /// Slot of the job's log behind the writer's last entry.
        next_slot: u64,
    },
    /// `cuCheckpointProcessLock`.
    Lock,
    /// `cuCheckpointProcessUnlock`, of a target whose memory is its own.
    Unlock,
    /// `cuCheckpointProcessCheckpoint`.
    Begin,
    /// The target is saved with its whole tree, which may be stopped from now on.
    Tree {
        /// Its root.
        root: u32,
        /// Clock ticks between boot and the root's start.
        root_start: u64,
    },
    /// `cuCheckpointProcessCheckpoint` into the target's own host memory.
    Stage,
    /// The save is sealed: in the spill, or, with the tree, in the store.
    Sealed,
    /// The target is to get its memory back from the sealed save, whose seal is broken before it runs.
    GiveBack,
    /// The image is committed.
    Committed {
        /// Its generation.
        generation: u64,
    },
    /// `cuCheckpointOperationComplete` of a save.
    Complete,
    /// SIGKILL for the tree, whose image is committed.
    EndTree,
    /// `cuCheckpointProcessRestore`.
    Restore,
    /// `cuCheckpointOperationComplete` of a restore: every byte is in.
    RestoreComplete,
}

/// Nothing can be written down, or somebody else is at work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// Another ckptstream has the target.
    #[error("{} is at work on process {pid} already", by.as_deref().unwrap_or("another ckptstream"))]
    Held {
        /// The target.
        pid: u32,
        /// Who.
        by: Option<String>,
    },
    /// Where journals are kept is not ours alone.
    #[error("{} is not a directory that only we may write to (job.state_dir)", path.display())]
    NotOurs {
        /// The directory.
        path: PathBuf,
    },
    /// The file system.
    #[error("the journal {} cannot be written (job.state_dir)", path.display())]
    Io {
        /// File or directory.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

/// The journal of one target, ours as long as this lives. Before the first step the file holds what an earlier owner left, who died: whoever is refused has not changed anything.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    /// The first line, until it is written.
    head: Mutex<Option<Head>>,
    /// Of the thread that writes after BEGIN, once it is there.
    later: Mutex<Option<Sender<Line>>>,
}

#[derive(Debug)]
enum Line {
    Step(Step),
    /// Everything before it is written.
    Flushed(Sender<()>),
}

/// Where journals are kept unless the configuration says otherwise: a place that the node forgets when it boots.
pub fn default_dir() -> PathBuf {
    let uid = rustix::process::getuid().as_raw();
    // In a container it may be there to be read only.
    let has_run = uid == 0 && access("/run", Access::WRITE_OK).is_ok();
    match std::env::var_os("XDG_RUNTIME_DIR") {
        _ if has_run => PathBuf::from("/run/ckptstream"),
        Some(dir) => PathBuf::from(dir).join("ckptstream"),
        None => std::env::temp_dir().join(format!("ckptstream-{uid}")),
    }
}

impl Journal {
    /// Opens the journal of a target.
    ///
    /// # Errors
    /// Any [`JournalError`].
    pub fn open(
        dir: &Path,
        target: &Target,
        head: impl FnOnce(TargetRecord) -> Head,
    ) -> Result<Self, JournalError> {
        make_dir(dir)?;
        let record = TargetRecord::of(target);
        let path = dir.join(format!("{}.{}{ENDING}", record.pid, record.start_time));
        let failed = |source: io::Error| JournalError::Io {
            path: path.clone(),
            source,
        };
        let file = lock_named(&path).map_err(failed)?;
        let Some(file) = file else {
            // Before its first step the file still tells of an earlier owner.
            let head = read(&path).ok().map(|(head, _)| head);
            let by = head
                .filter(|head| !head.by.is_known_dead())
                .map(|head| format!("ckptstream {} (process {})", head.command, head.by.pid));
            return Err(JournalError::Held {
                pid: target.pid,
                by,
            });
        };
        Ok(Self {
            path,
            file,
            head: Mutex::new(Some(head(record))),
            later: Mutex::new(None),
        })
    }

    /// The first step is taken: from now on the file is about us.
    fn begin(&self) -> io::Result<()> {
        let mut head = self.head.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(first) = head.as_ref() {
            let line = serde_json::to_string(first)?;
            self.file.set_len(0)?;
            self.write_line(&line)?;
            *head = None;
        }
        Ok(())
    }

    /// Writes a step down, up to BEGIN.
    ///
    /// # Errors
    /// [`JournalError::Io`]: then the step must not be taken.
    pub fn step(&self, step: &Step) -> Result<(), JournalError> {
        let line = serde_json::to_string(step).map_err(io::Error::from);
        let written = line.and_then(|line| {
            self.begin()?;
            self.write_line(&line)
        });
        written.map_err(|source| JournalError::Io {
            path: self.path.clone(),
            source,
        })
    }

    /// Writes a step down that is taken in any case. Nobody waits for it.
    pub fn note(&self, step: Step) {
        let mut later = self.later.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = self.begin() {
            tracing::warn!(
                "the journal {} is not up to date: {error}",
                self.path.display()
            );
        }
        if later.is_none() {
            *later = self.write_on_a_thread();
        }
        if let Some(lines) = &*later {
            // The thread ends with the sender.
            let _ = lines.send(Line::Step(step));
        }
    }

    fn write_on_a_thread(&self) -> Option<Sender<Line>> {
        let file = self.file.try_clone().ok()?;
        let path = self.path.clone();
        let (sender, lines) = mpsc::channel();
        let write = move || {
            for line in lines {
                match line {
                    Line::Step(step) => {
                        let written = serde_json::to_string(&step)
                            .map_err(io::Error::from)
                            .and_then(|line| write_line(&file, &line));
                        if let Err(error) = written {
                            tracing::warn!(
                                "the journal {} is not up to date: {error}",
                                path.display()
                            );
                        }
                    }
                    Line::Flushed(told) => {
                        let _ = told.send(());
                    }
                }
            }
        };
        let spawned = std::thread::Builder::new()
            .name("journal".to_owned())
            .spawn(write);
        spawned.ok().map(|_thread| sender)
    }

    fn write_line(&self, line: &str) -> io::Result<()> {
        write_line(&self.file, line)
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until what was noted is written, within reason.
    pub fn flush(&self) {
        let later = self.later.lock().unwrap_or_else(PoisonError::into_inner);
        let (told, flushed) = mpsc::channel();
        if let Some(lines) = &*later
            && lines.send(Line::Flushed(told)).is_ok()
        {
            // A disk that hangs is not waited for.
            let _ = flushed.recv_timeout(FLUSH_TIMEOUT);
        }
    }

    /// Nothing of ours is left behind: the file goes, unless it tells of an earlier owner still.
    pub fn end(self) {
        self.flush();
        let is_about_us = self
            .head
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_none();
        let is_empty = self.file.metadata().is_ok_and(|found| found.len() == 0);
        if !is_about_us && !is_empty {
            return;
        }
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!("the journal {} stays: {error}", self.path.display());
        }
    }
}

fn write_line(mut file: &File, line: &str) -> io::Result<()> {
    // It has to outlive this process, not the node: nothing is synced while a target is locked.
    file.write_all(format!("{line}\n").as_bytes())
}

/// Makes the directory for journals, if need be, and makes sure that it is ours alone.
///
/// # Errors
/// [`JournalError`]: it cannot be made, or somebody else may write to it.
pub fn make_dir(dir: &Path) -> Result<(), JournalError> {
    let io_error = |source: io::Error| JournalError::Io {
        path: dir.to_owned(),
        source,
    };
    match DirBuilder::new().mode(0o700).recursive(true).create(dir) {
        Ok(()) => must_be_ours(dir),
        Err(error) => Err(io_error(error)),
    }
}

fn must_be_ours(dir: &Path) -> Result<(), JournalError> {
    let io_error = |source: io::Error| JournalError::Io {
        path: dir.to_owned(),
        source,
    };
    let found = fs::symlink_metadata(dir).map_err(io_error)?;
    let is_ours = found.uid() == rustix::process::getuid().as_raw();
    // What others may write to they may have prepared for us.
    if found.is_dir() && is_ours && found.mode() & 0o022 == 0 {
        Ok(())
    } else {
        Err(JournalError::NotOurs {
            path: dir.to_owned(),
        })
    }
}

/// The file of this name, locked; `None` when somebody else has it. It is made if it is not there.
///
/// # Errors
/// Those of the file system.
pub fn lock_named(path: &Path) -> io::Result<Option<File>> {
    loop {
        let file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .mode(0o600)
            .open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(errno) if io::Error::from(errno).kind() == io::ErrorKind::WouldBlock => {
                return Ok(None);
            }
            locked => locked?,
        }
        // Its owner may have removed it between the two calls.
        let (ours, named) = (file.metadata()?, fs::metadata(path));
        if named.is_ok_and(|named| (named.dev(), named.ino()) == (ours.dev(), ours.ino())) {
            return Ok(Some(file));
        }
    }
}

/// What a dead owner left. While this lives nobody else takes the target in hand.
#[derive(Debug)]
pub struct Left {
    /// Who did what with which target.
    pub head: Head,
    /// In order.
    pub steps: Vec<Step>,
    path: PathBuf,
    _locked: File,
}

impl Left {
    /// Nothing is left to do about it: the file goes.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn settle(self) -> io::Result<()> {
        fs::remove_file(&self.path)
    }
}

/// A journal in the directory.
#[derive(Debug)]
pub enum Found {
    /// Its owner is at work.
    Alive(Head),
    /// Its owner has died.
    Dead(Left),
    /// It cannot be read.
    Damaged {
        /// The file.
        path: PathBuf,
        /// Why.
        what: String,
    },
}

/// Every journal. None where the directory is not there.
///
/// # Errors
/// [`JournalError::Io`] when the directory cannot be read.
pub fn all(dir: &Path) -> Result<Vec<Found>, JournalError> {
    let io_error = |source: io::Error| JournalError::Io {
        path: dir.to_owned(),
        source,
    };
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(io_error)?,
    };
    must_be_ours(dir)?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(io_error)?.path();
        if path.to_string_lossy().ends_with(ENDING) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths.into_iter().filter_map(look).collect())
}

fn look(path: PathBuf) -> Option<Found> {
    let locked = match lock_named(&path) {
        Ok(locked) => locked,
        Err(error) => {
            let what = error.to_string();
            return Some(Found::Damaged { path, what });
        }
    };
    match (read(&path), locked) {
        (Ok((head, _)), None) => Some(Found::Alive(head)),
        (Ok((head, steps)), Some(locked)) => Some(Found::Dead(Left {
            head,
            steps,
            path,
            _locked: locked,
        })),
        // Its owner has just opened it, or was killed before the first line: then nothing was done.
        (Err(_), None) => None,
        (Err(what), Some(_locked)) => match fs::metadata(&path) {
            Ok(found) if found.len() == 0 => {
                let _gone = fs::remove_file(&path);
                None
            }
            _ => Some(Found::Damaged { path, what }),
        },
    }
}

/// The first line and the steps. A last line that was cut off is no step.
fn read(path: &Path) -> Result<(Head, Vec<Step>), String> {
    let mut text = String::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    let read = file.take(LEN_MAX).read_to_string(&mut text);
    read.map_err(|error| error.to_string())?;
    let mut lines = text.split_inclusive('\n');
    let head = lines.next().unwrap_or_default();
    let head: Head = serde_json::from_str(head).map_err(|error| format!("line 1: {error}"))?;
    if head.format != FORMAT {
        return Err(format!(
            "format {}; this version reads {FORMAT}",
            head.format
        ));
    }
    let mut steps = Vec::new();
    for (number, line) in (2..).zip(lines) {
        if !line.ends_with('\n') {
            break;
        }
        let step = serde_json::from_str(line).map_err(|error| format!("line {number}: {error}"))?;
        steps.push(step);
    }
    Ok((head, steps))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    fn sleeper() -> (Child, Target) {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let target = Target::look(child.id()).unwrap();
        (child, target)
    }

    fn head(target: TargetRecord) -> Head {
        Head {
            format: FORMAT,
            command: "checkpoint".to_owned(),
            job: "train".to_owned(),
            store: "s3://bucket/prefix".to_owned(),
            spill: None,
            by: ProcessIdentity::ours().unwrap(),
            target,
        }
    }

    #[test]
    fn steps_are_there_when_their_owner_is_not() {
        let (mut child, target) = sleeper();
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("state");
        let journal = Journal::open(&dir, &target, head).unwrap();
        journal.step(&Step::Lock).unwrap();
        journal.step(&Step::Begin).unwrap();
        journal.note(Step::Committed { generation: 3 });
        journal.flush();
        let held = Journal::open(&dir, &target, head).unwrap_err();
        assert!(matches!(held, JournalError::Held { .. }), "{held}");
        assert!(held.to_string().contains("ckptstream checkpoint"), "{held}");
        let alive = all(&dir).unwrap();
        assert!(matches!(alive.as_slice(), [Found::Alive(_)]), "{alive:?}");
        drop(journal);

        // The thread that wrote the last lines may hold the file for a moment.
        let mut found = all(&dir).unwrap();
        while matches!(found.as_slice(), [Found::Alive(_)]) {
            std::thread::yield_now();
            found = all(&dir).unwrap();
        }
        let Some(Found::Dead(left)) = found.pop() else {
            panic!("{found:?}")
        };
        assert!(left.head.target.is(&target));
        let steps = [Step::Lock, Step::Begin, Step::Committed { generation: 3 }];
        assert_eq!(left.steps, steps);
        // Nobody else comes to the target meanwhile.
        assert!(Journal::open(&dir, &target, head).is_err());
        drop(left);
        // Whoever is refused leaves it as it was.
        Journal::open(&dir, &target, head).unwrap().end();
        let Some(Found::Dead(left)) = all(&dir).unwrap().pop() else {
            panic!("it is gone")
        };
        assert_eq!(left.steps, steps);
        left.settle().unwrap();
        assert!(all(&dir).unwrap().is_empty());
        Journal::open(&dir, &target, head).unwrap().end();
        assert!(all(&dir).unwrap().is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_line_that_was_cut_off_is_no_step_and_garbage_is_told() {
        let (mut child, target) = sleeper();
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(
            dir.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o700),
        )
        .unwrap();
        let journal = Journal::open(dir.path(), &target, head).unwrap();
        journal.step(&Step::Lock).unwrap();
        let path = journal.path.clone();
        drop(journal);
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"{\"step\":\"beg").unwrap();
        let (_, steps) = read(&path).unwrap();
        assert_eq!(steps, [Step::Lock]);
        fs::write(&path, b"no journal\n").unwrap();
        let found = all(dir.path()).unwrap();
        assert!(
            matches!(found.as_slice(), [Found::Damaged { .. }]),
            "{found:?}"
        );
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_pid_that_was_used_again_is_another_target() {
        let (mut child, target) = sleeper();
        let record = TargetRecord::of(&target);
        assert!(record.is(&target));
        let earlier = TargetRecord {
            start_time: record.start_time - 1,
            ..record.clone()
        };
        let before_the_boot = TargetRecord {
            boot_id: "another".to_owned(),
            ..record
        };
        for other in [earlier, before_the_boot] {
            assert!(!other.is(&target), "{other:?}");
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_directory_of_somebody_else_is_refused() {
        let (mut child, target) = sleeper();
        let dir = tempfile::tempdir().unwrap();
        let open_to_all = dir.path().join("open");
        fs::create_dir(&open_to_all).unwrap();
        fs::set_permissions(
            &open_to_all,
            std::os::unix::fs::PermissionsExt::from_mode(0o777),
        )
        .unwrap();
        let refused = Journal::open(&open_to_all, &target, head).unwrap_err();
        assert!(matches!(refused, JournalError::NotOurs { .. }), "{refused}");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
