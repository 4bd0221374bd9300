//! Layouts of the structures in `psm2.h` and `psm2_mq.h`, which compiled programs rely on.
//! `tests/layout.c` compares them with the headers of Debian's `libpsm2-dev`.

use std::ffi::c_void;
use std::mem::offset_of;

use fishplate::PeerId;
use fishplate::core::psm::{Code, Completed, Stats, Status2};

use crate::error::Error;
use crate::handle::{Ep, EpAddr, Mq};
use crate::home::Home;

/// `psm2_mq_tag_t`. Matching compares the first three words.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(4))]
pub struct MqTag {
    /// The tag words.
    pub words: [u32; 4],
}

/// `psm2_mq_status_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct MqStatus {
    tag: u64,
    length: u32,
    nbytes: u32,
    error: Error,
    context: *mut c_void,
}

/// `psm2_mq_status2_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
pub struct MqStatus2 {
    peer: *mut EpAddr,
    /// Padding, because the header aligns the tag to 16 bytes.
    aligns: u64,
    tag: MqTag,
    length: u32,
    nbytes: u32,
    error: Error,
    context: *mut c_void,
}

/// `struct psm2_mq_stats`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct MqStats {
    counters: [u64; 13],
    reserved: [u64; 16],
}

/// `psm2_epconn_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct EpConn {
    /// Address of the peer.
    pub address: *mut EpAddr,
    /// The endpoint that owns the address.
    pub ep: *mut Ep,
    /// The queue of that endpoint.
    pub mq: *mut Mq,
}

/// `struct psm2_ep_open_opts`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct OpenOptions {
    /// Maximum time to open a device, in nanoseconds. Ignored.
    pub timeout: i64,
    unit: i32,
    affinity: i32,
    shm_mbytes: i32,
    sendbufs_num: i32,
    network_pkey: u64,
    port: i32,
    outsl: i32,
    service_id: u64,
    path_res_type: u32,
    senddesc_num: i32,
    imm_size: i32,
}

const _: () = {
    assert!(size_of::<MqTag>() == 16);
    assert!(size_of::<MqStatus>() == 32 && offset_of!(MqStatus, error) == 16);
    assert!(size_of::<MqStatus2>() == 64 && offset_of!(MqStatus2, tag) == 16);
    assert!(offset_of!(MqStatus2, length) == 32 && offset_of!(MqStatus2, context) == 48);
    assert!(size_of::<EpConn>() == 24 && offset_of!(EpConn, mq) == 16);
    assert!(size_of::<MqStats>() == 29 * 8);
    assert!(size_of::<OpenOptions>() == 64 && offset_of!(OpenOptions, imm_size) == 56);
};

impl OpenOptions {
    pub(crate) const DEFAULT: OpenOptions = OpenOptions {
        timeout: 30_000_000_000,
        unit: -1,
        affinity: 0,
        shm_mbytes: 10,
        sendbufs_num: 1024,
        network_pkey: u64::MAX,
        port: 0,
        outsl: 0,
        service_id: 0x1000_1175_0000_0000,
        path_res_type: 0,
        senddesc_num: 4096,
        imm_size: 128,
    };
}

/// The fields of a status, of a completed request or of a probe.
pub(crate) trait Fields {
    fn peer(&self) -> Option<PeerId>;
    fn tag(&self) -> [u32; 3];
    fn length(&self) -> u32;
    fn nbytes(&self) -> u32;
    fn code(&self) -> Code;
    fn context(&self) -> u64;
}

/// Implements [`Fields`] for a type with these fields, or with methods of these names.
macro_rules! fields {
    ($type:ty $(, $call:tt)?) => {
        impl Fields for $type {
            #[inline(always)]
            fn peer(&self) -> Option<PeerId> {
                self.msg_peer$($call)?
            }
            #[inline(always)]
            fn tag(&self) -> [u32; 3] {
                self.msg_tag$($call)?
            }
            #[inline(always)]
            fn length(&self) -> u32 {
                self.msg_length$($call)?
            }
            #[inline(always)]
            fn nbytes(&self) -> u32 {
                self.nbytes$($call)?
            }
            #[inline(always)]
            fn code(&self) -> Code {
                self.error_code$($call)?
            }
            #[inline(always)]
            fn context(&self) -> u64 {
                self.context$($call)?
            }
        }
    };
}

fields!(Status2);
fields!(Completed<'_>, ());

/// A status. Writes field by field, because a function that first reads all fields has to save
/// registers for them.
pub(crate) trait Report {
    /// # Safety
    /// `at` is valid for a write.
    unsafe fn write(at: *mut Self, found: &impl Fields, home: Home);
}

impl Report for MqStatus2 {
    #[inline(always)]
    unsafe fn write(at: *mut Self, found: &impl Fields, home: Home) {
        let [a, b, c] = found.tag();
        // SAFETY: the caller guarantees that `at` is writable.
        unsafe {
            (*at).tag = MqTag { words: [a, b, c, 0] };
            (*at).peer = match found.peer() {
                Some(peer) => home.address(peer),
                None => std::ptr::null_mut(),
            };
            (*at).aligns = 0;
            (*at).length = found.length();
            (*at).nbytes = found.nbytes();
            (*at).error = Error::from(found.code());
            (*at).context = found.context() as usize as *mut c_void;
        }
    }
}

impl Report for MqStatus {
    #[inline(always)]
    unsafe fn write(at: *mut Self, found: &impl Fields, _: Home) {
        let [low, high, _] = found.tag().map(u64::from);
        // SAFETY: the caller guarantees that `at` is writable.
        unsafe {
            (*at).tag = low | high << 32;
            (*at).length = found.length();
            (*at).nbytes = found.nbytes();
            (*at).error = Error::from(found.code());
            (*at).context = found.context() as usize as *mut c_void;
        }
    }
}

impl MqStats {
    pub(crate) fn new(stats: Stats) -> Self {
        let counters = [
            stats.rx_user_bytes,
            stats.rx_user_num,
            stats.rx_sys_bytes,
            stats.rx_sys_num,
            stats.tx_num,
            stats.tx_eager_num,
            stats.tx_eager_bytes,
            stats.tx_rndv_num,
            stats.tx_rndv_bytes,
            stats.tx_shm_num,
            stats.rx_shm_num,
            stats.rx_sysbuf_num,
            stats.rx_sysbuf_bytes,
        ];
        MqStats { counters, reserved: [0; 16] }
    }
}

impl From<Code> for Error {
    fn from(code: Code) -> Self {
        Error(code as u32)
    }
}
