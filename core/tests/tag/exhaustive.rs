//! Tests every sequence of operations from an alphabet of 15 letters. Nine letters post a receive:
//! one of two sources or any, one of two tags or any. Four letters are messages from one source
//! with one tag. Two letters cancel the oldest or the youngest receive. After each letter, the test
//! makes all nine probes.

use fishplate_core::engine::tag::{
    Arrive, Cancel, Matcher, MatcherConfig, MatcherMemory, Post, PostedSlot, ReceiveId, Tag,
    UnexpectedSlot,
};

use super::ops::setting;

const LETTERS: u8 = 15;
const POSTS: usize = 9;
const LONGEST: usize = 8;
/// Stands for no receive or no message.
const NONE: u8 = u8::MAX;

/// Source and tag of each kind of receive, with `None` for any.
const WANTED: [(Option<u32>, Option<u64>); POSTS] = [
    (Some(0), Some(0)),
    (Some(0), Some(1)),
    (Some(1), Some(0)),
    (Some(1), Some(1)),
    (None, Some(0)),
    (None, Some(1)),
    (Some(0), None),
    (Some(1), None),
    (None, None),
];

fn accepts(wanted: u8, message: u8) -> bool {
    let (source, tag) = WANTED[wanted as usize];
    source.is_none_or(|source| source == message as u32 / 2)
        && tag.is_none_or(|tag| tag == message as u64 % 2)
}

/// A queue of at most [`LONGEST`] entries. An entry is the kind of a letter, and the letter's
/// position in the word.
#[derive(Clone, Copy, Default)]
struct Queue {
    items: [(u8, u8); LONGEST],
    len: usize,
}

impl Queue {
    fn find(&self, is: impl Fn(u8) -> bool) -> Option<usize> {
        (0..self.len).find(|at| is(self.items[*at].0))
    }
    fn push(&mut self, kind: u8, position: u8) {
        self.items[self.len] = (kind, position);
        self.len += 1;
    }
    fn remove(&mut self, at: usize) -> u8 {
        let (_, position) = self.items[at];
        self.items.copy_within(at + 1..self.len, at);
        self.len -= 1;
        position
    }
}

/// The expected state after some letters of a word.
#[derive(Clone, Copy, Default)]
struct Model {
    posted: Queue,
    unexpected: Queue,
    /// The position of the letter that matched the last letter, or [`NONE`].
    with: u8,
    probes: [u8; POSTS],
}

impl Model {
    fn next(&self, letter: u8, position: u8) -> Model {
        let mut after = *self;
        let Model { posted, unexpected, .. } = &mut after;
        let with = match letter {
            0..9 => match unexpected.find(|message| accepts(letter, message)) {
                Some(at) => unexpected.remove(at),
                None => {
                    posted.push(letter, position);
                    NONE
                }
            },
            9..13 => match posted.find(|wanted| accepts(wanted, letter - 9)) {
                Some(at) => posted.remove(at),
                None => {
                    unexpected.push(letter - 9, position);
                    NONE
                }
            },
            _ if posted.len == 0 => NONE,
            13 => posted.remove(0),
            _ => posted.remove(posted.len - 1),
        };
        after.with = with;
        for wanted in 0..POSTS {
            let found = after.unexpected.find(|message| accepts(wanted as u8, message));
            after.probes[wanted] = found.map_or(NONE, |at| after.unexpected.items[at].1);
        }
        after
    }
}

/// Checks all sequences of `length` letters.
fn all_words(length: usize, config: MatcherConfig, buckets: usize) {
    let mut word = [0u8; LONGEST];
    let mut right = [Model::default(); LONGEST + 1];
    let (mut fresh_from, mut words) = (0, 0u64);
    loop {
        for position in fresh_from..length {
            right[position + 1] = right[position].next(word[position], position as u8);
        }
        if let Err((position, what)) = try_word(&word[..length], &right, config, buckets) {
            panic!("{:?}: {what} after letter {position}; {config:?}", &word[..length]);
        }
        words += 1;
        let Some(turn) = (0..length).rev().find(|at| word[*at] + 1 < LETTERS) else { break };
        word[turn] += 1;
        word[turn + 1..length].fill(0);
        fresh_from = turn;
    }
    assert_eq!(words, (LETTERS as u64).pow(length as u32));
    println!("{words} words of {length} letters, {config:?}");
}

fn try_word(
    word: &[u8],
    right: &[Model; LONGEST + 1],
    config: MatcherConfig,
    buckets: usize,
) -> Result<(), (usize, &'static str)> {
    let (mut posted, mut unexpected) =
        ([PostedSlot::EMPTY; LONGEST], [UnexpectedSlot::EMPTY; LONGEST]);
    let mut heads = [0; 16];
    let memory = MatcherMemory {
        posted: &mut posted[..word.len()],
        unexpected: &mut unexpected[..word.len()],
        buckets: &mut heads[..buckets],
    };
    let mut matcher: Matcher<'_, 4, 2> = Matcher::with_config(memory, config).unwrap();
    let mut receives: [Option<ReceiveId>; LONGEST] = [None; LONGEST];
    let ask = |wanted: u8| {
        let (source, tag) = WANTED[wanted as usize];
        (source, Tag::from(tag.unwrap_or(0)), if tag.is_none() { Tag::ALL } else { Tag::ZERO })
    };
    for (position, letter) in word.iter().enumerate() {
        let after = &right[position + 1];
        let with = match letter {
            0..9 => {
                let (source, tag, ignore) = ask(*letter);
                match matcher.post(source, tag, ignore, position as u64) {
                    Ok(Post::Waiting(id)) => {
                        receives[position] = Some(id);
                        NONE
                    }
                    Ok(Post::Matched(message)) => message.cookie as u8,
                    Err(_) => return Err((position, "a refusal")),
                }
            }
            9..13 => {
                let message = *letter as u64 - 9;
                match matcher.arrive(message as u32 / 2, Tag::from(message % 2), 0, position as u64)
                {
                    Ok(Arrive::Matched { context, .. }) => context as u8,
                    Ok(Arrive::Stored(_)) => NONE,
                    Err(_) => return Err((position, "a refusal")),
                }
            }
            _ => {
                let Queue { items, len } = right[position].posted;
                let at = if *letter == 13 { 0 } else { len.wrapping_sub(1) };
                let id = if len == 0 { None } else { receives[items[at].1 as usize] };
                match id.map(|id| matcher.cancel(id)) {
                    None => NONE,
                    Some(Cancel::Removed(context)) => context as u8,
                    Some(_) => return Err((position, "a receive that cannot be cancelled")),
                }
            }
        };
        if with != after.with {
            return Err((position, "wrong pair"));
        }
        for (wanted, right) in after.probes.iter().enumerate() {
            let (source, tag, ignore) = ask(wanted as u8);
            let found = matcher.probe(source, tag, ignore).map_err(|_| (position, "a refusal"))?;
            if found.map_or(NONE, |(_, message)| message.cookie as u8) != *right {
                return Err((position, "wrong message for a probe"));
            }
        }
    }
    Ok(())
}

#[test]
fn every_word_agrees_with_two_lists() {
    let length = setting("FISHPLATE_TAG_WORDS", 4) as usize;
    assert!(length < LONGEST, "FISHPLATE_TAG_WORDS: at most {}", LONGEST - 1);
    let config = MatcherConfig { first_sequence: Some((1 << 32) - 2), ..MatcherConfig::DEFAULT };
    // First the matcher hashes and indexes all entries, with few buckets. Then it hashes only some
    // entries. Then it uses its defaults.
    all_words(length, MatcherConfig { unhashed: 0, walked: 0, ..config }, 2);
    all_words(length, MatcherConfig { unhashed: 1, walked: 1, ..config }, 16);
    all_words(length.min(6), config, 16);
}
