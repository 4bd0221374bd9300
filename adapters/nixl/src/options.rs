//! The parameters that programs pass when they create a backend.

use fishplate::Limits;
use fishplate::config::Settings;
use fishplate::core::engine::protocol::MatchConfig;
use fishplate::node::{Builder, Fabric};

use std::time::Duration;

/// Parameter names and defaults.
pub(crate) const DEFAULTS: [(&str, &str); 5] = [
    ("fabric", "auto"),
    ("providers", ""),
    ("interfaces", ""),
    ("shared_memory", "yes"),
    ("failover", "yes"),
];

/// Table sizes of an agent's node.
const LIMITS: Limits = Limits { peers: 128, locals: 4096, remotes: 16384, operations: 4096 };

/// Limits for unexpected messages. Beyond them, messages wait at the sender.
const MATCHING: MatchConfig = MatchConfig {
    credits: 64,
    headers: 64,
    shared_credits: 1 << 16,
    shared_headers: 1 << 18,
    ..MatchConfig::DEFAULT
};

/// Converts parameters to the settings of a node.
///
/// # Errors
/// A message that names the parameter and the allowed values.
pub(crate) fn builder(params: &[(String, String)]) -> Result<Builder, String> {
    let mut settings = Settings::DEFAULT;
    let (mut fabric, mut local, mut failover) = (Fabric::IfThere, true, true);
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
            "shared_memory" => local = flag()?,
            "failover" => failover = flag()?,
            _ => {
                let known = DEFAULTS.map(|(name, _)| name).join(", ");
                return Err(format!("unknown parameter: {name}; use one of {known}"));
            }
        }
    }
    Ok(fishplate::Node::builder()
        .settings(settings)
        .limits(LIMITS)
        .receives(1024)
        .matching(MATCHING)
        .fabric(fabric)
        .shared_memory(local)
        .failover(failover)
        .patience(Duration::ZERO))
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
        for name in ["fabric", "shared_memory", "failover", "speed"] {
            let error = with(name, "fast").unwrap_err();
            assert!(error.contains(name), "{error}");
        }
    }
}
