//! Where payloads and signals of the two directions lie in the memory that is written to.
//!
//! See `--help` for the two layouts and why they differ. Offsets are in bytes from the start of the
//! arena, which is aligned to a page.

use super::args::Layout;

/// Lines are kept this far apart: processors fetch pairs of lines.
const APART: usize = 128;
const LINE: usize = 64;
/// Payloads that fill one begin at one, as their sources do.
const PAGE: usize = 4096;

/// Where one test's payloads and signals lie. Index 0: written by the starting side;
/// 1: by the answering one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// First byte of each payload.
    pub payload: [usize; 2],
    /// Each signal's word.
    pub signal: [usize; 2],
}

/// The layout that is taken when none is asked for.
pub fn fitting(size: usize) -> Layout {
    if size + 8 <= LINE { Layout::Adjacent } else { Layout::Split }
}

impl Placement {
    /// The placement of payloads of `size` bytes.
    pub fn of(layout: Layout, size: usize) -> Self {
        let behind = size.next_multiple_of(8);
        match layout {
            Layout::Adjacent if behind + 8 <= LINE / 2 => {
                Placement { payload: [0, LINE / 2], signal: [LINE / 2 - 8, LINE - 8] }
            }
            Layout::Adjacent => {
                let stride = (behind + 8).next_multiple_of(APART);
                let signal = if behind + 8 <= LINE { LINE - 8 } else { behind };
                Placement { payload: [0, stride], signal: [signal, stride + signal] }
            }
            Layout::Split if behind <= LINE / 2 => {
                Placement { payload: [0, LINE / 2], signal: [APART, APART + 8] }
            }
            Layout::Split => {
                let apart = apart(size);
                Placement { payload: [apart, apart + size.next_multiple_of(apart)], signal: [0, 8] }
            }
        }
    }

    /// Bytes of arena that any placement of payloads up to `size` bytes stays within.
    pub fn arena(size: usize) -> usize {
        2 * (size + 8).next_multiple_of(apart(size)) + apart(size)
    }
}

/// What separates payloads of `size` bytes from each other and from their signals.
fn apart(size: usize) -> usize {
    if size < PAGE { APART } else { PAGE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps_and_everything_fits() {
        for layout in [Layout::Adjacent, Layout::Split] {
            for size in (1..600).chain([4096, 65536, 1 << 20]) {
                let p = Placement::of(layout, size);
                let mut parts: Vec<_> = p.payload.iter().map(|&at| (at, at + size)).collect();
                parts.extend(p.signal.iter().map(|&at| (at, at + 8)));
                parts.sort_unstable();
                assert!(parts.windows(2).all(|w| w[0].1 <= w[1].0), "{layout:?} {size} {parts:?}");
                assert!(parts[3].1 <= Placement::arena(size), "{layout:?} {size}");
                assert!(p.signal.iter().all(|at| at % 8 == 0));
            }
        }
    }

    #[test]
    fn adjacent_shares_lines_as_far_as_it_can() {
        let line = |at: usize| at / LINE;
        for size in 1..=24 {
            let p = Placement::of(Layout::Adjacent, size);
            assert!(p.payload.iter().chain(&p.signal).all(|&at| line(at) == 0), "{size}");
        }
        for size in 25..=56 {
            let p = Placement::of(Layout::Adjacent, size);
            for side in 0..2 {
                assert_eq!(line(p.payload[side]), line(p.signal[side]), "{size}");
            }
            assert_ne!(line(p.payload[0]), line(p.payload[1]), "{size}");
        }
        assert_eq!((fitting(56), fitting(57)), (Layout::Adjacent, Layout::Split));
    }

    #[test]
    fn split_never_shares() {
        for size in 1..300 {
            let p = Placement::of(Layout::Split, size);
            for at in p.payload.iter().flat_map(|&at| [at, at + size - 1]) {
                assert!(p.signal.iter().all(|&signal| signal / LINE != at / LINE), "{size}");
            }
        }
    }
}
