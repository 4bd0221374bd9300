//! One attached peer: its lanes, imports, operations in flight, and state. Sending and receiving do
//! not allocate, block or make a system call. Waking the peer, teardown and liveness checks may do
//! so.

mod imports;
mod remote;

use fishplate_core::error::{CompleteError, PeerError, PostError, Violation};
use fishplate_core::mem::{Peer, Untrusted};
use fishplate_core::rail::Sink;
use fishplate_core::sync::host::{Host, notifier_fence};

use crate::error::SegmentError;
use crate::handshake::Link;
use crate::lane::{self, Consumer, LaneMemory, PAYLOAD, Pair, Producer, Refused, cells_for};
use crate::payload::PayloadPaths;
use crate::record::{GAP_MAX, GAP_SHIFT, LANDED, MESSAGE};
use crate::regions::Regions;
use crate::staged::{Staged, blame};

pub(crate) use imports::Import;
pub(crate) use remote::Remote;

#[derive(Debug)]
pub(crate) struct Attached {
    pub(crate) out: Producer,
    pub(crate) input: Consumer,
    max_message: usize,
    /// [`refusal`](Attached::refusal) returns why posts are refused.
    pub(crate) blocked: bool,
    /// This pass has written to the peer's lane, so it ends with a notification.
    pub(crate) due: bool,
    /// Whether every pass polls the peer: see [`Roster`](crate::roster::Roster).
    pub(crate) hot: bool,
    /// Whether a record has arrived since the last check for cold peers.
    pub(crate) heard: bool,
    /// The index is the slot in the import's key. Has at most `max_imports` entries.
    imports: Vec<Option<Import>>,
    max_imports: usize,
    pub(crate) staged: Staged,
    pub(crate) cma: bool,
    pub(crate) payloads: PayloadPaths,
    pub(crate) remote: Option<Remote>,
    down: Option<PeerError>,
    /// Whether `peer_down` has been reported.
    told: bool,
    /// The segments of the outgoing and the incoming lane. `out` and `input` point into them.
    lanes: Box<[LaneMemory]>,
}

// SAFETY: the pointers are not tied to a thread. They refer to mappings that this value owns, to
// registered memory, or to memory that the poster keeps valid until a post completes.
unsafe impl Send for Attached {}

pub(crate) struct Sizes {
    pub(crate) max_message: usize,
    pub(crate) max_regions: u16,
    pub(crate) chunk: usize,
}

impl Attached {
    /// Both lanes are at position `start`.
    pub(crate) fn over(link: Link, sizes: Sizes, start: u64) -> Self {
        let Link { control, peer, pair, event_page, common, pair_id, light, cma, .. } = link;
        // SAFETY: the new value owns the pair as long as the ends. `over` consumes the link, so
        // this is the only call for the pair.
        let ends = unsafe { pair.open(start) };
        let remote = Remote {
            control,
            pidfd: peer.pidfd,
            pid: peer.pid,
            pair_id,
            common,
            event_page,
            light,
            known_until: 0,
        };
        let Pair { outgoing, incoming } = pair;
        Self::new(ends, Box::new([outgoing, incoming]), Some(remote), cma, sizes)
    }

    pub(crate) fn own(cells: u32, sizes: Sizes) -> Result<Self, SegmentError> {
        let lane = LaneMemory::create(cells, [0; 16], [0; 16])?;
        // SAFETY: the new value owns the lane as long as the ends. The lane was just created,
        // mapped writable, so it has no other ends.
        let ends = unsafe { lane::ends(&lane, &lane, 0) };
        Ok(Self::new(ends, Box::new([lane]), None, false, sizes))
    }

    fn new(
        (out, input): (Producer, Consumer),
        lanes: Box<[LaneMemory]>,
        remote: Option<Remote>,
        cma: bool,
        sizes: Sizes,
    ) -> Self {
        Attached {
            out,
            input,
            max_message: sizes.max_message,
            blocked: false,
            due: false,
            hot: true,
            heard: true,
            imports: Vec::new(),
            max_imports: sizes.max_regions.into(),
            staged: Staged::new(sizes.chunk),
            cma,
            payloads: PayloadPaths::new(),
            remote,
            down: None,
            told: false,
            lanes,
        }
    }

    #[cold]
    pub(crate) fn refusal(&self) -> PostError {
        if self.down.is_some() { PostError::PeerDown } else { PostError::Again }
    }

    #[inline(always)]
    pub(crate) fn reserve(&mut self, cells: u64) -> Result<*mut u8, PostError> {
        match self.out.reserve(cells) {
            Ok(record) => Ok(record),
            Err(refused) => Err(self.refused(refused)),
        }
    }

    #[cold]
    pub(crate) fn refused(&mut self, refused: Refused) -> PostError {
        if let Some(why) = blame(refused) {
            self.fail(why);
        }
        match refused {
            Refused::Full => PostError::Again,
            Refused::Corrupt => PostError::PeerDown,
        }
    }

    /// Reports up to `budget` records to the sink. Returns the number of reported records.
    #[inline]
    pub(crate) fn consume<S: Sink>(
        &mut self,
        peer: Peer,
        budget: u32,
        regions: &Regions,
        host: &impl Host,
        sink: &mut S,
    ) -> u32 {
        let mut count = 0;
        while count < budget {
            let Some(header) = self.input.header() else { break };
            self.heard = true;
            self.input.prefetch();
            let value = (header >> 32) as u32;
            let cells = match header as u32 {
                MESSAGE => match self.message(peer, value as usize, 0, sink) {
                    Some(cells) => cells,
                    None => break,
                },
                LANDED => {
                    sink.landed(peer, value);
                    1
                }
                kind if kind as u8 == MESSAGE as u8 => {
                    // Only longer payloads have a gap before them, so ignore the gap here.
                    self.input.prefetch_record(cells_for(value as usize));
                    match self.message(peer, value as usize, (kind >> GAP_SHIFT) as usize, sink) {
                        Some(cells) => cells,
                        None => break,
                    }
                }
                _ => match self.staged.take(&self.input, header, peer, regions, sink) {
                    Ok((cells, ended)) => {
                        if let Some(len) = ended {
                            self.payloads.came(len, || host.now_ns());
                        }
                        cells
                    }
                    Err(violation) => {
                        self.fail(PeerError::Protocol(violation));
                        break;
                    }
                },
            };
            // The producer may sleep until the lane has room.
            self.due |= self.input.advance(cells);
            count += 1;
        }
        count
    }

    /// Reports the next record's message, which begins after a gap. Returns the number of cells of
    /// the record, or `None` after it failed the peer.
    #[inline(always)]
    fn message<S: Sink>(
        &mut self,
        peer: Peer,
        len: usize,
        gap: usize,
        sink: &mut S,
    ) -> Option<u64> {
        if len > self.max_message || gap > GAP_MAX {
            let violation = if gap > GAP_MAX { Violation::Kind } else { Violation::Length };
            self.fail(PeerError::Protocol(violation));
            return None;
        }
        // SAFETY: `len` and `gap` were checked above. A lane of valid sizes holds a gap and
        // `max_message` bytes, and its cells are mapped twice, in adjacent mappings. The type
        // `Untrusted` keeps the sink from storing the reference.
        sink.message(peer, unsafe { Untrusted::new(self.input.record().add(PAYLOAD + gap), len) });
        Some(cells_for(gap + len))
    }

    /// Does rare work: reports the failed posts of a failed peer, or sends records that waited for
    /// room. Returns the number of reported events, or 1 if more records could be sent now: the
    /// owner must not sleep then, because nothing would notify it.
    #[cold]
    #[inline(never)]
    pub(crate) fn chores<S: Sink>(
        &mut self,
        peer: Peer,
        budget: u32,
        regions: &Regions,
        sink: &mut S,
    ) -> u32 {
        if self.down.is_some() {
            return self.report(peer, budget, sink);
        }
        let before = self.out.position();
        let sent = match self.staged.send(&mut self.out) {
            Ok(more) => self.staged.serve(&mut self.out, peer, regions).map(|owed| more | owed),
            corrupt => corrupt,
        };
        self.due |= self.out.position() != before;
        match sent {
            Ok(more) => {
                self.blocked = self.staged.sending();
                u32::from(more).min(budget)
            }
            Err(refused) => {
                self.refused(refused);
                self.report(peer, budget, sink)
            }
        }
    }

    #[inline(always)]
    pub(crate) fn has_chores(&self) -> bool {
        self.blocked || self.staged.owes()
    }

    /// Returns whether a pass finds nothing to do. A failed peer has chores. Loads little, because
    /// most passes find most peers quiet.
    #[inline(always)]
    pub(crate) fn is_quiet(&self) -> bool {
        !(self.has_chores() | self.due) && self.input.header().is_none()
    }

    /// Returns whether no operation is in flight and no work remains until a record arrives.
    pub(crate) fn rests(&self) -> bool {
        let quiet = if self.is_up() { !self.has_chores() } else { self.told };
        quiet && !self.staged.has_posts()
    }

    #[inline(always)]
    pub(crate) fn is_up(&self) -> bool {
        self.down.is_none()
    }

    /// Fails the peer. Its lane is not accessed again. [`report`](Attached::report) then reports
    /// the failure to the sink, and the program may reuse the memory of its sends.
    #[cold]
    pub(crate) fn fail(&mut self, why: PeerError) {
        self.down.get_or_insert(why);
        self.blocked = true;
        self.leave();
    }

    /// Reports that the peer failed, then the completions of its posts: at most `budget` events.
    pub(crate) fn report<S: Sink>(&mut self, peer: Peer, budget: u32, sink: &mut S) -> u32 {
        let Some(why) = self.down else { return 0 };
        let mut count = 0;
        if !self.told && count < budget {
            self.told = true;
            sink.peer_down(peer, why);
            count += 1;
        }
        while count < budget {
            let Some(cx) = self.staged.abandon() else { break };
            sink.done(cx, Err(CompleteError::PeerDown));
            count += 1;
        }
        count
    }

    fn leave(&self) {
        if let Some(outgoing) = self.lanes.first() {
            outgoing.leave();
        }
    }

    /// Returns whether the peer had not left when this thread copied memory of its sends. A peer
    /// leaves when its rail detaches us or fails us.
    pub(crate) fn is_there(&self) -> bool {
        self.lanes.last().is_some_and(LaneMemory::is_there)
    }

    /// Returns whether [`ring`](Attached::ring) needs no fence.
    #[inline(always)]
    pub(crate) fn is_light(&self) -> bool {
        self.remote.as_ref().is_none_or(|remote| remote.light)
    }

    #[inline(always)]
    pub(crate) fn ring<H: Host>(&self, host: &H) {
        let Some(remote) = &self.remote else { return };
        if !remote.light {
            // This is the notifier's side of the race with a sleeper that does not use
            // `membarrier`. The fence orders the published records before the load of the event
            // page. It pairs with the fence of the sleeper.
            notifier_fence();
        }
        remote.event_page.event().notify_with(host, || remote.control.ring());
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
impl Attached {
    pub(crate) fn outgoing(&self) -> &LaneMemory {
        &self.lanes[0]
    }
}
