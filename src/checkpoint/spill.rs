//! The second place: where a save goes when the store does not take it in time.
//!
//! In: a directory from the configuration, the GPUs' memory in use, the deadline. Out, before the lock: room set aside for the worst case, and the moment until which the store may be tried; after a failure: the
//! save sealed there, read back past the page cache. What can fail: no room, no disk, no time. Before the lock that turns the spill off, with a warning; afterwards it is told beside the failure that
//! it was to mend.
//!
//! | we die | what exists |
//! |---|---|
//! | before `sealed.json` has its name | files that nobody takes for a save; the next save there sweeps them away |
//! | after it | a sealed save, which `resume` finishes |

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::attempt::{Attempt, Holds, OpenUpload, fresh_key, gpu_name};
use super::commit::{Captured, Written, write_manifest, write_tables};
use super::memory::Memory;
use super::{expect_still, land};
use crate::config::{JobName, OnFailure, SpillPlace, SpillWhen, Survives};
use crate::driver::{CheckpointingProcess, Driver, DriverError, ProcessState};
use crate::failpoint;
use crate::image::Image;
use crate::manifest::spilled_manifest_key;
use crate::outcome::StageOutcome;
use crate::pipeline;
use crate::sealed::{self, SPILL_DIRECTORY, Sealed, SealedError};
use crate::session::Session;
use crate::store::file::{Claim, FileStore};
use crate::store::retry::{RetryPolicy, Retrying};
use crate::store::{Store, StoreError};
use crate::target::Target;

/// Bytes that are written to learn the disk's rate: enough for more than one of its own buffers.
const MEASURED_LEN: usize = 64 << 20;
/// A disk is taken to be this much slower than it was measured: it was measured once, and is read back too.
const SLOWER: f64 = 2.5;
/// Bytes that a thread codes in a second, at least, beside the copies.
const CODED_RATE: f64 = 5e8;
/// For what does not grow with the bytes.
const OVERHEAD: Duration = Duration::from_secs(2);
/// Frames, headers and tables may take this much more than the raw bytes, one part in so many.
const SLACK_SHARE: u64 = 64;
const SLACK_MIN: u64 = 64 << 20;
/// A disk that does not answer for so long is given up.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same while the target is locked.
const TOP_UP_PATIENCE: Duration = Duration::from_millis(500);

/// A save that is whole in the spill.
pub(super) struct SealedSave {
    pub(super) sealed: Sealed,
    /// As a reader of the spill would open it. It has no generation.
    pub(super) image: Image,
    pub(super) stages: Vec<StageOutcome>,
    pub(super) slowest_stage: Option<String>,
}

/// Room for one save.
pub(super) struct Spill {
    store: Arc<Retrying<FileStore>>,
    uploads: Vec<OpenUpload>,
    /// Time in which the disk wrote [`MEASURED_LEN`].
    took: Duration,
    config: SpillPlace,
    /// Nobody else has the job's part of the spill.
    _claim: Claim,
}

/// There is none, although one is configured, and why: for whoever reads the verdict.
#[derive(Debug)]
pub(super) struct NoSpill(pub(super) String);

impl NoSpill {
    fn because(error: &SpillError) -> Self {
        let why = crate::error::one_line(error);
        let why = format!("there is no spill: {why}");
        tracing::warn!("{why}");
        Self(why)
    }
}

/// Why there is no spill.
#[derive(Debug, thiserror::Error)]
enum SpillError {
    #[error("no room could be set aside in {path}")]
    Store {
        path: String,
        #[source]
        source: StoreError,
    },
    #[error("a key of this save is not legal")]
    Key(#[from] crate::store::BadKey),
    #[error("the GPUs' memory in use cannot be looked up")]
    Driver(#[from] DriverError),
    #[error("another save or resume of job {job} uses {path}")]
    InUse { path: String, job: String },
    #[error("{path} does not answer")]
    Hangs { path: String },
    #[error("what an earlier save left cannot be looked at")]
    Left(#[from] SealedError),
    #[error(
        "{path} would need {needed:.0?}, and half at least of the {left:.0?} that the deadline leaves is for the store"
    )]
    TooSlow {
        path: String,
        needed: Duration,
        left: Duration,
    },
}

impl Spill {
    /// Sets room aside, if a spill is configured, and tells the store until when it may try. Without room the save goes on, and says that it has no second place.
    pub(super) fn prepare(
        session: &Session,
        driver: &Driver,
        target: &Target,
        attempt: &Attempt,
        on_failure: OnFailure,
    ) -> Result<Option<Self>, NoSpill> {
        let config = match &session.config.spill.place {
            Some(config) if is_needed(session, on_failure) => config,
            _ => return Ok(None),
        };
        let reserved = session.wait(async {
            // A disk that hangs must not hold up a save that the store would take.
            let reserving = Self::reserve(session, config, driver, target, attempt);
            let reserved = tokio::time::timeout(PATIENCE, reserving).await;
            reserved.unwrap_or_else(|_elapsed| Err(hangs(config)))
        });
        let (disk, claim, uploads, took) = match reserved {
            Ok(reserved) => reserved,
            Err(error) => return Err(NoSpill::because(&error)),
        };
        let store = Retrying::new(
            disk,
            RetryPolicy::new(PATIENCE),
            CancellationToken::new(),
            Arc::clone(&session.meter),
        );
        failpoint::pass("spill:room set aside");
        Ok(Some(Self {
            store: Arc::new(store),
            uploads,
            took,
            config: config.clone(),
            _claim: claim,
        }))
    }

    async fn reserve(
        session: &Session,
        config: &SpillPlace,
        driver: &Driver,
        target: &Target,
        attempt: &Attempt,
    ) -> Result<(Arc<FileStore>, Claim, Vec<OpenUpload>, Duration), SpillError> {
        let failed = |source| not_set_aside(config, source);
        let job = &session.config.job;
        let path = config.path.clone();
        let opening =
            tokio::task::spawn_blocking(move || FileStore::open_spill(&path, SPILL_DIRECTORY));
        let opened = opening.await.map_err(|_it_ended| hangs(config))?;
        let disk = Arc::new(opened.map_err(failed)?);
        disk.sweep().await.map_err(failed)?;
        let claim = disk.claim(job.as_str()).await.map_err(failed)?;
        let claim = claim.ok_or_else(|| SpillError::InUse {
            path: config.path.display().to_string(),
            job: job.to_string(),
        })?;
        remove_unsealed(&*disk, job).await?;
        let mut uploads = Vec::new();
        let room = Self::set_aside(
            session,
            config,
            driver,
            target,
            attempt,
            &disk,
            &mut uploads,
        );
        let ready = async {
            room.await?;
            disk.measure(MEASURED_LEN).await.map_err(failed)
        };
        match ready.await {
            Ok(took) => Ok((disk, claim, uploads, took)),
            Err(error) => {
                for open in &uploads {
                    // It is swept away by a later save at the latest.
                    let _given_back = disk.abort_upload(&open.key, &open.upload).await;
                }
                Err(error)
            }
        }
    }

    /// Room for what every GPU uses. What was begun is in `uploads`, also after an error.
    async fn set_aside(
        session: &Session,
        config: &SpillPlace,
        driver: &Driver,
        target: &Target,
        attempt: &Attempt,
        disk: &FileStore,
        uploads: &mut Vec<OpenUpload>,
    ) -> Result<(), SpillError> {
        let failed = |source| not_set_aside(config, source);
        let used = driver.used_memory_of_all()?;
        let in_all = used.iter().copied().fold(0, u64::saturating_add);
        for (device, (gpu, used)) in driver.devices().iter().zip(&used).enumerate() {
            let name = gpu_name(target, gpu);
            let key = fresh_key(&session.config.job, &attempt.nonce, &name)?;
            let upload = disk.begin_upload(&key).await.map_err(failed)?;
            uploads.push(OpenUpload {
                holds: Holds::Gpu { member: 0, device },
                key: key.clone(),
                upload: upload.clone(),
            });
            let reserved = disk.reserve(&key, &upload, with_slack(*used), in_all).await;
            reserved.map_err(failed)?;
        }
        Ok(())
    }

    /// Tells the store until when it may try, by this disk's rate. A disk that would be too slow is given back.
    pub(super) fn leave_time(
        self,
        session: &Session,
        driver: &Driver,
        on_failure: OnFailure,
    ) -> Result<Self, NoSpill> {
        self.store.set_deadline(session.deadline());
        let used = driver.used_memory_of_all().map_err(SpillError::from);
        let left = used.and_then(|used| {
            let in_all = used.into_iter().fold(0, u64::saturating_add);
            leave_time(session, &self.config, self.took, in_all, on_failure)
        });
        match left {
            Ok(()) => Ok(self),
            Err(error) => {
                self.give_back(session);
                Err(NoSpill::because(&error))
            }
        }
    }

    /// The target is locked, and its memory as large as it will be: sets aside what it took since.
    pub(super) fn top_up(&self, session: &Session, driver: &Driver) {
        let topping_up = async {
            let used = driver.used_memory_of_all()?;
            let in_all = used.iter().copied().fold(0, u64::saturating_add);
            for (open, used) in self.uploads.iter().zip(used) {
                let disk = self.store.inner();
                let reserved = disk.reserve(&open.key, &open.upload, with_slack(used), in_all);
                let reserved = reserved.await;
                reserved.map_err(|source| not_set_aside(&self.config, source))?;
            }
            Ok::<_, SpillError>(())
        };
        // The target stands still meanwhile.
        let topped_up = session.wait(async {
            let done = tokio::time::timeout(TOP_UP_PATIENCE, topping_up).await;
            done.unwrap_or_else(|_elapsed| Err(hangs(&self.config)))
        });
        if let Err(error) = topped_up {
            let why = crate::error::one_line(&error);
            tracing::warn!("the spill may be too small: {why}");
        }
    }

    /// Seals the save: every GPU's memory is read once more, written, and read back from the disk.
    pub(super) fn seal(
        &self,
        session: &Session,
        driver: &Driver,
        target: &Target,
        attempt: &Attempt,
        begun: &CheckpointingProcess,
        memory: &mut Memory,
    ) -> Result<SealedSave, Box<dyn Error + Send + Sync>> {
        expect_still(driver, target, ProcessState::Checkpointing)?;
        let store = Arc::clone(&self.store) as Arc<dyn Store>;
        let (lanes, encoders, resources) = memory
            .deal_out(
                session,
                begun.extents().iter().map(|extent| (0, extent)),
                store,
                &self.uploads,
            )
            .ok_or("nothing was prepared for a second run")?;
        let saved = pipeline::save(lanes, encoders, resources)?;
        failpoint::pass("spill:all written");
        let etags = land(session, &*self.store, &saved.lanes)?;
        failpoint::pass("spill:all landed");
        expect_still(driver, target, ProcessState::Checkpointing)?;
        let into = (&*self.store as &dyn Store, self.uploads.as_slice());
        let landed = write_tables(session, driver, into, saved.lanes, etags)?;
        let Written { entry, image } = write_manifest(
            session,
            &Captured::gpus(driver, vec![target]),
            attempt,
            (&*self.store, spilled_manifest_key(&attempt.nonce)),
            landed,
        )?;
        failpoint::pass("spill:manifest stored");
        let sealed = Sealed {
            format: sealed::FORMAT,
            job: session.config.job.to_string(),
            store: session.store.describe(),
            next_slot: attempt.next_slot,
            entry,
        };
        session.wait(sealed.put(&*self.store, &session.config.job))?;
        failpoint::pass("spill:sealed");
        Ok(SealedSave {
            sealed,
            image,
            stages: saved.stages,
            slowest_stage: saved.slowest_stage,
        })
    }

    /// What a person has to know about a sealed save.
    pub(super) fn note(&self) -> String {
        let path = self.config.path.display();
        match self.config.survives {
            Survives::Node => format!("the save is sealed in {path}"),
            Survives::Process => {
                format!("the save is sealed in {path}; resume it before this node goes away")
            }
        }
    }

    /// Where the save lies.
    pub(super) fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// The session of one who reads images from the spill, and whom no signal stops.
    pub(super) fn session(&self, session: &Session) -> Session {
        let disk: Arc<dyn Store> = self.store.shared();
        let reading = || {
            Retrying::new(
                Arc::clone(&disk),
                RetryPolicy::new(PATIENCE),
                CancellationToken::new(),
                Arc::clone(&session.meter),
            )
        };
        Session {
            cancel: CancellationToken::new(),
            store: Arc::new(reading()),
            store_after_begin: Arc::new(reading()),
            ..session.clone()
        }
    }

    /// The save is not wanted any more: from now on nobody takes it for one.
    ///
    /// # Errors
    /// [`StoreError`]; it may be found and finished by a later `resume`.
    pub(super) fn unseal(&self, session: &Session, save: &SealedSave) -> Result<(), StoreError> {
        let key = Sealed::key(&session.config.job, &save.sealed.entry.attempt);
        let key = key.map_err(|error| StoreError::Mismatch {
            operation: "DeleteObject",
            key: save.sealed.entry.attempt.clone(),
            what: error.to_string(),
        })?;
        session.wait(self.store.delete(&key))?;
        failpoint::pass("spill:unsealed");
        Ok(())
    }

    /// Removes what is left of an attempt that is not sealed any more.
    pub(super) fn clear_away(&self, session: &Session) {
        let cleared = session.wait(remove_unsealed(&*self.store, &session.config.job));
        if let Err(error) = cleared {
            let why = crate::error::one_line(&error);
            tracing::warn!("the spill was not cleared away: {why}");
        }
    }

    /// Path of what says that a save is sealed.
    pub(super) fn place_of(&self, session: &Session, save: &SealedSave) -> String {
        let (job, attempt) = (&session.config.job, &save.sealed.entry.attempt);
        let path = self.config.path.display();
        format!("{path}/{SPILL_DIRECTORY}/{job}/data/{attempt}/sealed.json")
    }

    /// Gives the room back.
    pub(super) fn give_back(&self, session: &Session) {
        for open in &self.uploads {
            let given_back = session.wait(self.store.abort_upload(&open.key, &open.upload));
            if let Err(error) = given_back {
                let why = crate::error::one_line(&error);
                tracing::warn!("room in the spill was not given back: {why}");
            }
        }
    }
}

fn not_set_aside(config: &SpillPlace, source: StoreError) -> SpillError {
    SpillError::Store {
        path: config.path.display().to_string(),
        source,
    }
}

fn hangs(config: &SpillPlace) -> SpillError {
    SpillError::Hangs {
        path: config.path.display().to_string(),
    }
}

/// Removes what earlier saves of the job left that died before they were sealed. Sealed ones stay for `resume`, which is told.
async fn remove_unsealed(disk: &dyn Store, job: &JobName) -> Result<(), SealedError> {
    for attempt in disk.list_dirs(&format!("{job}/data/")).await? {
        if Sealed::read(disk, job, &attempt).await?.is_some() {
            tracing::warn!(
                "a sealed save of job {job} waits in the spill; run `ckptstream resume`"
            );
            continue;
        }
        for left in disk.list(&format!("{job}/data/{attempt}/")).await? {
            disk.delete(&left.key).await?;
        }
    }
    Ok(())
}

/// Whether anything that may happen needs the spill.
fn is_needed(session: &Session, on_failure: OnFailure) -> bool {
    session.config.spill.when == SpillWhen::Always
        || matches!(on_failure, OnFailure::Spill | OnFailure::GiveBack)
}

/// Tells the store until when it may try, now or as soon as a deadline is known: what comes after it needs the rest of the time.
fn leave_time(
    session: &Session,
    config: &SpillPlace,
    took: Duration,
    in_all: u64,
    on_failure: OnFailure,
) -> Result<(), SpillError> {
    let mut needed = time_needed(in_all, took, session.config.pipeline.threads);
    if on_failure == OnFailure::GiveBack {
        // It is read once more, and decoded.
        needed *= 2;
    }
    if let Some(deadline) = session.deadline() {
        let left = deadline.saturating_duration_since(Instant::now());
        // Half of it at least is for the store.
        if needed * 2 > left {
            let path = config.path.display().to_string();
            return Err(SpillError::TooSlow { path, needed, left });
        }
    }
    session.keep_back(needed);
    Ok(())
}

/// The most that an object of so many raw bytes takes.
fn with_slack(raw_len: u64) -> u64 {
    raw_len.saturating_add(SLACK_MIN.max(raw_len / SLACK_SHARE))
}

/// Time for so many raw bytes, coded by so many threads, on a disk that wrote [`MEASURED_LEN`] in `took`, and for reading them back.
#[expect(clippy::cast_precision_loss, reason = "an estimate")]
fn time_needed(raw_len: u64, took: Duration, threads: u32) -> Duration {
    let times = raw_len as f64 / MEASURED_LEN as f64;
    let on_disk = took.mul_f64((times * SLOWER).min(1e6));
    let coding = raw_len as f64 / (CODED_RATE * f64::from(threads.max(1)));
    OVERHEAD + on_disk.max(Duration::from_secs_f64(coding.min(1e9)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slower_disk_and_more_bytes_need_more_time() {
        let second = Duration::from_secs(1);
        assert_eq!(time_needed(0, second, 1), OVERHEAD);
        let needed = time_needed(4 * MEASURED_LEN as u64, second, 1);
        assert_eq!(needed, OVERHEAD + Duration::from_secs(10));
        // On a disk that is faster than the compressors.
        let needed = time_needed(4_000_000_000, Duration::from_micros(1), 2);
        assert_eq!(needed, OVERHEAD + Duration::from_secs(4));
        assert!(time_needed(u64::MAX, second, 64) > Duration::from_secs(3600));
    }
}
