//! What every command works with: the resolved configuration, the store behind its retry decorator, the runtime, the meter, the switch that a signal throws.
//!
//! In: a [`Config`]. Out: a [`Session`]. What can fail: the store's client (credentials chain, TLS roots); no request is made yet.
//! The stories are plain threads that call the driver and wait for the store with [`Session::wait`]; nothing ever blocks the runtime.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::error::{ExitCode, Failure, Phase};
use crate::ownership::Ownership;
use crate::progress::Meter;
use crate::store::retry::Retrying;
use crate::store::{self, Store, StoreError};

/// One command's surroundings.
#[derive(Debug, Clone)]
pub struct Session {
    /// What the user asked for.
    pub config: Config,
    /// Carries the network.
    pub runtime: Handle,
    /// Progress.
    pub meter: Arc<Meter>,
    /// Cancelled by the first SIGINT or SIGTERM. Looked at before BEGIN only: after it there is no way back.
    pub cancel: CancellationToken,
    /// The store, patient; its calls end when `cancel` does. For everything before BEGIN, and for commands that only read.
    pub store: Arc<Retrying<dyn Store>>,
    /// The same store, whose calls no signal ends. For everything after BEGIN.
    pub store_after_begin: Arc<Retrying<dyn Store>>,
    /// The same once more, for clean-up after whatever has ended the others.
    pub store_for_clean_up: Arc<Retrying<dyn Store>>,
    /// When the node goes away, if that is known; the same for every clone.
    pub(crate) time: Arc<Mutex<Time>>,
    /// The job is opened already, and stays ours from one save to the next. `None`: every save and restore opens it for itself.
    pub ours: Option<Arc<tokio::sync::Mutex<Ownership>>>,
    /// The program whose `guard` command unlocks a target if we die; `None` is nobody.
    pub guard: Option<PathBuf>,
}

/// What a transfer has left.
#[derive(Debug, Default)]
pub(crate) struct Time {
    deadline: Option<Instant>,
    /// Of it, what is kept for what comes after the store.
    kept_back: Duration,
}

impl Session {
    /// Connects the parts.
    ///
    /// # Errors
    /// A [`Failure`] of phase config when the store's client cannot be made.
    pub fn open(
        config: Config,
        runtime: Handle,
        meter: Arc<Meter>,
        cancel: CancellationToken,
    ) -> Result<Self, Failure> {
        let started = Instant::now();
        let deadline = config.deadline.map(|left| started + left);
        let store = runtime
            .block_on(store::open(
                &config.store,
                cancel.clone(),
                Arc::clone(&meter),
            ))
            .map_err(|error| Failure::new(ExitCode::Preflight, Phase::Config, error))?;
        let forever = CancellationToken::new;
        let session = Self {
            config,
            runtime,
            store_after_begin: Arc::new(store.renewed(forever(), Arc::clone(&meter))),
            store_for_clean_up: Arc::new(store.renewed(forever(), Arc::clone(&meter))),
            store: Arc::new(store),
            meter,
            cancel,
            time: Arc::default(),
            ours: None,
            guard: None,
        };
        session.set_deadline(deadline);
        Ok(session)
    }

    /// The same surroundings for one transfer of several, with a meter and a deadline of its own. No signal ends it.
    #[must_use]
    pub fn for_one_transfer(&self, deadline: Option<Instant>) -> Self {
        let (cancel, meter) = (CancellationToken::new(), Meter::new());
        let forever = CancellationToken::new;
        let session = Self {
            store: Arc::new(self.store.renewed(cancel.clone(), Arc::clone(&meter))),
            store_after_begin: Arc::new(self.store.renewed(forever(), Arc::clone(&meter))),
            store_for_clean_up: Arc::new(self.store.renewed(forever(), Arc::clone(&meter))),
            meter,
            cancel,
            time: Arc::default(),
            ..self.clone()
        };
        session.set_deadline(deadline);
        session
    }

    /// When the node goes away, if that is known.
    pub fn deadline(&self) -> Option<Instant> {
        self.time().deadline
    }

    /// From now on the node is known to go away then, or nothing is known any more. Calls under way hear of it, too; clean-up has limits of its own.
    pub fn set_deadline(&self, deadline: Option<Instant>) {
        let mut time = self.time();
        time.deadline = deadline;
        self.store.set_deadline(deadline);
        self.set_due(&time);
    }

    fn set_due(&self, time: &Time) {
        let due = time.for_the_store();
        self.store_after_begin.set_deadline(due);
        self.meter.set_due(due);
    }

    fn time(&self) -> std::sync::MutexGuard<'_, Time> {
        self.time.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same, in which this token ends the calls after BEGIN.
    #[must_use]
    pub fn may_be_abandoned(self, abandon: &CancellationToken) -> Self {
        let store_after_begin = self.store_after_begin.with_cancel(abandon.clone());
        Self {
            store_after_begin: Arc::new(store_after_begin),
            ..self
        }
    }

    /// After BEGIN the store may be tried until so long before the deadline: what comes after it needs the rest.
    pub fn keep_back(&self, needed: Duration) {
        let mut time = self.time();
        time.kept_back = needed;
        self.set_due(&time);
    }

    /// Takes back [`Session::keep_back`].
    pub fn try_until_the_deadline(&self) {
        self.keep_back(Duration::ZERO);
    }

    /// Waits on the calling (non-runtime) thread.
    pub fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// An error if a signal asked us to stop.
    ///
    /// # Errors
    /// [`Interrupted`].
    pub fn check_cancelled(&self) -> Result<(), Interrupted> {
        if self.cancel.is_cancelled() {
            Err(Interrupted)
        } else {
            Ok(())
        }
    }
}

impl Time {
    fn for_the_store(&self) -> Option<Instant> {
        let deadline = self.deadline?;
        Some(deadline.checked_sub(self.kept_back).unwrap_or(deadline))
    }
}

/// A signal asked us to stop, and there was a way back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("stopped by a signal")]
pub struct Interrupted;

/// What a store error before BEGIN (or in a command that only reads) means to a script: refused for good → fix it; anything else → try later.
pub fn code_before_begin(error: &StoreError) -> ExitCode {
    match error {
        StoreError::Fenced { .. } => ExitCode::NotOurs,
        StoreError::Refused { .. }
        | StoreError::Unfit { .. }
        | StoreError::Locked { .. }
        | StoreError::NotFound { .. } => ExitCode::Preflight,
        StoreError::GaveUp { source, .. } if matches!(**source, StoreError::Refused { .. }) => {
            ExitCode::Preflight
        }
        _ => ExitCode::RolledBack,
    }
}
