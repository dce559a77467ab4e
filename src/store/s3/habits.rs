//! What this store takes, learned from what it refuses: half of the stores that speak S3 differ in this.
//!
//! In: the configuration, and refusals. Out: how requests are made from now on. Nothing can fail; what was set in the configuration is never changed.

use std::sync::atomic::{AtomicBool, Ordering};

use super::fault::Fault;
use crate::config::{PartChecksum, StoreConfig};

/// What a refusal says that the store wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wants {
    /// No CRC64NVME.
    NoChecksum,
    /// Bodies that are signed, too.
    SignedBodies,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Habits {
    sends_checksums: AtomicBool,
    signs_bodies: AtomicBool,
    may_drop_checksums: bool,
    may_sign: bool,
}

impl Habits {
    pub(super) fn new(config: &StoreConfig) -> Self {
        Self {
            sends_checksums: (config.checksum != PartChecksum::None).into(),
            signs_bodies: (config.sign_payload == Some(true)).into(),
            may_drop_checksums: config.checksum == PartChecksum::Auto,
            may_sign: config.sign_payload.is_none(),
        }
    }

    /// For a request that is made now.
    pub(super) fn now(&self) -> Manner {
        Manner {
            with_checksum: self.sends_checksums.load(Ordering::Relaxed),
            signs_body: self.signs_bodies.load(Ordering::Relaxed),
        }
    }

    /// Whether a request that was made in this manner, and refused, is worth another try.
    pub(super) fn learn(&self, made: Manner, fault: &Fault, store: &str) -> bool {
        let code = &fault.code;
        match fault.wants {
            // Of requests under way at once each is tried again; it is told once.
            Some(Wants::NoChecksum) if self.may_drop_checksums && made.with_checksum => {
                if self.sends_checksums.swap(false, Ordering::Relaxed) {
                    tracing::warn!(
                        "{store} does not take CRC64NVME ({code}): from now on bodies go with Content-MD5, which costs more, and objects are read back before they count (store.checksum = \"none\" does so from the start)"
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
    /// With its CRC64NVME, and with Content-MD5 otherwise.
    pub(super) with_checksum: bool,
    /// The signature covers the body.
    pub(super) signs_body: bool,
}
