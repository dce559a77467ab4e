//! What stands on the way to a store: a proxy and a TLS front of `testkit`, as child processes on free ports.

use std::path::PathBuf;
use std::process::{Child, Command};

use serde_json::Value;
use tempfile::TempDir;

use super::S3Server;
use super::s3_server::{serve, testkit};

/// A proxy that tunnels; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Proxy {
    child: Child,
    /// `http://127.0.0.1:PORT`.
    pub(crate) url: String,
    dir: TempDir,
}

impl Proxy {
    /// Starts `testkit proxy` with these further arguments.
    pub(crate) fn start(extra_args: &[&str]) -> Self {
        let dir = TempDir::new().expect("a temporary folder");
        let mut command = Command::new(testkit());
        command.args(["proxy", "--addr", "127.0.0.1:0"]);
        command.arg("--log").arg(dir.path().join("requests.jsonl"));
        let (child, url) = serve(command.args(extra_args));
        Self { child, url, dir }
    }

    /// All that it was asked for so far: `METHOD TARGET STATUS`.
    pub(crate) fn requests(&self) -> Vec<String> {
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let lines = super::json_lines(&self.dir.path().join("requests.jsonl"));
        lines
            .iter()
            .map(|line| {
                format!(
                    "{} {} {}",
                    word(&line["method"]),
                    word(&line["target"]),
                    line["status"]
                )
            })
            .collect()
    }
}

/// TLS before a server; dropping it ends it.
#[derive(Debug)]
pub(crate) struct TlsFront {
    child: Child,
    /// `https://localhost:PORT`.
    pub(crate) endpoint: String,
    dir: TempDir,
}

impl TlsFront {
    /// Starts `testkit tls` before this server.
    pub(crate) fn before(server: &S3Server) -> Self {
        let dir = TempDir::new().expect("a temporary folder");
        let mut command = Command::new(testkit());
        command.args(["tls", "--addr", "127.0.0.1:0", "--to"]);
        command.arg(server.endpoint.trim_start_matches("http://"));
        command.arg("--ca").arg(dir.path().join("ca.pem"));
        let (child, endpoint) = serve(&mut command);
        Self {
            child,
            endpoint,
            dir,
        }
    }

    /// The certificate of its authority.
    pub(crate) fn ca(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }
}

fn end(child: &mut Child) {
    // Both fail only when the child is gone already.
    let _ = child.kill();
    let _ = child.wait();
}

impl Drop for Proxy {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

impl Drop for TlsFront {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}
