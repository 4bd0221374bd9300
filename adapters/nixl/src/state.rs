//! The state of an agent: its node, its memory and the memory of its peers. One lock protects the
//! state. No thread holds the lock while it waits for a peer.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use fishplate::Node;
use fishplate::gpu::DevicePtr;

use crate::buffers::Buffers;
use crate::intro::{Export, Info};
use crate::memory::{Away, Local};
use crate::notes::Notes;
use crate::packed::Sides;
use crate::peer::Peer;
use crate::slab::Slab;
use crate::status::Status;
use crate::transfer::Transfer;

/// Maximum time to wait until no operation uses memory that is being deregistered.
pub(crate) const SETTLE: Duration = Duration::from_secs(5);

const PASSES: u32 = 16;

const LOOK: Duration = Duration::from_millis(20);

/// Time without events before a polling call yields the processor. The peer may need the processor.
const SPIN: Duration = Duration::from_micros(200);

/// A pass that takes at least this long has moved data. An idle pass takes about 1 us.
const MOVES: Duration = Duration::from_micros(5);

/// `None` once the agent is closed.
pub(crate) struct Shared {
    state: Mutex<Option<State>>,
    /// Number of calls that wait for the lock, and number of calls that have acquired it.
    waiting: AtomicU32,
    served: AtomicU32,
}

impl Shared {
    pub fn new(state: State) -> Arc<Shared> {
        let (waiting, served) = (AtomicU32::new(0), AtomicU32::new(0));
        let shared = Arc::new(Shared { state: Mutex::new(Some(state)), waiting, served });
        let itself = Arc::downgrade(&shared);
        shared.with(|state| state.itself = itself);
        shared
    }

    pub fn take(&self) -> Option<State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Runs a call on the state. Returns `None` if the agent is closed or an earlier call has
    /// panicked.
    pub fn with<T>(&self, call: impl FnOnce(&mut State) -> T) -> Option<T> {
        // Relaxed: the counters publish no other data.
        let locked = match self.state.try_lock() {
            Ok(state) => Ok(state),
            Err(_) => {
                self.waiting.fetch_add(1, Ordering::Relaxed);
                let locked = self.state.lock();
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                self.served.fetch_add(1, Ordering::Relaxed);
                locked
            }
        };
        locked.ok()?.as_mut().map(call)
    }

    /// Lets one waiting call run. Otherwise a thread that locks again at once would overtake it.
    pub fn let_others(&self) {
        let served = self.served.load(Ordering::Relaxed);
        while self.waiting.load(Ordering::Relaxed) != 0
            && self.served.load(Ordering::Relaxed) == served
        {
            thread::yield_now();
        }
    }
}

pub(crate) struct State {
    pub node: Node,
    pub device: Option<u32>,
    pub name: Vec<u8>,
    pub info: Info,
    pub itself: Weak<Shared>,
    pub peers: Slab<Peer>,
    pub locals: Slab<Local>,
    pub aways: Slab<Away>,
    pub transfers: Slab<Transfer>,
    /// Numbers of transfers in progress.
    pub moving: Vec<u64>,
    pub notes: Notes,
    pub buffers: Buffers,
    passes: u32,
    looked: Instant,
    idle: Option<Instant>,
    /// True if there was no event for [`SPIN`].
    pub yields: bool,
}

impl State {
    pub fn new(node: Node, device: Option<u32>, name: Vec<u8>, info: Info, notes: Notes) -> State {
        State {
            node,
            device,
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

    /// Makes a pass. Returns whether a rail moved data. If so, make another pass at once: a
    /// provider such as `tcp` reads data only during a pass, and the sender waits meanwhile.
    pub fn pass(&mut self) -> bool {
        if !self.notes.packs {
            self.progress();
            return false;
        }
        // The provider reports a message only when it is complete. A long pass shows that data was
        // moved.
        let began = Instant::now();
        self.progress();
        let moved = began.elapsed() >= MOVES;
        if moved {
            self.stir();
        }
        moved
    }

    pub fn poll(&mut self) {
        for _ in 0..PASSES {
            if !self.pass() || self.notes.are_there() {
                break;
            }
        }
    }

    /// Makes a pass, and continues notifications and transfers in progress. At intervals, checks
    /// that peers are alive.
    pub fn progress(&mut self) {
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

    pub fn collect(&mut self) {
        let State { node, peers, locals, transfers, buffers, notes, .. } = self;
        notes.collect(node, &mut Sides { peers, locals, transfers, buffers });
    }

    /// Records an event, so that polling calls do not yield for a while.
    pub fn stir(&mut self) {
        (self.idle, self.yields) = (None, false);
    }

    /// Registers memory of the program: of the device with this ordinal, or of the host.
    ///
    /// # Safety
    /// The same as for [`Node::register`] and [`Node::register_device`].
    pub unsafe fn register(
        &mut self,
        device: Option<u64>,
        start: usize,
        len: usize,
    ) -> Result<u64, Status> {
        if device.is_some() && device != self.device.map(u64::from) {
            return Err(Status::NOT_SUPPORTED);
        }
        let base = start & !7;
        let end = start.checked_add(len).ok_or(Status::INVALID_PARAM)?;
        let Some(first) = NonNull::new(base as *mut u8).filter(|_| len != 0) else {
            return Err(Status::INVALID_PARAM);
        };
        // SAFETY: the caller guarantees that the range stays valid. Rounding adds at most 7 bytes
        // before the range. They are in the same word as its first byte, so they are mapped.
        // Transfers are checked against the unrounded range.
        let memory = unsafe {
            match device {
                None => self.node.register(first, end - base),
                Some(_) => self.node.register_device(DevicePtr(base as u64), end - base),
            }
        }?;
        Ok(self.locals.insert(Local { memory, base, start, len, device: device.is_some() }))
    }

    /// Deregisters memory.
    ///
    /// # Errors
    /// [`Status::NOT_ALLOWED`] while transfers use the memory.
    pub fn deregister(&mut self, number: u64) -> Result<(), Status> {
        let memory = self.locals.get(number).ok_or(Status::NOT_FOUND)?.memory;
        self.node.free(memory)?;
        self.locals.remove(number);
        Ok(())
    }

    pub fn export(&self, number: u64) -> Result<Vec<u8>, Status> {
        let local = self.locals.get(number).ok_or(Status::NOT_FOUND)?;
        let handle = self.node.handle(local.memory)?;
        let Local { start, len, device, .. } = *local;
        Ok(Export { start: start as u64, len: len as u64, number, device, handle }.encode())
    }

    /// Loads the metadata of a peer's memory. The memory is imported once the peer is connected.
    pub fn load(&mut self, peer: &[u8], device: bool, bytes: &[u8]) -> Result<u64, Status> {
        let peer = self.loaded(peer).ok_or(Status::NOT_FOUND)?;
        let export = Export::decode(bytes)?;
        if export.device != device {
            return Err(Status::MISMATCH);
        }
        let base = export.start & !7;
        Ok(self.aways.insert(Away { peer, export, base, import: None }))
    }

    pub fn unload(&mut self, number: u64) -> Result<(), Status> {
        let away = self.aways.remove(number).ok_or(Status::NOT_FOUND)?;
        if let Some((_, import)) = away.import {
            // Fails while transfers in flight use the import. The import is then removed with the
            // peer.
            _ = self.node.release(import);
        }
        Ok(())
    }
}
