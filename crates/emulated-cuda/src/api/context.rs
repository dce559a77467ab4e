//! Primary contexts, and the stack of current contexts that each thread has.

use std::cell::RefCell;

use cudarc::driver::sys::{CUcontext, CUdevice};

use super::abi::Out;
use super::call;
use crate::codes::{Answer, Code};
use crate::driver::Driver;

thread_local! {
    /// Context handles, the current one last; 0 stands for none.
    static STACK: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// The GPU of the calling thread's current context.
///
/// # Errors
/// `INVALID_CONTEXT` without one, `CONTEXT_IS_DESTROYED` if it is gone.
pub(super) fn current(driver: &Driver) -> Answer<usize> {
    driver.context_ordinal(top())
}

/// The handle of the calling thread's current context; 0 if there is none.
fn top() -> u64 {
    STACK.with_borrow(|s| s.last().copied()).unwrap_or(0)
}

pub(super) fn to_handle(context: CUcontext) -> u64 {
    context.addr() as u64
}

pub(super) fn from_handle(handle: u64) -> CUcontext {
    std::ptr::without_provenance_mut(usize::try_from(handle).unwrap_or(0))
}

/// Retains the primary context, making it with the first call.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDevicePrimaryCtxRetain(
    context: Out<CUcontext>,
    device: CUdevice,
) -> u32 {
    call("cuDevicePrimaryCtxRetain", |driver, _| {
        let context = context.require()?;
        context.set(from_handle(driver.retain_context(driver.ordinal(device)?)));
        Ok(())
    })
}

/// Releases the primary context; with the last release it goes, with everything in it.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> u32 {
    call("cuDevicePrimaryCtxRelease_v2", |driver, _| {
        driver.release_context(driver.ordinal(device)?)
    })
}

/// Destroys the primary context.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDevicePrimaryCtxReset_v2(device: CUdevice) -> u32 {
    call("cuDevicePrimaryCtxReset_v2", |driver, _| {
        driver.reset_context(driver.ordinal(device)?)
    })
}

/// Sets the primary context's flags, on which nothing here depends.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, flags: u32) -> u32 {
    call("cuDevicePrimaryCtxSetFlags_v2", |driver, _| {
        driver.set_context_flags(driver.ordinal(device)?, flags);
        Ok(())
    })
}

/// Whether the primary context exists, and its flags.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDevicePrimaryCtxGetState(
    device: CUdevice,
    flags: Out<u32>,
    active: Out<i32>,
) -> u32 {
    call("cuDevicePrimaryCtxGetState", |driver, _| {
        let (exists, value) = driver.context_state(driver.ordinal(device)?);
        flags.require()?;
        active.put(i32::from(exists))?;
        flags.put(value)
    })
}

/// Makes a context current, in place of the one that is; null leaves none.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuCtxSetCurrent(context: CUcontext) -> u32 {
    call("cuCtxSetCurrent", |driver, _| {
        let handle = to_handle(context);
        if handle != 0 {
            driver.context_gpu(handle)?;
        }
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            if handle != 0 {
                stack.push(handle);
            }
        });
        Ok(())
    })
}

/// The current context; null if there is none.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuCtxGetCurrent(context: Out<CUcontext>) -> u32 {
    call("cuCtxGetCurrent", |_, _| context.put(from_handle(top())))
}

pub(super) fn push(driver: &Driver, context: CUcontext) -> Answer {
    driver.context_gpu(to_handle(context))?;
    STACK.with_borrow_mut(|s| s.push(to_handle(context)));
    Ok(())
}

pub(super) fn pop(context: Out<CUcontext>) -> Answer {
    let top = STACK
        .with_borrow_mut(Vec::pop)
        .ok_or(Code::INVALID_CONTEXT)?;
    context.set(from_handle(top));
    Ok(())
}

/// Makes a context current, above the one that is.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuCtxPushCurrent_v2(context: CUcontext) -> u32 {
    call("cuCtxPushCurrent_v2", |driver, _| push(driver, context))
}

/// Takes the current context off and gives it.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuCtxPopCurrent_v2(context: Out<CUcontext>) -> u32 {
    call("cuCtxPopCurrent_v2", |_, _| pop(context))
}

/// The device of the current context, also of one that is destroyed.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuCtxGetDevice(device: Out<CUdevice>) -> u32 {
    call("cuCtxGetDevice", |driver, _| {
        put_device(driver, device, top())
    })
}

/// The device of a context; null stands for the current one.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuCtxGetDevice_v2(device: Out<CUdevice>, context: CUcontext) -> u32 {
    call("cuCtxGetDevice_v2", |driver, _| {
        put_device(
            driver,
            device,
            if context.is_null() {
                top()
            } else {
                to_handle(context)
            },
        )
    })
}

fn put_device(driver: &Driver, device: Out<CUdevice>, context: u64) -> Answer {
    device.put(i32::try_from(driver.context_gpu(context)?).unwrap_or(0))
}

/// Waits for all work of the current context.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuCtxSynchronize() -> u32 {
    call("cuCtxSynchronize", |driver, _| {
        driver.synchronize_device(current(driver)?)
    })
}

/// Waits for all work of a context; null stands for the current one.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuCtxSynchronize_v2(context: CUcontext) -> u32 {
    call("cuCtxSynchronize_v2", |driver, _| {
        driver.synchronize_device(context_or_current(driver, context)?)
    })
}

fn context_or_current(driver: &Driver, context: CUcontext) -> Answer<usize> {
    if context.is_null() {
        current(driver)
    } else {
        driver.context_ordinal(to_handle(context))
    }
}
