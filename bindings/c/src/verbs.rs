//! One-sided operations.

use std::ffi::{c_int, c_void};

use fishplate::core::op::{Amo, AmoOp, SignalOp};
use fishplate::node::Slice;
use fishplate::{Cmp, Issued, Notice, Signal};

use crate::handle::{FpNode, Inner, at_once, enter};
use crate::node::{bytes, millis, place};
use crate::status::{Status, fail};

/// The token of an operation that is already complete. No other token has all bits set, because
/// slot numbers are shorter than 32 bits.
const OVER: u64 = u64::MAX;

#[inline(always)]
pub(crate) fn notice(token: *mut u64) -> Result<Notice, Status> {
    match token.is_null() {
        true => Ok(Notice::Silent),
        false => place(token, "token").map(|_| Notice::Report(0)),
    }
}

#[inline(always)]
pub(crate) fn issued(inner: &Inner, issued: Issued, token: *mut u64) -> Result<c_int, Status> {
    if !token.is_null() {
        place(token, "token")?.write(match issued {
            Issued::Done { .. } => OVER,
            Issued::Pending(token) => inner.token(token.to_raw()),
        });
    }
    Ok(0)
}

#[inline(always)]
fn signal(
    inner: &Inner,
    remote: u64,
    offset: u64,
    op: c_int,
    value: u64,
) -> Result<Signal, Status> {
    let op = match op {
        1 => SignalOp::Set,
        2 => SignalOp::Add,
        _ => {
            let text = format_args!("invalid op: {op}; use FP_SIGNAL_SET or FP_SIGNAL_ADD");
            return Err(fail(libc::EINVAL, text));
        }
    };
    Ok(Signal { at: inner.there(remote, offset), op, value })
}

fn amo(op: c_int, width: u32, operand: u64, compare: u64) -> Result<Amo, Status> {
    let known = u8::try_from(op).ok().and_then(AmoOp::from_wire);
    let text = format_args!("invalid op: {op}; use one of FP_AMO_*");
    let op = known.ok_or_else(|| fail(libc::EINVAL, text))?;
    let width = u8::try_from(width).map_err(|_| {
        fail(libc::EINVAL, format_args!("invalid width: {width} bytes; use 1, 2, 4 or 8"))
    })?;
    Ok(Amo { op, width, operand, compare })
}

/// Writes memory of the node to memory of a peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_put(
    node: *mut FpNode,
    memory: u64,
    offset: u64,
    len: usize,
    remote: u64,
    remote_offset: u64,
    token: *mut u64,
) -> c_int {
    enter(node, |inner| {
        let from = Slice::new(inner.here(memory, offset), len);
        let to = inner.there(remote, remote_offset);
        let put = inner.node.put(from, to, notice(token)?)?;
        issued(inner, put, token)
    })
}

/// Writes bytes of the program to memory of a peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_put_bytes(
    node: *mut FpNode,
    from: *const c_void,
    len: usize,
    remote: u64,
    remote_offset: u64,
) -> c_int {
    enter(node, |inner| {
        let to = inner.there(remote, remote_offset);
        inner.node.put(bytes(from, len)?, to, Notice::Silent)?;
        Ok(0)
    })
}

/// Writes if `len` is not 0, then signals.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_put_signal(
    node: *mut FpNode,
    memory: u64,
    offset: u64,
    len: usize,
    remote: u64,
    remote_offset: u64,
    signal_remote: u64,
    signal_offset: u64,
    op: c_int,
    value: u64,
    token: *mut u64,
) -> c_int {
    if token.is_null() && op == SignalOp::Set as c_int {
        let done = at_once(node, |inner| {
            let from = Slice::new(inner.here(memory, offset), len);
            let to = inner.there(remote, remote_offset);
            let signal = Signal::set(inner.there(signal_remote, signal_offset), value);
            inner.node.put_signal_mapped(from, to, signal).is_some()
        });
        if done == Some(true) {
            return 0;
        }
    }
    put_signal_later(
        node,
        memory,
        offset,
        len,
        remote,
        remote_offset,
        signal_remote,
        signal_offset,
        op,
        value,
        token,
    )
}

/// The slow path of [`fp_put_signal`]. Has the same parameters, so that the call compiles to a
/// jump.
#[cold]
#[inline(never)]
#[allow(clippy::too_many_arguments, reason = "those of the function in C")]
extern "C" fn put_signal_later(
    node: *mut FpNode,
    memory: u64,
    offset: u64,
    len: usize,
    remote: u64,
    remote_offset: u64,
    signal_remote: u64,
    signal_offset: u64,
    op: c_int,
    value: u64,
    token: *mut u64,
) -> c_int {
    enter(node, |inner| {
        let from = Slice::new(inner.here(memory, offset), len);
        let to = inner.there(remote, remote_offset);
        let signal = signal(inner, signal_remote, signal_offset, op, value)?;
        let notice = notice(token)?;
        let done = match len {
            0 => inner.node.signal(signal, notice)?,
            _ => inner.node.put_signal(from, to, signal, notice)?,
        };
        issued(inner, done, token)
    })
}

/// Reads memory of a peer into memory of the node.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_get(
    node: *mut FpNode,
    memory: u64,
    offset: u64,
    len: usize,
    remote: u64,
    remote_offset: u64,
    token: *mut u64,
) -> c_int {
    enter(node, |inner| {
        let into = Slice::new(inner.here(memory, offset), len);
        let from = inner.there(remote, remote_offset);
        let get = inner.node.get(into, from, notice(token)?)?;
        issued(inner, get, token)
    })
}

/// Executes an atomic at a peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_atomic(
    node: *mut FpNode,
    remote: u64,
    offset: u64,
    op: c_int,
    width: u32,
    operand: u64,
    compare: u64,
    token: *mut u64,
) -> c_int {
    enter(node, |inner| {
        let amo = amo(op, width, operand, compare)?;
        let at = inner.there(remote, offset);
        let executed = inner.node.amo(at, amo, notice(token)?)?;
        issued(inner, executed, token)
    })
}

/// Executes an atomic at a peer, and waits for the previous value.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_atomic_fetch(
    node: *mut FpNode,
    remote: u64,
    offset: u64,
    op: c_int,
    width: u32,
    operand: u64,
    compare: u64,
    before: *mut u64,
    timeout_ms: i64,
) -> c_int {
    enter(node, |inner| {
        let (place, amo) = (place(before, "before")?, amo(op, width, operand, compare)?);
        let at = inner.there(remote, offset);
        place.write(inner.node.fetch(at, amo, millis(timeout_ms))?);
        Ok(0)
    })
}

/// Makes later writes to the peer land after earlier operations.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_fence(node: *mut FpNode, named: u32) -> c_int {
    enter(node, |inner| {
        let peer = inner.named(named);
        inner.node.fence(peer)?;
        Ok(0)
    })
}

/// Waits until everything sent to a peer, or to all peers, is applied there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_quiet(node: *mut FpNode, named: u32, timeout_ms: i64) -> c_int {
    enter(node, |inner| {
        match inner.anyone(named) {
            Some(peer) => inner.node.quiet(peer, millis(timeout_ms))?,
            None => inner.node.quiet_all(millis(timeout_ms))?,
        }
        Ok(0)
    })
}

/// Waits until a comparison with a signal word holds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_wait_signal(
    node: *mut FpNode,
    memory: u64,
    offset: u64,
    compare: c_int,
    value: u64,
    from: u32,
    timeout_ms: i64,
    seen: *mut u64,
) -> c_int {
    enter(node, |inner| {
        let compare = match compare {
            1 => Cmp::Eq,
            2 => Cmp::Ne,
            3 => Cmp::Ge,
            4 => Cmp::Gt,
            5 => Cmp::Le,
            6 => Cmp::Lt,
            _ => {
                let text = format_args!("invalid compare: {compare}; use one of FP_EQ to FP_LT");
                return Err(fail(libc::EINVAL, text));
            }
        };
        let seen = if seen.is_null() { None } else { Some(place(seen, "seen")?) };
        let (at, from) = (inner.here(memory, offset), inner.anyone(from));
        let word = inner.node.wait(at, compare, value, from, millis(timeout_ms))?;
        if let Some(seen) = seen {
            seen.write(word);
        }
        Ok(0)
    })
}
