//! Which bytes of the host memory's object are which of CRIU's image files.
//!
//! In (out of the store): bytes whose digest the manifest holds. Out: a list of files, each with the runs of the object's raw bytes that it consists of, in its own order; together they are all of these bytes, each once. What can fail: the bytes are
//! not what was written, or break one of these rules. Knows no I/O.

use serde::{Deserialize, Serialize};

use super::{
    FORMAT, ManifestError, TableRecord, check_len, check_version, digest_of, ensure, parse,
};

/// Most bytes of the list, 16 MiB.
pub const HOST_FILES_LEN_MAX: usize = 16 << 20;

/// Most bytes of a file's name.
const NAME_LEN_MAX: usize = 255;

const HOST_FILES: &str = "list of host files";

/// Whether a name can be one of CRIU's image files: it is used as it is, and never as a path.
pub fn is_file_name(name: &str) -> bool {
    let is_legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    (1..=NAME_LEN_MAX).contains(&name.len()) && name.bytes().all(is_legal) && !name.starts_with('.')
}

/// CRIU's image files, in the order in which CRIU began to write them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostFiles {
    /// The files.
    pub files: Vec<HostFile>,
    /// Files of the node that the tree has open or mapped, which CRIU wants to find again as they were.
    pub wanted: Vec<WantedFile>,
}

/// A file of the node, by its path.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WantedFile {
    /// Absolute.
    pub path: String,
    /// Length in bytes.
    pub len: u64,
    /// The tree may write to it: it may have grown since.
    pub is_written: bool,
}

/// One image file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFile {
    /// As CRIU names it, for instance `pages-1.img`.
    pub name: String,
    /// Where its bytes are among the raw ones, in the file's order.
    pub runs: Vec<Run>,
}

/// Raw bytes of the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(u64, u64)", into = "(u64, u64)")]
pub struct Run {
    /// Of the first one.
    pub offset: u64,
    /// How many, above 0.
    pub len: u64,
}

impl From<(u64, u64)> for Run {
    fn from((offset, len): (u64, u64)) -> Self {
        Self { offset, len }
    }
}

impl From<Run> for (u64, u64) {
    fn from(run: Run) -> Self {
        (run.offset, run.len)
    }
}

#[derive(Serialize, Deserialize)]
struct File {
    format: u32,
    features: Vec<String>,
    files: Vec<HostFile>,
    wanted: Vec<WantedFile>,
}

impl HostFile {
    /// A file without bytes yet.
    pub fn new(name: String) -> Self {
        let runs = Vec::new();
        Self { name, runs }
    }

    /// The file goes on with these bytes.
    pub fn add(&mut self, offset: u64, len: u64) {
        match self.runs.last_mut() {
            Some(last) if last.offset + last.len == offset => last.len += len,
            _ => self.runs.push(Run { offset, len }),
        }
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.runs.iter().map(|run| run.len).sum()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }
}

impl HostFiles {
    /// The bytes to store.
    pub fn encode(&self) -> Vec<u8> {
        let file = File {
            format: FORMAT,
            features: Vec::new(),
            files: self.files.clone(),
            wanted: self.wanted.clone(),
        };
        serde_json::to_vec(&file).expect("text and numbers are always representable as JSON")
    }

    /// Reads the bytes that the manifest's `record` names, for raw bytes of this length. Nothing is parsed before the digest of the bytes is right.
    ///
    /// # Errors
    /// When the bytes are too long, damaged, of another format, need an unknown feature, or the files are not all of the raw bytes, each once.
    pub fn decode_and_verify(
        bytes: &[u8],
        record: &TableRecord,
        raw_len: u64,
    ) -> Result<Self, ManifestError> {
        check_len(HOST_FILES, bytes.len(), HOST_FILES_LEN_MAX)?;
        let found = digest_of(bytes);
        if found != record.digest {
            return Err(ManifestError::Digest {
                what: HOST_FILES,
                found,
                expected: record.digest,
            });
        }
        check_version(HOST_FILES, bytes)?;
        let File { files, wanted, .. } = parse(HOST_FILES, bytes)?;
        let files = Self { files, wanted };
        files.verify(raw_len)?;
        Ok(files)
    }

    fn verify(&self, raw_len: u64) -> Result<(), ManifestError> {
        for wanted in &self.wanted {
            let is_a_path = wanted.path.starts_with('/') && !wanted.path.contains('\0');
            let rule = "it must be an absolute path";
            ensure(
                is_a_path,
                || "host files' wanted".to_owned(),
                &format_args!("{:?}", wanted.path),
                rule,
            )?;
        }
        let mut names: Vec<&str> = self.files.iter().map(|file| file.name.as_str()).collect();
        names.sort_unstable();
        for (at, name) in names.iter().enumerate() {
            let is_good = is_file_name(name) && names.get(at + 1) != Some(name);
            let rule = "it must be a plain name that no other file has";
            ensure(is_good, || "host files' name".to_owned(), name, rule)?;
        }
        let mut runs: Vec<Run> = self
            .files
            .iter()
            .flat_map(|file| &file.runs)
            .copied()
            .collect();
        runs.sort_unstable_by_key(|run| run.offset);
        let mut end = 0_u64;
        for run in runs {
            let next = end.checked_add(run.len).filter(|&next| next <= raw_len);
            let follows = run.offset == end && run.len > 0;
            let found = format_args!("[{}, {}]", run.offset, run.len);
            let rule = "the files must be all of the raw bytes, each once";
            ensure(
                follows && next.is_some(),
                || "host files' runs".to_owned(),
                &found,
                rule,
            )?;
            end = next.unwrap_or(end);
        }
        ensure(
            end == raw_len,
            || "host files' length".to_owned(),
            &end,
            "it must be that of the raw bytes",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, runs: &[(u64, u64)]) -> HostFile {
        HostFile {
            name: name.to_owned(),
            runs: runs.iter().copied().map(Run::from).collect(),
        }
    }

    fn read(files: Vec<HostFile>, raw_len: u64) -> Result<HostFiles, ManifestError> {
        let wanted = vec![WantedFile {
            path: "/var/log/job".to_owned(),
            len: 7,
            is_written: true,
        }];
        let bytes = HostFiles { files, wanted }.encode();
        let record = TableRecord {
            key: "data/x/host-files.json".to_owned(),
            len: bytes.len() as u64,
            digest: digest_of(&bytes),
        };
        HostFiles::decode_and_verify(&bytes, &record, raw_len)
    }

    #[test]
    fn bytes_that_follow_each_other_are_one_run() {
        let mut grown = HostFile::new("pages-1.img".to_owned());
        grown.add(0, 4);
        grown.add(4, 4);
        grown.add(16, 4);
        assert_eq!(grown, file("pages-1.img", &[(0, 8), (16, 4)]));
        assert_eq!(grown.len(), 12);
    }

    #[test]
    fn the_list_comes_back_as_it_was() {
        let files = vec![
            file("inventory.img", &[(8, 2)]),
            file("empty.img", &[]),
            file("pages-1.img", &[(0, 8), (10, 6)]),
        ];
        assert_eq!(read(files.clone(), 16).unwrap().files, files);
    }

    #[test]
    fn a_list_that_is_not_all_of_the_bytes_once_is_refused() {
        for (files, raw_len) in [
            (vec![file("a", &[(0, 4)])], 5),
            (vec![file("a", &[(0, 4)])], 3),
            (vec![file("a", &[(1, 4)])], 5),
            (vec![file("a", &[(0, 4)]), file("b", &[(3, 2)])], 5),
            (vec![file("a", &[(0, 4)]), file("b", &[(5, 1)])], 6),
            (vec![file("a", &[(0, 4), (4, 0)])], 4),
            (
                vec![file("a", &[(0, u64::MAX)]), file("b", &[(u64::MAX, 1)])],
                4,
            ),
            (vec![file("a", &[(0, 4)]), file("a", &[(4, 1)])], 5),
            (vec![file("../a", &[(0, 4)])], 4),
            (vec![file("", &[(0, 4)])], 4),
            (vec![file(".hidden", &[(0, 4)])], 4),
        ] {
            let refused = read(files.clone(), raw_len);
            assert!(
                matches!(refused, Err(ManifestError::Rule { .. })),
                "{files:?} {refused:?}"
            );
        }
    }

    #[test]
    fn a_damaged_list_is_not_parsed() {
        let bytes = HostFiles::default().encode();
        let record = TableRecord {
            key: "k".to_owned(),
            len: bytes.len() as u64,
            digest: digest_of(b"other"),
        };
        let refused = HostFiles::decode_and_verify(&bytes, &record, 0);
        assert!(matches!(refused, Err(ManifestError::Digest { .. })));
    }
}
