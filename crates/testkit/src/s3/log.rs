//! The request log: one JSON object per line, in the order in which requests ended.
//!
//! In: a [`Record`] that was begun when the request's head arrived. Out: one `write(2)` per line to a file opened for appending, made
//! *before* the response head goes to the client, so that whatever the client does next is later on the same clock. A request that never
//! gets an answer (dropped, reset, stalled until the client went away) is written when it is given up, with status 0.
//! A failing write is reported once on standard error and the log goes on being tried.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;

use super::op::Target;

/// Microseconds of CLOCK_BOOTTIME, the clock that the emulated driver's call trace uses too.
pub(super) fn boottime_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let secs = u64::try_from(now.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
    secs * 1_000_000 + nanos / 1_000
}

/// Where records go.
pub(super) struct Log {
    file: Option<Mutex<File>>,
    next_seq: AtomicU64,
    complained: AtomicBool,
}

impl Log {
    /// Opens `path` for appending, or makes a log that keeps nothing.
    pub(super) fn open(path: Option<&Path>) -> io::Result<Self> {
        let file = match path {
            Some(path) => Some(Mutex::new(
                OpenOptions::new().create(true).append(true).open(path)?,
            )),
            None => None,
        };
        Ok(Self {
            file,
            next_seq: AtomicU64::new(0),
            complained: AtomicBool::new(false),
        })
    }

    /// Begins the record of a request whose head has just arrived.
    pub(super) fn begin(self: &Arc<Self>, method: &http::Method, target: &Target) -> Record {
        Record {
            log: Arc::clone(self),
            written: false,
            line: Line {
                seq: self.next_seq.fetch_add(1, Ordering::Relaxed),
                t_us: boottime_us(),
                end_us: 0,
                op: target.op,
                method: method.as_str().to_owned(),
                bucket: target.bucket.clone(),
                key: target.key.clone(),
                part: target.part,
                upload: target.upload.clone(),
                status: 0,
                applied: None,
                bytes_in: 0,
                bytes_out: 0,
                if_none_match: None,
                range: None,
                fault: None,
            },
        }
    }

    #[expect(
        clippy::print_stderr,
        reason = "a test server's only place to complain"
    )]
    fn append(&self, line: &Line) {
        let Some(file) = &self.file else { return };
        let result = serde_json::to_vec(line)
            .map_err(io::Error::from)
            .and_then(|mut text| {
                text.push(b'\n');
                file.lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .write_all(&text)
            });
        if let Err(error) = result
            && !self.complained.swap(true, Ordering::Relaxed)
        {
            eprintln!("testkit s3: the request log cannot be written: {error}");
        }
    }
}

/// One line of the log; `docs/testkit.md` says what each member means.
#[derive(Serialize)]
pub(super) struct Line {
    seq: u64,
    t_us: u64,
    end_us: u64,
    op: &'static str,
    method: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    bucket: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    part: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    upload: Option<String>,
    /// Status of the answer that was sent; 0 when none was.
    pub(super) status: u16,
    /// Status that the store gave, where a fault then sent something else or nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) applied: Option<u16>,
    pub(super) bytes_in: u64,
    pub(super) bytes_out: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) if_none_match: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) range: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fault: Option<usize>,
}

/// A record under way. Dropping it unwritten writes it as a request without an answer.
pub(super) struct Record {
    log: Arc<Log>,
    written: bool,
    pub(super) line: Line,
}

impl Record {
    /// Writes the record now; the caller sends the response head next.
    pub(super) fn write(mut self) {
        self.write_once();
    }

    fn write_once(&mut self) {
        if !self.written {
            self.written = true;
            self.line.end_us = boottime_us();
            self.log.append(&self.line);
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.write_once();
    }
}
