//! Where images are kept: the contract that every store honours, whoever makes it.
//!
//! In: keys and bytes. Out: bytes, and receipts for what was stored. What can fail: [`StoreError`], sorted by what the caller does about
//! it. The retry decorator ([`retry::Retrying`]) is the only place that tries again; an implementation answers once.

pub mod epochs;
#[cfg(test)]
pub(crate) mod faulty;
pub mod file;
pub mod memory;
pub mod null;
pub mod retry;
pub mod s3;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt};
use tokio_util::sync::CancellationToken;

use self::epochs::Epochs;
use self::file::FileStore;
use self::retry::{RetryPolicy, Retrying};
use self::s3::S3Store;
use crate::codec::{Crc32, Crc64};
use crate::config::{JobName, StoreConfig, StorePlace};
use crate::progress::Meter;

/// Least length of every part but the last, in bytes. S3 refuses to complete an upload with a shorter one.
pub const PART_LEN_MIN: u64 = 5 * 1024 * 1024;

/// A key relative to the store's prefix, for instance `job/log/00000001.json`. Never starts or ends with `/`, has no empty, `.` or `..`
/// segment and no control character.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(String);

impl Key {
    /// Longest key in bytes. S3 allows 1024 for the whole, our prefix included.
    pub const LEN_MAX: usize = 1024;

    /// Checks the rules above.
    pub fn new(text: &str) -> Result<Self, BadKey> {
        let bad = |why| BadKey {
            key: text.chars().take(200).collect(),
            why,
        };
        if text.len() > Self::LEN_MAX {
            return Err(bad("is longer than 1024 bytes"));
        }
        if text.chars().any(char::is_control) {
            return Err(bad("has a control character"));
        }
        for segment in text.split('/') {
            match segment {
                "" => return Err(bad("has an empty segment")),
                "." | ".." => return Err(bad("has a `.` or `..` segment")),
                _ => {}
            }
        }
        Ok(Self(text.to_owned()))
    }

    /// The key of something that belongs to a job: `<job>/<relative>`.
    pub fn of_job(job: &JobName, relative: &str) -> Result<Self, BadKey> {
        Self::new(&format!("{}/{relative}", job.as_str()))
    }

    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Text that is no [`Key`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key:?} is no key: it {why}")]
pub struct BadKey {
    /// The text, at most its first 200 characters.
    pub key: String,
    /// Which rule it breaks.
    pub why: &'static str,
}

/// Number of a multipart part, 1 to 10,000.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PartNumber(u16);

impl PartNumber {
    /// The most parts that one upload can have.
    pub const MAX: u16 = 10_000;

    /// `None` unless the number is 1 to [`PartNumber::MAX`].
    pub fn new(number: u64) -> Option<Self> {
        u16::try_from(number)
            .ok()
            .filter(|number| (1..=Self::MAX).contains(number))
            .map(Self)
    }

    /// The number.
    pub fn get(self) -> u16 {
        self.0
    }
}

impl fmt::Display for PartNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The store's name for one multipart upload.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct UploadId(pub String);

/// One part, as a list of buffers that are sent one after the other, never joined. Kept until the store has acknowledged it.
#[derive(Debug, Clone)]
pub struct PartBody {
    /// The bytes, in order.
    pub pieces: Vec<Bytes>,
    /// Sum of the pieces' lengths, in bytes.
    pub len: u64,
    /// CRC64NVME over all of them.
    pub crc64: u64,
}

impl PartBody {
    /// A body of these pieces; `crc64` is the CRC64NVME of all of them in order.
    pub fn new(pieces: Vec<Bytes>, crc64: u64) -> Self {
        let len = pieces.iter().map(|piece| piece.len() as u64).sum();
        Self { pieces, len, crc64 }
    }

    /// Whether the bytes are those that the checksum was taken over.
    pub(crate) fn has_its_checksum(&self) -> bool {
        let sum = self.pieces.iter().fold(Crc64::EMPTY, |sum, piece| {
            sum.combine(Crc64::of(piece), piece.len() as u64)
        });
        sum.value() == self.crc64
    }
}

/// What the store gave for a part; completing the upload needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartReceipt {
    /// Which part.
    pub number: PartNumber,
    /// The store's tag for it, verbatim.
    pub etag: String,
    /// Length of the part in bytes.
    pub len: u64,
    /// CRC64NVME of it.
    pub crc64: u64,
    /// The checksum of 32 bits that went with it, where the store wanted one.
    pub crc32: Option<Crc32>,
}

/// CRC64NVME over all parts, one behind the other.
pub(crate) fn crc64_of_parts(parts: &[PartReceipt]) -> Crc64 {
    parts.iter().fold(Crc64::EMPTY, |sum, part| {
        sum.combine(Crc64::from_value(part.crc64), part.len)
    })
}

/// Why an upload cannot be completed with these parts, in S3's word and in ours. `sent` knows a part's tag and length in bytes; every part but the last has `len_min` bytes.
fn flaw_of_parts<'a>(
    parts: &[PartReceipt],
    len_min: u64,
    sent: impl Fn(PartNumber) -> Option<(&'a str, u64)>,
) -> Option<(&'static str, String)> {
    if parts.is_empty() {
        return Some(("MalformedXML", "no part is named".to_owned()));
    }
    if parts
        .windows(2)
        .any(|pair| pair[0].number >= pair[1].number)
    {
        return Some(("InvalidPartOrder", "parts must ascend".to_owned()));
    }
    parts.iter().enumerate().find_map(|(index, receipt)| {
        let number = receipt.number;
        match sent(number).filter(|(etag, _)| *etag == receipt.etag) {
            None => Some((
                "InvalidPart",
                format!("part {number} is not as it was sent"),
            )),
            Some((_, len)) if len < len_min && index + 1 < parts.len() => Some((
                "EntityTooSmall",
                format!("part {number} has {len} bytes, least {len_min}"),
            )),
            Some(_) => None,
        }
    })
}

/// What a store says about an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Length in bytes.
    pub len: u64,
    /// The store's tag, verbatim, when it gives one.
    pub etag: Option<String>,
    /// CRC64NVME over the full object, when the store keeps one. Absent is neither a failure nor a proof.
    pub crc64: Option<u64>,
    /// Age by the store's own clock (`Date` minus `Last-Modified` of one answer), when it gives both. For `gc`, which leaves alone what is young.
    pub age: Option<Duration>,
}

/// What a store tells of itself, and of who asks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Its clock, in milliseconds since 1970, to the second.
    pub date_ms: Option<u64>,
    /// What requests are signed with.
    pub credentials: Option<Credentials>,
}

/// Where credentials come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The link of the SDK's chain that has them.
    pub source: String,
    /// Until they end; `None` where they do not. What can be renewed is, before that.
    pub seconds_left: Option<u64>,
}

/// Outcome of a conditional write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutOutcome {
    /// The object was created by this call.
    Created,
    /// An object stood there already; it is unchanged.
    AlreadyExists,
}

/// One listed object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Key relative to the store's prefix.
    pub key: Key,
    /// Length in bytes.
    pub len: u64,
}

/// Why a store call failed, sorted by what the caller does about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The object or upload is not there. (A bucket that is not there is [`StoreError::Refused`].)
    #[error("{operation} {key}: not found")]
    NotFound {
        /// The S3 verb.
        operation: &'static str,
        /// Key relative to the store's prefix; of a listing the prefix, or `/`.
        key: String,
    },
    /// The store refused; asking again gives the same answer.
    #[error("{operation} {key}: refused by the store: {code}{advice}")]
    Refused {
        /// The S3 verb.
        operation: &'static str,
        /// Key relative to the store's prefix; of a listing the prefix, or `/`.
        key: String,
        /// The store's own code and message.
        code: String,
        /// Empty, or `; ` and the flag or key that helps.
        advice: String,
    },
    /// The object is locked (Object Lock) and cannot be deleted yet.
    #[error("{operation} {key}: locked until {until}")]
    Locked {
        /// The S3 verb.
        operation: &'static str,
        /// Key relative to the store's prefix.
        key: String,
        /// A date, or that it is held without one.
        until: String,
    },
    /// Another writer has what was to be written to ([`epochs`]). Nothing was written that counts.
    #[error("{operation} {key}: {what}")]
    Fenced {
        /// The S3 verb.
        operation: &'static str,
        /// Key relative to the store's prefix.
        key: String,
        /// Who has it.
        what: String,
    },
    /// What is asked does not go with what stands there, whatever the store says ([`epochs`]). Nothing was written.
    #[error("{operation} {key}: {what}")]
    Unfit {
        /// The S3 verb.
        operation: &'static str,
        /// Key relative to the store's prefix.
        key: String,
        /// What does not fit, and the key or flag that helps.
        what: String,
    },
    /// The store asks for fewer requests.
    #[error("{operation} {key}: the store asks to slow down ({code})")]
    SlowDown {
        /// The S3 verb.
        operation: &'static str,
        /// Key relative to the store's prefix; of a listing the prefix, or `/`.
        key: String,
        /// The store's own code.
        code: String,
    },
    /// A passing fault: connection, timeout, 5xx, a cut body. Asking again may help. Whether a write took effect is not known.
    #[error("{operation} {key}: {what}")]
    Transient {
        /// The S3 verb.
        operation: &'static str,
        /// Key relative to the store's prefix; of a listing the prefix, or `/`.
        key: String,
        /// What was seen.
        what: String,
        /// The transport's error, when there is one.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync + 'static>>,
    },
    /// What is there is not what was stored: other length, other tag, other checksum.
    #[error("{operation} {key}: {what}")]
    Mismatch {
        /// The S3 verb.
        operation: &'static str,
        /// Key relative to the store's prefix; of a listing the prefix, or `/`.
        key: String,
        /// What differs.
        what: String,
    },
    /// Tried more than once, and ended without an answer to rely on. Whether a write took effect is not known.
    #[error("{operation} {key}: gave up after {attempts} attempts in {elapsed:.1?} ({limit})")]
    GaveUp {
        /// The S3 verb.
        operation: &'static str,
        /// Key relative to the store's prefix; of a listing the prefix, or `/`.
        key: String,
        /// Attempts made.
        attempts: u32,
        /// Time since the first.
        elapsed: Duration,
        /// The limit that ended it.
        limit: RetryLimit,
        /// The last attempt's error.
        #[source]
        source: Box<StoreError>,
    },
    /// The caller cancelled.
    #[error("{operation} {key}: cancelled")]
    Cancelled {
        /// The S3 verb.
        operation: &'static str,
        /// Key relative to the store's prefix; of a listing the prefix, or `/`.
        key: String,
    },
}

/// What ended the attempts at one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryLimit {
    /// `store.retry_timeout`, with its value.
    Timeout(Duration),
    /// The deadline of the whole command.
    Deadline,
    /// The store refused after an attempt whose outcome is not known.
    Refusal,
}

impl fmt::Display for RetryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RetryLimit::Timeout(timeout) => write!(f, "store.retry_timeout = {timeout:?}"),
            RetryLimit::Deadline => f.write_str("the deadline has come"),
            RetryLimit::Refusal => f.write_str("the store refused in the end"),
        }
    }
}

/// How messages name the place of a listing: its prefix, or `/` for everything.
fn listing_name(prefix: &str) -> &str {
    match prefix {
        "" => "/",
        prefix => prefix,
    }
}

impl StoreError {
    /// Asking again may help.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            StoreError::SlowDown { .. } | StoreError::Transient { .. }
        )
    }

    /// The object or upload is not there.
    pub fn is_not_found(&self) -> bool {
        matches!(self, StoreError::NotFound { .. })
    }

    /// What is there was read, and is not what was stored; or it is not there.
    pub fn is_about_the_object(&self) -> bool {
        matches!(
            self,
            StoreError::NotFound { .. } | StoreError::Mismatch { .. }
        )
    }

    /// A write that ended so may have taken effect.
    pub fn is_outcome_unknown(&self) -> bool {
        matches!(
            self,
            StoreError::SlowDown { .. }
                | StoreError::Transient { .. }
                | StoreError::GaveUp { .. }
                | StoreError::Cancelled { .. }
        )
    }
}

/// How long one request is tried again of several that are one to the caller, who tries all of them again.
const EACH_OF_SEVERAL: Duration = Duration::from_secs(2);

/// The configured store behind its retries. `cancel` ends its calls, `meter` counts what is tried again.
///
/// # Errors
/// Those of [`S3Store::connect`], where no request is made to the store itself, and of [`FileStore::open`].
pub async fn open(
    config: &StoreConfig,
    cancel: CancellationToken,
    meter: Arc<Meter>,
) -> Result<Retrying<dyn Store>, StoreError> {
    let inner: Arc<dyn Store> = match &config.place {
        StorePlace::Bucket { bucket, prefix } => {
            Arc::new(S3Store::connect(config, bucket, prefix).await?)
        }
        StorePlace::Directory(root) => Arc::new(FileStore::open(root)?),
    };
    let epochs = Epochs::new(
        inner,
        config.epoch,
        EACH_OF_SEVERAL.min(config.retry_timeout / 4),
        Arc::clone(&meter),
    );
    let inner: Arc<dyn Store> = Arc::new(epochs);
    let policy = RetryPolicy::new(config.retry_timeout);
    Ok(Retrying::new(inner, policy, cancel, meter))
}

/// Creates an object, or finds the very same. `false` where it stands there with other bytes.
///
/// # Errors
/// Those of the store.
pub(crate) async fn create_or_find(
    store: &dyn Store,
    key: &Key,
    body: Bytes,
) -> Result<bool, StoreError> {
    if store.put_if_absent(key, body.clone()).await? == PutOutcome::Created {
        return Ok(true);
    }
    match store.get(key, body.len()).await {
        Ok(found) => Ok(found.is_some_and(|found| found == body)),
        Err(StoreError::Mismatch { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Where the bytes of a ranged read go.
pub trait RangeSink: Send {
    /// The range is read from its start: for the first time, or again because an attempt failed. Nothing that came before counts.
    fn restart(&mut self);

    /// The next bytes of the range, in order; together never more than the range is long.
    fn put(&mut self, bytes: &[u8]);
}

/// A range into one slice of its length.
struct SliceSink<'a> {
    out: &'a mut [u8],
    filled: usize,
}

impl RangeSink for SliceSink<'_> {
    fn restart(&mut self) {
        self.filled = 0;
    }

    fn put(&mut self, bytes: &[u8]) {
        let end = self.filled + bytes.len();
        self.out[self.filled..end].copy_from_slice(bytes);
        self.filled = end;
    }
}

/// [`Store::get_range`] by [`Store::read_range`].
async fn read_slice<S: Store + ?Sized>(
    store: &S,
    key: &Key,
    range: Range<u64>,
    if_match: Option<&str>,
    out: &mut [u8],
) -> Result<(), StoreError> {
    if range.end.checked_sub(range.start) != Some(out.len() as u64) {
        return Err(StoreError::Mismatch {
            operation: "GetObject",
            key: key.to_string(),
            what: format!("range {range:?} into a buffer of {} bytes", out.len()),
        });
    }
    let mut sink = SliceSink { out, filled: 0 };
    store.read_range(key, range, if_match, &mut sink).await
}

/// What every store does. Every method makes one attempt, and is cancel-safe in this sense: a dropped future may or may not
/// have taken effect, exactly like [`StoreError::Transient`].
///
/// [`Store::list`], [`Store::abort_uploads_under`] and [`Store::delete`] are for clean-up (`gc`, `prune`, the spill); nothing else but [`epochs`] lists objects or deletes any.
///
/// ```
/// use bytes::Bytes;
/// use ckptstream::store::memory::MemoryStore;
/// use ckptstream::store::{Key, PutOutcome, Store};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = MemoryStore::new();
/// let key = Key::new("train/log/00000001.json")?;
/// let entry = Bytes::from_static(b"{}");
/// assert_eq!(store.put_if_absent(&key, entry.clone()).await?, PutOutcome::Created);
/// // What stands there first stays.
/// let again = store.put_if_absent(&key, Bytes::from_static(b"other")).await?;
/// assert_eq!(again, PutOutcome::AlreadyExists);
/// assert_eq!(store.get(&key, 1024).await?, Some(entry));
/// # Ok(())
/// # }
/// ```
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Opens a multipart upload under a key that nobody has used before. Nothing is visible under the key until it is completed.
    fn begin_upload<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<UploadId, StoreError>>;

    /// Sends one part. Parts may come in any order; sending a number again replaces it. The store checks the checksum.
    fn put_part<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        number: PartNumber,
        body: PartBody,
    ) -> BoxFuture<'a, Result<PartReceipt, StoreError>>;

    /// Completes an upload: atomically, the object of `len` bytes appears under the key. `crc64` covers the whole object.
    /// `parts` are in ascending order. Completing twice may answer [`StoreError::NotFound`]: look ([`Store::head`]) before deciding.
    fn complete_upload<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        parts: &'a [PartReceipt],
        len: u64,
        crc64: u64,
    ) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Gives an upload up. One that is gone already is a success.
    fn abort_upload<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
    ) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Creates an object unless one stands there (`If-None-Match: *`). Atomic.
    fn put_if_absent<'a>(
        &'a self,
        key: &'a Key,
        body: Bytes,
    ) -> BoxFuture<'a, Result<PutOutcome, StoreError>>;

    /// A whole small object, or `None`. Longer than `len_max` bytes: [`StoreError::Mismatch`], and no more than that is read.
    fn get<'a>(
        &'a self,
        key: &'a Key,
        len_max: usize,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>>;

    /// Reads exactly `range` of the object into `sink`, as the bytes come. With `if_match`, only while the object still has that tag. A short or long body, or another
    /// tag, is an error; what the sink has then is garbage.
    fn read_range<'a>(
        &'a self,
        key: &'a Key,
        range: Range<u64>,
        if_match: Option<&'a str>,
        sink: &'a mut dyn RangeSink,
    ) -> BoxFuture<'a, Result<(), StoreError>>;

    /// As [`Store::read_range`], into `out` (`out.len()` = the range's length, in bytes).
    fn get_range<'a>(
        &'a self,
        key: &'a Key,
        range: Range<u64>,
        if_match: Option<&'a str>,
        out: &'a mut [u8],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        read_slice(self, key, range, if_match, out).boxed()
    }

    /// What the store says about an object, or `None`.
    fn head<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<Option<ObjectInfo>, StoreError>>;

    /// All objects whose key starts with `prefix`, in key order. For people and clean-up: no decision rests on a listing, but where [`epochs`] has nothing else.
    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<Listed>, StoreError>>;

    /// Names directly under `prefix` (which ends in `/` or is empty), up to the next `/`, in order: the jobs of a store.
    fn list_dirs<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>, StoreError>>;

    /// Gives up every upload under a prefix that ends in `/`, whoever began it. How many there were. For clean-up.
    fn abort_uploads_under<'a>(&'a self, prefix: &'a str)
    -> BoxFuture<'a, Result<u64, StoreError>>;

    /// Deletes an object. One that is not there is a success.
    fn delete<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<(), StoreError>>;

    /// What is to be known of the store besides its objects. A store that tells nothing tells nothing.
    fn facts(&self) -> BoxFuture<'_, Facts> {
        std::future::ready(Facts::default()).boxed()
    }

    /// For messages: `s3://bucket/prefix`, `file:///directory`.
    fn describe(&self) -> String;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_cannot_leave_their_place() {
        for good in ["a", "job/log/00000001.json", "a b/ü", "..a/b.."] {
            assert_eq!(Key::new(good).unwrap().as_str(), good);
        }
        let long = "k".repeat(Key::LEN_MAX + 1);
        for bad in [
            "", "/a", "a/", "a//b", ".", "..", "a/../b", "a/./b", "a\nb", "a\0", &long,
        ] {
            assert!(Key::new(bad).is_err(), "{bad:?} passed");
        }
        let job = JobName::new("train-7").unwrap();
        assert_eq!(
            Key::of_job(&job, "log/1").unwrap().as_str(),
            "train-7/log/1"
        );
        assert!(Key::of_job(&job, "../other/log/1").is_err());
    }

    #[test]
    fn part_numbers_have_both_ends() {
        assert_eq!(PartNumber::new(0), None);
        assert_eq!(PartNumber::new(1).map(PartNumber::get), Some(1));
        assert_eq!(PartNumber::new(10_000).map(PartNumber::get), Some(10_000));
        assert_eq!(PartNumber::new(10_001), None);
        assert_eq!(PartNumber::new(u64::MAX), None);
    }

    #[test]
    fn a_part_is_as_long_as_its_pieces() {
        let pieces = vec![
            Bytes::from_static(b"abc"),
            Bytes::new(),
            Bytes::from_static(b"de"),
        ];
        assert_eq!(PartBody::new(pieces, 0).len, 5);
    }
}
