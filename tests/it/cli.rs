//! The command line as a script sees it: exit status, stdout, stderr, and nothing else.

use std::net::TcpListener;
use std::process::{Output, Stdio};

use assert_cmd::Command;
use serde_json::{Value, json};

use crate::support::Run;
use crate::support::scene::{Scene, Watched};

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

fn parsed(bytes: &[u8]) -> Value {
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
    let report = parsed(&output.stdout);
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
    let report = parsed(&output.stdout);
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
fn unreachable(retry_timeout: &str) -> (tempfile::NamedTempFile, String) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address");
    drop(listener);
    let config = file(&format!(
        "[job]\nname = \"j\"\n[store]\nurl = \"s3://bucket/p\"\nregion = \"us-east-1\"\nretry_timeout = \"{retry_timeout}\"\n",
    ));
    (config, format!("http://{address}"))
}

#[test]
fn a_store_that_cannot_be_reached_is_3_for_commands_that_only_read() {
    let (config, endpoint) = unreachable("300ms");
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
            .map(|line| parsed(line.as_bytes()))
            .collect();
        let last = lines
            .last()
            .unwrap_or_else(|| panic!("{command} says nothing"));
        assert_eq!(
            (&last["event"], &last["exit_code"]),
            (&"result".into(), &3.into()),
            "{command}"
        );
        assert_eq!(parsed(&output.stdout)["exit_code"], 3, "{command}");
    }
}

#[test]
fn a_store_that_cannot_be_reached_for_a_while_is_told_of() {
    // Whatever the pauses' random part: an attempt fails between 2 s and 7 s, and a second line would come after 12 s.
    for (retry_timeout, is_told) in [("300ms", false), ("12s", true)] {
        let (config, endpoint) = unreachable(retry_timeout);
        let path = config.path().to_str().expect("text");
        let output = ckptstream(&["list", "--config", path, "--endpoint", &endpoint])
            .env("AWS_ACCESS_KEY_ID", "a")
            .env("AWS_SECRET_ACCESS_KEY", "b")
            .output()
            .expect("starts");
        let lines = stderr_lines(&output);
        let told = lines
            .iter()
            .filter(|line| line.contains("trying again, up to"));
        assert_eq!(
            told.count(),
            usize::from(is_told),
            "{retry_timeout}: {lines:?}"
        );
    }
}

#[test]
fn without_credentials_nothing_is_tried() {
    let (config, endpoint) = unreachable("300ms");
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

/// The last line on stderr and the JSON object must tell the same failure. The exit status, as both have it.
fn same_failure_twice(what: &str, code: Option<i32>, stdout: &[u8], stderr: &str) -> i32 {
    let report = parsed(stdout);
    let last = stderr.lines().last().unwrap_or_default();
    let words = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let causes = report["cause"].as_array().cloned().unwrap_or_default();
    let causes: Vec<String> = causes.iter().map(words).collect();
    assert!(
        !causes.is_empty() && report["result"] == "failed",
        "{what}: {report}"
    );
    let command = report["command"]
        .as_str()
        .map_or_else(String::new, |command| format!("{command} "));
    let image = report["image"]
        .as_str()
        .map_or_else(String::new, |image| format!(" (image {image})"));
    let said = format!(
        "ckptstream: {command}failed in phase {}, exit {} ({}){image}: {}; next: ",
        words(&report["phase"]),
        report["exit_code"],
        words(&report["meaning"]),
        causes.join(": ")
    );
    assert!(last.starts_with(&said), "{what}:\n{last}\nis not\n{said}");
    assert_eq!(code.map(i64::from), report["exit_code"].as_i64(), "{what}");
    code.unwrap_or_default()
}

#[test]
fn stderr_and_json_tell_the_same_failure_without_a_store() {
    let (config, endpoint) = unreachable("300ms");
    let wrong = file("[store]\nurl = \"s3://bucket\"\nstall_timeout = \"0s\"\n");
    let (config, wrong) = (config.path().display(), wrong.path().display());
    let at = format!("--config {config} --endpoint {endpoint}");
    let lines = [
        (2, String::new()),
        (2, "lsit".to_owned()),
        (2, "checkpoint".to_owned()),
        (2, "restore --pid 1 --image newest".to_owned()),
        (2, "list --config /nonexistent.toml".to_owned()),
        (2, format!("list --config {wrong}")),
        (2, format!("cat {at}")),
        (2, "verify --store s3://bucket".to_owned()),
        (3, format!("list {at}")),
        (3, format!("inspect {at}")),
        (3, format!("verify {at}")),
    ];
    for (expected, line) in lines {
        let arguments: Vec<&str> = line.split_whitespace().chain(["--json"]).collect();
        let output = ckptstream(&arguments)
            .env("AWS_ACCESS_KEY_ID", "a")
            .env("AWS_SECRET_ACCESS_KEY", "b")
            .output()
            .expect("starts");
        let stderr = String::from_utf8_lossy(&output.stderr);
        let code = same_failure_twice(&line, output.status.code(), &output.stdout, &stderr);
        assert_eq!(code, expected, "{line}: {stderr}");
    }
}

#[test]
fn stderr_and_json_tell_the_same_failure_of_a_save_or_restore() {
    let scene = Scene::new(&[]);
    let tell = |what: &str, expected: i32, run: &Run| {
        let stdout = run.report.to_string();
        let code = same_failure_twice(what, Some(run.code), stdout.as_bytes(), &run.stderr);
        assert_eq!(code, expected, "{what}: {run:?}");
    };
    let mut target = scene.target();
    let pid = target.pid();
    let save = format!("checkpoint --pid {pid}");
    let restore = format!("restore --pid {pid}");
    let saver = |driver: &str| scene.saver("job", driver).cli;

    tell("no image", 6, &saver("").run(&restore));
    tell("no images at all", 6, &saver("").run("list"));
    let refused = saver("fault=cuCheckpointProcessLock#1=code:999").run(&save);
    tell("not locked", 10, &refused);
    target.wait_for("step ");

    saver("").ok(&save);
    tell("saved before", 7, &saver("").run(&save));
    let stranger = scene.saver("other", "").cli.run(&save);
    tell("somebody else's", 4, &stranger);
    tell(
        "read",
        2,
        &saver("").run("cat --gpu GPU-00000000-0000-0000-0000-000000000000"),
    );
    let failed = saver("fault=cuCheckpointOperationComplete#1=code:999").run(&restore);
    tell("not restored", 21, &failed);

    let other = scene.target();
    let running = saver("").run(&format!("restore --pid {}", other.pid()));
    tell("it runs", 20, &running);
    let rule = json!([{"op": "UploadPart", "always": true, "action": {"status": 403, "code": "AccessDenied"}}]);
    scene.server.set_rules(&rule);
    let lost = scene.saver("lost", "").cli;
    let lost = lost.run(&format!("checkpoint --pid {}", other.pid()));
    tell("no part is taken", 12, &lost);
}

#[test]
fn with_json_progress_even_a_line_that_makes_no_sense_is_answered_in_json() {
    for arguments in [
        &["lsit", "--progress", "json"][..],
        &["lsit", "--progress=json"],
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let lines = stderr_lines(&output);
        assert_eq!(lines.len(), 1, "{lines:?}");
        let line = parsed(lines[0].as_bytes());
        assert_eq!(
            (&line["event"], &line["exit_code"]),
            (&"result".into(), &2.into())
        );
    }
}

#[test]
fn only_a_default_that_is_lowered_is_warned_of() {
    let warnings = |lines: &str| -> Vec<String> {
        let config = file(&format!("[store]\nurl = \"s3://bucket\"\n{lines}"));
        let path = config.path().to_str().expect("text");
        // Without credentials it ends before it asks anybody.
        let output = run(&["list", "--config", path, "--endpoint", "http://127.0.0.1:9"]);
        let warnings = stderr_lines(&output);
        let gives_way = |line: &String| line.contains("retry_timeout");
        warnings.into_iter().filter(gives_way).collect()
    };
    let short = "retry_timeout = \"10s\"\nconnect_timeout = \"2s\"\nstall_timeout = \"4s\"\n";
    let lowered = warnings(short);
    assert!(
        lowered.len() == 1 && lowered[0].contains("store.request_timeout is 10s"),
        "{lowered:?}"
    );
    let all_set = warnings(&format!("{short}request_timeout = \"8s\"\n"));
    assert_eq!(all_set, [""; 0]);
    assert_eq!(warnings("retry_timeout = \"30s\"\n"), [""; 0]);
}

#[test]
fn what_a_signal_does_is_said_for_the_command_at_hand() {
    let scene = Scene::new(&[]);
    let stalled = json!([{"op": "*", "always": true, "action": {"stall": true}}]);
    scene.server.set_rules(&stalled);
    let saver = scene.saver("job", "");
    let verify = Watched::start(&saver.cli, "verify");
    verify.until_phase("read");
    verify.signal("INT");
    let run = verify.wait();
    assert!(
        run.stderr.contains("SIGINT stops the command")
            && !run.stderr.contains("goes on to its end"),
        "{run:?}"
    );
    let stdout = run.report.to_string();
    same_failure_twice("stopped", Some(run.code), stdout.as_bytes(), &run.stderr);
}
