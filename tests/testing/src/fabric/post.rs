//! Posts: messages, writes, reads, atomics and receives. A refused post changes nothing.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::slice;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use fishplate_sys::fabric::raw::*;

use super::object::FakeEp;
use super::world::{Op, Recv, Stage, State, Verb};

pub(super) static MSG: fi_ops_msg = fi_ops_msg {
    size: size_of::<fi_ops_msg>(),
    recv: Some(recv),
    recvv: None,
    recvmsg: None,
    send: Some(send),
    sendv: None,
    sendmsg: Some(sendmsg),
    inject: Some(inject),
    senddata: None,
    injectdata: None,
};

pub(super) static RMA: fi_ops_rma = fi_ops_rma {
    size: size_of::<fi_ops_rma>(),
    read: Some(read),
    readv: None,
    readmsg: None,
    write: Some(write),
    writev: None,
    writemsg: Some(writemsg),
    inject: Some(inject_write),
    writedata: Some(writedata),
    injectdata: Some(inject_writedata),
};

pub(super) static ATOMIC: fi_ops_atomic = fi_ops_atomic {
    size: size_of::<fi_ops_atomic>(),
    write: Some(atomic),
    writev: None,
    writemsg: None,
    inject: None,
    readwrite: Some(fetch_atomic),
    readwritev: None,
    readwritemsg: None,
    compwrite: Some(compare_atomic),
    compwritev: None,
    compwritemsg: None,
    writevalid: Some(atomic_valid),
    readwritevalid: Some(fetch_valid),
    compwritevalid: Some(compare_valid),
};

struct Post {
    verb: Verb,
    local: *mut u8,
    len: usize,
    desc: *mut c_void,
    to: u64,
    addr: u64,
    key: u64,
    data: Option<u64>,
    context: *mut c_void,
    flags: u64,
    /// An inject call has no context, copies the source, and reports a completion only on failure.
    inject: bool,
}

impl Post {
    fn new(
        verb: Verb,
        local: *const c_void,
        len: usize,
        desc: *mut c_void,
        to: u64,
        context: *mut c_void,
    ) -> Post {
        let local = local.cast_mut().cast();
        Post {
            verb,
            local,
            len,
            desc,
            to,
            addr: 0,
            key: 0,
            data: None,
            context,
            flags: FI_COMPLETION,
            inject: false,
        }
    }

    fn at(self, addr: u64, key: u64) -> Post {
        Post { addr, key, ..self }
    }

    fn with(self, data: u64) -> Post {
        Post { data: Some(data), ..self }
    }

    fn injected(self) -> Post {
        Post { inject: true, flags: 0, ..self }
    }
}

/// # Safety
/// `ep` is an open endpoint of this fake. The other arguments are valid as the manual page of the
/// call requires.
unsafe fn post(ep: *mut fid_ep, post: Post) -> isize {
    // SAFETY: our caller guarantees that `ep` is open.
    let this = unsafe { &*ep.cast::<FakeEp>() };
    let mut state = this.world.state();
    // SAFETY: our caller guarantees valid arguments.
    match unsafe { accept(&mut state, this.id, post) } {
        Ok(op) => {
            state.launch(op);
            0
        }
        Err(code) => {
            state.counts.refused += u64::from(code == FI_EAGAIN);
            -(code as isize)
        }
    }
}

/// # Safety
/// The arguments are valid as `post` requires.
unsafe fn accept(state: &mut State, id: u32, post: Post) -> Result<Op, i32> {
    let Post { verb, local, len, desc, to, addr, key, data, context, flags, inject } = post;
    let Some(ep) = state.eps.get(&id).filter(|ep| ep.enabled) else {
        return Err(FI_EOPBADSTATE);
    };
    let (selective, op_flags) = (ep.selective, ep.op_flags);
    let known = ep.av.and_then(|av| state.avs.get(&av));
    // The address vector never returned `to`, or the address was removed.
    let Some(dst) = known.and_then(|known| *known.get(to as usize)?) else {
        state.violation("a post to an address that is not in the vector");
        return Err(libc::EINVAL);
    };
    let most = if verb == Verb::Send { state.persona.max_message } else { state.persona.max_rma };
    if len > most {
        return Err(libc::EMSGSIZE);
    }
    let injects = inject || flags & FI_INJECT != 0;
    if injects && len > state.persona.inject {
        return Err(libc::EMSGSIZE);
    }
    if flags & FI_FENCE != 0 && state.persona.caps & FI_FENCE == 0 {
        return Err(FI_EBADFLAGS);
    }
    let outstanding = state.ops.iter().filter(|op| op.src == id).count();
    let refuse = state.persona.refuse;
    if outstanding >= state.persona.tx_size || (refuse > 0 && state.draw(100) < refuse) {
        return Err(FI_EAGAIN);
    }
    if !injects && len > 0 && !state.may_use(id, local, len, desc, "a post") {
        return Err(libc::EINVAL);
    }
    let of_device = len > 0 && state.device_of(local as usize, len).is_some();
    if of_device && (injects || verb == Verb::Send) {
        state.violation("device memory passed to a call that copies on the processor");
        return Err(libc::EFAULT);
    }
    if !inject && !state.own(context) {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller of the post guarantees that the source is readable during the call.
    let copy = injects.then(|| unsafe { slice::from_raw_parts(local, len) }.to_vec());
    let mask = u64::MAX >> (64 - 8 * state.persona.data_bytes as u32);
    Ok(Op {
        number: 0,
        src: id,
        dst: Some(dst),
        verb,
        context: if inject { ptr::null_mut() } else { context },
        completes: !inject && (!selective || flags & FI_COMPLETION != 0),
        delivery: (flags | op_flags) & FI_DELIVERY_COMPLETE != 0
            || !matches!(verb, Verb::Send | Verb::Write),
        local,
        len,
        of_device,
        copy,
        data: data.map(|data| data & mask),
        addr,
        key,
        stage: if flags & FI_MORE != 0 { Stage::Held } else { Stage::Leaving },
        wait: 0,
        landed: false,
        fault: None,
        torn: false,
        stray: false,
    })
}

unsafe extern "C" fn recv(
    ep: *mut fid_ep,
    buf: *mut c_void,
    len: usize,
    desc: *mut c_void,
    _from: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: `ep` is an open endpoint of this fake.
    let this = unsafe { &*ep.cast::<FakeEp>() };
    let mut state = this.world.state();
    let most = state.persona.rx_size;
    match state.eps.get(&this.id) {
        Some(ep) if !ep.enabled => return -(FI_EOPBADSTATE as isize),
        Some(ep) if ep.recvs.len() < most => {}
        _ => return -(FI_EAGAIN as isize),
    }
    if !state.may_use(this.id, buf.cast(), len, desc, "a receive") || !state.own(context) {
        return -(libc::EINVAL as isize);
    }
    if let Some(ep) = state.eps.get_mut(&this.id) {
        ep.recvs.push_back(Recv { buf: buf.cast(), len, context });
    }
    0
}

unsafe extern "C" fn send(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    to: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's manual requires the caller to pass valid arguments.
    unsafe { post(ep, Post::new(Verb::Send, buf, len, desc, to, context)) }
}

unsafe extern "C" fn sendmsg(ep: *mut fid_ep, msg: *const fi_msg, flags: u64) -> isize {
    // SAFETY: the message is complete and has one part, as this fake's limits say.
    unsafe {
        let msg = &*msg;
        if msg.iov_count != 1 {
            return -(libc::EINVAL as isize);
        }
        let (part, desc) = (&*msg.msg_iov, first(msg.desc));
        let message =
            Post::new(Verb::Send, part.iov_base, part.iov_len, desc, msg.addr, msg.context);
        let data = (flags & FI_REMOTE_CQ_DATA != 0).then_some(msg.data);
        post(ep, Post { flags, data, ..message })
    }
}

unsafe extern "C" fn inject(ep: *mut fid_ep, buf: *const c_void, len: usize, to: u64) -> isize {
    // SAFETY: libfabric's manual requires the caller to pass valid arguments.
    unsafe {
        post(ep, Post::new(Verb::Send, buf, len, ptr::null_mut(), to, ptr::null_mut()).injected())
    }
}

unsafe extern "C" fn read(
    ep: *mut fid_ep,
    buf: *mut c_void,
    len: usize,
    desc: *mut c_void,
    from: u64,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's manual requires the caller to pass valid arguments.
    unsafe { post(ep, Post::new(Verb::Read, buf, len, desc, from, context).at(addr, key)) }
}

unsafe extern "C" fn write(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    to: u64,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's manual requires the caller to pass valid arguments.
    unsafe { post(ep, Post::new(Verb::Write, buf, len, desc, to, context).at(addr, key)) }
}

#[allow(clippy::too_many_arguments, reason = "libfabric's signature")]
unsafe extern "C" fn writedata(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    data: u64,
    to: u64,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's manual requires the caller to pass valid arguments.
    unsafe {
        post(ep, Post::new(Verb::Write, buf, len, desc, to, context).at(addr, key).with(data))
    }
}

unsafe extern "C" fn inject_write(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    to: u64,
    addr: u64,
    key: u64,
) -> isize {
    let (desc, context) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: libfabric's manual requires the caller to pass valid arguments.
    unsafe {
        post(ep, Post::new(Verb::Write, buf, len, desc, to, context).at(addr, key).injected())
    }
}

unsafe extern "C" fn inject_writedata(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    data: u64,
    to: u64,
    addr: u64,
    key: u64,
) -> isize {
    let (desc, context) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: libfabric's manual requires the caller to pass valid arguments.
    unsafe {
        post(
            ep,
            Post::new(Verb::Write, buf, len, desc, to, context).at(addr, key).with(data).injected(),
        )
    }
}

unsafe extern "C" fn writemsg(ep: *mut fid_ep, msg: *const fi_msg_rma, flags: u64) -> isize {
    // SAFETY: the message is complete and has one part on each side, as this fake's limits say.
    unsafe {
        let msg = &*msg;
        if msg.iov_count != 1 || msg.rma_iov_count != 1 {
            return -(libc::EINVAL as isize);
        }
        let (part, remote) = (&*msg.msg_iov, &*msg.rma_iov);
        if part.iov_len != remote.len {
            return -(libc::EINVAL as isize);
        }
        let write = Post::new(
            Verb::Write,
            part.iov_base,
            part.iov_len,
            first(msg.desc),
            msg.addr,
            msg.context,
        );
        let data = (flags & FI_REMOTE_CQ_DATA != 0).then_some(msg.data);
        post(ep, Post { flags, data, ..write }.at(remote.addr, remote.key))
    }
}

/// # Safety
/// `desc` is null or points to at least one descriptor.
unsafe fn first(desc: *mut *mut c_void) -> *mut c_void {
    // SAFETY: our caller guarantees at least one descriptor.
    if desc.is_null() { ptr::null_mut() } else { unsafe { *desc } }
}

fn width(datatype: c_int) -> Option<u8> {
    match datatype {
        FI_UINT8 => Some(1),
        FI_UINT16 => Some(2),
        FI_UINT32 => Some(4),
        FI_UINT64 => Some(8),
        _ => None,
    }
}

/// Reads an operand of `width` bytes.
///
/// # Safety
/// `from` is null or readable for `width` bytes.
unsafe fn operand(from: *const c_void, width: u8) -> u64 {
    let mut bytes = [0u8; 8];
    if !from.is_null() {
        // SAFETY: our caller guarantees `width` readable bytes, and `width` is at most 8.
        unsafe { ptr::copy_nonoverlapping(from.cast::<u8>(), bytes.as_mut_ptr(), width.into()) };
    }
    u64::from_ne_bytes(bytes)
}

/// Executes an atomic in place. Returns the old value, or `None` for an unknown operation or a
/// misaligned address.
///
/// # Safety
/// `at` is valid for `width` bytes, which are accessed only atomically or by raw copies.
pub(super) unsafe fn apply(
    at: *mut u8,
    width: u8,
    op: i32,
    operand: u64,
    compare: u64,
) -> Option<u64> {
    if !(at as usize).is_multiple_of(width.into()) {
        return None;
    }
    macro_rules! on {
        ($atomic:ty, $int:ty) => {{
            // SAFETY: the caller guarantees that `at` is valid; the alignment was checked above.
            let word = unsafe { <$atomic>::from_ptr(at.cast()) };
            let (x, expected) = (operand as $int, compare as $int);
            let order = Ordering::SeqCst;
            u64::from(match op {
                FI_SUM => word.fetch_add(x, order),
                FI_BOR => word.fetch_or(x, order),
                FI_BAND => word.fetch_and(x, order),
                FI_BXOR => word.fetch_xor(x, order),
                FI_ATOMIC_READ => word.load(order),
                FI_ATOMIC_WRITE => word.swap(x, order),
                FI_CSWAP => match word.compare_exchange(expected, x, order, order) {
                    Ok(old) | Err(old) => old,
                },
                _ => return None,
            })
        }};
    }
    Some(match width {
        1 => on!(AtomicU8, u8),
        2 => on!(AtomicU16, u16),
        4 => on!(AtomicU32, u32),
        8 => on!(AtomicU64, u64),
        _ => return None,
    })
}

/// # Safety
/// The arguments are valid as the manual page of the call requires.
#[allow(clippy::too_many_arguments, reason = "the common arguments of three calls")]
unsafe fn post_atomic(
    ep: *mut fid_ep,
    buf: *const c_void,
    compare: *const c_void,
    (result, result_desc): (*mut c_void, *mut c_void),
    count: usize,
    to: u64,
    (addr, key): (u64, u64),
    datatype: c_int,
    op: c_int,
    context: *mut c_void,
) -> isize {
    // SAFETY: our caller guarantees that `ep` is open.
    let few = unsafe { has_few(ep) };
    let Some(width) = width(datatype).filter(|_| count == 1 && (!few || is_of_few(datatype, op)))
    else {
        return -(libc::EOPNOTSUPP as isize);
    };
    // SAFETY: our caller guarantees that the operands are readable during the call, and that the
    // result is writable until the completion.
    unsafe {
        let (operand, compare) = (operand(buf, width), operand(compare, width));
        let verb = Verb::Atomic { width, op, operand, compare, result: result.cast() };
        let local = if result.is_null() { buf } else { result.cast_const() };
        post(ep, Post::new(verb, local, width.into(), result_desc, to, context).at(addr, key))
    }
}

#[allow(clippy::too_many_arguments, reason = "libfabric's signature")]
unsafe extern "C" fn atomic(
    ep: *mut fid_ep,
    buf: *const c_void,
    count: usize,
    desc: *mut c_void,
    to: u64,
    addr: u64,
    key: u64,
    datatype: c_int,
    op: c_int,
    context: *mut c_void,
) -> isize {
    let none = (ptr::null_mut(), desc);
    // SAFETY: libfabric's manual requires the caller to pass valid arguments.
    unsafe {
        post_atomic(ep, buf, ptr::null(), none, count, to, (addr, key), datatype, op, context)
    }
}

#[allow(clippy::too_many_arguments, reason = "libfabric's signature")]
unsafe extern "C" fn fetch_atomic(
    ep: *mut fid_ep,
    buf: *const c_void,
    count: usize,
    _desc: *mut c_void,
    result: *mut c_void,
    result_desc: *mut c_void,
    to: u64,
    addr: u64,
    key: u64,
    datatype: c_int,
    op: c_int,
    context: *mut c_void,
) -> isize {
    let into = (result, result_desc);
    // SAFETY: libfabric's manual requires the caller to pass valid arguments.
    unsafe {
        post_atomic(ep, buf, ptr::null(), into, count, to, (addr, key), datatype, op, context)
    }
}

#[allow(clippy::too_many_arguments, reason = "libfabric's signature")]
unsafe extern "C" fn compare_atomic(
    ep: *mut fid_ep,
    buf: *const c_void,
    count: usize,
    _desc: *mut c_void,
    compare: *const c_void,
    _compare_desc: *mut c_void,
    result: *mut c_void,
    result_desc: *mut c_void,
    to: u64,
    addr: u64,
    key: u64,
    datatype: c_int,
    op: c_int,
    context: *mut c_void,
) -> isize {
    let into = (result, result_desc);
    // SAFETY: libfabric's manual requires the caller to pass valid arguments.
    unsafe { post_atomic(ep, buf, compare, into, count, to, (addr, key), datatype, op, context) }
}

/// True if the provider of this endpoint executes only [a few](is_of_few) atomics.
///
/// # Safety
/// `ep` is an open endpoint of this fake.
unsafe fn has_few(ep: *mut fid_ep) -> bool {
    // SAFETY: our caller guarantees that `ep` is open.
    unsafe { &*ep.cast::<FakeEp>() }.world.state().persona.few_atomics
}

fn is_of_few(datatype: c_int, op: c_int) -> bool {
    datatype == FI_UINT64 && [FI_SUM, FI_CSWAP].contains(&op)
}

/// # Safety
/// `ep` is an open endpoint of this fake; `count` is null or writable.
unsafe fn valid(
    ep: *mut fid_ep,
    datatype: c_int,
    ops: &[c_int],
    op: c_int,
    count: *mut usize,
) -> c_int {
    // SAFETY: our caller guarantees that `ep` is open.
    let few = unsafe { has_few(ep) };
    if width(datatype).is_none() || !ops.contains(&op) || (few && !is_of_few(datatype, op)) {
        return -libc::EOPNOTSUPP;
    }
    if !count.is_null() {
        // SAFETY: our caller guarantees that `count` is writable if it is not null.
        unsafe { count.write(1) };
    }
    0
}

unsafe extern "C" fn atomic_valid(
    ep: *mut fid_ep,
    datatype: c_int,
    op: c_int,
    count: *mut usize,
) -> c_int {
    // SAFETY: libfabric's manual requires an open endpoint, and `count` to be null or writable.
    unsafe { valid(ep, datatype, &[FI_SUM, FI_BOR, FI_BAND, FI_BXOR, FI_ATOMIC_WRITE], op, count) }
}

unsafe extern "C" fn fetch_valid(
    ep: *mut fid_ep,
    datatype: c_int,
    op: c_int,
    count: *mut usize,
) -> c_int {
    let ops = [FI_SUM, FI_BOR, FI_BAND, FI_BXOR, FI_ATOMIC_READ, FI_ATOMIC_WRITE];
    // SAFETY: libfabric's manual requires an open endpoint, and `count` to be null or writable.
    unsafe { valid(ep, datatype, &ops, op, count) }
}

unsafe extern "C" fn compare_valid(
    ep: *mut fid_ep,
    datatype: c_int,
    op: c_int,
    count: *mut usize,
) -> c_int {
    // SAFETY: libfabric's manual requires an open endpoint, and `count` to be null or writable.
    unsafe { valid(ep, datatype, &[FI_CSWAP], op, count) }
}
