//! `fi_getinfo` and related calls. Structures are Rust boxes. The C library allocates the strings,
//! because callers who fill in hints expect that.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Arc, PoisonError};

use fishplate_sys::fabric::library::Entries;
use fishplate_sys::fabric::raw::*;

use super::object::open_fabric;
use super::world::World;
use super::{FAKES_MAX, Persona, WORLDS};

const VERSION: u32 = fi_version(1, 20);

pub(super) fn entries(place: usize) -> Entries {
    Entries {
        getinfo: GETINFO[place],
        freeinfo,
        dupinfo,
        fabric: OPEN_FABRIC[place],
        version,
        strerror,
        tostr,
    }
}

pub(super) fn world(place: usize) -> Option<Arc<World>> {
    WORLDS.get(place)?.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

macro_rules! of_each_place {
    ($function:ident: $($place:literal)*) => { [$($function::<$place>),*] };
    ($function:ident) => {
        of_each_place! { $function:
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
            32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57
            58 59 60 61 62 63 }
    };
}

/// A function per network, because the calls have no argument that identifies a network.
static GETINFO: [getinfo; FAKES_MAX] = of_each_place!(getinfo);
static OPEN_FABRIC: [fabric; FAKES_MAX] = of_each_place!(open_fabric);

unsafe extern "C" fn getinfo<const PLACE: usize>(
    _version: u32,
    _node: *const c_char,
    _service: *const c_char,
    _flags: u64,
    hints: *const fi_info,
    out: *mut *mut fi_info,
) -> c_int {
    let Some(world) = world(PLACE) else {
        return -FI_ENODATA;
    };
    let persona = world.state().persona.clone();
    let mut first = ptr::null_mut();
    for interface in persona.interfaces.iter().rev() {
        // SAFETY: libfabric's manual requires hints that are null or complete.
        if let Some(mut info) = unsafe { offer(&persona, interface, hints) } {
            info.next = first;
            first = Box::into_raw(info);
        }
    }
    if first.is_null() {
        return -FI_ENODATA;
    }
    // SAFETY: libfabric's manual requires a writable result.
    unsafe { *out = first };
    0
}

/// Returns the description of an interface, if it matches the hints.
///
/// # Safety
/// `hints` is null or complete.
unsafe fn offer(persona: &Persona, interface: &str, hints: *const fi_info) -> Option<Box<fi_info>> {
    // SAFETY: our caller guarantees that `hints` is null or complete.
    let hints = unsafe { hints.as_ref() };
    // SAFETY: the parts of complete hints are null or complete.
    let asked = hints.map(|h| unsafe {
        (
            h,
            h.tx_attr.as_ref(),
            h.rx_attr.as_ref(),
            h.ep_attr.as_ref(),
            h.domain_attr.as_ref(),
            h.fabric_attr.as_ref(),
        )
    });
    let mut progress = persona.progress;
    let mut threading = FI_THREAD_SAFE;
    let mut mr_mode = persona.mr_mode;
    // `FI_MR_HMEM` applies only to callers who request `FI_HMEM`.
    if asked.is_none_or(|(hints, ..)| hints.caps & FI_HMEM == 0) {
        mr_mode &= !FI_MR_HMEM;
    }
    let mut caps = persona.caps;
    let mut op_flags = 0;
    if let Some((hints, tx, rx, ep, domain, fabric)) = asked {
        if hints.caps & !persona.caps != 0 || persona.mode & !hints.mode != 0 {
            return None;
        }
        if hints.caps != 0 {
            // Grants only requested capabilities, except for two secondary capabilities.
            caps = hints.caps | persona.caps & (FI_LOCAL_COMM | FI_REMOTE_COMM);
        }
        if let Some(fabric) = fabric {
            let named = |name: *const c_char, is: &dyn Fn(&str) -> bool| {
                // SAFETY: names in complete hints are null or C strings.
                name.is_null() || unsafe { CStr::from_ptr(name) }.to_str().is_ok_and(is)
            };
            let is_provider = |name: &str| {
                persona.provider.split(';').any(|layer| layer == name) || persona.provider == name
            };
            if !named(fabric.prov_name, &is_provider)
                || !named(fabric.name, &|name| name == persona.fabric)
                || !domain.is_none_or(|domain| named(domain.name, &|name| name == interface))
            {
                return None;
            }
        }
        if let Some(domain) = domain {
            if mr_mode & !domain.mr_mode != 0 || domain.cq_data_size > persona.data_bytes {
                return None;
            }
            if domain.data_progress == FI_PROGRESS_AUTO && persona.progress != FI_PROGRESS_AUTO {
                return None;
            }
            if domain.data_progress != FI_PROGRESS_UNSPEC {
                progress = domain.data_progress;
            }
            if domain.threading != FI_THREAD_UNSPEC {
                threading = domain.threading;
            }
            if persona.locks && threading != FI_THREAD_SAFE {
                return None;
            }
            if domain.av_type == FI_AV_MAP {
                return None;
            }
        }
        if let Some(tx) = tx {
            if tx.inject_size > persona.inject
                || tx.size > persona.tx_size
                || tx.msg_order & !persona.order != 0
            {
                return None;
            }
            op_flags = tx.op_flags;
        }
        if rx.is_some_and(|rx| rx.size > persona.rx_size || rx.msg_order & !persona.order != 0) {
            return None;
        }
        if ep.is_some_and(|ep| {
            ![FI_EP_UNSPEC, FI_EP_RDM].contains(&ep.r#type) || ep.max_msg_size > persona.max_rma
        }) {
            return None;
        }
    }
    let mut info = empty();
    // SAFETY: `empty` has just created all parts.
    unsafe {
        info.caps = caps;
        info.mode = persona.mode;
        info.addr_format = FI_FORMAT_UNSPEC;
        let tx = &mut *info.tx_attr;
        (tx.caps, tx.mode, tx.op_flags) = (caps, persona.mode, op_flags);
        (tx.msg_order, tx.inject_size, tx.size) = (persona.order, persona.inject, persona.tx_size);
        (tx.iov_limit, tx.rma_iov_limit) = (2, 1);
        let rx = &mut *info.rx_attr;
        (rx.caps, rx.mode, rx.msg_order) = (caps, persona.mode, persona.order);
        (rx.size, rx.iov_limit) = (persona.rx_size, 2);
        let ep = &mut *info.ep_attr;
        (ep.r#type, ep.protocol_version, ep.max_msg_size) = (FI_EP_RDM, 1, persona.max_rma);
        (ep.tx_ctx_cnt, ep.rx_ctx_cnt) = (1, 1);
        let domain = &mut *info.domain_attr;
        domain.name = string(interface);
        (domain.threading, domain.control_progress, domain.data_progress) =
            (threading, progress, progress);
        domain.resource_mgmt = if persona.protects_queue { FI_RM_ENABLED } else { FI_RM_DISABLED };
        (domain.av_type, domain.mr_mode, domain.mr_key_size) =
            (FI_AV_TABLE, mr_mode, persona.key_bytes);
        (domain.cq_data_size, domain.cq_cnt, domain.ep_cnt) = (persona.data_bytes, 256, 256);
        (domain.tx_ctx_cnt, domain.rx_ctx_cnt) = (256, 256);
        (domain.max_ep_tx_ctx, domain.max_ep_rx_ctx, domain.mr_iov_limit) = (1, 1, 1);
        (domain.mr_cnt, domain.max_err_data) = (1 << 16, 64);
        let fabric = &mut *info.fabric_attr;
        fabric.name = string(persona.fabric);
        fabric.prov_name = string(persona.provider);
        let flawed = persona.frees_reads_twice;
        fabric.prov_version = if flawed { fi_version(117, 0) } else { VERSION };
        fabric.api_version = VERSION;
        info.nic = nic(persona, interface);
    }
    Some(info)
}

fn string(text: &str) -> *mut c_char {
    let text = CString::new(text).unwrap_or_default();
    // SAFETY: `text` is a C string.
    unsafe { libc::strdup(text.as_ptr()) }
}

/// Allocates a zeroed structure.
///
/// # Safety
/// All zeros is a valid `T`.
unsafe fn zeroed<T>() -> *mut T {
    // SAFETY: our caller guarantees that all zeros is a valid `T`.
    Box::into_raw(Box::new(unsafe { std::mem::zeroed() }))
}

fn empty() -> Box<fi_info> {
    // SAFETY: zeros are valid: null pointers, numbers, and the first value of every enumeration.
    unsafe {
        let mut info = Box::from_raw(zeroed::<fi_info>());
        info.tx_attr = zeroed();
        info.rx_attr = zeroed();
        info.ep_attr = zeroed();
        info.domain_attr = zeroed();
        info.fabric_attr = zeroed();
        info
    }
}

/// The PCI address depends on the index of the interface.
fn nic(persona: &Persona, interface: &str) -> *mut fid_nic {
    let at = persona.interfaces.iter().position(|name| *name == interface).unwrap_or(0);
    // SAFETY: zeros are valid: null pointers, numbers, and the first value of every enumeration.
    unsafe {
        let nic = zeroed::<fid_nic>();
        (*nic).bus_attr = zeroed();
        (*nic).link_attr = zeroed();
        (*(*nic).bus_attr).bus_type = FI_BUS_PCI;
        (*(*nic).bus_attr).pci.bus_id = 16 + at as u8;
        (*(*nic).link_attr).speed = persona.mbit as usize * 1_000_000;
        (*(*nic).link_attr).state = FI_LINK_UP;
        nic
    }
}

unsafe extern "C" fn dupinfo(info: *const fi_info) -> *mut fi_info {
    // SAFETY: libfabric's manual requires null or a complete description.
    let Some(source) = (unsafe { info.as_ref() }) else {
        return Box::into_raw(empty());
    };
    // SAFETY: `part` is null or points to a complete structure, which is plain data.
    unsafe fn copy<T: Copy>(part: *mut T) -> *mut T {
        if part.is_null() {
            return part;
        }
        // SAFETY: `part` is not null, so it points to a complete structure.
        Box::into_raw(Box::new(unsafe { *part }))
    }
    // SAFETY: the parts of a complete description are null or complete; its strings are null or C
    // strings.
    unsafe {
        let again = |text: *mut c_char| if text.is_null() { text } else { libc::strdup(text) };
        let mut twin = Box::new(*source);
        twin.next = ptr::null_mut();
        twin.tx_attr = copy(source.tx_attr);
        twin.rx_attr = copy(source.rx_attr);
        twin.ep_attr = copy(source.ep_attr);
        twin.domain_attr = copy(source.domain_attr);
        twin.fabric_attr = copy(source.fabric_attr);
        if let Some(domain) = twin.domain_attr.as_mut() {
            domain.name = again(domain.name);
        }
        if let Some(fabric) = twin.fabric_attr.as_mut() {
            (fabric.name, fabric.prov_name) = (again(fabric.name), again(fabric.prov_name));
        }
        let address = |from: *mut c_void, len: usize| {
            if from.is_null() {
                return from;
            }
            let to = libc::malloc(len.max(1));
            if !to.is_null() {
                ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast::<u8>(), len);
            }
            to
        };
        twin.src_addr = address(source.src_addr, source.src_addrlen);
        twin.dest_addr = address(source.dest_addr, source.dest_addrlen);
        twin.nic = copy(source.nic);
        if let Some(nic) = twin.nic.as_mut() {
            (nic.bus_attr, nic.link_attr) = (copy(nic.bus_attr), copy(nic.link_attr));
        }
        Box::into_raw(twin)
    }
}

unsafe extern "C" fn freeinfo(info: *mut fi_info) {
    // SAFETY: `part` is null or a box that this file created.
    unsafe fn free<T>(part: *mut T) {
        if !part.is_null() {
            // SAFETY: `zeroed` or `copy` created `part`, and it is freed once.
            drop(unsafe { Box::from_raw(part) });
        }
    }
    let mut next = info;
    while !next.is_null() {
        // SAFETY: the list consists of complete entries created by `getinfo` or `dupinfo`.
        unsafe {
            let entry = Box::from_raw(next);
            next = entry.next;
            if let Some(domain) = entry.domain_attr.as_ref() {
                libc::free(domain.name.cast());
            }
            if let Some(fabric) = entry.fabric_attr.as_ref() {
                libc::free(fabric.name.cast());
                libc::free(fabric.prov_name.cast());
            }
            libc::free(entry.src_addr);
            libc::free(entry.dest_addr);
            if let Some(nic) = entry.nic.as_ref() {
                free(nic.bus_attr);
                free(nic.link_attr);
            }
            free(entry.nic);
            free(entry.tx_attr);
            free(entry.rx_attr);
            free(entry.ep_attr);
            free(entry.domain_attr);
            free(entry.fabric_attr);
        }
    }
}

unsafe extern "C" fn version() -> u32 {
    VERSION
}

unsafe extern "C" fn strerror(code: c_int) -> *const c_char {
    let text = match code.abs() {
        FI_EAGAIN => c"fake: try again",
        FI_ENODATA => c"fake: nothing answers",
        FI_EOVERRUN => c"fake: the queue has overrun",
        FI_ETRUNC => c"fake: the receive was too short",
        FI_ECANCELED => c"fake: canceled",
        libc::ECONNRESET => c"fake: the other end is gone",
        _ => c"fake: some error",
    };
    text.as_ptr()
}

unsafe extern "C" fn tostr(_data: *const c_void, _kind: c_int) -> *mut c_char {
    c"fake".as_ptr().cast_mut()
}
