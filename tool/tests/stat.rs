//! Tests that `fishplate stat` reads the counters of a running program. That program is this test.

mod command;
#[path = "command/schema.rs"]
mod schema;

use std::fs::File;
use std::io::Write;
use std::os::fd::FromRawFd;
use std::process::Output;
use std::time::{Duration, Instant};

use command::{run, text};
use fishplate::config::Settings;
use fishplate::core::engine::RailStats;
use fishplate::core::mem::RailId;
use fishplate::node::Fabric;
use fishplate::{Cmp, Node, Notice, Signal};
use serde_json::Value;

/// Opens a node, and sends to itself until its counter page shows the counts.
fn node() -> Node {
    let mut node = Node::builder().counters().fabric(Fabric::Off).open().unwrap();
    let address = node.address().to_vec();
    let me = node.connect(address).unwrap();
    let memory = node.alloc(64).unwrap();
    let handle = node.handle(memory).unwrap();
    let there = node.import(me, &handle).unwrap();
    node.signal(Signal::set(there.at(0), 1), Notice::Silent).unwrap();
    node.wait(memory.at(0), Cmp::Eq, 1, None, Duration::from_secs(20)).unwrap();
    // A wait that takes some time publishes the counters.
    node.wait(memory.at(0), Cmp::Eq, 2, None, Duration::from_millis(50)).unwrap_err();
    node
}

fn nodes(output: &Output) -> Vec<Value> {
    let said: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    schema::check(&schema::load("stat.json"), &said, "stat").unwrap();
    said["nodes"].as_array().unwrap().clone()
}

#[test]
fn counters_are_read_from_outside_in_every_format() {
    let (mut node, own) = (node(), std::process::id());
    let output = run(&format!("stat {own} --json"));
    let passes = |output: &Output| nodes(output)[0]["counters"]["passes"].as_u64().unwrap();
    let before = passes(&output);
    assert!(
        before > 0
            && nodes(&output)[0]["counters"]["peers"] == 1
            && nodes(&output)[0]["pid"] == own
    );
    (0..1000).for_each(|_| _ = node.progress());
    // The node publishes its counters again only after an interval.
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut now = before;
    while now < before + 1000 && Instant::now() < deadline {
        assert_eq!(node.failed_peers(), []);
        now = passes(&run(&format!("stat {own} --json")));
    }
    assert!(now >= before + 1000 && now <= node.stats().passes, "{before} {now}");
    // Without a process id, `stat` shows all counter pages that this user may read.
    assert!(nodes(&run("stat --json")).iter().any(|one| one["pid"] == own));
    let said = text(&run(&format!("stat {own}")).stdout);
    assert!(said.contains(&format!("process {own} node 0")) && said.contains("passes"), "{said}");
    let said = text(&run(&format!("stat {own} --prom")).stdout);
    assert!(said.contains("# TYPE fishplate_passes_total counter\n"), "{said}");
    assert!(said.contains(&format!("fishplate_peers{{pid=\"{own}\",node=\"0\"}} 1\n")), "{said}");
    let said = text(&run(&format!("stat {own} -i 0.01 -n 3")).stdout);
    assert_eq!(said.matches("process").count(), 3, "{said}");

    drop(node);
    let output = run(&format!("stat {own}"));
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("enable `counters`"), "{output:?}");
    a_page_of_another_version_is_named(own);
    let output = run("stat 4194305");
    assert!(text(&output.stderr).contains("the id of a running process"), "{output:?}");
    assert_eq!(run("stat 1 --json --prom").status.code(), Some(2));
    each_rail_is_read_in_every_format();
}

/// Not a test of its own, because this process has no other page meanwhile.
fn a_page_of_another_version_is_named(own: u32) {
    // SAFETY: the name is a C string. A descriptor that the call returns is new, so nothing else
    // owns it.
    let mut page = unsafe {
        let fd = libc::memfd_create(c"fishplate-counters".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0);
        File::from_raw_fd(fd)
    };
    page.write_all(b"FPstat\0\x02").unwrap();
    page.set_len(4096).unwrap();
    let output = run(&format!("stat {own}"));
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("layout version 2, but this build reads version 1; use"), "{said}");
}

/// Not a test of its own, because the nodes of one process share their numbers.
fn each_rail_is_read_in_every_format() {
    let settings = Settings {
        providers: vec!["tcp".into()],
        interfaces: vec!["lo".into(); 2],
        ..Settings::DEFAULT
    };
    let open = || {
        let builder = Node::builder().settings(settings.clone()).fabric(Fabric::Required);
        builder.shared_memory(false).patience(Duration::ZERO).counters().open()
    };
    let mut nodes = match (open(), open()) {
        (Ok(a), Ok(b)) => [a, b],
        (Err(error), _) | (_, Err(error)) => return println!("SKIPPED rails over tcp: {error}"),
    };
    let addresses = nodes.each_ref().map(Node::address);
    let peer = nodes[0].connect(&addresses[1]).unwrap();
    nodes[1].connect(&addresses[0]).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut disabled = false;
    let said = loop {
        _ = nodes[0].send(peer, 1, b"hello", Notice::Silent);
        nodes.iter_mut().for_each(|node| _ = node.progress());
        disabled = disabled || nodes[0].disable_rail(peer, RailId(2)).is_ok();
        let counts = nodes[0].rail_stats(RailId(2)).unwrap();
        if counts.fenced == 1 && counts.resumed_ns > 0 {
            // A node publishes its counters after an interval.
            std::thread::sleep(Duration::from_millis(20));
            nodes.iter_mut().for_each(Node::publish_counters);
            break counts;
        }
        assert!(Instant::now() < deadline, "the rail is not fenced");
    };
    let own = std::process::id();
    let all = self::nodes(&run(&format!("stat {own} --json")));
    let rails = all[0]["rails"].as_array().unwrap();
    assert_eq!((rails.len(), &rails[0]["rail"], &rails[0]["failed"]), (2, &1.into(), &0.into()));
    let values = RailStats::NAMES.map(|name| rails[1][name].as_u64().unwrap());
    assert_eq!((&rails[1]["rail"], values), (&2.into(), said.values()));
    let told = text(&run(&format!("stat {own}")).stdout);
    assert!(told.contains("  rail 2: failed 1, fenced 1, returned 0;"), "{told}");
    let told = text(&run(&format!("stat {own} --prom")).stdout);
    let row =
        |name, node, value| format!("{name}{{pid=\"{own}\",node=\"{node}\",rail=\"2\"}} {value}\n");
    let node = &all[0]["node"];
    assert!(told.contains(&row("fishplate_rail_fenced_total", node, 1)), "{told}");
    assert!(told.contains("# TYPE fishplate_rail_resumed_max_ns gauge\n"), "{told}");
    assert!(
        told.contains(&row("fishplate_rail_resumed_max_ns", node, said.resumed_max_ns)),
        "{told}"
    );
}
