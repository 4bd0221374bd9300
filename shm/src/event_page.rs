//! The event page: one page that holds one [`EventCount`]. Its owner sleeps on the eventcount, and
//! every peer maps the page. Creating a page allocates and makes system calls.
//! [`EventCount::notify`] costs a load and a branch while the owner is awake.
//!
//! Peers can write to the page. At worst the owner wakes without reason, or sleeps until its
//! deadline.

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use fishplate_core::sync::event::EventCount;
use static_assertions::{assert_impl_all, const_assert};

use crate::error::SegmentError;
use crate::foreign::Foreign;
use crate::segment::{self, Access, Mapping, PAGE};

/// Size of the shared page, in bytes. The eventcount is at offset 0.
const LEN: usize = PAGE;

const_assert!(size_of::<EventCount>() <= LEN);
const_assert!(align_of::<EventCount>() <= PAGE);

#[derive(Debug)]
pub(crate) struct EventPage {
    fd: OwnedFd,
    page: Mapping,
}

assert_impl_all!(EventPage: Send, Sync);

impl EventPage {
    pub(crate) fn create() -> Result<Self, SegmentError> {
        let fd = segment::create(LEN)?;
        let page = Mapping::new(fd.as_fd(), LEN, Access::Write)?;
        segment::seal(fd.as_fd())?;
        Ok(EventPage { fd, page })
    }

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
        // SAFETY: `self` owns the mapping, so the page stays mapped while the reference lives. A
        // page is aligned well enough for the type. An eventcount consists of atomics, so any bytes
        // are valid, zeros too.
        unsafe { self.page.ptr().cast::<EventCount>().as_ref() }
    }
}

/// The eventcount on which the owner of a [`ShmRail`](crate::ShmRail) sleeps. This is a handle:
/// clones share the eventcount, and it may outlive the rail.
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
