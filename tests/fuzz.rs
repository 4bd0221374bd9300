//! Runs the libraries' parsers for input from peers on mutated inputs. A parser must not panic or
//! read beyond its input, and must be able to re-encode each accepted input.
//!
//! `FISHPLATE_FUZZ_SECONDS` sets the time for all parsers together (default 5). `FISHPLATE_SEED`
//! repeats a run. `tests/fuzz` runs the same parsers under cargo-fuzz. `FISHPLATE_FUZZ_SAVE` adds
//! some inputs of each parser to the corpus in that folder.

use std::path::Path;
use std::time::Duration;
use std::{env, process};

use fishplate_core::engine::fuzzing::{self, Target};

#[path = "fuzz/driver.rs"]
mod driver;
mod fence;

/// Returns the parsers of all libraries. The tool and the NIXL plugin test their own parsers.
fn targets() -> impl Iterator<Item = &'static Target> {
    let packages = [
        fuzzing::TARGETS,
        fishplate_sys::fabric::rail::fuzzing::TARGETS,
        fishplate_shm::fuzzing::TARGETS,
        fishplate_gpu::fuzzing::TARGETS,
        fishplate::bootstrap::fuzzing::TARGETS,
        fishplate::node::fuzzing::TARGETS,
        fishplate::job::fuzzing::TARGETS,
    ];
    packages.into_iter().flatten()
}

fn variable(name: &str, default: u64) -> u64 {
    env::var(name).map_or(default, |text| {
        text.parse().unwrap_or_else(|_| panic!("{name}: {text:?} is not a number"))
    })
}

#[test]
fn parsers_neither_panic_nor_overread_nor_alter_input() {
    let seed = variable("FISHPLATE_SEED", u64::from(process::id()));
    let seconds = variable("FISHPLATE_FUZZ_SECONDS", 5);
    // Prints the seed before the run, because a read beyond the input kills the process.
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
                    wrong.push(format!(
                        "{}: all inputs were accepted, or all rejected: {count:?}",
                        target.name
                    ));
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

/// Parsers with one planted bug each. The driver must detect every bug.
mod planted {
    use super::*;

    fn sample(seed: u64, into: &mut [u8]) -> usize {
        let len = fuzzing::number(seed, 1) as usize % 40;
        into[1..=len].fill(seed as u8);
        into[0] = len as u8;
        1 + len
    }

    /// Runs the driver over a parser, and returns its failure message.
    fn told(read: fn(&[u8], &mut [u8]) -> Option<usize>) -> String {
        let target = Target { name: "planted", sample, read };
        let told = driver::drive(&target, Path::new("/nonexistent"), 1, Duration::from_secs(5));
        told.expect_err("the planted bug was not found")
    }

    #[test]
    fn an_unchecked_length_is_found() {
        let told = told(|input, again| {
            let len = usize::from(*input.first()?);
            Some(fuzzing::put(again, &input[..1 + len]))
        });
        assert!(told.contains("panics"), "{told}");
    }

    #[test]
    fn a_field_that_changes_in_a_round_trip_is_found() {
        let told = told(|input, again| {
            let len = usize::from(*input.first()? & 0x7f);
            let body = input.get(1..1 + len)?;
            again[0] = len as u8;
            Some(1 + fuzzing::put(&mut again[1..], body))
        });
        assert!(told.contains("changes in a round trip"), "{told}");
    }

    /// Runs itself again as a child process, because the read kills the process.
    #[test]
    fn a_read_beyond_the_input_is_found() {
        if env::var_os("FISHPLATE_PLANTED").is_some() {
            told(|input, _| {
                // SAFETY: unsound on purpose: this read is the planted bug.
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
