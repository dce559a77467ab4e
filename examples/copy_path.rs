//! The copy path on whatever GPU is here: GPU memory that this program allocates itself → pinned ring → zstd → multipart upload, and back, compared byte for byte.
//!
//! It needs no checkpoint functions, so it runs on drivers that lack custom storage. `scripts/gpu-check.sh` runs it on hardware.
//!
//! ```text
//! copy_path --store s3://bucket/prefix --endpoint http://127.0.0.1:9000 --bytes 16GiB [--gpu 0]
//! ```
//!
//! Prints one line per step with its rate, and ends with `copy_path: OK …` or an error and exit 1.

#![allow(clippy::print_stdout, reason = "a program that talks to people")]

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytesize::ByteSize;
use ckptstream::codec::{Decoder, Encoder, Level};
use ckptstream::config::{PartChecksum, StoreConfig};
use ckptstream::driver::{BufferPool, CopyQueue, DeviceMemory, Driver, STREAMS_IN, STREAMS_OUT};
use ckptstream::manifest::FrameTable;
use ckptstream::pipeline::{
    Destination, LoadLane, LoadResources, SaveLane, SaveResources, Saved, load, save,
};
use ckptstream::plan::{self, LoadSettings, SaveSettings, plan_load, plan_save};
use ckptstream::progress::{LaneMeter, Meter};
use ckptstream::store::retry::{RetryPolicy, Retrying};
use ckptstream::store::s3::S3Store;
use ckptstream::store::{Key, Store};
use clap::Parser;
use tokio_util::sync::CancellationToken;

type Failure = Box<dyn Error + Send + Sync>;

/// Moves GPU memory out to a store and back, and compares.
#[derive(Debug, Parser)]
struct Args {
    /// Where the objects go: s3://bucket/prefix.
    #[arg(long)]
    store: String,
    /// Endpoint URL of the store.
    #[arg(long)]
    endpoint: String,
    /// How much GPU memory to move.
    #[arg(long, default_value = "1GiB")]
    bytes: ByteSize,
    /// Ordinal of the GPU.
    #[arg(long, default_value_t = 0)]
    gpu: usize,
    /// Host memory for the pipeline.
    #[arg(long, default_value = "2GiB")]
    memory_budget: ByteSize,
    /// Parts and ranges in flight.
    #[arg(long, default_value_t = 16)]
    parallelism: u32,
}

/// Chunk that the fill and the comparison work on, independent of the pipeline's.
const STRIPE_LEN: u64 = 16 << 20;

fn main() -> Result<(), Failure> {
    let args = Args::parse();
    let threads = u32::try_from(std::thread::available_parallelism()?.get())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let driver = Driver::open()?;
    let gpu = driver
        .devices()
        .get(args.gpu)
        .ok_or("no GPU of this ordinal")?;
    println!(
        "gpu {}: {}, {}, compute capability {}",
        gpu.ordinal, gpu.name, gpu.uuid, gpu.chip
    );
    println!(
        "driver {}, CUDA API {}",
        driver.driver_version().unwrap_or("unknown"),
        driver.api_version()
    );
    driver.retain_contexts()?;
    let memory = DeviceMemory::allocate(&driver, args.gpu, usize::try_from(args.bytes.as_u64())?)?;
    let run = Run {
        driver,
        memory,
        threads,
        args,
    };

    timed("fill", run.len(), || run.each_stripe(Stripe::Fill))?;
    let store = runtime.block_on(connect(&run.args))?;
    let (saved, chunk_len) = run.out(&runtime, &store)?;
    timed("scribble", run.len(), || run.each_stripe(Stripe::Scribble))?;
    run.back(&runtime, &store, saved, chunk_len)?;
    timed("compare", run.len(), || run.each_stripe(Stripe::Compare))?;
    println!(
        "copy_path: OK, {} out and back, equal",
        ByteSize(run.len()).display().iec()
    );
    Ok(())
}

struct Run {
    driver: Arc<Driver>,
    memory: DeviceMemory,
    threads: u32,
    args: Args,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stripe {
    Fill,
    Scribble,
    Compare,
}

impl Run {
    fn len(&self) -> u64 {
        self.memory.extent().len
    }

    /// GPU → ring → frames → parts → store.
    fn out(
        &self,
        runtime: &tokio::runtime::Runtime,
        store: &Arc<dyn Store>,
    ) -> Result<(Saved, u64), Failure> {
        let settings = SaveSettings {
            part_size: None,
            chunk_size: None,
            memory_budget: self.args.memory_budget.as_u64(),
            budget_is_set: true,
            threads: self.threads,
            parallelism: self.args.parallelism,
            context_bytes: Level::Fast.context_bytes(),
        };
        let plan = plan_save(&[self.len()], &settings)?;
        let started = Instant::now();
        let ring = BufferPool::new(
            plan.ring_chunks,
            usize::try_from(plan.chunk_len)?,
            Some((&self.driver, self.args.gpu)),
        )?;
        let pinned = ByteSize(plan.ring_chunks as u64 * plan.chunk_len);
        println!(
            "ring: {} pinned in {:.3} s",
            pinned.display().iec(),
            started.elapsed().as_secs_f64()
        );
        let key = Key::new(&format!("copy-path/{}.zst", std::process::id()))?;
        let upload = runtime.block_on(store.begin_upload(&key))?;
        let lane = SaveLane {
            queue: CopyQueue::prepare(&self.driver, self.args.gpu, plan.ring_chunks, STREAMS_OUT)?,
            extent: self.memory.extent(),
            ring,
            table: FrameTable::new(self.len(), plan.chunk_len),
            key,
            upload,
            meter: LaneMeter::new("GPU", self.len()),
        };
        let resources = SaveResources {
            store: Arc::clone(store),
            runtime: runtime.handle().clone(),
            encoders: (0..plan.threads)
                .map(|_| Encoder::new(Level::Fast))
                .collect::<Result<_, _>>()?,
            chunk_len: plan.chunk_len,
            frame_buffers: BufferPool::new(plan.frame_buffers, plan.frame_len_max, None)?,
            part_buffers: BufferPool::new(
                plan.part_buffers,
                usize::try_from(plan.part_len)?,
                None,
            )?,
            parallelism: usize::try_from(self.args.parallelism)?,
            meter: Meter::new(),
        };
        let saved = timed("out", self.len(), || {
            let saved = save(vec![lane], resources)?;
            for lane in &saved.lanes {
                runtime.block_on(store.complete_upload(
                    &lane.key,
                    &lane.upload,
                    &lane.parts,
                    lane.len,
                    lane.crc64.value(),
                ))?;
            }
            Ok(saved)
        })?;
        let stored: u64 = saved.lanes.iter().map(|lane| lane.len).sum();
        println!(
            "  stored {}, {:.1} % of raw",
            ByteSize(stored).display().iec(),
            percent(stored, self.len())
        );
        print_stages(&saved.stages, saved.slowest_stage.as_deref());
        Ok((saved, plan.chunk_len))
    }

    /// Store → frames → ring → GPU.
    fn back(
        &self,
        runtime: &tokio::runtime::Runtime,
        store: &Arc<dyn Store>,
        saved: Saved,
        chunk_len: u64,
    ) -> Result<(), Failure> {
        let lane = saved.lanes.into_iter().next().ok_or("one lane was saved")?;
        let settings = LoadSettings {
            memory_budget: self.args.memory_budget.as_u64(),
            budget_is_set: true,
            threads: self.threads,
            parallelism: self.args.parallelism,
        };
        let shape = plan::LoadLane {
            raw_len: self.len(),
            chunk_len,
            frame_len_max: lane.table.frame_len_max(),
            frames_len: lane.table.frames_len(),
        };
        let plan = plan_load(&[shape], &settings)?;
        let lanes = [LoadLane {
            key: lane.key,
            etag: None,
            table: &lane.table,
            raw_len: self.len(),
            chunk_len,
            ring: BufferPool::new(
                plan.ring_chunks,
                usize::try_from(chunk_len)?,
                Some((&self.driver, self.args.gpu)),
            )?,
            meter: LaneMeter::new("GPU", self.len()),
        }];
        let resources = LoadResources {
            store: Arc::clone(store),
            runtime: runtime.handle().clone(),
            decoders: (0..plan.threads)
                .map(|_| Decoder::new())
                .collect::<Result<_, _>>()?,
            fetch_buffers: BufferPool::new(
                plan.fetch_buffers,
                usize::try_from(plan::fetch_buffer_len(plan.fetch_len_max))?,
                Some((&self.driver, self.args.gpu)),
            )?,
            fetch_len_max: plan.fetch_len_max,
            meter: Meter::new(),
            cancel: CancellationToken::new(),
        };
        let extent = self.memory.extent();
        let queues = vec![CopyQueue::prepare(
            &self.driver,
            self.args.gpu,
            plan.ring_chunks,
            STREAMS_IN,
        )?];
        let destination = Destination::Gpus {
            queues,
            begin: Box::new(move || Ok(vec![extent])),
        };
        let loaded = timed("back", self.len(), || {
            Ok(load(&lanes, resources, destination)?)
        })?;
        print_stages(&loaded.stages, loaded.slowest_stage.as_deref());
        Ok(())
    }

    /// Fills, scribbles over, or compares the whole extent, stripes dealt out to threads.
    fn each_stripe(&self, what: Stripe) -> Result<(), Failure> {
        let workers = u64::from(self.threads.min(8));
        std::thread::scope(|scope| {
            let running: Vec<_> = (0..workers)
                .map(|worker| scope.spawn(move || self.stripes_of(what, worker, workers)))
                .collect();
            running.into_iter().try_for_each(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
        })
    }

    fn stripes_of(&self, what: Stripe, worker: u64, workers: u64) -> Result<(), Failure> {
        let pool = BufferPool::new(
            1,
            usize::try_from(STRIPE_LEN)?,
            Some((&self.driver, self.args.gpu)),
        )?;
        let mut queue = CopyQueue::prepare(&self.driver, self.args.gpu, 1, STREAMS_OUT)?;
        queue.bind(self.memory.extent())?;
        let mut expected = vec![0; usize::try_from(STRIPE_LEN)?];
        let stripes = plan::Chunks::new(self.len(), STRIPE_LEN);
        for index in (worker..stripes.count()).step_by(usize::try_from(workers)?) {
            let range = stripes.range(index);
            let len = usize::try_from(range.end - range.start)?;
            let (mut buffer, _) = pool.acquire()?;
            match what {
                Stripe::Fill => tensor_like(index, &mut buffer[..len]),
                Stripe::Scribble => buffer[..len].fill(0xA5),
                Stripe::Compare => {}
            }
            if what == Stripe::Compare {
                queue.copy_out(buffer, range.start, len)?;
            } else {
                queue.copy_in(buffer, range.start, len)?;
            }
            let copied = queue.wait_oldest()?.ok_or("a copy was enqueued")?;
            if what == Stripe::Compare {
                tensor_like(index, &mut expected[..len]);
                if copied.buffer[..len] != expected[..len] {
                    return Err(format!("stripe {index} came back different").into());
                }
            }
        }
        queue.finish()?;
        Ok(())
    }
}

/// Bytes that compress like bf16 weights: normal values, so a peaked exponent byte beside a nearly random mantissa byte.
fn tensor_like(seed: u64, out: &mut [u8]) {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    for pair in out.chunks_mut(2) {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let bytes = (state >> 16).to_le_bytes();
        // Sum of four uniform bytes, centred: close to normal.
        let sum: i16 = bytes[..4].iter().map(|&byte| i16::from(byte)).sum();
        let value = f32::from(sum - 510) * 0.000_1 + f32::from(bytes[4]) * 1e-7;
        let bf16 = (value.to_bits() >> 16).to_le_bytes();
        pair.copy_from_slice(&bf16[..pair.len()]);
    }
}

async fn connect(args: &Args) -> Result<Arc<dyn Store>, Failure> {
    let location = args
        .store
        .strip_prefix("s3://")
        .ok_or("--store must be s3://bucket/prefix")?;
    let (bucket, prefix) = location.split_once('/').unwrap_or((location, ""));
    let config = StoreConfig {
        bucket: bucket.to_owned(),
        prefix: prefix.to_owned(),
        endpoint: Some(args.endpoint.clone()),
        region: Some("us-east-1".to_owned()),
        path_style: true,
        part_size: None,
        parallelism: args.parallelism,
        checksum: PartChecksum::Crc64Nvme,
        sign_payload: false,
        retry_timeout: Duration::from_secs(60),
        connect_timeout: Duration::from_secs(5),
        request_timeout: Duration::from_secs(30),
        stall_timeout: Duration::from_secs(20),
    };
    let inner = Arc::new(S3Store::connect(&config).await?);
    let policy = RetryPolicy::new(config.retry_timeout);
    Ok(Arc::new(Retrying::new(
        inner,
        policy,
        CancellationToken::new(),
        Meter::new(),
    )))
}

fn timed<T>(
    step: &str,
    bytes: u64,
    work: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let started = Instant::now();
    let done = work()?;
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "{step}: {} in {seconds:.2} s, {:.2} GB/s",
        ByteSize(bytes).display().iec(),
        rate(bytes, seconds)
    );
    Ok(done)
}

fn print_stages(stages: &[ckptstream::outcome::StageOutcome], slowest: Option<&str>) {
    for stage in stages {
        println!(
            "  {:<10} busy {:.2} s, starved {:.2} s, blocked {:.2} s, {:.2} GB/s while busy",
            stage.stage,
            stage.busy_seconds,
            stage.starved_seconds,
            stage.blocked_seconds,
            stage.rate / 1e9
        );
    }
    println!("  slowest stage: {}", slowest.unwrap_or("none"));
}

#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
fn rate(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / seconds / 1e9
}

#[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
fn percent(part: u64, whole: u64) -> f64 {
    part as f64 * 100.0 / whole as f64
}
