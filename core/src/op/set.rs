//! The set of atomics that a rail executes, each with its widths. Nothing here blocks or allocates.

use core::fmt;

use super::AmoOp;

/// A set of operations, each in some of the widths 1, 2, 4 and 8 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct AmoSet(u64);

const OPS: [AmoOp; 9] = [
    AmoOp::Set,
    AmoOp::Add,
    AmoOp::Inc,
    AmoOp::And,
    AmoOp::Or,
    AmoOp::Xor,
    AmoOp::Swap,
    AmoOp::CompareSwap,
    AmoOp::Fetch,
];

const WIDTHS: [u8; 4] = [1, 2, 4, 8];

impl AmoSet {
    /// The empty set.
    pub const NONE: AmoSet = AmoSet(0);

    /// Every operation in every width.
    pub const ALL: AmoSet = AmoSet((1 << (4 * OPS.len())) - 1);

    /// Creates the set of operations for which `has` returns true, given the operation and its
    /// width in bytes.
    pub fn of(mut has: impl FnMut(AmoOp, u8) -> bool) -> AmoSet {
        let mut set = 0;
        for op in OPS {
            for width in WIDTHS {
                set |= bit(op, width) * has(op, width) as u64;
            }
        }
        AmoSet(set)
    }

    /// Returns whether the set contains an operation of this width in bytes. Returns `false` for
    /// widths other than 1, 2, 4 and 8.
    pub fn has(self, op: AmoOp, width: u8) -> bool {
        self.0 & bit(op, width) != 0
    }

    /// Returns whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

fn bit(op: AmoOp, width: u8) -> u64 {
    let place = 4 * (op as u32 - 1);
    WIDTHS.iter().position(|&known| known == width).map_or(0, |at| 1 << (place + at as u32))
}

/// Prints `all`, `none`, or each operation with its widths in bytes, as in `Add 4/8, CompareSwap
/// 8`.
impl fmt::Display for AmoSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            AmoSet::ALL => return f.write_str("all"),
            AmoSet::NONE => return f.write_str("none"),
            _ => {}
        }
        let mut first = true;
        for op in OPS {
            let mut widths = WIDTHS.into_iter().filter(|&width| self.has(op, width));
            let Some(least) = widths.next() else { continue };
            write!(f, "{}{op:?} {least}", if first { "" } else { ", " })?;
            widths.try_for_each(|width| write!(f, "/{width}"))?;
            first = false;
        }
        Ok(())
    }
}

impl fmt::Debug for AmoSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AmoSet({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_what_it_was_made_of() {
        assert_eq!(AmoSet::of(|_, _| true), AmoSet::ALL);
        assert_eq!(AmoSet::of(|_, _| false), AmoSet::NONE);
        let some = AmoSet::of(|op, width| match op {
            AmoOp::Add => width >= 4,
            AmoOp::CompareSwap => width == 8,
            _ => false,
        });
        assert!(!some.is_empty() && some.has(AmoOp::Add, 4) && some.has(AmoOp::CompareSwap, 8));
        assert!(!some.has(AmoOp::Add, 2) && !some.has(AmoOp::Inc, 4) && !some.has(AmoOp::Fetch, 8));
        assert!([0, 3, 16].iter().all(|&width| !AmoSet::ALL.has(AmoOp::Add, width)));
        // Only the tests use std.
        extern crate std;
        assert_eq!(
            std::format!("{some} {} {}", AmoSet::ALL, AmoSet::NONE),
            "Add 4/8, CompareSwap 8 all none"
        );
    }
}
