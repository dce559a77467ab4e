//! The kernel for x86-64 with AVX-512 VBMI and VBMI2, 64 elements at a time. In: elements or planes of any length. Out: as many as make whole groups, from
//! the start; each function says how many elements that were, and the rest is the portable kernel's.
//!
//! One instruction (`vpermi2b`) picks any 64 of the bytes of two vectors; the tables below say which.

#![allow(unsafe_code, reason = "the fence: loads and stores of vectors")]

use std::arch::x86_64::{
    __m512i, _mm512_loadu_si512, _mm512_permutex2var_epi8, _mm512_rol_epi32, _mm512_ror_epi32,
    _mm512_shldi_epi16, _mm512_shuffle_i64x2, _mm512_storeu_si512,
};

/// Elements of a group: with one byte of each a vector is full.
const GROUP_LEN: usize = 64;

type Bytes = [u8; GROUP_LEN];

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &Bytes) -> __m512i {
    // SAFETY: the 64 bytes that are read are those of `bytes`, and the instruction asks for no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(bytes: &mut Bytes, vector: __m512i) {
    // SAFETY: the 64 bytes that are written are those of `bytes`, and the instruction asks for no alignment.
    unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), vector) }
}

/// Table that picks plane `plane` of the elements of `width` bytes in two vectors and, where that leaves room, the planes after it.
const fn planes_from(plane: usize, width: usize) -> Bytes {
    let mut table = [0; GROUP_LEN];
    let elements = 2 * GROUP_LEN / width;
    let mut index = 0;
    while index < GROUP_LEN {
        table[index] = source(width * (index % elements) + plane + index / elements);
        index += 1;
    }
    table
}

/// Table that takes `run_len` bytes of the first vector, as many of the second, and so on, from their byte `start` on.
const fn in_turn(start: usize, run_len: usize) -> Bytes {
    let mut table = [0; GROUP_LEN];
    let mut index = 0;
    while index < GROUP_LEN {
        let run = index / run_len;
        let within_vector = start + run / 2 * run_len + index % run_len;
        table[index] = source(GROUP_LEN * (run % 2) + within_vector);
        index += 1;
    }
    table
}

/// A byte's place in two vectors, as the instruction wants it.
#[allow(
    clippy::cast_possible_truncation,
    reason = "asserted, when the tables are made"
)]
const fn source(place: usize) -> u8 {
    assert!(place < 2 * GROUP_LEN);
    place as u8
}

static PLANE_0_OF_2: Bytes = planes_from(0, 2);
static PLANE_1_OF_2: Bytes = planes_from(1, 2);
static PLANES_01_OF_4: Bytes = planes_from(0, 4);
static PLANES_23_OF_4: Bytes = planes_from(2, 4);
static BYTES_OF_FIRST_HALVES: Bytes = in_turn(0, 1);
static BYTES_OF_SECOND_HALVES: Bytes = in_turn(32, 1);
static PAIRS_OF_FIRST_HALVES: Bytes = in_turn(0, 2);
static PAIRS_OF_SECOND_HALVES: Bytes = in_turn(32, 2);

/// Both vectors' bytes in the order of a table.
#[inline]
#[target_feature(enable = "avx512f,avx512vbmi")]
fn pick(table: __m512i, first: __m512i, second: __m512i) -> __m512i {
    _mm512_permutex2var_epi8(first, table, second)
}

#[inline]
#[target_feature(enable = "avx512f,avx512vbmi2")]
fn rotate_left_16<const ROTATED: bool>(elements: __m512i) -> __m512i {
    if ROTATED {
        _mm512_shldi_epi16(elements, elements, 1)
    } else {
        elements
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512vbmi2")]
fn rotate_right_16<const ROTATED: bool>(elements: __m512i) -> __m512i {
    if ROTATED {
        _mm512_shldi_epi16(elements, elements, 15)
    } else {
        elements
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn rotate_left_32<const ROTATED: bool>(elements: __m512i) -> __m512i {
    if ROTATED {
        _mm512_rol_epi32(elements, 1)
    } else {
        elements
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn rotate_right_32<const ROTATED: bool>(elements: __m512i) -> __m512i {
    if ROTATED {
        _mm512_ror_epi32(elements, 1)
    } else {
        elements
    }
}

/// For `shuffle_i64x2`: the low halves of both vectors, or the high ones.
const LOW_HALVES: i32 = 0b01_00_01_00;
const HIGH_HALVES: i32 = 0b11_10_11_10;

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
pub(super) fn split2<const ROTATED: bool>(raw: &[u8], [low, high]: [&mut [u8]; 2]) -> usize {
    let (plane_0, plane_1) = (load(&PLANE_0_OF_2), load(&PLANE_1_OF_2));
    let groups = raw.as_chunks().0.as_chunks::<2>().0;
    let planes = low.as_chunks_mut().0.iter_mut().zip(high.as_chunks_mut().0);
    for ([first, second], (low, high)) in groups.iter().zip(planes) {
        let first = rotate_left_16::<ROTATED>(load(first));
        let second = rotate_left_16::<ROTATED>(load(second));
        store(low, pick(plane_0, first, second));
        store(high, pick(plane_1, first, second));
    }
    groups.len() * GROUP_LEN
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
pub(super) fn join2<const ROTATED: bool>([low, high]: [&[u8]; 2], raw: &mut [u8]) -> usize {
    let (first_halves, second_halves) =
        (load(&BYTES_OF_FIRST_HALVES), load(&BYTES_OF_SECOND_HALVES));
    let groups = raw.as_chunks_mut().0.as_chunks_mut::<2>().0;
    let group_count = groups.len();
    let planes = low.as_chunks().0.iter().zip(high.as_chunks().0);
    for ([first, second], (low, high)) in groups.iter_mut().zip(planes) {
        let (low, high) = (load(low), load(high));
        store(
            first,
            rotate_right_16::<ROTATED>(pick(first_halves, low, high)),
        );
        store(
            second,
            rotate_right_16::<ROTATED>(pick(second_halves, low, high)),
        );
    }
    group_count * GROUP_LEN
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
pub(super) fn split4<const ROTATED: bool>(raw: &[u8], planes: [&mut [u8]; 4]) -> usize {
    let (planes_01, planes_23) = (load(&PLANES_01_OF_4), load(&PLANES_23_OF_4));
    let groups = raw.as_chunks().0.as_chunks::<4>().0;
    let [p0, p1, p2, p3] = planes;
    let planes = (p0.as_chunks_mut().0.iter_mut().zip(p1.as_chunks_mut().0))
        .zip(p2.as_chunks_mut().0.iter_mut().zip(p3.as_chunks_mut().0));
    for ([a, b, c, d], ((p0, p1), (p2, p3))) in groups.iter().zip(planes) {
        let a = rotate_left_32::<ROTATED>(load(a));
        let b = rotate_left_32::<ROTATED>(load(b));
        let c = rotate_left_32::<ROTATED>(load(c));
        let d = rotate_left_32::<ROTATED>(load(d));
        let (ab_01, cd_01) = (pick(planes_01, a, b), pick(planes_01, c, d));
        let (ab_23, cd_23) = (pick(planes_23, a, b), pick(planes_23, c, d));
        store(p0, _mm512_shuffle_i64x2(ab_01, cd_01, LOW_HALVES));
        store(p1, _mm512_shuffle_i64x2(ab_01, cd_01, HIGH_HALVES));
        store(p2, _mm512_shuffle_i64x2(ab_23, cd_23, LOW_HALVES));
        store(p3, _mm512_shuffle_i64x2(ab_23, cd_23, HIGH_HALVES));
    }
    groups.len() * GROUP_LEN
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
pub(super) fn join4<const ROTATED: bool>([p0, p1, p2, p3]: [&[u8]; 4], raw: &mut [u8]) -> usize {
    let (bytes_of_first, bytes_of_second) =
        (load(&BYTES_OF_FIRST_HALVES), load(&BYTES_OF_SECOND_HALVES));
    let (pairs_of_first, pairs_of_second) =
        (load(&PAIRS_OF_FIRST_HALVES), load(&PAIRS_OF_SECOND_HALVES));
    let groups = raw.as_chunks_mut().0.as_chunks_mut::<4>().0;
    let group_count = groups.len();
    let planes = (p0.as_chunks().0.iter().zip(p1.as_chunks().0))
        .zip(p2.as_chunks().0.iter().zip(p3.as_chunks().0));
    for ([a, b, c, d], ((p0, p1), (p2, p3))) in groups.iter_mut().zip(planes) {
        let (p0, p1, p2, p3) = (load(p0), load(p1), load(p2), load(p3));
        let (low_01, low_23) = (pick(bytes_of_first, p0, p1), pick(bytes_of_first, p2, p3));
        let (high_01, high_23) = (pick(bytes_of_second, p0, p1), pick(bytes_of_second, p2, p3));
        store(
            a,
            rotate_right_32::<ROTATED>(pick(pairs_of_first, low_01, low_23)),
        );
        store(
            b,
            rotate_right_32::<ROTATED>(pick(pairs_of_second, low_01, low_23)),
        );
        store(
            c,
            rotate_right_32::<ROTATED>(pick(pairs_of_first, high_01, high_23)),
        );
        store(
            d,
            rotate_right_32::<ROTATED>(pick(pairs_of_second, high_01, high_23)),
        );
    }
    group_count * GROUP_LEN
}
