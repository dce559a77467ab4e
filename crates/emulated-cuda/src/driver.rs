//! The driver of this process: contexts, memory, streams and events, behind one lock.
//!
//! In: calls from the facade (`api`), already through the gate. Out: answers, work on streams, and the numbers in the control block that
//! other processes look at. The restore thread (`suspend`) changes the same model while the gate is locked.
//! What can fail: what the driver API documents per call; see `docs/emulated-driver.md` for codes that are assumed.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::thread;
use std::time::Instant;

use crate::backing::Backing;
use crate::codes::{Answer, Code};
use crate::config::{self, Config, GPUS_MAX};
use crate::control::{self, CONTROL};
use crate::extent::{Extent, Extents, Operation};
use crate::remote;
use crate::space::{Allocation, Space};
use crate::stream::{self, Capture, Link, Mark, Piece, Place, Stream, Work};
use crate::suspend::{self, HostCopy};
use crate::trace;

/// Device addresses of GPU n start at this plus n windows. Not canonical on any processor: a host access to one faults, as on hardware.
const WINDOW_BASE: u64 = 0x0a00_0000_0000_0000;
const WINDOW_SHIFT: u32 = 44;
/// A GPU's window is this many times its memory: real drivers map pages, so fragmentation does not make an allocation fail.
const WINDOW_FACTOR: u64 = 4;

/// Handles are numbers, looked up in tables, in ranges that no pointer has: a wrong one is refused instead of followed.
const STREAM_TAG: u64 = 0x0510_0000_0000_0000;
const EVENT_TAG: u64 = 0x0520_0000_0000_0000;
const CONTEXT_TAG: u64 = 0x0530_0000_0000_0000;
const GRAPH_TAG: u64 = 0x0550_0000_0000_0000;

/// `CU_STREAM_NON_BLOCKING`.
pub(crate) const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub(crate) const DISABLE_TIMING: u32 = 2;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) config: &'static Config,
    links: Vec<Links>,
    next_id: AtomicU64,
    model: Mutex<Model>,
}

#[derive(Debug)]
struct Links {
    to_host: Arc<Link>,
    to_device: Arc<Link>,
}

/// What the lock protects.
#[derive(Debug, Default)]
pub(crate) struct Model {
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) extents: Extents,
    streams: HashMap<u64, Arc<Stream>>,
    /// Every stream whose worker may still have work, destroyed ones included.
    workers: Vec<Weak<Stream>>,
    events: HashMap<u64, Event>,
    graphs: Vec<u64>,
    /// Page-locked host memory: start to length and kind.
    host: BTreeMap<usize, HostRange>,
}

/// One GPU of this process.
#[derive(Debug, Default)]
pub(crate) struct Gpu {
    pub(crate) space: Space,
    /// None before the first allocation and while checkpointed.
    pub(crate) backing: Option<Arc<Backing>>,
    /// The contents after a checkpoint to host memory.
    pub(crate) host_copy: Option<HostCopy>,
    context: Option<Context>,
    generation: u64,
}

#[derive(Debug)]
struct Context {
    retained: u32,
    flags: u32,
    legacy: Arc<Stream>,
    per_thread: Arc<Stream>,
}

#[derive(Debug)]
struct Event {
    flags: u32,
    recorded: Option<(Arc<Mark>, Place)>,
}

#[derive(Debug, Clone, Copy)]
struct HostRange {
    len: usize,
    /// Allocated by the driver, not registered.
    is_ours: bool,
    flags: u32,
}

/// What a device address points to.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Pointee {
    Allocation {
        ordinal: usize,
        base: u64,
        allocation: Allocation,
    },
    Extent {
        base: u64,
        len: u64,
    },
    Host {
        base: usize,
        len: usize,
    },
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

/// The driver after `cuInit`; `NOT_INITIALIZED` before, and in a process forked from one that had called it.
pub(crate) fn get() -> Answer<&'static Driver> {
    let driver = DRIVER.get().ok_or(Code::NOT_INITIALIZED)?;
    let pid = i32::try_from(std::process::id()).unwrap_or(0);
    if CONTROL.header.pid.load(Ordering::Relaxed) == pid {
        Ok(driver)
    } else {
        Err(Code::NOT_INITIALIZED)
    }
}

/// `cuInit`. A second call changes nothing.
pub(crate) fn init() -> Answer {
    static INIT: Mutex<()> = Mutex::new(());
    let _once = stream::lock(&INIT);
    if DRIVER.get().is_some() {
        return get().map(drop);
    }
    let config = config::get().map_err(|line| {
        #[expect(
            clippy::print_stderr,
            reason = "a wrong variable must be told, and a library has no other way"
        )]
        {
            eprintln!("emulated CUDA driver: {line}");
        }
        Code::INVALID_VALUE
    })?;
    if config.gpus.is_empty() {
        return Err(Code::NO_DEVICE);
    }
    thread::sleep(config.init);
    let links = || Links {
        to_host: Arc::new(Link::new(config.d2h)),
        to_device: Arc::new(Link::new(config.h2d)),
    };
    let header = &CONTROL.header;
    for (slot, gpu) in header.gpus.iter().zip(&config.gpus) {
        slot.set_uuid(gpu.uuid);
        slot.chip.store(chip(config, &gpu.name), Ordering::Relaxed);
    }
    header.gpu_count.store(
        u32::try_from(config.gpus.len()).unwrap_or(0),
        Ordering::Relaxed,
    );
    header.pid.store(
        i32::try_from(std::process::id()).unwrap_or(0),
        Ordering::Relaxed,
    );
    let driver = DRIVER.get_or_init(|| Driver {
        config,
        links: config.gpus.iter().map(|_| links()).collect(),
        next_id: AtomicU64::new(1),
        model: Mutex::new(Model {
            gpus: config.gpus.iter().map(|_| Gpu::default()).collect(),
            ..Model::default()
        }),
    });
    suspend::start(driver)?;
    // SAFETY: changes only who may trace this process: any saver of the same user, where Yama would ask for a parent.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
    header.magic.store(control::MAGIC, Ordering::Release);
    Ok(())
}

/// Digest of what makes two GPUs the same chip.
pub(crate) fn chip(config: &Config, name: &str) -> u64 {
    let cc = u64::from(config.cc.0) << 32 | u64::from(config.cc.1);
    name.bytes().fold(config::mix(cc), |digest, byte| {
        config::mix(digest ^ u64::from(byte))
    })
}

impl Driver {
    pub(crate) fn model(&self) -> MutexGuard<'_, Model> {
        stream::lock(&self.model)
    }

    pub(crate) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// The ordinal of a `CUdevice`.
    pub(crate) fn ordinal(&self, device: i32) -> Answer<usize> {
        let ordinal = usize::try_from(device).map_err(|_negative| Code::INVALID_DEVICE)?;
        if ordinal < self.config.gpus.len() {
            Ok(ordinal)
        } else {
            Err(Code::INVALID_DEVICE)
        }
    }

    /// The UUID of a GPU: as configured, or where the last restore put it.
    pub(crate) fn uuid(&self, ordinal: usize) -> [u8; 16] {
        CONTROL.header.gpus[ordinal].uuid()
    }

    /// The first byte after a GPU's memory window, from its start.
    pub(crate) fn window(&self, ordinal: usize) -> u64 {
        self.config.gpus[ordinal].memory * WINDOW_FACTOR
    }

    // Contexts.

    /// Takes a reference to the primary context and gives its handle.
    pub(crate) fn retain_context(&self, ordinal: usize) -> u64 {
        let mut model = self.model();
        let gpu = &mut model.gpus[ordinal];
        if let Some(context) = &mut gpu.context {
            context.retained += 1;
        } else {
            let make = |flags| Stream::new(self.next_id(), ordinal, flags, 0);
            let context = Context {
                retained: 1,
                flags: 0,
                legacy: make(0),
                per_thread: make(0),
            };
            let streams = [
                Arc::downgrade(&context.legacy),
                Arc::downgrade(&context.per_thread),
            ];
            gpu.generation += 1;
            gpu.context = Some(context);
            model.workers.extend(streams);
            model.publish(ordinal);
        }
        context_handle(ordinal, model.gpus[ordinal].generation)
    }

    /// Gives a reference back; with the last one everything of the context goes: memory, streams, extents mapped here.
    pub(crate) fn release_context(&self, ordinal: usize) -> Answer {
        let mut model = self.model();
        let context = model.gpus[ordinal]
            .context
            .as_mut()
            .ok_or(Code::INVALID_CONTEXT)?;
        context.retained -= 1;
        if context.retained == 0 {
            self.destroy_context(model, ordinal)
        } else {
            Ok(())
        }
    }

    /// Destroys the primary context however often it is retained.
    pub(crate) fn reset_context(&self, ordinal: usize) -> Answer {
        let model = self.model();
        if model.gpus[ordinal].context.is_some() {
            self.destroy_context(model, ordinal)
        } else {
            Ok(())
        }
    }

    fn destroy_context(&self, model: MutexGuard<'_, Model>, ordinal: usize) -> Answer {
        drop(model);
        self.synchronize_device(ordinal)?;
        let mut model = self.model();
        if let Some(context) = model.gpus[ordinal].context.take() {
            context.legacy.close();
            context.per_thread.close();
        }
        model.streams.retain(|_, stream| {
            let stays = stream.ordinal != ordinal;
            if !stays {
                stream.close();
            }
            stays
        });
        let gpu = &mut model.gpus[ordinal];
        gpu.space.clear();
        gpu.backing = None;
        gpu.host_copy = None;
        model.extents.drop_device(ordinal);
        model.publish(ordinal);
        Ok(())
    }

    /// Whether the primary context exists, and its flags.
    pub(crate) fn context_state(&self, ordinal: usize) -> (bool, u32) {
        let model = self.model();
        let context = model.gpus[ordinal].context.as_ref();
        (context.is_some(), context.map_or(0, |c| c.flags))
    }

    /// Sets the flags of an existing primary context; nothing here depends on them.
    pub(crate) fn set_context_flags(&self, ordinal: usize, flags: u32) {
        if let Some(context) = &mut self.model().gpus[ordinal].context {
            context.flags = flags;
        }
    }

    /// The handle of a GPU's primary context, if it exists.
    pub(crate) fn context_of(&self, ordinal: usize) -> Option<u64> {
        let model = self.model();
        let gpu = &model.gpus[ordinal];
        gpu.context
            .as_ref()
            .map(|_| context_handle(ordinal, gpu.generation))
    }

    /// The GPU of a context handle, whether or not the context still exists.
    ///
    /// # Errors
    /// `INVALID_CONTEXT` for a number that was never a context.
    pub(crate) fn context_gpu(&self, handle: u64) -> Answer<usize> {
        let ordinal = usize::try_from(handle & 0xff).unwrap_or(usize::MAX);
        if handle & !0xffff_ffff_ffff == CONTEXT_TAG && ordinal < self.config.gpus.len() {
            Ok(ordinal)
        } else {
            Err(Code::INVALID_CONTEXT)
        }
    }

    /// The GPU of a context that exists.
    ///
    /// # Errors
    /// As [`Self::context_gpu`], and `CONTEXT_IS_DESTROYED`.
    pub(crate) fn context_ordinal(&self, handle: u64) -> Answer<usize> {
        let ordinal = self.context_gpu(handle)?;
        if self.context_of(ordinal) == Some(handle) {
            Ok(ordinal)
        } else {
            Err(Code::CONTEXT_IS_DESTROYED)
        }
    }

    // Memory.

    /// Allocates device memory and gives its address.
    ///
    /// # Errors
    /// `INVALID_VALUE` for no bytes; `OUT_OF_MEMORY` if the GPU has not as many left, counting every process on the node.
    pub(crate) fn alloc(&self, ordinal: usize, len: u64) -> Answer<u64> {
        if len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let (free, _) = self.memory(ordinal);
        let granularity = self.config.granularity;
        if len
            .checked_next_multiple_of(granularity)
            .is_none_or(|span| span > free)
        {
            return Err(Code::OUT_OF_MEMORY);
        }
        let window = self.window(ordinal);
        let mut model = self.model();
        let gpu = &mut model.gpus[ordinal];
        let allocation = gpu
            .space
            .alloc(len, granularity, window)
            .ok_or(Code::OUT_OF_MEMORY)?;
        let grown = gpu
            .ensure_backing(window, self.config)
            .and_then(|backing| backing.grow(gpu.space.end()));
        if let Err(code) = grown {
            gpu.space.free(allocation.offset);
            return Err(code);
        }
        model.publish(ordinal);
        Ok(window_start(ordinal) + allocation.offset)
    }

    /// Frees the allocation that starts at `address`, after the work that may use it.
    pub(crate) fn free(&self, address: u64) -> Answer {
        let (ordinal, offset) = self.place_of(address).ok_or(Code::INVALID_VALUE)?;
        self.synchronize_device(ordinal)?;
        let mut model = self.model();
        let gpu = &mut model.gpus[ordinal];
        let allocation = gpu.space.free(offset).ok_or(Code::INVALID_VALUE)?;
        if let Some(backing) = &gpu.backing {
            backing.discard(allocation.offset, allocation.span)?;
        }
        model.publish(ordinal);
        Ok(())
    }

    /// Free and total bytes of a GPU, every process on the node counted.
    pub(crate) fn memory(&self, ordinal: usize) -> (u64, u64) {
        let total = self.config.gpus[ordinal].memory;
        (
            total.saturating_sub(remote::resident_bytes(self.uuid(ordinal), None)),
            total,
        )
    }

    fn place_of(&self, address: u64) -> Option<(usize, u64)> {
        let offset = address.checked_sub(WINDOW_BASE)?;
        let ordinal = usize::try_from(offset >> WINDOW_SHIFT).ok()?;
        (ordinal < self.config.gpus.len()).then_some((ordinal, offset & ((1 << WINDOW_SHIFT) - 1)))
    }

    /// What an address points to.
    pub(crate) fn pointee(&self, address: u64) -> Answer<Pointee> {
        let model = self.model();
        if let Some((ordinal, offset)) = self.place_of(address) {
            let allocation = model.gpus[ordinal]
                .space
                .find(offset)
                .ok_or(Code::INVALID_VALUE)?;
            let base = window_start(ordinal) + allocation.offset;
            return Ok(Pointee::Allocation {
                ordinal,
                base,
                allocation,
            });
        }
        if let Some(extent) = model.extents.find(address) {
            return Ok(Pointee::Extent {
                base: extent.base,
                len: extent.len,
            });
        }
        let host = usize::try_from(address).map_err(|_too_large| Code::INVALID_VALUE)?;
        let (&base, range) = model
            .host
            .range(..=host)
            .next_back()
            .ok_or(Code::INVALID_VALUE)?;
        if host - base < range.len {
            Ok(Pointee::Host {
                base,
                len: range.len,
            })
        } else {
            Err(Code::INVALID_VALUE)
        }
    }

    /// The device memory of a range, for work on a stream of GPU `stream_ordinal`, and where it lies in an extent.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a range that is not inside one allocation or extent; `INVALID_CONTEXT` for an extent of another GPU.
    pub(crate) fn resolve(
        &self,
        address: u64,
        len: usize,
        stream_ordinal: usize,
    ) -> Answer<(Vec<Piece>, Option<u64>)> {
        let model = self.model();
        if let Some((ordinal, offset)) = self.place_of(address) {
            let gpu = &model.gpus[ordinal];
            let allocation = gpu.space.find(offset).ok_or(Code::INVALID_VALUE)?;
            let inside = offset - allocation.offset;
            if inside
                .checked_add(len as u64)
                .is_none_or(|end| end > allocation.len)
            {
                return Err(Code::INVALID_VALUE);
            }
            let backing = gpu.backing.clone().ok_or(Code::INVALID_VALUE)?;
            return Ok((
                vec![Piece {
                    backing,
                    offset,
                    len,
                }],
                None,
            ));
        }
        let extent: &Extent = model.extents.find(address).ok_or(Code::INVALID_VALUE)?;
        let pieces = extent
            .pieces(address - extent.base, len)
            .ok_or(Code::INVALID_VALUE)?;
        if extent.stream.ordinal != stream_ordinal {
            return Err(Code::INVALID_CONTEXT);
        }
        Ok((pieces, Some(address - extent.base)))
    }

    // Page-locked host memory.

    pub(crate) fn add_host(&self, start: usize, len: usize, flags: u32, is_ours: bool) -> Answer {
        let end = start
            .checked_add(len)
            .filter(|_| len > 0)
            .ok_or(Code::INVALID_VALUE)?;
        let mut model = self.model();
        if let Some((&base, range)) = model.host.range(..end).next_back()
            && base + range.len > start
        {
            return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        model.host.insert(
            start,
            HostRange {
                len,
                is_ours,
                flags,
            },
        );
        Ok(())
    }

    /// Forgets a range by its start and gives its length; `is_ours` must be as it was added.
    pub(crate) fn remove_host(&self, start: usize, is_ours: bool) -> Option<usize> {
        let mut model = self.model();
        model.host.get(&start).filter(|r| r.is_ours == is_ours)?;
        model.host.remove(&start).map(|r| r.len)
    }

    /// The flags of the page-locked range that holds this byte.
    pub(crate) fn host_flags(&self, address: usize) -> Option<u32> {
        let model = self.model();
        let (&base, range) = model.host.range(..=address).next_back()?;
        (address - base < range.len).then_some(range.flags)
    }

    /// Whether a host range is page-locked from end to end, so that copies of it need not wait.
    pub(crate) fn is_page_locked(&self, start: usize, len: usize) -> bool {
        let model = self.model();
        let mut at = start;
        while at < start + len {
            match model.host.range(..=at).next_back() {
                Some((&base, range)) if at - base < range.len => at = base + range.len,
                _ => return false,
            }
        }
        true
    }

    // Streams.

    pub(crate) fn create_stream(&self, ordinal: usize, flags: u32, priority: i32) -> Arc<Stream> {
        let stream = Stream::new(self.next_id(), ordinal, flags, priority);
        let mut model = self.model();
        model.workers.retain(|s| s.strong_count() > 0);
        model.workers.push(Arc::downgrade(&stream));
        model.streams.insert(stream.id, Arc::clone(&stream));
        stream
    }

    /// The stream of a handle; the handles 0 and 1 are the legacy default stream and 2 the per-thread one of the context `ordinal`.
    pub(crate) fn stream(&self, handle: u64, ordinal: Answer<usize>) -> Answer<Arc<Stream>> {
        let model = self.model();
        if handle > 2 {
            let id = untag(handle, STREAM_TAG).ok_or(Code::INVALID_HANDLE)?;
            return model.streams.get(&id).cloned().ok_or(Code::INVALID_HANDLE);
        }
        let context = model.gpus[ordinal?]
            .context
            .as_ref()
            .ok_or(Code::INVALID_CONTEXT)?;
        Ok(Arc::clone(if handle == 2 {
            &context.per_thread
        } else {
            &context.legacy
        }))
    }

    /// Gives a stream up; what is enqueued is still carried out.
    ///
    /// # Errors
    /// `INVALID_HANDLE`, also for a stream that belongs to an operation under way.
    pub(crate) fn destroy_stream(&self, handle: u64) -> Answer {
        let id = untag(handle, STREAM_TAG).ok_or(Code::INVALID_HANDLE)?;
        let mut model = self.model();
        if model.extents.has_stream(id) {
            return Err(Code::INVALID_HANDLE);
        }
        model
            .streams
            .remove(&id)
            .ok_or(Code::INVALID_HANDLE)?
            .close();
        Ok(())
    }

    /// Puts work on a stream, behind what CUDA's rules for the default stream put before it.
    pub(crate) fn enqueue(
        &self,
        stream: &Arc<Stream>,
        work: Work,
        mut after: Vec<Place>,
        copy: Option<trace::Copy>,
    ) -> Answer<Place> {
        let link = match &work {
            Work::ToHost { .. } => Some(Arc::clone(&self.links[stream.ordinal].to_host)),
            Work::ToDevice { .. } => Some(Arc::clone(&self.links[stream.ordinal].to_device)),
            _ => None,
        };
        // The lock is held until the work has its place, so that two streams agree on what came first.
        let model = self.model();
        if let Some(context) = &model.gpus[stream.ordinal].context
            && stream.flags & NON_BLOCKING == 0
        {
            if Arc::ptr_eq(stream, &context.legacy) {
                let others = model
                    .streams
                    .values()
                    .filter(|s| s.ordinal == stream.ordinal && s.flags & NON_BLOCKING == 0);
                after.extend(others.map(Stream::place));
                after.push(context.per_thread.place());
            } else {
                after.push(context.legacy.place());
            }
        }
        after.retain(|place| !place.is_passed());
        stream.enqueue(stream::Operation {
            work,
            after,
            link,
            trace: copy,
        })
    }

    /// Waits for everything on one GPU's streams and gives the first error among them.
    pub(crate) fn synchronize_device(&self, ordinal: usize) -> Answer {
        let streams = self.live_streams();
        streams
            .iter()
            .filter(|s| s.ordinal == ordinal)
            .map(|s| s.synchronize())
            .fold(Ok(()), Answer::and)
    }

    /// Waits for everything on all streams; false if that takes past the deadline.
    pub(crate) fn drain(&self, deadline: Option<Instant>) -> bool {
        self.live_streams()
            .iter()
            .all(|stream| stream.wait(stream.place().seq, deadline))
    }

    fn live_streams(&self) -> Vec<Arc<Stream>> {
        self.model()
            .workers
            .iter()
            .filter_map(Weak::upgrade)
            .collect()
    }

    // Events and captured graphs.

    pub(crate) fn create_event(&self, flags: u32) -> u64 {
        let id = self.next_id();
        self.model().events.insert(
            id,
            Event {
                flags,
                recorded: None,
            },
        );
        EVENT_TAG | id
    }

    pub(crate) fn destroy_event(&self, handle: u64) -> Answer {
        let id = untag(handle, EVENT_TAG).ok_or(Code::INVALID_HANDLE)?;
        self.model()
            .events
            .remove(&id)
            .map(drop)
            .ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn record_event(&self, handle: u64, stream: &Arc<Stream>) -> Answer {
        let id = untag(handle, EVENT_TAG).ok_or(Code::INVALID_HANDLE)?;
        if !self.model().events.contains_key(&id) {
            return Err(Code::INVALID_HANDLE);
        }
        let mark = Mark::new();
        let place = self.enqueue(stream, Work::Mark(Arc::clone(&mark)), Vec::new(), None)?;
        if let Some(event) = self.model().events.get_mut(&id) {
            event.recorded = Some((mark, place));
        }
        Ok(())
    }

    /// The place of an event's last record; none if it was never recorded.
    pub(crate) fn event_place(&self, handle: u64) -> Answer<Option<Place>> {
        let id = untag(handle, EVENT_TAG).ok_or(Code::INVALID_HANDLE)?;
        let model = self.model();
        let event = model.events.get(&id).ok_or(Code::INVALID_HANDLE)?;
        Ok(event.recorded.as_ref().map(|(_, place)| place.clone()))
    }

    /// When an event was passed.
    ///
    /// # Errors
    /// `INVALID_HANDLE` for one that was never recorded or takes no time; `NOT_READY` for one that is still to come.
    pub(crate) fn event_time(&self, handle: u64) -> Answer<Instant> {
        let id = untag(handle, EVENT_TAG).ok_or(Code::INVALID_HANDLE)?;
        let model = self.model();
        let event = model
            .events
            .get(&id)
            .filter(|e| e.flags & DISABLE_TIMING == 0)
            .ok_or(Code::INVALID_HANDLE)?;
        let (mark, _) = event.recorded.as_ref().ok_or(Code::INVALID_HANDLE)?;
        mark.time().ok_or(Code::NOT_READY)
    }

    pub(crate) fn create_graph(&self) -> u64 {
        let handle = GRAPH_TAG | self.next_id();
        self.model().graphs.push(handle);
        handle
    }

    pub(crate) fn destroy_graph(&self, handle: u64) -> Answer {
        let mut model = self.model();
        let index = model
            .graphs
            .iter()
            .position(|&g| g == handle)
            .ok_or(Code::INVALID_VALUE)?;
        model.graphs.swap_remove(index);
        Ok(())
    }

    // Operations of this process on others.

    /// The pid that an operation is about: the one of this handle, or of any operation under way.
    pub(crate) fn operation_pid(&self, handle: Option<u64>) -> Option<i32> {
        let model = self.model();
        match handle {
            Some(handle) => model.extents.operation(handle).map(|o| o.pid),
            None => model.extents.any_operation().map(|o| o.pid),
        }
    }

    /// Takes an operation out of the table to complete it.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a handle that names none (any more); `STREAM_CAPTURE_UNSUPPORTED`, leaving it in the table, if a stream captures.
    pub(crate) fn take_operation(&self, handle: u64) -> Answer<Operation> {
        let mut model = self.model();
        let streams = model.extents.streams(handle).ok_or(Code::INVALID_VALUE)?;
        if streams.iter().any(|s| s.capture() != Capture::None) {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        model
            .extents
            .take_operation(handle)
            .ok_or(Code::INVALID_VALUE)
    }

    /// Drops what an operation had here, after it was completed.
    pub(crate) fn forget_operation(&self, operation: &Operation) {
        let mut model = self.model();
        for stream in &operation.streams {
            stream.close();
            model.streams.remove(&stream.id);
        }
        model.extents.drop_operation(operation);
    }
}

impl Model {
    /// Brings a GPU's numbers in the control block up to date.
    pub(crate) fn publish(&self, ordinal: usize) {
        let (gpu, slot) = (&self.gpus[ordinal], &CONTROL.header.gpus[ordinal]);
        let extent = gpu.space.used();
        let resident = if gpu.backing.is_some() { extent } else { 0 };
        let in_use = gpu.context.is_some() || extent > 0;
        slot.extent.store(extent, Ordering::Release);
        slot.resident.store(resident, Ordering::Release);
        slot.in_use.store(u32::from(in_use), Ordering::Release);
    }
}

impl Gpu {
    /// The memory file, made if there is none.
    pub(crate) fn ensure_backing(&mut self, window: u64, config: &Config) -> Answer<Arc<Backing>> {
        if let Some(backing) = &self.backing {
            return Ok(Arc::clone(backing));
        }
        let backing = Arc::new(Backing::create(window, config.vram)?);
        self.backing = Some(Arc::clone(&backing));
        Ok(backing)
    }
}

const _: () = assert!(
    GPUS_MAX <= 0xff,
    "a context handle has 8 bits for the ordinal"
);

fn context_handle(ordinal: usize, generation: u64) -> u64 {
    CONTEXT_TAG | generation << 8 | ordinal as u64
}

fn window_start(ordinal: usize) -> u64 {
    WINDOW_BASE + ((ordinal as u64) << WINDOW_SHIFT)
}

/// A stream's handle.
pub(crate) fn stream_handle(stream: &Stream) -> u64 {
    STREAM_TAG | stream.id
}

fn untag(handle: u64, tag: u64) -> Option<u64> {
    let id = handle ^ tag;
    (id < 1 << 48).then_some(id)
}
