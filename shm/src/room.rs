//! Whether there is room for memory before it is taken. Where a limit is passed the system sends a
//! signal instead of an error: SIGXFSZ beyond the size that files may have, SIGKILL beyond what a
//! control group or the machine has. Slow path: reads some small files.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::SegmentError;

/// Below so many bytes the system's own reserve is room enough.
const SMALL: usize = 1 << 20;

/// Left for everybody else when the machine's or a group's memory is given out, in bytes.
const RESERVE: u64 = 16 << 20;

/// Checks that `len` bytes of memory can be had now, by the machine's memory and by the limits of
/// the control groups of this process. Memory that others take afterwards is not foreseen.
///
/// # Errors
/// [`SegmentError::Room`], with what can be had.
pub fn check_room(len: usize) -> Result<(), SegmentError> {
    check_within(len, Path::new("/"))
}

/// Checks that a file of `len` bytes, which shared memory counts as, can be made by this process.
///
/// # Errors
/// [`SegmentError::FileSize`], with the limit.
pub(crate) fn check_file(len: usize) -> Result<(), SegmentError> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is ours and of the type that the call fills.
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

/// Bytes that can be had: the least of what the machine has and of what each control group still
/// may take. What cannot be read limits nothing.
fn available(root: &Path) -> u64 {
    let machine = meminfo(root).unwrap_or(u64::MAX);
    groups(root).iter().filter_map(|group| left_in(group)).fold(machine, u64::min)
}

/// What the machine can give without killing anybody: free or reclaimable memory, and swap.
fn meminfo(root: &Path) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let kib = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').trim().trim_end_matches("kB").trim().parse().ok()
    };
    Some(kib("MemAvailable")?.saturating_add(kib("SwapFree").unwrap_or(0)).saturating_mul(1024))
}

/// The folders of the memory control groups of this process, up to their root, of either version.
/// In a container the path may be one of the host's: then its last parts do not exist here, and the
/// root is that of the container.
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

/// What a group may still take, pages of files that it can drop included; `None` without a limit.
fn left_in(group: &Path) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    let second = |limit| Some((limit, number("memory.current")?, "inactive_file "));
    let first =
        || Some((number("memory.limit_in_bytes")?, number("memory.usage_in_bytes")?, "total_inactive_file "));
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
