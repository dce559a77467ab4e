//! A file that appears: the notice stands as long as it is there.
//!
//! In: a path, looked at every `preempt.poll`. Out: a notice; the file may hold the time that is left, such as `90s`, counted from the look that found it. What can fail: nobody can tell whether it is there, or a look does not return, which makes the source blind. Text that is no time is
//! a notice all the same, and so is what cannot be read: a directory, a FIFO, a file that we may not open.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};

use super::{Board, Sight};
use crate::config::PreemptConfig;

const SOURCE: &str = "file";

/// Longest file that is read, in bytes.
const LEN_MAX: u64 = 1024;

/// A look that takes longer is one that failed: a network's file system may not answer.
const LOOK_WITHIN: Duration = Duration::from_secs(2);

/// Looks for ever.
pub(super) async fn watch(path: PathBuf, config: PreemptConfig, board: Board) {
    watch_by(look, path, config, board).await;
}

async fn watch_by(
    look: fn(&Path) -> io::Result<Option<String>>,
    path: PathBuf,
    config: PreemptConfig,
    board: Board,
) {
    let mut sight = Sight::new(&board, SOURCE);
    let mut ticks = super::every(config.poll);
    let mut under_way = None;
    loop {
        ticks.tick().await;
        // One that does not return is waited for on and on: another one would hang beside it.
        let looking = under_way.get_or_insert_with(|| {
            let path = path.clone();
            tokio::task::spawn_blocking(move || look(&path))
        });
        let Ok(seen) = tokio::time::timeout(LOOK_WITHIN, looking).await else {
            sight.failed(&format!("{}: no answer in {LOOK_WITHIN:?}", path.display()));
            continue;
        };
        under_way = None;
        match seen.unwrap_or_else(|error| Err(io::Error::other(error))) {
            Ok(Some(text)) => {
                sight.looked();
                let left = time_left(&text).unwrap_or(config.notice);
                board.raise(SOURCE, left, &format!("{} is there", path.display()));
            }
            Ok(None) => {
                sight.looked();
                board.withdraw(SOURCE, &format!("{} is gone", path.display()));
            }
            Err(error) => sight.failed(&format!("{}: {error}", path.display())),
        }
    }
}

/// What stands in it; `None` where there is no such file.
fn look(path: &Path) -> io::Result<Option<String>> {
    let gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let text = match std::fs::metadata(path) {
        // A FIFO is not waited for, and a device not read.
        Ok(metadata) if !metadata.is_file() => Ok(String::new()),
        Ok(_) => text_of(path),
        Err(error) if gone(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    match text {
        Ok(text) => Ok(Some(text)),
        Err(error) if gone(&error) => Ok(None),
        // It is there, which is what counts.
        Err(error) => {
            tracing::warn!("{} cannot be read: {error}", path.display());
            Ok(Some(String::new()))
        }
    }
}

fn text_of(path: &Path) -> io::Result<String> {
    // By now it may be something that would have us wait.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let mut bytes = Vec::new();
    file.take(LEN_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn time_left(text: &str) -> Option<Duration> {
    let text = text.trim();
    if text.is_empty() {
        return None;
    }
    let left = humantime::parse_duration(text).ok();
    if left.is_none() {
        tracing::warn!("{text:?} is no time such as \"90s\": preempt.notice is taken");
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Environment, Overrides, RawConfig};

    fn config(text: &str) -> PreemptConfig {
        let overrides = Overrides {
            job: Some("train".to_owned()),
            store: Some("s3://bucket".to_owned()),
            ..Overrides::default()
        };
        let raw = RawConfig::parse(text).unwrap();
        let config = Config::resolve(&overrides, &raw, &Environment::read());
        config.unwrap().preempt
    }

    #[tokio::test]
    async fn the_notice_stands_as_long_as_the_file_does() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notice");
        let board = Board::default();
        let config = config("[preempt]\npoll = \"100ms\"\nnotice = \"40s\"\n");
        let mut changes = board.subscribe();
        let looking = tokio::spawn(watch(path.clone(), config, board.clone()));
        for (text, least, most) in [
            ("", 35, 40),
            ("90s\n", 85, 90),
            ("soon", 35, 40),
            ("1s", 0, 1),
        ] {
            std::fs::write(&path, text).unwrap();
            changes.changed().await.unwrap();
            let gone_at = board.standing().earliest().unwrap().gone_at;
            let left = gone_at.saturating_duration_since(std::time::Instant::now());
            assert!((least..=most).contains(&left.as_secs()), "{text}: {left:?}");
            std::fs::remove_file(&path).unwrap();
            changes.changed().await.unwrap();
            assert!(board.standing().earliest().is_none(), "{text}");
        }
        // There is no directory to look into: no notice, and no failure.
        drop(dir);
        tokio::time::sleep(Duration::from_millis(400)).await;
        assert_eq!(board.standing().blind().count(), 0);
        looking.abort();
    }

    #[tokio::test]
    async fn a_file_that_cannot_be_looked_at_makes_it_blind() {
        let dir = tempfile::tempdir().unwrap();
        // Not a directory: ENOTDIR, for everybody.
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let board = Board::default();
        let mut changes = board.subscribe();
        let looking = tokio::spawn(watch(
            file.join("notice"),
            config("[preempt]\npoll = \"100ms\"\n"),
            board.clone(),
        ));
        changes.changed().await.unwrap();
        assert_eq!(board.standing().blind().next().unwrap().0, SOURCE);
        assert!(board.standing().earliest().is_none());
        looking.abort();
    }

    #[tokio::test]
    async fn a_look_that_does_not_return_makes_it_blind_until_it_does() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notice");
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let board = Board::default();
        let mut changes = board.subscribe();
        let looking = tokio::spawn(watch_by(
            // Waits for somebody who writes.
            |path| std::fs::read_to_string(path).map(Some),
            path.clone(),
            config("[preempt]\npoll = \"100ms\"\n"),
            board.clone(),
        ));
        changes.changed().await.unwrap();
        let standing = board.standing();
        let (_, why) = standing.blind().next().unwrap();
        assert!(why.contains("no answer in 2s"), "{why}");
        std::fs::write(&path, "10min").unwrap();
        let is_heard = |standing: &crate::preempt::Standing| {
            standing.blind().count() == 0 && standing.earliest().is_some()
        };
        changes.wait_for(is_heard).await.unwrap();
        looking.abort();
        assert!(looking.await.unwrap_err().is_cancelled());
        // The runtime waits for a look that is under way: there is somebody who writes, and ends.
        let writer = File::options().read(true).write(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        drop(writer);
    }
}
