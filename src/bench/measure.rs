//! Wall time, CPU time of the whole process, medians.
//!
//! In: some work. Out: what it took. While a bench measures, nothing else runs in its process, so the process's CPU time is the stage's own: its threads, and those of the
//! driver and the network that work for it. Nothing here can fail but the work.

use std::time::Instant;

use crate::cpu_time;

/// What some work took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Took {
    /// Wall seconds.
    pub(super) seconds: f64,
    /// CPU seconds, user and system, of all threads.
    pub(super) cpu_seconds: f64,
}

/// Runs `work`, and looks at the clocks before and after.
pub(super) fn timed<T, E>(work: impl FnOnce() -> Result<T, E>) -> Result<(T, Took), E> {
    let (started, cpu_started) = (Instant::now(), cpu_time::of_process().as_secs_f64());
    let done = work()?;
    let took = Took {
        seconds: started.elapsed().as_secs_f64(),
        cpu_seconds: cpu_time::of_process().as_secs_f64() - cpu_started,
    };
    Ok((done, took))
}

/// The middle value, the mean of the middle two of an even number; 0 of none.
pub(super) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match (values.len() % 2, values.get(middle)) {
        (_, None) => 0.0,
        (1, Some(value)) => *value,
        (_, Some(value)) => f64::midpoint(values[middle - 1], *value),
    }
}

/// Bytes as GB, 10⁹.
#[expect(clippy::cast_precision_loss, reason = "a number for rates")]
pub(super) fn gb(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert!(median([]).abs() < f64::EPSILON);
        assert!((median([3.0, 1.0, 2.0]) - 2.0).abs() < f64::EPSILON);
        assert!((median([4.0, 1.0, 3.0, 2.0]) - 2.5).abs() < f64::EPSILON);
    }

    #[test]
    fn work_costs_cpu_time_and_sleep_does_not() {
        let spin = || {
            let started = cpu_time::of_process().as_secs_f64();
            while cpu_time::of_process().as_secs_f64() - started < 0.01 {}
            Ok::<_, ()>(())
        };
        let ((), took) = timed(spin).unwrap();
        assert!(took.cpu_seconds >= 0.01);
    }
}
