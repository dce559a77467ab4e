//! Load: objects → extents, or to nowhere (to verify). The mirror of save, with the same stages from last to first.
//!
//! Fetching and verifying start before the driver is asked: the buffers that go round fill first. A chunk goes to a GPU only after its frame was decoded and its digest compared.
//!
//! A fetched range lands in a fetch buffer, copied once, out of the connection's own memory. A raw frame lands without what stands between its blocks, so that its chunk lies there in one piece, with
//! its digest taken on the way: it goes to the GPU from there. Every other frame is decoded into a ring buffer.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Scope;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use tokio::task::{JoinError, JoinSet};

use super::PipelineError;
use super::abort::Abort;
use super::copy::{CopyLane, VerifiedChunk};
use super::gauge::{Gauge, Wire, slowest, watch_pools};
use super::stage::spawn;
use super::transfer::task_panicked;
use super::window::Window;
use crate::codec::{Decoder, Digest, FrameError, FrameKind, RawFrame};
use crate::driver::{BufferPool, CopyQueue, Extent, PoolBuf, PoolSlice};
use crate::failpoint;
use crate::manifest::{FrameEntry, FrameTable};
use crate::outcome::StageOutcome;
use crate::plan::{Chunks, FetchGroup, LANDING_ALIGN, fetch_groups};
use crate::progress::{LaneMeter, Meter};
use crate::store::{Key, RangeSink, Store};

/// One object and the extent that it becomes.
#[derive(Debug)]
pub struct LoadLane<'a> {
    /// Key of the object.
    pub key: Key,
    /// The store's tag for it when it was looked at: every range must still have it.
    pub etag: Option<String>,
    /// Its frames: the verified table.
    pub table: &'a FrameTable,
    /// Length of the extent in bytes.
    pub raw_len: u64,
    /// Chunk length in bytes.
    pub chunk_len: u64,
    /// Buffers of one chunk each, at least one; pinned when they go to a GPU.
    pub ring: BufferPool,
    /// Progress.
    pub meter: Arc<LaneMeter>,
}

/// What all lanes share.
#[derive(Debug)]
pub struct LoadResources {
    /// The store.
    pub store: Arc<dyn Store>,
    /// Runs the transfers.
    pub runtime: tokio::runtime::Handle,
    /// One decompressor per thread.
    pub decoders: Vec<Decoder>,
    /// Buffers for ranges of an object, of [`fetch_buffer_len`](crate::plan::fetch_buffer_len) each, pinned as the rings are; their number bounds the ranges in flight.
    pub fetch_buffers: BufferPool,
    /// Most bytes of a range.
    pub fetch_len_max: u64,
    /// How long a chunk that does not verify is fetched again; a few times in any case.
    pub patience: Duration,
    /// Progress.
    pub meter: Arc<Meter>,
    /// Cancelled by the caller to give the transfer up.
    pub cancel: tokio_util::sync::CancellationToken,
}

/// Where verified chunks go.
pub enum Destination<'a> {
    /// Nowhere: every chunk is read and verified, that is all.
    Nowhere,
    /// Onto GPUs.
    Gpus {
        /// One prepared queue per lane.
        queues: Vec<CopyQueue<PoolSlice>>,
        /// Asks the driver, once the first verified chunks wait in the rings; returns one extent per lane, in order.
        begin: Box<dyn FnOnce() -> Result<Vec<Extent>, PipelineError> + 'a>,
    },
}

impl std::fmt::Debug for Destination<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Nowhere => "Nowhere",
            Self::Gpus { .. } => "Gpus",
        })
    }
}

/// Every chunk was fetched and verified, and, when there are GPUs, copied and its stream synchronized.
#[derive(Debug)]
pub struct Loaded {
    /// `download`, `decompress`, and `copy` when there are GPUs.
    pub stages: Vec<StageOutcome>,
    /// The stage that the others waited for.
    pub slowest_stage: Option<String>,
}

/// Streams every lane from the store.
///
/// # Errors
/// The first [`PipelineError`] of any stage, after all threads and tasks have ended.
pub fn load(
    lanes: &[LoadLane<'_>],
    resources: LoadResources,
    destination: Destination<'_>,
) -> Result<Loaded, PipelineError> {
    let mut pools = vec![resources.fetch_buffers.clone()];
    pools.extend(lanes.iter().map(|lane| lane.ring.clone()));
    let abort = Arc::new(Abort::new(pools, resources.cancel.child_token()));
    let meter = Arc::clone(&resources.meter);
    let wire = Wire::new("download", resources.fetch_buffers.count()).recorded(&meter);
    let wire = Arc::new(wire);
    let code_gauge = Gauge::new("decompress", resources.decoders.len()).recorded(&meter);
    let copy_gauge = Gauge::new("copy", lanes.len()).recorded(&meter);
    let rings = lanes.iter().map(|lane| {
        let name = format!("ring of {}", lane.meter.label);
        (name, lane.ring.clone())
    });
    let fetched = ("fetched".to_owned(), resources.fetch_buffers.clone());
    let _watched = watch_pools(&meter, rings.chain([fetched]));
    let beside_requests = resources.decoders.len() / 2 + BUFFERS_PER_LANE * lanes.len();
    // Chunks that wait for their GPU may hold a fetch buffer each. While all lanes wait for less than their share, one is left to fetch into.
    let usable = resources.fetch_buffers.count().min(beside_requests + 1);
    let share = usable / lanes.len().max(1);
    let fetcher = Fetcher {
        beside_requests,
        store: Arc::clone(&resources.store),
        runtime: resources.runtime.clone(),
        fetch_len_max: resources.fetch_len_max,
        buffers: resources.fetch_buffers,
        wire: Arc::clone(&wire),
        meter: resources.meter,
        abort: Arc::clone(&abort),
    };
    let decoding = Decoding {
        lanes,
        zeros: lanes.iter().map(|_| OnceLock::new()).collect(),
        gauge: &code_gauge,
        again: FetchAgain {
            store: resources.store,
            runtime: resources.runtime,
            patience: resources.patience,
            given_up: abort.token().clone(),
        },
    };
    let (jobs_out, jobs_in) = unbounded();
    let to_gpus = matches!(destination, Destination::Gpus { .. });
    std::thread::scope(|scope| {
        let (outs, copying) = match destination {
            Destination::Nowhere => (Vec::new(), None),
            Destination::Gpus { queues, begin } => {
                let (outs, copiers) =
                    Copiers::spawn(scope, lanes, queues, share, &copy_gauge, &abort);
                (outs, Some((copiers, begin)))
            }
        };
        for (index, decoder) in resources.decoders.into_iter().enumerate() {
            let (decoding, jobs_in, outs) = (&decoding, jobs_in.clone(), outs.clone());
            spawn(scope, &abort, ("decompress", index), move || {
                decoding.run(decoder, &jobs_in, &outs)
            });
        }
        drop((jobs_in, outs));
        spawn(scope, &abort, ("download", 0), move || {
            fetcher.run(lanes, jobs_out)
        });
        if let Some((copiers, begin)) = copying {
            copiers.begin(begin, &abort);
        }
    });
    abort.result()?;

    let mut stages = vec![wire.outcome(), code_gauge.outcome()];
    if to_gpus {
        stages.push(copy_gauge.outcome());
    }
    let slowest_stage = slowest(&stages);
    Ok(Loaded {
        stages,
        slowest_stage,
    })
}

/// Where verified chunks of each lane go.
type ChunkSenders = Vec<Sender<VerifiedChunk>>;

/// The copy threads, which wait for their extents.
struct Copiers {
    /// Where each one's extent goes.
    extents: Vec<Sender<Extent>>,
    /// The first lane whose read-ahead is done is announced here.
    primed: Receiver<()>,
}

impl Copiers {
    /// Starts one copy thread per lane, which waits for as many chunks as the lane's ring and its `share` of the fetch buffers hold in any case.
    fn spawn<'scope, 'env>(
        scope: &'scope Scope<'scope, 'env>,
        lanes: &'env [LoadLane<'_>],
        queues: Vec<CopyQueue<PoolSlice>>,
        share: usize,
        gauge: &'env Gauge,
        abort: &'env Abort,
    ) -> (ChunkSenders, Self) {
        let (primed_out, primed) = bounded(1);
        let mut outs = Vec::with_capacity(lanes.len());
        let mut extents = Vec::with_capacity(lanes.len());
        for (index, (lane, queue)) in lanes.iter().zip(queues).enumerate() {
            let (out, input) = unbounded();
            let (extent_out, extent_in) = bounded(1);
            outs.push(out);
            extents.push(extent_out);
            let primed_out = primed_out.clone();
            let ahead = lane.ring.count().min(share).max(1) as u64;
            spawn(scope, abort, ("copy", index), move || {
                let copy = CopyLane {
                    lane: index,
                    chunks: Chunks::new(lane.raw_len, lane.chunk_len),
                    chunk_len: lane.chunk_len,
                    ring: &lane.ring,
                    meter: &lane.meter,
                    gauge,
                };
                copy.copy_in(queue, &input, ahead, &primed_out, &extent_in)
            });
        }
        (outs, Self { extents, primed })
    }

    /// Asks the driver once the first lane has its read-ahead, and deals the extents out. Not at all if the run is given up before.
    fn begin(self, begin: impl FnOnce() -> Result<Vec<Extent>, PipelineError>, abort: &Abort) {
        if self.primed.recv().is_err() || abort.is_set() {
            return;
        }
        abort.guard("begin", || {
            let extents = begin()?;
            if extents.len() != self.extents.len() {
                let what = format!(
                    "the driver gave {} extents for {} stored ones",
                    extents.len(),
                    self.extents.len()
                );
                return Err(PipelineError::Extents { what });
            }
            for (out, extent) in self.extents.iter().zip(extents) {
                // A copier that is gone has reported why.
                let _its_error_counts = out.send(extent);
            }
            Ok(())
        });
    }
}

/// One frame to verify, in a fetched range that it shares with its neighbours.
struct DecodeJob {
    lane: usize,
    frame: FrameEntry,
    fetched: Fetched,
}

/// What was fetched of a frame.
enum Fetched {
    /// The frame.
    Frame(PoolSlice),
    /// The chunk that a raw frame holds, and its digest.
    Chunk(PoolSlice, Digest),
    /// A frame that was to be raw, and is not one of ours.
    NotRaw,
}

/// What the decompressor threads share.
struct Decoding<'a> {
    lanes: &'a [LoadLane<'a>],
    /// Of each lane.
    zeros: Vec<OnceLock<Zeros>>,
    gauge: &'a Gauge,
    again: FetchAgain,
}

/// A verified chunk that is all zero, which stands for all others of its lane that come as the same frame with the same digest: they are neither decoded nor written, and the copy engine finds
/// their bytes in the processor's cache.
struct Zeros {
    frame: Box<[u8]>,
    digest: Digest,
    chunk: PoolSlice,
}

/// Rings shorter than this lend no buffer for good.
const RING_FOR_ZEROS: usize = 4;

impl Decoding<'_> {
    /// One thread. Without `outs` the chunks go nowhere.
    fn run(
        &self,
        mut decoder: Decoder,
        jobs: &Receiver<DecodeJob>,
        outs: &[Sender<VerifiedChunk>],
    ) -> Result<(), PipelineError> {
        loop {
            let idle = Instant::now();
            let Ok(job) = jobs.recv() else { return Ok(()) };
            failpoint::pass("restore:chunk landed");
            self.gauge.starved(idle.elapsed());
            let lane = &self.lanes[job.lane];
            let len = job.frame.raw_len as usize;
            let bytes = match self
                .known_zeros(&job)
                .or_else(|| self.verify_in_place(&job))
            {
                Some(chunk) => chunk,
                None => self.decode(&mut decoder, lane, &job)?,
            };
            failpoint::pass("restore:chunk verified");
            lane.meter.coded.fetch_add(len as u64, Ordering::Relaxed);
            if let Some(out) = outs.get(job.lane) {
                let index = job.frame.index;
                out.send(VerifiedChunk { index, bytes })
                    .map_err(|_closed| PipelineError::Cancelled)?;
            }
        }
    }

    /// Verifying the job's chunk took since `started`.
    fn was_busy(&self, job: &DecodeJob, started: Instant) {
        let label = job.frame.kind.name(job.frame.filter);
        let bytes = u64::from(job.frame.raw_len);
        self.gauge
            .busy_as(job.lane, label, bytes, started.elapsed());
    }

    /// The chunk, if it is like the zeros that are there already.
    fn known_zeros(&self, job: &DecodeJob) -> Option<PoolSlice> {
        let Fetched::Frame(frame) = &job.fetched else {
            return None;
        };
        let started = Instant::now();
        let zeros = self.zeros[job.lane].get().filter(|zeros| {
            zeros.chunk.len() == job.frame.raw_len as usize
                && zeros.digest == job.frame.digest
                && zeros.frame[..] == frame[..]
        })?;
        self.was_busy(job, started);
        Some(zeros.chunk.clone())
    }

    /// The chunk was decoded from its frame and verified.
    fn keep_if_zeros(&self, job: &DecodeJob, chunk: &PoolSlice) {
        let lane = &self.lanes[job.lane];
        if job.frame.kind == FrameKind::Zero
            && chunk.len() as u64 == lane.chunk_len
            && lane.ring.count() >= RING_FOR_ZEROS
            && let Fetched::Frame(frame) = &job.fetched
        {
            self.zeros[job.lane].get_or_init(|| Zeros {
                frame: Box::from(&frame[..]),
                digest: job.frame.digest,
                chunk: chunk.clone(),
            });
        }
    }

    /// The chunk where it landed, if it did and is the one that was saved.
    fn verify_in_place(&self, job: &DecodeJob) -> Option<PoolSlice> {
        let Fetched::Chunk(chunk, digest) = &job.fetched else {
            return None;
        };
        let started = Instant::now();
        let is_the_one = *digest == job.frame.digest;
        self.was_busy(job, started);
        is_the_one.then(|| chunk.clone())
    }

    /// The chunk in a ring buffer, decoded from its frame; what did not come as that frame is fetched again.
    fn decode(
        &self,
        decoder: &mut Decoder,
        lane: &LoadLane<'_>,
        job: &DecodeJob,
    ) -> Result<PoolSlice, PipelineError> {
        let (mut buffer, waited) = lane
            .ring
            .acquire()
            .map_err(|_closed| PipelineError::Cancelled)?;
        self.gauge.blocked(waited);
        let started = Instant::now();
        let len = job.frame.raw_len as usize;
        let raw = &mut buffer[..len];
        let decoded = match &job.fetched {
            Fetched::Frame(stored) => {
                decoder.decode(stored, job.frame.filter, job.frame.digest, raw)
            }
            Fetched::Chunk(_, found) => Err(FrameError::Digest {
                found: *found,
                expected: job.frame.digest,
            }),
            Fetched::NotRaw => Err(FrameError::Damaged {
                reason: "it has other headers than a raw frame of ours",
            }),
        };
        let came_right = decoded.is_ok();
        if let Err(error) = decoded {
            self.again.decode(decoder, lane, &job.frame, error, raw)?;
        }
        self.was_busy(job, started);
        let chunk = PoolSlice::new(Arc::new(buffer), 0..len);
        if came_right {
            self.keep_if_zeros(job, &chunk);
        }
        Ok(chunk)
    }
}

/// A range of frames on its way into a fetch buffer.
struct Landing {
    buffer: PoolBuf,
    frames: Vec<LandingFrame>,
    /// Index of the frame that the next byte belongs to.
    at: usize,
}

struct LandingFrame {
    entry: FrameEntry,
    /// Where in the buffer.
    place: Range<usize>,
    /// Bytes of the frame that have come.
    seen: usize,
    /// Of a raw frame, whose content alone is kept. Boxed: a range may have very many frames that are not raw.
    raw: Option<Box<RawFrame>>,
}

/// The frame, if its content alone is to land.
fn raw_frame(entry: &FrameEntry) -> Option<Box<RawFrame>> {
    let is_raw = entry.kind == FrameKind::Raw;
    let (raw_len, stored_len) = (entry.raw_len as usize, entry.stored_len as usize);
    let frame = is_raw.then(|| RawFrame::new(raw_len, stored_len));
    frame.flatten().map(Box::new)
}

impl Landing {
    fn new(buffer: PoolBuf, entries: impl Iterator<Item = FrameEntry>) -> Self {
        let mut end = 0_usize;
        let frames = entries.map(|entry| {
            let (stored_len, raw_len) = (entry.stored_len as usize, entry.raw_len as usize);
            let raw = raw_frame(&entry);
            let (start, len) = match raw {
                Some(_) => (end.next_multiple_of(LANDING_ALIGN), raw_len),
                None => (end, stored_len),
            };
            end = start + len;
            LandingFrame {
                entry,
                place: start..end,
                seen: 0,
                raw,
            }
        });
        Self {
            frames: frames.collect(),
            buffer,
            at: 0,
        }
    }

    /// What has landed, frame by frame.
    fn into_fetched(self) -> impl Iterator<Item = (FrameEntry, Fetched)> {
        let buffer = Arc::new(self.buffer);
        self.frames.into_iter().map(move |frame| {
            let bytes = PoolSlice::new(Arc::clone(&buffer), frame.place);
            let fetched = match frame.raw {
                None => Fetched::Frame(bytes),
                Some(raw) => match raw.finish() {
                    Some(digest) => Fetched::Chunk(bytes, digest),
                    None => Fetched::NotRaw,
                },
            };
            (frame.entry, fetched)
        })
    }
}

impl RangeSink for Landing {
    fn restart(&mut self) {
        self.at = 0;
        for frame in &mut self.frames {
            frame.seen = 0;
            frame.raw = raw_frame(&frame.entry);
        }
    }

    fn put(&mut self, mut bytes: &[u8]) {
        while let Some(frame) = self.frames.get_mut(self.at) {
            let missing = frame.entry.stored_len as usize - frame.seen;
            let (now, later) = bytes.split_at(missing.min(bytes.len()));
            let place = &mut self.buffer[frame.place.clone()];
            match &mut frame.raw {
                Some(raw) => raw.take(now, place),
                None => place[frame.seen..frame.seen + now.len()].copy_from_slice(now),
            }
            frame.seen += now.len();
            if now.len() < missing {
                return;
            }
            self.at += 1;
            bytes = later;
        }
    }
}

/// How often a chunk that does not verify is fetched again at least. Damage on the way passes; damage in the store stays.
const FETCHES_AGAIN: u32 = 3;

/// Pause before it is fetched once more after that: what is served wrong now may be served right later.
const FETCH_PAUSE: Duration = Duration::from_millis(500);

/// Fetches single frames, for the rare chunk that came damaged.
#[derive(Debug)]
struct FetchAgain {
    store: Arc<dyn Store>,
    runtime: tokio::runtime::Handle,
    patience: Duration,
    given_up: tokio_util::sync::CancellationToken,
}

impl FetchAgain {
    /// Fetches and decodes a frame that came damaged, as `error` says, until it verifies or has had its chances and its time.
    fn decode(
        &self,
        decoder: &mut Decoder,
        lane: &LoadLane<'_>,
        frame: &FrameEntry,
        mut error: FrameError,
        raw: &mut [u8],
    ) -> Result<(), PipelineError> {
        let mut stored = vec![0; frame.stored_len as usize];
        let started = Instant::now();
        let mut fetches = 0;
        while fetches < FETCHES_AGAIN || started.elapsed() < self.patience {
            if fetches >= FETCHES_AGAIN {
                std::thread::sleep(FETCH_PAUSE.min(self.patience));
            }
            fetches += 1;
            tracing::warn!(key = %lane.key, chunk = frame.index, %error, "chunk does not verify; fetching it again");
            self.runtime.block_on(async {
                tokio::select! {
                    read = self.store.get_range(&lane.key, frame.bytes(), lane.etag.as_deref(), &mut stored) => Ok(read?),
                    () = self.given_up.cancelled() => Err(PipelineError::Cancelled),
                }
            })?;
            match decoder.decode(&stored, frame.filter, frame.digest, raw) {
                Ok(()) => return Ok(()),
                Err(still) => error = still,
            }
        }
        Err(PipelineError::Frame {
            key: lane.key.to_string(),
            chunk: frame.index,
            source: error,
        })
    }
}

/// Fetch buffers for each GPU that chunks may hold which wait for their copy or are under way.
const BUFFERS_PER_LANE: usize = 4;

/// The ranges in flight, how many they may be, and whether the fetcher waits because of that.
#[derive(Debug)]
struct InFlight {
    requests: AtomicUsize,
    window: Mutex<Window>,
    waits: AtomicBool,
}

impl InFlight {
    fn new(limit_max: usize, meter: &Meter) -> Self {
        let slow_downs = meter.slow_downs.load(Ordering::Relaxed);
        Self {
            requests: AtomicUsize::new(0),
            window: Mutex::new(Window::new(limit_max, slow_downs, Instant::now())),
            waits: AtomicBool::new(false),
        }
    }

    fn window(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether another range has to wait, when so many buffers are out of which `beside` need be in no request.
    fn is_full(&self, out: usize, beside: usize) -> bool {
        let limit = self.window().limit();
        let waits = self.requests.load(Ordering::Relaxed) >= limit;
        self.waits.store(waits, Ordering::Relaxed);
        waits || out >= limit + beside
    }

    /// A range of `len` bytes has come.
    fn came(&self, len: u64, meter: &Meter) {
        self.requests.fetch_sub(1, Ordering::Relaxed);
        let now = Instant::now();
        let mut window = self.window();
        window.asked_to_slow_down(meter.slow_downs.load(Ordering::Relaxed), now);
        window.acknowledged(len, self.waits.load(Ordering::Relaxed), now);
    }
}

/// Reads groups of frames, all lanes in turn. How many ranges are in flight is found by trying ([`super::window`]); what was fetched and is not used up yet is bounded too, so that the
/// buffers in use are few and stay in the processor's cache where the network is faster than the stages behind it.
#[derive(Debug)]
struct Fetcher {
    /// Buffers that may be out beside one per range in flight.
    beside_requests: usize,
    store: Arc<dyn Store>,
    runtime: tokio::runtime::Handle,
    buffers: BufferPool,
    fetch_len_max: u64,
    wire: Arc<Wire>,
    meter: Arc<Meter>,
    abort: Arc<Abort>,
}

impl Fetcher {
    /// Starts a task per group as buffers come free, and joins them all. The first that fails closes the buffers, so none is started after it.
    fn run(&self, lanes: &[LoadLane<'_>], jobs: Sender<DecodeJob>) -> Result<(), PipelineError> {
        let mut tasks = JoinSet::new();
        let mut outcome = Ok(());
        let in_flight = Arc::new(InFlight::new(self.buffers.count(), &self.meter));
        for (lane, group) in self.in_turn(lanes) {
            let is_full = |out| in_flight.is_full(out, self.beside_requests);
            let Ok((buffer, _waited)) = self.buffers.acquire_unless(is_full) else {
                outcome = Err(PipelineError::Cancelled);
                break;
            };
            in_flight.requests.fetch_add(1, Ordering::Relaxed);
            // A task that has ended is let go now: an object has very many groups.
            while let Some(done) = tasks.try_join_next() {
                self.ended(done);
            }
            let len = group.bytes.end - group.bytes.start;
            let fetched = self.fetch(lane, &lanes[lane], group, buffer, jobs.clone());
            let (abort, meter) = (Arc::clone(&self.abort), Arc::clone(&self.meter));
            let (in_flight, buffers) = (Arc::clone(&in_flight), self.buffers.clone());
            let task = async move {
                match fetched.await {
                    Ok(()) => {
                        in_flight.came(len, &meter);
                        buffers.look_again();
                    }
                    Err(error) => abort.fail(error),
                }
            };
            tasks.spawn_on(task, &self.runtime);
        }
        drop(jobs);
        self.wire.drain();
        self.runtime.block_on(async {
            while let Some(done) = tasks.join_next().await {
                self.ended(done);
            }
        });
        outcome
    }

    fn ended(&self, done: Result<(), JoinError>) {
        if let Err(error) = done {
            self.abort.fail(task_panicked("download", error));
        }
    }

    /// The groups of all lanes, one of each lane in turn, so that every GPU is fed from the start.
    fn in_turn<'a>(
        &self,
        lanes: &'a [LoadLane<'_>],
    ) -> impl Iterator<Item = (usize, FetchGroup)> + use<'a> {
        let mut queues: VecDeque<_> = lanes
            .iter()
            .enumerate()
            .map(|(index, lane)| {
                let groups = fetch_groups(&lane.table.stored, self.fetch_len_max);
                (index, groups.into_iter())
            })
            .collect();
        std::iter::from_fn(move || {
            while let Some((index, mut groups)) = queues.pop_front() {
                if let Some(group) = groups.next() {
                    queues.push_back((index, groups));
                    return Some((index, group));
                }
            }
            None
        })
    }

    fn fetch(
        &self,
        index: usize,
        lane: &LoadLane<'_>,
        group: FetchGroup,
        buffer: PoolBuf,
        jobs: Sender<DecodeJob>,
    ) -> impl Future<Output = Result<(), PipelineError>> + Send + use<> {
        let (store, abort) = (Arc::clone(&self.store), Arc::clone(&self.abort));
        let (meter, lane_meter) = (Arc::clone(&self.meter), Arc::clone(&lane.meter));
        let wire = Arc::clone(&self.wire);
        let (key, etag) = (lane.key.clone(), lane.etag.clone());
        let frames = lane
            .table
            .entries_from(group.frames.clone(), group.bytes.start);
        let mut landing = Landing::new(buffer, frames);
        async move {
            let len = group.bytes.end - group.bytes.start;
            let request = wire.enter(index, group.frames.start as u64);
            meter.in_flight.fetch_add(1, Ordering::Relaxed);
            let read = tokio::select! {
                read = store.read_range(&key, group.bytes, etag.as_deref(), &mut landing) => Some(read),
                () = abort.token().cancelled() => None,
            };
            meter.in_flight.fetch_sub(1, Ordering::Relaxed);
            let is_whole = matches!(read, Some(Ok(())));
            wire.leave(&request, if is_whole { len } else { 0 });
            match read {
                None => return Err(PipelineError::Cancelled),
                Some(read) => read?,
            }
            lane_meter.stored.fetch_add(len, Ordering::Relaxed);
            for (frame, fetched) in landing.into_fetched() {
                lane_meter
                    .fetched
                    .fetch_add(u64::from(frame.raw_len), Ordering::Relaxed);
                let job = DecodeJob {
                    lane: index,
                    frame,
                    fetched,
                };
                jobs.send(job).map_err(|_closed| PipelineError::Cancelled)?;
            }
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::sample_data::frame_of;
    use crate::codec::{Encoder, Filter, Settings};
    use crate::store::faulty::{Fault, Faulty};
    use crate::store::memory::MemoryStore;

    /// Three chunks as an object: two raw ones around one that compresses. And the table.
    fn object(chunk_len: usize) -> (Vec<Vec<u8>>, Vec<u8>, FrameTable) {
        let mut random = fastrand::Rng::with_seed(5);
        let mut chunk = |len: usize| -> Vec<u8> {
            let mut chunk = vec![0; len];
            random.fill(&mut chunk);
            chunk
        };
        let chunks = vec![chunk(chunk_len), vec![7; chunk_len], chunk(chunk_len / 3)];
        let raw_len: usize = chunks.iter().map(Vec::len).sum();
        let mut table = FrameTable::new(raw_len as u64, chunk_len as u64);
        let mut bytes = Vec::new();
        let mut encoder = Encoder::new(Settings::default()).unwrap();
        for chunk in &chunks {
            let (frame, encoded) = frame_of(&mut encoder, chunk);
            bytes.extend_from_slice(&frame);
            let len = u32::try_from(frame.len()).unwrap();
            table.push(len, encoded.kind, encoded.filter, encoded.digest);
        }
        (chunks, bytes, table)
    }

    #[test]
    fn frames_land_side_by_side_and_raw_ones_as_their_chunks() {
        let (chunks, bytes, table) = object(1 << 20);
        let buffer_len = crate::plan::fetch_buffer_len(bytes.len() as u64);
        let pool = BufferPool::new(1, usize::try_from(buffer_len).unwrap(), None).unwrap();
        let mut damaged = bytes.clone();
        // The last byte of the second raw frame's first block header.
        let at = (table.stored[0] + table.stored[1]) as usize + 12;
        damaged[at] ^= 1;
        for piece_len in [1000, 300_000, usize::MAX] {
            let frames = table.entries_from(0..3, 0);
            let mut landing = Landing::new(pool.acquire().unwrap().0, frames);
            // An attempt that was cut counts for nothing.
            landing.restart();
            landing.put(&damaged[..at + 1]);
            landing.restart();
            bytes.chunks(piece_len).for_each(|piece| landing.put(piece));
            let landed: Vec<Fetched> = landing.into_fetched().map(|(_, it)| it).collect();
            let [
                Fetched::Chunk(first, first_digest),
                Fetched::Frame(second),
                Fetched::Chunk(third, _),
            ] = &landed[..]
            else {
                panic!("other forms than expected");
            };
            assert!(first[..] == chunks[0] && third[..] == chunks[2]);
            assert_eq!(*first_digest, Digest::of(&chunks[0]));
            let second_place = table.stored[0] as usize..at - 12;
            assert_eq!(second[..], bytes[second_place]);
            assert!(third.as_ptr().addr().is_multiple_of(64));
        }
        let mut landing = Landing::new(pool.acquire().unwrap().0, table.entries_from(0..3, 0));
        landing.restart();
        landing.put(&damaged);
        let last = landing.into_fetched().last().map(|(_, fetched)| fetched);
        assert!(matches!(last, Some(Fetched::NotRaw)));
    }

    #[test]
    fn a_raw_chunk_that_is_damaged_is_named() {
        let (_chunks, bytes, table) = object(1 << 20);
        let key = Key::new("object").unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
        let buffer_len = crate::plan::fetch_buffer_len(bytes.len() as u64);
        let load_from = |object: Vec<u8>, table: &FrameTable| {
            let store = MemoryStore::new();
            let put = store.put_if_absent(&key, object.into());
            runtime.block_on(put).unwrap();
            let lane = LoadLane {
                key: key.clone(),
                etag: None,
                table,
                raw_len: table.raw_len,
                chunk_len: table.chunk_len,
                ring: BufferPool::new(1, 1 << 20, None).unwrap(),
                meter: LaneMeter::new("GPU", table.raw_len),
            };
            let resources = LoadResources {
                patience: Duration::ZERO,
                store: Arc::new(store),
                runtime: runtime.handle().clone(),
                decoders: vec![Decoder::new().unwrap()],
                fetch_buffers: BufferPool::new(2, usize::try_from(buffer_len).unwrap(), None)
                    .unwrap(),
                fetch_len_max: bytes.len() as u64,
                meter: Meter::new(),
                cancel: tokio_util::sync::CancellationToken::new(),
            };
            load(&[lane], resources, Destination::Nowhere).map(drop)
        };
        load_from(bytes.clone(), &table).unwrap();
        // In the content of a raw frame, and between two of its blocks.
        for at in [1000, 10 + 3 + (128 << 10)] {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            let error = load_from(damaged, &table).unwrap_err();
            assert!(
                matches!(error, PipelineError::Frame { chunk: 0, .. }),
                "{error:?}"
            );
        }
    }

    #[test]
    fn ranges_are_of_the_object_that_was_looked_at() {
        let (_chunks, bytes, table) = object(1 << 20);
        let key = Key::new("object").unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
        let buffer_len = crate::plan::fetch_buffer_len(bytes.len() as u64);
        let buffer_len = usize::try_from(buffer_len).unwrap();
        let store = MemoryStore::new();
        runtime
            .block_on(store.put_if_absent(&key, bytes.clone().into()))
            .unwrap();
        let lane = LoadLane {
            key,
            etag: Some("another object's".to_owned()),
            table: &table,
            raw_len: table.raw_len,
            chunk_len: table.chunk_len,
            ring: BufferPool::new(1, 1 << 20, None).unwrap(),
            meter: LaneMeter::new("GPU", table.raw_len),
        };
        let resources = LoadResources {
            patience: Duration::ZERO,
            store: Arc::new(store),
            runtime: runtime.handle().clone(),
            decoders: vec![Decoder::new().unwrap()],
            fetch_buffers: BufferPool::new(2, buffer_len, None).unwrap(),
            fetch_len_max: bytes.len() as u64,
            meter: Meter::new(),
            cancel: tokio_util::sync::CancellationToken::new(),
        };
        let refused = load(&[lane], resources, Destination::Nowhere);
        assert!(
            matches!(&refused, Err(PipelineError::Store(error)) if error.is_about_the_object()),
            "{refused:?}"
        );
    }

    #[test]
    fn ranges_wait_for_the_window_and_for_buffers_in_use() {
        let meter = Meter::new();
        let in_flight = InFlight::new(64, &meter);
        let limit = in_flight.window().limit();
        for _ in 0..limit {
            assert!(!in_flight.is_full(0, 4));
            in_flight.requests.fetch_add(1, Ordering::Relaxed);
        }
        assert!(in_flight.is_full(0, 4) && in_flight.waits.load(Ordering::Relaxed));
        in_flight.came(1, &meter);
        assert!(!in_flight.is_full(limit + 3, 4));
        // What was fetched is not used up: that is not the window's doing.
        assert!(in_flight.is_full(limit + 4, 4) && !in_flight.waits.load(Ordering::Relaxed));
        meter.slow_downs.fetch_add(1, Ordering::Relaxed);
        in_flight.came(1, &meter);
        assert_eq!(in_flight.window().limit(), limit / 2);
    }

    /// Zeros that are known stand only for frames and digests that are theirs.
    #[test]
    fn every_chunk_of_zeros_is_verified() {
        const CHUNK_LEN: usize = 1 << 20;
        const COUNT: usize = 6;
        let key = Key::new("object").unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
        let mut encoder = Encoder::new(Settings::default()).unwrap();
        let (frame, encoded) = frame_of(&mut encoder, &vec![0; CHUNK_LEN]);
        let frame_len = u32::try_from(frame.len()).unwrap();
        let load_from = |object: Vec<u8>, digests: [Digest; COUNT]| {
            let mut table = FrameTable::new((COUNT * CHUNK_LEN) as u64, CHUNK_LEN as u64);
            for digest in digests {
                table.push(frame_len, encoded.kind, encoded.filter, digest);
            }
            let store = MemoryStore::new();
            let put = store.put_if_absent(&key, object.into());
            runtime.block_on(put).unwrap();
            let ring = BufferPool::new(RING_FOR_ZEROS, CHUNK_LEN, None).unwrap();
            let lane = LoadLane {
                key: key.clone(),
                etag: None,
                table: &table,
                raw_len: table.raw_len,
                chunk_len: table.chunk_len,
                ring: ring.clone(),
                meter: LaneMeter::new("GPU", table.raw_len),
            };
            let resources = LoadResources {
                patience: Duration::ZERO,
                store: Arc::new(store),
                runtime: runtime.handle().clone(),
                decoders: vec![Decoder::new().unwrap()],
                fetch_buffers: BufferPool::new(2, 1 << 20, None).unwrap(),
                fetch_len_max: 1 << 20,
                meter: Meter::new(),
                cancel: tokio_util::sync::CancellationToken::new(),
            };
            let loaded = load(&[lane], resources, Destination::Nowhere).map(drop);
            assert_eq!(ring.free_count(), RING_FOR_ZEROS, "every buffer came back");
            loaded
        };
        let objects = frame.repeat(COUNT);
        let digests = [encoded.digest; COUNT];
        load_from(objects.clone(), digests).unwrap();
        // One RLE block in the last frame says another byte.
        let mut damaged = objects.clone();
        *damaged.last_mut().unwrap() ^= 1;
        let error = load_from(damaged, digests).unwrap_err();
        assert!(
            matches!(error, PipelineError::Frame { chunk: 5, .. }),
            "{error:?}"
        );
        let mut other = digests;
        other[3] = Digest::of(b"other");
        let error = load_from(objects, other).unwrap_err();
        assert!(
            matches!(error, PipelineError::Frame { chunk: 3, .. }),
            "{error:?}"
        );
    }

    #[test]
    fn a_fetch_that_fails_is_the_last_one() {
        const FRAME_LEN: u32 = 64;
        let frame_count = 2000;
        let mut table = FrameTable::new(frame_count * 128, 128);
        for _ in 0..frame_count {
            table.push(FRAME_LEN, FrameKind::Raw, Filter::None, Digest::of(b""));
        }
        let store = Arc::new(Faulty::new().fail("get_range", 1..u32::MAX, Fault::Refused));
        let lane = LoadLane {
            key: Key::new("object").unwrap(),
            etag: None,
            table: &table,
            raw_len: table.raw_len,
            chunk_len: table.chunk_len,
            ring: BufferPool::new(2, 128, None).unwrap(),
            meter: LaneMeter::new("GPU", table.raw_len),
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .build()
            .unwrap();
        let fetch_buffers = 2;
        let resources = LoadResources {
            patience: Duration::ZERO,
            store: Arc::clone(&store) as Arc<dyn Store>,
            runtime: runtime.handle().clone(),
            decoders: vec![Decoder::new().unwrap()],
            fetch_buffers: BufferPool::new(fetch_buffers, FRAME_LEN as usize, None).unwrap(),
            fetch_len_max: u64::from(FRAME_LEN),
            meter: Meter::new(),
            cancel: tokio_util::sync::CancellationToken::new(),
        };
        let failed = load(&[lane], resources, Destination::Nowhere);
        assert!(matches!(failed, Err(PipelineError::Store(_))), "{failed:?}");
        // Those that were under way, and one that got the buffer of the first before that closed the pool.
        let calls = store.calls("get_range") as usize;
        assert!((1..=fetch_buffers + 1).contains(&calls), "{calls} fetches");
    }
}
