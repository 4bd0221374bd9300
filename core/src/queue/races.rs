//! A queue's thread and its worker's, as threads and under the model checker: events show how commands ended, and no slot is lost
//! whichever end leaves first.

extern crate std;

use core::sync::atomic::AtomicUsize;
use std::{boxed::Box, sync::Arc, vec::Vec};

use super::*;
use crate::sync::pool::Reclaim;
use crate::sync::testing::{model, rounds, thread};

/// A pool of four commands in leaked memory, which counts in `ended` how often its slab came to its end.
fn pool(ended: &Arc<AtomicUsize>) -> Pool<'static, Entry<'static>> {
    fn count(ended: *mut ()) {
        // SAFETY: from `Arc::into_raw`, below, and called once.
        let ended = unsafe { Arc::from_raw(ended.cast::<AtomicUsize>()) };
        ended.fetch_add(1, core::sync::atomic::Ordering::Relaxed);
    }
    let slots: Vec<_> = (0..4).map(|_| Slot::new()).collect();
    let reclaim = Reclaim::new(count, Arc::into_raw(ended.clone()).cast_mut().cast());
    Pool::new(Box::leak(Box::default()), slots.leak(), Some(reclaim)).unwrap()
}

fn ring() -> (ring::Producer<'static, Posted<'static>>, ring::Consumer<'static, Posted<'static>>) {
    let slots = (0..4).map(|_| MaybeUninit::uninit()).collect::<Vec<_>>().leak();
    ring::split(Box::leak(Box::default()), slots).unwrap()
}

#[test]
fn an_event_shows_how_its_command_ended() {
    model(|| {
        for _ in 0..rounds(1, 200) {
            let ended = Arc::default();
            let mut pool = pool(&ended);
            let [ours, theirs] = pool.create(Entry::new(Command::Marker)).unwrap().share_twice();
            let event = Event(ours);
            let worker = thread::spawn(move || {
                // SAFETY: this thread takes the place of the worker, and finishes it once.
                unsafe { theirs.finish(Reply::Done(7)) };
            });
            let reply = loop {
                if let Some(reply) = event.reply() {
                    break reply;
                }
                thread::yield_now();
            };
            assert_eq!(reply, Reply::Done(7));
            drop(event);
            worker.join().unwrap();
            pool.close();
            assert_eq!(ended.load(core::sync::atomic::Ordering::Relaxed), 1);
        }
    });
}

#[test]
fn whichever_end_leaves_first_no_slot_is_lost() {
    model(|| {
        for _ in 0..rounds(1, 200) {
            let ended = Arc::default();
            let mut pool = pool(&ended);
            let [mut queue, mut desk] = Side::both(Box::leak(Box::default()), ring(), ring());
            let mut events = Vec::new();
            for _ in 0..2 {
                let [ours, theirs] = pool.create(Entry::new(Command::Marker)).unwrap().share_twice();
                events.push(Event(ours));
                queue.push(Posted::new(theirs, true));
            }
            let worker = thread::spawn(move || {
                // One is done and sent home, the other stays in the ring.
                if let Some(posted) = desk.pop() {
                    // SAFETY: just popped.
                    let entry = unsafe { posted.open() };
                    // SAFETY: this is its worker.
                    unsafe { entry.finish(Reply::Done(0)) };
                    desk.push(Posted::new(entry, true));
                }
            });
            drop(queue);
            worker.join().unwrap();
            let replies: Vec<_> = events.iter().map(Event::reply).collect();
            assert_eq!(replies, [Some(Reply::Done(0)), Some(Reply::Abandoned)]);
            pool.close();
            drop(events);
            assert_eq!(ended.load(core::sync::atomic::Ordering::Relaxed), 1);
        }
    });
}
