//! Who makes images: a saver, as `src/checkpoint.rs` tells it; who looks after it when it has died; who finishes what it sealed.

use std::collections::HashSet;

use bytes::Bytes;
use ckptstream::codec::Crc64;
use ckptstream::job_log::{
    AppendError, Entry, ImageEntry, JobLog, SavingEntry, append, append_dropped, append_image,
    append_saving,
};
use ckptstream::manifest::claim_key;
use ckptstream::ownership;
use ckptstream::sealed::{self, Sealed};
use ckptstream::store::{PartBody, PartNumber, PutOutcome, Store, UploadId};
use ckptstream::writer::ProcessIdentity;
use futures::future::{join, join3};

use super::Rule;
use super::oracle::Oracle;
use super::process::{Journal, Process};
use super::sample::{Piece, Sample, job, key, sample};

/// How a saver is started.
#[derive(Debug, Clone, Copy)]
pub(super) struct Save {
    /// It has a spill, and this is what it is for.
    pub(super) spill: Option<Spill>,
}

/// What a spill is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spill {
    /// A save that the store does not take is sealed there.
    Keep,
    /// It is sealed there, and the target is given its memory back.
    GiveBack,
    /// Every save is sealed there first, and uploaded when the GPUs are free, or the target runs again.
    Always,
}

/// Why a save is no image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failed {
    /// The target runs: exit 3, 4 or 10.
    NotBegun,
    /// Exit 15.
    Fenced,
    /// Exit 13.
    Unknown,
    /// Exit 12.
    Lost,
}

/// A save's own corner of the store.
struct Attempt<'a> {
    process: &'a Process,
    nonce: String,
    /// 0 until there is something to close.
    next_slot: u64,
    upload: Option<UploadId>,
}

/// Lock to exit status.
pub(super) async fn save(process: Process, how: Save) {
    let mut attempt = Attempt {
        process: &process,
        nonce: process.new_attempt(),
        next_slot: 0,
        upload: None,
    };
    if let Err(failed) = attempt.prepare(how).await {
        // A signal, or a store that failed for a while.
        process.has_time_again();
        attempt.close(failed).await;
        return attempt.end(failed);
    }
    let claim = match how.spill {
        Some(_) => process.claim_spill(),
        None => None,
    };
    process.step("begins").await;
    if process.breaks(Rule::CompleteAfterCommit) {
        process.completed(&attempt.nonce);
    }
    if claim.is_some() && how.spill == Some(Spill::Always) {
        return attempt.upload_afterwards().await;
    }
    let kept = attempt.keep().await;
    process.has_time_again();
    let failed = match (kept, &claim) {
        (Ok(generation), _) => {
            process.step("completes").await;
            process.completed(&attempt.nonce);
            process.say(&format!("ends: image {generation}"), |oracle| {
                oracle.says_committed(&attempt.nonce);
            });
            return attempt.forget();
        }
        (Err(failed), Some(_)) if failed != Failed::Fenced => {
            if attempt.seal_and_let_go(how, failed).await {
                // Exit 11: it is left to `resume`.
                return;
            }
            Failed::NotBegun
        }
        (Err(failed), _) => failed,
    };
    attempt.close(failed).await;
    attempt.end(failed);
}

impl Attempt<'_> {
    /// Claims a prefix, opens the job, announces the save.
    async fn prepare(&mut self, how: Save) -> Result<(), Failed> {
        let (process, store) = (self.process, &*self.process.store);
        let failed = |_| Failed::NotBegun;
        let claim = key(&claim_key(&self.nonce));
        let claiming = store.put_if_absent(&claim, Bytes::from_static(b"first"));
        let (claimed, log) = join(claiming, process.log()).await;
        if claimed.map_err(failed)? == PutOutcome::AlreadyExists {
            return Err(Failed::NotBegun);
        }
        let log = log.map_err(|_why| Failed::NotBegun)?;
        let heeds = !process.breaks(Rule::HeedOwnDroppedEarly);
        if heeds && log.is_dropped(&self.nonce) {
            return Err(Failed::NotBegun);
        }
        let object = &self.sample().object.key;
        let (second, upload, slot) = join3(
            store.put_if_absent(&claim, Bytes::from_static(b"second")),
            store.begin_upload(object),
            self.open(log.next_slot(), heeds),
        )
        .await;
        self.upload = upload.ok();
        let is_conditional = second.map_err(failed)? == PutOutcome::AlreadyExists;
        let slot = slot.map_err(|_why| Failed::NotBegun)?;
        if !is_conditional || self.upload.is_none() {
            return Err(Failed::NotBegun);
        }
        let saving = SavingEntry {
            writer: self.nonce.clone(),
            attempt: self.nonce.clone(),
            seconds: 0,
            spill: how.spill.map(|_| "/spill".to_owned()),
            by: elsewhere(),
        };
        self.note(slot + 1);
        let slot = if heeds {
            append_saving(store, job(), slot + 1, &saving).await
        } else {
            let is_theirs = |there: &Entry| matches!(there, Entry::Open { .. });
            let entry = Entry::Saving(saving);
            append(store, job(), slot + 1, &entry, &is_theirs).await
        };
        self.note(slot.map_err(|_why| Failed::NotBegun)? + 1);
        Ok(())
    }

    async fn open(&self, from_slot: u64, heeds: bool) -> Result<u64, AppendError> {
        let (store, writer) = (&*self.process.store, self.nonce.as_str());
        if heeds {
            return ownership::open(store, job(), writer, from_slot).await;
        }
        let entry = Entry::Open {
            writer: writer.to_owned(),
        };
        append(store, job(), from_slot, &entry, &|_there| false).await
    }

    /// Stream, land, commit. The generation.
    async fn keep(&self) -> Result<u64, Failed> {
        let early = self.process.breaks(Rule::LandBeforeCommit);
        if early {
            self.put_manifest().await?;
            self.commit().await?;
        }
        self.land().await?;
        if early {
            return Err(Failed::Unknown);
        }
        self.put_manifest().await?;
        self.commit().await
    }

    async fn land(&self) -> Result<(), Failed> {
        let (store, object) = (&*self.process.store, &self.sample().object);
        let upload = self.upload.as_ref().ok_or(Failed::Lost)?;
        let (len, crc64) = (object.bytes.len() as u64, Crc64::of(&object.bytes).value());
        let body = PartBody::new(vec![object.bytes.clone()], crc64);
        let number = PartNumber::new(1).expect("a number");
        let sent = store.put_part(&object.key, upload, number, body).await;
        let parts = [sent.map_err(|_why| Failed::Lost)?];
        let completed = store.complete_upload(&object.key, upload, &parts, len, crc64);
        completed.await.map_err(|_why| Failed::Lost)?;
        let landed = store.head(&object.key).await.map_err(|_why| Failed::Lost)?;
        let is_landed = landed.is_some_and(|info| (info.len, info.crc64) == (len, Some(crc64)));
        is_landed.then_some(()).ok_or(Failed::Lost)
    }

    async fn put_manifest(&self) -> Result<(), Failed> {
        let sample = self.sample();
        for piece in [&sample.table, &sample.manifest] {
            let store = &self.process.store;
            let put = store.put_if_absent(&piece.key, piece.bytes.clone()).await;
            if put.map_err(|_why| Failed::Lost)? == PutOutcome::AlreadyExists {
                return Err(Failed::Lost);
            }
        }
        Ok(())
    }

    async fn commit(&self) -> Result<u64, Failed> {
        let (process, store) = (self.process, &*self.process.store);
        let image = &self.sample().entry;
        let appended = match process.breaks_commit() {
            None => append_image(store, job(), self.next_slot, image).await,
            Some(heeds) => {
                let entry = Entry::Image(image.clone());
                let in_the_way = |there: &Entry| heeds(there, image);
                append(store, job(), self.next_slot, &entry, &in_the_way).await
            }
        };
        match appended {
            Ok(generation) => Ok(generation),
            Err(AppendError::Fenced { .. }) => Err(Failed::Fenced),
            Err(AppendError::Unreachable { .. }) if process.breaks(Rule::SettledByTheSlot) => {
                process.has_time_again();
                let log = JobLog::read(store, job())
                    .await
                    .map_err(|_why| Failed::Unknown)?;
                let found = log.entries().find(|(_, entry)| {
                    matches!(entry, Entry::Image(found) if found.attempt == self.nonce)
                });
                found.map(|(slot, _)| slot).ok_or(Failed::Lost)
            }
            Err(AppendError::Unreachable { .. }) => Err(Failed::Unknown),
            Err(_) => Err(Failed::Lost),
        }
    }

    /// Seals the save first, lets the target go, and uploads it then. What does not get there stays sealed.
    async fn upload_afterwards(&self) {
        let process = self.process;
        let sealed = self.seal().await;
        process.step("completes").await;
        process.completed(&self.nonce);
        let uploaded = finish(process, &sealed, &HashSet::new()).await;
        if uploaded.is_some() {
            self.forget();
        }
    }

    /// Lets the target of a save that failed go or run. Whether `resume` is to finish it.
    async fn seal_and_let_go(&self, how: Save, failed: Failed) -> bool {
        let process = self.process;
        self.seal().await;
        let is_given_back = how.spill == Some(Spill::GiveBack) && self.may_run(failed).await;
        process.step("completes").await;
        process.completed(&self.nonce);
        if !is_given_back {
            return true;
        }
        self.write_down(true);
        process.step("has its memory").await;
        if !process.breaks(Rule::CloseBeforeRunning) {
            let place = Sealed::key(job(), &self.nonce).expect("a legal key");
            let unsealed = process.spill.delete(&place).await;
            unsealed.expect("the spill does not fail");
        }
        process.step("unlocks").await;
        process.say("the target runs on", |oracle| oracle.runs_on(&self.nonce));
        false
    }

    async fn seal(&self) -> Sealed {
        let spilled = sample(&self.nonce, true);
        for piece in spilled.pieces() {
            self.spill(piece).await;
        }
        let sealed = Sealed {
            format: sealed::FORMAT,
            job: job().to_string(),
            store: "simulated:".to_owned(),
            next_slot: self.next_slot,
            entry: spilled.entry.clone(),
        };
        let place = Piece {
            key: Sealed::key(job(), &self.nonce).expect("a legal key"),
            bytes: sealed.encode(),
        };
        // Told before it stands there: `resume` may be faster than we are afterwards.
        let told = |oracle: &mut Oracle| oracle.was_sealed(&self.nonce);
        self.process.say("seals", told);
        self.spill(&place).await;
        sealed
    }

    async fn spill(&self, piece: &Piece) {
        let put = self
            .process
            .spill
            .put_if_absent(&piece.key, piece.bytes.clone());
        put.await.expect("the spill does not fail");
    }

    /// An image of a job that ran on must not come into being, and a job that somebody else has must not run.
    async fn may_run(&self, failed: Failed) -> bool {
        if failed == Failed::Unknown {
            return false;
        }
        match JobLog::read(&*self.process.store, job()).await {
            Ok(log) => log.opened_by_another(self.next_slot, &self.nonce).is_none(),
            Err(_) => true,
        }
    }

    /// Aborts the upload, and says that the attempt is given up, if that is known.
    async fn close(&self, failed: Failed) {
        let (process, store) = (self.process, &*self.process.store);
        let keeps_silent = process.breaks(Rule::SettledByTheSlot)
            || process.breaks(Rule::CloseBeforeRunning)
            || matches!(failed, Failed::Fenced | Failed::Unknown);
        let aborting = async {
            if let Some(upload) = &self.upload {
                // What stays is for `gc`.
                let _left = store.abort_upload(&self.sample().object.key, upload).await;
            }
        };
        let dropping = async {
            if self.next_slot > 0 && !keeps_silent {
                let nonce = &self.nonce;
                // Where it fails the verdict says so, and nobody waits longer than the saving entry says.
                let _dropped = append_dropped(store, job(), self.next_slot, nonce, nonce).await;
            }
        };
        join(aborting, dropping).await;
    }

    /// The exit status. What it leaves to be done stays written down.
    fn end(&self, failed: Failed) {
        if failed == Failed::NotBegun {
            self.forget();
        }
        self.process.say(&format!("ends: {failed:?}"), |oracle| {
            if failed != Failed::Unknown {
                oracle.says_no_image(&self.nonce);
            }
        });
    }

    /// Writes down how far it is.
    fn note(&mut self, next_slot: u64) {
        self.next_slot = next_slot;
        self.write_down(false);
    }

    fn write_down(&self, has_its_memory: bool) {
        self.forget();
        self.process.node.journals.borrow_mut().push(Journal::Save {
            attempt: self.nonce.clone(),
            next_slot: self.next_slot,
            has_its_memory,
        });
    }

    fn forget(&self) {
        let mut journals = self.process.node.journals.borrow_mut();
        journals.retain(
            |left| !matches!(left, Journal::Save { attempt, .. } if *attempt == self.nonce),
        );
    }

    fn sample(&self) -> &'static Sample {
        sample(&self.nonce, false)
    }
}

impl Process {
    /// What a saver that breaks a rule takes for a reason not to commit.
    fn breaks_commit(&self) -> Option<fn(&Entry, &ImageEntry) -> bool> {
        if self.breaks(Rule::HeedOwnDropped) {
            Some(|there, image| matches!(there, Entry::Open { writer } if *writer != image.writer))
        } else if self.breaks(Rule::HeedOpens) {
            Some(
                |there, image| matches!(there, Entry::Dropped { attempt, .. } if *attempt == image.attempt),
            )
        } else {
            None
        }
    }
}

/// A process on another node: nobody here can know whether it lives.
fn elsewhere() -> ProcessIdentity {
    ProcessIdentity {
        host: "elsewhere".to_owned(),
        boot_id: "elsewhere".to_owned(),
        pid_namespace: 1,
        pid: 1,
        start_time: 1,
    }
}

/// `recover` after those who died, or left something to be done, as `src/recover.rs` tells it. Targets that cannot run any more are gone by then.
pub(super) async fn recover(process: Process) {
    let journals = process.node.journals.take();
    for left in journals {
        let done = match &left {
            Journal::Restore {
                writer,
                generation,
                is_named,
            } => {
                process.step("unlocks").await;
                process.say(
                    &format!("lets image {generation} of {writer} run"),
                    |oracle| {
                        oracle.restored(writer, *generation, *is_named);
                    },
                );
                Some(())
            }
            Journal::Save {
                attempt,
                next_slot,
                has_its_memory,
            } => close_left(&process, attempt, *next_slot, *has_its_memory).await,
        };
        if done.is_none() {
            process.node.journals.borrow_mut().push(left);
        }
    }
}

/// `None` when there is still something to be done.
async fn close_left(
    process: &Process,
    attempt: &str,
    next_slot: u64,
    has_its_memory: bool,
) -> Option<()> {
    let store = &*process.store;
    let mut is_sealed = !matches!(Sealed::read(&process.spill, job(), attempt).await, Ok(None));
    let log = JobLog::read(store, job()).await.ok()?;
    if has_its_memory {
        if is_sealed {
            // Whoever resumes it now makes an image of it.
            let _claim = process.claim_spill()?;
            let place = Sealed::key(job(), attempt).ok()?;
            process.spill.delete(&place).await.ok()?;
            is_sealed = false;
        }
        process.step("unlocks").await;
        process.say("lets the target run on", |oracle| oracle.runs_on(attempt));
    }
    if log.is_image(attempt) {
        return Some(());
    }
    if is_sealed {
        return None;
    }
    match append_dropped(store, job(), next_slot, &process.name, attempt).await {
        Ok(_slot) => {}
        // It came about after all.
        Err(AppendError::Fenced { .. }) => return Some(()),
        Err(_) => return None,
    }
    process.say("closes what a saver left", |oracle| {
        oracle.count("recovered");
        oracle.says_no_image(attempt);
    });
    let prefix = format!("{}/data/{attempt}/", job());
    store
        .abort_uploads_under(&prefix)
        .await
        .ok()
        .map(|_count| ())
}

/// `resume`, as `src/resume.rs` tells it: everything that is sealed, the oldest first.
pub(super) async fn resume(process: Process) {
    let Some(_claim) = process.claim_spill() else {
        return;
    };
    let mut all = Sealed::all(&process.spill, job())
        .await
        .expect("the spill does not fail");
    all.sort_by_key(|sealed| (sealed.next_slot, sealed.entry.created_ms));
    let together = all.iter().map(|sealed| sealed.entry.writer.clone());
    let together: HashSet<String> = together.collect();
    for sealed in &all {
        finish(&process, sealed, &together).await;
    }
}

/// Brings a sealed save into the store. `None` when it stays sealed.
async fn finish(process: &Process, sealed: &Sealed, together: &HashSet<String>) -> Option<()> {
    let (store, attempt) = (&*process.store, sealed.entry.attempt.as_str());
    store.head(&key(&claim_key(attempt))).await.ok()??;
    let log = JobLog::read(store, job()).await.ok()?;
    if !log.is_image(attempt) {
        let older = match process.breaks(Rule::ResumeKnowsOlder) {
            true => HashSet::new(),
            false => sealed.begun_before(&log),
        };
        let given_up: HashSet<&str> = log
            .entries()
            .filter_map(|(_, entry)| match entry {
                Entry::Open { writer } if log.has_given_up(writer) => Some(writer.as_str()),
                _ => None,
            })
            .collect();
        let heeds = !process.breaks(Rule::ResumeHeeds);
        let in_the_way = |there: &Entry| {
            let has_given_up =
                matches!(there, Entry::Open { writer } if given_up.contains(writer.as_str()));
            heeds && !has_given_up && sealed.is_overtaken_by(there, together, &older)
        };
        let mut since = log.entries().filter(|(slot, _)| *slot >= sealed.next_slot);
        if since.any(|(_, there)| in_the_way(there)) {
            return None;
        }
        let pieces = sample(attempt, true);
        send(process, &pieces.object).await?;
        for piece in [&pieces.table, &pieces.manifest] {
            let there = process.spill.get(&piece.key, 1 << 20).await.ok()??;
            put_or_find(process, piece, there).await?;
        }
        let entry = Entry::Image(sealed.entry.clone());
        append(store, job(), sealed.next_slot, &entry, &in_the_way)
            .await
            .ok()?;
    }
    process.say("has made an image of what was sealed", |oracle| {
        oracle.count("resumed");
        oracle.says_committed(attempt);
    });
    let prefix = format!("{}/data/{attempt}/", job());
    let mut left = process.spill.list(&prefix).await.ok()?;
    // What says that it is sealed goes last.
    left.sort_by_key(|left| left.key.as_str().ends_with("/sealed.json"));
    for left in left {
        process.spill.delete(&left.key).await.ok()?;
    }
    Some(())
}

/// A data object, unless it has landed there.
async fn send(process: &Process, object: &Piece) -> Option<()> {
    let store = &*process.store;
    if store.head(&object.key).await.ok()?.is_some() {
        return Some(());
    }
    let upload = store.begin_upload(&object.key).await.ok()?;
    let bytes = process.spill.get(&object.key, 1 << 20).await.ok()??;
    let (len, crc64) = (bytes.len() as u64, Crc64::of(&bytes).value());
    let body = PartBody::new(vec![bytes], crc64);
    let number = PartNumber::new(1).expect("a number");
    let part = store
        .put_part(&object.key, &upload, number, body)
        .await
        .ok()?;
    let parts = [part];
    let completed = store.complete_upload(&object.key, &upload, &parts, len, crc64);
    completed.await.ok()?;
    store.head(&object.key).await.ok()??;
    Some(())
}

/// Creates an object, or finds the very same.
async fn put_or_find(process: &Process, piece: &Piece, bytes: Bytes) -> Option<()> {
    let store = &*process.store;
    if store.put_if_absent(&piece.key, bytes.clone()).await.ok()? == PutOutcome::Created {
        return Some(());
    }
    let found = store.get(&piece.key, bytes.len()).await.ok()??;
    (found == bytes).then_some(())
}
