//! A provider that does nothing, behind the real wrappers. It accepts posts while its queue has
//! room, and reports them complete at the next queue read. So instruction counts cover only our own
//! code.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering::Relaxed};

use fishplate_sys::fabric::Library;
use fishplate_sys::fabric::library::Entries;
use fishplate_sys::fabric::raw::*;

const ROOM: usize = 256;

/// Number of peer writes to report, and their data. Only the benchmark's thread uses these.
static ARRIVALS: AtomicU64 = AtomicU64::new(0);
static DATA: AtomicU64 = AtomicU64::new(0);

/// Number of writes that one answer acknowledges (0 for no answers), and the bytes of the answer
/// without its count.
static EVERY: AtomicU64 = AtomicU64::new(0);
static ANSWER: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

static MESSAGES: AtomicPtr<fi_ops_msg> = AtomicPtr::new(ptr::null_mut());
static ECHOED: [AtomicU64; 3] = [AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0)];

/// Length of an echoed message: the rail's header and an engine's Hello.
const ECHO: usize = 24;

#[repr(C)]
struct Queue {
    fid: fid_cq,
    posts: [(*mut c_void, u64); ROOM],
    head: usize,
    tail: usize,
    accepted: u64,
    answered: u64,
    receive: (*mut c_void, *mut c_void),
}

#[repr(C)]
struct End {
    fid: fid_ep,
    queue: *mut Queue,
}

fn leak<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

unsafe fn zeroed<T>() -> *mut T {
    // SAFETY: the callers create structures of integers and nullable pointers, for which zero is
    // valid.
    leak(unsafe { std::mem::zeroed() })
}

unsafe extern "C" fn getinfo(
    _: u32,
    _: *const c_char,
    _: *const c_char,
    _: u64,
    hints: *const fi_info,
    list: *mut *mut fi_info,
) -> c_int {
    // SAFETY: the caller passes valid hints, and everything else is created here.
    unsafe {
        let info = dupinfo(hints);
        (*info).mode = 0;
        (*(*info).fabric_attr).prov_name = libc::strdup(c"noop".as_ptr());
        (*(*info).tx_attr).inject_size = 64;
        (*(*info).tx_attr).size = ROOM;
        (*(*info).rx_attr).size = ROOM;
        (*(*info).ep_attr).max_msg_size = 1 << 30;
        (*(*info).domain_attr).cq_data_size = 8;
        (*(*info).domain_attr).mr_key_size = 8;
        (*(*info).domain_attr).mr_mode = 0;
        *list = info;
    }
    0
}

unsafe extern "C" fn freeinfo(_: *mut fi_info) {}

unsafe extern "C" fn dupinfo(from: *const fi_info) -> *mut fi_info {
    // SAFETY: each part of the hints is null or valid, and zero is valid for every field.
    unsafe {
        let info: *mut fi_info = zeroed();
        if !from.is_null() {
            *info = *from;
        }
        fn copy<T: Copy>(part: *mut T, otherwise: *mut T) -> *mut T {
            // SAFETY: the part is not null, so it is valid.
            if part.is_null() { otherwise } else { leak(unsafe { *part }) }
        }
        (*info).tx_attr = copy((*info).tx_attr, zeroed());
        (*info).rx_attr = copy((*info).rx_attr, zeroed());
        (*info).ep_attr = copy((*info).ep_attr, zeroed());
        (*info).domain_attr = copy((*info).domain_attr, zeroed());
        (*info).fabric_attr = copy((*info).fabric_attr, zeroed());
        (*info).next = ptr::null_mut();
        // The copy owns its strings.
        let name = &mut (*(*info).fabric_attr).prov_name;
        *name = if name.is_null() { ptr::null_mut() } else { libc::strdup(*name) };
        info
    }
}

unsafe extern "C" fn version() -> u32 {
    fi_version(1, 17)
}

unsafe extern "C" fn words(_: c_int) -> *const c_char {
    c"nothing".as_ptr()
}

unsafe extern "C" fn show(_: *const c_void, _: c_int) -> *mut c_char {
    c"nothing".as_ptr().cast_mut()
}

unsafe extern "C" fn close(_: *mut fid) -> c_int {
    0
}

unsafe extern "C" fn bind(object: *mut fid, to: *mut fid, _: u64) -> c_int {
    // SAFETY: both objects were created by this file, and `fclass` identifies their type.
    unsafe {
        if (*object).fclass == FI_CLASS_EP && (*to).fclass == FI_CLASS_CQ {
            (*object.cast::<End>()).queue = to.cast();
        }
    }
    0
}

unsafe extern "C" fn control(_: *mut fid, _: c_int, _: *mut c_void) -> c_int {
    0
}

macro_rules! table {
    ($table:ident { $($entry:ident: $function:expr),* $(,)? }) => {{
        // SAFETY: the table consists of nullable functions.
        let table: *mut $table = unsafe { zeroed() };
        // SAFETY: `table` was just allocated.
        unsafe {
            (*table).size = size_of::<$table>();
            $((*table).$entry = Some($function);)*
        }
        table
    }};
}

fn object(class: usize) -> fid {
    fid {
        fclass: class,
        context: ptr::null_mut(),
        ops: table!(fi_ops { close: close, bind: bind, control: control }),
    }
}

unsafe extern "C" fn fabric(
    _: *mut fi_fabric_attr,
    fabric: *mut *mut fid_fabric,
    _: *mut c_void,
) -> c_int {
    let ops = table!(fi_ops_fabric { domain: domain });
    // SAFETY: libfabric requires the caller to pass a valid output pointer.
    unsafe { *fabric = leak(fid_fabric { fid: object(FI_CLASS_FABRIC), ops, api_version: 0 }) };
    0
}

unsafe extern "C" fn domain(
    _: *mut fid_fabric,
    _: *mut fi_info,
    domain: *mut *mut fid_domain,
    _: *mut c_void,
) -> c_int {
    let ops = table!(fi_ops_domain { av_open: av_open, cq_open: cq_open, endpoint: endpoint });
    let mr = table!(fi_ops_mr { reg: register });
    // SAFETY: libfabric requires the caller to pass a valid output pointer.
    unsafe { *domain = leak(fid_domain { fid: object(FI_CLASS_DOMAIN), ops, mr }) };
    0
}

#[allow(clippy::too_many_arguments, reason = "C's")]
unsafe extern "C" fn register(
    _: *mut fid,
    _: *const c_void,
    _: usize,
    _: u64,
    _: u64,
    key: u64,
    _: u64,
    mr: *mut *mut fid_mr,
    _: *mut c_void,
) -> c_int {
    // SAFETY: libfabric requires the caller to pass a valid output pointer.
    unsafe { *mr = leak(fid_mr { fid: object(FI_CLASS_MR), mem_desc: ptr::null_mut(), key }) };
    0
}

unsafe extern "C" fn av_open(
    _: *mut fid_domain,
    _: *mut fi_av_attr,
    av: *mut *mut fid_av,
    _: *mut c_void,
) -> c_int {
    let ops = table!(fi_ops_av { insert: insert });
    // SAFETY: libfabric requires the caller to pass a valid output pointer.
    unsafe { *av = leak(fid_av { fid: object(FI_CLASS_AV), ops }) };
    0
}

unsafe extern "C" fn insert(
    _: *mut fid_av,
    _: *const c_void,
    _: usize,
    number: *mut u64,
    _: u64,
    _: *mut c_void,
) -> c_int {
    // SAFETY: libfabric requires the caller to pass a valid output pointer.
    unsafe { *number = 0 };
    1
}

unsafe extern "C" fn cq_open(
    _: *mut fid_domain,
    _: *mut fi_cq_attr,
    cq: *mut *mut fid_cq,
    _: *mut c_void,
) -> c_int {
    let ops = table!(fi_ops_cq { read: read, readfrom: readfrom, readerr: readerr });
    let fid = fid_cq { fid: object(FI_CLASS_CQ), ops };
    let posts = [(ptr::null_mut(), 0); ROOM];
    // SAFETY: libfabric requires the caller to pass a valid output pointer.
    unsafe {
        let receive = (ptr::null_mut(), ptr::null_mut());
        *cq =
            leak(Queue { fid, posts, head: 0, tail: 0, accepted: 0, answered: 0, receive }).cast();
    }
    0
}

unsafe extern "C" fn read(cq: *mut fid_cq, into: *mut c_void, count: usize) -> isize {
    // SAFETY: this file created the queue, and the caller has room for `count` entries.
    unsafe {
        let queue = &mut *cq.cast::<Queue>();
        let entries = into.cast::<fi_cq_data_entry>();
        let mut n = 0;
        while n < count && queue.head != queue.tail {
            let (op_context, flags) = queue.posts[queue.head % ROOM];
            // The length matters only for messages.
            *entries.add(n) =
                fi_cq_data_entry { op_context, flags, len: ECHO, buf: ptr::null_mut(), data: 0 };
            queue.head += 1;
            n += 1;
        }
        let mut arrivals = ARRIVALS.load(Relaxed);
        while n < count && arrivals != 0 {
            let flags = FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA;
            let (op_context, buf, data) = (ptr::null_mut(), ptr::null_mut(), DATA.load(Relaxed));
            *entries.add(n) = fi_cq_data_entry { op_context, flags, len: 0, buf, data };
            arrivals -= 1;
            n += 1;
        }
        ARRIVALS.store(arrivals, Relaxed);
        let every = EVERY.load(Relaxed);
        if every != 0 && n < count && queue.accepted - queue.answered >= every {
            queue.answered += every;
            let (buffer, op_context) = queue.receive;
            let said = [ANSWER[0].load(Relaxed), ANSWER[1].load(Relaxed), queue.answered];
            buffer.cast::<[u64; 3]>().write_unaligned(said);
            let (flags, buf) = (FI_MSG | FI_RECV, ptr::null_mut());
            *entries.add(n) =
                fi_cq_data_entry { op_context, flags, len: size_of_val(&said), buf, data: 0 };
            n += 1;
        }
        if n == 0 { -(FI_EAGAIN as isize) } else { n as isize }
    }
}

unsafe extern "C" fn readfrom(
    cq: *mut fid_cq,
    into: *mut c_void,
    count: usize,
    _: *mut u64,
) -> isize {
    // SAFETY: forwards the caller's arguments under the same contract.
    unsafe { read(cq, into, count) }
}

unsafe extern "C" fn readerr(_: *mut fid_cq, _: *mut fi_cq_err_entry, _: u64) -> isize {
    -(FI_EAGAIN as isize)
}

unsafe extern "C" fn endpoint(
    _: *mut fid_domain,
    _: *mut fi_info,
    ep: *mut *mut fid_ep,
    _: *mut c_void,
) -> c_int {
    let fid = fid_ep {
        fid: object(FI_CLASS_EP),
        ops: table!(fi_ops_ep {}),
        cm: table!(fi_ops_cm { getname: getname }),
        msg: table!(fi_ops_msg { recv: recv, send: send, sendmsg: sendmsg, inject: inject }),
        rma: table!(fi_ops_rma {
            read: rma_read,
            write: rma_write,
            writemsg: rma_writemsg,
            inject: rma_inject,
            writedata: rma_writedata,
            injectdata: rma_injectdata,
        }),
        tagged: ptr::null_mut(),
        atomic: ptr::null_mut(),
        collective: ptr::null_mut(),
    };
    MESSAGES.store(fid.msg, Relaxed);
    // SAFETY: libfabric requires the caller to pass a valid output pointer.
    unsafe { *ep = leak(End { fid, queue: ptr::null_mut() }).cast() };
    0
}

unsafe extern "C" fn getname(_: *mut fid, name: *mut c_void, len: *mut usize) -> c_int {
    // SAFETY: the caller's buffer has at least one byte.
    unsafe {
        name.cast::<u8>().write(1);
        *len = 1;
    }
    0
}

#[inline(always)]
unsafe fn posted(ep: *mut fid_ep, context: *mut c_void, flags: u64) -> isize {
    // SAFETY: this file created the endpoint, and its queue is bound.
    unsafe {
        let queue = &mut *(*ep.cast::<End>()).queue;
        if queue.tail - queue.head == ROOM {
            return -(FI_EAGAIN as isize);
        }
        queue.posts[queue.tail % ROOM] = (context, flags);
        queue.tail += 1;
    }
    0
}

unsafe extern "C" fn recv(
    ep: *mut fid_ep,
    buffer: *mut c_void,
    _: usize,
    _: *mut c_void,
    _: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: this file created the endpoint, and its queue is bound.
    unsafe { (*(*ep.cast::<End>()).queue).receive = (buffer, context) };
    0
}

unsafe extern "C" fn send(
    ep: *mut fid_ep,
    _: *const c_void,
    _: usize,
    _: *mut c_void,
    _: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: forwards the caller's arguments under the same contract.
    unsafe { posted(ep, context, FI_MSG | FI_SEND) }
}

unsafe extern "C" fn sendmsg(ep: *mut fid_ep, message: *const fi_msg, _: u64) -> isize {
    // SAFETY: forwards the caller's arguments under the same contract.
    unsafe { posted(ep, (*message).context, FI_MSG | FI_SEND) }
}

unsafe extern "C" fn inject(_: *mut fid_ep, _: *const c_void, _: usize, _: u64) -> isize {
    0
}

unsafe extern "C" fn inject_echo(
    ep: *mut fid_ep,
    bytes: *const c_void,
    len: usize,
    _: u64,
) -> isize {
    assert_eq!(len, ECHO, "only a Hello is expected");
    // SAFETY: this file created the endpoint, and its queue is bound. Message and receive buffer
    // have `ECHO` bytes.
    unsafe {
        let said = bytes.cast::<[u64; 3]>().read_unaligned();
        let (buffer, context) = (*(*ep.cast::<End>()).queue).receive;
        buffer.cast::<[u64; 3]>().write_unaligned(said);
        for (word, said) in ECHOED.iter().zip(said) {
            word.store(said, Relaxed);
        }
        posted(ep, context, FI_MSG | FI_RECV)
    }
}

#[allow(clippy::too_many_arguments, reason = "C's")]
unsafe extern "C" fn rma_read(
    ep: *mut fid_ep,
    _: *mut c_void,
    _: usize,
    _: *mut c_void,
    _: u64,
    _: u64,
    _: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: forwards the caller's arguments under the same contract.
    unsafe { posted(ep, context, FI_RMA | FI_READ) }
}

#[allow(clippy::too_many_arguments, reason = "C's")]
unsafe extern "C" fn rma_write(
    ep: *mut fid_ep,
    _: *const c_void,
    _: usize,
    _: *mut c_void,
    _: u64,
    _: u64,
    _: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: forwards the caller's arguments under the same contract.
    unsafe { posted(ep, context, FI_RMA | FI_WRITE) }
}

#[allow(clippy::too_many_arguments, reason = "C's")]
unsafe extern "C" fn rma_writedata(
    ep: *mut fid_ep,
    _: *const c_void,
    _: usize,
    _: *mut c_void,
    _: u64,
    _: u64,
    _: u64,
    _: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: forwards the caller's arguments under the same contract.
    unsafe {
        (*(*ep.cast::<End>()).queue).accepted += 1;
        posted(ep, context, FI_RMA | FI_WRITE)
    }
}

unsafe extern "C" fn rma_writemsg(ep: *mut fid_ep, message: *const fi_msg_rma, _: u64) -> isize {
    // SAFETY: forwards the caller's arguments under the same contract.
    unsafe { posted(ep, (*message).context, FI_RMA | FI_WRITE) }
}

unsafe extern "C" fn rma_inject(
    _: *mut fid_ep,
    _: *const c_void,
    _: usize,
    _: u64,
    _: u64,
    _: u64,
) -> isize {
    0
}

unsafe extern "C" fn rma_injectdata(
    ep: *mut fid_ep,
    _: *const c_void,
    _: usize,
    _: u64,
    _: u64,
    _: u64,
    _: u64,
) -> isize {
    // SAFETY: this file created the endpoint, and its queue is bound.
    unsafe { (*(*ep.cast::<End>()).queue).accepted += 1 };
    0
}

pub fn library() -> Library {
    let entries =
        Entries { getinfo, freeinfo, dupinfo, fabric, version, strerror: words, tostr: show };
    // SAFETY: for the calls made here, the entries behave like libfabric's.
    unsafe { Library::from_entries(entries) }
}

/// Makes every queue report a message after each `every` accepted writes with data, if a receive is
/// posted. The message consists of `head` and the number of writes answered so far.
pub fn answer(every: u64, head: [u64; 2]) {
    for (word, value) in ANSWER.iter().zip(head) {
        word.store(value, Relaxed);
    }
    EVERY.store(every, Relaxed);
}

/// Turns echoing on or off: messages injected at the endpoint opened last return to that endpoint.
/// Returns the last such message.
pub fn echo(on: bool) -> [u64; 3] {
    // SAFETY: the table of an endpoint is never freed, and only the benchmark's thread uses it.
    unsafe { (*MESSAGES.load(Relaxed)).inject = Some(if on { inject_echo } else { inject }) };
    [0, 1, 2].map(|word: usize| ECHOED[word].load(Relaxed))
}

/// Makes the next queue read report `count` peer writes with `data`.
pub fn arrive(count: u64, data: u64) {
    DATA.store(data, Relaxed);
    ARRIVALS.store(count, Relaxed);
}
