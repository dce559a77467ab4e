//! What every frame of one extent must be, in columns.
//!
//! One table per extent, as an object beside the manifest, which holds its digest. Columns keep it small: about 42 bytes a frame, 11 MB for 8 × 141 GB in
//! chunks of 4 MiB. Offsets follow from the stored lengths, raw lengths from the chunk length; neither is stored, so neither can disagree.

use std::fmt::{self, Write as _};
use std::ops::Range;

use serde::Deserialize;

use super::{
    ExtentRecord, FORMAT, ManifestError, PLANES, TableRecord, check_len, check_version, digest_of,
    ensure, parse, rule,
};
use crate::codec::frame::FRAME_LEN_MIN;
use crate::codec::seek_table::{self, SeekTableError};
use crate::codec::{Digest, Filter, FrameKind, frame_bound};
use crate::plan::Chunks;

/// Most bytes of a frame table, 16 MiB.
pub const TABLE_LEN_MAX: usize = 16 << 20;

/// Most frames in one table, so that it stays below [`TABLE_LEN_MAX`] whatever the frames' lengths are: 390,072.
pub const FRAME_COUNT_MAX: u64 = ((TABLE_LEN_MAX - HEAD_LEN_MAX) / ENTRY_LEN_MAX) as u64;

/// Everything in a table's file but the columns' entries.
const HEAD_LEN_MAX: usize = 4096;
/// Stored length (8 digits, a frame is shorter than 100 MB) and a comma, two letters, one digest.
const ENTRY_LEN_MAX: usize = 9 + 2 + Digest::TEXT_LEN;

const TABLE: &str = "frame table";
const DIGEST_ALGORITHM: &str = "xxh3-128";
const CODEC: &str = "zstd";
/// What `filter` says in a table without the feature [`PLANES`], which has no column `filters`.
const NO_FILTER: &str = "none";

/// The frames of one extent, in the object's order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrameTable {
    /// Length of the extent in bytes.
    pub raw_len: u64,
    /// Bytes of raw data per frame; the last may hold less.
    pub chunk_len: u64,
    /// Each frame's length in the object, in bytes.
    pub stored: Vec<u32>,
    /// How each frame was made.
    pub kinds: Vec<FrameKind>,
    /// What was done to each chunk before compression.
    pub filters: Vec<Filter>,
    /// Digest of each frame's raw bytes.
    pub digests: Vec<Digest>,
}

/// One frame, with everything that follows from its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameEntry {
    /// Which frame, from 0.
    pub index: u64,
    /// Bytes from the object's start to the frame's.
    pub offset: u64,
    /// Length in the object, in bytes.
    pub stored_len: u32,
    /// Length of the chunk in bytes.
    pub raw_len: u32,
    /// How the frame was made.
    pub kind: FrameKind,
    /// What was done to the chunk before compression.
    pub filter: Filter,
    /// Digest of the raw bytes.
    pub digest: Digest,
}

impl FrameEntry {
    /// Where the frame lies in the object.
    pub fn bytes(&self) -> Range<u64> {
        self.offset..self.offset + u64::from(self.stored_len)
    }
}

/// The file's members, in its order.
#[derive(Deserialize)]
struct Columns<'a> {
    digest_algorithm: String,
    codec: String,
    raw_len: u64,
    chunk_len: u64,
    stored: Vec<u32>,
    #[serde(borrow)]
    kinds: &'a str,
    #[serde(borrow)]
    digests: &'a str,
}

/// The member that says what was done to all chunks alike …
#[derive(Deserialize)]
struct OneFilter {
    filter: String,
}

/// … and the one that stands in its place where it differs.
#[derive(Deserialize)]
struct FilterColumn<'a> {
    #[serde(borrow)]
    filters: &'a str,
}

fn field(name: &str) -> String {
    format!("frame table's {name}")
}

impl Columns<'_> {
    /// The columns are of a kind that we know, and as long as the extent asks for.
    fn verify_fit(&self, extent: &ExtentRecord) -> Result<(), ManifestError> {
        for (name, found, known, text) in [
            (
                "digest_algorithm",
                &self.digest_algorithm,
                DIGEST_ALGORITHM,
                "this version knows xxh3-128",
            ),
            ("codec", &self.codec, CODEC, "this version knows zstd"),
        ] {
            ensure(
                found == known,
                || field(name),
                &format_args!("{found:?}"),
                text,
            )?;
        }
        for (name, found, expected) in [
            ("raw_len", self.raw_len, extent.raw_len),
            ("chunk_len", self.chunk_len, extent.chunk_len),
        ] {
            ensure(
                found == expected,
                || field(name),
                &found,
                "the manifest says another one",
            )?;
        }

        let frame_count = extent.frame_count();
        for (name, entry_len, len) in [
            ("stored", 1, self.stored.len()),
            ("kinds", 1, self.kinds.len()),
            ("digests", Digest::TEXT_LEN as u64, self.digests.len()),
        ] {
            ensure(
                frame_count.checked_mul(entry_len) == Some(len as u64),
                || field(name),
                &format_args!("{len} long"),
                "it must have one entry for each chunk of the extent",
            )?;
        }
        Ok(())
    }

    /// Reads the columns' entries.
    fn into_table(self, filters: Vec<Filter>) -> Result<FrameTable, ManifestError> {
        let kinds = letters(
            "kinds",
            self.kinds,
            kind_of,
            "it must be made of the letters z, r and c",
        )?;
        let digests = self
            .digests
            .as_bytes()
            .chunks_exact(Digest::TEXT_LEN)
            .map(|digits| std::str::from_utf8(digits).ok()?.parse().ok())
            .collect::<Option<Vec<Digest>>>()
            .ok_or_else(|| {
                rule(
                    field("digests"),
                    &"unreadable",
                    "it must be made of lower-case hex digits",
                )
            })?;

        Ok(FrameTable {
            raw_len: self.raw_len,
            chunk_len: self.chunk_len,
            stored: self.stored,
            kinds,
            filters,
            digests,
        })
    }
}

impl FrameTable {
    /// A table without frames for an extent of `raw_len` bytes, with room for all of them, so that [`FrameTable::push`] never allocates.
    ///
    /// # Panics
    /// When `chunk_len` is 0.
    pub fn new(raw_len: u64, chunk_len: u64) -> Self {
        // A count that no memory could hold is refused by the manifest's rules long before.
        let frame_count = usize::try_from(raw_len.div_ceil(chunk_len)).unwrap_or(0);
        Self {
            raw_len,
            chunk_len,
            stored: Vec::with_capacity(frame_count),
            kinds: Vec::with_capacity(frame_count),
            filters: Vec::with_capacity(frame_count),
            digests: Vec::with_capacity(frame_count),
        }
    }

    /// The table, still without frames, for an extent of another length. It keeps the room it has, so a table for a GPU's whole memory serves any extent of that GPU.
    #[must_use]
    pub fn for_extent(self, raw_len: u64) -> Self {
        Self { raw_len, ..self }
    }

    /// The table, still without frames, for bytes whose number is known at their end ([`FrameTable::ends_at`]). It is not complete before.
    #[must_use]
    pub fn open_ended(self) -> Self {
        self.for_extent(u64::MAX)
    }

    /// There are so many bytes.
    pub fn ends_at(&mut self, raw_len: u64) {
        self.raw_len = raw_len;
    }

    /// Adds the next frame.
    pub fn push(&mut self, stored_len: u32, kind: FrameKind, filter: Filter, digest: Digest) {
        self.stored.push(stored_len);
        self.kinds.push(kind);
        self.filters.push(filter);
        self.digests.push(digest);
    }

    /// Frames in the table.
    pub fn frame_count(&self) -> usize {
        self.stored.len()
    }

    /// Whether every chunk of the extent has its frame.
    pub fn is_complete(&self) -> bool {
        self.frame_count() as u64 == self.chunks().count()
    }

    /// Whether any frame is behind a filter.
    pub fn has_planes(&self) -> bool {
        self.filters.iter().any(|filter| *filter != Filter::None)
    }

    /// Bytes of all frames, without the seek table.
    pub fn frames_len(&self) -> u64 {
        self.stored.iter().copied().map(u64::from).sum()
    }

    /// Bytes of the object: all frames and the seek table.
    pub fn object_len(&self) -> u64 {
        self.frames_len() + seek_table::encoded_len(self.frame_count() as u64)
    }

    /// Length of the longest frame in bytes; 0 without frames.
    pub fn frame_len_max(&self) -> u32 {
        self.stored.iter().copied().max().unwrap_or(0)
    }

    /// Every frame in order.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = FrameEntry> {
        self.entries_from(0..self.frame_count(), 0)
    }

    /// These frames in order, the first of which is at `offset` of the object, as a [`FetchGroup`](crate::plan::FetchGroup) says.
    ///
    /// # Panics
    /// The iterator does, at a frame that the table does not have.
    pub fn entries_from(
        &self,
        frames: Range<usize>,
        mut offset: u64,
    ) -> impl ExactSizeIterator<Item = FrameEntry> {
        let chunks = self.chunks();
        frames.map(move |at| {
            let index = at as u64;
            let range = chunks.range(index);
            let entry = FrameEntry {
                index,
                offset,
                stored_len: self.stored[at],
                raw_len: u32::try_from(range.end - range.start)
                    .expect("a chunk is at most 64 MiB long"),
                kind: self.kinds[at],
                filter: self.filters[at],
                digest: self.digests[at],
            };
            offset += u64::from(entry.stored_len);
            entry
        })
    }

    /// The seek table that ends the object.
    pub fn seek_table(&self) -> Vec<u8> {
        let frames: Vec<_> = self
            .entries()
            .map(|entry| (entry.stored_len, entry.raw_len))
            .collect();
        seek_table::encode(&frames)
    }

    /// Checks that the seek table at the object's end says the same as this table.
    ///
    /// # Errors
    /// When the bytes are no seek table, or list other frames.
    pub fn check_seek_table(&self, bytes: &[u8]) -> Result<(), SeekTableError> {
        let listed = seek_table::parse(bytes)?;
        let frames = self
            .entries()
            .map(|entry| (entry.stored_len, entry.raw_len));
        if listed.len() != self.frame_count() {
            return Err(SeekTableError::Len { len: bytes.len() });
        }
        let differs = listed
            .into_iter()
            .zip(frames)
            .position(|(listed, frame)| listed != frame);
        differs.map_or(Ok(()), |index| Err(SeekTableError::Entry { index }))
    }

    /// The bytes to store: JSON, one member a line.
    pub fn encode(&self) -> Vec<u8> {
        // Column by column into one buffer of the right size: tables are large, and the plan counts this memory.
        let mut json = String::with_capacity(HEAD_LEN_MAX + self.frame_count() * ENTRY_LEN_MAX);
        self.write_json(&mut json)
            .expect("a String takes whatever is written to it");
        json.into_bytes()
    }

    /// No text here needs escaping: the constants are plain, the columns digits and letters.
    fn write_json(&self, json: &mut String) -> fmt::Result {
        let has_planes = self.has_planes();
        write!(json, "{{\n  \"format\": {FORMAT},\n  \"features\": ")?;
        match has_planes {
            true => writeln!(json, "[\"{PLANES}\"],")?,
            false => writeln!(json, "[],")?,
        }
        writeln!(json, "  \"digest_algorithm\": \"{DIGEST_ALGORITHM}\",")?;
        writeln!(json, "  \"codec\": \"{CODEC}\",")?;
        if !has_planes {
            writeln!(json, "  \"filter\": \"{NO_FILTER}\",")?;
        }
        writeln!(json, "  \"raw_len\": {},", self.raw_len)?;
        writeln!(json, "  \"chunk_len\": {},", self.chunk_len)?;
        json.push_str("  \"stored\": [");
        for (index, stored_len) in self.stored.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(json, "{comma}{stored_len}")?;
        }
        json.push_str("],\n  \"kinds\": \"");
        json.extend(self.kinds.iter().copied().map(letter_of));
        if has_planes {
            json.push_str("\",\n  \"filters\": \"");
            json.extend(self.filters.iter().copied().map(Filter::letter));
        }
        json.push_str("\",\n  \"digests\": \"");
        for digest in &self.digests {
            write!(json, "{digest}")?;
        }
        json.push_str("\"\n}\n");
        Ok(())
    }

    /// What the manifest says about these bytes, once they are stored under `key`.
    pub fn record(bytes: &[u8], key: String) -> TableRecord {
        TableRecord {
            key,
            len: bytes.len() as u64,
            digest: digest_of(bytes),
        }
    }

    /// Reads the bytes that the manifest's `record` names, for the extent that it names them for. Nothing is parsed before the digest of the bytes is right.
    ///
    /// # Errors
    /// When the bytes are too long, damaged, of another format, need an unknown feature, or do not fit the extent and its object exactly.
    pub fn decode_and_verify(
        bytes: &[u8],
        record: &TableRecord,
        extent: &ExtentRecord,
    ) -> Result<FrameTable, ManifestError> {
        check_len(TABLE, bytes.len(), TABLE_LEN_MAX)?;
        let found = digest_of(bytes);
        if found != record.digest {
            return Err(ManifestError::Digest {
                what: TABLE,
                found,
                expected: record.digest,
            });
        }
        ensure(
            bytes.len() as u64 == record.len,
            || field("length"),
            &bytes.len(),
            "the manifest says another one",
        )?;
        let features = check_version(TABLE, bytes)?;
        let columns: Columns<'_> = parse(TABLE, bytes)?;
        columns.verify_fit(extent)?;
        let filters = read_filters(&features, bytes, columns.stored.len())?;
        let table = columns.into_table(filters)?;
        table.verify_lengths(extent)?;
        Ok(table)
    }

    fn verify_lengths(&self, extent: &ExtentRecord) -> Result<(), ManifestError> {
        for entry in self.entries() {
            ensure(
                entry.kind == FrameKind::Zstd || entry.filter == Filter::None,
                || format!("frame table's filters[{}]", entry.index),
                &entry.filter.letter(),
                "only a compressed frame may be behind a filter",
            )?;
            ensure(
                entry.stored_len >= FRAME_LEN_MIN
                    && entry.stored_len as usize <= frame_bound(entry.raw_len as usize),
                || format!("frame table's stored[{}]", entry.index),
                &entry.stored_len,
                "no frame of its chunk has this length",
            )?;
        }
        ensure(
            self.object_len() == extent.object.len,
            || "frame table's stored".to_owned(),
            &format_args!("{} in sum", self.frames_len()),
            "with the seek table it must be the object's length",
        )
    }

    fn chunks(&self) -> Chunks {
        Chunks::new(self.raw_len, self.chunk_len)
    }
}

/// What was done to each of so many chunks.
fn read_filters(
    features: &[String],
    bytes: &[u8],
    frame_count: usize,
) -> Result<Vec<Filter>, ManifestError> {
    if features.iter().any(|name| name == PLANES) {
        let FilterColumn { filters } = parse(TABLE, bytes)?;
        ensure(
            filters.len() == frame_count,
            || field("filters"),
            &format_args!("{} long", filters.len()),
            "it must have one entry for each chunk of the extent",
        )?;
        return letters(
            "filters",
            filters,
            Filter::from_letter,
            "it must be made of the letters b, B, d and D, and of -",
        );
    }
    let OneFilter { filter } = parse(TABLE, bytes)?;
    ensure(
        filter == NO_FILTER,
        || field("filter"),
        &format_args!("{filter:?}"),
        "without the feature \"planes\" there is none",
    )?;
    Ok(vec![Filter::None; frame_count])
}

/// A column of letters, each of which stands for something.
fn letters<T>(
    name: &str,
    column: &str,
    meaning: impl Fn(char) -> Option<T>,
    rule_text: &'static str,
) -> Result<Vec<T>, ManifestError> {
    let read: Option<Vec<T>> = column.chars().map(meaning).collect();
    read.ok_or_else(|| rule(field(name), &"unreadable", rule_text))
}

fn letter_of(kind: FrameKind) -> char {
    match kind {
        FrameKind::Zero => 'z',
        FrameKind::Raw => 'r',
        FrameKind::Zstd => 'c',
    }
}

fn kind_of(letter: char) -> Option<FrameKind> {
    match letter {
        'z' => Some(FrameKind::Zero),
        'r' => Some(FrameKind::Raw),
        'c' => Some(FrameKind::Zstd),
        _ => None,
    }
}
