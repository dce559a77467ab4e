//! The CUDA calls of the target, on whatever `libcuda.so.1` the loader finds at run time.
//!
//! In: sizes and host buffers. Out: device memory, one allocation and one primary context per GPU. Fails with the call, what it was asked, and
//! the driver's code and name for it. This file is the only one of the test kit with unsafe code.
#![allow(unsafe_code, reason = "the fence around the CUDA driver's C interface")]

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use libloading::Library;
use thiserror::Error;

use super::job::DeviceMemory;

type CuResult = c_int;
type DevicePtr = u64;
type Context = *mut c_void;

/// `CUcheckpointLockArgs` of the header: 64 bytes.
#[repr(C)]
struct LockArgs {
    timeout_ms: c_uint,
    reserved0: c_uint,
    reserved1: [u64; 7],
}
const _: () = assert!(size_of::<LockArgs>() == 64);

type GetProcAddress =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> CuResult;
type CheckpointLock = unsafe extern "C" fn(c_int, *mut LockArgs) -> CuResult;
type CheckpointCheckpoint = unsafe extern "C" fn(c_int, *mut c_void) -> CuResult;

/// Milliseconds that a process with no work under way may take to lock itself.
const LOCK_TIMEOUT_MS: c_uint = 10_000;
/// The interface version that has every checkpoint function; an older driver is asked at its own version.
const CHECKPOINT_VERSION: c_int = 13_040;

/// A CUDA call that failed, or a driver that cannot be called.
#[derive(Debug, Error)]
pub(crate) enum CudaError {
    #[error("cannot load libcuda.so.1: put a driver on LD_LIBRARY_PATH")]
    NoLibrary(#[source] libloading::Error),
    #[error("libcuda.so.1 has no {0}")]
    NoSymbol(&'static str, #[source] libloading::Error),
    #[error("{call} ({what}) answered {code} {name}")]
    Call {
        call: &'static str,
        what: String,
        code: CuResult,
        name: String,
    },
    #[error("--gpus {wanted} asked for, but the driver has {present}")]
    TooFewGpus { wanted: usize, present: c_int },
}

/// The functions of the driver that the target uses.
struct Api {
    init: unsafe extern "C" fn(c_uint) -> CuResult,
    get_error_name: unsafe extern "C" fn(CuResult, *mut *const c_char) -> CuResult,
    driver_get_version: unsafe extern "C" fn(*mut c_int) -> CuResult,
    get_proc_address: GetProcAddress,
    device_get_count: unsafe extern "C" fn(*mut c_int) -> CuResult,
    device_get: unsafe extern "C" fn(*mut c_int, c_int) -> CuResult,
    primary_ctx_retain: unsafe extern "C" fn(*mut Context, c_int) -> CuResult,
    ctx_set_current: unsafe extern "C" fn(Context) -> CuResult,
    ctx_synchronize: unsafe extern "C" fn() -> CuResult,
    mem_alloc: unsafe extern "C" fn(*mut DevicePtr, usize) -> CuResult,
    memcpy_htod: unsafe extern "C" fn(DevicePtr, *const c_void, usize) -> CuResult,
    memcpy_dtoh: unsafe extern "C" fn(*mut c_void, DevicePtr, usize) -> CuResult,
}

/// One GPU: its primary context, current while it is used, and its one allocation.
struct Gpu {
    context: Context,
    base: DevicePtr,
    len: u64,
}

/// An open driver with memory on each GPU. It is given back when the process ends.
pub(crate) struct Cuda {
    api: Api,
    gpus: Vec<Gpu>,
    current: Cell<Option<usize>>,
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cuda")
            .field("gpu_count", &self.gpus.len())
            .finish_non_exhaustive()
    }
}

impl Api {
    fn load() -> Result<Self, CudaError> {
        // SAFETY: libcuda's constructors have no precondition. The library is never closed (see below), so its destructors run at exit only.
        let library = unsafe { Library::new("libcuda.so.1") }.map_err(CudaError::NoLibrary)?;
        // Function pointers outlive this function, so the library must too.
        let library: &'static Library = Box::leak(Box::new(library));
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the field that takes the pointer has the signature of this function in cuda.h.
                *unsafe { library.get($name) }.map_err(|error| CudaError::NoSymbol($name, error))?
            };
        }
        Ok(Self {
            init: symbol!("cuInit"),
            get_error_name: symbol!("cuGetErrorName"),
            driver_get_version: symbol!("cuDriverGetVersion"),
            get_proc_address: symbol!("cuGetProcAddress_v2"),
            device_get_count: symbol!("cuDeviceGetCount"),
            device_get: symbol!("cuDeviceGet"),
            primary_ctx_retain: symbol!("cuDevicePrimaryCtxRetain"),
            ctx_set_current: symbol!("cuCtxSetCurrent"),
            ctx_synchronize: symbol!("cuCtxSynchronize"),
            mem_alloc: symbol!("cuMemAlloc_v2"),
            memcpy_htod: symbol!("cuMemcpyHtoD_v2"),
            memcpy_dtoh: symbol!("cuMemcpyDtoH_v2"),
        })
    }

    /// An error for every code but success.
    fn check(
        &self,
        call: &'static str,
        code: CuResult,
        what: impl FnOnce() -> String,
    ) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: `name` is a place for one pointer.
        let known = unsafe { (self.get_error_name)(code, &raw mut name) } == 0 && !name.is_null();
        let name = if known {
            // SAFETY: the driver names a code with a string of its own that lives as long as the library.
            unsafe { CStr::from_ptr(name) }
                .to_string_lossy()
                .into_owned()
        } else {
            "(a code without a name)".to_owned()
        };
        Err(CudaError::Call {
            call,
            what: what(),
            code,
            name,
        })
    }

    /// The checkpoint function `name`, from the driver's own table: what the dynamic linker finds may be an older one.
    fn checkpoint_function(&self, name: &'static str) -> Result<*mut c_void, CudaError> {
        let mut version = 0;
        // SAFETY: a place for one int.
        let code = unsafe { (self.driver_get_version)(&raw mut version) };
        self.check("cuDriverGetVersion", code, || "of this driver".to_owned())?;
        let version = version.min(CHECKPOINT_VERSION);
        let symbol = CString::new(name).expect("function names hold no zero byte");
        let mut function = std::ptr::null_mut();
        let mut found = 0;
        // SAFETY: the string ends in a zero byte; both places are live and of the header's types; no flag is set.
        let code = unsafe {
            (self.get_proc_address)(
                symbol.as_ptr(),
                &raw mut function,
                version,
                0,
                &raw mut found,
            )
        };
        self.check("cuGetProcAddress_v2", code, || {
            format!("{name} at version {version}")
        })?;
        if function.is_null() {
            let name = format!("(no such function, query result {found})");
            return Err(CudaError::Call {
                call: "cuGetProcAddress_v2",
                what: symbol.to_string_lossy().into_owned(),
                code,
                name,
            });
        }
        Ok(function)
    }
}

impl Cuda {
    /// Loads and initializes the driver, retains the primary contexts of GPUs 0, 1, ... and allocates on each the bytes that `sizes` says; 0
    /// bytes are no allocation. Equal sizes make equal calls in equal order, so that a fresh process has the addresses of an earlier one.
    ///
    /// # Errors
    /// No driver, too few GPUs, or a call that failed.
    pub(crate) fn open(sizes: &[u64]) -> Result<Self, CudaError> {
        let api = Api::load()?;
        // SAFETY: no flag is set; nothing else of the driver was called yet.
        let code = unsafe { (api.init)(0) };
        api.check("cuInit", code, || "the driver".to_owned())?;
        let mut present = 0;
        // SAFETY: a place for one int.
        let code = unsafe { (api.device_get_count)(&raw mut present) };
        api.check("cuDeviceGetCount", code, || "of this process".to_owned())?;
        let mut cuda = Self {
            api,
            gpus: Vec::with_capacity(sizes.len()),
            current: Cell::new(None),
        };
        for (ordinal, &len) in (0..present).zip(sizes) {
            let gpu = cuda.open_gpu(ordinal, len)?;
            cuda.gpus.push(gpu);
        }
        if cuda.gpus.len() < sizes.len() {
            return Err(CudaError::TooFewGpus {
                wanted: sizes.len(),
                present,
            });
        }
        Ok(cuda)
    }

    fn open_gpu(&self, ordinal: c_int, len: u64) -> Result<Gpu, CudaError> {
        let Api {
            device_get,
            primary_ctx_retain,
            ctx_set_current,
            mem_alloc,
            ..
        } = &self.api;
        let mut device = 0;
        // SAFETY: a place for one device handle.
        let code = unsafe { device_get(&raw mut device, ordinal) };
        self.api
            .check("cuDeviceGet", code, || format!("GPU {ordinal}"))?;
        let mut context = std::ptr::null_mut();
        // SAFETY: a place for one context handle; the device comes from the driver.
        let code = unsafe { primary_ctx_retain(&raw mut context, device) };
        self.api.check("cuDevicePrimaryCtxRetain", code, || {
            format!("GPU {ordinal}")
        })?;
        // SAFETY: the context was retained just now and is never released.
        let code = unsafe { ctx_set_current(context) };
        self.api
            .check("cuCtxSetCurrent", code, || format!("GPU {ordinal}"))?;
        let mut base = 0;
        if len > 0 {
            let bytes = usize::try_from(len).unwrap_or(usize::MAX);
            // SAFETY: a place for one device address.
            let code = unsafe { mem_alloc(&raw mut base, bytes) };
            self.api.check("cuMemAlloc_v2", code, || {
                format!("{len} bytes on GPU {ordinal}")
            })?;
        }
        Ok(Gpu { context, base, len })
    }

    /// Suspends this very process as a checkpoint would: its GPU memory goes to the host, its GPUs are free, and its next CUDA call waits
    /// until another process has restored and unlocked it.
    ///
    /// # Errors
    /// A driver without checkpoint functions, or a call that failed.
    pub(crate) fn suspend_this_process(&self) -> Result<(), CudaError> {
        let lock = self.api.checkpoint_function("cuCheckpointProcessLock")?;
        let checkpoint = self
            .api
            .checkpoint_function("cuCheckpointProcessCheckpoint")?;
        // SAFETY: the driver returned this address for this function, whose signature in cuda.h this is.
        let lock: CheckpointLock =
            unsafe { std::mem::transmute::<*mut c_void, CheckpointLock>(lock) };
        // SAFETY: as above.
        let checkpoint: CheckpointCheckpoint =
            unsafe { std::mem::transmute::<*mut c_void, CheckpointCheckpoint>(checkpoint) };
        let pid = c_int::try_from(std::process::id()).expect("a pid is a positive int");
        let mut args = LockArgs {
            timeout_ms: LOCK_TIMEOUT_MS,
            reserved0: 0,
            reserved1: [0; 7],
        };
        // SAFETY: `args` has the layout of the header, reserved fields zero.
        let code = unsafe { lock(pid, &raw mut args) };
        self.api.check("cuCheckpointProcessLock", code, || {
            format!("this process, {pid}")
        })?;
        // SAFETY: null means no arguments, that is, no custom storage.
        let code = unsafe { checkpoint(pid, std::ptr::null_mut()) };
        self.api.check("cuCheckpointProcessCheckpoint", code, || {
            format!("this process, {pid}")
        })
    }

    /// The address of `len` bytes at `offset` of a GPU's memory, with its context made current.
    ///
    /// # Panics
    /// The range does not lie in that memory.
    fn address(&self, gpu_index: usize, offset: u64, len: usize) -> Result<DevicePtr, CudaError> {
        let gpu = &self.gpus[gpu_index];
        let end = offset.checked_add(len as u64);
        assert!(
            end.is_some_and(|end| end <= gpu.len),
            "{len} bytes at {offset} of {}",
            gpu.len
        );
        self.make_current(gpu_index)?;
        Ok(gpu.base + offset)
    }

    fn make_current(&self, gpu_index: usize) -> Result<(), CudaError> {
        if self.current.get() == Some(gpu_index) {
            return Ok(());
        }
        // SAFETY: the context was retained in `open` and is never released.
        let code = unsafe { (self.api.ctx_set_current)(self.gpus[gpu_index].context) };
        self.api
            .check("cuCtxSetCurrent", code, || format!("GPU {gpu_index}"))?;
        self.current.set(Some(gpu_index));
        Ok(())
    }
}

impl DeviceMemory for Cuda {
    fn write(&self, gpu_index: usize, offset: u64, bytes: &[u8]) -> Result<(), CudaError> {
        let to = self.address(gpu_index, offset, bytes.len())?;
        // SAFETY: `address` has proved the device range; the slice is live and of this length; the call is synchronous.
        let code = unsafe { (self.api.memcpy_htod)(to, bytes.as_ptr().cast(), bytes.len()) };
        self.api.check("cuMemcpyHtoD_v2", code, || {
            place(gpu_index, offset, bytes.len())
        })
    }

    fn read(&self, gpu_index: usize, offset: u64, bytes: &mut [u8]) -> Result<(), CudaError> {
        let from = self.address(gpu_index, offset, bytes.len())?;
        // SAFETY: as in `write`; the slice is ours to write.
        let code = unsafe { (self.api.memcpy_dtoh)(bytes.as_mut_ptr().cast(), from, bytes.len()) };
        self.api.check("cuMemcpyDtoH_v2", code, || {
            place(gpu_index, offset, bytes.len())
        })
    }

    fn synchronize(&self, gpu_index: usize) -> Result<(), CudaError> {
        self.make_current(gpu_index)?;
        // SAFETY: no argument; a context is current.
        let code = unsafe { (self.api.ctx_synchronize)() };
        self.api
            .check("cuCtxSynchronize", code, || format!("GPU {gpu_index}"))
    }
}

fn place(gpu_index: usize, offset: u64, len: usize) -> String {
    format!("{len} bytes at {offset} of GPU {gpu_index}")
}
