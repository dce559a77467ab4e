//! What a failed request means: one place that sorts the SDK's errors by what the caller does about them.
//!
//! In: an error of the SDK. Out: a [`Fault`] with the [`StoreError`] that stands for it, and for a refusal the key or flag that helps.

use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;

use super::S3Store;
use super::habits::Wants;
use crate::error::one_line;
use crate::store::StoreError;

/// A sorted failure, with what the store said for the few callers that look closer.
pub(super) struct Fault {
    pub(super) status: Option<u16>,
    pub(super) code: String,
    /// How the store would have the request.
    pub(super) wants: Option<Wants>,
    pub(super) error: StoreError,
}

impl From<Box<Fault>> for StoreError {
    fn from(fault: Box<Fault>) -> Self {
        fault.error
    }
}

/// A passing fault that we saw ourselves.
pub(super) fn transient(operation: &'static str, key: &str, what: String) -> Box<Fault> {
    let key = key.to_owned();
    Box::new(Fault {
        status: None,
        code: String::new(),
        wants: None,
        error: StoreError::Transient {
            operation,
            key,
            what,
            source: None,
        },
    })
}

/// What an error says, in the store's own words.
struct Said {
    status: Option<u16>,
    /// The store's code; empty without an error document.
    code: String,
    /// Code and message, or the status; empty without an answer.
    text: String,
    /// Where the bucket is, when the store tells.
    bucket_region: Option<String>,
}

impl Said {
    fn by<E: ProvideErrorMetadata>(error: &SdkError<E, HttpResponse>) -> Self {
        let response = error.raw_response();
        let status = response.map(|response| response.status().as_u16());
        let header = |name| response.and_then(|response| response.headers().get(name));
        let service = error.as_service_error();
        let code = service
            .and_then(ProvideErrorMetadata::code)
            .unwrap_or_default();
        let message = service
            .and_then(ProvideErrorMetadata::message)
            .unwrap_or_default();
        let text = match (code, message, status) {
            ("", _, Some(status)) => format!("status {status}"),
            ("", _, None) => String::new(),
            (code, "", _) => code.to_owned(),
            (code, message, _) => format!("{code}: {message}"),
        };
        Self {
            status,
            code: code.to_owned(),
            text,
            bucket_region: header("x-amz-bucket-region").map(str::to_owned),
        }
    }

    /// What a refusal with these words is cured with.
    fn wants(&self) -> Option<Wants> {
        let lower = self.text.to_ascii_lowercase();
        let has = |words: &[&str]| words.iter().any(|word| lower.contains(word));
        if has(&[
            "content-sha256",
            "contentsha256",
            "unsigned-payload",
            "unsigned payload",
        ]) {
            Some(Wants::SignedBodies)
        } else if has(&["checksum", "trailer", "aws-chunked", "missingcontentlength"]) {
            Some(Wants::OtherChecksum)
        } else {
            None
        }
    }
}

impl S3Store {
    /// Sorts a failure by what the caller does about it.
    pub(super) fn sort<E>(
        &self,
        operation: &'static str,
        key: &str,
        error: SdkError<E, HttpResponse>,
    ) -> Fault
    where
        E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
    {
        let said = Said::by(&error);
        let passing = match Passing::of_error(operation, &error, &said) {
            Passing::No if self.credentials.are_renewed_after(&said.code) => Passing::Yes,
            // The answer itself has put the time of the next try right.
            Passing::No if said.code == "RequestTimeTooSkewed" && self.clock.is_put_right() => {
                Passing::Yes
            }
            passing => passing,
        };
        let wants = said.wants();
        let key = key.to_owned();
        let sorted = match passing {
            Passing::SlowDown => StoreError::SlowDown {
                operation,
                key,
                code: said.text,
            },
            Passing::Yes => StoreError::Transient {
                operation,
                key,
                what: self.seen(&error, &said),
                // An error document is told in full by then; the SDK would tell it again in its own form.
                source: match error {
                    SdkError::ServiceError(_) => None,
                    error => error.into_source().ok(),
                },
            },
            Passing::NotFound => StoreError::NotFound { operation, key },
            Passing::Changed => StoreError::Mismatch {
                operation,
                key,
                what: said.text,
            },
            Passing::No => match error {
                SdkError::ConstructionFailure(_) => StoreError::Refused {
                    operation,
                    key,
                    code: one_line(&error),
                    advice: String::new(),
                },
                _ => StoreError::Refused {
                    operation,
                    key,
                    advice: self.advice(operation, &said),
                    code: said.text,
                },
            },
        };
        Fault {
            status: said.status,
            wants: wants.filter(|_| matches!(sorted, StoreError::Refused { .. })),
            code: said.code,
            error: sorted,
        }
    }

    /// A passing fault in words.
    fn seen<E>(&self, error: &SdkError<E, HttpResponse>, said: &Said) -> String {
        match error {
            SdkError::TimeoutError(_) => "timed out".to_owned(),
            SdkError::DispatchFailure(failure) => {
                let detail = failure.as_connector_error().map(|error| one_line(error));
                let is_name_unknown = detail.is_some_and(|text| text.contains("dns error"));
                let advice = if is_name_unknown && self.custom_endpoint && !self.path_style {
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
                said.status.unwrap_or(0)
            ),
            _ => said.text.clone(),
        }
    }

    /// The flag or key that helps with a refusal, or nothing.
    fn advice(&self, operation: &str, said: &Said) -> String {
        let lower = said.text.to_ascii_lowercase();
        let has = |words: &[&str]| words.iter().any(|word| lower.contains(word));
        if let Some(there) = said
            .bucket_region
            .as_deref()
            .filter(|there| *there != self.region)
        {
            return format!(
                "; the bucket is in {there}, we asked in {}: set store.region = \"{there}\"",
                self.region
            );
        }
        if matches!(said.status, Some(301 | 307)) || has(&["authorizationheadermalformed"]) {
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
            return "; the time of the request is too far from the store's: see this machine's clock (chrony, systemd-timesyncd)".to_owned();
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
        match said.wants() {
            Some(Wants::SignedBodies) => {
                return "; a store that wants signed bodies needs store.sign_payload = true"
                    .to_owned();
            }
            Some(Wants::OtherChecksum) => {
                return format!(
                    "; a store that does not take {} needs store.checksum = \"auto\", which finds out what it takes, or store.checksum = \"none\"",
                    self.habits.now().checksum.name()
                );
            }
            None => {}
        }
        if has(&["conditional", "if-none-match", "notimplemented"]) && operation == "PutObject" {
            return "; the log needs a store that honours If-None-Match".to_owned();
        }
        if said.status == Some(403) {
            let right = match operation {
                "GetObject" | "HeadObject" => "s3:GetObject",
                "DeleteObject" => "s3:DeleteObject",
                "ListObjectsV2" => "s3:ListBucket",
                "ListMultipartUploads" => "s3:ListBucketMultipartUploads",
                "AbortMultipartUpload" => "s3:AbortMultipartUpload",
                _ => "s3:PutObject",
            };
            return format!(
                "; the credentials lack {right} for s3://{}/{}, or the bucket wants more of a request (store.sse, store.request_payer)",
                self.bucket, self.prefix
            );
        }
        String::new()
    }
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
    fn of_error<E>(operation: &str, error: &SdkError<E, HttpResponse>, said: &Said) -> Self {
        match (error, operation, said.code.as_str()) {
            (SdkError::ConstructionFailure(_), _, _) => Self::No,
            // A 404 that was cut is not the store's word.
            (SdkError::ResponseError(_), _, _) if said.status == Some(404) => Self::Yes,
            // The parts were checked as they came; the whole is not what we think it is, and stays so.
            (_, "CompleteMultipartUpload", "BadDigest") => Self::Changed,
            (_, _, code) => Self::of(
                said.status,
                code,
                matches!(error, SdkError::ServiceError(_)),
            ),
        }
    }

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
