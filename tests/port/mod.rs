//! Free ports of 127.0.0.1, for tests that must know a port before a process listens on it.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

/// Number of ports reserved for each test process.
const EACH: u16 = 40;

/// Returns an unused port. Other processes are unlikely to use it: it is below the kernel's
/// ephemeral ports, in a range that the process id selects.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 10_000 + (std::process::id() % 500) as u16 * EACH;
    loop {
        // Relaxed: only uniqueness matters.
        let port = first + NEXT.fetch_add(1, Ordering::Relaxed) % EACH;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
