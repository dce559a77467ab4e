//! A part in the making: slices of lent buffers, and copies in pack buffers, in order.
//!
//! In: lent bytes; bytes to copy, and the pack buffers for them; the checksums of the frames. Out: a [`PartBody`], a list of slices that is never joined, with the checksum of all of it. Nothing can fail.
//!
//! Frames come with their checksums, which are combined. One that the end of a part cuts in two ([`Cut`]) has its shorter piece summed again, and that not before the part is to go: by then nobody waits for it
//! behind a lock.

use std::mem;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use bytes::Bytes;

use crate::codec::Crc64;
use crate::codec::checksum::Summing;
use crate::driver::PoolBuf;
use crate::store::PartBody;

/// See the module.
#[derive(Debug)]
pub(super) struct OpenPart {
    pieces: Vec<Piece>,
    /// Pack buffers: all full but the last.
    buffers: Vec<PoolBuf>,
    /// Bytes in the last of them.
    last_len: usize,
    /// Bytes of the part so far.
    pub(super) len: usize,
    /// Of the bytes so far, and how many each stands for.
    sums: Vec<(Sum, u64)>,
    /// Raw bytes of the frames that end in this part.
    pub(super) raw_len: u64,
}

/// The checksum of a frame, or of what a part has of it.
#[derive(Debug, Clone)]
pub(super) enum Sum {
    Known(Crc64),
    /// Of what stands before the cut.
    Before(Arc<Cut>),
    /// Of what stands behind it.
    Behind(Arc<Cut>),
}

/// Bytes with a known checksum, cut in two.
#[derive(Debug)]
pub(super) struct Cut {
    whole: Sum,
    behind_len: u64,
    shorter: Side,
    /// Of the shorter side; empty once they are summed, so that they keep no buffer longer than the parts do.
    bytes: Mutex<Vec<Bytes>>,
    /// Before, and behind.
    sums: OnceLock<(Crc64, Crc64)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Before,
    Behind,
}

impl Cut {
    /// Cuts bytes with the checksum `whole` into these; `behind_len` is the length of the second ones.
    pub(super) fn new<'a>(
        whole: Sum,
        before: &[Bytes],
        behind: impl IntoIterator<Item = &'a Bytes>,
        behind_len: usize,
    ) -> Self {
        let before_len: usize = before.iter().map(Bytes::len).sum();
        let (shorter, bytes) = match before_len <= behind_len {
            true => (Side::Before, before.to_vec()),
            false => (Side::Behind, behind.into_iter().cloned().collect()),
        };
        Self {
            whole,
            behind_len: behind_len as u64,
            shorter,
            bytes: Mutex::new(bytes),
            sums: OnceLock::new(),
        }
    }

    /// Sums the shorter side at the first call.
    fn sums(&self) -> (Crc64, Crc64) {
        *self.sums.get_or_init(|| {
            let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
            let mut sum = Summing::new();
            for piece in mem::take(&mut *bytes) {
                sum.update(&piece);
            }
            let (shorter, whole) = (sum.finish(), self.whole.value());
            match self.shorter {
                Side::Before => (shorter, whole.without_start(shorter, self.behind_len)),
                Side::Behind => (whole.without_end(shorter, self.behind_len), shorter),
            }
        })
    }
}

impl Sum {
    /// The checksum; that of a cut frame is made now, unless it was before.
    pub(super) fn value(&self) -> Crc64 {
        match self {
            Sum::Known(crc64) => *crc64,
            Sum::Before(cut) => cut.sums().0,
            Sum::Behind(cut) => cut.sums().1,
        }
    }
}

#[derive(Debug)]
enum Piece {
    Lent(Bytes),
    Copied { buffer: usize, range: Range<usize> },
}

impl OpenPart {
    /// An empty part.
    pub(super) fn new() -> Self {
        Self {
            pieces: Vec::new(),
            buffers: Vec::new(),
            last_len: 0,
            len: 0,
            sums: Vec::new(),
            raw_len: 0,
        }
    }

    /// `len` bytes that were added have this checksum.
    pub(super) fn sum(&mut self, sum: Sum, len: usize) {
        self.sums.push((sum, len as u64));
    }

    /// Adds bytes as they stand.
    pub(super) fn lend(&mut self, bytes: Bytes) {
        self.len += bytes.len();
        self.pieces.push(Piece::Lent(bytes));
    }

    /// Adds a copy of as many of these bytes as the pack buffers have room for, and says how many: 0 when another one is needed ([`OpenPart::add_buffer`]).
    pub(super) fn copy(&mut self, bytes: &[u8]) -> usize {
        let Some(last) = self.buffers.last_mut() else {
            return 0;
        };
        let start = self.last_len;
        let len = bytes.len().min(last.len() - start);
        let end = start + len;
        last[start..end].copy_from_slice(&bytes[..len]);
        self.last_len = end;
        self.len += len;
        let index = self.buffers.len() - 1;
        match self.pieces.last_mut() {
            Some(Piece::Copied { buffer, range }) if *buffer == index => range.end = end,
            _ if len == 0 => {}
            _ => self.pieces.push(Piece::Copied {
                buffer: index,
                range: start..end,
            }),
        }
        len
    }

    /// Room for further copies.
    pub(super) fn add_buffer(&mut self, buffer: PoolBuf) {
        self.buffers.push(buffer);
        self.last_len = 0;
    }

    /// The part as it goes to the store. This may sum some of its bytes.
    pub(super) fn into_body(self) -> PartBody {
        let sums = self.sums.iter();
        let crc64 = sums.fold(Crc64::EMPTY, |crc64, (sum, len)| {
            crc64.combine(sum.value(), *len)
        });
        let buffers: Vec<Bytes> = self.buffers.into_iter().map(Bytes::from_owner).collect();
        let pieces = self.pieces.into_iter().map(|piece| match piece {
            Piece::Lent(bytes) => bytes,
            Piece::Copied { buffer, range } => buffers[buffer].slice(range),
        });
        PartBody::new(pieces.collect(), crc64.value())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::BufferPool;

    #[test]
    fn copies_around_a_loan_share_a_buffer_and_keep_their_order() {
        let pool = BufferPool::new(2, 8, None).unwrap();
        let mut part = OpenPart::new();
        assert_eq!(part.copy(b"abc"), 0);
        part.add_buffer(pool.acquire().unwrap().0);
        assert_eq!(part.copy(b"abc"), 3);
        assert_eq!(part.copy(b"de"), 2);
        part.lend(Bytes::from_static(b"LENT"));
        assert_eq!(part.copy(b"fghij"), 3);
        assert_eq!(part.copy(b"ij"), 0);
        part.add_buffer(pool.acquire().unwrap().0);
        assert_eq!(part.copy(b"ij"), 2);
        assert_eq!(part.len, 14);
        let body = part.into_body();
        assert_eq!(body.pieces.concat(), b"abcdeLENTfghij");
        assert_eq!(body.pieces.len(), 4);
        drop(body);
        assert_eq!(pool.free_count(), 2);
    }
}
