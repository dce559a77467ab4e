//! Files of the node that a tree needs beside its images: what it has open or mapped is found again by its path.
//!
//! In, at a save: a tree that stands still. Out: the files, with their lengths. At a restore: the same list; out: every file that is not as it was, all at once. What can fail: nothing; what cannot be looked at is not on the list, and CRIU says so.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::ProcessTree;
use crate::manifest::WantedFile;
use crate::target::{Target, open_flags};

/// What the kernel puts behind the path of a file that has none any more.
const DELETED: &str = " (deleted)";
/// Paths below these are no files of a disk.
const NOT_ON_DISK: [&str; 3] = ["/proc/", "/sys/", "/dev/"];
/// Bits of an open file's flags: written to or not (O_WRONLY and O_RDWR).
const WRITES: u32 = 0o3;
/// So many that differ are named.
const NAMED_MAX: usize = 20;

/// The files of a tree, in order of their paths.
pub fn wanted_by(tree: &ProcessTree) -> Vec<WantedFile> {
    let mut found: Vec<WantedFile> = tree.processes().iter().flat_map(wanted_by_one).collect();
    found.sort_unstable();
    // One that is written to by any is.
    found.reverse();
    found.dedup_by(|next, kept| next.path == kept.path);
    found.reverse();
    found
}

fn wanted_by_one(process: &Target) -> Vec<WantedFile> {
    let dir = format!("/proc/{}/fd", process.pid);
    let open = fs::read_dir(dir).into_iter().flatten().flatten();
    let open = open.filter_map(|entry| {
        let path = fs::read_link(entry.path()).ok()?;
        let writes = open_flags(&entry.path())? & WRITES != 0;
        wanted(&entry.path(), &path, writes)
    });
    let mapped = process.mapped_paths();
    let mapped = mapped.iter().filter_map(|path| wanted(path, path, false));
    open.chain(mapped).collect()
}

/// A regular file that has a path; `at` is where it can be looked at.
fn wanted(at: &Path, path: &Path, is_written: bool) -> Option<WantedFile> {
    let text = path.to_str()?;
    let is_elsewhere = !text.starts_with('/')
        || text.ends_with(DELETED)
        || NOT_ON_DISK.iter().any(|dir| text.starts_with(dir));
    if is_elsewhere {
        return None;
    }
    let metadata = fs::metadata(at).ok()?;
    metadata.is_file().then(|| WantedFile {
        path: text.to_owned(),
        len: metadata.size(),
        is_written,
    })
}

/// Files that are not as the tree wants them.
#[derive(Debug, thiserror::Error)]
#[error(
    "{} files are not as the tree left them: {}{}",
    differing.len(),
    list(differing),
    if differing.iter().any(|it| it.has_grown) { "; host.grown_files = \"truncate\" takes from those that it writes what came since" } else { "" }
)]
pub struct Differing {
    /// All of them.
    pub differing: Vec<Difference>,
}

/// One file that is not as it was.
#[derive(Debug)]
pub struct Difference {
    path: String,
    len: u64,
    /// `None`: it is not there.
    now: Option<u64>,
    /// It is written by the tree, and longer than it was.
    has_grown: bool,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (path, len) = (&self.path, self.len);
        match self.now {
            Some(now) => write!(f, "{path} has {now} bytes and had {len}"),
            None => write!(f, "{path} is not there"),
        }
    }
}

fn list(differing: &[Difference]) -> String {
    let named: Vec<String> = differing
        .iter()
        .take(NAMED_MAX)
        .map(ToString::to_string)
        .collect();
    let more = differing.len().saturating_sub(NAMED_MAX);
    match more {
        0 => named.join(", "),
        more => format!("{}, and {more} more", named.join(", ")),
    }
}

/// Looks at every file. Where `truncates`, those that the tree writes and that have grown are no difference, and are returned: they have to be [`cut`].
///
/// # Errors
/// All that differ.
pub fn must_be_as_wanted(
    wanted: &[WantedFile],
    truncates: bool,
) -> Result<Vec<WantedFile>, Differing> {
    let mut grown = Vec::new();
    let differing = wanted.iter().filter_map(|file| {
        let now = fs::metadata(&file.path).ok().map(|it| it.size());
        let has_grown = file.is_written && now.is_some_and(|now| now > file.len);
        if now == Some(file.len) {
            return None;
        }
        if has_grown && truncates {
            grown.push(file.clone());
            return None;
        }
        Some(Difference {
            path: file.path.clone(),
            len: file.len,
            now,
            has_grown,
        })
    });
    let differing: Vec<Difference> = differing.collect();
    match differing.is_empty() {
        true => Ok(grown),
        false => Err(Differing { differing }),
    }
}

/// Makes files as long as they were.
///
/// # Errors
/// The file system's; some may be cut then.
pub fn cut(files: &[WantedFile]) -> io::Result<()> {
    for file in files {
        tracing::warn!(
            "{} is cut to the {} bytes that it had when the tree was saved (host.grown_files)",
            file.path,
            file.len
        );
        let open = OpenOptions::new().write(true).open(&file.path)?;
        open.set_len(file.len)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    #[test]
    fn what_a_tree_has_open_is_found_and_what_differs_is_listed_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let (log, text) = (dir.path().join("log"), dir.path().join("text"));
        fs::write(&log, "one\n").unwrap();
        fs::write(&text, "text").unwrap();
        let mut child = Command::new("sleep")
            .arg("60")
            .stdin(fs::File::open(&text).unwrap())
            .stdout(OpenOptions::new().append(true).open(&log).unwrap())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Its libraries are there once it has begun to run.
        let started = Instant::now();
        let wanted = loop {
            let wanted = wanted_by(&ProcessTree::look(child.id()).unwrap());
            if wanted.iter().any(|it| it.path.contains("libc")) {
                break wanted;
            }
            assert!(started.elapsed() < Duration::from_secs(60), "{wanted:?}");
            std::thread::sleep(Duration::from_millis(1));
        };
        child.kill().unwrap();
        child.wait().unwrap();
        let of = |path: &Path| {
            let found = wanted.iter().find(|it| Path::new(&it.path) == path);
            found.map(|it| (it.len, it.is_written))
        };
        assert_eq!((of(&log), of(&text)), (Some((4, true)), Some((4, false))));
        assert_eq!(must_be_as_wanted(&wanted, false).unwrap(), []);

        fs::write(&log, "one\ntwo\n").unwrap();
        fs::write(&text, "text and more").unwrap();
        let refused = must_be_as_wanted(&wanted, false).unwrap_err().to_string();
        assert!(refused.contains("log has 8 bytes and had 4"), "{refused}");
        assert!(refused.contains("text has 13 bytes") && refused.contains("grown_files"));
        // What it only reads is not to be cut, and nothing is before all the rest is known to be right.
        let refused = must_be_as_wanted(&wanted, true).unwrap_err().to_string();
        assert!(
            refused.starts_with("1 files") && refused.contains("text"),
            "{refused}"
        );
        assert_eq!(fs::read_to_string(&log).unwrap(), "one\ntwo\n");
        fs::write(&text, "text").unwrap();
        cut(&must_be_as_wanted(&wanted, true).unwrap()).unwrap();
        assert_eq!(fs::read_to_string(&log).unwrap(), "one\n");
        fs::remove_file(&log).unwrap();
        let refused = must_be_as_wanted(&wanted, true).unwrap_err().to_string();
        assert!(refused.contains("log is not there"), "{refused}");
    }
}
