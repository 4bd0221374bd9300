use super::*;
use crate::testing::Random;
use crate::{Device, Handle, Mark, Share, Unshared};
use std::ptr::NonNull;

fn pair(behaviour: Behaviour) -> (FakeDriver, FakeDevice, FakeDevice) {
    let driver = FakeDriver::new(behaviour, 1);
    let device = || driver.process().device(0).unwrap();
    let (a, b) = (device(), device());
    (driver, a, b)
}

fn export(device: &mut FakeDevice, ptr: DevicePtr) -> Handle {
    let allocation = device.allocation(ptr).unwrap();
    device.export(&allocation).unwrap()
}

fn settle(device: &mut FakeDevice, stream: u8) {
    let mark = device.mark(stream).unwrap();
    while !device.reached(mark).unwrap() {}
}

#[test]
fn an_exported_allocation_is_one_memory_in_two_processes() {
    for kind in [MemoryKind::Legacy, MemoryKind::Virtual] {
        let (driver, mut a, mut b) = pair(Behaviour { kind, ..Behaviour::PLAIN });
        let own = a.alloc(100_000).unwrap();
        let size = a.allocation(own).unwrap().size;
        let handle = export(&mut a, own.at(70_000));
        // SAFETY: `a` frees the memory only after `b` has closed it.
        let theirs = unsafe { b.open(&handle, size) }.unwrap();
        assert_ne!(theirs, own, "every process has its own addresses");
        a.process().poke(own.at(99_990), b"0123456789").unwrap();
        let scratch = b.alloc(10).unwrap();
        // SAFETY: both allocations live until the end of the test.
        unsafe { b.copy(0, scratch, theirs.at(99_990), 10) }.unwrap();
        settle(&mut b, 0);
        assert_eq!(b.process().peek(scratch, 10).unwrap(), b"0123456789");
        // SAFETY: no queued work uses the memory, which is closed before it is freed.
        unsafe {
            b.close(theirs).unwrap();
            b.free(scratch).unwrap();
            a.free(own).unwrap();
        }
        assert_eq!(driver.violations(), []);
        assert_eq!(driver.counts().held(), 0);
    }
}

#[test]
fn addresses_are_reused_and_buffer_ids_are_not() {
    let (driver, mut a, mut b) = pair(Behaviour::PLAIN);
    let mut seen = std::collections::HashSet::new();
    let first = a.alloc(4096).unwrap();
    let stale = export(&mut a, first);
    for _ in 0..20 {
        assert!(seen.insert(a.allocation(first).unwrap().buffer));
        // SAFETY: nothing uses the memory.
        unsafe { a.free(first) }.unwrap();
        assert_eq!(a.alloc(4096).unwrap(), first);
    }
    // SAFETY: the open fails, so it returns no memory.
    assert_eq!(unsafe { b.open(&stale, 4096) }, Err(DeviceError::BadHandle));
    assert_eq!(driver.violations(), []);
    driver.behave(|behaviour| behaviour.recycle = false);
    // SAFETY: nothing uses the memory.
    unsafe { a.free(first) }.unwrap();
    assert_ne!(a.alloc(4096).unwrap(), first);
}

#[test]
fn handles_of_one_allocation_are_equal_or_differ_and_open_at_its_base() {
    for differ in [false, true] {
        let (_, mut a, b) =
            pair(Behaviour { handles_differ: differ, reopen: true, ..Behaviour::PLAIN });
        let own = a.alloc(1 << 16).unwrap();
        let [at_base, inside] =
            [0, 512].map(|at| a.process().export_legacy(0, own.at(at)).unwrap());
        assert_eq!(at_base != inside, differ);
        let one = b.process().open_legacy(0, &at_base).unwrap();
        assert_eq!(b.process().open_legacy(0, &inside).unwrap(), one);
        b.process().close(0, one).unwrap();
        assert!(b.process().peek(one, 1).is_ok(), "open once more");
        b.process().close(0, one).unwrap();
        assert!(b.process().peek(one, 1).is_err());
    }
}

#[test]
fn invalid_handles_do_not_open() {
    let (driver, mut a, mut b) = pair(Behaviour::PLAIN);
    let own = a.alloc(4096).unwrap();
    let Handle::Legacy(bytes) = export(&mut a, own) else { panic!("another kind than requested") };
    // SAFETY: only the last open succeeds, and nothing uses its memory.
    unsafe {
        assert_eq!(a.open(&Handle::Legacy(bytes), 4096), Err(DeviceError::SameProcess));
        for bit in 0..512 {
            let mut garbage = bytes;
            garbage[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(
                b.open(&Handle::Legacy(garbage), 4096),
                Err(DeviceError::BadHandle),
                "bit {bit}"
            );
        }
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(b.open(&Handle::Descriptor(file.into()), 4096), Err(DeviceError::BadHandle));
        let mut elsewhere = driver.process().device(1).unwrap();
        driver.part(1, 0);
        assert_eq!(elsewhere.open(&Handle::Legacy(bytes), 4096), Err(DeviceError::NoPeerAccess));
        assert!(!elsewhere.reaches(&a.caps().uuid) && b.reaches(&a.caps().uuid));
        b.open(&Handle::Legacy(bytes), 4096).unwrap();
        assert_eq!(b.open(&Handle::Legacy(bytes), 4096), Err(DeviceError::Driver(208)));
    }
    assert_eq!(driver.process().device(2).unwrap_err(), DeviceError::NoDevice(2));
    assert_eq!(driver.counts().opens, 1);
}

#[test]
fn unexportable_memory_names_the_reason() {
    let (_, mut a, _) = pair(Behaviour::PLAIN);
    for (kind, why) in [
        (MemoryKind::Pool, Unshared::Pool),
        (MemoryKind::Managed, Unshared::Managed),
        (MemoryKind::VirtualUnshared, Unshared::NoHandleType),
    ] {
        let ptr = a.alloc_as(kind, 4096).unwrap();
        let allocation = a.allocation(ptr).unwrap();
        assert_eq!(allocation.share, Share::Never(why));
        assert_eq!(a.export(&allocation).unwrap_err(), DeviceError::NotExportable(why));
        assert_eq!(a.process().export_legacy(0, ptr).unwrap_err(), DeviceError::NotExportable(why));
    }
    let mut memory = [0u8; 64];
    // SAFETY: `memory` lives until it is unpinned.
    let pinned = unsafe { a.pin(NonNull::new(memory.as_mut_ptr()).unwrap(), 64) }.unwrap();
    assert_eq!(a.allocation(pinned).unwrap().share, Share::Never(Unshared::Host));
    // SAFETY: no work is queued.
    unsafe { a.unpin(NonNull::new(memory.as_mut_ptr()).unwrap()) }.unwrap();
    assert_eq!(a.allocation(pinned), Err(DeviceError::NotDeviceMemory));
}

#[test]
fn copies_are_ordered_within_a_stream_only() {
    let mut reordered = 0;
    for seed in 1..=50 {
        let driver = FakeDriver::new(Behaviour::LATE, seed);
        let mut device = driver.process().device(0).unwrap();
        let words = device.alloc(4096).unwrap();
        let source = device.alloc(4096).unwrap();
        let mut random = Random(seed);
        let mut last = [0; 4];
        for value in 1..=40u64 {
            let stream = random.below(4) as u8;
            let at = 8 * u64::from(stream);
            // SAFETY: both allocations live until the end of the test.
            unsafe {
                device.copy(stream, words.at(1024 + 512 * u64::from(stream)), source, 512).unwrap();
                device.write_word(stream, words.at(at), value).unwrap();
            }
            last[usize::from(stream)] = value;
            let seen = device.process().peek(words, 32).unwrap();
            for (word, last) in seen.chunks_exact(8).zip(last) {
                assert!(u64::from_le_bytes(word.try_into().unwrap()) <= last, "seed {seed}");
            }
        }
        for stream in 0..4 {
            settle(&mut device, stream);
        }
        let seen = device.process().peek(words, 32).unwrap();
        let seen: Vec<_> =
            seen.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
        assert_eq!(seen, last, "seed {seed}");
        reordered += driver.counts().reordered;
        assert_eq!(driver.violations(), []);
    }
    assert!(reordered > 500, "only {reordered} of 4000");
}

#[test]
fn a_word_becomes_visible_after_earlier_copies() {
    let driver = FakeDriver::new(Behaviour::LATE, 7);
    let mut device = driver.process().device(0).unwrap();
    let (from, to) = (device.alloc(8192).unwrap(), device.alloc(8192).unwrap());
    for round in 1..=100u64 {
        device.process().poke(from, &[round as u8; 4096]).unwrap();
        // SAFETY: both allocations live until the end of the test.
        unsafe {
            device.copy(1, to, from, 4096).unwrap();
            device.write_word(1, to.at(4096), round).unwrap();
        }
        let mut torn = 0;
        while device.process().peek(to.at(4096), 8).unwrap() != round.to_le_bytes() {
            let seen = device.process().peek(to, 4096).unwrap();
            torn += usize::from(seen[0] != seen[4095]);
            driver.advance(1);
        }
        assert_eq!(
            device.process().peek(to, 4096).unwrap(),
            [round as u8; 4096],
            "{torn} words came before their copy"
        );
    }
}

#[test]
fn misuse_that_a_real_driver_misses_is_counted() {
    let (driver, mut a, mut b) = pair(Behaviour::LATE);
    let own = a.alloc(4096).unwrap();
    let handle = export(&mut a, own);
    let scratch = b.alloc(4096).unwrap();
    // SAFETY: the test violates the contract on purpose. The fake driver detects that without
    // undefined behaviour.
    unsafe {
        let open = b.open(&handle, 4096).unwrap();
        a.free(own).unwrap();
        assert_eq!(driver.violations(), [Violation::FreedWhileOpen]);
        b.copy(0, scratch, open, 16).unwrap();
        settle(&mut b, 0);
        assert_eq!(driver.violations().last(), Some(&Violation::Stale));
        assert_eq!(b.process().peek(scratch, 16).unwrap(), [0xDB; 16], "poison");
        b.copy(0, scratch, open, 16).unwrap();
        let seen = |wrong: Result<(), DeviceError>, what| {
            assert_eq!(driver.state().violations.pop(), Some(what), "{wrong:?}");
        };
        b.close(open).unwrap();
        seen(Ok(()), Violation::Stale);
        seen(Ok(()), Violation::TakenFromQueue);
        seen(b.close(open), Violation::NotTaken);
        seen(b.copy(0, open, scratch, 16), Violation::OutOfRange);
        seen(b.copy(0, scratch.at(4090), scratch, 16), Violation::OutOfRange);
        seen(b.copy(0, scratch.at(8), scratch, 16), Violation::Overlap);
        seen(b.write_word(0, scratch.at(4), 1), Violation::Misaligned);
        seen(b.copy(99, scratch, scratch.at(64), 1), Violation::UnknownStream);
        seen(b.reached(Mark(5)).map(|_| ()), Violation::UnknownMark);
    }
}

#[test]
fn injected_errors_occur_and_a_lost_device_stays_lost() {
    let (driver, mut a, _) = pair(Behaviour::LATE);
    let (from, to) = (a.alloc(64).unwrap(), a.alloc(64).unwrap());
    a.process().fail(Call::Copy, 2, DeviceError::Driver(700));
    // SAFETY: both allocations live until the end of the test.
    let copied = [(); 4].map(|()| unsafe { a.copy(0, to, from, 64) });
    assert_eq!(copied, [Ok(()), Ok(()), Err(DeviceError::Driver(700)), Ok(())]);
    assert_eq!(a.process().counts().calls[Call::Copy], 4);
    let mark = a.mark(0).unwrap();
    driver.lose(0);
    assert!(matches!(a.reached(mark), Err(DeviceError::Lost(_))));
    assert!(matches!(a.alloc(64), Err(DeviceError::Lost(_))));
    assert_eq!(a.process().counts().marks, a.process().counts().marks_back);
    driver.process().device(1).unwrap().alloc(64).unwrap();
}

#[test]
fn marks_run_out_and_are_reused() {
    let (_, mut a, _) = pair(Behaviour { marks: 2, ..Behaviour::LATE });
    let marks = [a.mark(0).unwrap(), a.mark(1).unwrap()];
    assert_eq!(a.mark(2), Err(DeviceError::Exhausted));
    assert_eq!(a.reached(marks[0]), Ok(true), "nothing is queued");
    let again = a.mark(2).unwrap();
    assert_ne!(again, marks[0], "a freed mark is invalid");
    assert!(a.reached(marks[0]).is_err());
}

#[test]
fn death_closes_opened_memory_and_leaves_orphans() {
    let (driver, mut a, mut b) = pair(Behaviour::PLAIN);
    let (own, other) = (a.alloc(4096).unwrap(), b.alloc(4096).unwrap());
    let (to_b, to_a) = (export(&mut a, own), export(&mut b, other));
    // SAFETY: neither process frees its memory while it is open.
    let (at_b, _) = unsafe { (b.open(&to_b, 4096).unwrap(), a.open(&to_a, 4096).unwrap()) };
    a.process().kill();
    assert!(matches!(a.alloc(64), Err(DeviceError::Lost(_))));
    assert_eq!(a.process().counts().held(), 0);
    // SAFETY: no process has the memory open any more.
    unsafe { b.free(other) }.unwrap();
    let scratch = b.alloc(4096).unwrap();
    // SAFETY: orphaned memory stays mapped while `b` has it open.
    unsafe { b.copy(0, scratch, at_b, 8) }.unwrap();
    assert_eq!(b.process().counts().orphans_touched, 1);
    // SAFETY: no work is queued any more.
    unsafe { b.close(at_b) }.unwrap();
    let counts = driver.counts();
    assert_eq!(
        (driver.violations(), counts.opens),
        (vec![], counts.closes + counts.closed_by_death)
    );
}

#[test]
fn the_processor_sees_memory_with_a_host_view() {
    let (driver, mut a, _) =
        pair(Behaviour { host_view: true, must_flush: true, ..Behaviour::PLAIN });
    let own = a.alloc(4096).unwrap();
    let seen = a.host_view(own.at(100), 3996).unwrap();
    assert_eq!(a.host_view(own.at(100), 3997), None);
    a.process().remote_write(own.at(100), &[7]).unwrap();
    // SAFETY: the address comes from a host view, and no work is queued.
    assert_eq!(unsafe { seen.as_ptr().read_volatile() }, 0, "not flushed yet");
    a.flush_remote_writes().unwrap();
    // SAFETY: the address comes from a host view, and no work is queued.
    assert_eq!(unsafe { seen.as_ptr().read_volatile() }, 7);
    driver.behave(|behaviour| behaviour.host_view = false);
    assert_eq!(a.host_view(own, 1), None);
    assert_eq!(a.process().counts().calls[Call::Flush], 1);
}

#[test]
fn pinned_memory_is_copied_to_and_from() {
    let (driver, mut a, _) = pair(Behaviour::LATE);
    let own = a.alloc(4096).unwrap();
    let mut memory: Vec<u8> = (0..=255).collect();
    let host = NonNull::new(memory.as_mut_ptr()).unwrap();
    // SAFETY: the vector lives until it is unpinned.
    unsafe {
        let pinned = a.pin(host, 256).unwrap();
        a.copy(0, own, pinned, 128).unwrap();
        a.copy(0, pinned.at(128), own, 128).unwrap();
        settle(&mut a, 0);
        a.unpin(host).unwrap();
    }
    assert_eq!(memory[128..], memory[..128]);
    assert_eq!(driver.violations(), []);
}

#[test]
fn time_passes_by_calls() {
    let (driver, mut a, _) = pair(Behaviour::PLAIN);
    let before = driver.steps();
    a.alloc(64).unwrap();
    assert_eq!(driver.steps() - before, Call::Alloc.steps());
}
