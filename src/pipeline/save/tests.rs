use std::sync::mpsc::channel;
use std::time::Duration;

use super::super::network::Network;
use super::*;
use crate::codec::{Level, Settings};
use crate::driver::{DeviceMemory, STREAMS_OUT, fake};

const CHUNK_LEN: usize = 256 << 10;
const CHUNK_COUNT: usize = 21;
/// Longer than a chunk and no multiple of one: frames straddle parts, and parts hold several.
const PART_LEN: usize = 600_000;
const PACK_LEN: usize = 100_000;
/// For a run that takes a fraction of a second.
const HANGS_AFTER: Duration = Duration::from_secs(120);

/// What a chunk holds.
#[derive(Debug, Clone, Copy)]
enum Fill {
    /// A raw frame.
    Random,
    /// A frame of half the length.
    Half,
    /// A frame of next to nothing.
    Zero,
    /// The more a compressor tries, the shorter.
    Words,
}

impl Fill {
    fn write(self, chunk: &mut [u8], seed: u64) {
        chunk.fill(0);
        let len = match self {
            Fill::Random => chunk.len(),
            Fill::Half => chunk.len() / 2,
            Fill::Zero | Fill::Words => 0,
        };
        let mut random = fastrand::Rng::with_seed(seed);
        random.fill(&mut chunk[..len]);
        if let Fill::Words = self {
            let words: Vec<[u8; 7]> = (0..500)
                .map(|_| random.u64(..).to_le_bytes())
                .map(|it| it[..7].try_into().unwrap())
                .collect();
            for place in chunk.chunks_exact_mut(7) {
                place.copy_from_slice(&words[random.usize(..words.len())]);
            }
        }
    }
}

/// A run on buffers as few as the least plan has, and some to lend.
#[derive(Debug, Clone, Default)]
struct Case {
    /// What each lane's ring buffers hold, in turn. The driver of stubs copies nothing, so that is what is saved.
    lanes: Vec<Vec<Fill>>,
    threads: usize,
    parallelism: usize,
    /// Chunk buffers per lane, and frame buffers, beyond the least plan.
    to_lend: usize,
    level: Level,
    due: Option<Instant>,
}

impl Case {
    /// Runs it against a store that holds every part for a while. `None` when it hangs.
    fn run(self) -> Option<Saved> {
        let (done, outcome) = channel();
        std::thread::spawn(move || done.send(self.save()));
        outcome.recv_timeout(HANGS_AFTER).ok()
    }

    fn save(&self) -> Saved {
        self.try_save(None).unwrap()
    }

    fn try_save(&self, witness: Option<&Arc<Witness>>) -> Result<Saved, PipelineError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let store = Arc::new(Network::far(Duration::from_millis(3)));
        let driver = fake::driver();
        let memory = DeviceMemory::allocate(&driver, 0, CHUNK_COUNT * CHUNK_LEN - 1000).unwrap();
        let lane = |(index, fills): (usize, &Vec<Fill>)| {
            let extent = memory.extent();
            let key = Key::new(&format!("job/{index}")).unwrap();
            SaveLane {
                ring: ring(2 + self.to_lend, fills),
                table: FrameTable::new(extent.len, CHUNK_LEN as u64),
                upload: runtime.block_on(store.begin_upload(&key)).unwrap(),
                witness: witness.cloned(),
                meter: LaneMeter::new("lane", extent.len),
                key,
                origin: Origin::Gpu {
                    queue: CopyQueue::prepare(&driver, 0, 2 + self.to_lend, STREAMS_OUT).unwrap(),
                    extent,
                },
            }
        };
        let lanes: Vec<_> = self.lanes.iter().enumerate().map(lane).collect();
        let frame_len = crate::codec::frame_bound(CHUNK_LEN);
        let frame_count = self.threads + 1 + self.to_lend;
        let pack_count = (lanes.len() + 1) * PART_LEN.div_ceil(PACK_LEN);
        let settings = Settings {
            level: self.level,
            ..Settings::default()
        };
        let encoders = (0..self.threads).map(|_| Encoder::new(settings).unwrap());
        let mut encoders: Vec<_> = encoders.collect();
        let resources = SaveResources {
            store: store.clone(),
            runtime: runtime.handle().clone(),
            chunk_len: CHUNK_LEN as u64,
            frame_buffers: BufferPool::new(frame_count, frame_len, None).unwrap(),
            part_len: PART_LEN,
            pack_buffers: BufferPool::new(pack_count, PACK_LEN, None).unwrap(),
            parallelism: self.parallelism,
            meter: Meter::new(),
        };
        resources.meter.set_due(self.due);
        let pools = [
            resources.frame_buffers.clone(),
            resources.pack_buffers.clone(),
        ];
        let rings: Vec<_> = lanes.iter().map(|lane| lane.ring.clone()).collect();
        let saved = save(lanes, &mut encoders, resources)?;
        for lane in &saved.lanes {
            // The store refuses what is not as long, or does not have the checksum, that it is said to have.
            let parts = &lane.parts;
            let completed = runtime.block_on(store.complete_upload(
                &lane.key,
                &lane.upload,
                parts,
                lane.len,
                lane.crc64.value(),
            ));
            completed.unwrap();
            let (last, full) = parts.split_last().unwrap();
            assert!(full.iter().all(|part| part.len == PART_LEN as u64));
            assert!(last.len <= PART_LEN as u64);
        }
        for pool in pools.iter().chain(&rings) {
            assert_eq!(pool.free_count(), pool.count(), "every loan ends");
        }
        Ok(saved)
    }
}

#[test]
fn a_save_that_is_late_compresses_as_time_allows() {
    let stored = |level, due| {
        let case = Case {
            lanes: vec![vec![Fill::Words]],
            threads: 1,
            parallelism: 2,
            level,
            due,
            ..Case::default()
        };
        case.save().lanes[0].len
    };
    let hour = Duration::from_secs(3600);
    let thorough = stored(Level::Zstd(12), None);
    assert_eq!(
        stored(Level::Zstd(12), Some(Instant::now() + hour)),
        thorough
    );
    // All but the first chunk.
    let late = stored(Level::Zstd(12), Some(Instant::now()));
    assert!(late > thorough, "{late} {thorough}");
}

#[test]
fn memory_that_does_not_stand_still_makes_a_save_void() {
    let case = |fill| Case {
        lanes: vec![vec![fill]],
        threads: 1,
        parallelism: 1,
        to_lend: 0,
        ..Case::default()
    };
    let witness = Arc::new(Witness::new(CHUNK_COUNT));
    case(Fill::Zero).try_save(Some(&witness)).unwrap();
    case(Fill::Zero).try_save(Some(&witness)).unwrap();
    let error = case(Fill::Random).try_save(Some(&witness)).unwrap_err();
    assert!(matches!(error, PipelineError::NotStill { .. }), "{error}");
}

fn ring(count: usize, fills: &[Fill]) -> BufferPool {
    let ring = BufferPool::new(count, CHUNK_LEN, None).unwrap();
    let mut buffers: Vec<_> = (0..count).map(|_| ring.acquire().unwrap().0).collect();
    let fills = fills.iter().cycle();
    for ((seed, buffer), fill) in (0..).zip(&mut buffers).zip(fills) {
        fill.write(buffer, seed);
    }
    ring
}

#[test]
fn nothing_waits_for_ever_on_the_least_buffers() {
    let mixes: [&[&[Fill]]; 7] = [
        &[&[Fill::Random]],
        &[&[Fill::Half]],
        &[&[Fill::Zero]],
        &[&[Fill::Random, Fill::Zero, Fill::Half]],
        &[&[Fill::Zero, Fill::Half]],
        &[&[Fill::Random], &[Fill::Zero], &[Fill::Half]],
        &[
            &[Fill::Half, Fill::Random],
            &[Fill::Half],
            &[Fill::Zero, Fill::Random],
        ],
    ];
    for lanes in mixes {
        for (threads, parallelism, to_lend) in
            [(1, 1, 0), (2, 8, 0), (1, 1, 1), (3, 1, 2), (2, 8, 7)]
        {
            let case = Case {
                lanes: lanes.iter().map(|fills| fills.to_vec()).collect(),
                threads,
                parallelism,
                to_lend,
                ..Case::default()
            };
            let saved = case.clone().run();
            let saved = saved.unwrap_or_else(|| panic!("{case:?} hangs, or failed as said above"));
            for lane in &saved.lanes {
                assert_eq!(lane.table.frame_count(), CHUNK_COUNT);
            }
        }
    }
}
