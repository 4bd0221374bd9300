//! The functions that the C++ half calls. They check the numbers of regions and transfers. Our own
//! C++ code passes the strings, lists and agent pointers, and keeps them valid during a call.

use std::ffi::c_void;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;
use std::time::{Duration, Instant};

use crate::agent::Agent;
use crate::connect::CONNECT;
use crate::options::{DEFAULTS, found_device};
use crate::state::{SETTLE, State};
use crate::status::Status;
use crate::transfer::Desc;

/// A string of the C++ half: pointer and length.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Bytes {
    start: *const u8,
    len: usize,
}

impl Bytes {
    fn of(bytes: &[u8]) -> Bytes {
        Bytes { start: bytes.as_ptr(), len: bytes.len() }
    }

    /// # Safety
    /// The pointer is valid for `len` bytes while the result is in use.
    unsafe fn get<'a>(self) -> &'a [u8] {
        // SAFETY: the caller guarantees that the pointer is valid for `len` bytes. An empty string
        // is not read.
        if self.len == 0 { &[] } else { unsafe { slice::from_raw_parts(self.start, self.len) } }
    }

    /// # Safety
    /// The same as for [`get`](Self::get).
    unsafe fn text(self) -> String {
        // SAFETY: the caller guarantees that the pointer is valid for `len` bytes.
        String::from_utf8_lossy(unsafe { self.get() }).into_owned()
    }
}

/// A callback that receives one result, or the two strings of a pair.
pub type Sink = extern "C" fn(*mut c_void, Bytes, Bytes);

fn on(agent: *const Agent, call: impl FnOnce(&mut State) -> Result<(), Status>) -> i32 {
    let run = || {
        // SAFETY: `fishplate_nixl_open` returned the pointer, and the C++ half makes no call after
        // the close.
        let agent = unsafe { agent.as_ref() }.ok_or(Status::BACKEND)?;
        agent.shared.with(call).unwrap_or(Err(Status::BACKEND))
    };
    let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or(Err(Status::BACKEND));
    result.err().unwrap_or(Status::SUCCESS).0
}

/// Runs a call that programs repeat until an event occurs. Yields the processor after many calls
/// without an event.
fn polling(agent: *const Agent, call: impl FnOnce(&mut State) -> Result<(), Status>) -> i32 {
    let mut yields = false;
    let status = on(agent, |state| {
        let result = call(state);
        yields = state.yields;
        result
    });
    if yields {
        std::thread::yield_now();
    }
    status
}

/// Runs a call that returns a number, and writes the number to `out`.
///
/// # Safety
/// `out` is valid for a write.
unsafe fn numbered(
    agent: *const Agent,
    out: *mut u64,
    call: impl FnOnce(&mut State) -> Result<u64, Status>,
) -> i32 {
    on(agent, |state| {
        let number = call(state)?;
        // SAFETY: the caller guarantees that `out` is valid for a write.
        unsafe { out.write(number) };
        Ok(())
    })
}

/// Passes the names and defaults of the parameters to `sink`.
#[unsafe(no_mangle)]
pub extern "C" fn fishplate_nixl_params(sink: Sink, to: *mut c_void) {
    for (name, value) in DEFAULTS {
        sink(to, Bytes::of(name.as_bytes()), Bytes::of(value.as_bytes()));
    }
}

/// Opens an agent. After an error, prints the error to standard error and returns null. `pause` is
/// the pause of the progress thread in microseconds. If it is negative, there is no thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fishplate_nixl_open(
    name: Bytes,
    params: *const [Bytes; 2],
    count: usize,
    pause: i64,
) -> *mut Agent {
    let open = || {
        // SAFETY: the C++ half passes a valid string and a list of `count` pairs.
        let (name, params) = unsafe {
            let params = if count == 0 { &[] } else { slice::from_raw_parts(params, count) };
            (
                name.get().to_vec(),
                params.iter().map(|[name, value]| (name.text(), value.text())).collect::<Vec<_>>(),
            )
        };
        Agent::open(name, &params, u64::try_from(pause).ok().map(Duration::from_micros))
    };
    match catch_unwind(AssertUnwindSafe(open)) {
        Ok(Ok(agent)) => Box::into_raw(Box::new(agent)),
        Ok(Err(error)) => {
            // A closed standard error must not cause a panic.
            _ = writeln!(io::stderr(), "fishplate: cannot open the NIXL backend: {error}");
            std::ptr::null_mut()
        }
        Err(_) => std::ptr::null_mut(),
    }
}

/// Closes an agent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fishplate_nixl_close(agent: *mut Agent) {
    // SAFETY: `fishplate_nixl_open` returned the pointer, and the C++ half closes it once.
    let close = || drop(unsafe { Box::from_raw(agent) });
    if !agent.is_null() {
        _ = catch_unwind(AssertUnwindSafe(close));
    }
}

/// Passes the agent's connection info to `sink`.
#[unsafe(no_mangle)]
pub extern "C" fn fishplate_nixl_info(agent: *const Agent, sink: Sink, to: *mut c_void) -> i32 {
    on(agent, |state| {
        sink(to, Bytes::of(&state.info.encode()), Bytes::of(&[]));
        Ok(())
    })
}

/// Returns whether a new agent may have a device.
#[unsafe(no_mangle)]
pub extern "C" fn fishplate_nixl_has_device() -> bool {
    catch_unwind(|| found_device().is_some()).unwrap_or(false)
}

/// Returns whether the agent has a device. Memory of that device can be registered.
#[unsafe(no_mangle)]
pub extern "C" fn fishplate_nixl_with_device(agent: *const Agent) -> bool {
    on(agent, |state| state.device.map(drop).ok_or(Status::NOT_SUPPORTED)) == Status::SUCCESS.0
}

/// Registers memory of the device `device`, or of the host if `device` is negative. Writes the
/// number of the region to `out`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fishplate_nixl_register(
    agent: *const Agent,
    device: i64,
    start: usize,
    len: usize,
    out: *mut u64,
) -> i32 {
    // SAFETY: NIXL requires registered memory to stay valid until it is deregistered. The C++ half
    // passes a valid `out`.
    unsafe { numbered(agent, out, |state| state.register(u64::try_from(device).ok(), start, len)) }
}

/// Deregisters memory.
#[unsafe(no_mangle)]
pub extern "C" fn fishplate_nixl_deregister(agent: *const Agent, number: u64) -> i32 {
    let deadline = Instant::now() + SETTLE;
    loop {
        // Unlocks the agent between attempts, so that other calls can proceed.
        let status = on(agent, |state| {
            state.progress();
            state.deregister(number)
        });
        if status != Status::NOT_ALLOWED.0 || Instant::now() >= deadline {
            return status;
        }
        std::thread::yield_now();
    }
}

/// Passes the metadata of registered memory to `sink`.
#[unsafe(no_mangle)]
pub extern "C" fn fishplate_nixl_export(
    agent: *const Agent,
    number: u64,
    sink: Sink,
    to: *mut c_void,
) -> i32 {
    on(agent, |state| {
        sink(to, Bytes::of(&state.export(number)?), Bytes::of(&[]));
        Ok(())
    })
}

/// Loads a peer's connection info.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fishplate_nixl_load_peer(
    agent: *const Agent,
    name: Bytes,
    info: Bytes,
) -> i32 {
    // SAFETY: the C++ half passes valid strings.
    let (name, info) = unsafe { (name.get(), info.get()) };
    on(agent, |state| state.load_peer(name, info))
}

/// Connects a peer. Waits at most 10 seconds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fishplate_nixl_connect(agent: *const Agent, name: Bytes) -> i32 {
    // SAFETY: the C++ half passes a valid string.
    let name = unsafe { name.get() };
    let deadline = Instant::now() + CONNECT;
    let mut number = 0;
    let found = on(agent, |state| {
        if name != state.name {
            number = state.loaded(name).ok_or(Status::NOT_FOUND)?;
            state.approach(number)?;
        }
        Ok(())
    });
    if found != Status::SUCCESS.0 || number == 0 {
        return found;
    }
    loop {
        let status = on(agent, |state| {
            state.progress();
            match state.is_lost(number) {
                true => Err(Status::REMOTE_DISCONNECT),
                false if state.approach(number)? => Ok(()),
                false => Err(Status::IN_PROG),
            }
        });
        if status != Status::IN_PROG.0 || Instant::now() >= deadline {
            return if status == Status::IN_PROG.0 { Status::REMOTE_DISCONNECT.0 } else { status };
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Disconnects a peer and removes its info.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fishplate_nixl_disconnect(agent: *const Agent, name: Bytes) -> i32 {
    // SAFETY: the C++ half passes a valid string.
    let name = unsafe { name.get() };
    on(agent, |state| {
        if name == state.name {
            return Ok(());
        }
        let number = state.loaded(name).ok_or(Status::NOT_FOUND)?;
        state.forget(number);
        Ok(())
    })
}

/// Loads the metadata of a peer's memory. Writes the memory's number to `out`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fishplate_nixl_load(
    agent: *const Agent,
    name: Bytes,
    device: bool,
    bytes: Bytes,
    out: *mut u64,
) -> i32 {
    // SAFETY: the C++ half passes valid strings and a valid `out`.
    unsafe {
        let (name, bytes) = (name.get(), bytes.get());
        numbered(agent, out, |state| state.load(name, device, bytes))
    }
}

/// Removes the metadata of a peer's memory.
#[unsafe(no_mangle)]
pub extern "C" fn fishplate_nixl_unload(agent: *const Agent, number: u64) -> i32 {
    on(agent, |state| state.unload(number))
}

/// Prepares a transfer. Writes its number to `out`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fishplate_nixl_prepare(
    agent: *const Agent,
    write: bool,
    locals: *const Desc,
    count: usize,
    remotes: *const Desc,
    remote_count: usize,
    name: Bytes,
    out: *mut u64,
) -> i32 {
    if count == 0 || remote_count == 0 {
        return Status::INVALID_PARAM.0;
    }
    // SAFETY: the C++ half passes two lists of `count` descriptors, a valid string and a valid
    // `out`.
    unsafe {
        let locals = slice::from_raw_parts(locals, count);
        let remotes = slice::from_raw_parts(remotes, remote_count);
        let name = name.get();
        numbered(agent, out, |state| state.prepare(write, locals, remotes, name))
    }
}

/// Starts a transfer, with a notification if `notifies`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fishplate_nixl_post(
    agent: *const Agent,
    number: u64,
    notifies: bool,
    note: Bytes,
) -> i32 {
    // SAFETY: the C++ half passes a valid string.
    let note = unsafe { note.get() };
    let mut first = true;
    loop {
        let mut copies = false;
        let status = on(agent, |state| {
            let status = match first {
                true => state.post(number, notifies.then_some(note)),
                false => state.step(number),
            };
            copies = status == Status::IN_PROG && state.copies(number);
            Err(status)
        });
        if !copies {
            return status;
        }
        first = false;
        // SAFETY: `on` has checked the pointer for null.
        unsafe { &*agent }.shared.let_others();
    }
}

/// Returns the status of a transfer.
#[unsafe(no_mangle)]
pub extern "C" fn fishplate_nixl_check(agent: *const Agent, number: u64) -> i32 {
    polling(agent, |state| Err(state.check(number)))
}

/// Releases a transfer.
#[unsafe(no_mangle)]
pub extern "C" fn fishplate_nixl_release(agent: *const Agent, number: u64) -> i32 {
    on(agent, |state| Err(state.release(number)))
}

/// Passes all notifications to `sink`, each with the name of its sender.
#[unsafe(no_mangle)]
pub extern "C" fn fishplate_nixl_notes(agent: *const Agent, sink: Sink, to: *mut c_void) -> i32 {
    polling(agent, |state| {
        state.poll();
        if state.notes.are_there() {
            for (name, note) in state.notes.take() {
                sink(to, Bytes::of(&name), Bytes::of(&note));
            }
        }
        Ok(())
    })
}

/// Sends a notification to a peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fishplate_nixl_notify(
    agent: *const Agent,
    name: Bytes,
    note: Bytes,
) -> i32 {
    // SAFETY: the C++ half passes valid strings.
    let (name, note) = unsafe { (name.get(), note.get()) };
    on(agent, |state| state.notify(name, note))
}
