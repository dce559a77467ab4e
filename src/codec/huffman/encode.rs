//! Symbols to a jump table and four bit strings; the scalar kernel, and the choice of kernel.
//!
//! In: a [`Code`], 256 symbols to 128 KiB of them. Out: six bytes of jump table and four bit strings, each written from its last symbol to its first and ended by
//! a 1 bit, so that a decoder can start at the end. What can fail: a symbol without a code, an output without room; neither is known beforehand, because
//! codes are made from samples.
//!
//! Bit strings are written in pairs, so that neither waits for itself. The first is written where it belongs; the second into a slot of the coder's, and moved:
//! where it belongs is known when the first is done.

#![allow(
    unsafe_code,
    reason = "the fence: calls of kernels that need what not every CPU has"
)]

use super::code::Code;
use super::{JUMP_TABLE_LEN, SYMBOLS_MAX, quarters};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};

/// Positions in a slot: a power of two over the longest bit string (11 bits for each of 32 Ki symbols), so that a position needs no check but a mask.
pub(super) const SLOT_LEN: usize = 1 << 16;
/// Bytes that one store writes.
pub(super) const WORD_LEN: usize = 8;
/// Fewest symbols of a block: under that, four bit strings do not pay.
const SYMBOLS_MIN: usize = 256;

/// Where one bit string is written.
pub(super) type Slot = [u8; SLOT_LEN + WORD_LEN];

/// Memory of an encoder of blocks: one per thread, used again and again.
pub struct Coder {
    /// For bit strings that cannot be written where they belong: the second of a pair, and others at the end of an output.
    slots: Box<[Slot; 2]>,
    kernel: Kernel,
}

impl std::fmt::Debug for Coder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Coder")
            .field("kernel", &self.kernel)
            .finish_non_exhaustive()
    }
}

/// Which code writes the bit strings. They all write the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// One symbol after the other, without anything that a CPU may lack.
    Portable,
    /// The same, compiled for shifts that take their count from any register.
    #[cfg(target_arch = "x86_64")]
    Bmi2,
    /// 64 symbols at a time where codes are short and symbols lie within a few stretches of 16, else as Bmi2.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 128 symbols at a time.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Kernel {
    /// Every kernel that this CPU can run, best last.
    pub(crate) fn available() -> Vec<Self> {
        #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut))]
        let mut kernels = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("bmi1") && is_x86_feature_detected!("bmi2") {
            kernels.push(Self::Bmi2);
            if is_x86_feature_detected!("avx2") {
                kernels.push(Self::Avx2);
            }
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vbmi")
            {
                kernels.push(Self::Avx512);
            }
        }
        kernels
    }

    /// Encodes the symbols of two bit strings to two slots, taking turns. Gives the lengths, or None when a symbol has no code.
    fn encode(self, code: &Code, symbols: [&[u8]; 2], slots: [&mut Slot; 2]) -> Option<[usize; 2]> {
        match self {
            Self::Portable => scalar(code, symbols, slots),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the kernel was chosen because the CPU has these features.
            Self::Bmi2 => unsafe { scalar_bmi2(code, symbols, slots) },
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => match avx2::Windows::of(code) {
                // SAFETY: as above.
                Some(windows) => unsafe { avx2::encode(&windows, code, symbols, slots) },
                // SAFETY: as above; the features of this kernel are those and more.
                None => unsafe { scalar_bmi2(code, symbols, slots) },
            },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Self::Avx512 => unsafe { avx512::encode(code, symbols, slots) },
        }
    }
}

impl Default for Coder {
    fn default() -> Self {
        Self::new()
    }
}

impl Coder {
    /// A coder with the best kernels that this CPU can run.
    pub fn new() -> Self {
        let kernels = Kernel::available();
        Self::with_kernel(*kernels.last().expect("the portable one is always there"))
    }

    /// A coder with this kernel.
    pub(crate) fn with_kernel(kernel: Kernel) -> Self {
        Self {
            slots: Box::new([[0; SLOT_LEN + WORD_LEN]; 2]),
            kernel,
        }
    }

    /// Writes the jump table and the bit strings of `symbols` to the start of `out` and gives their length. None when a symbol has no code or
    /// when `out` has no room for them; then what is in `out` is of no use.
    ///
    /// # Panics
    ///
    /// With fewer than 256 symbols or more than 128 Ki of them.
    pub fn encode(&mut self, code: &Code, symbols: &[u8], out: &mut [u8]) -> Option<usize> {
        assert!(
            (SYMBOLS_MIN..=SYMBOLS_MAX).contains(&symbols.len()),
            "{} symbols in a block",
            symbols.len()
        );
        let [first, second, third, fourth] = quarters(symbols);
        let mut lens = [0; 4];
        let mut total = JUMP_TABLE_LEN;
        for (pair, lens) in [[first, second], [third, fourth]]
            .into_iter()
            .zip(lens.as_chunks_mut().0)
        {
            let room = out.get_mut(total..)?;
            *lens = if let Some(place) = room.first_chunk_mut() {
                self.kernel
                    .encode(code, pair, [place, &mut self.slots[1]])?
            } else {
                let [slot0, slot1] = &mut *self.slots;
                let lens = self.kernel.encode(code, pair, [slot0, slot1])?;
                room.get_mut(..lens[0])?.copy_from_slice(&slot0[..lens[0]]);
                lens
            };
            let place = room.get_mut(lens[0]..)?.get_mut(..lens[1])?;
            place.copy_from_slice(&self.slots[1][..lens[1]]);
            total += lens[0] + lens[1];
        }
        for (entry, &len) in out[..JUMP_TABLE_LEN]
            .as_chunks_mut()
            .0
            .iter_mut()
            .zip(&lens)
        {
            *entry = u16::try_from(len).ok()?.to_le_bytes();
        }
        Some(total)
    }
}

/// Bits from here up of an entry count the symbols that have a code: see [`BitString`].
pub(super) const COUNT_BIT: u32 = 8;

/// An entry: the code at the top, a 1 for the count of symbols, the code's length in the lowest byte. 0 for a symbol without a code.
#[inline(always)]
fn entry(code: u8, length: u8) -> u64 {
    // A length of 0 would shift by 64; such a symbol has code 0 in any case.
    u64::from(code).wrapping_shl(u32::from(length).wrapping_neg())
        | u64::from(length > 0) << COUNT_BIT
        | u64::from(length)
}

const LENGTH_MASK: u64 = 0xff;

/// A bit string that grows. The newest bits are at the top of the accumulator and older ones below, so that to append is to shift right by the
/// entry's lowest bits and to OR: one instruction each, because shifts look at six bits of their count only.
#[derive(Clone, Copy)]
pub(super) struct BitString {
    /// Pending bits at the top; what is below them is of no meaning.
    pub(super) pending: u64,
    /// Sum of entries: pending bits in the lowest byte, then how many symbols with a code went by. The codes at the top overflow, which hurts nobody.
    pub(super) sum: u64,
    /// Bytes written.
    pub(super) len: usize,
}

impl BitString {
    const EMPTY: Self = Self {
        pending: 0,
        sum: 0,
        len: 0,
    };
    /// Symbols that can be appended between two flushes: 7 pending bits and five codes of 11 are 62.
    const PER_FLUSH: usize = 5;

    /// Leaves the entry's low bits in the accumulator, where no pending ones are as long as these are fewer than 55.
    #[inline(always)]
    fn push(&mut self, entry: u64) {
        self.pending = (self.pending >> (entry & 63)) | entry;
        self.sum = self.sum.wrapping_add(entry);
    }

    /// The fifth symbol of a row: its length would touch bits that are pending.
    #[inline(always)]
    fn push_clean(&mut self, entry: u64) {
        self.pending = (self.pending >> (entry & 63)) | entry & !(LENGTH_MASK | 1 << COUNT_BIT);
        self.sum = self.sum.wrapping_add(entry);
    }

    /// Writes whole bytes out; up to 7 bits stay.
    #[inline(always)]
    fn flush(&mut self, slot: &mut Slot) {
        let word = self.pending >> (self.sum.wrapping_neg() & 63);
        let at = self.len % SLOT_LEN;
        slot[at..at + WORD_LEN].copy_from_slice(&word.to_le_bytes());
        self.len = self.len.wrapping_add((self.sum >> 3 & 7) as usize);
        self.sum &= !0xf8;
    }

    /// Appends `rest`, which stands in front of what was appended, and ends the bit string. Gives its length, or None when not all of `count` symbols had a code.
    pub(super) fn end_with(
        mut self,
        code: &Code,
        count: usize,
        rest: &[u8],
        slot: &mut Slot,
    ) -> Option<usize> {
        for &symbol in rest.iter().rev() {
            let symbol = usize::from(symbol);
            self.push_clean(entry(code.codes[symbol], code.lengths[symbol]));
            self.flush(slot);
        }
        let coded = self.sum >> COUNT_BIT & 0xffff_ffff;
        self.push_clean(entry(1, 1));
        self.flush(slot);
        let len = self.len + usize::from(self.sum & LENGTH_MASK > 0);
        (coded == count as u64).then_some(len)
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "bmi1,bmi2")]
fn scalar_bmi2(code: &Code, symbols: [&[u8]; 2], slots: [&mut Slot; 2]) -> Option<[usize; 2]> {
    scalar(code, symbols, slots)
}

#[inline(always)]
fn scalar(code: &Code, symbols: [&[u8]; 2], [slot0, slot1]: [&mut Slot; 2]) -> Option<[usize; 2]> {
    let mut entries = [0; 256];
    for ((made, &code), &length) in entries.iter_mut().zip(&code.codes).zip(&code.lengths) {
        *made = entry(code, length);
    }
    let entry = |symbol: u8| entries[usize::from(symbol)];
    let [mut string0, mut string1] = [BitString::EMPTY; 2];
    let rows = symbols[1].len().min(symbols[0].len()) / BitString::PER_FLUSH;
    let [(rest0, rows0), (rest1, rows1)] =
        symbols.map(|symbols| symbols.split_at(symbols.len() - rows * BitString::PER_FLUSH));
    for ([a0, b0, c0, d0, e0], [a1, b1, c1, d1, e1]) in
        rows0.as_chunks().0.iter().zip(rows1.as_chunks().0).rev()
    {
        string0.push(entry(*e0));
        string1.push(entry(*e1));
        string0.push(entry(*d0));
        string1.push(entry(*d1));
        string0.push(entry(*c0));
        string1.push(entry(*c1));
        string0.push(entry(*b0));
        string1.push(entry(*b1));
        string0.push_clean(entry(*a0));
        string1.push_clean(entry(*a1));
        string0.flush(slot0);
        string1.flush(slot1);
    }
    Some([
        string0.end_with(code, symbols[0].len(), rest0, slot0)?,
        string1.end_with(code, symbols[1].len(), rest1, slot1)?,
    ])
}
