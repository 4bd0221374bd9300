//! Watches the link of a network interface. Setup and each query make a system call. None waits.

use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Watches the link of a network interface.
#[derive(Debug)]
pub struct LinkWatch {
    socket: OwnedFd,
    name: [libc::c_char; libc::IFNAMSIZ],
}

impl LinkWatch {
    /// Watches an interface of this network namespace. Returns `None` if the interface does not
    /// exist, or if the kernel does not report its link.
    pub fn new(interface: &str) -> Option<LinkWatch> {
        let name = CString::new(interface).ok()?;
        let mut padded = [0; libc::IFNAMSIZ];
        let name = name.as_bytes_with_nul();
        if name.len() > padded.len() {
            return None;
        }
        for (to, from) in padded.iter_mut().zip(name) {
            *to = *from as libc::c_char;
        }
        // SAFETY: the call takes no pointers.
        let socket =
            unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
        if socket < 0 {
            return None;
        }
        // SAFETY: the call above returned a new descriptor, so nothing else owns it.
        let watch = LinkWatch { socket: unsafe { OwnedFd::from_raw_fd(socket) }, name: padded };
        watch.flags().map(|_| watch)
    }

    /// Returns whether the interface is up and has a link. `false` if the interface no longer
    /// exists. Makes one system call.
    pub fn is_up(&self) -> bool {
        let wanted = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        self.flags().is_some_and(|flags| flags & wanted == wanted)
    }

    fn flags(&self) -> Option<libc::c_short> {
        // SAFETY: `ifreq` is plain data, and zeros are valid for it.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        request.ifr_name = self.name;
        // SAFETY: the request is initialized and names an interface. Only this call accesses it.
        let done = unsafe {
            libc::ioctl(self.socket.as_raw_fd(), libc::SIOCGIFFLAGS as _, &raw mut request)
        };
        if done != 0 {
            return None;
        }
        // SAFETY: the call has filled this field of the union.
        Some(unsafe { request.ifr_ifru.ifru_flags })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_has_a_link_and_nowhere_has_none() {
        assert!(LinkWatch::new("lo").is_some_and(|link| link.is_up()));
        for none in ["fishplate-none", "", "a-name-that-is-much-too-long-for-an-interface", "a\0b"]
        {
            assert!(LinkWatch::new(none).is_none(), "{none}");
        }
    }
}
