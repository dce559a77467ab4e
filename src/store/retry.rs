//! The one retry loop: a decorator that makes any store patient, within limits.
//!
//! In: calls of [`Store`]. Out: the inner store's answers, after as many attempts as it takes. What can fail: what the inner store refuses, and
//! [`StoreError::GaveUp`] when `store.retry_timeout` or the deadline ends the attempts, [`StoreError::Cancelled`] when the caller does.
//!
//! Pauses double from 100 ms to 5 s, with jitter. The timeout bounds when a new attempt may start, not how long one may run: a slow part that still
//! moves is the inner store's business (`store.stall_timeout`). The deadline and the token also cut an attempt under way.
//!
//! A write whose answer was lost may have taken effect. Parts and beginnings are simply sent again: a part replaces itself, and an upload id that nobody
//! knows is found by `gc`. [`Store::put_if_absent`] and [`Store::complete_upload`] look at what stands there before they decide.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    Key, Listed, ObjectInfo, PartBody, PartNumber, PartReceipt, PutOutcome, RetryLimit, Store,
    StoreError, UploadId,
};
use crate::progress::Meter;

/// How patient a [`Retrying`] store is.
#[derive(Debug, Clone, Copy)]
pub struct RetryPolicy {
    /// How long one operation is tried, attempts and pauses together (`store.retry_timeout`).
    pub timeout: Duration,
    /// Pause after the first failed attempt; each further one doubles it.
    pub pause_first: Duration,
    /// Longest pause.
    pub pause_max: Duration,
    /// How long an object that must be there ([`Store::get_range`], an upload that we completed) may be absent or short. Some stores show a new object late.
    pub absence_patience: Duration,
}

impl RetryPolicy {
    /// The usual pauses, with `store.retry_timeout` as the limit.
    pub fn new(timeout: Duration) -> Self {
        Self {
            timeout,
            pause_first: Duration::from_millis(100),
            pause_max: Duration::from_secs(5),
            absence_patience: timeout.min(Duration::from_secs(10)),
        }
    }

    /// The pause after so many failed attempts (from 1): half of it certain, half of it random.
    fn pause(&self, failed_attempts: u32) -> Duration {
        let doublings = failed_attempts.saturating_sub(1).min(16);
        let full = self
            .pause_first
            .saturating_mul(1 << doublings)
            .min(self.pause_max);
        full.mul_f64(0.5 + fastrand::f64() / 2.0)
    }
}

/// See the module.
pub struct Retrying<S: ?Sized> {
    policy: RetryPolicy,
    deadline: watch::Sender<Option<Instant>>,
    cancel: CancellationToken,
    meter: Arc<Meter>,
    inner: Arc<S>,
}

impl<S: ?Sized + fmt::Debug> fmt::Debug for Retrying<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Retrying")
            .field("policy", &self.policy)
            .field("inner", &&*self.inner)
            .finish_non_exhaustive()
    }
}

impl<S: Store + ?Sized> Retrying<S> {
    /// Makes `inner` patient. `cancel` ends every call; `meter` counts the attempts after the first.
    pub fn new(
        inner: Arc<S>,
        policy: RetryPolicy,
        cancel: CancellationToken,
        meter: Arc<Meter>,
    ) -> Self {
        Self {
            policy,
            deadline: watch::Sender::new(None),
            cancel,
            meter,
            inner,
        }
    }

    /// From now on every call ends at `deadline` at the latest, calls under way included.
    pub fn set_deadline(&self, deadline: Instant) {
        self.deadline.send_replace(Some(deadline));
    }

    fn attempts<'a>(&'a self, operation: &'static str, key: &'a str) -> Attempts<'a> {
        Attempts {
            policy: &self.policy,
            deadline: self.deadline.subscribe(),
            cancel: &self.cancel,
            meter: &self.meter,
            operation,
            key,
            started: Instant::now(),
            count: 0,
            unsettled: false,
            last: None,
        }
    }

    /// Calls `attempt` until it succeeds or the attempts end.
    async fn again<'a, T>(
        &'a self,
        operation: &'static str,
        key: &'a str,
        attempt: impl Fn() -> BoxFuture<'a, Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        let mut attempts = self.attempts(operation, key);
        loop {
            match attempts.run(attempt()).await {
                Ok(value) => return Ok(value),
                Err(error) => attempts.pause(error).await?,
            }
        }
    }

    async fn settle_put(&self, key: &Key, body: Bytes) -> Result<PutOutcome, StoreError> {
        let mut attempts = self.attempts("PutObject", key.as_str());
        loop {
            match attempts
                .run(self.inner.put_if_absent(key, body.clone()))
                .await
            {
                Ok(PutOutcome::AlreadyExists) if attempts.unsettled => {
                    // It may stand there because of our own lost attempt: equal bytes are ours.
                    match attempts.run(self.inner.get(key, body.len())).await {
                        Ok(Some(there)) if there == body => return Ok(PutOutcome::Created),
                        Ok(Some(_)) | Err(StoreError::Mismatch { .. }) => {
                            return Ok(PutOutcome::AlreadyExists);
                        }
                        Ok(None) => {
                            let what = "the store says that the object exists but does not show it";
                            attempts.pause(attempts.transient(what)).await?;
                        }
                        Err(error) => attempts.pause(error).await?,
                    }
                }
                Ok(outcome) => return Ok(outcome),
                Err(error) => attempts.pause(error).await?,
            }
        }
    }

    async fn settle_complete(
        &self,
        key: &Key,
        upload: &UploadId,
        parts: &[PartReceipt],
        len: u64,
        crc64: u64,
    ) -> Result<(), StoreError> {
        let mut attempts = self.attempts("CompleteMultipartUpload", key.as_str());
        loop {
            let attempt = self.inner.complete_upload(key, upload, parts, len, crc64);
            let error = match attempts.run(attempt).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if !error.is_retryable() && !error.is_not_found() {
                return Err(attempts.end(error));
            }
            // Look at once, before the pause: the budget may be spent, and an object that landed must not be reported lost.
            let seen = loop {
                match attempts.run(self.inner.head(key)).await {
                    Ok(seen) => break seen,
                    Err(error) => attempts.pause(error).await?,
                }
            };
            match seen {
                Some(info) if info.len == len && info.crc64.is_none_or(|sum| sum == crc64) => {
                    return Ok(());
                }
                Some(info) => {
                    return Err(StoreError::Mismatch {
                        operation: attempts.operation,
                        key: key.to_string(),
                        what: format!(
                            "an object of {} bytes (CRC64NVME {:x?}) stands there, ours has {len} ({crc64:x})",
                            info.len, info.crc64
                        ),
                    });
                }
                None if error.is_not_found() && attempts.unsettled => {
                    attempts.wait_for_object(error).await?;
                }
                None => attempts.pause(error).await?,
            }
        }
    }

    async fn patient_read(
        &self,
        key: &Key,
        range: Range<u64>,
        if_match: Option<&str>,
        out: &mut [u8],
    ) -> Result<(), StoreError> {
        let mut attempts = self.attempts("GetObject", key.as_str());
        loop {
            let attempt = self
                .inner
                .get_range(key, range.clone(), if_match, &mut *out);
            match attempts.run(attempt).await {
                Ok(()) => return Ok(()),
                Err(error @ StoreError::NotFound { .. }) => {
                    attempts.wait_for_object(error).await?;
                }
                // Without a tag to match, a mismatch is an object that is shorter than it will be.
                Err(error @ StoreError::Mismatch { .. }) if if_match.is_none() => {
                    attempts.wait_for_object(error).await?;
                }
                Err(error) => attempts.pause(error).await?,
            }
        }
    }
}

/// The attempts at one operation.
struct Attempts<'a> {
    policy: &'a RetryPolicy,
    deadline: watch::Receiver<Option<Instant>>,
    cancel: &'a CancellationToken,
    meter: &'a Meter,
    operation: &'static str,
    key: &'a str,
    started: Instant,
    count: u32,
    /// An attempt failed in a way that leaves open whether it took effect.
    unsettled: bool,
    last: Option<StoreError>,
}

impl Attempts<'_> {
    /// Runs one attempt, or as much of it as the deadline and the caller allow.
    async fn run<T>(
        &mut self,
        attempt: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        self.count += 1;
        let cut = tokio::select! {
            biased;
            () = self.cancel.cancelled() => RunEnd::Cancelled,
            () = passes(&mut self.deadline) => RunEnd::Deadline,
            result = attempt => RunEnd::Answer(result),
        };
        match cut {
            RunEnd::Cancelled => Err(self.cancelled()),
            RunEnd::Deadline => {
                let last = self.last.take();
                let error =
                    last.unwrap_or_else(|| self.transient("no answer when the deadline came"));
                Err(self.gave_up(RetryLimit::Deadline, error))
            }
            RunEnd::Answer(result) => {
                self.unsettled |= result.as_ref().is_err_and(StoreError::is_retryable);
                result
            }
        }
    }

    /// Waits before the next attempt, or says why there is none.
    async fn pause(&mut self, error: StoreError) -> Result<(), StoreError> {
        if !error.is_retryable() {
            return Err(self.end(error));
        }
        let pause = self.policy.pause(self.count);
        if self.started.elapsed() + pause >= self.policy.timeout {
            return Err(self.gave_up(RetryLimit::Timeout(self.policy.timeout), error));
        }
        self.wait(pause, error).await
    }

    /// Waits for an object that must be there; `error` says what was seen instead.
    async fn wait_for_object(&mut self, error: StoreError) -> Result<(), StoreError> {
        let pause = self.policy.pause(self.count);
        if self.started.elapsed() + pause >= self.policy.absence_patience {
            return Err(error);
        }
        self.wait(pause, error).await
    }

    async fn wait(&mut self, pause: Duration, error: StoreError) -> Result<(), StoreError> {
        let deadline = *self.deadline.borrow();
        if deadline.is_some_and(|deadline| Instant::now() + pause >= deadline) {
            return Err(self.gave_up(RetryLimit::Deadline, error));
        }
        self.meter.retries.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(attempt = self.count, ?pause, %error, "store request failed, trying again");
        self.last = Some(error);
        tokio::select! {
            biased;
            () = self.cancel.cancelled() => Err(self.cancelled()),
            () = tokio::time::sleep(pause) => Ok(()),
        }
    }

    /// The final error for one that ends the attempts by itself. A refusal after a lost answer says nothing about the lost attempt.
    fn end(&self, error: StoreError) -> StoreError {
        match error {
            StoreError::Refused { .. } if self.unsettled => {
                self.gave_up(RetryLimit::Refusal, error)
            }
            error => error,
        }
    }

    fn gave_up(&self, limit: RetryLimit, source: StoreError) -> StoreError {
        StoreError::GaveUp {
            operation: self.operation,
            key: self.key.to_owned(),
            attempts: self.count,
            elapsed: self.started.elapsed(),
            limit,
            source: Box::new(source),
        }
    }

    fn cancelled(&self) -> StoreError {
        StoreError::Cancelled {
            operation: self.operation,
            key: self.key.to_owned(),
        }
    }

    fn transient(&self, what: &str) -> StoreError {
        StoreError::Transient {
            operation: self.operation,
            key: self.key.to_owned(),
            what: what.to_owned(),
            source: None,
        }
    }
}

enum RunEnd<T> {
    Cancelled,
    Deadline,
    Answer(Result<T, StoreError>),
}

/// Ends when the deadline passes, whichever it is by then; never without one.
async fn passes(deadline: &mut watch::Receiver<Option<Instant>>) {
    loop {
        let now = *deadline.borrow_and_update();
        let sleep = async {
            match now {
                Some(instant) => tokio::time::sleep_until(instant.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = sleep => return,
            changed = deadline.changed() => {
                if changed.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        }
    }
}

#[deny(clippy::missing_trait_methods)]
impl<S: Store + ?Sized> Store for Retrying<S> {
    fn begin_upload<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        self.again("CreateMultipartUpload", key.as_str(), || {
            self.inner.begin_upload(key)
        })
        .boxed()
    }

    fn put_part<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        number: PartNumber,
        body: PartBody,
    ) -> BoxFuture<'a, Result<PartReceipt, StoreError>> {
        self.again("UploadPart", key.as_str(), move || {
            self.inner.put_part(key, upload, number, body.clone())
        })
        .boxed()
    }

    fn complete_upload<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        parts: &'a [PartReceipt],
        len: u64,
        crc64: u64,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.settle_complete(key, upload, parts, len, crc64).boxed()
    }

    fn abort_upload<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.again("AbortMultipartUpload", key.as_str(), || {
            self.inner.abort_upload(key, upload)
        })
        .boxed()
    }

    fn put_if_absent<'a>(
        &'a self,
        key: &'a Key,
        body: Bytes,
    ) -> BoxFuture<'a, Result<PutOutcome, StoreError>> {
        self.settle_put(key, body).boxed()
    }

    fn get<'a>(
        &'a self,
        key: &'a Key,
        len_max: usize,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        self.again("GetObject", key.as_str(), move || {
            self.inner.get(key, len_max)
        })
        .boxed()
    }

    fn get_range<'a>(
        &'a self,
        key: &'a Key,
        range: Range<u64>,
        if_match: Option<&'a str>,
        out: &'a mut [u8],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.patient_read(key, range, if_match, out).boxed()
    }

    fn head<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<Option<ObjectInfo>, StoreError>> {
        self.again("HeadObject", key.as_str(), || self.inner.head(key))
            .boxed()
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<Listed>, StoreError>> {
        self.again("ListObjectsV2", prefix, || self.inner.list(prefix))
            .boxed()
    }

    fn list_dirs<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>, StoreError>> {
        self.again("ListObjectsV2", prefix, || self.inner.list_dirs(prefix))
            .boxed()
    }

    fn delete<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<(), StoreError>> {
        self.again("DeleteObject", key.as_str(), || self.inner.delete(key))
            .boxed()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}
