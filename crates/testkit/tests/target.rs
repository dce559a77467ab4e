//! `testkit target` as a process on the emulated driver. What happens to it when it is saved and restored is the product's to test.
#![allow(clippy::unwrap_used, reason = "a test says what failed by failing")]

use std::io::{BufRead, BufReader, Lines};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};

const SIGTERM: i32 = 15;

/// `testkit target ARGS` on two emulated GPUs of 64 MiB.
fn target(args: &str) -> Command {
    let driver = std::env::var_os("EMULATED_DRIVER_DIR")
        .expect("EMULATED_DRIVER_DIR is not set: run scripts/test.sh, which builds the emulated driver and says where it is");
    let mut command = Command::new(env!("CARGO_BIN_EXE_testkit"));
    command
        .arg("target")
        .args(args.split(' '))
        .env("LD_LIBRARY_PATH", driver)
        // A node of its own: GPU memory is shared with every other process of the same emulated node.
        .env(
            "EMULATED_CUDA",
            format!("gpus=2;memory=64MiB;node={}", std::process::id()),
        );
    command
}

/// The output of a target that ends by itself.
fn output(args: &str) -> Output {
    target(args).output().unwrap()
}

/// The lines that a target which ends well prints, but for the one with its pid.
fn lines(args: &str) -> Vec<String> {
    let output = output(args);
    assert!(
        output.status.success(),
        "{args}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("ready pid "), "{text}");
    text.lines().skip(1).map(str::to_owned).collect()
}

/// A target that runs on while its lines are read; killed when dropped.
struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Running {
    fn start(args: &str) -> Self {
        let mut child = target(args).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    fn line(&mut self) -> String {
        self.lines.next().expect("the target ended").unwrap()
    }

    fn signal(&self, name: &str) {
        // The shell's own `kill`: the program of that name is not on every machine.
        let kill = format!("kill -{name} {}", self.child.id());
        assert!(
            Command::new("sh")
                .args(["-c", &kill])
                .status()
                .unwrap()
                .success()
        );
    }

    fn end(mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_seed_decides_every_digest() {
    let line = "--gpus 2 --bytes 3MiB,1234567 --fill mixed,weights --steps 10 --seed";
    let seven = lines(&format!("{line} 7"));
    assert_eq!(seven.len(), 12, "steps 0 to 10 and the end: {seven:?}");
    for (step, line) in seven[..11].iter().enumerate() {
        let digest = line.strip_prefix(&format!("step {step} digest ")).unwrap();
        assert!(
            digest.len() == 32 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()),
            "{line}"
        );
    }
    assert_eq!(
        seven[11].strip_prefix("done "),
        seven[10].strip_prefix("step 10 ")
    );
    assert_eq!(lines(&format!("{line} 7")), seven);

    let eight = lines(&format!("{line} 8"));
    assert!(
        eight.iter().zip(&seven).all(|(one, other)| one != other),
        "{eight:?}"
    );
}

#[test]
fn digests_can_be_had_less_often() {
    let every = lines("--bytes 1MiB --steps 6");
    let third = lines("--bytes 1MiB --steps 6 --digest-every 3");
    let expected = [
        "step 1",
        "step 2",
        every[3].as_str(),
        "step 4",
        "step 5",
        every[6].as_str(),
        every[7].as_str(),
    ];
    assert_eq!(third[0], every[0]);
    assert_eq!(third[1..], expected);
    assert_eq!(
        lines("--bytes 1MiB --steps 2 --digest-every 0"),
        ["step 1", "step 2", &every_end("--bytes 1MiB --steps 2")]
    );
}

fn every_end(args: &str) -> String {
    lines(args).pop().unwrap()
}

#[test]
fn stopping_and_continuing_changes_nothing() {
    let args = "--gpus 2 --bytes 1MiB --steps 20 --step-ms 5";
    let undisturbed = lines(args);
    let mut running = Running::start(args);
    assert_eq!(running.line(), format!("ready pid {}", running.child.id()));
    let mut seen = Vec::new();
    while seen.len() < undisturbed.len() {
        running.signal("STOP");
        running.signal("CONT");
        seen.push(running.line());
    }
    assert_eq!(seen, undisturbed);
    assert!(running.end().success());
}

#[test]
fn sigterm_ends_it_at_work_and_at_rest() {
    for args in [
        "--bytes 1MiB",
        "--bytes 1MiB --steps 0",
        "--gpus 2 --bytes 0",
        "--bytes 1 --steps 0",
    ] {
        let mut running = Running::start(args);
        assert!(running.line().starts_with("ready pid "), "{args}");
        assert!(running.line().starts_with("step 0 digest "), "{args}");
        running.signal("TERM");
        assert_eq!(running.end().signal(), Some(SIGTERM), "{args}");
    }
}

#[test]
fn a_suspended_one_waits() {
    let mut running = Running::start("--gpus 2 --bytes 1MiB,0 --suspended");
    assert_eq!(
        running.line(),
        format!("suspended pid {}", running.child.id())
    );
    running.signal("TERM");
    assert!(running.lines.next().is_none(), "it computed nothing");
    assert_eq!(running.end().signal(), Some(SIGTERM));
}

#[test]
fn a_failure_is_one_line_and_status_1() {
    let cases = [
        (
            "--gpus 3 --bytes 1MiB",
            "testkit target: --gpus 3 asked for, but the driver has 2\n",
        ),
        (
            "--gpus 2 --bytes 1MiB,65MiB",
            "testkit target: cuMemAlloc_v2 (68157440 bytes on GPU 1) answered 2 CUDA_ERROR_OUT_OF_MEMORY\n",
        ),
    ];
    for (args, expected) in cases {
        let output = output(args);
        assert_eq!(output.status.code(), Some(1), "{args}");
        assert_eq!(String::from_utf8(output.stderr).unwrap(), expected);
        assert!(output.stdout.is_empty(), "{args}");
    }
}
