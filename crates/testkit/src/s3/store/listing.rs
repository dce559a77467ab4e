//! Listings, paged: objects, open uploads, parts of an upload, buckets.

use std::collections::BTreeSet;
use std::ops::Bound;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use s3s::dto::{
    Bucket as BucketDto, CommonPrefix, ETag, EncodingType, ListBucketsOutput,
    ListMultipartUploadsInput, ListMultipartUploadsOutput, ListObjectsV2Input, ListObjectsV2Output,
    ListPartsInput, ListPartsOutput, MultipartUpload, Object as ObjectDto, Part as PartDto,
};
use s3s::{S3Response, S3Result, s3_error};

use super::checksum::{Algorithm, set_sums};
use super::multipart::upload;
use super::{Bucket, Hints, Store, bucket, signed, timestamp, unix_us};

/// Most entries of one page, S3's limit for every listing.
const PAGE_LEN_MAX: usize = 1_000;
/// What `encoding-type=url` leaves as it is.
const URL_SAFE: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~')
    .remove(b'/');

fn page_len(wanted: Option<i32>) -> S3Result<usize> {
    match wanted.map(usize::try_from) {
        None => Ok(PAGE_LEN_MAX),
        Some(Ok(len)) => Ok(len.min(PAGE_LEN_MAX)),
        Some(Err(_)) => Err(s3_error!(
            InvalidArgument,
            "a page cannot have a negative length"
        )),
    }
}

fn count(len: usize) -> i32 {
    i32::try_from(len).unwrap_or(i32::MAX)
}

/// One page of keys under a prefix.
#[derive(Default)]
struct Page {
    keys: Vec<String>,
    /// Keys up to the delimiter, each standing for all keys that begin with it.
    prefixes: BTreeSet<String>,
    /// The last entry, when there are more: the next page begins after it.
    next: Option<String>,
}

/// Collects a page. `after` is a key or a common prefix that was already listed.
fn page(
    bucket: &Bucket,
    prefix: &str,
    delimiter: &str,
    after: &str,
    len: usize,
    visible: impl Fn(u64) -> bool,
) -> Page {
    let mut page = Page::default();
    let mut last = String::new();
    let after_prefix =
        !delimiter.is_empty() && after.ends_with(delimiter) && after.starts_with(prefix);
    let start = if after < prefix {
        Bound::Included(prefix)
    } else {
        Bound::Excluded(after)
    };
    for (key, object) in bucket.objects.range::<str, _>((start, Bound::Unbounded)) {
        let Some(rest) = key.strip_prefix(prefix) else {
            break;
        };
        if !visible(object.modified_us) || (after_prefix && key.starts_with(after)) {
            continue;
        }
        let common = match rest.find(delimiter) {
            Some(at) if !delimiter.is_empty() => Some(&key[..prefix.len() + at + delimiter.len()]),
            _ => None,
        };
        if common.is_some_and(|common| page.prefixes.contains(common)) {
            continue;
        }
        if page.keys.len() + page.prefixes.len() == len {
            page.next = Some(last);
            break;
        }
        let entry = common.unwrap_or(key);
        entry.clone_into(&mut last);
        match common {
            Some(common) => drop(page.prefixes.insert(common.to_owned())),
            None => page.keys.push(key.clone()),
        }
    }
    page
}

impl Store {
    pub(super) fn list_objects(
        &self,
        input: ListObjectsV2Input,
        hints: &Hints,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let len = page_len(input.max_keys)?;
        let url = match input.encoding_type.as_ref().map(EncodingType::as_str) {
            None => false,
            Some(EncodingType::URL) => true,
            Some(_) => {
                return Err(s3_error!(
                    InvalidArgument,
                    "Invalid Encoding Method specified in Request"
                ));
            }
        };
        let encode = |text: &str| {
            if url {
                utf8_percent_encode(text, URL_SAFE).to_string()
            } else {
                text.to_owned()
            }
        };
        let prefix = input.prefix.clone().unwrap_or_default();
        let delimiter = input.delimiter.clone().unwrap_or_default();
        let after = match &input.continuation_token {
            Some(token) => base64_simd::STANDARD
                .decode_to_vec(token)
                .ok()
                .and_then(|bytes| String::from_utf8(bytes).ok())
                .ok_or_else(|| {
                    s3_error!(
                        InvalidArgument,
                        "The continuation token provided is incorrect"
                    )
                })?,
            None => input.start_after.clone().unwrap_or_default(),
        };
        let youngest = hints
            .stale
            .map(|stale| unix_us().saturating_sub(u64::try_from(stale.as_micros()).unwrap_or(0)));

        let state = self.lock();
        let bucket = bucket(&state, &input.bucket)?;
        let page = page(bucket, &prefix, &delimiter, &after, len, |modified| {
            youngest.is_none_or(|limit| modified <= limit)
        });
        let contents: Vec<ObjectDto> = page
            .keys
            .iter()
            .filter_map(|key| {
                let object = bucket.objects.get(key)?;
                Some(ObjectDto {
                    key: Some(encode(key)),
                    size: Some(signed(object.len)),
                    e_tag: Some(ETag::Strong(object.etag.clone())),
                    last_modified: Some(timestamp(object.modified_us)),
                    checksum_algorithm: Some(
                        object.sums.algorithms().map(Algorithm::dto).collect(),
                    ),
                    checksum_type: (!object.sums.is_empty()).then(|| object.kind.dto()),
                    ..ObjectDto::default()
                })
            })
            .collect();
        let common: Vec<CommonPrefix> = page
            .prefixes
            .iter()
            .map(|prefix| CommonPrefix {
                prefix: Some(encode(prefix)),
            })
            .collect();
        let truncated = page.next.is_some() && len > 0;
        Ok(S3Response::new(ListObjectsV2Output {
            name: Some(input.bucket),
            prefix: input.prefix.as_deref().map(encode),
            delimiter: input.delimiter.as_deref().map(encode),
            start_after: input.start_after.as_deref().map(encode),
            encoding_type: input.encoding_type,
            max_keys: Some(count(len)),
            key_count: Some(count(contents.len() + common.len())),
            continuation_token: input.continuation_token,
            is_truncated: Some(truncated),
            next_continuation_token: page
                .next
                .filter(|_| truncated)
                .map(|next| base64_simd::STANDARD.encode_to_string(next)),
            contents: Some(contents),
            common_prefixes: Some(common),
            ..ListObjectsV2Output::default()
        }))
    }

    pub(super) fn list_uploads(
        &self,
        input: ListMultipartUploadsInput,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        if input.delimiter.is_some() {
            return Err(s3_error!(
                NotImplemented,
                "ListMultipartUploads with a delimiter is not implemented"
            ));
        }
        let len = page_len(input.max_uploads)?;
        let prefix = input.prefix.clone().unwrap_or_default();
        let key_marker = input.key_marker.clone().unwrap_or_default();
        let id_marker = input
            .upload_id_marker
            .clone()
            .filter(|_| input.key_marker.is_some())
            .unwrap_or_default();
        let state = self.lock();
        let bucket = bucket(&state, &input.bucket)?;
        let mut uploads = Vec::new();
        let mut next = None;
        for ((key, id), upload) in &bucket.uploads {
            let listed = match key.cmp(&key_marker) {
                std::cmp::Ordering::Less => true,
                std::cmp::Ordering::Equal => {
                    input.key_marker.is_some() && (id_marker.is_empty() || *id <= id_marker)
                }
                std::cmp::Ordering::Greater => false,
            };
            if listed || !key.starts_with(&prefix) {
                continue;
            }
            if uploads.len() == len {
                next = uploads
                    .last()
                    .map(|last: &MultipartUpload| (last.key.clone(), last.upload_id.clone()));
                break;
            }
            uploads.push(MultipartUpload {
                key: Some(key.clone()),
                upload_id: Some(id.clone()),
                initiated: Some(timestamp(upload.initiated_us)),
                checksum_algorithm: upload.algorithm.map(Algorithm::dto),
                checksum_type: upload.algorithm.map(|_| upload.kind.dto()),
                ..MultipartUpload::default()
            });
        }
        let truncated = next.is_some();
        let (next_key, next_id) = next.unwrap_or_default();
        Ok(S3Response::new(ListMultipartUploadsOutput {
            bucket: Some(input.bucket),
            prefix: input.prefix,
            key_marker: input.key_marker,
            upload_id_marker: input.upload_id_marker,
            max_uploads: Some(count(len)),
            is_truncated: Some(truncated),
            next_key_marker: next_key,
            next_upload_id_marker: next_id,
            uploads: Some(uploads),
            ..ListMultipartUploadsOutput::default()
        }))
    }

    pub(super) fn list_parts(
        &self,
        input: ListPartsInput,
    ) -> S3Result<S3Response<ListPartsOutput>> {
        let len = page_len(input.max_parts)?;
        let after = match input.part_number_marker.map(u32::try_from) {
            None => 0,
            Some(Ok(after)) => after,
            Some(Err(_)) => {
                return Err(s3_error!(InvalidArgument, "part-number-marker is negative"));
            }
        };
        let state = self.lock();
        let upload = upload(bucket(&state, &input.bucket)?, &input.key, &input.upload_id)?;
        let mut rest = upload
            .parts
            .range((Bound::Excluded(after), Bound::Unbounded));
        let mut last = after;
        let parts: Vec<PartDto> = rest
            .by_ref()
            .take(len)
            .map(|(number, part)| {
                last = *number;
                let mut dto = PartDto {
                    part_number: i32::try_from(*number).ok(),
                    size: Some(signed(part.blob.len())),
                    e_tag: Some(ETag::Strong(part.etag.clone())),
                    last_modified: Some(timestamp(part.modified_us)),
                    ..PartDto::default()
                };
                set_sums!(dto, &part.sums);
                dto
            })
            .collect();
        let truncated = rest.next().is_some() && len > 0;
        Ok(S3Response::new(ListPartsOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(input.upload_id),
            max_parts: Some(count(len)),
            part_number_marker: input.part_number_marker,
            next_part_number_marker: i32::try_from(last).ok().filter(|_| truncated),
            is_truncated: Some(truncated),
            checksum_algorithm: upload.algorithm.map(Algorithm::dto),
            checksum_type: upload.algorithm.map(|_| upload.kind.dto()),
            parts: Some(parts),
            ..ListPartsOutput::default()
        }))
    }

    pub(super) fn list_all_buckets(&self) -> S3Response<ListBucketsOutput> {
        let state = self.lock();
        let buckets = state
            .iter()
            .map(|(name, bucket)| BucketDto {
                name: Some(name.clone()),
                creation_date: Some(timestamp(bucket.created_us)),
                ..BucketDto::default()
            })
            .collect();
        S3Response::new(ListBucketsOutput {
            buckets: Some(buckets),
            ..ListBucketsOutput::default()
        })
    }
}
