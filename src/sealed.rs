//! A save that is whole but not committed: what lies in the spill, and how `resume` finds it; or what a whole tree's GPUs held, in the store, until the tree's host memory is there, too.
//!
//! In and out: `<job>/data/<attempt>/sealed.json`, in the spill beside the very objects, frame tables and manifest that the store would have, in the store beside those of the GPUs. Reading trusts nothing: the entry that it would commit is
//! checked as one from the log is, and the manifest's digest covers the rest. What can fail: the store; bytes that are no such file ([`SealedError`]).
//!
//! A sealed save is no image: nothing but `resume` reads it, and only the commit that `resume` makes brings the image into being. What is sealed in the store never becomes one by itself: it goes back into the very processes that it came from.

use std::collections::HashSet;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::config::{JobName, SpillPlace};
use crate::job_log::{Entry, ImageEntry, JobLog};
use crate::store::file::FileStore;
use crate::store::{BadKey, Key, PutOutcome, Store, StoreError};

/// Directory below `spill.path` that holds the sealed saves of all jobs. No job can have this name, so it is apart from the images of a store in the same directory.
pub const SPILL_DIRECTORY: &str = "spill~";

/// Version of the file that this build writes and reads.
pub const FORMAT: u32 = 1;

/// Most bytes of the file, 64 KiB.
pub const SEALED_LEN_MAX: usize = 64 << 10;

/// What stands in `sealed.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sealed {
    /// [`FORMAT`].
    pub format: u32,
    /// The job.
    pub job: String,
    /// Where the image was to be kept, for people. `resume` knows the store by the attempt's claim in it.
    pub store: String,
    /// First free slot of the job's log when the save began: whoever has taken one since may have taken the job.
    pub next_slot: u64,
    /// The entry that commits the image.
    pub entry: ImageEntry,
}

/// A file in the spill cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SealedError {
    /// The spill cannot be read.
    #[error("the spill cannot be read")]
    Store(#[from] StoreError),
    /// A name that makes no key.
    #[error("the sealed save has no place in the spill")]
    Key(#[from] BadKey),
    /// Not JSON, or not this JSON.
    #[error("{key} is not well formed")]
    Malformed {
        /// The file.
        key: String,
        /// Where and why.
        #[source]
        source: serde_json::Error,
    },
    /// Something in it cannot be.
    #[error("{key}: {what}")]
    Flaw {
        /// The file.
        key: String,
        /// What.
        what: String,
    },
}

/// What is whole was not sealed, as far as is known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotSealed {
    /// Perhaps it is.
    #[error("it is not known whether the save is sealed")]
    Unknown {
        #[source]
        source: StoreError,
    },
    #[error("the save was not sealed")]
    Store(#[from] StoreError),
    #[error("{key} exists already")]
    Exists { key: String },
    #[error("the sealed save has no place")]
    Key(#[from] BadKey),
}

impl Sealed {
    /// Its key: the last thing that is written of a spilled save.
    ///
    /// # Errors
    /// [`BadKey`] of an attempt that is no nonce.
    pub fn key(job: &JobName, attempt: &str) -> Result<Key, BadKey> {
        Key::of_job(job, &format!("data/{attempt}/sealed.json"))
    }

    /// The bytes to store.
    pub fn encode(&self) -> Bytes {
        let bytes = serde_json::to_vec_pretty(self)
            .expect("text and numbers are always representable as JSON");
        Bytes::from(bytes)
    }

    /// Stores it, last of all that is sealed there.
    ///
    /// # Errors
    /// [`NotSealed`].
    pub(crate) async fn put(&self, store: &dyn Store, job: &JobName) -> Result<(), NotSealed> {
        let attempt = &self.entry.attempt;
        let key = Self::key(job, attempt)?;
        match store.put_if_absent(&key, self.encode()).await {
            Ok(PutOutcome::Created) => Ok(()),
            Ok(PutOutcome::AlreadyExists) => Err(NotSealed::Exists {
                key: key.to_string(),
            }),
            // The name may have been given all the same.
            Err(error) if error.is_outcome_unknown() => {
                match Self::read(store, job, attempt).await {
                    Ok(Some(there)) if there == *self => Ok(()),
                    Ok(_) => Err(error.into()),
                    Err(_unknown) => Err(NotSealed::Unknown { source: error }),
                }
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Reads the file of an attempt; `None` when the attempt is not sealed here.
    ///
    /// # Errors
    /// [`SealedError`].
    pub async fn read(
        spill: &dyn Store,
        job: &JobName,
        attempt: &str,
    ) -> Result<Option<Self>, SealedError> {
        let key = Self::key(job, attempt)?;
        let Some(bytes) = spill.get(&key, SEALED_LEN_MAX).await? else {
            return Ok(None);
        };
        let sealed: Self =
            serde_json::from_slice(&bytes).map_err(|source| SealedError::Malformed {
                key: key.to_string(),
                source,
            })?;
        match sealed.flaw(job, attempt) {
            None => Ok(Some(sealed)),
            Some(what) => Err(SealedError::Flaw {
                key: key.to_string(),
                what,
            }),
        }
    }

    /// The sealed saves of a job, in order of their nonces.
    ///
    /// # Errors
    /// [`SealedError`] of the first that cannot be read.
    pub async fn all(spill: &dyn Store, job: &JobName) -> Result<Vec<Self>, SealedError> {
        let mut found = Vec::new();
        for attempt in spill.list_dirs(&format!("{job}/data/")).await? {
            found.extend(Self::read(spill, job, &attempt).await?);
        }
        Ok(found)
    }

    /// The sealed saves of a job in a configured spill, which nobody has made anything of yet. None where nothing was ever spilled.
    ///
    /// # Errors
    /// [`SealedError`], also when `spill.path` is not there: it may hold some.
    pub async fn waiting(spill: &SpillPlace, job: &JobName) -> Result<Vec<Self>, SealedError> {
        match FileStore::look_into_spill(&spill.path, SPILL_DIRECTORY)? {
            Some(disk) => Self::all(&disk, job).await,
            None => Ok(Vec::new()),
        }
    }

    /// Whether no image was committed since the save began: then this one is the newest there is of the job.
    pub fn is_ahead_of(&self, log: &JobLog) -> bool {
        !log.entries()
            .any(|(slot, there)| slot >= self.next_slot && matches!(there, Entry::Image(_)))
    }

    /// Attempts whose saves were announced before this one: their images are older than this one's, whenever they come into being.
    pub fn begun_before(&self, log: &JobLog) -> HashSet<String> {
        let before = log.entries().take_while(|(slot, _)| *slot < self.next_slot);
        before
            .filter_map(|(_, entry)| match entry {
                Entry::Saving(saving) => Some(saving.attempt.clone()),
                _ => None,
            })
            .collect()
    }

    /// Whether an entry of a slot that was taken since the save began says that the job may have gone on from an older image, or that the attempt was given up. `together` are the writers of
    /// all that is sealed in this spill: what came later becomes an image after this one.
    pub fn is_overtaken_by(
        &self,
        there: &Entry,
        together: &HashSet<String>,
        begun_before: &HashSet<String>,
    ) -> bool {
        match there {
            Entry::Dropped { attempt, .. } if *attempt == self.entry.attempt => true,
            Entry::Image(image) => !begun_before.contains(&image.attempt),
            Entry::Open { writer } => !together.contains(writer),
            Entry::Saving(saving) => !together.contains(&saving.writer),
            Entry::Dropped { .. } | Entry::Bad { .. } => false,
            _ => true,
        }
    }

    fn flaw(&self, job: &JobName, attempt: &str) -> Option<String> {
        if self.format != FORMAT {
            return Some(format!(
                "format {}; this version of ckptstream reads format {FORMAT}",
                self.format
            ));
        }
        if self.job != job.as_str() || self.entry.attempt != attempt {
            return Some(format!(
                "it is of attempt {} of job {:?}, and lies elsewhere",
                self.entry.attempt, self.job
            ));
        }
        self.entry.flaw()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Digest;
    use crate::job_log::{SavingEntry, append};
    use crate::manifest::ImageKind;
    use crate::store::memory::MemoryStore;
    use crate::writer::ProcessIdentity;

    const ATTEMPT: &str = "0123456789abcdef0123456789abcdef";

    fn job() -> JobName {
        JobName::new("train").unwrap()
    }

    fn sealed() -> Sealed {
        Sealed {
            format: FORMAT,
            job: "train".to_owned(),
            store: "s3://bucket/prefix".to_owned(),
            next_slot: 3,
            entry: ImageEntry {
                writer: ATTEMPT.to_owned(),
                attempt: ATTEMPT.to_owned(),
                manifest_key: format!("data/{ATTEMPT}/manifest.json"),
                manifest_len: 1000,
                manifest_digest: Digest::of(b"manifest"),
                kind: ImageKind::Gpu,
                raw_len: 4096,
                stored_len: 1024,
                created_ms: 1_700_000_000_000,
                tool: "ckptstream 0.1.0".to_owned(),
            },
        }
    }

    async fn read(sealed: &Sealed) -> Result<Vec<Sealed>, SealedError> {
        let store = MemoryStore::new();
        let key = Sealed::key(&job(), ATTEMPT).unwrap();
        store.put_if_absent(&key, sealed.encode()).await.unwrap();
        let other = Key::new("train/data/not sealed/attempt.json").unwrap();
        store.put_if_absent(&other, Bytes::new()).await.unwrap();
        Sealed::all(&store, &job()).await
    }

    #[tokio::test]
    async fn what_is_sealed_is_found_as_it_was() {
        assert_eq!(read(&sealed()).await.unwrap(), [sealed()]);
        assert!(
            Sealed::all(&MemoryStore::new(), &job())
                .await
                .unwrap()
                .is_empty()
        );
    }

    #[tokio::test]
    async fn an_older_save_that_becomes_an_image_first_is_not_in_the_way() {
        const OLDER: &str = "ffffffffffffffffffffffffffffffff";
        let saving = |attempt: &str| {
            Entry::Saving(SavingEntry {
                writer: attempt.to_owned(),
                attempt: attempt.to_owned(),
                seconds: 1,
                spill: None,
                by: ProcessIdentity::ours().unwrap(),
            })
        };
        let image = |attempt: &str| {
            Entry::Image(ImageEntry {
                attempt: attempt.to_owned(),
                manifest_key: format!("data/{attempt}/manifest.json"),
                ..sealed().entry
            })
        };
        let store = MemoryStore::new();
        for entry in [saving(OLDER), saving(ATTEMPT), image(OLDER)] {
            append(&store, &job(), 1, &entry, &|_there| false)
                .await
                .unwrap();
        }
        let log = JobLog::read(&store, &job()).await.unwrap();
        let (sealed, alone) = (sealed(), HashSet::from([ATTEMPT.to_owned()]));
        let before = sealed.begun_before(&log);
        // Whoever resumed it has cleared it away since: it is not sealed together with this one any more.
        assert!(!sealed.is_overtaken_by(&image(OLDER), &alone, &before));
        let newer = image("eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee");
        assert!(sealed.is_overtaken_by(&newer, &alone, &before));
    }

    #[tokio::test]
    async fn nothing_in_it_is_trusted() {
        let (good, mut entry) = (sealed(), sealed().entry);
        entry.manifest_key = "data/ffff/manifest.json".to_owned();
        for bad in [
            Sealed {
                format: 2,
                ..good.clone()
            },
            Sealed {
                job: "other".to_owned(),
                ..good.clone()
            },
            Sealed {
                entry,
                ..good.clone()
            },
        ] {
            let refused = read(&bad).await;
            assert!(
                matches!(refused, Err(SealedError::Flaw { .. })),
                "{refused:?}"
            );
        }
        let store = MemoryStore::new();
        let key = Sealed::key(&job(), ATTEMPT).unwrap();
        store
            .put_if_absent(&key, Bytes::from_static(b"{}"))
            .await
            .unwrap();
        let refused = Sealed::all(&store, &job()).await;
        assert!(
            matches!(refused, Err(SealedError::Malformed { .. })),
            "{refused:?}"
        );
    }
}
