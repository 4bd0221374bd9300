//! Everything that is opened and closed: fabrics, domains, queues, address vectors, endpoints, registrations.
//!
//! Each object is a box that begins with libfabric's structure for it, and holds on to its network.

use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use fishplate_sys::fabric::raw::*;

use super::info::world;
use super::post;
use super::queue::{CQ, Queue};
use super::world::{Ep, Mr, NAME_LEN, State, World, descriptor, ep_of, name_of};

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

/// The start of an object.
fn head(class: usize, ops: &'static fi_ops) -> fid {
    fid { fclass: class, context: ptr::null_mut(), ops: table(ops) }
}

/// A table as C takes it. Nobody writes to it.
fn table<T>(ops: &'static T) -> *mut T {
    ptr::from_ref(ops).cast_mut()
}

/// The common table of a class.
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
static VECTOR: fi_ops = common(close_av, None, None);
static ENDPOINT: fi_ops = common(close_ep, Some(bind_ep), Some(control_ep));
static REGISTRATION: fi_ops = common(close_mr, Some(bind_mr), Some(control_mr));

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

static MR: fi_ops_mr =
    fi_ops_mr { size: size_of::<fi_ops_mr>(), reg: Some(register), regv: None, regattr: None };

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

pub(super) unsafe extern "C" fn open_fabric<const PLACE: usize>(
    attr: *mut fi_fabric_attr,
    out: *mut *mut fid_fabric,
    _context: *mut c_void,
) -> c_int {
    // SAFETY: whole attributes that a fake `fi_getinfo` gave; the caller's place for the answer.
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

/// Counts an object, and gives it a number.
fn begin(state: &mut State) -> u32 {
    state.open += 1;
    state.number()
}

unsafe extern "C" fn open_domain(
    fabric: *mut fid_fabric,
    _info: *mut fi_info,
    out: *mut *mut fid_domain,
    _context: *mut c_void,
) -> c_int {
    // SAFETY: an open fabric of ours; the caller's place for the answer.
    unsafe {
        let world = Arc::clone(&(*fabric.cast::<FakeFabric>()).world);
        let raw = fid_domain { fid: head(FI_CLASS_DOMAIN, &DOMAIN), ops: table(&IN_DOMAIN), mr: table(&MR) };
        let id = begin(&mut world.state());
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
    // SAFETY: an open domain of ours; whole attributes; the caller's place for the answer.
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

unsafe extern "C" fn open_av(
    domain: *mut fid_domain,
    attr: *mut fi_av_attr,
    out: *mut *mut fid_av,
    _context: *mut c_void,
) -> c_int {
    // SAFETY: as in `open_cq`.
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

unsafe extern "C" fn open_ep(
    domain: *mut fid_domain,
    info: *mut fi_info,
    out: *mut *mut fid_ep,
    _context: *mut c_void,
) -> c_int {
    // SAFETY: as in `open_cq`; a whole information.
    unsafe {
        let domain = &*domain.cast::<FakeDomain>();
        let interface = CStr::from_ptr((*(*info).domain_attr).name).to_string_lossy().into_owned();
        let mut state = domain.world.state();
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
    // SAFETY: an open endpoint, and an open object of the class that it says.
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

/// `FI_SELECTIVE_COMPLETION`, a flag of `fi_ep_bind`.
const FI_SELECTIVE_COMPLETION: u64 = 1 << 59;

unsafe extern "C" fn control_ep(ep: *mut fid, command: c_int, _argument: *mut c_void) -> c_int {
    // SAFETY: an open endpoint of ours.
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
    // SAFETY: an open endpoint of ours; the caller has as much room as it says.
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

unsafe extern "C" fn insert(
    av: *mut fid_av,
    addresses: *const c_void,
    count: usize,
    numbers: *mut u64,
    _flags: u64,
    _context: *mut c_void,
) -> c_int {
    // SAFETY: an open vector of ours; the caller gives `count` addresses and has room for as many numbers.
    unsafe {
        let this = &*av.cast::<FakeAv>();
        let mut state = this.world.state();
        let Some(known) = state.avs.get_mut(&this.id) else {
            return -libc::EINVAL;
        };
        let mut inserted = 0;
        for at in 0..count {
            let bytes = std::slice::from_raw_parts(addresses.cast::<u8>().add(at * NAME_LEN), NAME_LEN);
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

unsafe extern "C" fn remove(av: *mut fid_av, numbers: *mut u64, count: usize, _flags: u64) -> c_int {
    // SAFETY: an open vector of ours, and the caller's numbers.
    unsafe {
        let this = &*av.cast::<FakeAv>();
        let mut state = this.world.state();
        let Some(known) = state.avs.get_mut(&this.id) else {
            return -libc::EINVAL;
        };
        for at in 0..count {
            match known.get_mut(numbers.add(at).read() as usize) {
                Some(place) if place.is_some() => *place = None,
                _ => return -libc::EINVAL,
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
    // SAFETY: an address of our form; the caller has as much room as it says.
    unsafe {
        let bytes = std::slice::from_raw_parts(address.cast::<u8>(), NAME_LEN);
        let text = format!("fake://{}\0", ep_of(bytes).unwrap_or(0));
        let n = text.len().min(*len);
        ptr::copy_nonoverlapping(text.as_ptr().cast(), out, n);
        *len = text.len();
    }
    out
}

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
    // SAFETY: an open domain of ours; the caller's place for the answer.
    unsafe {
        let domain = &*domain.cast::<FakeDomain>();
        let mut state = domain.world.state();
        let mask = u64::MAX >> (64 - 8 * state.persona.key_bytes as u32);
        let taken =
            |state: &State, key: u64| state.mrs.iter().any(|mr| mr.domain == domain.id && mr.key == key);
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
        state.mrs.push(Mr { id, domain: domain.id, ep: None, enabled, ptr, len, access, key });
        let key = if per_endpoint { FI_KEY_NOTAVAIL } else { key };
        let raw = fid_mr { fid: head(FI_CLASS_MR, &REGISTRATION), mem_desc: descriptor(id), key };
        let world = Arc::clone(&domain.world);
        *out = Box::into_raw(Box::new(FakeMr { raw, world, id, domain: domain.id })).cast();
    }
    0
}

unsafe extern "C" fn bind_mr(mr: *mut fid, to: *mut fid, _flags: u64) -> c_int {
    // SAFETY: an open registration, and an open object of the class that it says.
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
    // SAFETY: an open registration of ours.
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
        // The key exists from here on.
        (*this).raw.key = mr.key;
    }
    0
}

unsafe extern "C" fn close_fabric(object: *mut fid) -> c_int {
    // SAFETY: open, and closed once.
    let this = unsafe { Box::from_raw(object.cast::<FakeFabric>()) };
    this.world.state().open -= 1;
    0
}

unsafe extern "C" fn close_domain(object: *mut fid) -> c_int {
    // SAFETY: open, and closed once.
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
    // SAFETY: open, and closed once.
    let this = unsafe { Box::from_raw(object.cast::<FakeCq>()) };
    let mut state = this.world.state();
    if state.eps.values().any(|ep| ep.tx == Some(this.id) || ep.rx == Some(this.id)) {
        state.violation("a completion queue closed before its endpoint");
    }
    state.cqs.remove(&this.id);
    state.open -= 1;
    0
}

unsafe extern "C" fn close_av(object: *mut fid) -> c_int {
    // SAFETY: open, and closed once.
    let this = unsafe { Box::from_raw(object.cast::<FakeAv>()) };
    let mut state = this.world.state();
    if state.eps.values().any(|ep| ep.av == Some(this.id)) {
        state.violation("an address vector closed before its endpoint");
    }
    state.avs.remove(&this.id);
    state.open -= 1;
    0
}

unsafe extern "C" fn close_ep(object: *mut fid) -> c_int {
    // SAFETY: open, and closed once.
    let this = unsafe { Box::from_raw(object.cast::<FakeEp>()) };
    let mut state = this.world.state();
    if state.mrs.iter().any(|mr| mr.ep == Some(this.id)) {
        state.violation("an endpoint closed before a registration that is bound to it");
    }
    state.forget(this.id);
    state.eps.remove(&this.id);
    state.open -= 1;
    0
}

unsafe extern "C" fn close_mr(object: *mut fid) -> c_int {
    // SAFETY: open, and closed once.
    let this = unsafe { Box::from_raw(object.cast::<FakeMr>()) };
    let mut state = this.world.state();
    if let Some(at) = state.mrs.iter().position(|mr| mr.id == this.id) {
        state.mrs.swap_remove(at);
    }
    state.open -= 1;
    0
}
