//! Additional eventcounts that a notifier notifies. The owner of such an eventcount is a thread
//! that waits for another thread's queue, or a worker with a command that waits for another
//! worker's queue. Nothing here blocks or allocates.
//!
//! A notifier notifies each listener once and removes it. A listener that still waits registers
//! again. So a listener that has stopped waiting costs one spurious notification, and needs no
//! removal.
//!
//! # The race
//!
//! | listener                                         | notifier                               |
//! |--------------------------------------------------|----------------------------------------|
//! | 0. [`listen`](Listeners::listen) says `Standing` |                                        |
//! | 1. announces its sleep                           | 1. publishes work                      |
//! | 2. full barrier                                  | 2. full barrier                        |
//! | 3. `listen` still says `Standing`; no work       | 3. takes every listener, notifies each |
//! | 4. sleeps                                        |                                        |
//!
//! If the notifier's barrier comes first, the listener finds the work in step 3. If the notifier's
//! barrier comes second, the notifier finds the listener, unless it took the listener earlier, for
//! other work. In that case the earlier notification saw the announcement: the notifier runs
//! another barrier after it takes the listener. That barrier comes after the listener's, because
//! otherwise step 3 would have found the place taken. A place that is taken during step 3 is not
//! covered by a barrier, so `New` does not permit a sleep.
//!
//! | edge           | release                  | acquire                  | carries        |
//! |----------------|--------------------------|--------------------------|----------------|
//! | `event.listen` | by [`Listeners::listen`] | by [`Listeners::notify`] | the eventcount |

use core::{marker::PhantomData, ptr};

use super::EventCount;
use crate::sync::{
    host::Host,
    primitive::{AtomicPtr, Ordering, edge, filled},
};

/// A list of at most `N` eventcounts, each of which is notified once.
#[derive(Debug)]
pub struct Listeners<'e, const N: usize = 8> {
    places: [AtomicPtr<EventCount>; N],
    /// Makes the lifetime invariant, so that `listen` accepts no eventcount with a shorter
    /// lifetime.
    kind: PhantomData<fn(&'e EventCount) -> &'e EventCount>,
}

/// Whether a listener will be notified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "only a listener that was already registered may sleep"]
pub enum Listening {
    /// The listener was already registered, and may sleep if it finds no work.
    Standing,
    /// The listener is registered now, and must check for work once more before it sleeps.
    New,
    /// There are too many listeners, so this listener is not notified.
    Full,
}

impl<'e, const N: usize> Listeners<'e, N> {
    /// Creates an empty list.
    pub fn new() -> Self {
        Self { places: filled_places(), kind: PhantomData }
    }

    /// Registers `event` for the next [`notify`](Self::notify). Only one thread at a time may
    /// listen with an `event`.
    #[cold]
    pub fn listen(&self, event: &'e EventCount) -> Listening {
        let listener = ptr::from_ref(event).cast_mut();
        // Relaxed: the pointer is only compared, never followed.
        if self.places.iter().any(|place| place.load(Ordering::Relaxed) == listener) {
            return Listening::Standing;
        }
        let placed = self.places.iter().any(|place| {
            // Release, edge `event.listen`: pairs with the swap in `notify_all`. Publishes the
            // eventcount.
            let order = edge!("event.listen.place", Release);
            place.compare_exchange(ptr::null_mut(), listener, order, Ordering::Relaxed).is_ok()
        });
        if placed { Listening::New } else { Listening::Full }
    }

    /// Notifies each listener once, and removes it. Call this after publishing the work *and* after
    /// a notifier's barrier ([`Host::notifier_barrier`]). Notifying an eventcount includes that
    /// barrier. Returns the number of wake-up calls.
    ///
    /// Costs one load per place if there are no listeners.
    #[inline]
    pub fn notify<H: Host + ?Sized>(&self, host: &H) -> u64 {
        if self.is_empty() { 0 } else { self.notify_all(host) }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        // Relaxed: in `notify`, the caller's barrier orders these loads after the publication of
        // the work.
        self.places.iter().all(|place| place.load(Ordering::Relaxed).is_null())
    }

    #[cold]
    #[inline(never)]
    fn notify_all<H: Host + ?Sized>(&self, host: &H) -> u64 {
        let mut calls = 0;
        for place in &self.places {
            // Acquire, edge `event.listen`: pairs with the exchange in `listen`, which publishes
            // the eventcount.
            let listener = place.swap(ptr::null_mut(), edge!("event.listen.take", Acquire));
            // SAFETY: `listen` stores only pointers made from an `&'e EventCount`, and `'e`
            // outlives the borrow of `self`.
            if let Some(listener) = unsafe { listener.as_ref() } {
                calls += u64::from(listener.notify(host));
            }
        }
        calls
    }
}

fn filled_places<const N: usize>() -> [AtomicPtr<EventCount>; N] {
    filled!(AtomicPtr::new(ptr::null_mut()); N)
}

impl<const N: usize> Default for Listeners<'_, N> {
    fn default() -> Self {
        Self::new()
    }
}
