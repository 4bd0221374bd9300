//! A rail that misbehaves on purpose. It wraps another rail, holds posts back, reorders them,
//! refuses or fails some, and reports few events at a time. The same seed and the same calls give
//! the same faults.
//!
//! This module is part of every build, because users test their own code with it. Never blocks or
//! allocates: posts that are held back are stored inside the value. The wrapped rail must satisfy
//! the whole [contract](super). This rail then satisfies it too, except that it preserves no order,
//! and with [`Faults::fail`] loses posts.

use core::ptr::NonNull;

use super::random::Random;
use super::{Caps, Fence, Local, Order, Posted, REOPEN_MAX, Rail, RailKey, Remote, Sink};
use crate::error::{AttachError, CompleteError, PostError};
use crate::forward_rail;
use crate::mem::{Peer, Untrusted};
use crate::op::AmoSet;

const MESSAGE: usize = 256;

/// The code of injected failures: Linux's `EIO`, negated.
const EIO: i32 = -5;
const EINVAL: i32 = -22;

/// Rates of faults, each per 1000.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Faults {
    /// Rate of posts that are held back and posted at a later poll, in any order.
    pub hold: u16,
    /// Rate of polls at which a held-back post stays held back.
    pub keep: u16,
    /// Rate of posts that are refused with [`PostError::Again`].
    pub again: u16,
    /// Rate of posts that are accepted, dropped, and completed with [`CompleteError::Failed`].
    pub fail: u16,
    /// Rate of polls that report only one event.
    pub short: u16,
}

impl Faults {
    /// No faults.
    pub const NONE: Faults = Faults { hold: 0, keep: 0, again: 0, fail: 0, short: 0 };

    /// Most posts arrive late and out of order, and queues are often full. No post is lost.
    pub const DISORDER: Faults = Faults { hold: 700, keep: 700, again: 100, fail: 0, short: 300 };
}

#[derive(Clone, Copy)]
enum Post {
    Write {
        local: Local,
        remote: Remote,
        data: Option<u32>,
    },
    Read {
        local: Local,
        remote: Remote,
    },
    Message {
        len: u16,
    },
    Fail,
    /// The post is already complete. Its completion must still be reported.
    Over(Result<(), CompleteError>),
}

enum Fate {
    Held,
    Passed,
    Over(Result<(), CompleteError>),
}

#[derive(Clone, Copy)]
struct Held {
    peer: Peer,
    cx: u64,
    post: Post,
    bytes: [u8; MESSAGE],
}

// SAFETY: the pointers come from accepted posts. The caller of a post allows any thread to access
// its memory.
unsafe impl Send for Held {}

/// A rail that wraps `R` and adds faults. Holds back at most `HELD` posts at a time.
pub struct Faulty<R, const HELD: usize = 32> {
    inner: R,
    faults: Faults,
    random: Random,
    held: [Option<Held>; HELD],
    count: usize,
}

impl<R: Rail, const HELD: usize> Faulty<R, HELD> {
    /// Wraps `inner` in a rail with these faults.
    pub fn new(inner: R, faults: Faults, seed: u64) -> Self {
        Faulty { inner, faults, random: Random::new(seed), held: [None; HELD], count: 0 }
    }

    /// Returns the inner rail.
    pub fn inner_mut(&mut self) -> &mut R {
        &mut self.inner
    }

    /// Changes the fault rates.
    pub fn set_faults(&mut self, faults: Faults) {
        self.faults = faults;
    }

    /// Returns an error if the post is refused, `true` if it is held back, and `false` if it is
    /// passed on.
    fn fate(&mut self) -> Result<bool, PostError> {
        if self.random.permille(self.faults.again) {
            return Err(PostError::Again);
        }
        Ok(self.count < HELD && self.random.permille(self.faults.hold))
    }

    fn fails(&mut self) -> bool {
        self.count < HELD && self.random.permille(self.faults.fail)
    }

    fn hold(&mut self, peer: Peer, cx: u64, post: Post) -> Result<Posted, PostError> {
        self.hold_with(peer, cx, post, [0; MESSAGE])
    }

    fn hold_with(
        &mut self,
        peer: Peer,
        cx: u64,
        post: Post,
        bytes: [u8; MESSAGE],
    ) -> Result<Posted, PostError> {
        let free = self.held.iter_mut().find(|slot| slot.is_none()).ok_or(PostError::Again)?;
        *free = Some(Held { peer, cx, post, bytes });
        self.count += 1;
        Ok(Posted::Pending)
    }

    fn drop_held(&mut self, peer: Peer) {
        for held in self.held.iter_mut().flatten().filter(|held| held.peer == peer) {
            held.post = Post::Over(Err(CompleteError::PeerDown));
        }
    }

    fn let_go(&mut self, held: &Held) -> Fate {
        let Held { peer, cx, post, bytes } = held;
        // SAFETY: the poster keeps the memory valid until the completion, which is not reported
        // yet.
        let posted = unsafe {
            match post {
                Post::Write { local, remote, data } => {
                    self.inner.post_write(*peer, *local, *remote, *data, *cx)
                }
                Post::Read { local, remote } => self.inner.post_read(*peer, *local, *remote, *cx),
                Post::Message { len } => self.inner.post_message(
                    *peer,
                    &bytes[..*len as usize],
                    Untrusted::from_slice(&[]),
                    *cx,
                ),
                Post::Fail => return Fate::Over(Err(CompleteError::Failed(EIO))),
                Post::Over(result) => return Fate::Over(*result),
            }
        };
        match posted {
            Ok(Posted::Pending) => Fate::Passed,
            Ok(Posted::Done) => Fate::Over(Ok(())),
            Err(PostError::Again) => Fate::Held,
            Err(PostError::PeerDown) => Fate::Over(Err(CompleteError::PeerDown)),
            Err(PostError::Provider(code)) => Fate::Over(Err(CompleteError::Failed(code))),
            Err(_) => Fate::Over(Err(CompleteError::Failed(EINVAL))),
        }
    }
}

/// Access to a [`Faulty`] rail inside an engine.
pub struct FaultySetup<'a, R: Rail + 'a, const HELD: usize>(&'a mut Faulty<R, HELD>);

impl<R: Rail, const HELD: usize> FaultySetup<'_, R, HELD> {
    /// Returns the setup access of the inner rail.
    pub fn inner_mut(&mut self) -> R::Setup<'_> {
        self.0.inner.setup()
    }

    /// Changes the fault rates.
    pub fn set_faults(&mut self, faults: Faults) {
        self.0.set_faults(faults);
    }
}

// SAFETY: a held-back post stays pending, completes once, and is removed when it completes. This
// rail maps nothing. The inner rail guarantees the rest, and it is never replaced.
unsafe impl<R: Rail, const HELD: usize> Rail for Faulty<R, HELD> {
    type Setup<'a>
        = FaultySetup<'a, R, HELD>
    where
        Self: 'a;

    const COPIES: bool = false;

    const CLOCK: Option<fn() -> u64> = R::CLOCK;

    fn setup(&mut self) -> FaultySetup<'_, R, HELD> {
        FaultySetup(self)
    }

    fn caps(&self) -> Caps {
        let caps = self.inner.caps();
        Caps {
            max_message: caps.max_message.min(MESSAGE),
            inject: 0,
            order: Order::None,
            native_atomics: AmoSet::NONE,
            depth: caps.depth.saturating_add(HELD as u32),
            ..caps
        }
    }

    fn touches(&mut self, memory: Local) -> bool {
        let held = self.held.iter().flatten().any(|held| match held.post {
            Post::Write { local, .. } | Post::Read { local, .. } => {
                memory.overlaps(local.ptr.as_ptr(), local.len)
            }
            Post::Message { .. } | Post::Fail | Post::Over(_) => false,
        });
        held || self.inner.touches(memory)
    }

    /// Never returns a mapping: access through a mapping would bypass this rail.
    fn import(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        self.inner.import(peer, key, len).map(|_| None)
    }

    fn try_import(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        self.inner.try_import(peer, key, len).map(|_| None)
    }

    fn detach(&mut self, peer: Peer) {
        self.drop_held(peer);
        self.inner.detach(peer);
    }

    #[cold]
    fn fence(&mut self, peer: Peer) -> Fence {
        self.drop_held(peer);
        self.inner.fence(peer)
    }

    #[cold]
    fn fence_left(&mut self, peer: Peer) -> Fence {
        self.drop_held(peer);
        self.inner.fence_left(peer)
    }

    #[cold]
    fn reopen(&mut self, peer: Peer, into: &mut [u8; REOPEN_MAX]) -> Option<usize> {
        let over = |held: &Held| held.peer == peer && matches!(held.post, Post::Over(_));
        if self.held.iter().flatten().any(over) {
            return None;
        }
        self.inner.reopen(peer, into)
    }

    unsafe fn post_write(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let hold = self.fate()?;
        if self.fails() {
            return self.hold(peer, cx, Post::Fail);
        }
        match hold {
            true => self.hold(peer, cx, Post::Write { local, remote, data }),
            // SAFETY: our caller guarantees the conditions of the inner method, which are the same.
            false => unsafe { self.inner.post_write(peer, local, remote, data, cx) },
        }
    }

    unsafe fn post_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let hold = self.fate()?;
        if self.fails() {
            return self.hold(peer, cx, Post::Fail);
        }
        match hold {
            true => self.hold(peer, cx, Post::Read { local, remote }),
            // SAFETY: our caller guarantees the conditions of the inner method, which are the same.
            false => unsafe { self.inner.post_read(peer, local, remote, cx) },
        }
    }

    fn post_message(
        &mut self,
        peer: Peer,
        head: &[u8],
        body: Untrusted<'_>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let len = head.len() + body.len();
        if len > self.caps().max_message {
            return Err(PostError::TooLong { len, max: self.caps().max_message });
        }
        let hold = self.fate()?;
        if self.fails() {
            return self.hold(peer, cx, Post::Fail);
        }
        if !hold {
            return self.inner.post_message(peer, head, body, cx);
        }
        let mut bytes = [0; MESSAGE];
        let (first, rest) = bytes.split_at_mut(head.len());
        first.copy_from_slice(head);
        body.copy_out(rest);
        self.hold_with(peer, cx, Post::Message { len: len as u16 }, bytes)
    }

    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let budget = if self.random.permille(self.faults.short) { budget.min(1) } else { budget };
        let mut events = 0;
        if self.count != 0 {
            let start = self.random.below(HELD as u64) as usize;
            for i in 0..HELD {
                let at = if start + i >= HELD { start + i - HELD } else { start + i };
                let Some(held) = self.held[at] else { continue };
                if events == budget || self.random.permille(self.faults.keep) {
                    continue;
                }
                let fate = self.let_go(&held);
                if let Fate::Held = fate {
                    continue;
                }
                self.held[at] = None;
                self.count -= 1;
                if let Fate::Over(result) = fate {
                    sink.done(held.cx, result);
                    events += 1;
                }
            }
        }
        events + self.inner.poll(budget - events, sink)
    }

    forward_rail! { self.inner =>
        register deregister release late mute rejoin fences_all is_fenced flush write_device
        read_device place_device fetch_device notify doubt check_peers
    }
}
