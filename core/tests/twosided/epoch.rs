//! Tagged messages of one attachment never match, complete or credit anything in a later
//! attachment.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

use fishplate_core::engine::protocol::{Payload, Received};
use fishplate_core::engine::{Config, Notice};
use fishplate_core::mem::RailId;
use fishplate_core::rail::Caps;
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::Dials;

use super::rig::*;
use super::support::tap::{Event, Tap, shared, tap};
use super::support::*;

const CONFIG: Config = Config { window: 16, ..Config::DEFAULT };

#[test]
fn messages_before_a_reattachment_do_not_match() {
    let mut all = lives::Seen::default();
    for seed in seeds(100) {
        let dials = Dials { late: true, max_delay: [0, 40, 300][seed as usize % 3], ..Dials::WILD };
        let sim = fleet::fabric(2, 1, 96, dials, seed);
        let rails = [0, 1].map(|node| [sim.endpoint(node, 0)]);
        let config = Config { first_sequence: STARTS[seed as usize % 4], ..CONFIG };
        let prepare =
            |engine: &mut Engine| engine.attach_matching(SMALL, match_memory(SMALL, 2, 4)).unwrap();
        let seen = lives::run::<_, 1>(seed, config, prepare, rails, &|engine, me, peer| {
            engine.rail_mut(RailId(0)).unwrap().attach(peer.peer(), 1 - me as u16).unwrap();
        });
        (all.stale, all.renewed) = (all.stale + seen.stale, all.renewed + seen.renewed);
    }
    println!("{all:?}");
    assert!(all.stale > 100 && all.renewed > 20, "{all:?}");
}

type Engine = fishplate_core::engine::Engine<'static, fleet::End, 1>;
type Looped = Own1<Tap<Loopback<64>>, 1>;

fn meet(own: &mut Looped) {
    let me = own.me;
    pass_until(&mut own.engine, "it connects to itself", |engine| {
        engine.has_answered(me) == Ok(true)
    });
}

/// Posts receives, and sends a message by each protocol to match them.
fn one_of_each(own: &mut Looped) {
    for (n, len) in [(1, 100), (2, 100), (3, 1000)] {
        own.recv(n, EXACT, 4096 * n, 1000);
        own.send_region(n, 0, len, n == 2).unwrap();
    }
}

#[test]
fn messages_of_an_earlier_attachment_have_no_effect() {
    for unreadable in [false, true] {
        let control = shared();
        control.borrow_mut().caps = Some(|caps| Caps { fresh: false, ..caps });
        let mut own = own1(CONFIG, SMALL, tap(Loopback::new(), &control));
        meet(&mut own);
        control.borrow_mut().unreadable = unreadable;
        let listen = |holds: bool| {
            let heard = Rc::new(RefCell::new(vec![]));
            let notes = heard.clone();
            control.borrow_mut().edit = Some(Box::new(move |_, event| {
                let arrives = matches!(event, Event::Message(..));
                if arrives {
                    notes.borrow_mut().push(event.clone());
                }
                if arrives && holds { vec![] } else { vec![event] }
            }));
            heard
        };
        let heard = listen(false);
        one_of_each(&mut own);
        own.engine.quiet(CX, own.me, &mut waiter(), SOON).unwrap();
        passes(&mut own.engine, 100);
        while own.engine.next_completion().is_some() || own.engine.next_recv().is_some() {}
        let old = std::mem::take(&mut *heard.borrow_mut());
        let kinds: BTreeSet<u8> = old
            .iter()
            .map(|event| if let Event::Message(_, bytes) = event { bytes[0] } else { 0 })
            .filter(|&kind| kind >= 16)
            .collect();
        let pulled: &[u8] = if unreadable { &[20, 21] } else { &[] };
        assert_eq!(kinds, [16, 17, 18, 19].iter().chain(pulled).copied().collect());
        control.borrow_mut().edit = None;
        own.engine.remove_peer(own.me).unwrap();
        passes(&mut own.engine, 20);
        own.me = own.engine.reserve_peer().unwrap();
        own.engine.connect_peer(own.me, 1).unwrap();
        meet(&mut own);
        write(&own.engine, own.into.at(0), &[0; SIZE]);
        // The new attachment has sends and receives with the same ids. They wait for messages like
        // the old ones.
        let held = listen(true);
        one_of_each(&mut own);
        passes(&mut own.engine, 20);
        let before = own.engine.matching_stats();
        control.borrow_mut().inject.extend(old.iter().cloned());
        passes(&mut own.engine, 100);
        assert_eq!(own.engine.peer_error(own.me), Ok(None), "unreadable: {unreadable}");
        assert_eq!(own.engine.stats().stale, old.len() as u64);
        assert_eq!(own.engine.matching_stats(), before);
        assert!(
            own.engine.next_recv().is_none()
                && own.engine.next_completion().is_none_or(|end| end.tag == 1)
        );
        assert!(own.bytes(0, SIZE).iter().all(|&byte| byte == 0), "written");
        control.borrow_mut().edit = None;
        control.borrow_mut().inject.extend(std::mem::take(&mut *held.borrow_mut()));
        for n in 1..=3 {
            let mut status = None;
            pass_until(&mut own.engine, "a receive", |engine| {
                status = engine.next_recv();
                status.is_some()
            });
            assert_eq!(status.unwrap().outcome, Received::Ok, "{n}");
        }
        assert_eq!(own.bytes(4096 * 3, 1000), pattern(0, 1000));
        // Sends three messages per credit, one by one. All pass, so no credit was lost.
        for n in 0..3 * u64::from(SMALL.credits) {
            own.engine.send(CX, own.me, tag(n), Payload::Bytes(&[1; 8]), Notice::Silent).unwrap();
            own.recv(n, EXACT, 0, 8);
            passes(&mut own.engine, 30);
        }
        own.engine.quiet(CX, own.me, &mut waiter(), SOON).unwrap();
        assert_eq!(own.engine.peer_error(own.me), Ok(None));
    }
}

#[test]
fn an_old_message_with_the_next_number_is_not_matched() {
    let control = shared();
    control.borrow_mut().caps = Some(|caps| Caps { fresh: false, ..caps });
    let mut own = own1(CONFIG, SMALL, tap(Loopback::new(), &control));
    meet(&mut own);
    let first = Rc::new(RefCell::new(None));
    let note = first.clone();
    control.borrow_mut().edit = Some(Box::new(move |_, event| {
        if let Event::Message(_, bytes) = &event {
            note.borrow_mut().get_or_insert((bytes[0], event.clone()));
        }
        vec![event]
    }));
    own.send(1, &[1; 8]).unwrap();
    own.recv(1, EXACT, 0, 8);
    passes(&mut own.engine, 30);
    control.borrow_mut().edit = None;
    own.engine.remove_peer(own.me).unwrap();
    own.me = own.engine.reserve_peer().unwrap();
    own.engine.connect_peer(own.me, 1).unwrap();
    meet(&mut own);
    while own.engine.next_recv().is_some() {}
    write(&own.engine, own.into.at(0), &[0; 8]);
    own.recv(1, EXACT, 0, 8);
    let (kind, old) = first.borrow_mut().take().unwrap();
    assert_eq!(kind, 16, "its numbers, cursor and credits are those of the first of any stream");
    control.borrow_mut().inject.push_back(old);
    passes(&mut own.engine, 5);
    assert_eq!((own.engine.next_recv(), own.engine.stats().stale), (None, 1));
    assert_eq!(own.bytes(0, 8), [0; 8]);
    own.send(1, &[2; 8]).unwrap();
    passes(&mut own.engine, 30);
    assert_eq!(own.engine.next_recv().unwrap().outcome, Received::Ok);
    assert_eq!(own.bytes(0, 8), [2; 8]);
}
