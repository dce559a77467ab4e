//! Raw bytes of an object in their order, verified: for `cat`, and for CRIU, which reads its files so.
//!
//! In: what is stored of an extent, and which of its raw bytes are wanted. Out: exactly these, written in order. Ranges are fetched ahead and decoded by several threads; a chunk that does not verify is fetched once more. What can fail: the store, a byte that is not
//! what was saved, the writer.

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use crossbeam_channel::{Receiver, bounded};
use futures::{StreamExt, TryStreamExt, stream};
use tokio_util::sync::CancellationToken;

use super::read::LoadFailed;
use crate::codec::Decoder;
use crate::image::Stored;
use crate::manifest::{ExtentRecord, FrameEntry};
use crate::pipeline::PipelineError;
use crate::plan::{FetchGroup, fetch_groups};
use crate::session::Session;
use crate::store::{Key, Store};

/// Raw bytes that are decoded at once, at least a chunk: of chunks that are all zero a range may hold any number.
const BATCH_LEN: u64 = 8 << 20;

/// How much is read ahead.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ahead {
    /// Ranges that are fetched at once.
    pub(super) ranges: usize,
    /// Most bytes of each.
    pub(super) range_len: u64,
    /// Batches that are decoded at once.
    pub(super) batches: usize,
}

/// Why not all of the bytes were written.
#[derive(Debug, thiserror::Error)]
pub(super) enum InOrderError {
    #[error("the image cannot be read")]
    Load(#[from] LoadFailed),
    #[error("what was read cannot be written")]
    Write(#[from] std::io::Error),
}

impl From<PipelineError> for InOrderError {
    fn from(error: PipelineError) -> Self {
        Self::Load(error.into())
    }
}

/// Frames that follow each other, as they came from the store.
struct Batch {
    frames: Vec<FrameEntry>,
    stored: Bytes,
}

/// Writes these raw bytes of an object out.
pub(super) fn write_in_order(
    session: &Session,
    store: &dyn Store,
    stored: Stored<'_>,
    raw: Range<u64>,
    ahead: Ahead,
    out: &mut dyn Write,
) -> Result<(), InOrderError> {
    let Stored {
        extent,
        table,
        etag,
    } = stored;
    let key = &Key::of_job(&session.config.job, &extent.object.key).map_err(LoadFailed::from)?;
    let name: &Arc<str> = &Arc::from(key.to_string());
    let at = |frame: u64| usize::try_from(frame).unwrap_or(usize::MAX);
    let first = at(raw.start / extent.chunk_len);
    let last = at(raw.end.div_ceil(extent.chunk_len));
    let start: u64 = table.stored[..first].iter().copied().map(u64::from).sum();
    let chunks_per_batch = at((BATCH_LEN / extent.chunk_len).max(1));

    let groups = fetch_groups(&table.stored[first..last], ahead.range_len);
    let fetch = |group: FetchGroup| async move {
        let bytes = start + group.bytes.start..start + group.bytes.end;
        let fetched = fetch(store, key, bytes.clone(), etag).await?;
        let frames = first + group.frames.start..first + group.frames.end;
        let frames: Vec<FrameEntry> = table.entries_from(frames, bytes.start).collect();
        let batches: Vec<_> = frames
            .chunks(chunks_per_batch)
            .map(|frames| Batch {
                stored: fetched.slice(place_in(frames, bytes.start)),
                frames: frames.to_vec(),
            })
            .map(Ok)
            .collect();
        Ok::<_, InOrderError>(stream::iter(batches))
    };
    let decode = |batch: Batch| async move {
        let frames = batch.frames.clone();
        match decode(batch, Arc::clone(name)).await {
            Err(InOrderError::Load(LoadFailed::Pipeline(PipelineError::Frame { .. }))) => {
                // A bit may flip on the way, too.
                let stored = fetch_again(store, key, &frames, etag).await?;
                decode(Batch { frames, stored }, Arc::clone(name)).await
            }
            decoded => decoded,
        }
    };
    let decoded = stream::iter(groups)
        .map(fetch)
        .buffered(ahead.ranges)
        .try_flatten()
        .map_ok(decode)
        .try_buffered(ahead.batches);
    let stop = CancellationToken::new();
    let (decoded_out, decoded_in) = bounded(ahead.batches);
    // Fetching goes on while the writer is waited for, which it would not on this thread.
    std::thread::scope(|scope| {
        let (span, stopped) = (tracing::Span::current(), stop.clone());
        let fetching = std::thread::Builder::new().name("read ahead".to_owned());
        let started = fetching.spawn_scoped(scope, move || {
            let _named = span.entered();
            let mut decoded = Box::pin(decoded);
            while let Some(Some(next)) = session.wait(stopped.run_until_cancelled(decoded.next())) {
                let is_the_end = next.is_err();
                if decoded_out.send(next).is_err() || is_the_end {
                    return;
                }
            }
        });
        started?;
        let written = write_all(decoded_in, extent, raw, out);
        stop.cancel();
        written
    })
}

/// Writes what comes, from the start of the chunk with the first of these bytes on: these bytes alone.
fn write_all(
    decoded: Receiver<Result<Vec<u8>, InOrderError>>,
    extent: &ExtentRecord,
    raw: Range<u64>,
    out: &mut dyn Write,
) -> Result<(), InOrderError> {
    let at = |len: u64| usize::try_from(len).unwrap_or(usize::MAX);
    let mut position = raw.start / extent.chunk_len * extent.chunk_len;
    for next in decoded {
        let bytes = next?;
        let end = position + bytes.len() as u64;
        let cut = |edge: u64| at(edge.clamp(position, end) - position);
        out.write_all(&bytes[cut(raw.start)..cut(raw.end)])?;
        position = end;
    }
    out.flush()?;
    Ok(())
}

/// Where these frames are in a range of the object that starts at `start`.
fn place_in(frames: &[FrameEntry], start: u64) -> Range<usize> {
    let at = |offset: u64| usize::try_from(offset - start).unwrap_or(usize::MAX);
    match (frames.first(), frames.last()) {
        (Some(first), Some(last)) => at(first.bytes().start)..at(last.bytes().end),
        _ => 0..0,
    }
}

async fn fetch(
    store: &dyn Store,
    key: &Key,
    range: Range<u64>,
    etag: Option<&str>,
) -> Result<Bytes, PipelineError> {
    let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap_or(usize::MAX)];
    store.get_range(key, range, etag, &mut bytes).await?;
    Ok(Bytes::from(bytes))
}

async fn fetch_again(
    store: &dyn Store,
    key: &Key,
    frames: &[FrameEntry],
    etag: Option<&str>,
) -> Result<Bytes, PipelineError> {
    tracing::warn!("a chunk of {key} was read with damage, reading again");
    match (frames.first(), frames.last()) {
        (Some(first), Some(last)) => {
            fetch(store, key, first.bytes().start..last.bytes().end, etag).await
        }
        _ => Ok(Bytes::new()),
    }
}

/// Decodes a batch, on a thread that may be kept.
async fn decode(batch: Batch, key: Arc<str>) -> Result<Vec<u8>, InOrderError> {
    let decoding = tokio::task::spawn_blocking(move || {
        let mut decoder = Decoder::new()?;
        let len: usize = batch
            .frames
            .iter()
            .map(|frame| frame.raw_len as usize)
            .sum();
        let mut raw = vec![0; len];
        let (mut stored, mut left) = (&batch.stored[..], &mut raw[..]);
        for frame in &batch.frames {
            let (bytes, behind) = stored.split_at(frame.stored_len as usize);
            let (chunk, rest) = left.split_at_mut(frame.raw_len as usize);
            let decoded = decoder.decode(bytes, frame.filter, frame.digest, chunk);
            decoded.map_err(|source| PipelineError::Frame {
                key: key.to_string(),
                chunk: frame.index,
                source,
            })?;
            (stored, left) = (behind, rest);
        }
        Ok::<_, LoadFailed>(raw)
    });
    match decoding.await {
        Ok(decoded) => Ok(decoded?),
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
