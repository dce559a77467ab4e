//! The golden image of format 1, `tests/golden/v1`, through the real binary: every later version must list, verify, print and restore it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::support::process::Process;
use crate::support::s3_server::BUCKET;
use crate::support::{Ckptstream, Node, S3Server, digest, python};

/// GPU, length and XXH3-128 of each extent.
const EXTENTS: [(&str, u64, &str); 2] = [
    (
        "GPU-00000000-0000-4000-8000-00000000000a",
        4_259_840,
        "4197192c18891e63a87137cb8d8bf770",
    ),
    (
        "GPU-00000000-0000-4000-8000-00000000000b",
        2_097_152,
        "7b3e6abe1456fd0094e26d8e04364852",
    ),
];

/// A CUDA program of somebody else's: allocates on each GPU, suspends itself with the documented calls, and reads its memory once it runs again.
/// Arguments: a folder, then the length on each GPU.
const PROGRAM: &str = r#"
import ctypes, os, signal, sys
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code: sys.exit(f"{name} answered {code}")
call("cuInit", 0)
memory = []
for ordinal, length in enumerate(map(int, sys.argv[2:])):
    context, address = ctypes.c_void_p(), ctypes.c_uint64()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(length))
    memory.append((context, address, length))
call("cuCheckpointProcessLock", os.getpid(), None)
call("cuCheckpointProcessCheckpoint", os.getpid(), None)
print("suspended", flush=True)
for ordinal, (context, address, length) in enumerate(memory):
    buffer = ctypes.create_string_buffer(length)
    call("cuCtxSetCurrent", context)
    call("cuMemcpyDtoH_v2", buffer, address, ctypes.c_size_t(length))
    with open(os.path.join(sys.argv[1], str(ordinal)), "wb") as file: file.write(buffer.raw)
print("read", flush=True)
signal.pause()
"#;

/// A server that holds the golden image, as job `golden`. The folder is read once, at the start.
fn server() -> S3Server {
    let dir = TempDir::new().expect("a temporary folder");
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v1");
    copy_folder(&golden, &dir.path().join(BUCKET).join("store"));
    S3Server::start(&["--serve", dir.path().to_str().expect("a path of text")])
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        let (from, to): (PathBuf, PathBuf) = (entry.path(), to.join(entry.file_name()));
        if from.is_dir() {
            copy_folder(&from, &to);
        } else {
            fs::copy(&from, &to).expect("copied");
        }
    }
}

#[test]
fn it_is_listed_inspected_verified_and_printed() {
    let server = server();
    let cli = Ckptstream::new(&server, "golden");
    let listed = cli.ok("list");
    assert_eq!(
        listed["images"][0]["attempt"],
        "c0ffee00c0ffee00c0ffee00c0ffee00"
    );
    assert_eq!(listed["images"][0]["standing"], "usable");
    let manifest = cli.ok("inspect")["manifest"].clone();
    assert_eq!(manifest["format"], 1);
    assert_eq!(manifest["processes"][0]["pid"], 4711);
    let verified = cli.ok("verify");
    for (index, (gpu, len, expected)) in EXTENTS.into_iter().enumerate() {
        assert_eq!(manifest["processes"][0]["extents"][index]["device"], gpu);
        assert_eq!(verified["devices"][index]["raw"], len);
        let raw = cli.cat(gpu);
        assert_eq!(raw.len() as u64, len, "{gpu}");
        assert_eq!(digest(&raw), expected, "{gpu}");
    }
}

#[test]
fn it_is_restored_into_a_process_that_reads_it_and_is_saved_again() {
    let server = server();
    let uuids = EXTENTS.map(|(gpu, _, _)| gpu.trim_start_matches("GPU-"));
    let node = Node::new(&format!(
        "gpus=2;memory=64MiB;granularity=1;uuids={}",
        uuids.join(",")
    ));
    let dir = TempDir::new().expect("a temporary folder");
    let mut command = Command::new(python::interpreter());
    command.args(["-c", PROGRAM]).arg(dir.path());
    command.args(EXTENTS.map(|(_, len, _)| len.to_string()));
    node.apply(&mut command);
    let mut program = Process::start(&mut command);
    assert_eq!(program.next_line().as_deref(), Some("suspended"));

    let golden = Ckptstream::new(&server, "golden").on(&node);
    let report = golden.ok(&format!("restore --pid {} --into-fresh", program.pid()));
    assert_eq!(report["targets"][0]["state"], "running");
    assert_eq!(program.next_line().as_deref(), Some("read"));
    for (ordinal, (gpu, _, expected)) in EXTENTS.into_iter().enumerate() {
        let memory = fs::read(dir.path().join(ordinal.to_string())).expect("written");
        assert_eq!(digest(&memory), expected, "{gpu}");
    }

    let again = Ckptstream::new(&server, "again").on(&node);
    again.ok(&format!("checkpoint --pid {}", program.pid()));
    for (gpu, _, expected) in EXTENTS {
        assert_eq!(digest(&again.cat(gpu)), expected, "{gpu}");
    }
}
