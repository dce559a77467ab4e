//! The control block: what a process shows to savers, and how savers ask it for changes.
//!
//! Every process with the driver has one block, a static in its private memory, so CRIU carries it along and a frozen process still shows
//! its true state. Savers find it through `/proc/<pid>/maps` (see `remote`), read it with `process_vm_readv` and never change it, but for
//! one thing: after a restore onto other GPUs the saver notes their UUIDs here. Every other change is made by the process's own restore
//! thread. A request is one queued real-time signal to that thread, number and argument in the signal's payload; the kernel's queue puts
//! the requests of several savers in order. The answer is a word in the block that the saver polls. So a saver holds nothing in the target,
//! and one that is killed leaves nothing behind but an answer that nobody reads.

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use crate::codes::Code;
use crate::config::GPUS_MAX;

/// Tells an initialized block of this layout from other memory.
pub(crate) const MAGIC: u64 = 0x656d_7563_7564_6100 + size_of::<Control>() as u64;

/// The signal that carries requests; only the restore thread waits for it, and it is sent to that thread alone.
pub(crate) const SIGNAL: i32 = 60;

/// Answers have one slot per thread id modulo this number, so that callers that wait at the same time do not meet.
const ANSWERS: usize = 1 << 15;

/// `CUprocessState`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum State {
    Running = 0,
    Locked = 1,
    Checkpointed = 2,
    Failed = 3,
    Checkpointing = 4,
    Restoring = 5,
}

impl State {
    /// The state with this number; a number that is none counts as failed.
    pub(crate) fn from_number(number: u32) -> State {
        use State::{Checkpointed, Checkpointing, Failed, Locked, Restoring, Running};
        [
            Running,
            Locked,
            Checkpointed,
            Failed,
            Checkpointing,
            Restoring,
        ]
        .into_iter()
        .find(|&s| s as u32 == number)
        .unwrap_or(Failed)
    }
}

/// What a saver can ask for. The numbers travel in `si_errno`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Request {
    /// RUNNING → LOCKED; the argument is a deadline, see [`deadline_in`].
    Lock = 1,
    /// LOCKED → RUNNING.
    Unlock,
    /// LOCKED → CHECKPOINTED, with the bytes in host memory.
    SaveToHost,
    /// LOCKED → CHECKPOINTING; the argument numbers the operation.
    BeginCheckpoint,
    /// CHECKPOINTED → LOCKED, with the bytes from host memory.
    RestoreFromHost,
    /// CHECKPOINTED → RESTORING; the argument numbers the operation.
    BeginRestore,
    /// CHECKPOINTING → CHECKPOINTED, RESTORING → LOCKED; the argument is the operation's number.
    Complete,
    /// CHECKPOINTED → FAILED: the GPUs to restore onto have too little memory.
    Fail,
}

impl Request {
    pub(crate) fn from_number(number: i32) -> Option<Request> {
        use Request::{
            BeginCheckpoint, BeginRestore, Complete, Fail, Lock, RestoreFromHost, SaveToHost,
            Unlock,
        };
        [
            Lock,
            Unlock,
            SaveToHost,
            BeginCheckpoint,
            RestoreFromHost,
            BeginRestore,
            Complete,
            Fail,
        ]
        .into_iter()
        .find(|&r| r as i32 == number)
    }
}

/// One live allocation as savers see it; an extent is these, one after the other.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Part {
    /// From the start of the memory file, in bytes.
    pub(crate) offset: u64,
    /// Rounded up to the granularity, in bytes.
    pub(crate) len: u64,
}

/// One GPU of the process. Plain words that other processes copy; the restore thread and calls behind the gate write them.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct GpuSlot {
    uuid: [AtomicU64; 2],
    /// Digest of name and compute capability: equal on GPUs of the same chip.
    pub(crate) chip: AtomicU64,
    /// Bytes of live allocations on the GPU now: 0 while checkpointed.
    pub(crate) resident: AtomicU64,
    /// Bytes of live allocations, wherever their contents are: the length of the extent.
    pub(crate) extent: AtomicU64,
    /// 1 if the process has a context or memory on this GPU.
    pub(crate) in_use: AtomicU32,
    /// Descriptor of the memory file, valid while CHECKPOINTING or RESTORING.
    pub(crate) fd: AtomicI32,
    /// Address of the table of [`Part`]s, valid while CHECKPOINTING or RESTORING.
    pub(crate) parts: AtomicU64,
    pub(crate) part_count: AtomicU64,
    /// Bytes of the memory file.
    pub(crate) file_len: AtomicU64,
}

impl GpuSlot {
    const fn new() -> Self {
        GpuSlot {
            uuid: [const { AtomicU64::new(0) }; 2],
            chip: AtomicU64::new(0),
            resident: AtomicU64::new(0),
            extent: AtomicU64::new(0),
            in_use: AtomicU32::new(0),
            fd: AtomicI32::new(0),
            parts: AtomicU64::new(0),
            part_count: AtomicU64::new(0),
            file_len: AtomicU64::new(0),
        }
    }

    pub(crate) fn uuid(&self) -> [u8; 16] {
        let high = u128::from(self.uuid[0].load(Ordering::Acquire));
        (high << 64 | u128::from(self.uuid[1].load(Ordering::Acquire))).to_be_bytes()
    }

    pub(crate) fn set_uuid(&self, uuid: [u8; 16]) {
        for (word, value) in self.uuid.iter().zip(uuid_words(uuid)) {
            word.store(value, Ordering::Release);
        }
    }
}

/// A UUID as it lies in a slot.
pub(crate) fn uuid_words(uuid: [u8; 16]) -> [u64; 2] {
    let number = u128::from_be_bytes(uuid);
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the two halves of 128 bits"
    )]
    [(number >> 64) as u64, number as u64]
}

/// The part of the block that savers read as a whole.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Header {
    /// [`MAGIC`] once the process has called `cuInit`.
    pub(crate) magic: AtomicU64,
    /// The process in its own PID namespace: another in a forked child, which has no driver.
    pub(crate) pid: AtomicI32,
    /// The restore thread in the same namespace.
    pub(crate) tid: AtomicI32,
    pub(crate) state: AtomicU32,
    pub(crate) gpu_count: AtomicU32,
    /// 1 if the contents of a checkpointed process are in its host memory.
    pub(crate) in_host_memory: AtomicU32,
    /// Number of the operation under way, chosen by its saver.
    pub(crate) operation: AtomicU32,
    pub(crate) gpus: [GpuSlot; GPUS_MAX],
}

/// See the module's text.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Control {
    pub(crate) header: Header,
    /// Token in the upper half, code in the lower.
    answers: [AtomicU64; ANSWERS],
}

/// This process's block.
pub(crate) static CONTROL: Control = Control {
    header: Header {
        magic: AtomicU64::new(0),
        pid: AtomicI32::new(0),
        tid: AtomicI32::new(0),
        state: AtomicU32::new(State::Running as u32),
        gpu_count: AtomicU32::new(0),
        in_host_memory: AtomicU32::new(0),
        operation: AtomicU32::new(0),
        gpus: [const { GpuSlot::new() }; GPUS_MAX],
    },
    answers: [const { AtomicU64::new(0) }; ANSWERS],
};

impl Control {
    pub(crate) fn state(&self) -> State {
        State::from_number(self.header.state.load(Ordering::Acquire))
    }

    pub(crate) fn set_state(&self, state: State) {
        self.header.state.store(state as u32, Ordering::Release);
    }

    /// Answers the request with this token.
    pub(crate) fn answer(&self, token: u32, code: Code) {
        let word = u64::from(token) << 32 | u64::from(code.0);
        self.answers[slot(token)].store(word, Ordering::Release);
    }
}

fn slot(token: u32) -> usize {
    token as usize % ANSWERS
}

/// Where the answer to `token` will stand, from the start of the block.
pub(crate) fn answer_offset(token: u32) -> u64 {
    (std::mem::offset_of!(Control, answers) + slot(token) * size_of::<AtomicU64>()) as u64
}

/// Where the UUID of a GPU stands, from the start of the block.
pub(crate) fn uuid_offset(index: usize) -> u64 {
    let gpus = std::mem::offset_of!(Control, header) + std::mem::offset_of!(Header, gpus);
    (gpus + index * size_of::<GpuSlot>() + std::mem::offset_of!(GpuSlot, uuid)) as u64
}

/// Milliseconds of the wall clock, modulo 2³². The wall clock, because CRIU gives a restored process its own monotonic one.
fn wall_ms() -> u32 {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    #[expect(clippy::cast_possible_truncation, reason = "modulo 2³² is meant")]
    let ms = since.as_millis() as u32;
    ms
}

/// A deadline as it travels in a lock request: `timeout_ms` from now, never 0, which means none. At most 24 days.
pub(crate) fn deadline_in(timeout_ms: u32) -> u32 {
    wall_ms()
        .wrapping_add(timeout_ms.min(i32::MAX.cast_unsigned()))
        .max(1)
}

/// What is left until such a deadline.
pub(crate) fn left_until(deadline: u32) -> std::time::Duration {
    let left = deadline.wrapping_sub(wall_ms()).cast_signed();
    std::time::Duration::from_millis(u64::try_from(left).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_survive_the_trip() {
        let left = left_until(deadline_in(5_000)).as_millis();
        assert!((4_000..=5_000).contains(&left), "{left}");
        assert_eq!(left_until(deadline_in(0).wrapping_sub(10)).as_millis(), 0);
        assert!(left_until(deadline_in(u32::MAX)).as_secs() > 86_400);
    }

    #[test]
    fn uuids_survive_the_trip() {
        let uuid = *b"0123456789abcdef";
        let slot = GpuSlot::new();
        slot.set_uuid(uuid);
        assert_eq!(slot.uuid(), uuid);
    }

    #[test]
    fn numbers_name_what_they_stand_for() {
        for number in 0..6 {
            assert_eq!(State::from_number(number) as u32, number);
        }
        assert_eq!(State::from_number(77), State::Failed);
        assert_eq!(
            Request::from_number(Request::Fail as i32),
            Some(Request::Fail)
        );
        assert_eq!(Request::from_number(0), None);
    }
}
