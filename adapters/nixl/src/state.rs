//! The state of an agent: its node, its memory and that of its peers. One lock protects it, which
//! is never held while something waits for a peer.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use fishplate::Node;

use crate::buffers::Buffers;
use crate::intro::{Export, Info};
use crate::memory::{Away, Local};
use crate::notes::Notes;
use crate::packed::Sides;
use crate::peer::Peer;
use crate::slab::Slab;
use crate::status::Status;
use crate::transfer::Transfer;

/// How long memory is waited for that operations still use.
pub(crate) const SETTLE: Duration = Duration::from_secs(5);

/// Passes between two reads of the clock.
const PASSES: u32 = 16;

/// Between two looks whether peers live.
const LOOK: Duration = Duration::from_millis(20);

/// How long calls poll in vain before each yields the processor, which the peer may need.
const SPIN: Duration = Duration::from_micros(200);

/// What is shared with the threads of an agent. `None`: it is closed.
pub(crate) struct Shared(Mutex<Option<State>>);

impl Shared {
    /// Shares a state.
    pub fn new(state: State) -> Arc<Shared> {
        let shared = Arc::new(Shared(Mutex::new(Some(state))));
        let itself = Arc::downgrade(&shared);
        shared.with(|state| state.itself = itself);
        shared
    }

    /// Takes the state out: the agent is closed.
    pub fn take(&self) -> Option<State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Calls with the state. `None`: the agent is closed, or a call on it has panicked.
    pub fn with<T>(&self, call: impl FnOnce(&mut State) -> T) -> Option<T> {
        self.0.lock().ok()?.as_mut().map(call)
    }
}

/// The state of an agent.
pub(crate) struct State {
    pub node: Node,
    pub name: Vec<u8>,
    pub info: Info,
    pub itself: Weak<Shared>,
    pub peers: Slab<Peer>,
    pub locals: Slab<Local>,
    pub aways: Slab<Away>,
    pub transfers: Slab<Transfer>,
    /// Transfers in progress.
    pub moving: Vec<u64>,
    pub notes: Notes,
    pub buffers: Buffers,
    passes: u32,
    looked: Instant,
    /// Since when nothing has happened.
    idle: Option<Instant>,
    /// Nothing has happened for [`SPIN`].
    pub yields: bool,
}

impl State {
    /// The state of a new agent.
    pub fn new(node: Node, name: Vec<u8>, info: Info, notes: Notes) -> State {
        State {
            node,
            name,
            info,
            itself: Weak::new(),
            peers: Slab::default(),
            locals: Slab::default(),
            aways: Slab::default(),
            transfers: Slab::default(),
            moving: vec![],
            notes,
            buffers: Buffers::default(),
            passes: 0,
            looked: Instant::now(),
            idle: None,
            yields: false,
        }
    }

    /// Makes a pass, and carries on what waits. From time to time, looks whether peers live.
    pub fn progress(&mut self) {
        // Looking for notifications makes the pass.
        self.collect();
        if self.reap() || self.notes.are_there() {
            self.stir();
        }
        self.tell_later();
        if !self.moving.is_empty() {
            for number in std::mem::take(&mut self.moving) {
                if self.advance(number) == Status::IN_PROG {
                    self.moving.push(number);
                }
            }
        }
        self.passes = self.passes.wrapping_add(1);
        if self.passes.is_multiple_of(PASSES) {
            let now = Instant::now();
            self.yields = now - *self.idle.get_or_insert(now) >= SPIN;
            if now - self.looked >= LOOK {
                self.looked = now;
                self.look();
            }
        }
    }

    /// Receives what has arrived.
    pub fn collect(&mut self) {
        let State { node, peers, locals, transfers, buffers, notes, .. } = self;
        notes.collect(node, &mut Sides { peers, locals, transfers, buffers });
    }

    /// Something has happened.
    pub fn stir(&mut self) {
        (self.idle, self.yields) = (None, false);
    }

    /// Registers memory of the program, which stays valid until it is deregistered.
    ///
    /// # Safety
    /// As for [`Node::register`].
    pub unsafe fn register(&mut self, start: usize, len: usize) -> Result<u64, Status> {
        let base = start & !7;
        let end = start.checked_add(len).ok_or(Status::INVALID_PARAM)?;
        let Some(first) = NonNull::new(base as *mut u8).filter(|_| len != 0) else {
            return Err(Status::INVALID_PARAM);
        };
        // SAFETY: same contract. The few bytes before the program's lie in its first word, which is
        // mapped like it; transfers are checked against what the program has registered.
        let memory = unsafe { self.node.register(first, end - base) }?;
        Ok(self.locals.insert(Local { memory, base, start, len }))
    }

    /// Deregisters memory.
    ///
    /// # Errors
    /// [`Status::NOT_ALLOWED`] while transfers use it.
    pub fn deregister(&mut self, number: u64) -> Result<(), Status> {
        let memory = self.locals.get(number).ok_or(Status::NOT_FOUND)?.memory;
        self.node.free(memory)?;
        self.locals.remove(number);
        Ok(())
    }

    /// The metadata of registered memory.
    pub fn export(&self, number: u64) -> Result<Vec<u8>, Status> {
        let local = self.locals.get(number).ok_or(Status::NOT_FOUND)?;
        let handle = self.node.handle(local.memory)?;
        Ok(Export { start: local.start as u64, len: local.len as u64, number, handle }.encode())
    }

    /// Keeps the metadata of a peer's memory. It is imported once the peer is connected.
    pub fn load(&mut self, peer: &[u8], bytes: &[u8]) -> Result<u64, Status> {
        let peer = self.loaded(peer).ok_or(Status::NOT_FOUND)?;
        let export = Export::decode(bytes)?;
        let base = export.start & !7;
        Ok(self.aways.insert(Away { peer, export, base, import: None }))
    }

    /// Forgets the metadata of a peer's memory.
    pub fn unload(&mut self, number: u64) -> Result<(), Status> {
        let away = self.aways.remove(number).ok_or(Status::NOT_FOUND)?;
        if let Some((_, import)) = away.import {
            // Transfers in flight keep it; then it goes with the peer.
            _ = self.node.release(import);
        }
        Ok(())
    }
}
