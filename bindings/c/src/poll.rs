//! Completions and counters.

use std::ffi::c_int;

use fishplate::core::engine::protocol::{Received, Status as Ended};
use fishplate::core::op::{Completion, Outcome, Token};

use crate::handle::{FpNode, Inner, enter};
use crate::messages::{FpMessage, FpTag};
use crate::node::{check, place};
use crate::status::{fail, of_outcome};

/// The completion of an operation or a receive.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FpCompletion {
    /// `FP_OPERATION` or `FP_RECEIVE`.
    pub kind: u32,
    /// 0, or a negative errno value.
    pub status: i32,
    /// The token of the operation, or the request of the receive.
    pub id: u64,
    /// The `word` given to `fp_post_recv`.
    pub word: u64,
    /// For an atomic: the fetched value. For a send or a receive: a number of bytes.
    pub value: u64,
    /// The message, if a receive matched.
    pub message: FpMessage,
    /// 1 if the operation failed but may still land.
    pub may_land: u32,
}

/// `kind` of the completion of an operation.
pub const FP_OPERATION: u32 = 1;
/// `kind` of the completion of a receive.
pub const FP_RECEIVE: u32 = 2;

const NOBODY: FpMessage =
    FpMessage { tag: FpTag { low: 0, high: 0 }, len: 0, claim: 0, source: crate::handle::ANY };

impl FpCompletion {
    fn of_operation(inner: &Inner, end: &Completion) -> Self {
        let (status, may_land) = of_outcome(end.outcome);
        FpCompletion {
            kind: FP_OPERATION,
            status,
            id: inner.token(end.token.to_raw()),
            word: 0,
            value: end.value,
            message: NOBODY,
            may_land: may_land.into(),
        }
    }

    fn of_receive(inner: &Inner, end: &Ended) -> Self {
        let (status, may_land) = match end.outcome {
            Received::Ok => (0, false),
            Received::Truncated => (-libc::EMSGSIZE, false),
            Received::Cancelled => (-libc::ECANCELED, false),
            Received::Failed(fault) => of_outcome(Outcome::Failed(fault)),
            Received::Unknown(fault) => of_outcome(Outcome::Unknown(fault)),
        };
        FpCompletion {
            kind: FP_RECEIVE,
            status,
            id: inner.token(end.request.to_raw()),
            word: end.word,
            value: end.delivered,
            message: end.envelope.map_or(NOBODY, |envelope| inner.message(envelope)),
            may_land: may_land.into(),
        }
    }
}

/// Makes progress once, and takes up to `count` completions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_poll(
    node: *mut FpNode,
    into: *mut FpCompletion,
    count: usize,
) -> c_int {
    enter(node, |inner| {
        if count != 0 {
            place(into, "completions")?;
        }
        inner.node.publish_counters();
        inner.node.progress();
        let mut taken = 0;
        while taken < count.min(c_int::MAX as usize) {
            let end = match inner.node.next_completion() {
                Some(end) => FpCompletion::of_operation(inner, &end),
                None => match inner.node.next_recv() {
                    Some(end) => FpCompletion::of_receive(inner, &end),
                    None => break,
                },
            };
            // SAFETY: `taken < count`, and the header requires room for `count` completions.
            unsafe { into.add(taken).write(end) };
            taken += 1;
        }
        Ok(taken as c_int)
    })
}

/// Takes the completion of an operation if the operation is complete.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_test(node: *mut FpNode, token: u64, into: *mut FpCompletion) -> c_int {
    enter(node, |inner| {
        let place = place(into, "completion")?;
        let token = Token::from_raw(inner.token(token));
        match inner.node.test(token)? {
            Some(end) => {
                place.write(FpCompletion::of_operation(inner, &end));
                Ok(1)
            }
            None => Ok(0),
        }
    })
}

/// Counters of a node.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct FpStats {
    /// `sizeof (fp_stats_t)` in the caller's build.
    pub struct_size: usize,
    /// Writes and messages posted.
    pub posted: u64,
    /// Writes and messages that arrived.
    pub arrived: u64,
    /// Arrivals that overtook an earlier sequence number.
    pub out_of_order: u64,
    /// Arrivals of a sequence number that had already arrived.
    pub duplicates: u64,
    /// Arrivals with an epoch of an earlier attachment.
    pub stale: u64,
    /// Signals and atomics applied.
    pub applied: u64,
    /// Acknowledgements sent as separate messages.
    pub acks_alone: u64,
    /// Posts refused because there was no room.
    pub refused: u64,
    /// Posts that failed.
    pub failed: u64,
    /// Progress passes.
    pub passes: u64,
}

/// Copies out the node's counters.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_stats(node: *mut FpNode, into: *mut FpStats) -> c_int {
    enter(node, |inner| {
        check(into, "stats")?;
        // SAFETY: the header requires that `struct_size` is set.
        let size = unsafe { (*into).struct_size };
        if !(size_of::<usize>()..=4096).contains(&size) {
            let text = format_args!("invalid struct_size: {size}; set it to sizeof (fp_stats_t)");
            return Err(fail(libc::EINVAL, text));
        }
        let stats = inner.node.stats();
        let all = FpStats {
            struct_size: size,
            posted: stats.posted,
            arrived: stats.arrived,
            out_of_order: stats.arrivals_out_of_order,
            duplicates: stats.duplicates,
            stale: stats.stale,
            applied: stats.applied,
            acks_alone: stats.acks_alone,
            refused: stats.refused,
            failed: stats.failed,
            passes: stats.passes,
        };
        let known = size.min(size_of::<FpStats>());
        // SAFETY: the caller's structure has `size` bytes. `known` is at most `size` and at most
        // the size of `all`.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const all).cast::<u8>(), into.cast(), known);
        }
        Ok(0)
    })
}
