//! A rail that carries nothing: what one engine posts is written down, and played to another in any order. With it the
//! two halves of a transfer are counted apart, and without a provider.

use core::ptr::NonNull;

use fishplate_core::error::{AttachError, PostError};
use fishplate_core::mem::{Peer, Region, Untrusted};
use fishplate_core::rail::{Caps, Local, Posted, Rail, RailKey, Remote, Sink};

const MESSAGE: usize = 256;

/// What a post leaves on the tape.
#[derive(Clone)]
pub enum Event {
    /// The completion data of a write.
    Landed(u32),
    /// A message.
    Message(Box<[u8]>),
}

/// A tape of posts, and one of arrivals still to be played.
pub struct Tape {
    /// What was posted, oldest first; nothing is kept if there is none.
    posted: Option<Vec<Event>>,
    arrivals: Vec<Event>,
    played: usize,
}

impl Tape {
    /// Keeps what is posted.
    pub fn recording() -> Self {
        Tape { posted: Some(vec![]), arrivals: vec![], played: 0 }
    }

    /// Lets `arrivals` arrive, the first first, and forgets what is posted.
    pub fn playing(arrivals: Vec<Event>) -> Self {
        Tape { posted: None, arrivals, played: 0 }
    }

    /// What was posted so far, oldest first.
    pub fn take(&mut self) -> Vec<Event> {
        self.posted.replace(vec![]).unwrap_or_default()
    }

    #[inline]
    fn record(&mut self, event: impl FnOnce() -> Event) -> Posted {
        if let Some(posted) = &mut self.posted {
            posted.push(event());
        }
        Posted::Done
    }
}

impl Rail for Tape {
    fn caps(&self) -> Caps {
        Caps {
            max_message: MESSAGE,
            max_rma: 1 << 30,
            inject: 1 << 30,
            data_bytes: 4,
            ordered: false,
            native_atomics: false,
            depth: u32::MAX,
        }
    }

    fn register(&mut self, _region: &Region) -> Result<(RailKey, u64), AttachError> {
        Ok((RailKey { key: 1, base: 0 }, 0))
    }

    fn deregister(&mut self, _key: RailKey) {}

    fn import(&mut self, _peer: Peer, _key: RailKey, _len: u64) -> Result<Option<NonNull<u8>>, AttachError> {
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
        _cx: u64,
    ) -> Result<Posted, PostError> {
        Ok(data.map_or(Posted::Done, |data| self.record(|| Event::Landed(data))))
    }

    unsafe fn post_read(&mut self, _: Peer, _: Local, _: Remote, _cx: u64) -> Result<Posted, PostError> {
        Err(PostError::Unsupported)
    }

    fn post_message(
        &mut self,
        _peer: Peer,
        head: &[u8],
        body: Untrusted<'_>,
        _cx: u64,
    ) -> Result<Posted, PostError> {
        let len = head.len() + body.len();
        if len > MESSAGE {
            return Err(PostError::TooLong { len, max: MESSAGE });
        }
        Ok(self.record(|| {
            let mut bytes = vec![0; len];
            bytes[..head.len()].copy_from_slice(head);
            body.copy_out(&mut bytes[head.len()..]);
            Event::Message(bytes.into())
        }))
    }

    #[inline]
    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let due = &self.arrivals[self.played..];
        let due = &due[..due.len().min(budget as usize)];
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
