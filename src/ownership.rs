//! Who has a job: whoever opened it last, once nobody is saving it any more.
//!
//! In: the job's log; what to do about another writer's save under way. Out: the log as it was when nothing stood in the way, or an `open` entry of ours in it. What can fail: the store; somebody else's
//! save that is not waited for ([`OwnershipError::Busy`]).
//!
//! A save under way is waited for because its image would be newer than all that can be restored now: at most as long as it said that it may need, by our own clock from the first look at it, and not at all if its saver is known to be dead. Whoever
//! opens the job afterwards has fenced it.

pub(crate) mod proof;

use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::config::JobName;
use crate::error::ExitCode;
use crate::job_log::{AppendError, Entry, JobLog, LogError, SavingEntry, append};
use crate::session::{Interrupted, Session, code_before_begin};
use crate::store::{Store, StoreError};

use proof::Ground;
pub use proof::ProofError;

/// Pause between two looks at the log.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What to do while another writer saves the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WhileSaved {
    /// Wait for it, as long as it said that it may need.
    #[default]
    Wait,
    /// Refuse (`--no-wait`).
    Refuse,
    /// Go on, which fences it (`--take-over`).
    TakeOver,
}

/// The job cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OwnershipError {
    /// Another writer is saving it.
    #[error(
        "attempt {attempt} to save job {job} is under way on {host} and may need {left:.0?} more; wait for it, or give --take-over if that saver is dead"
    )]
    Busy {
        /// The job.
        job: String,
        /// The attempt.
        attempt: String,
        /// Its node.
        host: String,
        /// Of the time that it said.
        left: Duration,
    },
    /// Another writer opened the job after us.
    #[error("fenced: in slot {slot} of the log of job {job}, {what}")]
    Fenced {
        /// The job.
        job: String,
        /// The slot that says so.
        slot: u64,
        /// What stands there.
        what: String,
    },
    /// The log cannot be read.
    #[error("the job's log cannot be read")]
    Log(#[from] LogError),
    /// The store does not order the job's writers.
    #[error(transparent)]
    Order(#[from] ProofError),
    /// The job was not opened.
    #[error("the job was not opened in its log")]
    Append(#[from] AppendError),
    /// A signal.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
}

impl OwnershipError {
    /// What it means to a script before the driver is touched.
    pub fn code(&self) -> ExitCode {
        match self {
            Self::Busy { .. } | Self::Fenced { .. } => ExitCode::NotOurs,
            Self::Log(LogError::Store { source, .. }) => code_before_begin(source),
            Self::Log(_) => ExitCode::Preflight,
            Self::Order(error) => error.code(),
            Self::Append(error) => append_code(error),
            Self::Interrupted(_) => ExitCode::RolledBack,
        }
    }
}

/// What an entry that was not appended means before the driver is touched.
pub(crate) fn append_code(error: &AppendError) -> ExitCode {
    match error {
        AppendError::Fenced { .. } => ExitCode::NotOurs,
        AppendError::Unreachable { source, .. } | AppendError::Refused { source, .. } => {
            code_before_begin(source)
        }
        _ => ExitCode::Preflight,
    }
}

/// A job that we have opened.
#[derive(Debug, Clone)]
pub struct Ownership {
    job: JobName,
    writer: String,
    /// Slot after our own entry.
    next_slot: u64,
    /// Read up to our own entry.
    log: JobLog,
}

impl Ownership {
    /// Opens a job, whose log was read so far, for this writer (a nonce).
    ///
    /// # Errors
    /// [`OwnershipError::Append`], [`OwnershipError::Log`].
    pub async fn open(
        store: &dyn Store,
        job: &JobName,
        writer: &str,
        mut log: JobLog,
    ) -> Result<Self, OwnershipError> {
        let slot = open(store, job, writer, log.next_slot()).await?;
        // What was appended since is read too: who opens must have seen all that is before.
        log.read_on(store, job).await?;
        Ok(Self {
            job: job.clone(),
            writer: writer.to_owned(),
            next_slot: slot + 1,
            log,
        })
    }

    /// The log, at least up to our own entry.
    pub fn log(&self) -> &JobLog {
        &self.log
    }

    /// The job ended by itself, with this status: until somebody opens it anew there is nothing to restore.
    ///
    /// # Errors
    /// [`OwnershipError::Append`]; fenced by whoever has opened the job since.
    pub async fn finish(
        &self,
        store: &dyn Store,
        status: Option<i32>,
    ) -> Result<(), OwnershipError> {
        let finished = Entry::Finished {
            writer: self.writer.clone(),
            status,
        };
        self.say(store, &finished).await
    }

    /// An image failed to restore again and again: it is not tried any more.
    ///
    /// # Errors
    /// As [`Ownership::finish`].
    pub async fn call_bad(&self, store: &dyn Store, generation: u64) -> Result<(), OwnershipError> {
        let bad = Entry::Bad {
            writer: self.writer.clone(),
            generation,
        };
        self.say(store, &bad).await
    }

    /// Appends an entry, unless the job was taken since the log was read.
    async fn say(&self, store: &dyn Store, entry: &Entry) -> Result<(), OwnershipError> {
        let is_taken = |there: &Entry| matches!(there, Entry::Open { .. });
        append(store, &self.job, self.log.next_slot(), entry, &is_taken).await?;
        Ok(())
    }

    /// Says that nothing came of it: then our `open` fences nobody who looks at the log from now on.
    ///
    /// # Errors
    /// [`OwnershipError::Append`].
    pub async fn give_up(&self, store: &dyn Store) -> Result<(), OwnershipError> {
        let dropped = Entry::Dropped {
            writer: self.writer.clone(),
            attempt: self.writer.clone(),
        };
        append(store, &self.job, self.next_slot, &dropped, &|_there| false).await?;
        Ok(())
    }

    /// Reads on, and makes sure that nobody has opened the job after us.
    ///
    /// # Errors
    /// [`OwnershipError::Fenced`], [`OwnershipError::Log`].
    pub async fn must_be_ours(&mut self, store: &dyn Store) -> Result<&JobLog, OwnershipError> {
        let read = self.log.read_on(store, &self.job).await;
        if let Err(LogError::Store {
            source: StoreError::Fenced { what, .. },
            ..
        }) = read
        {
            return Err(OwnershipError::Fenced {
                job: self.job.to_string(),
                slot: self.log.next_slot(),
                what,
            });
        }
        read?;
        match self.log.opened_by_another(self.next_slot, &self.writer) {
            Some((slot, there)) => Err(OwnershipError::Fenced {
                job: self.job.to_string(),
                slot,
                what: there.describe(),
            }),
            None => Ok(&self.log),
        }
    }
}

/// Appends our `open`, whoever else has opened the job. Its slot.
///
/// # Errors
/// [`AppendError`]; fenced only where an attempt of this very name was given up: a saver's nonce is its attempt's.
pub async fn open(
    store: &dyn Store,
    job: &JobName,
    writer: &str,
    from_slot: u64,
) -> Result<u64, AppendError> {
    let entry = Entry::Open {
        writer: writer.to_owned(),
    };
    // A writer is given up under its nonce: who is, must not begin.
    let is_given_up =
        |there: &Entry| matches!(there, Entry::Dropped { attempt, .. } if attempt == writer);
    append(store, job, from_slot, &entry, &is_given_up).await
}

/// Who is the first to open a job finds out whether the store orders those who come: a log does not begin where it cannot go on.
///
/// # Errors
/// [`OwnershipError::Order`].
pub(crate) async fn must_begin_in_order(
    session: &Session,
    log: &JobLog,
) -> Result<(), OwnershipError> {
    if log.next_slot() > 1 {
        return Ok(());
    }
    Ok(Ground::of(session).must_order_the_first_writer().await?)
}

/// The log, once no save of another writer is under way, or once it is not to be waited for.
///
/// # Errors
/// [`OwnershipError::Busy`] with [`WhileSaved::Refuse`]; the log; a signal.
pub async fn wait_for_savers(
    store: &dyn Store,
    job: &JobName,
    while_saved: WhileSaved,
    cancel: &CancellationToken,
) -> Result<JobLog, OwnershipError> {
    let mut log = JobLog::read(store, job).await?;
    let mut waiting: Option<(String, Instant)> = None;
    loop {
        let Some(saving) = log.save_under_way() else {
            return Ok(log);
        };
        if saving.by.is_known_dead() {
            return Ok(log);
        }
        if while_saved == WhileSaved::TakeOver {
            tracing::warn!(
                "attempt {} to save job {job} is under way on {}, and is fenced: its image will not come into being",
                saving.attempt,
                saving.by.host
            );
            return Ok(log);
        }
        let since = match &waiting {
            Some((attempt, since)) if *attempt == saving.attempt => *since,
            _ => {
                let now = Instant::now();
                waiting = Some((saving.attempt.clone(), now));
                if while_saved == WhileSaved::Wait {
                    tell(job, saving);
                }
                now
            }
        };
        let left = Duration::from_secs(saving.seconds).saturating_sub(since.elapsed());
        if while_saved == WhileSaved::Refuse {
            return Err(OwnershipError::Busy {
                job: job.to_string(),
                attempt: saving.attempt.clone(),
                host: saving.by.host.clone(),
                left,
            });
        }
        if left.is_zero() {
            tracing::warn!(
                "attempt {} has had the {} s that it asked for; it is not waited for any longer",
                saving.attempt,
                saving.seconds
            );
            return Ok(log);
        }
        tokio::select! {
            biased;
            () = cancel.cancelled() => return Err(Interrupted.into()),
            () = tokio::time::sleep(left.min(LOOK_EVERY)) => {}
        }
        log.read_on(store, job).await?;
    }
}

fn tell(job: &JobName, saving: &SavingEntry) {
    tracing::warn!(
        "attempt {} to save job {job} is under way on {}: waiting for it, at most {} s (--no-wait, --take-over)",
        saving.attempt,
        saving.by.host,
        saving.seconds
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::memory::MemoryStore;
    use crate::writer::{ProcessIdentity, random_hex};

    fn job() -> JobName {
        JobName::new("train").unwrap()
    }

    fn saving(attempt: &str, seconds: u64, by: ProcessIdentity) -> Entry {
        Entry::Saving(SavingEntry {
            writer: attempt.to_owned(),
            attempt: attempt.to_owned(),
            seconds,
            spill: None,
            by,
        })
    }

    async fn put(store: &MemoryStore, entry: &Entry) -> u64 {
        append(store, &job(), 1, entry, &|_there| false)
            .await
            .unwrap()
    }

    async fn take(
        store: &MemoryStore,
        while_saved: WhileSaved,
    ) -> Result<Ownership, OwnershipError> {
        let cancel = CancellationToken::new();
        let log = wait_for_savers(store, &job(), while_saved, &cancel).await?;
        Ownership::open(store, &job(), "ours", log).await
    }

    fn alive() -> ProcessIdentity {
        ProcessIdentity::ours().unwrap()
    }

    #[tokio::test]
    async fn a_save_under_way_is_waited_for_at_most_as_long_as_it_said() {
        let store = MemoryStore::new();
        let attempt = random_hex::<16>();
        put(&store, &saving(&attempt, 1, alive())).await;
        assert!(matches!(
            take(&store, WhileSaved::Refuse).await,
            Err(OwnershipError::Busy { .. })
        ));
        let started = Instant::now();
        let ours = take(&store, WhileSaved::Wait).await.unwrap();
        assert!(
            started.elapsed() >= Duration::from_secs(1),
            "it was waited for"
        );
        assert_eq!(ours.next_slot, 3);
    }

    #[tokio::test]
    async fn its_outcome_ends_the_wait() {
        for outcome in ["dropped", "open"] {
            let store = MemoryStore::new();
            let attempt = random_hex::<16>();
            put(&store, &saving(&attempt, 3600, alive())).await;
            let told = match outcome {
                "dropped" => Entry::Dropped {
                    writer: attempt.clone(),
                    attempt: attempt.clone(),
                },
                _ => Entry::Open {
                    writer: "another".to_owned(),
                },
            };
            let (taken, _slot) = tokio::join!(take(&store, WhileSaved::Wait), put(&store, &told));
            assert_eq!(taken.unwrap().next_slot, 4, "{outcome}");
        }
    }

    #[tokio::test]
    async fn the_dead_are_not_waited_for() {
        let store = MemoryStore::new();
        let dead = ProcessIdentity {
            start_time: alive().start_time - 1,
            ..alive()
        };
        put(&store, &saving(&random_hex::<16>(), 3600, dead)).await;
        take(&store, WhileSaved::Refuse).await.unwrap();
    }

    #[tokio::test]
    async fn an_attempt_that_was_given_up_does_not_open_the_job() {
        let store = MemoryStore::new();
        let nonce = random_hex::<16>();
        let dropped = Entry::Dropped {
            writer: "gc".to_owned(),
            attempt: nonce.clone(),
        };
        put(&store, &dropped).await;
        assert!(matches!(
            open(&store, &job(), &nonce, 1).await,
            Err(AppendError::Fenced { generation: 1, .. })
        ));
        assert_eq!(open(&store, &job(), "another", 1).await.unwrap(), 2);
    }

    #[tokio::test]
    async fn who_opens_later_has_the_job() {
        let store = MemoryStore::new();
        let mut ours = take(&store, WhileSaved::Wait).await.unwrap();
        ours.must_be_ours(&store).await.unwrap();
        open(&store, &job(), "theirs", 1).await.unwrap();
        assert!(matches!(
            ours.must_be_ours(&store).await,
            Err(OwnershipError::Fenced { slot: 2, .. })
        ));
    }
}
