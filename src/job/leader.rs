//! Rank 0 of a job before the others have joined.
//!
//! Opening a leader reads random bytes and this host's addresses from the system. Only
//! [`Leader::lead`] and [`Leader::lead_while`] block, at most until their timeout.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::os::fd::AsRawFd;
use std::time::Duration;

use super::Job;
use super::id::{ADDRESSES, Cookie, UniqueId};
use super::meet::{self, Entry};

/// Rank 0 of a job that has not formed yet. It listens from [`open`](Self::open) on, so others can
/// connect before it calls [`lead`](Self::lead).
#[derive(Debug)]
pub struct Leader {
    listener: TcpListener,
    id: UniqueId,
}

impl Leader {
    /// Listens on all addresses of this host, at a free port, with a new random cookie.
    ///
    /// # Errors
    /// Any error of the socket calls.
    pub fn open() -> io::Result<Leader> {
        let mut addresses = own_addresses()?;
        let listener = match addresses.iter().any(IpAddr::is_ipv6) {
            true => TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0))
                .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))?,
            false => TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?,
        };
        let v6 = listener.local_addr()?.is_ipv6();
        let v4 = !v6 || !is_v6_only(&listener);
        addresses.retain(|address| if address.is_ipv4() { v4 } else { v6 });
        let id = UniqueId::new(&addresses, listener.local_addr()?.port(), Cookie::random()?);
        Ok(Leader { listener, id })
    }

    /// Returns the id to hand over to the other processes.
    pub fn id(&self) -> UniqueId {
        self.id
    }

    /// Becomes rank 0 of a job of `size` processes, and waits until all have joined.
    ///
    /// # Errors
    /// - `TimedOut`: the message lists the missing ranks.
    /// - `InvalidInput`: the size is 0 or exceeds [`SIZE_MAX`](super::SIZE_MAX).
    pub fn lead(self, size: usize, timeout: Duration) -> io::Result<Job> {
        self.lead_while(size, timeout, || Ok(()))
    }

    /// Like [`lead`](Self::lead), but calls `check` at least every 50 ms while it waits.
    ///
    /// # Errors
    /// The errors of [`lead`](Self::lead), and the first error of `check`. After an error of
    /// `check`, the processes that have joined lose their connection.
    pub fn lead_while(
        self,
        size: usize,
        timeout: Duration,
        check: impl FnMut() -> io::Result<()>,
    ) -> io::Result<Job> {
        let entry = Entry::new(Some(0), size, self.id.cookie(), timeout)?;
        Ok(Job::leader(meet::lead(&self.listener, &entry, check)?, &entry))
    }

    pub(super) fn lead_as(&self, entry: &Entry) -> io::Result<Job> {
        let entry = Entry { cookie: self.id.cookie(), ..*entry };
        Ok(Job::leader(meet::lead(&self.listener, &entry, || Ok(()))?, &entry))
    }
}

/// Returns whether an IPv6 socket refuses connections over IPv4, as `sysctl net.ipv6.bindv6only`
/// makes it.
fn is_v6_only(listener: &TcpListener) -> bool {
    let mut only: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the option's value is an int, and `len` is its size.
    let status = unsafe {
        libc::getsockopt(
            listener.as_raw_fd(),
            libc::IPPROTO_IPV6,
            libc::IPV6_V6ONLY,
            (&raw mut only).cast(),
            &mut len,
        )
    };
    status != 0 || only != 0
}

fn own_addresses() -> io::Result<Vec<IpAddr>> {
    let mut list = std::ptr::null_mut();
    // SAFETY: the call writes the head of a list, which is freed below.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (mut v4, mut v6, mut at) = (vec![], vec![], list);
    // SAFETY: the list's entries are valid until it is freed, and the last one has a null `next`.
    while let Some(entry) = unsafe { at.as_ref() } {
        at = entry.ifa_next;
        if entry.ifa_addr.is_null() || entry.ifa_flags & libc::IFF_UP as u32 == 0 {
            continue;
        }
        // SAFETY: the address family says which structure `ifa_addr` points to.
        unsafe {
            match libc::c_int::from((*entry.ifa_addr).sa_family) {
                libc::AF_INET => {
                    let address = entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                    v4.push(IpAddr::V4(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr))));
                }
                libc::AF_INET6 => {
                    let address = entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned();
                    let address = Ipv6Addr::from(address.sin6_addr.s6_addr);
                    // A link-local address is useless without the interface name on the connecting
                    // host.
                    if !address.is_unicast_link_local() {
                        v6.push(IpAddr::V6(address));
                    }
                }
                _ => {}
            }
        }
    }
    // SAFETY: `list` comes from `getifaddrs` above, and no reference into it is left.
    unsafe { libc::freeifaddrs(list) };
    v4.append(&mut v6);
    v4.retain(|address| !address.is_loopback());
    v4.truncate(ADDRESSES);
    // On another host, the loopback address may reach an unrelated process and reveal the cookie.
    if v4.is_empty() {
        v4.push(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    Ok(v4)
}
