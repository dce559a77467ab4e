//! A save's own corner of the store: a prefix that nobody else has, its place in the job's log, an open upload for every GPU.
//!
//! In: the store, the job, the node's GPUs. Out: an [`Attempt`], before the target is locked. What can fail: the store (unreachable, refusing, or
//! without conditional writes, on which the commit rests); another writer who has the job. What is left when we die here: a claim, entries `open` and `saving` for which others wait as long as they say, and open uploads under
//! keys that no image names.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures::future::{join, join_all, join3};

use super::not_begun;
use crate::config::JobName;
use crate::custody::Custody;
use crate::driver::{Device, Driver};
use crate::error::{ExitCode, Failure, Phase};
use crate::failpoint;
use crate::job_log::{AppendError, SavingEntry, append_dropped, append_saving};
use crate::journal::{JournalError, Step};
use crate::manifest::claim_key;
use crate::ownership::proof::{Ground, ProofError};
use crate::ownership::{self, OwnershipError, WhileSaved, append_code};
use crate::session::{Session, code_before_begin};
use crate::store::{BadKey, Key, PutOutcome, Store, StoreError, UploadId};
use crate::target::{Target, TargetError};
use crate::writer::{ProcessIdentity, claim, random_hex};

/// Seconds that a save without a deadline may take: this many, and one for so many bytes of GPU memory.
const SECONDS_MIN: u64 = 30;
const BYTES_PER_SECOND: u64 = 200_000_000;

/// Clean-up must not hold back the verdict for longer.
const CLEAN_UP_TIMEOUT: Duration = Duration::from_secs(10);

/// This save's own prefix in the store: its name, its place in the log, an open upload per GPU.
pub(super) struct Attempt {
    pub(super) nonce: String,
    /// Slot of the job's log behind our own last entry.
    pub(super) next_slot: u64,
    /// Until then others wait for us.
    pub(super) word_ends: Option<Instant>,
    /// One per GPU of the node and process, and what else is to come.
    pub(super) uploads: Vec<OpenUpload>,
}

/// What an object is to hold, in the order of a manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Holds {
    /// The extent that a process may turn out to have on a GPU, by their indexes.
    Gpu { member: usize, device: usize },
    /// The host memory of the tree.
    Host,
}

/// An object of the save: what it holds, and its name below the attempt's prefix, without what makes its key a fresh one.
#[derive(Debug, Clone)]
pub(super) struct Planned {
    pub(super) holds: Holds,
    pub(super) name: String,
}

impl Planned {
    /// One for every GPU of the node: which of them hold data of the process shows after BEGIN.
    pub(super) fn of_gpus(driver: &Driver, member: usize, target: &Target) -> Vec<Self> {
        let devices = driver.devices().iter().enumerate();
        let planned = devices.map(|(device, gpu)| Self {
            holds: Holds::Gpu { member, device },
            name: gpu_name(target, gpu),
        });
        planned.collect()
    }

    /// The tree's.
    pub(super) fn of_host(root: &Target) -> Self {
        Self {
            holds: Holds::Host,
            name: format!("{}/host-0", root.pid),
        }
    }
}

/// A multipart upload for what an object may turn out to hold.
pub(super) struct OpenUpload {
    pub(super) holds: Holds,
    pub(super) key: Key,
    pub(super) upload: UploadId,
}

impl Attempt {
    /// Claims a prefix and reads the log, then opens an upload for each of the objects: two answers of the store to wait for, whatever their number. With `while_saved` it is announced, too. On failure nothing of it stays but the claim.
    pub(super) fn open(
        session: &Session,
        driver: &Driver,
        custody: &Custody,
        nonce: String,
        while_saved: Option<WhileSaved>,
        objects: &[Planned],
    ) -> Result<Self, Failure> {
        let mut attempt = Self {
            nonce,
            next_slot: 0,
            word_ends: None,
            uploads: Vec::new(),
        };
        let claiming = attempt.claim(session, driver, custody, while_saved, objects);
        match session.wait(claiming) {
            Ok(()) => Ok(attempt),
            Err(cause) => Err(attempt.refused(session, driver, custody, cause)),
        }
    }

    /// Announces it, behind everything that the job's log says by now.
    pub(super) fn announce_now(
        &mut self,
        session: &Session,
        driver: &Driver,
        custody: &Custody,
    ) -> Result<(), Failure> {
        let announcing = async {
            let by = ProcessIdentity::ours()?;
            let free = match &session.ours {
                Some(ours) => {
                    let mut ours = ours.lock().await;
                    let log = ours.must_be_ours(&*session.store).await?;
                    if log.is_dropped(&self.nonce) {
                        return Err(OpenError::GivenUp);
                    }
                    log.next_slot()
                }
                None => unreachable!("what is announced later has been opened before"),
            };
            self.announce(session, driver, custody, by, free).await
        };
        let announced = session.wait(announcing);
        announced.map_err(|cause| self.refused(session, driver, custody, cause))
    }

    /// It is not to be, and is closed.
    fn refused(
        &self,
        session: &Session,
        driver: &Driver,
        custody: &Custody,
        cause: OpenError,
    ) -> Failure {
        let code = cause.code();
        let target = &custody.target;
        let mut failure = not_begun(session, driver, target, Phase::Prepare, cause.into());
        // A refusal that is the store's says what to mend; a passing fault says what became of the target.
        if code != ExitCode::RolledBack && !session.cancel.is_cancelled() {
            failure.code = code;
        }
        failure.attached = self.close(session, &[], self.next_slot > 0);
        failure
    }

    async fn claim(
        &mut self,
        session: &Session,
        driver: &Driver,
        custody: &Custody,
        while_saved: Option<WhileSaved>,
        objects: &[Planned],
    ) -> Result<(), OpenError> {
        let job = &session.config.job;
        let by = ProcessIdentity::ours()?;
        let claim = claim(job, &self.nonce);
        let key = &Key::of_job(job, &claim_key(&self.nonce)).map_err(OpenError::Key)?;
        let put = session.store.put_if_absent(key, claim.encode().into());
        let store = &*session.store;
        let reading = async {
            match &session.ours {
                Some(ours) => Ok(ours.lock().await.must_be_ours(store).await?.clone()),
                None => {
                    let wanted = while_saved.unwrap_or_default();
                    ownership::wait_for_savers(store, job, wanted, &session.cancel).await
                }
            }
        };
        let (put, log) = join(put, reading).await;
        if put? == PutOutcome::AlreadyExists {
            let key = key.to_string();
            return Err(OpenError::Claimed { key });
        }
        let log = log?;
        // From its claim on it may be given up, and slots that were read already are not met again on the way to the commit.
        if log.is_dropped(&self.nonce) {
            return Err(OpenError::GivenUp);
        }
        let free = log.next_slot();
        failpoint::pass("prepare:claimed");

        let ground = Ground::of(session);
        let nonce = self.nonce.as_str();
        let opened = join_all(objects.iter().map(|planned| async move {
            let key = fresh_key(job, nonce, &planned.name).map_err(OpenError::Key)?;
            let upload = session.store.begin_upload(&key).await?;
            Ok::<_, OpenError>(OpenUpload {
                holds: planned.holds,
                key,
                upload,
            })
        }));
        let opening = async {
            match &session.ours {
                Some(_opened_before) => Ok(free - 1),
                None => ownership::open(store, job, nonce, free).await,
            }
        };
        // A log does not begin where it cannot go on.
        let is_first = free == 1;
        if is_first {
            ground.must_order_writers(&claim).await?;
        }
        let order = async {
            match is_first {
                true => Ok(()),
                false => ground.must_order_writers(&claim).await,
            }
        };
        let (order, opened, log) = join3(order, opened, opening).await;
        let mut failed = order.err().map(OpenError::Order);
        for outcome in opened {
            match outcome {
                Ok(upload) => self.uploads.push(upload),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failpoint::pass("prepare:uploads open");
        match (log, failed) {
            (Ok(_slot), None) if while_saved.is_none() => Ok(()),
            (Ok(slot), None) => self.announce(session, driver, custody, by, slot + 1).await,
            (Err(error), None) => Err(error.into()),
            (_, Some(failed)) => Err(failed),
        }
    }

    /// Tells everybody that we are saving. Who has opened the job since we did has it.
    async fn announce(
        &mut self,
        session: &Session,
        driver: &Driver,
        custody: &Custody,
        by: ProcessIdentity,
        from_slot: u64,
    ) -> Result<(), OpenError> {
        let memory = driver.devices().iter().map(|gpu| gpu.memory_len);
        let memory = memory.fold(0, u64::saturating_add);
        let seconds = match session.deadline() {
            Some(deadline) => deadline
                .saturating_duration_since(Instant::now())
                .as_secs()
                .max(1),
            None => SECONDS_MIN + memory / BYTES_PER_SECOND,
        };
        let spill = session.config.spill.place.as_ref();
        let saving = SavingEntry {
            writer: self.nonce.clone(),
            attempt: self.nonce.clone(),
            seconds,
            spill: spill.map(|place| place.path.display().to_string()),
            by,
        };
        self.word_ends = Instant::now().checked_add(Duration::from_secs(seconds));
        // From here on the attempt has to be closed.
        self.next_slot = from_slot;
        custody.step(&Step::Attempt {
            attempt: self.nonce.clone(),
            next_slot: from_slot,
        })?;
        let (store, job) = (&*session.store, &session.config.job);
        let ground = Ground::of(session);
        let again = ground.must_order_writers_again(&self.nonce);
        let (slot, again) = join(append_saving(store, job, from_slot, &saving), again).await;
        self.next_slot = slot? + 1;
        again?;
        failpoint::pass("prepare:announced");
        Ok(())
    }

    /// Cleans up after a save that is no image and never will be: aborts the uploads, and says in the log that the attempt is given up, so that nobody waits for it. Says what could not be done.
    pub(super) fn close(
        &self,
        session: &Session,
        landed: &[Key],
        is_announced: bool,
    ) -> Vec<String> {
        let closing = async {
            let dropping = async {
                let dropped = match is_announced {
                    true => self.drop_it(session).await,
                    false => Ok(()),
                };
                dropped.err().map(|error| {
                    let why = crate::error::one_line(&error);
                    format!("the attempt stays open in the job's log: {why}")
                })
            };
            let (mut left, dropped) = join(self.abort_all(session, landed), dropping).await;
            left.extend(dropped);
            left
        };
        within_limit(session, closing)
    }

    /// Says in the log that the attempt is given up.
    ///
    /// # Errors
    /// [`AppendError::Fenced`] when it is an image after all.
    pub(super) async fn drop_it(&self, session: &Session) -> Result<(), AppendError> {
        let (store, job) = (&*session.store_for_clean_up, &session.config.job);
        append_dropped(store, job, self.next_slot, &self.nonce, &self.nonce).await?;
        Ok(())
    }

    /// Aborts every upload whose object did not land; says which could not be aborted.
    pub(super) fn abort_uploads(&self, session: &Session, landed: &[Key]) -> Vec<String> {
        within_limit(session, self.abort_all(session, landed))
    }

    async fn abort_all(&self, session: &Session, landed: &[Key]) -> Vec<String> {
        let unused = self
            .uploads
            .iter()
            .filter(|open| !landed.contains(&open.key));
        let aborts = unused.map(|open| async move {
            let store = &session.store_for_clean_up;
            let aborted = store.abort_upload(&open.key, &open.upload).await;
            aborted.err().map(|error| {
                session.meter.failed_aborts.fetch_add(1, Ordering::Relaxed);
                let why = crate::error::one_line(&error);
                format!("an unfinished upload stays in the store: {why}")
            })
        });
        join_all(aborts).await.into_iter().flatten().collect()
    }
}

/// Clean-up that takes too long is left to `gc`.
fn within_limit(session: &Session, cleaning: impl Future<Output = Vec<String>>) -> Vec<String> {
    let done = session.wait(async { tokio::time::timeout(CLEAN_UP_TIMEOUT, cleaning).await });
    done.unwrap_or_else(|_elapsed| {
        vec![format!(
            "leftovers stay in the store: they could not be cleaned up within {CLEAN_UP_TIMEOUT:?}; `ckptstream gc` does it later"
        )]
    })
}

/// Why an attempt could not be opened.
#[derive(Debug, thiserror::Error)]
enum OpenError {
    #[error("the save cannot be opened in the store")]
    Store(#[from] StoreError),
    #[error(transparent)]
    Ownership(#[from] OwnershipError),
    #[error("the save was not announced in the job's log")]
    Announce(#[from] AppendError),
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error("this process cannot be told from others")]
    Ourselves(#[from] TargetError),
    #[error("a key of this save is not legal")]
    Key(#[source] BadKey),
    #[error("the attempt was given up by somebody else while others were waited for; save again")]
    GivenUp,
    #[error("{key} is claimed by another save")]
    Claimed { key: String },
    #[error(transparent)]
    Order(#[from] ProofError),
}

impl OpenError {
    fn code(&self) -> ExitCode {
        match self {
            Self::Store(error) => code_before_begin(error),
            Self::Ownership(error) => error.code(),
            Self::Announce(error) => append_code(error),
            Self::Order(error) => error.code(),
            Self::Journal(_) | Self::Ourselves(_) | Self::Key(_) => ExitCode::Preflight,
            Self::Claimed { .. } => ExitCode::NotOurs,
            Self::GivenUp => ExitCode::RolledBack,
        }
    }
}

/// A fresh key for the object of this name below the attempt's prefix.
pub(super) fn fresh_key(job: &JobName, nonce: &str, name: &str) -> Result<Key, BadKey> {
    Key::of_job(
        job,
        &format!("data/{nonce}/{name}.{}.zst", random_hex::<4>()),
    )
}

/// The name of the object of what a process holds on a GPU.
pub(super) fn gpu_name(target: &Target, gpu: &Device) -> String {
    format!("{}/gpu-{}", target.pid, bare_uuid(gpu))
}

fn bare_uuid(device: &Device) -> String {
    device
        .uuid
        .to_string()
        .trim_start_matches("GPU-")
        .to_owned()
}
