//! The library as programs see it: a C program, compiled against NVIDIA's header and linked with `-lcuda`, runs unchanged under
//! `scripts/with-emulated-driver.sh`. One test of `c/` per test here; each is a node of its own, so that they can run side by side.
//!
//! The header comes from `CUDA_INCLUDE_DIR`, or from NVIDIA's Python package through pip. Without either the tests fail and say so.

use std::env;
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

/// The header of the API that the library emulates.
const PACKAGE: &str = "nvidia-cuda-runtime==13.5.*";

/// What the tests need, made once.
struct Setup {
    program: PathBuf,
    library: PathBuf,
}

static SETUP: LazyLock<Setup> = LazyLock::new(|| {
    // target/<profile>/deps/<this test>: the library lies beside it.
    let deps = env::current_exe().unwrap().parent().unwrap().to_owned();
    let library = deps.join("libemulated_cuda.so");
    assert!(library.is_file(), "{} is missing", library.display());
    let folder = deps.parent().unwrap().join("driver-test");
    fs::create_dir_all(&folder).unwrap();
    let include = include_dir(&folder);
    let link = folder.join("libcuda.so");
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(&library, &link).unwrap();

    let sources = fs::read_dir(manifest_dir().join("tests/c"))
        .unwrap()
        .map(|e| e.unwrap().path());
    let sources = sources.filter(|p| p.extension().is_some_and(|e| e == "c"));
    let program = folder.join("driver_test");
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(include);
    gcc.arg("-o")
        .arg(&program)
        .args(sources)
        .arg("-L")
        .arg(&folder)
        .args(["-lcuda", "-lpthread"]);
    succeed(&mut gcc);
    Setup { program, library }
});

fn manifest_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Where `cuda.h` is.
fn include_dir(folder: &Path) -> PathBuf {
    if let Some(given) = env::var_os("CUDA_INCLUDE_DIR") {
        let given = PathBuf::from(given);
        assert!(
            given.join("cuda.h").is_file(),
            "CUDA_INCLUDE_DIR={}: no cuda.h in it",
            given.display()
        );
        return given;
    }
    let include = folder.join("header/nvidia/cu13/include");
    if !include.join("cuda.h").is_file() {
        let wheels = folder.join("wheel");
        let pip = [
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            PACKAGE,
            "--dest",
        ];
        let mut download = Command::new("python3");
        download.args(pip).arg(&wheels);
        let output = download
            .output()
            .expect("python3 is needed to fetch cuda.h; or set CUDA_INCLUDE_DIR");
        assert!(
            output.status.success(),
            "pip cannot fetch {PACKAGE}; set CUDA_INCLUDE_DIR to a folder with cuda.h of 13.5\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let wheel = fs::read_dir(&wheels)
            .unwrap()
            .next()
            .expect("pip has fetched a wheel")
            .unwrap()
            .path();
        succeed(
            Command::new("python3")
                .args(["-m", "zipfile", "-e"])
                .arg(wheel)
                .arg(folder.join("header")),
        );
    }
    include
}

fn succeed(command: &mut Command) {
    let output = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(
        output.status.success(),
        "{command:?}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Runs one test of the C program with this variable and these others.
fn run(name: &str, variable: &str, others: &[(&str, &str)]) -> Output {
    let mut command = Command::new(manifest_dir().join("../../scripts/with-emulated-driver.sh"));
    command
        .arg("timeout")
        .args(["--kill-after=1", "120"])
        .arg(&SETUP.program)
        .arg(name);
    command
        .env("EMULATED_CUDA_LIB", &SETUP.library)
        .env("EMULATED_CUDA", variable);
    command.envs(others.iter().copied());
    command.output().unwrap()
}

fn pass(name: &str, variable: &str, others: &[(&str, &str)]) -> Output {
    let output = run(name, variable, others);
    assert!(
        output.status.success(),
        "{name}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

macro_rules! c_tests {
    ($($name:ident: $variable:literal $(, $key:literal = $value:literal)*;)*) => {
        $(
            #[test]
            fn $name() {
                pass(stringify!($name), $variable, &[$(($key, $value)),*]);
            }
        )*
    };
}

c_tests! {
    devices: "node=101;gpus=2;memory=1GiB,512MiB";
    contexts: "node=102;gpus=2";
    memory: "node=103;memory=1GiB;granularity=1";
    host_memory: "node=104";
    streams: "node=105;d2h=40MiB;h2d=40MiB";
    missing_synchronize: "node=106";
    capture: "node=107";
    entry_points: "node=108";
    fork: "node=109";
    no_device: "gpus=0";
    resident: "node=112;vram=resident";
    wrong_order: "node=113";
    arguments: "node=114;gpus=2";
    remap: "node=115;gpus=4;name=A (not hardware),A (not hardware),A (not hardware),B (not hardware);granularity=4KiB",
        "TARGET_CUDA" = "node=116;gpus=2;name=A (not hardware);granularity=4KiB";
    out_of_memory: "node=117;memory=8MiB";
    host_checkpoint: "node=118;gpus=3";
    suspended: "node=119;gpus=3";
    lock_waits: "node=120";
    lock_timeout: "node=121";
    stopped_target: "node=122";
    killed_savers: "node=123";
    killed_after_begin: "node=124";
    released_context: "node=125";
    old_driver: "node=126;api=13000";
    older_driver: "node=127;api=12040";
}

#[test]
fn round_trip_with_a_real_granularity() {
    pass(
        "round_trip",
        "node=110;gpus=3",
        &[("GRANULARITY", "2097152")],
    );
}

#[test]
fn round_trip_to_the_byte() {
    pass(
        "round_trip",
        "node=111;gpus=3;granularity=1",
        &[("GRANULARITY", "1")],
    );
}

#[test]
fn a_wrong_variable_is_told_in_one_line() {
    let output = pass("wrong_variable", "gpu=1", &[]);
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "emulated CUDA driver: unknown key \"gpu\"\n"
    );
}

#[test]
fn faults() {
    let variable = "node=128;fault=cuCheckpointProcessLock#1=code:12345;fault=cuCheckpointProcessLock#2=after-code:600;\
        fault=cuMemcpyDtoHAsync#2=code:700;fault=cuStreamSynchronize#1=kill-target;fault=cuCtxSynchronize#1=kill-caller";
    let output = run("faults", variable, &[("TARGET_CUDA", "node=128")]);
    // The last fault ends the program with SIGKILL, which `timeout` reports as its own.
    let killed = output.status.signal() == Some(9) || output.status.code() == Some(137);
    assert!(
        killed,
        "{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn the_trace_tells_every_call_in_order() {
    let file = SETUP
        .program
        .with_file_name(format!("trace-{}.jsonl", std::process::id()));
    let variable = format!("node=129;trace={}", file.display());
    pass("traced", &variable, &[("TARGET_CUDA", "node=129")]);
    let text = fs::read_to_string(&file).unwrap();
    fs::remove_file(&file).unwrap();
    let calls: Vec<(&str, &str)> = text.lines().map(|l| (member(l, "call"), l)).collect();
    let find = |name: &str| {
        calls
            .iter()
            .filter(|(call, _)| *call == name)
            .map(|(_, l)| *l)
            .collect::<Vec<_>>()
    };
    let [checkpoint] = find("\"cuCheckpointProcessCheckpoint\"")[..] else {
        panic!("{text}")
    };
    let extents = checkpoint.split_once("\"extents\":[").unwrap().1;
    let stream = member(extents, "stream");
    assert_eq!(member(extents, "bytes"), "2097152");
    let copies = find("\"cuMemcpyDtoHAsync\"");
    let done = find("\"copy-done\"");
    assert_eq!((copies.len(), done.len()), (2, 2), "{text}");
    let number = |line, key| member(line, key).parse::<u64>().unwrap();
    for (copy, done) in copies.iter().zip(&done) {
        assert_eq!(member(copy, "stream"), stream);
        assert_eq!(member(copy, "device"), member(extents, "device"));
        assert_eq!(member(copy, "seq"), member(done, "seq"));
        assert!(number(done, "enqueued_us") <= number(done, "done_us"));
    }
    assert_eq!(member(copies[1], "offset"), "524288");
    let [complete] = find("\"cuCheckpointOperationComplete\"")[..] else {
        panic!("{text}")
    };
    assert!(number(done[1], "done_us") <= number(complete, "t_us"));
    assert_eq!(member(complete, "target"), member(checkpoint, "target"));
    assert_eq!(
        member(find("\"cuCheckpointProcessUnlock\"")[0], "result"),
        "401"
    );
}

/// The first member of this name, as it is written.
fn member<'a>(line: &'a str, key: &str) -> &'a str {
    let (_, rest) = line
        .split_once(&format!("\"{key}\":"))
        .unwrap_or_else(|| panic!("no {key} in {line}"));
    rest.split([',', '}']).next().unwrap()
}
