//! A part in the making: slices of lent buffers, and copies in pack buffers, in order.
//!
//! In: lent bytes; bytes to copy, and the pack buffers for them. Out: a [`PartBody`], a list of slices that is never joined. Nothing can fail. The checksums come from who has them already: nothing is
//! summed here.

use std::ops::Range;

use bytes::Bytes;

use crate::codec::Crc64;
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
    crc64: Crc64,
    /// Raw bytes of the frames that end in this part.
    pub(super) raw_len: u64,
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
            crc64: Crc64::EMPTY,
            raw_len: 0,
        }
    }

    /// The checksum of everything up to here that was summed.
    pub(super) fn crc64(&self) -> Crc64 {
        self.crc64
    }

    /// `len` bytes that were added have this checksum.
    pub(super) fn sum(&mut self, crc64: Crc64, len: usize) {
        self.crc64 = self.crc64.combine(crc64, len as u64);
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

    /// The part as it goes to the store.
    pub(super) fn into_body(self) -> PartBody {
        let buffers: Vec<Bytes> = self.buffers.into_iter().map(Bytes::from_owner).collect();
        let pieces = self.pieces.into_iter().map(|piece| match piece {
            Piece::Lent(bytes) => bytes,
            Piece::Copied { buffer, range } => buffers[buffer].slice(range),
        });
        PartBody::new(pieces.collect(), self.crc64.value())
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
