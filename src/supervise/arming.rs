//! What is prepared while the job runs, so that from a notice to the lock there is next to nothing left to do; before it, the drill that `preempt.drill` asks for.
//!
//! In: the job's processes, the driver. Out: an [`Armed`] save, made anew now and then. What can fail: nothing for good; what cannot be prepared now is tried again, and `status` says why it is not.
//!
//! It costs the job some GPU memory for our contexts (`preempt.contexts`), and the node the pinned buffers. Nothing is asked of the GPUs meanwhile.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::drill::{Drill, STOPPED};
use super::process::JobProcess;
use crate::checkpoint::{self, Armed, gpu_users};
use crate::config::Contexts;
use crate::driver::{Driver, ProcessState};
use crate::error::{ExitCode, Failure, Phase, one_line};
use crate::pipeline::PipelineError;
use crate::session::Session;
use crate::watchdog;

/// Uploads that nobody uses are not kept for longer: stores and `gc` give up what is older than a day.
const ANEW_AFTER: Duration = Duration::from_secs(3600);
/// Pause between two looks for the job's GPU process, and at what is under way.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The same for a job that has used no GPU for so long.
const LOOK_LESS: Duration = Duration::from_secs(2);
const SOON: Duration = Duration::from_secs(20);
/// The driver says in what state a process is at once, or it hangs.
const STATE_WITHIN: Duration = Duration::from_secs(2);
/// A save that is prepared without the spill that it should have is prepared anew after this time.
const WITH_A_SPILL_AFTER: Duration = Duration::from_secs(30);
/// The same once it is prepared.
const LOOK_SELDOM: Duration = Duration::from_secs(60);
/// A driver or a disk that hangs is not waited for any longer past the deadline.
const JOINED_WITHIN: Duration = Duration::from_secs(1);
/// Pause after something could not be prepared: at first, and, doubled each time, at most. Every try leaves a trace in the store.
const PAUSE: Duration = Duration::from_secs(10);
const PAUSE_MAX: Duration = Duration::from_secs(300);

/// See the module.
#[derive(Debug)]
pub(super) struct Arming {
    session: Session,
    driver: WarmDriver,
    state: State,
    /// Held by every thread of ours.
    on_the_side: Arc<()>,
    not_before: Instant,
    /// After the next failure.
    pause: Duration,
    why_not: Option<String>,
    /// What gives back what was prepared before. As long as it works the target, and the spill, are not to be had.
    leaving: Option<JoinHandle<()>>,
    /// Since the job was watched over first.
    since: Instant,
    /// There is still to be a drill.
    is_to_drill: bool,
    /// What it came to.
    drilled: Option<String>,
}

/// What there is of a prepared save.
#[derive(Debug)]
pub(super) enum Taken {
    /// It is ready.
    Ready(Box<Armed>),
    /// Nothing is prepared.
    Nothing,
    /// It is still coming, and there was no more time to wait for it.
    Coming,
}

#[derive(Debug)]
enum State {
    Down,
    /// What comes before.
    Drilling(Box<Drill>),
    Coming(Box<Coming>),
    Up(Box<Armed>),
}

/// A save that is being prepared, and its surroundings.
#[derive(Debug)]
struct Coming {
    thread: JoinHandle<Result<Armed, Failure>>,
    session: Session,
}

/// The driver, which takes seconds to come up on some machines.
#[derive(Debug, Clone, Default)]
pub(super) struct WarmDriver {
    opened: Arc<OnceLock<Arc<Driver>>>,
    state: Arc<Mutex<Warmth>>,
}

#[derive(Debug, Default)]
struct Warmth {
    is_coming: bool,
    failed: Option<(Instant, String)>,
}

impl WarmDriver {
    /// Brings it up in the background.
    pub(super) fn warm_up() -> Self {
        let warm = Self::default();
        warm.bring_up();
        warm
    }

    fn state(&self) -> MutexGuard<'_, Warmth> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same again where it failed a while ago.
    fn bring_up(&self) {
        let mut state = self.state();
        let failed_just_now = matches!(&state.failed, Some((at, _)) if at.elapsed() < PAUSE);
        if state.is_coming || failed_just_now || self.get().is_some() {
            return;
        }
        let warm = self.clone();
        let opening = std::thread::Builder::new().name("driver".to_owned());
        let opening = opening.spawn(move || {
            let opened = Driver::open();
            let mut state = warm.state();
            state.is_coming = false;
            match opened {
                // Whoever was first has set it.
                Ok(driver) => drop(warm.opened.set(driver)),
                Err(error) => {
                    let why = one_line(&error);
                    tracing::warn!("no driver yet: {why}");
                    state.failed = Some((Instant::now(), why));
                }
            }
        });
        state.is_coming = opening.is_ok();
    }

    /// Why it is not there.
    fn why_not(&self) -> String {
        match &self.state().failed {
            Some((_, why)) => why.clone(),
            None => "the driver is coming up".to_owned(),
        }
    }

    /// It, once it is there.
    fn get(&self) -> Option<&Arc<Driver>> {
        self.opened.get()
    }

    /// It, waited for.
    pub(super) fn open(&self) -> Result<Arc<Driver>, Failure> {
        if let Some(driver) = self.get() {
            return Ok(Arc::clone(driver));
        }
        let opened = Driver::open()
            .map_err(|error| Failure::new(ExitCode::Preflight, Phase::Prepare, error))?;
        Ok(Arc::clone(self.opened.get_or_init(|| opened)))
    }
}

impl Arming {
    pub(super) fn new(session: &Session, driver: WarmDriver, on_the_side: &Arc<()>) -> Self {
        Self {
            is_to_drill: session.config.preempt.drill,
            drilled: None,
            session: session.clone(),
            driver,
            state: State::Down,
            on_the_side: Arc::clone(on_the_side),
            not_before: Instant::now(),
            pause: PAUSE,
            why_not: None,
            leaving: None,
            since: Instant::now(),
        }
    }

    /// Looks after it: prepares what is not, and what is old anew, if the store would take part in it. Whether anything changed.
    pub(super) fn tend(&mut self, job: &JobProcess, sees_the_store: bool) -> bool {
        match std::mem::replace(&mut self.state, State::Down) {
            State::Down => {
                let is_wanted = self.session.config.preempt.contexts == Contexts::Eager
                    && Instant::now() >= self.not_before
                    && !self.is_leaving();
                is_wanted && self.begin(job, None)
            }
            State::Drilling(drill) if !drill.is_over() => {
                self.state = State::Drilling(drill);
                false
            }
            State::Drilling(drill) => {
                self.drilled = Some(drill.tell());
                self.begin(job, None);
                true
            }
            State::Coming(coming) if !coming.thread.is_finished() => {
                self.state = State::Coming(coming);
                false
            }
            State::Coming(coming) => {
                match join(coming.thread) {
                    Ok(armed) => {
                        self.why_not = None;
                        self.pause = PAUSE;
                        self.state = State::Up(Box::new(armed));
                    }
                    Err(failure) => self.failed(&failure),
                }
                true
            }
            State::Up(armed) => {
                let is_old = armed.age() >= ANEW_AFTER
                    || (!armed.has_its_spill() && armed.age() >= WITH_A_SPILL_AFTER);
                if (is_old && sees_the_store) || self.is_of_no_use(&armed, job) {
                    return self.begin(job, Some(armed));
                }
                self.state = State::Up(armed);
                false
            }
        }
    }

    /// The job's GPU process is another one than that which it was prepared for. A look that fails says nothing.
    fn is_of_no_use(&self, armed: &Armed, job: &JobProcess) -> bool {
        let Some(driver) = self.driver.get() else {
            return false;
        };
        match gpu_process(driver, job) {
            Ok(Some(pid)) => pid != armed.pid(),
            Ok(None) => !armed.target_lives(),
            Err(failure) => failure.code == ExitCode::Preflight,
        }
    }

    /// Begins to prepare a save, after what was prepared `before` was given back. Whether anything changed.
    fn begin(&mut self, job: &JobProcess, before: Option<Box<Armed>>) -> bool {
        let why_not = match self.driver.get() {
            None => {
                self.driver.bring_up();
                self.driver.why_not()
            }
            Some(driver) => match gpu_process(driver, job) {
                Ok(Some(pid)) => return self.begin_with(pid, before),
                Ok(None) => "the job uses no GPU yet".to_owned(),
                Err(failure) => one_line(failure.cause.as_ref()),
            },
        };
        let is_new = before.is_some() || self.why_not.as_ref() != Some(&why_not);
        self.why_not = Some(why_not);
        if let Some(armed) = before {
            self.leave(*armed);
        }
        is_new
    }

    fn begin_with(&mut self, pid: u32, before: Option<Box<Armed>>) -> bool {
        if std::mem::replace(&mut self.is_to_drill, false) && self.begin_drill(pid) {
            return true;
        }
        let session = self.session.for_one_transfer(None);
        let preparing = std::thread::Builder::new().name("arming".to_owned());
        let its_own = session.clone();
        let on_the_side = Arc::clone(&self.on_the_side);
        let prepare = move || {
            let _on_the_side = on_the_side;
            // Its buffers are a part of this node's memory, which is not there twice.
            before.into_iter().for_each(|armed| armed.stand_down());
            checkpoint::arm(its_own, pid)
        };
        match preparing.spawn(prepare) {
            Ok(thread) => self.state = State::Coming(Box::new(Coming { thread, session })),
            Err(error) => self.why_not = Some(error.to_string()),
        }
        true
    }

    fn begin_drill(&mut self, pid: u32) -> bool {
        match Drill::begin(&self.session, pid, &self.on_the_side) {
            Ok(drill) => {
                self.state = State::Drilling(Box::new(drill));
                self.why_not = Some("a drill comes first (preempt.drill)".to_owned());
                true
            }
            Err(error) => {
                tracing::warn!("there is no drill: {error}");
                false
            }
        }
    }

    fn failed(&mut self, failure: &Failure) {
        let why = one_line(failure.cause.as_ref());
        if self.why_not.as_ref() != Some(&why) {
            tracing::warn!(
                "a save is not prepared (exit {}): {why}",
                failure.code.code()
            );
        }
        self.why_not = Some(why);
        self.not_before = Instant::now() + self.pause;
        self.pause = (2 * self.pause).min(PAUSE_MAX);
    }

    /// When to look after it next.
    pub(super) fn next_look(&self) -> Instant {
        let now = Instant::now();
        match &self.state {
            State::Up(_) => now + LOOK_SELDOM,
            State::Drilling(_) | State::Coming(_) => now + LOOK_EVERY,
            State::Down if self.session.config.preempt.contexts == Contexts::AtNotice => {
                now + LOOK_SELDOM
            }
            State::Down if self.since.elapsed() < SOON => (now + LOOK_EVERY).max(self.not_before),
            State::Down => (now + LOOK_LESS).max(self.not_before),
        }
    }

    /// Bytes of host memory that are held; `None` where nothing is prepared.
    pub(super) fn memory_planned(&self) -> Option<u64> {
        match &self.state {
            State::Up(armed) => Some(armed.memory_planned()),
            _ => None,
        }
    }

    /// Why nothing is prepared.
    pub(super) fn why_not(&self) -> Option<&str> {
        self.why_not.as_deref()
    }

    /// What the drill came to.
    pub(super) fn drilled(&self) -> Option<&str> {
        self.drilled.as_deref()
    }

    /// Gives back what was prepared, in the background: the store may be slow.
    pub(super) fn leave(&mut self, armed: Armed) {
        let leaving = std::thread::Builder::new().name("arming".to_owned());
        let on_the_side = Arc::clone(&self.on_the_side);
        let leave = move || {
            let _on_the_side = on_the_side;
            armed.stand_down();
        };
        let leaving = leaving.spawn(leave);
        self.leaving = leaving
            .inspect_err(|error| tracing::warn!("what was prepared is not given back: {error}"))
            .ok();
    }

    /// What was prepared before is still being given back.
    pub(super) fn is_leaving(&self) -> bool {
        let leaving = self.leaving.as_ref();
        leaving.is_some_and(|thread| !thread.is_finished())
    }

    /// Takes what is prepared, and stops a drill; what is coming, or has the target, is waited for, as long as `deadline` has a moment that is to come. It is asked again and again, because notices come and go.
    pub(super) fn take(&mut self, deadline: impl Fn() -> Option<Instant>) -> Taken {
        // A save shows more than a drill does.
        self.is_to_drill = false;
        match std::mem::replace(&mut self.state, State::Down) {
            State::Down => Taken::Nothing,
            State::Up(armed) => Taken::Ready(armed),
            State::Drilling(drill) => {
                while !drill.stop() {
                    let is_over = |until: Instant| Instant::now() >= until + JOINED_WITHIN;
                    if deadline().is_none_or(is_over) {
                        self.state = State::Drilling(drill);
                        return Taken::Coming;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                self.drilled = Some(STOPPED.to_owned());
                Taken::Nothing
            }
            State::Coming(coming) => {
                loop {
                    let until = deadline();
                    // A store that does not answer must not take the whole notice.
                    coming.session.set_deadline(until);
                    if coming.thread.is_finished() {
                        break;
                    }
                    if until.is_none_or(|until| Instant::now() >= until + JOINED_WITHIN) {
                        self.state = State::Coming(coming);
                        return Taken::Coming;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                match join(coming.thread) {
                    Ok(armed) => Taken::Ready(Box::new(armed)),
                    Err(failure) => {
                        self.failed(&failure);
                        Taken::Nothing
                    }
                }
            }
        }
    }

    /// Gives everything back: there will be no save any more.
    pub(super) fn stand_down_at_once(&mut self) {
        let now = Instant::now();
        if let Taken::Ready(armed) = self.take(|| Some(now)) {
            armed.stand_down();
        }
    }
}

fn join(thread: JoinHandle<Result<Armed, Failure>>) -> Result<Armed, Failure> {
    thread.join().unwrap_or_else(|panic| {
        let panicked = PipelineError::of_story(panic.as_ref());
        Err(Failure::new(ExitCode::Preflight, Phase::Prepare, panicked))
    })
}

/// The one process of the job that has CUDA state: the job's first process, or one that came from it.
///
/// # Errors
/// Exit 3 when there is more than one; exit 10 when the driver does not say.
pub(super) fn gpu_process(driver: &Arc<Driver>, job: &JobProcess) -> Result<Option<u32>, Failure> {
    let failed = |code: ExitCode, why: String| Failure::new(code, Phase::Prepare, why);
    // A driver that hangs must not keep us from notices and from the job's end.
    let (driver, pid) = (Arc::clone(driver), job.pid);
    let looking = watchdog::aside("state", move || gpu_users(&driver, pid));
    let looking = looking.map_err(|error| {
        failed(
            ExitCode::RolledBack,
            format!("no thread can be started: {error}"),
        )
    })?;
    let Some(found) = looking.within(STATE_WITHIN) else {
        let why = format!(
            "the driver does not say within {STATE_WITHIN:?} in what state the job's processes are (pid {pid})"
        );
        return Err(failed(ExitCode::RolledBack, why));
    };
    let found = found.map_err(|error| Failure::new(ExitCode::RolledBack, Phase::Prepare, error))?;
    let usable = found
        .iter()
        .filter(|(_, state)| *state != ProcessState::Failed);
    let found: Vec<u32> = usable.map(|(pid, _)| *pid).collect();
    match found.as_slice() {
        [] => Ok(None),
        [pid] => Ok(Some(*pid)),
        several => {
            let why = format!(
                "the processes {several:?} of the job use GPUs, and only one can be saved by this version"
            );
            Err(failed(ExitCode::Preflight, why))
        }
    }
}
