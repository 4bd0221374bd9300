//! The calls that read completion queues.

use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use fishplate_sys::fabric::raw::*;

use super::object::FakeCq;

#[derive(Debug)]
pub(super) enum Item {
    Good { entry: fi_cq_data_entry, source: u64 },
    Bad { context: *mut c_void, flags: u64, code: i32, provider: i32, data: Vec<u8> },
}

impl Item {
    pub fn good(entry: fi_cq_data_entry, source: u64) -> Item {
        Item::Good { entry, source }
    }

    pub fn bad(context: *mut c_void, flags: u64, code: i32, provider: i32, data: Vec<u8>) -> Item {
        Item::Bad { context, flags, code, provider, data }
    }
}

#[derive(Debug)]
pub(super) struct Queue {
    pub domain: u32,
    size: usize,
    items: VecDeque<Item>,
    overrun: bool,
    /// Valid until the next read.
    last: Vec<u8>,
}

impl Queue {
    pub fn new(domain: u32, size: usize) -> Queue {
        Queue { domain, size, items: VecDeque::new(), overrun: false, last: vec![] }
    }

    pub fn has_room(&self) -> bool {
        self.items.len() < self.size
    }

    pub fn push(&mut self, item: Item) {
        self.items.push_back(item);
    }

    pub fn overrun(&mut self) {
        self.overrun = true;
    }
}

pub(super) static CQ: fi_ops_cq = fi_ops_cq {
    size: size_of::<fi_ops_cq>(),
    read: Some(read),
    readfrom: Some(readfrom),
    readerr: Some(readerr),
    sread: None,
    sreadfrom: None,
    signal: None,
    strerror: Some(strerror),
};

unsafe extern "C" fn read(cq: *mut fid_cq, buf: *mut c_void, count: usize) -> isize {
    // SAFETY: the caller upholds the contract of `fi_cq_read`; no room for sources is needed.
    unsafe { readfrom(cq, buf, count, ptr::null_mut()) }
}

unsafe extern "C" fn readfrom(
    cq: *mut fid_cq,
    buf: *mut c_void,
    count: usize,
    sources: *mut u64,
) -> isize {
    // SAFETY: `cq` is an open queue of this fake.
    let cq = unsafe { &*cq.cast::<FakeCq>() };
    let mut state = cq.world.state();
    let left_open = |op: &super::world::Op| {
        op.stage == super::world::Stage::Held
            && state.eps.get(&op.src).is_some_and(|ep| ep.tx == Some(cq.id))
    };
    let held = state.ops.iter().filter(|op| left_open(op)).count();
    state.counts.left_open += held as u64;
    state.counts.reads += 1;
    state.step(cq.id);
    let some = match state.persona.short_reads {
        true => 1 + state.draw(8) as usize,
        false => usize::MAX,
    };
    let Some(queue) = state.cqs.get_mut(&cq.id) else {
        return -(libc::EINVAL as isize);
    };
    if queue.overrun {
        return -(FI_EAVAIL as isize);
    }
    let mut given = 0;
    while given < count.min(some) {
        match queue.items.front() {
            Some(&Item::Good { entry, source }) => {
                queue.items.pop_front();
                // SAFETY: the caller has room for `count` entries of the queue's format, and for
                // `count` sources unless `sources` is null.
                unsafe {
                    buf.cast::<fi_cq_data_entry>().add(given).write(entry);
                    if !sources.is_null() {
                        sources.add(given).write(source);
                    }
                }
                given += 1;
            }
            Some(Item::Bad { .. }) if given == 0 => return -(FI_EAVAIL as isize),
            _ => break,
        }
    }
    if given == 0 { -(FI_EAGAIN as isize) } else { given as isize }
}

unsafe extern "C" fn readerr(cq: *mut fid_cq, out: *mut fi_cq_err_entry, _flags: u64) -> isize {
    // SAFETY: `cq` is an open queue of this fake, and the caller's entry is writable.
    let (cq, out) = unsafe { (&*cq.cast::<FakeCq>(), &mut *out) };
    let mut state = cq.world.state();
    let Some(queue) = state.cqs.get_mut(&cq.id) else {
        return -(libc::EINVAL as isize);
    };
    let (context, flags, code, provider, data) = match queue.items.front() {
        _ if queue.overrun => (ptr::null_mut(), 0, FI_EOVERRUN, 0, vec![]),
        Some(Item::Bad { .. }) => match queue.items.pop_front() {
            Some(Item::Bad { context, flags, code, provider, data }) => {
                (context, flags, code, provider, data)
            }
            _ => return -(FI_EAGAIN as isize),
        },
        _ => return -(FI_EAGAIN as isize),
    };
    (out.op_context, out.flags, out.err, out.prov_errno) = (context, flags, code, provider);
    (out.len, out.olen, out.data, out.tag) = (0, 0, 0, 0);
    queue.last = data;
    if out.err_data_size == 0 {
        // The caller has no buffer, so point to the queue's own copy.
        out.err_data = queue.last.as_mut_ptr().cast();
    } else {
        let len = queue.last.len().min(out.err_data_size);
        // SAFETY: the caller has room for `len` bytes.
        unsafe { ptr::copy_nonoverlapping(queue.last.as_ptr(), out.err_data.cast::<u8>(), len) };
    }
    out.err_data_size =
        queue.last.len().min(if out.err_data_size == 0 { usize::MAX } else { out.err_data_size });
    1
}

unsafe extern "C" fn strerror(
    _cq: *mut fid_cq,
    code: c_int,
    data: *const c_void,
    buf: *mut c_char,
    len: usize,
) -> *const c_char {
    let said = match data.is_null() {
        true => String::new(),
        // SAFETY: the data comes from `readerr`, and ends with a zero byte.
        false => format!(": {}", unsafe { CStr::from_ptr(data.cast()) }.to_string_lossy()),
    };
    let text = format!("fake provider error {code}{said}\0");
    let Ok(text) = CStr::from_bytes_until_nul(text.as_bytes()) else {
        return ptr::null();
    };
    if buf.is_null() || len == 0 {
        return c"fake provider error".as_ptr();
    }
    let bytes = text.to_bytes();
    let n = bytes.len().min(len - 1);
    // SAFETY: the caller has room for `len` bytes.
    unsafe {
        ptr::copy_nonoverlapping(bytes.as_ptr().cast(), buf, n);
        buf.add(n).write(0);
    }
    buf
}
