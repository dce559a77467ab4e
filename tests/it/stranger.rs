//! Our objects through other people's tools, a stock zstd and a stock S3 client, and through a reader of zstd's seekable format. That reader is our own Python, below:
//! it shares no code with the product and knows nothing of an image but the published format, yet it is no proof that somebody else's reader agrees.

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{Ckptstream, Node, S3Server, Target, digest, python};

/// Reads frame K of an object by its seek table alone, with ranged reads. Arguments: key, K. Prints the raw offset and length on one line, then the raw bytes.
/// The format: contrib/seekable_format/zstd_seekable_compression_format.md of the zstd sources.
const SEEKABLE_READER: &str = r#"
import struct, zstandard
key, wanted = sys.argv[1], int(sys.argv[2])
def read(first, length):
    got = s3.get_object(Bucket=bucket, Key=key, Range=f"bytes={first}-{first + length - 1}")["Body"].read()
    assert len(got) == length
    return got
size = s3.head_object(Bucket=bucket, Key=key)["ContentLength"]
count, descriptor, magic = struct.unpack("<IBI", read(size - 9, 9))
assert magic == 0x8F92EAB1, hex(magic)
assert descriptor & 0x7C == 0, "reserved bits"
entry = 12 if descriptor & 0x80 else 8
table_length = 8 + count * entry + 9
table = read(size - table_length, table_length)
skippable, length = struct.unpack("<II", table[:8])
assert skippable == 0x184D2A5E and length == table_length - 8
stored = raw = 0
for index in range(count):
    stored_length, raw_length = struct.unpack_from("<II", table, 8 + index * entry)
    if index == wanted:
        frame = zstandard.ZstdDecompressor().decompress(read(stored, stored_length))
        assert len(frame) == raw_length
        found = raw
    stored, raw = stored + stored_length, raw + raw_length
assert stored == size - table_length, "frames and table are the whole object"
sys.stdout.buffer.write(f"{found} {len(frame)} {count} {raw}\n".encode() + frame)
"#;

const CHUNK: usize = 1 << 20;

/// A saved image of two GPUs.
struct Saved {
    server: S3Server,
    cli: Ckptstream,
    /// GPU, key in the bucket, length in the store, for each extent.
    objects: Vec<(String, String, u64)>,
    /// The digest of all memory.
    memory: String,
}

/// Without filters, so that plain zstd prints the raw extents.
fn saved() -> Saved {
    saved_with("compression.filter = 'none'\ncompression.mode = 1\n")
}

fn saved_with(compression: &str) -> Saved {
    let server = S3Server::start(&[]);
    let node = Node::new("gpus=2;memory=64MiB;granularity=1");
    let cli = Ckptstream::new(&server, "job").on(&node).config(&format!(
        "pipeline.chunk_size = '1MiB'\nstore.part_size = '5MiB'\n{compression}"
    ));
    // Zero chunks, incompressible ones and compressed ones, and a short chunk at the end.
    let args = "--gpus 2 --bytes 25000001,7MiB --fill mixed,weights --seed 3 --steps 0";
    let mut target = Target::start(&node, args);
    let memory = target.next_digest();
    cli.ok(&format!("checkpoint --pid {}", target.pid()));
    let inspected = cli.ok("inspect");
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let extents = inspected["extents"].as_array().expect("a list");
    for kind in ["zero", "raw", "zstd"] {
        let count = extents[0]["frames"][kind].as_u64();
        assert!(count > Some(0), "no {kind} frames: {inspected}");
    }
    let objects = extents
        .iter()
        .map(|extent| {
            let key = format!("store/job/{}", text(&extent["key"]));
            let stored = extent["stored"].as_u64().expect("a number");
            (text(&extent["device"]), key, stored)
        })
        .collect();
    Saved {
        server,
        cli,
        objects,
        memory,
    }
}

/// What `zstd -dc` makes of these bytes.
fn zstd_dc(object: &[u8]) -> Vec<u8> {
    let mut zstd = Command::new("zstd")
        .args(["-d", "-c", "-q"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("zstd is installed; scripts/test.sh does that");
    let mut stdin = zstd.stdin.take().expect("piped");
    let output = std::thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(object).expect("zstd reads"));
        zstd.wait_with_output().expect("zstd ends")
    });
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    output.stdout
}

#[test]
fn stock_zstd_prints_the_raw_extent() {
    let saved = saved();
    let mut memory = Vec::new();
    for (gpu, key, _) in &saved.objects {
        let raw = zstd_dc(&python::object(&saved.server, key));
        assert!(
            raw == saved.cli.cat(gpu),
            "{gpu}: cat prints something else"
        );
        memory.extend(raw);
    }
    assert_eq!(digest(&memory), saved.memory);
}

#[test]
fn a_stock_client_sees_ordinary_objects() {
    let saved = saved();
    let script = "
pages = s3.get_paginator('list_objects_v2').paginate(Bucket=bucket, Prefix='store/')
objects = {entry['Key']: entry['Size'] for page in pages for entry in page['Contents']}
for key, size in objects.items():
    body = s3.get_object(Bucket=bucket, Key=key)['Body'].read()
    assert len(body) == size == s3.head_object(Bucket=bucket, Key=key)['ContentLength'], key
    if key.endswith('.json'): json.loads(body)
assert 'Uploads' not in s3.list_multipart_uploads(Bucket=bucket), 'an unfinished upload'
print(json.dumps(objects))
";
    let printed = python::run(&saved.server, script, &[]);
    let listed: Value = serde_json::from_slice(&printed).expect("JSON");
    for (gpu, key, stored) in &saved.objects {
        assert_eq!(listed[key], *stored, "{gpu}");
        let table = key.replace(".zst", ".frames.json");
        assert!(listed[&table].is_u64(), "{table}: {listed}");
    }
    let keys = listed.as_object().expect("an object").keys();
    let others: Vec<&str> = keys
        .filter(|key| !key.contains("/gpu-"))
        .filter_map(|key| key.rsplit('/').next())
        .collect();
    assert_eq!(
        others,
        [
            "attempt.json",
            "contest-2.json",
            "contest.json",
            "manifest.json",
            "00000001.json",
            "00000002.json",
            "00000003.json"
        ]
    );
}

#[test]
fn a_seekable_format_reader_finds_any_frame() {
    let saved = saved();
    for (gpu, key, _) in &saved.objects {
        let raw = saved.cli.cat(gpu);
        let count = raw.len().div_ceil(CHUNK);
        for wanted in [0, 1, count / 2, count - 1] {
            let printed = python::run(&saved.server, SEEKABLE_READER, &[key, &wanted.to_string()]);
            let line_end = printed.iter().position(|&byte| byte == b'\n');
            let (line, frame) = printed.split_at(line_end.expect("a line"));
            let start = wanted * CHUNK;
            let end = raw.len().min(start + CHUNK);
            assert_eq!(
                String::from_utf8_lossy(line),
                format!("{start} {} {count} {}", end - start, raw.len()),
                "{gpu}, frame {wanted}"
            );
            assert!(frame[1..] == raw[start..end], "{gpu}, frame {wanted}");
        }
    }
}

/// The Python of docs/format.md that undoes filters.
fn documented_python() -> &'static str {
    let document = include_str!("../../docs/format.md");
    let mut blocks = document
        .split("```python\n")
        .filter_map(|rest| rest.split_once("```"))
        .map(|(block, _)| block);
    blocks
        .find(|block| block.contains("def extent_of"))
        .expect("docs/format.md undoes the planes")
}

#[test]
fn the_documented_lines_undo_the_planes_of_what_stock_zstd_prints() {
    let saved = saved_with("compression.mode = 'max-ratio'\n");
    let script = format!(
        r#"
{}
import subprocess
key = sys.argv[1]
read = lambda key: s3.get_object(Bucket=bucket, Key=key)["Body"].read()
table = json.loads(read(key.removesuffix(".zst") + ".frames.json"))
content = subprocess.run(["zstd", "-dcq", "--memory=1MB"], input=read(key), capture_output=True, check=True).stdout
letters = "".join(sorted(set(table.get("filters", ""))))
sys.stdout.buffer.write(letters.encode() + b"\n" + extent_of(content, table))
"#,
        documented_python()
    );
    let mut memory = Vec::new();
    let mut letters = String::new();
    for (gpu, key, _) in &saved.objects {
        let printed = python::run(&saved.server, &script, &[key]);
        let line_end = printed.iter().position(|&byte| byte == b'\n');
        let (found, raw) = printed.split_at(line_end.expect("a line"));
        letters.push_str(&String::from_utf8_lossy(found));
        assert!(
            raw[1..] == saved.cli.cat(gpu),
            "{gpu}: cat prints something else"
        );
        memory.extend_from_slice(&raw[1..]);
    }
    assert!(letters.contains(['b', 'B', 'd', 'D']), "{letters}");
    assert_eq!(digest(&memory), saved.memory);
}
