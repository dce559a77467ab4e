//! The hot pure code, one thread, one 4 MiB chunk at a time: frames out and back, digest, checksum. `cargo bench --bench micro`.

#![allow(missing_docs, reason = "criterion's macros make undocumented items")]

use std::hint::black_box;

use ckptstream::codec::frame::write_raw;
use ckptstream::codec::{
    Body, Crc64, Decoder, Digest, Effort, Encoder, Level, Settings, frame_bound,
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const CHUNK_LEN: usize = 4 << 20;

/// SplitMix64.
fn numbers(mut state: u64) -> impl Iterator<Item = u64> {
    std::iter::repeat_with(move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

fn random_chunk() -> Vec<u8> {
    numbers(1)
        .flat_map(u64::to_le_bytes)
        .take(CHUNK_LEN)
        .collect()
}

/// Like bf16 weights: a random mantissa and sign, an exponent from a narrow bell.
fn weights_chunk() -> Vec<u8> {
    let element = |number: u64| {
        let below_one = (number >> 16).trailing_zeros().min(15);
        let exponent = 124 - u16::try_from(below_one).expect("at most 15");
        let sign_and_mantissa = u16::from_le_bytes([number.to_le_bytes()[0], 0]);
        (sign_and_mantissa & 0x80) << 8 | exponent << 7 | (sign_and_mantissa & 0x7F)
    };
    numbers(2)
        .map(element)
        .flat_map(u16::to_le_bytes)
        .take(CHUNK_LEN)
        .collect()
}

/// Huffman codes pay, a search for repetitions does not.
const EFFORT: Effort = Effort(5.0);

fn encoder(level: Level) -> Encoder {
    let settings = Settings {
        level,
        ..Settings::default()
    };
    Encoder::new(settings).expect("memory for a context")
}

fn frames(criterion: &mut Criterion) {
    let chunks = [
        ("zero", Level::Auto, vec![0; CHUNK_LEN]),
        ("raw", Level::None, random_chunk()),
        ("random", Level::Auto, random_chunk()),
        ("weights", Level::Auto, weights_chunk()),
    ];
    let mut encode = criterion.benchmark_group("encode");
    encode.throughput(Throughput::Bytes(CHUNK_LEN as u64));
    for (name, level, chunk) in &chunks {
        let mut encoder = encoder(*level);
        let mut frame = vec![0; frame_bound(CHUNK_LEN)];
        encode.bench_function(*name, |bencher| {
            bencher.iter(|| encoder.encode(black_box(chunk), &mut frame, EFFORT));
        });
    }
    encode.finish();

    let mut decode = criterion.benchmark_group("decode");
    decode.throughput(Throughput::Bytes(CHUNK_LEN as u64));
    for (name, level, chunk) in &chunks {
        let mut encoder = encoder(*level);
        let mut frame = vec![0; frame_bound(CHUNK_LEN)];
        let encoded = encoder.encode(chunk, &mut frame, EFFORT);
        if let Body::Raw { checksum } = encoded.body {
            write_raw(chunk, checksum, &mut frame);
        }
        frame.truncate(encoded.len());
        let mut decoder = Decoder::new().expect("memory for a context");
        let mut out = vec![0; CHUNK_LEN];
        decode.bench_function(*name, |bencher| {
            let (filter, digest) = (encoded.filter, encoded.digest);
            bencher.iter(|| decoder.decode(black_box(&frame), filter, digest, &mut out));
        });
    }
    decode.finish();
}

fn checks(criterion: &mut Criterion) {
    let chunk = random_chunk();
    let mut check = criterion.benchmark_group("check");
    check.throughput(Throughput::Bytes(CHUNK_LEN as u64));
    check.bench_function("digest", |bencher| {
        bencher.iter(|| Digest::of(black_box(&chunk)));
    });
    check.bench_function("checksum", |bencher| {
        bencher.iter(|| Crc64::of(black_box(&chunk)));
    });
    check.finish();
}

criterion_group!(benches, frames, checks);
criterion_main!(benches);
