//! A `libcuda.so` and a `libamdhip64.so` without a GPU: the functions that the device backends use,
//! over the fake driver. Device memory is host memory, which processes of one user can share.
//!
//! `tests/cuda-fake.sh` installs the library under one of these names in a folder of
//! `LD_LIBRARY_PATH`. The library has no other functions of the drivers.
//!
//! `FAKE_CUDA` selects the behaviour, as words separated by commas:
//!
//! | word | behaviour |
//! |---|---|
//! | `devices=N` | number of devices |
//! | `late` | a thread advances copies, which finish late and out of order |
//! | `differ` | handles of different addresses of one allocation differ, as in HIP |
//! | `reopen` | a handle can be opened repeatedly; opens are counted |
//! | `flush` | writes of NICs must be flushed |
//! | `nowords` | streams cannot store words |
//! | `hip=N` | HIP's version, 71460850 unless given |
//! | `segments` | `cuMemAlloc` maps adjacent physical segments, as a framework's allocator may |
//! | `fail=CALL:SKIP:CODE` | injects an error |
//!
//! If `FAKE_CUDA_REPORT` names a file, each process appends a line to that file at exit: its calls,
//! and the memory that it has not freed.
//!
//! `context` implements devices and contexts, `memory` all kinds of memory, `stream` streams and
//! events, and `hip` the functions of HIP.

mod context;
mod hip;
mod memory;
mod stream;

use std::cell::Cell;
use std::ffi::c_int;
use std::fs::OpenOptions;
use std::io::Write;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use fishplate_gpu::DeviceError;
use fishplate_gpu::fake::{
    Behaviour, Call, FakeDriver, FakePhysical, FakeProcess, MemoryKind, StreamId,
};

type Code = u32;

const INVALID_VALUE: Code = 1;
const NOT_INITIALIZED: Code = 3;
const INVALID_DEVICE: Code = 101;
const INVALID_CONTEXT: Code = 201;
const INVALID_HANDLE: Code = 400;
const NOT_FOUND: Code = 500;
const NOT_READY: Code = 600;
const NOT_SUPPORTED: Code = 801;

const SEGMENT: u64 = 1 << 16;

/// A pinned host range: host address, length, device address.
type Pin = (usize, usize, u64);

struct Library {
    process: FakeProcess,
    kind: MemoryKind,
    hip: c_int,
    handles: Mutex<Handles>,
}

/// A handle is an index plus 1.
#[derive(Default)]
struct Handles {
    streams: Vec<Option<StreamId>>,
    /// The stream and position that each event last recorded.
    events: Vec<Option<Option<(StreamId, u64)>>>,
    physical: Vec<Option<FakePhysical>>,
    pins: Vec<Pin>,
    defaults: Vec<(u32, StreamId)>,
}

static LIBRARY: OnceLock<Library> = OnceLock::new();

thread_local! {
    static CONTEXT: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Returns the library. Fails before `cuInit`.
fn library() -> Result<&'static Library, Code> {
    LIBRARY.get().ok_or(NOT_INITIALIZED)
}

impl Library {
    fn handles(&self) -> MutexGuard<'_, Handles> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn start() {
    LIBRARY.get_or_init(|| {
        let words = std::env::var("FAKE_CUDA").unwrap_or_default();
        let mut behaviour = Behaviour { segment: SEGMENT, ..Behaviour::PLAIN };
        let (mut faults, mut hip, mut apart) = (vec![], 71_460_850, false);
        for word in words.split(',') {
            match word.split_once('=').unwrap_or((word, "")) {
                ("devices", count) => {
                    behaviour.devices = count.parse().expect("FAKE_CUDA: devices=N")
                }
                ("late", _) => {
                    (behaviour.late, behaviour.pieces) =
                        (Behaviour::LATE.late, Behaviour::LATE.pieces)
                }
                ("differ", _) => behaviour.handles_differ = true,
                ("reopen", _) => behaviour.reopen = true,
                ("flush", _) => behaviour.must_flush = true,
                ("nowords", _) => behaviour.write_word = false,
                ("hip", version) => hip = version.parse().expect("FAKE_CUDA: hip=N"),
                ("apart", _) => apart = true,
                ("segments", _) => behaviour.kind = MemoryKind::Segments,
                ("fail", what) => faults.push(fault(what).expect("FAKE_CUDA: fail=CALL:SKIP:CODE")),
                ("", _) => {}
                (other, _) => panic!("FAKE_CUDA: {other}"),
            }
        }
        let process = FakeDriver::of_this_process(behaviour, u64::from(std::process::id()));
        if apart {
            process.driver().part(0, 1);
        }
        for (call, skip, code) in faults {
            process.fail(call, skip, DeviceError::Driver(code));
        }
        if behaviour.late > 0 {
            let driver = process.driver().clone();
            // Advances copies as a GPU would. The thread ends with the process.
            std::thread::spawn(move || {
                loop {
                    driver.advance(1);
                    std::thread::sleep(Duration::from_micros(20));
                }
            });
        }
        // SAFETY: `report` has no arguments and may run at exit.
        unsafe { libc::atexit(report) };
        Library { process, kind: behaviour.kind, hip, handles: Mutex::default() }
    });
}

/// Returns the version that HIP reports. Initialises the library if necessary.
fn version() -> c_int {
    start();
    library().map_or(0, |library| library.hip)
}

fn fault(what: &str) -> Option<(Call, u64, i32)> {
    let mut parts = what.split(':');
    let name = parts.next()?;
    let call = Call::ALL.into_iter().find(|call| format!("{call:?}") == name)?;
    Some((call, parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

extern "C" fn report() {
    let Some(path) = std::env::var_os("FAKE_CUDA_REPORT") else { return };
    let Ok(library) = library() else { return };
    let (counts, violations) = (library.process.counts(), library.process.driver().violations());
    // A handle of physical memory must be released even after its memory is unmapped.
    let physical = library.handles().physical.iter().flatten().count() as u64;
    let line = format!(
        "pid {} calls {} flushes {} opens {} closes {} held {} violations {violations:?}\n",
        std::process::id(),
        counts.calls.total(),
        counts.calls[Call::Flush],
        counts.opens,
        counts.closes,
        counts.held() + physical,
    );
    if let Ok(mut file) = OpenOptions::new().append(true).create(true).open(path) {
        // Makes one write, so that lines of several processes do not mix. Ignores errors, because
        // this runs at exit.
        let _ = file.write_all(line.as_bytes());
    }
}

fn current() -> Result<(&'static Library, u32), Code> {
    let library = library()?;
    Ok((library, CONTEXT.get().ok_or(INVALID_CONTEXT)?))
}

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

fn answer(outcome: Result<(), Code>) -> Code {
    outcome.err().unwrap_or(0)
}

fn add<T>(list: &mut Vec<Option<T>>, what: T) -> usize {
    list.push(Some(what));
    list.len()
}

/// Returns the object of a handle. Fails if the handle is invalid or the object was removed.
fn find<T>(list: &mut [Option<T>], handle: usize) -> Result<&mut Option<T>, Code> {
    let there = handle.checked_sub(1).and_then(|at| list.get_mut(at));
    there.filter(|there| there.is_some()).ok_or(INVALID_HANDLE)
}

/// Writes a result.
///
/// # Safety
/// `place` is null or writable.
unsafe fn put<T>(place: *mut T, value: T) -> Result<(), Code> {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: `place` is not null, so the caller guarantees that it is writable. It may be
    // misaligned, because some results are bytes.
    unsafe { place.write_unaligned(value) };
    Ok(())
}

fn ordinal(library: &Library, device: c_int) -> Result<u32, Code> {
    u32::try_from(device)
        .ok()
        .filter(|&ordinal| ordinal < library.process.devices())
        .ok_or(INVALID_DEVICE)
}
