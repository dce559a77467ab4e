//! Image files → chunks: what CRIU writes at a dump becomes one sequence of bytes, and a list of what lies where in it.
//!
//! In: CRIU at its socket; a name and a pipe for each file, many of them open at once. Out: chunks, all full but the last, and [`HostFiles`]. What can fail: the socket, a pipe, a file that comes twice; a pipeline that was given up.
//!
//! A long file's bytes go from its pipe straight into chunks of its own; what is left of it, and short files, share chunks. Every pipe is emptied as it fills, because CRIU writes several files at once and waits for each.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::fcntl_setpipe_size;

use super::CAPTURE_SOCKET;
use super::watch::Watch;
use super::wire::{Peer, StreamError, io_error};
use crate::driver::PoolBuf;
use crate::manifest::{HostFile, HostFiles};
use crate::pipeline::{PipelineError, Source, SourceOut};

/// Bytes that a pipe is asked to hold: as many as an unprivileged process may ask for.
const PIPE_LEN: usize = 1 << 20;
/// A file that has so many bytes is taken for a long one.
const LONG_FROM: usize = 64 << 10;
/// How often it is looked whether CRIU still lives, and whether the save was given up.
const LOOK_EVERY: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// Takes in one dump.
#[derive(Debug)]
pub struct Capture {
    listener: UnixListener,
    watch: Arc<Watch>,
    /// Where the list goes, once all of it is known.
    files: Sender<HostFiles>,
}

impl Capture {
    /// Listens in CRIU's images directory.
    ///
    /// # Errors
    /// [`StreamError::Io`].
    pub fn listen(
        images_dir: &Path,
        watch: Arc<Watch>,
        files: Sender<HostFiles>,
    ) -> Result<Self, StreamError> {
        let listener = UnixListener::bind(images_dir.join(CAPTURE_SOCKET));
        let listener = listener.map_err(io_error("listening for CRIU"))?;
        Ok(Self {
            listener,
            watch,
            files,
        })
    }

    /// CRIU, connected.
    fn accept(&self, out: &SourceOut<'_>) -> Result<Peer, PipelineError> {
        loop {
            check(&self.watch, out)?;
            // Looked at before the socket: who came and ended since is still taken in.
            let has_ended = self.watch.is_over();
            let mut fds = [PollFd::new(&self.listener, PollFlags::IN)];
            match poll(&mut fds, Some(&LOOK_EVERY)) {
                Ok(0) if has_ended => return Err(broken(StreamError::NobodyCame)),
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => {
                    let accepted = self.listener.accept();
                    let (socket, _address) =
                        accepted.map_err(|error| broken(io_error("accepting CRIU")(error)))?;
                    return Ok(Peer { socket });
                }
                Err(errno) => {
                    return Err(broken(io_error("waiting for CRIU")(errno.into())));
                }
            }
        }
    }
}

/// Whether what comes is still wanted.
fn check(watch: &Watch, out: &SourceOut<'_>) -> Result<(), PipelineError> {
    match watch.is_given_up() {
        true => Err(PipelineError::Cancelled),
        false => out.check(),
    }
}

fn broken(error: StreamError) -> PipelineError {
    PipelineError::Source(Box::new(error))
}

impl Source for Capture {
    fn run(self: Box<Self>, out: &mut SourceOut<'_>) -> Result<u64, PipelineError> {
        let peer = self.accept(out)?;
        let chunk_len = out.chunk_len();
        let mut taking = Taking {
            // The rest of the ring is for the chunks under way, and the shared one.
            long_max: (out.ring_len() / 2).saturating_sub(1),
            out,
            watch: &self.watch,
            chunk_len,
            files: Vec::new(),
            open: Vec::new(),
            shared: Shared::default(),
            position: 0,
        };
        taking.all(peer)?;
        let len = taking.finish()?;
        let files = HostFiles {
            files: taking.files,
            wanted: Vec::new(),
        };
        // Nobody listens when the save was given up, which is told where that happened.
        let _its_end_is_told_elsewhere = self.files.send(files);
        Ok(len)
    }
}

/// A file that CRIU is writing.
#[derive(Debug)]
struct OpenFile {
    /// Index in the list.
    file: usize,
    pipe: OwnedFd,
    held: Held,
}

/// Bytes of a file that are in no chunk yet.
#[derive(Debug)]
enum Held {
    Short(Vec<u8>),
    /// The start of a chunk of its own.
    Long {
        buffer: PoolBuf,
        len: usize,
    },
}

/// The chunk that short files and the ends of long ones share.
#[derive(Debug, Default)]
struct Shared {
    buffer: Option<PoolBuf>,
    len: usize,
    /// File, offset in the chunk, length.
    runs: Vec<(usize, usize, usize)>,
}

struct Taking<'a, 'b> {
    out: &'a mut SourceOut<'b>,
    watch: &'a Watch,
    chunk_len: usize,
    /// Files that may have a chunk of their own at once.
    long_max: usize,
    files: Vec<HostFile>,
    open: Vec<OpenFile>,
    shared: Shared,
    /// Bytes in the chunks that were handed over.
    position: u64,
}

impl Taking<'_, '_> {
    /// Everything that CRIU writes, until it hangs up and every pipe is empty.
    fn all(&mut self, mut peer: Peer) -> Result<(), PipelineError> {
        let mut is_here = true;
        while is_here || !self.open.is_empty() {
            check(self.watch, self.out)?;
            let (speaks, ready) = self.wait(is_here.then_some(&peer))?;
            // From the last one, so that indexes stay right while files are closed.
            for index in ready.into_iter().rev() {
                self.read(index)?;
            }
            if speaks {
                match peer.request().map_err(broken)? {
                    Some(name) => {
                        let pipe = peer.pipe().map_err(broken)?;
                        self.begin(name, pipe)?;
                    }
                    None => is_here = false,
                }
            }
        }
        Ok(())
    }

    /// Waits until there is something to read: on the socket, and from which files.
    fn wait(&self, peer: Option<&Peer>) -> Result<(bool, Vec<usize>), PipelineError> {
        let pipes = self.open.iter().map(|open| &open.pipe);
        let mut fds: Vec<PollFd<'_>> = pipes.map(|pipe| PollFd::new(pipe, PollFlags::IN)).collect();
        fds.extend(peer.map(|peer| PollFd::new(&peer.socket, PollFlags::IN)));
        match poll(&mut fds, Some(&LOOK_EVERY)) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok((false, Vec::new())),
            Err(errno) => return Err(broken(io_error("waiting for CRIU")(errno.into()))),
        }
        let has_come = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let ready = (0..self.open.len()).filter(|&index| has_come(&fds[index]));
        let speaks = fds.get(self.open.len()).is_some_and(has_come);
        Ok((speaks, ready.collect()))
    }

    fn begin(&mut self, name: String, pipe: OwnedFd) -> Result<(), PipelineError> {
        if self.files.iter().any(|file| file.name == name) {
            return Err(broken(StreamError::Twice { name }));
        }
        // A short pipe is slower, no more.
        let _granted = fcntl_setpipe_size(&pipe, PIPE_LEN);
        self.files.push(HostFile::new(name));
        self.open.push(OpenFile {
            file: self.files.len() - 1,
            pipe,
            held: Held::Short(Vec::new()),
        });
        Ok(())
    }

    /// Takes what a pipe holds, once.
    fn read(&mut self, index: usize) -> Result<(), PipelineError> {
        let open = &mut self.open[index];
        let read = match &mut open.held {
            Held::Short(bytes) => {
                let start = bytes.len();
                bytes.resize(self.chunk_len.min(start + LONG_FROM), 0);
                let read = rustix::io::read(&open.pipe, &mut bytes[start..]);
                bytes.truncate(start + read.unwrap_or(0));
                read
            }
            Held::Long { buffer, len } => {
                let read = rustix::io::read(&open.pipe, &mut buffer[*len..self.chunk_len]);
                *len += read.unwrap_or(0);
                read
            }
        };
        match read {
            Ok(0) => {
                let open = self.open.remove(index);
                self.share(open)
            }
            Ok(_) => self.settle(index),
            Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(broken(io_error("reading an image file from CRIU")(
                errno.into(),
            ))),
        }
    }

    /// A file that has become a long one gets a chunk of its own, if one can be spared; a full chunk is handed over.
    fn settle(&mut self, index: usize) -> Result<(), PipelineError> {
        let is_long = |open: &&OpenFile| matches!(open.held, Held::Long { .. });
        let may_be_long = self.open.iter().filter(is_long).count() < self.long_max;
        let open = &mut self.open[index];
        if let Held::Short(bytes) = &mut open.held {
            let is_full = bytes.len() == self.chunk_len;
            let buffer = match bytes.len() >= LONG_FROM && may_be_long {
                _ if is_full => Some(self.out.buffer()?),
                true => self.out.try_buffer(),
                false => None,
            };
            if let Some(mut buffer) = buffer {
                buffer[..bytes.len()].copy_from_slice(bytes);
                let len = bytes.len();
                open.held = Held::Long { buffer, len };
            }
        }
        match std::mem::replace(&mut open.held, Held::Short(Vec::new())) {
            Held::Long { buffer, len } if len == self.chunk_len => {
                let file = open.file;
                self.files[file].add(self.position, len as u64);
                self.hand_over(buffer, len)
            }
            held => {
                open.held = held;
                Ok(())
            }
        }
    }

    fn hand_over(&mut self, buffer: PoolBuf, len: usize) -> Result<(), PipelineError> {
        self.position += len as u64;
        self.out.chunk(buffer, len)
    }

    /// What is left of a file that has ended goes into the shared chunk.
    fn share(&mut self, open: OpenFile) -> Result<(), PipelineError> {
        let (file, mut from) = (open.file, 0);
        match open.held {
            Held::Short(bytes) => {
                while from < bytes.len() {
                    from += self.copy_shared(file, &bytes[from..])?;
                }
            }
            Held::Long { buffer, len } if self.shared.buffer.is_none() => {
                self.shared = Shared {
                    buffer: Some(buffer),
                    len,
                    runs: vec![(file, 0, len)],
                };
            }
            Held::Long { buffer, len } => {
                while from < len {
                    from += self.copy_shared(file, &buffer[from..len])?;
                }
            }
        }
        Ok(())
    }

    /// Copies as much as the shared chunk has room for; hands it over when it is full.
    fn copy_shared(&mut self, file: usize, bytes: &[u8]) -> Result<usize, PipelineError> {
        let buffer = match &mut self.shared.buffer {
            Some(buffer) => buffer,
            None => self.shared.buffer.insert(self.out.buffer()?),
        };
        let start = self.shared.len;
        let len = bytes.len().min(self.chunk_len - start);
        buffer[start..start + len].copy_from_slice(&bytes[..len]);
        self.shared.len += len;
        self.shared.runs.push((file, start, len));
        if self.shared.len == self.chunk_len {
            self.hand_over_shared()?;
        }
        Ok(len)
    }

    fn hand_over_shared(&mut self) -> Result<(), PipelineError> {
        let Shared { buffer, len, runs } = std::mem::take(&mut self.shared);
        for (file, offset, len) in runs {
            self.files[file].add(self.position + offset as u64, len as u64);
        }
        match buffer {
            Some(buffer) if len > 0 => self.hand_over(buffer, len),
            _ => Ok(()),
        }
    }

    /// The last chunk goes, full or not. Bytes of all files together.
    fn finish(&mut self) -> Result<u64, PipelineError> {
        self.hand_over_shared()?;
        Ok(self.position)
    }
}
