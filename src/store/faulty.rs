//! A store for unit tests whose k-th call of an operation fails.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Mutex;
use std::time::Duration;

use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt};

use super::memory::MemoryStore;
use super::{
    Key, Listed, ObjectInfo, PartBody, PartNumber, PartReceipt, PutOutcome, RangeSink, Store,
    StoreError, UploadId, listing_name,
};

/// What happens instead of, or after, a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing is done; the answer is a passing fault.
    Transient,
    /// Nothing is done; the answer asks to slow down.
    SlowDown,
    /// Nothing is done; the answer is a refusal.
    Refused,
    /// Nothing is done; the answer is that nothing is there.
    Absent,
    /// The call takes effect, and its answer is lost.
    Lost,
    /// [`Store::get`] gives half of the object.
    Short,
    /// Nothing is done and no answer ever comes.
    Stall,
    /// Nothing is done; the answer is a passing fault that comes so late.
    CutAfter(Duration),
    /// [`Store::put_if_absent`] replaces what stands there.
    Overwrites,
    /// The same, and the answer is lost.
    OverwritesLost,
    /// The answer is lost, and the same happens behind so many further calls.
    OverwritesLater(u32),
}

/// Faults in front of a [`MemoryStore`].
#[derive(Debug)]
pub(crate) struct Faulty {
    pub(crate) inner: MemoryStore,
    rules: Mutex<Vec<(&'static str, Range<u32>, Fault)>>,
    calls: Mutex<HashMap<&'static str, u32>>,
    /// Others come in between, before a call and after it.
    order: Option<Mutex<fastrand::Rng>>,
    /// Puts that are on their way, and how many calls come before them.
    on_the_way: Mutex<Vec<(u32, Key, Bytes)>>,
}

impl Faulty {
    pub(crate) fn new() -> Self {
        Self {
            inner: MemoryStore::with_part_len_min(0),
            rules: Mutex::default(),
            calls: Mutex::default(),
            order: None,
            on_the_way: Mutex::default(),
        }
    }

    /// What was on its way arrives, of which so many calls were to come first.
    pub(crate) async fn arrive(&self, calls: u32) {
        let arrived: Vec<_> = {
            let mut on_the_way = self.on_the_way.lock().unwrap();
            for (left, ..) in on_the_way.iter_mut() {
                *left = left.saturating_sub(calls);
            }
            on_the_way.extract_if(.., |(left, ..)| *left == 0).collect()
        };
        for (_, key, body) in arrived {
            self.inner.delete(&key).await.unwrap();
            self.inner.put_if_absent(&key, body).await.unwrap();
        }
    }

    /// Calls of several tasks take effect in an order that this number decides.
    pub(crate) fn in_any_order(self, seed: u64) -> Self {
        Self {
            order: Some(Mutex::new(fastrand::Rng::with_seed(seed))),
            ..self
        }
    }

    async fn lets_others(&self) {
        self.arrive(1).await;
        let Some(order) = &self.order else { return };
        let turns = order.lock().unwrap().u32(0..6);
        for _ in 0..turns {
            tokio::task::yield_now().await;
        }
    }

    /// The calls of `operation` (a method of [`Store`]) with these numbers, counted from 1, fail.
    pub(crate) fn fail(self, operation: &'static str, calls: Range<u32>, fault: Fault) -> Self {
        self.rules.lock().unwrap().push((operation, calls, fault));
        self
    }

    /// Calls of `operation` so far.
    pub(crate) fn calls(&self, operation: &str) -> u32 {
        self.calls
            .lock()
            .unwrap()
            .get(operation)
            .copied()
            .unwrap_or(0)
    }

    /// Counts a call, and says what is to happen to it.
    fn fault(&self, operation: &'static str) -> Option<Fault> {
        let count = {
            let mut calls = self.calls.lock().unwrap();
            let count = calls.entry(operation).or_default();
            *count += 1;
            *count
        };
        let rules = self.rules.lock().unwrap();
        let hit = rules
            .iter()
            .find(|(on, calls, _)| *on == operation && calls.contains(&count));
        hit.map(|(_, _, fault)| *fault)
    }

    async fn call<T>(
        &self,
        operation: &'static str,
        key: &str,
        call: BoxFuture<'_, Result<T, StoreError>>,
        absent: impl FnOnce(StoreError) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let fault = self.fault(operation);
        self.lets_others().await;
        let answer = self.apply(fault, operation, key, call, absent).await;
        self.lets_others().await;
        answer
    }

    async fn apply<T>(
        &self,
        fault: Option<Fault>,
        operation: &'static str,
        key: &str,
        call: BoxFuture<'_, Result<T, StoreError>>,
        absent: impl FnOnce(StoreError) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let key = key.to_owned();
        let transient = |what: &str| StoreError::Transient {
            operation,
            key: key.clone(),
            what: what.to_owned(),
            source: None,
        };
        match fault {
            None | Some(Fault::Short | Fault::Overwrites) => call.await,
            Some(Fault::OverwritesLater(_)) => Err(transient("it is still on its way")),
            Some(Fault::Transient) => Err(transient("scripted fault")),
            Some(Fault::SlowDown) => Err(StoreError::SlowDown {
                operation,
                key,
                code: "SlowDown".to_owned(),
            }),
            Some(Fault::Refused) => Err(StoreError::Refused {
                operation,
                key,
                code: "AccessDenied".to_owned(),
                advice: String::new(),
            }),
            Some(Fault::Absent) => absent(StoreError::NotFound { operation, key }),
            Some(Fault::Lost | Fault::OverwritesLost) => {
                call.await?;
                Err(transient("the answer was lost"))
            }
            Some(Fault::CutAfter(delay)) => {
                tokio::time::sleep(delay).await;
                Err(transient("cut on the way"))
            }
            Some(Fault::Stall) => std::future::pending().await,
        }
    }
}

impl Store for Faulty {
    fn begin_upload<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        let call = self.inner.begin_upload(key);
        self.call("begin_upload", key.as_str(), call, Err).boxed()
    }

    fn put_part<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        number: PartNumber,
        body: PartBody,
    ) -> BoxFuture<'a, Result<PartReceipt, StoreError>> {
        let call = self.inner.put_part(key, upload, number, body);
        self.call("put_part", key.as_str(), call, Err).boxed()
    }

    fn complete_upload<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        parts: &'a [PartReceipt],
        len: u64,
        crc64: u64,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let call = self.inner.complete_upload(key, upload, parts, len, crc64);
        self.call("complete_upload", key.as_str(), call, Err)
            .boxed()
    }

    fn abort_upload<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let call = self.inner.abort_upload(key, upload);
        self.call("abort_upload", key.as_str(), call, Err).boxed()
    }

    fn put_if_absent<'a>(
        &'a self,
        key: &'a Key,
        body: Bytes,
    ) -> BoxFuture<'a, Result<PutOutcome, StoreError>> {
        async move {
            let fault = self.fault("put_if_absent");
            self.lets_others().await;
            if let Some(Fault::Overwrites | Fault::OverwritesLost) = fault {
                self.inner.delete(key).await?;
            }
            if let Some(Fault::OverwritesLater(calls)) = fault {
                let put = (calls, key.clone(), body.clone());
                self.on_the_way.lock().unwrap().push(put);
            }
            let call = self.inner.put_if_absent(key, body);
            let put = self.apply(fault, "put_if_absent", key.as_str(), call, Err);
            let answer = put.await;
            self.lets_others().await;
            answer
        }
        .boxed()
    }

    fn get<'a>(
        &'a self,
        key: &'a Key,
        len_max: usize,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        async move {
            let fault = self.fault("get");
            if fault == Some(Fault::Short) {
                let bytes = self.inner.get(key, len_max).await?;
                return Ok(bytes.map(|bytes| bytes.slice(..bytes.len() / 2)));
            }
            self.lets_others().await;
            let call = self.inner.get(key, len_max);
            let got = self.apply(fault, "get", key.as_str(), call, |_| Ok(None));
            let answer = got.await;
            self.lets_others().await;
            answer
        }
        .boxed()
    }

    fn read_range<'a>(
        &'a self,
        key: &'a Key,
        range: Range<u64>,
        if_match: Option<&'a str>,
        sink: &'a mut dyn RangeSink,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let call = self.inner.read_range(key, range, if_match, sink);
        self.call("get_range", key.as_str(), call, Err).boxed()
    }

    fn head<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<Option<ObjectInfo>, StoreError>> {
        let call = self.inner.head(key);
        self.call("head", key.as_str(), call, |_| Ok(None)).boxed()
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<Listed>, StoreError>> {
        self.call("list", listing_name(prefix), self.inner.list(prefix), Err)
            .boxed()
    }

    fn list_dirs<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>, StoreError>> {
        self.call(
            "list_dirs",
            listing_name(prefix),
            self.inner.list_dirs(prefix),
            Err,
        )
        .boxed()
    }

    fn abort_uploads_under<'a>(
        &'a self,
        prefix: &'a str,
    ) -> BoxFuture<'a, Result<u64, StoreError>> {
        self.call(
            "abort_uploads_under",
            listing_name(prefix),
            self.inner.abort_uploads_under(prefix),
            Err,
        )
        .boxed()
    }

    fn delete<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<(), StoreError>> {
        self.call("delete", key.as_str(), self.inner.delete(key), Err)
            .boxed()
    }

    fn describe(&self) -> String {
        "faulty memory:".to_owned()
    }
}
