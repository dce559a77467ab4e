//! Seeded bytes for tests. The golden image is made of them, so what a seed gives never changes.

use super::frame::write_raw;
use super::{Body, Effort, Encoded, Encoder, frame_bound};

/// SplitMix64: small, and easy to write again in another language.
#[derive(Debug, Clone)]
pub(crate) struct Seeded(u64);

impl Seeded {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// `len` bytes that no compressor gains on.
pub(crate) fn random(seed: u64, len: usize) -> Vec<u8> {
    let mut numbers = Seeded::new(seed);
    let mut bytes: Vec<u8> = std::iter::repeat_with(|| numbers.next().to_le_bytes())
        .take(len.div_ceil(8))
        .flatten()
        .collect();
    bytes.truncate(len);
    bytes
}

/// `len` bytes of words: compressible, not repetitive.
pub(crate) fn text(seed: u64, len: usize) -> Vec<u8> {
    const WORDS: [&[u8]; 8] = [
        b"chunk ", b"frame ", b"part ", b"extent ", b"lock ", b"commit ", b"ring ", b"seal ",
    ];
    let mut numbers = Seeded::new(seed);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        let mut draw = numbers.next();
        for _ in 0..16 {
            bytes.extend_from_slice(WORDS[(draw % 8) as usize]);
            draw >>= 3;
        }
    }
    bytes.truncate(len);
    bytes
}

/// `len` bytes that repeat a random stretch of `period` bytes.
pub(crate) fn repeated(seed: u64, period: usize, len: usize) -> Vec<u8> {
    let stretch = random(seed, period);
    stretch.iter().copied().cycle().take(len).collect()
}

/// `len` bytes like weights in elements of `width` bytes (2: bf16, 4: fp32): sign and mantissa are noise, the exponent takes a few values.
pub(crate) fn weights(seed: u64, width: usize, len: usize) -> Vec<u8> {
    const EXPONENT: u64 = 0xff << 7;
    let mut numbers = Seeded::new(seed);
    let mut bytes = Vec::with_capacity(len + width);
    while bytes.len() < len {
        let draw = numbers.next();
        // The upper half of an fp32 is a bf16.
        let exponent = 120 - u64::from((draw >> 48).leading_zeros() % 16);
        let upper = (draw & !EXPONENT | exponent << 7) & 0xffff;
        let element = (upper << 48 | draw >> 16 & 0xffff_ffff << 16) >> (64 - 8 * width);
        bytes.extend_from_slice(&element.to_le_bytes()[..width]);
    }
    bytes.truncate(len);
    bytes
}

/// The frame of a chunk in a buffer of its own, made with an effort that is worth whatever gains something.
pub(crate) fn frame_of(encoder: &mut Encoder, chunk: &[u8]) -> (Vec<u8>, Encoded) {
    frame_with(encoder, chunk, Effort(50.0))
}

/// The frame of a chunk in a buffer of its own.
pub(crate) fn frame_with(
    encoder: &mut Encoder,
    chunk: &[u8],
    effort: Effort,
) -> (Vec<u8>, Encoded) {
    // A byte more than there must be, to see that it is left alone.
    let mut frame = vec![0xA5; frame_bound(chunk.len()) + 1];
    let encoded = encoder.encode(chunk, &mut frame, effort);
    if let Body::Raw { checksum } = encoded.body {
        write_raw(chunk, checksum, &mut frame);
    }
    assert_eq!(frame.last(), Some(&0xA5), "written past the bound");
    frame.truncate(encoded.len());
    (frame, encoded)
}
