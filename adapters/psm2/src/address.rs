//! The context word and the epid that belong to a peer's address. Nothing here waits.

use std::ffi::c_void;
use std::ptr::null_mut;

use crate::error::Error;
use crate::handle::{Ep, EpAddr};
use crate::layout::EpConn;
use crate::table::{find, find_address, guard};

/// Returns the context word that the program stored for a peer. Returns null if the address is
/// invalid.
#[unsafe(no_mangle)]
pub extern "C" fn psm2_epaddr_getctxt(address: *mut EpAddr) -> *mut c_void {
    let mut context = null_mut();
    guard(|| {
        if let Some((endpoint, id)) = find_address(address)
            && let Some(peer) = endpoint.peers.iter().find(|peer| peer.id == id)
        {
            context = peer.context as *mut c_void;
        }
        Error::OK
    });
    context
}

/// Stores a context word for a peer.
#[unsafe(no_mangle)]
pub extern "C" fn psm2_epaddr_setctxt(address: *mut EpAddr, context: *mut c_void) {
    guard(|| {
        if let Some((mut endpoint, id)) = find_address(address)
            && let Some(peer) = endpoint.peers.iter_mut().find(|peer| peer.id == id)
        {
            peer.context = context.addr();
        }
        Error::OK
    });
}

/// Writes the epid of a peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_epaddr_to_epid(address: *mut EpAddr, epid: *mut u64) -> Error {
    if epid.is_null() {
        return Error::PARAM;
    }
    guard(|| {
        let Some((endpoint, id)) = find_address(address) else { return Error::PARAM };
        let Some(peer) = endpoint.peers.iter().find(|peer| peer.id == id) else {
            return Error::PARAM;
        };
        // SAFETY: `epid` was checked not null, and PSM2 requires it to be writable.
        unsafe { epid.write(peer.epid) };
        Error::OK
    })
}

/// Writes the address of the peer that has this epid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_ep_epid_lookup2(ep: *mut Ep, epid: u64, found: *mut EpConn) -> Error {
    if found.is_null() {
        return Error::PARAM;
    }
    guard(|| {
        let Some(endpoint) = find(ep) else { return Error::PARAM };
        let Some(peer) = endpoint.peer(epid) else { return Error::UNKNOWN };
        let home = endpoint.home;
        // SAFETY: `found` was checked not null, and PSM2 requires it to be writable.
        unsafe { found.write(EpConn { address: home.address(peer.id), ep, mq: home.mq() }) };
        Error::OK
    })
}
