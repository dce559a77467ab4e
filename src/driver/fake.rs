//! A driver of stubs for unit tests of this layer: every call answers success, or what the test says, and is counted. Nothing is copied.
//!
//! Counts and answers belong to the calling thread, so tests beside each other do not meet.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Arc, Mutex};

use super::sys::{Api, RawResult};
use super::{Device, Driver, GpuUuid, PrimaryContext};

#[derive(Default)]
struct Script {
    answers: HashMap<&'static str, RawResult>,
    calls: HashMap<&'static str, u32>,
}

thread_local! {
    static SCRIPT: RefCell<Script> = RefCell::default();
}

/// One GPU, its context retained.
pub(crate) fn driver() -> Arc<Driver> {
    let device = Device {
        ordinal: 0,
        uuid: GpuUuid([7; 16]),
        name: "stub".to_owned(),
        chip: "0.0".to_owned(),
        memory_len: 1 << 20,
        pci: String::new(),
        node: None,
        handle: 0,
    };
    Arc::new(Driver {
        api: Api::resolve(get_proc_address).expect("every entry point has a stub"),
        api_version: 13_040,
        driver_version: None,
        devices: vec![device],
        contexts: Mutex::new(vec![Some(PrimaryContext(std::ptr::null_mut()))]),
    })
}

/// From now on `call` answers `code`.
pub(super) fn answer(call: &'static str, code: RawResult) {
    SCRIPT.with_borrow_mut(|script| script.answers.insert(call, code));
}

/// How often `call` was made.
pub(super) fn calls(call: &str) -> u32 {
    SCRIPT.with_borrow(|script| script.calls.get(call).copied().unwrap_or(0))
}

fn made(call: &'static str) -> RawResult {
    SCRIPT.with_borrow_mut(|script| {
        *script.calls.entry(call).or_default() += 1;
        script.answers.get(call).copied().unwrap_or(0)
    })
}

/// Stubs with the prototypes of `cuda.h`, and the table that finds them.
macro_rules! stubs {
    ($( $stub:ident: $name:literal = fn($($arg:ty),*); )*) => {
        $( unsafe extern "C" fn $stub($(_: $arg),*) -> RawResult { made($name) } )*

        fn find(name: &str) -> *mut c_void {
            match name {
                $( $name => $stub as *mut c_void, )*
                _ => not_called as *mut c_void,
            }
        }
    };
}

stubs! {
    ctx_set_current: "cuCtxSetCurrent" = fn(*mut c_void);
    event_create: "cuEventCreate" = fn(*mut *mut c_void, c_uint);
    event_record: "cuEventRecord" = fn(*mut c_void, *mut c_void);
    event_query: "cuEventQuery" = fn(*mut c_void);
    event_synchronize: "cuEventSynchronize" = fn(*mut c_void);
    event_destroy: "cuEventDestroy" = fn(*mut c_void);
    stream_create: "cuStreamCreate" = fn(*mut *mut c_void, c_uint);
    stream_synchronize: "cuStreamSynchronize" = fn(*mut c_void);
    stream_wait_event: "cuStreamWaitEvent" = fn(*mut c_void, *mut c_void, c_uint);
    stream_destroy: "cuStreamDestroy" = fn(*mut c_void);
    mem_alloc: "cuMemAlloc" = fn(*mut u64, usize);
    mem_free: "cuMemFree" = fn(u64);
    dtoh: "cuMemcpyDtoHAsync" = fn(*mut c_void, u64, usize, *mut c_void);
    htod: "cuMemcpyHtoDAsync" = fn(u64, *const c_void, usize, *mut c_void);
    error_name: "cuGetErrorName" = fn(c_uint, *mut *const c_char);
    complete: "cuCheckpointOperationComplete" = fn(*mut c_void);
}

/// `cuCheckpointProcessGetState`: CHECKPOINTED.
unsafe extern "C" fn get_state(_pid: c_int, state: *mut c_uint) -> RawResult {
    // SAFETY: the caller gives a valid out pointer.
    unsafe { state.write(2) };
    0
}

unsafe extern "C" fn not_called() -> RawResult {
    unreachable!("a test that makes this call needs a stub for it")
}

unsafe extern "C" fn get_proc_address(
    symbol: *const c_char,
    found: *mut *mut c_void,
    _version: c_int,
    _flags: u64,
    _status: *mut c_uint,
) -> RawResult {
    // SAFETY: the caller gives a C string.
    let name = unsafe { CStr::from_ptr(symbol) }
        .to_str()
        .unwrap_or_default();
    let address = if name == "cuCheckpointProcessGetState" {
        get_state as *mut c_void
    } else {
        find(name)
    };
    // SAFETY: the caller gives a valid out pointer.
    unsafe { found.write(address) };
    0
}
