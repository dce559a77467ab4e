//! Huffman coding of one block's literals, as zstd frames have it (RFC 8878, section 4.2): one code and four interleavable bit strings a block.
//!
//! Out: a histogram becomes a [`Code`] with its description; a [`Coder`] writes symbols as a jump table and four bit strings. Back: a [`Table`] reads the
//! description and turns the bit strings into symbols again. Both are ours because libzstd's cost twice the CPU time on the planes that this
//! codec makes of tensors (few symbols, two to three bits each); what they write, every zstd decoder reads, and libzstd is the oracle of their tests.
//! Block and literals headers are the frame writer's business.
//!
//! Kernels are chosen at run time by what the CPU has and by how dense the code is; all write the same bytes, and the safe portable one is their oracle.
//! What can fail: a histogram that no code can be described for, a symbol that the code does not know, an output without room; on the way back any input.
//! A damaged bit string of the right length may decode to wrong symbols, as in every zstd frame without a checksum: the chunk's digest finds that.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod code;
mod decode;
mod encode;
mod header;
#[cfg(target_arch = "x86_64")]
mod records;

pub use code::Code;
pub use decode::Table;
pub use encode::Coder;

/// Longest code, in bits, that the format allows for literals.
const CODE_BITS_MAX: u8 = 11;

/// Most symbols of one block.
const SYMBOLS_MAX: usize = 128 << 10;

/// Bytes of the jump table: the lengths of all bit strings but the last, two each.
const JUMP_TABLE_LEN: usize = 6;

/// The four parts of a block that become one bit string each: a quarter each, rounded up; the last is what is left.
fn quarters(symbols: &[u8]) -> [&[u8]; 4] {
    let len = symbols.len().div_ceil(4);
    let (first, rest) = symbols.split_at(len);
    let (second, rest) = rest.split_at(len);
    let (third, fourth) = rest.split_at(len);
    [first, second, third, fourth]
}

#[cfg(test)]
mod tests;
