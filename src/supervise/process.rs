//! The job as a process: started by us, or found.
//!
//! In: a program and its arguments, or a pid. Out: a [`JobProcess`], whose end is waited for, which can be signalled and ended. What can fail: the start; and a process that was found has a status that only its parent knows.
//!
//! A job that we start has a process group of its own, and the terminal, if we had it. So a signal to our group (a key on the terminal, `kill -TERM -PGID`) reaches us or the job, and not both.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use tokio::sync::watch;

use crate::host::namespace::process_one;
use crate::restore::RestoredTree;
use crate::target::{Target, TargetError, descendants};

/// How a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// It exited.
    Exited(i32),
    /// A signal ended it.
    Signalled(i32),
    /// It is gone; it was not our child, so nobody told us.
    Unknown,
}

impl Status {
    fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Exited(code),
            (None, Some(signal)) => Self::Signalled(signal),
            (None, None) => Self::Unknown,
        }
    }

    /// As a shell says it: 128 and the signal's number. A job of which nothing is known counts as one that did well.
    pub fn code(self) -> u8 {
        match self {
            Self::Exited(code) => u8::try_from(code & 0xff).unwrap_or(u8::MAX),
            Self::Signalled(signal) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
            Self::Unknown => 0,
        }
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exited with {code}"),
            Self::Signalled(signal) => write!(f, "was ended by signal {signal}"),
            Self::Unknown => f.write_str("ended"),
        }
    }
}

/// Whom a signal for the job reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// The process alone: it was found, and its group is not ours.
    Process,
    /// The process group that it leads.
    Group,
    /// Process 1 of the namespace that its tree has for itself, which passes it on to the tree's root.
    Namespace { init: u32, root: u32 },
}

/// How long a namespace may take to have a process 1, and that one a child.
const NAMESPACE_WITHIN: Duration = Duration::from_secs(10);

/// A job that runs, or has ended.
#[derive(Debug, Clone)]
pub struct JobProcess {
    /// In our pid namespace.
    pub pid: u32,
    /// The very process; `None` where it ended before it could be looked at.
    target: Option<Arc<Target>>,
    /// Whom a signal reaches.
    reach: Reach,
    ended: watch::Receiver<Option<Status>>,
}

impl JobProcess {
    /// Starts a program.
    ///
    /// # Errors
    /// There is no such program, or the system has no process left.
    pub fn start(program: &OsString, args: &[OsString]) -> io::Result<Self> {
        let child = Command::new(program).args(args).process_group(0).spawn()?;
        give_terminal(child.id());
        Self::of_child(child, Reach::Group)
    }

    /// Starts a program as the root of a tree that is to be saved whole: in a pid namespace of its own, so that it can have its pids elsewhere, too.
    ///
    /// # Errors
    /// There is no such program, or the system gives no namespace (root is needed).
    pub fn start_tree(program: &OsString, args: &[OsString]) -> io::Result<Self> {
        // What ends at once later on is the job, and not its namespace.
        let probed = process_one("true".as_ref(), &[]).output()?;
        if !probed.status.success() {
            let said = String::from_utf8_lossy(&probed.stderr).trim().to_owned();
            return Err(io::Error::other(format!(
                "no pid namespace can be made for its tree (host.save, driver.mode): {said}"
            )));
        }
        let mut ours: Vec<OsString> = vec!["init".into(), "--".into(), program.clone()];
        ours.extend_from_slice(args);
        let command = process_one(&std::env::current_exe()?, &ours);
        let mut child = { command }.process_group(0).spawn()?;
        let started = Instant::now();
        loop {
            // `unshare`, process 1, the tree's root.
            if let [_, init, root, ..] = descendants(child.id())[..] {
                return Self::of_child(child, Reach::Namespace { init, root });
            }
            // A job that has ended already is one that ended.
            if child.try_wait()?.is_some() {
                return Self::of_child(child, Reach::Process);
            }
            if started.elapsed() > NAMESPACE_WITHIN {
                for pid in descendants(child.id()).into_iter().rev() {
                    let _gone = Target::look(pid).map(|target| target.kill());
                }
                child.wait()?;
                let why = "its pid namespace does not come up";
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A tree that was restored.
    ///
    /// # Errors
    /// The system has no thread left; the tree is ended then.
    pub fn restored_tree(tree: RestoredTree) -> io::Result<Self> {
        let RestoredTree { child, init, root } = tree;
        let job = Self::of_child(child, Reach::Namespace { init, root });
        if job.is_err() {
            let _gone = Target::look(init).map(|init| init.kill());
        }
        job
    }

    fn of_child(mut child: Child, reach: Reach) -> io::Result<Self> {
        let pid = child.id();
        let target = Target::look(pid).ok().map(Arc::new);
        let (tell, ended) = watch::channel(None);
        std::thread::Builder::new()
            .name("job".to_owned())
            .spawn(move || {
                // It is our child, and nobody else waits for it.
                let status = child.wait().map_or(Status::Unknown, Status::of);
                let status = match (status, reach) {
                    // Process 1 says it as a shell does.
                    (Status::Exited(code @ 129..=192), Reach::Namespace { .. }) => {
                        Status::Signalled(code - 128)
                    }
                    (status, _) => status,
                };
                tell.send_replace(Some(status));
            })?;
        Ok(Self {
            pid,
            target,
            reach,
            ended,
        })
    }

    /// Root of the tree that is saved where all of it is.
    pub fn tree_root(&self) -> u32 {
        match self.reach {
            Reach::Namespace { root, .. } => root,
            Reach::Process | Reach::Group => self.pid,
        }
    }

    /// A process that runs already.
    ///
    /// # Errors
    /// There is no such process.
    pub fn find(pid: u32) -> Result<Self, TargetError> {
        let target = Arc::new(Target::look(pid)?);
        let (tell, ended) = watch::channel(None);
        let watched = Arc::clone(&target);
        std::thread::Builder::new()
            .name("job".to_owned())
            .spawn(move || {
                while !watched.ends_within(Duration::from_secs(3600)) {
                    if tell.is_closed() {
                        return;
                    }
                }
                tell.send_replace(Some(Status::Unknown));
            })
            .map_err(|source| TargetError::Look {
                pid,
                path: "a thread that waits for it".to_owned(),
                source,
            })?;
        Ok(Self {
            pid,
            target: Some(target),
            reach: Reach::Process,
            ended,
        })
    }

    /// How it ended, if it has.
    pub fn status(&self) -> Option<Status> {
        *self.ended.borrow()
    }

    /// Waits for its end.
    pub async fn ended(&self) -> Status {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(status) => status.unwrap_or(Status::Unknown),
            // Whoever waited for it is gone; so is it.
            Err(_) => Status::Unknown,
        }
    }

    /// Sends a signal to its process group, to process 1 of its namespace, or to it alone where the group is not ours.
    pub fn signal(&self, signal: Signal) {
        if self.status().is_some() {
            return;
        }
        let reached = match self.reach {
            Reach::Namespace { init, .. } => init,
            Reach::Process | Reach::Group => self.pid,
        };
        let Some(pid) = i32::try_from(reached).ok().and_then(Pid::from_raw) else {
            return;
        };
        let sent = match self.reach {
            Reach::Group => rustix::process::kill_process_group(pid, signal),
            Reach::Process | Reach::Namespace { .. } => rustix::process::kill_process(pid, signal),
        };
        if let Err(errno) = sent {
            tracing::debug!("signal {signal:?} did not reach the job: {errno}");
        }
    }

    /// Ends it, everything that came from it, and what is in its group. Whether it has ended within this time.
    pub fn end(&self, within: Duration) -> bool {
        // Before their parent is gone, and they cannot be found any more.
        let members = descendants(self.pid).into_iter().skip(1);
        let mut doomed: Vec<Target> = members.filter_map(|pid| Target::look(pid).ok()).collect();
        doomed.retain(|target| target.kill().is_ok());
        if let Some(target) = &self.target
            && let Err(error) = target.kill()
        {
            tracing::warn!("the job could not be ended: {error}");
        }
        if let Some(group) = i32::try_from(self.pid).ok().and_then(Pid::from_raw)
            && self.reach == Reach::Group
        {
            // Its leader may have been collected; nobody else has its number while a member lives.
            let _none_left = rustix::process::kill_process_group(group, Signal::KILL);
        }
        let until = Instant::now() + within;
        doomed
            .iter()
            .chain(self.target.as_deref())
            .all(|target| target.ends_within(until.saturating_duration_since(Instant::now())))
    }
}

/// The job has the terminal from now on, if it was ours: otherwise it would be stopped when it reads from it.
fn give_terminal(pid: u32) {
    let stdin = io::stdin();
    let Some(group) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return;
    };
    if !stdin.is_terminal() {
        return;
    }
    let is_ours = rustix::termios::tcgetpgrp(&stdin)
        .is_ok_and(|foreground| foreground == rustix::process::getpgrp());
    if is_ours && let Err(errno) = rustix::termios::tcsetpgrp(&stdin, group) {
        tracing::debug!("the job does not have the terminal: {errno}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> JobProcess {
        JobProcess::start(&"sh".into(), &["-c".into(), script.into()]).unwrap()
    }

    #[tokio::test]
    async fn its_status_is_told_as_a_shell_tells_it() {
        for (script, status, code) in [
            ("exit 0", Status::Exited(0), 0),
            ("exit 7", Status::Exited(7), 7),
            ("kill -TERM $$", Status::Signalled(15), 143),
        ] {
            let job = shell(script);
            let ended = job.ended().await;
            assert_eq!((ended, ended.code()), (status, code), "{script}");
            assert_eq!(job.status(), Some(status));
        }
        assert!(JobProcess::start(&"/nowhere/at/all".into(), &[]).is_err());
    }

    #[tokio::test]
    async fn the_whole_group_is_signalled_and_ended() {
        // The child of the shell holds the pipe open as long as it lives.
        let job = shell("sleep 60 & wait");
        job.signal(Signal::TERM);
        assert_eq!(job.ended().await, Status::Signalled(15));
        let job = shell("trap '' TERM; sleep 60 & wait");
        assert!(job.end(Duration::from_secs(10)));
        assert_eq!(job.ended().await, Status::Signalled(9));
    }

    #[tokio::test]
    async fn a_process_that_was_found_has_no_status() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let job = JobProcess::find(child.id()).unwrap();
        assert!(job.status().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(job.ended().await, Status::Unknown);
        assert!(JobProcess::find(child.id()).is_err());
    }
}
