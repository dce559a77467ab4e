//! What the SDK does not offer by itself, or not for all requests at once, hooked into them: a signature over a digest that is computed beforehand, the answer's `Date`, headers that the bucket's owner wants.
//!
//! In: a request about to be signed, or an answer about to be read. Out: the same, with one thing set or kept. Nothing here can fail.

use std::sync::{Arc, OnceLock};

use aws_runtime::auth::PayloadSigningOverride;
use aws_sdk_s3::config::interceptors::{
    BeforeDeserializationInterceptorContextRef, BeforeTransmitInterceptorContextMut,
};
use aws_sdk_s3::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_s3::error::BoxError;
use aws_sdk_s3::primitives::{DateTime, DateTimeFormat};
use aws_smithy_runtime_api::client::orchestrator::Metadata;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use md5::{Digest, Md5};

use crate::config::{BucketConfig, Sse};

/// Signs a streamed body by a digest computed beforehand; by itself the SDK signs only bodies that lie in one buffer.
#[derive(Debug)]
pub(super) struct SignedPayload(pub(super) String);

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

/// An answer's `Date`.
pub(super) fn date_of(
    context: &BeforeDeserializationInterceptorContextRef<'_>,
) -> Option<DateTime> {
    let date = context.response().headers().get("date")?;
    DateTime::from_str(date, DateTimeFormat::HttpDate).ok()
}

/// Keeps an answer's `Date`, which the SDK does not hand out.
#[derive(Debug)]
pub(super) struct AnswerDate(pub(super) Arc<OnceLock<DateTime>>);

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
        if let Some(date) = date_of(context) {
            let _first_one_stays = self.0.set(date);
        }
        Ok(())
    }
}

/// Headers that the configuration wants on every request, on those that make an object, and on those that touch one.
#[derive(Debug, Clone)]
pub(super) struct ExtraHeaders {
    all: Vec<(&'static str, String)>,
    making: Vec<(&'static str, String)>,
    /// The key of SSE-C, which is not printed.
    touching: Secret,
}

#[derive(Clone, Default)]
struct Secret(Vec<(&'static str, String)>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} headers", self.0.len())
    }
}

/// Requests that make an object.
const MAKING: [&str; 2] = ["PutObject", "CreateMultipartUpload"];
/// Those that need the key of one that is encrypted with it.
const TOUCHING: [&str; 6] = [
    "PutObject",
    "CreateMultipartUpload",
    "UploadPart",
    "CompleteMultipartUpload",
    "GetObject",
    "HeadObject",
];

impl ExtraHeaders {
    /// As configured; `customer_key` has the bytes of the file that [`Sse::Customer`] names.
    pub(super) fn new(config: &BucketConfig, customer_key: Option<[u8; 32]>) -> Self {
        let mut all = Vec::new();
        if config.request_payer {
            all.push(("x-amz-request-payer", "requester".to_owned()));
        }
        let mut making = Vec::new();
        match &config.sse {
            Some(Sse::S3) => making.push(("x-amz-server-side-encryption", "AES256".to_owned())),
            Some(Sse::Kms(key)) => {
                making.push(("x-amz-server-side-encryption", "aws:kms".to_owned()));
                let id = "x-amz-server-side-encryption-aws-kms-key-id";
                making.extend(key.clone().map(|key| (id, key)));
            }
            Some(Sse::Customer(_)) | None => {}
        }
        making.extend(
            config
                .storage_class
                .clone()
                .map(|class| ("x-amz-storage-class", class)),
        );
        if !config.tags.is_empty() {
            let mut tags = url::form_urlencoded::Serializer::new(String::new());
            tags.extend_pairs(&config.tags);
            making.push(("x-amz-tagging", tags.finish()));
        }
        let touching = customer_key.map(|key| {
            let md5: [u8; 16] = Md5::digest(key).into();
            let base64 = |bytes: &[u8]| STANDARD.encode(bytes);
            vec![
                (
                    "x-amz-server-side-encryption-customer-algorithm",
                    "AES256".to_owned(),
                ),
                ("x-amz-server-side-encryption-customer-key", base64(&key)),
                (
                    "x-amz-server-side-encryption-customer-key-md5",
                    base64(&md5),
                ),
            ]
        });
        Self {
            all,
            making,
            touching: Secret(touching.unwrap_or_default()),
        }
    }

    fn of(&self, operation: &str) -> impl Iterator<Item = &(&'static str, String)> {
        let making = self
            .making
            .iter()
            .filter(move |_| MAKING.contains(&operation));
        let touching = self
            .touching
            .0
            .iter()
            .filter(move |_| TOUCHING.contains(&operation));
        self.all.iter().chain(making).chain(touching)
    }
}

impl Intercept for ExtraHeaders {
    fn name(&self) -> &'static str {
        "ExtraHeaders"
    }

    fn modify_before_signing(
        &self,
        context: &mut BeforeTransmitInterceptorContextMut<'_>,
        _components: &RuntimeComponents,
        config: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let operation = config.load::<Metadata>().map(|it| it.name().to_owned());
        let headers = context.request_mut().headers_mut();
        for (name, value) in self.of(operation.as_deref().unwrap_or_default()) {
            headers.try_insert(*name, value.clone())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_go_where_they_belong_and_a_key_is_not_printed() {
        let config = BucketConfig {
            sse: Some(Sse::Kms(Some("arn:aws:kms:key".to_owned()))),
            storage_class: Some("STANDARD_IA".to_owned()),
            tags: [("team", "a b"), ("cost", "1&2")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
            request_payer: true,
            ..BucketConfig::default()
        };
        let extra = ExtraHeaders::new(&config, None);
        let of = |operation: &str| -> Vec<String> {
            let headers = extra.of(operation);
            headers
                .map(|(name, value)| format!("{name}: {value}"))
                .collect()
        };
        let payer = "x-amz-request-payer: requester";
        assert_eq!(
            of("CreateMultipartUpload"),
            [
                payer,
                "x-amz-server-side-encryption: aws:kms",
                "x-amz-server-side-encryption-aws-kms-key-id: arn:aws:kms:key",
                "x-amz-storage-class: STANDARD_IA",
                "x-amz-tagging: cost=1%262&team=a+b",
            ]
        );
        for operation in [
            "UploadPart",
            "GetObject",
            "ListMultipartUploads",
            "DeleteObject",
        ] {
            assert_eq!(of(operation), [payer], "{operation}");
        }
        let customer = ExtraHeaders::new(&BucketConfig::default(), Some([7; 32]));
        assert_eq!(customer.of("UploadPart").count(), 3);
        assert_eq!(customer.of("ListObjectsV2").count(), 0);
        let printed = format!("{customer:?}");
        assert!(!printed.contains("BwcHBw"), "{printed}");
    }
}
