//! A store behind a network, for unit tests: parts take time, and too many of them are refused.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt};
use tokio::time::{Instant, sleep_until};

use crate::store::memory::MemoryStore;
use crate::store::{
    Key, Listed, ObjectInfo, PartBody, PartNumber, PartReceipt, PutOutcome, Store, StoreError,
    UploadId,
};

/// See the module.
#[derive(Debug)]
pub(super) struct Network {
    inner: MemoryStore,
    /// What a part takes however fast the link is.
    latency: Duration,
    /// Bytes per second that all connections share.
    rate: f64,
    /// More parts at once than this are asked to slow down.
    pub(super) tolerance: AtomicUsize,
    free_at: Mutex<Option<Instant>>,
    pub(super) in_flight: AtomicUsize,
}

impl Network {
    /// A store so far away, on a link of so many bytes per second.
    pub(super) fn new(latency: Duration, rate: f64) -> Self {
        Self {
            inner: MemoryStore::with_part_len_min(0),
            latency,
            rate,
            tolerance: AtomicUsize::new(usize::MAX),
            free_at: Mutex::default(),
            in_flight: AtomicUsize::new(0),
        }
    }

    /// When a part of `len` bytes that leaves now is there.
    fn arrival(&self, len: u64) -> Instant {
        let now = Instant::now();
        #[expect(clippy::cast_precision_loss, reason = "a model")]
        let takes = Duration::from_secs_f64(len as f64 / self.rate);
        let mut free_at = self.free_at.lock().unwrap();
        let through = free_at.map_or(now, |at| at.max(now)) + takes;
        *free_at = Some(through);
        through.max(now + self.latency)
    }
}

/// Counts a request as long as it lives.
struct InFlight<'a>(&'a AtomicUsize);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Store for Network {
    fn begin_upload<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        self.inner.begin_upload(key)
    }

    fn put_part<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        number: PartNumber,
        body: PartBody,
    ) -> BoxFuture<'a, Result<PartReceipt, StoreError>> {
        async move {
            let before = self.in_flight.fetch_add(1, Ordering::Relaxed);
            let _counted = InFlight(&self.in_flight);
            if before >= self.tolerance.load(Ordering::Relaxed) {
                return Err(StoreError::SlowDown {
                    operation: "UploadPart",
                    key: key.to_string(),
                    code: "SlowDown".to_owned(),
                });
            }
            sleep_until(self.arrival(body.len)).await;
            // What the store keeps is its own: the sender's buffers are free.
            let joined = Bytes::from(body.pieces.concat());
            let body = PartBody::new(vec![joined], body.crc64);
            self.inner.put_part(key, upload, number, body).await
        }
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
        self.inner.complete_upload(key, upload, parts, len, crc64)
    }

    fn abort_upload<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.inner.abort_upload(key, upload)
    }

    fn put_if_absent<'a>(
        &'a self,
        key: &'a Key,
        body: Bytes,
    ) -> BoxFuture<'a, Result<PutOutcome, StoreError>> {
        self.inner.put_if_absent(key, body)
    }

    fn get<'a>(
        &'a self,
        key: &'a Key,
        len_max: usize,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        self.inner.get(key, len_max)
    }

    fn get_range<'a>(
        &'a self,
        key: &'a Key,
        range: Range<u64>,
        if_match: Option<&'a str>,
        out: &'a mut [u8],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.inner.get_range(key, range, if_match, out)
    }

    fn head<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<Option<ObjectInfo>, StoreError>> {
        self.inner.head(key)
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<Listed>, StoreError>> {
        self.inner.list(prefix)
    }

    fn list_dirs<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>, StoreError>> {
        self.inner.list_dirs(prefix)
    }

    fn delete<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<(), StoreError>> {
        self.inner.delete(key)
    }

    fn describe(&self) -> String {
        "memory behind a network".to_owned()
    }
}
