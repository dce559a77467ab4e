//! Memory that is a file's bytes, for benches: repeated where the memory is longer than the file.
//!
//! In: a path, and an offset into the GPU's memory. Out: the bytes that belong there. Fails on a file that cannot be read, that is empty, or that
//! grew shorter meanwhile.
//!
//! The first pass over the file is the file as it is. Each later pass starts at another place of it, a multiple of [`ALIGNMENT`], and wraps at its
//! end: so repeats are not at one distance, and tensors keep their element's place in a word, and caches their pages.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::TargetError;
use super::fill::mix;

/// Where a pass may start: a page, which is a whole number of elements of any type.
const ALIGNMENT: u64 = 4096;

/// An open file that fills memory.
#[derive(Debug)]
pub(super) struct FileBytes {
    file: File,
    path: PathBuf,
    len: u64,
}

impl FileBytes {
    /// Opens the file and takes its length.
    ///
    /// # Errors
    /// The file cannot be opened, or has no bytes to fill memory with.
    pub(super) fn open(path: &Path) -> Result<Self, TargetError> {
        let opened = File::open(path).and_then(|file| {
            let len = file.metadata()?.len();
            if len == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it is empty"));
            }
            Ok((file, len))
        });
        let (file, len) = opened.map_err(|error| unreadable(path, error))?;
        let path = path.to_owned();
        Ok(Self { file, path, len })
    }

    /// Writes what stands from `offset` of the memory on over the whole of `bytes`.
    ///
    /// # Errors
    /// The file cannot be read, or became shorter.
    pub(super) fn read(&self, mut offset: u64, mut bytes: &mut [u8]) -> Result<(), TargetError> {
        while !bytes.is_empty() {
            let (pass, place) = (offset / self.len, offset % self.len);
            let turned = (self.start_of(pass) + place) % self.len;
            // Up to the end of the pass, or of the file, whichever is nearer.
            let left = self.len - place.max(turned);
            let here = usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
            let (now, later) = bytes.split_at_mut(here);
            self.file
                .read_exact_at(now, turned)
                .map_err(|error| unreadable(&self.path, error))?;
            offset += here as u64;
            bytes = later;
        }
        Ok(())
    }

    /// The offset in the file at which a pass starts.
    fn start_of(&self, pass: u64) -> u64 {
        let places = self.len.div_ceil(ALIGNMENT);
        if pass == 0 {
            0
        } else {
            mix(pass, places) % places * ALIGNMENT
        }
    }
}

fn unreadable(path: &Path, source: io::Error) -> TargetError {
    let path = path.to_owned();
    TargetError::FillFile { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(bytes: &[u8]) -> (tempfile::NamedTempFile, FileBytes) {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        std::fs::write(file.path(), bytes).expect("write");
        let bytes = FileBytes::open(file.path()).expect("open");
        (file, bytes)
    }

    #[test]
    fn passes_are_the_file_turned() {
        // Longer than some pages and no multiple of one; a word says where it stood.
        let raw: Vec<u8> = (0..10_001_u32).flat_map(u32::to_le_bytes).collect();
        let (_file, bytes) = opened(&raw);
        let mut starts = Vec::new();
        for pass in 0..8 {
            let mut memory = vec![0; raw.len()];
            bytes
                .read(pass * raw.len() as u64, &mut memory)
                .expect("read");
            let first = u32::from_le_bytes([memory[0], memory[1], memory[2], memory[3]]);
            let start = 4 * first as usize;
            assert!(start.is_multiple_of(4096), "pass {pass} starts at {start}");
            assert_eq!(memory[..raw.len() - start], raw[start..]);
            assert_eq!(memory[raw.len() - start..], raw[..start]);
            starts.push(start);
        }
        assert_eq!(starts[0], 0);
        starts.dedup();
        assert!(starts.len() > 4, "passes differ: {starts:?}");
    }

    #[test]
    fn any_cut_reads_the_same_bytes() {
        let raw: Vec<u8> = (0..9_000_u32)
            .map(|byte| byte.to_le_bytes()[0] ^ byte.to_le_bytes()[1])
            .collect();
        let (_file, bytes) = opened(&raw);
        let mut whole = vec![0; 40_000];
        bytes.read(0, &mut whole).expect("read");
        for len in [1, 4095, 7_777, 12_345] {
            let mut cut = vec![0; whole.len()];
            for (index, place) in cut.chunks_mut(len).enumerate() {
                bytes.read((index * len) as u64, place).expect("read");
            }
            assert_eq!(cut, whole, "in pieces of {len}");
        }
    }

    #[test]
    fn no_file_and_an_empty_file_are_named() {
        let (file, _) = opened(b"x");
        std::fs::write(file.path(), b"").expect("write");
        let error = FileBytes::open(file.path()).expect_err("empty");
        assert!(
            error
                .to_string()
                .contains(&file.path().display().to_string()),
            "{error}"
        );
        let path = file.path().to_owned();
        drop(file);
        FileBytes::open(&path).expect_err("gone");
    }
}
