//! Files and directories that last, each under a name that nothing else had.
//!
//! In: paths. Out: directories that are there, names that were given once, both synced. What can fail: the file system, told as a [`StoreError`] that knows what was being done.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::store::StoreError;

/// How often a directory is made again that somebody removed before a file came into it.
const DIRECTORY_TRIES: u32 = 5;

/// What was being done to which key, for errors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Doing<'a> {
    pub(super) operation: &'static str,
    pub(super) key: &'a str,
    pub(super) setting: &'static str,
}

impl Doing<'_> {
    pub(super) fn failed(self, error: io::Error) -> StoreError {
        use io::ErrorKind as Kind;
        let (operation, key) = (self.operation, self.key.to_owned());
        let advice = match error.kind() {
            Kind::NotFound => return StoreError::NotFound { operation, key },
            Kind::StorageFull | Kind::QuotaExceeded => {
                format!("; make room there ({})", self.setting)
            }
            Kind::ReadOnlyFilesystem
            | Kind::PermissionDenied
            | Kind::FileTooLarge
            | Kind::NotADirectory
            | Kind::IsADirectory
            | Kind::InvalidFilename
            | Kind::Unsupported => format!("; name another place ({})", self.setting),
            _ => {
                return StoreError::Transient {
                    operation,
                    key,
                    what: error.to_string(),
                    source: Some(Box::new(error)),
                };
            }
        };
        StoreError::Refused {
            operation,
            key,
            code: error.to_string(),
            advice,
        }
    }

    /// After an fsync that failed the kernel may have forgotten what it could not write: another one that succeeds proves nothing.
    pub(super) fn unsynced(self, error: &io::Error) -> StoreError {
        self.refused(format!("fsync: {error}; what was written is void"))
    }

    pub(super) fn refused(self, code: String) -> StoreError {
        StoreError::Refused {
            operation: self.operation,
            key: self.key.to_owned(),
            code,
            advice: String::new(),
        }
    }

    pub(super) fn mismatch(self, what: String) -> StoreError {
        StoreError::Mismatch {
            operation: self.operation,
            key: self.key.to_owned(),
            what,
        }
    }

    pub(super) fn not_found(self) -> StoreError {
        StoreError::NotFound {
            operation: self.operation,
            key: self.key.to_owned(),
        }
    }
}

/// Gives a file another name that nothing has.
pub(super) fn name_once(from: &Path, to: &Path) -> io::Result<()> {
    match fs::hard_link(from, to) {
        // A link over a network may have been made although the answer says that something was there: then that is this very file.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_same(from, to) => Ok(()),
        Err(error) if no_links(&error) => {
            Ok(renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
        }
        linked => linked,
    }
}

/// Whether a file system says that it has no hard links, or none for us.
pub(super) fn no_links(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::Unsupported | io::ErrorKind::PermissionDenied | io::ErrorKind::TooManyLinks
    )
}

pub(super) fn is_same(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    matches!((identity(one), identity(other)), (Ok(one), Ok(other)) if one == other)
}

/// Does something in a directory, which is made if it is not there.
pub(super) fn in_directory<T>(
    folder: &Path,
    doing: Doing<'_>,
    work: impl Fn() -> io::Result<T>,
) -> Result<io::Result<T>, StoreError> {
    for _ in 0..DIRECTORY_TRIES {
        match work() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                make_directories(folder, doing)?;
            }
            done => return Ok(done),
        }
    }
    Ok(work())
}

/// Makes a directory with all above it that are not there, each synced into the one above it.
pub(super) fn make_directories(folder: &Path, doing: Doing<'_>) -> Result<(), StoreError> {
    if folder.as_os_str().is_empty() || folder.is_dir() {
        return Ok(());
    }
    let above = folder.parent().unwrap_or(Path::new("/"));
    make_directories(above, doing)?;
    match fs::create_dir(folder) {
        Ok(()) => sync_directory(above, doing),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => Ok(()),
        Err(error) => Err(doing.failed(error)),
    }
}

/// Makes the names in a directory last.
pub(super) fn sync_directory(folder: &Path, doing: Doing<'_>) -> Result<(), StoreError> {
    let folder = if folder.as_os_str().is_empty() {
        Path::new(".")
    } else {
        folder
    };
    let opened = match File::open(folder) {
        Ok(opened) => opened,
        // Somebody removed it: then nothing in it needs to last.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(doing.failed(error)),
    };
    opened.sync_all().map_err(|error| doing.unsynced(&error))
}

/// Refuses what a symbolic link below the root leads to: whoever could make one there must not have us read, write or remove anything elsewhere.
pub(super) fn must_not_be_linked(
    root: &Path,
    path: &Path,
    doing: Doing<'_>,
) -> Result<(), StoreError> {
    let mut at = root.to_owned();
    for name in path.strip_prefix(root).into_iter().flatten() {
        at.push(name);
        match fs::symlink_metadata(&at) {
            Ok(found) if found.is_symlink() => {
                let what = format!("{} is a symbolic link, and none is followed", at.display());
                return Err(doing.refused(what));
            }
            Ok(_) => {}
            // What is not there leads nowhere.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) =>
            {
                return Ok(());
            }
            Err(error) => return Err(doing.failed(error)),
        }
    }
    Ok(())
}

/// What is in a directory; nothing where there is none.
pub(super) fn entries(folder: &Path, doing: Doing<'_>) -> Result<Vec<fs::DirEntry>, StoreError> {
    match fs::read_dir(folder) {
        Ok(entries) => entries
            .collect::<io::Result<_>>()
            .map_err(|error| doing.failed(error)),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(Vec::new())
        }
        Err(error) => Err(doing.failed(error)),
    }
}
