//! Makes the sockets of a completion queue close-on-exec. Slow path: makes system calls.
//!
//! libfabric's `tcp` opens sockets without `SOCK_CLOEXEC`. A program that this process starts would
//! inherit the connections. If this process then died, its peers would count it as alive.
//!
//! The provider adds its connections to an `epoll(7)` set within the set of its completion queue,
//! and the kernel lists the members of a set. So no other socket of this process is touched.

use alloc::format;
use alloc::vec::Vec;
use core::ffi::c_int;
use core::mem::MaybeUninit;

/// Maximum depth of sets within sets. `tcp` has two levels.
const LEVELS: u32 = 3;

/// Makes all sockets in an `epoll(7)` set close-on-exec. Returns whether one of them was not. Does
/// nothing without `/proc`.
///
/// The caller owns the rail, so no socket in the set is closed meanwhile: `tcp` has a thread of its
/// own only for queues that threads do not wait for through a descriptor.
pub(super) fn close_on_exec(set: c_int) -> bool {
    close_within(set, LEVELS)
}

fn close_within(set: c_int, levels: u32) -> bool {
    let mut found = false;
    for (descriptor, inode) in read_info(set).split(|&byte| byte == b'\n').filter_map(member) {
        match kind(descriptor, inode) {
            Some(libc::S_IFSOCK) => found |= mark(descriptor),
            // Sets have no kind.
            Some(0) if levels > 1 => found |= close_within(descriptor, levels - 1),
            _ => {}
        }
    }
    found
}

/// Marks a descriptor close-on-exec. Returns whether it was not.
pub(super) fn mark(descriptor: c_int) -> bool {
    // SAFETY: the calls access no memory.
    unsafe {
        let flags = libc::fcntl(descriptor, libc::F_GETFD);
        flags >= 0
            && flags & libc::FD_CLOEXEC == 0
            && libc::fcntl(descriptor, libc::F_SETFD, flags | libc::FD_CLOEXEC) == 0
    }
}

/// Returns the descriptor and the inode in a line such as
/// `tfd: 13 events: 19 data: 55d5d8336d30 pos:0 ino:82b1 sdev:9`.
fn member(line: &[u8]) -> Option<(c_int, u64)> {
    let line = core::str::from_utf8(line).ok()?.strip_prefix("tfd:")?;
    let mut words = line.split_ascii_whitespace();
    let descriptor = words.next()?.parse().ok()?;
    let inode = words.find_map(|word| word.strip_prefix("ino:"))?;
    Some((descriptor, u64::from_str_radix(inode, 16).ok()?))
}

/// Returns the kind of an open file, or `None` if the descriptor belongs to another file: a set
/// names members by the descriptors with which they were added.
fn kind(descriptor: c_int, inode: u64) -> Option<libc::mode_t> {
    let mut stat = MaybeUninit::uninit();
    // SAFETY: `stat` has room for the result, which a successful call initializes.
    let stat = unsafe {
        if libc::fstat(descriptor, stat.as_mut_ptr()) != 0 {
            return None;
        }
        stat.assume_init()
    };
    (stat.st_ino == inode).then_some(stat.st_mode & libc::S_IFMT)
}

/// Returns what the kernel tells about a descriptor of this process. Empty after an error.
fn read_info(descriptor: c_int) -> Vec<u8> {
    let path = format!("/proc/self/fdinfo/{descriptor}\0");
    let mut bytes = Vec::new();
    // SAFETY: the path ends with a zero byte. Each read writes at most the spare capacity, and the
    // length covers only what was read. The descriptor is closed once.
    unsafe {
        let file = libc::open(path.as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC);
        if file < 0 {
            return bytes;
        }
        loop {
            bytes.reserve(4096);
            let room = bytes.spare_capacity_mut();
            let read = libc::read(file, room.as_mut_ptr().cast(), room.len());
            if read <= 0 {
                break;
            }
            bytes.set_len(bytes.len() + read as usize);
        }
        libc::close(file);
    }
    bytes
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::net::UdpSocket;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::{vec, vec::Vec};

    use super::{c_int, close_on_exec};

    fn set() -> OwnedFd {
        // SAFETY: the call returns a new descriptor.
        unsafe { OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC)) }
    }

    fn add(set: &OwnedFd, descriptor: c_int) {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        // SAFETY: the call only reads `event`.
        let added = unsafe {
            let set = set.as_raw_fd();
            libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, descriptor, &mut event)
        };
        assert_eq!(added, 0);
    }

    fn inherited(socket: &impl AsRawFd) -> bool {
        // SAFETY: the call accesses no memory.
        let flags = unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_GETFD) };
        flags & libc::FD_CLOEXEC == 0
    }

    /// Returns sockets that programs inherit.
    fn sockets(count: usize) -> Vec<UdpSocket> {
        let open = |_| {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            // SAFETY: the call accesses no memory.
            unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETFD, 0) };
            socket
        };
        (0..count).map(open).collect()
    }

    #[test]
    fn the_sockets_in_a_set_and_in_sets_within_it_become_close_on_exec() {
        let (outer, inner, sockets) = (set(), set(), sockets(100));
        assert!(!close_on_exec(outer.as_raw_fd()));
        add(&outer, inner.as_raw_fd());
        add(&outer, sockets[0].as_raw_fd());
        sockets[2..].iter().for_each(|socket| add(&inner, socket.as_raw_fd()));
        assert!(close_on_exec(outer.as_raw_fd()));
        let left: Vec<_> = (0..100).filter(|&n| inherited(&sockets[n])).collect();
        assert_eq!(left, vec![1], "the socket in no set");
        assert!(!close_on_exec(outer.as_raw_fd()), "nothing is left");
    }

    #[test]
    fn a_socket_with_the_number_of_a_former_member_stays_as_it_is() {
        let (set, sockets) = (set(), sockets(2));
        let (member, stranger) = (sockets[0].as_raw_fd(), sockets[1].as_raw_fd());
        add(&set, member);
        // The duplicate keeps the member in the set.
        let _kept = sockets[0].try_clone().unwrap();
        // SAFETY: `sockets` owns both descriptors.
        assert_eq!(unsafe { libc::dup3(stranger, member, 0) }, member);
        assert!(!close_on_exec(set.as_raw_fd()));
        assert!(inherited(&sockets[0]));
    }

    #[test]
    fn a_descriptor_that_is_no_set_has_no_members() {
        assert!(!close_on_exec(-1));
        let sockets = sockets(1);
        assert!(!close_on_exec(sockets[0].as_raw_fd()));
        assert!(inherited(&sockets[0]));
    }
}
