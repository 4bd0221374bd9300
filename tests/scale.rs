//! Runs many ranks in one process, one engine each, over a switch that delivers in any order.
//! Measures start-up, memory per rank and the first message, and checks all-to-all traffic.
//! `FISHPLATE_RANKS` sets the number of ranks (default 100). `benches/README.md` has figures for
//! 1,000.
#![cfg(target_os = "linux")]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::env;
use std::ptr::{self, NonNull};
use std::time::{Duration, Instant};

use fishplate::{Limits, Storage};
use fishplate_core::engine::{Config, ContextId, Engine, Issued, Notice, Signal};
use fishplate_core::error::{AttachError, OpError, PostError};
use fishplate_core::mem::{LocalId, Peer, PeerId, Region, RegionKind, Untrusted};
use fishplate_core::op::{AmoSet, SignalOp};
use fishplate_core::rail::{Caps, Local, Order, Posted, Rail, RailKey, Remote, Sink};

#[path = "support/resident.rs"]
mod resident;

use resident::resident;

const CX: ContextId = ContextId(0);

/// Maximum number of events in flight to one rank.
const DEPTH: usize = 256;

/// Each rail delivers a random one of its oldest events: of at most this many.
const REACH: u64 = 8;

enum Event {
    Landed(u32),
    Message(Vec<u8>),
}

/// The state that all ranks share: their memory, and events in flight.
struct Switch {
    memory: Vec<Option<(NonNull<u8>, usize)>>,
    mail: Vec<VecDeque<(u16, Event)>>,
    random: u64,
}

/// A rank's end of the switch. [`peer_of`] assigns the peer numbers.
struct Port<'s> {
    switch: &'s RefCell<Switch>,
    rank: u16,
}

/// Returns the peer number of `other` at `rank`: ranks in order, without `rank` itself.
fn peer_of(rank: u16, other: u16) -> u16 {
    other - u16::from(other > rank)
}

/// Returns the rank of a peer of `rank`.
fn rank_of(rank: u16, peer: u16) -> u16 {
    peer + u16::from(peer >= rank)
}

impl Port<'_> {
    /// Returns the address of a peer's memory, if the `len` bytes are in bounds.
    fn resolve(&self, peer: Peer, remote: Remote, len: usize) -> Result<*mut u8, PostError> {
        let to = rank_of(self.rank, peer.0);
        let (base, size) = self.switch.borrow().memory[usize::from(to)].ok_or(PostError::BadKey)?;
        match remote.offset.checked_add(len as u64) {
            Some(end) if end <= size as u64 => {
                // SAFETY: offset + len <= size, so the pointer stays inside the registered region.
                Ok(unsafe { base.as_ptr().add(remote.offset as usize) })
            }
            _ => Err(PostError::BadKey),
        }
    }

    fn post(&self, peer: Peer, event: Event) -> Result<Posted, PostError> {
        let mail = &mut self.switch.borrow_mut().mail[usize::from(rank_of(self.rank, peer.0))];
        if mail.len() >= DEPTH {
            return Err(PostError::Again);
        }
        mail.push_back((self.rank, event));
        Ok(Posted::Done)
    }
}

// SAFETY: registered memory belongs to this process and outlives the engines. Local memory is not
// accessed after a post returns. Through `Setup`, a shared reference, nothing can change the rail.
unsafe impl<'s> Rail for Port<'s> {
    type Setup<'a>
        = &'a Port<'s>
    where
        Self: 'a;

    const COPIES: bool = false;

    fn setup(&mut self) -> &Self {
        self
    }

    fn caps(&self) -> Caps {
        Caps {
            max_message: 256,
            max_rma: 1 << 20,
            inject: 1 << 20,
            data_bytes: 4,
            order: Order::None,
            native_atomics: AmoSet::NONE,
            depth: DEPTH as u32,
            fresh: true,
            fences: false,
        }
    }

    fn register(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError> {
        self.switch.borrow_mut().memory[usize::from(self.rank)] =
            Some((region.ptr(), region.len()));
        Ok((RailKey { key: 1, base: 0 }, 0))
    }

    fn deregister(&mut self, _key: RailKey) -> Result<(), AttachError> {
        self.switch.borrow_mut().memory[usize::from(self.rank)] = None;
        Ok(())
    }

    fn touches(&mut self, _memory: Local) -> bool {
        false
    }

    fn import(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        self.resolve(peer, Remote { key, offset: 0 }, len as usize)
            .map_err(|_| AttachError::BadHandle)?;
        Ok(None)
    }

    fn release(&mut self, _peer: Peer, _key: RailKey) {}

    fn detach(&mut self, peer: Peer) {
        let from = rank_of(self.rank, peer.0);
        self.switch.borrow_mut().mail[usize::from(self.rank)].retain(|(sender, _)| *sender != from);
    }

    unsafe fn post_write(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: Option<u32>,
        _cx: u64,
    ) -> Result<Posted, PostError> {
        let target = self.resolve(peer, remote, local.len)?;
        if let Some(data) = data {
            self.post(peer, Event::Landed(data))?;
        }
        // SAFETY: our caller guarantees that the source is readable, and `resolve` has checked the
        // target.
        unsafe { ptr::copy(local.ptr.as_ptr(), target, local.len) };
        Ok(Posted::Done)
    }

    unsafe fn post_read(
        &mut self,
        _: Peer,
        _: Local,
        _: Remote,
        _: u64,
    ) -> Result<Posted, PostError> {
        Err(PostError::Unsupported)
    }

    fn post_message(
        &mut self,
        peer: Peer,
        head: &[u8],
        body: Untrusted<'_>,
        _cx: u64,
    ) -> Result<Posted, PostError> {
        let mut bytes = vec![0; head.len() + body.len()];
        let (first, rest) = bytes.split_at_mut(head.len());
        first.copy_from_slice(head);
        body.copy_out(rest);
        self.post(peer, Event::Message(bytes))
    }

    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        for count in 0..budget {
            let Switch { mail, random, .. } = &mut *self.switch.borrow_mut();
            let mail = &mut mail[usize::from(self.rank)];
            // xorshift64.
            *random ^= *random << 13;
            *random ^= *random >> 7;
            *random ^= *random << 17;
            let next = (*random % REACH.min(mail.len().max(1) as u64)) as usize;
            let Some((from, event)) = mail.swap_remove_front(next) else { return count };
            let peer = Peer(peer_of(self.rank, from));
            match event {
                Event::Landed(data) => sink.landed(peer, data),
                Event::Message(bytes) => sink.message(peer, Untrusted::from_slice(&bytes)),
            }
        }
        budget
    }
}

/// A rank: its engine and its memory. The memory has two slots per rank, then a signal word per
/// rank, then two sources per rank.
struct Rank<'m, 's> {
    engine: Engine<'m, Port<'s>, 1>,
    peers: Vec<PeerId>,
    here: LocalId,
    handle: Vec<u8>,
    memory: NonNull<u64>,
}

impl Rank<'_, '_> {
    fn word(&self, at: usize) -> u64 {
        // SAFETY: the word lies inside the memory, which the test accesses from one thread.
        unsafe { self.memory.add(at).read() }
    }
}

/// Returns the word that rank `from` sends to rank `to`.
fn contents(from: usize, to: usize) -> u64 {
    (((from as u64) << 32) | to as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 1
}

/// Measures a pass of an idle rank: the minimum of 100 means of 100 passes each.
fn idle_pass(rank: &mut Rank) -> Duration {
    let pass = |rank: &mut Rank| {
        let begun = Instant::now();
        (0..100).for_each(|_| _ = rank.engine.progress());
        begun.elapsed() / 100
    };
    (0..100).map(|_| pass(rank)).min().unwrap()
}

/// Puts a word into each of the two slots of rank `from` at rank `to`, then adds to the signal
/// word.
fn send(ranks: &mut [Rank], from: usize, to: usize, until: Instant) {
    let count = ranks.len();
    let peer = ranks[from].peers[usize::from(peer_of(from as u16, to as u16))];
    let handle = ranks[to].handle.clone();
    let rank = &mut ranks[from];
    let there = rank.engine.import(peer, &handle).unwrap();
    let at = |word: usize| 8 * word as u64;
    for slot in 0..2 {
        // SAFETY: the words lie inside the memory, which the test accesses from one thread. Each
        // target rank has its own two sources.
        unsafe {
            rank.memory.add(3 * count + 2 * to + slot).write(contents(from, to) + slot as u64)
        };
    }
    let source = rank.here.at(at(3 * count + 2 * to));
    let next = rank.here.at(at(3 * count + 2 * to + 1));
    let signal = Signal { at: there.at(at(2 * count + from)), op: SignalOp::Add, value: 1 };
    // The second post does not wait for the first, so the switch may reorder them.
    again(ranks, from, until, |engine| {
        engine.put(CX, source, 8, there.at(at(2 * from)), Notice::Silent)
    });
    again(ranks, from, until, |engine| {
        engine.put_signal(CX, next, 8, there.at(at(2 * from + 1)), signal, Notice::Silent)
    });
}

/// Posts an operation of a rank. While the rank has no room, all ranks make passes.
fn again<'m, 's>(
    ranks: &mut [Rank<'m, 's>],
    from: usize,
    until: Instant,
    mut post: impl FnMut(&mut Engine<'m, Port<'s>, 1>) -> Result<Issued, OpError>,
) {
    loop {
        match post(&mut ranks[from].engine) {
            Ok(_) => return,
            Err(OpError::Again) => ranks.iter_mut().for_each(|rank| _ = rank.engine.progress()),
            Err(error) => panic!("rank {from}: {error:?}"),
        }
        assert!(Instant::now() < until, "rank {from} gets no room");
    }
}

/// Makes passes on all ranks until nothing is in flight.
fn settle(ranks: &mut [Rank], switch: &RefCell<Switch>, until: Instant) {
    let mut idle = 0;
    while idle < 64 {
        let events: u32 = ranks.iter_mut().map(|rank| rank.engine.progress()).sum();
        let quiet = events == 0 && switch.borrow().mail.iter().all(VecDeque::is_empty);
        idle = if quiet { idle + 1 } else { 0 };
        assert!(Instant::now() < until, "traffic does not end");
    }
}

/// Runs a job of `count` ranks. Returns the time of an idle pass of a rank with `count - 1` peers.
fn job(count: usize, seed: u64) -> Duration {
    let until = Instant::now() + Duration::from_secs(20 + count as u64);
    let config = Config { window: 16, seed, ..Config::DEFAULT };
    let most = count as u16;
    let switch = RefCell::new(Switch {
        memory: vec![None; count],
        mail: (0..count).map(|_| VecDeque::new()).collect(),
        random: seed | 1,
    });
    let mut memory = vec![vec![0u64; 5 * count]; count];

    let (begun, before) = (Instant::now(), resident());
    let limits = Limits { peers: most, locals: 1, remotes: most, operations: 64 };
    let mut storage: Vec<Storage<1>> = (0..count).map(|_| Storage::new(&config, limits)).collect();
    let opened =
        storage.iter_mut().zip(&mut memory).enumerate().map(|(rank, (storage, memory))| {
            let mut engine =
                storage.engine(config, [Port { switch: &switch, rank: rank as u16 }]).unwrap();
            let memory_ptr = NonNull::new(memory.as_mut_ptr()).unwrap();
            // SAFETY: the memory has 5 * count words and outlives the engine. From here on only
            // `memory_ptr` accesses it, and that pointer may access all words.
            let region = unsafe { Region::new(memory_ptr.cast(), 40 * count, RegionKind::Private) };
            let here = engine.register(region).unwrap();
            let mut handle = [0; 512];
            let len = engine.export(here, &mut handle).unwrap();
            Rank { engine, peers: vec![], here, handle: handle[..len].to_vec(), memory: memory_ptr }
        });
    let mut ranks: Vec<Rank> = opened.collect();
    // Saturates, because other parts of the process may free memory in between.
    let grown = || resident().saturating_sub(before) / count;
    let alone = grown();
    for rank in &mut ranks {
        for number in 0..most - 1 {
            let peer = rank.engine.reserve_peer().unwrap();
            assert_eq!(peer.peer(), Peer(number));
            rank.engine.connect_peer(peer, 1).unwrap();
            rank.peers.push(peer);
        }
    }
    let (startup, known) = (begun.elapsed(), grown());
    let idle = idle_pass(&mut ranks[0]);

    let begun = Instant::now();
    send(&mut ranks, 0, count - 1, until);
    let mut passes = 0;
    while ranks[count - 1].word(2 * count) == 0 {
        passes += 1;
        ranks[0].engine.progress();
        ranks[count - 1].engine.progress();
        assert!(passes < 1000, "the first message does not arrive");
    }
    let first = begun.elapsed();

    let begun = Instant::now();
    for step in 1..count {
        for from in 0..count {
            let to = (from + step) % count;
            if (from, to) != (0, count - 1) {
                send(&mut ranks, from, to, until);
            }
        }
        // One pass per step, so some traffic is still in flight during the next step.
        ranks.iter_mut().for_each(|rank| _ = rank.engine.progress());
    }
    settle(&mut ranks, &switch, until);
    let all = begun.elapsed();
    let busy = grown();
    for (to, rank) in ranks.iter().enumerate() {
        for from in (0..count).filter(|&from| from != to) {
            assert_eq!(rank.word(2 * count + from), 1, "signals of {from} at {to}");
            for slot in 0..2 {
                let wanted = contents(from, to) + slot as u64;
                assert_eq!(rank.word(2 * from + slot), wanted, "payload {slot} of {from} at {to}");
            }
        }
    }
    let disorder: u64 = ranks.iter().map(|rank| rank.engine.stats().arrivals_out_of_order).sum();
    assert!(count < 10 || disorder > 0, "the switch delivered in order");
    println!(
        "| {count} | {:.1} | {:.1} | {} | {} | {} | {} | {:.1} | {:.2} |",
        startup.as_secs_f64() * 1e3,
        first.as_secs_f64() * 1e6,
        alone,
        known.saturating_sub(alone) / (count - 1),
        busy.saturating_sub(alone) / (count - 1),
        idle.as_nanos(),
        all.as_secs_f64() * 1e3,
        all.as_secs_f64() * 1e6 / (count * (count - 1)) as f64,
    );
    idle
}

#[test]
fn many_ranks_start_meet_and_exchange_everything() {
    let number =
        |name: &str, usual: u64| env::var(name).map_or(usual, |text| text.parse().unwrap());
    let (seed, most) =
        (number("FISHPLATE_SEED", u64::from(std::process::id())), number("FISHPLATE_RANKS", 100));
    println!("FISHPLATE_SEED={seed}");
    println!(
        "| ranks | start ms | first us | rank bytes | + per peer connected | after all | idle pass \
         ns | all ms | us each |"
    );
    // The first run includes one-time costs.
    job(2, seed);
    let few = job(4, seed);
    let many = job(most as usize, seed);
    assert!(
        many < 8 * few.max(Duration::from_nanos(20)),
        "an idle pass: {few:?} with 4 ranks, {many:?} with {most}"
    );
}
