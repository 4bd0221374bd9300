//! Tries the calls that the transport uses.

use fishplate::config::Settings;
use fishplate::{Job, rails};
use fishplate_shm::{Segment, socket_pair};
use fishplate_sys::LinuxHost;
use fishplate_sys::fabric::negotiate;

use super::Finding;
use crate::variables;

pub(super) fn check() -> Vec<Finding> {
    vec![shared_memory(), kernel_copy(), sleeps(), libfabric(), job()]
}

fn shared_memory() -> Finding {
    let remedy = "raise the container's memory limit, and let its seccomp profile permit \
        memfd_create and AF_UNIX";
    match (Segment::create(1 << 20), socket_pair()) {
        (Ok(_), Ok(_)) => Finding::pass("memory", "sealed shared memory and its sockets work"),
        (Err(error), _) => {
            Finding::fail("memory", format!("cannot create sealed shared memory: {error}"), remedy)
        }
        (_, Err(error)) => {
            Finding::fail("memory", format!("cannot create local sockets: {error}"), remedy)
        }
    }
}

fn kernel_copy() -> Finding {
    let (from, mut to) = ([7u8; 8], [0u8; 8]);
    let source = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: 8 };
    let target = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: 8 };
    // SAFETY: each structure names eight bytes, of `from` and of `to`.
    let copied = unsafe { libc::process_vm_readv(libc::getpid(), &target, 1, &source, 1, 0) };
    match copied {
        8 => Finding::pass("copies", "process_vm_readv works"),
        _ => Finding::warn(
            "copies",
            format!(
                "process_vm_readv is refused: {}; long messages are copied twice",
                std::io::Error::last_os_error()
            ),
            "permit it in the container's seccomp profile, or add --cap-add=SYS_PTRACE",
        ),
    }
}

fn sleeps() -> Finding {
    let host = LinuxHost::shared();
    match (host.is_registered(), host.has_waitv()) {
        (true, true) => Finding::pass("sleeps", "membarrier and futex_waitv work"),
        (membarrier, waitv) => Finding::warn(
            "sleeps",
            format!(
                "membarrier: {membarrier}, futex_waitv: {waitv}; sleeping and waking cost more"
            ),
            "use Linux 5.16 or later, and permit both in the container's seccomp profile",
        ),
    }
}

fn libfabric() -> Finding {
    let settings = match variables::from_environment(Settings::DEFAULT) {
        Ok(settings) => settings,
        Err(failure) => {
            return Finding::fail(
                "libfabric",
                failure.to_string(),
                "fishplate info -v lists every variable",
            );
        }
    };
    let missing = "apt install libfabric1, or name one: FISHPLATE_LIBFABRIC=PATH";
    // SAFETY: the library comes from the linker's search path, or from a path that the user names
    // as libfabric.
    let library = match unsafe { rails::load(&settings) } {
        Ok(library) => library,
        Err(error) => {
            return Finding::warn(
                "libfabric",
                format!("{error}; peers on other hosts cannot be reached"),
                missing,
            );
        }
    };
    let (major, minor) = library.version();
    let names = negotiate::providers(library).unwrap_or_default();
    let wanted = |name: &&str| names.iter().any(|found| found == name);
    let usable: Vec<&str> = rails::PROVIDERS.iter().copied().filter(wanted).collect();
    let found = format!("libfabric {major}.{minor}");
    match usable.is_empty() {
        true => Finding::warn(
            "libfabric",
            format!(
                "{found} has no provider for other hosts: {}",
                if names.is_empty() { "none at all".into() } else { names.join(", ") }
            ),
            "unset FI_PROVIDER, or install the provider's package",
        ),
        false => Finding::pass("libfabric", format!("{found}: {}", usable.join(", "))),
    }
}

fn job() -> Finding {
    match Job::describe_env() {
        Ok(way) => Finding::pass("job", way),
        Err(error) => {
            let text = error.to_string();
            let (found, remedy) = text.split_once("; ").unwrap_or((&text, "see docs/jobs.md"));
            Finding::fail("job", found, remedy)
        }
    }
}
