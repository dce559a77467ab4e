//! The gate before every driver call: one atomic word, a locked bit and the number of calls under way.
//!
//! In: calls that enter and leave, and the restore thread that locks and unlocks. The lock stops new calls at once and waits for those
//! under way; it can give up at a deadline, after which the gate is as before. The word lives in private memory and is waited on with a
//! private futex, so nothing outside the process holds a part of it: a saver that dies cannot leave the gate half locked.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const LOCKED: u32 = 1 << 31;

/// See the module's text.
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct Gate(AtomicU32);

/// A call under way; leaving is dropping it.
#[derive(Debug)]
pub(crate) struct Passage<'a>(&'a Gate);

impl Gate {
    pub(crate) const fn new() -> Self {
        Gate(AtomicU32::new(0))
    }

    /// Enters, after waiting for as long as the gate is locked.
    pub(crate) fn enter(&self) -> Passage<'_> {
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            if word & LOCKED != 0 {
                wait(&self.0, word, None);
                word = self.0.load(Ordering::Relaxed);
                continue;
            }
            match self
                .0
                .compare_exchange_weak(word, word + 1, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return Passage(self),
                Err(now) => word = now,
            }
        }
    }

    /// Stops new calls and waits until none is under way. Returns false, with the gate open again, if that takes past `deadline`.
    pub(crate) fn lock(&self, deadline: Option<Instant>) -> bool {
        let mut word = self.0.fetch_or(LOCKED, Ordering::Acquire) | LOCKED;
        while word != LOCKED {
            let left = match deadline.map(|d| d.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => {
                    self.unlock();
                    return false;
                }
                left => left,
            };
            wait(&self.0, word, left);
            word = self.0.load(Ordering::Acquire);
        }
        true
    }

    /// Opens the gate and wakes the calls that wait before it.
    pub(crate) fn unlock(&self) {
        self.0.fetch_and(!LOCKED, Ordering::Release);
        wake_all(&self.0);
    }
}

impl Drop for Passage<'_> {
    fn drop(&mut self) {
        let before = self.0.0.fetch_sub(1, Ordering::Release);
        if before & LOCKED != 0 {
            wake_all(&self.0.0);
        }
    }
}

fn wait(word: &AtomicU32, value: u32, timeout: Option<Duration>) {
    let timeout = timeout.map(|t| libc::timespec {
        tv_sec: libc::time_t::try_from(t.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: t.subsec_nanos().into(),
    });
    let timeout_ptr = timeout
        .as_ref()
        .map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the word outlives the call, the timeout is null or a timespec on this stack; a spurious return is handled by the caller's loop.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
            value,
            timeout_ptr,
        );
    }
}

fn wake_all(word: &AtomicU32) {
    // SAFETY: the word outlives the call; waking has no other effect on memory.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
            i32::MAX,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::mpsc;
    use std::thread;

    #[test]
    fn lock_waits_for_the_calls_under_way_and_stops_new_ones() {
        let gate = Arc::new(Gate::new());
        let passage = gate.enter();
        let (entered, was_entered) = mpsc::channel();
        let locker = thread::spawn({
            let gate = Arc::clone(&gate);
            move || gate.lock(None)
        });
        while gate.0.load(Ordering::Relaxed) & LOCKED == 0 {
            thread::yield_now();
        }
        let late = thread::spawn({
            let gate = Arc::clone(&gate);
            move || {
                let _passage = gate.enter();
                entered.send(()).unwrap();
            }
        });
        assert!(!locker.is_finished());
        drop(passage);
        assert!(locker.join().unwrap());
        assert!(was_entered.recv_timeout(Duration::from_millis(50)).is_err());
        gate.unlock();
        was_entered.recv().unwrap();
        late.join().unwrap();
        assert_eq!(gate.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_lock_past_its_deadline_leaves_the_gate_open() {
        let gate = Gate::new();
        let passage = gate.enter();
        assert!(!gate.lock(Some(Instant::now() + Duration::from_millis(20))));
        drop(gate.enter());
        drop(passage);
        assert!(gate.lock(Some(Instant::now())));
        assert_eq!(gate.0.load(Ordering::Relaxed), LOCKED);
    }

    #[test]
    fn many_calls_and_locks_end_with_an_empty_gate() {
        let gate = Gate::new();
        thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| (0..5_000).for_each(|_| drop(gate.enter())));
            }
            for _ in 0..200 {
                assert!(gate.lock(None));
                assert_eq!(gate.0.load(Ordering::Relaxed), LOCKED);
                gate.unlock();
            }
        });
        assert_eq!(gate.0.load(Ordering::Relaxed), 0);
    }
}
