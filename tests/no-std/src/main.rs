//! Uses the ring and the engine without std, an allocator or an operating system. All memory is on
//! the stack, and the clock counts calls. Exits with 0, or with the index of the first failed
//! check, from 1.
#![no_std]
#![no_main]

use core::mem::MaybeUninit;
use core::panic::PanicInfo;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};

use fishplate_core::engine::{
    Asleep, Config, ContextId, Engine, EngineMemory, HANDLE_MAX, LocalSlot, Notice, Pairing,
    Parked, PeerSlot, PendingSlot, RemoteSlot, Signal, Stream, Waiter,
};
use fishplate_core::mem::{Region, RegionKind};
use fishplate_core::op::{Cmp, SignalOp};
use fishplate_core::rail::Rail;
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::sync::host::SpinHost;
use fishplate_core::sync::ring::{self, Header};

// Links only the C library, for its startup code, memcpy and abort.
#[link(name = "c")]
unsafe extern "C" {
    fn abort() -> !;
}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    // SAFETY: `abort` takes no arguments and does not return.
    unsafe { abort() }
}

/// Called by the C runtime.
#[unsafe(no_mangle)]
pub extern "C" fn main() -> i32 {
    if ring_past_its_wrap().is_none() {
        return 1;
    }
    if put_signal_over(Loopback::<64>::new()).is_none() {
        return 2;
    }
    if put_signal_over(Loopback::<64>::mapped()).is_none() {
        return 3;
    }
    0
}

fn ensure(holds: bool) -> Option<()> {
    holds.then_some(())
}

fn ring_past_its_wrap() -> Option<()> {
    let mut header = Header::starting_at(u64::MAX - 5);
    let mut slots = [MaybeUninit::uninit(); 4];
    let (mut tx, mut rx) = ring::split(&mut header, &mut slots).ok()?;
    for lap in 0..8u64 {
        for n in 0..4 {
            tx.push(4 * lap + n).ok()?;
        }
        ensure(tx.push(0).is_err())?;
        for n in 0..4 {
            ensure(rx.pop()? == 4 * lap + n)?;
        }
    }
    ensure(rx.pop().is_none())
}

const WINDOW: usize = 16;
const ROUNDS: u64 = 100;

fn put_signal_over(rail: impl Rail) -> Option<()> {
    let config = Config { window: WINDOW as u32, ..Config::DEFAULT };
    let memory = EngineMemory {
        peers: &mut [PeerSlot::EMPTY],
        pairings: &mut [Pairing::ALIKE],
        streams: &mut [Stream::EMPTY],
        parked: &mut [Parked::EMPTY; WINDOW],
        bitmap: &mut [0; 8],
        locals: &mut [LocalSlot::EMPTY],
        remotes: &mut [RemoteSlot::EMPTY],
        pending: &mut [PendingSlot::EMPTY; 8],
    };
    // Byte 0: source of the put; byte 8: its target; byte 16: the signal word.
    let words = [const { AtomicU64::new(0) }; 3];
    let mut engine = Engine::new(config, [rail], memory).ok()?;
    let peer = engine.reserve_peer().ok()?;
    engine.connect_peer(peer, 1).ok()?;
    // SAFETY: `words` outlives the engine's use, and is accessed through atomics only.
    let region = unsafe { Region::new(NonNull::from(&words).cast(), 24, RegionKind::Private) };
    let local = engine.register(region).ok()?;
    let mut handle = [0; HANDLE_MAX];
    let len = engine.export(local, &mut handle).ok()?;
    let remote = engine.import(peer, &handle[..len]).ok()?;

    let (host, never) = (SpinHost::new(1), Asleep::new());
    let mut waiter = Waiter::awake(&host, &never);
    let context = ContextId(0);
    for round in 1..=ROUNDS {
        // Relaxed: there is only one thread.
        words[0].store(!round, Ordering::Relaxed);
        let signal = Signal { at: remote.at(16), op: SignalOp::Add, value: 1 };
        engine.put_signal(context, local.at(0), 8, remote.at(8), signal, Notice::Silent).ok()?;
        let seen = engine
            .wait_signal(local.at(16), Cmp::Ge, round, Some(peer), &mut waiter, u64::MAX)
            .ok()?;
        ensure(seen == round && words[1].load(Ordering::Relaxed) == !round)?;
    }
    engine.quiet(context, peer, &mut waiter, u64::MAX).ok()
}
