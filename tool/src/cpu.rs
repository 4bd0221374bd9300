//! Finds the processors of this machine, and pins the two sides of a run to processors.
//!
//! Reads sysfs once at start.

use std::collections::BTreeMap;
use std::fs;
use std::str::FromStr;

use fishplate_sys::affinity;
use serde::{Deserialize, Serialize};

use super::failure::{Failure, Outcome};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// Two processors on different cores, if there are two cores.
    Auto,
    /// No pinning: the scheduler decides.
    None,
    /// These processors, for this side and the other.
    Cpus(usize, usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Places {
    pub cpus: Option<(usize, usize)>,
}

impl FromStr for Pin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Pin::Auto),
            "none" => Ok(Pin::None),
            _ => match text.split_once(',').map(|(a, b)| (a.trim().parse(), b.trim().parse())) {
                Some((Ok(a), Ok(b))) => Ok(Pin::Cpus(a, b)),
                _ => Err(format!("`{text}`: use auto, none, or two processor numbers such as 0,1")),
            },
        }
    }
}

impl Pin {
    pub fn resolve(self) -> Outcome<Places> {
        let allowed = allowed()?;
        let cpus = match self {
            Pin::None => None,
            Pin::Auto => two_cores(&allowed, &core_of),
            Pin::Cpus(a, b) => {
                for cpu in [a, b] {
                    if !allowed.contains(&cpu) {
                        return Err(Failure::usage(format!(
                            "--pin {a},{b}: processor {cpu} is not available to this process; it \
                             may use {}",
                            list(&allowed)
                        )));
                    }
                }
                Some((a, b))
            }
        };
        Ok(Places { cpus })
    }
}

impl Places {
    /// Pins the calling thread to the starting side's processor. Returns `None` if the sides are
    /// not pinned.
    pub fn pin_first(&self) -> Outcome<Option<Pinned>> {
        self.cpus.map(|(first, _)| pin(first)).transpose()
    }

    /// Returns whether both sides share one processor: they are pinned to it, or this process may
    /// use only one.
    pub fn crowded(&self) -> bool {
        match self.cpus {
            Some((a, b)) => a == b,
            None => allowed().is_ok_and(|allowed| allowed.len() < 2),
        }
    }

    pub fn describe(&self) -> String {
        match self.cpus {
            Some((a, b)) => format!("{a},{b}"),
            None => "none".into(),
        }
    }
}

/// Dropping this restores the thread's former processors.
#[must_use]
pub struct Pinned {
    before: affinity::CpuSet,
}

pub fn pin(cpu: usize) -> Outcome<Pinned> {
    let before = set()?;
    affinity::pin(cpu).map_err(|error| {
        Failure::run(format!("cannot pin to processor {cpu}: {error}; use --pin none"))
    })?;
    Ok(Pinned { before })
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // If this fails the thread stays pinned, which is only slower.
        let _ = affinity::allow(&self.before);
    }
}

pub fn allowed() -> Outcome<Vec<usize>> {
    Ok(set()?.iter().collect())
}

fn set() -> Outcome<affinity::CpuSet> {
    affinity::allowed().map_err(|error| {
        Failure::run(format!("cannot read the processors of this process: {error}"))
    })
}

/// Returns the core of a processor, identified by the lowest processor number on that core.
fn core_of(cpu: usize) -> usize {
    fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        .ok()
        .and_then(|list| list.split([',', '-']).next()?.trim().parse().ok())
        .unwrap_or(cpu)
}

/// Returns the first two processors that are on different cores. If there is only one core, returns
/// two processors of that core.
fn two_cores(allowed: &[usize], core_of: &dyn Fn(usize) -> usize) -> Option<(usize, usize)> {
    let mut cores = BTreeMap::new();
    for &cpu in allowed {
        cores.entry(core_of(cpu)).or_insert(cpu);
    }
    let mut firsts = cores.into_values();
    match (firsts.next(), firsts.next()) {
        (Some(a), Some(b)) => Some((a, b)),
        _ => Some((*allowed.first()?, *allowed.get(1)?)),
    }
}

/// Formats processor numbers as ranges: `0-3,8`.
pub fn list(cpus: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &cpu in cpus {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => runs.push((cpu, cpu)),
        }
    }
    let show = |&(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    runs.iter().map(show).collect::<Vec<_>>().join(",")
}

pub fn model() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name =
        text.lines().find(|line| line.starts_with("model name") || line.starts_with("CPU part"));
    name.and_then(|line| line.split_once(':'))
        .map_or_else(|| "unknown".into(), |(_, name)| name.trim().into())
}

pub fn cache_line() -> Option<usize> {
    let path = "/sys/devices/system/cpu/cpu0/cache/index0/coherency_line_size";
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_are_read() {
        assert_eq!("auto".parse(), Ok(Pin::Auto));
        assert_eq!("none".parse(), Ok(Pin::None));
        assert_eq!("3, 5".parse(), Ok(Pin::Cpus(3, 5)));
        for bad in ["", "1", "1,", "a,b", "1,2,3", "-1,0"] {
            assert!(bad.parse::<Pin>().unwrap_err().contains(&format!("`{bad}`")));
        }
    }

    #[test]
    fn two_cores_are_preferred_to_two_threads() {
        let siblings = |cpu: usize| cpu / 2 * 2;
        assert_eq!(two_cores(&[0, 1, 2, 3], &siblings), Some((0, 2)));
        assert_eq!(two_cores(&[4, 5], &siblings), Some((4, 5)));
        assert_eq!(two_cores(&[7], &siblings), None);
        assert_eq!(two_cores(&[], &siblings), None);
    }

    #[test]
    fn runs_are_joined() {
        assert_eq!(list(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
        assert_eq!(list(&[]), "");
    }

    #[test]
    fn a_processor_that_is_not_there_is_named() {
        let failure = Pin::Cpus(0, 100_000).resolve().unwrap_err();
        assert!(
            failure.to_string().contains("processor 100000") && failure.code() == 2,
            "{failure}"
        );
    }
}
