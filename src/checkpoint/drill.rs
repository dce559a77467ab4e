//! What a save does to its target and to the store, rehearsed: a real lock and unlock, and a small image that goes up through the pipeline, is read back, and is removed.
//!
//! In: a target that runs; a session. Out: how long each took. What can fail: whatever fails a save up to BEGIN, which is never asked for, and the store. A failed lock says what became of the target, as that of a save does. What is
//! left when we die: a target that the guard unlocks; a claim and one object under the prefix of an attempt that is never announced, which `gc` removes.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::attempt::{Holds, OpenUpload};
use super::memory::{Memory, plan};
use super::{land, lock, look, open_driver, take_custody, take_in_hand};
use crate::codec::Digest;
use crate::custody::Custody;
use crate::driver::{
    BufferPool, CopyQueue, DeviceMemory, Driver, DriverError, PoolClosed, STREAMS_IN,
};
use crate::error::{ExitCode, Failure, Phase, TargetState, one_line};
use crate::failpoint;
use crate::manifest::{FrameTable, claim_key};
use crate::pipeline;
use crate::plan::Chunks;
use crate::restore::read_object;
use crate::session::Session;
use crate::store::{Key, PutOutcome, Store, UploadId};
use crate::writer::{claim, random_hex};

/// Chunks of the small image; the last one has few bytes only.
const CHUNKS: u64 = 4;
const LAST_CHUNK_LEN: u64 = 4096;

/// Clean-up must not hold back what was found for longer.
const CLEAN_UP_TIMEOUT: Duration = Duration::from_secs(10);

/// A target that was locked and let go.
#[derive(Debug)]
pub(crate) struct LetGo {
    /// Until the driver had locked it.
    pub(crate) lock: Duration,
    /// From the moment that the lock was asked for until it ran again.
    pub(crate) held: Duration,
    /// As looked up afterwards: it runs, or has come to its end by itself.
    pub(crate) target: TargetState,
}

/// Locks the target as a save does, and unlocks it at once.
///
/// # Errors
/// A [`Failure`] of phase lock, or before, with the codes of a save; of phase unlock with [`ExitCode::Lost`] when the target is not known to run again.
pub(crate) fn lock_and_unlock(session: &Session, pid: u32) -> Result<LetGo, Failure> {
    let custody = take_custody(session, pid, "drill")?;
    let result = lock_and_unlock_in_custody(session, &custody);
    custody.end(ExitCode::of(&result));
    result
}

fn lock_and_unlock_in_custody(session: &Session, custody: &Custody) -> Result<LetGo, Failure> {
    let target = &custody.target;
    // A lock needs no custom storage: it is worth knowing what it takes on an older driver, too.
    let driver = open_driver()?;
    let running = take_in_hand(session, &driver, target)?;
    let started = Instant::now();
    let locked = lock(session, &driver, custody, running)?;
    let lock = started.elapsed();
    failpoint::pass("drill:locked");
    let unlocked = locked.unlock();
    custody.must_not_be_unlocked();
    let held = started.elapsed();
    let target = look(&driver, target);
    match unlocked {
        Ok(_running) => {}
        // It runs whatever the call said, or came to its end.
        Err(_) if ["running", "gone"].contains(&target.state.as_str()) => {}
        Err(error) => {
            let mut failure = Failure::new(ExitCode::Lost, Phase::Unlock, error);
            failure.targets = vec![target];
            return Err(failure);
        }
    }
    Ok(LetGo { lock, held, target })
}

/// A small image that went there and back.
#[derive(Debug)]
pub(crate) struct SmallImage {
    /// Bytes of GPU memory.
    pub(crate) raw: u64,
    /// Bytes of its object.
    pub(crate) stored: u64,
    pub(crate) saved_in: Duration,
    pub(crate) read_in: Duration,
    /// What could not be removed again, in words.
    pub(crate) left: Vec<String>,
}

/// Memory of our own on the first GPU goes into the store with the buffers, encoders and requests of a save, and is read back and compared. It ends soon after the deadline of the session.
///
/// # Errors
/// Whatever a save would fail with on the way.
pub(crate) fn small_image(session: &Session) -> Result<SmallImage, Box<dyn Error + Send + Sync>> {
    let driver = open_driver().map_err(|failure| failure.cause)?;
    let nonce = random_hex::<16>();
    let mut made = Made::default();
    let result = there_and_back(session, &driver, &nonce, &mut made);
    let left = made.remove(session);
    match result {
        Ok(image) => Ok(SmallImage { left, ..image }),
        Err(error) => {
            for leftover in left {
                tracing::warn!("{leftover}");
            }
            Err(error)
        }
    }
}

fn there_and_back(
    session: &Session,
    driver: &Arc<Driver>,
    nonce: &str,
    made: &mut Made,
) -> Result<SmallImage, Box<dyn Error + Send + Sync>> {
    if driver.devices().is_empty() {
        return Err("there is no GPU".into());
    }
    let plan = plan(&session.config, driver).map_err(|failure| failure.cause)?;
    let chunk_len = plan.chunk_len;
    let mut memory = Memory::allocate(session, driver, plan, 1, true)?;
    let raw = (CHUNKS - 1) * chunk_len + LAST_CHUNK_LEN;
    let gpu = DeviceMemory::allocate(driver, 0, usize::try_from(raw)?)?;
    let digests = fill(driver, &gpu, chunk_len)?;

    let started = Instant::now();
    let job = &session.config.job;
    let claim_key = Key::of_job(job, &claim_key(nonce))?;
    made.objects.push(claim_key.clone());
    let claiming = session
        .store
        .put_if_absent(&claim_key, claim(job, nonce).encode().into());
    if session.wait(claiming)? == PutOutcome::AlreadyExists {
        return Err(format!("{claim_key} is claimed by another save").into());
    }
    let key = Key::of_job(job, &format!("data/{nonce}/drill.zst"))?;
    let upload = session.wait(session.store.begin_upload(&key))?;
    made.upload = Some((key.clone(), upload.clone()));
    let open = OpenUpload {
        holds: Holds::Gpu {
            member: 0,
            device: 0,
        },
        key: key.clone(),
        upload,
    };
    let store = Arc::clone(&session.store) as Arc<dyn Store>;
    let dealt = memory.deal_out(session, [(0, &gpu.extent())], store, &[open]);
    let Some((lanes, encoders, resources)) = dealt else {
        unreachable!("provisions were made for one run");
    };
    let saved = pipeline::save(lanes, encoders, resources)?;
    made.objects.push(key.clone());
    let etags = land(session, &*session.store, &saved.lanes)?;
    made.upload = None;
    let saved_in = started.elapsed();

    let [lane] = saved.lanes.as_slice() else {
        unreachable!("one extent makes one object");
    };
    must_be(&lane.table, &digests)?;
    let started = Instant::now();
    read_object(
        session,
        &key,
        etags.into_iter().flatten().next(),
        &lane.table,
    )?;
    Ok(SmallImage {
        raw,
        stored: lane.len,
        saved_in,
        read_in: started.elapsed(),
        left: Vec::new(),
    })
}

/// Every other chunk is of random bytes, the rest of equal ones. The digest of each.
fn fill(
    driver: &Arc<Driver>,
    gpu: &DeviceMemory,
    chunk_len: u64,
) -> Result<Vec<Digest>, FillError> {
    let extent = gpu.extent();
    let chunks = Chunks::new(extent.len, chunk_len);
    let buffer_len = usize::try_from(chunk_len).unwrap_or(usize::MAX);
    let pool = BufferPool::new(1, buffer_len, Some((driver, extent.device)))?;
    let mut queue = CopyQueue::prepare(driver, extent.device, 1, STREAMS_IN)?;
    queue.bind(extent)?;
    let mut digests = Vec::new();
    for index in 0..chunks.count() {
        let range = chunks.range(index);
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let (mut buffer, _waited) = pool.acquire()?;
        let chunk = &mut buffer[..len];
        match index % 2 {
            0 => fastrand::fill(chunk),
            _ => chunk.fill(0x5A),
        }
        digests.push(Digest::of(chunk));
        queue.copy_in(buffer, range.start, len)?;
        queue.wait_oldest()?;
    }
    queue.finish()?;
    Ok(digests)
}

/// The memory of the small image cannot be filled.
#[derive(Debug, thiserror::Error)]
enum FillError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Closed(#[from] PoolClosed),
}

/// What was copied off the GPU is what was put there.
fn must_be(table: &FrameTable, digests: &[Digest]) -> Result<(), String> {
    let differs = |(found, put): (&Digest, &Digest)| found != put;
    match table.digests.iter().zip(digests).position(differs) {
        None if table.digests.len() == digests.len() => Ok(()),
        None => Err(format!(
            "{} chunks came off the GPU, and {} were put there",
            table.digests.len(),
            digests.len()
        )),
        Some(chunk) => Err(format!(
            "chunk {chunk} came off the GPU as other bytes than were put there"
        )),
    }
}

/// What stands in the store.
#[derive(Default)]
struct Made {
    objects: Vec<Key>,
    upload: Option<(Key, UploadId)>,
}

impl Made {
    /// Removes it all; says what could not be removed.
    fn remove(&self, session: &Session) -> Vec<String> {
        let store = &session.store_for_clean_up;
        let removing = async {
            let mut left = Vec::new();
            if let Some((key, upload)) = &self.upload
                && let Err(error) = store.abort_upload(key, upload).await
            {
                left.push(format!("an upload stays: {}", one_line(&error)));
            }
            for key in &self.objects {
                if let Err(error) = store.delete(key).await {
                    left.push(format!("an object stays: {}", one_line(&error)));
                }
            }
            left
        };
        let removed =
            session.wait(async { tokio::time::timeout(CLEAN_UP_TIMEOUT, removing).await });
        removed.unwrap_or_else(|_elapsed| {
            vec![format!(
                "leftovers stay: they could not be removed within {CLEAN_UP_TIMEOUT:?}"
            )]
        })
    }
}
