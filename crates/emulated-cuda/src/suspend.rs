//! The restore thread: every change of this process's state is made here.
//!
//! In: requests from savers, in the order of the kernel's signal queue. Out: the new state, the memory released or brought back, and one
//! answer per request. What exists if the saver dies: before the request nothing has changed; after it the change is carried out whole, and
//! the state tells. What exists if this process dies: nothing.
//!
//! A checkpointed process holds nothing of the driver: no file, no mapping, no lock; only parked threads and private memory.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Instant;

use crate::backing::Backing;
use crate::codes::{Answer, Code};
use crate::config::Vram;
use crate::control::{self, CONTROL, Part, Request, SIGNAL, State};
use crate::driver::{Driver, Gpu};
use crate::gate::Gate;
use crate::stream;

/// The gate of this process.
pub(crate) static GATE: Gate = Gate::new();

/// The contents of a GPU in private memory: stretches that are not zero, with their offset in the memory file.
#[derive(Debug, Default)]
pub(crate) struct HostCopy(Vec<(u64, Vec<u8>)>);

/// The longest stretch of a host copy in one piece, in bytes.
const STRETCH: u64 = 64 << 20;

/// Starts the restore thread and returns when it takes requests.
///
/// # Errors
/// `OUT_OF_MEMORY` if the system refuses another thread.
pub(crate) fn start(driver: &'static Driver) -> Answer {
    let (ready, is_ready) = mpsc::channel();
    let body = move || {
        // SAFETY: gettid has no preconditions.
        CONTROL
            .header
            .tid
            .store(unsafe { libc::gettid() }, Ordering::Release);
        // The receiver only goes away with the whole process.
        let _ = ready.send(());
        let mut thread = RestoreThread {
            driver,
            tables: Vec::new(),
        };
        loop {
            if let Some((request, token, argument)) = next_request() {
                let result = thread.carry_out(request, argument);
                CONTROL.answer(token, result.err().unwrap_or(Code::SUCCESS));
            }
        }
    };
    stream::spawn("emucuda-restore", body).map_err(|_refused| Code::OUT_OF_MEMORY)?;
    is_ready.recv().map_err(|_gone| Code::OUT_OF_MEMORY)
}

/// Waits for a signal; none if it is no request.
fn next_request() -> Option<(Request, u32, u32)> {
    // SAFETY: both structs are on this stack and plain data; the signal is blocked in this thread, as `spawn` blocks them all.
    let (signal, info) = unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        let mut info = std::mem::zeroed::<libc::siginfo_t>();
        libc::sigaddset(&raw mut set, SIGNAL);
        (libc::sigwaitinfo(&raw const set, &raw mut info), info)
    };
    if signal < 0 {
        // CRIU and debuggers interrupt the wait; anything else cannot happen with these arguments.
        debug_assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EINTR));
        return None;
    }
    // SAFETY: the code says that the signal was queued with a value.
    let value = (info.si_code == libc::SI_QUEUE)
        .then(|| unsafe { info.si_value() }.sival_ptr.addr() as u64)?;
    #[expect(clippy::cast_possible_truncation, reason = "the two halves of 64 bits")]
    Some((
        Request::from_number(info.si_errno)?,
        (value >> 32) as u32,
        value as u32,
    ))
}

struct RestoreThread {
    driver: &'static Driver,
    /// The tables that savers read during an operation; kept here while one is under way.
    tables: Vec<Box<[Part]>>,
}

impl RestoreThread {
    fn carry_out(&mut self, request: Request, argument: u32) -> Answer {
        match (request, CONTROL.state()) {
            (Request::Lock, State::Running) => self.lock(argument),
            (Request::Unlock, State::Locked) => {
                CONTROL.set_state(State::Running);
                GATE.unlock();
                Ok(())
            }
            (Request::SaveToHost, State::Locked) => self.save_to_host(),
            (Request::RestoreFromHost, State::Checkpointed) => self.restore_from_host(),
            (Request::BeginCheckpoint, State::Locked) => self.begin(argument, State::Checkpointing),
            (Request::BeginRestore, State::Checkpointed) => {
                self.bring_back(false)
                    .inspect_err(|_| CONTROL.set_state(State::Failed))?;
                self.begin(argument, State::Restoring)
            }
            (Request::Complete, State::Checkpointing) if self.is_operation(argument) => {
                self.release();
                CONTROL.set_state(State::Checkpointed);
                Ok(())
            }
            (Request::Complete, State::Restoring) if self.is_operation(argument) => {
                self.tables.clear();
                CONTROL.set_state(State::Locked);
                Ok(())
            }
            (Request::Fail, State::Checkpointed) => {
                CONTROL.set_state(State::Failed);
                Ok(())
            }
            _ => Err(Code::ILLEGAL_STATE),
        }
    }

    fn is_operation(&self, number: u32) -> bool {
        CONTROL.header.operation.load(Ordering::Relaxed) == number
    }

    /// Stops new calls, waits for those under way and for the work on all streams.
    fn lock(&self, deadline: u32) -> Answer {
        let deadline = (deadline != 0).then(|| Instant::now() + control::left_until(deadline));
        if deadline.is_some_and(|d| d <= Instant::now()) || !GATE.lock(deadline) {
            return Err(Code::NOT_READY);
        }
        if !self.driver.drain(deadline) {
            GATE.unlock();
            return Err(Code::NOT_READY);
        }
        CONTROL.set_state(State::Locked);
        Ok(())
    }

    /// Shows savers where each GPU's memory is.
    fn begin(&mut self, number: u32, state: State) -> Answer {
        let model = self.driver.model();
        self.tables.clear();
        for (gpu, slot) in model.gpus.iter().zip(&CONTROL.header.gpus) {
            let table: Box<[Part]> = gpu
                .space
                .iter()
                .map(|a| Part {
                    offset: a.offset,
                    len: a.span,
                })
                .collect();
            slot.fd.store(
                gpu.backing.as_ref().map_or(-1, |b| b.fd()),
                Ordering::Relaxed,
            );
            slot.file_len.store(
                gpu.backing.as_ref().map_or(0, |b| b.len()),
                Ordering::Relaxed,
            );
            slot.parts
                .store(table.as_ptr().expose_provenance() as u64, Ordering::Relaxed);
            slot.part_count.store(table.len() as u64, Ordering::Relaxed);
            self.tables.push(table);
        }
        CONTROL.header.operation.store(number, Ordering::Relaxed);
        CONTROL.set_state(state);
        Ok(())
    }

    /// Gives all device memory up: truncated first, since a forked process may still hold the file.
    fn release(&mut self) {
        let mut model = self.driver.model();
        let is_resident = self.driver.config.vram == Vram::Resident;
        for ordinal in 0..model.gpus.len() {
            if !is_resident && let Some(backing) = model.gpus[ordinal].backing.take() {
                backing.truncate();
            }
            model.publish(ordinal);
        }
        self.tables.clear();
    }

    fn save_to_host(&mut self) -> Answer {
        let mut model = self.driver.model();
        let copies: Answer<Vec<HostCopy>> = model.gpus.iter().map(HostCopy::of).collect();
        for (gpu, copy) in model.gpus.iter_mut().zip(copies?) {
            gpu.host_copy = Some(copy);
        }
        drop(model);
        self.release();
        CONTROL.header.in_host_memory.store(1, Ordering::Relaxed);
        CONTROL.set_state(State::Checkpointed);
        Ok(())
    }

    fn restore_from_host(&mut self) -> Answer {
        if CONTROL.header.in_host_memory.load(Ordering::Relaxed) == 0 {
            return Err(Code::INVALID_VALUE);
        }
        self.bring_back(true)
            .inspect_err(|_| CONTROL.set_state(State::Failed))?;
        CONTROL.set_state(State::Locked);
        Ok(())
    }

    /// Makes the memory of every GPU anew, at the same addresses, with the contents of the host copy or with none.
    fn bring_back(&mut self, with_contents: bool) -> Answer {
        let mut model = self.driver.model();
        for ordinal in 0..model.gpus.len() {
            let gpu = &mut model.gpus[ordinal];
            let copy = gpu.host_copy.take();
            if gpu.space.used() > 0 {
                let backing =
                    gpu.ensure_backing(self.driver.window(ordinal), self.driver.config)?;
                backing.grow(gpu.space.end())?;
                if with_contents && let Some(copy) = copy {
                    copy.put_into(&backing)?;
                }
            }
            model.publish(ordinal);
        }
        CONTROL.header.in_host_memory.store(0, Ordering::Relaxed);
        Ok(())
    }
}

impl HostCopy {
    /// Copies what a GPU's memory file holds; holes, and pages that are present but all zero, cost nothing.
    fn of(gpu: &Gpu) -> Answer<HostCopy> {
        let mut copy = HostCopy::default();
        let Some(backing) = &gpu.backing else {
            return Ok(copy);
        };
        let (mut at, end) = (0, gpu.space.end());
        let mut bytes = Vec::new();
        while let Some((start, stop)) = backing.next_data(at, end) {
            let stop = stop.min(start + STRETCH);
            let len = usize::try_from(stop - start).map_err(|_too_large| Code::OUT_OF_MEMORY)?;
            let missing = len.saturating_sub(bytes.len());
            bytes
                .try_reserve_exact(missing)
                .map_err(|_full| Code::OUT_OF_MEMORY)?;
            bytes.resize(len, 0);
            // SAFETY: the vector has `len` bytes.
            unsafe { backing.read(start, bytes.as_mut_ptr(), len)? };
            if !is_zero(&bytes) {
                copy.0.push((start, std::mem::take(&mut bytes)));
            }
            at = stop;
        }
        Ok(copy)
    }

    fn put_into(self, backing: &Arc<Backing>) -> Answer {
        self.0.into_iter().try_for_each(|(offset, bytes)| {
            // SAFETY: the vector has as many bytes as it says.
            unsafe { backing.write(offset, bytes.as_ptr(), bytes.len()) }
        })
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    const ZEROS: [u8; 4096] = [0; 4096];
    let mut blocks = bytes.chunks(ZEROS.len());
    blocks.all(|block| *block == ZEROS[..block.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_copy_brings_the_bytes_back() {
        let mut gpu = Gpu::default();
        let window = 1 << 30;
        let first = gpu.space.alloc(100, 1, window).unwrap();
        let second = gpu.space.alloc(1 << 20, 1, window).unwrap();
        let backing = Arc::new(Backing::create(window, Vram::Lazy, None).unwrap());
        backing.grow(gpu.space.end()).unwrap();
        let (a, b) = ([1_u8; 100], [2_u8; 10]);
        // SAFETY: both ranges are arrays on this stack.
        unsafe {
            backing.write(first.offset, a.as_ptr(), a.len()).unwrap();
            backing
                .write(second.offset + 700_000, b.as_ptr(), b.len())
                .unwrap();
        }
        gpu.backing = Some(Arc::clone(&backing));
        let copy = HostCopy::of(&gpu).unwrap();
        assert!(copy.0.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() <= 2 * 4096);
        backing.truncate();
        let new = Arc::new(Backing::create(window, Vram::Lazy, None).unwrap());
        new.grow(gpu.space.end()).unwrap();
        copy.put_into(&new).unwrap();
        let mut back = [0_u8; 10];
        // SAFETY: an array on this stack.
        unsafe {
            new.read(second.offset + 700_000, back.as_mut_ptr(), back.len())
                .unwrap()
        };
        assert_eq!(back, b);
    }
}
