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

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt, try_join, try_join_all};
use serde::{Deserialize, Serialize};

use super::{
    Facts, Key, Listed, ObjectInfo, PartBody, PartNumber, PartReceipt, PutOutcome, RangeSink,
    Store, StoreError, UploadId,
};
use crate::writer::{ProcessIdentity, random_hex};

/// Highest epoch: sixteen digits in the key.
pub const EPOCH_MAX: u64 = 9_999_999_999_999_999;

/// Version of what stands there besides the entries.
const FORMAT: u32 = 1;

/// Most bytes of a writer or a base: thousands of epochs.
const LEN_MAX: usize = 256 << 10;

/// How often, and how far apart, a later epoch is asked for its base.
const LOOKS: u32 = 20;
const LOOK_PAUSE: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 250 });

/// See the module.
#[derive(Debug)]
pub struct Epochs {
    inner: Arc<dyn Store>,
    epoch: Option<u64>,
    /// Ours, in keys.
    nonce: String,
    /// Ours, to others. `None` where we cannot look at ourselves.
    by: Option<ProcessIdentity>,
    logs: Mutex<HashMap<String, Arc<Log>>>,
}

/// What is known of one job's log.
#[derive(Debug, Default)]
struct Log {
    /// It is an ordinary one, and stays so.
    is_plain: AtomicBool,
    state: tokio::sync::Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The last look, and when it was begun.
    seen: Option<(Instant, Arc<Seen>)>,
    /// By their keys. They never change.
    bases: HashMap<Key, Base>,
    /// The epoch is ours.
    is_taken: bool,
}

/// Which kind of log a job has.
enum Kind {
    Plain,
    /// None so far.
    Nothing,
    ByEpoch(Arc<Seen>),
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
    fn is_empty(&self) -> bool {
        self.epochs.is_empty()
    }

    /// The last epoch that somebody writes in.
    fn newest(&self) -> Option<(u64, &Epoch)> {
        let mut epochs = self.epochs.iter().rev();
        let (number, epoch) = epochs.find(|(_, epoch)| !epoch.writers.is_empty())?;
        Some((*number, epoch))
    }

    fn len(&self) -> u64 {
        self.chain.iter().map(|(_, count)| count).sum()
    }

    /// Where an entry of the log stands.
    fn key(&self, slot: u64) -> Result<Option<&Key>, StoreError> {
        let mut before = 0;
        for (number, count) in &self.chain {
            if slot - before > *count {
                before += count;
                continue;
            }
            let epoch = self.epochs.get(number);
            let there = epoch.and_then(|epoch| epoch.entries.get(&(slot - before)));
            return one_of(there.map_or(&[], Vec::as_slice));
        }
        Ok(None)
    }

    /// The entry of this slot, if a writer of this nonce made it in this epoch: its number there, and its key.
    fn own(&self, epoch: u64, slot: u64, nonce: &str) -> Option<(u64, Key)> {
        let entries = &self.epochs.get(&epoch)?.entries;
        let ending = format!("-{nonce}.json");
        entries.iter().find_map(|(entry, keys)| {
            let is_there = self.slot(epoch, *entry) == Some(slot);
            let key = keys.iter().find(|key| key.as_str().ends_with(&ending))?;
            is_there.then(|| (*entry, key.clone()))
        })
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
}

/// The only one of them.
fn one_of(keys: &[Key]) -> Result<Option<&Key>, StoreError> {
    match keys {
        [] => Ok(None),
        [key] => Ok(Some(key)),
        [first, second, ..] => Err(StoreError::Refused {
            operation: "ListObjectsV2",
            key: first.to_string(),
            code: format!("{second} stands in the same place: two writers had one epoch"),
            advice: "; delete the one that is not to count, and give every start of the job an epoch of its own (job.epoch, --epoch)".to_owned(),
        }),
    }
}

/// The job and the number of an entry of a log.
fn slot_of(key: &Key) -> Option<(&str, u64)> {
    let (job, name) = key.as_str().split_once("/log/")?;
    let digits = name.strip_suffix(".json")?;
    let is_slot = digits.len() == 8 && digits.bytes().all(|byte| byte.is_ascii_digit());
    let slot = digits.parse().ok().filter(|slot| is_slot && *slot > 0)?;
    (!job.contains('/')).then_some((job, slot))
}

/// A key that is legal because the job's own keys are.
fn key_of(text: String, of: &Key) -> Result<Key, StoreError> {
    Key::new(&text).map_err(|error| StoreError::Mismatch {
        operation: "PutObject",
        key: of.to_string(),
        what: error.to_string(),
    })
}

fn folder(job: &str, epoch: u64) -> String {
    format!("{job}/log/epoch-{epoch:016}")
}

/// Sorts what is listed below a log.
fn sorted(job: &str, listed: Vec<Listed>) -> BTreeMap<u64, Epoch> {
    let mut epochs: BTreeMap<u64, Epoch> = BTreeMap::new();
    for Listed { key, .. } in listed {
        let place = key.as_str().strip_prefix(job).and_then(|rest| {
            let (epoch, name) = rest.strip_prefix("/log/epoch-")?.split_once('/')?;
            Some((epoch.parse().ok()?, name.split_once('-')?.0.to_owned()))
        });
        let Some((number, name)) = place else {
            continue;
        };
        let epoch = epochs.entry(number).or_default();
        match name.as_str() {
            "writer" => epoch.writers.push(key),
            "base" => epoch.bases.push(key),
            digits => {
                if let Ok(entry) = digits.parse() {
                    epoch.entries.entry(entry).or_default().push(key);
                }
            }
        }
    }
    epochs
}

impl Epochs {
    /// `epoch` is that of every entry that is written, 0 to [`EPOCH_MAX`]; without one, logs of epochs are only read, and others are as the store has them.
    pub fn new(inner: Arc<dyn Store>, epoch: Option<u64>) -> Self {
        Self {
            inner,
            epoch,
            nonce: random_hex::<8>(),
            by: ProcessIdentity::ours().ok(),
            logs: Mutex::default(),
        }
    }

    fn log(&self, job: &str) -> Arc<Log> {
        let mut logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(logs.entry(job.to_owned()).or_default())
    }

    /// Which kind of log the job has. What was looked at since `called` is not looked at again.
    async fn kind(&self, job: &str, of: &Key, called: Instant) -> Result<Kind, StoreError> {
        let log = self.log(job);
        if log.is_plain.load(Ordering::Acquire) {
            return Ok(Kind::Plain);
        }
        let mut state = log.state.lock().await;
        if log.is_plain.load(Ordering::Acquire) {
            return Ok(Kind::Plain);
        }
        let known = state.seen.as_ref();
        let is_by_epoch = known.is_some_and(|(_, seen)| !seen.is_empty());
        let fresh = known.filter(|(begun, _)| *begun >= called);
        let seen = match fresh.map(|(_, seen)| Arc::clone(seen)) {
            Some(seen) => seen,
            None if is_by_epoch => self.look(job, &mut state).await?,
            None => {
                let first = key_of(format!("{job}/log/00000001.json"), of)?;
                let looking = self.look(job, &mut state);
                let (first, seen) = try_join(self.inner.head(&first), looking).await?;
                if first.is_some() {
                    log.is_plain.store(true, Ordering::Release);
                    return Ok(Kind::Plain);
                }
                seen
            }
        };
        Ok(match seen.is_empty() {
            true => Kind::Nothing,
            false => Kind::ByEpoch(seen),
        })
    }

    /// Lists a log.
    async fn look(&self, job: &str, state: &mut State) -> Result<Arc<Seen>, StoreError> {
        let begun = Instant::now();
        let epochs = sorted(job, self.inner.list(&format!("{job}/log/epoch-")).await?);
        let mut based = epochs.iter().rev();
        let chain = match based.find(|(_, epoch)| !epoch.bases.is_empty()) {
            None => Vec::new(),
            Some((number, epoch)) => {
                let mut chain = match one_of(&epoch.bases)? {
                    Some(base) => self.base(base, state).await?.after,
                    None => Vec::new(),
                };
                let last = epoch.entries.last_key_value();
                chain.push((*number, last.map_or(0, |(last, _)| *last)));
                chain
            }
        };
        for (number, count) in &chain {
            let entries = epochs.get(number).map(|epoch| &epoch.entries);
            for (_, keys) in entries.into_iter().flat_map(|all| all.range(..=*count)) {
                one_of(keys)?;
            }
        }
        let seen = Arc::new(Seen { epochs, chain });
        state.seen = Some((begun, Arc::clone(&seen)));
        Ok(seen)
    }

    async fn base(&self, key: &Key, state: &mut State) -> Result<Base, StoreError> {
        if let Some(base) = state.bases.get(key) {
            return Ok(base.clone());
        }
        let base: Base = self.read(key).await?;
        let rises = base.after.windows(2).all(|pair| pair[0].0 < pair[1].0);
        if base.format != FORMAT || !rises {
            return Err(not_ours_to_read(key, "it is of another format"));
        }
        state.bases.insert(key.clone(), base.clone());
        Ok(base)
    }

    /// What stands beside the entries, and is never changed.
    async fn read<T: for<'de> Deserialize<'de>>(&self, key: &Key) -> Result<T, StoreError> {
        let bytes = self.inner.get(key, LEN_MAX).await?;
        let bytes = bytes.ok_or_else(|| StoreError::Transient {
            operation: "GetObject",
            key: key.to_string(),
            what: "it is listed, and not shown".to_owned(),
            source: None,
        })?;
        serde_json::from_slice(&bytes).map_err(|error| not_ours_to_read(key, &error.to_string()))
    }

    async fn write(&self, key: &Key, what: &impl Serialize) -> Result<(), StoreError> {
        let bytes = serde_json::to_vec_pretty(what).expect("numbers and text are always JSON");
        // Nobody else has this key: who is told that it exists has written it.
        self.inner.put_if_absent(key, bytes.into()).await?;
        Ok(())
    }

    /// Becomes the writer of the epoch.
    async fn take(
        &self,
        job: &str,
        epoch: u64,
        of: &Key,
        state: &mut State,
    ) -> Result<(), StoreError> {
        let Some(by) = self.by.clone() else {
            return Err(transient(
                of,
                "this process cannot be told from others".to_owned(),
            ));
        };
        let folder = folder(job, epoch);
        let ours = key_of(format!("{folder}/writer-{}.json", self.nonce), of)?;
        let writer = Writer { format: FORMAT, by };
        self.write(&ours, &writer).await?;
        let seen = self.look(job, state).await?;
        if let Some(why) = self.who_else(epoch, &ours, &writer.by, &seen).await? {
            // It must not keep others from what we did not get; that it stays is no harm to them where we are known to have ended.
            if let Err(error) = self.inner.delete(&ours).await {
                tracing::debug!("{ours} stays: {}", crate::error::one_line(&error));
            }
            return Err(fenced(of, why));
        }
        let there = seen.epochs.get(&epoch);
        if there.is_none_or(|there| there.bases.is_empty()) {
            let base = Base {
                format: FORMAT,
                after: seen.chain.clone(),
            };
            let key = key_of(format!("{folder}/base-{}.json", self.nonce), of)?;
            self.write(&key, &base).await?;
        }
        state.is_taken = true;
        Ok(())
    }

    /// Why the epoch cannot be ours, if it cannot.
    async fn who_else(
        &self,
        epoch: u64,
        ours: &Key,
        by: &ProcessIdentity,
        seen: &Seen,
    ) -> Result<Option<String>, StoreError> {
        if let Some((newest, writers)) = seen.newest()
            && newest > epoch
        {
            return Ok(Some(self.later(epoch, newest, writers).await));
        }
        let there = seen.epochs.get(&epoch);
        let others = there.map_or(&[][..], |there| &there.writers);
        let others = others.iter().filter(|key| *key != ours);
        let read = try_join_all(others.map(|key| async move {
            // Who does not get the epoch takes its word back.
            let bytes = self.inner.get(key, LEN_MAX).await?;
            Ok::<_, StoreError>(bytes.map(|bytes| serde_json::from_slice::<Writer>(&bytes)))
        }));
        for other in read.await?.into_iter().flatten() {
            let who = match other {
                Ok(other) if other.by == *by || other.by.is_known_dead() => continue,
                Ok(other) => named(&other.by),
                Err(_not_known) => "a writer that this version cannot read".to_owned(),
            };
            return Ok(Some(format!(
                "epoch {epoch} belongs to {who}, which is not known to have ended, and is asked for by {}; give every start of the job an epoch of its own (job.epoch, --epoch)",
                named(by)
            )));
        }
        Ok(None)
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
        let is_plain = log.is_plain.load(Ordering::Acquire)
            || matches!(self.kind(job, key, Instant::now()).await?, Kind::Plain);
        if is_plain {
            return Err(StoreError::Refused {
                operation: "PutObject",
                key: key.to_string(),
                code: "the job's log is one of a store with conditional creates".to_owned(),
                advice:
                    "; take job.epoch (--epoch, CKPTSTREAM_EPOCH) out, or give the job another name"
                        .to_owned(),
            });
        }
        let mut state = log.state.lock().await;
        if !state.is_taken {
            self.take(job, epoch, key, &mut state).await?;
        }
        let seen = self.look(job, &mut state).await?;
        if slot <= seen.len() {
            // Ours may stand there by a request whose answer was lost, and is not said to stand before that is certain.
            let ours = seen.own(epoch, slot, &self.nonce);
            if let Some((entry, place)) = ours {
                self.must_count((job, slot, epoch), entry, &place, key, &mut state)
                    .await?;
            }
            return Ok(PutOutcome::AlreadyExists);
        }
        if let Some((newest, writers)) = seen.newest()
            && newest > epoch
        {
            return Err(fenced(key, self.later(epoch, newest, writers).await));
        }
        if slot != seen.len() + 1 {
            let what = format!(
                "the log ends at {} by now, and ended later before",
                seen.len()
            );
            return Err(transient(key, what));
        }
        let entries = seen.chain.last().filter(|(last, _)| *last == epoch);
        let Some((_, entries)) = entries else {
            let what = format!("the store does not list the begin of epoch {epoch}");
            return Err(transient(key, what));
        };
        let entry = entries + 1;
        let place = format!("{}/{entry:08}-{}.json", folder(job, epoch), self.nonce);
        let place = key_of(place, key)?;
        self.inner.put_if_absent(&place, body).await?;
        self.must_count((job, slot, epoch), entry, &place, key, &mut state)
            .await?;
        Ok(PutOutcome::Created)
    }

    /// An entry of ours stands, and no later epoch has left it out.
    async fn must_count(
        &self,
        (job, slot, epoch): (&str, u64, u64),
        entry: u64,
        place: &Key,
        key: &Key,
        state: &mut State,
    ) -> Result<(), StoreError> {
        for look in 1..=LOOKS {
            let seen = self.look(job, state).await?;
            let there = seen.epochs.get(&epoch);
            let there = there.and_then(|there| there.entries.get(&entry));
            if one_of(there.map_or(&[], Vec::as_slice))? != Some(place) {
                let what = format!("{place} was just created, and is not listed");
                return Err(transient(key, what));
            }
            let Some((newest, writers)) = seen.newest().filter(|(newest, _)| *newest > epoch)
            else {
                return Ok(());
            };
            let is_decided = seen.chain.last().is_some_and(|(last, _)| *last == newest);
            match (is_decided, seen.slot(epoch, entry)) {
                (true, Some(there)) if there == slot => return Ok(()),
                (true, _) => return Err(fenced(key, self.later(epoch, newest, writers).await)),
                (false, _) if look < LOOKS => tokio::time::sleep(LOOK_PAUSE).await,
                (false, _) => {}
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
        Ok(match self.kind(job, key, Instant::now()).await? {
            Kind::Plain | Kind::Nothing => Place::Itself,
            Kind::ByEpoch(seen) => match seen.key(slot)? {
                Some(key) => Place::There(key.clone()),
                None => Place::Nowhere,
            },
        })
    }

    /// Whether it is where its key says without a look.
    fn is_itself(&self, key: &Key) -> bool {
        slot_of(key).is_none_or(|(job, _)| self.log(job).is_plain.load(Ordering::Acquire))
    }
}

/// Where an entry is.
enum Place {
    Itself,
    There(Key),
    Nowhere,
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

fn not_ours_to_read(key: &Key, what: &str) -> StoreError {
    StoreError::Refused {
        operation: "GetObject",
        key: key.to_string(),
        code: format!("the order of the log's epochs cannot be read: {what}"),
        advice: String::new(),
    }
}

fn named(by: &ProcessIdentity) -> String {
    format!("process {} on {}", by.pid, by.host)
}

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
            match self.kind(job, key, Instant::now()).await? {
                Kind::Plain | Kind::Nothing => self.inner.put_if_absent(key, body).await,
                Kind::ByEpoch(seen) => Err(StoreError::Refused {
                    operation: "PutObject",
                    key: key.to_string(),
                    code: format!(
                        "the job's log goes by epochs, of which the last is {}",
                        seen.newest().map_or(0, |(newest, _)| newest)
                    ),
                    advice: "; set job.epoch (--epoch, CKPTSTREAM_EPOCH)".to_owned(),
                }),
            }
        }
        .boxed()
    }

    fn get<'a>(
        &'a self,
        key: &'a Key,
        len_max: usize,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        if self.is_itself(key) {
            return self.inner.get(key, len_max);
        }
        async move {
            // Most are where their keys say, and are not to wait for the answer to that.
            let itself = self.inner.get(key, len_max);
            match try_join(self.place(key), itself).await? {
                (Place::Itself, there) => Ok(there),
                (Place::There(key), _) => self.inner.get(&key, len_max).await,
                (Place::Nowhere, _) => Ok(None),
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

    fn head<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<Option<ObjectInfo>, StoreError>> {
        if self.is_itself(key) {
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
