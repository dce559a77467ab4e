//! The golden images of format 1, `tests/golden/v1`: what images looked like when the format was fixed (`golden`), and with the feature `planes` (`planes`). They are read
//! back for ever, by this and every later version.
//!
//! The bytes are made again here from seeds, so that nothing in them is a mystery: `UPDATE_GOLDEN=1 cargo test golden` writes those that are not there. That is for a new
//! format version or feature only; the files of a released one never change. Only the first image is compared byte for byte: a later encoder may choose other frames.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::*;
use crate::codec::sample_data::{frame_of, random, repeated, text, weights};
use crate::codec::{Decoder, Encoder, FilterChoice, FrameKind, Level, PlaneCoder, Settings};

const ATTEMPT: &str = "c0ffee00c0ffee00c0ffee00c0ffee00";
const TOOL: &str = "ckptstream 0.1.0";
const CREATED_MS: u64 = 1_796_000_000_000;
const MIB: usize = 1 << 20;
/// Other versions of libzstd may compress the same chunk to other bytes.
const ZSTD_VERSION: &str = "1.5.7";

/// A golden image: the job's name, how its frames are made, and of what.
struct Golden {
    job: &'static str,
    settings: Settings,
    extents: fn() -> [(&'static str, Vec<u8>); 2],
    /// Letters of all filters in it.
    filters: &'static str,
}

const FIRST: Golden = Golden {
    job: "golden",
    // What version 0.1.0 did by default.
    settings: Settings {
        level: Level::Zstd(1),
        filter: FilterChoice::None,
        plane_coder: PlaneCoder::Own,
    },
    extents,
    filters: "-",
};

const PLANES: Golden = Golden {
    job: "planes",
    settings: Settings {
        level: Level::Auto,
        filter: FilterChoice::Auto,
        plane_coder: PlaneCoder::Own,
    },
    extents: extents_of_tensors,
    filters: "-BDd",
};

/// GPU UUID and raw bytes of each extent: mostly zeros, so that the files stay small.
fn extents_of_tensors() -> [(&'static str, Vec<u8>); 2] {
    let mut first = vec![0; 2 * MIB];
    first[300_000..][..96 << 10].copy_from_slice(&weights(1, 2, 96 << 10));
    first[MIB + 100_000..][..64 << 10].copy_from_slice(&weights(2, 4, 64 << 10));
    first.extend(random(3, MIB / 16));
    // Second moments of an optimiser: no sign, and an odd number of bytes.
    let mut second = vec![0; MIB];
    let moments = weights(4, 4, 40_001);
    second.extend(moments.iter().enumerate().map(|(at, byte)| match at % 4 {
        3 => byte & 0x3f,
        _ => *byte,
    }));
    [
        ("GPU-00000000-0000-4000-8000-00000000000a", first),
        ("GPU-00000000-0000-4000-8000-00000000000b", second),
    ]
}

/// GPU UUID and raw bytes of each extent.
fn extents() -> [(&'static str, Vec<u8>); 2] {
    let mut first = vec![0; MIB];
    first.extend(text(1, 128 << 10));
    first.resize(3 * MIB, 0);
    let stretch = random(2, 48 << 10);
    first[2 * MIB + 100_000..][..stretch.len()].copy_from_slice(&stretch);
    first.extend(repeated(3, 5_000, MIB));
    // The last chunk is short and incompressible.
    first.extend(random(4, 64 << 10));
    [
        ("GPU-00000000-0000-4000-8000-00000000000a", first),
        ("GPU-00000000-0000-4000-8000-00000000000b", vec![0; 2 * MIB]),
    ]
}

/// Path below the job's directory and bytes of every file of the image.
fn files(golden: &Golden) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    let claim = AttemptClaim {
        format: FORMAT,
        job: golden.job.to_owned(),
        attempt: ATTEMPT.to_owned(),
        tool: TOOL.to_owned(),
        host: "golden-node".to_owned(),
        pid: 4242,
        created_ms: CREATED_MS,
    };
    files.insert(claim_key(ATTEMPT), claim.encode());

    let mut encoder = Encoder::new(golden.settings).unwrap();
    let mut devices = Vec::new();
    let mut records = Vec::new();
    let mut tables = Vec::new();
    for (ordinal, (uuid, raw)) in (golden.extents)().into_iter().enumerate() {
        let mut table = FrameTable::new(raw.len() as u64, MIB as u64);
        let mut object = Vec::new();
        for chunk in raw.chunks(MIB) {
            let (frame, encoded) = frame_of(&mut encoder, chunk);
            table.push(
                u32::try_from(encoded.len()).unwrap(),
                encoded.kind,
                encoded.filter,
                encoded.digest,
            );
            object.extend_from_slice(&frame);
        }
        object.extend_from_slice(&table.seek_table());

        let key = |suffix: &str| {
            let name = uuid.replace("GPU-", "gpu-");
            format!("data/{ATTEMPT}/4711/{name}.0.{suffix}")
        };
        let table_bytes = table.encode();
        devices.push(DeviceRecord {
            uuid: uuid.to_owned(),
            name: "Emulated GPU (not hardware)".to_owned(),
            chip: "0.1".to_owned(),
            memory_len: 8 << 30,
            pci: format!("00000000:0{ordinal}:00.0"),
            ordinal: u32::try_from(ordinal).unwrap(),
        });
        records.push(ExtentRecord {
            device: uuid.to_owned(),
            raw_len: raw.len() as u64,
            chunk_len: MIB as u64,
            object: ObjectRecord {
                key: key("zst"),
                len: object.len() as u64,
                crc64: Crc64::of(&object),
            },
            table: FrameTable::record(&table_bytes, key("frames.json")),
        });
        files.insert(key("zst"), object);
        files.insert(key("frames.json"), table_bytes);
        tables.push(table);
    }

    let manifest = Manifest {
        format: FORMAT,
        features: features_of(ImageKind::Gpu, &tables),
        tool: TOOL.to_owned(),
        job: golden.job.to_owned(),
        kind: ImageKind::Gpu,
        attempt: ATTEMPT.to_owned(),
        created_ms: CREATED_MS,
        capture: Capture {
            mode: CaptureMode::CustomStorage,
            driver_version: None,
            driver_api: 13_050,
        },
        host: Host {
            name: "golden-node".to_owned(),
            boot_id: "00000000-0000-4000-8000-000000000001".to_owned(),
        },
        tree: None,
        processes: vec![ProcessRecord {
            pid: 4711,
            start_time: 123_456,
            ns_pids: vec![4711],
            name: "testkit".to_owned(),
            devices,
            extents: records,
        }],
    };
    let bytes = manifest.encode();
    let log_entry = format!(
        r#"{{
  "format": 1,
  "entry": "image",
  "writer": "{ATTEMPT}",
  "attempt": "{ATTEMPT}",
  "manifest_key": "{}",
  "manifest_len": {},
  "manifest_digest": "{}",
  "kind": "gpu",
  "raw_len": {},
  "stored_len": {},
  "created_ms": {CREATED_MS},
  "tool": "{TOOL}"
}}"#,
        manifest_key(ATTEMPT),
        bytes.len(),
        digest_of(&bytes),
        manifest.raw_len(),
        manifest.stored_len(),
    );
    files.insert(manifest_key(ATTEMPT), bytes);
    files.insert("log/00000001.json".to_owned(), log_entry.into_bytes());
    files
}

impl Golden {
    fn dir(&self) -> PathBuf {
        let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
        crate_dir.join("tests/golden/v1").join(self.job)
    }

    fn read(&self, key: &str) -> Vec<u8> {
        fs::read(self.dir().join(key)).unwrap_or_else(|error| panic!("{key}: {error}"))
    }
}

#[test]
fn the_first_golden_image_is_reproduced() {
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
        for golden in [FIRST, PLANES] {
            if golden.dir().exists() {
                continue;
            }
            for (key, bytes) in files(&golden) {
                let path = golden.dir().join(key);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, bytes).unwrap();
            }
        }
    }
    if zstd::zstd_safe::version_string() == ZSTD_VERSION {
        for (key, bytes) in files(&FIRST) {
            assert!(FIRST.read(&key) == bytes, "{key} differs");
        }
    }
}

#[test]
fn golden_images_are_read_back() {
    for golden in [FIRST, PLANES] {
        assert_is_read_back(&golden);
    }
}

fn assert_is_read_back(golden: &Golden) {
    let bytes = golden.read(&manifest_key(ATTEMPT));
    let manifest = Manifest::decode_and_verify(&bytes, golden.job, ATTEMPT).unwrap();
    let has_planes = golden.filters != "-";
    assert_eq!(manifest.features.contains(&"planes".to_owned()), has_planes);
    let entry: serde_json::Value =
        serde_json::from_slice(&golden.read("log/00000001.json")).unwrap();
    assert_eq!(entry["manifest_digest"], digest_of(&bytes).to_string());

    let mut decoder = Decoder::new().unwrap();
    let mut kinds = HashSet::new();
    let mut filters = BTreeSet::new();
    for (extent, (uuid, raw)) in manifest.extents().zip((golden.extents)()) {
        assert_eq!(extent.device, uuid);
        let object = golden.read(&extent.object.key);
        assert_eq!(object.len() as u64, extent.object.len);
        assert_eq!(Crc64::of(&object), extent.object.crc64);
        let table = golden.read(&extent.table.key);
        let table = FrameTable::decode_and_verify(&table, &extent.table, extent).unwrap();
        let (frames, seek_table) = object.split_at(usize::try_from(table.frames_len()).unwrap());
        table.check_seek_table(seek_table).unwrap();

        let mut decoded = vec![0xA5; raw.len()];
        for (entry, chunk) in table.entries().zip(decoded.chunks_mut(MIB)) {
            let start = usize::try_from(entry.offset).unwrap();
            let frame = &frames[start..start + entry.stored_len as usize];
            decoder
                .decode(frame, entry.filter, entry.digest, chunk)
                .unwrap();
            kinds.insert(entry.kind);
            filters.insert(entry.filter.letter());
        }
        assert!(decoded == raw, "extent of {uuid} differs");
        let content = zstd::decode_all(object.as_slice()).unwrap();
        assert!(
            content == raw || has_planes && content.len() == raw.len(),
            "a stranger reads something else from the object of {uuid}"
        );
    }
    assert_eq!(filters.into_iter().collect::<String>(), golden.filters);
    let all_kinds = HashSet::from([FrameKind::Zero, FrameKind::Raw, FrameKind::Zstd]);
    assert_eq!(kinds, all_kinds);
}
