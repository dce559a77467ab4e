//! One written value and what it means: sizes, times, words, URLs.
//!
//! In: text, and the key or flag it was written under. Out: a checked value. What can fail: the text; the error names key, value and range.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;

use super::{ConfigError, StorePlace};
use crate::driver::GpuUuid;
use crate::store::epochs::EPOCH_MAX;

pub(super) const MIB: u64 = 1 << 20;
pub(super) const GIB: u64 = 1 << 30;
pub(super) const TIB: u64 = 1 << 40;

/// Longest prefix in bytes: S3 keys end at 1,024, and ours add up to about 300 behind it.
const PREFIX_LEN_MAX: usize = 700;

/// A value as written, with the name of the key or flag.
#[derive(Debug, Clone)]
pub(super) struct Setting {
    name: &'static str,
    pub(super) value: String,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {:?}", self.name, self.value)
    }
}

impl Setting {
    /// The flag's value, else the key's.
    pub(super) fn text(
        flag: &'static str,
        typed: Option<&str>,
        key: &'static str,
        written: Option<&str>,
    ) -> Option<Self> {
        let of = |name, value: &str| Self {
            name,
            value: value.to_owned(),
        };
        typed
            .map(|value| of(flag, value))
            .or_else(|| written.map(|value| of(key, value)))
    }

    /// The key's value.
    pub(super) fn file(key: &'static str, written: Option<&str>) -> Option<Self> {
        Self::text("", None, key, written)
    }

    pub(super) fn invalid(&self, expected: impl fmt::Display) -> ConfigError {
        ConfigError::Invalid {
            name: self.name.to_owned(),
            value: self.value.clone(),
            expected: format!("expected {expected}"),
        }
    }

    /// Bytes within `least..=most`. A bare number is refused: nobody can tell which unit was meant.
    pub(super) fn size(&self, least: u64, most: u64) -> Result<u64, ConfigError> {
        let expected = || {
            format!(
                "a size from \"{}\" to \"{}\", with its unit",
                written_size(least),
                written_size(most)
            )
        };
        let has_unit = self.value.bytes().any(|byte| byte.is_ascii_alphabetic());
        let bytes = self
            .value
            .trim()
            .parse::<ByteSize>()
            .ok()
            .filter(|_| has_unit)
            .map(|size| size.as_u64());
        bytes
            .filter(|bytes| (least..=most).contains(bytes))
            .ok_or_else(|| self.invalid(expected()))
    }

    /// A time within `least..=most`.
    pub(super) fn time(&self, least: Duration, most: Duration) -> Result<Duration, ConfigError> {
        let expected = || {
            format!(
                "a time from \"{}\" to \"{}\", with its unit",
                written_time(least),
                written_time(most)
            )
        };
        let time = humantime::parse_duration(self.value.trim()).ok();
        time.filter(|time| (least..=most).contains(time))
            .ok_or_else(|| self.invalid(expected()))
    }

    /// One of some words.
    pub(super) fn word<T: Copy>(&self, words: &[(&str, T)]) -> Result<T, ConfigError> {
        let found = words
            .iter()
            .find(|(word, _)| *word == self.value)
            .map(|(_, meaning)| *meaning);
        found.ok_or_else(|| {
            let known: Vec<String> = words.iter().map(|(word, _)| format!("{word:?}")).collect();
            self.invalid(known.join(" or "))
        })
    }

    /// A bucket as `s3://bucket/prefix`, or a directory as `file:///directory`.
    pub(super) fn store_place(&self) -> Result<StorePlace, ConfigError> {
        self.no_secret()?;
        if let Some(path) = self.value.strip_prefix("file://") {
            return self.directory(path).map(StorePlace::Directory);
        }
        let Some(rest) = self.value.strip_prefix("s3://") else {
            return Err(self.invalid(
                "s3://bucket/prefix or file:///directory; other kinds of store are not supported",
            ));
        };
        let (bucket, prefix) = self.bucket(rest)?;
        Ok(StorePlace::Bucket { bucket, prefix })
    }

    /// An absolute path.
    pub(super) fn directory(&self, path: &str) -> Result<PathBuf, ConfigError> {
        if !path.starts_with('/') || path.chars().any(char::is_control) {
            return Err(self.invalid("the absolute path of a directory"));
        }
        Ok(PathBuf::from(path))
    }

    /// An absolute path of something that is no directory.
    pub(super) fn file_path(&self) -> Result<PathBuf, ConfigError> {
        let is_path = self.value.starts_with('/') && !self.value.ends_with('/');
        if !is_path || self.value.chars().any(char::is_control) {
            return Err(self.invalid("an absolute path"));
        }
        Ok(PathBuf::from(&self.value))
    }

    /// Bucket and prefix; the prefix without outer slashes.
    fn bucket(&self, rest: &str) -> Result<(String, String), ConfigError> {
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        let is_bucket = (3..=255).contains(&bucket.len())
            && bucket.bytes().all(allowed)
            && bucket
                .as_bytes()
                .first()
                .is_some_and(u8::is_ascii_alphanumeric);
        if !is_bucket {
            return Err(self.invalid(
                "s3://bucket/prefix with a bucket of at least 3 letters, digits, dots and hyphens",
            ));
        }
        let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
        let is_segment = |segment: &str| {
            !matches!(segment, "" | "." | "..") && !segment.chars().any(char::is_control)
        };
        if prefix.len() > PREFIX_LEN_MAX
            || !(prefix.is_empty() || prefix.split('/').all(is_segment))
        {
            return Err(self.invalid(format!(
                "s3://bucket/prefix with a prefix of at most {PREFIX_LEN_MAX} bytes and no empty, \".\" or \"..\" part"
            )));
        }
        Ok((bucket.to_owned(), prefix.to_owned()))
    }

    /// `http(s)://host[:port][/path]`.
    pub(super) fn http_url(&self) -> Result<url::Url, ConfigError> {
        self.no_secret()?;
        let url = url::Url::parse(&self.value).ok().filter(|url| {
            matches!(url.scheme(), "http" | "https")
                && url.has_host()
                && url.query().is_none()
                && url.fragment().is_none()
        });
        url.ok_or_else(|| self.invalid("a URL such as https://host:9000, without query"))
    }

    /// A region's name: letters, digits and hyphens.
    pub(super) fn region(&self) -> Result<String, ConfigError> {
        let is_name = (1..=64).contains(&self.value.len())
            && self
                .value
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if is_name {
            Ok(self.value.clone())
        } else {
            Err(self.invalid("a region's name such as \"eu-central-1\""))
        }
    }

    /// `user:password@host` would end up in messages and logs.
    fn no_secret(&self) -> Result<(), ConfigError> {
        if self.value.contains('@') {
            return Err(ConfigError::Invalid {
                name: self.name.to_owned(),
                value: "…@…".to_owned(),
                expected: "credentials do not belong into a URL; they come from the SDK's chain (AWS_ACCESS_KEY_ID, AWS_PROFILE, …)".to_owned(),
            });
        }
        Ok(())
    }
}

/// `true` for an IP address or a name that always means this machine.
pub(super) fn host_is_address(url: &url::Url) -> bool {
    match url.host() {
        Some(url::Host::Ipv4(_) | url::Host::Ipv6(_)) => true,
        Some(url::Host::Domain(name)) => name == "localhost" || name.ends_with(".localhost"),
        None => false,
    }
}

/// A whole number within `least..=most`.
pub(super) fn count(
    key: &str,
    written: Option<i64>,
    least: u32,
    most: u32,
) -> Result<Option<u32>, ConfigError> {
    let Some(number) = written else {
        return Ok(None);
    };
    match u32::try_from(number)
        .ok()
        .filter(|number| (least..=most).contains(number))
    {
        Some(number) => Ok(Some(number)),
        None => Err(ConfigError::Invalid {
            name: key.to_owned(),
            value: number.to_string(),
            expected: format!("expected a number from {least} to {most}"),
        }),
    }
}

/// The number of a start of the job.
pub(super) fn epoch(key: &str, written: Option<i64>) -> Result<Option<u64>, ConfigError> {
    let Some(number) = written else {
        return Ok(None);
    };
    match u64::try_from(number)
        .ok()
        .filter(|epoch| *epoch <= EPOCH_MAX)
    {
        Some(epoch) => Ok(Some(epoch)),
        None => Err(ConfigError::Invalid {
            name: key.to_owned(),
            value: number.to_string(),
            expected: format!("expected a number from 0 to {EPOCH_MAX}"),
        }),
    }
}

/// A GPU's UUID.
pub(super) fn gpu(name: &str, text: &str) -> Result<GpuUuid, ConfigError> {
    text.trim().parse().map_err(|_bad: crate::driver::BadGpuUuid| ConfigError::Invalid {
        name: name.to_owned(),
        value: text.to_owned(),
        expected: "expected a GPU UUID as nvidia-smi -L prints it: GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx".to_owned(),
    })
}

/// A limit as it would be written in the file.
fn written_size(bytes: u64) -> String {
    ByteSize::b(bytes)
        .display()
        .iec()
        .to_string()
        .replace(' ', "")
        .replace(".0", "")
}

fn written_time(time: Duration) -> String {
    humantime::format_duration(time).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(text: &str) -> Result<u64, ConfigError> {
        Setting {
            name: "store.part_size",
            value: text.to_owned(),
        }
        .size(5 * MIB, 5 * GIB)
    }

    #[test]
    fn sizes_have_a_unit_and_a_range() {
        assert_eq!(size("16MiB").ok(), Some(16 * MIB));
        assert_eq!(size("16 MiB").ok(), Some(16 * MIB));
        assert_eq!(size("16MB").ok(), Some(16_000_000));
        assert_eq!(size("5242880B").ok(), Some(5 * MIB));
        assert_eq!(size("5GiB").ok(), Some(5 * GIB));
        for bad in [
            "",
            "16",
            "16777216",
            "-16MiB",
            "16XiB",
            "4MiB",
            "6GiB",
            "99999999999999999999GiB",
            "MiB",
            "1e9GiB",
            "nanMiB",
            "16\u{661}MiB",
        ] {
            let message = size(bad).expect_err(bad).to_string();
            assert!(
                message.contains("store.part_size")
                    && message.contains("5MiB")
                    && message.contains("5GiB"),
                "{message}"
            );
        }
    }

    #[test]
    fn times_have_a_unit_and_a_range() {
        let time = |text: &str| {
            Setting {
                name: "store.retry_timeout",
                value: text.to_owned(),
            }
            .time(Duration::from_secs(1), Duration::from_secs(3600))
        };
        assert_eq!(time("90s").ok(), Some(Duration::from_secs(90)));
        assert_eq!(time("2min").ok(), Some(Duration::from_secs(120)));
        for bad in ["", "90", "0s", "-1s", "2h", "1 fortnight"] {
            let message = time(bad).expect_err(bad).to_string();
            assert!(
                message.contains("store.retry_timeout")
                    && message.contains("1s")
                    && message.contains("1h"),
                "{message}"
            );
        }
    }

    #[test]
    fn store_urls() {
        let parse = |text: &str| {
            Setting {
                name: "--store",
                value: text.to_owned(),
            }
            .store_place()
        };
        let bucket = |bucket: &str, prefix: &str| {
            Some(StorePlace::Bucket {
                bucket: bucket.to_owned(),
                prefix: prefix.to_owned(),
            })
        };
        assert_eq!(parse("s3://bucket").ok(), bucket("bucket", ""));
        assert_eq!(parse("s3://bucket/").ok(), bucket("bucket", ""));
        assert_eq!(
            parse("s3://my.bucket/a/b/").ok(),
            bucket("my.bucket", "a/b")
        );
        let directory = StorePlace::Directory(PathBuf::from("/mnt/a b"));
        assert_eq!(parse("file:///mnt/a b").ok(), Some(directory));
        for bad in [
            "",
            "bucket",
            "s3:/bucket",
            "s3://",
            "s3://b",
            "s3:///p",
            "s3://-bucket",
            "s3://bucket//a",
            "s3://bucket/a/../b",
            "file://",
            "file://host/x",
            "file:///x\n",
            "/x",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        let message = parse("s3://key:hunter2@bucket")
            .expect_err("secret")
            .to_string();
        assert!(!message.contains("hunter2"), "{message}");
    }
}
