//! What a target's memory may be. Operations are numbered in the order in which they were issued.
//! Each write has a place and a value of its own there, each word takes a value that it never had
//! before, so what is in memory tells which operations are visible.
//!
//! | what is seen                                 | what must be in place then                 |
//! |----------------------------------------------|--------------------------------------------|
//! | a signal or atomic                           | its own data, and all operations before it |
//! | a byte of a write after a fence              | all operations before the fence            |
//! | a tagged message received                    | the message, and all operations before it  |
//! | a completion, or an operation done on return | that operation                             |
//! | quiet                                        | all operations                             |
//!
//! Everything else may be in place or not. Nothing goes back, and nothing changes that was not
//! written.

use std::ptr::NonNull;

/// Bytes behind each place that nobody writes.
pub const GAP: usize = 8;

/// The number of an operation.
pub type Number = usize;

/// A place in one of the target's regions, written to once or, with fences in between, several
/// times.
struct Place {
    region: usize,
    offset: usize,
    len: usize,
    /// The values that it takes, and whose they are.
    values: Vec<(u8, Number)>,
    /// How many of them each byte has taken, and all have, and some have.
    seen: Vec<u8>,
    all: u8,
    some: u8,
}

/// A word, and the values that it takes, in order.
struct Word {
    region: usize,
    offset: usize,
    width: usize,
    values: Vec<(u64, Number)>,
    seen: usize,
}

#[derive(Clone, Copy, Default)]
struct Op {
    /// A place, and which of its values.
    data: Option<(usize, u8)>,
    /// A word, and which of its values.
    word: Option<(usize, usize)>,
    /// How many operations a fence stands behind that is before this one.
    fenced: Number,
    /// It must be in place.
    done: bool,
    /// Its data is a tagged message: in place once it is received, whatever comes later.
    message: bool,
}

/// The model of one program.
pub struct Model {
    regions: Vec<NonNull<u8>>,
    places: Vec<Place>,
    words: Vec<Word>,
    ops: Vec<Op>,
    fence: Number,
    /// Below this number all must be in place.
    floor: Number,
    /// The next free byte of each region.
    free: Vec<usize>,
}

impl Model {
    /// A model of regions that are all zero, with words as `(region, offset, width)` at their
    /// start.
    pub fn new(regions: Vec<NonNull<u8>>, words: &[(usize, usize, usize)], first: usize) -> Model {
        let word = |&(region, offset, width)| Word { region, offset, width, values: vec![], seen: 0 };
        let free = vec![first; regions.len()];
        let words = words.iter().map(word).collect();
        Model { regions, places: vec![], words, ops: vec![], fence: 0, floor: 0, free }
    }

    /// Operations issued.
    pub fn issued(&self) -> Number {
        self.ops.len()
    }

    /// Bytes of a region that may have been written.
    pub fn used(&self, region: usize) -> usize {
        self.free[region]
    }

    /// A place that nobody has written to.
    pub fn place(&mut self, region: usize, len: usize) -> (usize, usize) {
        let offset = self.free[region];
        self.free[region] = (offset + len + GAP).next_multiple_of(8);
        self.places.push(Place { region, offset, len, values: vec![], seen: vec![0; len], all: 0, some: 0 });
        (self.places.len() - 1, offset)
    }

    /// The places that a write may go to once more: all before it is ordered by a fence.
    pub fn rewritable(&self) -> Vec<(usize, usize, usize, usize)> {
        let mut found = vec![];
        for (at, place) in self.places.iter().enumerate() {
            let last = place.values.last();
            if last.is_some_and(|&(_, op)| op < self.fence && !self.ops[op].message) {
                found.push((at, place.region, place.offset, place.len));
            }
        }
        found
    }

    /// The next value of a place. Not 0, and not the one that it has.
    pub fn value(&self, place: usize) -> u8 {
        (place * 7 + self.places[place].values.len() * 101) as u8 % 255 + 1
    }

    /// The value that a word takes with its next change: 1, 2, 3 and so on.
    pub fn next(&self, word: usize) -> u64 {
        self.words[word].values.len() as u64 + 1
    }

    /// An operation was issued that writes to a place, changes a word, or both.
    pub fn issue(&mut self, place: Option<usize>, word: Option<usize>) -> Number {
        let number = self.ops.len();
        let data = place.map(|at| {
            let value = self.value(at);
            self.places[at].values.push((value, number));
            (at, self.places[at].values.len() as u8)
        });
        let word = word.map(|at| {
            let value = self.next(at);
            self.words[at].values.push((value, number));
            (at, self.words[at].values.len())
        });
        self.ops.push(Op { data, word, fenced: self.fence, ..Op::default() });
        number
    }

    /// A tagged message was sent; the receive that it matches fills this place.
    pub fn send(&mut self, place: usize) -> Number {
        let number = self.issue(Some(place), None);
        self.ops[number].message = true;
        number
    }

    /// A fence.
    pub fn fence(&mut self) {
        self.fence = self.ops.len();
    }

    /// An operation is said to be in place.
    pub fn done(&mut self, number: Number) {
        self.ops[number].done = true;
    }

    /// A message was received: it is in place, and so is all that was issued before it.
    pub fn received(&mut self, number: Number) {
        self.done(number);
        self.floor = self.floor.max(number);
    }

    /// All is said to be in place.
    pub fn quiet(&mut self) {
        self.floor = self.ops.len();
    }

    /// Whether everything that was issued is in place, as far as was seen.
    pub fn is_complete(&self) -> bool {
        self.ops.iter().all(|op| self.landed(op) && self.applied(op))
    }

    fn landed(&self, op: &Op) -> bool {
        op.data.is_none_or(|(at, n)| self.places[at].all >= n)
    }

    fn applied(&self, op: &Op) -> bool {
        op.word.is_none_or(|(at, n)| self.words[at].seen >= n)
    }

    /// Looks at the memory. Says what the contract does not allow.
    pub fn check(&mut self) -> Result<(), String> {
        for place in &mut self.places {
            place.look(self.regions[place.region])?;
        }
        for word in &mut self.words {
            word.look(self.regions[word.region])?;
        }
        let mut floor = self.floor;
        let mut because = String::from("it was said to be quiet, or a message was received");
        for (number, op) in self.ops.iter().enumerate() {
            let (landed, applied) = (self.landed(op), self.applied(op));
            if op.word.is_some() && applied && !landed {
                return Err(format!("operation {number}: its signal overtook its data"));
            }
            if op.done && !(landed && applied) {
                return Err(format!("operation {number} is said to be done and is not in place"));
            }
            if op.word.is_some() && applied && number > floor {
                (floor, because) = (number, format!("the word of operation {number} is visible"));
            }
            let visible = op.data.is_some_and(|(at, n)| self.places[at].some >= n);
            if visible && !op.message && op.fenced > floor {
                (floor, because) =
                    (op.fenced, format!("operation {number} is visible, which is after a fence"));
            }
        }
        self.floor = floor;
        for (number, op) in self.ops[..floor].iter().enumerate() {
            if !(op.message || self.landed(op)) || !self.applied(op) {
                return Err(format!("operation {number} is not in place, although {because}"));
            }
        }
        Ok(())
    }
}

fn read(base: NonNull<u8>, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SAFETY: places and words lie inside their regions, which outlive the model. Providers and
    // peers write them from this thread.
    unsafe { std::ptr::copy(base.as_ptr().add(offset), bytes.as_mut_ptr(), len) };
    bytes
}

impl Place {
    fn look(&mut self, base: NonNull<u8>) -> Result<(), String> {
        let Place { region, offset, len, .. } = *self;
        let bytes = read(base, offset, len + GAP);
        if bytes[len..] != [0; GAP] {
            return Err(format!("region {region}, behind {offset}+{len}: written and nobody's"));
        }
        let bytes = &bytes[..len];
        if self.all == self.some && bytes[1..] == bytes[..len - 1] && self.taken(bytes[0]) == Some(self.all) {
            return Ok(());
        }
        for (at, &byte) in bytes.iter().enumerate() {
            match self.taken(byte) {
                Some(taken) if taken >= self.seen[at] => self.seen[at] = taken,
                _ => {
                    let (values, seen) = (&self.values, self.seen[at]);
                    return Err(format!(
                        "region {region}, byte {at} of {offset}+{len}: {byte} after value {seen} of {values:?}"
                    ));
                }
            }
        }
        self.all = self.seen.iter().copied().min().unwrap_or(0);
        self.some = self.seen.iter().copied().max().unwrap_or(0);
        Ok(())
    }

    /// How many values a byte has taken that is this now.
    fn taken(&self, byte: u8) -> Option<u8> {
        match byte {
            0 => Some(0),
            _ => self.values.iter().position(|&(value, _)| value == byte).map(|n| n as u8 + 1),
        }
    }
}

impl Word {
    fn look(&mut self, base: NonNull<u8>) -> Result<(), String> {
        let mut bytes = [0; 8];
        bytes[..self.width].copy_from_slice(&read(base, self.offset, self.width));
        let value = u64::from_le_bytes(bytes);
        let Word { region, offset, seen, ref values, .. } = *self;
        if value < seen as u64 || value > values.len() as u64 {
            return Err(format!("region {region}, word {offset}: {value} after {seen} of {values:?}"));
        }
        self.seen = value as usize;
        Ok(())
    }
}
