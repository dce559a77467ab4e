//! A raw frame taken apart while it arrives: its blocks' content lands in one piece, where it may stay.
//!
//! In: the frame's bytes, in pieces as a connection brings them. Out: the chunk, in the caller's buffer, copied once, and its digest, taken a little at a time while the bytes are in the processor's
//! cache anyway. What can fail: a byte between the blocks that is not the one our encoder writes ([`RawFrame::finish`] says so); then the frame may be something else, and
//! [`Decoder`](super::Decoder) has to look at the whole of it. The content is not judged here: the caller compares the digest, which says more than the frame's own checksum.

use super::Digest;
use super::digest::Digesting;
use super::frame::{
    BLOCK_HEADER_LEN, BLOCK_LEN_MAX, HAND_HEADER_LEN, hand_header, raw_block_header, raw_frame_len,
};

/// How far one raw frame has come.
#[derive(Debug, Clone)]
pub struct RawFrame {
    raw_len: usize,
    has_checksum: bool,
    /// Bytes of the frame that were seen.
    seen: usize,
    is_ours: bool,
    digest: Digesting,
}

/// Bytes that are copied and then digested: less than a processor's first cache holds twice.
const AT_ONCE: usize = 8 << 10;

/// What comes next in a frame, and how many bytes of it at most.
enum Next {
    /// Bytes of a header that must be these.
    Header([u8; HAND_HEADER_LEN], std::ops::Range<usize>),
    /// Content of the chunk, from this place on.
    Content { start: usize, len: usize },
    /// The content checksum.
    Rest(usize),
}

impl RawFrame {
    /// A frame of `stored_len` bytes that is to hold a chunk of `raw_len` bytes, of which nothing was seen yet. `None` when no raw frame of that chunk has this length.
    pub fn new(raw_len: usize, stored_len: usize) -> Option<Self> {
        let has_checksum = stored_len == raw_frame_len(raw_len, true);
        (stored_len == raw_frame_len(raw_len, has_checksum)).then_some(Self {
            raw_len,
            has_checksum,
            seen: 0,
            is_ours: true,
            digest: Digesting::new(),
        })
    }

    /// Takes the next bytes of the frame, and puts what is content of them at its place in `out`.
    ///
    /// # Panics
    /// When `out` is shorter than the chunk.
    pub fn take(&mut self, mut bytes: &[u8], out: &mut [u8]) {
        while !bytes.is_empty() {
            let len = match self.next() {
                Next::Header(header, range) => {
                    let len = range.len().min(bytes.len());
                    self.is_ours &= bytes[..len] == header[range.start..range.start + len];
                    len
                }
                Next::Content { start, len } => {
                    let len = len.min(bytes.len()).min(AT_ONCE);
                    out[start..start + len].copy_from_slice(&bytes[..len]);
                    self.digest.update(&bytes[..len]);
                    len
                }
                Next::Rest(len) => len.min(bytes.len()),
            };
            self.seen += len;
            bytes = &bytes[len..];
        }
    }

    /// The chunk's digest, if the frame was seen whole, and around its content every byte was as our encoder writes it.
    pub fn finish(self) -> Option<Digest> {
        let is_whole = self.seen == raw_frame_len(self.raw_len, self.has_checksum);
        (self.is_ours && is_whole).then(|| self.digest.finish())
    }

    fn next(&self) -> Next {
        const WITH_HEADER: usize = BLOCK_HEADER_LEN + BLOCK_LEN_MAX;
        let Some(in_blocks) = self.seen.checked_sub(HAND_HEADER_LEN) else {
            let header = hand_header(self.raw_len, self.has_checksum);
            return Next::Header(header, self.seen..HAND_HEADER_LEN);
        };
        let (index, at) = (in_blocks / WITH_HEADER, in_blocks % WITH_HEADER);
        let start = (index * BLOCK_LEN_MAX).min(self.raw_len);
        let block_len = (self.raw_len - start).min(BLOCK_LEN_MAX);
        // An empty chunk has one block too.
        let is_block = block_len > 0 || self.raw_len == 0 && index == 0;
        if is_block && at < BLOCK_HEADER_LEN {
            let mut header = [0; HAND_HEADER_LEN];
            header[..BLOCK_HEADER_LEN].copy_from_slice(&raw_block_header(self.raw_len, index));
            return Next::Header(header, at..BLOCK_HEADER_LEN);
        }
        match (BLOCK_HEADER_LEN + block_len).checked_sub(at) {
            Some(len @ 1..) if is_block => Next::Content {
                start: start + at - BLOCK_HEADER_LEN,
                len,
            },
            // More than a frame has is counted, and makes it another frame.
            _ => Next::Rest(usize::MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::frame::write_raw;
    use crate::codec::{Body, Effort, Encoder, FilterChoice, Level, Settings, frame_bound};

    fn chunk(len: usize) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(len as u64 + 1);
        let mut chunk = vec![0; len];
        random.fill(&mut chunk);
        chunk
    }

    /// Its raw frame: with a content checksum where no filter may be used.
    fn frame_of(chunk: &[u8], filter: FilterChoice) -> Vec<u8> {
        let mut out = vec![0; frame_bound(chunk.len())];
        let mut encoder = Encoder::new(Settings {
            level: Level::None,
            filter,
            ..Settings::default()
        })
        .unwrap();
        let Body::Raw { checksum } = encoder.encode(chunk, &mut out, Effort::LEAST).body else {
            panic!("another frame than a raw one");
        };
        assert_eq!(checksum.is_some(), filter == FilterChoice::None);
        let len = write_raw(chunk, checksum, &mut out);
        out.truncate(len);
        out
    }

    /// What landed, and whether the frame was one of ours.
    fn land(frame: &[u8], raw_len: usize, piece_len: usize) -> (Vec<u8>, bool) {
        let mut out = vec![0xAA; raw_len];
        let Some(mut raw) = RawFrame::new(raw_len, frame.len()) else {
            return (out, false);
        };
        for piece in frame.chunks(piece_len) {
            raw.take(piece, &mut out);
        }
        let digest = raw.finish();
        if let Some(digest) = digest {
            assert_eq!(digest, Digest::of(&out));
        }
        (out, digest.is_some())
    }

    #[test]
    fn every_length_lands_whole_whatever_the_pieces() {
        for len in [
            0,
            1,
            BLOCK_LEN_MAX - 1,
            BLOCK_LEN_MAX,
            BLOCK_LEN_MAX + 1,
            3 * BLOCK_LEN_MAX,
            3 * BLOCK_LEN_MAX + 77,
        ] {
            let chunk = chunk(len);
            for filter in [FilterChoice::Auto, FilterChoice::None] {
                let frame = frame_of(&chunk, filter);
                for piece_len in [1, 7, 4096, 200_000, usize::MAX] {
                    let (landed, is_ours) = land(&frame, len, piece_len);
                    assert!(is_ours && landed == chunk, "{len} in pieces of {piece_len}");
                }
            }
        }
    }

    #[test]
    fn a_frame_that_differs_around_its_content_is_not_taken_for_ours() {
        let len = 2 * BLOCK_LEN_MAX + 5;
        let frame = frame_of(&chunk(len), FilterChoice::None);
        let second_block = HAND_HEADER_LEN + BLOCK_HEADER_LEN + BLOCK_LEN_MAX;
        for at in (0..HAND_HEADER_LEN + 3).chain(second_block..second_block + 3) {
            let mut damaged = frame.clone();
            damaged[at] ^= 0x10;
            assert!(!land(&damaged, len, 1000).1, "byte {at}");
        }
        let mut longer = frame.clone();
        longer.push(0);
        assert!(!land(&longer, len, 1000).1);
        assert!(!land(&frame[..frame.len() - 1], len, 1000).1);
        assert!(!land(&frame, len - 1, 1000).1);
        // Fewer bytes than announced, and more.
        let mut raw = RawFrame::new(len, frame.len()).unwrap();
        let mut out = vec![0; len];
        raw.take(&frame[..frame.len() - 1], &mut out);
        assert!(raw.clone().finish().is_none());
        raw.take(&[0; 2], &mut out);
        assert!(raw.finish().is_none());
    }
}
