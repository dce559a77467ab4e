//! The kernel for aarch64, 16 elements at a time. In: elements or planes of any length. Out: as many as make whole groups, from the start; each function says
//! how many elements that were, and the rest is the portable kernel's.
//!
//! Loads and stores of two or four vectors (`ld2`, `st4` and so on) split and join by themselves. Elements are rotated as planes: each byte takes in one bit of
//! its neighbour.

#![allow(unsafe_code, reason = "the fence: loads and stores of vectors")]

use std::arch::aarch64::{
    uint8x16_t, uint8x16x2_t, uint8x16x4_t, vld1q_u8, vld2q_u8, vld4q_u8, vshlq_n_u8, vshrq_n_u8,
    vsliq_n_u8, vsriq_n_u8, vst1q_u8, vst2q_u8, vst4q_u8,
};

/// Elements of a group: with one byte of each a vector is full.
const GROUP_LEN: usize = 16;

type Bytes = [u8; GROUP_LEN];

#[inline]
fn load(bytes: &Bytes) -> uint8x16_t {
    // SAFETY: the 16 bytes that are read are those of `bytes`, and the instruction asks for no alignment.
    unsafe { vld1q_u8(bytes.as_ptr()) }
}

#[inline]
fn store(bytes: &mut Bytes, vector: uint8x16_t) {
    // SAFETY: the 16 bytes that are written are those of `bytes`, and the instruction asks for no alignment.
    unsafe { vst1q_u8(bytes.as_mut_ptr(), vector) }
}

/// The byte of an element rotated left: `byte` moves up, and the top bit of the byte `below` comes in (of the highest, for the lowest).
#[inline]
fn left<const ROTATED: bool>(byte: uint8x16_t, below: uint8x16_t) -> uint8x16_t {
    if ROTATED {
        // SAFETY: every aarch64 CPU that Rust's standard library supports has NEON.
        unsafe { vsriq_n_u8::<7>(vshlq_n_u8::<1>(byte), below) }
    } else {
        byte
    }
}

/// The byte of an element rotated right: `byte` moves down, and the bottom bit of the byte `above` comes in (of the lowest, for the highest).
#[inline]
fn right<const ROTATED: bool>(byte: uint8x16_t, above: uint8x16_t) -> uint8x16_t {
    if ROTATED {
        // SAFETY: every aarch64 CPU that Rust's standard library supports has NEON.
        unsafe { vsliq_n_u8::<7>(vshrq_n_u8::<1>(byte), above) }
    } else {
        byte
    }
}

pub(super) fn split2<const ROTATED: bool>(raw: &[u8], [low, high]: [&mut [u8]; 2]) -> usize {
    let groups = raw.as_chunks::<{ 2 * GROUP_LEN }>().0;
    let planes = low.as_chunks_mut().0.iter_mut().zip(high.as_chunks_mut().0);
    for (raw, (low, high)) in groups.iter().zip(planes) {
        // SAFETY: the 32 bytes that are read are those of `raw`, and the instruction asks for no alignment.
        let uint8x16x2_t(b0, b1) = unsafe { vld2q_u8(raw.as_ptr()) };
        store(low, left::<ROTATED>(b0, b1));
        store(high, left::<ROTATED>(b1, b0));
    }
    groups.len() * GROUP_LEN
}

pub(super) fn join2<const ROTATED: bool>([low, high]: [&[u8]; 2], raw: &mut [u8]) -> usize {
    let groups = raw.as_chunks_mut::<{ 2 * GROUP_LEN }>().0;
    let group_count = groups.len();
    let planes = low.as_chunks().0.iter().zip(high.as_chunks().0);
    for (raw, (low, high)) in groups.iter_mut().zip(planes) {
        let (b0, b1) = (load(low), load(high));
        let element = uint8x16x2_t(right::<ROTATED>(b0, b1), right::<ROTATED>(b1, b0));
        // SAFETY: the 32 bytes that are written are those of `raw`, and the instruction asks for no alignment.
        unsafe { vst2q_u8(raw.as_mut_ptr(), element) };
    }
    group_count * GROUP_LEN
}

pub(super) fn split4<const ROTATED: bool>(raw: &[u8], planes: [&mut [u8]; 4]) -> usize {
    let groups = raw.as_chunks::<{ 4 * GROUP_LEN }>().0;
    let [p0, p1, p2, p3] = planes;
    let planes = (p0.as_chunks_mut().0.iter_mut().zip(p1.as_chunks_mut().0))
        .zip(p2.as_chunks_mut().0.iter_mut().zip(p3.as_chunks_mut().0));
    for (raw, ((p0, p1), (p2, p3))) in groups.iter().zip(planes) {
        // SAFETY: the 64 bytes that are read are those of `raw`, and the instruction asks for no alignment.
        let uint8x16x4_t(b0, b1, b2, b3) = unsafe { vld4q_u8(raw.as_ptr()) };
        store(p0, left::<ROTATED>(b0, b3));
        store(p1, left::<ROTATED>(b1, b0));
        store(p2, left::<ROTATED>(b2, b1));
        store(p3, left::<ROTATED>(b3, b2));
    }
    groups.len() * GROUP_LEN
}

pub(super) fn join4<const ROTATED: bool>([p0, p1, p2, p3]: [&[u8]; 4], raw: &mut [u8]) -> usize {
    let groups = raw.as_chunks_mut::<{ 4 * GROUP_LEN }>().0;
    let group_count = groups.len();
    let planes = (p0.as_chunks().0.iter().zip(p1.as_chunks().0))
        .zip(p2.as_chunks().0.iter().zip(p3.as_chunks().0));
    for (raw, ((p0, p1), (p2, p3))) in groups.iter_mut().zip(planes) {
        let (b0, b1, b2, b3) = (load(p0), load(p1), load(p2), load(p3));
        let element = uint8x16x4_t(
            right::<ROTATED>(b0, b1),
            right::<ROTATED>(b1, b2),
            right::<ROTATED>(b2, b3),
            right::<ROTATED>(b3, b0),
        );
        // SAFETY: the 64 bytes that are written are those of `raw`, and the instruction asks for no alignment.
        unsafe { vst4q_u8(raw.as_mut_ptr(), element) };
    }
    group_count * GROUP_LEN
}
