//! What a job is known by: a cookie that its processes present, and an id of fixed size with the
//! addresses of rank 0, which any channel can hand over.
//!
//! Creating an id asks the system for random bytes and for this host's addresses.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::str::FromStr;
use std::time::Duration;

use super::meet::{self, Entry};
use super::{Job, invalid};

/// Size of a [`UniqueId`], in bytes.
pub const ID_LEN: usize = 128;

const MAGIC: [u8; 4] = *b"FPid";
/// Addresses of 16 bytes each that fit into an id.
const ADDRESSES: usize = 5;

/// The secret of a job, of up to 32 bytes. Rank 0 refuses a connection that does not present it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Cookie([u8; 32]);

impl Cookie {
    /// No secret: any process that reaches rank 0 can join.
    pub const NONE: Cookie = Cookie([0; 32]);

    pub(super) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    fn random() -> io::Result<Cookie> {
        let mut bytes = [0; 32];
        // SAFETY: room for as many bytes as said. So few never come in part.
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        if got == bytes.len() as isize { Ok(Cookie(bytes)) } else { Err(io::Error::last_os_error()) }
    }
}

/// From a text of at most 32 bytes.
impl FromStr for Cookie {
    type Err = io::Error;

    fn from_str(text: &str) -> io::Result<Cookie> {
        let mut bytes = [0; 32];
        let Some(room) = bytes.get_mut(..text.len()) else {
            let len = text.len();
            return Err(invalid(format!("job cookie too long: {len} bytes given; use at most 32")));
        };
        room.copy_from_slice(text.as_bytes());
        Ok(Cookie(bytes))
    }
}

/// Does not tell the secret.
impl fmt::Debug for Cookie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cookie(..)")
    }
}

/// Identifies a job: where rank 0 listens, and the job's cookie. Keep it within the job.
///
/// | offset | size | what |
/// |---|---|---|
/// | 0 | 4 | `FPid` |
/// | 4 | 1 | version: 1 |
/// | 5 | 1 | number of addresses, 1 to 5 |
/// | 6 | 2 | TCP port, little-endian |
/// | 8 | 32 | cookie |
/// | 40 | 80 | IPv6 addresses of 16 bytes; those of IPv4 are mapped |
/// | 120 | 8 | zero |
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; ID_LEN]);

impl UniqueId {
    fn new(addresses: &[IpAddr], port: u16, cookie: Cookie) -> UniqueId {
        let mut bytes = [0; ID_LEN];
        let count = addresses.len().min(ADDRESSES);
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&[1, count as u8]);
        bytes[6..8].copy_from_slice(&port.to_le_bytes());
        bytes[8..40].copy_from_slice(&cookie.0);
        for (room, address) in bytes[40..120].chunks_exact_mut(16).zip(addresses) {
            let address = match address {
                IpAddr::V4(address) => address.to_ipv6_mapped(),
                IpAddr::V6(address) => *address,
            };
            room.copy_from_slice(&address.octets());
        }
        UniqueId(bytes)
    }

    /// Returns the bytes to hand over.
    pub fn as_bytes(&self) -> &[u8; ID_LEN] {
        &self.0
    }

    /// Takes the bytes of an id.
    ///
    /// # Errors
    /// [`InvalidInput`](io::ErrorKind::InvalidInput): no id has these bytes.
    pub fn from_bytes(bytes: &[u8]) -> io::Result<UniqueId> {
        let valid = |id: &[u8; ID_LEN]| {
            id[..4] == MAGIC && id[4] == 1 && (1..=ADDRESSES as u8).contains(&id[5]) && id[120..] == [0; 8]
        };
        let bytes: Option<[u8; ID_LEN]> = bytes.try_into().ok();
        let refusal = || invalid("job id refused: these are not the 128 bytes of an id of this version");
        bytes.filter(valid).map(UniqueId).ok_or_else(refusal)
    }

    /// The bytes as hexadecimal digits, for channels that carry text.
    pub(super) fn to_hex(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    pub(super) fn from_hex(text: &str) -> io::Result<UniqueId> {
        let digit = |byte: u8| (byte as char).to_digit(16).map_or(0, |digit| digit as u8);
        let pairs = text.as_bytes().chunks_exact(2).take(ID_LEN + 1);
        UniqueId::from_bytes(&pairs.map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect::<Vec<_>>())
    }

    pub(super) fn cookie(&self) -> Cookie {
        Cookie(self.0[8..40].try_into().expect("32 bytes"))
    }

    pub(super) fn addresses(&self) -> Vec<SocketAddr> {
        let port = u16::from_le_bytes([self.0[6], self.0[7]]);
        let words = self.0[40..120].chunks_exact(16).take(self.0[5] as usize);
        words
            .map(|octets| Ipv6Addr::from(<[u8; 16]>::try_from(octets).expect("16 bytes")))
            .map(|address| SocketAddr::new(IpAddr::V6(address).to_canonical(), port))
            .collect()
    }
}

/// Does not tell the cookie.
impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("UniqueId").field(&self.addresses()).finish()
    }
}

/// Rank 0 of a job to come. It listens from [`open`](Self::open) on, so that others may join before
/// it calls [`lead`](Self::lead).
#[derive(Debug)]
pub struct Leader {
    listener: TcpListener,
    id: UniqueId,
}

impl Leader {
    /// Listens on all addresses of this host, at a free port, with a new random cookie.
    ///
    /// # Errors
    /// What the system reports.
    pub fn open() -> io::Result<Leader> {
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0));
        let listener = listener.or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
        let v6 = listener.local_addr()?.is_ipv6();
        let mut addresses = own_addresses()?;
        addresses.retain(|address| v6 || address.is_ipv4());
        let id = UniqueId::new(&addresses, listener.local_addr()?.port(), Cookie::random()?);
        Ok(Leader { listener, id })
    }

    /// Returns the id to hand over to the other processes.
    pub fn id(&self) -> UniqueId {
        self.id
    }

    /// Becomes rank 0 of a job of `size` processes, and waits until all are there.
    ///
    /// # Errors
    /// `TimedOut` names the ranks that are missing. `InvalidInput`: the size is 0 or beyond
    /// [`SIZE_MAX`](super::SIZE_MAX).
    pub fn lead(self, size: usize, timeout: Duration) -> io::Result<Job> {
        let entry = Entry::new(Some(0), size, self.id.cookie(), timeout)?;
        self.lead_as(&entry)
    }

    /// Leads with this leader's cookie instead of the entry's.
    pub(super) fn lead_as(&self, entry: &Entry) -> io::Result<Job> {
        let entry = Entry { cookie: self.id.cookie(), ..*entry };
        Ok(Job::leader(meet::lead(&self.listener, &entry)?, &entry))
    }
}

/// Returns this host's addresses that fit into an id. The loopback address comes last, for
/// processes of this host without any network.
fn own_addresses() -> io::Result<Vec<IpAddr>> {
    let mut list = std::ptr::null_mut();
    // SAFETY: the call writes the head of a list, which is freed below.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (mut v4, mut v6, mut at) = (vec![], vec![], list);
    // SAFETY: the list's entries are valid until it is freed; the last has no next.
    while let Some(entry) = unsafe { at.as_ref() } {
        at = entry.ifa_next;
        if entry.ifa_addr.is_null() || entry.ifa_flags & libc::IFF_UP as u32 == 0 {
            continue;
        }
        // SAFETY: the family says which structure is there.
        unsafe {
            match libc::c_int::from((*entry.ifa_addr).sa_family) {
                libc::AF_INET => {
                    let address = entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                    v4.push(IpAddr::V4(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr))));
                }
                libc::AF_INET6 => {
                    let address = entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned();
                    let address = Ipv6Addr::from(address.sin6_addr.s6_addr);
                    // A link-local address needs the name of the other host's interface.
                    if !address.is_unicast_link_local() {
                        v6.push(IpAddr::V6(address));
                    }
                }
                _ => {}
            }
        }
    }
    // SAFETY: the list that the call above made.
    unsafe { libc::freeifaddrs(list) };
    v4.append(&mut v6);
    v4.retain(|address| !address.is_loopback());
    v4.truncate(ADDRESSES - 1);
    v4.push(IpAddr::V4(Ipv4Addr::LOCALHOST));
    Ok(v4)
}
