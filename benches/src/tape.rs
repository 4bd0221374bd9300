//! A rail without a peer. One tape records the posts of an engine. Another tape delivers them to a
//! second engine in a given order. So sender and receiver are measured separately, without a
//! provider.

use core::ptr::NonNull;

use fishplate_core::error::{AttachError, PostError};
use fishplate_core::mem::{Peer, Region, Untrusted};
use fishplate_core::op::AmoSet;
use fishplate_core::rail::{Caps, Local, Order, Posted, Rail, RailKey, Remote, Sink};

const MESSAGE: usize = 256;

#[derive(Clone)]
pub enum Event {
    /// A write, with its completion data.
    Landed(u32),
    Message(Box<[u8]>),
}

/// Number of posts between two arrivals on a [`paced`](Tape::paced) tape. A power of two.
pub const PACE: u32 = 32;

pub struct Tape {
    /// The recorded posts, oldest first. `None` if the tape does not record.
    posted: Option<Vec<Event>>,
    arrivals: Vec<Event>,
    played: usize,
    /// Context words of posts that are not reported yet. `None` if posts complete at once.
    pending: Option<[u64; PACE as usize]>,
    waiting: u32,
}

impl Tape {
    pub fn recording() -> Self {
        Tape { posted: Some(vec![]), arrivals: vec![], played: 0, pending: None, waiting: 0 }
    }

    /// Creates a tape that delivers `arrivals` in order and discards posts.
    pub fn playing(arrivals: Vec<Event>) -> Self {
        Tape { posted: None, arrivals, played: 0, pending: None, waiting: 0 }
    }

    /// Creates a tape that reports the completion of each post, as a provider does, and delivers
    /// one of `arrivals` after every [`PACE`] posts. If the arrivals are the receiver's
    /// acknowledgements, the engine does the complete work of a sender.
    pub fn paced(arrivals: Vec<Event>) -> Self {
        Tape { posted: None, arrivals, played: 0, pending: Some([0; PACE as usize]), waiting: 0 }
    }

    pub fn play(&mut self, mut arrivals: Vec<Event>) {
        self.arrivals.append(&mut arrivals);
    }

    /// Returns the number of posts recorded since the last [`take`](Tape::take).
    pub fn posted(&self) -> usize {
        self.posted.as_ref().map_or(0, Vec::len)
    }

    pub fn take(&mut self) -> Vec<Event> {
        self.posted.replace(vec![]).unwrap_or_default()
    }

    #[inline]
    fn record(&mut self, cx: u64, event: impl FnOnce() -> Event) -> Result<Posted, PostError> {
        if let Some(pending) = &mut self.pending {
            let place = pending.get_mut(self.waiting as usize).ok_or(PostError::Again)?;
            *place = cx;
            self.waiting += 1;
            return Ok(Posted::Pending);
        }
        if let Some(posted) = &mut self.posted {
            posted.push(event());
        }
        Ok(Posted::Done)
    }
}

// SAFETY: `Tape` never accesses or maps memory, so it keeps every promise of the trait.
unsafe impl Rail for Tape {
    type Setup<'a> = &'a mut Tape;

    const COPIES: bool = false;

    fn setup(&mut self) -> &mut Tape {
        self
    }

    fn caps(&self) -> Caps {
        Caps {
            max_message: MESSAGE,
            max_rma: 1 << 30,
            inject: 1 << 30,
            data_bytes: 4,
            order: Order::None,
            native_atomics: AmoSet::NONE,
            depth: u32::MAX,
            fresh: true,
            fences: false,
        }
    }

    fn register(&mut self, _region: &Region) -> Result<(RailKey, u64), AttachError> {
        Ok((RailKey { key: 1, base: 0 }, 0))
    }

    fn deregister(&mut self, _key: RailKey) -> Result<(), AttachError> {
        Ok(())
    }

    fn touches(&mut self, memory: Local) -> bool {
        let _ = memory;
        false
    }

    fn import(
        &mut self,
        _peer: Peer,
        _key: RailKey,
        _len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        Ok(None)
    }

    fn release(&mut self, _peer: Peer, _key: RailKey) {}

    fn detach(&mut self, _peer: Peer) {}

    unsafe fn post_write(
        &mut self,
        _peer: Peer,
        _local: Local,
        _remote: Remote,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        self.record(cx, || Event::Landed(data.expect("the engine numbers every write")))
    }

    unsafe fn post_read(
        &mut self,
        _: Peer,
        _: Local,
        _: Remote,
        _cx: u64,
    ) -> Result<Posted, PostError> {
        Err(PostError::Unsupported)
    }

    fn post_message(
        &mut self,
        _peer: Peer,
        head: &[u8],
        body: Untrusted<'_>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let len = head.len() + body.len();
        if len > MESSAGE {
            return Err(PostError::TooLong { len, max: MESSAGE });
        }
        self.record(cx, || {
            let mut bytes = vec![0; len];
            bytes[..head.len()].copy_from_slice(head);
            body.copy_out(&mut bytes[head.len()..]);
            Event::Message(bytes.into())
        })
    }

    #[inline]
    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let mut limit = budget;
        if let Some(pending) = &self.pending {
            for &cx in &pending[..self.waiting as usize] {
                sink.done(cx, Ok(()));
            }
            limit = self.waiting / PACE;
            self.waiting = 0;
        }
        let due = &self.arrivals[self.played..];
        let due = &due[..due.len().min(limit as usize)];
        for event in due {
            match event {
                Event::Landed(data) => sink.landed(Peer(0), *data),
                Event::Message(bytes) => sink.message(Peer(0), Untrusted::from_slice(bytes)),
            }
        }
        self.played += due.len();
        due.len() as u32
    }
}
