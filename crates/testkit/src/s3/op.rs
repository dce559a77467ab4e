//! Which S3 operation a request is, from its method, path and query alone, so that requests which the S3 layer would refuse (bad
//! signature, bad XML) can be counted, made to fail and logged under their own name too. Path style only. Cannot fail: what is not
//! recognised is `Unknown`.

use http::{HeaderMap, Method, Uri};
use percent_encoding::percent_decode_str;

/// Every name that [`Target::op`] can be, but `Unknown`.
pub(super) const NAMES: [&str; 25] = [
    "ListBuckets",
    "GetBucketLocation",
    "ListMultipartUploads",
    "ListObjectVersions",
    "GetBucketVersioning",
    "ListObjectsV2",
    "ListObjects",
    "HeadBucket",
    "CreateBucket",
    "DeleteBucket",
    "DeleteObjects",
    "ListParts",
    "GetObjectAttributes",
    "GetObjectTagging",
    "GetObject",
    "HeadObject",
    "UploadPartCopy",
    "UploadPart",
    "CopyObject",
    "PutObjectTagging",
    "PutObject",
    "CreateMultipartUpload",
    "CompleteMultipartUpload",
    "AbortMultipartUpload",
    "DeleteObject",
];

/// What a request is aimed at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    /// Name of the operation as S3 spells it, or `Unknown`.
    pub(super) op: &'static str,
    pub(super) bucket: Option<String>,
    pub(super) key: Option<String>,
    /// Part number of UploadPart, as sent; not checked against any limit here.
    pub(super) part: Option<u32>,
    /// Multipart upload id.
    pub(super) upload: Option<String>,
}

impl Target {
    /// Classifies a request.
    pub(super) fn of(method: &Method, uri: &Uri, headers: &HeaderMap) -> Self {
        let path = uri.path().strip_prefix('/').unwrap_or(uri.path());
        let (bucket, key) = match path.split_once('/') {
            Some((bucket, key)) => (bucket, key),
            None => (path, ""),
        };
        let query = Query(uri.query().unwrap_or(""));
        let copy = headers.contains_key("x-amz-copy-source");
        let op = if bucket.is_empty() {
            service_op(method)
        } else if key.is_empty() {
            bucket_op(method, &query)
        } else {
            object_op(method, &query, copy)
        };
        Self {
            op,
            bucket: decoded(bucket),
            key: decoded(key),
            part: query.get("partNumber").and_then(|text| text.parse().ok()),
            upload: query.get("uploadId").and_then(decoded),
        }
    }
}

fn decoded(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| percent_decode_str(text).decode_utf8_lossy().into_owned())
}

fn service_op(method: &Method) -> &'static str {
    if method == Method::GET {
        "ListBuckets"
    } else {
        "Unknown"
    }
}

fn bucket_op(method: &Method, query: &Query<'_>) -> &'static str {
    match *method {
        Method::GET if query.has("location") => "GetBucketLocation",
        Method::GET if query.has("uploads") => "ListMultipartUploads",
        Method::GET if query.has("versions") => "ListObjectVersions",
        Method::GET if query.has("versioning") => "GetBucketVersioning",
        Method::GET if query.get("list-type") == Some("2") => "ListObjectsV2",
        Method::GET => "ListObjects",
        Method::HEAD => "HeadBucket",
        Method::PUT => "CreateBucket",
        Method::DELETE => "DeleteBucket",
        Method::POST if query.has("delete") => "DeleteObjects",
        _ => "Unknown",
    }
}

fn object_op(method: &Method, query: &Query<'_>, copy: bool) -> &'static str {
    let part = query.has("partNumber") && query.has("uploadId");
    match *method {
        Method::GET if query.has("uploadId") => "ListParts",
        Method::GET if query.has("attributes") => "GetObjectAttributes",
        Method::GET if query.has("tagging") => "GetObjectTagging",
        Method::GET => "GetObject",
        Method::HEAD => "HeadObject",
        Method::PUT if part && copy => "UploadPartCopy",
        Method::PUT if part => "UploadPart",
        Method::PUT if copy => "CopyObject",
        Method::PUT if query.has("tagging") => "PutObjectTagging",
        Method::PUT => "PutObject",
        Method::POST if query.has("uploads") => "CreateMultipartUpload",
        Method::POST if query.has("uploadId") => "CompleteMultipartUpload",
        Method::DELETE if query.has("uploadId") => "AbortMultipartUpload",
        Method::DELETE => "DeleteObject",
        _ => "Unknown",
    }
}

struct Query<'a>(&'a str);

impl<'a> Query<'a> {
    fn get(&self, name: &str) -> Option<&'a str> {
        self.0.split('&').find_map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (key == name).then_some(value)
        })
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(method: Method, uri: &str) -> Target {
        Target::of(&method, &uri.parse().expect("uri"), &HeaderMap::new())
    }

    #[test]
    fn operations_are_told_apart() {
        let cases = [
            (Method::GET, "/", "ListBuckets"),
            (Method::GET, "/b?list-type=2&prefix=x", "ListObjectsV2"),
            (Method::GET, "/b/?uploads", "ListMultipartUploads"),
            (Method::PUT, "/b", "CreateBucket"),
            (Method::PUT, "/b/k?x-id=PutObject", "PutObject"),
            (
                Method::PUT,
                "/b/k?x-id=UploadPart&partNumber=3&uploadId=u",
                "UploadPart",
            ),
            (Method::POST, "/b/k?uploads", "CreateMultipartUpload"),
            (Method::POST, "/b/k?uploadId=u", "CompleteMultipartUpload"),
            (Method::DELETE, "/b/k?uploadId=u", "AbortMultipartUpload"),
            (Method::GET, "/b/k?uploadId=u", "ListParts"),
            (Method::GET, "/b/k?x-id=GetObject", "GetObject"),
            (Method::HEAD, "/b/k", "HeadObject"),
            (Method::POST, "/b?delete", "DeleteObjects"),
            (Method::PATCH, "/b/k", "Unknown"),
        ];
        for (method, uri, op) in cases {
            assert_eq!(target(method, uri).op, op, "{uri}");
            assert!(NAMES.contains(&op) || op == "Unknown");
        }
    }

    #[test]
    fn names_are_decoded() {
        let target = target(Method::PUT, "/b/a%20b/c%FF?partNumber=12&uploadId=u%2F1");
        assert_eq!(target.bucket.as_deref(), Some("b"));
        assert_eq!(target.key.as_deref(), Some("a b/c\u{fffd}"));
        assert_eq!(target.part, Some(12));
        assert_eq!(target.upload.as_deref(), Some("u/1"));
    }
}
