use proptest::prelude::*;

use super::*;

/// Byte by byte, from the definition.
fn expected_runs(bytes: &[u8], least_len: usize) -> Vec<Range<u32>> {
    let mut runs = Vec::new();
    let mut start = 0;
    for (index, byte) in bytes.iter().chain([&1]).enumerate() {
        if *byte != 0 {
            if index - start >= least_len {
                runs.push(u32::try_from(start).unwrap()..u32::try_from(index).unwrap());
            }
            start = index + 1;
        }
    }
    runs
}

fn leading(bytes: &[u8]) -> usize {
    bytes.iter().take_while(|byte| **byte == 0).count()
}

fn trailing(bytes: &[u8]) -> usize {
    bytes.iter().rev().take_while(|byte| **byte == 0).count()
}

fn assert_alike(bytes: &[u8]) {
    assert_eq!(zero_len(bytes), leading(bytes));
    assert_eq!(portable::zero_len(bytes), leading(bytes));
    assert_eq!(portable::zero_len_back(bytes), trailing(bytes));
    assert_eq!(is_zero(bytes), leading(bytes) == bytes.len());
    // What an earlier call left must not stay.
    let mut runs = expected_runs(&[0; 200], 127);
    for least_len in [127, 128, 190, 191, 192, 256, 512, 1000, 4096] {
        zero_runs(bytes, least_len, &mut runs);
        assert_eq!(runs, expected_runs(bytes, least_len), "runs of {least_len}");
    }
}

#[test]
fn one_byte_anywhere_ends_the_zeros() {
    const LEN: usize = 700;
    let mut bytes = vec![0; LEN + 64];
    for start in [0, 1, 31, 63] {
        let bytes = &mut bytes[start..start + LEN];
        assert_alike(bytes);
        for index in 0..LEN {
            for value in [1, 0x80] {
                bytes[index] = value;
                assert_alike(bytes);
            }
            bytes[index] = 0;
        }
    }
    let mut long = vec![0; 3 * 4096 + 100];
    for index in (0..long.len()).rev().step_by(509) {
        long[index] = 1;
        assert_alike(&long);
        assert_alike(&long[31..]);
    }
    assert_alike(&[]);
    assert_alike(&[0]);
    assert_alike(&[7]);
}

/// A run of exactly the wanted length, and one that is a byte shorter, at every place within the lines.
#[test]
fn a_run_of_the_least_length_is_found_wherever_it_begins() {
    let mut runs = Vec::new();
    for least_len in [127, 191, 256, 500, 512] {
        for start in 0..200 {
            let mut bytes = vec![1; 1200];
            bytes[start..start + least_len].fill(0);
            zero_runs(&bytes, least_len, &mut runs);
            assert_eq!(runs, expected_runs(&bytes, least_len));
            assert_eq!(runs.len(), 1);

            zero_runs(&bytes, least_len + 1, &mut runs);
            assert_eq!(runs, []);
        }
    }
}

proptest! {
    #[test]
    fn kernels_agree_on_runs_of_any_lengths(
        lens in prop::collection::vec((0usize..700, 0usize..400), 0..12),
        shift in 0usize..64,
    ) {
        let mut bytes = vec![1; shift];
        for (zero_len, other_len) in lens {
            bytes.resize(bytes.len() + zero_len, 0);
            bytes.resize(bytes.len() + other_len, 0x80);
        }
        assert_alike(&bytes[shift..]);
        assert_alike(&bytes);
    }
}

#[test]
#[should_panic(expected = "runs of 126 bytes may cover no line")]
fn runs_that_could_be_missed_are_not_looked_for() {
    zero_runs(&[0; 1000], RUN_LEN_MIN - 1, &mut Vec::new());
}
