//! Which way the payload of a message comes that lies in its sender's private memory: the kernel
//! copies it, or its sender puts it into the lane. Nothing here blocks, allocates or looks at a
//! clock; what is measured is handed in.
//!
//! Which way is quicker depends on what the two processors share: a payload of 1 MiB takes 66 us
//! through the lane and 97 by the kernel where that is a core's caches, 150 and 90 where it is a
//! cache behind them, 510 and 90 where it is none. Processes move, and other load counts too, so it
//! is measured, by length and peer, while payloads come:
//!
//! - The way that was quicker is in use, and measured again every [`AGAIN`] payloads.
//! - The other is *tried* from time to time, until it has been measured once: the seldomer, the
//!   slower it was, so that trials cost some 3 % at most.
//! - A copy of the kernel takes as long as its call. Through the lane several come at once, so
//!   there the time in which any was on its way is divided by all that came in it.
//! - A trial of the lane whose sender puts nothing into it is given up by the payloads that follow;
//!   those already asked for wait.
//!
//! Times are in nanoseconds per KiB. A shorter one counts as much as what was known; a longer one
//! an eighth, because this thread may have lost its processor meanwhile, and where it is much
//! longer the next payload is measured as well.

/// The ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// `process_vm_readv(2)`.
    Kernel,
    /// The sender puts it into the lane.
    Lane,
}

impl By {
    fn other(self) -> By {
        match self {
            By::Kernel => By::Lane,
            By::Lane => By::Kernel,
        }
    }
}

/// Payloads from one measure of the way in use to the next.
const AGAIN: u32 = 32;

/// Payloads through the lane that make a measure, if it does not run empty before.
const ENOUGH: u32 = 16;

/// How many times as slow as the other a way is taken to be, at most.
const WORST: u64 = 8;

/// How many times what was known one measure counts, at most.
const OUTLIER: u64 = 2;

/// How long to wait for a trial of the lane while the kernel's speed is unknown, in ns per KiB.
const SLOW: u64 = 1000;

/// Payloads by the way in use for each of a trial: from the first trials, which measure memory that
/// was never touched, to the later ones.
const PATIENCE: [u32; 5] = [2, 4, 8, 16, 32];

/// Lengths that are kept apart: below 16 KiB, below 32 KiB, and so on to 2 MiB and above.
const CLASSES: usize = 9;

/// What is measured through the lane.
#[derive(Clone, Copy, Debug)]
struct Sample {
    began: u64,
    bytes: u64,
    count: u32,
}

/// What is known of payloads of one length.
#[derive(Clone, Copy, Debug)]
struct Class {
    /// Nanoseconds per KiB by the kernel and through the lane; 0: not known.
    cost: [u64; 2],
    by: By,
    /// Payloads until the other way is tried.
    left: u32,
    /// Payloads until the way in use is measured.
    measure: u32,
    /// Payloads of the trial, while there is one.
    tried: u32,
    /// Trials so far: the step of [`PATIENCE`].
    trials: u8,
    /// Payloads on their way through the lane.
    open: u32,
    sample: Option<Sample>,
}

/// What is known of one peer.
#[derive(Debug)]
pub(crate) struct Fetches {
    classes: [Class; CLASSES],
}

impl Fetches {
    /// Nothing is known; the first payload of each length tries the lane.
    pub(crate) const fn new() -> Self {
        let class = Class {
            cost: [0; 2],
            by: By::Kernel,
            left: 0,
            measure: 0,
            tried: 0,
            trials: 0,
            open: 0,
            sample: None,
        };
        Fetches { classes: [class; CLASSES] }
    }

    /// How the next payload of `len` bytes is to come, and whether that is to be measured.
    pub(crate) fn choose(&mut self, len: usize, now: impl FnOnce() -> u64) -> (By, bool) {
        let class = self.class(len);
        if class.tried == 0 && class.left != 0 {
            return (class.by, class.measure == 0);
        }
        if let Some(sample) = class.sample.filter(|_| class.tried != 0) {
            let asked = (len as u64).saturating_mul(class.tried.min(ENOUGH).into());
            if now().saturating_sub(sample.began) > class.worst().saturating_mul(asked) >> 10 {
                class.sample = None;
                class.cost[By::Lane as usize] = class.worst();
                class.tried_out();
                return (class.by, class.measure == 0);
            }
        }
        (class.by.other(), true)
    }

    /// The kernel has copied a payload, and if that was measured, in so many nanoseconds.
    pub(crate) fn copied(&mut self, len: usize, took: Option<u64>) {
        let class = self.class(len);
        class.took(By::Kernel);
        if let Some(took) = took {
            class.measured(By::Kernel, per_kib(took, len as u64));
        }
    }

    /// A payload has been asked for through the lane; if that is to be measured, at this time.
    pub(crate) fn asked(&mut self, len: usize, now: Option<u64>) {
        let class = self.class(len);
        class.took(By::Lane);
        class.open += 1;
        if let (Some(began), None) = (now, class.sample) {
            class.sample = Some(Sample { began, bytes: 0, count: 0 });
        }
    }

    /// A payload that was asked for through the lane has come, or never will.
    pub(crate) fn came(&mut self, len: usize, now: impl FnOnce() -> u64) {
        let class = self.class(len);
        class.open = class.open.saturating_sub(1);
        let Some(sample) = &mut class.sample else { return };
        sample.bytes += len as u64;
        sample.count += 1;
        if class.open == 0 || sample.count == ENOUGH {
            let (took, bytes) = (now().saturating_sub(sample.began), sample.bytes);
            class.sample = None;
            class.measured(By::Lane, per_kib(took, bytes));
        }
    }

    fn class(&mut self, len: usize) -> &mut Class {
        let class = (len >> 13 | 1).ilog2() as usize;
        &mut self.classes[class.min(CLASSES - 1)]
    }
}

impl Class {
    /// A payload goes this way.
    fn took(&mut self, by: By) {
        if by == self.by {
            self.left = self.left.saturating_sub(1);
            self.measure = self.measure.saturating_sub(1);
        } else {
            self.tried += 1;
        }
    }

    fn measured(&mut self, by: By, cost: u64) {
        let (known, other) = (self.cost[by as usize], self.cost[by.other() as usize]);
        self.cost[by as usize] = match (known, other) {
            (0, 0) => cost,
            (0, other) => cost.min(WORST * other),
            (known, _) if cost <= known => known.midpoint(cost),
            (known, _) => known + (cost.min(OUTLIER * known) - known).div_ceil(8),
        };
        if by == self.by {
            let worse = known != 0 && cost > known + known / 4;
            self.measure = if worse { 0 } else { AGAIN };
        } else {
            self.tried_out();
        }
        let [kernel, lane] = self.cost;
        let quicker = if lane < kernel { By::Lane } else { By::Kernel };
        // A way that is not known stays in use until it was measured.
        if quicker != self.by && kernel != 0 && lane != 0 {
            (self.by, self.left, self.measure, self.tried) = (quicker, AGAIN, AGAIN, 0);
        }
    }

    /// A trial is over: the longer it took, and the slower the way is, the later comes the next.
    fn tried_out(&mut self) {
        let patience = PATIENCE[usize::from(self.trials).min(PATIENCE.len() - 1)];
        self.trials = self.trials.saturating_add(1);
        self.left = patience.saturating_mul(self.tried.max(1)).saturating_mul(self.ratio());
        self.tried = 0;
    }

    /// What a lane that brings nothing is taken to need.
    fn worst(&self) -> u64 {
        match self.cost[By::Kernel as usize] {
            0 => SLOW,
            kernel => WORST.saturating_mul(kernel),
        }
    }

    /// How many times as slow as the quicker way the other one is, 1 to [`WORST`].
    fn ratio(&self) -> u32 {
        let [kernel, lane] = self.cost.map(|cost| cost.max(1));
        (kernel.max(lane) / kernel.min(lane)).min(WORST) as u32
    }
}

fn per_kib(took: u64, bytes: u64) -> u64 {
    (took.saturating_mul(1024) / bytes.max(1)).max(1)
}

#[cfg(test)]
mod tests;
