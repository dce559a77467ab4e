//! A code's description and four bit strings, back to symbols.
//!
//! In: bytes that nobody vouches for. Out: symbols, exactly as many as were asked for. What can fail: a description that is not of a complete code, lengths
//! that do not fit, a bit string that does not end with the bit that ends its last symbol. What is accepted gives the bytes that libzstd gives.
//!
//! A bit string is read from its end; the next 11 bits are an index into a table. The safe kernel finds one symbol there. The other finds every symbol
//! that those bits determine, up to six, and pays where codes are short.

#![allow(
    unsafe_code,
    reason = "the fence: reads and writes whose bounds are checked for many symbols at a time"
)]

use super::{CODE_BITS_MAX, JUMP_TABLE_LEN, SYMBOLS_MAX, header};

#[cfg(target_arch = "x86_64")]
/// Mean length from which on an index seldom determines more than one symbol.
const DENSE_FROM_BITS: f64 = 6.0;
const INDEX_BITS: u32 = CODE_BITS_MAX as u32;
const ENTRIES: usize = 1 << INDEX_BITS;
/// Symbols that are surely in what a refilled window holds: 57 bits.
const ROW: usize = 5;
#[cfg(target_arch = "x86_64")]
/// Most symbols of an entry: what fits beside the two counts.
const ENTRY_SYMBOLS_MAX: usize = 6;

/// Decoder of one code at a time: one per thread, used again and again.
pub struct Table {
    /// The symbol that an index begins with in the upper byte, its length in the lower.
    single: Box<[u16; ENTRIES]>,
    #[cfg(target_arch = "x86_64")]
    /// All symbols that an index determines: bits that they take in the lowest byte, then their number, then up to six symbols.
    multi: Box<[u64; ENTRIES]>,
    #[cfg(target_arch = "x86_64")]
    /// Room to build `multi`: what fewer bits than an index has determine.
    levels: Box<[u64; ENTRIES]>,
    #[cfg(target_arch = "x86_64")]
    /// Whether `multi` is of the code that was read last.
    has_multi: bool,
    kernel: Kernel,
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Table")
            .field("kernel", &self.kernel)
            .finish_non_exhaustive()
    }
}

/// Which code reads the bit strings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// A symbol at a time.
    Portable,
    /// Several symbols at a time where codes are short, else as Portable; compiled for shifts that take their count from any register.
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Kernel {
    /// Every kernel that this CPU can run, best last.
    pub(crate) fn available() -> Vec<Self> {
        #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut))]
        let mut kernels = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
        {
            kernels.push(Self::Avx2);
        }
        kernels
    }
}

impl Default for Table {
    fn default() -> Self {
        Self::new()
    }
}

impl Table {
    /// A decoder without a code: all it does is fail until a description was read.
    pub fn new() -> Self {
        let kernels = Kernel::available();
        Self::with_kernel(*kernels.last().expect("the portable one is always there"))
    }

    /// A decoder with this kernel.
    pub(crate) fn with_kernel(kernel: Kernel) -> Self {
        Self {
            single: Box::new([0; ENTRIES]),
            #[cfg(target_arch = "x86_64")]
            multi: Box::new([0; ENTRIES]),
            #[cfg(target_arch = "x86_64")]
            levels: Box::new([0; ENTRIES]),
            #[cfg(target_arch = "x86_64")]
            has_multi: false,
            kernel,
        }
    }

    /// Reads the description of a code at the start of `bytes` and gives its length. None when there is none; then no code is known.
    pub fn read(&mut self, bytes: &[u8]) -> Option<usize> {
        self.single.fill(0);
        #[cfg(target_arch = "x86_64")]
        {
            self.has_multi = false;
        }
        let (lengths, len) = header::read(bytes)?;
        let sorted = Sorted::of(&lengths);
        self.fill_single(&sorted);
        #[cfg(target_arch = "x86_64")]
        if self.kernel == Kernel::Avx2 && sorted.mean_bits() < DENSE_FROM_BITS {
            // SAFETY: the kernel was chosen because the CPU has these features.
            unsafe { self.fill_multi(&sorted) };
            self.has_multi = true;
        }
        Some(len)
    }

    /// Decodes a jump table and the four bit strings behind it, which are all of `streams`, to all of `out`. False when they are not `out.len()` symbols of the
    /// code that was read last; then what is in `out` is of no use.
    pub fn decode(&self, streams: &[u8], out: &mut [u8]) -> bool {
        self.decode_checked(streams, out).is_some()
    }

    fn decode_checked(&self, streams: &[u8], out: &mut [u8]) -> Option<()> {
        // Of fewer than 6 symbols the fourth bit string would have none.
        if !(6..=SYMBOLS_MAX).contains(&out.len()) {
            return None;
        }
        let (jump_table, mut rest) = streams.split_at_checked(JUMP_TABLE_LEN)?;
        let mut strings = [&[][..]; 4];
        for (string, entry) in strings.iter_mut().zip(jump_table.as_chunks().0) {
            (*string, rest) = rest.split_at_checked(u16::from_le_bytes(*entry).into())?;
        }
        strings[3] = rest;
        let mut readers = [Reader::EMPTY; 4];
        for (reader, string) in readers.iter_mut().zip(strings) {
            *reader = Reader::of(string)?;
        }

        let quarter = out.len().div_ceil(4);
        let mut parts = out.chunks_mut(quarter);
        let mut parts = [(); 4].map(|()| parts.next().unwrap_or_default());
        let done = match self.kernel {
            Kernel::Portable => rows(&self.single, &mut readers, &mut parts),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the kernel was chosen because the CPU has these features.
            Kernel::Avx2 if self.has_multi => unsafe {
                multi_rows(&self.multi, &mut readers, &mut parts)
            },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kernel::Avx2 => unsafe { rows_avx2(&self.single, &mut readers, &mut parts) },
        };
        for ((reader, part), done) in readers.into_iter().zip(parts).zip(done) {
            reader.finish(&self.single, &mut part[done..])?;
        }
        Some(())
    }

    fn fill_single(&mut self, sorted: &Sorted) {
        let mut free = &mut self.single[..];
        for &(symbol, length) in sorted.symbols() {
            let (place, rest) = free.split_at_mut(ENTRIES >> length);
            place.fill(u16::from_le_bytes([length, symbol]));
            free = rest;
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,bmi1,bmi2")]
    fn fill_multi(&mut self, sorted: &Sorted) {
        if sorted
            .symbols()
            .last()
            .is_some_and(|&(_, length)| length == 1)
        {
            self.fill_multi_greedily();
        } else {
            self.fill_multi_by_levels(sorted);
        }
    }

    /// Symbol after symbol of each entry. For codes of a single bit, of which more would fit an index than fit an entry.
    #[cfg(target_arch = "x86_64")]
    fn fill_multi_greedily(&mut self) {
        for (index, entry) in self.multi.iter_mut().enumerate() {
            let (mut bits, mut symbols, mut count) = (0, 0, 0);
            while count < ENTRY_SYMBOLS_MAX {
                let [length, symbol] = self.single[index << bits & (ENTRIES - 1)].to_le_bytes();
                if bits + u32::from(length) > INDEX_BITS {
                    break;
                }
                symbols |= u64::from(symbol) << (16 + 8 * count);
                bits += u32::from(length);
                count += 1;
            }
            *entry = symbols | (count as u64) << 8 | u64::from(bits);
        }
    }

    /// What `known` bits determine is a symbol and what the bits behind it determine: per symbol, a stretch of an earlier level with that symbol in front.
    /// Level `known` stands at `1 << known` of `levels`; the last one is the table.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,bmi1,bmi2")]
    fn fill_multi_by_levels(&mut self, sorted: &Sorted) {
        self.levels[1] = 0;
        for known in 1..INDEX_BITS {
            let (earlier, later) = self.levels.split_at_mut(1 << known);
            fill_level(known, sorted, earlier, &mut later[..1 << known]);
        }
        fill_level(INDEX_BITS, sorted, &self.levels[..], &mut self.multi[..]);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2")]
fn fill_level(known: u32, sorted: &Sorted, earlier: &[u64], level: &mut [u64]) {
    let longer = sorted
        .symbols()
        .partition_point(|&(_, length)| u32::from(length) > known);
    let (longer, symbols) = sorted.symbols().split_at(longer);
    // Longer codes are the lowest; of those, too few bits are known.
    let undetermined: usize = longer.iter().map(|&(_, length)| ENTRIES >> length).sum();
    let (undetermined, mut level) = level.split_at_mut(undetermined >> (INDEX_BITS - known));
    undetermined.fill(0);
    for &(symbol, length) in symbols {
        let behind = 1usize << (known - u32::from(length));
        let (entries, rest) = level.split_at_mut(behind);
        let added = u64::from(symbol) << 16 | 1 << 8 | u64::from(length);
        for (entry, behind) in entries.iter_mut().zip(&earlier[behind..2 * behind]) {
            *entry = ((behind & !0xffff) << 8 | behind & 0xffff).wrapping_add(added);
        }
        level = rest;
    }
}

/// Symbols with their lengths, longest first, then by symbol: the order of their codes.
struct Sorted {
    symbols: [(u8, u8); 256],
    len: usize,
}

impl Sorted {
    fn of(lengths: &[u8; 256]) -> Self {
        let mut counts = [0usize; CODE_BITS_MAX as usize + 1];
        for &length in lengths {
            counts[usize::from(length)] += 1;
        }
        let mut next = [0; CODE_BITS_MAX as usize + 1];
        let mut len = 0;
        for length in (1..next.len()).rev() {
            next[length] = len;
            len += counts[length];
        }
        let mut symbols = [(0, 0); 256];
        for (symbol, &length) in (0..=u8::MAX).zip(lengths) {
            if length > 0 {
                let place = &mut next[usize::from(length)];
                symbols[*place] = (symbol, length);
                *place += 1;
            }
        }
        Self { symbols, len }
    }

    fn symbols(&self) -> &[(u8, u8)] {
        &self.symbols[..self.len]
    }

    #[cfg(target_arch = "x86_64")]
    /// Mean length of the symbols that this code would be the best for.
    fn mean_bits(&self) -> f64 {
        self.symbols()
            .iter()
            .map(|&(_, length)| f64::from(length) / f64::from(1 << length))
            .sum()
    }
}

/// What is left of a bit string.
#[derive(Clone, Copy)]
struct Reader<'a> {
    bytes: &'a [u8],
    /// Bits that are not read yet: the lowest ones.
    left: usize,
}

/// The next bits of a bit string at the top, and below the last of them a 1 that moves up with them and so counts what was read.
#[derive(Clone, Copy)]
struct Window {
    bits: u64,
    /// Where the 8 bytes begin that it was filled with.
    at: usize,
}

const WINDOW_LEN: usize = 8;

impl<'a> Reader<'a> {
    const EMPTY: Self = Self {
        bytes: &[],
        left: 0,
    };

    /// None when there is no 1 bit to end the bit string.
    fn of(bytes: &'a [u8]) -> Option<Self> {
        let last = *bytes.last()?;
        let left = (bytes.len() * 8).checked_sub(1 + last.leading_zeros() as usize)?;
        (last > 0).then_some(Self { bytes, left })
    }

    /// None when the bit string is too short to fill it.
    fn window(&self) -> Option<Window> {
        let at = self.bytes.len().checked_sub(WINDOW_LEN)?;
        let read = self.bytes.len() * 8 - self.left;
        Some(Window {
            bits: (self.word(at) | 1) << read,
            at,
        })
    }

    #[inline(always)]
    fn word(&self, at: usize) -> u64 {
        let mut word = [0; WINDOW_LEN];
        word.copy_from_slice(&self.bytes[at..][..WINDOW_LEN]);
        u64::from_le_bytes(word)
    }

    /// Takes over where `window` was left.
    fn resume(&mut self, window: Window) {
        self.left = (window.at + WINDOW_LEN) * 8 - window.bits.trailing_zeros() as usize;
    }

    /// The next 11 bits; 0 for those beyond the end.
    fn peek(&self) -> usize {
        let byte = |back: usize| {
            self.left
                .div_ceil(8)
                .checked_sub(back)
                .map_or(0, |at| u32::from(self.bytes[at]))
        };
        let word = byte(1) << 24 | byte(2) << 16 | byte(3) << 8;
        (word << (self.left.wrapping_neg() % 8) >> (u32::BITS - INDEX_BITS)) as usize
    }

    /// Decodes one symbol after the other until the end, which the last one must meet.
    fn finish(mut self, single: &[u16; ENTRIES], out: &mut [u8]) -> Option<()> {
        for out in out {
            let [length, symbol] = single[self.peek()].to_le_bytes();
            *out = symbol;
            // Without a code lengths are 0, and the end is not met.
            self.left = self.left.checked_sub(length.into())?;
        }
        (self.left == 0).then_some(())
    }
}

/// Decodes rows of five symbols of each bit string, one symbol at a time, as long as every window can be filled. Gives how many of each part are done.
#[inline(always)]
fn rows(
    single: &[u16; ENTRIES],
    readers: &mut [Reader<'_>; 4],
    parts: &mut [&mut [u8]; 4],
) -> [usize; 4] {
    let [
        Some(mut window0),
        Some(mut window1),
        Some(mut window2),
        Some(mut window3),
    ] = readers.each_ref().map(Reader::window)
    else {
        return [0; 4];
    };
    let [reader0, reader1, reader2, reader3] = *readers;
    let [part0, part1, part2, part3] = parts;
    let mut done = 0;
    let rows = part0
        .as_chunks_mut::<ROW>()
        .0
        .iter_mut()
        .zip(part1.as_chunks_mut::<ROW>().0);
    let rows = rows
        .zip(part2.as_chunks_mut::<ROW>().0)
        .zip(part3.as_chunks_mut::<ROW>().0);
    for (((row0, row1), row2), row3) in rows {
        if window0.at.min(window1.at).min(window2.at).min(window3.at) < WINDOW_LEN {
            break;
        }
        window0.refill(&reader0);
        window1.refill(&reader1);
        window2.refill(&reader2);
        window3.refill(&reader3);
        for column in 0..ROW {
            row0[column] = window0.take(single);
            row1[column] = window1.take(single);
            row2[column] = window2.take(single);
            row3[column] = window3.take(single);
        }
        done += ROW;
    }
    for (reader, window) in readers.iter_mut().zip([window0, window1, window2, window3]) {
        reader.resume(window);
    }
    [done; 4]
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2")]
fn rows_avx2(
    single: &[u16; ENTRIES],
    readers: &mut [Reader<'_>; 4],
    parts: &mut [&mut [u8]; 4],
) -> [usize; 4] {
    rows(single, readers, parts)
}

impl Window {
    /// Moves down by whole bytes that were read, at most 7.
    #[inline(always)]
    fn refill(&mut self, reader: &Reader<'_>) {
        let read = self.bits.trailing_zeros();
        self.at = self.at.wrapping_sub((read >> 3) as usize);
        self.bits = (reader.word(self.at) | 1) << (read & 7);
    }

    #[inline(always)]
    fn take(&mut self, single: &[u16; ENTRIES]) -> u8 {
        let entry = single[(self.bits >> (u64::BITS - INDEX_BITS)) as usize];
        self.bits = self.bits.wrapping_shl(entry.into());
        (entry >> 8) as u8
    }
}

/// Symbols from which on a row of lookups in `multi` may begin: five of up to six symbols, and what the last store writes beyond its symbols.
#[cfg(target_arch = "x86_64")]
const MULTI_ROOM: usize = ROW * ENTRY_SYMBOLS_MAX + 2;

/// Decodes as many symbols as an index determines, each time: rows of five lookups in each bit string, first of all four in turns, then of each alone until it
/// is near its end. Gives how many symbols of each part are done.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2")]
fn multi_rows(
    multi: &[u64; ENTRIES],
    readers: &mut [Reader<'_>; 4],
    parts: &mut [&mut [u8]; 4],
) -> [usize; 4] {
    let [Some(window0), Some(window1), Some(window2), Some(window3)] =
        readers.each_ref().map(Reader::window)
    else {
        return [0; 4];
    };
    let mut windows = [window0, window1, window2, window3];
    let mut done = [0; 4];
    loop {
        let mut rows = usize::MAX;
        for string in 0..4 {
            let room =
                (parts[string].len() - done[string]).saturating_sub(2) / (ROW * ENTRY_SYMBOLS_MAX);
            rows = rows.min(room).min(windows[string].at / (WINDOW_LEN - 1));
        }
        if rows == 0 {
            break;
        }
        let starts = [0, 1, 2, 3].map(|string: usize| parts[string][done[string]..].as_mut_ptr());
        // SAFETY: every part has room for `rows` rows, and every reader has 7 bytes in front of its window for each.
        let ends = unsafe { multi_rows_unchecked(multi, rows, readers, &mut windows, starts) };
        for string in 0..4 {
            // SAFETY: both point into the same part.
            done[string] += unsafe { ends[string].offset_from_unsigned(starts[string]) };
        }
    }
    for string in 0..4 {
        let part = &mut *parts[string];
        while part.len() - done[string] >= MULTI_ROOM && windows[string].at >= WINDOW_LEN {
            windows[string].refill(&readers[string]);
            for _ in 0..ROW {
                let entry = multi[(windows[string].bits >> (u64::BITS - INDEX_BITS)) as usize];
                part[done[string]..][..8].copy_from_slice(&(entry >> 16).to_le_bytes());
                done[string] += (entry >> 8 & 0xff) as usize;
                windows[string].bits <<= entry & 63;
            }
        }
    }
    for (reader, window) in readers.iter_mut().zip(windows) {
        reader.resume(window);
    }
    done
}

/// `rows` rows of each bit string; gives where each part goes on.
///
/// # Safety
///
/// From each of `outs` on, `rows` * 30 + 2 bytes can be written, and each window lies at least `rows` * 7 bytes behind its reader's start.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,bmi1,bmi2")]
unsafe fn multi_rows_unchecked(
    multi: &[u64; ENTRIES],
    rows: usize,
    readers: &[Reader<'_>; 4],
    windows: &mut [Window; 4],
    outs: [*mut u8; 4],
) -> [*mut u8; 4] {
    let [mut bits0, mut bits1, mut bits2, mut bits3] = windows.map(|window| window.bits);
    // SAFETY: a window lies within its reader.
    let [mut in0, mut in1, mut in2, mut in3] = [0, 1, 2, 3]
        .map(|string| unsafe { readers[string].bytes.as_ptr().add(windows[string].at) });
    let [mut out0, mut out1, mut out2, mut out3] = outs;
    macro_rules! refill {
        ($bits:ident, $in:ident) => {
            let read = $bits.trailing_zeros();
            // SAFETY: at most 7 bytes a row, which the caller vouches for.
            unsafe {
                $in = $in.sub((read >> 3) as usize);
                $bits = ($in.cast::<u64>().read_unaligned().to_le() | 1) << (read & 7);
            }
        };
    }
    macro_rules! take {
        ($bits:ident, $out:ident) => {
            let entry = multi[($bits >> (u64::BITS - INDEX_BITS)) as usize];
            // SAFETY: an entry has at most 6 symbols, so that the caller vouches for the 8 bytes and for where the next entry goes.
            unsafe {
                $out.cast::<u64>().write_unaligned((entry >> 16).to_le());
                $out = $out.add((entry >> 8 & 0xff) as usize);
            }
            $bits <<= entry & 63;
        };
    }
    for _ in 0..rows {
        refill!(bits0, in0);
        refill!(bits1, in1);
        refill!(bits2, in2);
        refill!(bits3, in3);
        for _ in 0..ROW {
            take!(bits0, out0);
            take!(bits1, out1);
            take!(bits2, out2);
            take!(bits3, out3);
        }
    }
    for (string, (bits, input)) in [(bits0, in0), (bits1, in1), (bits2, in2), (bits3, in3)]
        .into_iter()
        .enumerate()
    {
        // SAFETY: it points into the reader's bytes.
        let at = unsafe { input.offset_from_unsigned(readers[string].bytes.as_ptr()) };
        windows[string] = Window { bits, at };
    }
    [out0, out1, out2, out3]
}
