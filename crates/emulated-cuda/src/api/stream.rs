//! Streams, host functions, and the least of stream capture.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{CUcontext, CUdevice, CUevent, CUgraph, CUgreenCtx, CUstream};

use super::abi::Out;
use super::call;
use super::context::{current, from_handle};
use crate::codes::{Answer, Code};
use crate::driver::{self, Driver, NON_BLOCKING};
use crate::stream::{Capture, Stream};
use crate::work::Work;

/// The stream of a handle, for the calling thread.
pub(super) fn lookup(driver: &Driver, stream: CUstream) -> Answer<Arc<Stream>> {
    driver.stream(stream.addr() as u64, current(driver))
}

/// As [`lookup`], refusing a stream that captures, since waiting for it would end the capture.
fn lookup_waitable(driver: &Driver, stream: CUstream) -> Answer<Arc<Stream>> {
    let stream = lookup(driver, stream)?;
    if stream.capture() != Capture::None {
        stream.set_capture(Capture::Invalidated);
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    Ok(stream)
}

fn create(driver: &Driver, stream: Out<CUstream>, flags: u32, priority: i32) -> Answer {
    let stream = stream.require()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let made = driver.create_stream(current(driver)?, flags, priority);
    let handle = usize::try_from(driver::stream_handle(&made)).unwrap_or(0);
    stream.set(std::ptr::without_provenance_mut(handle));
    Ok(())
}

/// Makes a stream in the current context.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuStreamCreate(stream: Out<CUstream>, flags: u32) -> u32 {
    call("cuStreamCreate", |driver, _| {
        create(driver, stream, flags, 0)
    })
}

/// Makes a stream with a priority, which changes nothing here.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuStreamCreateWithPriority(
    stream: Out<CUstream>,
    flags: u32,
    priority: i32,
) -> u32 {
    call("cuStreamCreateWithPriority", |driver, _| {
        create(driver, stream, flags, priority)
    })
}

/// Gives a stream up; what is enqueued is still carried out.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuStreamDestroy_v2(stream: CUstream) -> u32 {
    call("cuStreamDestroy_v2", |driver, _| {
        driver.destroy_stream(stream.addr() as u64)
    })
}

/// Waits for everything enqueued so far.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuStreamSynchronize(stream: CUstream) -> u32 {
    call("cuStreamSynchronize", |driver, record| {
        let stream = lookup_waitable(driver, stream)?;
        record.raw("stream", stream.id);
        stream.synchronize()
    })
}

/// Whether everything enqueued so far is carried out.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuStreamQuery(stream: CUstream) -> u32 {
    call("cuStreamQuery", |driver, record| {
        let stream = lookup_waitable(driver, stream)?;
        record.raw("stream", stream.id);
        stream.query()
    })
}

/// Makes later work of a stream wait for what an event stands for now.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuStreamWaitEvent(stream: CUstream, event: CUevent, _flags: u32) -> u32 {
    call("cuStreamWaitEvent", |driver, record| {
        let stream = lookup(driver, stream)?;
        record.raw("stream", stream.id);
        let place = driver.event_place(event.addr() as u64)?;
        driver
            .enqueue(&stream, Work::Wait, place.into_iter().collect(), None)
            .map(drop)
    })
}

fn put_context(driver: &Driver, stream: CUstream, context: Out<CUcontext>) -> Answer {
    let stream = lookup(driver, stream)?;
    let handle = driver
        .context_of(stream.ordinal)
        .ok_or(Code::CONTEXT_IS_DESTROYED)?;
    context.put(from_handle(handle))
}

/// The context of a stream.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuStreamGetCtx(stream: CUstream, context: Out<CUcontext>) -> u32 {
    call("cuStreamGetCtx", |driver, _| {
        put_context(driver, stream, context)
    })
}

/// The context of a stream, and its green context, of which there are none.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuStreamGetCtx_v2(
    stream: CUstream,
    context: Out<CUcontext>,
    green: Out<CUgreenCtx>,
) -> u32 {
    call("cuStreamGetCtx_v2", |driver, _| {
        put_context(driver, stream, context)?;
        green.set(std::ptr::null_mut());
        Ok(())
    })
}

/// The device of a stream.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuStreamGetDevice(stream: CUstream, device: Out<CUdevice>) -> u32 {
    call("cuStreamGetDevice", |driver, _| {
        let ordinal = lookup(driver, stream)?.ordinal;
        device.put(i32::try_from(ordinal).unwrap_or(0))
    })
}

/// A number that is the stream's own; the trace names streams by it.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuStreamGetId(stream: CUstream, id: Out<u64>) -> u32 {
    call("cuStreamGetId", |driver, _| {
        id.put(lookup(driver, stream)?.id)
    })
}

/// The flags that a stream was made with.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuStreamGetFlags(stream: CUstream, flags: Out<u32>) -> u32 {
    call("cuStreamGetFlags", |driver, _| {
        flags.put(lookup(driver, stream)?.flags)
    })
}

/// The priority that a stream was made with.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuStreamGetPriority(stream: CUstream, priority: Out<i32>) -> u32 {
    call("cuStreamGetPriority", |driver, _| {
        priority.put(lookup(driver, stream)?.priority)
    })
}

/// Whether a stream captures: 0 no, 1 yes, 2 its capture was invalidated.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuStreamIsCapturing(stream: CUstream, status: Out<u32>) -> u32 {
    call("cuStreamIsCapturing", |driver, _| {
        status.put(match lookup(driver, stream)?.capture() {
            Capture::None => 0,
            Capture::Active => 1,
            Capture::Invalidated => 2,
        })
    })
}

fn begin_capture(driver: &Driver, stream: CUstream) -> Answer {
    if stream.addr() <= 1 {
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    let stream = lookup(driver, stream)?;
    if stream.capture() != Capture::None {
        return Err(Code::INVALID_VALUE);
    }
    stream.set_capture(Capture::Active);
    Ok(())
}

/// Puts a stream into capture; what is enqueued then is not carried out. The modes are not told apart.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuStreamBeginCapture_v2(stream: CUstream, mode: u32) -> u32 {
    call("cuStreamBeginCapture_v2", |driver, _| {
        if mode > 2 {
            Err(Code::INVALID_VALUE)
        } else {
            begin_capture(driver, stream)
        }
    })
}

/// The first version has no mode.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuStreamBeginCapture(stream: CUstream) -> u32 {
    call("cuStreamBeginCapture", |driver, _| {
        begin_capture(driver, stream)
    })
}

/// Ends a capture; the graph is a handle and nothing more, since graphs are not emulated.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuStreamEndCapture(stream: CUstream, graph: Out<CUgraph>) -> u32 {
    call("cuStreamEndCapture", |driver, _| {
        let graph = graph.require()?;
        let stream = lookup(driver, stream)?;
        let capture = stream.capture();
        stream.set_capture(Capture::None);
        match capture {
            Capture::Active => {
                graph.set(std::ptr::without_provenance_mut(
                    usize::try_from(driver.create_graph()).unwrap_or(0),
                ));
                Ok(())
            }
            Capture::Invalidated => {
                graph.set(std::ptr::null_mut());
                Err(Code::STREAM_CAPTURE_INVALIDATED)
            }
            Capture::None => Err(Code::ILLEGAL_STATE),
        }
    })
}

/// Destroys what a capture gave.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuGraphDestroy(graph: CUgraph) -> u32 {
    call("cuGraphDestroy", |driver, _| {
        driver.destroy_graph(graph.addr() as u64)
    })
}

/// `CUhostFn`.
type HostFunction = Option<extern "C" fn(*mut c_void)>;

fn launch(driver: &Driver, stream: CUstream, function: HostFunction, data: *mut c_void) -> Answer {
    let stream = lookup(driver, stream)?;
    let function = function.ok_or(Code::INVALID_VALUE)?;
    let data = data.expose_provenance();
    let work = Work::Callback(Box::new(move || {
        function(std::ptr::with_exposed_provenance_mut(data))
    }));
    driver.enqueue(&stream, work, Vec::new(), None).map(drop)
}

/// Calls a function of the program when the stream comes there.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuLaunchHostFunc(
    stream: CUstream,
    function: HostFunction,
    data: *mut c_void,
) -> u32 {
    call("cuLaunchHostFunc", |driver, _| {
        launch(driver, stream, function, data)
    })
}

/// The second version says how to wait for the function, which makes no difference here.
#[unsafe(no_mangle)]
pub(super) extern "C" fn cuLaunchHostFunc_v2(
    stream: CUstream,
    function: HostFunction,
    data: *mut c_void,
    _mode: u32,
) -> u32 {
    call("cuLaunchHostFunc_v2", |driver, _| {
        launch(driver, stream, function, data)
    })
}
