//! The story of a save that was spilled: sealed on a disk → copied into the store → landed → committed → cleared away.
//!
//! In: the spill of the configuration, the store. Out: the image that the save was to make. No GPU, no driver, no target is needed: what has to be known of them was sealed. What exists if we fail:
//!
//! | step | image | spill | exit |
//! |---|---|---|---|
//! | read, check | nothing | whole | 7 (nothing is sealed there), 4 (the job went on elsewhere), 20 (damaged) |
//! | copy, land, commit | nothing, or this one if the commit's answer was lost | whole | 11; 13 as long as the commit is unknown |
//! | clear away | this one | what is left is cleared away by the next `resume` | 0 |
//!
//! Everything can be repeated: objects that have landed are not sent again, an entry that stands in the log is found there. Bytes are checked against what was sealed before an upload is completed.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use tokio_util::sync::CancellationToken;

use crate::codec::Crc64;
use crate::config::SpillPlace;
use crate::error::{ExitCode, Failure, Phase};
use crate::failpoint;
use crate::image::{Image, ImageError, ImageRef, LoadError, prove_landed};
use crate::job_log::{AppendError, Entry, JobLog, LogError, append};
use crate::manifest::{FrameTable, Manifest, ManifestError, ObjectRecord, claim_key};
use crate::outcome::Outcome;
use crate::phases::PhaseClock;
use crate::pipeline::panic_message;
use crate::plan::{PART_COUNT_MAX, PartLimits};
use crate::progress::LaneMeter;
use crate::restore::outcome_of;
use crate::sealed::{SPILL_DIRECTORY, Sealed, SealedError};
use crate::session::Session;
use crate::store::file::FileStore;
use crate::store::retry::{RetryPolicy, Retrying};
use crate::store::{
    BadKey, Key, PartBody, PartNumber, Store, StoreError, crc64_of_parts, create_or_find,
};

/// Length of a part, unless the object would have too many of them.
const PART_LEN: u64 = 16 << 20;
/// Clean-up must not hold back the verdict for longer.
const ABORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Parts in flight at most, each in memory of its own.
const PARTS_IN_FLIGHT: usize = 8;

/// Finishes every sealed save of the job that lies in the spill, the oldest first; the outcome is that of the last one.
///
/// # Errors
/// A [`Failure`] with the code of the table above, and the cause.
pub fn resume(session: &Session) -> Result<Outcome, Failure> {
    let mut clock = PhaseClock::start(&session.meter, Phase::Read);
    let Some(config) = &session.config.spill.place else {
        let why = "no spill is configured; set spill.path in the configuration file";
        return Err(Failure::new(ExitCode::Config, Phase::Config, why));
    };
    let work = AssertUnwindSafe(|| session.wait(finish_all(session, config, &mut clock)));
    let done = catch_unwind(work).unwrap_or_else(|panic| {
        let message = panic_message(panic.as_ref());
        Err((clock.phase(), Box::new(ResumeError::Panic { message })))
    });
    match done {
        Ok(Some(image)) => Ok(outcome_of(session, &image, Vec::new(), clock.finish())),
        Ok(None) => {
            let (job, path) = (&session.config.job, config.path.display());
            let why = format!("no save of job {job} is sealed in {path} (spill.path)");
            Err(Failure::new(ExitCode::NothingToSave, Phase::Read, why))
        }
        Err((phase, error)) => {
            let code = match *error {
                // The entry may stand in the log.
                ResumeError::Panic { .. } if phase == Phase::Commit => ExitCode::CommitUnknown,
                _ => error.code(),
            };
            Err(Failure::new(code, phase, error))
        }
    }
}

/// Brings a save that was just sealed in this spill into the store, and commits it. The clock goes on through the phases.
///
/// # Errors
/// The phase and the cause; the save stays sealed.
pub(crate) async fn upload_sealed(
    session: &Session,
    spill: &dyn Store,
    sealed: &Sealed,
    clock: &mut PhaseClock,
) -> Result<Image, Failure> {
    let mut resuming = Resuming {
        session,
        spill,
        sealed,
        together: &HashSet::new(),
        given_up: HashSet::new(),
    };
    let finished = resuming.finish(clock).await;
    finished.map_err(|error| Failure::new(error.code(), clock.phase(), error))
}

/// Why a sealed save is not an image yet.
#[derive(Debug, thiserror::Error)]
enum ResumeError {
    #[error("the spill cannot be used")]
    Spill(#[source] StoreError),
    #[error("another save or resume of job {job} uses the spill (spill.path)")]
    InUse { job: String },
    #[error("what lies in the spill is of no use")]
    Sealed(#[from] SealedError),
    #[error("the sealed manifest is of no use")]
    Manifest(#[from] ManifestError),
    #[error("{key} in the spill is damaged: {what}")]
    Damaged { key: String, what: String },
    #[error("a key of the sealed save is not legal")]
    Key(#[from] BadKey),
    #[error(
        "the save was sealed for {sealed_for}, and {here} is not that store: {claim} is not there (store.url, store.endpoint)"
    )]
    Elsewhere {
        sealed_for: String,
        here: String,
        claim: String,
    },
    #[error("the job's log cannot be read")]
    Log(#[from] LogError),
    #[error(
        "slot {slot} of the job's log was taken since the save began: {what}; the sealed save would set the job back (to give it up, remove {place})"
    )]
    Overtaken {
        slot: u64,
        what: String,
        place: String,
    },
    #[error("the sealed save is not in the store yet")]
    Store(#[from] StoreError),
    #[error("the sealed save has not landed")]
    Landing(#[from] LoadError),
    #[error("{key} exists in the store, with other bytes")]
    Taken { key: String },
    #[error("the image was not entered into the job's log")]
    Commit(#[source] Box<AppendError>),
    #[error("the image that was committed cannot be opened")]
    Image(#[source] Box<ImageError>),
    #[error("a panic, which is a defect of ckptstream: {message}")]
    Panic { message: String },
}

impl ResumeError {
    fn code(&self) -> ExitCode {
        match self {
            Self::Overtaken { .. } => ExitCode::NotOurs,
            Self::Commit(error) => match **error {
                AppendError::Fenced { .. } => ExitCode::NotOurs,
                AppendError::Unreachable { .. } => ExitCode::CommitUnknown,
                // The same configuration would fail again.
                AppendError::Unfit { .. } => ExitCode::Preflight,
                _ => ExitCode::Spilled,
            },
            Self::Sealed(SealedError::Store(_)) | Self::Spill(_) | Self::Elsewhere { .. } => {
                ExitCode::Preflight
            }
            Self::Sealed(_)
            | Self::Manifest(_)
            | Self::Damaged { .. }
            | Self::Key(_)
            | Self::Taken { .. } => ExitCode::RestoreRefused,
            Self::Log(_)
            | Self::Store(_)
            | Self::Landing(_)
            | Self::Image(_)
            | Self::InUse { .. }
            | Self::Panic { .. } => ExitCode::Spilled,
        }
    }
}

/// An error, and where it came up.
type Failed = (Phase, Box<ResumeError>);

async fn finish_all(
    session: &Session,
    config: &SpillPlace,
    clock: &mut PhaseClock,
) -> Result<Option<Image>, Failed> {
    let reading = |error| (Phase::Read, Box::new(error));
    let disk = FileStore::open_spill(&config.path, SPILL_DIRECTORY);
    let disk = disk.map_err(|error| reading(ResumeError::Spill(error)))?;
    let job = &session.config.job;
    let claimed = disk.claim(job.as_str()).await;
    let claimed = claimed.map_err(|error| reading(ResumeError::Spill(error)))?;
    let _claim = claimed.ok_or_else(|| {
        let job = job.to_string();
        reading(ResumeError::InUse { job })
    })?;
    let policy = RetryPolicy::new(session.config.store.retry_timeout);
    let cancel: CancellationToken = session.cancel.clone();
    let spill = Retrying::new(Arc::new(disk), policy, cancel, Arc::clone(&session.meter));
    let mut sealed = Sealed::all(&spill, job)
        .await
        .map_err(|error| reading(error.into()))?;
    sealed.sort_by_key(|sealed| (sealed.next_slot, sealed.entry.created_ms));
    let together: HashSet<String> = sealed
        .iter()
        .map(|sealed| sealed.entry.writer.clone())
        .collect();
    let (mut last, mut failed) = (None, None);
    for sealed in &sealed {
        let mut resuming = Resuming {
            session,
            spill: &spill,
            sealed,
            together: &together,
            given_up: HashSet::new(),
        };
        match resuming.finish(clock).await {
            Ok(image) => last = Some(image),
            // The others may be of use all the same; the first failure is told.
            Err(error) => failed = failed.or(Some((clock.phase(), error))),
        }
    }
    failed.map_or(Ok(last), Err)
}

/// One sealed save on its way.
struct Resuming<'a> {
    session: &'a Session,
    spill: &'a dyn Store,
    sealed: &'a Sealed,
    /// Writers of all that is sealed here: what came later becomes an image after this one.
    together: &'a HashSet<String>,
    /// Writers that opened the job and gave it up again, by the log as it was read.
    given_up: HashSet<String>,
}

impl Resuming<'_> {
    async fn finish(&mut self, clock: &mut PhaseClock) -> Result<Image, Box<ResumeError>> {
        let job = &self.session.config.job;
        let store = &*self.session.store;
        let entry = &self.sealed.entry;
        if clock.phase() != Phase::Read {
            clock.enter(Phase::Read);
        }
        self.must_be_the_store().await?;
        let log = JobLog::read(store, job).await.map_err(ResumeError::from)?;
        failpoint::pass("resume:read");
        let known = log.entries().find_map(|(slot, there)| match there {
            Entry::Image(image) if image.attempt == entry.attempt => Some(slot),
            _ => None,
        });
        let generation = match known {
            // A log of epochs may leave out what it shows; where it is asked to create it, it says so.
            Some(slot) => append(store, job, slot, &Entry::Image(entry.clone()), &|_there| {
                false
            })
            .await
            .map_err(|error| ResumeError::Commit(Box::new(error)))?,
            None => {
                self.given_up = given_up(&log);
                let older = self.sealed.begun_before(&log);
                self.not_overtaken(&log, &older)?;
                let (manifest, encoded) = self.manifest().await?;
                clock.enter(Phase::Stream);
                self.send_all(&manifest).await?;
                clock.enter(Phase::Commit);
                self.enter(encoded, &older).await?
            }
        };
        failpoint::pass("resume:entered");
        let opened = Image::open(store, job, ImageRef::Generation(generation)).await;
        let (image, _) = opened.map_err(|error| ResumeError::Image(Box::new(error)))?;
        if let Err(error) = self.clear_away().await {
            let why = crate::error::one_line(&error);
            tracing::warn!(
                "the image is committed, but the spill could not be cleared away: {why}"
            );
        }
        Ok(image)
    }

    /// Every object and frame table.
    async fn send_all(&self, manifest: &Manifest) -> Result<(), ResumeError> {
        let meters: Vec<_> = manifest
            .extents()
            .map(|extent| LaneMeter::new(extent.device.clone(), extent.object.len))
            .collect();
        self.session.meter.announce(meters.clone());
        let mut tables = Vec::new();
        for extent in manifest.extents() {
            let table = self.small(&extent.table.key, extent.table.len).await?;
            FrameTable::decode_and_verify(&table, &extent.table, extent)?;
            tables.push(table);
        }
        for ((extent, table), meter) in manifest.extents().zip(tables).zip(meters) {
            self.send(&extent.object, &meter).await?;
            self.put(&extent.table.key, table).await?;
            failpoint::pass("resume:table stored");
        }
        Ok(())
    }

    /// The manifest, and the one entry that makes the image. Its generation.
    async fn enter(&self, manifest: Bytes, older: &HashSet<String>) -> Result<u64, ResumeError> {
        let entry = &self.sealed.entry;
        self.put(&entry.manifest_key, manifest).await?;
        failpoint::pass("resume:manifest stored");
        let (store, job) = (&*self.session.store, &self.session.config.job);
        // Slots that were taken while objects were copied count as those before.
        let in_the_way = |there: &Entry| self.is_in_the_way(there, older);
        let slot = self.sealed.next_slot;
        let entry = Entry::Image(entry.clone());
        let entered = append(store, job, slot, &entry, &in_the_way).await;
        entered.map_err(|error| ResumeError::Commit(Box::new(error)))
    }

    /// The manifest, and its bytes.
    async fn manifest(&self) -> Result<(Manifest, Bytes), ResumeError> {
        let entry = &self.sealed.entry;
        let bytes = self.small(&entry.manifest_key, entry.manifest_len).await?;
        let found = crate::manifest::digest_of(&bytes);
        if found != entry.manifest_digest {
            return Err(ResumeError::Damaged {
                key: entry.manifest_key.clone(),
                what: format!("digest {found}, sealed with {}", entry.manifest_digest),
            });
        }
        let job = self.session.config.job.as_str();
        let manifest = Manifest::decode_and_verify(&bytes, job, &entry.attempt)?;
        Ok((manifest, bytes))
    }

    /// The store is the one in which the save began: the attempt's claim stands there, whatever its URL is called today.
    async fn must_be_the_store(&self) -> Result<(), ResumeError> {
        let store = &*self.session.store;
        let attempt = &self.sealed.entry.attempt;
        let claim = Key::of_job(&self.session.config.job, &claim_key(attempt))?;
        match store.head(&claim).await? {
            Some(_) => Ok(()),
            None => Err(ResumeError::Elsewhere {
                sealed_for: self.sealed.store.clone(),
                here: store.describe(),
                claim: claim.to_string(),
            }),
        }
    }

    /// Who took a slot since the save began may have gone on with the job from an older image.
    fn is_in_the_way(&self, there: &Entry, older: &HashSet<String>) -> bool {
        let has_given_up =
            matches!(there, Entry::Open { writer } if self.given_up.contains(writer));
        !has_given_up && self.sealed.is_overtaken_by(there, self.together, older)
    }

    fn not_overtaken(&self, log: &JobLog, older: &HashSet<String>) -> Result<(), ResumeError> {
        let mut since = log
            .entries()
            .filter(|(slot, _)| *slot >= self.sealed.next_slot);
        match since.find(|(_, there)| self.is_in_the_way(there, older)) {
            Some((slot, there)) => {
                let (job, attempt) = (&self.session.config.job, &self.sealed.entry.attempt);
                Err(ResumeError::Overtaken {
                    slot,
                    what: there.describe(),
                    place: format!("{}/{job}/data/{attempt}", self.spill.describe()),
                })
            }
            None => Ok(()),
        }
    }

    /// A whole small object of the spill.
    async fn small(&self, key: &str, len: u64) -> Result<Bytes, ResumeError> {
        let damaged = |what: String| ResumeError::Damaged {
            key: key.to_owned(),
            what,
        };
        let here = Key::of_job(&self.session.config.job, key)?;
        let len_max = usize::try_from(len).unwrap_or(usize::MAX);
        match self.spill.get(&here, len_max).await {
            Ok(Some(bytes)) if bytes.len() as u64 == len => Ok(bytes),
            Ok(Some(bytes)) => Err(damaged(format!("{} bytes, sealed with {len}", bytes.len()))),
            Ok(None) => Err(damaged("it is not there".to_owned())),
            Err(error) if error.is_about_the_object() => Err(damaged(error.to_string())),
            Err(error) => Err(ResumeError::Spill(error)),
        }
    }

    /// Creates an object, or finds the very same.
    async fn put(&self, key: &str, bytes: Bytes) -> Result<(), ResumeError> {
        let store = &*self.session.store;
        let there = Key::of_job(&self.session.config.job, key)?;
        match create_or_find(store, &there, bytes).await? {
            true => Ok(()),
            false => Err(ResumeError::Taken {
                key: there.to_string(),
            }),
        }
    }

    /// Copies a data object into the store, unless it has landed there.
    async fn send(&self, object: &ObjectRecord, meter: &LaneMeter) -> Result<(), ResumeError> {
        let store = &*self.session.store;
        let key = Key::of_job(&self.session.config.job, &object.key)?;
        if store.head(&key).await?.is_some() {
            prove_landed(store, &key, object.len, object.crc64).await?;
            return Ok(());
        }
        let config = &self.session.config.store;
        let part_len = part_len(object.len, config.part_size, &config.limits);
        let upload = store.begin_upload(&key).await?;
        failpoint::pass("resume:upload open");
        let numbers = 1..=object.len.div_ceil(part_len).max(1);
        let parts = stream::iter(numbers).map(|number| {
            let (key, upload) = (&key, &upload);
            async move {
                let start = (number - 1) * part_len;
                let end = (start + part_len).min(object.len);
                let bytes = self.range(key, start, end).await?;
                let crc64 = Crc64::of(&bytes);
                let body = PartBody::new(vec![bytes], crc64.value());
                let number = PartNumber::new(number).ok_or_else(|| ResumeError::Damaged {
                    key: key.to_string(),
                    what: format!("{} bytes are more than {PART_COUNT_MAX} parts", object.len),
                })?;
                let receipt = store.put_part(key, upload, number, body).await?;
                failpoint::pass("resume:part acknowledged");
                for counted in [
                    &meter.copied,
                    &meter.coded,
                    &meter.acknowledged,
                    &meter.stored,
                ] {
                    counted.fetch_add(receipt.len, Ordering::Relaxed);
                }
                Ok::<_, ResumeError>(receipt)
            }
        });
        let budget = self.session.config.pipeline.memory_budget / 2;
        let fit = usize::try_from(budget / part_len).unwrap_or(PARTS_IN_FLIGHT);
        let sent = parts
            .buffered(fit.clamp(1, PARTS_IN_FLIGHT))
            .try_collect::<Vec<_>>()
            .await;
        let checked = sent.and_then(|receipts| {
            let sum = crc64_of_parts(&receipts);
            if sum == object.crc64 {
                return Ok(receipts);
            }
            Err(ResumeError::Damaged {
                key: object.key.clone(),
                what: format!("CRC64NVME {sum}, sealed with {}", object.crc64),
            })
        });
        let crc64 = object.crc64.value();
        let completed = match checked {
            Ok(receipts) => store
                .complete_upload(&key, &upload, &receipts, object.len, crc64)
                .await
                .map_err(ResumeError::from),
            Err(error) => Err(error),
        };
        if let Err(error) = completed {
            // One that was completed after all is left alone by this.
            // Also after a signal, which ends the calls of the other store.
            let aborted = self.session.store_after_begin.abort_upload(&key, &upload);
            let why = match tokio::time::timeout(ABORT_TIMEOUT, aborted).await {
                Ok(Ok(())) => None,
                Ok(Err(left)) => Some(crate::error::one_line(&left)),
                Err(_elapsed) => Some(format!("no answer within {ABORT_TIMEOUT:?}")),
            };
            if let Some(why) = why {
                tracing::warn!("an unfinished upload stays in the store: {why}");
            }
            return Err(error);
        }
        failpoint::pass("resume:upload completed");
        prove_landed(store, &key, object.len, object.crc64).await?;
        failpoint::pass("resume:object landed");
        Ok(())
    }

    async fn range(&self, key: &Key, start: u64, end: u64) -> Result<Bytes, ResumeError> {
        let mut bytes = vec![0; usize::try_from(end - start).unwrap_or(usize::MAX)];
        let read = self
            .spill
            .get_range(key, start..end, None, &mut bytes)
            .await;
        match read {
            Ok(()) => Ok(Bytes::from(bytes)),
            Err(error) if error.is_about_the_object() => Err(ResumeError::Damaged {
                key: key.to_string(),
                what: error.to_string(),
            }),
            Err(error) => Err(ResumeError::Spill(error)),
        }
    }

    /// The save is in the store: removes it here. What says that it is sealed goes last, so that a `resume` that dies on the way is followed by one that goes on.
    async fn clear_away(&self) -> Result<(), StoreError> {
        let entry = &self.sealed.entry;
        let prefix = format!("{}/data/{}/", self.session.config.job, entry.attempt);
        let sealed = format!("{prefix}sealed.json");
        let left = self.spill.list(&prefix).await?;
        let (last, first): (Vec<_>, Vec<_>) =
            left.iter().partition(|left| left.key.as_str() == sealed);
        for left in first {
            self.spill.delete(&left.key).await?;
        }
        failpoint::pass("resume:cleared away");
        for left in last {
            self.spill.delete(&left.key).await?;
        }
        failpoint::pass("resume:unsealed");
        Ok(())
    }
}

fn given_up(log: &JobLog) -> HashSet<String> {
    let given_up = log.entries().filter_map(|(_, entry)| match entry {
        Entry::Open { writer } if log.has_given_up(writer) => Some(writer.clone()),
        _ => None,
    });
    given_up.collect()
}

/// Bytes of every part but the last.
fn part_len(object_len: u64, set: Option<u64>, limits: &PartLimits) -> u64 {
    let least = limits.least_part_len(object_len);
    set.unwrap_or(PART_LEN).max(least).min(limits.len_max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_object_has_too_many_parts() {
        for (len, set) in [
            (0, None),
            (1, None),
            (141 << 30, None),
            (5 << 40, None),
            (1 << 30, Some(5 << 20)),
        ] {
            for count_max in [PART_COUNT_MAX, 2000] {
                let limits = PartLimits {
                    count_max,
                    ..PartLimits::S3
                };
                let part_len = part_len(len, set, &limits);
                assert!(len.div_ceil(part_len) <= count_max, "{len}");
                assert!(part_len >= set.unwrap_or(PART_LEN));
            }
        }
    }
}
