//! Operations of this process on others, by handle.

use super::Driver;
use crate::codes::{Answer, Code};
use crate::extent::Operation;
use crate::stream::Capture;

impl Driver {
    /// The pid that an operation is about: the one of this handle, or of any operation under way.
    pub(crate) fn operation_pid(&self, handle: Option<u64>) -> Option<i32> {
        let model = self.model();
        match handle {
            Some(handle) => model.extents.operation(handle).map(|o| o.pid),
            None => model.extents.any_operation().map(|o| o.pid),
        }
    }

    /// Takes an operation out of the table to complete it.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a handle that names none (any more); `STREAM_CAPTURE_UNSUPPORTED`, leaving it in the table, if a stream captures.
    pub(crate) fn take_operation(&self, handle: u64) -> Answer<Operation> {
        let mut model = self.model();
        let streams = model.extents.streams(handle).ok_or(Code::INVALID_VALUE)?;
        if streams.iter().any(|s| s.capture() != Capture::None) {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        model
            .extents
            .take_operation(handle)
            .ok_or(Code::INVALID_VALUE)
    }

    /// Drops what an operation had here, after it was completed.
    pub(crate) fn forget_operation(&self, operation: &Operation) {
        let mut model = self.model();
        for stream in &operation.streams {
            stream.close();
            model.streams.remove(&stream.id);
        }
        model.extents.drop_operation(operation);
    }
}
