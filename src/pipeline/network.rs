//! A store behind a network, for unit tests: parts take time, or as long as the test likes.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt};
use tokio::sync::Semaphore;

use crate::store::memory::MemoryStore;
use crate::store::{
    Key, Listed, ObjectInfo, PartBody, PartNumber, PartReceipt, PutOutcome, RangeSink, Store,
    StoreError, UploadId,
};

/// See the module.
#[derive(Debug)]
pub(super) struct Network {
    inner: MemoryStore,
    /// What a part takes.
    latency: Duration,
    /// A part takes one, and waits for it.
    pub(super) passes: Semaphore,
    pub(super) in_flight: AtomicUsize,
}

impl Network {
    /// A store so far away.
    pub(super) fn far(latency: Duration) -> Self {
        Self {
            inner: MemoryStore::with_part_len_min(0),
            latency,
            passes: Semaphore::new(Semaphore::MAX_PERMITS),
            in_flight: AtomicUsize::new(0),
        }
    }

    /// A store that takes a part when the test adds a pass.
    pub(super) fn gated() -> Self {
        Self {
            passes: Semaphore::new(0),
            ..Self::far(Duration::ZERO)
        }
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
            self.in_flight.fetch_add(1, Ordering::Relaxed);
            let _counted = InFlight(&self.in_flight);
            self.passes.acquire().await.unwrap().forget();
            tokio::time::sleep(self.latency).await;
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

    fn read_range<'a>(
        &'a self,
        key: &'a Key,
        range: Range<u64>,
        if_match: Option<&'a str>,
        sink: &'a mut dyn RangeSink,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.inner.read_range(key, range, if_match, sink)
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

    fn abort_uploads_under<'a>(
        &'a self,
        prefix: &'a str,
    ) -> BoxFuture<'a, Result<u64, StoreError>> {
        self.inner.abort_uploads_under(prefix)
    }

    fn delete<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<(), StoreError>> {
        self.inner.delete(key)
    }

    fn describe(&self) -> String {
        "memory behind a network".to_owned()
    }
}
