//! Where the bench's objects go, and that none of them stays.
//!
//! In: the name of an object. Out: its key, under a prefix of this run alone: `<job>/bench-<nonce>/`. What can fail: the store; clean-up, which then says what is left.
//!
//! A store that is measured is the configured one behind its retries, or one in this process: in memory, or one that swallows. Whatever happens in between, [`Place::clean`]
//! removes every object and aborts every upload that went through here, by calls that no signal ends.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::future::{BoxFuture, FutureExt};
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::progress::Meter;
use crate::store::memory::MemoryStore;
use crate::store::null::NullStore;
use crate::store::retry::{RetryPolicy, Retrying};
use crate::store::{
    self, BadKey, Facts, Key, Listed, ObjectInfo, PartBody, PartNumber, PartReceipt, PutOutcome,
    RangeSink, Store, StoreError, UploadId,
};

/// Longest time for removing what the bench has made.
const CLEAN_TIMEOUT: Duration = Duration::from_secs(30);
/// Requests of the clean-up at once.
const CLEAN_AT_ONCE: usize = 8;

/// Which store is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum To {
    /// One in this process that swallows: the node alone.
    Null,
    /// One in this process that keeps everything.
    Memory,
    /// The configured one.
    Store,
}

impl fmt::Display for To {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Null => "null",
            Self::Memory => "memory",
            Self::Store => "store",
        })
    }
}

/// The store of a bench.
#[derive(Debug)]
pub(super) struct Place {
    /// For the bench; its calls end with the bench's token.
    pub(super) store: Arc<dyn Store>,
    /// The swallowing store itself, where it is the one.
    null: Option<Arc<NullStore>>,
    /// For the clean-up: no signal ends its calls.
    patient: Arc<dyn Store>,
    made: Arc<Made>,
    prefix: String,
}

impl Place {
    /// Opens the store that `to` names. No request is made yet.
    pub(super) async fn open(
        to: To,
        config: &Config,
        cancel: &CancellationToken,
        meter: &Arc<Meter>,
    ) -> Result<Self, StoreError> {
        let null = (to == To::Null).then(|| Arc::new(NullStore::new()));
        let inner: Arc<dyn Store> = match (to, &null) {
            (To::Store, _) => {
                let store = store::open(&config.store, cancel.clone(), Arc::clone(meter)).await?;
                let patient = Arc::new(store.with_cancel(CancellationToken::new()));
                return Ok(Self::over(Arc::new(store), patient, None, config));
            }
            (_, Some(null)) => Arc::clone(null) as Arc<dyn Store>,
            _ => Arc::new(MemoryStore::new()),
        };
        // Behind the same retries as a real one: they are part of the way, and end with the token.
        let policy = RetryPolicy::new(config.store.retry_timeout);
        let store = Retrying::new(inner, policy, cancel.clone(), Arc::clone(meter));
        let patient = Arc::new(store.with_cancel(CancellationToken::new()));
        Ok(Self::over(Arc::new(store), patient, null, config))
    }

    fn over(
        store: Arc<dyn Store>,
        patient: Arc<dyn Store>,
        null: Option<Arc<NullStore>>,
        config: &Config,
    ) -> Self {
        let made = Arc::new(Made::default());
        let store = Arc::new(Remembering {
            inner: store,
            made: Arc::clone(&made),
        });
        Self {
            store,
            null,
            patient,
            made,
            prefix: format!("{}/bench-{:016x}", config.job, fastrand::u64(..)),
        }
    }

    /// The key of an object of this bench. Each run makes its objects anew, so each key has a number of its own.
    pub(super) fn key(&self, name: &str) -> Result<Key, BadKey> {
        let number = self.made.next_number();
        Key::new(&format!("{}/{number}-{name}", self.prefix))
    }

    /// Whether the store swallows, so that what is to be read must be put up ([`Place::serve`]).
    pub(super) fn swallows(&self) -> bool {
        self.null.is_some()
    }

    /// Puts up `bytes`, repeated to `len`, for reading from a store that swallows.
    pub(super) fn serve(&self, key: &Key, bytes: Bytes, len: u64) {
        if let Some(null) = &self.null {
            self.made.lock().objects.push(key.clone());
            null.serve(key.clone(), bytes, len);
        }
    }

    /// Removes everything that was made so far. What could not be removed, in words.
    pub(super) async fn clean(&self) -> Vec<String> {
        let (uploads, objects) = self.made.take();
        let patient = &*self.patient;
        let aborts = uploads.into_iter().map(|(key, upload)| {
            async move {
                let aborted = patient.abort_upload(&key, &upload).await;
                aborted.map_err(|error| format!("upload of {key} stays in the store: {error}"))
            }
            .boxed()
        });
        let deletes = objects.into_iter().map(|key| {
            async move {
                let deleted = patient.delete(&key).await;
                deleted.map_err(|error| format!("object {key} stays in the store: {error}"))
            }
            .boxed()
        });
        let requests: Vec<BoxFuture<'_, Result<(), String>>> = aborts.chain(deletes).collect();
        let all = futures::stream::iter(requests)
            .buffer_unordered(CLEAN_AT_ONCE)
            .filter_map(|outcome| async move { outcome.err() })
            .collect::<Vec<_>>();
        match tokio::time::timeout(CLEAN_TIMEOUT, all).await {
            Ok(problems) => problems,
            Err(_elapsed) => vec![format!(
                "what lies under {}/ in {} could not be removed within {CLEAN_TIMEOUT:?}",
                self.prefix,
                self.patient.describe()
            )],
        }
    }
}

/// What was made in the store and is to be removed.
#[derive(Debug, Default)]
struct Made {
    state: Mutex<MadeState>,
}

#[derive(Debug, Default)]
struct MadeState {
    number: u64,
    uploads: Vec<(Key, UploadId)>,
    objects: Vec<Key>,
}

impl Made {
    fn lock(&self) -> std::sync::MutexGuard<'_, MadeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_number(&self) -> u64 {
        let mut state = self.lock();
        state.number += 1;
        state.number
    }

    fn take(&self) -> (Vec<(Key, UploadId)>, Vec<Key>) {
        let mut state = self.lock();
        (
            std::mem::take(&mut state.uploads),
            std::mem::take(&mut state.objects),
        )
    }
}

/// A store that remembers what is made in it.
#[derive(Debug)]
struct Remembering {
    inner: Arc<dyn Store>,
    made: Arc<Made>,
}

#[deny(clippy::missing_trait_methods)]
impl Store for Remembering {
    fn begin_upload<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        async move {
            let upload = self.inner.begin_upload(key).await?;
            let open = (key.clone(), upload.clone());
            self.made.lock().uploads.push(open);
            Ok(upload)
        }
        .boxed()
    }

    fn put_part<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        number: PartNumber,
        body: PartBody,
    ) -> BoxFuture<'a, Result<PartReceipt, StoreError>> {
        self.inner.put_part(key, upload, number, body)
    }

    fn complete_upload<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        parts: &'a [PartReceipt],
        len: u64,
        crc64: u64,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        async move {
            // Before the call: it may take effect although its answer is lost. A failed one leaves the upload to be aborted too.
            self.made.lock().objects.push(key.clone());
            self.inner
                .complete_upload(key, upload, parts, len, crc64)
                .await?;
            self.made.lock().uploads.retain(|(_, open)| open != upload);
            Ok(())
        }
        .boxed()
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
        self.made.lock().objects.push(key.clone());
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
        range: std::ops::Range<u64>,
        if_match: Option<&'a str>,
        sink: &'a mut dyn RangeSink,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.inner.read_range(key, range, if_match, sink)
    }

    fn get_range<'a>(
        &'a self,
        key: &'a Key,
        range: std::ops::Range<u64>,
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

    fn abort_uploads_under<'a>(
        &'a self,
        prefix: &'a str,
    ) -> BoxFuture<'a, Result<u64, StoreError>> {
        self.inner.abort_uploads_under(prefix)
    }

    fn delete<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<(), StoreError>> {
        self.inner.delete(key)
    }

    fn facts(&self) -> BoxFuture<'_, Facts> {
        self.inner.facts()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}
