//! The threads of a run.
//!
//! In: a stage's work. Out: a named thread of the scope, which joins it. What can fail: the work, by an error or a panic, and the start of the thread; each of them stops the
//! run. A thread may be refused after BEGIN too, so that is an error like any other.

use std::thread::{Builder, Scope};

use super::PipelineError;
use super::abort::Abort;

/// Starts a thread `stage-number`. One that cannot be had stops the run; its work is dropped, and with it its ends of the channels.
pub(super) fn spawn<'scope>(
    scope: &'scope Scope<'scope, '_>,
    abort: &'scope Abort,
    (stage, number): (&'static str, usize),
    work: impl FnOnce() -> Result<(), PipelineError> + Send + 'scope,
) {
    let name = format!("{stage}-{number}");
    let span = tracing::Span::current();
    let spawned = Builder::new()
        .name(name.clone())
        .spawn_scoped(scope, move || span.in_scope(|| abort.guard(stage, work)));
    if let Err(source) = spawned {
        abort.fail(PipelineError::Thread { name, source });
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::Arc;

    use tokio_util::sync::CancellationToken;

    use crate::codec::{Decoder, Encoder, Settings};
    use crate::driver::BufferPool;
    use crate::pipeline::{Destination, LoadResources, PipelineError, SaveResources, load, save};
    use crate::progress::Meter;
    use crate::store::memory::MemoryStore;

    const CHILD: &str = "TEST_WITHOUT_THREADS";

    #[test]
    fn a_thread_that_cannot_be_had_is_an_error_of_the_run() {
        if std::env::var_os(CHILD).is_some() {
            return run_without_threads();
        }
        // In a process of its own, whose stacks are longer than any address space: the system refuses threads as it does at a limit.
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--test-threads=1"])
            .arg("pipeline::stage::tests::a_thread_that_cannot_be_had_is_an_error_of_the_run")
            .env(CHILD, "1")
            .env("RUST_MIN_STACK", (1_u64 << 50).to_string())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(
            child.status.success() && said.contains("1 passed"),
            "{child:?}"
        );
    }

    fn run_without_threads() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_stack_size(2 << 20)
            .build()
            .unwrap();
        let pool = || BufferPool::new(2, 64, None).unwrap();
        let saved = save(
            Vec::new(),
            &mut [Encoder::new(Settings::default()).unwrap()],
            SaveResources {
                store: Arc::new(MemoryStore::new()),
                runtime: runtime.handle().clone(),
                chunk_len: 64,
                frame_buffers: pool(),
                part_len: 64,
                pack_buffers: pool(),
                parallelism: 1,
                meter: Meter::new(),
            },
        );
        let loaded = load(
            &[],
            LoadResources {
                patience: std::time::Duration::ZERO,
                store: Arc::new(MemoryStore::new()),
                runtime: runtime.handle().clone(),
                decoders: vec![Decoder::new().unwrap()],
                fetch_buffers: pool(),
                fetch_len_max: 64,
                meter: Meter::new(),
                cancel: CancellationToken::new(),
            },
            Destination::Nowhere,
        );
        for (error, wanted) in [
            (saved.unwrap_err(), "compress-0"),
            (loaded.unwrap_err(), "decompress-0"),
        ] {
            assert!(
                matches!(&error, PipelineError::Thread { name, .. } if name == wanted),
                "{error:?}"
            );
        }
    }
}
