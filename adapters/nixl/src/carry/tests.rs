//! Tests that adjacent descriptors are joined, that a transfer can be released in flight, and that
//! lost connections recover.

use super::*;
use crate::agent::Agent;
use crate::packed::tests::{agent, connect, share, until, with};
use crate::transfer::Metadata;

const LEN: usize = 32 << 20;

/// Prepares a transfer of one range, and returns its number.
fn one(agent: &Agent, write: bool, here: (usize, u64), there: (usize, u64), len: usize) -> u64 {
    let (ours, theirs) = (Metadata::new(true, here.1), Metadata::new(false, there.1));
    let (ours, theirs) = (Desc::new(here.0, len, &ours), Desc::new(there.0, len, &theirs));
    with(agent, |state| state.prepare(write, &[ours], &[theirs], b"b")).unwrap()
}

/// Two connected agents over `tcp`, or `None` without libfabric.
fn distant() -> Option<(Agent, Agent)> {
    let params = [("shared_memory", "no"), ("providers", "tcp"), ("device", "off")];
    let params = params.map(|(name, value)| (name.to_string(), value.to_string()));
    let open = |name: &str| Agent::open(name.into(), &params, None);
    match (open("a"), open("b")) {
        (Ok(a), Ok(b)) if with(&a, |state| !state.node.rails().is_empty()) => {
            connect(&a, &b);
            Some((a, b))
        }
        _ => {
            eprintln!("SKIPPED: no tcp rail");
            None
        }
    }
}

#[test]
fn adjacent_descriptors_are_joined() {
    let a = agent("a");
    let mut memory = vec![0u8; 256];
    let start = memory.as_mut_ptr() as usize;
    // SAFETY: the memory outlives the agent.
    let register =
        |at: usize, len: usize| with(&a, |state| unsafe { state.register(None, at, len) }).unwrap();
    let (low, high) = (
        Metadata::new(true, register(start, 128)),
        Metadata::new(true, register(start + 128, 128)),
    );
    // `ranges` has the two offsets and the length of each range, `want` the expected lengths of the
    // pieces.
    let check = |ranges: &[(usize, usize, usize)], want: &[usize]| {
        let desc = |at: usize, len| Desc::new(start + at, len, if at < 128 { &low } else { &high });
        let ours: Vec<Desc> = ranges.iter().map(|&(at, _, len)| desc(at, len)).collect();
        let theirs: Vec<Desc> = ranges.iter().map(|&(_, at, len)| desc(at, len)).collect();
        with(&a, |state| {
            let number = state.prepare(true, &ours, &theirs, b"a").unwrap();
            let pieces = &state.transfers.get(number).unwrap().pieces;
            assert_eq!(
                pieces.iter().map(|piece| piece.len).collect::<Vec<_>>(),
                want,
                "{ranges:?}"
            );
        });
    };
    check(&[(0, 64, 8), (8, 72, 8), (16, 80, 4)], &[20]);
    check(&[(0, 64, 8), (8, 72, 0), (8, 72, 8)], &[16]);
    check(&[(0, 64, 8), (8, 80, 8)], &[8, 8]);
    check(&[(0, 64, 8), (9, 72, 8)], &[8, 8]);
    check(&[(8, 72, 8), (0, 64, 8)], &[8, 8]);
    // The second range is adjacent, but belongs to another region.
    check(&[(0, 120, 8), (8, 128, 8)], &[8, 8]);
}

#[test]
fn a_transfer_released_in_flight_keeps_its_memory_until_it_ends() {
    let Some((a, b)) = distant() else { return };
    let (mut ours, mut theirs) = (vec![1u8; LEN], vec![0u8; LEN]);
    let here = (ours.as_mut_ptr() as usize, share(&a, b"a", &b, &mut ours).0);
    let there = (theirs.as_mut_ptr() as usize, share(&b, b"b", &a, &mut theirs).1);
    for write in [true, false] {
        let number = one(&a, write, here, there, LEN);
        // The target makes no calls, so the transfer stays in flight.
        assert_eq!(with(&a, |state| state.post(number, None)), Status::IN_PROG);
        assert_eq!(with(&a, |state| state.release(number)), Status::SUCCESS);
        assert_eq!(with(&a, |state| state.deregister(here.1)), Err(Status::NOT_ALLOWED));
        until("the released transfer", &[&a, &b], || {
            with(&a, |state| state.transfers.get(number).is_none())
        });
        assert!(with(&a, |state| state.moving.is_empty()));
    }
    // The agent still works.
    let number = one(&a, true, here, there, 100);
    assert_eq!(with(&a, |state| state.post(number, Some(b"next"))), Status::IN_PROG);
    until("the next transfer", &[&a, &b], || {
        with(&a, |state| state.check(number)) == Status::SUCCESS
    });
    assert_eq!(with(&a, |state| state.deregister(here.1)), Ok(()));
}

#[test]
fn a_broken_connection_is_opened_again_by_the_next_post() {
    let near = (agent("a"), agent("b"));
    connect(&near.0, &near.1);
    for (a, b) in std::iter::once(near).chain(distant()) {
        let (mut ours, mut theirs) = (vec![0u8; 4096], vec![0u8; 4096]);
        let here = (ours.as_mut_ptr() as usize, share(&a, b"a", &b, &mut ours).0);
        let there = (theirs.as_mut_ptr() as usize, share(&b, b"b", &a, &mut theirs).1);
        let number = one(&a, true, here, there, 4096);
        for round in 1..=3u8 {
            // SAFETY: no transfer is in progress, and both vectors live.
            unsafe { (here.0 as *mut u8).write_bytes(round, 4096) };
            with(&a, |state| state.post(number, Some(&[round])));
            until("the transfer", &[&a, &b], || {
                with(&a, |state| state.check(number)) == Status::SUCCESS
            });
            let mut notes = vec![];
            until("its notification", &[&a, &b], || {
                notes.extend(with(&b, |state| state.notes.take().collect::<Vec<_>>()));
                !notes.is_empty()
            });
            assert_eq!(notes, [(b"a".to_vec(), vec![round])]);
            // SAFETY: the range is live memory that nothing writes now.
            assert_eq!(unsafe { (there.0 as *const u8).add(4095).read_volatile() }, round);
            let peer = with(&a, |state| state.loaded(b"b")).unwrap();
            with(&a, |state| state.lose(peer));
            assert!(with(&a, |state| state.is_lost(peer)));
        }
    }
}
