//! Random operations of two processes, compared with a model: registering, freeing, importing,
//! transferring, revoking and dying, in any order. Every allocation is filled with unique words, so
//! a read through a mapping shows which memory it reaches.

use std::collections::BTreeMap;

use super::*;
use crate::fake::Violation;

const LIMITS: ImportLimits = ImportLimits { mappings: 3, bytes: 24_000 };

/// An allocation that one side owns.
struct Own {
    base: DevicePtr,
    size: u64,
    /// The word that fills the allocation.
    word: u64,
    alloc: Option<AllocId>,
    registered: Vec<Registration>,
    revoking: bool,
    /// Whether a revocation was cancelled while some of its messages had not arrived yet.
    unsettled: bool,
}

/// An import from the peer.
struct Held {
    imported: Imported,
    alloc: AllocId,
    word: u64,
    /// Whether a cancelled revocation may have invalidated the import.
    doubtful: bool,
}

/// A copy in flight.
struct Flight {
    id: ImportId,
    mark: Mark,
    into: DevicePtr,
    word: u64,
}

struct Side {
    end: End<FakeDevice>,
    own: Vec<Own>,
    /// Every version that was ever published in this incarnation, with its location and contents.
    published: BTreeMap<(u64, u64), (Binding, u64)>,
    held: Vec<Held>,
    flights: Vec<Flight>,
}

struct Run {
    driver: FakeDriver,
    random: Random,
    sides: Vec<Side>,
    words: u64,
    /// Number of allocations that were freed without a revocation, possibly while open.
    behind: usize,
    /// Number of occurrences of each event.
    seen: BTreeMap<&'static str, u64>,
}

impl Side {
    fn new(driver: &FakeDriver) -> Self {
        let end = End::new(driver.process().device(0).unwrap(), LIMITS);
        Side { end, own: vec![], published: BTreeMap::new(), held: vec![], flights: vec![] }
    }

    /// Returns whether the allocation can be imported: no revocation is pending, and no message of
    /// a cancelled revocation is in flight.
    fn steady(&self, alloc: AllocId) -> bool {
        self.own.iter().any(|own| own.alloc == Some(alloc) && !own.revoking && !own.unsettled)
    }
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let kind = [MemoryKind::Legacy, MemoryKind::Virtual, MemoryKind::Segments][random.below(3)];
        let handles_differ = random.below(2) == 0;
        let behaviour =
            Behaviour { kind, handles_differ, granule: 4096, segment: 4096, ..Behaviour::LATE };
        let driver = FakeDriver::new(behaviour, seed);
        let mut sides = vec![Side::new(&driver), Side::new(&driver)];
        let [a, b] = &mut sides[..] else { unreachable!() };
        link(&mut a.end, 0, &mut b.end, 0);
        Run { driver, random, sides, words: 0, behind: 0, seen: BTreeMap::new() }
    }

    fn segments(&self) -> bool {
        self.driver.behaviour().kind == MemoryKind::Segments
    }

    /// Returns how many opens, closes or frees the driver counts for memory of this size.
    fn pieces(&self, pieces: u64, bytes: u64) -> u64 {
        if self.segments() { bytes / 4096 } else { pieces }
    }

    fn note(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    /// Allocates memory and fills it with a new word.
    fn fill(&mut self, s: usize, size: u64) -> (DevicePtr, u64) {
        self.words += 1;
        let base = self.sides[s].end.alloc(size);
        let word = self.words << 8 | s as u64;
        let bytes: Vec<u8> = (0..size / 8).flat_map(|_| word.to_ne_bytes()).collect();
        self.sides[s].end.process().poke(base, &bytes).unwrap();
        (base, word)
    }

    fn step(&mut self) {
        let s = self.random.below(2);
        match self.random.below(40) {
            0..4 => self.alloc(s),
            4..8 => self.register(s),
            8 => self.deregister(s),
            9..13 => self.publish(s),
            13..17 => self.look_up(s),
            17..20 => self.import(s),
            20..26 => self.begin(s),
            26..31 => self.finish(s, 1),
            31..33 => self.release(s),
            33..35 => self.revoke(s),
            35 => self.call_off(s),
            36..38 => self.sides[s].end.turn(),
            38 => self.settle(),
            _ => match self.random.below(8) {
                0 => self.kill(s),
                1 => self.free_behind(s),
                _ => self.sides[s].end.turn(),
            },
        }
        while self.free_revoked(0) || self.free_revoked(1) {}
        self.check();
    }

    fn alloc(&mut self, s: usize) {
        if self.sides[s].own.len() < 6 {
            let size = 4096 * (1 + self.random.below(3)) as u64;
            let (base, word) = self.fill(s, size);
            let own = Own {
                base,
                size,
                word,
                alloc: None,
                registered: vec![],
                revoking: false,
                unsettled: false,
            };
            self.sides[s].own.push(own);
        }
    }

    fn some_own(&mut self, s: usize) -> Option<usize> {
        let n = self.sides[s].own.len();
        (n > 0).then(|| self.random.below(n))
    }

    fn register(&mut self, s: usize) {
        let Some(i) = self.some_own(s) else { return };
        let size = self.sides[s].own[i].size;
        // With several segments, a range touches the first and the last segment, so that all
        // segments form one export.
        let edge = if self.segments() { 4096 } else { size };
        let offset = 8 * self.random.below(edge as usize / 8) as u64;
        let least = (size - edge).saturating_sub(offset) + 8;
        let len = least + 8 * self.random.below((size - offset - least) as usize / 8 + 1) as u64;
        let side = &mut self.sides[s];
        let own = &mut side.own[i];
        match side.end.register(own.base.at(offset), len) {
            Ok(at) => {
                assert!(!own.revoking && own.alloc.is_none_or(|alloc| alloc == at.alloc));
                assert_eq!((at.offset, at.len), (offset, len));
                own.alloc = Some(at.alloc);
                own.registered.push(at);
                self.note("registered");
            }
            Err(error) => {
                assert_eq!((error, own.revoking), (ExportError::Revoking(own.alloc.unwrap()), true))
            }
        }
    }

    fn deregister(&mut self, s: usize) {
        let Some(i) = self.some_own(s) else { return };
        let side = &mut self.sides[s];
        if let Some(at) = side.own[i].registered.pop() {
            assert!(side.end.sharing.deregister(&at));
        }
    }

    fn publish(&mut self, s: usize) {
        let Some(i) = self.some_own(s) else { return };
        let buffer = self.random.below(3) as u64;
        let side = &mut self.sides[s];
        let Some(&at) = side.own[i].registered.last() else { return };
        let (word, revoking) = (side.own[i].word, side.own[i].revoking);
        let result = side.end.sharing.publish(&mut side.end.links[..], PEER, buffer, None, &at);
        if revoking {
            assert_eq!(result, Err(TellError::Export(ExportError::Unknown(at.alloc))));
            return;
        }
        let binding = result.unwrap().binding;
        assert_eq!((binding.alloc, binding.offset, binding.len), (at.alloc, at.offset, at.len));
        let known = side.published.insert((buffer, binding.version), (binding, word));
        assert!(
            known.is_none_or(|known| known == (binding, word)),
            "a version has changed its meaning"
        );
        self.note("published");
    }

    /// Looks up a buffer of the peer, and opens it.
    fn look_up(&mut self, s: usize) {
        let buffer = self.random.below(3) as u64;
        let versions: Vec<_> =
            self.sides[1 - s].published.range((buffer, 0)..(buffer + 1, 0)).collect();
        let wanted = match self.random.below(2) {
            1 if !versions.is_empty() => {
                let back = self.random.below(versions.len().min(6));
                Wanted::Version(versions[versions.len() - 1 - back].0.1)
            }
            _ => Wanted::Latest,
        };
        match self.sides[s].end.query(PEER, buffer, wanted) {
            Ok(None) => {}
            Ok(Some(token)) => {
                let binding = token.binding();
                let (want, word) = self.sides[1 - s].published[&(buffer, binding.version)];
                assert_eq!(binding, want);
                assert!(
                    matches!(wanted, Wanted::Latest) || wanted == Wanted::Version(binding.version)
                );
                let at = Registration {
                    alloc: binding.alloc,
                    offset: binding.offset,
                    len: binding.len,
                    version: 0,
                };
                self.open(s, &at, word, Some(&token));
                self.note("looked up");
            }
            Err(error) => assert_eq!(error.why, Fault::Gone),
        }
    }

    /// Imports one of the peer's registrations, which may be revoked or being revoked.
    fn import(&mut self, s: usize) {
        let all: Vec<_> = self.sides[1 - s]
            .own
            .iter()
            .flat_map(|own| own.registered.iter().map(|at| (*at, own.word)))
            .collect();
        if !all.is_empty() {
            let (at, word) = all[self.random.below(all.len())];
            self.open(s, &at, word, None);
        }
    }

    fn open(&mut self, s: usize, at: &Registration, word: u64, token: Option<&DirectToken>) {
        let [a, b] = &mut self.sides[..] else { unreachable!() };
        let (side, peer) = if s == 0 { (a, b) } else { (b, a) };
        if side.held.len() > 12 {
            return;
        }
        let result = match token {
            // The peer makes no pass during this call, so its answer may be missing.
            Some(token) => {
                side.end.sharing.open_direct(&mut side.end.links[..], PEER, token, Instant::now())
            }
            None => import_from(&mut side.end, &mut peer.end, at),
        };
        let steady = peer.steady(at.alloc);
        match result {
            Ok(imported) => {
                assert_eq!(imported.len, at.len);
                side.held.push(Held { imported, alloc: at.alloc, word, doubtful: !steady });
                self.note("imported");
            }
            Err(ImportError { why: Fault::NotExported, .. }) => assert!(!steady, "it is exported"),
            Err(ImportError { why: Fault::Deadline, .. }) => assert!(token.is_some()),
            Err(ImportError { why: Fault::Full, .. }) => {
                // This fails only if memory in use leaves no room.
                let mut used: Vec<_> = side.held.iter().map(|held| held.alloc).collect();
                used.sort();
                used.dedup();
                let size = peer
                    .own
                    .iter()
                    .find(|own| own.alloc == Some(at.alloc))
                    .map_or(0, |own| own.size);
                let (open, bytes) = side.end.sharing.imports().mapped();
                assert!(open == LIMITS.mappings || bytes + size > LIMITS.bytes);
                assert!(used.len() + side.flights.len() > 0);
                self.note("full");
            }
            Err(ImportError { why: Fault::Busy, .. }) => self.note("busy"),
            Err(error) => panic!("{error}"),
        }
    }

    /// Starts a copy of one word.
    fn begin(&mut self, s: usize) {
        let n = self.sides[s].held.len();
        if n == 0 || self.sides[s].flights.len() > 8 {
            return;
        }
        let i = self.random.below(n);
        let Held { imported, alloc, word, doubtful } = self.sides[s].held[i];
        let place = 8 * self.random.below(imported.len as usize / 8) as u64;
        let steady = !doubtful && self.sides[1 - s].steady(alloc);
        let end = &mut self.sides[s].end;
        match end.sharing.imports_mut().begin(imported.id) {
            Ok(_) => {
                let device = end.sharing.driver();
                let into = device.alloc(8).unwrap();
                let stream = (word % 4) as u8;
                // SAFETY: both addresses are memory of the fake driver, which checks the copy.
                unsafe { device.copy(stream, into, imported.ptr.at(place), 8) }.unwrap();
                let mark = device.mark(stream).unwrap();
                self.sides[s].flights.push(Flight { id: imported.id, mark, into, word });
                self.note("begun");
            }
            Err(fault) => {
                assert_eq!(fault, Fault::Revoked);
                assert!(!steady, "memory in use was closed");
                self.note("refused");
            }
        }
    }

    /// Finishes up to `count` copies, and checks the copied words.
    fn finish(&mut self, s: usize, count: usize) {
        for _ in 0..count.min(self.sides[s].flights.len()) {
            let side = &mut self.sides[s];
            let Flight { id, mark, into, word } = side.flights.remove(0);
            let device = side.end.sharing.driver();
            while !device.reached(mark).unwrap() {}
            let found = device.process().peek(into, 8).unwrap();
            assert_eq!(
                u64::from_ne_bytes(found.try_into().unwrap()),
                word,
                "a stale mapping was used"
            );
            side.end.free(into);
            side.end.sharing.imports_mut().end(id);
        }
    }

    fn release(&mut self, s: usize) {
        let n = self.sides[s].held.len();
        if n > 0 {
            let i = self.random.below(n);
            let held = self.sides[s].held.swap_remove(i);
            self.sides[s].end.sharing.release(held.imported.id);
        }
    }

    fn revoke(&mut self, s: usize) {
        let Some(i) = self.some_own(s) else { return };
        let side = &mut self.sides[s];
        if let Some(alloc) = side.own[i].alloc {
            side.end.revoke(alloc).unwrap();
            side.own[i].revoking = true;
        }
    }

    fn call_off(&mut self, s: usize) {
        let Some(i) = self.some_own(s) else { return };
        let side = &mut self.sides[s];
        if let (Some(alloc), true) = (side.own[i].alloc, side.own[i].revoking) {
            side.end.sharing.call_off(alloc).unwrap();
            side.own[i].revoking = false;
            side.own[i].unsettled = true;
            for held in self.sides[1 - s].held.iter_mut().filter(|held| held.alloc == alloc) {
                held.doubtful = true;
            }
            self.note("cancelled");
        }
    }

    /// Frees memory that no peer has open any more. The driver checks that.
    fn free_revoked(&mut self, s: usize) -> bool {
        let side = &mut self.sides[s];
        let done = side.own.iter().position(|own| {
            own.revoking
                && own.alloc.is_some_and(|alloc| side.end.sharing.awaited(alloc).next().is_none())
        });
        if let Some(i) = done {
            let own = side.own.swap_remove(i);
            side.end.free(own.base);
            self.note("revoked and freed");
        }
        done.is_some()
    }

    /// Frees memory without a revocation, and allocates other memory, perhaps at the same address.
    fn free_behind(&mut self, s: usize) {
        let Some(i) = self.some_own(s) else { return };
        // Finishes copies in flight first, because no cache could protect them from the free.
        self.finish(1 - s, usize::MAX);
        let own = self.sides[s].own.swap_remove(i);
        if own.revoking || own.unsettled {
            return self.sides[s].own.push(own);
        }
        self.sides[s].end.free(own.base);
        self.behind += self.pieces(1, own.size) as usize;
        let (base, word) = self.fill(s, own.size);
        assert_eq!(base, own.base, "the driver reuses addresses");
        let side = &mut self.sides[s];
        let at = side.end.register(base, own.size).unwrap();
        assert_ne!(Some(at.alloc), own.alloc);
        side.own.push(Own { base, word, alloc: Some(at.alloc), registered: vec![at], ..own });
        self.note("freed behind");
        self.settle();
    }

    fn settle(&mut self) {
        let [a, b] = &mut self.sides[..] else { unreachable!() };
        settle(&mut a.end, &mut b.end);
        for own in self.sides.iter_mut().flat_map(|side| &mut side.own) {
            own.unsettled = false;
        }
    }

    /// Kills one side in any state, and restarts it.
    fn kill(&mut self, s: usize) {
        let mut fresh = Side::new(&self.driver);
        std::mem::swap(&mut self.sides[s], &mut fresh);
        fresh.end.process().kill();
        drop(fresh);
        self.sides[1 - s].end.turn();
        self.finish(1 - s, usize::MAX);
        self.sides[1 - s].end.turn();
        let peer = &mut self.sides[1 - s];
        assert_eq!(peer.end.sharing.imports().mapped(), (0, 0));
        for held in std::mem::take(&mut peer.held) {
            assert_eq!(peer.end.sharing.imports_mut().begin(held.imported.id), Err(Fault::Revoked));
            peer.end.sharing.release(held.imported.id);
        }
        let [a, b] = &mut self.sides[..] else { unreachable!() };
        link(&mut a.end, 0, &mut b.end, 0);
        self.note("killed");
    }

    fn check(&mut self) {
        for side in &mut self.sides {
            assert!(side.end.line(Peer(0)).ended().is_none());
        }
        for (s, side) in self.sides.iter().enumerate() {
            let counts = side.end.process().counts();
            let (open, bytes) = side.end.sharing.imports().mapped();
            assert_eq!(counts.opens - counts.closes, self.pieces(open as u64, bytes));
            assert!(open <= LIMITS.mappings && bytes <= LIMITS.bytes);
            for held in &side.held {
                let steady = !held.doubtful && self.sides[1 - s].steady(held.alloc);
                let is_open = side.end.sharing.imports().is_open(held.imported.id);
                assert!(is_open || !steady, "memory in use was closed");
            }
        }
        let violations = self.driver.violations();
        assert!(
            violations.iter().all(|violation| *violation == Violation::FreedWhileOpen),
            "{violations:?}"
        );
        assert!(violations.len() <= self.behind, "{} of {}", violations.len(), self.behind);
    }
}

#[test]
fn random_histories_use_no_stale_mapping_and_close_every_open() {
    let number = |name: &str| std::env::var(name).ok().and_then(|number| number.parse().ok());
    let seeds = number("FISHPLATE_SEEDS").unwrap_or(60);
    let first = number("FISHPLATE_SEED").unwrap_or(u64::from(std::process::id()) << 16 | 1);
    println!("{seeds} seeds from {first} (FISHPLATE_SEED, FISHPLATE_SEEDS)");
    let mut seen = BTreeMap::new();
    for seed in first..first + seeds {
        println!("seed {seed}");
        let mut run = Run::new(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        for _ in 0..400 {
            run.step();
        }
        for (what, times) in std::mem::take(&mut run.seen) {
            *seen.entry(what).or_insert(0) += times;
        }
        for s in 0..2 {
            run.finish(s, usize::MAX);
            *seen.entry("evicted").or_insert(0) +=
                run.sides[s].end.sharing.imports().stats().evictions;
        }
        run.settle();
        let driver = run.driver.clone();
        drop(run);
        let counts = driver.counts();
        assert_eq!(counts.opens, counts.closes + counts.closed_by_death);
        assert_eq!(counts.orphans_touched, 0);
    }
    println!("{seen:?}");
    let all = [
        "evicted",
        "cancelled",
        "freed behind",
        "full",
        "killed",
        "looked up",
        "refused",
        "revoked and freed",
    ];
    for what in all {
        assert!(seeds < 30 || seen.get(what).is_some_and(|times| *times > 0), "never: {what}");
    }
}
