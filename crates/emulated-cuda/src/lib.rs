//! The emulated driver: a stand-in for NVIDIA's `libcuda.so.1`, found by the loader through `LD_LIBRARY_PATH`.
//!
//! In: the driver API's C calls, from programs compiled against NVIDIA's `cuda.h`, and one environment variable, `EMULATED_CUDA`. Out: what a
//! driver answers; device memory that is host memory; streams that really run later and in order; and the checkpoint API between real
//! separate processes. It never passes for hardware: its devices are named so, and their compute capability is that of no chip.
//!
//! From the outside in:
//!
//! - `api`: the C functions, one file per noun. Each goes through `api::call`: scripted faults, the gate, the work, the trace.
//! - `driver`: contexts, memory, streams and events of this process. `space` places allocations, `backing` is a GPU's memory, `stream` and
//!   `work` carry operations out, `extent` is another process's memory mapped here.
//! - `checkpoint`: the saver's side of the checkpoint functions. `remote` finds the other process and asks it.
//! - `suspend`: the target's side, its restore thread. `control` is what both share, `gate` is what holds calls back.
//!
//! The mechanisms and their limits are told in `docs/emulated-driver.md`.

#![allow(
    unsafe_code,
    reason = "a C library that reads and writes other programs' memory"
)]

mod api;
mod backing;
mod checkpoint;
mod codes;
mod config;
mod control;
mod driver;
mod extent;
mod fault;
mod gate;
mod remote;
mod space;
mod stream;
mod suspend;
mod trace;
mod work;

/// The sizes and places that `cuda.h` gives, so that a wrong binding does not compile.
mod layout {
    use cudarc::driver::sys::{
        CUcheckpointCheckpointArgs, CUcheckpointCustomStorageInfo,
        CUcheckpointCustomStoragePerDeviceData, CUcheckpointGpuPair, CUcheckpointLockArgs,
        CUcheckpointRestoreArgs, CUcheckpointUnlockArgs, CUdeviceptr, CUprocessState, CUuuid,
    };
    use std::mem::offset_of;

    const _: () = {
        assert!(size_of::<CUprocessState>() == 4);
        assert!(size_of::<CUuuid>() == 16);
        assert!(size_of::<CUdeviceptr>() == 8);
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
    };
}
