//! Tells the program when a rail to a peer fails or returns: [`Builder::on_rail_event`].

use std::fmt;
use std::mem::forget;
use std::panic::{AssertUnwindSafe, RefUnwindSafe, UnwindSafe, catch_unwind};
use std::sync::Arc;

use fishplate_core::engine::{RailChange, RailStats};
use fishplate_core::mem::{PeerId, RailId};

use super::home::NodeEngine;
use super::rails::last_error;
use super::{Builder, Driver, Node, RailError, RailInfo};

/// A rail to a peer that has failed or returned. Its [`Display`](fmt::Display) is one line for a
/// log.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RailEvent<'a> {
    /// The peer.
    pub peer: PeerId,
    /// The rail.
    pub rail: &'a RailInfo,
    /// The reason why the rail is out of use, or `None` if it is in use again.
    pub error: Option<RailError>,
}

impl fmt::Display for RailEvent<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RailInfo { id, provider, interface, .. } = self.rail;
        let peer = self.peer.peer().0;
        write!(f, "rail {} ({provider} on {interface}) to peer {peer} is ", id.0)?;
        match &self.error {
            Some(error) => write!(f, "out of use: {}", error.why()),
            None => f.write_str("in use again"),
        }
    }
}

#[derive(Clone)]
pub(super) struct Callback(Arc<dyn Fn(&RailEvent<'_>) + Send + Sync>);

// A function that has panicked is not called again.
impl UnwindSafe for Callback {}
impl RefUnwindSafe for Callback {}

impl fmt::Debug for Callback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Callback")
    }
}

/// The node's callback, and what its events name.
#[derive(Default)]
pub(super) struct Events {
    callback: Option<Callback>,
    rails: Vec<RailInfo>,
}

impl Events {
    pub fn new(callback: Option<Callback>, rails: &[RailInfo], engine: &mut NodeEngine) -> Events {
        if callback.is_some() {
            engine.report_rail_changes();
        }
        Events { callback, rails: rails.to_vec() }
    }

    pub fn report(&mut self, engine: &mut NodeEngine) {
        let Some(Callback(callback)) = &self.callback else { return };
        while let Some(RailChange { peer, rail, error }) = engine.next_rail_change() {
            let at = usize::from(rail.0).checked_sub(1);
            let Some(info) = at.and_then(|at| self.rails.get(at)) else { continue };
            let provider = last_error(engine, rail);
            let error = error.map(|fault| RailError { rail, fault, provider });
            let event = RailEvent { peer, rail: info, error };
            // The panic hook has reported a panic.
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| callback(&event))) {
                // Leaks the payload, because dropping it may panic.
                forget(payload);
                self.callback = None;
                return;
            }
        }
    }
}

impl Builder {
    /// Sets a function that the node calls when a libfabric rail to a peer with
    /// [failover](Self::failover) fails or returns, also when the peer fails with its last rail.
    /// The [event](RailEvent) prints as one line for a log. A rail that has failed and returned
    /// since the last call causes one event, with its present state. Default: none.
    ///
    /// The node calls the function in its own calls, in the thread that makes them, or in the
    /// thread of its [worker](Self::worker). Meanwhile the node makes no progress, so the function
    /// should not block. It must not use the node: with a worker, it would wait for itself forever.
    /// If it panics, the node catches the panic and does not call it again.
    ///
    /// ```no_run
    /// # use fishplate::Node;
    /// let node = Node::builder().on_rail_event(|event| eprintln!("{event}")).open()?;
    /// # Ok::<(), fishplate::node::OpenError>(())
    /// ```
    pub fn on_rail_event(
        mut self,
        callback: impl Fn(&RailEvent<'_>) + Send + Sync + 'static,
    ) -> Self {
        self.on_rail_event = Some(Callback(Arc::new(callback)));
        self
    }
}

impl Node {
    /// Returns the counters of a rail, or `None` if there is no such rail.
    pub fn rail_stats(&self, rail: RailId) -> Option<RailStats> {
        if let Driver::Worker(worker) = &self.driver {
            return worker.call(|node| node.rail_stats(rail)).ok().flatten();
        }
        self.home.engine.rail_stats(rail)
    }
}
