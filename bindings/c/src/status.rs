//! Return values: 0 or more, or a negative errno value.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int};
use std::fmt::{self, Display, Write};

use fishplate::core::error::{AttachError, OpError, PeerError, WaitError};
use fishplate::core::op::{Fault, Outcome};
use fishplate::node::{Error, OpenError};

/// A negative errno value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status(pub c_int);

/// Size in bytes of the buffer for a text and the zero byte after it.
const TEXT: usize = 512;

thread_local! {
    /// The text of the last error. Never freed before the thread ends, because a program may still
    /// hold a pointer to the text when the next call fails.
    static LAST: Cell<[u8; TEXT]> = const { Cell::new([0; TEXT]) };
}

/// A text that ends with a zero byte. The end of a longer text is cut off.
struct Text {
    bytes: [u8; TEXT],
    len: usize,
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut fits = text.len().min(TEXT - 1 - self.len);
        while !text.is_char_boundary(fits) {
            fits -= 1;
        }
        let into = &mut self.bytes[self.len..self.len + fits];
        into.copy_from_slice(&text.as_bytes()[..fits]);
        into.iter_mut().filter(|byte| **byte == 0).for_each(|byte| *byte = b' ');
        self.len += fits;
        // The rest must not follow a gap.
        if fits < text.len() { Err(fmt::Error) } else { Ok(()) }
    }
}

/// Stores the text of an error for [`fp_last_error`].
#[cold]
pub(crate) fn fail(code: c_int, text: impl Display) -> Status {
    let mut kept = Text { bytes: [0; TEXT], len: 0 };
    // Fails only if the text is too long, and then the beginning is there.
    let _ = write!(kept, "{text}");
    LAST.set(kept.bytes);
    Status(-code)
}

/// Returns the message of this thread's last error. The pointer is valid until the thread ends. The
/// next error replaces the text.
#[unsafe(no_mangle)]
pub extern "C" fn fp_last_error() -> *const c_char {
    LAST.with(|last| last.as_ptr().cast_const().cast())
}

/// Returns a short static description of a return value.
#[unsafe(no_mangle)]
pub extern "C" fn fp_strerror(status: c_int) -> *const c_char {
    let text: &CStr = match status.wrapping_neg() {
        ..=0 => c"success",
        libc::EAGAIN => c"no room; make progress, then retry",
        libc::ETIMEDOUT => c"the deadline has expired",
        libc::ENOTCONN => c"the peer is not connected",
        libc::ECONNRESET => c"the peer has failed",
        libc::ESHUTDOWN => c"the peer has closed its node",
        libc::EHOSTUNREACH => c"no rail connects the two nodes",
        libc::EPROTO => c"the two nodes are incompatible",
        libc::ENXIO => c"no such peer",
        libc::EBADF => c"no such node",
        libc::EBADR => c"no such region, operation, receive or message",
        libc::ERANGE => c"the range is outside its region",
        libc::EMSGSIZE => c"too long for the message limit or the buffer",
        libc::EBUSY => c"in use",
        libc::EADDRINUSE => c"freed, but a provider holds the memory; never reuse it",
        libc::EPERM => c"the node belongs to another thread",
        libc::ENOSPC => c"limit reached; see fp_last_error()",
        libc::ENOTSUP => c"not supported",
        libc::EINVAL => c"invalid argument",
        libc::ECANCELED => c"cancelled",
        libc::EIO => c"failed",
        libc::ENOTRECOVERABLE => c"internal error in the library; please report this bug",
        _ => c"system error; see fp_last_error()",
    };
    text.as_ptr()
}

fn of_peer(error: PeerError) -> c_int {
    match error {
        PeerError::Closed => libc::ESHUTDOWN,
        _ => libc::ECONNRESET,
    }
}

fn of_op(error: OpError) -> c_int {
    match error {
        OpError::Again => libc::EAGAIN,
        OpError::UnknownPeer => libc::ENXIO,
        OpError::UnknownRegion | OpError::StaleToken => libc::EBADR,
        OpError::OutOfBounds { .. } => libc::ERANGE,
        OpError::TooLong { .. } => libc::EMSGSIZE,
        OpError::PeerFailed(error) => of_peer(error),
        OpError::Rail(..) => libc::EIO,
        OpError::DeviceMemory | OpError::NativeAtomics | OpError::NoMatching => libc::ENOTSUP,
        _ => libc::EINVAL,
    }
}

fn of_attach(error: AttachError) -> c_int {
    match error {
        AttachError::Full(_) => libc::ENOSPC,
        AttachError::UnknownPeer | AttachError::Unattached(_) => libc::ENXIO,
        AttachError::UnknownRegion => libc::EBADR,
        AttachError::InUse(_) => libc::EBUSY,
        AttachError::Kept(_) => libc::EADDRINUSE,
        AttachError::Version { .. } => libc::EPROTO,
        AttachError::Unsupported => libc::ENOTSUP,
        AttachError::Unheard => libc::ETIMEDOUT,
        AttachError::System(code) if code > 0 => code,
        _ => libc::EINVAL,
    }
}

fn of_fault(fault: Fault) -> c_int {
    match fault {
        Fault::Peer(error) => of_peer(error),
        Fault::Receiver => libc::EMSGSIZE,
        Fault::Rail(..) | Fault::Post(..) => libc::EIO,
    }
}

/// Converts the outcome of an operation: 0 or a negative errno value, and whether it may still
/// land.
pub(crate) fn of_outcome(outcome: Outcome) -> (c_int, bool) {
    match outcome {
        Outcome::Done => (0, false),
        Outcome::Failed(fault) => (-of_fault(fault), false),
        Outcome::Unknown(fault) => (-of_fault(fault), true),
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let code = match error {
            Error::BadAddress => libc::EINVAL,
            Error::Version { .. } | Error::Differs { .. } | Error::Handshake(_) => libc::EPROTO,
            Error::NoRail => libc::EHOSTUNREACH,
            Error::NotConnected(_) => libc::ENOTCONN,
            Error::Full { .. } => libc::ENOSPC,
            Error::Attach(error) => of_attach(error),
            Error::Truncated { .. } => libc::EMSGSIZE,
            Error::Op(error) => of_op(error),
            Error::Wait(WaitError::Deadline(_)) | Error::Unfinished(_) => libc::ETIMEDOUT,
            Error::Wait(WaitError::PeerFailed(_, error)) => of_peer(error),
            Error::Failed(outcome) => -of_outcome(outcome).0,
            _ => libc::EIO,
        };
        match error {
            Error::BadAddress => {
                fail(code, "not a node's address; pass all bytes that fp_node_address returned")
            }
            Error::NotConnected(_) => {
                fail(code, "the peer did not connect in time; check that it calls fp_peer_connect")
            }
            Error::Full { limit, value } => {
                let option = match limit {
                    "locals" => "regions",
                    "remotes" => "imports",
                    limit => limit,
                };
                fail(
                    code,
                    format_args!("limit reached: {option} is {value}; raise it in fp_options"),
                )
            }
            error => fail(code, error),
        }
    }
}

impl From<OpError> for Status {
    fn from(error: OpError) -> Self {
        fail(of_op(error), error)
    }
}

impl From<OpenError> for Status {
    fn from(error: OpenError) -> Self {
        let code = match &error {
            OpenError::Setting(_) => libc::EINVAL,
            OpenError::Rails(_) => libc::ENODEV,
            OpenError::Attach(error) => of_attach(*error),
            _ => libc::EIO,
        };
        fail(code, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last() -> String {
        // SAFETY: the text ends with a zero byte, and no other thread changes it.
        unsafe { CStr::from_ptr(fp_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_text_stays_where_it_is_and_is_cut_between_characters() {
        assert_eq!(last(), "");
        fail(libc::EIO, "first");
        let place = fp_last_error();
        fail(libc::EIO, "a\0b");
        assert_eq!((last().as_str(), fp_last_error()), ("a b", place));
        fail(libc::EIO, format_args!("{}{}", "x".repeat(510), "\u{e9}!"));
        assert_eq!(last(), "x".repeat(510));
        fail(libc::EIO, "y".repeat(5000));
        assert_eq!((last(), fp_last_error()), ("y".repeat(511), place));
        fail(libc::EIO, "short");
        assert_eq!(last(), "short");
    }
}
