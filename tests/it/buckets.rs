//! Buckets that want more of a request than others do: a header on every one, encryption by the store, a class, tags. Whoever does not give it is told the key; whoever does is served by every command.

use std::process::Stdio;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::support::scene::{Scene, cause, until};
use super::support::{MetadataServer, Run, Target};

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
        ("resolve = { \"a\" = \"b\" }\n", "store.resolve"),
        ("resolve = { \"a b\" = \"127.0.0.1\" }\n", "store.resolve"),
        ("kind = \"azure\"\n", "store.kind"),
        ("part_count_max = 10001\n", "store.part_count_max"),
        ("object_size_max = \"1PiB\"\n", "store.object_size_max"),
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
    let told = "store.checksum = \"none\"";
    let header = |name: &str, contains: &str, action: &Value| json!({"op": "*", "header": {"name": name, "contains": contains}, "always": true, "action": action});
    let without = |names: &[&str]| -> Vec<Value> {
        let names = names.iter().map(|name| format!("x-amz-checksum-{name}"));
        names.map(|name| header(&name, "", &unknown)).collect()
    };
    let signs = header("x-amz-content-sha256", "UNSIGNED-PAYLOAD", &unsigned);
    let signed = "store.sign_payload = true";
    // What is said with the key fixed, and what is found out by itself.
    for (rules, fixed, says, learns) in [
        (
            without(&["crc64nvme"]),
            "checksum = \"crc64nvme\"\n",
            told,
            "store.checksum = \"crc32c\"",
        ),
        (
            without(&["crc64nvme", "crc32c"]),
            "checksum = \"crc32c\"\n",
            told,
            "store.checksum = \"crc32\"",
        ),
        (
            without(&["crc64nvme", "crc32c", "crc32"]),
            "checksum = \"crc32\"\n",
            told,
            told,
        ),
        (vec![signs], "sign_payload = false\n", signed, signed),
    ] {
        let scene = Scene::new(&[]);
        scene.server.set_rules(&Value::Array(rules));
        let run = scene.saver_with("job", "", fixed).cli.run("preflight");
        assert_eq!(run.code, 3, "{run:?}");
        assert!(cause(&run).contains(says), "{run:?}");
        let run = scene.saver("job", "").cli.run("preflight");
        assert_eq!(run.code, 0, "{run:?}");
        assert!(run.stderr.contains(learns), "{run:?}");
        every_command_works(&scene, "");
    }
}

/// Every body has the checksum that was asked for, and no other.
#[test]
fn a_store_gets_the_checksum_that_is_set() {
    let refused = json!({"status": 400, "code": "InvalidRequest", "message": "no such thing here"});
    let bodies = json!(["PutObject", "UploadPart"]);
    std::thread::scope(|scope| {
        for set in ["crc32c", "crc32"] {
            let (refused, bodies) = (&refused, &bodies);
            scope.spawn(move || {
                let scene = Scene::new(&[]);
                let mine = format!("x-amz-checksum-{set}");
                let mut rules = vec![json!({
                    "op": bodies, "without_header": mine, "always": true, "action": refused,
                })];
                for other in ["x-amz-checksum-crc64nvme", "content-md5"] {
                    rules.push(json!({
                        "op": "*", "header": {"name": other}, "always": true, "action": refused,
                    }));
                }
                scene.server.set_rules(&Value::Array(rules));
                every_command_works(&scene, &format!("checksum = \"{set}\"\n"));
            });
        }
    });
}

/// S3-14. A node whose clock is wrong is saved and restored, and told so once in each command.
#[test]
fn a_clock_that_is_wrong_costs_a_warning() {
    std::thread::scope(|scope| {
        for (offset, says) in [
            ("1200", "behind that of s3://images/store"),
            ("-90000", "ahead of that of s3://images/store"),
        ] {
            scope.spawn(move || {
                let scene = Scene::new(&["--clock-offset", offset]);
                let mut target = scene.target();
                target.wait_for("step 2 ");
                let run = scene.saver("job", "").cli.run("preflight");
                assert_eq!(run.code, 0, "{run:?}");
                let checks = run.report["checks"].as_array().cloned().unwrap_or_default();
                let clock = checks.iter().find(|it| it["name"] == "store.clock");
                assert_eq!(clock.expect("it is told")["state"], "warning", "{run:?}");
                let save = format!("checkpoint --pid {}", target.pid());
                let run = scene.saver("job", "").cli.run(&save);
                assert_eq!(run.code, 0, "{run:?}");
                assert_eq!(run.stderr.matches(says).count(), 1, "{run:?}");
                for command in ["verify", "prune --grace 0s", "gc --older-than 0s"] {
                    let run = scene.saver("job", "").cli.run(command);
                    assert_eq!(run.code, 0, "{command}: {run:?}");
                }
                let restore = format!("restore --pid {}", target.pid());
                let run = scene.saver("job", "").cli.run(&restore);
                assert_eq!(run.code, 0, "{run:?}");
                scene.must_compute_on(&mut target);
                scene.must_have_computed_rightly(target);
            });
        }
    });
}

/// S3-27. What is locked stays, and that is told with the date; `prune` goes on.
#[test]
fn what_is_locked_is_told_with_its_date() {
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    target.wait_for("step 2 ");
    let save = format!("checkpoint --pid {} --then resume", target.pid());
    for _ in 0..3 {
        let run = scene.saver("job", "").cli.run(&save);
        assert_eq!(run.code, 0, "{run:?}");
    }
    let until = |date: &str| {
        let headers = json!({
            "x-amz-object-lock-mode": "COMPLIANCE", "x-amz-object-lock-retain-until-date": date,
        });
        json!([
            {"op": "DeleteObject", "key_contains": ".zst", "always": true, "action": {"status": 403, "code": "AccessDenied"}},
            {"op": "HeadObject", "key_contains": ".zst", "always": true, "action": {"headers": headers}},
        ])
    };
    scene.server.set_rules(&until("2098-07-06T05:04:03Z"));
    let prune = "prune --grace 0s";
    let run = scene.saver("job", "").cli.run(prune);
    assert_eq!(run.code, 0, "{run:?}");
    let attempts = |run: &Run| run.report["jobs"][0]["attempts"].clone();
    let rows = attempts(&run).as_array().cloned().unwrap_or_default();
    let row = rows.iter().find(|row| row["fate"] == "dropped");
    let row = row.unwrap_or_else(|| panic!("{run:?}"));
    let reason = row["reason"].as_str().unwrap_or_default();
    assert!(
        reason.contains("2 of its objects are locked until 2098-07-06T05:04:03Z"),
        "{row}"
    );
    assert_eq!(row["failed"], false, "{row}");
    // Claim, two contests, manifest and two frame tables went.
    assert_eq!(row["objects"], 6, "{row}");
    // A lock that is over is none: the right is missing.
    scene.server.set_rules(&until("2020-01-01T00:00:00Z"));
    let run = scene.saver("job", "").cli.run(prune);
    assert!(
        run.report.to_string().contains("s3:DeleteObject"),
        "{run:?}"
    );
    scene.server.set_rules(&json!([]));
    let run = scene.saver("job", "").cli.run(prune);
    assert_eq!(run.code, 0, "{run:?}");
    let removed = attempts(&run).to_string();
    assert!(removed.contains("\"fate\":\"removed\""), "{run:?}");
}

/// Two savers may come at the same moment: a save finds out that the store lets both be first, before the lock.
#[test]
fn a_store_that_lets_several_be_first_is_refused_before_the_lock() {
    let wins = json!({"ignore_conditions": true});
    for (rule, says) in [
        (
            json!({"op": "PutObject", "key_contains": "contest.json", "always": true, "action": wins}),
            "told 4 of 4",
        ),
        // And with connections that stand already.
        (
            json!({"op": "PutObject", "key_contains": "contest-2.json", "always": true, "action": wins}),
            "told 8 of 8",
        ),
        // The third claim at once; those before it are turned away.
        (
            json!({"op": "PutObject", "key_contains": "attempt.json", "nth": 4, "action": wins}),
            "ignores If-None-Match",
        ),
    ] {
        let scene = Scene::new(&[]);
        let mut target = scene.target();
        target.wait_for("step 1 ");
        scene.server.set_rules(&json!([rule]));
        let saver = scene.saver("job", "");
        let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
        assert_eq!(run.code, 3, "{run:?}");
        assert!(cause(&run).contains(says), "{run:?}");
        assert_eq!(saver.calls("cuCheckpointProcessLock"), 0, "{run:?}");
        scene.must_compute_on(&mut target);
    }
}

/// A kind that is known to have no conditional creates is refused with its name, if it has none; what it does decides.
#[test]
fn what_is_known_of_a_kind_is_told_and_what_it_does_decides() {
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    target.wait_for("step 1 ");
    let save = format!("checkpoint --pid {} --then resume", target.pid());
    let saver = || scene.saver_with("job", "", "kind = \"gcs\"\n").cli;
    let run = saver().run(&save);
    assert_eq!(run.code, 0, "{run:?}");
    let rule = json!({"op": "PutObject", "key_contains": "attempt.json", "always": true, "action": {"ignore_conditions": true}});
    scene.server.set_rules(&json!([rule]));
    for command in [save.as_str(), "preflight"] {
        let run = saver().run(command);
        assert_eq!(run.code, 3, "{run:?}");
        assert!(cause(&run).contains("store.kind = \"gcs\""), "{run:?}");
    }
    scene.must_compute_on(&mut target);
}

/// The planner keeps to what the store takes.
#[test]
fn the_limits_of_a_store_are_kept_or_refused_beforehand() {
    let scene = Scene::new(&["--part-limit", "3"]);
    let mut target = scene.target();
    target.wait_for("step 1 ");
    let pid = target.pid();
    let run = |config: &str| {
        let saver = scene.saver_with("job", "", config);
        saver
            .cli
            .run(&format!("checkpoint --pid {pid} --then resume"))
    };
    // 64 MiB of memory each, in parts of 5 MiB.
    let short = run("part_count_max = 3\n");
    assert_eq!(short.code, 3, "{short:?}");
    assert!(cause(&short).contains("in 3 parts"), "{short:?}");
    let narrow = run("object_size_max = \"32MiB\"\n");
    assert_eq!(narrow.code, 3, "{narrow:?}");
    assert!(
        cause(&narrow).contains("store.object_size_max"),
        "{narrow:?}"
    );
    scene.must_compute_on(&mut target);
}

/// A name that nobody resolves.
#[test]
fn a_host_with_an_address_is_not_looked_up() {
    let scene = Scene::new(&[]);
    let port = scene.server.endpoint.rsplit(':').next().expect("a port");
    let endpoint = format!("http://Store.Invalid:{port}");
    let run = |config: &str| {
        let saver = scene.saver_with("job", "", &format!("path_style = true\n{config}"));
        saver.cli.at(&endpoint).run("preflight")
    };
    let found = run("resolve = { \"store.invalid\" = \"127.0.0.1\" }\n");
    assert_eq!(found.code, 0, "{found:?}");
    let lost = run("");
    assert_eq!(lost.code, 3, "{lost:?}");
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

/// How long credentials live and how long the save takes about, in seconds: `2 15` unless [`CREDENTIALS`] says otherwise.
fn lives() -> (u64, u64) {
    let asked = std::env::var(CREDENTIALS).unwrap_or_else(|_| "2 15".to_owned());
    let (lives, lasts) = asked.split_once(' ').expect("two numbers of seconds");
    let number = |text: &str| text.parse().expect("a number of seconds");
    (number(lives), number(lasts))
}

const CREDENTIALS: &str = "CKPTSTREAM_TEST_CREDENTIALS";

/// Bytes of the save below.
const LONG_BYTES: u64 = 96 << 20;

/// A container's role whose credentials live for seconds, through a save that lasts many lives: the store refuses what has ended, and nothing of the save is tried again for it.
#[test]
#[expect(clippy::print_stdout, reason = "with --nocapture it is a measurement")]
fn credentials_that_live_shorter_than_a_save_cost_a_log_line_at_most() {
    let (lives, lasts) = lives();
    let rate = format!("{}B/s", LONG_BYTES / lasts);
    let scene = Scene::new(&["--rate", &rate]);
    let role = |number: u64| {
        let end = SystemTime::now() + Duration::from_secs(lives);
        json!({"values": {"/v2/credentials/role": {
            "AccessKeyId": "test", "SecretAccessKey": "testtest", "Token": format!("token-{number:05}"),
            "Expiration": humantime::format_rfc3339_millis(end).to_string(),
        }}})
    };
    let metadata = MetadataServer::start(&role(0));
    let mut target = Target::start(
        &scene.node,
        &format!(
            "--gpus 2 --bytes {}B --fill random --seed 11 --step-ms 2",
            LONG_BYTES / 2
        ),
    );
    target.wait_for("step 2 ");
    let saver = scene.saver_with("job", "", "").unhurried();
    let mut command = saver
        .cli
        .command(&format!("checkpoint --json --pid {}", target.pid()));
    command
        .env_remove("AWS_ACCESS_KEY_ID")
        .env_remove("AWS_SECRET_ACCESS_KEY")
        .env(
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            format!("{}/v2/credentials/role", metadata.endpoint),
        )
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut save = command.spawn().expect("it runs");
    // Every half life others are given out; each is refused once its life is over.
    let mut ended = Vec::new();
    for number in 1.. {
        if save.try_wait().expect("our child").is_some() {
            break;
        }
        std::thread::sleep(Duration::from_millis(lives * 500));
        metadata.set_script(&role(number));
        if number >= 2 {
            ended.push(json!({
                "op": "*", "header": {"name": "x-amz-security-token", "contains": format!("token-{:05}", number - 2)},
                "always": true, "action": {"status": 400, "code": "ExpiredToken"},
            }));
            scene.server.set_rules(&Value::Array(ended.clone()));
        }
    }
    let save = save.wait_with_output().expect("it runs");
    let stderr = String::from_utf8(save.stderr).expect("text");
    assert!(save.status.success(), "{stderr}");
    let report: Value = serde_json::from_slice(&save.stdout).expect("JSON");
    let given = metadata.requests().len();
    let refused = scene.server.all_requests();
    let refused = refused.iter().filter(|it| it["status"] == 400).count();
    println!(
        "credentials of {lives} s each: a save of {} bytes in {:.1} s, given out {given} times, {refused} requests refused and made again, {} retries, {} lines of log",
        report["bytes"]["raw"],
        report["elapsed_seconds"].as_f64().unwrap_or_default(),
        report["retries"],
        stderr.lines().count(),
    );
    assert!(given >= 3, "{given} times: the save was too short");
    let told = stderr.lines().filter(|line| line.contains("WARN"));
    let others: Vec<_> = told
        .filter(|line| !line.contains("asked for anew"))
        .collect();
    assert!(others.is_empty(), "{stderr}");
    assert_eq!(scene.images("job"), [1]);
}
