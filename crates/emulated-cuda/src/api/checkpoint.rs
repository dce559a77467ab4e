//! The seven checkpoint functions: arguments in, results out.
//!
//! They work while this process is locked, on itself too where the header allows it, and all but custom storage before `cuInit`.

use std::fmt::Write as _;

use cudarc::driver::sys::{
    CUcheckpointCheckpointArgs, CUcheckpointCustomStorageInfo, CUcheckpointGpuPair,
    CUcheckpointLockArgs, CUcheckpointOperationHandle, CUcheckpointRestoreArgs,
    CUcheckpointUnlockArgs, CUuuid,
};

use super::abi::{In, Out, list, out_of};
use super::{About, open_call};
use crate::checkpoint::{self, Begun, Pair};
use crate::codes::{Answer, Code};
use crate::config::{GPUS_MAX, uuid_text};
use crate::driver;
use crate::trace::Record;

fn process_call(name: &str, pid: i32, body: impl FnOnce(&mut Record) -> Answer) -> u32 {
    open_call(name, About::Process(pid), |record| {
        record.raw("target", pid);
        body(record)
    })
}

/// Fields that are reserved must be zero.
fn zero(reserved_is_zero: bool) -> Answer {
    if reserved_is_zero {
        Ok(())
    } else {
        Err(Code::INVALID_VALUE)
    }
}

/// The thread of a process that carries out what is asked of it.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuCheckpointProcessGetRestoreThreadId(pid: i32, tid: Out<i32>) -> u32 {
    process_call("cuCheckpointProcessGetRestoreThreadId", pid, |_| {
        let tid = tid.require()?;
        tid.set(checkpoint::restore_thread(pid)?);
        Ok(())
    })
}

/// The state of a process.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuCheckpointProcessGetState(pid: i32, state: Out<u32>) -> u32 {
    process_call("cuCheckpointProcessGetState", pid, |record| {
        let state = state.require()?;
        let found = checkpoint::state(pid)? as u32;
        record.raw("state", found);
        state.set(found);
        Ok(())
    })
}

/// RUNNING → LOCKED.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuCheckpointProcessLock(pid: i32, args: In<CUcheckpointLockArgs>) -> u32 {
    process_call("cuCheckpointProcessLock", pid, |record| {
        let args = args.get();
        let timeout_ms = args.map_or(0, |a| a.timeoutMs);
        record.raw("timeout_ms", timeout_ms);
        zero(args.is_none_or(|a| a.reserved0 == 0 && a.reserved1 == [0; 7]))?;
        checkpoint::lock(pid, timeout_ms)
    })
}

/// LOCKED → CHECKPOINTED with the contents in host memory, or CHECKPOINTING with them mapped here.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuCheckpointProcessCheckpoint(
    pid: i32,
    args: In<CUcheckpointCheckpointArgs>,
) -> u32 {
    process_call("cuCheckpointProcessCheckpoint", pid, |record| {
        let args = args.get();
        zero(args.is_none_or(|a| a.reserved == [0; 56]))?;
        match args
            .map(|a| a.customStorageInfo_out)
            .filter(|p| !p.is_null())
        {
            None => checkpoint::checkpoint_to_host(pid),
            Some(info) => give(
                checkpoint::checkpoint_to_custom_storage(pid)?,
                out_of(info),
                record,
            ),
        }
    })
}

/// CHECKPOINTED → LOCKED with the contents from host memory, or RESTORING with the memory mapped here.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuCheckpointProcessRestore(
    pid: i32,
    args: In<CUcheckpointRestoreArgs>,
) -> u32 {
    process_call("cuCheckpointProcessRestore", pid, |record| {
        let args = args.get();
        zero(args.is_none_or(|a| a.padding0 == 0 && a.reserved == [0; 40]))?;
        let pairs = match args {
            Some(a) if a.gpuPairsCount > 0 || !a.gpuPairs.is_null() => {
                Some(pairs(a.gpuPairs, a.gpuPairsCount)?)
            }
            _ => None,
        };
        match args
            .map(|a| a.customStorageInfo_out)
            .filter(|p| !p.is_null())
        {
            None => checkpoint::restore_from_host(pid, pairs.as_deref()),
            Some(info) => give(
                checkpoint::restore_from_custom_storage(pid, pairs.as_deref())?,
                out_of(info),
                record,
            ),
        }
    })
}

fn pairs(pointer: *const CUcheckpointGpuPair, count: u32) -> Answer<Vec<Pair>> {
    let count = count as usize;
    if count == 0 || count > GPUS_MAX {
        return Err(Code::INVALID_VALUE);
    }
    let bytes = |uuid: CUuuid| uuid.bytes.map(|b| b.to_ne_bytes()[0]);
    let pairs = list(pointer, count)?;
    Ok(pairs
        .into_iter()
        .map(|p| Pair {
            old: bytes(p.oldUuid),
            new: bytes(p.newUuid),
        })
        .collect())
}

fn give(
    begun: Begun,
    info: Out<*mut CUcheckpointCustomStorageInfo>,
    record: &mut Record,
) -> Answer {
    if record.is_on() {
        let mut extents = String::new();
        for extent in &begun.extents {
            let comma = if extents.is_empty() { "" } else { "," };
            let (uuid, stream, len, address) = (
                uuid_text(extent.uuid),
                extent.stream,
                extent.len,
                extent.address,
            );
            let _ = write!(
                extents,
                "{comma}{{\"device\":\"{uuid}\",\"stream\":{stream},\"bytes\":{len},\"ptr\":{address}}}"
            );
        }
        record.raw("extents", format_args!("[{extents}]"));
    }
    info.put(begun.info)
}

/// CHECKPOINTING → CHECKPOINTED, or RESTORING → LOCKED.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuCheckpointOperationComplete(handle: CUcheckpointOperationHandle) -> u32 {
    let handle = handle.addr() as u64;
    open_call(
        "cuCheckpointOperationComplete",
        About::Operation(handle),
        |record| {
            if let Some(pid) = driver::get()
                .ok()
                .and_then(|d| d.operation_pid(Some(handle)))
            {
                record.raw("target", pid);
            }
            checkpoint::complete(handle)
        },
    )
}

/// LOCKED → RUNNING.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuCheckpointProcessUnlock(
    pid: i32,
    args: In<CUcheckpointUnlockArgs>,
) -> u32 {
    process_call("cuCheckpointProcessUnlock", pid, |_| {
        zero(args.get().is_none_or(|a| a.reserved == [0; 8]))?;
        checkpoint::unlock(pid)
    })
}
