//! Images small enough for thousands of runs: one GPU, one chunk, everything that [`Image::open`](ckptstream::image::Image::open) looks at. They are made once.

use std::sync::LazyLock;

use bytes::Bytes;
use ckptstream::codec::frame::write_raw;
use ckptstream::codec::{Body, Crc64, Effort, Encoder, Settings, frame_bound};
use ckptstream::config::JobName;
use ckptstream::job_log::ImageEntry;
use ckptstream::manifest::{
    self, Capture, CaptureMode, DeviceRecord, ExtentRecord, FrameTable, Host, ImageKind, Manifest,
    ObjectRecord, ProcessRecord,
};
use ckptstream::store::Key;

/// Most attempts of one run.
pub(super) const ATTEMPTS_MAX: usize = 32;

const CHUNK_LEN: u64 = 1 << 20;
const RAW_LEN: usize = 600;
const TOOL: &str = "ckptstream simulator";
const GPU: &str = "GPU-00000000-0000-4000-8000-00000000000a";

static JOB: LazyLock<JobName> = LazyLock::new(|| JobName::new("train").expect("a name"));
static SAMPLES: LazyLock<Vec<[Sample; 2]>> = LazyLock::new(|| {
    let numbers = 0..ATTEMPTS_MAX;
    numbers
        .map(|number| [Sample::new(number, false), Sample::new(number, true)])
        .collect()
});

/// Everything that a save stores of one attempt, in the order of storing it.
pub(super) struct Sample {
    pub(super) object: Piece,
    pub(super) table: Piece,
    pub(super) manifest: Piece,
    /// What commits it.
    pub(super) entry: ImageEntry,
}

/// One object.
pub(super) struct Piece {
    pub(super) key: Key,
    pub(super) bytes: Bytes,
}

/// The only job.
pub(super) fn job() -> &'static JobName {
    &JOB
}

/// A key of the job.
pub(super) fn key(relative: &str) -> Key {
    Key::of_job(&JOB, relative).expect("a legal key")
}

/// The nonce of an attempt. In order of their nonces attempts are not in order of their numbers, as in life.
pub(super) fn nonce(number: usize) -> String {
    let scrambled = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    format!("{scrambled:016x}{number:016x}")
}

/// The image of an attempt, as it goes to the store or as it is spilled.
pub(super) fn sample(attempt: &str, is_spilled: bool) -> &'static Sample {
    let number = usize::from_str_radix(&attempt[16..], 16).expect("a nonce of ours");
    &SAMPLES[number][usize::from(is_spilled)]
}

impl Sample {
    fn new(number: usize, is_spilled: bool) -> Self {
        let attempt = nonce(number);
        let raw: Vec<u8> = (0..RAW_LEN)
            .map(|at| (at / 40 + number).to_le_bytes()[0])
            .collect();
        let mut table = FrameTable::new(raw.len() as u64, CHUNK_LEN);
        let mut object = frame(&raw, &mut table);
        object.extend_from_slice(&table.seek_table());
        let place = format!("data/{attempt}/1/gpu-a.{}", u8::from(is_spilled));
        let (object_key, table_key) = (format!("{place}.zst"), format!("{place}.frames.json"));
        let encoded = table.encode();
        let extent = ExtentRecord {
            device: GPU.to_owned(),
            raw_len: raw.len() as u64,
            chunk_len: CHUNK_LEN,
            object: ObjectRecord {
                key: object_key.clone(),
                len: object.len() as u64,
                crc64: Crc64::of(&object),
            },
            table: FrameTable::record(&encoded, table_key.clone()),
        };
        let manifest = manifest(
            &attempt,
            manifest::features_of(ImageKind::Gpu, [&table]),
            extent,
        );
        let manifest_key = match is_spilled {
            true => manifest::spilled_manifest_key(&attempt),
            false => manifest::manifest_key(&attempt),
        };
        let bytes = manifest.encode();
        let entry = ImageEntry {
            writer: attempt.clone(),
            attempt,
            manifest_key: manifest_key.clone(),
            manifest_len: bytes.len() as u64,
            manifest_digest: manifest::digest_of(&bytes),
            kind: manifest.kind,
            raw_len: manifest.raw_len(),
            stored_len: manifest.stored_len(),
            created_ms: manifest.created_ms,
            tool: TOOL.to_owned(),
        };
        let piece = |relative: &str, bytes: Vec<u8>| Piece {
            key: key(relative),
            bytes: Bytes::from(bytes),
        };
        Self {
            object: piece(&object_key, object),
            table: piece(&table_key, encoded),
            manifest: piece(&manifest_key, bytes),
            entry,
        }
    }

    /// Whatever the image cannot do without.
    pub(super) fn pieces(&self) -> [&Piece; 3] {
        [&self.object, &self.table, &self.manifest]
    }
}

/// The frame of the only chunk, which the table is told of.
fn frame(raw: &[u8], table: &mut FrameTable) -> Vec<u8> {
    let mut encoder = Encoder::new(Settings::default()).expect("an encoder");
    let mut frame = vec![0; frame_bound(raw.len())];
    let encoded = encoder.encode(raw, &mut frame, Effort(50.0));
    if let Body::Raw { checksum } = encoded.body {
        write_raw(raw, checksum, &mut frame);
    }
    frame.truncate(encoded.len());
    let len = u32::try_from(encoded.len()).expect("a small frame");
    table.push(len, encoded.kind, encoded.filter, encoded.digest);
    frame
}

fn manifest(attempt: &str, features: Vec<String>, extent: ExtentRecord) -> Manifest {
    Manifest {
        format: manifest::FORMAT,
        features,
        tool: TOOL.to_owned(),
        job: JOB.to_string(),
        kind: ImageKind::Gpu,
        attempt: attempt.to_owned(),
        created_ms: 1,
        capture: Capture {
            mode: CaptureMode::CustomStorage,
            driver_version: None,
            driver_api: 13040,
        },
        host: Host {
            name: "node".to_owned(),
            boot_id: "00000000-0000-4000-8000-000000000000".to_owned(),
        },
        tree: None,
        processes: vec![ProcessRecord {
            pid: 1,
            start_time: 7,
            ns_pids: vec![1],
            name: "train".to_owned(),
            devices: vec![DeviceRecord {
                uuid: GPU.to_owned(),
                name: "Simulated".to_owned(),
                chip: "0.1".to_owned(),
                memory_len: 1 << 30,
                pci: "00000000:01:00.0".to_owned(),
                ordinal: 0,
            }],
            extents: vec![extent],
        }],
    }
}
