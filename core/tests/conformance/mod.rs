//! The contract of `Rail`, clause by clause, as tests for any rail.
//!
//! A package includes this file by `#[path]`, implements [`Fixture`] for its rail, and adds one
//! line: `rail_conformance!(name, MyFixture);`. Every test is a named function over the fixture.
//! The prefix `cN_` names the clause of the contract in `core/src/rail.rs`. Randomised tests run
//! over a few seeds and name the seed when they fail.
//!
//! `link` contains the two ends and their reports, and `field` the memory. `delivery`, `reach`,
//! `limits`, `ends`, `parted` and `direct` contain the tests.
#![allow(dead_code, reason = "each package uses its part of this")]

mod delivery;
mod direct;
mod ends;
mod field;
mod limits;
mod link;
mod parted;
mod reach;

pub use delivery::*;
pub use direct::*;
pub use ends::*;
pub use field::*;
pub use limits::*;
pub use link::*;
pub use parted::*;
pub use reach::*;

use std::cell::RefCell;
use std::ptr::NonNull;

use fishplate_core::mem::Region;
use fishplate_core::rail::{Rail, RailKey};

/// How to create a rail for the tests.
pub trait Fixture {
    type Rail: Rail;

    /// Why an origin may still access imported memory that the target has deregistered. `None` if
    /// it may not. The origin never accesses a region that is registered later.
    const REACHES_ON: Option<&'static str> = None;

    /// Why a write may land after a detach has reported it as failed. `None` if it may not.
    const LANDS_LATE: Option<&'static str> = None;

    /// Why an import longer than the region is accepted. `None` if it is refused. Posts beyond the
    /// region are always refused.
    const IMPORTS_UNSEEN: Option<&'static str> = None;

    /// Why a detached peer is still reached without being attached again. `None` if it is not.
    const STAYS_ATTACHED: Option<&'static str> = None;

    /// Returns why this machine has no such rail, or `None` if it has one.
    fn absent() -> Option<String> {
        None
    }

    /// Creates a new pair. `seed` determines all randomness.
    fn link(seed: u64) -> Link<Self::Rail>;

    /// Creates a pair. The origin soon fails a peer that does not complete posts.
    fn impatient(seed: u64) -> Link<Self::Rail> {
        Self::link(seed)
    }

    /// Returns memory that the rail can register: `len` bytes, aligned to 8, zeroed, never freed.
    fn memory(_link: &mut Link<Self::Rail>, len: usize) -> Region {
        leaked(len)
    }

    /// Imports a region of the target at the origin.
    fn import(link: &mut Link<Self::Rail>, key: RailKey, len: usize) -> Option<NonNull<u8>> {
        let to = link.to;
        link.origin().import(to, key, len as u64).expect("a new key can be imported")
    }

    /// Ends the target as if its process had died. Returns `false` if the rail does not support
    /// this.
    fn kill_target(_link: &mut Link<Self::Rail>) -> bool {
        false
    }

    /// Sends the target bytes in the name of the origin that break the rail's protocol. Returns
    /// `false` if no bytes of a peer can.
    fn corrupt(_link: &mut Link<Self::Rail>) -> bool {
        false
    }
}

const SEEDS: std::ops::Range<u64> = 1..6;

thread_local! {
    /// The skip messages that this test has already printed.
    static SKIPPED: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// True if there is a reason to skip a check. Prints each reason once per test.
fn skipped(what: &str, why: Option<&str>) -> bool {
    if let Some(why) = why {
        let line = format!("SKIPPED {what}: {why}");
        SKIPPED.with_borrow_mut(|said| {
            if !said.contains(&line) {
                println!("{line}");
                said.push(line);
            }
        });
    }
    why.is_some()
}

/// Makes a module with all tests of the suite for one fixture.
#[macro_export]
macro_rules! rail_conformance {
    ($name:ident, $fixture:ty) => {
        mod $name {
            #[allow(unused_imports, reason = "the fixture may be named by path")]
            use super::*;
            $crate::rail_conformance! { @tests $fixture;
                caps_keep_their_promises
                c1_a_refused_post_has_changed_nothing_and_again_goes_away
                c2_a_pending_post_ends_once_and_a_done_one_never
                c2_a_read_or_fetch_brings_what_was_there
                c3_the_data_is_there_when_its_word_is_reported
                c4_everything_arrives_once_from_the_right_peer
                c4_no_write_is_in_place_before_an_earlier_message_where_the_rail_orders_all
                c4_empty_writes_and_messages_arrive_too
                c4_a_write_without_a_word_is_not_reported
                c5_messages_and_injects_are_copied_before_the_post_returns
                c5_touches_is_true_while_a_post_may_access_local_memory
                c6_poll_reports_at_most_its_budget
                c7_bad_keys_and_ranges_touch_nothing
                c7_a_key_taken_back_is_dead_for_ever
                c7_a_region_taken_back_in_flight_is_not_written_any_more
                c7_an_import_of_nothing_is_refused
                c7_a_peer_that_breaks_the_protocol_is_reported_once_and_then_ignored
                too_long_is_said_and_nothing_is_posted
                detach_ends_what_is_pending_and_reports_nothing_else
                detach_cuts_the_peer_off_in_both_directions
                a_rail_fences_a_living_peer_if_it_says_so_and_otherwise_refuses
                a_dead_peer_is_reported_once_and_what_is_pending_to_it_fails
                mapped_memory_is_the_peers_memory
                copies_at_once_are_whole_and_checked
                native_atomics_are_atomics_or_unsupported
            }
        }
    };
    (@tests $fixture:ty; $($test:ident)*) => {
        $(#[test] fn $test() {
            match <$fixture as conformance::Fixture>::absent() {
                None => conformance::$test::<$fixture>(),
                Some(why) => println!("SKIPPED {}: {why}", stringify!($test)),
            }
        })*
    };
}
