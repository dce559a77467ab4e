//! A file that appears: the notice stands as long as it is there.
//!
//! In: a path, looked at every `preempt.poll`. Out: a notice; the file may hold the time that is left, such as `90s`, counted from the look that found it. What can fail: a file that is there and cannot be looked at, which makes the source blind. Text that is no time is
//! a notice all the same.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Board, Sight};
use crate::config::PreemptConfig;

const SOURCE: &str = "file";

/// Longest file that is read, in bytes.
const LEN_MAX: u64 = 1024;

/// Looks for ever.
pub(super) async fn watch(path: PathBuf, config: PreemptConfig, board: Board) {
    let mut sight = Sight::new(&board, SOURCE);
    let mut ticks = super::every(config.poll);
    loop {
        ticks.tick().await;
        let looking = path.clone();
        let seen = tokio::task::spawn_blocking(move || look(&looking)).await;
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
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    match file.take(LEN_MAX).read_to_end(&mut bytes) {
        Ok(_) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        // It is there, which is what counts.
        Err(error) if error.kind() == io::ErrorKind::IsADirectory => Ok(Some(String::new())),
        Err(error) => Err(error),
    }
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
}
