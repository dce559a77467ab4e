//! The seven checkpoint functions, from the saver's side.
//!
//! In: a pid and what the caller wants of it. Out: the target in another state, and for custom storage its memory mapped here, one extent
//! and one stream per GPU that holds data, in an order that differs from run to run. Whatever can be refused is refused before the target
//! is asked to change. What exists if this process dies: before BEGIN the target as it was; after it a target that stays CHECKPOINTING or
//! RESTORING, for nobody else has the handle.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cudarc::driver::sys::CUcheckpointCustomStorageInfo;

use crate::backing::Backing;
use crate::codes::{Answer, Code};
use crate::config::{self, Config};
use crate::control::{self, Part, Request, State};
use crate::driver::{self, Driver};
use crate::extent::Operation;
use crate::remote::{self, Remote};
use crate::work;

/// First API version with the checkpoint functions.
pub(crate) const API_CHECKPOINT: u32 = 12_080;
/// First API version with GPU pairs.
const API_PAIRS: u32 = 13_000;
/// First API version with custom storage.
pub(crate) const API_CUSTOM_STORAGE: u32 = 13_040;

const OPERATION_TAG: u64 = 0x0540_0000_0000_0000;

/// What fresh memory of a restore holds.
const SOIL: u8 = 0xA5;
/// So many bytes at either end of an extent, 64 MiB: enough for a test's GPU, and cheap for a bench's.
const SOILED: usize = 64 << 20;

/// Where one GPU of the target goes: the UUID it has, the UUID it gets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pair {
    pub(crate) old: [u8; 16],
    pub(crate) new: [u8; 16],
}

/// A mapped extent as the trace tells it.
#[derive(Debug)]
pub(crate) struct Mapped {
    pub(crate) uuid: [u8; 16],
    pub(crate) stream: u64,
    pub(crate) len: u64,
    pub(crate) address: u64,
}

/// What a begun operation gives its caller.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) info: *mut CUcheckpointCustomStorageInfo,
    pub(crate) extents: Vec<Mapped>,
}

fn supported(needs: u32) -> Answer<&'static Config> {
    let config = config::get().map_err(|_told_by_init| Code::INVALID_VALUE)?;
    if config.api < needs {
        Err(Code::NOT_SUPPORTED)
    } else {
        Ok(config)
    }
}

/// `cuCheckpointProcessGetState`.
pub(crate) fn state(pid: i32) -> Answer<State> {
    supported(API_CHECKPOINT)?;
    Ok(Remote::open(pid)?.state())
}

/// `cuCheckpointProcessGetRestoreThreadId`.
pub(crate) fn restore_thread(pid: i32) -> Answer<i32> {
    supported(API_CHECKPOINT)?;
    Remote::open(pid)?.restore_thread()
}

/// `cuCheckpointProcessLock`; 0 is no timeout.
pub(crate) fn lock(pid: i32, timeout_ms: u32) -> Answer {
    supported(API_CHECKPOINT)?;
    let deadline = (timeout_ms > 0).then(|| control::deadline_in(timeout_ms));
    in_state(pid, State::Running)?.request(Request::Lock, deadline.unwrap_or(0), deadline)
}

/// `cuCheckpointProcessUnlock`.
pub(crate) fn unlock(pid: i32) -> Answer {
    supported(API_CHECKPOINT)?;
    in_state(pid, State::Locked)?.request(Request::Unlock, 0, None)
}

/// `cuCheckpointProcessCheckpoint` without custom storage; also on oneself.
pub(crate) fn checkpoint_to_host(pid: i32) -> Answer {
    supported(API_CHECKPOINT)?;
    in_state(pid, State::Locked)?.request(Request::SaveToHost, 0, None)
}

/// `cuCheckpointProcessCheckpoint` with custom storage.
pub(crate) fn checkpoint_to_custom_storage(pid: i32) -> Answer<Begun> {
    let driver = custom_storage(pid)?;
    let remote = in_state(pid, State::Locked)?;
    let mut places = Vec::new();
    for index in used_gpus(&remote) {
        let uuid = remote.header.gpus[index].uuid();
        // A GPU that this process does not see cannot have a context here either.
        let ordinal = driver
            .config
            .gpus
            .iter()
            .position(|g| g.uuid == uuid)
            .ok_or(Code::INVALID_CONTEXT)?;
        driver.context_of(ordinal).ok_or(Code::INVALID_CONTEXT)?;
        places.push((index, ordinal));
    }
    begin(driver, remote, Request::BeginCheckpoint, &places)
}

/// `cuCheckpointProcessRestore` without custom storage. No pairs: every GPU goes where it was.
pub(crate) fn restore_from_host(pid: i32, pairs: Option<&[Pair]>) -> Answer {
    let config = supported(if pairs.is_some() {
        API_PAIRS
    } else {
        API_CHECKPOINT
    })?;
    let remote = in_state(pid, State::Checkpointed)?;
    if remote.header.in_host_memory.load(Ordering::Relaxed) == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let places = place(config, &remote, pairs)?;
    check_memory(config, &remote, &places)?;
    remote.request(Request::RestoreFromHost, 0, None)?;
    note_places(config, &remote, &places)
}

/// `cuCheckpointProcessRestore` with custom storage.
pub(crate) fn restore_from_custom_storage(pid: i32, pairs: Option<&[Pair]>) -> Answer<Begun> {
    let driver = custom_storage(pid)?;
    let remote = in_state(pid, State::Checkpointed)?;
    let places = place(driver.config, &remote, pairs)?;
    for &(index, ordinal) in &places {
        if is_used(&remote, index) {
            driver.context_of(ordinal).ok_or(Code::INVALID_CONTEXT)?;
        }
    }
    check_memory(driver.config, &remote, &places)?;
    begin(driver, remote, Request::BeginRestore, &places)
}

/// `cuCheckpointOperationComplete`. Once the operation is taken out of the table its handle is used up, whatever comes of it.
pub(crate) fn complete(handle: u64) -> Answer {
    supported(API_CUSTOM_STORAGE)?;
    let driver = driver::get()?;
    let operation = driver.take_operation(handle)?;
    let result = finish(driver, &operation);
    driver.forget_operation(&operation);
    result
}

fn finish(driver: &Driver, operation: &Operation) -> Answer {
    // A context that was released took its extent along; what the copies did since is unknown.
    if !driver.model().extents.is_whole(operation) {
        return Err(Code::INVALID_CONTEXT);
    }
    operation
        .streams
        .iter()
        .map(|s| s.synchronize())
        .fold(Ok(()), Answer::and)?;
    Remote::open(operation.pid)?.request(Request::Complete, operation.number, None)
}

/// What every call with custom storage asks for first.
fn custom_storage(pid: i32) -> Answer<&'static Driver> {
    supported(API_CUSTOM_STORAGE).map_err(|_older| Code::INVALID_VALUE)?;
    if i64::from(pid) == i64::from(std::process::id()) {
        return Err(Code::NOT_SUPPORTED);
    }
    driver::get()
}

/// The target, if it is in this state now; its own thread checks again.
fn in_state(pid: i32, state: State) -> Answer<Remote> {
    let remote = Remote::open(pid)?;
    if remote.state() == state {
        Ok(remote)
    } else {
        Err(Code::ILLEGAL_STATE)
    }
}

fn is_used(remote: &Remote, index: usize) -> bool {
    remote.header.gpus[index].in_use.load(Ordering::Relaxed) != 0
}

fn used_gpus(remote: &Remote) -> impl Iterator<Item = usize> {
    (0..remote.gpu_count()).filter(|&index| is_used(remote, index))
}

/// Onto which GPU of this process each GPU of the target goes.
///
/// # Errors
/// `INVALID_VALUE` for pairs that leave a used GPU out, name one twice or one that does not exist, and for a GPU of another chip.
fn place(config: &Config, remote: &Remote, pairs: Option<&[Pair]>) -> Answer<Vec<(usize, usize)>> {
    let slots = &remote.header.gpus[..remote.gpu_count()];
    let here = |uuid| {
        config
            .gpus
            .iter()
            .position(|g| g.uuid == uuid)
            .ok_or(Code::INVALID_VALUE)
    };
    let mut places = Vec::new();
    match pairs {
        None => {
            for index in used_gpus(remote) {
                places.push((index, here(slots[index].uuid())?));
            }
        }
        Some(pairs) => {
            for pair in pairs {
                let index = slots
                    .iter()
                    .position(|s| s.uuid() == pair.old)
                    .ok_or(Code::INVALID_VALUE)?;
                let ordinal = here(pair.new)?;
                if places.iter().any(|&(i, o)| i == index || o == ordinal) {
                    return Err(Code::INVALID_VALUE);
                }
                places.push((index, ordinal));
            }
            if used_gpus(remote).any(|index| places.iter().all(|&(i, _)| i != index)) {
                return Err(Code::INVALID_VALUE);
            }
        }
    }
    for &(index, ordinal) in &places {
        if slots[index].chip.load(Ordering::Relaxed)
            != driver::chip(config, &config.gpus[ordinal].name)
        {
            return Err(Code::INVALID_VALUE);
        }
    }
    Ok(places)
}

/// Fails the target for good if a GPU has too little memory left, as drivers were seen to.
fn check_memory(config: &Config, remote: &Remote, places: &[(usize, usize)]) -> Answer {
    for &(index, ordinal) in places {
        let gpu = &config.gpus[ordinal];
        let needed = remote.header.gpus[index].extent.load(Ordering::Relaxed);
        let taken = remote::resident_bytes(gpu.uuid, Some(remote.pid));
        if needed > gpu.memory.saturating_sub(taken) {
            remote.request(Request::Fail, 0, None)?;
            return Err(Code::OUT_OF_MEMORY);
        }
    }
    Ok(())
}

fn note_places(config: &Config, remote: &Remote, places: &[(usize, usize)]) -> Answer {
    places
        .iter()
        .try_for_each(|&(index, ordinal)| remote.set_uuid(index, config.gpus[ordinal].uuid))
}

/// BEGIN: from here on the target waits for Complete.
fn begin(
    driver: &Driver,
    mut remote: Remote,
    request: Request,
    places: &[(usize, usize)],
) -> Answer<Begun> {
    let handle = OPERATION_TAG | driver.next_id();
    let number = operation_number(handle);
    remote.request(request, number, None)?;
    remote.refresh()?;
    if request == Request::BeginRestore {
        note_places(driver.config, &remote, places)?;
    }
    // Everything is opened before anything is mapped, so that a failure leaves no half of an operation here.
    let memory = open_memory(driver.config, &remote, places)?;
    let mut devices = Vec::new();
    let mut streams = Vec::new();
    let mut extents = Vec::new();
    for (ordinal, backing, parts) in memory {
        let stream = driver.create_stream(ordinal, driver::NON_BLOCKING, 0);
        let stream_handle = driver::stream_handle(&stream);
        let entry =
            driver
                .model()
                .extents
                .add(handle, stream.clone(), stream_handle, backing, &parts)?;
        if request == Request::BeginRestore {
            soil(driver, entry.devPtr, entry.size)?;
        }
        extents.push(Mapped {
            uuid: driver.config.gpus[ordinal].uuid,
            stream: stream.id,
            len: entry.size as u64,
            address: entry.devPtr,
        });
        devices.push(entry);
        streams.push(stream);
    }
    let info = driver
        .model()
        .extents
        .begin(handle, (remote.pid, number), streams, devices);
    Ok(Begun { info, extents })
}

/// Fills both ends of a restored extent, so that a saver that leaves a chunk out (of zeros, say) is found out: nobody promises that new memory is zero.
fn soil(driver: &Driver, address: u64, len: usize) -> Answer {
    let end = len.min(SOILED);
    for (offset, len) in [(0, end), (len - end, end)] {
        let pieces = {
            let model = driver.model();
            let extent = model.extents.find(address);
            extent.and_then(|extent| extent.pieces(offset as u64, len))
        };
        work::fill(&pieces.ok_or(Code::ILLEGAL_ADDRESS)?, [SOIL; 4])?;
    }
    Ok(())
}

/// Opens the memory of every GPU of the target that holds data, in the order in which the driver lists them.
fn open_memory(
    config: &Config,
    remote: &Remote,
    places: &[(usize, usize)],
) -> Answer<Vec<(usize, Backing, Vec<Part>)>> {
    let mut memory = Vec::new();
    for (index, ordinal) in shuffled(places, config.seed) {
        let slot = &remote.header.gpus[index];
        if slot.extent.load(Ordering::Relaxed) == 0 {
            continue;
        }
        let fd = slot.fd.load(Ordering::Relaxed);
        let file_len = slot.file_len.load(Ordering::Relaxed);
        let backing = Backing::open(remote.pid, fd, file_len, config.vram)?;
        memory.push((ordinal, backing, remote.parts(index)?));
    }
    Ok(memory)
}

/// A number that another saver of the same target does not use.
fn operation_number(handle: u64) -> u32 {
    let mixed = config::mix(handle ^ u64::from(std::process::id()) << 32 ^ crate::trace::now_us());
    #[expect(clippy::cast_possible_truncation, reason = "any bits will do")]
    let number = mixed as u32;
    number
}

/// The order in which the driver lists devices: none in particular.
fn shuffled(places: &[(usize, usize)], seed: u64) -> Vec<(usize, usize)> {
    static OPERATIONS: AtomicU64 = AtomicU64::new(0);
    let operation = OPERATIONS.fetch_add(1, Ordering::Relaxed);
    let mut order = places.to_vec();
    order.sort_by_key(|&(index, _)| {
        config::mix(config::mix(config::mix(seed) ^ operation) ^ index as u64)
    });
    order
}

/// Waits, for a scripted fault, until a process that was sent SIGKILL is gone.
pub(crate) fn wait_until_dead(pid: i32) {
    for _ in 0..2_000 {
        if remote::is_dead(pid) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_depends_on_the_seed_and_loses_nothing() {
        let places: Vec<_> = (0..8).map(|i| (i, i)).collect();
        let orders: Vec<_> = (0..20).map(|seed| shuffled(&places, seed)).collect();
        for order in &orders {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, places);
        }
        assert!(orders.iter().any(|o| *o != orders[0]));
    }
}
