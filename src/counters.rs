//! Publishes the counters of a node that was opened with
//! [`Builder::counters`](crate::node::Builder::counters). Other processes of the same user can read
//! them while the program runs, as `fishplate stat` does.
//!
//! Each such node has a page of counters. The page is a memfd of 4096 bytes named [`NAME`], so it
//! disappears with its node. Readers find it in `/proc/PID/fd`. It consists of 64-bit words in
//! native byte order:
//!
//! | word | what |
//! |---|---|
//! | 0 | [`MAGIC`] |
//! | 1 | a count that is odd while the page changes |
//! | 2 | the process id in its own namespace |
//! | 3 | the node: 0 for the first of the process |
//! | 4 | when the page was written, in nanoseconds of `CLOCK_MONOTONIC` |
//! | 5 | number of counters, from word 8 on |
//! | 6 | number of counters of each rail |
//! | 8.. | the counters, in the order of [`NAMES`] |
//! | 128 + 24 r.. | the counters of rail r, in the order of [`RailStats::NAMES`] |
//!
//! Later versions may add counters at the end of each list. The node copies its counters to the
//! page outside its hot paths, at most once per [`INTERVAL`]. A copy makes no system call.

use std::array::from_fn;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fishplate_core::engine::{RailStats, Stats};
use fishplate_core::mem::RailId;
use fishplate_core::sync::sequence;
use fishplate_sys::Errno;

use crate::config::RAILS_LIMIT;

/// The name of the memfd.
pub const NAME: &str = "fishplate-counters";

/// The version of the layout of a page.
pub const VERSION: u8 = 1;

/// The first word of a page: "FPstat" and the version of the layout.
pub const MAGIC: u64 = magic(VERSION);

const fn magic(version: u8) -> u64 {
    u64::from_le_bytes(*b"FPstat\0\0") | (version as u64) << 56
}

/// Minimum time between two copies of the counters to the page.
pub const INTERVAL: Duration = Duration::from_millis(10);

/// Names of the counters, in the order of the page. The last two are gauges.
pub const NAMES: [&str; 15] = [
    "posted",
    "arrived",
    "arrivals_out_of_order",
    "duplicates",
    "stale",
    "applied",
    "acks_alone",
    "refused",
    "failed",
    "rails_failed",
    "reposted",
    "replied_again",
    "passes",
    "peers",
    "rails",
];

/// Maximum number of pages read per process. Without a limit, a process could forge so many that
/// reading them takes minutes.
const PAGES_MAX: usize = 1024;

/// Number of gauges. The other counters never decrease.
pub const GAUGES: usize = 2;

const BYTES: usize = 4096;
const FIRST: usize = 8;
const RAILS_FIRST: usize = 128;
const RAIL_WORDS: usize = 24;
const _: () = assert!(RAILS_FIRST + RAILS_LIMIT * RAIL_WORDS <= BYTES / 8);

static NODES: AtomicU64 = AtomicU64::new(0);

type Words = [AtomicU64; BYTES / 8];

pub(crate) struct Page {
    words: NonNull<Words>,
    _fd: OwnedFd,
    published_ns: u64,
}

// SAFETY: this value alone owns the mapping, and accesses it only by atomics.
unsafe impl Send for Page {}

impl Page {
    pub fn create() -> Result<Page, Errno> {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name is a C string. A descriptor that the call returns is new, so nothing
        // else owns it.
        let fd = unsafe {
            match libc::memfd_create(c"fishplate-counters".as_ptr(), flags) {
                -1 => return Err(Errno::last()),
                fd => OwnedFd::from_raw_fd(fd),
            }
        };
        let (access, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: the descriptor is open. The mapping is new and as long as the file.
        let at = unsafe {
            if libc::ftruncate(fd.as_raw_fd(), BYTES as libc::off_t) != 0 {
                return Err(Errno::last());
            }
            libc::mmap(std::ptr::null_mut(), BYTES, access, shared, fd.as_raw_fd(), 0)
        };
        if at == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        // Because of the seals, other processes can only read the page. If sealing fails, they can
        // also change the page, but no other memory.
        // SAFETY: the descriptor is open, and the call takes no pointers.
        unsafe {
            let seals = libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_FUTURE_WRITE;
            libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals);
        }
        let words = NonNull::new(at.cast::<Words>()).ok_or(Errno::ENOMEM)?;
        let page = Page { words, _fd: fd, published_ns: 0 };
        let node = NODES.fetch_add(1, Ordering::Relaxed);
        let (count, each) = (NAMES.len() as u64, RailStats::NAMES.len() as u64);
        for (at, value) in
            [(2, std::process::id().into()), (3, node), (5, count), (6, each), (0, MAGIC)]
        {
            page.words()[at].store(value, Ordering::Relaxed);
        }
        Ok(page)
    }

    fn words(&self) -> &Words {
        // SAFETY: the mapping lives as long as this value and is aligned to a page. All bytes are
        // valid words.
        unsafe { self.words.as_ref() }
    }

    /// `rail` returns the counters of a rail, or `None` if there is no such rail.
    pub fn publish(
        &mut self,
        now_ns: u64,
        stats: impl FnOnce() -> (Stats, [u64; GAUGES]),
        rail: impl Fn(RailId) -> Option<RailStats>,
    ) {
        if now_ns.saturating_sub(self.published_ns) < INTERVAL.as_nanos() as u64 {
            return;
        }
        self.published_ns = now_ns;
        let (stats, gauges) = stats();
        let values = in_order(&stats, gauges);
        let words = self.words();
        sequence::change(&words[1], || {
            words[4].store(now_ns, Ordering::Relaxed);
            words[FIRST..]
                .iter()
                .zip(values)
                .for_each(|(word, value)| word.store(value, Ordering::Relaxed));
            let rails = (0..RAILS_LIMIT as u8).map_while(|id| rail(RailId(id)));
            for (words, stats) in words[RAILS_FIRST..].chunks_exact(RAIL_WORDS).zip(rails) {
                words
                    .iter()
                    .zip(stats.values())
                    .for_each(|(word, value)| word.store(value, Ordering::Relaxed));
            }
        });
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: `create` made the mapping with this length, and no reference to it is left.
        unsafe { libc::munmap(self.words.as_ptr().cast(), BYTES) };
    }
}

fn in_order(s: &Stats, [peers, rails]: [u64; GAUGES]) -> [u64; NAMES.len()] {
    [
        s.posted,
        s.arrived,
        s.arrivals_out_of_order,
        s.duplicates,
        s.stale,
        s.applied,
        s.acks_alone,
        s.refused,
        s.failed,
        s.rails_failed,
        s.reposted,
        s.replied_again,
        s.passes,
        peers,
        rails,
    ]
}

/// The counters of one node at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The process id in the reader's namespace.
    pub pid: u32,
    /// The node: 0 for the first of its process.
    pub node: u64,
    /// Time of the last write to the page, in nanoseconds of `CLOCK_MONOTONIC`. 0 if it was never
    /// written.
    pub written_ns: u64,
    /// The counters, in the order of [`NAMES`].
    pub values: [u64; NAMES.len()],
    /// The counters of each rail, in the order of [`RailStats::NAMES`]. The last of the counters
    /// is the number of rails. Rail 0 is shared memory.
    pub rails: [[u64; RailStats::NAMES.len()]; RAILS_LIMIT],
}

/// Reads the pages of a process, in the order of its nodes, at most 1024. Makes system calls, but
/// does not disturb that process.
///
/// # Errors
/// There is no such process, or this process may not inspect it. [`io::ErrorKind::Unsupported`] if
/// all its pages have another layout version.
pub fn read(pid: u32) -> io::Result<Vec<Snapshot>> {
    let own = own_number(pid);
    let (mut found, mut other): (Vec<Snapshot>, _) = (vec![], None);
    for path in linked(format!("/proc/{pid}/fd"))? {
        let Ok(file) = open(&path) else { continue };
        match snapshot(&file, pid) {
            // A forked process also has its parent's pages.
            Some(Ok((owner, snapshot)))
                if own.is_none_or(|own| owner == own)
                    && found.iter().all(|known| known.node != snapshot.node) =>
            {
                found.push(snapshot);
            }
            Some(Err(version)) => other = Some(version),
            _ => {}
        }
    }
    if let (Some(version), []) = (other, &found[..]) {
        let error =
            format!("they have layout version {version}, but this build reads version {VERSION}");
        return Err(io::Error::new(io::ErrorKind::Unsupported, error));
    }
    found.sort_by_key(|snapshot| snapshot.node);
    Ok(found)
}

/// Lists the descriptors in a folder that are named as pages.
fn linked(folder: impl AsRef<Path>) -> io::Result<impl Iterator<Item = PathBuf>> {
    let target = format!("/memfd:{NAME} (deleted)");
    let paths = fs::read_dir(folder)?.flatten().map(|entry| entry.path());
    let is_page = move |path: &PathBuf| {
        fs::read_link(path).is_ok_and(|link| link.as_os_str() == target.as_str())
    };
    Ok(paths.filter(is_page).take(PAGES_MAX))
}

/// The process may have replaced the file since its link was read, even by a pipe. The flags keep
/// the call from waiting for a writer, and from getting a controlling terminal.
fn open(path: &Path) -> io::Result<File> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

/// Reads the pages of all processes that this process may inspect.
pub fn read_all() -> Vec<Snapshot> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids: Vec<u32> =
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    pids.into_iter().filter_map(|pid| read(pid).ok()).flatten().collect()
}

/// Returns the process's id in its own namespace.
fn own_number(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_whitespace().last()?.parse().ok()
}

/// Reads a page. Returns the id of its owner and its counters, or `None` if the file is not a page,
/// or changed during every attempt. Fails with the layout version if it is another one.
fn snapshot(file: &File, pid: u32) -> Option<Result<(u64, Snapshot), u8>> {
    for _ in 0..100 {
        let count = || {
            let mut count = [0; 8];
            file.read_exact_at(&mut count, 8).ok().map(|()| u64::from_ne_bytes(count))
        };
        let page = || {
            let mut page = [0; BYTES];
            file.read_exact_at(&mut page, 0).ok().map(|()| page)
        };
        let Some(page) = sequence::read(count, page)? else { continue };
        let word =
            |at: usize| u64::from_ne_bytes(page[at * 8..at * 8 + 8].try_into().expect("8 bytes"));
        let version = (word(0) >> 56) as u8;
        if word(0) != magic(version) {
            return None;
        }
        if version != VERSION {
            return Some(Err(version));
        }
        let if_there = |at, count, first| if at < count as usize { word(first + at) } else { 0 };
        let values = from_fn(|at| if_there(at, word(5), FIRST));
        let rails =
            from_fn(|rail| from_fn(|at| if_there(at, word(6), RAILS_FIRST + rail * RAIL_WORDS)));
        let (node, written_ns) = (word(3), word(4));
        return Some(Ok((word(2), Snapshot { pid, node, written_ns, values, rails })));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_in_place_of_a_page_is_skipped_without_a_wait() {
        let path = std::env::temp_dir().join(format!("fishplate-pipe-{}", std::process::id()));
        let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: the name is a C string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let pipe = open(&path);
        fs::remove_file(&path).unwrap();
        assert_eq!(snapshot(&pipe.unwrap(), 1), None);
    }

    #[test]
    fn at_most_1024_pages_are_listed() {
        let folder = std::env::temp_dir().join(format!("fishplate-pages-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        for n in 0..PAGES_MAX + 10 {
            let name = ["/memfd:fishplate-counters (deleted)", "/memfd:other (deleted)"][n % 2];
            std::os::unix::fs::symlink(name, folder.join(n.to_string())).unwrap();
        }
        let half = linked(&folder).unwrap().count();
        for n in 0..PAGES_MAX {
            let page = folder.join(format!("page-{n}"));
            std::os::unix::fs::symlink("/memfd:fishplate-counters (deleted)", page).unwrap();
        }
        let most = linked(&folder).unwrap().count();
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!((half, most), (PAGES_MAX / 2 + 5, PAGES_MAX));
    }

    fn rail_of(n: u64) -> RailStats {
        let mut stats = RailStats::default();
        (stats.failed, stats.resumed_max_ns) = (n, n);
        stats
    }

    #[test]
    fn a_page_is_read_while_it_changes_and_never_half() {
        let mut page = Page::create().unwrap();
        let node = page.words()[3].load(Ordering::Relaxed);
        let mine = || read(std::process::id()).unwrap().into_iter().find(|one| one.node == node);
        assert_eq!(mine().unwrap().written_ns, 0);
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for n in 1..=200_000u64 {
                    let stats = Stats { posted: n, arrived: n, passes: n, ..Stats::default() };
                    let rail = |id: RailId| (id.0 < 16).then(|| rail_of(n + u64::from(id.0)));
                    page.publish(n * INTERVAL.as_nanos() as u64, || (stats, [n, n]), rail);
                }
                done.store(true, Ordering::Relaxed);
            });
            let mut before = 0;
            while !done.load(Ordering::Relaxed) {
                // A page that changes constantly may be unreadable at the moment.
                let Some(now) = mine() else { continue };
                let [posted, arrived, .., passes, peers, rails] = now.values;
                assert_eq!([arrived, passes, peers, rails], [posted; 4]);
                assert_eq!(now.written_ns, posted * INTERVAL.as_nanos() as u64);
                for (rail, values) in (posted..).zip(now.rails) {
                    assert_eq!(values, rail_of(if posted == 0 { 0 } else { rail }).values());
                }
                assert!(posted >= before);
                before = posted;
            }
            // The scope would join the thread too, but ThreadSanitizer does not see that.
            writer.join().unwrap();
        });
        assert_eq!(mine().unwrap().values[0], 200_000);
        let soon = 200_001 * INTERVAL.as_nanos() as u64 - 1;
        page.publish(soon, || panic!("a moment after the last"), |_| None);
        drop(page);
        assert_eq!(mine(), None);
    }
}
