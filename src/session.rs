//! What every command works with: the resolved configuration, the store behind its retry decorator, the runtime, the meter, the switch that a signal throws.
//!
//! In: a [`Config`]. Out: a [`Session`]. What can fail: the store's client (credentials chain, TLS roots); no request is made yet.
//! The stories are plain threads that call the driver and wait for the store with [`Session::wait`]; nothing ever blocks the runtime.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::error::{ExitCode, Failure, Phase};
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
    pub store: Arc<dyn Store>,
    /// The same store, whose calls no signal ends. For everything after BEGIN.
    pub store_after_begin: Arc<Retrying<dyn Store>>,
    /// The same once more, for clean-up after whatever has ended the others.
    pub store_for_clean_up: Arc<Retrying<dyn Store>>,
    /// When the node goes away, if that is known.
    pub deadline: Option<Instant>,
    /// The program whose `guard` command unlocks a target if we die; `None` is nobody.
    pub guard: Option<PathBuf>,
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
        if let Some(deadline) = deadline {
            store.set_deadline(deadline);
        }
        let store_after_begin = Arc::new(store.with_cancel(CancellationToken::new()));
        let store_for_clean_up = Arc::new(store.with_cancel(CancellationToken::new()));
        let store = Arc::new(store);
        Ok(Self {
            config,
            runtime,
            meter,
            cancel,
            store,
            store_after_begin,
            store_for_clean_up,
            deadline,
            guard: None,
        })
    }

    /// The same, in which this token ends the calls after BEGIN.
    #[must_use]
    pub fn may_be_abandoned(self, abandon: &CancellationToken) -> Self {
        let store_after_begin = Arc::new(self.store_after_begin.with_cancel(abandon.clone()));
        Self {
            store_after_begin,
            ..self
        }
    }

    /// After BEGIN the store may be tried until then, and not until the deadline: what comes after it needs the rest.
    pub fn end_tries_at(&self, latest: Instant) {
        self.store_after_begin.set_deadline(latest);
    }

    /// Takes back [`Session::end_tries_at`].
    pub fn try_until_the_deadline(&self) {
        if let Some(deadline) = self.deadline {
            self.store_after_begin.set_deadline(deadline);
        }
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

/// A signal asked us to stop, and there was a way back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("stopped by a signal")]
pub struct Interrupted;

/// What a store error before BEGIN (or in a command that only reads) means to a script: refused for good → fix it; anything else → try later.
pub fn code_before_begin(error: &StoreError) -> ExitCode {
    match error {
        StoreError::Refused { .. } | StoreError::NotFound { .. } => ExitCode::Preflight,
        StoreError::GaveUp { source, .. } if matches!(**source, StoreError::Refused { .. }) => {
            ExitCode::Preflight
        }
        _ => ExitCode::RolledBack,
    }
}
