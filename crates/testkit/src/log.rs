//! A server's request log: one JSON object per line, in the order in which requests ended.
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

/// Microseconds of CLOCK_BOOTTIME, the clock that the emulated driver's call trace uses too.
pub(crate) fn boottime_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let secs = u64::try_from(now.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
    secs * 1_000_000 + nanos / 1_000
}

/// Where records go.
pub(crate) struct Log {
    file: Option<Mutex<File>>,
    next_seq: AtomicU64,
    complained: AtomicBool,
}

impl Log {
    /// Opens `path` for appending, or makes a log that keeps nothing.
    pub(crate) fn open(path: Option<&Path>) -> io::Result<Self> {
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
    pub(crate) fn begin<L: Serialize>(self: &Arc<Self>, line: L) -> Record<L> {
        Record {
            log: Arc::clone(self),
            written: false,
            seq: self.next_seq.fetch_add(1, Ordering::Relaxed),
            t_us: boottime_us(),
            line,
        }
    }

    #[expect(
        clippy::print_stderr,
        reason = "a test server's only place to complain"
    )]
    fn append<L: Serialize>(&self, line: &Stamped<'_, L>) {
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
            eprintln!("testkit: the request log cannot be written: {error}");
        }
    }
}

/// One line of the log; `docs/testkit.md` says what each member means.
#[derive(Serialize)]
struct Stamped<'a, L> {
    seq: u64,
    t_us: u64,
    end_us: u64,
    #[serde(flatten)]
    line: &'a L,
}

/// A record under way. Dropping it unwritten writes it as a request without an answer.
pub(crate) struct Record<L: Serialize> {
    log: Arc<Log>,
    written: bool,
    seq: u64,
    t_us: u64,
    /// What this server says of the request.
    pub(crate) line: L,
}

impl<L: Serialize> Record<L> {
    /// Writes the record now; the caller sends the response head next.
    pub(crate) fn write(mut self) {
        self.write_once();
    }

    fn write_once(&mut self) {
        if !self.written {
            self.written = true;
            self.log.append(&Stamped {
                seq: self.seq,
                t_us: self.t_us,
                end_us: boottime_us(),
                line: &self.line,
            });
        }
    }
}

impl<L: Serialize> Drop for Record<L> {
    fn drop(&mut self) {
        self.write_once();
    }
}
