//! The target's life under our hands, as types: what is legal next is what compiles.
//!
//! ```text
//! RunningProcess ─lock▶ LockedProcess ─begin_checkpoint▶ CheckpointingProcess ─complete▶ CheckpointedProcess
//!        ▲                 │      ▲                                                             │
//!        └────unlock───────┘      └──complete── RestoringProcess ◀──────begin_restore───────────┘
//! ```
//!
//! Without custom storage there are two steps less: LockedProcess ─stage▶ CheckpointedProcess, whose memory is in the target's own host memory, and ─unstage▶ LockedProcess.
//!
//! If we die: running → nothing happened; locked → stays locked until somebody unlocks it; checkpointing, restoring → unknown, treated as lost; checkpointed → can be restored.
//! A [`LockedProcess`] that is dropped unlocks (`?`, panic and Ctrl-C included); from BEGIN on no guard acts, because the driver has no way back.

use std::ffi::c_uint;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::{
    CUcheckpointCheckpointArgs, CUcheckpointCustomStorageInfo, CUcheckpointGpuPair,
    CUcheckpointLockArgs, CUcheckpointOperationHandle, CUcheckpointRestoreArgs,
    CUcheckpointUnlockArgs, CUcontext, CUdeviceptr, CUstream,
};

use super::{Driver, DriverError, GpuUuid, ProcessState, raw_pid, to_cu_uuid};

/// The entry point of both kinds of checkpoints.
const CHECKPOINT: &str = "cuCheckpointProcessCheckpoint";
/// The entry point of both kinds of restores.
const RESTORE: &str = "cuCheckpointProcessRestore";

/// A target that computes.
#[derive(Debug)]
pub struct RunningProcess {
    driver: Arc<Driver>,
    pid: u32,
}

/// A target whose next driver call blocks. Dropping it unlocks.
#[derive(Debug)]
pub struct LockedProcess {
    driver: Arc<Driver>,
    pid: u32,
    guard: bool,
}

/// A target whose GPU memory is mapped into this process. Dropping it does nothing: the target stays as it is.
#[derive(Debug)]
pub struct CheckpointingProcess {
    driver: Arc<Driver>,
    pid: u32,
    operation: Arc<Operation>,
    extents: Vec<Extent>,
}

/// A target that holds no GPU memory.
#[derive(Debug)]
pub struct CheckpointedProcess {
    driver: Arc<Driver>,
    pid: u32,
}

/// A target whose new GPU memory is mapped into this process and waits for its bytes. Dropping it does nothing.
#[derive(Debug)]
pub struct RestoringProcess {
    driver: Arc<Driver>,
    pid: u32,
    operation: Arc<Operation>,
    extents: Vec<Extent>,
}

/// One contiguous device range given by the driver, all of one GPU's memory of the target. As long as a clone of it lives, so do the range and its stream: the operation that
/// gave it is not completed, memory of our own is not freed.
#[derive(Debug, Clone)]
pub struct Extent {
    /// Index of the GPU in [`Driver::devices`].
    pub device: usize,
    /// Identity of the GPU that the range is on now.
    pub uuid: GpuUuid,
    /// Length in bytes, never 0.
    pub len: u64,
    pub(super) mapping: Mapping,
}

/// The range itself. Nobody outside this layer can make or change one, so what is inside it is device memory that may be copied.
#[derive(Debug, Clone)]
pub(super) struct Mapping {
    pub(super) base: CUdeviceptr,
    /// Length in bytes; what [`Extent::len`] was when the driver gave it.
    pub(super) len: u64,
    pub(super) stream: CUstream,
    /// What base and stream belong to; both are valid while this is held.
    pub(super) _owner: Arc<dyn fmt::Debug + Send + Sync>,
}

// SAFETY: base and stream are handles into the driver, which synchronizes their use by any thread that has made the context current; the owner is Send.
unsafe impl Send for Mapping {}
// SAFETY: as above; a Mapping is never written through, and the owner is Sync.
unsafe impl Sync for Mapping {}

/// An operation that has begun. Its process and its extents share it; it is completed by the last of them, which can only be the process.
#[derive(Debug)]
struct Operation(CUcheckpointOperationHandle);

// SAFETY: the handle is opaque and used once, by whichever thread completes the operation.
unsafe impl Send for Operation {}
// SAFETY: a shared reference gives no way to use it.
unsafe impl Sync for Operation {}

/// BEGIN was refused. What that left of the target was looked up.
#[derive(Debug, thiserror::Error)]
#[error("the driver refused to begin the checkpoint of process {pid}; the process is {}", state.as_ref().map_or_else(|_| "in an unknown state".to_owned(), ToString::to_string))]
pub struct BeginError {
    /// The target.
    pub pid: u32,
    /// Its state after the refusal.
    pub state: Result<ProcessState, DriverError>,
    /// The target, when it is still locked: dropping it unlocks.
    pub locked: Option<LockedProcess>,
    /// The target, when it was staged all the same: its memory is in its own host memory.
    pub staged: Option<CheckpointedProcess>,
    /// What the driver answered.
    #[source]
    pub source: DriverError,
}

impl RunningProcess {
    /// Takes a running process in hand.
    ///
    /// # Errors
    /// [`DriverError::WrongState`] when it does not run; whatever [`Driver::state`] answers.
    pub fn attach(driver: &Arc<Driver>, pid: u32) -> Result<Self, DriverError> {
        expect_state(driver, pid, ProcessState::Running)?;
        Ok(Self {
            driver: Arc::clone(driver),
            pid,
        })
    }

    /// Locks: waits until no driver call of the target is under way, and blocks its next one. `timeout` is rounded up to a whole millisecond and is at least one: to the
    /// driver 0 means for ever.
    ///
    /// # Errors
    /// Whatever the driver answers; NOT_READY after the timeout. The target then still runs, as far as the driver's word goes.
    pub fn lock(self, timeout: Duration) -> Result<LockedProcess, DriverError> {
        let lock = self
            .driver
            .api
            .process_lock
            .ok_or(DriverError::LibraryTooOld {
                missing: "cuCheckpointProcessLock",
            })?;
        let timeout_ms = c_uint::try_from(timeout.as_micros().div_ceil(1000))
            .unwrap_or(c_uint::MAX)
            .max(1);
        let mut args = CUcheckpointLockArgs {
            timeoutMs: timeout_ms,
            reserved0: 0,
            reserved1: [0; 7],
        };
        // SAFETY: the argument struct is valid for the call and its reserved fields are zero.
        self.driver.check("cuCheckpointProcessLock", unsafe {
            lock(raw_pid(self.pid), &raw mut args)
        })?;
        Ok(LockedProcess {
            driver: self.driver,
            pid: self.pid,
            guard: true,
        })
    }
}

impl LockedProcess {
    /// Takes a locked process in hand that somebody else locked, who is gone. Dropping it does not unlock.
    ///
    /// # Errors
    /// [`DriverError::WrongState`] when it is not LOCKED; whatever [`Driver::state`] answers.
    pub fn attach(driver: &Arc<Driver>, pid: u32) -> Result<Self, DriverError> {
        expect_state(driver, pid, ProcessState::Locked)?;
        Ok(Self {
            driver: Arc::clone(driver),
            pid,
            guard: false,
        })
    }

    /// BEGIN: the driver maps the target's GPU memory into this process. There is no way back from its success but through
    /// [`CheckpointingProcess::complete`]. The roll-back guard is off from the moment the driver is asked.
    ///
    /// # Errors
    /// [`BeginError`], which holds the target again if it is still locked.
    pub fn begin_checkpoint(mut self) -> Result<CheckpointingProcess, Box<BeginError>> {
        self.guard = false;
        match self.map_out() {
            Ok((operation, extents)) => Ok(CheckpointingProcess {
                driver: Arc::clone(&self.driver),
                pid: self.pid,
                operation,
                extents,
            }),
            Err(source) => Err(self.refused(source)),
        }
    }

    /// The driver did not begin; what it left is looked up.
    fn refused(mut self, source: DriverError) -> Box<BeginError> {
        let state = self.driver.state_for_a_verdict(self.pid);
        let pid = self.pid;
        let locked = matches!(state, Ok(ProcessState::Locked)).then(|| {
            self.guard = true;
            self
        });
        Box::new(BeginError {
            pid,
            state,
            locked,
            staged: None,
            source,
        })
    }

    /// The driver copies the target's GPU memory into the target's own host memory, and releases the GPUs. It comes back with [`CheckpointedProcess::unstage`].
    ///
    /// # Errors
    /// [`BeginError`], which holds the target again if it is still locked, or was staged all the same.
    pub fn stage(mut self) -> Result<CheckpointedProcess, Box<BeginError>> {
        self.guard = false;
        let staged = self
            .checkpoint(std::ptr::null_mut())
            .and_then(|()| CheckpointedProcess::attach(&self.driver, self.pid));
        staged.map_err(|source| {
            let (driver, pid) = (Arc::clone(&self.driver), self.pid);
            let mut refused = self.refused(source);
            let is_staged = matches!(refused.state, Ok(ProcessState::Checkpointed));
            refused.staged = is_staged.then_some(CheckpointedProcess { driver, pid });
            refused
        })
    }

    /// From now on dropping it unlocks, or does nothing.
    #[must_use]
    pub fn unlocks_when_dropped(mut self, unlocks: bool) -> Self {
        self.guard = unlocks;
        self
    }

    /// Lets the target run on.
    ///
    /// # Errors
    /// Whatever the driver answers, or [`DriverError::WrongState`] when the target does not run afterwards. It is not tried again.
    pub fn unlock(self) -> Result<RunningProcess, DriverError> {
        let (driver, pid) = (Arc::clone(&self.driver), self.pid);
        self.let_go()?;
        RunningProcess::attach(&driver, pid)
    }

    /// As [`LockedProcess::unlock`], without the look at what became of it: it may have run to its end by then.
    ///
    /// # Errors
    /// Whatever the driver answers. It is not tried again.
    pub fn let_go(mut self) -> Result<(), DriverError> {
        self.guard = false;
        self.unlock_now()
    }

    fn unlock_now(&self) -> Result<(), DriverError> {
        let unlock = self
            .driver
            .api
            .process_unlock
            .ok_or(DriverError::LibraryTooOld {
                missing: "cuCheckpointProcessUnlock",
            })?;
        let mut args = CUcheckpointUnlockArgs { reserved: [0; 8] };
        // SAFETY: the argument struct is valid for the call and all zero.
        self.driver.check("cuCheckpointProcessUnlock", unsafe {
            unlock(raw_pid(self.pid), &raw mut args)
        })
    }

    fn map_out(&self) -> Result<(Arc<Operation>, Vec<Extent>), DriverError> {
        let mut info: *mut CUcheckpointCustomStorageInfo = std::ptr::null_mut();
        self.checkpoint(&raw mut info)?;
        read_extents(&self.driver, CHECKPOINT, info)
    }

    /// Into custom storage, or into the target's own host memory where `info_out` is null.
    fn checkpoint(
        &self,
        info_out: *mut *mut CUcheckpointCustomStorageInfo,
    ) -> Result<(), DriverError> {
        let checkpoint = self
            .driver
            .api
            .process_checkpoint
            .ok_or(DriverError::LibraryTooOld {
                missing: CHECKPOINT,
            })?;
        let mut args = CUcheckpointCheckpointArgs {
            customStorageInfo_out: info_out,
            reserved: [0; 56],
        };
        // SAFETY: the argument struct and the out pointer, if there is one, are valid for the call; reserved bytes are zero. Without a pointer all of it is zero, as drivers without custom storage want it.
        let code = unsafe { checkpoint(raw_pid(self.pid), &raw mut args) };
        self.driver.check(CHECKPOINT, code)
    }
}

impl Drop for LockedProcess {
    fn drop(&mut self) {
        if !self.guard {
            return;
        }
        if let Err(error) = self.unlock_now() {
            tracing::error!(pid = self.pid, %error, "roll back: cannot unlock the target");
        } else {
            tracing::info!(pid = self.pid, "rolled back: the target is unlocked");
        }
    }
}

impl CheckpointingProcess {
    /// The target's memory, one extent per GPU that holds data, by device.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Complete: the target's GPU memory is released. From now on only the image has the bytes.
    ///
    /// # Errors
    /// [`DriverError::ExtentsInUse`] while a clone of an extent lives; whatever the driver answers (the handle is spent all the same), or
    /// [`DriverError::WrongState`] when the target is not CHECKPOINTED afterwards.
    pub fn complete(self) -> Result<CheckpointedProcess, DriverError> {
        drop(self.extents);
        complete_operation(&self.driver, self.pid, self.operation)?;
        CheckpointedProcess::attach(&self.driver, self.pid)
    }
}

impl CheckpointedProcess {
    /// Takes a suspended process in hand.
    ///
    /// # Errors
    /// [`DriverError::WrongState`] when it is not CHECKPOINTED; whatever [`Driver::state`] answers.
    pub fn attach(driver: &Arc<Driver>, pid: u32) -> Result<Self, DriverError> {
        expect_state(driver, pid, ProcessState::Checkpointed)?;
        Ok(Self {
            driver: Arc::clone(driver),
            pid,
        })
    }

    /// The driver gives the target new GPU memory and maps it into this process. `pairs` (stored GPU, present GPU) is empty when
    /// every GPU is the same as before, and names every checkpointed GPU otherwise. There is one try: a restore that failed is never repeated.
    ///
    /// # Errors
    /// Whatever the driver answers. The target is then to be ended.
    pub fn begin_restore(
        self,
        pairs: &[(GpuUuid, GpuUuid)],
    ) -> Result<RestoringProcess, DriverError> {
        let mut info: *mut CUcheckpointCustomStorageInfo = std::ptr::null_mut();
        self.restore(pairs, &raw mut info)?;
        let (operation, extents) = read_extents(&self.driver, RESTORE, info)?;
        Ok(RestoringProcess {
            driver: self.driver,
            pid: self.pid,
            operation,
            extents,
        })
    }

    /// The driver copies the memory of a target that was staged from its own host memory back to its GPUs. `pairs` and the number of tries are those of [`CheckpointedProcess::begin_restore`]. Nothing unlocks the target when what this returns is dropped, as long as
    /// others of its tree may not have their memory yet.
    ///
    /// # Errors
    /// Whatever the driver answers. The target is then to be ended.
    pub fn unstage(self, pairs: &[(GpuUuid, GpuUuid)]) -> Result<LockedProcess, DriverError> {
        self.restore(pairs, std::ptr::null_mut())?;
        LockedProcess::attach(&self.driver, self.pid)
    }

    fn restore(
        &self,
        pairs: &[(GpuUuid, GpuUuid)],
        info_out: *mut *mut CUcheckpointCustomStorageInfo,
    ) -> Result<(), DriverError> {
        let restore = self
            .driver
            .api
            .process_restore
            .ok_or(DriverError::LibraryTooOld { missing: RESTORE })?;
        let mut raw_pairs: Vec<CUcheckpointGpuPair> = pairs
            .iter()
            .map(|&(old, new)| CUcheckpointGpuPair {
                oldUuid: to_cu_uuid(old),
                newUuid: to_cu_uuid(new),
            })
            .collect();
        let mut args = CUcheckpointRestoreArgs {
            gpuPairs: if raw_pairs.is_empty() {
                std::ptr::null_mut()
            } else {
                raw_pairs.as_mut_ptr()
            },
            gpuPairsCount: c_uint::try_from(raw_pairs.len()).unwrap_or(c_uint::MAX),
            padding0: 0,
            customStorageInfo_out: info_out,
            reserved: [0; 40],
        };
        // SAFETY: the argument struct, the pairs and the out pointer, if there is one, are valid for the call; padding and reserved bytes are zero.
        let code = unsafe { restore(raw_pid(self.pid), &raw mut args) };
        self.driver.check(RESTORE, code)
    }
}

impl RestoringProcess {
    /// The target's new memory, one extent per GPU that held data, by device.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Complete: the memory becomes the target's. Only to be called once every chunk was copied and the streams synchronized without an error.
    ///
    /// # Errors
    /// As [`CheckpointingProcess::complete`]; afterwards the target must be LOCKED.
    pub fn complete(self) -> Result<LockedProcess, DriverError> {
        drop(self.extents);
        complete_operation(&self.driver, self.pid, self.operation)?;
        expect_state(&self.driver, self.pid, ProcessState::Locked)?;
        Ok(LockedProcess {
            driver: self.driver,
            pid: self.pid,
            guard: true,
        })
    }
}

fn expect_state(driver: &Driver, pid: u32, needed: ProcessState) -> Result<(), DriverError> {
    let found = driver.state(pid)?;
    if found == needed {
        Ok(())
    } else {
        Err(DriverError::WrongState { pid, found, needed })
    }
}

fn complete_operation(
    driver: &Driver,
    pid: u32,
    operation: Arc<Operation>,
) -> Result<(), DriverError> {
    let complete = driver
        .api
        .operation_complete
        .ok_or(DriverError::LibraryTooOld {
            missing: "cuCheckpointOperationComplete",
        })?;
    // The mapping and its streams end with the operation, so nobody else may hold an extent any more.
    let operation = Arc::into_inner(operation).ok_or(DriverError::ExtentsInUse { pid })?;
    // SAFETY: the handle came from the driver for this operation, in this process; the operation is consumed, so it is used once.
    driver.check("cuCheckpointOperationComplete", unsafe {
        complete(operation.0)
    })
}

/// Copies what we need out of the struct that the driver allocated, and finds each extent's GPU from its stream: the driver gives no order.
fn read_extents(
    driver: &Driver,
    call: &'static str,
    info: *const CUcheckpointCustomStorageInfo,
) -> Result<(Arc<Operation>, Vec<Extent>), DriverError> {
    // SAFETY: after success the driver has stored a pointer to a struct of its own, valid until the operation completes.
    let Some(info) = (unsafe { info.as_ref() }) else {
        return Err(DriverError::NoInfo { call });
    };
    let operation = Arc::new(Operation(info.handle));
    let count = info.deviceCount as usize;
    let mut extents = Vec::with_capacity(count);
    for index in 0..count {
        // SAFETY: the driver's array has deviceCount entries.
        let entry = unsafe { &*info.perDeviceData.add(index) };
        let len = entry.size as u64;
        if len == 0 {
            continue;
        }
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: the stream came from the driver and the out pointer is valid for the call.
        driver.check("cuStreamGetCtx", unsafe {
            (driver.api.stream_get_ctx)(entry.stream, &raw mut context)
        })?;
        let device = driver
            .device_of(context)
            .ok_or(DriverError::UnknownDevice { len })?;
        let uuid = driver.devices()[device].uuid;
        extents.push(Extent {
            device,
            uuid,
            len,
            mapping: Mapping {
                base: entry.devPtr,
                len,
                stream: entry.stream,
                _owner: Arc::clone(&operation) as Arc<_>,
            },
        });
    }
    extents.sort_by_key(|extent| extent.device);
    if let Some(pair) = extents
        .windows(2)
        .find(|pair| pair[0].device == pair[1].device)
    {
        return Err(DriverError::TwoExtents {
            device: pair[0].uuid,
        });
    }
    Ok((operation, extents))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{CopyQueue, STREAMS_OUT, fake};

    #[test]
    fn an_operation_is_not_completed_while_a_queue_may_copy_from_it() {
        let driver = fake::driver();
        let begin = || {
            let operation = Arc::new(Operation(std::ptr::null_mut()));
            let mapping = Mapping {
                base: 4096,
                len: 64,
                stream: std::ptr::null_mut(),
                _owner: Arc::clone(&operation) as Arc<_>,
            };
            let extent = Extent {
                device: 0,
                uuid: driver.devices()[0].uuid,
                len: 64,
                mapping,
            };
            CheckpointingProcess {
                driver: Arc::clone(&driver),
                pid: 7,
                operation,
                extents: vec![extent],
            }
        };
        let process = begin();
        let mut queue: CopyQueue = CopyQueue::prepare(&driver, 0, 1, STREAMS_OUT).unwrap();
        queue.bind(process.extents()[0].clone()).unwrap();
        let refused = process.complete().unwrap_err();
        assert!(matches!(refused, DriverError::ExtentsInUse { pid: 7 }));
        assert_eq!(fake::calls("cuCheckpointOperationComplete"), 0);

        let process = begin();
        let mut queue: CopyQueue = CopyQueue::prepare(&driver, 0, 1, STREAMS_OUT).unwrap();
        queue.bind(process.extents()[0].clone()).unwrap();
        drop(queue);
        process.complete().unwrap();
        assert_eq!(fake::calls("cuCheckpointOperationComplete"), 1);
    }
}
