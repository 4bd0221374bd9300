//! A sequence lock: one writer changes plain words, and readers detect changes during a read.
//! Neither side blocks. The count that guards the words is odd during a change. Readers may be
//! other processes that read the words with system calls.
//!
//! | edge             | release                    | acquire                  | carries         |
//! |------------------|----------------------------|--------------------------|-----------------|
//! | `sequence.words` | the count after a change   | the count before reading | the new words   |
//! | `sequence.count` | the fence before the words | the fence after reading  | the odd count   |

use super::primitive::{AtomicU64, Ordering, edge, edge_fence};

/// Changes the words that `count` guards. `write` stores them relaxed. Only one thread may call
/// this at a time.
pub fn change(count: &AtomicU64, write: impl FnOnce()) {
    let before = count.load(Ordering::Relaxed);
    count.store(before.wrapping_add(1), Ordering::Relaxed);
    // Release, edge `sequence.count`: a reader that sees a new word also sees the odd count.
    edge_fence!("sequence.count.store", Release);
    write();
    // Release, edge `sequence.words`: a reader that sees this count sees the new words.
    count.store(before.wrapping_add(2), edge!("sequence.words.store", Release));
}

/// Reads the words once. `count` loads the count, and `read` the words, in any order. Returns
/// `None` if `count` or `read` fails, and `Some(None)` if the words may have changed meanwhile.
pub fn read<T>(
    count: impl Fn() -> Option<u64>,
    read: impl FnOnce() -> Option<T>,
) -> Option<Option<T>> {
    let before = count()?;
    // Acquire, edge `sequence.words`: pairs with the store of the count.
    edge_fence!("sequence.words.load", Acquire);
    let words = read()?;
    // Acquire, edge `sequence.count`: pairs with the fence before the words.
    edge_fence!("sequence.count.load", Acquire);
    let after = count()?;
    Some((before == after && before.is_multiple_of(2)).then_some(words))
}

#[cfg(test)]
mod races;
