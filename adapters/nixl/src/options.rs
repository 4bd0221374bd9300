//! The parameters that programs pass when they create a backend.

use std::io::{self, Write};
use std::time::Duration;

use fishplate::config::Settings;
use fishplate::core::engine::protocol::MatchConfig;
use fishplate::gpu::cuda::Api;
use fishplate::node::{Builder, Fabric, Gpu, OpenError};
use fishplate::{Job, Limits, Node};

pub(crate) const DEFAULTS: [(&str, &str); 8] = [
    ("fabric", "auto"),
    ("providers", ""),
    ("interfaces", ""),
    ("local_rank", "auto"),
    ("shared_memory", "yes"),
    ("device", "auto"),
    ("failover", "yes"),
    ("counters", "no"),
];

const LIMITS: Limits = Limits { peers: 128, locals: 4096, remotes: 16384, operations: 4096 };

/// Limits for unexpected messages. Beyond them, messages wait at the sender.
const MATCHING: MatchConfig = MatchConfig {
    credits: 64,
    headers: 64,
    shared_credits: 1 << 16,
    shared_headers: 1 << 18,
    ..MatchConfig::DEFAULT
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// [`found_device`], if it can be opened.
    Auto,
    Off,
    Only(u32),
}

/// Returns the ordinal of this thread's current device, or 0 if there is none. Returns `None` if
/// there is no usable driver or no device.
pub(crate) fn found_device() -> Option<u32> {
    let count = Api::Cuda.devices().ok()?.len();
    (count != 0).then(|| Api::Cuda.current().unwrap_or(0))
}

/// Opens a node with the settings that the parameters select. Also returns the ordinal of its
/// device.
///
/// # Errors
/// A message for the program.
pub(crate) fn open(params: &[(String, String)]) -> Result<(Node, Option<u32>), String> {
    let (builder, wanted) = builder(params)?;
    let device = match wanted {
        Wanted::Auto => found_device(),
        Wanted::Off => None,
        Wanted::Only(ordinal) => Some(ordinal),
    };
    let with = device.map(|ordinal| builder.clone().gpu(Gpu::Cuda(ordinal)).open());
    match with {
        Some(Err(OpenError::Gpu(gpu, error))) if wanted == Wanted::Auto => {
            // A closed standard error must not cause a panic.
            _ = writeln!(
                io::stderr(),
                "fishplate: no device memory over NIXL: cannot open {gpu}: {error}"
            );
            builder.open().map(|node| (node, None))
        }
        Some(opened) => opened.map(|node| (node, device)),
        None => builder.open().map(|node| (node, None)),
    }
    .map_err(|error| error.to_string())
}

/// Converts parameters to the settings of a node, and the device.
///
/// # Errors
/// A message that names the parameter and the allowed values.
fn builder(params: &[(String, String)]) -> Result<(Builder, Wanted), String> {
    let mut settings = Settings::DEFAULT;
    let (mut fabric, mut local, mut failover) = (Fabric::IfThere, true, true);
    let mut counters = false;
    let mut device = Wanted::Auto;
    for (name, value) in params {
        let list = || value.split(',').filter(|part| !part.is_empty()).map(String::from).collect();
        let flag = || match value.as_str() {
            "yes" => Ok(true),
            "no" => Ok(false),
            _ => Err(format!("invalid parameter {name}: \"{value}\"; use yes or no")),
        };
        match name.as_str() {
            "fabric" => {
                fabric = match (value.as_str(), value.parse()) {
                    ("auto", _) => Fabric::IfThere,
                    ("off", _) => Fabric::Off,
                    (_, Ok(rails)) => Fabric::Exactly(rails),
                    _ => {
                        return Err(format!(
                            "invalid parameter fabric: \"{value}\"; use auto, off or a number"
                        ));
                    }
                };
            }
            "providers" => settings.providers = list(),
            "interfaces" => settings.interfaces = list(),
            "local_rank" => {
                settings.local_rank = match (value.as_str(), value.parse()) {
                    ("auto", _) => None,
                    (_, Ok(rank)) => Some(rank),
                    _ => {
                        return Err(format!(
                            "invalid parameter local_rank: \"{value}\"; use auto or a number"
                        ));
                    }
                };
            }
            "shared_memory" => local = flag()?,
            "failover" => failover = flag()?,
            "counters" => counters = flag()?,
            "device" => {
                device = match (value.as_str(), value.parse()) {
                    ("auto", _) => Wanted::Auto,
                    ("off", _) => Wanted::Off,
                    (_, Ok(Gpu::Cuda(ordinal))) => Wanted::Only(ordinal),
                    _ => {
                        return Err(format!(
                            "invalid parameter device: \"{value}\"; use auto, off or cuda:N"
                        ));
                    }
                };
            }
            _ => {
                let known = DEFAULTS.map(|(name, _)| name).join(", ");
                return Err(format!("unknown parameter: {name}; use one of {known}"));
            }
        }
    }
    if settings.local_rank.is_none() {
        settings.local_rank = Job::local_rank_in_env().map_err(|error| error.to_string())?;
    }
    let builder = Node::builder()
        .settings(settings)
        .limits(LIMITS)
        .receives(1024)
        .matching(MATCHING)
        .fabric(fabric)
        .shared_memory(local)
        .failover(failover)
        .patience(Duration::ZERO);
    Ok((if counters { builder.counters() } else { builder }, device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_parameter_is_named() {
        let with = |name: &str, value: &str| builder(&[(name.into(), value.into())]).map(drop);
        for (name, value) in DEFAULTS {
            assert_eq!(with(name, value), Ok(()));
        }
        for name in
            ["fabric", "local_rank", "shared_memory", "failover", "counters", "device", "speed"]
        {
            let error = with(name, "fast").unwrap_err();
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn counters_are_published_if_asked_for() {
        let pages = || fishplate::counters::read(std::process::id()).unwrap().len();
        let open = |asked: &str| {
            open(&[("fabric".into(), "off".into()), ("counters".into(), asked.into())]).unwrap().0
        };
        let none = open("no");
        assert_eq!(pages(), 0);
        let node = open("yes");
        assert_eq!(pages(), 1);
        drop((none, node));
    }
}
