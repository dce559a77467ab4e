//! First error stops the pipeline.
//!
//! In: errors of any stage, in any order. Out: the first one, once every stage has ended. Closing the pools ends every wait for a buffer; the token ends every transfer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use tokio_util::sync::CancellationToken;

use super::PipelineError;
use crate::driver::BufferPool;

/// Shared by all stages of one run.
#[derive(Debug)]
pub(super) struct Abort {
    first: Mutex<Option<PipelineError>>,
    token: CancellationToken,
    pools: Vec<BufferPool>,
}

impl Abort {
    /// An abort switch that closes these pools and cancels this token.
    pub(super) fn new(pools: Vec<BufferPool>, token: CancellationToken) -> Self {
        Self {
            first: Mutex::new(None),
            token,
            pools,
        }
    }

    /// Stops the run. Only the first error is kept: later ones are its consequences.
    pub(super) fn fail(&self, error: PipelineError) {
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        if first.is_none() {
            *first = Some(error);
        }
        drop(first);
        self.stop();
    }

    /// Ends every wait without an error of its own.
    pub(super) fn stop(&self) {
        self.token.cancel();
        for pool in &self.pools {
            pool.close();
        }
    }

    /// Whether the run is being given up.
    pub(super) fn is_set(&self) -> bool {
        self.token.is_cancelled()
    }

    /// The token that transfers watch.
    pub(super) fn token(&self) -> &CancellationToken {
        &self.token
    }

    /// Runs a stage; its error or panic stops the run.
    pub(super) fn guard(
        &self,
        stage: &'static str,
        work: impl FnOnce() -> Result<(), PipelineError>,
    ) {
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => self.fail(error),
            Err(panic) => self.fail(PipelineError::Panic {
                stage,
                message: panic_message(panic.as_ref()),
            }),
        }
    }

    /// The outcome, after every stage has ended: the first error, or `Cancelled` when the token was cancelled from outside.
    pub(super) fn result(&self) -> Result<(), PipelineError> {
        let first = self
            .first
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        match first {
            Some(error) => Err(error),
            None if self.token.is_cancelled() => Err(PipelineError::Cancelled),
            None => Ok(()),
        }
    }
}

/// What a panic said.
pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").to_owned()
}
