//! The configuration file and flags, from text to a resolved configuration.

use std::time::Duration;

use ckptstream::codec::{FilterChoice, Level, Settings};
use ckptstream::config::{
    Config, ConfigError, Environment, KEYS, Overrides, PartChecksum, RawConfig, StoreKind,
    StorePlace, Verify,
};
use ckptstream::plan::PartLimits;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const EXAMPLE: &str = include_str!("../../config.example.toml");
const LEAST: &str = "[job]\nname = \"my-job\"\n[store]\nurl = \"s3://my-bucket/ckptstream\"\n";

fn environment() -> Environment {
    Environment {
        memory_available: Some(8 * GIB),
        threads: 6,
    }
}

fn resolve(text: &str, overrides: &Overrides) -> Result<Config, ConfigError> {
    Config::resolve(overrides, &RawConfig::parse(text)?, &environment())
}

fn resolved(text: &str) -> Config {
    resolve(text, &Overrides::default()).expect("a valid configuration")
}

fn refusal(text: &str) -> String {
    resolve(text, &Overrides::default())
        .expect_err("must be refused")
        .to_string()
}

/// A valid file with one more key in `[table]`.
fn with(table: &str, line: &str) -> String {
    match table {
        "store" => format!("{LEAST}{line}\n"),
        _ => format!("{LEAST}[{table}]\n{line}\n"),
    }
}

#[test]
fn the_example_says_the_defaults() {
    assert_eq!(resolved(EXAMPLE), resolved(LEAST));
}

#[test]
fn the_example_with_every_key_set_is_valid_too() {
    let text: String = EXAMPLE
        .lines()
        .map(|line| match line.strip_prefix("# ") {
            Some(rest) if is_setting(rest) => format!("{rest}\n"),
            _ => format!("{line}\n"),
        })
        .collect();
    let config = resolved(&text);
    assert_eq!(config.store.part_size, Some(16 * MIB));
    assert_eq!(config.driver.gpu_map.len(), 1);
    assert!(config.pipeline.memory_budget_is_set);
}

#[test]
fn the_example_has_every_key_with_its_default_in_words() {
    let mut table = String::new();
    let mut found = Vec::new();
    let mut comment = String::new();
    for line in EXAMPLE.lines() {
        let setting = line.strip_prefix("# ").unwrap_or(line);
        if let Some(name) = line
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
        {
            name.clone_into(&mut table);
        } else if is_setting(setting) {
            let key = setting.split(" = ").next().unwrap_or_default();
            found.push(format!("{table}.{key}"));
            let says_default = comment.contains("Default: ") || comment.contains("Required");
            assert!(
                says_default,
                "{table}.{key} does not say its default:\n{comment}"
            );
            comment.clear();
        } else if line.is_empty() {
            comment.clear();
        } else {
            comment.push_str(line);
        }
    }
    let known: Vec<String> = KEYS
        .iter()
        .flat_map(|(table, keys)| keys.iter().map(move |key| format!("{table}.{key}")))
        .collect();
    assert_eq!(
        found, known,
        "config.example.toml and config::KEYS name the same keys in the same order"
    );
}

/// `key = value`, where the key is one word.
fn is_setting(text: &str) -> bool {
    text.split_once(" = ").is_some_and(|(key, _)| {
        key.bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte == b'_')
    })
}

fn bucket(bucket: &str, prefix: &str) -> StorePlace {
    StorePlace::Bucket {
        bucket: bucket.to_owned(),
        prefix: prefix.to_owned(),
    }
}

#[test]
fn a_directory_is_a_store_without_an_endpoint() {
    let directory = |endpoint: Option<&str>| {
        let overrides = Overrides {
            store: Some("file:///mnt/images".to_owned()),
            endpoint: endpoint.map(str::to_owned),
            ..Overrides::default()
        };
        resolve(LEAST, &overrides)
    };
    let config = directory(None).expect("valid");
    let place = StorePlace::Directory("/mnt/images".into());
    assert_eq!(config.store.place, place);
    let message = directory(Some("http://127.0.0.1:9000")).expect_err("no endpoint");
    let message = message.to_string();
    assert!(
        message.contains("--store") && message.contains("--endpoint"),
        "{message}"
    );
}

#[test]
fn defaults() {
    let config = resolved(LEAST);
    assert_eq!(config.job.as_str(), "my-job");
    assert_eq!(config.store.place, bucket("my-bucket", "ckptstream"));
    assert_eq!(config.store.parallelism, 64);
    assert_eq!(config.store.checksum, PartChecksum::Auto);
    assert_eq!(config.store.retry_timeout, Duration::from_secs(120));
    assert_eq!(config.store.request_timeout, Duration::from_secs(30));
    assert_eq!(
        (
            config.pipeline.memory_budget,
            config.pipeline.memory_budget_is_set
        ),
        (2 * GIB, false)
    );
    assert_eq!(config.pipeline.threads, 6);
    assert_eq!(config.compression.settings, Settings::default());
    assert_eq!(config.restore.verify, None);
    assert_eq!(config.deadline, None);
}

#[test]
fn a_derived_budget_stays_within_its_bounds() {
    for (available, expected) in [
        (None, 256 * MIB),
        (Some(0), 256 * MIB),
        (Some(4 * GIB), GIB),
        (Some(u64::MAX), 4 * GIB),
    ] {
        let environment = Environment {
            memory_available: available,
            threads: 1,
        };
        let raw = RawConfig::parse(LEAST).expect("valid");
        let config = Config::resolve(&Overrides::default(), &raw, &environment).expect("valid");
        assert_eq!(config.pipeline.memory_budget, expected, "{available:?}");
    }
}

#[test]
fn flags_override_the_file() {
    let overrides = Overrides {
        job: Some("other".to_owned()),
        store: Some("s3://elsewhere".to_owned()),
        endpoint: Some("https://store.example:9000/".to_owned()),
        region: Some("eu-central-1".to_owned()),
        deadline: Some("90s".to_owned()),
        ..Overrides::default()
    };
    let config = resolve(EXAMPLE, &overrides).expect("valid");
    assert_eq!(config.job.as_str(), "other");
    assert_eq!(config.store.place, bucket("elsewhere", ""));
    assert_eq!(
        config.store.endpoint.as_deref(),
        Some("https://store.example:9000")
    );
    assert_eq!(config.store.region.as_deref(), Some("eu-central-1"));
    assert_eq!(config.deadline, Some(Duration::from_secs(90)));
    let message = resolve(
        LEAST,
        &Overrides {
            deadline: Some("90".to_owned()),
            ..Overrides::default()
        },
    )
    .expect_err("no unit");
    assert!(message.to_string().contains("--deadline"), "{message}");
}

#[test]
fn what_must_be_given_is_asked_for_by_key_and_flag() {
    let message = refusal("[store]\nurl = \"s3://bucket\"\n");
    assert!(
        message.contains("job.name") && message.contains("--job"),
        "{message}"
    );
    let message = refusal("[job]\nname = \"j\"\n");
    assert!(
        message.contains("store.url") && message.contains("--store"),
        "{message}"
    );
}

#[test]
fn path_style_follows_the_endpoint_and_the_bucket() {
    let style = |url: &str, endpoint: Option<&str>| {
        let overrides = Overrides {
            store: Some(url.to_owned()),
            endpoint: endpoint.map(str::to_owned),
            ..Overrides::default()
        };
        resolve(LEAST, &overrides).expect("valid").store.path_style
    };
    assert!(!style("s3://bucket", None));
    assert!(style("s3://my.bucket", None));
    assert!(style("s3://bucket", Some("http://127.0.0.1:9000")));
    assert!(style("s3://bucket", Some("http://[::1]:9000")));
    assert!(style("s3://bucket", Some("http://localhost:9000")));
    assert!(!style("s3://bucket", Some("https://store.example")));
}

#[test]
fn a_kind_sets_defaults_and_keys_win_over_it() {
    let store = |lines: &str| resolved(&with("store", lines)).store;
    let r2 = store("endpoint = \"https://0123.r2.cloudflarestorage.com\"");
    assert_eq!(r2.kind, StoreKind::R2);
    assert_eq!(r2.limits.len_max, 5 * GIB - 5 * MIB);
    let minio = store("endpoint = \"https://minio.corp:9000\"\nkind = \"minio\"");
    assert!(minio.path_style);
    let named =
        store("endpoint = \"https://minio.corp:9000\"\nkind = \"minio\"\npath_style = false");
    assert!(!named.path_style);
    let set = store(
        "kind = \"ceph\"\npart_count_max = 1000\nobject_size_max = \"1TiB\"\nchecksum = \"crc32\"",
    );
    assert_eq!(set.limits.count_max, 1000);
    assert_eq!(set.limits.object_len_max, 1024 * GIB);
    assert_eq!(set.checksum, PartChecksum::Crc32);
    let ceph = store("kind = \"ceph\"");
    assert_eq!(ceph.limits.object_len_max, 5_000_000_000_000);
    let generic = store("endpoint = \"https://store.example\"");
    assert_eq!(generic.kind, StoreKind::Generic);
    assert_eq!(generic.limits, PartLimits::S3);
    let message = refusal("[job]\nname = \"j\"\n[store]\nurl = \"file:///mnt\"\nkind = \"aws\"\n");
    assert!(
        message.contains("store.kind") && message.contains("exclude"),
        "{message}"
    );
}

#[test]
fn explicit_values_that_exclude_each_other_are_both_named() {
    let cases = [
        (
            "store",
            "path_style = false\nendpoint = \"http://10.0.0.1\"",
            ["store.path_style", "store.endpoint"],
        ),
        (
            "store",
            "retry_timeout = \"10s\"\nrequest_timeout = \"20s\"",
            ["store.retry_timeout", "store.request_timeout"],
        ),
        (
            "store",
            "part_size = \"64MiB\"\n[pipeline]\nmemory_budget = \"100MiB\"",
            ["store.part_size", "pipeline.memory_budget"],
        ),
        (
            "preempt",
            "drill = true\ncontexts = \"at-notice\"",
            ["preempt.drill", "preempt.contexts"],
        ),
        (
            "driver",
            "[driver.gpu_map]\nGPU-00000000-0000-0000-0000-000000000001 = \"GPU-00000000-0000-0000-0000-00000000000a\"\n\
             GPU-00000000-0000-0000-0000-000000000002 = \"GPU-00000000-0000-0000-0000-00000000000a\"",
            ["0001", "0002"],
        ),
    ];
    for (table, lines, names) in cases {
        let message = refusal(&with(table, lines));
        for name in names {
            assert!(
                message.contains(name) && message.contains("exclude each other"),
                "{name}: {message}"
            );
        }
    }
}

#[test]
fn a_default_gives_way_to_an_explicit_value() {
    let store = resolved(&with("store", "retry_timeout = \"3s\"")).store;
    assert_eq!(
        (store.connect_timeout, store.request_timeout),
        (Duration::from_secs(3), Duration::from_secs(3))
    );
}

#[test]
fn values_out_of_range_name_key_and_range() {
    let cases = [
        ("store", "part_size = \"4MiB\"", "5MiB"),
        ("store", "parallelism = 0", "1 to 256"),
        ("store", "parallelism = 257", "1 to 256"),
        ("store", "checksum = \"md5\"", "crc64nvme"),
        ("store", "path_style = \"yes\"", "auto"),
        (
            "store",
            "endpoint = \"127.0.0.1:9000\"",
            "https://host:9000",
        ),
        ("store", "region = \"eu central\"", "eu-central-1"),
        ("store", "stall_timeout = \"0s\"", "100ms"),
        ("store", "idle_timeout = \"1h\"", "10m"),
        ("store", "kind = \"azure\"", "seaweedfs"),
        ("store", "part_count_max = 0", "1 to 10000"),
        ("store", "object_size_max = \"1MiB\"", "5MiB"),
        ("pipeline", "chunk_size = \"3MiB\"", "power of two"),
        ("pipeline", "chunk_size = \"128MiB\"", "64MiB"),
        ("pipeline", "threads = -1", "1 to 1024"),
        ("compression", "mode = 0", "1 to 19"),
        ("compression", "mode = 20", "1 to 19"),
        ("compression", "mode = \"fast\"", "max-ratio"),
        ("compression", "filter = \"planes\"", "none"),
        ("driver", "mode = \"mapped\"", "custom-storage"),
        ("host", "save = \"sometimes\"", "always"),
        ("host", "tcp = \"keep\"", "established"),
        ("host", "grown_files = \"keep\"", "truncate"),
        ("host", "arguments = [\"--tree\"]", "does not set itself"),
        ("driver", "lock_timeout = \"0s\"", "1ms"),
        (
            "driver",
            "gpu_map = { \"GPU-1\" = \"GPU-2\" }",
            "nvidia-smi",
        ),
        ("restore", "verify = \"never\"", "stream"),
    ];
    for (table, line, expected) in cases {
        let message = refusal(&with(table, line));
        let key = line.split(' ').next().unwrap_or_default();
        assert!(
            message.contains(&format!("{table}.{key}")) && message.contains(expected),
            "{line}: {message}"
        );
    }
    let message = refusal("[job]\nname = \"a/b\"\n[store]\nurl = \"s3://bucket\"\n");
    assert!(message.contains("job.name"), "{message}");
}

#[test]
fn words_and_levels() {
    for (line, level) in [
        ("mode = \"auto\"", Level::Auto),
        ("mode = \"none\"", Level::None),
        ("mode = \"max-ratio\"", Level::MaxRatio),
        ("mode = 19", Level::Zstd(19)),
    ] {
        assert_eq!(
            resolved(&with("compression", line))
                .compression
                .settings
                .level,
            level
        );
    }
    for (line, filter) in [
        ("filter = \"auto\"", FilterChoice::Auto),
        ("filter = \"none\"", FilterChoice::None),
    ] {
        assert_eq!(
            resolved(&with("compression", line))
                .compression
                .settings
                .filter,
            filter
        );
    }
    assert_eq!(
        resolved(&with("restore", "verify = \"all\""))
            .restore
            .verify,
        Some(Verify::All)
    );
    assert_eq!(
        resolved(&with("restore", "verify = \"stream\""))
            .restore
            .verify,
        Some(Verify::Stream)
    );
}

#[test]
fn a_gpu_map_flag_replaces_the_pair_for_the_same_stored_gpu() {
    let uuid = |digit: char| format!("GPU-00000000-0000-0000-0000-00000000000{digit}");
    let file = with(
        "driver",
        &format!(
            "[driver.gpu_map]\n{} = \"{}\"\n{} = \"{}\"\n",
            uuid('1'),
            uuid('a'),
            uuid('2'),
            uuid('b')
        ),
    );
    let flags = |pairs: &[(char, char)]| Overrides {
        gpu_map: pairs
            .iter()
            .map(|(old, new)| format!("{}={}", uuid(*old), uuid(*new)))
            .collect(),
        ..Overrides::default()
    };
    let map = |overrides: &Overrides| resolve(&file, overrides).map(|config| config.driver.gpu_map);
    let pair = |old, new| {
        (
            uuid(old).parse().expect("UUID"),
            uuid(new).parse().expect("UUID"),
        )
    };
    assert_eq!(
        map(&flags(&[('1', 'c')])).expect("valid"),
        [pair('1', 'c'), pair('2', 'b')]
    );
    assert!(
        map(&flags(&[('1', 'b')])).is_err(),
        "two stored GPUs onto one"
    );
    assert!(
        map(&flags(&[('1', 'c'), ('1', 'd')])).is_err(),
        "one stored GPU twice"
    );
    let bad = Overrides {
        gpu_map: vec!["GPU-1".to_owned()],
        ..Overrides::default()
    };
    assert!(map(&bad).expect_err("no =").to_string().contains("OLD=NEW"));
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let message = RawConfig::read(std::path::Path::new("/nonexistent/ckptstream.toml"))
        .expect_err("absent")
        .to_string();
    assert!(
        message.contains("/nonexistent/ckptstream.toml") && message.contains("--config"),
        "{message}"
    );
    let file = tempfile::NamedTempFile::new().expect("temporary file");
    std::fs::write(file.path(), "#".repeat(2 * 1024 * 1024)).expect("written");
    assert!(
        RawConfig::read(file.path())
            .expect_err("too long")
            .to_string()
            .contains("longer than")
    );
    std::fs::write(file.path(), "[job]\nnaem = \"x\"\n").expect("written");
    let error = RawConfig::read(file.path()).expect_err("unknown key");
    assert!(
        ckptstream::error::chain(&error)
            .join(": ")
            .contains("job.name"),
        "{error:?}"
    );
}
