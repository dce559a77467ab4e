//! What CRIU says on its socket, and what it is told: a file's name, and a pipe for its bytes.
//!
//! In: the connected socket. Out: names and pipes, one after the other; the answer whether a file is there. Messages are protocol buffers with one field, after their length as four bytes, least first (CRIU's `img-streamer`, tried with 4.1.1). What can
//! fail: [`StreamError`]; nothing that comes over the socket is trusted.

use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::manifest::is_file_name;

/// Most bytes of a message: a name and a few more.
const MESSAGE_LEN_MAX: usize = 512;
/// Field 1, of variable length: the name in a request.
const NAME_FIELD: u8 = 0x0a;
/// Field 1, a number: whether the file is there, in an answer.
const EXISTS_FIELD: u8 = 0x08;

/// The stream of CRIU's images broke.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The socket or a pipe failed.
    #[error("{what} failed")]
    Io {
        /// What was done.
        what: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Something was said that is not of this protocol.
    #[error(
        "CRIU said something on its socket that is not understood: {what}; this version knows the streams of CRIU 4.1 and 4.2"
    )]
    Protocol {
        /// What.
        what: String,
    },
    /// A file came twice.
    #[error("CRIU wrote the image file {name} twice")]
    Twice {
        /// Its name.
        name: String,
    },
    /// CRIU ended without having connected.
    #[error("CRIU never came to its socket")]
    NobodyCame,
}

pub(super) fn io_error(what: &'static str) -> impl FnOnce(io::Error) -> StreamError {
    move |source| StreamError::Io { what, source }
}

fn protocol(what: impl Into<String>) -> StreamError {
    StreamError::Protocol { what: what.into() }
}

/// CRIU at the other end of its socket.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) socket: UnixStream,
}

impl Peer {
    /// The name of the next file; `None` when CRIU has hung up.
    pub(super) fn request(&mut self) -> Result<Option<String>, StreamError> {
        let mut len = [0; 4];
        match self.socket.read(&mut len[..1]) {
            Ok(0) => return Ok(None),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Err(error) => return Err(io_error("reading from CRIU's socket")(error)),
        }
        let read = io_error("reading from CRIU's socket");
        self.socket.read_exact(&mut len[1..]).map_err(read)?;
        let len = u32::from_le_bytes(len) as usize;
        if len > MESSAGE_LEN_MAX {
            return Err(protocol(format!("a message of {len} bytes")));
        }
        let mut message = vec![0; len];
        let read = io_error("reading from CRIU's socket");
        self.socket.read_exact(&mut message).map_err(read)?;
        file_name(&message).map(Some)
    }

    /// Says whether the file that was asked for is there.
    pub(super) fn answer(&mut self, exists: bool) -> Result<(), StreamError> {
        let message = [2, 0, 0, 0, EXISTS_FIELD, u8::from(exists)];
        let written = self.socket.write_all(&message);
        written.map_err(io_error("writing to CRIU's socket"))
    }

    /// Our end of the pipe for the file that was named.
    pub(super) fn pipe(&mut self) -> Result<OwnedFd, StreamError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut slices = [IoSliceMut::new(&mut byte)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&self.socket, &mut slices, &mut control, flags)
            .map_err(|errno| io_error("receiving a pipe from CRIU")(errno.into()))?;
        if received.bytes == 0 {
            return Err(protocol("it hung up where a pipe was due"));
        }
        let mut pipes = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        let pipe = pipes.next().and_then(|mut descriptors| descriptors.next());
        pipe.ok_or_else(|| protocol("a byte without a pipe"))
    }
}

/// The name in a request.
fn file_name(message: &[u8]) -> Result<String, StreamError> {
    let unknown = || {
        protocol(format!(
            "a request of {} bytes that names no file",
            message.len()
        ))
    };
    let (&field, rest) = message.split_first().ok_or_else(unknown)?;
    let (&low, rest) = rest.split_first().ok_or_else(unknown)?;
    // Lengths from 128 on take a second byte.
    let (len, rest) = match (low & 0x80, rest.split_first()) {
        (0, _) => (usize::from(low), rest),
        (_, Some((&high, rest))) if high & 0x80 == 0 => {
            (usize::from(low & 0x7f) | usize::from(high) << 7, rest)
        }
        _ => return Err(unknown()),
    };
    if field != NAME_FIELD || rest.len() != len {
        return Err(unknown());
    }
    let name = std::str::from_utf8(rest).map_err(|_not_text| unknown())?;
    match is_file_name(name) {
        true => Ok(name.to_owned()),
        false => Err(protocol(format!("the file name {name:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_read_and_anything_else_is_refused() {
        let named = |name: &str| {
            let mut message = vec![NAME_FIELD];
            match u8::try_from(name.len()).unwrap() {
                len @ 0..128 => message.push(len),
                len => message.extend([len & 0x7f | 0x80, 1]),
            }
            message.extend(name.as_bytes());
            message
        };
        assert_eq!(file_name(&named("pages-1.img")).unwrap(), "pages-1.img");
        let long = "a".repeat(200);
        assert_eq!(file_name(&named(&long)).unwrap(), long);
        let mut short = named("inventory.img");
        short.pop();
        for wrong in [
            named("../x"),
            named(""),
            named("a/b"),
            short,
            vec![],
            vec![NAME_FIELD],
            vec![NAME_FIELD, 0x80, 0x80, 1],
            vec![0x12, 1, b'a'],
            vec![NAME_FIELD, 1, 0xff],
        ] {
            let refused = file_name(&wrong);
            assert!(
                matches!(refused, Err(StreamError::Protocol { .. })),
                "{wrong:?} {refused:?}"
            );
        }
    }

    #[test]
    fn a_message_that_is_too_long_is_not_read() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut peer = Peer { socket: ours };
        theirs.write_all(&u32::MAX.to_le_bytes()).unwrap();
        let refused = peer.request();
        assert!(matches!(refused, Err(StreamError::Protocol { .. })));
    }

    #[test]
    fn who_hangs_up_asks_for_nothing_more() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut peer = Peer { socket: ours };
        drop(theirs);
        assert!(peer.request().unwrap().is_none());
    }
}
