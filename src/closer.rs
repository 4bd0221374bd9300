//! Starts threads that close unwanted descriptors from peers, so that no other thread blocks on
//! them.
//!
//! `fishplate-shm` starts no threads. It sets such descriptors aside, and calls the closer that the
//! program has installed.

use std::mem::MaybeUninit;
use std::{ptr, thread};

use fishplate_core::sync::turns::Turns;
use fishplate_shm::{close_aside, has_aside, set_closer};

/// While all four closing threads are blocked, descriptors wait.
static CLOSING: Turns = Turns::new(4);

/// Closes the descriptors that `fishplate-shm` sets aside, on separate threads. The threads exist
/// only while there are descriptors to close, and block all signals. Call this before the first
/// peer connects.
pub fn close_in_background() {
    set_closer(start);
}

/// Starts a closing thread, unless the maximum number of them is running. Never waits. If no thread
/// can be started, the descriptors stay open until the next call.
fn start() {
    let thread =
        || thread::Builder::new().name("fishplate-close".into()).stack_size(64 << 10).spawn(run);
    if CLOSING.take() && without_signals(thread).is_err() {
        CLOSING.end();
    }
}

fn run() {
    loop {
        close_aside();
        CLOSING.end();
        if !has_aside() || !CLOSING.take() {
            return;
        }
    }
}

/// Runs `begin` with all signals blocked. A thread that `begin` starts then never runs a handler of
/// the program.
pub fn without_signals<T>(begin: impl FnOnce() -> T) -> T {
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the calls fill `all` and `before`. `before` is read only if the call filled it.
    let blocked = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) == 0
    };
    let begun = begin();
    if blocked {
        // SAFETY: `blocked` is true only if the call above has filled `before`.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
    }
    begun
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::{AsRawFd, OwnedFd};
    use std::time::{Duration, Instant};

    use fishplate_shm::{Link, Role, ShmConfig, ShmRail, socket_pair};

    /// Sends a byte and a descriptor.
    fn send(socket: &OwnedFd, fd: &OwnedFd) {
        let mut part = libc::iovec { iov_base: ptr::from_ref(b"x").cast_mut().cast(), iov_len: 1 };
        let mut control = [0u64; 4];
        // SAFETY: the structure is valid as zeros. The control buffer has room for a header and one
        // descriptor. All memory outlives the call.
        unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&mut part, 1);
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(4) as usize;
            let head = libc::CMSG_FIRSTHDR(&message);
            (*head).cmsg_level = libc::SOL_SOCKET;
            (*head).cmsg_type = libc::SCM_RIGHTS;
            (*head).cmsg_len = libc::CMSG_LEN(4) as usize;
            libc::CMSG_DATA(head).cast::<i32>().write_unaligned(fd.as_raw_fd());
            assert_eq!(libc::sendmsg(socket.as_raw_fd(), &message, 0), 1);
        }
    }

    #[test]
    fn an_unwanted_descriptor_of_a_peer_is_closed() {
        close_in_background();
        let rail =
            ShmRail::new(fishplate_sys::host::LinuxHost::shared(), ShmConfig::default()).unwrap();
        let (reads, writes) = std::io::pipe().unwrap();
        let writes = OwnedFd::from(writes);
        let (ours, theirs) = socket_pair().unwrap();
        send(&theirs, &writes);
        drop(writes);
        let deadline = Instant::now() + Duration::from_secs(5);
        assert!(Link::over(ours, Role::First, &rail.profile(), deadline).is_err());
        // The closing thread has the last copy of the pipe's other end.
        let mut ready = libc::pollfd { fd: reads.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: `ready` is one entry, and the count is 1.
        assert_eq!(unsafe { libc::poll(&mut ready, 1, 10_000) }, 1, "it was not closed");
        assert_eq!(File::from(OwnedFd::from(reads)).read(&mut [0]).unwrap(), 0);
    }
}
