//! Tests of the fake provider, through the wrappers that rails use.

use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use fishplate_sys::fabric::av::AddressVector;
use fishplate_sys::fabric::cq::{CompletionQueue, EMPTY};
use fishplate_sys::fabric::domain::Domain;
use fishplate_sys::fabric::endpoint::{Buffer, Endpoint, Target};
use fishplate_sys::fabric::error::Code;
use fishplate_sys::fabric::fabric::Fabric;
use fishplate_sys::fabric::info::{Hints, Info};
use fishplate_sys::fabric::mr::MemoryRegion;
use fishplate_sys::fabric::raw::*;

use super::*;

const LEN: usize = 4096;
const ACCESS: u64 = FI_READ | FI_WRITE | FI_SEND | FI_RECV | FI_REMOTE_READ | FI_REMOTE_WRITE;

/// One side: an endpoint, and the memory of all its operations. The fields are declared in drop
/// order.
struct Side {
    mr: MemoryRegion,
    ep: Endpoint,
    memory: Vec<u64>,
    contexts: Vec<fi_context2>,
    free: Vec<usize>,
    virtual_addresses: bool,
}

fn offers(fake: &Fake, change: impl FnOnce(&mut Hints)) -> Vec<Info> {
    let mut hints = Hints::new(fake.library()).unwrap();
    hints.set_mode(FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA);
    hints.set_mr_mode(
        FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT,
    );
    change(&mut hints);
    fake.library().getinfo(None, None, 0, &hints).unwrap_or_default()
}

impl Side {
    fn new(fake: &Fake, completions: usize) -> Side {
        let info = offers(fake, |hints| hints.set_op_flags(FI_DELIVERY_COMPLETE)).swap_remove(0);
        let domain = Domain::open(Arc::new(Fabric::open(&info).unwrap()), &info).unwrap();
        let cq = CompletionQueue::open(&domain, completions).unwrap();
        let av = AddressVector::open(&domain, FI_AV_TABLE, 4).unwrap();
        let ep = Endpoint::open(&domain, &info, cq, av).unwrap();
        let mut memory = vec![0u64; LEN / 8];
        let start = NonNull::new(memory.as_mut_ptr().cast()).unwrap();
        // SAFETY: the memory is a later field of the same structure, so it outlives the
        // registration.
        let mut mr = unsafe { MemoryRegion::register(&domain, start, LEN, ACCESS, 77) }.unwrap();
        if info.domain().mr_mode & FI_MR_ENDPOINT != 0 {
            // SAFETY: the registration is an earlier field than the endpoint, so it is dropped
            // first.
            unsafe { mr.bind(&ep) }.unwrap();
        }
        let contexts = vec![fi_context2 { internal: [null_mut(); 8] }; 1024];
        let virtual_addresses = info.domain().mr_mode & FI_MR_VIRT_ADDR != 0;
        Side { mr, ep, memory, contexts, free: (0..1024).collect(), virtual_addresses }
    }

    fn buffer(&mut self, at: usize, len: usize) -> Buffer {
        // SAFETY: the tests use only offsets inside the memory.
        let ptr = unsafe { self.memory.as_mut_ptr().cast::<u8>().add(at) };
        Buffer { ptr, len, desc: self.mr.desc() }
    }

    fn context(&mut self) -> *mut c_void {
        let at = self.free.pop().unwrap();
        (&raw mut self.contexts[at]).cast()
    }

    fn target(&self, at: usize) -> Target {
        let base = if self.virtual_addresses { self.memory.as_ptr() as u64 } else { 0 };
        Target { peer: 0, addr: base + at as u64, key: self.mr.key() }
    }

    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        self.memory.iter().flat_map(|word| word.to_ne_bytes()).skip(at).take(len).collect()
    }

    /// Reads completions. An error is returned as its code and the provider's text.
    fn read(&mut self) -> Vec<Result<fi_cq_data_entry, (i32, String)>> {
        let mut entries = [EMPTY; 16];
        let mut seen = vec![];
        match self.ep.completions(&mut entries) {
            Ok(n) => seen.extend(entries[..n].iter().map(|entry| Ok(*entry))),
            Err(Code::EAGAIN) => {}
            Err(code) => {
                assert_eq!(code.0, FI_EAVAIL);
                let error = self.ep.error_completion().unwrap();
                seen.push(Err((error.code.0, self.ep.describe(&error))));
            }
        }
        let first = self.contexts.as_ptr() as usize;
        for entry in seen.iter().flatten() {
            let at = (entry.op_context as usize).wrapping_sub(first) / size_of::<fi_context2>();
            if at < self.contexts.len() {
                self.free.push(at);
            }
        }
        seen
    }
}

/// Creates two connected sides. Each side is peer 0 in the other's address vector.
fn pair(fake: &Fake, completions: usize) -> (Side, Side) {
    let (mut a, mut b) = (Side::new(fake, completions), Side::new(fake, completions));
    a.ep.insert(&b.ep.name().unwrap()).unwrap();
    b.ep.insert(&a.ep.name().unwrap()).unwrap();
    (a, b)
}

fn insist(mut post: impl FnMut() -> Result<(), Code>) {
    for _ in 0..10_000 {
        match post() {
            Ok(()) => return,
            Err(code) => assert_eq!(code, Code::EAGAIN),
        }
    }
    panic!("refused for ever");
}

#[test]
fn every_persona_moves_bytes_without_leaks() {
    for (name, persona) in Persona::all() {
        for seed in 1..20 {
            let fake = Fake::new(persona.clone(), seed);
            let (mut a, mut b) = pair(&fake, 1024);
            a.memory[..32].fill(0x1111_2222_3333_4444);
            b.memory[64..80].fill(0x5555_6666_7777_8888);
            let (from, into, room) = (a.buffer(0, 256), a.buffer(1024, 128), b.buffer(2048, 256));
            let context = b.context();
            // SAFETY: memory and contexts belong to the sides, and are not accessed until the
            // operations complete.
            unsafe {
                insist(|| b.ep.recv(room, context));
                let (to, source, cx) =
                    (b.target(0), b.target(512), [a.context(), a.context(), a.context()]);
                insist(|| a.ep.write(from, to, Some(0x99), cx[0]));
                insist(|| a.ep.read(into, source, cx[1]));
                insist(|| a.ep.send(from, 0, FI_COMPLETION, cx[2]));
            }
            let (mut done, mut landed, mut received) = (0, 0, 0);
            for _ in 0..1000 {
                done += a.read().into_iter().filter(|entry| entry.is_ok()).count();
                for entry in b.read() {
                    let entry = entry.unwrap();
                    if entry.flags & FI_REMOTE_CQ_DATA != 0 {
                        landed += 1;
                        assert_eq!(
                            (entry.data, b.bytes(0, 256)),
                            (0x99, a.bytes(0, 256)),
                            "{name}: data first"
                        );
                    } else {
                        received += 1;
                        assert_eq!(
                            (entry.len, b.bytes(2048, 256)),
                            (256, a.bytes(0, 256)),
                            "{name}"
                        );
                    }
                }
            }
            assert_eq!((done, landed, received), (3, 1, 1), "{name}, seed {seed}");
            assert_eq!(a.bytes(1024, 128), b.bytes(512, 128), "{name}, seed {seed}");
            drop((a, b));
            assert_eq!(fake.violations(), [] as [String; 0], "{name}, seed {seed}");
            assert_eq!(fake.open_objects(), 0, "{name}, seed {seed}");
        }
    }
}

/// Sends `count` writes, and returns their completion data in the order of arrival.
fn arrivals(fake: &Fake, count: u64) -> Vec<u64> {
    let (mut a, mut b) = pair(fake, 1024);
    let (from, to) = (a.buffer(0, 8), b.target(0));
    let mut seen = vec![];
    let mut next = 0;
    for _ in 0..10_000 {
        if next < count {
            let context = a.context();
            // SAFETY: memory and contexts belong to the sides, and the source never changes.
            match unsafe { a.ep.write(from, to, Some(next), context) } {
                Ok(()) => next += 1,
                Err(_) => a.free.push((context as usize - a.contexts.as_ptr() as usize) / 64),
            }
        }
        a.read();
        seen.extend(b.read().into_iter().flatten().map(|entry| entry.data));
    }
    seen
}

#[test]
fn efa_reorders_and_refuses_and_tcp_keeps_order() {
    let fake = Fake::new(Persona::efa_direct(), 3);
    let seen = arrivals(&fake, 200);
    let mut sorted = seen.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..200).collect::<Vec<_>>(), "each once");
    let counts = fake.counts();
    assert!(
        !seen.is_sorted() && counts.overtaken > 0 && counts.early > 0 && counts.refused > 0,
        "{counts:?}"
    );
    let fake = Fake::new(Persona::tcp(), 3);
    assert_eq!(arrivals(&fake, 200), (0..200).collect::<Vec<_>>());
    assert_eq!(fake.counts().overtaken, 0);
}

#[test]
fn completion_data_is_cut_to_four_bytes() {
    let fake = Fake::new(Persona::efa_direct().calm(), 1);
    let (mut a, mut b) = pair(&fake, 64);
    let (from, to, context) = (a.buffer(0, 8), b.target(0), a.context());
    // SAFETY: memory and contexts belong to the sides, and are not accessed until the operations
    // complete.
    unsafe { a.ep.write(from, to, Some(0xaaaa_bbbb_cccc_dddd), context) }.unwrap();
    let entry = (0..10).find_map(|_| b.read().pop()).unwrap().unwrap();
    assert_eq!(entry.data, 0xcccc_dddd);
}

#[test]
fn manual_progress_needs_the_target_and_automatic_does_not() {
    for (persona, moves) in [(Persona::cxi(), false), (Persona::efa_direct(), true)] {
        let fake = Fake::new(persona.calm(), 1);
        let (mut a, mut b) = pair(&fake, 64);
        let (from, to, context) = (a.buffer(0, 8), b.target(0), a.context());
        // SAFETY: memory and contexts belong to the sides, and are not accessed until the
        // operations complete.
        unsafe { a.ep.write(from, to, None, context) }.unwrap();
        let alone = (0..100).map(|_| a.read().len()).sum::<usize>();
        assert_eq!(alone, usize::from(moves));
        b.read();
        assert_eq!(alone + (0..100).map(|_| a.read().len()).sum::<usize>(), 1);
    }
}

#[test]
fn a_failed_write_reports_the_provider_s_text_and_does_not_land() {
    let fake = Fake::new(Persona::efa_direct().calm(), 1);
    let (mut a, mut b) = pair(&fake, 64);
    a.memory[0] = 9;
    fake.fail(1, libc::EIO, 4711, b"what happened");
    let (from, to, cx) = (a.buffer(0, 8), b.target(0), [a.context(), a.context()]);
    // SAFETY: memory and contexts belong to the sides, and are not accessed until the operations
    // complete.
    unsafe {
        a.ep.write(from, b.target(8), None, cx[0]).unwrap();
        a.ep.write(from, to, Some(1), cx[1]).unwrap();
    }
    let seen: Vec<_> = (0..10).flat_map(|_| a.read()).collect();
    assert!(
        seen.iter().any(|entry| matches!(entry, Err((libc::EIO, words)) if words.contains("4711"))),
        "{seen:?}"
    );
    assert_eq!((b.read().len(), b.memory[0], b.memory[1]), (0, 0, 9));
}

#[test]
fn unregistered_memory_cannot_be_accessed() {
    for (name, persona) in Persona::all() {
        let fake = Fake::new(persona.calm(), 1);
        let (mut a, mut b) = pair(&fake, 64);
        let (good, from) = (b.target(LEN - 8), a.buffer(0, 16));
        let wrong = [
            good,
            Target { key: good.key ^ 1, ..b.target(0) },
            Target { addr: u64::MAX - 4, ..good },
        ];
        for to in wrong {
            let context = a.context();
            // SAFETY: memory and contexts belong to the sides, and are not accessed until the
            // operations complete.
            unsafe { a.ep.write(from, to, None, context) }.unwrap();
            let seen: Vec<_> = (0..10).flat_map(|_| [a.read(), b.read()].concat()).collect();
            assert!(matches!(seen[..], [Err((libc::EACCES, _))]), "{name}: {seen:?}");
        }
        assert!(b.memory.iter().all(|&word| word == 0));
    }
}

#[test]
fn dead_endpoints_are_silent_or_report_errors() {
    for (persona, ends) in [(Persona::efa_direct(), 1), (Persona::verbs_rxm(), 0)] {
        let fake = Fake::new(persona.calm(), 1);
        let (mut a, b) = pair(&fake, 64);
        fake.kill(&b.ep.name().unwrap());
        let (from, to, context) = (a.buffer(0, 8), b.target(0), a.context());
        // SAFETY: memory and contexts belong to the sides, and are not accessed until the
        // operations complete.
        unsafe { a.ep.write(from, to, None, context) }.unwrap();
        let seen: Vec<_> = (0..100).flat_map(|_| a.read()).collect();
        assert_eq!(seen.len(), ends, "{seen:?}");
    }
}

#[test]
fn an_unprotected_short_queue_overruns() {
    for (persona, overruns) in [(Persona::efa_direct(), true), (Persona::tcp(), false)] {
        let fake = Fake::new(persona.calm(), 1);
        let (mut a, mut b) = pair(&fake, 4);
        let (from, to) = (a.buffer(0, 8), b.target(0));
        for n in 0..8 {
            let context = a.context();
            // SAFETY: memory and contexts belong to the sides, and are not accessed until the
            // operations complete.
            unsafe { a.ep.write(from, to, Some(n), context) }.unwrap();
        }
        for _ in 0..50 {
            // Only the origin reads its queue, so that the target's queue fills.
            a.read();
        }
        let seen: Vec<_> = (0..50).flat_map(|_| b.read()).collect();
        let overrun = seen.iter().any(|entry| matches!(entry, Err((FI_EOVERRUN, _))));
        assert_eq!(overrun, overruns, "{seen:?}");
        assert_eq!(!fake.violations().is_empty(), overruns);
    }
}

#[test]
fn violations_are_detected() {
    let fake = Fake::new(Persona::efa_direct().calm(), 1);
    let (mut a, b) = pair(&fake, 64);
    let (from, to, context) = (a.buffer(0, 8), b.target(0), a.context());
    // SAFETY: the provider rejects the misuse before any access.
    unsafe {
        assert!(a.ep.write(Buffer { desc: null_mut(), ..from }, to, None, context).is_err());
        assert!(a.ep.write(from, to, None, null_mut()).is_err());
        assert!(a.ep.write(from, Target { peer: 5, ..to }, None, context).is_err());
        a.ep.write(from, to, None, context).unwrap();
        assert!(a.ep.write(from, to, None, context).is_err());
        // Misuse: writes to a context that the provider owns.
        context.cast::<u64>().write(1);
    }
    (0..10).for_each(|_| drop(a.read()));
    let told = fake.violations().join("\n");
    for what in
        ["descriptor", "without a context", "not in the vector", "two operations", "written while"]
    {
        assert!(told.contains(what), "{what}: {told}");
    }
}

#[test]
fn only_matching_interfaces_are_offered() {
    let fake = Fake::new(Persona::efa_direct(), 1);
    assert_eq!(offers(&fake, |_| {}).len(), 4);
    assert_eq!(offers(&fake, |hints| hints.set_domain(c"rdmap2-rdm")).len(), 1);
    assert_eq!(offers(&fake, |hints| hints.set_provider(c"efa")).len(), 4);
    let none: [fn(&mut Hints); 7] = [
        |hints| hints.set_provider(c"verbs"),
        |hints| hints.set_domain(c"eth0"),
        |hints| hints.set_mode(0),
        |hints| hints.set_caps(FI_ATOMIC),
        |hints| hints.set_mr_mode(0),
        |hints| hints.set_inject_size(64),
        |hints| hints.set_send_order(FI_ORDER_SAS),
    ];
    for (at, change) in none.into_iter().enumerate() {
        assert_eq!(offers(&fake, change).len(), 0, "{at}");
    }
    let manual = Fake::new(Persona::cxi(), 1);
    assert_eq!(offers(&manual, |hints| hints.set_data_progress(FI_PROGRESS_AUTO)).len(), 0);
    let info = offers(&manual, |hints| hints.set_domain(c"cxi1")).swap_remove(0);
    assert_eq!((info.pci(), info.link_speed()), (Some((0, 17, 0, 0)), Some(200_000_000_000)));
}

#[test]
fn networks_are_isolated_and_their_slots_are_reused() {
    for _ in 0..2 * FAKES_MAX {
        let fakes = [Fake::new(Persona::tcp(), 1), Fake::new(Persona::tcp(), 2)];
        let name = Side::new(&fakes[0], 16).ep.name().unwrap();
        let _there = Side::new(&fakes[1], 16);
        fakes[1].kill(&name);
    }
}
