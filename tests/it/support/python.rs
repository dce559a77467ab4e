//! A stock S3 client and a stock zstd, in Python: other people's eyes on our objects.

use std::ffi::OsString;
use std::process::Command;

use super::S3Server;
use super::s3_server::{BUCKET, ENVIRONMENT};

/// Opens the script: `s3` is boto3's client of the server, `bucket` the bucket.
const PREAMBLE: &str = "
import os, sys, json, boto3
from botocore.config import Config
s3 = boto3.client('s3', endpoint_url=os.environ['ENDPOINT'], config=Config(s3={'addressing_style': 'path'}, retries={'max_attempts': 1}))
bucket = os.environ['BUCKET']
";

/// The Python that has boto3 and zstandard.
pub(crate) fn interpreter() -> OsString {
    std::env::var_os("TEST_PYTHON")
        .expect("TEST_PYTHON is not set: run scripts/test.sh, which makes a Python with boto3 and zstandard")
}

/// Runs a script (`s3` and `bucket` are there already) with arguments `sys.argv[1:]`; returns what it printed.
pub(crate) fn run(server: &S3Server, script: &str, args: &[&str]) -> Vec<u8> {
    let output = Command::new(interpreter())
        .arg("-c")
        .arg(format!("{PREAMBLE}{script}"))
        .args(args)
        .envs(ENVIRONMENT)
        .env("ENDPOINT", &server.endpoint)
        .env("BUCKET", BUCKET)
        .env("NO_PROXY", "127.0.0.1")
        .output()
        .expect("TEST_PYTHON runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    output.stdout
}

/// The bytes of an object.
pub(crate) fn object(server: &S3Server, key: &str) -> Vec<u8> {
    let script =
        "sys.stdout.buffer.write(s3.get_object(Bucket=bucket, Key=sys.argv[1])['Body'].read())";
    run(server, script, &[key])
}
