//! `testkit target`: an emulated training job, an ordinary CUDA process for ckptstream to save.
//!
//! In: a command line; memory and driver from whatever `libcuda.so.1` the loader finds, emulated or real. Out: lines on standard output that
//! say what the job has reached, each with a digest of all GPU memory. Any failure ends it with status 1 and one line on standard error.
//!
//! The process holds no open file and no runtime, so that CRIU can dump it, and nothing in host memory that a fresh process could not find
//! again in GPU memory or on the same command line (see [`job`]). It has no signal handler: SIGTERM ends it.

mod args;
mod cuda;
mod file;
mod fill;
mod job;
mod layout;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use thiserror::Error;

pub(crate) use args::Args;
use cuda::{Cuda, CudaError};
use job::Job;

/// Why a target ends before its work is done.
#[derive(Debug, Error)]
pub(crate) enum TargetError {
    #[error("{flag} has {len} entries for {gpu_count} GPUs")]
    ListTooLong {
        flag: &'static str,
        len: usize,
        gpu_count: usize,
    },
    #[error(
        "no GPU has the {needed} bytes that the state of a job takes ({bytes} in all): raise --bytes or use --steps 0"
    )]
    NoRoomForState { bytes: u64, needed: usize },
    #[error(
        "--fill file:… holds still: give --steps 0, or a kind of memory that can be computed on"
    )]
    FileIsComputedOn,
    #[error("--fill file:{path} cannot be read")]
    FillFile {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("GPU memory holds no job (its first word is {found:#018x})")]
    NoJob { found: u64 },
    #[error("the job in GPU memory uses {stored} GPUs, but --gpus says {given}")]
    OtherGpuCount { stored: u64, given: usize },
    #[error(
        "the job in GPU memory has {stored} bytes on GPU {gpu_index}, but --bytes says {given}"
    )]
    OtherSize {
        gpu_index: usize,
        stored: u64,
        given: u64,
    },
    #[error(
        "the job in GPU memory names fill kind {code} for GPU {gpu_index}, which does not exist"
    )]
    UnknownFill { gpu_index: usize, code: u64 },
    #[error(
        "block {block_index} of GPU {gpu_index} is at step {found}, but the job at step {done}: this memory is not of one moment"
    )]
    Torn {
        gpu_index: usize,
        block_index: u64,
        found: u64,
        done: u64,
    },
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("cannot write to standard output")]
    Output(#[from] std::io::Error),
}

/// Runs the target until its last step, or for ever.
pub(crate) fn run(args: &Args) -> ExitCode {
    if let Some(path) = args.exit_when.clone() {
        std::thread::spawn(move || exit_when(&path));
    }
    let Err(error) = live(args) else {
        return ExitCode::SUCCESS;
    };
    let mut line = format!("testkit target: {error}");
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        line.push_str(&format!(": {error}"));
        cause = error.source();
    }
    #[expect(
        clippy::print_stderr,
        reason = "the one line that a failed target owes its caller"
    )]
    {
        eprintln!("{line}");
    }
    ExitCode::FAILURE
}

/// The life of a target: allocate, fill (or be restored), compute.
fn live(args: &Args) -> Result<(), TargetError> {
    let plan = args.plan()?;
    let sizes: Vec<u64> = plan.gpus.iter().map(|gpu| gpu.bytes).collect();
    let cuda = Cuda::open(&sizes)?;
    let pid = std::process::id();

    let mut job = if args.suspended {
        cuda.suspend_this_process()?;
        say(format_args!("suspended pid {pid}"))?;
        let (mut job, progress) = Job::resume(cuda, plan)?;
        say(format_args!("resumed step {}", progress.step))?;
        if progress.is_between_steps && is_digest_due(&job, progress.step) {
            say(format_args!(
                "step {} digest {}",
                progress.step,
                job.digest()?
            ))?;
        }
        job
    } else {
        let (job, digest) = Job::fill(cuda, plan)?;
        say(format_args!("ready pid {pid}"))?;
        if let Some(digest) = digest {
            say(format_args!("step 0 digest {digest}"))?;
        }
        job
    };

    if job.is_held_only() {
        loop {
            std::thread::park();
        }
    }
    while let Some(step) = job.advance()? {
        if is_digest_due(&job, step) {
            say(format_args!("step {step} digest {}", job.digest()?))?;
        } else {
            say(format_args!("step {step}"))?;
        }
        std::thread::sleep(Duration::from_millis(job.plan().step_pause_ms));
    }
    say(format_args!("done digest {}", job.digest()?))
}

/// Waits for the file. No call of CUDA is made here, so that a process exits, too, whose calls are held up because it is locked.
fn exit_when(path: &Path) {
    loop {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let line = text.strip_suffix('\n');
        if let Some(status) = line.and_then(|line| line.parse::<u8>().ok()) {
            #[expect(
                clippy::exit,
                reason = "it is what host code of a CUDA process may do at any time"
            )]
            std::process::exit(status.into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn is_digest_due<M: job::DeviceMemory>(job: &Job<M>, step: u64) -> bool {
    let period = job.plan().digest_every;
    period > 0 && step.is_multiple_of(period)
}

/// One line to standard output, which passes it on at its end.
fn say(line: std::fmt::Arguments<'_>) -> Result<(), TargetError> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}
