//! Runs each scenario repeatedly with all contenders in turn.

use super::scenario::{Figures, Pools, Scenario};

#[derive(Clone, Debug)]
pub struct PoolRow {
    pub pool: &'static str,
    pub scenario: String,
    pub streams: usize,
    /// Medians of the repetitions.
    pub figures: Figures,
    /// Minimum processor time per operation over all repetitions, in nanoseconds.
    pub min_ns: f64,
    /// `min_ns` divided by the `min_ns` of one stream in the same scenario. Only for
    /// [`Scenario::Streams`].
    pub to_one_stream: Option<f64>,
}

impl PoolRow {
    /// No name needs escaping.
    pub fn json(&self, schema_version: u32) -> String {
        let PoolRow { pool, scenario, streams, figures, min_ns, to_one_stream } = self;
        let Figures { ns_per_op, ops_per_s, p99_ns } = figures;
        let to_one_stream = to_one_stream.map_or("null".into(), |ratio| format!("{ratio:.3}"));
        format!(
            "{{\"schema_version\":{schema_version},\"test\":\"pool\",\"pool\":\"{pool}\",\
             \"scenario\":\"{scenario}\",\"streams\":{streams},\"ns_per_op\":{ns_per_op:.3},\
             \"ops_per_s\":{ops_per_s:.0},\"p99_ns\":{p99_ns:.3},\"min_ns_per_op\":{min_ns:.3},\
             \"to_one_stream\":{to_one_stream}}}"
        )
    }
}

pub type Contender = (&'static str, fn(Scenario, usize, u64) -> Option<Figures>);

pub fn contender<P: Pools>() -> Contender {
    (P::NAME, |scenario, streams, ops| scenario.run::<P>(streams, ops))
}

/// The contenders take turns.
pub const REPEATS: usize = 5;

/// Runs all scenarios. Calls `row` with each row as soon as it is complete.
pub fn run<E>(
    contenders: &[Contender],
    scenarios: &[(Scenario, usize)],
    ops: u64,
    mut row: impl FnMut(PoolRow) -> Result<(), E>,
) -> Result<(), E> {
    let mut one_stream = vec![None; contenders.len()];
    for &(scenario, streams) in scenarios {
        let mut figures: Vec<Vec<Figures>> = vec![vec![]; contenders.len()];
        for _ in 0..REPEATS {
            for ((_, contend), figures) in contenders.iter().zip(&mut figures) {
                figures.extend(contend(scenario, streams, ops));
            }
        }
        for (((pool, _), figures), one_stream) in
            contenders.iter().zip(figures).zip(&mut one_stream)
        {
            let median = |of: fn(&Figures) -> f64| {
                let mut values: Vec<_> = figures.iter().map(of).collect();
                values.sort_by(f64::total_cmp);
                values[values.len() / 2]
            };
            if figures.is_empty() {
                continue;
            }
            let min_ns = figures.iter().map(|f| f.ns_per_op).fold(f64::INFINITY, f64::min);
            let figures = Figures {
                ns_per_op: median(|f| f.ns_per_op),
                ops_per_s: median(|f| f.ops_per_s),
                p99_ns: median(|f| f.p99_ns),
            };
            let to_one_stream = match scenario {
                Scenario::Streams => {
                    if streams == 1 {
                        *one_stream = Some(min_ns);
                    }
                    one_stream.map(|one| min_ns / one)
                }
                _ => None,
            };
            row(PoolRow {
                pool,
                scenario: scenario.name(),
                streams,
                figures,
                min_ns,
                to_one_stream,
            })?;
        }
    }
    Ok(())
}
