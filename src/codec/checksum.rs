//! The check that the store makes on what it receives.
//!
//! In: stored bytes, part by part. Out: their CRC64NVME, and the one of the whole object combined from its parts', so that nothing is read twice.
//! What can fail: only reading the text forms.
//!
//! Combining is multiplication by a power of x modulo the polynomial, with the powers x^(2^k) in a table: a microsecond, where squaring matrices (as `crc-fast` does) takes nearly as long as summing
//! a chunk once more.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use crc_fast::CrcAlgorithm::Crc64Nvme;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::digest::parse_lower_hex;

/// A CRC64NVME. Its text form is 16 lower-case hex digits, most significant first; S3's headers want [`Crc64::to_base64`].
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Crc64(u64);

impl Crc64 {
    /// The checksum of no bytes; what [`Crc64::combine`] starts from.
    pub const EMPTY: Crc64 = Crc64(0);

    const TEXT_LEN: usize = 16;

    /// The checksum of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(crc_fast::checksum(Crc64Nvme, bytes))
    }

    /// The checksum of our bytes followed by the `other_len` bytes that `other` stands for.
    #[must_use]
    pub fn combine(self, other: Crc64, other_len: u64) -> Self {
        Self(multiply(power(&POWERS, other_len), self.0) ^ other.0)
    }

    /// The checksum of the last `rest_len` of the bytes that we stand for, when `start` is that of those before them.
    #[must_use]
    pub fn without_start(self, start: Crc64, rest_len: u64) -> Self {
        // What `combine` adds to the rest's checksum is its own inverse.
        start.combine(self, rest_len)
    }

    /// The checksum of what stands before the last `rest_len` of the bytes that we stand for, when `rest` is that of those.
    #[must_use]
    pub fn without_end(self, rest: Crc64, rest_len: u64) -> Self {
        Self(multiply(power(&INVERSES, rest_len), self.0 ^ rest.0))
    }

    /// The number.
    pub fn value(self) -> u64 {
        self.0
    }

    /// The checksum with this number.
    pub fn from_value(value: u64) -> Self {
        Self(value)
    }

    /// The form of `x-amz-checksum-crc64nvme`: the eight bytes, most significant first, in base64.
    pub fn to_base64(self) -> String {
        BASE64.encode(self.0.to_be_bytes())
    }

    /// Reads the form of `x-amz-checksum-crc64nvme`.
    ///
    /// # Errors
    /// When the text is not the base64 of exactly eight bytes.
    pub fn from_base64(text: &str) -> Result<Self, BadCrc64> {
        let bytes = BASE64.decode(text).ok();
        let eight = bytes.and_then(|bytes| <[u8; 8]>::try_from(bytes).ok());
        eight
            .map(|eight| Self(u64::from_be_bytes(eight)))
            .ok_or_else(|| BadCrc64(text.to_owned()))
    }
}

/// A [`Crc64`] in the making, for bytes that are seen piece by piece.
#[derive(Clone)]
pub struct Summing(crc_fast::Digest);

impl Summing {
    /// Of no bytes yet.
    pub fn new() -> Self {
        Self(crc_fast::Digest::new(Crc64Nvme))
    }

    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all bytes taken.
    pub fn finish(self) -> Crc64 {
        Crc64(self.0.finalize())
    }
}

impl Default for Summing {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Summing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Summing").finish_non_exhaustive()
    }
}

/// The polynomial, lowest power in the highest bit, as all numbers here.
const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;
const ONE: u64 = 1 << 63;
/// x^8: a byte more.
const X_TO_8: u64 = 1 << 55;

/// What a byte less does: x^8 × this is 1.
const X_TO_MINUS_8: u64 = {
    let mut power = ONE;
    let mut times = 0;
    while times < 8 {
        // One bit back: the polynomial's lowest power is there exactly when the step forward carried.
        power = match power & ONE {
            0 => power << 1,
            _ => (power ^ POLYNOMIAL) << 1 | 1,
        };
        times += 1;
    }
    power
};

/// 256^(2^k), with 256 = x^8: what 2^k bytes more do.
static POWERS: [u64; 64] = squares(X_TO_8);
/// 256^(-2^k): what 2^k bytes less do.
static INVERSES: [u64; 64] = squares(X_TO_MINUS_8);

/// base^(2^k).
const fn squares(base: u64) -> [u64; 64] {
    let mut powers = [base; 64];
    let mut k = 1;
    while k < 64 {
        powers[k] = multiply(powers[k - 1], powers[k - 1]);
        k += 1;
    }
    powers
}

/// a × b modulo the polynomial.
const fn multiply(mut a: u64, mut b: u64) -> u64 {
    let mut product = 0;
    while a != 0 {
        // All ones where the bit is set: a branch would be mispredicted every other time.
        product ^= b & 0_u64.wrapping_sub(a >> 63);
        a <<= 1;
        b = (b >> 1) ^ (POLYNOMIAL & 0_u64.wrapping_sub(b & 1));
    }
    product
}

/// base^n modulo the polynomial, for the base of these squares.
fn power(squares: &[u64; 64], mut n: u64) -> u64 {
    let mut power = ONE;
    for factor in *squares {
        if n == 0 {
            break;
        }
        if n & 1 == 1 {
            power = multiply(factor, power);
        }
        n >>= 1;
    }
    power
}

impl fmt::Display for Crc64 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for Crc64 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Not a text form of a CRC64NVME.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a CRC64NVME; expected 16 lower-case hex digits, or 8 bytes in base64 in a header"
)]
pub struct BadCrc64(pub String);

impl FromStr for Crc64 {
    type Err = BadCrc64;

    /// Takes the one text form that [`Display`](fmt::Display) writes.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_lower_hex::<{ Self::TEXT_LEN }>(text)
            .and_then(|value| u64::try_from(value).ok())
            .map(Self)
            .ok_or_else(|| BadCrc64(text.to_owned()))
    }
}

impl Serialize for Crc64 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Crc64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_value() {
        // The check value of CRC-64/NVME in the CRC catalogue.
        assert_eq!(Crc64::of(b"123456789").value(), 0xae8b_1486_0a79_9888);
        assert_eq!(Crc64::of(b""), Crc64::EMPTY);
    }

    #[test]
    fn text_forms() {
        let crc = Crc64::of(b"123456789");
        assert_eq!(crc.to_string(), "ae8b14860a799888");
        assert_eq!(crc.to_base64(), "rosUhgp5mIg=");
        assert_eq!("ae8b14860a799888".parse(), Ok(crc));
        assert_eq!(Crc64::from_base64("rosUhgp5mIg="), Ok(crc));
        for bad in ["", "AE8B14860A799888", "rosUhgp5mIg", "rosUhgp5mIiI"] {
            assert!(bad.parse::<Crc64>().is_err());
            assert!(Crc64::from_base64(bad).is_err());
        }
    }

    proptest! {
        #[test]
        fn combined_parts_are_the_whole(parts in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 0..6)) {
            let mut summing = Summing::new();
            parts.iter().for_each(|part| summing.update(part));
            prop_assert_eq!(summing.finish(), Crc64::of(&parts.concat()));
            let combined = parts.iter().fold(Crc64::EMPTY, |sum, part| sum.combine(Crc64::of(part), part.len() as u64));
            prop_assert_eq!(combined, Crc64::of(&parts.concat()));
        }

        #[test]
        fn either_end_of_a_whole_follows_from_the_other(start in proptest::collection::vec(any::<u8>(), 0..200), rest in proptest::collection::vec(any::<u8>(), 0..200)) {
            let whole = Crc64::of(&[&start[..], &rest[..]].concat());
            prop_assert_eq!(whole.without_start(Crc64::of(&start), rest.len() as u64), Crc64::of(&rest));
            prop_assert_eq!(whole.without_end(Crc64::of(&rest), rest.len() as u64), Crc64::of(&start));
        }

        #[test]
        fn bytes_less_undo_bytes_more(one: u64, other: u64, len: u64) {
            let combined = Crc64(one).combine(Crc64(other), len);
            prop_assert_eq!(combined.without_end(Crc64(other), len), Crc64(one));
        }

        #[test]
        fn combining_agrees_with_the_library_at_any_length(one: u64, other: u64, len: u64) {
            let combined = Crc64(one).combine(Crc64(other), len).value();
            prop_assert_eq!(combined, crc_fast::checksum_combine(Crc64Nvme, one, other, len));
        }
    }
}
