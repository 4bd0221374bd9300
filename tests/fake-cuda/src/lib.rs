//! A `libcuda.so` without a GPU: the functions that the CUDA backend uses, over the fake driver's
//! engine. Memory is real, also between processes of one user; copies are the processor's.
//!
//! It is put under that name into a folder of its own and that folder into `LD_LIBRARY_PATH`, by
//! `tests/cuda-fake.sh`. What is not here is missing: a program that uses another function of the
//! driver does not find it.
//!
//! `FAKE_CUDA` chooses how it behaves: words separated by commas. `devices=N`; `late` for copies
//! that end late and out of order, moved on by a thread; `differ` for handles as HIP's; `reopen`
//! for opens that are counted; `flush` for NICs whose writes must be flushed; `nowords` for streams
//! that cannot store words; `segments` for a `cuMemAlloc` that gives virtual memory in physical
//! segments side by side, as a framework's allocator in front of it may; `fail=CALL:SKIP:CODE` for
//! an error to come. With `FAKE_CUDA_REPORT` a process adds a line to that file when it ends: what
//! it did, and what it has not given back.
//!
//! `context` has devices and contexts, `memory` memory of all kinds, `stream` streams and events.

mod context;
mod memory;
mod stream;

use std::cell::RefCell;
use std::ffi::c_int;
use std::fs::OpenOptions;
use std::io::Write;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use fishplate_gpu::DeviceError;
use fishplate_gpu::fake::{Behaviour, Call, FakeDriver, FakePhysical, FakeProcess, MemoryKind, StreamId};

/// What the driver answers: its code.
type Code = u32;

const INVALID_VALUE: Code = 1;
const NOT_INITIALIZED: Code = 3;
const INVALID_DEVICE: Code = 101;
const INVALID_CONTEXT: Code = 201;
const INVALID_HANDLE: Code = 400;
const NOT_FOUND: Code = 500;
const NOT_READY: Code = 600;
const NOT_SUPPORTED: Code = 801;

/// Size of physical segments, where `cuMemAlloc` gives such.
const SEGMENT: u64 = 1 << 16;

/// A pinned range of the processor: where, how long, and where the device sees it.
type Pin = (usize, usize, u64);

/// What this process has of the driver.
struct Library {
    process: FakeProcess,
    /// What `cuMemAlloc` gives.
    kind: MemoryKind,
    handles: Mutex<Handles>,
}

/// What handles stand for. A handle is a place here, counted from 1.
#[derive(Default)]
struct Handles {
    streams: Vec<Option<StreamId>>,
    /// The stream and moment that an event was recorded at last.
    events: Vec<Option<Option<(StreamId, u64)>>>,
    physical: Vec<Option<FakePhysical>>,
    pins: Vec<Pin>,
    /// Streams for who names none, by device.
    defaults: Vec<(u32, StreamId)>,
}

static LIBRARY: OnceLock<Library> = OnceLock::new();

thread_local! {
    /// Contexts that are current, the last one on top: ordinals of devices.
    static CONTEXTS: RefCell<Vec<u32>> = const { RefCell::new(vec![]) };
}

/// The library, if it was started.
fn library() -> Result<&'static Library, Code> {
    LIBRARY.get().ok_or(NOT_INITIALIZED)
}

impl Library {
    fn handles(&self) -> MutexGuard<'_, Handles> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts it.
fn start() {
    LIBRARY.get_or_init(|| {
        let words = std::env::var("FAKE_CUDA").unwrap_or_default();
        let mut behaviour = Behaviour { segment: SEGMENT, ..Behaviour::PLAIN };
        let mut faults = vec![];
        for word in words.split(',') {
            match word.split_once('=').unwrap_or((word, "")) {
                ("devices", count) => behaviour.devices = count.parse().expect("FAKE_CUDA: devices=N"),
                ("late", _) => {
                    (behaviour.late, behaviour.pieces) = (Behaviour::LATE.late, Behaviour::LATE.pieces)
                }
                ("differ", _) => behaviour.handles_differ = true,
                ("reopen", _) => behaviour.reopen = true,
                ("flush", _) => behaviour.must_flush = true,
                ("nowords", _) => behaviour.write_word = false,
                ("segments", _) => behaviour.kind = MemoryKind::Segments,
                ("fail", what) => faults.push(fault(what).expect("FAKE_CUDA: fail=CALL:SKIP:CODE")),
                ("", _) => {}
                (other, _) => panic!("FAKE_CUDA: {other}"),
            }
        }
        let process = FakeDriver::of_this_process(behaviour, u64::from(std::process::id()));
        for (call, skip, code) in faults {
            process.fail(call, skip, DeviceError::Driver(code));
        }
        if behaviour.late > 0 {
            let driver = process.driver().clone();
            // What a GPU does by itself. Ends with the process.
            std::thread::spawn(move || {
                loop {
                    driver.advance(1);
                    std::thread::sleep(Duration::from_micros(20));
                }
            });
        }
        // SAFETY: a function that may run at the end of the process.
        unsafe { libc::atexit(report) };
        Library { process, kind: behaviour.kind, handles: Mutex::default() }
    });
}

fn fault(what: &str) -> Option<(Call, u64, i32)> {
    let mut parts = what.split(':');
    let name = parts.next()?;
    let call = Call::ALL.into_iter().find(|call| format!("{call:?}") == name)?;
    Some((call, parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Writes what the process did.
extern "C" fn report() {
    let Some(path) = std::env::var_os("FAKE_CUDA_REPORT") else { return };
    let Ok(library) = library() else { return };
    let (counts, violations) = (library.process.counts(), library.process.driver().violations());
    // Handles of memory without addresses are taken too, and to be given back.
    let physical = library.handles().physical.iter().flatten().count() as u64;
    let line = format!(
        "pid {} calls {} opens {} closes {} held {} violations {violations:?}\n",
        std::process::id(),
        counts.calls.total(),
        counts.opens,
        counts.closes,
        counts.held() + physical,
    );
    if let Ok(mut file) = OpenOptions::new().append(true).create(true).open(path) {
        // One write, so that lines of several processes do not mix.
        // Nobody can be told that it failed.
        let _ = file.write_all(line.as_bytes());
    }
}

/// The device whose context is current.
fn current() -> Result<(&'static Library, u32), Code> {
    let library = library()?;
    let top = CONTEXTS.with_borrow(|contexts| contexts.last().copied());
    Ok((library, top.ok_or(INVALID_CONTEXT)?))
}

/// The driver's code for an error of the engine.
fn code(error: DeviceError) -> Code {
    match error {
        DeviceError::NoDevice(_) => INVALID_DEVICE,
        DeviceError::NotDeviceMemory | DeviceError::NotExportable(_) | DeviceError::BadHandle => {
            INVALID_VALUE
        }
        DeviceError::SameProcess => INVALID_CONTEXT,
        DeviceError::NoPeerAccess => 217,
        DeviceError::Exhausted => 2,
        DeviceError::Lost(code) | DeviceError::Driver(code) => code as Code,
        _ => 999,
    }
}

/// The answer of a function.
fn answer(outcome: Result<(), Code>) -> Code {
    outcome.err().unwrap_or(0)
}

/// A handle for something new.
fn add<T>(list: &mut Vec<Option<T>>, what: T) -> usize {
    list.push(Some(what));
    list.len()
}

/// What a handle stands for.
fn find<T>(list: &mut [Option<T>], handle: usize) -> Result<&mut Option<T>, Code> {
    let there = handle.checked_sub(1).and_then(|at| list.get_mut(at));
    there.filter(|there| there.is_some()).ok_or(INVALID_HANDLE)
}

/// Writes a result where the caller wants it.
///
/// # Safety
/// If it is not null, there is a place for it.
unsafe fn put<T>(place: *mut T, value: T) -> Result<(), Code> {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: our caller's promise. It need not be aligned: some results are written into bytes.
    unsafe { place.write_unaligned(value) };
    Ok(())
}

/// An ordinal, from what the driver calls a device.
fn ordinal(library: &Library, device: c_int) -> Result<u32, Code> {
    u32::try_from(device).ok().filter(|&ordinal| ordinal < library.process.devices()).ok_or(INVALID_DEVICE)
}
