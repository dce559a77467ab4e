//! Codes of several symbols, as vector kernels make them, strung together to a bit string.
//!
//! In: a step's records. Out: the bytes that the scalar kernel would have written, and what it needs to go on. Nothing can fail: a slot has room for
//! whatever 32 Ki symbols of 11 bits give.

use super::code::Code;
use super::encode::{BitString, COUNT_BIT, SLOT_LEN, Slot, WORD_LEN};

/// Codes of several symbols each, strung together: what vector kernels make of one step's symbols, in their order. At most `MAX`.
#[repr(align(64))]
pub(super) struct Records<const MAX: usize> {
    pub(super) codes: [u64; MAX],
    /// At most 56 bits each, so that 7 pending bits and a record fit a word.
    pub(super) lengths: [u64; MAX],
    pub(super) count: usize,
}

impl<const MAX: usize> Records<MAX> {
    pub(super) const EMPTY: Self = Self {
        codes: [0; MAX],
        lengths: [0; MAX],
        count: 0,
    };
}

/// Most bits of a record.
pub(super) const RECORD_BITS_MAX: i32 = 56;

/// Whether so many symbols together fit a record unless they are longer than the mean by more than so many standard deviations.
pub(super) fn fit_a_record(code: &Code, symbols: f64, deviations: f64) -> bool {
    code.mean_bits * symbols + deviations * (code.variance * symbols).sqrt()
        < f64::from(RECORD_BITS_MAX)
}

/// A bit string that grows by records: here the oldest pending bit is the lowest.
#[derive(Clone, Copy)]
pub(super) struct RecordString {
    pending: u64,
    pending_bits: u64,
    len: usize,
}

impl RecordString {
    pub(super) const EMPTY: Self = Self {
        pending: 0,
        pending_bits: 0,
        len: 0,
    };

    #[inline(always)]
    fn append(&mut self, code: u64, length: u64, slot: &mut Slot) {
        self.pending |= code << (self.pending_bits & 63);
        let at = self.len % SLOT_LEN;
        slot[at..at + WORD_LEN].copy_from_slice(&self.pending.to_le_bytes());
        self.pending_bits = self.pending_bits.wrapping_add(length);
        let whole_bytes = self.pending_bits & 56;
        self.pending >>= whole_bytes;
        self.len = self.len.wrapping_add((whole_bytes >> 3) as usize);
        self.pending_bits &= 7;
    }

    /// Appends `records`, the last one first. Mostly there are as many as `usual` has, and they stand in that order.
    #[inline(always)]
    pub(super) fn append_all<const USUAL: usize, const MAX: usize>(
        &mut self,
        records: &Records<MAX>,
        usual: &[usize; USUAL],
        slot: &mut Slot,
    ) {
        if records.count == USUAL {
            for &index in usual.iter().rev() {
                self.append(records.codes[index], records.lengths[index], slot);
            }
        } else {
            *self = self.append_unusual(records, slot);
        }
    }

    /// The same for another number of records, which stand in their order. By value, so that what the caller has may stay in registers.
    #[cold]
    #[inline(never)]
    fn append_unusual<const MAX: usize>(mut self, records: &Records<MAX>, slot: &mut Slot) -> Self {
        let pairs = records.codes.iter().zip(&records.lengths);
        for (&code, &length) in pairs.take(records.count).rev() {
            self.append(code, length, slot);
        }
        self
    }

    /// The same bit string for the scalar kernel, which counts on from `count` symbols.
    pub(super) fn into_bit_string(self, count: usize) -> BitString {
        let pending = if self.pending_bits == 0 {
            0
        } else {
            self.pending << (64 - self.pending_bits)
        };
        BitString {
            pending,
            sum: (count as u64) << COUNT_BIT | self.pending_bits,
            len: self.len,
        }
    }
}
