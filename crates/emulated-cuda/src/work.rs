//! What an operation of a stream does: copies, fills, callbacks.
//!
//! In: device ranges as stretches of memory files, and host addresses. Out: the bytes moved. What can fail: host memory that is not mapped
//! (`ILLEGAL_ADDRESS`), no memory for fresh pages (`OUT_OF_MEMORY`).

use std::sync::Arc;

use crate::backing::Backing;
use crate::codes::Answer;
use crate::stream::Mark;

/// A stretch of device memory.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    pub(crate) backing: Arc<Backing>,
    /// From the start of the memory file, in bytes.
    pub(crate) offset: u64,
    pub(crate) len: usize,
}

/// Host memory that the caller of the driver gave, by address.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostAddress(pub(crate) usize);

impl HostAddress {
    fn pointer(self, offset: usize) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut::<u8>(self.0).wrapping_add(offset)
    }
}

/// What an operation does.
pub(crate) enum Work {
    /// Device to host.
    ToHost { from: Vec<Piece>, to: HostAddress },
    /// Host to device.
    ToDevice { from: HostAddress, to: Vec<Piece> },
    /// Device to device; both sides have the same length.
    Between { from: Vec<Piece>, to: Vec<Piece> },
    /// Repeats four bytes, beginning with the first.
    Fill { to: Vec<Piece>, pattern: [u8; 4] },
    /// Calls back into the program.
    Callback(Box<dyn FnOnce() + Send>),
    /// Notes the time for an event.
    Mark(Arc<Mark>),
    /// Only waits for what it depends on.
    Wait,
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Work::ToHost { .. } => "ToHost",
            Work::ToDevice { .. } => "ToDevice",
            Work::Between { .. } => "Between",
            Work::Fill { .. } => "Fill",
            Work::Callback(_) => "Callback",
            Work::Mark(_) => "Mark",
            Work::Wait => "Wait",
        })
    }
}

impl Work {
    /// Bytes moved over the link.
    pub(crate) fn len(&self) -> usize {
        match self {
            Work::ToHost { from, .. } => from.iter().map(|p| p.len).sum(),
            Work::ToDevice { to, .. } => to.iter().map(|p| p.len).sum(),
            _ => 0,
        }
    }

    /// Does the work.
    pub(crate) fn run(self) -> Answer {
        match self {
            Work::ToHost { from, to } => {
                let mut done = 0;
                for piece in &from {
                    // SAFETY: the program gave this host range to a copy and must leave it alone until it has waited for the stream.
                    unsafe {
                        piece
                            .backing
                            .read(piece.offset, to.pointer(done), piece.len)?
                    };
                    done += piece.len;
                }
            }
            Work::ToDevice { from, to } => {
                let mut done = 0;
                for piece in &to {
                    // SAFETY: as above.
                    unsafe {
                        piece
                            .backing
                            .write(piece.offset, from.pointer(done), piece.len)?
                    };
                    done += piece.len;
                }
            }
            Work::Between { from, to } => between(&from, &to)?,
            Work::Fill { to, pattern } => fill(&to, pattern)?,
            Work::Callback(function) => function(),
            Work::Mark(mark) => mark.pass(),
            Work::Wait => {}
        }
        Ok(())
    }
}

/// Bytes moved at a time through a buffer of the worker.
const STEP: usize = 1 << 20;

/// Copies through a buffer, front to back; ranges that overlap are undefined, as on hardware.
fn between(from: &[Piece], to: &[Piece]) -> Answer {
    let len: usize = from.iter().map(|p| p.len).sum();
    let mut buffer = vec![0_u8; STEP.min(len)];
    let mut done = 0;
    while done < len {
        let step = buffer.len().min(len - done);
        for (part, at, piece) in parts(from, done, step) {
            // SAFETY: `parts` splits the first `step` bytes of the buffer, which this function owns.
            unsafe {
                piece.backing.read(
                    piece.offset + at,
                    buffer[part.clone()].as_mut_ptr(),
                    part.len(),
                )?
            };
        }
        for (part, at, piece) in parts(to, done, step) {
            // SAFETY: as above.
            unsafe {
                piece
                    .backing
                    .write(piece.offset + at, buffer[part.clone()].as_ptr(), part.len())?
            };
        }
        done += step;
    }
    Ok(())
}

/// Splits `len` bytes at `start` of the pieces, taken as one sequence: the range within the `len` bytes, the offset in the piece, the piece.
fn parts(
    pieces: &[Piece],
    start: usize,
    len: usize,
) -> impl Iterator<Item = (std::ops::Range<usize>, u64, &Piece)> {
    let mut begin = 0_usize;
    pieces.iter().filter_map(move |piece| {
        let (from, to) = (begin.max(start), (begin + piece.len).min(start + len));
        let at = from.saturating_sub(begin) as u64;
        begin += piece.len;
        (from < to).then(|| (from - start..to - start, at, piece))
    })
}

/// Repeats the pattern over the pieces, taken as one sequence.
pub(crate) fn fill(to: &[Piece], pattern: [u8; 4]) -> Answer {
    if pattern == [0; 4] {
        return to
            .iter()
            .try_for_each(|piece| piece.backing.discard(piece.offset, piece.len as u64));
    }
    let len: usize = to.iter().map(|p| p.len).sum();
    let block: Vec<u8> = pattern
        .iter()
        .copied()
        .cycle()
        .take(STEP.min(len.next_multiple_of(4)))
        .collect();
    let mut done = 0;
    while done < len {
        let step = block.len().min(len - done);
        for (part, at, piece) in parts(to, done, step) {
            // SAFETY: `parts` splits the first `step` bytes of the block, which this function owns.
            unsafe {
                piece
                    .backing
                    .write(piece.offset + at, block[part.clone()].as_ptr(), part.len())?
            };
        }
        done += step;
    }
    Ok(())
}
