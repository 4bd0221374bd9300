//! The library and its endpoints: setup and teardown. Slow paths, which allocate. Closing waits, up
//! to its timeout.

use std::cell::Cell;
use std::io::Write;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fishplate::core::engine::protocol::MatchConfig;
use fishplate::node::{Fabric, OpenError};
use fishplate::{Limits, Node};

use crate::door::{Door, Sockets};
use crate::error::{Error, global, report, set_global};
use crate::frame::Frame;
use crate::handle::Ep;
use crate::layout::OpenOptions;
use crate::pause::unexpected;
use crate::table::{Endpoint, REQUESTS, find, guard, home, open, reserve};

/// The version of the interface.
const MAJOR: i32 = 2;
const MINOR: i32 = 2;

/// How often the library was initialized and not finalized.
static USERS: AtomicU32 = AtomicU32::new(0);

/// `PSM2_MULTI_EP_CAP` and `PSM2_LIB_REFCOUNT_CAP`.
const CAPABILITIES: u64 = 0x1 | 0x2;

/// Peers that an endpoint can have at once.
const PEERS: u16 = 256;

/// Sends that the engine has in hand. Those beyond wait in the queue.
const OPERATIONS: u32 = 1 << 15;

/// Limits of messages: what waits for its receive shares most of them.
const MATCHING: MatchConfig = MatchConfig {
    credits: 64,
    headers: 64,
    shared_credits: 1 << 16,
    shared_headers: 1 << 18,
    ..MatchConfig::DEFAULT
};

/// The longest that closing an endpoint waits for its peers.
const CLOSE: Duration = Duration::from_secs(30);

/// Initializes the library; each call is to be matched by one of [`psm2_finalize`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_init(major: *mut i32, minor: *mut i32) -> Error {
    // SAFETY: null, or two numbers of the caller.
    let (Some(major), Some(minor)) = (unsafe { (major.as_mut(), minor.as_mut()) }) else {
        return Error::PARAM;
    };
    if is_nested() || !(1..=MAJOR).contains(major) {
        return Error::BAD_VERSION;
    }
    (*major, *minor) = (MAJOR, MINOR);
    // Relaxed: only counted.
    USERS.fetch_add(1, Ordering::Relaxed);
    Error::OK
}

/// Ends one use of the library. The last closes what is open.
#[unsafe(no_mangle)]
pub extern "C" fn psm2_finalize() -> Error {
    let last = USERS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |users| users.checked_sub(1));
    match last {
        Err(_) => Error::NOT_INIT,
        Ok(1) => guard(|| {
            for home in open() {
                close(home.ep(), Duration::ZERO);
            }
            Error::OK
        }),
        Ok(_) => Error::OK,
    }
}

/// Registers the handler of an endpoint or, without one, of the process and of the endpoints that
/// it opens later.
#[unsafe(no_mangle)]
pub extern "C" fn psm2_error_register_handler(ep: *mut Ep, handler: usize) -> Error {
    if handler == 0 {
        return Error::PARAM;
    }
    if ep.is_null() {
        if !is_nested() {
            set_global(handler);
        }
        return Error::OK;
    }
    guard(|| match find(ep) {
        Some(mut endpoint) => {
            endpoint.handler = handler;
            Error::OK
        }
        None => Error::PARAM,
    })
}

/// Which of these capabilities the library has.
#[unsafe(no_mangle)]
pub extern "C" fn psm2_get_capability_mask(wanted: u64) -> u64 {
    wanted & CAPABILITIES
}

/// Writes the default options.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_ep_open_opts_get_defaults(options: *mut OpenOptions) -> Error {
    if options.is_null() {
        return Error::PARAM;
    }
    if USERS.load(Ordering::Relaxed) == 0 {
        return Error::NOT_INIT;
    }
    // SAFETY: not null, and the caller's structure, which may hold anything before.
    unsafe { options.write(OpenOptions::DEFAULT) };
    Error::OK
}

/// Opens an endpoint of the job with this key. Of the options, none means anything here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_ep_open(
    key: *const [u8; 16],
    _options: *const OpenOptions,
    ep: *mut *mut Ep,
    epid: *mut u64,
) -> Error {
    if key.is_null() || ep.is_null() || epid.is_null() {
        return Error::PARAM;
    }
    if USERS.load(Ordering::Relaxed) == 0 {
        return Error::NOT_INIT;
    }
    // SAFETY: not null, and 16 bytes of the caller.
    let uuid = unsafe { *key };
    guard(|| match open_endpoint(uuid) {
        Ok((opened, id)) => {
            // SAFETY: not null, and the caller's.
            unsafe { (*ep, *epid) = (opened, id) };
            Error::OK
        }
        Err((error, text)) => report(std::ptr::null_mut(), global(), error, text),
    })
}

fn open_endpoint(uuid: [u8; 16]) -> Result<(*mut Ep, u64), (Error, String)> {
    let failed = |text| (Error::DEVICE_FAILURE, text);
    let reserved = reserve()
        .ok_or_else(|| (Error::TOO_MANY_ENDPOINTS, "every endpoint of this process is in use".into()))?;
    let home = reserved.home();
    let matching = MatchConfig { shared_shorts: unexpected(), ..MATCHING };
    let node = open_node(REQUESTS, Some(matching)).map_err(|error| failed(error.to_string()))?;
    let host = if node.rails().is_empty() { None } else { host() };
    let sockets = Sockets::open(host)
        .map_err(|error| failed(format!("cannot open a socket that answers peers: {error}")))?;
    let epid = sockets.epid;
    let own = Frame { verdict: 0, uuid, epid, address: node.address().to_vec(), am: vec![] };
    reserved.insert(Endpoint::new(home, epid, uuid, node));
    match Door::start(sockets, home, own) {
        Ok(door) => {
            if let Some(mut endpoint) = home.find() {
                endpoint.door = Some(Box::new(door));
            }
            Ok((home.ep(), epid))
        }
        Err(error) => {
            drop(home.take());
            Err(failed(format!("cannot start the thread that answers peers: {error}")))
        }
    }
}

thread_local! {
    /// Whether this thread opens a node, which loads libfabric and asks all its providers for
    /// devices: the one for PSM2 calls this library.
    static OPENS: Cell<bool> = const { Cell::new(false) };
}

/// Whether libfabric calls while a node of ours opens.
pub(crate) fn is_nested() -> bool {
    OPENS.get()
}

/// Opens a node with a queue of so many requests.
pub(crate) fn open_node(requests: usize, matching: Option<MatchConfig>) -> Result<Node, OpenError> {
    let limits = Limits { peers: PEERS, operations: OPERATIONS, ..Limits::DEFAULT };
    let builder = Node::builder()
        .fabric(if asked_for_hosts() { Fabric::IfThere } else { Fabric::Off })
        .limits(limits)
        .requests(requests);
    OPENS.set(true);
    let opened = match matching {
        Some(matching) => builder.matching(matching),
        None => builder,
    }
    .open();
    OPENS.set(false);
    opened
}

/// Whether peers may be on other hosts. Open MPI says `self,shm` if all of a job are on one.
fn asked_for_hosts() -> bool {
    let devices = std::env::var("PSM2_DEVICES").unwrap_or_default();
    devices.is_empty() || devices.split(',').any(|device| device == "hfi")
}

/// The IPv4 address at which other hosts reach this one: the one that the user names, or the first
/// that is not a loopback's.
fn host() -> Option<Ipv4Addr> {
    if let Ok(named) = std::env::var("FISHPLATE_PSM2_ADDRESS") {
        return named.parse().ok();
    }
    let mut first = std::ptr::null_mut();
    // SAFETY: fills a pointer of ours with a list, which is freed below.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return None;
    }
    let (mut found, mut at) = (None, first);
    // SAFETY: the entries of the list are valid until it is freed, and so are the addresses in
    // them, each of the type that its family says.
    unsafe {
        while let Some(entry) = at.as_ref()
            && found.is_none()
        {
            if let Some(address) = entry.ifa_addr.as_ref()
                && i32::from(address.sa_family) == libc::AF_INET
                && entry.ifa_flags & libc::IFF_UP as u32 != 0
            {
                let address = entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                let address = Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr));
                found = (!address.is_loopback()).then_some(address);
            }
            at = entry.ifa_next;
        }
        libc::freeifaddrs(first);
    }
    found
}

/// Closes an endpoint. In the graceful mode, waits for peers to receive what was sent.
#[unsafe(no_mangle)]
pub extern "C" fn psm2_ep_close(ep: *mut Ep, mode: i32, timeout: i64) -> Error {
    let limit = match u64::try_from(timeout) {
        Ok(ns @ 1..) => Duration::from_nanos(ns).min(CLOSE),
        _ => CLOSE,
    };
    guard(|| close(ep, if mode == 0 { limit } else { Duration::ZERO }))
}

/// Zero: does not wait.
fn close(ep: *mut Ep, timeout: Duration) -> Error {
    let Some(home) = home(ep) else { return Error::PARAM };
    // The thread takes the lock that `find` holds: it is joined without.
    let Some(mut found) = find(ep) else { return Error::PARAM };
    let door = found.door.take();
    drop(found);
    drop(door);
    let Some(endpoint) = home.take() else { return Error::PARAM };
    let Endpoint { mut node, am, epid, retired, .. } = *endpoint;
    if std::env::var_os("FISHPLATE_PSM2_STATS").is_some()
        && let Some(queue) = node.queue()
    {
        let stats = queue.stats();
        let text = format!(
            "fishplate-psm2 {epid:016x}: sent {} ({} with their payload), received {}\n",
            stats.tx_num,
            stats.tx_eager_num,
            stats.rx_user_num + stats.rx_sys_num
        );
        // In one piece, for a terminal that many processes write to.
        _ = std::io::stderr().write_all(text.as_bytes());
    }
    if retired {
        // Without a pass, as if the process had ended.
        drop(node);
        return Error::OK;
    }
    if let Some(am) = am {
        _ = am.node.close(timeout);
    }
    match node.close(timeout) {
        Err(fishplate::node::Error::Unfinished(_)) if !timeout.is_zero() => Error::CLOSE_TIMEOUT,
        _ => Error::OK,
    }
}
