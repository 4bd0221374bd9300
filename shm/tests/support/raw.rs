//! A peer that does not use this crate. It implements the protocol byte by byte, so that tests can
//! violate it. It panics if the listener is gone, but not if the victim has hung up.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use fishplate_shm::ShmConfig;

pub const VERSION: u16 = 6;

pub const HELLO: u16 = 1;
pub const OFFER: u16 = 2;
pub const READY: u16 = 3;
pub const BLOB: u16 = 4;
pub const ANNOUNCE: u16 = 5;
pub const WITHDRAW: u16 = 6;
pub const BYE: u16 = 7;
pub const RING: u16 = 8;

/// Offset of the nonce in a Hello.
const NONCE: usize = 52;

/// The seals that the crate requires.
pub const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// Encodes a packet of the socket.
pub fn packet(kind: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = b"fishplat".to_vec();
    bytes.extend(VERSION.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend((16 + body.len() as u32).to_ne_bytes());
    bytes.extend(body);
    bytes
}

pub fn announce(number: u32, len: u64) -> Vec<u8> {
    packet(ANNOUNCE, &[&number.to_ne_bytes()[..], &len.to_ne_bytes()].concat())
}

pub fn withdraw(number: u32) -> Vec<u8> {
    packet(WITHDRAW, &number.to_ne_bytes())
}

/// Creates a memfd of this size with all its pages, with these flags and seals.
pub fn memory(len: usize, flags: u32, seals: i32) -> OwnedFd {
    // SAFETY: the calls take only numbers and a string literal. `memfd_create` returned the
    // descriptor, so nothing else owns it.
    unsafe {
        let fd = libc::memfd_create(
            c"raw".as_ptr(),
            libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | flags,
        );
        assert!(fd >= 0);
        assert_eq!(libc::fallocate(fd, 0, 0, len as i64), 0);
        assert_eq!(libc::fcntl(fd, libc::F_ADD_SEALS, seals), 0);
        OwnedFd::from_raw_fd(fd)
    }
}

/// Sends a packet with descriptors. Returns whether it was sent.
pub fn send(socket: &OwnedFd, bytes: &[u8], fds: &[i32], flags: i32) -> bool {
    let mut control = [0u64; 130];
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: `msghdr` consists of pointers and numbers, so all zeroes are a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    // SAFETY: the control buffer has room for a header and 253 descriptors, the maximum.
    unsafe {
        if !fds.is_empty() {
            let len = size_of_val(fds) as u32;
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(len) as usize;
            let head = libc::CMSG_FIRSTHDR(&message);
            (*head).cmsg_level = libc::SOL_SOCKET;
            (*head).cmsg_type = libc::SCM_RIGHTS;
            (*head).cmsg_len = libc::CMSG_LEN(len) as usize;
            std::ptr::copy_nonoverlapping(fds.as_ptr().cast(), libc::CMSG_DATA(head), len as usize);
        }
        libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL | flags) >= 0
    }
}

/// Returns a new seqpacket socket, and the address of abstract name `name` with its length.
pub fn socket(name: &str, flags: i32) -> (OwnedFd, libc::sockaddr_un, u32) {
    // SAFETY: `sockaddr_un` consists of numbers, so all zeroes are a valid value.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = name.strip_prefix('@').unwrap().as_bytes();
    for (to, from) in address.sun_path[1..].iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    let len = std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + bytes.len();
    // SAFETY: the call takes only numbers, and returns a new descriptor.
    let fd = unsafe {
        OwnedFd::from_raw_fd(libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | flags, 0))
    };
    (fd, address, len as u32)
}

/// Connects, and waits for room in the backlog. Returns `None` if there is no listener, or with
/// `SOCK_NONBLOCK` if the backlog is full.
pub fn knock(name: &str, flags: i32) -> Option<OwnedFd> {
    let (fd, address, len) = socket(name, flags);
    // SAFETY: `address` is a local structure, and its length is passed with it.
    let rc = unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), len) };
    (rc == 0).then_some(fd)
}

/// A raw listener at an abstract name. It accepts no connection by itself.
pub struct RawListener(OwnedFd);

/// Creates a raw listener with a backlog of at most eight.
pub fn listen(name: &str) -> RawListener {
    let (listener, address, len) = socket(name, 0);
    let limit = libc::timeval { tv_sec: 20, tv_usec: 0 };
    // SAFETY: the address and the option are local values, passed with their lengths. The other
    // arguments are numbers.
    unsafe {
        let (fd, size) = (listener.as_raw_fd(), size_of_val(&limit) as u32);
        let limit = (&raw const limit).cast();
        assert_eq!(libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, limit, size), 0);
        assert_eq!(libc::bind(fd, (&raw const address).cast(), len), 0);
        assert_eq!(libc::listen(fd, 8), 0);
    }
    RawListener(listener)
}

impl RawListener {
    /// Returns the next connection. Waits for it up to 20 seconds.
    pub fn accept(&self) -> OwnedFd {
        let null = std::ptr::null_mut();
        // SAFETY: accept(2) allows null pointers for the address, and returns a new descriptor.
        unsafe { OwnedFd::from_raw_fd(libc::accept(self.0.as_raw_fd(), null, null.cast())) }
    }
}

/// The hostile end of a link.
pub struct Raw {
    pub socket: OwnedFd,
    cells: u32,
    /// The victim's nonce, and our own.
    pub theirs: [u8; 16],
    pub ours: [u8; 16],
    /// The memory of our lane, and the position of its next record.
    pub lane: *mut u8,
    pub at: u64,
}

impl Raw {
    pub fn new(socket: OwnedFd, config: &ShmConfig) -> Self {
        let lane = std::ptr::null_mut();
        Raw { socket, cells: config.lane_cells, theirs: [0; 16], ours: [0; 16], lane, at: 0 }
    }

    /// Receives a packet without room for descriptors, so the kernel closes them.
    pub fn recv(&self) -> Vec<u8> {
        let mut bytes = vec![0; 70_000];
        // SAFETY: the pointer and the length describe `bytes`.
        let n = unsafe {
            libc::recv(self.socket.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), 0)
        };
        bytes.truncate(n.max(0) as usize);
        bytes
    }

    /// Sends a packet with descriptors. Waits for room. Returns whether the packet was sent.
    pub fn send(&self, bytes: &[u8], fds: &[&OwnedFd]) -> bool {
        let fds: Vec<i32> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
        send(&self.socket, bytes, &fds, 0)
    }

    /// Receives the victim's Hello, and answers with our Hello, which contains this nonce.
    pub fn hello(&mut self, nonce: [u8; 16]) {
        let hello = self.answer(nonce);
        self.send(&hello, &[]);
    }

    /// Receives the victim's Hello, and returns our answer, which contains this nonce.
    pub fn answer(&mut self, nonce: [u8; 16]) -> Vec<u8> {
        let mut hello = self.recv();
        assert_eq!(hello.len(), NONCE + 16);
        self.theirs.copy_from_slice(&hello[NONCE..]);
        self.ours = nonce;
        hello[16] = 3 - hello[16];
        hello[NONCE..].copy_from_slice(&nonce);
        hello
    }

    /// Sends a correct Offer, and receives the victim's Offer.
    pub fn offer(&mut self) {
        self.send_offer();
        self.recv();
    }

    /// Sends a correct Offer.
    pub fn send_offer(&mut self) {
        let len = 4096 + self.cells as usize * 64;
        let lane = memory(len, 0, 0);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses a free range for the mapping, which stays mapped until the
        // process exits. All writes are within `len`.
        unsafe {
            let at = libc::mmap(
                std::ptr::null_mut(),
                len,
                access,
                libc::MAP_SHARED,
                lane.as_raw_fd(),
                0,
            );
            assert_ne!(at, libc::MAP_FAILED);
            self.lane = at.cast();
            let words = at.cast::<u64>();
            words.write(u64::from_le_bytes(*b"fishplat"));
            words.add(1).write(u64::from(VERSION) << 48 | 64 << 32 | u64::from(self.cells));
            words.add(2).cast::<[u8; 16]>().write(self.ours);
            words.add(4).cast::<[u8; 16]>().write(self.theirs);
            assert_eq!(
                libc::fcntl(lane.as_raw_fd(), libc::F_ADD_SEALS, SEALS | libc::F_SEAL_FUTURE_WRITE),
                0
            );
        }
        self.send(&packet(OFFER, &self.theirs), &[&lane, &memory(4096, 0, SEALS)]);
    }

    /// Sends a correct Ready, and receives the victim's Ready.
    pub fn ready(&self) {
        self.send(&packet(READY, &self.theirs), &[]);
        self.recv();
    }

    /// Performs the whole handshake correctly.
    pub fn meet(&mut self) {
        let nonce: [u8; 16] = std::array::from_fn(|i| i as u8 ^ std::process::id() as u8);
        self.hello(nonce);
        self.offer();
        self.ready();
    }

    /// Returns the word of our lane's segment at an offset in bytes.
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset < 4096 + self.cells as usize * 64);
        // SAFETY: the assertion above keeps the word inside our segment, which stays mapped. Both
        // sides access the word as an atomic.
        unsafe { &*self.lane.add(offset).cast() }
    }

    /// Writes payload and header of the next record without publishing it. The header may claim a
    /// wrong length.
    pub fn begin(&self, header: u64, payload: &[u8]) {
        let ring = self.cells as usize * 64;
        let first = self.at as usize * 64;
        for (i, byte) in payload.iter().enumerate() {
            // SAFETY: the index is taken modulo the ring's size, so the address stays inside the
            // segment.
            unsafe { self.lane.add(4096 + (first + 16 + i) % ring).write_volatile(*byte) };
        }
        self.word(4096 + (first + 8) % ring).store(header, Ordering::Relaxed);
    }

    /// Publishes the record that `begin` wrote: stores its stamp. The record spans `cells` cells.
    pub fn publish(&mut self, cells: u64) {
        let ring = self.cells as usize * 64;
        // Clears the next stamp first, because old contents could look like one.
        self.word(4096 + ((self.at + cells) as usize * 64) % ring).store(0, Ordering::Relaxed);
        self.word(4096 + (self.at as usize * 64) % ring).store(self.at << 1 | 1, Ordering::Release);
        self.at += cells;
    }

    pub fn record(&mut self, kind: u32, value: u32, payload: &[u8]) {
        self.begin(u64::from(kind) | u64::from(value) << 32, payload);
        self.publish((16 + payload.len()).div_ceil(64) as u64);
    }

    pub fn message(&mut self, bytes: &[u8]) {
        self.record(1, bytes.len() as u32, bytes);
    }
}

/// Encodes a request to send with sequence number `seq` and tag 1. The payload has `len` bytes, at
/// the start of a region of `size` bytes with this key and base.
pub fn request_to_send(seq: u32, len: u64, size: u64, key: u64, base: u64) -> Vec<u8> {
    let mut message = vec![18u8, 0, 0, 0];
    message.extend(seq.to_le_bytes());
    // The message acknowledges nothing and returns no credit.
    message.extend([0; 8]);
    // The tag, our token, the length and the offset. Then the region: its size, its index,
    // generation 0, and one key.
    let last = u64::from(seq) | 1 << 32;
    for word in [1, 0, 77 + u64::from(seq), len, 0, size, last, key, base] {
        message.extend(word.to_le_bytes());
    }
    message
}

/// Returns the key of a region in a segment, in slot `slot` and generation 1.
pub fn shared_key(slot: u16, segment: u32) -> u64 {
    2 << 60 | 1 << 48 | u64::from(slot) << 32 | u64::from(segment)
}
