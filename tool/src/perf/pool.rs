//! Compares our pool with other pools in one process: the cost of an operation, and how it changes
//! with the number of streams. benches/ runs the same scenarios with more pools.

mod contenders;
mod rows;
mod scenario;

use super::super::args::{Format, Plan};
use super::super::failure::{Failure, Outcome};
use super::super::interrupt;
use super::super::report::{SCHEMA_VERSION, print};

use contenders::{Boxes, Fishplate, GlobalRing, RingPerQueue};
use scenario::Scenario;

const OPS: u64 = 200_000;

pub fn run(plan: &Plan) -> Outcome {
    interrupt::end_at_once();
    let contenders = [
        rows::contender::<Fishplate>(),
        rows::contender::<GlobalRing>(),
        rows::contender::<RingPerQueue>(),
        rows::contender::<Boxes>(),
    ];
    let cores = std::thread::available_parallelism()
        .map_err(|error| Failure::run(format!("cannot count the processors: {error}")))?;
    match plan.format {
        Format::Json => {}
        Format::Csv => print(concat!(
            "schema_version,test,pool,scenario,streams,ns_per_op,ops_per_s,p99_ns,",
            "min_ns_per_op,to_one_stream\n"
        ))?,
        Format::Table => print(&format!(
            "# fishplate {} perf pool  processors={cores} repeats={} build={}\n{:<14} {:>7}  \
             {:<22} {:>10} {:>10} {:>8} {:>14} {:>10}\n",
            env!("CARGO_PKG_VERSION"),
            rows::REPEATS,
            if cfg!(debug_assertions) { "debug (figures mean nothing)" } else { "release" },
            "scenario",
            "streams",
            "pool",
            "ns/op",
            "min ns/op",
            "to one",
            "ops/s",
            "p99 ns",
        ))?,
    }
    let scenarios = Scenario::all(&plan.streams);
    rows::run(&contenders, &scenarios, plan.iters.unwrap_or(OPS), |row| {
        let rows::PoolRow { pool, scenario, streams, figures, min_ns, to_one_stream } = &row;
        let (ns, ops, p99) = (figures.ns_per_op, figures.ops_per_s, figures.p99_ns);
        let to_one = to_one_stream.map_or(String::new(), |ratio| format!("{ratio:.2}"));
        print(&match plan.format {
            Format::Json => format!("{}\n", row.json(SCHEMA_VERSION)),
            Format::Csv => {
                format!(
                    "{SCHEMA_VERSION},pool,{pool},{scenario},{streams},{ns:.3},{ops:.0},{p99:.3},{min_ns:.3},{to_one}\n"
                )
            }
            Format::Table => {
                format!(
                    "{scenario:<14} {streams:>7}  {pool:<22} {ns:>10.2} {min_ns:>10.2} {to_one:>8} \
                     {ops:>14.0} {p99:>10.2}\n"
                )
            }
        })
    })
}
