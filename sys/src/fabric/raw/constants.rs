//! Constants: capabilities, flags, modes, orders, classes and errors.

pub const fn fi_version(major: u32, minor: u32) -> u32 {
    major << 16 | minor
}

// Flags of `fi_getinfo`.
pub const FI_PROV_ATTR_ONLY: u64 = 1 << 54;
pub const FI_NUMERICHOST: u64 = 1 << 55;

// Capabilities, and flags of operations and completions.
pub const FI_MSG: u64 = 1 << 1;
pub const FI_RMA: u64 = 1 << 2;
pub const FI_TAGGED: u64 = 1 << 3;
pub const FI_ATOMIC: u64 = 1 << 4;
pub const FI_READ: u64 = 1 << 8;
pub const FI_WRITE: u64 = 1 << 9;
pub const FI_RECV: u64 = 1 << 10;
pub const FI_SEND: u64 = 1 << 11;
pub const FI_TRANSMIT: u64 = FI_SEND;
pub const FI_REMOTE_READ: u64 = 1 << 12;
pub const FI_REMOTE_WRITE: u64 = 1 << 13;
pub const FI_MULTI_RECV: u64 = 1 << 16;
pub const FI_REMOTE_CQ_DATA: u64 = 1 << 17;
pub const FI_MORE: u64 = 1 << 18;
pub const FI_FENCE: u64 = 1 << 21;
pub const FI_COMPLETION: u64 = 1 << 24;
pub const FI_INJECT: u64 = 1 << 25;
pub const FI_INJECT_COMPLETE: u64 = 1 << 26;
pub const FI_TRANSMIT_COMPLETE: u64 = 1 << 27;
pub const FI_DELIVERY_COMPLETE: u64 = 1 << 28;
pub const FI_HMEM: u64 = 1 << 47;
pub const FI_SOURCE_ERR: u64 = 1 << 50;
pub const FI_LOCAL_COMM: u64 = 1 << 51;
pub const FI_REMOTE_COMM: u64 = 1 << 52;
pub const FI_RMA_EVENT: u64 = 1 << 56;
pub const FI_SOURCE: u64 = 1 << 57;
pub const FI_DIRECTED_RECV: u64 = 1 << 59;

// Modes.
pub const FI_CONTEXT2: u64 = 1 << 52;
pub const FI_RX_CQ_DATA: u64 = 1 << 56;
pub const FI_MSG_PREFIX: u64 = 1 << 58;
pub const FI_CONTEXT: u64 = 1 << 59;

pub const FI_MR_LOCAL: i32 = 1 << 2;
pub const FI_MR_RAW: i32 = 1 << 3;
pub const FI_MR_VIRT_ADDR: i32 = 1 << 4;
pub const FI_MR_ALLOCATED: i32 = 1 << 5;
pub const FI_MR_PROV_KEY: i32 = 1 << 6;
pub const FI_MR_MMU_NOTIFY: i32 = 1 << 7;
pub const FI_MR_RMA_EVENT: i32 = 1 << 8;
pub const FI_MR_ENDPOINT: i32 = 1 << 9;
pub const FI_MR_HMEM: i32 = 1 << 10;

/// A flag of a memory registration, since 1.20.
pub const FI_MR_DMABUF: u64 = 1 << 40;

pub const FI_HMEM_SYSTEM: i32 = 0;
pub const FI_HMEM_CUDA: i32 = 1;
pub const FI_HMEM_ROCR: i32 = 2;
pub const FI_HMEM_ZE: i32 = 3;

pub const FI_PROGRESS_UNSPEC: i32 = 0;
pub const FI_PROGRESS_AUTO: i32 = 1;
pub const FI_PROGRESS_MANUAL: i32 = 2;

pub const FI_THREAD_UNSPEC: i32 = 0;
pub const FI_THREAD_SAFE: i32 = 1;
pub const FI_THREAD_FID: i32 = 2;
pub const FI_THREAD_DOMAIN: i32 = 3;
pub const FI_THREAD_COMPLETION: i32 = 4;
pub const FI_THREAD_ENDPOINT: i32 = 5;

// `enum fi_resource_mgmt`.
pub const FI_RM_UNSPEC: i32 = 0;
pub const FI_RM_DISABLED: i32 = 1;
pub const FI_RM_ENABLED: i32 = 2;

pub const FI_EP_UNSPEC: i32 = 0;
pub const FI_EP_MSG: i32 = 1;
pub const FI_EP_DGRAM: i32 = 2;
pub const FI_EP_RDM: i32 = 3;

pub const FI_AV_UNSPEC: i32 = 0;
pub const FI_AV_MAP: i32 = 1;
pub const FI_AV_TABLE: i32 = 2;

// Message orders. The last letter names the earlier post: `FI_ORDER_SAW` is a send after a write.
pub const FI_ORDER_NONE: u64 = 0;
pub const FI_ORDER_RAR: u64 = 1 << 0;
pub const FI_ORDER_RAW: u64 = 1 << 1;
pub const FI_ORDER_RAS: u64 = 1 << 2;
pub const FI_ORDER_WAR: u64 = 1 << 3;
pub const FI_ORDER_WAW: u64 = 1 << 4;
pub const FI_ORDER_WAS: u64 = 1 << 5;
pub const FI_ORDER_SAR: u64 = 1 << 6;
pub const FI_ORDER_SAW: u64 = 1 << 7;
pub const FI_ORDER_SAS: u64 = 1 << 8;

// Formats of addresses.
pub const FI_FORMAT_UNSPEC: u32 = 0;
pub const FI_SOCKADDR: u32 = 1;
pub const FI_SOCKADDR_IN: u32 = 2;
pub const FI_SOCKADDR_IN6: u32 = 3;
pub const FI_SOCKADDR_IB: u32 = 4;
pub const FI_ADDR_STR: u32 = 9;
pub const FI_ADDR_EFA: u32 = 12;

pub const FI_ADDR_UNSPEC: u64 = u64::MAX;
pub const FI_ADDR_NOTAVAIL: u64 = u64::MAX;
pub const FI_KEY_NOTAVAIL: u64 = u64::MAX;

pub const FI_CQ_FORMAT_UNSPEC: i32 = 0;
pub const FI_CQ_FORMAT_CONTEXT: i32 = 1;
pub const FI_CQ_FORMAT_MSG: i32 = 2;
pub const FI_CQ_FORMAT_DATA: i32 = 3;
pub const FI_CQ_FORMAT_TAGGED: i32 = 4;

pub const FI_WAIT_NONE: i32 = 0;
pub const FI_WAIT_UNSPEC: i32 = 1;
pub const FI_WAIT_FD: i32 = 3;

pub const FI_CQ_COND_NONE: i32 = 0;

pub const FI_CLASS_FABRIC: usize = 1;
pub const FI_CLASS_DOMAIN: usize = 2;
pub const FI_CLASS_EP: usize = 3;
pub const FI_CLASS_AV: usize = 11;
pub const FI_CLASS_MR: usize = 12;
pub const FI_CLASS_EQ: usize = 13;
pub const FI_CLASS_CQ: usize = 14;

// Commands of `fi_control`.
pub const FI_GETWAIT: i32 = 5;
pub const FI_ENABLE: i32 = 6;

pub const FI_OPT_ENDPOINT: i32 = 0;
pub const FI_OPT_FI_HMEM_P2P: i32 = 8;

// `enum fi_bus_type` and `enum fi_link_state`.
pub const FI_BUS_UNKNOWN: i32 = 0;
pub const FI_BUS_PCI: i32 = 1;
pub const FI_LINK_UNKNOWN: i32 = 0;
pub const FI_LINK_DOWN: i32 = 1;
pub const FI_LINK_UP: i32 = 2;

// `enum fi_datatype`: the unsigned integers.
pub const FI_UINT8: i32 = 1;
pub const FI_UINT16: i32 = 3;
pub const FI_UINT32: i32 = 5;
pub const FI_UINT64: i32 = 7;

// `enum fi_op`.
pub const FI_SUM: i32 = 2;
pub const FI_BOR: i32 = 6;
pub const FI_BAND: i32 = 7;
pub const FI_BXOR: i32 = 9;
pub const FI_ATOMIC_READ: i32 = 10;
pub const FI_ATOMIC_WRITE: i32 = 11;
pub const FI_CSWAP: i32 = 12;

// `enum fi_type`, for `fi_tostr`.
pub const FI_TYPE_INFO: i32 = 0;
pub const FI_TYPE_CAPS: i32 = 2;
pub const FI_TYPE_MSG_ORDER: i32 = 13;
pub const FI_TYPE_MODE: i32 = 14;
pub const FI_TYPE_MR_MODE: i32 = 21;

// Error codes. The constants are positive, but calls return negated codes. Codes below 256 are
// `errno` values.
pub const FI_EAGAIN: i32 = libc::EAGAIN;
pub const FI_ENOSYS: i32 = libc::ENOSYS;
pub const FI_ENODATA: i32 = libc::ENODATA;
pub const FI_ECANCELED: i32 = libc::ECANCELED;
pub const FI_EOTHER: i32 = 256;
pub const FI_ETOOSMALL: i32 = 257;
pub const FI_EOPBADSTATE: i32 = 258;
pub const FI_EAVAIL: i32 = 259;
pub const FI_EBADFLAGS: i32 = 260;
pub const FI_ENOEQ: i32 = 261;
pub const FI_EDOMAIN: i32 = 262;
pub const FI_ENOCQ: i32 = 263;
pub const FI_ECRC: i32 = 264;
pub const FI_ETRUNC: i32 = 265;
pub const FI_ENOKEY: i32 = 266;
pub const FI_ENOAV: i32 = 267;
pub const FI_EOVERRUN: i32 = 268;
pub const FI_ENORX: i32 = 269;
