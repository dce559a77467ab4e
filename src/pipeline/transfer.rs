//! Parts ↔ store: parallel uploads of whole parts, parallel ranged reads into whole buffers.
//!
//! In: parts from the packers, or groups of frames to fetch. Out: receipts, or bytes. What can fail: the store, after its retry decorator gave up. A request starts only once
//! its bytes are in memory (a body that does not move is dropped by stores), and a part's buffer lives until the store has acknowledged it.
//! Every request is a task of its own; all are joined before this returns.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinSet;

use super::PipelineError;
use super::abort::{Abort, panic_message};
use super::gauge::Wire;
use super::pack::PartJob;
use super::save::SaveResources;
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
    parallelism: usize,
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
    /// An uploader for these targets. Every lane fills a part, so what there is room for on the wire is the rest.
    pub(super) fn new(
        resources: &SaveResources,
        targets: Vec<UploadTarget>,
        abort: &Arc<Abort>,
    ) -> Self {
        let parallelism = resources.parallelism.max(1);
        let spare_parts = resources.part_buffers.count().saturating_sub(targets.len());
        Self {
            store: Arc::clone(&resources.store),
            targets,
            parallelism,
            wire: Arc::new(
                Wire::new("upload", parallelism.min(spare_parts)).recorded(&resources.meter),
            ),
            meter: Arc::clone(&resources.meter),
            abort: Arc::clone(abort),
        }
    }

    /// Uploads parts as they come until the packers are done; returns the receipts per lane, by part number.
    pub(super) async fn run(self, mut parts: UnboundedReceiver<PartJob>) -> Vec<Vec<PartReceipt>> {
        let mut receipts: Vec<Vec<PartReceipt>> = self.targets.iter().map(|_| Vec::new()).collect();
        let mut under_way = JoinSet::new();
        let mut packing = true;
        while packing || !under_way.is_empty() {
            tokio::select! {
                () = self.abort.token().cancelled() => break,
                job = parts.recv(), if packing && under_way.len() < self.parallelism => match job {
                    Some(job) => { under_way.spawn(self.upload(job)); }
                    None => {
                        packing = false;
                        self.wire.drain();
                    }
                },
                Some(done) = under_way.join_next(), if !under_way.is_empty() => self.acknowledge(done, &mut receipts),
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
            let request = wire.enter(job.lane, job.number.get().into());
            meter.in_flight.fetch_add(1, Ordering::Relaxed);
            let outcome = store
                .put_part(&target.key, &target.upload, job.number, job.body)
                .await;
            meter.in_flight.fetch_sub(1, Ordering::Relaxed);
            wire.leave(&request, if outcome.is_ok() { len } else { 0 });
            outcome.map(|receipt| Acknowledged {
                lane: job.lane,
                receipt,
                raw_len: job.raw_len,
            })
        }
    }

    fn acknowledge(
        &self,
        done: Result<Result<Acknowledged, StoreError>, tokio::task::JoinError>,
        receipts: &mut [Vec<PartReceipt>],
    ) {
        match done {
            Ok(Ok(part)) => {
                let meter = &self.targets[part.lane].meter;
                meter
                    .acknowledged
                    .fetch_add(part.raw_len, Ordering::Relaxed);
                meter.stored.fetch_add(part.receipt.len, Ordering::Relaxed);
                receipts[part.lane].push(part.receipt);
            }
            Ok(Err(error)) => self.abort.fail(PipelineError::Store(error)),
            Err(error) => self.abort.fail(task_panicked("upload", error)),
        }
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
