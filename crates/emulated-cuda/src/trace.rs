//! The call trace: one JSON object per line, appended to the file that `trace=` names.
//!
//! In: each call of a driver function with what is known about it, and each copy when it has been carried out. Out: a line per record. The
//! file is opened, appended to in one write and closed again per record, so that a checkpointed process holds no open file and several
//! processes can share one trace. A trace that cannot be written is silent: it must not change what the driver answers.

use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::codes::Code;
use crate::config;

/// Microseconds on CLOCK_BOOTTIME, which all processes of a machine share.
pub(crate) fn now_us() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes one timespec on this stack; the clock exists on every Linux that Rust supports.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    time.tv_sec.cast_unsigned() * 1_000_000 + time.tv_nsec.cast_unsigned() / 1_000
}

static NEXT_SEQ: AtomicU64 = AtomicU64::new(1);

/// A number that joins the line of an asynchronous copy with its `copy-done` line.
pub(crate) fn next_seq() -> u64 {
    NEXT_SEQ.fetch_add(1, Ordering::Relaxed)
}

/// What is known about one call; collects nothing when there is no trace.
#[derive(Debug)]
pub(crate) struct Record {
    start_us: u64,
    fields: Option<String>,
}

impl Record {
    /// Starts the record of a call that begins now.
    pub(crate) fn start() -> Record {
        let traced = config::get().is_ok_and(|c| c.trace.is_some());
        Record {
            start_us: if traced { now_us() } else { 0 },
            fields: traced.then(String::new),
        }
    }

    /// Whether anything will be written.
    pub(crate) fn is_on(&self) -> bool {
        self.fields.is_some()
    }

    /// Adds a member whose value is a number or JSON already.
    pub(crate) fn raw(&mut self, key: &str, value: impl std::fmt::Display) {
        if let Some(fields) = &mut self.fields {
            let _ = write!(fields, ",\"{key}\":{value}");
        }
    }

    /// Adds members that are written already, each with a comma before it.
    pub(crate) fn members(&mut self, members: &str) {
        if let Some(fields) = &mut self.fields {
            fields.push_str(members);
        }
    }

    /// Writes the line.
    pub(crate) fn finish(self, call: &str, result: Code) {
        if let Some(fields) = self.fields {
            let (pid, end_us) = (std::process::id(), now_us());
            let start_us = self.start_us;
            let result = result.0;
            append(format!(
                "{{\"t_us\":{start_us},\"end_us\":{end_us},\"pid\":{pid},\"call\":\"{call}\",\"result\":{result}{fields}}}\n"
            ));
        }
    }
}

/// An asynchronous copy that has been enqueued; its `copy-done` line is written when it has been carried out.
#[derive(Debug)]
pub(crate) struct Copy {
    pub(crate) seq: u64,
    pub(crate) fields: String,
    pub(crate) enqueued_us: u64,
}

impl Copy {
    /// Writes the `copy-done` line.
    pub(crate) fn done(&self, result: Code) {
        let (seq, enqueued_us, fields, result) =
            (self.seq, self.enqueued_us, &self.fields, result.0);
        let (pid, now) = (std::process::id(), now_us());
        append(format!(
            "{{\"t_us\":{now},\"pid\":{pid},\"call\":\"copy-done\",\"result\":{result},\"seq\":{seq},\"enqueued_us\":{enqueued_us},\"done_us\":{now}{fields}}}\n"
        ));
    }
}

fn append(line: String) {
    let Ok(config) = config::get() else { return };
    let Some(path) = &config.trace else { return };
    if let Ok(mut file) = OpenOptions::new().create(true).append(true).open(path) {
        let _ = file.write_all(line.as_bytes());
    }
}
