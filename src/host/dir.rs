//! The directory in which CRIU finds our socket, and leaves its log.
//!
//! In: nothing. Out: a directory that is ours alone, and is gone when this is dropped. What can fail: the file system.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::writer::random_hex;

/// See the module.
#[derive(Debug)]
pub struct ImagesDir {
    path: PathBuf,
}

impl ImagesDir {
    /// Makes one. Its path is short, because a socket's must be.
    ///
    /// # Errors
    /// The file system's.
    pub fn make() -> io::Result<Self> {
        let path = std::env::temp_dir().join(format!("ckptstream-criu-{}", random_hex::<8>()));
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self { path })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ImagesDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::debug!("{} stays: {error}", self.path.display());
        }
    }
}
