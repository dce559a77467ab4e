//! What is prepared while the job runs, so that from a notice to the lock there is next to nothing left to do.
//!
//! In: the job's processes, the driver. Out: an [`Armed`] save, made anew now and then. What can fail: nothing for good; what cannot be prepared now is tried again, and `status` says why it is not.
//!
//! It costs the job some GPU memory for our contexts (`preempt.contexts`), and the node the pinned buffers. Nothing is asked of the GPUs meanwhile.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::process::JobProcess;
use crate::checkpoint::{self, Armed};
use crate::config::Contexts;
use crate::driver::{Driver, ProcessState};
use crate::error::{ExitCode, Failure, Phase, one_line};
use crate::pipeline::PipelineError;
use crate::session::Session;
use crate::target::descendants;

/// Uploads that nobody uses are not kept for longer: stores and `gc` give up what is older than a day.
const ANEW_AFTER: Duration = Duration::from_secs(3600);
/// Pause between two looks for the job's GPU process, and at what is under way.
const LOOK_EVERY: Duration = Duration::from_millis(100);
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
}

#[derive(Debug)]
enum State {
    Down,
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
            session: session.clone(),
            driver,
            state: State::Down,
            on_the_side: Arc::clone(on_the_side),
            not_before: Instant::now(),
            pause: PAUSE,
            why_not: None,
        }
    }

    /// Looks after it: prepares what is not, and what is old anew, if the store would take part in it. Whether anything changed.
    pub(super) fn tend(&mut self, job: &JobProcess, sees_the_store: bool) -> bool {
        match std::mem::replace(&mut self.state, State::Down) {
            State::Down => {
                let is_wanted = self.session.config.preempt.contexts == Contexts::Eager
                    && Instant::now() >= self.not_before;
                is_wanted && self.begin(job, None)
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
                let is_old = armed.age() >= ANEW_AFTER && sees_the_store;
                if is_old || !self.is_for(&armed, job) {
                    return self.begin(job, Some(armed));
                }
                self.state = State::Up(armed);
                false
            }
        }
    }

    /// The job's one GPU process is still the one that it was prepared for.
    fn is_for(&self, armed: &Armed, job: &JobProcess) -> bool {
        let Some(driver) = self.driver.get() else {
            return false;
        };
        matches!(gpu_process(driver, job), Ok(Some(pid)) if pid == armed.pid())
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
        before
            .into_iter()
            .for_each(|armed| leave(*armed, &self.on_the_side));
        is_new
    }

    fn begin_with(&mut self, pid: u32, before: Option<Box<Armed>>) -> bool {
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
        let soon = Instant::now() + LOOK_EVERY;
        match &self.state {
            State::Up(_) => Instant::now() + LOOK_SELDOM,
            State::Coming(_) => soon,
            State::Down if self.session.config.preempt.contexts == Contexts::AtNotice => {
                Instant::now() + LOOK_SELDOM
            }
            State::Down => soon.max(self.not_before),
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

    /// Takes what is prepared; what is coming is waited for, until the deadline at most. `None`: nothing is.
    pub(super) fn take(&mut self, deadline: Instant) -> Option<Armed> {
        match std::mem::replace(&mut self.state, State::Down) {
            State::Down => None,
            State::Up(armed) => Some(*armed),
            State::Coming(coming) => {
                // A store that does not answer must not take the whole notice.
                coming.session.set_deadline(Some(deadline));
                let until = deadline + JOINED_WITHIN;
                while !coming.thread.is_finished() && Instant::now() < until {
                    std::thread::sleep(Duration::from_millis(1));
                }
                if !coming.thread.is_finished() {
                    self.why_not = Some("what is prepared does not come to an end".to_owned());
                    return None;
                }
                match join(coming.thread) {
                    Ok(armed) => Some(armed),
                    Err(failure) => {
                        self.failed(&failure);
                        None
                    }
                }
            }
        }
    }

    /// Gives everything back: there will be no save any more.
    pub(super) fn stand_down_at_once(&mut self) {
        if let Some(armed) = self.take(Instant::now()) {
            armed.stand_down();
        }
    }
}

/// Gives back what was prepared, in the background: the store may be slow.
pub(super) fn leave(armed: Armed, on_the_side: &Arc<()>) {
    let leaving = std::thread::Builder::new().name("arming".to_owned());
    let on_the_side = Arc::clone(on_the_side);
    let leave = move || {
        let _on_the_side = on_the_side;
        armed.stand_down();
    };
    if let Err(error) = leaving.spawn(leave) {
        tracing::warn!("what was prepared is not given back: {error}");
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
/// There is more than one.
pub(super) fn gpu_process(driver: &Driver, job: &JobProcess) -> Result<Option<u32>, Failure> {
    let usable =
        |pid: &u32| matches!(driver.state(*pid), Ok(state) if state != ProcessState::Failed);
    let found: Vec<u32> = descendants(job.pid).into_iter().filter(usable).collect();
    match found.as_slice() {
        [] => Ok(None),
        [pid] => Ok(Some(*pid)),
        several => {
            let why = format!(
                "the processes {several:?} of the job use GPUs, and only one can be saved by this version"
            );
            Err(Failure::new(ExitCode::Preflight, Phase::Prepare, why))
        }
    }
}
