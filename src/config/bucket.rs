//! What requests and objects of a bucket carry besides, and the way to it: the second half of `[store]`.
//!
//! In: the table as written. Out: checked values. What can fail: a value out of range, keys that exclude each other; the error names them.

use std::collections::BTreeMap;
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
        };
        if matches!(place, StorePlace::Directory(_)) && bucket != Self::default() {
            return Err(ConfigError::Conflict {
                first: "sse, storage_class, tags, request_payer, ca_bundle or proxy of [store]"
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
    #[derive(Clone, Copy)]
    enum Kind {
        S3,
        Kms,
        Customer,
    }
    let setting = Setting::file("store.sse", raw.sse.as_deref());
    let kinds = [
        ("s3", Kind::S3),
        ("kms", Kind::Kms),
        ("customer", Kind::Customer),
    ];
    let found = setting.as_ref().map(|it| it.word(&kinds)).transpose()?;
    let kms_key = Setting::file("store.sse_kms_key", raw.sse_kms_key.as_deref());
    if let Some(key) = &kms_key
        && (key.value.is_empty() || !key.value.bytes().all(|byte| byte.is_ascii_graphic()))
    {
        return Err(key.invalid("the id or ARN of a key"));
    }
    let file = path("store.sse_key_file", raw.sse_key_file.as_deref())?;
    match (found, setting) {
        (Some(Kind::Kms), _) if file.is_none() => Ok(Some(Sse::Kms(kms_key.map(|it| it.value)))),
        (Some(Kind::S3), _) if file.is_none() && kms_key.is_none() => Ok(Some(Sse::S3)),
        (Some(Kind::Customer), Some(setting)) if kms_key.is_none() => {
            if endpoint.is_some_and(|url| url.scheme() == "http") {
                return Err(
                    setting.invalid("an https:// endpoint: the key goes with every request")
                );
            }
            let file =
                file.ok_or_else(|| setting.invalid("a key with it: set store.sse_key_file"))?;
            Ok(Some(Sse::Customer(file)))
        }
        (None, _) if kms_key.is_none() && file.is_none() => Ok(None),
        (_, setting) => Err(ConfigError::Conflict {
            first: setting.map_or("no store.sse".to_owned(), |it| it.to_string()),
            second: match kms_key {
                Some(key) => key.to_string(),
                None => "store.sse_key_file".to_owned(),
            },
            why: "sse_kms_key goes with sse = \"kms\", sse_key_file with sse = \"customer\"",
        }),
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

fn proxy(raw: &RawStore) -> Result<Option<String>, ConfigError> {
    let proxy = Setting::file("store.proxy", raw.proxy.as_deref());
    let proxy = proxy.map(|text| match text.value.as_str() {
        // None at all, whatever the environment says.
        "none" => Ok(text.value.clone()),
        _ => text.http_url().map(|url| url.to_string()),
    });
    proxy.transpose()
}
