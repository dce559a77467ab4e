//! Which process the job is, where nobody says its pid: the one of a cgroup, or the one with a command.
//!
//! In: what is [`Sought`]. Out: a [`JobProcess`], waited for: the one process found that came from no other one found. What can fail: there is none in time; there are several, and then a person has to choose; a cgroup cannot be read.
//!
//! ckptstream and what it came from never count: the word that is looked for stands in its own command line, and the shell that has started both is in the job's cgroup.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::Supervisor;
use super::process::JobProcess;
use crate::error::{ExitCode, Failure, Phase};
use crate::target::{TargetError, parents, start_time};

/// Pause between two looks, each of which reads a few files of every process of the node.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Characters of a command that a message has.
const COMMAND_LEN_MAX: usize = 80;

/// Processes that a message names.
const NAMED_MAX: usize = 8;

/// The file that makes a directory a cgroup.
const PROCS: &str = "cgroup.procs";

/// How the job is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sought {
    /// By its pid, in our pid namespace.
    Pid(u32),
    /// By its cgroup, those below it included: a path as in `/proc/PID/cgroup`, or the directory.
    Cgroup(PathBuf),
    /// By a word that its executable or a word of its command line is, or has behind a slash at its end.
    Command(String),
}

impl fmt::Display for Sought {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pid(pid) => write!(f, "with pid {pid} (--pid)"),
            Self::Cgroup(path) => write!(f, "in cgroup {} (--cgroup)", path.display()),
            Self::Command(word) => write!(f, "with the command {word:?} (--command)"),
        }
    }
}

/// Why there is no job to watch over.
#[derive(Debug, thiserror::Error)]
enum FindingError {
    /// It may still come.
    #[error("there is no process {sought}{}", told_apart(.ours))]
    NotThere {
        sought: Sought,
        /// What was found, and does not count: ckptstream came from it.
        ours: BTreeSet<u32>,
    },
    /// Nobody but the operator knows which one is meant.
    #[error("{} processes are {sought}: {}; name one with --pid", .pids.len(), named(.pids))]
    Several { sought: Sought, pids: Vec<u32> },
    #[error("cannot be looked at: {}", .path.display())]
    Unreadable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Target(#[from] TargetError),
}

impl FindingError {
    fn code(&self) -> ExitCode {
        match self {
            Self::NotThere { .. } | Self::Target(_) => ExitCode::NothingToSave,
            Self::Several { .. } | Self::Unreadable { .. } => ExitCode::Preflight,
        }
    }
}

impl From<FindingError> for Failure {
    fn from(error: FindingError) -> Self {
        Self::new(error.code(), Phase::Prepare, error)
    }
}

/// What ends a pause between two looks.
enum Pause {
    Over,
    Notice,
    /// From a terminal: nobody waits any longer.
    Signal(Signal),
}

impl Supervisor<'_> {
    /// The job's process, waited for where its pid is not known. `None` where a notice came before it.
    pub(super) fn find(
        &mut self,
        sought: &Sought,
        wait: Duration,
    ) -> Result<Option<JobProcess>, Failure> {
        let started = Instant::now();
        let mut is_told = false;
        loop {
            let not_there = match sought.look() {
                Err(error @ FindingError::NotThere { .. }) => error,
                found => return Ok(Some(found?)),
            };
            if started.elapsed() >= wait {
                let mut failure = Failure::from(not_there);
                failure.notes.push(match wait.is_zero() {
                    true => "one that is still to come up is waited for with --wait".to_owned(),
                    false => format!("waited {wait:?} for one (--wait)"),
                });
                return Err(failure);
            }
            if !is_told {
                tracing::warn!("{not_there}: waiting for one, {wait:?} at most (--wait)");
                is_told = true;
            }
            match self.pause() {
                Pause::Over => {}
                Pause::Notice => return Ok(None),
                Pause::Signal(signal) => {
                    let number = signal.as_raw();
                    let why = format!("signal {number} came before a process {sought}");
                    return Err(Failure::new(ExitCode::NothingToSave, Phase::Prepare, why));
                }
            }
        }
    }

    fn pause(&mut self) -> Pause {
        let mut changes = self.board.subscribe();
        let for_the_job = &mut self.for_the_job;
        self.session.runtime.block_on(async {
            let asked_to_end = async {
                while let Some(signal) = for_the_job.recv().await {
                    // The others say nothing to a job that is not there.
                    if matches!(signal, Signal::INT | Signal::QUIT | Signal::TERM) {
                        return signal;
                    }
                }
                std::future::pending().await
            };
            tokio::select! {
                biased;
                Ok(_) = changes.wait_for(|standing| standing.earliest().is_some()) => Pause::Notice,
                signal = asked_to_end => Pause::Signal(signal),
                () = tokio::time::sleep(LOOK_EVERY) => Pause::Over,
            }
        })
    }
}

impl Sought {
    /// One look for it.
    fn look(&self) -> Result<JobProcess, FindingError> {
        if let Self::Pid(pid) = self {
            return Ok(JobProcess::find(*pid)?);
        }
        let pid = self.pid()?;
        let not_there = || FindingError::NotThere {
            sought: self.clone(),
            ours: BTreeSet::new(),
        };
        // It may end at any moment, and its number be another's.
        let job = JobProcess::find(pid).map_err(|_ended| not_there())?;
        if self.pid()? != pid || job.status().is_some() {
            return Err(not_there());
        }
        tracing::warn!("watching over process {pid}: {}", command(pid));
        Ok(job)
    }

    /// Pid of the one process found.
    fn pid(&self) -> Result<u32, FindingError> {
        let parents = parents();
        let mut found = match self {
            Self::Pid(pid) => BTreeSet::from([*pid]),
            Self::Cgroup(path) => in_cgroup(path)?,
            Self::Command(word) => {
                let pids = parents.keys().copied();
                pids.filter(|pid| has_command(*pid, word)).collect()
            }
        };
        // A zombie is nobody's job.
        found.retain(|pid| start_time(*pid).is_ok());
        let us = std::process::id();
        let ours: BTreeSet<u32> = ancestors(us, &parents)
            .filter(|it| found.remove(it))
            .collect();
        found.remove(&us);
        let is_first = |pid: &u32| !ancestors(*pid, &parents).any(|it| found.contains(&it));
        let first: Vec<u32> = found.iter().copied().filter(is_first).collect();
        let sought = self.clone();
        match first.as_slice() {
            [] => Err(FindingError::NotThere { sought, ours }),
            [pid] => Ok(*pid),
            _ => Err(FindingError::Several {
                sought,
                pids: first,
            }),
        }
    }
}

/// What a process came from, nearest first.
fn ancestors(pid: u32, parents: &BTreeMap<u32, u32>) -> impl Iterator<Item = u32> {
    let parent_of = |pid: &u32| parents.get(pid).copied();
    // They were not all read at one moment, so a number that was used again could close a circle.
    std::iter::successors(parent_of(&pid), parent_of).take(parents.len())
}

/// The processes of a cgroup and of those below it. One that is not there has none.
fn in_cgroup(path: &Path) -> Result<BTreeSet<u32>, FindingError> {
    let mut found = BTreeSet::new();
    let mut open = directories(path)?;
    while let Some(directory) = open.pop() {
        let procs = directory.join(PROCS);
        match std::fs::read_to_string(&procs) {
            // 0 is a process of another pid namespace.
            Ok(text) => found.extend(text.lines().filter_map(|line| line.parse::<u32>().ok())),
            Err(source) if is_gone(&source) => continue,
            // The threads of a threaded cgroup are the processes of one above it.
            Err(source) if source.kind() == io::ErrorKind::Unsupported => {}
            Err(source) => {
                return Err(FindingError::Unreadable {
                    path: procs,
                    source,
                });
            }
        }
        let entries = std::fs::read_dir(&directory).into_iter().flatten();
        let below = entries
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        open.extend(below.map(|entry| entry.path()));
    }
    found.remove(&0);
    Ok(found)
}

/// Where a cgroup is: where the path says, or below the mount of each hierarchy that has it.
fn directories(path: &Path) -> Result<Vec<PathBuf>, FindingError> {
    if path.join(PROCS).exists() {
        return Ok(vec![path.to_owned()]);
    }
    let mounts = PathBuf::from("/proc/self/mountinfo");
    match std::fs::read_to_string(&mounts) {
        Ok(text) => Ok(text.lines().filter_map(|line| below(line, path)).collect()),
        Err(source) => Err(FindingError::Unreadable {
            path: mounts,
            source,
        }),
    }
}

/// The directory of a cgroup below the mount that this line of mountinfo tells of, if that is one of cgroups and shows it.
fn below(line: &str, cgroup: &Path) -> Option<PathBuf> {
    let (mount, kind) = line.split_once(" - ")?;
    if !matches!(kind.split(' ').next(), Some("cgroup2" | "cgroup")) {
        return None;
    }
    let mut fields = mount.split(' ').skip(3);
    let (root, at) = (fields.next()?, fields.next()?);
    let relative = cgroup.strip_prefix(root).ok()?;
    Some(Path::new(at).join(relative))
}

/// It was removed meanwhile, or never was.
fn is_gone(error: &io::Error) -> bool {
    const ENODEV: i32 = 19;
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(ENODEV)
}

/// Whether the executable or a word of the command line is this one, or has it behind a slash at its end.
fn has_command(pid: u32, word: &str) -> bool {
    let word = word.as_bytes();
    let is_it = |text: &[u8]| {
        let before = text.strip_suffix(word);
        before.is_some_and(|before| before.is_empty() || before.ends_with(b"/"))
    };
    // Another user's executable is not shown; its words are.
    let executable = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    let executable = executable.as_os_str().as_bytes();
    let executable = executable.strip_suffix(b" (deleted)").unwrap_or(executable);
    is_it(executable) || words(pid).split(|byte| *byte == 0).any(is_it)
}

/// The command line, a NUL behind each word. Empty where the process has ended, or is the kernel's.
fn words(pid: u32) -> Vec<u8> {
    std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default()
}

/// A command for people, with nothing in it that a terminal would obey.
fn command(pid: u32) -> String {
    let words = words(pid);
    let mut text =
        String::from_utf8_lossy(words.strip_suffix(b"\0").unwrap_or(&words)).replace('\0', " ");
    if text.is_empty() {
        // The kernel's threads have no words, but a name.
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        text = format!("[{}]", name.trim_end());
    }
    match text.char_indices().nth(COMMAND_LEN_MAX) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

fn named(pids: &[u32]) -> String {
    let named = pids.iter().take(NAMED_MAX);
    let mut named: Vec<String> = named
        .map(|pid| format!("{pid} {}", command(*pid)))
        .collect();
    if pids.len() > NAMED_MAX {
        named.push("…".to_owned());
    }
    named.join(", ")
}

fn told_apart(ours: &BTreeSet<u32>) -> String {
    match ours.first() {
        None => String::new(),
        Some(pid) => format!(
            ", but {pid} {}, from which ckptstream came: such a one is named with --pid",
            command(*pid)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    use tempfile::TempDir;

    /// Killed, and what is below it, when dropped.
    struct Running(Child);

    impl Running {
        /// A shell that runs this script, in which `$0` is the word, and has said a line.
        fn shell(script: &str, word: &str) -> Self {
            let mut child = Command::new("sh")
                .args(["-c", script, word])
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut line = String::new();
            let mut out = BufReader::new(child.stdout.take().unwrap());
            out.read_line(&mut line).unwrap();
            Self(child)
        }

        fn pid(&self) -> u32 {
            self.0.id()
        }
    }

    impl Drop for Running {
        fn drop(&mut self) {
            // It may be a zombie that somebody has to collect.
            JobProcess::find(self.pid())
                .map(|job| job.end(Duration::from_secs(10)))
                .ok();
            self.0.wait().unwrap();
        }
    }

    /// A word that no other process of this machine has.
    fn word(of: &str) -> String {
        format!(
            "{of}-{}-{}",
            std::process::id(),
            crate::writer::random_hex::<8>()
        )
    }

    fn several(error: FindingError) -> Vec<u32> {
        match error {
            FindingError::Several { pids, .. } => pids,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn a_command_is_a_whole_base_name_of_the_executable_or_of_a_word() {
        let word = word("train");
        let sought = Sought::Command(word.clone());
        let missing = sought.look().unwrap_err();
        assert_eq!(missing.code(), ExitCode::NothingToSave, "{missing}");
        let job = Running::shell("echo; sleep 60 & wait", &format!("/nowhere/{word}"));
        assert_eq!(sought.look().unwrap().pid, job.pid());
        let with_more = Sought::Command(format!("nowhere/{word}"));
        assert_eq!(with_more.look().unwrap().pid, job.pid());
        for part in [&word[1..], &word[..word.len() - 1], "where/train"] {
            assert!(Sought::Command(part.to_owned()).look().is_err(), "{part}");
        }
        drop(job);
        // The word is of the executable alone.
        let dir = TempDir::new().unwrap();
        std::fs::copy("/bin/sleep", dir.path().join(&word)).unwrap();
        let script = format!("exec -a other {}/{word} 60", dir.path().display());
        let job = Command::new("bash")
            .args(["-c", &script])
            .spawn()
            .map(Running)
            .unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while sought.look().is_err() {
            assert!(Instant::now() < until, "not found by its executable");
            std::thread::yield_now();
        }
        assert!(
            !words(job.pid())
                .windows(word.len())
                .any(|part| part == word.as_bytes())
        );
        drop(job);
        assert!(matches!(sought.look(), Err(FindingError::NotThere { .. })));
    }

    #[test]
    fn the_first_process_is_the_job_and_of_several_a_person_chooses() {
        let word = word("train");
        let sought = Sought::Command(word.clone());
        let nested = "sh -c 'echo; sleep 60 & wait' \"$0\" & wait";
        let first = Running::shell(nested, &word);
        assert_eq!(sought.look().unwrap().pid, first.pid());
        let second = Running::shell(nested, &word);
        let error = sought.look().unwrap_err();
        let text = error.to_string();
        assert_eq!(error.code(), ExitCode::Preflight);
        assert!(
            text.contains("--pid") && text.contains(&format!("{} \"sh -c ", second.pid())),
            "{text}"
        );
        let mut both = [first.pid(), second.pid()];
        both.sort_unstable();
        assert_eq!(several(error), both);
        drop(first);
        assert_eq!(sought.look().unwrap().pid, second.pid());
    }

    #[test]
    fn a_cgroup_has_its_processes_and_those_below_it_but_not_us() {
        let dir = TempDir::new().unwrap();
        let sought = Sought::Cgroup(dir.path().to_owned());
        assert!(matches!(sought.look(), Err(FindingError::NotThere { .. })));
        let parent = std::os::unix::process::parent_id();
        let us = format!("0\n{}\n{parent}\n", std::process::id());
        std::fs::write(dir.path().join(PROCS), &us).unwrap();
        match sought.look() {
            Err(FindingError::NotThere { ours, .. }) => {
                assert!(
                    ours.into_iter()
                        .eq([parent].into_iter().filter(|pid| *pid > 0))
                );
            }
            other => panic!("{other:?}"),
        }
        let below = dir.path().join("a/b");
        std::fs::create_dir_all(&below).unwrap();
        let job = Running::shell("echo; sleep 60 & wait", "job");
        std::fs::write(below.join(PROCS), format!("{}\n", job.pid())).unwrap();
        // What is no cgroup hides what is below it, as one that was removed does.
        assert!(matches!(sought.look(), Err(FindingError::NotThere { .. })));
        std::fs::write(dir.path().join("a").join(PROCS), "").unwrap();
        assert_eq!(sought.look().unwrap().pid, job.pid());
        let other = Running::shell("echo; sleep 60 & wait", "other");
        let pids = format!("{}\n{}\n{us}", job.pid(), other.pid());
        std::fs::write(below.join(PROCS), pids).unwrap();
        assert!(several(sought.look().unwrap_err()).contains(&other.pid()));
        std::fs::create_dir_all(below.join("c").join(PROCS)).unwrap();
        let unreadable = sought.look().unwrap_err();
        assert_eq!(unreadable.code(), ExitCode::Preflight, "{unreadable}");
        assert!(unreadable.to_string().contains("a/b/c/cgroup.procs"));
    }

    #[test]
    fn the_kernels_own_cgroups_are_read() {
        let told = std::fs::read_to_string("/proc/self/cgroup").unwrap();
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        for line in told.lines() {
            let path = Path::new(line.splitn(3, ':').nth(2).unwrap());
            // A sandbox may show none of them.
            if mounts
                .lines()
                .any(|line| below(line, path).is_some_and(|it| it.join(PROCS).exists()))
            {
                assert!(
                    in_cgroup(path).unwrap().contains(&std::process::id()),
                    "{line}"
                );
            }
        }
        assert!(in_cgroup(Path::new("/nowhere/at/all")).unwrap().is_empty());
        let threaded = io::Error::from_raw_os_error(rustix::io::Errno::OPNOTSUPP.raw_os_error());
        assert_eq!(threaded.kind(), io::ErrorKind::Unsupported);
    }

    #[test]
    fn a_path_is_looked_for_below_the_mounts_that_show_it() {
        let unified = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw";
        let of_a_container =
            "33 31 0:30 /docker/7 /sys/fs/cgroup/cpu ro shared:9 - cgroup cgroup rw,cpu";
        let no_cgroup = "22 1 8:1 / / rw - ext4 /dev/sda1 rw";
        for (line, cgroup, directory) in [
            (unified, "/job.slice/1", Some("/sys/fs/cgroup/job.slice/1")),
            (unified, "/", Some("/sys/fs/cgroup/")),
            (
                of_a_container,
                "/docker/7/job",
                Some("/sys/fs/cgroup/cpu/job"),
            ),
            (of_a_container, "/docker/8", None),
            (no_cgroup, "/job", None),
            ("", "/job", None),
        ] {
            let found = below(line, Path::new(cgroup));
            assert_eq!(
                found.as_deref(),
                directory.map(Path::new),
                "{line} {cgroup}"
            );
        }
    }

    #[test]
    fn a_command_is_told_in_one_line_that_a_terminal_does_not_obey() {
        let job = Running::shell("echo; sleep 60 & wait", "\u{1b}[2J");
        let told = command(job.pid());
        assert!(
            told.contains("\\u{1b}[2J") && !told.contains('\u{1b}'),
            "{told}"
        );
        let long = Running::shell("echo; sleep 60 & wait", &"x".repeat(500));
        assert!(command(long.pid()).chars().count() < 2 * COMMAND_LEN_MAX);
    }
}
