//! Converts errors to exceptions: the classes of `python/fishplate/_errors.py`, each with a `kind`.

use fishplate::core::engine::protocol::Received;
use fishplate::core::error::{AttachError, OpError, PeerError, WaitError};
use fishplate::core::op::{Fault as Cause, Outcome};
use fishplate::node::{Error, OpenError};
use pyo3::types::PyAnyMethods;
use pyo3::{PyErr, Python};

/// Contains no Python objects, so calls that release the GIL can return it.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The node returned an error.
    Node(Error),
    /// The node could not be opened.
    Open(OpenError),
    /// A call of the job failed.
    System(std::io::Error),
    /// An invalid argument: the `kind` of the exception, and its message.
    Misuse(&'static str, String),
    /// The receive was cancelled.
    Cancelled,
    /// A message of `len` bytes was longer than the buffer of `max` bytes.
    Truncated { len: u64, max: u64 },
    /// The node was closed.
    Closed,
    /// The node was opened before this process was forked.
    Forked,
    /// A panic made the node unusable.
    Broken,
    /// This thread is already inside a call of the node, and that call runs Python code.
    Busy,
    /// The device memory cannot be freed, because tensors over it exist.
    Lent,
}

impl Fault {
    pub fn is_deadline(&self) -> bool {
        matches!(self, Fault::Node(Error::Wait(WaitError::Deadline(_))))
    }

    /// True if the peer has not connected, or not announced its memory.
    pub fn is_unmet(&self) -> bool {
        matches!(self, Fault::Node(Error::NotConnected(_) | Error::Attach(AttachError::Unheard)))
    }

    /// True if a retry may succeed, once there is room or the peer has connected.
    pub fn may_pass(&self) -> bool {
        let Fault::Node(error) = self else { return false };
        let full = matches!(error, Error::Op(OpError::Again) | Error::Full { limit: "locals", .. });
        full || self.is_unmet()
    }

    #[cold]
    pub fn raise(self, py: Python<'_>) -> PyErr {
        let (class, kind) = self.names();
        let text = match self {
            Fault::Node(Error::NoGpu) => {
                "the node was opened without a device; open it with `gpu=\"cuda:0\"`".into()
            }
            Fault::Node(Error::BadAddress) => {
                "not a node's address; pass all bytes of `Node.address`".into()
            }
            Fault::Node(Error::NotConnected(peer)) => format!(
                "peer {} did not connect in time; check that it calls `Node.connect` too",
                peer.peer().0
            ),
            Fault::Node(Error::Full { limit, value }) => {
                let argument = match limit {
                    "locals" => "regions",
                    "remotes" => "imports",
                    limit => limit,
                };
                format!("limit reached: `{argument}` is {value}; raise this argument of `Node`")
            }
            Fault::Node(Error::NoGpuRail(peer)) => format!(
                "no rail carries device memory between this node and peer {}; open its owner with \
                 `gpu`",
                peer.peer().0
            ),
            Fault::Node(Error::Attach(AttachError::Unsupported)) => {
                "no rail supports this kind of memory; use host memory".into()
            }
            Fault::Node(error) => error.to_string(),
            Fault::Open(error) => error.to_string(),
            Fault::System(error) => error.to_string(),
            Fault::Misuse(_, text) => text,
            Fault::Cancelled => "the receive was cancelled".into(),
            Fault::Truncated { len, max } => {
                format!(
                    "message truncated: it has {len} bytes, the buffer {max}; receive into a \
                     longer buffer"
                )
            }
            Fault::Closed => "the node is closed; open a new one".into(),
            Fault::Forked => {
                "the node belongs to the parent process; open a node after the fork".into()
            }
            Fault::Broken => {
                "internal error in the library: the node is unusable; please report this bug".into()
            }
            Fault::Busy => {
                "this thread is already inside a call on this node; call it after that call returns"
                    .into()
            }
            Fault::Lent => {
                "cannot free the memory: tensors over it exist; drop the tensors first".into()
            }
        };
        let made = py
            .import("fishplate._errors")
            .and_then(|module| module.getattr(class))
            .and_then(|class| class.call1((text, kind)));
        made.map_or_else(|error| error, PyErr::from_value)
    }

    fn names(&self) -> (&'static str, &'static str) {
        match self {
            Fault::Node(error) => of_node(error),
            Fault::Open(OpenError::Setting(_)) => ("Misuse", "setting"),
            Fault::Open(OpenError::Rails(_) | OpenError::RailAddress) => ("Error", "no_rail"),
            Fault::Open(OpenError::Gpu(..)) => ("Error", "device"),
            Fault::Open(OpenError::Attach(error)) => of_attach(error),
            Fault::Open(_) => ("Error", "system"),
            Fault::System(error) => match error.kind() {
                std::io::ErrorKind::TimedOut => ("Timeout", "deadline"),
                std::io::ErrorKind::InvalidInput => ("Misuse", "argument"),
                _ => ("Error", "system"),
            },
            Fault::Misuse(kind, _) => ("Misuse", kind),
            Fault::Cancelled => ("Error", "cancelled"),
            Fault::Truncated { .. } => ("Error", "truncated"),
            Fault::Closed => ("Closed", "closed"),
            Fault::Forked => ("Closed", "forked"),
            Fault::Broken => ("Closed", "broken"),
            Fault::Busy => ("Error", "busy"),
            Fault::Lent => ("InUse", "in_use"),
        }
    }
}

fn of_node(error: &Error) -> (&'static str, &'static str) {
    match error {
        Error::BadAddress => ("Misuse", "address"),
        Error::Version { .. } | Error::Differs { .. } | Error::Handshake(_) => {
            ("Error", "mismatch")
        }
        Error::NoRail | Error::NoGpuRail(_) => ("Error", "no_rail"),
        Error::NotConnected(_) => ("NotConnected", "not_connected"),
        Error::Full { .. } => ("Full", "limit"),
        Error::NoGpu => ("Misuse", "no_device"),
        Error::Device(_) => ("Error", "device"),
        Error::StillOpen(_) | Error::Unfinished(_) => ("Timeout", "unfinished"),
        Error::Attach(error) => of_attach(error),
        Error::Truncated { .. } => ("Error", "truncated"),
        Error::Op(error) | Error::Wait(WaitError::Op(error)) => of_op(error),
        Error::Wait(WaitError::Deadline(_)) => ("Timeout", "deadline"),
        Error::Wait(WaitError::PeerFailed(_, error)) => of_peer(*error),
        Error::Wait(_) => ("Error", "lost"),
        Error::Failed(Outcome::Failed(cause)) => of_cause(*cause, "failed"),
        Error::Failed(Outcome::Unknown(cause)) => of_cause(*cause, "unknown"),
        _ => ("Error", "failed"),
    }
}

fn of_attach(error: &AttachError) -> (&'static str, &'static str) {
    match error {
        AttachError::Full(_) => ("Full", "limit"),
        AttachError::UnknownPeer | AttachError::Unattached(_) => ("Misuse", "unknown_peer"),
        AttachError::UnknownRegion => ("Misuse", "unknown_memory"),
        AttachError::InUse(_) => ("InUse", "in_use"),
        AttachError::Kept(_) => ("Error", "kept"),
        AttachError::Version { .. } => ("Error", "mismatch"),
        AttachError::Unsupported => ("Error", "unsupported"),
        AttachError::Unheard => ("Timeout", "deadline"),
        AttachError::System(_) => ("Error", "system"),
        AttachError::BadHandle => ("Misuse", "handle"),
        AttachError::BadRange => ("Misuse", "range"),
        AttachError::Misaligned => ("Misuse", "misaligned"),
        AttachError::Config(_) | AttachError::Memory { .. } => ("Misuse", "setting"),
        _ => ("Error", "failed"),
    }
}

fn of_op(error: &OpError) -> (&'static str, &'static str) {
    match error {
        OpError::Again => ("Full", "again"),
        OpError::UnknownPeer => ("Misuse", "unknown_peer"),
        OpError::UnknownRegion => ("Misuse", "unknown_memory"),
        OpError::OutOfBounds { .. } => ("Misuse", "range"),
        OpError::Misaligned { .. } => ("Misuse", "misaligned"),
        OpError::BadWidth(_) => ("Misuse", "width"),
        OpError::TooLong { .. } => ("Misuse", "too_long"),
        OpError::DeviceMemory => ("Misuse", "device_memory"),
        OpError::NativeAtomics => ("Misuse", "native_atomics"),
        OpError::PeerFailed(error) => of_peer(*error),
        OpError::Rail(..) => ("Error", "rail"),
        OpError::Abandoned => ("Closed", "broken"),
        _ => ("Misuse", "argument"),
    }
}

fn of_peer(error: PeerError) -> (&'static str, &'static str) {
    match error {
        PeerError::Closed => ("PeerFailed", "closed"),
        PeerError::Died => ("PeerFailed", "died"),
        _ => ("PeerFailed", "failed"),
    }
}

fn of_cause(cause: Cause, kind: &'static str) -> (&'static str, &'static str) {
    match cause {
        Cause::Peer(_) if kind == "unknown" => ("PeerFailed", kind),
        Cause::Peer(error) => of_peer(error),
        _ => ("Error", kind),
    }
}

pub(crate) fn misuse(py: Python<'_>, kind: &'static str, text: impl Into<String>) -> PyErr {
    Fault::Misuse(kind, text.into()).raise(py)
}

pub(crate) fn of_outcome(outcome: Outcome) -> Result<(), Fault> {
    match outcome {
        Outcome::Done => Ok(()),
        outcome => Err(Error::Failed(outcome).into()),
    }
}

/// Returns an error if the receive failed or was cancelled. Truncation is no error here.
pub(crate) fn of_received(outcome: Received) -> Result<(), Fault> {
    match outcome {
        Received::Ok | Received::Truncated => Ok(()),
        Received::Cancelled => Err(Fault::Cancelled),
        Received::Failed(cause) => Err(Error::Failed(Outcome::Failed(cause)).into()),
        Received::Unknown(cause) => Err(Error::Failed(Outcome::Unknown(cause)).into()),
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        Fault::Node(error)
    }
}

impl From<OpError> for Fault {
    fn from(error: OpError) -> Fault {
        Fault::Node(error.into())
    }
}
