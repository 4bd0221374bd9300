//! Clauses 1 to 6: an accepted post completes and arrives once, whole, from the right peer. A
//! refused post has changed nothing.

use std::ptr::NonNull;

use fishplate_core::error::PostError;
use fishplate_core::rail::{Local, Order, Posted, Rail};

use super::*;

pub fn c1_a_refused_post_has_changed_nothing_and_again_goes_away<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 8192);
        let (mut seen, mut accepted, mut pending, mut refused) =
            (Seen::default(), vec![], vec![], 0);
        let (to, depth) = (link.to, link.caps().depth);
        for round in 0..3u64 {
            // Posts without polls in between, until a few posts are refused. Some rails never
            // refuse.
            for i in 0..1000u64 {
                let n = round * 1000 + i;
                let at = (n % 1024) as usize * 8;
                let fresh = !accepted.iter().any(|m| m % 1024 == n % 1024);
                if fresh {
                    set(&field.source, at, &(n + 1).to_le_bytes());
                }
                let word = Some(n as u32);
                // SAFETY: the source is never freed, and each of its parts is written once, before
                // its post.
                let result = unsafe {
                    link.origin().post_write(
                        to,
                        field.local(at, 8),
                        field.remote(at as u64),
                        word,
                        n,
                    )
                };
                match result {
                    Ok(posted) => {
                        accepted.push(n);
                        if posted == Posted::Pending {
                            pending.push(n);
                        }
                        let outstanding = pending.len() - seen.done.len();
                        assert!(
                            outstanding <= depth as usize,
                            "seed {seed}: {outstanding} posts are outstanding, but `Caps::depth` \
                             is {depth}"
                        );
                    }
                    Err(PostError::Again) => refused += 1,
                    Err(error) => panic!("seed {seed}: {error:?}"),
                }
                if refused > 20 * (round + 1) || accepted.len() == 1024 {
                    break;
                }
            }
            link.linger(&mut seen);
        }
        let all = accepted.len();
        link.until(&mut seen, "what was accepted", |seen| {
            seen.landed.len() >= all && seen.done.len() >= pending.len()
        });
        let mut landed: Vec<u64> = seen.landed.iter().map(|&(_, data)| data as u64).collect();
        landed.sort_unstable();
        assert_eq!(
            landed, accepted,
            "seed {seed}: a refused message arrived, or an accepted one did not"
        );
        let mut ended: Vec<u64> = seen.done.iter().map(|&(cx, _)| cx).collect();
        ended.sort_unstable();
        assert_eq!(ended, pending, "seed {seed}");
        let inside = field.inside();
        for place in 0..1024usize {
            let want = accepted.iter().find(|&&n| n as usize % 1024 == place);
            let word = &inside[place * 8..place * 8 + 8];
            match want {
                Some(n) => assert_eq!(word, (n + 1).to_le_bytes(), "seed {seed}"),
                None => assert_eq!(word, [CANARY; 8], "seed {seed}: a refused write landed"),
            }
        }
    }
}

pub fn c2_a_pending_post_ends_once_and_a_done_one_never<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 4096);
        let (mut seen, mut pending) = (Seen::default(), vec![]);
        for n in 0..96u64 {
            let at = n as usize * 32;
            let posted = match n % 4 {
                0 => write(
                    &mut link,
                    &mut seen,
                    field.local(at, 32),
                    field.remote(at as u64),
                    None,
                    n,
                ),
                1 => write(
                    &mut link,
                    &mut seen,
                    field.local(at, 32),
                    field.remote(at as u64),
                    Some(n as u32),
                    n,
                ),
                2 => message(&mut link, &mut seen, &n.to_le_bytes(), b"body", n),
                _ => {
                    let to = link.to;
                    let (local, remote) = (field.local(at, 32), field.remote(at as u64));
                    // SAFETY: the source is never freed, and nothing reads it before all posts have
                    // completed.
                    accept(&mut link, &mut seen, |rail| unsafe {
                        match n % 8 {
                            3 => rail.post_read(to, local, remote, n),
                            _ => rail.post_rendezvous_read(to, local, remote, n),
                        }
                    })
                }
            };
            if posted == Posted::Pending {
                pending.push(n);
            }
        }
        link.until(&mut seen, "ends", |seen| {
            seen.done.len() >= pending.len() && seen.landed.len() >= 24
        });
        assert_eq!(seen.ends().into_keys().collect::<Vec<_>>(), pending, "seed {seed}");
        assert!(seen.ends().into_values().all(|n| n == 1), "seed {seed}: {seen:?}");
        assert!(seen.done.iter().all(|(_, result)| result.is_ok()), "seed {seed}: {seen:?}");
    }
}

pub fn c2_a_read_or_fetch_brings_what_was_there<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 256);
        let bytes: Vec<u8> = (0..=255).collect();
        set(&field.whole, PAD, &bytes);
        let mut seen = Seen::default();
        let ranges = [(0usize, 256usize), (1, 7), (255, 1), (256, 0), (64, 128)];
        for (n, (offset, len)) in ranges.into_iter().chain(ranges).enumerate() {
            fill(&field.source, 0);
            let to = link.to;
            let (local, remote) = (field.local(0, len), field.remote(offset as u64));
            // SAFETY: the source is never freed, and nothing reads it before all posts have
            // completed.
            let posted = accept(&mut link, &mut seen, |rail| unsafe {
                match n < ranges.len() {
                    true => rail.post_read(to, local, remote, n as u64),
                    false => rail.post_rendezvous_read(to, local, remote, n as u64),
                }
            });
            if posted == Posted::Pending {
                link.until(&mut seen, "read", |seen| {
                    seen.done.iter().any(|&(cx, _)| cx == n as u64)
                });
            }
            assert_eq!(look(&field.source)[..len], bytes[offset..offset + len], "seed {seed}");
            assert!(
                look(&field.source)[len..].iter().all(|&b| b == 0),
                "seed {seed}: read too much"
            );
        }
        assert!(seen.landed.is_empty() && seen.messages.is_empty());
    }
}

pub fn c3_the_data_is_there_when_its_word_is_reported<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 64 * 64);
        let whole = field.whole;
        let mut seen = Seen {
            on_landed: Some(Box::new(move |data| {
                let at = PAD + data as usize * 64;
                assert_eq!(
                    look(&whole)[at..at + 64],
                    [data as u8 + 1; 64],
                    "seed {seed}: word {data} before its data"
                );
            })),
            ..Seen::default()
        };
        for n in 0..64u32 {
            set(&field.source, n as usize * 64, &[n as u8 + 1; 64]);
            let (local, remote) = (field.local(n as usize * 64, 64), field.remote(n as u64 * 64));
            write(&mut link, &mut seen, local, remote, Some(n), n as u64);
        }
        link.until(&mut seen, "writes", |seen| seen.landed.len() >= 64);
        field.check_canaries("writes inside");
    }
}

pub fn c4_everything_arrives_once_from_the_right_peer<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 64);
        let mut seen = Seen::default();
        let max = link.caps().max_message;
        let ordered = link.caps().order >= Order::Reports;
        for n in 0..200u32 {
            match n % 2 {
                0 => {
                    write(
                        &mut link,
                        &mut seen,
                        field.local(0, 8),
                        field.remote(0),
                        Some(n | 0xffff_0000),
                        n as u64,
                    );
                }
                _ => {
                    let mut bytes = n.to_le_bytes().to_vec();
                    bytes.resize(4 + n as usize * (max.min(512) - 4) / 200, n as u8);
                    let (head, body) = bytes.split_at(n as usize % 5);
                    message(&mut link, &mut seen, head, body, n as u64);
                }
            }
        }
        link.until(&mut seen, "arrivals", |seen| {
            seen.landed.len() >= 100 && seen.messages.len() >= 100
        });
        assert_eq!((seen.landed.len(), seen.messages.len()), (100, 100), "seed {seed}");
        assert!(
            seen.landed.iter().all(|&(peer, _)| peer == link.from),
            "seed {seed}: {:?}",
            seen.landed
        );
        let mut words: Vec<u32> = seen.landed.iter().map(|&(_, data)| data & 0xffff).collect();
        let mut numbers = vec![];
        for (peer, bytes) in &seen.messages {
            assert_eq!(*peer, link.from);
            let n = u32::from_le_bytes(bytes[..4].try_into().unwrap());
            assert_eq!(
                bytes.len(),
                4 + n as usize * (max.min(512) - 4) / 200,
                "seed {seed}: message {n}"
            );
            assert!(
                bytes[4..].iter().all(|&b| b == n as u8),
                "seed {seed}: message {n} was changed"
            );
            numbers.push(n);
        }
        if ordered {
            assert!(
                seen.arrivals.iter().enumerate().all(|(n, &message)| message == (n % 2 == 1)),
                "seed {seed}"
            );
        } else {
            words.sort_unstable();
            numbers.sort_unstable();
        }
        assert_eq!(words, (0..200).step_by(2).collect::<Vec<_>>(), "seed {seed}");
        assert_eq!(numbers, (1..200).step_by(2).collect::<Vec<_>>(), "seed {seed}");
        assert!(seen.down.is_empty());
    }
}

pub fn c4_no_write_is_in_place_before_an_earlier_message_where_the_rail_orders_all<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        if link.caps().order != Order::All {
            return;
        }
        let field = Field::new::<F>(&mut link, 64 * 8);
        let mut seen = Seen::default();
        let check = |field: &Field, seen: &Seen| {
            let inside = field.inside();
            let in_place =
                (0..8).rposition(|n| inside[n * 64..][..64] != [CANARY; 64]).map_or(0, |n| n + 1);
            assert!(
                seen.messages.len() >= in_place,
                "seed {seed}: write {in_place} overtook a message"
            );
        };
        for n in 0..8u64 {
            message(&mut link, &mut seen, &[n as u8], &[], n);
            write(
                &mut link,
                &mut seen,
                field.local(64, 64),
                field.remote(n * 64),
                Some(n as u32),
                n,
            );
            check(&field, &seen);
        }
        let mut patience = Patience::new();
        while seen.landed.len() < 8 && patience.lasts() {
            link.turn(1, &mut seen);
            check(&field, &seen);
        }
        assert_eq!((seen.landed.len(), seen.messages.len()), (8, 8), "seed {seed}");
    }
}

pub fn c4_empty_writes_and_messages_arrive_too<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 64);
        let mut seen = Seen::default();
        write(&mut link, &mut seen, field.local(64, 0), field.remote(64), Some(7), 1);
        message(&mut link, &mut seen, &[], &[], 2);
        link.until(&mut seen, "empty", |seen| seen.landed.len() == 1 && seen.messages.len() == 1);
        assert_eq!(seen.landed, [(link.from, 7)]);
        assert_eq!(seen.messages, [(link.from, vec![])]);
        assert_eq!(field.inside(), [CANARY; 64]);
    }
}

pub fn c4_a_write_without_a_word_is_not_reported<F: Fixture>() {
    let mut link = F::link(1);
    let field = Field::new::<F>(&mut link, 64);
    set(&field.source, 0, b"quietly");
    let mut seen = Seen::default();
    let pending =
        write(&mut link, &mut seen, field.local(0, 7), field.remote(5), None, 3) == Posted::Pending;
    link.until(&mut seen, "write", |seen| seen.done.len() >= pending as usize);
    assert_eq!(field.inside()[5..12], *b"quietly");
    assert!(seen.landed.is_empty() && seen.messages.is_empty());
}

pub fn c5_messages_and_injects_are_copied_before_the_post_returns<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 40 * 1024);
        let inject = link.caps().inject.min(1024);
        let mut seen = Seen::default();
        for n in 0..40u8 {
            let mut head = [n; 20];
            let mut body = [n ^ 0xff; 30];
            message(&mut link, &mut seen, &head, &body, n as u64);
            (head, body) = ([0xee; 20], [0xee; 30]);
            std::hint::black_box((&head, &body));
            if inject != 0 {
                let mut bytes = vec![n + 1; inject];
                let local =
                    Local { ptr: NonNull::new(bytes.as_mut_ptr()).unwrap(), len: inject, desc: 0 };
                write(
                    &mut link,
                    &mut seen,
                    local,
                    field.remote(n as u64 * 1024),
                    Some(n as u32),
                    100 + n as u64,
                );
                bytes.fill(0xee);
                std::hint::black_box(&bytes);
            }
        }
        let writes = if inject != 0 { 40 } else { 0 };
        link.until(&mut seen, "messages", |seen| {
            seen.messages.len() >= 40 && seen.landed.len() >= writes
        });
        for (_, bytes) in &seen.messages {
            let n = bytes[0];
            assert!(
                bytes.len() == 50 && bytes[..20] == [n; 20] && bytes[20..] == [n ^ 0xff; 30],
                "seed {seed}"
            );
        }
        for n in 0..writes {
            let inside = field.inside();
            assert!(
                inside[n * 1024..n * 1024 + inject].iter().all(|&b| b == n as u8 + 1),
                "seed {seed}: inject {n} of {inject} bytes was not copied when its post returned"
            );
        }
    }
}

pub fn c5_touches_is_true_while_a_post_may_access_local_memory<F: Fixture>() {
    for (seed, read) in SEEDS.flat_map(|seed| [(seed, false), (seed, true)]) {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 4096);
        let (here, there) = (vec![0x22; 4096], vec![0x33; 4096]);
        set(&field.source, 0, &here);
        set(&field.whole, PAD, &there);
        let (mut seen, mut pending, to) = (Seen::default(), 0, link.to);
        for n in 0..16u64 {
            let (local, remote) = (field.local(n as usize * 256, 256), field.remote(n * 256));
            // SAFETY: the source is never freed. It changes only after `touches` has returned
            // false.
            let posted = accept(&mut link, &mut seen, |rail| unsafe {
                match read {
                    false => rail.post_write(to, local, remote, Some(n as u32), n),
                    true => rail.post_read(to, local, remote, n),
                }
            });
            pending += (posted == Posted::Pending) as usize;
        }
        let over = |seen: &Seen| seen.done.len() >= pending && (read || seen.landed.len() >= 16);
        let mut patience = Patience::new();
        while link.origin().touches(field.local(0, 4096)) && !over(&seen) {
            link.turn(1, &mut seen);
            assert!(patience.lasts(), "seed {seed}: {seen:?}");
        }
        // From here on no post may access the source.
        let then = look(&field.source);
        if !read {
            fill(&field.source, 0xee);
        }
        link.until(&mut seen, "posts", over);
        let why = "`touches` returned false, and a post accessed the memory later";
        match read {
            false => assert!(field.inside() == here, "seed {seed}: a write: {why}"),
            true => assert!(look(&field.source) == then, "seed {seed}: a read: {why}"),
        }
    }
}

pub fn c6_poll_reports_at_most_its_budget<F: Fixture>() {
    for budget in [0u32, 1, 2, 3, 7] {
        for seed in SEEDS {
            let mut link = F::link(seed);
            let mut seen = Seen::default();
            for n in 0..16u32 {
                message(&mut link, &mut seen, &n.to_le_bytes(), &[], n as u64);
            }
            // `turn` checks the budget of each poll.
            for _ in 0..400 {
                link.turn(budget, &mut seen);
            }
            link.until(&mut seen, "messages", |seen| seen.messages.len() == 16);
        }
    }
}
