//! The command line: parse, resolve, run, report.
//!
//! In: arguments, one configuration file, signals. Out: the result on stdout, progress and logs on stderr, an exit code. Everything below this
//! module is called with values that are checked, and prints nothing.
//!
//! What stdout and stderr do never changes what became of the job: a reader that went away, or a terminal that cannot be drawn on, is no failure.

mod args;
mod bench;
mod console;
mod findings;
mod images;
mod init;
mod logging;
mod progress;
mod report;
mod signals;
mod stdout;
mod supervise;
mod tidy;
mod timeline;
mod units;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use clap::error::ErrorKind;
use tokio_util::sync::CancellationToken;

use crate::bench::Surroundings;
use crate::checkpoint::{self, Then};
use crate::config::{Config, ConfigError, Environment, JobName, Overrides, RawConfig, StoreConfig};
use crate::error::{ExitCode, Failure, Phase};
use crate::guard::{self, Guarded};
use crate::outcome::Outcome;
use crate::preflight;
use crate::progress::Meter;
use crate::recover::{self, RecoverOptions};
use crate::restore::{self, Streams};
use crate::resume;
use crate::session::Session;
use crate::store;
use crate::upkeep::{self, GcOptions, Upkeep};

use args::{Args, Command, GuardArgs, InitArgs, ProgressChoice, ThenChoice, TimelineArgs};
use console::Console;
use findings::PreflightListing;
use progress::{Mode, Progress, Terminal};
use report::{Done, RunReport};
use stdout::Stdout;
use tidy::{RecoveredListing, UpkeepListing};
use timeline::Recording;

/// How long leftovers on the network may take once the verdict is known.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// This very program, also when its file was replaced.
const OURSELVES: &str = "/proc/self/exe";

/// Runs the command line of this process.
pub fn main() -> std::process::ExitCode {
    let started = Instant::now();
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => return usage(&error, started),
    };
    let terminal = Terminal::look();
    let mode = Mode::resolve(args.common.progress, terminal);
    let console = Console::default();
    logging::install(
        args.common.level(),
        &console,
        mode == Mode::Json,
        terminal.colours,
    );
    if args.common.progress == ProgressChoice::Bar && mode != Mode::Bar {
        tracing::warn!("--progress bar needs a terminal on stderr; plain lines are shown instead");
    }
    let stdout = Stdout::default();
    let run = Run {
        args: &args,
        mode,
        console: &console,
        started,
        stdout: &stdout,
    };
    if let Command::Guard(guard) = &args.command {
        return run.guard(guard);
    }
    if let Command::Init(init) = &args.command {
        return run.init(init);
    }
    if let Command::Run(_) | Command::Watch(_) = &args.command {
        return run.supervise();
    }
    let mut job = args.common.job.clone();
    let result = run.execute(&mut job);
    conclude(&run, result, job)
}

/// Reports, and turns the verdict into the exit status.
fn conclude(
    run: &Run<'_>,
    result: Result<Option<Done>, Failure>,
    job: Option<String>,
) -> std::process::ExitCode {
    let command = run.args.command.name();
    let elapsed = run.started.elapsed().as_secs_f64();
    let (report, code, print) = match result {
        Ok(Some(done)) => {
            let code = done.code();
            let report = RunReport::done(command, done, elapsed);
            if code != ExitCode::Ok && run.mode != Mode::Json {
                report
                    .failure_lines(code.advice())
                    .iter()
                    .for_each(|line| run.console.line(line));
            }
            (report, code, true)
        }
        // `cat` has its result on stdout already.
        Ok(None) => return std::process::ExitCode::SUCCESS,
        // The reader of stdout has seen enough.
        Err(_) if run.stdout.is_broken() => return std::process::ExitCode::SUCCESS,
        Err(failure) => {
            let report = RunReport::failed(Some(command), &failure, job, elapsed);
            if run.mode != Mode::Json {
                report
                    .failure_lines(failure.code.advice())
                    .iter()
                    .for_each(|line| run.console.line(line));
            }
            (report, failure.code, run.args.common.json)
        }
    };
    if print
        && let Err(error) = report.print(run.args.common.json, &mut run.stdout.writer())
        && !run.stdout.is_broken()
    {
        tracing::warn!("the result could not be written to stdout: {error}");
    }
    if run.mode == Mode::Json {
        match report.result_line() {
            Ok(line) => run.console.line(&line),
            Err(error) => tracing::warn!("the result line could not be written: {error}"),
        }
    }
    std::process::ExitCode::from(code.code())
}

/// `--help`, `--version`, or a command line that makes no sense: exit 2, told like every other failure, after clap's own words.
fn usage(error: &clap::Error, started: Instant) -> std::process::ExitCode {
    if !error.use_stderr() {
        // Nobody to tell: the exit status still says it.
        let _ = error.print();
        return std::process::ExitCode::SUCCESS;
    }
    let failure = Failure::new(ExitCode::Config, Phase::Config, usage_cause(error));
    let elapsed = started.elapsed().as_secs_f64();
    let report = RunReport::failed(None, &failure, None, elapsed);
    let typed: Vec<_> = std::env::args_os().collect();
    let has_typed = |words: &[&str]| {
        typed
            .windows(words.len())
            .any(|window| window.iter().eq(words))
    };
    let console = Console::default();
    if has_typed(&["--progress", "json"]) || has_typed(&["--progress=json"]) {
        // Writing plain strings and numbers as JSON cannot fail.
        let _ = report.result_line().map(|line| console.line(&line));
    } else {
        let _ = error.print();
        report
            .failure_lines(failure.code.advice())
            .iter()
            .for_each(|line| console.line(line));
    }
    if has_typed(&["--json"]) {
        let _ = report.print(true, &mut Stdout::default().writer());
    }
    // Up to 200 the status of these is the job's.
    let mut typed = typed.iter().take_while(|word| *word != "--");
    if typed.any(|word| word == "run" || word == "watch") {
        return std::process::ExitCode::from(ExitCode::VERDICTS_FROM + ExitCode::Config.code());
    }
    std::process::ExitCode::from(ExitCode::Config.code())
}

/// What clap found wrong, without usage and advice: the first paragraph of its message.
fn usage_cause(error: &clap::Error) -> String {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return "no command is given".to_owned();
    }
    let text = error.render().to_string();
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.is_empty())
        .collect();
    let paragraph = lines.join(" ");
    paragraph
        .strip_prefix("error: ")
        .unwrap_or(&paragraph)
        .to_owned()
}

/// One command under way.
struct Run<'a> {
    args: &'a Args,
    mode: Mode,
    console: &'a Console,
    started: Instant,
    stdout: &'a Stdout,
}

/// What every command that talks to the store stands on.
struct Ground {
    runtime: tokio::runtime::Runtime,
    meter: Arc<Meter>,
    /// The first signal.
    cancel: CancellationToken,
    /// The second one.
    again: CancellationToken,
}

impl Run<'_> {
    /// Does what was asked. `job` becomes known on the way.
    fn execute(&self, job: &mut Option<String>) -> Result<Option<Done>, Failure> {
        self.refuse_early()?;
        let raw = self.raw()?;
        let overrides = self.args.overrides();
        let named = JobName::resolve(&overrides, &raw).map_err(config_failure)?;
        *job = named.as_ref().map(ToString::to_string);
        let config =
            || Config::resolve(&overrides, &raw, &Environment::read()).map_err(config_failure);
        match &self.args.command {
            // Needs no job: without one it lists the jobs.
            Command::List => {
                let store = StoreConfig::resolve(&overrides, &raw).map_err(config_failure)?;
                self.list(&store, named.as_ref()).map(Some)
            }
            Command::Checkpoint(command) => {
                let then = match command.then {
                    ThenChoice::Suspend => Then::Suspend,
                    ThenChoice::Resume => Then::Resume,
                };
                let while_saved = command.while_saved.wanted();
                self.transfer(config()?, &command.timeline, |session| {
                    checkpoint::checkpoint(session, command.pid, then, while_saved)
                })
            }
            Command::Restore(command) => self.transfer(config()?, &command.timeline, |session| {
                let ready = command.ready.open()?;
                let wanted = restore::Wanted {
                    image: command.image.image,
                    // A tree is made anew, so any of its images will do.
                    into_fresh: command.into_fresh || command.pid.is_none(),
                    started_here: false,
                    read_only: command.read_only,
                    while_saved: command.while_saved.wanted(),
                };
                let restored = match command.pid {
                    Some(pid) => restore::restore(session, pid, wanted),
                    None => restore_tree(session, wanted),
                }?;
                if let Some(ready) = ready {
                    ready.tell();
                }
                Ok(restored)
            }),
            Command::Gc(command) => {
                let options = GcOptions {
                    spilled: command.spilled,
                    dry_run: command.upkeep.dry_run,
                };
                let upkeep = |session: &Session| upkeep::gc(session, options);
                self.tidy(&overrides, &raw, named, upkeep).map(Some)
            }
            Command::Prune(command) => {
                let upkeep = |session: &Session| upkeep::prune(session, command.upkeep.dry_run);
                self.tidy(&overrides, &raw, named, upkeep).map(Some)
            }
            Command::Verify(command) => self.transfer(config()?, &command.timeline, |session| {
                restore::verify(session, command.image.image)
            }),
            Command::Resume => self
                .with_session(config()?, Meter::new(), resume::resume)
                .map(|outcome| Some(Done::Transfer(outcome))),
            Command::Recover(command) => {
                let options = RecoverOptions {
                    pid: command.pid,
                    end: command.end,
                };
                // Every journal has a job of its own; without one named, all are looked at.
                let typed = JobName::resolve(&overrides, &RawConfig::default());
                let typed = typed.map_err(config_failure)?;
                let overrides = Overrides {
                    job: Some(typed.as_ref().map_or("recover", JobName::as_str).to_owned()),
                    ..overrides.clone()
                };
                let config = Config::resolve(&overrides, &raw, &Environment::read())
                    .map_err(config_failure)?;
                self.with_session(config, Meter::new(), |session| {
                    recover::recover(session, typed.as_ref(), options)
                })
                .map(|recovered| Some(Done::Recovered(RecoveredListing(recovered))))
            }
            Command::Preflight(command) => self
                .preflight(config()?, |around| {
                    preflight::preflight(&preflight::Surroundings {
                        pid: command.pid,
                        ..around
                    })
                })
                .map(Some),
            Command::Drill(command) => self
                .preflight(config()?, |around| preflight::drill(around, command.pid))
                .map(Some),
            Command::Notify(command) => self.notify(command, &overrides, &raw).map(Some),
            Command::Status(command) => {
                let path = Config::resolve_socket(command.socket.as_deref(), &overrides, &raw);
                supervise::status(&path.map_err(config_failure)?).map(Some)
            }
            Command::Guard(_) | Command::Init(_) | Command::Run(_) | Command::Watch(_) => {
                unreachable!("it is run before anything is read")
            }
            Command::Inspect(command) => self.with_session(config()?, Meter::new(), |session| {
                let inspection = session.wait(images::inspect(
                    session.store.as_ref(),
                    &session.config.job,
                    command.image,
                ))?;
                Ok(Some(Done::Inspection(Box::new(inspection))))
            }),
            Command::Cat(command) => self.with_session(config()?, Meter::new(), |session| {
                restore::cat(
                    session,
                    command.image.image,
                    command.gpu,
                    &mut self.stdout.writer(),
                )?;
                Ok(None)
            }),
            Command::Bench(command) => {
                let mut overrides = self.args.overrides();
                command.fill_in(&mut overrides, &raw);
                let config = Config::resolve(&overrides, &raw, &Environment::read())
                    .map_err(config_failure)?;
                self.bench(&config, &command.timeline, &command.settings())
                    .map(Some)
            }
        }
    }

    /// Is process 1 of a tree's pid namespace until the tree ends.
    fn init(&self, args: &InitArgs) -> std::process::ExitCode {
        match init::of_a_tree(args) {
            Ok(status) => std::process::ExitCode::from(status),
            Err(error) => {
                self.console.line(&format!("ckptstream init: {error}"));
                std::process::ExitCode::from(ExitCode::Preflight.code())
            }
        }
    }

    /// Watches over a target until the saver that started us ends, and dies for none of the signals that end it.
    fn guard(&self, args: &GuardArgs) -> std::process::ExitCode {
        let patience = Duration::from_millis(args.patience_ms);
        let watched = Ground::stand_without_signals(Meter::new(), |ground| {
            // Whatever a scheduler sends to all processes of a job: it is for the saver.
            signals::outlive(&ground.runtime)
                .map_err(|error| Failure::new(ExitCode::Lost, Phase::Unlock, error))?;
            let mut letters = std::io::stdin().lock();
            guard::guard(
                &mut letters,
                (args.pid, args.start_time),
                &args.journal,
                patience,
            )
            .map_err(|error| Failure::new(ExitCode::Lost, Phase::Unlock, error))
        });
        match watched {
            Ok(Guarded::Unlocked) => self.console.line(&format!(
                "ckptstream guard: the saver died; process {} was unlocked, and runs",
                args.pid
            )),
            Ok(_) => {}
            Err(failure) => {
                self.console
                    .line(&format!("ckptstream guard: {}", failure_text(&failure)));
                return std::process::ExitCode::from(failure.code.code());
            }
        }
        std::process::ExitCode::SUCCESS
    }

    /// The configuration file as written.
    fn raw(&self) -> Result<RawConfig, Failure> {
        match &self.args.common.config {
            Some(path) => RawConfig::read(path).map_err(config_failure),
            None => Ok(RawConfig::default()),
        }
    }

    /// What is wrong whatever the configuration says.
    fn refuse_early(&self) -> Result<(), Failure> {
        let Command::Cat(_) = self.args.command else {
            return Ok(());
        };
        let refuse = |why: &str| {
            Err(Failure::new(
                ExitCode::Config,
                Phase::Config,
                why.to_owned(),
            ))
        };
        if self.args.common.json {
            return refuse(
                "cat has the raw bytes on stdout, so there is no place for --json; use --progress json for a result line on stderr",
            );
        }
        if std::io::stdout().is_terminal() {
            return refuse("cat does not write raw bytes to a terminal; redirect stdout");
        }
        Ok(())
    }

    fn list(&self, store: &StoreConfig, job: Option<&JobName>) -> Result<Done, Failure> {
        let signal_effect = self.args.command.signal_effect();
        Ground::stand(signal_effect, Meter::new(), |ground| {
            let (cancel, meter) = (ground.cancel.clone(), ground.meter.clone());
            let store = ground
                .runtime
                .block_on(store::open(store, cancel, meter))
                .map_err(|error| Failure::new(ExitCode::Preflight, Phase::Config, error))?;
            ground.runtime.block_on(images::list(&store, job))
        })
    }

    /// One job, or every job of the store.
    fn tidy(
        &self,
        overrides: &Overrides,
        raw: &RawConfig,
        named: Option<JobName>,
        upkeep: impl Fn(&Session) -> Result<Upkeep, Failure>,
    ) -> Result<Done, Failure> {
        let of_job = |job: &JobName| {
            let overrides = Overrides {
                job: Some(job.to_string()),
                ..overrides.clone()
            };
            Config::resolve(&overrides, raw, &Environment::read()).map_err(config_failure)
        };
        let jobs = match named {
            Some(job) => vec![job],
            None => {
                let store = StoreConfig::resolve(overrides, raw).map_err(config_failure)?;
                if let Some(epoch) = store.epoch {
                    let why = format!(
                        "epoch {epoch} (job.epoch, --epoch, CKPTSTREAM_EPOCH) is that of one job; name it (job.name, --job), or take the epoch out"
                    );
                    return Err(Failure::new(ExitCode::Config, Phase::Config, why));
                }
                self.jobs(&store)?
            }
        };
        let mut done = Vec::new();
        for job in &jobs {
            let tidied = self.with_session(of_job(job)?, Meter::new(), &upkeep)?;
            done.push(tidied);
        }
        Ok(Done::Upkeep(UpkeepListing::new(done)))
    }

    fn preflight(
        &self,
        config: Config,
        look: impl FnOnce(preflight::Surroundings) -> preflight::Findings,
    ) -> Result<Done, Failure> {
        Ground::stand(self.args.command.signal_effect(), Meter::new(), |ground| {
            let findings = look(preflight::Surroundings {
                config,
                runtime: ground.runtime.handle().clone(),
                meter: Arc::clone(&ground.meter),
                cancel: ground.cancel.clone(),
                pid: None,
                guard: Some(PathBuf::from(OURSELVES)),
            });
            Ok(Done::Preflight(PreflightListing(findings)))
        })
    }

    fn jobs(&self, store: &StoreConfig) -> Result<Vec<JobName>, Failure> {
        let signal_effect = self.args.command.signal_effect();
        Ground::stand(signal_effect, Meter::new(), |ground| {
            let (cancel, meter) = (ground.cancel.clone(), ground.meter.clone());
            let store = ground
                .runtime
                .block_on(store::open(store, cancel, meter))
                .map_err(|error| Failure::new(ExitCode::Preflight, Phase::Config, error))?;
            ground.runtime.block_on(images::jobs(&store))
        })
    }

    fn bench(
        &self,
        config: &Config,
        timeline: &TimelineArgs,
        settings: &crate::bench::Settings,
    ) -> Result<Done, Failure> {
        let (recording, meter) = self.recording(timeline)?;
        let result = self.measure(config, meter, settings);
        if let Some(recording) = recording {
            recording.end(crate::timeline::Run {
                command: self.args.command.name().to_owned(),
                subject: "this node".to_owned(),
                bytes: None,
                failure: result.as_ref().err().map(failure_text),
            });
        }
        result.map(|report| Done::Bench(Box::new(report)))
    }

    fn measure(
        &self,
        config: &Config,
        meter: Arc<Meter>,
        settings: &crate::bench::Settings,
    ) -> Result<crate::bench::Report, Failure> {
        Ground::stand(self.args.command.signal_effect(), meter, |ground| {
            let started = Instant::now();
            let tell = |step: &str| match self.mode {
                Mode::Bar | Mode::Plain => {
                    let elapsed = started.elapsed().as_secs_f64();
                    self.console.line(&format!("{elapsed:7.1}s {step}"));
                }
                Mode::Json => {
                    let line = serde_json::json!({"event": "step", "step": step});
                    self.console.line(&line.to_string());
                }
                Mode::None => {}
            };
            let around = Surroundings {
                config,
                runtime: ground.runtime.handle(),
                meter: &ground.meter,
                cancel: &ground.cancel,
                tell: &tell,
            };
            crate::bench::run(around, settings)
        })
    }

    /// The recording of a run that is recorded, and the run's meter.
    fn recording(
        &self,
        timeline: &TimelineArgs,
    ) -> Result<(Option<Recording>, Arc<Meter>), Failure> {
        let start = |path| Recording::start(path, self.started);
        let recording = timeline.timeline.as_ref().map(start).transpose()?;
        let meter = recording.as_ref().map_or_else(Meter::new, Recording::meter);
        Ok((recording, meter))
    }

    /// A command whose result is an [`Outcome`], recorded if that is wanted.
    fn transfer(
        &self,
        config: Config,
        timeline: &TimelineArgs,
        work: impl FnOnce(&Session) -> Result<Outcome, Failure>,
    ) -> Result<Option<Done>, Failure> {
        let (recording, meter) = self.recording(timeline)?;
        let job = config.job.to_string();
        let result = self.with_session(config, meter, work);
        if let Some(recording) = recording {
            recording.end(crate::timeline::Run {
                command: self.args.command.name().to_owned(),
                subject: match &result {
                    Ok(outcome) => format!("{job}, image {}", outcome.image),
                    Err(_) => job,
                },
                bytes: result.as_ref().ok().map(|outcome| outcome.bytes),
                failure: result.as_ref().err().map(failure_text),
            });
        }
        result.map(|outcome| Some(Done::Transfer(outcome)))
    }

    /// Opens a session, shows progress while `work` works, and leaves nothing behind.
    fn with_session<T>(
        &self,
        config: Config,
        meter: Arc<Meter>,
        work: impl FnOnce(&Session) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        Ground::stand(self.args.command.signal_effect(), meter, |ground| {
            let session = match &self.args.command {
                Command::Checkpoint(command) if command.force_abandon => {
                    ground.session(config)?.may_be_abandoned(&ground.again)
                }
                _ => ground.session(config)?,
            };
            let _progress = Progress::start(self.mode, session.clone(), self.console.clone());
            work(&session)
        })
    }
}

impl Ground {
    /// A session on it, whose targets we guard ourselves.
    fn session(&self, config: Config) -> Result<Session, Failure> {
        let session = Session::open(
            config,
            self.runtime.handle().clone(),
            Arc::clone(&self.meter),
            self.cancel.clone(),
        )?;
        Ok(Session {
            guard: Some(PathBuf::from(OURSELVES)),
            ..session
        })
    }

    /// Starts the network's threads and watches for signals, which have this effect, while `work` works.
    fn stand<T>(
        signal_effect: &'static str,
        meter: Arc<Meter>,
        work: impl FnOnce(&Self) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        Self::stand_without_signals(meter, |ground| {
            signals::watch(
                &ground.runtime,
                [&ground.cancel, &ground.again],
                signal_effect,
            )
            .map_err(|error| Failure::new(ExitCode::Preflight, Phase::Prepare, error))?;
            work(ground)
        })
    }

    /// The same for a command that has its own use for signals.
    fn stand_without_signals<T>(
        meter: Arc<Meter>,
        work: impl FnOnce(&Self) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let refused =
            |error: std::io::Error| Failure::new(ExitCode::Preflight, Phase::Prepare, error);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .thread_name("network")
            .build()
            .map_err(refused)?;
        let ground = Self {
            runtime,
            meter,
            cancel: CancellationToken::new(),
            again: CancellationToken::new(),
        };
        let result = work(&ground);
        ground.runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
        result
    }
}

/// Brings a tree back, and leaves it to itself.
fn restore_tree(session: &Session, wanted: restore::Wanted) -> Result<Outcome, Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::new(ExitCode::Preflight, Phase::Config, error))?;
    let (outcome, _runs_on) = restore::restore_tree(session, wanted, &program, Streams::Own)?;
    Ok(outcome)
}

/// A failure in one line.
fn failure_text(failure: &Failure) -> String {
    format!("{failure}: {}", failure.cause_chain().join(": "))
}

fn config_failure(error: ConfigError) -> Failure {
    Failure::new(ExitCode::Config, Phase::Config, error)
}
