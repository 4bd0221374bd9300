//! A writer and a reader, run as threads and under the model checker.

extern crate std;

use std::sync::Arc;

use super::*;
use crate::sync::testing::{model, rounds, thread};

const ROUNDS: u64 = rounds(2, 20_000);

#[test]
fn a_reader_sees_all_words_of_one_change() {
    model(|| {
        let words: Arc<[AtomicU64; 3]> = Arc::new(core::array::from_fn(|_| AtomicU64::new(0)));
        let writer = thread::spawn({
            let words = words.clone();
            move || {
                for n in 1..=ROUNDS {
                    change(&words[0], || {
                        words[1..].iter().for_each(|word| word.store(n, Ordering::Relaxed))
                    });
                }
            }
        });
        let count = || Some(words[0].load(Ordering::Relaxed));
        let both = || Some([1, 2].map(|at: usize| words[at].load(Ordering::Relaxed)));
        let seen = read(count, both).unwrap();
        if let Some([one, other]) = seen {
            assert_eq!(one, other);
        }
        let before = count().unwrap();
        if let (Some([now, _]), true) = (read(count, both).unwrap(), before.is_multiple_of(2)) {
            assert!(now >= before / 2, "words of an earlier change");
        }
        writer.join().unwrap();
        assert_eq!(read(count, both), Some(Some([ROUNDS; 2])));
        assert_eq!(read(|| Some(1), both), Some(None), "an odd count");
    });
}
