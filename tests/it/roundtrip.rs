//! Saved, and put back: every byte, for every shape of memory, into fresh processes, into the same one, and onto other GPUs.
//!
//! A target prints the digest of all its GPU memory, made from what it meant to write there. So does `cat`, read from the store; and a restored target, read from its GPUs.

use std::collections::BTreeSet;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{Ckptstream, Node, S3Server, Target, digest, json_lines};

const CHUNK: u64 = 1 << 20;
const PART: u64 = 5 << 20;
/// The smallest chunks and parts that there are.
const SMALL: &str = "pipeline.chunk_size = '1MiB'\nstore.part_size = '5MiB'\n";

/// The JSON list at `value[key]`.
fn list<'a>(value: &'a Value, key: &str) -> &'a Vec<Value> {
    value[key]
        .as_array()
        .unwrap_or_else(|| panic!("no list `{key}` in {value}"))
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("{value} is no number"))
}

fn text(value: &Value) -> &str {
    value
        .as_str()
        .unwrap_or_else(|| panic!("{value} is no text"))
}

/// The image's raw extents, GPU after GPU.
fn cat_all(cli: &Ckptstream, report: &Value) -> Vec<u8> {
    let gpus = list(report, "devices").iter();
    gpus.flat_map(|gpu| cli.cat(text(&gpu["device"]))).collect()
}

/// Saves a job that only holds its memory, ends it, and puts the image into a fresh process. Memory, store and restored memory must have one digest.
/// Returns what `checkpoint` reported.
fn there_and_back(cli: &Ckptstream, node: &Node, args: &str) -> Value {
    let args = format!("{args} --steps 0");
    let mut target = Target::start(node, &args);
    let before = target.next_digest();
    let report = cli.ok(&format!("checkpoint --pid {}", target.pid()));
    assert_eq!(report["targets"][0]["state"], "checkpointed", "{report}");
    drop(target);
    assert_eq!(
        digest(&cat_all(cli, &report)),
        before,
        "{args}: in the store"
    );

    let mut fresh = Target::start(node, &format!("{args} --suspended"));
    let restored = cli.ok(&format!("restore --pid {} --into-fresh", fresh.pid()));
    assert_eq!(restored["targets"][0]["state"], "running", "{restored}");
    assert_eq!(fresh.next_digest(), before, "{args}: on the GPUs again");
    report
}

#[test]
fn every_size_around_a_chunk_and_a_part() {
    let server = S3Server::start(&[]);
    for size in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, PART - 1, PART, PART + 1] {
        let node = Node::new("memory=64MiB;granularity=1");
        let cli = Ckptstream::new(&server, &format!("size-{size}"))
            .on(&node)
            .config(SMALL);
        let report = there_and_back(&cli, &node, &format!("--bytes {size} --fill random"));
        assert_eq!(number(&report["bytes"]["raw"]), size);
        let frames: u64 = list(&cli.ok("inspect"), "extents")
            .iter()
            .map(|extent| number(&extent["frames"]["all"]))
            .sum();
        assert_eq!(frames, size.div_ceil(CHUNK));
    }
}

#[test]
fn objects_of_one_part_and_a_byte_more_or_less() {
    let server = S3Server::start(&[]);
    let stored = |job: &str, size: u64| {
        let node = Node::new("memory=64MiB;granularity=1");
        let cli = Ckptstream::new(&server, job).on(&node).config(SMALL);
        let report = there_and_back(&cli, &node, &format!("--bytes {size} --fill random"));
        number(&report["bytes"]["stored"])
    };
    // Incompressible memory of as many chunks and blocks always takes the same surplus for frames and seek table.
    let size = PART - 1_000;
    let surplus = stored("probe", size) - size;
    for (job, len, part_count) in [
        ("less", PART - 1, 1),
        ("equal", PART, 1),
        ("more", PART + 1, 2),
    ] {
        assert_eq!(stored(job, len - surplus), len);
        let key = format!("store/{job}/data/");
        let mut parts = server.requests("UploadPart");
        parts.retain(|part| text(&part["key"]).starts_with(&key));
        assert_eq!(parts.len(), part_count, "{job}");
    }
}

#[test]
fn an_all_zero_gpu_next_to_a_random_one() {
    let server = S3Server::start(&[]);
    let node = Node::new("gpus=2;memory=64MiB;granularity=1");
    let cli = Ckptstream::new(&server, "job").on(&node).config(SMALL);
    let size = 10 * CHUNK + 17;
    let report = there_and_back(
        &cli,
        &node,
        &format!("--gpus 2 --bytes {size} --fill random,zeros"),
    );
    let inspected = cli.ok("inspect");
    let [random, zeros] = list(&inspected, "extents").as_slice() else {
        panic!("two extents: {inspected}");
    };
    assert_eq!(random["frames"]["raw"], 11, "{random}");
    assert_eq!(zeros["frames"]["zero"], 11, "{zeros}");
    assert!(number(&random["stored"]) > size, "{random}");
    assert!(number(&zeros["stored"]) < 1_000, "{zeros}");
    assert_eq!(number(&report["bytes"]["raw"]), 2 * size);
}

#[test]
fn every_kind_of_memory_with_default_settings() {
    let server = S3Server::start(&[]);
    let node = Node::new("gpus=3;memory=64MiB");
    let cli = Ckptstream::new(&server, "job").on(&node);
    there_and_back(
        &cli,
        &node,
        "--gpus 3 --bytes 22MiB,36MiB --fill random,weights,mixed",
    );
    let inspected = cli.ok("inspect");
    let ratio = |index: usize| {
        inspected["extents"][index]["ratio"]
            .as_f64()
            .expect("a ratio")
    };
    assert!(ratio(0) > 0.99 && ratio(0) < 1.0, "random: {inspected}");
    assert!(ratio(1) > 1.1 && ratio(2) > 1.1, "{inspected}");
}

#[test]
fn eight_gpus_of_different_sizes_compute_on_in_a_fresh_process() {
    let settings = "gpus=8;memory=64MiB;granularity=1";
    let args = format!(
        "--gpus 8 --bytes 9000001,1,{},{PART},0,{},{CHUNK},3333333 --fill mixed,random,weights,zeros,random,mixed,weights,random --seed 8 --step-ms 20",
        CHUNK + 1,
        CHUNK - 1,
    );
    let server = S3Server::start(&[]);
    let node = Node::new(settings);
    let cli = Ckptstream::new(&server, "job").on(&node).config(SMALL);

    let mut target = Target::start(&node, &args);
    target.wait_for_steps(3);
    let report = cli.ok(&format!("checkpoint --pid {}", target.pid()));
    let mut seen = target.kill();
    // A GPU without memory has no extent, and is one of the image's GPUs all the same.
    assert_eq!(list(&report, "devices").len(), 7);
    let manifest = cli.ok("inspect")["manifest"].clone();
    assert_eq!(list(&manifest["processes"][0], "devices").len(), 8);

    let mut fresh = Target::start(&node, &format!("{args} --suspended"));
    cli.ok(&format!("restore --pid {} --into-fresh", fresh.pid()));
    fresh.wait_for_steps(3);
    seen.extend(fresh.kill());
    Target::check_undisturbed(&Node::new(settings), &args, seen);
}

#[test]
fn back_into_the_very_process() {
    let settings = "gpus=2;memory=64MiB";
    let args = "--gpus 2 --bytes 6MiB,3MiB --seed 5 --step-ms 20";
    let server = S3Server::start(&[]);
    let node = Node::new(settings);
    let cli = Ckptstream::new(&server, "job").on(&node);
    let mut target = Target::start(&node, args);
    // Twice: the process is a CUDA process like any other again.
    for _ in 0..2 {
        target.wait_for_steps(2);
        cli.ok(&format!("checkpoint --pid {}", target.pid()));
        // Asked again, there is nothing to do.
        let again = cli.run(&format!("checkpoint --pid {}", target.pid()));
        assert_eq!(again.code, 7, "{}", again.stderr);
        cli.ok(&format!("restore --pid {}", target.pid()));
    }
    target.wait_for_steps(2);
    Target::check_undisturbed(&Node::new(settings), args, target.kill());
}

#[test]
fn periodic_saves_of_a_job_that_computes() {
    let settings = "gpus=2;memory=64MiB";
    let args = "--gpus 2 --bytes 4MiB --seed 6 --step-ms 20";
    let server = S3Server::start(&[]);
    let node = Node::new(settings);
    let cli = Ckptstream::new(&server, "job").on(&node).config(SMALL);
    let mut target = Target::start(&node, args);
    for (generation, step) in [3, 6, 9].into_iter().zip(["step 2 ", "step 5 ", "step 8 "]) {
        target.wait_for(step);
        let report = cli.ok(&format!("checkpoint --pid {} --then resume", target.pid()));
        assert_eq!(report["generation"], generation);
        assert_eq!(report["targets"][0]["state"], "running");
    }
    target.wait_for_steps(2);
    let lived_on = target.kill();

    let listed = cli.ok("list");
    let generations: Vec<u64> = list(&listed, "images")
        .iter()
        .map(|image| number(&image["generation"]))
        .collect();
    assert_eq!(generations, [9, 6, 3], "newest first");
    for (image, generation, least_step) in [("latest", 9, 8), ("00000003", 3, 2)] {
        let mut fresh = Target::start(&node, &format!("{args} --suspended"));
        let report = cli.ok(&format!(
            "restore --pid {} --into-fresh --image {image}",
            fresh.pid()
        ));
        assert_eq!(report["generation"], generation);
        let resumed = fresh.wait_for("resumed step ");
        let step: u64 = resumed
            .trim_start_matches("resumed step ")
            .parse()
            .expect("a number");
        assert!(step >= least_step, "{image}: {resumed}");
        fresh.wait_for_steps(3);
        let seen = lived_on.iter().cloned().chain(fresh.kill());
        Target::check_undisturbed(&Node::new(settings), args, seen);
    }
}

/// The extents that the driver gave in the only call of `call`: UUID without `GPU-`, and bytes.
fn extents(trace: &std::path::Path, call: &str) -> Vec<(String, u64)> {
    let calls = json_lines(trace);
    let call = calls
        .iter()
        .rfind(|line| line["call"] == call && line["result"] == 0);
    let call = call.expect("the driver was asked");
    list(call, "extents")
        .iter()
        .map(|extent| (text(&extent["device"]).to_owned(), number(&extent["bytes"])))
        .collect()
}

fn uuid(tail: u64) -> String {
    format!("00000000-0000-4000-8000-{tail:012x}")
}

#[test]
fn the_drivers_order_of_devices_means_nothing() {
    let settings = "gpus=3;memory=64MiB";
    // GPUs of one size: nothing but their identity tells them apart.
    let args = "--gpus 3 --bytes 2MiB --fill random --seed 9 --step-ms 20";
    let server = S3Server::start(&[]);
    let node = Node::new(settings);
    let dir = TempDir::new().expect("a temporary folder");
    let mut target = Target::start(&node, args);
    let mut orders = BTreeSet::new();
    for seed in 1..=5 {
        target.wait_for_steps(1);
        let trace = dir.path().join(format!("{seed}.jsonl"));
        let node = node.with(&format!("seed={seed};trace={}", trace.display()));
        let cli = Ckptstream::new(&server, "job").on(&node);
        cli.ok(&format!("checkpoint --pid {} --then resume", target.pid()));
        for call in [
            "cuCheckpointProcessCheckpoint",
            "cuCheckpointProcessRestore",
        ] {
            let gpus = extents(&trace, call).into_iter().map(|(gpu, _)| gpu);
            orders.insert((call, gpus.collect::<Vec<_>>()));
        }
    }
    let count = |call: &str| orders.iter().filter(|(of, _)| *of == call).count();
    assert!(
        count("cuCheckpointProcessCheckpoint") > 1 && count("cuCheckpointProcessRestore") > 1,
        "the driver always gave one order, which shows nothing: {orders:?}"
    );
    target.wait_for_steps(1);
    Target::check_undisturbed(&Node::new(settings), args, target.kill());
}

/// A job of three GPUs of different sizes, saved on a node with GPUs 1, 2 and 3.
struct Away {
    server: S3Server,
    args: &'static str,
    home: Node,
    /// What the job printed before it was saved.
    seen: Vec<String>,
    dir: TempDir,
}

const AWAY_BYTES: [u64; 3] = [2 << 20, 4 << 20, 6 << 20];

impl Away {
    fn new() -> Self {
        let args = "--gpus 3 --bytes 2MiB,4MiB,6MiB --seed 4 --step-ms 20";
        let uuids = format!("{},{},{}", uuid(1), uuid(2), uuid(3));
        let home = Node::new(&format!("gpus=3;memory=64MiB;uuids={uuids}"));
        let server = S3Server::start(&[]);
        let mut target = Target::start(&home, args);
        target.wait_for_steps(2);
        let cli = Ckptstream::new(&server, "job").on(&home);
        cli.ok(&format!("checkpoint --pid {}", target.pid()));
        Self {
            server,
            args,
            home,
            seen: target.kill(),
            dir: TempDir::new().expect("a temporary folder"),
        }
    }

    /// Restores with these settings of the node, and flags; the job must go on. Returns on which GPU the driver gave how many bytes, by bytes.
    fn restore(&self, name: &str, settings: &str, flags: &str) -> Vec<String> {
        let trace = self.dir.path().join(name);
        let node = Node::new(&format!("{settings};trace={}", trace.display()));
        let cli = Ckptstream::new(&self.server, "job").on(&node);
        // The process describes the node that it comes from, as one that CRIU has brought along does.
        let mut fresh = Target::start(&self.home, &format!("{} --suspended", self.args));
        cli.ok(&format!(
            "restore --pid {} --into-fresh {flags}",
            fresh.pid()
        ));
        fresh.wait_for_steps(2);
        let seen = self.seen.iter().cloned().chain(fresh.kill());
        Target::check_undisturbed(&self.home, self.args, seen);
        let mut extents = extents(&trace, "cuCheckpointProcessRestore");
        extents.sort_by_key(|&(_, bytes)| bytes);
        let bytes: Vec<u64> = extents.iter().map(|&(_, bytes)| bytes).collect();
        assert_eq!(bytes, AWAY_BYTES);
        extents.into_iter().map(|(gpu, _)| gpu).collect()
    }
}

#[test]
fn onto_other_gpus() {
    let away = Away::new();
    // The same GPUs under other ordinals: each keeps its own.
    let permuted = format!(
        "gpus=3;memory=64MiB;uuids={},{},{}",
        uuid(3),
        uuid(1),
        uuid(2)
    );
    assert_eq!(
        away.restore("permuted", &permuted, ""),
        [uuid(1), uuid(2), uuid(3)]
    );

    // GPU 2 is here, the others are not: they take the lowest that are left.
    let others = format!(
        "gpus=4;memory=64MiB;uuids={},{},{},{}",
        uuid(0xa),
        uuid(2),
        uuid(0xb),
        uuid(0xc)
    );
    assert_eq!(
        away.restore("others", &others, ""),
        [uuid(0xa), uuid(2), uuid(0xb)]
    );

    // As told, even away from a GPU that is here.
    let flags = [(1, 0xb), (2, 0xa), (3, 0xc)]
        .map(|(old, new)| format!("--gpu-map GPU-{}=GPU-{}", uuid(old), uuid(new)));
    assert_eq!(
        away.restore("mapped", &others, &flags.join(" ")),
        [uuid(0xb), uuid(0xa), uuid(0xc)]
    );
}

#[test]
fn saved_again_on_the_other_gpus() {
    let settings = "gpus=2;memory=64MiB";
    let args = "--gpus 2 --bytes 4MiB,3MiB --seed 11 --step-ms 20";
    let (first, second) = (Node::new(settings), Node::new(settings));
    let server = S3Server::start(&[]);
    let here = Ckptstream::new(&server, "job").on(&first);
    let there = Ckptstream::new(&server, "job").on(&second);

    let mut target = Target::start(&first, args);
    target.wait_for_steps(2);
    here.ok(&format!("checkpoint --pid {}", target.pid()));
    let mut seen = target.kill();
    let mut moved = Target::start(&first, &format!("{args} --suspended"));
    there.ok(&format!("restore --pid {} --into-fresh", moved.pid()));
    moved.wait_for_steps(3);
    let report = there.ok(&format!("checkpoint --pid {}", moved.pid()));
    // The restore has opened the job, and so has the save.
    assert_eq!(report["generation"], 7);
    seen.extend(moved.kill());
    let mut home_again = Target::start(&second, &format!("{args} --suspended"));
    here.ok(&format!("restore --pid {} --into-fresh", home_again.pid()));
    home_again.wait_for_steps(3);
    seen.extend(home_again.kill());
    Target::check_undisturbed(&first, args, seen);
}

#[test]
fn the_commands_that_read_agree() {
    let server = S3Server::start(&[]);
    let node = Node::new("gpus=2;memory=64MiB");
    let saver = Ckptstream::new(&server, "job").on(&node).config(SMALL);
    let mut target = Target::start(&node, "--gpus 2 --bytes 12MiB,6MiB --steps 0 --seed 12");
    let memory = target.next_digest();
    let saved = saver.ok(&format!("checkpoint --pid {}", target.pid()));

    // None of them needs a driver.
    let reader = Ckptstream::new(&server, "job");
    let (listed, inspected, verified) =
        (reader.ok("list"), reader.ok("inspect"), reader.ok("verify"));
    let image = &listed["images"][0];
    assert_eq!(image["standing"], "usable");
    for field in ["image", "generation"] {
        assert_eq!(image[field], saved[field]);
        assert_eq!(inspected[field], saved[field]);
        assert_eq!(verified[field], saved[field]);
    }
    assert_eq!(image["attempt"], saved["attempt"]);
    assert_eq!(inspected["manifest"]["attempt"], saved["attempt"]);
    for field in ["raw", "stored"] {
        assert_eq!(image[field], saved["bytes"][field]);
        assert_eq!(verified["bytes"][field], saved["bytes"][field]);
        let extents = list(&inspected, "extents").iter();
        let sum: u64 = extents.map(|extent| number(&extent[field])).sum();
        assert_eq!(sum, number(&saved["bytes"][field]));
    }
    assert_eq!(verified["devices"], saved["devices"]);
    assert_eq!(digest(&cat_all(&reader, &saved)), memory);

    // People read the same.
    let page = |command: &str| {
        let output = reader.output(command);
        assert!(output.status.success(), "{command}");
        String::from_utf8(output.stdout).expect("text")
    };
    assert!(page("list").contains("00000003"), "{}", page("list"));
    for gpu in list(&saved, "devices") {
        let uuid = text(&gpu["device"]);
        assert!(page("inspect").contains(uuid), "{}", page("inspect"));
    }
}
