//! Parts ↔ store: parallel uploads of whole parts, parallel ranged reads into whole buffers.
//!
//! In: parts from the packers, or groups of frames to fetch. Out: receipts, or bytes. What can fail: the store, after its retry decorator gave up. A request starts only once
//! its bytes are in memory (a body that does not move is dropped by stores), and a part's buffers live until the store has acknowledged it.
//! Every request is a task of its own; all are joined before this returns. How many are under way at once is found by trying ([`super::window`]).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinSet;
use tracing::Instrument;

use super::PipelineError;
use super::abort::{Abort, panic_message};
use super::gauge::Wire;
use super::pack::PartJob;
use super::save::SaveResources;
use super::window::Window;
use crate::failpoint;
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
            wire: Arc::new(Wire::new("upload", 1).recorded(&resources.meter)),
            meter: Arc::clone(&resources.meter),
            abort: Arc::clone(abort),
        }
    }

    /// Uploads parts as they come until the packers are done; returns the receipts per lane, by part number.
    pub(super) async fn run(self, mut parts: UnboundedReceiver<PartJob>) -> Vec<Vec<PartReceipt>> {
        let mut receipts: Vec<Vec<PartReceipt>> = self.targets.iter().map(|_| Vec::new()).collect();
        let mut under_way = JoinSet::new();
        let mut packing = true;
        let slow_downs = || self.meter.slow_downs.load(Ordering::Relaxed);
        let mut window = Window::new(self.parallelism, slow_downs(), Instant::now());
        while packing || !under_way.is_empty() {
            window.asked_to_slow_down(slow_downs(), Instant::now());
            self.wire.set_room(window.limit().min(self.spare_parts));
            tokio::select! {
                () = self.abort.token().cancelled() => break,
                job = parts.recv(), if packing && under_way.len() < window.limit() => match job {
                    Some(job) => {
                        failpoint::pass("stream:part cut");
                        under_way.spawn(self.upload(job).in_current_span());
                    }
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
            let raw_len = job.part.raw_len;
            let body = job.part.into_body();
            let len = body.len;
            let request = wire.enter(job.lane, job.number.get().into());
            meter.in_flight.fetch_add(1, Ordering::Relaxed);
            let outcome = store
                .put_part(&target.key, &target.upload, job.number, body)
                .await;
            meter.in_flight.fetch_sub(1, Ordering::Relaxed);
            wire.leave(&request, if outcome.is_ok() { len } else { 0 });
            outcome.map(|receipt| Acknowledged {
                lane: job.lane,
                receipt,
                raw_len,
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
                failpoint::pass("stream:part acknowledged");
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
    use crate::codec::Crc64;
    use crate::pipeline::part::{OpenPart, Sum};
    use crate::store::PartNumber;

    /// An upload of parts that are all ready, to a store that takes them when it is told to.
    struct Upload {
        network: Arc<Network>,
        meter: Arc<Meter>,
        run: tokio::task::JoinHandle<Vec<Vec<PartReceipt>>>,
    }

    impl Upload {
        async fn start(count: u64) -> Self {
            let network = Arc::new(Network::gated());
            let meter = Meter::new();
            let key = Key::new("job/object").unwrap();
            let upload = network.begin_upload(&key).await.unwrap();
            let uploader = Uploader {
                store: Arc::clone(&network) as Arc<dyn Store>,
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
            for number in 1..=count {
                let mut part = OpenPart::new();
                part.lend(Bytes::from_static(b"part"));
                part.sum(Sum::Known(Crc64::of(b"part")), 4);
                out.send(PartJob {
                    lane: 0,
                    number: PartNumber::new(number).unwrap(),
                    part,
                })
                .unwrap();
            }
            drop(out);
            Self {
                network,
                meter,
                run: tokio::spawn(uploader.run(parts)),
            }
        }

        /// Lets `count` parts through, and waits until so many others are in flight and nothing moves any more, for as long as that takes.
        async fn pass(&self, count: usize, in_flight: usize) {
            self.network.passes.add_permits(count);
            let mut looks_alike = 0;
            while looks_alike < 20 {
                tokio::time::sleep(Duration::from_millis(1)).await;
                let is_so = self.network.in_flight.load(Ordering::Relaxed) == in_flight;
                looks_alike = if is_so { looks_alike + 1 } else { 0 };
            }
        }
    }

    #[tokio::test]
    async fn more_parts_are_tried_while_parts_wait() {
        let upload = Upload::start(100).await;
        upload.pass(0, 8).await;
        // A round to settle, and one to know the rate.
        upload.pass(8, 8).await;
        upload.pass(8, 16).await;
        upload.run.abort();
    }

    #[tokio::test]
    async fn half_as_many_when_the_store_asks_to_slow_down() {
        let upload = Upload::start(100).await;
        upload.pass(0, 8).await;
        upload.meter.slow_downs.fetch_add(3, Ordering::Relaxed);
        upload.pass(5, 4).await;
        upload.run.abort();
    }

    #[tokio::test]
    async fn every_part_is_receipted_in_order() {
        let upload = Upload::start(100).await;
        upload.network.passes.add_permits(100);
        let receipts = upload.run.await.unwrap();
        let numbers = receipts[0].iter().map(|receipt| receipt.number.get());
        assert!(numbers.eq(1..=100));
    }
}
