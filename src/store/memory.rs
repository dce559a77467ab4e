//! A store in this process's memory, with the whole contract: for tests and the documentation's examples.
//!
//! In and out: as [`Store`]. What can fail: what S3 refuses too (a wrong checksum, a short part, an unknown upload). It never answers
//! [`StoreError::Transient`]; faults are put in front of it by a decorator.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use futures::future::{BoxFuture, FutureExt};

use super::{
    Key, Listed, ObjectInfo, PART_LEN_MIN, PartBody, PartNumber, PartReceipt, PutOutcome,
    RangeSink, Store, StoreError, UploadId, flaw_of_parts,
};
use crate::codec::Crc64;

/// See the module.
#[derive(Debug)]
pub struct MemoryStore {
    state: Mutex<State>,
    part_len_min: u64,
}

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<Key, Object>,
    uploads: HashMap<UploadId, Upload>,
    /// Number of names given so far (uploads, tags); they never repeat.
    names: u64,
}

#[derive(Debug)]
struct Object {
    bytes: Bytes,
    etag: String,
    crc64: u64,
    created: Instant,
}

#[derive(Debug)]
struct Upload {
    key: Key,
    parts: BTreeMap<PartNumber, Part>,
}

#[derive(Debug)]
struct Part {
    pieces: Vec<Bytes>,
    len: u64,
    etag: String,
}

impl State {
    fn name(&mut self, kind: &str) -> String {
        self.names += 1;
        format!("{kind}-{}", self.names)
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryStore {
    /// An empty store that refuses parts under 5 MiB, as S3 does.
    pub fn new() -> Self {
        Self::with_part_len_min(PART_LEN_MIN)
    }

    /// An empty store with another least length of parts, in bytes; 0 takes any.
    pub fn with_part_len_min(part_len_min: u64) -> Self {
        Self {
            state: Mutex::default(),
            part_len_min,
        }
    }

    /// Uploads that were neither completed nor aborted.
    pub fn open_uploads(&self) -> usize {
        self.lock().uploads.len()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn complete(
        &self,
        key: &Key,
        upload: &UploadId,
        parts: &[PartReceipt],
        len: u64,
        crc64: u64,
    ) -> Result<(), StoreError> {
        const OPERATION: &str = "CompleteMultipartUpload";
        let refused = |code: &str, detail: String| StoreError::Refused {
            operation: OPERATION,
            key: key.to_string(),
            code: format!("{code}: {detail}"),
            advice: String::new(),
        };
        let mut state = self.lock();
        let open = state.uploads.get(upload).filter(|open| open.key == *key);
        let open = open.ok_or_else(|| not_found(OPERATION, key))?;
        let sent = |number| {
            let part = open.parts.get(&number)?;
            Some((part.etag.as_str(), part.len))
        };
        if let Some((code, what)) = flaw_of_parts(parts, self.part_len_min, sent) {
            return Err(refused(code, what));
        }
        let mut joined = BytesMut::new();
        for receipt in parts {
            for piece in &open.parts[&receipt.number].pieces {
                joined.extend_from_slice(piece);
            }
        }
        let bytes = joined.freeze();
        if bytes.len() as u64 != len {
            return Err(refused(
                "InvalidRequest",
                format!("{} bytes, announced {len}", bytes.len()),
            ));
        }
        if Crc64::of(&bytes).value() != crc64 {
            return Err(StoreError::Mismatch {
                operation: OPERATION,
                key: key.to_string(),
                what: "CRC64NVME of the whole object".to_owned(),
            });
        }
        let etag = state.name("object");
        state.uploads.remove(upload);
        let created = Instant::now();
        state.objects.insert(
            key.clone(),
            Object {
                bytes,
                etag,
                crc64,
                created,
            },
        );
        Ok(())
    }

    fn read(
        &self,
        key: &Key,
        range: Range<u64>,
        if_match: Option<&str>,
        sink: &mut dyn RangeSink,
    ) -> Result<(), StoreError> {
        const OPERATION: &str = "GetObject";
        let mismatch = |what: String| StoreError::Mismatch {
            operation: OPERATION,
            key: key.to_string(),
            what,
        };
        let state = self.lock();
        let object = state
            .objects
            .get(key)
            .ok_or_else(|| not_found(OPERATION, key))?;
        if if_match.is_some_and(|tag| tag != object.etag) {
            return Err(mismatch("the object's tag has changed".to_owned()));
        }
        let slice = usize::try_from(range.start)
            .ok()
            .zip(usize::try_from(range.end).ok());
        let slice = slice.and_then(|(start, end)| object.bytes.get(start..end));
        let slice = slice.ok_or_else(|| {
            mismatch(format!(
                "range {range:?} of an object of {} bytes",
                object.bytes.len()
            ))
        })?;
        sink.restart();
        sink.put(slice);
        Ok(())
    }
}

fn not_found(operation: &'static str, key: &Key) -> StoreError {
    StoreError::NotFound {
        operation,
        key: key.to_string(),
    }
}

impl Store for MemoryStore {
    fn begin_upload<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        async move {
            let mut state = self.lock();
            let id = UploadId(state.name("upload"));
            let upload = Upload {
                key: key.clone(),
                parts: BTreeMap::new(),
            };
            state.uploads.insert(id.clone(), upload);
            Ok(id)
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
        const OPERATION: &str = "UploadPart";
        async move {
            if !body.has_its_checksum() {
                return Err(StoreError::Refused {
                    operation: OPERATION,
                    key: key.to_string(),
                    code: format!("BadDigest: part {number}"),
                    advice: String::new(),
                });
            }
            let mut state = self.lock();
            let etag = state.name("part");
            let open = state
                .uploads
                .get_mut(upload)
                .filter(|open| open.key == *key);
            let open = open.ok_or_else(|| not_found(OPERATION, key))?;
            let PartBody { pieces, len, crc64 } = body;
            let receipt = PartReceipt {
                number,
                etag: etag.clone(),
                len,
                crc64,
                crc32: None,
            };
            open.parts.insert(number, Part { pieces, len, etag });
            Ok(receipt)
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
        async move { self.complete(key, upload, parts, len, crc64) }.boxed()
    }

    fn abort_upload<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        async move {
            let mut state = self.lock();
            if state
                .uploads
                .get(upload)
                .is_some_and(|open| open.key == *key)
            {
                state.uploads.remove(upload);
            }
            Ok(())
        }
        .boxed()
    }

    fn put_if_absent<'a>(
        &'a self,
        key: &'a Key,
        body: Bytes,
    ) -> BoxFuture<'a, Result<PutOutcome, StoreError>> {
        async move {
            let mut state = self.lock();
            if state.objects.contains_key(key) {
                return Ok(PutOutcome::AlreadyExists);
            }
            let object = Object {
                crc64: Crc64::of(&body).value(),
                bytes: body,
                etag: state.name("object"),
                created: Instant::now(),
            };
            state.objects.insert(key.clone(), object);
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
            let state = self.lock();
            let Some(object) = state.objects.get(key) else {
                return Ok(None);
            };
            if object.bytes.len() > len_max {
                return Err(StoreError::Mismatch {
                    operation: "GetObject",
                    key: key.to_string(),
                    what: format!("{} bytes, at most {len_max} expected", object.bytes.len()),
                });
            }
            Ok(Some(object.bytes.clone()))
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
        async move { self.read(key, range, if_match, sink) }.boxed()
    }

    fn head<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<Option<ObjectInfo>, StoreError>> {
        async move {
            Ok(self.lock().objects.get(key).map(|object| ObjectInfo {
                len: object.bytes.len() as u64,
                etag: Some(object.etag.clone()),
                crc64: Some(object.crc64),
                age: Some(object.created.elapsed()),
            }))
        }
        .boxed()
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<Listed>, StoreError>> {
        async move {
            let state = self.lock();
            let hits = state
                .objects
                .iter()
                .filter(|(key, _)| key.as_str().starts_with(prefix));
            Ok(hits
                .map(|(key, object)| Listed {
                    key: key.clone(),
                    len: object.bytes.len() as u64,
                })
                .collect())
        }
        .boxed()
    }

    fn list_dirs<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>, StoreError>> {
        async move {
            let state = self.lock();
            let rests = state
                .objects
                .keys()
                .filter_map(|key| key.as_str().strip_prefix(prefix));
            let mut dirs: Vec<String> = rests
                .filter_map(|rest| Some(rest.split_once('/')?.0.to_owned()))
                .collect();
            dirs.dedup();
            dirs.sort_unstable();
            Ok(dirs)
        }
        .boxed()
    }

    fn abort_uploads_under<'a>(
        &'a self,
        prefix: &'a str,
    ) -> BoxFuture<'a, Result<u64, StoreError>> {
        async move {
            let mut state = self.lock();
            let before = state.uploads.len();
            state
                .uploads
                .retain(|_, upload| !upload.key.as_str().starts_with(prefix));
            Ok((before - state.uploads.len()) as u64)
        }
        .boxed()
    }

    fn delete<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<(), StoreError>> {
        async move {
            self.lock().objects.remove(key);
            Ok(())
        }
        .boxed()
    }

    fn describe(&self) -> String {
        "memory:".to_owned()
    }
}
