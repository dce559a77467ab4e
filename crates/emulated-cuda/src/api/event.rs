//! Events.

use cudarc::driver::sys::{CUevent, CUstream};

use super::abi::Out;
use super::call;
use super::context::current;
use super::stream::lookup;
use crate::codes::{Answer, Code};
use crate::driver::{DISABLE_TIMING, Driver};

/// `CU_EVENT_BLOCKING_SYNC`, `CU_EVENT_DISABLE_TIMING`, `CU_EVENT_INTERPROCESS`.
const FLAGS: u32 = 0x7;
const INTERPROCESS: u32 = 0x4;

/// Makes an event.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuEventCreate(event: Out<CUevent>, flags: u32) -> u32 {
    call("cuEventCreate", |driver, _| {
        let event = event.require()?;
        current(driver)?;
        if flags & !FLAGS != 0 || flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0 {
            return Err(Code::INVALID_VALUE);
        }
        event.set(std::ptr::without_provenance_mut(
            usize::try_from(driver.create_event(flags)).unwrap_or(0),
        ));
        Ok(())
    })
}

/// Destroys an event; a record under way is still passed.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuEventDestroy_v2(event: CUevent) -> u32 {
    call("cuEventDestroy_v2", |driver, _| {
        driver.destroy_event(event.addr() as u64)
    })
}

/// Lets an event stand for everything enqueued so far.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuEventRecord(event: CUevent, stream: CUstream) -> u32 {
    call("cuEventRecord", |driver, record| {
        let stream = lookup(driver, stream)?;
        record.raw("stream", stream.id);
        driver.record_event(event.addr() as u64, &stream)
    })
}

/// Whether an event has been passed; one that was never recorded has.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuEventQuery(event: CUevent) -> u32 {
    call("cuEventQuery", |driver, _| {
        match driver.event_place(event.addr() as u64)? {
            Some(place) if !place.is_passed() => Err(Code::NOT_READY),
            Some(place) => place.stream.error(),
            None => Ok(()),
        }
    })
}

/// Waits for an event.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuEventSynchronize(event: CUevent) -> u32 {
    call("cuEventSynchronize", |driver, record| {
        let Some(place) = driver.event_place(event.addr() as u64)? else {
            return Ok(());
        };
        record.raw("stream", place.stream.id);
        place.stream.wait(place.seq, None);
        place.stream.error()
    })
}

fn put_elapsed(driver: &Driver, milliseconds: Out<f32>, start: CUevent, end: CUevent) -> Answer {
    let (start, end) = (
        driver.event_time(start.addr() as u64)?,
        driver.event_time(end.addr() as u64)?,
    );
    let elapsed = match end.checked_duration_since(start) {
        Some(forward) => forward.as_secs_f32(),
        None => -(start - end).as_secs_f32(),
    };
    milliseconds.put(elapsed * 1000.0)
}

/// Milliseconds between two events that were passed.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuEventElapsedTime(
    milliseconds: Out<f32>,
    start: CUevent,
    end: CUevent,
) -> u32 {
    call("cuEventElapsedTime", |driver, _| {
        put_elapsed(driver, milliseconds, start, end)
    })
}

/// The second version differs in its precision on hardware only.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuEventElapsedTime_v2(
    milliseconds: Out<f32>,
    start: CUevent,
    end: CUevent,
) -> u32 {
    call("cuEventElapsedTime_v2", |driver, _| {
        put_elapsed(driver, milliseconds, start, end)
    })
}
