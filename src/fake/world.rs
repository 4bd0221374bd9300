//! The network: operations on their way, and the memory and queues that they touch.
//!
//! An operation leaves (`Leaving`), travels (`Flying`), is carried out at its target, and its end travels back (`Returning`). Each stage lasts
//! some reads of a completion queue. With automatic progress any read moves everything; with manual progress the origin's reads move
//! the first and the last stage, the target's reads the middle one.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use fishplate_sys::fabric::raw::*;

use super::persona::{Dead, Persona};
use super::queue::{Item, Queue};
use super::{Counts, post};

/// What every address begins with.
const NAME: [u8; 4] = *b"fake";

/// Length of an address, in bytes.
pub(super) const NAME_LEN: usize = 16;

/// One network.
#[derive(Debug)]
pub(super) struct World {
    state: Mutex<State>,
}

/// An error to come.
#[derive(Debug)]
pub(super) struct Fault {
    pub skip: u32,
    pub code: i32,
    pub provider: i32,
    pub data: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct Recv {
    pub buf: *mut u8,
    pub len: usize,
    pub context: *mut c_void,
}

#[derive(Debug)]
pub(super) struct Ep {
    pub domain: u32,
    pub interface: String,
    pub av: Option<u32>,
    pub tx: Option<u32>,
    pub rx: Option<u32>,
    /// Only what asks for a completion gets one.
    pub selective: bool,
    pub op_flags: u64,
    pub enabled: bool,
    pub dead: bool,
    pub recvs: VecDeque<Recv>,
}

#[derive(Debug)]
pub(super) struct Mr {
    pub id: u32,
    pub domain: u32,
    pub ep: Option<u32>,
    pub enabled: bool,
    pub ptr: usize,
    pub len: usize,
    pub access: u64,
    pub key: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Send,
    Write,
    Read,
    Atomic { width: u8, op: i32, operand: u64, compare: u64, result: *mut u8 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Posted with `FI_MORE`: waits for one without.
    Held,
    Leaving,
    Flying,
    Returning,
    Over,
}

#[derive(Debug)]
pub(super) struct Op {
    pub number: u64,
    pub src: u32,
    /// `None`: nobody has that address.
    pub dst: Option<u32>,
    pub verb: Verb,
    pub context: *mut c_void,
    pub completes: bool,
    pub delivery: bool,
    pub local: *mut u8,
    pub len: usize,
    /// What was copied out of `local`, once it may be reused.
    pub copy: Option<Vec<u8>>,
    pub data: Option<u64>,
    pub addr: u64,
    pub key: u64,
    pub stage: Stage,
    pub wait: u32,
    pub landed: bool,
    pub fault: Option<Fault>,
}

#[derive(Debug)]
pub(super) struct State {
    pub persona: Persona,
    random: u64,
    next: u32,
    posted: u64,
    pub cqs: BTreeMap<u32, Queue>,
    pub avs: BTreeMap<u32, Vec<Option<u32>>>,
    pub eps: BTreeMap<u32, Ep>,
    pub mrs: Vec<Mr>,
    pub ops: Vec<Op>,
    /// Contexts that the provider owns, and what it wrote there.
    contexts: HashMap<usize, usize>,
    /// Connections that an error has ended: what was posted up to that number is lost with them.
    ended: HashMap<(u32, Option<u32>), u64>,
    pub faults: Vec<Fault>,
    pub cut: Vec<String>,
    pub violations: Vec<String>,
    pub open: usize,
    pub by_interface: BTreeMap<String, u64>,
    pub counts: Counts,
}

// SAFETY: the pointers are those of the program's posts. They are followed under the lock, while the program's promises to the
// provider hold, which are not tied to a thread.
unsafe impl Send for State {}

/// How carrying out went.
enum Outcome {
    Done,
    /// There is no receive, or no room in the target's queue.
    Later,
    Failed(i32),
}

impl World {
    pub fn new(persona: Persona, seed: u64) -> World {
        World {
            state: Mutex::new(State {
                persona,
                random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
                next: 1,
                posted: 0,
                cqs: BTreeMap::new(),
                avs: BTreeMap::new(),
                eps: BTreeMap::new(),
                mrs: vec![],
                ops: vec![],
                contexts: HashMap::new(),
                ended: HashMap::new(),
                faults: vec![],
                cut: vec![],
                violations: vec![],
                open: 0,
                by_interface: BTreeMap::new(),
                counts: Counts::default(),
            }),
        }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The address of an endpoint.
pub(super) fn name_of(ep: u32) -> [u8; NAME_LEN] {
    let mut name = [0; NAME_LEN];
    name[..4].copy_from_slice(&NAME);
    name[4..8].copy_from_slice(&ep.to_le_bytes());
    name
}

/// The endpoint of an address.
pub(super) fn ep_of(name: &[u8]) -> Option<u32> {
    let bytes: [u8; 4] = name.get(4..8)?.try_into().ok()?;
    (name.len() >= NAME_LEN && name[..4] == NAME).then_some(u32::from_le_bytes(bytes))
}

impl State {
    /// A number below `bound`, which is not 0.
    pub fn draw(&mut self, bound: u32) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        ((self.random >> 32) % u64::from(bound)) as u32
    }

    /// A number for something new.
    pub fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    pub fn violation(&mut self, what: impl Into<String>) {
        let what = what.into();
        if !self.violations.contains(&what) {
            self.violations.push(what);
        }
    }

    /// Takes a context into the provider's possession. `false`: it must not be used.
    pub fn own(&mut self, context: *mut c_void) -> bool {
        let words = self.context_words();
        if words == 0 {
            return true;
        }
        if context.is_null() {
            self.violation("a post without a context, where the mode demands one");
            return false;
        }
        let mark = self.random as usize | 1;
        if self.contexts.insert(context as usize, mark).is_some() {
            self.violation("a context used for two operations at once");
            return false;
        }
        // SAFETY: a context of that many words is the provider's until the operation is over: `fi_getinfo(3)`, FI_CONTEXT.
        (0..words).for_each(|at| unsafe { context.cast::<usize>().add(at).write(mark) });
        true
    }

    fn disown(&mut self, context: *mut c_void) {
        let words = self.context_words();
        if let Some(mark) = self.contexts.remove(&(context as usize)) {
            // SAFETY: as in `own`; it is the provider's until now.
            if (0..words).any(|at| unsafe { context.cast::<usize>().add(at).read() } != mark) {
                self.violation("a context written while the provider had it");
            }
        }
    }

    fn context_words(&self) -> usize {
        match self.persona.mode {
            mode if mode & FI_CONTEXT2 != 0 => size_of::<fi_context2>() / size_of::<usize>(),
            mode if mode & FI_CONTEXT != 0 => size_of::<fi_context>() / size_of::<usize>(),
            _ => 0,
        }
    }

    /// Whether local memory may be used under a descriptor.
    pub fn may_use(&mut self, ep: u32, ptr: *const u8, len: usize, desc: *mut c_void, what: &str) -> bool {
        if self.persona.mr_mode & FI_MR_LOCAL == 0 {
            return true;
        }
        let domain = self.eps[&ep].domain;
        let (start, end) = (ptr as usize, ptr as usize + len);
        let good = self.mrs.iter().any(|mr| {
            descriptor(mr.id) == desc && mr.domain == domain && mr.ptr <= start && end <= mr.ptr + mr.len
        });
        if !good {
            self.violation(format!("{what}: local memory without its registration's descriptor"));
        }
        good
    }

    /// Puts an accepted operation on its way.
    pub fn launch(&mut self, mut op: Op) {
        self.posted += 1;
        op.number = self.posted;
        op.wait = self.delay();
        op.fault = match self.faults.first_mut() {
            Some(fault) if fault.skip > 0 => {
                fault.skip -= 1;
                None
            }
            Some(_) => Some(self.faults.remove(0)),
            None => None,
        };
        self.counts.posted += 1;
        self.counts.held_back += u64::from(op.stage == Stage::Held);
        if let Some(ep) = self.eps.get(&op.src) {
            *self.by_interface.entry(ep.interface.clone()).or_default() += 1;
        }
        if op.stage == Stage::Leaving {
            let src = op.src;
            let held = self.ops.iter_mut().filter(|held| held.src == src && held.stage == Stage::Held);
            held.for_each(|held| held.stage = Stage::Leaving);
        }
        self.ops.push(op);
    }

    fn delay(&mut self) -> u32 {
        let most = self.persona.jitter + 1;
        self.draw(most)
    }

    /// Moves what a read of a queue moves.
    pub fn step(&mut self, reader: u32) {
        let auto = self.persona.progress == FI_PROGRESS_AUTO;
        let mut ops = std::mem::take(&mut self.ops);
        let mut blocked = HashSet::new();
        for at in 0..ops.len() {
            let (src, dst, stage) = (ops[at].src, ops[at].dst, ops[at].stage);
            let lane = self.lane(&ops[at]);
            let in_way = lane.is_some_and(|lane| blocked.contains(&lane));
            let from_here = auto || self.eps.get(&src).is_some_and(|ep| ep.tx == Some(reader));
            let to_here =
                auto || dst.and_then(|dst| self.eps.get(&dst)).is_none_or(|ep| ep.rx == Some(reader));
            let moves = match stage {
                Stage::Held | Stage::Over => false,
                Stage::Leaving | Stage::Returning => from_here,
                // Whoever does not exist any more moves nothing; that is noticed at the origin.
                Stage::Flying => to_here || (from_here && !self.is_alive(dst)),
            };
            if moves && ops[at].wait > 0 {
                ops[at].wait -= 1;
            } else if moves && !(stage == Stage::Flying && in_way) {
                self.advance(&mut ops, at);
            }
            if let (Some(lane), Stage::Held | Stage::Leaving | Stage::Flying) = (lane, ops[at].stage) {
                blocked.insert(lane);
            }
        }
        ops.retain(|op| op.stage != Stage::Over);
        // Nothing is posted meanwhile: the lock is held.
        self.ops = ops;
    }

    /// Operations of one lane are carried out in the order posted.
    fn lane(&self, op: &Op) -> Option<(u32, Option<u32>)> {
        let in_order =
            self.persona.is_ordered() || self.persona.order & FI_ORDER_SAS != 0 && op.verb == Verb::Send;
        in_order.then_some((op.src, op.dst))
    }

    fn is_alive(&self, ep: Option<u32>) -> bool {
        ep.and_then(|ep| self.eps.get(&ep)).is_some_and(|ep| !ep.dead)
    }

    fn is_cut(&self, ep: u32) -> bool {
        self.eps.get(&ep).is_some_and(|ep| self.cut.contains(&ep.interface))
    }

    /// The next stage of an operation, if it can be had.
    fn advance(&mut self, ops: &mut [Op], at: usize) {
        let (src, dst) = (ops[at].src, ops[at].dst);
        if self.is_cut(src) || dst.is_some_and(|dst| self.is_cut(dst)) {
            return;
        }
        match ops[at].stage {
            Stage::Leaving => {
                if !ops[at].delivery && ops[at].fault.is_none() && ops[at].verb_sends() {
                    let op = &mut ops[at];
                    if op.copy.is_none() {
                        // SAFETY: the source is readable until the completion that is given now.
                        op.copy = Some(unsafe { std::slice::from_raw_parts(op.local, op.len) }.to_vec());
                    }
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
                    None if self.ended.get(&(src, dst)).is_some_and(|&last| ops[at].number <= last) => {
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
                            // On a connection that keeps order nothing can come after what failed. The next post opens another.
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

    /// Gives the origin its completion. `false`: its queue is full.
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
        let entry =
            fi_cq_data_entry { op_context: op.context, flags, len: 0, buf: std::ptr::null_mut(), data: 0 };
        let Some(queue) = self.eps.get(&op.src).and_then(|ep| ep.tx) else {
            return true;
        };
        let (context, number, src) = (op.context, op.number, op.src);
        if !self.push(queue, Item::good(entry, FI_ADDR_NOTAVAIL)) {
            return false;
        }
        let early = ops.iter().any(|other| other.src == src && other.number < number && other.completes);
        self.counts.early += u64::from(early);
        ops[at].completes = false;
        self.disown(context);
        true
    }

    /// Ends an operation with an error, whether or not it wants a completion.
    fn fail(&mut self, op: &mut Op, code: i32) {
        let (provider, data) = op.fault.take().map_or((0, vec![]), |fault| (fault.provider, fault.data));
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

    /// Puts an item into a queue. `false`: it is full, and who has the item shall wait.
    fn push(&mut self, queue: u32, item: Item) -> bool {
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
            self.violation("a completion queue has overrun");
        }
        !protects
    }

    fn has_room(&self, queue: Option<u32>) -> bool {
        !self.persona.protects_queue
            || queue.and_then(|queue| self.cqs.get(&queue)).is_some_and(Queue::has_room)
    }

    /// Does at the target what the operation says.
    fn carry_out(&mut self, op: &Op) -> Outcome {
        let Some(dst) = op.dst.filter(|dst| self.eps.contains_key(dst)) else {
            return Outcome::Failed(libc::ECONNRESET);
        };
        let target = &self.eps[&dst];
        let (rx, takes) =
            (target.rx, op.verb == Verb::Send || (op.data.is_some() && self.persona.data_takes_receive));
        if !target.enabled || (takes && target.recvs.is_empty()) {
            return Outcome::Later;
        }
        if (takes || op.data.is_some()) && !self.has_room(rx) {
            return Outcome::Later;
        }
        let source = self.address_of(dst, op.src);
        if op.verb == Verb::Send {
            return self.deliver(op, dst, rx, source);
        }
        let access = match op.verb {
            Verb::Read => FI_REMOTE_READ,
            _ => FI_REMOTE_WRITE,
        };
        let Some(at) = self.remote(dst, op.addr, op.key, op.len, access) else {
            return Outcome::Failed(libc::EACCES);
        };
        // SAFETY: the target registered that range for this access, and it stays valid until that is closed; the origin's
        // memory is the provider's until the completion.
        unsafe {
            match op.verb {
                Verb::Write => match &op.copy {
                    Some(bytes) => std::ptr::copy(bytes.as_ptr(), at, op.len),
                    None => std::ptr::copy(op.local, at, op.len),
                },
                Verb::Read => std::ptr::copy(at, op.local, op.len),
                Verb::Atomic { width, op: what, operand, compare, result } => {
                    match post::apply(at, width, what, operand, compare) {
                        Some(old) if !result.is_null() => {
                            std::ptr::copy(old.to_ne_bytes().as_ptr(), result, width.into());
                        }
                        Some(_) => {}
                        None => return Outcome::Failed(libc::EINVAL),
                    }
                }
                Verb::Send => {}
            }
        }
        if let Some(data) = op.data {
            let receive =
                if takes { self.eps.get_mut(&dst).and_then(|ep| ep.recvs.pop_front()) } else { None };
            // An event that belongs to no operation has no context, or one that nobody may look at.
            let none = if self.persona.stray_context { 0x5a5a_5a5a } else { 0 };
            let context = receive.map_or(std::ptr::without_provenance_mut(none), |receive| receive.context);
            let says = if self.persona.data_flag_alone { 0 } else { FI_RMA | FI_REMOTE_WRITE };
            let flags = says | FI_REMOTE_CQ_DATA;
            let entry =
                fi_cq_data_entry { op_context: context, flags, len: op.len, buf: std::ptr::null_mut(), data };
            self.disown(context);
            if let Some(rx) = rx {
                self.push(rx, Item::good(entry, source));
            }
        }
        Outcome::Done
    }

    fn deliver(&mut self, op: &Op, dst: u32, rx: Option<u32>, source: u64) -> Outcome {
        let Some(receive) = self.eps.get_mut(&dst).and_then(|ep| ep.recvs.pop_front()) else {
            return Outcome::Later;
        };
        self.disown(receive.context);
        let Some(rx) = rx else {
            return Outcome::Done;
        };
        let flags = FI_MSG | FI_RECV;
        let len = op.len.min(receive.len);
        let from = op.copy.as_ref().map_or(op.local.cast_const(), |bytes| bytes.as_ptr());
        // SAFETY: the receive's memory is the provider's until its completion, the sender's likewise.
        unsafe { std::ptr::copy(from, receive.buf, len) };
        if len < op.len {
            self.push(rx, Item::bad(receive.context, flags, FI_ETRUNC, 0, vec![]));
            return Outcome::Done;
        }
        let data = op.data.unwrap_or(0);
        let with = if op.data.is_some() { FI_REMOTE_CQ_DATA } else { 0 };
        let (op_context, buf) = (receive.context, receive.buf.cast());
        self.push(
            rx,
            Item::good(fi_cq_data_entry { op_context, flags: flags | with, len, buf, data }, source),
        );
        Outcome::Done
    }

    /// What the target's address vector calls the origin.
    fn address_of(&self, dst: u32, src: u32) -> u64 {
        let known = self.eps[&dst].av.and_then(|av| self.avs.get(&av));
        let at = known.and_then(|known| known.iter().position(|&ep| ep == Some(src)));
        at.map_or(FI_ADDR_NOTAVAIL, |at| at as u64)
    }

    /// Registered memory of a target.
    fn remote(&self, dst: u32, addr: u64, key: u64, len: usize, access: u64) -> Option<*mut u8> {
        let domain = self.eps[&dst].domain;
        let per_endpoint = self.persona.mr_mode & FI_MR_ENDPOINT != 0;
        let mr = self.mrs.iter().find(|mr| {
            mr.domain == domain
                && mr.key == key
                && mr.access & access != 0
                && (!per_endpoint || mr.enabled && mr.ep == Some(dst))
        })?;
        let offset = match self.persona.mr_mode & FI_MR_VIRT_ADDR {
            0 => usize::try_from(addr).ok()?,
            _ => usize::try_from(addr).ok()?.checked_sub(mr.ptr)?,
        };
        let fits = offset.checked_add(len).is_some_and(|end| end <= mr.len);
        fits.then(|| std::ptr::with_exposed_provenance_mut(mr.ptr + offset))
    }

    /// Ends an endpoint, whose address comes last in what it is named by.
    pub fn kill(&mut self, address: &[u8]) {
        if let Some(ep) = ep_of(&address[address.len().saturating_sub(NAME_LEN)..]) {
            self.forget(ep);
            // What came from it and is not complete yet does not get there any more.
            for op in self.ops.iter_mut().filter(|op| op.dst == Some(ep) && op.verb == Verb::Read) {
                op.stage = Stage::Flying;
            }
            if let Some(ep) = self.eps.get_mut(&ep) {
                ep.dead = true;
            }
        }
    }

    /// Lets go of everything that an endpoint has outstanding. Nothing is told.
    pub fn forget(&mut self, ep: u32) {
        let mut contexts: Vec<*mut c_void> = vec![];
        self.ops.retain(|op| {
            if op.src == ep {
                contexts.push(op.context);
            }
            op.src != ep
        });
        if let Some(ep) = self.eps.get_mut(&ep) {
            contexts.extend(ep.recvs.drain(..).map(|receive| receive.context));
        }
        for context in contexts {
            self.contexts.remove(&(context as usize));
        }
    }
}

impl Op {
    /// Whether the origin's memory is only read.
    fn verb_sends(&self) -> bool {
        matches!(self.verb, Verb::Send | Verb::Write)
    }
}

/// What local posts name a registration by: no pointer to anything.
pub(super) fn descriptor(mr: u32) -> *mut c_void {
    std::ptr::without_provenance_mut((mr as usize) << 8 | 0xd5)
}
