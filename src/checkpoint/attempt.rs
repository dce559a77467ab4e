//! A save's own corner of the store: a prefix that nobody else has, its place in the job's log, an open upload for every GPU.
//!
//! In: the store, the job, the node's GPUs. Out: an [`Attempt`], before the target is locked. What can fail: the store (unreachable, refusing, or
//! without conditional writes, on which the commit rests). What is left when we die here: a claim, and open uploads under keys that no image names.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::future::{join, join_all};

use super::not_begun;
use crate::config::JobName;
use crate::driver::{Device, Driver};
use crate::error::{ExitCode, Failure, Phase};
use crate::failpoint;
use crate::job_log::{JobLog, LogError};
use crate::manifest::{AttemptClaim, FORMAT, claim_key};
use crate::session::{Session, code_before_begin};
use crate::store::{BadKey, Key, PutOutcome, Store, StoreError, UploadId};
use crate::target::Target;

/// Clean-up of unfinished uploads must not hold back the verdict for longer.
const ABORT_TIMEOUT: Duration = Duration::from_secs(10);

/// This save's own prefix in the store: its name, its place in the log, an open upload per GPU.
pub(super) struct Attempt {
    pub(super) nonce: String,
    /// First free slot of the job's log when it was read.
    pub(super) next_slot: u64,
    /// One per GPU of the node.
    pub(super) uploads: Vec<OpenUpload>,
}

/// A multipart upload for the extent that a GPU may turn out to hold.
pub(super) struct OpenUpload {
    /// Index of the GPU.
    pub(super) device: usize,
    pub(super) key: Key,
    pub(super) upload: UploadId,
}

impl Attempt {
    /// Claims a prefix and reads the log, then opens the uploads: two answers of the store to wait for, whatever the number of GPUs. On failure nothing of it stays but the claim.
    pub(super) fn open(
        session: &Session,
        driver: &Driver,
        target: &Target,
    ) -> Result<Self, Failure> {
        let mut attempt = Self {
            nonce: random_hex::<16>(),
            next_slot: 0,
            uploads: Vec::new(),
        };
        let Err(cause) = session.wait(attempt.claim(session, driver, target)) else {
            return Ok(attempt);
        };
        let code = cause.code();
        let mut failure = not_begun(session, driver, target, Phase::Prepare, cause.into());
        // A refusal that is the store's says what to mend; a passing fault says what became of the target.
        if code != ExitCode::RolledBack && !session.cancel.is_cancelled() {
            failure.code = code;
        }
        failure.attached = attempt.abort_uploads(session, &[]);
        Err(failure)
    }

    async fn claim(
        &mut self,
        session: &Session,
        driver: &Driver,
        target: &Target,
    ) -> Result<(), OpenError> {
        let job = &session.config.job;
        let claim = AttemptClaim {
            format: FORMAT,
            job: job.to_string(),
            attempt: self.nonce.clone(),
            tool: tool(),
            host: host_name(),
            pid: std::process::id(),
            created_ms: now_ms(),
        };
        let key = &Key::of_job(job, &claim_key(&self.nonce)).map_err(OpenError::Key)?;
        let put = session.store.put_if_absent(key, claim.encode().into());
        let (put, log) = join(put, JobLog::read(&*session.store, job)).await;
        if put? == PutOutcome::AlreadyExists {
            let key = key.to_string();
            return Err(OpenError::Claimed { key });
        }
        self.next_slot = log.map_err(OpenError::Log)?.next_slot();
        failpoint::pass("prepare:claimed");

        // The commit rests on it, so it is tried, not assumed: a second claim with other bytes must be turned away.
        let second = AttemptClaim {
            created_ms: claim.created_ms + 1,
            ..claim
        };
        let second = session.store.put_if_absent(key, second.encode().into());
        let nonce = self.nonce.as_str();
        let opened = join_all(driver.devices().iter().enumerate().map(
            |(device, gpu)| async move {
                let key = object_key(job, nonce, target, gpu).map_err(OpenError::Key)?;
                let upload = session.store.begin_upload(&key).await?;
                Ok::<_, OpenError>(OpenUpload {
                    device,
                    key,
                    upload,
                })
            },
        ));
        let (second, opened) = join(second, opened).await;
        let mut failed = match second {
            Ok(PutOutcome::AlreadyExists) => None,
            Ok(PutOutcome::Created) => Some(OpenError::Unconditional {
                store: session.store.describe(),
            }),
            Err(error) => Some(error.into()),
        };
        for outcome in opened {
            match outcome {
                Ok(upload) => self.uploads.push(upload),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failpoint::pass("prepare:uploads open");
        failed.map_or(Ok(()), Err)
    }

    /// Aborts every upload whose object did not land; says which could not be aborted.
    pub(super) fn abort_uploads(&self, session: &Session, landed: &[Key]) -> Vec<String> {
        let unused = self
            .uploads
            .iter()
            .filter(|open| !landed.contains(&open.key));
        let aborts = unused.map(|open| async move {
            let aborted = session
                .store_after_begin
                .abort_upload(&open.key, &open.upload)
                .await;
            aborted.err().map(|error| {
                format!(
                    "an unfinished upload stays in the store: {}",
                    crate::error::one_line(&error)
                )
            })
        });
        let all =
            session.wait(async { tokio::time::timeout(ABORT_TIMEOUT, join_all(aborts)).await });
        match all {
            Ok(outcomes) => outcomes.into_iter().flatten().collect(),
            Err(_elapsed) => vec![format!(
                "unfinished uploads stay in the store: they could not be aborted within {ABORT_TIMEOUT:?}"
            )],
        }
    }
}

/// Why an attempt could not be opened.
#[derive(Debug, thiserror::Error)]
enum OpenError {
    #[error("the save cannot be opened in the store")]
    Store(#[from] StoreError),
    #[error("the job's log cannot be read")]
    Log(#[source] LogError),
    #[error("a key of this save is not legal")]
    Key(#[source] BadKey),
    #[error("{key} is claimed by another save")]
    Claimed { key: String },
    #[error(
        "{store} ignores If-None-Match: it overwrote an object that a conditional write must leave alone, so two savers could both commit; \
         use a store with conditional writes (store.url, store.endpoint)"
    )]
    Unconditional { store: String },
}

impl OpenError {
    fn code(&self) -> ExitCode {
        match self {
            Self::Store(error) => code_before_begin(error),
            Self::Log(LogError::Store { source, .. }) => code_before_begin(source),
            Self::Log(_) | Self::Key(_) | Self::Unconditional { .. } => ExitCode::Preflight,
            Self::Claimed { .. } => ExitCode::NotOurs,
        }
    }
}

/// A fresh key for the object of what a GPU holds.
pub(super) fn object_key(
    job: &JobName,
    nonce: &str,
    target: &Target,
    gpu: &Device,
) -> Result<Key, BadKey> {
    let relative = format!(
        "data/{nonce}/{}/gpu-{}.{}.zst",
        target.pid,
        bare_uuid(gpu),
        random_hex::<4>()
    );
    Key::of_job(job, &relative)
}

fn bare_uuid(device: &Device) -> String {
    device
        .uuid
        .to_string()
        .trim_start_matches("GPU-")
        .to_owned()
}

/// Random bits in hex digits: enough of them name an attempt for good, a few make a key fresh within it.
fn random_hex<const LEN: usize>() -> String {
    let mut bytes = [0_u8; LEN];
    let mut filled = 0;
    while filled < LEN {
        // The kernel's pool is there from early boot on, and a request of this size is never cut short but by a signal.
        filled +=
            rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())
                .unwrap_or(0);
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Who writes, for the labels of what is written.
pub(super) fn tool() -> String {
    concat!("ckptstream ", env!("CARGO_PKG_VERSION")).to_owned()
}

pub(super) fn host_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

/// Milliseconds since 1970 by our own clock: a label, nothing is ordered by it.
pub(super) fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| {
            u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
        })
}
