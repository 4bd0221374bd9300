//! A peer that the target detaches, and a peer that breaks the protocol: the target reports nothing
//! of it any more, and sends it nothing.

use fishplate_core::error::{PeerError, PostError};
use fishplate_core::mem::Untrusted;
use fishplate_core::rail::{Fence, Posted, Rail};

use super::*;

/// The sinks of the two ends. If the rail is its own peer, `there` gets everything.
#[derive(Default, Debug)]
struct Both {
    here: Seen,
    there: Seen,
}

impl Both {
    fn turn<R: Rail>(&mut self, link: &mut Link<R>) {
        let target = link.target;
        for (at, rail) in link.rails.iter_mut().enumerate() {
            let seen = if at == target { &mut self.there } else { &mut self.here };
            rail.flush();
            rail.poll(8, seen);
            rail.check_peers(seen);
        }
    }

    /// Posts to the target now and then, and polls meanwhile and afterwards.
    fn keep_posting<R: Rail>(&mut self, link: &mut Link<R>, field: &Field) {
        for n in 100..600 {
            if n < 200 && n % 10 == 0 {
                post_in_vain(link, field, n);
            }
            self.turn(link);
        }
    }

    /// Checks that nothing has arrived at the target since a moment at which this many writes and
    /// messages had.
    fn check_arrivals(&self, (landed, messages): (usize, usize), what: &str) {
        assert_eq!(
            (self.there.landed.len(), self.there.messages.len()),
            (landed, messages),
            "{what}: still reports what arrives; drop it"
        );
    }

    fn arrivals(&self) -> (usize, usize) {
        (self.there.landed.len(), self.there.messages.len())
    }
}

/// Posts a write and a message from the origin to the target. The rail may refuse them, because the
/// target may have told it.
fn post_in_vain<R: Rail>(link: &mut Link<R>, field: &Field, n: u64) {
    let to = link.to;
    // SAFETY: the source is never freed or changed.
    _ = unsafe {
        link.origin().post_write(to, field.local(0, 8), field.remote(0), Some(n as u32), 2 * n)
    };
    _ = link.origin().post_message(to, &[n as u8; 8], Untrusted::from_slice(&[]), 2 * n + 1);
}

/// Posts a message from the target to the origin, which must be refused, or fail.
fn check_posts_fail<R: Rail>(link: &mut Link<R>, both: &mut Both, what: &str) {
    const CX: u64 = 1 << 40;
    let (before, from) = (both.here.messages.len(), link.from);
    let nothing = Untrusted::from_slice(&[]);
    match link.target().post_message(from, &[0x77; 8], nothing, CX) {
        Err(PostError::PeerDown | PostError::Again) => {}
        Err(error) => panic!("{what}: a message to the peer is refused as {error:?}"),
        Ok(posted) => {
            assert_eq!(posted, Posted::Pending, "{what}: a message to the peer is done");
            let mut patience = Patience::new();
            let end = loop {
                both.turn(link);
                if let Some(end) = both.there.done.iter().find(|end| end.0 == CX) {
                    break end.1;
                }
                assert!(patience.lasts(), "{what}: a message to the peer does not end");
            };
            assert!(end.is_err(), "{what}: a message to the peer is delivered");
        }
    }
    (0..200).for_each(|_| both.turn(link));
    assert_eq!(both.here.messages.len(), before, "{what}: still sends to the peer");
}

/// Links two rails, and makes turns until a first message has arrived.
fn linked<F: Fixture>(seed: u64) -> (Link<F::Rail>, Field, Both) {
    let mut link = F::link(seed);
    let field = Field::new::<F>(&mut link, 64);
    let mut both = Both::default();
    message(&mut link, &mut Seen::default(), b"first", &[], 0);
    let mut patience = Patience::new();
    while both.there.messages.is_empty() {
        both.turn(&mut link);
        assert!(patience.lasts(), "seed {seed}: {both:?}");
    }
    (link, field, both)
}

pub fn detach_cuts_the_peer_off_in_both_directions<F: Fixture>() {
    for seed in SEEDS {
        let what = format!("seed {seed}: a rail that has detached its peer");
        let (mut link, field, mut both) = linked::<F>(seed);
        // Some of these are in flight at the detach.
        (1..4).for_each(|n| post_in_vain(&mut link, &field, n));
        let (from, seen) = (link.from, both.arrivals());
        link.target().detach(from);
        (0..200).for_each(|_| both.turn(&mut link));
        both.check_arrivals(seen, &what);
        assert!(both.there.down.is_empty(), "{what}: reports {:?}", both.there.down);
        if skipped("that the peer is not reached later", F::STAYS_ATTACHED) {
            continue;
        }
        both.keep_posting(&mut link, &field);
        both.check_arrivals(seen, &what);
        check_posts_fail(&mut link, &mut both, &what);
        both.check_arrivals(seen, &what);
    }
}

/// The engine gives up a rail that stalls only if both ends can fence it.
pub fn a_rail_fences_a_living_peer_if_it_says_so_and_otherwise_refuses<F: Fixture>() {
    for seed in SEEDS {
        let what = format!("seed {seed}: a rail that fences its peer");
        let (mut link, field, mut both) = linked::<F>(seed);
        let (from, fences) = (link.from, link.target().caps().fences);
        let mut patience = Patience::new();
        let fence = loop {
            match link.target().fence(from) {
                Fence::Pending => both.turn(&mut link),
                fence => break fence,
            }
            assert!(patience.lasts(), "{what}: is not done");
        };
        let expected = if fences { Fence::Fenced } else { Fence::Unknown };
        assert_eq!(fence, expected, "{what}; correct `Caps::fences`");
        if fences && !skipped("that nothing arrives later", F::STAYS_ATTACHED) {
            let seen = both.arrivals();
            both.keep_posting(&mut link, &field);
            both.check_arrivals(seen, &what);
        }
    }
}

pub fn c7_a_peer_that_breaks_the_protocol_is_reported_once_and_then_ignored<F: Fixture>() {
    for seed in SEEDS {
        let what = format!("seed {seed}: a rail whose peer has broken the protocol");
        let (mut link, field, mut both) = linked::<F>(seed);
        if !F::corrupt(&mut link) {
            skipped("all of it", Some("the fixture cannot break the protocol"));
            return;
        }
        let mut patience = Patience::new();
        while both.there.down.is_empty() {
            both.turn(&mut link);
            assert!(patience.lasts(), "{what}: does not report it, or not as `peer_down`");
        }
        let seen = both.arrivals();
        both.keep_posting(&mut link, &field);
        both.check_arrivals(seen, &what);
        check_posts_fail(&mut link, &mut both, &what);
        both.check_arrivals(seen, &what);
        let (why, times) = (both.there.down[0], both.there.down.len());
        assert!(
            matches!(why, (peer, PeerError::Protocol(_)) if peer == link.from),
            "{what}: reports {why:?}"
        );
        assert_eq!(times, 1, "{what}: reports it again");
    }
}
