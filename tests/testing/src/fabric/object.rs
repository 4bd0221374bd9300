//! The objects that programs open and close: fabrics, domains, queues, address vectors, endpoints,
//! registrations.
//!
//! Each object is a box that begins with libfabric's structure and keeps its network alive. This
//! file implements fabrics, domains and queues; `endpoint`, `vector` and `registration` implement
//! the others.

mod endpoint;
mod registration;
mod vector;

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use fishplate_sys::fabric::raw::*;

use super::info::world;
use super::queue::{CQ, Queue};
use super::world::{State, World};

use endpoint::open_ep;
use registration::MR;
use vector::open_av;

macro_rules! objects {
    ($($(#[$doc:meta])* $name:ident: $raw:ty;)*) => {$(
        $(#[$doc])*
        #[repr(C)]
        pub(super) struct $name {
            raw: $raw,
            pub world: Arc<World>,
            pub id: u32,
            pub domain: u32,
        }
    )*};
}

objects! {
    FakeFabric: fid_fabric;
    FakeDomain: fid_domain;
    FakeCq: fid_cq;
    FakeAv: fid_av;
    FakeEp: fid_ep;
    FakeMr: fid_mr;
}

fn head(class: usize, ops: &'static fi_ops) -> fid {
    fid { fclass: class, context: ptr::null_mut(), ops: table(ops) }
}

/// Returns a pointer to a table of calls, as C expects it. The table is never written.
fn table<T>(ops: &'static T) -> *mut T {
    ptr::from_ref(ops).cast_mut()
}

const fn common(
    close: unsafe extern "C" fn(*mut fid) -> c_int,
    bind: Option<unsafe extern "C" fn(*mut fid, *mut fid, u64) -> c_int>,
    control: Option<unsafe extern "C" fn(*mut fid, c_int, *mut c_void) -> c_int>,
) -> fi_ops {
    fi_ops {
        size: size_of::<fi_ops>(),
        close: Some(close),
        bind,
        control,
        ops_open: None,
        tostr: None,
        ops_set: None,
    }
}

static FABRIC: fi_ops = common(close_fabric, None, None);
static DOMAIN: fi_ops = common(close_domain, None, None);
static QUEUE: fi_ops = common(close_cq, None, None);

static IN_FABRIC: fi_ops_fabric = fi_ops_fabric {
    size: size_of::<fi_ops_fabric>(),
    domain: Some(open_domain),
    passive_ep: None,
    eq_open: None,
    wait_open: None,
    trywait: None,
    domain2: None,
};

static IN_DOMAIN: fi_ops_domain = fi_ops_domain {
    size: size_of::<fi_ops_domain>(),
    av_open: Some(open_av),
    cq_open: Some(open_cq),
    endpoint: Some(open_ep),
    scalable_ep: None,
    cntr_open: None,
    poll_open: None,
    stx_ctx: None,
    srx_ctx: None,
    query_atomic: None,
    query_collective: None,
    endpoint2: None,
};

pub(super) unsafe extern "C" fn open_fabric<const PLACE: usize>(
    attr: *mut fi_fabric_attr,
    out: *mut *mut fid_fabric,
    _context: *mut c_void,
) -> c_int {
    // SAFETY: the attributes are complete and come from this fake; the caller's result is writable.
    unsafe {
        let Some(world) = world(PLACE) else {
            return -FI_ENODATA;
        };
        let raw = fid_fabric {
            fid: head(FI_CLASS_FABRIC, &FABRIC),
            ops: table(&IN_FABRIC),
            api_version: (*attr).api_version,
        };
        let id = begin(&mut world.state());
        *out = Box::into_raw(Box::new(FakeFabric { raw, world, id, domain: 0 })).cast();
    }
    0
}

fn begin(state: &mut State) -> u32 {
    state.open += 1;
    state.number()
}

unsafe extern "C" fn open_domain(
    fabric: *mut fid_fabric,
    info: *mut fi_info,
    out: *mut *mut fid_domain,
    _context: *mut c_void,
) -> c_int {
    // SAFETY: `fabric` is an open fabric of this fake; the caller's result is writable.
    unsafe {
        let world = Arc::clone(&(*fabric.cast::<FakeFabric>()).world);
        let raw = fid_domain {
            fid: head(FI_CLASS_DOMAIN, &DOMAIN),
            ops: table(&IN_DOMAIN),
            mr: table(&MR),
        };
        let mut state = world.state();
        let id = begin(&mut state);
        if (*info).caps & FI_HMEM != 0 {
            state.reaching.insert(id);
        }
        drop(state);
        *out = Box::into_raw(Box::new(FakeDomain { raw, world, id, domain: id })).cast();
    }
    0
}

unsafe extern "C" fn open_cq(
    domain: *mut fid_domain,
    attr: *mut fi_cq_attr,
    out: *mut *mut fid_cq,
    _context: *mut c_void,
) -> c_int {
    // SAFETY: `domain` is an open domain of this fake, the attributes are complete, and the
    // caller's result is writable.
    unsafe {
        let domain = &*domain.cast::<FakeDomain>();
        if (*attr).format != FI_CQ_FORMAT_DATA {
            return -libc::ENOSYS;
        }
        let size = if (*attr).size == 0 { 1024 } else { (*attr).size };
        let mut state = domain.world.state();
        let id = begin(&mut state);
        state.cqs.insert(id, Queue::new(domain.id, size));
        let raw = fid_cq { fid: head(FI_CLASS_CQ, &QUEUE), ops: table(&CQ) };
        let world = Arc::clone(&domain.world);
        *out = Box::into_raw(Box::new(FakeCq { raw, world, id, domain: domain.id })).cast();
    }
    0
}

unsafe extern "C" fn close_fabric(object: *mut fid) -> c_int {
    // SAFETY: the object is open, and is closed only once.
    let this = unsafe { Box::from_raw(object.cast::<FakeFabric>()) };
    this.world.state().open -= 1;
    0
}

unsafe extern "C" fn close_domain(object: *mut fid) -> c_int {
    // SAFETY: the object is open, and is closed only once.
    let this = unsafe { Box::from_raw(object.cast::<FakeDomain>()) };
    let mut state = this.world.state();
    let inside = state.eps.values().any(|ep| ep.domain == this.id)
        || state.mrs.iter().any(|mr| mr.domain == this.id)
        || state.cqs.values().any(|cq| cq.domain == this.id);
    if inside {
        state.violation("a domain closed before what was opened in it");
    }
    state.open -= 1;
    0
}

unsafe extern "C" fn close_cq(object: *mut fid) -> c_int {
    // SAFETY: the object is open, and is closed only once.
    let this = unsafe { Box::from_raw(object.cast::<FakeCq>()) };
    let mut state = this.world.state();
    if state.eps.values().any(|ep| ep.tx == Some(this.id) || ep.rx == Some(this.id)) {
        state.violation("a completion queue closed before its endpoint");
    }
    state.cqs.remove(&this.id);
    state.open -= 1;
    0
}
