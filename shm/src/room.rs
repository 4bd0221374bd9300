//! Checks for free memory before an allocation. Without a check, the kernel would send a signal
//! instead of returning an error: SIGXFSZ beyond the file size limit, and SIGKILL beyond the memory
//! of a control group or the machine. Slow path: reads some small files.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::SegmentError;

/// Smaller allocations, in bytes, are not checked: [`RESERVE`] covers them.
const SMALL: usize = 1 << 20;

/// Free memory of the machine or control group that we leave to other programs, in bytes.
const RESERVE: u64 = 16 << 20;

/// Checks that the machine, and each control group of this process, has `len` bytes of available
/// memory, besides a reserve of 16 MiB. Does not check lengths below 1 MiB. Other allocations may
/// use up the memory after the check.
///
/// # Errors
/// [`SegmentError::Room`], with the available bytes.
pub fn check_room(len: usize) -> Result<(), SegmentError> {
    check_within(len, Path::new("/"))
}

/// Checks the file size limit of this process for a file of `len` bytes. Shared memory counts as a
/// file.
///
/// # Errors
/// [`SegmentError::FileSize`], with the limit.
pub(crate) fn check_file(len: usize) -> Result<(), SegmentError> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a local structure of the type that the call fills.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) } == 0;
    match known && limit.rlim_cur != libc::RLIM_INFINITY && len as u64 > limit.rlim_cur {
        true => Err(SegmentError::FileSize { asked: len as u64, limit: limit.rlim_cur }),
        false => Ok(()),
    }
}

fn check_within(len: usize, root: &Path) -> Result<(), SegmentError> {
    if len < SMALL {
        return Ok(());
    }
    let there = available(root).saturating_sub(RESERVE);
    match len as u64 > there {
        true => Err(SegmentError::Room { asked: len as u64, there }),
        false => Ok(()),
    }
}

/// The minimum over the machine and each control group. Unreadable files set no limit.
fn available(root: &Path) -> u64 {
    let machine = meminfo(root).unwrap_or(u64::MAX);
    groups(root).iter().filter_map(|group| left_in(group)).fold(machine, u64::min)
}

/// Free memory, reclaimable memory and swap.
fn meminfo(root: &Path) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let kib = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').trim().trim_end_matches("kB").trim().parse().ok()
    };
    Some(kib("MemAvailable")?.saturating_add(kib("SwapFree").unwrap_or(0)).saturating_mul(1024))
}

/// Returns the directories of this process's memory control groups, up to the root, for versions 1
/// and 2. In a container the path may be the host's path. Then the last parts of the path do not
/// exist in the container, and the root is the container's control group.
fn groups(root: &Path) -> Vec<PathBuf> {
    let text = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut all = vec![];
    for line in text.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let mounts: &[&str] = match controllers {
            "" => &["sys/fs/cgroup", "sys/fs/cgroup/unified"],
            list if list.split(',').any(|name| name == "memory") => &["sys/fs/cgroup/memory"],
            _ => continue,
        };
        let path = Path::new(path.trim_start_matches('/'));
        for mount in mounts {
            all.extend(path.ancestors().map(|part| root.join(mount).join(part)));
        }
    }
    all
}

/// Includes reclaimable file pages. `None` if the control group has no limit.
fn left_in(group: &Path) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    let second = |limit| Some((limit, number("memory.current")?, "inactive_file "));
    let first = || {
        Some((
            number("memory.limit_in_bytes")?,
            number("memory.usage_in_bytes")?,
            "total_inactive_file ",
        ))
    };
    let (limit, used, dropped) = match number("memory.max") {
        Some(limit) => second(limit)?,
        None => first()?,
    };
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let dropped: u64 = stat
        .lines()
        .find_map(|line| line.strip_prefix(dropped))
        .and_then(|bytes| bytes.trim().parse().ok())
        .unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(dropped)))
}

#[cfg(test)]
mod tests;
