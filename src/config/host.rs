//! `[host]`: what of a process tree is saved beside the memory of its GPUs, and how CRIU is asked for it.
//!
//! In: the table as written. Out: checked values. What can fail: a value out of range; the error names it.

use std::path::PathBuf;

use super::ConfigError;
use super::raw::RawHost;
use super::value::Setting;

/// Options of CRIU that we set ourselves.
const OURS: &[&str] = &[
    "-D",
    "-t",
    "-o",
    "--images-dir",
    "--tree",
    "--log-file",
    "--stream",
    "--leave-running",
    "--leave-stopped",
    "--pidfile",
    "--restore-detached",
    "--timeout",
    "--libdir",
    "--inherit-fd",
    "--shell-job",
    "-j",
    "--tcp-established",
    "--tcp-close",
    "--external",
];

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostConfig {
    /// Which saves are of the whole tree.
    pub save: HostSave,
    /// The program.
    pub criu: PathBuf,
    /// What becomes of TCP connections.
    pub tcp: TcpPolicy,
    /// Files that the tree writes, and that have grown since it was saved, are cut at a restore.
    pub truncates: bool,
    /// The tree belongs to a terminal's session that is not saved.
    pub shell_job: bool,
    /// What CRIU is to take for external (`--external`), as it words it.
    pub external: Vec<String>,
    /// Further options of CRIU, at dumps and restores.
    pub arguments: Vec<String>,
}

/// Which saves are of the whole process tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HostSave {
    /// Those that cannot be without: of drivers that have no custom storage.
    #[default]
    Auto,
    /// All.
    Always,
    /// None.
    Never,
}

/// What becomes of TCP connections of a tree that is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TcpPolicy {
    /// A tree that has one is not saved.
    #[default]
    Refuse,
    /// They are closed when it comes back.
    Close,
    /// They are saved and go on; the address must be the same.
    Established,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            save: HostSave::default(),
            criu: PathBuf::from("criu"),
            tcp: TcpPolicy::default(),
            truncates: false,
            shell_job: false,
            external: Vec::new(),
            arguments: Vec::new(),
        }
    }
}

impl HostConfig {
    pub(super) fn resolve(raw: &RawHost) -> Result<Self, ConfigError> {
        let saves = [
            ("auto", HostSave::Auto),
            ("always", HostSave::Always),
            ("never", HostSave::Never),
        ];
        let save = Setting::file("host.save", raw.save.as_deref());
        let policies = [
            ("refuse", TcpPolicy::Refuse),
            ("close", TcpPolicy::Close),
            ("established", TcpPolicy::Established),
        ];
        let tcp = Setting::file("host.tcp", raw.tcp.as_deref());
        let grown = Setting::file("host.grown_files", raw.grown_files.as_deref());
        let defaults = Self::default();
        let criu = match Setting::file("host.criu", raw.criu.as_deref()) {
            Some(path) if path.value.is_empty() || path.value.starts_with('-') => {
                return Err(path.invalid("a program's name, or its path"));
            }
            Some(path) => PathBuf::from(path.value),
            None => defaults.criu,
        };
        let arguments = raw.arguments.clone().unwrap_or_default();
        for argument in &arguments {
            let name = argument.split('=').next().unwrap_or_default();
            if OURS.contains(&name) {
                let argument = Setting::file("host.arguments", Some(argument));
                let expected = "an option of CRIU that ckptstream does not set itself";
                return Err(match argument {
                    Some(argument) => argument.invalid(expected),
                    None => unreachable!("a setting with a value is one"),
                });
            }
        }
        Ok(Self {
            save: save
                .map(|word| word.word(&saves))
                .transpose()?
                .unwrap_or_default(),
            criu,
            tcp: tcp
                .map(|word| word.word(&policies))
                .transpose()?
                .unwrap_or_default(),
            truncates: grown
                .map(|word| word.word(&[("refuse", false), ("truncate", true)]))
                .transpose()?
                .unwrap_or(false),
            shell_job: raw.shell_job.unwrap_or(false),
            external: raw.external.clone().unwrap_or_default(),
            arguments,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(raw: RawHost) -> Result<HostConfig, String> {
        HostConfig::resolve(&raw).map_err(|error| error.to_string())
    }

    #[test]
    fn options_that_are_ours_are_refused() {
        let with = |argument: &str| {
            resolve(RawHost {
                arguments: Some(vec![argument.to_owned()]),
                ..RawHost::default()
            })
        };
        assert!(with("--file-locks").is_ok());
        for ours in ["--tree", "--images-dir=/tmp", "-D"] {
            let refused = with(ours).unwrap_err();
            assert!(refused.contains("host.arguments") && refused.contains(ours));
        }
    }

    #[test]
    fn words_that_are_none_are_refused_with_those_that_are() {
        let refused = resolve(RawHost {
            save: Some("sometimes".to_owned()),
            ..RawHost::default()
        });
        assert!(refused.unwrap_err().contains("always"));
        let refused = resolve(RawHost {
            tcp: Some("keep".to_owned()),
            ..RawHost::default()
        });
        assert!(refused.unwrap_err().contains("established"));
    }
}
