//! Counters of libfabric rails, as text and as JSON.

use std::iter::once;

use fishplate_core::engine::RailStats;
use serde::{Serialize, Serializer};

use super::sizes::time;

/// Number of the counters that add up. The others are times.
pub const GROWING: usize = RailStats::NAMES.len() - 2;

/// The counters of a rail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OneRail {
    /// The number of the rail.
    pub rail: u64,
    /// The counters, in the order of [`RailStats::NAMES`].
    pub values: [u64; RailStats::NAMES.len()],
}

impl OneRail {
    fn since(self, before: OneRail) -> OneRail {
        let mut now = self;
        now.values.iter_mut().zip(before.values).take(GROWING).for_each(|(now, then)| *now -= then);
        now
    }

    /// Describes what has happened to the rail, or returns `None` if that is nothing.
    pub fn text(&self) -> Option<String> {
        let [failed, fenced, returned, reposted, late, last, longest] = self.values;
        if self.values[..GROWING].iter().all(|&value| value == 0) {
            return None;
        }
        let resumed = match longest {
            0 => String::new(),
            _ => format!(", resumed in {}, at most {}", time(last as f64), time(longest as f64)),
        };
        Some(format!(
            "failed {failed}, fenced {fenced}, returned {returned}; posted again {reposted}; late \
             {late}{resumed}"
        ))
    }
}

impl Serialize for OneRail {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let values = RailStats::NAMES.into_iter().zip(self.values);
        to.collect_map(once(("rail", self.rail)).chain(values))
    }
}

/// What happened to the rails. Counted on the measuring side.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Rails {
    /// Rails that failed.
    pub failed: u64,
    /// Rails that returned.
    pub returned: u64,
    /// Posts that were made again on another rail.
    pub reposted: u64,
    #[serde(rename = "rails")]
    pub each: Vec<OneRail>,
}

impl Rails {
    /// Returns what happened since the counts `before`.
    pub fn since(&self, before: &Rails) -> Rails {
        let then = |at| before.each.get(at).copied().unwrap_or_default();
        Rails {
            failed: self.failed - before.failed,
            returned: self.returned - before.returned,
            reposted: self.reposted - before.reposted,
            each: self.each.iter().enumerate().map(|(at, now)| now.since(then(at))).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_a_row_leave_out_what_came_before() {
        let rails = |values| {
            let each = vec![OneRail { rail: 0, values }];
            Rails { failed: values[0], returned: values[2], reposted: values[3], each }
        };
        let (before, now) = (rails([1, 1, 1, 5, 0, 900, 900]), rails([3, 2, 1, 7, 0, 400, 900]));
        let since = now.since(&before);
        assert_eq!(since, rails([2, 1, 0, 2, 0, 400, 900]));
        assert_eq!(
            since.each[0].text().unwrap(),
            "failed 2, fenced 1, returned 0; posted again 2; late 0, resumed in 400.0ns, at most \
             900.0ns"
        );
        assert_eq!(now.since(&now).each[0].text(), None);
        let json = serde_json::to_value(&since).unwrap();
        assert_eq!(
            (&json["rails"][0]["fenced"], &json["rails"][0]["resumed_ns"]),
            (&1.into(), &400.into())
        );
    }
}
