//! The types that handles point to. They are empty, because a handle is never dereferenced.

/// `struct psm2_ep`.
#[repr(C)]
pub struct Ep([u8; 0]);

/// `struct psm2_mq`.
#[repr(C)]
pub struct Mq([u8; 0]);

/// `struct psm2_epaddr`.
#[repr(C)]
pub struct EpAddr([u8; 0]);

/// `struct psm2_mq_req`.
#[repr(C)]
pub struct Req([u8; 0]);
