//! Which instruction set splits and joins. In: what the CPU has, and a measurement where that leaves a choice. Out: a [`Kernel`], which runs anywhere it can be
//! had. Nothing can fail.

#![allow(
    unsafe_code,
    reason = "the fence: calls of what only some CPUs can run"
)]

use std::fmt;
use std::hint::black_box;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

#[cfg(target_arch = "aarch64")]
use super::neon;
use super::{Filter, copy, portable};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};

/// An instruction set that this CPU has, and the means to split and join by it. Having a kernel proves that the CPU can run it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Kernel(Isa);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Isa {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

/// Best first, as far as that can be said of all CPUs.
const ISAS: &[Isa] = &[
    #[cfg(target_arch = "x86_64")]
    Isa::Avx512,
    #[cfg(target_arch = "x86_64")]
    Isa::Avx2,
    #[cfg(target_arch = "aarch64")]
    Isa::Neon,
    Isa::Portable,
];

impl Isa {
    fn is_here(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vbmi")
                    && is_x86_feature_detected!("avx512vbmi2")
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => true,
        }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Isa::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => "neon",
        })
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Calls the function of this name that belongs to an instruction set; gives how many elements it has done.
macro_rules! by_isa {
    ($isa:expr, $function:ident::<$rotated:ident>($($argument:expr),*)) => {
        match $isa {
            Isa::Portable => 0,
            // SAFETY: there is a kernel of this instruction set, so the CPU was asked for it.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::$function::<$rotated>($($argument),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::$function::<$rotated>($($argument),*) },
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => neon::$function::<$rotated>($($argument),*),
        }
    };
}

impl Kernel {
    /// The one that every CPU has.
    pub const PORTABLE: Self = Self(Isa::Portable);

    /// Those of this CPU; the portable one is the last.
    pub fn available() -> impl Iterator<Item = Self> {
        let here = ISAS.iter().copied().filter(|isa| isa.is_here());
        here.map(Self)
    }

    /// The names of those that are made for this architecture, and that this CPU lacks.
    pub fn missing() -> impl Iterator<Item = String> {
        let missing = ISAS.iter().copied().filter(|isa| !isa.is_here());
        missing.map(|isa| Self(isa).to_string())
    }

    /// Does what [`split`](super::split) does.
    ///
    /// # Panics
    /// As there.
    pub fn split(self, filter: Filter, raw: &[u8], planes: &mut [&mut [u8]; 4]) {
        let width = filter.width();
        let len = raw.len() / width;
        for plane in &planes[..width] {
            assert_eq!(
                plane.len(),
                len,
                "bytes of a plane of {} raw bytes",
                raw.len()
            );
        }
        let raw = &raw[..len * width];
        let [p0, p1, p2, p3] = planes;
        match filter {
            Filter::None => copy(raw, p0),
            Filter::Planes2 => self.split2::<false>(raw, [p0, p1]),
            Filter::Planes2Rotated => self.split2::<true>(raw, [p0, p1]),
            Filter::Planes4 => self.split4::<false>(raw, [p0, p1, p2, p3]),
            Filter::Planes4Rotated => self.split4::<true>(raw, [p0, p1, p2, p3]),
        }
    }

    /// Does what [`join`](super::join) does.
    ///
    /// # Panics
    /// As there.
    pub fn join(self, filter: Filter, planes: &[&[u8]; 4], raw: &mut [u8]) {
        let width = filter.width();
        let len = raw.len() / width;
        for plane in &planes[..width] {
            assert_eq!(
                plane.len(),
                len,
                "bytes of a plane of {} raw bytes",
                raw.len()
            );
        }
        let raw = &mut raw[..len * width];
        let [p0, p1, ..] = *planes;
        match filter {
            Filter::None => copy(p0, raw),
            Filter::Planes2 => self.join2::<false>([p0, p1], raw),
            Filter::Planes2Rotated => self.join2::<true>([p0, p1], raw),
            Filter::Planes4 => self.join4::<false>(*planes, raw),
            Filter::Planes4Rotated => self.join4::<true>(*planes, raw),
        }
    }

    fn split2<const ROTATED: bool>(self, raw: &[u8], [p0, p1]: [&mut [u8]; 2]) {
        let done = by_isa!(self.0, split2::<ROTATED>(raw, [&mut *p0, &mut *p1]));
        let rest = [&mut p0[done..], &mut p1[done..]];
        portable::split2::<ROTATED>(&raw[2 * done..], rest);
    }

    fn join2<const ROTATED: bool>(self, planes: [&[u8]; 2], raw: &mut [u8]) {
        let done = by_isa!(self.0, join2::<ROTATED>(planes, &mut *raw));
        portable::join2::<ROTATED>(planes.map(|plane| &plane[done..]), &mut raw[2 * done..]);
    }

    fn split4<const ROTATED: bool>(self, raw: &[u8], planes: [&mut [u8]; 4]) {
        let [p0, p1, p2, p3] = planes;
        let whole = [&mut *p0, &mut *p1, &mut *p2, &mut *p3];
        let done = by_isa!(self.0, split4::<ROTATED>(raw, whole));
        let rest = [
            &mut p0[done..],
            &mut p1[done..],
            &mut p2[done..],
            &mut p3[done..],
        ];
        portable::split4::<ROTATED>(&raw[4 * done..], rest);
    }

    fn join4<const ROTATED: bool>(self, planes: [&[u8]; 4], raw: &mut [u8]) {
        let done = by_isa!(self.0, join4::<ROTATED>(planes, &mut *raw));
        portable::join4::<ROTATED>(planes.map(|plane| &plane[done..]), &mut raw[4 * done..]);
    }

    /// The kernel that splits fastest on this CPU.
    pub fn fastest_split(filter: Filter) -> Self {
        static FASTEST: [OnceLock<Kernel>; Filter::ALL.len()] =
            [const { OnceLock::new() }; Filter::ALL.len()];
        *FASTEST[filter as usize].get_or_init(|| {
            let mut trial = None;
            fastest(&candidates(filter), |kernel| {
                let trial = trial.get_or_insert_with(|| Trial::new(filter));
                trial.time_split(kernel)
            })
        })
    }

    /// The kernel that joins fastest on this CPU.
    pub fn fastest_join(filter: Filter) -> Self {
        static FASTEST: [OnceLock<Kernel>; Filter::ALL.len()] =
            [const { OnceLock::new() }; Filter::ALL.len()];
        *FASTEST[filter as usize].get_or_init(|| {
            let mut trial = None;
            fastest(&candidates(filter), |kernel| {
                let trial = trial.get_or_insert_with(|| Trial::new(filter));
                trial.time_join(kernel)
            })
        })
    }
}

/// The kernels that could be the fastest: never the portable one where there is another. Without planes there is nothing to choose.
fn candidates(filter: Filter) -> Vec<Kernel> {
    let mut candidates: Vec<Kernel> = Kernel::available().collect();
    match filter {
        Filter::None => candidates = vec![Kernel::PORTABLE],
        _ if candidates.len() > 1 => candidates.retain(|kernel| *kernel != Kernel::PORTABLE),
        _ => {}
    }
    candidates
}

/// Enough that every kernel has a few rounds to itself, whatever else the machine does, and that the first ones may warm caches and clocks up.
const ROUND_COUNT: usize = 12;

/// The candidate with the shortest time of several rounds. A single one is not timed.
pub(super) fn fastest(candidates: &[Kernel], mut time: impl FnMut(Kernel) -> Duration) -> Kernel {
    let mut times = vec![(Duration::MAX, Kernel::PORTABLE); candidates.len()];
    if let [only] = candidates {
        return *only;
    }
    for _ in 0..ROUND_COUNT {
        for ((shortest, of), kernel) in times.iter_mut().zip(candidates) {
            *shortest = time(*kernel).min(*shortest);
            *of = *kernel;
        }
    }
    let best = times.into_iter().min_by_key(|(time, _)| *time);
    best.map_or(Kernel::PORTABLE, |(_, kernel)| kernel)
}

/// Buffers to time kernels on. They fit into any L2 cache, where the digest leaves a unit for the split.
struct Trial {
    filter: Filter,
    raw: Vec<u8>,
    planes: Vec<u8>,
}

impl Trial {
    const RAW_LEN: usize = 64 * 1024;
    /// In a frame a plane begins behind headers of odd lengths, so that most vectors of it straddle two cache lines.
    const HEADER_LEN: usize = 13;

    fn new(filter: Filter) -> Self {
        Self {
            filter,
            raw: vec![1; Self::RAW_LEN],
            planes: vec![1; Self::RAW_LEN + filter.width() * Self::HEADER_LEN],
        }
    }

    fn time_split(&mut self, kernel: Kernel) -> Duration {
        let plane_len = Self::RAW_LEN / self.filter.width();
        let mut rest = self.planes.as_mut_slice();
        let mut planes: [&mut [u8]; 4] = Default::default();
        for plane in &mut planes[..self.filter.width()] {
            let (before, after) = rest.split_at_mut(Self::HEADER_LEN + plane_len);
            *plane = &mut before[Self::HEADER_LEN..];
            rest = after;
        }
        let start = Instant::now();
        kernel.split(self.filter, black_box(&self.raw), black_box(&mut planes));
        start.elapsed()
    }

    fn time_join(&mut self, kernel: Kernel) -> Duration {
        let plane_len = Self::RAW_LEN / self.filter.width();
        let mut planes: [&[u8]; 4] = Default::default();
        for (plane, framed) in planes
            .iter_mut()
            .zip(self.planes.chunks_exact(Self::HEADER_LEN + plane_len))
        {
            *plane = &framed[Self::HEADER_LEN..];
        }
        let start = Instant::now();
        kernel.join(self.filter, black_box(&planes), black_box(&mut self.raw));
        start.elapsed()
    }
}
