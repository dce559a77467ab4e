//! stdout, and whether its reader is still there.
//!
//! `ckptstream list | head -1` is not an error: a reader that went away has what it wanted. So a broken pipe is remembered here, and the exit status
//! is the work's own.

use std::io::{self, BufWriter, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// stdout of this process.
#[derive(Debug, Default)]
pub(super) struct Stdout {
    broken: AtomicBool,
}

impl Stdout {
    /// A writer to stdout, buffered; flush it before you drop it, or errors are lost.
    pub(super) fn writer(&self) -> impl Write {
        BufWriter::new(Watched {
            out: io::stdout(),
            broken: &self.broken,
        })
    }

    /// `true` once a write met a broken pipe.
    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }
}

struct Watched<'a, W> {
    out: W,
    broken: &'a AtomicBool,
}

impl<W> Watched<'_, W> {
    fn watch<T>(&self, result: io::Result<T>) -> io::Result<T> {
        if result
            .as_ref()
            .is_err_and(|error| error.kind() == ErrorKind::BrokenPipe)
        {
            self.broken.store(true, Ordering::Relaxed);
        }
        result
    }
}

impl<W: Write> Write for Watched<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let result = self.out.write(bytes);
        self.watch(result)
    }

    fn flush(&mut self) -> io::Result<()> {
        let result = self.out.flush();
        self.watch(result)
    }
}
