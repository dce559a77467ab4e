//! `run` as process 1 of a container: somebody has to forward signals and to collect the dead.
//!
//! In: our own command line, which is run again as a child. Out: its exit status. What can fail: the system refuses a process or a handler.
//!
//! The kernel gives orphans to process 1, and sends it only the signals that it handles. A supervisor that collects every child would take statuses from whoever waits for them, so it has a process of its own.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

use futures::StreamExt;
use futures::stream::SelectAll;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};
use tokio::signal::unix::{SignalKind, signal};

use crate::preempt::handled_signals;

/// Whether we are process 1 of our pid namespace.
pub(super) fn is_init() -> bool {
    std::process::id() == 1
}

/// Runs this very command line in a child, and is process 1 beside it until it ends. The status, as a shell says it.
pub(super) fn stand_in() -> io::Result<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut signals = SelectAll::new();
        for (_, number) in handled_signals() {
            let stream = signal(SignalKind::from_raw(number.as_raw()))?;
            signals.push(Box::pin(every(stream, number)));
        }
        let mut children = signal(SignalKind::child())?;
        let child = Command::new(super::OURSELVES)
            .args(std::env::args_os().skip(1))
            .spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        loop {
            tokio::select! {
                Some(number) = signals.next() => {
                    // It may have ended, and its end be on the way.
                    let _ = pid.map(|pid| kill_process(pid, number));
                }
                _ = children.recv() => {
                    if let Some(status) = collect(pid)? {
                        return Ok(status);
                    }
                }
            }
        }
    })
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

/// Collects all that have ended. The status of our own child, if it is among them.
fn collect(child: Option<Pid>) -> io::Result<Option<u8>> {
    let mut ours = None;
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) if Some(pid) == child => {
                let status = ExitStatus::from_raw(status.as_raw());
                let code = status
                    .code()
                    .or_else(|| status.signal().map(|signal| 128 + signal));
                ours = Some(
                    code.and_then(|code| u8::try_from(code).ok())
                        .unwrap_or(u8::MAX),
                );
            }
            Ok(Some(_an_orphan)) => {}
            Ok(None) => return Ok(ours),
            // There is nobody left.
            Err(rustix::io::Errno::CHILD) => return Ok(ours),
            Err(errno) => return Err(errno.into()),
        }
    }
}
