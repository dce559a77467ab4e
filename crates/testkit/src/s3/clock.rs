//! A server whose clock is not its client's.
//!
//! In: an offset. Out: refusals of requests that were signed too far from the server's time, and the `Date` of answers. Nothing can fail: a time that cannot be read is left to the S3 layer.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::{HeaderMap, HeaderValue, header};

/// S3's own limit.
const SKEW_MAX: Duration = Duration::from_secs(15 * 60);

/// The server's clock.
#[derive(Debug, Clone, Copy)]
pub(super) struct ServerClock {
    /// Seconds that it is ahead of this machine's; behind it, below 0.
    offset_s: i64,
}

impl ServerClock {
    pub(super) fn new(offset_s: i64) -> Self {
        Self { offset_s }
    }

    fn now(self) -> SystemTime {
        let by = Duration::from_secs(self.offset_s.unsigned_abs());
        let here = SystemTime::now();
        if self.offset_s < 0 {
            here - by
        } else {
            here + by
        }
    }

    /// Whether a request was signed too far from now.
    pub(super) fn refuses(self, headers: &HeaderMap) -> bool {
        let signed = headers.get("x-amz-date").and_then(|it| it.to_str().ok());
        let Some(signed) = signed.and_then(unix_s) else {
            return false;
        };
        let now = self.now().duration_since(UNIX_EPOCH).unwrap_or_default();
        now.as_secs().abs_diff(signed) > SKEW_MAX.as_secs()
    }

    /// Dates an answer, where no rule did.
    pub(super) fn stamp(self, headers: &mut HeaderMap) {
        let date = httpdate::fmt_http_date(self.now());
        if let Ok(date) = HeaderValue::try_from(date) {
            headers.entry(header::DATE).or_insert(date);
        }
    }
}

/// Seconds since 1970 of `20261201T061500Z`.
fn unix_s(text: &str) -> Option<u64> {
    let number = |range: std::ops::Range<usize>| text.get(range)?.parse::<u64>().ok();
    let (year, month, day) = (number(0..4)?, number(4..6)?, number(6..8)?);
    let (hour, minute, second) = (number(9..11)?, number(11..13)?, number(13..15)?);
    // Days from 1970 on, with years that begin in March.
    let (year, month) = match month {
        1 | 2 => (year.checked_sub(1)?, month + 9),
        3..=12 => (year, month - 3),
        _ => return None,
    };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day;
    let days = days.checked_sub(719_469)?;
    Some(((days * 24 + hour) * 60 + minute) * 60 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_signatures_are_read() {
        for (text, seconds) in [
            ("19700101T000000Z", 0),
            ("20000229T235959Z", 951_868_799),
            ("20130524T000000Z", 1_369_353_600),
            ("20261201T061500Z", 1_796_105_700),
        ] {
            assert_eq!(unix_s(text), Some(seconds), "{text}");
        }
        for bad in ["", "2026", "20261301T000000Z", "yesterday at noon"] {
            assert_eq!(unix_s(bad), None, "{bad}");
        }
    }
}
