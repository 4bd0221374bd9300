//! Operations in flight, the buffers that they hold, their outcomes, and buffers that peers may
//! write.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use fishplate::Issued;
use fishplate::core::engine::protocol::{Request, Status};
use fishplate::core::op::Completion;
use fishplate::node::{Memory, Slice};

use crate::view::View;

#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Done(u64),
    Operation(Completion),
    Receive(Status),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Number {
    Operation(u64),
    Receive(u64),
}

/// The state of an operation or a receive, shared with its Python object.
#[derive(Debug)]
pub(crate) struct Flight {
    pub number: Option<Number>,
    pub end: OnceLock<End>,
    pub brings: Brings,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Brings {
    Nothing,
    Value,
    /// A message received into a buffer of this many bytes.
    Message(u64),
}

/// The memory of an operation: a range of the node's memory with its length, or a buffer.
pub(crate) enum Held {
    Region(Slice, usize),
    View(Arc<View>),
}

impl Held {
    pub fn len(&self) -> usize {
        match self {
            Held::Region(_, len) => *len,
            Held::View(view) => view.len(),
        }
    }

    /// True if the driver of a device must register the memory first, which may wait.
    pub fn is_on_device(&self) -> bool {
        matches!(self, Held::View(view) if view.is_on_device())
    }
}

pub(crate) struct Lease {
    pub memory: Memory,
    /// The registered view, or the view that receives a copy of the received bytes. `None` if the
    /// operation reads a copy.
    pub view: Option<Arc<View>>,
    pub copies_out: bool,
}

/// Registered buffers of the program, by region number.
#[derive(Default)]
pub(crate) struct Registered {
    /// The flag is true if the memory's handle was exported.
    pub now: HashMap<u64, (Arc<View>, bool)>,
    /// Deregistered buffers that peers may still write, because their handles were exported.
    pub lent: Vec<Arc<View>>,
}

impl Registered {
    pub fn insert(&mut self, memory: Memory, view: Arc<View>) {
        self.now.insert(memory.at(0).region.to_raw(), (view, false));
    }

    pub fn exported(&mut self, memory: Memory) {
        if let Some((_, exported)) = self.now.get_mut(&memory.at(0).region.to_raw()) {
            *exported = true;
        }
    }

    /// Returns the views of a closed node: first the unused views, then the views that peers may
    /// still write.
    pub fn into_views(self) -> (Vec<Arc<View>>, Vec<Arc<View>>) {
        let (lent, own): (Vec<_>, Vec<_>) =
            self.now.into_values().partition(|(_, exported)| *exported);
        let views = |of: Vec<(Arc<View>, bool)>| of.into_iter().map(|(view, _)| view);
        (views(own).collect(), views(lent).chain(self.lent).collect())
    }
}

#[derive(Default)]
pub(crate) struct Flights {
    pub under_way: HashMap<Number, (Arc<Flight>, Option<Lease>)>,
    /// The node still uses their memory.
    pub leaving: Vec<Lease>,
    /// Views to drop without the node's lock, because releasing a view may run Python code.
    pub released: Vec<Arc<View>>,
}

impl Flights {
    pub fn take_released(&mut self) -> Vec<Arc<View>> {
        std::mem::take(&mut self.released)
    }

    pub fn into_views(self) -> Vec<Arc<View>> {
        let leases =
            self.under_way.into_values().filter_map(|(_, lease)| lease).chain(self.leaving);
        leases.filter_map(|lease| lease.view).chain(self.released).collect()
    }
}

pub(crate) enum Begun {
    Issued(Issued),
    Posted(Request),
}
