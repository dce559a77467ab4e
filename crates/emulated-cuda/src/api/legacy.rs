//! The first versions of functions that have a `_v2`, as a bare `dlsym` finds them.
//!
//! The memory functions of CUDA before 3.2 work on contexts of that time only, with 32-bit addresses; in a context of today they answer
//! `INVALID_CONTEXT`. The others have the same meaning as their second version.

use cudarc::driver::sys::{CUcontext, CUdevice, CUevent, CUstream};

use super::abi::Out;
use super::call;
use crate::codes::Code;

/// Defines legacy functions that refuse every context of today; none of them looks at an argument.
macro_rules! refused {
    ($($name:ident)*) => {
        $(
            /// Answers `INVALID_CONTEXT`.
            #[unsafe(no_mangle)]
            pub(super) extern "C" fn $name() -> u32 {
                call(stringify!($name), |_, _| Err(Code::INVALID_CONTEXT))
            }
        )*
    };
}

refused! {
    cuMemGetInfo cuMemAlloc cuMemFree cuMemGetAddressRange cuMemAllocHost cuMemHostGetDevicePointer
    cuMemcpyHtoD cuMemcpyDtoH cuMemcpyDtoD cuMemcpyHtoDAsync cuMemcpyDtoHAsync cuMemcpyDtoDAsync
    cuMemsetD8 cuMemsetD32
}

/// Total memory in bytes, as 32 bits hold it.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDeviceTotalMem(bytes: Out<u32>, device: CUdevice) -> u32 {
    call("cuDeviceTotalMem", |driver, _| {
        let memory = driver.config.gpus[driver.ordinal(device)?].memory;
        bytes.put(u32::try_from(memory).unwrap_or(u32::MAX))
    })
}

/// As `cuDevicePrimaryCtxRelease_v2`.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDevicePrimaryCtxRelease(device: CUdevice) -> u32 {
    call("cuDevicePrimaryCtxRelease", |driver, _| {
        driver.release_context(driver.ordinal(device)?)
    })
}

/// As `cuDevicePrimaryCtxReset_v2`.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDevicePrimaryCtxReset(device: CUdevice) -> u32 {
    call("cuDevicePrimaryCtxReset", |driver, _| {
        driver.reset_context(driver.ordinal(device)?)
    })
}

/// As `cuDevicePrimaryCtxSetFlags_v2`.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDevicePrimaryCtxSetFlags(device: CUdevice, flags: u32) -> u32 {
    call("cuDevicePrimaryCtxSetFlags", |driver, _| {
        driver.set_context_flags(driver.ordinal(device)?, flags);
        Ok(())
    })
}

/// As `cuCtxPushCurrent_v2`.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuCtxPushCurrent(context: CUcontext) -> u32 {
    call("cuCtxPushCurrent", |driver, _| {
        super::context::push(driver, context)
    })
}

/// As `cuCtxPopCurrent_v2`.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuCtxPopCurrent(context: Out<CUcontext>) -> u32 {
    call("cuCtxPopCurrent", |_, _| super::context::pop(context))
}

/// As `cuStreamDestroy_v2`.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuStreamDestroy(stream: CUstream) -> u32 {
    call("cuStreamDestroy", |driver, _| {
        driver.destroy_stream(stream.addr() as u64)
    })
}

/// As `cuEventDestroy_v2`.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuEventDestroy(event: CUevent) -> u32 {
    call("cuEventDestroy", |driver, _| {
        driver.destroy_event(event.addr() as u64)
    })
}
