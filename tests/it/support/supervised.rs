//! A job under `run` or `watch`, and how it is started again.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use ckptstream::supervise::{Answer, Question, Report, Verdict, ask};
use serde_json::json;

use super::process::{PATIENCE, Process};
use super::s3_server::testkit;
use super::scene::{Saver, Scene};

/// The status that a scheduler takes as a wish to start the job again.
pub(crate) const REQUEUE: i32 = 75;

/// A job under `run` or `watch`, and what it printed.
#[derive(Debug)]
pub(crate) struct Supervised {
    pub(crate) process: Process,
    said: Vec<String>,
    pub(crate) job_pid: Option<u32>,
    /// Holds the configuration.
    saver: Saver,
}

/// What a supervision has ended with.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) said: Vec<String>,
    pub(crate) stderr: String,
}

impl Supervised {
    pub(crate) fn start((saver, mut command): (Saver, Command)) -> Self {
        Self {
            process: Process::start(&mut command),
            said: Vec::new(),
            job_pid: None,
            saver,
        }
    }

    /// The next line of the job; `None` at the end.
    fn next_line(&mut self) -> Option<String> {
        let line = self.process.next_line()?;
        self.note(&line);
        Some(line)
    }

    fn note(&mut self, line: &str) {
        if let Some((_, pid)) = line.split_once(" pid ") {
            self.job_pid = pid.trim().parse().ok();
        }
        self.said.push(line.to_owned());
    }

    /// How often it has called the driver so.
    pub(crate) fn calls(&self, function: &str) -> usize {
        self.saver.calls(function)
    }

    pub(crate) fn end_the_job(&self) {
        if let Some(pid) = self.job_pid {
            let kill = format!("kill -9 {pid} 2>/dev/null");
            let _ = Command::new("sh").args(["-c", &kill]).status();
        }
    }

    pub(crate) fn wait_for(&mut self, start: &str) -> String {
        while let Some(line) = self.next_line() {
            if line.starts_with(start) {
                return line;
            }
        }
        panic!(
            "no line `{start}…`: {:?} {}",
            self.said,
            self.process.wait().1
        );
    }

    pub(crate) fn ends(mut self) -> Ended {
        let started = Instant::now();
        while !self.process.has_ended() {
            assert!(started.elapsed() < PATIENCE, "{:?}", self.said);
            std::thread::sleep(Duration::from_millis(2));
            while let Some(line) = self.process.ready_line() {
                self.note(&line);
            }
        }
        // Where it was not ended, the job has our pipes.
        self.end_the_job();
        while self.next_line().is_some() {}
        let (status, stderr) = self.process.wait();
        Ended {
            code: status.code().unwrap_or(-1),
            said: std::mem::take(&mut self.said),
            stderr,
        }
    }
}

impl Drop for Supervised {
    fn drop(&mut self) {
        if !self.process.has_ended() {
            self.process.kill();
        }
        // It outlives whoever watches over it. A test that did not listen does not know its pid yet.
        while let Some(line) = self.process.ready_line() {
            self.note(&line);
        }
        self.end_the_job();
    }
}

/// A job of so many steps, and how it is started again.
pub(crate) struct Job<'a> {
    scene: &'a Scene,
    args: String,
    config: String,
    /// Of its node.
    pub(crate) state: PathBuf,
}

impl<'a> Job<'a> {
    pub(crate) fn new(scene: &'a Scene, args: &str) -> Self {
        Self {
            scene,
            args: args.to_owned(),
            config: String::new(),
            state: scene.state_dir(),
        }
    }

    /// On another node.
    pub(crate) fn elsewhere(&self) -> Self {
        Self {
            scene: self.scene,
            args: self.args.clone(),
            config: self.config.clone(),
            state: self.state.with_extension("elsewhere"),
        }
    }

    /// More lines of the configuration, behind `[job]`'s.
    pub(crate) fn with(self, config: &str) -> Self {
        Self {
            config: config.to_owned(),
            ..self
        }
    }

    pub(crate) fn command(&self, driver: &str) -> (Saver, Command) {
        self.command_with(driver, true)
    }

    pub(crate) fn command_with(&self, driver: &str, can_be_restored: bool) -> (Saver, Command) {
        let testkit = testkit();
        let words = self.args.split_whitespace();
        let mut again = vec![testkit.display().to_string(), "target".to_owned()];
        again.extend(words.clone().map(str::to_owned));
        again.push("--suspended".to_owned());
        let state = &self.state;
        let restore = match can_be_restored {
            true => format!("restore_command = {}\n", json!(again)),
            false => String::new(),
        };
        let config = format!(
            "[spill]\non_failure = \"abandon\"\n[job]\nstate_dir = \"{}\"\n{restore}{}",
            state.display(),
            self.config
        );
        let saver = self.scene.saver_with("job", driver, &config);
        let mut command = saver.cli.command("run");
        command.arg("--").arg(testkit).arg("target").args(words);
        (saver, command)
    }

    pub(crate) fn start(&self) -> Supervised {
        Supervised::start(self.command(""))
    }

    /// The same with a store that is asked again for as long as a test wants to hold it up.
    pub(crate) fn start_patiently(&self) -> Supervised {
        let (saver, command) = self.command("");
        Supervised::start((saver.patient(), command))
    }
}

/// Where the supervision on the scene's node listens.
pub(crate) fn socket(scene: &Scene) -> PathBuf {
    scene.state_dir().join("job.sock")
}

/// Asks it as soon as it listens.
fn asked(scene: &Scene, question: &Question) -> Answer {
    let started = Instant::now();
    loop {
        match ask(&socket(scene), question) {
            Ok(answer) => return answer,
            Err(error) => assert!(started.elapsed() < PATIENCE, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until the supervision on the scene's node tells this of itself.
pub(crate) fn until_status(scene: &Scene, is_so: impl Fn(&Report) -> bool) {
    let path = socket(scene);
    let started = Instant::now();
    loop {
        let answer = ask(&path, &Question::Status);
        if matches!(&answer, Ok(Answer::Status(report)) if is_so(report)) {
            return;
        }
        assert!(started.elapsed() < PATIENCE, "{answer:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What it is doing.
pub(crate) fn status(scene: &Scene) -> Report {
    match asked(scene, &Question::Status) {
        Answer::Status(report) => *report,
        other => panic!("{other:?}"),
    }
}

/// Brings a notice, and waits for the verdict.
pub(crate) fn notified(scene: &Scene, left_seconds: Option<f64>) -> Verdict {
    match asked(scene, &Question::Notify { left_seconds }) {
        Answer::Verdict(verdict) => verdict,
        other => panic!("{other:?}"),
    }
}
