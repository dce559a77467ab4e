//! A child process whose output is read while it runs.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longer than anything here takes, on the slowest machine: only a test that hangs meets it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// A running child; killed when dropped.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    lines: Receiver<String>,
    stderr: Option<JoinHandle<String>>,
}

impl Process {
    /// Starts it, stdin closed, stdout read line by line, stderr kept.
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let stdout = child.stdout.take().expect("piped");
        let stderr = child.stderr.take().expect("piped");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { break };
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let stderr = std::thread::spawn(move || text_of(stderr));
        Self {
            child,
            lines,
            stderr: Some(stderr),
        }
    }

    /// Its pid.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line of stdout; `None` at its end.
    pub(crate) fn next_line(&mut self) -> Option<String> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("no line from {} in {PATIENCE:?}", self.pid()),
        }
    }

    /// A line of stdout that is there already.
    pub(crate) fn ready_line(&mut self) -> Option<String> {
        self.lines.try_recv().ok()
    }

    /// Sends a signal, by the name that the shell's `kill` knows.
    pub(crate) fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.pid());
        let status = Command::new("sh").args(["-c", &kill]).status();
        assert!(status.expect("a shell").success(), "{kill}");
    }

    /// Whether it has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("our child").is_some()
    }

    /// SIGKILL, and waits for the end.
    pub(crate) fn kill(&mut self) {
        // Both fail only when the child is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for its end. The status, and all of stderr.
    pub(crate) fn wait(&mut self) -> (ExitStatus, String) {
        let started = Instant::now();
        while !self.has_ended() {
            assert!(
                started.elapsed() < PATIENCE,
                "process {} does not end",
                self.pid()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
        let stderr = self
            .stderr
            .take()
            .map(|reader| reader.join().expect("reads"));
        (
            self.child.wait().expect("our child"),
            stderr.unwrap_or_default(),
        )
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn text_of(mut pipe: ChildStderr) -> String {
    let mut bytes = Vec::new();
    // Killed in the middle of a line: what there is is what it said.
    let _ = pipe.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}
