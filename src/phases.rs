//! Which phase a run is in, since when, and how long each one took.
//!
//! In: the story's steps. Out: wall seconds per phase, and the phase that a failure belongs to. Nothing here can fail.

use std::sync::Arc;
use std::time::Instant;

use crate::error::Phase;
use crate::outcome::PhaseSeconds;
use crate::progress::Meter;

/// A stopwatch that knows the phases by name, and tells the meter.
#[derive(Debug)]
pub struct PhaseClock {
    meter: Arc<Meter>,
    done: Vec<PhaseSeconds>,
    current: Phase,
    since: Instant,
}

impl PhaseClock {
    /// Starts in `phase`.
    pub fn start(meter: &Arc<Meter>, phase: Phase) -> Self {
        meter.enter(phase);
        tracing::debug!(%phase, "phase");
        Self {
            meter: Arc::clone(meter),
            done: Vec::new(),
            current: phase,
            since: Instant::now(),
        }
    }

    /// The phase under way.
    pub fn phase(&self) -> Phase {
        self.current
    }

    /// Ends the phase under way and begins the next. Returns when that was.
    pub fn enter(&mut self, phase: Phase) -> Instant {
        let now = Instant::now();
        self.record(now);
        self.meter.enter(phase);
        tracing::debug!(%phase, "phase");
        self.current = phase;
        self.since = now;
        now
    }

    /// Every phase with its time, in order of its first beginning; one that was entered twice has the sum.
    pub fn finish(mut self) -> Vec<PhaseSeconds> {
        self.record(Instant::now());
        self.done
    }

    fn record(&mut self, now: Instant) {
        let seconds = now.duration_since(self.since).as_secs_f64();
        match self
            .done
            .iter_mut()
            .find(|entry| entry.phase == self.current)
        {
            Some(entry) => entry.seconds += seconds,
            None => self.done.push(PhaseSeconds {
                phase: self.current,
                seconds,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_that_was_entered_twice_is_one_sum() {
        let started = Instant::now();
        let mut clock = PhaseClock::start(&Meter::new(), Phase::Stream);
        clock.enter(Phase::Commit);
        clock.enter(Phase::Stream);
        let seconds = clock.finish();
        let phases: Vec<Phase> = seconds.iter().map(|entry| entry.phase).collect();
        assert_eq!(phases, [Phase::Stream, Phase::Commit]);
        let sum: f64 = seconds.iter().map(|entry| entry.seconds).sum();
        assert!(
            sum <= started.elapsed().as_secs_f64(),
            "no second counts twice"
        );
    }
}
