//! Streams: work that is carried out asynchronously and in order.
//!
//! In: operations with the device ranges already resolved. Out: bytes moved by the stream's worker thread, later than the call that asked
//! for them; with a bandwidth limit, not before the time that the copy takes on such a link. So a copy that nobody waited for has not
//! happened. An operation that fails leaves its code in the stream, and every later wait answers it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use crate::codes::{Answer, Code};
use crate::trace;
use crate::work::Work;

/// The bandwidth of one GPU in one direction, shared by all its streams.
#[derive(Debug)]
pub(crate) struct Link {
    bytes_per_second: u64,
    free_at: Mutex<Instant>,
}

impl Link {
    /// A link of this rate; 0 is unlimited.
    pub(crate) fn new(bytes_per_second: u64) -> Link {
        Link {
            bytes_per_second,
            free_at: Mutex::new(Instant::now()),
        }
    }

    /// Takes the link for `bytes` from `ready` on, or from when it is free; gives the time at which the copy is through.
    fn reserve(&self, bytes: usize, ready: Instant) -> Option<Instant> {
        if self.bytes_per_second == 0 {
            return None;
        }
        let nanoseconds = bytes as u128 * 1_000_000_000 / u128::from(self.bytes_per_second);
        let takes = Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX));
        let mut free_at = lock(&self.free_at);
        *free_at = ready.max(*free_at) + takes;
        Some(*free_at)
    }
}

/// A point in a stream that an event stands for.
#[derive(Debug)]
pub(crate) struct Mark {
    time: Mutex<Option<Instant>>,
}

impl Mark {
    pub(crate) fn new() -> Arc<Mark> {
        Arc::new(Mark {
            time: Mutex::new(None),
        })
    }

    /// Notes that the stream has come here.
    pub(crate) fn pass(&self) {
        *lock(&self.time) = Some(Instant::now());
    }

    /// When the stream came here; none if it has not yet.
    pub(crate) fn time(&self) -> Option<Instant> {
        *lock(&self.time)
    }
}

/// A place in a stream: it has been passed when everything up to `seq` is carried out.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) stream: Arc<Stream>,
    pub(crate) seq: u64,
}

impl Place {
    pub(crate) fn is_passed(&self) -> bool {
        lock(&self.stream.queue).done >= self.seq
    }
}

/// An operation as it is enqueued.
#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) work: Work,
    /// Places in other streams that must be passed first.
    pub(crate) after: Vec<Place>,
    pub(crate) link: Option<Arc<Link>>,
    pub(crate) trace: Option<trace::Copy>,
}

/// Whether a stream records what is enqueued instead of doing it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Capture {
    None,
    Active,
    Invalidated,
}

/// One CUDA stream.
#[derive(Debug)]
pub(crate) struct Stream {
    /// The number in handles and traces.
    pub(crate) id: u64,
    /// The device of its context, in this process.
    pub(crate) ordinal: usize,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    queue: Mutex<Queue>,
    changed: Condvar,
    has_worker: AtomicBool,
}

#[derive(Debug)]
struct Queue {
    waiting: VecDeque<(Instant, Operation)>,
    /// Number of the last operation enqueued.
    last: u64,
    /// Number of the last operation carried out.
    done: u64,
    error: Option<Code>,
    capture: Capture,
    closing: bool,
}

thread_local! {
    static IS_WORKER: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Whether this thread is a stream's worker, that is, a host function is calling: CUDA forbids driver calls there.
pub(crate) fn is_worker() -> bool {
    IS_WORKER.get()
}

/// A poisoned lock is taken all the same: no code here panics between two halves of a change.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Stream {
    pub(crate) fn new(id: u64, ordinal: usize, flags: u32, priority: i32) -> Arc<Stream> {
        let queue = Queue {
            waiting: VecDeque::new(),
            last: 0,
            done: 0,
            error: None,
            capture: Capture::None,
            closing: false,
        };
        Arc::new(Stream {
            id,
            ordinal,
            flags,
            priority,
            queue: Mutex::new(queue),
            changed: Condvar::new(),
            has_worker: AtomicBool::new(false),
        })
    }

    /// Adds an operation and gives its place. While the stream captures, the operation is recorded only, that is, dropped.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` if no worker thread can be started.
    pub(crate) fn enqueue(self: &Arc<Self>, operation: Operation) -> Answer<Place> {
        if !self.has_worker.swap(true, Ordering::AcqRel) {
            let stream = Arc::clone(self);
            if spawn("emucuda-stream", move || stream.work()).is_err() {
                self.has_worker.store(false, Ordering::Release);
                return Err(Code::OUT_OF_MEMORY);
            }
        }
        let mut queue = lock(&self.queue);
        match queue.capture {
            Capture::None => {
                queue.last += 1;
                queue.waiting.push_back((Instant::now(), operation));
                self.changed.notify_all();
            }
            Capture::Active => {}
            Capture::Invalidated => return Err(Code::STREAM_CAPTURE_INVALIDATED),
        }
        Ok(Place {
            stream: Arc::clone(self),
            seq: queue.last,
        })
    }

    /// Where the stream stands now.
    pub(crate) fn place(self: &Arc<Self>) -> Place {
        Place {
            stream: Arc::clone(self),
            seq: lock(&self.queue).last,
        }
    }

    /// Waits until everything up to `seq` is carried out. Returns false if that takes past `deadline`.
    pub(crate) fn wait(&self, seq: u64, deadline: Option<Instant>) -> bool {
        let mut queue = lock(&self.queue);
        while queue.done < seq {
            queue = match deadline.map(|d| d.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return false,
                Some(left) => {
                    self.changed
                        .wait_timeout(queue, left)
                        .unwrap_or_else(|e| e.into_inner())
                        .0
                }
                None => self.changed.wait(queue).unwrap_or_else(|e| e.into_inner()),
            };
        }
        true
    }

    /// Waits for everything enqueued so far and gives the stream's error, if one came up.
    pub(crate) fn synchronize(&self) -> Answer {
        let seq = lock(&self.queue).last;
        self.wait(seq, None);
        self.error()
    }

    /// `NOT_READY` while anything is waiting or under way.
    pub(crate) fn query(&self) -> Answer {
        let queue = lock(&self.queue);
        match queue.error {
            Some(code) => Err(code),
            None if queue.done < queue.last => Err(Code::NOT_READY),
            None => Ok(()),
        }
    }

    /// The code of the first operation that failed.
    pub(crate) fn error(&self) -> Answer {
        lock(&self.queue).error.map_or(Ok(()), Err)
    }

    pub(crate) fn capture(&self) -> Capture {
        lock(&self.queue).capture
    }

    pub(crate) fn set_capture(&self, capture: Capture) {
        lock(&self.queue).capture = capture;
    }

    /// Lets the worker end once everything enqueued is carried out.
    pub(crate) fn close(&self) {
        lock(&self.queue).closing = true;
        self.changed.notify_all();
    }

    fn work(self: Arc<Self>) {
        IS_WORKER.set(true);
        let mut ready = Instant::now();
        loop {
            let mut queue = lock(&self.queue);
            let (enqueued, operation) = loop {
                match queue.waiting.pop_front() {
                    Some(next) => break next,
                    None if queue.closing => return,
                    None => queue = self.changed.wait(queue).unwrap_or_else(|e| e.into_inner()),
                }
            };
            drop(queue);
            let (result, due) = carry_out(operation, ready.max(enqueued));
            ready = due.unwrap_or_else(Instant::now);
            let mut queue = lock(&self.queue);
            queue.done += 1;
            if let Err(code) = result {
                queue.error.get_or_insert(code);
            }
            drop(queue);
            self.changed.notify_all();
        }
    }
}

/// Does the work of one operation and drops it, so that nothing of it is held once it counts as done.
fn carry_out(operation: Operation, mut ready: Instant) -> (Answer, Option<Instant>) {
    for place in operation.after.iter().filter(|p| !p.is_passed()) {
        place.stream.wait(place.seq, None);
        ready = Instant::now();
    }
    let due = operation
        .link
        .as_ref()
        .and_then(|link| link.reserve(operation.work.len(), ready));
    if let Some(due) = due {
        thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    let result = operation.work.run();
    if let Some(copy) = &operation.trace {
        copy.done(result.err().unwrap_or(Code::SUCCESS));
    }
    (result, due)
}

/// Starts a thread that no signal of the program is ever delivered to.
///
/// # Errors
/// The system refuses another thread.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    // SAFETY: both sets are on this stack; the mask is put back before returning, and the new thread inherits the full one.
    unsafe {
        let mut all = std::mem::zeroed::<libc::sigset_t>();
        let mut old = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        let spawned = thread::Builder::new().name(name.to_owned()).spawn(body);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut());
        spawned.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::Backing;
    use crate::config::Vram;
    use crate::work::{HostAddress, Piece};

    fn piece(len: usize) -> Piece {
        let backing = Backing::create(1 << 30, Vram::Lazy, None).unwrap();
        backing.grow(len as u64).unwrap();
        Piece {
            backing: Arc::new(backing),
            offset: 0,
            len,
        }
    }

    fn operation(work: Work) -> Operation {
        Operation {
            work,
            after: Vec::new(),
            link: None,
            trace: None,
        }
    }

    fn bytes_of(piece: &Piece) -> Vec<u8> {
        let mut bytes = vec![0; piece.len];
        // SAFETY: the vector is as long as the piece.
        unsafe {
            piece
                .backing
                .read(piece.offset, bytes.as_mut_ptr(), bytes.len())
                .unwrap()
        };
        bytes
    }

    #[test]
    fn work_is_done_in_order_and_across_pieces() {
        let stream = Stream::new(1, 0, 0, 0);
        let (a, b, c) = (piece(3 << 20), piece(1000), piece((3 << 20) + 1000));
        let both = vec![a, b];
        stream
            .enqueue(operation(Work::Fill {
                to: both.clone(),
                pattern: [1, 2, 3, 4],
            }))
            .unwrap();
        stream
            .enqueue(operation(Work::Between {
                from: both,
                to: vec![c.clone()],
            }))
            .unwrap();
        stream.synchronize().unwrap();
        assert!(bytes_of(&c).chunks(4).all(|w| w == [1, 2, 3, 4]));
        stream
            .enqueue(operation(Work::Fill {
                to: vec![c.clone()],
                pattern: [0; 4],
            }))
            .unwrap();
        stream.synchronize().unwrap();
        assert!(bytes_of(&c).iter().all(|&b| b == 0));
    }

    #[test]
    fn a_limited_copy_lands_late_and_two_streams_share_the_link() {
        let link = Arc::new(Link::new(64 << 20));
        let (one, two) = (Stream::new(1, 0, 1, 0), Stream::new(2, 0, 1, 0));
        let (from, mut to) = (piece(16 << 20), vec![1_u8; 32 << 20]);
        let start = Instant::now();
        for (stream, half) in [(&one, 0), (&two, 16 << 20)] {
            let host = HostAddress(to[half..].as_mut_ptr().expose_provenance());
            let mut copy = operation(Work::ToHost {
                from: vec![from.clone()],
                to: host,
            });
            copy.link = Some(Arc::clone(&link));
            stream.enqueue(copy).unwrap();
        }
        assert_eq!(one.query(), Err(Code::NOT_READY));
        one.synchronize().unwrap();
        two.synchronize().unwrap();
        assert!(
            start.elapsed() >= Duration::from_millis(500),
            "{:?}",
            start.elapsed()
        );
        assert!(to.iter().all(|&b| b == 0));
    }

    #[test]
    fn a_stream_waits_for_a_place_in_another() {
        let (first, second) = (Stream::new(1, 0, 0, 0), Stream::new(2, 0, 0, 0));
        let (release, held) = std::sync::mpsc::channel::<()>();
        let place = first
            .enqueue(operation(Work::Callback(Box::new(move || {
                held.recv().unwrap()
            }))))
            .unwrap();
        let mark = Mark::new();
        let mut wait = operation(Work::Mark(Arc::clone(&mark)));
        wait.after.push(place);
        let place = second.enqueue(wait).unwrap();
        assert!(!second.wait(place.seq, Some(Instant::now() + Duration::from_millis(30))));
        assert_eq!(mark.time(), None);
        release.send(()).unwrap();
        second.synchronize().unwrap();
        assert!(mark.time().is_some());
    }

    #[test]
    fn a_failed_copy_is_told_at_every_wait() {
        let stream = Stream::new(1, 0, 0, 0);
        let from = piece(4096);
        stream
            .enqueue(operation(Work::ToHost {
                from: vec![from],
                to: HostAddress(16),
            }))
            .unwrap();
        assert_eq!(stream.synchronize(), Err(Code::ILLEGAL_ADDRESS));
        assert_eq!(stream.query(), Err(Code::ILLEGAL_ADDRESS));
    }

    #[test]
    fn a_capturing_stream_does_nothing() {
        let stream = Stream::new(1, 0, 0, 0);
        let to = piece(4);
        stream.set_capture(Capture::Active);
        stream
            .enqueue(operation(Work::Fill {
                to: vec![to.clone()],
                pattern: [9; 4],
            }))
            .unwrap();
        stream.set_capture(Capture::None);
        stream.synchronize().unwrap();
        assert_eq!(bytes_of(&to), [0; 4]);
    }
}
