//! A process and all that came from it, as one thing: looked at, let go on, ended.
//!
//! In: the root's pid. Out: every process of the tree, by its pidfd. What can fail: a process cannot be looked at; one that does not end.

use std::io;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::target::{Target, TargetError, descendants};

/// See the module.
#[derive(Debug)]
pub struct ProcessTree {
    /// The root first.
    processes: Vec<Target>,
}

impl ProcessTree {
    /// Looks at the tree as it is now. A process that ends meanwhile is not of it.
    ///
    /// # Errors
    /// The root is gone; another one cannot be looked at.
    pub fn look(root: u32) -> Result<Self, TargetError> {
        let mut processes = vec![Target::look(root)?];
        for pid in descendants(root).into_iter().skip(1) {
            match Target::look(pid) {
                Ok(process) => processes.push(process),
                Err(TargetError::Gone { .. } | TargetError::Ended { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Self { processes })
    }

    /// The root.
    pub fn root(&self) -> &Target {
        &self.processes[0]
    }

    /// All of it, the root first.
    pub fn processes(&self) -> &[Target] {
        &self.processes
    }

    /// Pids in the innermost namespace of each, in order.
    pub fn own_pids(&self) -> Vec<u32> {
        let mut pids: Vec<u32> = self.processes.iter().map(Target::own_pid).collect();
        pids.sort_unstable();
        pids
    }

    /// Bytes of memory that all of it has in use. Pages that are shared count for each.
    pub fn memory_in_use(&self) -> u64 {
        self.processes.iter().map(Target::memory_in_use).sum()
    }

    /// Lets whatever is stopped go on.
    ///
    /// # Errors
    /// The kernel's; not for a process that has ended.
    pub fn go_on(&self) -> io::Result<()> {
        for process in &self.processes {
            process.signal(Signal::CONT)?;
        }
        Ok(())
    }

    /// Ends all of it, and waits for that. Whether all have ended in time.
    pub fn end(&self, timeout: Duration) -> io::Result<bool> {
        for process in &self.processes {
            process.kill()?;
        }
        let started = Instant::now();
        let left = || timeout.saturating_sub(started.elapsed());
        Ok(self
            .processes
            .iter()
            .all(|process| process.ends_within(left())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_tree_is_stopped_let_go_on_and_ended_with_all_its_children() {
        let mut shell = Command::new("sh")
            .args(["-c", "sleep 60 & sleep 60 & wait"])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let started = Instant::now();
        let tree = loop {
            let tree = ProcessTree::look(shell.id()).unwrap();
            if tree.processes().len() == 3 || started.elapsed() > Duration::from_secs(20) {
                break tree;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        assert_eq!(tree.processes().len(), 3);
        assert_eq!(tree.root().pid, shell.id());
        assert!(tree.memory_in_use() > 0);
        assert!(tree.own_pids().contains(&shell.id()));
        let is_stopped = |process: &Target| process.why_not_scheduled() == Some("stopped");
        let all_are = |stopped: bool| {
            let started = Instant::now();
            while tree.processes().iter().any(|it| is_stopped(it) != stopped) {
                assert!(started.elapsed() < Duration::from_secs(20));
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        for process in tree.processes() {
            process.signal(Signal::STOP).unwrap();
        }
        all_are(true);
        tree.go_on().unwrap();
        all_are(false);
        // Those whose parent is gone are collected by somebody else, in their own time.
        assert!(tree.end(Duration::from_secs(20)).unwrap());
        shell.wait().unwrap();
    }
}
