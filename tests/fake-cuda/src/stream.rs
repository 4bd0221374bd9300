//! Streams, events and queued work.

use std::ffi::{c_uint, c_void};

use fishplate_gpu::DevicePtr;
use fishplate_gpu::fake::StreamId;

use crate::{
    Code, INVALID_VALUE, Library, NOT_READY, add, answer, code, current, find, library, put,
};

/// Returns the stream of a handle. Null means the device's default stream.
fn stream(library: &Library, ordinal: u32, handle: *mut c_void) -> Result<StreamId, Code> {
    let mut handles = library.handles();
    if !handle.is_null() {
        return find(&mut handles.streams, handle as usize)?.ok_or(INVALID_VALUE);
    }
    let there = handles.defaults.iter().find(|(of, _)| *of == ordinal);
    if let Some((_, stream)) = there {
        return Ok(*stream);
    }
    let stream = library.process.stream(ordinal).map_err(code)?;
    handles.defaults.push((ordinal, stream));
    Ok(stream)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(place: *mut *mut c_void, _flags: c_uint) -> Code {
    let made = current().and_then(|(library, ordinal)| {
        let stream = library.process.stream(ordinal).map_err(code)?;
        Ok(add(&mut library.handles().streams, stream))
    });
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(made.and_then(|handle| unsafe { put(place, handle as *mut c_void) }))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(handle: *mut c_void) -> Code {
    answer(current().and_then(|(library, _)| {
        let stream = find(&mut library.handles().streams, handle as usize)?.take();
        stream.into_iter().for_each(|stream| library.process.end_stream(stream));
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(handle: *mut c_void) -> Code {
    answer(current().and_then(|(library, ordinal)| {
        let stream = stream(library, ordinal, handle)?;
        library.process.wait(stream).map_err(code)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(handle: *mut c_void, event: *mut c_void, flags: c_uint) -> Code {
    answer(current().and_then(|(library, ordinal)| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let stream = stream(library, ordinal, handle)?;
        let recorded = find(&mut library.handles().events, event as usize)?.flatten();
        // An event that was never recorded is complete.
        let Some((other, moment)) = recorded else { return Ok(()) };
        library.process.wait_for(stream, other, moment).map_err(code)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchHostFunc(
    handle: *mut c_void,
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> Code {
    answer(current().and_then(|(library, ordinal)| {
        let function = function.ok_or(INVALID_VALUE)?;
        let stream = stream(library, ordinal, handle)?;
        // SAFETY: the driver's documentation requires the caller to pass valid arguments.
        unsafe { library.process.call(stream, function, data) }.map_err(code)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyAsync(to: u64, from: u64, len: usize, handle: *mut c_void) -> Code {
    answer(current().and_then(|(library, ordinal)| {
        let stream = stream(library, ordinal, handle)?;
        let (to, from) = (DevicePtr(to), DevicePtr(from));
        // SAFETY: the driver's documentation requires the caller to pass valid arguments.
        unsafe { library.process.copy(stream, to, from, len as u64) }.map_err(code)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamWriteValue64_v2(
    handle: *mut c_void,
    word: u64,
    value: u64,
    flags: c_uint,
) -> Code {
    answer(current().and_then(|(library, ordinal)| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let stream = stream(library, ordinal, handle)?;
        // SAFETY: the driver's documentation requires the caller to pass valid arguments.
        unsafe { library.process.write_word(stream, DevicePtr(word), value) }.map_err(code)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(place: *mut *mut c_void, _flags: c_uint) -> Code {
    let made = current().map(|(library, _)| add(&mut library.handles().events, None));
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(made.and_then(|handle| unsafe { put(place, handle as *mut c_void) }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: *mut c_void, handle: *mut c_void) -> Code {
    answer(current().and_then(|(library, ordinal)| {
        let stream = stream(library, ordinal, handle)?;
        let moment = library.process.mark(stream).map_err(code)?;
        let mut handles = library.handles();
        let event = find(&mut handles.events, event as usize)?;
        if event.replace(Some((stream, moment))).flatten().is_some() {
            library.process.unmark();
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: *mut c_void) -> Code {
    answer(library().and_then(|library| {
        let recorded = find(&mut library.handles().events, event as usize)?.flatten();
        // An event that was never recorded is complete.
        let Some((stream, moment)) = recorded else { return Ok(()) };
        match library.process.reached(stream, moment).map_err(code)? {
            true => Ok(()),
            false => Err(NOT_READY),
        }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> Code {
    answer(library().and_then(|library| {
        let recorded = find(&mut library.handles().events, event as usize)?.take();
        if recorded.flatten().is_some() {
            library.process.unmark();
        }
        Ok(())
    }))
}
