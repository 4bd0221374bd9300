//! The specification of matching: two lists, searched from the oldest entry.

use fishplate_core::engine::tag::{Arrived, Cancel, Tag, TagError};

use super::ops::{Answers, Op, Seen, Wanted};

impl Wanted {
    pub fn accepts(&self, message: &Arrived) -> bool {
        (self.tag ^ message.tag) & !self.ignore == Tag::ZERO
            && self.source.is_none_or(|source| source == message.source)
    }
}

/// The two lists, and the claimed messages.
#[derive(Clone, Debug)]
pub struct Model {
    room: usize,
    pub posted: Vec<(u64, Wanted)>,
    pub unexpected: Vec<Arrived>,
    pub claimed: Vec<Arrived>,
}

impl Model {
    /// Creates a model with room for `room` receives and `room` messages.
    pub fn new(room: usize) -> Self {
        Model { room, posted: vec![], unexpected: vec![], claimed: vec![] }
    }

    fn oldest(&self, wanted: &Wanted) -> Option<usize> {
        self.unexpected.iter().position(|message| wanted.accepts(message))
    }
}

impl Answers for Model {
    fn answer(&mut self, op: &Op) -> Seen {
        match *op {
            Op::Post { wanted, context } => match self.oldest(&wanted) {
                Some(at) => Seen::Message(self.unexpected.remove(at)),
                None if self.posted.len() == self.room => Seen::Refused(TagError::Full),
                None => {
                    self.posted.push((context, wanted));
                    Seen::Waits
                }
            },
            Op::Arrive(message) => {
                match self.posted.iter().position(|(_, wanted)| wanted.accepts(&message)) {
                    Some(at) => {
                        let (context, _) = self.posted.remove(at);
                        Seen::Receive(context)
                    }
                    None if self.unexpected.len() + self.claimed.len() == self.room => {
                        Seen::Refused(TagError::Full)
                    }
                    None => {
                        self.unexpected.push(message);
                        Seen::Waits
                    }
                }
            }
            // Cancels only waiting receives. For others the result depends on the reuse of their
            // slot.
            Op::Cancel { context } => match self.posted.iter().position(|(c, _)| *c == context) {
                Some(at) => {
                    self.posted.remove(at);
                    Seen::Cancelled(Cancel::Removed(context))
                }
                None => Seen::Cancelled(Cancel::Stale),
            },
            Op::Probe(wanted) => match self.oldest(&wanted) {
                Some(at) => Seen::Message(self.unexpected[at]),
                None => Seen::Nothing,
            },
            Op::Claim(wanted) => match self.oldest(&wanted) {
                Some(at) => {
                    self.claimed.push(self.unexpected[at]);
                    Seen::Message(self.unexpected.remove(at))
                }
                None => Seen::Nothing,
            },
            Op::Take { cookie } => {
                match self.claimed.iter().position(|message| message.cookie == cookie) {
                    Some(at) => Seen::Message(self.claimed.remove(at)),
                    None if self.unexpected.iter().any(|message| message.cookie == cookie) => {
                        Seen::Refused(TagError::NotClaimed)
                    }
                    None => Seen::Refused(TagError::Stale),
                }
            }
            Op::Discard { cookie } => {
                for list in [&mut self.claimed, &mut self.unexpected] {
                    if let Some(at) = list.iter().position(|message| message.cookie == cookie) {
                        return Seen::Message(list.remove(at));
                    }
                }
                Seen::Refused(TagError::Stale)
            }
            Op::FailSource(source) => {
                let named = |wanted: &Wanted| wanted.source == Some(source);
                let removed = self
                    .posted
                    .iter()
                    .filter(|(_, w)| named(w))
                    .map(|(context, _)| *context)
                    .collect();
                self.posted.retain(|(_, wanted)| !named(wanted));
                Seen::Removed(removed)
            }
        }
    }
}
