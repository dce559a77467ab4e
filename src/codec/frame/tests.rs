use std::io::Read;

use proptest::prelude::*;

use super::libzstd::Decompressor;
use super::read::Reader;
use super::write::{Growing, Writer};
use super::*;
use crate::codec::Effort;
use crate::codec::sample_data::{Seeded, frame_of, frame_with, random, repeated, text, weights};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

const AUTO: Settings = Settings {
    level: Level::Auto,
    filter: FilterChoice::Auto,
    plane_coder: PlaneCoder::Own,
};
const NO_FILTER: Settings = Settings {
    filter: FilterChoice::None,
    ..AUTO
};
const WITH_LIBZSTD: Settings = Settings {
    plane_coder: PlaneCoder::Libzstd,
    ..AUTO
};

fn at_level(level: Level) -> Settings {
    Settings { level, ..AUTO }
}

fn frame_by(settings: Settings, chunk: &[u8]) -> (Vec<u8>, Encoded) {
    frame_of(&mut Encoder::new(settings).unwrap(), chunk)
}

fn decode(
    frame: &[u8],
    filter: Filter,
    digest: Digest,
    raw_len: usize,
) -> Result<Vec<u8>, FrameError> {
    // Anything but zero, so that a byte left unwritten shows.
    let mut out = vec![0xA5; raw_len];
    let mut decoder = Decoder::new().unwrap();
    decoder.decode(frame, filter, digest, &mut out)?;
    Ok(out)
}

/// What a reader gets that knows nothing of us and allows no larger window than every zstd must, or with a filter no larger one than we promise.
fn content_as_a_stranger(frame: &[u8], filter: Filter) -> Vec<u8> {
    let mut reader = zstd::Decoder::new(frame).unwrap();
    let window_log = match filter {
        Filter::None => WINDOW_LOG_MAX,
        _ => FILTERED_WINDOW_LOG,
    };
    reader.window_log_max(window_log).unwrap();
    let mut content = Vec::new();
    reader.read_to_end(&mut content).unwrap();
    content
}

/// The planes undone as `docs/format.md` tells it, byte by byte.
fn undo_planes(content: &[u8], filter: Filter) -> Vec<u8> {
    let width = filter.width();
    let mut raw = Vec::with_capacity(content.len());
    for unit in content.chunks(width * 131_072) {
        let plane_len = unit.len() / width;
        for element in 0..plane_len {
            let bytes = (0..width).map(|plane| unit[plane * plane_len + element]);
            let mut value = bytes
                .rev()
                .fold(0u64, |value, byte| value << 8 | u64::from(byte));
            if filter.is_rotated() {
                value = value >> 1 | (value & 1) << (8 * width - 1);
            }
            raw.extend_from_slice(&value.to_le_bytes()[..width]);
        }
        raw.extend_from_slice(&unit[plane_len * width..]);
    }
    raw
}

/// Everything that holds of every frame.
fn assert_is_of(frame: &[u8], encoded: &Encoded, chunk: &[u8]) {
    assert_eq!(frame.len(), encoded.len());
    assert!(frame.len() <= frame_bound(chunk.len()));
    assert!(frame.len() >= FRAME_LEN_MIN as usize);
    assert_eq!(encoded.digest, Digest::of(chunk));
    assert_eq!(encoded.crc64, Crc64::of(frame));
    assert!(decode(frame, encoded.filter, encoded.digest, chunk.len()).unwrap() == chunk);
    let content = content_as_a_stranger(frame, encoded.filter);
    assert!(undo_planes(&content, encoded.filter) == chunk);
}

fn assert_round_trip(settings: Settings, chunk: &[u8], kind: FrameKind) -> Encoded {
    let (frame, encoded) = frame_by(settings, chunk);
    assert_eq!(encoded.kind, kind, "{settings:?}");
    assert_is_of(&frame, &encoded, chunk);
    encoded
}

#[test]
fn each_chunk_gets_the_cheapest_frame() {
    let zeros = vec![0; MIB];
    let mut almost_zeros = zeros.clone();
    almost_zeros[MIB - 1] = 1;
    for settings in [
        AUTO,
        NO_FILTER,
        at_level(Level::None),
        at_level(Level::MaxRatio),
    ] {
        assert_round_trip(settings, &zeros, FrameKind::Zero);
        assert_round_trip(settings, &random(1, MIB), FrameKind::Raw);
        assert_round_trip(settings, b"", FrameKind::Raw);
        assert_round_trip(settings, b"\0", FrameKind::Zero);
        assert_round_trip(settings, b"1", FrameKind::Raw);
    }
    for settings in [
        AUTO,
        NO_FILTER,
        WITH_LIBZSTD,
        at_level(Level::MaxRatio),
        at_level(Level::Zstd(-7)),
    ] {
        assert_round_trip(settings, &almost_zeros, FrameKind::Zstd);
        assert_round_trip(settings, &text(1, MIB), FrameKind::Zstd);
        let bf16 = assert_round_trip(settings, &weights(1, 2, MIB), FrameKind::Zstd);
        let fp32 = assert_round_trip(settings, &weights(1, 4, MIB), FrameKind::Zstd);
        if settings.filter == FilterChoice::Auto && !matches!(settings.level, Level::Zstd(_)) {
            assert_eq!(bf16.filter, Filter::Planes2Rotated, "{settings:?}");
            assert_eq!(fp32.filter.width(), 4, "{settings:?}");
        }
    }
    assert_round_trip(at_level(Level::None), &text(1, MIB), FrameKind::Raw);
}

#[test]
fn weights_take_what_their_entropy_says() {
    for (width, share) in [(2, 0.63), (4, 0.82)] {
        let chunk = weights(2, width, 4 * MIB);
        for settings in [AUTO, WITH_LIBZSTD, at_level(Level::MaxRatio)] {
            let encoded = assert_round_trip(settings, &chunk, FrameKind::Zstd);
            let stored = encoded.len() as f64 / chunk.len() as f64;
            assert!(
                (share - 0.02..share).contains(&stored),
                "{settings:?}: {stored}"
            );
        }
    }
}

#[test]
fn effort_decides_what_is_worth_compressing() {
    let mut encoder = Encoder::new(AUTO).unwrap();
    let mut kind = |chunk: &[u8], effort| {
        let (frame, encoded) = frame_with(&mut encoder, chunk, effort);
        assert_is_of(&frame, &encoded, chunk);
        encoded.kind
    };
    let bf16 = weights(3, 2, MIB);
    // Whatever the machine: a fortieth of a second for a third less is too much, ten seconds are not.
    assert_eq!(kind(&bf16, Effort::LEAST), FrameKind::Raw);
    assert_eq!(kind(&bf16, Effort(0.01)), FrameKind::Raw);
    assert_eq!(kind(&bf16, Effort(30.0)), FrameKind::Zstd);
    assert_eq!(kind(&bf16, Effort::MOST), FrameKind::Zstd);
    assert_eq!(kind(&vec![0; MIB], Effort::LEAST), FrameKind::Zero);
    assert_eq!(kind(&random(3, MIB), Effort::MOST), FrameKind::Raw);
    assert_eq!(kind(&bf16, Effort(f32::NAN)), FrameKind::Raw);
    // A level that is asked for does not listen.
    let mut fixed = Encoder::new(at_level(Level::Zstd(3))).unwrap();
    let (_, encoded) = frame_with(&mut fixed, &text(3, MIB), Effort::LEAST);
    assert_eq!(encoded.kind, FrameKind::Zstd);
}

#[test]
fn repetitions_that_a_histogram_does_not_see_are_compressed() {
    let chunk = repeated(1, 4 * KIB, 4 * MIB);
    for settings in [AUTO, NO_FILTER, WITH_LIBZSTD] {
        let encoded = assert_round_trip(settings, &chunk, FrameKind::Zstd);
        assert!(encoded.len() < chunk.len() / 50);
    }
}

#[test]
fn a_chunk_that_is_only_partly_random_is_compressed() {
    let mut chunk = random(1, 4 * MIB);
    chunk[MIB..2 * MIB].fill(0);
    for settings in [AUTO, NO_FILTER] {
        let encoded = assert_round_trip(settings, &chunk, FrameKind::Zstd);
        assert!(encoded.len() < 3 * MIB + 10 * KIB);
    }
}

#[test]
fn a_choice_serves_only_chunks_that_look_like_the_one_it_was_made_for() {
    let mut encoder = Encoder::new(AUTO).unwrap();
    for round in 0..3 {
        for (chunk, kind) in [
            (weights(round, 2, MIB), FrameKind::Zstd),
            (random(round, MIB), FrameKind::Raw),
            (text(round, MIB), FrameKind::Zstd),
            (weights(round, 4, MIB), FrameKind::Zstd),
            (vec![0; MIB], FrameKind::Zero),
        ] {
            let (frame, encoded) = frame_with(&mut encoder, &chunk, Effort::MOST);
            assert_eq!(encoded.kind, kind);
            let of_its_own = frame_with(&mut Encoder::new(AUTO).unwrap(), &chunk, Effort::MOST);
            assert_eq!(encoded.filter, of_its_own.1.filter);
            assert!(encoded.len() <= of_its_own.1.len() * 11 / 10, "{kind:?}");
            assert_is_of(&frame, &encoded, &chunk);
        }
    }
}

#[test]
fn zero_frames_of_one_encoder_follow_the_chunk_length() {
    let mut encoder = Encoder::new(AUTO).unwrap();
    for len in [MIB, MIB, 1, 128 * KIB, 128 * KIB + 1, MIB] {
        let chunk = vec![0; len];
        let (frame, encoded) = frame_of(&mut encoder, &chunk);
        assert!(encoded.len() < 60);
        assert_is_of(&frame, &encoded, &chunk);
    }
}

#[test]
fn every_level_writes_what_every_zstd_reads() {
    for level in [-1000, -7].into_iter().chain(1..=Level::ZSTD_MAX) {
        for settings in [
            at_level(Level::Zstd(level)),
            Settings {
                level: Level::Zstd(level),
                ..NO_FILTER
            },
        ] {
            assert_round_trip(settings, &text(2, 300 * KIB), FrameKind::Zstd);
            if level < 10 {
                assert_round_trip(settings, &weights(2, 4, 600 * KIB), FrameKind::Zstd);
            }
        }
    }
    // Longer than the largest window, so that it cannot be one segment.
    let long = text(3, 300 * KIB).repeat(31);
    for level in [19, 20, 22] {
        assert_round_trip(at_level(Level::Zstd(level)), &long, FrameKind::Zstd);
    }
    for level in [Level::ZSTD_MIN - 1, Level::ZSTD_MAX + 1] {
        let error = Encoder::new(at_level(Level::Zstd(level))).unwrap_err();
        assert_eq!(error, EncoderError::Level { level });
    }
}

#[test]
fn largest_chunk() {
    let len = usize::try_from(CHUNK_LEN_MAX).unwrap();
    assert_round_trip(AUTO, &vec![0; len], FrameKind::Zero);
    assert_round_trip(at_level(Level::None), &vec![7; len], FrameKind::Raw);
    assert_round_trip(AUTO, &weights(4, 2, MIB).repeat(64), FrameKind::Zstd);
}

#[test]
fn raw_pieces_are_the_raw_frame_and_share_the_chunk() {
    for len in [
        0,
        1,
        BLOCK_LEN_MAX - 1,
        BLOCK_LEN_MAX,
        BLOCK_LEN_MAX + 1,
        3 * BLOCK_LEN_MAX,
        MIB + 5,
    ] {
        let chunk = Bytes::from(random(5, len));
        for settings in [AUTO, NO_FILTER] {
            let (frame, encoded) = frame_by(settings, &chunk);
            let Body::Raw { checksum } = encoded.body else {
                panic!("{:?}", encoded.body)
            };
            let pieces: Vec<Bytes> = raw_pieces(chunk.clone(), checksum).collect();
            assert!(pieces.concat() == frame, "{len}");
            assert_is_of(&frame, &encoded, &chunk);
            let memory = chunk.as_ptr_range();
            let shared = pieces
                .iter()
                .filter(|piece| memory.contains(&piece.as_ptr()));
            assert_eq!(shared.map(Bytes::len).sum::<usize>(), len);
        }
    }
}

#[test]
fn frames_for_other_tools_carry_a_content_checksum_and_no_others_do() {
    let level_none = at_level(Level::None);
    for chunk in [
        vec![0; MIB],
        random(5, MIB),
        text(5, MIB),
        weights(5, 2, MIB),
    ] {
        for settings in [AUTO, level_none, WITH_LIBZSTD, at_level(Level::Zstd(3))] {
            for filter in [FilterChoice::Auto, FilterChoice::None] {
                let settings = Settings { filter, ..settings };
                let (frame, encoded) = frame_by(settings, &chunk);
                let has_checksum = frame[4] & CHECKSUM_FLAG != 0;
                assert_eq!(has_checksum, filter == FilterChoice::None, "{settings:?}");
                assert_is_of(&frame, &encoded, &chunk);
            }
        }
    }
}

#[test]
fn contexts_take_no_more_memory_than_the_plan_counts() {
    // The ends of the ranges that count alike.
    let levels = [-1000, 0, 1, 2, 4, 5, 8, 9, 11, 12, 16, 17, 19, 22].map(Level::Zstd);
    for level in levels.into_iter().chain([Level::Auto, Level::MaxRatio]) {
        for settings in [at_level(level), Settings { level, ..NO_FILTER }] {
            let mut team = Encoder::team(settings, 1, 16 * MIB).unwrap();
            let encoder = &mut team[0];
            let taken = encoder.sizeof() as u64;
            let counted = settings.context_bytes();
            assert!(
                taken <= counted && taken >= counted / 8,
                "{settings:?} takes {taken} bytes, counted are {counted}"
            );
            if !matches!(level, Level::Zstd(5..)) {
                for chunk in [text(1, 4 * MIB), weights(1, 4, 16 * MIB)] {
                    frame_of(encoder, &chunk);
                }
                let later = encoder.sizeof() as u64;
                assert!(later <= taken, "{settings:?}: {taken} became {later}");
            }
        }
    }
    let mut decoder = Decoder::new().unwrap();
    for chunk in [text(1, 4 * MIB), weights(1, 2, 4 * MIB)] {
        for settings in [AUTO, NO_FILTER, WITH_LIBZSTD, at_level(Level::Zstd(3))] {
            let (frame, encoded) = frame_by(settings, &chunk);
            let mut out = vec![0; chunk.len()];
            decoder
                .decode(&frame, encoded.filter, encoded.digest, &mut out)
                .unwrap();
        }
    }
    let taken = decoder.sizeof() as u64;
    assert!(taken <= Decoder::CONTEXT_BYTES, "{taken}");
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
    let refused_behind = |filter, frame: &[u8]| decode(frame, filter, digest, 1000).unwrap_err();
    let refused = |frame: &[u8]| refused_behind(Filter::None, frame);
    let size = 1000u32.to_le_bytes();

    // CMP-01: a tiny frame with windowLog 31 and one with a content of 2^60 bytes.
    let window_31 = [&[(31 - 10) << 3], size.as_slice()].concat();
    let (found, max) = (1 << 31, 8 << 20);
    assert_eq!(
        refused(&header(0x84, &window_31)),
        FrameError::Window { found, max }
    );
    // Behind a filter, already one of 256 KiB, and one segment of so much.
    let window_18 = [&[(18 - 10) << 3], size.as_slice()].concat();
    let (found, max) = (1 << 18, 1 << 17);
    let too_much = FrameError::Window { found, max };
    let filter = Filter::Planes2;
    assert_eq!(refused_behind(filter, &header(0x80, &window_18)), too_much);
    let one_segment = header(0xA0, &(1u32 << 18).to_le_bytes());
    assert_eq!(refused_behind(filter, &one_segment), too_much);
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

/// A frame of every kind and maker, and what it was made of.
fn frames_of_all_kinds(len: usize) -> Vec<(Vec<u8>, Encoded, Vec<u8>)> {
    let makers = [
        (AUTO, vec![0; len]),
        (NO_FILTER, vec![0; len]),
        (at_level(Level::None), random(5, len)),
        (NO_FILTER, random(5, len)),
        (at_level(Level::Zstd(1)), text(5, len)),
        (NO_FILTER, text(5, len)),
        (AUTO, weights(5, 2, len)),
        (AUTO, weights(5, 4, len)),
        (WITH_LIBZSTD, weights(5, 2, len)),
        (at_level(Level::Zstd(3)), weights(5, 4, len)),
    ];
    let made = makers.into_iter().map(|(settings, chunk)| {
        let (frame, encoded) = frame_by(settings, &chunk);
        assert_is_of(&frame, &encoded, &chunk);
        (frame, encoded, chunk)
    });
    made.collect()
}

#[test]
fn content_longer_or_shorter_than_promised_is_refused() {
    for (frame, encoded, chunk) in frames_of_all_kinds(10 * KIB) {
        for wrong in [0, chunk.len() - 1, chunk.len() + 1, 10 * chunk.len()] {
            let error = decode(&frame, encoded.filter, encoded.digest, wrong).unwrap_err();
            let (found, expected) = (chunk.len() as u64, wrong as u64);
            assert_eq!(error, FrameError::ContentSize { found, expected });
        }
    }
    // The header keeps its promise, the blocks do not: ten times as much, and half as much.
    for filter in Filter::ALL {
        for block_len in [10_000u32, 500, 1000] {
            let rle = (1 | 1 << 1 | block_len << 3).to_le_bytes();
            let mut frame = header(if filter == Filter::None { 0x84 } else { 0x80 }, &[0x38]);
            frame.extend_from_slice(&1000u32.to_le_bytes());
            frame.extend_from_slice(&[rle[0], rle[1], rle[2], 0]);
            if filter == Filter::None {
                let mut checksum = ContentChecksum::new();
                checksum.update(&[0; 1000]);
                frame.extend_from_slice(&checksum.finish().to_le_bytes());
            }
            let read = decode(&frame, filter, Digest::of(&[0; 1000]), 1000);
            match (block_len, read) {
                (1000, Ok(zeros)) => assert!(zeros == [0; 1000]),
                (10_000 | 500, Err(FrameError::Damaged { .. } | FrameError::Len { .. })) => {}
                (_, other) => panic!("{filter:?} {block_len}: {other:?}"),
            }
        }
    }
}

#[test]
fn more_or_less_than_one_frame_is_refused() {
    for (frame, encoded, chunk) in frames_of_all_kinds(10 * KIB) {
        let twice = [frame.clone(), frame.clone()].concat();
        let and_garbage = [frame.as_slice(), b"x"].concat();
        let skippable = [0x5e, 0x2a, 0x4d, 0x18, 0, 0, 0, 0];
        let and_empty_skippable = [frame.as_slice(), &skippable].concat();
        for longer in [&twice, &and_garbage, &and_empty_skippable] {
            let error = decode(longer, encoded.filter, encoded.digest, chunk.len()).unwrap_err();
            let (found, expected) = (frame.len(), longer.len());
            assert_eq!(error, FrameError::Span { found, expected });
        }
        for len in 0..frame.len() {
            let cut = &frame[..len];
            assert!(decode(cut, encoded.filter, encoded.digest, chunk.len()).is_err());
        }
    }
}

#[test]
fn a_good_frame_of_another_chunk_is_refused() {
    for (frame, encoded, chunk) in frames_of_all_kinds(10 * KIB) {
        let expected = Digest::of(b"another");
        let found = encoded.digest;
        assert_eq!(
            decode(&frame, encoded.filter, expected, chunk.len()),
            Err(FrameError::Digest { found, expected })
        );
        // And so is one behind another filter than the table says.
        if encoded.kind == FrameKind::Zstd {
            for filter in Filter::ALL {
                let read = decode(&frame, filter, encoded.digest, chunk.len());
                assert_eq!(read.is_ok(), filter == encoded.filter);
            }
        }
    }
}

#[test]
fn any_damaged_byte_is_refused_or_harmless() {
    let mut decoder = Decoder::new().unwrap();
    for (frame, encoded, chunk) in frames_of_all_kinds(2 * KIB) {
        let mut out = vec![0; chunk.len()];
        for at in 0..frame.len() {
            for bit in 0..8 {
                let mut damaged = frame.clone();
                damaged[at] ^= 1 << bit;
                if decoder
                    .decode(&damaged, encoded.filter, encoded.digest, &mut out)
                    .is_ok()
                {
                    // The descriptor's unused bit, another legal window, padding in an entropy table, a checksum that our reader passes over.
                    assert!(out == chunk);
                }
            }
        }
    }
}

/// What our reader makes of a frame by itself; `None` when it leaves it to libzstd.
fn read_by_hand(frame: &[u8], filter: Filter, raw_len: usize) -> Option<(Digest, Vec<u8>)> {
    let header = check_header(frame, filter, raw_len as u64).ok()?;
    let mut out = vec![0xA5; raw_len];
    let digest = Reader::new().read(frame, header, filter, &mut out)?;
    Some((digest, out))
}

/// What libzstd makes of it; a wrong content checksum aside, which our reader does not look at.
fn read_by_libzstd(frame: &[u8], filter: Filter, raw_len: usize) -> Option<Vec<u8>> {
    let mut without_checksum = frame.to_vec();
    if without_checksum[4] & CHECKSUM_FLAG != 0 {
        without_checksum[4] &= !CHECKSUM_FLAG;
        without_checksum.truncate(frame.len() - CONTENT_CHECKSUM_LEN);
    }
    let mut content = vec![0; raw_len];
    let mut libzstd = Decompressor::new().unwrap();
    libzstd.whole(&without_checksum, &mut content).ok()?;
    Some(undo_planes(&content, filter))
}

#[test]
fn our_reader_reads_our_frames_by_itself() {
    for len in [10 * KIB, MIB, MIB + 3] {
        for (frame, encoded, chunk) in frames_of_all_kinds(len) {
            assert!(read_by_libzstd(&frame, encoded.filter, len).unwrap() == chunk);
            // Repetitions are libzstd's business.
            if let Some((digest, raw)) = read_by_hand(&frame, encoded.filter, len) {
                assert!(digest == encoded.digest && raw == chunk);
            }
        }
        for width in [2, 4] {
            let chunk = weights(6, width, len);
            let (frame, encoded) = frame_by(AUTO, &chunk);
            assert!(read_by_hand(&frame, encoded.filter, len).is_some());
        }
    }
}

/// Our writer, whatever a sample would say.
fn write(filter: Filter, dense_bits: f32, chunk: &[u8]) -> Vec<u8> {
    write_with(&mut Writer::new(), filter, dense_bits, chunk)
}

fn write_with(writer: &mut Writer, filter: Filter, dense_bits: f32, chunk: &[u8]) -> Vec<u8> {
    let mut buffer = vec![0; 2 * frame_bound(chunk.len())];
    let mut out = Growing::new(&mut buffer);
    let mut seen = Vec::new();
    let see = |unit: &[u8]| seen.extend_from_slice(unit);
    let has_checksum = filter == Filter::None;
    writer
        .write((filter, dense_bits), chunk, has_checksum, &mut out, see)
        .unwrap();
    assert!(seen == chunk);
    if has_checksum {
        let mut checksum = ContentChecksum::new();
        checksum.update(chunk);
        out.put(&checksum.finish().to_le_bytes()).unwrap();
    }
    let (len, crc64) = out.finish();
    buffer.truncate(len);
    assert_eq!(crc64, Crc64::of(&buffer));
    buffer
}

/// Types and lengths of the blocks, and of compressed ones whether they bring a table.
fn blocks(frame: &[u8]) -> Vec<(BlockType, usize, bool)> {
    let mut at = HAND_HEADER_LEN;
    let mut blocks = Vec::new();
    loop {
        let header = u32::from_le_bytes([frame[at], frame[at + 1], frame[at + 2], 0]);
        let len = (header >> 3) as usize;
        at += BLOCK_HEADER_LEN;
        let (block_type, stored_len) = match header >> 1 & 3 {
            0 => (BlockType::Raw, len),
            1 => (BlockType::Rle, 1),
            _ => (BlockType::Compressed, len),
        };
        let has_table = block_type == BlockType::Compressed && frame[at] & 3 == 2;
        blocks.push((block_type, len, has_table));
        at += stored_len;
        if header & 1 == 1 {
            let has_checksum = frame[4] & CHECKSUM_FLAG != 0;
            assert_eq!(at + checksum_len(has_checksum), frame.len());
            return blocks;
        }
    }
}

fn assert_written(filter: Filter, frame: &[u8], chunk: &[u8]) {
    let (_, by_hand) = read_by_hand(frame, filter, chunk.len()).unwrap();
    assert!(by_hand == chunk, "{filter:?}");
    assert!(
        read_by_libzstd(frame, filter, chunk.len()).unwrap() == chunk,
        "{filter:?}"
    );
}

#[test]
fn a_table_serves_until_another_one_is_sent() {
    // Narrow, wide and again narrow planes, of one plane each.
    let plane = |seed, values: u8| -> Vec<u8> {
        random(seed, PLANE_LEN)
            .iter()
            .map(|byte| 64 + byte % values)
            .collect()
    };
    let chunk = [
        plane(1, 16),
        plane(2, 16),
        random(3, PLANE_LEN),
        plane(4, 16),
        plane(5, 100),
        plane(6, 100),
    ]
    .concat();
    let frame = write(Filter::None, 7.7, &chunk);
    let tables: Vec<_> = blocks(&frame)
        .iter()
        .map(|(block_type, _, has_table)| (*block_type, *has_table))
        .collect();
    let (coded, raw) = (BlockType::Compressed, BlockType::Raw);
    assert_eq!(
        tables,
        [
            (coded, true),
            (coded, false),
            (raw, false),
            (coded, false),
            (coded, true),
            (coded, false)
        ]
    );
    assert_written(Filter::None, &frame, &chunk);
}

#[test]
fn a_table_that_was_not_sent_is_forgotten() {
    // The second plane's sample promises more than the plane keeps: its coded block, with a new table, would not be shorter, so it is raw.
    let narrow: Vec<u8> = random(1, PLANE_LEN).iter().map(|byte| byte % 16).collect();
    let mut misleading = random(2, PLANE_LEN);
    let mut jitter = crate::codec::sample::Jitter::default();
    for line in 0..128 {
        let start = line * 1024 + jitter.below(1024 - 63);
        misleading[start..start + 64]
            .iter_mut()
            .for_each(|byte| *byte = 100 + *byte % 16);
    }
    let other: Vec<u8> = random(3, PLANE_LEN)
        .iter()
        .map(|byte| 100 + byte % 16)
        .collect();
    let chunk = [narrow, misleading, other].concat();
    let frame = write(Filter::None, 7.7, &chunk);
    let found = blocks(&frame);
    assert_eq!(found[1].0, BlockType::Raw, "{found:?}");
    assert_eq!(
        (found[2].0, found[2].2),
        (BlockType::Compressed, true),
        "{found:?}"
    );
    assert_written(Filter::None, &frame, &chunk);
}

#[test]
fn a_block_that_gains_too_little_is_raw() {
    // 225 values: codes save 2 %.
    let plane = |seed| -> Vec<u8> {
        random(seed, PLANE_LEN)
            .iter()
            .map(|byte| byte % 225)
            .collect()
    };
    let narrow = plane(3).iter().map(|byte| byte % 16).collect();
    let chunk = [plane(1), plane(2), narrow].concat();
    let frame = write(Filter::None, 8.0, &chunk);
    let found: Vec<_> = blocks(&frame)
        .iter()
        .map(|(block_type, _, has_table)| (*block_type, *has_table))
        .collect();
    let (coded, raw) = (BlockType::Compressed, BlockType::Raw);
    assert_eq!(found, [(raw, false), (raw, false), (coded, true)]);
    assert_written(Filter::None, &frame, &chunk);
}

#[test]
fn a_table_serves_within_its_frame_only() {
    let plane: Vec<u8> = random(1, PLANE_LEN).iter().map(|byte| byte % 16).collect();
    let chunk = [plane.clone(), plane.clone()].concat();
    let frame = write(Filter::Planes2, 7.7, &undo_planes(&chunk, Filter::Planes2));
    let found = blocks(&frame);
    assert!(found[0].2 && !found[1].2, "{found:?}");
    // The second block alone, which refers to a table that this frame does not have.
    let second = HAND_HEADER_LEN + BLOCK_HEADER_LEN + found[0].1;
    let alone = [hand_header(PLANE_LEN, false).as_slice(), &frame[second..]].concat();
    let mut reader = Reader::new();
    let mut read = |frame: &[u8], len| {
        let header = check_header(frame, Filter::Planes2, len as u64).unwrap();
        reader.read(frame, header, Filter::Planes2, &mut vec![0; len])
    };
    assert!(read(&frame, chunk.len()).is_some());
    assert!(read(&alone, PLANE_LEN).is_none());
}

#[test]
fn a_symbol_that_the_sample_did_not_see_costs_a_second_try_only() {
    let mut chunk: Vec<u8> = random(1, 4 * PLANE_LEN)
        .iter()
        .map(|byte| 100 + byte % 8)
        .collect();
    // Far from all others, in a place that is not sampled, in every plane.
    for plane in 0..4 {
        chunk[plane * PLANE_LEN + 70] = 250;
    }
    let mut jitter = crate::codec::sample::Jitter::default();
    assert!(!(jitter.below(961)..jitter.below(961) + 64).contains(&70));
    let frame = write(Filter::None, 7.7, &chunk);
    let found = blocks(&frame);
    assert!(
        found
            .iter()
            .all(|(block_type, ..)| *block_type == BlockType::Compressed)
    );
    // Once met, it stays known: one more table and no more.
    assert!(
        found.iter().filter(|(.., has_table)| *has_table).count() <= 2,
        "{found:?}"
    );
    assert!(frame.len() < chunk.len() * 2 / 5);
    assert_written(Filter::None, &frame, &chunk);
}

#[test]
fn runs_of_zeros_become_blocks_of_their_own_where_they_are_long() {
    for (values, run_min) in [(255, 256), (16, 512)] {
        for run_len in [run_min - 1, run_min] {
            let mut plane: Vec<u8> = random(7, PLANE_LEN)
                .iter()
                .map(|byte| 1 + byte % values)
                .collect();
            for start in [1000, 50_000, 90_000] {
                plane[start..start + run_len].fill(0);
            }
            // Enough zeros for the sample to see some.
            plane[100_000..110_000].fill(0);
            let frame = write(Filter::None, 7.7, &plane);
            let runs = blocks(&frame);
            let runs = runs
                .iter()
                .filter(|(block_type, ..)| *block_type == BlockType::Rle);
            let expected = if run_len < run_min { 1 } else { 4 };
            assert_eq!(runs.count(), expected, "{values} {run_len}");
            assert_written(Filter::None, &frame, &plane);
        }
    }
}

#[test]
fn zeros_that_stay_in_a_block_are_counted() {
    // Half of it zeros, in runs too short for blocks of their own: a table that forgot them would give them a long code.
    let mut plane: Vec<u8> = random(8, PLANE_LEN)
        .iter()
        .map(|byte| 1 + byte % 16)
        .collect();
    plane.chunks_mut(600).for_each(|row| {
        let half = row.len() / 2;
        row[..half].fill(0);
    });
    let frame = write(Filter::None, 7.7, &plane);
    // Half a bit to one bit for a zero, five for another.
    assert!(
        frame.len() < plane.len() * 7 / 16,
        "{} of {}",
        frame.len(),
        plane.len()
    );
    assert_written(Filter::None, &frame, &plane);
}

#[test]
fn units_that_are_all_zero_are_not_split() {
    for filter in Filter::ALL {
        let unit_len = filter.width() * PLANE_LEN;
        let mut chunk = weights(
            9,
            filter.width().max(2),
            4 * unit_len + 3 * filter.width() + 1,
        );
        chunk[unit_len..3 * unit_len].fill(0);
        let frame = write(filter, 7.7, &chunk);
        let runs = blocks(&frame)
            .iter()
            .filter(|(block_type, len, _)| *block_type == BlockType::Rle && *len == BLOCK_LEN_MAX)
            .count();
        assert_eq!(runs, 2 * filter.width());
        assert_written(filter, &frame, &chunk);
    }
}

#[test]
fn chunks_of_any_length_are_split_and_joined() {
    let mut writer = Writer::new();
    let lens = (0..20).chain([
        255,
        256,
        257,
        1023,
        1025,
        2 * PLANE_LEN - 1,
        4 * PLANE_LEN,
        4 * PLANE_LEN + 1,
        5 * PLANE_LEN + 7,
    ]);
    for len in lens {
        for filter in Filter::ALL {
            for chunk in [weights(10, 2, len), random(10, len), vec![3; len]] {
                let frame = write_with(&mut writer, filter, 7.7, &chunk);
                assert_written(filter, &frame, &chunk);
            }
        }
    }
}

#[test]
fn small_chunks_leave_what_is_behind_their_room_alone() {
    for settings in [
        AUTO,
        WITH_LIBZSTD,
        at_level(Level::MaxRatio),
        at_level(Level::Zstd(3)),
    ] {
        for len in [1, 13, 64, 100, 1000] {
            for seed in 0..10 {
                // Asserts it.
                assert_round_trip_of_any_kind(settings, &weights(seed, 4, len));
            }
        }
    }
}

fn assert_round_trip_of_any_kind(settings: Settings, chunk: &[u8]) {
    let (frame, encoded) = frame_by(settings, chunk);
    assert_is_of(&frame, &encoded, chunk);
}

#[test]
fn planes_that_were_dense_once_are_looked_at_again() {
    // Dense lower planes, then lower planes of zeros, then of few values, then dense ones again.
    let unit = 2 * PLANE_LEN;
    let mut chunk = weights(11, 2, 6 * unit);
    chunk[2 * unit..3 * unit]
        .iter_mut()
        .step_by(2)
        .for_each(|lower| *lower = 0);
    chunk[3 * unit..4 * unit]
        .iter_mut()
        .step_by(2)
        .for_each(|lower| *lower %= 8);
    let frame = write(Filter::Planes2, 7.7, &chunk);
    let found: Vec<_> = blocks(&frame)
        .iter()
        .map(|(block_type, ..)| *block_type)
        .collect();
    let (coded, raw, rle) = (BlockType::Compressed, BlockType::Raw, BlockType::Rle);
    assert_eq!(
        found,
        [
            raw, coded, raw, coded, rle, coded, coded, coded, raw, coded, raw, coded
        ]
    );
    assert_written(Filter::Planes2, &frame, &chunk);
}

#[test]
fn a_frame_that_outgrows_its_room_is_given_up() {
    let chunk = weights(12, 2, MIB);
    let whole = write(Filter::Planes2Rotated, 7.7, &chunk);
    let mut writer = Writer::new();
    for room in (0..whole.len()).step_by(977).chain([whole.len() - 1]) {
        let mut buffer = vec![0; room];
        let mut out = Growing::new(&mut buffer);
        let written = writer.write(
            (Filter::Planes2Rotated, 7.7),
            &chunk,
            false,
            &mut out,
            |_| (),
        );
        assert!(written.is_none(), "{room}");
    }
}

#[test]
fn blocks_that_no_writer_of_ours_makes_are_left_to_libzstd() {
    let chunk = weights(13, 2, 2 * PLANE_LEN);
    let frame = write(Filter::Planes2Rotated, 7.7, &chunk);
    let read = |frame: &[u8]| read_by_hand(frame, Filter::Planes2Rotated, chunk.len()).is_some();
    assert!(read(&frame));
    // A last block in the middle, a reserved block type, a treeless block without a table before it, a block that promises too much.
    let first = HAND_HEADER_LEN;
    let second = first + BLOCK_HEADER_LEN + PLANE_LEN;
    for (at, flip) in [
        (first, 1),
        (second, 1),
        (first, 0b110),
        (second + BLOCK_HEADER_LEN, 1),
        (first + 2, 0x80),
    ] {
        let mut damaged = frame.clone();
        damaged[at] ^= flip;
        assert!(!read(&damaged), "{at} {flip}");
        assert!(
            read_by_libzstd(&damaged, Filter::Planes2Rotated, chunk.len()).is_none(),
            "{at} {flip}"
        );
    }
}

fn any_chunk() -> impl Strategy<Value = Vec<u8>> {
    let piece = (0..7u8, any::<u64>(), 0..150_000usize).prop_map(|(kind, seed, len)| match kind {
        0 => vec![0; len],
        1 => random(seed, len),
        2 => text(seed, len),
        3 => weights(seed, 2, len),
        4 => weights(seed, 4, len),
        5 => scattered_zeros(seed, len),
        _ => repeated(seed, 1 + len / 10, len),
    });
    proptest::collection::vec(piece, 0..6).prop_map(|pieces| pieces.concat())
}

/// Weights with rows of zeros.
fn scattered_zeros(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = weights(seed, 4, len);
    let mut numbers = Seeded::new(seed);
    for row in bytes.chunks_mut(1536) {
        if !numbers.next().is_multiple_of(3) {
            row.fill(0);
        }
    }
    bytes
}

fn any_settings() -> impl Strategy<Value = Settings> {
    let level = prop_oneof![
        Just(Level::None),
        Just(Level::Auto),
        Just(Level::MaxRatio),
        (-20..10).prop_map(Level::Zstd)
    ];
    let filter = prop_oneof![Just(FilterChoice::Auto), Just(FilterChoice::None)];
    let plane_coder = prop_oneof![Just(PlaneCoder::Own), Just(PlaneCoder::Libzstd)];
    (level, filter, plane_coder).prop_map(|(level, filter, plane_coder)| Settings {
        level,
        filter,
        plane_coder,
    })
}

fn any_filter() -> impl Strategy<Value = Filter> {
    proptest::sample::select(&Filter::ALL)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn round_trip(chunks in proptest::collection::vec(any_chunk(), 1..3), settings in any_settings(), effort in 0.0..30.0f32) {
        let mut encoder = Encoder::new(settings).unwrap();
        for chunk in chunks {
            let (frame, encoded) = frame_with(&mut encoder, &chunk, Effort(effort));
            assert_is_of(&frame, &encoded, &chunk);
            prop_assert!(settings.filter == FilterChoice::Auto || encoded.filter == Filter::None);
        }
    }

    #[test]
    fn our_writer_is_read_alike_by_our_reader_and_libzstd(chunk in any_chunk(), filter in any_filter(), dense_bits in 0.0..8.0f32) {
        let frame = write(filter, dense_bits, &chunk);
        assert_written(filter, &frame, &chunk);
    }

    #[test]
    fn where_our_reader_accepts_damage_libzstd_gives_the_same(
        chunk in any_chunk(), filter in any_filter(), own in any::<bool>(),
        flips in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..4), cut in proptest::option::weighted(0.2, any::<proptest::sample::Index>()),
    ) {
        // Of libzstd's frames, those behind whatever filter the sample chose.
        let (mut frame, filter) = if own {
            (write(filter, 7.7, &chunk), filter)
        } else {
            let (frame, encoded) = frame_by(WITH_LIBZSTD, &chunk);
            (frame, encoded.filter)
        };
        // Headers and tables are where it is interesting: half the damage goes there.
        for (index, (at, new)) in flips.iter().enumerate() {
            let range = if index % 2 == 0 { frame.len() } else { frame.len().min(300) };
            frame[at.index(range)] = *new;
        }
        if let Some(cut) = cut {
            frame.truncate(cut.index(frame.len()) + 1);
        }
        if let Some((digest, raw)) = read_by_hand(&frame, filter, chunk.len()) {
            prop_assert!(digest == Digest::of(&raw));
            prop_assert!(read_by_libzstd(&frame, filter, chunk.len()) == Some(raw));
        }
        // Whoever reads it in the end: no panic.
        let _ = decode(&frame, filter, Digest::of(&chunk), chunk.len());
    }

    #[test]
    fn arbitrary_bytes_never_panic(start in 0..3u8, bytes in proptest::collection::vec(any::<u8>(), 0..300), len in 0..2000usize, filter in any_filter()) {
        let mut frame = match start {
            0 => Vec::new(),
            1 => MAGIC.to_le_bytes().to_vec(),
            _ => hand_header(len, filter == Filter::None).to_vec(),
        };
        frame.extend_from_slice(&bytes);
        prop_assert!(decode(&frame, filter, Digest::of(b"nothing has this digest"), len).is_err());
    }
}
