//! The hot pure code, one thread: frames out and back, one 4 MiB chunk at a time, and the loops of [`kernels`] from the cache and from memory.
//! `cargo bench --bench micro`.

#![allow(missing_docs, reason = "criterion's macros make undocumented items")]

mod kernels;

use std::hint::black_box;

use ckptstream::codec::frame::write_raw;
use ckptstream::codec::{Body, Decoder, Effort, Encoder, Level, Settings, frame_bound};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const CHUNK_LEN: usize = 4 << 20;

/// Like bf16 weights: a random mantissa and sign, an exponent from a narrow bell.
fn weights_chunk() -> Vec<u8> {
    let element = |number: u64| {
        let below_one = (number >> 16).trailing_zeros().min(15);
        let exponent = 124 - u16::try_from(below_one).expect("at most 15");
        let sign_and_mantissa = u16::from_le_bytes([number.to_le_bytes()[0], 0]);
        (sign_and_mantissa & 0x80) << 8 | exponent << 7 | (sign_and_mantissa & 0x7F)
    };
    kernels::numbers(2)
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
        ("raw", Level::None, kernels::random(CHUNK_LEN)),
        ("random", Level::Auto, kernels::random(CHUNK_LEN)),
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

/// From a cache that the digest has just filled, and from memory.
fn loops(criterion: &mut Criterion) {
    for (place, len) in [("cache", 512 << 10), ("memory", 128 << 20)] {
        let mut group = criterion.benchmark_group(place);
        group.throughput(Throughput::Bytes(len as u64));
        for each in kernels::all() {
            let name = each.name.clone();
            let mut pass = each.over(len);
            group.bench_function(name, |bencher| bencher.iter(&mut pass));
        }
        group.finish();
    }
}

criterion_group!(benches, frames, loops);
criterion_main!(benches);
