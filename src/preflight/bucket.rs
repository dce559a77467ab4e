//! The store's promises, tried one by one with the requests of a save.
//!
//! In: the store, under the retry of every save but with seconds of patience. Out: checks, and the rates at which it took and gave bytes. What can fail is what is looked for; everything that was written is removed, or told.

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::join_all;
use futures::stream::{self, StreamExt};

use super::{Check, State, Subject};
use crate::codec::Crc64;
use crate::config::PartChecksum;
use crate::error::one_line;
use crate::manifest::{claim_key, contest_key};
use crate::session::Session;
use crate::store::{
    Facts, Key, Listed, PART_LEN_MIN, PartBody, PartNumber, PartReceipt, PutOutcome, RangeSink,
    Store, StoreError, UploadId, crc64_of_parts,
};
use crate::writer::{CONTESTS, claim, now_ms, random_hex, winners_at_once};

/// One request and its repetitions.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes are sent, and read, for so long at most.
const MEASURED_FOR: Duration = Duration::from_millis(1200);
/// Creates at once.
const CONTESTANTS: usize = 8;
/// At least so many parts, and at most.
const PARTS_MIN: u64 = 2;
const PARTS_MAX: u64 = 64;
/// Requests in flight while rates are measured: what a save begins with.
const IN_FLIGHT: usize = 8;
/// A clock that is further off is worth a word.
const SKEW_WARNED: Duration = Duration::from_secs(60);

const LIST: Subject = Subject {
    name: "store.list",
    why: "without the right to list, a store answers 403 instead of 404 for what is not there, and the job's log cannot be read to its end",
    gravity: State::Failed,
    mend: "grant s3:ListBucket for the bucket",
};
const CLOCK: Subject = Subject {
    name: "store.clock",
    why: "requests are signed with the time, and stores refuse what is 15 minutes off",
    gravity: State::Warning,
    mend: "set this machine's clock (chrony, systemd-timesyncd); until then requests are signed with the store's time",
};
const CREDENTIALS: Subject = Subject {
    name: "store.credentials",
    why: "credentials that end during a save end the save, unless they can be renewed",
    gravity: State::Warning,
    mend: "use a source that is renewed: the instance's role, a web identity, a profile with a process",
};
const CREATE: Subject = Subject {
    name: "store.create",
    why: "the job's log and the commit are objects that are created once",
    gravity: State::Failed,
    mend: "grant s3:PutObject under the prefix",
};
const CONDITIONAL: Subject = Subject {
    name: "store.conditional-create",
    why: "two savers of one job are told apart by who creates an entry first; a store that overwrites it would let both win",
    gravity: State::Failed,
    mend: "use a store that honours If-None-Match, or give every start of the job an epoch: job.epoch, --epoch",
};
const AT_ONCE: Subject = Subject {
    name: "store.create-at-once",
    why: "two savers of one job may come at the same moment, and both would have it",
    gravity: State::Failed,
    mend: "use a store whose conditional writes are atomic, or give every start of the job an epoch: job.epoch, --epoch",
};
const READ: Subject = Subject {
    name: "store.read",
    why: "images and the log are read back",
    gravity: State::Failed,
    mend: "grant s3:GetObject under the prefix",
};
const CONDITIONAL_READ: Subject = Subject {
    name: "store.conditional-read",
    why: "ranges of an object that is replaced while it is read must not be mixed",
    gravity: State::Warning,
    mend: "our own digests find it out later; use a store that honours If-Match",
};
const FRESH: Subject = Subject {
    name: "store.list-fresh",
    why: "`gc` and `prune` find what they remove by listing",
    gravity: State::Warning,
    mend: "run `gc` again later",
};
/// The same, where the log goes by epochs.
const EPOCH_FRESH: Subject = Subject {
    why: "a later start of the job is found by listing, and would be overlooked",
    gravity: State::Failed,
    mend: "use a store whose listings are fresh, or one that honours If-None-Match without job.epoch",
    ..FRESH
};
const UPLOAD: Subject = Subject {
    name: "store.upload",
    why: "GPU memory goes into the store as multipart uploads",
    gravity: State::Failed,
    mend: "grant s3:PutObject under the prefix; with SSE-KMS also kms:GenerateDataKey and kms:Decrypt",
};
const CHECKED: Subject = Subject {
    name: "store.checks-parts",
    why: "a part that is damaged on the way should be refused when it arrives",
    gravity: State::Warning,
    mend: "what was damaged is found by our own digests, later: run `ckptstream verify` after saves",
};
const LANDED: Subject = Subject {
    name: "store.landed",
    why: "every object is looked at before the commit",
    gravity: State::Failed,
    mend: "grant s3:GetObject under the prefix",
};
const ABORT: Subject = Subject {
    name: "store.abort",
    why: "uploads that are not completed are billed until they are aborted",
    gravity: State::Warning,
    mend: "grant s3:AbortMultipartUpload under the prefix, and add the lifecycle rule that `ckptstream gc` prints",
};
const LIST_UPLOADS: Subject = Subject {
    name: "store.list-uploads",
    why: "`gc` finds what a killed saver has left by listing uploads",
    gravity: State::Warning,
    mend: "grant s3:ListBucketMultipartUploads for the bucket, and add the lifecycle rule that `ckptstream gc` prints",
};
const DELETE: Subject = Subject {
    name: "store.delete",
    why: "`gc` and `prune` remove what is not needed any more",
    gravity: State::Warning,
    mend: "grant s3:DeleteObject under the prefix, or have the bucket expire objects",
};
const RATE: Subject = Subject {
    name: "store.rate",
    why: "how much fits into a notice",
    gravity: State::Warning,
    mend: "measure with `ckptstream bench`",
};

/// Bytes per second.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Rates {
    pub(super) upload: Option<f64>,
    pub(super) download: Option<f64>,
}

/// Looks at the store until this moment at most.
pub(super) fn look(session: &Session, until: Instant) -> (Vec<Check>, Rates) {
    let mut looking = Looking {
        session,
        until,
        nonce: random_hex::<16>(),
        checks: Vec::new(),
        rates: Rates::default(),
    };
    session.wait(looking.look());
    (looking.checks, looking.rates)
}

struct Looking<'a> {
    session: &'a Session,
    until: Instant,
    /// Of the attempt that it seems to be.
    nonce: String,
    checks: Vec<Check>,
    rates: Rates,
}

impl Looking<'_> {
    async fn look(&mut self) {
        self.facts().await;
        if !self.list().await {
            // Whoever cannot be reached, or does not let us in, is not asked again and again.
            return;
        }
        let Some(claim) = self.create().await else {
            return;
        };
        let mut written = vec![claim.clone()];
        self.read(&claim).await;
        self.fresh(&claim).await;
        written.extend(self.upload().await);
        // Other checksums are taken from the bytes when they are sent, and cannot be wrong.
        let checksum = self.session.config.store.checksum;
        if matches!(checksum, PartChecksum::Auto | PartChecksum::Crc64Nvme) {
            self.damaged().await;
        }
        self.abort().await;
        self.list_uploads().await;
        // Connections that stand already bring creates closest together.
        written.extend(self.contests().await);
        self.delete(&written).await;
    }

    /// Makes one check. What it answers within its time, and how long that took; a failure is noted.
    async fn ask<T>(
        &mut self,
        subject: &Subject,
        asking: impl Future<Output = Result<T, StoreError>>,
    ) -> Option<(T, Duration)> {
        self.ask_within(PATIENCE, subject, asking).await
    }

    async fn ask_within<T>(
        &mut self,
        patience: Duration,
        subject: &Subject,
        asking: impl Future<Output = Result<T, StoreError>>,
    ) -> Option<(T, Duration)> {
        let started = Instant::now();
        match self.answer(patience, asking).await {
            Ok(Ok(answer)) => return Some((answer, started.elapsed())),
            Ok(Err(error)) => self.failed(subject, &error),
            Err(limit) => self.checks.push(no_answer(subject, limit)),
        }
        None
    }

    /// What a request answers that is tried for so long, or the time after which there was no answer.
    async fn answer<T>(
        &self,
        patience: Duration,
        asking: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<Result<T, StoreError>, Duration> {
        let now = Instant::now();
        let limit = patience.min(self.until.saturating_duration_since(now));
        self.session.set_deadline(Some(now + limit));
        // What was sent is waited for a little longer than it is tried again.
        let answer = tokio::time::timeout(limit + PATIENCE / 10, asking).await;
        answer.map_err(|_elapsed| limit)
    }

    fn failed(&mut self, subject: &Subject, error: &StoreError) {
        self.checks.push(of_error(subject, error));
    }

    fn key(&self, relative: &str) -> Key {
        let relative = format!("data/{}/{relative}", self.nonce);
        Key::of_job(&self.session.config.job, &relative)
            .expect("hex digits and plain words are legal")
    }

    async fn facts(&mut self) {
        let store = &self.session.store;
        let asked_at = now_ms();
        // A store that does not tell is asked for what matters next.
        let Ok(facts) = tokio::time::timeout(PATIENCE, store.facts()).await else {
            return;
        };
        let Facts {
            date_ms,
            credentials,
        } = facts;
        if let Some(date_ms) = date_ms {
            // The answer's second is cut off, and it came some time after the question.
            let between = asked_at..=now_ms() + 1000;
            let nearest = date_ms.clamp(*between.start(), *between.end());
            let skew = Duration::from_millis(nearest.abs_diff(date_ms));
            self.checks.push(match skew {
                _ if skew > SKEW_WARNED => CLOCK.wrong(format!(
                    "this machine's clock and the store's differ by {skew:.0?}"
                )),
                _ => CLOCK.ok(format!("within {:.1} s of the store's", skew.as_secs_f64())),
            });
        }
        if let Some(credentials) = credentials {
            let source = &credentials.source;
            self.checks.push(match credentials.seconds_left {
                Some(seconds) => {
                    let notice = self.session.config.preempt.notice;
                    let found = format!("from {source}, {} min left", seconds / 60);
                    match seconds < notice.as_secs() {
                        true => CREDENTIALS.wrong(found),
                        false => CREDENTIALS.ok(found),
                    }
                }
                None => CREDENTIALS.ok(format!("from {source}, without an end")),
            });
        }
    }

    async fn list(&mut self) -> bool {
        let prefix = format!("{}/log/", self.session.config.job);
        let store = &self.session.store;
        let Some((entries, took)) = self.ask(&LIST, store.list(&prefix)).await else {
            return false;
        };
        let found = format!(
            "{} answers in {} ms; the job's log has {} entries",
            self.session.store.describe(),
            took.as_millis(),
            entries.len()
        );
        self.checks.push(LIST.ok(found));
        true
    }

    /// Claims the prefix, as a save does.
    async fn create(&mut self) -> Option<Key> {
        let (store, job) = (&self.session.store, &self.session.config.job);
        let key = Key::of_job(job, &claim_key(&self.nonce)).expect("hex digits are legal");
        let first = claim(job, &self.nonce);
        let second = crate::manifest::AttemptClaim {
            created_ms: first.created_ms + 1,
            ..first.clone()
        };
        let (_, took) = self
            .ask(&CREATE, store.put_if_absent(&key, first.encode().into()))
            .await?;
        self.checks
            .push(CREATE.ok(format!("in {} ms", took.as_millis())));
        let again = store.put_if_absent(&key, second.encode().into());
        if let Some((outcome, _)) = self.ask(&CONDITIONAL, again).await {
            self.checks.push(match (outcome, self.session.config.store.epoch) {
                (PutOutcome::AlreadyExists, None) => CONDITIONAL.ok("the second one is turned away"),
                (outcome, Some(epoch)) => CONDITIONAL.ok(format!(
                    "{}; the job's writers are ordered by their epochs, of which this is {epoch}",
                    match outcome {
                        PutOutcome::Created => "the store ignores If-None-Match",
                        PutOutcome::AlreadyExists => "the second one is turned away, and nothing rests on it",
                    }
                )),
                (PutOutcome::Created, None) => CONDITIONAL.wrong(format!(
                    "the store ignores If-None-Match{}: it overwrote an object that a conditional write must leave alone",
                    self.session.config.store.kind.known_to_lack_conditional_creates()
                )),
            });
        }
        Some(key)
    }

    /// Creates one object several times at once, with other bytes each, and a fresh one again, until more than one is first. The keys of what was created.
    async fn contests(&mut self) -> Vec<Key> {
        let mut created = Vec::new();
        if let Some(epoch) = self.session.config.store.epoch {
            self.checks.push(AT_ONCE.ok(format!(
                "nothing rests on it: the job's writers are ordered by their epochs, of which this is {epoch}"
            )));
            return created;
        }
        for round in 1..=CONTESTS {
            let relative = contest_key(&self.nonce, round);
            let key = Key::of_job(&self.session.config.job, &relative);
            let key = key.expect("hex digits are legal");
            let store = self.session.store.clone();
            let creating = winners_at_once(&*store, &key, CONTESTANTS);
            let Some((winners, _)) = self.ask(&AT_ONCE, creating).await else {
                return created;
            };
            created.push(key);
            if winners != 1 {
                self.checks.push(AT_ONCE.wrong(format!(
                    "{winners} of {CONTESTANTS} at once are told that they were first"
                )));
                return created;
            }
        }
        self.checks.push(AT_ONCE.ok(format!(
            "one of {CONTESTANTS} at once is told that it was first, {CONTESTS} times"
        )));
        created
    }

    async fn read(&mut self, key: &Key) {
        let store = &self.session.store;
        let reading = async {
            let whole = store.get(key, 1 << 16).await?;
            let info = store.head(key).await?;
            Ok((whole, info))
        };
        let Some(((whole, info), took)) = self.ask(&READ, reading).await else {
            return;
        };
        let (Some(whole), Some(info)) = (whole, info) else {
            self.checks
                .push(READ.wrong("what was just created is not there"));
            return;
        };
        self.checks
            .push(READ.ok(format!("in {} ms", took.as_millis())));
        let Some(etag) = info.etag else {
            return;
        };
        let inner = &whole[1..whole.len() - 1];
        let range = 1..1 + inner.len() as u64;
        let mut part = vec![0; inner.len()];
        let store = self.session.store.clone();
        let matching = store.get_range(key, range.clone(), Some(&etag), &mut part);
        if self.ask(&CONDITIONAL_READ, matching).await.is_none() {
            return;
        }
        if part != inner {
            self.checks
                .push(READ.wrong("a range of an object is not what lies there"));
            return;
        }
        let wrong = store.get_range(key, range, Some("\"0123456789abcdef\""), &mut part);
        let check = match self.answer(PATIENCE, wrong).await {
            Ok(Err(StoreError::Mismatch { .. })) => {
                CONDITIONAL_READ.ok("another object than the one that is meant is not read")
            }
            Ok(Ok(())) => {
                CONDITIONAL_READ.wrong("the store gives an object whose tag is another one")
            }
            Ok(Err(error)) => of_error(&CONDITIONAL_READ, &error),
            Err(limit) => no_answer(&CONDITIONAL_READ, limit),
        };
        self.checks.push(check);
    }

    async fn fresh(&mut self, claim: &Key) {
        let prefix = format!("{}/data/{}/", self.session.config.job, self.nonce);
        let store = &self.session.store;
        if let Some((listed, _)) = self.ask(&FRESH, store.list(&prefix)).await {
            let has_epoch = self.session.config.store.epoch.is_some();
            self.checks
                .push(match (is_listed(&listed, claim), has_epoch) {
                    (true, _) => FRESH.ok("what was just created is listed"),
                    (false, false) => FRESH.wrong("what was just created is not listed yet"),
                    (false, true) => EPOCH_FRESH.wrong("what was just created is not listed yet"),
                });
        }
    }

    /// A whole upload, and its object read back: both at the rate that the store has. The object's key.
    async fn upload(&mut self) -> Option<Key> {
        let key = self.key("preflight.zst");
        let store = &self.session.store;
        let (upload, _) = self.ask(&UPLOAD, store.begin_upload(&key)).await?;
        let part = random_part(usize::try_from(PART_LEN_MIN).unwrap_or(usize::MAX));
        let started = Instant::now();
        let sent = self.send(&key, &upload, &part).await;
        let sending = started.elapsed();
        let store = &self.session.store;
        let receipts = match sent {
            Ok(receipts) => receipts,
            Err(error) => {
                self.failed(&UPLOAD, &error);
                // The check of aborts tells of it.
                let _ = store.abort_upload(&key, &upload).await;
                return None;
            }
        };
        let len: u64 = receipts.iter().map(|part| part.len).sum();
        let crc64 = crc64_of_parts(&receipts).value();
        let completing = store.complete_upload(&key, &upload, &receipts, len, crc64);
        // Some take their time to put the parts together.
        let Some((_, took)) = self.ask_within(2 * PATIENCE, &UPLOAD, completing).await else {
            let _ = self.session.store.abort_upload(&key, &upload).await;
            return None;
        };
        self.checks.push(UPLOAD.ok(format!(
            "{} parts of {} MiB, completed in {} ms",
            receipts.len(),
            PART_LEN_MIN >> 20,
            took.as_millis()
        )));
        let store = &self.session.store;
        let (info, _) = self.ask(&LANDED, store.head(&key)).await?;
        let info = info.filter(|info| info.len == len);
        self.checks.push(match info.as_ref().map(|info| info.crc64) {
            Some(Some(sum)) if sum == crc64 => LANDED.ok("with its length and its CRC64NVME"),
            Some(Some(_)) => LANDED.wrong_to_mend(
                "the store tells another CRC64NVME than that of what was sent",
                "set store.checksum = \"none\": every object is read back then before it counts",
            ),
            Some(None) => LANDED.ok(
                "with its length; the store keeps no CRC64NVME, so every object is read back before it counts",
            ),
            None => LANDED.wrong("the object is not there, or is of another length"),
        });
        self.measure(&key, len, sending).await;
        Some(key)
    }

    /// Sends the same part again and again.
    async fn send(
        &self,
        key: &Key,
        upload: &UploadId,
        part: &PartBody,
    ) -> Result<Vec<PartReceipt>, StoreError> {
        let started = Instant::now();
        self.session
            .set_deadline(Some(self.until.min(started + 2 * PATIENCE)));
        let store = &self.session.store;
        let goes_on = |number: &u64| *number <= PARTS_MIN || started.elapsed() < MEASURED_FOR;
        let numbers = (1..=PARTS_MAX).filter_map(PartNumber::new);
        let sending = stream::iter(numbers)
            .take_while(|number| std::future::ready(goes_on(&u64::from(number.get()))))
            .map(|number| store.put_part(key, upload, number, part.clone()))
            .buffered(IN_FLIGHT);
        let receipts: Vec<_> = sending.collect().await;
        receipts.into_iter().collect()
    }

    async fn measure(&mut self, key: &Key, len: u64, sending: Duration) {
        let started = Instant::now();
        self.session
            .set_deadline(Some(self.until.min(started + PATIENCE)));
        let store = &self.session.store;
        let ranges = (0..len).step_by(usize::try_from(PART_LEN_MIN).unwrap_or(usize::MAX));
        let reading = stream::iter(ranges)
            .take_while(|_| std::future::ready(started.elapsed() < MEASURED_FOR))
            .map(|start| async move {
                let end = (start + PART_LEN_MIN).min(len);
                let mut counted = Counted(0);
                store
                    .read_range(key, start..end, None, &mut counted)
                    .await?;
                Ok::<u64, StoreError>(counted.0)
            })
            .buffered(IN_FLIGHT);
        let read: Vec<_> = reading.collect().await;
        let read: Result<Vec<u64>, StoreError> = read.into_iter().collect();
        match read {
            Ok(read) => {
                let upload = rate(len, sending);
                let download = rate(read.iter().sum(), started.elapsed());
                self.rates = Rates {
                    upload: Some(upload),
                    download: Some(download),
                };
                self.checks.push(RATE.ok(format!(
                    "{:.0} MB/s up, {:.0} MB/s down, with {IN_FLIGHT} requests in flight",
                    upload / 1e6,
                    download / 1e6
                )));
            }
            Err(error) => self.failed(&RATE, &error),
        }
    }

    /// A part with another checksum than its bytes have.
    async fn damaged(&mut self) {
        let key = self.key("damaged.zst");
        let store = &self.session.store;
        let Some((upload, _)) = self.ask(&CHECKED, store.begin_upload(&key)).await else {
            return;
        };
        let part = random_part(1 << 10);
        let damaged = PartBody {
            crc64: !part.crc64,
            ..part
        };
        let (Some(first), store) = (PartNumber::new(1), &self.session.store) else {
            return;
        };
        // A store that refuses it is asked again, as for any damage on the way.
        self.session
            .set_deadline(Some(Instant::now() + PATIENCE / 10));
        let sending = store.put_part(&key, &upload, first, damaged);
        let sent = tokio::time::timeout(PATIENCE, sending).await;
        let says_why = |error: &StoreError| {
            let why = one_line(error).to_ascii_lowercase();
            ["digest", "checksum"].iter().any(|word| why.contains(word))
        };
        self.checks.push(match sent {
            Ok(Ok(_)) => CHECKED.wrong("a part whose checksum is wrong is taken"),
            Ok(Err(error)) if says_why(&error) => {
                CHECKED.ok("a part whose checksum is wrong is refused")
            }
            Ok(Err(error)) => of_error(&CHECKED, &error),
            Err(_elapsed) => no_answer(&CHECKED, PATIENCE),
        });
        // The check of aborts tells of it.
        self.session.set_deadline(Some(Instant::now() + PATIENCE));
        let _ = self.session.store.abort_upload(&key, &upload).await;
    }

    async fn abort(&mut self) {
        let key = self.key("aborted.zst");
        let store = &self.session.store;
        let Some((upload, _)) = self.ask(&ABORT, store.begin_upload(&key)).await else {
            return;
        };
        let store = &self.session.store;
        if self
            .ask(&ABORT, store.abort_upload(&key, &upload))
            .await
            .is_some()
        {
            self.checks.push(ABORT.ok("an upload is aborted"));
        }
    }

    async fn list_uploads(&mut self) {
        let key = self.key("open.zst");
        let store = &self.session.store;
        let Some((upload, _)) = self.ask(&LIST_UPLOADS, store.begin_upload(&key)).await else {
            return;
        };
        let prefix = format!("{}/data/{}/", self.session.config.job, self.nonce);
        let store = &self.session.store;
        let found = self
            .ask(&LIST_UPLOADS, store.abort_uploads_under(&prefix))
            .await;
        if let Some((count, _)) = found {
            self.checks.push(match count {
                0 => LIST_UPLOADS.wrong("an upload that was just begun is not listed"),
                _ => LIST_UPLOADS.ok("an upload that was just begun is listed"),
            });
        }
        // Whatever was listed: it is not left.
        let _ = self.session.store.abort_upload(&key, &upload).await;
    }

    async fn delete(&mut self, written: &[Key]) {
        let store = self.session.store.clone();
        let deleting = async {
            let deleted = join_all(written.iter().map(|key| store.delete(key))).await;
            deleted.into_iter().collect::<Result<(), _>>()
        };
        if self.ask(&DELETE, deleting).await.is_some() {
            self.checks.push(DELETE.ok("what was written is removed"));
        }
    }
}

fn no_answer(subject: &Subject, limit: Duration) -> Check {
    subject.wrong(format!("no answer within {limit:.1?}"))
}

/// A failure, and what its own words say about mending it.
fn of_error(subject: &Subject, error: &StoreError) -> Check {
    let found = one_line(error);
    let refusal = match error {
        StoreError::GaveUp { source, .. } => source,
        error => error,
    };
    let own = match refusal {
        StoreError::Refused { advice, .. } => advice.as_str(),
        _ => "",
    };
    let found = match own {
        "" => found,
        own => found.replace(own, ""),
    };
    let mend = match refusal {
        StoreError::Locked { .. } => "`gc` and `prune` remove it when its lock has ended",
        // Of the rights to the store's own key only its words tell.
        _ if found.contains("kms:") => {
            "grant kms:GenerateDataKey and kms:Decrypt for the key that the bucket or store.sse names"
        }
        StoreError::Transient { .. } => advice_on_the_way(&found),
        _ if own.is_empty() => subject.mend,
        _ => own.trim_start_matches("; "),
    };
    subject.wrong_to_mend(found, mend)
}

/// What helps where no answer came.
fn advice_on_the_way(found: &str) -> &'static str {
    // As the layers below put it, and ours.
    const KNOWN: [(&str, &str); 5] = [
        (
            "UnknownIssuer",
            "set store.ca_bundle (or AWS_CA_BUNDLE) to the file of the authority that signed the certificate: the store's, or that of a proxy that looks into TLS",
        ),
        (
            "certificate",
            "see the certificate that is shown at store.endpoint, and store.ca_bundle (or AWS_CA_BUNDLE)",
        ),
        (
            "proxy authorization required",
            "give the proxy a user and a password (HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT), or go without it: store.no_proxy (NO_PROXY), store.proxy = \"none\"",
        ),
        (
            "tunnel error",
            "the proxy (store.proxy, HTTPS_PROXY) does not let us through to store.endpoint: have it allowed there, or go without it: store.no_proxy (NO_PROXY), store.proxy = \"none\"",
        ),
        (
            "store.path_style = true",
            "set store.path_style = true, or see store.endpoint",
        ),
    ];
    let known = KNOWN.iter().find(|(words, _)| found.contains(words));
    known.map_or(
        "see store.endpoint, the network on the way there, and whether a proxy is in the way or is missing: store.proxy (HTTPS_PROXY), store.no_proxy",
        |(_, advice)| *advice,
    )
}

fn is_listed(listed: &[Listed], key: &Key) -> bool {
    listed.iter().any(|it| it.key == *key)
}

/// A part of random bytes.
fn random_part(len: usize) -> PartBody {
    let mut bytes = vec![0; len];
    fastrand::fill(&mut bytes);
    let crc64 = Crc64::of(&bytes).value();
    PartBody::new(vec![Bytes::from(bytes)], crc64)
}

#[expect(clippy::cast_precision_loss, reason = "a rate")]
fn rate(bytes: u64, took: Duration) -> f64 {
    bytes as f64 / took.as_secs_f64().max(1e-6)
}

/// Counts what it is given.
struct Counted(u64);

impl RangeSink for Counted {
    fn restart(&mut self) {
        self.0 = 0;
    }

    fn put(&mut self, bytes: &[u8]) {
        self.0 += bytes.len() as u64;
    }
}
