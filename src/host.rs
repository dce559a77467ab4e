//! The host memory of a process tree, and everything else of it that is not on a GPU: CRIU's images, as streams.
//!
//! In, at a save: a stopped tree's images, file by file, each through a pipe that CRIU writes. Out: chunks for the pipeline, and the list of what lies where in them. The other way, CRIU asks for the files by name and reads
//! each from a pipe. No image file ever lies on a disk. What can fail: CRIU ([`CriuError`]), what is said on its socket ([`StreamError`]).
//!
//! CRIU's plugin for CUDA is not used: the driver is called by us, before the dump and after the restore.

mod capture;
mod criu;
mod dir;
pub mod namespace;
mod serve;
mod ties;
mod tree;
mod wanted;
mod watch;
mod wire;

pub use capture::Capture;
pub use criu::{Criu, CriuError, CriuRun, DumpRoot};
pub use dir::ImagesDir;
pub use serve::{FileSource, Serving, WriteError};
pub use ties::{Tied, must_stand_alone};
pub use tree::ProcessTree;
pub use wanted::{Differing, cut, must_be_as_wanted, wanted_by};
pub use watch::Watch;
pub use wire::StreamError;

/// The socket that CRIU connects to when it dumps into a stream, in its images directory.
const CAPTURE_SOCKET: &str = "streamer-capture.sock";
/// The same when it restores from one.
const SERVE_SOCKET: &str = "streamer-serve.sock";
