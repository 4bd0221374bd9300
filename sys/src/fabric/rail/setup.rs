//! Opens a rail. Slow path: allocates the contexts, the buffers and most tables.

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use fishplate_core::op::AmoSet;
use fishplate_core::rail::{Caps, Order};

use super::batch::Batch;
use super::expected::Expected;
use super::imports::Imports;
use super::knock::Knocks;
use super::peers::Peers;
use super::pool::Pool;
use super::searches::Searches;
use super::slab::Slab;
use super::{BATCH, FabricConfig, FabricRail, FabricStats, HEAD, SetupError, post};
use crate::fabric::av::AddressVector;
use crate::fabric::cq::{CompletionQueue, CqError};
use crate::fabric::domain::Domain;
use crate::fabric::endpoint::Endpoint;
use crate::fabric::error::{CallError, Code};
use crate::fabric::fabric::Fabric;
use crate::fabric::mr::MemoryRegion;
use crate::fabric::negotiate::Offer;
use crate::fabric::persona::Notify;
use crate::fabric::raw::*;

impl FabricRail {
    /// Opens the fabric, domain, completion queue, address vector and endpoint of an offer, and
    /// posts all receives. Slow path.
    ///
    /// # Errors
    /// A setting is out of range, or a provider call failed.
    pub fn open(offer: &Offer, config: FabricConfig) -> Result<FabricRail, SetupError> {
        let words =
            |error: CallError| SetupError::Call(error, offer.info.library().describe(error.code));
        config.check()?;
        let fabric = Arc::new(Fabric::open(&offer.info).map_err(words)?);
        let domain = Domain::open(fabric, &offer.info).map_err(words)?;
        let info = &offer.info;
        // Some providers report 0 for "unlimited".
        let limit =
            |ours: u32, theirs: usize| if theirs == 0 { ours } else { ours.min(theirs as u32) };
        let depth = limit(config.depth, info.tx().size).max(1);
        // One receive fewer than announced: some providers use a receive themselves (shm 1.17
        // rejects the last receive).
        let receives = limit(config.receives, info.rx().size.saturating_sub(1)).max(1);
        let room = info.ep().max_msg_size;
        let max_message = config.max_message.min(room.saturating_sub(HEAD));
        let endpoint = open_endpoint(&domain, offer, &config).map_err(words)?;
        let slab = Slab::new(receives as usize + config.bounces as usize, max_message + HEAD);

        let seed = config.seed.unwrap_or_else(random);
        let number = mix(seed) as u32;
        let key_bits = (info.domain().mr_key_size.min(8) * 8) as u32;
        let inject = info.tx().inject_size;
        let caps = Caps {
            max_message,
            max_rma: room.min(offer.persona.max_rma),
            inject: if config.inject && offer.notify != Notify::Message {
                inject.min(room)
            } else {
                0
            },
            data_bytes: 4,
            // Providers order the messages of one connection. They do not order the completions
            // when receive buffers run out.
            order: Order::None,
            native_atomics: if config.native_atomics {
                post::atomics(&endpoint, info)
            } else {
                AmoSet::NONE
            },
            depth,
            // An arrival waits in the completion queue until a poll, so it may be reported in a
            // later attachment.
            fresh: false,
            fences: offer.persona.fences && info.domain().mr_mode & FI_MR_ENDPOINT == 0,
        };
        let notify = offer.notify;
        let inject_message = inject.min(max_message + HEAD);
        let inject = if notify == Notify::Message { 0 } else { caps.inject };
        let more = config.more.unwrap_or(offer.persona.more) && notify != Notify::Message;
        let unusual = more || offer.persona.forgets_level || notify == Notify::Message;
        let saw = info.tx().msg_order & info.rx().msg_order & FI_ORDER_SAW != 0;
        let takes_receives = info.raw().mode & FI_RX_CQ_DATA != 0;
        let mut rail = FabricRail {
            regions: Vec::with_capacity(config.max_regions as usize),
            kept: Vec::new(),
            buffers: None,
            domain,
            peers: Peers::new(),
            expected: Expected::default(),
            imports: Imports::new(config.max_imports),
            pool: Pool::new(depth, receives),
            slab,
            caps,
            notify,
            signature: if notify == Notify::Word { (number as u64) << 32 } else { 0 },
            number,
            inject,
            inject_message,
            desc: core::ptr::null_mut(),
            say_level: offer.persona.forgets_level.then(|| FI_COMPLETION | offer.level.flag()),
            short_below: (!unusual).then(|| inject.saturating_add(1)),
            more,
            held: None,
            batched: 0,
            words_follow: saw,
            takes_receives,
            plain_arrivals: notify == Notify::Word && !takes_receives,
            busy: false,
            bounces: (0..config.bounces).rev().map(|n| receives + n).collect(),
            unposted: Vec::with_capacity(receives as usize),
            owed: VecDeque::with_capacity(depth as usize),
            events: VecDeque::with_capacity(depth as usize + 3 * config.max_peers as usize),
            returns: Vec::new(),
            knocks: Knocks::default(),
            searches: Searches::default(),
            entries: Batch::new(),
            sources: [FI_ADDR_NOTAVAIL; BATCH],
            scratch: vec![0; inject_message.max(HEAD + 4)].into(),
            device: None,
            broken: false,
            frees_reads_twice: offer.frees_reads_twice(),
            damaged: false,
            accepted_marked: 0,
            plain_polls: 0,
            polls_planned: 0,
            // The upper bits are random if keys are long enough, so that a peer cannot guess a key.
            next_key: mix(seed ^ 1) << 32,
            key_bits,
            stats: FabricStats::default(),
            last_error: CqError::of_call(Code(0)),
            config,
            offer: offer.clone(),
            endpoint,
        };
        rail.plan();
        if info.domain().mr_mode & FI_MR_LOCAL != 0 {
            let access = FI_SEND | FI_RECV | FI_READ | FI_WRITE;
            let key = rail.fresh_key();
            let (bytes, len) = (rail.slab.bytes, rail.slab.len);
            // SAFETY: `buffers` is declared before `slab`, so the registration is dropped first.
            // The slab is accessed only through raw pointers.
            let mut buffers =
                unsafe { MemoryRegion::register(&rail.domain, bytes, len, access, key) }
                    .map_err(words)?;
            if info.domain().mr_mode & FI_MR_ENDPOINT != 0 {
                // SAFETY: `FabricRail::drop` drops the buffers' registration before the endpoint.
                unsafe { buffers.bind(&rail.endpoint) }.map_err(words)?;
            }
            rail.desc = buffers.desc();
            rail.buffers = Some(buffers);
        }
        for index in depth..depth + receives {
            match rail.post_receive(index) {
                Ok(()) => {}
                // The provider accepts fewer receives than it announced.
                Err(Code::EAGAIN) if index > depth => break,
                Err(code) => return Err(words(CallError { call: "fi_recv", code })),
            }
        }
        Ok(rail)
    }
}

pub(super) fn open_endpoint(
    domain: &Arc<Domain>,
    offer: &Offer,
    config: &FabricConfig,
) -> Result<Endpoint, CallError> {
    let completions = match config.completions {
        0 => offer.persona.completions,
        n => n,
    };
    let cq = CompletionQueue::open(domain, completions)?;
    let peers = config.max_peers as usize;
    let av = AddressVector::open(domain, FI_AV_TABLE, peers)
        .or_else(|_| AddressVector::open(domain, offer.info.domain().av_type, peers))?;
    Endpoint::open(domain, &offer.info, cq, av)
}

/// Mixes all bits of a number (the finaliser of splitmix64).
fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn random() -> u64 {
    let mut bytes = [0u8; 8];
    // SAFETY: `bytes` has room for the eight requested bytes.
    let got =
        unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), libc::GRND_NONBLOCK) };
    if got == 8 { u64::from_ne_bytes(bytes) } else { mix(crate::clock::monotonic_ns()) }
}
