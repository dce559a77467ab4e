//! What the fuzz targets share: buffers beside memory that nobody may touch, and the golden image that valid inputs are made from.

use std::ptr::NonNull;

use ckptstream::manifest::{ExtentRecord, Manifest};

/// The job that the golden manifest belongs to; also the folder's name.
pub const JOB: &str = "planes";
/// The golden image's attempt.
pub const ATTEMPT: &str = "c0ffee00c0ffee00c0ffee00c0ffee00";

macro_rules! golden {
    ($key:literal) => {
        (
            $key,
            include_bytes!(concat!("../../tests/golden/v1/planes/", $key)),
        )
    };
}

/// Every object of the golden image, by its key relative to the job.
pub const GOLDEN: &[(&str, &[u8])] = &[
    golden!("data/c0ffee00c0ffee00c0ffee00c0ffee00/manifest.json"),
    golden!(
        "data/c0ffee00c0ffee00c0ffee00c0ffee00/4711/gpu-00000000-0000-4000-8000-00000000000a.0.frames.json"
    ),
    golden!(
        "data/c0ffee00c0ffee00c0ffee00c0ffee00/4711/gpu-00000000-0000-4000-8000-00000000000a.0.zst"
    ),
    golden!(
        "data/c0ffee00c0ffee00c0ffee00c0ffee00/4711/gpu-00000000-0000-4000-8000-00000000000b.0.frames.json"
    ),
    golden!(
        "data/c0ffee00c0ffee00c0ffee00c0ffee00/4711/gpu-00000000-0000-4000-8000-00000000000b.0.zst"
    ),
];

/// The golden image's manifest.
///
/// # Panics
/// When it does not read: then there is nothing to fuzz.
pub fn golden_manifest() -> Manifest {
    let (_, bytes) = GOLDEN[0];
    Manifest::decode_and_verify(bytes, JOB, ATTEMPT).expect("the golden manifest reads")
}

/// An extent of the golden image.
///
/// # Panics
/// As [`golden_manifest`].
pub fn golden_extent() -> ExtentRecord {
    let manifest = golden_manifest();
    let extent = manifest.extents().next();
    extent.expect("the golden image has extents").clone()
}

/// Which end of a [`Guarded`] buffer touches the memory that nobody may touch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// A byte before the first one is a crash.
    Front,
    /// A byte behind the last one is a crash.
    Back,
}

/// Memory between two pages that kill whoever reads or writes them: without a sanitizer it is this that finds accesses out of bounds.
#[derive(Debug)]
pub struct Guarded {
    start: NonNull<u8>,
    room: usize,
    canary: std::ops::Range<usize>,
}

const PAGE_LEN: usize = 4096;
/// Bytes on the side that no guard page touches, which must stay as they are.
const CANARY_LEN: usize = 64;
const CANARY: u8 = 0xC5;

impl Guarded {
    /// Room for so many bytes, at the least.
    ///
    /// # Panics
    /// When there is no memory.
    pub fn new(room: usize) -> Self {
        let room = (room + CANARY_LEN).next_multiple_of(PAGE_LEN);
        let len = room + 2 * PAGE_LEN;
        // SAFETY: a mapping of its own, at an address that the kernel chooses.
        let mapping = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(mapping, libc::MAP_FAILED, "memory for a guarded buffer");
        // SAFETY: one page into the mapping, which is longer.
        let start = unsafe { mapping.cast::<u8>().add(PAGE_LEN) };
        // SAFETY: all of the mapping but its first and its last page.
        let opened =
            unsafe { libc::mprotect(start.cast(), room, libc::PROT_READ | libc::PROT_WRITE) };
        assert_eq!(opened, 0, "memory for a guarded buffer");
        Self {
            start: NonNull::new(start).expect("no mapping begins at 0"),
            room,
            canary: 0..0,
        }
    }

    /// `len` bytes that touch the guard page on this side.
    ///
    /// # Panics
    /// When there is no room for them.
    pub fn slice(&mut self, len: usize, side: Side) -> &mut [u8] {
        assert!(len + CANARY_LEN <= self.room, "{len} bytes have no room");
        let (start, canary) = match side {
            Side::Front => (0, len..len + CANARY_LEN),
            Side::Back => (
                self.room - len,
                self.room - len - CANARY_LEN..self.room - len,
            ),
        };
        let all = self.all();
        all[canary.clone()].fill(CANARY);
        self.canary = canary;
        &mut self.all()[start..start + len]
    }

    /// A copy of these bytes that touches the guard page on this side.
    ///
    /// # Panics
    /// When there is no room for them.
    pub fn copy(&mut self, bytes: &[u8], side: Side) -> &[u8] {
        let slice = self.slice(bytes.len(), side);
        slice.copy_from_slice(bytes);
        slice
    }

    /// Nothing was written beside the last slice on its other side.
    ///
    /// # Panics
    /// When something was.
    pub fn check(&mut self) {
        let canary = self.canary.clone();
        assert!(
            self.all()[canary].iter().all(|byte| *byte == CANARY),
            "bytes beside the buffer were overwritten"
        );
    }

    fn all(&mut self) -> &mut [u8] {
        // SAFETY: mapped for good, readable and writable, and borrowed as `self` is.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.room) }
    }
}
