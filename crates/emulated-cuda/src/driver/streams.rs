//! Streams, events and captured graphs by handle, and the order between streams.

use std::sync::{Arc, Weak};
use std::time::Instant;

use super::{DISABLE_TIMING, Driver, EVENT_TAG, Event, GRAPH_TAG, NON_BLOCKING, STREAM_TAG, untag};
use crate::codes::{Answer, Code};
use crate::stream::{self, Mark, Place, Stream};
use crate::trace;
use crate::work::Work;

impl Driver {
    pub(crate) fn create_stream(&self, ordinal: usize, flags: u32, priority: i32) -> Arc<Stream> {
        let stream = Stream::new(self.next_id(), ordinal, flags, priority);
        let mut model = self.model();
        model.workers.retain(|s| s.strong_count() > 0);
        model.workers.push(Arc::downgrade(&stream));
        model.streams.insert(stream.id, Arc::clone(&stream));
        stream
    }

    /// The stream of a handle; the handles 0 and 1 are the legacy default stream and 2 the per-thread one of the context `ordinal`.
    pub(crate) fn stream(&self, handle: u64, ordinal: Answer<usize>) -> Answer<Arc<Stream>> {
        let model = self.model();
        if handle > 2 {
            let id = untag(handle, STREAM_TAG).ok_or(Code::INVALID_HANDLE)?;
            return model.streams.get(&id).cloned().ok_or(Code::INVALID_HANDLE);
        }
        let context = model.gpus[ordinal?]
            .context
            .as_ref()
            .ok_or(Code::INVALID_CONTEXT)?;
        Ok(Arc::clone(if handle == 2 {
            &context.per_thread
        } else {
            &context.legacy
        }))
    }

    /// Gives a stream up; what is enqueued is still carried out.
    ///
    /// # Errors
    /// `INVALID_HANDLE`, also for a stream that belongs to an operation under way.
    pub(crate) fn destroy_stream(&self, handle: u64) -> Answer {
        let id = untag(handle, STREAM_TAG).ok_or(Code::INVALID_HANDLE)?;
        let mut model = self.model();
        if model.extents.has_stream(id) {
            return Err(Code::INVALID_HANDLE);
        }
        model
            .streams
            .remove(&id)
            .ok_or(Code::INVALID_HANDLE)?
            .close();
        Ok(())
    }

    /// Puts work on a stream, behind what CUDA's rules for the default stream put before it.
    pub(crate) fn enqueue(
        &self,
        stream: &Arc<Stream>,
        work: Work,
        mut after: Vec<Place>,
        copy: Option<trace::Copy>,
    ) -> Answer<Place> {
        let link = match &work {
            Work::ToHost { .. } => Some(Arc::clone(&self.links[stream.ordinal].to_host)),
            Work::ToDevice { .. } => Some(Arc::clone(&self.links[stream.ordinal].to_device)),
            _ => None,
        };
        // The lock is held until the work has its place, so that two streams agree on what came first.
        let model = self.model();
        if let Some(context) = &model.gpus[stream.ordinal].context
            && stream.flags & NON_BLOCKING == 0
        {
            if Arc::ptr_eq(stream, &context.legacy) {
                let others = model
                    .streams
                    .values()
                    .filter(|s| s.ordinal == stream.ordinal && s.flags & NON_BLOCKING == 0);
                after.extend(others.map(Stream::place));
                after.push(context.per_thread.place());
            } else {
                after.push(context.legacy.place());
            }
        }
        after.retain(|place| !place.is_passed());
        stream.enqueue(stream::Operation {
            work,
            after,
            link,
            trace: copy,
        })
    }

    /// Waits for everything on one GPU's streams and gives the first error among them.
    pub(crate) fn synchronize_device(&self, ordinal: usize) -> Answer {
        let streams = self.live_streams();
        streams
            .iter()
            .filter(|s| s.ordinal == ordinal)
            .map(|s| s.synchronize())
            .fold(Ok(()), Answer::and)
    }

    /// Waits for everything on all streams; false if that takes past the deadline.
    pub(crate) fn drain(&self, deadline: Option<Instant>) -> bool {
        self.live_streams()
            .iter()
            .all(|stream| stream.wait(stream.place().seq, deadline))
    }

    fn live_streams(&self) -> Vec<Arc<Stream>> {
        self.model()
            .workers
            .iter()
            .filter_map(Weak::upgrade)
            .collect()
    }

    pub(crate) fn create_event(&self, flags: u32) -> u64 {
        let id = self.next_id();
        self.model().events.insert(
            id,
            Event {
                flags,
                recorded: None,
            },
        );
        EVENT_TAG | id
    }

    pub(crate) fn destroy_event(&self, handle: u64) -> Answer {
        let id = untag(handle, EVENT_TAG).ok_or(Code::INVALID_HANDLE)?;
        self.model()
            .events
            .remove(&id)
            .map(drop)
            .ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn record_event(&self, handle: u64, stream: &Arc<Stream>) -> Answer {
        let id = untag(handle, EVENT_TAG).ok_or(Code::INVALID_HANDLE)?;
        if !self.model().events.contains_key(&id) {
            return Err(Code::INVALID_HANDLE);
        }
        let mark = Mark::new();
        let place = self.enqueue(stream, Work::Mark(Arc::clone(&mark)), Vec::new(), None)?;
        if let Some(event) = self.model().events.get_mut(&id) {
            event.recorded = Some((mark, place));
        }
        Ok(())
    }

    /// The place of an event's last record; none if it was never recorded.
    pub(crate) fn event_place(&self, handle: u64) -> Answer<Option<Place>> {
        let id = untag(handle, EVENT_TAG).ok_or(Code::INVALID_HANDLE)?;
        let model = self.model();
        let event = model.events.get(&id).ok_or(Code::INVALID_HANDLE)?;
        Ok(event.recorded.as_ref().map(|(_, place)| place.clone()))
    }

    /// When an event was passed.
    ///
    /// # Errors
    /// `INVALID_HANDLE` for one that was never recorded or takes no time; `NOT_READY` for one that is still to come.
    pub(crate) fn event_time(&self, handle: u64) -> Answer<Instant> {
        let id = untag(handle, EVENT_TAG).ok_or(Code::INVALID_HANDLE)?;
        let model = self.model();
        let event = model
            .events
            .get(&id)
            .filter(|e| e.flags & DISABLE_TIMING == 0)
            .ok_or(Code::INVALID_HANDLE)?;
        let (mark, _) = event.recorded.as_ref().ok_or(Code::INVALID_HANDLE)?;
        mark.time().ok_or(Code::NOT_READY)
    }

    pub(crate) fn create_graph(&self) -> u64 {
        let handle = GRAPH_TAG | self.next_id();
        self.model().graphs.push(handle);
        handle
    }

    pub(crate) fn destroy_graph(&self, handle: u64) -> Answer {
        let mut model = self.model();
        let index = model
            .graphs
            .iter()
            .position(|&g| g == handle)
            .ok_or(Code::INVALID_VALUE)?;
        model.graphs.swap_remove(index);
        Ok(())
    }
}
