//! A code's description as it stands in a frame, both ways: the Huffman_Tree_Description of RFC 8878, section 4.2.1.
//!
//! Out: lengths become weights (longest code = 1, one more per bit less, 0 = no code), all but the last, and those stand as four bits each or
//! FSE-coded, whichever is shorter. Back: the same, and the last weight is what completes the code. What can fail: weights that neither form can express
//! (over 128 of them, all alike); on the way back any input, and whatever is not a complete code of at most 11 bits is refused.

use super::CODE_BITS_MAX;

/// Weights are 0..=11.
const WEIGHT_COUNT: usize = CODE_BITS_MAX as usize + 1;
/// Most weights that are written out: one symbol's is inferred.
const WEIGHTS_MAX: usize = 255;
/// Most weights that the four-bit form can count.
const DIRECT_WEIGHTS_MAX: usize = 128;
/// The first byte of the four-bit form is this and the number of weights; below it, the length of the FSE form.
const DIRECT_BASE: usize = 127;
/// Largest FSE table that the format allows for weights, as a power of two.
const FSE_BITS_MAX: u32 = 6;
const FSE_BITS_MIN: u32 = 5;

/// A description's bytes.
#[derive(Debug, Clone)]
pub(super) struct Header {
    bytes: [u8; DIRECT_BASE + 1],
    len: usize,
}

impl Header {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Whether there is a description of a code with these lengths in any case: the four-bit form.
pub(super) fn is_surely_possible(lengths: &[u8; 256]) -> bool {
    lengths[DIRECT_WEIGHTS_MAX + 1..]
        .iter()
        .all(|&length| length == 0)
}

/// The description of a complete code with these lengths; None when neither form can express it.
pub(super) fn of(lengths: &[u8; 256]) -> Option<Header> {
    let last = lengths.iter().rposition(|&length| length > 0)?;
    let longest = lengths.iter().copied().max()?;
    let mut weights = [0; 256];
    for (weight, &length) in weights.iter_mut().zip(lengths) {
        *weight = if length > 0 { longest + 1 - length } else { 0 };
    }
    let weights = &weights[..last];

    let mut header = Header {
        bytes: [0; DIRECT_BASE + 1],
        len: 0,
    };
    let direct_len = (last <= DIRECT_WEIGHTS_MAX).then_some(last.div_ceil(2));
    let shorter_than = direct_len.unwrap_or(DIRECT_BASE + 1);
    if let Some(coded_len) = fse_write(weights, &mut header.bytes[1..], shorter_than) {
        header.bytes[0] = u8::try_from(coded_len).ok()?;
        header.len = 1 + coded_len;
        return Some(header);
    }
    header.len = 1 + direct_len?;
    header.bytes[0] = u8::try_from(DIRECT_BASE + last).ok()?;
    for (byte, pair) in header.bytes[1..].iter_mut().zip(weights.chunks(2)) {
        *byte = pair[0] << 4 | pair.get(1).unwrap_or(&0);
    }
    Some(header)
}

/// Lengths of the code that the description at the start of `bytes` is of, and the description's own length in bytes.
pub(super) fn read(bytes: &[u8]) -> Option<([u8; 256], usize)> {
    let (&first, rest) = bytes.split_first()?;
    let first = usize::from(first);
    let mut weights = [0u8; 256];
    let (count, len) = if first > DIRECT_BASE {
        let count = first - DIRECT_BASE;
        let packed = rest.get(..count.div_ceil(2))?;
        for (pair, byte) in weights.chunks_exact_mut(2).zip(packed) {
            pair.copy_from_slice(&[byte >> 4, byte & 15]);
        }
        // An odd count leaves four bits that are no weight.
        weights[count] = 0;
        (count, packed.len())
    } else {
        let coded = rest.get(..first)?;
        (fse_read(coded, &mut weights)?, coded.len())
    };
    Some((complete(&mut weights, count)?, 1 + len))
}

/// Lengths of a code from its first `count` weights; the next symbol's weight is what is missing to a power of two.
fn complete(weights: &mut [u8; 256], count: usize) -> Option<[u8; 256]> {
    let mut places = 0u32;
    for &weight in &weights[..count] {
        if usize::from(weight) >= WEIGHT_COUNT {
            return None;
        }
        places += (1 << weight) >> 1;
    }
    let longest = u8::try_from(places.checked_ilog2()? + 1).ok()?;
    if longest > CODE_BITS_MAX {
        return None;
    }
    let missing = (1 << longest) - places;
    if !missing.is_power_of_two() {
        return None;
    }
    *weights.get_mut(count)? = u8::try_from(missing.ilog2() + 1).ok()?;
    // The longest code has a sibling of its length; without it the codes are shorter than their weights say.
    if !weights[..=count].contains(&1) {
        return None;
    }
    let mut lengths = [0; 256];
    for (length, &weight) in lengths.iter_mut().zip(&weights[..=count]) {
        *length = if weight > 0 { longest + 1 - weight } else { 0 };
    }
    Some(lengths)
}

/// Appends bits from the lowest of the first byte up.
struct BitWriter<'a> {
    out: &'a mut [u8],
    len: usize,
    pending: u64,
    pending_bits: u32,
}

impl<'a> BitWriter<'a> {
    fn new(out: &'a mut [u8]) -> Self {
        Self {
            out,
            len: 0,
            pending: 0,
            pending_bits: 0,
        }
    }

    /// Up to 16 bits; false when `out` is full.
    fn put(&mut self, value: u32, bits: u32) -> bool {
        self.pending |= u64::from(value) << self.pending_bits;
        self.pending_bits += bits;
        while self.pending_bits >= 8 {
            if !self.put_byte() {
                return false;
            }
            self.pending_bits -= 8;
        }
        true
    }

    fn put_byte(&mut self) -> bool {
        let Some(byte) = self.out.get_mut(self.len) else {
            return false;
        };
        *byte = (self.pending & 0xff) as u8;
        self.pending >>= 8;
        self.len += 1;
        true
    }

    /// Fills the last byte up with zeros and gives the length.
    fn align(mut self) -> Option<usize> {
        (self.pending_bits == 0 || self.put_byte()).then_some(self.len)
    }
}

/// How often each weight occurs in a table of `1 << bits` places; -1 stands for a place that the description calls "less than one".
struct Distribution {
    bits: u32,
    places: [i16; WEIGHT_COUNT],
}

impl Distribution {
    /// None when there are too few weights to gain, or only one kind.
    fn of(weights: &[u8]) -> Option<Self> {
        let mut counts = [0u16; WEIGHT_COUNT];
        for &weight in weights {
            counts[usize::from(weight)] += 1;
        }
        let total = u16::try_from(weights.len()).ok()?;
        if total < 3 || counts.contains(&total) {
            return None;
        }
        let bits = if total > 64 {
            FSE_BITS_MAX
        } else {
            FSE_BITS_MIN
        };
        let mut left = 1i16 << bits;
        let mut places = [0; WEIGHT_COUNT];
        for (place, &count) in places.iter_mut().zip(&counts) {
            if count > 0 {
                *place = i16::try_from(((count << bits) + total / 2) / total)
                    .ok()?
                    .max(1);
                left -= *place;
            }
        }
        // Rounding's rest goes to the most frequent, or comes from whoever is that by then.
        while left != 0 {
            let most = places.iter_mut().max()?;
            let step = if left > 0 { left } else { -1 };
            *most += step;
            left -= step;
        }
        Some(Self { bits, places })
    }

    /// Which weight owns each place.
    fn spread(&self) -> [u8; 1 << FSE_BITS_MAX] {
        let size = 1usize << self.bits;
        let mut owners = [0; 1 << FSE_BITS_MAX];
        let mut high = size;
        for (weight, &places) in (0u8..).zip(&self.places) {
            if places == -1 {
                high -= 1;
                owners[high] = weight;
            }
        }
        let step = size / 2 + size / 8 + 3;
        let mut place = 0;
        for (weight, &places) in (0u8..).zip(&self.places) {
            for _ in 0..places.max(0) {
                owners[place] = weight;
                place = (place + step) % size;
                while place >= high {
                    place = (place + step) % size;
                }
            }
        }
        owners
    }

    /// The distribution's own description; false when `out` is full.
    fn write(&self, out: &mut BitWriter<'_>) -> bool {
        let mut fits = out.put(self.bits - FSE_BITS_MIN, 4);
        let mut remaining = (1i16 << self.bits) + 1;
        let mut threshold = 1i16 << self.bits;
        let mut bits = self.bits + 1;
        let mut weight = 0;
        while remaining > 1 {
            let places = self.places[weight];
            weight += 1;
            let slack = 2 * threshold - 1 - remaining;
            remaining -= places;
            let mut value = places + 1;
            if value >= threshold {
                value += slack;
            }
            fits &= out.put(
                u32::from(value.unsigned_abs()),
                bits - u32::from(value < slack),
            );
            if places == 0 {
                // How many more of these follow, two bits at a time; 3 says "and on".
                let run = self.places[weight..]
                    .iter()
                    .take_while(|&&places| places == 0)
                    .count();
                weight += run;
                for _ in 0..run / 3 {
                    fits &= out.put(3, 2);
                }
                fits &= out.put([0, 1, 2][run % 3], 2);
            }
            while remaining < threshold {
                bits -= 1;
                threshold >>= 1;
            }
        }
        fits
    }

    /// Reads what [`Self::write`] wrote; also where it ends, in whole bytes.
    fn read(bytes: &[u8]) -> Option<(Self, usize)> {
        let mut position = 0;
        let mut places = [0; WEIGHT_COUNT];
        let bits = FSE_BITS_MIN + forward_bits(bytes, position, 4);
        position += 4;
        if bits > FSE_BITS_MAX {
            return None;
        }
        let mut remaining = (1i16 << bits) + 1;
        let mut threshold = 1i16 << bits;
        let mut value_bits = bits + 1;
        let mut weight = 0;
        while remaining > 1 {
            let place = places.get_mut(weight)?;
            weight += 1;
            let slack = 2 * threshold - 1 - remaining;
            let read = i16::try_from(forward_bits(bytes, position, value_bits)).ok()?;
            let low = read & (threshold - 1);
            let value = if low < slack {
                position += value_bits as usize - 1;
                low
            } else {
                position += value_bits as usize;
                if read >= threshold {
                    read - slack
                } else {
                    read
                }
            };
            *place = value - 1;
            remaining -= place.abs();
            if *place == 0 {
                loop {
                    let more = forward_bits(bytes, position, 2);
                    position += 2;
                    weight += more as usize;
                    if more < 3 {
                        break;
                    }
                }
            }
            while remaining < threshold && threshold > 1 {
                value_bits -= 1;
                threshold >>= 1;
            }
        }
        (remaining == 1).then_some((Self { bits, places }, position.div_ceil(8)))
    }
}

/// Up to 8 bits from bit `position` on; beyond the end there are zeros.
fn forward_bits(bytes: &[u8], position: usize, bits: u32) -> u32 {
    let byte = |index: usize| u32::from(bytes.get(index).copied().unwrap_or(0));
    let word = byte(position / 8) | byte(position / 8 + 1) << 8;
    (word >> (position % 8)) & ((1 << bits) - 1)
}

/// Writes `weights` FSE-coded and gives the length; None when that does not come out shorter than `shorter_than` bytes.
fn fse_write(weights: &[u8], out: &mut [u8], shorter_than: usize) -> Option<usize> {
    let out = out.get_mut(..shorter_than.checked_sub(1)?)?;
    let distribution = Distribution::of(weights)?;
    let mut writer = BitWriter::new(out);
    if !distribution.write(&mut writer) {
        return None;
    }
    let described_len = writer.align()?;

    // Per weight: where its states begin in `states`, as an offset that a shifted state is added to, and a number whose upper half, once a state is
    // added, is the number of bits to put out.
    let bits = distribution.bits;
    let mut base = [0i32; WEIGHT_COUNT];
    let mut bits_out = [0u32; WEIGHT_COUNT];
    let mut next = [0usize; WEIGHT_COUNT];
    let mut before = 0u16;
    for (weight, &places) in distribution.places.iter().enumerate() {
        let places = places.unsigned_abs();
        next[weight] = before.into();
        base[weight] = i32::from(before) - i32::from(places);
        bits_out[weight] = match places {
            0 => 0,
            1 => (bits << 16) - (1 << bits),
            _ => {
                let most = bits - (places - 1).ilog2();
                (most << 16) - (u32::from(places) << most)
            }
        };
        before += places;
    }
    let mut states = [0u32; 1 << FSE_BITS_MAX];
    for (place, &owner) in (0..1u32 << bits).zip(&distribution.spread()) {
        let next = &mut next[usize::from(owner)];
        states[*next] = (1 << bits) + place;
        *next += 1;
    }
    let follow = |state: u32, bits_used: u32, weight: usize| -> Option<u32> {
        let index = i32::try_from(state >> bits_used).ok()? + base[weight];
        states.get(usize::try_from(index).ok()?).copied()
    };

    // The reader takes turns between two states and ends with the last two weights, so the writer begins with them.
    let mut writer = BitWriter::new(&mut out[described_len..]);
    let mut turns: [Option<u32>; 2] = [None; 2];
    for (index, &weight) in weights.iter().enumerate().rev() {
        let weight = usize::from(weight);
        let turn = &mut turns[index % 2];
        *turn = if let Some(state) = *turn {
            let count = (state + bits_out[weight]) >> 16;
            if !writer.put(state & ((1 << count) - 1), count) {
                return None;
            }
            Some(follow(state, count, weight)?)
        } else {
            let count = (bits_out[weight] + (1 << 15)) >> 16;
            Some(follow((count << 16) - bits_out[weight], count, weight)?)
        };
    }
    let [even, odd] = turns;
    let mask = (1 << bits) - 1;
    let fits = writer.put(odd? & mask, bits) && writer.put(even? & mask, bits) && writer.put(1, 1);
    let len = described_len + writer.align()?;
    fits.then_some(len)
}

/// Reads FSE-coded weights that take up all of `bytes`; gives their number.
fn fse_read(bytes: &[u8], weights: &mut [u8; 256]) -> Option<usize> {
    let (distribution, described_len) = Distribution::read(bytes)?;
    let coded = bytes.get(described_len..)?;
    // The highest set bit of the last byte ends the bits, which are read backwards.
    let last = *coded.last()?;
    let mut position = (coded.len() * 8).checked_sub(1 + last.leading_zeros() as usize)?;
    if last == 0 {
        return None;
    }

    let bits = distribution.bits;
    let mut next = distribution
        .places
        .map(|places| u32::from(places.unsigned_abs()));
    let mut steps = [(0u8, 0u32, 0u32); 1 << FSE_BITS_MAX];
    for (step, &weight) in steps[..1 << bits].iter_mut().zip(&distribution.spread()) {
        let next = &mut next[usize::from(weight)];
        let count = bits - next.ilog2();
        *step = (weight, count, (*next << count) - (1 << bits));
        *next += 1;
    }
    let mut take = |count: u32| -> Option<u32> {
        position = position.checked_sub(count as usize)?;
        Some(forward_bits(coded, position, count))
    };

    let mut turns = [take(bits)?, take(bits)?];
    // The last of 256 weights is always inferred. A distribution of one weight, whose steps read no bits, ends here too.
    for index in 0..WEIGHTS_MAX - 1 {
        let (weight, count, from) = steps[turns[index % 2] as usize];
        weights[index] = weight;
        match take(count) {
            Some(read) => turns[index % 2] = from + read,
            None => {
                // Out of bits: the other state's weight is the last one.
                weights[index + 1] = steps[turns[1 - index % 2] as usize].0;
                return Some(index + 2);
            }
        }
    }
    None
}
