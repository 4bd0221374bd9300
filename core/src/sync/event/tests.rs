//! Single-threaded tests of the word after each phase, and of the number of calls.

#![cfg(not(fishplate_loom))]

use core::cell::Cell;

use super::*;

/// Counts calls. While a thread "sleeps", it runs the test's closure.
#[derive(Default)]
struct Counting<'a> {
    waits: Cell<u32>,
    wakes: Cell<u32>,
    barriers: Cell<(u32, u32)>,
    meanwhile: Option<&'a dyn Fn(&Self)>,
}

impl Host for Counting<'_> {
    fn now_ns(&self) -> u64 {
        0
    }

    fn yield_now(&self) {}

    fn wait(&self, word: &AtomicU32, expected: u32, timeout_ns: u64) -> Woken {
        self.wait_two([(word, expected), (word, expected)], timeout_ns)
    }

    fn wait_two(&self, words: [(&AtomicU32, u32); 2], _timeout_ns: u64) -> Woken {
        self.waits.set(self.waits.get() + 1);
        if words.iter().any(|(word, expected)| word.load(Ordering::Relaxed) != *expected) {
            return Woken::Called;
        }
        if let Some(meanwhile) = self.meanwhile {
            meanwhile(self);
        }
        Woken::Deadline
    }

    fn wake(&self, _word: &AtomicU32) -> u32 {
        self.wakes.set(self.wakes.get() + 1);
        1
    }

    fn sleeper_barrier(&self) {
        let (sleeper, notifier) = self.barriers.get();
        self.barriers.set((sleeper + 1, notifier));
    }

    fn notifier_barrier(&self) {
        let (sleeper, notifier) = self.barriers.get();
        self.barriers.set((sleeper, notifier + 1));
    }
}

#[test]
fn notifying_a_thread_that_is_awake_makes_no_call() {
    let (event, host) = (EventCount::new(), Counting::default());
    for _ in 0..1000 {
        assert!(!event.notify(&host));
    }
    assert_eq!((host.wakes.get(), host.barriers.get()), (0, (0, 1000)));
}

#[test]
fn of_many_notifications_one_wakes() {
    let (event, host) = (EventCount::new(), Counting::default());
    let armed = event.prepare(&host).recheck(|| false).unwrap();
    assert!(event.notify(&host));
    assert!(!event.notify(&host) && !event.notify(&host));
    assert_eq!(host.wakes.get(), 1);
    // A notifier has changed the word, so the kernel would not put the thread to sleep.
    assert_eq!(armed.commit(&host, 1), Woken::Called);
}

#[test]
fn a_sleep_cancelled_in_any_phase_leaves_the_thread_awake() {
    let (event, other, host) = (EventCount::new(), EventCount::new(), Counting::default());
    drop(event.prepare(&host));
    assert!(!event.notify(&host));
    assert!(event.prepare(&host).recheck(|| true).is_none());
    assert!(!event.notify(&host));
    drop(event.prepare(&host).recheck(|| false));
    assert!(!event.notify(&host));
    drop(EventCount::prepare_two(&event, &other, &host).recheck(|| false));
    assert!(!event.notify(&host) && !other.notify(&host));
    assert!(EventCount::prepare_two(&event, &other, &host).recheck(|| true).is_none());
    assert!(!event.notify(&host) && !other.notify(&host));
    assert_eq!((host.waits.get(), host.wakes.get()), (0, 0));
}

#[test]
fn a_thread_is_awake_after_its_deadline() {
    let (event, other, host) = (EventCount::new(), EventCount::new(), Counting::default());
    assert_eq!(event.park(&host, 1, || false), Some(Woken::Deadline));
    assert_eq!([&event, &other].park(&host, 1, || false), Some(Woken::Deadline));
    assert!(!event.notify(&host) && !other.notify(&host));
    // A sleep needs one barrier, whether on one word or on two.
    assert_eq!(host.barriers.get(), (2, 2));
}

#[test]
fn a_deadline_at_which_a_notifier_had_come_is_not_called_one() {
    let (event, other) = (EventCount::new(), EventCount::new());
    for notified in [&event, &other] {
        let host = Counting {
            meanwhile: Some(&|host| assert!(notified.notify(host))),
            ..Counting::default()
        };
        assert_eq!([&event, &other].park(&host, 1, || false), Some(Woken::Called));
        assert!(!event.notify(&host) && !other.notify(&host));
    }
}

#[test]
fn either_of_two_eventcounts_ends_the_sleep() {
    let (event, other, host) = (EventCount::new(), EventCount::new(), Counting::default());
    for notified in [&event, &other] {
        let armed = EventCount::prepare_two(&event, &other, &host).recheck(|| false).unwrap();
        assert!(notified.notify(&host));
        assert_eq!(armed.commit(&host, 1), Woken::Called);
        assert!(!event.notify(&host) && !other.notify(&host));
    }
}

#[test]
fn whatever_a_peer_writes_into_the_word_is_harmless() {
    let (event, host) = (EventCount::new(), Counting::default());
    for garbage in [2, 0x8000_0000, u32::MAX] {
        event.word.store(garbage, Ordering::Relaxed);
        assert!(event.notify(&host), "one call for nothing");
        assert!(!event.notify(&host));
        let armed = event.prepare(&host).recheck(|| false).unwrap();
        event.word.store(garbage, Ordering::Relaxed);
        assert_eq!(armed.commit(&host, 1), Woken::Called);
        assert!(!event.notify(&host));
    }
}

#[test]
fn listeners_are_notified_once_each_and_those_for_whom_there_is_no_room_know_it() {
    let events = [(); 3].map(|()| EventCount::new());
    let listeners = Listeners::<2>::new();
    let host = Counting::default();
    assert_eq!(listeners.notify(&host), 0);
    assert_eq!(listeners.listen(&events[0]), Listening::New);
    assert_eq!(listeners.listen(&events[0]), Listening::Standing);
    assert_eq!(listeners.listen(&events[1]), Listening::New);
    assert_eq!(listeners.listen(&events[2]), Listening::Full);
    let asleep = [0, 1, 2].map(|at| events[at].prepare(&host).recheck(|| false).unwrap());
    assert_eq!((listeners.notify(&host), host.wakes.get()), (2, 2));
    // A notification removes the listeners, so a second one reaches nobody.
    assert_eq!((listeners.notify(&host), host.wakes.get()), (0, 2));
    let [first, second, third] = asleep;
    assert_eq!(first.commit(&host, 1), Woken::Called);
    assert_eq!(second.commit(&host, 1), Woken::Called);
    assert_eq!(third.commit(&host, 1), Woken::Deadline);
    assert_eq!(listeners.listen(&events[2]), Listening::New);
}

#[test]
fn a_thread_that_sleeps_elsewhere_is_told_there_once_and_without_a_call() {
    let (events, host) = ([EventCount::new(), EventCount::new()], Counting::default());
    let told = Cell::new(0);
    let tell = |at: usize| events[at].notify_with(&host, || told.set(told.get() + 1));
    let both = events.each_ref();
    let woken = EventCount::park_elsewhere(
        both,
        &host,
        || false,
        || {
            assert!(tell(1) && !tell(1));
            Woken::Deadline
        },
    );
    assert_eq!((woken, told.get()), (Some(Woken::Called), 1));
    assert_eq!(
        EventCount::park_elsewhere(both, &host, || false, || Woken::Deadline),
        Some(Woken::Deadline)
    );
    assert_eq!(EventCount::park_elsewhere(both, &host, || true, || panic!("there is work")), None);
    assert!(!tell(0) && !tell(1));
    assert_eq!((host.wakes.get(), host.waits.get(), host.barriers.get()), (0, 0, (3, 4)));
    // Without work, the announcement stays until the first notifier. With work, it is withdrawn.
    assert!(EventCount::arm_elsewhere(both, &host, || false));
    assert!(tell(0) && !tell(0) && tell(1));
    assert_eq!(told.get(), 3);
    assert!(!EventCount::arm_elsewhere(both, &host, || true));
    assert!(!tell(0) && !tell(1));
}
