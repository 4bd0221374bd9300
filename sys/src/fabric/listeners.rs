//! Prepares the listening socket of a provider over TCP: it becomes close-on-exec, as
//! [`sockets`] explains, and it waits only briefly for a client.
//!
//! The tcp provider accepts connections while it makes progress. It receives each connection's
//! request from a blocking socket, in two parts. A client that sends only the first part would
//! block the caller for ever. Accepted sockets inherit the receive timeout of their listener. The
//! timeout has no effect on the non-blocking sockets that the provider uses after the request.

use core::ffi::CStr;
use core::mem;

use super::sockets;

/// The shortest timeout. The kernel rounds it up to one of its ticks.
static TIMEOUT: libc::timeval = libc::timeval { tv_sec: 0, tv_usec: 1 };

/// Prepares the sockets of this process that listen at `address`, an encoded socket address: makes
/// them close-on-exec, and sets their receive timeout. Does nothing without `/proc`. Slow path:
/// makes a system call for each open descriptor.
pub(super) fn prepare(address: &[u8]) {
    for descriptor in Descriptors::open() {
        if listens_at(descriptor, address) {
            sockets::mark(descriptor);
            let (value, len) = ((&raw const TIMEOUT).cast(), mem::size_of_val(&TIMEOUT) as u32);
            // SAFETY: the pointer and the length describe a static value. If the call fails, the
            // provider waits as before.
            unsafe {
                libc::setsockopt(descriptor, libc::SOL_SOCKET, libc::SO_RCVTIMEO, value, len)
            };
        }
    }
}

fn listens_at(descriptor: i32, address: &[u8]) -> bool {
    let (mut listens, mut len) = (0i32, mem::size_of::<i32>() as u32);
    let into = (&raw mut listens).cast();
    // SAFETY: the call writes at most `len` bytes into a local integer.
    let got = unsafe {
        libc::getsockopt(descriptor, libc::SOL_SOCKET, libc::SO_ACCEPTCONN, into, &raw mut len)
    };
    if got != 0 || listens == 0 {
        return false;
    }
    let mut own = [0u8; 128];
    let mut len = own.len() as u32;
    // SAFETY: the call writes at most `len` bytes into a local array.
    let named = unsafe { libc::getsockname(descriptor, own.as_mut_ptr().cast(), &raw mut len) };
    named == 0 && own.get(..len as usize) == Some(address)
}

/// Holds the open folder `/proc/self/fd`, or null.
struct Descriptors(*mut libc::DIR);

impl Descriptors {
    fn open() -> Self {
        // SAFETY: the path is a C string literal.
        Descriptors(unsafe { libc::opendir(c"/proc/self/fd".as_ptr()) })
    }
}

impl Iterator for Descriptors {
    type Item = i32;

    fn next(&mut self) -> Option<i32> {
        if self.0.is_null() {
            return None;
        }
        loop {
            // SAFETY: the stream is open until this value is dropped.
            let entry = unsafe { libc::readdir(self.0) };
            if entry.is_null() {
                return None;
            }
            // SAFETY: the name ends with a zero byte, and the entry is valid until the next read.
            // It may be shorter than its type, so no reference to the whole entry is created.
            let name = unsafe { CStr::from_ptr((&raw const (*entry).d_name).cast()) };
            // Skips the names of the folder itself and of its parent.
            if let Some(number) = name.to_str().ok().and_then(|name| name.parse().ok()) {
                return Some(number);
            }
        }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: `opendir` returned the stream, and it is closed once.
            unsafe { libc::closedir(self.0) };
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::net::TcpListener;
    use std::os::fd::AsRawFd;

    use super::prepare;

    #[test]
    fn only_the_socket_at_the_address_becomes_close_on_exec() {
        let [ours, other] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        for socket in [&ours, &other] {
            // SAFETY: the call accesses no memory.
            assert_eq!(unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETFD, 0) }, 0);
        }
        let port = ours.local_addr().unwrap().port().to_be_bytes();
        let family = (libc::AF_INET as u16).to_ne_bytes();
        prepare(&[&family[..], &port, &[127, 0, 0, 1], &[0; 8]].concat());
        for (socket, flags) in [(ours, libc::FD_CLOEXEC), (other, 0)] {
            // SAFETY: the call accesses no memory.
            assert_eq!(unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_GETFD) }, flags);
        }
    }
}
