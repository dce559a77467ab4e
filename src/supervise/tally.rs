//! Notices of a job over all its lives, in the store: a node that goes away takes its counters along.
//!
//! In: a notice, and what became of it. Out: `<job>/notices/<nonce>.json` when it is heard, `<nonce>.verdict.json` when it is over; a count of both. What can fail: the store; that is told, and changes nothing about the save.
//!
//! A notice without a verdict was missed: the node was gone before the save was over.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::desk::Verdict;
use crate::config::JobName;
use crate::preempt::Notice;
use crate::store::{Key, Store, StoreError};
use crate::writer::{ProcessIdentity, now_ms, random_hex};

/// Notices of all lives of a job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ever {
    /// Heard.
    pub heard: u64,
    /// Not followed by an image.
    pub missed: u64,
}

const SUFFIX: &str = ".verdict.json";

fn key(job: &JobName, name: &str) -> Result<Key, StoreError> {
    let relative = format!("notices/{name}");
    Key::of_job(job, &relative).map_err(|error| StoreError::Mismatch {
        operation: "PutObject",
        key: relative.clone(),
        what: error.to_string(),
    })
}

/// Writes down that a notice was heard, and returns its name.
pub(super) async fn heard(
    store: &dyn Store,
    job: &JobName,
    notice: &Notice,
) -> Result<String, StoreError> {
    let nonce = random_hex::<8>();
    let body = serde_json::json!({
        "source": notice.source,
        "text": notice.text,
        "heard_ms": now_ms(),
        "left_seconds": notice.gone_at.saturating_duration_since(notice.heard_at).as_secs_f64(),
        "by": ProcessIdentity::ours().ok(),
    });
    let key = key(job, &format!("{nonce}.json"))?;
    store
        .put_if_absent(&key, Bytes::from(body.to_string()))
        .await?;
    Ok(nonce)
}

/// Writes down what became of it: of a verdict other than 0 in the name already, so that a listing is enough to count.
pub(super) async fn over(
    store: &dyn Store,
    job: &JobName,
    nonce: &str,
    verdict: &Verdict,
) -> Result<(), StoreError> {
    let key = key(job, &format!("{nonce}.{}{SUFFIX}", verdict.exit_code))?;
    let body = serde_json::json!(verdict);
    store
        .put_if_absent(&key, Bytes::from(body.to_string()))
        .await?;
    Ok(())
}

/// Counts them. For people: no decision rests on it.
pub(super) async fn ever(store: &dyn Store, job: &JobName) -> Result<Ever, StoreError> {
    let listed = store.list(&format!("{job}/notices/")).await?;
    let saved = format!(".0{SUFFIX}");
    let names = || listed.iter().map(|listed| listed.key.as_str());
    let heard = names().filter(|name| !name.ends_with(SUFFIX)).count() as u64;
    let committed = names().filter(|name| name.ends_with(&saved)).count() as u64;
    Ok(Ever {
        heard,
        missed: heard.saturating_sub(committed),
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::store::memory::MemoryStore;

    #[tokio::test]
    async fn what_has_no_verdict_or_another_than_saved_was_missed() {
        let store = MemoryStore::new();
        let job = JobName::new("train").unwrap();
        assert_eq!(ever(&store, &job).await.unwrap(), Ever::default());
        let notice = Notice {
            source: "signal",
            text: "SIGTERM".to_owned(),
            heard_at: Instant::now(),
            gone_at: Instant::now() + Duration::from_secs(30),
        };
        let mut nonces = Vec::new();
        for _ in 0..4 {
            nonces.push(heard(&store, &job, &notice).await.unwrap());
        }
        for (nonce, exit_code) in nonces.iter().zip([0, 0, 5]) {
            let verdict = Verdict {
                exit_code,
                ..Verdict::default()
            };
            over(&store, &job, nonce, &verdict).await.unwrap();
        }
        let counted = ever(&store, &job).await.unwrap();
        assert_eq!(
            counted,
            Ever {
                heard: 4,
                missed: 2
            }
        );
    }
}
