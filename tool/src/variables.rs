//! Reads the `FISHPLATE_*` variables. This is the only module that turns the environment into
//! [`Settings`].

use std::env;
use std::time::Duration;

use fishplate::config::Settings;
use fishplate_core::engine::RailPolicy;

use super::failure::{Failure, Outcome};
use super::sizes;

pub const PREFIX: &str = "FISHPLATE_";

/// The variables that `fishplate::Job` reads itself: where the ranks of a job connect, the rank of
/// this process, and the size and the cookie of the job.
const JOB: [&str; 4] = ["RENDEZVOUS", "RANK", "SIZE", "COOKIE"];

pub struct Variable {
    pub name: &'static str,
    /// The meaning of the variable, in one line.
    pub meaning: &'static str,
    /// Parses a value. The error names the allowed values.
    set: fn(&mut Settings, &str) -> Result<(), String>,
    show: fn(&Settings) -> String,
}

impl Variable {
    pub fn show(&self, settings: &Settings) -> String {
        (self.show)(settings)
    }
}

const POLICIES: [(&str, RailPolicy); 3] = [
    ("fixed", RailPolicy::Fixed),
    ("round-robin", RailPolicy::RoundRobin),
    ("least-outstanding", RailPolicy::LeastOutstanding),
];

pub fn policy_name(policy: RailPolicy) -> &'static str {
    POLICIES.iter().find(|(_, known)| *known == policy).map_or("", |(name, _)| name)
}

pub const VARIABLES: [Variable; 16] = [
    Variable {
        name: "PROVIDER",
        meaning: "libfabric providers to try, in order, separated by commas; empty: all that are \
            usable",
        set: |s, text| list(text).map(|names| s.providers = names),
        show: |s| s.providers.join(","),
    },
    Variable {
        name: "INTERFACES",
        meaning: "interfaces to use, one rail each, separated by commas; empty: the nearest",
        set: |s, text| list(text).map(|names| s.interfaces = names),
        show: |s| s.interfaces.join(","),
    },
    Variable {
        name: "MAX_RAILS",
        meaning: "maximum number of rails of a process, 1 to 16",
        set: |s, text| number(text).map(|n| s.max_rails = n as usize),
        show: |s| s.max_rails.to_string(),
    },
    Variable {
        name: "LOCAL_RANK",
        meaning: "number of this process among those of its host, from 0: without a GPU, processes \
that may open fewer rails than there are near NICs begin with different NICs; empty: as the \
launcher of a job says",
        set: |s, text| {
            s.local_rank = match text {
                "" => None,
                text => Some(number(text)? as usize),
            };
            Ok(())
        },
        show: |s| s.local_rank.map_or_else(String::new, |rank| rank.to_string()),
    },
    Variable {
        name: "LIBFABRIC",
        meaning: "path of the libfabric to load; empty: libfabric.so.1 on the linker's search path",
        set: |s, text| {
            s.library = (!text.is_empty()).then(|| text.into());
            Ok(())
        },
        show: |s| s.library.as_ref().map_or_else(String::new, |path| path.display().to_string()),
    },
    Variable {
        name: "POLICY",
        meaning: "how rails are chosen: fixed, round-robin or least-outstanding",
        set: |s, text| match POLICIES.iter().find(|(name, _)| *name == text) {
            Some(&(_, policy)) => {
                s.policy = policy;
                Ok(())
            }
            None => Err("fixed, round-robin or least-outstanding".into()),
        },
        show: |s| policy_name(s.policy).into(),
    },
    Variable {
        name: "WINDOW",
        meaning: "sequence numbers that a stream may have in flight, a power of two; the same on \
            both sides",
        set: |s, text| narrow(text).map(|n| s.window = n),
        show: |s| s.window.to_string(),
    },
    Variable {
        name: "BATCH",
        meaning: "events that one pass handles per queue",
        set: |s, text| narrow(text).map(|n| s.batch = n),
        show: |s| s.batch.to_string(),
    },
    Variable {
        name: "EAGER",
        meaning: "longest payload of a put-signal that travels as one message, in bytes",
        set: |s, text| {
            size(text).and_then(|n| u32::try_from(n).map_err(|_| SIZE.into())).map(|n| s.eager = n)
        },
        show: |s| sizes::show(s.eager as usize),
    },
    Variable {
        name: "STRIPE_THRESHOLD",
        meaning: "smallest operation that is spread over rails, in bytes",
        set: |s, text| size(text).map(|n| s.stripe_threshold = n),
        show: |s| sizes::show(s.stripe_threshold as usize),
    },
    Variable {
        name: "STRIPE_CHUNK",
        meaning: "size of the pieces of such an operation, in bytes",
        set: |s, text| size(text).map(|n| s.stripe_chunk = n),
        show: |s| sizes::show(s.stripe_chunk as usize),
    },
    Variable {
        name: "ACK_AGE",
        meaning: "passes after which a pending acknowledgement is sent on its own",
        set: |s, text| narrow(text).map(|n| s.ack_age = n),
        show: |s| s.ack_age.to_string(),
    },
    Variable {
        name: "CONTEXTS",
        meaning: "independent streams per peer, 1 to 256; the same on both sides",
        set: |s, text| {
            number(text)
                .and_then(|n| u16::try_from(n).map_err(|_| "from 1 to 256".into()))
                .map(|n| s.contexts = n)
        },
        show: |s| s.contexts.to_string(),
    },
    Variable {
        name: "NATIVE_ATOMICS",
        meaning: "whether providers execute atomics, on or off; if on, providers without atomics \
            are not used",
        set: |s, text| switch(text).map(|on| s.native_atomics = on),
        show: |s| if s.native_atomics { "on" } else { "off" }.into(),
    },
    Variable {
        name: "NIC_DEVICE_MEMORY",
        meaning: "whether NICs access device memory if they can, on or off; if off, it travels \
            through host memory",
        set: |s, text| switch(text).map(|on| s.nic_device_memory = on),
        show: |s| if s.nic_device_memory { "on" } else { "off" }.into(),
    },
    Variable {
        name: "DEADLINE",
        meaning: "time limit of an operation, in milliseconds or as 5s, after which its peer \
            fails; perf: --timeout",
        set: |s, text| {
            let time = sizes::time_in(text, 0.001);
            s.deadline = time.ok_or("milliseconds, at least 1, or a time such as 500ms or 5s")?;
            Ok(())
        },
        show: |s| s.deadline.as_millis().to_string(),
    },
];

/// Returns the settings of a run from the environment. `window` is the default window. `timeout` is
/// the default deadline of operations.
pub fn for_run(window: u32, timeout: Duration) -> Outcome<Settings> {
    from_environment(Settings { window, deadline: timeout, ..Settings::DEFAULT })
}

/// The variables that must be the same on both sides.
const BOTH: [&str; 2] = ["WINDOW", "CONTEXTS"];

pub fn for_other_side(window: u32, settings: &Settings) -> String {
    let usual = Settings { window, ..Settings::DEFAULT };
    let differ =
        VARIABLES.iter().filter(|variable| BOTH.contains(&variable.name)).filter_map(|variable| {
            let value = variable.show(settings);
            (value != variable.show(&usual)).then(|| format!("{PREFIX}{}={value} ", variable.name))
        });
    differ.collect()
}

/// Returns the settings from the environment of this process. Variables that are not set get their
/// value from `defaults`.
///
/// # Errors
/// Names the first variable that is unknown or has an invalid value, and the allowed values.
pub fn from_environment(defaults: Settings) -> Outcome<Settings> {
    let pairs = env::vars_os().filter_map(|(name, value)| {
        let name = name.to_str()?.strip_prefix(PREFIX)?.to_owned();
        if JOB.contains(&name.as_str()) {
            return None;
        }
        Some((name, value.to_string_lossy().into_owned()))
    });
    read(defaults, pairs)
}

fn read(
    mut settings: Settings,
    pairs: impl Iterator<Item = (String, String)>,
) -> Outcome<Settings> {
    let mut pairs: Vec<_> = pairs.collect();
    pairs.sort();
    for (name, value) in pairs {
        let Some(variable) = VARIABLES.iter().find(|variable| variable.name == name) else {
            let known: Vec<String> =
                VARIABLES.iter().map(|v| format!("{PREFIX}{}", v.name)).collect();
            return Err(Failure::usage(format!(
                "{PREFIX}{name}: no such variable; use one of {}",
                known.join(", ")
            )));
        };
        let bad = |allowed: &str| {
            Failure::usage(format!(
                "{PREFIX}{name}={value}: the value must be {allowed}; correct or unset it"
            ))
        };
        (variable.set)(&mut settings, value.trim()).map_err(|allowed| bad(&allowed))?;
        settings.check().map_err(|error| bad(error.allowed))?;
    }
    Ok(settings)
}

const SIZE: &str = "bytes, or a number with K, M or G, such as 64K";

fn list(text: &str) -> Result<Vec<String>, String> {
    Ok(match text {
        "" => vec![],
        text => text.split(',').map(|name| name.trim().to_owned()).collect(),
    })
}

fn switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("on or off".into()),
    }
}

fn number(text: &str) -> Result<u64, String> {
    sizes::parse_count(text).map_err(|_| "a whole number".into())
}

fn narrow(text: &str) -> Result<u32, String> {
    sizes::parse_count(text).map_err(|_| "a whole number below 2^32".into())
}

fn size(text: &str) -> Result<u64, String> {
    sizes::parse(text).map(|n| n as u64).map_err(|_| SIZE.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &str, value: &str) -> Outcome<Settings> {
        read(Settings::DEFAULT, [(name.to_owned(), value.to_owned())].into_iter())
    }

    #[test]
    fn every_variable_reads_what_it_writes_and_changes_something() {
        let others = [
            "tcp,efa",
            "eth0,eth1",
            "3",
            "5",
            "/x/libfabric.so.1",
            "fixed",
            "64",
            "7",
            "1K",
            "1M",
            "8K",
            "3",
            "2",
            "on",
            "off",
            "250",
        ];
        assert_eq!(VARIABLES.len(), others.len());
        for (variable, other) in VARIABLES.iter().zip(others) {
            let default = variable.show(&Settings::DEFAULT);
            assert_eq!(
                with(variable.name, &default).unwrap(),
                Settings::DEFAULT,
                "{}",
                variable.name
            );
            let changed = with(variable.name, other).unwrap();
            assert_ne!(changed, Settings::DEFAULT, "{}", variable.name);
            assert_eq!(variable.show(&changed), other, "{}", variable.name);
        }
        assert_eq!(read(Settings::DEFAULT, std::iter::empty()).unwrap(), Settings::DEFAULT);
    }

    #[test]
    fn what_must_match_is_told_to_the_other_side() {
        let told = |name, value| for_other_side(256, &with(name, value).unwrap());
        assert_eq!(told("WINDOW", "256"), "", "the default");
        assert_eq!(told("WINDOW", "64"), "FISHPLATE_WINDOW=64 ");
        let both = Settings { contexts: 2, ..with("WINDOW", "64").unwrap() };
        assert_eq!(for_other_side(128, &both), "FISHPLATE_WINDOW=64 FISHPLATE_CONTEXTS=2 ");
    }

    #[test]
    fn bad_values_name_the_variable_and_the_remedy() {
        for (name, value, says) in [
            ("WINDOW", "3", "power of two"),
            ("WINDOW", "many", "whole number"),
            ("WINDOW", "-1", "whole number"),
            ("MAX_RAILS", "17", "from 1 to 16"),
            ("MAX_RAILS", "", "whole number"),
            ("BATCH", "0", "at least 1"),
            ("POLICY", "random", "least-outstanding"),
            ("STRIPE_CHUNK", "0", "2 GiB"),
            ("STRIPE_THRESHOLD", "8X", "64K"),
            ("EAGER", "8G", "64K"),
            ("CONTEXTS", "65537", "256"),
            ("PROVIDER", "tcp,,efa", "names of providers"),
            ("INTERFACES", "eth0,,eth1", "names of interfaces"),
            ("NATIVE_ATOMICS", "1", "on or off"),
            ("DEADLINE", "0", "500ms"),
            ("WINDOWS", "8", "FISHPLATE_WINDOW,"),
        ] {
            let failure = with(name, value).unwrap_err();
            let told = failure.to_string();
            assert!(told.contains(&format!("FISHPLATE_{name}")) && told.contains(says), "{told}");
            assert_eq!(failure.code(), 2);
        }
    }
}
