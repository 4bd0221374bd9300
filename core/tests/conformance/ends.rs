//! A peer that is detached, and a peer that dies: every pending post completes once, and nothing is
//! reported afterwards.

use fishplate_core::error::{CompleteError, PeerError, PostError};
use fishplate_core::mem::Peer;
use fishplate_core::rail::{Posted, Rail};

use super::*;

pub fn detach_ends_what_is_pending_and_reports_nothing_else<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 1024);
        set(&field.source, 0, &[0x44; 1024]);
        let (to, pending) = (link.to, posts_of_each_kind(&mut link, &field));
        link.origin().detach(to);
        let mut after = Seen::default();
        let at = link.origin;
        let mut last = None;
        let mut patience = Patience::new();
        for turns in 0.. {
            link.rails[at].flush();
            link.rails[at].poll(8, &mut after);
            if last.is_none() && after.done.len() >= pending.len() {
                last = Some(field.inside());
            }
            if last.is_some() && turns > 400 {
                break;
            }
            assert!(patience.lasts(), "seed {seed}: {after:?} of {pending:?}");
        }
        assert_eq!(after.ends().into_keys().collect::<Vec<_>>(), pending, "seed {seed}");
        assert!(after.ends().into_values().all(|n| n == 1), "seed {seed}: {after:?}");
        assert!(
            after.landed.is_empty() && after.messages.is_empty() && after.down.is_empty(),
            "seed {seed}: {after:?}"
        );
        // A second detach is harmless, and so is detaching an unknown peer.
        link.origin().detach(to);
        link.origin().detach(Peer(9));
        // A failed post does not land later.
        if skipped("that what failed does not land later", F::LANDS_LATE) {
            continue;
        }
        let failed: Vec<u64> =
            after.done.iter().filter(|(_, r)| r.is_err()).map(|&(cx, _)| cx).collect();
        let then = last.unwrap();
        link.linger(&mut Seen::default());
        for n in failed.into_iter().filter(|n| n % 3 == 0) {
            let place = n as usize * 64..n as usize * 64 + 64;
            assert_eq!(
                field.inside()[place.clone()],
                then[place],
                "seed {seed}: write {n} landed after it failed; drop it at `detach`, or set \
                 `LANDS_LATE` in the fixture"
            );
        }
    }
}

pub fn a_dead_peer_is_reported_once_and_what_is_pending_to_it_fails<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::impatient(seed);
        let field = Field::new::<F>(&mut link, 4096);
        let (to, pending) = (link.to, posts_of_each_kind(&mut link, &field));
        if !F::kill_target(&mut link) {
            skipped("all of it", Some("the target cannot be killed"));
            return;
        }
        let mut after = Seen::default();
        let at = link.origin;
        let mut patience = Patience::new();
        for turns in 0.. {
            link.rails[at].poll(8, &mut after);
            link.rails[at].check_peers(&mut after);
            if after.done.len() >= pending.len() && turns > 400 {
                break;
            }
            assert!(patience.lasts(), "seed {seed}: {after:?} of {pending:?}");
        }
        assert_eq!(after.ends().into_keys().collect::<Vec<_>>(), pending, "seed {seed}");
        let ok = after.done.iter().filter(|(_, result)| result.is_ok()).count();
        // Some rails reach a dead target until they detect its death.
        if F::REACHES_ON.is_none() {
            assert!(
                after.done.iter().all(|&(cx, result)| cx % 3 != 2 || result.is_err()),
                "seed {seed}: read from the dead"
            );
            assert!(ok < after.done.len() || pending.is_empty(), "seed {seed}: {after:?}");
        }
        assert!(
            matches!(
                after.down[..],
                [(peer, PeerError::Died | PeerError::Lost | PeerError::Silent)] if peer == to
            ),
            "seed {seed}: {after:?}"
        );
        // SAFETY: the source is never freed.
        let late =
            unsafe { link.origin().post_write(to, field.local(0, 8), field.remote(0), None, 99) };
        match late {
            Err(error) => {
                assert!(
                    matches!(error, PostError::PeerDown | PostError::Again),
                    "seed {seed}: {error:?}"
                )
            }
            Ok(posted) => {
                assert_eq!(posted, Posted::Pending, "seed {seed}");
                for _ in 0..400 {
                    link.rails[at].poll(8, &mut after);
                }
                let end = after.done.iter().find(|&&(cx, _)| cx == 99);
                assert!(
                    matches!(end, Some((_, Err(CompleteError::PeerDown)))),
                    "seed {seed}: {end:?}"
                );
            }
        }
    }
}
