//! What ckptstream is tested with, in one binary.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod target;

#[derive(Parser)]
#[command(name = "testkit", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run an emulated training job whose whole state lives in GPU memory
    Target(target::Args),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Target(args) => target::run(&args),
    }
}
