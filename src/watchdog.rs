//! Calls that ought to return, and are told of, or not waited for, when they do not.
//!
//! In: a call that cannot be interrupted, and how long it usually takes at most. Out: its result, whenever it comes. Nothing here can fail: a call that hangs is not given up, because what it did is known only once it
//! has returned.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// What a driver call may take that waits for nobody: mapping and unmapping memory, mostly.
pub const USUAL: Duration = Duration::from_secs(10);

/// A call that is late is told of so often.
const TELL_EVERY: Duration = Duration::from_secs(5);
/// It is late when it takes so much longer than it should.
const SLACK: Duration = Duration::from_secs(1);

/// A call on a thread of its own.
#[derive(Debug)]
pub struct Aside<T>(mpsc::Receiver<T>);

/// Makes a call that may hang, and whose end nobody depends on, on a thread of this name.
///
/// # Errors
/// The system has no thread left.
pub fn aside<T: Send + 'static>(
    name: &str,
    call: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Aside<T>> {
    let (tell, told) = mpsc::channel();
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            // Nobody listens any more when it took too long.
            let _ = tell.send(call());
        })?;
    Ok(Aside(told))
}

impl<T> Aside<T> {
    /// Its result, if it comes so soon; it goes on otherwise, and is not heard.
    pub fn within(self, limit: Duration) -> Option<T> {
        self.0.recv_timeout(limit).ok()
    }
}

/// Makes the call on this thread. Another one tells when it is late.
pub fn watch<T>(name: &str, usual: Duration, call: impl FnOnce() -> T) -> T {
    std::thread::scope(|scope| {
        let (returned, returns) = mpsc::channel::<()>();
        let watching = std::thread::Builder::new().name("watchdog".to_owned());
        let span = tracing::Span::current();
        let watching = watching.spawn_scoped(scope, move || {
            let _named = span.entered();
            let started = Instant::now();
            let mut patience = usual + SLACK;
            while returns.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
                tracing::error!(
                    "{name} has not returned for {:.0?}; nothing can be said of the target before it does",
                    started.elapsed()
                );
                patience = TELL_EVERY;
            }
        });
        let result = call();
        drop(returned);
        // Without it the call is as good.
        let _watched = watching.is_ok();
        result
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_result_is_the_calls_own() {
        let started = Instant::now();
        assert_eq!(watch("a call", Duration::from_secs(60), || 7), 7);
        assert!(
            started.elapsed() < Duration::from_secs(30),
            "it is not waited for"
        );
    }
}
