//! The endpoints of the process, in a table of slots. Each slot has a [lock](crate::lock). A panic
//! poisons it, and every later call on that endpoint fails.

use std::panic::{AssertUnwindSafe, catch_unwind};

use fishplate::PeerId;
use fishplate::core::psm::MqReq;
use fishplate::core::sync::primitive::{AtomicU8, AtomicU32, AtomicU64};

use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::handle::{Ep, EpAddr, Mq, Req};
use crate::home::{ADDRESS, EP, GENERATION, Home, SLOTS};
use crate::lock::{Held, Lock, Words};

impl Home {
    fn slot(self) -> &'static Lock<Slot> {
        &TABLE[(self.0 >> 20) as usize % SLOTS]
    }

    /// Returns `None` if the endpoint is not open.
    #[inline]
    pub fn find(self) -> Option<Found> {
        self.of(self.slot().lock()?)
    }

    /// Locks the endpoint for a thread of this library. The lock keeps its owner, so calls of the
    /// program stay fast.
    pub fn find_aside(self) -> Option<Found> {
        self.of(self.slot().lock_aside()?)
    }

    #[inline(always)]
    fn of(self, slot: Held<'static, Slot>) -> Option<Found> {
        slot.narrow(|slot| slot.endpoint.as_deref_mut().filter(|_| slot.home == self))
    }

    pub fn take(self) -> Option<Box<Endpoint>> {
        let mut slot = self.slot().lock()?;
        if slot.home != self {
            return None;
        }
        slot.endpoint.take()
    }
}

struct Slot {
    /// The last endpoint that reserved this slot.
    home: Home,
    reserved: bool,
    endpoint: Option<Box<Endpoint>>,
}

impl Slot {
    const fn unused() -> Lock<Slot> {
        let (state, inside) = (AtomicU8::new(0), AtomicU8::new(0));
        let words = Words { state, inside, owner: AtomicU64::new(0), others: AtomicU32::new(0) };
        Lock::new(words, Slot { home: Home(0), reserved: false, endpoint: None })
    }
}

static TABLE: [Lock<Slot>; SLOTS] = [const { Slot::unused() }; SLOTS];

pub(crate) type Found = Held<'static, Endpoint>;
type HeldSlot = Held<'static, Slot>;

pub(crate) fn reserve() -> Option<Reserved> {
    for (at, slot) in TABLE.iter().enumerate() {
        let Some(mut slot) = slot.lock() else { continue };
        if slot.endpoint.is_none() && !slot.reserved {
            slot.reserved = true;
            // The generation is never 0, so no handle matches an unused slot.
            slot.home = Home::new(at, (slot.home.0 & GENERATION) % GENERATION + 1);
            return Some(Reserved(slot.home));
        }
    }
    None
}

pub(crate) struct Reserved(Home);

impl Reserved {
    pub fn home(&self) -> Home {
        self.0
    }

    pub fn insert(self, endpoint: Endpoint) {
        if let Some(mut slot) = self.0.slot().lock() {
            slot.endpoint = Some(Box::new(endpoint));
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if let Some(mut slot) = self.0.slot().lock() {
            slot.reserved = false;
        }
    }
}

#[inline]
pub(crate) fn find(ep: *mut Ep) -> Option<Found> {
    Home::split(ep, EP)?.0.find()
}

pub(crate) fn home(ep: *mut Ep) -> Option<Home> {
    Some(Home::split(ep, EP)?.0)
}

pub(crate) fn find_mq(mq: *mut Mq) -> Result<Found, Error> {
    of_mq(mq, Lock::lock).ok_or(Error::PARAM)
}

/// [`find_mq`], for a fast path. Returns `None` if this thread does not own the lock.
#[inline(always)]
pub(crate) fn own_mq(mq: *mut Mq) -> Option<Found> {
    of_mq(mq, Lock::own)
}

#[inline(always)]
fn of_mq(mq: *mut Mq, lock: impl FnOnce(&'static Lock<Slot>) -> Option<HeldSlot>) -> Option<Found> {
    let found = in_slot((mq.addr() as u64 >> 52) as u32, lock)?;
    found.narrow(|endpoint| (endpoint.mq == mq).then_some(endpoint))
}

/// Locks the endpoint in the slot with this number. The slot of an open endpoint has its home.
#[inline(always)]
fn in_slot(
    number: u32,
    lock: impl FnOnce(&'static Lock<Slot>) -> Option<HeldSlot>,
) -> Option<Found> {
    lock(&TABLE[number as usize % SLOTS])?.narrow(|slot| slot.endpoint.as_deref_mut())
}

/// Locks the endpoint of a peer's address. Also returns the peer.
pub(crate) fn find_address(address: *mut EpAddr) -> Option<(Found, PeerId)> {
    let (home, raw) = Home::split(address, ADDRESS)?;
    Some((home.find()?, PeerId::from_raw(raw)))
}

/// Locks the endpoint of a request. Also returns the request's number in the queue.
pub(crate) fn find_request(request: *mut Req) -> Result<(Found, MqReq), Error> {
    of_request(request, Lock::lock).ok_or(Error::PARAM)
}

/// [`find_request`], for a fast path. Returns `None` if this thread does not own the lock.
#[inline(always)]
pub(crate) fn own_request(request: *mut Req) -> Option<(Found, MqReq)> {
    of_request(request, Lock::own)
}

#[inline(always)]
fn of_request(
    request: *mut Req,
    lock: impl FnOnce(&'static Lock<Slot>) -> Option<HeldSlot>,
) -> Option<(Found, MqReq)> {
    let bits = request.addr() as u64;
    // The number of the slot agrees, because the endpoint was found by it.
    let same = |endpoint: &Endpoint| endpoint.home.0 as u8 == (bits >> 20) as u8;
    let found = in_slot((bits >> 28) as u32, lock)?;
    let found = found.narrow(|endpoint| same(endpoint).then_some(endpoint))?;
    Some((found, MqReq::from_raw(bits & !(0xfff << 20))))
}

pub(crate) fn open() -> Vec<Home> {
    let homes = TABLE.iter().filter_map(|slot| {
        let slot = slot.lock()?;
        slot.endpoint.is_some().then_some(slot.home)
    });
    homes.collect()
}

/// Runs a library function. Converts a panic to an error.
#[inline]
pub(crate) fn guard(call: impl FnOnce() -> Error) -> Error {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or(Error::INTERNAL)
}
