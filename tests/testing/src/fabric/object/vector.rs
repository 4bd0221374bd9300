//! The `fi_addr_t` of an address is its index.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use fishplate_sys::fabric::raw::*;

use super::{FakeAv, FakeDomain, begin, common, head, table};
use crate::fabric::world::{NAME_LEN, ep_of};

static VECTOR: fi_ops = common(close_av, None, None);

static AV: fi_ops_av = fi_ops_av {
    size: size_of::<fi_ops_av>(),
    insert: Some(insert),
    insertsvc: None,
    insertsym: None,
    remove: Some(remove),
    lookup: None,
    straddr: Some(straddr),
    av_set: None,
};

pub(super) unsafe extern "C" fn open_av(
    domain: *mut fid_domain,
    attr: *mut fi_av_attr,
    out: *mut *mut fid_av,
    _context: *mut c_void,
) -> c_int {
    // SAFETY: `domain` is an open domain of this fake, the attributes are complete, and the
    // caller's result is writable.
    unsafe {
        let domain = &*domain.cast::<FakeDomain>();
        if (*attr).r#type == FI_AV_MAP {
            return -libc::ENOSYS;
        }
        let mut state = domain.world.state();
        let id = begin(&mut state);
        state.avs.insert(id, vec![]);
        let raw = fid_av { fid: head(FI_CLASS_AV, &VECTOR), ops: table(&AV) };
        let world = Arc::clone(&domain.world);
        *out = Box::into_raw(Box::new(FakeAv { raw, world, id, domain: domain.id })).cast();
    }
    0
}

unsafe extern "C" fn insert(
    av: *mut fid_av,
    addresses: *const c_void,
    count: usize,
    numbers: *mut u64,
    _flags: u64,
    _context: *mut c_void,
) -> c_int {
    // SAFETY: `av` is an open vector of this fake. The caller provides `count` addresses and room
    // for `count` numbers.
    unsafe {
        let this = &*av.cast::<FakeAv>();
        let mut state = this.world.state();
        let Some(known) = state.avs.get_mut(&this.id) else {
            return -libc::EINVAL;
        };
        let mut inserted = 0;
        for at in 0..count {
            let bytes =
                std::slice::from_raw_parts(addresses.cast::<u8>().add(at * NAME_LEN), NAME_LEN);
            let number = match ep_of(bytes) {
                Some(ep) => {
                    inserted += 1;
                    let place = known.iter().position(Option::is_none).unwrap_or(known.len());
                    if place == known.len() {
                        known.push(None);
                    }
                    known[place] = Some(ep);
                    place as u64
                }
                None => FI_ADDR_NOTAVAIL,
            };
            if !numbers.is_null() {
                numbers.add(at).write(number);
            }
        }
        inserted
    }
}

unsafe extern "C" fn remove(
    av: *mut fid_av,
    numbers: *mut u64,
    count: usize,
    _flags: u64,
) -> c_int {
    // SAFETY: `av` is an open vector of this fake, and the caller provides `count` numbers.
    unsafe {
        let this = &*av.cast::<FakeAv>();
        let mut state = this.world.state();
        let Some(known) = state.avs.get_mut(&this.id) else {
            return -libc::EINVAL;
        };
        for at in 0..count {
            match known.get_mut(numbers.add(at).read() as usize) {
                Some(place) if place.is_some() => *place = None,
                _ => {
                    state.violation("an address removed that the vector does not have");
                    return -libc::EINVAL;
                }
            }
        }
    }
    0
}

unsafe extern "C" fn straddr(
    _av: *mut fid_av,
    address: *const c_void,
    out: *mut c_char,
    len: *mut usize,
) -> *const c_char {
    // SAFETY: the address has the length of this fake's addresses, and the caller has the stated
    // room.
    unsafe {
        let bytes = std::slice::from_raw_parts(address.cast::<u8>(), NAME_LEN);
        let text = format!("fake://{}\0", ep_of(bytes).unwrap_or(0));
        let n = text.len().min(*len);
        ptr::copy_nonoverlapping(text.as_ptr().cast(), out, n);
        *len = text.len();
    }
    out
}

unsafe extern "C" fn close_av(object: *mut fid) -> c_int {
    // SAFETY: the object is open, and is closed only once.
    let this = unsafe { Box::from_raw(object.cast::<FakeAv>()) };
    let mut state = this.world.state();
    if state.eps.values().any(|ep| ep.av == Some(this.id)) {
        state.violation("an address vector closed before its endpoint");
    }
    state.avs.remove(&this.id);
    state.open -= 1;
    0
}
