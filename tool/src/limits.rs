//! Handles limits of the process and the machine that would otherwise end the program by a signal.
//! The tool checks these limits in advance, or turns the signal into an error with a remedy. The
//! library cannot do this, because the program owns its allocator, signals and stack.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::process::ExitCode;
use std::thread;

use fishplate_core::error::AttachError;
use fishplate_shm::{SegmentError, check_room};

use super::failure::{Failure, Outcome, note};
use super::sizes;

/// Enough for the tool in unoptimised builds too.
const STACK: usize = 8 << 20;

/// When the heap is exhausted, the program prints a remedy and ends with exit code 1 instead of
/// SIGABRT.
pub struct Heap;

// SAFETY: every call is forwarded to the system's allocator. The call returns that allocator's
// result, or never returns.
unsafe impl GlobalAlloc for Heap {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: our caller guarantees the same contract.
        found(unsafe { System.alloc(layout) }, layout.size())
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: our caller guarantees the same contract.
        found(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: our caller guarantees the same contract.
        found(unsafe { System.realloc(block, layout, size) }, size)
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: our caller guarantees the same contract.
        unsafe { System.dealloc(block, layout) };
    }
}

#[inline]
fn found(block: *mut u8, size: usize) -> *mut u8 {
    if block.is_null() { lacking(size) } else { block }
}

/// Prints that memory is exhausted, and ends the program. Does not allocate.
#[cold]
fn lacking(size: usize) -> ! {
    let mut text = [0u8; 160];
    let mut rest = &mut text[..];
    let _ = writeln!(
        rest,
        "fishplate: cannot allocate {size} bytes of memory; raise the limit (ulimit -v), or choose \
         a smaller --region or --size"
    );
    let left = rest.len();
    let len = text.len() - left;
    // SAFETY: `text` has `len` bytes. The program ends here and runs nothing that could allocate.
    unsafe {
        libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), len);
        libc::_exit(1)
    }
}

pub fn within_limits(program: fn() -> ExitCode) -> ExitCode {
    // SAFETY: ignoring a signal installs no handler. A write beyond the limit on file sizes
    // (ulimit -f) then fails with EFBIG.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let stack = limit(libc::RLIMIT_STACK);
    if stack >= STACK as u64 && limit(libc::RLIMIT_AS) == libc::RLIM_INFINITY {
        return program();
    }
    // The stack of this thread may be too small (ulimit -s), or unable to grow (ulimit -v). A new
    // thread gets its whole stack when it is created, or cannot be created.
    let running = thread::Builder::new().stack_size(STACK).spawn(program);
    match running.map(thread::JoinHandle::join) {
        Ok(Ok(code)) => code,
        Ok(Err(_)) => ExitCode::FAILURE,
        Err(error) => {
            note(format_args!(
                "fishplate: cannot allocate a stack of {}: {error}; raise ulimit -v, or ulimit -s",
                sizes::show(STACK)
            ));
            ExitCode::FAILURE
        }
    }
}

#[cold]
pub fn end_by(signal: libc::c_int) -> ! {
    // SAFETY: the default action of the signal ends the process, so nothing runs afterwards.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
        libc::_exit(128 + signal)
    }
}

fn limit(of: libc::__rlimit_resource_t) -> libc::rlim_t {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is writable for the answer, and has the type that the call fills.
    match unsafe { libc::getrlimit(of, &mut limit) } {
        0 => limit.rlim_cur,
        _ => libc::RLIM_INFINITY,
    }
}

/// Checks that there is memory for a region. `own` bytes are mapped in this process. `all` bytes
/// are mapped in this process and the process that it starts.
pub fn demand(region: usize, own: usize, all: usize) -> Outcome {
    check_addresses(own).and_then(|()| check_room(all)).map_err(|error| lack(region, error))
}

fn check_addresses(bytes: usize) -> Result<(), SegmentError> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: the system chooses a free range, so no memory of ours is replaced.
    let at =
        unsafe { libc::mmap(std::ptr::null_mut(), bytes.max(1), libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(SegmentError::System(libc::ENOMEM));
    }
    // SAFETY: the call above mapped this range with this length, and nothing else uses it.
    unsafe { libc::munmap(at, bytes.max(1)) };
    Ok(())
}

pub fn lack(region: usize, error: SegmentError) -> Failure {
    let region = sizes::show(region);
    Failure::usage(match error {
        SegmentError::Room { asked, there } => format!(
            "--region {region}: it needs {} MiB of memory on this host, and {} MiB are available; \
             choose a smaller region",
            asked >> 20,
            there >> 20
        ),
        SegmentError::FileSize { limit, .. } => format!(
            "--region {region}: the file size limit of {} KiB also applies to shared memory; \
             choose a smaller region, or raise ulimit -f",
            limit >> 10
        ),
        SegmentError::System(libc::ENOMEM | libc::ENOSPC) => format!(
            "--region {region}: there is not enough memory or address space; choose a smaller \
             region, or raise ulimit -v"
        ),
        error => format!("--region {region}: {error}"),
    })
}

#[cold]
pub fn attach_failed(what: &str, error: AttachError) -> Failure {
    Failure::run(format!("cannot set up {what}: {error}{}", attach_remedy(error)))
}

#[cold]
fn attach_remedy(error: AttachError) -> &'static str {
    match error {
        AttachError::System(libc::EFBIG) => "; raise ulimit -f, which also limits shared memory",
        AttachError::System(libc::ENOMEM) => {
            "; there is no memory: choose a smaller --region, or raise ulimit -v"
        }
        AttachError::System(libc::EMFILE) => "; too many files are open: raise ulimit -n",
        _ => "",
    }
}

/// Returns the remedy if two processes cannot connect and the limit on descriptors may be the
/// reason.
#[cold]
pub fn descriptors() -> &'static str {
    if limit(libc::RLIMIT_NOFILE) < 64 { "; few files may be open; raise ulimit -n" } else { "" }
}

#[cold]
pub fn remedy(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => "; raise ulimit -n",
        Some(libc::EAGAIN) => "; raise ulimit -u",
        Some(libc::ENOMEM) => "; raise ulimit -v",
        _ => "",
    }
}
