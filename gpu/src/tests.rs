//! Tests of exports, imports and publications, with the fake driver and with host memory. Simulated
//! processes in one real process are connected by real sockets.

mod bugs;
mod host;
mod hostile;
mod model;
mod revoking;
mod rows;
mod segments;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use fishplate_core::mem::Peer;
use fishplate_shm::extension::Line;
use fishplate_shm::{Link, ShmConfig};

use super::fake::{Behaviour, Call, FakeDevice, FakeDriver, FakeProcess, MemoryKind};
use super::share::record;
use super::*;
use crate::testing::{Random, met, soon};

/// Returns a deadline that expires soon.
fn at_once() -> Instant {
    Instant::now() + Duration::from_millis(20)
}

/// One process: its device, and its links, indexed by peer number.
struct End<D: Device> {
    sharing: Sharing<D>,
    links: Vec<Option<Link>>,
}

impl<D: Device> End<D> {
    fn new(device: D, limits: ImportLimits) -> Self {
        End { sharing: Sharing::new(device, limits), links: (0..4).map(|_| None).collect() }
    }

    fn turn(&mut self) {
        self.sharing.turn(&mut self.links[..]);
    }

    fn line(&mut self, peer: Peer) -> Line<'_> {
        self.links[usize::from(peer.0)].as_mut().unwrap().line()
    }

    fn register(&mut self, ptr: DevicePtr, len: u64) -> Result<Registration, ExportError> {
        self.sharing.register(&mut self.links[..], ptr, len)
    }

    fn publish(&mut self, peer: Peer, buffer: u64, at: &Registration) -> Published {
        self.sharing.publish(&mut self.links[..], peer, buffer, None, at).unwrap()
    }

    fn query(
        &mut self,
        peer: Peer,
        buffer: u64,
        wanted: Wanted,
    ) -> Result<Option<DirectToken>, ImportError> {
        self.sharing.query(&mut self.links[..], peer, buffer, wanted)
    }

    fn import(
        &mut self,
        peer: Peer,
        alloc: AllocId,
        offset: u64,
        len: u64,
    ) -> Result<Imported, ImportError> {
        self.sharing.import(&mut self.links[..], peer, alloc, offset, len, at_once())
    }

    fn open(&mut self, peer: Peer, token: &DirectToken) -> Result<Imported, ImportError> {
        self.sharing.open_direct(&mut self.links[..], peer, token, at_once())
    }

    fn revoke(&mut self, alloc: AllocId) -> Result<(), ExportError> {
        self.sharing.revoke(&mut self.links[..], alloc)
    }
}

impl End<FakeDevice> {
    fn process(&self) -> &FakeProcess {
        self.sharing.device().process()
    }

    fn alloc(&mut self, size: u64) -> DevicePtr {
        self.sharing.driver().alloc(size).unwrap()
    }

    /// Frees memory, even if peers have it open.
    fn free(&mut self, base: DevicePtr) {
        // SAFETY: the fake driver detects accesses to freed memory without undefined behaviour.
        unsafe { self.sharing.driver().free(base) }.unwrap();
    }

    /// Reads imported memory through the device.
    fn read(&mut self, imported: &Imported, len: u64) -> Result<Vec<u8>, Fault> {
        let at = self.sharing.imports_mut().begin(imported.id)?;
        let from = DevicePtr(at.0 + (imported.ptr.0 - at.0));
        let device = self.sharing.driver();
        let scratch = device.alloc(len).unwrap();
        // SAFETY: both ranges are valid until the copy has finished, which the loop below waits
        // for.
        unsafe { device.copy(0, scratch, from, len) }.unwrap();
        let mark = device.mark(0).unwrap();
        while !device.reached(mark).unwrap() {}
        let bytes = device.process().peek(scratch, len as usize).unwrap();
        // SAFETY: no work is queued.
        unsafe { device.free(scratch) }.unwrap();
        self.sharing.imports_mut().end(imported.id);
        Ok(bytes)
    }
}

/// Links two ends: `b` becomes peer `j` of `a`, and `a` becomes peer `i` of `b`.
fn link<D: Device, E: Device>(a: &mut End<D>, j: u16, b: &mut End<E>, i: u16) {
    let config = ShmConfig { lane_cells: 64, max_message: 256, ..ShmConfig::default() };
    let [one, two] = met(config).map(|mut link| {
        record(&mut link.line()).home = false;
        Some(link)
    });
    a.links[usize::from(j)] = one;
    b.links[usize::from(i)] = two;
}

/// The peer number that each end of a [`pair`] gives the other end.
const PEER: Peer = Peer(0);

/// Creates two linked processes of a fake machine, each with the first device.
fn pair(behaviour: Behaviour) -> (FakeDriver, End<FakeDevice>, End<FakeDevice>) {
    let driver = FakeDriver::new(behaviour, 7);
    let end = || End::new(driver.process().device(0).unwrap(), ImportLimits::default());
    let (mut a, mut b) = (end(), end());
    link(&mut a, 0, &mut b, 0);
    (driver, a, b)
}

/// Makes enough passes of both ends to deliver all messages.
fn settle<D: Device, E: Device>(a: &mut End<D>, b: &mut End<E>) {
    for _ in 0..4 {
        a.turn();
        b.turn();
    }
}

/// Imports from a peer. Both ends make passes, because the import may need the peer's answer.
fn import_from<D: Device, E: Device>(
    b: &mut End<D>,
    a: &mut End<E>,
    at: &Registration,
) -> Result<Imported, ImportError> {
    for _ in 0..4 {
        let Registration { alloc, offset, len, .. } = *at;
        if let Some(imported) = b.sharing.try_import(&mut b.links[..], PEER, alloc, offset, len)? {
            return Ok(imported);
        }
        a.turn();
    }
    panic!("no answer");
}

/// Returns the numbers of opens and closes of a process so far.
fn opened(process: &FakeProcess) -> (u64, u64) {
    let counts = process.counts();
    (counts.opens, counts.closes)
}

/// Creates a file that is not device memory.
fn junk() -> OwnedFd {
    // SAFETY: the name is a C string literal. `memfd_create` returned this new descriptor, so
    // nothing else owns it.
    let fd =
        unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"junk".as_ptr(), libc::MFD_CLOEXEC)) };
    // SAFETY: the call takes no pointers, and the descriptor is ours.
    assert_eq!(unsafe { libc::ftruncate(fd.as_raw_fd(), 1 << 16) }, 0);
    fd
}

/// Counts the descriptors of the same file in this real process. Concurrent tests use other files.
fn copies(of: BorrowedFd<'_>) -> usize {
    use std::os::unix::fs::MetadataExt;
    let identity = |number: &std::ffi::OsStr| {
        let file = std::fs::metadata(std::path::Path::new("/proc/self/fd").join(number)).ok()?;
        Some((file.dev(), file.ino()))
    };
    let this = identity(of.as_raw_fd().to_string().as_ref());
    assert!(this.is_some());
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    all.filter(|entry| identity(&entry.as_ref().unwrap().file_name()) == this).count()
}
