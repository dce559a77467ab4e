//! `run` and `watch`: their exit status is the job's, the scheduler's, or 200 and a verdict.
//!
//! In: the command line, the configuration. Out: an exit status; stdout and stdin are the job's, and what we have to say goes to stderr. What can fail: see [`crate::supervise`].

use std::any::Any;
use std::process::ExitCode as Exit;

use super::args::{Command, RunArgs};
use super::progress::{Mode, Progress};
use super::report::RunReport;
use super::{Ground, OURSELVES, Run, config_failure, init};
use crate::config::{Config, Environment, RawConfig};
use crate::error::{ExitCode, Failure, Phase};
use crate::preempt::{self, Board};
use crate::progress::Meter;
use crate::session::Session;
use crate::supervise::{End, Supervisor};

/// Our own verdicts begin here.
const VERDICTS_FROM: u8 = 200;

impl Run<'_> {
    /// Runs or watches a job to its end.
    pub(super) fn supervise(&self) -> Exit {
        if let (Command::Run(_), true) = (&self.args.command, init::is_init()) {
            return match init::stand_in() {
                Ok(status) => Exit::from(status),
                Err(error) => {
                    let failure = Failure::new(ExitCode::Preflight, Phase::Prepare, error);
                    self.verdict(&failure)
                }
            };
        }
        match self.supervised() {
            Ok((End::Job(status), _)) => Exit::from(status.code()),
            Ok((End::Saved(outcome), requeue)) => {
                self.tell(&format!(
                    "ckptstream {}: image {} of job {} is committed, and the job was ended; exit {requeue}: start it again",
                    self.args.command.name(),
                    outcome.image,
                    outcome.job
                ));
                Exit::from(requeue)
            }
            Err(failure) => self.verdict(&failure),
        }
    }

    fn tell(&self, line: &str) {
        if self.mode != Mode::Json {
            self.console.line(line);
        }
    }

    /// The last lines on stderr, and the exit status.
    fn verdict(&self, failure: &Failure) -> Exit {
        let command = self.args.command.name();
        let job = self.args.common.job.clone();
        let elapsed = self.started.elapsed().as_secs_f64();
        let report = RunReport::failed(Some(command), failure, job, elapsed);
        if self.mode == Mode::Json {
            // Writing plain strings and numbers as JSON cannot fail.
            let _ = report.result_line().map(|line| self.console.line(&line));
        } else {
            report
                .failure_lines(failure.code.advice())
                .iter()
                .for_each(|line| self.console.line(line));
        }
        Exit::from(VERDICTS_FROM + failure.code.code())
    }

    fn supervised(&self) -> Result<(End, u8), Failure> {
        if self.args.common.json {
            let why = "stdout is the job's, so there is no place for --json; use --progress json for a result line on stderr";
            return Err(Failure::new(ExitCode::Config, Phase::Config, why));
        }
        let raw = match &self.args.common.config {
            Some(path) => RawConfig::read(path).map_err(config_failure)?,
            None => RawConfig::default(),
        };
        let config = Config::resolve(&self.args.overrides(), &raw, &Environment::read())
            .map_err(config_failure)?;
        let requeue = config.run.requeue_exit_code;
        let end = Ground::stand_without_signals(Meter::new(), |ground| {
            let board = Board::default();
            let for_the_job = preempt::watch(ground.runtime.handle(), &config.preempt, &board)
                .map_err(|error| Failure::new(ExitCode::Preflight, Phase::Prepare, error))?;
            let session = Session::open(
                config,
                ground.runtime.handle().clone(),
                ground.meter.clone(),
                ground.cancel.clone(),
            )?;
            let show = |session: &Session| -> Box<dyn Any> {
                Box::new(Progress::start(
                    self.mode,
                    session.clone(),
                    self.console.clone(),
                ))
            };
            let supervisor = Supervisor {
                session: Session {
                    guard: Some(OURSELVES.into()),
                    ..session
                },
                board,
                for_the_job,
                show: &show,
            };
            match &self.args.command {
                Command::Watch(watch) => supervisor.watch(watch.pid),
                Command::Run(RunArgs { command }) => match command.split_first() {
                    Some((program, args)) => supervisor.run(program, args),
                    None => unreachable!("clap wants one word at least"),
                },
                _ => unreachable!("only these two are supervised"),
            }
        })?;
        Ok((end, requeue))
    }
}
