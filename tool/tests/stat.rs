//! Tests that `fishplate stat` reads the counters of a running program. That program is this test.

mod command;
#[path = "command/schema.rs"]
mod schema;

use std::process::Output;
use std::time::{Duration, Instant};

use command::{run, text};
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
    let output = run("stat 4194305");
    assert!(text(&output.stderr).contains("the id of a running process"), "{output:?}");
    assert_eq!(run("stat 1 --json --prom").status.code(), Some(2));
}
