//! Process 1, of a container that runs `run`, or of the pid namespace of a tree: somebody has to forward signals and to collect the dead.
//!
//! In: a command line, which is run as a child. Out: its exit status, or that of the tree which it has made. What can fail: the system refuses a process or a handler.
//!
//! The kernel gives orphans to process 1, and sends it only the signals that it handles. A supervisor that collects every child would take statuses from whoever waits for them, so it has a process of its own.

use std::collections::HashMap;
use std::io::{self, Read};
use std::os::unix::process::ExitStatusExt;
use std::pin::Pin;
use std::process::{Command, ExitStatus, Stdio};

use futures::StreamExt;
use futures::stream::SelectAll;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};
use tokio::signal::unix::{SignalKind, signal};

use super::args::InitArgs;
use crate::host::namespace::KEEP;
use crate::preempt::handled_signals;

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
    let mut command = Command::new(program);
    command.args(rest);
    in_runtime(async {
        let mut duties = Duties::begin()?;
        let (Some(pidfile), Some(ready)) = (&args.pidfile, &args.ready) else {
            let child = command.spawn()?;
            return duties.until_it_ends(child.id()).await;
        };
        // Ours is for the letters of whoever started us.
        let criu = command.stdin(Stdio::null()).spawn()?;
        let letters = tokio::task::spawn_blocking(is_kept);
        let status = duties.until_it_ends(criu.id()).await?;
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
            kept = letters => if !kept.map_err(io::Error::other)? {
                return Err(io::Error::other("the restore was given up, and the tree is ended"));
            },
        }
        ended.await
    })
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
