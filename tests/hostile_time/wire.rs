//! The tricks of a hostile process against a rail: as an attached peer that violates the engine's
//! protocol, or as a stranger at the provider's port.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ptr::NonNull;
use std::time::Duration;

use fishplate::sys::fabric::{FabricRail, Offer};
use fishplate_core::error::{CompleteError, PeerError, PostError};
use fishplate_core::mem::{Peer, Region, RegionKind, Untrusted};
use fishplate_core::rail::{Local, Rail, RailKey, Remote, Sink};

use crate::forks::tell;
use crate::rail::{CONFIG, FABRIC, SIZE};
use crate::soon;

/// What happens to the peer that plays a trick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The victim fails the peer for a protocol violation.
    Blamed,
    /// The victim may or may not fail the peer.
    Any,
}
use End::{Any, Blamed};

/// The name of a trick, its outcome, and the function that plays it.
pub type Trick = (&'static str, End, fn(&mut Hostile));

const VICTIM: Peer = Peer(0);

/// The hostile end of a connection.
pub struct Hostile {
    rail: FabricRail,
    offer: Offer,
    at: SocketAddr,
    /// The victim's region: its index and generation, and its key.
    region: [u8; 4],
    key: RailKey,
    own: Local,
    /// The epoch that the victim expects in our completion words.
    epoch: u32,
    seen: Seen,
}

/// The messages that arrived.
#[derive(Default)]
struct Seen(Vec<Vec<u8>>);

impl Sink for Seen {
    fn done(&mut self, _: u64, _: Result<(), CompleteError>) {}
    fn landed(&mut self, _: Peer, _: u32) {}
    fn message(&mut self, _: Peer, bytes: Untrusted<'_>) {
        let mut copy = vec![0; bytes.len()];
        bytes.copy_out(&mut copy);
        self.0.push(copy);
    }
    fn peer_down(&mut self, _: Peer, _: PeerError) {}
}

fn number<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().unwrap()
}

/// Plays a trick. `order` contains the length of the victim's handle, the handle, and the victim's
/// address.
pub fn play(offer: &Offer, trick: usize, order: &[u8]) {
    let (len, rest) = order.split_first().unwrap();
    let (handle, address) = rest.split_at(usize::from(*len));
    let mut rail = FabricRail::open(offer, FABRIC).unwrap();
    let memory = Box::leak(vec![0u64; SIZE / 8].into_boxed_slice());
    // SAFETY: the memory is leaked, and nothing here refers to it.
    let region =
        unsafe { Region::new(NonNull::from(&mut memory[0]).cast(), SIZE, RegionKind::Private) };
    let (key, desc) = rail.register(&region).unwrap();
    rail.attach(VICTIM, address).unwrap();
    tell(&[&key.key.to_le_bytes()[..], &key.base.to_le_bytes(), &rail.address().unwrap()].concat());
    let keys = &handle[handle.len() - 16..];
    let word = |at: usize| u64::from_le_bytes(number(&keys[at..at + 8]));
    let mut hostile = Hostile {
        rail,
        offer: offer.clone(),
        // A rail's address is a header of 16 bytes, then a `sockaddr_in`.
        at: ([127, 0, 0, 1], u16::from_be_bytes(number(&address[18..20]))).into(),
        region: number(&handle[4..8]),
        key: RailKey { key: word(0), base: word(8) },
        own: Local { ptr: region.ptr(), len: SIZE, desc },
        epoch: 0,
        seen: Seen::default(),
    };
    TRICKS[trick].2(&mut hostile);
    tell(b"played");
    // Polls on, so that the provider answers the victim's provider.
    let end = soon();
    while std::time::Instant::now() < end {
        hostile.poll();
        std::thread::sleep(Duration::from_micros(200));
    }
}

impl Hostile {
    fn poll(&mut self) {
        self.rail.poll(32, &mut self.seen);
    }

    /// Repeats a post until the rail accepts it, fails it, or a deadline expires.
    fn insist(&mut self, mut post: impl FnMut(&mut FabricRail) -> Result<(), PostError>) {
        let end = soon();
        while post(&mut self.rail) == Err(PostError::Again) && std::time::Instant::now() < end {
            self.poll();
        }
    }

    fn say(&mut self, message: &[u8]) {
        self.insist(|rail| {
            rail.post_message(VICTIM, message, Untrusted::from_slice(&[]), 0).map(drop)
        });
        self.poll();
    }

    fn flood(&mut self, message: impl Fn(u32) -> Vec<u8>) {
        (0..1000).for_each(|n| self.say(&message(n)));
    }

    /// Waits for the victim's Hello. Returns its epoch.
    fn hello(&mut self) -> u32 {
        let end = soon();
        loop {
            self.poll();
            if let Some(hello) = self.seen.0.iter().find(|message| message.first() == Some(&HELLO))
            {
                return u32::from_le_bytes(number(&hello[4..8]));
            }
            assert!(std::time::Instant::now() < end, "no Hello came");
        }
    }

    /// Connects as a correct peer does.
    fn meet(&mut self) {
        self.epoch = self.hello();
        self.say(&hello(5, self.epoch, VERSION));
    }

    /// Returns the completion word with sequence number `seq` in stream 0.
    fn word(&self, seq: u32) -> u32 {
        // The sequence number has two bits more than the window, at least 9.
        let bits = (CONFIG.window.trailing_zeros() + 2).max(9);
        self.epoch << bits & 0xff_ffff | seq
    }

    /// Encodes a message with the id of the victim's region in its header.
    fn message(&self, [kind, op, width]: [u8; 3], seq: u32, rest: &[u64]) -> Vec<u8> {
        let mut message = vec![kind, 0, op, width];
        message.extend(self.word(seq).to_le_bytes());
        message.extend([0; 4]);
        message.extend(self.region);
        message.extend(rest.iter().flat_map(|word| word.to_le_bytes()));
        message
    }

    /// Writes 8 bytes to this key and offset, with `word` as completion data.
    fn write(&mut self, key: u64, offset: u64, word: u32) {
        let (local, to) = (Local { len: 8, ..self.own }, RailKey { key, ..self.key });
        // The imported length covers the offset, so that our own rail accepts the write.
        let _ = self.rail.import(VICTIM, to, (offset + 8).max(1 << 20));
        let remote = Remote { key: to, offset };
        self.insist(|rail| {
            // SAFETY: the memory is leaked and registered.
            unsafe { rail.post_write(VICTIM, local, remote, Some(word), 0) }.map(drop)
        });
    }

    fn dial(&self) -> TcpStream {
        TcpStream::connect(self.at).unwrap()
    }

    /// Returns a correct connection request of the provider, recorded from a rail of ours.
    fn connection_request(&mut self) -> Vec<u8> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut rail = FabricRail::open(&self.offer, FABRIC).unwrap();
        let mut address = self.rail.address().unwrap();
        address[8] ^= 1;
        address[18..20].copy_from_slice(&listener.local_addr().unwrap().port().to_be_bytes());
        rail.attach(VICTIM, &address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let end = soon();
        let mut caller = loop {
            let _ = rail.post_message(VICTIM, &[1], Untrusted::from_slice(&[]), 0);
            rail.poll(32, &mut self.seen);
            if let Ok((caller, _)) = listener.accept() {
                break caller;
            }
            assert!(std::time::Instant::now() < end, "no connection came");
        };
        caller.set_nonblocking(true).unwrap();
        let mut request = vec![0; 256];
        loop {
            rail.poll(32, &mut self.seen);
            if let Ok(len) = caller.read(&mut request) {
                request.truncate(len);
                return request;
            }
        }
    }
}

impl Hostile {
    /// Connects as a rail that the victim has not attached, then sends these bytes.
    fn connect(&mut self, bytes: &[u8]) {
        let request = self.connection_request();
        let mut stream = self.dial();
        stream.write_all(&request).unwrap();
        let _ = stream.read(&mut [0; 256]);
        let _ = stream.write_all(bytes);
        std::mem::forget(stream);
    }
}

/// Sends bytes over a new connection, and leaves it open.
fn pour(hostile: &Hostile, bytes: &[u8]) {
    let mut stream = hostile.dial();
    let _ = stream.write_all(bytes);
    std::mem::forget(stream);
}

fn noise(len: usize) -> Vec<u8> {
    let words = std::iter::successors(Some(0x5eedu64), |x| {
        let x = x ^ x << 13;
        let x = x ^ x >> 7;
        Some(x ^ x << 17)
    });
    words.map(|word| word as u8).take(len).collect()
}

/// Length of the head of a connection request of the provider, in bytes.
const REQUEST_HEAD: usize = 32;

/// The kinds of engine messages.
const SIGNAL: u8 = 1;
const SIGNAL_DATA: u8 = 2;
const AMO: u8 = 3;
const REPLY: u8 = 4;
const ACK: u8 = 5;
const DATA: u8 = 6;
const HELLO: u8 = 7;
const BYE: u8 = 8;
const TOLD: u8 = 9;
const GOT: u8 = 14;
const TAGGED: u8 = 16;
const REQUEST: u8 = 18;
const FIN: u8 = 19;

/// The version of the engine's protocol.
const VERSION: u32 = 12;

fn hello(mine: u32, yours: u32, version: u32) -> Vec<u8> {
    let mut hello = vec![HELLO, 0, 1, 0];
    hello.extend([mine, yours, version].iter().flat_map(|word| word.to_le_bytes()));
    hello
}

/// Encodes a request to send `len` bytes that the receiver reads with this key.
fn request(hostile: &Hostile, seq: u32, len: u64, key: RailKey) -> Vec<u8> {
    let mut message = hostile.message([REQUEST, 0, 0], seq, &[]);
    message[12..16].fill(0);
    let last = u64::from(seq) | 1 << 32;
    for word in [1, 0, 77 + u64::from(seq), len, 0, len, last, key.key, key.base] {
        message.extend(word.to_le_bytes());
    }
    message
}

fn raise(signal: i32) {
    // SAFETY: the call takes only a number. The signal stops or ends this process.
    unsafe { libc::raise(signal) };
}

pub const TRICKS: &[Trick] = &[
    // Messages before the Hello.
    ("silence", Any, |_| {}),
    ("a message of nothing", Any, |it| it.say(&[])),
    ("noise in a message", Any, |it| it.say(&noise(900))),
    ("a message of no kind", Any, |it| it.say(&[255; 64])),
    ("a flood of messages before the Hello", Any, |it| {
        it.flood(|n| [&[TAGGED, 0, 0, 0][..], &n.to_le_bytes(), &[0; 24]].concat());
    }),
    ("a Hello cut short", Any, |it| it.say(&hello(5, 0, VERSION)[..9])),
    ("a Hello of another version", Any, |it| it.say(&hello(5, 0, 99))),
    ("a flood of Hellos, each of another side", Any, |it| it.flood(|n| hello(100 + n, 0, VERSION))),
    ("a flood of Hellos with a guessed epoch", Any, |it| it.flood(|n| hello(7, n, VERSION))),
    ("a second side after the first", Any, |it| {
        it.meet();
        it.say(&hello(6, it.epoch, VERSION));
    }),
    // Messages after the Hello.
    ("a message of no kind, connected", Blamed, |it| {
        it.meet();
        it.say(&it.message([255, 0, 0], 0, &[0; 4]));
    }),
    ("messages of earlier epochs", Any, |it| {
        it.meet();
        it.epoch -= 1;
        it.flood(|n| vec![SIGNAL, 0, 1, 8, n as u8, 0, 0, 0]);
        let stale = it.message([SIGNAL, 1, 8], 0, &[0, 1]);
        it.flood(|_| stale.clone());
    }),
    ("a number far outside the window", Blamed, |it| {
        it.meet();
        it.say(&it.message([SIGNAL, 1, 8], 20, &[0, 1]));
    }),
    ("a number twice", Any, |it| {
        it.meet();
        (0..2).for_each(|_| it.say(&it.message([SIGNAL, 1, 8], 0, &[0, 1])));
    }),
    ("a context that does not exist", Blamed, |it| {
        it.meet();
        let mut message = it.message([SIGNAL, 1, 8], 0, &[0, 1]);
        (message[1], message[7]) = (200, 200);
        it.say(&message);
    }),
    ("a signal outside its region", Blamed, |it| {
        it.meet();
        it.say(&it.message([SIGNAL, 1, 8], 0, &[SIZE as u64, 1]));
    }),
    ("a signal to no region", Blamed, |it| {
        it.meet();
        it.region = [77, 0, 1, 0];
        it.say(&it.message([SIGNAL, 1, 8], 0, &[0, 1]));
    }),
    ("data around the end of all memory", Blamed, |it| {
        it.meet();
        it.say(&it.message([DATA, 0, 0], 0, &[u64::MAX - 3, 7]));
    }),
    ("a signal whose data is longer than the message", Blamed, |it| {
        it.meet();
        it.say(&it.message([SIGNAL_DATA, 1, 8], 0, &[0, 1, 0, u64::from(u32::MAX)]));
    }),
    ("an atomic of three bytes", Blamed, |it| {
        it.meet();
        it.say(&it.message([AMO, 2, 3], 0, &[0, 1, 0, 0]));
    }),
    ("an atomic at an odd address", Blamed, |it| {
        it.meet();
        it.say(&it.message([AMO, 2, 8], 0, &[3, 1, 0, 0]));
    }),
    ("a flood of fetches whose replies nobody takes", Any, |it| {
        it.meet();
        (0..12).for_each(|n| it.say(&it.message([AMO, 2, 8], n, &[0, 1, 0, 1 + u64::from(n)])));
        tell(b"played");
        raise(libc::SIGSTOP);
    }),
    ("a reply to nothing", Blamed, |it| {
        it.meet();
        it.say(&it.message([REPLY, 0, 0], 0, &[u64::MAX - 5, 1]));
    }),
    ("an acknowledgement of what was never sent", Blamed, |it| {
        it.meet();
        let mut message = it.message([ACK, 0, 0], 0, &[]);
        message[8..12].copy_from_slice(&0x7000_0000u32.to_le_bytes());
        it.say(&message);
    }),
    ("a wish for an acknowledgement of everything", Any, |it| {
        it.meet();
        it.say(&it.message([ACK, 1, 0], 0, &[u64::MAX]));
    }),
    ("news of a rail from a peer that keeps nothing", Any, |it| {
        it.meet();
        (TOLD..=12).for_each(|kind| it.say(&it.message([kind, 0, 0], 0, &[u64::MAX; 14])));
    }),
    ("bytes that nobody asked for", Any, |it| {
        it.meet();
        it.say(&it.message([GOT, 0, 0], 0, &[9; 20]));
    }),
    ("a good-bye and more", Any, |it| {
        it.meet();
        let bye = it.message([BYE, 0, 0], 0, &[0, 0]);
        it.say(&bye[..28]);
        it.flood(|n| vec![TAGGED, 0, 0, 0, n as u8, 0, 0, 0]);
    }),
    // Tagged messages.
    ("more messages than credits", Blamed, |it| {
        it.meet();
        (0..12).for_each(|n| it.say(&it.message([TAGGED, 0, 0], n, &[9, 0])));
    }),
    ("the end of a message that was never sent", Blamed, |it| {
        it.meet();
        it.say(&it.message([FIN, 0, 0], 0, &[12345, 0]));
    }),
    ("a payload under an unknown key", Any, |it| {
        it.meet();
        it.say(&request(it, 0, 4096, RailKey { key: 0xdead, base: 0 }));
    }),
    ("a payload around the end of all memory", Any, |it| {
        it.meet();
        it.say(&request(it, 0, u64::MAX, RailKey { key: 1, base: u64::MAX - 9 }));
    }),
    ("payloads of a stopped process", Any, |it| {
        it.meet();
        let key = RailKey { key: 1, base: it.own.ptr.as_ptr() as u64 };
        (0..4).for_each(|n| it.say(&request(it, n, 1024, key)));
        tell(b"played");
        raise(libc::SIGSTOP);
    }),
    // Writes.
    ("writes with words that were never agreed", Any, |it| {
        it.meet();
        (0..32u32).for_each(|n| it.write(it.key.key, 0, n.wrapping_mul(0x0123_4567)));
    }),
    ("a write with a number far outside the window", Any, |it| {
        it.meet();
        it.write(it.key.key, 0, it.word(20));
    }),
    ("a write under a guessed key", Any, |it| {
        it.meet();
        it.write(it.key.key ^ 0xff, 0, it.word(0));
    }),
    ("a write beyond the end of its region", Any, |it| {
        it.meet();
        it.write(it.key.key, SIZE as u64 - 4, it.word(0));
    }),
    ("a flood of writes", Any, |it| {
        it.meet();
        (0..500).for_each(|n| it.write(it.key.key, 0, it.word(n % 16)));
    }),
    // Tricks with the process itself.
    ("stopped before it connects", Any, |_| {
        tell(b"played");
        raise(libc::SIGSTOP);
    }),
    ("stopped in mid-stream", Any, |it| {
        it.meet();
        it.say(&it.message([SIGNAL, 1, 8], 0, &[0, 1]));
        tell(b"played");
        raise(libc::SIGSTOP);
    }),
    ("dead in mid-stream", Any, |it| {
        it.meet();
        it.say(&it.message([SIGNAL, 1, 8], 0, &[0, 1]));
        tell(b"played");
        raise(libc::SIGKILL);
    }),
    // Strangers at the provider's port.
    ("connections that say nothing", Any, |it| (0..50).for_each(|_| pour(it, &[]))),
    ("connections that close at once", Any, |it| (0..50).for_each(|_| drop(it.dial()))),
    ("connections that are reset", Any, |it| {
        for _ in 0..50 {
            let stream = it.dial();
            let _ = (&stream).write(&[3]);
            let _ = stream.shutdown(Shutdown::Both);
        }
    }),
    ("noise at the port", Any, |it| (0..20).for_each(|_| pour(it, &noise(60_000)))),
    ("a request of another protocol", Any, |it| {
        pour(it, b"GET / HTTP/1.1\r\nHost: victim\r\n\r\n")
    }),
    ("one byte at the port", Any, |it| pour(it, &[3])),
    ("half the head of a connection request", Any, |it| {
        let request = it.connection_request();
        pour(it, &request[..REQUEST_HEAD / 2]);
    }),
    ("the head of a connection request alone", Any, |it| {
        let request = it.connection_request();
        pour(it, &request[..REQUEST_HEAD]);
    }),
    ("a connection request with more data than a request has", Any, |it| {
        let mut request = it.connection_request();
        request[2..4].fill(0xff);
        pour(it, &request);
    }),
    ("a stranger that connects and says nothing", Any, |it| it.connect(&[])),
    ("a stranger whose frames are noise", Any, |it| it.connect(&noise(60_000))),
    ("half the head of a stranger's frame", Any, |it| it.connect(&[3, 0, 0, 0, 0, 0, 16])),
    ("a stranger's frame of an endless payload", Any, |it| {
        it.connect(
            &[&[3, 0, 0, 0, 0, 0, 16, 0][..], &(1u64 << 62).to_be_bytes(), &[7; 100]].concat(),
        );
    }),
    ("a stranger's write to an address", Any, |it| {
        let head = [3, 4, 0, 0, 0, 1, 40, 0];
        let to = [it.own.ptr.as_ptr() as u64, 8, it.key.key].map(u64::to_be_bytes);
        it.connect(&[&head[..], &48u64.to_be_bytes(), &to.concat(), &[7; 8]].concat());
    }),
];
