//! Setup and teardown of the library and its endpoints. These are slow paths and allocate. Closing
//! an endpoint waits, up to its timeout.

use std::cell::Cell;
use std::io::Write;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use fishplate::config::Settings;
use fishplate::core::engine::protocol::MatchConfig;
use fishplate::core::error::{Missing, Unfinished};
use fishplate::node::{Error as NodeError, Fabric, OpenError};
use fishplate::{Job, Limits, Node};

use crate::active::Am;
use crate::door::{Door, Sockets};
use crate::endpoint::Endpoint;
use crate::error::{Error, global, report, set_global};
use crate::frame::Frame;
use crate::handle::Ep;
use crate::home::REQUESTS;
use crate::layout::OpenOptions;
use crate::pause::unexpected;
use crate::table::{find, guard, home, open, reserve};

const MAJOR: i32 = 2;
const MINOR: i32 = 2;

static USERS: AtomicU32 = AtomicU32::new(0);

/// The bits `PSM2_MULTI_EP_CAP` and `PSM2_LIB_REFCOUNT_CAP`.
const CAPABILITIES: u64 = 0x1 | 0x2;

const PEERS: u16 = 256;

/// Maximum number of operations in flight. Further sends wait in the queue.
const OPERATIONS: u32 = 1 << 15;

/// If ranks share a processor, a sender can send this many messages before the receiver runs.
const WINDOW: u32 = 512;

/// All peers draw on the shared credits and headers.
const MATCHING: MatchConfig = MatchConfig {
    credits: 64,
    headers: 64,
    shared_credits: 1 << 16,
    shared_headers: 1 << 18,
    ..MatchConfig::DEFAULT
};

const CLOSE: Duration = Duration::from_secs(30);

/// Maximum time that [`leave`] waits for one node at a time: if one node is left, and if two are
/// left.
const SLICE: Duration = Duration::from_millis(100);
const TURN: Duration = Duration::from_millis(1);

/// Initializes the library. Each call needs a matching [`psm2_finalize`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_init(major: *mut i32, minor: *mut i32) -> Error {
    // SAFETY: PSM2 requires `major` and `minor` to be null or valid.
    let (Some(major), Some(minor)) = (unsafe { (major.as_mut(), minor.as_mut()) }) else {
        return Error::PARAM;
    };
    if is_nested() || !(1..=MAJOR).contains(major) {
        return Error::BAD_VERSION;
    }
    (*major, *minor) = (MAJOR, MINOR);
    // Relaxed: the counter publishes no other data.
    USERS.fetch_add(1, Ordering::Relaxed);
    Error::OK
}

/// Reverts one [`psm2_init`]. The last call closes open endpoints.
#[unsafe(no_mangle)]
pub extern "C" fn psm2_finalize() -> Error {
    let last =
        USERS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |users| users.checked_sub(1));
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

/// Registers an error handler for one endpoint. If `ep` is null, registers the handler of the
/// process. Endpoints that are opened later also use it.
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

/// Returns the wanted capabilities that the library has.
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
    // SAFETY: `options` was checked not null, and PSM2 requires it to be writable. Its old content
    // is not read.
    unsafe { options.write(OpenOptions::DEFAULT) };
    Error::OK
}

/// Opens an endpoint of the job with this key. Ignores the options.
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
    // SAFETY: `key` was checked not null, and PSM2 requires 16 readable bytes there.
    let uuid = unsafe { *key };
    guard(|| match open_endpoint(uuid) {
        Ok((opened, id)) => {
            // SAFETY: `ep` and `epid` were checked not null, and PSM2 requires both to be writable.
            unsafe { (*ep, *epid) = (opened, id) };
            Error::OK
        }
        Err((error, text)) => report(std::ptr::null_mut(), global(), error, text),
    })
}

fn open_endpoint(uuid: [u8; 16]) -> Result<(*mut Ep, u64), (Error, String)> {
    let failed = |text| (Error::DEVICE_FAILURE, text);
    let reserved = reserve().ok_or_else(|| {
        (Error::TOO_MANY_ENDPOINTS, "all endpoints of this process are in use; close one".into())
    })?;
    let home = reserved.home();
    let matching = MatchConfig { shared_shorts: unexpected(), ..MATCHING };
    let node = open_node(REQUESTS, Some(matching)).map_err(|error| failed(error.to_string()))?;
    let host = if node.rails().is_empty() { None } else { host() };
    let sockets = Sockets::open(host).map_err(|error| {
        failed(format!("cannot open a socket for peers to connect to: {error}"))
    })?;
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
    /// True while this thread opens a node. Opening loads libfabric. libfabric asks all its
    /// providers for devices, and its `psm2` provider calls this library.
    static OPENS: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether libfabric makes the current call because this thread is opening a node.
pub(crate) fn is_nested() -> bool {
    OPENS.get()
}

pub(crate) fn open_node(requests: usize, matching: Option<MatchConfig>) -> Result<Node, OpenError> {
    // A malformed variable must not fail the job: it only spreads processes over NICs.
    let local_rank = Job::local_rank_in_env().ok().flatten();
    let settings = Settings { window: WINDOW, local_rank, ..Settings::DEFAULT };
    let limits = Limits { peers: PEERS, operations: OPERATIONS, ..Limits::DEFAULT };
    let builder = Node::builder()
        .fabric(if asked_for_hosts() { Fabric::IfThere } else { Fabric::Off })
        .settings(settings)
        .limits(limits)
        .requests(requests);
    let builder = match matching {
        Some(matching) => builder.matching(matching),
        None => builder,
    };
    let builder = match std::env::var_os("FISHPLATE_PSM2_COUNTERS") {
        Some(_) => builder.counters(),
        None => builder,
    };
    OPENS.set(true);
    let opened = builder.open();
    OPENS.set(false);
    opened
}

/// Returns whether peers may be on other hosts. Open MPI sets `self,shm` if all processes of a job
/// share a host.
fn asked_for_hosts() -> bool {
    let devices = std::env::var("PSM2_DEVICES").unwrap_or_default();
    devices.is_empty() || devices.split(',').any(|device| device == "hfi")
}

/// Returns this host's IPv4 address for other hosts: `FISHPLATE_PSM2_ADDRESS` if it is set, else
/// the first non-loopback address.
fn host() -> Option<Ipv4Addr> {
    if let Ok(named) = std::env::var("FISHPLATE_PSM2_ADDRESS") {
        return named.parse().ok();
    }
    let mut first = std::ptr::null_mut();
    // SAFETY: `first` is ours; the returned list is freed below.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return None;
    }
    let (mut found, mut at) = (None, first);
    // SAFETY: entries and their addresses stay valid until `freeifaddrs`. An address of family
    // AF_INET is a `sockaddr_in`.
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

/// Closes an endpoint. The graceful mode waits until peers have received all sends, even if that
/// takes longer than `timeout`, but at most `CLOSE`. Then it waits until `timeout` for peers that
/// have not noticed the close. It succeeds even if they do not.
#[unsafe(no_mangle)]
pub extern "C" fn psm2_ep_close(ep: *mut Ep, mode: i32, timeout: i64) -> Error {
    let limit = match u64::try_from(timeout) {
        Ok(ns @ 1..) => Duration::from_nanos(ns).min(CLOSE),
        _ => CLOSE,
    };
    guard(|| close(ep, if mode == 0 { limit } else { Duration::ZERO }))
}

/// Closes an endpoint. Does not wait if `timeout` is zero.
fn close(ep: *mut Ep, timeout: Duration) -> Error {
    let Some(home) = home(ep) else { return Error::PARAM };
    // Dropping `door` joins a thread that takes the endpoint's lock, so the lock is released first.
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
        // Writes the line in one call, because many processes may share the terminal.
        _ = std::io::stderr().write_all(text.as_bytes());
    }
    if retired {
        // No further pass may run. To peers it looks as if the process had ended.
        drop(node);
        return Error::OK;
    }
    let now = Instant::now();
    let until = (!timeout.is_zero()).then_some((now + timeout, now + CLOSE));
    let left = leave(node, am, until);
    if until.is_some() && !left { Error::CLOSE_TIMEOUT } else { Error::OK }
}

/// Closes the two nodes in turns, because a peer may need one node before it closes the other.
/// `until` has two deadlines: for the answers of peers that need no node any more, and for peers
/// that still need one. If it is `None`, does not wait. Returns whether no peer needed a node at
/// the end.
fn leave(mut node: Node, mut am: Option<Box<Am>>, until: Option<(Instant, Instant)>) -> bool {
    let Some(until) = until else {
        let left = am.is_none_or(|mut am| am.node.shutdown(Duration::ZERO).is_ok());
        return node.shutdown(Duration::ZERO).is_ok() && left;
    };
    let (mut node, mut left) = (Some(node), true);
    while node.is_some() || am.is_some() {
        let slice = if node.is_some() && am.is_some() { TURN } else { SLICE };
        if let Some(open) = &mut node
            && let Some(ended) = leave_part(open, slice, until)
        {
            left &= ended;
            node = None;
        }
        let Some(open) = &mut am else { continue };
        let ended = if open.drain() {
            leave_part(&mut open.node, slice, until)
        } else {
            std::thread::yield_now();
            (Instant::now() >= until.1).then_some(false)
        };
        if let Some(ended) = ended {
            left &= ended;
            am = None;
        }
    }
    left
}

/// Continues to close a node for at most `slice`. Returns `None` if the close has to go on, else
/// whether no peer needed the node. See [`leave`] for the deadlines.
fn leave_part(
    node: &mut Node,
    slice: Duration,
    (answers, all): (Instant, Instant),
) -> Option<bool> {
    let end = all.min(Instant::now() + slice);
    let Err(NodeError::Unfinished(Unfinished { missing, .. })) =
        node.shutdown(end.saturating_duration_since(Instant::now()))
    else {
        // A failed peer needs no node.
        return Some(true);
    };
    let needed = missing != Missing::Answer;
    (Instant::now() >= if needed { all } else { answers }).then_some(!needed)
}
