//! Checks that a fence follows stores into device memory. On x86-64 nothing else orders stores
//! through a write-combining mapping before a signal. Tests over ordinary memory cannot detect a
//! missing fence.
#![cfg(target_arch = "x86_64")]

use fishplate_core::mem::copy_to_window;

/// The first three bytes of the instruction `sfence`.
const SFENCE: u64 = 0xf8_ae0f;
/// Exit status of a child that may not be traced.
const UNTRACED: i32 = 77;

/// Single-steps a child process through a copy. Returns whether a fence follows the last store, or
/// `None` if ptrace is not allowed.
fn is_fenced(len: usize) -> Option<bool> {
    let (from, mut to) = (vec![0xa5u8; len], vec![0u8; len]);
    let target = to.as_mut_ptr();
    let last = target.wrapping_add(len - 1);
    // SAFETY: until it exits, the child calls only functions that do not allocate or lock.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: the calls take no pointers. Both vectors have `len` bytes, and the child has its
        // own copies.
        unsafe {
            if libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) != 0 {
                libc::_exit(UNTRACED);
            }
            libc::raise(libc::SIGSTOP);
            copy_to_window(from.as_ptr(), target, len);
            libc::_exit(0);
        }
    }
    assert!(child > 0);
    // SAFETY: the child is ours, and is stopped whenever this is called.
    let peek = |at: u64| unsafe { libc::ptrace(libc::PTRACE_PEEKDATA, child, at, 0) as u64 };
    let (mut status, mut stored, mut fenced) = (0, false, false);
    loop {
        // SAFETY: `status` is a local variable.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        if !libc::WIFSTOPPED(status) {
            break;
        }
        // SAFETY: `user_regs_struct` consists of integers, so zero bytes are a valid value.
        let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        // SAFETY: the child is stopped, and `registers` is a local structure of the type that the
        // call fills.
        unsafe { libc::ptrace(libc::PTRACE_GETREGS, child, 0, &raw mut registers) };
        stored |= peek(last.addr() as u64) & 0xff == 0xa5;
        fenced |= stored && peek(registers.rip) & 0xff_ffff == SFENCE;
        // SAFETY: the child is stopped, and the call takes no pointers.
        unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, child, 0, 0) };
    }
    assert!(libc::WIFEXITED(status), "status {status:#x}");
    match libc::WEXITSTATUS(status) {
        UNTRACED => None,
        0 => {
            assert!(stored, "nothing was copied");
            Some(fenced)
        }
        other => panic!("the child ended with {other}"),
    }
}

#[test]
fn a_copy_into_a_window_ends_with_a_fence_at_every_length() {
    for len in [1, 8, 9, 64, 65, 4096] {
        match is_fenced(len) {
            Some(fenced) => assert!(fenced, "{len} bytes"),
            None => return println!("SKIPPED the fence behind a copy: ptrace is not allowed here"),
        }
    }
}
