//! What `run` and `watch` go by: the second half of `[job]`, and `[preempt]`.
//!
//! In: the two tables as written. Out: checked values. What can fail: a value out of range, a source without what it needs; the error names the key.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;

use crate::error::ExitCode;

use super::raw::{RawJob, RawMetrics, RawPreempt};
use super::value::{self, Setting};
use super::{ConfigError, StoreTimes};

/// How a supervised job is started, restored and ended (`[job]`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunConfig {
    /// Program and arguments of a process that comes up suspended, for an image to be put into. Empty: there is none.
    pub restore_command: Vec<String>,
    /// How long that process may take to come up.
    pub restore_timeout: Duration,
    /// Exit status of a run whose job was saved and ended.
    pub requeue_exit_code: u8,
    /// Supervise a job, too, whose images cannot be restored when its process is gone; it is not ended then.
    pub allow_gpu_only: bool,
    /// Time between two saves without a notice; `None` saves on notices only.
    pub interval: Option<Duration>,
    /// Of the job's time, in per cent, that these saves may take.
    pub interval_share: u32,
}

/// Where `run` and `watch` tell how they do (`[metrics]`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MetricsConfig {
    /// Address on which Prometheus finds them.
    pub listen: Option<SocketAddr>,
    /// File that a node exporter reads.
    pub textfile: Option<PathBuf>,
}

impl MetricsConfig {
    pub(super) fn resolve(raw: &RawMetrics) -> Result<Self, ConfigError> {
        let listen = Setting::file("metrics.listen", raw.listen.as_deref());
        let listen = listen.map(|text| {
            let address = text.value.parse().ok();
            address.ok_or_else(|| text.invalid("an address and a port, such as \"127.0.0.1:9400\""))
        });
        let textfile = Setting::file("metrics.textfile", raw.textfile.as_deref());
        Ok(Self {
            listen: listen.transpose()?,
            textfile: textfile.map(|text| text.file_path()).transpose()?,
        })
    }
}

/// Who says that the node goes away, and what is done then (`[preempt]`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreemptConfig {
    /// What is watched, each once.
    pub sources: Vec<Source>,
    /// Signals that are notices.
    pub signals: Vec<Signal>,
    /// Time from a notice to the end of the node where the notice does not say.
    pub notice: Duration,
    /// The save has to be over so long before that.
    pub margin: Duration,
    /// What is done about a save that does not fit.
    pub policy: DeadlinePolicy,
    /// When the GPUs' contexts are made.
    pub contexts: Contexts,
    /// Do a drill when the job first uses its GPUs.
    pub drill: bool,
    /// The file of [`Source::File`].
    pub file: Option<PathBuf>,
    /// The socket of [`Source::Socket`]; `None` is one in the state directory.
    pub socket: Option<PathBuf>,
    /// Pause between two looks at a file or at a metadata server.
    pub poll: Duration,
    /// Pause between two looks at the store.
    pub probe_every: Duration,
    /// Metadata server of [`Source::Aws`].
    pub aws_url: String,
    /// Metadata server of [`Source::Gcp`].
    pub gcp_url: String,
    /// Metadata server of [`Source::Azure`].
    pub azure_url: String,
    /// This machine's name in Azure's events; `None` asks the metadata server.
    pub azure_vm: Option<String>,
}

/// Who says that the node goes away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A signal to ckptstream.
    Signals,
    /// A file that appears.
    File,
    /// `ckptstream notify`.
    Socket,
    /// EC2's instance metadata.
    Aws,
    /// Compute Engine's metadata server.
    Gcp,
    /// Azure's scheduled events.
    Azure,
}

/// What is done about a save that does not fit into the notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeadlinePolicy {
    /// Nothing: the job has the time for itself (exit 5).
    Refuse,
    /// It goes to the spill first, and is uploaded from there.
    Spill,
    /// It is begun all the same.
    Try,
}

/// When the GPUs' contexts are made: each takes some hundred MB of GPU memory from the job, and a fraction of a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contexts {
    /// As soon as the job uses its GPUs.
    Eager,
    /// When a notice has come.
    AtNotice,
}

const SOURCES: [(&str, Source); 6] = [
    ("signals", Source::Signals),
    ("file", Source::File),
    ("socket", Source::Socket),
    ("aws", Source::Aws),
    ("gcp", Source::Gcp),
    ("azure", Source::Azure),
];

/// Signals that can be a notice. SIGKILL and SIGSTOP cannot be caught, SIGCONT and SIGHUP come with other things.
pub(crate) const NOTICE_SIGNALS: [(&str, Signal); 7] = [
    ("SIGTERM", Signal::TERM),
    ("SIGUSR1", Signal::USR1),
    ("SIGUSR2", Signal::USR2),
    ("SIGINT", Signal::INT),
    ("SIGQUIT", Signal::QUIT),
    ("SIGXCPU", Signal::XCPU),
    ("SIGPWR", Signal::POWER),
];

impl RunConfig {
    pub(super) fn resolve(raw: &RawJob) -> Result<Self, ConfigError> {
        let restore_command = raw.restore_command.clone().unwrap_or_default();
        if raw.restore_command.is_some() && restore_command.first().is_none_or(String::is_empty) {
            return Err(ConfigError::Invalid {
                name: "job.restore_command".to_owned(),
                value: restore_command.join(" "),
                expected: "expected a program and its arguments, as a list".to_owned(),
            });
        }
        let time = |key: &'static str, text: Option<&str>, least: u64, most: u64| {
            let text = Setting::file(key, text);
            text.map(|text| text.time(Duration::from_secs(least), Duration::from_secs(most)))
                .transpose()
        };
        let day = 24 * 3600;
        let code = value::count(
            "job.requeue_exit_code",
            raw.requeue_exit_code,
            1,
            u32::from(ExitCode::VERDICTS_FROM) - 1,
        )?;
        Ok(Self {
            restore_command,
            restore_timeout: time(
                "job.restore_timeout",
                raw.restore_timeout.as_deref(),
                1,
                day,
            )?
            .unwrap_or(Duration::from_secs(300)),
            requeue_exit_code: code.and_then(|code| u8::try_from(code).ok()).unwrap_or(75),
            allow_gpu_only: raw.allow_gpu_only.unwrap_or(false),
            interval: time("job.interval", raw.interval.as_deref(), 1, 30 * day)?,
            interval_share: value::count("job.interval_share", raw.interval_share, 1, 100)?
                .unwrap_or(10),
        })
    }
}

impl PreemptConfig {
    pub(super) fn resolve(raw: &RawPreempt, has_spill: bool) -> Result<Self, ConfigError> {
        let sources = words("preempt.sources", raw.sources.as_deref(), &SOURCES)?;
        let sources = sources.unwrap_or_else(|| vec![Source::Signals, Source::Socket]);
        let signals = words("preempt.signals", raw.signals.as_deref(), &NOTICE_SIGNALS)?;
        let signals = signals.unwrap_or_else(|| vec![Signal::TERM, Signal::USR1]);
        let time = |key: &'static str, text: Option<&str>, least: Duration, most: u64| {
            let text = Setting::file(key, text);
            text.map(|text| text.time(least, Duration::from_secs(most)))
                .transpose()
        };
        let notice = time(
            "preempt.notice",
            raw.notice.as_deref(),
            Duration::from_secs(1),
            7 * 24 * 3600,
        )?
        .unwrap_or(Duration::from_secs(30));
        let margin_setting = Setting::file("preempt.margin", raw.margin.as_deref());
        let margin = match &margin_setting {
            Some(text) => text.time(Duration::ZERO, Duration::from_secs(3600))?,
            None => Duration::from_secs(2).min(notice / 4),
        };
        if let Some(setting) = margin_setting.filter(|_| margin >= notice) {
            return Err(setting.invalid(format!("less than preempt.notice, which is {notice:?}")));
        }
        let policy_setting =
            Setting::file("preempt.deadline_policy", raw.deadline_policy.as_deref());
        let policies = [
            ("refuse", DeadlinePolicy::Refuse),
            ("spill", DeadlinePolicy::Spill),
            ("try", DeadlinePolicy::Try),
        ];
        let policy = policy_setting
            .as_ref()
            .map(|word| word.word(&policies))
            .transpose()?;
        if let (Some(DeadlinePolicy::Spill), Some(setting), false) =
            (policy, &policy_setting, has_spill)
        {
            return Err(setting.invalid("this needs a directory: set spill.path"));
        }
        let contexts_setting = Setting::file("preempt.contexts", raw.contexts.as_deref());
        let contexts = contexts_setting
            .as_ref()
            .map(|word| {
                word.word(&[
                    ("eager", Contexts::Eager),
                    ("at-notice", Contexts::AtNotice),
                ])
            })
            .transpose()?;
        let drill = raw.drill.unwrap_or(false);
        if let (Some(Contexts::AtNotice), Some(setting), true) = (contexts, contexts_setting, drill)
        {
            return Err(ConfigError::Conflict {
                first: "preempt.drill = true".to_owned(),
                second: setting.to_string(),
                why: "a drill takes contexts from the job before the notice",
            });
        }
        let path = |key: &'static str, text: Option<&str>| {
            let text = Setting::file(key, text);
            text.map(|text| text.file_path()).transpose()
        };
        let file = path("preempt.file", raw.file.as_deref())?;
        if sources.contains(&Source::File) && file.is_none() {
            return Err(ConfigError::Invalid {
                name: "preempt.sources".to_owned(),
                value: "file".to_owned(),
                expected: "this needs a path: set preempt.file".to_owned(),
            });
        }
        let url =
            |key: &'static str, text: Option<&str>, usual: &str| match Setting::file(key, text) {
                Some(text) => {
                    let url = text.http_url()?;
                    match url.scheme() {
                        "http" => Ok(url.as_str().trim_end_matches('/').to_owned()),
                        _ => Err(text.invalid("an http:// URL: metadata servers speak no TLS")),
                    }
                }
                None => Ok(usual.to_owned()),
            };
        Ok(Self {
            sources,
            signals,
            notice,
            margin,
            policy: policy.unwrap_or(DeadlinePolicy::Refuse),
            contexts: contexts.unwrap_or(Contexts::Eager),
            drill,
            file,
            socket: path("preempt.socket", raw.socket.as_deref())?,
            poll: time("preempt.poll", raw.poll.as_deref(), StoreTimes::LEAST, 60)?
                .unwrap_or(Duration::from_secs(2)),
            probe_every: time(
                "preempt.probe_every",
                raw.probe_every.as_deref(),
                StoreTimes::LEAST,
                24 * 3600,
            )?
            .unwrap_or(Duration::from_secs(300)),
            aws_url: url(
                "preempt.aws_url",
                raw.aws_url.as_deref(),
                "http://169.254.169.254",
            )?,
            gcp_url: url(
                "preempt.gcp_url",
                raw.gcp_url.as_deref(),
                "http://metadata.google.internal",
            )?,
            azure_url: url(
                "preempt.azure_url",
                raw.azure_url.as_deref(),
                "http://169.254.169.254",
            )?,
            azure_vm: azure_vm(raw)?,
        })
    }
}

/// The name of this machine in Azure's events.
fn azure_vm(raw: &RawPreempt) -> Result<Option<String>, ConfigError> {
    match Setting::file("preempt.azure_vm", raw.azure_vm.as_deref()) {
        Some(name) if name.value.trim().is_empty() => Err(name.invalid("the name of a machine")),
        name => Ok(name.map(|name| name.value)),
    }
}

/// A list of words, each once; not an empty one.
fn words<T: Copy + PartialEq>(
    key: &'static str,
    written: Option<&[String]>,
    known: &[(&str, T)],
) -> Result<Option<Vec<T>>, ConfigError> {
    let Some(written) = written else {
        return Ok(None);
    };
    let mut found = Vec::new();
    for text in written {
        let setting = Setting::file(key, Some(text.as_str()));
        let word = setting.map(|setting| setting.word(known)).transpose()?;
        found.extend(word.filter(|word| !found.contains(word)));
    }
    if found.is_empty() {
        let known: Vec<String> = known.iter().map(|(word, _)| format!("{word:?}")).collect();
        return Err(ConfigError::Invalid {
            name: key.to_owned(),
            value: "[]".to_owned(),
            expected: format!("expected at least one of {}", known.join(", ")),
        });
    }
    Ok(Some(found))
}
