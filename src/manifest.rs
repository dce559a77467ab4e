//! What an image consists of, as it stands in the store.
//!
//! In (out of the store): bytes that nobody vouches for. Out: a [`Manifest`] and its [`FrameTable`]s in which every number has been checked against every
//! other and against constants, so that whoever reads them may allocate and index by them. The other way, the same types are written. Knows no I/O.
//!
//! ```text
//! <job>/data/<attempt>/attempt.json     AttemptClaim: claims the prefix before the first upload
//! <job>/data/<attempt>/manifest.json    Manifest: processes, devices, extents; per extent the key, length and checksum of its object, and
//!                                       the key, length and digest of its frame table. Ends with a digest of itself
//! <job>/data/<attempt>/….json           FrameTable: per frame its stored length, kind, filter and digest of the raw bytes
//! <job>/data/<attempt>/….zst            the object: the extent's frames in order, then the seek table
//! <job>/data/<attempt>/host-files.json  HostFiles: which raw bytes of the host memory's object are which of CRIU's image files
//! ```
//!
//! Order of checks: length cap, digest, format version, required features, then the fields. `docs/format.md` is the prose twin with every field.
//!
//! Version history: 1 – first version; since 0.2.0 with the features `planes` and `tree`, which older readers refuse.
//!
//! What can fail: reading ([`ManifestError`]): damage, another format, or a rule that does not hold.

mod frame_table;
#[cfg(test)]
mod golden;
mod host_files;

use std::collections::HashSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::codec::frame::{CHUNK_LEN_MAX, CHUNK_LEN_MIN};
use crate::codec::{Crc64, Digest, frame_bound, seek_table};
use crate::driver::GpuUuid;

pub use frame_table::{FRAME_COUNT_MAX, FrameEntry, FrameTable, TABLE_LEN_MAX};
pub use host_files::{HOST_FILES_LEN_MAX, HostFile, HostFiles, Run, WantedFile, is_file_name};

/// Version of the format that this build writes, and the only one so far that it reads.
pub const FORMAT: u32 = 1;

/// Most bytes of a manifest, 1 MiB.
pub const MANIFEST_LEN_MAX: usize = 1 << 20;

/// The feature of files with frames behind a filter: a reader that does not know it would take planes for raw bytes.
const PLANES: &str = "planes";
/// The feature of images of a whole process tree.
const TREE: &str = "tree";
/// Required features that this build knows. A later version names here what an older reader must not ignore.
const KNOWN_FEATURES: &[&str] = &[PLANES, TREE];

/// What is in an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ImageKind {
    /// GPU memory only: goes back into the process that the attempt suspended, or into one that comes up suspended on purpose.
    Gpu,
    /// GPU memory and the whole process tree.
    Whole,
}

impl fmt::Display for ImageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ImageKind::Gpu => "gpu",
            ImageKind::Whole => "whole",
        })
    }
}

/// How the GPU memory was got at. A restore follows it, whatever the config says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CaptureMode {
    /// Through the driver's custom storage: one object per extent.
    CustomStorage,
    /// Through host memory and CRIU's images.
    Staged,
}

impl fmt::Display for CaptureMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CaptureMode::CustomStorage => "custom-storage",
            CaptureMode::Staged => "staged",
        })
    }
}

/// An image's list of contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// Features that a reader must know to read the image rightly: those of all its frame tables ([`features_of`]).
    pub features: Vec<String>,
    /// Who wrote it, for instance `ckptstream 0.1.0`. A label.
    pub tool: String,
    /// The job that the image belongs to.
    pub job: String,
    /// What is in it.
    pub kind: ImageKind,
    /// The attempt's nonce, 32 lower-case hex digits; all objects lie under `data/<attempt>/`.
    pub attempt: String,
    /// When the manifest was written, in milliseconds since 1970 by the writer's clock. A label: nothing is ordered by it.
    pub created_ms: u64,
    /// How the GPU memory was got at.
    pub capture: Capture,
    /// Where the processes ran.
    pub host: Host,
    /// The saved processes that use GPUs, at least one.
    pub processes: Vec<ProcessRecord>,
    /// The tree that they belong to, in an image that is whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree: Option<TreeRecord>,
}

/// A whole process tree, as CRIU dumped it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeRecord {
    /// Pid of its root, in the namespace that CRIU ran in: it comes back with this pid.
    pub root: u32,
    /// Pids of all of it there, the root's among them.
    pub pids: Vec<u32>,
    /// What the root's standard streams (input, output, errors) were: a path, or `pipe:[…]` and the like; empty where it had none. Whoever restores it may put others in their place.
    pub stdio: [String; 3],
    /// Version of the CRIU that dumped it. A label.
    pub criu: String,
    /// All of CRIU's image files, one after the other; its device is [`HOST`].
    pub memory: ExtentRecord,
    /// Which bytes are which file: a [`HostFiles`].
    pub files: TableRecord,
}

/// What stands in the place of a GPU's UUID where the bytes are a tree's host memory.
pub const HOST: &str = "host";

/// Most bytes of a path.
const PATH_LEN_MAX: usize = 4096;

/// Most processes of a tree.
const TREE_PIDS_MAX: usize = 10_000;

/// How the GPU memory was got at, and by which driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capture {
    /// The way.
    pub mode: CaptureMode,
    /// Version of the kernel driver, for instance `580.159`; `null` when the driver does not say.
    #[serde(deserialize_with = "required_option")]
    pub driver_version: Option<String>,
    /// The driver's API version, 1000 × major + 10 × minor: 13040 is 13.4.
    pub driver_api: u32,
}

/// The node that the processes ran on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Host name. A label.
    pub name: String,
    /// `/proc/sys/kernel/random/boot_id`: together with pid and start time it names a process for good.
    pub boot_id: String,
}

/// One saved process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessRecord {
    /// Pid as the saver saw it, above 0.
    pub pid: u32,
    /// When the process started, in clock ticks since boot (field 22 of `/proc/PID/stat`).
    pub start_time: u64,
    /// Its pids from the saver's namespace inward (`NSpid` of `/proc/PID/status`), at most 32; empty when not known.
    pub ns_pids: Vec<u32>,
    /// Command name (`/proc/PID/comm`). A label.
    pub name: String,
    /// Every GPU that the process used, also those that held no data.
    pub devices: Vec<DeviceRecord>,
    /// One per GPU that held data; none is legal.
    pub extents: Vec<ExtentRecord>,
}

/// One GPU of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceRecord {
    /// `GPU-8-4-4-4-12` in lower-case hex digits, as `nvidia-smi -L` prints it.
    pub uuid: String,
    /// Product name. A label.
    pub name: String,
    /// Chip type; a restore needs the same one. Compute capability, for instance `9.0`.
    pub chip: String,
    /// Total memory in bytes, above 0.
    pub memory_len: u64,
    /// PCI id, for instance `00000000:3b:00.0`. A label.
    pub pci: String,
    /// Device ordinal in the saver. A label.
    pub ordinal: u32,
}

/// One contiguous device range that the driver gave, and where its bytes are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtentRecord {
    /// UUID of its GPU, one of the process's devices; of a tree's memory it is [`HOST`].
    pub device: String,
    /// Length in bytes, above 0.
    pub raw_len: u64,
    /// Bytes of raw data per frame, a power of two from 1 MiB to 64 MiB; the last frame may hold less.
    pub chunk_len: u64,
    /// The frames.
    pub object: ObjectRecord,
    /// What each frame must be.
    pub table: TableRecord,
}

/// A data object in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectRecord {
    /// Key relative to the job.
    pub key: String,
    /// Length in bytes: all frames and the seek table.
    pub len: u64,
    /// CRC64NVME of the whole object.
    #[serde(rename = "crc64nvme")]
    pub crc64: Crc64,
}

/// A frame table in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableRecord {
    /// Key relative to the job.
    pub key: String,
    /// Length in bytes.
    pub len: u64,
    /// XXH3-128 of the whole table.
    #[serde(rename = "xxh3_128")]
    pub digest: Digest,
}

/// Bytes from the store are not a manifest, frame table or claim that may be used.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// Longer than the format allows; nothing of it was read.
    #[error("{what} of {len} bytes; at most {max} are allowed")]
    TooLong {
        /// Which file.
        what: &'static str,
        /// Its length in bytes.
        len: u64,
        /// The cap in bytes.
        max: u64,
    },
    /// The file does not end with a digest of itself, so it was cut off or is something else.
    #[error("manifest does not end with a digest of itself; it was cut off or is no manifest")]
    NoDigest,
    /// The bytes are not the ones that were written.
    #[error("{what} has digest {found}; expected {expected}")]
    Digest {
        /// Which file.
        what: &'static str,
        /// Digest of the bytes.
        found: Digest,
        /// Digest that was promised.
        expected: Digest,
    },
    /// Not the JSON that the format describes.
    #[error("{what} is not well formed")]
    Malformed {
        /// Which file.
        what: &'static str,
        /// Where and why.
        source: serde_json::Error,
    },
    /// Written by a newer tool.
    #[error("{what} has format {found}; this version of ckptstream reads format {FORMAT}")]
    Format {
        /// Which file.
        what: &'static str,
        /// Its format version.
        found: u32,
    },
    /// The image cannot be read rightly without knowing this feature.
    #[error("{what} needs the feature {name:?}, which this version of ckptstream does not know")]
    UnknownFeature {
        /// Which file.
        what: &'static str,
        /// The feature's name.
        name: String,
    },
    /// A field breaks a rule of the format.
    #[error("{field} is {value}; {rule}")]
    Rule {
        /// Path of the field, for instance `processes[0].extents[1].raw_len`.
        field: String,
        /// What it holds.
        value: String,
        /// What must hold.
        rule: &'static str,
    },
}

const MANIFEST: &str = "manifest";

/// The last member, up to its value. Everything before its first quote is what the digest covers. The same in every format version.
const TRAILER_START: &[u8] = b"\"self_xxh3_128\": \"";
const TRAILER_END: &[u8] = b"\"\n}\n";

/// Digest of a whole file: what the log entry holds of the manifest, and the manifest of a table.
pub fn digest_of(bytes: &[u8]) -> Digest {
    Digest::of(bytes)
}

/// What a reader must know to read an image of this kind with these tables rightly.
pub fn features_of<'a>(
    kind: ImageKind,
    tables: impl IntoIterator<Item = &'a FrameTable>,
) -> Vec<String> {
    let has_planes = tables.into_iter().any(FrameTable::has_planes);
    let planes = has_planes.then_some(PLANES);
    let tree = (kind == ImageKind::Whole).then_some(TREE);
    planes.into_iter().chain(tree).map(str::to_owned).collect()
}

/// Key, relative to the job, of an attempt's manifest.
pub fn manifest_key(attempt: &str) -> String {
    format!("data/{attempt}/manifest.json")
}

/// Key, relative to the job, of the manifest of an attempt that was spilled: the store may have the other one already, which names other objects.
pub fn spilled_manifest_key(attempt: &str) -> String {
    format!("data/{attempt}/manifest.spilled.json")
}

/// Key, relative to the job, of the manifest of what a whole tree's GPUs held, as long as that alone is sealed.
pub fn sealed_manifest_key(attempt: &str) -> String {
    format!("data/{attempt}/manifest.sealed.json")
}

/// Key, relative to the job, of the list of a tree's image files.
pub fn host_files_key(attempt: &str) -> String {
    format!("data/{attempt}/host-files.json")
}

/// Key, relative to the job, of an attempt's claim.
pub fn claim_key(attempt: &str) -> String {
    format!("data/{attempt}/attempt.json")
}

/// Key, relative to the job, of what an attempt tries the store's creates with, time after time (from 1).
pub fn contest_key(attempt: &str, round: u32) -> String {
    match round {
        0 | 1 => format!("data/{attempt}/contest.json"),
        round => format!("data/{attempt}/contest-{round}.json"),
    }
}

/// Key, relative to the job, of the mark that every byte of an attempt's image was read back and is right.
pub fn read_back_key(attempt: &str) -> String {
    format!("data/{attempt}/read-back.json")
}

impl Manifest {
    /// The bytes to store: indented JSON that ends with the digest of itself.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self)
            .expect("text, numbers and lists are always representable as JSON");
        bytes.truncate(bytes.len() - b"\n}".len());
        bytes.extend_from_slice(b",\n  ");
        let digest = Digest::of(&bytes).to_string();
        bytes.extend_from_slice(TRAILER_START);
        bytes.extend_from_slice(digest.as_bytes());
        bytes.extend_from_slice(TRAILER_END);
        bytes
    }

    /// Reads the bytes of `data/<attempt>/manifest.json` of this job. Nothing is parsed before the digest of the bytes is right.
    ///
    /// # Errors
    /// When the bytes are too long, damaged, of another format, need an unknown feature, or break a rule of the format, belonging to another job or
    /// attempt among them.
    pub fn decode_and_verify(
        bytes: &[u8],
        job: &str,
        attempt: &str,
    ) -> Result<Manifest, ManifestError> {
        check_len(MANIFEST, bytes.len(), MANIFEST_LEN_MAX)?;
        check_own_digest(bytes)?;
        check_version(MANIFEST, bytes)?;
        let manifest: Manifest = parse(MANIFEST, bytes)?;
        manifest.verify(job, attempt)?;
        Ok(manifest)
    }

    /// Raw bytes of all extents.
    pub fn raw_len(&self) -> u64 {
        self.extents().map(|extent| extent.raw_len).sum()
    }

    /// Stored bytes of all data objects.
    pub fn stored_len(&self) -> u64 {
        self.extents().map(|extent| extent.object.len).sum()
    }

    /// Everything that has an object: the extents, process by process, then the host memory of a tree.
    pub fn extents(&self) -> impl Iterator<Item = &ExtentRecord> {
        let host = self.tree.as_ref().map(|tree| &tree.memory);
        self.gpu_extents().chain(host)
    }

    /// Every extent of a GPU, process by process.
    pub fn gpu_extents(&self) -> impl Iterator<Item = &ExtentRecord> {
        self.processes.iter().flat_map(|process| &process.extents)
    }

    fn verify(&self, job: &str, attempt: &str) -> Result<(), ManifestError> {
        let expect = |field: &str, found: &str, expected: &str, rule| {
            ensure(found == expected, || field.to_owned(), &found, rule)
        };
        expect("job", &self.job, job, "it must be the job it was read from")?;
        expect(
            "attempt",
            &self.attempt,
            attempt,
            "it must be the attempt it was read from",
        )?;
        ensure(
            is_nonce(&self.attempt),
            || "attempt".to_owned(),
            &self.attempt,
            "it must be 32 lower-case hex digits",
        )?;
        let labels = [
            ("tool", self.tool.as_str()),
            (
                "capture.driver_version",
                self.capture.driver_version.as_deref().unwrap_or("none"),
            ),
            ("host.name", &self.host.name),
            ("host.boot_id", &self.host.boot_id),
        ];
        for (field, text) in labels {
            check_label(|| field.to_owned(), text)?;
        }
        ensure(
            !self.processes.is_empty(),
            || "processes".to_owned(),
            &"empty",
            "an image holds at least one process",
        )?;
        self.verify_kind()?;
        self.verify_processes(attempt)
    }

    /// A whole image has a tree, and no other has; memory that went through the tree's is in no extent of a GPU.
    fn verify_kind(&self) -> Result<(), ManifestError> {
        let is_whole = self.kind == ImageKind::Whole;
        let has_feature = self.features.iter().any(|name| name == TREE);
        ensure(
            self.tree.is_some() == is_whole && has_feature == is_whole,
            || "kind".to_owned(),
            &self.kind,
            "a whole image has a tree and needs the feature \"tree\"; no other has either",
        )?;
        let is_staged = self.capture.mode == CaptureMode::Staged;
        ensure(
            !is_staged || is_whole && self.gpu_extents().next().is_none(),
            || "capture.mode".to_owned(),
            &self.capture.mode,
            "a staged image is whole, and has no extents of GPUs",
        )?;
        let Some(tree) = &self.tree else {
            return Ok(());
        };
        ensure(
            (1..=TREE_PIDS_MAX).contains(&tree.pids.len())
                && tree.pids.contains(&tree.root)
                && tree.pids.iter().all(|pid| *pid > 0),
            || "tree.pids".to_owned(),
            &format_args!("{} pids, root {}", tree.pids.len(), tree.root),
            "it must be 1 to 10,000 pids above 0, the root's among them",
        )?;
        for (index, stream) in tree.stdio.iter().enumerate() {
            ensure(
                stream.len() <= PATH_LEN_MAX && !stream.chars().any(char::is_control),
                || format!("tree.stdio[{index}]"),
                &Quoted(stream),
                "it must be at most 4096 bytes without control characters",
            )?;
        }
        check_label(|| "tree.criu".to_owned(), &tree.criu)?;
        ensure(
            tree.memory.device == HOST,
            || "tree.memory.device".to_owned(),
            &Quoted(&tree.memory.device),
            "it must be \"host\"",
        )?;
        ensure(
            tree.files.len <= HOST_FILES_LEN_MAX as u64,
            || "tree.files.len".to_owned(),
            &tree.files.len,
            "the list of image files is at most 16 MiB long",
        )?;
        ensure(
            tree.files.key == host_files_key(&self.attempt),
            || "tree.files.key".to_owned(),
            &Quoted(&tree.files.key),
            "it must be the attempt's host-files.json",
        )
    }

    /// Each process and extent by itself, then what only all of them together can break.
    fn verify_processes(&self, attempt: &str) -> Result<(), ManifestError> {
        let mut pids = HashSet::new();
        let mut keys = HashSet::from([
            manifest_key(attempt),
            spilled_manifest_key(attempt),
            sealed_manifest_key(attempt),
            claim_key(attempt),
            host_files_key(attempt),
        ]);
        let mut raw_len = 0u64;
        let mut stored_len = 0u64;
        for (index, process) in self.processes.iter().enumerate() {
            let field = |name: &str| format!("processes[{index}].{name}");
            process.verify(&field)?;
            ensure(
                pids.insert(process.pid),
                || field("pid"),
                &process.pid,
                "each process stands in the list once",
            )?;
        }
        let places = self.processes.iter().enumerate().flat_map(|(process, of)| {
            let places = of.extents.iter().enumerate();
            places.map(move |(index, extent)| {
                (format!("processes[{process}].extents[{index}]"), extent)
            })
        });
        let host = self
            .tree
            .iter()
            .map(|tree| ("tree.memory".to_owned(), &tree.memory));
        for (place, extent) in places.chain(host) {
            let field = |name: &str| format!("{place}.{name}");
            extent.verify(attempt, &field)?;
            for (name, key) in [
                ("object.key", &extent.object.key),
                ("table.key", &extent.table.key),
            ] {
                ensure(
                    keys.insert(key.clone()),
                    || field(name),
                    key,
                    "each key stands in the manifest once",
                )?;
            }
            let sums = raw_len
                .checked_add(extent.raw_len)
                .zip(stored_len.checked_add(extent.object.len));
            (raw_len, stored_len) = sums.ok_or_else(|| {
                rule(
                    field("raw_len"),
                    &extent.raw_len,
                    "an image's length must fit 64 bits",
                )
            })?;
        }
        Ok(())
    }
}

impl ProcessRecord {
    fn verify(&self, field: &dyn Fn(&str) -> String) -> Result<(), ManifestError> {
        /// Linux nests pid namespaces at most this deep.
        const NAMESPACE_DEPTH_MAX: usize = 32;

        ensure(self.pid > 0, || field("pid"), &self.pid, "a pid is above 0")?;
        ensure(
            self.ns_pids.len() <= NAMESPACE_DEPTH_MAX && self.ns_pids.iter().all(|pid| *pid > 0),
            || field("ns_pids"),
            &format_args!("{:?}", self.ns_pids),
            "it must be at most 32 pids above 0",
        )?;
        check_label(|| field("name"), &self.name)?;

        let mut uuids = HashSet::new();
        for (index, device) in self.devices.iter().enumerate() {
            let field = |name: &str| field(&format!("devices[{index}].{name}"));
            let is_canonical = device
                .uuid
                .parse::<GpuUuid>()
                .is_ok_and(|uuid| uuid.to_string() == device.uuid);
            ensure(
                is_canonical,
                || field("uuid"),
                &Quoted(&device.uuid),
                "it must be a UUID like GPU-8-4-4-4-12 lower-case hex digits",
            )?;
            ensure(
                uuids.insert(&device.uuid),
                || field("uuid"),
                &device.uuid,
                "each GPU stands in a process's list once",
            )?;
            ensure(
                device.memory_len > 0,
                || field("memory_len"),
                &device.memory_len,
                "a GPU has memory",
            )?;
            for (name, text) in [
                ("name", &device.name),
                ("chip", &device.chip),
                ("pci", &device.pci),
            ] {
                check_label(|| field(name), text)?;
            }
        }
        for (index, extent) in self.extents.iter().enumerate() {
            // Taking it out also refuses a second extent of the same GPU.
            ensure(
                uuids.remove(&extent.device),
                || field(&format!("extents[{index}].device")),
                &Quoted(&extent.device),
                "it must be one of the process's devices, and each has one extent at most",
            )?;
        }
        Ok(())
    }
}

impl ExtentRecord {
    /// Frames of this extent, once it is verified.
    pub fn frame_count(&self) -> u64 {
        self.raw_len.div_ceil(self.chunk_len)
    }

    fn verify(&self, attempt: &str, field: &dyn Fn(&str) -> String) -> Result<(), ManifestError> {
        ensure(
            self.raw_len > 0,
            || field("raw_len"),
            &self.raw_len,
            "an extent holds data",
        )?;
        ensure(
            self.chunk_len.is_power_of_two()
                && (CHUNK_LEN_MIN..=CHUNK_LEN_MAX).contains(&self.chunk_len),
            || field("chunk_len"),
            &self.chunk_len,
            "it must be a power of two from 1 MiB to 64 MiB",
        )?;
        ensure(
            self.frame_count() <= FRAME_COUNT_MAX,
            || field("raw_len"),
            &self.raw_len,
            "a frame table cannot list so many frames",
        )?;
        ensure(
            self.object.len <= object_len_max(self.raw_len, self.chunk_len),
            || field("object.len"),
            &self.object.len,
            "raw frames and the seek table would be shorter",
        )?;
        ensure(
            self.table.len <= TABLE_LEN_MAX as u64,
            || field("table.len"),
            &self.table.len,
            "a frame table is at most 16 MiB long",
        )?;
        for (name, key) in [
            ("object.key", &self.object.key),
            ("table.key", &self.table.key),
        ] {
            ensure(
                is_key_of(attempt, key),
                || field(name),
                &Quoted(key),
                "it must lie under data/<attempt>/, be at most 512 bytes of [A-Za-z0-9._-] and /, and have no empty or dot segments",
            )?;
        }
        Ok(())
    }
}

/// Most bytes of an object that holds `raw_len` bytes in frames of `chunk_len`: all frames raw, and the seek table. Saturates at the top.
pub fn object_len_max(raw_len: u64, chunk_len: u64) -> u64 {
    let frame_max = |len: u64| usize::try_from(len).map_or(u64::MAX, |len| frame_bound(len) as u64);
    let whole_count = raw_len / chunk_len;
    let rest = raw_len % chunk_len;
    let rest_max = if rest == 0 { 0 } else { frame_max(rest) };
    whole_count
        .saturating_mul(frame_max(chunk_len))
        .saturating_add(rest_max)
        .saturating_add(seek_table::encoded_len(raw_len.div_ceil(chunk_len)))
}

/// Says who writes under a prefix, before the first upload under it. Written for people: no program reads it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AttemptClaim {
    /// [`FORMAT`].
    pub format: u32,
    /// The job.
    pub job: String,
    /// The attempt's nonce, 32 lower-case hex digits.
    pub attempt: String,
    /// Who writes, for instance `ckptstream 0.1.0`. A label.
    pub tool: String,
    /// Host name of the writer. A label.
    pub host: String,
    /// Pid of the writer. A label.
    pub pid: u32,
    /// When, in milliseconds since 1970 by the writer's clock. A label.
    pub created_ms: u64,
}

impl AttemptClaim {
    /// The bytes to store.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self)
            .expect("text and numbers are always representable as JSON");
        bytes.push(b'\n');
        bytes
    }
}

fn check_len(what: &'static str, len: usize, max: usize) -> Result<(), ManifestError> {
    if len > max {
        return Err(ManifestError::TooLong {
            what,
            len: len as u64,
            max: max as u64,
        });
    }
    Ok(())
}

/// Compares the digest at the end with the bytes before its member. The place is exact to the byte, so that no byte of the file is without a check.
fn check_own_digest(bytes: &[u8]) -> Result<(), ManifestError> {
    let stated = bytes
        .strip_suffix(TRAILER_END)
        .and_then(|rest| rest.split_last_chunk::<{ Digest::TEXT_LEN }>())
        .and_then(|(rest, digits)| Some((rest.strip_suffix(TRAILER_START)?, digits)))
        .and_then(|(covered, digits)| {
            let digest: Digest = std::str::from_utf8(digits).ok()?.parse().ok()?;
            Some((covered, digest))
        });
    let (covered, expected) = stated.ok_or(ManifestError::NoDigest)?;
    let found = Digest::of(covered);
    if found != expected {
        return Err(ManifestError::Digest {
            what: MANIFEST,
            found,
            expected,
        });
    }
    Ok(())
}

/// Looks at version and features alone, which it returns: in another version the other fields may be other ones.
fn check_version(what: &'static str, bytes: &[u8]) -> Result<Vec<String>, ManifestError> {
    #[derive(Deserialize)]
    struct Version {
        format: u32,
    }
    #[derive(Deserialize)]
    struct Features {
        features: Vec<String>,
    }

    let Version { format } = parse(what, bytes)?;
    if format != FORMAT {
        return Err(ManifestError::Format {
            what,
            found: format,
        });
    }
    let Features { features } = parse(what, bytes)?;
    let unknown = features
        .iter()
        .find(|name| !KNOWN_FEATURES.contains(&name.as_str()));
    match unknown.cloned() {
        Some(name) => Err(ManifestError::UnknownFeature { what, name }),
        None => Ok(features),
    }
}

fn parse<'a, T: Deserialize<'a>>(what: &'static str, bytes: &'a [u8]) -> Result<T, ManifestError> {
    serde_json::from_slice(bytes).map_err(|source| ManifestError::Malformed { what, source })
}

/// An `Option` that must stand in the file, as `null` if there is none: an absent field must not quietly mean something.
fn required_option<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de>,
{
    Option::deserialize(deserializer)
}

/// Text from a file, printed so that it cannot play tricks on a terminal.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Long enough for every legal text, short enough for a log line.
        const CHARS_MAX: usize = 300;
        let shown: String = self.0.chars().take(CHARS_MAX).collect();
        let more = if shown.len() < self.0.len() {
            "…"
        } else {
            ""
        };
        write!(f, "{shown:?}{more}")
    }
}

fn rule(field: String, value: &dyn fmt::Display, rule: &'static str) -> ManifestError {
    ManifestError::Rule {
        field,
        value: value.to_string(),
        rule,
    }
}

fn ensure(
    holds: bool,
    field: impl FnOnce() -> String,
    value: &dyn fmt::Display,
    rule_text: &'static str,
) -> Result<(), ManifestError> {
    if holds {
        Ok(())
    } else {
        Err(rule(field(), value, rule_text))
    }
}

/// Texts for humans: bounded, and without characters that would confuse a terminal.
fn check_label(field: impl FnOnce() -> String, text: &str) -> Result<(), ManifestError> {
    const LABEL_LEN_MAX: usize = 256;
    ensure(
        text.len() <= LABEL_LEN_MAX && !text.chars().any(char::is_control),
        field,
        &Quoted(text),
        "it must be at most 256 bytes without control characters",
    )
}

/// Whether it is 32 lower-case hex digits, as every attempt's nonce is. A [`Digest`]'s text has the same form.
pub(crate) fn is_nonce(text: &str) -> bool {
    text.parse::<Digest>().is_ok()
}

fn is_key_of(attempt: &str, key: &str) -> bool {
    const KEY_LEN_MAX: usize = 512;
    let is_segment = |segment: &str| {
        !segment.is_empty()
            && !matches!(segment, "." | "..")
            && segment
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'))
    };
    let relative = key
        .strip_prefix("data/")
        .and_then(|rest| rest.strip_prefix(attempt))
        .and_then(|rest| rest.strip_prefix('/'));
    key.len() <= KEY_LEN_MAX && relative.is_some_and(|rest| rest.split('/').all(is_segment))
}

#[cfg(test)]
mod tests;
