//! Ports of 127.0.0.1 for tests that must name one before anybody listens there.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

/// Ports that a test process has for itself.
const EACH: u16 = 40;

/// A port where nobody listens. The kernel gives it to no other program and this function to no
/// other process: it lies below the ports that the kernel chooses from, and in a part that the
/// process id selects.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 10_000 + (std::process::id() % 500) as u16 * EACH;
    loop {
        // Relaxed: a count.
        let port = first + NEXT.fetch_add(1, Ordering::Relaxed) % EACH;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
