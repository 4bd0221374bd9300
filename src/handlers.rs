//! Keeps the program's signal handlers while a library is loaded.
//!
//! The constructor of `libinfinipath.so.4`, on which some builds of libfabric depend, replaces the
//! handlers of SIGTERM, SIGSEGV and others. Its handler prints a backtrace and calls `exit`.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;

/// Calls `load`, then undoes each change that made a function of a library loaded meanwhile the
/// handler of a signal. Handlers that other threads set meanwhile stay.
pub(crate) fn with_handlers_kept<T>(load: impl FnOnce() -> T) -> T {
    let known = loaded();
    let before: Vec<_> = (1..=libc::SIGRTMAX()).map(|signal| (signal, action(signal))).collect();
    let done = load();
    let new: Vec<_> = loaded().into_iter().filter(|segment| !known.contains(segment)).collect();
    for (signal, before) in before {
        let (Some(before), Some(now)) = (before, action(signal)) else { continue };
        if new.iter().any(|segment| segment.contains(&now.sa_sigaction)) {
            // SAFETY: `before` is an action that the kernel reported. The call only reads it.
            unsafe { libc::sigaction(signal, &before, ptr::null_mut()) };
        }
    }
    done
}

/// `None` for signals that the C library reserves.
fn action(signal: c_int) -> Option<libc::sigaction> {
    let mut now = MaybeUninit::uninit();
    // SAFETY: a null action changes nothing. `now` is read only if the call filled it.
    unsafe {
        (libc::sigaction(signal, ptr::null(), now.as_mut_ptr()) == 0).then(|| now.assume_init())
    }
}

/// Returns the addresses of the program and of its libraries.
fn loaded() -> Vec<Range<usize>> {
    unsafe extern "C" fn add(
        info: *mut libc::dl_phdr_info,
        _: libc::size_t,
        into: *mut c_void,
    ) -> c_int {
        // SAFETY: `loaded` passes its vector, which nothing else uses meanwhile. The dynamic linker
        // passes a library with that many program headers.
        let (info, into, headers) = unsafe {
            let info = &*info;
            let headers = std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
            (info, &mut *into.cast::<Vec<Range<usize>>>(), headers)
        };
        for header in headers.iter().filter(|header| header.p_type == libc::PT_LOAD) {
            let start = (info.dlpi_addr as usize).wrapping_add(header.p_vaddr as usize);
            into.push(start..start.saturating_add(header.p_memsz as usize));
        }
        0
    }
    let mut segments: Vec<Range<usize>> = Vec::new();
    // SAFETY: `add` has the signature that the call needs, and gets the vector.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut segments).cast()) };
    segments
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn ours(_: c_int) {}

    fn set(signal: c_int, handler: usize) {
        let mut new = action(signal).unwrap();
        new.sa_sigaction = handler;
        // SAFETY: no test sends these signals, so the handlers never run.
        assert_eq!(unsafe { libc::sigaction(signal, &new, ptr::null_mut()) }, 0);
    }

    #[test]
    fn handlers_of_a_loaded_library_are_removed_and_others_kept() {
        let [kept, replaced, meanwhile, generated] = [0, 1, 2, 3].map(|n| libc::SIGRTMAX() - n);
        // Stands for generated code: an address in no library.
        let code = Box::new(0u64);
        let code_at = (&raw const *code).expose_provenance();
        let ours = ours as extern "C" fn(c_int) as usize;
        set(kept, ours);
        set(replaced, ours);
        let theirs = with_handlers_kept(|| {
            // SAFETY: the names are C strings. The library is part of glibc, and loading it does
            // nothing else. The function is never called.
            let theirs = unsafe {
                let name = c"libthread_db.so.1";
                let library = libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL);
                libc::dlsym(library, c"td_init".as_ptr()) as usize
            };
            assert_ne!(theirs, 0);
            set(replaced, theirs);
            set(libc::SIGUSR2, theirs);
            set(meanwhile, ours);
            set(generated, code_at);
            theirs
        });
        let now = |signal| action(signal).unwrap().sa_sigaction;
        assert!(loaded().iter().any(|segment| segment.contains(&theirs)));
        assert_eq!([kept, replaced, meanwhile].map(now), [ours; 3]);
        assert_eq!(now(libc::SIGUSR2), libc::SIG_DFL);
        assert_eq!(now(generated), code_at);
        set(generated, libc::SIG_DFL);
    }
}
