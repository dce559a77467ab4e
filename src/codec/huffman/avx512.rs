//! The AVX-512 kernel of the encoder: 128 symbols at a time become eight records of 16 (or 16 of 8, or 32 of 4), which a scalar loop strings together.
//!
//! In: any code. Out: the same bit strings as the scalar kernel's. What can fail: a symbol without a code, which has length 0 in the tables.
//!
//! As the AVX2 kernel, whose file says why; but one permutation looks up 128 entries, so that any alphabet does, and lanes of 16 bits can be shifted each by
//! its own count.

#![allow(unsafe_code, reason = "the fence: loads and stores of vectors")]

use std::arch::asm;
use std::arch::x86_64::*;

use super::code::Code;
use super::encode::Slot;
use super::records::{RECORD_BITS_MAX, RecordString, fit_a_record};

/// Symbols that one step takes.
const STEP: usize = 128;
/// Records of a step: of 16 symbols each where most fit, or of 8, or of 4, which always fit.
const SPARSE: usize = STEP / 16;
const DENSE: usize = STEP / 8;
const DENSEST: usize = STEP / 4;

type Records = super::records::Records<DENSEST>;

/// Encodes two parts into two slots; None when a symbol has no code.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,bmi1,bmi2")]
pub(super) fn encode(
    code: &Code,
    symbols: [&[u8]; 2],
    slots: [&mut Slot; 2],
) -> Option<[usize; 2]> {
    let is_low = code.lengths[128..].iter().all(|&length| length == 0);
    let encode = match (
        is_low,
        fit_a_record(code, 16.0, 2.4),
        fit_a_record(code, 8.0, 2.4),
    ) {
        (true, true, _) => encode_with::<true, SPARSE>,
        (true, false, true) => encode_with::<true, DENSE>,
        (true, false, false) => encode_with::<true, DENSEST>,
        (false, true, _) => encode_with::<false, SPARSE>,
        (false, false, true) => encode_with::<false, DENSE>,
        (false, false, false) => encode_with::<false, DENSEST>,
    };
    encode(code, symbols, slots)
}

/// `LOW`: all symbols with a code are below 128.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,bmi1,bmi2")]
fn encode_with<const LOW: bool, const RECORDS: usize>(
    code: &Code,
    symbols: [&[u8]; 2],
    [slot0, slot1]: [&mut Slot; 2],
) -> Option<[usize; 2]> {
    let tables = Tables::<LOW>::of(code);
    let steps = symbols[0].len().min(symbols[1].len()) / STEP;
    let [(rest0, whole0), (rest1, whole1)] =
        symbols.map(|symbols| symbols.split_at(symbols.len() - steps * STEP));
    let (steps0, steps1) = (whole0.as_chunks::<STEP>().0, whole1.as_chunks::<STEP>().0);
    let order: [usize; RECORDS] = std::array::from_fn(|index| index);
    let mut seen = Seen::nothing();
    // Records are appended one step later than they are made, so that the CPU can do both at a time.
    let [mut records0, mut records1] = [Records::EMPTY; 2];
    let [mut string0, mut string1] = [RecordString::EMPTY; 2];
    for (step0, step1) in steps0.iter().zip(steps1).rev() {
        let step0 = tables.step(step0, &mut seen);
        string0.append_all(&records0, &order, slot0);
        hold::<RECORDS>(&step0, &mut records0);
        let step1 = tables.step(step1, &mut seen);
        string1.append_all(&records1, &order, slot1);
        hold::<RECORDS>(&step1, &mut records1);
    }
    string0.append_all(&records0, &order, slot0);
    string1.append_all(&records1, &order, slot1);
    if !tables.have(&seen) {
        return None;
    }
    let [string0, string1] = [string0, string1].map(|string| string.into_bit_string(steps * STEP));
    Some([
        string0.end_with(code, symbols[0].len(), rest0, slot0)?,
        string1.end_with(code, symbols[1].len(), rest1, slot1)?,
    ])
}

/// What tells whether all symbols had a code.
struct Seen {
    /// Least length.
    length: __m512i,
    /// All symbols, ORed.
    symbols: __m512i,
}

impl Seen {
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn nothing() -> Self {
        Self {
            length: _mm512_set1_epi8(-1),
            symbols: _mm512_setzero_si512(),
        }
    }
}

/// Codes and lengths of all symbols, 64 a register.
struct Tables<const LOW: bool> {
    codes: [__m512i; 4],
    lengths: [__m512i; 4],
}

impl<const LOW: bool> Tables<LOW> {
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn of(code: &Code) -> Self {
        let load = |table: &[u8; 256], quarter: usize| {
            let entries = &table[64 * quarter..][..64];
            // SAFETY: 64 readable bytes.
            unsafe { _mm512_loadu_si512(entries.as_ptr().cast()) }
        };
        Self {
            codes: [
                load(&code.codes, 0),
                load(&code.codes, 1),
                load(&code.codes, 2),
                load(&code.codes, 3),
            ],
            lengths: [
                load(&code.lengths, 0),
                load(&code.lengths, 1),
                load(&code.lengths, 2),
                load(&code.lengths, 3),
            ],
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn look_up(table: &[__m512i; 4], symbols: __m512i) -> __m512i {
        let low = _mm512_permutex2var_epi8(table[0], symbols, table[1]);
        if LOW {
            return low;
        }
        let high = _mm512_permutex2var_epi8(table[2], symbols, table[3]);
        _mm512_mask_blend_epi8(_mm512_movepi8_mask(symbols), low, high)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn step(&self, step: &[u8; STEP], seen: &mut Seen) -> [Looked; 2] {
        let (low, high) = step.split_at(64);
        // SAFETY: each half of a step is 64 readable bytes.
        let (low, high) = unsafe {
            (
                _mm512_loadu_si512(low.as_ptr().cast()),
                _mm512_loadu_si512(high.as_ptr().cast()),
            )
        };
        let looked = [low, high].map(|symbols| {
            let lengths = Self::look_up(&self.lengths, symbols);
            Looked {
                codes: Self::look_up(&self.codes, symbols),
                lengths,
                later_lengths: _mm512_srli_epi16(lengths, 8),
                pair_lengths: _mm512_maddubs_epi16(lengths, _mm512_set1_epi8(1)),
            }
        });
        seen.length = _mm512_min_epu8(
            seen.length,
            _mm512_min_epu8(looked[0].lengths, looked[1].lengths),
        );
        seen.symbols = _mm512_or_si512(seen.symbols, _mm512_or_si512(low, high));
        looked
    }

    /// Whether all symbols that were seen have a code.
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn have(&self, seen: &Seen) -> bool {
        let is_high = LOW && _mm512_movepi8_mask(seen.symbols) != 0;
        let without = _mm512_cmpeq_epi8_mask(seen.length, _mm512_setzero_si512());
        without == 0 && !is_high
    }
}

/// Codes and lengths of 64 symbols, and what follows from them.
struct Looked {
    codes: __m512i,
    lengths: __m512i,
    /// Per pair of symbols, 16 bits wide: the later one's length; both lengths' sum.
    later_lengths: __m512i,
    pair_lengths: __m512i,
}

/// Holds a step as `RECORDS` records, or as more when something is too wide for its place.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn hold<const RECORDS: usize>(step: &[Looked; 2], records: &mut Records) {
    let [low, high] = step;
    if RECORDS < DENSEST {
        let pair_lengths = _mm512_max_epi16(low.pair_lengths, high.pair_lengths);
        let wide_pairs = _mm512_cmpgt_epi16_mask(pair_lengths, _mm512_set1_epi16(16)) != 0;
        let zero = _mm512_setzero_si512();
        let (low_codes, high_codes) = (low.eights(), high.eights());
        let (low_lengths, high_lengths) = (
            _mm512_sad_epu8(low.lengths, zero),
            _mm512_sad_epu8(high.lengths, zero),
        );
        if RECORDS == SPARSE {
            let evens = _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0);
            let odds = _mm512_set_epi64(15, 13, 11, 9, 7, 5, 3, 1);
            let later_lengths = _mm512_permutex2var_epi64(low_lengths, odds, high_lengths);
            let lengths = _mm512_add_epi64(
                _mm512_permutex2var_epi64(low_lengths, evens, high_lengths),
                later_lengths,
            );
            if !wide_pairs && !exceed(lengths) {
                let earlier = shift_left_64(
                    _mm512_permutex2var_epi64(low_codes, evens, high_codes),
                    later_lengths,
                );
                put(
                    records,
                    0,
                    _mm512_or_si512(
                        earlier,
                        _mm512_permutex2var_epi64(low_codes, odds, high_codes),
                    ),
                    lengths,
                );
                records.count = SPARSE;
                return;
            }
        }
        if !wide_pairs && !exceed(_mm512_max_epi64(low_lengths, high_lengths)) {
            put(records, 0, low_codes, low_lengths);
            put(records, 8, high_codes, high_lengths);
            records.count = DENSE;
            return;
        }
    }
    for (half, looked) in step.iter().enumerate() {
        for (quarter, (codes, lengths)) in looked.fours().into_iter().enumerate() {
            put(records, 16 * half + 8 * quarter, codes, lengths);
        }
    }
    records.count = DENSEST;
}

/// Whether a length is more than a record holds.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn exceed(lengths: __m512i) -> bool {
    _mm512_cmpgt_epi64_mask(lengths, _mm512_set1_epi64(RECORD_BITS_MAX.into())) != 0
}

/// Eight records from `start` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn put(records: &mut Records, start: usize, codes: __m512i, lengths: __m512i) {
    // SAFETY: both slices are of eight words, 64 writable bytes.
    unsafe {
        _mm512_storeu_si512(records.codes[start..start + 8].as_mut_ptr().cast(), codes);
        _mm512_storeu_si512(
            records.lengths[start..start + 8].as_mut_ptr().cast(),
            lengths,
        );
    }
}

impl Looked {
    /// Codes of eight symbols each, if no pair takes more than 16 bits.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn eights(&self) -> __m512i {
        let earlier = _mm512_and_si512(self.codes, _mm512_set1_epi16(0xff));
        let pairs = _mm512_or_si512(
            shift_left_16(earlier, self.later_lengths),
            _mm512_srli_epi16(self.codes, 8),
        );
        let earlier = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff));
        let fours = _mm512_or_si512(
            shift_left_32(earlier, _mm512_srli_epi32(self.pair_lengths, 16)),
            _mm512_srli_epi32(pairs, 16),
        );
        let four_lengths = _mm512_madd_epi16(self.pair_lengths, _mm512_set1_epi16(1));
        join_64(fours, _mm512_srli_epi64(four_lengths, 32))
    }

    /// Codes and lengths of four symbols each, first half and second half, whatever their lengths.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn fours(&self) -> [(__m512i, __m512i); 2] {
        let zero = _mm512_setzero_si512();
        let pairs = |codes: __m512i, later_lengths: __m512i| {
            let earlier = _mm512_and_si512(codes, _mm512_set1_epi32(0xffff));
            _mm512_or_si512(
                shift_left_32(earlier, later_lengths),
                _mm512_srli_epi32(codes, 16),
            )
        };
        let pairs_low = pairs(
            _mm512_unpacklo_epi8(self.codes, zero),
            _mm512_unpacklo_epi16(self.later_lengths, zero),
        );
        let pairs_high = pairs(
            _mm512_unpackhi_epi8(self.codes, zero),
            _mm512_unpackhi_epi16(self.later_lengths, zero),
        );
        let later_lengths = _mm512_srli_epi32(self.pair_lengths, 16);
        let codes_low = join_64(pairs_low, _mm512_unpacklo_epi32(later_lengths, zero));
        let codes_high = join_64(pairs_high, _mm512_unpackhi_epi32(later_lengths, zero));
        let lengths = _mm512_madd_epi16(self.pair_lengths, _mm512_set1_epi16(1));
        let (lengths_low, lengths_high) = (
            _mm512_unpacklo_epi32(lengths, zero),
            _mm512_unpackhi_epi32(lengths, zero),
        );
        // Unpacking works within lanes of 128 bits: the low ones hold four symbols' codes 0, 1, then 4, 5, and so on; the high ones 2, 3, then 6, 7.
        let first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
        let second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
        [first, second].map(|order| {
            (
                _mm512_permutex2var_epi64(codes_low, order, codes_high),
                _mm512_permutex2var_epi64(lengths_low, order, lengths_high),
            )
        })
    }
}

/// Joins the halves of lanes of 64 bits: the lower, earlier one is shifted left by the later one's length.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn join_64(halves: __m512i, later_lengths: __m512i) -> __m512i {
    let earlier = _mm512_and_si512(halves, _mm512_set1_epi64(0xffff_ffff));
    _mm512_or_si512(
        shift_left_64(earlier, later_lengths),
        _mm512_srli_epi64(halves, 32),
    )
}

/// Lanes of 16 bits shifted left by less than 16, or to a value of no meaning. An instruction of its own: the intrinsic becomes three, since a shift by all
/// bits and more has to give 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn shift_left_16(lanes: __m512i, counts: __m512i) -> __m512i {
    let shifted;
    // SAFETY: reads and writes nothing but registers; the CPU has AVX-512BW.
    unsafe {
        asm!("vpsllvw {0}, {1}, {2}", lateout(zmm_reg) shifted, in(zmm_reg) lanes, in(zmm_reg) counts, options(pure, nomem, nostack, preserves_flags));
    }
    shifted
}

/// The same for lanes of 32 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn shift_left_32(lanes: __m512i, counts: __m512i) -> __m512i {
    let shifted;
    // SAFETY: as above.
    unsafe {
        asm!("vpsllvd {0}, {1}, {2}", lateout(zmm_reg) shifted, in(zmm_reg) lanes, in(zmm_reg) counts, options(pure, nomem, nostack, preserves_flags));
    }
    shifted
}

/// The same for lanes of 64 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn shift_left_64(lanes: __m512i, counts: __m512i) -> __m512i {
    let shifted;
    // SAFETY: as above.
    unsafe {
        asm!("vpsllvq {0}, {1}, {2}", lateout(zmm_reg) shifted, in(zmm_reg) lanes, in(zmm_reg) counts, options(pure, nomem, nostack, preserves_flags));
    }
    shifted
}
