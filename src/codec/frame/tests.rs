use std::io::Read;

use proptest::prelude::*;

use super::*;
use crate::codec::sample_data::{random, repeated, text};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

fn frame_of(level: Level, chunk: &[u8]) -> (Vec<u8>, Encoded) {
    let mut frame = Vec::with_capacity(frame_bound(chunk.len()));
    let capacity = frame.capacity();
    let encoded = Encoder::new(level).unwrap().encode(chunk, &mut frame);
    assert_eq!(frame.capacity(), capacity, "the buffer was reallocated");
    assert!(frame.len() <= frame_bound(chunk.len()));
    (frame, encoded)
}

fn decode(frame: &[u8], digest: Digest, raw_len: usize) -> Result<Vec<u8>, FrameError> {
    // Anything but zero, so that a byte left unwritten shows.
    let mut out = vec![0xA5; raw_len];
    Decoder::new().unwrap().decode(frame, digest, &mut out)?;
    Ok(out)
}

/// What a reader gets that knows nothing of us and allows no larger window than every zstd must.
fn decode_as_a_stranger(frame: &[u8]) -> Vec<u8> {
    let mut reader = zstd::Decoder::new(frame).unwrap();
    reader.window_log_max(WINDOW_LOG_MAX).unwrap();
    let mut raw = Vec::new();
    reader.read_to_end(&mut raw).unwrap();
    raw
}

fn assert_round_trip(level: Level, chunk: &[u8], kind: FrameKind) {
    let (frame, encoded) = frame_of(level, chunk);
    assert_eq!(encoded.kind, kind);
    assert_eq!(encoded.digest, Digest::of(chunk));
    assert!(decode(&frame, encoded.digest, chunk.len()).unwrap() == chunk);
    assert!(decode_as_a_stranger(&frame) == chunk);
}

#[test]
fn each_chunk_gets_the_cheapest_frame() {
    let zeros = vec![0; MIB];
    let mut almost_zeros = zeros.clone();
    almost_zeros[MIB - 1] = 1;
    for level in [Level::None, Level::Fast, Level::MaxRatio] {
        assert_round_trip(level, &zeros, FrameKind::Zero);
        assert_round_trip(level, &random(1, MIB), FrameKind::Raw);
        assert_round_trip(level, b"", FrameKind::Raw);
        assert_round_trip(level, b"\0", FrameKind::Zero);
        assert_round_trip(level, b"1", FrameKind::Raw);
    }
    for level in [Level::Fast, Level::MaxRatio, Level::Zstd(-7)] {
        assert_round_trip(level, &almost_zeros, FrameKind::Zstd);
        assert_round_trip(level, &text(1, MIB), FrameKind::Zstd);
    }
    assert_round_trip(Level::None, &text(1, MIB), FrameKind::Raw);
}

#[test]
fn repetitions_that_a_histogram_does_not_see_are_compressed() {
    let chunk = repeated(1, 4 * KIB, 4 * MIB);
    assert!(looks_random(&chunk));
    assert_round_trip(Level::Fast, &chunk, FrameKind::Zstd);
}

#[test]
fn a_chunk_that_is_only_partly_random_is_compressed() {
    let mut chunk = random(1, 4 * MIB);
    chunk[MIB..2 * MIB].fill(0);
    assert!(!looks_random(&chunk));
    assert_round_trip(Level::Fast, &chunk, FrameKind::Zstd);
}

#[test]
fn zero_frames_of_one_encoder_follow_the_chunk_length() {
    let mut encoder = Encoder::new(Level::Fast).unwrap();
    let mut frame = Vec::new();
    for len in [MIB, MIB, 1, 128 * KIB, 128 * KIB + 1, MIB] {
        let encoded = encoder.encode(&vec![0; len], &mut frame);
        assert!(frame.len() < 60);
        assert!(decode(&frame, encoded.digest, len).unwrap() == vec![0; len]);
    }
}

#[test]
fn every_level_writes_what_every_zstd_reads() {
    for level in [-1000, -7].into_iter().chain(1..=Level::ZSTD_MAX) {
        assert_round_trip(Level::Zstd(level), &text(2, 300 * KIB), FrameKind::Zstd);
    }
    // Longer than the largest window, so that it cannot be one segment.
    let long = text(3, 300 * KIB).repeat(31);
    for level in [19, 20, 22] {
        assert_round_trip(Level::Zstd(level), &long, FrameKind::Zstd);
    }
    for level in [Level::ZSTD_MIN - 1, Level::ZSTD_MAX + 1] {
        let error = Encoder::new(Level::Zstd(level)).unwrap_err();
        assert_eq!(error, EncoderError::Level { level });
    }
}

#[test]
fn largest_chunk() {
    let len = usize::try_from(CHUNK_LEN_MAX).unwrap();
    assert_round_trip(Level::Fast, &vec![0; len], FrameKind::Zero);
    assert_round_trip(Level::None, &vec![7; len], FrameKind::Raw);
}

#[test]
fn contexts_take_no_more_memory_than_the_plan_counts() {
    for level in [-1000].into_iter().chain(0..=Level::ZSTD_MAX) {
        let level = Level::Zstd(level);
        let mut encoder = Encoder::new(level).unwrap();
        encoder.warm_up(16 * MIB).unwrap();
        let taken = encoder.compressor.as_ref().unwrap().sizeof() as u64;
        let counted = level.context_bytes();
        assert!(
            taken <= counted && taken >= counted / 8,
            "{level:?} takes {taken} bytes, counted are {counted}"
        );
    }
    let (frame, encoded) = frame_of(Level::Fast, &text(1, 4 * MIB));
    let mut decoder = Decoder::new().unwrap();
    let mut out = vec![0; 4 * MIB];
    decoder.decode(&frame, encoded.digest, &mut out).unwrap();
    assert!(decoder.context.sizeof() as u64 <= Decoder::CONTEXT_BYTES);
}

/// Magic, descriptor and what follows it.
fn header(descriptor: u8, rest: &[u8]) -> Vec<u8> {
    let mut frame = MAGIC.to_le_bytes().to_vec();
    frame.push(descriptor);
    frame.extend_from_slice(rest);
    frame
}

#[test]
fn headers_that_ask_for_too_much_are_refused_before_decoding() {
    let digest = Digest::of(b"");
    let refused = |frame: &[u8]| decode(frame, digest, 1000).unwrap_err();
    let size = 1000u32.to_le_bytes();

    // CMP-01: a tiny frame with windowLog 31 and one with a content of 2^60 bytes.
    let window_31 = [&[(31 - 10) << 3], size.as_slice()].concat();
    let found = 1 << 31;
    assert_eq!(
        refused(&header(0x84, &window_31)),
        FrameError::Window { found }
    );
    let huge = [&[0x38], (1u64 << 60).to_le_bytes().as_slice()].concat();
    let (found, expected) = (1 << 60, 1000);
    assert_eq!(
        refused(&header(0xC4, &huge)),
        FrameError::ContentSize { found, expected }
    );
    // The largest window there is must not overflow.
    let window_max = [&[0xFF], size.as_slice()].concat();
    assert!(matches!(
        refused(&header(0x84, &window_max)),
        FrameError::Window { .. }
    ));

    let normal = [&[0x38], size.as_slice()].concat();
    assert_eq!(refused(&header(0x85, &normal)), FrameError::Dictionary);
    assert_eq!(
        refused(&header(0x80, &normal)),
        FrameError::NoContentChecksum
    );
    assert_eq!(refused(&header(0x8C, &normal)), FrameError::Header);
    assert_eq!(refused(&header(0x04, &normal)), FrameError::NoContentSize);
    assert_eq!(refused(&header(0x84, &normal[..4])), FrameError::Header);
    assert_eq!(refused(&[]), FrameError::Header);
    let found = 0x184D_2A5E;
    assert_eq!(
        refused(&u32::to_le_bytes(found)),
        FrameError::Magic { found }
    );
}

#[test]
fn content_longer_or_shorter_than_promised_is_refused() {
    let chunk = text(1, 10 * KIB);
    for level in [Level::None, Level::Fast] {
        let (frame, encoded) = frame_of(level, &chunk);
        for wrong in [0, chunk.len() - 1, chunk.len() + 1, 10 * chunk.len()] {
            let error = decode(&frame, encoded.digest, wrong).unwrap_err();
            let (found, expected) = (chunk.len() as u64, wrong as u64);
            assert_eq!(error, FrameError::ContentSize { found, expected });
        }
    }
    // The header keeps its promise, the blocks do not: ten times as much, and half as much.
    for (block_len, expands) in [(10_000u32, true), (500, false)] {
        let rle = (1 | 1 << 1 | block_len << 3).to_le_bytes();
        let mut frame = header(0x84, &[0x38]);
        frame.extend_from_slice(&1000u32.to_le_bytes());
        frame.extend_from_slice(&[rle[0], rle[1], rle[2], 0, 0, 0, 0, 0]);
        let error = decode(&frame, Digest::of(&[0; 1000]), 1000).unwrap_err();
        assert!(
            matches!(error, FrameError::Damaged { .. }),
            "{error:?} {expands}"
        );
    }
}

#[test]
fn more_or_less_than_one_frame_is_refused() {
    let chunk = text(1, 10 * KIB);
    let (frame, encoded) = frame_of(Level::Fast, &chunk);
    let twice = [frame.clone(), frame.clone()].concat();
    let and_garbage = [frame.as_slice(), b"x"].concat();
    let and_empty_skippable = [frame.as_slice(), &[0x5e, 0x2a, 0x4d, 0x18, 0, 0, 0, 0]].concat();
    for longer in [&twice, &and_garbage, &and_empty_skippable] {
        let error = decode(longer, encoded.digest, chunk.len()).unwrap_err();
        let (found, expected) = (frame.len(), longer.len());
        assert_eq!(error, FrameError::Span { found, expected });
    }
    for len in 0..frame.len() {
        assert!(decode(&frame[..len], encoded.digest, chunk.len()).is_err());
    }
}

#[test]
fn a_good_frame_of_another_chunk_is_refused() {
    let (frame, encoded) = frame_of(Level::Fast, &text(1, 10 * KIB));
    let expected = Digest::of(b"another");
    let found = encoded.digest;
    assert_eq!(
        decode(&frame, expected, 10 * KIB),
        Err(FrameError::Digest { found, expected })
    );
}

#[test]
fn any_damaged_byte_is_refused_or_harmless() {
    let chunks = [
        (Level::Fast, vec![0; 300 * KIB]),
        (Level::None, random(5, 200)),
        (Level::Fast, text(5, 2 * KIB)),
    ];
    for (level, chunk) in chunks {
        let (frame, encoded) = frame_of(level, &chunk);
        for at in 0..frame.len() {
            for bit in 0..8 {
                let mut damaged = frame.clone();
                damaged[at] ^= 1 << bit;
                if let Ok(raw) = decode(&damaged, encoded.digest, chunk.len()) {
                    // The descriptor's unused bit, another legal window, padding in an entropy table.
                    assert!(raw == chunk);
                }
            }
        }
    }
}

fn any_chunk() -> impl Strategy<Value = Vec<u8>> {
    let piece = (0..4u8, any::<u64>(), 0..150_000usize).prop_map(|(kind, seed, len)| match kind {
        0 => vec![0; len],
        1 => random(seed, len),
        2 => text(seed, len),
        _ => repeated(seed, 1 + len / 10, len),
    });
    proptest::collection::vec(piece, 0..6).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn round_trip(chunk in any_chunk(), level in prop_oneof![Just(Level::None), Just(Level::Fast), Just(Level::MaxRatio), (-20..10).prop_map(Level::Zstd)]) {
        let (frame, encoded) = frame_of(level, &chunk);
        prop_assert!(decode(&frame, encoded.digest, chunk.len()) == Ok(chunk.clone()));
        prop_assert!(decode_as_a_stranger(&frame) == chunk);
        prop_assert!(frame.len() >= FRAME_LEN_MIN as usize);
    }

    #[test]
    fn arbitrary_bytes_never_panic(start in any::<bool>(), bytes in proptest::collection::vec(any::<u8>(), 0..300), len in 0..2000usize) {
        let mut frame = if start { MAGIC.to_le_bytes().to_vec() } else { Vec::new() };
        frame.extend_from_slice(&bytes);
        prop_assert!(decode(&frame, Digest::of(b"nothing has this digest"), len).is_err());
    }
}
