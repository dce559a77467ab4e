//! The raw layer: libcuda's entry points as function pointers, and nothing else.
//!
//! In: the library that cudarc loads. Out: an [`Api`] of plain C functions that answer an integer code; cudarc's own wrappers are not used, because they read
//! the code as a Rust enum (undefined behaviour for a code that it does not know) and panic where a symbol is missing.
//! Every entry point comes from `cuGetProcAddress_v2`, never from the dynamic linker: there a bare name is the oldest ABI of the call
//! (seen on hardware: such copies answer INVALID_CONTEXT). What can fail: no library, or a library without an entry point.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::{align_of, offset_of, size_of};

use cudarc::driver::sys::{
    self, CUcheckpointCheckpointArgs, CUcheckpointCustomStorageInfo,
    CUcheckpointCustomStoragePerDeviceData, CUcheckpointGpuPair, CUcheckpointLockArgs,
    CUcheckpointOperationHandle, CUcheckpointRestoreArgs, CUcheckpointUnlockArgs, CUcontext,
    CUdevice, CUdeviceptr, CUevent, CUprocessState, CUstream, CUuuid,
};

use super::DriverError;

/// The code that a driver call answers, known to us or not.
pub(super) type RawResult = c_uint;

/// CUDA version at which the core entry points are asked for: 12.0 is the oldest whose `cuGetProcAddress_v2` exists.
const CORE_VERSION: c_int = 12_000;
/// CUDA version that brought the checkpoint functions without custom storage (12.8).
const PROCESS_VERSION: c_int = 12_080;
/// CUDA version that brought custom storage (13.4).
pub(super) const CUSTOM_STORAGE_VERSION: c_int = 13_040;

// Sizes and offsets of CUDA 13.5's cuda.h, section "Checkpoint"; a type that drifts must not compile.
const _: () = {
    assert!(size_of::<CUcheckpointLockArgs>() == 64);
    assert!(offset_of!(CUcheckpointLockArgs, timeoutMs) == 0);
    assert!(offset_of!(CUcheckpointLockArgs, reserved0) == 4);
    assert!(offset_of!(CUcheckpointLockArgs, reserved1) == 8);
    assert!(size_of::<CUcheckpointCheckpointArgs>() == 64);
    assert!(offset_of!(CUcheckpointCheckpointArgs, customStorageInfo_out) == 0);
    assert!(offset_of!(CUcheckpointCheckpointArgs, reserved) == 8);
    assert!(size_of::<CUcheckpointGpuPair>() == 32);
    assert!(offset_of!(CUcheckpointGpuPair, oldUuid) == 0);
    assert!(offset_of!(CUcheckpointGpuPair, newUuid) == 16);
    assert!(size_of::<CUcheckpointRestoreArgs>() == 64);
    assert!(offset_of!(CUcheckpointRestoreArgs, gpuPairs) == 0);
    assert!(offset_of!(CUcheckpointRestoreArgs, gpuPairsCount) == 8);
    assert!(offset_of!(CUcheckpointRestoreArgs, padding0) == 12);
    assert!(offset_of!(CUcheckpointRestoreArgs, customStorageInfo_out) == 16);
    assert!(offset_of!(CUcheckpointRestoreArgs, reserved) == 24);
    assert!(size_of::<CUcheckpointUnlockArgs>() == 64);
    assert!(offset_of!(CUcheckpointUnlockArgs, reserved) == 0);
    assert!(size_of::<CUcheckpointCustomStorageInfo>() == 24);
    assert!(align_of::<CUcheckpointCustomStorageInfo>() == 8);
    assert!(offset_of!(CUcheckpointCustomStorageInfo, handle) == 0);
    assert!(offset_of!(CUcheckpointCustomStorageInfo, perDeviceData) == 8);
    assert!(offset_of!(CUcheckpointCustomStorageInfo, deviceCount) == 16);
    assert!(size_of::<CUcheckpointCustomStoragePerDeviceData>() == 24);
    assert!(offset_of!(CUcheckpointCustomStoragePerDeviceData, devPtr) == 0);
    assert!(offset_of!(CUcheckpointCustomStoragePerDeviceData, size) == 8);
    assert!(offset_of!(CUcheckpointCustomStoragePerDeviceData, stream) == 16);
    assert!(size_of::<CUprocessState>() == size_of::<c_uint>());
    assert!(size_of::<CUuuid>() == 16);
    assert!(size_of::<CUdeviceptr>() == 8);
};

pub(super) type GetProcAddress =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_uint) -> RawResult;

macro_rules! api {
    (
        core { $( $core:ident : $core_name:literal = fn($($core_arg:ty),*); )* }
        process { $( $process:ident : $process_name:literal = fn($($process_arg:ty),*); )* }
        custom_storage { $( $custom:ident : $custom_name:literal = fn($($custom_arg:ty),*); )* }
    ) => {
        /// Entry points of one loaded libcuda. The checkpoint functions are absent on drivers that lack them.
        #[derive(Clone, Copy)]
        pub(super) struct Api {
            $( pub(super) $core: unsafe extern "C" fn($($core_arg),*) -> RawResult, )*
            $( pub(super) $process: Option<unsafe extern "C" fn($($process_arg),*) -> RawResult>, )*
            $( pub(super) $custom: Option<unsafe extern "C" fn($($custom_arg),*) -> RawResult>, )*
        }

        impl Api {
            /// Every entry point that `get` knows.
            pub(super) fn resolve(get: GetProcAddress) -> Result<Self, DriverError> {
                Ok(Self {
                    $( $core: {
                        let found = lookup(get, $core_name, &[CORE_VERSION]).ok_or(DriverError::LibraryTooOld { missing: name($core_name) })?;
                        // SAFETY: the driver gave this address for this name at version 12.0, whose prototype in cuda.h is the one declared here.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($core_arg),*) -> RawResult>(found) }
                    }, )*
                    $( $process: lookup(get, $process_name, &[CUSTOM_STORAGE_VERSION, PROCESS_VERSION]).map(|found| {
                        // SAFETY: the prototype has been the same since 12.8; the argument structs have kept their 64 bytes.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($process_arg),*) -> RawResult>(found) }
                    }), )*
                    $( $custom: lookup(get, $custom_name, &[CUSTOM_STORAGE_VERSION]).map(|found| {
                        // SAFETY: the driver gave this address for this name at version 13.4, whose prototype in cuda.h is the one declared here.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($custom_arg),*) -> RawResult>(found) }
                    }), )*
                })
            }
        }
    };
}

api! {
    core {
        init: c"cuInit" = fn(c_uint);
        driver_get_version: c"cuDriverGetVersion" = fn(*mut c_int);
        get_error_name: c"cuGetErrorName" = fn(c_uint, *mut *const c_char);
        device_get_count: c"cuDeviceGetCount" = fn(*mut c_int);
        device_get: c"cuDeviceGet" = fn(*mut CUdevice, c_int);
        device_get_name: c"cuDeviceGetName" = fn(*mut c_char, c_int, CUdevice);
        device_get_uuid: c"cuDeviceGetUuid" = fn(*mut CUuuid, CUdevice);
        device_get_attribute: c"cuDeviceGetAttribute" = fn(*mut c_int, c_uint, CUdevice);
        device_total_mem: c"cuDeviceTotalMem" = fn(*mut usize, CUdevice);
        device_get_pci_bus_id: c"cuDeviceGetPCIBusId" = fn(*mut c_char, c_int, CUdevice);
        primary_ctx_retain: c"cuDevicePrimaryCtxRetain" = fn(*mut CUcontext, CUdevice);
        ctx_set_current: c"cuCtxSetCurrent" = fn(CUcontext);
        mem_get_info: c"cuMemGetInfo" = fn(*mut usize, *mut usize);
        mem_alloc: c"cuMemAlloc" = fn(*mut CUdeviceptr, usize);
        mem_free: c"cuMemFree" = fn(CUdeviceptr);
        mem_host_register: c"cuMemHostRegister" = fn(*mut c_void, usize, c_uint);
        mem_host_unregister: c"cuMemHostUnregister" = fn(*mut c_void);
        memcpy_dtoh_async: c"cuMemcpyDtoHAsync" = fn(*mut c_void, CUdeviceptr, usize, CUstream);
        memcpy_htod_async: c"cuMemcpyHtoDAsync" = fn(CUdeviceptr, *const c_void, usize, CUstream);
        stream_create: c"cuStreamCreate" = fn(*mut CUstream, c_uint);
        stream_destroy: c"cuStreamDestroy" = fn(CUstream);
        stream_synchronize: c"cuStreamSynchronize" = fn(CUstream);
        stream_wait_event: c"cuStreamWaitEvent" = fn(CUstream, CUevent, c_uint);
        stream_get_ctx: c"cuStreamGetCtx" = fn(CUstream, *mut CUcontext);
        event_create: c"cuEventCreate" = fn(*mut CUevent, c_uint);
        event_record: c"cuEventRecord" = fn(CUevent, CUstream);
        event_query: c"cuEventQuery" = fn(CUevent);
        event_synchronize: c"cuEventSynchronize" = fn(CUevent);
        event_destroy: c"cuEventDestroy" = fn(CUevent);
    }
    process {
        process_get_state: c"cuCheckpointProcessGetState" = fn(c_int, *mut c_uint);
        process_lock: c"cuCheckpointProcessLock" = fn(c_int, *mut CUcheckpointLockArgs);
        process_checkpoint: c"cuCheckpointProcessCheckpoint" = fn(c_int, *mut CUcheckpointCheckpointArgs);
        process_restore: c"cuCheckpointProcessRestore" = fn(c_int, *mut CUcheckpointRestoreArgs);
        process_unlock: c"cuCheckpointProcessUnlock" = fn(c_int, *mut CUcheckpointUnlockArgs);
    }
    custom_storage {
        operation_complete: c"cuCheckpointOperationComplete" = fn(CUcheckpointOperationHandle);
    }
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api")
            .field("process", &self.process_lock.is_some())
            .field("custom_storage", &self.operation_complete.is_some())
            .finish_non_exhaustive()
    }
}

impl Api {
    /// Loads libcuda and resolves every entry point.
    ///
    /// # Errors
    /// [`DriverError::NoLibrary`] when the loader finds no libcuda, [`DriverError::LibraryTooOld`] when a core entry point is missing.
    pub(super) fn load() -> Result<Self, DriverError> {
        // SAFETY: loading libcuda runs its constructors; that is what a CUDA program does at its start.
        if !unsafe { sys::is_culib_present() } {
            return Err(DriverError::NoLibrary);
        }
        // SAFETY: it is present, so this does not panic; the library stays loaded for the life of the process.
        let library = unsafe { sys::culib() };
        // SAFETY: the symbol's prototype in cuda.h (12.0 and later) is `GetProcAddress`.
        let get = unsafe { library.get::<GetProcAddress>(b"cuGetProcAddress_v2\0") };
        match get {
            Ok(get) => Self::resolve(*get),
            Err(_absent) => Err(DriverError::LibraryTooOld {
                missing: "cuGetProcAddress_v2",
            }),
        }
    }
}

/// The address of `symbol` at the first of `versions` that the driver knows.
fn lookup(get: GetProcAddress, symbol: &CStr, versions: &[c_int]) -> Option<*mut c_void> {
    versions.iter().find_map(|&version| {
        let mut address: *mut c_void = std::ptr::null_mut();
        let mut status: c_uint = 0;
        // SAFETY: `symbol` is a C string, both out pointers are valid for the call, flags 0 is the default search.
        let code = unsafe {
            get(
                symbol.as_ptr(),
                &raw mut address,
                version,
                0,
                &raw mut status,
            )
        };
        (code == 0 && !address.is_null()).then_some(address)
    })
}

fn name(symbol: &'static CStr) -> &'static str {
    symbol.to_str().unwrap_or("a driver entry point")
}
