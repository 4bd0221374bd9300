//! The status codes of calls, numbered as in NIXL.

use fishplate::core::error::{AttachError, OpError, PostError};
use fishplate::gpu::DeviceError;
use fishplate::node::Error;

/// Negative for an error.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status(pub i32);

impl Status {
    pub const IN_PROG: Status = Status(1);
    pub const SUCCESS: Status = Status(0);
    pub const INVALID_PARAM: Status = Status(-2);
    pub const BACKEND: Status = Status(-3);
    pub const NOT_FOUND: Status = Status(-4);
    pub const MISMATCH: Status = Status(-5);
    pub const NOT_ALLOWED: Status = Status(-6);
    pub const REPOST_ACTIVE: Status = Status(-7);
    pub const NOT_SUPPORTED: Status = Status(-9);
    pub const REMOTE_DISCONNECT: Status = Status(-10);
}

impl From<OpError> for Status {
    fn from(error: OpError) -> Status {
        match error {
            OpError::Again => Status::IN_PROG,
            OpError::PeerFailed(_)
            | OpError::UnknownPeer
            | OpError::Rail(_, PostError::PeerDown) => Status::REMOTE_DISCONNECT,
            OpError::UnknownRegion => Status::NOT_FOUND,
            OpError::OutOfBounds { .. } => Status::INVALID_PARAM,
            _ => Status::BACKEND,
        }
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Status {
        match error {
            Error::Op(error) => error.into(),
            Error::BadAddress => Status::INVALID_PARAM,
            Error::Version { .. } | Error::Differs { .. } => Status::MISMATCH,
            Error::NoRail | Error::NoGpuRail(_) => Status::NOT_SUPPORTED,
            Error::Device(
                DeviceError::NotDeviceMemory
                | DeviceError::NotExportable(_)
                | DeviceError::OtherDevice { .. },
            ) => Status::NOT_SUPPORTED,
            Error::Attach(AttachError::InUse(_)) => Status::NOT_ALLOWED,
            Error::Attach(AttachError::UnknownRegion) => Status::NOT_FOUND,
            Error::Attach(AttachError::UnknownPeer | AttachError::Unattached(_)) => {
                Status::REMOTE_DISCONNECT
            }
            _ => Status::BACKEND,
        }
    }
}
