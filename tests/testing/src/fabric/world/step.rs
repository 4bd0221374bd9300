//! The stages of operations. A read of a completion queue advances some operations by one stage.
//! The last stage reports a completion to the origin.

use std::collections::HashSet;

use fishplate_sys::fabric::raw::*;

use super::target::Outcome;
use super::{Op, Stage, State, Verb};
use crate::fabric::persona::Dead;
use crate::fabric::queue::{Item, Queue};

impl State {
    /// Advances all operations that make progress when this queue is read.
    pub fn step(&mut self, reader: u32) {
        let auto = self.persona.progress == FI_PROGRESS_AUTO;
        let mut ops = std::mem::take(&mut self.ops);
        let mut blocked = HashSet::new();
        for at in 0..ops.len() {
            let (src, dst, stage) = (ops[at].src, ops[at].dst, ops[at].stage);
            let lane = self.lane(&ops[at]);
            let in_way = lane.is_some_and(|lane| blocked.contains(&lane));
            let from_here = auto || self.eps.get(&src).is_some_and(|ep| ep.tx == Some(reader));
            let to_here = auto
                || dst.and_then(|dst| self.eps.get(&dst)).is_none_or(|ep| ep.rx == Some(reader));
            let moves = match stage {
                Stage::Held | Stage::Over => false,
                Stage::Leaving | Stage::Returning => from_here,
                // A dead target does not read, so its origin's reads advance the operation.
                Stage::Flying => to_here || (from_here && !self.is_alive(dst)),
            };
            if moves && ops[at].wait > 0 {
                ops[at].wait -= 1;
            } else if moves && !(stage == Stage::Flying && in_way) {
                self.advance(&mut ops, at);
            }
            if let (Some(lane), Stage::Held | Stage::Leaving | Stage::Flying) =
                (lane, ops[at].stage)
            {
                blocked.insert(lane);
            }
        }
        ops.retain(|op| op.stage != Stage::Over);
        // The lock is held, so `self.ops` can contain only newly added strays.
        ops.append(&mut self.ops);
        self.ops = ops;
    }

    /// Returns the ordering key of an operation. Operations with equal keys are executed in the
    /// order posted. `None`: in any order.
    fn lane(&self, op: &Op) -> Option<(u32, Option<u32>)> {
        let in_order = self.persona.is_ordered()
            || self.persona.order & FI_ORDER_SAS != 0 && op.verb == Verb::Send;
        (in_order && !op.torn).then_some((op.src, op.dst))
    }

    fn advance(&mut self, ops: &mut [Op], at: usize) {
        let (src, dst) = (ops[at].src, ops[at].dst);
        if self.is_cut(src) || dst.is_some_and(|dst| self.is_cut(dst)) {
            return;
        }
        if let Some(late) = self.torn(src, dst)
            && !ops[at].torn
        {
            self.tear(&mut ops[at], late);
            return;
        }
        match ops[at].stage {
            Stage::Flying if ops[at].stray => {
                // A stray lands at its original target endpoint. It is dropped if that endpoint is
                // closed.
                match self.is_alive(dst).then(|| self.carry_out(&ops[at])) {
                    Some(Outcome::Later) => {}
                    landed => {
                        self.counts.landed_late += u64::from(matches!(landed, Some(Outcome::Done)));
                        ops[at].stage = Stage::Over;
                    }
                }
            }
            // A broken operation that was injected is not reported.
            Stage::Flying if ops[at].torn && !ops[at].completes => {
                ops[at].stage = Stage::Over;
                self.disown(ops[at].context);
            }
            Stage::Flying if ops[at].torn => self.fail(&mut ops[at], libc::ECONNRESET),
            Stage::Leaving => {
                if !ops[at].delivery && ops[at].fault.is_none() && ops[at].verb_sends() {
                    // SAFETY: the source is readable until the completion, which is reported below.
                    let copy = unsafe { self.source(&ops[at]) };
                    ops[at].copy = Some(copy);
                    if !self.complete(ops, at) {
                        return;
                    }
                }
                ops[at].stage = Stage::Flying;
                ops[at].wait = self.delay();
            }
            Stage::Flying => {
                let outcome = match &ops[at].fault {
                    Some(fault) => Outcome::Failed(fault.code),
                    None if self
                        .ended
                        .get(&(src, dst))
                        .is_some_and(|&last| ops[at].number <= last) =>
                    {
                        Outcome::Failed(libc::ECONNABORTED)
                    }
                    None if self.is_alive(dst) => self.carry_out(&ops[at]),
                    None if self.persona.dead == Dead::Errors => Outcome::Failed(libc::ECONNRESET),
                    None => Outcome::Later,
                };
                match outcome {
                    Outcome::Later => {}
                    Outcome::Failed(code) => {
                        if self.persona.is_ordered() {
                            // On an ordered connection a failed operation ends the connection. The
                            // next post opens a new connection.
                            self.ended.insert((src, dst), self.posted);
                        }
                        self.fail(&mut ops[at], code);
                    }
                    Outcome::Done => {
                        let op = &ops[at];
                        let older = |other: &&Op| other.number < op.number && !other.landed;
                        let same = |other: &&Op| (other.src, other.dst) == (op.src, op.dst);
                        self.counts.overtaken +=
                            u64::from(ops.iter().filter(same).any(|other| older(&other)));
                        let told = !op.completes;
                        ops[at].landed = true;
                        ops[at].stage = if told { Stage::Over } else { Stage::Returning };
                        ops[at].wait = self.delay();
                        if told {
                            self.disown(ops[at].context);
                        }
                    }
                }
            }
            Stage::Returning => {
                if self.complete(ops, at) {
                    ops[at].stage = Stage::Over;
                }
            }
            Stage::Held | Stage::Over => {}
        }
    }

    /// Reports a completion to the origin. Returns false if the origin's queue is full.
    fn complete(&mut self, ops: &mut [Op], at: usize) -> bool {
        let op = &ops[at];
        if !op.completes {
            return true;
        }
        let flags = match op.verb {
            Verb::Send => FI_MSG | FI_SEND,
            Verb::Write => FI_RMA | FI_WRITE,
            Verb::Read => FI_RMA | FI_READ,
            Verb::Atomic { result, .. } if result.is_null() => FI_ATOMIC | FI_WRITE,
            Verb::Atomic { .. } => FI_ATOMIC | FI_READ,
        };
        let entry = fi_cq_data_entry {
            op_context: op.context,
            flags,
            len: 0,
            buf: std::ptr::null_mut(),
            data: 0,
        };
        let Some(queue) = self.eps.get(&op.src).and_then(|ep| ep.tx) else {
            return true;
        };
        let (context, number, src) = (op.context, op.number, op.src);
        if !self.push(queue, Item::good(entry, FI_ADDR_NOTAVAIL)) {
            return false;
        }
        let early =
            ops.iter().any(|other| other.src == src && other.number < number && other.completes);
        self.counts.early += u64::from(early);
        ops[at].completes = false;
        self.disown(context);
        true
    }

    fn fail(&mut self, op: &mut Op, code: i32) {
        let (provider, data) =
            op.fault.take().map_or((0, vec![]), |fault| (fault.provider, fault.data));
        let Some(queue) = self.eps.get(&op.src).and_then(|ep| ep.tx) else {
            op.stage = Stage::Over;
            return;
        };
        let flags = match op.verb {
            Verb::Send => FI_MSG | FI_SEND,
            Verb::Write => FI_RMA | FI_WRITE,
            Verb::Read => FI_RMA | FI_READ,
            Verb::Atomic { .. } => FI_ATOMIC | FI_WRITE,
        };
        if self.push(queue, Item::bad(op.context, flags, code, provider, data)) {
            op.stage = Stage::Over;
            self.disown(op.context);
        }
    }

    /// Adds an item to a queue. Returns false if the queue is full and the item must wait.
    pub(super) fn push(&mut self, queue: u32, item: Item) -> bool {
        let protects = self.persona.protects_queue;
        let Some(held) = self.cqs.get_mut(&queue) else {
            return true;
        };
        if held.has_room() {
            held.push(item);
            self.counts.completed += 1;
            return true;
        }
        if !protects {
            held.overrun();
            self.violation("a completion queue overran");
        }
        !protects
    }

    pub(super) fn has_room(&self, queue: Option<u32>) -> bool {
        !self.persona.protects_queue
            || queue.and_then(|queue| self.cqs.get(&queue)).is_some_and(Queue::has_room)
    }
}

impl Op {
    fn verb_sends(&self) -> bool {
        matches!(self.verb, Verb::Send | Verb::Write)
    }
}
