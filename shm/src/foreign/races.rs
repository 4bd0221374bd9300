//! A loom model of the list: compiles `list.rs` over loom's atomics. `tests/loom-edges.sh` runs it.

use fishplate_core::sync::primitive::modelled as primitive;

#[path = "list.rs"]
#[allow(dead_code, reason = "the model uses what is shared")]
mod list;
use list::List;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use primitive::AtomicPtr;

/// A value. Loom checks every access to it.
struct Thing(UnsafeCell<u32>);

// SAFETY: loom checks every access to the cell, and fails the test on a race.
unsafe impl Send for Thing {}

#[test]
fn whoever_takes_the_list_sees_what_was_added() {
    loom::model(|| {
        let list = Arc::new(List(AtomicPtr::new(std::ptr::null_mut())));
        let adds = |value: u32| {
            let list = list.clone();
            thread::spawn(move || {
                let thing = Thing(UnsafeCell::new(0));
                // SAFETY: no other thread has the value yet.
                thing.0.with_mut(|at| unsafe { *at = value });
                list.add(thing);
            })
        };
        let others = [adds(1), adds(2)];
        let read = |thing: Thing| {
            // SAFETY: `take` removed the value from the list, so it is ours. Loom fails the test
            // otherwise.
            thing.0.with(|at| unsafe { *at })
        };
        let mut sum: u32 = list.take().map(read).sum();
        others.into_iter().for_each(|other| other.join().unwrap());
        sum += list.take().map(read).sum::<u32>();
        assert_eq!(sum, 3);
    });
}
