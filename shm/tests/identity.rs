//! Tests that the rail identifies a peer by the process that sends, not by the process that created
//! the socket.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use fishplate_core::rail::{Local, Posted, Rail, RailKey, Remote};
use fishplate_shm::{HandshakeError, Link, Role, ShmConfig, socket_pair};

#[path = "support/raw.rs"]
mod raw;
mod support;
use raw::{Raw, packet};
use support::*;

/// A nonce.
static KNOWN: [u8; 16] = *b"sixteen bytes ok";

/// Memory of this process that is never registered.
static mut NEVER_LENT: [u64; 8] = [7; 8];

/// A forked child. Dropping it kills and reaps the child.
struct Forked(i32);

impl Drop for Forked {
    fn drop(&mut self) {
        // SAFETY: the child is ours and has not been reaped, so its ID is not reused.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

/// Runs `play` in a forked child on one end of a socket pair that this process created. Returns the
/// other end.
fn forked(play: impl FnOnce(OwnedFd) -> Raw) -> (OwnedFd, Forked) {
    let (ours, theirs) = socket_pair().unwrap();
    // SAFETY: the child makes system calls and allocates, which glibc permits after a fork. It
    // never returns from here.
    match unsafe { libc::fork() } {
        0 => {
            drop(ours);
            let _raw = play(theirs);
            // SAFETY: the call has no arguments, and waits until the child is killed.
            unsafe { libc::pause() };
            std::process::abort();
        }
        child => (ours, Forked(child)),
    }
}

#[test]
fn a_forked_peer_cannot_make_the_kernel_write_our_memory() {
    let _alone = alone();
    let config = ShmConfig::default();
    let (socket, child) = forked(|socket| {
        let mut raw = Raw::new(socket, &ShmConfig::default());
        raw.hello(KNOWN);
        raw.offer();
        raw.ready();
        raw
    });
    let mut rail = rail(config);
    let link = Link::over(socket, Role::First, &rail.profile(), soon()).unwrap();
    assert_eq!(link.pid(), child.0, "the process that speaks");
    rail.attach(PEER, link).unwrap();
    // The key of private memory, in generation 1 and slot 0, with the address of unregistered
    // memory of this process.
    let key = RailKey { key: 1 << 60 | 1 << 48, base: &raw const NEVER_LENT as u64 };
    rail.import(PEER, key, 64).unwrap();
    let mut bytes = [0x41u8; 64];
    let local = Local { ptr: NonNull::from(&mut bytes).cast(), len: 64, desc: 0 };
    // SAFETY: the bytes outlive the rail.
    let posted = unsafe { rail.post_write(PEER, local, Remote { key, offset: 0 }, None, 1) };
    // Done: the kernel wrote to the child. Pending: the data is staged.
    assert!(matches!(posted, Ok(Posted::Done | Posted::Pending)), "{posted:?}");
    // SAFETY: nothing in this process writes to the static.
    assert_eq!(unsafe { (&raw const NEVER_LENT).read_volatile() }, [7; 8]);
}

#[test]
fn an_honest_forked_peer_is_reached_if_the_kernel_identifies_it() {
    let _alone = alone();
    let rail = rail(ShmConfig::default());
    let (socket, child) = forked(|socket| {
        let mut raw = Raw::new(socket, &ShmConfig::default());
        raw.meet();
        raw
    });
    let link = Link::over(socket, Role::First, &rail.profile(), soon()).unwrap();
    assert_eq!(link.pid(), child.0);
    let [major, minor] = kernel();
    if (major, minor) >= (6, 5) {
        assert!(link.reaches_private());
    } else {
        assert!(
            !link.reaches_private(),
            "the number of a forked process is not proven before Linux 6.5"
        );
    }
}

#[test]
fn a_handshake_finished_by_another_process_is_refused() {
    let _alone = alone();
    let (socket, child) = forked(|socket| {
        let mut raw = Raw::new(socket, &ShmConfig::default());
        raw.hello(KNOWN);
        raw.offer();
        // SAFETY: the child makes one system call, and exits in this block.
        if unsafe { libc::fork() } == 0 {
            raw.send(&packet(raw::READY, &raw.theirs), &[]);
            // SAFETY: the call takes a number and ends the process at once.
            unsafe { libc::_exit(0) };
        }
        raw
    });
    let rail = rail(ShmConfig::default());
    match Link::over(socket, Role::First, &rail.profile(), soon()) {
        Err(HandshakeError::Process { hello, ready }) => {
            assert!(hello == child.0 && ready != hello)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_peer_in_this_process_is_reached() {
    let _alone = alone();
    let (near, far) = (rail(ShmConfig::default()), rail(ShmConfig::default()));
    for link in meet(&near, &far, socket_pair().unwrap()) {
        assert_eq!(link.pid(), std::process::id() as i32);
        assert!(link.reaches_private());
    }
}

/// Sends a packet with the credentials of process `pid`. The kernel permits that to the superuser.
/// Returns whether the packet was sent.
fn send_as(raw: &Raw, bytes: &[u8], pid: i32) -> bool {
    use std::os::fd::AsRawFd;

    let mut control = [0u64; 4];
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: `msghdr` consists of pointers and numbers, so all zeroes are a valid value. The
    // control buffer has room for a header and the credentials.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&mut part, 1);
        let len = size_of::<libc::ucred>() as u32;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(len) as usize;
        let head = libc::CMSG_FIRSTHDR(&message);
        (*head).cmsg_level = libc::SOL_SOCKET;
        (*head).cmsg_type = libc::SCM_CREDENTIALS;
        (*head).cmsg_len = libc::CMSG_LEN(len) as usize;
        let sender = libc::ucred { pid, uid: libc::geteuid(), gid: libc::getegid() };
        libc::CMSG_DATA(head).cast::<libc::ucred>().write_unaligned(sender);
        libc::sendmsg(raw.socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) >= 0
    }
}

/// The kernel refuses forged credentials from anyone but the superuser.
#[test]
fn a_peer_that_claims_to_be_this_process_is_refused() {
    let _alone = alone();
    // SAFETY: the calls have no arguments and cannot fail.
    let (this, root) = unsafe { (libc::getpid(), libc::geteuid() == 0) };
    let (socket, _child) = forked(|socket| {
        let mut raw = Raw::new(socket, &ShmConfig::default());
        let hello = raw.answer(KNOWN);
        let forged = send_as(&raw, &hello, this);
        assert_eq!(forged, root);
        raw.offer();
        send_as(&raw, &packet(raw::READY, &raw.theirs), this);
        raw.recv();
        raw
    });
    if !root {
        return;
    }
    let rail = rail(ShmConfig::default());
    let link = Link::over(socket, Role::First, &rail.profile(), soon()).unwrap();
    assert_eq!(link.pid(), this, "the claimed credentials");
    assert!(!link.reaches_private());
}

/// This process created the socket, so only the credentials of the Hello show the other user. Needs
/// the superuser, who can become another user.
#[test]
fn another_user_on_a_socket_of_ours_is_refused() {
    let _alone = alone();
    const NOBODY: u32 = 65_534;
    // SAFETY: the call has no arguments and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED another user on a socket of ours: not the superuser");
        return;
    }
    let (socket, _child) = forked(|socket| {
        // SAFETY: the call takes only a number, and the child has one thread.
        assert_eq!(unsafe { libc::setuid(NOBODY) }, 0);
        let mut raw = Raw::new(socket, &ShmConfig::default());
        raw.hello(KNOWN);
        raw
    });
    let rail = rail(ShmConfig::default());
    let link = Link::over(socket, Role::First, &rail.profile(), soon()).map(drop);
    assert_eq!(link, Err(HandshakeError::User(NOBODY)));
}

/// Returns the major and minor version of the kernel.
fn kernel() -> [u32; 2] {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers =
        text.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok());
    [(); 2].map(|()| numbers.next().unwrap_or(0))
}
