//! Process 1, of a container that runs `run`, or of the pid namespace of a tree: somebody has to forward signals and to collect the dead.
//!
//! In: a command line, which is run as a child. Out: its exit status, or that of the tree which it has made. What can fail: the system refuses a process or a handler.
//!
//! The kernel gives orphans to process 1, and sends it only the signals that it handles. A supervisor that collects every child would take statuses from whoever waits for them, so it has a process of its own.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::process::ExitStatusExt;
use std::pin::Pin;
use std::process::{Command, ExitStatus, Stdio};

use futures::StreamExt;
use futures::stream::SelectAll;
use rustix::fs::{FileType, OFlags, SeekFrom, fcntl_getfl, fstat, seek, tell};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};
use rustix::termios::isatty;
use tokio::signal::unix::{SignalKind, signal};

use super::args::InitArgs;
use crate::host::namespace::KEEP;
use crate::preempt::handled_signals;
use crate::target::open_flags;

/// Where the kernel is told which pid comes next in our namespace.
const LAST_PID: &str = "/proc/sys/kernel/ns_last_pid";
/// Pid of a tree's root: beyond those of process 1, and of CRIU and its helpers at a restore.
const FIRST_PID: u32 = 1000;

/// Whether we are process 1 of our pid namespace.
pub(super) fn is_init() -> bool {
    std::process::id() == 1
}

/// Runs this very command line in a child, and is process 1 beside it until it ends. The status, as a shell says it.
pub(super) fn stand_in() -> io::Result<u8> {
    let mut ourselves = Command::new(super::OURSELVES);
    ourselves.args(std::env::args_os().skip(1));
    in_runtime(async {
        let mut duties = Duties::begin()?;
        let child = ourselves.spawn()?;
        duties.until_it_ends(child.id()).await
    })
}

/// Process 1 of the namespace of a tree: runs the command, which is the tree's root, or a CRIU that rebuilds the tree. The tree's status, as a shell says it.
pub(super) fn of_a_tree(args: &InitArgs) -> io::Result<u8> {
    let Some((program, rest)) = args.command.split_first() else {
        unreachable!("the command line asks for one");
    };
    in_runtime(async {
        let mut duties = Duties::begin()?;
        let (Some(pidfile), Some(ready)) = (&args.pidfile, &args.ready) else {
            let child = root_of_a_tree(&args.command).spawn()?;
            return duties.until_it_ends(child.id()).await;
        };
        let mut command = Command::new(program);
        command.args(rest);
        with_reopened_streams(&mut command);
        // Ours is for the letters of whoever started us.
        let criu = command.stdin(Stdio::null()).spawn()?;
        let letters = tokio::task::spawn_blocking(is_kept);
        tokio::pin!(letters);
        let given_up = || io::Error::other("the restore was given up, and the tree is ended");
        let status = tokio::select! {
            status = duties.until_it_ends(criu.id()) => status?,
            _before_the_tree_is_there = &mut letters => return Err(given_up()),
        };
        if status != 0 {
            return Ok(status);
        }
        let root = std::fs::read_to_string(pidfile)?;
        let root = root.trim().parse().map_err(io::Error::other)?;
        std::fs::write(ready, "")?;
        let ended = duties.until_it_ends(root);
        tokio::pin!(ended);
        tokio::select! {
            status = &mut ended => return status,
            kept = &mut letters => if !kept.map_err(io::Error::other)? {
                return Err(given_up());
            },
        }
        ended.await
    })
}

/// A program that can be dumped and restored as the root of a tree: it leads a session, has a pid that CRIU's own helpers will not have, and its standard streams are files of this mount namespace.
fn root_of_a_tree(words: &[OsString]) -> Command {
    if let Err(error) = std::fs::write(LAST_PID, (FIRST_PID - 1).to_string()) {
        tracing::warn!(
            "the tree may have pids that are taken when it comes back: {LAST_PID}: {error}"
        );
    }
    // util-linux's: it makes the session and becomes the program.
    let leader = ["setsid", "--"];
    let inherited = inherited_files();
    let mut command = match inherited.is_empty() {
        true => {
            let mut command = Command::new(leader[0]);
            command.arg(leader[1]);
            command
        }
        false => {
            let mut command = Command::new("bash");
            command.args(["-c", CLOSING, "bash", &inherited.join(" ")]);
            command.args(leader);
            command
        }
    };
    command.args(words);
    with_reopened_streams(&mut command);
    command
}

/// Closes the files that its first argument names by number, and becomes the rest.
const CLOSING: &str = r#"for fd in $1; do exec {fd}>&-; done; shift; exec "$@""#;

/// Numbers of files beyond the standard streams that whoever started us has left open: they are of another mount namespace, and a tree that has one cannot be dumped.
fn inherited_files() -> Vec<String> {
    let open = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
    let numbers = open.flatten().filter_map(|entry| {
        let number = entry.file_name().into_string().ok()?;
        let is_inherited = open_flags(&entry.path())? & OFlags::CLOEXEC.bits() == 0;
        let is_a_stream = matches!(number.as_str(), "0" | "1" | "2");
        (is_inherited && !is_a_stream).then_some(number)
    });
    numbers.collect()
}

/// The standard streams of what becomes a tree are files of this mount namespace.
fn with_reopened_streams(command: &mut Command) {
    if let Some(file) = reopened(io::stdin().as_fd()) {
        command.stdin(file);
    }
    if let Some(file) = reopened(io::stdout().as_fd()) {
        command.stdout(file);
    }
    if let Some(file) = reopened(io::stderr().as_fd()) {
        command.stderr(file);
    }
}

/// The same file through a path of our own mount namespace, if it is one: CRIU finds it through its path alone. What is appended to stays so; what was not is appended to from now on, because whoever gave it to us may write to it as well.
fn reopened(stream: BorrowedFd<'_>) -> Option<File> {
    let before = fstat(stream).ok()?;
    let kind = FileType::from_raw_mode(before.st_mode);
    if isatty(stream) || !matches!(kind, FileType::RegularFile | FileType::CharacterDevice) {
        return None;
    }
    let path = std::fs::read_link(format!("/proc/self/fd/{}", stream.as_raw_fd())).ok()?;
    let mode = fcntl_getfl(stream).ok()? & OFlags::RWMODE;
    let mut options = OpenOptions::new();
    options.read(mode != OFlags::WRONLY);
    if mode != OFlags::RDONLY {
        options.append(true);
    }
    let file = options.open(path).ok()?;
    let after = fstat(&file).ok()?;
    let is_the_same = (before.st_dev, before.st_ino) == (after.st_dev, after.st_ino);
    if mode == OFlags::RDONLY && kind == FileType::RegularFile {
        let at = tell(stream).ok()?;
        seek(&file, SeekFrom::Start(at)).ok()?;
    }
    is_the_same.then_some(file)
}

/// Whether the tree may stay: `false` when whoever started us died before they said so.
fn is_kept() -> bool {
    let mut letters = Vec::new();
    let mut from = io::stdin().lock().take(KEEP.len() as u64);
    from.read_to_end(&mut letters).is_ok() && letters == KEEP
}

fn in_runtime<T>(work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let done = runtime.block_on(work);
    // The thread that waits for letters may wait for ever.
    runtime.shutdown_background();
    done
}

/// Forwards signals, and collects the dead.
struct Duties {
    signals: SelectAll<Pin<Box<dyn futures::Stream<Item = Signal>>>>,
    children: tokio::signal::unix::Signal,
    /// Those that were collected and nobody has asked for yet.
    ended: HashMap<Pid, u8>,
}

impl Duties {
    fn begin() -> io::Result<Self> {
        let mut signals = SelectAll::new();
        for (_, number) in handled_signals() {
            let stream = signal(SignalKind::from_raw(number.as_raw()))?;
            let every: Pin<Box<dyn futures::Stream<Item = Signal>>> =
                Box::pin(every(stream, number));
            signals.push(every);
        }
        Ok(Self {
            signals,
            children: signal(SignalKind::child())?,
            ended: HashMap::new(),
        })
    }

    /// Forwards signals to this process until it ends. Its status, as a shell says it.
    async fn until_it_ends(&mut self, pid: u32) -> io::Result<u8> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
        loop {
            self.collect()?;
            if let Some(status) = self.ended.remove(&pid) {
                return Ok(status);
            }
            tokio::select! {
                Some(number) = self.signals.next() => {
                    // It may have ended, and its end be on the way.
                    let _ = kill_process(pid, number);
                }
                _ = self.children.recv() => {}
            }
        }
    }

    /// Collects all that have ended.
    fn collect(&mut self) -> io::Result<()> {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => {
                    let status = ExitStatus::from_raw(status.as_raw());
                    let code = status
                        .code()
                        .or_else(|| status.signal().map(|signal| 128 + signal));
                    let code = code.and_then(|code| u8::try_from(code).ok());
                    self.ended.insert(pid, code.unwrap_or(u8::MAX));
                }
                // There is nobody left.
                Ok(None) | Err(rustix::io::Errno::CHILD) => return Ok(()),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

fn every(
    stream: tokio::signal::unix::Signal,
    number: Signal,
) -> impl futures::Stream<Item = Signal> {
    futures::stream::unfold(stream, move |mut stream| async move {
        stream.recv().await?;
        Some((number, stream))
    })
}
