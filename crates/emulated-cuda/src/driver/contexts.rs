//! Primary contexts: one per GPU, counted.

use std::sync::{Arc, MutexGuard};

use super::{CONTEXT_TAG, Context, Driver, Model, context_handle};
use crate::codes::{Answer, Code};
use crate::stream::Stream;

impl Driver {
    /// Takes a reference to the primary context and gives its handle.
    pub(crate) fn retain_context(&self, ordinal: usize) -> u64 {
        let mut model = self.model();
        let gpu = &mut model.gpus[ordinal];
        if let Some(context) = &mut gpu.context {
            context.retained += 1;
        } else {
            let make = |flags| Stream::new(self.next_id(), ordinal, flags, 0);
            let context = Context {
                retained: 1,
                flags: 0,
                legacy: make(0),
                per_thread: make(0),
            };
            let streams = [
                Arc::downgrade(&context.legacy),
                Arc::downgrade(&context.per_thread),
            ];
            gpu.generation += 1;
            gpu.context = Some(context);
            model.workers.extend(streams);
            model.publish(ordinal);
        }
        context_handle(ordinal, model.gpus[ordinal].generation)
    }

    /// Gives a reference back; with the last one everything of the context goes: memory, streams, extents mapped here.
    pub(crate) fn release_context(&self, ordinal: usize) -> Answer {
        let mut model = self.model();
        let context = model.gpus[ordinal]
            .context
            .as_mut()
            .ok_or(Code::INVALID_CONTEXT)?;
        context.retained -= 1;
        if context.retained == 0 {
            self.destroy_context(model, ordinal)
        } else {
            Ok(())
        }
    }

    /// Destroys the primary context however often it is retained.
    pub(crate) fn reset_context(&self, ordinal: usize) -> Answer {
        let model = self.model();
        if model.gpus[ordinal].context.is_some() {
            self.destroy_context(model, ordinal)
        } else {
            Ok(())
        }
    }

    fn destroy_context(&self, model: MutexGuard<'_, Model>, ordinal: usize) -> Answer {
        drop(model);
        self.synchronize_device(ordinal)?;
        let mut model = self.model();
        if let Some(context) = model.gpus[ordinal].context.take() {
            context.legacy.close();
            context.per_thread.close();
        }
        model.streams.retain(|_, stream| {
            let stays = stream.ordinal != ordinal;
            if !stays {
                stream.close();
            }
            stays
        });
        let gpu = &mut model.gpus[ordinal];
        gpu.space.clear();
        gpu.backing = None;
        gpu.host_copy = None;
        model.extents.drop_device(ordinal);
        model.publish(ordinal);
        Ok(())
    }

    /// Whether the primary context exists, and its flags.
    pub(crate) fn context_state(&self, ordinal: usize) -> (bool, u32) {
        let model = self.model();
        let context = model.gpus[ordinal].context.as_ref();
        (context.is_some(), context.map_or(0, |c| c.flags))
    }

    /// Sets the flags of an existing primary context; nothing here depends on them.
    pub(crate) fn set_context_flags(&self, ordinal: usize, flags: u32) {
        if let Some(context) = &mut self.model().gpus[ordinal].context {
            context.flags = flags;
        }
    }

    /// The handle of a GPU's primary context, if it exists.
    pub(crate) fn context_of(&self, ordinal: usize) -> Option<u64> {
        let model = self.model();
        let gpu = &model.gpus[ordinal];
        gpu.context
            .as_ref()
            .map(|_| context_handle(ordinal, gpu.generation))
    }

    /// The GPU of a context handle, whether or not the context still exists.
    ///
    /// # Errors
    /// `INVALID_CONTEXT` for a number that was never a context.
    pub(crate) fn context_gpu(&self, handle: u64) -> Answer<usize> {
        let ordinal = usize::try_from(handle & 0xff).unwrap_or(usize::MAX);
        if handle & !0xffff_ffff_ffff == CONTEXT_TAG && ordinal < self.config.gpus.len() {
            Ok(ordinal)
        } else {
            Err(Code::INVALID_CONTEXT)
        }
    }

    /// The GPU of a context that exists.
    ///
    /// # Errors
    /// As [`Self::context_gpu`], and `CONTEXT_IS_DESTROYED`.
    pub(crate) fn context_ordinal(&self, handle: u64) -> Answer<usize> {
        let ordinal = self.context_gpu(handle)?;
        if self.context_of(ordinal) == Some(handle) {
            Ok(ordinal)
        } else {
            Err(Code::CONTEXT_IS_DESTROYED)
        }
    }
}
