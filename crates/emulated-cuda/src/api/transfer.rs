//! Copies and fills, synchronous and asynchronous.
//!
//! All are work on a stream. A synchronous one is work on the default stream of the current context, waited for. An asynchronous copy to or
//! from host memory that is not page-locked returns only when it is done, as with the real driver.

use std::ffi::c_void;
use std::fmt::Write as _;
use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::call;
use super::context::current;
use super::stream::lookup;
use crate::codes::{Answer, Code};
use crate::config::uuid_text;
use crate::driver::Driver;
use crate::stream::{Capture, Stream};
use crate::trace::{self, Record};
use crate::work::{HostAddress, Piece, Work};

/// Whether the call returns before the work is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    /// On this stream.
    Enqueued(CUstream),
    /// On the default stream.
    Done,
}

/// The stream of a call, and what its trace record says of it.
struct Route<'a> {
    driver: &'a Driver,
    stream: Arc<Stream>,
    when: When,
}

impl<'a> Route<'a> {
    fn new(driver: &'a Driver, when: When) -> Answer<Route<'a>> {
        let ordinal = current(driver)?;
        let stream = match when {
            When::Enqueued(stream) => lookup(driver, stream)?,
            When::Done => driver.stream(0, Ok(ordinal))?,
        };
        Ok(Route {
            driver,
            stream,
            when,
        })
    }

    fn resolve(&self, address: CUdeviceptr, len: usize) -> Answer<(Vec<Piece>, Option<u64>)> {
        self.driver.resolve(address, len, self.stream.ordinal)
    }

    /// Enqueues the work and waits for it where the call has to.
    fn send(
        &self,
        work: Work,
        bytes: usize,
        offset: Option<u64>,
        waits: bool,
        record: &mut Record,
    ) -> Answer {
        let mut copy = None;
        if record.is_on() {
            let mut fields = String::new();
            let uuid = uuid_text(self.driver.uuid(self.stream.ordinal));
            let _ = write!(
                fields,
                ",\"stream\":{},\"device\":\"{uuid}\",\"bytes\":{bytes}",
                self.stream.id
            );
            if let Some(offset) = offset {
                let _ = write!(fields, ",\"offset\":{offset}");
            }
            let enqueued_us = trace::now_us();
            record.members(&fields);
            if let When::Enqueued(_) = self.when {
                let seq = trace::next_seq();
                record.raw("seq", seq);
                copy = Some(trace::Copy {
                    seq,
                    fields,
                    enqueued_us,
                });
            }
        }
        if waits && self.stream.capture() != Capture::None {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        let place = self.driver.enqueue(&self.stream, work, Vec::new(), copy)?;
        if waits {
            place.stream.wait(place.seq, None);
            return place.stream.error();
        }
        Ok(())
    }
}

fn to_host(
    driver: &Driver,
    host: *mut c_void,
    from: CUdeviceptr,
    len: usize,
    when: When,
    record: &mut Record,
) -> Answer {
    let route = Route::new(driver, when)?;
    if len == 0 {
        return Ok(());
    }
    let (from, offset) = route.resolve(from, len)?;
    let to = HostAddress(host.expose_provenance());
    let waits = when == When::Done || !driver.is_page_locked(to.0, len);
    route.send(Work::ToHost { from, to }, len, offset, waits, record)
}

fn to_device(
    driver: &Driver,
    to: CUdeviceptr,
    host: *const c_void,
    len: usize,
    when: When,
    record: &mut Record,
) -> Answer {
    let route = Route::new(driver, when)?;
    if len == 0 {
        return Ok(());
    }
    let (to, offset) = route.resolve(to, len)?;
    let from = HostAddress(host.expose_provenance());
    let waits = when == When::Done || !driver.is_page_locked(from.0, len);
    route.send(Work::ToDevice { from, to }, len, offset, waits, record)
}

fn between(
    driver: &Driver,
    to: CUdeviceptr,
    from: CUdeviceptr,
    len: usize,
    when: When,
    record: &mut Record,
) -> Answer {
    let route = Route::new(driver, when)?;
    if len == 0 {
        return Ok(());
    }
    let (from, _) = route.resolve(from, len)?;
    let (to, _) = route.resolve(to, len)?;
    route.send(
        Work::Between { from, to },
        len,
        None,
        when == When::Done,
        record,
    )
}

/// Fills `count` elements of `width` bytes.
fn fill(
    driver: &Driver,
    to: CUdeviceptr,
    (pattern, width): ([u8; 4], usize),
    count: usize,
    when: When,
    record: &mut Record,
) -> Answer {
    let route = Route::new(driver, when)?;
    if !to.is_multiple_of(width as u64) {
        return Err(Code::INVALID_VALUE);
    }
    let len = count.checked_mul(width).ok_or(Code::INVALID_VALUE)?;
    if len == 0 {
        return Ok(());
    }
    let (to, offset) = route.resolve(to, len)?;
    route.send(
        Work::Fill { to, pattern },
        len,
        offset,
        when == When::Done,
        record,
    )
}

/// Copies device memory to the host.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemcpyDtoH_v2(host: *mut c_void, from: CUdeviceptr, len: usize) -> u32 {
    call("cuMemcpyDtoH_v2", |driver, record| {
        to_host(driver, host, from, len, When::Done, record)
    })
}

/// Copies device memory to the host, on a stream.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemcpyDtoHAsync_v2(
    host: *mut c_void,
    from: CUdeviceptr,
    len: usize,
    stream: CUstream,
) -> u32 {
    call("cuMemcpyDtoHAsync_v2", |driver, record| {
        to_host(driver, host, from, len, When::Enqueued(stream), record)
    })
}

/// Copies host memory to the device.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemcpyHtoD_v2(to: CUdeviceptr, host: *const c_void, len: usize) -> u32 {
    call("cuMemcpyHtoD_v2", |driver, record| {
        to_device(driver, to, host, len, When::Done, record)
    })
}

/// Copies host memory to the device, on a stream.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemcpyHtoDAsync_v2(
    to: CUdeviceptr,
    host: *const c_void,
    len: usize,
    stream: CUstream,
) -> u32 {
    call("cuMemcpyHtoDAsync_v2", |driver, record| {
        to_device(driver, to, host, len, When::Enqueued(stream), record)
    })
}

/// Copies device memory to device memory; on the default stream, and not waited for, as documented.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemcpyDtoD_v2(to: CUdeviceptr, from: CUdeviceptr, len: usize) -> u32 {
    let default = When::Enqueued(std::ptr::null_mut());
    call("cuMemcpyDtoD_v2", |driver, record| {
        between(driver, to, from, len, default, record)
    })
}

/// Copies device memory to device memory, on a stream.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemcpyDtoDAsync_v2(
    to: CUdeviceptr,
    from: CUdeviceptr,
    len: usize,
    stream: CUstream,
) -> u32 {
    call("cuMemcpyDtoDAsync_v2", |driver, record| {
        between(driver, to, from, len, When::Enqueued(stream), record)
    })
}

/// Fills device memory with a byte.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemsetD8_v2(to: CUdeviceptr, value: u8, count: usize) -> u32 {
    call("cuMemsetD8_v2", |driver, record| {
        fill(driver, to, ([value; 4], 1), count, When::Done, record)
    })
}

/// Fills device memory with a byte, on a stream.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemsetD8Async(
    to: CUdeviceptr,
    value: u8,
    count: usize,
    stream: CUstream,
) -> u32 {
    call("cuMemsetD8Async", |driver, record| {
        fill(
            driver,
            to,
            ([value; 4], 1),
            count,
            When::Enqueued(stream),
            record,
        )
    })
}

/// Fills device memory with a 32-bit number.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemsetD32_v2(to: CUdeviceptr, value: u32, count: usize) -> u32 {
    call("cuMemsetD32_v2", |driver, record| {
        fill(
            driver,
            to,
            (value.to_ne_bytes(), 4),
            count,
            When::Done,
            record,
        )
    })
}

/// Fills device memory with a 32-bit number, on a stream.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuMemsetD32Async(
    to: CUdeviceptr,
    value: u32,
    count: usize,
    stream: CUstream,
) -> u32 {
    call("cuMemsetD32Async", |driver, record| {
        fill(
            driver,
            to,
            (value.to_ne_bytes(), 4),
            count,
            When::Enqueued(stream),
            record,
        )
    })
}
