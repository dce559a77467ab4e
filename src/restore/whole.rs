//! The story back for a whole tree: read → check → CRIU restore, streamed, in a pid namespace of its own → restore, stream and complete every member (or, where the image was staged, the driver copies its memory back) → unlock all.
//!
//! In: a whole image of the job. Out: the tree, running with the pids that it had. What exists if we fail:
//!
//! | step | the tree | exit |
//! |---|---|---|
//! | read, check | none; the driver was not asked for anything | 6 (proved that there is none), 20 |
//! | CRIU restore; the first of what the GPUs held is read meanwhile | what there is of it is ended with its namespace | 20 |
//! | restore, complete, unlock | ended with its namespace; the image can be restored again | 21 |
//!
//! If we die, process 1 of the namespace ends everything in it, up to the moment at which the whole tree runs. No byte reaches CRIU, or a GPU, before its chunk was verified.

use std::error::Error;
use std::ffi::OsString;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::gpu_map::{GpuPairs, is_identity, map_gpus};
use super::in_order::{Ahead, InOrderError, write_in_order};
use super::read::{LoadFailed, Which, load_nowhere, load_plan, outcome_of};
use super::{
    CheckError, Chosen, PointOfNoReturn, Taken, Transfer, Wanted, Ways, give_up_the_job, must_fit,
    read_image, refused, unpin,
};
use crate::checkpoint::look;
use crate::config::Verify;
use crate::driver::{
    CheckpointedProcess, Driver, DriverError, LockedProcess, RestoringProcess, RunningProcess,
};
use crate::error::{ExitCode, Failure, Phase};
use crate::failpoint;
use crate::host::namespace::{KEEP, process_one};
use crate::host::{
    Criu, CriuRun, FileSource, ImagesDir, ProcessTree, Serving, StreamError, Watch, WriteError,
    cut, must_be_as_wanted,
};
use crate::image::{Image, Stored};
use crate::manifest::{CaptureMode, HOST, HostFiles, ImageKind, TreeRecord, WantedFile};
use crate::outcome::Outcome;
use crate::phases::PhaseClock;
use crate::pipeline::{Loaded, PipelineError};
use crate::session::Session;
use crate::store::Store;
use crate::target::{Target, descendants};
use crate::watchdog;
use crate::writer::random_hex;

/// How long CRIU may take when there is no deadline.
const RESTORE_LIMIT: Duration = Duration::from_secs(3600);
/// How long the driver may take to copy memory back.
const UNSTAGING_USUAL: Duration = Duration::from_secs(300);
/// How often it is looked whether the tree is there.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// How long an ended namespace may take to be gone.
const END_LIMIT: Duration = Duration::from_secs(30);
/// Ranges, and batches of chunks, that CRIU's files are read ahead at most: CRIU itself takes 1 to 2 GB/s.
const READ_AHEAD: usize = 8;

/// A tree that was restored, and runs.
#[derive(Debug)]
pub struct RestoredTree {
    /// What made its namespace, and ends with the tree's status.
    pub child: Child,
    /// Pid of process 1 of that namespace, in ours.
    pub init: u32,
    /// Pid of the tree's root, in our namespace.
    pub root: u32,
}

/// What becomes of the standard streams of a tree that is restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Streams {
    /// They are what they were.
    Own,
    /// They are ours, as if the tree had been started by us.
    Ours,
}

impl Streams {
    /// Ours that take the place of the tree's: number, and what it was. Terminals and devices stay what they are.
    fn inherited(self, tree: &TreeRecord) -> Vec<(usize, &str)> {
        let streams = tree.stdio.iter().map(String::as_str).enumerate();
        let mut inherited: Vec<(usize, &str)> = match self {
            Self::Own => Vec::new(),
            Self::Ours => streams
                .filter(|(_, was)| !was.is_empty() && !was.starts_with("/dev/"))
                // A file that it reads is the tree's own.
                .filter(|(number, was)| *number > 0 || !was.starts_with('/'))
                .collect(),
        };
        let mut seen = Vec::new();
        inherited.retain(|(_, was)| {
            let is_new = !seen.contains(was);
            seen.push(*was);
            is_new
        });
        inherited
    }
}

/// Brings the tree of a whole image back. The job is opened first: whoever saved it until then is fenced. `program` is this very program, which is run as process 1 of the tree's namespace.
///
/// # Errors
/// A [`Failure`] with the code of PROTOCOL section 6.
pub fn restore_tree(
    session: &Session,
    wanted: Wanted,
    program: &Path,
    streams: Streams,
) -> Result<(Outcome, RestoredTree), Failure> {
    let _named = tracing::error_span!("restore", trace = random_hex::<16>()).entered();
    let mut clock = PhaseClock::start(&session.meter, Phase::Read);
    let chosen = read_image(session, wanted)?;
    failpoint::pass("restore:image read");
    let work = AssertUnwindSafe(|| put_back(session, &mut clock, (program, streams), &chosen));
    let done = catch_unwind(work).unwrap_or_else(|panic| {
        // Process 1 of the namespace, if there is one, has heard that nobody is left to say that the tree may stay.
        let code = match clock.phase() {
            Phase::Read => ExitCode::RestoreRefused,
            _ => ExitCode::RestoreFailed,
        };
        let cause = PipelineError::of_story(panic.as_ref());
        Err(Failure::new(code, clock.phase(), cause))
    });
    if let Some(Taken { ours, pin }) = &chosen.taken {
        unpin(session, pin);
        if done.is_err() {
            give_up_the_job(session, ours);
        }
    }
    let (outcome, tree) = done?;
    let outcome = Outcome {
        seconds: clock.finish(),
        skipped: chosen.skipped,
        ..outcome
    };
    Ok((outcome, tree))
}

fn put_back(
    session: &Session,
    clock: &mut PhaseClock,
    (program, streams): (&Path, Streams),
    chosen: &Chosen,
) -> Result<(Outcome, RestoredTree), Failure> {
    let image = &chosen.image;
    let checked = check(session, image, streams).map_err(|cause| refused(Phase::Read, cause))?;
    failpoint::pass("restore:checked");
    // The tree can be made again, so that is not what happens unless it is asked for.
    if session.config.restore.verify == Some(Verify::All) {
        load_nowhere(session, image).map_err(|error| refused(Phase::Read, error.into()))?;
    }
    let since = clock.enter(Phase::Restore);
    let driver = &checked.driver;
    let rebuilt = match image.manifest.capture.mode {
        CaptureMode::Staged => rebuild_staged(session, image, &checked, (program, streams)),
        CaptureMode::CustomStorage => {
            rebuild_and_load(session, image, &checked, (program, streams))
        }
    }?;
    let Rebuilt {
        mut namespace,
        members,
        locked,
        loaded,
    } = rebuilt;
    let failed =
        |phase: Phase, cause: Box<dyn Error + Send + Sync>| failed(driver, &members, phase, cause);
    failpoint::pass("restore:locked for good");
    clock.enter(Phase::Unlock);
    if let Err(cause) = unlock(driver, &members, locked) {
        return Err(namespace.end(failed(Phase::Unlock, cause)));
    }
    let outcome = Outcome {
        seconds_locked: since.elapsed().as_secs_f64(),
        memory_planned: load_plan(session, image, Which::All).map_or(0, |plan| plan.total_bytes),
        stages: loaded.stages,
        slowest_stage: loaded.slowest_stage,
        ..outcome_of(
            session,
            image,
            members.iter().map(|member| look(driver, member)).collect(),
            Vec::new(),
        )
    };
    match namespace.keep() {
        Ok(()) => Ok((outcome, namespace.into_tree())),
        Err(error) => Err(namespace.end(failed(Phase::Unlock, error.into()))),
    }
}

/// A tree that was rebuilt, all of whose members have their memory, and are locked.
struct Rebuilt {
    namespace: Namespace,
    members: Vec<Target>,
    locked: Vec<LockedProcess>,
    loaded: Loaded,
}

fn failed(
    driver: &Arc<Driver>,
    members: &[Target],
    phase: Phase,
    cause: Box<dyn Error + Send + Sync>,
) -> Failure {
    let mut failure = Failure::new(ExitCode::RestoreFailed, phase, cause);
    failure.targets = members.iter().map(|member| look(driver, member)).collect();
    failure
}

/// CRIU rebuilds the tree, whose host memory has what its GPUs held.
fn rebuild_staged(
    session: &Session,
    image: &Image,
    checked: &Checked,
    as_whom: (&Path, Streams),
) -> Result<Rebuilt, Failure> {
    let (namespace, members) = rebuild_and_find(session, image, checked, as_whom)?;
    let suspended = match attach(&checked.driver, &members) {
        Ok(suspended) => suspended,
        Err(error) => return Err(namespace.end(refused(Phase::Restore, error.into()))),
    };
    match unstage(suspended, &checked.pairs) {
        Ok(locked) => Ok(Rebuilt {
            namespace,
            members,
            locked,
            loaded: Loaded {
                stages: Vec::new(),
                slowest_stage: None,
            },
        }),
        Err(cause) => {
            let failure = failed(&checked.driver, &members, Phase::Restore, cause);
            Err(namespace.end(failure))
        }
    }
}

/// CRIU rebuilds the tree while the first of what its GPUs held is read and verified; the driver is asked when both are there.
fn rebuild_and_load(
    session: &Session,
    image: &Image,
    checked: &Checked,
    as_whom: (&Path, Streams),
) -> Result<Rebuilt, Failure> {
    let (driver, pairs) = (&checked.driver, &checked.pairs);
    let point = PointOfNoReturn::before(session);
    let transfer = Transfer::prepare(session, driver, image, pairs, &point)
        .map_err(|cause| refused(Phase::Restore, cause))?;
    failpoint::pass("restore:prepared");
    let ways = Ways { pairs, moves: true };
    let (suspended_out, suspended_in) = mpsc::channel();
    std::thread::scope(|scope| {
        let (span, point) = (tracing::Span::current(), &point);
        let loading = scope.spawn(move || {
            let _named = span.entered();
            let suspended = move || {
                suspended_in
                    .recv()
                    .map_err(|_none| PipelineError::Cancelled)
            };
            let run = AssertUnwindSafe(|| transfer.run(driver, suspended, ways, point));
            catch_unwind(run)
                .unwrap_or_else(|panic| Err(PipelineError::of_story(panic.as_ref()).into()))
        });
        // Where nothing comes of the tree the loading ends with the sender.
        let (namespace, members) = rebuild_and_find(session, image, checked, as_whom)?;
        let sent = attach(driver, &members).map(|suspended| {
            // Whoever does not listen any more has failed, and says why.
            let _sent = suspended_out.send(suspended);
        });
        drop(suspended_out);
        let loaded = loading
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let completed = match (sent, loaded) {
            (Err(error), _) => Err((Phase::Restore, error.into())),
            (Ok(()), Err(cause)) => Err((Phase::Restore, cause)),
            (Ok(()), Ok((restoring, loaded))) => {
                failpoint::pass("restore:all copied");
                complete(restoring)
                    .map(|locked| (locked, loaded))
                    .map_err(|cause| (Phase::Complete, cause))
            }
        };
        match completed {
            Ok((locked, loaded)) => Ok(Rebuilt {
                namespace,
                members,
                locked,
                loaded,
            }),
            Err((phase, cause)) if point.is_passed() => {
                let failure = failed(driver, &members, phase, cause);
                Err(namespace.end(failure))
            }
            Err((phase, cause)) => Err(namespace.end(refused(phase, cause))),
        }
    })
}

/// Every byte is in: the memory becomes the members' own. None is unlocked.
fn complete(
    restoring: Vec<RestoringProcess>,
) -> Result<Vec<LockedProcess>, Box<dyn Error + Send + Sync>> {
    let mut locked = Vec::with_capacity(restoring.len());
    for process in restoring {
        let call = "the driver's complete (cuCheckpointOperationComplete)";
        let one = watchdog::watch(call, watchdog::USUAL, || process.complete())?;
        locked.push(one.unlocks_when_dropped(false));
        failpoint::pass("restore:one has its memory");
    }
    Ok(locked)
}

/// The tree, and those of it that use GPUs.
fn rebuild_and_find(
    session: &Session,
    image: &Image,
    checked: &Checked,
    as_whom: (&Path, Streams),
) -> Result<(Namespace, Vec<Target>), Failure> {
    let namespace = rebuild(session, image, checked, as_whom)
        .map_err(|cause| refused(Phase::Restore, cause))?;
    failpoint::pass("restore:tree rebuilt");
    match members(&namespace, image) {
        Ok(members) => Ok((namespace, members)),
        // The driver was not asked for anything yet.
        Err(cause) => Err(namespace.end(refused(Phase::Restore, cause))),
    }
}

/// What is known before anything is made.
struct Checked {
    driver: Arc<Driver>,
    criu: Criu,
    /// The same for every member; empty where every GPU is the one that it was.
    pairs: GpuPairs,
    /// Files that have grown, and are to be as long as they were.
    to_cut: Vec<WantedFile>,
}

fn check(
    session: &Session,
    image: &Image,
    streams: Streams,
) -> Result<Checked, Box<dyn Error + Send + Sync>> {
    let manifest = &image.manifest;
    if manifest.kind != ImageKind::Whole {
        return Err(CheckError::NeedsAProcess.into());
    }
    let host = &session.config.host;
    let mut to_cut = Vec::new();
    if let Some((tree, files)) = manifest.tree.as_ref().zip(image.files.as_ref()) {
        let replaced = streams.inherited(tree);
        let mut wanted = files.wanted.clone();
        wanted.retain(|file| !replaced.iter().any(|(_, was)| file.path == *was));
        to_cut = must_be_as_wanted(&wanted, host.truncates)?;
    }
    let criu = Criu::find(host)?;
    criu.check()?;
    let driver = Driver::open()?;
    match manifest.capture.mode {
        CaptureMode::Staged => driver.require_checkpoint()?,
        CaptureMode::CustomStorage => {
            driver.require_custom_storage()?;
            driver.retain_contexts()?;
        }
    }
    super::tell_of_another_driver(manifest, &driver);
    let wanted = &session.config.driver.gpu_map;
    let mut pairs = GpuPairs::default();
    for process in &manifest.processes {
        for pair in map_gpus(process, driver.devices(), wanted)? {
            if !pairs.contains(&pair) {
                pairs.push(pair);
            }
        }
    }
    if is_identity(&pairs) {
        pairs.clear();
    }
    must_fit(&driver, manifest, &pairs)?;
    session.check_cancelled()?;
    Ok(Checked {
        driver,
        criu,
        pairs,
        to_cut,
    })
}

/// A pid namespace with a tree in it. Dropping it without a word ends both.
struct Namespace {
    child: Child,
    /// Process 1, in our namespace.
    init: Target,
    tree: ProcessTree,
}

impl Namespace {
    /// Says that the tree may stay.
    fn keep(&mut self) -> std::io::Result<()> {
        match &mut self.child.stdin {
            Some(letters) => letters.write_all(KEEP),
            None => Err(std::io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// What stays.
    fn into_tree(self) -> RestoredTree {
        RestoredTree {
            root: self.tree.root().pid,
            init: self.init.pid,
            child: self.child,
        }
    }

    /// Ends everything in it. Says so in what went wrong.
    fn end(mut self, mut failure: Failure) -> Failure {
        let ended = self.init.kill().map(|()| self.init.ends_within(END_LIMIT));
        if matches!(ended, Ok(true)) {
            let _status = self.child.wait();
        }
        if !matches!(ended, Ok(true)) {
            failure
                .attached
                .push("what there was of the tree could not be ended".to_owned());
        }
        for target in &mut failure.targets {
            target.state = "gone".to_owned();
        }
        failure
    }
}

/// CRIU rebuilds the tree from the streams that we serve.
fn rebuild(
    session: &Session,
    image: &Image,
    checked: &Checked,
    (program, streams): (&Path, Streams),
) -> Result<Namespace, Box<dyn Error + Send + Sync>> {
    let Some((tree, files)) = image.manifest.tree.as_ref().zip(image.files.as_ref()) else {
        return Err(CheckError::NeedsAProcess.into());
    };
    cut(&checked.to_cut)?;
    let dir = ImagesDir::make()?;
    let serving = Serving::listen(dir.path())?;
    let watch = Watch::default();
    let limit = match session.deadline() {
        Some(deadline) => deadline.saturating_duration_since(Instant::now()),
        None => RESTORE_LIMIT,
    };
    let source = TreeFiles::of(session, image, files)?;
    let (pidfile, ready) = (dir.path().join("pid"), dir.path().join("ready"));
    let mut args: Vec<OsString> = vec!["init".into(), "--pidfile".into(), pidfile.clone().into()];
    args.extend(["--ready".into(), ready.clone().into(), "--".into()]);
    let inherited = streams.inherited(tree);
    args.extend(
        checked
            .criu
            .restore_command(dir.path(), &pidfile, &inherited),
    );
    let command = process_one(program, &args);
    let log = dir.path().join("restore.log");
    let starting = Starting::begin(command, streams, log, limit)?;
    let (served, started) = std::thread::scope(|scope| {
        let serving = scope.spawn(|| serving.run(&source, &watch));
        let started = starting.wait(&ready, &watch, || session.cancel.is_cancelled());
        let served = serving.join();
        (
            served.unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            started,
        )
    });
    // Why a file could not be served says more than that CRIU has not got it.
    let served = match served {
        Ok(Some(error)) => {
            if let Ok(child) = started {
                end_child(child);
            }
            return Err(error.into());
        }
        served => served,
    };
    let child = match (started, served) {
        (Ok(child), _) => child,
        // What was not understood says more than that CRIU then failed.
        (Err(_), Err(error @ StreamError::Protocol { .. })) => return Err(error.into()),
        (Err(error), _) => return Err(error),
    };
    let found = find(&child, tree);
    match found {
        Ok((init, tree)) => Ok(Namespace { child, init, tree }),
        Err(error) => {
            end_child(child);
            Err(error)
        }
    }
}

/// Process 1 ends when its standard input does, and with it the namespace.
fn end_child(mut child: Child) {
    drop(child.stdin.take());
    let since = Instant::now();
    while matches!(child.try_wait(), Ok(None)) {
        if since.elapsed() > END_LIMIT {
            for pid in descendants(child.id()).into_iter().rev() {
                let _gone = Target::look(pid).map(|target| target.kill());
            }
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// A namespace that is being made, with CRIU at work in it.
struct Starting {
    child: Child,
    log: PathBuf,
    since: Instant,
    limit: Duration,
}

impl Starting {
    fn begin(
        mut command: Command,
        streams: Streams,
        log: PathBuf,
        limit: Duration,
    ) -> Result<Self, Box<dyn Error + Send + Sync>> {
        if streams == Streams::Own {
            // It outlives us, and whoever reads our output must not wait for it.
            command.stdout(Stdio::null()).stderr(Stdio::null());
        }
        let child = command.stdin(Stdio::piped()).process_group(0).spawn();
        let child = child.map_err(|source| NoNamespace { source })?;
        Ok(Self {
            child,
            log,
            since: Instant::now(),
            limit,
        })
    }

    /// Waits until process 1 says that the tree is there.
    fn wait(
        mut self,
        ready: &Path,
        watch: &Watch,
        is_cancelled: impl Fn() -> bool,
    ) -> Result<Child, Box<dyn Error + Send + Sync>> {
        let ended = loop {
            if ready.exists() {
                watch.has_ended();
                return Ok(self.child);
            }
            let is_late = self.since.elapsed() > self.limit;
            match self.child.try_wait() {
                Ok(Some(status)) => break Err(NoTree::Ended { status }),
                Ok(None) if is_late => break Err(NoTree::TooLong { limit: self.limit }),
                Ok(None) if is_cancelled() => break Err(NoTree::Cancelled),
                Ok(None) => std::thread::sleep(LOOK_EVERY),
                Err(error) => break Err(NoTree::Wait(error)),
            }
        };
        let log = CriuRun::end_of_log(&self.log);
        watch.has_ended();
        end_child(self.child);
        let ended: Result<Child, NoTree> = ended;
        ended.map_err(|why| NotRebuilt { why, log }.into())
    }
}

#[derive(Debug, thiserror::Error)]
#[error("no pid namespace can be made (unshare of util-linux; it needs root, or CAP_SYS_ADMIN)")]
struct NoNamespace {
    #[source]
    source: std::io::Error,
}

#[derive(Debug, thiserror::Error)]
#[error("the tree was not rebuilt: {log}")]
struct NotRebuilt {
    #[source]
    why: NoTree,
    log: String,
}

#[derive(Debug, thiserror::Error)]
enum NoTree {
    #[error("criu restore, or the process beside it, ended with {status}")]
    Ended { status: std::process::ExitStatus },
    #[error("criu restore took longer than {limit:?}, and was ended")]
    TooLong { limit: Duration },
    #[error("stopped by a signal")]
    Cancelled,
    #[error("criu restore cannot be waited for")]
    Wait(#[source] std::io::Error),
}

/// Process 1 and the tree beside it.
fn find(
    child: &Child,
    saved: &TreeRecord,
) -> Result<(Target, ProcessTree), Box<dyn Error + Send + Sync>> {
    // `unshare`, process 1, and the tree.
    let pids = descendants(child.id());
    let looked = pids.iter().skip(1).map(|pid| Target::look(*pid));
    let looked: Vec<Target> = looked.filter_map(Result::ok).collect();
    let with = |own_pid: u32| looked.iter().find(|process| process.own_pid() == own_pid);
    let (Some(init), Some(root)) = (with(1), with(saved.root)) else {
        return Err(NotThere { pid: saved.root }.into());
    };
    Ok((Target::look(init.pid)?, ProcessTree::look(root.pid)?))
}

#[derive(Debug, thiserror::Error)]
#[error("CRIU has ended well, and process {pid} of the tree is not there")]
struct NotThere {
    pid: u32,
}

/// The processes that use GPUs, in the order of the manifest.
fn members(
    namespace: &Namespace,
    image: &Image,
) -> Result<Vec<Target>, Box<dyn Error + Send + Sync>> {
    let saved = image.manifest.processes.iter();
    let found = saved.map(|saved| {
        let own_pid = saved.ns_pids.last().copied().unwrap_or(saved.pid);
        let all = namespace.tree.processes();
        let process = all.iter().find(|process| process.own_pid() == own_pid);
        let process = process.ok_or(NotThere { pid: own_pid })?;
        Ok(Target::look(process.pid)?)
    });
    found.collect()
}

/// All as CRIU has rebuilt them: suspended.
fn attach(
    driver: &Arc<Driver>,
    members: &[Target],
) -> Result<Vec<CheckpointedProcess>, DriverError> {
    let attached = members.iter();
    attached
        .map(|member| CheckpointedProcess::attach(driver, member.pid))
        .collect()
}

/// The driver copies every member's memory back. All are locked then.
fn unstage(
    suspended: Vec<CheckpointedProcess>,
    pairs: &GpuPairs,
) -> Result<Vec<LockedProcess>, Box<dyn Error + Send + Sync>> {
    let mut locked = Vec::with_capacity(suspended.len());
    for process in suspended {
        let call = "the driver's restore from host memory (cuCheckpointProcessRestore)";
        locked.push(watchdog::watch(call, UNSTAGING_USUAL, || {
            process.unstage(pairs)
        })?);
        failpoint::pass("restore:one has its memory");
    }
    Ok(locked)
}

fn unlock(
    driver: &Arc<Driver>,
    members: &[Target],
    locked: Vec<LockedProcess>,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    for process in locked {
        let call = "the driver's unlock (cuCheckpointProcessUnlock)";
        watchdog::watch(call, watchdog::USUAL, || process.let_go())?;
    }
    for member in members {
        match RunningProcess::attach(driver, member.pid) {
            // It ran to its end before it was looked at.
            Err(_) if member.ends_within(crate::checkpoint::DYING_TIMEOUT) => {}
            looked => drop(looked?),
        }
    }
    Ok(())
}

/// The files of an image, for CRIU.
struct TreeFiles<'a> {
    session: &'a Session,
    stored: Stored<'a>,
    files: &'a HostFiles,
    ahead: Ahead,
    /// Files that are written out now: they share the memory.
    under_way: AtomicUsize,
}

impl<'a> TreeFiles<'a> {
    fn of(
        session: &'a Session,
        image: &'a Image,
        files: &'a HostFiles,
    ) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let plan = load_plan(session, image, Which::All)?;
        let host = image.stored().find(|stored| stored.extent.device == HOST);
        let stored = host.ok_or(CheckError::NeedsAProcess)?;
        Ok(Self {
            session,
            stored,
            files,
            ahead: Ahead {
                ranges: plan.fetch_buffers.clamp(1, READ_AHEAD),
                range_len: plan.fetch_len_max,
                batches: (plan.threads as usize).clamp(1, READ_AHEAD),
            },
            under_way: AtomicUsize::new(0),
        })
    }

    fn ahead(&self, under_way: usize) -> Ahead {
        let share = |count: usize| (count / under_way.max(1)).max(1);
        Ahead {
            ranges: share(self.ahead.ranges),
            batches: share(self.ahead.batches),
            ..self.ahead
        }
    }
}

impl FileSource for TreeFiles<'_> {
    type Error = LoadFailed;

    fn has(&self, name: &str) -> bool {
        self.files.files.iter().any(|file| file.name == name)
    }

    fn write(&self, name: &str, out: &mut dyn Write) -> Result<(), WriteError<LoadFailed>> {
        let file = self.files.files.iter().find(|file| file.name == name);
        let under_way = self.under_way.fetch_add(1, Ordering::Relaxed) + 1;
        let ahead = self.ahead(under_way);
        let store = &*self.session.store_after_begin as &dyn Store;
        let mut runs = file.into_iter().flat_map(|file| &file.runs);
        let written = runs.try_for_each(|run| {
            let raw = run.offset..run.offset + run.len;
            write_in_order(self.session, store, self.stored, raw, ahead, out)
        });
        self.under_way.fetch_sub(1, Ordering::Relaxed);
        written.map_err(|error| match error {
            InOrderError::Write(error) => WriteError::Pipe(error),
            InOrderError::Load(error) => WriteError::Source(error),
        })
    }
}
