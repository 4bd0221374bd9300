//! Checks the parameters of a measurement. They come from the command line or from the other
//! process. Neither source is trusted.

use super::{Layout, Mode, Test, Transport, name};
use crate::failure::{Failure, Outcome};
use crate::sizes;

/// Small enough that sums over it cannot overflow.
pub const ITERS_MAX: u64 = 1 << 50;

const WINDOW_MAX: u64 = 1 << 16;

const TIMEOUT_MAX: u64 = sizes::SECONDS_MAX * 1_000_000_000;

pub fn test(test: Test, transport: Transport) -> Outcome {
    match (test, transport) {
        (Test::Pool, _) | (Test::Ring, Transport::Shm) => Ok(()),
        (Test::Ring, _) => Err(Failure::usage("ring needs shared memory; use --transport shm")),
        (Test::PutSignal | Test::Put | Test::Get | Test::Tag, _) => Ok(()),
        (_, Transport::Gpu) => Err(Failure::usage(format!(
            "--transport gpu measures only put-signal, put, get and tag; use --transport shm for \
             {}",
            name(test)
        ))),
        _ => Ok(()),
    }
}

pub fn mode(mode: Mode, test: Test, transport: Transport) -> Outcome {
    let driven = !matches!(test, Test::Ring | Test::Pool)
        && !matches!(transport, Transport::Loopback | Transport::Sim);
    match mode {
        Mode::Worker if !driven => Err(Failure::usage(format!(
            "--mode worker needs two processes, each with a node; use --mode inline for {} over {}",
            name(test),
            name(transport)
        ))),
        _ => Ok(()),
    }
}

pub fn directions(both: bool, test: Test, transport: Transport) -> Outcome {
    let streams = matches!(test, Test::Put | Test::TagBw);
    let two = !matches!(transport, Transport::Loopback | Transport::Sim);
    match both && !(streams && two) {
        true => Err(Failure::usage(format!(
            "--bidirectional: {} over {} has one direction; use put or tag-bw over shm, fabric or \
             gpu",
            name(test),
            name(transport)
        ))),
        false => Ok(()),
    }
}

pub fn size(size: usize, test: Test, region: usize) -> Outcome {
    match test {
        _ if size == 0 => {
            Err(Failure::usage("size 0: nothing would be transferred; use at least 1 byte"))
        }
        _ if size > region => Err(Failure::usage(format!(
            "size {} does not fit into a region of {}; choose a smaller size, or a larger --region",
            sizes::show(size),
            sizes::show(region)
        ))),
        Test::Amo | Test::SignalRate if size != 8 => Err(Failure::usage(format!(
            "{} works on one word of 8 bytes; leave --size out",
            name(test)
        ))),
        Test::Ring if ![8, 16, 32, 64].contains(&size) => Err(Failure::usage(
            "ring: a slot has 8, 16, 32 or 64 bytes; use one of these as --size",
        )),
        _ => Ok(()),
    }
}

pub fn iterations(iters: u64, warmup: u64) -> Outcome {
    match iters {
        0 => Err(Failure::usage("-n 0: nothing would be measured; use at least 1 iteration")),
        _ if iters.max(warmup) > ITERS_MAX => Err(Failure::usage(format!(
            "-n {iters} -w {warmup}: use at most {ITERS_MAX} iterations"
        ))),
        _ => Ok(()),
    }
}

pub fn window(window: u64) -> Outcome {
    match window.is_power_of_two() && window <= WINDOW_MAX {
        true => Ok(()),
        false => Err(Failure::usage(format!(
            "--window {window}: use a power of two from 1 to {WINDOW_MAX}, such as 64"
        ))),
    }
}

/// Checks a timeout that the other process sent, in nanoseconds.
pub fn timeout(ns: u64) -> Outcome {
    match ns {
        1..=TIMEOUT_MAX => Ok(()),
        _ => Err(Failure::usage(format!("--timeout {ns}ns: use at most {}s", sizes::SECONDS_MAX))),
    }
}

pub fn layout(layout: Layout, transport: Transport) -> Outcome {
    match (layout, transport) {
        (Layout::Adjacent, Transport::Gpu) => Err(Failure::usage(
            "--layout adjacent: payloads are in device memory, and signals in host memory; use \
             --layout split",
        )),
        _ => Ok(()),
    }
}
