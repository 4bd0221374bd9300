//! The matcher of `fishplate-core` as an engine, with the memory that it borrows.

use std::ptr::NonNull;

use fishplate_core::engine::tag::{
    Arrive, Cancel, Matcher, MatcherMemory, Post, PostedSlot, ReceiveId, Tag, UnexpectedSlot,
};

use super::engine::{Engine, Pairs, Wanted};

pub struct Ours {
    /// Dropped first: it borrows from `_memory`.
    matcher: Matcher<'static>,
    ids: Vec<Option<ReceiveId>>,
    pairs: Pairs,
    _memory: (Lent<PostedSlot>, Lent<UnexpectedSlot>, Lent<u32>),
}

/// Heap memory that is lent once and freed with this value.
struct Lent<T>(NonNull<[T]>);

impl<T: Clone> Lent<T> {
    fn new(value: T, len: usize) -> Self {
        Lent(NonNull::from(vec![value; len].leak()))
    }

    /// # Safety
    /// Call this once. Do not use the result after this value is dropped.
    unsafe fn lend(&self) -> &'static mut [T] {
        // SAFETY: `leak` keeps the slice valid until the drop below. The caller guarantees that
        // this is its only borrow.
        unsafe { &mut *self.0.as_ptr() }
    }
}

impl<T> Drop for Lent<T> {
    fn drop(&mut self) {
        // SAFETY: the pointer comes from a leaked vector. `leak` gave it a capacity equal to its
        // length. The borrower was dropped before.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl Ours {
    /// Sizes in bytes: of a waiting receive with its share of the buckets, and of a waiting
    /// message.
    pub const BYTES: (f64, f64) =
        (size_of::<PostedSlot>() as f64 + 4.0, size_of::<UnexpectedSlot>() as f64 + 4.0);

    /// Creates an engine with room for `room` receives and `room` messages. Receives have context
    /// numbers less than `contexts`.
    pub fn new(room: usize, contexts: usize) -> Self {
        let room = room.next_power_of_two();
        let posted = Lent::new(PostedSlot::EMPTY, room);
        let unexpected = Lent::new(UnexpectedSlot::EMPTY, room);
        let buckets = Lent::new(0, MatcherMemory::buckets(room, room));
        // SAFETY: each slice is lent once, to the matcher, which is dropped before the slices.
        let memory = unsafe {
            MatcherMemory {
                posted: posted.lend(),
                unexpected: unexpected.lend(),
                buckets: buckets.lend(),
            }
        };
        let matcher = Matcher::new(memory, 0x0066_6973_6870_6c61).expect("room for at least one");
        let _memory = (posted, unexpected, buckets);
        Ours { matcher, ids: vec![None; contexts], pairs: Pairs::default(), _memory }
    }
}

impl Engine for Ours {
    #[inline(always)]
    fn post(&mut self, wanted: Wanted, context: u32) {
        match self.matcher.post(
            wanted.source,
            wanted.tag.into(),
            Tag::from(wanted.ignore),
            context as u64,
        ) {
            Ok(Post::Waiting(id)) => self.ids[context as usize] = Some(id),
            Ok(Post::Matched(message)) => self.pairs.add(context, message.cookie as u32),
            Err(error) => panic!("a workload beyond its room: {error:?}"),
        }
    }

    #[inline(always)]
    fn arrive(&mut self, source: u32, tag: u64, cookie: u32) {
        match self.matcher.arrive(source, tag.into(), 8, cookie as u64) {
            Ok(Arrive::Matched { context, .. }) => self.pairs.add(context as u32, cookie),
            Ok(Arrive::Stored(_)) => {}
            Err(error) => panic!("a workload beyond its room: {error:?}"),
        }
    }

    fn cancel(&mut self, context: u32) -> bool {
        let id = self.ids[context as usize].take();
        id.is_some_and(|id| matches!(self.matcher.cancel(id), Cancel::Removed(_)))
    }

    fn probe(&mut self, wanted: Wanted) -> bool {
        let found = self.matcher.probe(wanted.source, wanted.tag.into(), Tag::from(wanted.ignore));
        matches!(found, Ok(Some(_)))
    }

    fn claim(&mut self, wanted: Wanted, context: u32) -> bool {
        let found = self.matcher.mprobe(wanted.source, wanted.tag.into(), Tag::from(wanted.ignore));
        let Ok(Some((message, _))) = found else { return false };
        let taken = self.matcher.take(message);
        taken.is_ok_and(|message| {
            self.pairs.add(context, message.cookie as u32);
            true
        })
    }

    fn pairs(&self) -> Pairs {
        self.pairs
    }
}
