//! Image files → CRIU: at a restore CRIU asks for files by name, in its own order, and reads each from a pipe.
//!
//! In: CRIU at its socket; a [`FileSource`] that can write out any of the files. Out: every file that it asks for and that is there. Files are written out on threads of their own, because CRIU reads some of them side by side. What can fail: the
//! socket; a file that cannot be read, whose pipe is then closed early, so that CRIU fails too.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::fcntl_setpipe_size;

use super::SERVE_SOCKET;
use super::watch::Watch;
use super::wire::{Peer, StreamError, io_error};

/// Bytes that a pipe is asked to hold.
const PIPE_LEN: usize = 1 << 20;
/// How often it is looked whether CRIU still lives.
const LOOK_EVERY: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};

/// Where image files come from.
pub trait FileSource: Sync {
    /// What keeps a file from being written out.
    type Error: Send;

    /// Whether there is such a file.
    fn has(&self, name: &str) -> bool;

    /// Writes a file out, verified.
    ///
    /// # Errors
    /// What `out` said (CRIU needs no more of it), or why the bytes are not to be had.
    fn write(&self, name: &str, out: &mut dyn Write) -> Result<(), WriteError<Self::Error>>;
}

/// Why a file was not written to its end.
#[derive(Debug)]
pub enum WriteError<E> {
    /// CRIU does not read on.
    Pipe(io::Error),
    /// The bytes are not to be had.
    Source(E),
}

/// Waits for CRIU at its socket.
#[derive(Debug)]
pub struct Serving {
    listener: UnixListener,
}

impl Serving {
    /// Listens in CRIU's images directory.
    ///
    /// # Errors
    /// [`StreamError::Io`].
    pub fn listen(images_dir: &Path) -> Result<Self, StreamError> {
        let listener = UnixListener::bind(images_dir.join(SERVE_SOCKET));
        let listener = listener.map_err(io_error("listening for CRIU"))?;
        Ok(Self { listener })
    }

    /// Serves one CRIU, until it hangs up. Once CRIU has ended, whoever has not come does not come. The first thing that went wrong with a file, if anything did.
    ///
    /// # Errors
    /// [`StreamError`] of the socket.
    pub fn run<S: FileSource>(
        self,
        source: &S,
        watch: &Watch,
    ) -> Result<Option<S::Error>, StreamError> {
        let mut peer = self.accept(watch)?;
        let failed = Mutex::new(None);
        let note = |error| {
            let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
            failed.get_or_insert(error);
        };
        std::thread::scope(|scope| {
            while let Some(name) = peer.request()? {
                let exists = source.has(&name);
                peer.answer(exists)?;
                if !exists {
                    continue;
                }
                let pipe = peer.pipe()?;
                // A short pipe is slower, no more.
                let _granted = fcntl_setpipe_size(&pipe, PIPE_LEN);
                let note = &note;
                let writing = std::thread::Builder::new().name("image file".to_owned());
                let span = tracing::Span::current();
                let started = writing.spawn_scoped(scope, move || {
                    let _named = span.entered();
                    let mut pipe = File::from(pipe);
                    match source.write(&name, &mut pipe) {
                        Ok(()) => {}
                        // It has what it wants, or has ended, which its status tells.
                        Err(WriteError::Pipe(_)) => {}
                        Err(WriteError::Source(error)) => note(error),
                    }
                });
                started.map_err(io_error("starting a thread"))?;
            }
            Ok::<_, StreamError>(())
        })?;
        Ok(failed.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    fn accept(&self, watch: &Watch) -> Result<Peer, StreamError> {
        loop {
            let has_ended = watch.is_over();
            let mut fds = [PollFd::new(&self.listener, PollFlags::IN)];
            match poll(&mut fds, Some(&LOOK_EVERY)) {
                Ok(0) if has_ended => return Err(StreamError::NobodyCame),
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => {
                    let accepted = self.listener.accept();
                    let (socket, _address) = accepted.map_err(io_error("accepting CRIU"))?;
                    return Ok(Peer { socket });
                }
                Err(errno) => return Err(io_error("waiting for CRIU")(errno.into())),
            }
        }
    }
}
