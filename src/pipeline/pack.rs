//! Frames ↔ parts: a GPU's frames, in chunk order, become the byte stream of one object, cut into equal parts.
//!
//! In: frames in any order, each in a buffer of its own. Out: full parts, numbered from 1, in buffers of their own; the last one short, the seek table at its end. A frame may
//! straddle two parts. What can fail: a closed pool of part buffers. A frame that came too early waits in its buffer; the one that everybody waits for always has one, because
//! chunks are handed out in order. The part's checksum is taken piece by piece, right after the piece was copied.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc::UnboundedSender;

use super::PipelineError;
use crate::codec::{Crc64, Digest, Filter, FrameKind};
use crate::driver::{BufferPool, PoolBuf};
use crate::manifest::FrameTable;
use crate::store::{PartBody, PartNumber};

/// A chunk as a frame, not in its place yet.
#[derive(Debug)]
pub(super) struct PackedFrame {
    /// Holds the frame at its start.
    pub(super) buffer: PoolBuf,
    /// What the frame table will say.
    pub(super) record: FrameRecord,
}

/// What the frame table will say about one frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FrameRecord {
    /// Length of the frame in bytes.
    pub(super) stored_len: u32,
    /// Length of the chunk in bytes.
    pub(super) raw_len: u32,
    /// How the frame was made.
    pub(super) kind: FrameKind,
    /// What was done to the chunk before compression.
    pub(super) filter: Filter,
    /// Digest of the raw bytes.
    pub(super) digest: Digest,
}

/// A part that is ready to go.
#[derive(Debug)]
pub(super) struct PartJob {
    pub(super) lane: usize,
    pub(super) number: PartNumber,
    pub(super) body: PartBody,
    /// Raw bytes of the frames that end in this part, for progress.
    pub(super) raw_len: u64,
}

/// One object in the making.
#[derive(Debug)]
pub(super) struct Packer {
    lane: usize,
    waiting: BTreeMap<u64, PackedFrame>,
    table: FrameTable,
    open: Option<OpenPart>,
    part_buffers: BufferPool,
    parts_sent: u64,
    object_len: u64,
    object_crc: Crc64,
    out: UnboundedSender<PartJob>,
    blocked: Duration,
}

/// What a packed object turned out to be.
#[derive(Debug)]
pub(super) struct PackedObject {
    pub(super) len: u64,
    pub(super) crc64: Crc64,
    pub(super) table: FrameTable,
}

#[derive(Debug)]
struct OpenPart {
    buffer: PoolBuf,
    len: usize,
    crc64: Crc64,
    raw_len: u64,
}

/// The filled start of a buffer, as bytes that give the buffer back when the last of them is gone.
struct Filled {
    buffer: PoolBuf,
    len: usize,
}

impl AsRef<[u8]> for Filled {
    fn as_ref(&self) -> &[u8] {
        &self.buffer[..self.len]
    }
}

impl Packer {
    /// A packer for the object of an extent, whose `table` is still empty.
    pub(super) fn new(
        lane: usize,
        table: FrameTable,
        part_buffers: BufferPool,
        out: UnboundedSender<PartJob>,
    ) -> Self {
        Self {
            lane,
            waiting: BTreeMap::new(),
            table,
            open: None,
            part_buffers,
            parts_sent: 0,
            object_len: 0,
            object_crc: Crc64::of(&[]),
            out,
            blocked: Duration::ZERO,
        }
    }

    /// Takes a frame, and packs every frame whose turn it is. Returns how long it waited for part buffers.
    pub(super) fn push(
        &mut self,
        index: u64,
        frame: PackedFrame,
    ) -> Result<Duration, PipelineError> {
        self.blocked = Duration::ZERO;
        self.waiting.insert(index, frame);
        while let Some(PackedFrame { buffer, record }) =
            self.waiting.remove(&(self.table.frame_count() as u64))
        {
            self.table
                .push(record.stored_len, record.kind, record.filter, record.digest);
            self.append(
                &buffer[..record.stored_len as usize],
                u64::from(record.raw_len),
            )?;
        }
        if self.table.is_complete() {
            self.append(&self.table.seek_table(), 0)?;
            self.send_open_part()?;
        }
        Ok(self.blocked)
    }

    /// The object, once every frame was packed; `None` before.
    pub(super) fn finish(self) -> Option<PackedObject> {
        let whole = self.table.is_complete() && self.open.is_none();
        whole.then_some(PackedObject {
            len: self.object_len,
            crc64: self.object_crc,
            table: self.table,
        })
    }

    fn append(&mut self, mut bytes: &[u8], raw_len: u64) -> Result<(), PipelineError> {
        while !bytes.is_empty() {
            let part = match &mut self.open {
                Some(part) => part,
                none => {
                    let (buffer, waited) = self
                        .part_buffers
                        .acquire()
                        .map_err(|_closed| PipelineError::Cancelled)?;
                    self.blocked += waited;
                    none.insert(OpenPart {
                        buffer,
                        len: 0,
                        crc64: Crc64::of(&[]),
                        raw_len: 0,
                    })
                }
            };
            let room = part.buffer.len() - part.len;
            let (piece, rest) = bytes.split_at(room.min(bytes.len()));
            let end = part.len + piece.len();
            part.buffer[part.len..end].copy_from_slice(piece);
            part.crc64 = part
                .crc64
                .combine(Crc64::of(&part.buffer[part.len..end]), piece.len() as u64);
            part.len = end;
            bytes = rest;
            if bytes.is_empty() {
                part.raw_len += raw_len;
            }
            if part.len == part.buffer.len() {
                self.send_open_part()?;
            }
        }
        Ok(())
    }

    fn send_open_part(&mut self) -> Result<(), PipelineError> {
        let Some(part) = self.open.take() else {
            return Ok(());
        };
        self.parts_sent += 1;
        let number = PartNumber::new(self.parts_sent).ok_or(PipelineError::TooManyParts {
            part_len: part.buffer.len(),
        })?;
        self.object_len += part.len as u64;
        self.object_crc = self.object_crc.combine(part.crc64, part.len as u64);
        let crc64 = part.crc64.value();
        let bytes = Bytes::from_owner(Filled {
            buffer: part.buffer,
            len: part.len,
        });
        let job = PartJob {
            lane: self.lane,
            number,
            body: PartBody::new(vec![bytes], crc64),
            raw_len: part.raw_len,
        };
        self.out
            .send(job)
            .map_err(|_closed| PipelineError::Cancelled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::mpsc::unbounded_channel;

    /// Packs `frames` in the given order with parts of `part_len`, and returns the parts' bytes and the object.
    fn pack(frames: &[Vec<u8>], order: &[usize], part_len: usize) -> (Vec<Vec<u8>>, PackedObject) {
        let (out, mut parts) = unbounded_channel();
        let frame_buffers = BufferPool::new(frames.len(), 64, None).unwrap();
        let part_buffers = BufferPool::new(64, part_len, None).unwrap();
        let table = FrameTable::new(100 * frames.len() as u64, 100);
        let mut packer = Packer::new(0, table, part_buffers, out);
        for &index in order {
            let (mut buffer, _) = frame_buffers.acquire().unwrap();
            buffer[..frames[index].len()].copy_from_slice(&frames[index]);
            let record = FrameRecord {
                stored_len: u32::try_from(frames[index].len()).unwrap(),
                raw_len: 100,
                kind: FrameKind::Raw,
                filter: Filter::None,
                digest: Digest::of(&frames[index]),
            };
            packer
                .push(index as u64, PackedFrame { buffer, record })
                .unwrap();
        }
        let object = packer.finish().expect("every frame was pushed");
        let mut sent = Vec::new();
        while let Ok(job) = parts.try_recv() {
            assert_eq!(u64::from(job.number.get()), sent.len() as u64 + 1);
            let bytes: Vec<u8> = job.body.pieces.concat();
            assert_eq!(job.body.crc64, Crc64::of(&bytes).value());
            sent.push(bytes);
        }
        (sent, object)
    }

    #[test]
    fn any_order_of_frames_gives_the_same_object_in_equal_parts() {
        let frames: Vec<Vec<u8>> = (0..9_u8)
            .map(|index| vec![index; 5 + 6 * usize::from(index)])
            .collect();
        let (in_order, object) = pack(&frames, &[0, 1, 2, 3, 4, 5, 6, 7, 8], 32);
        let (mixed, other) = pack(&frames, &[8, 1, 0, 3, 2, 7, 6, 5, 4], 32);
        assert_eq!(in_order, mixed);
        assert_eq!(object.crc64.value(), other.crc64.value());
        let (last, full) = in_order.split_last().unwrap();
        assert!(full.iter().all(|part| part.len() == 32) && last.len() <= 32 && !last.is_empty());
        let bytes = in_order.concat();
        assert_eq!(object.len, bytes.len() as u64);
        assert_eq!(object.crc64.value(), Crc64::of(&bytes).value());
        let content = frames.concat();
        assert_eq!(bytes[..content.len()], content[..]);
        assert_eq!(bytes[content.len()..], object.table.seek_table()[..]);
        assert!(
            object
                .table
                .digests
                .iter()
                .zip(&frames)
                .all(|(digest, frame)| *digest == Digest::of(frame))
        );
    }

    #[test]
    fn an_object_of_too_many_parts_is_refused_with_their_length() {
        let (out, _parts) = unbounded_channel();
        let frame = 10_001;
        let frames = BufferPool::new(1, frame, None).unwrap();
        // A part of one byte; the receiver keeps them all.
        let parts = BufferPool::new(frame, 1, None).unwrap();
        let mut packer = Packer::new(0, FrameTable::new(4, 4), parts, out);
        let (buffer, _) = frames.acquire().unwrap();
        let record = FrameRecord {
            stored_len: u32::try_from(frame).unwrap(),
            raw_len: 4,
            kind: FrameKind::Raw,
            filter: Filter::None,
            digest: Digest::of(b"four"),
        };
        let refused = packer.push(0, PackedFrame { buffer, record });
        assert!(matches!(
            refused,
            Err(PipelineError::TooManyParts { part_len: 1 })
        ));
    }

    #[test]
    fn an_object_is_not_finished_while_a_frame_is_missing() {
        let (out, _parts) = unbounded_channel();
        let pool = BufferPool::new(2, 64, None).unwrap();
        let mut packer = Packer::new(0, FrameTable::new(8, 4), pool.clone(), out);
        let (buffer, _) = pool.acquire().unwrap();
        let record = FrameRecord {
            stored_len: 4,
            raw_len: 4,
            kind: FrameKind::Raw,
            filter: Filter::None,
            digest: Digest::of(b"four"),
        };
        packer.push(1, PackedFrame { buffer, record }).unwrap();
        assert!(packer.finish().is_none());
    }
}
