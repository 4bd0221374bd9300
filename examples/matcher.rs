//! Tag matching alone, for a library with its own transport: it decides which receive gets which
//! message. It holds no payloads; `cookie` and `context` are words of the caller.

use std::error::Error;

use fishplate::core::engine::tag::{
    Arrive, Matcher, MatcherMemory, Post, PostedSlot, Tag, UnexpectedSlot,
};

const LOW_BYTE: Tag = Tag::new(0xff, 0);

fn main() -> Result<(), Box<dyn Error>> {
    let (mut posted, mut unexpected) = ([PostedSlot::EMPTY; 64], [UnexpectedSlot::EMPTY; 64]);
    let mut buckets = [0; MatcherMemory::buckets(64, 64)];
    let memory =
        MatcherMemory { posted: &mut posted, unexpected: &mut unexpected, buckets: &mut buckets };
    let mut matcher: Matcher = Matcher::new(memory, 0x5eed)?;

    // Receive 1: only from source 3, tag 0x10. Receive 2: from any source, tags 0x10 to 0x1f.
    let _ = matcher.post(Some(3), Tag::from(0x10), Tag::ZERO, 1)?;
    let _ = matcher.post(None, Tag::from(0x00), LOW_BYTE, 2)?;
    for (source, tag) in [(4, 0x10), (3, 0x10), (5, 0x200)] {
        match matcher.arrive(source, Tag::from(tag), 8, 100 + tag)? {
            Arrive::Matched { context, .. } => {
                println!("{tag:#x} from {source} goes to receive {context}")
            }
            _ => println!("{tag:#x} from {source} waits"),
        }
    }
    if let Post::Matched(message) = matcher.post(None, Tag::from(0x200), Tag::ZERO, 3)? {
        println!("receive 3 finds {:#x} from {}", message.tag.lo, message.source);
    }
    Ok(())
}
