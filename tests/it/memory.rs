//! The memory budget, held against what the kernel counts: no buffer of the size of GPU memory on the host, out or back.

use std::time::Duration;

use tempfile::TempDir;

use crate::support::{Ckptstream, Node, Run, S3Server, Target};

const MIB: u64 = 1 << 20;
/// The budget, and what a process has besides: code, runtime, TLS, connections, allocator slack.
const BUDGET_MIB: u64 = 256;
const LIMIT: u64 = 400 * MIB;
/// A sample costs tens of microseconds; buffers live much longer than this.
const SAMPLE_PERIOD: Duration = Duration::from_millis(2);

/// Runs a command to its end. Its greatest anonymous memory in bytes: everything that it allocated, pinned buffers too, since those are registered memory of its own.
/// The target's GPU memory, which the emulated driver maps into it, is shared memory and does not count.
fn peak_of(cli: &Ckptstream, args: &str) -> (Run, u64) {
    let mut running = cli.spawn(args);
    let status = format!("/proc/{}/status", running.0.pid());
    let mut peak = 0;
    while !running.0.has_ended() {
        // Gone between the question and the look.
        if let Some(bytes) = std::fs::read_to_string(&status).ok().and_then(rss_anon) {
            peak = peak.max(bytes);
        }
        std::thread::sleep(SAMPLE_PERIOD);
    }
    (running.wait(), peak)
}

fn rss_anon(status: String) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kib << 10)
}

#[test]
fn four_gib_under_a_budget_of_256_mib() {
    // On disk: the image would be memory too, though not ours.
    let dir = TempDir::new().expect("a temporary folder");
    let root = dir.path().to_str().expect("a path of text");
    let server = S3Server::start(&["--root", root]);
    let node = Node::new("memory=5GiB");
    // 64 requests of 16 MiB would take a GiB, were it not for the budget. A restore goes over the image twice, with its buffers anew.
    let cli = Ckptstream::new(&server, "job").on(&node).config(&format!(
        "pipeline.memory_budget = '{BUDGET_MIB}MiB'\nstore.parallelism = 64\nrestore.verify = 'all'\n"
    ));
    let args = "--bytes 4GiB --fill mixed --steps 0";
    let mut target = Target::start(&node, args);
    let before = target.next_digest();

    let check = |name: &str, (run, peak): (Run, u64)| {
        assert_eq!(run.code, 0, "{name}: {}", run.stderr);
        assert_eq!(run.report["bytes"]["raw"], 4_u64 << 30, "{name}");
        let planned = run.report["memory_planned"].as_u64().expect("a number");
        assert!(planned <= BUDGET_MIB * MIB, "{name} plans {planned} bytes");
        // All that is planned is allocated before it starts: a lower peak was not looked at in time.
        assert!(
            peak > planned / 2,
            "{name}: {peak} of {planned} planned bytes were seen"
        );
        assert!(
            peak < LIMIT,
            "{name} takes {} MiB, above {} MiB",
            peak / MIB,
            LIMIT / MIB
        );
    };
    let out = peak_of(&cli, &format!("checkpoint --pid {}", target.pid()));
    check("out", out);
    drop(target);
    let mut fresh = Target::start(&node, &format!("{args} --suspended"));
    let back = peak_of(&cli, &format!("restore --pid {} --into-fresh", fresh.pid()));
    check("back", back);
    assert_eq!(fresh.next_digest(), before);
}
