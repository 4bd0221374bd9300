//! Describes this machine and this build, as a summary, as text with every value, or as one JSON
//! object.

mod fabric;
mod gpu;
mod summary;

use std::mem::{align_of, offset_of, size_of};

use fishplate::config::Settings;
use fishplate::topology::Machine;
use fishplate_core::engine::{Config, PeerSlot, PendingSlot, Stream};
use fishplate_core::sync::ring;
use fishplate_shm::{Segment, socket_pair};
use fishplate_sys::LinuxHost;
use serde_json::{Value, json};

use super::args::InfoArgs;
use super::clock::Clock;
use super::cpu;
use super::failure::{Failure, Outcome};
use super::report::{self, SCHEMA_VERSION};
use super::variables::{self, VARIABLES};

pub fn run(args: &InfoArgs) -> Outcome {
    let (info, whole) = match &args.provider {
        None => (gather()?, args.verbose),
        Some(name) => (provider(name)?, true),
    };
    if args.json || args.format.as_deref() == Some("json") {
        let text = serde_json::to_string_pretty(&info)
            .map_err(|e| Failure::run(format!("cannot write JSON: {e}")))?;
        return report::print(&format!("{text}\n"));
    }
    let mut text = format!("# fishplate {}\n", env!("CARGO_PKG_VERSION"));
    match whole {
        true => flatten("", &info, &mut text),
        false => summary::write(&info, &mut text),
    }
    report::print(&text)
}

fn provider(name: &str) -> Outcome<Value> {
    let providers = vec![name.to_owned()];
    let settings = Settings { providers, ..variables::from_environment(Settings::DEFAULT)? };
    settings.check().map_err(|error| Failure::usage(format!("-p {name}: {error}")))?;
    let fabric = fabric::gather(&settings, &Machine::here().unwrap_or_default());
    let told = fabric["providers"][name].clone();
    if let Value::Null = told {
        let why = text(&fabric["usable"]);
        return Err(Failure::usage(format!(
            "-p {name}: {why}; install it, or set FISHPLATE_LIBFABRIC"
        )));
    }
    match text(&told["usable"]).as_str() {
        "usable" => Ok(told),
        why => Err(Failure::usage(format!("-p {name}: {why}"))),
    }
}

fn gather() -> Outcome<Value> {
    let allowed = cpu::allowed()?;
    let host = LinuxHost::shared();
    let config = Config::DEFAULT;
    let now = variables::from_environment(Settings::DEFAULT)?;
    let nics = Machine::here().unwrap_or_default();
    Ok(json!({
        "schema_version": SCHEMA_VERSION,
        "version": env!("CARGO_PKG_VERSION"),
        "build": if cfg!(debug_assertions) { "debug" } else { "release" },
        "machine": {
            "model": cpu::model(),
            "arch": std::env::consts::ARCH,
            "cpus": cpu::list(&allowed),
            "cache_line_bytes": cpu::cache_line(),
            "clock": Clock::calibrate().describe(),
            "membarrier": host.is_registered(),
            "futex_waitv": host.has_waitv(),
        },
        "transports": {
            "loopback": "usable",
            "sim": "usable",
            "shm": shm_usable(),
        },
        "topology": topology(&nics),
        "gpu": gpu::gather(),
        "fabric": fabric::gather(&now, &nics),
        "defaults": {
            "contexts": config.contexts,
            "window": config.window,
            "batch": config.batch,
            "eager_bytes": config.eager,
            "stripe_threshold_bytes": config.stripe_threshold,
            "stripe_chunk_bytes": config.stripe_chunk,
            "rail_policy": variables::policy_name(config.policy),
            "ack_age_passes": config.ack_age,
        },
        "settings": settings(&now),
        "layout_bytes": {
            "ring_header": block::<ring::Header>(),
            "ring_header_producer_line": 0,
            "ring_header_consumer_line": size_of::<ring::Header>() / 2,
            "stream": block::<Stream>(),
            "peer_slot": block::<PeerSlot>(),
            "pending_slot": block::<PendingSlot>(),
            "latency_row": {
                "size": size_of::<super::histogram::Latency>(),
                "p50_at": offset_of!(super::histogram::Latency, p50),
            },
        },
    }))
}

fn topology(machine: &Machine) -> Value {
    let nics = machine.nics.iter().map(|nic| {
        let told = json!({
            "interface": nic.interface,
            "verbs": nic.verbs,
            "pci": nic.path.as_ref().map(ToString::to_string),
            "node": nic.node,
            "mbit": nic.mbit,
        });
        (nic.name.clone(), told)
    });
    let gpus = machine.gpus.iter().map(|gpu| {
        let told = json!({
            "vendor": format!("{:#06x}", gpu.vendor),
            "pci": gpu.path.as_ref().map(ToString::to_string),
            "node": gpu.node,
        });
        (gpu.address.to_string(), told)
    });
    json!({
        "nics": Value::Object(nics.collect()),
        "gpus": Value::Object(gpus.collect()),
        "notes": machine.notes.join("; "),
    })
}

fn settings(now: &Settings) -> Value {
    let all = VARIABLES.iter().map(|variable| {
        let told = json!({
            "value": variable.show(now),
            "default": variable.show(&Settings::DEFAULT),
            "meaning": variable.meaning,
        });
        (format!("{}{}", variables::PREFIX, variable.name), told)
    });
    Value::Object(all.collect())
}

/// Formats a JSON value. Strings have no quotes.
fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn block<T>() -> Value {
    let size = size_of::<T>();
    json!({ "size": size, "align": align_of::<T>(), "lines": size.div_ceil(64) })
}

/// Reports whether shared memory works here. Creates a segment and a pair of sockets.
fn shm_usable() -> String {
    match (Segment::create(4096), socket_pair()) {
        (Ok(_), Ok(_)) => "usable".into(),
        (Err(error), _) => format!("cannot create sealed memory: {error}"),
        (_, Err(error)) => format!("cannot create sockets: {error}"),
    }
}

/// Writes one line per value. Each line begins with the value's path.
fn flatten(path: &str, value: &Value, into: &mut String) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                flatten(&path, value, into);
            }
        }
        value => *into += &format!("{path:<40} {}\n", text(value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_told_with_their_path() {
        let mut text = String::new();
        flatten("", &json!({ "a": { "b": 1, "c": "x y" }, "d": null }), &mut text);
        let lines: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines, [vec!["a.b", "1"], vec!["a.c", "x", "y"], vec!["d", "null"]]);
    }
}
