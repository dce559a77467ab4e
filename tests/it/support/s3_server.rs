//! The S3 server of `testkit`, as a child process on a free port.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use ckptstream::config::{StoreConfig, StorePlace};
use ckptstream::store::StoreError;
use ckptstream::store::s3::S3Store;
use tempfile::TempDir;

/// The bucket that every server has.
pub(crate) const BUCKET: &str = "images";

/// What a client of the server needs in its environment.
pub(crate) const ENVIRONMENT: [(&str, &str); 6] = [
    ("AWS_ACCESS_KEY_ID", "test"),
    ("AWS_SECRET_ACCESS_KEY", "testtest"),
    ("AWS_REGION", "us-east-1"),
    ("AWS_EC2_METADATA_DISABLED", "true"),
    ("AWS_CONFIG_FILE", "/dev/null"),
    ("AWS_SHARED_CREDENTIALS_FILE", "/dev/null"),
];

/// A client of this store's.
pub(crate) async fn connect(config: &StoreConfig) -> Result<S3Store, StoreError> {
    let StorePlace::Bucket { bucket, prefix } = &config.place else {
        panic!("not a bucket: {config:?}");
    };
    S3Store::connect(config, bucket, prefix).await
}

/// A running server; dropping it ends it.
#[derive(Debug)]
pub(crate) struct S3Server {
    child: Child,
    /// `http://127.0.0.1:PORT`.
    pub(crate) endpoint: String,
    /// One JSON line per request that was answered.
    pub(crate) log: PathBuf,
    /// The rules in force, see [`S3Server::set_rules`].
    pub(crate) rules: PathBuf,
    dir: TempDir,
}

impl S3Server {
    /// Starts `testkit s3` with an empty [`BUCKET`], no rules, and these further arguments.
    pub(crate) fn start(extra_args: &[&str]) -> Self {
        let dir = TempDir::new().expect("a temporary folder");
        let log = dir.path().join("requests.jsonl");
        let rules = dir.path().join("rules.json");
        std::fs::write(&rules, "[]").expect("the rules file");
        let mut command = Command::new(testkit());
        command
            .args(["s3", "--addr", "127.0.0.1:0", "--bucket", BUCKET])
            .arg("--rules")
            .arg(&rules)
            .arg("--log")
            .arg(&log)
            .args(extra_args)
            .envs(ENVIRONMENT);
        let (child, endpoint) = serve(&mut command);
        Self {
            child,
            endpoint,
            log,
            rules,
            dir,
        }
    }
    /// Puts rules in force from the next request on, counted anew.
    pub(crate) fn set_rules(&self, rules: &serde_json::Value) {
        // A new file under the same name: the server never sees half of one.
        let new = self.dir.path().join("rules.new");
        std::fs::write(&new, rules.to_string()).expect("the rules file");
        std::fs::rename(&new, &self.rules).expect("the rules file");
    }

    /// Takes all requests so far off the log.
    pub(crate) fn forget_requests(&self) {
        std::fs::write(&self.log, "").expect("the request log");
    }

    /// The requests of an operation (an S3 verb) that were answered so far, in the order of their ends.
    pub(crate) fn requests(&self, operation: &str) -> Vec<serde_json::Value> {
        let mut lines = self.all_requests();
        lines.retain(|line| line["op"] == operation);
        lines
    }

    /// All requests that were answered so far, in the order of their ends.
    pub(crate) fn all_requests(&self) -> Vec<serde_json::Value> {
        super::json_lines(&self.log)
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        // Both fail only when the child is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a server of `testkit`; gives it, when it is ready, with its `http://127.0.0.1:PORT`.
pub(crate) fn serve(command: &mut Command) -> (Child, String) {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| {
            panic!(
                "cannot start {command:?}: {error}; build it with `cargo build -p testkit`, or set TESTKIT_BIN"
            )
        });
    let mut line = String::new();
    let stdout = child.stdout.take().expect("piped");
    BufReader::new(stdout)
        .read_line(&mut line)
        .expect("the server's first line");
    let endpoint = line.trim().strip_prefix("listening ").map(str::to_owned);
    let endpoint = endpoint.unwrap_or_else(|| panic!("{command:?} said {line:?}"));
    (child, endpoint)
}

/// `TESTKIT_BIN`, else the program that lies beside the folder of this test's own.
pub(crate) fn testkit() -> PathBuf {
    std::env::var_os("TESTKIT_BIN")
        .map(PathBuf::from)
        .unwrap_or_else(|| {
            let this = std::env::current_exe().expect("this program's path");
            let profile = this
                .parent()
                .and_then(|deps| deps.parent())
                .expect("target/<profile>/deps");
            profile.join("testkit")
        })
}

/// Set in a test that runs as a child of itself.
const CHILD: &str = "CKPTSTREAM_TEST_CHILD";

/// Runs the body of the test `name` with [`ENVIRONMENT`] set; see [`in_environment`].
pub(crate) fn has_credentials(name: &str) -> bool {
    in_environment(name, &ENVIRONMENT)
}

/// Runs the body of the test `name` in a process whose `AWS_*` variables are these and no others. The store takes credentials only from the SDK's chain,
/// and a process with threads cannot change its own environment: outside of it, this runs the very test again as a child, and returns `false`.
pub(crate) fn in_environment(name: &str, environment: &[(&str, &str)]) -> bool {
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let this = std::env::current_exe().expect("this program's path");
    let mut child = Command::new(this);
    for (key, _) in std::env::vars_os() {
        if key.to_string_lossy().starts_with("AWS_") {
            child.env_remove(key);
        }
    }
    let output = child
        .args(["--exact", name, "--include-ignored"])
        .envs(environment.iter().copied())
        .env(CHILD, "1")
        .output()
        .expect("this program runs");
    let (stdout, stderr) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        output.status.success(),
        "{name} failed in the child:\n{stdout}\n{stderr}"
    );
    assert!(
        stdout.contains("1 passed"),
        "{name} did not run in the child:\n{stdout}"
    );
    false
}
