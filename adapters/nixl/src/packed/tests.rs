//! Sends hostile chunks: wrong lengths, counts, addresses and regions, unexpected answers, and more
//! chunks than the agent accepts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::agent::Agent;
use crate::peer::Stage;
use crate::state::{Shared, State};

pub(crate) fn agent(name: &str) -> Agent {
    let agent = Agent::open(name.into(), &[("fabric".into(), "off".into())], None).unwrap();
    // Chunks are used, as with a `tcp` rail.
    agent.shared.with(|state| state.notes.packs = true);
    agent
}

pub(crate) fn with<T>(agent: &Agent, call: impl FnOnce(&mut State) -> T) -> T {
    let shared: &Arc<Shared> = &agent.shared;
    shared.with(call).unwrap()
}

pub(crate) fn until(what: &str, agents: &[&Agent], mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < end, "timeout while waiting for {what}");
        agents.iter().for_each(|agent| with(agent, State::progress));
        std::thread::yield_now();
    }
}

/// Returns two connected agents.
fn pair() -> (Agent, Agent) {
    let (a, b) = (agent("a"), agent("b"));
    connect(&a, &b);
    (a, b)
}

pub(crate) fn connect(a: &Agent, b: &Agent) {
    let info = |of: &Agent| with(of, |state| state.info.encode());
    let (of_a, of_b) = (info(a), info(b));
    with(a, |state| state.load_peer(b"b", &of_b)).unwrap();
    with(b, |state| state.load_peer(b"a", &of_a)).unwrap();
    let up =
        |of: &Agent| with(of, |state| state.peers.iter().any(|(_, peer)| peer.stage == Stage::Up));
    until("a connection", &[a, b], || up(a) && up(b));
}

fn send(from: &Agent, kind: u64, bytes: &[u8]) {
    let send = || {
        with(from, |state| {
            let id = state.peers.iter().find_map(|(_, peer)| peer.id).unwrap();
            state.node.send(id, TAG | kind, bytes, Notice::Silent).is_ok()
        })
    };
    until("room", &[from], send);
}

const HEAD_OF: Head = Head { transfer: 1, post: 1, first: 0, ranges: 1, note: NO_NOTE, status: 0 };

fn chunk(head: Head, ranges: &[Range], rest: &[u8]) -> Vec<u8> {
    let mut bytes = vec![];
    head.encode(&mut bytes);
    ranges.iter().for_each(|range| range.encode(&mut bytes));
    [bytes, rest.to_vec()].concat()
}

#[test]
fn wrong_chunks_touch_no_memory_and_right_ones_do() {
    let (a, b) = pair();
    let mut memory = vec![7u64; 16];
    let start = memory.as_mut_ptr() as usize;
    // SAFETY: the memory outlives the agent.
    let region = with(&b, |state| unsafe { state.register(None, start + 8, 64) }).unwrap();
    let range = |address: usize, len: u32| Range { region, address: address as u64, len };
    let data = [1u8; 64];
    let good = range(start + 8, 8);
    let write = Kind::Write as u64;
    let wrong = [
        chunk(HEAD_OF, &[range(start, 8)], &data[..8]),
        chunk(HEAD_OF, &[range(start + 65, 8)], &data[..8]),
        chunk(HEAD_OF, &[range(usize::MAX - 3, 8)], &data[..8]),
        chunk(HEAD_OF, &[range(start + 8, u32::MAX)], &data[..8]),
        chunk(HEAD_OF, &[Range { region: region + 1, ..good }], &data[..8]),
        chunk(HEAD_OF, &[good], &data[..7]),
        chunk(HEAD_OF, &[good], &data[..9]),
        chunk(Head { ranges: 2, ..HEAD_OF }, &[good, range(start + 65, 8)], &data[..16]),
        chunk(Head { ranges: u32::MAX, ..HEAD_OF }, &[good], &data[..8]),
        chunk(Head { note: u32::MAX - 1, ..HEAD_OF }, &[good], &data[..8]),
        chunk(Head { note: 9, ..HEAD_OF }, &[good], &data[..8]),
        chunk(HEAD_OF, &[], &[]),
        chunk(Head { ranges: 0, note: 2, ..HEAD_OF }, &[], b"hi"),
        chunk(
            Head { note: 1025, ..HEAD_OF },
            &[good],
            &[[0; 1025].as_slice(), &data[..8]].concat(),
        ),
        vec![0; HEAD - 1],
        vec![],
        vec![0xff; CHUNK_MAX + 1],
    ];
    for bytes in &wrong {
        send(&a, write, bytes);
        for kind in [2, 3, 4, Kind::Data as u64, Kind::Done as u64] {
            send(&a, kind, &bytes[..bytes.len().min(100)]);
        }
    }
    // A refused chunk drops the notification of its post.
    for (post, note) in [(1, b"no"), (2, b"hi")] {
        let head = Head { post, note: 2, ..HEAD_OF };
        send(&a, write, &chunk(head, &[range(start + 16, 8)], &[note, &data[..8]].concat()));
    }
    until("the notification", &[&a, &b], || with(&b, |state| state.notes.are_there()));
    assert_eq!(
        with(&b, |state| state.notes.take().collect::<Vec<_>>()),
        [(b"a".to_vec(), b"hi".to_vec())]
    );
    memory[2] ^= 7 ^ 0x0101_0101_0101_0101;
    // SAFETY: these are the 16 words of `memory`, which peers have stopped writing.
    let now = unsafe { std::slice::from_raw_parts(start as *const u64, 16) };
    assert!(now.iter().all(|word| *word == 7), "{now:?}");
}

#[test]
fn a_peer_that_takes_no_answers_has_its_share_of_memory_alone() {
    let (a, b) = pair();
    let mut memory = vec![0u64; CHUNK_MAX / 8];
    let start = memory.as_mut_ptr() as usize;
    // SAFETY: the memory outlives the agent.
    let region = with(&b, |state| unsafe { state.register(None, start, CHUNK_MAX) }).unwrap();
    let range = Range { region, address: start as u64, len: (CHUNK_MAX - HEAD) as u32 };
    for post in 0..1000 {
        let read = chunk(Head { post, ..HEAD_OF }, &[range], &[]);
        with(&a, |state| {
            let id = state.peers.iter().find_map(|(_, peer)| peer.id).unwrap();
            // The agent may refuse this peer.
            _ = state.node.send(id, TAG | Kind::Read as u64, &read[..], Notice::Silent);
        });
        with(&b, State::progress);
    }
    with(&b, |state| {
        let lent: u32 = state.peers.iter().map(|(_, peer)| peer.lent).sum();
        let waiting = state.notes.waiting();
        assert!(lent <= LENT && waiting <= 64, "{lent} buffers, {waiting} messages");
    });
}

#[test]
fn answers_count_once_and_from_the_peer_of_their_transfer() {
    let mut peers = Slab::default();
    let (a, _b) = pair();
    let c = with(&agent("c"), |state| state.info.address.clone());
    let (id, other) = with(&a, |state| {
        let id = state.peers.iter().find_map(|(_, peer)| peer.id).unwrap();
        (id, state.node.connect(&c).unwrap())
    });
    let peer = peers.insert(Peer { id: Some(id), ..Peer::new(b"x", b"y") });
    let mut locals = Slab::default();
    let mut bytes = [0u64; 2];
    let mut transfers = Slab::default();
    // SAFETY: the memory outlives the agent.
    let region =
        with(&a, |state| unsafe { state.register(None, bytes.as_mut_ptr() as usize, 16) }).unwrap();
    let local = with(&a, |state| state.locals.remove(region)).unwrap();
    let here = local.start;
    let region = locals.insert(local);
    let number = transfers.insert(Transfer {
        peer: Some(peer),
        pieces: vec![Piece { here, there: 0, len: 8, local: 0, remote: 0 }],
        locals: vec![region],
        next: 1,
        post: 5,
        waits: 1,
        active: true,
        ..Transfer::default()
    });
    let mut buffers = Buffers::default();
    let mut sides = Sides {
        peers: &mut peers,
        locals: &locals,
        transfers: &mut transfers,
        buffers: &mut buffers,
    };
    let mut take = |source, head: Head, rest: &[u8]| {
        let bytes = chunk(head, &[], rest);
        // SAFETY: `bytes` outlives the call.
        let chunk = unsafe { Chunk::new(bytes.as_ptr(), bytes.len()) };
        with(&a, |state| take_data(&mut state.node, &mut sides, source, chunk));
        let transfer = sides.transfers.get(number).unwrap();
        (transfer.waits, transfer.fault)
    };
    let good = Head { transfer: number, post: 5, ..HEAD_OF };
    assert_eq!(take(other, good, &[9; 8]), (1, None), "of another peer");
    assert_eq!(take(id, Head { post: 4, ..good }, &[9; 8]), (1, None), "of an earlier post");
    assert_eq!(take(id, Head { transfer: number + 1, ..good }, &[9; 8]), (1, None));
    assert_eq!(bytes, [0, 0]);
    assert_eq!(take(id, good, &[1; 8]), (0, None));
    assert_eq!(take(id, good, &[2; 8]), (0, None), "again");
    // SAFETY: `here` is the address of a live local variable.
    let now = unsafe { (here as *const u64).read_volatile() };
    assert_eq!(now, 0x0101_0101_0101_0101);
    for (head, len) in
        [(Head { first: 1, ..good }, 8), (good, 7), (good, 9), (Head { ranges: 0, ..good }, 0)]
    {
        if let Some(transfer) = sides.transfers.get_mut(number) {
            (transfer.waits, transfer.fault) = (1, None);
        }
        let bytes = chunk(head, &[], &vec![3; len]);
        // SAFETY: `bytes` outlives the call.
        let chunk = unsafe { Chunk::new(bytes.as_ptr(), bytes.len()) };
        with(&a, |state| take_data(&mut state.node, &mut sides, id, chunk));
        assert_eq!(sides.transfers.get(number).unwrap().fault, Some(Status::BACKEND));
    }
    // SAFETY: `here` is the address of a live local variable.
    assert_eq!(unsafe { (here as *const u64).read_volatile() }, 0x0101_0101_0101_0101);
}

/// Makes both agents send chunks to each other, as over `tcp`.
fn pack(agents: [&Agent; 2]) {
    for agent in agents {
        with(agent, |state| state.peers.values_mut().for_each(|peer| peer.packs = true));
    }
}

/// Registers memory of `of`, and loads it at its peer `at`. Returns the numbers of the memory at
/// both agents.
pub(crate) fn share(of: &Agent, name: &[u8], at: &Agent, memory: &mut [u8]) -> (u64, u64) {
    let (start, len) = (memory.as_mut_ptr() as usize, memory.len());
    // SAFETY: the memory outlives the agent.
    let region = with(of, |state| unsafe { state.register(None, start, len) }).unwrap();
    let exported = with(of, |state| state.export(region)).unwrap();
    (region, with(at, |state| state.load(name, false, &exported)).unwrap())
}

/// Prepares a read of `count` pieces of [`SHORT`] bytes with gaps in between.
fn read(agent: &Agent, here: (usize, u64), there: (usize, u64), count: usize) -> u64 {
    let piece = |n: usize| {
        let at = 2 * n * SHORT;
        Piece { here: here.0 + at, there: there.0 + at, len: SHORT, local: 0, remote: 0 }
    };
    with(agent, |state| {
        let peer = state.peers.iter().next().map(|(number, _)| number);
        state.transfers.insert(Transfer {
            peer,
            pieces: (0..count).map(piece).collect(),
            locals: vec![here.1],
            remotes: vec![there.1],
            ..Transfer::default()
        })
    })
}

#[test]
fn many_reads_both_ways_do_not_wait_for_each_other() {
    const COUNT: usize = 96;
    let (a, b) = pair();
    pack([&a, &b]);
    let mut of_a = vec![1u8; 2 * COUNT * SHORT];
    let mut of_b = vec![2u8; 2 * COUNT * SHORT];
    let (start_a, start_b) = (of_a.as_mut_ptr() as usize, of_b.as_mut_ptr() as usize);
    let (own_a, there_a) = share(&a, b"a", &b, &mut of_a);
    let (own_b, there_b) = share(&b, b"b", &a, &mut of_b);
    let reads: Vec<_> = (0..8)
        .flat_map(|_| {
            let from_a = read(&a, (start_a, own_a), (start_b, there_b), COUNT);
            let from_b = read(&b, (start_b, own_b), (start_a, there_a), COUNT);
            [(&a, from_a), (&b, from_b)]
        })
        .collect();
    for (agent, number) in &reads {
        with(agent, |state| state.post(*number, None));
    }
    let ended = |(agent, number): &(&Agent, u64)| {
        with(agent, |state| state.transfers.get(*number).is_some_and(|transfer| !transfer.active))
    };
    until("all reads", &[&a, &b], || reads.iter().all(ended));
    for (agent, number) in reads {
        assert_eq!(with(agent, |state| state.check(number)), Status::SUCCESS);
    }
}

#[test]
fn notifications_of_chunks_wait_their_turn_when_the_program_takes_none() {
    let (a, b) = pair();
    let mut memory = [0u8; 8];
    let (region, _) = share(&b, b"b", &a, &mut memory);
    let range = Range { region, address: memory.as_ptr() as u64, len: 8 };
    let filler = vec![0; 64 << 20];
    with(&b, |state| state.notes.arrive((b"x".to_vec(), filler)));
    send(&a, Kind::Note as u64, b"first");
    let head = Head { note: 6, ..HEAD_OF };
    send(&a, Kind::Write as u64, &chunk(head, &[range], b"second12345678"));
    send(&a, Kind::Read as u64, &chunk(HEAD_OF, &[range], &[]));
    let taken = |wanted: usize| {
        let mut texts: Vec<Vec<u8>> = vec![];
        until("notifications", &[&a, &b], || {
            with(&b, |state| texts.extend(state.notes.take().map(|(_, text)| text)));
            texts.len() >= wanted
        });
        texts
    };
    for _ in 0..1000 {
        with(&a, State::progress);
        with(&b, State::progress);
    }
    assert_eq!(taken(1).len(), 1, "the one that fills all room");
    assert_eq!(taken(2), [b"first".to_vec(), b"second".to_vec()]);
}
