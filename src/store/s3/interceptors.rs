//! What the SDK does not offer by itself, hooked into its requests: a signature over a digest that is computed beforehand, and the answer's `Date`.
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
        let date = context.response().headers().get("date");
        if let Some(date) = date.and_then(|t| DateTime::from_str(t, DateTimeFormat::HttpDate).ok())
        {
            let _first_one_stays = self.0.set(date);
        }
        Ok(())
    }
}
