//! Runs one parser under libFuzzer. The name of the program selects the parser.
#![no_main]

use std::cell::RefCell;
use std::sync::OnceLock;

use fishplate_core::engine::fuzzing::{self, Target};
use libfuzzer_sys::fuzz_target;

static TARGET: OnceLock<&Target> = OnceLock::new();

thread_local! {
    static AGAIN: RefCell<Vec<u8>> = RefCell::new(vec![0; 1 << 20]);
}

fn find() -> &'static Target {
    let packages = [
        fuzzing::TARGETS,
        fishplate_sys::fabric::rail::fuzzing::TARGETS,
        fishplate_shm::fuzzing::TARGETS,
        fishplate_gpu::fuzzing::TARGETS,
        fishplate::bootstrap::fuzzing::TARGETS,
        fishplate::node::fuzzing::TARGETS,
        fishplate::job::fuzzing::TARGETS,
    ];
    let mut all = packages.into_iter().flatten();
    all.find(|target| target.name == env!("CARGO_BIN_NAME")).expect("a parser of this name")
}

fuzz_target!(|input: &[u8]| {
    let target = TARGET.get_or_init(find);
    AGAIN.with_borrow_mut(|again| {
        if let Some(same) = (target.read)(input, again) {
            assert_eq!(input.get(..same), Some(&again[..same]), "changed in a round trip");
        }
    });
});
