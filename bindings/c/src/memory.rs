//! Functions for memory of the node and of its peers.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

use crate::handle::{FpNode, REMOTE, enter};
use crate::node::{buffer, bytes, hand_out, place, unknown_region};
use crate::status::fail;

/// Allocates zeroed memory that peers can access.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_mem_alloc(node: *mut FpNode, len: usize, memory: *mut u64) -> c_int {
    enter(node, |inner| {
        let place = place(memory, "memory")?;
        let memory = inner.node.alloc(len)?;
        let raw = memory.at(0).region.to_raw();
        inner.memories.insert(raw, memory);
        place.write(raw);
        Ok(0)
    })
}

/// Registers memory of the program, aligned to 8 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_mem_register(
    node: *mut FpNode,
    start: *mut c_void,
    len: usize,
    memory: *mut u64,
) -> c_int {
    enter(node, |inner| {
        let place = place(memory, "memory")?;
        let start = NonNull::new(start.cast()).ok_or_else(|| {
            fail(libc::EINVAL, "invalid memory: start is null; pass memory of the program")
        })?;
        // SAFETY: the header requires the memory to stay valid until it is freed and peers have
        // released it.
        let memory = unsafe { inner.node.register(start, len) }?;
        let raw = memory.at(0).region.to_raw();
        inner.memories.insert(raw, memory);
        place.write(raw);
        Ok(0)
    })
}

/// Frees memory, unless an operation, a receive or an import uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_mem_free(node: *mut FpNode, memory: u64) -> c_int {
    enter(node, |inner| {
        let named = *inner.memories.get(&memory).ok_or_else(unknown_region)?;
        let freed = inner.node.free(named);
        // The handle is unknown once the memory is freed, and known while the memory is in use.
        if inner.node.handle(named).is_err() {
            inner.memories.remove(&memory);
        }
        freed?;
        Ok(0)
    })
}

/// Copies out the handle with which peers import memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_mem_export(
    node: *mut FpNode,
    memory: u64,
    into: *mut c_void,
    len: *mut usize,
) -> c_int {
    enter(node, |inner| {
        let named = *inner.memories.get(&memory).ok_or_else(unknown_region)?;
        hand_out(&inner.node.handle(named)?, into, len)
    })
}

/// Imports memory of a peer by its handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_mem_import(
    node: *mut FpNode,
    named: u32,
    handle: *const c_void,
    len: usize,
    remote: *mut u64,
) -> c_int {
    enter(node, |inner| {
        let (place, handle) = (place(remote, "remote")?, bytes(handle, len)?);
        let peer = inner.named(named);
        let remote = inner.node.import(peer, handle)?;
        let raw = remote.at(0).region.to_raw() ^ REMOTE;
        inner.remotes.insert(raw, (remote, peer));
        place.write(raw);
        Ok(0)
    })
}

/// Releases imported memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_mem_release(node: *mut FpNode, remote: u64) -> c_int {
    enter(node, |inner| {
        let (named, _) = *inner.remotes.get(&remote).ok_or_else(unknown_region)?;
        inner.node.release(named)?;
        inner.remotes.remove(&remote);
        Ok(0)
    })
}

/// Copies bytes into memory of the node.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_mem_write(
    node: *mut FpNode,
    memory: u64,
    offset: u64,
    from: *const c_void,
    len: usize,
) -> c_int {
    enter(node, |inner| {
        let at = inner.here(memory, offset);
        inner.node.write(at, bytes(from, len)?)?;
        Ok(0)
    })
}

/// Copies bytes out of memory of the node.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_mem_read(
    node: *mut FpNode,
    memory: u64,
    offset: u64,
    into: *mut c_void,
    len: usize,
) -> c_int {
    enter(node, |inner| {
        let at = inner.here(memory, offset);
        inner.node.read(at, buffer(into, len)?)?;
        Ok(0)
    })
}

/// Stores a 64-bit word with release ordering.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_mem_store(
    node: *mut FpNode,
    memory: u64,
    offset: u64,
    value: u64,
) -> c_int {
    enter(node, |inner| {
        let at = inner.here(memory, offset);
        inner.node.store(at, value)?;
        Ok(0)
    })
}
