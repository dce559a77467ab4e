//! The environment variable `EMULATED_CUDA`, read once.
//!
//! In: the variable's text, `key=value` pairs separated by `;`. Out: a [`Config`] with every default filled in.
//! What can fail: an unknown key or a value out of range; `cuInit` then answers `INVALID_VALUE` and one line on stderr names the key.
//! `docs/emulated-driver.md` has the table of keys.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::fault::Rule;

/// Most GPUs that one process can have; the control block has this many slots.
pub(crate) const GPUS_MAX: usize = 64;
/// Largest memory of one emulated GPU: the address window of a GPU is 16 TiB and four times its memory must fit.
pub(crate) const MEMORY_MAX: u64 = 4 << 40;
/// Largest extent granularity; real drivers use 2 MiB.
const GRANULARITY_MAX: u64 = 1 << 30;

/// One emulated GPU, as this process's environment describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuConfig {
    pub(crate) name: String,
    pub(crate) uuid: [u8; 16],
    /// Total memory in bytes.
    pub(crate) memory: u64,
}

/// What happens to device memory that a checkpoint releases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Vram {
    /// Pages come with the first write and go with Complete, as on hardware.
    Lazy,
    /// Pages are present from the allocation on and stay through a checkpoint; for benches only.
    Resident,
}

/// The whole variable, resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) gpus: Vec<GpuConfig>,
    /// Compute capability, major and minor: the emulated "chip".
    pub(crate) cc: (u32, u32),
    /// Each live allocation is rounded up to this many bytes in an extent.
    pub(crate) granularity: u64,
    pub(crate) vram: Vram,
    /// Where memory files are made; none makes them without a file system.
    pub(crate) memory_dir: Option<PathBuf>,
    /// What `cuDriverGetVersion` answers: 1000 × major + 10 × minor.
    pub(crate) api: u32,
    /// Device-to-host copy bandwidth of one GPU in bytes per second; 0 is unlimited.
    pub(crate) d2h: u64,
    /// Host-to-device copy bandwidth of one GPU in bytes per second; 0 is unlimited.
    pub(crate) h2d: u64,
    /// How long `cuInit` takes.
    pub(crate) init: Duration,
    /// Seed of the order in which checkpoint and restore list devices.
    pub(crate) seed: u64,
    pub(crate) faults: Vec<Rule>,
    pub(crate) trace: Option<PathBuf>,
}

static CONFIG: OnceLock<Result<Config, String>> = OnceLock::new();

/// The process's configuration, parsed at the first call; the error is one line that names the key.
pub(crate) fn get() -> Result<&'static Config, &'static str> {
    let parsed = CONFIG.get_or_init(|| {
        let text = std::env::var_os("EMULATED_CUDA").unwrap_or_default();
        let text = text.to_str().ok_or("EMULATED_CUDA is not valid UTF-8")?;
        parse(text)
    });
    parsed.as_ref().map_err(String::as_str)
}

/// Parses the variable's text.
///
/// # Errors
/// One line, naming the key and what it may be.
pub(crate) fn parse(text: &str) -> Result<Config, String> {
    let mut raw = Raw::default();
    for pair in text.split(';').map(str::trim).filter(|p| !p.is_empty()) {
        let Some((key, value)) = pair.split_once('=') else {
            return Err(format!("{pair:?} is not key=value"));
        };
        raw.set(key.trim(), value.trim())?;
    }
    raw.resolve()
}

/// The pairs as they were written.
struct Raw {
    gpus: u64,
    memory: Vec<u64>,
    names: Vec<String>,
    node: u64,
    uuids: Vec<[u8; 16]>,
    cc: (u32, u32),
    granularity: u64,
    vram: Vram,
    memory_dir: Option<PathBuf>,
    api: u32,
    d2h: u64,
    h2d: u64,
    init_ms: u64,
    seed: Option<u64>,
    faults: Vec<Rule>,
    trace: Option<PathBuf>,
}

impl Default for Raw {
    fn default() -> Self {
        Raw {
            gpus: 1,
            memory: vec![8 << 30],
            names: vec!["Emulated GPU (not hardware)".to_owned()],
            node: 0,
            uuids: Vec::new(),
            cc: (0, 1),
            granularity: 2 << 20,
            vram: Vram::Lazy,
            memory_dir: None,
            api: 13050,
            d2h: 0,
            h2d: 0,
            init_ms: 0,
            seed: None,
            faults: Vec::new(),
            trace: None,
        }
    }
}

impl Raw {
    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let wrong = |what: &str| format!("{key}={value}: {what}");
        match key {
            "gpus" => {
                self.gpus =
                    number(value, GPUS_MAX as u64).ok_or_else(|| wrong("a number from 0 to 64"))?
            }
            "memory" => {
                let sizes = value
                    .split(',')
                    .map(|s| size(s.trim()).filter(|&n| n <= MEMORY_MAX));
                self.memory = sizes
                    .collect::<Option<Vec<_>>>()
                    .ok_or_else(|| wrong("sizes of at most 4TiB, such as 8GiB"))?;
            }
            "name" => {
                let names: Vec<_> = value.split(',').map(|s| s.trim().to_owned()).collect();
                if names.iter().any(|n| n.is_empty() || n.len() > 200) {
                    return Err(wrong("names of 1 to 200 bytes"));
                }
                self.names = names;
            }
            "node" => self.node = number(value, u64::MAX).ok_or_else(|| wrong("a number"))?,
            "uuids" => {
                let uuids = value.split(',').map(|s| uuid(s.trim()));
                self.uuids = uuids
                    .collect::<Option<Vec<_>>>()
                    .ok_or_else(|| wrong("UUIDs in the form 8-4-4-4-12"))?;
            }
            "cc" => self.cc = pair(value).ok_or_else(|| wrong("MAJOR.MINOR"))?,
            "granularity" => {
                let n = size(value)
                    .filter(|&n| (1..=GRANULARITY_MAX).contains(&n) && n.is_power_of_two());
                self.granularity = n.ok_or_else(|| wrong("a power of two from 1 to 1GiB"))?;
            }
            "vram" => {
                self.vram = match value {
                    "lazy" => Vram::Lazy,
                    "resident" => Vram::Resident,
                    _ => return Err(wrong("lazy or resident")),
                }
            }
            "memory-dir" => {
                self.memory_dir = match value {
                    "none" => None,
                    path if path.starts_with('/') => Some(PathBuf::from(path)),
                    _ => return Err(wrong("an absolute path, or none")),
                }
            }
            "api" => {
                let n = value.parse().ok().filter(|n| (11030..=99990).contains(n));
                self.api = n.ok_or_else(|| wrong("1000 × major + 10 × minor, at least 11030"))?;
            }
            "d2h" => {
                self.d2h = size(value)
                    .ok_or_else(|| wrong("bytes per second, such as 8GiB; 0 is unlimited"))?
            }
            "h2d" => {
                self.h2d = size(value)
                    .ok_or_else(|| wrong("bytes per second, such as 8GiB; 0 is unlimited"))?
            }
            "init-ms" => {
                self.init_ms =
                    number(value, 600_000).ok_or_else(|| wrong("milliseconds, at most 600000"))?
            }
            "seed" => self.seed = Some(number(value, u64::MAX).ok_or_else(|| wrong("a number"))?),
            "fault" if value == "none" => {}
            "fault" => self
                .faults
                .push(Rule::parse(value).map_err(|e| format!("{key}={value}: {e}"))?),
            "trace" if value == "none" => {}
            "trace" => self.trace = Some(PathBuf::from(value)),
            _ => return Err(format!("unknown key {key:?}")),
        }
        Ok(())
    }

    fn resolve(self) -> Result<Config, String> {
        let count = usize::try_from(self.gpus).map_err(|e| format!("gpus: {e}"))?;
        let mut gpus = Vec::with_capacity(count);
        for ordinal in 0..count {
            gpus.push(GpuConfig {
                name: listed(&self.names, ordinal).clone(),
                uuid: self
                    .uuids
                    .get(ordinal)
                    .copied()
                    .unwrap_or_else(|| derived_uuid(self.node, ordinal)),
                memory: *listed(&self.memory, ordinal),
            });
        }
        for (i, gpu) in gpus.iter().enumerate() {
            if gpus[..i].iter().any(|other| other.uuid == gpu.uuid) {
                return Err(format!("uuids: GPU {i} has the UUID of another"));
            }
        }
        Ok(Config {
            gpus,
            cc: self.cc,
            granularity: self.granularity,
            vram: self.vram,
            memory_dir: self.memory_dir,
            api: self.api,
            d2h: self.d2h,
            h2d: self.h2d,
            init: Duration::from_millis(self.init_ms),
            seed: self.seed.unwrap_or_else(seed_of_now),
            faults: self.faults,
            trace: self.trace,
        })
    }
}

/// The `index`-th of a list whose last value repeats.
fn listed<T>(list: &[T], index: usize) -> &T {
    &list[index.min(list.len() - 1)]
}

fn number(text: &str, max: u64) -> Option<u64> {
    text.parse().ok().filter(|&n| n <= max)
}

/// A number of bytes: `4096`, `512KiB`, `2MiB`, `8GiB`, `1TiB`.
fn size(text: &str) -> Option<u64> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40), ("B", 0)];
    let (digits, shift) = units
        .iter()
        .find_map(|&(unit, shift)| Some((text.strip_suffix(unit)?, shift)))
        .unwrap_or((text, 0));
    digits.trim().parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn pair(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn uuid(text: &str) -> Option<[u8; 16]> {
    let text = text.strip_prefix("GPU-").unwrap_or(text);
    let groups: Vec<&str> = text.split('-').collect();
    if groups.iter().map(|g| g.len()).ne([8, 4, 4, 4, 12]) {
        return None;
    }
    let digits = groups.concat();
    if !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u128::from_str_radix(&digits, 16)
        .ok()
        .map(u128::to_be_bytes)
}

/// A UUID as `nvidia-smi` prints it behind `GPU-`.
pub(crate) fn uuid_text(uuid: [u8; 16]) -> String {
    let digits = format!("{:032x}", u128::from_be_bytes(uuid));
    [
        &digits[..8],
        &digits[8..12],
        &digits[12..16],
        &digits[16..20],
        &digits[20..],
    ]
    .join("-")
}

fn derived_uuid(node: u64, ordinal: usize) -> [u8; 16] {
    let first = mix(node ^ 0x656d_756c_6174_6564);
    let second = mix(first ^ ordinal as u64);
    let mut bytes = (u128::from(mix(second)) << 64 | u128::from(mix(second ^ first))).to_be_bytes();
    bytes[6] = bytes[6] & 0x0f | 0x80; // RFC 9562 version 8: made by the one who uses it
    bytes[8] = bytes[8] & 0x3f | 0x80;
    bytes
}

fn seed_of_now() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    mix(since.as_secs() << 30
        ^ u64::from(since.subsec_nanos())
        ^ u64::from(std::process::id()) << 40)
}

/// One step of SplitMix64: spreads any number over 64 bits.
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_hold_without_the_variable() {
        let config = parse("").unwrap();
        assert_eq!(config.gpus.len(), 1);
        assert_eq!(config.gpus[0].memory, 8 << 30);
        assert!(config.gpus[0].name.contains("not hardware"));
        assert_eq!(
            (config.api, config.granularity, config.cc),
            (13050, 2 << 20, (0, 1))
        );
    }

    #[test]
    fn lists_repeat_their_last_value() {
        let config = parse(" gpus=3 ; memory = 1GiB, 512MiB ; name=A,B;").unwrap();
        let memory: Vec<u64> = config.gpus.iter().map(|g| g.memory).collect();
        assert_eq!(memory, [1 << 30, 512 << 20, 512 << 20]);
        assert_eq!(config.gpus[2].name, "B");
    }

    #[test]
    fn nodes_have_different_gpus_and_the_same_node_the_same() {
        let uuids = |text: &str| {
            parse(text)
                .unwrap()
                .gpus
                .iter()
                .map(|g| g.uuid)
                .collect::<Vec<_>>()
        };
        assert_eq!(uuids("gpus=2;node=1"), uuids("gpus=2;node=1"));
        assert_ne!(uuids("gpus=2;node=1"), uuids("gpus=2;node=2"));
        assert_eq!(uuids("gpus=2")[0], uuids("gpus=1")[0]);
    }

    #[test]
    fn uuids_read_as_they_print() {
        let text = "01234567-89ab-cdef-0123-456789abcdef";
        let config = parse(&format!("uuids={text}")).unwrap();
        assert_eq!(uuid_text(config.gpus[0].uuid), text);
    }

    #[test]
    fn wrong_text_names_its_key() {
        for (text, part) in [
            ("gpu=1", "unknown key \"gpu\""),
            ("gpus", "\"gpus\" is not key=value"),
            ("gpus=65", "gpus=65"),
            ("granularity=3", "granularity=3"),
            ("memory=5TiB", "memory=5TiB"),
            ("uuids=0123", "uuids=0123"),
            ("vram=gone", "vram=gone"),
            ("memory-dir=here", "memory-dir=here"),
            ("fault=cuInit", "fault=cuInit"),
            (
                "gpus=2;uuids=01234567-89ab-cdef-0123-456789abcdef,01234567-89ab-cdef-0123-456789abcdef",
                "uuids: GPU 1",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
