//! The network: operations in flight, and the memory and queues that they access.
//!
//! An operation leaves its origin (`Leaving`), travels (`Flying`), is executed at its target, and
//! its completion returns (`Returning`). Each stage lasts some reads of a completion queue. With
//! automatic progress any read advances everything. With manual progress, the origin's reads
//! advance the first and the last stage, and the target's reads advance the middle stage.
//!
//! This file contains the state and starts operations. `step` advances operations, and `target`
//! executes them.

mod step;
mod target;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fishplate_sys::fabric::raw::*;

use super::persona::Persona;
use super::queue::Queue;
use super::{Bus, Counts};

const NAME: [u8; 4] = *b"fake";

pub(super) const NAME_LEN: usize = 16;

#[derive(Debug)]
pub(super) struct World {
    state: Mutex<State>,
}

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
    /// True if an operation reports its completion only if it requests one.
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
    pub device: bool,
    pub by_descriptor: bool,
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
    /// Posted with `FI_MORE`: waits for a post without that flag.
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
    /// `None` if no endpoint has the address.
    pub dst: Option<u32>,
    pub verb: Verb,
    pub context: *mut c_void,
    pub completes: bool,
    pub delivery: bool,
    pub local: *mut u8,
    pub len: usize,
    pub of_device: bool,
    /// Once there is a copy, the program may reuse the source.
    pub copy: Option<Vec<u8>>,
    pub data: Option<u64>,
    pub addr: u64,
    pub key: u64,
    pub stage: Stage,
    pub wait: u32,
    pub landed: bool,
    pub fault: Option<Fault>,
    /// True if the operation's connection is broken. The origin gets an error, even if the
    /// operation lands.
    pub torn: bool,
    /// True for the copy of a broken operation that may still land, before or after its origin sees
    /// the error.
    pub stray: bool,
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
    /// Contexts that the provider owns, and the mark that it wrote into each.
    contexts: HashMap<usize, usize>,
    /// Connections (origin, target) that an error has ended, and the number of the last operation
    /// that fails for that reason.
    ended: HashMap<(u32, Option<u32>), u64>,
    pub faults: Vec<Fault>,
    pub keeps_registrations: bool,
    pub refuses_registrations: bool,
    /// Domains in which the record of a read was freed twice.
    pub damaged: BTreeSet<u32>,
    pub cut: Vec<String>,
    /// Interfaces with pulled cables, and the maximum delay of operations that still land, in reads
    /// of a queue.
    pub pulled: Vec<(String, u32)>,
    pub bare: Vec<String>,
    pub bus: Option<Arc<dyn Bus>>,
    /// Domains opened with `FI_HMEM`, so that they may register device memory.
    pub reaching: BTreeSet<u32>,
    pub violations: Vec<String>,
    pub open: usize,
    pub by_interface: BTreeMap<String, u64>,
    pub counts: Counts,
}

// SAFETY: the pointers come from the program's posts. They are used under the lock, and only while
// the program must keep them valid for every thread.
unsafe impl Send for State {}

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
                keeps_registrations: false,
                refuses_registrations: false,
                damaged: BTreeSet::new(),
                cut: vec![],
                pulled: vec![],
                bare: vec![],
                bus: None,
                reaching: BTreeSet::new(),
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

pub(super) fn name_of(ep: u32) -> [u8; NAME_LEN] {
    let mut name = [0; NAME_LEN];
    name[..4].copy_from_slice(&NAME);
    name[4..8].copy_from_slice(&ep.to_le_bytes());
    name
}

pub(super) fn ep_of(name: &[u8]) -> Option<u32> {
    let bytes: [u8; 4] = name.get(4..8)?.try_into().ok()?;
    (name.len() >= NAME_LEN && name[..4] == NAME).then_some(u32::from_le_bytes(bytes))
}

impl State {
    /// Returns a random number below `bound`. `bound` must not be 0.
    pub fn draw(&mut self, bound: u32) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        ((self.random >> 32) % u64::from(bound)) as u32
    }

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

    /// Returns false if the program must not use the context.
    pub fn own(&mut self, context: *mut c_void) -> bool {
        let words = self.context_words();
        if words == 0 {
            return true;
        }
        if context.is_null() {
            self.violation("a post without a context, although the mode requires one");
            return false;
        }
        let mark = self.random as usize | 1;
        if self.contexts.insert(context as usize, mark).is_some() {
            self.violation("a context used for two operations at once");
            return false;
        }
        // SAFETY: the provider owns `words` words of a context until the operation completes
        // (`fi_getinfo(3)`, FI_CONTEXT).
        (0..words).for_each(|at| unsafe { context.cast::<usize>().add(at).write(mark) });
        true
    }

    fn disown(&mut self, context: *mut c_void) {
        let words = self.context_words();
        if let Some(mark) = self.contexts.remove(&(context as usize)) {
            // SAFETY: the provider has owned these words of the context until now.
            if (0..words).any(|at| unsafe { context.cast::<usize>().add(at).read() } != mark) {
                self.violation("a context written while the provider owned it");
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

    pub fn may_use(
        &mut self,
        ep: u32,
        ptr: *const u8,
        len: usize,
        desc: *mut c_void,
        what: &str,
    ) -> bool {
        let of_device = self.device_of(ptr as usize, len).is_some();
        if self.persona.mr_mode & FI_MR_LOCAL == 0 && !of_device {
            return true;
        }
        let domain = self.eps[&ep].domain;
        let (start, end) = (ptr as usize, ptr as usize + len);
        let good = self.mrs.iter().any(|mr| {
            descriptor(mr.id) == desc
                && mr.domain == domain
                && mr.device == of_device
                && mr.ptr <= start
                && end <= mr.ptr + mr.len
        });
        if !good {
            self.violation(format!("{what}: local memory without its registration's descriptor"));
        }
        good
    }

    pub fn device_of(&self, at: usize, len: usize) -> Option<u32> {
        self.bus.as_ref()?.device_of(at as u64, len)
    }

    /// Returns the payload of an operation: its copy, or the bytes in the origin's memory.
    ///
    /// # Safety
    /// The operation's local memory is readable.
    pub unsafe fn source(&self, op: &Op) -> Vec<u8> {
        match &op.copy {
            Some(bytes) => bytes.clone(),
            // SAFETY: our caller guarantees that the local memory is readable.
            None => unsafe { self.load(op.local, op.len, op.of_device) },
        }
    }

    /// # Safety
    /// `from` is readable.
    pub unsafe fn load(&self, from: *const u8, len: usize, of_device: bool) -> Vec<u8> {
        let mut bytes = vec![0; len];
        match &self.bus {
            Some(bus) if of_device => bus.read(from as u64, &mut bytes),
            // SAFETY: our caller guarantees that `from` is readable.
            _ => unsafe { std::ptr::copy(from, bytes.as_mut_ptr(), len) },
        }
        bytes
    }

    /// # Safety
    /// `to` is writable.
    pub unsafe fn store(&self, to: *mut u8, bytes: &[u8], of_device: bool) {
        match &self.bus {
            Some(bus) if of_device => bus.write(to as u64, bytes),
            // SAFETY: our caller guarantees that `to` is writable.
            _ => unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) },
        }
    }

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
            let held =
                self.ops.iter_mut().filter(|held| held.src == src && held.stage == Stage::Held);
            held.for_each(|held| held.stage = Stage::Leaving);
        }
        self.ops.push(op);
    }

    fn delay(&mut self) -> u32 {
        let most = self.persona.jitter + 1;
        self.draw(most)
    }

    fn is_alive(&self, ep: Option<u32>) -> bool {
        ep.and_then(|ep| self.eps.get(&ep)).is_some_and(|ep| !ep.dead)
    }

    /// Damages the domain of a closing endpoint if one of its reads is in flight and the persona
    /// [frees reads twice](super::Persona::frees_reads_twice).
    pub fn damage_by_close(&mut self, ep: u32) {
        let arrives = |op: &Op| op.src == ep && op.verb == Verb::Read && op.stage == Stage::Flying;
        if self.persona.frees_reads_twice && self.ops.iter().any(arrives) {
            self.counts.damaged += u64::from(self.damaged.insert(self.eps[&ep].domain));
        }
    }

    fn is_cut(&self, ep: u32) -> bool {
        self.eps.get(&ep).is_some_and(|ep| self.cut.contains(&ep.interface))
    }

    fn torn(&self, src: u32, dst: Option<u32>) -> Option<u32> {
        let of = |ep: u32| {
            let interface = &self.eps.get(&ep)?.interface;
            self.pulled.iter().find(|(name, _)| name == interface).map(|&(_, late)| late)
        };
        of(src).or_else(|| of(dst?))
    }

    /// Breaks the connections of an interface. Each write or message in flight is lost, or lands
    /// within `late` reads of a queue. The origin gets an error in both cases, even if the
    /// operation has landed but was not reported yet.
    pub fn pull(&mut self, interface: &str, late: u32) {
        self.pulled.push((interface.to_owned(), late));
        let mut ops = std::mem::take(&mut self.ops);
        for op in &mut ops {
            if self.torn(op.src, op.dst).is_some() && !op.stray {
                self.tear(op, late);
            }
        }
        self.ops.append(&mut ops);
    }

    /// Marks an operation as broken. A write or message may go on as a stray.
    pub(super) fn tear(&mut self, op: &mut Op, late: u32) {
        if std::mem::replace(&mut op.torn, true) {
            return;
        }
        let carries = matches!(op.verb, Verb::Write | Verb::Send);
        if carries && !op.landed && self.draw(3) != 0 {
            // SAFETY: the payload was copied, or is readable until the completion. The completion
            // has not been reported yet.
            let copy = Some(unsafe { self.source(op) });
            let wait = self.draw(late + 1);
            let (context, fault, stage) = (std::ptr::null_mut(), None, Stage::Flying);
            let Op { number, src, dst, verb, local, len, data, addr, key, .. } = *op;
            self.counts.strays += 1;
            self.ops.push(Op {
                number,
                src,
                dst,
                verb,
                context,
                completes: false,
                delivery: false,
                local,
                len,
                of_device: false,
                copy,
                data,
                addr,
                key,
                stage,
                wait,
                landed: false,
                fault,
                torn: true,
                stray: true,
            });
        }
        op.stage = Stage::Flying;
        op.wait = self.delay();
    }

    /// Kills an endpoint. `address` ends with the endpoint's address.
    pub fn kill(&mut self, address: &[u8]) {
        if let Some(ep) = ep_of(&address[address.len().saturating_sub(NAME_LEN)..]) {
            self.forget(ep);
            // Moves incomplete reads from the killed endpoint back by one stage, so that they find
            // a dead target.
            for op in self.ops.iter_mut().filter(|op| op.dst == Some(ep) && op.verb == Verb::Read) {
                op.stage = Stage::Flying;
            }
            if let Some(ep) = self.eps.get_mut(&ep) {
                ep.dead = true;
            }
        }
    }

    pub fn forget(&mut self, ep: u32) {
        let mut contexts: Vec<*mut c_void> = vec![];
        self.ops.retain(|op| {
            // Strays in the network no longer depend on their origin.
            let held = op.src == ep && !op.stray;
            if held {
                contexts.push(op.context);
            }
            !held
        });
        if let Some(ep) = self.eps.get_mut(&ep) {
            contexts.extend(ep.recvs.drain(..).map(|receive| receive.context));
        }
        for context in contexts {
            self.contexts.remove(&(context as usize));
        }
    }
}

/// Returns the local descriptor of a registration. The value is not a pointer.
pub(super) fn descriptor(mr: u32) -> *mut c_void {
    std::ptr::without_provenance_mut((mr as usize) << 8 | 0xd5)
}
