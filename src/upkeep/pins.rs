//! Pins: a restore says which image it reads, so that its data is not removed under it.
//!
//! In: an image's attempt. Out: `<job>/pins/<nonce>.json` while the restore lasts. What can fail: the store.
//!
//! Whoever reads puts the pin first and then looks at the log once more; whoever removes appends `dropped` first and then looks for pins. One of the two sees the other.

use std::collections::HashSet;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::config::JobName;
use crate::store::{Key, PutOutcome, Store, StoreError};
use crate::writer::{ProcessIdentity, now_ms, random_hex};

/// Version of the pins that this build writes and reads.
pub const FORMAT: u32 = 1;

/// Most bytes of a pin, 4 KiB.
const PIN_LEN_MAX: usize = 4 << 10;

/// Age at which a pin was left by the dead: no restore lasts so long.
const AGE_MAX: Duration = Duration::from_secs(24 * 3600);

/// What stands in a pin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// [`FORMAT`].
    pub format: u32,
    /// The attempt whose image is read.
    pub attempt: String,
    /// Who reads; `None` where that could not be found out.
    pub by: Option<ProcessIdentity>,
    /// When, in milliseconds since 1970 by the reader's clock. A label.
    pub created_ms: u64,
}

/// Pins the image of an attempt. The pin's key, to be deleted in the end.
///
/// # Errors
/// [`StoreError`].
pub async fn pin(store: &dyn Store, job: &JobName, attempt: &str) -> Result<Key, StoreError> {
    let name = format!("pins/{}.json", random_hex::<16>());
    let illegal = |what: String| StoreError::Mismatch {
        operation: "PutObject",
        key: name.clone(),
        what,
    };
    let key = Key::of_job(job, &name).map_err(|error| illegal(error.to_string()))?;
    let pin = Pin {
        format: FORMAT,
        attempt: attempt.to_owned(),
        by: ProcessIdentity::ours().ok(),
        created_ms: now_ms(),
    };
    let body = serde_json::to_vec_pretty(&pin).map_err(|error| illegal(error.to_string()))?;
    match store.put_if_absent(&key, Bytes::from(body)).await? {
        PutOutcome::Created => Ok(key),
        PutOutcome::AlreadyExists => Err(illegal("it is taken".to_owned())),
    }
}

/// Attempts whose images are being read. A pin of a process that is known to be dead, or that is too old for any, does not count.
///
/// # Errors
/// [`StoreError`].
pub async fn pinned(store: &dyn Store, job: &JobName) -> Result<HashSet<String>, StoreError> {
    let mut pinned = HashSet::new();
    for listed in store.list(&format!("{job}/pins/")).await? {
        let bytes = match store.get(&listed.key, PIN_LEN_MAX).await {
            // Its restore ended meanwhile.
            Ok(None) => continue,
            Ok(Some(bytes)) => bytes,
            Err(StoreError::Mismatch { .. }) => continue,
            Err(error) => return Err(error),
        };
        let Ok(pin) = serde_json::from_slice::<Pin>(&bytes) else {
            continue;
        };
        if pin.by.as_ref().is_some_and(ProcessIdentity::is_known_dead) {
            continue;
        }
        let age = store.head(&listed.key).await?.and_then(|info| info.age);
        if age.is_none_or(|age| age < AGE_MAX) {
            pinned.insert(pin.attempt);
        }
    }
    Ok(pinned)
}
