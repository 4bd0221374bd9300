//! Writes a summary that fits one screen. Its values come from [`gather`](super::gather).

use std::fmt::Write as _;

use serde_json::{Map, Value};

use super::text;

/// The first column of values.
const MARGIN: usize = 15;

pub fn write(info: &Value, into: &mut String) {
    let machine = &info["machine"];
    let notes = [
        (machine["membarrier"] == false).then_some("no membarrier"),
        (machine["futex_waitv"] == false).then_some("no futex_waitv"),
    ];
    let lacks: Vec<&str> = notes.into_iter().flatten().collect();
    let debug = if info["build"] == "debug" { " (debug build: figures mean nothing)" } else { "" };
    line(
        into,
        "processors",
        &format!("{}, {}{debug}", text(&machine["cpus"]), text(&machine["model"])),
    );
    if !lacks.is_empty() {
        line(into, "kernel", &format!("{}; sleeping and waking cost more", lacks.join(", ")));
    }
    line(into, "shared memory", &text(&info["transports"]["shm"]));
    fabric(&info["fabric"], into);
    gpus(&info["gpu"], into);
    let changed =
        fields(&info["settings"]).filter(|(_, setting)| setting["value"] != setting["default"]);
    let changed: Vec<String> =
        changed.map(|(name, setting)| format!("{name}={}", text(&setting["value"]))).collect();
    let settings = if changed.is_empty() {
        "FISHPLATE_*: all at their defaults".into()
    } else {
        changed.join(" ")
    };
    line(into, "settings", &settings);
    into.push_str(
        "\n-v prints everything, -p NAME everything about one provider; fishplate doctor \
         finds what to improve\n",
    );
}

fn fabric(fabric: &Value, into: &mut String) {
    if fabric["usable"] != "usable" {
        return line(into, "libfabric", &text(&fabric["usable"]));
    }
    line(
        into,
        "libfabric",
        &format!(
            "{}, providers {}",
            text(&fabric["version"]),
            text(&fabric["providers_in_library"])
        ),
    );
    let rails = fabric["rails"].as_str().unwrap_or("none; a node reaches only this host");
    line(into, "a node's rails", rails);
    let (usable, absent): (Vec<_>, Vec<_>) =
        fields(&fabric["providers"]).partition(|(_, provider)| provider["usable"] == "usable");
    if !usable.is_empty() {
        let _ = writeln!(
            into,
            "\n{:<MARGIN$} {:<22} {:<28} {:<8} device memory",
            "provider", "interfaces", "not used for rails", "atomics"
        );
    }
    for (name, provider) in usable {
        let (taken, passed): (Vec<_>, Vec<_>) = fields(&provider["interfaces"])
            .partition(|(_, interface)| interface["rail"] == "taken");
        let names = |some: Vec<(&String, &Value)>| {
            let names: Vec<&str> = some.iter().map(|(name, _)| name.as_str()).collect();
            if names.is_empty() { "-".to_owned() } else { names.join(",") }
        };
        let device = if provider["device_memory"] == true { "yes" } else { "through host memory" };
        let (taken, passed, atomics) = (names(taken), names(passed), text(&provider["atomics"]));
        let _ = writeln!(into, "{name:<MARGIN$} {taken:<22} {passed:<28} {atomics:<8} {device}");
    }
    if !absent.is_empty() {
        let names: Vec<&str> = absent.iter().map(|(name, _)| name.as_str()).collect();
        let _ = writeln!(into, "not usable here: {}", names.join(", "));
    }
    into.push('\n');
}

fn gpus(gpu: &Value, into: &mut String) {
    let devices: Vec<String> = fields(&gpu["devices"])
        .map(|(name, device)| format!("{name} {}", text(&device["name"])))
        .collect();
    match devices.is_empty() {
        true => line(into, "GPUs", &text(&gpu["usable"])),
        false => line(into, "GPUs", &format!("{}; {}", devices.join(", "), text(&gpu["driver"]))),
    }
}

fn line(into: &mut String, name: &str, value: &str) {
    let _ = writeln!(into, "{name:<MARGIN$} {value}");
}

/// Returns the fields of an object. Returns no fields for any other value.
fn fields(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().map(Map::iter).into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_summary_fits_a_screen_and_names_what_is_unusual() {
        let many: Map<String, Value> =
            (0..16).map(|n| (format!("eth{n}"), json!({ "rail": "taken" }))).collect();
        let info = json!({
            "build": "release",
            "machine": { "cpus": "0-3", "model": "M", "membarrier": true, "futex_waitv": false },
            "transports": { "shm": "usable" },
            "fabric": {
                "usable": "usable", "version": "1.17", "providers_in_library": "tcp, shm",
                "providers": {
                    "tcp": { "usable": "usable", "interfaces": many, "atomics": "none", "device_memory": false },
                    "efa": { "usable": "libfabric has no provider \"efa\"" },
                },
            },
            "gpu": { "usable": "no CUDA driver" },
            "settings": { "FISHPLATE_BATCH": { "value": "7", "default": "32" } },
        });
        let mut summary = String::new();
        write(&info, &mut summary);
        assert!(summary.lines().count() <= 22, "{summary}");
        for told in [
            "no futex_waitv",
            "tcp ",
            "eth15",
            "not usable here: efa",
            "no CUDA driver",
            "FISHPLATE_BATCH=7",
        ] {
            assert!(summary.contains(told), "{told}: {summary}");
        }
        let mut without = String::new();
        write(&json!({ "fabric": { "usable": "cannot load" } }), &mut without);
        assert!(without.contains("libfabric       cannot load"), "{without}");
    }
}
