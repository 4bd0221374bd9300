//! The memory side, over the fake driver and over the host's memory: processes of a fake machine in
//! one real one, with real sockets between them.

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
use super::share::board;
use super::*;
use crate::testing::{Random, met, soon};

/// Short enough to wait for in vain.
fn at_once() -> Instant {
    Instant::now() + Duration::from_millis(20)
}

/// One process: its device, and its links, by the number of the peer.
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

    fn fetch(&mut self, peer: Peer, buffer: u64, wanted: Wanted) -> Result<Option<DirectToken>, ImportError> {
        self.sharing.fetch(&mut self.links[..], peer, buffer, wanted)
    }

    fn import(&mut self, peer: Peer, alloc: AllocId, offset: u64, len: u64) -> Result<Imported, ImportError> {
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

    /// Gives memory back, whoever has it open.
    fn free(&mut self, base: DevicePtr) {
        // SAFETY: of the fake, which looks at what is done with freed memory.
        unsafe { self.sharing.driver().free(base) }.unwrap();
    }

    /// What is in imported memory, as the device finds it.
    fn read(&mut self, imported: &Imported, len: u64) -> Result<Vec<u8>, Fault> {
        let at = self.sharing.imports_mut().begin(imported.id)?;
        let from = DevicePtr(at.0 + (imported.ptr.0 - at.0));
        let device = self.sharing.driver();
        let scratch = device.alloc(len).unwrap();
        // SAFETY: both are there until the copy has ended, which is waited for.
        unsafe { device.copy(0, scratch, from, len) }.unwrap();
        let mark = device.mark(0).unwrap();
        while !device.reached(mark).unwrap() {}
        let bytes = device.process().peek(scratch, len as usize).unwrap();
        // SAFETY: nothing is queued.
        unsafe { device.free(scratch) }.unwrap();
        self.sharing.imports_mut().end(imported.id);
        Ok(bytes)
    }
}

/// Links two ends: peer number `j` of the one is the other, which has the one as its number `i`.
fn link<D: Device, E: Device>(a: &mut End<D>, j: u16, b: &mut End<E>, i: u16) {
    let config = ShmConfig { lane_cells: 64, max_message: 256, ..ShmConfig::default() };
    let [one, two] = met(config).map(|mut link| {
        board(&mut link.line()).home = false;
        Some(link)
    });
    a.links[usize::from(j)] = one;
    b.links[usize::from(i)] = two;
}

/// The other end, for either of a [`pair`].
const PEER: Peer = Peer(0);

/// Two processes of a fake machine, each with the first device.
fn pair(behaviour: Behaviour) -> (FakeDriver, End<FakeDevice>, End<FakeDevice>) {
    let driver = FakeDriver::new(behaviour, 7);
    let end = || End::new(driver.process().device(0).unwrap(), ImportLimits::default());
    let (mut a, mut b) = (end(), end());
    link(&mut a, 0, &mut b, 0);
    (driver, a, b)
}

/// Lets both say what they have to say.
fn settle<D: Device, E: Device>(a: &mut End<D>, b: &mut End<E>) {
    for _ in 0..4 {
        a.turn();
        b.turn();
    }
}

/// Imports from a peer that has to answer first.
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

/// Opened and closed by a process so far.
fn opened(process: &FakeProcess) -> (u64, u64) {
    let counts = process.counts();
    (counts.opens, counts.closes)
}

/// A file that no other test has.
fn junk() -> OwnedFd {
    // SAFETY: the name is a C string; the descriptor is new and ours.
    let fd = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"junk".as_ptr(), libc::MFD_CLOEXEC)) };
    // SAFETY: a call on our descriptor with plain numbers.
    assert_eq!(unsafe { libc::ftruncate(fd.as_raw_fd(), 1 << 16) }, 0);
    fd
}

/// Descriptors of the same file in this real process. Other tests run beside, with their own.
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
