//! A server per test, and a client for it.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::{
    BehaviorVersion, Credentials, Region, RequestChecksumCalculation, ResponseChecksumValidation,
    StalledStreamProtectionConfig,
};
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use serde_json::Value;
use tempfile::TempDir;

pub(crate) const BUCKET: &str = "bucket";
pub(crate) const MIB: usize = 1 << 20;

/// A running server; dropping it kills it.
pub(crate) struct Server {
    child: Child,
    pub(crate) endpoint: String,
    dir: TempDir,
}

impl Server {
    /// Starts a server with one bucket, a log and an empty list of rules.
    pub(crate) fn start(args: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().expect("temporary folder"), args)
    }

    pub(crate) fn start_in(dir: TempDir, args: &[&str]) -> Self {
        std::fs::write(dir.path().join("rules.json"), "[]").expect("rules");
        let mut child = Command::new(env!("CARGO_BIN_EXE_testkit"))
            .args(["s3", "--addr", "127.0.0.1:0", "--bucket", BUCKET])
            .arg("--rules")
            .arg(dir.path().join("rules.json"))
            .arg("--log")
            .arg(dir.path().join("log.jsonl"))
            .args(args)
            .env_remove("AWS_ACCESS_KEY_ID")
            .env_remove("AWS_SECRET_ACCESS_KEY")
            .stdout(Stdio::piped())
            .spawn()
            .expect("the server starts");
        let mut ready = String::new();
        BufReader::new(child.stdout.take().expect("stdout"))
            .read_line(&mut ready)
            .expect("ready line");
        let endpoint = ready
            .trim()
            .strip_prefix("listening ")
            .expect("ready line")
            .to_owned();
        Self {
            child,
            endpoint,
            dir,
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Puts rules in force.
    pub(crate) fn rules(&self, rules: &Value) {
        let new = self.path("rules.new");
        std::fs::write(&new, rules.to_string()).expect("rules");
        std::fs::rename(new, self.path("rules.json")).expect("rules");
    }

    /// The log so far.
    pub(crate) fn log(&self) -> Vec<Value> {
        read_log(&self.path("log.jsonl"))
    }

    /// SIGKILL; what is left on disk stays.
    pub(crate) fn kill(mut self) -> TempDir {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
        std::mem::replace(
            &mut self.dir,
            tempfile::tempdir().expect("temporary folder"),
        )
    }

    /// SIGTERM; true when the server then ends with status 0.
    pub(crate) fn terminate(mut self) -> bool {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("signal");
        self.child.wait().expect("wait").success()
    }

    pub(crate) fn client(&self) -> Client {
        self.client_with("testtest")
    }

    pub(crate) fn client_with(&self, secret: &str) -> Client {
        let config = aws_sdk_s3::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::from_static("us-east-1"))
            .credentials_provider(Credentials::new("test", secret, None, None, "test"))
            .endpoint_url(&self.endpoint)
            .force_path_style(true)
            .retry_config(RetryConfig::disabled())
            .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
            .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
            .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
            .http_client(aws_smithy_http_client::Builder::new().build_http())
            .build();
        Client::from_conf(config)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Already dead in the tests that end it themselves.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_log(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).expect("log");
    text.lines()
        .map(|line| serde_json::from_str(line).expect("a JSON object per line"))
        .collect()
}

/// Bytes that differ from place to place.
pub(crate) fn data(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        })
        .collect()
}

/// CRC64NVME in base64, as in the header.
pub(crate) fn crc64(data: &[u8]) -> String {
    let value = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, data);
    base64_simd::STANDARD.encode_to_string(value.to_be_bytes())
}

/// Status and code of a refusal.
pub(crate) fn refusal<T: std::fmt::Debug, E>(
    result: Result<T, SdkError<E, aws_sdk_s3::config::http::HttpResponse>>,
) -> (u16, String)
where
    E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
{
    let error = result.expect_err("a refusal");
    let status = error.raw_response().map_or(0, |raw| raw.status().as_u16());
    (status, error.code().unwrap_or("").to_owned())
}
