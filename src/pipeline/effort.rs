//! How much the compressors try: as much as the other stages leave time for.
//!
//! In: how the compressors spent their time, what the process's other work cost, and how many bytes went to the store. Out: the effort, in CPU-seconds that one gigabyte (10⁹ bytes) less in the store
//! is worth. Nothing can fail.
//!
//! Compressors that wait while processors are free have time to spare: what they send on is limited by something else, most often the link, and every byte less is gained. The effort rises. Compressors that
//! never wait are what the others wait for, and where the processors are all taken every second spent here is missing elsewhere: the effort falls. It stops at what a
//! gigabyte costs to send, in CPU-seconds, because compression below that price pays for itself.
//!
//! Waiting alone says nothing about the processors: where copying and sending take them, compressors wait too, for a stage that waits for a processor. So it is held against the share of the processors
//! that the process had, and against what of the machine nobody used.
//!
//! A slow link frees buffers many at a time, and compressors fill them in a burst with all the processors they can get. So after any time with processors to spare the effort falls only when they have been
//! short for longer than a burst takes, and never while the store takes less than the compressors make, as when the buffers are filled for the first time. A rise is the higher the longer the time
//! without work was.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::codec::Effort;
use crate::cpu_time::{self, MachineTime};
use crate::progress::Meter;
use crate::timeline::{EFFORT, Probe, Watch};

/// Least time between two looks: long against a chunk, short against a save.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// After so much time there is a look however few bytes went by.
const LOOK_AFTER: Duration = Duration::from_millis(400);
/// Before that, a look waits for this part of what all buffers hold, or parts would be too few to count.
const LOOK_SHARE: u64 = 4;
/// Compressors that refill all buffers take less than this.
const BURST: Duration = Duration::from_millis(200);
/// A look counts for as many as would fit its time, up to this.
const RISES_MAX: u32 = 4;
/// An emergency has no time to find out.
const EFFORT_FIRST: f32 = Effort::FIRST.0;
/// CPU-seconds for a gigabyte that no sender is known to undercut: system calls, TCP and a network card.
const EFFORT_LEAST: f32 = 0.2;
/// However much a gigabyte seems to cost, the price counts no more than this: it may be others' work.
const PRICE_MOST: f32 = 1.5;
/// What the slowest coding that the pipeline leaves to the encoder asks for to gain a hundredth of a chunk. More would only take longer to come down from.
const EFFORT_MOST: f32 = 300.0;
/// Paid beyond the price of sending: it keeps what is compressed within 5 % of what is not, where sending is cheap.
const PREMIUM: f32 = 1.25;
/// Share of their time that compressors wait, above which there is time to spare.
const IDLE_RISE: f64 = 0.15;
/// Share below which the others wait for them.
const IDLE_FALL: f64 = 0.05;
/// Share of the processors from which on they count as taken.
const TAKEN: f64 = 0.9;
/// Share of the machine's processors below which what nobody used counts as nothing.
const UNUSED: f64 = 0.1;
/// A step up. Twice as much takes four looks.
const RISE: f32 = 1.19;
/// A step down: twice as fast as up, because too much effort holds everything up and too little only costs bytes.
const FALL: f32 = 1.41;
/// A step down that follows upon another: it was far too much.
const FALL_ON: f32 = 2.0;
/// Share of what the compressors make that the store takes, below which it is not them that the others wait for.
const KEEPS_UP: f64 = 0.9;
/// What a look back counts for at the next look, when the two are compared: the store acknowledges whole parts.
const PARTS_MEMORY: f64 = 0.5;
/// Looks after a fall in which it stays below where it fell. The next coding up may cost a multiple, so that the effort goes to and fro across its price: it is to be below for nearly all the time.
const REST: u32 = 48;
/// What a look back counts for at the next look, when the price of sending is taken.
const MEMORY: f64 = 0.9;
/// CPU-seconds for a gigabyte that the SDK and the kernel's TCP were measured to take, and the gigabytes that this counts for before any were sent.
const SENDING_EXPECTED: f64 = 0.4;
const SENT_EXPECTED: f64 = 0.1;

/// What happened since the last look.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Span {
    /// How long ago that is.
    pub(super) elapsed: Duration,
    /// Of the compressors together: at work, by the clock on the wall.
    pub(super) busy: Duration,
    /// Of the compressors together: at work, by the processors' clocks.
    pub(super) computing: Duration,
    /// Of the compressors together: waiting for chunks or for room.
    pub(super) idle: Duration,
    /// CPU time of the whole process.
    pub(super) process: Duration,
    /// What all processors together could have given.
    pub(super) available: Duration,
    /// Share of the machine's processors that nobody used, where that is known.
    pub(super) unused: Option<f64>,
    /// Bytes of the frames that the compressors made.
    pub(super) made: u64,
    /// Bytes that the store has acknowledged.
    pub(super) stored: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Control {
    effort: f32,
    /// Where it last fell, and looks until it may come there again.
    ceiling: f32,
    rest: u32,
    /// Whether it fell at the last look.
    is_falling: bool,
    /// How long processors have been short.
    short_for: Duration,
    /// Gigabytes that the compressors made and the store acknowledged lately.
    made: f64,
    taken: f64,
    /// CPU-seconds and gigabytes of what was sent lately.
    sending: f64,
    sent: f64,
}

impl Control {
    /// Without any experience but that of others.
    pub(super) fn new() -> Self {
        Self {
            effort: EFFORT_FIRST,
            ceiling: EFFORT_MOST,
            rest: 0,
            is_falling: false,
            // Nothing was to spare yet.
            short_for: BURST,
            made: 0.0,
            taken: 0.0,
            sending: SENDING_EXPECTED * SENT_EXPECTED,
            sent: SENT_EXPECTED,
        }
    }

    /// The effort now.
    pub(super) fn effort(&self) -> f32 {
        self.effort
    }

    /// Learns from a span, and says the effort from now on.
    pub(super) fn look(&mut self, span: &Span) -> f32 {
        let others = span.process.saturating_sub(span.computing);
        self.sending = self.sending * MEMORY + others.as_secs_f64();
        self.sent = self.sent * MEMORY + gigabytes(span.stored);

        let idle = share(span.idle, span.idle + span.busy);
        let is_taken = share(span.process, span.available) >= TAKEN
            || span.unused.is_some_and(|unused| unused < UNUSED);
        self.made = self.made * PARTS_MEMORY + gigabytes(span.made);
        self.taken = self.taken * PARTS_MEMORY + gigabytes(span.stored);
        let is_short = idle < IDLE_FALL || is_taken;
        self.short_for = match is_short {
            true => self.short_for.saturating_add(span.elapsed),
            false => Duration::ZERO,
        };
        let falls = is_short && self.short_for >= BURST && self.taken >= KEEPS_UP * self.made;
        if falls {
            self.ceiling = self.effort;
            self.effort /= if self.is_falling { FALL_ON } else { FALL };
            self.rest = REST;
        } else {
            let looks = span.elapsed.as_millis() / LOOK_EVERY.as_millis();
            let looks = u32::try_from(looks).map_or(RISES_MAX, |looks| looks.clamp(1, RISES_MAX));
            self.rest = self.rest.saturating_sub(looks);
            let most = match self.rest {
                0 => EFFORT_MOST,
                _ => self.ceiling / RISE,
            };
            if idle > IDLE_RISE && !is_short {
                let risen = self.effort * RISE.powi(looks.cast_signed());
                self.effort = risen.min(most).max(self.effort);
            }
        }
        self.is_falling = falls;
        self.effort = self.effort.clamp(self.price(), EFFORT_MOST);
        self.effort
    }

    /// CPU-seconds for a gigabyte less, which not sending it saves.
    fn price(&self) -> f32 {
        #[expect(clippy::cast_possible_truncation, reason = "a ratio of a few digits")]
        let price = (self.sending / self.sent.max(f64::MIN_POSITIVE)) as f32 * PREMIUM;
        price.clamp(EFFORT_LEAST, PRICE_MOST)
    }
}

/// Looks at the compressors from their own threads, and tells them the effort.
#[derive(Debug)]
pub(super) struct Pacer {
    /// Bits of the effort.
    effort: AtomicU32,
    processors: u32,
    /// Raw bytes that all chunk buffers hold.
    buffered: u64,
    tally: Mutex<Tally>,
}

#[derive(Debug)]
struct Tally {
    control: Control,
    span: Span,
    /// Raw bytes that were coded since the last look.
    coded: u64,
    looked_at: Instant,
    /// What the process had cost, what the machine had done, and what the store had acknowledged, at that time.
    process: Duration,
    machine: Option<MachineTime>,
    stored: u64,
}

impl Pacer {
    /// Begins now. `buffered` is how many raw bytes all chunk buffers hold.
    pub(super) fn new(buffered: u64) -> Self {
        let control = Control::new();
        let processors = std::thread::available_parallelism();
        Self {
            effort: AtomicU32::new(control.effort().to_bits()),
            processors: processors.map_or(1, |count| u32::try_from(count.get()).unwrap_or(1)),
            buffered,
            tally: Mutex::new(Tally {
                control,
                span: Span::default(),
                coded: 0,
                looked_at: Instant::now(),
                process: cpu_time::of_process(),
                machine: MachineTime::now(),
                stored: 0,
            }),
        }
    }

    /// Shows the effort in the timeline of this meter, if it has one, until the guard is dropped.
    pub(super) fn watched(self: &Arc<Self>, meter: &Meter) -> Option<Watch> {
        let pacer = Arc::clone(self);
        let probe = Probe {
            chart: EFFORT,
            name: "effort".to_owned(),
            read: Box::new(move || pacer.effort().0.into()),
        };
        Some(meter.recorder()?.watch(vec![probe]))
    }

    /// For the next chunk.
    pub(super) fn effort(&self) -> Effort {
        Effort(f32::from_bits(self.effort.load(Ordering::Relaxed)))
    }

    /// A compressor waited for `idle`, and then worked on a chunk of `len` bytes for `busy`, of which it had a processor for `computing`, and made a frame of `made` bytes. `stored`
    /// counts the bytes that the store has acknowledged so far.
    pub(super) fn note(
        &self,
        (len, made): (u64, u64),
        idle: Duration,
        busy: Duration,
        computing: Duration,
        stored: impl FnOnce() -> u64,
    ) {
        let mut tally = self.tally.lock().unwrap_or_else(PoisonError::into_inner);
        tally.span.idle += idle;
        tally.span.busy += busy;
        tally.span.computing += computing;
        tally.coded += len;
        tally.span.made += made;
        let now = Instant::now();
        let elapsed = now - tally.looked_at;
        let is_too_little = tally.coded < self.buffered / LOOK_SHARE && elapsed < LOOK_AFTER;
        if elapsed < LOOK_EVERY || is_too_little {
            return;
        }
        let (process, machine, stored) = (cpu_time::of_process(), MachineTime::now(), stored());
        let unused = tally.machine.zip(machine).and_then(unused);
        let span = Span {
            elapsed,
            process: process.saturating_sub(tally.process),
            available: elapsed * self.processors,
            unused,
            stored: stored - tally.stored,
            ..std::mem::take(&mut tally.span)
        };
        tally.coded = 0;
        (tally.looked_at, tally.process) = (now, process);
        (tally.machine, tally.stored) = (machine, stored);
        let effort = tally.control.look(&span);
        self.effort.store(effort.to_bits(), Ordering::Relaxed);
    }
}

/// Share of the processors' time between two readings that nobody used. `None` where no tick passed.
fn unused((before, now): (MachineTime, MachineTime)) -> Option<f64> {
    let total = now
        .total
        .checked_sub(before.total)
        .filter(|ticks| *ticks > 0)?;
    let idle = now.idle.saturating_sub(before.idle);
    #[expect(clippy::cast_precision_loss, reason = "a ratio of a few digits")]
    let share = idle as f64 / total as f64;
    Some(share)
}

/// Part of whole, 0 of nothing.
fn share(part: Duration, whole: Duration) -> f64 {
    match whole.is_zero() {
        true => 0.0,
        false => part.as_secs_f64() / whole.as_secs_f64(),
    }
}

#[expect(clippy::cast_precision_loss, reason = "a rate")]
fn gigabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node in balance: for an effort, what a gigabyte of raw data costs to compress, and how much of it is stored.
    struct Plant {
        cores: f64,
        /// CPU-seconds for a stored gigabyte.
        sending: f64,
        /// CPU-seconds for a raw gigabyte beside compression and sending, and of it those of other processes.
        copying: f64,
        neighbours: f64,
        /// Most raw gigabytes a second that the GPU gives.
        copy: f64,
        /// Most stored gigabytes a second that the network takes.
        link: f64,
        /// CPU-seconds and stored gigabytes for a raw gigabyte, from quick to thorough.
        codings: &'static [(f64, f64)],
    }

    /// Made up, of the shape of floating-point weights.
    const WEIGHTS: &[(f64, f64)] = &[(0.1, 1.0), (0.3, 0.67), (1.0, 0.66), (3.0, 0.64)];

    /// What came out of one look.
    struct Outcome {
        raw_rate: f64,
        stored_share: f64,
    }

    impl Plant {
        fn coding(&self, effort: f32) -> (f64, f64) {
            let price = |(cpu, stored): &(f64, f64)| cpu + f64::from(effort) * stored;
            *self
                .codings
                .iter()
                .min_by(|a, b| price(a).total_cmp(&price(b)))
                .unwrap()
        }

        /// Fifty milliseconds at this effort.
        fn run(&self, effort: f32) -> (Span, Outcome) {
            let (coding, stored_share) = self.coding(effort);
            let cpu = coding + self.copying + self.sending * stored_share;
            let raw_rate = (self.cores / cpu)
                .min(self.cores / coding)
                .min(self.copy)
                .min(self.link / stored_share);
            let seconds = 0.05;
            let computing = raw_rate * coding * seconds;
            let all = raw_rate * cpu * seconds;
            // Where the processors are full, whoever works waits for one about as long as it works.
            let busy = match all >= 0.99 * self.cores * seconds {
                true => (computing * 1.5).min(self.cores * seconds),
                false => computing,
            };
            // What the neighbours take is not ours.
            let process = all - raw_rate * self.neighbours * seconds;
            let span = Span {
                elapsed: Duration::from_secs_f64(seconds),
                busy: Duration::from_secs_f64(busy),
                computing: Duration::from_secs_f64(computing),
                idle: Duration::from_secs_f64(self.cores * seconds - busy),
                process: Duration::from_secs_f64(process),
                available: Duration::from_secs_f64(self.cores * seconds),
                unused: Some(1.0 - all / (self.cores * seconds)),
                made: bytes(raw_rate * stored_share * seconds),
                stored: bytes(raw_rate * stored_share * seconds),
            };
            let outcome = Outcome {
                raw_rate,
                stored_share,
            };
            (span, outcome)
        }

        /// Rate and stored share over the second half of so many looks.
        fn settle(&self, looks: usize) -> Outcome {
            let mut control = Control::new();
            let (mut raw, mut stored) = (0.0, 0.0);
            for look in 0..looks {
                let (span, outcome) = self.run(control.effort());
                control.look(&span);
                if look >= looks / 2 {
                    raw += outcome.raw_rate;
                    stored += outcome.raw_rate * outcome.stored_share;
                }
            }
            #[expect(clippy::cast_precision_loss, reason = "a count")]
            let counted = (looks - looks / 2) as f64;
            Outcome {
                raw_rate: raw / counted,
                stored_share: stored / raw,
            }
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a model"
    )]
    fn bytes(gigabytes: f64) -> u64 {
        (gigabytes * 1e9) as u64
    }

    const NODE: Plant = Plant {
        cores: 2.0,
        sending: 0.35,
        copying: 0.02,
        neighbours: 0.0,
        copy: 50.0,
        link: 50.0,
        codings: WEIGHTS,
    };

    #[test]
    fn a_slow_link_gets_the_best_ratio_that_the_cores_sustain() {
        let on_link = |link| Plant { link, ..NODE }.settle(400);
        // A raw 0.31 GB/s need 0.9 cores for the most thorough coding.
        let slow = on_link(0.2);
        assert!(slow.stored_share < 0.645, "{}", slow.stored_share);
        // A raw 1.2 GB/s need 1.2 for the second.
        let middling = on_link(0.8);
        assert!(middling.stored_share < 0.665, "{}", middling.stored_share);
        // A raw 3 GB/s need 0.9 for the first, and sending needs 0.7.
        let fast = on_link(2.0);
        assert!(fast.stored_share < 0.68, "{}", fast.stored_share);
        for (link, settled) in [(0.2, slow), (0.8, middling), (2.0, fast)] {
            let used = settled.raw_rate * settled.stored_share / link;
            assert!(used > 0.94, "{used} of a link of {link}");
        }
    }

    /// Within 5 % of not compressing at all.
    fn assert_hardly_slower(plant: &Plant) {
        let settled = plant.settle(400);
        let (_, raw) = plant.run(0.0);
        assert!(
            settled.raw_rate > 0.95 * raw.raw_rate,
            "{}",
            settled.raw_rate
        );
    }

    #[test]
    fn full_processors_are_hardly_slower_for_compressing() {
        assert_hardly_slower(&NODE);
    }

    #[test]
    fn processors_that_neighbours_take_are_taken() {
        assert_hardly_slower(&Plant {
            copying: 0.3,
            neighbours: 0.28,
            ..NODE
        });
    }

    #[test]
    fn what_costs_less_than_sending_is_always_done() {
        const CHEAP: &[(f64, f64)] = &[(0.1, 1.0), (0.2, 0.67), (2.0, 0.65)];
        let settled = Plant {
            codings: CHEAP,
            ..NODE
        }
        .settle(400);
        assert!(
            (settled.stored_share - 0.67).abs() < 0.01,
            "{}",
            settled.stored_share
        );
    }

    #[test]
    fn a_slow_gpu_leaves_time_for_a_better_ratio() {
        let settled = Plant { copy: 0.5, ..NODE }.settle(400);
        assert!(settled.stored_share < 0.65, "{}", settled.stored_share);
        assert!(settled.raw_rate > 0.47, "{}", settled.raw_rate);
    }

    #[test]
    fn the_effort_stays_within_its_bounds() {
        let mut control = Control::new();
        let idle = Span {
            idle: Duration::from_secs(1),
            available: Duration::from_secs(1),
            ..Span::default()
        };
        for _ in 0..200 {
            control.look(&idle);
        }
        assert!((control.effort() - EFFORT_MOST).abs() < 0.1);
        let busy = |sending: u64| Span {
            elapsed: Duration::from_secs(1),
            busy: Duration::from_secs(1),
            computing: Duration::from_secs(1),
            process: Duration::from_secs(1) + Duration::from_millis(sending),
            available: Duration::from_secs(2),
            stored: 1_000_000_000,
            ..Span::default()
        };
        for (sending, least) in [(400, 0.5), (10, EFFORT_LEAST), (60_000, PRICE_MOST)] {
            for _ in 0..200 {
                control.look(&busy(sending));
            }
            assert!(
                (control.effort() - least).abs() < 0.01,
                "{sending}: {}",
                control.effort()
            );
        }
    }

    #[test]
    fn a_long_wait_counts_for_several_short_ones() {
        let waited = |milliseconds| Span {
            elapsed: Duration::from_millis(milliseconds),
            idle: Duration::from_secs(1),
            unused: Some(0.9),
            ..Span::default()
        };
        let after = |spans: &[Span]| {
            let mut control = Control::new();
            for span in spans {
                control.look(span);
            }
            control.effort()
        };
        let short = after(&[waited(50); 3]);
        assert!((after(&[waited(150)]) - short).abs() < 0.01);
        let longest = after(&[waited(60_000)]);
        assert!((longest - EFFORT_FIRST * RISE.powi(4)).abs() < 0.01);
        // Nobody may be waiting for processors that others have.
        let taken = Span {
            unused: Some(0.0),
            ..waited(60_000)
        };
        assert!(after(&[taken]) < EFFORT_FIRST);
    }

    #[test]
    fn a_burst_that_the_store_does_not_keep_up_with_is_no_reason_to_try_less() {
        let burst = |stored| Span {
            elapsed: Duration::from_millis(100),
            busy: Duration::from_millis(200),
            computing: Duration::from_millis(100),
            process: Duration::from_millis(200),
            available: Duration::from_millis(200),
            unused: Some(0.0),
            made: 100_000_000,
            stored,
            ..Span::default()
        };
        let after = |stored| Control::new().look(&burst(stored));
        assert!((after(10_000_000) - EFFORT_FIRST).abs() < 0.01);
        assert!(after(95_000_000) < EFFORT_FIRST);
    }

    #[test]
    fn a_burst_after_idle_time_is_no_reason_to_try_less_and_a_long_shortage_is() {
        let short = Span {
            elapsed: Duration::from_millis(100),
            busy: Duration::from_millis(200),
            unused: Some(0.0),
            made: 50_000_000,
            stored: 50_000_000,
            ..Span::default()
        };
        let idle = Span {
            busy: Duration::ZERO,
            idle: Duration::from_millis(200),
            unused: Some(0.9),
            ..short
        };
        let mut control = Control::new();
        let risen = control.look(&idle);
        assert!((control.look(&short) - risen).abs() < 0.01);
        let fallen = control.look(&short);
        assert!(fallen < risen);
        // Up again at once, but not to where it fell before it has rested.
        for _ in 0..5 {
            control.look(&idle);
        }
        assert!(control.effort() > fallen && control.effort() < risen);
        for _ in 0..20 {
            control.look(&idle);
        }
        assert!(control.effort() > risen);
    }

    #[test]
    fn nothing_at_all_is_no_reason_to_change_much() {
        let mut control = Control::new();
        assert!(control.look(&Span::default()).is_finite());
    }
}
