//! Matchers of every configuration behind one interface. Their memory is leaked.

use std::collections::HashMap;

use fishplate_core::engine::tag::{
    Arrive, Arrived, Cancel, Matcher, MatcherConfig, MatcherMemory, Post, PostedSlot, ReceiveId,
    TagError, UnexpectedId, UnexpectedSlot,
};

use super::ops::{Answers, Op, Seen};

#[derive(Clone, Copy, Debug)]
pub struct Build {
    pub room: usize,
    pub buckets: usize,
    pub seed: u64,
    pub first_sequence: Option<u64>,
    pub unhashed: u32,
    pub walked: u32,
}

impl Build {
    pub fn new(room: usize) -> Self {
        let MatcherConfig { first_sequence, unhashed, walked, .. } = MatcherConfig::DEFAULT;
        Build {
            room,
            buckets: MatcherMemory::buckets(room, room),
            seed: 1,
            first_sequence,
            unhashed,
            walked,
        }
    }
}

/// A matcher with the ids of its waiting receives and messages.
pub struct Ours<const SHAPES: usize, const INDEXES: usize> {
    pub matcher: Matcher<'static, SHAPES, INDEXES>,
    pub receives: HashMap<u64, ReceiveId>,
    pub messages: HashMap<u64, UnexpectedId>,
}

fn leak<T: Copy>(value: T, n: usize) -> &'static mut [T] {
    Box::leak(vec![value; n].into_boxed_slice())
}

impl<const SHAPES: usize, const INDEXES: usize> Ours<SHAPES, INDEXES> {
    pub fn new(build: Build) -> Self {
        let Build { room, buckets, seed, first_sequence, unhashed, walked } = build;
        let memory = MatcherMemory {
            posted: leak(PostedSlot::EMPTY, room),
            unexpected: leak(UnexpectedSlot::EMPTY, room),
            buckets: leak(0, buckets),
        };
        // With odd seeds, the matcher builds its hash tables as late as possible.
        let lazily = if seed % 2 == 1 { 5 * unhashed + 3 } else { 0 };
        let config = MatcherConfig {
            seed,
            first_sequence,
            unhashed,
            lazily,
            walked,
            ..MatcherConfig::DEFAULT
        };
        let matcher = Matcher::with_config(memory, config).unwrap();
        Ours { matcher, receives: HashMap::new(), messages: HashMap::new() }
    }

    fn found(&self, found: Option<(UnexpectedId, Arrived)>) -> Seen {
        let Some((id, message)) = found else { return Seen::Nothing };
        assert_eq!(self.messages.get(&message.cookie), Some(&id), "the id of {message:?}");
        assert_eq!(self.matcher.message(id), Ok(message));
        Seen::Message(message)
    }

    fn taken(&mut self, taken: Result<Arrived, TagError>) -> Seen {
        match taken {
            Ok(message) => {
                self.messages.remove(&message.cookie);
                Seen::Message(message)
            }
            Err(error) => Seen::Refused(error),
        }
    }
}

impl<const SHAPES: usize, const INDEXES: usize> Answers for Ours<SHAPES, INDEXES> {
    fn answer(&mut self, op: &Op) -> Seen {
        match *op {
            Op::Post { wanted, context } => {
                match self.matcher.post(wanted.source, wanted.tag, wanted.ignore, context) {
                    Ok(Post::Waiting(id)) => {
                        self.receives.insert(context, id);
                        Seen::Waits
                    }
                    Ok(Post::Matched(message)) => self.taken(Ok(message)),
                    Err(error) => Seen::Refused(error),
                }
            }
            Op::Arrive(message) => {
                let expected = self.matcher.would_match(message.source, message.tag);
                match self.matcher.arrive(message.source, message.tag, message.len, message.cookie)
                {
                    Ok(Arrive::Matched { receive, context }) => {
                        assert_eq!(expected, Some((receive, context)));
                        assert_eq!(self.receives.remove(&context), Some(receive));
                        assert_eq!(self.matcher.cancel(receive), Cancel::AlreadyMatched);
                        Seen::Receive(context)
                    }
                    Ok(Arrive::Stored(id)) => {
                        assert_eq!(expected, None);
                        self.messages.insert(message.cookie, id);
                        Seen::Waits
                    }
                    Err(error) => Seen::Refused(error),
                }
            }
            Op::Cancel { context } => match self.receives.remove(&context) {
                Some(id) => {
                    let seen = Seen::Cancelled(self.matcher.cancel(id));
                    assert_eq!(self.matcher.cancel(id), Cancel::Stale, "cancelled twice");
                    seen
                }
                None => Seen::Cancelled(Cancel::Stale),
            },
            Op::Probe(wanted) => {
                let found = self.matcher.probe(wanted.source, wanted.tag, wanted.ignore);
                self.found(found.unwrap())
            }
            Op::Claim(wanted) => {
                let found = self.matcher.mprobe(wanted.source, wanted.tag, wanted.ignore);
                self.found(found.unwrap())
            }
            Op::Take { cookie } => match self.messages.get(&cookie) {
                Some(id) => {
                    let taken = self.matcher.take(*id);
                    self.taken(taken)
                }
                None => Seen::Refused(TagError::Stale),
            },
            Op::Discard { cookie } => match self.messages.get(&cookie) {
                Some(id) => {
                    let taken = self.matcher.discard(*id);
                    self.taken(taken)
                }
                None => Seen::Refused(TagError::Stale),
            },
            Op::FailSource(source) => {
                let mut removed = vec![];
                self.matcher.fail_source(source, |id, context| {
                    assert_eq!(self.receives.remove(&context), Some(id));
                    removed.push(context);
                });
                Seen::Removed(removed)
            }
        }
    }
}
