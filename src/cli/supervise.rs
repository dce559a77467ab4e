//! `run` and `watch`: their exit status is the job's, the scheduler's, or 200 and a verdict.
//!
//! In: the command line, the configuration. Out: an exit status; stdout and stdin are the job's, and what we have to say goes to stderr. What can fail: see [`crate::supervise`].

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode as Exit;
use std::time::Duration;

use serde::Serialize;

use super::args::{Command, NotifyArgs, RunArgs};
use super::progress::{Mode, Progress};
use super::report::{Done, RunReport};
use super::{Ground, Run, config_failure, init};
use crate::config::{Config, ConfigError, Environment, Overrides, RawConfig};
use crate::error::{ExitCode, Failure, Phase};
use crate::pipeline::PipelineError;
use crate::preempt::{self, Board};
use crate::progress::Meter;
use crate::session::Session;
use crate::supervise::{Answer, End, Question, Report, Supervisor, Verdict, ask};

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
        let supervised = catch_unwind(AssertUnwindSafe(|| self.supervised()));
        let supervised = supervised.unwrap_or_else(|panic| {
            let cause = PipelineError::of_story(panic.as_ref());
            // Nobody has looked what became of the job.
            Err(Failure::new(ExitCode::Lost, Phase::Prepare, cause))
        });
        match supervised {
            Ok((End::Job(status), _)) => Exit::from(status.code()),
            Ok((End::NotStarted, requeue)) => {
                let what = match self.args.command {
                    Command::Watch(_) => "and there was no job yet",
                    _ => "so the job was not started",
                };
                self.tell(&format!(
                    "ckptstream {}: the node goes away, {what}; exit {requeue}: start it again",
                    self.args.command.name()
                ));
                Exit::from(requeue)
            }
            Ok((End::Saved(image), requeue)) => {
                self.tell(&format!(
                    "ckptstream {}: image {image} is committed, and the job was ended; exit {requeue}: start it again",
                    self.args.command.name()
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
        Exit::from(ExitCode::VERDICTS_FROM + failure.code.code())
    }

    fn supervised(&self) -> Result<(End, u8), Failure> {
        if self.args.common.json {
            let why = "stdout is the job's, so there is no place for --json; use --progress json for a result line on stderr";
            return Err(Failure::new(ExitCode::Config, Phase::Config, why));
        }
        let config = Config::resolve(&self.args.overrides(), &self.raw()?, &Environment::read())
            .map_err(config_failure)?;
        let ready = match &self.args.command {
            Command::Watch(watch) => watch.ready.open()?,
            Command::Run(run) => run.ready.open()?,
            _ => None,
        };
        let requeue = config.run.requeue_exit_code;
        let end = Ground::stand_without_signals(Meter::new(), |ground| {
            let board = Board::default();
            let for_the_job = preempt::watch(ground.runtime.handle(), &config.preempt, &board)
                .map_err(|error| Failure::new(ExitCode::Preflight, Phase::Prepare, error))?;
            let session = ground.session(config)?;
            let show = |session: &Session| -> Box<dyn Any> {
                Box::new(Progress::start(
                    self.mode,
                    session.clone(),
                    self.console.clone(),
                ))
            };
            let supervisor = Supervisor::new(session, board, for_the_job, &show, ready)?;
            match &self.args.command {
                Command::Watch(watch) => supervisor.watch(&watch.sought(), watch.wait),
                Command::Run(RunArgs { command, .. }) => match command.split_first() {
                    Some((program, args)) => supervisor.run(program, args),
                    None => unreachable!("clap wants one word at least"),
                },
                _ => unreachable!("only these two are supervised"),
            }
        })?;
        Ok((end, requeue))
    }
}

/// What `status` tells.
#[derive(Debug, Serialize)]
pub(super) struct StatusListing {
    pub(super) status: Box<Report>,
}

/// What `notify` has heard: no more than every report says.
#[derive(Debug, Serialize)]
pub(super) struct NotifyOutcome {
    #[serde(skip)]
    pub(super) verdict: Verdict,
}

impl Run<'_> {
    /// Brings a notice, and waits for the verdict.
    pub(super) fn notify(
        &self,
        args: &NotifyArgs,
        overrides: &Overrides,
        raw: &RawConfig,
    ) -> Result<Done, Failure> {
        let path = Config::resolve_socket(args.socket.socket.as_deref(), overrides, raw);
        let path = path.map_err(config_failure)?;
        let left = args.left.as_deref().map(|text| {
            humantime::parse_duration(text).map_err(|_bad| {
                config_failure(ConfigError::Invalid {
                    name: "--left".to_owned(),
                    value: text.to_owned(),
                    expected: "expected a time such as \"90s\"".to_owned(),
                })
            })
        });
        let left_seconds = left.transpose()?.map(|left: Duration| left.as_secs_f64());
        match asked(&path, &Question::Notify { left_seconds })? {
            Answer::Verdict(verdict) if verdict.exit_code == 0 => {
                Ok(Done::Notified(NotifyOutcome { verdict }))
            }
            Answer::Verdict(verdict) => {
                let code = ExitCode::from_code(verdict.exit_code).unwrap_or(ExitCode::Lost);
                let phase = verdict.phase.unwrap_or(Phase::Prepare);
                Err(Failure::new(code, phase, verdict.cause.join(": ")))
            }
            other => Err(not_understood(&other)),
        }
    }
}

/// Asks what a supervision is doing.
pub(super) fn status(path: &Path) -> Result<Done, Failure> {
    match asked(path, &Question::Status)? {
        Answer::Status(report) => Ok(Done::Status(StatusListing { status: report })),
        other => Err(not_understood(&other)),
    }
}

fn asked(path: &Path, question: &Question) -> Result<Answer, Failure> {
    ask(path, question).map_err(|error| {
        let why = format!(
            "no `ckptstream run` or `watch` answers at {} (--socket, preempt.socket): {error}",
            path.display()
        );
        Failure::new(ExitCode::Preflight, Phase::Config, why)
    })
}

fn not_understood(answer: &Answer) -> Failure {
    let why = match answer {
        Answer::Error(why) => why.clone(),
        other => format!("an answer to another question came: {other:?}"),
    };
    Failure::new(ExitCode::Preflight, Phase::Config, why)
}

impl StatusListing {
    pub(super) fn text(&self) -> String {
        let report = &self.status;
        let pid = |pid: Option<u32>| pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        let mut rows = vec![
            ("job", report.job.clone()),
            (
                "process",
                format!("{}, watched by {}", pid(report.job_pid), report.pid),
            ),
            ("doing", format!("{:?}", report.doing).to_lowercase()),
            (
                "armed",
                match (&report.not_armed, report.armed) {
                    (_, true) => format!("yes, {} MiB of host memory", report.armed_bytes >> 20),
                    (Some(why), false) => format!("no: {why}"),
                    (None, false) => "no".to_owned(),
                },
            ),
            (
                "saves",
                format!(
                    "{} committed, {} failed, {} notices",
                    report.saves_committed, report.saves_failed, report.notices_heard
                ),
            ),
        ];
        rows.extend(report.drill.clone().map(|line| ("drill", line)));
        if report.saves_skipped > 0 {
            rows.push((
                "skipped",
                format!(
                    "{} saves in passing (job.interval_share)",
                    report.saves_skipped
                ),
            ));
        }
        if report.ever.missed > 0 {
            let (missed, heard) = (report.ever.missed, report.ever.heard);
            rows.push((
                "missed",
                format!("{missed} of {heard} notices in all lives of the job"),
            ));
        }
        rows.extend(report.store_trouble.clone().map(|why| ("store", why)));
        rows.extend(report.image.clone().map(|image| ("image", image)));
        rows.extend(report.last_failure.clone().map(|why| ("failure", why)));
        rows.extend(report.notices.iter().map(|notice| {
            let text = format!(
                "{}: {}, {:.0} s left",
                notice.source, notice.text, notice.left_seconds
            );
            ("notice", text)
        }));
        let blind = report.blind.iter();
        rows.extend(blind.map(|blind| ("blind", format!("{}: {}", blind.source, blind.why))));
        rows.iter()
            .map(|(name, text)| format!("{name:<9} {text}\n"))
            .collect()
    }
}

impl NotifyOutcome {
    pub(super) fn text(&self) -> String {
        let image = self.verdict.image.as_deref().unwrap_or("-");
        format!("image     {image} is committed\n")
    }
}
