//! Knocks at a peer that may be gone: begins a TCP connection to its address, to see whether
//! anything listens there. Slow path: makes system calls.
//!
//! When a process dies, the `tcp` provider closes its connection to it without a report. It then
//! rejects each post with `FI_EAGAIN` and tries to connect again. It does the same while a living
//! peer makes no progress. The kernel knows the difference: it completes the connection to a
//! listening socket, even if the owner of the socket is stopped, and otherwise refuses it.

use alloc::vec::Vec;
use core::ffi::c_int;
use core::mem;

use fishplate_core::error::PeerError;
use fishplate_core::mem::Peer;

use super::FabricRail;

/// Time after which an unanswered knock is given up, in nanoseconds.
const PATIENCE: u64 = 1_000_000_000;

/// Maximum number of knocks at the same time, and in one check. Each takes a descriptor.
const MOST: usize = 16;

/// Maximum length of an address: that of `sockaddr_in6`.
const LEN: usize = size_of::<libc::sockaddr_in6>();

#[derive(Default)]
pub(super) struct Knocks {
    /// The addresses of peers, by their number. Zeros if a peer cannot be knocked.
    addresses: Vec<[u8; LEN]>,
    open: Vec<Knock>,
}

struct Knock {
    peer: u16,
    socket: Socket,
    begun: u64,
}

struct Socket(c_int);

impl Drop for Socket {
    fn drop(&mut self) {
        // SAFETY: this value owns the descriptor.
        unsafe { libc::close(self.0) };
    }
}

impl Socket {
    /// Begins to connect. Does not wait. Fails with `true` if the connection is refused, and with
    /// `false` if nothing was found out.
    fn begin(address: &[u8; LEN]) -> Result<Socket, bool> {
        let family = c_int::from(u16::from_ne_bytes([address[0], address[1]]));
        let len = match family {
            libc::AF_INET => size_of::<libc::sockaddr_in>(),
            libc::AF_INET6 => LEN,
            _ => return Err(false),
        };
        let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: the call takes no pointers.
        let fd = unsafe { libc::socket(family, kind, 0) };
        if fd < 0 {
            return Err(false);
        }
        let socket = Socket(fd);
        // Closing the socket then resets the connection. A connection that ends in order before its
        // first byte may stay open in the peer: libfabric takes an old `EAGAIN` for its result.
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        // SAFETY: the value of this option has this type and length.
        let set = unsafe {
            let (value, len) = ((&raw const linger).cast(), size_of::<libc::linger>());
            libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, value, len as libc::socklen_t)
        };
        if set != 0 {
            return Err(false);
        }
        // SAFETY: the address has at least `len` bytes. The kernel copies it, so it need not be
        // aligned.
        let connected =
            unsafe { libc::connect(fd, address.as_ptr().cast(), len as libc::socklen_t) };
        match connected {
            0 => Err(false),
            // SAFETY: `errno` is a variable of this thread.
            _ => match unsafe { *libc::__errno_location() } {
                libc::EINPROGRESS => Ok(socket),
                error => Err(error == libc::ECONNREFUSED),
            },
        }
    }

    fn is_refused(&self) -> bool {
        let (mut error, mut len) = (0 as c_int, size_of::<c_int>() as libc::socklen_t);
        // SAFETY: `error` has room for `len` bytes.
        let read = unsafe {
            let into = (&raw mut error).cast();
            libc::getsockopt(self.0, libc::SOL_SOCKET, libc::SO_ERROR, into, &mut len)
        };
        read == 0 && error == libc::ECONNREFUSED
    }
}

impl Knocks {
    /// Records the provider's address of a peer, and forgets an earlier knock at it.
    pub fn note(&mut self, peer: u16, address: &[u8]) {
        if self.addresses.len() <= peer as usize {
            self.addresses.resize(peer as usize + 1, [0; LEN]);
        }
        let place = &mut self.addresses[peer as usize];
        *place = [0; LEN];
        if let Some(place) = place.get_mut(..address.len()) {
            place.copy_from_slice(address);
        }
        self.open.retain(|knock| knock.peer != peer);
    }

    /// Begins a knock. Returns `true` if the address refuses the connection at once.
    fn knock(&mut self, peer: u16, now: u64) -> bool {
        self.open.retain(|knock| knock.peer != peer);
        let Some(address) = self.addresses.get(peer as usize) else { return false };
        match Socket::begin(address) {
            Ok(socket) => self.open.push(Knock { peer, socket, begun: now }),
            Err(refused) => return refused,
        }
        false
    }

    /// Returns the next peer whose address has refused a connection.
    fn refused(&mut self, now: u64) -> Option<u16> {
        self.open.retain(|knock| now - knock.begun < PATIENCE);
        let at = self.open.iter().position(|knock| knock.socket.is_refused())?;
        Some(self.open.swap_remove(at).peer)
    }
}

impl FabricRail {
    /// Implements [`Rail::doubt`](fishplate_core::rail::Rail::doubt). Returns `None` if the peer is
    /// down, or if a post to it is outstanding: the provider then reports the loss of the peer as
    /// the failure of that post. Returns `None` for providers other than `tcp` too: with them, a
    /// message to a stopped peer could stay outstanding until the deadline fails the peer.
    #[cold]
    pub(super) fn doubted(&mut self, peer: Peer, asks: bool) -> Option<u32> {
        let slot = self.peers.slots.get_mut(peer.0 as usize)?;
        if !self.offer.persona.listens || !slot.up || slot.outstanding() != 0 {
            return None;
        }
        slot.doubted |= asks;
        Some(slot.arrived)
    }

    /// Fails peers whose addresses refuse connections. Knocks at doubted peers that get no posts.
    pub(super) fn check_knocks(&mut self, now: u64) {
        let mut room = MOST - self.knocks.open.len().min(MOST);
        for peer in 0..self.peers.slots.len() as u16 {
            if room == 0 {
                break;
            }
            let slot = &mut self.peers.slots[peer as usize];
            let idle = slot.up && slot.is_refused() && slot.outstanding() == 0;
            if idle && mem::take(&mut slot.doubted) {
                room -= 1;
                if self.knocks.knock(peer, now) {
                    self.take_down(Peer(peer), PeerError::Lost);
                }
            }
        }
        while let Some(peer) = self.knocks.refused(now) {
            // Skips a peer if a post was accepted since: its completion reports the loss of the
            // peer.
            if self.peers.slots[peer as usize].is_refused() {
                self.take_down(Peer(peer), PeerError::Lost);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::io::{ErrorKind, Read};
    use std::net::{SocketAddr, TcpListener};
    use std::thread;
    use std::time::Duration;

    use super::{Knock, Knocks, PATIENCE, Socket};

    /// Returns the bytes of a `sockaddr_in` or `sockaddr_in6`.
    fn bytes(at: SocketAddr) -> std::vec::Vec<u8> {
        let port = at.port().to_be_bytes();
        match at {
            SocketAddr::V4(at) => {
                let family = (libc::AF_INET as u16).to_ne_bytes();
                [&family[..], &port, &at.ip().octets(), &[0; 8]].concat()
            }
            SocketAddr::V6(at) => {
                let family = (libc::AF_INET6 as u16).to_ne_bytes();
                [&family[..], &port, &[0; 4], &at.ip().octets(), &[0; 4]].concat()
            }
        }
    }

    /// Knocks, and waits for the answer. Returns whether the connection was refused.
    fn is_refused(knocks: &mut Knocks, peer: u16) -> bool {
        let refused = knocks.knock(peer, 7);
        let answer = |_| {
            thread::sleep(Duration::from_millis(1));
            knocks.refused(8) == Some(peer)
        };
        refused || (0..50).any(answer)
    }

    #[test]
    fn only_an_address_at_which_nothing_listens_refuses() {
        for place in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(place) else {
                std::println!("SKIPPED {place}: the machine does not have it");
                continue;
            };
            let at = listener.local_addr().unwrap();
            let mut knocks = Knocks::default();
            knocks.note(3, &bytes(at));
            // The owner of the socket never accepts.
            for _ in 0..5 {
                assert!(!is_refused(&mut knocks, 3), "{place}");
            }
            drop(listener);
            assert!(is_refused(&mut knocks, 3), "{place}");
            // Peers whose addresses are not known, or are of another kind.
            knocks.note(3, &[7; 100]);
            assert!([3, 2, 9].iter().all(|&peer| !is_refused(&mut knocks, peer)));
            knocks.note(3, b"fi_shm://1:0:0\0");
            assert!(!is_refused(&mut knocks, 3));
        }
    }

    /// See `Socket::begin`.
    #[test]
    fn a_knock_ends_with_a_reset() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut knocks = Knocks::default();
        knocks.note(0, &bytes(listener.local_addr().unwrap()));
        assert!(!knocks.knock(0, 1));
        let (mut accepted, _) = listener.accept().unwrap();
        knocks.note(0, &[]);
        let error = accepted.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }

    #[test]
    fn a_knock_without_an_answer_is_given_up() {
        let mut knocks = Knocks::default();
        // SAFETY: the call takes no pointers.
        let socket = Socket(unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0) });
        knocks.open.push(Knock { peer: 0, socket, begun: 1 });
        assert_eq!((knocks.refused(PATIENCE), knocks.open.len()), (None, 1));
        assert_eq!((knocks.refused(1 + PATIENCE), knocks.open.len()), (None, 0));
    }
}
