//! What operations in flight hold, their outcomes, and what is lent to peers.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use fishplate::Issued;
use fishplate::core::engine::protocol::{Request, Status};
use fishplate::core::op::Completion;
use fishplate::node::{Memory, Slice};

use crate::view::View;

/// The result of an operation or a receive.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    /// At once, with the value of a fetch.
    Done(u64),
    Operation(Completion),
    Receive(Status),
}

/// The number of an operation or a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Number {
    Operation(u64),
    Receive(u64),
}

/// An operation or a receive, as its Python object sees it.
#[derive(Debug)]
pub(crate) struct Flight {
    pub number: Option<Number>,
    pub end: OnceLock<End>,
    pub brings: Brings,
}

/// The result of a successful operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Brings {
    Nothing,
    /// The value of a fetch.
    Value,
    /// A message, for a buffer of this many bytes.
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

/// A buffer of the program that the node uses.
pub(crate) struct Lease {
    pub memory: Memory,
    /// The registered view, or the one that the memory is copied to. `None`: a copy that is only
    /// read.
    pub view: Option<Arc<View>>,
    pub copies_out: bool,
}

/// Registered buffers of the program, by the number of their region.
#[derive(Default)]
pub(crate) struct Registered {
    /// Registered buffers, and whether their handle was exported.
    pub now: HashMap<u64, (Arc<View>, bool)>,
    /// Deregistered buffers that peers may still write, because they have imported them.
    pub lent: Vec<Arc<View>>,
}

impl Registered {
    /// Records registered memory.
    pub fn insert(&mut self, memory: Memory, view: Arc<View>) {
        self.now.insert(memory.at(0).region.to_raw(), (view, false));
    }

    /// Records that the handle of memory was exported.
    pub fn exported(&mut self, memory: Memory) {
        if let Some((_, exported)) = self.now.get_mut(&memory.at(0).region.to_raw()) {
            *exported = true;
        }
    }

    /// Splits them after the node is closed: those without users, and those that peers may still
    /// write.
    pub fn into_views(self) -> (Vec<Arc<View>>, Vec<Arc<View>>) {
        let (lent, own): (Vec<_>, Vec<_>) = self.now.into_values().partition(|(_, exported)| *exported);
        let views = |of: Vec<(Arc<View>, bool)>| of.into_iter().map(|(view, _)| view);
        (views(own).collect(), views(lent).chain(self.lent).collect())
    }
}

/// All operations in flight.
#[derive(Default)]
pub(crate) struct Flights {
    pub under_way: HashMap<Number, (Arc<Flight>, Option<Lease>)>,
    /// Complete, but the node still uses the memory.
    pub leaving: Vec<Lease>,
    /// To be released without the node's lock, because an exporter may run Python.
    pub released: Vec<Arc<View>>,
}

impl Flights {
    /// Views without users. Drop them without the node's lock.
    pub fn take_released(&mut self) -> Vec<Arc<View>> {
        std::mem::take(&mut self.released)
    }

    /// All views, after the node is closed.
    pub fn into_views(self) -> Vec<Arc<View>> {
        let leases = self.under_way.into_values().filter_map(|(_, lease)| lease).chain(self.leaving);
        leases.filter_map(|lease| lease.view).chain(self.released).collect()
    }
}

/// An operation that was started.
pub(crate) enum Begun {
    Issued(Issued),
    Posted(Request),
}
