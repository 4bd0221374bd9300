//! A ring in a memfd, with producer and consumer in two processes.

use crate::support::{Child, Mapping, rounds};
use fishplate_core::sync::{
    event::Channels,
    ring::{Consumer, Header, Producer},
    spin::{Idle, Policy, Turn, Waited, wait_until},
};
use fishplate_sys::{LinuxHost, clock};

const CHANNELS_AT: usize = 0;
const HEADER_AT: usize = 256;
const SLOTS_AT: usize = 512;
const CAPACITY: usize = 8;

#[test]
fn every_value_crosses_to_another_process_once_and_in_order() {
    let mapping = Mapping::new(4096);
    let header = mapping.at::<Header>(HEADER_AT);
    let slots = mapping.at::<[u64; CAPACITY]>(SLOTS_AT).cast::<u64>();
    // SAFETY: the offset is aligned and inside the mapping. Zeroed memory is a valid pair of
    // eventcounts.
    let channels: &Channels = unsafe { mapping.at(CHANNELS_AT).as_ref() };
    let values = rounds(200_000);
    let deadline_ns = clock::monotonic_ns() + 60_000_000_000;

    let child = Child::run(|| {
        let (host, mut idle) = (LinuxHost::shared(), Idle::new(Policy::BALANCED));
        // SAFETY: the ring stays mapped for the life of the process. This is the only consumer, and
        // every u64 is valid.
        let Ok(mut rx) = (unsafe { Consumer::from_raw(header, slots, CAPACITY) }) else {
            return false;
        };
        let mut want = 0;
        while want < values {
            let waited = wait_until(&host, &mut idle, &channels.recv[0], deadline_ns, || {
                Turn::ready(!rx.is_empty())
            });
            if waited == Waited::Expired {
                return false;
            }
            while let Some(got) = rx.pop() {
                if got != want {
                    return false;
                }
                want += 1;
            }
            idle.notify(&host, &channels.send);
        }
        !rx.is_corrupt() && rx.is_empty() && idle.counts().deadline_with_work == 0
    });

    let (host, mut idle) = (LinuxHost::shared(), Idle::new(Policy::BALANCED));
    // SAFETY: the ring stays mapped until this test ends. This is the only producer, and every u64
    // is valid.
    let mut tx = unsafe { Producer::from_raw(header, slots, CAPACITY) }.unwrap();
    for value in 0..values {
        let waited = wait_until(&host, &mut idle, &channels.send, deadline_ns, || {
            Turn::ready(tx.push(value).is_ok())
        });
        assert_eq!(waited, Waited::Ready);
        idle.notify(&host, &channels.recv[0]);
    }
    assert!(child.succeeded());
    assert!(!tx.is_corrupt());
    assert_eq!(idle.counts().deadline_with_work, 0);
}

#[test]
fn a_peer_that_scribbles_over_its_counter_stops_the_ring_and_nothing_else() {
    let mapping = Mapping::new(4096);
    let header = mapping.at::<Header>(HEADER_AT);
    let slots = mapping.at::<[u64; CAPACITY]>(SLOTS_AT).cast::<u64>();
    // SAFETY: the ring stays mapped until this test ends. These are its only two sides, and every
    // u64 is valid.
    let (mut tx, mut rx) = unsafe {
        (
            Producer::from_raw(header, slots, CAPACITY).unwrap(),
            Consumer::from_raw(header, slots, CAPACITY).unwrap(),
        )
    };
    tx.push(1).unwrap();
    let child = Child::run(|| {
        // SAFETY: the header is inside the mapping. The other side reads these counters as atomics,
        // because a peer may change them at any time.
        unsafe { header.cast::<[u8; 256]>().write_volatile([0xa5; 256]) };
        true
    });
    assert!(child.succeeded());
    assert_eq!(rx.pop(), None);
    while tx.push(2).is_ok() {}
    assert!(tx.is_corrupt() && rx.is_corrupt());
}
