//! The entries of a job's log where the store has no conditional creates: each under a key that nobody else writes, in the order of the epochs that a scheduler gives.
//!
//! In: the store, the epoch of who writes (`job.epoch`; none for who only reads). Out: the same store, in which `<job>/log/<n:08>.json` is created once, whatever the store does with `If-None-Match`. What can fail: the store; a later epoch, or another
//! writer of ours ([`StoreError::Fenced`]).
//!
//! From reads and writes alone no two writers can agree on who was first. So somebody else says it: every start of a job has an epoch above those of the starts before it. What is written stands below `<job>/log/epoch-<E:016>/`:
//!
//! | object | is |
//! |---|---|
//! | `writer-<nonce>.json` | a writer of the epoch: nobody of an earlier one writes behind it |
//! | `base-<nonce>.json` | how many entries of which earlier epochs come before those of this one |
//! | `<k:08>-<nonce>.json` | the k-th entry of the epoch |
//!
//! Entry n of the log is the n-th of that chain. A writer says that it is there (`writer`), looks who else is, counts what is there by then (`base`), and only then writes. Who writes an entry looks afterwards whether a later epoch has begun: if it has, its base decides whether the entry counts. One of the two always
//! sees the other, on a store that shows what it has taken to every read and listing from then on; `preflight` and every save look whether it does.
//!
//! | we die | what exists |
//! |---|---|
//! | after `writer` | an epoch that has begun and has nothing: nobody of an earlier one writes any more, readers wait for it once, and the next epoch leaves it out |
//! | after `base` | an epoch without entries |
//! | while an entry is sent | all of it or nothing; should it come when the next writer of our epoch has written in its place, both are refused and named |

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt, try_join, try_join_all};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::retry::{RetryPolicy, Retrying};
use super::{
    Facts, Key, Listed, ObjectInfo, PartBody, PartNumber, PartReceipt, PutOutcome, RangeSink,
    Store, StoreError, UploadId, create_or_find,
};
use crate::error::one_line;
use crate::progress::Meter;
use crate::writer::{ProcessIdentity, random_hex};

/// Highest epoch: sixteen digits in the key.
pub const EPOCH_MAX: u64 = 9_999_999_999_999_999;

/// Digits of epochs and of entries in keys.
const EPOCH_DIGITS: usize = 16;
const ENTRY_DIGITS: usize = 8;

/// Most entries of one epoch.
const ENTRIES_MAX: u64 = 99_999_999;

/// Version of what stands there besides the entries.
const FORMAT: u32 = 1;

/// Most bytes of a writer or a base: that of more than ten thousand epochs.
const LEN_MAX: usize = 256 << 10;

/// How often, and how far apart, a later epoch is asked for its base: together longer than one takes that is not held up between its two requests.
const LOOKS: u32 = 20;
const LOOK_PAUSE: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 250 });

/// How often a log that lacks something is listed before that counts. A listing of many pages may have been overtaken.
const GAP_LOOKS: u32 = 3;

/// Writers of one epoch that are read at once.
const READS: usize = 16;

/// See the module.
#[derive(Debug)]
pub struct Epochs {
    inner: Arc<dyn Store>,
    /// The same, for what one answer takes several requests: each of them is tried again by itself, or all of them would have to succeed at once.
    patient: Retrying<dyn Store>,
    epoch: Option<u64>,
    /// Ours, in keys.
    nonce: String,
    /// Ours, to others; or why we do not know.
    by: Result<ProcessIdentity, String>,
    logs: Mutex<HashMap<String, Arc<Log>>>,
}

/// What is known of one job's log.
#[derive(Debug, Default)]
struct Log {
    /// What it is, and stays.
    kind: OnceLock<Kind>,
    state: tokio::sync::Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The last look, and when it was begun.
    seen: Option<(Instant, Arc<Seen>)>,
    /// The last one at which no later epoch had been begun without its base: what it has stays for ever.
    decided: Option<Arc<Seen>>,
    /// An epoch that was waited for, and has not said what counts.
    silent: Option<u64>,
    /// By their keys. They never change.
    bases: HashMap<Key, Base>,
    /// Ours, as it was sent first: whatever becomes of a request, there is one base of ours.
    base: Option<(Key, Bytes)>,
    /// The epoch is ours.
    is_taken: bool,
    /// An entry of ours that may stand.
    pending: Option<Pending>,
}

/// An entry that was sent, or is about to be.
#[derive(Debug, Clone)]
struct Pending {
    slot: u64,
    entry: u64,
    place: Key,
    body: Bytes,
}

/// Which kind of log a job has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Plain,
    ByEpoch,
}

/// A log as it was listed.
#[derive(Debug)]
struct Seen {
    epochs: BTreeMap<u64, Epoch>,
    /// Epochs in order, and how many entries of each count; of the last one all.
    chain: Vec<(u64, u64)>,
}

/// Names below an epoch.
#[derive(Debug, Default)]
struct Epoch {
    writers: Vec<Key>,
    bases: Vec<Key>,
    entries: BTreeMap<u64, Vec<Key>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Writer {
    format: u32,
    by: ProcessIdentity,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Base {
    format: u32,
    /// Epochs and numbers of entries, first to last.
    after: Vec<(u64, u64)>,
}

impl Seen {
    /// The last epoch that somebody writes in.
    fn newest(&self) -> Option<(u64, &Epoch)> {
        let mut epochs = self.epochs.iter().rev();
        let (number, epoch) = epochs.find(|(_, epoch)| !epoch.writers.is_empty())?;
        Some((*number, epoch))
    }

    /// The last epoch that somebody writes in, if it is later than this one.
    fn later_than(&self, epoch: u64) -> Option<(u64, &Epoch)> {
        self.newest().filter(|(newest, _)| *newest > epoch)
    }

    /// The last epoch of the chain.
    fn last(&self) -> Option<u64> {
        self.chain.last().map(|(last, _)| *last)
    }

    /// The epoch that has begun, and has not said yet what of the others counts.
    fn undecided(&self) -> Option<u64> {
        let (newest, _) = self.newest()?;
        self.last()
            .is_none_or(|last| last < newest)
            .then_some(newest)
    }

    fn len(&self) -> u64 {
        self.chain.iter().map(|(_, count)| count).sum()
    }

    /// Where an entry of the log stands: its epoch, its number there, its key.
    fn place(&self, slot: u64) -> Option<(u64, u64, &Key)> {
        let mut before = 0;
        for (number, count) in &self.chain {
            let entry = slot.checked_sub(before).filter(|entry| *entry > 0)?;
            if entry <= *count {
                let keys = self.epochs.get(number)?.entries.get(&entry)?;
                return Some((*number, entry, keys.first()?));
            }
            before += count;
        }
        None
    }

    /// Whether the k-th entry of an epoch counts, and at which place.
    fn slot(&self, epoch: u64, entry: u64) -> Option<u64> {
        let mut before = 0;
        for (number, count) in &self.chain {
            if *number == epoch {
                return (entry <= *count).then_some(before + entry);
            }
            before += count;
        }
        None
    }

    /// What keeps the log from being read, if anything does.
    fn flaw(&self, job: &str) -> Option<String> {
        let last = self.last();
        for (number, epoch) in &self.epochs {
            // Who writes an entry has written its base before.
            let is_behind = last.is_none_or(|last| *number > last);
            if is_behind && !epoch.entries.is_empty() {
                let folder = folder(job, *number);
                return Some(format!(
                    "{folder} has entries, and no base-*.json, which says what comes before them: bring it back, or give the job another name; exclude log/ from lifecycle rules"
                ));
            }
        }
        for (number, count) in &self.chain {
            let there = self.epochs.get(number).map(|epoch| &epoch.entries);
            let listed = there.into_iter().flat_map(|there| there.range(..=*count));
            let mut expected = 1;
            for (entry, keys) in listed {
                if let [first, second, ..] = keys.as_slice() {
                    return Some(two(first, second));
                }
                if *entry != expected {
                    break;
                }
                expected += 1;
            }
            if expected <= *count {
                let folder = folder(job, *number);
                return Some(format!(
                    "{folder} lacks its entry {expected} of {count}; exclude log/ from lifecycle rules"
                ));
            }
        }
        None
    }
}

fn two(first: &Key, second: &Key) -> String {
    format!(
        "{first} and {second} stand in one place: two writers had one epoch; delete the one that is not to count, and give every start of the job an epoch of its own (job.epoch, --epoch)"
    )
}

/// The job and the number of an entry of a log.
fn slot_of(key: &Key) -> Option<(&str, u64)> {
    let (job, name) = key.as_str().split_once("/log/")?;
    let slot = number(name.strip_suffix(".json")?, ENTRY_DIGITS)?;
    (slot > 0 && !job.contains('/')).then_some((job, slot))
}

/// A number of so many digits.
fn number(text: &str, digits: usize) -> Option<u64> {
    let is_one = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| is_one)
}

/// A key that is legal because the job's own keys are.
fn key_of(text: String) -> Key {
    Key::new(&text).expect("digits and plain words behind a legal key are legal")
}

fn folder(job: &str, epoch: u64) -> String {
    format!("{job}/log/epoch-{epoch:0EPOCH_DIGITS$}")
}

/// Sorts what is listed below a log. What else lies there is not ours.
fn sorted(job: &str, listed: Vec<Listed>) -> BTreeMap<u64, Epoch> {
    let mut epochs: BTreeMap<u64, Epoch> = BTreeMap::new();
    for Listed { key, .. } in listed {
        let place = key.as_str().strip_prefix(job).and_then(|rest| {
            let (epoch, name) = rest.strip_prefix("/log/epoch-")?.split_once('/')?;
            let (name, _nonce) = name.strip_suffix(".json")?.split_once('-')?;
            Some((number(epoch, EPOCH_DIGITS)?, name.to_owned()))
        });
        let Some((epoch, name)) = place else {
            continue;
        };
        match (name.as_str(), number(&name, ENTRY_DIGITS)) {
            ("writer", _) => epochs.entry(epoch).or_default().writers.push(key),
            ("base", _) => epochs.entry(epoch).or_default().bases.push(key),
            (_, Some(entry)) if entry > 0 => {
                let entries = &mut epochs.entry(epoch).or_default().entries;
                entries.entry(entry).or_default().push(key);
            }
            _ => {}
        }
    }
    epochs
}

impl Epochs {
    /// `epoch` is that of every entry that is written, 0 to [`EPOCH_MAX`]; without one, logs of epochs are only read, and others are as the store has them. One request of several is tried again for as long as `patience`.
    pub fn new(
        inner: Arc<dyn Store>,
        epoch: Option<u64>,
        patience: Duration,
        meter: Arc<Meter>,
    ) -> Self {
        let policy = RetryPolicy {
            absence_patience: Duration::ZERO,
            ..RetryPolicy::new(patience)
        };
        // Whoever waits for all of them ends it.
        let never = CancellationToken::new();
        Self {
            patient: Retrying::new(Arc::clone(&inner), policy, never, meter),
            inner,
            epoch,
            nonce: random_hex::<8>(),
            by: ProcessIdentity::ours().map_err(|error| one_line(&error)),
            logs: Mutex::default(),
        }
    }

    fn log(&self, job: &str) -> Arc<Log> {
        let mut logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(logs.entry(job.to_owned()).or_default())
    }

    /// Which kind of log the job has, if it has one. What was looked at since `called` is not looked at again.
    async fn kind(
        &self,
        job: &str,
        log: &Log,
        called: Instant,
    ) -> Result<Option<Kind>, StoreError> {
        if let Some(kind) = log.kind.get() {
            return Ok(Some(*kind));
        }
        let mut state = log.state.lock().await;
        if let Some(kind) = log.kind.get() {
            return Ok(Some(*kind));
        }
        let seen = state.seen.as_ref();
        if seen.is_some_and(|(begun, seen)| *begun >= called && seen.epochs.is_empty()) {
            return Ok(None);
        }
        let first = key_of(format!("{job}/log/00000001.json"));
        let is_plain = self.is_there(&first).await?;
        if is_plain && self.epoch.is_none() {
            return Ok(Some(*log.kind.get_or_init(|| Kind::Plain)));
        }
        let is_by_epoch = !self.look(job, &mut state).await?.epochs.is_empty();
        let kind = match (is_plain, is_by_epoch) {
            (true, true) => {
                let what = format!(
                    "the job has two logs, {first} and {job}/log/epoch-*: it was saved with job.epoch and without; delete the one that is not to count, or give the job another name"
                );
                return Err(unfit("GetObject", &first, what));
            }
            (true, false) => Kind::Plain,
            (false, true) => Kind::ByEpoch,
            (false, false) => return Ok(None),
        };
        Ok(Some(*log.kind.get_or_init(|| kind)))
    }

    /// By a read, not by a look: what is wrong with a request stands in the answer's body, which a look does not have.
    async fn is_there(&self, key: &Key) -> Result<bool, StoreError> {
        match self.patient.get(key, LEN_MAX).await.map_err(plain) {
            Ok(there) => Ok(there.is_some()),
            Err(StoreError::Mismatch { .. }) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Lists a log.
    async fn look(&self, job: &str, state: &mut State) -> Result<Arc<Seen>, StoreError> {
        let mut looks = 0;
        loop {
            let begun = Instant::now();
            let seen = Arc::new(self.list_once(job, state).await?);
            looks += 1;
            if let Some(flaw) = seen.flaw(job) {
                if looks < GAP_LOOKS {
                    tokio::time::sleep(LOOK_PAUSE).await;
                    continue;
                }
                let log = key_of(format!("{job}/log"));
                return Err(unfit("ListObjectsV2", &log, flaw));
            }
            if seen.undecided().is_none() {
                state.decided = Some(Arc::clone(&seen));
            }
            state.seen = Some((begun, Arc::clone(&seen)));
            return Ok(seen);
        }
    }

    async fn list_once(&self, job: &str, state: &mut State) -> Result<Seen, StoreError> {
        let listed = self
            .patient
            .list(&format!("{job}/log/epoch-"))
            .await
            .map_err(plain)?;
        let epochs = sorted(job, listed);
        let mut based = epochs.iter().rev();
        let mut chain = Vec::new();
        if let Some((number, epoch)) = based.find(|(_, epoch)| !epoch.bases.is_empty()) {
            if let [first, second, ..] = epoch.bases.as_slice() {
                return Err(unfit("ListObjectsV2", first, two(first, second)));
            }
            for base in &epoch.bases {
                chain = self.base(base, *number, state).await?.after;
            }
            let last = epoch.entries.last_key_value();
            chain.push((*number, last.map_or(0, |(last, _)| *last)));
        }
        Ok(Seen { epochs, chain })
    }

    /// Looks until a later epoch has said what counts, or has been silent for too long; what was looked at since `called` is not looked at again.
    async fn look_for_reading(
        &self,
        job: &str,
        state: &mut State,
        called: Instant,
    ) -> Result<Arc<Seen>, StoreError> {
        let fresh = state.seen.as_ref().filter(|(begun, _)| *begun >= called);
        let mut seen = match fresh.map(|(_, seen)| Arc::clone(seen)) {
            Some(seen) => seen,
            None => self.look(job, state).await?,
        };
        for _ in 1..LOOKS {
            let silent = seen
                .undecided()
                .filter(|epoch| state.silent != Some(*epoch));
            if silent.is_none() {
                return Ok(seen);
            }
            tokio::time::sleep(LOOK_PAUSE).await;
            seen = self.look(job, state).await?;
        }
        state.silent = seen.undecided();
        Ok(seen)
    }

    async fn base(&self, key: &Key, epoch: u64, state: &mut State) -> Result<Base, StoreError> {
        if let Some(base) = state.bases.get(key) {
            return Ok(base.clone());
        }
        let base: Base = self.read(key).await?;
        let rises = base.after.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let is_before = base.after.last().is_none_or(|(last, _)| *last < epoch);
        let is_one = base.after.iter().all(|(_, count)| *count <= ENTRIES_MAX);
        if base.format != FORMAT || !rises || !is_before || !is_one {
            let what = "it does not say what comes before the entries of its epoch: bring back what stood there, or give the job another name".to_owned();
            return Err(unfit("GetObject", key, what));
        }
        state.bases.insert(key.clone(), base.clone());
        Ok(base)
    }

    /// What stands beside the entries, and is never changed.
    async fn read<T: for<'de> Deserialize<'de>>(&self, key: &Key) -> Result<T, StoreError> {
        let bytes = match self.patient.get(key, LEN_MAX).await.map_err(plain) {
            Ok(Some(bytes)) => bytes,
            Ok(None) => {
                return Err(StoreError::Transient {
                    operation: "GetObject",
                    key: key.to_string(),
                    what: "it is listed, and not shown".to_owned(),
                    source: None,
                });
            }
            Err(StoreError::Mismatch { what, .. }) => return Err(unfit("GetObject", key, what)),
            Err(error) => return Err(error),
        };
        serde_json::from_slice(&bytes).map_err(|error| {
            let what = format!(
                "it is damaged ({error}): bring back what stood there, or give the job another name"
            );
            unfit("GetObject", key, what)
        })
    }

    /// Becomes the writer of the epoch.
    async fn take(
        &self,
        job: &str,
        epoch: u64,
        of: &Key,
        state: &mut State,
    ) -> Result<(), StoreError> {
        let by = self
            .by
            .as_ref()
            .map_err(|why| unfit("PutObject", of, why.clone()))?;
        let folder = folder(job, epoch);
        let ours = key_of(format!("{folder}/writer-{}.json", self.nonce));
        let writer = encode(&Writer {
            format: FORMAT,
            by: by.clone(),
        });
        self.patient
            .put_if_absent(&ours, writer)
            .await
            .map_err(plain)?;
        let seen = self.look(job, state).await?;
        let others = self.other_writers(epoch, &ours, &seen).await?;
        let alive = others.iter().find(|(_, who)| match who {
            Some(who) => who != by && !who.is_known_dead(),
            None => true,
        });
        let why = match (seen.later_than(epoch), alive) {
            (Some((newest, writers)), _) => self.later(epoch, newest, writers).await,
            (None, Some((key, who))) => {
                let who = match who {
                    Some(who) => format!("{}, which is not known to have ended", named(who)),
                    None => format!("whoever wrote {key}, which this version cannot read"),
                };
                format!(
                    "epoch {epoch} belongs to {who}, and is asked for by {}; give every start of the job an epoch of its own (job.epoch, --epoch)",
                    named(by)
                )
            }
            (None, None) => {
                let is_based = seen
                    .epochs
                    .get(&epoch)
                    .is_some_and(|it| !it.bases.is_empty());
                if !is_based {
                    self.put_base(&folder, of, &seen, state).await?;
                }
                state.is_taken = true;
                // Of those that have ended nothing is to be known any more.
                for (key, _) in &others {
                    if let Err(error) = self.patient.delete(key).await {
                        tracing::debug!("{key} stays: {}", one_line(&error));
                        break;
                    }
                }
                return Ok(());
            }
        };
        // It must not keep others from what we did not get; that it stays is no harm to them where we are known to have ended.
        if let Err(error) = self.patient.delete(&ours).await {
            tracing::debug!("{ours} stays: {}", one_line(&error));
        }
        Err(fenced(of, why))
    }

    /// Says what comes before the entries of our epoch: all that is there by now.
    async fn put_base(
        &self,
        folder: &str,
        of: &Key,
        seen: &Seen,
        state: &mut State,
    ) -> Result<(), StoreError> {
        let (key, body) = state.base.get_or_insert_with(|| {
            let counted = seen.chain.iter().filter(|(_, count)| *count > 0);
            let body = encode(&Base {
                format: FORMAT,
                after: counted.copied().collect(),
            });
            (key_of(format!("{folder}/base-{}.json", self.nonce)), body)
        });
        if body.len() > LEN_MAX {
            let what = format!(
                "the job's log has {} epochs, whose order takes more than {LEN_MAX} bytes; give the job another name",
                seen.chain.len()
            );
            return Err(unfit("PutObject", of, what));
        }
        self.patient
            .put_if_absent(key, body.clone())
            .await
            .map_err(plain)?;
        Ok(())
    }

    /// Who else is a writer of the epoch, as far as that can be read.
    async fn other_writers(
        &self,
        epoch: u64,
        ours: &Key,
        seen: &Seen,
    ) -> Result<Vec<(Key, Option<ProcessIdentity>)>, StoreError> {
        let there = seen.epochs.get(&epoch);
        let others = there.map_or(&[][..], |there| &there.writers);
        let others: Vec<Key> = others.iter().filter(|key| *key != ours).cloned().collect();
        let mut found = Vec::new();
        for some in others.chunks(READS) {
            let reads: Vec<_> = some.iter().map(|key| self.writer(key)).collect();
            found.extend(try_join_all(reads).await?.into_iter().flatten());
        }
        Ok(found)
    }

    /// Whose word that is; `None` of who has taken it back, because it did not get the epoch.
    async fn writer(
        &self,
        key: &Key,
    ) -> Result<Option<(Key, Option<ProcessIdentity>)>, StoreError> {
        let bytes = self.patient.get(key, LEN_MAX).await.map_err(plain)?;
        Ok(bytes.map(|bytes| {
            let writer = serde_json::from_slice::<Writer>(&bytes).ok();
            (key.clone(), writer.map(|writer| writer.by))
        }))
    }

    /// In words, that a later epoch has begun.
    async fn later(&self, epoch: u64, newest: u64, writers: &Epoch) -> String {
        let who = match writers.writers.first() {
            Some(key) => self.read::<Writer>(key).await.ok(),
            None => None,
        };
        let who = who.map_or_else(|| "another writer".to_owned(), |writer| named(&writer.by));
        format!("epoch {newest} was begun by {who}, and ours is {epoch} (job.epoch, --epoch)")
    }

    /// Appends an entry to a log of ours, as long as nobody has begun a later epoch.
    async fn append(
        &self,
        (job, slot, epoch): (&str, u64, u64),
        key: &Key,
        body: Bytes,
    ) -> Result<PutOutcome, StoreError> {
        let log = self.log(job);
        if self.kind(job, &log, Instant::now()).await? == Some(Kind::Plain) {
            let what = "the job's log is one of a store with conditional creates, and goes by no epochs; take job.epoch (--epoch, CKPTSTREAM_EPOCH) out, or give the job another name";
            return Err(unfit("PutObject", key, what.to_owned()));
        }
        let mut state = log.state.lock().await;
        if !state.is_taken {
            self.take(job, epoch, key, &mut state).await?;
            log.kind.get_or_init(|| Kind::ByEpoch);
        }
        // What was sent before comes first, with the bytes that it had.
        self.settle((job, epoch), key, &mut state).await?;
        let seen = self.look(job, &mut state).await?;
        if slot <= seen.len() {
            // One of our epoch may be left out by a later one, and is not said to stand before that is certain.
            if let Some((of, entry, place)) = seen.place(slot)
                && of == epoch
                && seen.later_than(epoch).is_some()
            {
                let place = place.clone();
                self.must_count((job, epoch), (slot, entry, &place), key, &mut state)
                    .await?;
            }
            return Ok(PutOutcome::AlreadyExists);
        }
        if let Some((newest, writers)) = seen.later_than(epoch) {
            return Err(fenced(key, self.later(epoch, newest, writers).await));
        }
        if slot != seen.len() + 1 {
            let end = seen.len();
            let what = format!("the log ends at {end} by now, and ended later before");
            return Err(transient(key, what));
        }
        let Some((_, entries)) = seen.chain.last().filter(|(last, _)| *last == epoch) else {
            let what = format!("the store does not list the begin of epoch {epoch}");
            return Err(transient(key, what));
        };
        let entry = entries + 1;
        if entry > ENTRIES_MAX {
            let what = format!(
                "epoch {epoch} has {ENTRIES_MAX} entries, the most that it can have; start the job in a later one (job.epoch, --epoch)"
            );
            return Err(unfit("PutObject", key, what));
        }
        let folder = folder(job, epoch);
        state.pending = Some(Pending {
            slot,
            entry,
            place: key_of(format!(
                "{folder}/{entry:0ENTRY_DIGITS$}-{}.json",
                self.nonce
            )),
            body,
        });
        self.settle((job, epoch), key, &mut state).await?;
        Ok(PutOutcome::Created)
    }

    /// Sends the entry that may stand, if there is one, until it is certain that it does, or that it never counts. Whatever else comes of it leaves that open.
    async fn settle(
        &self,
        (job, epoch): (&str, u64),
        key: &Key,
        state: &mut State,
    ) -> Result<(), StoreError> {
        let Some(pending) = state.pending.clone() else {
            return Ok(());
        };
        let Pending {
            slot,
            entry,
            place,
            body,
        } = pending;
        let settling = async {
            let stands = create_or_find(&self.patient, &place, body).await;
            if !stands.map_err(plain)? {
                return Err(transient(key, format!("{place} has other bytes than ours")));
            }
            self.must_count((job, epoch), (slot, entry, &place), key, state)
                .await
        };
        let settled = settling.await;
        match settled {
            Ok(()) | Err(StoreError::Fenced { .. }) => {
                state.pending = None;
                settled
            }
            Err(error) if error.is_outcome_unknown() => Err(error),
            // A refusal of what was asked afterwards says nothing about the entry.
            Err(error) => Err(StoreError::Transient {
                operation: "PutObject",
                key: key.to_string(),
                what: "it is not known whether the entry counts".to_owned(),
                source: Some(Box::new(error)),
            }),
        }
    }

    /// An entry of our epoch stands, and no later epoch has left it out.
    async fn must_count(
        &self,
        (job, epoch): (&str, u64),
        (slot, entry, place): (u64, u64, &Key),
        key: &Key,
        state: &mut State,
    ) -> Result<(), StoreError> {
        for look in 1..=LOOKS {
            let seen = self.look(job, state).await?;
            let there = seen.slot(epoch, entry);
            let is_it = seen.place(slot).is_some_and(|(.., key)| key == place);
            let Some((newest, writers)) = seen.later_than(epoch) else {
                return match there {
                    Some(there) if there == slot && is_it => Ok(()),
                    _ => {
                        let what = format!("{place} was just created, and is not listed");
                        Err(transient(key, what))
                    }
                };
            };
            if seen.undecided().is_none() {
                return match there {
                    Some(there) if there == slot && is_it => Ok(()),
                    _ => Err(fenced(key, self.later(epoch, newest, writers).await)),
                };
            }
            if look < LOOKS {
                tokio::time::sleep(LOOK_PAUSE).await;
            }
        }
        let what = "a later epoch has begun, and does not say whether the entry counts";
        Err(transient(key, what.to_owned()))
    }

    /// Where an entry of a log stands, if it is not where its key says.
    async fn place(&self, key: &Key) -> Result<Place, StoreError> {
        let Some((job, slot)) = slot_of(key) else {
            return Ok(Place::Itself);
        };
        let called = Instant::now();
        let log = self.log(job);
        if self.kind(job, &log, called).await? != Some(Kind::ByEpoch) {
            return Ok(Place::Itself);
        }
        let mut state = log.state.lock().await;
        if let Some((.., there)) = state.decided.as_ref().and_then(|seen| seen.place(slot)) {
            return Ok(Place::There(there.clone()));
        }
        let seen = self.look_for_reading(job, &mut state, called).await?;
        if let Some(epoch) = self.epoch.filter(|_| state.is_taken)
            && let Some((newest, writers)) = seen.later_than(epoch)
        {
            return Err(fenced(key, self.later(epoch, newest, writers).await));
        }
        Ok(match seen.place(slot) {
            Some((.., there)) => Place::There(there.clone()),
            None => Place::Nowhere,
        })
    }

    /// The kind of the log that the key is of, as far as it is known; what is of no log is where its key says.
    fn known(&self, key: &Key) -> Option<Kind> {
        match slot_of(key) {
            Some((job, _)) => self.log(job).kind.get().copied(),
            None => Some(Kind::Plain),
        }
    }
}

/// Where an entry is.
enum Place {
    Itself,
    There(Key),
    Nowhere,
}

/// What ended the attempts at one of several requests. All of them may be tried again.
fn plain(error: StoreError) -> StoreError {
    match error {
        StoreError::GaveUp { source, .. } => *source,
        error => error,
    }
}

fn encode(what: &impl Serialize) -> Bytes {
    let bytes = serde_json::to_vec(what).expect("numbers and text are always JSON");
    bytes.into()
}

fn transient(key: &Key, what: String) -> StoreError {
    StoreError::Transient {
        operation: "PutObject",
        key: key.to_string(),
        what,
        source: None,
    }
}

fn fenced(key: &Key, what: String) -> StoreError {
    StoreError::Fenced {
        operation: "PutObject",
        key: key.to_string(),
        what,
    }
}

fn unfit(operation: &'static str, key: &Key, what: String) -> StoreError {
    StoreError::Unfit {
        operation,
        key: key.to_string(),
        what,
    }
}

fn named(by: &ProcessIdentity) -> String {
    format!("process {} on {}", by.pid, by.host)
}

#[deny(clippy::missing_trait_methods)]
impl Store for Epochs {
    fn begin_upload<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        self.inner.begin_upload(key)
    }

    fn put_part<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        number: PartNumber,
        body: PartBody,
    ) -> BoxFuture<'a, Result<PartReceipt, StoreError>> {
        self.inner.put_part(key, upload, number, body)
    }

    fn complete_upload<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        parts: &'a [PartReceipt],
        len: u64,
        crc64: u64,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.inner.complete_upload(key, upload, parts, len, crc64)
    }

    fn abort_upload<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.inner.abort_upload(key, upload)
    }

    fn put_if_absent<'a>(
        &'a self,
        key: &'a Key,
        body: Bytes,
    ) -> BoxFuture<'a, Result<PutOutcome, StoreError>> {
        let Some((job, slot)) = slot_of(key) else {
            return self.inner.put_if_absent(key, body);
        };
        async move {
            if let Some(epoch) = self.epoch {
                return self.append((job, slot, epoch), key, body).await;
            }
            let log = self.log(job);
            // Who creates an entry has read the log before, and that there was none is remembered.
            let since = log.state.lock().await.seen.as_ref().map(|(begun, _)| *begun);
            let kind = self.kind(job, &log, since.unwrap_or_else(Instant::now));
            match kind.await? {
                Some(Kind::Plain) | None => self.inner.put_if_absent(key, body).await,
                Some(Kind::ByEpoch) => {
                    let what = "the job's log goes by epochs; set job.epoch (--epoch, CKPTSTREAM_EPOCH) to a number above those of the starts before";
                    Err(unfit("PutObject", key, what.to_owned()))
                }
            }
        }
        .boxed()
    }

    fn get<'a>(
        &'a self,
        key: &'a Key,
        len_max: usize,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        let known = self.known(key);
        if known == Some(Kind::Plain) {
            return self.inner.get(key, len_max);
        }
        async move {
            let (place, itself) = match known {
                Some(_) => (self.place(key).await?, None),
                // Most are where their keys say, and are not to wait for the answer to that.
                None => try_join(self.place(key), self.inner.get(key, len_max)).await?,
            };
            match place {
                Place::Itself => Ok(itself),
                Place::There(key) => self.inner.get(&key, len_max).await,
                Place::Nowhere => Ok(None),
            }
        }
        .boxed()
    }

    fn read_range<'a>(
        &'a self,
        key: &'a Key,
        range: Range<u64>,
        if_match: Option<&'a str>,
        sink: &'a mut dyn RangeSink,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.inner.read_range(key, range, if_match, sink)
    }

    fn get_range<'a>(
        &'a self,
        key: &'a Key,
        range: Range<u64>,
        if_match: Option<&'a str>,
        out: &'a mut [u8],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.inner.get_range(key, range, if_match, out)
    }

    fn head<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<Option<ObjectInfo>, StoreError>> {
        if self.known(key) == Some(Kind::Plain) {
            return self.inner.head(key);
        }
        async move {
            match self.place(key).await? {
                Place::Itself => self.inner.head(key).await,
                Place::There(key) => self.inner.head(&key).await,
                Place::Nowhere => Ok(None),
            }
        }
        .boxed()
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<Listed>, StoreError>> {
        self.inner.list(prefix)
    }

    fn list_dirs<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>, StoreError>> {
        self.inner.list_dirs(prefix)
    }

    fn abort_uploads_under<'a>(
        &'a self,
        prefix: &'a str,
    ) -> BoxFuture<'a, Result<u64, StoreError>> {
        self.inner.abort_uploads_under(prefix)
    }

    fn delete<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<(), StoreError>> {
        self.inner.delete(key)
    }

    fn facts(&self) -> BoxFuture<'_, Facts> {
        self.inner.facts()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}

#[cfg(test)]
mod tests;
