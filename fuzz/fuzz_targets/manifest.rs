//! A manifest, a frame table and a seek table that nobody vouches for.
//!
//! The first byte says what the others are, and whether the digests over them are made right, so that the fuzzer gets past them. Must hold: no panic; what is
//! accepted is written and read again as the same; its sums and places are all in range.

#![no_main]

use std::sync::LazyLock;

use ckptstream::codec::{Crc64, Digest, seek_table};
use ckptstream::manifest::{self, ExtentRecord, FrameTable, Manifest, TableRecord};
use ckptstream_fuzz::{ATTEMPT, GOLDEN, JOB, golden_extent, golden_manifest};
use libfuzzer_sys::fuzz_target;

static MANIFEST: LazyLock<Manifest> = LazyLock::new(golden_manifest);
static TABLE: LazyLock<FrameTable> = LazyLock::new(|| {
    let (_, bytes) = GOLDEN[1];
    let extent = golden_extent();
    FrameTable::decode_and_verify(bytes, &extent.table, &extent).expect("the golden table reads")
});

fuzz_target!(|data: &[u8]| {
    let Some((mode, bytes)) = data.split_first() else {
        return;
    };
    match mode % 5 {
        0 => read_manifest(bytes),
        1 => read_manifest(&with_own_digest(bytes)),
        2 => {
            let extent = golden_extent();
            read_table(bytes, &extent.table.clone(), extent);
        }
        3 => read_table(bytes, &record_of(bytes), extent_of(bytes)),
        _ => read_seek_table(bytes),
    }
});

fn read_manifest(bytes: &[u8]) {
    let Ok(manifest) = Manifest::decode_and_verify(bytes, JOB, ATTEMPT) else {
        return;
    };
    let again = manifest.encode();
    // It is written with indents, and may only so grow beyond the cap.
    if again.len() <= manifest::MANIFEST_LEN_MAX {
        let again = Manifest::decode_and_verify(&again, JOB, ATTEMPT);
        assert_eq!(again.expect("what was read can be written"), manifest);
    }
    assert!(manifest.raw_len() > 0 || manifest.extents().next().is_none());
    let _ = manifest.stored_len();
    for extent in manifest.extents() {
        assert!(extent.frame_count() <= manifest::FRAME_COUNT_MAX);
    }
}

/// The bytes up to the digest, if there is one at the end, and the right one behind them.
fn with_own_digest(bytes: &[u8]) -> Vec<u8> {
    const TRAILER_START: &[u8] = b"\"self_xxh3_128\": \"";
    let at = bytes
        .windows(TRAILER_START.len())
        .rposition(|window| window == TRAILER_START);
    let mut whole = bytes[..at.unwrap_or(bytes.len())].to_vec();
    let digest = Digest::of(&whole).to_string();
    whole.extend_from_slice(TRAILER_START);
    whole.extend_from_slice(digest.as_bytes());
    whole.extend_from_slice(b"\"\n}\n");
    whole
}

/// What a manifest would say of this table.
fn record_of(bytes: &[u8]) -> TableRecord {
    FrameTable::record(bytes, format!("data/{ATTEMPT}/fuzz.frames.json"))
}

/// The extent that these bytes would be the table of, as far as they say so.
fn extent_of(bytes: &[u8]) -> ExtentRecord {
    let said: serde_json::Value = serde_json::from_slice(bytes).unwrap_or_default();
    let golden = golden_extent();
    let stored = said["stored"].as_array().cloned().unwrap_or_default();
    let frames_len = stored
        .iter()
        .filter_map(serde_json::Value::as_u64)
        .fold(0, u64::saturating_add);
    ExtentRecord {
        raw_len: said["raw_len"].as_u64().unwrap_or(golden.raw_len),
        chunk_len: said["chunk_len"].as_u64().unwrap_or(golden.chunk_len),
        object: manifest::ObjectRecord {
            key: format!("data/{ATTEMPT}/fuzz.zst"),
            len: frames_len.saturating_add(seek_table::encoded_len(stored.len() as u64)),
            crc64: Crc64::of(b""),
        },
        ..golden
    }
}

/// Reads the table of an extent that a manifest may hold.
fn read_table(bytes: &[u8], record: &TableRecord, mut extent: ExtentRecord) {
    extent.table = record.clone();
    let mut manifest = MANIFEST.clone();
    manifest.processes.truncate(1);
    manifest.processes[0].extents = vec![extent.clone()];
    if Manifest::decode_and_verify(&manifest.encode(), JOB, ATTEMPT).is_err() {
        return;
    }
    let Ok(table) = FrameTable::decode_and_verify(bytes, record, &extent) else {
        return;
    };
    assert_eq!(table.frame_count() as u64, extent.frame_count());
    assert_eq!(table.object_len(), extent.object.len);
    assert!(table.is_complete());
    let mut raw_len = 0;
    let mut end = 0;
    for entry in table.entries() {
        assert_eq!(entry.bytes().start, end, "frames lie side by side");
        end = entry.bytes().end;
        raw_len += u64::from(entry.raw_len);
    }
    assert_eq!((raw_len, end), (extent.raw_len, table.frames_len()));
    table
        .check_seek_table(&table.seek_table())
        .expect("its own seek table is the right one");

    let again = table.encode();
    let again_of = FrameTable::decode_and_verify(
        &again,
        &record_of(&again),
        &ExtentRecord {
            table: record_of(&again),
            ..extent
        },
    );
    assert_eq!(again_of.expect("what was read can be written"), table);
}

fn read_seek_table(bytes: &[u8]) {
    let is_ours = TABLE.seek_table() == bytes;
    assert_eq!(TABLE.check_seek_table(bytes).is_ok(), is_ours);
    if let Ok(frames) = seek_table::parse(bytes) {
        assert_eq!(seek_table::encode(&frames), bytes);
    }
}
