//! Tests deep queues, wraps, counters, and the number of entries that a search examines.

use fishplate_core::engine::tag::{
    Arrive, Cancel, MatchStats, Matcher, MatcherConfig, MatcherMemory, Post, PostedSlot, Tag,
    UnexpectedSlot,
};

fn matcher(room: usize, config: MatcherConfig) -> Matcher<'static> {
    let memory = MatcherMemory {
        posted: vec![PostedSlot::EMPTY; room].leak(),
        unexpected: vec![UnexpectedSlot::EMPTY; room].leak(),
        buckets: vec![0; MatcherMemory::buckets(room, room)].leak(),
    };
    Matcher::with_config(memory, config).unwrap()
}

fn context(arrive: Arrive) -> Option<u64> {
    match arrive {
        Arrive::Matched { context, .. } => Some(context),
        Arrive::Stored(_) => None,
    }
}

#[test]
fn ids_stay_unique_when_their_generation_wraps() {
    let config =
        MatcherConfig { first_sequence: Some(u32::MAX as u64 - 2), ..MatcherConfig::DEFAULT };
    let mut matcher = matcher(2, config);
    let mut before = None;
    for n in 0..8 {
        let Ok(Post::Waiting(id)) = matcher.post(None, Tag::ZERO, Tag::ZERO, n) else {
            panic!("it waits")
        };
        if let Some(before) = before.replace(id) {
            assert_ne!(before, id);
            assert_eq!(matcher.cancel(before), Cancel::Stale);
        }
        assert_eq!(matcher.cancel(id), Cancel::Removed(n));
    }
}

#[test]
fn the_oldest_wins_across_wraps_of_32_and_of_63_bits() {
    for first in [u32::MAX as u64 - 10, (1 << 63) - 11] {
        for unhashed in [0, 4, 100] {
            let config = MatcherConfig {
                first_sequence: Some(first),
                unhashed,
                walked: 0,
                ..MatcherConfig::DEFAULT
            };
            let mut matcher = matcher(64, config);
            // Posts receives of three shapes in turn. Each message matches all three. The oldest
            // receive is for another source.
            let other = matcher.post(Some(9), Tag::ZERO, Tag::ZERO, 99).unwrap();
            assert!(matches!(other, Post::Waiting(_)));
            for n in 0..24 {
                let (source, ignore) =
                    ([Some(1), None, None][n as usize % 3], [0, 0, 7][n as usize % 3]);
                let post = matcher.post(source, Tag::ZERO, Tag::from(ignore), n).unwrap();
                assert!(matches!(post, Post::Waiting(_)));
            }
            for n in 0..24 {
                assert_eq!(
                    context(matcher.arrive(1, Tag::ZERO, 0, 0).unwrap()),
                    Some(n),
                    "from {first:#x}"
                );
                assert_eq!(matcher.verify(), Ok(()));
            }
            // The reverse: a receive of any shape takes the oldest message.
            assert_eq!(context(matcher.arrive(8, Tag::ZERO, 0, 100).unwrap()), None);
            for n in 0..24 {
                assert_eq!(context(matcher.arrive(1, Tag::from(1), 0, n).unwrap()), None);
            }
            for n in 0..24 {
                let (source, ignore) =
                    ([Some(1), None, Some(1)][n as usize % 3], [0, 0, 6][n as usize % 3]);
                match matcher.post(source, Tag::from(1), Tag::from(ignore), 0).unwrap() {
                    Post::Matched(message) => assert_eq!(message.cookie, n, "from {first:#x}"),
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}

#[test]
fn a_search_examines_few_entries_at_any_depth() {
    const DEPTH: u64 = 1 << 16;
    let mut matcher = matcher(DEPTH as usize + 8, MatcherConfig::DEFAULT);
    // Tags as in MPICH: every receive ignores one bit. All tags are equal, and the sources differ.
    let ignore = Tag::from(1 << 40);
    for n in 0..DEPTH {
        let source = if n % 2 == 0 { Some(n as u32) } else { None };
        let tag = if n % 2 == 0 { Tag::from(5) } else { Tag::from(6 + n) };
        assert!(matches!(matcher.post(source, tag, ignore, n).unwrap(), Post::Waiting(_)));
    }
    for n in (0..DEPTH).rev() {
        let tag = if n % 2 == 0 { Tag::from(5) } else { Tag::from(6 + n) };
        assert_eq!(context(matcher.arrive(n as u32, tag, 1, 0).unwrap()), Some(n));
    }
    // Receives 64 Ki messages, youngest first. The matcher builds its index only once.
    for n in 0..DEPTH {
        assert_eq!(context(matcher.arrive(1, Tag::from(n), 1, n).unwrap()), None);
    }
    let stats = matcher.stats();
    assert!(stats.most_probes <= 2 && stats.longest_walk <= 32, "{stats:?}");
    let built = 2;
    for n in (0..DEPTH).rev() {
        match matcher.post(None, Tag::from(n), ignore, 0).unwrap() {
            Post::Matched(message) => assert_eq!(message.cookie, n),
            other => panic!("{other:?}"),
        }
        if n == DEPTH - built {
            let (probes, searches) = (matcher.stats().probes, matcher.stats().searches);
            assert!(probes - stats.probes <= built && searches - stats.searches == built);
        }
    }
    assert_eq!((matcher.posted(), matcher.unexpected(), matcher.verify()), (0, 0, Ok(())));
}

#[test]
fn equal_receives_form_one_group_and_are_not_scanned() {
    const DEPTH: u64 = 10_000;
    let mut matcher = matcher(DEPTH as usize + 1, MatcherConfig::DEFAULT);
    let other = matcher.post(Some(9), Tag::ZERO, Tag::ZERO, 99).unwrap();
    assert!(matches!(other, Post::Waiting(_)));
    for n in 0..DEPTH {
        assert!(matches!(
            matcher.post(Some(1), Tag::ZERO, Tag::ZERO, n).unwrap(),
            Post::Waiting(_)
        ));
    }
    for n in 0..DEPTH {
        assert_eq!(context(matcher.arrive(1, Tag::ZERO, 0, 0).unwrap()), Some(n));
    }
    assert!(matcher.stats().longest_walk <= 5, "{:?}", matcher.stats());
}

#[test]
fn every_counter_counts() {
    let mut matcher = matcher(16, MatcherConfig::DEFAULT);
    assert_eq!(matcher.stats(), MatchStats::default());
    assert!(matches!(matcher.post(Some(1), Tag::ZERO, Tag::ZERO, 0).unwrap(), Post::Waiting(_)));
    assert_eq!(context(matcher.arrive(1, Tag::ZERO, 100, 0).unwrap()), Some(0));
    for n in 0..3 {
        assert_eq!(context(matcher.arrive(1, Tag::from(n), 10, n).unwrap()), None);
    }
    let claimed = matcher.mprobe(None, Tag::from(2), Tag::ZERO).unwrap().unwrap();
    assert!(matches!(matcher.post(None, Tag::from(0), Tag::ZERO, 0).unwrap(), Post::Matched(_)));
    assert!(matcher.take(claimed.0).is_ok());
    let stats = MatchStats {
        searches: 3,
        expected: 1,
        expected_bytes: 100,
        unexpected: 3,
        unexpected_bytes: 30,
        unexpected_peak: 3,
        longest_walk: 2,
        ..MatchStats::default()
    };
    assert_eq!(matcher.stats(), stats);
}
