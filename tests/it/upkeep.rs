//! `gc` and `prune`: what came to nothing goes, what is alive stays, and nothing that was dropped comes back.

use serde_json::{Value, json};

use super::support::s3_server::has_credentials;
use super::support::scene::{Scene, Watched, assert_failed, until};

fn row<'a>(report: &'a Value, attempt: &str) -> &'a Value {
    let rows = report["jobs"][0]["attempts"].as_array().expect("rows");
    let row = rows.iter().find(|row| row["attempt"] == attempt);
    row.unwrap_or_else(|| panic!("no {attempt} in {report}"))
}

/// Attempts that have data, in a dry run's words.
fn attempts(scene: &Scene) -> Vec<String> {
    let report = scene.saver("job", "").cli.ok("gc --dry-run");
    let rows = report["jobs"][0]["attempts"].as_array().expect("rows");
    let names = rows.iter().filter_map(|row| row["attempt"].as_str());
    names.map(str::to_owned).collect()
}

#[test]
fn what_a_dead_saver_left_is_removed_and_what_lives_stays() {
    let scene = Scene::new(&[]);
    scene.save("job");
    let target = scene.target();
    let saver = scene.saver("job", "");
    let dying = saver.cli.dying_at("stream:all acknowledged=kill");
    assert_eq!(
        dying
            .run(&format!("checkpoint --pid {}", target.pid()))
            .code,
        -1
    );
    let cli = scene.saver("job", "").cli;
    let image = cli.ok("list")["images"][0]["attempt"].clone();
    let image = image.as_str().expect("a nonce");
    let all = attempts(&scene);
    let dead = all.iter().find(|attempt| *attempt != image).expect("two");

    // It may be under way for all that is known.
    let young = cli.ok("gc");
    assert_eq!(row(&young, dead)["fate"], "kept");
    let gone = cli.ok("gc --older-than 0s");
    assert_eq!(row(&gone, dead)["fate"], "removed", "{gone}");
    assert_eq!(row(&gone, image)["fate"], "kept");
    assert!(gone["lifecycle_rule"]["Rules"].is_array());
    assert_eq!(attempts(&scene), [image.to_owned()]);
    cli.ok("verify");
}

#[test]
fn an_attempt_that_was_given_up_never_becomes_an_image() {
    if !has_credentials("upkeep::an_attempt_that_was_given_up_never_becomes_an_image") {
        return;
    }
    let scene = Scene::new(&[]);
    let target = scene.target();
    let saver = scene.saver("job", "d2h=4MiB");
    // By its own word it needs no more than this.
    let args = format!("checkpoint --deadline 60s --pid {}", target.pid());
    let running = Watched::start(&saver.cli, &args);
    running.until_phase("stream");
    let cli = scene.saver("job", "").cli;
    let attempt = attempts(&scene).pop().expect("one");
    let kept = cli.ok("gc --older-than 0s");
    assert_eq!(row(&kept, &attempt)["fate"], "kept", "it is alive: {kept}");
    // A gc with another opinion.
    let log = json!({"format": 1, "entry": "dropped", "writer": "gc", "attempt": attempt});
    scene.put_entry("job", 3, &log);
    let run = running.wait();
    assert_failed("dropped", &run, 15, "commit", &["given up"]);
    assert_eq!(scene.images("job"), [0_u64; 0]);
}

#[test]
fn old_images_are_dropped_and_two_stay() {
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    let cli = scene.saver("job", "").cli;
    for _ in 0..4 {
        target.wait_for("step ");
        cli.ok(&format!("checkpoint --then resume --pid {}", target.pid()));
    }
    let generations = scene.generations("job");
    cli.ok(&format!("verify --image {}", generations[3]));
    for bad in ["prune --keep 1", "prune --keep x", "prune --grace soon"] {
        assert_eq!(cli.run(bad).code, 2, "{bad}");
    }
    let dry = cli.ok("prune --dry-run");
    let fate = |report: &Value, index: usize| {
        let image = format!("{:08}", generations[index]);
        let rows = report["jobs"][0]["attempts"]
            .as_array()
            .expect("rows")
            .clone();
        let row = rows.into_iter().find(|row| row["image"] == image.as_str());
        row.expect("every image")["fate"].clone()
    };
    assert_eq!(fate(&dry, 2), "dropped");
    assert_eq!(scene.generations("job").len(), 4);

    let pruned = cli.ok("prune");
    let fates: Vec<Value> = (0..4).map(|index| fate(&pruned, index)).collect();
    // The oldest is the newest that was read back.
    assert_eq!(fates, ["kept", "kept", "dropped", "kept"], "{pruned}");
    let listed = cli.ok("list");
    let standings: Vec<&Value> = listed["images"]
        .as_array()
        .expect("images")
        .iter()
        .map(|image| &image["standing"])
        .collect();
    assert_eq!(standings, ["usable", "usable", "dropped", "usable"]);
    let refused = cli.run(&format!("verify --image {}", generations[2]));
    assert_eq!(refused.code, 6, "{refused:?}");
    // Its data goes after the grace.
    assert_eq!(fate(&cli.ok("gc"), 2), "dropped");
    assert_eq!(fate(&cli.ok("gc --grace 0s"), 2), "removed");
    cli.ok("verify");
    cli.ok(&format!("verify --image {}", generations[3]));
}

#[test]
fn an_image_that_is_being_restored_is_not_removed() {
    let scene = Scene::new(&[]);
    let mut target = scene.target();
    let cli = scene.saver("job", "").cli;
    for _ in 0..3 {
        target.wait_for("step ");
        cli.ok(&format!("checkpoint --then resume --pid {}", target.pid()));
    }
    let listed = cli.ok("list");
    let oldest = &listed["images"][2];
    let (generation, attempt) = (&oldest["generation"], oldest["attempt"].as_str());
    let attempt = attempt.expect("a nonce");
    let mut fresh = scene.fresh();
    let saver = scene.saver("job", "h2d=1MiB");
    let args = format!(
        "restore --pid {} --into-fresh --image {generation}",
        fresh.pid()
    );
    let slow = Watched::start(&saver.cli, &args);
    until(|| saver.calls("cuMemcpyHtoDAsync") > 0);
    let pruned = cli.ok("prune --grace 0s");
    assert_eq!(row(&pruned, attempt)["fate"], "dropped", "{pruned}");
    let run = slow.wait();
    assert_eq!(run.code, 0, "{run:?}");
    scene.must_compute_on(&mut fresh);
    // Its pin is gone, and with it what it kept.
    let gone = cli.ok("gc --grace 0s");
    assert_eq!(row(&gone, attempt)["fate"], "removed", "{gone}");
}
