//! `--null`: a server that costs as little as can be, so that an upload or a restore measures the client.
//!
//! The store swallows bodies ([`super::store::Settings::swallow`]); this file takes the signature off each request, unread, so that the S3
//! layer neither checks it nor takes a SHA-256 of the body.

use http::{Request, Response, StatusCode};
use s3s::Body;

use super::op::Target;

/// Takes the signature off. A small object in chunked framing would be kept with its framing, so it is refused with 501,
/// which is then the answer.
pub(super) fn unsign(req: &mut Request<Body>, target: &Target) -> Option<Response<Body>> {
    let headers = req.headers_mut();
    headers.remove(http::header::AUTHORIZATION);
    let payload = headers.remove("x-amz-content-sha256");
    let chunked = payload.is_some_and(|value| value.as_bytes().starts_with(b"STREAMING-"));
    if chunked && target.op == "PutObject" {
        let body = "<Error><Code>NotImplemented</Code><Message>testkit s3 --null takes PutObject without aws-chunked framing only\
                    </Message></Error>";
        let mut response = Response::new(Body::from(body.to_owned()));
        *response.status_mut() = StatusCode::NOT_IMPLEMENTED;
        return Some(response);
    }
    None
}
