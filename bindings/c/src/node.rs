//! Opens and closes nodes, and handles addresses and peers.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::time::Duration;

use fishplate::config::Settings;
use fishplate::core::error::AttachError;
use fishplate::node::{Error, Fabric};
use fishplate::{Job, Limits, Node};

use crate::handle::{FpNode, enter, insert, outside, remove};
use crate::status::{Status, fail};

/// Settings of a node; the header documents them.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FpOptions {
    /// `sizeof (fp_options)` in the caller's build.
    pub struct_size: usize,
    /// `FP_*` flags.
    pub flags: u32,
    /// Maximum number of peers.
    pub peers: u32,
    /// Maximum number of registered regions.
    pub regions: u32,
    /// Maximum number of imported regions.
    pub imports: u32,
    /// Maximum number of operations in flight.
    pub operations: u32,
    /// Maximum time that an operation waits for room, in milliseconds.
    pub patience_ms: u32,
    /// Maximum time that the first use of a peer waits for its connection, in milliseconds.
    pub connect_timeout_ms: u32,
    /// Maximum number of libfabric rails.
    pub max_rails: u32,
    /// Provider names, separated by commas.
    pub providers: *const c_char,
    /// Interface names, separated by commas.
    pub interfaces: *const c_char,
    /// Number of this process among those of its host.
    pub local_rank: u32,
}

/// Disables shared memory for peers on this host.
pub const FP_NO_SHARED_MEMORY: u32 = 1;
/// Opens no libfabric rails.
pub const FP_NO_FABRIC: u32 = 2;
/// Makes `fp_node_open` fail if no libfabric rail opens.
pub const FP_REQUIRE_FABRIC: u32 = 4;

/// Provides a descriptor to wait on, even without libfabric rails.
pub const FP_WAIT_FD: u32 = 8;

/// Creates a page of counters for the node.
pub const FP_COUNTERS: u32 = 16;

/// Takes `local_rank` from the launcher's environment variables.
pub const FP_LAUNCHER: u32 = 32;

const FLAGS: u32 =
    FP_NO_SHARED_MEMORY | FP_NO_FABRIC | FP_REQUIRE_FABRIC | FP_WAIT_FD | FP_COUNTERS | FP_LAUNCHER;

const DEFAULTS: u32 = 0;

pub(crate) fn millis(timeout: i64) -> Duration {
    match u64::try_from(timeout) {
        Ok(millis) => Duration::from_millis(millis),
        Err(_) => Duration::MAX,
    }
}

#[inline(always)]
pub(crate) fn check<T>(pointer: *const T, name: &str) -> Result<(), Status> {
    match pointer.is_null() || !pointer.is_aligned() {
        true => Err(fail(
            libc::EINVAL,
            format_args!("invalid pointer: {name} is null or misaligned; pass an aligned one"),
        )),
        false => Ok(()),
    }
}

#[inline(always)]
pub(crate) fn place<'a, T>(pointer: *mut T, name: &str) -> Result<&'a mut MaybeUninit<T>, Status> {
    check(pointer, name)?;
    // SAFETY: `pointer` was checked above. The header requires it to be writable for one value, and
    // that nothing else uses it during the call. The value may be uninitialised.
    Ok(unsafe { &mut *pointer.cast() })
}

pub(crate) fn bytes<'a>(pointer: *const c_void, len: usize) -> Result<&'a [u8], Status> {
    if len == 0 {
        return Ok(&[]);
    }
    if pointer.is_null() || len > isize::MAX as usize {
        return Err(fail(
            libc::EINVAL,
            format_args!("invalid source: null, or {len} bytes are too many"),
        ));
    }
    // SAFETY: `pointer` was checked above. The header requires the bytes to be readable, and not
    // written during the call.
    Ok(unsafe { std::slice::from_raw_parts(pointer.cast(), len) })
}

pub(crate) fn buffer<'a>(pointer: *mut c_void, len: usize) -> Result<&'a mut [u8], Status> {
    if len == 0 {
        return Ok(&mut []);
    }
    if pointer.is_null() || len > isize::MAX as usize {
        return Err(fail(
            libc::EINVAL,
            format_args!("invalid buffer: null, or {len} bytes are too many"),
        ));
    }
    // SAFETY: `pointer` was checked above. The header requires the bytes to be initialised and
    // writable, and that nothing else uses them during the call.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer.cast(), len) })
}

/// Copies bytes into the caller's buffer, and writes the required size to `len`.
pub(crate) fn hand_out(from: &[u8], into: *mut c_void, len: *mut usize) -> Result<c_int, Status> {
    let len = place(len, "len")?;
    // SAFETY: the header requires that `len` holds the size of the buffer, so it is initialised.
    let room = unsafe { len.assume_init_read() };
    len.write(from.len());
    if room < from.len() {
        return Err(fail(
            libc::EMSGSIZE,
            format_args!("buffer too small: {room} bytes given; pass {} bytes", from.len()),
        ));
    }
    buffer(into, from.len())?.copy_from_slice(from);
    Ok(0)
}

fn names(list: *const c_char, what: &str) -> Result<Vec<String>, Status> {
    if list.is_null() {
        return Ok(vec![]);
    }
    // SAFETY: `list` is not null, and the header requires a string that ends with a zero byte.
    let list = unsafe { CStr::from_ptr(list) };
    let list = list.to_str().map_err(|_| {
        fail(
            libc::EINVAL,
            format_args!("invalid {what}: not UTF-8; pass names separated by commas"),
        )
    })?;
    Ok(list.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect())
}

/// Copies the fields that the caller's version of the header has. The other fields are 0.
fn options(given: *const FpOptions) -> Result<FpOptions, Status> {
    // SAFETY: the structure consists of numbers and raw pointers, for which zero is valid.
    let mut options: FpOptions = unsafe { std::mem::zeroed() };
    if given.is_null() {
        return Ok(options);
    }
    check(given, "options")?;
    // SAFETY: the header requires that the options begin with their size.
    let size = unsafe { (*given).struct_size };
    if !(size_of::<usize>()..=4096).contains(&size) {
        let text = format_args!("invalid struct_size: {size}; set it to sizeof (fp_options)");
        return Err(fail(libc::EINVAL, text));
    }
    let known = size_of::<FpOptions>();
    // SAFETY: the header requires `size` readable bytes.
    let all = unsafe { std::slice::from_raw_parts(given.cast::<u8>(), size) };
    if all.iter().skip(known).any(|&byte| byte != 0) {
        return Err(fail(
            libc::EINVAL,
            "unknown option set: the library is older than the header; set only options that the \
             library knows",
        ));
    }
    // SAFETY: both structures have at least this length, and any bytes are valid field values.
    unsafe {
        std::ptr::copy_nonoverlapping(
            given.cast(),
            (&raw mut options).cast::<u8>(),
            size.min(known),
        );
    }
    Ok(options)
}

fn limit<T: TryFrom<u32>>(given: u32, default: T, what: &str) -> Result<T, Status> {
    match given {
        DEFAULTS => Ok(default),
        given => T::try_from(given).map_err(|_| {
            fail(libc::EINVAL, format_args!("invalid {what}: {given}; use at most 65535"))
        }),
    }
}

fn settings(options: &FpOptions) -> Result<Settings, Status> {
    let told = match options.flags & FP_LAUNCHER {
        0 => Ok(None),
        _ => Job::local_rank_in_env(),
    };
    let told = told.map_err(|error| fail(libc::EINVAL, format_args!("{error}")))?;
    Ok(Settings {
        providers: names(options.providers, "providers")?,
        interfaces: names(options.interfaces, "interfaces")?,
        max_rails: limit(options.max_rails, Settings::DEFAULT.max_rails, "max_rails")?,
        local_rank: Some(told.unwrap_or(options.local_rank as usize)),
        ..Settings::DEFAULT
    })
}

/// Opens a node with these options, or with the defaults if `given` is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_node_open(given: *const FpOptions, node: *mut *mut FpNode) -> c_int {
    outside(|| {
        let node = place(node, "node")?;
        node.write(std::ptr::null_mut());
        let options = options(given)?;
        if options.flags & !FLAGS != 0 || options.flags & (FP_NO_FABRIC | FP_REQUIRE_FABRIC) == 6 {
            return Err(fail(
                libc::EINVAL,
                "invalid flags: unknown or contradictory; use FP_* flags, and not both \
                 FP_NO_FABRIC and FP_REQUIRE_FABRIC",
            ));
        }
        let limits = Limits {
            peers: limit(options.peers, Limits::DEFAULT.peers, "peers")?,
            locals: limit(options.regions, Limits::DEFAULT.locals, "regions")?,
            remotes: limit(options.imports, Limits::DEFAULT.remotes, "imports")?,
            operations: limit(options.operations, Limits::DEFAULT.operations, "operations")?,
        };
        let settings = settings(&options)?;
        let fabric = match options.flags & (FP_NO_FABRIC | FP_REQUIRE_FABRIC) {
            FP_NO_FABRIC => Fabric::Off,
            FP_REQUIRE_FABRIC => Fabric::Required,
            _ => Fabric::IfThere,
        };
        let mut builder = Node::builder().limits(limits).settings(settings).fabric(fabric);
        builder = builder.shared_memory(options.flags & FP_NO_SHARED_MEMORY == 0);
        if options.flags & FP_WAIT_FD != 0 {
            builder = builder.wait_fd();
        }
        if options.flags & FP_COUNTERS != 0 {
            builder = builder.counters();
        }
        if options.patience_ms != DEFAULTS {
            builder = builder.patience(Duration::from_millis(options.patience_ms.into()));
        }
        if options.connect_timeout_ms != DEFAULTS {
            builder =
                builder.connect_timeout(Duration::from_millis(options.connect_timeout_ms.into()));
        }
        node.write(insert(builder.open()?)?);
        Ok(0)
    })
}

/// Closes a node. Waits until its work is complete or the timeout expires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_node_close(node: *mut FpNode, timeout_ms: i64) -> c_int {
    outside(|| {
        let inner = *remove(node)?;
        inner.node.close(millis(timeout_ms))?;
        Ok(0)
    })
}

/// Copies out the node's address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_node_address(
    node: *mut FpNode,
    into: *mut c_void,
    len: *mut usize,
) -> c_int {
    enter(node, |inner| hand_out(&inner.node.address(), into, len))
}

/// Prepares a wait on the node's descriptor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_node_fd(node: *mut FpNode, timeout_ms: *mut c_int) -> c_int {
    enter(node, |inner| {
        let timeout_ms = place(timeout_ms, "timeout_ms")?;
        let longest = inner.node.arm();
        let Some(fd) = inner.node.wait_fd() else {
            return Err(fail(
                libc::ENOTSUP,
                "the node has no descriptor; open it with FP_WAIT_FD, and use providers that have \
                 descriptors",
            ));
        };
        // Rounds up, because 0 means that there is work.
        timeout_ms.write(longest.map_or(0, |longest| longest.as_millis() as c_int + 1));
        Ok(fd.as_raw_fd())
    })
}

/// Makes progress without waiting. Returns the number of events.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_progress(node: *mut FpNode) -> c_int {
    enter(node, |inner| {
        inner.node.publish_counters();
        Ok(inner.node.progress().min(c_int::MAX as u32) as c_int)
    })
}

/// Connects a peer by its address. Does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_peer_connect(
    node: *mut FpNode,
    address: *const c_void,
    len: usize,
    peer: *mut u32,
) -> c_int {
    enter(node, |inner| {
        let (place, address) = (place(peer, "peer")?, bytes(address, len)?);
        let peer = inner.node.connect(address)?.to_raw();
        place.write(inner.peer(peer));
        Ok(0)
    })
}

/// Returns 1 if the peer is connected, 0 if not yet, or a negative errno value.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_peer_state(node: *mut FpNode, named: u32) -> c_int {
    enter(node, |inner| {
        let peer = inner.named(named);
        if let Some(error) = inner.node.peer_error(peer)? {
            return Err(Error::from(fishplate::core::error::OpError::PeerFailed(error)).into());
        }
        let reach = inner.node.reach(peer)?;
        Ok((reach.shared_memory || reach.fabric != 0) as c_int)
    })
}

/// Disconnects a peer, and releases its imported memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_peer_disconnect(node: *mut FpNode, named: u32) -> c_int {
    enter(node, |inner| {
        let peer = inner.named(named);
        inner.node.disconnect(peer)?;
        inner.remotes.retain(|_, (_, owner)| *owner != peer);
        inner.claims.retain(|_, claimed| claimed.envelope.source != peer);
        Ok(0)
    })
}

pub(crate) fn unknown_region() -> Status {
    Error::from(AttachError::UnknownRegion).into()
}

/// Returns the library's version.
#[unsafe(no_mangle)]
pub extern "C" fn fp_version() -> u32 {
    let part =
        |text: &str| text.bytes().fold(0, |number, digit| number * 10 + u32::from(digit - b'0'));
    part(env!("CARGO_PKG_VERSION_MAJOR")) << 16
        | part(env!("CARGO_PKG_VERSION_MINOR")) << 8
        | part(env!("CARGO_PKG_VERSION_PATCH"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::*;
    use crate::messages::{FpMessage, FpTag, fp_probe, fp_send};

    #[test]
    fn the_options_select_the_local_rank() {
        // SAFETY: zero is valid for numbers and raw pointers.
        let zero: FpOptions = unsafe { std::mem::zeroed() };
        for local_rank in [0, 3] {
            let settings = settings(&FpOptions { local_rank, ..zero }).ok().unwrap();
            assert_eq!(settings.local_rank, Some(local_rank as usize));
        }
    }

    #[test]
    fn a_disconnected_peer_leaves_no_entries() {
        let node = Node::builder().fabric(Fabric::Off).open().unwrap();
        let (address, node) = (node.address(), insert(node).ok().unwrap());
        let (mut memory, mut peer, mut remote, mut handle) = (0, 0, 0, [0; 512]);
        let (mut len, tag) = (handle.len(), FpTag { low: 1, high: 0 });
        let mut message = MaybeUninit::<FpMessage>::uninit();
        // SAFETY: the pointers are to live variables of these sizes.
        let entries = unsafe {
            assert_eq!(fp_mem_alloc(node, 64, &mut memory), 0);
            assert_eq!(fp_mem_export(node, memory, handle.as_mut_ptr().cast(), &mut len), 0);
            let (address, bytes) = (address.as_ptr().cast(), address.len());
            assert_eq!(fp_peer_connect(node, address, bytes, &mut peer), 0);
            let handle = handle.as_ptr().cast();
            assert_eq!(fp_mem_import(node, peer, handle, len, &mut remote), 0);
            assert_eq!(fp_send(node, peer, tag, c"x".as_ptr().cast(), 1), 0);
            assert_eq!(fp_probe(node, peer, tag, tag, 1, message.as_mut_ptr()), 1);
            let entries = || enter(node, |of| Ok((of.remotes.len() + of.claims.len()) as c_int));
            assert_eq!(entries(), 2);
            assert_eq!(fp_peer_disconnect(node, peer), 0);
            assert_eq!(fp_mem_release(node, remote), -libc::EBADR);
            entries()
        };
        assert!(remove(node).is_ok());
        assert_eq!(entries, 0);
    }
}
