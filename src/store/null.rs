//! A store that swallows: parts are acknowledged and dropped, in this process and without a copy. For `ckptstream bench`, where the store must cost nothing.
//!
//! In: everything that [`Store`] takes. Out: receipts; lengths of what was completed; and the bytes of objects that were put up for reading ([`NullStore::serve`]), which may
//! be repeated to any length, so that a restore of 100 GB needs no 100 GB of host memory. What can fail: reading what was swallowed.
//!
//! No checksum is compared, and small objects are swallowed too: nothing but a bench may be kept here.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt};

use super::{
    Key, Listed, ObjectInfo, PartBody, PartNumber, PartReceipt, PutOutcome, RangeSink, Store,
    StoreError, UploadId,
};

/// See the module.
#[derive(Debug, Default)]
pub struct NullStore {
    objects: Mutex<BTreeMap<Key, Object>>,
    /// Number of names given so far; they never repeat.
    names: AtomicU64,
}

#[derive(Debug)]
struct Object {
    len: u64,
    crc64: Option<u64>,
    /// What reads are answered from, over and over; empty when the object was swallowed.
    bytes: Bytes,
}

impl NullStore {
    /// A store with nothing in it.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts up an object for reading: `bytes`, repeated to `len` bytes. Both are at least 1.
    pub fn serve(&self, key: Key, bytes: Bytes, len: u64) {
        let object = Object {
            len,
            crc64: None,
            bytes,
        };
        self.lock().insert(key, object);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, Object>> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn name(&self) -> String {
        self.names.fetch_add(1, Ordering::Relaxed).to_string()
    }

    /// Gives a range of what [`NullStore::serve`] was told to serve.
    fn read(
        &self,
        key: &Key,
        range: Range<u64>,
        sink: &mut dyn RangeSink,
    ) -> Result<(), StoreError> {
        let mismatch = |what: String| StoreError::Mismatch {
            operation: "GetObject",
            key: key.to_string(),
            what,
        };
        let (bytes, len) = {
            let objects = self.lock();
            let object = objects.get(key).ok_or_else(|| StoreError::NotFound {
                operation: "GetObject",
                key: key.to_string(),
            })?;
            (object.bytes.clone(), object.len)
        };
        if bytes.is_empty() {
            return Err(mismatch("its bytes were swallowed".to_owned()));
        }
        if range.end > len || range.start > range.end {
            return Err(mismatch(format!(
                "range {range:?} of an object of {len} bytes"
            )));
        }
        let period = bytes.len() as u64;
        let mut at = range.start;
        sink.restart();
        while at < range.end {
            let start = at % period;
            let end = period.min(start + (range.end - at));
            at += end - start;
            // Both are below the length of bytes in memory.
            let [start, end] = [start, end].map(|edge| usize::try_from(edge).unwrap_or(0));
            sink.put(&bytes[start..end]);
        }
        Ok(())
    }
}

impl Store for NullStore {
    fn begin_upload<'a>(&'a self, _key: &'a Key) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        async move { Ok(UploadId(self.name())) }.boxed()
    }

    fn put_part<'a>(
        &'a self,
        _key: &'a Key,
        _upload: &'a UploadId,
        number: PartNumber,
        body: PartBody,
    ) -> BoxFuture<'a, Result<PartReceipt, StoreError>> {
        async move {
            Ok(PartReceipt {
                number,
                etag: self.name(),
                len: body.len,
                crc64: body.crc64,
                crc32: None,
            })
        }
        .boxed()
    }

    fn complete_upload<'a>(
        &'a self,
        key: &'a Key,
        _upload: &'a UploadId,
        _parts: &'a [PartReceipt],
        len: u64,
        crc64: u64,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        async move {
            let object = Object {
                len,
                crc64: Some(crc64),
                bytes: Bytes::new(),
            };
            self.lock().insert(key.clone(), object);
            Ok(())
        }
        .boxed()
    }

    fn abort_upload<'a>(
        &'a self,
        _key: &'a Key,
        _upload: &'a UploadId,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        async move { Ok(()) }.boxed()
    }

    fn put_if_absent<'a>(
        &'a self,
        key: &'a Key,
        body: Bytes,
    ) -> BoxFuture<'a, Result<PutOutcome, StoreError>> {
        async move {
            let mut objects = self.lock();
            if objects.contains_key(key) {
                return Ok(PutOutcome::AlreadyExists);
            }
            let object = Object {
                len: body.len() as u64,
                crc64: None,
                bytes: Bytes::new(),
            };
            objects.insert(key.clone(), object);
            Ok(PutOutcome::Created)
        }
        .boxed()
    }

    fn get<'a>(
        &'a self,
        key: &'a Key,
        len_max: usize,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        async move {
            let Some(len) = self.lock().get(key).map(|object| object.len) else {
                return Ok(None);
            };
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            if len > len_max {
                return Err(StoreError::Mismatch {
                    operation: "GetObject",
                    key: key.to_string(),
                    what: format!("{len} bytes, at most {len_max} expected"),
                });
            }
            let mut out = vec![0; len];
            self.get_range(key, 0..len as u64, None, &mut out).await?;
            Ok(Some(out.into()))
        }
        .boxed()
    }

    fn read_range<'a>(
        &'a self,
        key: &'a Key,
        range: Range<u64>,
        _if_match: Option<&'a str>,
        sink: &'a mut dyn RangeSink,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        async move { self.read(key, range, sink) }.boxed()
    }

    fn head<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<Option<ObjectInfo>, StoreError>> {
        async move {
            Ok(self.lock().get(key).map(|object| ObjectInfo {
                len: object.len,
                etag: None,
                crc64: object.crc64,
                age: None,
            }))
        }
        .boxed()
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<Listed>, StoreError>> {
        async move {
            let objects = self.lock();
            let hits = objects
                .iter()
                .filter(|(key, _)| key.as_str().starts_with(prefix));
            Ok(hits
                .map(|(key, object)| Listed {
                    key: key.clone(),
                    len: object.len,
                })
                .collect())
        }
        .boxed()
    }

    fn list_dirs<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>, StoreError>> {
        async move {
            let objects = self.lock();
            let rests = objects
                .keys()
                .filter_map(|key| key.as_str().strip_prefix(prefix));
            let mut dirs: Vec<String> = rests
                .filter_map(|rest| Some(rest.split_once('/')?.0.to_owned()))
                .collect();
            dirs.dedup();
            Ok(dirs)
        }
        .boxed()
    }

    fn abort_uploads_under<'a>(
        &'a self,
        _prefix: &'a str,
    ) -> BoxFuture<'a, Result<u64, StoreError>> {
        // An upload holds nothing here.
        async move { Ok(0) }.boxed()
    }

    fn delete<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<(), StoreError>> {
        async move {
            self.lock().remove(key);
            Ok(())
        }
        .boxed()
    }

    fn describe(&self) -> String {
        "null:".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> Key {
        Key::new("bench/object").unwrap()
    }

    #[tokio::test]
    async fn what_is_served_repeats() {
        let store = NullStore::new();
        store.serve(key(), Bytes::from_static(b"abc"), 8);
        let mut out = [0; 7];
        store.get_range(&key(), 1..8, None, &mut out).await.unwrap();
        assert_eq!(&out, b"bcabcab");
        assert_eq!(
            store.get(&key(), 8).await.unwrap().unwrap().as_ref(),
            b"abcabcab"
        );
        for (range, len) in [(2..9, 7), (0..3, 4), (8..9, 1)] {
            let read = store
                .get_range(&key(), range.clone(), None, &mut out[..len])
                .await;
            assert!(
                matches!(read, Err(StoreError::Mismatch { .. })),
                "{range:?}"
            );
        }
    }

    #[tokio::test]
    async fn what_is_swallowed_is_known_by_its_length_only() {
        let store = NullStore::new();
        let upload = store.begin_upload(&key()).await.unwrap();
        let number = PartNumber::new(1).unwrap();
        let body = PartBody::new(vec![Bytes::from_static(b"part")], 7);
        let receipt = store.put_part(&key(), &upload, number, body).await.unwrap();
        assert_eq!((receipt.len, receipt.crc64), (4, 7));
        store
            .complete_upload(&key(), &upload, &[receipt], 4, 7)
            .await
            .unwrap();
        let info = store.head(&key()).await.unwrap().unwrap();
        assert_eq!((info.len, info.crc64), (4, Some(7)));
        let read = store.get_range(&key(), 0..4, None, &mut [0; 4]).await;
        assert!(matches!(read, Err(StoreError::Mismatch { .. })));
        store.delete(&key()).await.unwrap();
        assert_eq!(store.head(&key()).await.unwrap(), None);
    }
}
