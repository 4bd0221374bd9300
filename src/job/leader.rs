//! Rank 0 of a job, before the others are there: a listener, and the id that tells of it.
//!
//! Opening one asks the system for random bytes and for this host's addresses. It waits in
//! [`Leader::lead`] alone, until the timeout.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::time::Duration;

use super::Job;
use super::id::{ADDRESSES, Cookie, UniqueId};
use super::meet::{self, Entry};

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

/// Returns this host's addresses that fit into an id. The loopback address only where there is no
/// other.
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
    v4.truncate(ADDRESSES);
    // On another host this is another process, which would be shown the cookie.
    if v4.is_empty() {
        v4.push(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    Ok(v4)
}
