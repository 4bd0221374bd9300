//! Tests of valid command lines, and of command lines that are rejected.

use super::*;
use clap::CommandFactory;

fn plan(line: &str) -> Outcome<Plan> {
    let words = ["fishplate", "perf"].into_iter().chain(line.split_whitespace());
    match Cli::read(words).map_err(|e| Failure::usage(e.to_string()))?.command {
        Some(Command::Perf(args)) => args.plan(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_command_line_is_sound() {
    Cli::command().debug_assert();
}

#[test]
fn sizes_come_from_a_list_or_a_range() {
    assert_eq!(plan("put -s 8,64,4K").unwrap().sizes, [8, 64, 4096]);
    assert_eq!(plan("put -b 8 -e 64 -f 4").unwrap().sizes, [8, 32]);
    assert_eq!(plan("put").unwrap().sizes, [8]);
    assert!(plan("put -s 8 -b 8").is_err());
}

#[test]
fn devices_are_named() {
    let plan =
        plan("put --transport gpu --device cuda:1,host --ipc-path relay -s 256M --region 256M")
            .unwrap();
    assert_eq!(plan.devices, [DeviceName::Cuda(1), DeviceName::Host]);
    assert_eq!((plan.ipc_path, plan.layout), (IpcPath::Relay, Some(Layout::Split)));
}

#[test]
fn mistakes_are_named_with_a_remedy() {
    for (line, says) in [
        ("put -s 0", "size 0"),
        ("put -b 0", "size 0"),
        ("put -s 65M", "larger --region"),
        ("put -s 8X", "`8X`"),
        ("put --rails 0", "--rails 0"),
        ("put --rails 2", "fabric, sim or loopback"),
        ("put --provider tcp", "--transport fabric"),
        ("put --transport fabric --provider tcp,,efa", "providers"),
        ("put --rails 99 --transport sim", "at most 4"),
        ("put --rails 17 --transport fabric", "at most 15"),
        ("put --window 3", "power of two"),
        ("put -n 0", "-n 0"),
        ("put -T 0", "--timeout"),
        ("pool --streams 1,0", "--streams"),
        ("put --pin 0,100000", "100000"),
        ("put --pin x", "`x`"),
        ("put --transport sim --listen /tmp/x", "--transport shm"),
        ("put --listen @a --connect @b", "cannot be used with"),
        ("put --listen a", "./name"),
        ("amo -s 16", "8 bytes"),
        ("ring -s 24", "--size"),
        ("ring --mode worker", "--mode inline for ring over shm"),
        ("put-signal --mode worker --transport sim", "two processes"),
        ("put --transport loopback --seeds 3", "put-signal"),
        ("put-signal --transport sim --seeds 0", "--seeds 0"),
        ("steal", "steal"),
        ("put --device host", "--transport gpu"),
        ("put --ipc-path relay", "--transport gpu"),
        ("put --transport gpu --device cuda", "cuda:N"),
        ("put --transport gpu --device host --device host,host", "one for each"),
        ("put --transport gpu --device host,host --listen @a", "its own"),
        ("amo --transport gpu", "--transport shm for amo"),
        ("put-signal --transport gpu --layout adjacent", "use --layout split"),
        ("put --transport gpu --rails 2", "gpu has one rail"),
        ("put --transport pigeon", "pigeon"),
        ("put-signal --transport sim --seed 18446744073709551615 --seeds 3", "smaller --seed"),
        ("put -n 1e18", "at most"),
        ("pool --listen @x", "--listen has no effect on pool"),
        ("pool --connect @x", "--connect has no effect on pool"),
        ("pool -s 8", "--size has no effect on pool"),
        ("pool --transport shm", "--transport has no effect on pool"),
        ("pool -T 60", "--timeout has no effect on pool"),
        ("pool --window 64", "--window has no effect on pool"),
        ("pool --mode worker", "--mode inline"),
        ("ring --window 64", "--window has no effect on ring"),
        ("get --window 8", "--window has no effect on get"),
        ("put-signal --window 8", "--window has no effect on put-signal"),
        ("amo --window 8 --transport sim", "--window has no effect on amo over sim"),
        ("put --transport sim -w 5", "--warmup has no effect on put over sim"),
        ("ring --seed 5", "--seed has no effect on ring"),
        ("amo --seed 5", "--seed has no effect on amo"),
        ("put --streams 2", "--streams has no effect on put"),
        ("put --layout split", "--layout has no effect on put"),
        ("put --signal set", "--signal has no effect on put"),
    ] {
        let failure = plan(line).expect_err(line);
        assert_eq!(failure.code(), 2, "{line}");
        assert!(failure.to_string().contains(says), "{line}: {failure}");
    }
}

#[test]
fn every_option_is_known_where_it_is_checked() {
    let command = Cli::command();
    let perf = command.find_subcommand("perf").unwrap();
    let known: Vec<&str> = perf.get_arguments().map(|option| option.get_id().as_str()).collect();
    for id in given::ids() {
        assert!(known.contains(&id), "{id}");
    }
}

#[test]
fn what_the_other_side_decides_is_told() {
    let notes = |line| plan(line).unwrap().notes.join("; ");
    assert!(
        notes("put --listen @x -s 8 -n 5")
            .starts_with("--size, --iters: not used, because the side")
    );
    assert!(notes("signal-rate --listen @x --signal set --json").starts_with("--signal, --json: "));
    assert_eq!(notes("tag --transport sim --window 8"), "");
    assert_eq!(notes("put --listen @x --region 1M -T 5"), "");
    assert_eq!(notes("put --connect @x -s 8 -n 5"), "");
}

#[test]
fn the_last_seed_can_be_run() {
    assert_eq!(
        plan("put-signal --transport sim --seed 18446744073709551613 --seeds 3").unwrap().seeds,
        Some(3)
    );
}

#[test]
fn operations_have_as_long_as_the_run_has() {
    for timeout in [5, 25] {
        let plan = plan(&format!("put --transport fabric -T {timeout}")).unwrap();
        assert_eq!(plan.settings.deadline, std::time::Duration::from_secs(timeout));
    }
}
