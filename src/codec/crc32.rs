//! The checks of 32 bits that stores make where they do not know CRC64NVME.
//!
//! In: a part's bytes. Out: their CRC32C or CRC32, and the one of the whole object combined from its parts'. What can fail: only reading the text form.
//!
//! They are taken by whoever sends a part, and only when a store wants them: everything else goes by [`super::Crc64`].

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use crc_fast::CrcAlgorithm;

/// Which one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crc32Kind {
    /// CRC32C (Castagnoli).
    Crc32c,
    /// CRC32, as in zip and Ethernet.
    Crc32,
}

impl Crc32Kind {
    fn algorithm(self) -> CrcAlgorithm {
        match self {
            Self::Crc32c => CrcAlgorithm::Crc32Iscsi,
            Self::Crc32 => CrcAlgorithm::Crc32IsoHdlc,
        }
    }

    /// Lowest power in the highest bit, as all numbers here.
    fn polynomial(self) -> u32 {
        match self {
            Self::Crc32c => 0x82f6_3b78,
            Self::Crc32 => 0xedb8_8320,
        }
    }

    /// a × b modulo the polynomial.
    fn multiply(self, mut a: u32, mut b: u32) -> u32 {
        let mut product = 0;
        while a != 0 {
            if a >> 31 == 1 {
                product ^= b;
            }
            a <<= 1;
            b = (b >> 1) ^ (self.polynomial() * (b & 1));
        }
        product
    }
}

/// A CRC of 32 bits. Its text form is that of S3's headers: four bytes, most significant first, in base64.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crc32 {
    kind: Crc32Kind,
    value: u32,
}

impl Crc32 {
    /// Of these pieces, one behind the other.
    pub fn of<'a>(kind: Crc32Kind, pieces: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut digest = crc_fast::Digest::new(kind.algorithm());
        pieces.into_iter().for_each(|piece| digest.update(piece));
        let value = u32::try_from(digest.finalize()).expect("it has 32 bits");
        Self { kind, value }
    }

    /// Which one it is.
    pub fn kind(self) -> Crc32Kind {
        self.kind
    }

    /// The checksum of our bytes followed by the `other_len` bytes that `other` stands for.
    #[must_use]
    pub fn combine(self, other: Self, other_len: u64) -> Self {
        let (mut power, mut square, mut n) = (1 << 31, 1 << 23, other_len);
        while n != 0 {
            if n & 1 == 1 {
                power = self.kind.multiply(square, power);
            }
            square = self.kind.multiply(square, square);
            n >>= 1;
        }
        let value = self.kind.multiply(power, self.value) ^ other.value;
        Self { value, ..self }
    }

    /// The form of `x-amz-checksum-crc32c` and `x-amz-checksum-crc32`.
    pub fn to_base64(self) -> String {
        BASE64.encode(self.value.to_be_bytes())
    }

    /// Reads that form; `None` for anything but four bytes in base64, such as a composite value.
    pub fn from_base64(kind: Crc32Kind, text: &str) -> Option<Self> {
        let four = <[u8; 4]>::try_from(BASE64.decode(text).ok()?).ok()?;
        let value = u32::from_be_bytes(four);
        Some(Self { kind, value })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KINDS: [Crc32Kind; 2] = [Crc32Kind::Crc32c, Crc32Kind::Crc32];

    #[test]
    fn known_values() {
        let of = |kind| Crc32::of(kind, [&b"1234"[..], b"", b"56789"]);
        // The check values of CRC-32/ISCSI and CRC-32/ISO-HDLC in the CRC catalogue.
        assert_eq!(of(Crc32Kind::Crc32c).value, 0xe306_9283);
        assert_eq!(of(Crc32Kind::Crc32).value, 0xcbf4_3926);
    }

    #[test]
    fn text_forms() {
        let sum = Crc32::of(Crc32Kind::Crc32c, [&b"123456789"[..]]);
        assert_eq!(sum.to_base64(), "4waSgw==");
        assert_eq!(Crc32::from_base64(sum.kind, "4waSgw=="), Some(sum));
        for bad in ["", "4waSgw==-2", "4waSgw", "rosUhgp5mIg=", "nonsense"] {
            assert_eq!(Crc32::from_base64(sum.kind, bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn combined_parts_are_the_whole(parts in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 1..6)) {
            for kind in KINDS {
                let sums = parts.iter().map(|part| (Crc32::of(kind, [&part[..]]), part.len() as u64));
                let combined = sums.reduce(|(sum, len), (other, other_len)| (sum.combine(other, other_len), len + other_len));
                let whole = Crc32::of(kind, parts.iter().map(|part| &part[..]));
                prop_assert_eq!(combined.map(|(sum, _)| sum), Some(whole));
            }
        }

        #[test]
        fn combining_agrees_with_the_library_at_any_length(one: u32, other: u32, len: u64) {
            for kind in KINDS {
                let sum = |value| Crc32 { kind, value };
                let theirs = crc_fast::checksum_combine(kind.algorithm(), one.into(), other.into(), len);
                prop_assert_eq!(u64::from(sum(one).combine(sum(other), len).value), theirs);
            }
        }
    }
}
