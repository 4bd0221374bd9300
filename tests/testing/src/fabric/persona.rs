//! A persona: the provider that the fake imitates, and its behaviour.

use fishplate_sys::fabric::raw::*;

/// How a dead endpoint looks to other endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dead {
    /// Operations to the dead endpoint fail with `FI_ECONNRESET`.
    Errors,
    /// Operations to the dead endpoint never complete. Once queues are full, posts are refused
    /// forever.
    Silence,
}

/// The attributes and the behaviour of a provider. Start from one of the associated functions and
/// change fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Persona {
    /// `fi_fabric_attr.prov_name`.
    pub provider: &'static str,
    /// `fi_fabric_attr.name`.
    pub fabric: &'static str,
    /// The names of the provider's domains, one per interface.
    pub interfaces: Vec<&'static str>,
    /// Speed of the interfaces in megabits per second.
    pub mbit: u32,
    /// `fi_info.caps`. Without `FI_ATOMIC` there is no table of atomics.
    pub caps: u64,
    /// Modes that the program must support, such as `FI_CONTEXT` and `FI_CONTEXT2`.
    pub mode: u64,
    /// Registration modes that the program must support.
    pub mr_mode: i32,
    /// True if device memory can be registered by a descriptor (`FI_MR_DMABUF`).
    pub dmabuf: bool,
    /// `fi_domain_attr.data_progress`. `FI_PROGRESS_AUTO` also accepts a request for manual
    /// progress.
    pub progress: i32,
    /// True if the provider offers only `FI_THREAD_SAFE`.
    pub locks: bool,
    /// The message order that the provider preserves: `FI_ORDER_*` bits, or 0.
    pub order: u64,
    /// Bytes of completion data that a write carries. Higher bytes are cut off.
    pub data_bytes: usize,
    /// Maximum length of an injected operation in bytes.
    pub inject: usize,
    /// Maximum number of outstanding operations per endpoint.
    pub tx_size: usize,
    /// Maximum number of posted receives per endpoint.
    pub rx_size: usize,
    /// Maximum length of a message in bytes.
    pub max_message: usize,
    /// `fi_ep_attr.max_msg_size`: maximum length of a write or read in bytes.
    pub max_rma: usize,
    /// Maximum length of a key in bytes, if the program chooses keys.
    pub key_bytes: usize,
    /// True if operations wait while a completion queue is full. Otherwise completions that do not
    /// fit are lost (an overrun).
    pub protects_queue: bool,
    /// True if a write with data consumes a receive at the target. If so, `mode` must have
    /// `FI_RX_CQ_DATA`.
    pub data_takes_receive: bool,
    /// True if the completion of an incoming write has an arbitrary context, as with shm of 1.17.
    pub stray_context: bool,
    /// True if the completion of an incoming write has only the data flag, as with shm of libfabric
    /// 2.
    pub data_flag_alone: bool,
    /// True if the provider frees the record of a read twice when the endpoint closes while the
    /// data arrives, as `net` of libfabric 1.17.0 does. That damages the domain: no endpoint may be
    /// opened in it any more.
    pub frees_reads_twice: bool,
    /// True if the provider executes only 8-byte additions and compare-and-swaps, as InfiniBand
    /// NICs do.
    pub few_atomics: bool,
    /// Maximum delay of each stage of an operation, in reads of the queue that advances it.
    pub jitter: u32,
    /// Percentage of posts that are refused at random with `-FI_EAGAIN`.
    pub refuse: u32,
    /// True if a read of a queue returns only some of the available completions.
    pub short_reads: bool,
    /// How a dead endpoint looks to other endpoints.
    pub dead: Dead,
}

const BASE_CAPS: u64 = FI_MSG
    | FI_RMA
    | FI_READ
    | FI_WRITE
    | FI_SEND
    | FI_RECV
    | FI_REMOTE_READ
    | FI_REMOTE_WRITE
    | FI_LOCAL_COMM
    | FI_REMOTE_COMM
    | FI_SOURCE;

const ALL_ORDERS: u64 = FI_ORDER_RAR
    | FI_ORDER_RAW
    | FI_ORDER_RAS
    | FI_ORDER_WAR
    | FI_ORDER_WAW
    | FI_ORDER_WAS
    | FI_ORDER_SAR
    | FI_ORDER_SAW
    | FI_ORDER_SAS;

impl Persona {
    /// AWS EFA without libfabric's RDM layer: no order, no atomics, 4 bytes of data, injects up to
    /// 32 bytes, automatic progress.
    pub fn efa_direct() -> Persona {
        Persona {
            provider: "efa",
            fabric: "efa-direct",
            interfaces: vec!["rdmap0-rdm", "rdmap1-rdm", "rdmap2-rdm", "rdmap3-rdm"],
            mbit: 100_000,
            caps: BASE_CAPS,
            mode: FI_CONTEXT2,
            mr_mode: FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY,
            dmabuf: false,
            locks: false,
            progress: FI_PROGRESS_AUTO,
            order: FI_ORDER_NONE,
            data_bytes: 4,
            inject: 32,
            tx_size: 256,
            rx_size: 256,
            max_message: 8192,
            max_rma: 1 << 30,
            key_bytes: 4,
            protects_queue: false,
            data_takes_receive: false,
            stray_context: false,
            data_flag_alone: false,
            frees_reads_twice: false,
            few_atomics: false,
            jitter: 5,
            refuse: 10,
            short_reads: true,
            dead: Dead::Errors,
        }
    }

    /// AWS EFA with libfabric's RDM layer: ordered messages, software atomics, manual progress.
    pub fn efa() -> Persona {
        Persona {
            fabric: "efa",
            caps: BASE_CAPS | FI_ATOMIC | FI_TAGGED,
            mode: 0,
            progress: FI_PROGRESS_MANUAL,
            order: FI_ORDER_SAS,
            max_message: usize::MAX,
            max_rma: usize::MAX,
            ..Self::efa_direct()
        }
    }

    /// InfiniBand and RoCE: ordered connections, native atomics, 4 bytes of data.
    pub fn verbs_rxm() -> Persona {
        Persona {
            provider: "verbs;ofi_rxm",
            fabric: "IB-0xfe80000000000000",
            interfaces: vec!["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"],
            mbit: 400_000,
            caps: BASE_CAPS | FI_ATOMIC | FI_TAGGED,
            mode: 0,
            mr_mode: FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY,
            progress: FI_PROGRESS_MANUAL,
            order: ALL_ORDERS,
            inject: 64,
            max_message: 1 << 30,
            protects_queue: true,
            dead: Dead::Silence,
            ..Self::efa_direct()
        }
    }

    /// HPE Slingshot: registrations bound to an endpoint, offsets relative to the start of the
    /// memory, manual progress.
    pub fn cxi() -> Persona {
        Persona {
            provider: "cxi",
            fabric: "cxi",
            interfaces: vec!["cxi0", "cxi1", "cxi2", "cxi3"],
            mbit: 200_000,
            caps: BASE_CAPS | FI_ATOMIC | FI_TAGGED | FI_FENCE,
            mode: 0,
            mr_mode: FI_MR_ENDPOINT | FI_MR_ALLOCATED | FI_MR_PROV_KEY,
            progress: FI_PROGRESS_MANUAL,
            order: FI_ORDER_SAS,
            data_bytes: 8,
            inject: 192,
            max_message: 1 << 30,
            key_bytes: 8,
            protects_queue: true,
            ..Self::efa_direct()
        }
    }

    /// PSM3: each operation needs a context, and the program chooses the keys.
    pub fn psm3() -> Persona {
        Persona {
            provider: "psm3",
            fabric: "psm3",
            interfaces: vec!["irdma0", "irdma1"],
            caps: BASE_CAPS | FI_ATOMIC | FI_TAGGED,
            mode: FI_CONTEXT,
            mr_mode: 0,
            progress: FI_PROGRESS_MANUAL,
            order: FI_ORDER_SAS,
            data_bytes: 8,
            inject: 64,
            max_message: 1 << 20,
            key_bytes: 8,
            protects_queue: true,
            dead: Dead::Silence,
            ..Self::efa_direct()
        }
    }

    /// libfabric's tcp: no required modes, ordered, automatic progress.
    pub fn tcp() -> Persona {
        Persona {
            provider: "tcp",
            fabric: "10.0.0.0/8",
            interfaces: vec!["eth0", "eth1"],
            mbit: 10_000,
            mode: 0,
            mr_mode: 0,
            order: ALL_ORDERS,
            data_bytes: 8,
            inject: 128,
            max_message: usize::MAX,
            max_rma: usize::MAX,
            key_bytes: 8,
            protects_queue: true,
            ..Self::efa_direct()
        }
    }

    /// The `net` provider of libfabric 1.17.0: its tcp, with
    /// [`frees_reads_twice`](Self::frees_reads_twice).
    pub fn net() -> Persona {
        Persona { provider: "net", frees_reads_twice: true, ..Self::tcp() }
    }

    /// The shm provider of libfabric 1: remote addresses are virtual addresses, and the program
    /// chooses the keys. The completion of an incoming write has an arbitrary context.
    pub fn shm() -> Persona {
        Persona {
            provider: "shm",
            fabric: "shm",
            interfaces: vec!["shm"],
            mbit: 0,
            mr_mode: FI_MR_VIRT_ADDR,
            progress: FI_PROGRESS_MANUAL,
            order: FI_ORDER_SAS,
            inject: 4096,
            stray_context: true,
            ..Self::tcp()
        }
    }

    /// The shm provider of libfabric 2.
    pub fn shm2() -> Persona {
        Persona { stray_context: false, data_flag_alone: true, ..Self::shm() }
    }

    /// Returns all personas, with their names.
    pub fn all() -> [(&'static str, Persona); 9] {
        [
            ("efa-direct", Self::efa_direct()),
            ("efa", Self::efa()),
            ("verbs;ofi_rxm", Self::verbs_rxm()),
            ("cxi", Self::cxi()),
            ("psm3", Self::psm3()),
            ("tcp", Self::tcp()),
            ("tcp", Self::net()),
            ("shm", Self::shm()),
            ("shm", Self::shm2()),
        ]
    }

    /// Adds access to device memory: `FI_HMEM` and `FI_MR_HMEM`.
    pub fn with_devices(self) -> Persona {
        Persona { caps: self.caps | FI_HMEM, mr_mode: self.mr_mode | FI_MR_HMEM, ..self }
    }

    /// Removes delays, refusals and short reads.
    pub fn calm(self) -> Persona {
        Persona { jitter: 0, refuse: 0, short_reads: false, ..self }
    }

    pub(super) fn is_ordered(&self) -> bool {
        self.order & ALL_ORDERS == ALL_ORDERS
    }
}
