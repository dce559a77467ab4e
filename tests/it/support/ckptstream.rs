//! The real binary as a script runs it.

use std::process::{Command, Output};

use ckptstream::failpoint::VARIABLE;
use serde_json::Value;
use tempfile::TempDir;

use super::process::Process;
use super::s3_server::{BUCKET, ENVIRONMENT};
use super::{Node, S3Server};

/// How to call the binary: on which node, with which store, job and configuration file.
#[derive(Debug)]
pub(crate) struct Ckptstream {
    endpoint: Option<String>,
    store: String,
    job: String,
    node: Option<Node>,
    /// `POINT=ACTION`, or nothing.
    failpoint: Option<String>,
    /// Holds the configuration file.
    dir: TempDir,
}

/// What a command did.
#[derive(Debug)]
pub(crate) struct Run {
    /// Exit status; -1 after a signal.
    pub(crate) code: i32,
    /// The JSON object of `--json`.
    pub(crate) report: Value,
    /// Logs and the last word.
    pub(crate) stderr: String,
}

impl Ckptstream {
    /// For the job `job` in the bucket of `server`, without a node: for the commands that need no GPU.
    pub(crate) fn new(server: &S3Server, job: &str) -> Self {
        let dir = TempDir::new().expect("a temporary folder");
        let this = Self {
            endpoint: Some(server.endpoint.clone()),
            store: format!("s3://{BUCKET}/store"),
            job: job.to_owned(),
            node: None,
            failpoint: None,
            dir,
        };
        this.config("")
    }

    /// On this node.
    pub(crate) fn on(mut self, node: &Node) -> Self {
        self.node = Some(node.clone());
        self
    }

    /// With another store: of the same server, or a directory (`file://…`).
    pub(crate) fn in_store(mut self, url: &str) -> Self {
        if url.starts_with("file://") {
            self.endpoint = None;
        }
        self.store = url.to_owned();
        self
    }

    /// At this endpoint.
    pub(crate) fn at(mut self, endpoint: &str) -> Self {
        self.endpoint = Some(endpoint.to_owned());
        self
    }

    /// Dies there: `POINT=ACTION`.
    pub(crate) fn dying_at(mut self, failpoint: &str) -> Self {
        self.failpoint = Some(failpoint.to_owned());
        self
    }

    /// With this configuration file (TOML).
    pub(crate) fn config(self, text: &str) -> Self {
        std::fs::write(self.dir.path().join("config.toml"), text).expect("the configuration");
        self
    }

    /// The configuration file.
    pub(crate) fn config_text(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("config.toml")).expect("the configuration")
    }

    /// `ckptstream ARGS`, the arguments separated by blanks, in an environment that has nothing else.
    pub(crate) fn command(&self, args: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ckptstream"));
        command
            .args(args.split_whitespace())
            .args(["--job", &self.job, "--store", &self.store])
            .arg("--config")
            .arg(self.dir.path().join("config.toml"))
            .env_clear()
            .envs(ENVIRONMENT);
        if let Some(endpoint) = &self.endpoint {
            command.args(["--endpoint", endpoint]);
        }
        if let Some(node) = &self.node {
            node.apply(&mut command);
        }
        if let Some(failpoint) = &self.failpoint {
            command.env(VARIABLE, failpoint);
        }
        command
    }

    /// Runs `ckptstream ARGS` and keeps what it prints, byte for byte.
    pub(crate) fn output(&self, args: &str) -> Output {
        let output = self.command(args).output();
        output.expect("the binary starts")
    }

    /// Runs `ckptstream ARGS --json` to its end.
    pub(crate) fn run(&self, args: &str) -> Run {
        let output = self.output(&format!("{args} --json"));
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let code = output.status.code().unwrap_or(-1);
        Run::new(code, &String::from_utf8_lossy(&output.stdout), stderr)
    }

    /// Runs `ckptstream ARGS --json`, which must end with status 0. The JSON object.
    pub(crate) fn ok(&self, args: &str) -> Value {
        let run = self.run(args);
        assert_eq!(run.code, 0, "ckptstream {args}: {}", run.stderr);
        run.report
    }

    /// Starts `ckptstream ARGS --json` and does not wait.
    pub(crate) fn spawn(&self, args: &str) -> Spawned {
        Spawned(Process::start(&mut self.command(&format!("{args} --json"))))
    }

    /// The raw extent of a GPU (`GPU-…`), as `cat` prints it.
    pub(crate) fn cat(&self, gpu: &str) -> Vec<u8> {
        let output = self.output(&format!("cat --gpu {gpu}"));
        assert!(
            output.status.success(),
            "cat {gpu}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        output.stdout
    }
}

/// A command that is running; killed when dropped.
#[derive(Debug)]
pub(crate) struct Spawned(pub(crate) Process);

impl Spawned {
    /// Waits for its end.
    pub(crate) fn wait(mut self) -> Run {
        let mut stdout = String::new();
        while let Some(line) = self.0.next_line() {
            stdout.push_str(&line);
        }
        let (status, stderr) = self.0.wait();
        Run::new(status.code().unwrap_or(-1), &stdout, stderr)
    }
}

impl Run {
    pub(crate) fn new(code: i32, stdout: &str, stderr: String) -> Self {
        // Killed, it has said nothing.
        let report = if stdout.is_empty() {
            Value::Null
        } else {
            serde_json::from_str(stdout)
                .unwrap_or_else(|error| panic!("{error}: {stdout}\n{stderr}"))
        };
        Self {
            code,
            report,
            stderr,
        }
    }
}
