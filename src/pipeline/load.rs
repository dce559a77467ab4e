//! Load: objects → extents, or to nowhere (to verify). The mirror of save, with the same stages from last to first.
//!
//! Fetching and verifying start before the driver is asked: the rings fill first. A chunk goes to a GPU only after its frame was decoded and its digest compared.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::Scope;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use tokio::task::{JoinError, JoinSet};

use super::PipelineError;
use super::abort::Abort;
use super::copy::{CopyLane, RawChunk};
use super::gauge::{Gauge, Wire, slowest, watch_pools};
use super::stage::spawn;
use super::transfer::task_panicked;
use crate::codec::{Decoder, FrameError};
use crate::driver::{BufferPool, CopyQueue, Extent, PoolBuf};
use crate::manifest::{FrameEntry, FrameTable};
use crate::outcome::StageOutcome;
use crate::plan::{Chunks, FetchGroup, fetch_groups};
use crate::progress::{LaneMeter, Meter};
use crate::store::{Key, Store};

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
    /// Buffers of one chunk each; pinned when they go to a GPU.
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
    /// Buffers for ranges of an object; their number bounds the ranges in flight.
    pub fetch_buffers: BufferPool,
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
        queues: Vec<CopyQueue>,
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
    let fetcher = Fetcher {
        store: Arc::clone(&resources.store),
        runtime: resources.runtime.clone(),
        buffers: resources.fetch_buffers,
        wire: Arc::clone(&wire),
        meter: resources.meter,
        abort: Arc::clone(&abort),
    };
    let decoding = Decoding {
        lanes,
        gauge: &code_gauge,
        again: FetchAgain {
            store: resources.store,
            runtime: resources.runtime,
            given_up: abort.token().clone(),
        },
    };
    let (jobs_out, jobs_in) = unbounded();
    let to_gpus = matches!(destination, Destination::Gpus { .. });
    std::thread::scope(|scope| {
        let (outs, copying) = match destination {
            Destination::Nowhere => (Vec::new(), None),
            Destination::Gpus { queues, begin } => {
                let (outs, copiers) = Copiers::spawn(scope, lanes, queues, &copy_gauge, &abort);
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
type ChunkSenders = Vec<Sender<RawChunk>>;

/// The copy threads, which wait for their extents.
struct Copiers {
    /// Where each one's extent goes.
    extents: Vec<Sender<Extent>>,
    /// The first full ring is announced here.
    primed: Receiver<()>,
}

impl Copiers {
    /// Starts one copy thread per lane.
    fn spawn<'scope, 'env>(
        scope: &'scope Scope<'scope, 'env>,
        lanes: &'env [LoadLane<'_>],
        queues: Vec<CopyQueue>,
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
            spawn(scope, abort, ("copy", index), move || {
                let copy = CopyLane {
                    lane: index,
                    chunks: Chunks::new(lane.raw_len, lane.chunk_len),
                    chunk_len: lane.chunk_len,
                    ring: &lane.ring,
                    meter: &lane.meter,
                    gauge,
                };
                copy.copy_in(queue, &input, &primed_out, &extent_in)
            });
        }
        (outs, Self { extents, primed })
    }

    /// Asks the driver once the first ring is full, and deals the extents out. Not at all if the run is given up before.
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

/// One frame to decode, in a fetched range that it shares with its neighbours.
struct DecodeJob {
    lane: usize,
    frame: FrameEntry,
    fetched: Arc<PoolBuf>,
    /// Where the frame is in the fetched buffer.
    bytes: Range<usize>,
}

/// What the decompressor threads share.
struct Decoding<'a> {
    lanes: &'a [LoadLane<'a>],
    gauge: &'a Gauge,
    again: FetchAgain,
}

impl Decoding<'_> {
    /// One thread. Without `outs` the chunks go nowhere.
    fn run(
        &self,
        mut decoder: Decoder,
        jobs: &Receiver<DecodeJob>,
        outs: &[Sender<RawChunk>],
    ) -> Result<(), PipelineError> {
        loop {
            let idle = Instant::now();
            let Ok(job) = jobs.recv() else { return Ok(()) };
            self.gauge.starved(idle.elapsed());
            let lane = &self.lanes[job.lane];
            let (mut buffer, waited) = lane
                .ring
                .acquire()
                .map_err(|_closed| PipelineError::Cancelled)?;
            self.gauge.blocked(waited);
            let started = Instant::now();
            let len = job.frame.raw_len as usize;
            let raw = &mut buffer[..len];
            let stored = &job.fetched[job.bytes.clone()];
            if let Err(error) = decoder.decode(stored, job.frame.filter, job.frame.digest, raw) {
                self.again
                    .decode(&mut decoder, lane, &job.frame, error, raw)?;
            }
            let label = job.frame.kind.name(job.frame.filter);
            self.gauge
                .busy_as(job.lane, label, len as u64, started.elapsed());
            lane.meter.coded.fetch_add(len as u64, Ordering::Relaxed);
            if let Some(out) = outs.get(job.lane) {
                let chunk = RawChunk {
                    lane: job.lane,
                    index: job.frame.index,
                    buffer,
                    len,
                };
                out.send(chunk)
                    .map_err(|_closed| PipelineError::Cancelled)?;
            }
        }
    }
}

/// How often a chunk that does not verify is fetched again. Damage on the way passes; damage in the store stays.
const FETCHES_AGAIN: u32 = 3;

/// Fetches single frames, for the rare chunk that came damaged.
#[derive(Debug)]
struct FetchAgain {
    store: Arc<dyn Store>,
    runtime: tokio::runtime::Handle,
    given_up: tokio_util::sync::CancellationToken,
}

impl FetchAgain {
    /// Fetches and decodes a frame that came damaged, as `error` says, until it verifies or has had its chances.
    fn decode(
        &self,
        decoder: &mut Decoder,
        lane: &LoadLane<'_>,
        frame: &FrameEntry,
        mut error: FrameError,
        raw: &mut [u8],
    ) -> Result<(), PipelineError> {
        let mut stored = vec![0; frame.stored_len as usize];
        for _ in 0..FETCHES_AGAIN {
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

/// Reads groups of frames, all lanes in turn.
#[derive(Debug)]
struct Fetcher {
    store: Arc<dyn Store>,
    runtime: tokio::runtime::Handle,
    buffers: BufferPool,
    wire: Arc<Wire>,
    meter: Arc<Meter>,
    abort: Arc<Abort>,
}

impl Fetcher {
    /// Starts a task per group as buffers come free, and joins them all. The first that fails closes the buffers, so none is started after it.
    fn run(&self, lanes: &[LoadLane<'_>], jobs: Sender<DecodeJob>) -> Result<(), PipelineError> {
        let mut tasks = JoinSet::new();
        let mut outcome = Ok(());
        for (lane, group) in self.in_turn(lanes) {
            let Ok((buffer, _waited)) = self.buffers.acquire() else {
                outcome = Err(PipelineError::Cancelled);
                break;
            };
            // A task that has ended is let go now: an object has very many groups.
            while let Some(done) = tasks.try_join_next() {
                self.ended(done);
            }
            let fetched = self.fetch(lane, &lanes[lane], group, buffer, jobs.clone());
            let abort = Arc::clone(&self.abort);
            let task = async move {
                if let Err(error) = fetched.await {
                    abort.fail(error);
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
        let fetch_len_max = self.buffers.buffer_len() as u64;
        let mut queues: VecDeque<_> = lanes
            .iter()
            .enumerate()
            .map(|(index, lane)| {
                let groups = fetch_groups(&lane.table.stored, fetch_len_max);
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
        mut buffer: PoolBuf,
        jobs: Sender<DecodeJob>,
    ) -> impl Future<Output = Result<(), PipelineError>> + Send + use<> {
        let (store, abort) = (Arc::clone(&self.store), Arc::clone(&self.abort));
        let (meter, lane_meter) = (Arc::clone(&self.meter), Arc::clone(&lane.meter));
        let wire = Arc::clone(&self.wire);
        let (key, etag) = (lane.key.clone(), lane.etag.clone());
        let frames = lane
            .table
            .entries_from(group.frames.clone(), group.bytes.start);
        let frames: Vec<FrameEntry> = frames.collect();
        async move {
            let len = usize::try_from(group.bytes.end - group.bytes.start).unwrap_or(usize::MAX);
            let request = wire.enter(index, group.frames.start as u64);
            meter.in_flight.fetch_add(1, Ordering::Relaxed);
            let read = tokio::select! {
                read = store.get_range(&key, group.bytes.clone(), etag.as_deref(), &mut buffer[..len]) => Some(read),
                () = abort.token().cancelled() => None,
            };
            meter.in_flight.fetch_sub(1, Ordering::Relaxed);
            let is_read = matches!(read, Some(Ok(())));
            wire.leave(&request, if is_read { len as u64 } else { 0 });
            match read {
                None => return Err(PipelineError::Cancelled),
                Some(read) => read?,
            }
            lane_meter.stored.fetch_add(len as u64, Ordering::Relaxed);
            let fetched = Arc::new(buffer);
            let mut start = 0;
            for frame in frames {
                let bytes = start..start + frame.stored_len as usize;
                start = bytes.end;
                lane_meter
                    .fetched
                    .fetch_add(u64::from(frame.raw_len), Ordering::Relaxed);
                let job = DecodeJob {
                    lane: index,
                    frame,
                    fetched: Arc::clone(&fetched),
                    bytes,
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
    use crate::codec::{Digest, Filter, FrameKind};
    use crate::store::faulty::{Fault, Faulty};

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
            store: Arc::clone(&store) as Arc<dyn Store>,
            runtime: runtime.handle().clone(),
            decoders: vec![Decoder::new().unwrap()],
            fetch_buffers: BufferPool::new(fetch_buffers, FRAME_LEN as usize, None).unwrap(),
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
