//! The kernel for x86-64 with AVX2, four lines at a time. In: bytes. Out: how many of them are zero from the start, counted in whole groups of lines; the rest
//! is the portable kernel's.

#![allow(unsafe_code, reason = "the fence: loads of vectors")]

use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_or_si256, _mm256_testz_si256};

const VECTOR_LEN: usize = 32;
const GROUP_LEN: usize = 8;

#[inline]
#[target_feature(enable = "avx2")]
fn load(bytes: &[u8; VECTOR_LEN]) -> __m256i {
    // SAFETY: the 32 bytes that are read are those of `bytes`, and the instruction asks for no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx2")]
pub(super) fn zero_groups_len(bytes: &[u8]) -> usize {
    let groups = bytes.as_chunks::<VECTOR_LEN>().0.as_chunks::<GROUP_LEN>().0;
    let mut len = 0;
    for [a, b, c, d, e, f, g, h] in groups {
        let abcd = _mm256_or_si256(
            _mm256_or_si256(load(a), load(b)),
            _mm256_or_si256(load(c), load(d)),
        );
        let efgh = _mm256_or_si256(
            _mm256_or_si256(load(e), load(f)),
            _mm256_or_si256(load(g), load(h)),
        );
        let any = _mm256_or_si256(abcd, efgh);
        if _mm256_testz_si256(any, any) == 0 {
            break;
        }
        len += GROUP_LEN * VECTOR_LEN;
    }
    len
}
