//! Lists of puts and gets that are complete when the call returns: the peer takes no part. Hot path
//! of scattered transfers between processes of one host; makes one system call where the rail
//! copies by the kernel.

use core::ptr::NonNull;

use crate::error::OpError;
use crate::mem::{LocalAddr, Peer, RemoteAddr, copy_bytes};
use crate::rail::{Local, Rail, RailKey, Remote};

use super::super::super::Engine;
use super::super::super::table::resolve_local;
use super::Target;

/// Ranges that one call of [`put_now`](Engine::put_now) or [`get_now`](Engine::get_now) moves at
/// most.
pub const NOW_MAX: usize = 64;

/// The direction of a list.
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
    /// Writes the first ranges of a list, each from memory here to as many bytes of a peer's,
    /// and returns how many: at most [`NOW_MAX`]. They have landed when the call returns. The
    /// range after the last may be of another peer. 0: the first cannot be written without the
    /// peer or the network, so [`put`](Self::put) it.
    ///
    /// The writes overtake what was issued earlier, even if a fence lies between. Later signals and
    /// messages follow them.
    ///
    /// # Errors
    /// The first range is invalid, and nothing was written; or the peer or a copy has failed, and a
    /// part may have been written.
    pub fn put_now(
        &mut self,
        ranges: impl IntoIterator<Item = (LocalAddr, usize, RemoteAddr)>,
    ) -> Result<usize, OpError> {
        self.move_now(Way::Put, ranges)
    }

    /// Reads the first ranges of a list, as [`put_now`](Self::put_now) writes them.
    ///
    /// # Errors
    /// As [`put_now`](Self::put_now).
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
            let (local, target) =
                match (resolve_local(self.state.locals, here, len as u64), self.target(there, len as u64)) {
                    (Ok(local), Ok(target)) => (local, target),
                    // Only rails touch such memory.
                    (Err(OpError::DeviceMemory | OpError::NativeAtomics), _)
                    | (_, Err(OpError::DeviceMemory | OpError::NativeAtomics)) => break,
                    (Err(_), _) | (_, Err(_)) if count != 0 => break,
                    (Err(error), _) | (_, Err(error)) => return Err(error),
                };
            let Target { peer, rail, .. } = target;
            if count == 0 {
                self.usable(peer)?;
            }
            // One call of one rail copies them all; mapped memory is copied alone.
            let ours = (peer, rail, target.mapped.is_null());
            if *first.get_or_insert(ours) != ours {
                break;
            }
            if !target.mapped.is_null() {
                let (from, to) = match way {
                    Way::Put => (local.as_ptr(), target.mapped),
                    Way::Get => (target.mapped, local.as_ptr()),
                };
                // SAFETY: `local` was checked against its registered region, `mapped` against the
                // imported one; the rail keeps the mapping until the peer is detached, and a failed
                // peer's regions are marked unmapped first.
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
        // SAFETY: each local range was checked against its registered region.
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
