//! What the user asked for, resolved.
//!
//! In: one TOML file ([`RawConfig`]), the flags that override it ([`Overrides`]), and what this machine has ([`Environment`]). Out: a [`Config`]
//! with every value checked and nothing left to interpret. What can fail: an unknown key, a value out of range, two explicit values that
//! exclude each other; each error names the key or flag. A default that does not fit an explicit value gives way with a warning.

mod bucket;
mod environment;
mod host;
mod kind;
mod raw;
mod supervise;
mod value;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::codec::{FilterChoice, Level, Settings};
use crate::driver::GpuUuid;
use crate::journal;
use crate::plan::{PART_COUNT_MAX, PartLimits};

pub use bucket::{BucketConfig, Sse};
pub use environment::Environment;
pub use host::{HostConfig, HostSave, TcpPolicy};
pub use kind::StoreKind;
pub use raw::{
    CompressionMode, KEYS, PathStyle, RawCompression, RawConfig, RawDriver, RawHost, RawJob,
    RawMetrics, RawPipeline, RawPreempt, RawRestore, RawRetention, RawSpill, RawStore,
};
pub(crate) use supervise::NOTICE_SIGNALS;
pub use supervise::{Contexts, DeadlinePolicy, MetricsConfig, PreemptConfig, RunConfig, Source};

use value::{GIB, MIB, Setting, TIB};

/// Everything a command needs to know, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The job that images belong to.
    pub job: JobName,
    /// Where images are kept.
    pub store: StoreConfig,
    /// Memory and threads of the pipeline.
    pub pipeline: PipelineConfig,
    /// How chunks are compressed.
    pub compression: CompressionConfig,
    /// How the CUDA driver is asked.
    pub driver: DriverConfig,
    /// What is saved beside the memory of GPUs.
    pub host: HostConfig,
    /// How images are read back.
    pub restore: RestoreConfig,
    /// What becomes of a save that the store does not take in time.
    pub spill: SpillConfig,
    /// What `gc` and `prune` leave alone.
    pub retention: RetentionConfig,
    /// How a supervised job is started, restored and ended.
    pub run: RunConfig,
    /// Who says that the node goes away, and what is done then.
    pub preempt: PreemptConfig,
    /// Where `run` and `watch` tell how they do.
    pub metrics: MetricsConfig,
    /// Where this node keeps what is under way; `None` is the default of [`Config::state_dir`].
    pub state_dir: Option<PathBuf>,
    /// Time from now until the node is gone, when known (`--deadline`).
    pub deadline: Option<Duration>,
}

/// Name of a job: 1 to 128 of `[A-Za-z0-9._-]`, not starting with a dot.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobName(String);

/// Where a store is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StorePlace {
    /// `s3://bucket/prefix`
    Bucket {
        /// Bucket name.
        bucket: String,
        /// Prefix inside the bucket, without leading or trailing `/`; may be empty.
        prefix: String,
    },
    /// `file:///directory`
    Directory(PathBuf),
}

/// `[store]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreConfig {
    /// Where it is. All that follows but sizes, counts and `retry_timeout` is for buckets.
    pub place: StorePlace,
    /// Number of this start of the job, 0 to [`EPOCH_MAX`](crate::store::epochs::EPOCH_MAX): it orders the job's writers where the store has no conditional creates (`job.epoch`).
    pub epoch: Option<u64>,
    /// Endpoint URL of an S3-compatible store; `None` is AWS.
    pub endpoint: Option<String>,
    /// Region; `None` asks the SDK's chain.
    pub region: Option<String>,
    /// Which store it is, as said or as its endpoint tells.
    pub kind: StoreKind,
    /// Bucket in the path (`true`) or in the host name.
    pub path_style: bool,
    /// Part size in bytes, 5 MiB to 5 GiB; `None` derives it from the GPUs' memory.
    pub part_size: Option<u64>,
    /// What the store takes of one upload.
    pub limits: PartLimits,
    /// Most requests in flight at once, 1 to 256.
    pub parallelism: u32,
    /// What goes with every part.
    pub checksum: PartChecksum,
    /// Sign the bodies too (SHA-256 over every byte), for stores and policies that demand it; `None` when they do.
    pub sign_payload: Option<bool>,
    /// How long after its first failure an operation is tried again.
    pub retry_timeout: Duration,
    /// Limit for making a connection.
    pub connect_timeout: Duration,
    /// Limit for one attempt of a small request (everything but parts and ranges).
    pub request_timeout: Duration,
    /// A part or range that moves no byte for so long is given up and tried again.
    pub stall_timeout: Duration,
    /// A connection that nobody has used for so long is not used again.
    pub idle_timeout: Duration,
    /// What requests and objects carry besides, and the way to the bucket.
    pub bucket: BucketConfig,
}

/// The checksum that goes with every part as a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartChecksum {
    /// The first of those below that the store does not refuse.
    Auto,
    /// CRC64NVME, full object.
    Crc64Nvme,
    /// CRC32C, of parts or of the full object, as the store has it.
    Crc32c,
    /// CRC32, likewise.
    Crc32,
    /// None, for stores that refuse it; our own digests decide in any case.
    None,
}

/// `[pipeline]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipelineConfig {
    /// Chunk length in bytes, a power of two from 1 MiB to 64 MiB; `None` derives it from the GPUs' memory.
    pub chunk_size: Option<u64>,
    /// Bytes of host memory for ring, frames, parts and tables together.
    pub memory_budget: u64,
    /// `true` when the user set `memory_budget` (a derived one may be raised to what the plan needs, a set one may not).
    pub memory_budget_is_set: bool,
    /// Threads that compress or decompress, 1 to 1024.
    pub threads: u32,
}

/// `[compression]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompressionConfig {
    /// What encoders are to do.
    pub settings: Settings,
}

/// How GPU memory is got at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DriverMode {
    /// The first that works.
    #[default]
    Auto,
    /// The driver maps it into our process.
    CustomStorage,
    /// The driver copies it into the target's own host memory, and CRIU has it from there.
    Staged,
}

/// `[driver]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverConfig {
    /// How GPU memory is got at.
    pub mode: DriverMode,
    /// How long the driver may take to lock the target; 1 ms to 1 h (0 would mean for ever to the driver).
    pub lock_timeout: Duration,
    /// Stored GPU to present GPU, as the user wants it (`--gpu-map`), in order of the stored UUID. No two share a present GPU.
    pub gpu_map: Vec<(GpuUuid, GpuUuid)>,
}

/// `[restore]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestoreConfig {
    /// When chunks are verified; `None` picks by kind of image (PROTOCOL section 3).
    pub verify: Option<Verify>,
}

/// When a restore verifies chunks. No chunk reaches a GPU unverified in either.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verify {
    /// Every chunk of the image is read and digested before the driver is asked.
    All,
    /// Every chunk is verified as it arrives.
    Stream,
}

/// `[spill]`
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SpillConfig {
    /// Where a save goes that the store does not take in time; `None` is nowhere.
    pub place: Option<SpillPlace>,
    /// Which saves go there.
    pub when: SpillWhen,
    /// What becomes of the target when the store fails after BEGIN; `None` picks by what is asked for.
    pub on_failure: Option<OnFailure>,
}

/// A directory that takes saves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpillPlace {
    /// Directory on this node.
    pub path: PathBuf,
    /// What the directory outlives.
    pub survives: Survives,
}

/// Which saves go to the spill.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SpillWhen {
    /// Those that the store does not take in time.
    #[default]
    Failure,
    /// All of them: the GPUs are released as soon as the spill has the save, and it is uploaded afterwards.
    Always,
}

/// What becomes of the target when the store fails after BEGIN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// The save is sealed in the spill, and the GPUs are released.
    Spill,
    /// The save is sealed in the spill, and the target gets its memory back from there and runs on.
    GiveBack,
    /// The target is held as it is, and the store tried, until the deadline or for ever.
    Hold,
    /// The target is lost once `store.retry_timeout` is over.
    Abandon,
}

/// `[retention]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetentionConfig {
    /// Valid images that `prune` keeps at least, 2 or more.
    pub keep: u32,
    /// Time between an image's `dropped` entry and the end of its data.
    pub grace: Duration,
    /// Age from which an attempt without an image counts as given up.
    pub older_than: Duration,
}

/// What a spill outlives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Survives {
    /// This process, but not the node.
    Process,
    /// The node: a network file system, a disk that is attached elsewhere.
    Node,
}

/// Flags that override the file, as typed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Overrides {
    /// `--job`
    pub job: Option<String>,
    /// `--epoch`
    pub epoch: Option<i64>,
    /// `--store`
    pub store: Option<String>,
    /// `--endpoint`
    pub endpoint: Option<String>,
    /// `--region`
    pub region: Option<String>,
    /// `--deadline`
    pub deadline: Option<String>,
    /// `--gpu-map`, each `OLD=NEW`
    pub gpu_map: Vec<String>,
    /// `--keep`
    pub keep: Option<i64>,
    /// `--grace`
    pub grace: Option<String>,
    /// `--older-than`
    pub older_than: Option<String>,
}

/// Why the configuration is not usable. Exit 2 in every case; nothing was touched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {} (--config, CKPTSTREAM_CONFIG)", path.display())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The file is too long to be a configuration.
    #[error("the configuration file {} is longer than {len_max} bytes", path.display())]
    TooLong {
        /// Which file.
        path: PathBuf,
        /// Limit in bytes.
        len_max: u64,
    },
    /// The file was read but says something wrong.
    #[error("the configuration file {} is not valid", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: Box<ConfigError>,
    },
    /// Not TOML.
    #[error("line {line}: not valid TOML: {message}")]
    Syntax {
        /// From 1.
        line: usize,
        /// What the parser said.
        message: String,
    },
    /// A key that does not exist.
    #[error("line {line}: unknown key `{key}`; the nearest known one is `{nearest}`")]
    UnknownKey {
        /// As written, with its table.
        key: String,
        /// From 1.
        line: usize,
        /// The known key or table with the smallest edit distance.
        nearest: String,
    },
    /// Encryption was asked for.
    #[error(
        "line {line}: `{key}`: encryption by ckptstream is not supported, and nothing is stored as if it were; remove the key, and use the bucket's \
         own encryption where that is enough"
    )]
    Encryption {
        /// As written, with its table.
        key: String,
        /// From 1.
        line: usize,
    },
    /// Credentials stand in the file.
    #[error(
        "line {line}: `{key}`: credentials do not belong into the file; they come from the SDK's chain: AWS_ACCESS_KEY_ID and \
         AWS_SECRET_ACCESS_KEY, the shared profile (AWS_PROFILE), a web identity token, or the instance's role"
    )]
    Credential {
        /// As written, with its table.
        key: String,
        /// From 1.
        line: usize,
    },
    /// A value of another type than the key has.
    #[error("line {line}: `{key}`: {message}")]
    WrongType {
        /// With its table.
        key: String,
        /// From 1.
        line: usize,
        /// What was expected.
        message: String,
    },
    /// A value that the key or flag cannot have.
    #[error("{name} = {value:?}: {expected}")]
    Invalid {
        /// The key or flag.
        name: String,
        /// As written.
        value: String,
        /// What it may be.
        expected: String,
    },
    /// A value that must be given.
    #[error("{what}; set {key} in the configuration file or {flag}")]
    Missing {
        /// What is not known.
        what: &'static str,
        /// The key that would say it.
        key: &'static str,
        /// The flag that would say it.
        flag: &'static str,
    },
    /// Two explicit values that exclude each other.
    #[error("{first} and {second} exclude each other: {why}")]
    Conflict {
        /// The one, with its value.
        first: String,
        /// The other, with its value.
        second: String,
        /// Why they cannot both hold.
        why: &'static str,
    },
}

/// Not a job name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a job name: 1 to 128 of A-Z a-z 0-9 . _ -, not starting with a dot")]
pub struct BadJobName(pub String);

impl JobName {
    /// A checked name.
    ///
    /// # Errors
    /// Anything that is not 1 to 128 of `[A-Za-z0-9._-]`, or starts with a dot.
    pub fn new(name: &str) -> Result<Self, BadJobName> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        if (1..=128).contains(&name.len()) && name.bytes().all(allowed) && !name.starts_with('.') {
            Ok(Self(name.to_owned()))
        } else {
            Err(BadJobName(name.to_owned()))
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The job that the flag or the file names, if any does.
    ///
    /// # Errors
    /// A name that is none.
    pub fn resolve(overrides: &Overrides, raw: &RawConfig) -> Result<Option<Self>, ConfigError> {
        let Some(name) = Setting::text(
            "--job",
            overrides.job.as_deref(),
            "job.name",
            raw.job.name.as_deref(),
        ) else {
            return Ok(None);
        };
        let job = Self::new(&name.value).map_err(|_bad| {
            name.invalid("1 to 128 of A-Z a-z 0-9 . _ -, not starting with a dot")
        })?;
        Ok(Some(job))
    }
}

impl fmt::Display for JobName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Config {
    /// Checks everything and leaves nothing open. Flags win over the file, the file over the defaults.
    ///
    /// # Errors
    /// [`ConfigError`], naming the key or flag.
    pub fn resolve(
        overrides: &Overrides,
        raw: &RawConfig,
        environment: &Environment,
    ) -> Result<Self, ConfigError> {
        let store = StoreConfig::resolve(overrides, raw)?;
        let job = JobName::resolve(overrides, raw)?.ok_or(ConfigError::Missing {
            what: "no job is named",
            key: "job.name",
            flag: "--job",
        })?;
        let pipeline = PipelineConfig::resolve(&raw.pipeline, environment)?;
        part_fits_budget(raw, &store, &pipeline)?;
        let deadline = Setting::text("--deadline", overrides.deadline.as_deref(), "", None)
            .map(|text| text.time(Duration::from_secs(1), Duration::from_secs(7 * 24 * 3600)))
            .transpose()?;
        let state_dir = Setting::file("job.state_dir", raw.job.state_dir.as_deref())
            .map(|dir| dir.directory(&dir.value))
            .transpose()?;
        Ok(Self {
            job,
            store,
            pipeline,
            compression: CompressionConfig::resolve(&raw.compression)?,
            driver: DriverConfig::resolve(overrides, &raw.driver)?,
            host: HostConfig::resolve(&raw.host)?,
            restore: RestoreConfig::resolve(&raw.restore)?,
            spill: SpillConfig::resolve(&raw.spill)?,
            retention: RetentionConfig::resolve(overrides, &raw.retention)?,
            run: RunConfig::resolve(&raw.job)?,
            preempt: PreemptConfig::resolve(&raw.preempt, raw.spill.path.is_some())?,
            metrics: MetricsConfig::resolve(&raw.metrics)?,
            state_dir,
            deadline,
        })
    }

    /// Where `run` and `watch` of this job listen (`preempt.socket`).
    pub fn socket(&self) -> PathBuf {
        match &self.preempt.socket {
            Some(path) => path.clone(),
            None => self.state_dir().join(format!("{}.sock", self.job)),
        }
    }

    /// The same for commands that need nothing else: the flag, else the file.
    ///
    /// # Errors
    /// [`ConfigError`], naming the key or flag.
    pub fn resolve_socket(
        flag: Option<&str>,
        overrides: &Overrides,
        raw: &RawConfig,
    ) -> Result<PathBuf, ConfigError> {
        let given = Setting::text(
            "--socket",
            flag,
            "preempt.socket",
            raw.preempt.socket.as_deref(),
        );
        if let Some(path) = given {
            return path.file_path();
        }
        let job = JobName::resolve(overrides, raw)?.ok_or(ConfigError::Missing {
            what: "no job is named",
            key: "job.name",
            flag: "--job, or --socket",
        })?;
        let dir = Setting::file("job.state_dir", raw.job.state_dir.as_deref());
        let dir = dir.map(|dir| dir.directory(&dir.value)).transpose()?;
        let dir = dir.unwrap_or_else(journal::default_dir);
        Ok(dir.join(format!("{job}.sock")))
    }

    /// Where this node keeps what is under way (`job.state_dir`).
    pub fn state_dir(&self) -> PathBuf {
        self.state_dir.clone().unwrap_or_else(journal::default_dir)
    }
}

/// The plan needs one part per GPU and one more; said here already where it cannot hold for any GPU.
fn part_fits_budget(
    raw: &RawConfig,
    store: &StoreConfig,
    pipeline: &PipelineConfig,
) -> Result<(), ConfigError> {
    match (
        store.part_size,
        &raw.store.part_size,
        &raw.pipeline.memory_budget,
    ) {
        (Some(part_len), Some(part_size), Some(memory_budget))
            if part_len.saturating_mul(2) > pipeline.memory_budget =>
        {
            Err(ConfigError::Conflict {
                first: format!("store.part_size = {part_size:?}"),
                second: format!("pipeline.memory_budget = {memory_budget:?}"),
                why: "the budget must hold at least two parts",
            })
        }
        _ => Ok(()),
    }
}

impl StoreConfig {
    /// The store that the flags and the file name. For commands that need nothing else; [`Config::resolve`] includes it.
    ///
    /// # Errors
    /// [`ConfigError`], naming the key or flag.
    pub fn resolve(overrides: &Overrides, raw: &RawConfig) -> Result<Self, ConfigError> {
        let store = &raw.store;
        let url = Setting::text(
            "--store",
            overrides.store.as_deref(),
            "store.url",
            store.url.as_deref(),
        );
        let url = url.ok_or(ConfigError::Missing {
            what: "no store is named",
            key: "store.url",
            flag: "--store",
        })?;
        let place = url.store_place()?;
        let endpoint_setting = Setting::text(
            "--endpoint",
            overrides.endpoint.as_deref(),
            "store.endpoint",
            store.endpoint.as_deref(),
        );
        let endpoint = endpoint_setting
            .as_ref()
            .map(Setting::http_url)
            .transpose()?;
        let region = Setting::text(
            "--region",
            overrides.region.as_deref(),
            "store.region",
            store.region.as_deref(),
        )
        .map(|region| region.region())
        .transpose()?;
        if let (StorePlace::Directory(_), Some(endpoint)) = (&place, &endpoint_setting) {
            return Err(ConfigError::Conflict {
                first: url.to_string(),
                second: endpoint.to_string(),
                why: "a directory has no endpoint",
            });
        }
        let kind = store_kind(store, &place, endpoint.as_ref())?;
        let preset = kind.preset();
        let path_style = path_style(
            store.path_style.as_ref(),
            preset.path_style,
            &place,
            endpoint.as_ref(),
            endpoint_setting.as_ref(),
        )?;
        let times = StoreTimes::resolve(store)?;
        let bucket = BucketConfig::resolve(store, &place, endpoint.as_ref())?;
        let epoch = match overrides.epoch {
            Some(epoch) => value::epoch("--epoch", Some(epoch))?,
            None => value::epoch("job.epoch", raw.job.epoch)?,
        };
        Ok(Self {
            place,
            epoch,
            bucket,
            endpoint: endpoint.map(|url| url.as_str().trim_end_matches('/').to_owned()),
            region,
            kind,
            path_style,
            part_size: Setting::file("store.part_size", store.part_size.as_deref())
                .map(|size| size.size(5 * MIB, 5 * GIB))
                .transpose()?,
            limits: part_limits(store, preset.limits)?,
            parallelism: value::count("store.parallelism", store.parallelism, 1, 256)?
                .unwrap_or(64),
            checksum: Setting::file("store.checksum", store.checksum.as_deref())
                .map(|word| {
                    word.word(&[
                        ("auto", PartChecksum::Auto),
                        ("crc64nvme", PartChecksum::Crc64Nvme),
                        ("crc32c", PartChecksum::Crc32c),
                        ("crc32", PartChecksum::Crc32),
                        ("none", PartChecksum::None),
                    ])
                })
                .transpose()?
                .unwrap_or(preset.checksum),
            sign_payload: store.sign_payload.or(preset.sign_payload),
            retry_timeout: times.retry,
            connect_timeout: times.connect,
            request_timeout: times.request,
            stall_timeout: times.stall,
            idle_timeout: times.idle,
        })
    }
}

struct StoreTimes {
    retry: Duration,
    connect: Duration,
    request: Duration,
    stall: Duration,
    idle: Duration,
}

impl StoreTimes {
    const LEAST: Duration = Duration::from_millis(100);

    fn resolve(store: &RawStore) -> Result<Self, ConfigError> {
        let retry_setting = Setting::file("store.retry_timeout", store.retry_timeout.as_deref());
        let retry = match &retry_setting {
            Some(text) => text.time(Self::LEAST, Duration::from_secs(24 * 3600))?,
            None => Duration::from_secs(120),
        };
        // One attempt may not last longer than all of them together.
        let attempt = |key: &'static str, text: Option<&str>, longest: u64, default: u64| {
            let Some(text) = Setting::file(key, text) else {
                let default = Duration::from_secs(default);
                if default > retry {
                    tracing::warn!(
                        "{key} is {retry:?}, below its default of {default:?}: one attempt may not last longer than store.retry_timeout"
                    );
                }
                return Ok(default.min(retry));
            };
            let time = text.time(Self::LEAST, Duration::from_secs(longest))?;
            match &retry_setting {
                Some(total) if time > retry => Err(ConfigError::Conflict {
                    first: text.to_string(),
                    second: total.to_string(),
                    why: "one attempt may not last longer than all attempts together",
                }),
                _ if time > retry => {
                    Err(text.invalid("at most store.retry_timeout, which is 120s by default"))
                }
                _ => Ok(time),
            }
        };
        let idle = Setting::file("store.idle_timeout", store.idle_timeout.as_deref())
            .map(|text| text.time(Self::LEAST, Duration::from_secs(600)))
            .transpose()?;
        Ok(Self {
            retry,
            idle: idle.unwrap_or(Duration::from_secs(15)),
            connect: attempt(
                "store.connect_timeout",
                store.connect_timeout.as_deref(),
                300,
                5,
            )?,
            request: attempt(
                "store.request_timeout",
                store.request_timeout.as_deref(),
                600,
                30,
            )?,
            stall: attempt(
                "store.stall_timeout",
                store.stall_timeout.as_deref(),
                600,
                20,
            )?,
        })
    }
}

/// As written, else as the endpoint tells.
fn store_kind(
    store: &RawStore,
    place: &StorePlace,
    endpoint: Option<&url::Url>,
) -> Result<StoreKind, ConfigError> {
    let written = Setting::file("store.kind", store.kind.as_deref());
    let words = [("auto", None)].into_iter();
    let words: Vec<_> = words
        .chain(StoreKind::WORDS.map(|(word, kind)| (word, Some(kind))))
        .collect();
    let said = written.as_ref().map(|word| word.word(&words)).transpose()?;
    match (place, said.flatten()) {
        (StorePlace::Bucket { .. }, None) => Ok(StoreKind::of_endpoint(endpoint)),
        (StorePlace::Bucket { .. }, Some(kind)) => Ok(kind),
        (StorePlace::Directory(_), None) => Ok(StoreKind::Generic),
        (StorePlace::Directory(_), Some(_)) => Err(ConfigError::Conflict {
            first: written.map_or_else(String::new, |it| it.to_string()),
            second: "store.url = \"file://…\"".to_owned(),
            why: "a directory is none of these stores",
        }),
    }
}

/// What is written narrows or widens what is known of the kind.
fn part_limits(store: &RawStore, known: PartLimits) -> Result<PartLimits, ConfigError> {
    let most = u32::try_from(PART_COUNT_MAX).unwrap_or(u32::MAX);
    let count = value::count("store.part_count_max", store.part_count_max, 1, most)?;
    let longest = Setting::file("store.object_size_max", store.object_size_max.as_deref());
    let longest = longest.map(|size| size.size(5 * MIB, PartLimits::S3.object_len_max));
    Ok(PartLimits {
        count_max: count.map_or(known.count_max, u64::from),
        object_len_max: longest.transpose()?.unwrap_or(known.object_len_max),
        ..known
    })
}

/// An address has no room for a bucket in its host name, and a bucket with dots does not match a certificate's wildcard.
fn path_style(
    written: Option<&PathStyle>,
    known: Option<bool>,
    place: &StorePlace,
    endpoint: Option<&url::Url>,
    endpoint_setting: Option<&Setting>,
) -> Result<bool, ConfigError> {
    let is_address = endpoint.is_some_and(value::host_is_address);
    match written {
        Some(PathStyle::Fixed(false)) if is_address => Err(ConfigError::Conflict {
            first: "store.path_style = false".to_owned(),
            second: endpoint_setting.map_or_else(String::new, ToString::to_string),
            why: "an address or localhost cannot carry the bucket in its host name",
        }),
        Some(PathStyle::Fixed(fixed)) => Ok(*fixed),
        Some(PathStyle::Word(word)) if word != "auto" => Err(ConfigError::Invalid {
            name: "store.path_style".to_owned(),
            value: word.clone(),
            expected: "true, false or \"auto\"".to_owned(),
        }),
        Some(PathStyle::Word(_)) | None => {
            let has_dots =
                matches!(place, StorePlace::Bucket { bucket, .. } if bucket.contains('.'));
            Ok(is_address || has_dots || known.unwrap_or(false))
        }
    }
}

/// Bounds of a memory budget that nobody set, in bytes: below the first nothing flows well, above the second nothing gets faster.
const DERIVED_BUDGET: std::ops::RangeInclusive<u64> = 256 * MIB..=4 * GIB;

impl PipelineConfig {
    fn resolve(raw: &RawPipeline, environment: &Environment) -> Result<Self, ConfigError> {
        let chunk_size = Setting::file("pipeline.chunk_size", raw.chunk_size.as_deref());
        let chunk_size = match chunk_size {
            Some(size) => match size.size(MIB, 64 * MIB)? {
                bytes if bytes.is_power_of_two() => Some(bytes),
                _ => return Err(size.invalid("a power of two from \"1MiB\" to \"64MiB\"")),
            },
            None => None,
        };
        let set = Setting::file("pipeline.memory_budget", raw.memory_budget.as_deref())
            .map(|size| size.size(16 * MIB, TIB))
            .transpose()?;
        // A quarter: the target's own processes live in the same cgroup, and page cache and sockets want room too.
        let derived = (environment.memory_available.unwrap_or(0) / 4)
            .clamp(*DERIVED_BUDGET.start(), *DERIVED_BUDGET.end());
        Ok(Self {
            chunk_size,
            memory_budget: set.unwrap_or(derived),
            memory_budget_is_set: set.is_some(),
            threads: value::count("pipeline.threads", raw.threads, 1, 1024)?
                .unwrap_or(environment.threads.clamp(1, 1024)),
        })
    }
}

impl CompressionConfig {
    fn resolve(raw: &RawCompression) -> Result<Self, ConfigError> {
        const EXPECTED: &str = "\"auto\", \"none\", \"max-ratio\" or a zstd level from 1 to 19";
        let invalid = |value: String| ConfigError::Invalid {
            name: "compression.mode".to_owned(),
            value,
            expected: EXPECTED.to_owned(),
        };
        let level = match &raw.mode {
            None => Level::Auto,
            Some(CompressionMode::Level(level)) => match i32::try_from(*level) {
                Ok(level @ 1..=19) => Level::Zstd(level),
                _ => return Err(invalid(level.to_string())),
            },
            Some(CompressionMode::Word(word)) => match word.as_str() {
                "auto" => Level::Auto,
                "none" => Level::None,
                "max-ratio" => Level::MaxRatio,
                _ => return Err(invalid(word.clone())),
            },
        };
        let filters = [("auto", FilterChoice::Auto), ("none", FilterChoice::None)];
        let filter = Setting::file("compression.filter", raw.filter.as_deref())
            .map(|word| word.word(&filters))
            .transpose()?
            .unwrap_or_default();
        let settings = Settings {
            level,
            filter,
            ..Settings::default()
        };
        Ok(Self { settings })
    }
}

impl DriverConfig {
    fn resolve(overrides: &Overrides, raw: &RawDriver) -> Result<Self, ConfigError> {
        let modes = [
            ("auto", DriverMode::Auto),
            ("custom-storage", DriverMode::CustomStorage),
            ("staged", DriverMode::Staged),
        ];
        let mode = Setting::file("driver.mode", raw.mode.as_deref())
            .map(|word| word.word(&modes))
            .transpose()?
            .unwrap_or_default();
        let lock_timeout = Setting::file("driver.lock_timeout", raw.lock_timeout.as_deref())
            .map(|text| text.time(Duration::from_millis(1), Duration::from_secs(3600)))
            .transpose()?
            .unwrap_or(Duration::from_secs(10));
        Ok(Self {
            mode,
            lock_timeout,
            gpu_map: gpu_map(overrides, raw)?,
        })
    }
}

impl SpillConfig {
    fn resolve(raw: &RawSpill) -> Result<Self, ConfigError> {
        let survives = Setting::file("spill.survives", raw.survives.as_deref());
        let places = [("process", Survives::Process), ("node", Survives::Node)];
        let survives = survives
            .map(|word| word.word(&places))
            .transpose()?
            .unwrap_or(Survives::Process);
        let path = Setting::file("spill.path", raw.path.as_deref());
        let path = path.map(|path| path.directory(&path.value)).transpose()?;
        let when = Setting::file("spill.when", raw.when.as_deref());
        let times = [
            ("failure", SpillWhen::Failure),
            ("always", SpillWhen::Always),
        ];
        let when_is = when.as_ref().map(|word| word.word(&times)).transpose()?;
        let on_failure = Setting::file("spill.on_failure", raw.on_failure.as_deref());
        let ways = [
            ("auto", None),
            ("spill", Some(OnFailure::Spill)),
            ("give-back", Some(OnFailure::GiveBack)),
            ("hold", Some(OnFailure::Hold)),
            ("abandon", Some(OnFailure::Abandon)),
        ];
        let way = on_failure
            .as_ref()
            .map(|word| word.word(&ways))
            .transpose()?;
        let way = way.flatten();
        let needs_place = match (when_is, way) {
            (Some(SpillWhen::Always), _) => when,
            (_, Some(OnFailure::Spill | OnFailure::GiveBack)) => on_failure,
            _ => None,
        };
        if let (None, Some(setting)) = (&path, needs_place) {
            return Err(setting.invalid("this needs a directory: set spill.path"));
        }
        Ok(Self {
            place: path.map(|path| SpillPlace { path, survives }),
            when: when_is.unwrap_or_default(),
            on_failure: way,
        })
    }
}

impl RetentionConfig {
    /// The default of `retention.older_than`: longer than any save and any wait for one.
    const OLDER_THAN: Duration = Duration::from_secs(24 * 3600);
    const GRACE: Duration = Duration::from_secs(3600);
    const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

    fn resolve(overrides: &Overrides, raw: &RawRetention) -> Result<Self, ConfigError> {
        let keep = match overrides.keep {
            Some(keep) => value::count("--keep", Some(keep), 2, 1_000_000)?,
            None => value::count("retention.keep", raw.keep, 2, 1_000_000)?,
        };
        let time =
            |flag: &'static str, typed: Option<&str>, key: &'static str, file: Option<&str>| {
                let text = Setting::text(flag, typed, key, file);
                text.map(|text| text.time(Duration::ZERO, Self::LONGEST))
                    .transpose()
            };
        let grace = time(
            "--grace",
            overrides.grace.as_deref(),
            "retention.grace",
            raw.grace.as_deref(),
        )?;
        let older_than = time(
            "--older-than",
            overrides.older_than.as_deref(),
            "retention.older_than",
            raw.older_than.as_deref(),
        )?;
        Ok(Self {
            keep: keep.unwrap_or(2),
            grace: grace.unwrap_or(Self::GRACE),
            older_than: older_than.unwrap_or(Self::OLDER_THAN),
        })
    }
}

/// A flag's pair replaces the file's pair for the same stored GPU.
fn gpu_map(overrides: &Overrides, raw: &RawDriver) -> Result<Vec<(GpuUuid, GpuUuid)>, ConfigError> {
    let mut pairs: BTreeMap<GpuUuid, (GpuUuid, String)> = BTreeMap::new();
    for (old, new) in &raw.gpu_map {
        let name = format!("driver.gpu_map.{old:?} = {new:?}");
        let pair = (
            value::gpu("driver.gpu_map", old)?,
            value::gpu("driver.gpu_map", new)?,
        );
        insert_pair(&mut pairs, pair, name)?;
    }
    let mut flags = BTreeMap::new();
    for text in &overrides.gpu_map {
        let Some((old, new)) = text.split_once('=') else {
            return Err(ConfigError::Invalid {
                name: "--gpu-map".to_owned(),
                value: text.clone(),
                expected: "expected OLD=NEW, two GPU UUIDs".to_owned(),
            });
        };
        insert_pair(
            &mut flags,
            (value::gpu("--gpu-map", old)?, value::gpu("--gpu-map", new)?),
            format!("--gpu-map {text}"),
        )?;
    }
    pairs.append(&mut flags);
    let mut taken: BTreeMap<GpuUuid, &str> = BTreeMap::new();
    for (new, name) in pairs.values() {
        if let Some(other) = taken.insert(*new, name) {
            return Err(ConfigError::Conflict {
                first: other.to_owned(),
                second: name.clone(),
                why: "two stored GPUs cannot go onto one present GPU",
            });
        }
    }
    Ok(pairs
        .into_iter()
        .map(|(old, (new, _))| (old, new))
        .collect())
}

fn insert_pair(
    pairs: &mut BTreeMap<GpuUuid, (GpuUuid, String)>,
    (old, new): (GpuUuid, GpuUuid),
    name: String,
) -> Result<(), ConfigError> {
    match pairs.get(&old) {
        Some((_, other)) => Err(ConfigError::Conflict {
            first: other.clone(),
            second: name,
            why: "one stored GPU is mapped twice",
        }),
        None => {
            pairs.insert(old, (new, name));
            Ok(())
        }
    }
}

impl RestoreConfig {
    fn resolve(raw: &RawRestore) -> Result<Self, ConfigError> {
        let verify = Setting::file("restore.verify", raw.verify.as_deref())
            .map(|word| {
                word.word(&[
                    ("auto", None),
                    ("all", Some(Verify::All)),
                    ("stream", Some(Verify::Stream)),
                ])
            })
            .transpose()?
            .flatten();
        Ok(Self { verify })
    }
}
