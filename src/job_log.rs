//! A job's log: which images exist, in which order, and who has the job.
//!
//! In: a store and a job. Out: the entries in order; a slot for an entry that was appended (of an image: its generation). What can fail: the store; another writer who
//! got the job first ([`AppendError::Fenced`]).
//!
//! Entries are small JSON objects `<job>/log/<generation:08>.json`, each created if absent, never overwritten, never deleted. Slots are taken without
//! gaps, so the log ends at the first free slot; it is found by reading, not by listing. What stands in a slot first decides for ever:
//!
//! | we die | what exists |
//! |---|---|
//! | before the entry's PUT | no image; the attempt's objects are left for `gc` |
//! | during it | the whole entry or none of it: the store's PUT is atomic |
//! | after it | the image |

mod append;

use std::collections::HashSet;

use bytes::Bytes;
use futures::future;
use serde::{Deserialize, Serialize};

use crate::codec::Digest;
use crate::config::JobName;
use crate::manifest::{ImageKind, MANIFEST_LEN_MAX, is_nonce};
use crate::store::{BadKey, Key, Store, StoreError};
use crate::writer::ProcessIdentity;

pub use append::{AppendError, append, append_dropped, append_image, append_saving};

/// Version of the entries that this build writes and reads.
pub const FORMAT: u32 = 1;

/// Most bytes of an entry, 64 KiB.
pub const ENTRY_LEN_MAX: usize = 64 << 10;

/// Highest generation: eight digits in the key.
pub const GENERATION_MAX: u64 = 99_999_999;

/// Slots that are read at once, at first and at most. At first more than one, so that an entry that somebody deleted shows as a gap.
const BATCH: (u64, u64) = (4, 32);

/// How often a gap is read again before it counts as one. A writer may fill a slot between our two reads.
const GAP_READS: u32 = 3;

/// How often a slot is read before its entry counts as damaged. Some stores serve a new object short at first.
const DAMAGED_READS: u32 = 3;

/// An image's name for people and scripts: its generation in eight digits, as the log's keys have it.
pub fn image_id(generation: u64) -> String {
    format!("{generation:08}")
}

/// What stands in one slot of the log. A writer is a process that may save the job, known by its nonce.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "entry", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Entry {
    /// A writer takes the job.
    Open {
        /// Its nonce.
        writer: String,
    },
    /// A writer has begun to save.
    Saving(SavingEntry),
    /// An image was committed.
    Image(ImageEntry),
    /// The job ended by itself.
    Finished {
        /// The writer's nonce.
        writer: String,
        /// Its exit status, when known.
        status: Option<i32>,
    },
    /// An image failed to restore and is not tried again.
    Bad {
        /// The writer's nonce.
        writer: String,
        /// Generation of the image.
        generation: u64,
    },
    /// An attempt or an image was given up; its data may be gone.
    Dropped {
        /// The writer's nonce.
        writer: String,
        /// The attempt's nonce.
        attempt: String,
    },
    /// An entry of a kind or format that a later version writes. Never an image to us, and no proof that there is none.
    #[serde(skip)]
    Unknown {
        /// Its kind, or its format.
        what: String,
    },
    /// Not a log entry.
    #[serde(skip)]
    Damaged {
        /// What is wrong with it.
        what: String,
    },
}

/// A save under way. Until its outcome stands in the log, others wait for it, at most as long as it says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavingEntry {
    /// The writer's nonce.
    pub writer: String,
    /// The attempt's nonce.
    pub attempt: String,
    /// Seconds that it may need.
    pub seconds: u64,
    /// Where it spills, if it does.
    pub spill: Option<String>,
    /// The process that saves.
    pub by: ProcessIdentity,
}

/// The commit of one image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageEntry {
    /// The writer's nonce.
    pub writer: String,
    /// The attempt's nonce, 32 lower-case hex digits.
    pub attempt: String,
    /// Key of the manifest, relative to the job.
    pub manifest_key: String,
    /// Length of the manifest in bytes.
    pub manifest_len: u64,
    /// XXH3-128 of the whole manifest.
    pub manifest_digest: Digest,
    /// What is in the image.
    pub kind: ImageKind,
    /// Raw bytes of all extents.
    pub raw_len: u64,
    /// Stored bytes of all data objects.
    pub stored_len: u64,
    /// When, in milliseconds since 1970 by the writer's clock. A label: nothing is ordered by it.
    pub created_ms: u64,
    /// Who wrote it, for instance `ckptstream 0.1.0`. A label.
    pub tool: String,
}

/// An entry as it is stored.
#[derive(Serialize)]
struct Stored<'a> {
    format: u32,
    #[serde(flatten)]
    entry: &'a Entry,
}

impl Entry {
    /// The job ended by itself, and well: there is nothing left to go on with. One that failed may be wanted back from its last image.
    fn is_the_end(&self) -> bool {
        matches!(
            self,
            Entry::Finished {
                status: None | Some(0),
                ..
            }
        )
    }

    fn encode(&self) -> Result<Bytes, serde_json::Error> {
        let stored = Stored {
            format: FORMAT,
            entry: self,
        };
        serde_json::to_vec_pretty(&stored).map(Bytes::from)
    }

    /// Reads the bytes of a slot. Whatever they are, they are an entry: the slot is taken.
    fn decode(bytes: &[u8]) -> Self {
        /// Present in every format.
        #[derive(Deserialize)]
        struct Head {
            format: u32,
            entry: String,
        }
        const KINDS: [&str; 6] = ["open", "saving", "image", "finished", "bad", "dropped"];
        let damaged = |error: serde_json::Error| Entry::Damaged {
            what: error.to_string(),
        };
        let head: Head = match serde_json::from_slice(bytes) {
            Ok(head) => head,
            Err(error) => return damaged(error),
        };
        if head.format != FORMAT {
            let what = format!("an entry of format {}", head.format);
            return Entry::Unknown { what };
        }
        if !KINDS.contains(&head.entry.as_str()) {
            let kind: String = head.entry.chars().take(40).collect();
            let what = format!("an entry of kind {kind:?}");
            return Entry::Unknown { what };
        }
        match serde_json::from_slice(bytes) {
            Ok(Entry::Image(image)) => match image.flaw() {
                None => Entry::Image(image),
                Some(what) => Entry::Damaged { what },
            },
            Ok(entry) => entry,
            Err(error) => damaged(error),
        }
    }

    /// For messages.
    pub fn describe(&self) -> String {
        match self {
            Entry::Open { writer } => format!("writer {writer} opened the job"),
            Entry::Saving(saving) => {
                format!(
                    "attempt {} is being saved on {}",
                    saving.attempt, saving.by.host
                )
            }
            Entry::Image(image) => format!("image of attempt {}", image.attempt),
            Entry::Finished { .. } if self.is_the_end() => "the job finished".to_owned(),
            Entry::Finished { status, .. } => {
                format!("the job failed with status {}", status.unwrap_or(-1))
            }
            Entry::Bad { generation, .. } => {
                format!("image {} failed to restore", image_id(*generation))
            }
            Entry::Dropped { attempt, .. } => format!("attempt {attempt} was given up"),
            Entry::Unknown { what } => format!("{what}, which this version does not know"),
            Entry::Damaged { what } => format!("not a log entry: {what}"),
        }
    }
}

impl ImageEntry {
    /// What makes the entry useless, if anything does.
    pub(crate) fn flaw(&self) -> Option<String> {
        if !is_nonce(&self.attempt) {
            return Some(format!(
                "attempt {:?} is not 32 lower-case hex digits",
                self.attempt
            ));
        }
        let prefix = format!("data/{}/", self.attempt);
        if !self.manifest_key.starts_with(&prefix) || Key::new(&self.manifest_key).is_err() {
            return Some(format!(
                "manifest_key {:?} is not under {prefix}",
                self.manifest_key
            ));
        }
        if self.manifest_len > MANIFEST_LEN_MAX as u64 {
            return Some(format!(
                "manifest_len {} is over {MANIFEST_LEN_MAX}",
                self.manifest_len
            ));
        }
        None
    }
}

/// A job's log cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// The store failed.
    #[error("cannot read the log of job {job}")]
    Store {
        /// The job.
        job: String,
        /// Why.
        #[source]
        source: StoreError,
    },
    /// An entry is missing between others. Entries are never deleted, so the store hides one or somebody removed it (a lifecycle rule, perhaps); nothing that
    /// the rest says can be relied on.
    #[error(
        "the log of job {job} has a gap: {missing} is missing but {present} stands there; exclude log/ from lifecycle rules"
    )]
    Gap {
        /// The job.
        job: String,
        /// Key of the missing entry.
        missing: String,
        /// Key of a later one.
        present: String,
    },
    /// The log is full, or a generation was asked for that cannot be.
    #[error("generation {generation} of job {job} is not between 1 and {GENERATION_MAX}")]
    Generation {
        /// The job.
        job: String,
        /// The generation.
        generation: u64,
    },
    /// Job and generation make no key.
    #[error("the log of job {job} has no place in the store")]
    Key {
        /// The job.
        job: String,
        /// Why.
        #[source]
        source: BadKey,
    },
}

/// A job's log as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobLog {
    /// Slot 1 first, without gaps.
    entries: Vec<Entry>,
}

impl JobLog {
    /// Reads the log of a job, up to its first free slot. A job without a log has an empty one.
    ///
    /// # Errors
    /// When the store fails, or shows a gap.
    pub async fn read(store: &dyn Store, job: &JobName) -> Result<Self, LogError> {
        let mut log = Self {
            entries: Vec::new(),
        };
        log.read_on(store, job).await?;
        Ok(log)
    }

    /// Reads what was appended since.
    ///
    /// # Errors
    /// As [`JobLog::read`]; what was read before stays.
    pub async fn read_on(&mut self, store: &dyn Store, job: &JobName) -> Result<(), LogError> {
        let entries = &mut self.entries;
        let mut width = BATCH.0;
        let mut gap_reads = 0;
        loop {
            let first = entries.len() as u64 + 1;
            let slots = (first..first + width).map(|generation| read_slot(store, job, generation));
            let batch = future::try_join_all(slots).await?;
            let taken = batch.iter().take_while(|entry| entry.is_some()).count();
            let later = batch[taken..].iter().position(Option::is_some);
            if let (Some(later), 0) = (later, taken) {
                gap_reads += 1;
                if gap_reads > GAP_READS {
                    return Err(LogError::Gap {
                        job: job.to_string(),
                        missing: slot_key(job, first)?.to_string(),
                        present: slot_key(job, first + later as u64)?.to_string(),
                    });
                }
            }
            let whole = taken == batch.len();
            entries.extend(batch.into_iter().flatten().take(taken));
            if whole {
                width = (width * 2).min(BATCH.1);
            } else if later.is_none() {
                return Ok(());
            }
        }
    }

    /// Generations and entries, oldest first.
    pub fn entries(&self) -> impl DoubleEndedIterator<Item = (u64, &Entry)> {
        let numbered = self.entries.iter().enumerate();
        numbered.map(|(index, entry)| (index as u64 + 1, entry))
    }

    /// The first free slot at the time of reading.
    pub fn next_slot(&self) -> u64 {
        self.entries.len() as u64 + 1
    }

    /// The entry of a generation.
    pub fn get(&self, generation: u64) -> Option<&Entry> {
        let index = usize::try_from(generation.checked_sub(1)?).ok()?;
        self.entries.get(index)
    }

    /// Generations and entries of the images that are neither `bad` nor `dropped`, newest first.
    pub fn images(&self) -> Vec<(u64, &ImageEntry)> {
        let (mut bad, mut dropped) = (HashSet::new(), HashSet::new());
        for entry in &self.entries {
            match entry {
                Entry::Bad { generation, .. } => {
                    bad.insert(*generation);
                }
                Entry::Dropped { attempt, .. } => {
                    dropped.insert(attempt);
                }
                _ => {}
            }
        }
        let images = self.entries().rev();
        images
            .filter_map(|(generation, entry)| match entry {
                Entry::Image(image)
                    if !bad.contains(&generation) && !dropped.contains(&image.attempt) =>
                {
                    Some((generation, image))
                }
                _ => None,
            })
            .collect()
    }

    /// The attempt was given up: its data may be gone.
    pub fn is_dropped(&self, attempt: &str) -> bool {
        self.entries.iter().any(
            |entry| matches!(entry, Entry::Dropped { attempt: dropped, .. } if dropped == attempt),
        )
    }

    /// The attempt became an image, whatever was said of it later.
    pub fn is_image(&self, attempt: &str) -> bool {
        self.entries
            .iter()
            .any(|entry| matches!(entry, Entry::Image(image) if image.attempt == attempt))
    }

    /// What a writer said when it began this attempt.
    pub fn saving(&self, attempt: &str) -> Option<&SavingEntry> {
        self.entries.iter().find_map(|entry| match entry {
            Entry::Saving(saving) if saving.attempt == attempt => Some(saving),
            _ => None,
        })
    }

    /// The save that was begun last, as long as nothing says what became of it: it is under way, or its saver died. Whoever opened the job since has fenced it.
    pub fn save_under_way(&self) -> Option<&SavingEntry> {
        for entry in self.entries.iter().rev() {
            match entry {
                Entry::Saving(saving) => {
                    let attempt = saving.attempt.as_str();
                    let is_open = !self.is_image(attempt) && !self.is_dropped(attempt);
                    return is_open.then_some(saving);
                }
                Entry::Open { .. } | Entry::Finished { .. } => return None,
                _ => {}
            }
        }
        None
    }

    /// A writer other than this one opened the job in this slot or later, and has not given it up.
    pub fn opened_by_another(&self, from_slot: u64, writer: &str) -> Option<(u64, &Entry)> {
        self.entries().find(|(slot, entry)| {
            let is_later = *slot >= from_slot;
            is_later
                && matches!(entry, Entry::Open { writer: other } if other != writer && !self.has_given_up(other))
        })
    }

    /// A writer that opened the job to restore it, and says itself that nothing came of that. One that announced a save has the job all the same, whatever became of the save.
    pub fn has_given_up(&self, writer: &str) -> bool {
        let mut says_so = false;
        for entry in &self.entries {
            match entry {
                Entry::Saving(saving) if saving.writer == writer => return false,
                Entry::Dropped {
                    writer: by,
                    attempt,
                } if by == writer && attempt == writer => {
                    says_so = true;
                }
                _ => {}
            }
        }
        says_so
    }

    /// Some entry cannot be read by this version: it may be anything.
    pub fn has_unreadable(&self) -> bool {
        let mut entries = self.entries.iter();
        entries.any(|entry| matches!(entry, Entry::Unknown { .. } | Entry::Damaged { .. }))
    }

    /// The slot in which the job ended well by itself for the last time, 0 where it never did. What was saved before is history: a job that was begun anew under the name does not go on from it.
    pub fn finished_at(&self) -> u64 {
        let mut finished = self.entries().rev().filter(|(_, entry)| entry.is_the_end());
        finished.next().map_or(0, |(slot, _)| slot)
    }

    /// The job ended well by itself, and nobody has taken it since.
    pub fn is_finished(&self) -> bool {
        let told = self.entries.iter().rev();
        let mut told =
            told.skip_while(|entry| matches!(entry, Entry::Bad { .. } | Entry::Dropped { .. }));
        told.next().is_some_and(Entry::is_the_end)
    }
}

/// Key of a slot.
pub(crate) fn slot_key(job: &JobName, generation: u64) -> Result<Key, LogError> {
    if !(1..=GENERATION_MAX).contains(&generation) {
        let job = job.to_string();
        return Err(LogError::Generation { job, generation });
    }
    let relative = format!("log/{}.json", image_id(generation));
    Key::of_job(job, &relative).map_err(|source| LogError::Key {
        job: job.to_string(),
        source,
    })
}

async fn read_slot(
    store: &dyn Store,
    job: &JobName,
    generation: u64,
) -> Result<Option<Entry>, LogError> {
    let key = slot_key(job, generation)?;
    let mut seen = None;
    for _ in 0..DAMAGED_READS {
        seen = match store.get(&key, ENTRY_LEN_MAX).await {
            Ok(bytes) => bytes.map(|bytes| Entry::decode(&bytes)),
            Err(StoreError::Mismatch { what, .. }) => Some(Entry::Damaged { what }),
            Err(source) => {
                return Err(LogError::Store {
                    job: job.to_string(),
                    source,
                });
            }
        };
        if !matches!(seen, Some(Entry::Damaged { .. })) {
            break;
        }
    }
    Ok(seen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::PutOutcome;
    use crate::store::faulty::{Fault, Faulty};
    use crate::store::memory::MemoryStore;

    const OURS: &str = "0123456789abcdef0123456789abcdef";
    const THEIRS: &str = "ffffffffffffffffffffffffffffffff";

    fn job() -> JobName {
        JobName::new("train").unwrap()
    }

    fn image(writer: &str, attempt: &str) -> ImageEntry {
        ImageEntry {
            writer: writer.to_owned(),
            attempt: attempt.to_owned(),
            manifest_key: format!("data/{attempt}/manifest.json"),
            manifest_len: 1000,
            manifest_digest: Digest::of(attempt.as_bytes()),
            kind: ImageKind::Gpu,
            raw_len: 4096,
            stored_len: 1024,
            created_ms: 1_700_000_000_000,
            tool: "ckptstream 0.1.0".to_owned(),
        }
    }

    fn open(writer: &str) -> Entry {
        Entry::Open {
            writer: writer.to_owned(),
        }
    }

    fn dropped(attempt: &str) -> Entry {
        Entry::Dropped {
            writer: "gc".to_owned(),
            attempt: attempt.to_owned(),
        }
    }

    fn saving(attempt: &str) -> Entry {
        Entry::Saving(SavingEntry {
            writer: attempt.to_owned(),
            attempt: attempt.to_owned(),
            seconds: 90,
            spill: Some("/mnt/spill".to_owned()),
            by: ProcessIdentity::ours().unwrap(),
        })
    }

    fn attempt(number: u64) -> String {
        format!("{number:032x}")
    }

    async fn put(store: &dyn Store, generation: u64, bytes: impl Into<Bytes>) {
        let key = slot_key(&job(), generation).unwrap();
        assert_eq!(
            store.put_if_absent(&key, bytes.into()).await.unwrap(),
            PutOutcome::Created
        );
    }

    /// A log of these entries from slot 1 on.
    async fn log_of(store: &dyn Store, entries: &[Entry]) {
        for (generation, entry) in (1..).zip(entries) {
            put(store, generation, entry.encode().unwrap()).await;
        }
    }

    fn generations(log: &JobLog) -> Vec<u64> {
        log.images()
            .iter()
            .map(|(generation, _)| *generation)
            .collect()
    }

    #[test]
    fn entries_come_back_as_they_were() {
        let entries = [
            open(OURS),
            saving(OURS),
            Entry::Image(image(OURS, OURS)),
            Entry::Finished {
                writer: OURS.to_owned(),
                status: Some(0),
            },
            Entry::Bad {
                writer: OURS.to_owned(),
                generation: 3,
            },
            dropped(OURS),
        ];
        for entry in entries {
            assert_eq!(Entry::decode(&entry.encode().unwrap()), entry);
        }
    }

    #[test]
    fn the_stored_form_is_fixed() {
        let stored = Entry::Image(image("w", OURS)).encode().unwrap();
        let stored: serde_json::Value = serde_json::from_slice(&stored).unwrap();
        let expected = serde_json::json!({
            "format": 1,
            "entry": "image",
            "writer": "w",
            "attempt": OURS,
            "manifest_key": format!("data/{OURS}/manifest.json"),
            "manifest_len": 1000,
            "manifest_digest": Digest::of(OURS.as_bytes()).to_string(),
            "kind": "gpu",
            "raw_len": 4096,
            "stored_len": 1024,
            "created_ms": 1_700_000_000_000_u64,
            "tool": "ckptstream 0.1.0",
        });
        assert_eq!(stored, expected);
    }

    #[tokio::test]
    async fn only_who_restored_nothing_has_not_taken_the_job() {
        let (restorer, saver, killed) = (attempt(1), attempt(2), attempt(3));
        let by = |writer: &str, attempt: &str| Entry::Dropped {
            writer: writer.to_owned(),
            attempt: attempt.to_owned(),
        };
        let store = MemoryStore::new();
        let entries = [
            open(&restorer),
            by(&restorer, &restorer),
            open(&saver),
            saving(&saver),
            by(&saver, &saver),
            open(&killed),
            by("gc", &killed),
        ];
        log_of(&store, &entries).await;
        let log = JobLog::read(&store, &job()).await.unwrap();
        assert!(log.has_given_up(&restorer));
        assert!(!log.has_given_up(&saver), "its target runs somewhere");
        assert!(!log.has_given_up(&killed), "and so may this one's");
        assert_eq!(
            log.opened_by_another(1, OURS).map(|(slot, _)| slot),
            Some(3)
        );
    }

    #[test]
    fn what_is_not_known_is_no_image() {
        let unknown = |text: &str| matches!(Entry::decode(text.as_bytes()), Entry::Unknown { .. });
        assert!(unknown(r#"{"format":1,"entry":"pinned","by":"x"}"#));
        assert!(unknown(r#"{"format":2,"entry":"image"}"#));
        let damaged = |text: &str| matches!(Entry::decode(text.as_bytes()), Entry::Damaged { .. });
        for text in [
            "",
            "{",
            "[]",
            "null",
            r#"{"format":1}"#,
            r#"{"format":1,"entry":"image"}"#,
        ] {
            assert!(damaged(text), "{text}");
        }
        // A later version may add fields; what we know of the entry still holds.
        let stored = Entry::Image(image(OURS, OURS)).encode().unwrap();
        let mut stored: serde_json::Value = serde_json::from_slice(&stored).unwrap();
        stored["parent"] = "x".into();
        let entry = Entry::decode(stored.to_string().as_bytes());
        assert_eq!(entry, Entry::Image(image(OURS, OURS)));
    }

    #[test]
    fn an_image_entry_cannot_point_elsewhere() {
        let flawed = [
            ImageEntry {
                attempt: "../x".to_owned(),
                ..image(OURS, OURS)
            },
            ImageEntry {
                manifest_key: format!("data/{THEIRS}/manifest.json"),
                ..image(OURS, OURS)
            },
            ImageEntry {
                manifest_key: format!("data/{OURS}/../{THEIRS}/manifest.json"),
                ..image(OURS, OURS)
            },
            ImageEntry {
                manifest_len: u64::MAX,
                ..image(OURS, OURS)
            },
        ];
        for image in flawed {
            let stored = Entry::Image(image.clone()).encode().unwrap();
            assert!(
                matches!(Entry::decode(&stored), Entry::Damaged { .. }),
                "{image:?}"
            );
        }
    }

    #[tokio::test]
    async fn a_job_without_a_log_has_an_empty_one() {
        let log = JobLog::read(&MemoryStore::new(), &job()).await.unwrap();
        assert_eq!(
            (log.next_slot(), log.images().len(), log.is_finished()),
            (1, 0, false)
        );
    }

    #[tokio::test]
    async fn every_length_is_read_to_its_end() {
        // Around the ends of the batches: 4, 4 + 8, 4 + 8 + 16, …
        for count in [1, 3, 4, 5, 11, 12, 13, 28, 61, 92, 93] {
            let store = MemoryStore::new();
            let entries: Vec<Entry> = (0..count)
                .map(|n| Entry::Image(image("w", &attempt(n))))
                .collect();
            log_of(&store, &entries).await;
            let log = JobLog::read(&store, &job()).await.unwrap();
            assert_eq!(log.next_slot(), count + 1);
            assert!(log.entries().map(|(_, entry)| entry).eq(&entries));
            assert_eq!(generations(&log), (1..=count).rev().collect::<Vec<_>>());
        }
    }

    #[tokio::test]
    async fn bad_and_dropped_images_do_not_count() {
        let store = MemoryStore::new();
        let entries = [
            open("w"),
            Entry::Image(image("w", &attempt(2))),
            Entry::Image(image("w", &attempt(3))),
            Entry::Image(image("w", &attempt(4))),
            dropped(&attempt(2)),
            Entry::Bad {
                writer: "w".to_owned(),
                generation: 4,
            },
        ];
        log_of(&store, &entries).await;
        put(&store, 7, "not json").await;
        put(&store, 8, vec![b' '; ENTRY_LEN_MAX + 1]).await;
        let log = JobLog::read(&store, &job()).await.unwrap();
        assert_eq!((generations(&log), log.next_slot()), (vec![3], 9));
        assert!(matches!(log.get(8), Some(Entry::Damaged { .. })));
    }

    #[tokio::test]
    async fn a_gap_is_an_error_and_never_an_empty_log() {
        let store = MemoryStore::new();
        put(&store, 2, open("w").encode().unwrap()).await;
        let error = JobLog::read(&store, &job()).await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("00000001.json is missing"), "{text}");
        assert!(text.contains("00000002.json stands"), "{text}");
    }

    #[tokio::test]
    async fn an_entry_that_shows_late_is_no_gap() {
        // The first read of slot 1 misses it, the second does not.
        let store = Faulty::new().fail("get", 1..2, Fault::Absent);
        log_of(&store, &[open("w"), Entry::Image(image("w", OURS))]).await;
        let log = JobLog::read(&store, &job()).await.unwrap();
        assert_eq!(generations(&log), [2]);
    }

    #[tokio::test]
    async fn an_entry_that_comes_short_once_is_not_damaged() {
        let store = Faulty::new().fail("get", 1..2, Fault::Short);
        log_of(&store, &[Entry::Image(image("w", OURS))]).await;
        let log = JobLog::read(&store, &job()).await.unwrap();
        assert_eq!(generations(&log), [1]);
    }

    #[tokio::test]
    async fn an_unreadable_slot_is_not_a_free_one() {
        let store = Faulty::new().fail("get", 2..3, Fault::Transient);
        log_of(&store, &[open("w"), Entry::Image(image("w", OURS))]).await;
        let read = JobLog::read(&store, &job()).await;
        assert!(matches!(read, Err(LogError::Store { .. })), "{read:?}");
    }

    #[tokio::test]
    async fn the_commit_takes_the_first_free_slot() {
        let store = MemoryStore::new();
        let others = [
            open(OURS),
            Entry::Image(image("w", THEIRS)),
            dropped(THEIRS),
            open(OURS),
        ];
        log_of(&store, &others).await;
        put(&store, 5, "not json").await;
        let generation = append_image(&store, &job(), 1, &image(OURS, OURS))
            .await
            .unwrap();
        assert_eq!(generation, 6);
        let log = JobLog::read(&store, &job()).await.unwrap();
        assert_eq!(log.get(6), Some(&Entry::Image(image(OURS, OURS))));
        // Asking again finds it.
        assert_eq!(
            append_image(&store, &job(), 1, &image(OURS, OURS))
                .await
                .unwrap(),
            6
        );
        assert_eq!(JobLog::read(&store, &job()).await.unwrap().next_slot(), 7);
    }

    #[tokio::test]
    async fn another_writer_or_a_drop_fences() {
        for entry in [open(THEIRS), dropped(OURS)] {
            let store = MemoryStore::new();
            log_of(&store, &[open(OURS), entry]).await;
            let error = append_image(&store, &job(), 2, &image(OURS, OURS))
                .await
                .unwrap_err();
            assert!(
                matches!(error, AppendError::Fenced { generation: 2, .. }),
                "{error:?}"
            );
            let log = JobLog::read(&store, &job()).await.unwrap();
            assert_eq!((generations(&log), log.next_slot()), (vec![], 3));
        }
    }

    #[tokio::test]
    async fn of_two_writers_each_gets_a_slot_of_its_own() {
        for _ in 0..50 {
            let store = std::sync::Arc::new(MemoryStore::new());
            let writers = (0..8).map(|number| {
                let store = std::sync::Arc::clone(&store);
                tokio::spawn(async move {
                    let image = image("w", &attempt(number));
                    let generation = append_image(&*store, &job(), 1, &image).await.unwrap();
                    (generation, image)
                })
            });
            let mut won: Vec<_> = future::try_join_all(writers).await.unwrap();
            won.sort_by_key(|(generation, _)| *generation);
            assert!(won.iter().map(|(generation, _)| *generation).eq(1..=8));
            let log = JobLog::read(&*store, &job()).await.unwrap();
            for (generation, image) in won {
                assert_eq!(log.get(generation), Some(&Entry::Image(image)));
            }
        }
    }

    #[tokio::test]
    async fn what_the_store_did_not_answer_is_unknown_and_what_it_refused_is_not() {
        for (operation, fault, unknown) in [
            ("put_if_absent", Fault::Transient, true),
            ("put_if_absent", Fault::Lost, true),
            ("put_if_absent", Fault::Refused, false),
        ] {
            let store = Faulty::new().fail(operation, 1..2, fault);
            let error = append_image(&store, &job(), 1, &image(OURS, OURS))
                .await
                .unwrap_err();
            let is_unknown = matches!(error, AppendError::Unreachable { generation: 1, .. });
            assert_eq!(is_unknown, unknown, "{fault:?}: {error:?}");
            assert!(is_unknown || matches!(error, AppendError::Refused { .. }));
        }
        // The slot is taken, and by whom cannot be read.
        for fault in [Fault::Transient, Fault::Refused, Fault::Absent] {
            let store = Faulty::new().fail("get", 1..99, fault);
            log_of(&store, &[open(OURS)]).await;
            let error = append_image(&store, &job(), 1, &image(OURS, OURS))
                .await
                .unwrap_err();
            assert!(
                matches!(error, AppendError::Unreachable { .. }),
                "{fault:?}: {error:?}"
            );
        }
    }

    #[tokio::test]
    async fn generations_end_at_eight_digits() {
        let store = MemoryStore::new();
        for slot in [0, GENERATION_MAX + 1] {
            let error = append_image(&store, &job(), slot, &image(OURS, OURS))
                .await
                .unwrap_err();
            assert!(matches!(error, AppendError::Unfit { .. }), "{error:?}");
        }
    }
}
