//! The kernel for x86-64 with AVX2, 32 elements at a time. In: elements or planes of any length. Out: as many as make whole groups, from the start; each
//! function says how many elements that were, and the rest is the portable kernel's.

#![allow(unsafe_code, reason = "the fence: loads and stores of vectors")]

use std::arch::x86_64::{
    __m256i, _mm256_add_epi16, _mm256_add_epi32, _mm256_and_si256, _mm256_loadu_si256,
    _mm256_or_si256, _mm256_packus_epi16, _mm256_permute2x128_si256, _mm256_permute4x64_epi64,
    _mm256_permutevar8x32_epi32, _mm256_set1_epi16, _mm256_setr_epi8, _mm256_setr_epi32,
    _mm256_shuffle_epi8, _mm256_slli_epi16, _mm256_slli_epi32, _mm256_srli_epi16,
    _mm256_srli_epi32, _mm256_storeu_si256, _mm256_unpackhi_epi8, _mm256_unpackhi_epi16,
    _mm256_unpackhi_epi64, _mm256_unpacklo_epi8, _mm256_unpacklo_epi16, _mm256_unpacklo_epi64,
};

/// Elements of a group: with one byte of each a vector is full.
const GROUP_LEN: usize = 32;

type Bytes = [u8; GROUP_LEN];

#[inline]
#[target_feature(enable = "avx2")]
fn load(bytes: &Bytes) -> __m256i {
    // SAFETY: the 32 bytes that are read are those of `bytes`, and the instruction asks for no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(bytes: &mut Bytes, vector: __m256i) {
    // SAFETY: the 32 bytes that are written are those of `bytes`, and the instruction asks for no alignment.
    unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), vector) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn rotate_left_16<const ROTATED: bool>(elements: __m256i) -> __m256i {
    if ROTATED {
        let doubled = _mm256_add_epi16(elements, elements);
        _mm256_or_si256(doubled, _mm256_srli_epi16(elements, 15))
    } else {
        elements
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn rotate_right_16<const ROTATED: bool>(elements: __m256i) -> __m256i {
    if ROTATED {
        let top = _mm256_slli_epi16(elements, 15);
        _mm256_or_si256(top, _mm256_srli_epi16(elements, 1))
    } else {
        elements
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn rotate_left_32<const ROTATED: bool>(elements: __m256i) -> __m256i {
    if ROTATED {
        let doubled = _mm256_add_epi32(elements, elements);
        _mm256_or_si256(doubled, _mm256_srli_epi32(elements, 31))
    } else {
        elements
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn rotate_right_32<const ROTATED: bool>(elements: __m256i) -> __m256i {
    if ROTATED {
        let top = _mm256_slli_epi32(elements, 31);
        _mm256_or_si256(top, _mm256_srli_epi32(elements, 1))
    } else {
        elements
    }
}

/// Order of 64-bit quarters that a pack of two vectors leaves, and that an unpack of two wants: 0, 2, 1, 3.
const QUARTERS: i32 = 0b11_01_10_00;
/// For `permute2x128`: the low halves of both vectors, or the high ones.
const LOW_HALVES: i32 = 0x20;
const HIGH_HALVES: i32 = 0x31;

#[target_feature(enable = "avx2")]
pub(super) fn split2<const ROTATED: bool>(raw: &[u8], [low, high]: [&mut [u8]; 2]) -> usize {
    let low_byte = _mm256_set1_epi16(0xFF);
    let groups = raw.as_chunks().0.as_chunks::<2>().0;
    let planes = low.as_chunks_mut().0.iter_mut().zip(high.as_chunks_mut().0);
    for ([first, second], (low, high)) in groups.iter().zip(planes) {
        let first = rotate_left_16::<ROTATED>(load(first));
        let second = rotate_left_16::<ROTATED>(load(second));
        let lows = _mm256_packus_epi16(
            _mm256_and_si256(first, low_byte),
            _mm256_and_si256(second, low_byte),
        );
        let highs = _mm256_packus_epi16(_mm256_srli_epi16(first, 8), _mm256_srli_epi16(second, 8));
        store(low, _mm256_permute4x64_epi64(lows, QUARTERS));
        store(high, _mm256_permute4x64_epi64(highs, QUARTERS));
    }
    groups.len() * GROUP_LEN
}

#[target_feature(enable = "avx2")]
pub(super) fn join2<const ROTATED: bool>([low, high]: [&[u8]; 2], raw: &mut [u8]) -> usize {
    let groups = raw.as_chunks_mut().0.as_chunks_mut::<2>().0;
    let group_count = groups.len();
    let planes = low.as_chunks().0.iter().zip(high.as_chunks().0);
    for ([first, second], (low, high)) in groups.iter_mut().zip(planes) {
        let low = _mm256_permute4x64_epi64(load(low), QUARTERS);
        let high = _mm256_permute4x64_epi64(load(high), QUARTERS);
        store(
            first,
            rotate_right_16::<ROTATED>(_mm256_unpacklo_epi8(low, high)),
        );
        store(
            second,
            rotate_right_16::<ROTATED>(_mm256_unpackhi_epi8(low, high)),
        );
    }
    group_count * GROUP_LEN
}

#[target_feature(enable = "avx2")]
pub(super) fn split4<const ROTATED: bool>(raw: &[u8], planes: [&mut [u8]; 4]) -> usize {
    let groups = raw.as_chunks().0.as_chunks::<4>().0;
    let [p0, p1, p2, p3] = planes;
    let planes = (p0.as_chunks_mut().0.iter_mut().zip(p1.as_chunks_mut().0))
        .zip(p2.as_chunks_mut().0.iter_mut().zip(p3.as_chunks_mut().0));
    for ([a, b, c, d], ((p0, p1), (p2, p3))) in groups.iter().zip(planes) {
        let a = gather4(rotate_left_32::<ROTATED>(load(a)));
        let b = gather4(rotate_left_32::<ROTATED>(load(b)));
        let c = gather4(rotate_left_32::<ROTATED>(load(c)));
        let d = gather4(rotate_left_32::<ROTATED>(load(d)));
        // Planes 0 and 2 of two vectors each, then planes 1 and 3.
        let (ab02, cd02) = (_mm256_unpacklo_epi64(a, b), _mm256_unpacklo_epi64(c, d));
        let (ab13, cd13) = (_mm256_unpackhi_epi64(a, b), _mm256_unpackhi_epi64(c, d));
        store(p0, _mm256_permute2x128_si256(ab02, cd02, LOW_HALVES));
        store(p1, _mm256_permute2x128_si256(ab13, cd13, LOW_HALVES));
        store(p2, _mm256_permute2x128_si256(ab02, cd02, HIGH_HALVES));
        store(p3, _mm256_permute2x128_si256(ab13, cd13, HIGH_HALVES));
    }
    groups.len() * GROUP_LEN
}

/// Eight elements to eight bytes of plane 0, then of plane 1, 2 and 3.
#[inline]
#[target_feature(enable = "avx2")]
fn gather4(elements: __m256i) -> __m256i {
    #[rustfmt::skip]
    let within_halves = _mm256_setr_epi8(
        0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
        0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
    );
    let across_halves = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(elements, within_halves), across_halves)
}

#[target_feature(enable = "avx2")]
pub(super) fn join4<const ROTATED: bool>([p0, p1, p2, p3]: [&[u8]; 4], raw: &mut [u8]) -> usize {
    let groups = raw.as_chunks_mut().0.as_chunks_mut::<4>().0;
    let group_count = groups.len();
    let planes = (p0.as_chunks().0.iter().zip(p1.as_chunks().0))
        .zip(p2.as_chunks().0.iter().zip(p3.as_chunks().0));
    for ([a, b, c, d], ((p0, p1), (p2, p3))) in groups.iter_mut().zip(planes) {
        let (p0, p1, p2, p3) = (load(p0), load(p1), load(p2), load(p3));
        let (low_01, low_23) = (_mm256_unpacklo_epi8(p0, p1), _mm256_unpacklo_epi8(p2, p3));
        let (high_01, high_23) = (_mm256_unpackhi_epi8(p0, p1), _mm256_unpackhi_epi8(p2, p3));
        // Four elements in each half: 0.. and 16.., 4.. and 20.., 8.. and 24.., 12.. and 28..
        let at_0 = rotate_right_32::<ROTATED>(_mm256_unpacklo_epi16(low_01, low_23));
        let at_4 = rotate_right_32::<ROTATED>(_mm256_unpackhi_epi16(low_01, low_23));
        let at_8 = rotate_right_32::<ROTATED>(_mm256_unpacklo_epi16(high_01, high_23));
        let at_12 = rotate_right_32::<ROTATED>(_mm256_unpackhi_epi16(high_01, high_23));
        store(a, _mm256_permute2x128_si256(at_0, at_4, LOW_HALVES));
        store(b, _mm256_permute2x128_si256(at_8, at_12, LOW_HALVES));
        store(c, _mm256_permute2x128_si256(at_0, at_4, HIGH_HALVES));
        store(d, _mm256_permute2x128_si256(at_8, at_12, HIGH_HALVES));
    }
    group_count * GROUP_LEN
}
