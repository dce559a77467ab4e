//! The target process as the kernel knows it: who it is, and whether it is still that one.
//!
//! In: a pid. Out: an identity (start time, boot id, pids in inner namespaces) for the manifest, and a pidfd that stays on this very process, so that a pid used again is never taken
//! for it. What can fail: no such process, a thread's id, our own pid, no right to look.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Field of `/proc/PID/stat`, counted behind the command's closing parenthesis: state.
const STAT_STATE: usize = 0;
/// The same: pid of the parent.
const STAT_PARENT: usize = 1;
/// Its session's leader.
const STAT_SESSION: usize = 3;
/// The same: start time in clock ticks since boot (field 22 of proc(5)).
const STAT_START_TIME: usize = 19;

/// One process, from the first look on.
#[derive(Debug)]
pub struct Target {
    /// In our pid namespace.
    pub pid: u32,
    /// Clock ticks between boot and its start.
    pub start_time: u64,
    /// The boot that this start time belongs to.
    pub boot_id: String,
    /// Command name, 15 bytes at most.
    pub name: String,
    /// Its pid in every namespace, outermost first.
    pub ns_pids: Vec<u32>,
    pidfd: OwnedFd,
}

/// Why a process cannot be a target.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TargetError {
    /// No such process, or it has ended.
    #[error("process {pid} does not exist (--pid)")]
    Gone {
        /// As given.
        pid: u32,
    },
    /// It has ended, and nobody has collected its status yet.
    #[error("process {pid} has ended (--pid)")]
    Ended {
        /// As given.
        pid: u32,
    },
    /// A thread of another process.
    #[error("{tid} is a thread of process {pid}; give --pid {pid}")]
    Thread {
        /// As given.
        tid: u32,
        /// The process that it belongs to.
        pid: u32,
    },
    /// Ourselves.
    #[error("process {pid} is ckptstream itself (--pid)")]
    Ourselves {
        /// As given.
        pid: u32,
    },
    /// The kernel does not let us look.
    #[error("cannot look at process {pid}: {path}")]
    Look {
        /// As given.
        pid: u32,
        /// What was read or called.
        path: String,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
}

impl Target {
    /// Looks at a process.
    ///
    /// # Errors
    /// Any [`TargetError`].
    pub fn look(pid: u32) -> Result<Self, TargetError> {
        if pid == std::process::id() {
            return Err(TargetError::Ourselves { pid });
        }
        let raw = i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or(TargetError::Gone { pid })?;
        let status = read(pid, "status")?;
        if let Some(group) = status_numbers(&status, "Tgid:")
            .first()
            .copied()
            .filter(|&group| group != pid)
        {
            return Err(TargetError::Thread {
                tid: pid,
                pid: group,
            });
        }
        let pidfd = pidfd_open(raw, PidfdFlags::empty())
            .map_err(|errno| look_error(pid, "pidfd_open".to_owned(), errno.into()))?;
        let target = Self {
            pid,
            start_time: start_time(pid)?,
            boot_id: boot_id()?,
            name: read(pid, "comm")?.trim_end().to_owned(),
            ns_pids: status_numbers(&status, "NSpid:"),
            pidfd,
        };
        if target.is_alive() {
            Ok(target)
        } else {
            Err(TargetError::Gone { pid })
        }
    }

    /// Whether this very process still lives (a zombie does not).
    pub fn is_alive(&self) -> bool {
        !self.ends_within(Duration::ZERO)
    }

    /// Waits until it has ended, at most so long. Whether it has.
    pub fn ends_within(&self, timeout: Duration) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let timeout = Timespec::try_from(timeout).unwrap_or_default();
        // The pidfd is readable once the process has ended.
        !matches!(poll(&mut fds, Some(&timeout)), Ok(0))
    }

    /// Ends this very process (SIGKILL).
    ///
    /// # Errors
    /// The kernel's; not when it has ended already.
    pub fn kill(&self) -> std::io::Result<()> {
        self.signal(Signal::KILL)
    }

    /// Sends this very process a signal.
    ///
    /// # Errors
    /// The kernel's; not when it has ended already.
    pub fn signal(&self, signal: Signal) -> std::io::Result<()> {
        match pidfd_send_signal(&self.pidfd, signal) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Its pid in its own namespace.
    pub fn own_pid(&self) -> u32 {
        self.ns_pids.last().copied().unwrap_or(self.pid)
    }

    /// Bytes of memory that it has in use, swapped out or not; 0 where that cannot be read.
    pub fn memory_in_use(&self) -> u64 {
        let status = read(self.pid, "status").unwrap_or_default();
        let kib = |name: &str| status_numbers(&status, name).first().copied().unwrap_or(0);
        (u64::from(kib("VmRSS:")) + u64::from(kib("VmSwap:"))) << 10
    }

    /// What its standard streams are: a path, or `pipe:[…]` and the like; empty where it has none.
    pub(crate) fn standard_streams(&self) -> [String; 3] {
        [0, 1, 2].map(|fd| {
            let link = std::fs::read_link(format!("/proc/{}/fd/{fd}", self.pid));
            link.map(|to| to.to_string_lossy().into_owned())
                .unwrap_or_default()
        })
    }

    /// Paths of what it has mapped.
    pub(crate) fn mapped_paths(&self) -> Vec<PathBuf> {
        let maps = read(self.pid, "maps").unwrap_or_default();
        let paths = maps
            .lines()
            .filter_map(|line| line.find('/').map(|at| &line[at..]));
        let mut paths: Vec<PathBuf> = paths.map(PathBuf::from).collect();
        paths.sort_unstable();
        paths.dedup();
        paths
    }

    /// Pid of its session's leader; 0 of one that has no pid in our namespace.
    pub(crate) fn session(&self) -> Option<u32> {
        let stat = read(self.pid, "stat").ok()?;
        stat_field(&stat, STAT_SESSION)?.parse().ok()
    }

    /// What keeps it from running, if anything does: a stopped or frozen process cannot answer the driver's lock.
    pub fn why_not_scheduled(&self) -> Option<&'static str> {
        let stat = read(self.pid, "stat").unwrap_or_default();
        if matches!(stat_field(&stat, STAT_STATE), Some("T" | "t")) {
            return Some("stopped");
        }
        let groups = read(self.pid, "cgroup").unwrap_or_default();
        let is_frozen = groups
            .lines()
            .any(|line| is_frozen(Path::new("/sys/fs/cgroup"), line));
        is_frozen.then_some("in a frozen cgroup")
    }
}

/// Whether the group of a line of `/proc/PID/cgroup` is frozen, by itself or by one above it.
fn is_frozen(mount: &Path, line: &str) -> bool {
    let mut fields = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
        return false;
    };
    let path = path.trim_start_matches('/');
    let says = |file: PathBuf, word: &str| {
        std::fs::read_to_string(file).is_ok_and(|text| text.lines().any(|line| line.trim() == word))
    };
    match controllers {
        "" => says(mount.join(path).join("cgroup.events"), "frozen 1"),
        "freezer" => says(
            mount.join("freezer").join(path).join("freezer.state"),
            "FROZEN",
        ),
        _ => false,
    }
}

/// Every process of our pid namespace, and the one that it came from; 0 is one outside.
pub(crate) fn parents() -> BTreeMap<u32, u32> {
    let mut parents = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // It may have ended since.
        let stat = read(pid, "stat").unwrap_or_default();
        let parent = stat_field(&stat, STAT_PARENT).and_then(|text| text.parse().ok());
        parents.extend(parent.map(|parent| (pid, parent)));
    }
    parents
}

/// A process and everything that came from it, itself first. Processes whose parent has ended are not among them.
pub fn descendants(pid: u32) -> Vec<u32> {
    let parents = parents();
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(parent) = found.get(next).copied() {
        let children = parents.iter().filter(|(_, of)| **of == parent);
        let children: Vec<u32> = children.map(|(child, _)| *child).collect();
        found.extend(children.into_iter().filter(|child| *child != parent));
        next += 1;
    }
    found
}

/// The flags of an open file, by its entry in `/proc/PID/fd`.
pub(crate) fn open_flags(entry: &Path) -> Option<u32> {
    let (number, process) = (entry.file_name()?, entry.parent()?.parent()?);
    let text = std::fs::read_to_string(process.join("fdinfo").join(number)).ok()?;
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"))?;
    u32::from_str_radix(flags.trim(), 8).ok()
}

/// The kernel's id of this boot.
///
/// # Errors
/// [`TargetError::Look`] when it cannot be read.
pub fn boot_id() -> Result<String, TargetError> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text =
        std::fs::read_to_string(path).map_err(|source| look_error(0, path.to_owned(), source))?;
    Ok(text.trim().to_owned())
}

/// Inode of the pid namespace that our pids are meant in.
///
/// # Errors
/// [`TargetError::Look`] when it cannot be read.
pub fn pid_namespace() -> Result<u64, TargetError> {
    pid_namespace_of(std::process::id())
}

/// The same of another process.
///
/// # Errors
/// [`TargetError::Gone`]; [`TargetError::Look`] when it cannot be read.
pub fn pid_namespace_of(pid: u32) -> Result<u64, TargetError> {
    let path = format!("/proc/{pid}/ns/pid");
    std::fs::metadata(&path)
        .map(|found| found.ino())
        .map_err(|source| look_error(pid, path, source))
}

/// Clock ticks between boot and the start of a process.
///
/// # Errors
/// [`TargetError::Ended`] of a zombie, [`TargetError::Gone`], [`TargetError::Look`].
pub(crate) fn start_time(pid: u32) -> Result<u64, TargetError> {
    let stat = read(pid, "stat")?;
    if matches!(stat_field(&stat, STAT_STATE), Some("Z" | "X")) {
        return Err(TargetError::Ended { pid });
    }
    stat_field(&stat, STAT_START_TIME)
        .and_then(|text| text.parse().ok())
        .ok_or(TargetError::Gone { pid })
}

fn read(pid: u32, file: &str) -> Result<String, TargetError> {
    let path = PathBuf::from(format!("/proc/{pid}/{file}"));
    let bytes = std::fs::read(&path)
        .map_err(|source| look_error(pid, path.display().to_string(), source))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn look_error(pid: u32, path: String, source: std::io::Error) -> TargetError {
    // ESRCH: it ended between two looks.
    if source.kind() == std::io::ErrorKind::NotFound || source.raw_os_error() == Some(3) {
        return TargetError::Gone { pid };
    }
    TargetError::Look { pid, path, source }
}

/// A field of `/proc/PID/stat` behind the command, which may itself hold spaces and parentheses.
fn stat_field(stat: &str, index: usize) -> Option<&str> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(index)
}

/// The numbers of one line of `/proc/PID/status`.
fn status_numbers(status: &str, name: &str) -> Vec<u32> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .unwrap_or_default();
    line.split_ascii_whitespace()
        .filter_map(|number| number.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    fn sleeper() -> Child {
        Command::new("sleep")
            .arg("60")
            .stdin(Stdio::null())
            .spawn()
            .unwrap()
    }

    #[test]
    fn a_frozen_cgroup_is_found_in_both_versions() {
        let mount = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = mount.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("a/b/cgroup.events", "populated 1\nfrozen 1\n");
        write("a/c/cgroup.events", "populated 1\nfrozen 0\n");
        write("freezer/a/b/freezer.state", "FROZEN\n");
        write("freezer/a/c/freezer.state", "THAWED\n");
        for (line, frozen) in [
            ("0::/a/b", true),
            ("0::/a/c", false),
            ("0::/gone", false),
            ("3:freezer:/a/b", true),
            ("3:freezer:/a/c", false),
            ("5:memory:/a/b", false),
            ("nonsense", false),
        ] {
            assert_eq!(is_frozen(mount.path(), line), frozen, "{line}");
        }
    }

    #[test]
    fn a_process_is_recognised_until_it_ends() {
        let mut child = sleeper();
        let target = Target::look(child.id()).unwrap();
        assert_eq!(target.pid, child.id());
        assert_eq!(target.ns_pids.first(), Some(&child.id()));
        assert!(target.is_alive() && target.start_time > 0 && target.boot_id.len() == 36);
        assert_eq!(target.why_not_scheduled(), None);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!target.is_alive());
        assert!(matches!(
            Target::look(child.id()),
            Err(TargetError::Gone { .. })
        ));
    }

    #[test]
    fn descendants_are_found_through_their_parents() {
        let mut shell = Command::new("sh")
            .args(["-c", "sleep 60 & echo $!; wait"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut out = std::io::BufReader::new(shell.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut out, &mut line).unwrap();
        let sleep: u32 = line.trim().parse().unwrap();
        assert_eq!(descendants(shell.id()), [shell.id(), sleep]);
        assert!(descendants(std::process::id()).contains(&sleep));
        Target::look(sleep).unwrap().kill().unwrap();
        shell.wait().unwrap();
    }

    #[test]
    fn our_own_pid_and_pid_zero_are_refused() {
        assert!(matches!(
            Target::look(std::process::id()),
            Err(TargetError::Ourselves { .. })
        ));
        assert!(matches!(Target::look(0), Err(TargetError::Gone { .. })));
        assert!(matches!(
            Target::look(u32::MAX),
            Err(TargetError::Gone { .. })
        ));
    }

    #[test]
    fn a_command_with_parentheses_does_not_shift_the_fields() {
        let stat = "42 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 777 20";
        assert_eq!(stat_field(stat, STAT_STATE), Some("S"));
        assert_eq!(stat_field(stat, STAT_START_TIME), Some("777"));
    }
}
