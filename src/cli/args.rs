//! What the user typed: no judgement, no files, no environment but the variables that clap reads.
//!
//! In: the command line. Out: [`Args`]. What can fail: a command or flag that does not exist, a value of the wrong form; clap says so and
//! names the nearest one.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{NonEmptyStringValueParser, PathBufValueParser, TypedValueParser};
use clap::{ArgAction, Args as ClapArgs, Parser, Subcommand, ValueEnum};

use super::bench::BenchArgs;
use super::timeline::TimelinePath;
use crate::config::Overrides;
use crate::driver::GpuUuid;
use crate::error::{ExitCode, Failure, Phase};
use crate::image::ImageRef;
use crate::ownership::WhileSaved;
use crate::supervise::{Ready, Sought};

const AFTER_HELP: &str = "\
Credentials come from the SDK's chain only: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, a web identity token, the instance's role. \
The result goes to stdout, progress and logs to stderr.

Exit codes: 0 done; 2 usage or configuration; 3 refused beforehand; 4 someone else's; 6 no image; 7 nothing to save; 10 nothing saved, the target \
runs on; 11 spilled, to be resumed; 12 to 15 failed after the checkpoint began; 20 restore refused; 21 restore failed. docs/exit-codes.md has the full table.";

/// The command line.
#[derive(Debug, Parser)]
#[command(name = "ckptstream", version, about, after_help = AFTER_HELP, max_term_width = 120, disable_help_subcommand = true)]
pub(super) struct Args {
    #[command(subcommand)]
    pub(super) command: Command,

    #[command(flatten)]
    pub(super) common: Common,
}

/// Flags of every command.
#[derive(Debug, ClapArgs)]
pub(super) struct Common {
    /// Configuration file (TOML); flags override it
    #[arg(
        long,
        value_name = "FILE",
        env = "CKPTSTREAM_CONFIG",
        global = true,
        help_heading = "Configuration"
    )]
    pub(super) config: Option<PathBuf>,

    /// Job that the images belong to: 1 to 128 of A-Z a-z 0-9 . _ - [file: job.name]
    #[arg(
        long,
        value_name = "NAME",
        global = true,
        help_heading = "Configuration"
    )]
    pub(super) job: Option<String>,

    /// Number of this start of the job, higher than that of every start before it; for stores without conditional creates [file: job.epoch]
    #[arg(
        long,
        value_name = "N",
        env = "CKPTSTREAM_EPOCH",
        global = true,
        allow_negative_numbers = true,
        help_heading = "Configuration"
    )]
    pub(super) epoch: Option<i64>,

    /// Where images are kept: s3://bucket/prefix or file:///directory [file: store.url]
    #[arg(long, value_name = "URL", global = true, help_heading = "Store")]
    pub(super) store: Option<String>,

    /// Endpoint of an S3-compatible store, such as http://127.0.0.1:9000 [file: store.endpoint; default: AWS]
    #[arg(long, value_name = "URL", global = true, help_heading = "Store")]
    pub(super) endpoint: Option<String>,

    /// Region of the bucket [file: store.region; default: the SDK's chain]
    #[arg(long, value_name = "REGION", global = true, help_heading = "Store")]
    pub(super) region: Option<String>,

    /// Print the result as one JSON object instead of a table
    #[arg(long, global = true, help_heading = "Output")]
    pub(super) json: bool,

    /// How progress is shown on stderr: auto is bars on a terminal, lines elsewhere
    #[arg(long, value_name = "HOW", value_enum, default_value_t = ProgressChoice::Auto, global = true, help_heading = "Output")]
    pub(super) progress: ProgressChoice,

    /// Least severe log messages to show on stderr
    #[arg(long, value_name = "LEVEL", value_enum, default_value_t = LogLevel::Warn, global = true, help_heading = "Output")]
    pub(super) log_level: LogLevel,

    /// Show more log messages: -v info, -vv debug, -vvv trace
    #[arg(short, action = ArgAction::Count, conflicts_with = "log_level", global = true, help_heading = "Output")]
    pub(super) verbose: u8,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Save a running CUDA process into the store; leaves it suspended with its GPUs released
    #[command(after_help = "\
Signals: before the driver's checkpoint call, the first SIGINT, SIGTERM or SIGHUP rolls the target back to running (exit 10). After it there is no \
way back: the save goes on to its end, and further signals change nothing but with --force-abandon. What becomes of the target when the store fails then is up to spill.on_failure: \
by default it is spilled where spill.path is set, and held until the store is back where it is not.")]
    Checkpoint(CheckpointArgs),
    /// Put an image back into a suspended process and let it run; without --pid, bring the whole tree of an image back that has one
    #[command(after_help = "\
Without --pid the image must be a whole one (`ckptstream inspect` says its kind): CRIU rebuilds its processes in a pid namespace of their own, with the pids that they had. It needs root. The tree runs on by itself when this command ends.")]
    Restore(RestoreArgs),
    /// Run a batch job: restore it if it has an image, watch for notices that the node goes away, save it then and end it
    #[command(after_help = "\
Exit codes: the job's own status when it ends by itself (128 and the signal's number when a signal ended it); job.requeue_exit_code (75) when it was saved and ended, so that the scheduler starts it again; \
200 and more are failures of ckptstream, 200 plus the codes of the other commands. docs/exit-codes.md has the full table.

Notices: by default SIGTERM, SIGUSR1 and `ckptstream notify`; preempt.sources has files and the metadata servers of AWS, Google and Azure, too. SIGINT, SIGQUIT, SIGUSR2 and SIGWINCH go to the job.")]
    Run(RunArgs),
    /// Watch over a process that runs already: save it when a notice says that the node goes away, and end it
    #[command(after_help = "\
With --cgroup and --command, the job is the one process found that came from no other one found; ckptstream and the processes that it came from never count. Where several are left (203), name one with --pid.

Exit codes as those of `run`; 0 when the process ends by itself, because only its parent knows its status; 207 when there is none, and --wait is over; job.requeue_exit_code (75) when a notice came before there was one.")]
    Watch(WatchArgs),
    /// Find out whether a save would work from here before it is needed: the store, this node, the target
    #[command(after_help = "\
Exit codes: 0 when a save would work, warnings or not; 3 when it would fail. It takes 20 s at most. The store is asked with the requests of a save, under a prefix of its own that is removed afterwards; \
a target is looked at and not touched.")]
    Preflight(PreflightArgs),
    /// All of `preflight`, and a real lock and unlock of the target, and a small image that goes to the store and back: for the start of a job
    #[command(after_help = "\
Exit codes: 0 when a save would work, warnings or not; 3 when it would fail: the target runs, looked up; 12 when the target could not be unlocked again, which `ckptstream recover` tries once more. \
It takes as long as `preflight`, at most driver.lock_timeout for the lock, and at most 20 s or so for the image, which no job's log names and which is removed afterwards.")]
    Drill(DrillArgs),
    /// Bring a notice to the `run` or `watch` of a job, and wait for the verdict: for a preStop hook, a Slurm prolog, a script
    #[command(after_help = "\
Exit codes: 0 when the job was saved; 5 when the save was refused because it does not fit; 7 when the job had ended; else those of `checkpoint`. 3 when nobody listens.")]
    Notify(NotifyArgs),
    /// Tell what the `run` or `watch` of a job is doing
    Status(SocketArgs),
    /// List the images of a job, or the jobs of the store when no job is named
    List,
    /// Show what an image consists of
    Inspect(ImageArgs),
    /// Read an image back and check every chunk; needs no GPU
    Verify(VerifyArgs),
    /// Print the raw bytes of one GPU's memory to stdout; needs no GPU
    Cat(CatArgs),
    /// Give up attempts that came to nothing, and remove the data of whatever was given up or dropped; needs no GPU
    #[command(after_help = "\
Without a job named (--job, job.name) it looks at every job of the store. An attempt is given up only when it is older than --older-than, by the store's own clock, and is no image; images are `prune`'s. \
What is removed from the log's point of view first cannot become an image any more.")]
    Gc(GcArgs),
    /// Drop old images: all but the newest valid ones, and the newest that was read back by `verify`; needs no GPU
    #[command(after_help = "\
An image is dropped in the job's log first. Its data is removed by a later `prune` or `gc`, once --grace is over and no restore reads it.")]
    Prune(PruneArgs),
    /// Finish saves that were spilled: copy them into the store and commit them; needs no GPU
    #[command(after_help = "\
Every sealed save of the job in spill.path is finished, and then removed from there. Running it again, or when nothing is sealed (exit 7), does no harm.")]
    Resume,
    /// Put in order what savers that died have left on this node: unlock targets, give attempts up, say what is to be done about the rest
    #[command(after_help = "\
Exit codes: 0 everything is in order; else the gravest of what is left: 3 when the driver, a journal or a spill cannot be read, 4, 11, 12, 14, 15, 20, 21 as for the other commands, 10 when the store could not be told. \
Nothing is restored, and nothing is ended without --end.")]
    Recover(RecoverArgs),
    /// Unlock a target if the saver that started this command dies
    #[command(hide = true)]
    Guard(GuardArgs),
    /// Be process 1 of the pid namespace of a tree
    #[command(hide = true)]
    Init(InitArgs),
    /// Measure what this node can do, without a target: every stage alone, the whole pipeline both ways, and whether a save fits a notice
    #[command(after_help = "\
GPU memory is taken as given with --size, and filled with data that compresses like the real kinds. The verdict is for GPUs that are full. \
A signal stops the bench; what it made in the store is removed first. docs/bench.md says what each row means.")]
    Bench(BenchArgs),
}

impl Command {
    /// The name as typed, for the report.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Command::Checkpoint(_) => "checkpoint",
            Command::Restore(_) => "restore",
            Command::Run(_) => "run",
            Command::Watch(_) => "watch",
            Command::Preflight(_) => "preflight",
            Command::Drill(_) => "drill",
            Command::Notify(_) => "notify",
            Command::Status(_) => "status",
            Command::List => "list",
            Command::Inspect(_) => "inspect",
            Command::Verify(_) => "verify",
            Command::Cat(_) => "cat",
            Command::Gc(_) => "gc",
            Command::Prune(_) => "prune",
            Command::Resume => "resume",
            Command::Recover(_) => "recover",
            Command::Guard(_) => "guard",
            Command::Init(_) => "init",
            Command::Bench(_) => "bench",
        }
    }

    /// What the first signal does, behind its name.
    pub(super) fn signal_effect(&self) -> &'static str {
        match self {
            Command::Checkpoint(_) => {
                "asks to stop; once the driver's checkpoint call has begun, the save goes on to its end"
            }
            Command::Restore(_) => {
                "asks to stop; once the driver was asked to restore, the restore goes on to its end"
            }
            Command::List
            | Command::Preflight(_)
            | Command::Drill(_)
            | Command::Notify(_)
            | Command::Status(_)
            | Command::Inspect(_)
            | Command::Verify(_)
            | Command::Cat(_)
            | Command::Gc(_)
            | Command::Prune(_)
            | Command::Resume
            | Command::Recover(_)
            | Command::Bench(_) => "stops the command",
            Command::Guard(_) => "changes nothing",
            Command::Init(_) => "is the tree's",
            Command::Run(_) | Command::Watch(_) => "is a notice, or the job's",
        }
    }
}

/// `checkpoint`
#[derive(Debug, ClapArgs)]
pub(super) struct CheckpointArgs {
    /// Process to save, in our pid namespace
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) pid: u32,

    /// What becomes of the process afterwards: resume brings it back from the image just stored
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = ThenChoice::Suspend)]
    pub(super) then: ThenChoice,

    #[command(flatten)]
    pub(super) while_saved: WhileSavedArgs,

    /// Let a second SIGINT or SIGTERM end the command after the driver's checkpoint call, too (exit 12): the target is lost then
    #[arg(long)]
    pub(super) force_abandon: bool,

    #[command(flatten)]
    pub(super) deadline: DeadlineArgs,

    #[command(flatten)]
    pub(super) timeline: TimelineArgs,
}

/// `--ready-fd`
#[derive(Debug, ClapArgs)]
pub(super) struct ReadyArgs {
    /// Write a newline to this open file, a pipe mostly, when the job runs, restored or started, and not before
    #[arg(long, value_name = "FD")]
    ready_fd: Option<u32>,
}

impl ReadyArgs {
    /// Who is to hear it.
    ///
    /// # Errors
    /// Exit 2 where nothing is open there.
    pub(super) fn open(&self) -> Result<Option<Ready>, Failure> {
        let Some(fd) = self.ready_fd else {
            return Ok(None);
        };
        Ready::open(fd).map(Some).map_err(|error| {
            let why = format!("file descriptor {fd} (--ready-fd) cannot be written to: {error}");
            Failure::new(ExitCode::Config, Phase::Config, why)
        })
    }
}

/// `run`
#[derive(Debug, ClapArgs)]
pub(super) struct RunArgs {
    #[command(flatten)]
    pub(super) ready: ReadyArgs,

    /// The job: a program and its arguments, behind --
    #[arg(required = true, last = true, value_name = "CMD")]
    pub(super) command: Vec<OsString>,
}

/// `watch`
#[derive(Debug, ClapArgs)]
pub(super) struct WatchArgs {
    #[command(flatten)]
    sought: SoughtArgs,

    #[command(flatten)]
    pub(super) ready: ReadyArgs,

    /// Time to wait for a process of --cgroup or --command that is still to come up, such as 10m
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = humantime::parse_duration, conflicts_with = "pid")]
    pub(super) wait: Duration,
}

/// Which process is watched: one of these.
#[derive(Debug, ClapArgs)]
#[group(required = true, multiple = false)]
struct SoughtArgs {
    /// Process to watch over, in our pid namespace
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: Option<u32>,

    /// The one process of a cgroup and of those below it: its path as in /proc/PID/cgroup, or its directory under /sys/fs/cgroup
    #[arg(long, value_name = "PATH", value_parser = PathBufValueParser::new().try_map(absolute))]
    cgroup: Option<PathBuf>,

    /// The one process whose executable, or any word of whose command line, is WORD or ends in /WORD: train.py is that of `python3 /app/train.py`
    #[arg(long, value_name = "WORD", value_parser = NonEmptyStringValueParser::new())]
    command: Option<String>,
}

impl WatchArgs {
    /// The job.
    pub(super) fn sought(&self) -> Sought {
        match &self.sought {
            SoughtArgs { pid: Some(pid), .. } => Sought::Pid(*pid),
            SoughtArgs {
                cgroup: Some(path), ..
            } => Sought::Cgroup(path.clone()),
            SoughtArgs {
                command: Some(word),
                ..
            } => Sought::Command(word.clone()),
            _ => unreachable!("clap wants one of them"),
        }
    }
}

fn absolute(path: PathBuf) -> Result<PathBuf, &'static str> {
    match path.is_absolute() {
        true => Ok(path),
        false => Err("expected a path that begins with /"),
    }
}

/// `notify`
#[derive(Debug, ClapArgs)]
pub(super) struct NotifyArgs {
    /// Time from now until the node is gone, such as 90s [file: preempt.notice]
    #[arg(long, value_name = "TIME")]
    pub(super) left: Option<String>,

    #[command(flatten)]
    pub(super) socket: SocketArgs,
}

/// `--socket`
#[derive(Debug, ClapArgs)]
pub(super) struct SocketArgs {
    /// Socket of the supervision [file: preempt.socket; default: JOB.sock in job.state_dir]
    #[arg(long, value_name = "PATH")]
    pub(super) socket: Option<String>,
}

/// `--no-wait`, `--take-over`
#[derive(Debug, Clone, Copy, ClapArgs)]
pub(super) struct WhileSavedArgs {
    /// Refuse (exit 4) while another writer is saving the job, instead of waiting for it
    #[arg(long, conflicts_with = "take_over")]
    pub(super) no_wait: bool,

    /// Go on while another writer is saving the job: its image will never come into being
    #[arg(long)]
    pub(super) take_over: bool,
}

impl WhileSavedArgs {
    pub(super) fn wanted(self) -> WhileSaved {
        match (self.no_wait, self.take_over) {
            (true, _) => WhileSaved::Refuse,
            (_, true) => WhileSaved::TakeOver,
            _ => WhileSaved::Wait,
        }
    }
}

/// `recover`
#[derive(Debug, ClapArgs)]
pub(super) struct RecoverArgs {
    /// Only this target. Without it, every target that the journals of this node name; with --job, of that job only
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) pid: Option<u32>,

    /// End processes that can only be ended (SIGKILL)
    #[arg(long)]
    pub(super) end: bool,
}

/// `guard`
#[derive(Debug, ClapArgs)]
pub(super) struct GuardArgs {
    #[arg(long)]
    pub(super) pid: u32,

    #[arg(long)]
    pub(super) start_time: u64,

    #[arg(long)]
    pub(super) journal: PathBuf,

    #[arg(long)]
    pub(super) patience_ms: u64,
}

/// `init`
#[derive(Debug, ClapArgs)]
pub(super) struct InitArgs {
    /// The program is a CRIU that restores a tree, and writes the pid of its root here
    #[arg(long, requires = "ready")]
    pub(super) pidfile: Option<PathBuf>,

    /// Made once the tree is there
    #[arg(long, requires = "pidfile")]
    pub(super) ready: Option<PathBuf>,

    #[arg(last = true, required = true, num_args = 1..)]
    pub(super) command: Vec<OsString>,
}

/// `gc`
#[derive(Debug, ClapArgs)]
pub(super) struct GcArgs {
    /// Age from which an attempt without an image is given up [file: retention.older_than; default: 24h]
    #[arg(long, value_name = "TIME")]
    pub(super) older_than: Option<String>,

    /// Give up attempts, too, that may be sealed in a spill and waiting for `ckptstream resume`
    #[arg(long)]
    pub(super) spilled: bool,

    #[command(flatten)]
    pub(super) upkeep: UpkeepArgs,
}

/// `prune`
#[derive(Debug, ClapArgs)]
pub(super) struct PruneArgs {
    /// Valid images that stay, 2 or more [file: retention.keep; default: 2]
    #[arg(long, value_name = "N")]
    pub(super) keep: Option<i64>,

    #[command(flatten)]
    pub(super) upkeep: UpkeepArgs,
}

/// Of `gc` and `prune`.
#[derive(Debug, ClapArgs)]
pub(super) struct UpkeepArgs {
    /// Time between the moment when an image is dropped and the end of its data [file: retention.grace; default: 1h]
    #[arg(long, value_name = "TIME")]
    pub(super) grace: Option<String>,

    /// Say what would be done, and change nothing
    #[arg(long)]
    pub(super) dry_run: bool,
}

/// `preflight`
#[derive(Debug, ClapArgs)]
pub(super) struct PreflightArgs {
    /// Process that is to be saved, if it runs already
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) pid: Option<u32>,

    #[command(flatten)]
    pub(super) deadline: DeadlineArgs,
}

/// `drill`
#[derive(Debug, ClapArgs)]
pub(super) struct DrillArgs {
    /// Process that is locked, and let go again
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) pid: u32,

    #[command(flatten)]
    pub(super) deadline: DeadlineArgs,
}

/// `restore`
#[derive(Debug, ClapArgs)]
pub(super) struct RestoreArgs {
    /// Suspended process to put the image into, in our pid namespace
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) pid: Option<u32>,

    #[command(flatten)]
    pub(super) image: ImageArgs,

    /// The process came up suspended on purpose: accept it although this image was not taken from it
    #[arg(long, requires = "pid")]
    pub(super) into_fresh: bool,

    /// Write nothing to the store: the process is a copy beside the job, and whoever saves the job may go on
    #[arg(long, conflicts_with_all = ["no_wait", "take_over"])]
    pub(super) read_only: bool,

    #[command(flatten)]
    pub(super) while_saved: WhileSavedArgs,

    #[command(flatten)]
    pub(super) ready: ReadyArgs,

    /// Put a stored GPU onto a present one; repeatable, UUIDs as nvidia-smi -L prints them [file: driver.gpu_map; default: the same GPU, else one alike]
    #[arg(long, value_name = "OLD=NEW")]
    pub(super) gpu_map: Vec<String>,

    #[command(flatten)]
    pub(super) deadline: DeadlineArgs,

    #[command(flatten)]
    pub(super) timeline: TimelineArgs,
}

/// `verify`
#[derive(Debug, ClapArgs)]
pub(super) struct VerifyArgs {
    #[command(flatten)]
    pub(super) image: ImageArgs,

    #[command(flatten)]
    pub(super) timeline: TimelineArgs,
}

/// `--timeline`
#[derive(Debug, ClapArgs)]
pub(super) struct TimelineArgs {
    /// Write what every GPU and stage was doing when: .html is a page for any browser, .json a trace for Perfetto
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(TimelinePath::new), help_heading = "Output")]
    pub(super) timeline: Option<TimelinePath>,
}

/// `--deadline`
#[derive(Debug, ClapArgs)]
pub(super) struct DeadlineArgs {
    /// Time from now until the node is gone, such as 90s
    #[arg(long, value_name = "TIME")]
    pub(super) deadline: Option<String>,
}

/// `--image`
#[derive(Debug, Clone, ClapArgs)]
pub(super) struct ImageArgs {
    /// Image: its ID (the generation, up to 8 digits), or latest for the newest valid one
    #[arg(long, value_name = "ID", default_value = "latest")]
    pub(super) image: ImageRef,
}

/// `cat`
#[derive(Debug, ClapArgs)]
pub(super) struct CatArgs {
    #[command(flatten)]
    pub(super) image: ImageArgs,

    /// GPU whose memory is printed, as stored; may be left out when the image holds one only
    #[arg(long, value_name = "UUID")]
    pub(super) gpu: Option<GpuUuid>,
}

/// `--then`
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ThenChoice {
    /// Leave the process suspended, its GPUs released
    Suspend,
    /// Bring the process back and let it run on
    Resume,
}

/// `--progress`
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ProgressChoice {
    /// Bars on a terminal, plain lines elsewhere
    Auto,
    /// One bar per GPU
    Bar,
    /// A line every two seconds and at each phase
    Plain,
    /// One JSON object per line; the last one is the result
    Json,
    /// Nothing
    None,
}

/// `--log-level`
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum LogLevel {
    /// What failed
    Error,
    /// What may need attention
    Warn,
    /// What happens
    Info,
    /// Why it happens
    Debug,
    /// Everything, libraries included
    Trace,
}

impl Common {
    /// `-v` counts up from the default.
    pub(super) fn level(&self) -> LogLevel {
        match self.verbose {
            0 => self.log_level,
            1 => LogLevel::Info,
            2 => LogLevel::Debug,
            _ => LogLevel::Trace,
        }
    }
}

impl Args {
    /// The flags that override the configuration file.
    pub(super) fn overrides(&self) -> Overrides {
        let mut overrides = Overrides {
            job: self.common.job.clone(),
            epoch: self.common.epoch,
            store: self.common.store.clone(),
            endpoint: self.common.endpoint.clone(),
            region: self.common.region.clone(),
            ..Overrides::default()
        };
        match &self.command {
            Command::Checkpoint(command) => {
                overrides.deadline.clone_from(&command.deadline.deadline);
            }
            Command::Preflight(command) => {
                overrides.deadline.clone_from(&command.deadline.deadline);
            }
            Command::Drill(command) => {
                overrides.deadline.clone_from(&command.deadline.deadline);
            }
            Command::Restore(command) => {
                overrides.deadline.clone_from(&command.deadline.deadline);
                overrides.gpu_map.clone_from(&command.gpu_map);
            }
            Command::Gc(command) => {
                overrides.older_than.clone_from(&command.older_than);
                overrides.grace.clone_from(&command.upkeep.grace);
            }
            Command::Prune(command) => {
                overrides.keep = command.keep;
                overrides.grace.clone_from(&command.upkeep.grace);
            }
            Command::List
            | Command::Run(_)
            | Command::Watch(_)
            | Command::Notify(_)
            | Command::Status(_)
            | Command::Inspect(_)
            | Command::Verify(_)
            | Command::Cat(_)
            | Command::Resume
            | Command::Recover(_)
            | Command::Guard(_)
            | Command::Init(_)
            | Command::Bench(_) => {}
        }
        overrides
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn flags_may_stand_before_and_after_the_command() {
        for line in [
            "ckptstream --job j list --json",
            "ckptstream list --job j --json",
        ] {
            let args = Args::try_parse_from(line.split(' ')).expect(line);
            assert_eq!(args.overrides().job.as_deref(), Some("j"));
            assert!(args.common.json);
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for line in [
            "ckptstream",
            "ckptstream checkpoint",
            "ckptstream checkpoint --pid 0",
            "ckptstream drill",
            "ckptstream checkpoint --pid 1 --then vanish",
            "ckptstream restore --pid 1 --image newest",
            "ckptstream list -v --log-level info",
            "ckptstream cat --gpu 3",
            "ckptstream watch",
            "ckptstream watch --pid 1 --command train.py",
            "ckptstream watch --pid 1 --wait 1m",
            "ckptstream watch --cgroup system.slice",
            "ckptstream watch --command train.py --wait soon",
            "ckptstream bench --no-gpu --gpus 1",
            "ckptstream bench --for 80GB",
            "ckptstream bench --notice soon",
            "ckptstream bench --runs 0",
            "ckptstream verify --timeline page.txt",
            "ckptstream list --timeline page.html",
        ] {
            assert!(Args::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }
}
