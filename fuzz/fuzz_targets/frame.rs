//! Frames that nobody vouches for, and frames of our own with damage; chunks there and back.
//!
//! The first five bytes say what the others are ([`Input`]). Must hold: no panic; no byte is read or written outside the buffers given; a frame that is accepted fills its chunk
//! with the bytes that libzstd and the planes undone byte by byte give; a chunk that is encoded comes back as it was.

#![no_main]

use std::cell::RefCell;

use bytes::Bytes;
use ckptstream::codec::frame::{raw_pieces, write_raw};
use ckptstream::codec::planes::Kernel;
use ckptstream::codec::{
    Body, Crc64, Decoder, Digest, Effort, Encoder, Filter, FilterChoice, FrameError, Level,
    PlaneCoder, RawFrame, Settings, frame_bound,
};
use ckptstream_fuzz::{Guarded, Side};
use libfuzzer_sys::fuzz_target;
use zstd::zstd_safe::{DCtx, DParameter, ResetDirective};

/// Longest chunk that is tried: the golden image's, which is two units and more of every filter.
const RAW_LEN_MAX: usize = 1 << 20;

/// The first bytes of an input.
struct Input<'a> {
    mode: u8,
    /// Filter, settings of the encoder, side of the guard pages, and noise: whatever a mode reads from it.
    choice: u8,
    /// Length of the chunk, as three bytes say it.
    raw_len: usize,
    /// The same, but seldom a long one, which takes long: most are below 64 KiB.
    short_len: usize,
    rest: &'a [u8],
}

impl<'a> Input<'a> {
    fn of(data: &'a [u8]) -> Option<Self> {
        let (&[mode, choice, l0, l1, l2], rest) = data.split_first_chunk()?;
        let raw_len = u32::from_le_bytes([l0, l1, l2, 0]) as usize % (RAW_LEN_MAX + 1);
        let short_len = u32::from_le_bytes([l0, l1, (l2 & 7).saturating_sub(5), 0]) as usize;
        Some(Self {
            mode,
            choice,
            raw_len,
            short_len,
            rest,
        })
    }

    fn filter(&self) -> Filter {
        Filter::ALL[usize::from(self.choice) % Filter::ALL.len()]
    }

    /// Whether a chunk that was read is also encoded anew, which takes longer than all the rest.
    fn is_encoded_anew(&self) -> bool {
        self.mode & 0x40 != 0
    }

    fn side(&self) -> Side {
        if self.mode & 0x80 == 0 {
            Side::Back
        } else {
            Side::Front
        }
    }
}

/// What is made once and used for every input, as a restore's threads use it.
struct Bench {
    decoder: Decoder,
    stranger: DCtx<'static>,
    frame: Guarded,
    out: Guarded,
    kernel: [Guarded; 5],
    content: Vec<u8>,
}

thread_local! {
    static BENCH: RefCell<Bench> = RefCell::new(Bench::new());
}

fuzz_target!(|data: &[u8]| {
    let Some(input) = Input::of(data) else {
        return;
    };
    BENCH.with_borrow_mut(|bench| match input.mode % 4 {
        0 => bench.read(&input, input.rest, input.raw_len),
        1 => {
            let mut frame = header(input.short_len, input.choice & 0x80 != 0);
            frame.extend_from_slice(input.rest);
            bench.read(&input, &frame, input.short_len);
        }
        2 => bench.encode_and_damage(&input),
        _ => bench.split_and_join(&input),
    });
});

impl Bench {
    fn new() -> Self {
        Self {
            decoder: Decoder::new().expect("memory"),
            stranger: DCtx::create(),
            // The longest frame of all, and what makes it too long.
            frame: Guarded::new(frame_bound(RAW_LEN_MAX) + RAW_LEN_MAX),
            out: Guarded::new(RAW_LEN_MAX),
            kernel: std::array::from_fn(|_| Guarded::new(RAW_LEN_MAX)),
            content: Vec::new(),
        }
    }

    /// Reads bytes as a frame. If they are one, the chunk in it may be encoded anew.
    fn read(&mut self, input: &Input<'_>, frame: &[u8], raw_len: usize) {
        let Some(chunk) = self.decode(frame, input.filter(), raw_len, input.side()) else {
            return;
        };
        if !input.is_encoded_anew() {
            return;
        }
        let mut encoder = Encoder::new(settings(input.choice)).expect("settings of ours");
        let (frame, filter, digest) = encode(&mut encoder, &chunk, Effort::MOST);
        assert_eq!(digest, Digest::of(&chunk));
        let again = self.decode(&frame, filter, chunk.len(), input.side());
        assert!(again.is_some_and(|again| again == chunk), "encoded anew");
    }

    /// The chunk of a frame that holds one of this length, whatever its digest.
    fn decode(
        &mut self,
        frame: &[u8],
        filter: Filter,
        raw_len: usize,
        side: Side,
    ) -> Option<Vec<u8>> {
        let Self {
            decoder,
            frame: guarded,
            out,
            ..
        } = self;
        let frame = (frame.len() <= frame_bound(RAW_LEN_MAX) + RAW_LEN_MAX)
            .then(|| guarded.copy(frame, side))?;
        let chunk = out.slice(raw_len, side);
        // No bytes have this digest, so that the answer says which one they have.
        let nothing = Digest::of(b"no chunk of the fuzzer's");
        let found = match decoder.decode(frame, filter, nothing, chunk) {
            Err(FrameError::Digest { found, .. }) => Some(found),
            Err(_) => None,
            Ok(()) => panic!("a chunk with the digest of other bytes"),
        };
        let chunk = found.map(|found| {
            chunk.fill(0xA5);
            decoder
                .decode(frame, filter, found, chunk)
                .expect("it was read just now");
            assert_eq!(Digest::of(chunk), found);
            chunk.to_vec()
        });
        out.check();
        let frame = frame.to_vec();
        if let Some(chunk) = &chunk {
            self.must_be_what_a_stranger_reads(&frame, filter, chunk);
        }
        self.must_land_alike(&frame, filter, raw_len, side, found);
        chunk
    }

    /// libzstd reads the same content, and the planes undone as `docs/format.md` tells it are the same chunk.
    fn must_be_what_a_stranger_reads(&mut self, frame: &[u8], filter: Filter, chunk: &[u8]) {
        let stranger = &mut self.stranger;
        stranger
            .reset(ResetDirective::SessionAndParameters)
            .expect("a context");
        stranger
            .set_parameter(DParameter::ForceIgnoreChecksum(true))
            .expect("a parameter");
        self.content.clear();
        self.content.reserve(chunk.len());
        let len = stranger.decompress(&mut self.content, frame);
        let len = len.map_err(zstd::zstd_safe::get_error_name);
        assert_eq!(len, Ok(chunk.len()), "we read what libzstd does not");
        assert!(
            undo_planes(&self.content, filter) == chunk,
            "libzstd reads other bytes"
        );
    }

    /// A raw frame that is taken apart while it arrives holds what the decoder found.
    fn must_land_alike(
        &mut self,
        frame: &[u8],
        filter: Filter,
        raw_len: usize,
        side: Side,
        found: Option<Digest>,
    ) {
        let Some(mut raw) = RawFrame::new(raw_len, frame.len()) else {
            return;
        };
        let out = self.out.slice(raw_len, side);
        let piece_len = 1 + raw_len / 3;
        for piece in frame.chunks(piece_len) {
            raw.take(piece, out);
        }
        let landed = raw.finish();
        if let Some(landed) = landed {
            assert_eq!(landed, Digest::of(out));
            // The checksum is left to the digest here, and to libzstd there.
            if filter == Filter::None {
                assert_eq!(found, Some(landed), "landed, and not decoded");
            }
        }
        self.out.check();
    }

    /// A chunk is encoded; the frame is damaged where the input says so.
    fn encode_and_damage(&mut self, input: &Input<'_>) {
        let Some((&edit_count, rest)) = input.rest.split_first() else {
            return;
        };
        let (edits, seed) = rest
            .as_chunks::<3>()
            .0
            .split_at(usize::from(edit_count % 8).min(rest.len() / 3));
        let chunk = chunk_of(seed.as_flattened(), input);
        let mut encoder = Encoder::new(settings(input.choice)).expect("settings of ours");
        let effort = Effort(f32::from(edit_count >> 3));
        let (mut frame, filter, digest) = encode(&mut encoder, &chunk, effort);
        let whole = frame.clone();
        for &[at0, at1, flip] in edits {
            let at = usize::from(u16::from_le_bytes([at0, at1])) % frame.len();
            frame[at] ^= flip;
        }
        let read = self.decode(&frame, filter, chunk.len(), input.side());
        if frame == whole {
            assert!(read.is_some_and(|read| read == chunk), "there and back");
            assert_eq!(digest, Digest::of(&chunk));
        }
    }

    /// Every kernel makes the same planes as the portable one, and the same chunk of them.
    fn split_and_join(&mut self, input: &Input<'_>) {
        let filter = input.filter();
        let width = filter.width();
        let raw = &input.rest[..input.rest.len().min(filter.unit_len())];
        let plane_len = raw.len() / width;
        let side = input.side();
        let [buffer, planes @ ..] = &mut self.kernel;
        let mut expected: Option<Vec<Vec<u8>>> = None;
        for kernel in [Kernel::PORTABLE].into_iter().chain(Kernel::available()) {
            let raw = buffer.copy(raw, side);
            let mut parts = planes.each_mut().map(|plane| plane.slice(plane_len, side));
            kernel.split(filter, raw, &mut parts);
            let split: Vec<Vec<u8>> = parts[..width].iter().map(|plane| plane.to_vec()).collect();
            let expected = expected.get_or_insert_with(|| split.clone());
            assert!(*expected == split, "{kernel} splits otherwise");
            let body_len = plane_len * width;
            let body = raw[..body_len].to_vec();
            let parts = parts.map(|plane| &*plane);
            let joined = buffer.slice(body_len, side);
            joined.fill(0);
            kernel.join(filter, &parts, joined);
            assert!(joined == body, "{kernel} joins otherwise");
            buffer.check();
            planes.iter_mut().for_each(Guarded::check);
        }
    }
}

/// The header of a frame of our own.
fn header(raw_len: usize, has_checksum: bool) -> Vec<u8> {
    let chunk = Bytes::from(vec![0; raw_len]);
    let first = raw_pieces(chunk, has_checksum.then_some(0)).next();
    let first = first.expect("every frame has a header");
    const HEADER_LEN: usize = 10;
    first[..HEADER_LEN].to_vec()
}

fn settings(choice: u8) -> Settings {
    let level = match choice >> 2 & 7 {
        0 => Level::None,
        1..4 => Level::Auto,
        4 => Level::MaxRatio,
        5 => Level::Zstd(-5),
        6 => Level::Zstd(1),
        _ => Level::Zstd(3),
    };
    Settings {
        level,
        filter: match choice & 1 {
            0 => FilterChoice::Auto,
            _ => FilterChoice::None,
        },
        plane_coder: match choice & 2 {
            0 => PlaneCoder::Own,
            _ => PlaneCoder::Libzstd,
        },
    }
}

/// Frame, filter and digest; checksum and kind are looked at here.
fn encode(encoder: &mut Encoder, chunk: &[u8], effort: Effort) -> (Vec<u8>, Filter, Digest) {
    let mut frame = vec![0; frame_bound(chunk.len())];
    let encoded = encoder.encode(chunk, &mut frame, effort);
    let len = match encoded.body {
        Body::Written { len } => len,
        Body::Raw { checksum } => write_raw(chunk, checksum, &mut frame),
    };
    assert_eq!(len, encoded.len());
    frame.truncate(len);
    assert_eq!(encoded.crc64, Crc64::of(&frame));
    (frame, encoded.filter, encoded.digest)
}

/// A chunk of elements whose last byte the seed gives and whose other bytes are noise, as weights are; of one-byte elements it is the seed, again and again.
fn chunk_of(seed: &[u8], input: &Input<'_>) -> Vec<u8> {
    let width = [1, 2, 4][usize::from(input.choice >> 5) % 3];
    let mut noise = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        noise ^= noise << 13;
        noise ^= noise >> 7;
        noise ^= noise << 17;
        noise.to_le_bytes()[0]
    };
    let mut seed = seed.iter().copied().cycle();
    (0..input.short_len)
        .map(|at| match (at + 1) % width {
            0 => seed.next().unwrap_or(0),
            _ => next(),
        })
        .collect()
}

/// The planes undone as `docs/format.md` tells it, byte by byte.
fn undo_planes(content: &[u8], filter: Filter) -> Vec<u8> {
    let width = filter.width();
    if width == 1 {
        return content.to_vec();
    }
    let mut raw = Vec::with_capacity(content.len());
    for unit in content.chunks(filter.unit_len()) {
        let plane_len = unit.len() / width;
        for element in 0..plane_len {
            let mut value = 0u32;
            for plane in (0..width).rev() {
                value = value << 8 | u32::from(unit[plane * plane_len + element]);
            }
            if filter.is_rotated() {
                value = value >> 1 | (value & 1) << (8 * width - 1);
            }
            raw.extend_from_slice(&value.to_le_bytes()[..width]);
        }
        raw.extend_from_slice(&unit[plane_len * width..]);
    }
    raw
}
