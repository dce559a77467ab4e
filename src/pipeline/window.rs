//! How many parts are in flight: found by trying.
//!
//! In: parts as they are acknowledged, whether more are waiting, and the store's requests to slow down; the time comes with them. Out: the limit. Nothing can fail.
//!
//! The limit starts where nearly every network is busy and no store minds. A *round* is as many acknowledged parts as the limit was at its start. While parts wait for their turn, a larger limit is tried:
//! twice as large at first, an eighth more once that was too much. A round to settle, a round to measure: when the rate has grown by a fraction of what the limit has, the next one
//! is tried, otherwise the limit goes back and stays for a while. Rounds in which nothing waited say nothing: the limit is not what limits. A store that says slow down gets
//! half, at most once a round, and the climb begins again from there.

use std::time::{Duration, Instant};

/// Parts in flight at the start.
const LIMIT_FIRST: usize = 8;
/// Rate that doubling the limit has to gain. Less is no sign of a connection's own limit but of something that all share.
const GAIN_OF_DOUBLE: f64 = 1.15;
/// Rate that an eighth more has to gain: above the noise of a round.
const GAIN_OF_EIGHTH: f64 = 1.03;
/// Rounds without a trial after one that gained nothing: a network that changes is tried again, at little cost.
const ROUNDS_AT_REST: u32 = 8;

/// See the module.
#[derive(Debug)]
pub(super) struct Window {
    limit: usize,
    limit_max: usize,
    stride: Stride,
    /// What was the case before the limit under trial.
    trial: Option<Before>,
    /// The round shows the limit before still.
    settling: bool,
    rounds_at_rest: u32,
    /// The limit was halved, and no round has ended since.
    halved: bool,
    /// Requests to slow down that are known.
    slow_downs: u64,
    round: Round,
}

#[derive(Debug, Clone, Copy)]
enum Stride {
    Double,
    Eighth,
}

#[derive(Debug, Clone, Copy)]
struct Before {
    limit: usize,
    rate: f64,
}

#[derive(Debug)]
struct Round {
    since: Instant,
    parts: usize,
    bytes: u64,
    /// Parts waited for their turn at every look.
    pressed: bool,
}

impl Round {
    fn begin(now: Instant) -> Self {
        Self {
            since: now,
            parts: 0,
            bytes: 0,
            pressed: true,
        }
    }
}

impl Window {
    /// A window that never opens further than `limit_max`. `slow_downs` counts the store's requests to slow down so far, from whenever.
    pub(super) fn new(limit_max: usize, slow_downs: u64, now: Instant) -> Self {
        let limit_max = limit_max.max(1);
        Self {
            limit: LIMIT_FIRST.min(limit_max),
            limit_max,
            stride: Stride::Double,
            trial: None,
            // Connections are made in it.
            settling: true,
            rounds_at_rest: 0,
            halved: false,
            slow_downs,
            round: Round::begin(now),
        }
    }

    /// Parts that may be in flight now.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// A part of `len` bytes was acknowledged; `is_waiting` says whether another one waits for its turn.
    pub(super) fn acknowledged(&mut self, len: u64, is_waiting: bool, now: Instant) {
        self.round.parts += 1;
        self.round.bytes += len;
        self.round.pressed &= is_waiting;
        if self.round.parts >= self.limit {
            let round = std::mem::replace(&mut self.round, Round::begin(now));
            self.halved = false;
            self.judge(&round, now - round.since);
        }
    }

    /// The store has asked so often for fewer requests.
    pub(super) fn asked_to_slow_down(&mut self, slow_downs: u64, now: Instant) {
        if std::mem::replace(&mut self.slow_downs, slow_downs) < slow_downs {
            self.slow_down(now);
        }
    }

    fn slow_down(&mut self, now: Instant) {
        if self.halved {
            return;
        }
        self.halved = true;
        self.set((self.limit / 2).max(1));
        self.stride = Stride::Eighth;
        self.trial = None;
        self.rounds_at_rest = 1;
        self.round = Round::begin(now);
    }

    fn judge(&mut self, round: &Round, time: Duration) {
        if std::mem::take(&mut self.settling) {
            return;
        }
        if self.rounds_at_rest > 0 {
            self.rounds_at_rest -= 1;
            return;
        }
        let trial = self.trial.take();
        if !round.pressed {
            return;
        }
        let rate = bytes_per_second(round.bytes, time);
        match trial {
            Some(before) if rate < before.rate * self.stride.gain() => {
                self.set(before.limit);
                self.stride = Stride::Eighth;
                self.rounds_at_rest = ROUNDS_AT_REST;
            }
            _ if self.limit < self.limit_max => {
                let limit = self.limit;
                self.trial = Some(Before { limit, rate });
                self.set(self.stride.after(limit).min(self.limit_max));
            }
            _ => {}
        }
    }

    fn set(&mut self, limit: usize) {
        self.limit = limit;
        self.settling = true;
    }
}

impl Stride {
    fn after(self, limit: usize) -> usize {
        match self {
            Stride::Double => limit * 2,
            Stride::Eighth => limit + (limit / 8).max(1),
        }
    }

    fn gain(self) -> f64 {
        match self {
            Stride::Double => GAIN_OF_DOUBLE,
            Stride::Eighth => GAIN_OF_EIGHTH,
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "rates are compared by percents")]
fn bytes_per_second(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64().max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = 1 << 20;

    /// Rounds of full windows on a network where each part takes 100 ms by itself, and all of them together move at most `knee` parts in that time.
    fn rounds(window: &mut Window, now: &mut Instant, count: usize, knee: usize, pressed: bool) {
        for _ in 0..count {
            let limit = window.limit();
            let per_part = Duration::from_millis(100) / u32::try_from(limit.min(knee)).unwrap();
            for _ in 0..limit {
                *now += per_part;
                window.acknowledged(LEN, pressed, *now);
            }
        }
    }

    fn settled(limit_max: usize, knee: usize) -> usize {
        let mut now = Instant::now();
        let mut window = Window::new(limit_max, 0, now);
        rounds(&mut window, &mut now, 60, knee, true);
        // Wherever it is in its trials: what it rests at.
        let mut limits: Vec<usize> = Vec::new();
        for _ in 0..40 {
            rounds(&mut window, &mut now, 1, knee, true);
            limits.push(window.limit());
        }
        limits.sort_unstable();
        limits[20]
    }

    #[test]
    fn it_comes_to_rest_near_the_knee() {
        for (knee, most) in [(4, 8), (8, 9), (20, 32), (30, 36), (40, 64), (200, 64)] {
            let limit = settled(64, knee);
            assert!(
                limit >= knee.min(64) && limit <= most,
                "knee {knee}: {limit}"
            );
        }
        assert_eq!(settled(3, 200), 3, "never above the most");
    }

    #[test]
    fn it_is_fast_where_there_is_room() {
        let mut now = Instant::now();
        let mut window = Window::new(64, 0, now);
        let mut count = 0;
        while window.limit() < 64 {
            rounds(&mut window, &mut now, 1, 200, true);
            count += 1;
        }
        assert!(count <= 8, "{count} rounds");
    }

    #[test]
    fn rounds_in_which_nothing_waits_change_nothing() {
        let mut now = Instant::now();
        let mut window = Window::new(64, 0, now);
        rounds(&mut window, &mut now, 50, 200, false);
        assert_eq!(window.limit(), LIMIT_FIRST);
    }

    #[test]
    fn only_new_requests_to_slow_down_count() {
        let now = Instant::now();
        let mut window = Window::new(64, 3, now);
        window.asked_to_slow_down(3, now);
        assert_eq!(window.limit(), LIMIT_FIRST);
        window.asked_to_slow_down(4, now);
        assert_eq!(window.limit(), LIMIT_FIRST / 2);
    }

    #[test]
    fn slow_down_halves_once_a_round_and_is_recovered_from() {
        let mut now = Instant::now();
        let mut window = Window::new(64, 0, now);
        rounds(&mut window, &mut now, 20, 200, true);
        assert_eq!(window.limit(), 64);
        for _ in 0..10 {
            window.slow_down(now);
        }
        assert_eq!(window.limit(), 32, "the requests of one round are one sign");
        rounds(&mut window, &mut now, 1, 200, true);
        window.slow_down(now);
        assert_eq!(window.limit(), 16);
        rounds(&mut window, &mut now, 60, 200, true);
        assert_eq!(window.limit(), 64);
        for _ in 0..10 {
            window.slow_down(now);
            rounds(&mut window, &mut now, 1, 200, true);
        }
        assert_eq!(window.limit(), 1, "one always may go");
    }
}
