//! The store on S3 and everything that speaks its protocol. Only this module and its folder name the SDK's types.
//!
//! In: calls of [`Store`], answered once each; the SDK's own retries and its throughput watchdogs are off, since [`super::retry`] tries again and since
//! they take a slow line for a dead one. Out: the objects' bytes, straight into the caller's buffers. What can fail: everything in [`StoreError`], sorted
//! by [`fault`] from status and code.
//!
//! A part goes out as the list of buffers that it is, with a plain `Content-Length`, its CRC64NVME as a header and (by default) an unsigned
//! payload: no trailer, no aws-chunked framing, no copy. For a store that does not know CRC64NVME (`store.checksum`, or learned from its refusal: [`habits`]) it carries CRC32C, CRC32, or Content-MD5, which every
//! store knows; buckets with Object Lock demand one of them with every part. Small requests have one limit (`store.request_timeout`). Parts, ranges and larger objects have none but
//! `store.stall_timeout`: they may take as long as they like while bytes move.

mod clock;
mod credentials;
mod fault;
mod habits;
mod interceptors;
mod payload;
mod transport;

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use aws_config::meta::region::RegionProviderChain;
use aws_config::{BehaviorVersion, Region, SdkConfig};
use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::{
    IdentityCache, RequestChecksumCalculation, ResponseChecksumValidation, SharedHttpClient,
    StalledStreamProtectionConfig,
};
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::operation::list_objects_v2::ListObjectsV2Output;
use aws_sdk_s3::primitives::{ByteStream, DateTime, DateTimeFormat};
use aws_sdk_s3::types::{
    ChecksumAlgorithm, ChecksumMode, ChecksumType, CompletedMultipartUpload, CompletedPart,
    ObjectLockLegalHoldStatus,
};
use aws_smithy_async::time::TimeSource as _;
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;
use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt};
use tokio::time::{Instant, timeout};

use self::clock::Clock;
use self::credentials::Chain;
use self::fault::{Fault, transient};
use self::habits::{Checksum, Habits, Manner};
use self::interceptors::{AnswerDate, ExtraHeaders, SignedPayload};
use self::payload::{BODY_FRAME_LEN, Payload};
use self::transport::{credentials_proxy, customer_key, http_client, store_proxy, tls_context};
use super::{
    Facts, Key, Listed, ObjectInfo, PartBody, PartNumber, PartReceipt, PutOutcome, RangeSink,
    Store, StoreError, UploadId, crc64_of_parts, listing_name,
};
use crate::codec::{Crc32, Crc32Kind, Crc64};
use crate::config::StoreConfig;

/// An answer to a part that was handed over whole, and to CompleteMultipartUpload, may take so many times the usual limit: kernel buffers drain over a
/// slow line first, and assembling a large object is silent work.
const ANSWER_FACTOR: u32 = 3;

/// A bucket, or a prefix in one. Cheap to use from many tasks at once; connections are shared.
pub struct S3Store {
    client: Client,
    credentials: Chain,
    clock: Clock,
    bucket: String,
    /// Empty, or ends in `/`.
    prefix: String,
    region: String,
    custom_endpoint: bool,
    path_style: bool,
    habits: Habits,
    request_timeout: Duration,
    stall_timeout: Duration,
}

impl fmt::Debug for S3Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("S3Store").field(&self.describe()).finish()
    }
}

impl S3Store {
    /// The bucket, or the prefix in it (without outer slashes), as configured. Credentials come from the SDK's chain and are asked for once here, so that their absence is told before anything
    /// else is done; the bucket itself is not asked.
    ///
    /// # Errors
    /// [`StoreError::Refused`] when the certificates of `AWS_CA_BUNDLE` cannot be used, no region is known, or no credentials are found.
    pub async fn connect(
        config: &StoreConfig,
        bucket: &str,
        prefix: &str,
    ) -> Result<Self, StoreError> {
        let describe = format!("s3://{bucket}/{prefix}");
        let plain_http = config
            .endpoint
            .as_deref()
            .is_some_and(|url| url.starts_with("http://"));
        let extras = &config.bucket;
        let tls = tls_context(extras.ca_bundle.as_deref(), plain_http, &describe)?;
        let headers = ExtraHeaders::new(extras, customer_key(extras, &describe)?);
        let proxy = store_proxy(extras, &describe)?;
        let store_client = http_client(config, tls.clone(), proxy);
        let chain_client = http_client(config, tls, credentials_proxy());
        let clock = Clock::new(&describe);

        let sdk = load_sdk_config(config, chain_client).await;
        let Some(region) = sdk.region().map(ToString::to_string) else {
            return Err(StoreError::Refused {
                operation: "connect",
                key: describe,
                code: "no region is known".to_owned(),
                advice: "; set store.region or AWS_REGION".to_owned(),
            });
        };
        let credentials = Chain::open(&sdk, &describe).await?;

        let settings = aws_sdk_s3::config::Builder::from(&sdk)
            .http_client(store_client)
            .retry_config(RetryConfig::disabled())
            .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
            .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
            .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
            .force_path_style(config.path_style)
            .interceptor(headers)
            .interceptor(clock.clone())
            .time_source(clock.clone())
            .credentials_provider(credentials.clone())
            .identity_cache(IdentityCache::no_cache())
            .build();
        Ok(Self {
            client: Client::from_conf(settings),
            credentials,
            clock,
            bucket: bucket.to_owned(),
            prefix: match prefix {
                "" => String::new(),
                prefix => format!("{prefix}/"),
            },
            region,
            custom_endpoint: config.endpoint.is_some(),
            path_style: config.path_style,
            habits: Habits::new(config),
            request_timeout: config.request_timeout,
            stall_timeout: config.stall_timeout,
        })
    }

    /// The key as the bucket knows it: the one place where prefix and name are joined.
    fn full(&self, key: &Key) -> String {
        format!("{}{key}", self.prefix)
    }

    /// Makes a request, and again for everything that the store turns out to want otherwise.
    fn as_it_wants<'a, T: Send + 'a>(
        &'a self,
        ask: impl Fn(Manner) -> BoxFuture<'a, Result<T, Box<Fault>>> + Send + 'a,
    ) -> BoxFuture<'a, Result<T, StoreError>> {
        async move {
            loop {
                let made = self.habits.now();
                match ask(made).await {
                    Err(fault) if self.habits.learn(made, &fault, &self.describe()) => {}
                    answer => return answer.map_err(StoreError::from),
                }
            }
        }
        .boxed()
    }

    /// Longest wait for an answer that may take the store some work.
    fn answer_timeout(&self) -> Duration {
        self.request_timeout.max(self.stall_timeout) * ANSWER_FACTOR
    }

    /// Runs one request within `limit`, and sorts what it answers.
    async fn request<T, E>(
        &self,
        operation: &'static str,
        key: &str,
        limit: Duration,
        request: BoxFuture<'_, Result<T, SdkError<E, HttpResponse>>>,
    ) -> Result<T, Box<Fault>>
    where
        E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
    {
        match timeout(limit, request).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(Box::new(self.sort(operation, key, error))),
            Err(_elapsed) => Err(transient(operation, key, format!("no answer in {limit:?}"))),
        }
    }

    /// Sorts a failure by what the caller does about it.
    async fn begin(&self, key: &Key, manner: Manner) -> Result<UploadId, Box<Fault>> {
        const OPERATION: &str = "CreateMultipartUpload";
        let mut request = self
            .client
            .create_multipart_upload()
            .bucket(&self.bucket)
            .key(self.full(key));
        request = match manner.checksum {
            Checksum::Crc64Nvme => request
                .checksum_algorithm(ChecksumAlgorithm::Crc64Nvme)
                .checksum_type(ChecksumType::FullObject),
            // Of which type is up to the store: some have only one.
            Checksum::Short(Crc32Kind::Crc32c) => {
                request.checksum_algorithm(ChecksumAlgorithm::Crc32C)
            }
            Checksum::Short(Crc32Kind::Crc32) => {
                request.checksum_algorithm(ChecksumAlgorithm::Crc32)
            }
            Checksum::Md5 => request,
        };
        let answer = self
            .request(
                OPERATION,
                key.as_str(),
                self.request_timeout,
                request.send().boxed(),
            )
            .await?;
        match answer.upload_id {
            Some(id) if !id.is_empty() => Ok(UploadId(id)),
            _ => Err(transient(
                OPERATION,
                key.as_str(),
                "the answer names no upload id".to_owned(),
            )),
        }
    }

    async fn part(
        &self,
        key: &Key,
        upload: &UploadId,
        number: PartNumber,
        body: PartBody,
        manner: Manner,
    ) -> Result<PartReceipt, Box<Fault>> {
        const OPERATION: &str = "UploadPart";
        let PartBody { pieces, crc64, .. } = body;
        let payload = Payload::new(pieces, manner).await;
        let (len, crc32) = (payload.len, payload.digests.crc32);
        let mut request = self
            .client
            .upload_part()
            .bucket(&self.bucket)
            .key(self.full(key))
            .upload_id(&upload.0)
            .part_number(i32::from(number.get()))
            .content_length(payload.content_length())
            .set_checksum_crc32_c(payload.digests.header_of(Crc32Kind::Crc32c))
            .set_checksum_crc32(payload.digests.header_of(Crc32Kind::Crc32))
            .set_content_md5(payload.digests.md5)
            .body(payload.body);
        if manner.checksum == Checksum::Crc64Nvme {
            request = request.checksum_crc64_nvme(Crc64::from_value(crc64).to_base64());
        }
        let request = request.customize();
        let request = match payload.digests.sha256 {
            Some(digest) => request.interceptor(SignedPayload(digest)),
            None => request.disable_payload_signing(),
        };
        let request = request.send().boxed();
        let request = self.watched(OPERATION, key, request, len, &payload.handed_over);
        let answer = request.await?;
        let other = match manner.checksum {
            Checksum::Crc64Nvme => {
                let sum = answer.checksum_crc64_nvme.as_deref().and_then(crc64_value);
                sum.is_some_and(|sum| sum != crc64)
            }
            Checksum::Short(kind) => {
                let told = match kind {
                    Crc32Kind::Crc32c => &answer.checksum_crc32_c,
                    Crc32Kind::Crc32 => &answer.checksum_crc32,
                };
                let sum = told.as_deref().and_then(|it| Crc32::from_base64(kind, it));
                sum.is_some() && sum != crc32
            }
            Checksum::Md5 => false,
        };
        if other {
            let name = manner.checksum.name();
            let what =
                format!("the store took part {number} with another {name} than it was sent with");
            return Err(transient(OPERATION, key.as_str(), what));
        }
        let etag = tag(OPERATION, key, answer.e_tag)?;
        Ok(PartReceipt {
            number,
            etag,
            len,
            crc64,
            crc32,
        })
    }

    /// Runs a request for as long as its body moves.
    async fn watched<T, E>(
        &self,
        operation: &'static str,
        key: &Key,
        mut request: BoxFuture<'_, Result<T, SdkError<E, HttpResponse>>>,
        len: u64,
        handed_over: &AtomicU64,
    ) -> Result<T, Box<Fault>>
    where
        E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
    {
        let key = key.as_str();
        let (mut seen, mut moved_at) = (0, Instant::now());
        loop {
            match timeout(self.stall_timeout / 4, &mut request).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => return Err(Box::new(self.sort(operation, key, error))),
                Err(_elapsed) => {}
            }
            let now = handed_over.load(Ordering::Relaxed);
            if now != seen {
                (seen, moved_at) = (now, Instant::now());
            }
            let limit = if seen < len {
                self.stall_timeout
            } else {
                self.answer_timeout()
            };
            if moved_at.elapsed() >= limit {
                let what = format!("no byte moved for {limit:?} after {seen} of {len} bytes");
                return Err(transient(operation, key, what));
            }
        }
    }

    async fn complete(
        &self,
        key: &Key,
        upload: &UploadId,
        parts: &[PartReceipt],
        len: u64,
        crc64: u64,
        manner: Manner,
    ) -> Result<(), Box<Fault>> {
        const OPERATION: &str = "CompleteMultipartUpload";
        let whole = match manner.checksum {
            Checksum::Crc64Nvme => None,
            // The store does not look at it, so we do.
            Checksum::Short(_) | Checksum::Md5 if crc64_of_parts(parts).value() != crc64 => {
                return Err(changed(OPERATION, key, "CRC64NVME"));
            }
            Checksum::Short(kind) => crc32_of_parts(parts, kind),
            Checksum::Md5 => None,
        };
        let parts = parts.iter().map(|part| {
            let sum = part.crc32.filter(|_| whole.is_some());
            let of = |kind| {
                let sum = sum.filter(|sum| sum.kind() == kind);
                sum.map(Crc32::to_base64)
            };
            let number = i32::from(part.number.get());
            CompletedPart::builder()
                .part_number(number)
                .e_tag(&part.etag)
                .set_checksum_crc32_c(of(Crc32Kind::Crc32c))
                .set_checksum_crc32(of(Crc32Kind::Crc32))
                .build()
        });
        let parts = CompletedMultipartUpload::builder()
            .set_parts(Some(parts.collect()))
            .build();
        let mut request = self
            .client
            .complete_multipart_upload()
            .bucket(&self.bucket)
            .key(self.full(key))
            .upload_id(&upload.0)
            .multipart_upload(parts);
        if manner.checksum == Checksum::Crc64Nvme {
            request = request
                .checksum_crc64_nvme(Crc64::from_value(crc64).to_base64())
                .checksum_type(ChecksumType::FullObject)
                .mpu_object_size(i64::try_from(len).unwrap_or(i64::MAX));
        }
        let answer = self
            .request(
                OPERATION,
                key.as_str(),
                self.answer_timeout(),
                request.send().boxed(),
            )
            .await?;
        // A value over the parts' values is not one over the bytes, and is not held against ours.
        let told = match whole.map(Crc32::kind) {
            Some(_) if answer.checksum_type != Some(ChecksumType::FullObject) => None,
            Some(Crc32Kind::Crc32c) => answer.checksum_crc32_c,
            Some(Crc32Kind::Crc32) => answer.checksum_crc32,
            None => None,
        };
        if let (Some(whole), Some(told)) = (whole, told)
            && Crc32::from_base64(whole.kind(), &told).is_some_and(|told| told != whole)
        {
            return Err(changed(OPERATION, key, manner.checksum.name()));
        }
        tag(OPERATION, key, answer.e_tag).map(drop)
    }

    async fn abort(&self, key: &Key, upload: &UploadId) -> Result<(), StoreError> {
        let request = self
            .client
            .abort_multipart_upload()
            .bucket(&self.bucket)
            .key(self.full(key))
            .upload_id(&upload.0)
            .send();
        let answer = self.request(
            "AbortMultipartUpload",
            key.as_str(),
            self.request_timeout,
            request.boxed(),
        );
        match answer.await {
            Ok(_) => Ok(()),
            Err(fault) if fault.code == "NoSuchUpload" => Ok(()),
            Err(fault) => Err(fault.error),
        }
    }

    async fn create(
        &self,
        key: &Key,
        body: Bytes,
        manner: Manner,
    ) -> Result<PutOutcome, Box<Fault>> {
        const OPERATION: &str = "PutObject";
        let crc64 = (manner.checksum == Checksum::Crc64Nvme).then(|| Crc64::of(&body).to_base64());
        let payload = Payload::new(vec![body], manner).await;
        let len = payload.len;
        let request = self
            .client
            .put_object()
            .bucket(&self.bucket)
            .key(self.full(key))
            .if_none_match("*")
            .content_length(payload.content_length())
            .set_checksum_crc32_c(payload.digests.header_of(Crc32Kind::Crc32c))
            .set_checksum_crc32(payload.digests.header_of(Crc32Kind::Crc32))
            .set_content_md5(payload.digests.md5)
            .set_checksum_crc64_nvme(crc64)
            .body(payload.body)
            .customize();
        let request = match payload.digests.sha256 {
            Some(digest) => request.interceptor(SignedPayload(digest)),
            None => request.disable_payload_signing(),
        };
        let request = request.send().boxed();
        let answer = if len <= BODY_FRAME_LEN as u64 {
            self.request(OPERATION, key.as_str(), self.request_timeout, request)
                .boxed()
        } else {
            // A frame table may have 16 MiB: too much for one flat limit on a slow line.
            self.watched(OPERATION, key, request, len, &payload.handed_over)
                .boxed()
        };
        match answer.await {
            Ok(answer) => {
                tag(OPERATION, key, answer.e_tag)?;
                Ok(PutOutcome::Created)
            }
            Err(fault) if fault.status == Some(412) => Ok(PutOutcome::AlreadyExists),
            Err(fault) => Err(fault),
        }
    }

    async fn read_small(&self, key: &Key, len_max: usize) -> Result<Option<Bytes>, StoreError> {
        const OPERATION: &str = "GetObject";
        let request = self
            .client
            .get_object()
            .bucket(&self.bucket)
            .key(self.full(key))
            .send();
        let read = async {
            let answer = match request.await {
                Ok(answer) => answer,
                Err(error) => {
                    let fault = self.sort(OPERATION, key.as_str(), error);
                    // Only the store's own word proves that nothing is there; a bare 404 may come from anything on the way.
                    return if fault.code == "NoSuchKey" {
                        Ok(None)
                    } else {
                        Err(fault.error)
                    };
                }
            };
            tag(OPERATION, key, answer.e_tag)?;
            let len = answer
                .content_length
                .and_then(|len| usize::try_from(len).ok());
            let len = len.ok_or_else(|| {
                transient(
                    OPERATION,
                    key.as_str(),
                    "the answer has no Content-Length".to_owned(),
                )
                .error
            })?;
            if len > len_max {
                return Err(StoreError::Mismatch {
                    operation: OPERATION,
                    key: key.to_string(),
                    what: format!("{len} bytes, at most {len_max} expected"),
                });
            }
            let mut out = Collected(Vec::with_capacity(len));
            self.fill(key, answer.body, len as u64, &mut out).await?;
            Ok(Some(Bytes::from(out.0)))
        };
        match timeout(self.request_timeout, read.boxed()).await {
            Ok(result) => result,
            Err(_elapsed) => {
                let what = format!("no whole answer in {:?}", self.request_timeout);
                Err(transient(OPERATION, key.as_str(), what).error)
            }
        }
    }

    async fn range(
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
        sink.restart();
        let len = range.end.saturating_sub(range.start);
        if len == 0 {
            return Ok(());
        }
        let request = self
            .client
            .get_object()
            .bucket(&self.bucket)
            .key(self.full(key))
            .range(format!("bytes={}-{}", range.start, range.end - 1))
            .set_if_match(if_match.map(str::to_owned));
        let answer = self
            .request(
                OPERATION,
                key.as_str(),
                self.stall_timeout,
                request.send().boxed(),
            )
            .await?;
        let etag = tag(OPERATION, key, answer.e_tag)?;
        let whole = range.start == 0
            && answer
                .content_length
                .and_then(|len| u64::try_from(len).ok())
                == Some(range.end);
        let fits = match answer.content_range.as_deref() {
            Some(text) => content_range(text) == Some(range.start..range.end),
            None => whole,
        };
        if !fits {
            return Err(mismatch(format!(
                "asked for bytes {range:?}, the store answers {}",
                answer
                    .content_range
                    .as_deref()
                    .unwrap_or("with the whole object")
            )));
        }
        if let Some(wanted) = if_match
            && wanted != etag
        {
            return Err(mismatch(format!(
                "the object's tag is {etag}, not {wanted}"
            )));
        }
        self.fill(key, answer.body, len, sink).await
    }

    /// Reads a body that must be exactly `len` bytes long, for as long as it moves.
    async fn fill(
        &self,
        key: &Key,
        mut body: ByteStream,
        len: u64,
        sink: &mut dyn RangeSink,
    ) -> Result<(), StoreError> {
        const OPERATION: &str = "GetObject";
        let mut filled = 0;
        loop {
            let data = match timeout(self.stall_timeout, body.next()).await {
                Ok(None) => break,
                Ok(Some(Ok(data))) => data,
                Ok(Some(Err(error))) => {
                    return Err(StoreError::Transient {
                        operation: OPERATION,
                        key: key.to_string(),
                        what: format!("the body was cut after {filled} of {len} bytes"),
                        source: Some(error.into()),
                    });
                }
                Err(_elapsed) => {
                    let stall = self.stall_timeout;
                    let what = format!("no byte moved for {stall:?} after {filled} of {len} bytes");
                    return Err(transient(OPERATION, key.as_str(), what).error);
                }
            };
            filled += data.len() as u64;
            if filled > len {
                let what = format!("the body is longer than the {len} bytes that it should be");
                return Err(transient(OPERATION, key.as_str(), what).error);
            }
            sink.put(&data);
        }
        if filled < len {
            let what = format!("the body ended after {filled} of {len} bytes");
            return Err(transient(OPERATION, key.as_str(), what).error);
        }
        Ok(())
    }

    async fn look(&self, key: &Key) -> Result<Option<ObjectInfo>, StoreError> {
        const OPERATION: &str = "HeadObject";
        let date = Arc::new(OnceLock::new());
        let mut request = self
            .client
            .head_object()
            .bucket(&self.bucket)
            .key(self.full(key));
        if self.habits.now().checksum != Checksum::Md5 {
            request = request.checksum_mode(ChecksumMode::Enabled);
        }
        let request = request
            .customize()
            .interceptor(AnswerDate(Arc::clone(&date)))
            .send();
        let answer = self
            .request(
                OPERATION,
                key.as_str(),
                self.request_timeout,
                request.boxed(),
            )
            .await;
        let answer = match answer {
            Ok(answer) => answer,
            Err(fault) if fault.status == Some(404) => return Ok(None),
            Err(fault) => return Err(fault.error),
        };
        let etag = tag(OPERATION, key, answer.e_tag)?;
        let len = answer
            .content_length
            .and_then(|len| u64::try_from(len).ok());
        let len = len.ok_or_else(|| {
            transient(
                OPERATION,
                key.as_str(),
                "the answer has no Content-Length".to_owned(),
            )
            .error
        })?;
        // A composite value (checksum of checksums) ends in `-N` and is not comparable with ours.
        let full_object = answer
            .checksum_type
            .as_ref()
            .is_none_or(|kind| *kind == ChecksumType::FullObject);
        let crc64 = answer
            .checksum_crc64_nvme
            .as_deref()
            .filter(|_| full_object);
        let age = date
            .get()
            .zip(answer.last_modified)
            .and_then(|(now, then): (&DateTime, _)| {
                u64::try_from(now.secs().saturating_sub(then.secs()))
                    .ok()
                    .map(Duration::from_secs)
            });
        Ok(Some(ObjectInfo {
            len,
            etag: Some(etag),
            crc64: crc64.and_then(crc64_value),
            age,
        }))
    }

    /// All pages of a listing. `prefix` is relative to the store's.
    async fn pages(
        &self,
        prefix: &str,
        delimiter: Option<&str>,
    ) -> Result<Vec<ListObjectsV2Output>, StoreError> {
        const OPERATION: &str = "ListObjectsV2";
        let full = format!("{}{prefix}", self.prefix);
        let mut pages: Vec<ListObjectsV2Output> = Vec::new();
        let mut next = None;
        loop {
            let request = self
                .client
                .list_objects_v2()
                .bucket(&self.bucket)
                .prefix(&full)
                .set_delimiter(delimiter.map(str::to_owned))
                .set_continuation_token(next.clone())
                .send();
            let page = self
                .request(
                    OPERATION,
                    listing_name(prefix),
                    self.request_timeout,
                    request.boxed(),
                )
                .await?;
            let following = page.next_continuation_token.clone();
            let more = page.is_truncated.unwrap_or(false);
            pages.push(page);
            if !more {
                return Ok(pages);
            }
            if following.is_none() || following == next {
                let what = "the listing goes on but does not say where".to_owned();
                return Err(transient(OPERATION, listing_name(prefix), what).error);
            }
            next = following;
        }
    }

    async fn objects(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        let pages = self.pages(prefix, None).await?;
        let objects = pages.iter().flat_map(ListObjectsV2Output::contents);
        // Keys that we could not have written (a "folder" marker, say) are none of ours.
        let mut listed: Vec<Listed> = objects
            .filter_map(|object| {
                let key = Key::new(object.key()?.strip_prefix(&self.prefix)?).ok()?;
                let len = u64::try_from(object.size()?).ok()?;
                Some(Listed { key, len })
            })
            .collect();
        listed.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        Ok(listed)
    }

    async fn directories(&self, prefix: &str) -> Result<Vec<String>, StoreError> {
        let full = format!("{}{prefix}", self.prefix);
        let pages = self.pages(prefix, Some("/")).await?;
        let found = pages.iter().flat_map(ListObjectsV2Output::common_prefixes);
        let mut names: Vec<String> = found
            .filter_map(|found| {
                Some(
                    found
                        .prefix()?
                        .strip_prefix(&full)?
                        .strip_suffix('/')?
                        .to_owned(),
                )
            })
            .collect();
        names.sort_unstable();
        Ok(names)
    }

    /// Lists and aborts until there is nothing to list. What is aborted is gone from the listing, so every round starts at its beginning.
    async fn abort_under(&self, prefix: &str) -> Result<u64, StoreError> {
        const OPERATION: &str = "ListMultipartUploads";
        let full = format!("{}{prefix}", self.prefix);
        let mut aborted = HashSet::new();
        loop {
            let request = self
                .client
                .list_multipart_uploads()
                .bucket(&self.bucket)
                .prefix(&full)
                .send();
            let page = self
                .request(
                    OPERATION,
                    listing_name(prefix),
                    self.request_timeout,
                    request.boxed(),
                )
                .await?;
            let before = aborted.len();
            for open in page.uploads() {
                let key = open.key().and_then(|key| key.strip_prefix(&self.prefix));
                // Some stores list more than the prefix that was asked for.
                let key = key.filter(|key| key.starts_with(prefix));
                let key = key.and_then(|key| Key::new(key).ok());
                let (Some(key), Some(upload)) = (key, open.upload_id()) else {
                    continue;
                };
                let upload = UploadId(upload.to_owned());
                if aborted.contains(&upload) {
                    continue;
                }
                self.abort(&key, &upload).await?;
                aborted.insert(upload);
            }
            if aborted.len() == before {
                return Ok(aborted.len() as u64);
            }
        }
    }

    /// The bucket is asked for its head; a refusal has a date, too.
    async fn look_around(&self) -> Facts {
        let date = Arc::new(OnceLock::new());
        let request = self.client.head_bucket().bucket(&self.bucket);
        let request = request
            .customize()
            .interceptor(AnswerDate(Arc::clone(&date)))
            .send();
        // Whatever it answers: the right to ask for this is no right that a save needs.
        let _answer = timeout(self.request_timeout, request).await;
        Facts {
            date_ms: date
                .get()
                .and_then(|date: &DateTime| u64::try_from(date.to_millis().ok()?).ok()),
            credentials: self.credentials.told().await,
        }
    }

    async fn remove(&self, key: &Key) -> Result<(), StoreError> {
        let request = self
            .client
            .delete_object()
            .bucket(&self.bucket)
            .key(self.full(key))
            .send();
        let answer = self.request(
            "DeleteObject",
            key.as_str(),
            self.request_timeout,
            request.boxed(),
        );
        match answer.await {
            Ok(_) => Ok(()),
            Err(fault) if fault.code == "NoSuchKey" => Ok(()),
            Err(fault) if fault.status == Some(403) => Err(match self.locked_until(key).await {
                Some(until) => StoreError::Locked {
                    operation: "DeleteObject",
                    key: key.to_string(),
                    until,
                },
                None => fault.error,
            }),
            Err(fault) => Err(fault.error),
        }
    }

    /// Until when Object Lock keeps an object, if it does and lets us know.
    async fn locked_until(&self, key: &Key) -> Option<String> {
        let request = self.client.head_object().bucket(&self.bucket);
        let request = request.key(self.full(key)).send();
        let answer = timeout(self.request_timeout, request).await.ok()?.ok()?;
        if answer.object_lock_legal_hold_status == Some(ObjectLockLegalHoldStatus::On) {
            return Some("its legal hold is lifted".to_owned());
        }
        let until = answer.object_lock_retain_until_date?;
        let is_over = until <= DateTime::from(self.clock.now());
        let until = until.fmt(DateTimeFormat::DateTime).ok()?;
        (!is_over).then_some(until)
    }
}

/// Region and credentials as the SDK's chains find them.
async fn load_sdk_config(config: &StoreConfig, chain_client: SharedHttpClient) -> SdkConfig {
    let mut loader = aws_config::defaults(BehaviorVersion::v2026_01_12()).http_client(chain_client);
    if let Some(endpoint) = &config.endpoint {
        loader = loader.endpoint_url(endpoint);
    }
    // A store of one's own has no region that a metadata service could know; it wants some name in the signature.
    loader = match (&config.region, &config.endpoint) {
        (Some(region), _) => loader.region(Region::new(region.clone())),
        (None, Some(_)) => {
            let environment = aws_config::environment::EnvironmentVariableRegionProvider::new();
            let profile = aws_config::profile::ProfileFileRegionProvider::new();
            let chain = RegionProviderChain::first_try(environment).or_else(profile);
            loader.region(chain.or_else(Region::from_static("us-east-1")))
        }
        (None, None) => loader,
    };
    loader.load().await
}

/// The tag of an answer about an object. Every S3 store gives one, so an answer without it is not the store's, or was cut: a 200 with an error document, or with
/// nothing at all. Whether the request took effect is not known.
fn tag(operation: &'static str, key: &Key, found: Option<String>) -> Result<String, Box<Fault>> {
    found.ok_or_else(|| {
        let what = "the answer names no ETag".to_owned();
        transient(operation, key.as_str(), what)
    })
}

/// What was put together is not what was sent.
fn changed(operation: &'static str, key: &Key, checksum: &str) -> Box<Fault> {
    let mut fault = transient(operation, key.as_str(), String::new());
    fault.error = StoreError::Mismatch {
        operation,
        key: key.to_string(),
        what: format!("the object's {checksum} is not that of its parts"),
    };
    fault
}

/// Of all parts, one behind the other; `None` where not every part has one of this kind.
fn crc32_of_parts(parts: &[PartReceipt], kind: Crc32Kind) -> Option<Crc32> {
    let (first, rest) = parts.split_first()?;
    let of = |part: &PartReceipt| part.crc32.filter(|sum| sum.kind() == kind);
    rest.iter().try_fold(of(first)?, |whole, part| {
        Some(whole.combine(of(part)?, part.len))
    })
}

impl Store for S3Store {
    fn begin_upload<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        self.as_it_wants(move |made| self.begin(key, made).boxed())
    }

    fn put_part<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        number: PartNumber,
        body: PartBody,
    ) -> BoxFuture<'a, Result<PartReceipt, StoreError>> {
        self.as_it_wants(move |made| self.part(key, upload, number, body.clone(), made).boxed())
    }

    fn complete_upload<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        parts: &'a [PartReceipt],
        len: u64,
        crc64: u64,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.as_it_wants(move |made| self.complete(key, upload, parts, len, crc64, made).boxed())
    }

    fn abort_upload<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.abort(key, upload).boxed()
    }

    fn put_if_absent<'a>(
        &'a self,
        key: &'a Key,
        body: Bytes,
    ) -> BoxFuture<'a, Result<PutOutcome, StoreError>> {
        self.as_it_wants(move |made| self.create(key, body.clone(), made).boxed())
    }

    fn get<'a>(
        &'a self,
        key: &'a Key,
        len_max: usize,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        self.read_small(key, len_max).boxed()
    }

    fn read_range<'a>(
        &'a self,
        key: &'a Key,
        range: Range<u64>,
        if_match: Option<&'a str>,
        sink: &'a mut dyn RangeSink,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.range(key, range, if_match, sink).boxed()
    }

    fn head<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<Option<ObjectInfo>, StoreError>> {
        self.look(key).boxed()
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<Listed>, StoreError>> {
        self.objects(prefix).boxed()
    }

    fn list_dirs<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>, StoreError>> {
        self.directories(prefix).boxed()
    }

    fn abort_uploads_under<'a>(
        &'a self,
        prefix: &'a str,
    ) -> BoxFuture<'a, Result<u64, StoreError>> {
        self.abort_under(prefix).boxed()
    }

    fn delete<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<(), StoreError>> {
        self.remove(key).boxed()
    }

    fn facts(&self) -> BoxFuture<'_, Facts> {
        self.look_around().boxed()
    }

    fn describe(&self) -> String {
        format!("s3://{}/{}", self.bucket, self.prefix.trim_end_matches('/'))
    }
}

/// A whole small object as it comes.
struct Collected(Vec<u8>);

impl RangeSink for Collected {
    fn restart(&mut self) {
        self.0.clear();
    }

    fn put(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }
}

/// A checksum header's value; `None` for anything but 8 bytes in base64, such as a composite one.
fn crc64_value(text: &str) -> Option<u64> {
    Crc64::from_base64(text).ok().map(Crc64::value)
}

/// `bytes 0-9/100` → `0..10`.
fn content_range(text: &str) -> Option<Range<u64>> {
    let (range, _total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    Some(first.parse().ok()?..last.parse::<u64>().ok()?.checked_add(1)?)
}
