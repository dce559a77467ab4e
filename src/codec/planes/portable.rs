//! The kernel that every CPU can run and that says what the others have to do. In: elements or planes of any length. Out: all of them. No unsafe code.

const fn rotation(rotated: bool) -> u32 {
    if rotated { 1 } else { 0 }
}

pub(super) fn split2<const ROTATED: bool>(raw: &[u8], [low, high]: [&mut [u8]; 2]) {
    let elements = raw.as_chunks::<2>().0;
    for ((element, low), high) in elements.iter().zip(low).zip(high) {
        let element = u16::from_le_bytes(*element).rotate_left(rotation(ROTATED));
        [*low, *high] = element.to_le_bytes();
    }
}

pub(super) fn join2<const ROTATED: bool>([low, high]: [&[u8]; 2], raw: &mut [u8]) {
    let elements = raw.as_chunks_mut::<2>().0;
    for ((element, low), high) in elements.iter_mut().zip(low).zip(high) {
        let rotated = u16::from_le_bytes([*low, *high]);
        *element = rotated.rotate_right(rotation(ROTATED)).to_le_bytes();
    }
}

pub(super) fn split4<const ROTATED: bool>(raw: &[u8], planes: [&mut [u8]; 4]) {
    let [p0, p1, p2, p3] = planes;
    let elements = raw.as_chunks::<4>().0;
    for ((((element, p0), p1), p2), p3) in elements.iter().zip(p0).zip(p1).zip(p2).zip(p3) {
        let element = u32::from_le_bytes(*element).rotate_left(rotation(ROTATED));
        [*p0, *p1, *p2, *p3] = element.to_le_bytes();
    }
}

pub(super) fn join4<const ROTATED: bool>([p0, p1, p2, p3]: [&[u8]; 4], raw: &mut [u8]) {
    let elements = raw.as_chunks_mut::<4>().0;
    for ((((element, p0), p1), p2), p3) in elements.iter_mut().zip(p0).zip(p1).zip(p2).zip(p3) {
        let rotated = u32::from_le_bytes([*p0, *p1, *p2, *p3]);
        *element = rotated.rotate_right(rotation(ROTATED)).to_le_bytes();
    }
}
