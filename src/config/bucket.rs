//! What requests and objects of a bucket carry besides, and the way to it: the second half of `[store]`.
//!
//! In: the table as written. Out: checked values. What can fail: a value out of range, keys that exclude each other; the error names them.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use super::raw::RawStore;
use super::value::Setting;
use super::{ConfigError, StorePlace};

/// Most tags of an object, and most characters of a tag's name and value (Amazon S3, "Object tagging").
const TAGS_MAX: usize = 10;
const TAG_NAME_LEN_MAX: usize = 128;
const TAG_VALUE_LEN_MAX: usize = 256;

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BucketConfig {
    /// What the store is to encrypt objects with; `None` is up to the bucket.
    pub sse: Option<Sse>,
    /// Storage class of objects; `None` is the bucket's.
    pub storage_class: Option<String>,
    /// Tags of objects.
    pub tags: BTreeMap<String, String>,
    /// The requester pays.
    pub request_payer: bool,
    /// File of certificates (PEM) that are trusted instead of the system's.
    pub ca_bundle: Option<PathBuf>,
    /// Proxy; `None` takes it from the environment.
    pub proxy: Option<String>,
    /// Hosts that are reached without it.
    pub no_proxy: Option<String>,
    /// Addresses of hosts, by their names in lower case. They are not asked for elsewhere.
    pub resolve: BTreeMap<String, IpAddr>,
}

/// Server-side encryption: the store does it, and whoever may read the object sees it plain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sse {
    /// With the store's own keys (SSE-S3).
    S3,
    /// With a key of the key management service (SSE-KMS); `None` is the bucket's.
    Kms(Option<String>),
    /// With a key that goes with every request and is kept by nobody (SSE-C); the file has its 32 bytes.
    Customer(PathBuf),
}

impl BucketConfig {
    pub(super) fn resolve(
        raw: &RawStore,
        place: &StorePlace,
        endpoint: Option<&url::Url>,
    ) -> Result<Self, ConfigError> {
        let bucket = Self {
            sse: sse(raw, endpoint)?,
            storage_class: storage_class(raw)?,
            tags: tags(raw)?,
            request_payer: raw.request_payer.unwrap_or(false),
            ca_bundle: path("store.ca_bundle", raw.ca_bundle.as_deref())?,
            proxy: proxy(raw)?,
            no_proxy: raw.no_proxy.clone(),
            resolve: resolve(raw)?,
        };
        if matches!(place, StorePlace::Directory(_)) && bucket != Self::default() {
            return Err(ConfigError::Conflict {
                first: "sse, storage_class, tags, request_payer, ca_bundle, proxy or resolve of [store]"
                    .to_owned(),
                second: "store.url = \"file://…\"".to_owned(),
                why: "a directory has none of them",
            });
        }
        Ok(bucket)
    }
}

fn path(key: &'static str, written: Option<&str>) -> Result<Option<PathBuf>, ConfigError> {
    let written = Setting::file(key, written);
    written.map(|text| text.file_path()).transpose()
}

fn sse(raw: &RawStore, endpoint: Option<&url::Url>) -> Result<Option<Sse>, ConfigError> {
    let Some(setting) = Setting::file("store.sse", raw.sse.as_deref()) else {
        return Ok(None);
    };
    let invalid = |expected: &str| setting.invalid(expected);
    let (kind, key) = match setting.value.split_once(':') {
        Some((kind, key)) => (kind, Some(key)),
        None => (setting.value.as_str(), None),
    };
    match (kind, key) {
        ("s3", None) => Ok(Some(Sse::S3)),
        ("kms", None) => Ok(Some(Sse::Kms(None))),
        ("kms", Some(key)) if !key.is_empty() && key.bytes().all(|it| it.is_ascii_graphic()) => {
            Ok(Some(Sse::Kms(Some(key.to_owned()))))
        }
        ("customer", Some(path)) if path.starts_with('/') => {
            if endpoint.is_some_and(|url| url.scheme() == "http") {
                return Err(invalid(
                    "an https:// endpoint (store.endpoint): the key goes with every request",
                ));
            }
            Ok(Some(Sse::Customer(PathBuf::from(path))))
        }
        _ => Err(invalid(
            "\"s3\", \"kms\", \"kms:\" and the id or ARN of a key, or \"customer:\" and the absolute path of a file with one",
        )),
    }
}

fn storage_class(raw: &RawStore) -> Result<Option<String>, ConfigError> {
    let Some(class) = Setting::file("store.storage_class", raw.storage_class.as_deref()) else {
        return Ok(None);
    };
    let is_name = (1..=64).contains(&class.value.len())
        && class
            .value
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-');
    // What has to be thawed first cannot be restored when the job starts.
    match class.value.as_str() {
        "GLACIER" | "DEEP_ARCHIVE" => {
            Err(class.invalid("a class whose objects can be read at once"))
        }
        _ if is_name => Ok(Some(class.value)),
        _ => Err(class.invalid("a storage class such as \"STANDARD_IA\"")),
    }
}

fn tags(raw: &RawStore) -> Result<BTreeMap<String, String>, ConfigError> {
    let tags = raw.tags.clone().unwrap_or_default();
    let invalid = |value: String, expected: String| ConfigError::Invalid {
        name: "store.tags".to_owned(),
        value,
        expected,
    };
    if tags.len() > TAGS_MAX {
        return Err(invalid(
            format!("{} tags", tags.len()),
            format!("expected at most {TAGS_MAX}"),
        ));
    }
    for (name, value) in &tags {
        let (name_len, value_len) = (name.chars().count(), value.chars().count());
        if !(1..=TAG_NAME_LEN_MAX).contains(&name_len) || value_len > TAG_VALUE_LEN_MAX {
            return Err(invalid(
                name.chars().take(200).collect(),
                format!(
                    "expected a name of 1 to {TAG_NAME_LEN_MAX} characters, and a value of at most {TAG_VALUE_LEN_MAX}"
                ),
            ));
        }
    }
    Ok(tags)
}

fn resolve(raw: &RawStore) -> Result<BTreeMap<String, IpAddr>, ConfigError> {
    let written = raw.resolve.iter().flatten();
    let pairs = written.map(|(host, address)| {
        let is_name = (1..=253).contains(&host.len())
            && host
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'));
        match address.parse() {
            Ok(address) if is_name => Ok((host.to_ascii_lowercase(), address)),
            _ => Err(ConfigError::Invalid {
                name: format!("store.resolve.{host:?}"),
                value: address.clone(),
                expected: "expected the name of a host, and its address: { \"minio.corp\" = \"10.0.0.7\" }".to_owned(),
            }),
        }
    });
    pairs.collect()
}

fn proxy(raw: &RawStore) -> Result<Option<String>, ConfigError> {
    let proxy = Setting::file("store.proxy", raw.proxy.as_deref());
    let proxy = proxy.map(|text| match text.value.as_str() {
        // None at all, whatever the environment says.
        "none" => Ok(text.value.clone()),
        _ => text.http_url().map(|url| url.to_string()),
    });
    proxy.transpose()
}
