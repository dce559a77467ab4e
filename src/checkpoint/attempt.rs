//! A save's own corner of the store: a prefix that nobody else has, its place in the job's log, an open upload for every GPU.
//!
//! In: the store, the job, the node's GPUs. Out: an [`Attempt`], before the target is locked. What can fail: the store (unreachable, refusing, or
//! without conditional writes, on which the commit rests); another writer who has the job. What is left when we die here: a claim, entries `open` and `saving` for which others wait as long as they say, and open uploads under
//! keys that no image names.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures::future::{join, join_all, join3, try_join_all};

use super::not_begun;
use crate::config::JobName;
use crate::custody::Custody;
use crate::driver::{Device, Driver};
use crate::error::{ExitCode, Failure, Phase};
use crate::failpoint;
use crate::job_log::{AppendError, SavingEntry, append_dropped, append_saving};
use crate::journal::{JournalError, Step};
use crate::manifest::{AttemptClaim, claim_key, contest_key};
use crate::ownership::{self, OwnershipError, WhileSaved, append_code};
use crate::session::{Session, code_before_begin};
use crate::store::{BadKey, Key, PutOutcome, Store, StoreError, UploadId};
use crate::target::{Target, TargetError};
use crate::writer::{ProcessIdentity, claim, random_hex, winners_at_once};

/// Creates at once, of an object that stands there, and of one that does not: stores that turn a second one away may let several at once all be first.
const LATER_CLAIMS: u64 = 3;
const CONTESTANTS: usize = 4;
/// The same once more, when there are connections: then they come closer together.
const CONTESTANTS_AGAIN: usize = 8;

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

        let order = async {
            match session.config.store.epoch {
                None => must_create_once(session, key, &claim).await,
                Some(_epoch) => must_list(session, key).await,
            }
        };
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
        let (order, opened, log) = join3(order, opened, opening).await;
        let mut failed = order.err();
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
        let again = async {
            match session.config.store.epoch {
                None => contest(session, &self.nonce, 2, CONTESTANTS_AGAIN).await,
                Some(_epoch) => Ok(()),
            }
        };
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

/// The commit rests on creates, so they are tried, not assumed: of further claims with other bytes every one must be turned away, and of creates at once all but one.
async fn must_create_once(
    session: &Session,
    key: &Key,
    claim: &AttemptClaim,
) -> Result<(), OpenError> {
    let later = try_join_all((1..=LATER_CLAIMS).map(|later| {
        let other = AttemptClaim {
            created_ms: claim.created_ms + later,
            ..claim.clone()
        };
        session.store.put_if_absent(key, other.encode().into())
    }));
    let contest = contest(session, &claim.attempt, 1, CONTESTANTS);
    let (later, contest) = join(later, contest).await;
    if later?.contains(&PutOutcome::Created) {
        let kind = session.config.store.kind;
        return Err(OpenError::Unconditional {
            store: session.store.describe(),
            known: match kind.lacks_conditional_creates() {
                true => format!(", as is known of store.kind = {:?}", kind.as_str()),
                false => String::new(),
            },
        });
    }
    contest
}

/// Of creates of one fresh object at once exactly one must win.
async fn contest(
    session: &Session,
    nonce: &str,
    round: u32,
    contestants: usize,
) -> Result<(), OpenError> {
    let key = Key::of_job(&session.config.job, &contest_key(nonce, round));
    let key = key.map_err(OpenError::Key)?;
    match winners_at_once(&*session.store, &key, contestants).await? {
        1 => Ok(()),
        winners => Err(OpenError::NotAtomic {
            store: session.store.describe(),
            winners,
            contestants,
        }),
    }
}

/// The order of epochs rests on listings: what stands there must be listed at once.
async fn must_list(session: &Session, key: &Key) -> Result<(), OpenError> {
    let listed = session.store.list(key.as_str()).await?;
    match listed.iter().any(|listed| listed.key == *key) {
        true => Ok(()),
        false => Err(OpenError::ListedLate {
            store: session.store.describe(),
            key: key.to_string(),
        }),
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
    #[error(
        "{store} ignores If-None-Match{known}: it overwrote an object that a conditional write must leave alone, so two savers could both commit; \
         use a store with conditional writes (store.url, store.endpoint), or give every start of the job an epoch (job.epoch, --epoch)"
    )]
    Unconditional { store: String, known: String },
    #[error(
        "{store} told {winners} of {contestants} that create one object at once that they were first, so two savers could both commit; \
         use a store whose conditional writes are atomic (store.url, store.endpoint), or give every start of the job an epoch (job.epoch, --epoch)"
    )]
    NotAtomic {
        store: String,
        winners: usize,
        contestants: usize,
    },
    #[error(
        "{store} does not list {key}, which was just created: a later start of the job could not be seen; use a store whose listings are fresh, or one with conditional writes (store.url, store.endpoint)"
    )]
    ListedLate { store: String, key: String },
}

impl OpenError {
    fn code(&self) -> ExitCode {
        match self {
            Self::Store(error) => code_before_begin(error),
            Self::Ownership(error) => error.code(),
            Self::Announce(error) => append_code(error),
            Self::Journal(_)
            | Self::Ourselves(_)
            | Self::Key(_)
            | Self::Unconditional { .. }
            | Self::NotAtomic { .. }
            | Self::ListedLate { .. } => ExitCode::Preflight,
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
