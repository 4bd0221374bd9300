//! A peer is not trusted with failover either. Whatever it reports, a send keeps its memory while a
//! chunk may be posted again, and is pulled once.

use fishplate_core::engine::protocol::{Payload, Received};
use fishplate_core::engine::{Config, Engine, Notice};
use fishplate_core::error::{AttachError, OpError, PeerError, PostError, Use, Violation};
use fishplate_core::mem::{LocalId, PeerId, RailId, RemoteId};
use fishplate_core::op::{Fault, Outcome, Token};
use fishplate_core::rail::Fence;
use fishplate_core::rail::loopback::Loopback;

use super::rig::*;
use super::support::tap::{Event, Shared, Tap, shared};
use super::support::veil::{Veiled, device_region, peek, poke};
use super::support::*;

const ACK: u8 = 5;
const BYE: u8 = 8;
const FIN: u8 = 19;
const PULL: u8 = 20;
/// Kinds of messages that carry a sequence number.
const CHUNK: u8 = 25;
const NUMBERED_FIN: u8 = 23;

const IN_USE: Result<(), AttachError> = Err(AttachError::InUse(Use::Operations));

/// Length of the payload in bytes: several chunks.
const LEN: usize = 600;

/// An engine with failover that is its own peer, over two rails that cannot read its memory and do
/// not reach device memory.
struct Bench {
    control: Shared,
    engine: Engine<'static, Tap<Veiled<Loopback<64>>>, 2>,
    me: PeerId,
    out: LocalId,
    into: LocalId,
}

impl Bench {
    fn new(outgoing: usize) -> Bench {
        let control = shared();
        let config = Config { window: 64, ..Config::DEFAULT };
        let rails = std::array::from_fn(|rail| {
            let mut inner = Veiled::new(Loopback::new());
            inner.apart = true;
            Tap::new(inner, rail, &control)
        });
        let mut engine = engine(config, rails);
        engine.attach_failover(failover(&config, 4)).unwrap();
        engine.attach_matching(CARRYING, match_memory(CARRYING, 4, outgoing)).unwrap();
        let me = engine.reserve_peer().unwrap();
        engine.connect_peer(me, 0b11).unwrap();
        let [out, into] = [(); 2].map(|()| engine.register(region(8192)).unwrap());
        write(&engine, out.at(0), &pattern(0, LEN));
        control.borrow_mut().unreadable = true;
        control.borrow_mut().fence = Some(Fence::Fenced);
        Bench { control, engine, me, out, into }
    }

    fn recv(&mut self, lo: u64, len: usize) {
        self.engine.recv(Some(self.me), tag(lo), EXACT, Some((self.into.at(0), len)), lo).unwrap();
    }

    fn send(&mut self) -> Token {
        let payload = Payload::Region(self.out.at(0), LEN);
        pending(self.engine.send(CX, self.me, tag(1), payload, Notice::Report(1)))
    }

    /// Starts a send, lets the engine post all its chunks, and drops them.
    fn pulled(&mut self) -> Token {
        self.control.borrow_mut().lose(&[CHUNK]);
        self.recv(1, LEN);
        let sent = self.send();
        passes(&mut self.engine, 40);
        assert_eq!(self.chunked(0), pattern(0, LEN));
        sent
    }

    /// Returns the payloads of the chunks that were posted after the first `since` posts.
    fn chunked(&self, since: usize) -> Vec<u8> {
        let control = self.control.borrow();
        let chunks =
            control.posts[since..].iter().filter(|post| post.bytes.first() == Some(&CHUNK));
        chunks.flat_map(|post| post.bytes[32..].to_vec()).collect()
    }

    /// Delivers a message of the peer: its kind, the acknowledged number, and the words after the
    /// header of 16 bytes.
    fn hear(&mut self, kind: u8, ack: u32, rest: &[u64]) {
        let mut bytes = vec![kind, 0, 0, 0, 0, 0, 0, 0];
        bytes.extend(ack.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(rest.iter().flat_map(|word| word.to_le_bytes()));
        self.control.borrow_mut().inject.push_back(Event::Message(self.me.peer(), bytes));
        passes(&mut self.engine, 3);
    }

    /// Delivers a `Told` of the peer: it has fenced rail 0, and no message from sequence number 2
    /// on has arrived.
    fn tell(&mut self) {
        let mut told = vec![9, 0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0];
        told.extend([2, 1].iter().flat_map(|word: &u64| word.to_le_bytes()));
        told.resize(128, 0);
        self.control.borrow_mut().inject.push_back(Event::Message(self.me.peer(), told));
        passes(&mut self.engine, 10);
        assert_eq!(self.engine.stats().rails_failed, 1);
    }
}

/// Returns the send's token as it appears on the wire.
fn word_of(bench: &Bench) -> u64 {
    let control = bench.control.borrow();
    let request =
        control.posts.iter().find(|post| post.bytes.first() == Some(&18)).expect("a request");
    u64::from_le_bytes(request.bytes[32..40].try_into().unwrap())
}

#[test]
fn a_finished_send_keeps_its_memory_until_its_chunks_are_acknowledged() {
    let mut bench = Bench::new(4);
    let sent = bench.pulled();
    assert_eq!(bench.engine.deregister(bench.out), IN_USE);
    let token = word_of(&bench);
    // The peer reports that all chunks have arrived, and later that they have not.
    bench.hear(FIN, 2, &[token, LEN as u64]);
    assert_eq!(bench.engine.peer_error(bench.me), Ok(None));
    assert_eq!(bench.engine.test(sent), Ok(None));
    assert_eq!(bench.engine.deregister(bench.out), IN_USE);
    let posts = bench.control.borrow().posts.len();
    bench.tell();
    assert!(!bench.chunked(posts).is_empty(), "chunks of rail 0 are posted again");
    let posted = bench.engine.stats().posted as u32;
    bench.hear(ACK, posted - 1, &[]);
    assert_eq!(bench.engine.test(sent), Ok(None));
    assert_eq!(bench.engine.deregister(bench.out), IN_USE);
    bench.hear(ACK, posted, &[]);
    let end = bench.engine.test(sent).unwrap().expect("acknowledged");
    assert_eq!((end.outcome, end.value), (Outcome::Done, LEN as u64));
    assert_eq!(bench.engine.deregister(bench.out), Ok(()));
    assert_eq!(bench.engine.peer_error(bench.me), Ok(None));
}

#[test]
fn a_send_with_chunks_in_flight_is_finished_once() {
    for kind in [FIN, PULL] {
        let mut bench = Bench::new(4);
        let sent = bench.pulled();
        let token = word_of(&bench);
        bench.hear(FIN, 2, &[token, LEN as u64]);
        let more: &[u64] = if kind == FIN { &[token, 0] } else { &[token, 7, 8] };
        bench.hear(kind, 2, more);
        let why = PeerError::Protocol(Violation::Reply);
        assert_eq!(bench.engine.peer_error(bench.me), Ok(Some(why)));
        // The first report counts. Nothing is posted to the failed peer.
        let end = bench.engine.test(sent).unwrap().expect("ended with its peer");
        assert_eq!((end.outcome, end.value), (Outcome::Done, LEN as u64));
        assert_eq!(bench.engine.deregister(bench.out), Ok(()));
    }
}

#[test]
fn a_block_is_reused_after_its_chunks_are_acknowledged() {
    let mut bench = Bench::new(1);
    bench.control.borrow_mut().lose(&[CHUNK]);
    let bytes = Payload::Bytes(&[0xaa; 100]);
    // Uses all credits. Without a credit, a slice waits in a block.
    for n in 2..2 + u64::from(CARRYING.credits) {
        bench
            .engine
            .send(CX, bench.me, tag(n), Payload::Region(bench.out.at(0), 1), Notice::Silent)
            .unwrap();
    }
    let sent = pending(bench.engine.send_sync(CX, bench.me, tag(1), bytes, Notice::Report(1)));
    bench.recv(1, 100);
    passes(&mut bench.engine, 40);
    assert_eq!(bench.chunked(0), [0xaa; 100]);
    let token = word_of(&bench);
    let arrived = bench.engine.stats().arrived as u32;
    bench.hear(FIN, arrived, &[token, 100]);
    assert_eq!(bench.engine.test(sent), Ok(None));
    let other = Payload::Bytes(&[0xbb; 100]);
    assert_eq!(
        bench.engine.send_sync(CX, bench.me, tag(9), other, Notice::Silent),
        Err(OpError::Again)
    );
    bench.hear(ACK, arrived + 1, &[]);
    assert_eq!(bench.engine.peer_error(bench.me), Ok(None));
    assert_eq!(bench.engine.test(sent).unwrap().expect("acknowledged").outcome, Outcome::Done);
    bench.engine.send_sync(CX, bench.me, tag(9), other, Notice::Silent).unwrap();
}

#[test]
fn a_failed_send_keeps_its_memory_until_its_chunks_are_acknowledged() {
    let mut bench = Bench::new(4);
    let sent = bench.pulled();
    // The peer's Bye acknowledges two numbers. The peer has sent no Fin, so the send has not
    // matched.
    let mut bye = vec![BYE, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0];
    bye.extend([0; 4]);
    bench.control.borrow_mut().inject.push_back(Event::Message(bench.me.peer(), bye));
    passes(&mut bench.engine, 10);
    assert_eq!(bench.engine.peer_error(bench.me), Ok(Some(PeerError::Closed)));
    assert_eq!(bench.engine.test(sent), Ok(None));
    assert_eq!(bench.engine.deregister(bench.out), IN_USE);
    let posts = bench.control.borrow().posts.len();
    bench.tell();
    assert!(!bench.chunked(posts).is_empty(), "chunks of rail 0 are posted again");
    bench.engine.remove_peer(bench.me).unwrap();
    bench.engine.test(sent).unwrap().expect("ended with its peer");
    assert_eq!(bench.engine.deregister(bench.out), Ok(()));
}

#[test]
fn a_send_is_pulled_once() {
    for (len, request) in [(1, 1 << 32), (LEN as u64 - 1, 0), (LEN as u64, 1 << 32), (0, 1)] {
        let mut bench = Bench::new(4);
        bench.pulled();
        let (token, posts) = (word_of(&bench), bench.control.borrow().posts.len());
        bench.hear(PULL, 2, &[token, request, len]);
        passes(&mut bench.engine, 10);
        let why = PeerError::Protocol(Violation::Reply);
        assert_eq!(bench.engine.peer_error(bench.me), Ok(Some(why)), "{len}");
        assert_eq!(bench.chunked(posts), [], "{len}");
    }
}

#[test]
fn a_fin_before_the_acknowledgement_of_chunks_completes_the_send_after_it() {
    let mut bench = Bench::new(4);
    let remote = import_readable(&mut bench);
    let sent = bench.send();
    passes(&mut bench.engine, 40);
    // The request has arrived. A later write is withheld, so the acknowledged count stays below it.
    let late = std::rc::Rc::new(std::cell::RefCell::new(vec![]));
    let held = late.clone();
    bench.control.borrow_mut().edit = Some(Box::new(move |_, event| match &event {
        Event::Landed(..) => {
            held.borrow_mut().push(event);
            vec![]
        }
        _ => vec![event],
    }));
    bench.engine.put(CX, bench.into.at(4096), 8, remote.at(0), Notice::Silent).unwrap();
    bench.recv(1, LEN);
    let mut status = None;
    pass_until(&mut bench.engine, "received", |engine| {
        status = status.or_else(|| engine.next_recv());
        status.is_some()
    });
    check(&status.unwrap(), Received::Ok, 1, LEN as u64, LEN as u64);
    assert_eq!(read(&bench.engine, bench.into.at(0), LEN), pattern(0, LEN));
    passes(&mut bench.engine, 200);
    let fins = |bench: &Bench| {
        let control = bench.control.borrow();
        control.posts.iter().filter(|post| post.bytes.first() == Some(&NUMBERED_FIN)).count()
    };
    assert_eq!((fins(&bench), late.borrow().len()), (1, 1));
    assert_eq!(bench.engine.test(sent), Ok(None));
    assert_eq!(bench.engine.deregister(bench.out), IN_USE);
    bench.control.borrow_mut().inject.extend(late.borrow_mut().drain(..));
    pass_until(&mut bench.engine, "acknowledged", |engine| {
        engine
            .test(sent)
            .unwrap()
            .is_some_and(|end| (end.outcome, end.value) == (Outcome::Done, LEN as u64))
    });
    assert_eq!(bench.engine.deregister(bench.out), Ok(()));
}

/// Imports a target for writes. The rails can write to it, but cannot read payloads.
fn import_readable(bench: &mut Bench) -> RemoteId {
    let target = bench.engine.register(region(64)).unwrap();
    import_own(bench, target)
}

fn import_own(bench: &mut Bench, region: LocalId) -> RemoteId {
    bench.control.borrow_mut().unreadable = false;
    let remote = import(&mut bench.engine, bench.me, region);
    bench.control.borrow_mut().unreadable = true;
    remote
}

/// A piece of a get arrives twice before the other piece arrives.
#[test]
fn a_repeated_piece_that_answers_a_get_counts_once() {
    for device in [true, false] {
        let mut bench = Bench::new(4);
        let (from, to) = (device_region(4096), device_region(4096));
        let [source, target] = [from, to].map(|region| bench.engine.register(region).unwrap());
        let remote = import_own(&mut bench, source);
        poke(&from, 0, &pattern(3, 256));
        let late = std::rc::Rc::new(std::cell::RefCell::new(vec![]));
        let held = late.clone();
        let mut pieces = 0;
        bench.control.borrow_mut().edit = Some(Box::new(move |_, event| match &event {
            Event::Message(_, bytes) if bytes[0] == 14 => {
                pieces += 1;
                match pieces {
                    1 => vec![event.clone(), event],
                    _ => {
                        held.borrow_mut().push(event);
                        vec![]
                    }
                }
            }
            _ => vec![event],
        }));
        let into = if device { target } else { bench.into };
        // A get of two pieces, 128 bytes each.
        let get = pending(bench.engine.get(CX, into.at(0), 256, remote.at(0), Notice::Report(1)));
        passes(&mut bench.engine, 200);
        assert_eq!(bench.engine.peer_error(bench.me), Ok(None), "device: {device}");
        assert_eq!(bench.engine.test(get), Ok(None), "device: {device}: a piece is missing");
        assert_eq!(
            (bench.engine.stats().duplicates, late.borrow().len()),
            (1, 1),
            "device: {device}"
        );
        bench.control.borrow_mut().inject.extend(late.borrow_mut().drain(..));
        passes(&mut bench.engine, 200);
        let end = bench.engine.test(get).unwrap().expect("both pieces are there");
        assert_eq!(end.outcome, Outcome::Done, "device: {device}");
        let found = match device {
            true => peek(&to, 0, 256),
            false => read(&bench.engine, into.at(0), 256),
        };
        assert!(found == pattern(3, 256), "device: {device}");
    }
}

/// The peer deregisters the memory after it has sent two pieces. The first piece is lost with its
/// rail, and is sent again without data.
#[test]
fn a_get_with_one_piece_without_data_fails_and_the_other_piece_changes_nothing() {
    for device in [true, false] {
        let mut bench = Bench::new(4);
        let to = device_region(4096);
        let [source, target] =
            [device_region(4096), to].map(|at| bench.engine.register(at).unwrap());
        let remote = import_own(&mut bench, source);
        let mut pieces = 0;
        bench.control.borrow_mut().edit = Some(Box::new(move |_, event| match event {
            Event::Message(from, mut bytes) if bytes[0] == 14 => {
                pieces += 1;
                bytes.truncate(if pieces == 1 { 32 } else { usize::MAX });
                bytes[32..].fill(0xee);
                vec![Event::Message(from, bytes)]
            }
            event => vec![event],
        }));
        let into = if device { target } else { bench.into };
        let get = pending(bench.engine.get(CX, into.at(0), 256, remote.at(0), Notice::Report(1)));
        passes(&mut bench.engine, 200);
        assert_eq!(bench.engine.peer_error(bench.me), Ok(None), "device: {device}");
        let end = bench.engine.test(get).unwrap().map(|end| end.outcome);
        let why = Fault::Post(RailId(0), PostError::BadKey);
        assert_eq!(end, Some(Outcome::Failed(why)), "device: {device}");
        assert_eq!(bench.engine.stats().stale, 1, "device: {device}: the second piece");
        let found = match device {
            true => peek(&to, 0, 256),
            false => read(&bench.engine, into.at(0), 256),
        };
        assert!(found == [0; 256], "device: {device}: written");
    }
}

/// Returns a get of 8 bytes in its wire encoding.
fn get(number: u32, handle: &[u8]) -> Vec<u8> {
    let words = [0u64, 9, 8, 0, 8].map(u64::to_le_bytes).concat();
    [&[13, 0, 0, 0][..], &number.to_le_bytes(), &[0; 4], &handle[4..8], &words].concat()
}

fn got(number: u32, last: u8, token: u64) -> Vec<u8> {
    let words = [token, 0].map(u64::to_le_bytes).concat();
    [&[14, 0, last, 0][..], &number.to_le_bytes(), &[0; 8], &words, &[7; 8]].concat()
}

#[test]
fn more_gets_than_wait_for_an_answer_and_answers_to_none_are_named() {
    for gets in [true, false] {
        let mut bench = Bench::new(4);
        let mut handle = [0; 512];
        bench.engine.export(bench.out, &mut handle).unwrap();
        // Refuses all posts, so that no get is answered.
        bench.control.borrow_mut().refuse = Some(Box::new(|_| Some(PostError::Again)));
        let mut hear = |bytes| {
            bench.control.borrow_mut().inject.push_back(Event::Message(bench.me.peer(), bytes));
            passes(&mut bench.engine, 3);
            bench.engine.peer_error(bench.me).unwrap()
        };
        let want = match gets {
            true => {
                (0..4).for_each(|number| assert_eq!(hear(get(number, &handle)), None));
                // A repeated get takes no slot.
                assert_eq!(hear(get(3, &handle)), None);
                assert_eq!(hear(get(4, &handle)), Some(PeerError::Protocol(Violation::Credit)));
                Violation::Credit
            }
            false => {
                assert_eq!(hear(got(0, 0, 77)), None, "a get that has failed meanwhile");
                hear(got(1, 1, 77));
                Violation::Reply
            }
        };
        assert_eq!(bench.engine.peer_error(bench.me), Ok(Some(PeerError::Protocol(want))));
    }
}
