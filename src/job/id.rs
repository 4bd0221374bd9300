//! Defines the identity of a job. All its processes present the same cookie. Any channel can carry
//! the id.
//!
//! Nothing here blocks, except that a random cookie waits until the kernel's generator is seeded.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use super::invalid;

/// Size of a [`UniqueId`], in bytes.
pub const ID_LEN: usize = 128;

const MAGIC: [u8; 4] = *b"FPid";
pub(super) const ADDRESSES: usize = 5;

/// The secret of a job, up to 32 bytes. Rank 0 refuses connections that do not present it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Cookie([u8; 32]);

impl Cookie {
    /// No secret: any process that reaches rank 0 can join.
    pub const NONE: Cookie = Cookie([0; 32]);

    pub(super) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    pub(super) fn random() -> io::Result<Cookie> {
        let mut bytes = [0; 32];
        // SAFETY: `bytes` is writable for its length. The kernel never returns less for so small a
        // request.
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        if got == bytes.len() as isize {
            Ok(Cookie(bytes))
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

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

impl fmt::Debug for Cookie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cookie(..)")
    }
}

/// Identifies a job: the addresses of rank 0, and the job's cookie. Keep it secret.
///
/// | offset | size | what |
/// |---|---|---|
/// | 0 | 4 | `FPid` |
/// | 4 | 1 | version: 1 |
/// | 5 | 1 | number of addresses, 1 to 5 |
/// | 6 | 2 | TCP port, little-endian |
/// | 8 | 32 | cookie |
/// | 40 | 80 | addresses of 16 bytes: IPv6, or IPv4 mapped to IPv6 |
/// | 120 | 8 | zero |
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; ID_LEN]);

impl UniqueId {
    pub(super) fn new(addresses: &[IpAddr], port: u16, cookie: Cookie) -> UniqueId {
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

    /// Returns the bytes to pass to other processes.
    pub fn as_bytes(&self) -> &[u8; ID_LEN] {
        &self.0
    }

    /// Parses the bytes of an id.
    ///
    /// # Errors
    /// [`InvalidInput`](io::ErrorKind::InvalidInput): the bytes are not a valid id.
    pub fn from_bytes(bytes: &[u8]) -> io::Result<UniqueId> {
        let valid = |id: &[u8; ID_LEN]| {
            id[..4] == MAGIC
                && id[4] == 1
                && (1..=ADDRESSES as u8).contains(&id[5])
                && id[120..] == [0; 8]
        };
        let bytes: Option<[u8; ID_LEN]> = bytes.try_into().ok();
        let refusal =
            || invalid("job id refused: these are not the 128 bytes of an id of this version");
        bytes.filter(valid).map(UniqueId).ok_or_else(refusal)
    }

    pub(super) fn to_hex(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    pub(super) fn from_hex(text: &str) -> io::Result<UniqueId> {
        let digit = |byte: u8| (byte as char).to_digit(16).map_or(0, |digit| digit as u8);
        let pairs = text.as_bytes().chunks_exact(2).take(ID_LEN + 1);
        UniqueId::from_bytes(
            &pairs.map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect::<Vec<_>>(),
        )
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

/// Omits the cookie.
impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("UniqueId").field(&self.addresses()).finish()
    }
}
