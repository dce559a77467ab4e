//! Our own end-to-end check of raw bytes.
//!
//! In: a chunk, a frame table or a manifest. Out: 128 bits that change when any of the bytes does. XXH3-128 finds damage, not malice: it is not
//! cryptographic, and the fields that hold it name the algorithm. What can fail: only reading the text form.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use twox_hash::XxHash3_128;

/// XXH3-128 with seed 0. Its text form is 32 lower-case hex digits, the one that `xxhsum -H2` prints.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(u128);

impl Digest {
    /// Digits of the text form.
    pub const TEXT_LEN: usize = 32;

    /// The digest of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(XxHash3_128::oneshot(bytes))
    }

    /// 64 of its bits.
    #[expect(clippy::cast_possible_truncation, reason = "the low half is meant")]
    pub(crate) fn low_bits(self) -> u64 {
        self.0 as u64
    }
}

/// A [`Digest`] in the making, for bytes that are seen piece by piece.
#[derive(Clone, Default)]
pub struct Digesting(XxHash3_128);

impl Digesting {
    /// Of no bytes yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The digest of all bytes taken.
    pub fn finish(self) -> Digest {
        Digest(self.0.finish_128())
    }
}

impl fmt::Debug for Digesting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Digesting").finish_non_exhaustive()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Not the text form of a digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a digest; expected 32 lower-case hex digits")]
pub struct BadDigest(pub String);

impl FromStr for Digest {
    type Err = BadDigest;

    /// Takes the one text form that [`Display`](fmt::Display) writes, so that equal digests have equal texts.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_lower_hex::<{ Self::TEXT_LEN }>(text)
            .map(Self)
            .ok_or_else(|| BadDigest(text.to_owned()))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(de::Error::custom)
    }
}

/// The number that exactly `DIGITS` (at most 32) lower-case hex digits write, or `None` for any other text.
pub(super) fn parse_lower_hex<const DIGITS: usize>(text: &str) -> Option<u128> {
    let is_lower_hex = |digit: u8| matches!(digit, b'0'..=b'9' | b'a'..=b'f');
    (text.len() == DIGITS && text.bytes().all(is_lower_hex))
        .then(|| u128::from_str_radix(text, 16).ok())
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        // From the reference implementation's sanity table (xxHash 0.8, seed 0) and `xxhsum -H2`.
        assert_eq!(
            Digest::of(b"").to_string(),
            "99aa06d3014798d86001c324468d497f"
        );
    }

    #[test]
    fn pieces_give_the_digest_of_the_whole() {
        let bytes: Vec<u8> = (0..100_000u32)
            .map(|n| n.wrapping_mul(n).to_le_bytes()[2])
            .collect();
        for piece_len in [1, 63, 4096, 100_000] {
            let mut digesting = Digesting::new();
            bytes
                .chunks(piece_len)
                .for_each(|piece| digesting.update(piece));
            assert_eq!(digesting.finish(), Digest::of(&bytes));
        }
        assert_eq!(Digesting::new().finish(), Digest::of(b""));
    }

    #[test]
    fn text_form_is_the_only_one() {
        let digest = Digest::of(b"chunk");
        assert_eq!(digest.to_string().parse(), Ok(digest));
        let upper = digest.to_string().to_uppercase();
        for bad in ["", "0", "+9aa06d3014798d86001c324468d497f", &upper] {
            assert_eq!(bad.parse::<Digest>(), Err(BadDigest(bad.to_owned())));
        }
    }
}
