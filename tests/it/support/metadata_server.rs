//! The metadata server of `testkit`, as a child process on a free port.

use std::path::PathBuf;
use std::process::{Child, Command};

use serde_json::Value;
use tempfile::TempDir;

use super::s3_server::{serve, testkit};

/// A server of three clouds; dropping it ends it.
#[derive(Debug)]
pub(crate) struct MetadataServer {
    child: Child,
    /// `http://127.0.0.1:PORT`.
    pub(crate) endpoint: String,
    dir: TempDir,
}

impl MetadataServer {
    /// Starts `testkit metadata` with this script.
    pub(crate) fn start(script: &Value) -> Self {
        let dir = TempDir::new().expect("a temporary folder");
        std::fs::write(dir.path().join("rules.json"), script.to_string()).expect("the rules file");
        let (child, endpoint) = serve(&mut command(&dir, "127.0.0.1:0"));
        Self {
            child,
            endpoint,
            dir,
        }
    }

    /// Puts a script in force from the next request on, counted anew.
    pub(crate) fn set_script(&self, script: &Value) {
        // A new file under the same name: the server never sees half of one.
        let new = self.dir.path().join("rules.new");
        std::fs::write(&new, script.to_string()).expect("the rules file");
        std::fs::rename(&new, self.dir.path().join("rules.json")).expect("the rules file");
    }

    /// Ends it: connections are refused from now on.
    pub(crate) fn stop(&mut self) {
        // Both fail only when the child is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Starts it again after [`MetadataServer::stop`], on the same port.
    pub(crate) fn start_again(&mut self) {
        let addr = self.endpoint.trim_start_matches("http://").to_owned();
        (self.child, self.endpoint) = serve(&mut command(&self.dir, &addr));
    }

    /// All requests that were answered or given up so far, in the order of their ends.
    pub(crate) fn requests(&self) -> Vec<Value> {
        super::json_lines(&self.dir.path().join("requests.jsonl"))
    }
}

fn command(dir: &TempDir, addr: &str) -> Command {
    let path = |name: &str| -> PathBuf { dir.path().join(name) };
    let mut command = Command::new(testkit());
    command.args(["metadata", "--addr", addr]);
    command.arg("--rules").arg(path("rules.json"));
    command.arg("--log").arg(path("requests.jsonl"));
    command
}

impl Drop for MetadataServer {
    fn drop(&mut self) {
        self.stop();
    }
}
