//! Signals: those that are notices, and those that are the job's.
//!
//! In: the signals of `preempt.signals`. Out: notices; SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGTERM and SIGWINCH where they are no notices, for the job. SIGHUP changes nothing: a terminal that is closed is no notice, and the job has it from the kernel.
//! What can fail: the system refuses a handler.

use std::io;

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::Board;
use crate::config::{NOTICE_SIGNALS, PreemptConfig, Source};

/// Name of the source.
const SOURCE: &str = "signal";

/// What would end us, or is the job's.
pub(crate) fn handled() -> impl Iterator<Item = (&'static str, Signal)> {
    let others = [("SIGWINCH", Signal::WINCH), ("SIGHUP", Signal::HUP)];
    NOTICE_SIGNALS.into_iter().chain(others)
}

/// Handles them all from now on.
pub(super) fn watch(
    config: &PreemptConfig,
    board: &Board,
) -> io::Result<mpsc::UnboundedReceiver<Signal>> {
    let (to_job, for_the_job) = mpsc::unbounded_channel();
    let are_notices = config.sources.contains(&Source::Signals);
    for (name, number) in handled() {
        let is_notice = are_notices && config.signals.contains(&number);
        let mut signals = signal(SignalKind::from_raw(number.as_raw()))?;
        let (board, to_job, notice) = (board.clone(), to_job.clone(), config.notice);
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                if is_notice {
                    board.raise(SOURCE, notice, name);
                } else if number == Signal::HUP {
                    tracing::warn!("{name} changes nothing");
                } else if to_job.send(number).is_err() {
                    // Nobody has a job any more.
                    return;
                }
            }
        });
    }
    Ok(for_the_job)
}
