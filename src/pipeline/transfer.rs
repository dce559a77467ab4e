//! Parts ↔ store: parallel uploads of whole parts, parallel ranged reads into whole buffers.
//!
//! In: parts from the packers, or groups of frames to fetch. Out: receipts, or bytes. What can fail: the store, after its retry decorator gave up. A request starts only once
//! its bytes are in memory (a body that does not move is dropped by stores), and a part's buffers live until the store has acknowledged it.
//! Every request is a task of its own; all are joined before this returns. How many are under way at once is found by trying ([`super::window`]).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::PipelineError;
use super::abort::{Abort, panic_message};
use super::gauge::Wire;
use super::pack::PartJob;
use super::save::SaveResources;
use super::window::Window;
use crate::progress::{LaneMeter, Meter};
use crate::store::{Key, PartReceipt, Store, StoreError, UploadId};

/// Where a lane's parts go.
#[derive(Debug, Clone)]
pub(super) struct UploadTarget {
    pub(super) key: Key,
    pub(super) upload: UploadId,
    pub(super) meter: Arc<LaneMeter>,
}

/// What all uploads share.
#[derive(Debug)]
pub(super) struct Uploader {
    store: Arc<dyn Store>,
    targets: Vec<UploadTarget>,
    /// Most parts in flight.
    parallelism: usize,
    /// Parts that the memory holds beside those that are being filled, at least.
    spare_parts: usize,
    pub(super) wire: Arc<Wire>,
    meter: Arc<Meter>,
    abort: Arc<Abort>,
}

/// A part that the store has acknowledged.
struct Acknowledged {
    lane: usize,
    receipt: PartReceipt,
    raw_len: u64,
}

impl Uploader {
    /// An uploader for these targets. `lent_bytes` are how much parts hold without pack buffers, at least.
    pub(super) fn new(
        resources: &SaveResources,
        targets: Vec<UploadTarget>,
        lent_bytes: usize,
        abort: &Arc<Abort>,
    ) -> Self {
        let pack_bytes = resources.pack_buffers.count() * resources.pack_buffers.buffer_len();
        let parts = (pack_bytes + lent_bytes) / resources.part_len.max(1);
        Self {
            store: Arc::clone(&resources.store),
            spare_parts: parts.saturating_sub(targets.len()),
            targets,
            parallelism: resources.parallelism,
            wire: Arc::new(Wire::new("upload", 1)),
            meter: Arc::clone(&resources.meter),
            abort: Arc::clone(abort),
        }
    }

    /// Uploads parts as they come until the packers are done; returns the receipts per lane, by part number.
    pub(super) async fn run(self, mut parts: UnboundedReceiver<PartJob>) -> Vec<Vec<PartReceipt>> {
        let mut receipts: Vec<Vec<PartReceipt>> = self.targets.iter().map(|_| Vec::new()).collect();
        let mut under_way = JoinSet::new();
        let mut packing = true;
        let mut window = Window::new(self.parallelism, Instant::now());
        let mut slow_downs = self.meter.slow_downs.load(Ordering::Relaxed);
        while packing || !under_way.is_empty() {
            let asked = self.meter.slow_downs.load(Ordering::Relaxed);
            if std::mem::replace(&mut slow_downs, asked) < asked {
                window.slow_down(Instant::now());
            }
            self.wire.set_room(window.limit().min(self.spare_parts));
            tokio::select! {
                () = self.abort.token().cancelled() => break,
                job = parts.recv(), if packing && under_way.len() < window.limit() => match job {
                    Some(job) => { under_way.spawn(self.upload(job)); }
                    None => {
                        packing = false;
                        self.wire.drain();
                    }
                },
                Some(done) = under_way.join_next(), if !under_way.is_empty() => {
                    if let Some(len) = self.acknowledge(done, &mut receipts) {
                        window.acknowledged(len, !parts.is_empty(), Instant::now());
                    }
                }
            }
        }
        under_way.shutdown().await;
        for lane in &mut receipts {
            lane.sort_by_key(|receipt| receipt.number);
        }
        receipts
    }

    fn upload(
        &self,
        job: PartJob,
    ) -> impl Future<Output = Result<Acknowledged, StoreError>> + Send + use<> {
        let store = Arc::clone(&self.store);
        let target = self.targets[job.lane].clone();
        let (meter, wire) = (Arc::clone(&self.meter), Arc::clone(&self.wire));
        async move {
            let len = job.body.len;
            wire.enter();
            meter.in_flight.fetch_add(1, Ordering::Relaxed);
            let outcome = store
                .put_part(&target.key, &target.upload, job.number, job.body)
                .await;
            meter.in_flight.fetch_sub(1, Ordering::Relaxed);
            wire.leave(if outcome.is_ok() { len } else { 0 });
            outcome.map(|receipt| Acknowledged {
                lane: job.lane,
                receipt,
                raw_len: job.raw_len,
            })
        }
    }

    /// Keeps the receipt, or stops the run. Says how long the part was.
    fn acknowledge(
        &self,
        done: Result<Result<Acknowledged, StoreError>, tokio::task::JoinError>,
        receipts: &mut [Vec<PartReceipt>],
    ) -> Option<u64> {
        match done {
            Ok(Ok(part)) => {
                let meter = &self.targets[part.lane].meter;
                meter
                    .acknowledged
                    .fetch_add(part.raw_len, Ordering::Relaxed);
                meter.stored.fetch_add(part.receipt.len, Ordering::Relaxed);
                let len = part.receipt.len;
                receipts[part.lane].push(part.receipt);
                return Some(len);
            }
            Ok(Err(error)) => self.abort.fail(PipelineError::Store(error)),
            Err(error) => self.abort.fail(task_panicked("upload", error)),
        }
        None
    }
}

/// A task that did not end by itself: it panicked (we cancel tasks only when the run is given up already).
pub(super) fn task_panicked(stage: &'static str, error: tokio::task::JoinError) -> PipelineError {
    match error.try_into_panic() {
        Ok(panic) => PipelineError::Panic {
            stage,
            message: panic_message(panic.as_ref()),
        },
        Err(_cancelled) => PipelineError::Cancelled,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use tokio::sync::mpsc::unbounded_channel;
    use tokio_util::sync::CancellationToken;

    use super::super::network::Network;
    use super::*;
    use crate::store::retry::{RetryPolicy, Retrying};
    use crate::store::{PartBody, PartNumber};

    const LEN: u64 = 1000;
    /// One part alone.
    const LATENCY: Duration = Duration::from_millis(100);

    /// An upload of `count` parts, all ready, through a link that takes `knee` of them in the time of one. Counts how many were in flight, every tenth of that time.
    struct Upload {
        network: Arc<Network>,
        meter: Arc<Meter>,
        run: tokio::task::JoinHandle<Vec<Vec<PartReceipt>>>,
    }

    impl Upload {
        async fn start(count: u16, knee: u32) -> Self {
            let rate = f64::from(knee) * 10.0 * 1000.0;
            let network = Arc::new(Network::new(LATENCY, rate));
            let meter = Meter::new();
            let policy = RetryPolicy::new(Duration::from_secs(3600));
            let store = Arc::new(Retrying::new(
                Arc::clone(&network),
                policy,
                CancellationToken::new(),
                Arc::clone(&meter),
            ));
            let key = Key::new("job/object").unwrap();
            let upload = store.begin_upload(&key).await.unwrap();
            let uploader = Uploader {
                store,
                targets: vec![UploadTarget {
                    key,
                    upload,
                    meter: LaneMeter::new("lane", 0),
                }],
                parallelism: 64,
                spare_parts: 64,
                wire: Arc::new(Wire::new("upload", 1)),
                meter: Arc::clone(&meter),
                abort: Arc::new(Abort::new(Vec::new(), CancellationToken::new())),
            };
            let (out, parts) = unbounded_channel();
            let bytes = Bytes::from(vec![7; usize::try_from(LEN).unwrap()]);
            let crc64 = crate::codec::Crc64::of(&bytes).value();
            for number in 1..=count {
                out.send(PartJob {
                    lane: 0,
                    number: PartNumber::new(u64::from(number)).unwrap(),
                    body: PartBody::new(vec![bytes.clone()], crc64),
                    raw_len: LEN,
                })
                .unwrap();
            }
            drop(out);
            let run = tokio::spawn(uploader.run(parts));
            Self {
                network,
                meter,
                run,
            }
        }

        /// Parts in flight at the end of so many times that one part takes.
        async fn after(&self, parts: u32) -> usize {
            tokio::time::sleep(LATENCY * parts).await;
            self.network.in_flight.load(Ordering::Relaxed)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn it_finds_how_many_parts_the_link_takes() {
        for (knee, least, most) in [(4, 8, 9), (24, 16, 32), (200, 64, 64)] {
            let upload = Upload::start(9_000, knee).await;
            let mut seen = Vec::new();
            for _ in 0..40 {
                seen.push(upload.after(2).await);
            }
            // It tries more now and then: the middle one is where it rests.
            seen.sort_unstable();
            assert!((least..=most).contains(&seen[20]), "knee {knee}: {seen:?}");
            upload.run.abort();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_says_slow_down_gets_half_and_is_climbed_back_to() {
        let upload = Upload::start(10_000, 200).await;
        assert_eq!(upload.after(20).await, 64);
        upload.network.tolerance.store(20, Ordering::Relaxed);
        upload.after(30).await;
        assert!(upload.meter.slow_downs.load(Ordering::Relaxed) > 0);
        let mut seen = Vec::new();
        for _ in 0..20 {
            seen.push(upload.after(2).await);
        }
        seen.sort_unstable();
        // Those that were refused wait between their attempts, and are in flight for us but not there.
        assert!(seen[10] <= 24 && seen[10] >= 8, "{seen:?}");
        upload
            .network
            .tolerance
            .store(usize::MAX, Ordering::Relaxed);
        assert_eq!(upload.after(100).await, 64);
        upload.run.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn every_part_is_receipted_in_order() {
        let upload = Upload::start(500, 24).await;
        let receipts = upload.run.await.unwrap();
        let numbers = receipts[0].iter().map(|receipt| receipt.number.get());
        assert!(numbers.eq(1..=500));
    }
}
