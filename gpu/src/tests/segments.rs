//! Tests virtual memory of several physical segments. One export covers a range, and the importer
//! maps it at adjacent addresses. Pools grow, lose segments and are revoked.

use std::ops::Range;
use std::sync::Arc;

use super::*;
use crate::fake::Violation;

/// Size of a segment, in bytes.
const EACH: u64 = 1 << 16;

const SEGMENTS: Behaviour =
    Behaviour { kind: MemoryKind::Segments, segment: EACH, ..Behaviour::PLAIN };

/// A reserved range with memory mapped in a part of it, like a growing pool.
struct Pool {
    base: DevicePtr,
    /// The byte that fills the segment at each index, or `None` if no segment is mapped.
    words: Vec<Option<u8>>,
    next: u8,
}

impl Pool {
    /// Reserves room for `places` segments, and maps the first `mapped`.
    fn new(of: &mut End<FakeDevice>, places: usize, mapped: usize) -> Pool {
        let base = of.process().reserve(places as u64 * EACH);
        let mut pool = Pool { base, words: vec![None; places], next: 1 };
        (0..mapped).for_each(|place| pool.map(of, place));
        pool
    }

    fn at(&self, place: usize) -> DevicePtr {
        self.base.at(place as u64 * EACH)
    }

    /// Maps a new segment, filled with a new byte.
    fn map(&mut self, of: &mut End<FakeDevice>, place: usize) {
        let memory = of.process().create(0, MemoryKind::Virtual, EACH).unwrap();
        of.process().map(0, self.at(place), EACH, &memory).unwrap();
        of.process().poke(self.at(place), &[self.next; EACH as usize]).unwrap();
        self.words[place] = Some(self.next);
        self.next = self.next.wrapping_add(1).max(1);
    }

    fn unmap(&mut self, of: &mut End<FakeDevice>, place: usize) {
        of.free(self.at(place));
        self.words[place] = None;
    }

    /// Registers whole segments.
    fn register(
        &self,
        of: &mut End<FakeDevice>,
        places: Range<usize>,
    ) -> Result<Registration, ExportError> {
        of.register(self.at(places.start), places.len() as u64 * EACH)
    }
}

/// Returns the byte that fills each segment of an import. Checks it at both ends of the segment.
fn words(b: &mut End<FakeDevice>, there: &Imported) -> Vec<u8> {
    let bytes = b.read(there, there.len).unwrap();
    let one = |segment: &[u8]| {
        assert_eq!(segment.first(), segment.last());
        segment[0]
    };
    bytes.chunks(EACH as usize).map(one).collect()
}

#[test]
fn a_range_over_segments_is_one_export_and_one_mapping() {
    let (driver, mut a, mut b) = pair(SEGMENTS);
    let size = 5 * EACH + 4096;
    let base = a.alloc(size);
    let data = Random(3 | 1 << 40).bytes(size as usize);
    a.process().poke(base, &data).unwrap();
    // The range extends from the middle of the second segment to the middle of the fourth.
    let (from, len) = (EACH + 1000, 2 * EACH);
    let at = a.register(base.at(from), len).unwrap();
    assert_eq!((at.offset, at.len), (1000, len));
    let whole = a.sharing.exports().allocation(at.alloc).unwrap();
    assert_eq!((whole.base, whole.size), (base.at(EACH), 3 * EACH));
    assert_eq!(a.process().counts().calls[Call::Export], 3);
    a.publish(PEER, 1, &at);
    let (_, there) = b.sharing.prefetch(&mut b.links[..], PEER, 1, Wanted::Latest, soon()).unwrap();
    let wanted = &data[from as usize..(from + len) as usize];
    assert!(b.read(&there, len).unwrap() == wanted);
    assert_eq!(b.sharing.imports().mapped(), (1, 3 * EACH));
    // Writes arrive, even across segment boundaries.
    let token = b.sharing.imports_mut().begin(there.id).unwrap();
    assert_eq!(there.ptr.0 - token.0, 1000);
    b.process().poke(there.ptr.at(EACH - 1004), b"over the edge").unwrap();
    assert_eq!(a.process().peek(base.at(2 * EACH - 4), 13).unwrap(), b"over the edge");
    b.sharing.imports_mut().end(there.id);
    // Registrations of parts share the export, at the owner and at the importer.
    let part = a.register(base.at(2 * EACH), EACH + 1).unwrap();
    assert_eq!((part.alloc, part.offset), (at.alloc, EACH));
    import_from(&mut b, &mut a, &part).unwrap();
    assert_eq!((a.process().counts().calls[Call::Export], opened(b.process())), (3, (3, 0)));
    assert_eq!(a.sharing.exports().find(base.at(2 * EACH), EACH), Some((at.alloc, EACH)));
    assert_eq!(a.sharing.verify(&mut a.links[..], &at), Ok(()));
    // The revocation closes all segments at once.
    a.revoke(at.alloc).unwrap();
    settle(&mut a, &mut b);
    assert_eq!(a.sharing.awaited(at.alloc).count(), 0);
    assert_eq!(opened(b.process()), (3, 3));
    a.free(base);
    assert_eq!(b.read(&there, 1), Err(Fault::Revoked));
    assert_eq!((driver.violations(), driver.counts().held()), (vec![], 0));
}

#[test]
fn memory_that_grows_keeps_its_registrations_and_drops_the_shorter_export() {
    let (driver, mut a, mut b) = pair(SEGMENTS);
    let mut pool = Pool::new(&mut a, 4, 2);
    let short = pool.register(&mut a, 0..2).unwrap();
    let beyond = pool.register(&mut a, 0..3);
    assert_eq!(beyond, Err(ExportError::BadRange { there: 2 * EACH }), "not mapped yet");
    let old = import_from(&mut b, &mut a, &short).unwrap();
    pool.map(&mut a, 2);
    let long = pool.register(&mut a, 0..3).unwrap();
    assert_ne!(long.alloc, short.alloc);
    // The earlier registration stays valid.
    let new = import_from(&mut b, &mut a, &long).unwrap();
    assert!(a.sharing.exports().holds(&short));
    assert_eq!((words(&mut b, &old), words(&mut b, &new)), (vec![1, 2], vec![1, 2, 3]));
    assert_eq!(
        pool.register(&mut a, 0..2).unwrap(),
        short,
        "the same range is the same registration"
    );
    assert!(a.sharing.deregister(&short) && a.sharing.exports().holds(&short));
    assert_eq!(opened(b.process()), (5, 0));
    // The shorter export ends with its last registration.
    assert!(a.sharing.deregister(&short));
    settle(&mut a, &mut b);
    assert_eq!(opened(b.process()), (5, 2));
    assert_eq!(b.read(&old, 1), Err(Fault::Revoked));
    assert_eq!(words(&mut b, &new), [1, 2, 3]);
    assert_eq!((a.sharing.exports().len(), a.sharing.stats().0.outgrown), (1, 1));
    // Later registrations of that range belong to the longer export.
    let within = pool.register(&mut a, 0..2).unwrap();
    assert_eq!((within.alloc, within.offset), (long.alloc, 0));
    // An export without registrations ends as soon as a longer one exists.
    assert!(a.sharing.deregister(&within) && a.sharing.deregister(&long));
    assert_eq!(a.sharing.exports().len(), 1);
    pool.map(&mut a, 3);
    let all = pool.register(&mut a, 0..4).unwrap();
    settle(&mut a, &mut b);
    assert_eq!(opened(b.process()), (5, 5));
    assert_eq!((a.sharing.exports().len(), a.sharing.stats().0.outgrown), (1, 2));
    let there = import_from(&mut b, &mut a, &all).unwrap();
    assert_eq!(words(&mut b, &there), [1, 2, 3, 4]);
    settle(&mut a, &mut b);
    assert_eq!(driver.violations(), []);
}

#[test]
fn a_segment_remapped_in_the_middle_is_new_memory() {
    let (driver, mut a, mut b) = pair(SEGMENTS);
    let mut pool = Pool::new(&mut a, 4, 4);
    let old = pool.register(&mut a, 0..3).unwrap();
    let beside = pool.register(&mut a, 2..4).unwrap();
    let was = import_from(&mut b, &mut a, &old).unwrap();
    let also = import_from(&mut b, &mut a, &beside).unwrap();
    pool.unmap(&mut a, 1);
    let hole = pool.register(&mut a, 0..3);
    assert_eq!(hole, Err(ExportError::BadRange { there: EACH }));
    assert_eq!(
        pool.register(&mut a, 1..2),
        Err(ExportError::Device(DeviceError::NotDeviceMemory)),
        "reserved, not mapped"
    );
    // Maps other memory at the same address without a revocation.
    pool.map(&mut a, 1);
    let new = pool.register(&mut a, 0..3).unwrap();
    assert_ne!(new.alloc, old.alloc);
    assert!(!a.sharing.exports().holds(&old));
    assert!(a.sharing.exports().holds(&beside), "it does not contain that segment");
    settle(&mut a, &mut b);
    assert_eq!(opened(b.process()), (5, 3));
    assert_eq!(b.read(&was, 1), Err(Fault::Revoked));
    assert_eq!(words(&mut b, &also), [3, 4]);
    let there = import_from(&mut b, &mut a, &new).unwrap();
    assert_eq!(words(&mut b, &there), [1, 5, 3]);
    // `verify` detects a lost segment before another registration does. Tries an unmapped segment
    // and a replaced segment.
    for place in [1, 2] {
        let at = pool.register(&mut a, 0..3).unwrap();
        pool.unmap(&mut a, place);
        let gone = Err(ExportError::Unknown(at.alloc));
        assert_eq!(a.sharing.verify(&mut a.links[..], &at), gone, "{place}");
        pool.map(&mut a, place);
    }
    // If an export has lost a segment, its other parts are not handed out either.
    let at = pool.register(&mut a, 0..3).unwrap();
    pool.unmap(&mut a, 2);
    let first = pool.register(&mut a, 0..1).unwrap();
    assert_ne!(first.alloc, at.alloc);
    let there = import_from(&mut b, &mut a, &first).unwrap();
    assert_eq!(words(&mut b, &there), [1]);
    settle(&mut a, &mut b);
    let stats = a.sharing.stats().0;
    assert_eq!((stats.superseded, stats.outgrown), (5, 0));
    assert!(driver.violations().iter().all(|what| *what == Violation::FreedWhileOpen));
}

#[test]
fn too_many_segments_are_refused_with_the_size_that_fits() {
    let (driver, mut a, _b) = pair(Behaviour { granule: 4096, ..SEGMENTS });
    driver.behave(|behaviour| behaviour.segment = 4096);
    let most = MAX_SEGMENTS as u64 * 4096;
    let base = a.alloc(most + 4096);
    let there = most - 100;
    let error = a.register(base.at(100), most).unwrap_err();
    assert_eq!(error, ExportError::Segments { max: MAX_SEGMENTS, there });
    assert!(error.to_string().contains("one export holds at most 253"), "{error}");
    assert_eq!(a.process().counts().calls[Call::Export], 0);
    // Registers the range in parts, as the error suggests.
    let first = a.register(base.at(100), there).unwrap();
    let second = a.register(base.at(100 + there), 200).unwrap();
    assert_ne!(first.alloc, second.alloc);
    assert_eq!(a.process().counts().calls[Call::Export], MAX_SEGMENTS as u64 + 1);
}

#[test]
fn an_open_that_fails_halfway_leaves_nothing_open_or_reserved() {
    for skip in 0..3 {
        let (driver, mut a, mut b) = pair(SEGMENTS);
        let base = a.alloc(3 * EACH);
        let at = a.register(base, 3 * EACH).unwrap();
        b.process().fail(Call::Open, skip, DeviceError::Exhausted);
        let error = import_from(&mut b, &mut a, &at).unwrap_err();
        assert_eq!(error.why, Fault::Device(DeviceError::Exhausted));
        let counts = b.process().counts();
        assert_eq!((counts.opens, counts.closes, counts.held()), (skip, skip, 0));
        // The next attempt succeeds.
        import_from(&mut b, &mut a, &at).unwrap();
        assert_eq!(b.process().counts().held(), 4);
        assert_eq!(driver.violations(), []);
    }
}

#[test]
fn an_unexportable_segment_is_refused_and_no_descriptor_is_kept() {
    let (_, mut a, _b) = pair(SEGMENTS);
    let base = a.process().reserve(3 * EACH);
    let kinds = [MemoryKind::Virtual, MemoryKind::Virtual, MemoryKind::VirtualUnshared];
    let memory = kinds.map(|kind| a.process().create(0, kind, EACH).unwrap());
    for (place, memory) in memory.iter().enumerate() {
        a.process().map(0, base.at(place as u64 * EACH), EACH, memory).unwrap();
    }
    let fd = memory[0].export().unwrap();
    let before = copies(fd.as_fd());
    let why = DeviceError::NotExportable(Unshared::NoHandleType);
    assert_eq!(a.register(base, 3 * EACH), Err(ExportError::Device(why)));
    assert_eq!(copies(fd.as_fd()), before);
    a.process().fail(Call::Export, 1, DeviceError::Exhausted);
    // The first segment's export succeeds, and the second segment's export fails. The next attempt
    // exports both segments.
    assert!(a.register(base, 2 * EACH).is_ok());
    assert_eq!(copies(fd.as_fd()), before + 1);
    assert_eq!(a.process().counts().calls[Call::Export], 2 + 2 + 2);
}

#[test]
fn neighbours_in_two_reservations_are_separate_memory() {
    let (driver, mut a, _b) = pair(SEGMENTS);
    let base = a.process().reserve(2 * EACH);
    a.process().release(base, 2 * EACH).unwrap();
    for at in [base, base.at(EACH)] {
        a.process().reserve_at(at, EACH).unwrap();
        let memory = a.process().create(0, MemoryKind::Virtual, EACH).unwrap();
        a.process().map(0, at, EACH, &memory).unwrap();
    }
    assert_eq!(a.register(base.at(8), EACH), Err(ExportError::BadRange { there: EACH - 8 }));
    let [one, two] = [base.at(8), base.at(EACH)].map(|at| a.register(at, EACH - 8).unwrap());
    assert_ne!(one.alloc, two.alloc);
    assert_eq!(driver.violations(), []);
}

#[test]
fn announced_segments_are_checked_against_the_opened_memory() {
    let (driver, mut a, mut b) = pair(SEGMENTS);
    let base = a.alloc(3 * EACH);
    let at = a.register(base, 3 * EACH).unwrap();
    let (size, handle) = a.sharing.exports().handle(at.alloc).unwrap();
    let uuid = a.sharing.device().caps().uuid;
    let Handle::Segments(segments) = &*handle else { panic!("not segments") };
    let again = |sizes: &[u64]| {
        let fds = segments.iter().map(|(fd, _)| fd.try_clone().unwrap());
        Arc::new(Handle::Segments(fds.zip(sizes.iter().copied()).collect()))
    };
    let (half, double) = (EACH / 2, EACH * 2);
    for (n, sizes) in [[half, EACH + half, EACH], [double, half, half], [EACH, double - 4096, 4096]]
        .iter()
        .enumerate()
    {
        assert_eq!(sizes.iter().sum::<u64>(), size);
        let (alloc, wrong) = (AllocId::from_key(1000 + n as u64).unwrap(), again(sizes));
        a.line(PEER).tell(wire::export(alloc, size, &uuid, Some(&wrong)), Some(wrong));
        b.turn();
        let error = b.import(PEER, alloc, 0, size).unwrap_err();
        assert!(
            matches!(error.why, Fault::Size { .. } | Fault::Device(DeviceError::BadHandle)),
            "{error}"
        );
        assert_eq!(b.process().counts().held(), 0);
    }
    assert_eq!(driver.violations(), []);
}

#[test]
fn a_peer_that_dies_with_open_segments_leaves_nothing() {
    let (driver, mut a, mut b) = pair(SEGMENTS);
    let [ours, theirs] = [a.alloc(3 * EACH), b.alloc(2 * EACH)];
    let [at, from] = [a.register(ours, 3 * EACH).unwrap(), b.register(theirs, 2 * EACH).unwrap()];
    let imported = import_from(&mut a, &mut b, &from).unwrap();
    import_from(&mut b, &mut a, &at).unwrap();
    a.revoke(at.alloc).unwrap();
    assert_eq!(a.sharing.awaited(at.alloc).count(), 1);
    b.process().kill();
    drop(b);
    a.turn();
    assert_eq!(a.sharing.awaited(at.alloc).count(), 0);
    a.free(ours);
    assert_eq!(a.sharing.imports_mut().begin(imported.id), Err(Fault::Revoked));
    a.turn();
    let counts = driver.counts();
    assert_eq!((driver.violations(), counts.held(), counts.orphans_touched), (vec![], 0, 0));
}

/// Registers, grows, unmaps and reads at random, and compares the results with a model.
struct Walk {
    pool: Pool,
    random: Random,
    /// The registrations, each with the bytes that filled its segments at registration.
    live: Vec<(Registration, Range<usize>, Vec<u8>)>,
}

const PLACES: usize = 7;

impl Walk {
    fn range(&mut self) -> Range<usize> {
        let start = self.random.below(PLACES);
        start..start + 1 + self.random.below(PLACES - start)
    }

    fn step(&mut self, a: &mut End<FakeDevice>, b: &mut End<FakeDevice>) {
        match self.random.below(8) {
            0..4 => {
                let range = self.range();
                let there: Vec<u8> =
                    self.pool.words[range.clone()].iter().map_while(|word| *word).collect();
                match self.pool.register(a, range.clone()) {
                    Ok(at) => {
                        assert_eq!(there.len(), range.len());
                        self.live.push((at, range, there));
                    }
                    Err(ExportError::Device(DeviceError::NotDeviceMemory)) => {
                        assert_eq!(there.len(), 0)
                    }
                    Err(ExportError::BadRange { there: bytes }) => {
                        assert!(bytes == there.len() as u64 * EACH && there.len() < range.len());
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            4 if !self.live.is_empty() => {
                let (at, ..) = self.live.swap_remove(self.random.below(self.live.len()));
                assert!(a.sharing.deregister(&at));
            }
            5 => {
                let place = self.random.below(PLACES);
                if self.pool.words[place].is_some() {
                    self.pool.unmap(a, place);
                }
                if self.random.below(3) > 0 {
                    self.pool.map(a, place);
                } else {
                    self.pool.words[place] = None;
                }
                // Verifies each registration, as callers must if they do not control when memory is
                // freed.
                self.live.retain(|(at, range, words)| {
                    let now: Vec<u8> =
                        self.pool.words[range.clone()].iter().map_while(|word| *word).collect();
                    let known = a.sharing.verify(&mut a.links[..], at);
                    // The registration may also fail because a longer export around it has lost
                    // another segment.
                    assert!(known.is_err() || now == *words, "{at:?}");
                    known.is_ok()
                });
            }
            6 => settle(a, b),
            _ if !self.live.is_empty() => {
                let (at, range, there) = self.live[self.random.below(self.live.len())].clone();
                assert!(a.sharing.exports().holds(&at));
                let imported = import_from(b, a, &at).unwrap();
                assert_eq!(words(b, &imported), there, "{range:?}");
                b.sharing.release(imported.id);
            }
            _ => {}
        }
    }
}

#[test]
fn random_growth_and_cuts_keep_registrations_correct_and_close_every_open() {
    for seed in 1..60 {
        let (driver, mut a, mut b) = pair(Behaviour { late: 3, ..SEGMENTS });
        let pool = Pool::new(&mut a, PLACES, 3);
        let mut walk = Walk { pool, random: Random(seed * 77 + 1), live: vec![] };
        (0..80).for_each(|_| walk.step(&mut a, &mut b));
        for (at, ..) in walk.live.drain(..) {
            assert!(a.sharing.deregister(&at));
        }
        settle(&mut a, &mut b);
        // Without registrations, no remaining export lies inside another.
        let left = a.sharing.exports().idle(100);
        let spans: Vec<_> =
            left.iter().map(|alloc| a.sharing.exports().allocation(*alloc).unwrap()).collect();
        let inside = |x: &Allocation, y: &Allocation| {
            x.base >= y.base && x.base.at(x.size) <= y.base.at(y.size) && x != y
        };
        assert!(
            !spans.iter().any(|x| spans.iter().any(|y| inside(x, y))),
            "seed {seed}: {spans:?}"
        );
        for alloc in left {
            a.revoke(alloc).unwrap();
        }
        settle(&mut a, &mut b);
        assert!(a.sharing.exports().is_empty(), "seed {seed}");
        assert_eq!(b.process().counts().held(), 0, "seed {seed}");
        assert!(driver.violations().iter().all(|what| *what == Violation::FreedWhileOpen));
    }
}
