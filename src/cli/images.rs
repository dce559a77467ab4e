//! `list` and `inspect`: what stands in the store, as data that is printed either way.
//!
//! In: a store, perhaps a job, perhaps an image. Out: listings for the report. What can fail: the store (exit 3), the image (20), or there is none (6).

use std::time::{Duration, UNIX_EPOCH};

use serde::Serialize;

use super::report::{Done, Rows};
use super::units::{float, ratio, size, sizes};
use crate::codec::FrameKind;
use crate::config::JobName;
use crate::driver::ApiVersion;
use crate::error::{ExitCode, Failure, Phase};
use crate::image::{self, Image, ImageError, ImageRef, Skipped, Standing, image_id};
use crate::job_log::SavingEntry;
use crate::manifest::{DeviceRecord, ExtentRecord, FrameTable, ImageKind, Manifest};
use crate::store::Store;

/// `list` of one job.
#[derive(Debug, Serialize)]
pub(super) struct ImageListing {
    #[serde(skip)]
    pub(super) job: String,
    store: String,
    /// Newest first.
    images: Vec<ImageRow>,
    /// Log entries that may be images but cannot be read as such.
    skipped: Vec<SkippedRow>,
    /// A save that is under way, or whose saver died.
    saving: Option<SavingRow>,
    /// The job ended by itself; its images are only history.
    finished: bool,
}

/// A save of which nothing more is known than that it began.
#[derive(Debug, Serialize)]
struct SavingRow {
    attempt: String,
    host: String,
    pid: u32,
    /// That it may need, by its own word, from its begin on.
    seconds: u64,
    /// It ran on this node, and has ended.
    known_dead: bool,
    /// Where it may be sealed.
    spill: Option<String>,
}

impl SavingRow {
    fn of(saving: &SavingEntry) -> Self {
        Self {
            attempt: saving.attempt.clone(),
            host: saving.by.host.clone(),
            pid: saving.by.pid,
            seconds: saving.seconds,
            known_dead: saving.by.is_known_dead(),
            spill: saving.spill.clone(),
        }
    }
}

/// One image, as the job's log has it; its objects were not looked at.
#[derive(Debug, Serialize)]
struct ImageRow {
    image: String,
    generation: u64,
    attempt: String,
    kind: ImageKind,
    created_ms: u64,
    raw: u64,
    stored: u64,
    /// `usable`, `bad` (it failed to restore) or `dropped` (given up; its data may be gone).
    standing: &'static str,
    tool: String,
}

/// An image that was passed over, and why.
#[derive(Debug, Serialize)]
struct SkippedRow {
    image: String,
    generation: u64,
    reason: String,
}

/// `list` of a store.
#[derive(Debug, Serialize)]
pub(super) struct JobListing {
    store: String,
    jobs: Vec<String>,
}

/// `inspect`: a manifest that was verified, and what its frame tables add up to.
#[derive(Debug, Serialize)]
pub(super) struct Inspection {
    #[serde(skip)]
    pub(super) generation: u64,
    /// XXH3-128 of the manifest, as the log has it.
    manifest_digest: String,
    pub(super) manifest: Manifest,
    /// In the manifest's order.
    extents: Vec<ExtentSummary>,
    /// Newer images that `latest` passed over.
    skipped: Vec<SkippedRow>,
}

#[derive(Debug, Serialize)]
struct ExtentSummary {
    pid: u32,
    device: String,
    key: String,
    raw: u64,
    stored: u64,
    /// Raw to stored.
    ratio: Option<f64>,
    frames: FrameCounts,
}

/// Frames by how they were made.
#[derive(Debug, Default, Serialize)]
struct FrameCounts {
    all: u64,
    zero: u64,
    raw: u64,
    zstd: u64,
}

/// Every job of the store.
pub(super) async fn jobs(store: &dyn Store) -> Result<Vec<JobName>, Failure> {
    image::list_jobs(store).await.map_err(image_failure)
}

/// Images of a job, or jobs of the store. That there is none at all is a failure of its own (6), so that a script need not parse.
pub(super) async fn list(store: &dyn Store, job: Option<&JobName>) -> Result<Done, Failure> {
    let Some(job) = job else {
        let jobs = jobs(store).await?;
        if jobs.is_empty() {
            return Err(nothing(format!(
                "no job has images under {}",
                store.describe()
            )));
        }
        let jobs = jobs.iter().map(ToString::to_string).collect();
        return Ok(Done::Jobs(JobListing {
            store: store.describe(),
            jobs,
        }));
    };
    let list = image::list_images(store, job)
        .await
        .map_err(image_failure)?;
    if list.images.is_empty() && list.unreadable.is_empty() {
        return Err(nothing(format!(
            "job {job} has no image under {}",
            store.describe()
        )));
    }
    let images = list.images.into_iter().map(|listed| ImageRow {
        image: image_id(listed.generation),
        generation: listed.generation,
        attempt: listed.entry.attempt,
        kind: listed.entry.kind,
        created_ms: listed.entry.created_ms,
        raw: listed.entry.raw_len,
        stored: listed.entry.stored_len,
        standing: match listed.standing {
            Standing::Usable => "usable",
            Standing::Bad => "bad",
            Standing::Dropped => "dropped",
        },
        tool: listed.entry.tool,
    });
    Ok(Done::Images(ImageListing {
        job: job.to_string(),
        store: store.describe(),
        images: images.collect(),
        skipped: skipped_rows(&list.unreadable),
        saving: list.saving.as_ref().map(SavingRow::of),
        finished: list.is_finished,
    }))
}

/// An image's manifest and frame tables, verified.
pub(super) async fn inspect(
    store: &dyn Store,
    job: &JobName,
    which: ImageRef,
) -> Result<Inspection, Failure> {
    let (image, skipped) = Image::open(store, job, which)
        .await
        .map_err(image_failure)?;
    let extents =
        image
            .manifest
            .processes
            .iter()
            .zip(&image.tables)
            .flat_map(|(process, tables)| {
                let pid = process.pid;
                process
                    .extents
                    .iter()
                    .zip(tables)
                    .map(move |(extent, table)| summary(pid, extent, table))
            });
    Ok(Inspection {
        generation: image.generation,
        manifest_digest: image.manifest_digest.to_string(),
        extents: extents.collect(),
        skipped: skipped_rows(&skipped),
        manifest: image.manifest,
    })
}

fn summary(pid: u32, extent: &ExtentRecord, table: &FrameTable) -> ExtentSummary {
    let mut frames = FrameCounts::default();
    for kind in &table.kinds {
        frames.all += 1;
        match kind {
            FrameKind::Zero => frames.zero += 1,
            FrameKind::Raw => frames.raw += 1,
            FrameKind::Zstd => frames.zstd += 1,
        }
    }
    ExtentSummary {
        pid,
        device: extent.device.clone(),
        key: extent.object.key.clone(),
        raw: extent.raw_len,
        stored: extent.object.len,
        ratio: (extent.object.len > 0).then(|| float(extent.raw_len) / float(extent.object.len)),
        frames,
    }
}

fn skipped_rows(skipped: &[Skipped]) -> Vec<SkippedRow> {
    let row = |skip: &Skipped| SkippedRow {
        image: image_id(skip.generation),
        generation: skip.generation,
        reason: crate::error::one_line(&skip.flaw),
    };
    skipped.iter().map(row).collect()
}

fn nothing(what: String) -> Failure {
    Failure::new(ExitCode::NothingToRestore, Phase::Read, what)
}

/// What an image error means to a command that only reads.
fn image_failure(error: ImageError) -> Failure {
    let code = match error {
        ImageError::NoImage { .. } => ExitCode::NothingToRestore,
        ImageError::Unreachable { .. } => ExitCode::Preflight,
        _ => ExitCode::RestoreRefused,
    };
    Failure::new(code, Phase::Read, error)
}

/// By the writer's clock, in UTC: `2026-01-31 12:00:00`.
fn written_at(created_ms: u64) -> String {
    match UNIX_EPOCH.checked_add(Duration::from_millis(created_ms)) {
        // Later than the year 9999 it formats to nothing.
        Some(time) if created_ms < 253_402_300_800_000 => humantime::format_rfc3339_seconds(time)
            .to_string()
            .replace('T', " ")
            .replace('Z', ""),
        _ => "-".to_owned(),
    }
}

impl ImageListing {
    /// The table for people.
    pub(super) fn text(&self) -> String {
        let mut rows = Rows::default();
        rows.add("job", format!("{} in {}", self.job, self.store));
        rows.line(format!(
            "{:<9} {:<20} {:<6} {:>11} {:>11} {:>6}  {:<9} {}",
            "image", "written (UTC)", "kind", "raw", "stored", "ratio", "standing", "attempt"
        ));
        for image in &self.images {
            rows.line(format!(
                "{:<9} {:<20} {:<6} {:>11} {:>11} {:>6}  {:<9} {}",
                image.image,
                written_at(image.created_ms),
                image.kind.to_string(),
                size(image.raw),
                size(image.stored),
                ratio(image.raw, image.stored),
                image.standing,
                image.attempt
            ));
        }
        add_skipped(&mut rows, &self.skipped);
        if let Some(saving) = &self.saving {
            let state = match saving.known_dead {
                true => "its saver has died (`ckptstream recover` on that node, `gc`)".to_owned(),
                false => format!("under way, at most {} s from its begin", saving.seconds),
            };
            let SavingRow {
                attempt, host, pid, ..
            } = saving;
            rows.add(
                "saving",
                format!("attempt {attempt} by process {pid} on {host}: {state}"),
            );
        }
        if self.finished {
            rows.add(
                "finished",
                "the job ended by itself; its images are only history",
            );
        }
        rows.text
    }
}

impl JobListing {
    /// One job per line.
    pub(super) fn text(&self) -> String {
        self.jobs.iter().map(|job| format!("{job}\n")).collect()
    }
}

impl Inspection {
    /// The manifest for people.
    pub(super) fn text(&self) -> String {
        let mut rows = Rows::default();
        self.add_head(&mut rows);
        let mut extents = self.extents.iter();
        for process in &self.manifest.processes {
            rows.add("process", format!("pid {} {}", process.pid, process.name));
            for device in &process.devices {
                add_device(&mut rows, device);
            }
            for extent in extents.by_ref().take(process.extents.len()) {
                add_extent(&mut rows, extent);
            }
        }
        add_skipped(&mut rows, &self.skipped);
        rows.text
    }

    /// What concerns the image as a whole.
    fn add_head(&self, rows: &mut Rows) {
        let manifest = &self.manifest;
        let (id, job, attempt) = (image_id(self.generation), &manifest.job, &manifest.attempt);
        rows.add("image", format!("{id} of job {job}, attempt {attempt}"));
        rows.add("kind", manifest.kind.to_string());
        let capture = &manifest.capture;
        let driver = capture.driver_version.as_deref().unwrap_or("unknown");
        let api = ApiVersion(capture.driver_api);
        rows.add("driver", format!("{driver} (API {api})"));
        let written = written_at(manifest.created_ms);
        let (tool, host) = (&manifest.tool, &manifest.host);
        rows.add(
            "written",
            format!("{written} UTC by {tool} on {}", host.name),
        );
        rows.add("boot", &host.boot_id);
        rows.add("digest", format!("xxh3-128 {}", self.manifest_digest));
        rows.add("bytes", sizes(manifest.raw_len(), manifest.stored_len()));
    }
}

fn add_device(rows: &mut Rows, device: &DeviceRecord) {
    rows.add(
        "gpu",
        format!(
            "{} {}, chip {}, {}, PCI {}",
            device.uuid,
            device.name,
            device.chip,
            size(device.memory_len),
            device.pci
        ),
    );
}

fn add_extent(rows: &mut Rows, extent: &ExtentSummary) {
    let frames = &extent.frames;
    rows.add(
        "extent",
        format!(
            "{} {}, {} frames ({} zero, {} raw, {} zstd)",
            extent.device,
            sizes(extent.raw, extent.stored),
            frames.all,
            frames.zero,
            frames.raw,
            frames.zstd
        ),
    );
    rows.add("", &extent.key);
}

fn add_skipped(rows: &mut Rows, skipped: &[SkippedRow]) {
    for skip in skipped {
        rows.add("skipped", format!("{}: {}", skip.image, skip.reason));
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::cli::report::RunReport;
    use crate::codec::sample_data::frame_of;
    use crate::codec::{Crc64, Digest, Encoder, Settings};
    use crate::job_log::{ImageEntry, append_image};
    use crate::manifest::{
        Capture, CaptureMode, Host, ObjectRecord, ProcessRecord, digest_of, manifest_key,
    };
    use crate::store::memory::MemoryStore;
    use crate::store::{Key, Store};

    const CHUNK_LEN: u64 = 1 << 20;
    const GPU: &str = "GPU-00000000-0000-4000-8000-000000000001";

    async fn put(store: &MemoryStore, job: &JobName, key: &str, bytes: Vec<u8>) {
        let key = Key::of_job(job, key).expect("a key");
        store
            .put_if_absent(&key, Bytes::from(bytes))
            .await
            .expect("stored");
    }

    /// Commits an image of one zero chunk.
    async fn save(store: &MemoryStore, job: &JobName, attempt: &str) {
        let chunk = vec![0; usize::try_from(CHUNK_LEN).expect("fits")];
        let mut encoder = Encoder::new(Settings::default()).expect("encoder");
        let (mut frame, encoded) = frame_of(&mut encoder, &chunk);
        let mut table = FrameTable::new(CHUNK_LEN, CHUNK_LEN);
        table.push(
            u32::try_from(encoded.len()).expect("fits"),
            encoded.kind,
            encoded.filter,
            encoded.digest,
        );
        frame.extend(table.seek_table());
        let object = ObjectRecord {
            key: format!("data/{attempt}/1/gpu.zst"),
            len: frame.len() as u64,
            crc64: Crc64::of(&frame),
        };
        let table = table.encode();
        let record = FrameTable::record(&table, format!("data/{attempt}/1/gpu.frames.json"));
        put(store, job, &object.key, frame).await;
        put(store, job, &record.key, table).await;
        let manifest = Manifest {
            format: 1,
            features: Vec::new(),
            tool: "ckptstream test".to_owned(),
            job: job.to_string(),
            kind: ImageKind::Gpu,
            attempt: attempt.to_owned(),
            created_ms: 1_790_000_000_000,
            capture: Capture {
                mode: CaptureMode::CustomStorage,
                driver_version: None,
                driver_api: 13040,
            },
            host: Host {
                name: "node-1".to_owned(),
                boot_id: "b".to_owned(),
            },
            tree: None,
            processes: vec![ProcessRecord {
                pid: 42,
                start_time: 1,
                ns_pids: Vec::new(),
                name: "train".to_owned(),
                devices: vec![DeviceRecord {
                    uuid: GPU.to_owned(),
                    name: "Test GPU".to_owned(),
                    chip: "9.0".to_owned(),
                    memory_len: 1 << 30,
                    pci: "00000000:01:00.0".to_owned(),
                    ordinal: 0,
                }],
                extents: vec![ExtentRecord {
                    device: GPU.to_owned(),
                    raw_len: CHUNK_LEN,
                    chunk_len: CHUNK_LEN,
                    object,
                    table: record,
                }],
            }],
        };
        let bytes = manifest.encode();
        let entry = ImageEntry {
            writer: attempt.to_owned(),
            attempt: attempt.to_owned(),
            manifest_key: manifest_key(attempt),
            manifest_len: bytes.len() as u64,
            manifest_digest: digest_of(&bytes),
            kind: manifest.kind,
            raw_len: manifest.raw_len(),
            stored_len: manifest.stored_len(),
            created_ms: manifest.created_ms,
            tool: manifest.tool.clone(),
        };
        put(store, job, &entry.manifest_key, bytes).await;
        append_image(store, job, 1, &entry)
            .await
            .expect("committed");
    }

    fn nonce(number: u8) -> String {
        Digest::of(&[number]).to_string()
    }

    /// The table and the JSON of what a command has to tell.
    fn both(done: Done) -> (String, serde_json::Value) {
        let report = RunReport::done("test", done, 0.0);
        let mut text = Vec::new();
        report
            .print(false, &mut text)
            .expect("a Vec takes everything");
        (
            String::from_utf8(text).expect("text"),
            serde_json::to_value(&report).expect("json"),
        )
    }

    #[tokio::test]
    async fn where_nothing_is_the_proof_is_6() {
        let store = MemoryStore::new();
        let job = JobName::new("train").expect("a name");
        for failure in [
            list(&store, None).await.expect_err("no job"),
            list(&store, Some(&job)).await.expect_err("no image"),
            inspect(&store, &job, ImageRef::Latest)
                .await
                .expect_err("no image"),
        ] {
            assert_eq!(failure.code, ExitCode::NothingToRestore);
        }
    }

    #[tokio::test]
    async fn listings_name_images_and_jobs() {
        let store = MemoryStore::new();
        let job = JobName::new("train").expect("a name");
        save(&store, &job, &nonce(1)).await;
        save(&store, &job, &nonce(2)).await;
        put(&store, &job, "log/00000003.json", b"{}".to_vec()).await;
        let (text, json) = both(list(&store, Some(&job)).await.expect("a listing"));
        assert!(text.contains("00000002  2026-09-21 14:13:20"), "{text}");
        assert!(text.contains("skipped   00000003: "), "{text}");
        assert_eq!(
            (&json["images"][0]["image"], &json["images"][1]["image"]),
            (&"00000002".into(), &"00000001".into())
        );
        assert_eq!(
            (&json["job"], &json["skipped"][0]["generation"]),
            (&"train".into(), &3.into())
        );
        let (text, json) = both(list(&store, None).await.expect("a listing"));
        assert_eq!(
            (text.as_str(), &json["jobs"][0]),
            ("train\n", &"train".into())
        );
    }

    #[tokio::test]
    async fn inspect_shows_the_newest_valid_image_and_what_it_passed_over() {
        let store = MemoryStore::new();
        let job = JobName::new("train").expect("a name");
        save(&store, &job, &nonce(1)).await;
        save(&store, &job, &nonce(2)).await;
        let lost = Key::of_job(&job, &format!("data/{}/1/gpu.zst", nonce(2))).expect("a key");
        store.delete(&lost).await.expect("deleted");
        let inspection = inspect(&store, &job, ImageRef::Latest)
            .await
            .expect("an image");
        let (text, json) = both(Done::Inspection(Box::new(inspection)));
        assert!(
            text.contains("00000001 of job train")
                && text.contains("1 frames (1 zero, 0 raw, 0 zstd)"),
            "{text}"
        );
        assert!(
            text.contains("skipped   00000002: ") && text.contains("gpu.zst"),
            "{text}"
        );
        assert_eq!(
            (&json["image"], &json["manifest"]["processes"][0]["pid"]),
            (&"00000001".into(), &42.into())
        );
        assert_eq!(
            (
                &json["extents"][0]["frames"]["zero"],
                &json["skipped"][0]["generation"]
            ),
            (&1.into(), &2.into())
        );
        let failure = inspect(&store, &job, ImageRef::Generation(2))
            .await
            .expect_err("damaged");
        assert_eq!(failure.code, ExitCode::RestoreRefused);
    }
}
