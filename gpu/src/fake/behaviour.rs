//! What can be chosen of a fake driver, and what it counts.

use std::ops::Index;

/// How a fake driver behaves.
#[derive(Clone, Copy, Debug)]
pub struct Behaviour {
    /// Devices of the machine. Fixed once it exists.
    pub devices: u32,
    /// Bytes that each device has.
    pub memory: u64,
    /// What [`Device::alloc`](crate::Device::alloc) gives.
    pub kind: MemoryKind,
    /// Whether addresses that were given back are given again, the last one first.
    pub recycle: bool,
    /// Whether handles made from different addresses of an allocation differ, as HIP's do; else
    /// they are equal, as CUDA's are.
    pub handles_differ: bool,
    /// Whether a process may open an allocation again: each open wants its close, and all give the
    /// same address. Else the driver refuses with its code for "already mapped", 208.
    pub reopen: bool,
    /// Whether memory that is given back is overwritten.
    pub poison: bool,
    /// Most steps that a copy waits for, drawn anew for each;
    /// 0 ends it within the call that queues it.
    pub late: u32,
    /// Steps that a copy is spread over at most, once it began.
    pub pieces: u32,
    /// Whether the processor may touch memory of the device, through the address that
    /// [`Device::host_view`](crate::Device::host_view) tells.
    pub host_view: bool,
    /// Whether words can be stored in stream order.
    pub write_word: bool,
    /// Whether what a NIC writes must be flushed.
    pub must_flush: bool,
    /// Whether memory can be handed to a NIC by a descriptor.
    pub dmabuf: bool,
    /// Streams of a [`FakeDevice`](super::FakeDevice).
    pub streams: u8,
    /// Marks of a [`FakeDevice`](super::FakeDevice) that can be outstanding at once, up to 65,536.
    pub marks: u32,
    /// What sizes of virtual memory are multiples of: a power of two.
    pub granule: u64,
    /// Size of the physical segments of [`MemoryKind::Segments`]: a multiple of the granule.
    pub segment: u64,
    /// Steps that a call takes.
    pub cost: fn(Call) -> u64,
}

impl Behaviour {
    /// A well-behaved driver with two devices whose copies end at once.
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

    /// The same with copies that end late, in pieces, and out of order over the streams.
    pub const LATE: Behaviour = Behaviour { late: 12, pieces: 4, ..Self::PLAIN };
}

impl Default for Behaviour {
    fn default() -> Self {
        Self::PLAIN
    }
}

/// Kinds of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// `cuMemAlloc`: by a handle of 64 bytes.
    Legacy,
    /// `cuMemCreate` with descriptors.
    Virtual,
    /// The same in physical segments side by side, as the pools of frameworks that grow have it.
    Segments,
    /// `cuMemCreate` without a type of handle.
    VirtualUnshared,
    /// `cuMemAllocAsync`.
    Pool,
    /// `cuMemAllocManaged`.
    Managed,
}

/// Calls of a driver.
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
    Flush,
}

impl Call {
    /// All of them.
    pub const ALL: [Call; 13] = [
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
        Call::Flush,
    ];

    /// Steps that it takes in a driver like those that there are: a step is about a microsecond.
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

/// How often each call was made, failed ones too.
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

    /// All calls together.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Those made since `earlier`.
    pub fn since(&self, earlier: &Calls) -> Calls {
        Calls(std::array::from_fn(|at| self.0[at] - earlier.0[at]))
    }

    fn with(&self, other: &Calls) -> Calls {
        Calls(std::array::from_fn(|at| self.0[at] + other.0[at]))
    }
}

/// What a process did, and what it has not given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls by kind.
    pub calls: Calls,
    /// Allocations that were taken; of segments each.
    pub allocs: u64,
    /// Allocations that were given back.
    pub frees: u64,
    /// Allocations that were left for good.
    pub kept: u64,
    /// Opens that succeeded; of segments each.
    pub opens: u64,
    /// Closes that succeeded.
    pub closes: u64,
    /// Addresses that were reserved.
    pub reserves: u64,
    /// Reserved addresses that were given back.
    pub releases: u64,
    /// What the death of the process closed.
    pub closed_by_death: u64,
    /// Host memory that was pinned.
    pub pins: u64,
    /// Host memory that was given back.
    pub unpins: u64,
    /// Marks that were set.
    pub marks: u64,
    /// Marks that were given back.
    pub marks_back: u64,
    /// Bytes that copies moved.
    pub bytes: u64,
    /// Copies and words that ended before older ones of the process.
    pub reordered: u64,
    /// Calls that waited for all streams of the device.
    pub waits: u64,
    /// Copies and words queued on memory whose owner had died.
    pub orphans_touched: u64,
}

impl Counts {
    /// Allocations, opened allocations, reserved addresses, pinned memory and marks not given back.
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

/// What a program did that a real driver would not forgive, or not notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Violation {
    /// Memory was freed that another process had open.
    FreedWhileOpen,
    /// Memory was freed, closed or unpinned that something queued uses.
    TakenFromQueue,
    /// A copy through a mapping whose memory its owner has freed.
    Stale,
    /// A copy or a word beyond the end of an allocation, or at no address at all.
    OutOfRange,
    /// The two ranges of a copy overlap.
    Overlap,
    /// A word that is not aligned.
    Misaligned,
    /// A mark that is not outstanding.
    UnknownMark,
    /// A stream that the device does not have.
    UnknownStream,
    /// Something was given back that was not taken, or as what it is not.
    NotTaken,
}
