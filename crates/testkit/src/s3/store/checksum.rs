//! S3's checksums: taken while bytes stream in, compared with what the request says, combined over parts.
//!
//! Facts from the S3 user guide, "Checking object integrity": CRC64NVME exists only for the full object, SHA-1 and SHA-256 only as
//! composite, CRC32 and CRC32C as both with composite the usual one. A composite value is the algorithm over the parts' raw values,
//! followed by `-` and their number. A PUT without any checksum gets a CRC64NVME.

use std::collections::{BTreeMap, HashMap};

use base64_simd::STANDARD;
use crc_fast::{CrcAlgorithm, checksum_combine};
use s3s::checksum::ChecksumHasher;
use s3s::crypto::{Checksum as _, Crc32, Crc32c, Crc64Nvme, Sha1, Sha256};
use s3s::dto::{ChecksumAlgorithm, ChecksumType};
use s3s::{S3Error, S3ErrorCode, S3Result, s3_error};
use serde::{Deserialize, Serialize};

/// A checksum algorithm of S3.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Algorithm {
    Crc32,
    Crc32c,
    Crc64Nvme,
    Sha1,
    Sha256,
}

impl Algorithm {
    const ALL: [Self; 5] = [
        Self::Crc32,
        Self::Crc32c,
        Self::Crc64Nvme,
        Self::Sha1,
        Self::Sha256,
    ];

    /// As in `x-amz-checksum-algorithm`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Crc32 => "CRC32",
            Self::Crc32c => "CRC32C",
            Self::Crc64Nvme => "CRC64NVME",
            Self::Sha1 => "SHA1",
            Self::Sha256 => "SHA256",
        }
    }

    /// The header that carries a value.
    pub(super) fn header(self) -> &'static str {
        match self {
            Self::Crc32 => "x-amz-checksum-crc32",
            Self::Crc32c => "x-amz-checksum-crc32c",
            Self::Crc64Nvme => "x-amz-checksum-crc64nvme",
            Self::Sha1 => "x-amz-checksum-sha1",
            Self::Sha256 => "x-amz-checksum-sha256",
        }
    }

    pub(super) fn parse(dto: &ChecksumAlgorithm) -> S3Result<Self> {
        Self::ALL
            .into_iter()
            .find(|algorithm| algorithm.name() == dto.as_str())
            .ok_or_else(|| {
                s3_error!(
                    InvalidRequest,
                    "checksum algorithm {} is not supported",
                    dto.as_str()
                )
            })
    }

    pub(super) fn dto(self) -> ChecksumAlgorithm {
        ChecksumAlgorithm::from_static(self.name())
    }

    fn crc(self) -> Option<CrcAlgorithm> {
        match self {
            Self::Crc32 => Some(CrcAlgorithm::Crc32IsoHdlc),
            Self::Crc32c => Some(CrcAlgorithm::Crc32Iscsi),
            Self::Crc64Nvme => Some(CrcAlgorithm::Crc64Nvme),
            Self::Sha1 | Self::Sha256 => None,
        }
    }

    fn over(self, data: &[u8]) -> Vec<u8> {
        match self {
            Self::Crc32 => Crc32::checksum(data).to_vec(),
            Self::Crc32c => Crc32c::checksum(data).to_vec(),
            Self::Crc64Nvme => Crc64Nvme::checksum(data).to_vec(),
            Self::Sha1 => Sha1::checksum(data).to_vec(),
            Self::Sha256 => Sha256::checksum(data).to_vec(),
        }
    }
}

/// Whether an object's checksum covers its bytes or its parts' checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ChecksumKind {
    FullObject,
    Composite,
}

impl ChecksumKind {
    pub(super) fn dto(self) -> ChecksumType {
        ChecksumType::from_static(match self {
            Self::FullObject => ChecksumType::FULL_OBJECT,
            Self::Composite => ChecksumType::COMPOSITE,
        })
    }

    /// The kind of an upload: what was asked for, where S3 has it, or the algorithm's usual one.
    pub(super) fn choose(
        algorithm: Option<Algorithm>,
        wanted: Option<&ChecksumType>,
    ) -> S3Result<Self> {
        let usual = match algorithm {
            None | Some(Algorithm::Crc64Nvme) => Self::FullObject,
            Some(_) => Self::Composite,
        };
        let kind = match wanted.map(ChecksumType::as_str) {
            None => usual,
            Some(ChecksumType::FULL_OBJECT) => Self::FullObject,
            Some(ChecksumType::COMPOSITE) => Self::Composite,
            Some(other) => {
                return Err(s3_error!(
                    InvalidRequest,
                    "checksum type {other} is not known"
                ));
            }
        };
        let exists = match algorithm {
            None => wanted.is_none(),
            Some(Algorithm::Crc64Nvme) => kind == Self::FullObject,
            Some(Algorithm::Sha1 | Algorithm::Sha256) => kind == Self::Composite,
            Some(Algorithm::Crc32 | Algorithm::Crc32c) => true,
        };
        if exists {
            Ok(kind)
        } else {
            Err(s3_error!(
                InvalidRequest,
                "this checksum type cannot be used with this checksum algorithm"
            ))
        }
    }
}

/// Checksum values in base64, by algorithm.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Sums(BTreeMap<Algorithm, String>);

impl Sums {
    pub(super) fn from_fields<'a>(
        fields: impl IntoIterator<Item = (Algorithm, &'a Option<String>)>,
    ) -> Self {
        Self(
            fields
                .into_iter()
                .filter_map(|(algorithm, value)| Some((algorithm, value.clone()?)))
                .collect(),
        )
    }

    pub(super) fn get(&self, algorithm: Algorithm) -> Option<String> {
        self.0.get(&algorithm).cloned()
    }

    pub(super) fn insert(&mut self, algorithm: Algorithm, value: String) {
        self.0.insert(algorithm, value);
    }

    pub(super) fn algorithms(&self) -> impl Iterator<Item = Algorithm> {
        self.0.keys().copied()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the values that stand in `headers`, which may be a trailer.
    pub(super) fn add_headers(&mut self, headers: &http::HeaderMap) {
        for algorithm in Algorithm::ALL {
            if let Some(value) = headers
                .get(algorithm.header())
                .and_then(|value| value.to_str().ok())
            {
                self.insert(algorithm, value.to_owned());
            }
        }
    }

    /// BadDigest when a value that `self` claims is not the one in `found`.
    pub(super) fn check(&self, found: &Self) -> S3Result {
        for (algorithm, claimed) in &self.0 {
            if let Some(found) = found.0.get(algorithm)
                && found != claimed
            {
                return Err(S3Error::with_message(
                    S3ErrorCode::BadDigest,
                    format!(
                        "The {} you specified did not match the calculated checksum.",
                        algorithm.name()
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// The five checksum members that many of S3's types have.
macro_rules! sums_of {
    ($x:expr) => {
        $crate::s3::store::checksum::Sums::from_fields([
            (
                $crate::s3::store::checksum::Algorithm::Crc32,
                &$x.checksum_crc32,
            ),
            (
                $crate::s3::store::checksum::Algorithm::Crc32c,
                &$x.checksum_crc32c,
            ),
            (
                $crate::s3::store::checksum::Algorithm::Crc64Nvme,
                &$x.checksum_crc64nvme,
            ),
            (
                $crate::s3::store::checksum::Algorithm::Sha1,
                &$x.checksum_sha1,
            ),
            (
                $crate::s3::store::checksum::Algorithm::Sha256,
                &$x.checksum_sha256,
            ),
        ])
    };
}

/// Writes sums into those members.
macro_rules! set_sums {
    ($x:expr, $sums:expr) => {{
        let sums: &$crate::s3::store::checksum::Sums = $sums;
        $x.checksum_crc32 = sums.get($crate::s3::store::checksum::Algorithm::Crc32);
        $x.checksum_crc32c = sums.get($crate::s3::store::checksum::Algorithm::Crc32c);
        $x.checksum_crc64nvme = sums.get($crate::s3::store::checksum::Algorithm::Crc64Nvme);
        $x.checksum_sha1 = sums.get($crate::s3::store::checksum::Algorithm::Sha1);
        $x.checksum_sha256 = sums.get($crate::s3::store::checksum::Algorithm::Sha256);
    }};
}

pub(super) use {set_sums, sums_of};

/// Takes several checksums in one pass.
pub(super) struct Hasher(ChecksumHasher);

impl Hasher {
    pub(super) fn new(algorithms: impl IntoIterator<Item = Algorithm>) -> Self {
        let mut hasher = ChecksumHasher::default();
        for algorithm in algorithms {
            match algorithm {
                Algorithm::Crc32 => hasher.crc32 = Some(Crc32::new()),
                Algorithm::Crc32c => hasher.crc32c = Some(Crc32c::new()),
                Algorithm::Crc64Nvme => hasher.crc64nvme = Some(Crc64Nvme::new()),
                Algorithm::Sha1 => hasher.sha1 = Some(Sha1::new()),
                Algorithm::Sha256 => hasher.sha256 = Some(Sha256::new()),
            }
        }
        Self(hasher)
    }

    pub(super) fn update(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    pub(super) fn finish(self) -> Sums {
        let found = self.0.finalize();
        sums_of!(found)
    }
}

/// The object's value from its parts' values and lengths; `None` when a part has none or one is not valid base64 of the right length.
pub(super) fn combine(
    algorithm: Algorithm,
    kind: ChecksumKind,
    parts: &[(u64, &Sums)],
) -> Option<String> {
    let values: Vec<Vec<u8>> = parts
        .iter()
        .map(|(_, sums)| STANDARD.decode_to_vec(sums.0.get(&algorithm)?).ok())
        .collect::<Option<_>>()?;
    match kind {
        ChecksumKind::Composite => {
            let value = algorithm.over(&values.concat());
            Some(format!(
                "{}-{}",
                STANDARD.encode_to_string(value),
                parts.len()
            ))
        }
        ChecksumKind::FullObject => {
            let crc = algorithm.crc()?;
            let width = if algorithm == Algorithm::Crc64Nvme {
                8
            } else {
                4
            };
            let mut whole: Option<u64> = None;
            let mut extenders: HashMap<u64, Extender> = HashMap::new();
            for (value, (len, _)) in values.iter().zip(parts) {
                if value.len() != width {
                    return None;
                }
                let value = value
                    .iter()
                    .fold(0, |sum, byte| sum << 8 | u64::from(*byte));
                whole = Some(match whole {
                    None => value,
                    Some(before) => {
                        let extender = extenders.entry(*len);
                        let extender = extender.or_insert_with(|| Extender::new(crc, *len));
                        extender.extended(before) ^ value
                    }
                });
            }
            let bytes = whole?.to_be_bytes();
            Some(STANDARD.encode_to_string(&bytes[8 - width..]))
        }
    }
}

/// What so many bytes that follow do to a CRC: a linear map, told by what it makes of each bit. `crc_fast` takes a third of a millisecond for one value, and the parts of an
/// upload nearly all have one length.
struct Extender([u64; 64]);

impl Extender {
    fn new(crc: CrcAlgorithm, len: u64) -> Self {
        // Values are reflected: the highest bit is x^0, and the polynomials are too.
        let (width, polynomial) = match crc {
            CrcAlgorithm::Crc64Nvme => (64, 0x9a6c_9329_ac4b_c9b5),
            CrcAlgorithm::Crc32Iscsi => (32, 0x82f6_3b78),
            _ => (32, 0xedb8_8320),
        };
        let mut columns = [0; 64];
        let mut column = checksum_combine(crc, 1 << (width - 1), 0, len);
        for bit in (0..width).rev() {
            columns[bit] = column;
            let carry = column & 1;
            column = (column >> 1) ^ (polynomial * carry);
        }
        Self(columns)
    }

    fn extended(&self, value: u64) -> u64 {
        let set = (0..64).filter(|bit| value >> bit & 1 == 1);
        set.fold(0, |sum, bit| sum ^ self.0[bit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(algorithm: Algorithm, data: &[u8]) -> Sums {
        let mut hasher = Hasher::new([algorithm]);
        hasher.update(data);
        hasher.finish()
    }

    #[test]
    fn full_object_values_combine() {
        for algorithm in [Algorithm::Crc32, Algorithm::Crc32c, Algorithm::Crc64Nvme] {
            let parts = [&b"hello "[..], b"", b"wide", b" world", b"hello "];
            let each: Vec<Sums> = parts.iter().map(|part| sums(algorithm, part)).collect();
            let list: Vec<(u64, &Sums)> = parts
                .iter()
                .zip(&each)
                .map(|(part, sums)| (part.len() as u64, sums))
                .collect();
            let whole = sums(algorithm, &parts.concat());
            assert_eq!(
                combine(algorithm, ChecksumKind::FullObject, &list),
                whole.get(algorithm)
            );
        }
    }

    #[test]
    fn composite_values_say_how_many_parts() {
        let part = sums(Algorithm::Sha256, b"x");
        let value = combine(
            Algorithm::Sha256,
            ChecksumKind::Composite,
            &[(1, &part), (1, &part)],
        )
        .expect("value");
        assert!(value.ends_with("-2"), "{value}");
    }

    #[test]
    fn a_missing_or_broken_part_value_gives_none() {
        let mut broken = Sums::default();
        broken.insert(Algorithm::Crc64Nvme, "AAA=".to_owned());
        for part in [Sums::default(), broken] {
            assert_eq!(
                combine(
                    Algorithm::Crc64Nvme,
                    ChecksumKind::FullObject,
                    &[(1, &part)]
                ),
                None
            );
        }
    }
}
