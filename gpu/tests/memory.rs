//! Tests device memory between real processes, with host memory as the device: data, restarts, and
//! processes that are killed at any time.

use std::ffi::OsStr;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use fishplate_core::mem::Peer;
use fishplate_gpu::{
    AllocId, Device, DevicePtr, Fault, HostDevice, ImportError, ImportLimits, Imported,
    Registration, Sharing, Wanted,
};
use fishplate_shm::{Link, Listener, ShmConfig, connect};

mod support;
use support::*;

/// Size of the shared memory, in bytes: some pages more than 1 MiB.
const SIZE: u64 = (1 << 20) + 5 * 4096;

/// Returns words that depend on index and seed.
fn pattern(seed: u8, len: usize) -> Vec<u8> {
    let word =
        |i: u64| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ u64::from(seed) << 32).to_ne_bytes();
    (0..len as u64 / 8).flat_map(word).collect()
}

fn sizes() -> ShmConfig {
    ShmConfig { lane_cells: 64, max_message: 256, ..ShmConfig::default() }
}

/// One process: its device, and its link.
struct End {
    sharing: Sharing<HostDevice>,
    links: [Option<Link>; 1],
}

impl End {
    fn over(link: Link) -> Self {
        End {
            sharing: Sharing::new(HostDevice::new(), ImportLimits::default()),
            links: [Some(link)],
        }
    }

    fn connect(address: &OsStr) -> Self {
        Self::over(connect(address, &rail(sizes()).profile(), soon()).unwrap())
    }

    /// Allocates memory filled from a seed, and registers it from `offset` to its end.
    fn filled(&mut self, seed: u8, offset: u64) -> (DevicePtr, Registration) {
        // SAFETY: the call only allocates.
        let base = unsafe { self.sharing.device_mut() }.alloc(SIZE).unwrap();
        let at = self.sharing.device().host_view(base, SIZE).unwrap();
        let data = pattern(seed, SIZE as usize);
        // SAFETY: the range was just allocated, and no other code knows the address.
        unsafe { at.copy_from_nonoverlapping(NonNull::from(&data[..]).cast(), SIZE as usize) };
        let registered =
            self.sharing.register(&mut self.links[..], base.at(offset), SIZE - offset).unwrap();
        (base, registered)
    }

    fn publish(&mut self, buffer: u64, version: Option<u64>, at: &Registration) {
        self.sharing.publish(&mut self.links[..], PEER, buffer, version, at).unwrap();
    }

    fn prefetch(&mut self, buffer: u64) -> Result<Imported, ImportError> {
        let links = &mut self.links[..];
        self.sharing
            .prefetch(links, PEER, buffer, Wanted::Latest, soon())
            .map(|(_, imported)| imported)
    }

    /// Copies the peer's memory into memory of this process, like a transfer, and returns the
    /// bytes.
    fn read(&mut self, from: &Imported) -> Result<Vec<u8>, Fault> {
        self.sharing.imports_mut().begin(from.id)?;
        // SAFETY: the device copies into memory that this function allocates, from memory that
        // `begin` keeps open.
        let device = unsafe { self.sharing.device_mut() };
        let scratch = device.alloc(from.len).unwrap();
        // SAFETY: both ranges stay mapped until the end of the function.
        unsafe { device.copy(0, scratch, from.ptr, from.len) }.unwrap();
        let mark = device.mark(0).unwrap();
        assert!(device.reached(mark).unwrap());
        let mut bytes = vec![0u8; from.len as usize];
        let at = device.host_view(scratch, from.len).unwrap();
        // SAFETY: the range was just allocated, and no other code knows the address.
        unsafe { at.copy_to_nonoverlapping(NonNull::from(&mut bytes[..]).cast(), bytes.len()) };
        // SAFETY: no work is queued.
        unsafe { device.free(scratch) }.unwrap();
        self.sharing.imports_mut().end(from.id);
        Ok(bytes)
    }

    /// Serves the peer until it has exited.
    fn serve(&mut self) {
        while self.sharing.query(&mut self.links[..], PEER, u64::MAX, Wanted::Latest).is_ok() {
            self.sharing.sleep(&mut self.links[..], soon());
        }
    }
}

/// Runs in the child processes, and does nothing in the parent.
#[test]
fn child() {
    let Some((role, address)) = role() else { return };
    let mut end = End::connect(&address);
    let (role, seed) = role.split_once(' ').unwrap();
    let seed: u8 = seed.parse().unwrap();
    match role {
        // Publishes a buffer, then serves.
        "export" => {
            let (_, at) = end.filled(seed, 1000);
            end.publish(1, Some(1), &at);
            end.serve();
        }
        // Repeatedly publishes one buffer in new memory, and revokes the memory.
        "churn" => loop {
            let (base, at) = end.filled(seed, 0);
            end.publish(1, None, &at);
            let deadline = Instant::now() + Duration::from_secs(20);
            end.sharing.sleep(&mut end.links[..], Instant::now() + Duration::from_millis(1));
            if end.sharing.revoke_and_wait(&mut end.links[..], at.alloc, deadline).is_err() {
                return;
            }
            // SAFETY: no peer has the memory open any more.
            unsafe { end.sharing.device_mut().free(base) }.unwrap();
        },
        // Reads a buffer repeatedly.
        "import" => {
            let imported = end.prefetch(1).unwrap();
            let want = &pattern(seed, SIZE as usize)[1000..];
            while end
                .sharing
                .query(&mut end.links[..], PEER, 1, Wanted::Latest)
                .is_ok_and(|token| token.is_some())
            {
                match end.read(&imported) {
                    Ok(bytes) => assert!(bytes == want),
                    Err(fault) => assert_eq!(fault, Fault::Revoked),
                }
            }
        }
        _ => panic!("{role}"),
    }
}

/// Connects to a child with this role.
fn meet(role: &str) -> (Killed, End) {
    let rail = rail(sizes());
    let address = name();
    let listener = Listener::bind(&address).unwrap();
    let child = spawn(role, &address);
    let link = listener.accept(&rail.profile(), soon()).unwrap();
    (child, End::over(link))
}

#[test]
fn two_ends_share_memory() {
    let _alone = alone();
    let before = held();
    {
        let (child, mut end) = meet("export 3");
        let imported = end.prefetch(1).unwrap();
        assert_eq!(imported.len, SIZE - 1000);
        assert!(end.read(&imported).unwrap() == pattern(3, SIZE as usize)[1000..]);
        // If the range exceeds the allocation, the error names the peer and the allocation.
        let alloc = alloc_of(&mut end);
        let error =
            end.sharing.import(&mut end.links[..], PEER, alloc, SIZE - 8, 9, soon()).unwrap_err();
        let why = Fault::OutOfBounds { offset: SIZE - 8, len: 9, size: SIZE };
        assert_eq!(error, ImportError { peer: PEER, alloc: Some(alloc), why });
        let never = AllocId::from_key(1 << 40).unwrap();
        let error = end.sharing.import(&mut end.links[..], PEER, never, 0, 8, soon()).unwrap_err();
        assert_eq!(error.why, Fault::NotExported);
        assert!(end.read(&imported).unwrap() == pattern(3, SIZE as usize)[1000..]);
        end.links[0] = None;
        child.join();
        drop(end);
    }
    nothing_left(before, "both ends");
}

#[test]
fn a_buffer_published_before_the_first_pass_is_found() {
    let _alone = alone();
    let (_child, mut end) = meet("export 3");
    let link = end.links[0].as_mut().unwrap();
    let mut arrives =
        libc::pollfd { fd: link.line().fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: `arrives` is one local structure.
    assert_eq!(unsafe { libc::poll(&mut arrives, 1, 20_000) }, 1);
    assert_eq!(end.prefetch(1).unwrap().len, SIZE - 1000);
}

/// Returns the allocation that contains the peer's buffer.
fn alloc_of(end: &mut End) -> AllocId {
    let token = end.sharing.look_up(&mut end.links[..], PEER, 1, Wanted::Latest).unwrap();
    token.binding().alloc
}

#[test]
fn b11_a_restarted_peer_is_not_confused_with_its_earlier_incarnation() {
    let _alone = alone();
    let before = held();
    {
        let (child, mut end) = meet("export 1");
        let links = &mut end.links[..];
        let (old, was) = end.sharing.prefetch(links, PEER, 1, Wanted::Version(1), soon()).unwrap();
        drop(child);
        let rail = rail(sizes());
        let address = name();
        let listener = Listener::bind(&address).unwrap();
        let child = spawn("export 2", &address);
        end.links[0] = Some(listener.accept(&rail.profile(), soon()).unwrap());
        let links = &mut end.links[..];
        let (new, now) = end.sharing.prefetch(links, PEER, 1, Wanted::Version(1), soon()).unwrap();
        // Version, allocation id and range are the same as in the old process.
        assert_eq!(old.binding(), new.binding());
        let error = end.sharing.open_direct(&mut end.links[..], PEER, &old, soon()).unwrap_err();
        let alloc = Some(old.binding().alloc);
        assert_eq!(error, ImportError { peer: PEER, alloc, why: Fault::Incarnation });
        assert_eq!(end.read(&was), Err(Fault::Revoked));
        assert!(end.read(&now).unwrap() == pattern(2, SIZE as usize)[1000..]);
        assert_eq!(end.sharing.imports().mapped(), (1, SIZE));
        drop(child);
    }
    nothing_left(before, "both ends");
}

/// Returns the number of rounds of the long test: `FISHPLATE_STRESS`, or `usual`.
fn rounds(usual: u32) -> u32 {
    std::env::var("FISHPLATE_STRESS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(usual)
}

/// Kills a child. Checks that it has not exited before.
fn kill(mut child: Killed) {
    assert!(child.0.try_wait().unwrap().is_none(), "the child exited by itself");
}

#[test]
fn b20_killed_processes_leave_nothing() {
    let _alone = alone();
    // Other programs also have files in `/dev/shm`. So this counts only names that contain
    // `fishplate`, and mappings of this process.
    let names = || {
        let all = std::fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().file_name());
        all.filter(|name| name.to_string_lossy().contains("fishplate")).count()
    };
    let named = || std::fs::read_to_string("/proc/self/maps").unwrap().contains("/dev/shm");
    let seed: u64 = std::env::var("FISHPLATE_SEED")
        .map_or(std::process::id().into(), |seed| seed.parse().unwrap());
    println!("seed {seed}");
    let mut random = seed | 1;
    let mut below = move |n: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % n
    };
    let before = (held(), names());
    let (mut opens, mut closes, mut revoked) = (0, 0, 0);
    let rounds = rounds(30);
    for round in 0..rounds {
        let part = below(3);
        let (child, mut end) = meet(["export 5", "churn 5", "import 5"][part as usize]);
        let steps = below(6);
        if part == 2 {
            // Kills processes that have our memory open or are opening it. Afterwards no process
            // has it open.
            let (base, at) = end.filled(5, 1000);
            end.publish(1, None, &at);
            for _ in 0..steps {
                end.sharing.turn(&mut end.links[..]);
                end.sharing
                    .sleep(&mut end.links[..], Instant::now() + Duration::from_millis(below(5)));
            }
            kill(child);
            end.sharing.revoke_and_wait(&mut end.links[..], at.alloc, soon()).unwrap();
            assert!(end.sharing.exports().is_empty());
            // SAFETY: the processes that had the memory open are dead.
            unsafe { end.sharing.device_mut().free(base) }.unwrap();
            revoked += 1;
        } else {
            // Kills the process while this process opens its memory, has it open, or answers its
            // revocation.
            for _ in 0..steps {
                let Ok(imported) = end.prefetch(1) else { continue };
                match end.read(&imported) {
                    Ok(bytes) => {
                        assert!(bytes == pattern(5, SIZE as usize)[1000 * usize::from(part == 0)..])
                    }
                    Err(fault) => assert_eq!(fault, Fault::Revoked),
                }
                if below(2) == 0 {
                    end.sharing.release(imported.id);
                }
            }
            kill(child);
            // Stops when the death is detected.
            while end.sharing.query(&mut end.links[..], PEER, 2, Wanted::Latest).is_ok() {
                assert!(end.sharing.sleep(&mut end.links[..], soon()));
            }
            assert_eq!(end.sharing.imports().mapped(), (0, 0), "round {round}");
        }
        assert!(!named());
        let stats = end.sharing.imports().stats();
        assert_eq!((stats.opens, stats.close_errors), (stats.closes, 0), "round {round}");
        (opens, closes) = (opens + stats.opens, closes + stats.closes);
        drop(end);
        nothing_left(before.0, &format!("round {round}"));
    }
    assert_eq!(names(), before.1);
    assert!(opens > 0 && revoked > 0);
    println!(
        "{rounds} connections ended by a kill: {opens} opens, {closes} closes, {revoked} of ours \
         revoked"
    );
}

#[test]
fn b2_waiting_for_a_silent_peer_takes_little_processor_time() {
    let _alone = alone();
    let (child, mut end) = meet("export 1");
    let used = || {
        // SAFETY: `timespec` consists of integers, so zero bytes are a valid value.
        let mut time: libc::timespec = unsafe { std::mem::zeroed() };
        // SAFETY: `time` is a local structure of the type that the call fills.
        assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    let before = used();
    let deadline = Instant::now() + Duration::from_secs(2);
    let error =
        end.sharing.wait(&mut end.links[..], PEER, 77, Wanted::Latest, deadline).unwrap_err();
    assert_eq!(error, ImportError { peer: Peer(0), alloc: None, why: Fault::Deadline });
    assert!(Instant::now() >= deadline);
    let took = used() - before;
    // If the waiter did not sleep, it would use up to two seconds of processor time.
    assert!(took < Duration::from_millis(400), "{took:?}");
    drop(child);
}
