//! A machine with emulated GPUs.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

/// Settings of the emulated driver, the same for every process on one machine. GPU memory is shared by the processes of a node and by no others.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    settings: String,
}

impl Node {
    /// A machine that no other test uses, with GPUs as `EMULATED_CUDA` describes them, such as `gpus=2;memory=64MiB;granularity=1`.
    pub(crate) fn new(settings: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = (u64::from(std::process::id()) << 16) + NEXT.fetch_add(1, Ordering::Relaxed);
        Self {
            settings: format!("node={number};{settings}"),
        }
    }

    /// The same machine as one process sees it: with further settings, such as a `fault`, a `trace`, or a later value of any other key.
    pub(crate) fn with(&self, settings: &str) -> Self {
        Self {
            settings: format!("{};{settings}", self.settings),
        }
    }

    /// Lets `command` find the emulated driver and this machine.
    pub(crate) fn apply(&self, command: &mut Command) {
        command
            .env("LD_LIBRARY_PATH", driver_dir())
            .env("EMULATED_CUDA", &self.settings);
    }
}

fn driver_dir() -> PathBuf {
    std::env::var_os("EMULATED_DRIVER_DIR")
        .expect("EMULATED_DRIVER_DIR is not set: run scripts/test.sh, which builds the emulated driver and says where it is")
        .into()
}
