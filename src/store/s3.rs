//! The store on S3 and everything that speaks its protocol. The only file that names the SDK's types.
//!
//! In: calls of [`Store`], answered once each; the SDK's own retries and its throughput watchdogs are off, since [`super::retry`] tries again and since
//! they take a slow line for a dead one. Out: the objects' bytes, straight into the caller's buffers. What can fail: everything in [`StoreError`], sorted
//! here from status and code.
//!
//! A part goes out as the list of buffers that it is, with a plain `Content-Length`, its CRC64NVME as a header and (by default) an unsigned
//! payload: no trailer, no aws-chunked framing, no copy. Small requests have one limit (`store.request_timeout`). Parts and ranges have none but
//! `store.stall_timeout`: they may take as long as they like while bytes move.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::fmt::Write as _;
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use aws_config::meta::region::RegionProviderChain;
use aws_config::{BehaviorVersion, Region, SdkConfig};
use aws_runtime::auth::PayloadSigningOverride;
use aws_sdk_s3::Client;
use aws_sdk_s3::config::interceptors::{
    BeforeDeserializationInterceptorContextRef, BeforeTransmitInterceptorContextMut,
};
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::{
    ConfigBag, IdentityCache, Intercept, ProvideCredentials, RequestChecksumCalculation,
    ResponseChecksumValidation, RuntimeComponents, SharedHttpClient, StalledStreamProtectionConfig,
};
use aws_sdk_s3::error::{BoxError, ProvideErrorMetadata, SdkError};
use aws_sdk_s3::operation::list_objects_v2::ListObjectsV2Output;
use aws_sdk_s3::primitives::{ByteStream, DateTime, DateTimeFormat, SdkBody};
use aws_sdk_s3::types::{
    ChecksumAlgorithm, ChecksumMode, ChecksumType, CompletedMultipartUpload, CompletedPart,
};
use aws_smithy_http_client::Connector;
use aws_smithy_http_client::proxy::ProxyConfig;
use aws_smithy_http_client::tls::{Provider, TlsContext, TrustStore, rustls_provider::CryptoMode};
use aws_smithy_runtime_api::client::http::{
    HttpConnectorSettings, SharedHttpConnector, http_client_fn,
};
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;
use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt};
use http_body::{Body, Frame, SizeHint};
use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, timeout};

use super::{
    Key, Listed, ObjectInfo, PartBody, PartNumber, PartReceipt, PutOutcome, Store, StoreError,
    UploadId,
};
use crate::codec::Crc64;
use crate::config::{PartChecksum, StoreConfig};

/// Bytes of a part that are handed to the connection at once. Small, so that progress is seen on a slow line; large against the cost of a call.
const BODY_FRAME_LEN: usize = 256 * 1024;

/// An answer to a part that was handed over whole, and to CompleteMultipartUpload, may take so many times the usual limit: kernel buffers drain over a
/// slow line first, and assembling a large object is silent work.
const ANSWER_FACTOR: u32 = 3;

/// Credentials are renewed so long before they expire.
const CREDENTIALS_RENEWAL: Duration = Duration::from_secs(60);

/// A bucket, or a prefix in one. Cheap to use from many tasks at once; connections are shared.
pub struct S3Store {
    client: Client,
    bucket: String,
    /// Empty, or ends in `/`.
    prefix: String,
    region: String,
    custom_endpoint: bool,
    path_style: bool,
    checksum: PartChecksum,
    sign_payload: bool,
    request_timeout: Duration,
    stall_timeout: Duration,
}

impl fmt::Debug for S3Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("S3Store").field(&self.describe()).finish()
    }
}

impl S3Store {
    /// A store as configured. Credentials come from the SDK's chain and are asked for once here, so that their absence is told before anything
    /// else is done; the bucket itself is not asked.
    pub async fn connect(config: &StoreConfig) -> Result<Self, StoreError> {
        let describe = format!("s3://{}/{}", config.bucket, config.prefix);
        let plain_http = config
            .endpoint
            .as_deref()
            .is_some_and(|url| url.starts_with("http://"));
        let tls = tls_context(plain_http, &describe)?;
        let store_client =
            http_client(config.connect_timeout, tls.clone(), ProxyConfig::from_env());
        let chain_client = http_client(config.connect_timeout, tls, credentials_proxy());

        let mut loader = aws_config::defaults(BehaviorVersion::v2026_01_12())
            .http_client(chain_client)
            .identity_cache(
                IdentityCache::lazy()
                    .buffer_time(CREDENTIALS_RENEWAL)
                    .build(),
            );
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
        let sdk = loader.load().await;
        let Some(region) = sdk.region().map(ToString::to_string) else {
            return Err(StoreError::Refused {
                operation: "connect",
                key: describe,
                code: "no region is known".to_owned(),
                advice: "; set store.region or AWS_REGION".to_owned(),
            });
        };
        check_credentials(&sdk, &describe).await?;

        let settings = aws_sdk_s3::config::Builder::from(&sdk)
            .http_client(store_client)
            .retry_config(RetryConfig::disabled())
            .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
            .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
            .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
            .force_path_style(config.path_style)
            .build();
        Ok(Self {
            client: Client::from_conf(settings),
            bucket: config.bucket.clone(),
            prefix: match config.prefix.as_str() {
                "" => String::new(),
                prefix => format!("{prefix}/"),
            },
            region,
            custom_endpoint: config.endpoint.is_some(),
            path_style: config.path_style,
            checksum: config.checksum,
            sign_payload: config.sign_payload,
            request_timeout: config.request_timeout,
            stall_timeout: config.stall_timeout,
        })
    }

    /// The key as the bucket knows it: the one place where prefix and name are joined.
    fn full(&self, key: &Key) -> String {
        format!("{}{key}", self.prefix)
    }

    fn checksummed(&self) -> bool {
        self.checksum == PartChecksum::Crc64Nvme
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
    fn sort<E>(&self, operation: &'static str, key: &str, error: SdkError<E, HttpResponse>) -> Fault
    where
        E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
    {
        let response = error.raw_response();
        let status = response.map(|response| response.status().as_u16());
        let header = |name| response.and_then(|response| response.headers().get(name));
        let bucket_region = header("x-amz-bucket-region").map(str::to_owned);
        let service = error.as_service_error();
        let code = service
            .and_then(ProvideErrorMetadata::code)
            .unwrap_or_default()
            .to_owned();
        let message = service
            .and_then(ProvideErrorMetadata::message)
            .unwrap_or_default();
        let said = match (code.as_str(), message, status) {
            ("", _, Some(status)) => format!("status {status}"),
            ("", _, None) => String::new(),
            (code, "", _) => code.to_owned(),
            (code, message, _) => format!("{code}: {message}"),
        };
        let key = key.to_owned();
        let what = match &error {
            SdkError::ConstructionFailure(_) => {
                return Fault {
                    status,
                    code,
                    error: StoreError::Refused {
                        operation,
                        key,
                        code: chain(&error),
                        advice: String::new(),
                    },
                };
            }
            SdkError::TimeoutError(_) => "timed out".to_owned(),
            SdkError::DispatchFailure(failure) => {
                let detail = failure.as_connector_error().map(|error| chain(error));
                let unknown_name = detail
                    .as_deref()
                    .is_some_and(|text| text.contains("dns error"));
                let advice = if unknown_name && self.custom_endpoint && !self.path_style {
                    format!(
                        "; the name of the bucket was put before the endpoint's ({}.…): a store without such names wants store.path_style = true",
                        self.bucket
                    )
                } else {
                    String::new()
                };
                format!("no answer{advice}")
            }
            SdkError::ResponseError(_) => format!(
                "the answer (status {}) is cut or unreadable",
                status.unwrap_or(0)
            ),
            _ => said.clone(),
        };
        let passing = match (&error, operation, code.as_str()) {
            // A 404 that was cut is not the store's word.
            (SdkError::ResponseError(_), _, _) if status == Some(404) => Passing::Yes,
            // The parts were checked as they came; the whole is not what we think it is, and stays so.
            (_, "CompleteMultipartUpload", "BadDigest") => Passing::Changed,
            (_, _, code) => Passing::of(status, code, matches!(error, SdkError::ServiceError(_))),
        };
        let error = match passing {
            Passing::SlowDown => StoreError::SlowDown {
                operation,
                key,
                code: said,
            },
            Passing::Yes => StoreError::Transient {
                operation,
                key,
                what,
                source: error.into_source().ok(),
            },
            Passing::NotFound => StoreError::NotFound { operation, key },
            Passing::Changed => StoreError::Mismatch {
                operation,
                key,
                what: said,
            },
            Passing::No => StoreError::Refused {
                operation,
                key,
                advice: self.advice(operation, status, &said, bucket_region.as_deref()),
                code: said,
            },
        };
        Fault {
            status,
            code,
            error,
        }
    }

    /// The flag or key that helps with a refusal, or nothing.
    fn advice(
        &self,
        operation: &str,
        status: Option<u16>,
        said: &str,
        bucket_region: Option<&str>,
    ) -> String {
        let lower = said.to_ascii_lowercase();
        let has = |words: &[&str]| words.iter().any(|word| lower.contains(word));
        if let Some(there) = bucket_region.filter(|there| *there != self.region) {
            return format!(
                "; the bucket is in {there}, we asked in {}: set store.region = \"{there}\"",
                self.region
            );
        }
        if matches!(status, Some(301 | 307)) || has(&["authorizationheadermalformed"]) {
            return format!(
                "; the bucket is in another region than {}: set store.region",
                self.region
            );
        }
        if has(&["nosuchbucket"]) {
            return format!(
                "; there is no bucket {:?}: see store.url and store.endpoint",
                self.bucket
            );
        }
        if has(&["requesttimetooskewed"]) {
            return "; this machine's clock and the store's differ too much".to_owned();
        }
        if has(&[
            "signaturedoesnotmatch",
            "invalidaccesskeyid",
            "expiredtoken",
            "invalidtoken",
            "tokenrefreshrequired",
        ]) {
            return "; credentials come from the environment (AWS_ACCESS_KEY_ID …), the AWS profile or the instance's role".to_owned();
        }
        if has(&[
            "content-sha256",
            "contentsha256",
            "unsigned-payload",
            "unsigned payload",
        ]) {
            return "; a store that wants signed bodies needs store.sign_payload = true".to_owned();
        }
        if has(&["checksum", "trailer", "aws-chunked", "missingcontentlength"]) {
            return "; a store that does not know CRC64NVME needs store.checksum = \"none\""
                .to_owned();
        }
        if has(&["conditional", "if-none-match", "notimplemented"]) && operation == "PutObject" {
            return "; the log needs a store that honours If-None-Match".to_owned();
        }
        if status == Some(403) {
            return format!(
                "; the credentials lack the right to {operation} under s3://{}/{}",
                self.bucket, self.prefix
            );
        }
        String::new()
    }

    async fn begin(&self, key: &Key) -> Result<UploadId, StoreError> {
        const OPERATION: &str = "CreateMultipartUpload";
        let full = self.full(key);
        let mut request = self
            .client
            .create_multipart_upload()
            .bucket(&self.bucket)
            .key(&full);
        if self.checksummed() {
            request = request
                .checksum_algorithm(ChecksumAlgorithm::Crc64Nvme)
                .checksum_type(ChecksumType::FullObject);
        }
        let answer = self
            .request(
                OPERATION,
                &full,
                self.request_timeout,
                request.send().boxed(),
            )
            .await?;
        match answer.upload_id {
            Some(id) if !id.is_empty() => Ok(UploadId(id)),
            _ => Err(transient(OPERATION, &full, "the answer names no upload id".to_owned()).error),
        }
    }

    async fn part(
        &self,
        key: &Key,
        upload: &UploadId,
        number: PartNumber,
        body: PartBody,
    ) -> Result<PartReceipt, StoreError> {
        const OPERATION: &str = "UploadPart";
        let full = self.full(key);
        let PartBody { pieces, crc64, .. } = body;
        let len = pieces.iter().map(|piece| piece.len() as u64).sum();
        let digest = match self.sign_payload {
            true => Some(payload_digest(pieces.clone()).await),
            false => None,
        };
        let handed_over = Arc::new(AtomicU64::new(0));
        let stream = PartStream::new(pieces, len, Arc::clone(&handed_over));
        let mut request = self
            .client
            .upload_part()
            .bucket(&self.bucket)
            .key(&full)
            .upload_id(&upload.0)
            .part_number(i32::from(number.get()))
            .content_length(i64::try_from(len).unwrap_or(i64::MAX))
            .body(ByteStream::new(SdkBody::from_body_1_x(stream)));
        if self.checksummed() {
            request = request.checksum_crc64_nvme(Crc64::from_value(crc64).to_base64());
        }
        let request = request.customize();
        let request = match digest {
            Some(digest) => request.interceptor(SignedPayload(digest)).send().boxed(),
            None => request.disable_payload_signing().send().boxed(),
        };
        let request = self.watched(OPERATION, &full, request, len, &handed_over);
        let answer = request.await?;
        if let Some(sum) = answer.checksum_crc64_nvme.as_deref().and_then(crc64_value)
            && sum != crc64
            && self.checksummed()
        {
            let what = format!("the store took part {number} as CRC64NVME {sum:x}, sent {crc64:x}");
            return Err(transient(OPERATION, &full, what).error);
        }
        let etag = tag(OPERATION, &full, answer.e_tag)?;
        Ok(PartReceipt {
            number,
            etag,
            len,
            crc64,
        })
    }

    /// Runs a part's request for as long as its body moves.
    async fn watched<T, E>(
        &self,
        operation: &'static str,
        key: &str,
        mut request: BoxFuture<'_, Result<T, SdkError<E, HttpResponse>>>,
        len: u64,
        handed_over: &AtomicU64,
    ) -> Result<T, StoreError>
    where
        E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
    {
        let (mut seen, mut moved_at) = (0, Instant::now());
        loop {
            match timeout(self.stall_timeout / 4, &mut request).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => return Err(self.sort(operation, key, error).error),
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
                return Err(transient(operation, key, what).error);
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
    ) -> Result<(), StoreError> {
        const OPERATION: &str = "CompleteMultipartUpload";
        let full = self.full(key);
        let parts = parts.iter().map(|part| {
            let number = i32::from(part.number.get());
            CompletedPart::builder()
                .part_number(number)
                .e_tag(&part.etag)
                .build()
        });
        let parts = CompletedMultipartUpload::builder()
            .set_parts(Some(parts.collect()))
            .build();
        let mut request = self
            .client
            .complete_multipart_upload()
            .bucket(&self.bucket)
            .key(&full)
            .upload_id(&upload.0)
            .multipart_upload(parts);
        if self.checksummed() {
            request = request
                .checksum_crc64_nvme(Crc64::from_value(crc64).to_base64())
                .checksum_type(ChecksumType::FullObject)
                .mpu_object_size(i64::try_from(len).unwrap_or(i64::MAX));
        }
        let answer = self
            .request(
                OPERATION,
                &full,
                self.answer_timeout(),
                request.send().boxed(),
            )
            .await?;
        tag(OPERATION, &full, answer.e_tag).map(drop)
    }

    async fn abort(&self, key: &Key, upload: &UploadId) -> Result<(), StoreError> {
        let full = self.full(key);
        let request = self
            .client
            .abort_multipart_upload()
            .bucket(&self.bucket)
            .key(&full)
            .upload_id(&upload.0)
            .send();
        let answer = self.request(
            "AbortMultipartUpload",
            &full,
            self.request_timeout,
            request.boxed(),
        );
        match answer.await {
            Ok(_) => Ok(()),
            Err(fault) if fault.code == "NoSuchUpload" => Ok(()),
            Err(fault) => Err(fault.error),
        }
    }

    async fn create(&self, key: &Key, body: Bytes) -> Result<PutOutcome, StoreError> {
        let full = self.full(key);
        let mut request = self
            .client
            .put_object()
            .bucket(&self.bucket)
            .key(&full)
            .if_none_match("*");
        if self.checksummed() {
            request = request.checksum_crc64_nvme(Crc64::of(&body).to_base64());
        }
        let request = request.body(ByteStream::from(body)).customize();
        let request = match self.sign_payload {
            true => request,
            false => request.disable_payload_signing(),
        };
        let answer = self.request(
            "PutObject",
            &full,
            self.request_timeout,
            request.send().boxed(),
        );
        match answer.await {
            Ok(answer) => {
                tag("PutObject", &full, answer.e_tag)?;
                Ok(PutOutcome::Created)
            }
            Err(fault) if fault.status == Some(412) => Ok(PutOutcome::AlreadyExists),
            Err(fault) => Err(fault.error),
        }
    }

    async fn read_small(&self, key: &Key, len_max: usize) -> Result<Option<Bytes>, StoreError> {
        const OPERATION: &str = "GetObject";
        let full = self.full(key);
        let request = self
            .client
            .get_object()
            .bucket(&self.bucket)
            .key(&full)
            .send();
        let read = async {
            let answer = match request.await {
                Ok(answer) => answer,
                Err(error) => {
                    let fault = self.sort(OPERATION, &full, error);
                    // Only the store's own word proves that nothing is there; a bare 404 may come from anything on the way.
                    return if fault.code == "NoSuchKey" {
                        Ok(None)
                    } else {
                        Err(fault.error)
                    };
                }
            };
            tag(OPERATION, &full, answer.e_tag)?;
            let len = answer
                .content_length
                .and_then(|len| usize::try_from(len).ok());
            let len = len.ok_or_else(|| {
                transient(
                    OPERATION,
                    &full,
                    "the answer has no Content-Length".to_owned(),
                )
                .error
            })?;
            if len > len_max {
                return Err(StoreError::Mismatch {
                    operation: OPERATION,
                    key: full.clone(),
                    what: format!("{len} bytes, at most {len_max} expected"),
                });
            }
            let mut out = vec![0; len];
            self.fill(&full, answer.body, &mut out).await?;
            Ok(Some(Bytes::from(out)))
        };
        match timeout(self.request_timeout, read.boxed()).await {
            Ok(result) => result,
            Err(_elapsed) => {
                let what = format!("no whole answer in {:?}", self.request_timeout);
                Err(transient(OPERATION, &full, what).error)
            }
        }
    }

    async fn read_range(
        &self,
        key: &Key,
        range: Range<u64>,
        if_match: Option<&str>,
        out: &mut [u8],
    ) -> Result<(), StoreError> {
        const OPERATION: &str = "GetObject";
        let full = self.full(key);
        let mismatch = |what: String| StoreError::Mismatch {
            operation: OPERATION,
            key: full.clone(),
            what,
        };
        let len = range.end.checked_sub(range.start);
        if len != Some(out.len() as u64) {
            return Err(mismatch(format!(
                "range {range:?} into a buffer of {} bytes",
                out.len()
            )));
        }
        if out.is_empty() {
            return Ok(());
        }
        let request = self
            .client
            .get_object()
            .bucket(&self.bucket)
            .key(&full)
            .range(format!("bytes={}-{}", range.start, range.end - 1))
            .set_if_match(if_match.map(str::to_owned));
        let answer = self
            .request(OPERATION, &full, self.stall_timeout, request.send().boxed())
            .await?;
        let etag = tag(OPERATION, &full, answer.e_tag)?;
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
        self.fill(&full, answer.body, out).await
    }

    /// Reads a body that must be exactly as long as `out`, for as long as it moves.
    async fn fill(
        &self,
        key: &str,
        mut body: ByteStream,
        out: &mut [u8],
    ) -> Result<(), StoreError> {
        const OPERATION: &str = "GetObject";
        let len = out.len();
        let mut filled = 0;
        loop {
            let data = match timeout(self.stall_timeout, body.next()).await {
                Ok(None) => break,
                Ok(Some(Ok(data))) => data,
                Ok(Some(Err(error))) => {
                    return Err(StoreError::Transient {
                        operation: OPERATION,
                        key: key.to_owned(),
                        what: format!("the body was cut after {filled} of {len} bytes"),
                        source: Some(error.into()),
                    });
                }
                Err(_elapsed) => {
                    let stall = self.stall_timeout;
                    let what = format!("no byte moved for {stall:?} after {filled} of {len} bytes");
                    return Err(transient(OPERATION, key, what).error);
                }
            };
            let Some(target) = out.get_mut(filled..filled + data.len()) else {
                let what = format!("the body is longer than the {len} bytes that it should be");
                return Err(transient(OPERATION, key, what).error);
            };
            target.copy_from_slice(&data);
            filled += data.len();
        }
        if filled < len {
            let what = format!("the body ended after {filled} of {len} bytes");
            return Err(transient(OPERATION, key, what).error);
        }
        Ok(())
    }

    async fn look(&self, key: &Key) -> Result<Option<ObjectInfo>, StoreError> {
        const OPERATION: &str = "HeadObject";
        let full = self.full(key);
        let date = Arc::new(OnceLock::new());
        let mut request = self.client.head_object().bucket(&self.bucket).key(&full);
        if self.checksummed() {
            request = request.checksum_mode(ChecksumMode::Enabled);
        }
        let request = request
            .customize()
            .interceptor(AnswerDate(Arc::clone(&date)))
            .send();
        let answer = self
            .request(OPERATION, &full, self.request_timeout, request.boxed())
            .await;
        let answer = match answer {
            Ok(answer) => answer,
            Err(fault) if fault.status == Some(404) => return Ok(None),
            Err(fault) => return Err(fault.error),
        };
        let etag = tag(OPERATION, &full, answer.e_tag)?;
        let len = answer
            .content_length
            .and_then(|len| u64::try_from(len).ok());
        let len = len.ok_or_else(|| {
            transient(
                OPERATION,
                &full,
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
                .request(OPERATION, &full, self.request_timeout, request.boxed())
                .await?;
            let following = page.next_continuation_token.clone();
            let more = page.is_truncated.unwrap_or(false);
            pages.push(page);
            if !more {
                return Ok(pages);
            }
            if following.is_none() || following == next {
                let what = "the listing goes on but does not say where".to_owned();
                return Err(transient(OPERATION, &full, what).error);
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

    async fn remove(&self, key: &Key) -> Result<(), StoreError> {
        let full = self.full(key);
        let request = self
            .client
            .delete_object()
            .bucket(&self.bucket)
            .key(&full)
            .send();
        let answer = self.request("DeleteObject", &full, self.request_timeout, request.boxed());
        match answer.await {
            Ok(_) => Ok(()),
            Err(fault) if fault.code == "NoSuchKey" => Ok(()),
            Err(fault) => Err(fault.error),
        }
    }
}

/// The tag of an answer about an object. Every S3 store gives one, so an answer without it is not the store's, or was cut: a 200 with an error document, or with
/// nothing at all. Whether the request took effect is not known.
fn tag(operation: &'static str, key: &str, found: Option<String>) -> Result<String, StoreError> {
    found.ok_or_else(|| {
        let what = "the answer names no ETag".to_owned();
        transient(operation, key, what).error
    })
}

impl Store for S3Store {
    fn begin_upload<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        self.begin(key).boxed()
    }

    fn put_part<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        number: PartNumber,
        body: PartBody,
    ) -> BoxFuture<'a, Result<PartReceipt, StoreError>> {
        self.part(key, upload, number, body).boxed()
    }

    fn complete_upload<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        parts: &'a [PartReceipt],
        len: u64,
        crc64: u64,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.complete(key, upload, parts, len, crc64).boxed()
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
        self.create(key, body).boxed()
    }

    fn get<'a>(
        &'a self,
        key: &'a Key,
        len_max: usize,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        self.read_small(key, len_max).boxed()
    }

    fn get_range<'a>(
        &'a self,
        key: &'a Key,
        range: Range<u64>,
        if_match: Option<&'a str>,
        out: &'a mut [u8],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.read_range(key, range, if_match, out).boxed()
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

    fn delete<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<(), StoreError>> {
        self.remove(key).boxed()
    }

    fn describe(&self) -> String {
        format!("s3://{}/{}", self.bucket, self.prefix.trim_end_matches('/'))
    }
}

/// A sorted failure, with what the store said for the few callers that look closer.
struct Fault {
    status: Option<u16>,
    code: String,
    error: StoreError,
}

impl From<Box<Fault>> for StoreError {
    fn from(fault: Box<Fault>) -> Self {
        fault.error
    }
}

fn transient(operation: &'static str, key: &str, what: String) -> Box<Fault> {
    let key = key.to_owned();
    Box::new(Fault {
        status: None,
        code: String::new(),
        error: StoreError::Transient {
            operation,
            key,
            what,
            source: None,
        },
    })
}

/// Which [`StoreError`] a status and a code stand for.
#[derive(Debug, PartialEq, Eq)]
enum Passing {
    Yes,
    No,
    SlowDown,
    NotFound,
    Changed,
}

impl Passing {
    /// `service` says that the store answered with an error document, or with a status that is one.
    fn of(status: Option<u16>, code: &str, service: bool) -> Self {
        match (status, code) {
            (
                _,
                "SlowDown"
                | "SlowDownRead"
                | "SlowDownWrite"
                | "TooManyRequests"
                | "RequestLimitExceeded",
            )
            | (Some(429), _) => Self::SlowDown,
            // The code decides before the status: S3 sends 200 before it has assembled an object. BadDigest: damaged on the way.
            (
                _,
                "InternalError"
                | "ServiceUnavailable"
                | "RequestTimeout"
                | "BadDigest"
                | "OperationAborted"
                | "ConditionalRequestConflict",
            ) => Self::Yes,
            (_, "NoSuchBucket") | (Some(501), _) => Self::No,
            (Some(500..), _) => Self::Yes,
            (Some(404), _) | (_, "NoSuchKey" | "NoSuchUpload") => Self::NotFound,
            (Some(412 | 416), _) => Self::Changed,
            (Some(409), _) => Self::Yes,
            // No answer at all, or one without a readable word in it.
            (None, _) => Self::Yes,
            (Some(200..300), "") => Self::Yes,
            (Some(_), _) if !service => Self::Yes,
            (Some(_), _) => Self::No,
        }
    }
}

/// An error and its sources in one line, for the few places whose cause is no source of ours.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        let _infallible = write!(text, ": {error}");
        next = error.source();
    }
    text
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

/// SHA-256 of a body in hex. About 9 ms for 16 MiB, so not on the runtime's own threads.
async fn payload_digest(pieces: Vec<Bytes>) -> String {
    let digest = tokio::task::spawn_blocking(move || {
        let mut hasher = Sha256::new();
        pieces.iter().for_each(|piece| hasher.update(piece));
        hasher
            .finalize()
            .iter()
            .fold(String::with_capacity(64), |mut hex, byte| {
                let _infallible = write!(hex, "{byte:02x}");
                hex
            })
    });
    match digest.await {
        Ok(hex) => hex,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// Trusted roots: the system's, or the file in `AWS_CA_BUNDLE` instead. None for plain HTTP, where loading them would only cost time.
fn tls_context(plain_http: bool, describe: &str) -> Result<TlsContext, StoreError> {
    let refused = |what: String| StoreError::Refused {
        operation: "connect",
        key: describe.to_owned(),
        code: what,
        advice: "; see AWS_CA_BUNDLE".to_owned(),
    };
    let roots = match std::env::var_os("AWS_CA_BUNDLE") {
        _ if plain_http => TrustStore::empty(),
        Some(path) => {
            let pem = std::fs::read(&path)
                .map_err(|error| refused(format!("cannot read {}: {error}", path.display())))?;
            TrustStore::empty().with_pem_certificate(pem)
        }
        None => TrustStore::default(),
    };
    TlsContext::builder()
        .with_trust_store(roots)
        .build()
        .map_err(|error| refused(format!("cannot use the certificates: {}", chain(&error))))
}

/// One connection pool of our own. No read timeout: it would count from the start of a request, its upload included.
fn http_client(connect_timeout: Duration, tls: TlsContext, proxy: ProxyConfig) -> SharedHttpClient {
    let settings = HttpConnectorSettings::builder()
        .connect_timeout(connect_timeout)
        .build();
    let connector = Connector::builder()
        .connector_settings(settings)
        .proxy_config(proxy)
        .tls_provider(Provider::Rustls(CryptoMode::Ring))
        .tls_context(tls)
        .build();
    let connector = SharedHttpConnector::new(connector);
    http_client_fn(move |_, _| connector.clone())
}

/// The credentials' client uses a proxy for HTTPS only: metadata services speak plain HTTP and are reached directly.
fn credentials_proxy() -> ProxyConfig {
    let variable = |name: &str| {
        std::env::var(name)
            .or_else(|_| std::env::var(name.to_ascii_lowercase()))
            .ok()
    };
    match variable("HTTPS_PROXY").map(ProxyConfig::https) {
        Some(Ok(proxy)) => proxy.no_proxy(variable("NO_PROXY").unwrap_or_default()),
        Some(Err(_)) | None => ProxyConfig::disabled(),
    }
}

async fn check_credentials(sdk: &SdkConfig, describe: &str) -> Result<(), StoreError> {
    let refused = |what: String| {
        StoreError::Refused {
        operation: "connect",
        key: describe.to_owned(),
        code: what,
        advice: "; they come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), the AWS profile or the instance's role".to_owned(),
    }
    };
    let provider = sdk
        .credentials_provider()
        .ok_or_else(|| refused("no credentials are set up".to_owned()))?;
    match provider.provide_credentials().await {
        Ok(_) => Ok(()),
        Err(error) => Err(refused(format!("no credentials: {}", chain(&error)))),
    }
}

/// Signs a streamed body by a digest computed beforehand; by itself the SDK signs only bodies that lie in one buffer.
#[derive(Debug)]
struct SignedPayload(String);

impl Intercept for SignedPayload {
    fn name(&self) -> &'static str {
        "SignedPayload"
    }

    fn modify_before_signing(
        &self,
        _context: &mut BeforeTransmitInterceptorContextMut<'_>,
        _components: &RuntimeComponents,
        config: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let digest = PayloadSigningOverride::Precomputed(self.0.clone());
        config.interceptor_state().store_put(digest);
        Ok(())
    }
}

/// Keeps an answer's `Date`, which the SDK does not hand out.
#[derive(Debug)]
struct AnswerDate(Arc<OnceLock<DateTime>>);

impl Intercept for AnswerDate {
    fn name(&self) -> &'static str {
        "AnswerDate"
    }

    fn read_before_deserialization(
        &self,
        context: &BeforeDeserializationInterceptorContextRef<'_>,
        _components: &RuntimeComponents,
        _config: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let date = context.response().headers().get("date");
        if let Some(date) = date.and_then(|t| DateTime::from_str(t, DateTimeFormat::HttpDate).ok())
        {
            let _first_one_stays = self.0.set(date);
        }
        Ok(())
    }
}

/// A part's buffers as a request body. Counts what it hands over, so that a stall can be told from a slow line.
struct PartStream {
    pieces: VecDeque<Bytes>,
    remaining: u64,
    handed_over: Arc<AtomicU64>,
}

impl PartStream {
    fn new(pieces: Vec<Bytes>, len: u64, handed_over: Arc<AtomicU64>) -> Self {
        Self {
            pieces: pieces.into(),
            remaining: len,
            handed_over,
        }
    }
}

impl Body for PartStream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        while self.pieces.front().is_some_and(Bytes::is_empty) {
            self.pieces.pop_front();
        }
        let Some(piece) = self.pieces.front_mut() else {
            return Poll::Ready(None);
        };
        let data = piece.split_to(piece.len().min(BODY_FRAME_LEN));
        let len = data.len() as u64;
        self.remaining -= len;
        self.handed_over.fetch_add(len, Ordering::Relaxed);
        Poll::Ready(Some(Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        self.remaining == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.remaining)
    }
}
