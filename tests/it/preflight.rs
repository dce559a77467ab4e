//! `preflight`: what would make a save fail is told beforehand, in one line that names what mends it.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::support::scene::{Scene, cause};
use super::support::{Ckptstream, Run, S3Server};

/// Its checks that are not as they should be: `state name`.
pub(crate) fn wrong(run: &Run) -> Vec<String> {
    let checks = run.report["checks"].as_array().cloned().unwrap_or_default();
    let wrong = checks.iter().filter(|check| check["state"] != "ok");
    wrong
        .map(|check| format!("{} {}", word(&check["state"]), word(&check["name"])))
        .collect()
}

fn word(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// What was found and what mends it, of a check.
pub(crate) fn told(run: &Run, name: &str) -> String {
    let checks = run.report["checks"].as_array().cloned().unwrap_or_default();
    let check = checks.iter().find(|check| check["name"] == name);
    let check = check.unwrap_or_else(|| panic!("no {name}: {run:?}"));
    format!("{} | {}", word(&check["found"]), word(&check["mend"]))
}

#[test]
fn where_all_is_well_it_says_so_and_leaves_nothing() {
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    target.wait_for("step 1 ");
    let cli = scene.saver("job", "").cli;
    let run = cli.run(&format!("preflight --pid {}", target.pid()));
    assert_eq!((run.code, wrong(&run)), (0, Vec::new()), "{run:?}");
    let names = run.report["checks"].as_array().expect("checks").len();
    assert!(names >= 20, "{run:?}");
    for rate in ["upload_rate", "download_rate"] {
        assert!(run.report[rate].as_f64() > Some(0.0), "{run:?}");
    }
    // What was made is gone again, and the target was not touched.
    let made = scene.server.requests("PutObject").len()
        + scene.server.requests("CompleteMultipartUpload").len();
    // The second claim, and all but one of those at once, four times.
    let put_in_vain = 1 + 4 * 7;
    assert_eq!(
        scene.server.requests("DeleteObject").len(),
        made - put_in_vain
    );
    scene.must_compute_on(&mut target);
    let text = cli.command("preflight").output().expect("it runs");
    let text = String::from_utf8(text.stdout).expect("text");
    assert!(text.lines().all(|line| line.starts_with("ok ")), "{text}");
}

/// Rights that are missing: those that a save needs fail, the others are warnings.
#[test]
fn every_right_that_is_missing_is_named() {
    let denied = json!({"status": 403, "code": "AccessDenied"});
    std::thread::scope(|scope| {
        for (operation, code, is_wrong, says) in [
            ("PutObject", 3, "failed store.create", "s3:PutObject"),
            ("GetObject", 3, "failed store.read", "s3:GetObject"),
            ("HeadObject", 3, "failed store.read", "s3:GetObject"),
            ("ListObjectsV2", 3, "failed store.list", "s3:ListBucket"),
            (
                "CreateMultipartUpload",
                3,
                "failed store.upload",
                "s3:PutObject",
            ),
            ("UploadPart", 3, "failed store.upload", "s3:PutObject"),
            (
                "CompleteMultipartUpload",
                3,
                "failed store.upload",
                "s3:PutObject",
            ),
            (
                "AbortMultipartUpload",
                0,
                "warning store.abort",
                "s3:AbortMultipartUpload",
            ),
            (
                "ListMultipartUploads",
                0,
                "warning store.list-uploads",
                "s3:ListBucketMultipartUploads",
            ),
            ("DeleteObject", 0, "warning store.delete", "s3:DeleteObject"),
        ] {
            let denied = &denied;
            scope.spawn(move || {
                let scene = Scene::new(&[]);
                scene
                    .server
                    .set_rules(&json!([{"op": operation, "always": true, "action": denied}]));
                let run = scene.saver("job", "").cli.run("preflight");
                assert_eq!(run.code, code, "{operation}: {run:?}");
                assert!(
                    wrong(&run).contains(&is_wrong.to_owned()),
                    "{operation}: {run:?}"
                );
                let (_, name) = is_wrong.split_once(' ').expect("two words");
                let told = told(&run, name);
                assert!(
                    told.contains(operation) && told.contains(says),
                    "{operation}: {told}"
                );
                if code == 3 {
                    assert!(cause(&run).contains(&format!("{name}: ")), "{run:?}");
                }
            });
        }
    });
}

/// What stores say that are not as others are, and what mends it.
#[test]
fn families_of_refusals_are_told_with_the_key_that_mends_them() {
    let missing = "A header you provided implies functionality that is not implemented: x-amz-checksum-crc64nvme";
    let region = json!({"x-amz-bucket-region": "eu-west-1"});
    std::thread::scope(|scope| {
        for (operation, action, name, mend) in [
            (
                "UploadPart",
                json!({"status": 501, "code": "NotImplemented", "message": missing}),
                "store.upload",
                "store.checksum = \"none\"",
            ),
            (
                "UploadPart",
                json!({"status": 400, "code": "XAmzContentSHA256Mismatch"}),
                "store.upload",
                "store.sign_payload = true",
            ),
            (
                "UploadPart",
                json!({"status": 411, "code": "MissingContentLength"}),
                "store.upload",
                "store.checksum = \"none\"",
            ),
            (
                "UploadPart",
                json!({"status": 400, "code": "InvalidArgument", "message": "aws-chunked encoding is not supported"}),
                "store.upload",
                "store.checksum = \"none\"",
            ),
            (
                "*",
                json!({"status": 301, "code": "PermanentRedirect", "headers": region}),
                "store.list",
                "set store.region = \"eu-west-1\"",
            ),
            (
                "*",
                json!({"status": 404, "code": "NoSuchBucket"}),
                "store.list",
                "store.url",
            ),
            (
                "*",
                json!({"status": 403, "code": "InvalidAccessKeyId"}),
                "store.list",
                "AWS_ACCESS_KEY_ID",
            ),
            (
                "*",
                json!({"status": 403, "code": "RequestTimeTooSkewed"}),
                "store.list",
                "clock",
            ),
            (
                "PutObject",
                json!({"status": 501, "code": "NotImplemented"}),
                "store.create",
                "If-None-Match",
            ),
            (
                "PutObject",
                json!({"ignore_conditions": true}),
                "store.conditional-create",
                "If-None-Match",
            ),
        ] {
            scope.spawn(move || {
                let scene = Scene::new(&[]);
                scene
                    .server
                    .set_rules(&json!([{"op": operation, "always": true, "action": action}]));
                let run = scene.saver("job", "").cli.run("preflight");
                let told = told(&run, name);
                assert!(told.contains(mend), "{operation} {action}: {told}");
                assert_eq!(run.code, 3, "{operation} {action}: {run:?}");
            });
        }
    });
}

/// However sick the store is, it ends; and says which request was not answered.
#[test]
fn a_store_that_hangs_is_told_of_within_its_time() {
    std::thread::scope(|scope| {
        for (operation, name) in [
            ("*", "store.list"),
            ("PutObject", "store.create"),
            ("UploadPart", "store.upload"),
            ("CompleteMultipartUpload", "store.upload"),
        ] {
            scope.spawn(move || {
                let scene = Scene::new(&[]);
                scene.server.set_rules(
                    &json!([{"op": operation, "always": true, "action": {"stall": true}}]),
                );
                let saver = scene.saver("job", "");
                let started = Instant::now();
                let run = saver.unhurried().cli.run("preflight");
                // Each of these requests would be tried for two minutes.
                assert!(
                    started.elapsed() < Duration::from_secs(60),
                    "{:?}",
                    started.elapsed()
                );
                assert_eq!(run.code, 3, "{operation}: {run:?}");
                assert!(
                    wrong(&run).contains(&format!("failed {name}")),
                    "{operation}: {run:?}"
                );
            });
        }
    });
}

#[test]
fn nobody_who_listens_and_no_credentials_are_told_too() {
    let gone = Ckptstream::new(&S3Server::start(&[]), "job");
    let told = gone.command("preflight --json").output().expect("it runs");
    let report: Value = serde_json::from_slice(&told.stdout).expect("JSON");
    assert_eq!(
        (told.status.code(), &report["exit_code"]),
        (Some(3), &json!(3))
    );
    let text = report.to_string();
    assert!(
        text.contains("refused") && text.contains("store.endpoint"),
        "{text}"
    );
    let scene = Scene::new(&[]);
    let saver = scene.saver("job", "");
    let mut command = saver.cli.command("preflight --json");
    command.env_remove("AWS_ACCESS_KEY_ID");
    let told = command.output().expect("it runs");
    let report: Value = serde_json::from_slice(&told.stdout).expect("JSON");
    assert_eq!(report["checks"][0]["name"], "store.connect", "{report}");
    assert_eq!(told.status.code(), Some(3));
}

/// The node and the target.
#[test]
fn what_is_wrong_with_the_node_or_the_target_is_told() {
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    target.wait_for("step 1 ");
    let pid = target.pid();
    let run = |driver: &str, args: &str| {
        scene
            .saver("job", driver)
            .cli
            .run(&format!("preflight {args}"))
    };
    let old = run("api=12080", "");
    assert_eq!(old.code, 3, "{old:?}");
    assert!(
        told(&old, "node.driver").contains("cuCheckpoint"),
        "{old:?}"
    );
    let gone = run("", "--pid 4194303");
    assert_eq!(wrong(&gone), ["failed target.process"], "{gone:?}");
    // Ours has no CUDA; nor has anything that came from it.
    let mut shell = std::process::Command::new("sleep")
        .arg("60")
        .spawn()
        .expect("sleep");
    let other = run("", &format!("--pid {}", shell.id()));
    assert_eq!(wrong(&other), ["failed target.process"], "{other:?}");
    shell.kill().expect("our child");
    shell.wait().expect("our child");
    let stop = |name: &str| {
        let kill = format!("kill -{name} {pid}");
        let done = std::process::Command::new("sh")
            .args(["-c", &kill])
            .status();
        assert!(done.expect("a shell").success());
    };
    stop("STOP");
    let stopped = run("", &format!("--pid {pid}"));
    stop("CONT");
    assert!(
        wrong(&stopped).contains(&"failed target.process".to_owned()),
        "{stopped:?}"
    );
    assert!(
        told(&stopped, "target.process").contains("is stopped"),
        "{stopped:?}"
    );
    // A second is not enough for anything at the rate of the store.
    let late = run("", &format!("--pid {pid} --deadline 2001ms"));
    assert_eq!(late.code, 0, "{late:?}");
    assert_eq!(wrong(&late), ["warning deadline.fit"], "{late:?}");
    let spill = scene.state_dir().join("nowhere");
    let config = format!("[spill]\npath = \"{}\"\n", spill.display());
    let nowhere = scene.saver_with("job", "", &config).cli.run("preflight");
    assert_eq!(wrong(&nowhere), ["warning node.spill"], "{nowhere:?}");
}

#[test]
fn a_store_that_lets_several_be_first_is_told_although_it_turns_a_second_one_away() {
    let scene = Scene::new(&[]);
    let rule = json!({
        "op": "PutObject", "key_contains": "contest", "always": true, "action": {"ignore_conditions": true},
    });
    scene.server.set_rules(&json!([rule]));
    let run = scene.saver("job", "").cli.run("preflight");
    assert_eq!(wrong(&run), ["failed store.create-at-once"], "{run:?}");
    assert_eq!(run.code, 3, "{run:?}");
}

/// A program that stands in for NVIDIA's.
fn with_nvidia_smi(scene: &Scene, script: &str) -> Run {
    let place = tempfile::TempDir::new().expect("a temporary folder");
    let program = place.path().join("nvidia-smi");
    std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).expect("a script");
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&program, executable).expect("our file");
    let uuids = format!("uuids={GPU}");
    let cli = scene.saver("job", &uuids).cli;
    let mut command = cli.command("preflight --json");
    let path = format!("{}:/usr/bin:/bin", place.path().display());
    let output = command
        .env("PATH", path)
        .output()
        .expect("the binary starts");
    let said = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    let code = output.status.code().unwrap_or(-1);
    Run::new(code, &said(output.stdout), said(output.stderr))
}

const GPU: &str = "daa54852-18c3-cacc-b758-75ce052242e8";

#[test]
fn modes_of_gpus_that_only_nvidias_program_tells() {
    let scene = Scene::new(&[]);
    let off = with_nvidia_smi(&scene, &format!("echo 'GPU-{GPU}, Disabled, Disabled'"));
    assert_eq!(
        (off.code, wrong(&off)),
        (
            0,
            vec![
                "warning node.persistence".to_owned(),
                "warning node.ecc".to_owned()
            ]
        ),
        "{off:?}"
    );
    let told = told(&off, "node.persistence");
    assert!(
        told.contains(GPU) && told.contains("nvidia-persistenced"),
        "{told}"
    );
    // One that hangs, and one that fails.
    let started = Instant::now();
    let hangs = with_nvidia_smi(&scene, "exec sleep 60");
    assert!(
        started.elapsed() < Duration::from_secs(20),
        "{:?}",
        started.elapsed()
    );
    assert_eq!(wrong(&hangs), ["warning node.persistence"], "{hangs:?}");
    let fails = with_nvidia_smi(&scene, "exit 9");
    assert_eq!(wrong(&fails), [""; 0], "{fails:?}");
}
