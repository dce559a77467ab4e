//! The command line as a script sees it: exit status, stdout, stderr, and nothing else.

use std::net::TcpListener;
use std::process::{Output, Stdio};

use assert_cmd::Command;
use serde_json::Value;

/// The real binary, in an environment of which nothing reaches it.
fn ckptstream(arguments: &[&str]) -> Command {
    let mut command = Command::cargo_bin("ckptstream").expect("the binary is built with its tests");
    command
        .env_clear()
        .env("AWS_EC2_METADATA_DISABLED", "true")
        .args(arguments);
    command
}

fn run(arguments: &[&str]) -> Output {
    ckptstream(arguments).output().expect("the binary starts")
}

fn stderr_lines(output: &Output) -> Vec<String> {
    String::from_utf8_lossy(&output.stderr)
        .lines()
        .map(str::to_owned)
        .collect()
}

fn json(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(bytes)))
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("temporary file");
    std::fs::write(file.path(), text).expect("written");
    file
}

#[test]
fn help_and_version_are_no_failure() {
    for arguments in [&["--help"][..], &["--version"], &["checkpoint", "--help"]] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        assert!(
            !output.stdout.is_empty() && output.stderr.is_empty(),
            "{arguments:?}"
        );
    }
}

#[test]
fn a_command_line_that_makes_no_sense_is_2_in_words_and_in_json() {
    let output = run(&["checkpoint"]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0));
    let output = run(&["lsit", "--json"]);
    assert_eq!(output.status.code(), Some(2));
    let report = json(&output.stdout);
    assert_eq!(
        (&report["result"], &report["exit_code"], &report["next"]),
        (&"failed".into(), &2.into(), &"fix-config".into())
    );
}

#[test]
fn the_last_line_says_code_phase_chain_and_what_to_do() {
    let config = file("[store]\nurl = \"s3://bucket\"\npart_siez = \"16MiB\"\n");
    let path = config.path().to_str().expect("text");
    let output = run(&["verify", "--config", path, "--json"]);
    assert_eq!(output.status.code(), Some(2));
    let last = stderr_lines(&output).pop().unwrap_or_default();
    for part in [
        "verify failed",
        "phase config",
        "exit 2",
        path,
        "line 3",
        "`store.part_siez`",
        "`store.part_size`",
        "next: ",
    ] {
        assert!(last.contains(part), "{part}: {last}");
    }
    let report = json(&output.stdout);
    assert_eq!(
        (&report["exit_code"], &report["phase"], &report["retryable"]),
        (&2.into(), &"config".into(), &false.into())
    );
    assert!(
        report["cause"][1]
            .as_str()
            .is_some_and(|cause| last.contains(cause)),
        "{report}"
    );
}

#[test]
fn the_file_may_be_named_by_the_environment() {
    let config = file("[encryption]\nkey = \"hunter2\"\n");
    let output = ckptstream(&["list"])
        .env("CKPTSTREAM_CONFIG", config.path())
        .output()
        .expect("starts");
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        text.contains("not supported") && !text.contains("hunter2"),
        "{text}"
    );
}

/// A store that nobody can reach, with a patience that a test has.
fn unreachable() -> (tempfile::NamedTempFile, String) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address");
    drop(listener);
    let config = file(
        "[job]\nname = \"j\"\n[store]\nurl = \"s3://bucket/p\"\nregion = \"us-east-1\"\nretry_timeout = \"300ms\"\n",
    );
    (config, format!("http://{address}"))
}

#[test]
fn a_store_that_cannot_be_reached_is_3_for_commands_that_only_read() {
    let (config, endpoint) = unreachable();
    let path = config.path().to_str().expect("text");
    for command in ["list", "inspect", "verify"] {
        let output = ckptstream(&[
            command,
            "--config",
            path,
            "--endpoint",
            &endpoint,
            "--json",
            "--progress",
            "json",
        ])
        .env("AWS_ACCESS_KEY_ID", "a")
        .env("AWS_SECRET_ACCESS_KEY", "b")
        .output()
        .expect("starts");
        assert_eq!(output.status.code(), Some(3), "{command}: {output:?}");
        let lines: Vec<Value> = stderr_lines(&output)
            .iter()
            .map(|line| json(line.as_bytes()))
            .collect();
        let last = lines
            .last()
            .unwrap_or_else(|| panic!("{command} says nothing"));
        assert_eq!(
            (&last["event"], &last["exit_code"]),
            (&"result".into(), &3.into()),
            "{command}"
        );
        assert_eq!(json(&output.stdout)["exit_code"], 3, "{command}");
    }
}

#[test]
fn without_credentials_nothing_is_tried() {
    let (config, endpoint) = unreachable();
    let output = run(&[
        "list",
        "--config",
        config.path().to_str().expect("text"),
        "--endpoint",
        &endpoint,
    ]);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let last = stderr_lines(&output).pop().unwrap_or_default();
    assert!(last.contains("AWS_ACCESS_KEY_ID"), "{last}");
}

#[test]
fn a_reader_that_went_away_changes_no_verdict() {
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("ckptstream"))
        .args(["lsit", "--json"])
        .env_clear()
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    // Both ends of talk are closed before the process has anything to say, or soon after: the status is the same.
    drop(child.stdout.take());
    drop(child.stderr.take());
    assert_eq!(child.wait().expect("ends").code(), Some(2));
}
