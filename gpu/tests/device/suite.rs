//! The tests of the suite. Comments name the differences between drivers that the tests permit.

use std::fs::File;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use fishplate_gpu::{
    Allocation, Bell, Device, DeviceError, DevicePtr, ExportError, Exports, Handle, LEGACY_HANDLE,
    Mark, Share, Unshared,
};

use super::second::Second;
use super::support::soon;
use super::{Kit, first};

/// Pinned host memory, for copies to and from a device.
pub struct Pinned {
    bytes: Box<[u64]>,
    pub seen: DevicePtr,
}

impl Pinned {
    /// Allocates and pins whole pages.
    pub fn new<D: Device>(device: &mut D, len: usize) -> Pinned {
        let mut bytes = vec![0u64; (len + 8192) / 8].into_boxed_slice();
        let at = bytes.as_mut_ptr().cast::<u8>();
        let skip = at.align_offset(4096);
        // SAFETY: the box contains these bytes, and lives until they are unpinned.
        let seen = unsafe {
            let page = NonNull::new(at.add(skip)).unwrap();
            device.pin(page, len.next_multiple_of(4096)).unwrap()
        };
        Pinned { bytes, seen }
    }

    pub fn at(&mut self) -> NonNull<u8> {
        let at = self.bytes.as_mut_ptr().cast::<u8>();
        // SAFETY: the box is two pages longer than the memory, so the aligned address lies inside
        // it.
        NonNull::new(unsafe { at.add(at.align_offset(4096)) }).unwrap()
    }

    pub fn fill(&mut self, offset: usize, bytes: &[u8]) {
        // SAFETY: the range lies inside the memory, and no queued work uses it.
        unsafe {
            self.at().add(offset).as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        };
    }

    pub fn read(&mut self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: the range lies inside the memory, and all queued work on it has finished.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(self.at().add(offset).as_ptr(), len) };
        bytes
    }

    pub fn word(&mut self, offset: usize) -> u64 {
        // SAFETY: the word is aligned and lies inside the memory. The device may write it
        // concurrently, so it is loaded as an atomic.
        unsafe { std::sync::atomic::AtomicU64::from_ptr(self.at().add(offset).as_ptr().cast()) }
            .load(std::sync::atomic::Ordering::Acquire)
    }

    pub fn end<D: Device>(mut self, device: &mut D) {
        // SAFETY: no work is queued.
        unsafe { device.unpin(self.at()) }.unwrap();
    }
}

/// Returns bytes that depend on index and seed.
pub fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3] ^ seed).collect()
}

/// Waits for all work queued on a stream.
pub fn settle<D: Device>(device: &mut D, stream: u8) {
    let mark = device.mark(stream).unwrap();
    let end = soon();
    while !device.reached(mark).unwrap() {
        assert!(Instant::now() < end, "a mark is never reached");
    }
}

/// Allocates memory, runs the body, frees the memory, and checks that nothing stays open.
fn with<K: Kit>(size: u64, body: impl FnOnce(&mut K::Device, DevicePtr)) {
    let mut device = first::<K>();
    let base = device.alloc(size).unwrap();
    body(&mut device, base);
    for stream in 0..device.caps().streams {
        settle(&mut device, stream);
    }
    // SAFETY: all work has finished, and peers have closed the memory.
    unsafe { device.free(base) }.unwrap();
    assert_eq!(K::held(&device), 0);
}

pub fn devices_have_numbers<K: Kit>() {
    let caps = first::<K>().caps();
    assert!(caps.streams > 0 && caps.marks > 0 && caps.uuid != [0; 16], "{caps:?}");
    assert_eq!(caps.ordinal, 0);
    for wrong in [1000, u32::MAX] {
        match K::open(wrong) {
            Some(Ok(_)) => panic!("device {wrong} opened"),
            Some(Err(DeviceError::NoDevice(there))) => assert!(there >= 1),
            Some(Err(error)) => panic!("{error}"),
            None => {}
        }
    }
    assert!(first::<K>().reaches(&caps.uuid));
}

pub fn a_place_lies_in_an_allocation<K: Kit>() {
    with::<K>(3 << 20, |device, base| {
        let whole = device.allocation(base).unwrap();
        assert!(whole.base == base && whole.size >= 3 << 20, "{whole:?}");
        for offset in [1, 511, 1 << 20, (3 << 20) - 1] {
            assert_eq!(device.allocation(base.at(offset)).unwrap(), whole, "{offset}");
        }
        for nowhere in [DevicePtr(0), DevicePtr(8), DevicePtr(u64::MAX)] {
            assert_eq!(
                device.allocation(nowhere),
                Err(DeviceError::NotDeviceMemory),
                "{nowhere:?}"
            );
        }
        let other = device.alloc(4096).unwrap();
        assert_ne!(device.allocation(other).unwrap().buffer, whole.buffer);
        // SAFETY: nothing uses the memory.
        unsafe { device.free(other) }.unwrap();
    });
}

pub fn addresses_come_back_and_buffers_do_not<K: Kit>() {
    let mut device = first::<K>();
    let mut buffers = std::collections::HashSet::new();
    for _ in 0..20 {
        let base = device.alloc(2 << 20).unwrap();
        assert!(buffers.insert(device.allocation(base).unwrap().buffer), "a buffer id was reused");
        // SAFETY: nothing uses the memory.
        unsafe { device.free(base) }.unwrap();
    }
}

pub fn copies_arrive_whole<K: Kit>() {
    const LEN: usize = 5 << 20;
    with::<K>(2 * LEN as u64 + 4096, |device, base| {
        let (mut from, mut to) = (Pinned::new(device, LEN), Pinned::new(device, LEN));
        let streams = device.caps().streams;
        let behind = base.at(LEN as u64 + 16);
        let lens = [1, 7, 8, 63, 64, 4096, 4097, (1 << 20) + 3, LEN - 3];
        for (round, len) in lens.into_iter().enumerate() {
            let stream = round as u8 % streams;
            let sent = pattern(round as u8, len);
            from.fill(3, &sent);
            to.fill(1, &vec![0xEE; len + 2]);
            // SAFETY: all ranges are valid until the stream has finished.
            unsafe {
                device.copy(stream, base.at(5), from.seen.at(3), len as u64).unwrap();
                device.copy(stream, behind, base.at(5), len as u64).unwrap();
                device.copy(stream, to.seen.at(2), behind, len as u64).unwrap();
            }
            settle(device, stream);
            let found = to.read(1, len + 2);
            assert!(found[1..=len] == sent, "{len} bytes");
            assert_eq!((found[0], found[len + 1]), (0xEE, 0xEE), "beside {len} bytes");
        }
        from.end(device);
        to.end(device);
    });
}

pub fn a_stream_keeps_its_order<K: Kit>() {
    with::<K>(1 << 16, |device, base| {
        let (mut from, mut to) = (Pinned::new(device, 1 << 16), Pinned::new(device, 4096));
        for value in 0..=255 {
            from.fill(256 * usize::from(value), &[value; 256]);
        }
        for stream in 0..device.caps().streams {
            for value in 0..256 {
                // SAFETY: all ranges are valid until the stream has finished.
                unsafe { device.copy(stream, base, from.seen.at(256 * value), 256) }.unwrap();
            }
            // SAFETY: all ranges are valid until the stream has finished.
            unsafe { device.copy(stream, to.seen, base, 256) }.unwrap();
            settle(device, stream);
            assert_eq!(to.read(0, 256), [255; 256]);
            to.fill(0, &[0; 256]);
        }
        from.end(device);
        to.end(device);
    });
}

pub fn marks_run_out_and_are_reused<K: Kit>() {
    let mut device = first::<K>();
    let marks = device.caps().marks;
    if marks > 1000 {
        // A test cannot exhaust this many marks.
        settle(&mut device, 0);
        return;
    }
    for _ in 0..3 {
        let set: Vec<Mark> = (0..marks).map(|_| device.mark(0).unwrap()).collect();
        assert_eq!(device.mark(0), Err(DeviceError::Exhausted));
        for &mark in &set {
            while !device.reached(mark).unwrap() {}
        }
        let again = device.mark(0).unwrap();
        assert!(!set.contains(&again), "a freed mark is invalid");
        while !device.reached(again).unwrap() {}
    }
}

pub fn a_bell_rings_once_after_its_mark<K: Kit>() {
    with::<K>(1 << 20, |device, base| {
        let host = Pinned::new(device, 1 << 20);
        for round in 0..20 {
            let stream = round % device.caps().streams;
            let rung = Arc::new(AtomicU32::new(0));
            let counts = Arc::clone(&rung);
            let bell = Bell::new(move || _ = counts.fetch_add(1, Ordering::Release));
            // SAFETY: both ranges are valid until the stream has finished.
            unsafe { device.copy(stream, host.seen, base, 1 << 20).unwrap() };
            let (mark, end) = (device.mark(stream).unwrap(), soon());
            device.ring(stream, mark, &bell).unwrap();
            drop(bell);
            while rung.load(Ordering::Acquire) == 0 {
                assert!(Instant::now() < end, "the bell never rang");
                // Calls advance the time of a fake driver.
                device.allocation(base).unwrap();
            }
            assert_eq!(device.reached(mark), Ok(true), "rung before the end of the copy");
            settle(device, stream);
            assert_eq!(rung.load(Ordering::Acquire), 1);
            while Arc::strong_count(&rung) > 1 {
                assert!(Instant::now() < end, "a reference leaks");
            }
        }
        host.end(device);
    });
}

pub fn a_word_follows_what_it_tells_of<K: Kit>() {
    with::<K>(1 << 20, |device, base| {
        if !device.caps().write_word {
            return;
        }
        let mut host = Pinned::new(device, (1 << 20) + 4096);
        for round in 1..=20u64 {
            let sent = pattern(round as u8, 1 << 20);
            host.fill(4096, &sent);
            // SAFETY: all ranges are valid until the stream has finished.
            unsafe {
                device.copy(0, base, host.seen.at(4096), 1 << 20).unwrap();
                settle(device, 0);
                host.fill(4096, &[0; 1 << 20]);
                device.copy(0, host.seen.at(4096), base, 1 << 20).unwrap();
                device.write_word(0, host.seen.at(8), round).unwrap();
            }
            // Queries of this mark advance the time of a fake driver.
            let mark = device.mark(0).unwrap();
            let end = soon();
            let mut over = false;
            while host.word(8) != round {
                assert!(Instant::now() < end, "the word never came");
                over = over || device.reached(mark).unwrap();
            }
            assert!(host.read(4096, 1 << 20) == sent, "round {round}");
            while !over {
                over = device.reached(mark).unwrap();
            }
        }
        host.end(device);
    });
}

pub fn another_process_has_the_same_memory<K: Kit>() {
    const LEN: u64 = 3 << 20;
    with::<K>(LEN, |device, base| {
        let mut host = Pinned::new(device, LEN as usize);
        let allocation = device.allocation(base.at(12_345)).unwrap();
        let handle = device.export(&allocation).unwrap();
        let mut second = Second::start::<K>(&handle, allocation.size);
        assert_eq!(second.ask("open"), "ok");
        for (seed, offset, len) in
            [(1, 0, 100), (2, 12_345, 1 << 20), (3, (2 << 20) + 511, (1 << 20) - 511)]
        {
            host.fill(0, &pattern(seed, len));
            // SAFETY: all ranges are valid until the stream has finished.
            unsafe { device.copy(0, base.at(offset), host.seen, len as u64) }.unwrap();
            settle(device, 0);
            assert_eq!(second.ask(&format!("check {seed} {offset} {len}")), "good");
            assert_eq!(second.ask(&format!("write {} {offset} {len}", seed + 100)), "ok");
            // SAFETY: all ranges are valid until the stream has finished.
            unsafe { device.copy(0, host.seen, base.at(offset), len as u64) }.unwrap();
            settle(device, 0);
            assert!(host.read(0, len) == pattern(seed + 100, len), "{len} bytes at {offset}");
        }
        assert_eq!(second.ask("close"), "ok");
        // After a close the memory can be opened again.
        assert_eq!(second.ask("open"), "ok");
        assert_eq!(second.ask("check 103 2097663 1048065"), "good");
        assert_eq!(second.ask("close"), "ok");
        second.end();
        host.end(device);
    });
}

/// Size of a physical segment of [`Kit::segments`], in bytes.
pub const SEGMENT: u64 = 2 << 20;

/// Runs the body with memory in three physical segments, the driver's description of each segment,
/// and one handle for all segments.
fn in_segments<K: Kit>(body: impl FnOnce(&mut K::Device, DevicePtr, &[Allocation])) {
    let mut device = first::<K>();
    let Some(base) = K::segments(&mut device, 3 * SEGMENT) else { return };
    let parts = [0, 1, 2].map(|at| device.allocation(base.at(at * SEGMENT + 1000)).unwrap());
    body(&mut device, base, &parts);
    for stream in 0..device.caps().streams {
        settle(&mut device, stream);
    }
    // SAFETY: all work has finished, and peers have closed the memory.
    unsafe { device.free(base) }.unwrap();
    for part in parts {
        assert_eq!(device.allocation(part.base), Err(DeviceError::NotDeviceMemory));
    }
    assert_eq!(K::held(&device), 0);
}

pub fn segments_side_by_side_are_one_memory_to_another_process<K: Kit>() {
    in_segments::<K>(|device, base, parts| {
        for (at, part) in parts.iter().enumerate() {
            assert_eq!((part.base, part.size), (base.at(at as u64 * SEGMENT), SEGMENT));
            assert_eq!((part.reservation, part.share), (Some(base), Share::Descriptor));
            assert!(
                parts.iter().filter(|other| other.buffer == part.buffer).count() == 1,
                "{parts:?}"
            );
        }
        let mut export = |part: &Allocation| match device.export(part).unwrap() {
            Handle::Descriptor(fd) => (fd, part.size),
            other => panic!("{other:?}"),
        };
        let handle = Handle::Segments(parts.iter().map(&mut export).collect());
        let mut host = Pinned::new(device, 3 * SEGMENT as usize);
        let mut second = Second::start::<K>(&handle, 3 * SEGMENT);
        assert_eq!(second.ask("open"), "ok");
        let ranges = [
            (1, SEGMENT - 100, 200),
            (2, 1000, 4 << 20),
            (3, 5, (4 << 20) - 1),
            (4, 2 * SEGMENT - 1, 2),
        ];
        for (seed, offset, len) in ranges {
            host.fill(0, &pattern(seed, len));
            // SAFETY: all ranges are valid until the stream has finished.
            unsafe { device.copy(0, base.at(offset), host.seen, len as u64) }.unwrap();
            settle(device, 0);
            assert_eq!(second.ask(&format!("check {seed} {offset} {len}")), "good");
            assert_eq!(second.ask(&format!("write {} {offset} {len}", seed + 100)), "ok");
            // SAFETY: all ranges are valid until the stream has finished.
            unsafe { device.copy(0, host.seen, base.at(offset), len as u64) }.unwrap();
            settle(device, 0);
            assert!(host.read(0, len) == pattern(seed + 100, len), "{len} bytes at {offset}");
        }
        assert_eq!(second.ask("close"), "ok");
        // After a close the segments can be opened again.
        assert_eq!(second.ask("open"), "ok");
        assert_eq!(second.ask(&format!("check 104 {} 2", 2 * SEGMENT - 1)), "good");
        assert_eq!(second.ask("close"), "ok");
        second.end();
        host.end(device);
    });
}

pub fn a_range_over_segments_is_registered_as_one<K: Kit>() {
    let mut exports = Exports::new();
    let mut gone = None;
    in_segments::<K>(|device, base, parts| {
        let at = exports.register(device, base.at(SEGMENT - 64), 128).unwrap();
        let whole = exports.allocation(at.alloc).unwrap();
        assert_eq!((at.offset, whole.base, whole.size), (SEGMENT - 64, base, 2 * SEGMENT));
        let all = exports.register(device, base, 3 * SEGMENT).unwrap();
        assert_eq!(exports.allocation(all.alloc).unwrap().size, 3 * SEGMENT);
        let third = exports.register(device, parts[2].base.at(8), 8).unwrap();
        assert_eq!((third.alloc, third.offset), (all.alloc, 2 * SEGMENT + 8));
        let beyond = exports.register(device, base.at(8), 3 * SEGMENT);
        assert_eq!(beyond, Err(ExportError::BadRange { there: 3 * SEGMENT - 8 }));
        assert_eq!(exports.verify(device, all.alloc), Ok(()));
        gone = Some(all.alloc);
    });
    if let Some(alloc) = gone {
        assert_eq!(exports.verify(&mut first::<K>(), alloc), Err(ExportError::Unknown(alloc)));
    }
}

pub fn an_allocation_is_opened_once<K: Kit>() {
    with::<K>(2 << 20, |device, base| {
        let allocation = device.allocation(base).unwrap();
        let handle = device.export(&allocation).unwrap();
        let mut second = Second::start::<K>(&handle, allocation.size);
        assert_eq!(second.ask("open"), "ok");
        // A second open may be counted, map the memory again, or fail. It never closes the first
        // mapping.
        let again = second.ask("again");
        assert!(["refused", "same", "another"].contains(&again.as_str()), "{again}");
        assert_eq!(second.ask("write 9 100 1000"), "ok");
        assert_eq!(second.ask("check 9 100 1000"), "good");
        assert_eq!(second.ask("close"), "ok");
        second.end();
    });
}

pub fn garbage_does_not_open<K: Kit>() {
    let mut device = first::<K>();
    let mut bytes = [0; LEGACY_HANDLE];
    let mut handles = vec![];
    for seed in 0..8u8 {
        handles.push(Handle::Legacy(bytes));
        bytes.copy_from_slice(&pattern(seed, LEGACY_HANDLE));
    }
    handles.push(Handle::Descriptor(File::open("/dev/null").unwrap().into()));
    handles.push(Handle::Descriptor(File::open("/proc/self/exe").unwrap().into()));
    let null = || (File::open("/dev/null").unwrap().into(), 1 << 20);
    handles.push(Handle::Segments(vec![null(), null()]));
    handles.push(Handle::Segments(vec![]));
    for handle in handles {
        for size in [2 << 20, 0, u64::MAX] {
            // SAFETY: the open fails, so it returns no memory.
            match unsafe { device.open(&handle, size) } {
                Err(DeviceError::BadHandle | DeviceError::Exhausted | DeviceError::Driver(_)) => {}
                other => panic!("{handle:?} of {size} bytes: {other:?}"),
            }
        }
    }
    // The device still works.
    let base = device.alloc(4096).unwrap();
    settle(&mut device, 0);
    // SAFETY: nothing uses the memory.
    unsafe { device.free(base) }.unwrap();
    assert_eq!(K::held(&device), 0);
}

pub fn a_handle_of_this_process_does_not_open<K: Kit>() {
    with::<K>(2 << 20, |device, base| {
        let allocation = device.allocation(base).unwrap();
        let handle = device.export(&allocation).unwrap();
        // SAFETY: nothing uses the memory that the call may return.
        match unsafe { device.open(&handle, allocation.size) } {
            Err(DeviceError::SameProcess) => {}
            // A driver may map a descriptor from the same process a second time.
            Ok(again) if allocation.share == Share::Descriptor => {
                // SAFETY: no work is queued.
                unsafe { device.close(again) }.unwrap()
            }
            other => panic!("{other:?}"),
        }
    });
}

pub fn unexportable_memory_names_the_reason<K: Kit>() {
    let mut device = first::<K>();
    for (base, why) in K::unshared(&mut device) {
        let allocation = device.allocation(base).unwrap();
        assert_eq!(allocation.share, Share::Never(why));
        assert_eq!(device.export(&allocation).unwrap_err(), DeviceError::NotExportable(why));
        assert!(DeviceError::NotExportable(why).to_string().contains("cannot be exported"));
        // SAFETY: nothing uses the memory.
        unsafe { device.free(base) }.unwrap();
    }
    let host = Pinned::new(&mut device, 4096);
    match device.allocation(host.seen) {
        Ok(allocation) => assert_eq!(allocation.share, Share::Never(Unshared::Host)),
        // The device does not distinguish pinned host memory from other host memory.
        Err(error) => assert_eq!(error, DeviceError::NotDeviceMemory),
    }
    host.end(&mut device);
}

pub fn the_call_that_flushes_remote_writes_is_taken<K: Kit>() {
    // Without a NIC there are no writes to flush.
    with::<K>(4096, |device, _| assert_eq!(device.flush_remote_writes(), Ok(())));
}

pub fn only_what_is_pinned_is_seen_and_only_set_marks_are_known<K: Kit>() {
    with::<K>(4096, |device, _| {
        let mut host = Pinned::new(device, 4096);
        assert_eq!(
            device.host_view(host.seen.at(8), 4088),
            NonNull::new(host.at().as_ptr().wrapping_add(8))
        );
        assert_eq!(device.host_view(host.seen.at(8), 4089), None);
        // If a device has very many marks, unknown marks may count as reached.
        assert!(device.reached(Mark(u32::MAX)).is_err() || device.caps().marks > 1000);
        host.end(device);
    });
}
