//! What every fault is tried on: a node with two GPUs, a store, and the looks at what a failed command has left behind.

use std::cell::Cell;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ckptstream::config::{Overrides, RawConfig, StoreConfig};
use ckptstream::store::s3::S3Store;
use ckptstream::store::{Key, PutOutcome, Store};
use serde_json::Value;
use tempfile::TempDir;

use super::process::PATIENCE;
use super::s3_server::{BUCKET, connect};
use super::{Ckptstream, Node, Run, S3Server, Target, json_lines};

/// The job on the node: 4 chunks per GPU, which compress to less than one part.
pub(crate) const TARGET: &str = "--gpus 2 --bytes 4MiB --fill mixed --seed 11 --step-ms 2";

/// Small, and impatient with a store that fails for good. More of `[store]` may follow.
const CONFIG: &str = "
[pipeline]
chunk_size = \"1MiB\"
memory_budget = \"64MiB\"
threads = 2
[store]
part_size = \"5MiB\"
parallelism = 4
connect_timeout = \"1s\"
request_timeout = \"1s\"
stall_timeout = \"1s\"
";

/// A node, a store, a folder for traces.
#[derive(Debug)]
pub(crate) struct Scene {
    pub(crate) server: S3Server,
    pub(crate) node: Node,
    dir: TempDir,
    traces: Cell<u32>,
}

/// A way to call the binary, whose driver calls are traced.
#[derive(Debug)]
pub(crate) struct Saver {
    pub(crate) cli: Ckptstream,
    trace: PathBuf,
}

impl Scene {
    /// A store that is started with these arguments, and a node of its own.
    pub(crate) fn new(server_args: &[&str]) -> Self {
        Self {
            server: S3Server::start(server_args),
            node: Node::new("gpus=2;memory=64MiB"),
            dir: TempDir::new().expect("a temporary folder"),
            traces: Cell::new(0),
        }
    }

    /// The binary for this job, with a trace, and with these further settings of its driver (a fault, mostly).
    pub(crate) fn saver(&self, job: &str, driver: &str) -> Saver {
        self.saver_with(job, driver, "")
    }

    /// The same with further lines in the configuration file, of which the first ones are of `[store]`.
    pub(crate) fn saver_with(&self, job: &str, driver: &str, config: &str) -> Saver {
        self.traces.set(self.traces.get() + 1);
        let trace = self.dir.path().join(format!("{}.jsonl", self.traces.get()));
        let node = self
            .node
            .with(&format!("trace={};{driver}", trace.display()));
        let patience = if config.contains("retry_timeout") {
            ""
        } else {
            "retry_timeout = \"1500ms\"\n"
        };
        // What a save ends with that is held for ever would never be seen.
        let end = if config.contains("[spill]") {
            ""
        } else {
            "\n[spill]\non_failure = \"abandon\"\n"
        };
        // A node has one place where it is written down what is under way; this one is the scene's.
        let state = if config.contains("state_dir") {
            String::new()
        } else {
            format!("\n[job]\nstate_dir = \"{}\"\n", self.state_dir().display())
        };
        let cli = Ckptstream::new(&self.server, job)
            .on(&node)
            .config(&format!("{CONFIG}{patience}{config}{end}{state}"));
        Saver { cli, trace }
    }

    /// Where this node keeps what is under way.
    pub(crate) fn state_dir(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    /// The store as the binary has it, for looking at and changing what is in it. Needs [`super::s3_server::has_credentials`].
    pub(crate) async fn store(&self) -> S3Store {
        let overrides = Overrides {
            store: Some(format!("s3://{BUCKET}/store")),
            endpoint: Some(self.server.endpoint.clone()),
            ..Overrides::default()
        };
        let config = StoreConfig::resolve(&overrides, &RawConfig::default());
        let store = connect(&config.expect("a store")).await;
        store.expect("a client")
    }

    /// Puts an entry of somebody else into a job's log.
    pub(crate) fn put_entry(&self, job: &str, slot: u64, entry: &Value) {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        runtime.block_on(async {
            let store = self.store().await;
            let key = Key::new(&format!("{job}/log/{slot:08}.json")).expect("a key");
            let put = store.put_if_absent(&key, entry.to_string().into()).await;
            assert_eq!(put.expect("the server runs"), PutOutcome::Created);
        });
    }

    /// The last entry of a job's log.
    pub(crate) fn last_entry(&self, job: &str) -> Value {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let key = format!("{job}/log/{:08}.json", self.log_len(job));
        let read = runtime.block_on(async {
            let store = self.store().await;
            store.get(&Key::new(&key).expect("a key"), 64 << 10).await
        });
        let bytes = read.expect("the server runs").expect("an entry");
        serde_json::from_slice(&bytes).expect("JSON")
    }

    /// Entries of a job's log, which has less than a hundred.
    pub(crate) fn log_len(&self, job: &str) -> u64 {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let listed = runtime.block_on(async {
            let store = self.store().await;
            store.list(&format!("{job}/log/")).await
        });
        listed.expect("the server runs").len() as u64
    }

    /// A running target.
    pub(crate) fn target(&self) -> Target {
        Target::start(&self.node, TARGET)
    }

    /// One that comes up suspended and waits for an image.
    pub(crate) fn fresh(&self) -> Target {
        Target::start(&self.node, &format!("{TARGET} --suspended"))
    }

    /// Saves a target under this job; what it printed up to the save.
    pub(crate) fn save(&self, job: &str) -> Vec<String> {
        let mut target = self.target();
        target.wait_for("step 2 ");
        self.saver(job, "")
            .cli
            .ok(&format!("checkpoint --pid {}", target.pid()));
        target.kill()
    }

    /// The state of a process that does not run, looked up by another ckptstream: it refuses to save one that is not running, and says what it is.
    pub(crate) fn state_of(&self, target: &Target) -> String {
        self.state_of_process(target.pid())
    }

    /// The same of one that is known by its pid.
    pub(crate) fn state_of_process(&self, pid: u32) -> String {
        // Of a process, not of its tree, whatever the driver is that it runs on.
        let host = "[host]\nsave = \"never\"\n";
        let probe = self.saver_with("probe", "api=13050", host).cli;
        let run = probe.run(&format!("checkpoint --pid {pid}"));
        assert_eq!(run.code, 4, "the target runs after all: {run:?}");
        let start = format!("process {pid} is ");
        let found = cause(&run)
            .strip_prefix(&start)
            .and_then(|rest| rest.split_once(", "))
            .map(|(state, _)| state.to_owned());
        found.unwrap_or_else(|| panic!("{run:?}"))
    }

    /// Images of a job, numbered from its oldest on, newest first, as the log has them.
    pub(crate) fn images(&self, job: &str) -> Vec<u64> {
        let count = self.generations(job).len() as u64;
        (1..=count).rev().collect()
    }

    /// Their generations, newest first.
    pub(crate) fn generations(&self, job: &str) -> Vec<u64> {
        let run = self.saver(job, "").cli.run("list");
        if run.code == 6 {
            return Vec::new();
        }
        assert_eq!(run.code, 0, "{run:?}");
        let images = run.report["images"].as_array().cloned();
        images
            .unwrap_or_default()
            .iter()
            .map(|image| image["generation"].as_u64().expect("a generation"))
            .collect()
    }

    /// What a save must leave behind that has not committed: nothing that counts, and the target told as it is.
    pub(crate) fn must_not_be_committed(&self, job: &str, saver: &Saver) {
        assert_eq!(self.images(job), [0_u64; 0], "an image that must not be");
        assert_eq!(
            saver.calls("cuCheckpointOperationComplete"),
            0,
            "Complete without an image"
        );
    }

    /// Whether the target goes on by itself: several steps more than it has done.
    pub(crate) fn must_compute_on(&self, target: &mut Target) {
        let _the_steps_so_far = target.digest_lines();
        // What stood in the pipe may be older than the lock; a locked target finishes one step at most.
        for _ in 0..4 {
            target.wait_for("step ");
        }
    }

    /// Ends the target; its digests must be those of one that nobody disturbed.
    pub(crate) fn must_have_computed_rightly(&self, target: Target) {
        self.must_be_the_steps_of_the_job(&target.kill());
    }

    /// These digest lines, from step 0 on, are those of a job that nobody disturbed.
    pub(crate) fn must_be_the_steps_of_the_job(&self, seen: &[String]) {
        self.must_be_the_steps_of(TARGET, seen);
    }

    /// The same of a job with these arguments.
    pub(crate) fn must_be_the_steps_of(&self, args: &str, seen: &[String]) {
        let elsewhere = Node::new("gpus=2;memory=64MiB");
        let mut undisturbed = Target::start(&elsewhere, args);
        for (step, seen) in seen.iter().enumerate() {
            assert_eq!(*seen, undisturbed.wait_for("step "), "step {step}");
        }
    }
}

impl Saver {
    /// With another configuration file.
    pub(crate) fn with_config(self, text: &str) -> Self {
        Self {
            cli: self.cli.config(text),
            trace: self.trace,
        }
    }

    /// Requests that fail are tried again for two minutes.
    pub(crate) fn patient(self) -> Self {
        let text = self.cli.config_text().replace("1500ms", "120s");
        self.with_config(&text)
    }

    /// The same, and a single one may take a minute: what is slow on purpose must not fail on a slow machine.
    pub(crate) fn unhurried(self) -> Self {
        let patient = self.patient();
        let text = patient.cli.config_text();
        let text = text.replace("_timeout = \"1s\"", "_timeout = \"60s\"");
        patient.with_config(&text)
    }

    /// How often the driver was called so.
    pub(crate) fn calls(&self, function: &str) -> usize {
        self.trace()
            .iter()
            .filter(|line| line["call"] == function)
            .count()
    }

    /// The driver's calls, in the order of their ends.
    pub(crate) fn trace(&self) -> Vec<Value> {
        json_lines(&self.trace)
    }
}

/// A command under way whose phases can be waited for; killed when dropped.
#[derive(Debug)]
pub(crate) struct Watched {
    child: Child,
    dir: TempDir,
}

impl Watched {
    /// Starts `ckptstream ARGS --json`.
    pub(crate) fn start(cli: &Ckptstream, args: &str) -> Self {
        let dir = TempDir::new().expect("a temporary folder");
        let file = |name: &str| File::create(dir.path().join(name)).expect("a file");
        let child = cli
            .command(&format!("{args} --json --progress plain"))
            .stdin(Stdio::null())
            .stdout(file("stdout"))
            .stderr(file("stderr"))
            .spawn();
        let child = child.expect("the binary starts");
        Self { child, dir }
    }

    /// Waits until it says this on stderr.
    pub(crate) fn until_said(&self, words: &str) {
        let started = Instant::now();
        while !self.text("stderr").contains(words) {
            let stderr = self.text("stderr");
            assert!(started.elapsed() < PATIENCE, "not said: {words}: {stderr}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until it says that it is in this phase.
    pub(crate) fn until_phase(&self, phase: &str) {
        let line = format!("s {phase}\n");
        let started = Instant::now();
        while !self.text("stderr").contains(&line) {
            let stderr = self.text("stderr");
            assert!(started.elapsed() < PATIENCE, "no phase {phase}: {stderr}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Sends a signal, by the name that the shell's `kill` knows.
    pub(crate) fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.child.id());
        let status = Command::new("sh").args(["-c", &kill]).status();
        assert!(status.expect("a shell").success(), "{kill}");
    }

    /// Waits for its end.
    pub(crate) fn wait(mut self) -> Run {
        until(|| self.child.try_wait().expect("our child").is_some());
        let status = self.child.wait().expect("our child");
        let stdout = self.text("stdout");
        Run {
            code: status.code().unwrap_or(-1),
            // Killed, it has said nothing.
            report: serde_json::from_str(&stdout).unwrap_or(Value::Null),
            stderr: self.text("stderr"),
        }
    }

    fn text(&self, name: &str) -> String {
        read(&self.dir.path().join(name))
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // Both fail only when the child is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).expect("a text file")
}

/// Waits for what must come.
pub(crate) fn until(mut is_there: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_there() {
        assert!(started.elapsed() < PATIENCE, "it does not come");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The chain of causes in one line.
pub(crate) fn cause(run: &Run) -> String {
    let causes = run.report["cause"].as_array().cloned().unwrap_or_default();
    let causes: Vec<&str> = causes.iter().filter_map(Value::as_str).collect();
    causes.join(": ")
}

/// The state that the report tells of its one target; none when it tells of no target.
pub(crate) fn told(run: &Run) -> Option<&str> {
    let targets = run.report["targets"].as_array()?;
    assert!(targets.len() <= 1, "{targets:?}");
    targets.first()?["state"].as_str()
}

/// Exit status, phase and cause, which must have all these parts.
pub(crate) fn assert_failed(what: &str, run: &Run, code: i32, phase: &str, parts: &[&str]) {
    assert_eq!(
        (
            run.code,
            run.report["exit_code"].as_i64(),
            &run.report["phase"]
        ),
        (code, Some(code.into()), &phase.into()),
        "{what}: {run:?}"
    );
    for part in parts {
        assert!(cause(run).contains(part), "{what}: no {part:?} in {run:?}");
    }
}
