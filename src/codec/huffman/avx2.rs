//! The AVX2 kernel of the encoder: 64 symbols at a time become four records of 16, which a scalar loop strings together.
//!
//! In: a code of short codes whose symbols lie within a few stretches of 16: so are the planes of tensors that compress well. Out: the same bit strings as the
//! scalar kernel's. What can fail: a symbol without a code, which has length 0 in the tables.
//!
//! A symbol's code and length are looked up by byte shuffles, 16 table entries each: an index outside a table's 16 gives 0, so the results of all tables are ORed.
//! Neighbours are then joined three times (2, 4, 8 symbols in lanes of 16, 32, 64 bits), the earlier one's code shifted left by the length of the
//! later one's, since bit strings run from the last symbol to the first; and once more across two registers. A lane that is too narrow for its pair, or 16 symbols
//! of more than 56 bits, is rare; then all 64 symbols take a wider way.

#![allow(unsafe_code, reason = "the fence: loads and stores of vectors")]

use std::arch::asm;
use std::arch::x86_64::*;

use super::code::Code;
use super::encode::Slot;
use super::records::{RECORD_BITS_MAX, RecordString, fit_a_record};

type Records = super::records::Records<RECORDS_MAX>;

/// Symbols that one step takes.
const STEP: usize = 64;
/// Records of a step: of 16 symbols each where most fit, or of 8.
const SPARSE: usize = 4;
const DENSE: usize = 8;
/// Most records of a step: of 4 symbols each.
const RECORDS_MAX: usize = STEP / 4;
/// Most tables of 16 symbols that are still faster than the scalar kernel.
const TABLES_MAX: usize = 8;

/// Where tables of 16 entries each lie over the symbols with a code. Positions: symbol 0 is at 0, the lowest other symbol with a code at 1, and so on upwards.
pub(super) struct Windows {
    /// How far symbols but 0 are moved down.
    below: u8,
    starts: [u8; TABLES_MAX],
    count: usize,
}

impl Windows {
    /// None when this kernel would not be the fastest: codes are too long, or more tables are needed than pay.
    pub(super) fn of(code: &Code) -> Option<Self> {
        if !fit_a_record(code, 8.0, 3.5) {
            return None;
        }
        let mut above = (1..=u8::MAX)
            .zip(&code.lengths[1..])
            .filter(|&(_, &length)| length > 0);
        let below = above.next()?.0 - 1;
        let mut windows = Self {
            below,
            starts: [0; TABLES_MAX],
            count: 1,
        };
        let mut start = 0;
        for (symbol, _) in above {
            let position = symbol - below;
            if position - start >= 16 {
                *windows.starts.get_mut(windows.count)? = position;
                start = position;
                windows.count += 1;
            }
        }
        Some(windows)
    }
}

/// Encodes two parts into two slots; None when a symbol has no code.
#[target_feature(enable = "avx2,bmi1,bmi2")]
pub(super) fn encode(
    windows: &Windows,
    code: &Code,
    symbols: [&[u8]; 2],
    slots: [&mut Slot; 2],
) -> Option<[usize; 2]> {
    let is_dense = !fit_a_record(code, 16.0, 2.4);
    let encode = match (windows.count, is_dense) {
        (1 | 2, false) => encode_with::<2, SPARSE>,
        (3, false) => encode_with::<3, SPARSE>,
        (4, false) => encode_with::<4, SPARSE>,
        (5 | 6, false) => encode_with::<6, SPARSE>,
        (_, false) => encode_with::<TABLES_MAX, SPARSE>,
        (1 | 2, true) => encode_with::<2, DENSE>,
        (3, true) => encode_with::<3, DENSE>,
        (4, true) => encode_with::<4, DENSE>,
        (5 | 6, true) => encode_with::<6, DENSE>,
        (_, true) => encode_with::<TABLES_MAX, DENSE>,
    };
    encode(windows, code, symbols, slots)
}

#[target_feature(enable = "avx2,bmi1,bmi2")]
fn encode_with<const TABLES: usize, const RECORDS: usize>(
    windows: &Windows,
    code: &Code,
    symbols: [&[u8]; 2],
    [slot0, slot1]: [&mut Slot; 2],
) -> Option<[usize; 2]> {
    let tables = Tables::<TABLES>::of(windows, code);
    let steps = symbols[0].len().min(symbols[1].len()) / STEP;
    let [(rest0, whole0), (rest1, whole1)] =
        symbols.map(|symbols| symbols.split_at(symbols.len() - steps * STEP));
    let (steps0, steps1) = (whole0.as_chunks::<STEP>().0, whole1.as_chunks::<STEP>().0);
    let order = const { order::<RECORDS>() };
    let [mut seen0, mut seen1] = [Seen::nothing(), Seen::nothing()];
    // Records are appended one step later than they are made, so that the CPU can do both at a time.
    let [mut records0, mut records1] = [Records::EMPTY; 2];
    let [mut string0, mut string1] = [RecordString::EMPTY; 2];
    for (step0, step1) in steps0.iter().zip(steps1).rev() {
        let joined = tables.step(step0, &mut seen0);
        string0.append_all(&records0, &order, slot0);
        if !joined.hold::<RECORDS>(&mut records0) {
            tables.hold_wide(step0, &mut records0);
        }
        let joined = tables.step(step1, &mut seen1);
        string1.append_all(&records1, &order, slot1);
        if !joined.hold::<RECORDS>(&mut records1) {
            tables.hold_wide(step1, &mut records1);
        }
    }
    string0.append_all(&records0, &order, slot0);
    string1.append_all(&records1, &order, slot1);
    if !(tables.have(&seen0) && tables.have(&seen1)) {
        return None;
    }
    let [string0, string1] = [string0, string1].map(|string| string.into_bit_string(steps * STEP));
    Some([
        string0.end_with(code, symbols[0].len(), rest0, slot0)?,
        string1.end_with(code, symbols[1].len(), rest1, slot1)?,
    ])
}

/// How the usual number of records stand: four are interleaved, the first half's and the second half's.
const fn order<const RECORDS: usize>() -> [usize; RECORDS] {
    let mut order = [0; RECORDS];
    let mut index = 0;
    while index < RECORDS {
        order[index] = if RECORDS == SPARSE {
            [0, 2, 1, 3][index]
        } else {
            index
        };
        index += 1;
    }
    order
}

/// What tells whether all symbols had a code.
struct Seen {
    /// Least length.
    length: __m256i,
    /// Least symbol but 0, less one.
    symbol: __m256i,
}

impl Seen {
    #[target_feature(enable = "avx2")]
    fn nothing() -> Self {
        let most = _mm256_set1_epi8(-1);
        Self {
            length: most,
            symbol: most,
        }
    }
}

struct Tables<const TABLES: usize> {
    below: __m256i,
    /// Positions of the tables' first entries; those of tables that are not needed are all 0, like their entries.
    starts: [__m256i; TABLES],
    codes: [__m256i; TABLES],
    lengths: [__m256i; TABLES],
}

/// Codes and lengths of 32 symbols, and what follows from them.
#[derive(Clone, Copy)]
struct Looked {
    codes: __m256i,
    lengths: __m256i,
    /// Per pair of symbols, 16 bits wide: 2 to the power of the later one's length; both lengths' sum.
    powers: __m256i,
    pair_lengths: __m256i,
}

impl<const TABLES: usize> Tables<TABLES> {
    #[target_feature(enable = "avx2")]
    fn of(windows: &Windows, code: &Code) -> Self {
        let mut codes = [[0u8; 16]; TABLES];
        let mut lengths = [[0u8; 16]; TABLES];
        let mut starts = [0u8; TABLES];
        for (table, &start) in windows.starts.iter().enumerate().take(windows.count) {
            starts[table] = start;
            for (entry, position) in (start..=u8::MAX - windows.below).take(16).enumerate() {
                let symbol = usize::from(if position == 0 {
                    0
                } else {
                    position + windows.below
                });
                (codes[table][entry], lengths[table][entry]) =
                    (code.codes[symbol], code.lengths[symbol]);
            }
        }
        let load = |table: [u8; 16]| {
            // SAFETY: an array of 16 bytes is 128 readable bits.
            let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
            _mm256_broadcastsi128_si256(table)
        };
        Self {
            below: _mm256_set1_epi8(windows.below.cast_signed()),
            starts: starts.map(|start| _mm256_set1_epi8(start.cast_signed())),
            codes: codes.map(load),
            lengths: lengths.map(load),
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn look(&self, symbols: __m256i) -> Looked {
        let position = _mm256_subs_epu8(symbols, self.below);
        let mut codes = _mm256_setzero_si256();
        let mut lengths = _mm256_setzero_si256();
        for table in 0..TABLES {
            // The table's 16 positions become 0x70..0x7f; everything else has the highest bit set, which gives 0.
            let offset = if table == 0 {
                position
            } else {
                _mm256_sub_epi8(position, self.starts[table])
            };
            let index = _mm256_adds_epu8(offset, _mm256_set1_epi8(0x70));
            codes = _mm256_or_si256(codes, _mm256_shuffle_epi8(self.codes[table], index));
            lengths = _mm256_or_si256(lengths, _mm256_shuffle_epi8(self.lengths[table], index));
        }
        let later_twice = _mm256_set_epi8(
            15, 15, 13, 13, 11, 11, 9, 9, 7, 7, 5, 5, 3, 3, 1, 1, 15, 15, 13, 13, 11, 11, 9, 9, 7,
            7, 5, 5, 3, 3, 1, 1,
        );
        let bits = _mm256_set_epi64x(
            0,
            i64::from_le_bytes([1, 2, 4, 8, 16, 32, 64, 128]),
            0,
            i64::from_le_bytes([1, 2, 4, 8, 16, 32, 64, 128]),
        );
        // The upper byte of the power is looked up at the length less 8, which is 0 for what is negative.
        let index = _mm256_sub_epi8(
            _mm256_shuffle_epi8(lengths, later_twice),
            _mm256_set1_epi16(8 << 8),
        );
        Looked {
            codes,
            lengths,
            powers: _mm256_shuffle_epi8(bits, index),
            pair_lengths: _mm256_maddubs_epi16(lengths, _mm256_set1_epi8(1)),
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn step(&self, step: &[u8; STEP], seen: &mut Seen) -> Joined {
        let (low, high) = step.split_at(32);
        // SAFETY: each half of a step is 32 readable bytes.
        let (low, high) = unsafe {
            (
                _mm256_loadu_si256(low.as_ptr().cast()),
                _mm256_loadu_si256(high.as_ptr().cast()),
            )
        };
        let one = _mm256_set1_epi8(1);
        // 0 becomes the highest.
        seen.symbol = _mm256_min_epu8(
            seen.symbol,
            _mm256_min_epu8(_mm256_sub_epi8(low, one), _mm256_sub_epi8(high, one)),
        );
        let (low, high) = (self.look(low), self.look(high));
        seen.length = _mm256_min_epu8(seen.length, _mm256_min_epu8(low.lengths, high.lengths));
        Joined::of(&low, &high)
    }

    /// Holds a step of which something is too wide for its place: records of four symbols. Seldom wanted, so it looks up again what its caller has in registers.
    #[inline(never)]
    #[target_feature(enable = "avx2")]
    fn hold_wide(&self, step: &[u8; STEP], records: &mut Records) {
        for (half, symbols) in step.as_chunks::<32>().0.iter().enumerate() {
            // SAFETY: half a step is 32 readable bytes.
            let looked = self.look(unsafe { _mm256_loadu_si256(symbols.as_ptr().cast()) });
            for (quarter, (codes, lengths)) in looked.fours().into_iter().enumerate() {
                put(records, 8 * half + 4 * quarter, codes, lengths);
            }
        }
        records.count = RECORDS_MAX;
    }

    /// Whether all symbols that were seen have a code.
    #[target_feature(enable = "avx2")]
    fn have(&self, seen: &Seen) -> bool {
        // Symbols between 0 and the lowest one share the index of 0, so they are found by themselves.
        let in_span = _mm256_cmpeq_epi8(_mm256_max_epu8(seen.symbol, self.below), seen.symbol);
        let without = _mm256_cmpeq_epi8(
            _mm256_min_epu8(seen.length, in_span),
            _mm256_setzero_si256(),
        );
        _mm256_testz_si256(without, without) != 0
    }
}

/// A step's codes and lengths of eight symbols each, first half and second half.
struct Joined {
    codes: [__m256i; 2],
    lengths: [__m256i; 2],
    /// Set where a pair of symbols is too wide for the above to be right.
    wide_pairs: __m256i,
}

impl Joined {
    #[inline]
    #[target_feature(enable = "avx2")]
    fn of(low: &Looked, high: &Looked) -> Self {
        let pair_lengths = _mm256_max_epi16(low.pair_lengths, high.pair_lengths);
        let zero = _mm256_setzero_si256();
        Self {
            codes: [low.eights(), high.eights()],
            lengths: [
                _mm256_sad_epu8(low.lengths, zero),
                _mm256_sad_epu8(high.lengths, zero),
            ],
            wide_pairs: _mm256_cmpgt_epi16(pair_lengths, _mm256_set1_epi16(16)),
        }
    }

    /// Holds the step as `RECORDS` records, or as more; false when something is too wide.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn hold<const RECORDS: usize>(&self, records: &mut Records) -> bool {
        let limit = _mm256_set1_epi32(RECORD_BITS_MAX);
        let [low, high] = self.codes;
        let [low_lengths, high_lengths] = self.lengths;
        if RECORDS == SPARSE {
            let later_lengths = _mm256_unpackhi_epi64(low_lengths, high_lengths);
            let lengths = _mm256_add_epi64(
                _mm256_unpacklo_epi64(low_lengths, high_lengths),
                later_lengths,
            );
            if self.fits(_mm256_cmpgt_epi32(lengths, limit)) {
                let earlier = shift_left_64(_mm256_unpacklo_epi64(low, high), later_lengths);
                let codes = _mm256_or_si256(earlier, _mm256_unpackhi_epi64(low, high));
                put(records, 0, codes, lengths);
                records.count = SPARSE;
                return true;
            }
        }
        let fits = self.fits(_mm256_cmpgt_epi32(
            _mm256_max_epi32(low_lengths, high_lengths),
            limit,
        ));
        if fits {
            put(records, 0, low, low_lengths);
            put(records, 4, high, high_lengths);
            records.count = DENSE;
        }
        fits
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn fits(&self, wide: __m256i) -> bool {
        let wide = _mm256_or_si256(wide, self.wide_pairs);
        _mm256_testz_si256(wide, wide) != 0
    }
}

/// Four records from `start` on.
#[inline]
#[target_feature(enable = "avx2")]
fn put(records: &mut Records, start: usize, codes: __m256i, lengths: __m256i) {
    // SAFETY: both slices are of four words, 32 writable bytes.
    unsafe {
        _mm256_storeu_si256(records.codes[start..start + 4].as_mut_ptr().cast(), codes);
        _mm256_storeu_si256(
            records.lengths[start..start + 4].as_mut_ptr().cast(),
            lengths,
        );
    }
}

/// Lanes of 32 bits shifted left by less than 32. An instruction of its own: the intrinsic becomes three, since a shift by 32 and more has to give 0.
#[inline]
#[target_feature(enable = "avx2")]
fn shift_left_32(lanes: __m256i, counts: __m256i) -> __m256i {
    let shifted;
    // SAFETY: reads and writes nothing but registers; the CPU has AVX2.
    unsafe {
        asm!("vpsllvd {0}, {1}, {2}", lateout(ymm_reg) shifted, in(ymm_reg) lanes, in(ymm_reg) counts, options(pure, nomem, nostack, preserves_flags));
    }
    shifted
}

/// The same for lanes of 64 bits.
#[inline]
#[target_feature(enable = "avx2")]
fn shift_left_64(lanes: __m256i, counts: __m256i) -> __m256i {
    let shifted;
    // SAFETY: as above.
    unsafe {
        asm!("vpsllvq {0}, {1}, {2}", lateout(ymm_reg) shifted, in(ymm_reg) lanes, in(ymm_reg) counts, options(pure, nomem, nostack, preserves_flags));
    }
    shifted
}

impl Looked {
    /// Codes of eight symbols each, if no pair takes more than 16 bits.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn eights(&self) -> __m256i {
        let earlier = _mm256_and_si256(self.codes, _mm256_set1_epi16(0xff));
        let pairs = _mm256_or_si256(
            _mm256_mullo_epi16(earlier, self.powers),
            _mm256_srli_epi16(self.codes, 8),
        );
        let earlier = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff));
        let fours = _mm256_or_si256(
            shift_left_32(earlier, _mm256_srli_epi32(self.pair_lengths, 16)),
            _mm256_srli_epi32(pairs, 16),
        );
        let four_lengths = _mm256_madd_epi16(self.pair_lengths, _mm256_set1_epi16(1));
        let earlier = _mm256_and_si256(fours, _mm256_set1_epi64x(0xffff_ffff));
        _mm256_or_si256(
            shift_left_64(earlier, _mm256_srli_epi64(four_lengths, 32)),
            _mm256_srli_epi64(fours, 32),
        )
    }

    /// Codes and lengths of four symbols each, first half and second half, whatever their lengths.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn fours(&self) -> [(__m256i, __m256i); 2] {
        let zero = _mm256_setzero_si256();
        let one = _mm256_set1_epi16(1);
        let pairs_low = _mm256_madd_epi16(
            _mm256_unpacklo_epi8(self.codes, zero),
            _mm256_unpacklo_epi16(self.powers, one),
        );
        let pairs_high = _mm256_madd_epi16(
            _mm256_unpackhi_epi8(self.codes, zero),
            _mm256_unpackhi_epi16(self.powers, one),
        );
        let later_lengths = _mm256_srli_epi32(self.pair_lengths, 16);
        let join = |pairs: __m256i, later_lengths: __m256i| {
            let earlier = _mm256_and_si256(pairs, _mm256_set1_epi64x(0xffff_ffff));
            _mm256_or_si256(
                shift_left_64(earlier, later_lengths),
                _mm256_srli_epi64(pairs, 32),
            )
        };
        let codes_low = join(pairs_low, _mm256_unpacklo_epi32(later_lengths, zero));
        let codes_high = join(pairs_high, _mm256_unpackhi_epi32(later_lengths, zero));
        let lengths = _mm256_madd_epi16(self.pair_lengths, one);
        let (lengths_low, lengths_high) = (
            _mm256_unpacklo_epi32(lengths, zero),
            _mm256_unpackhi_epi32(lengths, zero),
        );
        [
            (
                _mm256_permute2x128_si256(codes_low, codes_high, 0x20),
                _mm256_permute2x128_si256(lengths_low, lengths_high, 0x20),
            ),
            (
                _mm256_permute2x128_si256(codes_low, codes_high, 0x31),
                _mm256_permute2x128_si256(lengths_low, lengths_high, 0x31),
            ),
        ]
    }
}
