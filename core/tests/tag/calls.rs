//! Tests each call alone: ids, widths, and refusals that change nothing.

use fishplate_core::engine::tag::{
    Arrive, Arrived, Cancel, Matcher, MatcherConfig, MatcherMemory, Post, PostedSlot, ReceiveId,
    Tag, TagError, UnexpectedId, UnexpectedSlot,
};
use fishplate_core::error::AttachError;

fn small(config: MatcherConfig) -> Matcher<'static, 4, 2> {
    let memory = MatcherMemory {
        posted: Box::leak(Box::new([PostedSlot::EMPTY; 4])),
        unexpected: Box::leak(Box::new([UnexpectedSlot::EMPTY; 4])),
        buckets: Box::leak(Box::new([0; 8])),
    };
    Matcher::with_config(memory, config).unwrap()
}

const T: Tag = Tag::new(0x77, 5);

fn waiting(post: Result<Post, TagError>) -> ReceiveId {
    match post {
        Ok(Post::Waiting(id)) => id,
        other => panic!("{other:?}"),
    }
}

fn stored(arrive: Result<Arrive, TagError>) -> UnexpectedId {
    match arrive {
        Ok(Arrive::Stored(id)) => id,
        other => panic!("{other:?}"),
    }
}

fn message(cookie: u64) -> Arrived {
    Arrived { source: 1, tag: T, len: 100 + cookie, cookie }
}

fn arrive(matcher: &mut Matcher<'_, 4, 2>, cookie: u64) -> Result<Arrive, TagError> {
    let Arrived { source, tag, len, cookie } = message(cookie);
    matcher.arrive(source, tag, len, cookie)
}

#[test]
fn bits_of_every_word_and_the_source_are_compared_unless_ignored() {
    for bit in 0..96 {
        let words = |bit: u32| {
            let mut words = [0; 3];
            words[bit as usize / 32] = 1 << (bit % 32);
            Tag::from_words(words)
        };
        for ignored in [None, Some(bit), Some((bit + 1) % 96)] {
            let mut matcher = small(MatcherConfig::DEFAULT);
            let ignore = ignored.map_or(Tag::ZERO, words);
            waiting(matcher.post(Some(1), T, ignore, 9));
            let arrives = matcher.arrive(1, T ^ words(bit), 0, 0).unwrap();
            let right = ignored == Some(bit);
            assert_eq!(
                matches!(arrives, Arrive::Matched { context: 9, .. }),
                right,
                "bit {bit}, {ignored:?}"
            );
        }
    }
    for bit in 0..32 {
        let mut matcher = small(MatcherConfig::DEFAULT);
        waiting(matcher.post(Some(1), T, Tag::ALL, 0));
        stored(matcher.arrive(1 ^ 1 << bit, T, 0, 0));
        waiting(matcher.post(None, T, Tag::ZERO, 0).map(|post| {
            assert!(matches!(post, Post::Matched(_)), "any source takes it");
            matcher.post(None, T, Tag::ZERO, 0).unwrap()
        }));
    }
}

#[test]
fn the_oldest_receive_wins_across_shapes() {
    let mut matcher = small(MatcherConfig { unhashed: 0, walked: 0, ..MatcherConfig::DEFAULT });
    waiting(matcher.post(Some(2), T, Tag::ZERO, 0));
    waiting(matcher.post(None, T, Tag::ZERO, 1));
    waiting(matcher.post(Some(1), T, Tag::ZERO, 2));
    waiting(matcher.post(Some(1), T, Tag::ALL, 3));
    for context in 1..4 {
        assert!(matches!(arrive(&mut matcher, 0), Ok(Arrive::Matched { context: c, .. })
                if c == context));
    }
    assert!(matches!(arrive(&mut matcher, 0), Ok(Arrive::Stored(_))));
    assert_eq!(matcher.posted(), 1);
}

#[test]
fn a_receive_is_cancelled_once() {
    let mut matcher = small(MatcherConfig::DEFAULT);
    let id = waiting(matcher.post(None, T, Tag::ZERO, 7));
    assert!(matcher.is_waiting(id));
    assert_eq!(matcher.cancel(id), Cancel::Removed(7));
    assert!(!matcher.is_waiting(id));
    assert_eq!(matcher.cancel(id), Cancel::Stale);
    stored(arrive(&mut matcher, 0));
}

#[test]
fn a_matched_receive_and_a_stale_id_cannot_be_cancelled() {
    let mut matcher = small(MatcherConfig::DEFAULT);
    let first = waiting(matcher.post(None, T, Tag::ZERO, 1));
    assert!(
        matches!(arrive(&mut matcher, 0), Ok(Arrive::Matched { receive, .. }) if receive == first)
    );
    assert_eq!(matcher.cancel(first), Cancel::AlreadyMatched);
    let second = waiting(matcher.post(None, T, Tag::ZERO, 2));
    assert_eq!(matcher.cancel(first), Cancel::Stale);
    assert!(matcher.is_waiting(second));
    assert_eq!(matcher.cancel(second), Cancel::Removed(2));
}

#[test]
fn ids_of_another_matcher_are_stale() {
    let mut one = small(MatcherConfig { seed: 1, ..MatcherConfig::DEFAULT });
    let mut two = small(MatcherConfig { seed: 2, ..MatcherConfig::DEFAULT });
    let receive = waiting(one.post(None, T, Tag::ZERO, 1));
    let message = stored(one.arrive(3, Tag::ZERO, 0, 0));
    waiting(two.post(None, T, Tag::ZERO, 2));
    stored(two.arrive(3, Tag::ZERO, 0, 0));
    assert_eq!(two.cancel(receive), Cancel::Stale);
    assert_eq!(two.take(message), Err(TagError::Stale));
    assert_eq!(two.discard(message), Err(TagError::Stale));
    assert_eq!(two.set_cookie(message, 1), Err(TagError::Stale));
    assert_eq!(two.message(message), Err(TagError::Stale));
    assert_eq!((two.posted(), two.unexpected()), (1, 1));
    assert_eq!(two.verify(), Ok(()));
}

#[test]
fn a_full_array_refuses_and_changes_nothing() {
    let mut matcher = small(MatcherConfig::DEFAULT);
    for n in 0..4 {
        assert_eq!((matcher.posted_room(), matcher.unexpected_room()), (4 - n, 4 - n));
        waiting(matcher.post(Some(9), T, Tag::ZERO, n as u64));
        stored(arrive(&mut matcher, n as u64));
    }
    let before = matcher.stats();
    for _ in 0..3 {
        assert_eq!(matcher.post(Some(8), T, Tag::ZERO, 4), Err(TagError::Full));
        assert_eq!(arrive(&mut matcher, 4), Err(TagError::Full));
    }
    assert_eq!((matcher.posted(), matcher.unexpected()), (4, 4));
    assert_eq!(
        (matcher.stats().unexpected, matcher.stats().expected),
        (before.unexpected, before.expected)
    );
    // Calls that need no free slot still work.
    assert_eq!(matcher.post(Some(1), T, Tag::ZERO, 4), Ok(Post::Matched(message(0))));
    assert!(matches!(matcher.arrive(9, T, 0, 0), Ok(Arrive::Matched { context: 0, .. })));
    assert_eq!(matcher.verify(), Ok(()));
}

#[test]
fn claimed_messages_use_room_and_are_received_in_any_order() {
    let mut matcher = small(MatcherConfig::DEFAULT);
    for n in 0..4 {
        stored(arrive(&mut matcher, n));
    }
    let claim = |matcher: &mut Matcher<'_, 4, 2>| matcher.mprobe(Some(1), T, Tag::ZERO).unwrap();
    let claimed: Vec<_> = (0..3).map(|_| claim(&mut matcher).unwrap()).collect();
    assert_eq!((matcher.unexpected(), matcher.claimed(), matcher.unexpected_room()), (1, 3, 0));
    assert_eq!(arrive(&mut matcher, 9), Err(TagError::Full));
    // No other call finds the claimed messages.
    assert_eq!(matcher.probe(None, T, Tag::ALL).unwrap().map(|(_, found)| found), Some(message(3)));
    assert_eq!(matcher.take(claimed[2].0), Ok(message(2)));
    assert_eq!(matcher.take(claimed[2].0), Err(TagError::Stale));
    assert_eq!(matcher.take(claimed[0].0), Ok(message(0)));
    assert_eq!(matcher.set_cookie(claimed[1].0, 77), Ok(()));
    assert_eq!(matcher.discard(claimed[1].0), Ok(Arrived { cookie: 77, ..message(1) }));
    assert_eq!((matcher.claimed(), matcher.unexpected_room()), (0, 3));
    assert_eq!(matcher.post(None, T, Tag::ZERO, 0), Ok(Post::Matched(message(3))));
    assert_eq!(claim(&mut matcher), None);
    assert_eq!(matcher.verify(), Ok(()));
}

#[test]
fn a_waiting_message_cannot_be_taken_but_discarded_and_moved() {
    let mut matcher = small(MatcherConfig::DEFAULT);
    let first = stored(arrive(&mut matcher, 0));
    let second = stored(arrive(&mut matcher, 1));
    assert_eq!(matcher.take(first), Err(TagError::NotClaimed));
    assert_eq!(matcher.message(first), Ok(message(0)));
    assert_eq!(matcher.discard(first), Ok(message(0)));
    assert_eq!(matcher.message(first), Err(TagError::Stale));
    assert_eq!(matcher.set_cookie(second, 5), Ok(()));
    assert_eq!(
        matcher.post(None, T, Tag::ZERO, 0),
        Ok(Post::Matched(Arrived { cookie: 5, ..message(1) }))
    );
}

#[test]
fn a_failed_source_removes_only_its_directed_receives() {
    let mut matcher = small(MatcherConfig { unhashed: 1, ..MatcherConfig::DEFAULT });
    waiting(matcher.post(Some(0), T, Tag::ZERO, 1));
    waiting(matcher.post(Some(3), T, Tag::ZERO, 2));
    waiting(matcher.post(None, T, Tag::ZERO, 3));
    waiting(matcher.post(Some(3), T, Tag::ALL, 4));
    let mut removed = vec![];
    matcher.fail_source(3, |id, context| removed.push((id, context)));
    assert_eq!(removed.iter().map(|(_, context)| *context).collect::<Vec<_>>(), [2, 4]);
    assert!(removed.iter().all(|(id, _)| !matcher.is_waiting(*id)));
    assert_eq!((matcher.posted(), matcher.verify()), (2, Ok(())));
    // Source 0 does not mean any source.
    matcher.fail_source(0, |_, context| assert_eq!(context, 1));
    assert_eq!(matcher.posted(), 1);
    assert!(matches!(matcher.arrive(3, T, 0, 0), Ok(Arrive::Matched { context: 3, .. })));
}

#[test]
fn a_forgotten_source_leaves_no_message() {
    let mut matcher = small(MatcherConfig::DEFAULT);
    let ids: Vec<_> = (0..4).map(|n| stored(matcher.arrive(n as u32 % 2, T, 0, n))).collect();
    for source in 0..2 {
        matcher.mprobe(Some(source), T, Tag::ZERO).unwrap().unwrap();
    }
    matcher.forget_source(1);
    assert_eq!((matcher.unexpected(), matcher.claimed(), matcher.verify()), (1, 1, Ok(())));
    assert_eq!(
        (matcher.take(ids[1]), matcher.message(ids[3])),
        (Err(TagError::Stale), Err(TagError::Stale))
    );
    // Messages of other sources remain. The slots of the failed source's messages are free.
    assert!(matches!(matcher.take(ids[0]), Ok(Arrived { cookie: 0, .. })));
    assert!(matches!(matcher.message(ids[2]), Ok(Arrived { cookie: 2, .. })));
    for n in 0..3 {
        stored(matcher.arrive(1, T, 0, n));
    }
    assert_eq!(matcher.verify(), Ok(()));
}

#[test]
fn tags_and_masks_beyond_the_width_are_refused() {
    for bits in [1, 32, 63, 64, 65, 95] {
        let mut matcher = small(MatcherConfig { tag_bits: bits, ..MatcherConfig::DEFAULT });
        let wide = Tag::low_bits(bits + 1) ^ Tag::low_bits(bits);
        assert_eq!(matcher.post(None, wide, Tag::ZERO, 0), Err(TagError::TooWide));
        assert_eq!(matcher.post(None, Tag::ZERO, wide, 0), Err(TagError::TooWide));
        assert_eq!(matcher.probe(None, wide, Tag::ZERO), Err(TagError::TooWide));
        assert_eq!(matcher.mprobe(None, Tag::ZERO, wide), Err(TagError::TooWide));
        assert_eq!(matcher.arrive(0, wide, 0, 0), Err(TagError::TooWide));
        assert_eq!(matcher.shape(true, wide), Err(TagError::TooWide));
        assert_eq!((matcher.posted(), matcher.unexpected()), (0, 0));
        waiting(matcher.post(None, Tag::low_bits(bits), Tag::ZERO, 0));
        assert!(matches!(matcher.arrive(0, Tag::low_bits(bits), 0, 0), Ok(Arrive::Matched { .. })));
    }
}

#[test]
fn a_pinned_shape_keeps_its_place() {
    let mut matcher = small(MatcherConfig::DEFAULT);
    let shapes: Vec<_> = (0..4).map(|n| matcher.shape(n % 2 == 0, Tag::from(n)).unwrap()).collect();
    assert_eq!(matcher.shape(true, Tag::from(0)), Ok(shapes[0]));
    assert_eq!(matcher.shape(true, Tag::from(99)), Err(TagError::Full));
    // A receive with an unregistered mask still works, and registers nothing.
    waiting(matcher.post(None, T, Tag::from(99), 1));
    assert_eq!(matcher.stats().overflowed, 1);
    waiting(matcher.post_shaped(shapes[2], 1, T, 2));
    waiting(matcher.post_shaped(shapes[1], 77, T, 3));
    assert!(matches!(arrive(&mut matcher, 0), Ok(Arrive::Matched { context: 1, .. })));
    assert!(matches!(arrive(&mut matcher, 0), Ok(Arrive::Matched { context: 2, .. })));
    assert!(
        matches!(arrive(&mut matcher, 0), Ok(Arrive::Matched { context: 3, .. })),
        "names no source"
    );
    assert_eq!(matcher.release_shape(shapes[0]), Ok(()));
    assert_eq!(matcher.release_shape(shapes[0]), Ok(()));
    assert_eq!(matcher.release_shape(shapes[0]), Err(TagError::Stale));
    assert_eq!(matcher.post_shaped(shapes[0], 0, T, 0), Err(TagError::Stale));
    assert!(matcher.shape(true, Tag::from(99)).is_ok());
    assert_eq!(matcher.verify(), Ok(()));
}

#[test]
fn memory_and_configuration_out_of_range_are_named() {
    let build = |buckets: usize, config: MatcherConfig| {
        let memory =
            MatcherMemory { posted: &mut [], unexpected: &mut [], buckets: &mut vec![0; buckets] };
        Matcher::<2, 1>::with_config(memory, config).map(|_| ())
    };
    let named = |what| Err(AttachError::Config(what));
    assert_eq!(
        build(1, MatcherConfig::DEFAULT),
        named("memory.buckets: must have at least 2 entries")
    );
    let wide = MatcherConfig { tag_bits: 97, ..MatcherConfig::DEFAULT };
    assert_eq!(build(2, wide), named("tag_bits: must be 1 to 96"));
    let late = MatcherConfig { first_sequence: Some(1 << 63), ..MatcherConfig::DEFAULT };
    assert_eq!(build(2, late), named("first_sequence: must be below 2^63"));
    assert_eq!(build(2, MatcherConfig::DEFAULT), Ok(()));
}

#[test]
fn a_matcher_without_memory_refuses_everything() {
    let memory = MatcherMemory { posted: &mut [], unexpected: &mut [], buckets: &mut [0; 2] };
    let mut matcher: Matcher = Matcher::new(memory, 3).unwrap();
    assert_eq!(matcher.post(None, T, Tag::ZERO, 0), Err(TagError::Full));
    assert_eq!(matcher.arrive(0, T, 0, 0), Err(TagError::Full));
    assert_eq!(matcher.would_match(0, T), None);
    assert_eq!(matcher.probe(None, T, Tag::ALL), Ok(None));
    assert_eq!(matcher.verify(), Ok(()));
}

#[test]
fn ids_of_an_earlier_matcher_in_the_same_memory_are_refused() {
    const ROOM: usize = 40;
    let mut posted = [PostedSlot::EMPTY; 4];
    let mut unexpected = [UnexpectedSlot::EMPTY; ROOM];
    let mut buckets = vec![0; MatcherMemory::buckets(4, ROOM)];
    // The number of messages that the earlier matcher leaves in the reused memory.
    for left in [3, ROOM, 20, 0, 1] {
        let mut over = |stores: usize, old: &[UnexpectedId]| -> Vec<UnexpectedId> {
            let memory = MatcherMemory {
                posted: &mut posted,
                unexpected: &mut unexpected,
                buckets: &mut buckets,
            };
            let mut matcher = Matcher::<4, 2>::with_config(memory, MatcherConfig::DEFAULT).unwrap();
            for id in old {
                assert_eq!(matcher.message(*id), Err(TagError::Stale), "of {left}");
            }
            let ids =
                (0..stores as u64).map(|cookie| stored(arrive(&mut matcher, cookie))).collect();
            assert_eq!(matcher.unexpected(), stores);
            ids
        };
        let ids = over(left, &[]);
        over(ROOM, &ids);
    }
}
