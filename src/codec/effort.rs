//! How much a byte less in the store is worth, and what each way of coding a chunk costs.
//!
//! In: an [`Effort`] from the pipeline, which knows whether processors or the network are short; forecasts from the sample. Out: one price per way, so that the
//! cheapest can be taken. What a way costs is first a figure measured elsewhere and then what this encoder's own thread took ([`Rates`]). Nothing here can fail.

/// CPU seconds that one GB (10⁹ bytes) less in the store is worth.
///
/// With `Effort(0.0)` nothing is compressed but chunks that are all zero; with `Effort(f32::INFINITY)` only the ratio counts. What is not a number counts as 0.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Effort(pub f32);

impl Effort {
    /// Never compress what is not all zero.
    pub const LEAST: Effort = Effort(0.0);
    /// Takes planes and Huffman codes for floating-point weights, on any processor and beside any neighbours: what a save begins with, before it knows what is short. On a slow link
    /// the buffers are filled once before anything is learned; on a fast one it comes down within a few hundred milliseconds.
    pub const FIRST: Effort = Effort(4.0);
    /// The best ratio, whatever it costs.
    pub const MOST: Effort = Effort(f32::INFINITY);

    /// CPU seconds per GB, 0 or more.
    pub(super) fn seconds_per_gb(self) -> f32 {
        // Takes care of what is not a number, too.
        self.0.max(0.0)
    }
}

/// What a way of coding is expected to cost and to give.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Forecast {
    /// CPU seconds per GB of raw bytes, for the whole way from raw bytes to a frame with digest and checksum.
    pub(super) cpu: f32,
    /// Stored bytes per raw byte.
    pub(super) stored: f32,
}

impl Forecast {
    /// CPU seconds per GB of raw bytes, the stored bytes priced in.
    pub(super) fn price(self, effort: Effort) -> f32 {
        match effort.seconds_per_gb() {
            f32::INFINITY => self.stored,
            worth => self.cpu + worth * self.stored,
        }
    }
}

/// Digest and the store's checksum: what a raw frame costs, in CPU seconds per GB.
pub(super) const RAW_COST: f32 = 0.12;
/// A GB of pages that are all zero in chunks that are not.
pub(super) const ZERO_COST: f32 = 0.1;
/// Digest and sampling of what is coded.
pub(super) const CODED_COST: f32 = 0.07;
/// Content checksum, where frames carry one.
pub(super) const CHECKSUM_COST: f32 = 0.08;
/// Splitting into planes.
pub(super) const SPLIT_COST: f32 = 0.07;
/// A GB of plane that stays as it is.
pub(super) const DENSE_PLANE_COST: f32 = 0.07;
/// A GB of plane that is Huffman-coded (AVX2; the AVX-512 kernel is twice as fast, which [`Rates`] finds out).
pub(super) const HUFFMAN_PLANE_COST: f32 = 0.62;
/// Below this nothing runs that looks for repetitions, however well the data compresses.
pub(super) const REPETITION_COST_MIN: f32 = 0.2;

/// Ways of coding whose speeds are learned apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// As it is.
    Raw = 0,
    /// Huffman codes without a filter.
    Huffman = 1,
    /// Planes and Huffman codes.
    Planes = 2,
    /// libzstd behind a filter.
    FilteredZstd = 3,
    /// libzstd on the raw bytes.
    Zstd = 4,
}

const WAY_COUNT: usize = 5;

/// Whether zeros lie in a chunk: they come in runs of any length, and what finding those takes no forecast gets right. So it is learned apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Zeros {
    /// Hardly any.
    Few = 0,
    /// Enough of them to count.
    Many = 1,
}

/// How much longer than forecast each way takes on this processor, beside these neighbours: in chunks with few zeros, and in those with many.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rates {
    classes: [Learned; 2],
}

/// Of one class of chunks.
#[derive(Debug, Clone, Copy)]
struct Learned {
    factors: [f32; WAY_COUNT],
    /// How often each was measured, up to [`Rates::MEMORY`].
    counts: [u8; WAY_COUNT],
}

impl Rates {
    /// The newest measurement counts one in so many; the first ones count alike.
    const MEMORY: u8 = 8;
    /// A way that is too dear is not taken, and what is not taken is not measured: its factor follows that of the way that is, so that a bad moment is forgotten within
    /// some hundred chunks. One that was never measured has nothing else to go by: a slow machine is slow for all.
    const FOLLOW_SHARE: f32 = 1.0 / 64.0;
    const FACTOR_MIN: f32 = 0.25;
    const FACTOR_MAX: f32 = 4.0;

    pub(super) fn new() -> Self {
        let nothing = Learned {
            factors: [1.0; WAY_COUNT],
            counts: [0; WAY_COUNT],
        };
        Self {
            classes: [nothing; 2],
        }
    }

    /// Measured seconds per forecast second.
    pub(super) fn factor(&self, way: Way, zeros: Zeros) -> f32 {
        self.classes[zeros as usize].factors[way as usize]
    }

    /// A chunk was coded this way and took `measured` of `forecast` CPU seconds; the forecast had the factor in it.
    pub(super) fn learn(&mut self, way: Way, zeros: Zeros, forecast: f32, measured: f32) {
        let known = self.factor(way, zeros);
        let newest = (known * measured / forecast.max(f32::MIN_POSITIVE))
            .clamp(Self::FACTOR_MIN, Self::FACTOR_MAX);
        let own = &mut self.classes[zeros as usize];
        let count = &mut own.counts[way as usize];
        *count = (*count + 1).min(Self::MEMORY);
        let learned = known + (newest - known) / f32::from(*count);
        for (index, class) in self.classes.iter_mut().enumerate() {
            let follows = index == zeros as usize;
            for (factor, count) in class.factors.iter_mut().zip(&class.counts) {
                let share = match (count, follows) {
                    (0, _) => 1.0,
                    (_, true) => Self::FOLLOW_SHARE,
                    (_, false) => 0.0,
                };
                *factor += (learned - *factor) * share;
            }
        }
        self.classes[zeros as usize].factors[way as usize] = learned;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAW: Forecast = Forecast {
        cpu: RAW_COST,
        stored: 1.0,
    };
    const HALF: Forecast = Forecast {
        cpu: RAW_COST + 0.5,
        stored: 0.5,
    };

    #[test]
    fn half_the_bytes_for_half_a_second_pay_from_an_effort_of_one_on() {
        for (effort, pays) in [
            (0.0, false),
            (0.9, false),
            (1.1, true),
            (f32::INFINITY, true),
        ] {
            let effort = Effort(effort);
            assert_eq!(HALF.price(effort) < RAW.price(effort), pays, "{effort:?}");
        }
        for nonsense in [f32::NAN, -1.0, f32::NEG_INFINITY] {
            assert!(RAW.price(Effort(nonsense)) < HALF.price(Effort(nonsense)));
        }
    }

    #[test]
    fn rates_follow_what_is_measured_and_forget_what_is_not_used() {
        let mut rates = Rates::new();
        let learn = |rates: &mut Rates, way, zeros, times_as_long: f32| {
            for _ in 0..1000 {
                let forecast = 0.5 * rates.factor(way, zeros);
                rates.learn(way, zeros, forecast, 0.5 * times_as_long);
            }
        };
        let is = |rates: &Rates, way, zeros, factor: f32| {
            let known = rates.factor(way, zeros);
            assert!((known - factor).abs() < 0.01, "{way:?} {zeros:?}: {known}");
        };
        learn(&mut rates, Way::Planes, Zeros::Few, 3.0);
        is(&rates, Way::Planes, Zeros::Few, 3.0);
        is(&rates, Way::Planes, Zeros::Many, 3.0);
        rates.learn(Way::Planes, Zeros::Few, 0.5, f32::INFINITY);
        let outlier = rates.factor(Way::Planes, Zeros::Few);
        assert!(outlier < 3.2, "one outlier moves it to {outlier}");
        learn(&mut rates, Way::Raw, Zeros::Few, 0.5);
        is(&rates, Way::Raw, Zeros::Few, 0.5);
        is(&rates, Way::Planes, Zeros::Few, 0.5);
    }

    #[test]
    fn what_zeros_take_says_nothing_about_chunks_without_any() {
        let mut rates = Rates::new();
        rates.learn(Way::Planes, Zeros::Few, 0.5, 0.5);
        for _ in 0..1000 {
            let forecast = 0.2 * rates.factor(Way::Planes, Zeros::Many);
            rates.learn(Way::Planes, Zeros::Many, forecast, 0.6);
        }
        assert!(rates.factor(Way::Planes, Zeros::Many) > 2.9);
        assert!((rates.factor(Way::Planes, Zeros::Few) - 1.0).abs() < 0.01);
    }
}
