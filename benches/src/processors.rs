//! The two processors of a comparison between two threads.

use fishplate_sys::affinity;

/// The two that the command line names, or 0 and 1.
///
/// # Panics
/// If it names no numbers, or this process may not run there: later, a thread would wait for ever
/// for the other.
pub fn chosen() -> (usize, usize) {
    let mut processors = std::env::args().skip(1).map(|word| word.parse().expect("a processor's number"));
    let (here, there) = (processors.next().unwrap_or(0), processors.next().unwrap_or(1));
    pin(there);
    pin(here);
    (here, there)
}

/// Keeps this thread on a processor.
///
/// # Panics
/// If it may not run there.
pub fn pin(processor: usize) {
    affinity::pin(processor).unwrap_or_else(|error| panic!("cannot run on processor {processor}: {error}"));
}
