//! Converts the arguments of `Node(...)` to a builder.

use std::time::Duration;

use fishplate::config::Settings;
use fishplate::node::{Builder, Fabric, Gpu};
use fishplate::worker::Options;
use fishplate::{Limits, Node};
use pyo3::prelude::*;

use crate::error::misuse;

/// Opening a node allocates the tables.
const MOST: Limits = Limits { peers: 4096, ..Limits::MAX };

#[derive(FromPyObject)]
pub(crate) enum Wanted {
    Count(usize),
    Name(String),
}

#[derive(FromPyObject)]
pub(crate) enum Worker {
    Wanted(bool),
    Cpu(usize),
}

pub(crate) struct Rails {
    pub fabric: Option<Wanted>,
    pub shared_memory: bool,
    pub providers: Vec<String>,
    pub interfaces: Vec<String>,
    pub max_rails: Option<usize>,
    pub local_rank: Option<usize>,
}

/// `None` selects the default.
pub(crate) struct Tables {
    pub peers: Option<u32>,
    pub regions: Option<u32>,
    pub imports: Option<u32>,
    pub operations: Option<u32>,
    pub receives: Option<u32>,
}

fn limit(py: Python<'_>, given: Option<u32>, default: u32, most: u32, name: &str) -> PyResult<u32> {
    match given.unwrap_or(default) {
        given if given <= most => Ok(given),
        given => Err(misuse(py, "setting", format!("invalid {name}: {given}; use at most {most}"))),
    }
}

fn fabric(py: Python<'_>, wanted: Option<Wanted>) -> PyResult<Fabric> {
    let name = match wanted {
        None => return Ok(Fabric::IfThere),
        Some(Wanted::Count(0)) => return Ok(Fabric::Off),
        Some(Wanted::Count(count)) => return Ok(Fabric::Exactly(count)),
        Some(Wanted::Name(name)) => name,
    };
    match name.as_str() {
        "auto" => Ok(Fabric::IfThere),
        "off" => Ok(Fabric::Off),
        "required" => Ok(Fabric::Required),
        _ => {
            let text = format!(
                "invalid fabric: {name:?}; use \"auto\", \"off\", \"required\" or a number of rails"
            );
            Err(misuse(py, "setting", text))
        }
    }
}

pub(crate) fn gpu(py: Python<'_>, name: &str) -> PyResult<Gpu> {
    let wrong = |_| {
        misuse(
            py,
            "setting",
            format!("invalid gpu: {name:?}; use \"cuda:N\", \"hip:N\" or \"stand-in\""),
        )
    };
    name.parse().map_err(wrong)
}

/// The [`Node`] that this builder opens waits neither for room nor for peers.
pub(crate) fn builder(
    py: Python<'_>,
    rails: Rails,
    tables: Tables,
    gpu: Option<Gpu>,
    worker: Option<Worker>,
) -> PyResult<Builder> {
    let defaults = Limits::DEFAULT;
    let limits = Limits {
        peers: limit(py, tables.peers, defaults.peers.into(), MOST.peers.into(), "peers")? as u16,
        locals: limit(py, tables.regions, defaults.locals.into(), MOST.locals.into(), "regions")?
            as u16,
        remotes: limit(py, tables.imports, defaults.remotes.into(), MOST.remotes.into(), "imports")?
            as u16,
        operations: limit(
            py,
            tables.operations,
            defaults.operations,
            MOST.operations,
            "operations",
        )?,
    };
    let Rails { fabric, shared_memory, providers, interfaces, max_rails, local_rank } = rails;
    let max_rails = max_rails.unwrap_or(Settings::DEFAULT.max_rails);
    let builder = Node::builder()
        .fabric(self::fabric(py, fabric)?)
        .shared_memory(shared_memory)
        .settings(Settings { providers, interfaces, max_rails, local_rank, ..Settings::DEFAULT })
        .limits(limits)
        // The methods of the class `Node` wait instead, in slices.
        .patience(Duration::ZERO)
        .connect_timeout(Duration::ZERO)
        .receives(limit(py, tables.receives, 1024, MOST.operations, "receives")? as usize);
    let builder = match gpu {
        Some(gpu) => builder.gpu(gpu),
        None => builder,
    };
    Ok(match worker {
        None | Some(Worker::Wanted(false)) => builder.wait_fd(),
        Some(Worker::Wanted(true)) => builder.worker(Options::default()),
        Some(Worker::Cpu(cpu)) => builder.worker(Options { cpu: Some(cpu), ..Options::default() }),
    })
}
