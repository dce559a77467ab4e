//! `testkit target`: the emulated training job that is saved.

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

    /// The digest lines of the same job (`step K digest D`, `done digest D`) when nobody disturbs it.
    pub(crate) fn undisturbed(node: &Node, args: &str) -> Vec<String> {
        Self::start(node, args).finish()
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

    /// Waits until it has done its last step. The digest lines that it printed.
    pub(crate) fn finish(mut self) -> Vec<String> {
        while let Some(line) = self.next_line() {
            drop(line);
        }
        let (status, stderr) = self.process.wait();
        assert!(status.success(), "the target failed: {status} {stderr}");
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
