//! The one retry loop: a decorator that makes any store patient, within limits.
//!
//! In: calls of [`Store`]. Out: the inner store's answers, after as many attempts as it takes. What can fail: what the inner store refuses, and
//! [`StoreError::GaveUp`] when `store.retry_timeout` or the deadline ends the attempts, [`StoreError::Cancelled`] when the caller does.
//!
//! Pauses double from 100 ms to 5 s, with jitter. The timeout counts from the first failure, and bounds when a new attempt may start, not how long one may run:
//! a slow part that still moves is the inner store's business (`store.stall_timeout`), and one that is cut after a long way is owed another attempt. The
//! deadline and the token also cut an attempt under way.
//!
//! Time alone ends the attempts, there is no limit on their number: the pauses already bound it (120 s leave room for about 40 attempts), and a store that is back
//! within the time that the user allows must find us still there, whether it refused quickly or slowly.
//!
//! A write whose answer was lost may have taken effect. Parts and beginnings are simply sent again: a part replaces itself, and an upload id that nobody
//! knows is found by `gc`. [`Store::put_if_absent`] and [`Store::complete_upload`] look at what stands there before they decide.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    Facts, Key, Listed, ObjectInfo, PartBody, PartNumber, PartReceipt, PutOutcome, RangeSink,
    RetryLimit, Store, StoreError, UploadId, listing_name, read_slice,
};
use crate::failpoint;
use crate::progress::Meter;

/// A request that has been failing for so long is told of.
const TELL_AFTER: Duration = Duration::from_secs(2);
/// No more often than this.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// How patient a [`Retrying`] store is.
#[derive(Debug, Clone, Copy)]
pub struct RetryPolicy {
    /// How long after an operation's first failure a new attempt may start (`store.retry_timeout`).
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
    /// When somebody was last told that requests are being tried again.
    told_at: Mutex<Option<Instant>>,
    /// See [`Retrying::hold`].
    holds: AtomicBool,
    /// See [`failpoint::io_fails`].
    is_directory: bool,
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
            told_at: Mutex::new(None),
            holds: AtomicBool::new(false),
            is_directory: inner.describe().starts_with("file:"),
            inner,
        }
    }

    /// The store that is made patient.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// The same, to be shared.
    pub fn shared(&self) -> Arc<S> {
        Arc::clone(&self.inner)
    }

    /// While it holds, `store.retry_timeout` ends nothing, and a refusal is tried again too: somebody may lift it. The deadline and the caller still end every call.
    pub fn hold(&self, holds: bool) {
        self.holds.store(holds, Ordering::Relaxed);
    }

    /// From now on every call ends at `deadline` at the latest, calls under way included; with `None` no call ends for it.
    pub fn set_deadline(&self, deadline: impl Into<Option<Instant>>) {
        self.deadline.send_replace(deadline.into());
    }

    /// The same store, as patient, for other calls: with no deadline so far, and with this meter.
    pub fn renewed(&self, cancel: CancellationToken, meter: Arc<Meter>) -> Self {
        Self {
            deadline: watch::Sender::new(None),
            meter,
            ..self.with_cancel(cancel)
        }
    }

    /// The same store, as patient and with the same deadline so far, whose calls another token ends.
    pub fn with_cancel(&self, cancel: CancellationToken) -> Self {
        Self {
            policy: self.policy,
            deadline: watch::Sender::new(*self.deadline.borrow()),
            cancel,
            meter: Arc::clone(&self.meter),
            told_at: Mutex::new(None),
            holds: AtomicBool::new(self.holds.load(Ordering::Relaxed)),
            is_directory: self.is_directory,
            inner: Arc::clone(&self.inner),
        }
    }

    fn attempts<'a>(&'a self, operation: &'static str, key: &'a str) -> Attempts<'a> {
        Attempts {
            policy: &self.policy,
            deadline: self.deadline.subscribe(),
            cancel: &self.cancel,
            meter: &self.meter,
            told_at: &self.told_at,
            holds: &self.holds,
            is_directory: self.is_directory,
            operation,
            key,
            started: Instant::now(),
            failing_since: None,
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
                // Held, it is tried again.
                attempts.pause(error).await?;
                continue;
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
        sink: &mut dyn RangeSink,
    ) -> Result<(), StoreError> {
        let mut attempts = self.attempts("GetObject", key.as_str());
        loop {
            let attempt = self
                .inner
                .read_range(key, range.clone(), if_match, &mut *sink);
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
    told_at: &'a Mutex<Option<Instant>>,
    holds: &'a AtomicBool,
    is_directory: bool,
    operation: &'static str,
    key: &'a str,
    started: Instant,
    /// When the first attempt failed.
    failing_since: Option<Instant>,
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
        let broken = failpoint::io_fails(|| self.is_directory)
            .then(|| self.transient("an I/O error, as a trial asks"));
        let answer = async {
            match broken {
                Some(error) => Err(error),
                None => attempt.await,
            }
        };
        let cut = tokio::select! {
            biased;
            () = self.cancel.cancelled() => RunEnd::Cancelled,
            () = passes(&mut self.deadline) => RunEnd::Deadline,
            result = answer => RunEnd::Answer(result),
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
                if result.is_err() {
                    self.failing_since.get_or_insert_with(Instant::now);
                }
                self.unsettled |= result.as_ref().is_err_and(StoreError::is_retryable);
                result
            }
        }
    }

    /// How long it has been failing.
    fn failing_for(&self) -> Duration {
        self.failing_since
            .map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Waits before the next attempt, or says why there is none.
    async fn pause(&mut self, error: StoreError) -> Result<(), StoreError> {
        let holds = self.holds.load(Ordering::Relaxed);
        let may_be_lifted = holds && matches!(error, StoreError::Refused { .. });
        if !error.is_retryable() && !may_be_lifted {
            return Err(self.end(error));
        }
        let pause = self.policy.pause(self.count);
        if holds {
            return self.wait(pause, None, error).await;
        }
        let limit = self.policy.timeout;
        if self.failing_for() + pause >= limit {
            return Err(self.gave_up(RetryLimit::Timeout(limit), error));
        }
        self.wait(pause, Some(limit), error).await
    }

    /// Waits for an object that must be there; `error` says what was seen instead.
    async fn wait_for_object(&mut self, error: StoreError) -> Result<(), StoreError> {
        let pause = self.policy.pause(self.count);
        if self.failing_for() + pause >= self.policy.absence_patience {
            return Err(error);
        }
        let limit = self.policy.absence_patience;
        self.wait(pause, Some(limit), error).await
    }

    async fn wait(
        &mut self,
        pause: Duration,
        limit: Option<Duration>,
        error: StoreError,
    ) -> Result<(), StoreError> {
        let deadline = *self.deadline.borrow();
        if deadline.is_some_and(|deadline| Instant::now() + pause >= deadline) {
            return Err(self.gave_up(RetryLimit::Deadline, error));
        }
        let kind = match error {
            StoreError::SlowDown { .. } => "slow down",
            StoreError::NotFound { .. } => "not found",
            _ => "fault",
        };
        self.meter
            .retried(kind, || format!("attempt {} failed: {error}", self.count));
        if matches!(error, StoreError::SlowDown { .. }) {
            // Whoever decides how many requests are under way listens.
            self.meter.slow_downs.fetch_add(1, Ordering::Relaxed);
        }
        self.tell(pause, limit, &error);
        self.last = Some(error);
        if pause.is_zero() {
            // A timer would make a millisecond of it.
            return Ok(());
        }
        tokio::select! {
            biased;
            () = self.cancel.cancelled() => Err(self.cancelled()),
            () = tokio::time::sleep(pause) => Ok(()),
        }
    }

    /// Every failed attempt is worth a line to whoever looks closely. One that has been failing for a while is worth one to everybody, now and then for all
    /// requests together: silence for as long as `store.retry_timeout` looks like a hang.
    fn tell(&self, pause: Duration, limit: Option<Duration>, error: &StoreError) {
        let chain = crate::error::one_line(error);
        tracing::debug!(attempt = self.count, ?pause, "trying again: {chain}");
        if self.failing_for() < TELL_AFTER {
            return;
        }
        let mut told_at = self.told_at.lock().unwrap_or_else(PoisonError::into_inner);
        if told_at.is_none_or(|at| at.elapsed() >= TELL_EVERY) {
            *told_at = Some(Instant::now());
            match limit {
                Some(limit) => tracing::warn!(
                    "{chain}; trying again, up to {limit:?} in all (store.retry_timeout)"
                ),
                None => tracing::warn!(
                    "{chain}; the target is held, and nothing is lost, while this is tried again (spill.on_failure)"
                ),
            }
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
        let until = *deadline.borrow_and_update();
        let sleep = async {
            match until {
                // The runtime's timer is a millisecond coarse; what has passed has passed.
                Some(instant) if instant <= Instant::now() => {}
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

    fn read_range<'a>(
        &'a self,
        key: &'a Key,
        range: Range<u64>,
        if_match: Option<&'a str>,
        sink: &'a mut dyn RangeSink,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.patient_read(key, range, if_match, sink).boxed()
    }

    fn get_range<'a>(
        &'a self,
        key: &'a Key,
        range: Range<u64>,
        if_match: Option<&'a str>,
        out: &'a mut [u8],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        read_slice(self, key, range, if_match, out).boxed()
    }

    fn head<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<Option<ObjectInfo>, StoreError>> {
        self.again("HeadObject", key.as_str(), || self.inner.head(key))
            .boxed()
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<Listed>, StoreError>> {
        self.again("ListObjectsV2", listing_name(prefix), || {
            self.inner.list(prefix)
        })
        .boxed()
    }

    fn list_dirs<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>, StoreError>> {
        self.again("ListObjectsV2", listing_name(prefix), || {
            self.inner.list_dirs(prefix)
        })
        .boxed()
    }

    fn abort_uploads_under<'a>(
        &'a self,
        prefix: &'a str,
    ) -> BoxFuture<'a, Result<u64, StoreError>> {
        self.again("ListMultipartUploads", listing_name(prefix), || {
            self.inner.abort_uploads_under(prefix)
        })
        .boxed()
    }

    fn delete<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<(), StoreError>> {
        self.again("DeleteObject", key.as_str(), || self.inner.delete(key))
            .boxed()
    }

    fn facts(&self) -> BoxFuture<'_, Facts> {
        self.inner.facts()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Crc64;
    use crate::store::faulty::{Fault, Faulty};

    /// Impatient enough for tests, patient enough for a busy machine.
    fn policy() -> RetryPolicy {
        RetryPolicy {
            pause_first: Duration::from_millis(1),
            pause_max: Duration::from_millis(2),
            absence_patience: Duration::from_secs(20),
            ..RetryPolicy::new(Duration::from_secs(60))
        }
    }

    fn patient_with(store: Faulty, policy: RetryPolicy) -> (Retrying<Faulty>, Arc<Faulty>) {
        let store = Arc::new(store);
        let cancel = CancellationToken::new();
        (
            Retrying::new(Arc::clone(&store), policy, cancel, Meter::new()),
            store,
        )
    }

    fn patient(store: Faulty) -> (Retrying<Faulty>, Arc<Faulty>) {
        patient_with(store, policy())
    }

    fn retries<S: ?Sized>(store: &Retrying<S>) -> u64 {
        store.meter.view().retries
    }

    fn key() -> Key {
        Key::new("job/object").unwrap()
    }

    fn part(text: &'static str) -> PartBody {
        let bytes = Bytes::from_static(text.as_bytes());
        let crc64 = Crc64::of(&bytes).value();
        PartBody::new(vec![bytes], crc64)
    }

    fn one() -> PartNumber {
        PartNumber::new(1).unwrap()
    }

    /// Uploads `text` as one part; every step must succeed.
    async fn upload(store: &dyn Store, text: &'static str) -> Result<(), StoreError> {
        let upload = store.begin_upload(&key()).await?;
        let body = part(text);
        let (len, crc64) = (body.len, body.crc64);
        let receipt = store.put_part(&key(), &upload, one(), body).await?;
        store
            .complete_upload(&key(), &upload, &[receipt], len, crc64)
            .await
    }

    /// The first two calls of `operation` fail; `call` must see nothing of it.
    async fn survives(operation: &'static str, call: impl AsyncFn(&dyn Store)) {
        for fault in [Fault::Transient, Fault::SlowDown, Fault::Lost] {
            let (store, inner) = patient(Faulty::new().fail(operation, 1..3, fault));
            call(&store).await;
            assert_eq!(inner.calls(operation), 3, "{operation}, {fault:?}");
            assert_eq!(retries(&store), 2, "{operation}, {fault:?}");
            let slow_downs = store.meter.slow_downs.load(Ordering::Relaxed);
            let asked = if fault == Fault::SlowDown { 2 } else { 0 };
            assert_eq!(slow_downs, asked, "{operation}, {fault:?}");
        }
    }

    #[tokio::test]
    async fn every_method_tries_again() {
        survives("begin_upload", async |store| {
            store.begin_upload(&key()).await.unwrap();
        })
        .await;
        survives("put_part", async |store| {
            upload(store, "abc").await.unwrap()
        })
        .await;
        survives("abort_upload", async |store| {
            let upload = store.begin_upload(&key()).await.unwrap();
            store.abort_upload(&key(), &upload).await.unwrap();
        })
        .await;
        survives("get", async |store| {
            store
                .put_if_absent(&key(), Bytes::from_static(b"abc"))
                .await
                .unwrap();
            let bytes = store.get(&key(), 3).await.unwrap();
            assert_eq!(bytes.as_deref(), Some(&b"abc"[..]));
        })
        .await;
        survives("get_range", async |store| {
            store
                .put_if_absent(&key(), Bytes::from_static(b"abc"))
                .await
                .unwrap();
            let mut out = [0; 2];
            store.get_range(&key(), 1..3, None, &mut out).await.unwrap();
            assert_eq!(&out, b"bc");
        })
        .await;
        survives("head", async |store| {
            assert_eq!(store.head(&key()).await.unwrap(), None);
        })
        .await;
        survives("list", async |store| {
            assert_eq!(store.list("").await.unwrap(), []);
        })
        .await;
        survives("list_dirs", async |store| {
            assert_eq!(store.list_dirs("").await.unwrap(), [""; 0]);
        })
        .await;
        survives("delete", async |store| store.delete(&key()).await.unwrap()).await;
    }

    #[tokio::test]
    async fn a_put_that_was_lost_is_recognized() {
        let (store, inner) = patient(Faulty::new().fail("put_if_absent", 1..2, Fault::Lost));
        let put = store
            .put_if_absent(&key(), Bytes::from_static(b"ours"))
            .await;
        assert_eq!(put.unwrap(), PutOutcome::Created);
        assert_eq!(inner.calls("put_if_absent"), 2);
    }

    #[tokio::test]
    async fn a_put_that_lost_the_race_is_not_taken_for_ours() {
        for theirs in [&b"them"[..], b"longer than ours"] {
            let faulty = Faulty::new().fail("put_if_absent", 1..2, Fault::Transient);
            let (store, inner) = patient(faulty);
            let theirs = Bytes::from_static(theirs);
            inner
                .inner
                .put_if_absent(&key(), theirs.clone())
                .await
                .unwrap();
            let put = store
                .put_if_absent(&key(), Bytes::from_static(b"ours"))
                .await;
            assert_eq!(put.unwrap(), PutOutcome::AlreadyExists);
            assert_eq!(inner.inner.get(&key(), 99).await.unwrap(), Some(theirs));
        }
    }

    #[tokio::test]
    async fn a_put_that_answered_at_once_needs_no_look() {
        let (store, inner) = patient(Faulty::new());
        inner
            .inner
            .put_if_absent(&key(), Bytes::from_static(b"same"))
            .await
            .unwrap();
        let put = store
            .put_if_absent(&key(), Bytes::from_static(b"same"))
            .await;
        assert_eq!(put.unwrap(), PutOutcome::AlreadyExists);
        assert_eq!(inner.calls("get"), 0);
    }

    #[tokio::test]
    async fn a_refusal_after_a_lost_put_leaves_the_outcome_open() {
        let faulty = Faulty::new().fail("put_if_absent", 1..2, Fault::Lost).fail(
            "put_if_absent",
            2..3,
            Fault::Refused,
        );
        let (store, _) = patient(faulty);
        let error = store
            .put_if_absent(&key(), Bytes::from_static(b"x"))
            .await
            .unwrap_err();
        assert!(error.is_outcome_unknown(), "{error:?}");
        assert!(error.to_string().contains("2 attempts"), "{error}");
    }

    #[tokio::test]
    async fn a_first_refusal_is_final() {
        let (store, inner) = patient(Faulty::new().fail("put_if_absent", 1..9, Fault::Refused));
        let error = store
            .put_if_absent(&key(), Bytes::from_static(b"x"))
            .await
            .unwrap_err();
        assert!(matches!(error, StoreError::Refused { .. }), "{error:?}");
        assert_eq!((inner.calls("put_if_absent"), retries(&store)), (1, 0));
    }

    #[tokio::test]
    async fn a_completion_that_was_lost_is_found_by_looking() {
        let faulty = Faulty::new()
            .fail("complete_upload", 1..2, Fault::Lost)
            .fail("head", 1..2, Fault::Transient);
        let (store, inner) = patient(faulty);
        upload(&store, "abc").await.unwrap();
        assert_eq!(
            (inner.calls("complete_upload"), inner.calls("head")),
            (1, 2)
        );
    }

    #[tokio::test]
    async fn a_completed_object_that_shows_late_is_waited_for() {
        // Lost, not yet visible; the second try finds the upload gone; then the object shows.
        let faulty = Faulty::new()
            .fail("complete_upload", 1..2, Fault::Lost)
            .fail("head", 1..4, Fault::Absent);
        let (store, inner) = patient(faulty);
        upload(&store, "abc").await.unwrap();
        assert_eq!(inner.calls("head"), 4);
    }

    #[tokio::test]
    async fn a_completion_that_did_not_happen_is_sent_again() {
        let (store, inner) = patient(Faulty::new().fail("complete_upload", 1..3, Fault::Transient));
        upload(&store, "abc").await.unwrap();
        assert_eq!(inner.calls("complete_upload"), 3);
        assert_eq!(inner.inner.open_uploads(), 0);
    }

    #[tokio::test]
    async fn a_completion_without_upload_or_object_is_not_found() {
        let (store, inner) = patient(Faulty::new());
        let upload = UploadId("none".to_owned());
        let error = store
            .complete_upload(&key(), &upload, &[], 3, 0)
            .await
            .unwrap_err();
        assert!(error.is_not_found(), "{error:?}");
        assert_eq!(inner.calls("complete_upload"), 1);
    }

    #[tokio::test]
    async fn another_object_under_the_key_is_no_success() {
        let (store, inner) = patient(Faulty::new().fail("complete_upload", 1..9, Fault::Transient));
        inner
            .inner
            .put_if_absent(&key(), Bytes::from_static(b"abd"))
            .await
            .unwrap();
        let error = upload(&store, "abc").await.unwrap_err();
        assert!(matches!(error, StoreError::Mismatch { .. }), "{error:?}");
    }

    #[tokio::test]
    async fn a_spent_budget_still_looks_once() {
        let policy = RetryPolicy {
            timeout: Duration::ZERO,
            ..policy()
        };
        let faulty = Faulty::new().fail("complete_upload", 1..9, Fault::Lost);
        let (store, _) = patient_with(faulty, policy);
        upload(&store, "abc").await.unwrap();
    }

    #[tokio::test]
    async fn an_object_that_must_be_there_is_waited_for() {
        let (store, inner) = patient(Faulty::new().fail("get_range", 1..4, Fault::Absent));
        inner
            .inner
            .put_if_absent(&key(), Bytes::from_static(b"abc"))
            .await
            .unwrap();
        store
            .get_range(&key(), 0..3, None, &mut [0; 3])
            .await
            .unwrap();
        assert_eq!(inner.calls("get_range"), 4);
    }

    #[tokio::test]
    async fn an_object_that_stays_away_is_not_found() {
        let policy = RetryPolicy {
            absence_patience: Duration::from_millis(20),
            ..policy()
        };
        let (store, inner) = patient_with(Faulty::new(), policy);
        let error = store
            .get_range(&key(), 0..3, None, &mut [0; 3])
            .await
            .unwrap_err();
        assert!(error.is_not_found(), "{error:?}");
        assert!(inner.calls("get_range") > 1);
    }

    #[tokio::test]
    async fn another_tag_is_final() {
        let (store, inner) = patient(Faulty::new());
        inner
            .inner
            .put_if_absent(&key(), Bytes::from_static(b"abc"))
            .await
            .unwrap();
        let read = store
            .get_range(&key(), 0..3, Some("other"), &mut [0; 3])
            .await;
        assert!(matches!(read, Err(StoreError::Mismatch { .. })), "{read:?}");
        assert_eq!(inner.calls("get_range"), 1);
    }

    #[tokio::test]
    async fn a_slow_attempt_that_is_cut_gets_another() {
        let policy = RetryPolicy {
            timeout: Duration::from_millis(200),
            ..policy()
        };
        let slow = Duration::from_millis(400);
        let faulty = Faulty::new().fail("put_part", 1..2, Fault::CutAfter(slow));
        let (store, inner) = patient_with(faulty, policy);
        upload(&store, "abc").await.unwrap();
        assert_eq!(inner.calls("put_part"), 2);
    }

    #[tokio::test]
    async fn the_timeout_ends_it_and_says_so() {
        let policy = RetryPolicy {
            timeout: Duration::from_millis(50),
            ..policy()
        };
        let (store, inner) = patient_with(
            Faulty::new().fail("head", 1..u32::MAX, Fault::SlowDown),
            policy,
        );
        let error = store.head(&key()).await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("store.retry_timeout = 50ms"), "{text}");
        assert!(
            text.contains(&format!("{} attempts", inner.calls("head"))),
            "{text}"
        );
        let source = std::error::Error::source(&error).map(ToString::to_string);
        assert!(source.is_some_and(|source| source.contains("slow down")));
    }

    #[tokio::test]
    async fn the_deadline_cuts_an_attempt_under_way() {
        let (store, _) = patient(Faulty::new().fail("head", 1..2, Fault::Stall));
        let (store, key) = (Arc::new(store), key());
        let call = tokio::spawn({
            let store = Arc::clone(&store);
            async move { store.head(&key).await }
        });
        // Set while the call is under way.
        tokio::task::yield_now().await;
        store.set_deadline(Instant::now() + Duration::from_millis(20));
        let error = call.await.unwrap().unwrap_err();
        let deadline = |limit: &RetryLimit| *limit == RetryLimit::Deadline;
        assert!(
            matches!(&error, StoreError::GaveUp { limit, attempts: 1, .. } if deadline(limit)),
            "{error:?}"
        );
    }

    #[tokio::test]
    async fn after_the_deadline_nothing_is_started() {
        let (store, inner) = patient(Faulty::new());
        store.set_deadline(Instant::now());
        let error = store.put_if_absent(&key(), Bytes::new()).await.unwrap_err();
        assert!(matches!(error, StoreError::GaveUp { .. }), "{error:?}");
        assert_eq!(inner.inner.head(&key()).await.unwrap(), None);
    }

    #[tokio::test]
    async fn cancelling_ends_an_attempt_and_a_pause() {
        let long = RetryPolicy {
            pause_first: Duration::from_secs(30),
            pause_max: Duration::from_secs(30),
            ..RetryPolicy::new(Duration::from_secs(3600))
        };
        for fault in [Fault::Stall, Fault::Transient] {
            let (store, inner) = patient_with(Faulty::new().fail("head", 1..2, fault), long);
            let cancel = store.cancel.clone();
            let call = tokio::spawn(async move { store.head(&key()).await });
            while inner.calls("head") == 0 {
                tokio::task::yield_now().await;
            }
            cancel.cancel();
            let error = call.await.unwrap().unwrap_err();
            assert!(matches!(error, StoreError::Cancelled { .. }), "{error:?}");
            assert_eq!(inner.calls("head"), 1);
        }
    }

    #[tokio::test]
    async fn another_token_is_not_ended_by_the_first() {
        let (store, _) = patient(Faulty::new());
        let other = store.with_cancel(CancellationToken::new());
        store.cancel.cancel();
        assert!(store.head(&key()).await.is_err());
        assert_eq!(other.head(&key()).await.unwrap(), None);
        // A deadline that is set beforehand holds for both.
        store.set_deadline(Instant::now());
        let late = store.with_cancel(CancellationToken::new());
        assert!(late.head(&key()).await.is_err());
        assert!(other.head(&key()).await.is_ok());
    }

    #[test]
    fn pauses_double_up_to_the_limit() {
        let policy = RetryPolicy::new(Duration::from_secs(60));
        for (failed, full_ms) in [
            (1, 100),
            (2, 200),
            (3, 400),
            (6, 3200),
            (7, 5000),
            (90, 5000),
        ] {
            let full = Duration::from_millis(full_ms);
            for _ in 0..50 {
                let pause = policy.pause(failed);
                assert!(full / 2 <= pause && pause <= full, "{failed}: {pause:?}");
            }
        }
    }
}
