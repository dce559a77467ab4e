//! Appending to a job's log: who is first in a slot decides for ever.
//!
//! In: an entry, and the slot after the last one that its writer knows. Out: the slot that it got. What can fail: the store; an entry in the way that says that the job, or the attempt, is no longer
//! the writer's ([`AppendError::Fenced`]).
//!
//! Every answer that is lost is settled by looking: an entry of ours that stands there was appended, by whichever of our requests.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use super::{ENTRY_LEN_MAX, Entry, ImageEntry, LogError, SavingEntry, read_slot, slot_key};
use crate::config::JobName;
use crate::store::{Key, PutOutcome, Store, StoreError};

/// How often a slot that is taken is read until it shows, and the pause in between.
const LOOKS: u32 = 12;
const LOOK_PAUSE: Duration = Duration::from_millis(500);

/// An entry was not appended, or it is not known whether it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AppendError {
    /// What stands in our way says that the job, or the attempt, is not ours. The entry does not exist.
    #[error("fenced: in slot {generation} of the log of job {job}, {what}")]
    Fenced {
        /// The job.
        job: String,
        /// The slot that says so.
        generation: u64,
        /// What stands there.
        what: String,
    },
    /// The store did not answer. The entry may exist.
    #[error(
        "it is not known whether slot {generation} of the log of job {job} was taken; ask `ckptstream list` later"
    )]
    Unreachable {
        /// The job.
        job: String,
        /// The slot that was aimed at.
        generation: u64,
        /// Why.
        #[source]
        source: StoreError,
    },
    /// The store refused the entry. It does not exist.
    #[error("the store refuses slot {generation} of the log of job {job}")]
    Refused {
        /// The job.
        job: String,
        /// The slot that was aimed at.
        generation: u64,
        /// Why.
        #[source]
        source: StoreError,
    },
    /// The entry cannot be written as it is. It does not exist.
    #[error("the log entry for job {job} is unfit: {what}")]
    Unfit {
        /// The job.
        job: String,
        /// Why.
        what: String,
    },
}

/// Commits an image: creates its entry in the first slot from `from_slot` on that is free, and returns the generation. `from_slot` is the slot after
/// the last one that this writer has read or written.
///
/// # Errors
/// [`AppendError`] says whether the image exists.
pub async fn append_image(
    store: &dyn Store,
    job: &JobName,
    from_slot: u64,
    image: &ImageEntry,
) -> Result<u64, AppendError> {
    let entry = Entry::Image(image.clone());
    append(store, job, from_slot, &entry, &|there| fences(there, image)).await
}

/// Announces a save: creates its `saving` entry in the first slot from `from_slot` on that is free, unless somebody opened the job before it, or gave the attempt up.
///
/// # Errors
/// [`AppendError`] says whether the entry exists.
pub async fn append_saving(
    store: &dyn Store,
    job: &JobName,
    from_slot: u64,
    saving: &SavingEntry,
) -> Result<u64, AppendError> {
    let entry = Entry::Saving(saving.clone());
    let in_the_way = |there: &Entry| match there {
        Entry::Open { .. } => true,
        Entry::Dropped { attempt, .. } => *attempt == saving.attempt,
        _ => false,
    };
    append(store, job, from_slot, &entry, &in_the_way).await
}

/// Gives an attempt up that is no image: creates its `dropped` entry in the first slot from `from_slot` on that is free, unless it became an image before it.
///
/// # Errors
/// [`AppendError`]: fenced by the attempt's own image, which lives.
pub async fn append_dropped(
    store: &dyn Store,
    job: &JobName,
    from_slot: u64,
    writer: &str,
    attempt: &str,
) -> Result<u64, AppendError> {
    let dropped = Entry::Dropped {
        writer: writer.to_owned(),
        attempt: attempt.to_owned(),
    };
    let lives = |there: &Entry| matches!(there, Entry::Image(image) if image.attempt == attempt);
    append(store, job, from_slot, &dropped, &lives).await
}

/// Creates an entry in the first slot from `from_slot` on that is free, unless one before it is `in_the_way`. Returns the slot; that of an entry that says the same, if there is one.
///
/// Cancel-safe like a lost answer: a dropped future may or may not have appended.
///
/// # Errors
/// [`AppendError`] says whether the entry exists.
pub async fn append(
    store: &dyn Store,
    job: &JobName,
    from_slot: u64,
    entry: &Entry,
    in_the_way: &(dyn Fn(&Entry) -> bool + Sync),
) -> Result<u64, AppendError> {
    let body = encode(entry).map_err(|why| unfit(job, &why))?;
    let mut generation = from_slot;
    loop {
        let failed = |source: StoreError| {
            let job = job.to_string();
            match source {
                StoreError::Fenced { what, .. } => AppendError::Fenced {
                    job,
                    generation,
                    what,
                },
                StoreError::Unfit { what, .. } => AppendError::Unfit { job, what },
                source if source.is_outcome_unknown() => AppendError::Unreachable {
                    job,
                    generation,
                    source,
                },
                source => AppendError::Refused {
                    job,
                    generation,
                    source,
                },
            }
        };
        let key = slot_key(job, generation).map_err(|error| unfit(job, &error))?;
        let put = store.put_if_absent(&key, body.clone()).await;
        if put.map_err(failed)? == PutOutcome::Created {
            return Ok(generation);
        }
        let there = read_taken_slot(store, job, generation, &key).await?;
        if says_the_same(&there, entry) {
            return Ok(generation);
        }
        if in_the_way(&there) {
            return Err(AppendError::Fenced {
                job: job.to_string(),
                generation,
                what: there.describe(),
            });
        }
        generation += 1;
    }
}

/// One attempt is one image at most, and given up once: who wrote it is all the same.
fn says_the_same(there: &Entry, entry: &Entry) -> bool {
    match (there, entry) {
        (Entry::Image(theirs), Entry::Image(image)) => theirs.attempt == image.attempt,
        (Entry::Dropped { attempt: other, .. }, Entry::Dropped { attempt, .. }) => other == attempt,
        _ => there == entry,
    }
}

/// Whether an entry in our way says that the job, or the attempt, is no longer ours.
fn fences(there: &Entry, image: &ImageEntry) -> bool {
    match there {
        Entry::Open { writer } => *writer != image.writer,
        Entry::Dropped { attempt, .. } => *attempt == image.attempt,
        _ => false,
    }
}

fn unfit(job: &JobName, why: &dyn fmt::Display) -> AppendError {
    AppendError::Unfit {
        job: job.to_string(),
        what: why.to_string(),
    }
}

/// The bytes of an entry, or why nobody could read it.
fn encode(entry: &Entry) -> Result<Bytes, String> {
    if let Entry::Image(image) = entry
        && let Some(flaw) = image.flaw()
    {
        return Err(flaw);
    }
    let body = entry.encode().map_err(|error| error.to_string())?;
    if body.len() > ENTRY_LEN_MAX {
        return Err(format!("{} bytes, at most {ENTRY_LEN_MAX}", body.len()));
    }
    Ok(body)
}

/// What stands in a slot that the store says is taken. Not to see it leaves open whether it is ours.
async fn read_taken_slot(
    store: &dyn Store,
    job: &JobName,
    generation: u64,
    key: &Key,
) -> Result<Entry, AppendError> {
    let unseen = |source: StoreError| AppendError::Unreachable {
        job: job.to_string(),
        generation,
        source,
    };
    let mut looks = 0;
    let read = loop {
        let read = read_slot(store, job, generation).await;
        looks += 1;
        // Some stores show a new object late.
        if !matches!(read, Ok(None)) || looks == LOOKS {
            break read;
        }
        tokio::time::sleep(LOOK_PAUSE).await;
    };
    match read {
        Ok(Some(entry)) => Ok(entry),
        Ok(None) => Err(unseen(StoreError::Transient {
            operation: "GetObject",
            key: key.to_string(),
            what: "the store says that the entry exists but does not show it".to_owned(),
            source: None,
        })),
        // An entry of ours that stands there would have been shown.
        Err(LogError::Store {
            source: StoreError::Fenced { what, .. },
            ..
        }) => Err(AppendError::Fenced {
            job: job.to_string(),
            generation,
            what,
        }),
        Err(LogError::Store { source, .. }) => Err(unseen(source)),
        Err(error) => Err(unfit(job, &error)),
    }
}
