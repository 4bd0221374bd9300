use std::io::{ErrorKind, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd};
use std::time::{Duration, Instant};

use super::*;
use crate::socket::{Socket, socket_pair};

/// How long closing a lingering socket blocks.
const LINGER: Duration = Duration::from_secs(40);

/// Returns a connection full of unread bytes, and its peer, which keeps it open. Closing the
/// connection blocks.
fn lingering() -> (OwnedFd, (TcpListener, TcpStream)) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (held, _) = listener.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[0; 65536]).is_ok() {}
    assert_eq!(stream.write(&[0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    let linger = libc::linger { l_onoff: 1, l_linger: LINGER.as_secs() as i32 };
    // SAFETY: `linger` outlives the call, and its size is passed with it.
    let set = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of::<libc::linger>() as libc::socklen_t,
        )
    };
    assert_eq!(set, 0);
    (stream.into(), (listener, held))
}

/// Checks that an operation does not block.
#[track_caller]
fn at_once(what: impl FnOnce()) {
    let began = Instant::now();
    what();
    assert!(began.elapsed() < LINGER / 2, "{:?}", began.elapsed());
}

#[test]
fn a_socket_that_lingers_is_not_waited_for() {
    let (lingering, _held) = lingering();
    at_once(|| drop(Foreign::from(lingering)));
}

#[test]
fn a_socket_that_lingers_in_the_queue_of_another_is_not_waited_for() {
    for packets in [&[&b"x"[..]][..], &[b"x", b"", b"y"], &[b"", b""]] {
        let (lingering, _held) = lingering();
        let (x, y) = socket_pair().unwrap();
        let (x, y) = (Socket::new(x), Socket::new(y));
        let (last, before) = packets.split_last().unwrap();
        for packet in before {
            x.try_send(packet, &[]).unwrap();
        }
        x.try_send(last, &[lingering.as_fd()]).unwrap();
        // After the drop, the queued duplicate is the last descriptor of the connection.
        drop(Foreign::from(lingering));
        at_once(|| drop(y));
    }
}

#[test]
fn what_is_not_memory_is_told_without_asking_its_maker() {
    let (lingering, _held) = lingering();
    let foreign = Foreign::from(lingering);
    assert_eq!(segment::memory_held(foreign.as_fd()), Err(SegmentError::Unsealed));
    assert!(foreign.into_memory(4096).is_err());
    let memory = Foreign::from(segment::create(4096).unwrap());
    assert!(segment::memory_held(memory.as_fd()).is_ok_and(|held| held >= 4096));
    assert!(memory.into_memory(4096).is_err(), "not sealed");
}

#[test]
fn what_is_put_aside_is_dropped_by_whoever_closes() {
    struct Told(std::sync::mpsc::Sender<std::thread::ThreadId>);
    impl Drop for Told {
        fn drop(&mut self) {
            self.0.send(std::thread::current().id()).unwrap();
        }
    }
    let (told, dropped) = std::sync::mpsc::channel();
    for _ in 0..3 {
        put_aside(Told(told.clone()));
    }
    assert!(has_aside());
    // A concurrent test may have taken the resources. Then that test's thread drops them.
    std::thread::spawn(close_aside).join().unwrap();
    for _ in 0..3 {
        assert_ne!(dropped.recv_timeout(2 * LINGER).unwrap(), std::thread::current().id());
    }
}

/// Creates a sealed memfd of `size` bytes. Its pages hold `held` bytes, and may extend beyond the
/// end of the file.
fn memory(name: &std::ffi::CStr, size: u64, held: u64) -> OwnedFd {
    // SAFETY: `name` is a C string, and the other arguments are integers. `memfd_create` returned
    // `fd`, and nothing else owns it.
    let fd = unsafe {
        let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        assert!(fd >= 0);
        assert_eq!(libc::fallocate(fd, libc::FALLOC_FL_KEEP_SIZE, 0, held as libc::off_t), 0);
        assert_eq!(libc::ftruncate(fd, size as libc::off_t), 0);
        OwnedFd::from_raw_fd(fd)
    };
    segment::seal(fd.as_fd()).unwrap();
    fd
}

#[test]
fn pages_beyond_the_end_of_memory_count_when_it_is_closed() {
    let fd = memory(c"beyond", 4096, 16 << 20);
    assert!(segment::memory_held(fd.as_fd()).is_ok_and(|held| held >= 16 << 20));
    let refused = segment::verify(fd.as_fd(), 4096);
    assert!(matches!(refused, Err(SegmentError::Size { expected: 4096, .. })), "{refused:?}");
    assert_eq!(segment::verify(memory(c"fits", 4096, 4096).as_fd(), 4096), Ok(4096));
}

#[test]
fn large_memory_is_closed_at_once_where_there_is_no_closer() {
    let is_open = || {
        let fds = std::fs::read_dir("/proc/self/fd").unwrap();
        let mut names = fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
        names.any(|name| name.as_os_str() == "/memfd:honest (deleted)")
    };
    let foreign = Foreign::from(memory(c"honest", 16 << 20, 16 << 20));
    assert!(is_open());
    drop(foreign);
    assert!(!is_open(), "its memory would never be freed");
}
