//! A rail with messages of more than 16 MiB, the greatest length that a silent post's tag can
//! express.

use fishplate_core::engine::{Config, Notice};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::{Caps, Order};

use super::order::add;
use super::support::tap::{Verb, shared, tap};
use super::support::*;

/// The maximum length in a silent post's tag. The length includes the header of `HEAD` bytes.
const TOLD: usize = (1 << 24) - 1;
const HEAD: usize = 48;

#[test]
fn a_silent_put_signal_longer_than_its_tag_can_express_completes() {
    let config = Config { eager: 1 << 25, ..Config::DEFAULT };
    for len in [TOLD - HEAD, TOLD - HEAD + 1, TOLD, TOLD + 1, (17 << 20) + 5] {
        let control = shared();
        control.borrow_mut().caps =
            Some(|caps| Caps { max_message: 1 << 26, order: Order::None, ..caps });
        let mut own = own(config, tap(Loopback::<64>::new(), &control), 18 << 20);
        let payload: Vec<u8> = (0..len).map(|n| (n ^ (n >> 9)) as u8).collect();
        write(&own.engine, own.source.at(8), &payload);
        let (from, to) = (own.source.at(8), own.remote.at(8));
        for notice in [Notice::Silent, Notice::Report(1), Notice::Silent] {
            own.engine.put_signal(CX, from, len, to, add(own.remote, 0, 1), notice).unwrap();
        }
        own.engine
            .quiet(CX, own.peer, &mut own.waiter, 100_000)
            .unwrap_or_else(|e| panic!("{len}: {e:?}"));
        assert_eq!(word(&own.engine, own.target.at(0)), 3, "{len}");
        assert!(read(&own.engine, own.target.at(8), len) == payload, "{len}");
        let control = control.borrow();
        let messages = control.posts.iter().filter(|post| post.verb == Verb::Message);
        let longest = messages.map(|post| post.len).max().unwrap();
        // A message is at most as long as the tag can express. Longer data is sent as writes.
        assert_eq!(longest == TOLD, len == TOLD - HEAD, "{len}: {longest}");
    }
}
