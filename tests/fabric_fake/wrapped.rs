//! Tests rails that wrap another rail: every call must reach the inner rail, and every report must
//! come back unchanged.

use std::cell::RefCell;
use std::ptr::NonNull;
use std::rc::Rc;

use fishplate::guard::Guard;
use fishplate_core::error::{AttachError, CompleteError, PeerError, PostError};
use fishplate_core::mem::{Peer, RailId, Region, RegionKind, Untrusted};
use fishplate_core::op::{Amo, AmoOp, AmoSet};
use fishplate_core::rail::{
    Caps, Fence, Local, Order, Posted, REOPEN_MAX, Rail, RailKey, Remote, Sink,
};
use fishplate_shm::{ShmConfig, socket_pair};

use crate::conformance::{Fixture, Link};
use crate::fixture;
use crate::shared;

type Log = Rc<RefCell<Vec<&'static str>>>;

/// An inner rail that records its calls.
struct Recorder(Log);

impl Recorder {
    fn note<T>(&self, call: &'static str, answer: T) -> T {
        self.0.borrow_mut().push(call);
        answer
    }
}

const CAPS: Caps = Caps {
    max_message: 300,
    max_rma: 4096,
    inject: 8,
    data_bytes: 4,
    order: Order::None,
    native_atomics: AmoSet::ALL,
    depth: 7,
    fresh: false,
    fences: true,
};
const KEY: RailKey = RailKey { key: 3, base: 9 };

#[deny(clippy::missing_trait_methods, reason = "the tested rails do not use the rest")]
// SAFETY: the recorder keeps no pointers and maps nothing.
unsafe impl Rail for Recorder {
    type Setup<'a> = ();

    const COPIES: bool = true;

    // `setup` is not a recorded call.
    fn setup(&mut self) {}
    fn caps(&self) -> Caps {
        self.note("caps", CAPS)
    }
    fn register(&mut self, _: &Region) -> Result<(RailKey, u64), AttachError> {
        self.note("register", Ok((KEY, 4)))
    }
    fn deregister(&mut self, _: RailKey) -> Result<(), AttachError> {
        self.note("deregister", Err(AttachError::Kept(5)))
    }
    fn import(&mut self, _: Peer, _: RailKey, _: u64) -> Result<Option<NonNull<u8>>, AttachError> {
        self.note("import", Err(AttachError::Full("imports")))
    }
    fn try_import(
        &mut self,
        _: Peer,
        _: RailKey,
        _: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        self.note("try_import", Ok(None))
    }
    fn touches(&mut self, _: Local) -> bool {
        self.note("touches", true)
    }
    fn release(&mut self, _: Peer, _: RailKey) {
        self.note("release", ());
    }
    fn detach(&mut self, _: Peer) {
        self.note("detach", ());
    }
    fn fence(&mut self, _: Peer) -> Fence {
        self.note("fence", Fence::Pending)
    }
    fn late(&self) -> u64 {
        self.note("late", 9)
    }
    fn mute(&mut self, _: Peer) {
        self.note("mute", ());
    }
    fn fence_left(&mut self, _: Peer) -> Fence {
        self.note("fence_left", Fence::Fenced)
    }
    fn reopen(&mut self, _: Peer, into: &mut [u8; REOPEN_MAX]) -> Option<usize> {
        into[0] = 7;
        self.note("reopen", Some(1))
    }
    fn rejoin(&mut self, _: Peer, _: &[u8]) -> Result<(), AttachError> {
        self.note("rejoin", Err(AttachError::Full("peers")))
    }
    fn fences_all(&self) -> bool {
        self.note("fences_all", true)
    }
    fn is_fenced(&self, _: Peer) -> bool {
        self.note("is_fenced", true)
    }
    unsafe fn post_write(
        &mut self,
        _: Peer,
        _: Local,
        _: Remote,
        _: Option<u32>,
        _: u64,
    ) -> Result<Posted, PostError> {
        self.note("post_write", Ok(Posted::Done))
    }
    unsafe fn post_write_checked(
        &mut self,
        _: Peer,
        _: Local,
        _: Remote,
        _: u32,
        _: u64,
    ) -> Result<Posted, PostError> {
        self.note("post_write_checked", Ok(Posted::Pending))
    }
    unsafe fn post_read(
        &mut self,
        _: Peer,
        _: Local,
        _: Remote,
        _: u64,
    ) -> Result<Posted, PostError> {
        self.note("post_read", Err(PostError::BadKey))
    }
    unsafe fn post_rendezvous_read(
        &mut self,
        _: Peer,
        _: Local,
        _: Remote,
        _: u64,
    ) -> Result<Posted, PostError> {
        self.note("post_rendezvous_read", Ok(Posted::Done))
    }
    fn post_message(
        &mut self,
        _: Peer,
        _: &[u8],
        _: Untrusted<'_>,
        _: u64,
    ) -> Result<Posted, PostError> {
        self.note("post_message", Err(PostError::Again))
    }
    unsafe fn post_atomic(
        &mut self,
        _: Peer,
        _: Amo,
        _: Remote,
        _: Option<NonNull<u64>>,
        _: u64,
    ) -> Result<Posted, PostError> {
        self.note("post_atomic", Ok(Posted::Pending))
    }
    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        sink.done(1, Err(CompleteError::PeerDown));
        sink.done_alike(2, 3);
        sink.landed(Peer(4), 5);
        sink.message(Peer(6), Untrusted::from_slice(&[7; 8]));
        assert!(sink.repeats(3));
        sink.peer_down(Peer(9), PeerError::Closed);
        self.note("poll", budget - 1)
    }
    fn flush(&mut self) {
        self.note("flush", ());
    }
    unsafe fn copy_to(&mut self, _: Peer, _: &[(Local, Remote)]) -> Option<Result<(), PostError>> {
        self.note("copy_to", Some(Err(PostError::BadKey)))
    }
    unsafe fn copy_from(
        &mut self,
        _: Peer,
        _: &[(Local, Remote)],
    ) -> Option<Result<(), PostError>> {
        self.note("copy_from", Some(Ok(())))
    }
    fn reads_addresses(&self, _: Peer) -> bool {
        self.note("reads_addresses", true)
    }
    unsafe fn read_address(&mut self, _: Peer, _: Local, _: u64) -> bool {
        self.note("read_address", true)
    }
    unsafe fn write_device(&mut self, _: Local, _: Untrusted<'_>) -> Result<(), PostError> {
        self.note("place", Err(PostError::Again))
    }
    unsafe fn read_device(&mut self, _: Local, _: &mut [u8]) -> Result<(), PostError> {
        self.note("fetch", Err(PostError::Again))
    }
    unsafe fn place_device(
        &mut self,
        _: Local,
        _: Untrusted<'_>,
        _: &mut u32,
    ) -> Result<(), PostError> {
        self.note("place_device", Err(PostError::Again))
    }
    unsafe fn fetch_device(
        &mut self,
        _: Local,
        _: &mut [u8],
        _: &mut u32,
    ) -> Result<(), PostError> {
        self.note("fetch_device", Err(PostError::Again))
    }
    fn notify(&mut self, _: Peer) {
        self.note("notify", ());
    }
    fn doubt(&mut self, _: Peer, _: bool) -> Option<u32> {
        self.note("doubt", Some(6))
    }
    fn check_peers<S: Sink>(&mut self, sink: &mut S) {
        sink.peer_down(Peer(8), PeerError::Died);
        assert!(!sink.silent(Peer(5), true));
        sink.peer_up(Peer(6));
        sink.called();
        self.note("check_peers", ());
    }
}

/// Records reports as text.
struct Words(Vec<String>);

#[deny(clippy::missing_trait_methods, reason = "the tested rails do not use the rest")]
impl Sink for Words {
    fn done(&mut self, cx: u64, result: Result<(), CompleteError>) {
        self.0.push(format!("done {cx} {result:?}"));
    }
    fn done_alike(&mut self, cx: u64, count: u32) {
        self.0.push(format!("{count} done {cx}"));
    }
    fn landed(&mut self, peer: Peer, data: u32) {
        self.0.push(format!("landed {} {data}", peer.0));
    }
    fn message(&mut self, peer: Peer, bytes: Untrusted<'_>) {
        self.0.push(format!("message {} of {} bytes", peer.0, bytes.len()));
    }
    fn repeats(&mut self, cx: u64) -> bool {
        self.0.push(format!("repeats {cx}"));
        true
    }
    fn peer_down(&mut self, peer: Peer, why: PeerError) {
        self.0.push(format!("down {} {why:?}", peer.0));
    }
    fn silent(&mut self, peer: Peer, overdue: bool) -> bool {
        self.0.push(format!("silent {} {overdue}", peer.0));
        false
    }
    fn peer_up(&mut self, peer: Peer) {
        self.0.push(format!("up {}", peer.0));
    }
    fn called(&mut self) {
        self.0.push("called".to_owned());
    }
}

/// Makes every call of a rail, and records each result and report.
fn everything<R: Rail>(mut rail: R) -> Vec<String> {
    let (peer, mut words) = (Peer(1), Words(vec![]));
    let mut memory = [0u64; 8];
    let ptr = NonNull::from(&mut memory[0]).cast::<u8>();
    let (local, remote) = (Local { ptr, len: 8, desc: 4 }, Remote { key: KEY, offset: 0 });
    // SAFETY: the recorder accesses no memory.
    let region = unsafe { Region::new(ptr, 64, RegionKind::Private) };
    let amo = Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 };
    let mut told = vec![format!("copies {}", R::COPIES)];
    told.push(format!("{:?}", rail.caps()));
    told.push(format!("{:?}", rail.register(&region)));
    told.push(format!("{:?}", rail.deregister(KEY)));
    told.push(format!("{:?}", rail.import(peer, KEY, 8)));
    told.push(format!("{:?}", rail.try_import(peer, KEY, 8)));
    told.push(format!("{:?}", rail.touches(local)));
    rail.release(peer, KEY);
    told.push(format!("{:?}", rail.fence(peer)));
    told.push(format!("{}", rail.late()));
    rail.mute(peer);
    told.push(format!("{:?}", rail.fence_left(peer)));
    told.push(format!("{:?}", rail.fences_all()));
    let mut address = [0; REOPEN_MAX];
    told.push(format!("{:?} {}", rail.reopen(peer, &mut address), address[0]));
    told.push(format!("{:?}", rail.rejoin(peer, &address[..1])));
    rail.detach(peer);
    // SAFETY: the recorder accesses no memory.
    unsafe {
        told.push(format!("{:?}", rail.post_write(peer, local, remote, None, 1)));
        told.push(format!("{:?}", rail.post_write_checked(peer, local, remote, 2, 1)));
        told.push(format!("{:?}", rail.post_read(peer, local, remote, 1)));
        told.push(format!("{:?}", rail.post_rendezvous_read(peer, local, remote, 1)));
        told.push(format!("{:?}", rail.post_atomic(peer, amo, remote, None, 1)));
        told.push(format!("{:?}", rail.copy_to(peer, &[(local, remote)])));
        told.push(format!("{:?}", rail.copy_from(peer, &[(local, remote)])));
        told.push(format!("{:?}", rail.write_device(local, Untrusted::from_slice(&[1]))));
        told.push(format!("{:?}", rail.read_device(local, &mut [0; 8])));
        told.push(format!("{:?}", rail.place_device(local, Untrusted::from_slice(&[1]), &mut 0)));
        told.push(format!("{:?}", rail.fetch_device(local, &mut [0; 8], &mut 0)));
    }
    told.push(format!("{:?}", rail.post_message(peer, &[1], Untrusted::from_slice(&[2]), 1)));
    told.push(format!("{:?}", rail.poll(9, &mut words)));
    rail.flush();
    rail.notify(peer);
    told.push(format!("{:?}", rail.doubt(peer, true)));
    rail.check_peers(&mut words);
    told.append(&mut words.0);
    told
}

#[test]
fn every_call_and_every_report_is_forwarded() {
    let run = |wrap: &dyn Fn(Recorder) -> Vec<String>| {
        let log = Log::default();
        let told = wrap(Recorder(Rc::clone(&log)));
        (told, log.take())
    };
    let bare = run(&everything);
    assert_eq!(bare.1.len(), 32, "as many calls as a rail has: {:?}", bare.1);
    assert_eq!(run(&|rail| everything(Guard::new(rail, RailId(0), None))), bare);
}

/// Defines a fixture that wraps each rail in a guard.
macro_rules! guarded {
    ($($(#[$doc:meta])* $fixture:ident = $link:expr, $rail:ty;)*) => {$(
        $(#[$doc])*
        pub struct $fixture;

        impl Fixture for $fixture {
            type Rail = Guard<$rail>;

            const REACHES_ON: Option<&'static str> = Some("the rail inside says why");
            const IMPORTS_UNSEEN: Option<&'static str> = Some("the rail inside says why");
            const LANDS_LATE: Option<&'static str> = Some("the rail inside says why");

            fn link(seed: u64) -> Link<Self::Rail> {
                let make: fn(u64) -> Link<$rail> = $link;
                let Link { rails, origin, target, to, from } = make(seed);
                let guard = |rail| Guard::new(rail, RailId(0), None);
                Link { rails: rails.into_iter().map(guard).collect(), origin, target, to, from }
            }
        }
    )*};
}

guarded! {
    EfaDirect = fixture::EfaDirect::link, fishplate_sys::fabric::FabricRail;
    Tcp = fixture::Tcp::link, fishplate_sys::fabric::FabricRail;
    /// Memory that the kernel copies. The rail copies at once, and payloads arrive through the
    /// lane.
    Shm = private, shared::TestRail;
}

fn private(seed: u64) -> Link<shared::TestRail> {
    let config =
        ShmConfig { lane_cells: 64 << (seed % 3), max_message: 1024, ..ShmConfig::default() };
    let (mut origin, mut target) = (shared::rail(config.clone()), shared::rail(config));
    let [second, first] = shared::meet(&origin, &target, socket_pair().unwrap());
    let (to, from) = (Peer(5), Peer(2));
    origin.attach(to, second).unwrap();
    target.attach(from, first).unwrap();
    Link { rails: vec![origin, target], origin: 0, target: 1, to, from }
}
