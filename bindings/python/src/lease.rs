//! Operations in flight, the buffers that they hold, their outcomes, and buffers that peers may
//! write.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use fishplate::core::engine::protocol::{Request, Status};
use fishplate::core::engine::tag::Tag;
use fishplate::core::op::Completion;
use fishplate::node::{Error, Memory, Slice};
use fishplate::{Issued, PeerId};

use crate::view::View;

#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Done(u64),
    Operation(Completion),
    Receive(Status),
    /// The operation could not start.
    Failed(Error),
    /// The receive was cancelled before it started.
    Cancelled,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Number {
    Operation(u64),
    Receive(u64),
}

/// The state of an operation or a receive, shared with its Python object.
#[derive(Debug)]
pub(crate) struct Flight {
    /// Empty if the operation was done at once, or has not started.
    pub number: OnceLock<Number>,
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
#[derive(Clone)]
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

/// A call that sends or receives a message and does not wait for its completion.
#[derive(Clone)]
pub(crate) enum Call {
    Send { to: PeerId, tag: Tag, data: Held },
    Receive { from: Option<PeerId>, tag: Tag, ignore: Tag, into: Held },
}

/// What a call must not overtake: earlier sends to its peer, or earlier receives that may match the
/// same messages. `None` is any peer.
#[derive(Clone, Copy)]
pub(crate) enum Turn {
    Send(Option<PeerId>),
    Receive(Option<PeerId>, Tag, Tag),
}

impl Turn {
    pub fn overlaps(self, other: Turn) -> bool {
        let same = |one: Option<PeerId>, two| one == two || one.is_none() || two.is_none();
        match (self, other) {
            (Turn::Send(one), Turn::Send(two)) => same(one, two),
            (Turn::Receive(one, tag, ignore), Turn::Receive(two, its_tag, its_ignore)) => {
                same(one, two) && (tag ^ its_tag) & !(ignore | its_ignore) == Tag::ZERO
            }
            _ => false,
        }
    }
}

impl Call {
    pub fn turn(&self) -> Turn {
        match *self {
            Call::Send { to, .. } => Turn::Send(Some(to)),
            Call::Receive { from, tag, ignore, .. } => Turn::Receive(from, tag, ignore),
        }
    }

    pub fn peer(&self) -> Option<PeerId> {
        match self {
            Call::Send { to, .. } => Some(*to),
            Call::Receive { from, .. } => *from,
        }
    }

    pub fn held(&self) -> &Held {
        match self {
            Call::Send { data: held, .. } | Call::Receive { into: held, .. } => held,
        }
    }

    pub fn into_view(self) -> Option<Arc<View>> {
        match self {
            Call::Send { data: held, .. } | Call::Receive { into: held, .. } => match held {
                Held::View(view) => Some(view),
                Held::Region(..) => None,
            },
        }
    }
}

/// A call of an event loop that starts when its peer is connected.
pub(crate) struct Later {
    pub call: Call,
    pub flight: Arc<Flight>,
    pub made: Instant,
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
    /// Calls that have not started, in their order.
    pub later: Vec<Later>,
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
        let later = self.later.into_iter().filter_map(|later| later.call.into_view());
        leases.filter_map(|lease| lease.view).chain(later).chain(self.released).collect()
    }
}

pub(crate) enum Begun {
    Issued(Issued),
    Posted(Request),
}
