//! Load: objects → extents, or to nowhere (to verify). The mirror of save, with the same stages from last to first.
//!
//! Fetching and verifying start before the driver is asked: the rings fill first. A chunk goes to a GPU only after its frame was decoded and its digest compared.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use super::PipelineError;
use super::abort::Abort;
use super::copy::{CopyLane, RawChunk};
use super::gauge::{Gauge, Wire, settle};
use super::save::{ChunkSender, spawn};
use super::transfer::task_panicked;
use crate::codec::{Decoder, FrameError};
use crate::driver::{BufferPool, CopyQueue, Extent, PoolBuf};
use crate::manifest::FrameEntry;
use crate::outcome::StageOutcome;
use crate::plan::{Chunks, FetchGroup, fetch_groups};
use crate::progress::{LaneMeter, Meter};
use crate::store::{Key, Store};

/// One object and the extent that it becomes.
#[derive(Debug)]
pub struct LoadLane {
    /// Key of the object.
    pub key: Key,
    /// The store's tag for it when it was looked at: every range must still have it.
    pub etag: Option<String>,
    /// Its frames, in order, as the verified frame table has them.
    pub frames: Vec<FrameEntry>,
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
    lanes: &[LoadLane],
    resources: LoadResources,
    destination: Destination<'_>,
) -> Result<Loaded, PipelineError> {
    let mut pools = vec![resources.fetch_buffers.clone()];
    pools.extend(lanes.iter().map(|lane| lane.ring.clone()));
    let abort = Arc::new(Abort::new(pools, resources.cancel.child_token()));
    let wire = Arc::new(Wire::new("download", resources.fetch_buffers.count()));
    let code_gauge = Gauge::new("decompress", resources.decoders.len());
    let copy_gauge = Gauge::new("copy", lanes.len());
    let (queues, begin) = match destination {
        Destination::Nowhere => (Vec::new(), None),
        Destination::Gpus { queues, begin } => (queues, Some(begin)),
    };

    let (jobs_out, jobs_in) = unbounded();
    let fetcher = Fetcher {
        store: Arc::clone(&resources.store),
        runtime: resources.runtime.clone(),
        buffers: resources.fetch_buffers.clone(),
        wire: Arc::clone(&wire),
        meter: Arc::clone(&resources.meter),
        abort: Arc::clone(&abort),
    };
    let (lane_outs, lane_ins): (Vec<ChunkSender>, Vec<Receiver<RawChunk>>) =
        lanes.iter().map(|_| unbounded()).unzip();
    let to_gpus = begin.is_some();
    std::thread::scope(|scope| {
        let (extent_outs, primed_in) = if to_gpus {
            spawn_copiers(scope, lanes, queues, lane_ins, &copy_gauge, &abort)
        } else {
            (Vec::new(), crossbeam_channel::never())
        };
        for (index, decoder) in resources.decoders.into_iter().enumerate() {
            let outs = if to_gpus {
                lane_outs.clone()
            } else {
                Vec::new()
            };
            let (abort, gauge, jobs_in) = (&*abort, &code_gauge, jobs_in.clone());
            let again = FetchAgain {
                store: Arc::clone(&resources.store),
                runtime: resources.runtime.clone(),
                given_up: abort.token().clone(),
            };
            spawn(scope, format!("decompress-{index}"), move || {
                abort.guard("decompress", || {
                    decode_all(decoder, lanes, &jobs_in, &outs, gauge, &again)
                });
            });
        }
        drop((jobs_in, lane_outs));
        let feeder_abort = &*abort;
        spawn(scope, "fetch".to_owned(), move || {
            feeder_abort.guard("download", || fetcher.run(lanes, jobs_out))
        });

        if let Some(begin) = begin
            && primed_in.recv().is_ok()
            && !abort.is_set()
        {
            abort.guard("begin", || {
                let extents = begin()?;
                if extents.len() != extent_outs.len() {
                    let what = format!(
                        "the driver gave {} extents for {} stored ones",
                        extents.len(),
                        extent_outs.len()
                    );
                    return Err(PipelineError::Extents { what });
                }
                for (out, extent) in extent_outs.iter().zip(extents) {
                    // A copier that is gone has reported why.
                    let _its_error_counts = out.send(extent);
                }
                Ok(())
            });
        }
    });
    abort.result()?;

    let mut accounts = vec![wire.outcome(), code_gauge.outcome()];
    if to_gpus {
        accounts.push(copy_gauge.outcome());
    }
    let (stages, slowest_stage) = settle(accounts);
    Ok(Loaded {
        stages,
        slowest_stage,
    })
}

/// Starts one copy thread per lane. Returns where each one's extent goes, and where the first full ring is announced.
fn spawn_copiers<'scope, 'env>(
    scope: &'scope std::thread::Scope<'scope, 'env>,
    lanes: &'env [LoadLane],
    queues: Vec<CopyQueue>,
    inputs: Vec<Receiver<RawChunk>>,
    gauge: &'env Gauge,
    abort: &'env Abort,
) -> (Vec<Sender<Extent>>, Receiver<()>) {
    let (primed_out, primed_in) = bounded(1);
    let mut extent_outs = Vec::with_capacity(lanes.len());
    for (index, ((lane, queue), input)) in lanes.iter().zip(queues).zip(inputs).enumerate() {
        let (extent_out, extent_in) = bounded(1);
        extent_outs.push(extent_out);
        let primed_out = primed_out.clone();
        spawn(scope, format!("copy-{index}"), move || {
            abort.guard("copy", || {
                let chunks = Chunks::new(lane.raw_len, lane.chunk_len);
                let copy = CopyLane {
                    lane: index,
                    chunks,
                    chunk_len: lane.chunk_len,
                    ring: &lane.ring,
                    meter: &lane.meter,
                    gauge,
                };
                copy.copy_in(queue, &input, &primed_out, &extent_in)
            });
        });
    }
    (extent_outs, primed_in)
}

/// One frame to decode, in a fetched range that it shares with its neighbours.
struct DecodeJob {
    lane: usize,
    frame: FrameEntry,
    fetched: Arc<PoolBuf>,
    /// Where the frame is in the fetched buffer.
    bytes: Range<usize>,
}

fn decode_all(
    mut decoder: Decoder,
    lanes: &[LoadLane],
    jobs: &Receiver<DecodeJob>,
    outs: &[ChunkSender],
    gauge: &Gauge,
    again: &FetchAgain,
) -> Result<(), PipelineError> {
    loop {
        let idle = Instant::now();
        let Ok(job) = jobs.recv() else { return Ok(()) };
        gauge.starved(idle.elapsed());
        let lane = &lanes[job.lane];
        let (mut buffer, waited) = lane
            .ring
            .acquire()
            .map_err(|_closed| PipelineError::Cancelled)?;
        gauge.blocked(waited);
        let started = Instant::now();
        let len = job.frame.raw_len as usize;
        let decoded = decoder.decode(
            &job.fetched[job.bytes.clone()],
            job.frame.digest,
            &mut buffer[..len],
        );
        if let Err(error) = decoded {
            again.decode(&mut decoder, lane, &job.frame, error, &mut buffer[..len])?;
        }
        gauge.busy(len as u64, started.elapsed());
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
        lane: &LoadLane,
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
            match decoder.decode(&stored, frame.digest, raw) {
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
    /// Starts a task per group as buffers come free, and joins them all.
    fn run(&self, lanes: &[LoadLane], jobs: Sender<DecodeJob>) -> Result<(), PipelineError> {
        let mut tasks = tokio::task::JoinSet::new();
        let mut outcome = Ok(());
        for (lane, group) in self.in_turn(lanes) {
            let Ok((buffer, _waited)) = self.buffers.acquire() else {
                outcome = Err(PipelineError::Cancelled);
                break;
            };
            tasks.spawn_on(
                self.fetch(lane, &lanes[lane], group, buffer, jobs.clone()),
                &self.runtime,
            );
        }
        drop(jobs);
        self.runtime.block_on(async {
            while let Some(done) = tasks.join_next().await {
                match done {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => self.abort.fail(error),
                    Err(error) => self.abort.fail(task_panicked("download", error)),
                }
            }
        });
        outcome
    }

    /// The groups of all lanes, one of each lane in turn, so that every GPU is fed from the start.
    fn in_turn<'a>(
        &self,
        lanes: &'a [LoadLane],
    ) -> impl Iterator<Item = (usize, FetchGroup)> + use<'a> {
        let fetch_len_max = self.buffers.buffer_len() as u64;
        let mut queues: VecDeque<_> = lanes
            .iter()
            .enumerate()
            .map(|(index, lane)| {
                let lens: Vec<u32> = lane.frames.iter().map(|frame| frame.stored_len).collect();
                (index, fetch_groups(&lens, fetch_len_max).into_iter())
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
        lane: &LoadLane,
        group: FetchGroup,
        mut buffer: PoolBuf,
        jobs: Sender<DecodeJob>,
    ) -> impl Future<Output = Result<(), PipelineError>> + Send + use<> {
        let (store, abort) = (Arc::clone(&self.store), Arc::clone(&self.abort));
        let (meter, lane_meter) = (Arc::clone(&self.meter), Arc::clone(&lane.meter));
        let wire = Arc::clone(&self.wire);
        let (key, etag) = (lane.key.clone(), lane.etag.clone());
        let frames = lane.frames[group.frames.clone()].to_vec();
        async move {
            let len = usize::try_from(group.bytes.end - group.bytes.start).unwrap_or(usize::MAX);
            wire.enter();
            meter.in_flight.fetch_add(1, Ordering::Relaxed);
            let read = tokio::select! {
                read = store.get_range(&key, group.bytes.clone(), etag.as_deref(), &mut buffer[..len]) => Some(read),
                () = abort.token().cancelled() => None,
            };
            meter.in_flight.fetch_sub(1, Ordering::Relaxed);
            wire.leave(if matches!(read, Some(Ok(()))) {
                len as u64
            } else {
                0
            });
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
