//! Frames ↔ parts: a GPU's frames, in chunk order, become the byte stream of one object, cut into equal parts.
//!
//! In: frames in any order, each in a buffer of its own. Out: full parts, numbered from 1; the last one short, the seek table at its end. A frame may straddle parts. What can fail: a closed pool
//! of pack buffers.
//!
//! A part is a list of slices, and a long frame is in it as it stands: its buffer is *lent* to the part. Short frames (under a quarter of a chunk: their buffers would hold mostly nothing), and those that
//! find no loan free, are copied into pack buffers, and their own buffer is free at once. A frame's checksum comes with it and is combined; of one that straddles parts, the shorter portion is summed again, and the other's follows.
//!
//! # Why nothing waits for ever
//!
//! However long the store holds parts, and whatever the lanes' frames look like, every wait is for something that comes:
//!
//! - **A chunk buffer** (copy threads). Loans leave two of each ring, and beside them as many as a source of bytes keeps for itself. The two are under a copy, or in the channel, or with a compressor, or hold a raw frame that came too early. None of
//!   these waits for the ring.
//! - **A frame buffer** (compressors, one each, *before* they take a chunk). Loans leave one more than there are compressors. Those are with compressors or hold a frame that came too early. Such a frame waits for an
//!   older chunk of its lane, and because a lane's chunks are handed out in order, a compressor has that one, with a frame buffer: it never waits for one.
//! - **A pack buffer** (the compressor that packs a lane's oldest frame). There are enough for one part per lane and one part more. A lane's open part holds at most one part's worth, so with
//!   all lanes waiting in mid-part, at least the one part's worth is in parts that were sent, and the store gives it back. Hence a frame that finds no loan must not wait for one: its own
//!   lane's open part may hold them all.
//! - **The lane's packer** (nobody). One compressor packs at a time; the others leave their frames in its inbox and go on. A frame that lies there counts as one that came too early, and the
//!   compressor that packs waits for a pack buffer at most.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc::UnboundedSender;

use super::PipelineError;
use super::lend::Lender;
use super::part::{Cut, OpenPart, Sum};
use super::save::SaveResources;
use crate::codec::frame::raw_pieces;
use crate::codec::{Crc64, Digest, Filter, FrameKind};
use crate::driver::{BufferPool, PoolBuf};
use crate::manifest::FrameTable;
use crate::store::PartNumber;

/// A chunk as a frame, not in its place yet.
#[derive(Debug)]
pub(super) struct PackedFrame {
    pub(super) bytes: FrameBytes,
    /// CRC64NVME of the frame.
    pub(super) crc64: Crc64,
    /// What the frame table will say.
    pub(super) record: FrameRecord,
}

/// Where a frame's bytes are.
#[derive(Debug)]
pub(super) enum FrameBytes {
    /// At the start of a frame buffer.
    Written(PoolBuf),
    /// The raw frame of the chunk at the start of a chunk buffer, with this content checksum if any.
    Raw {
        chunk: PoolBuf,
        checksum: Option<u32>,
    },
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
    /// What was done to the chunk's bytes first.
    pub(super) filter: Filter,
    /// Digest of the raw bytes.
    pub(super) digest: Digest,
}

/// A part that is ready to go.
#[derive(Debug)]
pub(super) struct PartJob {
    pub(super) lane: usize,
    pub(super) number: PartNumber,
    pub(super) part: OpenPart,
}

/// Where a packer's bytes come to lie, and how they are cut.
#[derive(Debug, Clone)]
pub(super) struct Packing {
    /// Bytes of every part but the last.
    pub(super) part_len: usize,
    /// Frames from this length on are lent.
    pub(super) lend_from: usize,
    /// Lends frame buffers.
    pub(super) frames: Lender,
    /// Lends chunk buffers of the lane.
    pub(super) ring: Lender,
    /// What is not lent is copied into these.
    pub(super) pack_buffers: BufferPool,
}

/// Frames of at least this share of a chunk, one over so much, are lent. Shorter ones would hold a whole frame buffer for little, and are quick to copy.
const LEND_FROM_SHARE: usize = 4;

/// Chunk buffers of a lane that are never lent: one is copied into while the other is compressed.
const CHUNKS_KEPT: usize = 2;

impl Packing {
    /// The packing of a lane, whose source keeps up to `held` chunk buffers for itself; all lanes share the frame buffers that `frames` lends.
    pub(super) fn of(
        resources: &SaveResources,
        frames: &Lender,
        ring: &BufferPool,
        held: usize,
    ) -> Self {
        let chunk_len = usize::try_from(resources.chunk_len).unwrap_or(usize::MAX);
        Self {
            part_len: resources.part_len,
            lend_from: chunk_len / LEND_FROM_SHARE,
            frames: frames.clone(),
            ring: Lender::new(ring, CHUNKS_KEPT + held),
            pack_buffers: resources.pack_buffers.clone(),
        }
    }
}

/// A lane's packer, and the frames that came while somebody packed.
#[derive(Debug)]
pub(super) struct SharedPacker {
    inbox: Mutex<Vec<(u64, PackedFrame)>>,
    packer: Mutex<Packer>,
}

impl SharedPacker {
    /// Lets many threads have it.
    pub(super) fn new(packer: Packer) -> Self {
        Self {
            inbox: Mutex::default(),
            packer: Mutex::new(packer),
        }
    }

    /// Takes a frame, and packs every frame whose turn it is, unless another thread is at it, which then does it. Returns how long it waited for pack buffers.
    pub(super) fn push(&self, index: u64, frame: PackedFrame) -> Result<Duration, PipelineError> {
        self.inbox().push((index, frame));
        self.pack_inbox()
    }

    fn inbox(&self) -> MutexGuard<'_, Vec<(u64, PackedFrame)>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Packs what lies in the inbox, unless somebody else is at it.
    fn pack_inbox(&self) -> Result<Duration, PipelineError> {
        let mut blocked = Duration::ZERO;
        // Who packs looks into the inbox once more when it has let the packer go: a frame that came in between is not left there.
        while !self.inbox().is_empty() {
            let mut packer = match self.packer.try_lock() {
                Ok(packer) => packer,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => break,
            };
            let frames = std::mem::take(&mut *self.inbox());
            for (index, frame) in frames {
                blocked += packer.push(index, frame)?;
            }
        }
        Ok(blocked)
    }

    /// The lane has so many raw bytes, which was not known before. Waits for whoever packs.
    pub(super) fn ends_at(&self, raw_len: u64) -> Result<(), PipelineError> {
        let packer = self.packer.lock();
        let ended = packer
            .unwrap_or_else(PoisonError::into_inner)
            .ends_at(raw_len);
        ended?;
        // What came meanwhile was left to us.
        self.pack_inbox()?;
        Ok(())
    }

    /// The object, once every frame was packed; `None` before.
    pub(super) fn finish(self) -> Option<PackedObject> {
        let packer = self.packer.into_inner();
        packer.unwrap_or_else(PoisonError::into_inner).finish()
    }
}

/// One object in the making.
#[derive(Debug)]
pub(super) struct Packer {
    lane: usize,
    packing: Packing,
    waiting: BTreeMap<u64, PackedFrame>,
    table: FrameTable,
    open: Option<OpenPart>,
    parts_sent: u64,
    object_len: u64,
    out: UnboundedSender<PartJob>,
    blocked: Duration,
}

/// What a packed object turned out to be.
#[derive(Debug)]
pub(super) struct PackedObject {
    pub(super) len: u64,
    pub(super) table: FrameTable,
}

/// How bytes come into a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Lent,
    Copied,
}

/// Bytes of one frame that are not in a part yet.
#[derive(Debug)]
struct Rest {
    len: usize,
    sum: Sum,
}

impl Packer {
    /// A packer for the object of an extent, whose `table` is still empty.
    pub(super) fn new(
        lane: usize,
        table: FrameTable,
        packing: Packing,
        out: UnboundedSender<PartJob>,
    ) -> Self {
        Self {
            lane,
            packing,
            waiting: BTreeMap::new(),
            table,
            open: None,
            parts_sent: 0,
            object_len: 0,
            out,
            blocked: Duration::ZERO,
        }
    }

    /// Takes a frame, and packs every frame whose turn it is. Returns how long it waited for pack buffers.
    pub(super) fn push(
        &mut self,
        index: u64,
        frame: PackedFrame,
    ) -> Result<Duration, PipelineError> {
        self.blocked = Duration::ZERO;
        self.waiting.insert(index, frame);
        while let Some(frame) = self.waiting.remove(&(self.table.frame_count() as u64)) {
            let record = frame.record;
            self.table
                .push(record.stored_len, record.kind, record.filter, record.digest);
            self.pack(frame)?;
        }
        self.end_if_complete()?;
        Ok(self.blocked)
    }

    /// See [`SharedPacker::ends_at`].
    fn ends_at(&mut self, raw_len: u64) -> Result<(), PipelineError> {
        self.table.ends_at(raw_len);
        self.end_if_complete()
    }

    /// Behind the last frame comes the seek table, and the last part goes.
    fn end_if_complete(&mut self) -> Result<(), PipelineError> {
        if self.table.is_complete() {
            let seek_table = Bytes::from(self.table.seek_table());
            let whole = Rest {
                len: seek_table.len(),
                sum: Sum::Known(Crc64::of(&seek_table)),
            };
            self.append([seek_table], Way::Copied, whole, 0)?;
            self.send_open_part()?;
        }
        Ok(())
    }

    /// See [`SharedPacker::finish`].
    fn finish(self) -> Option<PackedObject> {
        let whole = self.table.is_complete() && self.open.is_none();
        whole.then_some(PackedObject {
            len: self.object_len,
            table: self.table,
        })
    }

    fn pack(&mut self, frame: PackedFrame) -> Result<(), PipelineError> {
        let PackedFrame {
            bytes,
            crc64,
            record,
        } = frame;
        let whole = Rest {
            len: record.stored_len as usize,
            sum: Sum::Known(crc64),
        };
        let raw_len = u64::from(record.raw_len);
        match bytes {
            FrameBytes::Written(buffer) => {
                let (frame, way) = self.hand_over(&self.packing.frames, buffer, whole.len);
                self.append([frame], way, whole, raw_len)
            }
            FrameBytes::Raw { chunk, checksum } => {
                let len = record.raw_len as usize;
                let (chunk, way) = self.hand_over(&self.packing.ring, chunk, len);
                self.append(raw_pieces(chunk, checksum), way, whole, raw_len)
            }
        }
    }

    /// The first `len` bytes of a buffer, and whether a part may keep them.
    fn hand_over(&self, lender: &Lender, buffer: PoolBuf, len: usize) -> (Bytes, Way) {
        let lent = match len >= self.packing.lend_from {
            true => lender.lend(buffer, len),
            false => Err(buffer),
        };
        match lent {
            Ok(bytes) => (bytes, Way::Lent),
            Err(buffer) => (Bytes::from_owner(buffer).slice(..len), Way::Copied),
        }
    }

    /// Appends pieces that are one frame together.
    fn append(
        &mut self,
        pieces: impl IntoIterator<Item = Bytes>,
        way: Way,
        mut rest: Rest,
        raw_len: u64,
    ) -> Result<(), PipelineError> {
        let mut pieces: VecDeque<Bytes> = pieces.into_iter().collect();
        while rest.len > 0 {
            let filled = self.open.get_or_insert_with(OpenPart::new).len;
            let here = take(&mut pieces, rest.len.min(self.packing.part_len - filled));
            let (len, sum);
            (len, sum, rest) = rest.split(&here, &pieces, way);
            for piece in here {
                match (way, &mut self.open) {
                    (Way::Lent, Some(part)) => part.lend(piece),
                    _ => self.copy(&piece)?,
                }
            }
            self.close(len, sum, rest.len, raw_len)?;
        }
        Ok(())
    }

    /// The open part has all of the frame that it takes: `len` bytes; `left_len` are left of it.
    fn close(
        &mut self,
        len: usize,
        sum: Sum,
        left_len: usize,
        raw_len: u64,
    ) -> Result<(), PipelineError> {
        let Some(part) = &mut self.open else {
            return Ok(());
        };
        part.sum(sum, len);
        if left_len == 0 {
            part.raw_len += raw_len;
        }
        if part.len == self.packing.part_len {
            self.send_open_part()?;
        }
        Ok(())
    }

    /// Copies into the open part, which has room for all of it.
    fn copy(&mut self, mut bytes: &[u8]) -> Result<(), PipelineError> {
        let part = self.open.get_or_insert_with(OpenPart::new);
        loop {
            bytes = &bytes[part.copy(bytes)..];
            if bytes.is_empty() {
                return Ok(());
            }
            let (buffer, waited) = self
                .packing
                .pack_buffers
                .acquire()
                .map_err(|_closed| PipelineError::Cancelled)?;
            self.blocked += waited;
            part.add_buffer(buffer);
        }
    }

    fn send_open_part(&mut self) -> Result<(), PipelineError> {
        let Some(part) = self.open.take() else {
            return Ok(());
        };
        self.parts_sent += 1;
        let number = PartNumber::new(self.parts_sent).ok_or(PipelineError::TooManyParts {
            part_len: self.packing.part_len,
        })?;
        self.object_len += part.len as u64;
        let job = PartJob {
            lane: self.lane,
            number,
            part,
        };
        self.out
            .send(job)
            .map_err(|_closed| PipelineError::Cancelled)
    }
}

impl Rest {
    /// The bytes of `here` are taken off its start; `behind` is what is left then. Length and checksum of what was taken, and the new rest.
    fn split(self, here: &[Bytes], behind: &VecDeque<Bytes>, way: Way) -> (usize, Sum, Rest) {
        let len = here.iter().map(Bytes::len).sum();
        let left_len = self.len - len;
        if left_len == 0 {
            let nothing = Rest {
                len: 0,
                sum: Sum::Known(Crc64::EMPTY),
            };
            return (len, self.sum, nothing);
        }
        let cut = Arc::new(Cut::new(self.sum, here, behind, left_len));
        let (mut before, mut behind) = (Sum::Before(Arc::clone(&cut)), Sum::Behind(cut));
        if way == Way::Copied {
            // The buffer that it is copied from is free at once, and few that are copied are long.
            (before, behind) = (Sum::Known(before.value()), Sum::Known(behind.value()));
        }
        let left = Rest {
            len: left_len,
            sum: behind,
        };
        (len, before, left)
    }
}

/// Takes the first `len` bytes, or all there are.
fn take(pieces: &mut VecDeque<Bytes>, mut len: usize) -> Vec<Bytes> {
    let mut taken = Vec::new();
    while len > 0
        && let Some(piece) = pieces.front_mut()
    {
        let first = piece.split_to(len.min(piece.len()));
        len -= first.len();
        taken.push(first);
        if piece.is_empty() {
            pieces.pop_front();
        }
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::PartBody;
    use tokio::sync::mpsc::unbounded_channel;

    /// Parts of `part_len`; frames from 20 bytes on are lent, `loans` at once.
    fn packing(part_len: usize, loans: usize) -> (Packing, BufferPool) {
        let frame_buffers = BufferPool::new(16, 64, None).unwrap();
        let packing = Packing {
            part_len,
            lend_from: 20,
            frames: Lender::new(&frame_buffers, 16 - loans),
            ring: Lender::new(&frame_buffers, 16 - loans),
            pack_buffers: BufferPool::new(100, 7, None).unwrap(),
        };
        (packing, frame_buffers)
    }

    fn packed(bytes: &[u8], mut buffer: PoolBuf) -> PackedFrame {
        buffer[..bytes.len()].copy_from_slice(bytes);
        PackedFrame {
            bytes: FrameBytes::Written(buffer),
            crc64: Crc64::of(bytes),
            record: FrameRecord {
                stored_len: u32::try_from(bytes.len()).unwrap(),
                raw_len: 100,
                kind: FrameKind::Raw,
                filter: Filter::None,
                digest: Digest::of(bytes),
            },
        }
    }

    /// Packs `frames` in the given order with parts of `part_len`, and returns the parts and the object.
    fn pack(
        frames: &[Vec<u8>],
        order: &[usize],
        part_len: usize,
        loans: usize,
    ) -> (Vec<PartBody>, PackedObject) {
        let (out, mut parts) = unbounded_channel();
        let (packing, frame_buffers) = packing(part_len, loans);
        let table = FrameTable::new(100 * frames.len() as u64, 100);
        let mut packer = Packer::new(0, table, packing, out);
        for &index in order {
            let frame = packed(&frames[index], frame_buffers.acquire().unwrap().0);
            packer.push(index as u64, frame).unwrap();
        }
        let object = packer.finish().expect("every frame was pushed");
        let mut sent = Vec::new();
        while let Ok(job) = parts.try_recv() {
            assert_eq!(u64::from(job.number.get()), sent.len() as u64 + 1);
            let body = job.part.into_body();
            let bytes: Vec<u8> = body.pieces.concat();
            assert_eq!(body.crc64, Crc64::of(&bytes).value());
            sent.push(body);
        }
        (sent, object)
    }

    #[test]
    fn any_order_of_frames_gives_the_same_object_in_equal_parts() {
        let frames: Vec<Vec<u8>> = (0..9_u8)
            .map(|index| vec![index; 5 + 6 * usize::from(index)])
            .collect();
        let joined = |parts: Vec<PartBody>| parts.iter().map(|part| part.pieces.concat()).collect();
        for (part_len, loans) in [(32, 16), (32, 2), (32, 0), (11, 16), (11, 3)] {
            let (parts, object) = pack(&frames, &[0, 1, 2, 3, 4, 5, 6, 7, 8], part_len, loans);
            let in_order: Vec<Vec<u8>> = joined(parts);
            let (parts, other) = pack(&frames, &[8, 1, 0, 3, 2, 7, 6, 5, 4], part_len, loans);
            let mixed: Vec<Vec<u8>> = joined(parts);
            assert_eq!(in_order, mixed);
            assert_eq!(object.len, other.len);
            let (last, full) = in_order.split_last().unwrap();
            assert!(full.iter().all(|part| part.len() == part_len));
            assert!(last.len() <= part_len && !last.is_empty());
            let bytes = in_order.concat();
            assert_eq!(object.len, bytes.len() as u64);
            let content = frames.concat();
            assert_eq!(bytes[..content.len()], content[..]);
            assert_eq!(bytes[content.len()..], object.table.seek_table()[..]);
            let digests = object.table.digests.iter().zip(&frames);
            assert!(
                digests
                    .into_iter()
                    .all(|(digest, frame)| *digest == Digest::of(frame))
            );
        }
    }

    #[test]
    fn no_frame_is_left_behind_when_two_threads_push_at_once() {
        let (packing, frame_buffers) = packing(32, 2);
        for round in 0..5000 {
            let (out, mut parts) = unbounded_channel();
            let packer = Packer::new(0, FrameTable::new(200, 100), packing.clone(), out);
            let shared = SharedPacker::new(packer);
            let start = std::sync::Barrier::new(2);
            std::thread::scope(|scope| {
                for index in 0..2_u8 {
                    let (shared, start) = (&shared, &start);
                    let frame = packed(&[index; 9], frame_buffers.acquire().unwrap().0);
                    scope.spawn(move || {
                        start.wait();
                        shared.push(index.into(), frame).unwrap();
                    });
                }
            });
            let object = shared.finish().unwrap_or_else(|| panic!("round {round}"));
            let mut bytes = Vec::new();
            while let Ok(job) = parts.try_recv() {
                bytes.extend(job.part.into_body().pieces.concat());
            }
            assert_eq!(bytes[..18], [[0; 9], [1; 9]].concat());
            assert_eq!(object.len, bytes.len() as u64);
        }
    }

    #[test]
    fn long_frames_are_lent_and_short_ones_give_their_buffer_back_at_once() {
        let (out, mut parts) = unbounded_channel();
        let (packing, frame_buffers) = packing(1000, 1);
        let pack_buffers = packing.pack_buffers.clone();
        let mut packer = Packer::new(0, FrameTable::new(400, 100), packing, out);
        let mut push = |index, len| {
            let frame = packed(&vec![1; len], frame_buffers.acquire().unwrap().0);
            packer.push(index, frame).unwrap();
            16 - frame_buffers.free_count()
        };
        assert_eq!(push(0, 19), 0, "short");
        assert_eq!(push(1, 20), 1, "long");
        assert_eq!(push(2, 20), 1, "long, and no loan is free");
        assert_eq!(push(3, 5), 1);
        assert!(packer.finish().is_some());
        drop(parts.try_recv().unwrap());
        assert_eq!(
            (frame_buffers.free_count(), pack_buffers.free_count()),
            (16, 100)
        );
    }

    #[test]
    fn a_raw_frame_is_its_chunk_lent_or_copied() {
        let chunk: Vec<u8> = (0..60).collect();
        for (loans, checksum) in [(1, None), (0, None), (1, Some(7)), (0, Some(7))] {
            let frame = raw_pieces(Bytes::from(chunk.clone()), checksum).collect::<Vec<_>>();
            let frame = frame.concat();
            let (out, mut parts) = unbounded_channel();
            let (packing, ring) = packing(50, loans);
            let mut packer = Packer::new(0, FrameTable::new(60, 60), packing, out);
            let mut packed = packed(&chunk, ring.acquire().unwrap().0);
            if let FrameBytes::Written(chunk) = packed.bytes {
                packed.bytes = FrameBytes::Raw { chunk, checksum };
            }
            packed.crc64 = Crc64::of(&frame);
            packed.record.raw_len = 60;
            packed.record.stored_len = u32::try_from(frame.len()).unwrap();
            packer.push(0, packed).unwrap();
            assert_eq!(ring.free_count(), 16 - loans);
            let object = packer.finish().unwrap();
            let mut bytes = Vec::new();
            while let Ok(job) = parts.try_recv() {
                let body = job.part.into_body();
                let part = body.pieces.concat();
                assert_eq!(body.crc64, Crc64::of(&part).value());
                bytes.extend(part);
            }
            assert_eq!(bytes[..frame.len()], frame[..]);
            assert_eq!(object.len, bytes.len() as u64);
            assert_eq!(ring.free_count(), 16, "every loan ends");
        }
    }

    #[test]
    fn an_object_of_too_many_parts_is_refused_with_their_length() {
        let (out, _parts) = unbounded_channel();
        // A part of one byte; the receiver keeps them all.
        let (mut packing, _frames) = packing(1, 1);
        let frames = BufferPool::new(1, 10_001, None).unwrap();
        packing.frames = Lender::new(&frames, 0);
        let mut packer = Packer::new(0, FrameTable::new(4, 4), packing, out);
        let frame = packed(&vec![1; 10_001], frames.acquire().unwrap().0);
        let refused = packer.push(0, frame);
        assert!(matches!(
            refused,
            Err(PipelineError::TooManyParts { part_len: 1 })
        ));
    }

    #[test]
    fn an_object_is_not_finished_while_a_frame_is_missing() {
        let (out, _parts) = unbounded_channel();
        let (packing, frames) = packing(64, 2);
        let mut packer = Packer::new(0, FrameTable::new(8, 4), packing, out);
        let frame = packed(b"four", frames.acquire().unwrap().0);
        packer.push(1, frame).unwrap();
        assert!(packer.finish().is_none());
    }
}
