//! Chunk to frame and back: one file per transformation, both directions in it.
//!
//! Out: a chunk's raw bytes become one self-contained zstd frame ([`frame`]) and a [`Digest`] of the raw bytes ([`digest`]); the frames' lengths become the
//! seekable format's table at the object's end ([`seek_table`]); the stored bytes get the store's checksum ([`checksum`]). Back: the same files.
//! What can fail: only the way back; a frame is refused before anything is allocated for it when it is not what the frame table promised.

pub mod checksum;
pub mod digest;
pub mod frame;
pub mod raw_frame;
#[cfg(test)]
pub(crate) mod sample_data;
pub mod seek_table;

pub use checksum::Crc64;
pub use digest::Digest;
pub use frame::{
    Decoder, DecoderError, Encoded, Encoder, Filter, FrameError, FrameKind, Level, frame_bound,
};
pub use raw_frame::RawFrame;
