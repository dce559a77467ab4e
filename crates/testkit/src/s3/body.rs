//! Bodies on their way in and out, counted, and broken where a rule says so.
//!
//! In: the body of a request or a response and at most one [`BodyFault`]. Out: the same bytes, until the fault's byte. What a fault
//! cannot do from up here (a reset, closing only after the bytes before the fault are on the wire) it asks of the connection, see
//! [`super::wire`].

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use s3s::{Body, StdError};

use super::wire::Connection;

/// Something that happens to a body at one byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BodyFault {
    pub(super) kind: BodyFaultKind,
    /// Offset from the start of the body; the bytes before it pass.
    pub(super) at: u64,
}

/// What happens there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BodyFaultKind {
    /// The connection is reset (TCP RST).
    Reset,
    /// Nothing more passes and the connection stays open.
    Stall,
    /// The connection is closed.
    Cut,
    /// The lowest bit of the byte at the offset is inverted.
    Flip,
    /// The body ends, and its announced length is the shorter one: a complete answer with too few bytes.
    Short,
}

/// The error that ends a body early; the connection is given up with it.
#[derive(Debug, thiserror::Error)]
#[error("a rule ended this body after {at} bytes")]
struct Ended {
    at: u64,
}

struct Meter {
    seen: u64,
    fault: Option<BodyFault>,
}

impl Meter {
    /// True when the fault's byte is reached and it is one that lets nothing more pass.
    fn ended_by(&self) -> Option<BodyFault> {
        self.fault
            .filter(|fault| fault.kind != BodyFaultKind::Flip && self.seen >= fault.at)
    }

    /// Counts `data`, cut at the fault's byte, or with its bit inverted.
    fn pass(&mut self, data: Bytes) -> Bytes {
        let start = self.seen;
        let len = data.len() as u64;
        let data = match self.fault {
            Some(BodyFault {
                kind: BodyFaultKind::Flip,
                at,
            }) if (start..start + len).contains(&at) => flipped(&data, at - start),
            Some(BodyFault {
                kind: BodyFaultKind::Flip,
                ..
            })
            | None => data,
            Some(BodyFault { at, .. }) => match usize::try_from(at.saturating_sub(start)) {
                Ok(keep) if keep < data.len() => data.slice(..keep),
                _ => data,
            },
        };
        self.seen += data.len() as u64;
        data
    }
}

/// A copy of `data` with the lowest bit of the byte at `index` inverted; unchanged when there is no such byte.
pub(super) fn flipped(data: &[u8], index: u64) -> Bytes {
    let mut copy = data.to_vec();
    if let Some(byte) = usize::try_from(index)
        .ok()
        .and_then(|index| copy.get_mut(index))
    {
        *byte ^= 1;
    }
    copy.into()
}

struct Intake<B> {
    body: B,
    meter: Meter,
    ended: bool,
}

/// A handle on a request's body that outlives whoever reads it, so that what the S3 layer left unread can be read off: a server that
/// answers and closes over unread bytes would reset the connection and often take its own answer with it.
pub(super) struct RequestBody<B>(Arc<Mutex<Intake<B>>>);

impl<B> Clone for RequestBody<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<B: HttpBody<Data = Bytes> + Unpin> RequestBody<B>
where
    B::Error: Into<StdError>,
{
    pub(super) fn new(body: B, fault: Option<BodyFault>) -> Self {
        Self(Arc::new(Mutex::new(Intake {
            body,
            meter: Meter { seen: 0, fault },
            ended: false,
        })))
    }

    /// Body bytes read so far.
    pub(super) fn bytes_in(&self) -> u64 {
        self.lock().meter.seen
    }

    /// The fault that this body has run into.
    pub(super) fn ended_by(&self) -> Option<BodyFault> {
        self.lock().meter.ended_by()
    }

    /// Reads at most `len_max` bytes more and drops them.
    pub(super) async fn drain(&mut self, len_max: u64) {
        let limit = self.bytes_in().saturating_add(len_max);
        while self.bytes_in() < limit {
            let frame = std::future::poll_fn(|cx| Pin::new(&mut *self).poll_frame(cx)).await;
            if !matches!(frame, Some(Ok(_))) {
                break;
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Intake<B>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: HttpBody<Data = Bytes> + Unpin> HttpBody for RequestBody<B>
where
    B::Error: Into<StdError>,
{
    type Data = Bytes;
    type Error = StdError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StdError>>> {
        let mut intake = self.lock();
        if intake.ended {
            return Poll::Ready(None);
        }
        if let Some(fault) = intake.meter.ended_by() {
            return match fault.kind {
                BodyFaultKind::Stall => Poll::Pending,
                _ => Poll::Ready(Some(Err(Ended { at: fault.at }.into()))),
            };
        }
        match Pin::new(&mut intake.body).poll_frame(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) => Poll::Ready(Some(Ok(Frame::data(intake.meter.pass(data))))),
                Err(frame) => Poll::Ready(Some(Ok(frame))),
            },
            Poll::Ready(Some(Err(error))) => {
                intake.ended = true;
                Poll::Ready(Some(Err(error.into())))
            }
            Poll::Ready(None) => {
                intake.ended = true;
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        let intake = self.lock();
        intake.ended || (intake.meter.fault.is_none() && intake.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.lock().body.size_hint()
    }
}

/// A response body with a fault in it.
pub(super) struct FaultyResponse {
    body: Body,
    meter: Meter,
    connection: Arc<Connection>,
    /// Flushes that the connection had seen when the fault's byte was reached.
    waiting_since: Option<u64>,
}

impl FaultyResponse {
    pub(super) fn new(body: Body, fault: BodyFault, connection: Arc<Connection>) -> Self {
        Self {
            body,
            meter: Meter {
                seen: 0,
                fault: Some(fault),
            },
            connection,
            waiting_since: None,
        }
    }

    fn poll_fault(
        &mut self,
        fault: BodyFault,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StdError>>> {
        match fault.kind {
            BodyFaultKind::Flip | BodyFaultKind::Short => Poll::Ready(None),
            BodyFaultKind::Stall => Poll::Pending,
            BodyFaultKind::Cut | BodyFaultKind::Reset => {
                // The bytes before the fault are still in the HTTP layer's buffer: wait until it has handed them to the socket.
                let since = *self
                    .waiting_since
                    .get_or_insert_with(|| self.connection.flush_count());
                if self.connection.poll_flushed(since, cx).is_pending() {
                    return Poll::Pending;
                }
                if fault.kind == BodyFaultKind::Reset {
                    self.connection.reset_on_close();
                }
                Poll::Ready(Some(Err(Ended { at: fault.at }.into())))
            }
        }
    }
}

impl HttpBody for FaultyResponse {
    type Data = Bytes;
    type Error = StdError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StdError>>> {
        if let Some(fault) = self.meter.ended_by() {
            return self.poll_fault(fault, cx);
        }
        match Pin::new(&mut self.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) => Poll::Ready(Some(Ok(Frame::data(self.meter.pass(data))))),
                Err(frame) => Poll::Ready(Some(Ok(frame))),
            },
            other => other,
        }
    }

    fn size_hint(&self) -> SizeHint {
        let hint = self.body.size_hint();
        match (self.meter.fault, hint.exact()) {
            (
                Some(BodyFault {
                    kind: BodyFaultKind::Short,
                    at,
                }),
                Some(len),
            ) => SizeHint::with_exact(len.min(at)),
            _ => hint,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meter_cuts_and_flips_at_the_byte() {
        let mut cut = Meter {
            seen: 0,
            fault: Some(BodyFault {
                kind: BodyFaultKind::Cut,
                at: 5,
            }),
        };
        assert_eq!(cut.pass(Bytes::from_static(b"abc")), "abc");
        assert!(cut.ended_by().is_none());
        assert_eq!(cut.pass(Bytes::from_static(b"defg")), "de");
        assert!(cut.ended_by().is_some());

        let mut flip = Meter {
            seen: 0,
            fault: Some(BodyFault {
                kind: BodyFaultKind::Flip,
                at: 4,
            }),
        };
        assert_eq!(flip.pass(Bytes::from_static(b"abc")), "abc");
        assert_eq!(flip.pass(Bytes::from_static(b"def")), "ddf");
        assert!(flip.ended_by().is_none());
    }
}
