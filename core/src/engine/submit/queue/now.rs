//! Lists of puts and gets that complete before the call returns, without help from the peer. Hot
//! path of scattered transfers between processes of one host. If the rail copies through the
//! kernel, each call makes one system call.

use core::ptr::NonNull;

use crate::error::OpError;
use crate::mem::{LocalAddr, Peer, RemoteAddr, copy_bytes};
use crate::rail::{Local, Rail, RailKey, Remote};

use super::super::super::Engine;
use super::super::super::table::resolve_local;
use super::Target;

/// Maximum number of ranges that one call moves.
pub const NOW_MAX: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Put,
    Get,
}

const NOTHING: (Local, Remote) = (
    Local { ptr: NonNull::dangling(), len: 0, desc: 0 },
    Remote { key: RailKey { key: 0, base: 0 }, offset: 0 },
);

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Writes the first ranges of a list, each from local memory to the same number of bytes in a
    /// peer's memory. Returns how many ranges it wrote, at most [`NOW_MAX`]. Their data has landed
    /// when the call returns. May stop early, for example before a range of another peer. Returns 0
    /// if the first range cannot be written without the peer or the network: use [`put`](Self::put)
    /// for it.
    ///
    /// The writes overtake operations that were issued earlier, even across a fence. Later signals
    /// and messages follow them.
    ///
    /// # Errors
    /// If the first range is invalid, nothing was written. If the peer or a copy has failed, a part
    /// may have been written.
    pub fn put_now(
        &mut self,
        ranges: impl IntoIterator<Item = (LocalAddr, usize, RemoteAddr)>,
    ) -> Result<usize, OpError> {
        self.move_now(Way::Put, ranges)
    }

    /// Reads the first ranges of a list into local memory. The rules of [`put_now`](Self::put_now)
    /// apply.
    ///
    /// # Errors
    /// The errors of [`put_now`](Self::put_now).
    pub fn get_now(
        &mut self,
        ranges: impl IntoIterator<Item = (LocalAddr, usize, RemoteAddr)>,
    ) -> Result<usize, OpError> {
        self.move_now(Way::Get, ranges)
    }

    fn move_now(
        &mut self,
        way: Way,
        ranges: impl IntoIterator<Item = (LocalAddr, usize, RemoteAddr)>,
    ) -> Result<usize, OpError> {
        let mut pieces = [NOTHING; NOW_MAX];
        let (mut count, mut first) = (0, None);
        for (here, len, there) in ranges.into_iter().take(NOW_MAX) {
            let (local, target) = match (
                resolve_local(self.state.locals, here, len as u64),
                self.target(there, len as u64),
            ) {
                (Ok(local), Ok(target)) => (local, target),
                // The processor copies neither device memory nor memory with native atomics.
                (Err(OpError::DeviceMemory | OpError::NativeAtomics), _)
                | (_, Err(OpError::DeviceMemory | OpError::NativeAtomics)) => break,
                (Err(_), _) | (_, Err(_)) if count != 0 => break,
                (Err(error), _) | (_, Err(error)) => return Err(error),
            };
            let Target { peer, rail, .. } = target;
            if count == 0 {
                self.usable(peer)?;
            }
            // All ranges of a call share one peer and one rail, and are all mapped or all unmapped.
            let ours = (peer, rail, target.mapped.is_null());
            if *first.get_or_insert(ours) != ours {
                break;
            }
            if !target.mapped.is_null() {
                let (from, to) = match way {
                    Way::Put => (local.as_ptr(), target.mapped),
                    Way::Get => (target.mapped, local.as_ptr()),
                };
                // SAFETY: `resolve_local` checked `local` against its registered region, and
                // `target` checked `mapped` against the imported one. The rail keeps the mapping
                // until the peer is detached. When a peer fails, its regions are marked unmapped
                // first.
                unsafe { copy_bytes(from, to, len) };
                self.state.direct |= way == Way::Put;
                count += 1;
                continue;
            }
            let Some((_, local, remote)) = self.unmapped(local, len, &target) else { break };
            pieces[count] = (local, remote);
            count += 1;
        }
        let Some((peer, rail, true)) = first else { return Ok(count) };
        let Some(there) = self.rails.get_mut(rail as usize) else { return Ok(0) };
        let pieces = &pieces[..count];
        // SAFETY: `resolve_local` checked each local range against its registered region.
        let copied = unsafe {
            match way {
                Way::Put => there.copy_to(Peer(peer), pieces),
                Way::Get => there.copy_from(Peer(peer), pieces),
            }
        };
        self.state.direct |= way == Way::Put;
        match copied {
            Some(Ok(())) => Ok(count),
            Some(Err(error)) => Err(self.state.refused(rail as usize, peer, error)),
            None => Ok(0),
        }
    }
}
