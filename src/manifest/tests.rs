use std::error::Error;

use proptest::prelude::*;

use super::*;
use crate::codec::sample_data::{frame_of, random};
use crate::codec::{Encoder, Filter, FilterChoice, FrameKind, Level, Settings};

const MIB: u64 = 1 << 20;
const JOB: &str = "train-7";
const ATTEMPT: &str = "0123456789abcdef0123456789abcdef";
const UUID: &str = "GPU-11111111-2222-3333-4444-555555555555";
const OTHER_UUID: &str = "GPU-aaaaaaaa-2222-3333-4444-555555555555";

/// A table as a save would build it, over an extent that nothing is known of but its length.
fn table(raw_len: u64) -> FrameTable {
    let mut table = FrameTable::new(raw_len, MIB);
    for index in 0..raw_len.div_ceil(MIB) {
        let kind = [FrameKind::Zero, FrameKind::Raw, FrameKind::Zstd][(index % 3) as usize];
        let stored_len = 14 + (index % 4) as u32;
        table.push(
            stored_len,
            kind,
            Filter::None,
            Digest::of(&index.to_le_bytes()),
        );
    }
    table
}

fn extent(device: &str, name: &str, table: &FrameTable) -> ExtentRecord {
    let key = |suffix: &str| format!("data/{ATTEMPT}/7/{name}{suffix}");
    ExtentRecord {
        device: device.to_owned(),
        raw_len: table.raw_len,
        chunk_len: table.chunk_len,
        object: ObjectRecord {
            key: key(".0.zst"),
            len: table.object_len(),
            crc64: Crc64::of(b"object"),
        },
        table: FrameTable::record(&table.encode(), key(".0.frames.json")),
    }
}

fn manifest() -> Manifest {
    let device = |uuid: &str, ordinal| DeviceRecord {
        uuid: uuid.to_owned(),
        name: "NVIDIA H200".to_owned(),
        chip: "9.0".to_owned(),
        memory_len: 141 << 30,
        pci: "00000000:3b:00.0".to_owned(),
        ordinal,
    };
    Manifest {
        format: FORMAT,
        features: Vec::new(),
        tool: "ckptstream 0.1.0".to_owned(),
        job: JOB.to_owned(),
        kind: ImageKind::Gpu,
        attempt: ATTEMPT.to_owned(),
        created_ms: 1_790_000_000_000,
        capture: Capture {
            mode: CaptureMode::CustomStorage,
            driver_version: Some("615.10".to_owned()),
            driver_api: 13_040,
        },
        host: Host {
            name: "node-1".to_owned(),
            boot_id: "7d3d1c0e-30a1-4c0e-8f41-0a3c5f6c5c11".to_owned(),
        },
        tree: None,
        processes: vec![ProcessRecord {
            pid: 4711,
            start_time: 123_456,
            ns_pids: vec![4711, 7],
            name: "python3".to_owned(),
            devices: vec![device(UUID, 0), device(OTHER_UUID, 1)],
            extents: vec![
                extent(UUID, "gpu-a", &table(3 * MIB + 1)),
                extent(OTHER_UUID, "gpu-b", &table(MIB)),
            ],
        }],
    }
}

fn decode(bytes: &[u8]) -> Result<Manifest, ManifestError> {
    Manifest::decode_and_verify(bytes, JOB, ATTEMPT)
}

/// The manifest that says this JSON, with a right digest.
fn sealed(value: &serde_json::Value) -> Vec<u8> {
    let text = serde_json::to_string_pretty(value).unwrap();
    let covered = format!("{},\n  ", text.strip_suffix("\n}").unwrap());
    let digest = Digest::of(covered.as_bytes());
    format!("{covered}\"self_xxh3_128\": \"{digest}\"\n}}\n").into_bytes()
}

#[test]
fn round_trip() {
    let manifest = manifest();
    assert_eq!(decode(&manifest.encode()).unwrap(), manifest);
    assert_eq!(manifest.raw_len(), 4 * MIB + 1);
    assert!(manifest.stored_len() > 0);

    let mut nothing_to_save = manifest;
    nothing_to_save.processes[0].extents.clear();
    nothing_to_save.capture.driver_version = None;
    assert_eq!(decode(&nothing_to_save.encode()).unwrap(), nothing_to_save);
}

#[test]
fn the_digest_is_the_last_member_over_every_byte_before_its_quote() {
    let bytes = manifest().encode();
    let text = std::str::from_utf8(&bytes).unwrap();
    let (covered, rest) = text.split_at(text.rfind("\"self_xxh3_128\"").unwrap());
    let stated = rest
        .strip_prefix("\"self_xxh3_128\": \"")
        .and_then(|rest| rest.strip_suffix("\"\n}\n"));
    assert_eq!(
        stated,
        Some(Digest::of(covered.as_bytes()).to_string().as_str())
    );
    serde_json::from_str::<serde_json::Value>(text).unwrap();
}

#[test]
fn every_damaged_byte_is_refused_before_parsing() {
    let bytes = manifest().encode();
    for at in 0..bytes.len() {
        for flip in [0x01, 0x20, 0x80] {
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            let error = decode(&damaged).unwrap_err();
            assert!(
                matches!(
                    error,
                    ManifestError::Digest { .. } | ManifestError::NoDigest
                ),
                "byte {at}: {error:?}"
            );
        }
        assert!(decode(&bytes[..at]).is_err());
    }
    assert!(decode(&[bytes.as_slice(), b" "].concat()).is_err());
    assert!(matches!(
        decode(&vec![b' '; MANIFEST_LEN_MAX + 1]),
        Err(ManifestError::TooLong { .. })
    ));
}

#[test]
fn version_and_features_are_looked_at_before_the_rest() {
    let newer = serde_json::json!({"format": 2, "other": true});
    assert!(matches!(
        decode(&sealed(&newer)),
        Err(ManifestError::Format { found: 2, .. })
    ));
    let mut value = serde_json::to_value(manifest()).unwrap();
    value["features"] = serde_json::json!(["planes"]);
    assert_eq!(decode(&sealed(&value)).unwrap().features, ["planes"]);
    value["features"] = serde_json::json!(["planes", "deltas"]);
    value["processes"] = serde_json::json!("in another shape");
    let error = decode(&sealed(&value)).unwrap_err();
    assert!(
        matches!(error, ManifestError::UnknownFeature { ref name, .. } if name == "deltas"),
        "{error:?}"
    );
}

#[test]
fn unknown_members_are_passed_over_and_absent_ones_refused() {
    let mut value = serde_json::to_value(manifest()).unwrap();
    value["comment"] = serde_json::json!("from a later version");
    value["processes"][0]["extents"][0]["hint"] = serde_json::json!(1);
    assert_eq!(decode(&sealed(&value)).unwrap(), manifest());

    fn remove_each(
        whole: &serde_json::Value,
        pointer: &str,
        check: &dyn Fn(&serde_json::Value, &str),
    ) {
        let at = whole.pointer(pointer).unwrap();
        let names: Vec<String> = match at {
            serde_json::Value::Object(members) => members.keys().cloned().collect(),
            serde_json::Value::Array(items) => (0..items.len()).map(|i| i.to_string()).collect(),
            _ => return,
        };
        for name in names {
            let child = format!("{pointer}/{name}");
            if at.is_object() {
                let mut without = whole.clone();
                let object = without.pointer_mut(pointer).unwrap();
                object.as_object_mut().unwrap().remove(&name);
                check(&without, &child);
            }
            remove_each(whole, &child, check);
        }
    }
    let whole = serde_json::to_value(manifest()).unwrap();
    remove_each(&whole, "", &|without, removed| {
        assert!(
            matches!(
                decode(&sealed(without)),
                Err(ManifestError::Malformed { .. })
            ),
            "{removed} may be absent"
        );
    });
}

#[test]
fn every_broken_rule_names_its_field() {
    fn process(manifest: &mut Manifest) -> &mut ProcessRecord {
        &mut manifest.processes[0]
    }
    fn extent(manifest: &mut Manifest) -> &mut ExtentRecord {
        &mut manifest.processes[0].extents[1]
    }
    type Break = fn(&mut Manifest);
    let key = |rest: &str| format!("data/{ATTEMPT}/{rest}");
    let broken: &[(&str, Break)] = &[
        ("job", |m| m.job = "other".to_owned()),
        ("attempt", |m| m.attempt = "0".repeat(32)),
        ("tool", |m| m.tool = "\u{1b}[31m".to_owned()),
        ("host.name", |m| m.host.name = "x".repeat(257)),
        ("host.boot_id", |m| m.host.boot_id = "a\nb".to_owned()),
        ("capture.driver_version", |m| {
            m.capture.driver_version = Some("\0".to_owned());
        }),
        ("processes", |m| m.processes.clear()),
        ("processes[0].pid", |m| process(m).pid = 0),
        ("processes[1].pid", |m| {
            let mut again = process(m).clone();
            again.extents.clear();
            m.processes.push(again);
        }),
        ("processes[0].ns_pids", |m| process(m).ns_pids = vec![1; 33]),
        ("processes[0].ns_pids", |m| process(m).ns_pids = vec![0]),
        ("processes[0].name", |m| process(m).name = "\t".to_owned()),
        ("processes[0].devices[1].uuid", |m| {
            process(m).devices[1].uuid = OTHER_UUID.replace('a', "A");
        }),
        ("processes[0].devices[1].uuid", |m| {
            process(m).devices[1].uuid = UUID.to_owned();
        }),
        ("processes[0].devices[0].memory_len", |m| {
            process(m).devices[0].memory_len = 0;
        }),
        ("processes[0].devices[0].chip", |m| {
            process(m).devices[0].chip = "\r".to_owned();
        }),
        ("processes[0].extents[1].device", |m| {
            extent(m).device = UUID.to_owned();
        }),
        ("processes[0].extents[1].device", |m| {
            extent(m).device = "GPU-0".to_owned();
        }),
        ("processes[0].extents[1].raw_len", |m| extent(m).raw_len = 0),
        ("processes[0].extents[1].raw_len", |m| {
            extent(m).raw_len = u64::MAX;
        }),
        ("processes[0].extents[1].chunk_len", |m| {
            extent(m).chunk_len = 0;
        }),
        ("processes[0].extents[1].chunk_len", |m| {
            extent(m).chunk_len = 3 * MIB;
        }),
        ("processes[0].extents[1].chunk_len", |m| {
            extent(m).chunk_len = 128 * MIB;
        }),
        ("processes[0].extents[1].object.len", |m| {
            extent(m).object.len = object_len_max(MIB, MIB) + 1;
        }),
        ("processes[0].extents[1].table.len", |m| {
            extent(m).table.len = TABLE_LEN_MAX as u64 + 1;
        }),
        ("processes[0].extents[1].object.key", |m| {
            extent(m).object.key = manifest_key(ATTEMPT);
        }),
        ("processes[0].extents[1].table.key", |m| {
            extent(m).table.key = extent(m).object.key.clone();
        }),
    ];
    let break_and_read = |name: &str, breaking: &dyn Fn(&mut Manifest)| {
        let mut manifest = manifest();
        breaking(&mut manifest);
        match decode(&manifest.encode()) {
            Err(ManifestError::Rule { field, .. }) => assert_eq!(field, name),
            other => panic!("{name}: {other:?}"),
        }
    };
    for (name, breaking) in broken {
        break_and_read(name, breaking);
    }
    let bad_keys = [
        String::new(),
        "data/gpu.zst".to_owned(),
        format!("data/{}/gpu.zst", "f".repeat(32)),
        format!("/data/{ATTEMPT}/gpu.zst"),
        key(""),
        key("../other/gpu.zst"),
        key("./gpu.zst"),
        key("a//gpu.zst"),
        key("a/"),
        key("a b.zst"),
        key("a\\b.zst"),
        key(&"x".repeat(500)),
    ];
    for bad in &bad_keys {
        break_and_read("processes[0].extents[1].object.key", &|m| {
            extent(m).object.key.clone_from(bad);
        });
        break_and_read("processes[0].extents[1].table.key", &|m| {
            extent(m).table.key.clone_from(bad);
        });
    }
}

#[test]
fn messages_name_value_and_rule_but_never_repeat_their_source() {
    let mut wrong = manifest();
    wrong.processes[0].extents[0].chunk_len = 5;
    let error = decode(&wrong.encode()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "processes[0].extents[0].chunk_len is 5; it must be a power of two from 1 MiB to 64 MiB"
    );
    let error = decode(&sealed(
        &serde_json::json!({"format": 1, "features": [], "job": 7}),
    ))
    .unwrap_err();
    let source = error.source().unwrap().to_string();
    assert!(!error.to_string().contains(&source));
}

#[test]
fn claims() {
    let claim = AttemptClaim {
        format: FORMAT,
        job: JOB.to_owned(),
        attempt: ATTEMPT.to_owned(),
        tool: "ckptstream 0.1.0".to_owned(),
        host: "node-1".to_owned(),
        pid: 4711,
        created_ms: 1_790_000_000_000,
    };
    let stored: serde_json::Value = serde_json::from_slice(&claim.encode()).unwrap();
    let expected = serde_json::json!({
        "format": 1,
        "job": JOB,
        "attempt": ATTEMPT,
        "tool": "ckptstream 0.1.0",
        "host": "node-1",
        "pid": 4711,
        "created_ms": 1_790_000_000_000_u64,
    });
    assert_eq!(stored, expected);
}

mod frame_tables {
    use super::*;

    #[test]
    fn a_table_for_the_whole_gpu_serves_any_extent_without_allocating() {
        let whole = FrameTable::new(100 * MIB, MIB);
        let room = whole.digests.as_ptr();
        let mut table = whole.for_extent(99 * MIB + 1);
        for _ in 0..100 {
            assert!(!table.is_complete());
            table.push(14, FrameKind::Raw, Filter::None, Digest::of(b""));
        }
        assert!(table.is_complete());
        assert_eq!(table.digests.as_ptr(), room);
    }

    /// The same with a filter on every third frame.
    fn table_with_planes(raw_len: u64) -> FrameTable {
        let mut table = table(raw_len);
        let all = Filter::ALL.into_iter().cycle();
        for ((kind, filter), some) in table.kinds.iter().zip(&mut table.filters).zip(all) {
            if *kind == FrameKind::Zstd {
                *filter = some;
            }
        }
        table
    }

    /// Reads a table as the extent's, after `change` has changed the file and, where asked, the record has been made to fit it again.
    fn read_changed(
        raw_len: u64,
        change: impl FnOnce(&mut serde_json::Value),
    ) -> Result<FrameTable, ManifestError> {
        read_table_changed(&table(raw_len), change)
    }

    fn read_table_changed(
        table: &FrameTable,
        change: impl FnOnce(&mut serde_json::Value),
    ) -> Result<FrameTable, ManifestError> {
        let mut extent = extent(UUID, "gpu", table);
        let mut value = serde_json::from_slice(&table.encode()).unwrap();
        change(&mut value);
        let bytes = serde_json::to_vec(&value).unwrap();
        extent.table = FrameTable::record(&bytes, extent.table.key);
        FrameTable::decode_and_verify(&bytes, &extent.table, &extent)
    }

    #[test]
    fn round_trip() {
        for table in [1, MIB - 1, MIB, MIB + 1, 20 * MIB + 5]
            .into_iter()
            .flat_map(|raw_len| [table(raw_len), table_with_planes(raw_len)])
        {
            assert!(table.is_complete());
            let bytes = table.encode();
            let extent = extent(UUID, "gpu", &table);
            let read = FrameTable::decode_and_verify(&bytes, &extent.table, &extent).unwrap();
            assert_eq!(read, table);
            let features = features_of(ImageKind::Gpu, [&table]);
            assert_eq!(features.is_empty(), !table.has_planes());
        }
    }

    #[test]
    fn filters_stand_in_a_column_only_where_there_are_some() {
        let text = |table: &FrameTable| String::from_utf8(table.encode()).unwrap();
        let without = text(&table(3 * MIB));
        assert!(without.contains("\"features\": [],") && without.contains("\"filter\": \"none\","));
        assert!(!without.contains("\"filters\""));
        let with = text(&table_with_planes(15 * MIB));
        assert!(with.contains("\"features\": [\"planes\"],") && !with.contains("\"filter\""));
        assert!(with.contains("\"filters\": \"--B-----d--b--D\","), "{with}");
        let features = features_of(ImageKind::Gpu, [&table(MIB), &table_with_planes(3 * MIB)]);
        assert_eq!(features, ["planes"]);
    }

    #[test]
    fn filters_that_do_not_fit_are_refused() {
        type Change = fn(&mut serde_json::Value);
        let changes: &[(&str, Change)] = &[
            ("filters", |t| t["filters"] = "--".into()),
            ("filters", |t| t["filters"] = "----".into()),
            ("filters", |t| t["filters"] = "--x".into()),
            ("filters", |t| t["filters"] = "é-".into()),
            ("filters[0]", |t| t["filters"] = "B--".into()),
            ("filters[1]", |t| t["filters"] = "-d-".into()),
            ("stored[2]", |t| t["stored"][2] = 8.into()),
        ];
        let table = table_with_planes(3 * MIB);
        for (name, change) in changes {
            match read_table_changed(&table, change) {
                Err(ManifestError::Rule { field, .. }) => {
                    assert_eq!(field, format!("frame table's {name}"));
                }
                other => panic!("{name}: {other:?}"),
            }
        }
        // The column is there exactly where the feature is, and where it is not, no filter is.
        let malformed: &[Change] = &[
            |t| drop(t.as_object_mut().unwrap().remove("filters")),
            |t| t["features"] = serde_json::json!([]),
        ];
        for change in malformed {
            let error = read_table_changed(&table, change).unwrap_err();
            assert!(
                matches!(error, ManifestError::Malformed { .. }),
                "{error:?}"
            );
        }
        let named = read_changed(3 * MIB, |t| t["filter"] = "planes".into()).unwrap_err();
        assert!(
            matches!(named, ManifestError::Rule { field, .. } if field == "frame table's filter")
        );
    }

    #[test]
    fn entries_follow_from_the_columns() {
        let table = table(2 * MIB + 5);
        let entries: Vec<_> = table.entries().collect();
        assert_eq!(entries.len(), 3);
        assert_eq!(entries[1].bytes(), 14..29);
        let last = entries[2];
        assert_eq!((last.index, last.offset, last.stored_len), (2, 29, 16));
        assert_eq!(last.raw_len, 5);
        assert_eq!((last.kind, last.filter), (FrameKind::Zstd, Filter::None));
        assert_eq!(table.object_len(), 45 + table.seek_table().len() as u64);
        assert_eq!(table.frame_len_max(), 16);
    }

    #[test]
    fn columns_never_grow_while_a_save_fills_them() {
        let table = table(100 * MIB);
        let capacities = (
            table.stored.capacity(),
            table.kinds.capacity(),
            table.filters.capacity(),
            table.digests.capacity(),
        );
        let fresh = FrameTable::new(100 * MIB, MIB);
        assert_eq!(
            capacities,
            (
                fresh.stored.capacity(),
                fresh.kinds.capacity(),
                fresh.filters.capacity(),
                fresh.digests.capacity()
            )
        );
    }

    #[test]
    fn every_damaged_byte_is_refused() {
        let table = table(3 * MIB);
        let bytes = table.encode();
        let extent = extent(UUID, "gpu", &table);
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x01;
            for wrong in [damaged.as_slice(), &bytes[..at]] {
                let error =
                    FrameTable::decode_and_verify(wrong, &extent.table, &extent).unwrap_err();
                assert!(matches!(error, ManifestError::Digest { .. }), "{error:?}");
            }
        }
    }

    #[test]
    fn tables_that_do_not_fit_the_extent_are_refused() {
        type Change = fn(&mut serde_json::Value);
        let changes: &[(&str, Change)] = &[
            ("digest_algorithm", |t| {
                t["digest_algorithm"] = "md5".into();
            }),
            ("codec", |t| t["codec"] = "lz4".into()),
            ("raw_len", |t| t["raw_len"] = 1.into()),
            ("chunk_len", |t| t["chunk_len"] = (2 * MIB).into()),
            ("stored", |t| t["stored"] = serde_json::json!([14, 15])),
            ("stored", |t| {
                t["stored"] = serde_json::json!([14, 15, 17]);
            }),
            ("stored[1]", |t| t["stored"][1] = 8.into()),
            ("stored[2]", |t| t["stored"][2] = (2 * MIB).into()),
            ("kinds", |t| t["kinds"] = "zr".into()),
            ("kinds", |t| t["kinds"] = "zrx".into()),
            ("kinds", |t| t["kinds"] = "zé".into()),
            ("digests", |t| t["digests"] = "0".repeat(95).into()),
            ("digests", |t| t["digests"] = "G".repeat(96).into()),
            ("digests", |t| t["digests"] = "é".repeat(48).into()),
        ];
        for (name, change) in changes {
            match read_changed(3 * MIB, change) {
                Err(ManifestError::Rule { field, .. }) => {
                    assert_eq!(field, format!("frame table's {name}"));
                }
                other => panic!("{name}: {other:?}"),
            }
        }
        let refused = |change: Change| read_changed(3 * MIB, change).unwrap_err();
        assert!(matches!(
            refused(|t| t["format"] = 2.into()),
            ManifestError::Format { found: 2, .. }
        ));
        assert!(matches!(
            refused(|t| t["features"] = serde_json::json!(["deltas"])),
            ManifestError::UnknownFeature { .. }
        ));
        for change in [
            (|t: &mut serde_json::Value| drop(t.as_object_mut().unwrap().remove("filter")))
                as Change,
            |t| t["features"] = serde_json::json!(["planes"]),
            |t| t["stored"][0] = (1u64 << 32).into(),
            |t| t["stored"][0] = serde_json::json!(-1),
            |t| drop(t.as_object_mut().unwrap().remove("kinds")),
        ] {
            assert!(matches!(refused(change), ManifestError::Malformed { .. }));
        }
    }

    #[test]
    fn the_seek_table_must_say_the_same() {
        let table = table(3 * MIB + 1);
        let mut bytes = table.seek_table();
        table.check_seek_table(&bytes).unwrap();
        bytes[8] ^= 1;
        assert_eq!(
            table.check_seek_table(&bytes),
            Err(seek_table::SeekTableError::Entry { index: 0 })
        );
        let shorter = super::table(3 * MIB);
        assert!(table.check_seek_table(&shorter.seek_table()).is_err());
    }

    #[test]
    fn the_largest_table_fits_its_cap() {
        let chunk_len = CHUNK_LEN_MAX;
        let mut table = FrameTable::new(FRAME_COUNT_MAX * chunk_len, chunk_len);
        let longest = u32::try_from(frame_bound(64 << 20)).unwrap();
        for _ in 0..FRAME_COUNT_MAX {
            table.push(longest, FrameKind::Raw, Filter::None, Digest::of(b""));
        }
        let bytes = table.encode();
        assert!(bytes.len() <= TABLE_LEN_MAX);
        let extent = extent(UUID, "gpu", &table);
        FrameTable::decode_and_verify(&bytes, &extent.table, &extent).unwrap();
    }

    #[test]
    fn eight_large_gpus_take_eleven_megabytes() {
        let frames_per_gpu = 141_000_000_000u64.div_ceil(4 * MIB);
        let mut table = FrameTable::new(141_000_000_000, 4 * MIB);
        for index in 0..frames_per_gpu {
            table.push(
                2_500_000,
                FrameKind::Zstd,
                Filter::None,
                Digest::of(&index.to_le_bytes()),
            );
        }
        let all_bytes = 8 * table.encode().len();
        assert!((10_500_000..11_500_000).contains(&all_bytes), "{all_bytes}");
    }
}

#[test]
fn the_longest_object_is_all_raw_frames() {
    let chunk_len = usize::try_from(MIB).unwrap();
    let raw = random(9, 2 * chunk_len + 7);
    let mut encoder = Encoder::new(Settings {
        level: Level::None,
        filter: FilterChoice::None,
        ..Settings::default()
    })
    .unwrap();
    let mut table = FrameTable::new(raw.len() as u64, MIB);
    for chunk in raw.chunks(chunk_len) {
        let (_, encoded) = frame_of(&mut encoder, chunk);
        table.push(
            u32::try_from(encoded.len()).unwrap(),
            encoded.kind,
            encoded.filter,
            encoded.digest,
        );
    }
    assert_eq!(table.object_len(), object_len_max(raw.len() as u64, MIB));
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        prop_assert!(decode(&bytes).is_err());
        let table = table(MIB);
        let mut extent = extent(UUID, "gpu", &table);
        extent.table = FrameTable::record(&bytes, String::new());
        prop_assert!(FrameTable::decode_and_verify(&bytes, &extent.table, &extent).is_err());
    }

    /// With right digests, so that parser and rules meet the damage.
    #[test]
    fn arbitrary_changes_never_panic(at in any::<proptest::sample::Index>(), new in any::<u8>(), in_table: bool) {
        let table = table(3 * MIB);
        let mut extent = extent(UUID, "gpu", &table);
        if in_table {
            let mut bytes = table.encode();
            let at = at.index(bytes.len());
            bytes[at] = new;
            extent.table = FrameTable::record(&bytes, String::new());
            let _ = FrameTable::decode_and_verify(&bytes, &extent.table, &extent);
        } else {
            let mut bytes = manifest().encode();
            let trailer_len = TRAILER_START.len() + Digest::TEXT_LEN + TRAILER_END.len();
            bytes.truncate(bytes.len() - trailer_len);
            let at = at.index(bytes.len());
            bytes[at] = new;
            let digest = Digest::of(&bytes);
            bytes.extend_from_slice(TRAILER_START);
            bytes.extend_from_slice(digest.to_string().as_bytes());
            bytes.extend_from_slice(TRAILER_END);
            let _ = decode(&bytes);
        }
    }
}
