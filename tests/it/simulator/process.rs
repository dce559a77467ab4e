//! One process of a run: a ckptstream that somebody started, on a node that outlives it.
//!
//! What it does to the log, to pins and to data is the product's own code; the story around that is told again here in the order of `src/`, because the product's stories need a driver and block a thread.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ckptstream::job_log::JobLog;
use ckptstream::ownership::{OwnershipError, WhileSaved, wait_for_savers};
use ckptstream::progress::Meter;
use ckptstream::store::retry::{RetryPolicy, Retrying};
use ckptstream::store::{Key, Store};
use tokio_util::sync::CancellationToken;

use super::Rule;
use super::oracle::Oracle;
use super::sample::{ATTEMPTS_MAX, job, nonce};
use super::world::{Place, Scheduled, Shared};

/// Longer than any run.
const LONG: Duration = Duration::from_secs(24 * 3600);

/// What a node keeps when a process on it ends.
#[derive(Default)]
pub(super) struct Node {
    /// What was written down by those who left something to be done.
    pub(super) journals: RefCell<Vec<Journal>>,
}

/// Notes for whoever finds them, of a target that is not as it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Journal {
    /// It was being saved.
    Save {
        attempt: String,
        next_slot: u64,
        /// It has its memory again: it is locked, and `recover` unlocks it.
        has_its_memory: bool,
    },
    /// It was being restored, and has its memory.
    Restore {
        writer: String,
        generation: u64,
        is_named: bool,
    },
}

/// See the module.
#[derive(Clone)]
pub(super) struct Process {
    pub(super) number: usize,
    pub(super) name: Rc<str>,
    world: Shared,
    pub(super) store: Arc<Retrying<Scheduled>>,
    pub(super) spill: Scheduled,
    here: Scheduled,
    pub(super) node: Rc<Node>,
    /// One process at a time has the job's part of the spill.
    spill_is_claimed: Rc<Cell<bool>>,
    broken: Option<Rule>,
}

/// The job's part of the spill, until it is dropped or its owner dies.
pub(super) struct SpillClaim(Rc<Cell<bool>>);

impl Drop for SpillClaim {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

impl Process {
    pub(super) fn new(
        world: &Shared,
        name: &str,
        node: &Rc<Node>,
        spill_is_claimed: &Rc<Cell<bool>>,
    ) -> Self {
        let (number, broken) = {
            let mut world = world.lock();
            let number = world.names.len();
            world.names.push(format!("{name}-{number}"));
            (number, world.ground.broken)
        };
        let scheduled = |place| Scheduled::new(world, number, place);
        // Time does not pass here: who gives up is told to, see `give_up`. What is not there now is not there.
        let policy = RetryPolicy {
            timeout: LONG,
            pause_first: Duration::ZERO,
            pause_max: Duration::ZERO,
            absence_patience: Duration::ZERO,
        };
        let store = Retrying::new(
            Arc::new(scheduled(Place::Store)),
            policy,
            CancellationToken::new(),
            Arc::new(Meter::default()),
        );
        Self {
            number,
            name: format!("{name}-{number}").into(),
            world: world.clone(),
            store: Arc::new(store),
            spill: scheduled(Place::Spill),
            here: scheduled(Place::Here),
            node: Rc::clone(node),
            spill_is_claimed: Rc::clone(spill_is_claimed),
            broken,
        }
    }

    /// Whether this rule is the one that nobody keeps in this run.
    pub(super) fn breaks(&self, rule: Rule) -> bool {
        self.broken == Some(rule)
    }

    /// A moment at which others may come first, or death.
    pub(super) async fn step(&self, what: &str) {
        self.here.step(what).await;
    }

    /// 0 to one less than `count`.
    pub(super) fn draw(&self, count: usize) -> usize {
        self.world.lock().rng.usize(..count)
    }

    /// What the oracle hears; it is told in the history too.
    pub(super) fn say(&self, line: &str, tell: impl FnOnce(&mut Oracle)) {
        let mut world = self.world.lock();
        world.tell(Some(self.number), || format!("** {line}"));
        tell(&mut world.ground.oracle);
    }

    /// The same of something that the spill bears out.
    pub(super) fn completed(&self, attempt: &str) {
        let mut world = self.world.lock();
        world.tell(Some(self.number), || "** completes".to_owned());
        let ground = &mut world.ground;
        ground.oracle.completed(&ground.spill, attempt);
    }

    /// A nonce that nobody had before.
    pub(super) fn new_attempt(&self) -> String {
        let mut world = self.world.lock();
        let number = world.attempts;
        assert!(number < ATTEMPTS_MAX, "a run has fewer attempts");
        world.attempts += 1;
        let nonce = nonce(number);
        world.tell(Some(self.number), || format!("** is attempt {nonce}"));
        nonce
    }

    /// `None` while somebody else has it.
    pub(super) fn claim_spill(&self) -> Option<SpillClaim> {
        let is_free = !self.spill_is_claimed.replace(true);
        is_free.then(|| SpillClaim(Rc::clone(&self.spill_is_claimed)))
    }

    /// From now on every call of the store ends without an answer.
    pub(super) fn give_up(&self) {
        self.store.set_deadline(Instant::now());
    }

    /// Takes that back: what is cleaned up has time of its own.
    pub(super) fn has_time_again(&self) {
        self.store.set_deadline(Instant::now() + LONG);
    }

    /// The log when nobody saves the job, or nobody is waited for any longer.
    pub(super) async fn log(&self) -> Result<JobLog, OwnershipError> {
        let cancel = CancellationToken::new();
        for _ in 0..self.draw(4) {
            let free = wait_for_savers(&*self.store, job(), WhileSaved::Refuse, &cancel).await;
            let Err(OwnershipError::Busy { .. }) = free else {
                return free;
            };
            self.step("waits for somebody's save").await;
        }
        wait_for_savers(&*self.store, job(), WhileSaved::TakeOver, &cancel).await
    }

    /// Deletes everything that an attempt has, as somebody would who does not ask.
    pub(super) async fn empty(&self, attempt: &str) -> Option<()> {
        let prefix = format!("{}/data/{attempt}/", job());
        for listed in self.store.list(&prefix).await.ok()? {
            self.delete(&listed.key).await?;
        }
        Some(())
    }

    pub(super) async fn delete(&self, key: &Key) -> Option<()> {
        self.store.delete(key).await.ok()
    }

    /// Attempts that have data.
    pub(super) async fn attempts(&self) -> Option<Vec<String>> {
        let prefix = format!("{}/data/", job());
        self.store.list_dirs(&prefix).await.ok()
    }

    /// Those of the newest images, as they must stay.
    pub(super) fn newest(log: &JobLog, count: usize) -> HashSet<String> {
        let images = log.images().into_iter().take(count);
        images.map(|(_, image)| image.attempt.clone()).collect()
    }
}
