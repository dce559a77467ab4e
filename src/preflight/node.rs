//! This node and the target: the driver, the rights, host memory, the spill, and whether a save fits into a notice.
//!
//! In: the configuration, `/proc`, the driver, perhaps a pid. Out: checks. Nothing is locked, and no GPU memory is taken but by a context for the look at what the target uses.

use std::fs::OpenOptions;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{Access, access, statvfs};
use rustix::process::{Resource, getrlimit, getuid};

use super::{Check, State, Subject, smi};
use crate::checkpoint::{Asked, plan, saves_whole_trees};
use crate::config::{Config, DriverMode, Environment};
use crate::driver::{ApiVersion, Driver, ProcessState};
use crate::error::one_line;
use crate::host::Criu;
use crate::journal;
use crate::target::{Target, descendants};

const DRIVER: Subject = Subject {
    name: "node.driver",
    why: "GPU memory is got at through the CUDA driver: its custom storage, from API 13.4 on, or host memory and CRIU, from driver 570 on",
    gravity: State::Failed,
    mend: "update the NVIDIA driver; in a container, have its libcuda mounted (NVIDIA container toolkit)",
};
const CRIU: Subject = Subject {
    name: "node.criu",
    why: "saves are of the whole process tree (driver.mode, host.save, or a driver without custom storage), which CRIU dumps and restores",
    gravity: State::Failed,
    mend: "install CRIU 4.1 or newer (scripts/install-criu.sh), name it with host.criu, and run as root",
};
const STAGING: Subject = Subject {
    name: "node.staging",
    why: "without custom storage the driver copies GPU memory into host memory, where there has to be room for it",
    gravity: State::Failed,
    mend: "free host memory, raise the cgroup's limit, or use a driver with API 13.4",
};
const MODE: Subject = Subject {
    name: "node.gpu-mode",
    why: "NVIDIA documents MIG and MPS as unsupported by checkpoints, whatever the driver answers",
    gravity: State::Warning,
    mend: "stop MPS for this job (CUDA_MPS_PIPE_DIRECTORY), and switch MIG off (nvidia-smi -mig 0)",
};
const MEMORY: Subject = Subject {
    name: "node.host-memory",
    why: "buffers, frames and tables are allocated before the target is locked",
    gravity: State::Failed,
    mend: "raise the cgroup's memory limit, or lower pipeline.memory_budget or pipeline.chunk_size",
};
const STATE: Subject = Subject {
    name: "node.state-dir",
    why: "what is under way is written down there, so that `recover` knows of it when we die",
    gravity: State::Failed,
    mend: "set job.state_dir to a directory of our own user that others cannot write to",
};
const SPILL: Subject = Subject {
    name: "node.spill",
    why: "a save that the store does not take in time goes there, with room for all GPUs' memory set aside first",
    gravity: State::Warning,
    mend: "make room, or set spill.path to a larger disk",
};
const PROCESS: Subject = Subject {
    name: "target.process",
    why: "the driver locks one process, by its pid in our pid namespace",
    gravity: State::Failed,
    mend: "give the pid of the process that uses the GPUs, as this namespace knows it (--pid)",
};
const RIGHTS: Subject = Subject {
    name: "target.rights",
    why: "without the right to trace it, the driver answers 304 (OPERATING_SYSTEM) and says no more",
    gravity: State::Failed,
    mend: "run as the target's user or with CAP_SYS_PTRACE",
};
const FIT: Subject = Subject {
    name: "deadline.fit",
    why: "a save that does not end before the node does is none",
    gravity: State::Warning,
    mend: "a faster way to the store, a spill (spill.path, preempt.deadline_policy = \"spill\"), or saves in passing (job.interval)",
};

/// What was seen of it.
#[derive(Debug, Default)]
pub(super) struct Node {
    checks: Vec<Check>,
    /// Bytes of GPU memory that a save would move at most, and whether the target uses them now.
    to_save: Option<(u64, bool)>,
}

impl Node {
    /// Looks at everything here.
    pub(super) fn look(config: &Config, pid: Option<u32>) -> Self {
        let mut node = Self::default();
        node.checks.push(state_dir(config));
        let driver = match Driver::open() {
            Ok(driver) => driver,
            Err(error) => {
                node.checks.push(DRIVER.wrong(one_line(&error)));
                node.checks
                    .extend(pid.map(|pid| of_target(None, pid)).into_iter().flatten());
                return node;
            }
        };
        let whole = saves_whole_trees(config, Asked::ForAJob);
        node.checks.push(of_driver(&driver, whole));
        if whole {
            node.checks.push(of_criu(config));
        }
        node.checks.push(gpu_mode());
        let ours = driver.devices().iter().map(|gpu| gpu.uuid.to_string());
        node.checks.extend(smi::look(&ours.collect::<Vec<_>>()));
        node.checks.push(host_memory(config, &driver));
        let all: u64 = driver.devices().iter().map(|gpu| gpu.memory_len).sum();
        node.to_save = Some((all, false));
        if let Some(pid) = pid {
            node.checks.extend(of_target(Some(&driver), pid));
            if let Some(used) = used(&driver) {
                node.to_save = Some((used, true));
            }
        }
        let staged = whole
            && (config.driver.mode == DriverMode::Staged
                || driver.require_custom_storage().is_err());
        if let (true, Some((bytes, true))) = (staged, node.to_save) {
            node.checks.push(staging(bytes));
        }
        node.checks
            .extend(spill(config, node.to_save.map_or(0, |(bytes, _)| bytes)));
        node
    }

    /// The driver, or a file system, does not answer.
    pub(super) fn hangs(after: Duration) -> Self {
        let found =
            format!("neither the driver nor this node's file systems answered within {after:.0?}");
        let mend = "see `dmesg` for NVRM messages, and whether a mount hangs; a node whose driver hangs cannot save";
        Self {
            checks: vec![DRIVER.wrong_to_mend(found, mend)],
            to_save: None,
        }
    }

    /// The system has no thread left.
    pub(super) fn without_a_thread(error: &std::io::Error) -> Self {
        let found = format!("a thread cannot be started: {error}");
        let mend = "raise the limit of processes (ulimit -u, pids.max)";
        Self {
            checks: vec![MEMORY.wrong_to_mend(found, mend)],
            to_save: None,
        }
    }

    /// With the store's rate it is known what fits.
    pub(super) fn checks_with(self, config: &Config, upload_rate: Option<f64>) -> Vec<Check> {
        let mut checks = self.checks;
        if let (Some((bytes, is_used)), Some(rate)) = (self.to_save, upload_rate) {
            checks.push(fit(config, bytes, is_used, rate));
        }
        checks
    }
}

fn state_dir(config: &Config) -> Check {
    let dir = config.state_dir();
    match journal::make_dir(&dir) {
        Ok(()) => STATE.ok(dir.display().to_string()),
        Err(error) => STATE.wrong(one_line(&error)),
    }
}

fn of_criu(config: &Config) -> Check {
    let found = Criu::find(&config.host).and_then(|criu| criu.check().map(|()| criu.version));
    match found {
        Ok(version) => CRIU.ok(format!("CRIU {version}, and it can work here")),
        Err(error) => CRIU.wrong(one_line(&error)),
    }
}

fn staging(needed: u64) -> Check {
    let mib = |bytes: u64| bytes >> 20;
    let found = format!("{} MiB of GPU memory are in use", mib(needed));
    match Environment::read().memory_available {
        Some(available) if available < needed => STAGING.wrong(format!(
            "{found}, and {} MiB of host memory are left by the system and the cgroup",
            mib(available)
        )),
        Some(available) => STAGING.ok(format!(
            "{found}, {} MiB of host memory are left",
            mib(available)
        )),
        None => STAGING.ok(found),
    }
}

fn of_driver(driver: &Driver, whole: bool) -> Check {
    let names: Vec<&str> = driver
        .devices()
        .iter()
        .map(|gpu| gpu.name.as_str())
        .collect();
    let version = driver
        .driver_version()
        .map(|version| format!("driver {version}, "));
    let found = format!(
        "{}API {}; {} GPUs: {}",
        version.unwrap_or_default(),
        ApiVersion(driver.api_version()),
        names.len(),
        names.join(", ")
    );
    match driver.require_custom_storage() {
        _ if names.is_empty() => DRIVER.wrong_to_mend(
            found,
            "give this process GPUs (CUDA_VISIBLE_DEVICES, the container's devices)",
        ),
        _ if whole => match driver.require_checkpoint() {
            Ok(()) => DRIVER.ok(format!("{found}; staged through host memory")),
            Err(error) => DRIVER.wrong(format!("{}; {found}", one_line(&error))),
        },
        Ok(()) => DRIVER.ok(format!("{found}; custom storage")),
        Err(error) => DRIVER.wrong(format!("{}; {found}", one_line(&error))),
    }
}

/// What can be seen without the management library.
fn gpu_mode() -> Check {
    let pipes = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY");
    let pipes = pipes.map_or_else(|| "/tmp/nvidia-mps".into(), std::path::PathBuf::from);
    let capabilities = Path::new("/proc/driver/nvidia/capabilities");
    let mut gpus = std::fs::read_dir(capabilities)
        .into_iter()
        .flatten()
        .flatten();
    // Where MIG is on, every instance is a directory there.
    let has_instances = |gpu: std::fs::DirEntry| {
        std::fs::read_dir(gpu.path().join("mig")).is_ok_and(|mut instances| {
            instances
                .any(|it| it.is_ok_and(|it| it.file_name().to_string_lossy().starts_with("gi")))
        })
    };
    if pipes.join("control").exists() {
        return MODE.wrong(format!("an MPS daemon listens in {}", pipes.display()));
    }
    match gpus.any(has_instances) {
        true => MODE.wrong("MIG is on"),
        false => MODE.ok("no sign of MIG or MPS"),
    }
}

fn host_memory(config: &Config, driver: &Driver) -> Check {
    let plan = match plan(config, driver) {
        Ok(plan) => plan,
        Err(failure) => return MEMORY.wrong(one_line(failure.cause.as_ref())),
    };
    let mib = |bytes: u64| bytes >> 20;
    let needed = plan.total_bytes;
    let available = Environment::read().memory_available;
    // The driver pins for us, and a limit of the shell is not known to count for it; who wonders about buffers that are not pinned wants to see it.
    let limit = getrlimit(Resource::Memlock).current;
    let limit = limit.map_or("unlimited".to_owned(), |bytes| {
        format!("{} MiB", mib(bytes))
    });
    let found = format!("a save plans {} MiB (memlock {limit})", mib(needed));
    match available {
        Some(available) if available < needed => MEMORY.wrong(format!(
            "{found}, and {} MiB are left by the system and the cgroup",
            mib(available)
        )),
        Some(available) => MEMORY.ok(format!("{found}, of {} MiB that are left", mib(available))),
        None => MEMORY.ok(found),
    }
}

fn of_target(driver: Option<&Arc<Driver>>, pid: u32) -> Vec<Check> {
    let target = match Target::look(pid) {
        Ok(target) => target,
        Err(error) => return vec![PROCESS.wrong(one_line(&error))],
    };
    let mut checks = Vec::new();
    if let Some(what) = target.why_not_scheduled() {
        let found = format!(
            "process {pid} ({}) is {what}, so the driver cannot lock it",
            target.name
        );
        let mend = format!("continue it (kill -CONT {pid}), or thaw its cgroup");
        checks.push(PROCESS.wrong_to_mend(found, mend));
    }
    checks.push(rights(&target));
    let Some(driver) = driver else {
        return checks;
    };
    let state = |pid: u32| driver.state(pid);
    checks.push(match state(pid) {
        Ok(ProcessState::Running) => PROCESS.ok(format!(
            "process {pid} ({}) uses CUDA, and runs",
            target.name
        )),
        Ok(state) => PROCESS.wrong_to_mend(
            format!("process {pid} ({}) is {state}", target.name),
            "`ckptstream recover` says what is to be done about it",
        ),
        Err(error) => {
            let found = format!(
                "process {pid} ({}) cannot be saved: {}",
                target.name,
                one_line(&error)
            );
            let others = descendants(pid).into_iter().skip(1);
            let users: Vec<u32> = others.filter(|pid| state(*pid).is_ok()).collect();
            match users.as_slice() {
                [] => PROCESS.wrong(found),
                users => PROCESS.wrong_to_mend(
                    found,
                    format!(
                        "it is the wrapper of {users:?}, which use CUDA: give --pid {}",
                        users[0]
                    ),
                ),
            }
        }
    });
    checks
}

/// What the kernel lets us do to it.
fn rights(target: &Target) -> Check {
    let pid = target.pid;
    // The kernel asks for the right to trace when this is opened.
    let opened = OpenOptions::new()
        .read(true)
        .open(format!("/proc/{pid}/mem"));
    let ours = getuid().as_raw();
    let uid = std::fs::metadata(format!("/proc/{pid}")).map(|found| found.uid());
    let theirs = uid.map_or_else(|_| "unknown".to_owned(), |uid| uid.to_string());
    let yama = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    let yama = yama.map_or_else(|_| "absent".to_owned(), |text| text.trim().to_owned());
    let found = format!(
        "our uid {ours}, its uid {theirs}, CAP_SYS_PTRACE {}, yama/ptrace_scope {yama}, pids of it in namespaces {:?}",
        if has_cap_sys_ptrace() { "yes" } else { "no" },
        target.ns_pids
    );
    match opened {
        Ok(_file) => RIGHTS.ok(found),
        Err(error) => RIGHTS.wrong(format!("it may not be traced ({error}): {found}")),
    }
}

fn has_cap_sys_ptrace() -> bool {
    const CAP_SYS_PTRACE: u32 = 19;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    bits.is_some_and(|bits| bits >> CAP_SYS_PTRACE & 1 == 1)
}

/// Bytes that the GPUs have in use; this takes a context of each.
fn used(driver: &Driver) -> Option<u64> {
    driver.retain_contexts().ok()?;
    let used = driver.used_memory_of_all().ok()?;
    Some(used.into_iter().sum())
}

fn spill(config: &Config, to_save: u64) -> Option<Check> {
    let path = &config.spill.place.as_ref()?.path;
    let name = path.display();
    let free = match statvfs(path) {
        Ok(found) => found.f_bavail * found.f_frsize,
        Err(errno) => return Some(SPILL.wrong(format!("{name} (spill.path): {errno}"))),
    };
    if let Err(errno) = access(path, Access::WRITE_OK | Access::EXEC_OK) {
        return Some(SPILL.wrong_to_mend(
            format!("{name} (spill.path) cannot be written to: {errno}"),
            "make it ours to write to",
        ));
    }
    let found = format!(
        "{} MiB are free in {name}, for up to {} MiB",
        free >> 20,
        to_save >> 20
    );
    Some(match free < to_save {
        true => SPILL.wrong(found),
        false => SPILL.ok(found),
    })
}

fn fit(config: &Config, bytes: u64, is_used: bool, rate: f64) -> Check {
    let notice = config.deadline.unwrap_or(config.preempt.notice);
    let left = notice.saturating_sub(config.preempt.margin).as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    let bytes = bytes as f64;
    let needed = bytes / rate;
    let what = if is_used {
        "in use"
    } else {
        "on the GPUs if they are full"
    };
    let found = format!(
        "{:.0} MiB {what} need {needed:.1} s at {:.0} MB/s uncompressed, of {left:.0} s (--deadline or preempt.notice, less preempt.margin)",
        bytes / f64::from(1 << 20),
        rate / 1e6
    );
    match needed <= left {
        true => FIT.ok(found),
        false => FIT.wrong(format!(
            "{found}: it fits if it compresses to {:.0} %",
            100.0 * left / needed
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Overrides, RawConfig};

    #[test]
    fn what_fits_is_said_with_its_numbers() {
        let overrides = Overrides {
            job: Some("job".to_owned()),
            store: Some("file:///store".to_owned()),
            ..Overrides::default()
        };
        let environment = Environment::read();
        let config = Config::resolve(&overrides, &RawConfig::default(), &environment).unwrap();
        let mib = 1 << 20;
        let fits = fit(&config, 100 * mib, true, 100e6);
        assert_eq!((fits.state, fits.mend), (State::Ok, None));
        let late = fit(&config, 56 * 100 * mib, true, 100e6);
        assert_eq!(late.state, State::Warning);
        assert!(
            late.found.contains("it fits if it compresses to 48 %"),
            "{late:?}"
        );
    }
}
