//! A store that outlives its process.
//!
//! ```text
//! root/blobs/<id>                             bytes of one part or one put object
//! root/buckets/<bucket>/objects/<sha256 of key>.json   an object: its key, its blobs, its checksums
//! root/buckets/<bucket>/uploads/<id>/upload.json       an open upload
//! root/buckets/<bucket>/uploads/<id>/part-<n>.json     a part of it
//! ```
//!
//! Every JSON file is written under another name and renamed, and only after its blobs are whole: a process killed at any moment leaves
//! each object and part either as it was or as it is to be. An upload whose object exists is what a killed Complete left: the next start
//! removes it, and every blob that nothing names. (Nothing is synced: a power cut is not survived.)

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use s3s::crypto::{Checksum as _, Sha256};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::blob::{Blob, FileBlob};
use super::checksum::{Algorithm, ChecksumKind, Sums};
use super::objects::hex;
use super::{Bucket, Buckets, Meta, Object, Part, Upload};

/// The root folder.
pub(super) struct Disk {
    root: PathBuf,
}

#[derive(Serialize, Deserialize)]
struct BlobRecord {
    file: String,
    len: u64,
}

#[derive(Serialize, Deserialize)]
struct ObjectRecord {
    key: String,
    etag: String,
    modified_us: u64,
    sums: Sums,
    kind: ChecksumKind,
    blobs: Vec<BlobRecord>,
    upload: Option<String>,
    meta: Meta,
}

#[derive(Serialize, Deserialize)]
struct UploadRecord {
    key: String,
    initiated_us: u64,
    algorithm: Option<Algorithm>,
    kind: ChecksumKind,
    meta: Meta,
}

#[derive(Serialize, Deserialize)]
struct PartRecord {
    number: u32,
    etag: String,
    modified_us: u64,
    sums: Sums,
    blob: BlobRecord,
}

impl Disk {
    /// Opens or makes a root folder and reads everything in it but the blobs.
    pub(super) fn open(root: &Path) -> io::Result<(Self, Buckets)> {
        let disk = Self {
            root: root.to_owned(),
        };
        fs::create_dir_all(disk.root.join("blobs"))?;
        fs::create_dir_all(disk.root.join("buckets"))?;
        let mut buckets = Buckets::new();
        for name in names(&disk.root.join("buckets"))? {
            let bucket = disk.load_bucket(&name)?;
            buckets.insert(name, bucket);
        }
        disk.sweep(&buckets)?;
        Ok((disk, buckets))
    }

    pub(super) fn blob_path(&self, id: &str) -> PathBuf {
        self.root.join("blobs").join(id)
    }

    fn bucket_dir(&self, bucket: &str) -> PathBuf {
        self.root.join("buckets").join(bucket)
    }

    fn object_path(&self, bucket: &str, key: &str) -> PathBuf {
        self.bucket_dir(bucket)
            .join("objects")
            .join(format!("{}.json", hex(&Sha256::checksum(key.as_bytes()))))
    }

    fn upload_dir(&self, bucket: &str, id: &str) -> PathBuf {
        self.bucket_dir(bucket).join("uploads").join(id)
    }

    pub(super) fn make_bucket(&self, bucket: &str) -> io::Result<()> {
        fs::create_dir_all(self.bucket_dir(bucket).join("uploads"))?;
        fs::create_dir_all(self.bucket_dir(bucket).join("objects"))
    }

    pub(super) fn remove_bucket(&self, bucket: &str) -> io::Result<()> {
        fs::remove_dir_all(self.bucket_dir(bucket))
    }

    pub(super) fn put_object(&self, bucket: &str, key: &str, object: &Object) -> io::Result<()> {
        let record = ObjectRecord {
            key: key.to_owned(),
            etag: object.etag.clone(),
            modified_us: object.modified_us,
            sums: object.sums.clone(),
            kind: object.kind,
            blobs: object
                .blobs
                .iter()
                .map(|blob| blob_record(blob))
                .collect::<io::Result<_>>()?,
            upload: object.upload.clone(),
            meta: object.meta.clone(),
        };
        write(&self.object_path(bucket, key), &record)
    }

    pub(super) fn remove_object(&self, bucket: &str, key: &str) -> io::Result<()> {
        fs::remove_file(self.object_path(bucket, key))
    }

    pub(super) fn put_upload(
        &self,
        bucket: &str,
        key: &str,
        id: &str,
        upload: &Upload,
    ) -> io::Result<()> {
        let dir = self.upload_dir(bucket, id);
        fs::create_dir_all(&dir)?;
        let record = UploadRecord {
            key: key.to_owned(),
            initiated_us: upload.initiated_us,
            algorithm: upload.algorithm,
            kind: upload.kind,
            meta: upload.meta.clone(),
        };
        write(&dir.join("upload.json"), &record)
    }

    pub(super) fn put_part(
        &self,
        bucket: &str,
        id: &str,
        number: u32,
        part: &Part,
    ) -> io::Result<()> {
        let record = PartRecord {
            number,
            etag: part.etag.clone(),
            modified_us: part.modified_us,
            sums: part.sums.clone(),
            blob: blob_record(&part.blob)?,
        };
        write(
            &self
                .upload_dir(bucket, id)
                .join(format!("part-{number}.json")),
            &record,
        )
    }

    pub(super) fn remove_upload(&self, bucket: &str, id: &str) -> io::Result<()> {
        fs::remove_dir_all(self.upload_dir(bucket, id))
    }

    fn load_bucket(&self, name: &str) -> io::Result<Bucket> {
        let dir = self.bucket_dir(name);
        self.make_bucket(name)?;
        let created_us = fs::metadata(&dir)?
            .modified()?
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(0));
        let mut bucket = Bucket {
            created_us,
            ..Bucket::default()
        };
        for file in names(&dir.join("objects"))?
            .iter()
            .filter(|file| file.ends_with(".json"))
        {
            let record: ObjectRecord = read(&dir.join("objects").join(file))?;
            let blobs: Vec<Arc<Blob>> = record
                .blobs
                .iter()
                .map(|blob| self.load_blob(blob))
                .collect::<io::Result<_>>()?;
            let object = Object {
                len: blobs.iter().map(|blob| blob.len()).sum(),
                etag: record.etag,
                modified_us: record.modified_us,
                sums: record.sums,
                kind: record.kind,
                blobs,
                upload: record.upload,
                meta: record.meta,
            };
            bucket.objects.insert(record.key, Arc::new(object));
        }
        let completed: HashSet<&String> = bucket
            .objects
            .values()
            .filter_map(|object| object.upload.as_ref())
            .collect();
        let mut uploads = BTreeMap::new();
        for id in names(&dir.join("uploads"))? {
            let upload_dir = dir.join("uploads").join(&id);
            if completed.contains(&id) || !upload_dir.join("upload.json").exists() {
                fs::remove_dir_all(&upload_dir)?;
                continue;
            }
            let (key, upload) = self.load_upload(&upload_dir)?;
            uploads.insert((key, id), upload);
        }
        bucket.uploads = uploads;
        Ok(bucket)
    }

    fn load_upload(&self, dir: &Path) -> io::Result<(String, Upload)> {
        let record: UploadRecord = read(&dir.join("upload.json"))?;
        let mut parts = BTreeMap::new();
        for file in names(dir)?
            .iter()
            .filter(|file| file.starts_with("part-") && file.ends_with(".json"))
        {
            let part: PartRecord = read(&dir.join(file))?;
            let blob = self.load_blob(&part.blob)?;
            parts.insert(
                part.number,
                Part {
                    etag: part.etag,
                    modified_us: part.modified_us,
                    sums: part.sums,
                    blob,
                },
            );
        }
        let upload = Upload {
            initiated_us: record.initiated_us,
            algorithm: record.algorithm,
            kind: record.kind,
            meta: record.meta,
            parts,
        };
        Ok((record.key, upload))
    }

    fn load_blob(&self, record: &BlobRecord) -> io::Result<Arc<Blob>> {
        let path = self.blob_path(&record.file);
        let len = fs::metadata(&path)
            .map_err(|error| named(&path, &error))?
            .len();
        if len != record.len {
            return Err(named(
                &path,
                &format!("{len} bytes instead of {}", record.len),
            ));
        }
        Ok(Arc::new(Blob::File(FileBlob::kept(path, len))))
    }

    /// Removes blobs that nothing names.
    fn sweep(&self, buckets: &Buckets) -> io::Result<()> {
        let objects = buckets
            .values()
            .flat_map(|bucket| bucket.objects.values())
            .flat_map(|object| &object.blobs);
        let parts = buckets
            .values()
            .flat_map(|bucket| bucket.uploads.values())
            .flat_map(|upload| upload.parts.values());
        let named: HashSet<&Path> = objects
            .chain(parts.map(|part| &part.blob))
            .filter_map(|blob| match &**blob {
                Blob::File(file) => Some(file.path.as_path()),
                Blob::Memory { .. } | Blob::Swallowed { .. } => None,
            })
            .collect();
        for file in names(&self.root.join("blobs"))? {
            let path = self.blob_path(&file);
            if !named.contains(path.as_path()) {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}

fn blob_record(blob: &Blob) -> io::Result<BlobRecord> {
    match blob {
        Blob::File(file) => {
            let name = file
                .path
                .file_name()
                .map(|name| name.to_string_lossy().into_owned())
                .unwrap_or_default();
            Ok(BlobRecord {
                file: name,
                len: file.len,
            })
        }
        Blob::Memory { .. } | Blob::Swallowed { .. } => Err(io::Error::other(
            "only files can be kept under a root folder",
        )),
    }
}

/// Names in a folder. A name that is not UTF-8 is not ours.
fn names(dir: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)? {
        if let Ok(name) = entry?.file_name().into_string() {
            names.push(name);
        }
    }
    Ok(names)
}

fn write<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    let text = serde_json::to_vec(value).map_err(io::Error::from)?;
    let new = path.with_extension("new");
    fs::write(&new, text)?;
    fs::rename(&new, path)
}

fn read<T: DeserializeOwned>(path: &Path) -> io::Result<T> {
    let text = fs::read(path).map_err(|error| named(path, &error))?;
    serde_json::from_slice(&text).map_err(|error| named(path, &error))
}

fn named(path: &Path, what: &dyn std::fmt::Display) -> io::Error {
    io::Error::other(format!("{}: {what}", path.display()))
}
