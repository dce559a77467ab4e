//! Initialization, version, error texts, devices.

use std::ffi::c_char;

use cudarc::driver::sys::{CUdevice, CUuuid};

use super::abi::{Out, Text};
use super::{About, call, open_call};
use crate::codes::{Answer, Code};
use crate::config;
use crate::driver::{self, Driver};

/// Initializes the driver for this process.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuInit(flags: u32) -> u32 {
    open_call("cuInit", About::Nobody, |_| {
        if flags == 0 {
            driver::init()
        } else {
            Err(Code::INVALID_VALUE)
        }
    })
}

/// The API version: 1000 × major + 10 × minor.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDriverGetVersion(version: Out<i32>) -> u32 {
    open_call("cuDriverGetVersion", About::Nobody, |_| {
        let config = config::get().map_err(|_told_by_init| Code::INVALID_VALUE)?;
        version.put(i32::try_from(config.api).map_err(|_too_large| Code::INVALID_VALUE)?)
    })
}

/// The enumerator's name of a result code.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuGetErrorName(error: u32, text: Out<*const c_char>) -> u32 {
    open_call("cuGetErrorName", About::Nobody, |_| {
        describe(error, text, |(name, _)| name.as_ptr())
    })
}

/// A short text for a result code.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuGetErrorString(error: u32, text: Out<*const c_char>) -> u32 {
    open_call("cuGetErrorString", About::Nobody, |_| {
        describe(error, text, |(_, text)| text.as_ptr())
    })
}

type Description = (&'static std::ffi::CStr, &'static std::ffi::CStr);

fn describe(
    error: u32,
    out: Out<*const c_char>,
    part: impl Fn(Description) -> *const c_char,
) -> Answer {
    let known = Code(error).describe();
    out.put(known.map_or(std::ptr::null(), part))?;
    if known.is_some() {
        Ok(())
    } else {
        Err(Code::INVALID_VALUE)
    }
}

/// Number of devices.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDeviceGetCount(count: Out<i32>) -> u32 {
    call("cuDeviceGetCount", |driver, _| {
        count.put(i32::try_from(driver.config.gpus.len()).unwrap_or(0))
    })
}

/// The device with this ordinal.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDeviceGet(device: Out<CUdevice>, ordinal: i32) -> u32 {
    call("cuDeviceGet", |driver, _| {
        driver.ordinal(ordinal)?;
        device.put(ordinal)
    })
}

/// The device's name.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDeviceGetName(name: Out<c_char>, len: i32, device: CUdevice) -> u32 {
    call("cuDeviceGetName", |driver, _| {
        name.put_text(&driver.config.gpus[driver.ordinal(device)?].name, len)
    })
}

fn put_uuid(driver: &Driver, uuid: Out<CUuuid>, device: CUdevice) -> Answer {
    let bytes = driver.uuid(driver.ordinal(device)?);
    uuid.put(CUuuid {
        bytes: bytes.map(|b| c_char::from_ne_bytes([b])),
    })
}

/// The device's UUID.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDeviceGetUuid(uuid: Out<CUuuid>, device: CUdevice) -> u32 {
    call("cuDeviceGetUuid", |driver, _| {
        put_uuid(driver, uuid, device)
    })
}

/// The device's UUID; the second version differs only for MIG, which is not emulated.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDeviceGetUuid_v2(uuid: Out<CUuuid>, device: CUdevice) -> u32 {
    call("cuDeviceGetUuid_v2", |driver, _| {
        put_uuid(driver, uuid, device)
    })
}

/// Total memory in bytes.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: CUdevice) -> u32 {
    call("cuDeviceTotalMem_v2", |driver, _| {
        let memory = driver.config.gpus[driver.ordinal(device)?].memory;
        bytes.put(usize::try_from(memory).map_err(|_too_large| Code::INVALID_VALUE)?)
    })
}

/// The first PCI bus number given to an emulated GPU.
const PCI_BUS_FIRST: usize = 0x10;
/// One more than the last `CUdevice_attribute` of the header.
const ATTRIBUTE_MAX: u32 = 160;

/// A number about the device; 0 for those that mean nothing here.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDeviceGetAttribute(
    value: Out<i32>,
    attribute: u32,
    device: CUdevice,
) -> u32 {
    call("cuDeviceGetAttribute", |driver, _| {
        let ordinal = driver.ordinal(device)?;
        if !(1..ATTRIBUTE_MAX).contains(&attribute) {
            return Err(Code::INVALID_VALUE);
        }
        let number = match attribute {
            1 => 1024,                                                 // MAX_THREADS_PER_BLOCK
            2 | 3 => 1024,                                             // MAX_BLOCK_DIM_X, Y
            4 => 64,                                                   // MAX_BLOCK_DIM_Z
            5 => i32::MAX,                                             // MAX_GRID_DIM_X
            6 | 7 => 65_535,                                           // MAX_GRID_DIM_Y, Z
            10 => 32,                                                  // WARP_SIZE
            16 => 1,                                                   // MULTIPROCESSOR_COUNT
            19 | 31 | 41 => 1, // CAN_MAP_HOST_MEMORY, CONCURRENT_KERNELS, UNIFIED_ADDRESSING
            33 => i32::try_from(PCI_BUS_FIRST + ordinal).unwrap_or(0), // PCI_BUS_ID
            40 => 2,           // ASYNC_ENGINE_COUNT
            75 => driver.config.cc.0.cast_signed(), // COMPUTE_CAPABILITY_MAJOR
            76 => driver.config.cc.1.cast_signed(), // COMPUTE_CAPABILITY_MINOR
            _ => 0, // among them MEMORY_POOLS_SUPPORTED (115): there is no cuMemAllocAsync
        };
        value.put(number)
    })
}

fn pci_bus_id(ordinal: usize) -> String {
    format!("0000:{:02X}:00.0", PCI_BUS_FIRST + ordinal)
}

/// The PCI address as text.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDeviceGetPCIBusId(text: Out<c_char>, len: i32, device: CUdevice) -> u32 {
    call("cuDeviceGetPCIBusId", |driver, _| {
        text.put_text(&pci_bus_id(driver.ordinal(device)?), len)
    })
}

/// The device at a PCI address.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuDeviceGetByPCIBusId(device: Out<CUdevice>, text: Text) -> u32 {
    call("cuDeviceGetByPCIBusId", |driver, _| {
        let text = text.get()?;
        let ordinal =
            (0..driver.config.gpus.len()).find(|&o| pci_bus_id(o).eq_ignore_ascii_case(text));
        let ordinal = ordinal.ok_or(Code::INVALID_VALUE)?;
        device.put(i32::try_from(ordinal).unwrap_or(0))
    })
}
