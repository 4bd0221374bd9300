//! Publishes the command that blocks a worker, in a word that the command's queue may read at any
//! time. The word describes the worker's last turn, and orders no other memory.

/// A command that the worker cannot start yet. It blocks later submissions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The command's [`Event::index`](super::super::command::Event::index).
    pub command: u16,
    /// The reason why a command waits.
    pub by: HeldBy,
}

/// What a command waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldBy {
    /// Room in the engine: a window, a table or a rail is full.
    Room,
    /// Progress in the engine: the commands before a marker, the acknowledgements of a quiet, or
    /// the first half of a copy between peers.
    Engine,
    /// The command that this command follows, in any queue. Holds its
    /// [`Event::index`](super::super::command::Event::index).
    Event(u16),
}

impl Held {
    pub(super) fn pack(self) -> u64 {
        let (kind, event) = match self.by {
            HeldBy::Room => (1, 0),
            HeldBy::Engine => (2, 0),
            HeldBy::Event(event) => (3, event),
        };
        u64::from(self.command) | u64::from(event) << 16 | kind << 32
    }

    pub(super) fn unpack(word: u64) -> Option<Self> {
        let by = match word >> 32 {
            1 => HeldBy::Room,
            2 => HeldBy::Engine,
            3 => HeldBy::Event((word >> 16) as u16),
            _ => return None,
        };
        Some(Held { command: word as u16, by })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_comes_back_from_its_word_and_nothing_is_none() {
        for by in [HeldBy::Room, HeldBy::Engine, HeldBy::Event(0), HeldBy::Event(u16::MAX)] {
            for command in [0, 7, u16::MAX] {
                let held = Held { command, by };
                assert_ne!(held.pack(), 0);
                assert_eq!(Held::unpack(held.pack()), Some(held));
            }
        }
        assert_eq!(Held::unpack(0), None);
    }
}
