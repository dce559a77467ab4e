//! Whether a store orders the writers of a job: tried with requests like theirs, never assumed.
//!
//! In: the store, a prefix that is ours (an attempt's). Out: nothing, where the order holds that the configuration goes by: that of creates, or that of epochs. What can fail: the store, or a promise of it that is missing ([`ProofError`]).
//!
//! Only what goes wrong is certain: creates that are not atomic may well be told apart this time.

use futures::future::{join, join_all, try_join_all};

use crate::config::{JobName, StoreConfig};
use crate::error::{ExitCode, one_line};
use crate::manifest::{AttemptClaim, claim_key, contest_key};
use crate::session::{Session, code_before_begin};
use crate::store::{BadKey, Key, PutOutcome, Store, StoreError};
use crate::writer::{claim, random_hex, winners_at_once};

/// Creates at once, of an object that stands there, and of one that does not: stores that turn a second one away may let several at once all be first.
const LATER_CLAIMS: u64 = 3;
const CONTESTANTS: usize = 4;
/// The same once more, when there are connections: then they come closer together.
const CONTESTANTS_AGAIN: usize = 8;

/// See the module.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProofError {
    /// The store failed.
    #[error("whether the store orders the job's writers cannot be tried")]
    Store(#[from] StoreError),
    /// A name makes no key.
    #[error("a key of this save is not legal")]
    Key(#[from] BadKey),
    /// Conditions are ignored.
    #[error(
        "{store} ignores If-None-Match{known}: it overwrote an object that a conditional write must leave alone, so two savers could both commit; \
         use a store with conditional writes (store.url, store.endpoint), or give every start of the job an epoch (job.epoch, --epoch)"
    )]
    Unconditional {
        /// The store.
        store: String,
        /// What is known of its kind, or nothing.
        known: String,
    },
    /// Several creates of one object were first.
    #[error(
        "{store} told {winners} of {contestants} that create one object at once that they were first, so two savers could both commit; \
         use a store whose conditional writes are atomic (store.url, store.endpoint), or give every start of the job an epoch (job.epoch, --epoch)"
    )]
    NotAtomic {
        /// The store.
        store: String,
        /// Those that were told so.
        winners: usize,
        /// Of so many.
        contestants: usize,
    },
    /// A listing does not show what stands there.
    #[error(
        "{store} does not list {key}, which was just created: a later start of the job could not be seen; use a store whose listings are fresh, or one with conditional writes (store.url, store.endpoint)"
    )]
    ListedLate {
        /// The store.
        store: String,
        /// The object.
        key: String,
    },
}

impl ProofError {
    /// What it means to a script before the driver is touched.
    pub fn code(&self) -> ExitCode {
        match self {
            Self::Store(error) => code_before_begin(error),
            _ => ExitCode::Preflight,
        }
    }
}

/// What is tried on, and for whom.
#[derive(Clone, Copy)]
pub(crate) struct Ground<'a> {
    store: &'a dyn Store,
    config: &'a StoreConfig,
    job: &'a JobName,
}

impl<'a> Ground<'a> {
    /// The store before BEGIN, and the job.
    pub(crate) fn of(session: &'a Session) -> Self {
        Self {
            store: &*session.store,
            config: &session.config.store,
            job: &session.config.job,
        }
    }

    /// The order that the configuration goes by holds, as far as the prefix shows that this claim stands in.
    pub(crate) async fn must_order_writers(&self, claim: &AttemptClaim) -> Result<(), ProofError> {
        let key = Key::of_job(self.job, &claim_key(&claim.attempt))?;
        match self.config.epoch {
            None => self.must_create_once(&key, claim).await,
            Some(_epoch) => self.must_list(&key).await,
        }
    }

    /// The same, once there are connections.
    pub(crate) async fn must_order_writers_again(&self, attempt: &str) -> Result<(), ProofError> {
        match self.config.epoch {
            None => self.contest(attempt, 2, CONTESTANTS_AGAIN).await,
            Some(_epoch) => Ok(()),
        }
    }

    /// The same by a prefix of its own, which is removed again: for a job that nobody has saved yet, so that its log does not begin where it cannot go on.
    pub(crate) async fn must_order_the_first_writer(&self) -> Result<(), ProofError> {
        let claim = claim(self.job, &random_hex::<16>());
        let key = Key::of_job(self.job, &claim_key(&claim.attempt))?;
        self.store
            .put_if_absent(&key, claim.encode().into())
            .await?;
        let order = self.must_order_writers(&claim).await;
        let order = match order {
            Ok(()) => self.must_order_writers_again(&claim.attempt).await,
            wrong => wrong,
        };
        let contests =
            [1, 2].map(|round| Key::of_job(self.job, &contest_key(&claim.attempt, round)));
        let contests = contests.into_iter().collect::<Result<Vec<_>, _>>()?;
        let written = [&[key][..], &contests].concat();
        for deleted in join_all(written.iter().map(|key| self.store.delete(key))).await {
            // `gc` finds it, too.
            if let Err(error) = deleted {
                tracing::debug!("what the store was tried with stays: {}", one_line(&error));
            }
        }
        order
    }

    /// Of further claims with other bytes every one must be turned away, and of creates at once all but one.
    async fn must_create_once(&self, key: &Key, claim: &AttemptClaim) -> Result<(), ProofError> {
        let later = try_join_all((1..=LATER_CLAIMS).map(|later| {
            let other = AttemptClaim {
                created_ms: claim.created_ms + later,
                ..claim.clone()
            };
            self.store.put_if_absent(key, other.encode().into())
        }));
        let contest = self.contest(&claim.attempt, 1, CONTESTANTS);
        let (later, contest) = join(later, contest).await;
        if later?.contains(&PutOutcome::Created) {
            return Err(ProofError::Unconditional {
                store: self.store.describe(),
                known: self.config.kind.known_to_lack_conditional_creates(),
            });
        }
        contest
    }

    /// Of creates of one fresh object at once exactly one must win.
    async fn contest(
        &self,
        attempt: &str,
        round: u32,
        contestants: usize,
    ) -> Result<(), ProofError> {
        let key = Key::of_job(self.job, &contest_key(attempt, round))?;
        match winners_at_once(self.store, &key, contestants).await? {
            1 => Ok(()),
            winners => Err(ProofError::NotAtomic {
                store: self.store.describe(),
                winners,
                contestants,
            }),
        }
    }

    /// The order of epochs rests on listings: what stands there must be listed at once.
    async fn must_list(&self, key: &Key) -> Result<(), ProofError> {
        let listed = self.store.list(key.as_str()).await?;
        match listed.iter().any(|listed| listed.key == *key) {
            true => Ok(()),
            false => Err(ProofError::ListedLate {
                store: self.store.describe(),
                key: key.to_string(),
            }),
        }
    }
}
