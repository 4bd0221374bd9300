//! The instruction budgets: one line per path, with the limit and what was measured when the limit was set.
//!
//! Counts are exact for a compiler, so a limit is the measured value plus at most 5 % or two instructions, whichever
//! is more. A path that exceeds its limit fails the run; raising a limit is a change to this file that somebody
//! reads. Each benchmark runs its path [`REPEATS`] times and setup is not counted, so figures here are per repeat.

pub mod tape;

/// How often a benchmark repeats its path.
pub const REPEATS: u64 = 1000;

/// Instructions that one path may take.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// The function in `instructions/`.
    pub name: &'static str,
    /// Values that one repeat moves: figures are printed per value as well.
    pub per: u64,
    /// Instructions per repeat. More fail the run. Rivals have none.
    pub limit: Option<f64>,
    /// Instructions per repeat when the limit was set.
    pub measured: f64,
}

const fn ours(name: &'static str, limit: f64, measured: f64) -> Budget {
    Budget { name, per: 1, limit: Some(limit), measured }
}

const fn rival(name: &'static str, measured: f64) -> Budget {
    Budget { name, per: 1, limit: None, measured }
}

impl Budget {
    const fn per(self, values: u64) -> Self {
        Budget { per: values, ..self }
    }
}

/// Every path. Compiler: the one that `rust-toolchain.toml` pins; x86-64 without target features.
#[rustfmt::skip]
pub const BUDGETS: &[Budget] = &[
    //   path                               limit measured
    ours("ring_push",                      14.1,     12.1),
    ours("ring_pop",                       12.1,     10.1),
    ours("ring_push_pop",                  34.2,     32.2),
    ours("ring_batch_32",                 191.7,    182.6).per(32),
    rival("rtrb_push_pop",                           46.2),
    rival("crossbeam_push_pop",                      58.1),
    rival("ringbuf_push_pop",                        69.1),
    rival("heapless_push_pop",                       29.1),
    ours("window_in_order",               42.1,     41.2),
    ours("window_swapped",               267.5,    254.8),
    ours("window_one_hole",              200.3,    190.8),
    ours("window_1000_holes",            200.3,    190.8),
    ours("signal_apply",                 272.1,    259.2),
    ours("put_signal_apply",             306.8,    292.2),
    ours("put_signal_post",              295.1,    281.1),
    ours("put_sender",                   401.8,    382.7),
    ours("put_sender_silent",            188.7,    179.8),
    ours("put_signal_sender",            494.1,    470.6),
    ours("put_signal_to_completion",    1635.9,   1558.0),
    ours("put_signal_32_and_quiet",    24064.9,  22919.0).per(32),
    ours("put_signal_mapped",              74.6,     71.1),
    ours("signal_mapped",                  35.1,     33.1),
    ours("wait_signal_arrived",            15.1,     13.1),
    ours("quiet_idle_4",                   82.0,     78.1).per(4),
    ours("progress_idle",                  37.1,     35.1),
    ours("notify_awake",                   10.1,      8.1),
];

/// Pairs of which the first must take no more instructions than the second.
pub const NO_MORE_THAN: &[(&str, &str)] =
    &[("ring_push_pop", "rtrb_push_pop"), ("window_1000_holes", "window_one_hole")];

/// The limit of a path for all its repeats.
///
/// # Panics
/// When [`BUDGETS`] has no such path, or it is a rival's.
pub fn limit(name: &str) -> u64 {
    let budget = BUDGETS.iter().find(|budget| budget.name == name);
    let per_repeat = budget.and_then(|budget| budget.limit).expect("every path of ours has a budget");
    (per_repeat * REPEATS as f64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_what_was_measured_and_a_small_slack() {
        for budget in BUDGETS {
            let Some(limit) = budget.limit else { continue };
            let slack = (budget.measured * 0.05).max(2.0);
            assert!(
                limit >= budget.measured && limit <= budget.measured + slack,
                "{}: limit {limit}, measured {}",
                budget.name,
                budget.measured
            );
        }
    }
}
