//! The functions that the C++ half calls. They check numbers of regions and transfers. Strings,
//! lists and the agent's pointer come from our own C++, which keeps them valid during a call.

use std::ffi::c_void;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;
use std::time::{Duration, Instant};

use crate::agent::Agent;
use crate::connect::CONNECT;
use crate::options::DEFAULTS;
use crate::state::{SETTLE, State};
use crate::status::Status;
use crate::transfer::Desc;

/// Bytes of the caller.
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
    /// Pointer and length are valid as long as the result is used.
    unsafe fn get<'a>(self) -> &'a [u8] {
        // SAFETY: not empty, and our caller guarantees that it is valid.
        if self.len == 0 { &[] } else { unsafe { slice::from_raw_parts(self.start, self.len) } }
    }

    /// # Safety
    /// As [`get`](Self::get).
    unsafe fn text(self) -> String {
        // SAFETY: same contract.
        String::from_utf8_lossy(unsafe { self.get() }).into_owned()
    }
}

/// Takes one result, or the two strings of a pair.
pub type Sink = extern "C" fn(*mut c_void, Bytes, Bytes);

/// Runs a call on an agent.
fn on(agent: *const Agent, call: impl FnOnce(&mut State) -> Result<(), Status>) -> i32 {
    let run = || {
        // SAFETY: opened by `open`. The C++ half makes no call after `close`.
        let agent = unsafe { agent.as_ref() }.ok_or(Status::BACKEND)?;
        agent.shared.with(call).unwrap_or(Err(Status::BACKEND))
    };
    let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or(Err(Status::BACKEND));
    result.err().unwrap_or(Status::SUCCESS).0
}

/// As [`on`], for a call that programs repeat until something has happened. After many calls
/// without an event it yields the processor.
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

/// As [`on`], for a call that returns a number.
///
/// # Safety
/// `out` is valid for a number.
unsafe fn numbered(
    agent: *const Agent,
    out: *mut u64,
    call: impl FnOnce(&mut State) -> Result<u64, Status>,
) -> i32 {
    on(agent, |state| {
        let number = call(state)?;
        // SAFETY: our caller guarantees that `out` is valid.
        unsafe { out.write(number) };
        Ok(())
    })
}

/// Names the parameters and their defaults.
#[unsafe(no_mangle)]
pub extern "C" fn fishplate_nixl_params(sink: Sink, to: *mut c_void) {
    for (name, value) in DEFAULTS {
        sink(to, Bytes::of(name.as_bytes()), Bytes::of(value.as_bytes()));
    }
}

/// Opens an agent. Null: an error was written to standard error. `pause`: that of the progress
/// thread in microseconds; negative for no thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fishplate_nixl_open(
    name: Bytes,
    params: *const [Bytes; 2],
    count: usize,
    pause: i64,
) -> *mut Agent {
    let open = || {
        // SAFETY: strings and a list of the caller's.
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
            // Standard error may be closed, and must not cause a panic.
            _ = writeln!(io::stderr(), "fishplate: the NIXL backend does not open: {error}");
            std::ptr::null_mut()
        }
        Err(_) => std::ptr::null_mut(),
    }
}

/// Closes an agent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fishplate_nixl_close(agent: *mut Agent) {
    // SAFETY: opened by `open`, and closed once, here.
    let close = || drop(unsafe { Box::from_raw(agent) });
    if !agent.is_null() {
        _ = catch_unwind(AssertUnwindSafe(close));
    }
}

/// Returns the connection info.
#[unsafe(no_mangle)]
pub extern "C" fn fishplate_nixl_info(agent: *const Agent, sink: Sink, to: *mut c_void) -> i32 {
    on(agent, |state| {
        state.info.address = state.node.address();
        sink(to, Bytes::of(&state.info.encode()), Bytes::of(&[]));
        Ok(())
    })
}

/// Registers memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fishplate_nixl_register(
    agent: *const Agent,
    start: usize,
    len: usize,
    out: *mut u64,
) -> i32 {
    // SAFETY: NIXL requires that registered memory stays valid until it is deregistered. `out` is
    // the caller's.
    unsafe { numbered(agent, out, |state| state.register(start, len)) }
}

/// Deregisters memory.
#[unsafe(no_mangle)]
pub extern "C" fn fishplate_nixl_deregister(agent: *const Agent, number: u64) -> i32 {
    let deadline = Instant::now() + SETTLE;
    loop {
        // Releases the agent in between, so that other calls can proceed.
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

/// Returns the metadata of memory.
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
pub unsafe extern "C" fn fishplate_nixl_load_peer(agent: *const Agent, name: Bytes, info: Bytes) -> i32 {
    // SAFETY: strings of the caller.
    let (name, info) = unsafe { (name.get(), info.get()) };
    on(agent, |state| state.load_peer(name, info))
}

/// Connects a peer. Waits for it for some seconds at most.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fishplate_nixl_connect(agent: *const Agent, name: Bytes) -> i32 {
    // SAFETY: a string of the caller.
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

/// Forgets a peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fishplate_nixl_disconnect(agent: *const Agent, name: Bytes) -> i32 {
    // SAFETY: a string of the caller.
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

/// Loads the metadata of a peer's memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fishplate_nixl_load(
    agent: *const Agent,
    name: Bytes,
    bytes: Bytes,
    out: *mut u64,
) -> i32 {
    // SAFETY: strings of the caller, and a number.
    unsafe {
        let (name, bytes) = (name.get(), bytes.get());
        numbered(agent, out, |state| state.load(name, bytes))
    }
}

/// Forgets the metadata of a peer's memory.
#[unsafe(no_mangle)]
pub extern "C" fn fishplate_nixl_unload(agent: *const Agent, number: u64) -> i32 {
    on(agent, |state| state.unload(number))
}

/// Prepares a transfer.
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
    // SAFETY: two lists and a string of the caller, and a number.
    unsafe {
        let locals = slice::from_raw_parts(locals, count);
        let remotes = slice::from_raw_parts(remotes, remote_count);
        let name = name.get();
        numbered(agent, out, |state| state.prepare(write, locals, remotes, name))
    }
}

/// Begins a transfer, with a notification if `notifies`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fishplate_nixl_post(
    agent: *const Agent,
    number: u64,
    notifies: bool,
    note: Bytes,
) -> i32 {
    // SAFETY: a string of the caller.
    let note = unsafe { note.get() };
    on(agent, |state| Err(state.post(number, notifies.then_some(note))))
}

/// How far a transfer is.
#[unsafe(no_mangle)]
pub extern "C" fn fishplate_nixl_check(agent: *const Agent, number: u64) -> i32 {
    polling(agent, |state| Err(state.check(number)))
}

/// Releases a transfer.
#[unsafe(no_mangle)]
pub extern "C" fn fishplate_nixl_release(agent: *const Agent, number: u64) -> i32 {
    on(agent, |state| Err(state.release(number)))
}

/// Returns all notifications: the names of their senders, and their bytes.
#[unsafe(no_mangle)]
pub extern "C" fn fishplate_nixl_notes(agent: *const Agent, sink: Sink, to: *mut c_void) -> i32 {
    polling(agent, |state| {
        state.progress();
        if state.notes.are_there() {
            for (name, note) in state.notes.take() {
                sink(to, Bytes::of(&name), Bytes::of(&note));
            }
        }
        Ok(())
    })
}

/// Notifies a peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fishplate_nixl_notify(agent: *const Agent, name: Bytes, note: Bytes) -> i32 {
    // SAFETY: strings of the caller.
    let (name, note) = unsafe { (name.get(), note.get()) };
    on(agent, |state| state.notify(name, note))
}
