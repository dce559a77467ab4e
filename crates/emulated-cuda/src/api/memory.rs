//! Device memory, page-locked host memory, and what an address points to.

use std::ffi::c_void;

use cudarc::driver::sys::{CUcontext, CUdeviceptr};

use super::abi::{In, Out};
use super::call;
use super::context::{current, from_handle};
use crate::codes::{Answer, Code};
use crate::driver::{Driver, Pointee};

/// Free and total bytes of the current context's GPU.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) -> u32 {
    call("cuMemGetInfo_v2", |driver, _| {
        let (free_bytes, total_bytes) = driver.memory(current(driver)?);
        free.require()?;
        total.put(usize::try_from(total_bytes).unwrap_or(usize::MAX))?;
        free.put(usize::try_from(free_bytes).unwrap_or(usize::MAX))
    })
}

/// Allocates device memory.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemAlloc_v2(address: Out<CUdeviceptr>, len: usize) -> u32 {
    call("cuMemAlloc_v2", |driver, record| {
        record.raw("bytes", len);
        let address = address.require()?;
        address.set(driver.alloc(current(driver)?, len as u64)?);
        Ok(())
    })
}

/// Frees device memory, after the work that may use it; 0 is nothing.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemFree_v2(address: CUdeviceptr) -> u32 {
    call("cuMemFree_v2", |driver, _| {
        if address == 0 {
            Ok(())
        } else {
            driver.free(address)
        }
    })
}

/// Start and length of the allocation that an address lies in.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemGetAddressRange_v2(
    base: Out<CUdeviceptr>,
    len: Out<usize>,
    address: CUdeviceptr,
) -> u32 {
    call("cuMemGetAddressRange_v2", |driver, _| {
        current(driver)?;
        let (start, bytes) = range(
            driver
                .pointee(address)
                .map_err(|_unknown| Code::NOT_FOUND)?,
        );
        base.set(start);
        len.set(bytes);
        Ok(())
    })
}

fn range(pointee: Pointee) -> (u64, usize) {
    match pointee {
        Pointee::Allocation {
            base, allocation, ..
        } => (base, usize::try_from(allocation.len).unwrap_or(usize::MAX)),
        Pointee::Extent { base, len } => (base, usize::try_from(len).unwrap_or(usize::MAX)),
        Pointee::Host { base, len } => (base as u64, len),
    }
}

/// All flags of `cuMemHostAlloc` and `cuMemHostRegister`.
const HOST_FLAGS: u32 = 0xf;

fn allocate_host(driver: &Driver, pointer: Out<*mut c_void>, len: usize, flags: u32) -> Answer {
    let pointer = pointer.require()?;
    current(driver)?;
    if len == 0 || flags & !HOST_FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: a new private mapping at an address of the kernel's choice overlaps nothing.
    let start = unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(
            std::ptr::null_mut(),
            len,
            protection,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(Code::OUT_OF_MEMORY);
    }
    driver.add_host(start.expose_provenance(), len, flags, true)?;
    pointer.set(start);
    Ok(())
}

/// Allocates page-locked host memory.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemAllocHost_v2(pointer: Out<*mut c_void>, len: usize) -> u32 {
    call("cuMemAllocHost_v2", |driver, record| {
        record.raw("bytes", len);
        allocate_host(driver, pointer, len, 0)
    })
}

/// Allocates page-locked host memory; the flags make no difference here.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemHostAlloc(pointer: Out<*mut c_void>, len: usize, flags: u32) -> u32 {
    call("cuMemHostAlloc", |driver, record| {
        record.raw("bytes", len);
        allocate_host(driver, pointer, len, flags)
    })
}

/// Frees page-locked host memory, after the work that may use it.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemFreeHost(pointer: *mut c_void) -> u32 {
    call("cuMemFreeHost", |driver, _| {
        driver.drain(None);
        let len = driver
            .remove_host(pointer.addr(), true)
            .ok_or(Code::INVALID_VALUE)?;
        // SAFETY: the range is one that `allocate_host` mapped and nobody has unmapped since: it was still in the table.
        unsafe { libc::munmap(pointer, len) };
        Ok(())
    })
}

fn register(driver: &Driver, pointer: *mut c_void, len: usize, flags: u32) -> Answer {
    current(driver)?;
    if pointer.is_null() || flags & !HOST_FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    driver.add_host(pointer.expose_provenance(), len, flags, false)
}

/// Page-locks host memory of the program.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemHostRegister_v2(pointer: *mut c_void, len: usize, flags: u32) -> u32 {
    call("cuMemHostRegister_v2", |driver, record| {
        record.raw("bytes", len);
        register(driver, pointer, len, flags)
    })
}

/// The first version takes the same arguments.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemHostRegister(pointer: *mut c_void, len: usize, flags: u32) -> u32 {
    call("cuMemHostRegister", |driver, record| {
        record.raw("bytes", len);
        register(driver, pointer, len, flags)
    })
}

/// Ends the page-locking of a registered range, by its start, after the work that may use it.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemHostUnregister(pointer: *mut c_void) -> u32 {
    call("cuMemHostUnregister", |driver, _| {
        driver.drain(None);
        match driver.remove_host(pointer.addr(), false) {
            Some(_len) => Ok(()),
            None if driver.host_flags(pointer.addr()).is_some() => Err(Code::INVALID_VALUE),
            None => Err(Code::HOST_MEMORY_NOT_REGISTERED),
        }
    })
}

/// The flags with which the page-locked memory at an address was made.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemHostGetFlags(flags: Out<u32>, pointer: *mut c_void) -> u32 {
    call("cuMemHostGetFlags", |driver, _| {
        flags.put(
            driver
                .host_flags(pointer.addr())
                .ok_or(Code::INVALID_VALUE)?,
        )
    })
}

/// The device address of page-locked host memory: the same, since addresses are unified.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemHostGetDevicePointer_v2(
    address: Out<CUdeviceptr>,
    pointer: *mut c_void,
    flags: u32,
) -> u32 {
    call("cuMemHostGetDevicePointer_v2", |driver, _| {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        driver
            .host_flags(pointer.addr())
            .ok_or(Code::INVALID_VALUE)?;
        address.put(pointer.addr() as u64)
    })
}

/// `CU_MEMORYTYPE_HOST`, `CU_MEMORYTYPE_DEVICE`.
const TYPE_HOST: u32 = 1;
const TYPE_DEVICE: u32 = 2;
/// `CU_DEVICE_INVALID`.
const DEVICE_INVALID: i32 = -2;

/// Writes one attribute of the address.
///
/// A mapped extent has no context and no device ordinal, as was seen on hardware: its stream tells the GPU.
fn put_attribute(driver: &Driver, value: Out<c_void>, attribute: u32, address: u64) -> Answer {
    let pointee = driver.pointee(address)?;
    let ordinal = match pointee {
        Pointee::Allocation { ordinal, .. } => Some(ordinal),
        Pointee::Host { .. } => current(driver).ok(),
        Pointee::Extent { .. } => None,
    };
    let is_host = matches!(pointee, Pointee::Host { .. });
    let (start, len) = range(pointee);
    match attribute {
        1 => {
            let context: CUcontext =
                from_handle(ordinal.and_then(|o| driver.context_of(o)).unwrap_or(0));
            value.typed().put(context)
        }
        2 => value
            .typed()
            .put(if is_host { TYPE_HOST } else { TYPE_DEVICE }),
        3 => value.typed().put(address),
        4 if is_host => value.typed().put(address),
        7 => value.typed().put(start),
        8 => value.typed().put(0_u32),
        9 => value.typed().put(ordinal.map_or(DEVICE_INVALID, |o| {
            i32::try_from(o).unwrap_or(DEVICE_INVALID)
        })),
        11 => value.typed().put(start),
        12 => value.typed().put(len),
        13 => value.typed().put(1_u8),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// One attribute of an address.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuPointerGetAttribute(
    value: Out<c_void>,
    attribute: u32,
    address: CUdeviceptr,
) -> u32 {
    call("cuPointerGetAttribute", |driver, _| {
        put_attribute(driver, value.require()?, attribute, address)
    })
}

/// Several attributes of an address; those that it does not have are left alone.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuPointerGetAttributes(
    count: u32,
    attributes: In<u32>,
    values: In<Out<c_void>>,
    address: CUdeviceptr,
) -> u32 {
    call("cuPointerGetAttributes", |driver, _| {
        let attributes = attributes.list(count as usize)?;
        let values = values.list(count as usize)?;
        for (attribute, value) in attributes.into_iter().zip(values) {
            // The documented answer for an address that the driver does not know is success.
            let _ = put_attribute(driver, value.require()?, attribute, address);
        }
        Ok(())
    })
}
