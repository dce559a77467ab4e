//! The program CRIU: found, asked what it can, and started for a dump or a restore whose images are streams.
//!
//! In: a stopped or running tree, an images directory with our socket in it. Out: a [`CriuRun`] that is waited for; after a dump a tree that is left stopped, after a restore one that runs. What can fail: [`CriuError`], with the end of CRIU's own log.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::watch::Watch;
use crate::config::{HostConfig, TcpPolicy};
use crate::target::{Target, TargetError, pid_namespace, pid_namespace_of};

/// The oldest version whose streams are known to work here.
const VERSION_MIN: (u32, u32) = (4, 1);

/// A look at CRIU takes no longer.
const LOOK_TIMEOUT: Duration = Duration::from_secs(10);
/// How often it is looked whether CRIU has ended.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// How long a CRIU whose pipes were closed may take to let the tree go.
const GRACE: Duration = Duration::from_secs(10);

/// Lines of CRIU's log that a failure carries.
const LOG_LINES: usize = 6;
/// Bytes of the end of its log that are looked at.
const LOG_LEN_MAX: usize = 256 << 10;

/// CRIU cannot do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CriuError {
    /// It is not there.
    #[error(
        "{} cannot be started: install CRIU 4.1 or newer (scripts/install-criu.sh), or name it with host.criu",
        program.display()
    )]
    Missing {
        /// What was started.
        program: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// It is there, and too old, or no CRIU.
    #[error("{} is {found}; CRIU 4.1 or newer is needed (scripts/install-criu.sh, host.criu)", program.display())]
    Version {
        /// What was started.
        program: PathBuf,
        /// What it says of itself.
        found: String,
    },
    /// `criu check` found that this kernel, or our rights, do not do.
    #[error("`criu check` says that it cannot work here: {said}")]
    Check {
        /// Its words.
        said: String,
    },
    /// It could not be started, or waited for.
    #[error("{what} failed")]
    Io {
        /// What was done.
        what: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// It ended with a failure.
    #[error("criu {command} ended with {status}: {log}")]
    Failed {
        /// `dump` or `restore`.
        command: &'static str,
        /// How.
        status: ExitStatus,
        /// The end of its log, the errors in it first.
        log: String,
    },
    /// It took too long, and was ended.
    #[error(
        "criu {command} took longer than {limit:?}, which is what the deadline leaves it, and was ended: {log}"
    )]
    TooLong {
        /// `dump` or `restore`.
        command: &'static str,
        /// What it had.
        limit: Duration,
        /// The end of its log.
        log: String,
    },
    /// The save or restore was given up while it ran.
    #[error("criu {command} was ended, because the transfer was given up")]
    GivenUp {
        /// `dump` or `restore`.
        command: &'static str,
    },
}

fn io_error(what: &'static str) -> impl FnOnce(io::Error) -> CriuError {
    move |source| CriuError::Io { what, source }
}

/// A CRIU that can be used here.
#[derive(Debug, Clone)]
pub struct Criu {
    config: HostConfig,
    /// As it says it, for instance `4.1.1`.
    pub version: String,
}

/// The root of a tree, as CRIU is to see it.
#[derive(Debug, Clone, Copy)]
pub struct DumpRoot {
    /// In our pid namespace.
    pub pid: u32,
    /// In the innermost one, where CRIU runs.
    pub own_pid: u32,
    /// Whether its pid namespace is another one than ours.
    pub is_apart: bool,
}

impl DumpRoot {
    /// The tree of this process.
    ///
    /// # Errors
    /// Its pid namespace cannot be looked at.
    pub fn of(target: &Target) -> Result<Self, TargetError> {
        Ok(Self {
            pid: target.pid,
            own_pid: target.own_pid(),
            is_apart: pid_namespace_of(target.pid)? != pid_namespace()?,
        })
    }
}

impl Criu {
    /// Looks for it, and whether it is new enough.
    ///
    /// # Errors
    /// [`CriuError::Missing`], [`CriuError::Version`].
    pub fn find(config: &HostConfig) -> Result<Self, CriuError> {
        let said = said_by(&config.criu, "--version")?;
        let version = said.lines().find_map(|line| line.strip_prefix("Version: "));
        let is_new_enough = |version: &str| numbers_of(version) >= Some(VERSION_MIN);
        match version
            .map(str::trim)
            .filter(|version| is_new_enough(version))
        {
            Some(version) => Ok(Self {
                config: config.clone(),
                version: version.to_owned(),
            }),
            None => Err(CriuError::Version {
                program: config.criu.clone(),
                found: version
                    .or(said.lines().next())
                    .unwrap_or("silent")
                    .to_owned(),
            }),
        }
    }

    /// Asks it whether it can work here.
    ///
    /// # Errors
    /// [`CriuError::Check`], or that it cannot be started.
    pub fn check(&self) -> Result<(), CriuError> {
        let said = said_by(&self.config.criu, "check")?;
        match said.lines().any(|line| line.trim() == "Looks good.") {
            true => Ok(()),
            false => Err(CriuError::Check {
                said: worst_lines(&said),
            }),
        }
    }

    /// Starts a dump of a tree, which is left stopped. Its images go to the socket in `images_dir`.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn dump(
        &self,
        tree: DumpRoot,
        images_dir: &Path,
        limit: Duration,
    ) -> Result<CriuRun, CriuError> {
        // CRIU's own limit is on the freezing of the tree alone; it is ours that ends it.
        let seconds = limit.as_secs().max(1).to_string();
        let mut args: Vec<OsString> = vec!["dump".into(), "--leave-stopped".into()];
        args.extend(["--tree".into(), tree.own_pid.to_string().into()]);
        args.extend(["--timeout".into(), seconds.into()]);
        args.extend(self.common(images_dir, "dump.log"));
        if self.config.tcp == TcpPolicy::Established {
            args.push("--tcp-established".into());
        }
        for external in &self.config.external {
            args.extend(["--external".into(), external.into()]);
        }
        args.extend(self.config.arguments.iter().map(OsString::from));
        let mut command = match tree.is_apart {
            true => {
                let mut command = Command::new("nsenter");
                command.args(["--target", &tree.pid.to_string(), "--pid", "--mount", "--"]);
                command.arg(&self.config.criu);
                command
            }
            false => Command::new(&self.config.criu),
        };
        command.args(args);
        CriuRun::start(command, "dump", images_dir.join("dump.log"), limit)
    }

    /// The command that restores what is served at the socket in `images_dir`, and leaves the tree running by itself. Its own open file takes the place of each of these (number, and what it was). Whoever runs it becomes the parent of the tree's root, whose pid stands in `pidfile` then.
    pub fn restore_command(
        &self,
        images_dir: &Path,
        pidfile: &Path,
        inherited: &[(usize, &str)],
    ) -> Vec<OsString> {
        let mut args: Vec<OsString> = vec![self.config.criu.clone().into(), "restore".into()];
        args.extend(["--restore-detached".into(), "--pidfile".into()]);
        args.push(pidfile.into());
        for (number, was) in inherited {
            // Paths are known to CRIU without their first slash.
            let was = was.trim_start_matches('/');
            args.extend(["--inherit-fd".into(), format!("fd[{number}]:{was}").into()]);
        }
        args.extend(self.common(images_dir, "restore.log"));
        if self.config.tcp == TcpPolicy::Established {
            args.push("--tcp-established".into());
        }
        for external in &self.config.external {
            args.extend(["--external".into(), external.into()]);
        }
        args.extend(self.config.arguments.iter().map(OsString::from));
        args
    }

    fn common(&self, images_dir: &Path, log: &str) -> Vec<OsString> {
        let mut args: Vec<OsString> = vec!["--stream".into(), "--images-dir".into()];
        args.push(images_dir.into());
        // No plugin lies there: CUDA is ours.
        args.extend(["--libdir".into(), images_dir.into()]);
        args.extend(["--log-file".into(), log.into(), "-v2".into()]);
        if self.config.shell_job {
            args.push("--shell-job".into());
        }
        if self.config.tcp == TcpPolicy::Close {
            args.push("--tcp-close".into());
        }
        args
    }
}

/// A CRIU that was started.
#[derive(Debug)]
pub struct CriuRun {
    child: Child,
    command: &'static str,
    log: PathBuf,
    started: Instant,
    limit: Duration,
}

impl CriuRun {
    /// Starts it, in a process group of its own: a key on our terminal is not for CRIU.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(
        mut command: Command,
        name: &'static str,
        log: PathBuf,
        limit: Duration,
    ) -> Result<Self, CriuError> {
        let program = PathBuf::from(command.get_program());
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.stderr(Stdio::null()).process_group(0).spawn();
        Ok(Self {
            child: child.map_err(|source| CriuError::Missing { program, source })?,
            command: name,
            log,
            started: Instant::now(),
            limit,
        })
    }

    /// Waits for its end, which both sides hear of through `watch`. Where the transfer is given up, by the other side, by `is_cancelled` or because the time is over, its pipes are closed: CRIU then lets the tree go by itself,
    /// which killing it would not do. Only one that does not is killed.
    ///
    /// # Errors
    /// [`CriuError::Failed`], [`CriuError::TooLong`], [`CriuError::GivenUp`]. It has ended then.
    pub fn wait(mut self, watch: &Watch, is_cancelled: impl Fn() -> bool) -> Result<(), CriuError> {
        let ended = self.wait_for_its_end(watch, &is_cancelled);
        watch.has_ended();
        ended
    }

    fn wait_for_its_end(
        &mut self,
        watch: &Watch,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), CriuError> {
        let command = self.command;
        let mut given_up_at = None;
        let mut is_late = false;
        loop {
            let status = self
                .child
                .try_wait()
                .map_err(io_error("waiting for CRIU"))?;
            match (status, given_up_at) {
                (Some(status), None) if status.success() => return Ok(()),
                (Some(status), None) => {
                    return Err(CriuError::Failed {
                        command,
                        status,
                        log: Self::end_of_log(&self.log),
                    });
                }
                (Some(_), Some(_)) if is_late => {
                    return Err(CriuError::TooLong {
                        command,
                        limit: self.limit,
                        log: Self::end_of_log(&self.log),
                    });
                }
                (Some(_), Some(_)) => return Err(CriuError::GivenUp { command }),
                (None, Some(since)) if Instant::elapsed(&since) > GRACE => self.end(),
                (None, None) => {
                    is_late = self.started.elapsed() > self.limit;
                    if is_late || is_cancelled() {
                        watch.give_up();
                    }
                    given_up_at = watch.is_given_up().then(Instant::now);
                }
                (None, Some(_)) => {}
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Ends it for good.
    fn end(&mut self) {
        let pid = i32::try_from(self.child.id()).ok();
        if let Some(group) = pid.and_then(rustix::process::Pid::from_raw) {
            let _gone = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
    }

    pub(crate) fn end_of_log(log: &Path) -> String {
        match fs::read(log) {
            Ok(bytes) => {
                let start = bytes.len().saturating_sub(LOG_LEN_MAX);
                worst_lines(&String::from_utf8_lossy(&bytes[start..]))
            }
            Err(error) => format!("its log {} cannot be read: {error}", log.display()),
        }
    }
}

impl Drop for CriuRun {
    /// One that nobody has waited for lets the tree go when its pipes are closed, or is ended.
    fn drop(&mut self) {
        let since = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if since.elapsed() > GRACE {
                self.end();
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// What a CRIU that is only asked something prints.
fn said_by(program: &Path, word: &str) -> Result<String, CriuError> {
    let missing = |source| CriuError::Missing {
        program: program.to_owned(),
        source,
    };
    let mut child = Command::new(program)
        .arg(word)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(missing)?;
    let started = Instant::now();
    // What it says fits a pipe.
    while matches!(child.try_wait(), Ok(None)) {
        if started.elapsed() > LOOK_TIMEOUT {
            let _ended = child.kill();
        }
        std::thread::sleep(LOOK_EVERY);
    }
    let output = child.wait_with_output().map_err(missing)?;
    let said = [output.stdout, output.stderr].concat();
    Ok(String::from_utf8_lossy(&said).into_owned())
}

/// Major and minor number of a version.
fn numbers_of(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.').map(|number| {
        let digits = number
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(number.len());
        number[..digits].parse().ok()
    });
    Some((numbers.next()??, numbers.next().flatten().unwrap_or(0)))
}

/// The last errors of a log, or else its last lines, as one line.
fn worst_lines(log: &str) -> String {
    let is_error = |line: &&str| line.contains("Error ") || line.contains("Error:");
    let errors: Vec<&str> = log.lines().filter(is_error).collect();
    let lines = match errors.is_empty() {
        true => log.lines().filter(|line| !line.trim().is_empty()).collect(),
        false => errors,
    };
    if lines.is_empty() {
        return "it said nothing".to_owned();
    }
    let from = lines.len().saturating_sub(LOG_LINES);
    lines[from..].join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn stand_in(dir: &Path, script: &str) -> HostConfig {
        let criu = dir.join("criu");
        fs::write(&criu, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&criu, fs::Permissions::from_mode(0o755)).unwrap();
        HostConfig {
            criu,
            ..HostConfig::default()
        }
    }

    #[test]
    fn a_criu_that_is_missing_too_old_or_none_is_refused_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let missing = HostConfig {
            criu: dir.path().join("nothing"),
            ..HostConfig::default()
        };
        let refused = Criu::find(&missing).unwrap_err();
        assert!(matches!(refused, CriuError::Missing { .. }), "{refused:?}");
        for (says, is_taken) in [
            ("Version: 3.17.1", false),
            ("Version: 4.0", false),
            ("Version: 4.1", true),
            ("Version: 4.2-rc1", true),
            ("Version: 5", true),
            ("busybox", false),
            ("", false),
        ] {
            let config = stand_in(dir.path(), &format!("echo '{says}'"));
            let found = Criu::find(&config);
            assert_eq!(found.is_ok(), is_taken, "{says} {found:?}");
            if let Err(error) = found {
                assert!(error.to_string().contains("4.1 or newer"), "{error}");
            }
        }
    }

    #[test]
    fn a_check_that_fails_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let says = |check: &str| {
            let script = format!("case $1 in check) {check};; *) echo 'Version: 4.2';; esac");
            Criu::find(&stand_in(dir.path(), &script)).unwrap().check()
        };
        says("echo 'Looks good.'").unwrap();
        let refused = says("echo 'Error (criu/cr-check.c:9): no ptrace' >&2; exit 1");
        assert!(refused.unwrap_err().to_string().contains("no ptrace"));
    }

    #[test]
    fn a_run_that_fails_or_hangs_carries_its_log() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("dump.log");
        let run = |script: &str, limit: Duration| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            CriuRun::start(command, "dump", log.clone(), limit).unwrap()
        };
        fs::write(&log, "fine\nError (x): no such mount\nfine\n").unwrap();
        let watch = Watch::default();
        let failed = run("exit 1", LOOK_TIMEOUT).wait(&watch, || false);
        let failed = failed.unwrap_err();
        assert!(watch.is_over() && !watch.is_given_up());
        assert!(failed.to_string().contains("no such mount"), "{failed}");
        let (late, told) = (Watch::default(), Watch::default());
        // It goes on until its pipes are closed, which the sleep stands for.
        let hung = run("sleep 0.2", Duration::ZERO).wait(&late, || false);
        assert!(matches!(hung, Err(CriuError::TooLong { .. })) && late.is_given_up());
        let given_up = run("sleep 0.2", LOOK_TIMEOUT).wait(&told, || true);
        assert!(matches!(given_up, Err(CriuError::GivenUp { .. })) && told.is_given_up());
        let watch = Watch::default();
        run("exit 0", LOOK_TIMEOUT).wait(&watch, || false).unwrap();
    }
}
