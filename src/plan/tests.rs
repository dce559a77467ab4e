use proptest::prelude::*;

use super::*;
use crate::codec::Settings;

const GIB: u64 = 1 << 30;
const TB: u64 = 1_000_000_000_000;

fn settings(memory_budget: u64) -> SaveSettings {
    SaveSettings {
        part_size: None,
        limits: PartLimits::S3,
        chunk_size: None,
        memory_budget,
        budget_is_set: true,
        threads: 2,
        parallelism: 16,
        context_bytes: Settings::default().context_bytes(),
    }
}

fn load_settings(memory_budget: u64) -> LoadSettings {
    LoadSettings {
        memory_budget,
        budget_is_set: true,
        threads: 2,
        parallelism: 16,
    }
}

#[test]
fn chunks_of_edge_sizes() {
    let counts = [0, 1, MIB - 1, MIB, MIB + 1].map(|len| Chunks::new(len, MIB).count());
    assert_eq!(counts, [0, 1, 1, 1, 2]);
    let chunks = Chunks::new(MIB + 1, MIB);
    assert_eq!(chunks.range(0), 0..MIB);
    assert_eq!(chunks.range(1), MIB..MIB + 1);
    assert!(chunks.range(2).is_empty());
    assert!(Chunks::new(u64::MAX, MIB).range(u64::MAX).is_empty());
}

#[test]
fn a_small_budget_holds_any_one_gpu() {
    for memory_len in [4 * GIB, 24 * GIB, 80 * GIB] {
        let plan = plan_save(&[memory_len], &settings(256 * MIB)).unwrap();
        assert!(plan.total_bytes <= 256 * MIB);
        assert_eq!(plan.threads, 2);
        // At least three parts: one being filled, two in flight.
        assert!(plan.ring_chunks >= 2, "{plan:?}");
        assert!(
            plan.pack_buffers as u64 * PACK_LEN >= 3 * plan.part_len,
            "{plan:?}"
        );
    }
    let plan = plan_save(&[GIB / 2; 8], &settings(256 * MIB)).unwrap();
    assert!(plan.total_bytes <= 256 * MIB);
    let lane = LoadLane {
        raw_len: 4 * GIB,
        chunk_len: 4 * MIB,
        frame_len_max: 4_194_415,
        frames_len: 4 * GIB,
    };
    for lanes in [vec![lane], vec![lane; 8]] {
        let plan = plan_load(&lanes, &load_settings(256 * MIB)).unwrap();
        assert!(plan.total_bytes <= 256 * MIB);
        assert_eq!(plan.fetch_len_max, 16 * MIB);
    }
}

#[test]
fn plenty_of_memory_reaches_every_limit_and_stops() {
    let plan = plan_save(&[80 * GIB; 8], &settings(1 << 40)).unwrap();
    assert_eq!((plan.chunk_len, plan.part_len), (8 * MIB, 16 * MIB));
    // Half of the 16 parts in flight and one per GPU, beside what keeps the stages moving.
    let lent_parts = 8 + 8;
    let lent_chunks = 2 * lent_parts;
    assert_eq!(plan.ring_chunks, 8 + lent_chunks / 8);
    assert_eq!(plan.frame_buffers, 4 + lent_chunks);
    assert_eq!(plan.pack_buffers, lent_parts * 16);
    let lane = LoadLane {
        raw_len: 80 * GIB,
        chunk_len: 16 * MIB,
        frame_len_max: 100,
        frames_len: GIB,
    };
    let plan = plan_load(&[lane; 8], &load_settings(1 << 40)).unwrap();
    // Eight, and the eighth lane's share of the two decompressors.
    assert_eq!((plan.ring_chunks, plan.fetch_buffers), (8 + 1, 16 + 8));
}

#[test]
fn parts_in_flight_have_memory_whatever_the_data() {
    for (threads, parallelism, in_flight) in [(2, 64, 16), (16, 64, 64), (64, 64, 64), (16, 4, 4)] {
        let settings = SaveSettings {
            threads,
            parallelism,
            ..settings(4 * GIB)
        };
        let plan = plan_save(&[80 * GIB], &settings).unwrap();
        let parts = |count: usize, len: u64| count as u64 * len / plan.part_len;
        let packed = parts(plan.pack_buffers, PACK_LEN);
        let raw = packed + parts(plan.ring_chunks - 2, plan.chunk_len);
        let compressed = packed + parts(plan.frame_buffers - threads as usize - 1, plan.chunk_len);
        assert!(raw > in_flight && compressed > in_flight, "{plan:?}");
    }
}

#[test]
fn a_small_save_takes_no_more_buffers_than_it_can_fill() {
    let plan = plan_save(&[80 * GIB; 2], &settings(1 << 40)).unwrap();
    let small = plan.clone().for_memory_in_use(&[40 * MIB, 70 * MIB]);
    // At least 64 MiB each, and chunks are 8 MiB long.
    assert_eq!(small.ring_chunks, 9);
    assert_eq!(small.pack_buffers, 64 + 70);
    assert_eq!(
        small.frame_buffers,
        plan.frame_buffers
            .min(8 + 9)
            .max(small.threads as usize + 1)
    );
    assert_eq!(
        (small.chunk_len, small.part_len, small.threads),
        (plan.chunk_len, plan.part_len, plan.threads)
    );
    let ring = (plan.ring_chunks - small.ring_chunks) as u64 * 2 * 8 * MIB;
    let packs = (plan.pack_buffers - small.pack_buffers) as u64 * PACK_LEN;
    let frames = (plan.frame_buffers - small.frame_buffers) as u64 * plan.frame_len_max as u64;
    assert_eq!(plan.total_bytes - small.total_bytes, ring + frames + packs);
    assert_eq!(plan.clone().for_memory_in_use(&[80 * GIB; 2]), plan);
    // What keeps everything moving stays, whatever the driver counts.
    let coarse = SaveSettings {
        chunk_size: Some(64 * MIB),
        part_size: Some(512 * MIB),
        ..settings(1 << 40)
    };
    let emptied = plan_save(&[80 * GIB; 2], &coarse).unwrap();
    let emptied = emptied.for_memory_in_use(&[0; 2]);
    assert_eq!(
        (
            emptied.ring_chunks,
            emptied.pack_buffers,
            emptied.frame_buffers
        ),
        (2, 3 * 512, emptied.threads as usize + 1)
    );
}

#[test]
fn a_small_image_takes_no_more_buffers_than_it_fills() {
    let lane = LoadLane {
        raw_len: 10 * MIB,
        chunk_len: 4 * MIB,
        frame_len_max: 4_194_415,
        frames_len: 9 * MIB,
    };
    let plan = plan_load(&[lane], &load_settings(1 << 40)).unwrap();
    assert_eq!(plan.fetch_len_max, 9 * MIB);
    assert_eq!((plan.ring_chunks, plan.fetch_buffers), (3, 2));
}

#[test]
fn no_gpu_at_all_is_a_plan() {
    let plan = plan_save(&[], &settings(256 * MIB)).unwrap();
    assert_eq!(plan.table_bytes, 0);
    plan_load(&[], &load_settings(256 * MIB)).unwrap();
}

#[test]
fn default_lengths_grow_with_the_gpu() {
    let lens = |memory_len| {
        let plan = plan_save(&[GIB, memory_len], &settings(1 << 50)).unwrap();
        (plan.chunk_len / MIB, plan.part_len / MIB)
    };
    assert_eq!(lens(0), (4, 16));
    assert_eq!(lens(32 * GIB), (4, 16));
    assert_eq!(lens(32 * GIB + 1), (8, 16));
    assert_eq!(lens(141 * GIB), (8, 17));
    assert_eq!(lens(20 * TB), (64, 2120));
}

#[test]
fn part_sizes_are_refused_with_the_least_that_works() {
    let with = |part_size| SaveSettings {
        part_size: Some(part_size),
        ..settings(1 << 50)
    };
    let memory_len = 80 * GIB;
    let error = plan_save(&[GIB, memory_len], &with(8 * MIB)).unwrap_err();
    let PlanError::PartSizeTooSmall { value, least, .. } = error else {
        panic!("{error:?}");
    };
    assert_eq!(value, 8 * MIB);
    let plan = plan_save(&[memory_len], &with(least)).unwrap();
    assert_eq!(plan.part_len, least);
    assert!(plan_save(&[memory_len], &with(least - MIB)).is_err());
    for value in [PART_LEN_MIN - 1, PART_LEN_MAX + 1] {
        let error = plan_save(&[GIB], &with(value)).unwrap_err();
        let (len_min, len_max) = (PART_LEN_MIN, PART_LEN_MAX);
        assert_eq!(
            error,
            PlanError::PartSize {
                value,
                len_min,
                len_max
            }
        );
    }
}

/// S3-07, S3-10: stores take different numbers, and nothing is begun that would outgrow them.
#[test]
fn a_store_of_narrower_limits_gets_longer_parts_or_is_refused() {
    let with = |limits: PartLimits| SaveSettings {
        limits,
        ..settings(1 << 50)
    };
    let few = PartLimits {
        count_max: 20,
        ..PartLimits::S3
    };
    let plan = plan_save(&[GIB], &with(few)).unwrap();
    assert!(object_len_max(GIB, plan.chunk_len).div_ceil(plan.part_len) <= 20);
    let short = SaveSettings {
        part_size: Some(16 * MIB),
        ..with(few)
    };
    let error = plan_save(&[GIB], &short).unwrap_err();
    assert!(error.to_string().contains("in 20 parts"), "{error}");
    // The longest part that a store takes need not be a whole number of MiB.
    let odd = PartLimits {
        len_max: 5_000_000_000,
        ..few
    };
    let plan = plan_save(&[90 * GIB], &with(odd)).unwrap();
    assert!(plan.part_len <= odd.len_max);
    assert!(object_len_max(90 * GIB, plan.chunk_len).div_ceil(plan.part_len) <= 20);
    for narrow in [
        PartLimits {
            object_len_max: GIB,
            ..PartLimits::S3
        },
        PartLimits {
            len_max: 50 * MIB,
            ..few
        },
    ] {
        let error = plan_save(&[GIB], &with(narrow)).unwrap_err();
        assert!(matches!(error, PlanError::ObjectTooLong { .. }), "{error}");
        assert!(
            error.to_string().contains("store.object_size_max"),
            "{error}"
        );
    }
}

#[test]
fn chunk_sizes_are_refused_by_value() {
    let with = |chunk_size| SaveSettings {
        chunk_size: Some(chunk_size),
        ..settings(1 << 50)
    };
    for value in [0, MIB - 1, MIB / 2, 3 * MIB, 128 * MIB] {
        let error = plan_save(&[GIB], &with(value)).unwrap_err();
        assert_eq!(error, PlanError::ChunkSize { value });
    }
    let error = plan_save(&[TB], &with(MIB)).unwrap_err();
    let (value, least, memory_len) = (MIB, 4 * MIB, TB);
    assert_eq!(
        error,
        PlanError::ChunkSizeTooSmall {
            value,
            least,
            memory_len
        }
    );
    plan_save(&[TB], &with(least)).unwrap();
}

#[test]
fn budgets_shrink_threads_first_and_are_refused_with_the_least() {
    let error = plan_save(&[80 * GIB], &settings(0)).unwrap_err();
    let PlanError::BudgetTooSmall { set: 0, least } = error else {
        panic!("{error:?}");
    };
    let plan = plan_save(&[80 * GIB], &settings(least)).unwrap();
    assert_eq!((plan.threads, plan.total_bytes), (1, least));
    assert!(plan_save(&[80 * GIB], &settings(least - 1)).is_err());

    let derived = SaveSettings {
        budget_is_set: false,
        ..settings(0)
    };
    let plan = plan_save(&[80 * GIB], &derived).unwrap();
    assert_eq!(plan.total_bytes, least);
}

#[test]
fn a_restore_reads_shorter_before_it_gives_up() {
    let lane = LoadLane {
        raw_len: 4 * GIB,
        chunk_len: 4 * MIB,
        frame_len_max: 2_000_000,
        frames_len: GIB,
    };
    let plan = plan_load(&[lane], &load_settings(20 * MIB)).unwrap();
    assert!(plan.total_bytes <= 20 * MIB);
    assert_eq!(plan.fetch_len_max, 2_000_000);
    let error = plan_load(&[lane], &load_settings(0)).unwrap_err();
    let PlanError::BudgetTooSmall { least, .. } = error else {
        panic!("{error:?}");
    };
    assert_eq!(
        plan_load(&[lane], &load_settings(least))
            .unwrap()
            .total_bytes,
        least
    );
}

#[test]
fn groups_of_frames() {
    assert_eq!(fetch_groups(&[], 10), []);
    let groups = fetch_groups(&[4, 6, 1, 20, 5, 5, 1], 10);
    let expected = [
        (0..2, 0..10),
        (2..3, 10..11),
        (3..4, 11..31),
        (4..6, 31..41),
        (6..7, 41..42),
    ];
    let expected = expected.map(|(frames, bytes)| FetchGroup { frames, bytes });
    assert_eq!(groups, expected);
}

fn optional<T: Clone + std::fmt::Debug>(
    value: impl Strategy<Value = T>,
) -> impl Strategy<Value = Option<T>> {
    proptest::option::of(value)
}

proptest! {
    #[test]
    fn chunks_cover_every_byte_once(extent_len in 0..100_000u64, chunk_len in 1..5_000u64) {
        let chunks = Chunks::new(extent_len, chunk_len);
        let mut covered = 0;
        for index in 0..chunks.count() {
            let range = chunks.range(index);
            prop_assert_eq!(range.start, covered);
            prop_assert!(!range.is_empty() && range.end - range.start <= chunk_len);
            covered = range.end;
        }
        prop_assert_eq!(covered, extent_len);
    }

    #[test]
    fn saves_fit_the_parts_of_the_store_and_the_budget(
        gpu_memory in proptest::collection::vec(prop_oneof![0..1000 * GIB, 0..60 * TB], 0..9),
        part_size in optional(0..6 * GIB),
        count_max in 1..=PART_COUNT_MAX,
        len_max in PART_LEN_MIN..=PART_LEN_MAX,
        object_len_max_set in prop_oneof![GIB..TB, Just(PartLimits::S3.object_len_max)],
        chunk_log in optional(18..28u32),
        memory_budget in prop_oneof![0..4 * GIB, 0..TB],
        budget_is_set: bool,
        threads in 1..200u32,
        parallelism in 1..256u32,
        context_bytes in 0..200 * MIB,
    ) {
        let limits = PartLimits {
            len_min: PART_LEN_MIN,
            len_max,
            count_max,
            object_len_max: object_len_max_set,
        };
        let settings = SaveSettings {
            part_size,
            limits,
            chunk_size: chunk_log.map(|log| 1 << log),
            memory_budget,
            budget_is_set,
            threads,
            parallelism,
            context_bytes,
        };
        let Ok(plan) = plan_save(&gpu_memory, &settings) else {
            return Ok(());
        };
        for len in &gpu_memory {
            let object_len = object_len_max(*len, plan.chunk_len);
            prop_assert!(object_len.div_ceil(plan.part_len) <= count_max);
            prop_assert!(object_len <= object_len_max_set);
            prop_assert!(Chunks::new(*len, plan.chunk_len).count() <= FRAME_COUNT_MAX);
        }
        prop_assert!((PART_LEN_MIN..=len_max).contains(&plan.part_len));
        prop_assert!(plan.ring_chunks >= 2);
        prop_assert!(plan.frame_buffers > plan.threads as usize);
        prop_assert!(plan.threads >= 1 && plan.threads <= threads);
        prop_assert!(plan.pack_buffers as u64 * PACK_LEN >= (gpu_memory.len() as u64 + 1) * plan.part_len);
        let counted = gpu_memory.len() as u64 * plan.ring_chunks as u64 * plan.chunk_len
            + (plan.frame_buffers * plan.frame_len_max) as u64
            + plan.pack_buffers as u64 * PACK_LEN
            + u64::from(plan.threads) * context_bytes
            + plan.table_bytes;
        prop_assert_eq!(plan.total_bytes, counted);
        prop_assert!(plan.total_bytes <= memory_budget || !budget_is_set);
    }

    #[test]
    fn defaults_hold_everything_up_to_the_stores_limit(memory_len in 0..25 * TB) {
        let unlimited = settings(u64::MAX);
        prop_assert!(plan_save(&[memory_len], &unlimited).is_ok());
    }

    #[test]
    fn loads_fit_the_budget(
        lanes in proptest::collection::vec((0..TB, 20..27u32, any::<u32>(), 0..TB), 0..9),
        memory_budget in prop_oneof![0..GIB, 0..TB],
        budget_is_set: bool,
        threads in 1..200u32,
        parallelism in 1..256u32,
    ) {
        let lanes: Vec<LoadLane> = lanes
            .into_iter()
            .map(|(raw_len, log, frame_len_max, frames_len)| LoadLane { raw_len, chunk_len: 1 << log, frame_len_max, frames_len })
            .collect();
        let settings = LoadSettings { memory_budget, budget_is_set, threads, parallelism };
        let Ok(plan) = plan_load(&lanes, &settings) else {
            prop_assert!(budget_is_set);
            return Ok(());
        };
        prop_assert!(plan.total_bytes <= memory_budget || !budget_is_set);
        prop_assert!(plan.fetch_buffers >= 2 && plan.ring_chunks >= 2 && plan.threads >= 1);
        for lane in &lanes {
            prop_assert!(plan.fetch_len_max >= u64::from(lane.frame_len_max));
        }
    }

    #[test]
    fn groups_cover_every_frame_once(frame_lens in proptest::collection::vec(1..5_000u32, 0..100), fetch_len_max in 1..20_000u64) {
        let groups = fetch_groups(&frame_lens, fetch_len_max);
        let (mut frame, mut offset) = (0, 0);
        for group in &groups {
            prop_assert_eq!(group.frames.start, frame);
            prop_assert_eq!(group.bytes.start, offset);
            let len: u64 = frame_lens[group.frames.clone()].iter().copied().map(u64::from).sum();
            prop_assert_eq!(group.bytes.end - group.bytes.start, len);
            prop_assert!(len <= fetch_len_max || group.frames.len() == 1);
            (frame, offset) = (group.frames.end, group.bytes.end);
        }
        prop_assert_eq!(frame, frame_lens.len());
    }
}
