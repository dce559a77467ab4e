//! A store in a directory: a disk that survives the node, a network file system, the place where a save is spilled to.
//!
//! In and out: as [`Store`], an object being the file of its key below the root. What can fail: the file system, sorted as [`StoreError`] sorts: what asking again cannot mend (full, over quota, read-only, not
//! permitted, an fsync that failed) is refused, the rest may pass.
//!
//! | we die | what exists |
//! |---|---|
//! | before a file has its name | a file of the upload under [`UPLOADS`], which nobody takes for an object |
//! | after it | the whole object: its bytes were synced before it was named, its name before the call returned |
//!
//! An object gets its name by `link`, which never replaces what stands there, or where a file system has no hard links by a rename that does not either. What was written is dropped from the page cache once it is
//! synced, so that whoever reads it back reads the disk. No symbolic link below the root is followed. The length of an object says nothing about its bytes and no checksum is kept beside it: [`Store::head`] names none, and who needs to know reads.

mod layout;
mod names;

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt};
use rustix::fs::{
    Advice, FallocateFlags, FlockOperation, Timespec, Timestamps, UTIME_NOW, fadvise, fallocate,
    flock, fstatvfs, futimens,
};
use rustix::process::{Resource, getrlimit};

use super::{
    Key, Listed, ObjectInfo, PartBody, PartNumber, PartReceipt, PutOutcome, RangeSink, RetryLimit,
    Store, StoreError, UploadId,
};
use crate::codec::Crc64;
use layout::{Placed, Upload, bring_near, join, named_parts};
use names::{
    Doing, entries, in_directory, make_directories, must_not_be_linked, name_once, sync_directory,
};

/// Directory below the root for what is not an object yet. No job can have this name.
pub const UPLOADS: &str = ".uploads~";

/// Files are for their owner: they hold a process's memory.
const FILE_MODE: u32 = 0o600;

/// Bytes that are read at once.
const READ_LEN: usize = 1 << 20;

/// Names of files that are there to be locked end so.
const LOCK_ENDING: &str = ".lock";

/// File whose time is set to now, to learn what time it is.
const CLOCK: &str = ".clock.lock";

/// A call that does not come back for so long is given up; one that syncs a whole object may take longer.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
const SYNC_TIMEOUT: Duration = Duration::from_secs(600);

/// Age from which a file that is not locked was left by the dead.
const SWEEP_AGE: Duration = Duration::from_secs(60);

/// See the module.
#[derive(Debug)]
pub struct FileStore {
    disk: Arc<Disk>,
}

#[derive(Debug)]
struct Disk {
    root: PathBuf,
    /// The key of the configuration that names it, for messages.
    setting: &'static str,
    uploads: Mutex<HashMap<UploadId, Upload>>,
}

/// See [`FileStore::claim`].
#[derive(Debug)]
pub struct Claim {
    _locked: File,
}

impl FileStore {
    /// The store below this directory, which is not made: one that is not there may be a file system that is not mounted, and must not look like a store without images.
    ///
    /// # Errors
    /// [`StoreError::Refused`] when it is no directory.
    pub fn open(root: &Path) -> Result<Self, StoreError> {
        Self::open_as(root, "store.url")
    }

    fn open_as(root: &Path, setting: &'static str) -> Result<Self, StoreError> {
        let is_directory = fs::metadata(root).map(|found| found.is_dir());
        let (true, Ok(root)) = (is_directory.is_ok_and(|is| is), root.canonicalize()) else {
            return Err(StoreError::Refused {
                operation: "open",
                key: root.display().to_string(),
                code: "there is no such directory".to_owned(),
                advice: format!("; mount or make it, or name another place ({setting})"),
            });
        };
        let disk = Disk {
            root,
            setting,
            uploads: Mutex::default(),
        };
        Ok(Self {
            disk: Arc::new(disk),
        })
    }

    /// The spill: the store in a directory of this name below one that is there (`spill.path`).
    ///
    /// # Errors
    /// As [`FileStore::open`], and when the directory cannot be made.
    pub fn open_spill(path: &Path, name: &str) -> Result<Self, StoreError> {
        const SETTING: &str = "spill.path";
        let above = Self::open_as(path, SETTING)?;
        let folder = above.disk.root.join(name);
        let doing = Doing {
            operation: "open",
            key: name,
            setting: SETTING,
        };
        make_directories(&folder, doing)?;
        Self::open_as(&folder, SETTING)
    }

    /// The spill, to look at: `None` where nothing was ever spilled. Makes nothing.
    ///
    /// # Errors
    /// As [`FileStore::open`].
    pub fn look_into_spill(path: &Path, name: &str) -> Result<Option<Self>, StoreError> {
        const SETTING: &str = "spill.path";
        let above = Self::open_as(path, SETTING)?;
        let folder = above.disk.root.join(name);
        match folder.try_exists() {
            Ok(false) => Ok(None),
            // What cannot be looked at may be there.
            _ => Self::open_as(&folder, SETTING).map(Some),
        }
    }

    /// Makes sure that so many bytes fit into this upload's object; where a file system cannot set them aside, that `in_all` of them are free.
    ///
    /// # Errors
    /// [`StoreError::Refused`] when they do not.
    pub async fn reserve(
        &self,
        key: &Key,
        upload: &UploadId,
        len: u64,
        in_all: u64,
    ) -> Result<(), StoreError> {
        let upload = upload.clone();
        self.on_disk("reserve", key.as_str(), move |disk, doing| {
            // Beyond it the kernel ends the process instead of answering.
            if getrlimit(Resource::Fsize)
                .current
                .is_some_and(|most| most < len)
            {
                return Err(
                    doing.refused("the limit on file sizes (ulimit -f) is lower".to_owned())
                );
            }
            let file = {
                let uploads = disk.uploads();
                let open = uploads.get(&upload).ok_or_else(|| doing.not_found())?;
                Arc::clone(&open.file)
            };
            let allocated = fallocate(&file, FallocateFlags::KEEP_SIZE, 0, len.max(1));
            let error = match allocated.map_err(io::Error::from) {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                    // That it is free now is all that can be known.
                    let found = fstatvfs(&file).map_err(|errno| doing.failed(errno.into()))?;
                    if found.f_bavail.saturating_mul(found.f_frsize) >= in_all {
                        return Ok(());
                    }
                    io::Error::from(io::ErrorKind::StorageFull)
                }
                Err(error) => error,
                Ok(()) => return Ok(()),
            };
            Err(doing.failed(error))
        })
        .await
    }

    /// How long it takes to write so many bytes for good.
    ///
    /// # Errors
    /// [`StoreError`] when they cannot be written.
    pub async fn measure(&self, len: usize) -> Result<Duration, StoreError> {
        self.on_disk("measure", UPLOADS, move |disk, doing| {
            let (path, _, file) = disk.create(doing)?;
            let bytes = vec![0x5a; len];
            let started = Instant::now();
            let written = file.write_all_at(&bytes, 0).and_then(|()| file.sync_all());
            let took = started.elapsed();
            let _gone = fs::remove_file(&path);
            written.map_err(|error| doing.failed(error))?;
            Ok(took)
        })
        .await
    }

    /// The right to use what lies under this name, a job's; `None` while another process has it. It ends with the process.
    ///
    /// # Errors
    /// [`StoreError`] when there can be no such right.
    pub async fn claim(&self, name: &str) -> Result<Option<Claim>, StoreError> {
        let own = format!("{name}{LOCK_ENDING}");
        self.on_disk("claim", name, move |disk, doing| {
            let folder = disk.root.join(UPLOADS);
            make_directories(&folder, doing)?;
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(false);
            let file = options.mode(FILE_MODE).open(folder.join(own));
            let file = file.map_err(|error| doing.failed(error))?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => Ok(Some(Claim { _locked: file })),
                Err(errno) if io::Error::from(errno).kind() == io::ErrorKind::WouldBlock => {
                    Ok(None)
                }
                Err(errno) => Err(doing.failed(errno.into())),
            }
        })
        .await
    }

    /// Removes what processes left that died before their files had names. Files of living ones are locked.
    ///
    /// # Errors
    /// [`StoreError`] when the directory cannot be read.
    pub async fn sweep(&self) -> Result<(), StoreError> {
        self.on_disk("sweep", UPLOADS, |disk, doing| {
            let folder = disk.root.join(UPLOADS);
            for entry in entries(&folder, doing)? {
                let path = folder.join(entry.file_name());
                if entry.file_name().to_string_lossy().ends_with(LOCK_ENDING) {
                    continue;
                }
                // A young one may not be locked yet. What cannot be opened or removed is in nobody's way.
                let age = entry.metadata().and_then(|found| found.modified());
                let is_old = age.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > SWEEP_AGE));
                if is_old
                    && let Ok(file) = File::open(&path)
                    && flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
                {
                    let _left = fs::remove_file(&path);
                }
            }
            Ok(())
        })
        .await
    }

    /// Runs on a thread that may wait for a disk.
    async fn on_disk<T: Send + 'static>(
        &self,
        operation: &'static str,
        key: &str,
        work: impl FnOnce(&Disk, Doing<'_>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (disk, own) = (Arc::clone(&self.disk), key.to_owned());
        let done = tokio::task::spawn_blocking(move || {
            let doing = Doing {
                operation,
                key: own.as_str(),
                setting: disk.setting,
            };
            for path in [disk.root.join(UPLOADS), disk.path(&own)] {
                must_not_be_linked(&disk.root, &path, doing)?;
            }
            work(&disk, doing)
        });
        let failed = |what: String, source: Option<tokio::task::JoinError>| StoreError::Transient {
            operation,
            key: key.to_owned(),
            what,
            source: source.map(|error| Box::new(error) as _),
        };
        // A file system over a network may never answer: its thread is left behind then.
        let limit = match operation {
            "CompleteMultipartUpload" => SYNC_TIMEOUT,
            _ => CALL_TIMEOUT,
        };
        match tokio::time::timeout(limit, done).await {
            Ok(Ok(result)) => result,
            Ok(Err(error)) => Err(failed(
                "the thread that did it ended".to_owned(),
                Some(error),
            )),
            Err(_elapsed) => Err(failed(format!("no answer in {limit:?}"), None)),
        }
    }
}

impl Disk {
    /// The time by the clock that gives files their times, which may be a file server's.
    fn clock(&self) -> io::Result<SystemTime> {
        let path = self.root.join(UPLOADS).join(CLOCK);
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(FILE_MODE)
            .open(path)?;
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_NOW,
        };
        let times = Timestamps {
            last_access: now,
            last_modification: now,
        };
        futimens(&file, &times)?;
        file.metadata()?.modified()
    }

    fn uploads(&self) -> MutexGuard<'_, HashMap<UploadId, Upload>> {
        self.uploads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, key: &str) -> PathBuf {
        self.root.join(key)
    }

    /// A new, empty file that is no object, and its name.
    fn create(&self, doing: Doing<'_>) -> Result<(PathBuf, String, File), StoreError> {
        let folder = self.root.join(UPLOADS);
        let name = format!("{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..));
        let path = folder.join(&name);
        let mut options = OpenOptions::new();
        options
            .read(true)
            .write(true)
            .create_new(true)
            .mode(FILE_MODE);
        let created = in_directory(&folder, doing, || options.open(&path))?;
        let file = created.map_err(|error| doing.failed(error))?;
        // Says that its owner lives, where the file system has locks; where it has none, nobody sweeps.
        let _advice_only = flock(&file, FlockOperation::NonBlockingLockExclusive);
        Ok((path, name, file))
    }

    /// Syncs the file and gives it the key's name, unless something has it.
    fn publish(
        &self,
        file: &File,
        from: &Path,
        key: &str,
        doing: Doing<'_>,
    ) -> Result<PutOutcome, StoreError> {
        file.sync_all().map_err(|error| doing.unsynced(&error))?;
        // Whoever reads it back is to read the disk. Where that cannot be had, the page cache answers.
        let _advice_only = fadvise(file, 0, None, Advice::DontNeed);
        let to = self.path(key);
        let folder = to.parent().unwrap_or(&self.root);
        match in_directory(folder, doing, || name_once(from, &to))? {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                // Whoever acts on it must find it after a crash, too.
                sync_directory(folder, doing)?;
                return Ok(PutOutcome::AlreadyExists);
            }
            Err(error) => return Err(doing.failed(error)),
        }
        // It is there for all to see by now: whether it stays is not known.
        sync_directory(folder, doing).map_err(|error| StoreError::GaveUp {
            operation: doing.operation,
            key: doing.key.to_owned(),
            attempts: 1,
            elapsed: Duration::ZERO,
            limit: RetryLimit::Refusal,
            source: Box::new(error),
        })?;
        Ok(PutOutcome::Created)
    }

    fn put_part(
        &self,
        upload: &UploadId,
        number: PartNumber,
        body: &PartBody,
        doing: Doing<'_>,
    ) -> Result<PartReceipt, StoreError> {
        if !body.has_its_checksum() {
            return Err(doing.refused(format!("part {number} is not what its checksum says")));
        }
        let (file, mut offset) = {
            let mut uploads = self.uploads();
            let open = uploads
                .get_mut(upload)
                .filter(|open| open.key.as_str() == doing.key)
                .ok_or_else(|| doing.not_found())?;
            (Arc::clone(&open.file), open.place(number, body.len))
        };
        let placed = Placed {
            offset,
            len: body.len,
            crc64: body.crc64,
            etag: format!("\"{:016x}-{}\"", body.crc64, body.len),
        };
        for piece in &body.pieces {
            let written = file.write_all_at(piece, offset);
            written.map_err(|error| doing.failed(error))?;
            offset += piece.len() as u64;
        }
        let receipt = PartReceipt {
            number,
            etag: placed.etag.clone(),
            len: body.len,
            crc64: body.crc64,
            crc32: None,
        };
        let mut uploads = self.uploads();
        let open = uploads.get_mut(upload).ok_or_else(|| doing.not_found())?;
        open.parts.insert(number, placed);
        Ok(receipt)
    }

    fn complete(
        &self,
        upload: &UploadId,
        receipts: &[PartReceipt],
        len: u64,
        crc64: u64,
        doing: Doing<'_>,
    ) -> Result<(), StoreError> {
        let (file, parts) = {
            let uploads = self.uploads();
            let open = uploads
                .get(upload)
                .filter(|open| open.key.as_str() == doing.key)
                .ok_or_else(|| doing.not_found())?;
            (Arc::clone(&open.file), named_parts(open, receipts, doing)?)
        };
        let sent_len: u64 = parts.iter().map(|part| part.len).sum();
        if sent_len != len {
            return Err(doing.refused(format!("{sent_len} bytes, announced {len}")));
        }
        // Of what was written, whatever the receipts say.
        let sum = parts.iter().fold(Crc64::EMPTY, |sum, part| {
            sum.combine(Crc64::from_value(part.crc64), part.len)
        });
        if sum.value() != crc64 {
            return Err(doing.mismatch("CRC64NVME of the whole object".to_owned()));
        }
        let path = self.root.join(UPLOADS).join(&upload.0);
        let is_whole = bring_near(&file, &parts).map_err(|error| doing.failed(error))?;
        if is_whole {
            file.set_len(len).map_err(|error| doing.failed(error))?;
            self.name_object(&file, &path, doing)?;
        } else {
            let (joined_path, _, joined) = self.create(doing)?;
            let named = join(&file, &parts, &joined)
                .map_err(|error| doing.failed(error))
                .and_then(|()| self.name_object(&joined, &joined_path, doing));
            // Named or not, it is not needed under this name.
            let _gone = fs::remove_file(&joined_path);
            named?;
        }
        self.uploads().remove(upload);
        // It has its own name now, or a copy of it has.
        let _gone = fs::remove_file(&path);
        Ok(())
    }

    /// Keys of uploads are fresh, so whatever has the name is ours, from an attempt whose answer was lost; who looks will see its length and read its bytes.
    fn name_object(&self, file: &File, from: &Path, doing: Doing<'_>) -> Result<(), StoreError> {
        match self.publish(file, from, doing.key, doing)? {
            PutOutcome::Created => Ok(()),
            PutOutcome::AlreadyExists => Err(doing.refused("an object has this key".to_owned())),
        }
    }

    /// The object's file, once it is known to be one.
    fn object(&self, doing: Doing<'_>) -> Result<(File, fs::Metadata), StoreError> {
        let failed = |error| doing.failed(error);
        let file = File::open(self.path(doing.key)).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if metadata.is_file() {
            Ok((file, metadata))
        } else {
            Err(doing.not_found())
        }
    }

    /// Files below a directory, as keys.
    fn walk(
        &self,
        folder: &Path,
        doing: Doing<'_>,
        found: &mut Vec<Listed>,
    ) -> Result<(), StoreError> {
        for entry in entries(folder, doing)? {
            let path = folder.join(entry.file_name());
            let Some(key) = self.key_of(&path) else {
                continue;
            };
            // It may be gone by now.
            match entry.metadata() {
                Ok(metadata) if metadata.is_dir() => self.walk(&path, doing, found)?,
                Ok(metadata) if metadata.is_file() => found.push(Listed {
                    key,
                    len: metadata.len(),
                }),
                _ => {}
            }
        }
        Ok(())
    }

    /// `None` for what cannot be an object.
    fn key_of(&self, path: &Path) -> Option<Key> {
        let relative = path.strip_prefix(&self.root).ok()?.to_str()?;
        let is_object = relative.split('/').next() != Some(UPLOADS);
        Key::new(relative).ok().filter(|_| is_object)
    }

    fn delete(&self, doing: Doing<'_>) -> Result<(), StoreError> {
        let path = self.path(doing.key);
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(doing.failed(error)),
        }
        let mut folder = path.parent();
        while let Some(empty) = folder.filter(|folder| *folder != self.root) {
            if fs::remove_dir(empty).is_err() {
                return sync_directory(empty, doing);
            }
            folder = empty.parent();
        }
        sync_directory(&self.root, doing)
    }
}

/// What distinguishes an object from another that had its key before. Nothing overwrites one in place.
fn tag(metadata: &fs::Metadata) -> String {
    format!(
        "\"{:x}-{:x}-{:x}.{:x}\"",
        metadata.ino(),
        metadata.len(),
        metadata.mtime(),
        metadata.mtime_nsec()
    )
}

impl Store for FileStore {
    fn begin_upload<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        let own = key.clone();
        self.on_disk("CreateMultipartUpload", key.as_str(), move |disk, doing| {
            let (_, name, file) = disk.create(doing)?;
            let id = UploadId(name);
            let upload = Upload {
                key: own,
                file: Arc::new(file),
                stride: 0,
                places: BTreeMap::new(),
                parts: BTreeMap::new(),
            };
            disk.uploads().insert(id.clone(), upload);
            Ok(id)
        })
        .boxed()
    }

    fn put_part<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        number: PartNumber,
        body: PartBody,
    ) -> BoxFuture<'a, Result<PartReceipt, StoreError>> {
        let upload = upload.clone();
        self.on_disk("UploadPart", key.as_str(), move |disk, doing| {
            disk.put_part(&upload, number, &body, doing)
        })
        .boxed()
    }

    fn complete_upload<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        parts: &'a [PartReceipt],
        len: u64,
        crc64: u64,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let (upload, parts) = (upload.clone(), parts.to_vec());
        self.on_disk(
            "CompleteMultipartUpload",
            key.as_str(),
            move |disk, doing| disk.complete(&upload, &parts, len, crc64, doing),
        )
        .boxed()
    }

    fn abort_upload<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let upload = upload.clone();
        self.on_disk("AbortMultipartUpload", key.as_str(), move |disk, doing| {
            // Also one that an earlier process left. The name is one of ours: it cannot lead elsewhere.
            let is_name =
                upload.0.len() == 32 && upload.0.bytes().all(|byte| byte.is_ascii_hexdigit());
            if !is_name {
                return Ok(());
            }
            disk.uploads().remove(&upload);
            match fs::remove_file(disk.root.join(UPLOADS).join(&upload.0)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(doing.failed(error)),
                _ => Ok(()),
            }
        })
        .boxed()
    }

    fn put_if_absent<'a>(
        &'a self,
        key: &'a Key,
        body: Bytes,
    ) -> BoxFuture<'a, Result<PutOutcome, StoreError>> {
        self.on_disk("PutObject", key.as_str(), move |disk, doing| {
            let (path, _, file) = disk.create(doing)?;
            let put = file
                .write_all_at(&body, 0)
                .map_err(|error| doing.failed(error))
                .and_then(|()| disk.publish(&file, &path, doing.key, doing));
            // Named or not, it is not needed under this name.
            let _gone = fs::remove_file(&path);
            put
        })
        .boxed()
    }

    fn get<'a>(
        &'a self,
        key: &'a Key,
        len_max: usize,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        self.on_disk("GetObject", key.as_str(), move |disk, doing| {
            let (file, metadata) = match disk.object(doing) {
                Err(error) if error.is_not_found() => return Ok(None),
                found => found?,
            };
            let len = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
            if len > len_max {
                return Err(doing.mismatch(format!("{len} bytes, at most {len_max} expected")));
            }
            let mut bytes = vec![0; len];
            let read = file.read_exact_at(&mut bytes, 0);
            read.map_err(|error| doing.failed(error))?;
            Ok(Some(Bytes::from(bytes)))
        })
        .boxed()
    }

    fn read_range<'a>(
        &'a self,
        key: &'a Key,
        range: Range<u64>,
        if_match: Option<&'a str>,
        sink: &'a mut dyn RangeSink,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        const OPERATION: &str = "GetObject";
        async move {
            let (expected, wanted) = (if_match.map(str::to_owned), range.clone());
            let opened = self.on_disk(OPERATION, key.as_str(), move |disk, doing| {
                let (file, metadata) = disk.object(doing)?;
                if expected.is_some_and(|expected| expected != tag(&metadata)) {
                    return Err(doing.mismatch("the object's tag has changed".to_owned()));
                }
                if wanted.end > metadata.len() || wanted.start > wanted.end {
                    let len = metadata.len();
                    return Err(
                        doing.mismatch(format!("range {wanted:?} of an object of {len} bytes"))
                    );
                }
                Ok(file)
            });
            let mut file = opened.await?;
            let mut buffer = Vec::new();
            let mut at = range.start;
            sink.restart();
            while at < range.end {
                let len =
                    usize::try_from(range.end - at).map_or(READ_LEN, |left| left.min(READ_LEN));
                let read = self.on_disk(OPERATION, key.as_str(), move |_, doing| {
                    buffer.resize(len, 0);
                    let read = file.read_exact_at(&mut buffer, at);
                    read.map_err(|error| match error.kind() {
                        // Nothing of ours shortens a file.
                        io::ErrorKind::UnexpectedEof => doing.mismatch("it ends early".to_owned()),
                        _ => doing.failed(error),
                    })?;
                    Ok((file, buffer))
                });
                (file, buffer) = read.await?;
                sink.put(&buffer);
                at += len as u64;
            }
            Ok(())
        }
        .boxed()
    }

    fn head<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<Option<ObjectInfo>, StoreError>> {
        self.on_disk("HeadObject", key.as_str(), move |disk, doing| {
            match disk.object(doing) {
                Err(error) if error.is_not_found() => Ok(None),
                Err(error) => Err(error),
                Ok((_, metadata)) => Ok(Some(ObjectInfo {
                    len: metadata.len(),
                    etag: Some(tag(&metadata)),
                    crc64: None,
                    age: disk
                        .clock()
                        .ok()
                        .zip(metadata.modified().ok())
                        .and_then(|(now, then)| now.duration_since(then).ok()),
                })),
            }
        })
        .boxed()
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<Listed>, StoreError>> {
        let own = prefix.to_owned();
        self.on_disk(
            "ListObjects",
            super::listing_name(prefix),
            move |disk, doing| {
                let folder = own.rsplit_once('/').map_or("", |(folder, _)| folder);
                let mut found = Vec::new();
                disk.walk(&disk.path(folder), doing, &mut found)?;
                found.retain(|listed| listed.key.as_str().starts_with(&own));
                found.sort_by(|one, other| one.key.cmp(&other.key));
                Ok(found)
            },
        )
        .boxed()
    }

    fn list_dirs<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>, StoreError>> {
        let own = prefix.to_owned();
        self.on_disk(
            "ListObjects",
            super::listing_name(prefix),
            move |disk, doing| {
                let folder = disk.path(own.trim_end_matches('/'));
                let mut names = Vec::new();
                for entry in entries(&folder, doing)? {
                    let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
                    let is_ours = disk.key_of(&folder.join(entry.file_name())).is_some();
                    if let (true, true, Ok(name)) =
                        (is_folder, is_ours, entry.file_name().into_string())
                    {
                        names.push(name);
                    }
                }
                names.sort_unstable();
                Ok(names)
            },
        )
        .boxed()
    }

    fn abort_uploads_under<'a>(
        &'a self,
        prefix: &'a str,
    ) -> BoxFuture<'a, Result<u64, StoreError>> {
        // A file of an upload does not say of which key it is, so those of other processes are swept once they are dead, whatever they were for.
        async move {
            self.sweep().await?;
            let own: Vec<(UploadId, Key)> = {
                let uploads = self.disk.uploads();
                let under = uploads
                    .iter()
                    .filter(|(_, open)| open.key.as_str().starts_with(prefix));
                under
                    .map(|(upload, open)| (upload.clone(), open.key.clone()))
                    .collect()
            };
            for (upload, key) in &own {
                self.abort_upload(key, upload).await?;
            }
            Ok(own.len() as u64)
        }
        .boxed()
    }

    fn delete<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<(), StoreError>> {
        self.on_disk("DeleteObject", key.as_str(), |disk, doing| {
            disk.delete(doing)
        })
        .boxed()
    }

    fn describe(&self) -> String {
        format!("file://{}", self.disk.root.display())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::fs::fstatfs;
    use rustix::io::{Errno, ReadWriteFlags, preadv2};

    use super::*;
    use crate::store::PART_LEN_MIN;

    fn key(text: &str) -> Key {
        Key::new(text).unwrap()
    }

    fn body(bytes: &[u8]) -> PartBody {
        PartBody::new(
            vec![Bytes::copy_from_slice(bytes)],
            Crc64::of(bytes).value(),
        )
    }

    fn number(number: u64) -> PartNumber {
        PartNumber::new(number).unwrap()
    }

    /// Everything below a directory but directories.
    fn files(folder: &Path) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.file_type().unwrap().is_dir() {
                true => found.extend(files(&entry.path())),
                false => found.push(entry.path()),
            }
        }
        found
    }

    #[tokio::test]
    async fn equal_parts_are_written_where_they_stay() {
        let root = tempfile::tempdir().unwrap();
        let store = FileStore::open(root.path()).unwrap();
        let here = key("job/object");
        let id = store.begin_upload(&here).await.unwrap();
        let len = usize::try_from(PART_LEN_MIN).unwrap();
        let mut receipts = Vec::new();
        for (part, bytes) in [(1, vec![1; len]), (3, vec![3; 10]), (2, vec![2; len])] {
            let put = store.put_part(&here, &id, number(part), body(&bytes));
            receipts.push(put.await.unwrap());
        }
        let parts: Vec<Placed> = store.disk.uploads()[&id].parts.values().cloned().collect();
        let ends = parts.iter().scan(0, |end, part| {
            let start = *end;
            *end += part.len;
            Some(start)
        });
        assert!(ends.eq(parts.iter().map(|part| part.offset)), "{parts:?}");
        store.abort_upload(&here, &id).await.unwrap();
        assert_eq!(files(root.path()), Vec::<PathBuf>::new());
    }

    #[tokio::test]
    async fn a_last_part_that_comes_first_ends_up_last() {
        let root = tempfile::tempdir().unwrap();
        let store = FileStore::open(root.path()).unwrap();
        let here = key("job/object");
        let id = store.begin_upload(&here).await.unwrap();
        let first = vec![1; usize::try_from(PART_LEN_MIN).unwrap()];
        let two = store
            .put_part(&here, &id, number(2), body(b"end"))
            .await
            .unwrap();
        let one = store
            .put_part(&here, &id, number(1), body(&first))
            .await
            .unwrap();
        let whole = [&first[..], b"end"].concat();
        let (len, sum) = (whole.len() as u64, Crc64::of(&whole).value());
        store
            .complete_upload(&here, &id, &[one, two], len, sum)
            .await
            .unwrap();
        let read = store.get(&here, whole.len()).await.unwrap().unwrap();
        assert!(read == whole);
        assert_eq!(files(root.path()).len(), 1, "nothing of the upload is left");
    }

    #[tokio::test]
    async fn what_is_read_back_comes_from_the_disk() {
        let root = tempfile::tempdir().unwrap();
        let store = FileStore::open(root.path()).unwrap();
        let here = key("job/object");
        let id = store.begin_upload(&here).await.unwrap();
        let bytes = vec![7; usize::try_from(PART_LEN_MIN).unwrap()];
        let part = store.put_part(&here, &id, number(1), body(&bytes));
        let (parts, sum) = ([part.await.unwrap()], Crc64::of(&bytes).value());
        let whole = store.complete_upload(&here, &id, &parts, bytes.len() as u64, sum);
        whole.await.unwrap();
        let file = File::open(root.path().join(here.as_str())).unwrap();
        let is_cached = || {
            let mut byte = [0];
            let mut into = [io::IoSliceMut::new(&mut byte)];
            match preadv2(&file, &mut into, 4096, ReadWriteFlags::NOWAIT) {
                Ok(_) => Some(true),
                Err(Errno::AGAIN) => Some(false),
                // A file system that does not say.
                Err(_) => None,
            }
        };
        const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];
        let kind = fstatfs(&file).unwrap().f_type;
        // Asked once: the kernel reads ahead what it has just said that it does not have.
        let at_first = is_cached();
        if IN_MEMORY.contains(&kind) || at_first.is_none() {
            return;
        }
        // The page cache has let it go, which it does only of what the disk has.
        assert_eq!(at_first, Some(false));
        let read = store.get(&here, bytes.len()).await.unwrap();
        assert!(read.as_deref() == Some(&bytes[..]));
        assert_eq!(is_cached(), Some(true), "it can be told");
    }

    #[tokio::test]
    async fn what_an_earlier_process_left_is_no_object_and_can_be_given_up() {
        let root = tempfile::tempdir().unwrap();
        let here = key("job/object");
        let earlier = FileStore::open(root.path()).unwrap();
        let id = earlier.begin_upload(&here).await.unwrap();
        drop(earlier);
        let store = FileStore::open(root.path()).unwrap();
        assert_eq!(store.list("").await.unwrap(), []);
        assert_eq!(store.list_dirs("").await.unwrap(), Vec::<String>::new());
        store.abort_upload(&here, &id).await.unwrap();
        assert_eq!(files(root.path()), Vec::<PathBuf>::new());
        // Somebody else's name is not ours to remove.
        fs::write(root.path().join("kept"), b"kept").unwrap();
        let elsewhere = UploadId("../kept".to_owned());
        store.abort_upload(&here, &elsewhere).await.unwrap();
        assert_eq!(files(root.path()).len(), 1);
    }

    #[tokio::test]
    async fn files_are_for_their_owner_and_no_directory_is_left_empty() {
        let root = tempfile::tempdir().unwrap();
        let store = FileStore::open(root.path()).unwrap();
        let here = key("job/log/00000001.json");
        let created = store.put_if_absent(&here, Bytes::from_static(b"{}")).await;
        assert_eq!(created.unwrap(), PutOutcome::Created);
        let mode = fs::metadata(root.path().join(here.as_str()))
            .unwrap()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
        store.delete(&here).await.unwrap();
        assert!(!root.path().join("job").exists() && root.path().exists());
    }

    #[tokio::test]
    async fn no_link_below_the_root_is_followed() {
        let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(outside.path().join("object"), b"theirs").unwrap();
        let link = |to: &Path, name: &str| symlink(to, root.path().join(name)).unwrap();
        link(outside.path(), "job");
        link(&outside.path().join("object"), "object");
        // The root itself may be reached by one.
        link(root.path(), "root");
        let store = FileStore::open(&root.path().join("root")).unwrap();
        let is_refused = |error: StoreError| {
            let told = matches!(&error, StoreError::Refused { code, .. } if code.contains("symbolic link"));
            assert!(told, "{error:?}");
        };
        for name in ["job/object", "object", "job/new"] {
            let here = key(name);
            is_refused(store.get(&here, 100).await.unwrap_err());
            is_refused(store.head(&here).await.unwrap_err());
            is_refused(store.delete(&here).await.unwrap_err());
            let put = store.put_if_absent(&here, Bytes::from_static(b"ours"));
            is_refused(put.await.unwrap_err());
            is_refused(store.begin_upload(&here).await.unwrap_err());
        }
        assert_eq!(store.list("").await.unwrap(), []);
        is_refused(store.list("job/").await.unwrap_err());
        let kept = fs::read(outside.path().join("object")).unwrap();
        assert_eq!(
            (kept.as_slice(), files(outside.path()).len()),
            (&b"theirs"[..], 1)
        );
        let other = tempfile::tempdir().unwrap();
        symlink(outside.path(), other.path().join(UPLOADS)).unwrap();
        let store = FileStore::open(other.path()).unwrap();
        let here = key("a/b");
        let put = store.put_if_absent(&here, Bytes::from_static(b"ours"));
        is_refused(put.await.unwrap_err());
        assert_eq!(files(outside.path()).len(), 1);
    }

    #[test]
    fn faults_are_sorted_by_what_helps() {
        let doing = Doing {
            operation: "UploadPart",
            key: "a",
            setting: "store.url",
        };
        for (errno, is_retryable) in [
            (libc_code::ENOSPC, false),
            (libc_code::EDQUOT, false),
            (libc_code::EROFS, false),
            (libc_code::EACCES, false),
            (libc_code::EIO, true),
            (libc_code::EINTR, true),
        ] {
            let error = doing.failed(io::Error::from_raw_os_error(errno));
            assert_eq!(error.is_retryable(), is_retryable, "{errno}: {error}");
        }
        let unsynced = doing.unsynced(&io::Error::from_raw_os_error(libc_code::EIO));
        assert!(!unsynced.is_retryable(), "{unsynced}");
    }

    /// Numbers of errno.h on Linux.
    mod libc_code {
        pub(super) const EINTR: i32 = 4;
        pub(super) const EIO: i32 = 5;
        pub(super) const EACCES: i32 = 13;
        pub(super) const ENOSPC: i32 = 28;
        pub(super) const EROFS: i32 = 30;
        pub(super) const EDQUOT: i32 = 122;
    }
}
