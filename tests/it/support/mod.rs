//! What the tests start and stop.
//!
//! A [`Node`] is a machine with emulated GPUs, a [`Target`] a job on it, a [`Ckptstream`] the real binary on it with a job and a store of its own, an [`S3Server`] the store.
//! Each test has its own of all four, so that tests run at the same time. All processes end when their value is dropped.

pub(crate) mod ckptstream;
pub(crate) mod metadata_server;
pub(crate) mod node;
pub(crate) mod process;
pub(crate) mod python;
pub(crate) mod s3_server;
pub(crate) mod scene;
pub(crate) mod supervised;
pub(crate) mod target;
pub(crate) mod tree;
pub(crate) mod way;

pub(crate) use ckptstream::{Ckptstream, Run};
pub(crate) use metadata_server::MetadataServer;
pub(crate) use node::Node;
pub(crate) use s3_server::S3Server;
pub(crate) use target::{Target, step_of};
pub(crate) use way::{Proxy, TlsFront};

/// The XXH3-128 of bytes as 32 hex digits, as [`Target`] prints it of all its GPU memory, GPU after GPU.
pub(crate) fn digest(bytes: &[u8]) -> String {
    format!("{:032x}", twox_hash::XxHash3_128::oneshot(bytes))
}

/// The lines of a file of JSON lines; none when there is no such file yet.
pub(crate) fn json_lines(path: &std::path::Path) -> Vec<serde_json::Value> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => panic!("{}: {error}", path.display()),
    };
    let lines = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")));
    lines.collect()
}
