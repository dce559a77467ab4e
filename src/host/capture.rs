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

/// Long files that may have a chunk of their own at once, in a ring of so many chunks. The rest is for the shared chunk, the chunks under way, and what parts hold.
fn long_max(ring_len: usize) -> usize {
    (ring_len / 4).max(1)
}

impl Source for Capture {
    fn holds(&self, ring_len: usize) -> usize {
        long_max(ring_len) + 1
    }

    fn run(self: Box<Self>, out: &mut SourceOut<'_>) -> Result<u64, PipelineError> {
        let peer = self.accept(out)?;
        let chunk_len = out.chunk_len();
        let mut taking = Taking {
            long_max: long_max(out.ring_len()),
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

#[cfg(test)]
mod tests {
    use super::*;

    use std::io::{IoSlice, Write};
    use std::mem::MaybeUninit;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc;
    use std::time::Duration;

    use bytes::Bytes;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use crate::codec::{Decoder, Encoder, FilterChoice, Settings, frame_bound};
    use crate::driver::BufferPool;
    use crate::manifest::FrameTable;
    use crate::pipeline::{Origin, SaveLane, SaveResources, save};
    use crate::progress::{LaneMeter, Meter};
    use crate::store::memory::MemoryStore;
    use crate::store::{Key, Store};

    const CHUNK_LEN: usize = 256 << 10;
    /// The least that a store takes.
    const PART_LEN: usize = 5 << 20;

    /// What CRIU does: says a file's name, and sends the other end of a pipe.
    fn opened(socket: &UnixStream, name: &str) -> std::fs::File {
        let mut message = vec![0x0a, u8::try_from(name.len()).unwrap()];
        message.extend(name.as_bytes());
        let len = u32::try_from(message.len()).unwrap();
        let mut socket = socket;
        socket.write_all(&len.to_le_bytes()).unwrap();
        socket.write_all(&message).unwrap();
        let (theirs, ours) = rustix::pipe::pipe().unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let sent = [theirs.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&sent)));
        let byte = [IoSlice::new(&[0])];
        sendmsg(socket, &byte, &mut control, SendFlags::empty()).unwrap();
        std::fs::File::from(ours)
    }

    fn bytes(seed: u64, len: usize) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(seed);
        (0..len).map(|_| random.u8(..)).collect()
    }

    /// Saves what `criu` writes with a ring of so many chunks; the files as they come back.
    fn taken(
        ring_chunks: usize,
        criu: impl FnOnce(UnixStream) + Send + 'static,
    ) -> Result<Vec<(String, Vec<u8>)>, PipelineError> {
        let dir = tempfile::tempdir().unwrap();
        let watch = Arc::new(Watch::default());
        let (files_out, files_in) = mpsc::channel();
        let capture = Capture::listen(dir.path(), Arc::clone(&watch), files_out).unwrap();
        let socket = UnixStream::connect(dir.path().join(CAPTURE_SOCKET)).unwrap();
        let writing = std::thread::spawn(move || criu(socket));

        let runtime = tokio::runtime::Runtime::new().unwrap();
        let store = Arc::new(MemoryStore::new());
        let key = Key::new("job/object").unwrap();
        let settings = Settings {
            filter: FilterChoice::None,
            ..Settings::default()
        };
        let lane = SaveLane {
            origin: Origin::Source(Box::new(capture)),
            ring: BufferPool::new(ring_chunks, CHUNK_LEN, None).unwrap(),
            table: FrameTable::new(0, CHUNK_LEN as u64),
            upload: runtime.block_on(store.begin_upload(&key)).unwrap(),
            key: key.clone(),
            witness: None,
            meter: LaneMeter::new("host", 0),
        };
        let resources = SaveResources {
            store: Arc::clone(&store) as _,
            runtime: runtime.handle().clone(),
            chunk_len: CHUNK_LEN as u64,
            frame_buffers: BufferPool::new(4, frame_bound(CHUNK_LEN), None).unwrap(),
            part_len: PART_LEN,
            pack_buffers: BufferPool::new(10, 1 << 20, None).unwrap(),
            parallelism: 2,
            meter: Meter::new(),
        };
        let mut encoders = [
            Encoder::new(settings).unwrap(),
            Encoder::new(settings).unwrap(),
        ];
        let saved = save(vec![lane], &mut encoders, resources);
        writing.join().unwrap();
        let lane = saved?.lanes.remove(0);
        let files = files_in.recv_timeout(Duration::from_secs(20)).unwrap();
        let completed = store.complete_upload(
            &key,
            &lane.upload,
            &lane.parts,
            lane.len,
            lane.crc64.value(),
        );
        runtime.block_on(completed).unwrap();
        let limit = usize::try_from(lane.len).unwrap();
        let object: Bytes = runtime.block_on(store.get(&key, limit)).unwrap().unwrap();
        let mut decoder = Decoder::new().unwrap();
        let at = |offset: u64| usize::try_from(offset).unwrap();
        let mut raw = Vec::new();
        for frame in lane.table.entries() {
            let place = frame.bytes();
            let stored = &object[at(place.start)..at(place.end)];
            let mut chunk = vec![0; frame.raw_len as usize];
            let decoded = decoder.decode(stored, frame.filter, frame.digest, &mut chunk);
            decoded.unwrap();
            raw.extend(chunk);
        }
        assert_eq!(raw.len() as u64, lane.table.raw_len);
        let file = |file: &HostFile| {
            let runs = file.runs.iter();
            let runs = runs.map(|run| &raw[at(run.offset)..at(run.offset + run.len)]);
            (file.name.clone(), runs.collect::<Vec<_>>().concat())
        };
        Ok(files.files.iter().map(file).collect())
    }

    #[test]
    fn files_of_any_length_that_are_written_side_by_side_come_back() {
        let lens = [
            0,
            1,
            LONG_FROM - 1,
            LONG_FROM,
            CHUNK_LEN - 1,
            CHUNK_LEN,
            CHUNK_LEN + 1,
            3 * CHUNK_LEN + 7,
            5 * CHUNK_LEN,
            25 * CHUNK_LEN + 3,
        ];
        let written: Vec<(String, Vec<u8>)> = lens
            .iter()
            .enumerate()
            .map(|(index, len)| (format!("file-{index}.img"), bytes(index as u64, *len)))
            .collect();
        // Four chunks are the least: there is one long file at a time then.
        for ring_chunks in [4, 9] {
            let files = written.clone();
            let found = taken(ring_chunks, move |socket| {
                let mut open: Vec<(std::fs::File, &[u8])> = files
                    .iter()
                    .map(|(name, bytes)| (opened(&socket, name), bytes.as_slice()))
                    .collect();
                let mut random = fastrand::Rng::with_seed(ring_chunks as u64);
                while !open.is_empty() {
                    let at = random.usize(..open.len());
                    let (pipe, rest) = &mut open[at];
                    let (now, later) = rest.split_at(rest.len().min(random.usize(1..100_000)));
                    pipe.write_all(now).unwrap();
                    *rest = later;
                    if rest.is_empty() {
                        drop(open.swap_remove(at));
                    }
                }
            });
            assert!(found.unwrap() == written, "{ring_chunks} chunks");
        }
    }

    #[test]
    fn a_file_that_comes_twice_and_words_that_are_none_break_it_off() {
        let twice = taken(4, |socket| {
            let _first = opened(&socket, "pages-1.img");
            let _again = opened(&socket, "pages-1.img");
        });
        let Err(PipelineError::Source(error)) = twice else {
            panic!("{twice:?}");
        };
        assert!(error.to_string().contains("twice"), "{error}");
        let nonsense = taken(4, |mut socket| {
            let _taken = socket.write_all(&[3, 0, 0, 0, 1, 2, 3]);
        });
        assert!(matches!(nonsense, Err(PipelineError::Source(_))));
    }
}
