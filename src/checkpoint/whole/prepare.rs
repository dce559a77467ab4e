//! Everything that can fail or take time before the first lock of a tree: what the tree must be, who of it uses GPUs, memory, the attempt.
//!
//! In: the root of a running tree. Out: [`Prepared`]. What can fail: all of it, with the tree untouched; members that were taken in hand are let go again.

use std::error::Error;
use std::sync::Arc;

use super::super::attempt::{Attempt, Planned};
use super::super::memory::{Memory, TreeLen};
use super::super::{DYING_TIMEOUT, Stopped, custody_failure, target_failure};
use crate::config::{DriverMode, Environment};
use crate::custody::Custody;
use crate::driver::{Driver, DriverCode, DriverError, ProcessState, RunningProcess};
use crate::error::{ExitCode, Failure, Phase, one_line};
use crate::host::{Criu, ProcessTree, must_stand_alone};
use crate::journal::Step;
use crate::manifest::CaptureMode;
use crate::ownership::WhileSaved;
use crate::session::Session;
use crate::target::{Target, TargetError, descendants, parents, pid_namespace, pid_namespace_of};

/// What the tree's images take beside its memory.
const BESIDE_MEMORY: u64 = 64 << 20;

/// All that a save needs, while the tree still runs untouched.
pub(super) struct Prepared {
    pub(super) driver: Arc<Driver>,
    pub(super) criu: Criu,
    /// How the GPUs' memory is saved.
    pub(super) mode: CaptureMode,
    /// As it was before the lock.
    pub(super) tree: ProcessTree,
    /// The processes that use GPUs.
    pub(super) members: Vec<(Custody, RunningProcess)>,
    pub(super) attempt: Attempt,
    pub(super) memory: Memory,
}

pub(super) fn prepare(
    session: &Session,
    root: u32,
    while_saved: WhileSaved,
    nonce: &str,
) -> Result<Prepared, Failure> {
    let refused = |cause: Box<dyn Error + Send + Sync>| {
        Failure::new(ExitCode::Preflight, Phase::Prepare, cause)
    };
    let driver = Driver::open().map_err(|error| refused(error.into()))?;
    let mode = mode(session.config.driver.mode, &driver).map_err(|error| refused(error.into()))?;
    let tree = ProcessTree::look(root).map_err(target_failure)?;
    let criu = Criu::find(&session.config.host).map_err(|error| refused(error.into()))?;
    criu.check().map_err(|error| refused(error.into()))?;
    if let Some(stopped) = tree.processes().iter().find_map(stopped) {
        return Err(refused(stopped.into()));
    }
    let users = gpu_users(&driver, root).map_err(|error| refused(error.into()))?;
    let users: Vec<u32> = users.into_iter().map(|(pid, _)| pid).collect();
    if users.is_empty() {
        return Err(refused(NoGpuUser { root }.into()));
    }
    if let Some(stray) = stray(&tree).map_err(|error| refused(error.into()))? {
        return Err(refused(stray.into()));
    }
    let mut others = tree.processes().iter();
    if let Some(heir) = others.find(|it| !users.contains(&it.pid) && has_inherited(it)) {
        let (pid, name) = (heir.pid, heir.name.clone());
        return Err(refused(Heir { pid, name }.into()));
    }
    must_stand_alone(&tree, &session.config.host).map_err(|error| refused(error.into()))?;
    let mut members = Vec::with_capacity(users.len());
    for pid in users {
        let custody = match Custody::take(session, pid, "checkpoint") {
            Ok(custody) => custody,
            Err(error) => return Err(end_all(members, custody_failure(error))),
        };
        let running = RunningProcess::attach(&driver, pid);
        let running = running.map_err(|error| {
            let code = match error {
                DriverError::WrongState { .. } => ExitCode::NotOurs,
                // It ended between the two looks; the others run.
                _ if custody.target.ends_within(DYING_TIMEOUT) => match tree.root().pid == pid {
                    true => ExitCode::NothingToSave,
                    false => ExitCode::RolledBack,
                },
                _ => ExitCode::Preflight,
            };
            Failure::new(code, Phase::Prepare, error)
        });
        match running {
            Ok(running) => members.push((custody, running)),
            Err(failure) => {
                custody.end(failure.code);
                return Err(end_all(members, failure));
            }
        }
    }
    let expected = match mode {
        CaptureMode::Staged => staged_memory(&driver, &tree),
        CaptureMode::CustomStorage => Ok(tree.memory_in_use()),
    };
    let expected = match expected {
        Ok(expected) => expected.saturating_add(BESIDE_MEMORY),
        Err(cause) => return Err(end_all(members, refused(cause))),
    };
    let len = TreeLen {
        // The tree is locked until it is dumped: it does not grow by as much again.
        most: expected.saturating_mul(2),
        expected,
    };
    let mut objects = Vec::new();
    let mut gpus = None;
    if mode == CaptureMode::CustomStorage {
        // Of members that share a GPU each has a run of its own.
        gpus = Some((&driver, members.len()));
        for (index, (custody, _)) in members.iter().enumerate() {
            objects.extend(Planned::of_gpus(&driver, index, &custody.target));
        }
    }
    let memory = match Memory::allocate_for_tree(session, gpus, len) {
        Ok(memory) => memory,
        Err(failure) => return Err(end_all(members, failure)),
    };
    // A dump that CRIU gives up is tried once more, to an object of its own.
    objects.extend([Planned::of_host(tree.root()), Planned::of_host(tree.root())]);
    let nonce = nonce.to_owned();
    let opened = Attempt::open(
        session,
        &driver,
        &members[0].0,
        nonce,
        Some(while_saved),
        &objects,
    );
    let attempt = match opened {
        Ok(attempt) => attempt,
        Err(failure) => return Err(end_all(members, failure)),
    };
    // `recover` looks at each member by itself, and has to know of the save for each.
    let step = Step::Attempt {
        attempt: attempt.nonce.clone(),
        next_slot: attempt.next_slot,
    };
    let of_tree = Step::Tree {
        root: tree.root().pid,
        root_start: tree.root().start_time,
    };
    let mut others = members.iter().skip(1);
    let noted = others.try_for_each(|(custody, _)| custody.step(&step));
    let mut all = members.iter();
    let noted = noted.and_then(|()| all.try_for_each(|(custody, _)| custody.step(&of_tree)));
    if let Err(error) = noted {
        let mut failure = refused(error.into());
        failure.attached = attempt.close(session, &[], true);
        return Err(end_all(members, failure));
    }
    Ok(Prepared {
        driver,
        criu,
        mode,
        tree,
        members,
        attempt,
        memory,
    })
}

/// Lets go of members that nothing was done to.
fn end_all(members: Vec<(Custody, RunningProcess)>, failure: Failure) -> Failure {
    for (custody, _running) in members {
        custody.end(failure.code);
    }
    failure
}

/// The processes of a tree that have CUDA state, and what state: in order of their pids.
pub(crate) fn gpu_users(
    driver: &Driver,
    root: u32,
) -> Result<Vec<(u32, ProcessState)>, DriverError> {
    let has_none = |error: &DriverError| error.code() == Some(DriverCode::NOT_INITIALIZED);
    let mut users = Vec::new();
    for pid in descendants(root) {
        let state = match driver.state(pid) {
            Err(error) if !has_none(&error) => driver.state_for_a_verdict(pid),
            state => state,
        };
        match state {
            Ok(state) => users.push((pid, state)),
            // Without CUDA, or gone since.
            Err(error) if has_none(&error) => {}
            Err(_) if Target::look(pid).is_err() => {}
            Err(error) => return Err(error),
        }
    }
    users.sort_unstable_by_key(|(pid, _)| *pid);
    Ok(users)
}

/// Through custom storage where that is to be had, unless it is not to be.
fn mode(wanted: DriverMode, driver: &Driver) -> Result<CaptureMode, DriverError> {
    driver.require_checkpoint()?;
    match (wanted, driver.require_custom_storage()) {
        (DriverMode::Staged, _) | (DriverMode::Auto, Err(_)) => Ok(CaptureMode::Staged),
        (_, Ok(())) => Ok(CaptureMode::CustomStorage),
        (DriverMode::CustomStorage, Err(error)) => Err(error),
    }
}

/// Bytes that the tree's memory will have when the GPUs' is in it. Refused where the system has no room for that.
fn staged_memory(
    driver: &Arc<Driver>,
    tree: &ProcessTree,
) -> Result<u64, Box<dyn Error + Send + Sync>> {
    driver.retain_contexts()?;
    let used = driver.used_memory_of_all()?;
    let needed = used.into_iter().fold(0, u64::saturating_add);
    tracing::info!(
        "this save is staged: {needed} bytes of GPU memory go through host memory, because {}",
        match driver.require_custom_storage() {
            Err(error) => one_line(&error),
            Ok(()) => "that is asked for (driver.mode)".to_owned(),
        }
    );
    if let Some(available) = Environment::read().memory_available
        && available < needed
    {
        return Err(NoRoom { needed, available }.into());
    }
    Ok(tree.memory_in_use().saturating_add(needed))
}

/// A process beside the tree in its pid namespace, which would be ended with it: its parent has ended, and it hangs on process 1.
fn stray(tree: &ProcessTree) -> Result<Option<Stray>, TargetError> {
    let theirs = pid_namespace_of(tree.root().pid)?;
    if theirs == pid_namespace()? {
        return Ok(None);
    }
    // Whoever came from the root has a parent in the tree; only process 1 takes in those that have none.
    let parents = parents();
    let root = tree.root().pid;
    let init = parents.get(&root);
    let mut beside = parents
        .iter()
        .filter(|(pid, parent)| **pid != root && Some(*parent) == init);
    let stray = beside.find_map(|(pid, _)| Target::look(*pid).ok());
    Ok(stray.map(|it| Stray {
        pid: it.pid,
        name: it.name.clone(),
    }))
}

#[derive(Debug, thiserror::Error)]
#[error(
    "process {pid} ({name}) of the tree's pid namespace is no part of the tree any more, because its parent has ended: it would be lost; have a parent wait for it"
)]
struct Stray {
    pid: u32,
    name: String,
}

/// Whether a process that does not use GPUs has the driver's memory mapped: it was forked from one that does.
fn has_inherited(process: &Target) -> bool {
    let mapped = process.mapped_paths();
    mapped
        .iter()
        .any(|path| path.starts_with("/dev") && path.to_string_lossy().contains("nvidia"))
}

#[derive(Debug, thiserror::Error)]
#[error(
    "process {pid} ({name}) of the tree was forked from one that uses a GPU, and has the driver's memory mapped, which CRIU cannot save: have such processes started before the first CUDA call (PyTorch: make the DataLoader's iterator before the first .cuda())"
)]
struct Heir {
    pid: u32,
    name: String,
}

/// Nobody to save.
#[derive(Debug, thiserror::Error)]
#[error("no process of the tree of {root} uses a GPU (--pid)")]
struct NoGpuUser {
    root: u32,
}

#[derive(Debug, thiserror::Error)]
#[error(
    "{needed} bytes of GPU memory go through host memory, of which {available} bytes are left; free some, raise the cgroup's limit, or use a driver with custom storage (API 13.4)"
)]
struct NoRoom {
    needed: u64,
    available: u64,
}

fn stopped(process: &Target) -> Option<Stopped> {
    let what = process.why_not_scheduled()?;
    let pid = process.pid;
    Some(Stopped { pid, what })
}
