//! A whole process tree to be saved: two processes that use GPUs, and a plain one.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::process::PATIENCE;
use super::s3_server::testkit;
use super::scene::{Saver, Scene};
use super::supervised::Supervised;
use super::{Ckptstream, Node, Run, Target, step_of};

/// The program, if there is one.
pub(crate) fn criu() -> Option<PathBuf> {
    let criu = std::env::var_os("TEST_CRIU").expect(
        "TEST_CRIU is not set: run scripts/test.sh, which installs CRIU and says where it is",
    );
    (criu != "none").then(|| criu.into())
}

/// How the GPUs' memory is saved.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Mode {
    /// Through the processes' own host memory, on a driver as NVIDIA's up to 13.3 are.
    Staged,
    /// Through custom storage.
    Streamed,
}

/// Two processes that use GPUs, one of which they share, and a plain one, which write to files; and what it takes to save them.
pub(crate) struct Tree {
    pub(crate) mode: Mode,
    pub(crate) scene: Scene,
    pub(crate) dir: TempDir,
    pub(crate) criu: PathBuf,
    pub(crate) jobs: &'static Jobs,
}

/// What the processes of a tree do.
pub(crate) struct Jobs {
    /// Arguments of `testkit target`.
    pub(crate) first: &'static str,
    pub(crate) second: &'static str,
    /// Shell, for the plain one: counts, a number a line.
    pub(crate) count: &'static str,
}

pub(crate) const JOBS: Jobs = Jobs {
    first: "--bytes 4MiB --seed 1 --step-ms 10",
    second: "--gpus 2 --bytes 2MiB --fill weights --seed 2 --step-ms 10",
    count: "i=0; while :; do i=$((i+1)); echo $i; sleep 0.02; done",
};

impl Tree {
    /// `None` where it cannot be tried.
    pub(crate) fn new(mode: Mode) -> Option<Self> {
        Self::of(mode, &JOBS)
    }

    pub(crate) fn of(mode: Mode, jobs: &'static Jobs) -> Option<Self> {
        let mut scene = Scene::new(&[]);
        if mode == Mode::Staged {
            scene.node = scene.node.with("api=13000");
        }
        let tree = Self {
            mode,
            scene,
            dir: TempDir::new().expect("a temporary folder"),
            criu: criu()?,
            jobs,
        };
        let Jobs {
            first,
            second,
            count,
        } = jobs;
        let testkit = testkit();
        let testkit = testkit.display();
        let (a, b, plain) = (tree.path("a"), tree.path("b"), tree.path("plain"));
        // The shell waits for the two that compute; the third has no end of its own.
        let script = format!(
            "#!/bin/sh\n{testkit} target {first} \"$@\" >>{a} &\nA=$!\n{testkit} target {second} \"$@\" >>{b} &\nB=$!\n( {count} ) >>{plain} &\nC=$!\nwait $A $B\nkill $C\necho done >>{end}\n",
            a = a.display(),
            b = b.display(),
            plain = plain.display(),
            end = tree.path("end").display(),
        );
        std::fs::write(tree.path("tree.sh"), script).expect("a script");
        Some(tree)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn lines(&self, name: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.path(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    pub(crate) fn steps(&self, name: &str) -> Vec<String> {
        let mut lines = self.lines(name);
        lines.retain(|line| line.starts_with("step ") && line.contains(" digest "));
        lines
    }

    /// The binary, with this of `[host]` besides.
    pub(crate) fn cli(&self, driver: &str, host: &str) -> Ckptstream {
        let save = match self.mode {
            Mode::Staged => "auto",
            Mode::Streamed => "always",
        };
        self.saver(driver, &format!("save = \"{save}\"\n{host}"))
            .cli
    }

    pub(crate) fn saver(&self, driver: &str, host: &str) -> Saver {
        self.saver_with(driver, "", host)
    }

    /// The same with lines of `[store]`.
    pub(crate) fn saver_with(&self, driver: &str, store: &str, host: &str) -> Saver {
        let state = self.scene.state_dir();
        let criu = match host.contains("criu = ") {
            true => String::new(),
            false => format!("criu = \"{}\"\n", self.criu.display()),
        };
        let config = format!(
            "{store}[spill]\non_failure = \"abandon\"\n[job]\nstate_dir = \"{}\"\n[host]\n{criu}{host}\n",
            state.display(),
        );
        self.scene.saver_with("job", driver, &config)
    }

    /// Under `run`, which takes whole images because nothing else would bring the job back.
    pub(crate) fn run(&self, args: &str) -> Supervised {
        let saver = self.saver("", "grown_files = \"truncate\"");
        let mut command = with_path(saver.cli.command("run"));
        command.arg("--").arg("sh").arg(self.path("tree.sh"));
        command.args(args.split_whitespace());
        Supervised::start((saver, command))
    }

    /// By itself, as the leader of a session.
    pub(crate) fn start(&self) -> Alone {
        let mut command = Command::new("setsid");
        command.arg("sh").arg(self.path("tree.sh")).env_clear();
        self.scene.node.apply(&mut command);
        let null = || std::process::Stdio::null();
        let mut command = with_path(command);
        command.stdin(null()).stdout(null()).stderr(null());
        Alone(command.spawn().expect("a shell"))
    }

    pub(crate) fn reached(&self, name: &str) -> u64 {
        self.steps(name).last().map_or(0, |line| step_of(line))
    }

    /// Waits until both have come so far.
    pub(crate) fn reaches(&self, step: u64) {
        self.reach([step; 2]);
    }

    pub(crate) fn reach(&self, steps: [u64; 2]) {
        let started = Instant::now();
        let are_there = || self.reached("a") >= steps[0] && self.reached("b") >= steps[1];
        while !(are_there() && self.lines("plain").len() > 2) {
            let so_far = (self.lines("a"), self.lines("b"));
            assert!(started.elapsed() < PATIENCE, "{steps:?}: {so_far:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Both compute on: several steps more than they have done.
    pub(crate) fn computes_on(&self) {
        self.reach(["a", "b"].map(|name| self.reached(name) + 5));
    }

    /// Nothing is missing, twice, or other than in a job that nobody disturbed.
    pub(crate) fn is_as_if_nothing_had_happened(&self, besides: &str) {
        for (name, args) in [("a", self.jobs.first), ("b", self.jobs.second)] {
            let seen = self.steps(name);
            let args = format!("{args} {besides}");
            let mut alone = Target::start(&Node::new("gpus=2;memory=64MiB"), &args);
            for (step, line) in seen.iter().enumerate() {
                assert_eq!(*line, alone.wait_for("step "), "{name}, step {step}");
            }
        }
        let counted = self.lines("plain");
        let expected: Vec<String> = (1..=counted.len()).map(|it| it.to_string()).collect();
        assert_eq!(counted, expected);
    }
}

/// util-linux and the shell's programs are found.
pub(crate) fn with_path(mut command: Command) -> Command {
    command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command
}

/// A tree of its own session, ended when dropped.
pub(crate) struct Alone(pub(crate) std::process::Child);

impl Alone {
    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        end_tree(self.0.id());
        let _status = self.0.wait();
    }
}

/// Ends a process and everything that came from it.
pub(crate) fn end_tree(pid: u32) {
    for pid in ckptstream::target::descendants(pid) {
        let kill = format!("kill -9 {pid} 2>/dev/null");
        let _ = Command::new("sh").args(["-c", &kill]).status();
    }
}

/// Runs a command of the binary to its end.
pub(crate) fn done(cli: &Ckptstream, args: &str) -> Run {
    let output = with_path(cli.command(&format!("{args} --json"))).output();
    let output = output.expect("the binary starts");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    Run::new(output.status.code().unwrap_or(-1), &stdout, stderr)
}

/// Ends process 1 of the namespace that a process is in.
pub(crate) fn end_namespace(pid: u64) {
    let namespace = std::fs::read_link(format!("/proc/{pid}/ns/pid")).expect("it runs");
    let mut pids = std::fs::read_dir("/proc").expect("proc").flatten();
    let init = pids.find(|entry| {
        let status = std::fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        let is_first = pids.is_some_and(|pids| pids.split_whitespace().last() == Some("1"));
        let its_own = std::fs::read_link(entry.path().join("ns/pid")).ok();
        is_first && its_own.as_ref() == Some(&namespace)
    });
    let init = init.expect("a process 1").file_name();
    let kill = format!("kill -9 {}", init.to_string_lossy());
    let _ = Command::new("sh").args(["-c", &kill]).status();
}

/// Whether any process has a file of this folder open.
pub(crate) fn is_alive(dir: &Path) -> bool {
    let pids = std::fs::read_dir("/proc").expect("proc").flatten();
    pids.into_iter().any(|entry| {
        let open = std::fs::read_dir(entry.path().join("fd"))
            .into_iter()
            .flatten();
        open.flatten().any(|fd| {
            let path = std::fs::read_link(fd.path()).unwrap_or_default();
            path.starts_with(dir) && entry.file_name() != *std::process::id().to_string()
        })
    })
}
