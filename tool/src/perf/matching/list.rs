//! An engine with two lists. It searches each list from the oldest entry, as the first matching
//! engines did. The lists are doubly linked within arrays and do not allocate, so a step is cheap.

use super::engine::{Engine, Pairs, Wanted};

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Entry {
    tag: u64,
    mask: u64,
    source: u32,
    source_mask: u32,
    number: u32,
    next: u32,
    prev: u32,
    listed: bool,
}

/// Free entries are linked by `next`.
struct Queue {
    entries: Vec<Entry>,
    head: u32,
    tail: u32,
    free: u32,
}

impl Queue {
    fn new(room: usize) -> Self {
        let empty = Entry {
            tag: 0,
            mask: 0,
            source: 0,
            source_mask: 0,
            number: 0,
            next: NONE,
            prev: NONE,
            listed: false,
        };
        let mut entries = vec![empty; room];
        for (n, entry) in entries.iter_mut().enumerate() {
            entry.next = if n + 1 < room { n as u32 + 1 } else { NONE };
        }
        Queue { entries, head: NONE, tail: NONE, free: 0 }
    }

    #[inline(always)]
    fn push(&mut self, entry: Entry) -> u32 {
        let at = self.free;
        self.free = self.entries[at as usize].next;
        self.entries[at as usize] = Entry { next: NONE, prev: self.tail, listed: true, ..entry };
        match self.tail {
            NONE => self.head = at,
            tail => self.entries[tail as usize].next = at,
        }
        self.tail = at;
        at
    }

    #[inline(always)]
    fn remove(&mut self, at: u32) -> u32 {
        let Entry { next, prev, number, .. } = self.entries[at as usize];
        match prev {
            NONE => self.head = next,
            prev => self.entries[prev as usize].next = next,
        }
        match next {
            NONE => self.tail = prev,
            next => self.entries[next as usize].prev = prev,
        }
        self.entries[at as usize].listed = false;
        self.entries[at as usize].next = self.free;
        self.free = at;
        number
    }

    #[inline(always)]
    fn find(&self, accepts: impl Fn(&Entry) -> bool) -> Option<u32> {
        let mut at = self.head;
        while at != NONE {
            let entry = &self.entries[at as usize];
            if accepts(entry) {
                return Some(at);
            }
            at = entry.next;
        }
        None
    }
}

pub struct List {
    posted: Queue,
    unexpected: Queue,
    at: Vec<u32>,
    pairs: Pairs,
}

impl List {
    pub const BYTES: f64 = size_of::<Entry>() as f64;

    /// Creates an engine with room for `room` receives and `room` messages. Receives have context
    /// numbers less than `contexts`.
    pub fn new(room: usize, contexts: usize) -> Self {
        List {
            posted: Queue::new(room.max(1)),
            unexpected: Queue::new(room.max(1)),
            at: vec![NONE; contexts],
            pairs: Pairs::default(),
        }
    }

    #[inline(always)]
    fn oldest(&self, entry: &Entry) -> Option<u32> {
        self.unexpected.find(|message| {
            (message.tag ^ entry.tag) & entry.mask
                | ((message.source ^ entry.source) & entry.source_mask) as u64
                == 0
        })
    }
}

#[inline(always)]
fn entry(wanted: Wanted, number: u32) -> Entry {
    Entry {
        tag: wanted.tag,
        mask: !wanted.ignore,
        source: wanted.source.unwrap_or(0),
        source_mask: if wanted.source.is_some() { u32::MAX } else { 0 },
        number,
        next: NONE,
        prev: NONE,
        listed: false,
    }
}

impl Engine for List {
    #[inline(always)]
    fn post(&mut self, wanted: Wanted, context: u32) {
        let entry = entry(wanted, context);
        match self.oldest(&entry) {
            Some(at) => {
                let cookie = self.unexpected.remove(at);
                self.pairs.add(context, cookie);
            }
            None => self.at[context as usize] = self.posted.push(entry),
        }
    }

    #[inline(always)]
    fn arrive(&mut self, source: u32, tag: u64, cookie: u32) {
        let found = self.posted.find(|receive| {
            (receive.tag ^ tag) & receive.mask
                | ((receive.source ^ source) & receive.source_mask) as u64
                == 0
        });
        match found {
            Some(at) => {
                let context = self.posted.remove(at);
                self.pairs.add(context, cookie);
            }
            None => {
                self.unexpected.push(entry(Wanted::exact(source, tag), cookie));
            }
        }
    }

    fn cancel(&mut self, context: u32) -> bool {
        let at = self.at[context as usize];
        match self.posted.entries.get(at as usize) {
            Some(entry) if entry.listed && entry.number == context => {
                self.posted.remove(at);
                true
            }
            _ => false,
        }
    }

    fn probe(&mut self, wanted: Wanted) -> bool {
        self.oldest(&entry(wanted, 0)).is_some()
    }

    fn claim(&mut self, wanted: Wanted, context: u32) -> bool {
        let Some(at) = self.oldest(&entry(wanted, 0)) else { return false };
        let cookie = self.unexpected.remove(at);
        self.pairs.add(context, cookie);
        true
    }

    fn pairs(&self) -> Pairs {
        self.pairs
    }
}
