//! The time that requests are signed with: this machine's, put right by what the store's answers say.
//!
//! In: the `Date` of every answer. Out: the time for the next signature. Nothing can fail. Stores refuse what is signed with a time 15 minutes off, and a node whose clock is wrong must be saved all the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

use aws_sdk_s3::config::interceptors::BeforeDeserializationInterceptorContextRef;
use aws_sdk_s3::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_s3::error::BoxError;
use aws_smithy_async::time::TimeSource;

use super::interceptors::date_of;

/// A difference that no store minds, and that answers which were long on their way make by themselves.
const ALLOWED_MS: i64 = 60_000;

/// See the module.
#[derive(Debug, Clone)]
pub(super) struct Clock(Arc<State>);

#[derive(Debug)]
struct State {
    /// The store, for messages.
    store: String,
    /// What is added to this machine's time, in milliseconds.
    offset_ms: AtomicI64,
}

impl Clock {
    pub(super) fn new(store: &str) -> Self {
        Self(Arc::new(State {
            store: store.to_owned(),
            offset_ms: AtomicI64::new(0),
        }))
    }

    /// Requests are signed with another time than this machine's.
    pub(super) fn is_put_right(&self) -> bool {
        self.0.offset_ms.load(Ordering::Relaxed) != 0
    }

    /// The store says that it is `date_ms` (milliseconds since 1970) when it is `here_ms` here.
    fn see(&self, date_ms: i64, here_ms: i64) {
        let found = date_ms.saturating_sub(here_ms);
        let used = self.0.offset_ms.load(Ordering::Relaxed);
        if found.saturating_sub(used).abs() <= ALLOWED_MS {
            return;
        }
        let right = match found.abs() <= ALLOWED_MS {
            true => 0,
            false => found,
        };
        // Of answers that come at once one tells it.
        let known = self.0.offset_ms.swap(right, Ordering::Relaxed);
        if known.saturating_sub(right).abs() <= ALLOWED_MS {
            return;
        }
        let store = &self.0.store;
        let by = Duration::from_secs(right.unsigned_abs() / 1000);
        let by = humantime::format_duration(by);
        match right {
            0 => {
                tracing::info!(
                    "this machine's clock is right again: requests to {store} are signed with it"
                );
            }
            ..0 => tracing::warn!(
                "this machine's clock is {by} ahead of that of {store}: requests are signed with the store's time from now on; set the clock (chrony, systemd-timesyncd)"
            ),
            _ => tracing::warn!(
                "this machine's clock is {by} behind that of {store}: requests are signed with the store's time from now on; set the clock (chrony, systemd-timesyncd)"
            ),
        }
    }
}

fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| {
        i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
    })
}

impl TimeSource for Clock {
    fn now(&self) -> SystemTime {
        let offset = self.0.offset_ms.load(Ordering::Relaxed);
        let by = Duration::from_millis(offset.unsigned_abs());
        let here = SystemTime::now();
        let there = match offset {
            0.. => here.checked_add(by),
            _ => here.checked_sub(by),
        };
        there.unwrap_or(here)
    }
}

impl Intercept for Clock {
    fn name(&self) -> &'static str {
        "Clock"
    }

    fn read_before_deserialization(
        &self,
        context: &BeforeDeserializationInterceptorContextRef<'_>,
        _components: &RuntimeComponents,
        _config: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let date = date_of(context);
        if let Some(date_ms) = date.and_then(|date| date.to_millis().ok()) {
            self.see(date_ms, now_ms());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_counts_from_a_minute_on_and_goes_when_it_is_gone() {
        let clock = Clock::new("s3://b/p");
        let offset = || clock.0.offset_ms.load(Ordering::Relaxed);
        clock.see(1_000_000, 1_060_000);
        assert_eq!((offset(), clock.is_put_right()), (0, false));
        clock.see(1_000_000, 2_200_000);
        assert_eq!((offset(), clock.is_put_right()), (-1_200_000, true));
        let behind = SystemTime::now().duration_since(clock.now()).unwrap();
        assert!(behind > Duration::from_secs(1199), "{behind:?}");
        // An answer that was a little longer on its way changes nothing.
        clock.see(1_000_000, 2_230_000);
        assert_eq!(offset(), -1_200_000);
        clock.see(9_000_000, 2_000_000);
        assert_eq!(offset(), 7_000_000);
        assert!(clock.now() > SystemTime::now() + Duration::from_secs(6999));
        clock.see(3_000_000, 3_001_000);
        assert_eq!((offset(), clock.is_put_right()), (0, false));
    }
}
