//! Request bodies: a list of buffers on its way out, and the digests that go with it.
//!
//! In: the buffers of a part or of a small object. Out: a [`Payload`] that the SDK sends without joining or copying, and whose progress can be watched. Nothing
//! here can fail.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use aws_sdk_s3::primitives::{ByteStream, SdkBody};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use md5::Md5;
use sha2::Sha256;

use super::habits::{Checksum, Manner};
use crate::codec::{Crc32, Crc32Kind};

/// Bytes of a body that are handed to the connection at once. Small, so that progress is seen on a slow line; large against the cost of a call.
pub(super) const BODY_FRAME_LEN: usize = 256 * 1024;

/// A body that is ready to be sent.
pub(super) struct Payload {
    pub(super) body: ByteStream,
    /// Length in bytes.
    pub(super) len: u64,
    /// Bytes handed to the connection so far.
    pub(super) handed_over: Arc<AtomicU64>,
    pub(super) digests: Digests,
}

/// What a request says about its body beside the checksum.
#[derive(Default)]
pub(super) struct Digests {
    /// SHA-256 in hex, for the signature.
    pub(super) sha256: Option<String>,
    /// MD5 in base64, for `Content-MD5`.
    pub(super) md5: Option<String>,
    /// Where the store wants one.
    pub(super) crc32: Option<Crc32>,
}

impl Digests {
    /// For `x-amz-checksum-crc32c` or `x-amz-checksum-crc32`.
    pub(super) fn header_of(&self, kind: Crc32Kind) -> Option<String> {
        let sum = self.crc32.filter(|sum| sum.kind() == kind);
        sum.map(Crc32::to_base64)
    }
}

impl Payload {
    /// A body of these buffers, with the digests that its manner asks for.
    pub(super) async fn new(pieces: Vec<Bytes>, manner: Manner) -> Self {
        let digests = match (manner.signs_body, manner.checksum) {
            (false, Checksum::Crc64Nvme) => Digests::default(),
            _ => Digests::of(pieces.clone(), manner).await,
        };
        let len = pieces.iter().map(|piece| piece.len() as u64).sum();
        let handed_over = Arc::new(AtomicU64::new(0));
        let stream = PayloadStream {
            pieces: pieces.into(),
            remaining: len,
            handed_over: Arc::clone(&handed_over),
        };
        Self {
            body: ByteStream::new(SdkBody::from_body_1_x(stream)),
            len,
            handed_over,
            digests,
        }
    }

    /// The length as the SDK wants it.
    pub(super) fn content_length(&self) -> i64 {
        i64::try_from(self.len).unwrap_or(i64::MAX)
    }
}

impl Digests {
    /// For 16 MiB SHA-256 takes about 9 ms and MD5 about 27 ms, so not on the runtime's own threads.
    async fn of(pieces: Vec<Bytes>, manner: Manner) -> Self {
        let digests = tokio::task::spawn_blocking(move || Self {
            sha256: manner.signs_body.then(|| hex(&digest::<Sha256>(&pieces))),
            md5: (manner.checksum == Checksum::Md5)
                .then(|| STANDARD.encode(digest::<Md5>(&pieces))),
            crc32: match manner.checksum {
                Checksum::Short(kind) => {
                    Some(Crc32::of(kind, pieces.iter().map(|piece| &piece[..])))
                }
                Checksum::Crc64Nvme | Checksum::Md5 => None,
            },
        });
        match digests.await {
            Ok(digests) => digests,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
}

fn digest<D: sha2::Digest>(pieces: &[Bytes]) -> Vec<u8> {
    let mut hasher = D::new();
    pieces.iter().for_each(|piece| hasher.update(piece));
    hasher.finalize().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::with_capacity(64), |mut hex, byte| {
            let _infallible = write!(hex, "{byte:02x}");
            hex
        })
}

/// Buffers as a request body. Counts what it hands over, so that a stall can be told from a slow line.
struct PayloadStream {
    pieces: VecDeque<Bytes>,
    remaining: u64,
    handed_over: Arc<AtomicU64>,
}

impl Body for PayloadStream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        while self.pieces.front().is_some_and(Bytes::is_empty) {
            self.pieces.pop_front();
        }
        let Some(piece) = self.pieces.front_mut() else {
            return Poll::Ready(None);
        };
        let data = piece.split_to(piece.len().min(BODY_FRAME_LEN));
        let len = data.len() as u64;
        self.remaining -= len;
        self.handed_over.fetch_add(len, Ordering::Relaxed);
        Poll::Ready(Some(Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        self.remaining == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.remaining)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manner(checksum: Checksum, signs_body: bool) -> Manner {
        Manner {
            checksum,
            signs_body,
        }
    }

    #[tokio::test]
    async fn digests_cover_all_pieces_in_the_form_that_the_headers_want() {
        let pieces = vec![
            Bytes::from_static(b"a"),
            Bytes::new(),
            Bytes::from_static(b"bc"),
        ];
        let payload = Payload::new(pieces.clone(), manner(Checksum::Md5, true)).await;
        assert_eq!(payload.len, 3);
        // RFC 1321 and FIPS 180-2, both of "abc".
        assert_eq!(
            payload.digests.md5.as_deref(),
            Some("kAFQmDzST7DWlj99KOF/cg==")
        );
        let sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(payload.digests.sha256.as_deref(), Some(sha256));
        let kind = Crc32Kind::Crc32;
        let short = Payload::new(pieces.clone(), manner(Checksum::Short(kind), false)).await;
        // The CRC catalogue's CRC-32/ISO-HDLC of "abc".
        assert_eq!(short.digests.header_of(kind).as_deref(), Some("NSRBwg=="));
        assert_eq!(short.digests.header_of(Crc32Kind::Crc32c), None);
        assert!(short.digests.md5.is_none() && short.digests.sha256.is_none());
        let bare = Payload::new(pieces, manner(Checksum::Crc64Nvme, false)).await;
        assert!(bare.digests.md5.is_none() && bare.digests.sha256.is_none());
    }
}
