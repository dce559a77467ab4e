//! The commit: frame tables, then the manifest, then the one entry in the job's log that makes the image.
//!
//! In: objects that have landed. Out: the image, as a reader would open it. What can fail: the store; another writer ([`AppendError::Fenced`]); an answer that never
//! comes ([`AppendError::Unreachable`]: unknown). Before the entry stands, the image does not exist, whatever lies under its prefix.

use super::attempt::{Attempt, Holds, OpenUpload};
use crate::config::JobName;
use crate::driver::{Device, Driver};
use crate::error::ExitCode;
use crate::failpoint;
use crate::image::{Image, by_process};
use crate::job_log::{AppendError, ImageEntry, append_dropped, append_image};
use crate::manifest::{
    Capture, CaptureMode, DeviceRecord, ExtentRecord, FORMAT, FrameTable, HOST, Host, HostFiles,
    ImageKind, Manifest, ManifestError, ObjectRecord, ProcessRecord, TreeRecord, digest_of,
    features_of, host_files_key, manifest_key,
};
use crate::pipeline::SavedLane;
use crate::session::Session;
use crate::store::{BadKey, Key, PutOutcome, Store, StoreError};
use crate::target::Target;
use crate::writer::{host_name, now_ms, tool};

/// Why a landed save was not committed.
#[derive(Debug, thiserror::Error)]
pub(super) enum CommitFailed {
    #[error("the frame tables or the manifest were not stored")]
    Store(#[from] StoreError),
    #[error("{key} exists already, with other bytes")]
    Taken { key: String },
    #[error("a key of this save is not legal")]
    Key(#[from] BadKey),
    #[error("the manifest that we wrote does not verify; this is a defect of ckptstream")]
    Manifest(#[from] ManifestError),
    #[error("the image was not entered into the job's log")]
    Log(#[source] Box<AppendError>),
    #[error(
        "{key} is not there as it was stored, looked at again after the commit: somebody else writes to, or cleans up, what is this save's; the image is given up"
    )]
    Gone { key: String },
    #[error(
        "the image is committed, and what it consists of could not be looked at again, as a job with job.epoch wants it before its memory is let go"
    )]
    Unseen(#[source] StoreError),
}

impl CommitFailed {
    pub(super) fn code(&self) -> ExitCode {
        match self {
            Self::Log(error) => match **error {
                AppendError::Fenced { .. } => ExitCode::Fenced,
                AppendError::Unreachable { .. } => ExitCode::CommitUnknown,
                _ => ExitCode::Lost,
            },
            Self::Unseen(_) => ExitCode::CommitUnknown,
            _ => ExitCode::Lost,
        }
    }

    /// The attempt is given up, so nothing that is sealed under its name would ever be an image.
    pub(super) fn is_given_up(&self) -> bool {
        matches!(self, Self::Gone { .. })
    }
}

/// An object that has landed, and beside which its frame table stands.
#[derive(Debug, Clone)]
pub(super) struct Tabled {
    holds: Holds,
    extent: ExtentRecord,
    table: FrameTable,
    /// The store's tag for it.
    etag: Option<String>,
}

/// An image but for its place in the log.
pub(super) struct Written {
    /// What commits it.
    pub(super) entry: ImageEntry,
    /// Its generation is 0 until it is committed.
    pub(super) image: Image,
}

/// What was saved, and how: all that the manifest says beside the objects.
pub(super) struct Captured<'a> {
    pub(super) driver: &'a Driver,
    pub(super) mode: CaptureMode,
    /// The processes that use GPUs, by their indexes.
    pub(super) members: Vec<&'a Target>,
    /// The tree, in an image that is whole.
    pub(super) tree: Option<CapturedTree>,
}

/// A tree that CRIU has dumped.
#[derive(Debug, Clone)]
pub(super) struct CapturedTree {
    /// Pids where CRIU ran.
    pub(super) root: u32,
    pub(super) pids: Vec<u32>,
    /// Of the root.
    pub(super) stdio: [String; 3],
    /// CRIU's version.
    pub(super) criu: String,
    pub(super) files: HostFiles,
}

impl<'a> Captured<'a> {
    /// The memory of these processes' GPUs.
    pub(super) fn gpus(driver: &'a Driver, members: Vec<&'a Target>) -> Self {
        Self {
            driver,
            mode: CaptureMode::CustomStorage,
            members,
            tree: None,
        }
    }

    fn kind(&self) -> ImageKind {
        match self.tree {
            Some(_) => ImageKind::Whole,
            None => ImageKind::Gpu,
        }
    }
}

/// Everything that makes an image of what has landed and has its frame table: the manifest, the one entry.
pub(super) fn commit(
    session: &Session,
    captured: &Captured<'_>,
    attempt: &Attempt,
    landed: Vec<Tabled>,
) -> Result<Image, CommitFailed> {
    let store = &*session.store_after_begin;
    let key = manifest_key(&attempt.nonce);
    let written = write_manifest(session, captured, attempt, (store, key), landed)?;
    let entered = append_image(
        store,
        &session.config.job,
        attempt.next_slot,
        &written.entry,
    );
    let generation = session
        .wait(entered)
        .map_err(|error| CommitFailed::Log(Box::new(error)))?;
    failpoint::pass("commit:entered");
    let image = Image {
        generation,
        ..written.image
    };
    if session.config.store.epoch.is_some() {
        let looked = session.wait(must_stand(session, &written.entry, &image));
        if let Err(error @ CommitFailed::Unseen(_)) = looked {
            return Err(error);
        }
        if let Err(error) = looked {
            // Nobody is to choose it, and what becomes of the target is decided without it.
            let slot = generation + 1;
            let (job, nonce) = (&session.config.job, &attempt.nonce);
            let given_up = session.wait(append_dropped(store, job, slot, nonce, nonce));
            return Err(match given_up {
                Ok(_slot) => error,
                Err(error) => CommitFailed::Log(Box::new(error)),
            });
        }
    }
    Ok(image)
}

/// Nothing of the image was replaced or removed while nobody could be kept from it: where creates are not conditional, that is all that can be known.
async fn must_stand(
    session: &Session,
    entry: &ImageEntry,
    image: &Image,
) -> Result<(), CommitFailed> {
    let (store, job) = (&*session.store_after_begin, &session.config.job);
    let mut objects = Vec::new();
    for stored in image.stored() {
        let extent = stored.extent;
        objects.push((&extent.object.key, extent.object.len, stored.etag));
        objects.push((&extent.table.key, extent.table.len, None));
    }
    if let Some(tree) = &image.manifest.tree {
        objects.push((&tree.files.key, tree.files.len, None));
    }
    objects.push((&entry.manifest_key, entry.manifest_len, None));
    let looks = objects.into_iter().map(|(key, len, etag)| async move {
        let key = Key::of_job(job, key)?;
        let there = store.head(&key).await.map_err(CommitFailed::Unseen)?;
        let is_it = there.is_some_and(|there| {
            let is_same = etag.is_none_or(|tag| there.etag.as_deref() == Some(tag));
            there.len == len && is_same
        });
        match is_it {
            true => Ok(()),
            false => Err(CommitFailed::Gone {
                key: key.to_string(),
            }),
        }
    });
    futures::future::try_join_all(looks).await?;
    Ok(())
}

/// Puts the frame tables of what has landed in this store, under the keys of these `uploads`, beside the objects; `etags` are the store's tags for them.
pub(super) fn write_tables(
    session: &Session,
    driver: &Driver,
    (store, uploads): (&dyn Store, &[OpenUpload]),
    lanes: Vec<SavedLane>,
    etags: Vec<Option<String>>,
) -> Result<Vec<Tabled>, CommitFailed> {
    let job = &session.config.job;
    let mut tabled = Vec::with_capacity(lanes.len());
    let mut to_put = Vec::with_capacity(lanes.len());
    for (lane, etag) in lanes.into_iter().zip(etags) {
        let open = uploads.iter().find(|open| open.key == lane.key);
        let Some(open) = open else {
            unreachable!("every lane was made from an open upload")
        };
        let object_key = relative_key(job, &lane.key);
        let table_key = format!("{}.frames.json", object_key.trim_end_matches(".zst"));
        let encoded = lane.table.encode();
        let device = match open.holds {
            Holds::Gpu { device, .. } => driver.devices()[device].uuid.to_string(),
            Holds::Host => HOST.to_owned(),
        };
        let extent = ExtentRecord {
            device,
            raw_len: lane.table.raw_len,
            chunk_len: lane.table.chunk_len,
            object: ObjectRecord {
                key: object_key,
                len: lane.len,
                crc64: lane.crc64,
            },
            table: FrameTable::record(&encoded, table_key.clone()),
        };
        to_put.push((Key::of_job(job, &table_key)?, encoded));
        tabled.push(Tabled {
            holds: open.holds,
            extent,
            table: lane.table,
            etag,
        });
    }
    session.wait(async {
        let puts = to_put
            .into_iter()
            .map(|(key, bytes)| put_new(store, key, bytes));
        futures::future::try_join_all(puts).await
    })?;
    failpoint::pass("commit:tables stored");
    Ok(tabled)
}

/// Puts the manifest of all that has landed, and has its table, under this key.
pub(super) fn write_manifest(
    session: &Session,
    captured: &Captured<'_>,
    attempt: &Attempt,
    (store, manifest_key): (&dyn Store, String),
    mut landed: Vec<Tabled>,
) -> Result<Written, CommitFailed> {
    let job = &session.config.job;
    // As the manifest has them.
    landed.sort_by_key(|object| object.holds);
    let mut tables = Vec::with_capacity(landed.len());
    let mut etags = Vec::with_capacity(landed.len());
    let mut extents: Vec<Vec<ExtentRecord>> = captured.members.iter().map(|_| Vec::new()).collect();
    let mut host = None;
    for object in landed {
        match object.holds {
            Holds::Gpu { member, .. } => extents[member].push(object.extent),
            Holds::Host => host = Some(object.extent),
        }
        tables.push(object.table);
        etags.push(object.etag);
    }
    let mut files_to_put = None;
    let tree = match (&captured.tree, host) {
        (Some(tree), Some(memory)) => {
            let key = host_files_key(&attempt.nonce);
            let encoded = tree.files.encode();
            let files = FrameTable::record(&encoded, key.clone());
            HostFiles::decode_and_verify(&encoded, &files, memory.raw_len)?;
            files_to_put = Some((Key::of_job(job, &key)?, encoded));
            Some(TreeRecord {
                root: tree.root,
                pids: tree.pids.clone(),
                stdio: tree.stdio.clone(),
                criu: tree.criu.clone(),
                memory,
                files,
            })
        }
        _ => None,
    };
    let features = features_of(captured.kind(), &tables);
    let manifest = manifest(session, captured, attempt, (features, extents, tree));
    let encoded = manifest.encode();
    let manifest_digest = digest_of(&encoded);
    let manifest_len = encoded.len();
    // What does not verify must not be committed: the reader is our own, asked beforehand.
    Manifest::decode_and_verify(&encoded, job.as_str(), &attempt.nonce)?;
    let manifest_object = Key::of_job(job, &manifest_key)?;
    session.wait(async {
        if let Some((key, bytes)) = files_to_put {
            put_new(store, key, bytes).await?;
        }
        put_new(store, manifest_object, encoded).await
    })?;
    failpoint::pass("commit:manifest stored");
    let entry = ImageEntry {
        writer: attempt.nonce.clone(),
        attempt: attempt.nonce.clone(),
        manifest_key,
        manifest_len: manifest_len as u64,
        manifest_digest,
        kind: manifest.kind,
        raw_len: manifest.raw_len(),
        stored_len: manifest.stored_len(),
        created_ms: manifest.created_ms,
        tool: tool(),
    };
    let image = Image {
        generation: 0,
        attempt: attempt.nonce.clone(),
        manifest_digest,
        tables: by_process(&manifest, tables),
        manifest,
        etags,
        files: captured.tree.as_ref().map(|tree| tree.files.clone()),
    };
    Ok(Written { entry, image })
}

async fn put_new(store: &dyn Store, key: Key, bytes: Vec<u8>) -> Result<(), CommitFailed> {
    match store.put_if_absent(&key, bytes.into()).await? {
        PutOutcome::Created => Ok(()),
        PutOutcome::AlreadyExists => Err(CommitFailed::Taken {
            key: key.to_string(),
        }),
    }
}

fn manifest(
    session: &Session,
    captured: &Captured<'_>,
    attempt: &Attempt,
    (features, extents, tree): (Vec<String>, Vec<Vec<ExtentRecord>>, Option<TreeRecord>),
) -> Manifest {
    let driver = captured.driver;
    let boot_id = captured
        .members
        .first()
        .map(|target| target.boot_id.clone());
    let processes = captured.members.iter().zip(extents);
    let processes = processes.map(|(target, extents)| ProcessRecord {
        pid: target.pid,
        start_time: target.start_time,
        ns_pids: target.ns_pids.clone(),
        name: target.name.clone(),
        devices: driver.devices().iter().map(device_record).collect(),
        extents,
    });
    Manifest {
        format: FORMAT,
        features,
        tool: tool(),
        job: session.config.job.to_string(),
        kind: captured.kind(),
        attempt: attempt.nonce.clone(),
        created_ms: now_ms(),
        capture: Capture {
            mode: captured.mode,
            driver_version: driver.driver_version().map(str::to_owned),
            driver_api: driver.api_version(),
        },
        host: Host {
            name: host_name(),
            boot_id: boot_id.unwrap_or_default(),
        },
        processes: processes.collect(),
        tree,
    }
}

fn device_record(device: &Device) -> DeviceRecord {
    DeviceRecord {
        uuid: device.uuid.to_string(),
        name: device.name.clone(),
        chip: device.chip.clone(),
        memory_len: device.memory_len,
        pci: device.pci.clone(),
        ordinal: device.ordinal,
    }
}

/// The key as the manifest has it: relative to the job.
fn relative_key(job: &JobName, key: &Key) -> String {
    key.as_str()
        .strip_prefix(job.as_str())
        .unwrap_or(key.as_str())
        .trim_start_matches('/')
        .to_owned()
}
