//! The network stages alone: whole parts up, ranges down, as many at once as a save and a restore may have.
//!
//! In: bytes that lie ready, with their checksums. Out: what the requests took. What can fail: the store. An upload ends when enough bytes went or enough time is over, so that a
//! slow link does not hold the bench for minutes; a download reads what the upload left.

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};

use super::BenchError;
use super::measure::{Took, timed};
use super::place::Place;
use crate::codec::Crc64;
use crate::store::{Key, PartBody, PartNumber, PartReceipt, UploadId, crc64_of_parts};

/// How much goes over the wire in one run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Amount {
    /// Bytes of each part and range.
    pub(super) part_len: usize,
    /// Requests at once.
    pub(super) at_once: usize,
    /// Most parts.
    pub(super) parts_max: u64,
    /// No new request once so much time is over.
    pub(super) time_max: Duration,
}

/// What went over the wire.
#[derive(Debug, Clone)]
pub(super) struct Moved {
    pub(super) bytes: u64,
    pub(super) took: Took,
}

/// A part that is sent again and again, under every number.
struct Load {
    bytes: Bytes,
    crc64: Crc64,
}

impl Amount {
    /// Uploads parts of `bytes`, which is at least one part long. The object that they became, and what it took up to its completion.
    pub(super) fn upload(
        self,
        runtime: &tokio::runtime::Handle,
        place: &Place,
        bytes: &Bytes,
    ) -> Result<(Key, Moved), BenchError> {
        let key = place.key("upload")?;
        let loads: Vec<Load> = (0..bytes.len() / self.part_len)
            .map(|index| {
                let part = bytes.slice(index * self.part_len..(index + 1) * self.part_len);
                let crc64 = Crc64::of(&part);
                Load { bytes: part, crc64 }
            })
            .collect();
        let upload = runtime.block_on(place.store.begin_upload(&key))?;
        let (len, took) = timed(|| {
            runtime.block_on(async {
                let receipts = self.send(place, &key, &upload, &loads).await?;
                let whole = crc64_of_parts(&receipts);
                let len = receipts.iter().map(|receipt| receipt.len).sum();
                let store = &place.store;
                store
                    .complete_upload(&key, &upload, &receipts, len, whole.value())
                    .await?;
                Ok::<_, BenchError>(len)
            })
        })?;
        Ok((key, Moved { bytes: len, took }))
    }

    async fn send(
        self,
        place: &Place,
        key: &Key,
        upload: &UploadId,
        loads: &[Load],
    ) -> Result<Vec<PartReceipt>, BenchError> {
        let started = Instant::now();
        let numbers = (1..=self.parts_max)
            .take_while(|number| *number == 1 || started.elapsed() < self.time_max)
            .filter_map(PartNumber::new);
        let mut receipts: Vec<PartReceipt> = futures::stream::iter(numbers)
            .map(|number| {
                let load = &loads[usize::from(number.get()) % loads.len()];
                let body = PartBody::new(vec![load.bytes.clone()], load.crc64.value());
                place.store.put_part(key, upload, number, body)
            })
            .buffer_unordered(self.at_once)
            .try_collect()
            .await?;
        receipts.sort_by_key(|receipt| receipt.number);
        Ok(receipts)
    }

    /// Reads an object of `len` bytes in ranges, once or until the time is over.
    pub(super) fn download(
        self,
        runtime: &tokio::runtime::Handle,
        place: &Place,
        key: &Key,
        len: u64,
    ) -> Result<Moved, BenchError> {
        let part_len = self.part_len as u64;
        let buffers = crossbeam_channel::unbounded();
        for _ in 0..self.at_once {
            // Both ends are here.
            let _it_is_open = buffers.0.send(vec![0xA5_u8; self.part_len]);
        }
        let (returned, free) = &buffers;
        let (bytes, took) = timed(|| {
            let started = Instant::now();
            let ranges = (0..len.div_ceil(part_len))
                .take_while(|index| *index == 0 || started.elapsed() < self.time_max)
                .map(|index| index * part_len..((index + 1) * part_len).min(len));
            runtime.block_on(
                futures::stream::iter(ranges)
                    .map(|range| async move {
                        // As many buffers as requests at once.
                        let mut buffer = free.try_recv().unwrap_or_default();
                        buffer.resize(self.part_len, 0);
                        let len = range.end - range.start;
                        let out = &mut buffer[..usize::try_from(len).unwrap_or(usize::MAX)];
                        place.store.get_range(key, range, None, out).await?;
                        let _it_is_open = returned.send(buffer);
                        Ok::<_, BenchError>(len)
                    })
                    .buffer_unordered(self.at_once)
                    .try_fold(0, |sum, len| async move { Ok(sum + len) }),
            )
        })?;
        Ok(Moved { bytes, took })
    }
}
