//! `testkit target`: the emulated training job that is saved.

use std::collections::BTreeMap;
use std::process::Command;

use super::Node;
use super::process::Process;
use super::s3_server::testkit;

/// A job on a node; killed when dropped.
#[derive(Debug)]
pub(crate) struct Target {
    process: Process,
    said: Vec<String>,
}

impl Target {
    /// Starts `testkit target ARGS` (separated by blanks) and waits until it says `ready` or `suspended`.
    pub(crate) fn start(node: &Node, args: &str) -> Self {
        let mut command = Command::new(testkit());
        command
            .arg("target")
            .args(args.split_whitespace())
            .env_clear();
        node.apply(&mut command);
        let mut target = Self {
            process: Process::start(&mut command),
            said: Vec::new(),
        };
        let Some(line) = target.next_line() else {
            panic!("testkit target {args} failed: {}", target.process.wait().1);
        };
        let (ready, suspended) = (
            format!("ready pid {}", target.pid()),
            format!("suspended pid {}", target.pid()),
        );
        assert!(line == ready || line == suspended, "{line}");
        target
    }

    /// Holds what the processes of one job printed between them against the same job in one process that nobody disturbs: no step may be missing or have
    /// another digest. The job has no end (no `--steps`), so that no test depends on how fast anything is.
    pub(crate) fn check_undisturbed(
        node: &Node,
        args: &str,
        seen: impl IntoIterator<Item = String>,
    ) {
        let seen: BTreeMap<u64, String> = seen.into_iter().map(|line| (step_of(&line), line)).fold(
            BTreeMap::new(),
            |mut seen, (step, line)| {
                let first = seen.entry(step).or_insert_with(|| line.clone());
                assert_eq!(*first, line, "one step has two digests");
                seen
            },
        );
        let mut alone = Self::start(node, args);
        for (expected, (step, line)) in (0..).zip(seen) {
            assert_eq!(step, expected, "a step is missing");
            assert_eq!(alone.wait_for("step "), line, "the memory is another one");
        }
    }

    /// Its pid.
    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The next line that it prints; `None` when it has ended.
    pub(crate) fn next_line(&mut self) -> Option<String> {
        let line = self.process.next_line()?;
        self.said.push(line.clone());
        Some(line)
    }

    /// Reads on until a line that starts with `start`.
    pub(crate) fn wait_for(&mut self, start: &str) -> String {
        loop {
            let Some(line) = self.next_line() else {
                panic!(
                    "the target ended without a line `{start}…`: {:?}; {}",
                    self.said,
                    self.process.wait().1
                );
            };
            if line.starts_with(start) {
                return line;
            }
        }
    }

    /// Reads on until it has taken some more steps.
    pub(crate) fn wait_for_steps(&mut self, count: u64) {
        for _ in 0..count {
            self.wait_for("step ");
        }
    }

    /// The digest in the next line that has one.
    pub(crate) fn next_digest(&mut self) -> String {
        loop {
            let line = self.wait_for("");
            if let Some((_, digest)) = line.split_once(" digest ") {
                return digest.to_owned();
            }
        }
    }

    /// Sends a signal, by the name that the shell's `kill` knows.
    pub(crate) fn signal(&self, name: &str) {
        self.process.signal(name);
    }

    /// Whether it has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.process.has_ended()
    }

    /// SIGKILL. The digest lines that it printed up to then.
    pub(crate) fn kill(mut self) -> Vec<String> {
        self.process.kill();
        while let Some(line) = self.next_line() {
            drop(line);
        }
        self.digest_lines()
    }

    /// The digest lines so far.
    pub(crate) fn digest_lines(&mut self) -> Vec<String> {
        while let Some(line) = self.process.ready_line() {
            self.said.push(line);
        }
        let digests = self.said.iter().filter(|line| line.contains(" digest "));
        digests.cloned().collect()
    }
}

/// K of `step K digest D`.
pub(crate) fn step_of(line: &str) -> u64 {
    let number = line
        .strip_prefix("step ")
        .and_then(|rest| rest.split(' ').next());
    number
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("{line:?} names no step"))
}
