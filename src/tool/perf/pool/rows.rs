//! Runs the scenarios with the contenders in turn, several times over, and makes one row of each pair.

use super::scenario::{Figures, Pools, Scenario};

/// One line of results.
#[derive(Clone, Debug)]
pub struct PoolRow {
    /// Who.
    pub pool: &'static str,
    /// What, as [`Scenario::name`] says.
    pub scenario: String,
    /// Threads that take.
    pub streams: usize,
    /// Median of the repetitions.
    pub figures: Figures,
}

impl PoolRow {
    /// The row as a JSON object. No name in it needs escaping.
    pub fn json(&self, schema_version: u32) -> String {
        let PoolRow { pool, scenario, streams, figures: Figures { ns_per_op, ops_per_s, p99_ns } } = self;
        format!(
            "{{\"schema_version\":{schema_version},\"test\":\"pool\",\"pool\":\"{pool}\",\"scenario\":\"{scenario}\",\
             \"streams\":{streams},\"ns_per_op\":{ns_per_op:.3},\"ops_per_s\":{ops_per_s:.0},\"p99_ns\":{p99_ns:.3}}}"
        )
    }
}

/// A contender, of whichever type.
pub type Contender = (&'static str, fn(Scenario, usize, u64) -> Option<Figures>);

/// Makes one of a type.
pub fn contender<P: Pools>() -> Contender {
    (P::NAME, |scenario, streams, ops| scenario.run::<P>(streams, ops))
}

/// Repetitions of each scenario, in which contenders take turns.
pub const REPEATS: usize = 5;

/// Runs everything, and hands each row over as soon as it is there.
pub fn run<E>(
    contenders: &[Contender],
    scenarios: &[(Scenario, usize)],
    ops: u64,
    mut row: impl FnMut(PoolRow) -> Result<(), E>,
) -> Result<(), E> {
    for &(scenario, streams) in scenarios {
        let mut figures: Vec<Vec<Figures>> = vec![vec![]; contenders.len()];
        for _ in 0..REPEATS {
            for ((_, contend), figures) in contenders.iter().zip(&mut figures) {
                figures.extend(contend(scenario, streams, ops));
            }
        }
        for ((pool, _), figures) in contenders.iter().zip(figures) {
            let median = |of: fn(&Figures) -> f64| {
                let mut values: Vec<_> = figures.iter().map(of).collect();
                values.sort_by(f64::total_cmp);
                values[values.len() / 2]
            };
            if figures.is_empty() {
                continue;
            }
            let figures = Figures {
                ns_per_op: median(|f| f.ns_per_op),
                ops_per_s: median(|f| f.ops_per_s),
                p99_ns: median(|f| f.p99_ns),
            };
            row(PoolRow { pool, scenario: scenario.name(), streams, figures })?;
        }
    }
    Ok(())
}
