//! Buckets that want more of a request than others do: a header on every one, encryption by the store, a class, tags. Whoever does not give it is told the key; whoever does is served by every command.

use std::process::Stdio;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::support::MetadataServer;
use super::support::scene::{Scene, cause, until};

/// Without this header a request is refused.
fn demands(operation: &Value, header: &str) -> Value {
    json!([{
        "op": operation, "without_header": header, "always": true,
        "action": {"status": 403, "code": "AccessDenied"},
    }])
}

/// All that is done in the life of an image.
fn every_command_works(scene: &Scene, config: &str) {
    let mut target = scene.target();
    target.wait_for("step 2 ");
    let cli = |config: &str| scene.saver_with("job", "", config).cli;
    for command in [
        "preflight".to_owned(),
        format!("checkpoint --pid {} --then resume", target.pid()),
        format!("checkpoint --pid {} --then resume", target.pid()),
        format!("checkpoint --pid {}", target.pid()),
        "list".to_owned(),
        "inspect".to_owned(),
        "verify".to_owned(),
        "prune --grace 0s".to_owned(),
        "gc --older-than 0s".to_owned(),
        format!("restore --pid {}", target.pid()),
    ] {
        let run = cli(config).run(&command);
        assert_eq!(run.code, 0, "{config} {command}: {run:?}");
    }
    scene.must_compute_on(&mut target);
    scene.must_have_computed_rightly(target);
}

#[test]
fn a_bucket_whose_requesters_pay() {
    let scene = Scene::new(&[]);
    scene
        .server
        .set_rules(&demands(&json!("*"), "x-amz-request-payer"));
    let run = scene.saver("job", "").cli.run("preflight");
    assert_eq!(run.code, 3, "{run:?}");
    assert!(cause(&run).contains("store.request_payer"), "{run:?}");
    let config = "request_payer = true\n";
    pays_for_everything(&scene, config);
}

/// As [`every_command_works`]; what the scene itself asks of the store has no header.
fn pays_for_everything(scene: &Scene, config: &str) {
    let mut target = scene.target();
    target.wait_for("step 2 ");
    for command in [
        "preflight".to_owned(),
        format!("checkpoint --pid {}", target.pid()),
        "list".to_owned(),
        "verify".to_owned(),
        "prune --grace 0s".to_owned(),
        "gc --older-than 0s".to_owned(),
        format!("restore --pid {}", target.pid()),
    ] {
        let run = scene.saver_with("job", "", config).cli.run(&command);
        assert_eq!(run.code, 0, "{config} {command}: {run:?}");
    }
    scene.must_compute_on(&mut target);
}

#[test]
fn a_bucket_that_wants_encryption() {
    let scene = Scene::new(&[]);
    let making = json!(["PutObject", "CreateMultipartUpload"]);
    scene
        .server
        .set_rules(&demands(&making, "x-amz-server-side-encryption"));
    let run = scene.saver("job", "").cli.run("preflight");
    assert_eq!(run.code, 3, "{run:?}");
    assert!(cause(&run).contains("store.sse"), "{run:?}");
    every_command_works(&scene, "sse = \"s3\"\n");
}

#[test]
fn a_bucket_that_wants_a_key_a_class_and_tags() {
    let scene = Scene::new(&[]);
    let making = json!(["PutObject", "CreateMultipartUpload"]);
    let mut rules = Vec::new();
    for header in [
        "x-amz-server-side-encryption-aws-kms-key-id",
        "x-amz-storage-class",
        "x-amz-tagging",
    ] {
        rules.extend(demands(&making, header).as_array().cloned().expect("rules"));
    }
    scene.server.set_rules(&Value::Array(rules));
    let config =
        "sse = \"kms:arn:aws:kms:x\"\nstorage_class = \"STANDARD_IA\"\ntags = { team = \"a b\" }\n";
    every_command_works(&scene, config);
}

/// What makes no sense is refused with both keys (exit 2).
#[test]
fn settings_of_a_bucket_that_contradict_each_other_are_refused() {
    let scene = Scene::new(&[]);
    for (config, says) in [
        ("sse = \"aes\"\n", "store.sse"),
        ("sse = \"kms:\"\n", "store.sse"),
        ("sse = \"s3:key\"\n", "store.sse"),
        ("sse = \"customer:/k\"\n", "https://"),
        ("sse = \"customer\"\n", "store.sse"),
        ("storage_class = \"GLACIER\"\n", "read at once"),
        ("storage_class = \"a b\"\n", "store.storage_class"),
        ("tags = { \"\" = \"x\" }\n", "store.tags"),
        ("ca_bundle = \"relative\"\n", "store.ca_bundle"),
        ("proxy = \"corp\"\n", "store.proxy"),
    ] {
        let run = scene.saver_with("job", "", config).cli.run("list");
        assert_eq!(run.code, 2, "{config}: {run:?}");
        assert!(cause(&run).contains(says), "{config}: {}", cause(&run));
    }
}

/// What a store refuses is left out from then on, and that is said; what the configuration says stays as it says.
#[test]
fn a_store_that_knows_no_crc64nvme_or_wants_signed_bodies_is_served() {
    let unknown = json!({
        "status": 501, "code": "NotImplemented",
        "message": "A header you provided implies functionality that is not implemented: x-amz-checksum-crc64nvme",
    });
    let unsigned = json!({"status": 400, "code": "XAmzContentSHA256Mismatch"});
    let header = |name: &str, contains: &str, action: &Value| json!({"op": "*", "header": {"name": name, "contains": contains}, "always": true, "action": action});
    for (rule, fixed, says) in [
        (
            header("x-amz-checksum-crc64nvme", "", &unknown),
            "checksum = \"crc64nvme\"\n",
            "store.checksum = \"none\"",
        ),
        (
            header("x-amz-content-sha256", "UNSIGNED-PAYLOAD", &unsigned),
            "sign_payload = false\n",
            "store.sign_payload = true",
        ),
    ] {
        let scene = Scene::new(&[]);
        scene.server.set_rules(&json!([rule]));
        let run = scene.saver_with("job", "", fixed).cli.run("preflight");
        assert_eq!(run.code, 3, "{run:?}");
        assert!(cause(&run).contains(says), "{run:?}");
        let run = scene.saver("job", "").cli.run("preflight");
        assert_eq!(run.code, 0, "{run:?}");
        assert!(run.stderr.contains(says), "{run:?}");
        every_command_works(&scene, "");
    }
}

/// An instance's role: its credentials are for half a minute each, and the store calls the first ones ended before they say so themselves.
#[test]
fn credentials_that_end_during_a_save_cost_it_nothing() {
    const ROLE: &str = "/latest/meta-data/iam/security-credentials/";
    let scene = Scene::new(&[]);
    let role = |token: &str| {
        let end = SystemTime::now() + Duration::from_secs(300);
        json!({
            "Code": "Success", "Type": "AWS-HMAC", "LastUpdated": "2026-01-01T00:00:00Z",
            "AccessKeyId": "test", "SecretAccessKey": "testtest", "Token": token,
            "Expiration": humantime::format_rfc3339_seconds(end).to_string(),
        })
    };
    let script = |token: &str| {
        let mine = format!("{ROLE}job-role");
        json!({"values": {ROLE: "job-role", mine: role(token)}})
    };
    let metadata = MetadataServer::start(&script("first"));
    let ended = json!({"status": 400, "code": "ExpiredToken"});
    scene.server.set_rules(&json!([{
        "op": "*", "header": {"name": "x-amz-security-token", "contains": "first"},
        "from": 8, "action": ended,
    }]));
    let mut target = scene.target();
    target.wait_for("step 2 ");
    let saver = scene.saver("job", "").patient();
    let mut command = saver
        .cli
        .command(&format!("checkpoint --json --pid {}", target.pid()));
    command
        .env_remove("AWS_ACCESS_KEY_ID")
        .env_remove("AWS_SECRET_ACCESS_KEY")
        .env("AWS_EC2_METADATA_DISABLED", "false")
        .env("AWS_EC2_METADATA_SERVICE_ENDPOINT", &metadata.endpoint)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let save = command.spawn().expect("it runs");
    // The next ones are there only when the first are refused.
    until(|| {
        scene
            .server
            .all_requests()
            .iter()
            .any(|it| it["status"] == 400)
    });
    metadata.set_script(&script("second"));
    let save = save.wait_with_output().expect("it runs");
    let stderr = String::from_utf8(save.stderr).expect("text");
    assert!(save.status.success(), "{stderr}");
    assert!(stderr.contains("asked for anew"), "{stderr}");
    assert_eq!(scene.images("job"), [1]);
}
