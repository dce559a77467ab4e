//! Whole objects: put, get, head, delete, and the conditions on them.

use std::ops::Range as Span;
use std::sync::Arc;

use base64_simd::STANDARD;
use s3s::dto::{
    ChecksumMode, DeleteObjectInput, DeleteObjectOutput, DeleteObjectsInput, DeleteObjectsOutput,
    DeletedObject, ETag, ETagCondition, GetObjectInput, GetObjectOutput, HeadObjectInput,
    HeadObjectOutput, PutObjectInput, PutObjectOutput, Range,
};
use s3s::{S3Request, S3Response, S3Result, TrailingHeaders, s3_error};

use super::blob::{Ingested, Wanted, stream};
use super::checksum::{Algorithm, ChecksumKind, Sums, set_sums, sums_of};
use super::{
    Buckets, Hints, Meta, Object, Store, bucket, bucket_mut, disk_error, signed, timestamp, unix_us,
};

/// The fault rule's wishes that came with a request.
pub(super) fn hints<T>(req: &S3Request<T>) -> Hints {
    req.extensions.get::<Hints>().cloned().unwrap_or_default()
}

/// Lower-case hexadecimal.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Length of the payload as the request announces it, without chunked framing.
pub(super) fn announced_len(headers: &http::HeaderMap) -> Option<u64> {
    let header = |name: &str| headers.get(name)?.to_str().ok()?.parse().ok();
    header("x-amz-decoded-content-length").or_else(|| header("content-length"))
}

/// Algorithms of checksums that will come in a trailer.
pub(super) fn trailer_algorithms(headers: &http::HeaderMap) -> impl Iterator<Item = Algorithm> {
    let mut announced = Sums::default();
    let mut names = http::HeaderMap::new();
    for value in headers
        .get_all("x-amz-trailer")
        .iter()
        .filter_map(|value| value.to_str().ok())
    {
        for name in value
            .split(',')
            .filter_map(|name| name.trim().parse::<http::HeaderName>().ok())
        {
            names.insert(name, http::HeaderValue::from_static(""));
        }
    }
    announced.add_headers(&names);
    announced.algorithms().collect::<Vec<_>>().into_iter()
}

/// Compares a body with everything that its request claims of it; `claimed` grows by the trailer's values.
pub(super) fn check_body(
    found: &Ingested,
    claimed: &mut Sums,
    trailer: Option<&TrailingHeaders>,
    content_md5: Option<&str>,
    swallowed: bool,
) -> S3Result {
    if let Some(trailer) = trailer {
        trailer.read(|headers| claimed.add_headers(headers));
    }
    claimed.check(&found.sums)?;
    if let Some(text) = content_md5 {
        let md5 = STANDARD
            .decode_to_vec(text)
            .ok()
            .filter(|md5| md5.len() == 16);
        let md5 = md5.ok_or_else(|| {
            s3_error!(InvalidDigest, "The Content-MD5 you specified is not valid")
        })?;
        if !swallowed && md5 != found.md5 {
            return Err(s3_error!(
                BadDigest,
                "The Content-MD5 you specified did not match what we received."
            ));
        }
    }
    Ok(())
}

/// If-Match and If-None-Match of a write.
pub(super) fn check_write(
    existing: Option<&Object>,
    if_match: Option<&ETagCondition>,
    if_none_match: Option<&ETagCondition>,
    hints: &Hints,
) -> S3Result {
    if hints.ignore_conditions {
        return Ok(());
    }
    let failed = || {
        s3_error!(
            PreconditionFailed,
            "At least one of the pre-conditions you specified did not hold"
        )
    };
    match if_none_match {
        Some(ETagCondition::Any) if existing.is_some() => return Err(failed()),
        Some(ETagCondition::ETag(_)) => {
            return Err(s3_error!(
                NotImplemented,
                "If-None-Match of a write must be *"
            ));
        }
        _ => {}
    }
    match (if_match, existing) {
        (None, _) => Ok(()),
        (Some(_), None) => Err(s3_error!(NoSuchKey, "The specified key does not exist.")),
        (Some(condition), Some(object)) if names(condition, object) => Ok(()),
        (Some(_), Some(_)) => Err(failed()),
    }
}

fn names(condition: &ETagCondition, object: &Object) -> bool {
    condition
        .as_etag()
        .is_none_or(|etag| etag.value() == object.etag)
}

fn check_read(
    object: &Object,
    if_match: Option<&ETagCondition>,
    if_none_match: Option<&ETagCondition>,
    hints: &Hints,
) -> S3Result {
    if hints.ignore_conditions {
        return Ok(());
    }
    if if_match.is_some_and(|condition| !names(condition, object)) {
        return Err(s3_error!(
            PreconditionFailed,
            "At least one of the pre-conditions you specified did not hold"
        ));
    }
    if if_none_match.is_some_and(|condition| names(condition, object)) {
        return Err(s3_error!(NotModified));
    }
    Ok(())
}

/// The bytes that a GET asks for.
fn span(
    object: &Object,
    range: Option<Range>,
    part_number: Option<i32>,
) -> S3Result<Option<Span<u64>>> {
    match (range, part_number) {
        (Some(_), Some(_)) => Err(s3_error!(
            InvalidRequest,
            "Cannot specify both Range header and partNumber query"
        )),
        (Some(range), None) => Ok(Some(range.check(object.len)?)),
        (None, Some(number)) => {
            let index = usize::try_from(number)
                .ok()
                .and_then(|number| number.checked_sub(1));
            let blob = index.and_then(|index| Some((index, object.blobs.get(index)?)));
            let Some((index, blob)) = blob else {
                return Err(s3_error!(
                    InvalidRange,
                    "The requested partnumber is not satisfiable"
                ));
            };
            let start: u64 = object.blobs[..index].iter().map(|blob| blob.len()).sum();
            Ok(Some(start..start + blob.len()))
        }
        (None, None) => Ok(None),
    }
}

impl Store {
    pub(super) fn object(&self, bucket_name: &str, key: &str) -> S3Result<Arc<Object>> {
        let state = self.lock();
        let object = bucket(&state, bucket_name)?.objects.get(key);
        object
            .cloned()
            .ok_or_else(|| s3_error!(NoSuchKey, "The specified key does not exist."))
    }

    /// Makes `object` the one under `key`: first on disk, then in memory. The caller has checked its conditions under the same lock.
    pub(super) fn commit(
        &self,
        state: &mut Buckets,
        bucket_name: &str,
        key: &str,
        object: Object,
    ) -> S3Result<()> {
        let bucket = bucket_mut(state, bucket_name)?;
        if let Some(disk) = &self.disk {
            disk.put_object(bucket_name, key, &object)
                .map_err(disk_error)?;
        }
        object.blobs.iter().for_each(|blob| blob.keep());
        if let Some(old) = bucket.objects.insert(key.to_owned(), Arc::new(object)) {
            old.blobs.iter().for_each(|blob| blob.doom());
        }
        Ok(())
    }

    fn remove(&self, state: &mut Buckets, bucket_name: &str, key: &str) -> S3Result<()> {
        let bucket = bucket_mut(state, bucket_name)?;
        if bucket.objects.contains_key(key) {
            if let Some(disk) = &self.disk {
                disk.remove_object(bucket_name, key).map_err(disk_error)?;
            }
            if let Some(old) = bucket.objects.remove(key) {
                old.blobs.iter().for_each(|blob| blob.doom());
            }
        }
        Ok(())
    }

    pub(super) async fn put(
        &self,
        req: S3Request<PutObjectInput>,
    ) -> S3Result<S3Response<PutObjectOutput>> {
        let hints = hints(&req);
        let input = req.input;
        bucket(&self.lock(), &input.bucket)?;
        let mut claimed = sums_of!(input);
        let mut algorithms: Vec<Algorithm> = claimed
            .algorithms()
            .chain(trailer_algorithms(&req.headers))
            .collect();
        if let Some(dto) = &input.checksum_algorithm {
            algorithms.push(Algorithm::parse(dto)?);
        }
        if algorithms.is_empty() {
            algorithms.push(Algorithm::Crc64Nvme);
        }
        let wanted = Wanted {
            len: announced_len(&req.headers),
            part: false,
            algorithms,
            claimed: &claimed,
            flip_stored: hints.flip_stored,
        };
        let found = self.ingest(input.body, wanted).await?;
        let swallowed =
            self.settings.swallow && matches!(found.blob, super::Blob::Swallowed { .. });
        check_body(
            &found,
            &mut claimed,
            req.trailing_headers.as_ref(),
            input.content_md5.as_deref(),
            swallowed,
        )?;

        let etag = hex(&found.md5);
        let object = Object {
            len: found.blob.len(),
            etag: etag.clone(),
            modified_us: unix_us(),
            sums: found.sums.clone(),
            kind: ChecksumKind::FullObject,
            blobs: vec![Arc::new(found.blob)],
            upload: None,
            meta: Meta {
                content_type: input.content_type,
                user: input.metadata.unwrap_or_default().into_iter().collect(),
            },
        };
        let mut state = self.lock();
        let existing = bucket(&state, &input.bucket)?.objects.get(&input.key);
        check_write(
            existing.map(Arc::as_ref),
            input.if_match.as_ref(),
            input.if_none_match.as_ref(),
            &hints,
        )?;
        self.commit(&mut state, &input.bucket, &input.key, object)?;
        drop(state);

        let mut output = PutObjectOutput {
            e_tag: Some(ETag::Strong(etag)),
            ..PutObjectOutput::default()
        };
        set_sums!(output, &found.sums);
        output.checksum_type = (!found.sums.is_empty()).then(|| ChecksumKind::FullObject.dto());
        Ok(S3Response::new(output))
    }

    pub(super) fn get(
        &self,
        req: &S3Request<GetObjectInput>,
    ) -> S3Result<S3Response<GetObjectOutput>> {
        let input = &req.input;
        let object = self.object(&input.bucket, &input.key)?;
        check_read(
            &object,
            input.if_match.as_ref(),
            input.if_none_match.as_ref(),
            &hints(req),
        )?;
        let span = span(&object, input.range, input.part_number)?;
        let whole = span.is_none();
        let content_range = span.as_ref().map(|span| {
            format!(
                "bytes {}-{}/{}",
                span.start,
                span.end.saturating_sub(1),
                object.len
            )
        });
        let span = span.unwrap_or(0..object.len);
        let mut output = GetObjectOutput {
            accept_ranges: Some("bytes".to_owned()),
            content_length: Some(signed(span.end - span.start)),
            content_range,
            content_type: object.meta.content_type.clone(),
            e_tag: Some(ETag::Strong(object.etag.clone())),
            last_modified: Some(timestamp(object.modified_us)),
            metadata: Some(object.meta.user.clone().into_iter().collect()),
            parts_count: input
                .part_number
                .map(|_| i32::try_from(object.blobs.len()).unwrap_or(i32::MAX)),
            ..GetObjectOutput::default()
        };
        if whole && wants_checksum(input.checksum_mode.as_ref()) {
            set_sums!(output, &object.sums);
            output.checksum_type = (!object.sums.is_empty()).then(|| object.kind.dto());
        }
        output.body = Some(stream(object.blobs.clone(), span));
        Ok(S3Response::new(output))
    }

    pub(super) fn head(
        &self,
        req: &S3Request<HeadObjectInput>,
    ) -> S3Result<S3Response<HeadObjectOutput>> {
        let input = &req.input;
        let object = self.object(&input.bucket, &input.key)?;
        check_read(
            &object,
            input.if_match.as_ref(),
            input.if_none_match.as_ref(),
            &hints(req),
        )?;
        let mut output = HeadObjectOutput {
            accept_ranges: Some("bytes".to_owned()),
            content_length: Some(signed(object.len)),
            content_type: object.meta.content_type.clone(),
            e_tag: Some(ETag::Strong(object.etag.clone())),
            last_modified: Some(timestamp(object.modified_us)),
            metadata: Some(object.meta.user.clone().into_iter().collect()),
            ..HeadObjectOutput::default()
        };
        if wants_checksum(input.checksum_mode.as_ref()) {
            set_sums!(output, &object.sums);
            output.checksum_type = (!object.sums.is_empty()).then(|| object.kind.dto());
        }
        Ok(S3Response::new(output))
    }

    pub(super) fn delete(
        &self,
        req: &S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        let input = &req.input;
        let mut state = self.lock();
        let existing = bucket(&state, &input.bucket)?.objects.get(&input.key);
        if existing.is_some() {
            check_write(
                existing.map(Arc::as_ref),
                input.if_match.as_ref(),
                None,
                &hints(req),
            )?;
        }
        self.remove(&mut state, &input.bucket, &input.key)?;
        Ok(S3Response::with_status(
            DeleteObjectOutput::default(),
            http::StatusCode::NO_CONTENT,
        ))
    }

    pub(super) fn delete_many(
        &self,
        input: &DeleteObjectsInput,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        if input.delete.objects.len() > 1_000 {
            return Err(s3_error!(
                MalformedXML,
                "a request deletes at most 1000 objects"
            ));
        }
        let mut state = self.lock();
        bucket(&state, &input.bucket)?;
        let mut deleted = Vec::new();
        for object in &input.delete.objects {
            self.remove(&mut state, &input.bucket, &object.key)?;
            deleted.push(DeletedObject {
                key: Some(object.key.clone()),
                ..DeletedObject::default()
            });
        }
        let quiet = input.delete.quiet.unwrap_or(false);
        let output = DeleteObjectsOutput {
            deleted: (!quiet).then_some(deleted),
            ..DeleteObjectsOutput::default()
        };
        Ok(S3Response::new(output))
    }
}

fn wants_checksum(mode: Option<&ChecksumMode>) -> bool {
    mode.is_some_and(|mode| mode.as_str() == ChecksumMode::ENABLED)
}
