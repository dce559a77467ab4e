//! Bytes at rest: in memory as they came off the wire, in a file, or only their number.
//!
//! In: a request body. Out: a [`Blob`], with MD5 and checksums taken on the way, and later streams over ranges of blobs. A file blob that
//! was not committed, or was replaced, is deleted when its last reader lets it go.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures::{Stream, StreamExt, TryStreamExt};
use s3s::crypto::{Checksum as _, Md5};
use s3s::dto::StreamingBlob;
use s3s::stream::{ByteStream, RemainingLength};
use s3s::{S3Error, S3ErrorCode, S3Result, StdError, s3_error};
use tokio::io::AsyncWriteExt;

use super::super::body::flipped;
use super::checksum::{Algorithm, Hasher, Sums};
use super::{BODY_LEN_MAX, KEEP_LEN_MAX, Store, disk_error};

/// Length of the pieces in which a blob is read.
const READ_LEN: usize = 1 << 20;
static ZEROS: [u8; READ_LEN] = [0; READ_LEN];

/// Immutable bytes.
#[derive(Debug)]
pub(super) enum Blob {
    Memory {
        len: u64,
        pieces: Vec<Bytes>,
    },
    File(FileBlob),
    /// Bytes that were counted and dropped; they read as zeros.
    Swallowed {
        len: u64,
    },
}

/// A file in the root folder's `blobs`.
#[derive(Debug)]
pub(super) struct FileBlob {
    pub(super) path: PathBuf,
    pub(super) len: u64,
    /// Nothing refers to it: delete it with this value.
    doomed: AtomicBool,
}

impl FileBlob {
    /// A file that something on disk refers to.
    pub(super) fn kept(path: PathBuf, len: u64) -> Self {
        Self {
            path,
            len,
            doomed: AtomicBool::new(false),
        }
    }
}

impl Drop for FileBlob {
    fn drop(&mut self) {
        if self.doomed.load(Ordering::Acquire) {
            // The next start removes what nothing refers to.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Blob {
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Memory { len, .. } | Self::Swallowed { len } => *len,
            Self::File(file) => file.len,
        }
    }

    /// Something on disk refers to this blob from now on.
    pub(super) fn keep(&self) {
        if let Self::File(file) = self {
            file.doomed.store(false, Ordering::Release);
        }
    }

    /// Nothing on disk refers to this blob any more.
    pub(super) fn doom(&self) {
        if let Self::File(file) = self {
            file.doomed.store(true, Ordering::Release);
        }
    }

    /// Bytes from `offset`, at least one and at most `max`, both in range.
    async fn read(self: Arc<Self>, offset: u64, max: u64) -> io::Result<Bytes> {
        let max = usize::try_from(max).unwrap_or(READ_LEN).min(READ_LEN);
        match &*self {
            Self::Swallowed { .. } => Ok(Bytes::from_static(&ZEROS[..max])),
            Self::Memory { pieces, .. } => {
                let mut skip = offset;
                for piece in pieces {
                    let len = piece.len() as u64;
                    if skip < len {
                        let start = usize::try_from(skip).unwrap_or(usize::MAX);
                        return Ok(piece.slice(start..piece.len().min(start.saturating_add(max))));
                    }
                    skip -= len;
                }
                Err(io::ErrorKind::UnexpectedEof.into())
            }
            Self::File(file) => {
                let path = file.path.clone();
                let read = move || {
                    let mut buffer = vec![0; max];
                    File::open(path)?.read_exact_at(&mut buffer, offset)?;
                    Ok(Bytes::from(buffer))
                };
                tokio::task::spawn_blocking(read)
                    .await
                    .map_err(io::Error::other)?
            }
        }
    }
}

/// A stream over `range` of the bytes of `blobs` put end to end. The range lies within them.
pub(super) fn stream(blobs: Vec<Arc<Blob>>, range: std::ops::Range<u64>) -> StreamingBlob {
    struct Cursor {
        blobs: std::vec::IntoIter<Arc<Blob>>,
        current: Option<Arc<Blob>>,
        offset: u64,
        left: u64,
    }
    let cursor = Cursor {
        blobs: blobs.into_iter(),
        current: None,
        offset: range.start,
        left: range.end - range.start,
    };
    let pieces = futures::stream::try_unfold(cursor, |mut cursor| async move {
        while cursor.left > 0 {
            match &cursor.current {
                Some(blob) if cursor.offset < blob.len() => {
                    let max = cursor.left.min(blob.len() - cursor.offset);
                    let piece = Arc::clone(blob).read(cursor.offset, max).await?;
                    cursor.offset += piece.len() as u64;
                    cursor.left -= piece.len() as u64;
                    return Ok(Some((piece, cursor)));
                }
                Some(blob) => {
                    cursor.offset -= blob.len();
                    cursor.current = cursor.blobs.next();
                }
                None => match cursor.blobs.next() {
                    Some(blob) => cursor.current = Some(blob),
                    None => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                },
            }
        }
        Ok(None)
    });
    StreamingBlob::new(Pieces {
        left: range.end - range.start,
        inner: Box::pin(pieces),
    })
}

/// A stream of pieces that knows how many bytes are to come.
struct Pieces<S> {
    inner: Pin<Box<S>>,
    left: u64,
}

impl<S: Stream<Item = io::Result<Bytes>>> Stream for Pieces<S> {
    type Item = Result<Bytes, StdError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let piece = ready!(self.inner.as_mut().poll_next(cx));
        if let Some(Ok(piece)) = &piece {
            self.left -= piece.len() as u64;
        }
        Poll::Ready(piece.map(|piece| piece.map_err(StdError::from)))
    }
}

impl<S: Stream<Item = io::Result<Bytes>>> ByteStream for Pieces<S> {
    fn remaining_length(&self) -> RemainingLength {
        usize::try_from(self.left).map_or_else(
            |_error| RemainingLength::unknown(),
            RemainingLength::new_exact,
        )
    }
}

/// A body that was taken in.
pub(super) struct Ingested {
    pub(super) blob: Blob,
    /// MD5 of the bytes, or a made-up value in its place for a swallowed body.
    pub(super) md5: [u8; 16],
    /// The checksums that were asked for; for a swallowed body, those that the request claimed.
    pub(super) sums: Sums,
}

/// What to take from a body besides its bytes.
pub(super) struct Wanted<'a> {
    /// Length as announced, after removal of any chunked framing.
    pub(super) len: Option<u64>,
    /// Drop the bytes if this store swallows.
    pub(super) part: bool,
    pub(super) algorithms: Vec<Algorithm>,
    /// The request's own checksums.
    pub(super) claimed: &'a Sums,
    /// Flip the lowest bit of this byte once it is at rest.
    pub(super) flip_stored: Option<u64>,
}

impl Store {
    /// Reads a body to its end.
    pub(super) async fn ingest(
        &self,
        body: Option<StreamingBlob>,
        wanted: Wanted<'_>,
    ) -> S3Result<Ingested> {
        let body = match body {
            Some(body) => body.map_err(body_error).boxed(),
            None => futures::stream::empty().boxed(),
        };
        let swallow = self.settings.swallow
            && (wanted.part || wanted.len.is_none_or(|len| len >= KEEP_LEN_MAX));
        if swallow {
            return self.swallow(body, &wanted).await;
        }
        let mut md5 = Md5::new();
        let mut hasher = Hasher::new(wanted.algorithms);
        let hashed = body.map_ok(|piece| {
            md5.update(&piece);
            hasher.update(&piece);
            piece
        });
        let mut blob = match &self.disk {
            Some(disk) => file_blob(disk.blob_path(&self.fresh_id()), hashed).await?,
            None => memory_blob(hashed).await?,
        };
        if let Some(at) = wanted.flip_stored {
            blob = flip(blob, at).map_err(disk_error)?;
        }
        Ok(Ingested {
            blob,
            md5: md5.finalize(),
            sums: hasher.finish(),
        })
    }

    async fn swallow(
        &self,
        mut body: impl Stream<Item = S3Result<Bytes>> + Unpin,
        wanted: &Wanted<'_>,
    ) -> S3Result<Ingested> {
        let mut len = 0;
        while let Some(piece) = body.try_next().await? {
            len += piece.len() as u64;
        }
        let mut md5 = Md5::new();
        md5.update(self.fresh_id().as_bytes());
        Ok(Ingested {
            blob: Blob::Swallowed {
                len: wanted.len.unwrap_or(len),
            },
            md5: md5.finalize(),
            sums: wanted.claimed.clone(),
        })
    }
}

async fn memory_blob(mut body: impl Stream<Item = S3Result<Bytes>> + Unpin) -> S3Result<Blob> {
    let (mut len, mut pieces) = (0, Vec::new());
    while let Some(piece) = body.try_next().await? {
        len += piece.len() as u64;
        check_len(len)?;
        pieces.push(piece);
    }
    Ok(Blob::Memory { len, pieces })
}

async fn file_blob(
    path: PathBuf,
    mut body: impl Stream<Item = S3Result<Bytes>> + Unpin,
) -> S3Result<Blob> {
    let mut file = tokio::fs::File::create(&path).await.map_err(disk_error)?;
    let mut blob = FileBlob {
        path,
        len: 0,
        doomed: AtomicBool::new(true),
    };
    while let Some(piece) = body.try_next().await? {
        blob.len += piece.len() as u64;
        check_len(blob.len)?;
        file.write_all(&piece).await.map_err(disk_error)?;
    }
    file.flush().await.map_err(disk_error)?;
    Ok(Blob::File(blob))
}

fn check_len(len: u64) -> S3Result {
    if len > BODY_LEN_MAX {
        return Err(s3_error!(
            EntityTooLarge,
            "Your proposed upload exceeds the maximum allowed size"
        ));
    }
    Ok(())
}

fn flip(mut blob: Blob, at: u64) -> io::Result<Blob> {
    match &mut blob {
        Blob::Memory { pieces, .. } => {
            let mut start = 0;
            for piece in pieces {
                let len = piece.len() as u64;
                if (start..start + len).contains(&at) {
                    *piece = flipped(piece, at - start);
                }
                start += len;
            }
        }
        Blob::File(file) if at < file.len => {
            let mut byte = [0];
            let open = File::options().read(true).write(true).open(&file.path)?;
            open.read_exact_at(&mut byte, at)?;
            open.write_all_at(&[byte[0] ^ 1], at)?;
        }
        Blob::File(_) | Blob::Swallowed { .. } => {}
    }
    Ok(blob)
}

/// A body that ended early, or did not have the SHA-256 that its signature covers.
fn body_error(source: StdError) -> S3Error {
    let text = source.to_string();
    let mut error = if text.contains("Sha256Mismatch") || text.contains("SignatureMismatch") {
        let code = S3ErrorCode::Custom("XAmzContentSHA256Mismatch".into());
        let mut error = S3Error::with_message(
            code,
            "The provided x-amz-content-sha256 does not match what was computed.",
        );
        error.set_status_code(http::StatusCode::BAD_REQUEST);
        error
    } else {
        s3_error!(IncompleteBody, "The request body terminated unexpectedly")
    };
    error.set_source(source);
    error
}
