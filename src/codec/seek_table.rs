//! The table that ends every data object, in zstd's seekable format.
//!
//! In: each frame's stored and raw length. Out: one skippable frame that any zstd passes over and a seekable-format reader finds from the object's end.
//! ```text
//! magic 0x184D2A5E | frame length | { stored length | raw length } per frame | frame count | descriptor 0 | magic 0x8F92EAB1
//! ```
//! All numbers are 32 bits, little-endian; the descriptor is one byte, 0 for "no checksums in the entries". What can fail: only reading.
//! A restore never trusts this table: it reads the manifest's frame table and checks that both agree.

const SKIPPABLE_MAGIC: u32 = 0x184D_2A5E;
const SEEKABLE_MAGIC: u32 = 0x8F92_EAB1;
const HEADER_LEN: usize = 8;
const ENTRY_LEN: usize = 8;
const FOOTER_LEN: usize = 9;

/// Most frames that the seekable format allows in one object.
pub const FRAME_COUNT_MAX: u32 = 0x0800_0000;

/// Length in bytes of the table over so many frames.
pub fn encoded_len(frame_count: u64) -> u64 {
    frame_count
        .saturating_mul(ENTRY_LEN as u64)
        .saturating_add((HEADER_LEN + FOOTER_LEN) as u64)
}

/// The table over these frames: `(stored length, raw length)` in bytes, in the object's order.
///
/// # Panics
/// With more than [`FRAME_COUNT_MAX`] frames; the plan and the manifest's caps stay far below.
pub fn encode(frames: &[(u32, u32)]) -> Vec<u8> {
    let frame_count = u32::try_from(frames.len())
        .ok()
        .filter(|count| *count <= FRAME_COUNT_MAX)
        .expect("the plan allows no more frames than a seek table holds");
    let content_len = frames.len() * ENTRY_LEN + FOOTER_LEN;
    let mut table = Vec::with_capacity(HEADER_LEN + content_len);
    let content_len = u32::try_from(content_len).expect("so many entries take less than 2 GiB");
    table.extend_from_slice(&SKIPPABLE_MAGIC.to_le_bytes());
    table.extend_from_slice(&content_len.to_le_bytes());
    for (stored_len, raw_len) in frames {
        table.extend_from_slice(&stored_len.to_le_bytes());
        table.extend_from_slice(&raw_len.to_le_bytes());
    }
    table.extend_from_slice(&frame_count.to_le_bytes());
    table.push(0);
    table.extend_from_slice(&SEEKABLE_MAGIC.to_le_bytes());
    table
}

/// The bytes at an object's end are not the seek table that we write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SeekTableError {
    /// No room for header and footer, or not whole entries.
    #[error(
        "seek table of {len} bytes; expected {HEADER_LEN} + {FOOTER_LEN} and {ENTRY_LEN} per frame"
    )]
    Len {
        /// Bytes given.
        len: usize,
    },
    /// One of the fixed fields differs.
    #[error("seek table's {field} is {found:#x}; expected {expected:#x}")]
    Field {
        /// Which field.
        field: &'static str,
        /// What stands there.
        found: u32,
        /// What must stand there.
        expected: u32,
    },
    /// The table lists another frame than the frame table does.
    #[error("seek table's entry {index} differs from the frame table's")]
    Entry {
        /// Which entry, from 0.
        index: usize,
    },
}

/// Reads the table that [`encode`] wrote, given exactly its bytes.
///
/// # Errors
/// When a magic number, a length, the frame count or the descriptor is not what these bytes need. Never [`SeekTableError::Entry`].
pub fn parse(table: &[u8]) -> Result<Vec<(u32, u32)>, SeekTableError> {
    let bad_len = SeekTableError::Len { len: table.len() };
    let (header, rest) = table.split_first_chunk::<HEADER_LEN>().ok_or(bad_len)?;
    let (entries, footer) = rest.split_last_chunk::<FOOTER_LEN>().ok_or(bad_len)?;
    let (entries, rest) = entries.as_chunks::<ENTRY_LEN>();
    let content_len = u32::try_from(table.len() - HEADER_LEN).map_err(|_too_long| bad_len)?;
    let frame_count = u32::try_from(entries.len()).map_err(|_too_many| bad_len)?;
    if !rest.is_empty() || frame_count > FRAME_COUNT_MAX {
        return Err(bad_len);
    }

    let (skippable_magic, stated_len) = two_u32(*header);
    let [count @ .., descriptor, m0, m1, m2, m3] = *footer;
    let fixed = [
        ("skippable magic", skippable_magic, SKIPPABLE_MAGIC),
        ("frame length", stated_len, content_len),
        ("frame count", u32::from_le_bytes(count), frame_count),
        ("descriptor", u32::from(descriptor), 0),
        (
            "footer magic",
            u32::from_le_bytes([m0, m1, m2, m3]),
            SEEKABLE_MAGIC,
        ),
    ];
    for (field, found, expected) in fixed {
        if found != expected {
            return Err(SeekTableError::Field {
                field,
                found,
                expected,
            });
        }
    }
    Ok(entries.iter().copied().map(two_u32).collect())
}

fn two_u32(bytes: [u8; 8]) -> (u32, u32) {
    let [a0, a1, a2, a3, b0, b1, b2, b3] = bytes;
    (
        u32::from_le_bytes([a0, a1, a2, a3]),
        u32::from_le_bytes([b0, b1, b2, b3]),
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn bytes_of_a_small_table() {
        let table = encode(&[(142, 4_194_304)]);
        let expected = [
            0x5e, 0x2a, 0x4d, 0x18, 17, 0, 0, 0, // skippable frame of 17 bytes
            142, 0, 0, 0, 0, 0, 0x40, 0, // the entry
            1, 0, 0, 0, 0, 0xb1, 0xea, 0x92, 0x8f, // one frame, no checksums, magic
        ];
        assert_eq!(table, expected);
        assert_eq!(encoded_len(1), expected.len() as u64);
    }

    #[test]
    fn a_stock_decoder_passes_over_it() {
        let table = encode(&[(1, 2), (3, 4)]);
        assert_eq!(zstd::decode_all(table.as_slice()).unwrap(), b"");
    }

    proptest! {
        #[test]
        fn round_trip(frames in proptest::collection::vec(any::<(u32, u32)>(), 0..50)) {
            let table = encode(&frames);
            prop_assert_eq!(table.len() as u64, encoded_len(frames.len() as u64));
            prop_assert_eq!(parse(&table), Ok(frames));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn damage_outside_the_entries_is_refused(frames in proptest::collection::vec(any::<(u32, u32)>(), 0..5), at in any::<proptest::sample::Index>(), flip in 1..=255u8) {
            let mut table = encode(&frames);
            let at = at.index(table.len());
            table[at] ^= flip;
            let in_entries = (HEADER_LEN..table.len() - FOOTER_LEN).contains(&at);
            prop_assert_eq!(parse(&table).is_ok(), in_entries);
        }
    }
}
