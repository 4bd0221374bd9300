//! The permitted contents of a target's memory. Operations are numbered in issue order. Each write
//! gives its location a new value, and each change gives its word a new value. So the contents of
//! memory show which operations are visible.
//!
//! | observed                                     | required then                              |
//! |----------------------------------------------|--------------------------------------------|
//! | a signal or atomic                           | its own data, and all operations before it |
//! | a byte of a write after a fence              | all operations before the fence            |
//! | a tagged message received                    | the message, and all operations before it  |
//! | a completion, or an operation done on return | that operation                             |
//! | quiet                                        | all operations                             |
//!
//! All other operations may or may not be visible. A location never returns to an earlier value,
//! and bytes that no operation writes never change.

use std::ptr::NonNull;

/// Number of unused bytes after each location.
pub const GAP: usize = 8;

/// The index of an operation in issue order.
pub type Number = usize;

/// A range of bytes in a region of the target. It is written once, or repeatedly with fences in
/// between.
struct Place {
    region: usize,
    offset: usize,
    len: usize,
    /// The byte values of the location over time, each with the operation that writes it.
    values: Vec<(u8, Number)>,
    /// For each byte, the index in `values` of its visible value, counted from 1 (0: no value).
    /// Then the minimum and the maximum of these.
    seen: Vec<u8>,
    all: u8,
    some: u8,
}

/// A word, and its values over time.
struct Word {
    region: usize,
    offset: usize,
    width: usize,
    values: Vec<(u64, Number)>,
    seen: usize,
}

#[derive(Clone, Copy, Default)]
struct Op {
    /// The written location, and the index of the new value.
    data: Option<(usize, u8)>,
    /// The changed word, and the index of the new value.
    word: Option<(usize, usize)>,
    /// Number of operations before the last fence that was issued before this operation.
    fenced: Number,
    done: bool,
    /// True for a tagged message. Its data must be visible once the message is received.
    message: bool,
}

/// The model of one program.
pub struct Model {
    regions: Vec<NonNull<u8>>,
    places: Vec<Place>,
    words: Vec<Word>,
    ops: Vec<Op>,
    fence: Number,
    /// Operations with lower numbers must be visible.
    floor: Number,
    free: Vec<usize>,
}

impl Model {
    /// Creates a model of zeroed regions with words `(region, offset, width)` at their start.
    pub fn new(regions: Vec<NonNull<u8>>, words: &[(usize, usize, usize)], first: usize) -> Model {
        let word =
            |&(region, offset, width)| Word { region, offset, width, values: vec![], seen: 0 };
        let free = vec![first; regions.len()];
        let words = words.iter().map(word).collect();
        Model { regions, places: vec![], words, ops: vec![], fence: 0, floor: 0, free }
    }

    pub fn issued(&self) -> Number {
        self.ops.len()
    }

    /// Returns the number of used bytes of a region, from its start. Writes lie within these.
    pub fn used(&self, region: usize) -> usize {
        self.free[region]
    }

    /// Allocates a location.
    pub fn place(&mut self, region: usize, len: usize) -> (usize, usize) {
        let offset = self.free[region];
        self.free[region] = (offset + len + GAP).next_multiple_of(8);
        self.places.push(Place {
            region,
            offset,
            len,
            values: vec![],
            seen: vec![0; len],
            all: 0,
            some: 0,
        });
        (self.places.len() - 1, offset)
    }

    /// Returns the locations that may be written again, because a fence follows their last write.
    /// Each entry: index, region, offset, length.
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

    /// Returns the next value of a location. It differs from 0 and from the previous value.
    pub fn value(&self, place: usize) -> u8 {
        (place * 7 + self.places[place].values.len() * 101) as u8 % 255 + 1
    }

    /// Returns the next value of a word: 1, 2, 3 and so on.
    pub fn next(&self, word: usize) -> u64 {
        self.words[word].values.len() as u64 + 1
    }

    /// Records an operation that writes to a location, changes a word, or both.
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

    /// Records a tagged message. The matching receive writes this location.
    pub fn send(&mut self, place: usize) -> Number {
        let number = self.issue(Some(place), None);
        self.ops[number].message = true;
        number
    }

    pub fn fence(&mut self) {
        self.fence = self.ops.len();
    }

    pub fn done(&mut self, number: Number) {
        self.ops[number].done = true;
    }

    /// Records that a message was received. The message and everything issued before it must be
    /// visible.
    pub fn received(&mut self, number: Number) {
        self.done(number);
        self.floor = self.floor.max(number);
    }

    /// Records a quiet: everything issued before it must be visible.
    pub fn quiet(&mut self) {
        self.floor = self.ops.len();
    }

    /// True if all issued operations are visible.
    pub fn is_complete(&self) -> bool {
        self.ops.iter().all(|op| self.landed(op) && self.applied(op))
    }

    fn landed(&self, op: &Op) -> bool {
        op.data.is_none_or(|(at, n)| self.places[at].all >= n)
    }

    fn applied(&self, op: &Op) -> bool {
        op.word.is_none_or(|(at, n)| self.words[at].seen >= n)
    }

    /// Checks the memory. Returns a description of contents that the contract does not allow.
    pub fn check(&mut self) -> Result<(), String> {
        for place in &mut self.places {
            place.look(self.regions[place.region])?;
        }
        for word in &mut self.words {
            word.look(self.regions[word.region])?;
        }
        let mut floor = self.floor;
        let mut because = String::from("after a quiet or a received message");
        for (number, op) in self.ops.iter().enumerate() {
            let (landed, applied) = (self.landed(op), self.applied(op));
            if op.word.is_some() && applied && !landed {
                return Err(format!("operation {number}: its signal overtook its data"));
            }
            if op.done && !(landed && applied) {
                return Err(format!("operation {number} has completed and is not visible"));
            }
            if op.word.is_some() && applied && number > floor {
                (floor, because) = (number, format!("the word of operation {number} is visible"));
            }
            let visible = op.data.is_some_and(|(at, n)| self.places[at].some >= n);
            if visible && !op.message && op.fenced > floor {
                (floor, because) =
                    (op.fenced, format!("operation {number}, which follows a fence, is visible"));
            }
        }
        self.floor = floor;
        for (number, op) in self.ops[..floor].iter().enumerate() {
            if !(op.message || self.landed(op)) || !self.applied(op) {
                return Err(format!("operation {number} is not visible, although {because}"));
            }
        }
        Ok(())
    }
}

fn read(base: NonNull<u8>, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SAFETY: locations and words lie inside their regions, which outlive the model. Providers and
    // peers write them only from this thread.
    unsafe { std::ptr::copy(base.as_ptr().add(offset), bytes.as_mut_ptr(), len) };
    bytes
}

impl Place {
    fn look(&mut self, base: NonNull<u8>) -> Result<(), String> {
        let Place { region, offset, len, .. } = *self;
        let bytes = read(base, offset, len + GAP);
        if bytes[len..] != [0; GAP] {
            return Err(format!("region {region}, after {offset}+{len}: unexpected write"));
        }
        let bytes = &bytes[..len];
        if self.all == self.some
            && bytes[1..] == bytes[..len - 1]
            && self.taken(bytes[0]) == Some(self.all)
        {
            return Ok(());
        }
        for (at, &byte) in bytes.iter().enumerate() {
            match self.taken(byte) {
                Some(taken) if taken >= self.seen[at] => self.seen[at] = taken,
                _ => {
                    let (values, seen) = (&self.values, self.seen[at]);
                    return Err(format!(
                        "region {region}, byte {at} of {offset}+{len}: {byte} after value {seen} \
                         of {values:?}"
                    ));
                }
            }
        }
        self.all = self.seen.iter().copied().min().unwrap_or(0);
        self.some = self.seen.iter().copied().max().unwrap_or(0);
        Ok(())
    }

    /// Returns the index of this byte value in `values`, counted from 1 (0: never written).
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
            return Err(format!(
                "region {region}, word {offset}: {value} after {seen} of {values:?}"
            ));
        }
        self.seen = value as usize;
        Ok(())
    }
}
