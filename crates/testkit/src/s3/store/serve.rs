//! Files as objects: a folder is read into memory at the start, for restores that are to be measured.
//!
//! In: `dir/<bucket>/<key…>`, plain files. Out: one object each with a CRC64NVME; its ETag is made from that value, since an MD5 of
//! gigabytes would delay the start.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use super::blob::Blob;
use super::checksum::{Algorithm, ChecksumKind, Hasher};
use super::objects::hex;
use super::{Meta, Object, Store, unix_us};

/// Loads every file under `dir`.
pub(super) fn load(store: &Store, dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            let bucket = utf8(&entry.path(), dir)?;
            store.make_bucket(&bucket)?;
            load_folder(store, &bucket, &entry.path(), &entry.path())?;
        }
    }
    Ok(())
}

fn load_folder(store: &Store, bucket: &str, top: &Path, folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            load_folder(store, bucket, top, &path)?;
        } else {
            let key = utf8(&path, top)?;
            let object = object(Bytes::from(fs::read(&path)?));
            store
                .commit(&mut store.lock(), bucket, &key, object)
                .map_err(io::Error::other)?;
        }
    }
    Ok(())
}

fn object(data: Bytes) -> Object {
    let mut hasher = Hasher::new([Algorithm::Crc64Nvme]);
    hasher.update(&data);
    let sums = hasher.finish();
    let etag = hex(sums
        .get(Algorithm::Crc64Nvme)
        .unwrap_or_default()
        .as_bytes());
    let len = data.len() as u64;
    Object {
        len,
        etag,
        modified_us: unix_us(),
        sums,
        kind: ChecksumKind::FullObject,
        blobs: vec![Arc::new(Blob::Memory {
            len,
            pieces: vec![data],
        })],
        upload: None,
        meta: Meta::default(),
    }
}

fn utf8(path: &Path, base: &Path) -> io::Result<String> {
    let name = path.strip_prefix(base).ok().and_then(Path::to_str);
    name.map(str::to_owned)
        .ok_or_else(|| io::Error::other(format!("{} is not a UTF-8 name", path.display())))
}
