//! What the log says of an S3 request, beside its number and its times. Cannot fail.

use serde::Serialize;

use super::op::Target;

/// One line of the log; `docs/testkit.md` says what each member means.
#[derive(Serialize)]
pub(super) struct Line {
    op: &'static str,
    method: String,
    /// Requests on one connection have the same.
    pub(super) client_port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    bucket: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    part: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    upload: Option<String>,
    /// Status of the answer that was sent; 0 when none was.
    pub(super) status: u16,
    /// Status that the store gave, where a fault then sent something else or nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) applied: Option<u16>,
    pub(super) bytes_in: u64,
    pub(super) bytes_out: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) if_none_match: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) range: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fault: Option<usize>,
}

impl Line {
    /// Of a request that has just arrived.
    pub(super) fn new(method: &http::Method, target: &Target) -> Self {
        Self {
            op: target.op,
            method: method.as_str().to_owned(),
            client_port: 0,
            bucket: target.bucket.clone(),
            key: target.key.clone(),
            part: target.part,
            upload: target.upload.clone(),
            status: 0,
            applied: None,
            bytes_in: 0,
            bytes_out: 0,
            if_none_match: None,
            range: None,
            fault: None,
        }
    }
}
