//! The rail between processes of one host. [`ShmRail`] describes its behaviour.

mod attach;
mod check;
mod memory;
mod post;

pub use attach::ShmSetup;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fishplate_core::error::{AttachError, CompleteError, PeerError, PostError};
use fishplate_core::mem::{Peer, Region, Untrusted, copy_message};
use fishplate_core::op::AmoSet;
use fishplate_core::rail::{Caps, Local, Order, Posted, Rail, RailKey, Remote, Sink};
use fishplate_core::sync::host::{Host, SpinHost};
use static_assertions::{assert_impl_all, assert_not_impl_any};

use check::CHECKED;

use crate::cma::Way;
use crate::config::ShmConfig;
use crate::control::Line;
use crate::due::Due;
use crate::event_page::{EventPage, WaitObject};
use crate::handshake::Profile;
use crate::lane::{self, CELL, PAYLOAD, cells_for};
use crate::peer::{self, Attached};
use crate::record::{self, GAP_MAX, GAP_SHIFT, MESSAGE, STAGED};
use crate::regions::Regions;
use crate::roster::{Places, Roster};

/// Bounds how long a copy blocks the caller, in bytes.
const MAX_RMA: usize = 1 << 30;

/// Minimum length, in bytes, of bodies that begin at a cell boundary. Between processors that share
/// a cache, 96 bytes then arrive a third sooner, and 4 KiB a tenth sooner. The rate of 96-byte
/// messages doubles. Shorter bodies gain nothing.
const ALIGN_FROM: usize = CELL + 1;

/// Upper limit of every wait, so that times do not overflow.
pub const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Maximum number of failed kernel copies with unreported completions. At this limit, further
/// copies are refused.
const MAX_ENDED: usize = 64;

/// The rail between processes of one machine.
///
/// Posting a message, polling and notifying do not block, allocate, lock or make a system call,
/// except to wake a peer that sleeps. A write or read of mapped memory is a copy by the caller. For
/// private memory it is a copy by the kernel, usually with one or two system calls. If the kernel
/// refuses, the data is staged through the lane. Payloads of two-sided messages in private memory
/// take the path that was faster recently: see [`ShmConfig::read_from`]. Payloads in unregistered
/// memory are copied by the kernel. If it refuses, the sender sends them in chunks. Registering,
/// importing, attaching, detaching and [`check_peers`](Rail::check_peers) are slow paths. One
/// thread owns the rail.
///
/// | memory of the peer                     | imported as     | written and read by           |
/// |----------------------------------------|-----------------|-------------------------------|
/// | in a [`Segment`](crate::Segment)       | a pointer       | the caller or a post          |
/// | in the pair's common segment           | a pointer       | the caller or a post          |
/// | private                                | nothing         | a post: the kernel, or chunks |
/// | our own (see [`ShmRail::attach_self`]) | its own address | the caller or a post          |
///
/// A peer reports everything posted to it in the order of the posts. Writes copied by the caller or
/// the kernel are visible immediately, even before messages posted earlier are reported
/// ([`Order::Reports`]). A record in a lane is visible immediately. A peer that *sleeps* is woken
/// by [`flush`](Rail::flush) or the next [`poll`](Rail::poll) at the latest.
///
/// `check_peers` detects a dead peer. It reports the messages that the peer had sent, then that the
/// peer is down, then the completions of all posts to it. Each call checks the next 32 peers. A
/// dead peer's memory stays mapped until the peer is detached, so pointers into it stay valid.
///
/// After [deregistration](Rail::deregister), accesses through the lane are refused at both ends.
/// Accesses through a mapping or by kernel copies are not checked, so the peer must stop using the
/// memory before it is deregistered. Likewise, a peer that is [detached](Rail::detach) may still
/// execute records in its lane although their posts have failed.
///
/// The host may omit the notifier's fence (`LinuxHost::shared().peer_uses_membarrier(true)`). The
/// handshake tells the rail which peers need the fence, and the rail issues the fence for them.
#[derive(Debug)]
pub struct ShmRail<H: Host> {
    host: H,
    config: Arc<ShmConfig>,
    event_page: Arc<EventPage>,
    caps: Caps,
    peers: Vec<Option<Box<Attached>>>,
    active: Vec<Peer>,
    /// The index in `active` where the next [`check_peers`](Rail::check_peers) begins.
    checked: usize,
    roster: Roster,
    first: usize,
    due: Due,
    ended: VecDeque<(u64, CompleteError)>,
    regions: Regions,
    polls: Vec<libc::pollfd>,
    /// The `epoll` set on which the owner sleeps, unless it sleeps on the event page.
    set: Option<Arc<OwnedFd>>,
}

assert_impl_all!(ShmRail<SpinHost>: Send);
assert_not_impl_any!(ShmRail<SpinHost>: Sync, Clone);

impl<H: Host> ShmRail<H> {
    /// Creates a rail without peers.
    pub fn new(host: H, config: ShmConfig) -> Result<Self, AttachError> {
        config.check()?;
        let event_page = Arc::new(EventPage::create()?);
        let peers = usize::from(config.max_peers);
        let caps = Caps {
            max_message: config.max_message,
            max_rma: MAX_RMA,
            inject: record::chunk_len(config.max_message),
            data_bytes: 4,
            order: Order::Reports,
            native_atomics: AmoSet::NONE,
            depth: STAGED as u32,
            fresh: true,
            fences: false,
        };
        Ok(ShmRail {
            host,
            event_page,
            caps,
            peers: vec![],
            active: Vec::with_capacity(peers),
            checked: 0,
            roster: Roster::new(peers),
            first: 0,
            due: Due::new(peers),
            ended: VecDeque::with_capacity(MAX_ENDED + STAGED),
            regions: Regions::new(config.max_regions),
            polls: Vec::with_capacity(2 * CHECKED),
            set: None,
            config: Arc::new(config),
        })
    }

    /// Returns this rail's profile for handshakes. Clones may move to other threads.
    pub fn profile(&self) -> Profile {
        Profile { config: Arc::clone(&self.config), event_page: Arc::clone(&self.event_page) }
    }

    /// Returns the eventcount that peers notify and the owner sleeps on. It may outlive the rail.
    pub fn wait_object(&self) -> WaitObject {
        WaitObject::new(Arc::clone(&self.event_page))
    }

    /// Adds the sockets of all peers attached from now on to an `epoll(7)` set. A thread that
    /// sleeps on the set announces its sleep on the [wait object](Self::wait_object). Peers then
    /// wake it through their sockets. After each sleep the thread must call
    /// [`check_peers`](Rail::check_peers), which reads the sockets.
    pub fn watch_peers(&mut self, set: Arc<OwnedFd>) {
        self.set = Some(set);
    }

    /// Returns the rail's host.
    pub fn host(&self) -> &H {
        &self.host
    }

    /// Returns the socket to an attached peer, for packages with [packets of their
    /// own](crate::extension). Returns `None` if no peer with this number is attached, or the peer
    /// is this rail itself.
    pub fn line(&mut self, peer: Peer) -> Option<Line<'_>> {
        let peer::Remote { control, pidfd, .. } = self.remote(peer)?;
        Some(Line::new(control, pidfd.as_ref()))
    }

    /// Returns the number of peer slots. All peer numbers are below it.
    pub fn max_peers(&self) -> u16 {
        self.config.max_peers
    }

    /// `None` for the rail itself.
    pub(crate) fn remote(&mut self, peer: Peer) -> Option<&mut peer::Remote> {
        self.attached(peer)?.remote.as_mut()
    }

    #[inline(always)]
    fn attached(&mut self, peer: Peer) -> Option<&mut Attached> {
        find(&mut self.peers, peer)
    }

    /// Schedules a notification of a peer for the end of the pass.
    pub fn mark_due(&mut self, peer: Peer) {
        self.due.insert(peer);
    }

    /// Returns whether a peer is attached and has not failed.
    pub fn is_up(&self, peer: Peer) -> bool {
        self.peers.get(usize::from(peer.0)).and_then(Option::as_deref).is_some_and(Attached::is_up)
    }

    /// Fails a peer. The next polls report the failure.
    #[cold]
    pub fn quarantine(&mut self, peer: Peer, why: PeerError) {
        if let Some(attached) = find(&mut self.peers, peer) {
            attached.fail(why);
            self.roster.warm(attached, peer);
        }
    }

    /// Returns the address and length of the region registered under one of our keys, if `peer` may
    /// access it.
    pub fn registered(&self, key: u64, peer: Peer) -> Option<(NonNull<u8>, u64)> {
        self.regions.find(key, peer)
    }

    /// Notifies the peers that are due. Not inlined, because usually there are none.
    #[inline(never)]
    fn ring_due(&mut self) {
        self.due.take_each(|peer| {
            if let Some(attached) = find(&mut self.peers, peer) {
                attached.ring(&self.host);
            }
        });
    }

    #[cold]
    fn report_ended<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let mut count = 0;
        while count < budget {
            let Some((cx, error)) = self.ended.pop_front() else { break };
            sink.done(cx, Err(error));
            count += 1;
        }
        count
    }
}

/// Returns an attached peer. Unlike [`ShmRail::attached`], borrows only the table of peers.
#[inline(always)]
fn find(peers: &mut Places, peer: Peer) -> Option<&mut Attached> {
    peers.get_mut(usize::from(peer.0))?.as_deref_mut()
}

/// Notifies a peer. A peer that needs no fence is notified at once. Other peers are notified at the
/// end of the pass, after one fence for all posts.
#[inline(always)]
fn tell(due: &mut Due, host: &impl Host, attached: &Attached, peer: Peer) {
    if attached.is_light() { attached.ring(host) } else { due.insert(peer) }
}

// SAFETY: an import stays mapped while its entry exists, and only `release` and `detach` remove
// entries. Copies by the caller or the kernel finish before the post returns. A staged operation
// accesses local memory only until its completion. `ShmSetup` only fills free slots and exchanges
// bytes over the socket.
unsafe impl<H: Host> Rail for ShmRail<H> {
    type Setup<'a>
        = ShmSetup<'a, H>
    where
        Self: 'a;

    const COPIES: bool = true;

    fn setup(&mut self) -> ShmSetup<'_, H> {
        ShmSetup(self)
    }

    #[inline]
    fn caps(&self) -> Caps {
        self.caps
    }

    fn register(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError> {
        self.add_region(region)
    }

    fn deregister(&mut self, key: RailKey) -> Result<(), AttachError> {
        self.remove_region(key);
        Ok(())
    }

    fn touches(&mut self, memory: Local) -> bool {
        self.peers.iter().flatten().any(|attached| attached.staged.touches(memory))
    }

    fn import(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        let deadline = Instant::now() + self.config.timeout.min(FOREVER);
        self.import_by(peer, key, len, |control, number| {
            control.import(number, key.base, len, deadline)
        })
    }

    fn try_import(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        self.import_by(peer, key, len, |control, number| control.try_import(number, key.base, len))
    }

    fn release(&mut self, peer: Peer, key: RailKey) {
        if let Some(attached) = self.attached(peer) {
            attached.release(key.key);
        }
    }

    fn detach(&mut self, peer: Peer) {
        self.leave(peer);
    }

    #[inline]
    unsafe fn post_write(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: the caller upholds the contract of `Rail::post_write`, which `post` requires for
        // `Put`.
        unsafe { self.post(peer, Way::Put, local, remote, data, cx) }
    }

    #[inline]
    unsafe fn post_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: the caller upholds the contract of `Rail::post_read`, which `post` requires for
        // `Get`.
        unsafe { self.post(peer, Way::Get, local, remote, None, cx) }
    }

    unsafe fn post_rendezvous_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: the caller upholds the contract of `Rail::post_rendezvous_read`, which
        // `read_payload` requires.
        unsafe { self.read_payload(peer, local, remote, cx) }
    }

    #[inline(always)]
    fn post_message(
        &mut self,
        peer: Peer,
        head: &[u8],
        body: Untrusted<'_>,
        _cx: u64,
    ) -> Result<Posted, PostError> {
        let attached = find(&mut self.peers, peer).ok_or(PostError::PeerDown)?;
        if attached.blocked {
            return Err(attached.refusal());
        }
        let len = head.len().saturating_add(body.len());
        if len > self.caps.max_message {
            return Err(PostError::TooLong { len, max: self.caps.max_message });
        }
        let gap = if body.len() < ALIGN_FROM { 0 } else { GAP_MAX.saturating_sub(head.len()) };
        let cells = cells_for(gap + len);
        self.roster.warm(attached, peer);
        let record = attached.reserve(cells)?;
        // SAFETY: `reserve` returned room for the stamp and header, the gap, and `len` bytes.
        // `head` and `body` are readable and cannot overlap the reserved cells, which only this
        // function can reach. The cells are published once, below.
        unsafe {
            let message = record.add(PAYLOAD + gap);
            lane::copy_words(head.as_ptr(), message, head.len());
            copy_message(body.as_ptr(), message.add(head.len()), body.len());
            attached
                .out
                .publish(cells, record::header(MESSAGE | (gap as u32) << GAP_SHIFT, len as u32));
        }
        tell(&mut self.due, &self.host, attached, peer);
        Ok(Posted::Done)
    }

    #[inline]
    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let mut count = 0;
        if !self.ended.is_empty() {
            count += self.report_ended(budget, sink);
        }
        if self.roster.has_cold() {
            let asleep = self.event_page.event().is_announced();
            self.roster.look(&mut self.peers, asleep);
        }
        // References to the fields keep the loop from loading them again for each peer.
        let ShmRail { roster, peers, regions, host, due, first, .. } = self;
        let (hot, places) = (&roster.hot[..], &mut peers[..]);
        if *first >= hot.len() {
            *first = 0;
        }
        let mut at = *first;
        for _ in 0..hot.len() {
            if count >= budget {
                break;
            }
            let peer = hot[at];
            at = if at + 1 == hot.len() { 0 } else { at + 1 };
            let Some(attached) = places[usize::from(peer.0)].as_deref_mut() else { continue };
            if attached.is_quiet() {
                continue;
            }
            if attached.is_up() {
                count += attached.consume(peer, budget - count, regions, host, sink);
            }
            if attached.has_chores() {
                count += attached.chores(peer, budget - count, regions, sink);
            }
            if attached.due {
                attached.due = false;
                due.insert(peer);
            }
        }
        self.first += 1;
        self.roster.count(&mut self.peers);
        self.flush();
        count
    }

    #[inline]
    fn flush(&mut self) {
        if !self.due.is_empty() {
            self.ring_due();
        }
    }

    unsafe fn copy_to(
        &mut self,
        peer: Peer,
        pieces: &[(Local, Remote)],
    ) -> Option<Result<(), PostError>> {
        // SAFETY: the caller upholds the contract of `Rail::copy_to`, which `copy` requires for
        // `Put`.
        unsafe { self.copy(peer, Way::Put, pieces) }
    }

    unsafe fn copy_from(
        &mut self,
        peer: Peer,
        pieces: &[(Local, Remote)],
    ) -> Option<Result<(), PostError>> {
        // SAFETY: the caller upholds the contract of `Rail::copy_from`, which `copy` requires for
        // `Get`.
        unsafe { self.copy(peer, Way::Get, pieces) }
    }

    #[cold]
    fn reads_addresses(&self, peer: Peer) -> bool {
        let attached = self.peers.get(usize::from(peer.0)).and_then(Option::as_deref);
        attached.is_some_and(|attached| attached.cma)
    }

    #[inline(never)]
    unsafe fn read_address(&mut self, peer: Peer, local: Local, address: u64) -> bool {
        let Some(attached) = find(&mut self.peers, peer).filter(|attached| attached.cma) else {
            return false;
        };
        // SAFETY: the caller guarantees that `local` is writable.
        unsafe { post::read_address(attached, local, address, &self.host) }
    }

    #[inline]
    fn notify(&mut self, peer: Peer) {
        if let Some(attached) = self.peers.get(usize::from(peer.0)).and_then(Option::as_deref) {
            attached.ring(&self.host);
        }
    }

    fn check_peers<S: Sink>(&mut self, sink: &mut S) {
        self.check(sink);
    }
}

#[cfg(test)]
mod crowd;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod passes;
#[cfg(test)]
mod payloads;
#[cfg(test)]
mod tests;
