//! Whether the store would take a save of the job, looked at while nothing is to be saved: so that an outage is known before the notice, and connections and credentials are fresh.
//!
//! In: the job's log, read every `preempt.probe_every`. Out: what `status` and the metrics tell of the store. What can fail: the reading, which is what is looked for.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::UnderWay;
use super::desk::Report;
use crate::error::one_line;
use crate::ownership::OwnershipError;
use crate::session::Session;

/// A store that does not answer within this time is out of reach.
const ANSWERS_WITHIN: Duration = Duration::from_secs(20);

/// Looks as long as it lives.
#[derive(Debug)]
pub(super) struct Lookout {
    trouble: watch::Receiver<Option<String>>,
    _looking: UnderWay,
}

impl Lookout {
    /// Looks from now on. The job is opened already.
    pub(super) fn begin(session: &Session, reporter: Arc<watch::Sender<Report>>) -> Self {
        let (tell, trouble) = watch::channel(None);
        let (session, every) = (session.clone(), session.config.preempt.probe_every);
        let looking = session.runtime.clone().spawn(async move {
            loop {
                tokio::time::sleep(every).await;
                let seen = look(&session).await.err();
                if *tell.borrow() != seen {
                    match &seen {
                        Some(why) => tracing::error!("a save would fail now: {why}"),
                        None => tracing::warn!("the store is back, and would take a save"),
                    }
                }
                reporter.send_modify(|report| report.store_trouble.clone_from(&seen));
                tell.send_replace(seen);
            }
        });
        Self {
            trouble,
            _looking: UnderWay(looking),
        }
    }

    /// It answered the last time, and the job was ours.
    pub(super) fn sees_the_store(&self) -> bool {
        self.trouble.borrow().is_none()
    }
}

/// Reads the job's log. Why it cannot be read, or whose the job is.
async fn look(session: &Session) -> Result<(), String> {
    let Some(ours) = &session.ours else {
        return Ok(());
    };
    // A copy: a save must not wait for a store that does not answer.
    let mut ours = ours.lock().await.clone();
    let looking = ours.must_be_ours(&*session.store_for_clean_up);
    match tokio::time::timeout(ANSWERS_WITHIN, looking).await {
        Ok(Ok(_log)) => Ok(()),
        Ok(Err(error @ OwnershipError::Fenced { .. })) => Err(format!(
            "{}; this process of the job can save nothing any more",
            one_line(&error)
        )),
        Ok(Err(error)) => Err(one_line(&error)),
        Err(_elapsed) => Err(format!(
            "the store does not answer within {ANSWERS_WITHIN:?}"
        )),
    }
}
