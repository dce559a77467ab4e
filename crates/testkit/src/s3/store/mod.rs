//! What the server keeps: buckets, objects, open multipart uploads.
//!
//! In: S3 requests as `s3s` has parsed them, their bodies unread. Out: S3's answers. The operations are grouped by idea: [`objects`],
//! [`multipart`], [`listing`], with [`checksum`] beside them; [`blob`] holds bytes and [`disk`] makes them outlive the process.
//! All state is in memory under one lock that is never held across an await; with a root folder every change is also written there
//! before the lock is let go, so that a killed server comes back with every completed object and every open upload.
//!
//! What can fail: what S3 lets fail, with S3's codes; a disk that cannot be written answers InternalError and changes nothing.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use s3s::dto::Timestamp;
use s3s::{S3Error, S3Result, s3_error};
use serde::{Deserialize, Serialize};

mod api;
mod blob;
mod checksum;
mod disk;
mod listing;
mod multipart;
mod objects;
mod serve;

pub(super) use api::Api;
use blob::Blob;
use checksum::{ChecksumKind, Sums};
use disk::Disk;

/// Wishes of a fault rule that only the store can carry out; they travel as a request extension.
#[derive(Debug, Clone, Default)]
pub(super) struct Hints {
    /// Invert the lowest bit of this byte of the stored bytes, after every check has passed.
    pub(super) flip_stored: Option<u64>,
    /// Do not look at If-Match and If-None-Match.
    pub(super) ignore_conditions: bool,
    /// Leave objects younger than this out of listings.
    pub(super) stale: Option<Duration>,
    /// CompleteMultipartUpload answers 200 at once, sends blanks for this long, then does its work.
    pub(super) keep_alive: Option<Duration>,
}

/// Limits and kind of a store.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    /// Folder that survives the server; none keeps everything in memory.
    pub(super) root: Option<PathBuf>,
    /// Keep only the lengths of parts, and of objects of [`KEEP_LEN_MAX`] and more, and give them made-up ETags.
    pub(super) swallow: bool,
    /// Highest part number.
    pub(super) part_limit: u32,
    /// Least length of every part but the last.
    pub(super) part_len_min: u64,
}

/// Objects shorter than this are kept whole by a store that swallows.
const KEEP_LEN_MAX: u64 = 1 << 20;
/// S3's limit for one PUT or part.
const BODY_LEN_MAX: u64 = 5 << 30;

/// Headers that come back as they were put.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Meta {
    content_type: Option<String>,
    user: BTreeMap<String, String>,
}

#[derive(Debug)]
struct Object {
    len: u64,
    etag: String,
    modified_us: u64,
    sums: Sums,
    kind: ChecksumKind,
    /// The object's bytes, in order: one blob, or one per part.
    blobs: Vec<Arc<Blob>>,
    /// The upload that made it, for objects that came up as multipart.
    upload: Option<String>,
    meta: Meta,
}

#[derive(Debug, Clone)]
struct Part {
    etag: String,
    modified_us: u64,
    sums: Sums,
    blob: Arc<Blob>,
}

#[derive(Debug)]
struct Upload {
    initiated_us: u64,
    /// As CreateMultipartUpload named it.
    algorithm: Option<checksum::Algorithm>,
    kind: ChecksumKind,
    meta: Meta,
    parts: BTreeMap<u32, Part>,
}

#[derive(Debug, Default)]
struct Bucket {
    created_us: u64,
    objects: BTreeMap<String, Arc<Object>>,
    /// By key, then id; ids sort by time.
    uploads: BTreeMap<(String, String), Upload>,
}

type Buckets = BTreeMap<String, Bucket>;

/// The store. Cheap to share behind an [`Arc`].
pub(super) struct Store {
    settings: Settings,
    disk: Option<Disk>,
    state: Mutex<Buckets>,
    next_id: AtomicU64,
}

impl Store {
    /// Opens a store, with what its root folder holds, and makes the named buckets.
    pub(super) fn open(settings: Settings, buckets: &[String]) -> io::Result<Self> {
        let (disk, state) = match &settings.root {
            Some(root) => {
                let (disk, state) = Disk::open(root)?;
                (Some(disk), state)
            }
            None => (None, Buckets::new()),
        };
        let store = Self {
            settings,
            disk,
            state: Mutex::new(state),
            next_id: AtomicU64::new(0),
        };
        for bucket in buckets {
            store.make_bucket(bucket)?;
        }
        Ok(store)
    }

    /// Loads `dir/<bucket>/<key…>` into memory as objects.
    pub(super) fn serve(&self, dir: &Path) -> io::Result<()> {
        serve::load(self, dir)
    }

    fn make_bucket(&self, name: &str) -> io::Result<()> {
        let mut state = self.lock();
        if !state.contains_key(name) {
            if let Some(disk) = &self.disk {
                disk.make_bucket(name)?;
            }
            state.insert(
                name.to_owned(),
                Bucket {
                    created_us: unix_us(),
                    ..Bucket::default()
                },
            );
        }
        Ok(())
    }

    fn remove_bucket(&self, name: &str) -> S3Result<()> {
        let mut state = self.lock();
        let held = bucket(&state, name)?;
        if !held.objects.is_empty() || !held.uploads.is_empty() {
            return Err(s3_error!(
                BucketNotEmpty,
                "The bucket you tried to delete is not empty"
            ));
        }
        if let Some(disk) = &self.disk {
            disk.remove_bucket(name).map_err(disk_error)?;
        }
        state.remove(name);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Buckets> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A name that is new in this store and sorts after all earlier ones.
    fn fresh_id(&self) -> String {
        format!(
            "{:016x}{:08x}",
            unix_us(),
            self.next_id.fetch_add(1, Ordering::Relaxed) & 0xffff_ffff
        )
    }
}

fn bucket<'a>(state: &'a Buckets, name: &str) -> S3Result<&'a Bucket> {
    state
        .get(name)
        .ok_or_else(|| s3_error!(NoSuchBucket, "The specified bucket does not exist"))
}

fn bucket_mut<'a>(state: &'a mut Buckets, name: &str) -> S3Result<&'a mut Bucket> {
    state
        .get_mut(name)
        .ok_or_else(|| s3_error!(NoSuchBucket, "The specified bucket does not exist"))
}

/// Microseconds since 1970.
fn unix_us() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

fn timestamp(unix_us: u64) -> Timestamp {
    UNIX_EPOCH
        .checked_add(Duration::from_micros(unix_us))
        .unwrap_or(UNIX_EPOCH)
        .into()
}

/// A length as S3's types want it.
fn signed(len: u64) -> i64 {
    i64::try_from(len).unwrap_or(i64::MAX)
}

fn disk_error(error: io::Error) -> S3Error {
    s3_error!(error, InternalError, "the root folder cannot be written")
}
