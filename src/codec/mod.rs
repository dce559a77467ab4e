//! Chunk to frame and back: one file per transformation, both directions in it.
//!
//! Out: a chunk's raw bytes become one self-contained zstd frame ([`frame`]), perhaps behind a filter ([`planes`]) and with Huffman codes of our own (`huffman`), chosen by a
//! sample (`sample`) and by what a byte less is worth ([`effort`]); with it go a [`Digest`] of the raw bytes ([`digest`]) and the store's checksum of the frame ([`checksum`]).
//! The frames' lengths become the seekable format's table at the object's end ([`seek_table`]). Back: the same files.
//! What can fail: only the way back; a frame is refused before anything is allocated for it when it is not what the frame table promised.

pub mod checksum;
pub mod crc32;
pub mod digest;
pub mod effort;
pub mod frame;
pub mod huffman;
pub mod planes;
pub mod raw_frame;
mod sample;
#[cfg(test)]
pub(crate) mod sample_data;
pub mod seek_table;
pub mod zeros;

pub use checksum::Crc64;
pub use crc32::{Crc32, Crc32Kind};
pub use digest::Digest;
pub use effort::Effort;
pub use frame::{
    Body, Decoder, DecoderError, Encoded, Encoder, EncoderError, FilterChoice, FrameError,
    FrameKind, Level, PlaneCoder, Settings, frame_bound,
};
pub use planes::Filter;
pub use raw_frame::RawFrame;
