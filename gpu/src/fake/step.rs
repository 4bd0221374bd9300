//! Executes queued work: in order within a stream, in any order across streams. The seed decides
//! how late, and in how many pieces.

use std::ffi::c_void;
use std::sync::atomic::AtomicU64;

use super::behaviour::Violation;
use super::space::Range;
use super::stream::{StreamId, Verb, Work};
use super::world::{Process, State};
use crate::done::tell;

impl State {
    pub fn queue(&mut self, place: usize, stream: StreamId, verb: Verb) {
        let wait = match self.behaviour.late {
            0 => 0,
            late => self.random() % (u64::from(late) + 1),
        };
        let process = &mut self.processes[place];
        let number = process.next_work;
        process.next_work += 1;
        let stream = &mut process.streams[stream.0 as usize];
        stream.queue.push_back(Work { number, wait, verb });
        stream.queued += 1;
        self.pending += 1;
        if self.behaviour.late == 0 {
            self.drain();
        }
    }

    pub fn advance(&mut self, steps: u64) {
        self.steps += steps;
        for _ in 0..steps {
            if self.pending == 0 {
                return;
            }
            self.step();
        }
    }

    pub fn drain(&mut self) {
        while self.pending > 0 {
            self.steps += 1;
            self.step();
        }
    }

    pub fn wait_for_device(&mut self, place: usize, ordinal: u32) {
        self.processes[place].counts.waits += 1;
        let busy = |state: &State| {
            state.processes[place]
                .streams
                .iter()
                .any(|stream| stream.ordinal == ordinal && !stream.queue.is_empty())
        };
        while busy(self) {
            self.steps += 1;
            self.step();
        }
    }

    pub fn is_in_queue(&self, place: usize, base: u64, serial: u64) -> bool {
        let streams = &self.processes[place].streams;
        streams.iter().any(|stream| stream.queue.iter().any(|work| work.uses(base, serial)))
    }

    fn step(&mut self) {
        for process in &mut self.processes {
            for at in 0..process.streams.len() {
                let Some(work) = process.streams[at].queue.front_mut() else { continue };
                if work.wait > 0 {
                    work.wait -= 1;
                    continue;
                }
                let mut work = *work;
                let over = work_on(process, &mut work, &mut self.violations);
                let stream = &mut process.streams[at];
                if !over {
                    stream.queue[0] = work;
                    continue;
                }
                stream.queue.pop_front();
                stream.done += 1;
                self.pending -= 1;
                let oldest = process.streams.iter().filter_map(|stream| stream.queue.front());
                if oldest.map(|work| work.number).min().is_some_and(|oldest| oldest < work.number) {
                    process.counts.reordered += 1;
                }
            }
        }
    }
}

/// Continues one item of work. Returns whether the item is finished.
fn work_on(process: &mut Process, work: &mut Work, violations: &mut Vec<Violation>) -> bool {
    let space = &process.space;
    let mut stale = |range: &Range| {
        if range.memory().is_some_and(|memory| !memory.lives() && !memory.is_orphan()) {
            violations.push(Violation::Stale);
        }
    };
    match &mut work.verb {
        Verb::Copy { to, from, len, piece, moved, backwards } => {
            let (Some(target), Some(source)) = (space.range(*to), space.range(*from)) else {
                // The memory was removed during the copy. Its removal recorded the violation.
                return true;
            };
            if *moved == 0 {
                stale(target);
                stale(source);
            }
            let now = (*piece).min(*len - *moved);
            let at = if *backwards { *len - *moved - now } else { *moved };
            // SAFETY: both ranges contained the copy when it was queued, and have not been
            // replaced, so their memory is mapped. `copy` rejected overlapping ranges.
            unsafe {
                let target = target.data().add((to.offset + at) as usize);
                let source = source.data().add((from.offset + at) as usize);
                target.copy_from_nonoverlapping(source, now as usize);
            }
            *moved += now;
            process.counts.bytes += now;
            *moved == *len
        }
        Verb::Word { at, value } => {
            if let Some(range) = space.range(*at) {
                stale(range);
                // SAFETY: the word is aligned and lies inside the range, which was checked when it
                // was queued. Words are accessed only as atomics.
                let word =
                    unsafe { AtomicU64::from_ptr(range.data().add(at.offset as usize).cast()) };
                tell(word, *value);
            }
            true
        }
        Verb::Wait { stream, mark } => process.streams[stream.0 as usize].done >= *mark,
        Verb::Call { function, data } => {
            // SAFETY: the program that queued the call guarantees that its argument is valid.
            unsafe { function(*data as *mut c_void) };
            true
        }
    }
}
