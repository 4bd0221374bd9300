//! Checks the limits of this process, which its children inherit.

use super::Finding;
use crate::cpu;

/// Locked memory in bytes. With a lower limit, few regions can be registered with a NIC.
const LOCKED: u64 = 64 << 20;
/// Address space in bytes. With a lower limit, a node with a few large segments fails.
const ADDRESSES: u64 = 4 << 30;
/// File descriptors. A peer on this host needs a descriptor for its socket and for each of its
/// segments.
const DESCRIPTORS: u64 = 4096;
const DESCRIPTORS_LEAST: u64 = 128;

pub(super) fn check() -> Vec<Finding> {
    vec![memlock(), address_space(), descriptors(), processors()]
}

fn limit(of: libc::__rlimit_resource_t) -> (u64, u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is writable for the answer. If the call fails, no limit is reported.
    match unsafe { libc::getrlimit(of, &mut limit) } {
        0 => (limit.rlim_cur, limit.rlim_max),
        _ => (libc::RLIM_INFINITY, libc::RLIM_INFINITY),
    }
}

fn size(bytes: u64) -> String {
    match bytes {
        libc::RLIM_INFINITY => "unlimited".into(),
        bytes => format!("{} KiB", bytes >> 10),
    }
}

fn memlock() -> Finding {
    let (now, most) = limit(libc::RLIMIT_MEMLOCK);
    let found = format!("memory that may be locked: {}", size(now));
    if now >= LOCKED {
        return Finding::pass("memlock", found);
    }
    let remedy = match most >= LOCKED {
        true => format!(
            "ulimit -l {}",
            if most == libc::RLIM_INFINITY { "unlimited".into() } else { (most >> 10).to_string() }
        ),
        false => {
            "set memlock to unlimited in /etc/security/limits.conf, or LimitMEMLOCK=infinity in \
             the unit"
                .into()
        }
    };
    Finding::warn("memlock", found + "; NICs and GPUs cannot register more", remedy)
}

fn address_space() -> Finding {
    let (now, _) = limit(libc::RLIMIT_AS);
    let found = format!("address space: {}", size(now));
    match now >= ADDRESSES {
        true => Finding::pass("addresses", found),
        false => Finding::warn(
            "addresses",
            found + "; segments of peers may not fit",
            "ulimit -v unlimited",
        ),
    }
}

fn descriptors() -> Finding {
    let (now, most) = limit(libc::RLIMIT_NOFILE);
    let found = format!("descriptors: {now}, at most {most}");
    let remedy = match most > now {
        true => format!("ulimit -n {most}"),
        false => "raise nofile in /etc/security/limits.conf, or LimitNOFILE= in the unit".into(),
    };
    match now {
        DESCRIPTORS.. => Finding::pass("descriptors", found),
        DESCRIPTORS_LEAST.. => {
            Finding::warn("descriptors", found + "; enough for some hundred peers", remedy)
        }
        _ => {
            Finding::fail("descriptors", found + "; too few for a node with several peers", remedy)
        }
    }
}

fn processors() -> Finding {
    let allowed = cpu::allowed().unwrap_or_default();
    let found = format!("processors that this process may use: {}", cpu::list(&allowed));
    match allowed.len() {
        0 | 1 => Finding::warn(
            "processors",
            found + "; two processes take turns on one, and each message waits for a switch",
            "taskset -c 0-N, or more processors for the container",
        ),
        _ => Finding::pass("processors", found),
    }
}
