//! Settings and counters of a fake driver.

use std::ops::Index;

/// Settings of a fake driver.
#[derive(Clone, Copy, Debug)]
pub struct Behaviour {
    /// Number of devices. Fixed when the driver is created.
    pub devices: u32,
    /// Memory size of each device, in bytes.
    pub memory: u64,
    /// The kind of memory that [`Device::alloc`](crate::Device::alloc) allocates.
    pub kind: MemoryKind,
    /// Whether freed addresses are reused, the last freed first.
    pub recycle: bool,
    /// Whether handles made from different addresses in an allocation differ, as with HIP but not
    /// CUDA.
    pub handles_differ: bool,
    /// Whether a process may open an allocation repeatedly. Every open then returns the same
    /// address and needs its own close. If false, a second open fails with the driver's code for
    /// "already mapped", 208.
    pub reopen: bool,
    /// Whether freed memory is overwritten.
    pub poison: bool,
    /// Maximum number of steps before a copy begins, chosen at random for each copy. With 0 a copy
    /// finishes in the call that queues it.
    pub late: u32,
    /// Maximum number of steps that a copy takes after it has begun.
    pub pieces: u32,
    /// Whether the processor may access device memory, at the address that
    /// [`Device::host_view`](crate::Device::host_view) returns.
    pub host_view: bool,
    /// Whether [`Device::write_word`](crate::Device::write_word) is supported.
    pub write_word: bool,
    /// Whether NIC writes become visible only at the next flush.
    pub must_flush: bool,
    /// Whether device memory can be exported to NICs as a dmabuf descriptor.
    pub dmabuf: bool,
    /// Number of streams of a [`FakeDevice`](super::FakeDevice).
    pub streams: u8,
    /// Maximum number of outstanding marks of a [`FakeDevice`](super::FakeDevice), up to 65,536.
    pub marks: u32,
    /// Granularity of virtual memory in bytes, a power of two.
    pub granule: u64,
    /// Size of the physical segments of [`MemoryKind::Segments`] in bytes, a multiple of the
    /// granule.
    pub segment: u64,
    /// Returns the number of steps that a call takes.
    pub cost: fn(Call) -> u64,
}

impl Behaviour {
    /// Two devices. Each copy finishes in the call that queues it.
    pub const PLAIN: Behaviour = Behaviour {
        devices: 2,
        memory: 1 << 34,
        kind: MemoryKind::Legacy,
        recycle: true,
        handles_differ: false,
        reopen: false,
        poison: true,
        late: 0,
        pieces: 1,
        host_view: false,
        write_word: true,
        must_flush: false,
        dmabuf: false,
        streams: 4,
        marks: 64,
        granule: 1 << 16,
        segment: 1 << 16,
        cost: Call::steps,
    };

    /// Like [`Self::PLAIN`], but copies finish late, in pieces, and out of order across streams.
    pub const LATE: Behaviour = Behaviour { late: 12, pieces: 4, ..Self::PLAIN };
}

impl Default for Behaviour {
    fn default() -> Self {
        Self::PLAIN
    }
}

/// Kinds of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Memory of `cuMemAlloc`, exported by a handle of 64 bytes.
    Legacy,
    /// Memory of `cuMemCreate`, exported by descriptors.
    Virtual,
    /// Memory of `cuMemCreate` in adjacent physical segments, like the growing pools of frameworks.
    Segments,
    /// Memory of `cuMemCreate` without a handle type, so it cannot be exported.
    VirtualUnshared,
    /// Memory of `cuMemAllocAsync`.
    Pool,
    /// Memory of `cuMemAllocManaged`.
    Managed,
}

/// The driver calls that are counted and can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "named after the methods of `Device`")]
pub enum Call {
    Alloc,
    Free,
    Allocation,
    Export,
    Open,
    Close,
    Pin,
    Unpin,
    Copy,
    WriteWord,
    Mark,
    Reached,
    Ring,
    Flush,
}

impl Call {
    /// All kinds of calls.
    pub const ALL: [Call; 14] = [
        Call::Alloc,
        Call::Free,
        Call::Allocation,
        Call::Export,
        Call::Open,
        Call::Close,
        Call::Pin,
        Call::Unpin,
        Call::Copy,
        Call::WriteWord,
        Call::Mark,
        Call::Reached,
        Call::Ring,
        Call::Flush,
    ];

    /// Returns the usual duration of this call in real drivers, in steps. A step is about a
    /// microsecond.
    pub fn steps(self) -> u64 {
        match self {
            Call::Alloc | Call::Free | Call::Pin | Call::Unpin => 100,
            Call::Export => 250,
            Call::Open => 500,
            Call::Close => 1000,
            _ => 1,
        }
    }
}

/// Number of driver calls of each kind, including failed calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls([u64; Call::ALL.len()]);

impl Index<Call> for Calls {
    type Output = u64;

    fn index(&self, call: Call) -> &u64 {
        &self.0[call as usize]
    }
}

impl Calls {
    pub(super) fn add(&mut self, call: Call) {
        self.0[call as usize] += 1;
    }

    /// Returns the total number of calls.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Returns the calls that were made since `earlier`.
    pub fn since(&self, earlier: &Calls) -> Calls {
        Calls(std::array::from_fn(|at| self.0[at] - earlier.0[at]))
    }

    fn with(&self, other: &Calls) -> Calls {
        Calls(std::array::from_fn(|at| self.0[at] + other.0[at]))
    }
}

/// Counters of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of driver calls, by kind.
    pub calls: Calls,
    /// Number of allocations, counting each segment.
    pub allocs: u64,
    /// Number of freed allocations, counting each segment.
    pub frees: u64,
    /// Number of allocations leaked on purpose.
    pub kept: u64,
    /// Number of successful opens, counting each segment.
    pub opens: u64,
    /// Number of successful closes.
    pub closes: u64,
    /// Number of reserved address ranges.
    pub reserves: u64,
    /// Number of released address ranges.
    pub releases: u64,
    /// Number of mappings closed by the death of the process.
    pub closed_by_death: u64,
    /// Number of pinned host ranges.
    pub pins: u64,
    /// Number of unpinned host ranges.
    pub unpins: u64,
    /// Number of marks that were set.
    pub marks: u64,
    /// Number of marks that were freed.
    pub marks_back: u64,
    /// Number of copied bytes.
    pub bytes: u64,
    /// Number of copies and words that finished before older copies and words of the same process.
    pub reordered: u64,
    /// Number of calls that waited for all streams of the device.
    pub waits: u64,
    /// Number of copies and words queued on the memory of killed processes.
    pub orphans_touched: u64,
}

impl Counts {
    /// Returns the number of allocations, opened allocations, reserved address ranges, pinned
    /// ranges and marks that are still held.
    pub fn held(&self) -> u64 {
        let back = self.frees + self.closes + self.closed_by_death + self.releases + self.unpins;
        self.allocs + self.opens + self.reserves + self.pins + self.marks - back - self.marks_back
    }

    pub(super) fn with(&self, other: &Counts) -> Counts {
        Counts {
            calls: self.calls.with(&other.calls),
            allocs: self.allocs + other.allocs,
            frees: self.frees + other.frees,
            kept: self.kept + other.kept,
            opens: self.opens + other.opens,
            closes: self.closes + other.closes,
            closed_by_death: self.closed_by_death + other.closed_by_death,
            reserves: self.reserves + other.reserves,
            releases: self.releases + other.releases,
            pins: self.pins + other.pins,
            unpins: self.unpins + other.unpins,
            marks: self.marks + other.marks,
            marks_back: self.marks_back + other.marks_back,
            bytes: self.bytes + other.bytes,
            reordered: self.reordered + other.reordered,
            waits: self.waits + other.waits,
            orphans_touched: self.orphans_touched + other.orphans_touched,
        }
    }
}

/// A misuse that real drivers do not report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Violation {
    /// Memory was freed while another process had it open.
    FreedWhileOpen,
    /// Memory was freed, closed or unpinned while queued work used it.
    TakenFromQueue,
    /// A copy used a mapping of memory that its owner had freed.
    Stale,
    /// A copy or a word accessed an unmapped address, or addresses outside of an allocation.
    OutOfRange,
    /// The two ranges of a copy overlapped.
    Overlap,
    /// A word was misaligned.
    Misaligned,
    /// A call named a mark that is not outstanding.
    UnknownMark,
    /// The device has no such stream.
    UnknownStream,
    /// A call freed memory that was not allocated, or that a different call must free.
    NotTaken,
}
