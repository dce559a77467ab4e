//! `cuGetProcAddress`: the function for a name and an API version.
//!
//! Each function is listed with the version that introduced it; a look-up finds the newest one that is not newer than the version asked for.
//! This is the only way to look like an older driver, since a shared library cannot take an exported symbol back.

use std::ffi::c_void;

use super::abi::{Out, Text};
use super::{About, open_call};
use super::{
    checkpoint as cp, context as ctx, device as dev, event as ev, legacy as old, memory as mem,
};
use super::{entry as own, stream as st, transfer as tr};
use crate::codes::{Answer, Code};
use crate::config;
use crate::fault::base_name;

/// An exported function.
struct Entry {
    name: &'static str,
    /// The API version that introduced it.
    since: u32,
    address: *const c_void,
}

// SAFETY: the address is that of a function, which never changes.
unsafe impl Sync for Entry {}

macro_rules! entries {
    ($($since:literal $module:ident: $($name:ident)+;)*) => {
        &[$($(Entry { name: stringify!($name), since: $since, address: $module::$name as *const c_void },)+)*]
    };
}

static ENTRIES: &[Entry] = entries! {
    2000 dev: cuInit cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetAttribute;
    2020 dev: cuDriverGetVersion;
    3020 dev: cuDeviceTotalMem_v2;
    4010 dev: cuDeviceGetPCIBusId cuDeviceGetByPCIBusId;
    6000 dev: cuGetErrorName cuGetErrorString;
    9020 dev: cuDeviceGetUuid;
    11040 dev: cuDeviceGetUuid_v2;
    2000 ctx: cuCtxGetDevice cuCtxSynchronize;
    4000 ctx: cuCtxSetCurrent cuCtxGetCurrent cuCtxPushCurrent_v2 cuCtxPopCurrent_v2;
    7000 ctx: cuDevicePrimaryCtxRetain cuDevicePrimaryCtxGetState;
    11000 ctx: cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset_v2 cuDevicePrimaryCtxSetFlags_v2;
    13000 ctx: cuCtxGetDevice_v2 cuCtxSynchronize_v2;
    2000 mem: cuMemFreeHost;
    2020 mem: cuMemHostAlloc;
    2030 mem: cuMemHostGetFlags;
    3020 mem: cuMemGetInfo_v2 cuMemAlloc_v2 cuMemFree_v2 cuMemGetAddressRange_v2 cuMemAllocHost_v2
        cuMemHostGetDevicePointer_v2;
    4000 mem: cuMemHostRegister cuMemHostUnregister cuPointerGetAttribute;
    6050 mem: cuMemHostRegister_v2;
    7000 mem: cuPointerGetAttributes;
    3020 tr: cuMemcpyDtoH_v2 cuMemcpyDtoHAsync_v2 cuMemcpyHtoD_v2 cuMemcpyHtoDAsync_v2 cuMemcpyDtoD_v2
        cuMemcpyDtoDAsync_v2 cuMemsetD8_v2 cuMemsetD8Async cuMemsetD32_v2 cuMemsetD32Async;
    2000 st: cuStreamCreate cuStreamSynchronize cuStreamQuery;
    3020 st: cuStreamWaitEvent;
    4000 st: cuStreamDestroy_v2;
    5050 st: cuStreamCreateWithPriority cuStreamGetFlags cuStreamGetPriority;
    9020 st: cuStreamGetCtx;
    10000 st: cuStreamIsCapturing cuStreamBeginCapture cuStreamEndCapture cuGraphDestroy cuLaunchHostFunc;
    10010 st: cuStreamBeginCapture_v2;
    12000 st: cuStreamGetId;
    12050 st: cuStreamGetCtx_v2;
    12080 st: cuStreamGetDevice;
    13010 st: cuLaunchHostFunc_v2;
    2000 ev: cuEventCreate cuEventRecord cuEventQuery cuEventSynchronize cuEventElapsedTime;
    4000 ev: cuEventDestroy_v2;
    12080 ev: cuEventElapsedTime_v2;
    2000 old: cuMemGetInfo cuMemAlloc cuMemFree cuMemGetAddressRange cuMemAllocHost cuMemcpyHtoD cuMemcpyDtoH
        cuMemcpyDtoD cuMemcpyHtoDAsync cuMemcpyDtoHAsync cuMemsetD8 cuMemsetD32 cuDeviceTotalMem cuCtxPushCurrent
        cuCtxPopCurrent cuStreamDestroy cuEventDestroy;
    2020 old: cuMemHostGetDevicePointer;
    3000 old: cuMemcpyDtoDAsync;
    7000 old: cuDevicePrimaryCtxRelease cuDevicePrimaryCtxReset cuDevicePrimaryCtxSetFlags;
    11030 own: cuGetProcAddress;
    12000 own: cuGetProcAddress_v2;
    12080 cp: cuCheckpointProcessGetRestoreThreadId cuCheckpointProcessGetState cuCheckpointProcessLock
        cuCheckpointProcessCheckpoint cuCheckpointProcessRestore cuCheckpointProcessUnlock;
    13040 cp: cuCheckpointOperationComplete;
};

/// `CU_GET_PROC_ADDRESS_LEGACY_STREAM`, `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const FLAGS: u64 = 0x3;

/// `CUdriverProcAddressQueryResult`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Status {
    Success = 0,
    SymbolNotFound = 1,
    VersionNotSufficient = 2,
}

/// The newest function of this base name that version `asked` has, as a driver of version `api` finds it.
fn find(symbol: &str, asked: u32, api: u32) -> Result<*const c_void, Status> {
    let known = ENTRIES
        .iter()
        .filter(|e| base_name(e.name) == symbol && e.since <= api);
    let mut status = Status::SymbolNotFound;
    let mut best: Option<&Entry> = None;
    for entry in known {
        status = Status::VersionNotSufficient;
        if entry.since <= asked && best.is_none_or(|b| b.since < entry.since) {
            best = Some(entry);
        }
    }
    best.map(|e| e.address).ok_or(status)
}

/// Checks the arguments and looks up; the codes are those of driver 580.
fn look_up(symbol: &Text, asked: i32, flags: u64) -> Answer<Result<*const c_void, Status>> {
    let config = config::get().map_err(|_told_by_init| Code::INVALID_VALUE)?;
    let symbol = symbol.get()?;
    let asked = u32::try_from(asked).map_err(|_negative| Code::INVALID_VALUE)?;
    if asked > config.api || flags & !FLAGS != 0 || flags == FLAGS {
        return Err(Code::INVALID_VALUE);
    }
    Ok(find(symbol, asked, config.api))
}

/// The look-up of CUDA 11.3: `NOT_FOUND` for what there is not, and the result is left alone then.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuGetProcAddress(
    symbol: Text,
    function: Out<*const c_void>,
    version: i32,
    flags: u64,
) -> u32 {
    open_call("cuGetProcAddress", About::Nobody, |_| {
        let function = function.require()?;
        function.set(look_up(&symbol, version, flags)?.map_err(|_why| Code::NOT_FOUND)?);
        Ok(())
    })
}

/// The look-up of CUDA 12.0: success with a null function and a status for what there is not.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuGetProcAddress_v2(
    symbol: Text,
    function: Out<*const c_void>,
    version: i32,
    flags: u64,
    status: Out<u32>,
) -> u32 {
    open_call("cuGetProcAddress_v2", About::Nobody, |_| {
        let function = function.require()?;
        let found = look_up(&symbol, version, flags)?;
        function.set(found.unwrap_or(std::ptr::null()));
        status.set(found.err().unwrap_or(Status::Success) as u32);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_asked_for_chooses_the_function() {
        assert_eq!(
            find("cuStreamGetCtx", 12_000, 13_050),
            Ok(st::cuStreamGetCtx as *const c_void)
        );
        assert_eq!(
            find("cuStreamGetCtx", 13_040, 13_050),
            Ok(st::cuStreamGetCtx_v2 as *const c_void)
        );
        assert_eq!(
            find("cuMemAlloc", 2000, 13_050),
            Ok(old::cuMemAlloc as *const c_void)
        );
        assert_eq!(
            find("cuMemAlloc", 12_000, 13_050),
            Ok(mem::cuMemAlloc_v2 as *const c_void)
        );
        assert_eq!(
            find("cuStreamGetDevice", 12_000, 13_050),
            Err(Status::VersionNotSufficient)
        );
        assert_eq!(
            find("cuStreamGoAway", 12_000, 13_050),
            Err(Status::SymbolNotFound)
        );
    }

    #[test]
    fn an_older_driver_does_not_know_custom_storage() {
        assert!(find("cuCheckpointOperationComplete", 13_040, 13_040).is_ok());
        assert_eq!(
            find("cuCheckpointOperationComplete", 13_030, 13_030),
            Err(Status::SymbolNotFound)
        );
        assert_eq!(
            find("cuCheckpointProcessLock", 12_070, 12_070),
            Err(Status::SymbolNotFound)
        );
    }
}
