//! A node, and the buffers that its operations hold. Callers hold the node's lock, with or without
//! the GIL.
//!
//! A buffer of the program is registered while an operation reads or writes it. Its view is
//! released after the node has deregistered it. If a provider keeps the memory forever, the process
//! keeps the view forever. A buffer of the host that cannot be registered is copied.

use std::ptr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use fishplate::core::engine::protocol::{Cancelled, Received, Request, Status};
use fishplate::core::error::{AttachError, OpError};
use fishplate::core::op::{Completion, Outcome, Token};
use fishplate::gpu::{DeviceError, DevicePtr};
use fishplate::node::{Error, Gpu, Memory, Slice, Source};
use fishplate::{Issued, Node, Notice, PeerId};

use crate::dlpack::On;
use crate::error::Fault;
use crate::lease::{
    Begun, Brings, Call, End, Flight, Flights, Held, Later, Lease, Number, Registered, Turn,
};
use crate::view::{Place, View, zeroed};

fn elsewhere(theirs: On, ours: On) -> Fault {
    let text = format!(
        "the tensor is on {theirs}, but the node's device is {ours}; use one device for both"
    );
    Fault::Misuse("device_memory", text)
}

pub(crate) struct Inner {
    pub node: Node,
    pub flights: Flights,
    /// Maximum time that an operation waits for room, and for its peer to connect.
    pub patience: Duration,
    pub connect_timeout: Duration,
    pub registered: Registered,
    pub gpu: Option<Gpu>,
    /// Device memory of the node. Each tensor over the memory holds a clone of the `Arc`.
    pub devices: Vec<(Memory, Arc<()>)>,
    /// The peers not yet disconnected, and whether any peer was ever disconnected. A disconnected
    /// peer may still write memory that it imported.
    pub peers: Vec<PeerId>,
    pub disconnected: bool,
}

impl Inner {
    pub fn patiently<T>(
        &mut self,
        patience: Duration,
        call: impl FnOnce(&mut Inner) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        self.node.progress();
        self.reap();
        self.node.set_patience(patience)?;
        let done = call(self);
        self.node.set_patience(Duration::ZERO)?;
        done
    }

    /// Returns how long to retry a call that fails with this error.
    pub fn limit(&self, fault: &Fault) -> Duration {
        match (fault.is_unmet(), fault.may_pass()) {
            (true, _) => self.connect_timeout,
            (false, true) => self.patience,
            (false, false) => Duration::ZERO,
        }
    }

    /// Starts an operation on the node's memory or on a buffer. A buffer stays registered until the
    /// operation completes. `writes` is true if the operation writes to the buffer.
    pub fn begin(
        &mut self,
        held: &Held,
        writes: bool,
        begin: impl FnOnce(&mut Node, Slice) -> Result<Begun, Fault>,
    ) -> Result<Arc<Flight>, Fault> {
        let (range, lease) = match held {
            Held::Region(range, _) => (*range, None),
            Held::View(view) => {
                self.lend(view, writes).map(|(range, lease)| (range, Some(lease)))?
            }
        };
        match begin(&mut self.node, range) {
            Ok(Begun::Issued(issued)) => Ok(self.issued(issued, Brings::Nothing, lease)),
            Ok(Begun::Posted(request)) => {
                let brings = Brings::Message(held.len() as u64);
                Ok(self.depart(Number::Receive(request.to_raw()), brings, lease))
            }
            Err(fault) => {
                lease.into_iter().for_each(|lease| self.leave(lease));
                Err(fault)
            }
        }
    }

    /// Fails if earlier calls, which it must not overtake, have not started.
    pub fn in_turn(&self, turn: Turn) -> Result<(), Fault> {
        match self.first_before(turn, self.flights.later.len()) {
            Some(first) => Err(self.unmet(first)),
            None => Ok(()),
        }
    }

    fn first_before(&self, turn: Turn, end: usize) -> Option<usize> {
        self.flights.later[..end].iter().position(|later| later.call.turn().overlaps(turn))
    }

    /// Returns why a kept call has not started. A call waits for those before it that it must not
    /// overtake, and the first of these waits for its peer to connect. If that is a receive from
    /// any peer, it waits for room instead. Then blames the first peer, because callers retry this
    /// error.
    fn unmet(&self, mut at: usize) -> Fault {
        while let Some(first) = self.first_before(self.flights.later[at].call.turn(), at) {
            at = first;
        }
        let peer = self.flights.later[at].call.peer().or(self.peers.first().copied());
        peer.map_or(OpError::Again.into(), |peer| Fault::Node(Error::NotConnected(peer)))
    }

    /// Starts to send or to receive a message.
    pub fn start(&mut self, call: &Call) -> Result<Arc<Flight>, Fault> {
        self.in_turn(call.turn())?;
        match *call {
            Call::Receive { from, tag, ignore, ref into } => {
                self.begin(into, true, |node, into| {
                    Ok(Begun::Posted(node.post_recv(from, tag, ignore, into, 0)?))
                })
            }
            Call::Send { to, tag, data: Held::View(ref view) } if view.is_on_device() => {
                let copy = self.copy_of(view)?;
                let sent = self.node.send(to, tag, &copy[..], Notice::Silent)?;
                Ok(self.issued(sent, Brings::Nothing, None))
            }
            // The bytes cannot change, or the node copies them, so the view need not outlive the
            // call.
            Call::Send { to, tag, data: Held::View(ref view) }
                if view.is_readonly() || view.len() <= self.node.eager_max(to) =>
            {
                let sent = self.node.send(to, tag, view.bytes(), Notice::Silent)?;
                Ok(self.issued(sent, Brings::Nothing, None))
            }
            Call::Send { to, tag, ref data } => self.begin(data, false, |node, from| {
                Ok(Begun::Issued(node.send(to, tag, from, Notice::Report(0))?))
            }),
        }
    }

    /// Keeps a call until its peer is connected.
    pub fn defer(&mut self, call: &Call) -> Arc<Flight> {
        let brings = match call {
            Call::Send { .. } => Brings::Nothing,
            Call::Receive { into, .. } => Brings::Message(into.len() as u64),
        };
        let flight = Arc::new(Flight { number: OnceLock::new(), end: OnceLock::new(), brings });
        let (call, made) = (call.clone(), Instant::now());
        self.flights.later.push(Later { call, flight: flight.clone(), made });
        flight
    }

    /// Starts the calls whose peers have connected. A call that cannot start in time fails.
    fn start_later(&mut self) {
        for later in std::mem::take(&mut self.flights.later) {
            match self.start(&later.call) {
                Ok(begun) => match (begun.number.get(), begun.end.get()) {
                    (Some(number), None) => {
                        _ = later.flight.number.set(*number);
                        if let Some((flight, _)) = self.flights.under_way.get_mut(number) {
                            *flight = later.flight;
                        }
                    }
                    (_, end) => _ = later.flight.end.set(end.copied().unwrap_or(End::Done(0))),
                },
                Err(fault) if later.made.elapsed() < self.limit(&fault) => {
                    self.flights.later.push(later);
                    continue;
                }
                Err(Fault::Node(error)) => _ = later.flight.end.set(End::Failed(error)),
                Err(_) => _ = later.flight.end.set(End::Failed(OpError::StaleToken.into())),
            }
            self.flights.released.extend(later.call.into_view());
        }
    }

    /// Cancels a receive. Returns false if it has matched a message.
    pub fn cancel(&mut self, flight: &Arc<Flight>) -> Result<bool, Fault> {
        let of = |later: &Later| Arc::ptr_eq(&later.flight, flight);
        if let Some(at) = self.flights.later.iter().position(of)
            && matches!(self.flights.later[at].call, Call::Receive { .. })
        {
            let later = self.flights.later.remove(at);
            _ = flight.end.set(End::Cancelled);
            self.flights.released.extend(later.call.into_view());
            return Ok(true);
        }
        let Some(Number::Receive(raw)) = flight.number.get() else {
            return Err(Fault::Misuse("argument", "only receives can be cancelled".into()));
        };
        let cancelled = self.node.cancel(Request::from_raw(*raw))?;
        self.reap();
        Ok(cancelled == Cancelled::Removed)
    }

    /// Issues a silent operation that reads device memory of the program. The memory stays
    /// registered until the node no longer uses it.
    #[cold]
    pub fn issue_from_device(
        &mut self,
        view: &Arc<View>,
        issue: impl FnOnce(&mut Node, Source<'_>) -> Result<Issued, Fault>,
    ) -> Result<(), Fault> {
        let (from, lease) = self.lend(view, false)?;
        let issued = issue(&mut self.node, Source::Memory(from));
        self.leave(lease);
        issued.map(drop)
    }

    /// Copies device memory of the program, to send it. If a receiver read the memory directly, the
    /// receiver could keep it open after the program frees it.
    #[cold]
    pub fn copy_of(&mut self, view: &Arc<View>) -> Result<Vec<u8>, Fault> {
        // Registers first: an array may say that it is longer than any memory.
        let (memory, offset) = self.register(view)?;
        let copied = zeroed(view.len()).and_then(|mut bytes| {
            self.node.read_device(memory.at(offset as u64), &mut bytes)?;
            Ok(bytes)
        });
        self.leave(Lease { memory, view: Some(view.clone()), copies_out: false });
        copied
    }

    /// Registers a view as memory of the node. If it is in device memory, the range starts at
    /// a multiple of 8 at or before the view, and the result is the offset of the view.
    pub fn register(&mut self, view: &View) -> Result<(Memory, usize), Fault> {
        let Place::Device(on) = view.place() else {
            // SAFETY: the callers hold the view until the node has deregistered it, or forever if
            // the node does not. This process accesses the bytes through Python and by raw copies
            // only.
            return Ok((unsafe { self.node.register(view.start(), view.len()) }?, 0));
        };
        if let (Some(ours), Some(theirs)) = (self.gpu.map(On::of), on)
            && ours != theirs
        {
            return Err(elsewhere(theirs, ours));
        }
        let at = view.start().as_ptr().addr();
        let offset = at % 8;
        // SAFETY: callers hold the view as above. The driver aligns allocations to more than 8
        // bytes, so the bytes before the view belong to the same allocation. Nothing accesses those
        // bytes.
        let registered = unsafe {
            self.node.register_device(DevicePtr((at - offset) as u64), offset + view.len())
        };
        match (registered, self.gpu.map(On::of)) {
            (Err(Error::Device(DeviceError::OtherDevice { owner, .. })), Some(ours)) => {
                Err(elsewhere(ours.with_number(owner), ours))
            }
            (registered, _) => Ok((registered?, offset)),
        }
    }

    fn lend(&mut self, view: &Arc<View>, writes: bool) -> Result<(Slice, Lease), Fault> {
        let (len, view) = (view.len(), view.clone());
        if view.is_on_device() {
            let (memory, offset) = self.register(&view)?;
            let lease = Lease { memory, view: Some(view), copies_out: false };
            return Ok((memory.slice(offset..), lease));
        }
        if len != 0 && !view.is_readonly() && view.start().as_ptr().addr().is_multiple_of(8) {
            let (memory, _) = self.register(&view)?;
            return Ok((memory.slice(..), Lease { memory, view: Some(view), copies_out: false }));
        }
        let memory = self.node.alloc(len.max(1))?;
        let view = match writes {
            true => Some(view),
            false => {
                self.node.write(memory.at(0), view.bytes())?;
                None
            }
        };
        Ok((memory.slice(..len), Lease { memory, view, copies_out: writes }))
    }

    /// Keeps the lease of an incomplete operation.
    pub fn issued(&mut self, issued: Issued, brings: Brings, lease: Option<Lease>) -> Arc<Flight> {
        let value = match issued {
            Issued::Done { value } => value,
            // A silent operation: the node has copied its bytes.
            Issued::Pending(Token::NONE) => 0,
            Issued::Pending(token) => {
                return self.depart(Number::Operation(token.to_raw()), brings, lease);
            }
        };
        let end = End::Done(value);
        if let Some(lease) = lease {
            self.land(lease, end);
        }
        Arc::new(Flight { number: OnceLock::new(), end: OnceLock::from(end), brings })
    }

    fn depart(&mut self, number: Number, brings: Brings, lease: Option<Lease>) -> Arc<Flight> {
        let (number_of, end) = (OnceLock::from(number), OnceLock::new());
        let flight = Arc::new(Flight { number: number_of, end, brings });
        self.flights.under_way.insert(number, (flight.clone(), lease));
        flight
    }

    pub fn reap(&mut self) {
        while let Some(end) = self.node.next_completion() {
            self.ended(Number::Operation(end.token.to_raw()), End::Operation(end));
        }
        while let Some(end) = self.node.next_recv() {
            self.ended(Number::Receive(end.request.to_raw()), End::Receive(end));
        }
        self.leave_later();
        if !self.flights.later.is_empty() {
            self.start_later();
        }
    }

    pub fn leave_later(&mut self) {
        for lease in std::mem::take(&mut self.flights.leaving) {
            self.leave(lease);
        }
    }

    fn ended(&mut self, number: Number, end: End) {
        let Some((flight, lease)) = self.flights.under_way.remove(&number) else { return };
        if let Some(lease) = lease {
            self.land(lease, end);
        }
        // Set last: a thread that sees the completion expects the received bytes in place.
        let _ = flight.end.set(end);
    }

    pub fn wait_for(&mut self, flight: &Flight, timeout: Duration) -> Result<End, Fault> {
        if let Some(end) = flight.end.get() {
            return Ok(*end);
        }
        match flight.number.get().copied() {
            Some(number @ Number::Operation(raw)) => {
                let end = self.node.wait_completion(Token::from_raw(raw), timeout)?;
                self.ended(number, End::Operation(end));
            }
            Some(number @ Number::Receive(raw)) => {
                let end = self.node.wait_recv(Request::from_raw(raw), timeout)?;
                self.ended(number, End::Receive(end));
            }
            None => {
                let of = |later: &Later| ptr::eq(&*later.flight, flight);
                if let Some(at) = self.flights.later.iter().position(of) {
                    return Err(self.unmet(at));
                }
            }
        }
        flight.end.get().copied().ok_or(OpError::StaleToken.into())
    }

    fn land(&mut self, lease: Lease, end: End) {
        let arrived = match end {
            End::Receive(Status {
                outcome: Received::Ok | Received::Truncated, delivered, ..
            }) => delivered,
            End::Operation(Completion { outcome: Outcome::Done, .. }) | End::Done(_) => u64::MAX,
            _ => 0,
        };
        if let Some(view) = lease.view.as_ref().filter(|_| lease.copies_out) {
            let len = view.len().min(usize::try_from(arrived).unwrap_or(usize::MAX));
            // SAFETY: a lease that copies out has a writable view, which no other lease uses.
            let into = unsafe { &mut view.bytes_mut()[..len] };
            // Cannot fail: the memory is still registered, and at least as long as `into`.
            let _ = self.node.read(lease.memory.at(0), into);
        }
        self.leave(lease);
    }

    /// Releases the memory of a lease. If the node still uses the memory, releases it later.
    fn leave(&mut self, lease: Lease) {
        match self.node.free(lease.memory) {
            Err(Error::Attach(AttachError::InUse(_))) => self.flights.leaving.push(lease),
            // A provider still uses the memory, so its view must stay forever.
            Err(Error::Attach(AttachError::Kept(_))) => std::mem::forget(lease.view),
            _ => self.flights.released.extend(lease.view),
        }
    }

    /// Removes the record of freed memory. If `kept`, a provider still uses the memory, so its view
    /// is never dropped.
    pub fn forget(&mut self, memory: Memory, kept: bool) {
        self.devices.retain(|(known, _)| *known != memory);
        match self.registered.now.remove(&memory.at(0).region.to_raw()) {
            Some((view, _)) if kept => std::mem::forget(view),
            Some((view, true)) => self.registered.lent.push(view),
            Some((view, false)) => self.flights.released.push(view),
            None => {}
        }
    }
}
