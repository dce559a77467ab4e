//! What all processes of a run share: the store, a spill, and the requests on their way to them.
//!
//! In: calls of [`Store`]. Out: answers, when the scheduler says so; until then a request waits, and whoever asked with it. A request whose answer nobody waits for any more may be applied at any later time, or
//! never: that is what becomes of a write whose sender died, gave up, or heard too early that it failed.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use ckptstream::job_log::Entry;
use ckptstream::store::memory::MemoryStore;
use ckptstream::store::{
    Key, Listed, ObjectInfo, PartBody, PartNumber, PartReceipt, PutOutcome, RangeSink, Store,
    StoreError, UploadId,
};
use futures::FutureExt;
use futures::future::BoxFuture;

use super::Rule;
use super::oracle::Oracle;

/// Where a request goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// The bucket: it fails.
    Store,
    /// A directory that outlives the node: it does not fail.
    Spill,
    /// Nowhere: a step that a process takes by itself.
    Here,
}

/// What is there, and who watches it. What stands in the store changes only here.
pub(super) struct Ground {
    pub(super) store: MemoryStore,
    pub(super) spill: MemoryStore,
    pub(super) oracle: Oracle,
    /// The rule that is broken in this run.
    pub(super) broken: Option<Rule>,
    /// In which order pins came: they are named by true chance, and a run must not depend on that.
    pins: HashMap<Key, usize>,
}

impl Ground {
    fn place(&self, place: Place) -> &MemoryStore {
        match place {
            Place::Spill => &self.spill,
            Place::Store | Place::Here => &self.store,
        }
    }

    fn put(&mut self, place: Place, key: &Key, body: &Bytes) -> Result<PutOutcome, StoreError> {
        let is_log = key.as_str().contains("/log/");
        if is_log && place == Place::Store && self.broken == Some(Rule::ConditionalWrites) {
            now(self.store.delete(key))?;
        }
        let outcome = now(self.place(place).put_if_absent(key, body.clone()))?;
        if outcome == PutOutcome::Created && place == Place::Store {
            if key.as_str().contains("/pins/") {
                self.pins.insert(key.clone(), self.pins.len());
            }
            self.oracle.was_put(&self.store, key, body);
        }
        Ok(outcome)
    }

    fn delete(&mut self, place: Place, key: &Key) -> Result<(), StoreError> {
        now(self.place(place).delete(key))?;
        if place == Place::Store {
            self.oracle.was_deleted(key);
        }
        Ok(())
    }

    fn list(&self, place: Place, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        let mut listed = now(self.place(place).list(prefix))?;
        if prefix.ends_with("/pins/") {
            listed.sort_by_key(|listed| self.pins.get(&listed.key));
        }
        Ok(listed)
    }
}

/// A [`MemoryStore`] answers at once.
pub(super) fn now<T>(answer: impl Future<Output = T>) -> T {
    answer.now_or_never().expect("memory answers at once")
}

/// What a request does when the store gets to it; the answer is a `Result<T, StoreError>`.
type Apply = Box<dyn FnOnce(&mut Ground) -> Box<dyn Any + Send> + Send>;

/// A request that somebody waits for.
pub(super) struct Request {
    pub(super) process: usize,
    pub(super) place: Place,
    pub(super) operation: &'static str,
    pub(super) key: String,
    /// It changes something.
    pub(super) is_write: bool,
    pub(super) apply: Apply,
    /// What is put, for the history.
    body: Option<Bytes>,
    slot: Arc<Slot>,
}

impl Request {
    /// Nobody waits for the answer any more.
    fn is_forsaken(&self) -> bool {
        self.slot.is_forsaken.load(Ordering::Relaxed)
    }

    /// Gives whoever asked their answer.
    pub(super) fn answer(slot: &Slot, answer: Answer) {
        *locked(&slot.answer) = Some(answer);
        if let Some(waker) = locked(&slot.waker).take() {
            waker.wake();
        }
    }

    /// What to do, and who is told.
    pub(super) fn into_parts(self) -> (Apply, Arc<Slot>) {
        (self.apply, self.slot)
    }

    pub(super) fn describe(&self) -> String {
        // A pin's name is the one thing in a history that differs from run to run.
        let key = match self.key.split_once("pins/") {
            Some((before, name)) if !name.is_empty() => format!("{before}pins/…"),
            _ => self.key.clone(),
        };
        let entry = self.body.as_ref().filter(|_| key.contains("/log/"));
        let entry = entry.and_then(|body| serde_json::from_slice::<Entry>(body).ok());
        let entry = entry.map_or_else(String::new, |entry| format!(": {}", entry.describe()));
        match self.place {
            Place::Store => format!("{} {key}{entry}", self.operation),
            Place::Spill => format!("{} {key} in the spill", self.operation),
            Place::Here => key,
        }
    }

    pub(super) fn failed(&self, kind: Failing) -> StoreError {
        let (operation, key) = (self.operation, self.key.clone());
        match kind {
            Failing::Transient => StoreError::Transient {
                operation,
                key,
                what: "no answer".to_owned(),
                source: None,
            },
            Failing::SlowDown => StoreError::SlowDown {
                operation,
                key,
                code: "SlowDown".to_owned(),
            },
            Failing::Refused => StoreError::Refused {
                operation,
                key,
                code: "AccessDenied".to_owned(),
                advice: String::new(),
            },
        }
    }
}

/// How a request fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failing {
    Transient,
    SlowDown,
    Refused,
}

/// What comes back.
pub(super) enum Answer {
    /// A `Result<T, StoreError>` of the request's own type.
    Applied(Box<dyn Any + Send>),
    Failed(StoreError),
}

/// Where an answer is put for who waits for it.
#[derive(Default)]
pub(super) struct Slot {
    answer: Mutex<Option<Answer>>,
    waker: Mutex<Option<Waker>>,
    is_forsaken: AtomicBool,
}

/// A write on its way that nobody waits for.
pub(super) struct Flying {
    pub(super) process: usize,
    pub(super) apply: Apply,
    pub(super) told: String,
}

/// What all processes share.
pub(super) struct World {
    pub(super) ground: Ground,
    pub(super) rng: fastrand::Rng,
    pub(super) waiting: Vec<Request>,
    pub(super) flying: Vec<Flying>,
    /// One line for everything that happened, if somebody wants to read it.
    pub(super) history: Option<Vec<String>>,
    /// Names of the processes, by their numbers.
    pub(super) names: Vec<String>,
    /// Attempts so far.
    pub(super) attempts: usize,
}

/// A [`World`] for everybody.
#[derive(Clone)]
pub(super) struct Shared(Arc<Mutex<World>>);

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shared")
    }
}

impl Shared {
    pub(super) fn new(seed: u64, broken: Option<Rule>, is_told: bool) -> Self {
        Self(Arc::new(Mutex::new(World {
            ground: Ground {
                store: MemoryStore::with_part_len_min(0),
                spill: MemoryStore::with_part_len_min(0),
                oracle: Oracle::default(),
                broken,
                pins: HashMap::new(),
            },
            rng: fastrand::Rng::with_seed(seed),
            waiting: Vec::new(),
            flying: Vec::new(),
            history: is_told.then(Vec::new),
            names: Vec::new(),
            attempts: 0,
        })))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, World> {
        locked(&self.0)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    /// Adds a line to the history.
    pub(super) fn tell(&mut self, process: Option<usize>, line: impl FnOnce() -> String) {
        let Some(history) = &mut self.history else {
            return;
        };
        let name = process.map_or("", |process| self.names[process].as_str());
        history.push(format!("{:>4} {name:<11} {}", history.len() + 1, line()));
    }

    /// How the history calls a request; nothing where there is none.
    pub(super) fn words_for(&self, request: &Request) -> String {
        let is_told = self.history.is_some();
        if is_told {
            request.describe()
        } else {
            String::default()
        }
    }

    /// Requests that nobody waits for any more are on their own.
    pub(super) fn bury(&mut self) {
        let mut at = 0;
        while at < self.waiting.len() {
            if !self.waiting[at].is_forsaken() {
                at += 1;
                continue;
            }
            let request = self.waiting.remove(at);
            if request.is_write && request.place != Place::Here {
                let (process, told) = (request.process, self.words_for(&request));
                let (apply, _) = request.into_parts();
                self.flying.push(Flying {
                    process,
                    apply,
                    told,
                });
            }
        }
    }
}

/// The store, or the spill, as one process sees it.
#[derive(Debug, Clone)]
pub(super) struct Scheduled {
    world: Shared,
    process: usize,
    place: Place,
}

impl Scheduled {
    pub(super) fn new(world: &Shared, process: usize, place: Place) -> Self {
        Self {
            world: world.clone(),
            process,
            place,
        }
    }

    /// Waits for its turn.
    pub(super) async fn step(&self, what: &str) {
        let nothing = |_: &mut Ground| Ok(());
        let stepped: Result<(), StoreError> = self.call("step", what, true, nothing).await;
        stepped.expect("steps do not fail");
    }

    fn call<T: Send + 'static>(
        &self,
        operation: &'static str,
        key: &str,
        is_write: bool,
        apply: impl FnOnce(&mut Ground) -> Result<T, StoreError> + Send + 'static,
    ) -> Call<T> {
        self.call_with(operation, key, is_write, None, apply)
    }

    fn call_with<T: Send + 'static>(
        &self,
        operation: &'static str,
        key: &str,
        is_write: bool,
        body: Option<Bytes>,
        apply: impl FnOnce(&mut Ground) -> Result<T, StoreError> + Send + 'static,
    ) -> Call<T> {
        let slot = Arc::new(Slot::default());
        self.world.lock().waiting.push(Request {
            process: self.process,
            place: self.place,
            operation,
            key: key.to_owned(),
            is_write,
            apply: Box::new(move |ground| Box::new(apply(ground))),
            body,
            slot: Arc::clone(&slot),
        });
        Call {
            slot,
            of: std::marker::PhantomData,
        }
    }
}

/// A request under way.
struct Call<T> {
    slot: Arc<Slot>,
    of: std::marker::PhantomData<fn() -> T>,
}

impl<T: Send + 'static> Future for Call<T> {
    type Output = Result<T, StoreError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match locked(&self.slot.answer).take() {
            Some(Answer::Applied(answer)) => {
                let answer = answer.downcast::<Result<T, StoreError>>();
                Poll::Ready(*answer.unwrap_or_else(|_other| unreachable!("its own type")))
            }
            Some(Answer::Failed(error)) => Poll::Ready(Err(error)),
            None => {
                *locked(&self.slot.waker) = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl<T> Drop for Call<T> {
    fn drop(&mut self) {
        self.slot.is_forsaken.store(true, Ordering::Relaxed);
    }
}

impl Store for Scheduled {
    fn begin_upload<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        let (place, on) = (self.place, key.clone());
        let begin = move |ground: &mut Ground| now(ground.place(place).begin_upload(&on));
        async move {
            self.call("CreateMultipartUpload", key.as_str(), true, begin)
                .await
        }
        .boxed()
    }

    fn put_part<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        number: PartNumber,
        body: PartBody,
    ) -> BoxFuture<'a, Result<PartReceipt, StoreError>> {
        let (place, on, upload) = (self.place, key.clone(), upload.clone());
        let put = move |ground: &mut Ground| {
            now(ground.place(place).put_part(&on, &upload, number, body))
        };
        async move { self.call("UploadPart", key.as_str(), true, put).await }.boxed()
    }

    fn complete_upload<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
        parts: &'a [PartReceipt],
        len: u64,
        crc64: u64,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let (place, on, upload, parts) = (self.place, key.clone(), upload.clone(), parts.to_vec());
        let complete = move |ground: &mut Ground| {
            let store = ground.place(place);
            now(store.complete_upload(&on, &upload, &parts, len, crc64))
        };
        async move {
            self.call("CompleteMultipartUpload", key.as_str(), true, complete)
                .await
        }
        .boxed()
    }

    fn abort_upload<'a>(
        &'a self,
        key: &'a Key,
        upload: &'a UploadId,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let (place, on, upload) = (self.place, key.clone(), upload.clone());
        let abort = move |ground: &mut Ground| now(ground.place(place).abort_upload(&on, &upload));
        async move {
            self.call("AbortMultipartUpload", key.as_str(), true, abort)
                .await
        }
        .boxed()
    }

    fn put_if_absent<'a>(
        &'a self,
        key: &'a Key,
        body: Bytes,
    ) -> BoxFuture<'a, Result<PutOutcome, StoreError>> {
        let (place, on, shown) = (self.place, key.clone(), body.clone());
        let put = move |ground: &mut Ground| ground.put(place, &on, &body);
        async move {
            self.call_with("PutObject", key.as_str(), true, Some(shown), put)
                .await
        }
        .boxed()
    }

    fn get<'a>(
        &'a self,
        key: &'a Key,
        len_max: usize,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        let (place, of) = (self.place, key.clone());
        let get = move |ground: &mut Ground| now(ground.place(place).get(&of, len_max));
        async move { self.call("GetObject", key.as_str(), false, get).await }.boxed()
    }

    fn read_range<'a>(
        &'a self,
        key: &'a Key,
        range: Range<u64>,
        if_match: Option<&'a str>,
        sink: &'a mut dyn RangeSink,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let (place, of, tag) = (self.place, key.clone(), if_match.map(str::to_owned));
        let read = move |ground: &mut Ground| {
            let len = range.end.saturating_sub(range.start);
            let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
            let store = ground.place(place);
            now(store.get_range(&of, range, tag.as_deref(), &mut bytes))?;
            Ok(bytes)
        };
        async move {
            let bytes = self.call("GetObject", key.as_str(), false, read).await?;
            sink.restart();
            sink.put(&bytes);
            Ok(())
        }
        .boxed()
    }

    fn head<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<Option<ObjectInfo>, StoreError>> {
        let (place, of) = (self.place, key.clone());
        let head = move |ground: &mut Ground| now(ground.place(place).head(&of));
        async move { self.call("HeadObject", key.as_str(), false, head).await }.boxed()
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<Listed>, StoreError>> {
        let (place, under) = (self.place, prefix.to_owned());
        let list = move |ground: &mut Ground| ground.list(place, &under);
        async move { self.call("ListObjectsV2", prefix, false, list).await }.boxed()
    }

    fn list_dirs<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>, StoreError>> {
        let (place, under) = (self.place, prefix.to_owned());
        let list = move |ground: &mut Ground| now(ground.place(place).list_dirs(&under));
        async move { self.call("ListObjectsV2", prefix, false, list).await }.boxed()
    }

    fn abort_uploads_under<'a>(
        &'a self,
        prefix: &'a str,
    ) -> BoxFuture<'a, Result<u64, StoreError>> {
        let (place, under) = (self.place, prefix.to_owned());
        let abort = move |ground: &mut Ground| now(ground.place(place).abort_uploads_under(&under));
        async move { self.call("AbortUploads", prefix, true, abort).await }.boxed()
    }

    fn delete<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<(), StoreError>> {
        let (place, of) = (self.place, key.clone());
        let delete = move |ground: &mut Ground| ground.delete(place, &of);
        async move { self.call("DeleteObject", key.as_str(), true, delete).await }.boxed()
    }

    fn describe(&self) -> String {
        "simulated:".to_owned()
    }
}
