//! The golden image of format 1, `tests/golden/v1`: what an image looked like when the format was fixed. It is read back for ever, by this and every later version.
//!
//! The same bytes are made again here from seeds, so that nothing in it is a mystery: `UPDATE_GOLDEN=1 cargo test golden` writes them. That is for a new format version
//! only; the files of a released one never change.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::*;
use crate::codec::sample_data::{frame_of, random, repeated, text};
use crate::codec::{Decoder, Encoder, FilterChoice, FrameKind, Level, PlaneCoder, Settings};

const JOB: &str = "golden";
const ATTEMPT: &str = "c0ffee00c0ffee00c0ffee00c0ffee00";
const TOOL: &str = "ckptstream 0.1.0";
const CREATED_MS: u64 = 1_796_000_000_000;
const MIB: usize = 1 << 20;
/// Other versions of libzstd may compress the same chunk to other bytes.
const ZSTD_VERSION: &str = "1.5.7";

/// What version 0.1.0 did by default.
const SETTINGS: Settings = Settings {
    level: Level::Zstd(1),
    filter: FilterChoice::None,
    plane_coder: PlaneCoder::Own,
};

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
fn files() -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    let claim = AttemptClaim {
        format: FORMAT,
        job: JOB.to_owned(),
        attempt: ATTEMPT.to_owned(),
        tool: TOOL.to_owned(),
        host: "golden-node".to_owned(),
        pid: 4242,
        created_ms: CREATED_MS,
    };
    files.insert(claim_key(ATTEMPT), claim.encode());

    let mut encoder = Encoder::new(SETTINGS).unwrap();
    let mut devices = Vec::new();
    let mut records = Vec::new();
    for (ordinal, (uuid, raw)) in extents().into_iter().enumerate() {
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
    }

    let manifest = Manifest {
        format: FORMAT,
        features: Vec::new(),
        tool: TOOL.to_owned(),
        job: JOB.to_owned(),
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

fn job_dir() -> PathBuf {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_dir.join("tests/golden/v1").join(JOB)
}

fn read(key: &str) -> Vec<u8> {
    fs::read(job_dir().join(key)).unwrap_or_else(|error| panic!("{key}: {error}"))
}

#[test]
fn golden_image_is_reproduced() {
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
        for (key, bytes) in files() {
            let path = job_dir().join(key);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
    }
    if zstd::zstd_safe::version_string() == ZSTD_VERSION {
        for (key, bytes) in files() {
            assert!(read(&key) == bytes, "{key} differs");
        }
    }
}

#[test]
fn golden_image_is_read_back() {
    let bytes = read(&manifest_key(ATTEMPT));
    let manifest = Manifest::decode_and_verify(&bytes, JOB, ATTEMPT).unwrap();
    let entry: serde_json::Value = serde_json::from_slice(&read("log/00000001.json")).unwrap();
    assert_eq!(entry["manifest_digest"], digest_of(&bytes).to_string());

    let mut decoder = Decoder::new().unwrap();
    let mut kinds = HashSet::new();
    for (extent, (uuid, raw)) in manifest.extents().zip(extents()) {
        assert_eq!(extent.device, uuid);
        let object = read(&extent.object.key);
        assert_eq!(object.len() as u64, extent.object.len);
        assert_eq!(Crc64::of(&object), extent.object.crc64);
        let table = read(&extent.table.key);
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
        }
        assert!(decoded == raw, "extent of {uuid} differs");
        assert!(
            zstd::decode_all(object.as_slice()).unwrap() == raw,
            "a stranger reads something else from the object of {uuid}"
        );
    }
    let all_kinds = HashSet::from([FrameKind::Zero, FrameKind::Raw, FrameKind::Zstd]);
    assert_eq!(kinds, all_kinds);
}
