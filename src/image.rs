//! Reading images: from a job's log to a manifest and frame tables that may be relied on.
//!
//! In: a store, a job, which image. Out: an [`Image`] whose every byte so far was verified, and whose data objects are all there; beside it the newer images
//! that were passed over, each with the reason. What can fail: there is no image (proved), the store, the image. Data objects are looked at here, not read; only
//! [`prove_landed`], for an object just stored, reads one back where the store keeps no checksum.

use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

use futures::future;
use futures::stream::{self, StreamExt, TryStreamExt};

use crate::codec::seek_table::SeekTableError;
use crate::codec::{Crc64, Digest};
use crate::config::JobName;
use crate::error::one_line;
use crate::job_log::{Entry, GENERATION_MAX, ImageEntry, JobLog, LogError, SavingEntry};
use crate::manifest::{
    self, ExtentRecord, FrameTable, HostFiles, Manifest, ManifestError, TreeRecord,
};
use crate::store::{BadKey, Key, ObjectInfo, Store, StoreError};

pub use crate::job_log::image_id;

/// Tables and objects that are asked for at once. Each table may hold 16 MiB.
const PARALLELISM: usize = 8;

/// Most bytes of one ranged read of an object that is read back, 8 MiB: its checksum takes 0.3 ms, which is what the runtime's threads may be kept for.
const READ_BACK_LEN: u64 = 8 << 20;

/// Ranges of one object that are read back at once. With [`READ_BACK_LEN`] 32 MiB for each GPU, about what its part buffers and pinned buffers took until then.
const READ_BACK_PARALLELISM: usize = 4;

/// How often an object is read before it counts as damaged: a bit may flip on the way back too.
const READS: u32 = 2;

/// Which image of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageRef {
    /// The newest valid one.
    Latest,
    /// The one of this generation, 1 to [`GENERATION_MAX`].
    Generation(u64),
}

impl fmt::Display for ImageRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ImageRef::Latest => f.write_str("latest"),
            ImageRef::Generation(generation) => f.write_str(&image_id(*generation)),
        }
    }
}

/// Text that names no image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no image: expected `latest` or a generation of 1 to 8 digits, as `ckptstream list` prints it"
)]
pub struct BadImageRef(pub String);

impl FromStr for ImageRef {
    type Err = BadImageRef;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "latest" {
            return Ok(ImageRef::Latest);
        }
        let digits = (1..=8).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
        let generation = text
            .parse()
            .ok()
            .filter(|generation| (1..=GENERATION_MAX).contains(generation));
        match generation {
            Some(generation) if digits => Ok(ImageRef::Generation(generation)),
            _ => Err(BadImageRef(text.to_owned())),
        }
    }
}

/// An image that may be restored: manifest and tables are verified, the data objects are there.
#[derive(Debug, Clone)]
pub struct Image {
    /// Its slot in the job's log.
    pub generation: u64,
    /// The attempt's nonce.
    pub attempt: String,
    /// Digest of the manifest, as the log has it.
    pub manifest_digest: Digest,
    /// The manifest.
    pub manifest: Manifest,
    /// One table per extent: `tables[p][e]` belongs to `manifest.processes[p].extents[e]`. That of a tree's host memory stands by itself behind them.
    pub tables: Vec<Vec<FrameTable>>,
    /// The store's tags of the data objects when they were looked at, in the order of [`Manifest::extents`].
    pub etags: Vec<Option<String>>,
    /// Which bytes of a tree's host memory are which of its image files.
    pub files: Option<HostFiles>,
}

/// What is stored of one extent, or of a tree's host memory.
#[derive(Debug, Clone, Copy)]
pub struct Stored<'a> {
    /// What the manifest says.
    pub extent: &'a ExtentRecord,
    /// Its frames.
    pub table: &'a FrameTable,
    /// The store's tag of its object.
    pub etag: Option<&'a str>,
}

/// An entry that was passed over on the way to the newest valid image.
#[derive(Debug)]
pub struct Skipped {
    /// Its slot in the job's log.
    pub generation: u64,
    /// Why.
    pub flaw: Flaw,
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reasons = one_line(&self.flaw);
        write!(f, "{}: {reasons}", image_id(self.generation))
    }
}

/// Why an image, or a log, is not to be relied on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Flaw {
    /// The log has a gap.
    #[error("the log is not whole")]
    Log(#[source] LogError),
    /// The slot holds something that may be an image, but not to us.
    #[error("{what}")]
    Entry {
        /// What stands there.
        what: String,
    },
    /// The log says that it failed to restore.
    #[error("the log says that it failed to restore")]
    Bad,
    /// An object is absent, or shorter than it must be.
    #[error("object {key} is not there as it must be")]
    Object {
        /// Key relative to the store's prefix.
        key: String,
        /// What the store said.
        #[source]
        source: StoreError,
    },
    /// A data object has another length.
    #[error("object {key} has {len} bytes, and must have {expected}")]
    Length {
        /// Key relative to the store's prefix.
        key: String,
        /// Length in the store.
        len: u64,
        /// Length that the manifest says.
        expected: u64,
    },
    /// A data object has another checksum.
    #[error("object {key} has CRC64NVME {found}, and must have {expected}")]
    Checksum {
        /// Key relative to the store's prefix.
        key: String,
        /// What the store keeps.
        found: Crc64,
        /// What the manifest says.
        expected: Crc64,
    },
    /// The manifest is not the one that was committed.
    #[error("manifest {key} has digest {found}, the log says {expected}")]
    ManifestDigest {
        /// Key relative to the store's prefix.
        key: String,
        /// Digest of the bytes.
        found: Digest,
        /// Digest that was committed.
        expected: Digest,
    },
    /// The manifest and the log entry tell different things.
    #[error("manifest {key} and the log entry differ in {field}")]
    Disagreement {
        /// Key relative to the store's prefix.
        key: String,
        /// The field.
        field: &'static str,
    },
    /// The manifest or a frame table is damaged, or of a version or with a feature that we do not know.
    #[error("{key} cannot be used")]
    Content {
        /// Key relative to the store's prefix.
        key: String,
        /// Why.
        #[source]
        source: ManifestError,
    },
    /// The seek table at the end of a data object is not the frame table's.
    #[error("the seek table of object {key} does not agree with the frame table")]
    SeekTable {
        /// Key relative to the store's prefix.
        key: String,
        /// What differs.
        #[source]
        source: SeekTableError,
    },
    /// A name in the image makes no key.
    #[error("a key in the image is none")]
    Key(#[source] BadKey),
}

impl Flaw {
    /// It shows in the bytes that came, so that it may have happened to them on the way.
    fn may_be_of_the_way(&self) -> bool {
        matches!(
            self,
            Flaw::ManifestDigest { .. } | Flaw::Content { .. } | Flaw::SeekTable { .. }
        )
    }
}

/// No image can be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// Proved: the log was read to its end.
    #[error("job {job} has no such image: {why}")]
    NoImage {
        /// The job.
        job: String,
        /// What the log says instead.
        why: String,
    },
    /// The store failed or refused; nothing is known about the image.
    #[error("cannot read the images of job {job}")]
    Unreachable {
        /// The job, or `*` for all.
        job: String,
        /// Why.
        #[source]
        source: StoreError,
    },
    /// The image that was named cannot be used.
    #[error("image {} of job {job} cannot be used", image_id(*generation))]
    Damaged {
        /// The job.
        job: String,
        /// The image's generation; 0 for the log as a whole.
        generation: u64,
        /// Why.
        #[source]
        flaw: Flaw,
    },
    /// There are images, and none of them can be used.
    #[error("no image of job {job} can be used: {}", list(skipped))]
    NoneUsable {
        /// The job.
        job: String,
        /// All of them, newest first.
        skipped: Vec<Skipped>,
    },
}

fn list(skipped: &[Skipped]) -> String {
    skipped
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("; ")
}

/// One image of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedImage {
    /// Its slot in the job's log.
    pub generation: u64,
    /// What the log says about it.
    pub entry: ImageEntry,
    /// Whether the log allows its use.
    pub standing: Standing,
}

/// What later entries of the log say about an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Nothing.
    Usable,
    /// It failed to restore.
    Bad,
    /// It was given up; its data may be gone.
    Dropped,
}

/// All that a job's log says about images, without a look at their objects.
#[derive(Debug)]
pub struct ImageList {
    /// Newest first.
    pub images: Vec<ListedImage>,
    /// Entries that may be images but not to us, newest first.
    pub unreadable: Vec<Skipped>,
    /// The save that is under way, or whose saver died.
    pub saving: Option<SavingEntry>,
    /// The job ended by itself; its images are only history.
    pub is_finished: bool,
}

/// Images of a job as its log has them.
///
/// # Errors
/// When the log cannot be read. A job without a log has an empty list.
pub async fn list_images(store: &dyn Store, job: &JobName) -> Result<ImageList, ImageError> {
    let log = read_log(store, job).await?;
    let usable = log.images();
    let mut images = Vec::new();
    let mut unreadable = Vec::new();
    for (generation, entry) in log.entries().rev() {
        match entry {
            Entry::Image(image) => images.push(ListedImage {
                generation,
                entry: image.clone(),
                standing: if log.is_dropped(&image.attempt) {
                    Standing::Dropped
                } else if usable.iter().any(|(known, _)| *known == generation) {
                    Standing::Usable
                } else {
                    Standing::Bad
                },
            }),
            Entry::Unknown { .. } | Entry::Damaged { .. } => unreadable.push(Skipped {
                generation,
                flaw: Flaw::Entry {
                    what: entry.describe(),
                },
            }),
            _ => {}
        }
    }
    Ok(ImageList {
        images,
        unreadable,
        saving: log.save_under_way().cloned(),
        is_finished: log.is_finished(),
    })
}

/// Names under the store's prefix that can be jobs.
///
/// # Errors
/// When the store cannot be read.
pub async fn list_jobs(store: &dyn Store) -> Result<Vec<JobName>, ImageError> {
    let names = store
        .list_dirs("")
        .await
        .map_err(|source| ImageError::Unreachable {
            job: "*".to_owned(),
            source,
        })?;
    Ok(names
        .iter()
        .filter_map(|name| JobName::new(name).ok())
        .collect())
}

impl Image {
    /// All that has an object, in the order of [`Manifest::extents`].
    pub fn stored(&self) -> impl Iterator<Item = Stored<'_>> {
        let tables = self.tables.iter().flatten();
        let all = self.manifest.extents().zip(tables).zip(&self.etags);
        all.map(|((extent, table), etag)| Stored {
            extent,
            table,
            etag: etag.as_deref(),
        })
    }

    /// Opens what is sealed in the store: it is no image, and of generation 0.
    ///
    /// # Errors
    /// [`LoadError`].
    pub(crate) async fn open_sealed(
        store: &dyn Store,
        job: &JobName,
        sealed: &ImageEntry,
    ) -> Result<Image, LoadError> {
        load(store, job, 0, sealed).await
    }

    /// Opens an image. With [`ImageRef::Latest`] newer ones that cannot be used are passed over and returned, newest first; one that was dropped on purpose is
    /// not mentioned. While the store is out of reach no older image is taken in place of a newer one.
    ///
    /// A generation that the log calls `bad` is opened when it is named.
    ///
    /// # Errors
    /// [`ImageError::NoImage`] only when the log proves it; [`ImageError::Unreachable`] when the store fails; the others when there are images, of no use.
    pub async fn open(
        store: &dyn Store,
        job: &JobName,
        image: ImageRef,
    ) -> Result<(Image, Vec<Skipped>), ImageError> {
        let log = read_log(store, job).await?;
        match image {
            ImageRef::Latest => open_latest(store, job, &log).await,
            ImageRef::Generation(generation) => {
                let image = open_named(store, job, &log, generation).await?;
                Ok((image, Vec::new()))
            }
        }
    }
}

async fn read_log(store: &dyn Store, job: &JobName) -> Result<JobLog, ImageError> {
    JobLog::read(store, job).await.map_err(|error| match error {
        LogError::Store { job, source } => ImageError::Unreachable { job, source },
        error => ImageError::Damaged {
            job: job.to_string(),
            generation: 0,
            flaw: Flaw::Log(error),
        },
    })
}

async fn open_latest(
    store: &dyn Store,
    job: &JobName,
    log: &JobLog,
) -> Result<(Image, Vec<Skipped>), ImageError> {
    let no_image = |why: &str| ImageError::NoImage {
        job: job.to_string(),
        why: why.to_owned(),
    };
    let finished_at = log.finished_at();
    let usable = log.images();
    let mut skipped = Vec::new();
    let since = log.entries().rev();
    for (generation, entry) in since.take_while(|(slot, _)| *slot > finished_at) {
        let flaw = match entry {
            Entry::Image(image) if log.is_dropped(&image.attempt) => continue,
            Entry::Image(image) if usable.iter().any(|(known, _)| *known == generation) => {
                match load(store, job, generation, image).await {
                    Ok(image) => return Ok((image, skipped)),
                    Err(LoadError::Flawed(flaw)) => *flaw,
                    Err(LoadError::Store(source)) => {
                        let job = job.to_string();
                        return Err(ImageError::Unreachable { job, source });
                    }
                }
            }
            Entry::Image(_) => Flaw::Bad,
            Entry::Unknown { .. } | Entry::Damaged { .. } => Flaw::Entry {
                what: entry.describe(),
            },
            _ => continue,
        };
        skipped.push(Skipped { generation, flaw });
    }
    if skipped.is_empty() {
        return Err(no_image(match finished_at {
            0 => "its log names none",
            _ => "the job finished, and was not saved since; a generation can still be named",
        }));
    }
    let job = job.to_string();
    Err(ImageError::NoneUsable { job, skipped })
}

async fn open_named(
    store: &dyn Store,
    job: &JobName,
    log: &JobLog,
    generation: u64,
) -> Result<Image, ImageError> {
    let no_image = |why: String| ImageError::NoImage {
        job: job.to_string(),
        why,
    };
    let damaged = |flaw: Flaw| ImageError::Damaged {
        job: job.to_string(),
        generation,
        flaw,
    };
    match log.get(generation) {
        None => {
            let last = log.next_slot() - 1;
            Err(no_image(format!(
                "the log ends before {}, at {}",
                image_id(generation),
                image_id(last)
            )))
        }
        Some(Entry::Image(image)) if log.is_dropped(&image.attempt) => {
            Err(no_image(format!("{} was given up", image_id(generation))))
        }
        Some(Entry::Image(image)) => match load(store, job, generation, image).await {
            Ok(image) => Ok(image),
            Err(LoadError::Flawed(flaw)) => Err(damaged(*flaw)),
            Err(LoadError::Store(source)) => {
                let job = job.to_string();
                Err(ImageError::Unreachable { job, source })
            }
        },
        Some(entry @ (Entry::Unknown { .. } | Entry::Damaged { .. })) => {
            let what = entry.describe();
            Err(damaged(Flaw::Entry { what }))
        }
        Some(entry) => Err(no_image(format!(
            "{} says: {}",
            image_id(generation),
            entry.describe()
        ))),
    }
}

/// Why an object, or an image, cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    /// It is there, and not what it must be; or it is not there.
    #[error("a stored object is not as it must be")]
    Flawed(#[source] Box<Flaw>),
    /// Nothing is known about it.
    #[error("the store cannot be asked")]
    Store(#[source] StoreError),
}

impl From<Flaw> for LoadError {
    fn from(flaw: Flaw) -> Self {
        LoadError::Flawed(Box::new(flaw))
    }
}

async fn load(
    store: &dyn Store,
    job: &JobName,
    generation: u64,
    entry: &ImageEntry,
) -> Result<Image, LoadError> {
    let manifest = patiently(|| load_manifest(store, job, entry)).await?;
    let extents: Vec<&ExtentRecord> = manifest.extents().collect();
    let etags = stream::iter(&extents)
        .map(|extent| async move {
            let key = Key::of_job(job, &extent.object.key).map_err(Flaw::Key)?;
            look_at_object(store, &key, extent.object.len, extent.object.crc64).await
        })
        .buffered(PARALLELISM)
        .try_collect();
    let tables = stream::iter(&extents)
        .map(|extent| load_table(store, job, extent))
        .buffered(PARALLELISM)
        .try_collect::<Vec<FrameTable>>();
    let files = async {
        match &manifest.tree {
            Some(tree) => patiently(|| load_files(store, job, tree)).await.map(Some),
            None => Ok(None),
        }
    };
    let (etags, tables, files): (Result<_, LoadError>, _, _) =
        future::join3(etags, tables, files).await;
    let (etags, tables, files) = (etags?, tables?, files?);
    let tables = by_process(&manifest, tables);
    Ok(Image {
        generation,
        attempt: entry.attempt.clone(),
        manifest_digest: entry.manifest_digest,
        manifest,
        tables,
        etags,
        files,
    })
}

/// Tables in the order of the extents, as an [`Image`] has them.
pub(crate) fn by_process(manifest: &Manifest, tables: Vec<FrameTable>) -> Vec<Vec<FrameTable>> {
    let mut tables = tables.into_iter();
    let counts = manifest
        .processes
        .iter()
        .map(|process| process.extents.len());
    let host = manifest.tree.as_ref().map(|_tree| 1);
    let counts = counts.chain(host);
    counts
        .map(|count| tables.by_ref().take(count).collect())
        .collect()
}

async fn load_files(
    store: &dyn Store,
    job: &JobName,
    tree: &TreeRecord,
) -> Result<HostFiles, LoadError> {
    let key = Key::of_job(job, &tree.files.key).map_err(Flaw::Key)?;
    let bytes = read_whole(store, &key, tree.files.len).await?;
    let files = HostFiles::decode_and_verify(&bytes, &tree.files, tree.memory.raw_len);
    files.map_err(|source| {
        LoadError::from(Flaw::Content {
            key: key.to_string(),
            source,
        })
    })
}

/// What a read found damaged is read once more before that counts.
async fn patiently<T, F>(read: impl Fn() -> F) -> Result<T, LoadError>
where
    F: Future<Output = Result<T, LoadError>>,
{
    let mut reads_left = READS;
    loop {
        reads_left -= 1;
        match read().await {
            Err(LoadError::Flawed(flaw)) if flaw.may_be_of_the_way() && reads_left > 0 => {
                let flaw = one_line(&flaw);
                tracing::warn!("read with damage, reading again: {flaw}");
            }
            answer => return answer,
        }
    }
}

async fn load_manifest(
    store: &dyn Store,
    job: &JobName,
    entry: &ImageEntry,
) -> Result<Manifest, LoadError> {
    let key = Key::of_job(job, &entry.manifest_key).map_err(Flaw::Key)?;
    let bytes = read_whole(store, &key, entry.manifest_len).await?;
    let found = manifest::digest_of(&bytes);
    if found != entry.manifest_digest {
        return Err(LoadError::from(Flaw::ManifestDigest {
            key: key.to_string(),
            found,
            expected: entry.manifest_digest,
        }));
    }
    let manifest = Manifest::decode_and_verify(&bytes, job.as_str(), &entry.attempt);
    let manifest = manifest.map_err(|source| Flaw::Content {
        key: key.to_string(),
        source,
    })?;
    for (field, same) in [
        ("kind", manifest.kind == entry.kind),
        ("raw_len", manifest.raw_len() == entry.raw_len),
        ("stored_len", manifest.stored_len() == entry.stored_len),
    ] {
        if !same {
            let key = key.to_string();
            return Err(LoadError::from(Flaw::Disagreement { key, field }));
        }
    }
    Ok(manifest)
}

async fn load_table(
    store: &dyn Store,
    job: &JobName,
    extent: &ExtentRecord,
) -> Result<FrameTable, LoadError> {
    let table = patiently(|| load_frame_table(store, job, extent)).await?;
    patiently(|| check_seek_table(store, job, &table, &extent.object.key)).await?;
    Ok(table)
}

async fn load_frame_table(
    store: &dyn Store,
    job: &JobName,
    extent: &ExtentRecord,
) -> Result<FrameTable, LoadError> {
    let key = Key::of_job(job, &extent.table.key).map_err(Flaw::Key)?;
    let bytes = read_whole(store, &key, extent.table.len).await?;
    let extent = extent.clone();
    // A table may hold 400,000 frames: too much work for the runtime's own threads.
    let decode = tokio::task::spawn_blocking(move || {
        FrameTable::decode_and_verify(&bytes, &extent.table, &extent)
    });
    let table = match decode.await {
        Ok(table) => table,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    };
    table.map_err(|source| {
        LoadError::from(Flaw::Content {
            key: key.to_string(),
            source,
        })
    })
}

/// The seek table is for others: we go by the frame table. Where the two differ, the object is not what was stored.
async fn check_seek_table(
    store: &dyn Store,
    job: &JobName,
    table: &FrameTable,
    object: &str,
) -> Result<(), LoadError> {
    let key = Key::of_job(job, object).map_err(Flaw::Key)?;
    let place = table.frames_len()..table.object_len();
    let len = usize::try_from(place.end - place.start).unwrap_or(usize::MAX);
    let mut bytes = vec![0; len];
    store
        .get_range(&key, place, None, &mut bytes)
        .await
        .map_err(|error| absent(&key, error))?;
    table.check_seek_table(&bytes).map_err(|source| {
        LoadError::from(Flaw::SeekTable {
            key: key.to_string(),
            source,
        })
    })
}

/// Reads an object of known length, which the caller has bounded. As it must be there, the store may be patient with its absence.
async fn read_whole(store: &dyn Store, key: &Key, len: u64) -> Result<Vec<u8>, LoadError> {
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
    store
        .get_range(key, 0..len, None, &mut bytes)
        .await
        .map_err(|error| absent(key, error))?;
    Ok(bytes)
}

fn absent(key: &Key, source: StoreError) -> LoadError {
    if source.is_about_the_object() {
        let key = key.to_string();
        LoadError::from(Flaw::Object { key, source })
    } else {
        LoadError::Store(source)
    }
}

/// Looks at a data object: length, and checksum where the store keeps one. Returns the store's tag for it.
async fn look_at_object(
    store: &dyn Store,
    key: &Key,
    len: u64,
    crc64: Crc64,
) -> Result<Option<String>, LoadError> {
    let info = look(store, key, len).await?;
    if let Some(found) = info.crc64 {
        expect_checksum(key, Crc64::from_value(found), crc64)?;
    }
    Ok(info.etag)
}

/// Proves that a data object just stored is what was sent: by the store's checksum, and where it keeps none by reading the object back. Returns the store's
/// tag for it.
///
/// # Errors
/// [`LoadError::Flawed`] when it is not, [`LoadError::Store`] when that cannot be found out.
pub(crate) async fn prove_landed(
    store: &dyn Store,
    key: &Key,
    len: u64,
    crc64: Crc64,
) -> Result<Option<String>, LoadError> {
    let info = look(store, key, len).await?;
    if let Some(found) = info.crc64 {
        expect_checksum(key, Crc64::from_value(found), crc64)?;
        return Ok(info.etag);
    }
    let mut reads_left = READS;
    loop {
        let found = read_back(store, key, len, info.etag.as_deref()).await?;
        reads_left -= 1;
        match expect_checksum(key, found, crc64) {
            Ok(()) => return Ok(info.etag),
            Err(flaw) if reads_left == 0 => return Err(flaw),
            Err(flaw) => {
                let flaw = one_line(&flaw);
                tracing::warn!("read back with damage, reading again: {flaw}");
            }
        }
    }
}

fn expect_checksum(key: &Key, found: Crc64, expected: Crc64) -> Result<(), LoadError> {
    if found == expected {
        return Ok(());
    }
    Err(LoadError::from(Flaw::Checksum {
        key: key.to_string(),
        found,
        expected,
    }))
}

/// What the store says about an object that must be there with this length.
async fn look(store: &dyn Store, key: &Key, len: u64) -> Result<ObjectInfo, LoadError> {
    let mut info = store.head(key).await.map_err(LoadError::Store)?;
    if info.as_ref().is_none_or(|info| info.len < len) {
        // Some stores show a new object late, or a part of it. Reading its last byte waits for it as long as is sensible; then the look counts.
        let last = len.saturating_sub(1)..len;
        let read = store.get_range(key, last, None, &mut [0]).await;
        match read {
            // It is there, and stays shorter: its length says more than the range that it does not have.
            Err(error) if info.is_some() && error.is_about_the_object() => {}
            read => {
                read.map_err(|error| absent(key, error))?;
                info = store.head(key).await.map_err(LoadError::Store)?;
            }
        }
    }
    let Some(info) = info else {
        let source = StoreError::NotFound {
            operation: "HeadObject",
            key: key.to_string(),
        };
        return Err(absent(key, source));
    };
    if info.len != len {
        return Err(LoadError::from(Flaw::Length {
            key: key.to_string(),
            len: info.len,
            expected: len,
        }));
    }
    Ok(info)
}

/// CRC64NVME of an object's bytes as the store gives them back.
async fn read_back(
    store: &dyn Store,
    key: &Key,
    len: u64,
    etag: Option<&str>,
) -> Result<Crc64, LoadError> {
    let starts = (0..len).step_by(usize::try_from(READ_BACK_LEN).unwrap_or(usize::MAX));
    let ranges = starts.map(|start| start..len.min(start + READ_BACK_LEN));
    // Used again and again: to touch fresh memory takes longer than to sum it.
    let spare = &Mutex::new(Vec::new());
    let take = || spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let give = |bytes| {
        spare
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(bytes)
    };
    stream::iter(ranges)
        .map(|range| async move {
            let len = range.end - range.start;
            let mut bytes: Vec<u8> = take().unwrap_or_default();
            bytes.resize(usize::try_from(len).unwrap_or(usize::MAX), 0);
            let read = store.get_range(key, range, etag, &mut bytes).await;
            read.map_err(|error| absent(key, error))?;
            let sum = Crc64::of(&bytes);
            give(bytes);
            Ok((sum, len))
        })
        .buffered(READ_BACK_PARALLELISM)
        .try_fold(Crc64::of(&[]), |whole, (sum, len)| async move {
            Ok(whole.combine(sum, len))
        })
        .await
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::codec::sample_data::frame_of;
    use crate::codec::{Encoder, Settings};
    use crate::job_log::append_image;
    use crate::manifest::{
        Capture, CaptureMode, DeviceRecord, Host, ImageKind, ObjectRecord, ProcessRecord,
        TableRecord,
    };
    use crate::store::faulty::{Fault, Faulty};
    use crate::store::file::FileStore;
    use crate::store::memory::MemoryStore;

    const CHUNK_LEN: u64 = 1 << 20;

    fn job() -> JobName {
        JobName::new("train").unwrap()
    }

    fn key(relative: &str) -> Key {
        Key::of_job(&job(), relative).unwrap()
    }

    fn uuid(number: usize) -> String {
        format!("GPU-00000000-0000-4000-8000-{number:012x}")
    }

    async fn put(store: &dyn Store, relative: &str, bytes: Vec<u8>) {
        store
            .put_if_absent(&key(relative), Bytes::from(bytes))
            .await
            .unwrap();
    }

    /// Replaces an object, which the product never does.
    async fn replace(store: &dyn Store, relative: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let bytes = store
            .get(&key(relative), usize::MAX)
            .await
            .unwrap()
            .unwrap();
        let mut bytes = bytes.to_vec();
        change(&mut bytes);
        store.delete(&key(relative)).await.unwrap();
        put(store, relative, bytes).await;
    }

    /// Stores one extent of a chunk and a half, and returns its record.
    async fn store_extent(store: &dyn Store, attempt: &str, number: usize) -> ExtentRecord {
        let raw: Vec<u8> = (0..CHUNK_LEN * 3 / 2)
            .map(|at| (at / 4096).to_le_bytes()[0])
            .collect();
        let mut encoder = Encoder::new(Settings::default()).unwrap();
        let mut table = FrameTable::new(raw.len() as u64, CHUNK_LEN);
        let mut object = Vec::new();
        for chunk in raw.chunks(usize::try_from(CHUNK_LEN).unwrap()) {
            let (frame, encoded) = frame_of(&mut encoder, chunk);
            table.push(
                u32::try_from(encoded.len()).unwrap(),
                encoded.kind,
                encoded.filter,
                encoded.digest,
            );
            object.extend_from_slice(&frame[..encoded.len()]);
        }
        object.extend(table.seek_table());
        let table = table.encode();
        let record = ExtentRecord {
            device: uuid(number),
            raw_len: raw.len() as u64,
            chunk_len: CHUNK_LEN,
            object: ObjectRecord {
                key: format!("data/{attempt}/1/gpu-{number}.1.zst"),
                len: object.len() as u64,
                crc64: Crc64::of(&object),
            },
            table: TableRecord {
                key: format!("data/{attempt}/1/gpu-{number}.frames.json"),
                len: table.len() as u64,
                digest: Digest::of(&table),
            },
        };
        put(store, &record.object.key, object).await;
        put(store, &record.table.key, table).await;
        record
    }

    /// Stores and commits an image of two processes with two extents and one, and returns its entry.
    async fn save(store: &dyn Store, number: u64) -> ImageEntry {
        let attempt = format!("{number:032x}");
        let mut processes = Vec::new();
        for (pid, gpus) in [(1, vec![0, 1]), (2, vec![2])] {
            let mut extents = Vec::new();
            for gpu in &gpus {
                extents.push(store_extent(store, &attempt, *gpu).await);
            }
            let device = |gpu: &usize| DeviceRecord {
                uuid: uuid(*gpu),
                name: "Emulated".to_owned(),
                chip: "0.1".to_owned(),
                memory_len: 1 << 30,
                pci: "00000000:01:00.0".to_owned(),
                ordinal: 0,
            };
            processes.push(ProcessRecord {
                pid,
                start_time: 7,
                ns_pids: vec![pid],
                name: "train".to_owned(),
                devices: gpus.iter().map(device).collect(),
                extents,
            });
        }
        let manifest = Manifest {
            tree: None,
            format: manifest::FORMAT,
            features: Vec::new(),
            tool: "ckptstream 0.1.0".to_owned(),
            job: job().to_string(),
            kind: ImageKind::Gpu,
            attempt: attempt.clone(),
            created_ms: 1,
            capture: Capture {
                mode: CaptureMode::CustomStorage,
                driver_version: None,
                driver_api: 13040,
            },
            host: Host {
                name: "node".to_owned(),
                boot_id: "00000000-0000-4000-8000-000000000000".to_owned(),
            },
            processes,
        };
        let bytes = manifest.encode();
        let entry = ImageEntry {
            writer: attempt.clone(),
            manifest_key: manifest::manifest_key(&attempt),
            manifest_len: bytes.len() as u64,
            manifest_digest: manifest::digest_of(&bytes),
            kind: manifest.kind,
            raw_len: manifest.raw_len(),
            stored_len: manifest.stored_len(),
            created_ms: 1,
            tool: manifest.tool.clone(),
            attempt,
        };
        put(store, &entry.manifest_key, bytes).await;
        append_image(store, &job(), 1, &entry).await.unwrap();
        entry
    }

    async fn append(store: &dyn Store, generation: u64, entry: serde_json::Value) {
        let relative = format!("log/{generation:08}.json");
        put(store, &relative, entry.to_string().into_bytes()).await;
    }

    type Change = fn(&mut Vec<u8>);

    /// Every way to damage an image that a look without reading the data can find: name, object, change.
    fn damages() -> Vec<(&'static str, &'static str, Change)> {
        vec![
            ("manifest flipped", "manifest.json", |b| b[40] ^= 1),
            ("manifest cut", "manifest.json", |b| b.truncate(b.len() - 1)),
            ("manifest empty", "manifest.json", Vec::clear),
            ("table flipped", "1/gpu-2.frames.json", |b| b[40] ^= 1),
            ("table cut", "1/gpu-2.frames.json", |b| {
                b.truncate(b.len() / 2)
            }),
            ("object flipped", "1/gpu-1.1.zst", |b| b[10] ^= 1),
            ("object cut", "1/gpu-1.1.zst", |b| b.truncate(b.len() - 1)),
            ("object longer", "1/gpu-1.1.zst", |b| b.push(0)),
        ]
    }

    #[test]
    fn an_image_is_named_by_latest_or_generation() {
        assert_eq!("latest".parse(), Ok(ImageRef::Latest));
        assert_eq!("00000012".parse(), Ok(ImageRef::Generation(12)));
        assert_eq!("3".parse(), Ok(ImageRef::Generation(3)));
        assert_eq!(ImageRef::Generation(3).to_string(), "00000003");
        for bad in [
            "",
            "0",
            "00000000",
            "000000001",
            "+1",
            "-1",
            "Latest",
            "1a",
            "１",
        ] {
            assert!(bad.parse::<ImageRef>().is_err(), "{bad:?}");
        }
    }

    #[tokio::test]
    async fn the_newest_image_is_opened_whole() {
        let store = MemoryStore::new();
        save(&store, 1).await;
        let entry = save(&store, 2).await;
        let (image, skipped) = Image::open(&store, &job(), ImageRef::Latest).await.unwrap();
        assert_eq!((image.generation, &image.attempt), (2, &entry.attempt));
        assert_eq!(image.manifest_digest, entry.manifest_digest);
        assert!(skipped.is_empty());
        assert_eq!(
            image.tables.iter().map(Vec::len).collect::<Vec<_>>(),
            [2, 1]
        );
        for (process, tables) in image.manifest.processes.iter().zip(&image.tables) {
            for (extent, table) in process.extents.iter().zip(tables) {
                assert_eq!(table.object_len(), extent.object.len);
            }
        }
        let (older, _) = Image::open(&store, &job(), ImageRef::Generation(1))
            .await
            .unwrap();
        assert_eq!(older.generation, 1);
    }

    /// Every file of the golden image of format 1, as the store would list it.
    async fn store_golden(store: &dyn Store) {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v1");
        let mut folders = vec![root.join("golden")];
        while let Some(folder) = folders.pop() {
            for file in std::fs::read_dir(folder).unwrap() {
                let path = file.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let name = path.strip_prefix(&root).unwrap().to_str().unwrap();
                let bytes = std::fs::read(&path).unwrap().into();
                let put = store.put_if_absent(&Key::new(name).unwrap(), bytes).await;
                put.unwrap();
            }
        }
    }

    #[tokio::test]
    async fn the_golden_image_of_format_1_opens() {
        let store = MemoryStore::new();
        store_golden(&store).await;
        let jobs = list_jobs(&store).await.unwrap();
        assert_eq!(jobs, [JobName::new("golden").unwrap()]);
        let (image, skipped) = Image::open(&store, &jobs[0], ImageRef::Latest)
            .await
            .unwrap();
        assert!(skipped.is_empty());
        assert_eq!(image.generation, 1);
        assert_eq!(image.tables.iter().map(Vec::len).sum::<usize>(), 2);
    }

    #[tokio::test]
    async fn a_damaged_image_is_passed_over_and_named() {
        for (name, object, change) in damages() {
            let store = MemoryStore::new();
            save(&store, 1).await;
            let entry = save(&store, 2).await;
            replace(&store, &format!("data/{}/{object}", entry.attempt), change).await;
            let (image, skipped) = Image::open(&store, &job(), ImageRef::Latest).await.unwrap();
            assert_eq!(image.generation, 1, "{name}");
            assert_eq!(skipped.len(), 1, "{name}");
            let text = skipped[0].to_string();
            assert!(
                text.starts_with("00000002: ") && text.contains(object),
                "{name}: {text}"
            );
            let named = Image::open(&store, &job(), ImageRef::Generation(2)).await;
            let named = named.unwrap_err();
            assert!(
                matches!(named, ImageError::Damaged { generation: 2, .. }),
                "{name}"
            );
        }
    }

    #[tokio::test]
    async fn what_a_directory_has_is_read_back() {
        let root = tempfile::tempdir().unwrap();
        let store = FileStore::open(root.path()).unwrap();
        let mut bytes = vec![7; 100_000];
        put(&store, "object", bytes.clone()).await;
        let key = key("object");
        let (len, sum) = (bytes.len() as u64, Crc64::of(&bytes));
        prove_landed(&store, &key, len, sum).await.unwrap();
        // A disk that has kept something else, which nothing but its bytes shows.
        bytes[50_000] ^= 1;
        std::fs::write(root.path().join(key.as_str()), &bytes).unwrap();
        let proved = prove_landed(&store, &key, len, sum).await;
        assert!(
            matches!(&proved, Err(LoadError::Flawed(flaw)) if matches!(**flaw, Flaw::Checksum { .. })),
            "{proved:?}"
        );
    }

    #[tokio::test]
    async fn an_absent_object_is_named() {
        for object in ["manifest.json", "1/gpu-0.frames.json", "1/gpu-0.1.zst"] {
            let store = MemoryStore::new();
            let entry = save(&store, 1).await;
            let relative = format!("data/{}/{object}", entry.attempt);
            store.delete(&key(&relative)).await.unwrap();
            let error = Image::open(&store, &job(), ImageRef::Latest)
                .await
                .unwrap_err();
            assert!(matches!(&error, ImageError::NoneUsable { skipped, .. } if skipped.len() == 1));
            assert!(error.to_string().contains(object), "{error}");
        }
    }

    #[tokio::test]
    async fn an_object_that_shows_late_is_waited_for() {
        let store = Faulty::new().fail("head", 1..2, Fault::Absent);
        save(&store, 1).await;
        Image::open(&store, &job(), ImageRef::Latest).await.unwrap();
        assert_eq!(store.calls("head"), 4);
    }

    #[tokio::test]
    async fn an_unreachable_store_is_no_reason_for_an_older_image() {
        let reads = {
            let store = Faulty::new();
            save(&store, 1).await;
            save(&store, 2).await;
            let before = store.calls("get_range");
            Image::open(&store, &job(), ImageRef::Latest).await.unwrap();
            store.calls("get_range") - before
        };
        assert_eq!(reads, 7, "manifest, three tables, three seek tables");
        for fault in [Fault::Transient, Fault::Refused] {
            for nth in 1..=reads {
                let store = Faulty::new().fail("get_range", nth..nth + 1, fault);
                save(&store, 1).await;
                save(&store, 2).await;
                let error = Image::open(&store, &job(), ImageRef::Latest)
                    .await
                    .unwrap_err();
                assert!(
                    matches!(error, ImageError::Unreachable { .. }),
                    "{fault:?}: {error:?}"
                );
            }
            let store = Faulty::new().fail("head", 1..2, fault);
            save(&store, 1).await;
            let error = Image::open(&store, &job(), ImageRef::Latest)
                .await
                .unwrap_err();
            assert!(
                matches!(error, ImageError::Unreachable { .. }),
                "{fault:?}: {error:?}"
            );
        }
    }

    #[tokio::test]
    async fn no_image_is_said_only_on_proof() {
        let store = MemoryStore::new();
        let none = |error: &ImageError| matches!(error, ImageError::NoImage { .. });
        let error = Image::open(&store, &job(), ImageRef::Latest)
            .await
            .unwrap_err();
        assert!(none(&error), "{error:?}");
        append(
            &store,
            1,
            serde_json::json!({"format": 1, "entry": "open", "writer": "w"}),
        )
        .await;
        for image in [
            ImageRef::Latest,
            ImageRef::Generation(1),
            ImageRef::Generation(2),
        ] {
            let error = Image::open(&store, &job(), image).await.unwrap_err();
            assert!(none(&error), "{image}: {error:?}");
        }
        // Perhaps an image, but not to this version: no proof.
        append(
            &store,
            2,
            serde_json::json!({"format": 2, "entry": "image"}),
        )
        .await;
        let error = Image::open(&store, &job(), ImageRef::Latest)
            .await
            .unwrap_err();
        assert!(matches!(error, ImageError::NoneUsable { .. }), "{error:?}");
        let error = Image::open(&store, &job(), ImageRef::Generation(2))
            .await
            .unwrap_err();
        assert!(matches!(error, ImageError::Damaged { .. }), "{error:?}");
    }

    #[tokio::test]
    async fn the_log_decides_what_counts() {
        let store = MemoryStore::new();
        let first = save(&store, 1).await;
        save(&store, 2).await;
        let third = save(&store, 3).await;
        let bad = serde_json::json!({"format": 1, "entry": "bad", "writer": "w", "generation": 2});
        append(&store, 4, bad).await;
        let drop = |attempt: &str| serde_json::json!({"format": 1, "entry": "dropped", "writer": "w", "attempt": attempt});
        append(&store, 5, drop(&third.attempt)).await;

        let (image, skipped) = Image::open(&store, &job(), ImageRef::Latest).await.unwrap();
        assert_eq!(image.generation, 1);
        assert!(matches!(
            skipped[..],
            [Skipped {
                generation: 2,
                flaw: Flaw::Bad
            }]
        ));
        Image::open(&store, &job(), ImageRef::Generation(2))
            .await
            .unwrap();
        let error = Image::open(&store, &job(), ImageRef::Generation(3))
            .await
            .unwrap_err();
        assert!(matches!(error, ImageError::NoImage { .. }), "{error:?}");

        let list = list_images(&store, &job()).await.unwrap();
        let standings: Vec<_> = list
            .images
            .iter()
            .map(|image| (image.generation, image.standing))
            .collect();
        let expected = [
            (3, Standing::Dropped),
            (2, Standing::Bad),
            (1, Standing::Usable),
        ];
        assert_eq!(standings, expected);

        append(&store, 6, drop(&first.attempt)).await;
        let error = Image::open(&store, &job(), ImageRef::Latest)
            .await
            .unwrap_err();
        assert!(
            matches!(error, ImageError::NoneUsable { .. }),
            "a bad image is no proof"
        );
    }

    #[tokio::test]
    async fn a_finished_job_has_nothing_to_restore() {
        let store = MemoryStore::new();
        save(&store, 1).await;
        let finished =
            serde_json::json!({"format": 1, "entry": "finished", "writer": "w", "status": 0});
        append(&store, 2, finished).await;
        let error = Image::open(&store, &job(), ImageRef::Latest)
            .await
            .unwrap_err();
        assert!(matches!(error, ImageError::NoImage { .. }), "{error:?}");
        Image::open(&store, &job(), ImageRef::Generation(1))
            .await
            .unwrap();
        assert!(list_images(&store, &job()).await.unwrap().is_finished);
    }

    #[tokio::test]
    async fn jobs_are_the_folders_that_can_be_jobs() {
        let store = MemoryStore::new();
        save(&store, 1).await;
        for other in ["a/log/00000001.json", ".hidden/x", "with space/x", "file"] {
            store
                .put_if_absent(&Key::new(other).unwrap(), Bytes::new())
                .await
                .unwrap();
        }
        let jobs = list_jobs(&store).await.unwrap();
        assert_eq!(
            jobs.iter().map(JobName::as_str).collect::<Vec<_>>(),
            ["a", "train"]
        );
    }
}
