//! The AVX2 kernel of the encoder: 64 symbols at a time become four records of 16, which a scalar loop strings together.
//!
//! In: a code whose symbols lie within 63 of each other (symbol 0 may be apart) and whose codes are numbers below 256: so are the planes of tensors that
//! compress well. Out: the same bit strings as the scalar kernel's. What can fail: a symbol without a code, which has length 0 in the tables.
//!
//! A symbol's code and length are looked up by byte shuffles, 16 table entries each: an index outside a table's 16 gives 0, so the results of all tables are ORed.
//! Neighbours are then joined three times (2, 4, 8 symbols in lanes of 16, 32, 64 bits), the earlier one's code shifted left by the length of the
//! later one's, since bit strings run from the last symbol to the first; and once more across two registers. A lane that is too narrow for its pair, or 16 symbols
//! of more than 56 bits, is rare; then all 64 symbols take a wider way.

#![allow(unsafe_code, reason = "the fence: loads and stores of vectors")]

use std::arch::asm;
use std::arch::x86_64::*;

use super::code::Code;
use super::encode::{RECORDS_MAX, RecordString, Records, Slot, append};

/// Symbols that one step takes.
const STEP: usize = 64;
/// Symbols of one bit string whose records are made before any is appended: at most a record for every four.
const BATCH: usize = RECORDS_MAX * 4;
/// Most tables of 16 symbols that are still faster than the scalar kernel.
const TABLES_MAX: usize = 4;

/// Tables that hold every symbol of the code; entry 0 is symbol 0's, then come those from the lowest used one up.
fn table_count(code: &Code) -> usize {
    let [first, last] = code.span;
    (usize::from(last - first) + 2).div_ceil(16)
}

/// Whether this kernel can encode with `code`.
pub(super) fn suits(code: &Code) -> bool {
    code.fits_bytes && code.span[0] > 0 && table_count(code) <= TABLES_MAX
}

/// Encodes four quarters into four slots; None when a symbol has no code.
#[target_feature(enable = "avx2,bmi1,bmi2")]
pub(super) fn encode(code: &Code, quarters: [&[u8]; 4], slots: &mut [&mut Slot; 4], records: &mut [Records; 2]) -> Option<[usize; 4]> {
    match table_count(code) {
        1 | 2 => encode_with::<2>(code, quarters, slots, records),
        3 => encode_with::<3>(code, quarters, slots, records),
        _ => encode_with::<TABLES_MAX>(code, quarters, slots, records),
    }
}

#[target_feature(enable = "avx2,bmi1,bmi2")]
fn encode_with<const TABLES: usize>(
    code: &Code,
    quarters: [&[u8]; 4],
    slots: &mut [&mut Slot; 4],
    records: &mut [Records; 2],
) -> Option<[usize; 4]> {
    let tables = Tables::<TABLES>::of(code);
    let [slot0, slot1, slot2, slot3] = slots;
    let [len0, len1] = pair(&tables, code, [quarters[0], quarters[1]], slot0, slot1, records)?;
    let [len2, len3] = pair(&tables, code, [quarters[2], quarters[3]], slot2, slot3, records)?;
    Some([len0, len1, len2, len3])
}

/// Encodes two quarters, taking turns.
#[target_feature(enable = "avx2,bmi1,bmi2")]
fn pair<const TABLES: usize>(
    tables: &Tables<TABLES>,
    code: &Code,
    symbols: [&[u8]; 2],
    slot0: &mut Slot,
    slot1: &mut Slot,
    records: &mut [Records; 2],
) -> Option<[usize; 2]> {
    let mut strings = [RecordString::EMPTY; 2];
    let steps = symbols[0].len().min(symbols[1].len()) / STEP;
    let [(rest0, whole0), (rest1, whole1)] = symbols.map(|symbols| symbols.split_at(symbols.len() - steps * STEP));
    let (steps0, steps1) = (whole0.as_chunks::<STEP>().0, whole1.as_chunks::<STEP>().0);
    for (batch0, batch1) in steps0.rchunks(BATCH / STEP).zip(steps1.rchunks(BATCH / STEP)) {
        let [records0, records1] = records;
        let complete0 = tables.records(batch0, records0);
        let complete1 = tables.records(batch1, records1);
        if !(complete0 && complete1) {
            return None;
        }
        append_pair(records, &mut strings, slot0, slot1);
    }
    let [string0, string1] = strings.map(|string| string.into_bit_string(steps * STEP));
    Some([
        string0.end_with(code, symbols[0].len(), rest0, slot0)?,
        string1.end_with(code, symbols[1].len(), rest1, slot1)?,
    ])
}

/// On its own, so that the loop has all registers.
#[inline(never)]
#[target_feature(enable = "bmi1,bmi2")]
fn append_pair(records: &[Records; 2], strings: &mut [RecordString; 2], slot0: &mut Slot, slot1: &mut Slot) {
    append(records, strings, slot0, slot1);
}

struct Tables<const TABLES: usize> {
    /// One less than the lowest symbol.
    below: __m256i,
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
    fn of(code: &Code) -> Self {
        let first = usize::from(code.span[0]);
        let mut codes = [[0u8; 16]; TABLES];
        let mut lengths = [[0u8; 16]; TABLES];
        (codes[0][0], lengths[0][0]) = ((code.codes[0] & 0xff) as u8, code.lengths[0]);
        let slots = codes.as_flattened_mut().iter_mut().zip(lengths.as_flattened_mut()).skip(1);
        for ((slot_code, slot_length), (&code, &length)) in slots.zip(code.codes[first..].iter().zip(&code.lengths[first..])) {
            (*slot_code, *slot_length) = ((code & 0xff) as u8, length);
        }
        // SAFETY: an array of 16 bytes is 128 readable bits.
        let load = |table: [u8; 16]| _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
        Self {
            below: _mm256_set1_epi8((code.span[0] - 1) as i8),
            codes: codes.map(load),
            lengths: lengths.map(load),
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn look(&self, symbols: __m256i) -> Looked {
        let index = _mm256_subs_epu8(symbols, self.below);
        let mut codes = _mm256_setzero_si256();
        let mut lengths = _mm256_setzero_si256();
        for table in 0..TABLES {
            // 16 * table .. 16 * table + 15 becomes 0x70..0x7f; everything else has the highest bit set, which gives 0.
            let index = _mm256_sub_epi8(index, _mm256_set1_epi8(16 * table as i8));
            let index = _mm256_adds_epu8(index, _mm256_set1_epi8(0x70));
            codes = _mm256_or_si256(codes, _mm256_shuffle_epi8(self.codes[table], index));
            lengths = _mm256_or_si256(lengths, _mm256_shuffle_epi8(self.lengths[table], index));
        }
        let later_twice = _mm256_set_epi8(15, 15, 13, 13, 11, 11, 9, 9, 7, 7, 5, 5, 3, 3, 1, 1, 15, 15, 13, 13, 11, 11, 9, 9, 7, 7, 5, 5, 3, 3, 1, 1);
        let bits = _mm256_set_epi64x(0, i64::from_le_bytes([1, 2, 4, 8, 16, 32, 64, 128]), 0, i64::from_le_bytes([1, 2, 4, 8, 16, 32, 64, 128]));
        // The upper byte of the power is looked up at the length less 8, which is 0 for what is negative.
        let index = _mm256_sub_epi8(_mm256_shuffle_epi8(lengths, later_twice), _mm256_set1_epi16(8 << 8));
        Looked {
            codes,
            lengths,
            powers: _mm256_shuffle_epi8(bits, index),
            pair_lengths: _mm256_maddubs_epi16(lengths, _mm256_set1_epi8(1)),
        }
    }

    /// The wide way for one step: records of four symbols each, put in front of `start`. Seldom taken, so it looks up again what its caller has in registers.
    #[cold]
    #[inline(never)]
    #[target_feature(enable = "avx2")]
    fn put_fours(&self, step: &[u8; STEP], records: &mut Records, mut start: usize) -> usize {
        for half in step.as_chunks::<32>().0.iter().rev() {
            // SAFETY: half a step is 32 readable bytes.
            let looked = self.look(unsafe { _mm256_loadu_si256(half.as_ptr().cast()) });
            for (codes, lengths) in looked.fours().into_iter().rev() {
                start -= 4;
                put(records, start, codes, lengths);
            }
        }
        start
    }

    /// Makes records of `steps`; false when a symbol has no code.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn records(&self, steps: &[[u8; STEP]], records: &mut Records) -> bool {
        let mut least = _mm256_set1_epi8(-1);
        let mut lowest = least;
        let mut start = RECORDS_MAX;
        for step in steps.iter().rev() {
            let (low, high) = step.split_at(32);
            // SAFETY: each half of a step is 32 readable bytes.
            let (low, high) = unsafe { (_mm256_loadu_si256(low.as_ptr().cast()), _mm256_loadu_si256(high.as_ptr().cast())) };
            let (x, y) = (self.look(low), self.look(high));
            least = _mm256_min_epu8(least, _mm256_min_epu8(x.lengths, y.lengths));
            // 0 becomes the highest.
            let one = _mm256_set1_epi8(1);
            lowest = _mm256_min_epu8(lowest, _mm256_min_epu8(_mm256_sub_epi8(low, one), _mm256_sub_epi8(high, one)));
            let ((x_codes, x_lengths), (y_codes, y_lengths)) = (x.eights(), y.eights());
            let later_lengths = _mm256_unpackhi_epi64(x_lengths, y_lengths);
            let lengths = _mm256_add_epi64(_mm256_unpacklo_epi64(x_lengths, y_lengths), later_lengths);
            let codes = _mm256_or_si256(
                shift_left_64(_mm256_unpacklo_epi64(x_codes, y_codes), later_lengths),
                _mm256_unpackhi_epi64(x_codes, y_codes),
            );
            let wide_pairs = _mm256_cmpgt_epi16(_mm256_max_epi16(x.pair_lengths, y.pair_lengths), _mm256_set1_epi16(16));
            let wide = _mm256_or_si256(wide_pairs, _mm256_cmpgt_epi32(lengths, _mm256_set1_epi32(56)));
            if _mm256_testz_si256(wide, wide) != 0 {
                start -= 4;
                put(records, start, _mm256_permute4x64_epi64(codes, 0b11_01_10_00), _mm256_permute4x64_epi64(lengths, 0b11_01_10_00));
                continue;
            }
            let most = _mm256_max_epi32(x_lengths, y_lengths);
            let wide = _mm256_or_si256(wide_pairs, _mm256_cmpgt_epi32(most, _mm256_set1_epi32(56)));
            if _mm256_testz_si256(wide, wide) != 0 {
                start -= 8;
                put(records, start + 4, y_codes, y_lengths);
                put(records, start, x_codes, x_lengths);
                continue;
            }
            start = self.put_fours(step, records, start);
        }
        records.start = start;
        // Symbols between 0 and the lowest one share the index of 0, so they are found by themselves.
        let apart = _mm256_cmpeq_epi8(_mm256_max_epu8(lowest, self.below), lowest);
        let without = _mm256_cmpeq_epi8(_mm256_min_epu8(least, apart), _mm256_setzero_si256());
        _mm256_testz_si256(without, without) != 0
    }
}

/// Four records from `start` on.
#[inline]
#[target_feature(enable = "avx2")]
fn put(records: &mut Records, start: usize, codes: __m256i, lengths: __m256i) {
    // SAFETY: both slices are of four words, 32 writable bytes.
    unsafe {
        _mm256_storeu_si256(records.codes[start..start + 4].as_mut_ptr().cast(), codes);
        _mm256_storeu_si256(records.lengths[start..start + 4].as_mut_ptr().cast(), lengths);
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
    /// Codes and lengths of eight symbols each, if no pair takes more than 16 bits.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn eights(&self) -> (__m256i, __m256i) {
        let earlier = _mm256_and_si256(self.codes, _mm256_set1_epi16(0xff));
        let pairs = _mm256_or_si256(_mm256_mullo_epi16(earlier, self.powers), _mm256_srli_epi16(self.codes, 8));
        let earlier = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff));
        let fours = _mm256_or_si256(
            shift_left_32(earlier, _mm256_srli_epi32(self.pair_lengths, 16)),
            _mm256_srli_epi32(pairs, 16),
        );
        let four_lengths = _mm256_madd_epi16(self.pair_lengths, _mm256_set1_epi16(1));
        let earlier = _mm256_and_si256(fours, _mm256_set1_epi64x(0xffff_ffff));
        let eights = _mm256_or_si256(
            shift_left_64(earlier, _mm256_srli_epi64(four_lengths, 32)),
            _mm256_srli_epi64(fours, 32),
        );
        (eights, _mm256_sad_epu8(self.lengths, _mm256_setzero_si256()))
    }

    /// Codes and lengths of four symbols each, first half and second half, whatever their lengths.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn fours(&self) -> [(__m256i, __m256i); 2] {
        let zero = _mm256_setzero_si256();
        let one = _mm256_set1_epi16(1);
        let pairs_low = _mm256_madd_epi16(_mm256_unpacklo_epi8(self.codes, zero), _mm256_unpacklo_epi16(self.powers, one));
        let pairs_high = _mm256_madd_epi16(_mm256_unpackhi_epi8(self.codes, zero), _mm256_unpackhi_epi16(self.powers, one));
        let later_lengths = _mm256_srli_epi32(self.pair_lengths, 16);
        let join = |pairs: __m256i, later_lengths: __m256i| {
            let earlier = _mm256_and_si256(pairs, _mm256_set1_epi64x(0xffff_ffff));
            _mm256_or_si256(shift_left_64(earlier, later_lengths), _mm256_srli_epi64(pairs, 32))
        };
        let codes_low = join(pairs_low, _mm256_unpacklo_epi32(later_lengths, zero));
        let codes_high = join(pairs_high, _mm256_unpackhi_epi32(later_lengths, zero));
        let lengths = _mm256_madd_epi16(self.pair_lengths, one);
        let (lengths_low, lengths_high) = (_mm256_unpacklo_epi32(lengths, zero), _mm256_unpackhi_epi32(lengths, zero));
        [
            (_mm256_permute2x128_si256(codes_low, codes_high, 0x20), _mm256_permute2x128_si256(lengths_low, lengths_high, 0x20)),
            (_mm256_permute2x128_si256(codes_low, codes_high, 0x31), _mm256_permute2x128_si256(lengths_low, lengths_high, 0x31)),
        ]
    }
}
