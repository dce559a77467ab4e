//! The safe face of the CUDA driver: devices, contexts, the checkpoint state machine, pinned memory, copies.
//!
//! In: a pid. Out: extents of GPU memory, and copies of their bytes into pinned buffers and back. What can fail: [`DriverError`]; every non-zero code of
//! every call ends the step that made it. After a failure nothing is assumed about the target: [`Driver::state`] looks.
//!
//! Layers: `sys` (raw entry points) → this file (devices, contexts, states) → `process` (typestates), `copy` (stream-ordered copies),
//! `pinned` (host memory). Nothing else in the crate names CUDA.

#![allow(
    unsafe_code,
    reason = "the fence: calls into libcuda, and the memory that it copies from and to"
)]

mod copy;
#[cfg(test)]
pub(crate) mod fake;
mod numa;
mod pinned;
mod process;
mod sys;

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use cudarc::driver::sys::{CUcontext, CUdevice, CUdevice_attribute, CUuuid};

use numa::Node;

pub use copy::{Copied, CopyQueue, DeviceMemory, HostMemory, STREAMS_IN, STREAMS_OUT};
pub use pinned::{BufferPool, PoolBuf, PoolClosed, PoolSlice};
pub use process::{
    BeginError, CheckpointedProcess, CheckpointingProcess, Extent, LockedProcess, RestoringProcess,
    RunningProcess,
};

/// How often a state on which a verdict depends is looked up, and the pause in between.
const LOOKS: u32 = 3;
const LOOK_PAUSE: Duration = Duration::from_millis(50);

/// A result code of the driver, whether we know it or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriverCode(pub u32);

impl DriverCode {
    /// CUDA_ERROR_INVALID_VALUE.
    pub const INVALID_VALUE: Self = Self(1);
    /// CUDA_ERROR_OUT_OF_MEMORY.
    pub const OUT_OF_MEMORY: Self = Self(2);
    /// CUDA_ERROR_NOT_INITIALIZED.
    pub const NOT_INITIALIZED: Self = Self(3);
    /// CUDA_ERROR_NO_DEVICE.
    pub const NO_DEVICE: Self = Self(100);
    /// CUDA_ERROR_OPERATING_SYSTEM.
    pub const OPERATING_SYSTEM: Self = Self(304);
    /// CUDA_ERROR_ILLEGAL_STATE: here, the process is not in the state that the call needs.
    pub const ILLEGAL_STATE: Self = Self(401);
    /// CUDA_ERROR_NOT_READY: here, the lock ran into its timeout.
    pub const NOT_READY: Self = Self(600);

    /// CUDA_ERROR_NOT_PERMITTED.
    pub const NOT_PERMITTED: Self = Self(800);

    /// What the code usually means when a checkpoint function answers it; empty when there is nothing to add.
    fn advice(self) -> &'static str {
        match self {
            Self::OPERATING_SYSTEM => {
                "; the caller needs the target's user id or CAP_SYS_PTRACE, and the same pid namespace"
            }
            Self::NOT_INITIALIZED => "; the target has no CUDA state",
            Self(801) => {
                "; the driver does not support this here: MIG, MPS and UVM are documented as unsupported"
            }
            Self(802) => {
                "; the GPUs are not ready: nvidia-persistenced or the fabric manager may be starting"
            }
            Self::NOT_READY => {
                "; the target did not reach a stop in time: a peer that waits (NCCL), a stopped process, or driver.lock_timeout too short"
            }
            _ => "",
        }
    }
}

/// State of a target process as the driver tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessState {
    /// Computes.
    Running,
    /// Its next driver call blocks.
    Locked,
    /// Its GPU memory is saved and released.
    Checkpointed,
    /// The driver gave it up.
    Failed,
    /// A checkpoint operation holds its memory.
    Checkpointing,
    /// A restore operation holds its memory.
    Restoring,
    /// A number that this version does not know.
    Other(u32),
}

impl ProcessState {
    fn from_raw(raw: u32) -> Self {
        match raw {
            0 => Self::Running,
            1 => Self::Locked,
            2 => Self::Checkpointed,
            3 => Self::Failed,
            4 => Self::Checkpointing,
            5 => Self::Restoring,
            other => Self::Other(other),
        }
    }
}

impl ProcessState {
    /// What usually has brought a process into a state that is not the expected one.
    fn advice(self) -> &'static str {
        match self {
            Self::Locked => "; another saver holds it, or one died and left it locked",
            Self::Checkpointing | Self::Restoring => {
                "; another ckptstream is at work on it, or one died and left it so: then end it"
            }
            Self::Checkpointed => "; it is suspended, and waits for a restore",
            Self::Running | Self::Failed | Self::Other(_) => "",
        }
    }
}

impl fmt::Display for ProcessState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Running => f.write_str("running"),
            Self::Locked => f.write_str("locked"),
            Self::Checkpointed => f.write_str("checkpointed"),
            Self::Failed => f.write_str("failed"),
            Self::Checkpointing => f.write_str("checkpointing"),
            Self::Restoring => f.write_str("restoring"),
            Self::Other(raw) => write!(f, "unknown ({raw})"),
        }
    }
}

/// Why the driver did not do what it was asked.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The loader finds no libcuda.
    #[error(
        "libcuda.so.1 is not found; install the NVIDIA driver, or put its folder on LD_LIBRARY_PATH"
    )]
    NoLibrary,
    /// libcuda lacks an entry point that every driver since 12.0 has.
    #[error("libcuda has no {missing}; an NVIDIA driver for CUDA 12.0 or newer is needed")]
    LibraryTooOld {
        /// The entry point.
        missing: &'static str,
    },
    /// libcuda cannot checkpoint into custom storage.
    #[error(
        "this driver cannot checkpoint into custom storage: it has CUDA API {} ({}), and 13.4 (driver branch R615 or newer) is needed, or CRIU 4.1 beside a driver from 570 on (host.criu); entry points missing: {missing}",
        ApiVersion(*api_version),
        driver_version.as_deref().unwrap_or("driver version unknown")
    )]
    NoCustomStorage {
        /// What `cuDriverGetVersion` answers, for instance 13000.
        api_version: u32,
        /// Version of the kernel driver, for instance `driver 580.159.04`.
        driver_version: Option<String>,
        /// Names of the absent entry points.
        missing: String,
    },
    /// libcuda cannot checkpoint processes at all.
    #[error(
        "this driver cannot checkpoint processes: it has CUDA API {} ({}), and 12.8 (driver 570 or newer) is needed; entry points missing: {missing}",
        ApiVersion(*api_version),
        driver_version.as_deref().unwrap_or("driver version unknown")
    )]
    NoCheckpoint {
        /// What `cuDriverGetVersion` answers, for instance 12040.
        api_version: u32,
        /// Version of the kernel driver, for instance `driver 550.54`.
        driver_version: Option<String>,
        /// Names of the absent entry points.
        missing: String,
    },
    /// A call answered a code other than success.
    #[error("{call} answered {name} ({}){}", code.0, code.advice())]
    Call {
        /// The entry point.
        call: &'static str,
        /// What it answered.
        code: DriverCode,
        /// The code's name as the driver gives it.
        name: String,
    },
    /// The driver mapped memory on a stream that belongs to none of the contexts that we hold.
    #[error("the driver mapped {len} bytes on a GPU whose primary context we do not hold")]
    UnknownDevice {
        /// Length of the mapping in bytes.
        len: u64,
    },
    /// The driver mapped two extents on one GPU.
    #[error("the driver mapped two extents on {device}; one per GPU is what its API promises")]
    TwoExtents {
        /// Which GPU.
        device: GpuUuid,
    },
    /// The target is in another state than the step needs.
    #[error("process {pid} is {found}, not {needed}{}", found.advice())]
    WrongState {
        /// The target.
        pid: u32,
        /// Its state.
        found: ProcessState,
        /// What the step needs.
        needed: ProcessState,
    },
    /// A step needs a primary context that nobody retained: a defect of ours, not an answer of the driver.
    #[error("the primary context of GPU {device} was not retained; this is a defect of ckptstream")]
    NoContext {
        /// Index of the GPU in [`Driver::devices`].
        device: usize,
    },
    /// The driver answered success to the begin of an operation, and gave nothing to work with.
    #[error("{call} answered success, but gave no custom storage info")]
    NoInfo {
        /// The entry point.
        call: &'static str,
    },
    /// An operation was to be completed while somebody could still copy from or to its memory: a defect of ours.
    #[error(
        "the memory of process {pid} is still in use by a copy queue, so the operation is not completed; this is a defect of ckptstream"
    )]
    ExtentsInUse {
        /// The target.
        pid: u32,
    },
    /// Host memory for buffers was not to be had.
    #[error(
        "cannot allocate {len} bytes of host memory; lower pipeline.memory_budget, or raise the address space and cgroup limits (ulimit -v, memory.max)"
    )]
    HostMemory {
        /// Length of the buffers together, in bytes.
        len: usize,
    },
    /// Host memory for the pinned ring was not to be pinned.
    #[error(
        "cannot pin {len} bytes of host memory; lower pipeline.memory_budget, or raise the memlock limit (ulimit -l) and the cgroup's memory limit"
    )]
    Pin {
        /// Length of the ring in bytes.
        len: usize,
        /// What the driver said.
        #[source]
        source: Box<DriverError>,
    },
}

impl DriverError {
    /// The code that the driver answered, when it answered one.
    pub fn code(&self) -> Option<DriverCode> {
        match self {
            Self::Call { code, .. } => Some(*code),
            Self::Pin { source, .. } => source.code(),
            _ => None,
        }
    }
}

/// A CUDA API version as `cuDriverGetVersion` answers it; prints 13040 as `13.4`.
pub(crate) struct ApiVersion(pub(crate) u32);

impl fmt::Display for ApiVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// One GPU of this node.
#[derive(Debug, Clone)]
pub struct Device {
    /// Index in this process.
    pub ordinal: u32,
    /// Lasting identity.
    pub uuid: GpuUuid,
    /// Product name.
    pub name: String,
    /// Compute capability, `9.0` and the like: with the name, what restore compares.
    pub chip: String,
    /// Total memory in bytes.
    pub memory_len: u64,
    /// PCI bus id, `0000:17:00.0`.
    pub pci: String,
    /// Where it is plugged in, if that matters and is known.
    node: Option<Node>,
    handle: CUdevice,
}

/// A primary context that we hold.
#[derive(Debug, Clone, Copy)]
struct PrimaryContext(CUcontext);

// SAFETY: a CUcontext is a handle that any thread may make current; the driver synchronizes its use.
unsafe impl Send for PrimaryContext {}
// SAFETY: as above; the handle itself is never written through.
unsafe impl Sync for PrimaryContext {}

/// The loaded and initialised driver, its GPUs, and the primary contexts that we hold of them.
#[derive(Debug)]
pub struct Driver {
    api: sys::Api,
    api_version: u32,
    driver_version: Option<String>,
    devices: Vec<Device>,
    contexts: Mutex<Vec<Option<PrimaryContext>>>,
}

impl Driver {
    /// Loads libcuda, initialises it and looks at every GPU. Holds no context yet, so it takes no GPU memory.
    ///
    /// # Errors
    /// Any [`DriverError`] of loading or of the calls; the message says which.
    pub fn open() -> Result<Arc<Self>, DriverError> {
        // cuInit takes seconds on some machines, and contexts are this process's: whoever holds the driver shares it.
        static OPEN: Mutex<Weak<Driver>> = Mutex::new(Weak::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(driver) = open.upgrade() {
            return Ok(driver);
        }
        let driver = Self::open_anew()?;
        *open = Arc::downgrade(&driver);
        Ok(driver)
    }

    fn open_anew() -> Result<Arc<Self>, DriverError> {
        let api = sys::Api::load()?;
        // SAFETY: cuInit takes no pointer.
        check(&api, "cuInit", unsafe { (api.init)(0) })?;
        let mut version: c_int = 0;
        // SAFETY: the out pointer is valid for the call.
        check(&api, "cuDriverGetVersion", unsafe {
            (api.driver_get_version)(&raw mut version)
        })?;
        let mut count: c_int = 0;
        // SAFETY: the out pointer is valid for the call.
        check(&api, "cuDeviceGetCount", unsafe {
            (api.device_get_count)(&raw mut count)
        })?;
        let count = u32::try_from(count).unwrap_or(0);
        let devices = (0..count)
            .map(|ordinal| look_at_device(&api, ordinal))
            .collect::<Result<Vec<_>, _>>()?;
        let contexts = Mutex::new(vec![None; devices.len()]);
        Ok(Arc::new(Self {
            api,
            api_version: u32::try_from(version).unwrap_or(0),
            driver_version: kernel_driver_version(),
            devices,
            contexts,
        }))
    }

    /// The GPUs of this node, by ordinal.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// What `cuDriverGetVersion` answers, for instance 13050.
    pub fn api_version(&self) -> u32 {
        self.api_version
    }

    /// Version of the kernel driver, for instance `580.159.04`; `None` where it cannot be read (the emulated driver has none).
    pub fn driver_version(&self) -> Option<&str> {
        self.driver_version.as_deref()
    }

    /// Asks for the functions, not for a version: whether custom storage can be used.
    ///
    /// # Errors
    /// [`DriverError::NoCustomStorage`], naming the versions and what is missing.
    pub fn require_custom_storage(&self) -> Result<(), DriverError> {
        let complete = (
            "cuCheckpointOperationComplete",
            self.api.operation_complete.is_some(),
        );
        let missing = self.missing(&[complete]);
        if missing.is_empty() {
            return Ok(());
        }
        Err(DriverError::NoCustomStorage {
            api_version: self.api_version,
            driver_version: self.driver_label(),
            missing,
        })
    }

    /// The same for checkpoints into the host memory of the target.
    ///
    /// # Errors
    /// [`DriverError::NoCheckpoint`], naming the versions and what is missing.
    pub fn require_checkpoint(&self) -> Result<(), DriverError> {
        let missing = self.missing(&[]);
        if missing.is_empty() {
            return Ok(());
        }
        Err(DriverError::NoCheckpoint {
            api_version: self.api_version,
            driver_version: self.driver_label(),
            missing,
        })
    }

    /// Names of the entry points that this driver lacks, of those that every checkpoint needs and these.
    fn missing(&self, besides: &[(&'static str, bool)]) -> String {
        let api = &self.api;
        let entry_points = [
            (
                "cuCheckpointProcessGetState",
                api.process_get_state.is_some(),
            ),
            ("cuCheckpointProcessLock", api.process_lock.is_some()),
            (
                "cuCheckpointProcessCheckpoint",
                api.process_checkpoint.is_some(),
            ),
            ("cuCheckpointProcessRestore", api.process_restore.is_some()),
            ("cuCheckpointProcessUnlock", api.process_unlock.is_some()),
        ];
        let missing: Vec<&str> = entry_points
            .iter()
            .chain(besides)
            .filter(|(_, found)| !found)
            .map(|(name, _)| *name)
            .collect();
        missing.join(", ")
    }

    fn driver_label(&self) -> Option<String> {
        let version = self.driver_version.as_ref();
        version.map(|version| format!("driver {version}"))
    }

    /// The state of a process, now.
    ///
    /// # Errors
    /// [`DriverError::Call`] with NOT_INITIALIZED for a process without CUDA state, OPERATING_SYSTEM without the right to look.
    pub fn state(&self, pid: u32) -> Result<ProcessState, DriverError> {
        let get_state = self
            .api
            .process_get_state
            .ok_or(DriverError::LibraryTooOld {
                missing: "cuCheckpointProcessGetState",
            })?;
        let mut raw: c_uint = u32::MAX;
        // SAFETY: the out pointer is valid for the call.
        self.check("cuCheckpointProcessGetState", unsafe {
            get_state(raw_pid(pid), &raw mut raw)
        })?;
        Ok(ProcessState::from_raw(raw))
    }

    /// The same, where a verdict depends on it: a look that fails is made again.
    ///
    /// # Errors
    /// As [`Driver::state`], of the last look.
    pub fn state_for_a_verdict(&self, pid: u32) -> Result<ProcessState, DriverError> {
        let mut looks = 0;
        loop {
            let state = self.state(pid);
            looks += 1;
            if state.is_ok() || looks == LOOKS {
                return state;
            }
            std::thread::sleep(LOOK_PAUSE);
        }
    }

    /// Retains the primary context of every GPU (about 0.3 s and some hundred MiB each on hardware), all at once. They stay until the process ends: a
    /// mapping dies with the context that it belongs to.
    ///
    /// # Errors
    /// The first call that failed; contexts that were retained stay.
    pub fn retain_contexts(&self) -> Result<(), DriverError> {
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        std::thread::scope(|scope| {
            let slots = contexts.iter_mut().zip(&self.devices);
            // Each is retained once, and released when the driver is let go.
            let missing = slots.filter(|(slot, _)| slot.is_none());
            let waiting: Vec<_> = missing
                .map(|(slot, device)| (slot, scope.spawn(|| self.retain(device))))
                .collect();
            for (slot, thread) in waiting {
                let retained = thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                *slot = Some(retained?);
            }
            Ok(())
        })
    }

    /// Free memory of a GPU in bytes, as the driver counts it now. Needs its context.
    ///
    /// # Errors
    /// [`DriverError::Call`] of any of the calls.
    pub fn free_memory(&self, device: usize) -> Result<u64, DriverError> {
        self.memory(device).map(|(free, _total)| free)
    }

    /// Memory of a GPU in bytes that anybody uses now: the target, others, and our own context, which it needs.
    ///
    /// # Errors
    /// [`DriverError::Call`] of any of the calls.
    pub fn used_memory(&self, device: usize) -> Result<u64, DriverError> {
        self.memory(device)
            .map(|(free, total)| total.saturating_sub(free))
    }

    /// The same of every GPU.
    ///
    /// # Errors
    /// [`DriverError::Call`] of any of the calls.
    pub fn used_memory_of_all(&self) -> Result<Vec<u64>, DriverError> {
        let devices = 0..self.devices.len();
        devices.map(|device| self.used_memory(device)).collect()
    }

    /// Free and total memory of a GPU in bytes.
    fn memory(&self, device: usize) -> Result<(u64, u64), DriverError> {
        self.make_current(device)?;
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: both out pointers are valid for the call.
        self.check("cuMemGetInfo", unsafe {
            (self.api.mem_get_info)(&raw mut free, &raw mut total)
        })?;
        Ok((free as u64, total as u64))
    }

    fn retain(&self, device: &Device) -> Result<PrimaryContext, DriverError> {
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: the out pointer is valid for the call and the device handle came from cuDeviceGet.
        self.check("cuDevicePrimaryCtxRetain", unsafe {
            (self.api.primary_ctx_retain)(&raw mut context, device.handle)
        })?;
        Ok(PrimaryContext(context))
    }

    /// The retained context of a device.
    fn context(&self, device: usize) -> Result<PrimaryContext, DriverError> {
        let contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        contexts
            .get(device)
            .copied()
            .flatten()
            .ok_or(DriverError::NoContext { device })
    }

    /// The device whose retained context this is.
    fn device_of(&self, context: CUcontext) -> Option<usize> {
        let contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        contexts
            .iter()
            .position(|slot| slot.is_some_and(|held| held.0 == context))
    }

    /// Makes a device's context current on the calling thread.
    fn make_current(&self, device: usize) -> Result<(), DriverError> {
        let context = self.context(device)?;
        // SAFETY: the context is retained for the life of the process.
        self.check("cuCtxSetCurrent", unsafe {
            (self.api.ctx_set_current)(context.0)
        })
    }

    fn check(&self, call: &'static str, code: sys::RawResult) -> Result<(), DriverError> {
        check(&self.api, call, code)
    }
}

/// Turns a code into a result, with the driver's own name for it.
fn check(api: &sys::Api, call: &'static str, code: sys::RawResult) -> Result<(), DriverError> {
    if code == 0 {
        return Ok(());
    }
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: the out pointer is valid; for a code that it does not know the driver answers an error and leaves or nulls the pointer.
    let named = unsafe { (api.get_error_name)(code, &raw mut text) };
    let name = if named == 0 && !text.is_null() {
        // SAFETY: the driver gave a static C string.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    } else {
        "a code without a name".to_owned()
    };
    Err(DriverError::Call {
        call,
        code: DriverCode(code),
        name,
    })
}

fn look_at_device(api: &sys::Api, ordinal: u32) -> Result<Device, DriverError> {
    let index = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
    let mut handle: CUdevice = 0;
    // SAFETY: the out pointer is valid for the call.
    check(api, "cuDeviceGet", unsafe {
        (api.device_get)(&raw mut handle, index)
    })?;
    let name = device_text(api, "cuDeviceGetName", api.device_get_name, handle)?;
    let pci = device_text(
        api,
        "cuDeviceGetPCIBusId",
        api.device_get_pci_bus_id,
        handle,
    )?;
    let mut uuid = CUuuid { bytes: [0; 16] };
    // SAFETY: the out pointer is valid for the call.
    check(api, "cuDeviceGetUuid", unsafe {
        (api.device_get_uuid)(&raw mut uuid, handle)
    })?;
    let mut memory_len: usize = 0;
    // SAFETY: the out pointer is valid for the call.
    check(api, "cuDeviceTotalMem", unsafe {
        (api.device_total_mem)(&raw mut memory_len, handle)
    })?;
    let major = attribute(
        api,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        handle,
    )?;
    let minor = attribute(
        api,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        handle,
    )?;
    Ok(Device {
        ordinal,
        uuid: from_cu_uuid(&uuid),
        name,
        chip: format!("{major}.{minor}"),
        memory_len: memory_len as u64,
        node: Node::of_gpu(&pci),
        pci,
        handle,
    })
}

fn attribute(
    api: &sys::Api,
    which: CUdevice_attribute,
    handle: CUdevice,
) -> Result<c_int, DriverError> {
    let mut value: c_int = 0;
    // SAFETY: the out pointer is valid for the call.
    check(api, "cuDeviceGetAttribute", unsafe {
        (api.device_get_attribute)(&raw mut value, which as c_uint, handle)
    })?;
    Ok(value)
}

fn device_text(
    api: &sys::Api,
    call: &'static str,
    get: unsafe extern "C" fn(*mut c_char, c_int, CUdevice) -> sys::RawResult,
    handle: CUdevice,
) -> Result<String, DriverError> {
    let mut text = [0_u8; 256];
    // SAFETY: the buffer is valid for the 255 bytes that we allow; its last byte stays zero.
    check(api, call, unsafe {
        get(text.as_mut_ptr().cast::<c_char>(), 255, handle)
    })?;
    Ok(CStr::from_bytes_until_nul(&text)
        .map(|text| text.to_string_lossy().into_owned())
        .unwrap_or_default())
}

fn from_cu_uuid(uuid: &CUuuid) -> GpuUuid {
    GpuUuid(uuid.bytes.map(|byte| u8::from_ne_bytes(byte.to_ne_bytes())))
}

fn to_cu_uuid(uuid: GpuUuid) -> CUuuid {
    CUuuid {
        bytes: uuid.0.map(|byte| c_char::from_ne_bytes(byte.to_ne_bytes())),
    }
}

/// A pid as the driver takes it. Linux pids end at 2^22, so this does not saturate.
fn raw_pid(pid: u32) -> c_int {
    c_int::try_from(pid).unwrap_or(c_int::MAX)
}

/// The loaded kernel module's version. The emulated driver has none, even on a machine with a real one beside it.
fn kernel_driver_version() -> Option<String> {
    let text = std::fs::read_to_string("/sys/module/nvidia/version").ok()?;
    let version = text.trim();
    (!version.is_empty()).then(|| version.to_owned())
}

/// A GPU's lasting identity, the 16 bytes of its UUID.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GpuUuid(pub [u8; 16]);

impl fmt::Display for GpuUuid {
    /// `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`, as `nvidia-smi -L` prints it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let b = &self.0;
        write!(f, "GPU-")?;
        for (index, byte) in b.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                write!(f, "-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Not a UUID of the form `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx` (the `GPU-` may be left out).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a GPU UUID; expected GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx as nvidia-smi -L prints it"
)]
pub struct BadGpuUuid(pub String);

impl std::str::FromStr for GpuUuid {
    type Err = BadGpuUuid;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || BadGpuUuid(text.to_owned());
        let rest = text.strip_prefix("GPU-").unwrap_or(text);
        let groups: Vec<&str> = rest.split('-').collect();
        if groups.iter().map(|group| group.len()).ne([8, 4, 4, 4, 12]) {
            return Err(bad());
        }
        let digits: String = groups.concat();
        let value = u128::from_str_radix(&digits, 16)
            .ok()
            .filter(|_| digits.bytes().all(|b| b.is_ascii_hexdigit()));
        value.map(|value| Self(value.to_be_bytes())).ok_or_else(bad)
    }
}
