//! Seeded bytes for tests. The golden image is made of them, so what a seed gives never changes.

use super::{Encoded, Encoder, frame_bound};

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

/// The frame of a chunk in a buffer of its own.
pub(crate) fn frame_of(encoder: &mut Encoder, chunk: &[u8]) -> (Vec<u8>, Encoded) {
    let mut frame = vec![0; frame_bound(chunk.len())];
    let encoded = encoder.encode(chunk, &mut frame);
    frame.truncate(encoded.len);
    (frame, encoded)
}
