//! Tests that no call on the progress path takes long, whatever a peer or a stranger sends over
//! TCP: to a rail of libfabric's tcp provider, to a bootstrap listener, or to the processes of a
//! job. Meanwhile honest peers must make progress.
//!
//! The hostile peer and the honest peer are separate processes. The hostile process plays one
//! trick. A trick counts as slow if it delays a call in most attempts.

#[path = "../../shm/tests/hostile_time/forks.rs"]
mod forks;
#[path = "../../shm/tests/hostile_time/meter.rs"]
mod meter;
#[path = "../port/mod.rs"]
mod port;
mod rail;
mod setup;
mod wire;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use meter::{LIMIT, Took};

/// The first byte of an order: the role of the forked process.
const HONEST: u8 = 0;
const RAIL: u8 = 1;
const SETUP: u8 = 2;

/// Returns a deadline long enough for any expected event.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// The entry point of the helper process that forks the others.
#[test]
fn child() {
    if std::env::var_os("FISHPLATE_ROLE").is_none() {
        return;
    }
    let offer = rail::offer();
    forks::serve(|order| match (order, &offer) {
        ([HONEST, victim @ ..], Ok(offer)) => rail::echo(offer, victim),
        ([RAIL, trick, rest @ ..], Ok(offer)) => wire::play(offer, usize::from(*trick), rest),
        ([SETUP, trick, at @ ..], _) => {
            let at: SocketAddr = std::str::from_utf8(at).unwrap().parse().unwrap();
            (setup::TRICKS[usize::from(*trick)].2)(at);
            forks::tell(b"played");
        }
        _ => panic!("{order:?}"),
    });
}

/// Prints the longest call during a trick. Adds the trick to `too_long` if the call exceeds
/// [`LIMIT`].
fn note(name: &'static str, longest: Took, too_long: &mut Vec<(&'static str, Took)>) {
    println!("{:>9.3} ms in {:<12} {name}", longest.0.as_secs_f64() * 1e3, longest.1);
    if longest.0 > LIMIT {
        too_long.push((name, longest));
    }
}

/// True if `FISHPLATE_TRICK` selects this trick.
fn is_wanted(name: &str) -> bool {
    name.contains(&std::env::var("FISHPLATE_TRICK").unwrap_or_default())
}
