//! One run: who is there, in which order everything happens, what fails. All of it follows from the seed.
//!
//! In: a seed, and the rule that nobody keeps, if any. Out: a [`Run`]. There are no threads and there is no clock: a process is a future that waits for the store, and the scheduler says whose request comes next and what becomes of it. One that
//! waits for long while others run to their ends is what finds most, so a process has a weight that changes now and then and may be none.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::task::{Context, Wake, Waker};

use ckptstream::sealed::Sealed;
use ckptstream::store::{PutOutcome, StoreError};
use tokio::runtime::{Handle, Runtime};

use super::Rule;
use super::oracle::Violation;
use super::others::{self, Restore, RestoreEnd};
use super::process::{Node, Process};
use super::sample::job;
use super::saver::{self, Save, Spill};
use super::world::{Answer, Failing, Flying, Place, Request, Shared, World, now};

/// More than any run takes that ends.
const STEPS_MAX: u64 = 200_000;

/// What somebody is started to do.
#[derive(Debug, Clone, Copy)]
enum Task {
    Save(Save),
    Restore(Restore),
    Recover,
    Resume,
    Gc { spilled: bool },
    Prune,
    Look,
}

impl Task {
    fn name(self) -> &'static str {
        match self {
            Task::Save(_) => "save",
            Task::Restore(_) => "restore",
            Task::Recover => "recover",
            Task::Resume => "resume",
            Task::Gc { .. } => "gc",
            Task::Prune => "prune",
            Task::Look => "look",
        }
    }

    fn start(self, process: Process) -> Pin<Box<dyn Future<Output = ()>>> {
        match self {
            Task::Save(how) => Box::pin(saver::save(process, how)),
            Task::Restore(how) => Box::pin(others::restore(process, how)),
            Task::Recover => Box::pin(saver::recover(process)),
            Task::Resume => Box::pin(saver::resume(process)),
            Task::Gc { spilled } => Box::pin(others::gc(process, spilled)),
            Task::Prune => Box::pin(others::prune(process)),
            Task::Look => Box::pin(others::look(process)),
        }
    }
}

/// What may go wrong in a run.
#[derive(Debug, Clone, Copy, Default)]
struct Troubles {
    /// One request in so many fails; 0 is none.
    faults: u32,
    /// Processes that may die.
    deaths: u32,
    /// Processes that may hear nothing more of the store.
    silences: u32,
}

/// What came of a run.
pub(super) struct Run {
    pub(super) violation: Option<Violation>,
    pub(super) steps: u64,
    /// How often what happened.
    pub(super) seen: HashMap<&'static str, u64>,
    /// Empty unless it was asked for.
    pub(super) history: Vec<String>,
}

/// What runs are made on; one for each thread.
pub(super) struct Stage(Runtime);

impl Stage {
    pub(super) fn new() -> Self {
        // The product hands long computations to the runtime's blocking threads. With one of them it can be known when they are done.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .max_blocking_threads(1)
            .build();
        Self(runtime.expect("a runtime"))
    }

    /// The run of a seed.
    pub(super) fn run(&self, seed: u64, broken: Option<Rule>, is_told: bool) -> Run {
        // Retries draw from this one. Their pauses are none, but a run depends on nothing that its seed does not say.
        fastrand::seed(seed);
        let _entered = self.0.enter();
        let world = Shared::new(seed, broken, is_told);
        let mut scheduler = Scheduler {
            world: world.clone(),
            blocking: self.0.handle().clone(),
            chains: Vec::new(),
            running: Vec::new(),
            bereft: Vec::new(),
            spill_is_claimed: Rc::default(),
            troubles: Troubles::default(),
            steps: 0,
        };
        scheduler.play();
        let steps = scheduler.steps;
        drop(scheduler);
        let mut world = world.lock();
        let oracle = &world.ground.oracle;
        Run {
            violation: oracle.violation().cloned(),
            steps,
            seen: oracle.seen().clone(),
            history: world.history.take().unwrap_or_default(),
        }
    }
}

/// What is started one after the other on one node.
struct Chain {
    node: Rc<Node>,
    left: VecDeque<Task>,
    /// How often its turn comes.
    weight: u32,
}

/// A process that has not ended.
struct Running {
    chain: usize,
    process: Process,
    future: Pin<Box<dyn Future<Output = ()>>>,
    awake: Arc<Awake>,
}

/// Somebody has something to tell a process.
#[derive(Default)]
struct Awake(AtomicBool);

impl Wake for Awake {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

struct Scheduler {
    world: Shared,
    blocking: Handle,
    chains: Vec<Chain>,
    running: Vec<Running>,
    /// Chains whose process died: whatever is next on their nodes begins.
    bereft: Vec<usize>,
    spill_is_claimed: Rc<Cell<bool>>,
    troubles: Troubles,
    steps: u64,
}

impl Scheduler {
    /// A job with some images; then all at once; then one after the other again, when nothing fails any more.
    fn play(&mut self) {
        let (images, troubles, plan) = {
            let rng = &mut self.world.lock().rng;
            let theme = draw_theme(rng);
            let images = match theme {
                Theme::Retention => rng.usize(2..6),
                _ => rng.usize(..4),
            };
            (images, draw_troubles(rng, theme), draw_plan(rng, theme))
        };
        self.tell("a job with some images");
        self.all_of(vec![vec![Task::Save(Save { spill: None }); images]]);
        self.tell("all at once");
        self.troubles = troubles;
        self.all_of(plan);
        if self.has_failed() {
            return;
        }
        self.tell("nothing fails any more");
        self.troubles = Troubles::default();
        self.land();
        self.all_of(vec![vec![Task::Resume, Task::Look]]);
        self.look_back();
    }

    /// Whatever is still on its way is applied, or never.
    fn land(&mut self) {
        let mut world = self.world.lock();
        world.bury();
        while !world.flying.is_empty() && world.ground.oracle.violation().is_none() {
            let at = {
                let count = world.flying.len();
                world.rng.usize(..count)
            };
            let flying = world.flying.swap_remove(at);
            if world.rng.bool() {
                apply_late(&mut world, flying);
            }
        }
        world.flying.clear();
    }

    fn look_back(&mut self) {
        let mut world = self.world.lock();
        let ground = &mut world.ground;
        let left = now(Sealed::all(&ground.spill, job())).expect("the spill does not fail");
        ground.oracle.must_not_be_stranded(&left);
        ground.oracle.must_be_whole(&ground.store);
    }

    fn tell(&self, what: &str) {
        self.world.lock().tell(None, || format!("-- {what}"));
    }

    fn has_failed(&self) -> bool {
        self.world.lock().ground.oracle.violation().is_some()
    }

    /// Runs chains of processes to their ends.
    fn all_of(&mut self, chains: Vec<Vec<Task>>) {
        let chain = |left: Vec<Task>| Chain {
            node: Rc::default(),
            left: left.into(),
            weight: 1,
        };
        self.chains = chains.into_iter().map(chain).collect();
        for index in 0..self.chains.len() {
            self.start_next(index);
        }
        while !self.running.is_empty() && !self.has_failed() {
            self.steps += 1;
            assert!(self.steps < STEPS_MAX, "it does not end");
            self.step();
        }
    }

    fn start_next(&mut self, chain: usize) {
        let Some(task) = self.chains[chain].left.pop_front() else {
            return;
        };
        let node = Rc::clone(&self.chains[chain].node);
        let process = Process::new(&self.world, task.name(), &node, &self.spill_is_claimed);
        let number = process.number;
        self.world
            .lock()
            .tell(Some(number), || format!("starts: {task:?}"));
        let awake = Arc::new(Awake(AtomicBool::new(true)));
        self.running.push(Running {
            chain,
            future: task.start(process.clone()),
            process,
            awake,
        });
        self.poll(number);
    }

    /// Lets a process go on as far as it can.
    fn poll(&mut self, number: usize) {
        let Some(at) = self
            .running
            .iter()
            .position(|it| it.process.number == number)
        else {
            return;
        };
        let waker = Waker::from(Arc::clone(&self.running[at].awake));
        let mut context = Context::from_waker(&waker);
        loop {
            let running = &mut self.running[at];
            if !running.awake.0.swap(false, Ordering::SeqCst) {
                let mut world = self.world.lock();
                world.bury();
                if world.waiting.iter().any(|it| it.process == number) {
                    return;
                }
                drop(world);
                // What it waits for is being computed.
                self.wait_for_computations();
                let is_awake = self.running[at].awake.0.load(Ordering::SeqCst);
                assert!(is_awake, "a process waits for nothing");
                continue;
            }
            if running.future.as_mut().poll(&mut context).is_ready() {
                let ended = self.running.remove(at);
                drop(ended.future);
                self.start_next(ended.chain);
                return;
            }
        }
    }

    fn wait_for_computations(&self) {
        let (done, all_done) = mpsc::channel();
        self.blocking.spawn_blocking(move || done.send(()));
        all_done.recv().expect("it is done in its turn");
    }

    /// One thing happens.
    fn step(&mut self) {
        let shared = self.world.clone();
        let mut world = shared.lock();
        world.bury();
        self.change_weights(&mut world.rng);
        if !world.flying.is_empty() && world.rng.u32(..12) == 0 {
            let count = world.flying.len();
            let at = world.rng.usize(..count);
            let flying = world.flying.swap_remove(at);
            return apply_late(&mut world, flying);
        }
        let number = self.draw_process(&mut world.rng);
        let next = draw_requests(&mut world, number);
        if let [at] = next[..]
            && world.waiting[at].is_write
            && self.is_struck(&mut world, number)
        {
            drop(world);
            self.poll(number);
            while let Some(chain) = self.bereft.pop() {
                self.start_next(chain);
            }
            return;
        }
        let mut is_computing = false;
        // From the last on: the places of the others stay what they are.
        for at in next.into_iter().rev() {
            let request = world.waiting.remove(at);
            // An image's tables are decoded aside, while other answers may come: which of the two is first must not be left to chance.
            is_computing |= request.key.ends_with(".frames.json");
            self.take_time(&mut world.rng, &request);
            self.serve(&mut world, request);
        }
        drop(world);
        self.poll(number);
        if is_computing {
            self.wait_for_computations();
            self.poll(number);
        }
    }

    fn change_weights(&mut self, rng: &mut fastrand::Rng) {
        if rng.u32(..20) == 0 {
            let chain = rng.usize(..self.chains.len());
            self.chains[chain].weight = [0, 1, 1, 8][rng.usize(..4)];
        }
    }

    /// The moments that a process marks are those at which it matters most what others do meanwhile.
    fn take_time(&mut self, rng: &mut fastrand::Rng, request: &Request) {
        let is_it = |running: &&Running| running.process.number == request.process;
        if request.place == Place::Here
            && rng.bool()
            && let Some(running) = self.running.iter().find(is_it)
        {
            self.chains[running.chain].weight = 0;
        }
    }

    /// Whose turn it is.
    fn draw_process(&self, rng: &mut fastrand::Rng) -> usize {
        let weight = |running: &Running| self.chains[running.chain].weight;
        let all: u32 = self.running.iter().map(weight).sum();
        if all == 0 {
            let at = rng.usize(..self.running.len());
            return self.running[at].process.number;
        }
        let mut left = rng.u32(..all);
        for running in &self.running {
            if left < weight(running) {
                return running.process.number;
            }
            left -= weight(running);
        }
        unreachable!("less than all weights together")
    }

    /// Whether the process dies, or hears no more of the store, while this request is on its way.
    fn is_struck(&mut self, world: &mut World, number: usize) -> bool {
        let at = self
            .running
            .iter()
            .position(|it| it.process.number == number);
        let Some(at) = at else { return false };
        if self.troubles.deaths > 0 && world.rng.u32(..16) == 0 {
            self.troubles.deaths -= 1;
            world.tell(Some(number), || "dies".to_owned());
            let dead = self.running.remove(at);
            let chain = dead.chain;
            drop(dead);
            self.bereft.push(chain);
            return true;
        }
        if self.troubles.silences > 0 && world.rng.u32(..16) == 0 {
            self.troubles.silences -= 1;
            world.tell(Some(number), || "hears no more of the store".to_owned());
            self.running[at].process.give_up();
            return true;
        }
        false
    }

    /// What becomes of a request.
    fn serve(&self, world: &mut World, request: Request) {
        let fate = self.draw_fate(&mut world.rng, &request);
        let failure = match fate {
            Fate::Served => None,
            Fate::Failed(kind) => Some(request.failed(kind)),
            Fate::Lost | Fate::Late => Some(request.failed(Failing::Transient)),
        };
        let is_told = request.is_write || failure.is_some();
        let (process, told) = (request.process, world.words_for(&request));
        let (apply, slot) = request.into_parts();
        let mut outcome = "";
        let answer = match (fate, failure) {
            (Fate::Late, Some(error)) => {
                let told = told.clone();
                world.flying.push(Flying {
                    process,
                    apply,
                    told,
                });
                Answer::Failed(error)
            }
            (Fate::Failed(_), Some(error)) => Answer::Failed(error),
            (_, failure) => {
                let applied = apply(&mut world.ground);
                if let Some(Ok(PutOutcome::AlreadyExists)) = applied.downcast_ref::<Put>() {
                    outcome = ": there is one";
                }
                failure.map_or(Answer::Applied(applied), Answer::Failed)
            }
        };
        if is_told {
            let fate = match fate {
                Fate::Served => String::new(),
                fate => format!(" ({fate:?})"),
            };
            world.tell(Some(process), || format!("{told}{outcome}{fate}"));
        }
        Request::answer(&slot, answer);
    }

    fn draw_fate(&self, rng: &mut fastrand::Rng, request: &Request) -> Fate {
        // Reads are many, and all that happens to them is that they are tried again.
        let one_in = self.troubles.faults * if request.is_write { 1 } else { 4 };
        if request.place != Place::Store || one_in == 0 || rng.u32(..one_in) != 0 {
            return Fate::Served;
        }
        match rng.u32(..16) {
            0..=3 => Fate::Failed(Failing::Transient),
            4 => Fate::Failed(Failing::SlowDown),
            5 => Fate::Failed(Failing::Refused),
            6..=9 if request.is_write => Fate::Lost,
            _ if request.is_write => Fate::Late,
            _ => Fate::Failed(Failing::Transient),
        }
    }
}

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Served,
    /// Nothing is done.
    Failed(Failing),
    /// It takes effect, and its answer is lost.
    Lost,
    /// Its answer is lost, and it takes effect later, or never.
    Late,
}

/// The answer to a conditional write.
type Put = Result<PutOutcome, StoreError>;

fn apply_late(world: &mut World, flying: Flying) {
    let Flying {
        process,
        apply,
        told,
    } = flying;
    let applied = apply(&mut world.ground);
    let outcome = match applied.downcast_ref::<Put>() {
        Some(Ok(PutOutcome::AlreadyExists)) => ": there is one",
        _ => "",
    };
    world.tell(Some(process), || format!("late: {told}{outcome}"));
}

/// Which requests of a process the store gets to next, as places in ascending order.
fn draw_requests(world: &mut World, number: usize) -> Vec<usize> {
    let waiting = world.waiting.iter().enumerate();
    let mine = waiting.filter(|(_, request)| request.process == number);
    let mine: Vec<usize> = mine.map(|(at, _)| at).collect();
    // Reads come many at once, and seldom matter one by one.
    if world.rng.bool() {
        let is_read = |at: &usize| !world.waiting[*at].is_write;
        let reads: Vec<usize> = mine.iter().copied().filter(is_read).collect();
        if !reads.is_empty() {
            return reads;
        }
    }
    let nth = world.rng.usize(..mine.len());
    vec![mine[nth]]
}

/// What a run is mostly about. All at once is met in every one, and each of these more often than chance would have it.
#[derive(Debug, Clone, Copy)]
enum Theme {
    Anything,
    /// Many images, and who reads them while they are dropped.
    Retention,
    /// Saves that others take for dead.
    Clearing,
    /// A store that fails when it matters.
    Spilling,
}

fn draw_theme(rng: &mut fastrand::Rng) -> Theme {
    let themes = [
        Theme::Anything,
        Theme::Retention,
        Theme::Clearing,
        Theme::Spilling,
    ];
    themes[rng.usize(..themes.len())]
}

fn draw_troubles(rng: &mut fastrand::Rng, theme: Theme) -> Troubles {
    match theme {
        Theme::Spilling => Troubles {
            faults: [60, 15, 6][rng.usize(..3)],
            deaths: rng.u32(..3),
            silences: rng.u32(2..7),
        },
        _ => Troubles {
            faults: [0, 60, 15, 6][rng.usize(..4)],
            deaths: rng.u32(..4),
            silences: rng.u32(..3),
        },
    }
}

/// Nodes on which the job is saved and restored, whoever clears up, and whoever looks.
fn draw_plan(rng: &mut fastrand::Rng, theme: Theme) -> Vec<Vec<Task>> {
    let mut plan = Vec::new();
    let (nodes, keepers) = match theme {
        Theme::Anything => (1..4, 0..3),
        Theme::Retention => (2..4, 1..3),
        Theme::Clearing => (2..4, 1..3),
        Theme::Spilling => (1..3, 0..2),
    };
    for _ in 0..rng.usize(nodes) {
        plan.push(draw_node(rng, theme));
    }
    for _ in 0..rng.usize(keepers) {
        let prunes = match theme {
            Theme::Retention => 4,
            Theme::Clearing => 1,
            _ => 2,
        };
        let spilled = rng.u32(..4) == 0;
        let tasks = 0..rng.usize(1..4);
        let task = |prunes: bool| match prunes {
            true => Task::Prune,
            false => Task::Gc { spilled },
        };
        plan.push(tasks.map(|_| task(rng.u32(..5) < prunes)).collect());
    }
    if rng.bool() {
        plan.push(vec![Task::Look; rng.usize(1..3)]);
    }
    plan
}

/// The lives of a job on one node, and what comes between them.
fn draw_node(rng: &mut fastrand::Rng, theme: Theme) -> Vec<Task> {
    let mut node = Vec::new();
    let (restores, spills) = match theme {
        Theme::Retention => (3, 2),
        Theme::Spilling => (1, 5),
        _ => (2, 3),
    };
    if rng.u32(..4) < restores {
        let ends = match rng.u32(..16) {
            0..=1 => RestoreEnd::Bad,
            2..=3 => RestoreEnd::Refused,
            4..=5 => RestoreEnd::Locked,
            _ => RestoreEnd::Runs,
        };
        node.push(Task::Restore(Restore {
            is_named: rng.bool(),
            sees_spill: rng.bool(),
            ends,
        }));
        if rng.bool() {
            node.push(Task::Recover);
        }
    }
    for _ in 0..rng.usize(..4) {
        let ways = [Spill::Keep, Spill::GiveBack, Spill::Always];
        let spill = (rng.u32(..5) < spills).then(|| ways[rng.usize(..3)]);
        node.push(Task::Save(Save { spill }));
        if rng.bool() {
            node.push(Task::Recover);
        }
        if spill.is_some() && rng.bool() {
            node.push(Task::Resume);
        }
    }
    node
}
