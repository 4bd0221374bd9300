//! Atomics that a rail executes, in regions registered [with native
//! atomics](crate::mem::Region::with_native_atomics). Nothing blocks.
//!
//! A native atomic has no number. Two rules keep its place in the stream: it is posted once
//! everything earlier is applied, and nothing later is posted before it has completed. So a native
//! atomic needs no ordering by the rail, and costs a round trip.

use core::ptr::NonNull;

use crate::error::{OpError, PostError};
use crate::mem::{Peer, RailId, RemoteAddr};
use crate::op::Amo;
use crate::rail::{Posted, Rail, Remote};

use super::super::super::pending::OpKind;
use super::super::super::post::Blocked;
use super::super::super::post_tag::{Owner, PostTag};
use super::super::super::wire::{Body, NO_TOKEN};
use super::{Ask, ContextId, Engine, Issued, Notice};

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Queues a native atomic. The caller has checked the word and its alignment.
    #[cold]
    #[inline(never)]
    pub(super) fn atomic_native(
        &mut self,
        context: ContextId,
        at: RemoteAddr,
        amo: Amo,
        notice: Notice,
        fetch: bool,
    ) -> Result<Issued, OpError> {
        let word = self.target_anywhere(at, amo.width as u64)?;
        let rail = self.state.remotes[word.region as usize].native;
        let caps = self.rails.get(rail as usize).ok_or(OpError::NativeAtomics)?.caps();
        if !caps.native_atomics.has(amo.op, amo.width) {
            return Err(OpError::Rail(RailId(rail), PostError::Unsupported));
        }
        let stream = self.stream(context, word.peer)?;
        let message = Some(Body::Amo { at: word.place(), amo, token: NO_TOKEN });
        self.enqueue(
            stream,
            Ask { kind: OpKind::Atomic, message, fetch, remote: word.region, ..Ask::NOTHING },
            notice,
        )
    }

    #[cold]
    #[inline(never)]
    pub(in crate::engine) fn post_native(
        &mut self,
        stream: u32,
        index: u32,
    ) -> Result<(), Blocked> {
        let state = &mut self.state;
        let s = &state.streams[stream as usize];
        let slot = &mut state.pending.slots[index as usize];
        let Some(Body::Amo { at, amo, .. }) = slot.message else {
            return if slot.posts == 0 { Ok(()) } else { Err(Blocked::Atomic) };
        };
        if s.in_flight() != 0 {
            return Err(Blocked::Fence);
        }
        let (peer, remote) = (s.peer, &state.remotes[slot.remote as usize]);
        let rail = remote.native as usize;
        let remote = Remote { key: remote.keys[rail], offset: at.offset };
        let fetch = slot.fetch.then_some(NonNull::from(&mut slot.value));
        let cx = PostTag { owner: Owner::Atomic(index), bytes: amo.width as u32 }.pack();
        // SAFETY: the rail writes the result to `slot.value`, in memory that the engine borrows.
        // The slot belongs to this operation until its completion is handled.
        let result = unsafe { self.rails[rail].post_atomic(Peer(peer), amo, remote, fetch, cx) };
        match result {
            Ok(posted) => {
                (slot.fetch, slot.message) = (false, None);
                if posted == Posted::Done {
                    return Ok(());
                }
                slot.posts += 1;
                state.loads.posted(rail, amo.width as u64);
                Err(Blocked::Atomic)
            }
            Err(PostError::Again) => Err(state.no_room()),
            Err(error) => {
                state.hard_error(peer, rail, error)?;
                Err(Blocked::Refused(RailId(rail as u8), error))
            }
        }
    }
}
