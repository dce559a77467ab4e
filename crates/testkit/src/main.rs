//! What ckptstream is tested with, in one binary: `testkit s3` serves S3 and `testkit metadata` what clouds tell their machines, both with scripted faults; `testkit proxy` and `testkit tls` stand on the way there; `testkit target` is a training job.
//!
//! In: a command line. Out: a ready line on standard output, then the subcommand's own work until it is told to stop.
//! The binary never links libcuda; only `testkit target` looks for it, at run time.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod log;
mod metadata;
mod proxy;
mod rule;
mod s3;
mod script;
mod server;
mod target;
mod tls;
mod units;

#[derive(Parser)]
#[command(name = "testkit", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve S3 on a local address, with scripted faults and a request log
    S3(s3::Args),
    /// Serve the metadata of EC2, Compute Engine and Azure on a local address, with scripted faults and a request log
    Metadata(metadata::Args),
    /// Tunnel connections (CONNECT) as a proxy on a local address, or refuse or hang, with a request log
    Proxy(proxy::Args),
    /// Speak TLS on a local address before a server that does not, with a certificate of an authority of its own
    Tls(tls::Args),
    /// Run an emulated training job whose whole state lives in GPU memory
    Target(target::Args),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::S3(args) => s3::run(args),
        Command::Metadata(args) => metadata::run(args),
        Command::Proxy(args) => proxy::run(args),
        Command::Tls(args) => tls::run(args),
        Command::Target(args) => target::run(&args),
    }
}
