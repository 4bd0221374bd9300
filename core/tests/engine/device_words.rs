//! Signals and atomics on words in device memory. The device applies them in order and exactly
//! once, even if the device has no room or fails, or the peer fails. The processor cannot access
//! these words, because [`veil`](super::support::veil) hides them.

use fishplate_core::engine::{Config, Issued, Notice, Signal};
use fishplate_core::error::{OpError, PeerError, Violation, WaitError};
use fishplate_core::mem::{LocalId, RailId, Region, RemoteId};
use fishplate_core::op::{Amo, AmoOp, Cmp, SignalOp};
use fishplate_core::rail::Rail;
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;

use super::hostile::message;
use super::support::tap::{Event, Shared, Tap, shared, tap};
use super::support::veil::{Veiled, device_region, peek, poke};
use super::support::*;

const SIZE: usize = 4096;

/// An engine that is its own peer, with a region of device memory.
struct Rig<R: Rail, const RAILS: usize> {
    own: Own<Veiled<R>, RAILS>,
    memory: Region,
    local: LocalId,
    remote: RemoteId,
}

impl<R: Rail, const RAILS: usize> Rig<R, RAILS> {
    fn new(rails: [R; RAILS]) -> Self {
        let config =
            Config { window: 16, stripe_threshold: 256, stripe_chunk: 64, ..Config::DEFAULT };
        let mut own = own(config, rails.map(Veiled::new), SIZE);
        let memory = device_region(SIZE);
        let local = own.engine.register(memory).unwrap();
        let remote = import(&mut own.engine, own.peer, local);
        Rig { own, memory, local, remote }
    }

    fn word(&self, at: usize) -> u64 {
        u64::from_ne_bytes(peek(&self.memory, at, 8).try_into().unwrap())
    }

    fn rail(&mut self) -> &mut Veiled<R> {
        self.own.engine.rail_mut(RailId(0)).unwrap()
    }

    fn issue(&mut self, mut call: impl FnMut(&mut Self) -> Result<Issued, OpError>) -> Issued {
        for _ in 0..100_000 {
            match call(self) {
                Err(OpError::Again) => drop(self.own.engine.progress()),
                issued => return issued.unwrap(),
            }
        }
        panic!("no room after many passes");
    }

    fn set(&mut self, at: u64, value: u64) {
        let signal = Signal::set(self.remote.at(at), value);
        self.issue(|rig| rig.own.engine.signal(CX, signal, Notice::Silent));
    }
}

fn faulty<const RAILS: usize>(seed: u64) -> [Faulty<Loopback<64>, 16>; RAILS] {
    std::array::from_fn(|n| Faulty::new(Loopback::new(), Faults::DISORDER, seed + 1000 * n as u64))
}

fn tapped() -> (Shared, Rig<Tap<Loopback<64>>, 1>) {
    let control = shared();
    let rig = Rig::new(tap(Loopback::new(), &control));
    (control, rig)
}

/// A device kernel may poll the word: when it sees the word change, all earlier writes have landed.
#[test]
fn data_is_in_the_device_when_the_word_of_its_signal_changes() {
    const SLOTS: u64 = 8;
    for seed in seeds(40) {
        let mut rig = Rig::new(faulty::<2>(seed));
        let mut random = Random(seed);
        let mut sent: Vec<Vec<u8>> = vec![vec![]];
        let mut seen = 0;
        for n in 1..=80u64 {
            let payload: Vec<u8> = (0..random.below(400)).map(|_| random.next() as u8).collect();
            let at = SLOTS * 8 + n % SLOTS * 400;
            if n % SLOTS == 0 {
                rig.own.engine.quiet(CX, rig.own.peer, &mut rig.own.waiter, SOON).unwrap();
            }
            write(&rig.own.engine, rig.own.source.at(at), &payload);
            // The signal either sets the word to a count or adds to the word.
            let signal = match random.below(2) {
                0 => Signal::set(rig.remote.at(0), n),
                _ => Signal::add(rig.remote.at(0), 1),
            };
            rig.issue(|rig| {
                let (from, to) = (rig.own.source.at(at), rig.remote.at(at));
                rig.own.engine.put_signal(CX, from, payload.len(), to, signal, Notice::Silent)
            });
            sent.push(payload);
            rig.rail().full = random.below(3) as u32;
            for pass in 0.. {
                let now = rig.word(0);
                assert!(now >= seen && now <= n, "seed {seed}: {now} after {seen}");
                assert!(pass < 100_000, "seed {seed}: signal {n} is not applied");
                for n in (seen + 1).max(now.saturating_sub(SLOTS / 2))..=now {
                    let payload = &sent[n as usize];
                    let there =
                        peek(&rig.memory, (SLOTS * 8 + n % SLOTS * 400) as usize, payload.len());
                    assert!(there == *payload, "seed {seed}: signal {n} came before its data");
                }
                seen = now;
                if seen + random.below(4) >= n && (n != 80 || seen == n) {
                    break;
                }
                rig.own.engine.progress();
            }
        }
    }
}

#[test]
fn atomics_of_every_kind_match_a_model_and_keep_their_order_with_signals() {
    for seed in seeds(40) {
        let mut rig = Rig::new(faulty::<2>(seed));
        let mut random = Random(!seed);
        // Host memory on which the model executes the same operations at once.
        let mut model = [0u64; 4];
        let at_model = |model: &mut [u64; 4], at: u64| -> *mut u8 {
            // SAFETY: `at` is below 32, the size of the model.
            unsafe { model.as_mut_ptr().cast::<u8>().add(at as usize) }
        };
        for n in 0..150u64 {
            let width = 1u8 << random.below(4);
            let at = random.below(32) & !(width as u64 - 1);
            let op = AmoOp::from_wire(1 + random.below(9) as u8).unwrap();
            let amo = Amo { op, width, operand: random.next(), compare: random.below(3) };
            if random.below(4) == 0 {
                let at = at & !7;
                let signal =
                    Signal { at: rig.remote.at(at), op: SignalOp::Add, value: random.next() };
                rig.issue(|rig| rig.own.engine.signal(CX, signal, Notice::Silent));
                let word = &mut model[at as usize / 8];
                *word = word.wrapping_add(signal.value);
                continue;
            }
            // SAFETY: the address is aligned to the width and inside the model.
            let old = unsafe { amo.apply(at_model(&mut model, at)) };
            rig.rail().full = random.below(3) as u32;
            let place = rig.remote.at(at);
            match random.below(2) {
                0 => drop(rig.issue(|rig| rig.own.engine.amo(CX, place, amo, Notice::Silent))),
                _ => {
                    let issued = rig.issue(|rig| rig.own.engine.fetch(CX, place, amo, n));
                    let Issued::Pending(token) = issued else {
                        panic!("a word of a device is not mapped")
                    };
                    let end = rig.own.engine.wait(token, &mut rig.own.waiter, SOON).unwrap();
                    assert_eq!(end.value, old, "seed {seed}: {amo:?} at {at}");
                }
            }
        }
        rig.own.engine.quiet(CX, rig.own.peer, &mut rig.own.waiter, SOON).unwrap();
        let words: Vec<_> = (0..4).map(|word| rig.word(8 * word)).collect();
        assert_eq!(words, model, "seed {seed}");
        assert!(
            peek(&rig.memory, 32, SIZE - 32).iter().all(|&byte| byte == 0),
            "seed {seed}: outside"
        );
    }
}

/// This matches the behaviour of a word in host memory, which changes on arrival.
#[test]
fn what_arrived_from_a_peer_before_it_failed_is_applied() {
    for why in [PeerError::Died, PeerError::Closed, PeerError::Rail(RailId(0)), PeerError::Lost] {
        let (control, mut rig) = tapped();
        rig.rail().full = 3;
        rig.set(0, 7);
        let signal = Signal::add(rig.remote.at(0), 2);
        rig.issue(|rig| rig.own.engine.signal(CX, signal, Notice::Silent));
        rig.own.engine.progress();
        assert_eq!(rig.word(0), 0, "the device has no room");
        control.borrow_mut().inject.push_back(Event::Down(rig.own.peer.peer(), why));
        rig.own.engine.progress();
        assert_eq!(rig.own.engine.peer_error(rig.own.peer), Ok(Some(why)));
        passes(&mut rig.own.engine, 5);
        assert_eq!(rig.word(0), 9, "{why:?}");
        assert!(!rig.own.engine.has_due(), "{why:?}");
    }
}

#[test]
fn a_wait_applies_what_has_arrived_before_it_reports_a_failed_peer() {
    let (control, mut rig) = tapped();
    let (at, peer) = (rig.local.at(8), rig.own.peer);
    rig.rail().full = 6;
    rig.set(8, 3);
    rig.own.engine.progress();
    control.borrow_mut().inject.push_back(Event::Down(peer.peer(), PeerError::Died));
    let Own { engine, waiter, .. } = &mut rig.own;
    assert_eq!(engine.wait_signal_anywhere(at, Cmp::Ge, 3, Some(peer), waiter, SOON), Ok(3));
    let failed = WaitError::PeerFailed(peer, PeerError::Died);
    assert_eq!(engine.wait_signal_anywhere(at, Cmp::Ge, 4, Some(peer), waiter, SOON), Err(failed));
}

#[test]
fn a_pass_changes_at_most_one_word_of_a_device() {
    const SIGNALS: u64 = 10;
    let (_, mut rig) = tapped();
    for word in 0..SIGNALS {
        rig.set(8 * word, word + 1);
    }
    let mut passes = 0;
    while rig.word(8 * (SIGNALS as usize - 1)) == 0 {
        let before = rig.rail().placed;
        rig.own.engine.progress();
        assert!(rig.rail().placed - before <= 1);
        passes += 1;
        assert!(passes <= SIGNALS + 1, "{passes} passes");
    }
    let words: Vec<_> = (0..SIGNALS as usize).map(|word| rig.word(8 * word)).collect();
    assert_eq!(words, (1..=SIGNALS).collect::<Vec<_>>());
}

#[test]
fn streams_take_turns_to_change_words_of_a_device() {
    let (_, mut rig) = tapped();
    // A second peer, which is this engine too.
    let other = rig.own.engine.reserve_peer().unwrap();
    rig.own.engine.connect_peer(other, 1).unwrap();
    let theirs = import(&mut rig.own.engine, other, rig.local);
    let add = |rig: &mut Rig<_, 1>, to: RemoteId, at: u64| {
        let signal = Signal::add(to.at(at), 1);
        rig.issue(|rig| rig.own.engine.signal(CX, signal, Notice::Silent));
    };
    for round in 0..200 {
        // The first peer signals twice in every round. The second peer signals in every tenth
        // round.
        for _ in 0..2 {
            let first = rig.remote;
            add(&mut rig, first, 0);
        }
        if round % 10 == 0 {
            add(&mut rig, theirs, 8);
        }
        rig.own.engine.progress();
        if round > 100 {
            assert!(rig.word(8) >= round / 10 - 2, "{} signals of round {round}", rig.word(8));
        }
    }
}

/// No event reports that the device has room again, so the waiter must poll.
#[test]
fn a_waiter_stays_awake_while_the_device_refuses_to_read_its_word() {
    let (_, mut rig) = tapped();
    let at = rig.local.at(8);
    rig.rail().full = u32::MAX;
    let Own { engine, waiter, .. } = &mut rig.own;
    assert!(!engine.has_due());
    let waited = engine.wait_signal_anywhere(at, Cmp::Eq, 1, None, waiter, 1);
    assert!(matches!(waited, Err(WaitError::Deadline(_))), "{waited:?}");
    assert!(engine.has_due());
    // After one pass without a wait the engine may sleep.
    engine.progress();
    assert!(!engine.has_due());
}

#[test]
fn a_device_that_fails_costs_the_peer_and_nothing_is_applied_twice() {
    device_fails(0);
    device_fails(3);
}

fn device_fails(full: u32) {
    let (control, mut rig) = tapped();
    rig.set(0, 1);
    rig.own.engine.quiet(CX, rig.own.peer, &mut rig.own.waiter, SOON).unwrap();
    // The device makes the first change but reports a failure. That failure, or an earlier event,
    // fails the peer.
    rig.rail().late = 1;
    rig.rail().full = full;
    for _ in 0..2 {
        let signal = Signal::add(rig.remote.at(0), 1);
        rig.issue(|rig| rig.own.engine.signal(CX, signal, Notice::Silent));
    }
    let why = PeerError::Rail(RailId(0));
    rig.own.engine.progress();
    if full > 0 {
        control.borrow_mut().inject.push_back(Event::Down(rig.own.peer.peer(), why));
    }
    passes(&mut rig.own.engine, 10);
    assert_eq!(rig.own.engine.peer_error(rig.own.peer), Ok(Some(why)));
    assert_eq!(rig.word(0), 2);
    let quiet = rig.own.engine.quiet(CX, rig.own.peer, &mut rig.own.waiter, SOON);
    assert_eq!(quiet, Err(WaitError::PeerFailed(rig.own.peer, why)));
}

#[test]
fn a_wait_for_a_word_of_a_device_sees_it_and_ends_with_its_peer() {
    let (control, mut rig) = tapped();
    let (at, peer) = (rig.local.at(8), rig.own.peer);
    let wait = |rig: &mut Rig<_, 1>, value, deadline| {
        let Own { engine, waiter, .. } = &mut rig.own;
        engine.wait_signal_anywhere(at, Cmp::Ge, value, Some(peer), waiter, deadline)
    };
    rig.set(8, 3);
    rig.rail().full = 4;
    assert_eq!(wait(&mut rig, 3, SOON), Ok(3));
    assert!(matches!(wait(&mut rig, 4, 1), Err(WaitError::Deadline(_))));
    // The wait sees any change of the word, here one by the device itself.
    poke(&rig.memory, 8, &4u64.to_ne_bytes());
    assert_eq!(wait(&mut rig, 4, SOON), Ok(4));
    control.borrow_mut().inject.push_back(Event::Down(peer.peer(), PeerError::Died));
    assert_eq!(wait(&mut rig, 5, SOON), Err(WaitError::PeerFailed(peer, PeerError::Died)));
    assert_eq!(wait(&mut rig, 4, SOON), Ok(4));
    let Own { engine, waiter, source, .. } = &mut rig.own;
    // The wait also works on a word in host memory, and refuses an address outside the region.
    assert_eq!(engine.wait_signal_anywhere(source.at(0), Cmp::Eq, 0, None, waiter, SOON), Ok(0));
    let outside = OpError::OutOfBounds { offset: SIZE as u64, len: 8, size: SIZE as u64 };
    let waited =
        engine.wait_signal_anywhere(rig.local.at(SIZE as u64), Cmp::Eq, 0, None, waiter, SOON);
    assert_eq!(waited, Err(outside.into()));
}

#[test]
fn words_that_a_peer_may_not_name_are_refused() {
    let size = SIZE as u64;
    for (what, offset, data, want) in [
        ("over the end", size, None, Violation::Bounds),
        ("far away", u64::MAX - 7, None, Violation::Bounds),
        ("misaligned", 4, None, Violation::Bounds),
        ("with data for a device", 0, Some(8u64), Violation::Bounds),
    ] {
        let (control, mut rig) = tapped();
        // The device region is the third region of its engine.
        let region = (2, 0);
        let mut words = vec![offset, 7];
        if let Some(to) = data {
            let (index, generation): (u64, u64) = (region.0.into(), region.1.into());
            words.extend([to, 8 | index << 32 | generation << 48, 5]);
        }
        let kind = if data.is_some() { 2 } else { 1 };
        let bytes = message([kind, 0, 1, 8], 0, 0, region, &words);
        control.borrow_mut().inject.push_back(Event::Message(rig.own.peer.peer(), bytes));
        passes(&mut rig.own.engine, 3);
        let why = PeerError::Protocol(want);
        assert_eq!(rig.own.engine.peer_error(rig.own.peer), Ok(Some(why)), "{what}");
        assert!(peek(&rig.memory, 0, SIZE).iter().all(|&byte| byte == 0), "{what}");
    }
}

/// The region of a parked message is deregistered before the message is applied.
#[test]
fn a_word_that_is_deregistered_before_its_turn_is_not_changed() {
    let (_, mut rig) = tapped();
    rig.rail().full = 1;
    rig.set(0, 7);
    rig.own.engine.progress();
    rig.own.engine.release(rig.remote).unwrap();
    rig.own.engine.deregister(rig.local).unwrap();
    passes(&mut rig.own.engine, 3);
    let why = PeerError::Protocol(Violation::Region);
    assert_eq!(rig.own.engine.peer_error(rig.own.peer), Ok(Some(why)));
    assert_eq!(rig.word(0), 0);
}

/// A wait for a device word marks stream 0 as due, before a peer owns that stream.
#[test]
fn a_peer_that_is_set_up_after_a_wait_for_a_device_word_is_served() {
    let mut engine =
        engine(Config { window: 16, ..Config::DEFAULT }, [Veiled::new(Loopback::<64>::new())]);
    let local = engine.register(device_region(SIZE)).unwrap();
    engine.rail_mut(RailId(0)).unwrap().full = u32::MAX;
    let mut waiter = waiter();
    let waited = engine.wait_signal_anywhere(local.at(0), Cmp::Eq, 1, None, &mut waiter, 1);
    assert!(matches!(waited, Err(WaitError::Deadline(_))), "{waited:?}");
    engine.rail_mut(RailId(0)).unwrap().full = 0;
    let peers = [0, 1].map(|_| {
        let peer = engine.reserve_peer().unwrap();
        engine.connect_peer(peer, 1).unwrap();
        peer
    });
    let source = engine.register(region(SIZE)).unwrap();
    let targets = peers.map(|peer| {
        let local = engine.register(region(SIZE)).unwrap();
        import(&mut engine, peer, local)
    });
    for n in 0..200 {
        for (peer, target) in peers.into_iter().zip(targets) {
            let signal = Signal::add(target.at(0), 1);
            engine
                .put_signal(CX, source.at(64), 512, target.at(64), signal, Notice::Silent)
                .unwrap();
            let quiet = engine.quiet(CX, peer, &mut waiter, 500_000 * (n + 1));
            assert_eq!(quiet, Ok(()), "put {n} to {peer:?}");
        }
    }
}
