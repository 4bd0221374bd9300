//! Tests that calls behave the same while the process handles signals constantly, as under a
//! profiler.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::thread;

use fishplate_core::mem::{Region, RegionKind};
use fishplate_core::rail::{Local, Posted, Rail, Remote};
use fishplate_shm::{ShmConfig, socket_pair};

mod support;
use support::*;

static HANDLED: AtomicU32 = AtomicU32::new(0);

extern "C" fn handle(_: i32) {
    HANDLED.fetch_add(1, Relaxed);
}

/// Runs `work` while this thread receives signals. A new signal is sent as soon as the previous
/// signal was handled.
fn under_signals(work: impl FnOnce()) {
    // SAFETY: the handler only increments an atomic counter.
    unsafe { libc::signal(libc::SIGUSR1, handle as extern "C" fn(i32) as libc::sighandler_t) };
    // SAFETY: the call has no arguments and cannot fail.
    let me = unsafe { libc::pthread_self() };
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut sent = 0;
            while !over.load(Relaxed) {
                if HANDLED.load(Relaxed) == sent {
                    // SAFETY: the thread `me` waits for this one at the end of its scope, so it is
                    // alive.
                    unsafe { libc::pthread_kill(me, libc::SIGUSR1) };
                    sent += 1;
                }
            }
        });
        let _over = Over(&over);
        work();
    });
}

/// Stops the signals when it is dropped, even if `work` panics.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn an_interrupted_call_does_not_report_a_living_peer_as_dead() {
    let config = ShmConfig::default();
    let (mut a, mut b) = (rail(config.clone()), rail(config));
    let [near, far] = meet(&a, &b, socket_pair().unwrap());
    if !near.reaches_private() {
        println!("SKIPPED: the kernel refuses process_vm_readv here");
        return;
    }
    a.attach(PEER, near).unwrap();
    b.attach(PEER, far).unwrap();
    let mut memory = [7u8; 64];
    // SAFETY: `memory` outlives the rails, and no other code writes to it.
    let region = unsafe { Region::new(NonNull::from(&mut memory).cast(), 64, RegionKind::Private) };
    let (key, _) = b.register(&region).unwrap();
    a.import(PEER, key, 64).unwrap();
    let mut back = [0u8; 64];
    let local = Local { ptr: NonNull::from(&mut back).cast(), len: 64, desc: 0 };
    under_signals(|| {
        while HANDLED.load(Relaxed) < 2000 {
            // SAFETY: `back` outlives the post, which completes before the call returns.
            let post = unsafe { a.post_read(PEER, local, Remote { key, offset: 0 }, 1) };
            assert_eq!(post, Ok(Posted::Done));
        }
    });
    assert_eq!(back, memory);
}
