//! Selects the two processors of a comparison between two threads.

use fishplate_sys::affinity;

/// Returns the two processors on the command line, or 0 and 1.
///
/// # Panics
/// If an argument is not a number, or this process may not run on one of the processors. Without
/// this check one thread would wait forever for the other.
pub fn chosen() -> (usize, usize) {
    let mut processors =
        std::env::args().skip(1).map(|word| word.parse().expect("a processor's number"));
    let (here, there) = (processors.next().unwrap_or(0), processors.next().unwrap_or(1));
    pin(there);
    pin(here);
    (here, there)
}

/// Pins this thread to a processor.
///
/// # Panics
/// If this process may not run there.
pub fn pin(processor: usize) {
    affinity::pin(processor)
        .unwrap_or_else(|error| panic!("cannot run on processor {processor}: {error}"));
}
