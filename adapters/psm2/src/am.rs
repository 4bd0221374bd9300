//! Active messages: a request runs a handler at its target, which may reply once.
//!
//! Active messages are tagged messages of a second node, so no receive of the program matches them.
//! The node opens on the first call of this interface. Peers learn its address when they connect.
//!
//! Handlers run inside calls that make progress: one at a time, in message order, and without a
//! lock held. A request waits for room, and makes progress meanwhile. A request from a handler does
//! not wait either: it is refused if there is no room.

use std::cell::Cell;
use std::ffi::c_void;
use std::mem::transmute;

use fishplate::PeerId;

use crate::active::{ARGS, Am, Claimed, DONE, PAYLOAD, SENDS};
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::handle::{Ep, EpAddr};
use crate::home::Home;
use crate::open::open_node;
use crate::table::{find, find_address, guard};

const HANDLERS: usize = 1024;

const BATCH: usize = 32;

/// Message kinds. The low byte of the first tag word is the kind; the next byte is the number of
/// arguments.
const REQUEST: u32 = 1;
const REQUEST_NOREPLY: u32 = 2;
const REPLY: u32 = 3;

const ASYNC: i32 = 1;
const NOREPLY: i32 = 2;

/// `psm2_am_handler_2_fn_t` and `psm2_am_completion_fn_t`.
type Handler =
    unsafe extern "C" fn(*mut c_void, *mut u64, i32, *mut c_void, u32, *mut c_void) -> i32;
type Completion = unsafe extern "C" fn(*mut c_void);

/// `struct psm2_am_parameters`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AmParameters([u32; 4]);

enum Job {
    Handle {
        peer: PeerId,
        handler: (usize, usize),
        kind: u32,
        token: u64,
        args: Vec<u64>,
        data: Box<[u8]>,
    },
    Complete(Vec<(usize, usize)>),
}

#[derive(Clone, Copy)]
struct Current {
    home: Home,
    peer: PeerId,
    may_reply: bool,
    token: usize,
}

thread_local! {
    static CURRENT: Cell<Option<Current>> = const { Cell::new(None) };
    static SERVES: Cell<bool> = const { Cell::new(false) };
    static TOKENS: Cell<usize> = const { Cell::new(1) };
}

impl Endpoint {
    fn open_am(&mut self) -> Result<&mut Am, Error> {
        if self.am.is_none() {
            let node = open_node(SENDS, None).map_err(|_| Error::DEVICE_FAILURE)?;
            self.am = Some(Box::new(Am::new(node, SENDS)));
            self.serve = Some(serve);
        }
        self.am.as_deref_mut().ok_or(Error::INTERNAL)
    }

    /// Receives the next active message, and returns the callback that handles it. Drops invalid
    /// messages.
    fn am_job(&mut self) -> Option<Job> {
        let am = self.am.as_deref_mut()?;
        let Claimed { from, tag: [first, handler, _], len, bytes } = am.next()?;
        let peer = self.peers.iter().find(|peer| peer.am == Some(from))?.id;
        let (kind, args) = (first & 0xff, (first >> 8) as usize);
        let word =
            |at: usize| bytes.get(8 * at..8 * at + 8)?.try_into().ok().map(u64::from_le_bytes);
        if args > ARGS || !(8 * (args + 1)..=8 * (args + 1) + PAYLOAD).contains(&len) {
            return None;
        }
        let token = word(0)?;
        if kind == DONE {
            am.busy = true;
            return Some(Job::Complete(am.completed(from, token)));
        }
        if !(REQUEST..=REPLY).contains(&kind) {
            return None;
        }
        let Some(&handler) = am.handlers.get(handler as usize) else {
            am.done(from, token);
            return None;
        };
        am.busy = true;
        let data = bytes[8 * (args + 1)..len].into();
        let args = (1..=args).map_while(word).collect();
        Some(Job::Handle { peer, handler, kind, token, args, data })
    }
}

/// Handles active messages, at most `BATCH` per call. The caller must hold no lock.
#[cold]
fn serve(home: Home) {
    if SERVES.replace(true) {
        return;
    }
    for _ in 0..BATCH {
        let Some(job) = home.find().and_then(|mut endpoint| endpoint.am_job()) else { break };
        run(home, job);
    }
    SERVES.set(false);
}

fn run(home: Home, job: Job) {
    let mut done = None;
    match job {
        Job::Complete(all) => {
            for (function, context) in all {
                // SAFETY: the program passed this function with this context to one request, and
                // `completed` removed that entry, so the function runs once.
                unsafe {
                    transmute::<*const (), Completion>(function as *const ())(
                        context as *mut c_void,
                    );
                }
            }
        }
        Job::Handle { peer, handler: (function, context), kind, token, mut args, mut data } => {
            let number = TOKENS.replace(TOKENS.get().wrapping_add(1).max(1));
            let current = Current { home, peer, may_reply: kind == REQUEST, token: number };
            let outer = CURRENT.replace(Some(current));
            let (args, count) = (args.as_mut_ptr(), args.len() as i32);
            let (src, len) = (data.as_mut_ptr().cast(), data.len() as u32);
            // SAFETY: the program registered this function with this context. `args` and `data` are
            // owned here and outlive the call.
            unsafe {
                let handler = transmute::<*const (), Handler>(function as *const ());
                handler(number as *mut c_void, args, count, src, len, context as *mut c_void);
            }
            CURRENT.set(outer);
            done = Some((peer, token));
        }
    }
    let Some(mut endpoint) = home.find() else { return };
    let to = done.and_then(|(peer, token)| Some((endpoint.am_of(peer)?, token)));
    let Some(am) = endpoint.am.as_deref_mut() else { return };
    am.busy = false;
    if let Some((to, token)) = to {
        am.done(to, token);
    }
}

struct Message {
    tag: [u32; 3],
    bytes: Box<[u8]>,
    completion: Option<(usize, usize)>,
}

impl Message {
    /// # Safety
    /// `args` is valid for `count` reads and `src` for `len` bytes, unless null.
    #[expect(clippy::too_many_arguments, reason = "as PSM2 has them")]
    unsafe fn new(
        kind: u32,
        handler: u32,
        args: *const u64,
        count: i32,
        src: *const c_void,
        len: usize,
        function: *mut c_void,
        context: *mut c_void,
    ) -> Result<Message, Error> {
        let count = usize::try_from(count).map_err(|_| Error::PARAM)?;
        if count > ARGS
            || len > PAYLOAD
            || (count != 0 && args.is_null())
            || (len != 0 && src.is_null())
        {
            return Err(Error::PARAM);
        }
        let mut bytes = vec![0; 8];
        for at in 0..count {
            // SAFETY: `args` was checked not null. The caller guarantees `count` arguments, which
            // may be unaligned.
            bytes.extend(unsafe { args.add(at).read_unaligned() }.to_le_bytes());
        }
        if len != 0 {
            // SAFETY: `src` was checked not null, and the caller guarantees `len` readable bytes
            // there.
            bytes.extend(unsafe { std::slice::from_raw_parts(src.cast::<u8>(), len) });
        }
        let completion = (!function.is_null()).then_some((function.addr(), context.addr()));
        Ok(Message {
            tag: [kind | (count as u32) << 8, handler, 0],
            bytes: bytes.into(),
            completion,
        })
    }

    fn send(self, endpoint: &mut Endpoint, peer: PeerId) -> Result<(), Error> {
        let to = endpoint.am_of(peer).ok_or(Error::PARAM)?;
        let am = endpoint.am.as_deref_mut().ok_or(Error::PARAM)?;
        let request = self.tag[0] & 0xff != REPLY;
        match self.completion {
            Some(completion) => am.send_counted(to, self.tag, self.bytes, request, completion),
            None => am.send(to, self.tag, self.bytes, request),
        }
    }
}

/// Writes the limits of active messages.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_am_get_parameters(
    ep: *mut Ep,
    parameters: *mut AmParameters,
    size: usize,
    written: *mut usize,
) -> Error {
    if parameters.is_null() || size < size_of::<AmParameters>() {
        return Error::PARAM;
    }
    guard(|| {
        let Some(mut endpoint) = find(ep) else { return Error::PARAM };
        if let Err(error) = endpoint.open_am() {
            return error;
        }
        let limits = [HANDLERS as u32, ARGS as u32, PAYLOAD as u32, PAYLOAD as u32];
        // SAFETY: `parameters` was checked not null and large enough. PSM2 requires it to be
        // writable, and `written` to be null or writable.
        unsafe {
            parameters.write(AmParameters(limits));
            if let Some(written) = written.as_mut() {
                *written = size_of::<AmParameters>();
            }
        }
        Error::OK
    })
}

/// Registers handlers, and writes their indexes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_am_register_handlers_2(
    ep: *mut Ep,
    handlers: *const usize,
    count: i32,
    contexts: *const *mut c_void,
    indexes: *mut i32,
) -> Error {
    let Ok(count) = usize::try_from(count) else { return Error::PARAM };
    if count != 0 && (handlers.is_null() || contexts.is_null() || indexes.is_null()) {
        return Error::PARAM;
    }
    guard(|| {
        let Some(mut endpoint) = find(ep) else { return Error::PARAM };
        let am = match endpoint.open_am() {
            Ok(am) => am,
            Err(error) => return error,
        };
        if am.handlers.len() + count > HANDLERS {
            return Error::NO_RESOURCES;
        }
        // SAFETY: the pointers were checked not null, and PSM2 requires arrays of `count` elements.
        let all = unsafe {
            (0..count).map(|at| (*handlers.add(at), (*contexts.add(at)).addr())).collect::<Vec<_>>()
        };
        if all.iter().any(|(function, _)| *function == 0) {
            return Error::PARAM;
        }
        for (at, handler) in all.into_iter().enumerate() {
            // SAFETY: `indexes` was checked not null, and `at < count`, the length of the caller's
            // array.
            unsafe { indexes.add(at).write(am.handlers.len() as i32) };
            am.handlers.push(handler);
        }
        Error::OK
    })
}

/// Runs a handler at a peer. Copies the payload.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_am_request_short(
    to: *mut EpAddr,
    handler: u32,
    args: *mut u64,
    count: i32,
    src: *mut c_void,
    len: usize,
    flags: i32,
    function: *mut c_void,
    context: *mut c_void,
) -> Error {
    if flags & !(ASYNC | NOREPLY) != 0 {
        return Error::PARAM;
    }
    let kind = if flags & NOREPLY == 0 { REQUEST } else { REQUEST_NOREPLY };
    // SAFETY: PSM2 requires the caller to pass `count` arguments and `len` bytes.
    let message = unsafe { Message::new(kind, handler, args, count, src, len, function, context) };
    guard(|| message.and_then(|message| request(to, message)).err().unwrap_or(Error::OK))
}

/// Sends a request. Waits for room, unless a handler made the call.
fn request(to: *mut EpAddr, message: Message) -> Result<(), Error> {
    loop {
        let (mut endpoint, peer) = find_address(to).ok_or(Error::PARAM)?;
        let at = endpoint.am_of(peer).ok_or(Error::PARAM)?;
        let am = endpoint.am.as_deref_mut().ok_or(Error::PARAM)?;
        if am.has_room(at) {
            let (due, home) = (am.is_due(), endpoint.home);
            let sent = message.send(&mut endpoint, peer);
            drop(endpoint);
            if due {
                serve(home);
            }
            return sent;
        }
        if SERVES.get() {
            // No message is handled while a handler runs, so waiting could deadlock.
            return Err(Error::NO_RESOURCES);
        }
        endpoint.reached(peer)?;
        let after = endpoint.after(false);
        drop(endpoint);
        after.act();
    }
}

/// Runs a handler at the sender of the current request. Allowed once per request, inside its
/// handler.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_am_reply_short(
    token: *mut c_void,
    handler: u32,
    args: *mut u64,
    count: i32,
    src: *mut c_void,
    len: usize,
    flags: i32,
    function: *mut c_void,
    context: *mut c_void,
) -> Error {
    if flags & !ASYNC != 0 {
        return Error::PARAM;
    }
    // SAFETY: PSM2 requires the caller to pass `count` arguments and `len` bytes.
    let message = unsafe { Message::new(REPLY, handler, args, count, src, len, function, context) };
    guard(|| message.and_then(|message| reply(token, message)).err().unwrap_or(Error::OK))
}

fn reply(token: *mut c_void, message: Message) -> Result<(), Error> {
    let current =
        CURRENT.get().filter(|current| current.token == token.addr() && current.may_reply);
    let current = current.ok_or(Error::PARAM)?;
    message.send(&mut *current.home.find().ok_or(Error::PARAM)?, current.peer)?;
    CURRENT.set(Some(Current { may_reply: false, ..current }));
    Ok(())
}

/// Writes the address of the peer that sent the current message.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_am_get_source(token: *mut c_void, source: *mut *mut EpAddr) -> Error {
    match CURRENT.get().filter(|current| current.token == token.addr()) {
        Some(current) if !source.is_null() => {
            // SAFETY: `source` was checked not null, and PSM2 requires it to be writable.
            unsafe { source.write(current.home.address(current.peer)) };
            Error::OK
        }
        _ => Error::PARAM,
    }
}
