//! Single cases of what goes wrong between a client and a store (tests/s3-cases.tsv) that no other subject has.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::preflight::{told as told_of, wrong};
use super::support::Target;
use super::support::scene::{Scene, cause, told};

/// A save and a restore into the very process, which computes on; both commands must end with 0.
fn there_and_back(scene: &Scene, driver: &str, config: &str) {
    let mut target = scene.target();
    target.wait_for("step 2 ");
    for command in ["checkpoint", "restore"] {
        let saver = scene.saver_with("job", driver, config).unhurried();
        let run = saver.cli.run(&format!("{command} --pid {}", target.pid()));
        assert_eq!(run.code, 0, "{command}: {run:?}");
    }
    scene.must_compute_on(&mut target);
    scene.must_have_computed_rightly(target);
}

fn struck(scene: &Scene) -> usize {
    let requests = scene.server.all_requests();
    requests.iter().filter(|it| !it["fault"].is_null()).count()
}

/// A part is sent when all of it is there, however long its bytes take; and one that the server gave up on is sent again.
#[test]
fn a_server_that_gives_up_on_silent_bodies_is_no_obstacle_to_slow_copies() {
    let scene = Scene::new(&["--close-idle", "500ms"]);
    let gave_up = json!({"status": 400, "code": "RequestTimeout"});
    scene
        .server
        .set_rules(&json!([{"op": "UploadPart", "nth": 1, "action": gave_up}]));
    there_and_back(&scene, "d2h=2MiB", "");
    assert_eq!(struck(&scene), 1);
}

/// A range is asked for when there is memory for it, which a slow GPU frees one chunk after the other: the connections are long closed by then, and none is closed under a range that is read too slowly.
#[test]
fn a_server_that_drops_idle_connections_is_no_obstacle_to_slow_restores() {
    const IDLE: Duration = Duration::from_millis(300);
    let scene = Scene::new(&["--close-idle", "300ms"]);
    let job = "--gpus 1 --bytes 12MiB --fill random --seed 11 --step-ms 2";
    let mut target = Target::start(&scene.node, job);
    target.wait_for("step 2 ");
    let save = format!("checkpoint --pid {}", target.pid());
    scene.saver("job", "").cli.ok(&save);
    scene.server.forget_requests();
    // Memory for a few chunks, each of which takes half a second.
    let saver = scene.saver("job", "h2d=2MiB").unhurried();
    let text = saver.cli.config_text().replace("64MiB", "16MiB");
    let restore = format!("restore --pid {}", target.pid());
    saver.with_config(&text).cli.ok(&restore);
    scene.must_compute_on(&mut target);
    scene.must_be_the_steps_of(job, &target.kill());

    let mut ranges = scene.server.requests("GetObject");
    ranges.retain(|it| !it["range"].is_null());
    ranges.sort_by_key(|it| it["t_us"].as_u64());
    let on_new_connections = (1..ranges.len()).filter(|index| {
        let (before, [it, ..]) = ranges.split_at(*index) else {
            unreachable!("there is one at each of these");
        };
        let time = |value: &Value| value.as_u64().expect("a time");
        let asked_before = time(&before[index - 1]["end_us"]);
        let silence = Duration::from_micros(time(&it["t_us"]).saturating_sub(asked_before));
        silence > IDLE
            && before
                .iter()
                .all(|that| that["client_port"] != it["client_port"])
    });
    let count = on_new_connections.count();
    assert!(
        count >= 3,
        "{count} after a silence, on a new connection: {ranges:?}"
    );
}

#[test]
fn a_store_that_is_overrun_for_a_while_slows_a_save_and_no_more() {
    let scene = Scene::new(&[]);
    let overrun = json!({"status": 503, "code": "SlowDown"});
    scene.server.set_rules(&json!([
        {"op": "*", "from": 2, "times": 6, "action": overrun},
        {"op": "*", "every": 3, "action": overrun},
    ]));
    there_and_back(&scene, "", "");
    assert!(struck(&scene) > 6);
}

#[test]
fn one_part_in_four_that_is_reset_costs_nothing_but_time() {
    let scene = Scene::new(&["--min-part", "1KiB"]);
    let reset = |every: u32, bytes: u32| json!({"op": "UploadPart", "every": every, "action": {"wire": "reset-after", "bytes": bytes}});
    scene
        .server
        .set_rules(&json!([reset(4, 1_000), reset(7, 40_000)]));
    // Nothing is compressed away, so that there is something to be reset. A save has two parts.
    for _ in 0..4 {
        there_and_back(&scene, "", "[compression]\nmode = \"none\"\n");
    }
    let (sent, struck) = (scene.server.requests("UploadPart").len(), struck(&scene));
    assert!(sent >= 8 && struck >= sent / 4, "{struck} of {sent}");
}

/// As the store tells the time.
#[test]
fn a_clock_that_differs_is_told() {
    // A store that keeps its own time is signed for with that; what only says another time is told, too.
    for (args, says) in [
        (vec!["--clock-offset", "1200"], None),
        (vec![], Some(Duration::from_secs(5 * 60))),
    ] {
        let scene = Scene::new(&args);
        if let Some(ahead) = says {
            let date = httpdate::fmt_http_date(SystemTime::now() + ahead);
            let rule = json!({"op": "*", "always": true, "action": {"headers": {"date": date}}});
            scene.server.set_rules(&json!([rule]));
        }
        let run = scene.saver("job", "").cli.run("preflight");
        let state = "warning store.clock".to_owned();
        assert!(wrong(&run).contains(&state), "{run:?}");
        assert!(told_of(&run, "store.clock").contains("chrony"), "{run:?}");
        assert_eq!(run.code, 0, "{run:?}");
    }
}

#[test]
fn a_store_without_conditional_writes_is_refused_before_the_target_is_touched() {
    let scene = Scene::new(&[]);
    for action in [
        json!({"ignore_conditions": true}),
        json!({"status": 501, "code": "NotImplemented"}),
    ] {
        scene
            .server
            .set_rules(&json!([{"op": "PutObject", "always": true, "action": action}]));
        let mut target = scene.target();
        let saver = scene.saver("job", "");
        let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
        assert_eq!((run.code, told(&run)), (3, Some("running")), "{run:?}");
        assert!(cause(&run).contains("If-None-Match"), "{run:?}");
        assert_eq!(saver.calls("cuCheckpointProcessLock"), 0);
        scene.must_compute_on(&mut target);
    }
}

/// Such a bucket refuses parts without a checksum, and to delete what it holds.
#[test]
fn a_bucket_with_object_lock_is_served_and_prune_says_what_stays() {
    let refused = |op: &Value, header: &str, code: &str| json!({"op": op, "without_header": header, "always": true, "action": {"status": 400, "code": code}});
    let sent = json!(["PutObject", "UploadPart"]);
    for (config, header) in [
        ("checksum = \"crc64nvme\"\n", "x-amz-checksum-crc64nvme"),
        ("checksum = \"none\"\n", "content-md5"),
    ] {
        let scene = Scene::new(&[]);
        scene
            .server
            .set_rules(&json!([refused(&sent, header, "InvalidRequest")]));
        let mut target = scene.target();
        target.wait_for("step 1 ");
        for _ in 0..3 {
            let save = format!("checkpoint --then resume --pid {}", target.pid());
            scene.saver_with("job", "", config).cli.ok(&save);
        }
        let locked = json!({"status": 403, "code": "AccessDenied", "message": "Access Denied because object protected by object lock."});
        scene
            .server
            .set_rules(&json!([{"op": "DeleteObject", "always": true, "action": locked}]));
        let run = scene
            .saver_with("job", "", config)
            .cli
            .run("prune --grace 0s");
        assert_eq!(run.code, 3, "{run:?}");
        assert!(cause(&run).contains("protected by object lock"), "{run:?}");
        scene.saver_with("job", "", config).cli.ok("verify");
    }
}
