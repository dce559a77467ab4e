//! What this store takes, learned from what it refuses: half of the stores that speak S3 differ in this.
//!
//! In: the configuration, and refusals. Out: how requests are made from now on. Nothing can fail; what was set in the configuration is never changed.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::fault::Fault;
use crate::codec::Crc32Kind;
use crate::config::{PartChecksum, StoreConfig};

/// What a refusal says that the store wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wants {
    /// Another checksum, or none.
    OtherChecksum,
    /// Bodies that are signed, too.
    SignedBodies,
}

/// What goes with a body for the store to check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Checksum {
    /// CRC64NVME, which every part has anyway.
    Crc64Nvme,
    /// A CRC of 32 bits, which is taken when the part is sent.
    Short(Crc32Kind),
    /// Content-MD5, which every store knows.
    Md5,
}

impl Checksum {
    /// In the order in which they are tried.
    const ALL: [Self; 4] = [
        Self::Crc64Nvme,
        Self::Short(Crc32Kind::Crc32c),
        Self::Short(Crc32Kind::Crc32),
        Self::Md5,
    ];

    /// The first one of a configuration.
    fn first(config: PartChecksum) -> Self {
        match config {
            PartChecksum::Auto | PartChecksum::Crc64Nvme => Self::Crc64Nvme,
            PartChecksum::Crc32c => Self::Short(Crc32Kind::Crc32c),
            PartChecksum::Crc32 => Self::Short(Crc32Kind::Crc32),
            PartChecksum::None => Self::Md5,
        }
    }

    fn index(self) -> usize {
        let index = Self::ALL.iter().position(|it| *it == self);
        index.expect("all are there")
    }

    /// In messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Crc64Nvme => "CRC64NVME",
            Self::Short(Crc32Kind::Crc32c) => "CRC32C",
            Self::Short(Crc32Kind::Crc32) => "CRC32",
            Self::Md5 => "Content-MD5",
        }
    }

    /// As `store.checksum` has it.
    fn word(self) -> &'static str {
        match self {
            Self::Crc64Nvme => "crc64nvme",
            Self::Short(Crc32Kind::Crc32c) => "crc32c",
            Self::Short(Crc32Kind::Crc32) => "crc32",
            Self::Md5 => "none",
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Habits {
    /// Index into [`Checksum::ALL`]; it only grows.
    checksum: AtomicUsize,
    signs_bodies: AtomicBool,
    may_change_checksum: bool,
    may_sign: bool,
}

impl Habits {
    pub(super) fn new(config: &StoreConfig) -> Self {
        Self {
            checksum: Checksum::first(config.checksum).index().into(),
            signs_bodies: (config.sign_payload == Some(true)).into(),
            may_change_checksum: config.checksum == PartChecksum::Auto,
            may_sign: config.sign_payload.is_none(),
        }
    }

    /// For a request that is made now.
    pub(super) fn now(&self) -> Manner {
        Manner {
            checksum: Checksum::ALL[self.checksum.load(Ordering::Relaxed)],
            signs_body: self.signs_bodies.load(Ordering::Relaxed),
        }
    }

    /// Whether a request that was made in this manner, and refused, is worth another try.
    pub(super) fn learn(&self, made: Manner, fault: &Fault, store: &str) -> bool {
        let code = &fault.code;
        match fault.wants {
            // Of requests under way at once each is tried again; it is told once.
            Some(Wants::OtherChecksum) if self.may_change_checksum => {
                let next = made.checksum.index() + 1;
                let Some(other) = Checksum::ALL.get(next) else {
                    return false;
                };
                if self.checksum.fetch_max(next, Ordering::Relaxed) < next {
                    let (name, other_name) = (made.checksum.name(), other.name());
                    tracing::warn!(
                        "{store} does not take {name} ({code}): from now on bodies go with {other_name}, which costs more, and objects are read back before they count (store.checksum = \"{}\" does so from the start)",
                        other.word()
                    );
                }
                true
            }
            Some(Wants::SignedBodies) if self.may_sign && !made.signs_body => {
                if !self.signs_bodies.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "{store} wants signed bodies ({code}): from now on they are (store.sign_payload = true does so from the start)"
                    );
                }
                true
            }
            _ => false,
        }
    }
}

/// How a request is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Manner {
    pub(super) checksum: Checksum,
    /// The signature covers the body.
    pub(super) signs_body: bool,
}
