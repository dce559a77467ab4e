//! The loops that touch every byte and know nothing of frames: digest, checksum, copy, zeros, planes; shared by the bench that takes their time and the one
//! that counts their instructions. In: how many bytes. Out: each loop with its name, ready to run.

use std::hint::black_box;
use std::iter;

use ckptstream::codec::planes::{self, Filter, Kernel};
use ckptstream::codec::zeros::{is_zero, zero_runs};
use ckptstream::codec::{Crc64, Digest};

/// Does its work once, on the same bytes every time.
pub(crate) type Pass = Box<dyn FnMut()>;

/// A loop over bytes.
pub(crate) struct Loop {
    /// What it does, how, and with which kernel.
    pub(crate) name: String,
    make: Box<dyn FnOnce(usize) -> Pass>,
}

impl Loop {
    fn new(name: impl Into<String>, make: impl FnOnce(usize) -> Pass + 'static) -> Self {
        Self {
            name: name.into(),
            make: Box::new(make),
        }
    }

    /// Makes the bytes that it needs, `len` of them; a multiple of every filter's unit.
    pub(crate) fn over(self, len: usize) -> Pass {
        (self.make)(len)
    }
}

/// SplitMix64.
pub(crate) fn numbers(mut state: u64) -> impl Iterator<Item = u64> {
    iter::repeat_with(move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

/// `len` bytes that no compressor gains on.
pub(crate) fn random(len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 8);
    for number in numbers(1).take(len.div_ceil(8)) {
        bytes.extend(number.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// All of them. Planes once for each kernel that this CPU has.
pub(crate) fn all() -> Vec<Loop> {
    let mut loops = vec![
        over_random("digest", |bytes| {
            black_box(Digest::of(bytes));
        }),
        over_random("checksum", |bytes| {
            black_box(Crc64::of(bytes));
        }),
        Loop::new("copy", |len| {
            let (from, mut to) = (random(len), vec![0; len]);
            Box::new(move || planes::copy(black_box(&from), black_box(&mut to)))
        }),
        Loop::new("is_zero", |len| {
            // Written, so that it is memory and not the one page of zeros that the kernel has for all.
            let mut zeros = vec![1; len];
            zeros.fill(black_box(0));
            Box::new(move || assert!(is_zero(black_box(&zeros))))
        }),
    ];
    for least_len in [256, 512, 4096] {
        loops.push(Loop::new(
            format!("zero_runs/{least_len}/none"),
            move |len| runs_pass(random(len), least_len),
        ));
        loops.push(Loop::new(
            format!("zero_runs/{least_len}/third"),
            move |len| {
                let mut bytes = random(len);
                for stretch in bytes.chunks_mut(3 * 5000) {
                    let third = stretch.len() / 3;
                    stretch[..third].fill(0);
                }
                runs_pass(bytes, least_len)
            },
        ));
    }
    let filters = Filter::ALL
        .into_iter()
        .filter(|filter| *filter != Filter::None);
    for filter in filters {
        for kernel in Kernel::available() {
            loops.push(Loop::new(
                format!("split/{filter:?}/{kernel}"),
                move |len| split_pass(kernel, filter, len),
            ));
            loops.push(Loop::new(format!("join/{filter:?}/{kernel}"), move |len| {
                join_pass(kernel, filter, len)
            }));
        }
    }
    loops
}

fn over_random(name: &str, work: impl Fn(&[u8]) + 'static) -> Loop {
    Loop::new(name, |len| {
        let bytes = random(len);
        Box::new(move || work(black_box(&bytes)))
    })
}

fn runs_pass(bytes: Vec<u8>, least_len: usize) -> Pass {
    let mut runs = Vec::new();
    Box::new(move || {
        zero_runs(black_box(&bytes), least_len, &mut runs);
        black_box(&mut runs);
    })
}

fn split_pass(kernel: Kernel, filter: Filter, len: usize) -> Pass {
    let (raw, mut out) = (random(len), vec![0; len]);
    Box::new(move || {
        let units = black_box(&raw).chunks_exact(filter.unit_len());
        for (raw, out) in units.zip(out.chunks_exact_mut(filter.unit_len())) {
            let mut planes: [&mut [u8]; 4] = Default::default();
            let parts = out.chunks_exact_mut(planes::PLANE_LEN);
            for (plane, part) in planes.iter_mut().zip(parts) {
                *plane = part;
            }
            kernel.split(filter, raw, black_box(&mut planes));
        }
    })
}

fn join_pass(kernel: Kernel, filter: Filter, len: usize) -> Pass {
    let (stored, mut out) = (random(len), vec![0; len]);
    Box::new(move || {
        let units = black_box(&stored).chunks_exact(filter.unit_len());
        for (stored, out) in units.zip(out.chunks_exact_mut(filter.unit_len())) {
            let mut planes: [&[u8]; 4] = Default::default();
            let parts = stored.chunks_exact(planes::PLANE_LEN);
            for (plane, part) in planes.iter_mut().zip(parts) {
                *plane = part;
            }
            kernel.join(filter, &planes, black_box(out));
        }
    })
}
