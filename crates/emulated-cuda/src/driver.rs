//! The driver of this process: contexts, memory, streams and events, behind one lock.
//!
//! In: calls from the facade (`api`), already through the gate. Out: answers, work on streams, and the numbers in the control block that
//! other processes look at. The restore thread (`suspend`) changes the same model while the gate is locked.
//! What can fail: what the driver API documents per call; see `docs/emulated-driver.md` for codes that are assumed.

mod contexts;
mod memory;
mod operations;
mod streams;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::thread;

use crate::backing::Backing;
use crate::codes::{Answer, Code};
use crate::config::{self, Config, GPUS_MAX};
use crate::control::{self, CONTROL};
use crate::extent::Extents;
use crate::space::{Allocation, Space};
use crate::stream::{self, Link, Mark, Place, Stream};
use crate::suspend::{self, HostCopy};

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
        let backing = Arc::new(Backing::create(
            window,
            config.vram,
            config.memory_dir.as_deref(),
        )?);
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
