use proptest::prelude::*;

use super::*;

/// What stands around every buffer, and must stay.
const GUARD: u8 = 0xA5;
const GUARD_LEN: usize = 96;

/// A buffer that starts `shift` bytes off where the allocator would put it, with guards on both sides.
struct Guarded {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Guarded {
    fn new(shift: usize, len: usize) -> Self {
        let start = GUARD_LEN + shift;
        Self {
            bytes: vec![GUARD; start + len + GUARD_LEN],
            start,
            len,
        }
    }

    fn holding(shift: usize, content: &[u8]) -> Self {
        let mut guarded = Self::new(shift, content.len());
        guarded.inner_mut().copy_from_slice(content);
        guarded
    }

    fn inner(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    fn inner_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    fn assert_guards_stand(&self, what: &str) {
        let (before, rest) = self.bytes.split_at(self.start);
        let after = &rest[self.len..];
        let touched = before.iter().chain(after).any(|byte| *byte != GUARD);
        assert!(!touched, "{what} wrote outside its buffer");
    }
}

/// Element by element, from the definition.
fn expected_planes(filter: Filter, raw: &[u8]) -> Vec<Vec<u8>> {
    let width = filter.width();
    let mut planes = vec![Vec::new(); width];
    for element in raw.chunks_exact(width) {
        for (place, plane) in planes.iter_mut().enumerate() {
            let below = element[(place + width - 1) % width];
            let byte = if filter.is_rotated() {
                element[place] << 1 | below >> 7
            } else {
                element[place]
            };
            plane.push(byte);
        }
    }
    planes
}

fn assert_both_ways(kernel: Kernel, filter: Filter, raw: &[u8], shifts: [usize; 5]) {
    let what = format!("{kernel} {filter:?} of {} bytes at {shifts:?}", raw.len());
    let width = filter.width();
    let expected = expected_planes(filter, raw);

    let source = Guarded::holding(shifts[4], raw);
    let mut planes: Vec<Guarded> = (0..4)
        .map(|index| {
            let used = if index < width { raw.len() / width } else { 7 };
            Guarded::new(shifts[index], used)
        })
        .collect();
    {
        let [p0, p1, p2, p3] = planes.as_mut_slice() else {
            unreachable!("there are four");
        };
        let mut slices = [
            p0.inner_mut(),
            p1.inner_mut(),
            p2.inner_mut(),
            p3.inner_mut(),
        ];
        kernel.split(filter, source.inner(), &mut slices);
    }
    for (index, plane) in planes.iter().enumerate() {
        plane.assert_guards_stand(&format!("split of {what}"));
        match expected.get(index) {
            Some(expected) => assert!(plane.inner() == expected, "plane {index} of {what}"),
            None => assert_eq!(plane.inner(), [GUARD; 7], "plane {index} of {what}"),
        }
    }

    let mut joined = Guarded::new(shifts[4], raw.len());
    let [p0, p1, p2, p3] = planes.as_slice() else {
        unreachable!("there are four");
    };
    let slices = [p0.inner(), p1.inner(), p2.inner(), p3.inner()];
    kernel.join(filter, &slices, joined.inner_mut());
    joined.assert_guards_stand(&format!("join of {what}"));
    let (elements, tail) = joined.inner().split_at(raw.len() / width * width);
    assert!(elements == &raw[..elements.len()], "join of {what}");
    let untouched = tail.iter().all(|byte| *byte == GUARD);
    assert!(untouched, "join of {what} wrote to the tail");
}

/// Every byte value at every place, and no two neighbours alike.
fn ramp(len: usize) -> Vec<u8> {
    (0..len)
        .map(|index| (index.wrapping_mul(167) ^ (index >> 8)).to_le_bytes()[0])
        .collect()
}

#[test]
#[expect(
    clippy::print_stdout,
    reason = "what this CPU could not run must be seen"
)]
fn every_kernel_of_this_cpu_does_what_the_definition_says() {
    let ran: Vec<Kernel> = Kernel::available().collect();
    let missing: Vec<String> = Kernel::missing().collect();
    println!("planes: compared {ran:?}; skipped, as this CPU lacks them: {missing:?}");
    assert_eq!(ran.last(), Some(&Kernel::PORTABLE));
    for kernel in ran {
        for filter in Filter::ALL {
            // All lengths around whole groups of every kernel, and all alignments.
            for len in (0..=600).step_by(if cfg!(miri) { 101 } else { 1 }) {
                let shift = len % 64;
                let shifts = [shift, 63 - shift, 1, 0, shift];
                assert_both_ways(kernel, filter, &ramp(len), shifts);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 256 }))]

    #[test]
    fn every_kernel_agrees_on_any_bytes(
        raw in prop::collection::vec(any::<u8>(), 0..5000),
        shifts in prop::array::uniform5(0usize..64),
        filter in prop::sample::select(Filter::ALL.as_slice()),
    ) {
        for kernel in Kernel::available() {
            assert_both_ways(kernel, filter, &raw, shifts);
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes minutes")]
fn a_whole_unit_goes_there_and_back_by_whatever_is_fastest() {
    for filter in Filter::ALL {
        let raw = ramp(filter.unit_len());
        let mut planes = vec![vec![GUARD; PLANE_LEN]; 4];
        {
            let [p0, p1, p2, p3] = planes.as_mut_slice() else {
                unreachable!("there are four");
            };
            split(filter, &raw, &mut [p0, p1, p2, p3]);
        }
        for (plane, expected) in planes.iter().zip(expected_planes(filter, &raw)) {
            assert!(*plane == expected, "{filter:?}");
        }
        let mut joined = vec![GUARD; raw.len()];
        let [p0, p1, p2, p3] = planes.as_slice() else {
            unreachable!("there are four");
        };
        join(filter, &[p0, p1, p2, p3], &mut joined);
        assert!(joined == raw, "{filter:?}");
    }
}

#[test]
#[expect(
    clippy::unusual_byte_groupings,
    reason = "sign, exponent and mantissa apart"
)]
fn rotation_gathers_a_float_s_exponent() {
    let bf16 = 0b1_10000110_0101010_u16.to_le_bytes();
    let fp32 = (-1.5f32).to_le_bytes();
    for kernel in Kernel::available() {
        let mut planes = [[0]; 2];
        let [p0, p1] = planes.each_mut();
        kernel.split(
            Filter::Planes2Rotated,
            &bf16,
            &mut [p0, p1, &mut [], &mut []],
        );
        assert_eq!(planes, [[0b0101010_1], [0b10000110]]);

        let mut planes = [[0]; 4];
        let slices = &mut planes.each_mut().map(|plane| plane.as_mut_slice());
        kernel.split(Filter::Planes4Rotated, &fp32, slices);
        assert_eq!(planes, [[1], [0], [0b1000000_0], [0b01111111]]);
    }
}

#[test]
fn every_letter_is_one_filter_s() {
    for filter in Filter::ALL {
        assert_eq!(Filter::from_letter(filter.letter()), Some(filter));
    }
    assert_eq!(Filter::from_letter('x'), None);
    for (index, filter) in Filter::ALL.into_iter().enumerate() {
        assert_eq!(filter as usize, index);
    }
}

#[test]
#[should_panic(expected = "bytes of a plane of 9 raw bytes")]
fn a_plane_of_another_length_is_refused() {
    let mut planes = [[0u8; 4], [0; 4], [0; 4], [0; 4]];
    let [p0, p1, p2, p3] = planes.each_mut();
    let short = &mut p1[..3];
    split(Filter::Planes2, &[0; 9], &mut [p0, short, p2, p3]);
}

#[test]
fn the_fastest_kernel_is_the_one_with_the_shortest_time() {
    use std::time::Duration;

    let kernels: Vec<Kernel> = Kernel::available().collect();
    for wanted in &kernels {
        let mut call_count = 0;
        let found = kernel::fastest(&kernels, |kernel| {
            let round = call_count / kernels.len();
            call_count += 1;
            // Held up in all rounds but one, which says nothing about the kernel.
            Duration::from_micros(match kernel == *wanted {
                true if round == 5 => 5,
                true => 7,
                false => 6,
            })
        });
        assert_eq!(found, *wanted);
    }
    let never = |_| -> Duration { panic!("there is nothing to compare") };
    assert_eq!(
        kernel::fastest(&[Kernel::PORTABLE], never),
        Kernel::PORTABLE
    );
}
