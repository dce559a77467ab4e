//! The kernel that every CPU can run, and the oracle of the other. In: bytes. Out: how many of them are zero from the start, or up to the end.

use super::{LINE_LEN, Line};

const ZEROS: Line = [0; LINE_LEN];

pub(super) fn zero_len(bytes: &[u8]) -> usize {
    static PIECE: [u8; 4096] = [0; 4096];
    // To compare slices is the C library's `memcmp`, which is fast in debug builds too.
    let pieces = bytes.chunks_exact(PIECE.len());
    let len = pieces.take_while(|piece| **piece == PIECE).count() * PIECE.len();
    let (lines, tail) = bytes[len..].as_chunks();
    len + match lines.iter().position(|line| *line != ZEROS) {
        Some(index) => index * LINE_LEN + leading_zeros(&lines[index]),
        None => lines.len() * LINE_LEN + leading_zeros(tail),
    }
}

pub(super) fn zero_len_back(bytes: &[u8]) -> usize {
    let (head, lines) = bytes.as_rchunks();
    match lines.iter().rev().position(|line| *line != ZEROS) {
        Some(index) => index * LINE_LEN + trailing_zeros(&lines[lines.len() - 1 - index]),
        None => lines.len() * LINE_LEN + trailing_zeros(head),
    }
}

fn leading_zeros(bytes: &[u8]) -> usize {
    let (words, tail) = bytes.as_chunks();
    match words.iter().position(|word| *word != [0; 8]) {
        Some(index) => index * 8 + u64::from_le_bytes(words[index]).trailing_zeros() as usize / 8,
        None => words.len() * 8 + tail.iter().take_while(|byte| **byte == 0).count(),
    }
}

fn trailing_zeros(bytes: &[u8]) -> usize {
    let (head, words) = bytes.as_rchunks();
    match words.iter().rev().position(|word| *word != [0; 8]) {
        Some(index) => {
            let word = words[words.len() - 1 - index];
            index * 8 + u64::from_le_bytes(word).leading_zeros() as usize / 8
        }
        None => words.len() * 8 + head.iter().rev().take_while(|byte| **byte == 0).count(),
    }
}
