//! Chooses how a payload in its sender's private memory is transferred: either the kernel copies
//! it, or the sender puts it into the lane. Nothing here blocks, allocates or reads a clock.
//! Callers pass the times, or a function that returns them.
//!
//! The faster path depends on the caches that the two processors share. For 1 MiB, lane and kernel
//! take 66 and 97 us on one core, and 150 and 90 us with a shared last-level cache. Without a
//! shared cache they take 510 and 90 us. Processes migrate and the load varies, so both paths are
//! measured, per peer and length:
//!
//! - The faster path is in use, and is measured again every [`AGAIN`] payloads.
//! - The other path is *tried* from time to time, until one measurement is complete. Trials of a
//!   slower path are rarer, so that they cost at most about 3 %.
//! - The cost of a kernel copy is the duration of its call. The lane carries several payloads at
//!   once, so its cost is the time it was busy divided by the bytes that arrived in that time.
//! - If the lane delivers too little for too long, the next payload ends the trial. Payloads that
//!   were already requested still wait for the sender.
//!
//! Costs are in nanoseconds per KiB. A sample below the average is averaged with it. A sample above
//! the average has a weight of an eighth, because this thread may have been preempted. After a much
//! higher sample, the next payload is measured too.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// `process_vm_readv(2)`.
    Kernel,
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

/// Number of payloads between two measurements of the path in use.
const AGAIN: u32 = 32;

/// Payloads in one measurement of the lane, unless the lane runs empty earlier.
const ENOUGH: u32 = 16;

/// Upper limit of the cost ratio.
const WORST: u64 = 8;

/// Upper limit of a sample, as a multiple of the average.
const OUTLIER: u64 = 2;

/// The assumed cost of a lane that delivers nothing while the kernel's speed is unknown, in
/// nanoseconds per KiB.
const SLOW: u64 = 1000;

/// After trial `n` with `m` payloads, the next trial begins after `PATIENCE[n] * m` payloads, times
/// the [`ratio`](Class::ratio) of the costs. The last entry also applies to all later trials. The
/// first entries are small, because few measurements exist yet.
const PATIENCE: [u32; 5] = [2, 4, 8, 16, 32];

/// Below 16 KiB, below 32 KiB, and so on, up to 2 MiB and more.
const CLASSES: usize = 9;

/// An unfinished measurement of the lane.
#[derive(Clone, Copy, Debug)]
struct Sample {
    began: u64,
    bytes: u64,
    count: u32,
}

#[derive(Clone, Copy, Debug)]
struct Class {
    /// Cost of the kernel and of the lane, in nanoseconds per KiB. 0 means unknown.
    cost: [u64; 2],
    by: By,
    /// Number of payloads until the other path is tried.
    left: u32,
    /// Number of payloads until the path in use is measured.
    measure: u32,
    tried: u32,
    /// Selects the step of [`PATIENCE`].
    trials: u8,
    /// Number of payloads in flight through the lane.
    open: u32,
    sample: Option<Sample>,
}

#[derive(Debug)]
pub(crate) struct PayloadPaths {
    classes: [Class; CLASSES],
}

impl PayloadPaths {
    /// Creates an empty record. The first payload of each class tries the lane.
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
        PayloadPaths { classes: [class; CLASSES] }
    }

    /// Chooses the path of the next payload of `len` bytes, and whether to measure it.
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

    /// Records a kernel copy, and its time in nanoseconds if it was measured.
    pub(crate) fn copied(&mut self, len: usize, took: Option<u64>) {
        let class = self.class(len);
        class.took(By::Kernel);
        if let Some(took) = took {
            class.measured(By::Kernel, per_kib(took, len as u64));
        }
    }

    /// `now` is given if the payload is measured.
    pub(crate) fn asked(&mut self, len: usize, now: Option<u64>) {
        let class = self.class(len);
        class.took(By::Lane);
        class.open += 1;
        if let (Some(began), None) = (now, class.sample) {
            class.sample = Some(Sample { began, bytes: 0, count: 0 });
        }
    }

    /// Records that a payload requested through the lane has arrived or failed.
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
        // A path in use that was never measured stays in use until it is measured.
        if quicker != self.by && kernel != 0 && lane != 0 {
            (self.by, self.left, self.measure, self.tried) = (quicker, AGAIN, AGAIN, 0);
        }
    }

    /// Ends a trial, and schedules the next trial. A longer trial or a slower path delays the next
    /// trial more.
    fn tried_out(&mut self) {
        let patience = PATIENCE[usize::from(self.trials).min(PATIENCE.len() - 1)];
        self.trials = self.trials.saturating_add(1);
        self.left = patience.saturating_mul(self.tried.max(1)).saturating_mul(self.ratio());
        self.tried = 0;
    }

    fn worst(&self) -> u64 {
        match self.cost[By::Kernel as usize] {
            0 => SLOW,
            kernel => WORST.saturating_mul(kernel),
        }
    }

    /// Returns the ratio of the slower path's cost to the faster path's cost, from 1 to [`WORST`].
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
