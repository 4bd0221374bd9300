//! Places payload and signal in the area that the other side writes.
//!
//! Offsets are in bytes from the start of the area, which is aligned to a page.

use super::args::Layout;

/// Two lines, because processors fetch lines in pairs.
const APART: usize = 128;
const LINE: usize = 64;
/// Payloads of at least this size begin at a page boundary, as their source buffers do.
const PAGE: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    pub payload: usize,
    pub signal: usize,
}

pub fn fitting(size: usize) -> Layout {
    if size + 8 <= LINE { Layout::Adjacent } else { Layout::Split }
}

impl Placement {
    pub fn of(layout: Layout, size: usize) -> Self {
        let behind = size.next_multiple_of(8);
        match layout {
            Layout::Adjacent => {
                Placement { payload: 0, signal: if behind + 8 <= LINE { LINE - 8 } else { behind } }
            }
            Layout::Split => Placement { payload: apart(size), signal: 0 },
        }
    }

    /// Returns the size of an area for payloads of up to `size` bytes, however placed.
    pub fn arena(size: usize) -> usize {
        (size + 8).next_multiple_of(apart(size)) + apart(size)
    }
}

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
                let Placement { payload, signal } = Placement::of(layout, size);
                let apart = payload + size <= signal || signal + 8 <= payload;
                assert!(apart && signal % 8 == 0, "{layout:?} {size}");
                assert!(
                    (payload + size).max(signal + 8) <= Placement::arena(size),
                    "{layout:?} {size}"
                );
            }
        }
    }

    #[test]
    fn adjacent_shares_a_line_as_long_as_it_can_and_split_never_does() {
        let line = |at: usize| at / LINE;
        for size in 1..300 {
            let p = Placement::of(Layout::Adjacent, size);
            assert_eq!(line(p.payload) == line(p.signal), size <= 56, "{size}");
            let p = Placement::of(Layout::Split, size);
            assert!(
                [p.payload, p.payload + size - 1].iter().all(|&at| line(at) != line(p.signal)),
                "{size}"
            );
        }
        assert_eq!((fitting(56), fitting(57)), (Layout::Adjacent, Layout::Split));
    }
}
