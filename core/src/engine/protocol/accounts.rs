//! The credits and the room of streams: what a peer may send, and what it is told.

use crate::error::Violation;
use crate::rail::Rail;

use super::super::{Engine, State};
use super::MatchLimits;
use super::head;
use super::stock::Account;

/// Number of credits that a stream can reach even if no payload waits.
const ENOUGH_CREDITS: u32 = 64;

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Sends a Room message: the stream's limits together with an acknowledgement. Returns `false`
    /// if no rail has room, or if the peer has failed.
    #[cold]
    pub(in super::super) fn post_room(&mut self, stream: u32) -> bool {
        let Some(protocol) = &self.state.protocol else { return true };
        let account = &protocol.accounts[stream as usize];
        let credits = protocol.credits.after(account.credit_doublings);
        let headers = protocol.waiting.after(account.header_doublings);
        let words =
            [u64::from(credits) | u64::from(account.shorts_granted) << 32, u64::from(headers)];
        let posted = self.post_answer(stream, head::ROOM, 0, words, None, None);
        if posted.is_some()
            && let Some(protocol) = &mut self.state.protocol
        {
            protocol.accounts[stream as usize].grown = false;
        }
        posted.is_some()
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    #[cold]
    pub(in super::super) fn reset_accounts(&mut self, peer: u16) {
        for context in 0..self.config.contexts {
            let stream = self.stream_of(context as u8, peer) as usize;
            if let Some(protocol) = &mut self.protocol {
                protocol.accounts[stream] = Account::EMPTY;
            }
        }
    }

    #[cold]
    pub(in super::super) fn open_accounts(&mut self, peer: u16) {
        let pairing = &self.pairings[peer as usize];
        if pairing.longest == 0 {
            return;
        }
        let (theirs, longest) = (pairing.matching, pairing.longest);
        for context in 0..self.config.contexts {
            let stream = self.stream_of(context as u8, peer) as usize;
            let Some(protocol) = &mut self.protocol else { return };
            let ours = |theirs: u32, ours: u32| if theirs == u32::MAX { ours } else { theirs };
            let takes = &mut protocol.accounts[stream].takes;
            *takes = MatchLimits {
                eager: theirs.eager.min(protocol.eager).min(longest - head::SYNC as u32),
                // The peer may have raised its limits since it connected.
                credits: takes.credits.max(ours(theirs.credits, protocol.credits.each)),
                headers: takes.headers.max(ours(theirs.headers, protocol.waiting.each)),
            };
        }
    }

    #[inline(always)]
    pub(in super::super) fn credits_freed(
        &mut self,
        stream: u32,
        freed: u32,
    ) -> Result<(), Violation> {
        match &mut self.protocol {
            Some(protocol) => protocol.accounts[stream as usize].freed(freed),
            None => Ok(()),
        }
    }

    #[inline(always)]
    pub(in super::super) fn has_chores(&self) -> bool {
        self.protocol
            .as_ref()
            .is_some_and(|protocol| protocol.requests.due() + protocol.pulled.len() != 0)
    }

    #[inline(always)]
    pub(in super::super) fn returned(&self, stream: u32) -> u32 {
        self.protocol.as_ref().map_or(0, |protocol| protocol.accounts[stream as usize].returned)
    }

    #[inline(always)]
    pub(in super::super) fn credits_told(&mut self, stream: u32) {
        if let Some(protocol) = &mut self.protocol {
            let account = &mut protocol.accounts[stream as usize];
            account.told = account.returned;
        }
    }

    /// Called when a message is about to carry only returned credits, so that such messages become
    /// rarer.
    #[cold]
    pub(in super::super) fn credits_alone(&mut self, stream: u32) {
        let Some(protocol) = &mut self.protocol else { return };
        let account = &mut protocol.accounts[stream as usize];
        let has = protocol.credits.after(account.credit_doublings);
        if has < ENOUGH_CREDITS && account.owed() > has / 2 {
            account.grow_credits(&mut protocol.credits);
        }
    }

    /// A failed rail may have lost the Room message.
    #[cold]
    pub(in super::super) fn say_room_again(&mut self, stream: u32) {
        if let Some(protocol) = &mut self.protocol {
            let account = &mut protocol.accounts[stream as usize];
            let grown = account.credit_doublings | account.header_doublings != 0;
            account.grown |= grown || account.shorts_granted != 0;
        }
    }

    #[inline(always)]
    pub(in super::super) fn has_grown(&self, stream: u32) -> bool {
        self.protocol.as_ref().is_some_and(|protocol| protocol.accounts[stream as usize].grown)
    }

    /// Also returns whether the announcement is urgent.
    #[inline(always)]
    pub(in super::super) fn credits_owed(&self, stream: u32) -> (bool, bool) {
        match &self.protocol {
            Some(protocol) => {
                let account = &protocol.accounts[stream as usize];
                let owed = account.owed();
                let half = protocol.credits.after(account.credit_doublings) / 2;
                (owed != 0 || account.grown, owed > half || account.grown)
            }
            None => (false, false),
        }
    }
}
