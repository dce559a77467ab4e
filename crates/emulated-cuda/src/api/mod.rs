//! The C functions of the driver API.
//!
//! In: calls by C's rules; every pointer is null or valid for what `cuda.h` says of it, which is the caller's promise and the only thing that
//! `abi` trusts. Out: a `CUresult` as a plain number. Names with a suffix and their legacy namesakes stand side by side, as `cuda.h` exports
//! them.

#![allow(non_snake_case, reason = "the names of the driver API")]

mod abi;
mod checkpoint;
mod context;
mod device;
mod entry;
mod event;
mod legacy;
mod memory;
mod stream;
mod transfer;

use std::sync::LazyLock;
use std::thread;

use crate::checkpoint::wait_until_dead;
use crate::codes::{Answer, Code};
use crate::config;
use crate::driver::{self, Driver};
use crate::fault::{Action, Counter, base_name};
use crate::stream::is_worker;
use crate::suspend::GATE;
use crate::trace::Record;

static CALLS: LazyLock<Counter> = LazyLock::new(Counter::default);

/// Whom a call is about, for the fault `kill-target`.
#[derive(Debug, Clone, Copy)]
enum About {
    /// The target of any operation under way.
    Nobody,
    Process(i32),
    Operation(u64),
}

/// A call that works before `cuInit` and while the process is locked.
fn open_call(name: &str, about: About, body: impl FnOnce(&mut Record) -> Answer) -> u32 {
    let name = base_name(name);
    let mut record = Record::start();
    let result = with_faults(name, about, || body(&mut record));
    let code = result.err().unwrap_or(Code::SUCCESS);
    record.finish(name, code);
    code.0
}

/// A call that needs `cuInit` and waits while the process is locked.
fn call(name: &str, body: impl FnOnce(&'static Driver, &mut Record) -> Answer) -> u32 {
    open_call(name, About::Nobody, |record| {
        if is_worker() {
            return Err(Code::NOT_PERMITTED);
        }
        let driver = driver::get()?;
        let _passage = GATE.enter();
        body(driver, record)
    })
}

fn with_faults(name: &str, about: About, body: impl FnOnce() -> Answer) -> Answer {
    let actions = match config::get() {
        Ok(config) if !config.faults.is_empty() => CALLS.count(&config.faults, name),
        _ => Vec::new(),
    };
    let (mut instead, mut afterwards) = (None, None);
    for action in actions {
        match action {
            Action::Code(code) => instead = Some(code),
            Action::AfterCode(code) => afterwards = Some(code),
            Action::Stall(time) => thread::sleep(time),
            Action::KillTarget => kill_target(about),
            Action::KillCaller => kill(std::process::id().cast_signed()),
        }
    }
    let result = match instead {
        Some(code) => answer(code),
        None => body(),
    };
    afterwards.map_or(result, answer)
}

fn answer(code: Code) -> Answer {
    if code == Code::SUCCESS {
        Ok(())
    } else {
        Err(code)
    }
}

fn kill_target(about: About) {
    let pid = match about {
        About::Process(pid) => Some(pid),
        About::Operation(handle) => driver::get()
            .ok()
            .and_then(|d| d.operation_pid(Some(handle))),
        About::Nobody => driver::get().ok().and_then(|d| d.operation_pid(None)),
    };
    if let Some(pid) = pid.filter(|&pid| pid > 0) {
        kill(pid);
        wait_until_dead(pid);
    }
}

fn kill(pid: i32) {
    // SAFETY: a positive pid names one process; the kernel checks the right to end it.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}
