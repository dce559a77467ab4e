//! Where memory is zero. In: bytes. Out: whether all of them are zero, or the runs of zeros among them. Nothing can fail.
//!
//! Bytes are looked at in lines of 64. A run that is long enough covers several whole lines, so only one line of several is looked at, and where that is zero
//! the run is followed to both its ends. The longer the wanted runs, the fewer bytes are read where there are none.

#![allow(
    unsafe_code,
    reason = "the fence: a call of what only some CPUs can run"
)]

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
mod avx2;
mod portable;

/// As a cache has it.
const LINE_LEN: usize = 64;

type Line = [u8; LINE_LEN];

/// Shortest run that surely covers a whole line.
pub const RUN_LEN_MIN: usize = 2 * LINE_LEN - 1;

/// Whether all bytes are zero. It looks no further than the first line that is not.
pub fn is_zero(bytes: &[u8]) -> bool {
    zero_len(bytes) == bytes.len()
}

/// Leaves in `runs`, in order, where the runs of zeros are that have at least `least_len` bytes; each begins and ends beside a byte that is not zero, or where
/// `bytes` do.
///
/// # Panics
/// When `least_len` is less than [`RUN_LEN_MIN`], or when there are 4 GiB of bytes or more.
pub fn zero_runs(bytes: &[u8], least_len: usize, runs: &mut Vec<Range<u32>>) {
    assert!(
        least_len >= RUN_LEN_MIN,
        "runs of {least_len} bytes may cover no line; {RUN_LEN_MIN} is the least"
    );
    let offset = |at: usize| u32::try_from(at).expect("less than 4 GiB");
    offset(bytes.len());
    runs.clear();

    // The fewest whole lines that such a run covers: of every so many, one is in it.
    let line_step = (least_len + 1) / LINE_LEN - 1;
    let lines = bytes.as_chunks::<LINE_LEN>().0;
    let mut index = line_step - 1;
    while let Some(line) = lines.get(index) {
        if *line != [0; LINE_LEN] {
            index += line_step;
            continue;
        }
        let at = index * LINE_LEN;
        // No further than to the line that was looked at before, which is not zero.
        let start = at - portable::zero_len_back(&bytes[..at]);
        let end = at + zero_len(&bytes[at..]);
        if end - start >= least_len {
            runs.push(offset(start)..offset(end));
        }
        index = end / LINE_LEN + line_step;
    }
}

/// How many bytes are zero before the first that is not.
fn zero_len(bytes: &[u8]) -> usize {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has just been asked for it.
        let len = unsafe { avx2::zero_groups_len(bytes) };
        return len + portable::zero_len(&bytes[len..]);
    }
    portable::zero_len(bytes)
}

#[cfg(test)]
mod tests;
