//! The command-line tool `fishplate`: measures and checks the transport, and tells what it found on this machine.
//!
//! Without arguments it demonstrates the main job: two processes, put-signal over shared memory, data checked.
//! Exit codes: 0 done, 1 the run failed or data was wrong, 2 the command line was.

mod tool;

#[global_allocator]
static HEAP: tool::Heap = tool::Heap;

fn main() -> std::process::ExitCode {
    tool::within_limits(tool::main)
}
