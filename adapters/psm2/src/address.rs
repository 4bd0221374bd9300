//! The word and the id that belong to the address of a peer. Nothing here waits.

use std::ffi::c_void;
use std::ptr::null_mut;

use crate::error::Error;
use crate::handle::{Ep, EpAddr};
use crate::layout::EpConn;
use crate::table::{find, find_address, guard};

/// Returns the word that the program has stored with a peer. Null if the address is invalid.
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

/// Stores a word with a peer.
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

/// The endpoint id of a peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_epaddr_to_epid(address: *mut EpAddr, epid: *mut u64) -> Error {
    if epid.is_null() {
        return Error::PARAM;
    }
    guard(|| {
        let Some((endpoint, id)) = find_address(address) else { return Error::PARAM };
        let Some(peer) = endpoint.peers.iter().find(|peer| peer.id == id) else { return Error::PARAM };
        // SAFETY: not null, and the caller's.
        unsafe { epid.write(peer.epid) };
        Error::OK
    })
}

/// Returns the address of the peer of an endpoint with this id.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_ep_epid_lookup2(ep: *mut Ep, epid: u64, found: *mut EpConn) -> Error {
    if found.is_null() {
        return Error::PARAM;
    }
    guard(|| {
        let Some(endpoint) = find(ep) else { return Error::PARAM };
        let Some(peer) = endpoint.peer(epid) else { return Error::UNKNOWN };
        let home = endpoint.home;
        // SAFETY: not null, and the caller's.
        unsafe { found.write(EpConn { address: home.address(peer.id), ep, mq: home.mq() }) };
        Error::OK
    })
}
