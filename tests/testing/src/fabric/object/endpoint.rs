//! Endpoints.

use std::collections::VecDeque;
use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use fishplate_sys::fabric::raw::*;

use super::{FakeAv, FakeCq, FakeDomain, FakeEp, begin, common, head, table};
use crate::fabric::post;
use crate::fabric::world::{Ep, NAME_LEN, name_of};

static ENDPOINT: fi_ops = common(close_ep, Some(bind_ep), Some(control_ep));

static EP: fi_ops_ep = fi_ops_ep {
    size: size_of::<fi_ops_ep>(),
    cancel: None,
    getopt: None,
    setopt: Some(setopt),
    tx_ctx: None,
    rx_ctx: None,
    rx_size_left: None,
    tx_size_left: None,
};

static CM: fi_ops_cm = fi_ops_cm {
    size: size_of::<fi_ops_cm>(),
    setname: None,
    getname: Some(getname),
    getpeer: None,
    connect: None,
    listen: None,
    accept: None,
    reject: None,
    shutdown: None,
    join: None,
};

pub(super) unsafe extern "C" fn open_ep(
    domain: *mut fid_domain,
    info: *mut fi_info,
    out: *mut *mut fid_ep,
    _context: *mut c_void,
) -> c_int {
    // SAFETY: `domain` is an open domain of this fake, the information is complete, and the
    // caller's result is writable.
    unsafe {
        let domain = &*domain.cast::<FakeDomain>();
        let interface = CStr::from_ptr((*(*info).domain_attr).name).to_string_lossy().into_owned();
        let mut state = domain.world.state();
        if state.bare.contains(&interface) {
            return -libc::EADDRNOTAVAIL;
        }
        if state.damaged.contains(&domain.id) {
            state.violation("an endpoint opened in a damaged domain");
        }
        let id = begin(&mut state);
        state.eps.insert(
            id,
            Ep {
                domain: domain.id,
                interface,
                av: None,
                tx: None,
                rx: None,
                selective: false,
                op_flags: (*(*info).tx_attr).op_flags,
                enabled: false,
                dead: false,
                recvs: VecDeque::new(),
            },
        );
        let atomic = state.persona.caps & (*info).caps & FI_ATOMIC != 0;
        let raw = fid_ep {
            fid: head(FI_CLASS_EP, &ENDPOINT),
            ops: table(&EP),
            cm: table(&CM),
            msg: table(&post::MSG),
            rma: table(&post::RMA),
            tagged: ptr::null_mut(),
            atomic: if atomic { table(&post::ATOMIC) } else { ptr::null_mut() },
            collective: ptr::null_mut(),
        };
        let world = Arc::clone(&domain.world);
        *out = Box::into_raw(Box::new(FakeEp { raw, world, id, domain: domain.id })).cast();
    }
    0
}

unsafe extern "C" fn bind_ep(ep: *mut fid, to: *mut fid, flags: u64) -> c_int {
    // SAFETY: `ep` is an open endpoint of this fake. `to` is an open object whose class is checked
    // before it is cast.
    unsafe {
        let this = &*ep.cast::<FakeEp>();
        let mut state = this.world.state();
        let (id, class) = (this.id, (*to).fclass);
        let number = match class {
            FI_CLASS_CQ => (*to.cast::<FakeCq>()).id,
            FI_CLASS_AV => (*to.cast::<FakeAv>()).id,
            _ => return -libc::EINVAL,
        };
        let Some(ep) = state.eps.get_mut(&id) else {
            return -libc::EINVAL;
        };
        if ep.enabled {
            return -FI_EOPBADSTATE;
        }
        if class == FI_CLASS_AV {
            ep.av = Some(number);
            return 0;
        }
        if flags & FI_TRANSMIT != 0 {
            ep.tx = Some(number);
            ep.selective = flags & FI_SELECTIVE_COMPLETION != 0;
        }
        if flags & FI_RECV != 0 {
            ep.rx = Some(number);
        }
    }
    0
}

const FI_SELECTIVE_COMPLETION: u64 = 1 << 59;

unsafe extern "C" fn control_ep(ep: *mut fid, command: c_int, _argument: *mut c_void) -> c_int {
    // SAFETY: `ep` is an open endpoint of this fake.
    let this = unsafe { &*ep.cast::<FakeEp>() };
    let mut state = this.world.state();
    let Some(ep) = state.eps.get_mut(&this.id) else {
        return -libc::EINVAL;
    };
    match command {
        FI_ENABLE if ep.av.is_none() => -FI_ENOAV,
        FI_ENABLE if ep.tx.is_none() || ep.rx.is_none() => -FI_ENOCQ,
        FI_ENABLE => {
            ep.enabled = true;
            0
        }
        _ => -libc::ENOSYS,
    }
}

unsafe extern "C" fn setopt(
    _ep: *mut fid,
    _level: c_int,
    _name: c_int,
    _value: *const c_void,
    _len: usize,
) -> c_int {
    -libc::ENOPROTOOPT
}

unsafe extern "C" fn getname(ep: *mut fid, out: *mut c_void, len: *mut usize) -> c_int {
    // SAFETY: `ep` is an open endpoint of this fake, and the caller has the stated room.
    unsafe {
        let this = &*ep.cast::<FakeEp>();
        let room = *len;
        *len = NAME_LEN;
        if room < NAME_LEN {
            return -FI_ETOOSMALL;
        }
        ptr::copy_nonoverlapping(name_of(this.id).as_ptr(), out.cast(), NAME_LEN);
    }
    0
}

unsafe extern "C" fn close_ep(object: *mut fid) -> c_int {
    // SAFETY: the object is open, and is closed only once.
    let this = unsafe { Box::from_raw(object.cast::<FakeEp>()) };
    let mut state = this.world.state();
    if state.mrs.iter().any(|mr| mr.ep == Some(this.id)) {
        state.violation("an endpoint closed before a registration bound to it");
    }
    state.damage_by_close(this.id);
    state.forget(this.id);
    state.eps.remove(&this.id);
    state.open -= 1;
    0
}
