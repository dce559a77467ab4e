//! Chunk → frame: which way is worth its time, and that way.
//!
//! In: a chunk, and how much a byte less is worth at this moment ([`Effort`]). Out: [`Encoded`]. A chunk that is all zero is seen at once. Of any other a sample is taken,
//! from which each way gets a [`Forecast`]; ways that live on repetitions are tried on a short stretch, and only where they could still win. The cheapest is
//! taken. What it then took in CPU time corrects the next forecasts. Where it gained too little after all, the frame is raw.
//!
//! The digest of a unit is taken just before the unit is coded: it brings the unit into the cache in order, and coding finds it there.
//!
//! What can fail: making an encoder.

use std::fmt;

use super::super::digest::Digesting;
use super::super::effort::{
    CHECKSUM_COST, CODED_COST, DENSE_PLANE_COST, HUFFMAN_PLANE_COST, RAW_COST, REPETITION_COST_MIN,
    Rates, SPLIT_COST, Way, ZERO_COST, Zeros,
};
use super::super::effort::{Effort, Forecast};
use super::super::planes::{self, Filter, PLANE_LEN};
use super::super::sample::Sample;
use super::super::zeros;
use super::libzstd::Compressor;
use super::write::{Growing, Writer};
use super::{
    BLOCK_LEN_MAX, CHUNK_LEN_MAX, ContentChecksum, FrameKind, HAND_HEADER_LEN, ZeroFrame,
    frame_bound, hand_header, raw_block_header, raw_frame_len,
};
use crate::codec::checksum::Summing;
use crate::codec::{Crc64, Digest};
use crate::cpu_time;

/// How hard the encoder tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Level {
    /// As hard as the pipeline says at each chunk.
    #[default]
    Auto,
    /// Not at all: zero chunks become RLE frames, all others raw frames.
    None,
    /// For the fewest bytes within reason, for links that are slower than compression: planes with Huffman codes or with zstd 9, or zstd 9 alone, whatever a trial says is least.
    /// Higher levels gain half a percent for a multiple of the time.
    MaxRatio,
    /// This zstd level, [`Level::ZSTD_MIN`] to [`Level::ZSTD_MAX`], below 1 the faster ones; behind a filter where that stores less.
    Zstd(i32),
}

impl Level {
    /// Fastest level that a user may ask for.
    pub const ZSTD_MIN: i32 = -1000;
    /// Slowest level that zstd has.
    pub const ZSTD_MAX: i32 = 22;
}

/// What may be done to a chunk's bytes before they are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FilterChoice {
    /// Whichever filter the sample says is best for the chunk, or none.
    #[default]
    Auto,
    /// Nothing: any zstd turns the frames into the raw extent, and finds a content checksum in each of them.
    None,
}

/// Who codes planes that need no search for repetitions. Both write what both read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PlaneCoder {
    /// Our own Huffman coder.
    #[default]
    Own,
    /// libzstd at a level that finds nothing but long repetitions.
    Libzstd,
}

/// What an [`Encoder`] is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Settings {
    /// How hard it tries.
    pub level: Level,
    /// What it may do to the bytes first.
    pub filter: FilterChoice,
    /// Who codes planes.
    pub plane_coder: PlaneCoder,
}

/// Levels of zstd that [`Level::Auto`] may choose from. Higher ones take contexts of many MiB for every thread.
const AUTO_LEVELS: &[i32] = &[1, 3];
const MAX_RATIO_LEVELS: &[i32] = &[9];
/// The levels that stand for "Huffman codes only" with libzstd; the second finds runs of zeros.
const LIBZSTD_HUFFMAN_LEVEL: i32 = -1000;
const LIBZSTD_ZEROS_LEVEL: i32 = -100;
/// Share of zeros from which a chunk is one among zeros.
const ZEROS_FROM: f32 = 0.1;

impl Settings {
    /// Bytes of memory that one [`Encoder`] takes at most, its output buffer not counted. Measured with libzstd 1.5.7; a test holds the numbers to the library.
    pub fn context_bytes(self) -> u64 {
        const MIB: u64 = 1 << 20;
        // Four planes, sample, coder; a stream's context with its buffers.
        const OWN: u64 = 3 * MIB / 2;
        let of_level = |level: &i32| match level {
            // zstd takes 0 for its own default, 3.
            0 | 2..=4 => 3 * MIB,
            ..=1 => MIB,
            5..=8 => 8 * MIB,
            9..=11 => 32 * MIB,
            12..=16 => 80 * MIB,
            17.. => 160 * MIB,
        };
        let filtered = match self.filter {
            FilterChoice::Auto => 4 * MIB,
            FilterChoice::None => 0,
        };
        // One that hurries goes on as in `Level::Auto`.
        let in_haste = AUTO_LEVELS.iter().filter(|_| self.level != Level::None);
        let plain = self.levels().iter().chain(in_haste).map(of_level).max();
        plain.map_or(0, |plain| OWN + plain + filtered)
    }

    fn levels(&self) -> &[i32] {
        match &self.level {
            Level::None => &[],
            Level::Auto => AUTO_LEVELS,
            Level::MaxRatio => MAX_RATIO_LEVELS,
            Level::Zstd(level) => std::slice::from_ref(level),
        }
    }

    /// Whether frames carry a content checksum.
    fn has_checksum(self) -> bool {
        self.filter == FilterChoice::None
    }

    fn filters(self) -> &'static [Filter] {
        match self.filter {
            FilterChoice::Auto => &Filter::ALL,
            FilterChoice::None => &[Filter::None],
        }
    }
}

/// What [`Encoder::encode`] says about the frame it made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoded {
    /// Where the frame is.
    pub body: Body,
    /// How it was made.
    pub kind: FrameKind,
    /// What was done to the chunk's bytes first.
    pub filter: Filter,
    /// Digest of the raw chunk.
    pub digest: Digest,
    /// Checksum of the whole frame.
    pub crc64: Crc64,
    raw_len: usize,
}

/// Where a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Body {
    /// At the start of the output buffer.
    Written {
        /// Its length in bytes.
        len: usize,
    },
    /// Nowhere yet: it is the raw frame of the chunk, as [`raw_pieces`](super::raw_pieces) and [`write_raw`](super::write_raw) make it.
    Raw {
        /// Its content checksum, if it is to carry one.
        checksum: Option<u32>,
    },
}

impl Encoded {
    /// Length of the frame in bytes.
    #[expect(clippy::len_without_is_empty, reason = "no frame is empty")]
    pub fn len(&self) -> usize {
        match self.body {
            Body::Written { len } => len,
            Body::Raw { checksum } => raw_frame_len(self.raw_len, checksum.is_some()),
        }
    }
}

/// No compressor could be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EncoderError {
    /// The level is none of zstd's.
    #[error("zstd level {level} is out of range; compression.mode takes {min} to {max}", min = Level::ZSTD_MIN, max = Level::ZSTD_MAX)]
    Level {
        /// The level asked for.
        level: i32,
    },
    /// libzstd could not set itself up.
    #[error("libzstd cannot make a context: {reason}")]
    Context {
        /// libzstd's words.
        reason: &'static str,
    },
}

/// Gaining less is not worth a decoder's time.
const WORTH_IT: f32 = 0.97;
/// As a whole number, for what came out: 49/50 of the raw bytes.
const WORTH_IT_AFTER: (usize, usize) = (49, 50);
/// However much a byte is worth, planes above this many bits a byte stay raw: what coding them gains does not outlive the rounding.
const DENSE_BITS_MAX: f32 = 7.7;
/// Bytes above this entropy look random behind any filter: the entropy of a mix is never below the mean of its parts'.
const RANDOM_BITS: f32 = 7.95;
/// Stretch that is compressed to see what a way would do: small against a chunk, long enough for repetitions within a few KiB to show.
const TRIAL_LEN: usize = 16 * 1024;
/// The same where only the ratio counts.
const LONG_TRIAL_LEN: usize = 256 * 1024;
const LONG_TRIALS: usize = 2;
/// How many times as long a level takes as zstd 1, roughly: to know without a trial that it cannot pay.
const LEVEL_3_COST: f32 = 0.5;
/// What zstd behind a filter may gain over Huffman codes there, at the very most.
const FILTERED_GAIN_MAX: f32 = 0.15;

/// Stored bytes per raw byte that a filter with more planes must gain over one with fewer.
const WIDER_MARGIN: f32 = 0.006;

/// Bytes that ways are measured on: more than a processor's second cache holds, and a few milliseconds in all.
const MEASURED_LEN: usize = 1 << 20;
/// Rounds that are measured, after one that reads code and makes tables for the first time.
const MEASURED_ROUNDS: u32 = 3;

/// Fills the bytes with what looks like bf16 weights: exponents of few values, halving in number with their distance from 1, and random mantissas.
fn fill_like_weights(bytes: &mut [u8]) {
    const STEP: u64 = 0x5851_f42d_4c95_7f2d;
    let mut state = STEP;
    for element in bytes.chunks_exact_mut(2) {
        state = state.wrapping_mul(STEP).wrapping_add(1);
        // The high bits of this generator are its good ones.
        let [.., mantissa, _, _, high] = state.to_le_bytes();
        let exponent = [0x3f, 0x3e, 0x3d, 0x3c, 0x3b, 0x3a, 0x39, 0x38, 0x37];
        let exponent = exponent[high.leading_zeros() as usize];
        element.copy_from_slice(&[mantissa, exponent]);
    }
}

/// Whether a way pays that is no raw frame.
fn is_better(forecast: Forecast, than: Forecast, effort: Effort) -> bool {
    forecast.stored <= WORTH_IT && forecast.price(effort) < than.price(effort)
}

/// Bytes of the stretch that do not lie among zeros only, as the sample counts them.
fn zeros_left_out(stretch: &[u8]) -> usize {
    let runs = stretch.chunks(Sample::RUN_LEN);
    let filled = runs.filter(|run| !zeros::is_zero(run));
    filled.map(<[u8]>::len).sum()
}

/// A way to code a chunk.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Coding {
    Raw,
    /// Planes with Huffman codes; planes of more than so many bits a byte stay as they are.
    Huffman {
        filter: Filter,
        dense_bits: f32,
    },
    FilteredZstd {
        filter: Filter,
        level: i32,
    },
    Zstd {
        level: i32,
    },
}

impl Coding {
    fn way(self) -> Way {
        match self {
            Coding::Raw => Way::Raw,
            Coding::Huffman {
                filter: Filter::None,
                ..
            } => Way::Huffman,
            Coding::Huffman { .. } => Way::Planes,
            Coding::FilteredZstd { .. } => Way::FilteredZstd,
            Coding::Zstd { .. } => Way::Zstd,
        }
    }

    fn filter(self) -> Filter {
        match self {
            Coding::Huffman { filter, .. } | Coding::FilteredZstd { filter, .. } => filter,
            Coding::Raw | Coding::Zstd { .. } => Filter::None,
        }
    }
}

/// Makes frames; one per thread.
pub struct Encoder {
    settings: Settings,
    /// `None` for [`Level::None`].
    tools: Option<Tools>,
    zero: Option<ZeroFrame>,
}

/// What it takes to compress.
struct Tools {
    has_checksum: bool,
    sample: Sample,
    writer: Writer,
    plain: Compressor,
    filtered: Compressor,
    planes: Box<[u8]>,
    rates: Rates,
    last: Option<Choice>,
    /// How often in a row a coding that was chosen gained too little after all.
    failures: u32,
}

/// What was chosen for a chunk that was looked at closely, for the next ones if they look the same.
#[derive(Debug, Clone, Copy)]
struct Choice {
    coding: Coding,
    forecast: Forecast,
    effort: Effort,
    /// The chunk's, behind this filter: that of the coding, or of one that was tried in vain.
    bits: [f32; 4],
    filter: Filter,
    zero_share: f32,
    /// For how many more chunks it may serve.
    left: u32,
}

impl Choice {
    /// Of neighbours in memory one in so many is looked at closely: the rest costs a third of the time then.
    const SERVES: u32 = 7;
    /// Where coding gained too little, so many are not tried, twice as many after each failure more, but not for ever.
    const DOUBLES_MAX: u32 = 2;
    /// What the sample of like chunks may differ by.
    const BITS_NEAR: f32 = 0.2;
    const SHARE_NEAR: f32 = 0.1;
    const EFFORT_NEAR: f32 = 0.1;

    fn serves(&self, bits: &[f32; 4], zero_share: f32, effort: Effort) -> bool {
        let near = |a: f32, b: f32, by: f32| a == b || (a - b).abs() <= by;
        let (then, now) = (self.effort.seconds_per_gb(), effort.seconds_per_gb());
        self.left > 0
            && near(then, now, Self::EFFORT_NEAR * then.min(now))
            && near(self.zero_share, zero_share, Self::SHARE_NEAR)
            && self
                .bits
                .iter()
                .zip(bits)
                .all(|(a, b)| near(*a, *b, Self::BITS_NEAR))
    }
}

impl Encoder {
    /// An encoder. It takes [`Settings::context_bytes`] of memory, most of it at the first chunk; those of [`Encoder::team`] have it.
    ///
    /// # Errors
    /// When the level is out of range or memory is short.
    pub fn new(settings: Settings) -> Result<Self, EncoderError> {
        if let Level::Zstd(level) = settings.level
            && !(Level::ZSTD_MIN..=Level::ZSTD_MAX).contains(&level)
        {
            return Err(EncoderError::Level { level });
        }
        let tools = match settings.level {
            Level::None => None,
            _ => Some(Tools::new(settings.has_checksum())?),
        };
        Ok(Self {
            settings,
            tools,
            zero: None,
        })
    }

    /// As many encoders as threads are to work on chunks of `chunk_len` bytes, and nothing is done for the first time later: libzstd has allocated what it needs, kernels are
    /// chosen, and in [`Level::Auto`] what the ways cost on this processor is known.
    ///
    /// # Errors
    /// As [`Encoder::new`].
    pub fn team(
        settings: Settings,
        count: usize,
        chunk_len: usize,
    ) -> Result<Vec<Self>, EncoderError> {
        let mut chunk = vec![0; chunk_len];
        let mut frame = vec![0; frame_bound(chunk_len)];
        let mut team = Vec::with_capacity(count);
        for _ in 0..count {
            let mut encoder = Self::new(settings)?;
            encoder.warm_up(&chunk, &mut frame)?;
            team.push(encoder);
        }
        if settings.level == Level::Auto
            && let Some((first, others)) = team.split_first_mut()
            && let Some(tools) = &mut first.tools
        {
            let stretch = &mut chunk[..chunk_len.min(MEASURED_LEN)];
            fill_like_weights(stretch);
            tools.measure(&settings, stretch, &mut frame);
            for other in others.iter_mut().filter_map(|other| other.tools.as_mut()) {
                other.rates = tools.rates;
            }
        }
        Ok(team)
    }

    /// From now on what was asked for counts no more, only the time: as in [`Level::Auto`]. Without effect where nothing is compressed.
    pub fn hurry(&mut self) {
        if self.tools.is_some() {
            self.settings.level = Level::Auto;
        }
    }

    /// Makes libzstd allocate now what this chunk needs, which may be all zero.
    fn warm_up(&mut self, chunk: &[u8], frame: &mut [u8]) -> Result<(), EncoderError> {
        let Some(tools) = &mut self.tools else {
            return Ok(());
        };
        // For a short trial the same level may take other memory than for a chunk.
        for len in [LONG_TRIAL_LEN, TRIAL_LEN, chunk.len()] {
            let bytes = &chunk[..len.min(chunk.len())];
            // The highest comes last, and has the others' memory.
            for level in AUTO_LEVELS.iter().chain(self.settings.levels()) {
                tools
                    .plain
                    .whole(*level, bytes, frame)
                    .map_err(|reason| EncoderError::Context { reason })?;
                if self.settings.filter == FilterChoice::Auto {
                    let mut out = Growing::new(frame);
                    tools
                        .write_filtered(Filter::Planes4, *level, bytes, &mut out, |_| ())
                        .ok_or(EncoderError::Context {
                            reason: "out of memory",
                        })?;
                }
            }
        }
        Ok(())
    }

    /// Makes the frame that holds `chunk`, which is at most [`CHUNK_LEN_MAX`] bytes long. What is behind the frame in `out`, up to [`frame_bound`], is unspecified.
    ///
    /// # Panics
    /// When `out` is shorter than [`frame_bound`] of the chunk's length.
    pub fn encode(&mut self, chunk: &[u8], out: &mut [u8], effort: Effort) -> Encoded {
        debug_assert!(chunk.len() as u64 <= CHUNK_LEN_MAX);
        let bound = frame_bound(chunk.len());
        assert!(
            out.len() >= bound,
            "a frame of {} bytes needs {bound} bytes of room, not {}",
            chunk.len(),
            out.len()
        );
        let out = &mut out[..bound];
        if !chunk.is_empty() && zeros::is_zero(chunk) {
            return self.zero(chunk, out);
        }
        let Some(tools) = &mut self.tools else {
            return raw(chunk, self.settings.has_checksum());
        };
        let effort = match self.settings.level {
            Level::Auto => effort,
            _ => Effort::MOST,
        };
        let started = cpu_time::of_thread();
        let (coding, forecast) = tools.choose(&self.settings, chunk, out, effort);
        let encoded = tools.code(coding, self.settings.plane_coder, chunk, out);
        let gigabytes = chunk.len() as f32 / 1e9;
        let taken = cpu_time::of_thread().saturating_sub(started).as_secs_f32() / gigabytes;
        tools.learn_cost(coding, forecast, taken);
        if effort != Effort::MOST {
            let has_gained = matches!(encoded.body, Body::Written { .. });
            tools.learn_gain(coding, has_gained);
        }
        encoded
    }

    /// Bytes of libzstd's memory that it takes at this moment.
    #[cfg(test)]
    pub(super) fn sizeof(&self) -> usize {
        self.tools.as_ref().map_or(0, |tools| {
            tools.plain.sizeof() + tools.filtered.sizeof() + 2 * tools.planes.len()
        })
    }

    fn zero(&mut self, chunk: &[u8], out: &mut [u8]) -> Encoded {
        let known = self.zero.take().filter(|zero| zero.raw_len == chunk.len());
        let has_checksum = self.settings.has_checksum();
        let zero = self
            .zero
            .insert(known.unwrap_or_else(|| ZeroFrame::of(chunk, has_checksum)));
        out[..zero.frame.len()].copy_from_slice(&zero.frame);
        Encoded {
            body: Body::Written {
                len: zero.frame.len(),
            },
            kind: FrameKind::Zero,
            filter: Filter::None,
            digest: zero.digest,
            crc64: zero.crc64,
            raw_len: chunk.len(),
        }
    }
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// The raw frame: read once, a block at a time, by all sums.
fn raw(chunk: &[u8], has_checksum: bool) -> Encoded {
    let mut digest = Digesting::new();
    let (checksum, crc64) = raw_sums(chunk, has_checksum, |block| digest.update(block));
    raw_encoded(chunk, digest.finish(), checksum, crc64)
}

/// Content checksum of the chunk, if its raw frame is to carry one, and checksum of that frame.
fn raw_sums(chunk: &[u8], has_checksum: bool, mut see: impl FnMut(&[u8])) -> (Option<u32>, Crc64) {
    let mut checksum = has_checksum.then(ContentChecksum::new);
    let mut crc64 = Summing::new();
    crc64.update(&hand_header(chunk.len(), has_checksum));
    if chunk.is_empty() {
        crc64.update(&raw_block_header(0, 0));
    }
    for (index, block) in chunk.chunks(BLOCK_LEN_MAX).enumerate() {
        see(block);
        if let Some(checksum) = &mut checksum {
            checksum.update(block);
        }
        crc64.update(&raw_block_header(chunk.len(), index));
        crc64.update(block);
    }
    let checksum = checksum.map(|checksum| checksum.finish());
    if let Some(checksum) = checksum {
        crc64.update(&checksum.to_le_bytes());
    }
    (checksum, crc64.finish())
}

fn raw_encoded(chunk: &[u8], digest: Digest, checksum: Option<u32>, crc64: Crc64) -> Encoded {
    Encoded {
        body: Body::Raw { checksum },
        kind: FrameKind::Raw,
        filter: Filter::None,
        digest,
        crc64,
        raw_len: chunk.len(),
    }
}

impl Tools {
    fn new(has_checksum: bool) -> Result<Self, EncoderError> {
        let compressor = || {
            Compressor::new(has_checksum).ok_or(EncoderError::Context {
                reason: "out of memory",
            })
        };
        Ok(Self {
            has_checksum,
            sample: Sample::new(),
            writer: Writer::new(),
            plain: compressor()?,
            filtered: compressor()?,
            planes: vec![0; 4 * PLANE_LEN].into(),
            rates: Rates::new(),
            last: None,
            failures: 0,
        })
    }

    /// Learns what coding this chunk takes, in the ways whose cost is not found out by a trial.
    fn measure(&mut self, settings: &Settings, chunk: &[u8], out: &mut [u8]) {
        let filter = match settings.filter {
            FilterChoice::Auto => Filter::Planes2Rotated,
            FilterChoice::None => Filter::None,
        };
        let gigabytes = chunk.len() as f32 / 1e9;
        self.sample.take(chunk);
        for round in 0..=MEASURED_ROUNDS {
            for filter in [None, Some(filter)] {
                // Not before the other one was learned, which moves the factors of all.
                let (coding, forecast) = match filter {
                    None => (Coding::Raw, self.raw_forecast()),
                    Some(filter) => self.forecast_huffman(filter, Effort::FIRST),
                };
                let started = cpu_time::of_thread();
                self.code(coding, settings.plane_coder, chunk, out);
                let taken = cpu_time::of_thread().saturating_sub(started);
                if round > 0 {
                    let taken = taken.as_secs_f32() / gigabytes;
                    self.learn_cost(coding, forecast, taken);
                }
            }
        }
    }

    fn raw_forecast(&self) -> Forecast {
        Forecast {
            cpu: self.factor(Way::Raw) * (RAW_COST + self.checksum_cost()),
            stored: 1.0,
        }
    }

    /// The way with the least price, or the one that had it for a chunk just like this. `out` is scratch.
    fn choose(
        &mut self,
        settings: &Settings,
        chunk: &[u8],
        out: &mut [u8],
        effort: Effort,
    ) -> (Coding, Forecast) {
        let raw = self.raw_forecast();
        // Storing nothing at all for the least there is to pay.
        let free = Forecast {
            cpu: CODED_COST,
            stored: 0.0,
        };
        if chunk.is_empty() || free.price(effort) >= raw.price(effort) {
            return (Coding::Raw, raw);
        }
        self.sample.take(chunk);
        let zero_share = self.sample.zero_share();
        if let Some(mut last) = self.last.take() {
            let bits = self.sample.bits(last.filter);
            if last.serves(&bits, zero_share, effort) {
                last.left -= 1;
                self.last = Some(last);
                // What raw frames cost is known better by now.
                let forecast = match last.coding {
                    Coding::Raw => raw,
                    _ => last.forecast,
                };
                return (last.coding, forecast);
            }
        }
        let (coding, forecast) = self.choose_closely(settings, chunk, out, effort, raw);
        self.last = Some(Choice {
            coding,
            forecast,
            effort,
            bits: self.sample.bits(coding.filter()),
            filter: coding.filter(),
            zero_share,
            left: Choice::SERVES,
        });
        (coding, forecast)
    }

    /// What this way took so far, in chunks like the one that the sample is of, against what it was expected to take.
    fn factor(&self, way: Way) -> f32 {
        self.rates.factor(way, self.zeros())
    }

    fn zeros(&self) -> Zeros {
        match self.sample.zero_share() > ZEROS_FROM {
            true => Zeros::Many,
            false => Zeros::Few,
        }
    }

    /// This coding of the chunk that the sample is of took so many CPU seconds per GB.
    fn learn_cost(&mut self, coding: Coding, forecast: Forecast, taken: f32) {
        let zeros = self.zeros();
        self.rates.learn(coding.way(), zeros, forecast.cpu, taken);
    }

    /// The coding that was chosen last either made the chunk's frame, or gained so little that the frame is raw: then chunks like it are raw for a while without a try.
    fn learn_gain(&mut self, coding: Coding, has_gained: bool) {
        if has_gained {
            self.failures = 0;
            return;
        }
        if let Some(last) = &mut self.last
            && coding != Coding::Raw
        {
            last.coding = Coding::Raw;
            last.left = Choice::SERVES << self.failures;
            self.failures = (self.failures + 1).min(Choice::DOUBLES_MAX);
        }
    }

    fn choose_closely(
        &mut self,
        settings: &Settings,
        chunk: &[u8],
        out: &mut [u8],
        effort: Effort,
        raw: Forecast,
    ) -> (Coding, Forecast) {
        let mut best = (Coding::Raw, raw);
        let looks_random =
            self.sample.bits(Filter::None)[0] > RANDOM_BITS && self.sample.zero_share() == 0.0;

        let mut best_filter = (Filter::None, f32::INFINITY);
        if !looks_random {
            for filter in settings.filters() {
                let (coding, forecast) = self.forecast_huffman(*filter, effort);
                // More planes take more time and are not worth a difference that the sample cannot see.
                let is_wider = filter.width() > best_filter.0.width();
                let margin = if is_wider { WIDER_MARGIN } else { 0.0 };
                if forecast.stored + margin < best_filter.1 {
                    best_filter = (*filter, forecast.stored);
                }
                let priced_in = Forecast {
                    stored: forecast.stored + margin,
                    ..forecast
                };
                if !matches!(settings.level, Level::Zstd(_)) && is_better(priced_in, best.1, effort)
                {
                    best = (coding, forecast);
                }
            }
        }
        let exact = effort == Effort::MOST;
        if exact && best.0 != Coding::Raw {
            // Only trials can be compared with trials.
            let forecast = self.try_out(best.0, settings.plane_coder, chunk, out, exact);
            best = match forecast {
                Some(forecast) if is_better(forecast, raw, effort) => (best.0, forecast),
                _ => (Coding::Raw, raw),
            };
        }
        for level in settings.levels() {
            let slower = if *level > 1 { LEVEL_3_COST } else { 0.0 };
            let plain = Coding::Zstd { level: *level };
            let least_plain = Forecast {
                cpu: RAW_COST + REPETITION_COST_MIN + slower,
                stored: 0.0,
            };
            let filtered = Coding::FilteredZstd {
                filter: best_filter.0,
                level: *level,
            };
            let least_filtered = Forecast {
                cpu: best.1.cpu + REPETITION_COST_MIN + slower,
                stored: best.1.stored * (1.0 - FILTERED_GAIN_MAX),
            };
            for (coding, least) in [(plain, least_plain), (filtered, least_filtered)] {
                let is_twice_the_same = coding != plain && coding.filter() == Filter::None;
                if is_twice_the_same || least.price(effort) >= best.1.price(effort) {
                    continue;
                }
                if let Some(forecast) =
                    self.try_out(coding, settings.plane_coder, chunk, out, exact)
                    && is_better(forecast, best.1, effort)
                {
                    best = (coding, forecast);
                }
            }
        }
        best
    }

    fn checksum_cost(&self) -> f32 {
        if self.has_checksum {
            CHECKSUM_COST
        } else {
            0.0
        }
    }

    /// What Huffman codes behind this filter would do, by the sample's entropies.
    fn forecast_huffman(&mut self, filter: Filter, effort: Effort) -> (Coding, Forecast) {
        /// Bits per byte that codes and tables lose against the entropy.
        const LOSS_BITS: f32 = 0.04;
        let factor = self.factor(
            Coding::Huffman {
                filter,
                dense_bits: 0.0,
            }
            .way(),
        );
        // The plane that just pays for its coding.
        let coding_cost = factor * (HUFFMAN_PLANE_COST - DENSE_PLANE_COST);
        let paying = 8.0 * (1.0 - coding_cost / effort.seconds_per_gb().max(f32::MIN_POSITIVE));
        let dense_bits = paying.clamp(0.0, DENSE_BITS_MAX);
        let bits = self.sample.bits(filter);
        let width = filter.width();
        let mut cpu = CODED_COST + self.checksum_cost();
        if filter != Filter::None {
            cpu += SPLIT_COST;
        }
        let mut stored = 0.0;
        // What of a zero stays, where it has no block of its own.
        let mut stored_zero = 0.0;
        for bits in &bits[..width] {
            let (cost, stays, zero_stays) = if *bits > dense_bits {
                (DENSE_PLANE_COST, 1.0, 0.0)
            } else {
                (HUFFMAN_PLANE_COST, (bits + LOSS_BITS) / 8.0, 1.0 / 8.0)
            };
            cpu += cost / width as f32;
            stored += stays / width as f32;
            stored_zero += zero_stays / width as f32;
        }
        let zero_share = self.sample.zero_share();
        let scattered_share = self.sample.scattered_share();
        let page_share = zero_share - scattered_share;
        let forecast = Forecast {
            cpu: factor * (cpu * (1.0 - page_share) + ZERO_COST * page_share),
            stored: stored * (1.0 - zero_share) + stored_zero * scattered_share,
        };
        (Coding::Huffman { filter, dense_bits }, forecast)
    }

    /// What this way does with a stretch of the chunk. `None` when it gains nothing at all.
    fn try_out(
        &mut self,
        coding: Coding,
        plane_coder: PlaneCoder,
        chunk: &[u8],
        out: &mut [u8],
        long: bool,
    ) -> Option<Forecast> {
        let (len, count) = if long {
            (LONG_TRIAL_LEN, LONG_TRIALS)
        } else {
            (TRIAL_LEN, 1)
        };
        let mut stored = 0;
        let mut tried = 0;
        let started = cpu_time::of_thread();
        for index in 0..count {
            let stretch = &chunk[self.sample.stretch(chunk.len(), len, index, count)];
            let (written, _) = self.write(coding, plane_coder, stretch, out, |_| ())?;
            tried += zeros_left_out(stretch);
            stored += written;
        }
        let taken = cpu_time::of_thread().saturating_sub(started).as_secs_f32();
        let filled = 1.0 - self.sample.zero_share();
        let tried = tried.max(1) as f32;
        let per_gb = taken / (tried / 1e9);
        Some(Forecast {
            cpu: self.factor(coding.way()) * (RAW_COST + per_gb * filled),
            stored: stored as f32 / tried * filled,
        })
    }

    /// Codes the chunk this way, or raw if that gains too little.
    fn code(
        &mut self,
        coding: Coding,
        plane_coder: PlaneCoder,
        chunk: &[u8],
        out: &mut [u8],
    ) -> Encoded {
        if coding == Coding::Raw {
            return raw(chunk, self.has_checksum);
        }
        let mut digest = Digesting::new();
        let (part, whole) = WORTH_IT_AFTER;
        let room = (chunk.len() / whole * part).max(HAND_HEADER_LEN);
        let room = room.min(out.len());
        let mut seen_len = 0;
        let written = self.write(coding, plane_coder, chunk, &mut out[..room], |unit| {
            digest.update(unit);
            seen_len += unit.len();
        });
        if let Some((len, crc64)) = written {
            return Encoded {
                body: Body::Written { len },
                kind: FrameKind::Zstd,
                filter: coding.filter(),
                digest: digest.finish(),
                crc64,
                raw_len: chunk.len(),
            };
        }
        digest.update(&chunk[seen_len..]);
        let (checksum, crc64) = raw_sums(chunk, self.has_checksum, |_| ());
        raw_encoded(chunk, digest.finish(), checksum, crc64)
    }

    /// Writes a frame of these bytes, each of which `see` gets to see in order. `None` when it does not fit; `see` may then have missed the end.
    fn write(
        &mut self,
        coding: Coding,
        plane_coder: PlaneCoder,
        bytes: &[u8],
        out: &mut [u8],
        mut see: impl FnMut(&[u8]),
    ) -> Option<(usize, Crc64)> {
        let mut out = Growing::new(out);
        let level = match coding {
            Coding::Raw => return None,
            Coding::Huffman { filter, dense_bits } if plane_coder == PlaneCoder::Own => {
                let mut checksum = self.has_checksum.then(ContentChecksum::new);
                self.writer.write(
                    (filter, dense_bits),
                    bytes,
                    checksum.is_some(),
                    &mut out,
                    |unit| {
                        see(unit);
                        if let Some(checksum) = &mut checksum {
                            checksum.update(unit);
                        }
                    },
                )?;
                if let Some(checksum) = checksum {
                    out.put(&checksum.finish().to_le_bytes())?;
                }
                return Some(out.finish());
            }
            Coding::Huffman { .. } if self.sample.zero_share() > ZEROS_FROM => LIBZSTD_ZEROS_LEVEL,
            Coding::Huffman { .. } => LIBZSTD_HUFFMAN_LEVEL,
            Coding::FilteredZstd { level, .. } | Coding::Zstd { level } => level,
        };
        match coding.filter() {
            Filter::None => {
                see(bytes);
                let len = self.plain.whole(level, bytes, out.rest()).ok()?;
                out.advance(len);
            }
            filter => self.write_filtered(filter, level, bytes, &mut out, see)?,
        }
        Some(out.finish())
    }

    /// A frame of libzstd's over the filter's content.
    fn write_filtered(
        &mut self,
        filter: Filter,
        level: i32,
        bytes: &[u8],
        out: &mut Growing<'_>,
        mut see: impl FnMut(&[u8]),
    ) -> Option<()> {
        let width = filter.width();
        self.filtered.start_filtered(level, bytes.len()).ok()?;
        let mut units = bytes.chunks(width * PLANE_LEN).peekable();
        while let Some(unit) = units.next() {
            see(unit);
            let plane_len = unit.len() / width;
            let body_len = plane_len * width;
            let (planes, tail) = self.planes[..unit.len()].split_at_mut(body_len);
            if plane_len > 0 {
                let mut rest = planes.chunks_exact_mut(plane_len);
                let mut parts: [&mut [u8]; 4] =
                    std::array::from_fn(|_| rest.next().unwrap_or_default());
                planes::split(filter, &unit[..body_len], &mut parts);
            }
            tail.copy_from_slice(&unit[body_len..]);
            let is_last = units.peek().is_none();
            let len = self
                .filtered
                .push(&self.planes[..unit.len()], is_last, out.rest())?;
            out.advance(len);
            out.sum();
        }
        Some(())
    }
}
