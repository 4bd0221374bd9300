//! What operations in flight hold, how they ended, and what is lent to peers.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use fishplate::Issued;
use fishplate::core::engine::protocol::{Request, Status};
use fishplate::core::op::Completion;
use fishplate::node::{Memory, Slice};

use crate::view::View;

/// How something ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    /// At once, with the value that a fetch found.
    Done(u64),
    Operation(Completion),
    Receive(Status),
}

/// What is asked for by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Number {
    Operation(u64),
    Receive(u64),
}

/// An operation or a receive, to the object that stands for it.
#[derive(Debug)]
pub(crate) struct Flight {
    pub number: Option<Number>,
    pub end: OnceLock<End>,
    pub brings: Brings,
}

/// What a flight ends with, if all is well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Brings {
    Nothing,
    /// The value that an atomic found.
    Value,
    /// A message, for a buffer of so many bytes.
    Message(u64),
}

/// Memory of the node with its length, or a buffer of the program.
pub(crate) enum Held {
    Region(Slice, usize),
    View(Arc<View>),
}

impl Held {
    /// Its length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Held::Region(_, len) => *len,
            Held::View(view) => view.len(),
        }
    }
}

/// A buffer of the program, in the hands of the node.
pub(crate) struct Lease {
    pub memory: Memory,
    /// What is registered, or what the memory is copied to in the end. None: a copy that is read.
    pub view: Option<Arc<View>>,
    pub copies_out: bool,
}

/// Buffers of the program that it has registered, by the number of their region.
#[derive(Default)]
pub(crate) struct Registered {
    /// Registered, and whether the handle was given out.
    pub now: HashMap<u64, (Arc<View>, bool)>,
    /// Not registered any more; but peers that have imported them write them without asking.
    pub lent: Vec<Arc<View>>,
}

impl Registered {
    /// Takes note of memory that was registered.
    pub fn insert(&mut self, memory: Memory, view: Arc<View>) {
        self.now.insert(memory.at(0).region.to_raw(), (view, false));
    }

    /// The handle of memory was given out.
    pub fn exported(&mut self, memory: Memory) {
        if let Some((_, exported)) = self.now.get_mut(&memory.at(0).region.to_raw()) {
            *exported = true;
        }
    }

    /// Splits them once the node is gone: those that nothing uses, and those that peers may still
    /// write.
    pub fn into_views(self) -> (Vec<Arc<View>>, Vec<Arc<View>>) {
        let (lent, own): (Vec<_>, Vec<_>) = self.now.into_values().partition(|(_, exported)| *exported);
        let views = |of: Vec<(Arc<View>, bool)>| of.into_iter().map(|(view, _)| view);
        (views(own).collect(), views(lent).chain(self.lent).collect())
    }
}

/// All that is in flight.
#[derive(Default)]
pub(crate) struct Flights {
    pub under_way: HashMap<Number, (Arc<Flight>, Option<Lease>)>,
    /// Ended, but the node still uses the memory.
    pub leaving: Vec<Lease>,
    /// To be released outside of the node's lock: an exporter may run Python.
    pub released: Vec<Arc<View>>,
}

impl Flights {
    /// Views that nothing uses any more. Dropped outside of the node's lock.
    pub fn take_released(&mut self) -> Vec<Arc<View>> {
        std::mem::take(&mut self.released)
    }

    /// The same after the node is gone: nothing uses any.
    pub fn into_views(self) -> Vec<Arc<View>> {
        let leases = self.under_way.into_values().filter_map(|(_, lease)| lease).chain(self.leaving);
        leases.filter_map(|lease| lease.view).chain(self.released).collect()
    }
}

/// What the node has begun to do.
pub(crate) enum Begun {
    Issued(Issued),
    Posted(Request),
}
