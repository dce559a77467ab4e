//! One GPU's memory: a sparse memory file.
//!
//! In the target the file is made here; a saver opens the very same file through `/proc/<pid>/fd/N`. Bytes go in and out with `pread` and
//! `pwrite`: reading a hole allocates nothing in the target, and a file that another process truncates gives a short read, where a mapping
//! would end the reader with SIGBUS. `vram=resident` maps the file instead, since its pages are always present and a copy is then as cheap
//! as the machine allows. `memory-dir` puts the file into a file system of the user's choice, such as a tmpfs with huge pages.
//! What can fail: the kernel has no memory or no file descriptor left (`OUT_OF_MEMORY`); the folder takes no file (`OPERATING_SYSTEM`); a host range that is not mapped (`ILLEGAL_ADDRESS`).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::codes::{Answer, Code};
use crate::config::Vram;

/// What memory is mapped in, at least; pages may be larger.
const PAGE_LEN: usize = 4096;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Backing {
    file: File,
    /// Bytes of the file, as this process knows it.
    len: AtomicU64,
    mapping: Option<Mapping>,
}

impl Backing {
    /// Makes an empty file, without a name in `dir` if there is one. `window` is the most that it can grow to, in bytes.
    pub(crate) fn create(window: u64, vram: Vram, dir: Option<&Path>) -> Answer<Backing> {
        let file = match dir {
            Some(dir) => {
                let mut options = OpenOptions::new();
                options.read(true).write(true).custom_flags(libc::O_TMPFILE);
                options.open(dir).map_err(|_io| Code::OPERATING_SYSTEM)?
            }
            None => memory_file()?,
        };
        Self::wrap(file, 0, window, vram)
    }

    /// Opens the file of another process, which shows it as descriptor `fd`.
    pub(crate) fn open(pid: i32, fd: i32, len: u64, vram: Vram) -> Answer<Backing> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/fd/{fd}"));
        let file = file.map_err(|_io| Code::OPERATING_SYSTEM)?;
        Self::wrap(file, len, len, vram)
    }

    fn wrap(file: File, len: u64, window: u64, vram: Vram) -> Answer<Backing> {
        let mapping = match vram {
            Vram::Resident if window > 0 => Some(Mapping::new(&file, window)?),
            _ => None,
        };
        Ok(Backing {
            file,
            len: AtomicU64::new(len),
            mapping,
        })
    }

    pub(crate) fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }

    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    /// Grows the file to at least `len` bytes; with a mapping, makes the new pages present.
    pub(crate) fn grow(&self, len: u64) -> Answer {
        let old = self.len();
        if len <= old {
            return Ok(());
        }
        self.file.set_len(len).map_err(|_io| Code::OUT_OF_MEMORY)?;
        self.len.store(len, Ordering::Release);
        self.make_present(old, len - old)
    }

    /// Gives the memory of a range back to the kernel; it reads as zero from now on.
    pub(crate) fn discard(&self, offset: u64, len: u64) -> Answer {
        if len == 0 {
            return Ok(());
        }
        self.allocate(
            libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
            offset,
            len,
        )?;
        self.make_present(offset, len)
    }

    /// With a mapping, gives a range its pages, zeroed: allocated ones would be zeroed at the first access, by whoever comes first.
    fn make_present(&self, offset: u64, len: u64) -> Answer {
        let Some(mapping) = &self.mapping else {
            return Ok(());
        };
        self.allocate(0, offset, len)?;
        mapping.populate(offset, len)
    }

    /// Gives all memory back at once, also while a forked process still holds the file.
    pub(crate) fn truncate(&self) {
        self.len.store(0, Ordering::Release);
        // A memory file that is shrunk to nothing cannot fail; if it did, the pages go when the last descriptor is closed.
        let _ = self.file.set_len(0);
    }

    fn allocate(&self, mode: i32, offset: u64, len: u64) -> Answer {
        // SAFETY: the descriptor is ours; the call has no effect on this process's memory other than the file's contents.
        let rc =
            unsafe { libc::fallocate(self.fd(), mode, offset.cast_signed(), len.cast_signed()) };
        if rc == 0 {
            Ok(())
        } else {
            Err(Code::OUT_OF_MEMORY)
        }
    }

    /// Copies `len` bytes at `offset` to host memory.
    ///
    /// # Safety
    /// `host` must be host memory of `len` bytes that the caller of the driver gave for writing, or not be mapped at all.
    pub(crate) unsafe fn read(&self, offset: u64, host: *mut u8, len: usize) -> Answer {
        if let Some(mapping) = &self.mapping {
            let from = mapping.at(offset, len, self.len())?;
            // SAFETY: `at` checked the range of the mapping; the host range is the caller's promise, as with hardware.
            unsafe { std::ptr::copy(from, host, len) };
            return Ok(());
        }
        transfer(offset, len, |done, offset| {
            // SAFETY: `done` is below `len`, so the pointer stays inside the caller's range; the kernel answers EFAULT for what is not mapped.
            unsafe { libc::pread(self.fd(), host.add(done).cast(), len - done, offset) }
        })
    }

    /// Copies `len` bytes of host memory to `offset`.
    ///
    /// # Safety
    /// `host` must be host memory of `len` bytes that the caller of the driver gave for reading, or not be mapped at all.
    pub(crate) unsafe fn write(&self, offset: u64, host: *const u8, len: usize) -> Answer {
        if let Some(mapping) = &self.mapping {
            let to = mapping.at(offset, len, self.len())?;
            // SAFETY: as in `read`, with the directions exchanged.
            unsafe { std::ptr::copy(host, to, len) };
            return Ok(());
        }
        transfer(offset, len, |done, offset| {
            // SAFETY: as in `read`.
            unsafe { libc::pwrite(self.fd(), host.add(done).cast(), len - done, offset) }
        })
    }

    /// The next range of pages that are present at or after `offset`, before `end`.
    pub(crate) fn next_data(&self, offset: u64, end: u64) -> Option<(u64, u64)> {
        let seek = |from: u64, whence| {
            // SAFETY: only moves the file position, which nothing else uses.
            let at = unsafe { libc::lseek(self.fd(), from.cast_signed(), whence) };
            u64::try_from(at).ok()
        };
        let start = seek(offset, libc::SEEK_DATA).filter(|&s| s < end)?;
        let stop = seek(start, libc::SEEK_HOLE).unwrap_or(end).min(end);
        Some((start, stop))
    }
}

fn memory_file() -> Answer<File> {
    // SAFETY: the name is a C string literal; the call has no other effect on memory.
    let fd = unsafe { libc::memfd_create(c"emulated-gpu".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(Code::OUT_OF_MEMORY);
    }
    // SAFETY: the kernel has just given this descriptor to us and nothing else knows it.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Repeats a positioned read or write until `len` bytes are done.
fn transfer(offset: u64, len: usize, step: impl Fn(usize, i64) -> isize) -> Answer {
    let mut done = 0;
    while done < len {
        match usize::try_from(step(done, (offset + done as u64).cast_signed())) {
            Ok(0) => return Err(Code::ILLEGAL_ADDRESS),
            Ok(n) => done += n,
            Err(_negative) => match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::ENOMEM | libc::ENOSPC) => return Err(Code::OUT_OF_MEMORY),
                _ => return Err(Code::ILLEGAL_ADDRESS),
            },
        }
    }
    Ok(())
}

/// A shared mapping of a memory file, unmapped when dropped.
#[derive(Debug)]
struct Mapping {
    start: *mut u8,
    len: usize,
}

// SAFETY: the pointer is only an address range; every access goes through raw copies whose ordering is the caller's stream order.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: &File, len: u64) -> Answer<Mapping> {
        let len = usize::try_from(len).map_err(|_too_large| Code::OUT_OF_MEMORY)?;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let start = unsafe {
            let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                file.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(Code::OUT_OF_MEMORY);
        }
        Ok(Mapping {
            start: start.cast(),
            len,
        })
    }

    /// Touches the pages of a range that is allocated. Kernels before 5.14 do not know how; there the first access does it.
    fn populate(&self, offset: u64, len: u64) -> Answer {
        let range = |at: u64| usize::try_from(at).map_err(|_too_large| Code::ILLEGAL_ADDRESS);
        let (start, end) = (range(offset)?, range(offset.saturating_add(len))?);
        if end > self.len {
            return Err(Code::ILLEGAL_ADDRESS);
        }
        let start = start - start % PAGE_LEN;
        let address = self.start.wrapping_add(start);
        // SAFETY: the range lies in our mapping, and its pages keep their contents.
        let rc = unsafe { libc::madvise(address.cast(), end - start, libc::MADV_POPULATE_WRITE) };
        match io::Error::last_os_error().raw_os_error() {
            _ if rc == 0 => Ok(()),
            Some(libc::EINVAL) => Ok(()),
            _ => Err(Code::OUT_OF_MEMORY),
        }
    }

    /// The address of `len` bytes at `offset` of a file of `file_len` bytes.
    fn at(&self, offset: u64, len: usize, file_len: u64) -> Answer<*mut u8> {
        let offset = usize::try_from(offset).map_err(|_too_large| Code::ILLEGAL_ADDRESS)?;
        let file_len = usize::try_from(file_len).map_err(|_too_large| Code::ILLEGAL_ADDRESS)?;
        if offset
            .checked_add(len)
            .is_none_or(|end| end > self.len.min(file_len))
        {
            return Err(Code::ILLEGAL_ADDRESS);
        }
        Ok(self.start.wrapping_add(offset))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the one that `new` mapped, and no reference into it exists outside a copy in progress, which holds the Backing.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(vram: Vram, dir: Option<&Path>) {
        let backing = Backing::create(1 << 20, vram, dir).unwrap();
        backing.grow(3 * 4096).unwrap();
        let out = [7_u8; 5000];
        let mut back = [1_u8; 5000];
        // SAFETY: both ranges are arrays on this stack.
        unsafe {
            backing.write(100, out.as_ptr(), out.len()).unwrap();
            backing.read(100, back.as_mut_ptr(), back.len()).unwrap();
        }
        assert_eq!(out, back);
        backing.discard(0, 8192).unwrap();
        // SAFETY: as above.
        unsafe { backing.read(100, back.as_mut_ptr(), back.len()).unwrap() };
        assert_eq!(back, [0; 5000]);
    }

    #[test]
    fn bytes_come_back_and_discarded_ones_are_zero() {
        for dir in [None, Some(Path::new("/dev/shm"))] {
            round_trip(Vram::Lazy, dir);
            round_trip(Vram::Resident, dir);
        }
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error() {
        let created = Backing::create(1 << 20, Vram::Lazy, Some(Path::new("/nowhere")));
        assert_eq!(created.unwrap_err(), Code::OPERATING_SYSTEM);
    }

    #[test]
    fn reading_past_the_end_or_into_nothing_is_an_error() {
        let backing = Backing::create(1 << 20, Vram::Lazy, None).unwrap();
        backing.grow(4096).unwrap();
        let mut byte = 0_u8;
        // SAFETY: one byte on this stack, and an address that is not mapped, which the kernel answers with EFAULT.
        unsafe {
            assert_eq!(
                backing.read(4096, &raw mut byte, 1),
                Err(Code::ILLEGAL_ADDRESS)
            );
            assert_eq!(
                backing.read(0, std::ptr::without_provenance_mut(16), 1),
                Err(Code::ILLEGAL_ADDRESS)
            );
        }
    }

    #[test]
    fn holes_are_skipped() {
        let backing = Backing::create(1 << 20, Vram::Lazy, None).unwrap();
        backing.grow(1 << 20).unwrap();
        let byte = 9_u8;
        // SAFETY: one byte on this stack.
        unsafe { backing.write(500_000, &raw const byte, 1).unwrap() };
        let (start, end) = backing.next_data(0, 1 << 20).unwrap();
        assert!(start <= 500_000 && end > 500_000 && end - start <= 4096);
        assert_eq!(backing.next_data(end, 1 << 20), None);
    }
}
