//! The socket under the HTTP layer: one rate for all connections together, closing of idle connections, resets.
//!
//! In: an accepted socket. Out: the byte stream that hyper reads and writes. The layers above steer it through [`Connection`]. Every byte
//! in either direction is charged to the common [`Pace`]; a connection whose turn has not come sleeps. With no rate and no idle limit a
//! read or write is the socket's own.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::BufMut;
use futures::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

/// Most bytes that one read or write moves when a rate is set, so that connections take turns.
const TURN_LEN: usize = 64 << 10;
/// How far ahead of the rate a burst may be.
const BURST: Duration = Duration::from_millis(20);

/// Spaces out bytes over time. All connections share one.
#[derive(Debug)]
pub(super) struct Pace {
    bytes_per_s: u64,
    state: Mutex<PaceState>,
}

#[derive(Debug)]
struct PaceState {
    /// When everything charged so far has passed at the given rate.
    paid_until: Instant,
}

impl Pace {
    /// A pace of `bytes_per_s`, at least 1.
    pub(super) fn new(bytes_per_s: u64) -> Self {
        Self {
            bytes_per_s: bytes_per_s.max(1),
            state: Mutex::new(PaceState {
                paid_until: Instant::now(),
            }),
        }
    }

    /// When the next bytes may pass, if that is later than `now`.
    fn wait_until(&self, now: Instant) -> Option<Instant> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state
            .paid_until
            .checked_sub(BURST)
            .filter(|turn| *turn > now)
    }

    /// Charges bytes that have passed.
    fn charge(&self, now: Instant, bytes: usize) {
        let nanos = u128::from(bytes as u64) * 1_000_000_000 / u128::from(self.bytes_per_s);
        let span = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.paid_until = state.paid_until.max(now) + span;
    }
}

/// How often a stalled request looks whether its client is still there.
const PEER_CHECK: Duration = Duration::from_millis(50);

/// What the layers above may ask of a connection.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    flushes: AtomicU64,
    flushed: AtomicWaker,
}

impl Connection {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            flushes: AtomicU64::new(0),
            flushed: AtomicWaker::new(),
        }
    }

    /// When this connection closes, it closes with a reset (RST) and unsent bytes are dropped.
    pub(super) fn reset_on_close(&self) {
        // A socket that the peer has already reset refuses the option; there is nothing left to do then.
        let _ = self.stream.set_zero_linger();
    }

    /// Returns once the client has closed its side. Nothing is read: while a request stalls, the HTTP layer does not look.
    pub(super) async fn peer_gone(&self) {
        while let Ok(ready) = self.stream.ready(Interest::READABLE).await {
            if ready.is_read_closed() {
                return;
            }
            tokio::time::sleep(PEER_CHECK).await;
        }
    }

    /// The client's port; 0 where it is gone already.
    pub(super) fn client_port(&self) -> u16 {
        self.stream.peer_addr().map_or(0, |client| client.port())
    }

    /// Flushes so far. The HTTP layer flushes the socket only after its own buffer is empty.
    pub(super) fn flush_count(&self) -> u64 {
        self.flushes.load(Ordering::Acquire)
    }

    /// Ready once there was a flush after `since`.
    pub(super) fn poll_flushed(&self, since: u64, cx: &Context<'_>) -> Poll<()> {
        self.flushed.register(cx.waker());
        if self.flush_count() > since {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }
}

/// The byte stream of a connection.
pub(super) struct Wire {
    connection: Arc<Connection>,
    pace: Option<Arc<Pace>>,
    turn: Option<Pin<Box<Sleep>>>,
    idle: Option<Idle>,
}

struct Idle {
    limit: Duration,
    timer: Pin<Box<Sleep>>,
}

impl Wire {
    pub(super) fn new(
        connection: Arc<Connection>,
        pace: Option<Arc<Pace>>,
        idle_max: Option<Duration>,
    ) -> Self {
        let idle = idle_max.map(|limit| Idle {
            limit,
            timer: Box::pin(tokio::time::sleep(limit)),
        });
        Self {
            connection,
            pace,
            turn: None,
            idle,
        }
    }

    /// Waits for this connection's turn, then says how many bytes it may move.
    fn poll_turn(&mut self, cx: &mut Context<'_>) -> Poll<usize> {
        let Some(pace) = &self.pace else {
            return Poll::Ready(usize::MAX);
        };
        loop {
            if let Some(turn) = &mut self.turn {
                ready!(turn.as_mut().poll(cx));
                self.turn = None;
            }
            match pace.wait_until(Instant::now()) {
                Some(turn) => self.turn = Some(Box::pin(tokio::time::sleep_until(turn))),
                None => return Poll::Ready(TURN_LEN),
            }
        }
    }

    /// Accounts for the outcome of a read or write.
    fn moved(
        &mut self,
        cx: &mut Context<'_>,
        result: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if self.pace.is_none() && self.idle.is_none() {
            return result;
        }
        match &result {
            Poll::Ready(Ok(bytes)) => {
                let now = Instant::now();
                if let Some(pace) = &self.pace {
                    pace.charge(now, *bytes);
                }
                if let Some(idle) = &mut self.idle {
                    idle.timer.as_mut().reset(now + idle.limit);
                }
            }
            Poll::Pending => {
                if let Some(idle) = &mut self.idle
                    && idle.timer.as_mut().poll(cx).is_ready()
                {
                    return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                }
            }
            Poll::Ready(Err(_)) => {}
        }
        result
    }
}

/// Tries `io` until it does not block, waiting for readiness in between.
fn poll_io(
    mut poll_ready: impl FnMut() -> Poll<io::Result<()>>,
    mut io: impl FnMut() -> io::Result<usize>,
) -> Poll<io::Result<usize>> {
    loop {
        ready!(poll_ready())?;
        match io() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return Poll::Ready(result),
        }
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let len = ready!(this.poll_turn(cx));
        let stream = &this.connection.stream;
        let result = poll_io(
            || stream.poll_read_ready(cx),
            || stream.try_read_buf(&mut (&mut *buf).limit(len)),
        );
        this.moved(cx, result).map_ok(drop)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let len = ready!(this.poll_turn(cx)).min(buf.len());
        let stream = &this.connection.stream;
        let result = poll_io(
            || stream.poll_write_ready(cx),
            || stream.try_write(&buf[..len]),
        );
        this.moved(cx, result)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.pace.is_some() {
            let first = bufs
                .iter()
                .find(|buf| !buf.is_empty())
                .map_or(&[][..], |buf| buf);
            return Pin::new(this).poll_write(cx, first);
        }
        let stream = &this.connection.stream;
        let result = poll_io(
            || stream.poll_write_ready(cx),
            || stream.try_write_vectored(bufs),
        );
        this.moved(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.connection.flushes.fetch_add(1, Ordering::AcqRel);
        self.connection.flushed.wake();
        Poll::Ready(Ok(()))
    }

    /// The socket closes when the connection is dropped, which follows at once.
    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_accounts_for_every_byte() {
        let pace = Pace::new(1_000_000);
        let start = pace.state.lock().expect("lock").paid_until;
        assert_eq!(pace.wait_until(start), None);
        for _ in 0..100 {
            pace.charge(start, 10_000);
        }
        let state = pace.state.lock().expect("lock");
        assert_eq!(state.paid_until, start + Duration::from_secs(1));
        drop(state);
        assert_eq!(
            pace.wait_until(start),
            Some(start + Duration::from_secs(1) - BURST)
        );
        assert_eq!(pace.wait_until(start + Duration::from_secs(1)), None);
    }

    #[test]
    fn an_idle_pace_saves_nothing_up() {
        let pace = Pace::new(1_000);
        let start = pace.state.lock().expect("lock").paid_until;
        let later = start + Duration::from_secs(60);
        pace.charge(later, 1_000);
        assert_eq!(
            pace.wait_until(later),
            Some(later + Duration::from_secs(1) - BURST)
        );
    }
}
