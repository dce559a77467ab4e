//! Another process with the driver, seen from outside.
//!
//! In: a pid of this PID namespace. Out: its control block as it stands, and answers to requests. What can fail, by code:
//! `OPERATING_SYSTEM` for a pid that does not exist (any more), and where the kernel does not let us look into the process; `NOT_INITIALIZED`
//! for a process without this driver or before its `cuInit`. Both as driver 580 answers.

use std::ffi::c_void;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::codes::{Answer, Code};
use crate::control::{self, CONTROL, Header, Part, Request, SIGNAL, State};

/// How long an answer is polled for at the shortest and the longest interval.
const POLL_MIN: Duration = Duration::from_micros(20);
const POLL_MAX: Duration = Duration::from_millis(1);
/// How long past a lock's deadline its answer is waited for: a running target answers well within this.
const GRACE: Duration = Duration::from_millis(200);

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) pid: i32,
    /// Address of the block in the other process.
    control: u64,
    /// The block's head as it was when last read.
    pub(crate) header: Header,
}

impl Remote {
    /// Finds the block of `pid`.
    pub(crate) fn open(pid: i32) -> Answer<Remote> {
        if pid <= 0 || is_dead(pid) {
            return Err(Code::OPERATING_SYSTEM);
        }
        let (base, header) = locate(pid)?;
        if header.magic.load(Ordering::Relaxed) != control::MAGIC
            || own_pid(pid) != header.pid.load(Ordering::Relaxed)
        {
            return Err(Code::NOT_INITIALIZED);
        }
        Ok(Remote {
            pid,
            control: base,
            header,
        })
    }

    /// The state when the block was last read.
    pub(crate) fn state(&self) -> State {
        State::from_number(self.header.state.load(Ordering::Relaxed))
    }

    /// Reads the block again.
    pub(crate) fn refresh(&mut self) -> Answer {
        self.header = read(self.pid, self.control)?;
        Ok(())
    }

    /// Number of GPUs of the process.
    pub(crate) fn gpu_count(&self) -> usize {
        (self.header.gpu_count.load(Ordering::Relaxed) as usize).min(self.header.gpus.len())
    }

    /// The live allocations of one GPU, as published for the operation under way.
    pub(crate) fn parts(&self, index: usize) -> Answer<Vec<Part>> {
        let slot = &self.header.gpus[index];
        let address = slot.parts.load(Ordering::Relaxed);
        let count = slot.part_count.load(Ordering::Relaxed);
        (0..count)
            .map(|i| read(self.pid, address + i * size_of::<Part>() as u64))
            .collect()
    }

    /// Notes on which GPU the process now is.
    pub(crate) fn set_uuid(&self, index: usize, uuid: [u8; 16]) -> Answer {
        write(
            self.pid,
            self.control + control::uuid_offset(index),
            &control::uuid_words(uuid),
        )
    }

    /// The restore thread's id in our PID namespace.
    pub(crate) fn restore_thread(&self) -> Answer<i32> {
        let wanted = self.header.tid.load(Ordering::Relaxed);
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid))
            .map_err(|_gone| Code::OPERATING_SYSTEM)?;
        tasks
            .filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok())
            .find(|&tid: &i32| {
                innermost_pid(&format!("/proc/{}/task/{tid}/status", self.pid)) == Some(wanted)
            })
            .ok_or(Code::NOT_INITIALIZED)
    }

    /// Sends a request and waits for its answer; with a `deadline` (see [`control::deadline_in`]) not much longer than that.
    ///
    /// # Errors
    /// What the restore thread answers; `NOT_READY` past the deadline; `OPERATING_SYSTEM` if the process dies meanwhile.
    pub(crate) fn request(&self, request: Request, argument: u32, deadline: Option<u32>) -> Answer {
        let token = next_token();
        queue_signal(
            self.pid,
            self.restore_thread()?,
            request as i32,
            u64::from(token) << 32 | u64::from(argument),
        )?;
        let give_up = deadline.map(|d| Instant::now() + control::left_until(d) + GRACE);
        let mut pause = POLL_MIN;
        loop {
            thread::sleep(pause);
            pause = (pause * 2).min(POLL_MAX);
            let word: u64 = read(self.pid, self.control + control::answer_offset(token))?;
            if word >> 32 == u64::from(token) {
                #[expect(
                    clippy::cast_possible_truncation,
                    reason = "the lower half is the code"
                )]
                let code = Code(word as u32);
                return if code == Code::SUCCESS {
                    Ok(())
                } else {
                    Err(code)
                };
            }
            if give_up.is_some_and(|t| Instant::now() > t) {
                return Err(Code::NOT_READY);
            }
        }
    }
}

/// Bytes that all processes of this machine hold on the GPU `uuid`, but for the process `except`. Processes that we may not look into
/// do not count.
pub(crate) fn resident_bytes(uuid: [u8; 16], except: Option<i32>) -> u64 {
    let Ok(entries) = fs::read_dir("/proc") else {
        return 0;
    };
    let pids = entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|&pid| Some(pid) != except)
        .filter_map(|pid| Remote::open(pid).ok())
        .map(|other| {
            let slots = other.header.gpus.iter().take(other.gpu_count());
            slots
                .filter(|s| s.uuid() == uuid)
                .map(|s| s.resident.load(Ordering::Relaxed))
                .sum::<u64>()
        })
        .sum()
}

/// Whether the process is gone or only waits to be reaped.
pub(crate) fn is_dead(pid: i32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return true;
    };
    let state = stat
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.chars().next());
    matches!(state, None | Some('Z' | 'X'))
}

/// Where this library's block lies from the start of the library's first mapping, and the file's name.
fn own_place() -> Option<&'static (u64, String)> {
    static PLACE: OnceLock<Option<(u64, String)>> = OnceLock::new();
    let find = || {
        let address = (&raw const CONTROL).expose_provenance() as u64;
        let maps = fs::read_to_string("/proc/self/maps").ok()?;
        let mut start = None;
        for mapping in maps.lines().filter_map(Mapping::parse) {
            if mapping.file_offset == 0 {
                start = Some((mapping.start, mapping.name.to_owned()));
            }
            // The block is zero-initialized, so it may lie in the anonymous mapping behind the file's last one.
            if (mapping.start..mapping.end).contains(&address) {
                return start.map(|(base, name)| (address - base, name));
            }
        }
        None
    };
    PLACE.get_or_init(find).as_ref()
}

/// A line of `/proc/<pid>/maps`.
struct Mapping<'a> {
    start: u64,
    end: u64,
    file_offset: u64,
    /// The file's name without its folder; empty for anonymous memory.
    name: &'a str,
}

impl Mapping<'_> {
    fn parse(line: &str) -> Option<Mapping<'_>> {
        let mut fields = line.splitn(6, ' ');
        let (start, end) = fields.next()?.split_once('-')?;
        let file_offset = u64::from_str_radix(fields.nth(1)?, 16).ok()?;
        let path = fields.nth(2)?.trim_start();
        let name = path.rsplit_once('/').map_or("", |(_, name)| name);
        let (start, end) = (
            u64::from_str_radix(start, 16).ok()?,
            u64::from_str_radix(end, 16).ok()?,
        );
        // Anonymous memory has offset 0 too; only a file's first mapping can be a library's start.
        let file_offset = if name.is_empty() {
            u64::MAX
        } else {
            file_offset
        };
        Some(Mapping {
            start,
            end,
            file_offset,
            name,
        })
    }
}

/// The address of the other process's block and its head.
fn locate(pid: i32) -> Answer<(u64, Header)> {
    let (offset, own_name) = own_place().ok_or(Code::OPERATING_SYSTEM)?;
    let maps = fs::read(format!("/proc/{pid}/maps")).map_err(|_gone| Code::OPERATING_SYSTEM)?;
    let maps = String::from_utf8_lossy(&maps);
    let known = [own_name.as_str(), "libcuda.so", "libemulated_cuda.so"];
    let mut refused = Code::NOT_INITIALIZED;
    for mapping in maps.lines().filter_map(Mapping::parse) {
        if mapping.file_offset != 0 || !known.iter().any(|k| mapping.name.starts_with(k)) {
            continue;
        }
        match read::<Header>(pid, mapping.start + offset) {
            Ok(header) if header.magic.load(Ordering::Relaxed) == control::MAGIC => {
                return Ok((mapping.start + offset, header));
            }
            Err(Code::OPERATING_SYSTEM) => refused = Code::OPERATING_SYSTEM,
            _ => {}
        }
    }
    Err(refused)
}

/// The pid that the process has in its own PID namespace.
fn own_pid(pid: i32) -> i32 {
    innermost_pid(&format!("/proc/{pid}/status")).unwrap_or(pid)
}

fn innermost_pid(status: &str) -> Option<i32> {
    let text = fs::read_to_string(status).ok()?;
    text.lines()
        .find_map(|l| l.strip_prefix("NSpid:"))?
        .split_whitespace()
        .next_back()?
        .parse()
        .ok()
}

/// A value of which every bit pattern is valid, so that it can be copied from another process.
trait Plain {}
impl Plain for u64 {}
impl Plain for [u64; 2] {}
impl Plain for Part {}
impl Plain for Header {}

fn read<T: Plain>(pid: i32, address: u64) -> Answer<T> {
    let mut value = MaybeUninit::<T>::uninit();
    let local = libc::iovec {
        iov_base: value.as_mut_ptr().cast(),
        iov_len: size_of::<T>(),
    };
    let remote = remote_iovec::<T>(address)?;
    // SAFETY: the local range is `value`; the kernel checks the remote one.
    let done = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    check::<T>(done)?;
    // SAFETY: all bytes were written, and a `Plain` type takes any bytes.
    Ok(unsafe { value.assume_init() })
}

fn write<T: Plain>(pid: i32, address: u64, value: &T) -> Answer {
    let local = libc::iovec {
        iov_base: std::ptr::from_ref(value).cast_mut().cast::<c_void>(),
        iov_len: size_of::<T>(),
    };
    let remote = remote_iovec::<T>(address)?;
    // SAFETY: the local range is `value`, which is only read; the remote one lies in a control block of this layout.
    let done =
        unsafe { libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0) };
    check::<T>(done)
}

fn remote_iovec<T>(address: u64) -> Answer<libc::iovec> {
    let address = usize::try_from(address).map_err(|_too_large| Code::NOT_INITIALIZED)?;
    Ok(libc::iovec {
        iov_base: std::ptr::without_provenance_mut(address),
        iov_len: size_of::<T>(),
    })
}

fn check<T>(done: isize) -> Answer {
    if usize::try_from(done) == Ok(size_of::<T>()) {
        return Ok(());
    }
    Err(match io::Error::last_os_error().raw_os_error() {
        Some(libc::ESRCH | libc::EPERM) => Code::OPERATING_SYSTEM,
        _ => Code::NOT_INITIALIZED,
    })
}

/// A token that no other request in flight has: the thread in the low bits, which choose the slot, a counter with a random start above.
fn next_token() -> u32 {
    static COUNTER: OnceLock<AtomicU32> = OnceLock::new();
    let start = || {
        #[expect(clippy::cast_possible_truncation, reason = "any bits will do")]
        let random =
            crate::config::mix(crate::trace::now_us() ^ u64::from(std::process::id()) << 32) as u32;
        AtomicU32::new(random)
    };
    let count = COUNTER.get_or_init(start).fetch_add(1, Ordering::Relaxed);
    // SAFETY: gettid has no preconditions.
    let tid = unsafe { libc::gettid() }.cast_unsigned();
    let token = count << 15 | tid & 0x7fff;
    if token == 0 { 1 << 15 } else { token }
}

fn queue_signal(pid: i32, tid: i32, number: i32, value: u64) -> Answer {
    // The head of the kernel's siginfo_t on 64-bit machines: signo, errno, code, padding, pid, uid, value. User-made signals may set them all.
    let mut info = [0_u32; 32];
    info[0] = SIGNAL.cast_unsigned();
    info[1] = number.cast_unsigned();
    info[2] = libc::SI_QUEUE.cast_unsigned();
    info[4] = std::process::id();
    #[expect(clippy::cast_possible_truncation, reason = "the two halves of 64 bits")]
    let (low, high) = (value as u32, (value >> 32) as u32);
    (info[6], info[7]) = if cfg!(target_endian = "little") {
        (low, high)
    } else {
        (high, low)
    };
    loop {
        // SAFETY: the kernel reads 128 bytes of `info`, which is that long.
        let rc =
            unsafe { libc::syscall(libc::SYS_rt_tgsigqueueinfo, pid, tid, SIGNAL, info.as_ptr()) };
        if rc == 0 {
            return Ok(());
        }
        match io::Error::last_os_error().raw_os_error() {
            Some(libc::EAGAIN) => thread::sleep(POLL_MAX), // too many queued signals; the target works on them
            _ => return Err(Code::OPERATING_SYSTEM),
        }
    }
}
