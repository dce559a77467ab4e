//! What the user may write: the TOML file as it stands, nothing judged yet.
//!
//! In: the file's text. Out: a [`RawConfig`] with every key optional. What can fail: TOML that is none, a key that does not exist (the
//! error names the nearest one that does), a key that must never stand in a file (credentials), a value of the wrong type.

use std::collections::BTreeMap;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::ConfigError;

/// Longest configuration file that is read, in bytes. A real one has a few KiB; this keeps a wrong `--config /dev/zero` short.
const FILE_LEN_MAX: u64 = 1024 * 1024;

/// Every table of the file with its keys, in the order of `config.example.toml`. The file is held to this list, and a test holds this list
/// to [`RawConfig`].
pub const KEYS: &[(&str, &[&str])] = &[
    (
        "job",
        &[
            "name",
            "epoch",
            "state_dir",
            "restore_command",
            "restore_timeout",
            "requeue_exit_code",
            "allow_gpu_only",
            "interval",
            "interval_share",
        ],
    ),
    (
        "store",
        &[
            "url",
            "endpoint",
            "region",
            "kind",
            "path_style",
            "part_size",
            "part_count_max",
            "object_size_max",
            "parallelism",
            "checksum",
            "sign_payload",
            "retry_timeout",
            "connect_timeout",
            "request_timeout",
            "stall_timeout",
            "idle_timeout",
            "sse",
            "storage_class",
            "tags",
            "request_payer",
            "ca_bundle",
            "proxy",
            "no_proxy",
            "resolve",
        ],
    ),
    ("pipeline", &["chunk_size", "memory_budget", "threads"]),
    ("compression", &["mode", "filter"]),
    ("driver", &["mode", "lock_timeout", "gpu_map"]),
    (
        "host",
        &[
            "save",
            "criu",
            "tcp",
            "grown_files",
            "shell_job",
            "external",
            "arguments",
        ],
    ),
    ("restore", &["verify"]),
    ("spill", &["path", "survives", "when", "on_failure"]),
    ("retention", &["keep", "grace", "older_than"]),
    (
        "preempt",
        &[
            "sources",
            "signals",
            "notice",
            "margin",
            "deadline_policy",
            "contexts",
            "drill",
            "file",
            "socket",
            "poll",
            "probe_every",
            "aws_url",
            "gcp_url",
            "azure_url",
            "azure_vm",
        ],
    ),
    ("metrics", &["listen", "textfile"]),
];

/// Names under which people write credentials into files. They come from the SDK's chain only.
const CREDENTIAL_KEYS: &[&str] = &[
    "access_key",
    "access_key_id",
    "aws_access_key_id",
    "aws_profile",
    "aws_secret_access_key",
    "aws_session_token",
    "credentials",
    "key_id",
    "password",
    "profile",
    "secret",
    "secret_access_key",
    "secret_key",
    "session_token",
    "token",
];

/// The file, as written.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawConfig {
    /// `[job]`
    pub job: RawJob,
    /// `[store]`
    pub store: RawStore,
    /// `[pipeline]`
    pub pipeline: RawPipeline,
    /// `[compression]`
    pub compression: RawCompression,
    /// `[driver]`
    pub driver: RawDriver,
    /// `[host]`
    pub host: RawHost,
    /// `[restore]`
    pub restore: RawRestore,
    /// `[spill]`
    pub spill: RawSpill,
    /// `[retention]`
    pub retention: RawRetention,
    /// `[preempt]`
    pub preempt: RawPreempt,
    /// `[metrics]`
    pub metrics: RawMetrics,
}

/// `[job]` as written.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawJob {
    /// The job's name.
    pub name: Option<String>,
    /// Number of this start of the job.
    pub epoch: Option<i64>,
    /// Absolute path of a directory.
    pub state_dir: Option<String>,
    /// A program and its arguments.
    pub restore_command: Option<Vec<String>>,
    /// Time.
    pub restore_timeout: Option<String>,
    /// Exit status.
    pub requeue_exit_code: Option<i64>,
    /// A job may be supervised that cannot be restored when its process is gone.
    pub allow_gpu_only: Option<bool>,
    /// Time.
    pub interval: Option<String>,
    /// Per cent.
    pub interval_share: Option<i64>,
}

/// `[metrics]` as written.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawMetrics {
    /// `address:port`.
    pub listen: Option<String>,
    /// Absolute path of a file.
    pub textfile: Option<String>,
}

/// `[store]` as written. Sizes and times are text with a unit.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawStore {
    /// `s3://bucket/prefix`.
    pub url: Option<String>,
    /// `http(s)://host:port`.
    pub endpoint: Option<String>,
    /// Region name.
    pub region: Option<String>,
    /// `auto`, or the name of a store.
    pub kind: Option<String>,
    /// Bucket in the path, in the host name, or chosen.
    pub path_style: Option<PathStyle>,
    /// Size.
    pub part_size: Option<String>,
    /// Count.
    pub part_count_max: Option<i64>,
    /// Size.
    pub object_size_max: Option<String>,
    /// Count.
    pub parallelism: Option<i64>,
    /// `auto`, `crc64nvme`, `crc32c`, `crc32` or `none`.
    pub checksum: Option<String>,
    /// Sign the bodies too.
    pub sign_payload: Option<bool>,
    /// Time.
    pub retry_timeout: Option<String>,
    /// Time.
    pub connect_timeout: Option<String>,
    /// Time.
    pub request_timeout: Option<String>,
    /// Time.
    pub stall_timeout: Option<String>,
    /// Time.
    pub idle_timeout: Option<String>,
    /// `s3`, `kms`, `kms:KEY` or `customer:PATH`.
    pub sse: Option<String>,
    /// Storage class.
    pub storage_class: Option<String>,
    /// Name and value each.
    pub tags: Option<BTreeMap<String, String>>,
    /// The requester pays.
    pub request_payer: Option<bool>,
    /// Absolute path of a file.
    pub ca_bundle: Option<String>,
    /// `http(s)://host:port`, or `none`.
    pub proxy: Option<String>,
    /// Hosts, separated by commas.
    pub no_proxy: Option<String>,
    /// Host and address each.
    pub resolve: Option<BTreeMap<String, String>>,
}

/// `store.path_style` as written.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "expected true, false or \"auto\"")]
pub enum PathStyle {
    /// Said outright.
    Fixed(bool),
    /// A word; only `auto` is one.
    Word(String),
}

/// `[pipeline]` as written.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawPipeline {
    /// Size.
    pub chunk_size: Option<String>,
    /// Size.
    pub memory_budget: Option<String>,
    /// Count.
    pub threads: Option<i64>,
}

/// `[compression]` as written.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawCompression {
    /// A word or a zstd level.
    pub mode: Option<CompressionMode>,
    /// `auto` or `none`.
    pub filter: Option<String>,
}

/// `compression.mode` as written.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(
    untagged,
    expecting = "expected \"auto\", \"none\", \"max-ratio\" or a zstd level as an integer"
)]
pub enum CompressionMode {
    /// A zstd level.
    Level(i64),
    /// A word.
    Word(String),
}

/// `[driver]` as written.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawDriver {
    /// `auto`, `custom-storage` or `staged`.
    pub mode: Option<String>,
    /// Time.
    pub lock_timeout: Option<String>,
    /// Stored UUID to present UUID.
    pub gpu_map: BTreeMap<String, String>,
}

/// `[host]` as written.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawHost {
    /// `auto`, `always` or `never`.
    pub save: Option<String>,
    /// Program.
    pub criu: Option<String>,
    /// `refuse`, `close` or `established`.
    pub tcp: Option<String>,
    /// `refuse` or `truncate`.
    pub grown_files: Option<String>,
    /// Whether.
    pub shell_job: Option<bool>,
    /// As CRIU words it.
    pub external: Option<Vec<String>>,
    /// Options.
    pub arguments: Option<Vec<String>>,
}

/// `[restore]` as written.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawRestore {
    /// `auto`, `all` or `stream`.
    pub verify: Option<String>,
}

/// `[spill]` as written.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawSpill {
    /// Absolute path of a directory.
    pub path: Option<String>,
    /// `process` or `node`.
    pub survives: Option<String>,
    /// `failure` or `always`.
    pub when: Option<String>,
    /// `auto`, `spill`, `give-back`, `hold` or `abandon`.
    pub on_failure: Option<String>,
}

/// `[retention]` as written.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawRetention {
    /// Count.
    pub keep: Option<i64>,
    /// Time.
    pub grace: Option<String>,
    /// Time.
    pub older_than: Option<String>,
}

/// `[preempt]` as written.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawPreempt {
    /// Any of `signals`, `file`, `socket`, `aws`, `gcp`, `azure`.
    pub sources: Option<Vec<String>>,
    /// Names of signals.
    pub signals: Option<Vec<String>>,
    /// Time.
    pub notice: Option<String>,
    /// Time.
    pub margin: Option<String>,
    /// `refuse`, `spill` or `try`.
    pub deadline_policy: Option<String>,
    /// `eager` or `at-notice`.
    pub contexts: Option<String>,
    /// A drill when the job first uses its GPUs.
    pub drill: Option<bool>,
    /// Absolute path of a file.
    pub file: Option<String>,
    /// Absolute path of a socket.
    pub socket: Option<String>,
    /// Time.
    pub poll: Option<String>,
    /// Pause between two looks at the store.
    pub probe_every: Option<String>,
    /// `http://host:port`.
    pub aws_url: Option<String>,
    /// `http://host:port`.
    pub gcp_url: Option<String>,
    /// `http://host:port`.
    pub azure_url: Option<String>,
    /// Name of a virtual machine.
    pub azure_vm: Option<String>,
}

impl RawConfig {
    /// Reads and parses a file.
    ///
    /// # Errors
    /// [`ConfigError::Unreadable`], or [`ConfigError::File`] around what [`RawConfig::parse`] says.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let unreadable = |source| ConfigError::Unreadable {
            path: path.to_owned(),
            source,
        };
        let file = std::fs::File::open(path).map_err(unreadable)?;
        let mut text = String::new();
        file.take(FILE_LEN_MAX + 1)
            .read_to_string(&mut text)
            .map_err(unreadable)?;
        if text.len() as u64 > FILE_LEN_MAX {
            return Err(ConfigError::TooLong {
                path: path.to_owned(),
                len_max: FILE_LEN_MAX,
            });
        }
        Self::parse(&text).map_err(|source| ConfigError::File {
            path: path.to_owned(),
            source: Box::new(source),
        })
    }

    /// Parses the text of a file.
    ///
    /// # Errors
    /// Text that is not TOML; an unknown key; credentials; an `encryption` key; a value of the wrong type. Each names the key and the line.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let syntax = |error: toml::de::Error| ConfigError::Syntax {
            line: line_of(text, error.span().map_or(0, |span| span.start)),
            message: one_line(error.message()),
        };
        let document = DeTable::parse(text).map_err(syntax)?;
        let leaves = check_keys(text, document.get_ref())?;
        toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            let key = leaves
                .iter()
                .find(|leaf| leaf.span.contains(&at))
                .map(|leaf| leaf.key.clone());
            match key {
                Some(key) => ConfigError::WrongType {
                    key,
                    line: line_of(text, at),
                    message: one_line(error.message()),
                },
                None => syntax(error),
            }
        })
    }
}

/// A key with a value, and where the value stands.
struct Leaf {
    key: String,
    span: Range<usize>,
}

/// Walks the file's keys; the first that may not stand there is the error.
fn check_keys(text: &str, document: &DeTable<'_>) -> Result<Vec<Leaf>, ConfigError> {
    let mut leaves = Vec::new();
    for (table_name, value) in document {
        let line = line_of(text, table_name.span().start);
        let Some((table, keys)) = KEYS.iter().find(|(table, _)| table == table_name.get_ref())
        else {
            return Err(unknown(None, table_name.get_ref(), line));
        };
        let DeValue::Table(members) = value.get_ref() else {
            return Err(ConfigError::WrongType {
                key: (*table).to_owned(),
                line,
                message: format!("is a table; write [{table}] and its keys below"),
            });
        };
        for (name, value) in members {
            if !keys.contains(&name.get_ref().as_ref()) {
                return Err(unknown(
                    Some(table),
                    name.get_ref(),
                    line_of(text, name.span().start),
                ));
            }
            collect(format!("{table}.{}", name.get_ref()), value, &mut leaves);
        }
    }
    Ok(leaves)
}

/// Notes a value, or the values of a table whose keys are free (`driver.gpu_map`).
fn collect(key: String, value: &Spanned<DeValue<'_>>, leaves: &mut Vec<Leaf>) {
    if let DeValue::Table(members) = value.get_ref() {
        for (name, value) in members {
            leaves.push(Leaf {
                key: format!("{key}.{}", name.get_ref()),
                span: value.span(),
            });
        }
    }
    leaves.push(Leaf {
        key,
        span: value.span(),
    });
}

fn unknown(table: Option<&str>, name: &str, line: usize) -> ConfigError {
    let key = table.map_or_else(|| name.to_owned(), |table| format!("{table}.{name}"));
    let plain = name.to_ascii_lowercase().replace('-', "_");
    if plain.contains("encrypt") {
        ConfigError::Encryption { key, line }
    } else if CREDENTIAL_KEYS.contains(&plain.as_str()) {
        ConfigError::Credential { key, line }
    } else {
        let nearest = nearest(table, name);
        ConfigError::UnknownKey { key, line, nearest }
    }
}

/// The known key or table with the smallest edit distance; another table than the one written counts as up to two edits more.
fn nearest(table: Option<&str>, name: &str) -> String {
    let distance = |a: &str, b: &str| strsim::damerau_levenshtein(a, b);
    let tables = KEYS
        .iter()
        .filter(|_| table.is_none())
        .map(|(known, _)| (distance(name, known), (*known).to_owned()));
    let keys = KEYS.iter().flat_map(|(known_table, known_keys)| {
        let away = table.map_or(1, |table| distance(table, known_table).min(2));
        known_keys.iter().map(move |known| {
            (
                distance(name, known) + away,
                format!("{known_table}.{known}"),
            )
        })
    });
    tables
        .chain(keys)
        .min_by_key(|(score, _)| *score)
        .map(|(_, key)| key)
        .unwrap_or_default()
}

/// Line number from 1 of a byte offset.
fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes()
        .iter()
        .take(offset)
        .filter(|byte| **byte == b'\n')
        .count()
        + 1
}

fn one_line(message: &str) -> String {
    message
        .lines()
        .map(str::trim)
        .collect::<Vec<_>>()
        .join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        RawConfig::parse(text)
            .expect_err("must be refused")
            .to_string()
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line_and_the_nearest_known_one() {
        assert_eq!(
            refusal("[store]\nurl = \"s3://b\"\npathstyle = true\n"),
            "line 3: unknown key `store.pathstyle`; the nearest known one is `store.path_style`"
        );
        assert!(
            refusal("[stoer]\nurl = \"s3://b\"\n")
                .contains("`stoer`; the nearest known one is `store`")
        );
        assert!(
            refusal("[store]\nchunk_size = \"4MiB\"\n")
                .contains("nearest known one is `pipeline.chunk_size`")
        );
        assert!(
            refusal("part_size = \"16MiB\"\n").contains("nearest known one is `store.part_size`")
        );
    }

    #[test]
    fn a_value_of_the_wrong_type_names_its_key() {
        let message = refusal("[store]\npart_size = 16\n");
        assert!(
            message.starts_with("line 2: `store.part_size`"),
            "{message}"
        );
        let message = refusal("[driver.gpu_map]\na = 1\n");
        assert!(
            message.starts_with("line 2: `driver.gpu_map.a`"),
            "{message}"
        );
        let message = refusal("[compression]\nmode = [1]\n");
        assert!(
            message.contains("`compression.mode`") && message.contains("max-ratio"),
            "{message}"
        );
        assert!(refusal("store = 1\n").contains("[store]"));
    }

    #[test]
    fn secrets_and_encryption_are_refused_and_never_repeated() {
        for key in ["secret_access_key", "aws-session-token", "Access_Key"] {
            let message = refusal(&format!("[store]\n{key} = \"hunter2\"\n"));
            assert!(
                message.contains("AWS_ACCESS_KEY_ID") && !message.contains("hunter2"),
                "{message}"
            );
        }
        assert!(refusal("[encryption]\nkey = \"hunter2\"\n").contains("not supported"));
        assert!(refusal("[store]\nencryption = true\n").contains("not supported"));
        let broken = refusal("[store]\nsecret_key = \"hunter2\nurl = 1\n");
        assert!(!broken.contains("hunter2"), "{broken}");
    }

    #[test]
    fn the_list_of_keys_is_the_structure() {
        for (table, keys) in KEYS {
            for key in *keys {
                let value = match (*table, *key) {
                    ("driver", "gpu_map") | ("store", "tags" | "resolve") => "{}",
                    (_, "epoch" | "parallelism" | "threads" | "keep" | "part_count_max") => "1",
                    (_, "requeue_exit_code" | "interval_share") => "75",
                    (
                        _,
                        "sign_payload" | "allow_gpu_only" | "request_payer" | "shell_job" | "drill",
                    ) => "true",
                    (_, "restore_command" | "sources" | "signals" | "external" | "arguments") => {
                        "[\"x\"]"
                    }
                    _ => "\"x\"",
                };
                let text = format!("[{table}]\n{key} = {value}\n");
                assert!(
                    RawConfig::parse(&text).is_ok(),
                    "{text}: {:?}",
                    RawConfig::parse(&text)
                );
            }
        }
    }
}
