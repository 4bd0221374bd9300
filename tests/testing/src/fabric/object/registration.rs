//! Memory registrations. The program or the provider chooses the keys, as the persona requires.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use fishplate_sys::fabric::raw::*;

use super::{FakeDomain, FakeEp, FakeMr, begin, common, head};
use crate::fabric::world::{Mr, State, descriptor};

static REGISTRATION: fi_ops = common(close_mr, Some(bind_mr), Some(control_mr));

pub(super) static MR: fi_ops_mr = fi_ops_mr {
    size: size_of::<fi_ops_mr>(),
    reg: Some(register),
    regv: None,
    regattr: Some(register_attr),
};

#[allow(clippy::too_many_arguments, reason = "libfabric's signature")]
unsafe extern "C" fn register(
    domain: *mut fid,
    buf: *const c_void,
    len: usize,
    access: u64,
    _offset: u64,
    requested: u64,
    _flags: u64,
    out: *mut *mut fid_mr,
    _context: *mut c_void,
) -> c_int {
    // SAFETY: `domain` is an open domain of this fake; the caller's result is writable.
    unsafe {
        let of_device =
            (*domain.cast::<FakeDomain>()).world.state().device_of(buf as usize, len).is_some();
        if of_device {
            (*domain.cast::<FakeDomain>())
                .world
                .state()
                .violation("device memory registered as host memory");
            return -libc::EFAULT;
        }
        add(domain, (buf, len), access, requested, None, out)
    }
}

/// Device memory is given by address or by a dmabuf descriptor.
unsafe extern "C" fn register_attr(
    domain: *mut fid,
    attr: *const fi_mr_attr,
    flags: u64,
    out: *mut *mut fid_mr,
) -> c_int {
    // SAFETY: `domain` is an open domain of this fake, the attributes are complete, and the
    // caller's result is writable.
    unsafe {
        let attr = &*attr;
        if attr.iov_count != 1 || flags & !FI_MR_DMABUF != 0 {
            return -libc::EINVAL;
        }
        let by_descriptor = flags & FI_MR_DMABUF != 0;
        let (buf, len) = if by_descriptor {
            let buffer = &*attr.mr_iov.cast::<fi_mr_dmabuf>();
            let mut start = [0; 8];
            if libc::pread(buffer.fd, start.as_mut_ptr().cast(), start.len(), 0) != 8 {
                return -libc::EBADF;
            }
            // The fake drivers' descriptors contain the address of their first byte.
            if u64::from_ne_bytes(start) + buffer.offset != buffer.base_addr as u64 {
                let this = &*domain.cast::<FakeDomain>();
                this.world.state().violation("a dmabuf of other memory than the address");
                return -libc::EFAULT;
            }
            (buffer.base_addr, buffer.len)
        } else {
            let whole = &*attr.mr_iov.cast::<libc::iovec>();
            (whole.iov_base, whole.iov_len)
        };
        let this = &*domain.cast::<FakeDomain>();
        let mut state = this.world.state();
        if by_descriptor && !state.persona.dmabuf {
            return -libc::EOPNOTSUPP;
        }
        if !state.reaching.contains(&this.id) {
            state.violation("device memory in a domain without FI_HMEM");
            return -libc::EINVAL;
        }
        match state.device_of(buf as usize, len) {
            Some(device)
                if state.bus.as_ref().is_some_and(|bus| bus.interface() == attr.iface)
                    && attr.device == u64::from(device) => {}
            _ => return -libc::EFAULT,
        }
        drop(state);
        add(domain, (buf, len), attr.access, attr.requested_key, Some(by_descriptor), out)
    }
}

/// Adds a registration. For device memory, `dmabuf` is true if it is given by a descriptor.
///
/// # Safety
/// `domain` is an open domain of this fake; the result is writable.
unsafe fn add(
    domain: *mut fid,
    (buf, len): (*const c_void, usize),
    access: u64,
    requested: u64,
    device: Option<bool>,
    out: *mut *mut fid_mr,
) -> c_int {
    // SAFETY: libfabric's manual requires the caller to pass valid arguments.
    unsafe {
        let domain = &*domain.cast::<FakeDomain>();
        let mut state = domain.world.state();
        if state.refuses_registrations {
            return -libc::ENOMEM;
        }
        let mask = u64::MAX >> (64 - 8 * state.persona.key_bytes as u32);
        let taken = |state: &State, key: u64| {
            state.mrs.iter().any(|mr| mr.domain == domain.id && mr.key == key)
        };
        let key = if state.persona.mr_mode & FI_MR_PROV_KEY == 0 {
            if requested > mask || taken(&state, requested) {
                return -FI_ENOKEY;
            }
            requested
        } else {
            loop {
                let key = (u64::from(state.draw(u32::MAX)) << 16 | 0x71) & mask;
                if !taken(&state, key) {
                    break key;
                }
            }
        };
        let id = begin(&mut state);
        let per_endpoint = state.persona.mr_mode & FI_MR_ENDPOINT != 0;
        let (enabled, ptr) = (!per_endpoint, buf.expose_provenance());
        let (device, by_descriptor) = (device.is_some(), device == Some(true));
        let domain_id = domain.id;
        state.mrs.push(Mr {
            id,
            domain: domain_id,
            ep: None,
            enabled,
            ptr,
            len,
            access,
            key,
            device,
            by_descriptor,
        });
        let key = if per_endpoint { FI_KEY_NOTAVAIL } else { key };
        let raw = fid_mr { fid: head(FI_CLASS_MR, &REGISTRATION), mem_desc: descriptor(id), key };
        let world = Arc::clone(&domain.world);
        *out = Box::into_raw(Box::new(FakeMr { raw, world, id, domain: domain.id })).cast();
    }
    0
}

unsafe extern "C" fn bind_mr(mr: *mut fid, to: *mut fid, _flags: u64) -> c_int {
    // SAFETY: `mr` is an open registration of this fake. `to` is an open object whose class is
    // checked before it is cast.
    unsafe {
        if (*to).fclass != FI_CLASS_EP {
            return -libc::EINVAL;
        }
        let (this, ep) = (&*mr.cast::<FakeMr>(), &*to.cast::<FakeEp>());
        let mut state = this.world.state();
        match state.mrs.iter_mut().find(|mr| mr.id == this.id) {
            Some(mr) => mr.ep = Some(ep.id),
            None => return -libc::EINVAL,
        }
    }
    0
}

unsafe extern "C" fn control_mr(mr: *mut fid, command: c_int, _argument: *mut c_void) -> c_int {
    // SAFETY: `mr` is an open registration of this fake.
    unsafe {
        let this = mr.cast::<FakeMr>();
        let world = Arc::clone(&(*this).world);
        let mut state = world.state();
        let per_endpoint = state.persona.mr_mode & FI_MR_ENDPOINT != 0;
        let Some(mr) = state.mrs.iter_mut().find(|mr| mr.id == (*this).id) else {
            return -libc::EINVAL;
        };
        if command != FI_ENABLE || (per_endpoint && mr.ep.is_none()) {
            return -libc::EINVAL;
        }
        mr.enabled = true;
        (*this).raw.key = mr.key;
    }
    0
}

unsafe extern "C" fn close_mr(object: *mut fid) -> c_int {
    // SAFETY: the object is open until this function closes it.
    let world = Arc::clone(unsafe { &(*object.cast::<FakeMr>()).world });
    let mut state = world.state();
    if state.keeps_registrations {
        return -libc::EBUSY;
    }
    // SAFETY: the object is open, and is closed only once.
    let this = unsafe { Box::from_raw(object.cast::<FakeMr>()) };
    if let Some(at) = state.mrs.iter().position(|mr| mr.id == this.id) {
        state.mrs.swap_remove(at);
    }
    state.open -= 1;
    0
}
