//! The word on which a process sleeps, in memory that every peer maps: one page, one
//! [`EventCount`]. Making one allocates and makes system calls; ringing it is
//! [`EventCount::notify`], a load and a branch while the owner is awake.
//!
//! Peers can write the page: at worst the owner wakes for nothing or sleeps until its deadline.

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use fishplate_core::sync::event::EventCount;
use static_assertions::{assert_impl_all, const_assert};

use crate::error::SegmentError;
use crate::foreign::Foreign;
use crate::segment::{self, Access, Mapping, PAGE};

/// Size of the page that travels, in bytes; the eventcount lies at its start.
const LEN: usize = PAGE;

const_assert!(size_of::<EventCount>() <= LEN);
const_assert!(align_of::<EventCount>() <= PAGE);

/// The event page of this process, or of a peer.
#[derive(Debug)]
pub(crate) struct EventPage {
    fd: OwnedFd,
    page: Mapping,
}

assert_impl_all!(EventPage: Send, Sync);

impl EventPage {
    /// Creates an event page.
    pub(crate) fn create() -> Result<Self, SegmentError> {
        let fd = segment::create(LEN)?;
        let page = Mapping::new(fd.as_fd(), LEN, Access::Write)?;
        segment::seal(fd.as_fd())?;
        Ok(EventPage { fd, page })
    }

    /// Maps a peer's event page.
    pub(crate) fn attach(fd: Foreign) -> Result<Self, SegmentError> {
        let fd = fd.into_memory(LEN as u64)?;
        let page = Mapping::new(fd.as_fd(), LEN, Access::Write)?;
        Ok(EventPage { fd, page })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    #[inline(always)]
    pub(crate) fn event(&self) -> &EventCount {
        // SAFETY: the page is mapped as long as `self` lives and aligned beyond what the type asks.
        // Zeroed memory is a valid eventcount, it consists of atomics, and any value in them is one
        // that it copes with.
        unsafe { self.page.ptr().cast::<EventCount>().as_ref() }
    }
}

/// The eventcount of a [`ShmRail`](crate::ShmRail), on which its owner sleeps. A handle: it
/// outlives the rail, and clones are the same eventcount.
#[derive(Clone, Debug)]
pub struct WaitObject {
    event_page: Arc<EventPage>,
}

assert_impl_all!(WaitObject: Send, Sync);

impl WaitObject {
    pub(crate) fn new(event_page: Arc<EventPage>) -> Self {
        WaitObject { event_page }
    }
}

impl Deref for WaitObject {
    type Target = EventCount;

    #[inline(always)]
    fn deref(&self) -> &EventCount {
        self.event_page.event()
    }
}
