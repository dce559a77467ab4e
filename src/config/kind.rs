//! What is known of the stores that speak S3: the defaults of `[store]`, by kind.
//!
//! In: `store.kind` as written, or the endpoint's host. Out: a [`Preset`]. Nothing can fail. Every value that is not that of [`StoreKind::Generic`] has its source in `docs/store-kinds.md`; where
//! there is none the value is left as it is for every store, whose habits are learned from what it refuses. Keys that are set win over all of this.

use super::PartChecksum;
use super::value::{GIB, TIB};
use crate::plan::PartLimits;

/// Which store it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreKind {
    /// Amazon S3.
    Aws,
    /// Google Cloud Storage, its XML interface.
    Gcs,
    /// Cloudflare R2.
    R2,
    /// Ceph's object gateway.
    Ceph,
    /// MinIO.
    Minio,
    /// SeaweedFS.
    Seaweedfs,
    /// Garage.
    Garage,
    /// Backblaze B2.
    B2,
    /// Oracle's object storage, its S3 interface.
    Oci,
    /// Any other.
    Generic,
}

/// The defaults of a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Preset {
    pub(super) limits: PartLimits,
    pub(super) checksum: PartChecksum,
    pub(super) sign_payload: Option<bool>,
    /// `None`: in the path where the endpoint has no room for it in its name.
    pub(super) path_style: Option<bool>,
}

impl Preset {
    const GENERIC: Self = Self {
        limits: PartLimits::S3,
        checksum: PartChecksum::Auto,
        sign_payload: None,
        path_style: None,
    };
}

impl StoreKind {
    /// Every kind that has a name, as it is written.
    pub(super) const WORDS: [(&str, Self); 10] = [
        ("aws", Self::Aws),
        ("gcs", Self::Gcs),
        ("r2", Self::R2),
        ("ceph", Self::Ceph),
        ("minio", Self::Minio),
        ("seaweedfs", Self::Seaweedfs),
        ("garage", Self::Garage),
        ("b2", Self::B2),
        ("oci", Self::Oci),
        ("generic", Self::Generic),
    ];

    /// Domains that belong to one store and to nobody else.
    const DOMAINS: [(&str, Self); 6] = [
        ("amazonaws.com", Self::Aws),
        ("amazonaws.com.cn", Self::Aws),
        ("googleapis.com", Self::Gcs),
        ("r2.cloudflarestorage.com", Self::R2),
        ("backblazeb2.com", Self::B2),
        ("oraclecloud.com", Self::Oci),
    ];

    /// The store behind an endpoint; without one it is AWS.
    pub(super) fn of_endpoint(endpoint: Option<&url::Url>) -> Self {
        let Some(endpoint) = endpoint else {
            return Self::Aws;
        };
        let host = endpoint.host_str().unwrap_or_default();
        let is_in = |domain: &str| {
            let rest = host.strip_suffix(domain);
            rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        let known = Self::DOMAINS.iter().find(|(domain, _)| is_in(domain));
        known.map_or(Self::Generic, |(_, kind)| *kind)
    }

    pub(super) fn preset(self) -> Preset {
        let limits = |limits: PartLimits| Preset {
            limits,
            ..Preset::GENERIC
        };
        let in_path = Preset {
            path_style: Some(true),
            ..Preset::GENERIC
        };
        match self {
            Self::Aws | Self::Gcs | Self::Seaweedfs | Self::Garage | Self::Generic => {
                Preset::GENERIC
            }
            // 5 TiB less 5 GiB, in parts of 5 GiB less 5 MiB.
            Self::R2 => limits(PartLimits {
                len_max: 5 * GIB - (5 << 20),
                object_len_max: 5 * TIB - 5 * GIB,
                ..PartLimits::S3
            }),
            Self::Ceph => Preset {
                limits: PartLimits {
                    object_len_max: 5_000_000_000_000,
                    ..PartLimits::S3
                },
                ..in_path
            },
            Self::Minio => in_path,
            // In its documents a GB is 10^9 bytes.
            Self::B2 => limits(PartLimits {
                len_max: 5_000_000_000,
                ..PartLimits::S3
            }),
            Self::Oci => limits(PartLimits {
                object_len_max: 10 * TIB,
                ..PartLimits::S3
            }),
        }
    }

    /// It is known to overwrite what a conditional create must leave alone, or to refuse such creates. What a store does when it is asked decides in any case.
    pub fn lacks_conditional_creates(self) -> bool {
        matches!(self, Self::Gcs | Self::Garage)
    }

    /// The same in words, behind what it did; nothing of a kind of which it is not known.
    pub(crate) fn known_to_lack_conditional_creates(self) -> String {
        match self.lacks_conditional_creates() {
            true => format!(", as is known of store.kind = {:?}", self.as_str()),
            false => String::new(),
        }
    }

    /// As it is written in `store.kind`.
    pub fn as_str(self) -> &'static str {
        let word = Self::WORDS.iter().find(|(_, kind)| *kind == self);
        word.map_or("generic", |(word, _)| *word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_that_belong_to_one_store_are_known() {
        let of = |endpoint: &str| {
            let url = url::Url::parse(endpoint).unwrap();
            StoreKind::of_endpoint(Some(&url)).as_str()
        };
        for (endpoint, kind) in [
            ("https://s3.eu-central-1.amazonaws.com", "aws"),
            ("https://s3.cn-north-1.amazonaws.com.cn", "aws"),
            ("https://storage.googleapis.com", "gcs"),
            ("https://0123456789abcdef.r2.cloudflarestorage.com", "r2"),
            ("https://s3.us-west-004.backblazeb2.com", "b2"),
            (
                "https://ns.compat.objectstorage.eu-frankfurt-1.oraclecloud.com",
                "oci",
            ),
            ("https://minio.corp:9000", "generic"),
            ("http://127.0.0.1:9000", "generic"),
            // Nobody's name ends up as somebody else's.
            ("https://notamazonaws.com", "generic"),
            ("https://amazonaws.com.evil.example", "generic"),
        ] {
            assert_eq!(of(endpoint), kind, "{endpoint}");
        }
        assert_eq!(StoreKind::of_endpoint(None), StoreKind::Aws);
    }

    #[test]
    fn no_preset_goes_beyond_what_parts_can_be() {
        for (word, kind) in StoreKind::WORDS {
            assert_eq!(kind.as_str(), word);
            let (limits, widest) = (kind.preset().limits, PartLimits::S3);
            assert!(limits.len_min >= widest.len_min, "{word}");
            assert!(limits.len_max <= widest.len_max, "{word}");
            assert!(limits.count_max <= widest.count_max, "{word}");
            assert!(limits.object_len_max <= widest.object_len_max, "{word}");
        }
    }
}
