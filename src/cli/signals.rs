//! SIGINT, SIGTERM and SIGHUP: the first one cancels, no one kills.
//!
//! What the driver does with the target of a saver that dies after BEGIN is not documented, so the target is as good as lost and none of them may end this
//! process. Cancelling is a wish: before BEGIN the story rolls the target back; after it the story goes on, because there is no way back.

use std::io;

use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::preempt::handled_signals;

/// From now on the first of these signals goes to `cancel`, and whatever comes after it to `again`. `effect` says what the first one does, for the log.
///
/// # Errors
/// The system refused a handler.
pub(super) fn watch(
    runtime: &Runtime,
    [cancel, again]: [&CancellationToken; 2],
    effect: &'static str,
) -> io::Result<()> {
    let _inside = runtime.enter();
    // A terminal that is closed must not end a save either.
    for (name, kind) in [
        ("SIGINT", SignalKind::interrupt()),
        ("SIGTERM", SignalKind::terminate()),
        ("SIGHUP", SignalKind::hangup()),
    ] {
        let mut signals = signal(kind)?;
        let (cancel, again) = (cancel.clone(), again.clone());
        runtime.spawn(async move {
            while signals.recv().await.is_some() {
                let said = if cancel.is_cancelled() {
                    // A terminal that is closed is nobody's wish.
                    if kind != SignalKind::hangup() {
                        again.cancel();
                    }
                    "is noted already"
                } else {
                    effect
                };
                cancel.cancel();
                tracing::warn!("{name} {said}");
            }
        });
    }
    Ok(())
}

/// From now on none of the signals that end a process, and that can be handled, ends this one.
///
/// # Errors
/// The system refused a handler.
pub(super) fn outlive(runtime: &Runtime) -> io::Result<()> {
    let _inside = runtime.enter();
    for (_, number) in handled_signals() {
        let mut signals = signal(SignalKind::from_raw(number.as_raw()))?;
        runtime.spawn(async move { while signals.recv().await.is_some() {} });
    }
    Ok(())
}
