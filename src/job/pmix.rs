//! Joins a job through PMIx, the interface of the launchers of Open MPI and Slurm. Uses
//! `libpmix.so.2` if it is installed. PMIx carries rank 0's id to the other ranks, which then join
//! rank 0 over TCP.
//!
//! The library runs its own thread until the job has formed. Blocks at most until the deadline,
//! except in `PMIx_Init` and `PMIx_Finalize`, which talk to the launcher's local daemon.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::{self, ErrorKind};
use std::mem;
use std::ptr::{null, null_mut};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::id::{Cookie, UniqueId};
use super::leader::Leader;
use super::meet::{self, Entry};
use super::{Job, Ranks, round};

const KEY: &CStr = c"fishplate-job";
const JOB_SIZE: &CStr = c"pmix.job.size";
const LOCAL_RANK: &CStr = c"pmix.lrank";

/// `PMIX_GLOBAL`, `PMIX_STRING`, `PMIX_UINT16`, `PMIX_UINT32`, `PMIX_RANK_WILDCARD`.
const GLOBAL: u8 = 3;
const STRING: u16 = 3;
const UINT16: u16 = 13;
const UINT32: u16 = 14;
const WILDCARD: u32 = u32::MAX - 1;

/// `pmix_proc_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Process {
    space: [c_char; 256],
    rank: u32,
}

/// `pmix_value_t`: 32 bytes. Only the first word of the union is used.
#[repr(C)]
struct Value {
    kind: u16,
    data: [u64; 3],
}

type Callback = extern "C" fn(c_int, *mut Value, *mut c_void);
type Init = unsafe extern "C" fn(*mut Process, *const c_void, usize) -> c_int;
type Finalize = unsafe extern "C" fn(*const c_void, usize) -> c_int;
type Put = unsafe extern "C" fn(u8, *const c_char, *mut Value) -> c_int;
type Commit = unsafe extern "C" fn() -> c_int;
type Get = unsafe extern "C" fn(
    *const Process,
    *const c_char,
    *const c_void,
    usize,
    *mut *mut Value,
) -> c_int;
type GetNb = unsafe extern "C" fn(
    *const Process,
    *const c_char,
    *const c_void,
    usize,
    Callback,
    *mut c_void,
) -> c_int;

/// The PMIx functions that we call. Every `libpmix.so.2` has these signatures.
pub(super) struct Library {
    init: Init,
    finalize: Finalize,
    put: Put,
    commit: Commit,
    get: Get,
    get_nb: GetNb,
}

impl Library {
    /// Loads the library, and never unloads it.
    ///
    /// # Errors
    /// The message names the missing library or symbol.
    pub fn load() -> Result<Library, String> {
        // SAFETY: the name is a C string. Loading runs only the initializers of the system's own
        // PMIx library.
        let handle =
            unsafe { libc::dlopen(c"libpmix.so.2".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(
                "cannot load libpmix.so.2, but PMIX_NAMESPACE is set; install PMIx, or set \
                 FISHPLATE_RENDEZVOUS"
                    .into(),
            );
        }
        let find = |name: &CStr| {
            // SAFETY: `handle` is an open library, and `name` is a C string.
            let symbol = unsafe { libc::dlsym(handle, name.as_ptr()) };
            if symbol.is_null() {
                Err(format!("libpmix.so.2 has no {}", name.to_string_lossy()))
            } else {
                Ok(symbol)
            }
        };
        // SAFETY: the types are the C signatures of these functions.
        unsafe {
            Ok(Library {
                init: mem::transmute::<*mut c_void, Init>(find(c"PMIx_Init")?),
                finalize: mem::transmute::<*mut c_void, Finalize>(find(c"PMIx_Finalize")?),
                put: mem::transmute::<*mut c_void, Put>(find(c"PMIx_Put")?),
                commit: mem::transmute::<*mut c_void, Commit>(find(c"PMIx_Commit")?),
                get: mem::transmute::<*mut c_void, Get>(find(c"PMIx_Get")?),
                get_nb: mem::transmute::<*mut c_void, GetNb>(find(c"PMIx_Get_nb")?),
            })
        }
    }
}

pub(super) fn join(library: &Library, timeout: Duration) -> io::Result<Job> {
    let mut own = Process { space: [0; 256], rank: 0 };
    // SAFETY: `own` is writable for the answer. A list of zero settings may be null.
    check("PMIx_Init", unsafe { (library.init)(&mut own, null(), 0) })?;
    let entry = Entry::new(Some(own.rank as usize), size(library, &own)?, Cookie::NONE, timeout)?;
    // Without it the job works too: it only spreads processes over NICs.
    let local_rank = number(library, &own, LOCAL_RANK).ok();
    let mut job = match own.rank {
        0 => lead(library, &entry),
        _ => follow(library, &own, &entry),
    }?;
    job.local_rank = local_rank;
    // SAFETY: a list of zero settings may be null. No request is pending: `follow` has received its
    // answer.
    check("PMIx_Finalize", unsafe { (library.finalize)(null(), 0) })?;
    Ok(job)
}

fn check(call: &str, status: c_int) -> io::Result<()> {
    if status == 0 { Ok(()) } else { Err(failed(call, status)) }
}

fn failed(call: &str, status: c_int) -> io::Error {
    let text =
        format!("{call} failed: status {status}; set FISHPLATE_RENDEZVOUS to meet without PMIx");
    io::Error::other(text)
}

fn size(library: &Library, own: &Process) -> io::Result<usize> {
    number(library, &Process { rank: WILDCARD, ..*own }, JOB_SIZE)
}

/// Returns a number that the launcher has set for a process.
fn number(library: &Library, of: &Process, key: &CStr) -> io::Result<usize> {
    let mut value = null_mut();
    // SAFETY: the process and the C string live until the call returns, and `value` receives a
    // pointer.
    check("PMIx_Get", unsafe { (library.get)(of, key.as_ptr(), null(), 0, &mut value) })?;
    // SAFETY: `value` is null, or a value that the library allocated for us. Nothing ever frees it,
    // because it is small.
    if let Some(Value { kind, data: [first, ..] }) = unsafe { value.as_ref() } {
        let [a, b, c, d, ..] = first.to_ne_bytes();
        match *kind {
            UINT16 => return Ok(u16::from_ne_bytes([a, b]).into()),
            UINT32 => return Ok(u32::from_ne_bytes([a, b, c, d]) as usize),
            _ => {}
        }
    }
    let text = format!("PMIx_Get failed: {} is not a number", key.to_string_lossy());
    Err(io::Error::new(ErrorKind::InvalidData, text))
}

fn lead(library: &Library, entry: &Entry) -> io::Result<Job> {
    let leader = Leader::open()?;
    let text = CString::new(leader.id().to_hex()).expect("digits have no NUL");
    let mut value = Value { kind: STRING, data: [0; 3] };
    value.data[0] = text.as_ptr() as u64;
    // SAFETY: the key is a C string, and the call copies the string of `value`.
    check("PMIx_Put", unsafe { (library.put)(GLOBAL, KEY.as_ptr(), &mut value) })?;
    // SAFETY: the call takes no arguments, and the library is initialized.
    check("PMIx_Commit", unsafe { (library.commit)() })?;
    leader.lead_as(entry)
}

#[derive(Default)]
struct Answer {
    value: Mutex<Option<Result<String, c_int>>>,
    there: Condvar,
}

/// The callback that delivers an answer. The library's thread calls it once for each request.
extern "C" fn answered(status: c_int, value: *mut Value, answer: *mut c_void) {
    // SAFETY: `ask` turned this reference into a pointer for this one call.
    let answer = unsafe { Arc::from_raw(answer.cast_const().cast::<Answer>()) };
    // SAFETY: `value` is null, or points to a value that lives until this returns. Its string
    // pointer is null or a C string.
    let text = unsafe {
        match value.as_ref() {
            Some(Value { kind: STRING, data }) if data[0] != 0 => {
                Ok(CStr::from_ptr(data[0] as *const c_char).to_string_lossy().into_owned())
            }
            _ => Err(status),
        }
    };
    *answer.value.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
    answer.there.notify_one();
}

/// `PMIX_ERR_NOT_FOUND`: the key is not published yet. Some launchers return this status instead of
/// waiting.
const NOT_FOUND: c_int = -46;

const AGAIN: Duration = Duration::from_millis(10);

fn follow(library: &Library, own: &Process, entry: &Entry) -> io::Result<Job> {
    loop {
        match ask(library, own, entry)? {
            Ok(text) => return meet::at_leader(&UniqueId::from_hex(&text)?, entry),
            Err(NOT_FOUND) if !entry.has_expired() => sleep(AGAIN),
            Err(NOT_FOUND) => return Err(round::expired(&Ranks::one(0), entry.timeout)),
            Err(status) => return Err(failed("PMIx_Get_nb", status)),
        }
    }
}

fn ask(library: &Library, own: &Process, entry: &Entry) -> io::Result<Result<String, c_int>> {
    let (leader, answer) = (Process { rank: 0, ..*own }, Arc::new(Answer::default()));
    let given = Arc::into_raw(answer.clone()).cast_mut().cast();
    // SAFETY: the pointers are valid during the call, which copies the process and the key. The
    // answer lives until the callback drops it.
    match unsafe { (library.get_nb)(&leader, KEY.as_ptr(), null(), 0, answered, given) } {
        0 => {}
        // The request failed, so no callback will run. The answer's memory leaks.
        status => return Ok(Err(status)),
    }
    let mut value = answer.value.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        match value.take() {
            Some(text) => return Ok(text),
            None if entry.has_expired() => {
                return Err(round::expired(&Ranks::one(0), entry.timeout));
            }
            None => {
                let left = entry.deadline.saturating_duration_since(Instant::now());
                let waited = answer.there.wait_timeout(value, left);
                value = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}
