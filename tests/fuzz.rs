//! Every parser of what a peer can write: it never panics, never reads beyond its input, and writes
//! again what it has accepted.
//!
//! `FISHPLATE_FUZZ_SECONDS`: how long, for all parsers together (5). `FISHPLATE_SEED`: a run again.
//! The parsers are those of `tests/fuzz`, where cargo-fuzz finds them too. `FISHPLATE_FUZZ_SAVE`
//! adds a few inputs of each to the corpus there.

use std::path::Path;
use std::time::Duration;
use std::{env, process};

use fishplate_core::engine::fuzzing::{self, Target};

#[path = "fuzz/driver.rs"]
mod driver;
mod fence;

/// The parsers of all packages.
fn targets() -> impl Iterator<Item = &'static Target> {
    let packages = [
        fuzzing::TARGETS,
        fishplate_sys::fabric::rail::fuzzing::TARGETS,
        fishplate_shm::fuzzing::TARGETS,
        fishplate_gpu::fuzzing::TARGETS,
        fishplate::bootstrap::fuzzing::TARGETS,
    ];
    packages.into_iter().flatten()
}

fn variable(name: &str, default: u64) -> u64 {
    env::var(name)
        .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}: {text:?} is no number")))
}

#[test]
fn no_parser_panics_reads_beyond_its_input_or_changes_what_it_accepts() {
    let seed = variable("FISHPLATE_SEED", u64::from(process::id()));
    let seconds = variable("FISHPLATE_FUZZ_SECONDS", 5);
    // Said at once: a read beyond the input ends the process.
    eprintln!("FISHPLATE_SEED={seed} FISHPLATE_FUZZ_SECONDS={seconds}");
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus");
    let time = Duration::from_secs(seconds) / targets().count() as u32;
    let mut wrong = vec![];
    for target in targets() {
        eprintln!("{}", target.name);
        match driver::drive(target, &corpus, seed, time) {
            Ok(count) => {
                println!("{}: {count:?}", target.name);
                let worth = count.accepted > 0 && count.accepted < count.inputs;
                if !worth {
                    wrong.push(format!("{}: all inputs fare alike: {count:?}", target.name));
                }
            }
            Err(error) => wrong.push(error),
        }
    }
    assert!(wrong.is_empty(), "FISHPLATE_SEED={seed}\n{}", wrong.join("\n"));
}

#[test]
fn cargo_fuzz_has_a_target_for_each_parser() {
    let manifest = include_str!("fuzz/Cargo.toml");
    let bins = manifest.split("[[bin]]").skip(1).filter_map(|bin| bin.split('"').nth(1));
    assert_eq!(bins.collect::<Vec<_>>(), targets().map(|target| target.name).collect::<Vec<_>>());
}

/// A parser that is wrong in one of three ways is found out.
mod planted {
    use super::*;

    fn sample(seed: u64, into: &mut [u8]) -> usize {
        let len = fuzzing::number(seed, 1) as usize % 40;
        into[1..=len].fill(seed as u8);
        into[0] = len as u8;
        1 + len
    }

    /// What the driver says of a parser.
    fn told(read: fn(&[u8], &mut [u8]) -> Option<usize>) -> String {
        let target = Target { name: "planted", sample, read };
        let told = driver::drive(&target, Path::new("/nonexistent"), 1, Duration::from_secs(5));
        told.expect_err("a planted bug is found")
    }

    #[test]
    fn a_length_that_is_believed_is_found() {
        let told = told(|input, again| {
            let len = usize::from(*input.first()?);
            Some(fuzzing::put(again, &input[..1 + len]))
        });
        assert!(told.contains("panics"), "{told}");
    }

    #[test]
    fn a_field_that_comes_back_otherwise_is_found() {
        let told = told(|input, again| {
            let len = usize::from(*input.first()? & 0x7f);
            let body = input.get(1..1 + len)?;
            again[0] = len as u8;
            Some(1 + fuzzing::put(&mut again[1..], body))
        });
        assert!(told.contains("otherwise"), "{told}");
    }

    /// In a process of its own, since that dies.
    #[test]
    fn a_read_beyond_the_input_is_found() {
        if env::var_os("FISHPLATE_PLANTED").is_some() {
            told(|input, _| {
                // SAFETY: none: this is the bug.
                let _beyond = unsafe { input.as_ptr().add(input.len()).read_volatile() };
                Some(0)
            });
            return;
        }
        use std::os::unix::process::ExitStatusExt;
        let name = "planted::a_read_beyond_the_input_is_found";
        let mut again = process::Command::new(env::current_exe().unwrap());
        let again = again.args([name, "--exact"]).env("FISHPLATE_PLANTED", "1").output().unwrap();
        assert_eq!(again.status.signal(), Some(libc::SIGSEGV), "{again:?}");
    }
}
