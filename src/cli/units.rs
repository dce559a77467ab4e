//! Numbers as people read them, in one place.

use bytesize::ByteSize;

/// Bytes with a binary unit: `412.3 MiB`.
pub(super) fn size(bytes: u64) -> String {
    ByteSize::b(bytes).display().iec().to_string()
}

/// Raw to stored, as a factor: `2.48`; nothing stored has none.
pub(super) fn ratio(raw: u64, stored: u64) -> String {
    if stored == 0 {
        "-".to_owned()
    } else {
        format!("{:.2}", float(raw) / float(stored))
    }
}

/// Both sizes of an image or a part of it: `4.0 GiB raw, 2.0 GiB stored, ratio 2.00`.
pub(super) fn sizes(raw: u64, stored: u64) -> String {
    let (raw_size, stored_size) = (size(raw), size(stored));
    let ratio = ratio(raw, stored);
    format!("{raw_size} raw, {stored_size} stored, ratio {ratio}")
}

/// A count for arithmetic that may round: rates and shares, never offsets.
#[expect(
    clippy::cast_precision_loss,
    reason = "rates are shown with three digits"
)]
pub(super) fn float(count: u64) -> f64 {
    count as f64
}

/// A rate as a whole number; anything that is none is 0.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the cast saturates, and a rate beyond u64 is shown as its largest value"
)]
pub(super) fn whole(rate: f64) -> u64 {
    rate as u64
}
