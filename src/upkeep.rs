//! What is done to a job's data when nobody saves it: attempts that came to nothing are given up, old images are dropped, and what was given up or dropped is removed.
//!
//! In: the job's log, listings. Out: an [`Upkeep`], which says of every attempt what became of it and why. What can fail: the store. Nothing is removed before its `dropped` entry stands in the log, so that nobody
//! can make an image of it, or choose it, any more:
//!
//! | we die | what exists |
//! |---|---|
//! | before the entry | everything |
//! | after it | data that nothing refers to; the next `gc` removes it |
//!
//! A listing is only ever a list of what might be looked at: what is alive is in the log. Ages are the store's own; where it tells none, nothing is old.

pub mod pins;

use std::collections::HashSet;
use std::time::Duration;

use futures::stream::{self, StreamExt, TryStreamExt};
use serde::Serialize;

use crate::config::{JobName, RetentionConfig};
use crate::error::{ExitCode, Failure, Phase};
use crate::image::{Image, ImageError, ImageRef, image_id};
use crate::job_log::{AppendError, Entry, JobLog, LogError, append, append_dropped, slot_key};
use crate::manifest::{claim_key, contest_key, is_nonce, read_back_key};
use crate::ownership::append_code;
use crate::session::{Session, code_before_begin};
use crate::store::{BadKey, Key, Listed, Store, StoreError};
use crate::writer::{CONTESTS, random_hex};

/// Deletes under way at once.
const PARALLELISM: usize = 16;

/// How often a prefix is emptied again because something came into it meanwhile: a request that was on its way.
const ROUNDS: u32 = 10;

/// What `gc` may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GcOptions {
    /// Give up attempts, too, that may be sealed in a spill.
    pub spilled: bool,
    /// Change nothing.
    pub dry_run: bool,
}

/// What was done, or would be.
#[derive(Debug, Serialize)]
pub struct Upkeep {
    /// The job.
    pub job: String,
    /// Nothing was changed.
    pub dry_run: bool,
    /// Every attempt that has data in the store, in order of their nonces.
    pub attempts: Vec<AttemptRow>,
}

/// One attempt's data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AttemptRow {
    /// Its nonce, or whatever stands there.
    pub attempt: String,
    /// The image that it is, or was.
    pub image: Option<String>,
    /// What became of it.
    pub fate: Fate,
    /// Why.
    pub reason: String,
    /// Objects that were removed, or would be.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Uploads that were aborted.
    pub uploads: u64,
    /// It could not be done; `reason` says why.
    pub failed: bool,
}

/// What becomes of an attempt's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fate {
    /// It stays.
    Kept,
    /// It was dropped, and its data goes later.
    Dropped,
    /// Its data is gone.
    Removed,
}

/// Clean-up was not done, or not to its end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UpkeepError {
    /// The log cannot be read.
    #[error("the job's log cannot be read")]
    Log(#[from] LogError),
    /// Whether a `dropped` entry stands is not known, or it does not.
    #[error("attempt {attempt} was not given up")]
    Drop {
        /// The attempt.
        attempt: String,
        /// Why.
        #[source]
        source: Box<AppendError>,
    },
    /// The store failed.
    #[error("the store failed")]
    Store(#[from] StoreError),
    /// A name makes no key.
    #[error("a key is not legal")]
    Key(#[from] BadKey),
    /// Which images are valid is not known.
    #[error("an image cannot be looked at")]
    Image(#[source] Box<ImageError>),
    /// Somebody writes where nobody should.
    #[error("{prefix} does not become empty: something still writes there")]
    Busy {
        /// Where.
        prefix: String,
    },
}

impl UpkeepError {
    /// It keeps nobody from the next attempt. Of a job that is another's, or a store that is out of reach, that cannot be said.
    fn is_about_one(&self) -> bool {
        let code = self.code();
        let is_anothers = matches!(self, Self::Drop { .. }) && code == ExitCode::NotOurs;
        code != ExitCode::RolledBack && !is_anothers
    }

    fn code(&self) -> ExitCode {
        match self {
            Self::Log(LogError::Store { source, .. }) | Self::Store(source) => {
                code_before_begin(source)
            }
            Self::Drop { source, .. } => append_code(source),
            Self::Busy { .. } => ExitCode::NotOurs,
            _ => ExitCode::Preflight,
        }
    }
}

/// Gives up attempts that came to nothing, and removes the data of whatever was given up or dropped.
///
/// # Errors
/// Exit 3 or 10 for the store. What was done until then stays done.
pub fn gc(session: &Session, options: GcOptions) -> Result<Upkeep, Failure> {
    let config = &session.config;
    let rows = gc_job(&*session.store, &config.job, &config.retention, options);
    finish(session, options.dry_run, session.wait(rows))
}

/// Drops old images: all but the newest valid ones (`retention.keep`), and the newest one whose bytes were read back. Data of images that were dropped longer ago than the
/// grace is removed.
///
/// # Errors
/// As [`gc`].
pub fn prune(session: &Session, dry_run: bool) -> Result<Upkeep, Failure> {
    let config = &session.config;
    let rows = prune_job(&*session.store, &config.job, &config.retention, dry_run);
    finish(session, dry_run, session.wait(rows))
}

/// What [`gc`] does, of this job in this store.
///
/// # Errors
/// [`UpkeepError`].
pub async fn gc_job(
    store: &dyn Store,
    job: &JobName,
    retention: &RetentionConfig,
    options: GcOptions,
) -> Result<Vec<AttemptRow>, UpkeepError> {
    let work = Work::new(store, job, retention, options.dry_run);
    work.gc(options.spilled).await
}

/// What [`prune`] does, of this job in this store.
///
/// # Errors
/// [`UpkeepError`].
pub async fn prune_job(
    store: &dyn Store,
    job: &JobName,
    retention: &RetentionConfig,
    dry_run: bool,
) -> Result<Vec<AttemptRow>, UpkeepError> {
    Work::new(store, job, retention, dry_run).prune().await
}

fn finish(
    session: &Session,
    dry_run: bool,
    rows: Result<Vec<AttemptRow>, UpkeepError>,
) -> Result<Upkeep, Failure> {
    match rows {
        Ok(attempts) => Ok(Upkeep {
            job: session.config.job.to_string(),
            dry_run,
            attempts,
        }),
        Err(error) => Err(Failure::new(error.code(), Phase::Read, error)),
    }
}

/// One attempt that cannot be tidied does not keep the others from it.
fn told(attempt: &str, row: Result<AttemptRow, UpkeepError>) -> Result<AttemptRow, UpkeepError> {
    match row {
        Err(
            error @ (UpkeepError::Store(_)
            | UpkeepError::Busy { .. }
            | UpkeepError::Key(_)
            | UpkeepError::Drop { .. }),
        ) if error.is_about_one() => Ok(AttemptRow {
            attempt: attempt.to_owned(),
            image: None,
            fate: Fate::Kept,
            reason: crate::error::one_line(&error),
            objects: 0,
            bytes: 0,
            uploads: 0,
            failed: true,
        }),
        row => row,
    }
}

struct Work<'a> {
    store: &'a dyn Store,
    job: &'a JobName,
    keep: u32,
    grace: Duration,
    older_than: Duration,
    dry_run: bool,
    /// Our own, for the entries.
    writer: String,
}

/// What is to become of an attempt.
enum Verdict {
    Keep(String),
    /// Dropped, but not to be removed yet.
    Wait(String),
    GiveUp(String),
    Remove(String),
}

impl<'a> Work<'a> {
    fn new(
        store: &'a dyn Store,
        job: &'a JobName,
        retention: &RetentionConfig,
        dry_run: bool,
    ) -> Self {
        Self {
            store,
            job,
            keep: retention.keep,
            grace: retention.grace,
            older_than: retention.older_than,
            dry_run,
            writer: random_hex::<16>(),
        }
    }

    async fn gc(&self, spilled: bool) -> Result<Vec<AttemptRow>, UpkeepError> {
        let mut log = JobLog::read(self.store, self.job).await?;
        let mut rows = Vec::new();
        for attempt in self.attempts().await? {
            let row = match self.judge(&log, &attempt, spilled).await {
                Ok(verdict) => self.carry_out(&mut log, &attempt, verdict).await,
                Err(error) => Err(error),
            };
            rows.push(told(&attempt, row)?);
        }
        Ok(rows)
    }

    async fn prune(&self) -> Result<Vec<AttemptRow>, UpkeepError> {
        let mut log = JobLog::read(self.store, self.job).await?;
        let kept = self.kept(&log).await?;
        // What is committed while we work is newer than all of these.
        let known = log.clone();
        let mut rows = Vec::new();
        for attempt in self.attempts().await? {
            if !known.is_image(&attempt) {
                continue;
            }
            let verdict = match kept.iter().find(|(known, _)| *known == attempt) {
                Some((_, why)) => Verdict::Keep(why.clone()),
                None if log.is_dropped(&attempt) => self.judge_dropped(&log, &attempt).await?,
                None => Verdict::GiveUp("older than the images that are kept".to_owned()),
            };
            let row = self.carry_out(&mut log, &attempt, verdict).await;
            rows.push(told(&attempt, row)?);
        }
        Ok(rows)
    }

    /// Everything that has data.
    async fn attempts(&self) -> Result<Vec<String>, UpkeepError> {
        let prefix = format!("{}/data/", self.job);
        Ok(self.store.list_dirs(&prefix).await?)
    }

    /// Attempts whose images stay, and why: the newest valid ones, whatever is newer than those, and the newest that was read back.
    async fn kept(&self, log: &JobLog) -> Result<Vec<(String, String)>, UpkeepError> {
        let mut kept = Vec::new();
        let mut valid = 0;
        let mut read_back = None;
        for (generation, entry) in log.images() {
            let attempt = &entry.attempt;
            if valid < self.keep {
                let image = ImageRef::Generation(generation);
                match Image::open(self.store, self.job, image).await {
                    Ok(_image) => {
                        valid += 1;
                        let why = format!("one of the newest {}", self.keep);
                        kept.push((attempt.clone(), why));
                    }
                    Err(error @ ImageError::Unreachable { .. }) => {
                        return Err(UpkeepError::Image(Box::new(error)));
                    }
                    // Somebody may want to know why; and it takes the place of none that is good.
                    Err(_flawed) => kept.push((
                        attempt.clone(),
                        "not valid, but newer than the images that are kept".to_owned(),
                    )),
                }
            }
            if read_back.is_none() && self.was_read_back(attempt).await? {
                read_back = Some(attempt.clone());
            }
        }
        if let Some(attempt) = read_back
            && !kept.iter().any(|(known, _)| *known == attempt)
        {
            kept.push((attempt, "the newest whose bytes were read back".to_owned()));
        }
        Ok(kept)
    }

    async fn was_read_back(&self, attempt: &str) -> Result<bool, UpkeepError> {
        let key = Key::of_job(self.job, &read_back_key(attempt))?;
        Ok(self.store.head(&key).await?.is_some())
    }

    async fn judge(
        &self,
        log: &JobLog,
        attempt: &str,
        spilled: bool,
    ) -> Result<Verdict, UpkeepError> {
        let keep = |why: String| Ok(Verdict::Keep(why));
        if !is_nonce(attempt) {
            return keep("not written by ckptstream".to_owned());
        }
        if log.is_dropped(attempt) {
            return self.judge_dropped(log, attempt).await;
        }
        if log.is_image(attempt) {
            return keep("an image".to_owned());
        }
        if log.has_unreadable() {
            let why = "the job's log has entries that this version cannot read; they may name it";
            return keep(why.to_owned());
        }
        let saving = log.saving(attempt);
        let place = saving.and_then(|saving| saving.spill.as_ref().map(|spill| (saving, spill)));
        if let (Some((saving, spill)), false) = (place, spilled) {
            let host = &saving.by.host;
            return keep(format!(
                "it may be sealed in {spill} on {host}, for `ckptstream resume` (--spilled gives it up)"
            ));
        }
        if saving.is_some_and(|saving| saving.by.is_known_alive()) {
            return keep("its saver is alive, on this node".to_owned());
        }
        let claim = Key::of_job(self.job, &claim_key(attempt))?;
        let contests =
            (1..=CONTESTS).map(|round| Key::of_job(self.job, &contest_key(attempt, round)));
        let contests: Vec<Key> = contests.collect::<Result<_, _>>()?;
        let prefix = format!("{}/data/{attempt}/", self.job);
        if saving.is_none()
            && let Some(other) = self
                .store
                .list(&prefix)
                .await?
                .iter()
                .find(|object| object.key != claim && !contests.contains(&object.key))
        {
            let other = &other.key;
            return keep(format!(
                "it holds {other}, and the job's log does not know it: somebody copied it there, or the log was removed"
            ));
        }
        let Some(info) = self.store.head(&claim).await? else {
            return keep("it has no claim, so its age is not known".to_owned());
        };
        let Some(age) = info.age else {
            return keep("the store does not tell its age".to_owned());
        };
        // Never while it may still be under way by its own word.
        let said = match saving {
            Some(saving) if !saving.by.is_known_dead() => Duration::from_secs(saving.seconds),
            _ => Duration::ZERO,
        };
        let least = self.older_than.max(said);
        if age < least {
            return keep(format!("{age:.0?} old, less than {least:.0?}"));
        }
        Ok(Verdict::GiveUp(format!("{age:.0?} old, and no image")))
    }

    /// Of an attempt that the log gives up. What never was an image has no readers.
    async fn judge_dropped(&self, log: &JobLog, attempt: &str) -> Result<Verdict, UpkeepError> {
        if !log.is_image(attempt) {
            return Ok(Verdict::Remove("given up".to_owned()));
        }
        let slot = log.entries().find_map(|(slot, entry)| {
            let is_it = matches!(entry, Entry::Dropped { attempt: other, .. } if other == attempt);
            is_it.then_some(slot)
        });
        let age = match slot {
            Some(slot) => {
                let info = self.store.head(&slot_key(self.job, slot)?).await?;
                info.and_then(|info| info.age)
            }
            None => None,
        };
        let is_over = self.grace.is_zero() || age.is_some_and(|age| age >= self.grace);
        if !is_over {
            return Ok(Verdict::Wait(format!(
                "dropped less than {:.0?} ago",
                self.grace
            )));
        }
        if pins::pinned(self.store, self.job).await?.contains(attempt) {
            return Ok(Verdict::Wait("dropped, but a restore reads it".to_owned()));
        }
        Ok(Verdict::Remove("dropped".to_owned()))
    }

    async fn carry_out(
        &self,
        log: &mut JobLog,
        attempt: &str,
        verdict: Verdict,
    ) -> Result<AttemptRow, UpkeepError> {
        let image = log.entries().find_map(|(slot, entry)| match entry {
            Entry::Image(image) if image.attempt == attempt => Some(image_id(slot)),
            _ => None,
        });
        let row = |fate: Fate, reason: String| AttemptRow {
            attempt: attempt.to_owned(),
            image: image.clone(),
            fate,
            reason,
            objects: 0,
            bytes: 0,
            uploads: 0,
            failed: false,
        };
        match verdict {
            Verdict::Keep(why) => Ok(row(Fate::Kept, why)),
            Verdict::Wait(why) => Ok(row(Fate::Dropped, why)),
            Verdict::Remove(why) => self.remove(row(Fate::Removed, why)).await,
            Verdict::GiveUp(why) if self.dry_run && image.is_some() => Ok(row(Fate::Dropped, why)),
            Verdict::GiveUp(why) if self.dry_run => self.remove(row(Fate::Removed, why)).await,
            Verdict::GiveUp(why) => {
                let was_image = image.is_some();
                if !self.give_up(log, attempt, was_image).await? {
                    return Ok(row(Fate::Kept, "it became an image meanwhile".to_owned()));
                }
                match self.judge_dropped(log, attempt).await? {
                    Verdict::Wait(_) => Ok(row(Fate::Dropped, why)),
                    _ => self.remove(row(Fate::Removed, why)).await,
                }
            }
        }
    }

    /// Appends `dropped`. Whether it stands now: an attempt that became an image meanwhile lives.
    async fn give_up(
        &self,
        log: &mut JobLog,
        attempt: &str,
        was_image: bool,
    ) -> Result<bool, UpkeepError> {
        let (store, job, slot) = (self.store, self.job, log.next_slot());
        let appended = if was_image {
            let dropped = Entry::Dropped {
                writer: self.writer.clone(),
                attempt: attempt.to_owned(),
            };
            append(store, job, slot, &dropped, &|_there| false).await
        } else {
            append_dropped(store, job, slot, &self.writer, attempt).await
        };
        log.read_on(self.store, self.job).await?;
        match appended {
            Ok(_slot) => Ok(true),
            Err(AppendError::Fenced { .. }) if !was_image && log.is_image(attempt) => Ok(false),
            Err(source) => Err(UpkeepError::Drop {
                attempt: attempt.to_owned(),
                source: Box::new(source),
            }),
        }
    }

    /// Empties an attempt's prefix, until both listings are empty.
    async fn remove(&self, mut row: AttemptRow) -> Result<AttemptRow, UpkeepError> {
        let prefix = format!("{}/data/{}/", self.job, row.attempt);
        let mut seen = HashSet::new();
        for _ in 0..ROUNDS {
            let objects = self.store.list(&prefix).await?;
            for object in &objects {
                if seen.insert(object.key.clone()) {
                    row.objects += 1;
                    row.bytes += object.len;
                }
            }
            if self.dry_run {
                return Ok(row);
            }
            let aborted = match self.store.abort_uploads_under(&prefix).await {
                Err(StoreError::Refused { code, .. }) if is_unknown_to_the_store(&code) => {
                    tracing::warn!(
                        "{prefix}: uploads cannot be listed ({code}); those that were begun there stay until the bucket's own rules abort them"
                    );
                    0
                }
                aborted => aborted?,
            };
            row.uploads += aborted;
            if objects.is_empty() && aborted == 0 {
                return Ok(row);
            }
            let deletes = stream::iter(&objects).map(|object| async move {
                match self.store.delete(&object.key).await {
                    Err(StoreError::Locked { until, .. }) => Ok(Some((object, until))),
                    deleted => deleted.map(|()| None),
                }
            });
            let locked: Vec<Option<(&Listed, String)>> =
                deletes.buffer_unordered(PARALLELISM).try_collect().await?;
            let locked: Vec<(&Listed, String)> = locked.into_iter().flatten().collect();
            if let Some((_, until)) = locked.iter().max_by_key(|(_, until)| until) {
                row.objects -= locked.len() as u64;
                row.bytes -= locked.iter().map(|(object, _)| object.len).sum::<u64>();
                row.fate = Fate::Dropped;
                row.reason = format!(
                    "{}; {} of its objects are locked until {until}",
                    row.reason,
                    locked.len()
                );
                return Ok(row);
            }
        }
        Err(UpkeepError::Busy { prefix })
    }
}

/// The store has no such operation.
fn is_unknown_to_the_store(code: &str) -> bool {
    code.contains("NotImplemented") || code == "status 501"
}

#[cfg(test)]
mod tests;
