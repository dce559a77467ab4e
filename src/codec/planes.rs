//! Bytes of numbers to planes, one for each place within a number, and back.
//!
//! Out: a unit of raw bytes, seen as little-endian elements of two or four bytes, is split so that the lowest bytes of all elements come first, then the next
//! ones, and so on. Where floats are close to each other in size, the plane with their exponents compresses well and the others do not compress at all, which
//! a coder that sees them mixed cannot make use of. A rotated filter turns every element left by one bit first: that moves the sign to the bottom and gathers
//! the eight bits of a bf16's or fp32's exponent in one byte. Back: the same, from last to first.
//!
//! One kernel per instruction set does the work, at the speed of a copy; [`split`] and [`join`] take the one that is fastest here. The portable one is the
//! oracle of the others. Nothing can fail: any bytes are numbers.

mod kernel;
mod portable;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

pub use kernel::Kernel;

/// Bytes of one plane in a whole unit: as many as the longest block that zstd allows, so that each plane is a block.
pub const PLANE_LEN: usize = 128 * 1024;

/// What is done to a chunk's bytes before they are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Filter {
    /// Nothing: frames decode to the raw extent.
    #[default]
    None,
    /// Elements of two bytes are split into two planes.
    Planes2,
    /// Elements of two bytes are rotated left by one bit, then split into two planes.
    Planes2Rotated,
    /// Elements of four bytes are split into four planes.
    Planes4,
    /// Elements of four bytes are rotated left by one bit, then split into four planes.
    Planes4Rotated,
}

impl Filter {
    /// All of them.
    pub const ALL: [Filter; 5] = [
        Filter::None,
        Filter::Planes2,
        Filter::Planes2Rotated,
        Filter::Planes4,
        Filter::Planes4Rotated,
    ];

    /// Bytes of an element, which is also how many planes there are: 1, 2 or 4.
    pub const fn width(self) -> usize {
        match self {
            Filter::None => 1,
            Filter::Planes2 | Filter::Planes2Rotated => 2,
            Filter::Planes4 | Filter::Planes4Rotated => 4,
        }
    }

    /// Whether elements are rotated left by one bit before the split.
    pub const fn is_rotated(self) -> bool {
        matches!(self, Filter::Planes2Rotated | Filter::Planes4Rotated)
    }

    /// Raw bytes of a whole unit: [`PLANE_LEN`] for each plane.
    pub const fn unit_len(self) -> usize {
        self.width() * PLANE_LEN
    }

    /// The filter's letter in a frame table.
    pub const fn letter(self) -> char {
        match self {
            Filter::None => '-',
            Filter::Planes2 => 'b',
            Filter::Planes2Rotated => 'B',
            Filter::Planes4 => 'd',
            Filter::Planes4Rotated => 'D',
        }
    }

    /// The filter with this letter.
    pub fn from_letter(letter: char) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|filter| filter.letter() == letter)
    }
}

/// Splits `raw`, which is a unit or less, into the filter's planes: each of the first [`Filter::width`] takes `raw.len() / width` bytes. The `raw.len() % width`
/// bytes at the end are no whole element and stay the caller's; planes behind the width are left alone.
///
/// # Panics
/// When one of those planes has another length.
pub fn split(filter: Filter, raw: &[u8], planes: &mut [&mut [u8]; 4]) {
    Kernel::fastest_split(filter).split(filter, raw, planes);
}

/// Joins what [`split`] made of a `raw` of this length; the `raw.len() % width` bytes at the end are left alone.
///
/// # Panics
/// When one of the first [`Filter::width`] planes has not `raw.len() / width` bytes.
pub fn join(filter: Filter, planes: &[&[u8]; 4], raw: &mut [u8]) {
    Kernel::fastest_join(filter).join(filter, planes, raw);
}

/// Copies bytes from one buffer to another of the same length. `memcpy` may use `rep movsb` from about 2 KiB on, which on AMD's Zen 3 runs at 2 instead of 40
/// GB/s when the destination lies up to 31 bytes behind the source, counted within a page: just where a frame's header puts the content of a page-aligned chunk.
///
/// # Panics
/// When the lengths differ.
pub fn copy(from: &[u8], to: &mut [u8]) {
    const PIECE_LEN: usize = 512;
    assert_eq!(from.len(), to.len(), "bytes to copy, and room for them");
    for (from, to) in from.chunks(PIECE_LEN).zip(to.chunks_mut(PIECE_LEN)) {
        to.copy_from_slice(from);
    }
}

#[cfg(test)]
mod tests;
