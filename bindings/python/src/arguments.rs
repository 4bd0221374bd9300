//! Converts the arguments of calls.

use std::sync::Arc;
use std::time::Duration;

use fishplate::core::engine::tag::Tag;
use fishplate::core::op::{Amo, AmoOp, Cmp, SignalOp};
use fishplate::node::{Slice as Range, Source};
use fishplate::{Issued, LocalAddr, Node, PeerId, RemoteAddr};
use pyo3::types::{PyAnyMethods, PyBytes, PyBytesMethods};
use pyo3::{Bound, PyAny, PyResult, Python};

use crate::error::{Fault, misuse};
use crate::inner::Inner;
use crate::lease::Held;
use crate::memory::{Memory, Slice};
use crate::peer::{Peer, Place, Remote};
use crate::shared::{HELD_MAX, Shared};
use crate::view::View;

pub(crate) enum Data<'py> {
    /// A range of the node's memory, and its length.
    Region(Range, usize),
    /// A `bytes` object, which is immutable.
    Bytes(Bound<'py, PyBytes>),
    View(View),
    Device(Arc<View>),
}

#[derive(Clone, Copy)]
pub(crate) enum Payload<'a> {
    Region(Range),
    Bytes(&'a [u8]),
    Device(&'a Arc<View>),
}

impl Payload<'_> {
    #[inline(always)]
    pub fn issue(
        &self,
        inner: &mut Inner,
        issue: impl FnOnce(&mut Node, Source<'_>) -> Result<Issued, Fault>,
    ) -> Result<(), Fault> {
        match self {
            Payload::Region(range) => issue(&mut inner.node, Source::Memory(*range)).map(drop),
            Payload::Bytes(bytes) => issue(&mut inner.node, Source::Bytes(bytes)).map(drop),
            Payload::Device(view) => inner.issue_from_device(view, issue),
        }
    }

    /// True if the data is too short to be worth releasing the GIL.
    pub fn is_short(&self) -> bool {
        match self {
            Payload::Region(_) => true,
            Payload::Bytes(bytes) => bytes.len() <= HELD_MAX,
            // Registering calls the driver.
            Payload::Device(_) => false,
        }
    }
}

impl Data<'_> {
    pub fn payload(&self) -> Payload<'_> {
        match self {
            Data::Region(range, _) => Payload::Region(*range),
            Data::Bytes(bytes) => Payload::Bytes(bytes.as_bytes()),
            Data::View(view) => Payload::Bytes(view.bytes()),
            Data::Device(view) => Payload::Device(view),
        }
    }

    pub fn held(self) -> PyResult<Held> {
        Ok(match self {
            Data::Region(range, len) => Held::Region(range, len),
            Data::Bytes(bytes) => Held::View(Arc::new(View::to_read(bytes.as_any())?)),
            Data::View(view) => Held::View(Arc::new(view)),
            Data::Device(view) => Held::View(view),
        })
    }
}

/// Raises an exception for objects of other nodes. `what` names the object.
pub(crate) fn same(
    py: Python<'_>,
    node: &Arc<Shared>,
    other: &Arc<Shared>,
    what: &str,
) -> PyResult<()> {
    match Arc::ptr_eq(node, other) {
        true => Ok(()),
        false => Err(misuse(
            py,
            "other_node",
            format!("the {what} belongs to another node; use it with that node"),
        )),
    }
}

fn region(node: &Arc<Shared>, object: &Bound<'_, PyAny>) -> PyResult<Option<(Range, usize)>> {
    let py = object.py();
    if let Ok(slice) = object.cast::<Slice>() {
        let slice = slice.get();
        same(py, node, slice.shared(), "memory")?;
        return Ok(Some((Range::new(slice.at(), slice.len), slice.len)));
    }
    if let Ok(memory) = object.cast::<Memory>() {
        let memory = memory.get();
        same(py, node, &memory.shared, "memory")?;
        return Ok(Some((memory.memory.slice(..), memory.memory.len())));
    }
    Ok(None)
}

pub(crate) fn data<'py>(node: &Arc<Shared>, object: &Bound<'py, PyAny>) -> PyResult<Data<'py>> {
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return Ok(Data::Bytes(bytes.clone()));
    }
    Ok(match region(node, object)? {
        Some((range, len)) => Data::Region(range, len),
        None => match View::to_read(object)? {
            view if view.is_on_device() => Data::Device(Arc::new(view)),
            view => Data::View(view),
        },
    })
}

pub(crate) fn target(node: &Arc<Shared>, object: &Bound<'_, PyAny>) -> PyResult<Held> {
    Ok(match region(node, object)? {
        Some((range, len)) => Held::Region(range, len),
        None => Held::View(Arc::new(View::to_write(object)?)),
    })
}

pub(crate) fn here(node: &Arc<Shared>, object: &Bound<'_, PyAny>) -> PyResult<LocalAddr> {
    if let Ok(slice) = object.cast::<Slice>() {
        let slice = slice.get();
        same(object.py(), node, slice.shared(), "memory")?;
        return Ok(slice.at());
    }
    let memory = object.cast::<Memory>()?.get();
    same(object.py(), node, &memory.shared, "memory")?;
    Ok(memory.memory.at(0))
}

pub(crate) fn there(node: &Arc<Shared>, object: &Bound<'_, PyAny>) -> PyResult<RemoteAddr> {
    if let Ok(place) = object.cast::<Place>() {
        let place = place.get();
        same(object.py(), node, &place.shared, "place")?;
        return Ok(place.at);
    }
    let remote = object.cast::<Remote>()?.get();
    same(object.py(), node, &remote.shared, "memory")?;
    Ok(remote.remote.at(0))
}

pub(crate) fn peer(node: &Arc<Shared>, peer: &Bound<'_, Peer>) -> PyResult<PeerId> {
    let given = peer.get();
    same(peer.py(), node, &given.shared, "peer")?;
    Ok(given.id)
}

pub(crate) fn anyone(
    node: &Arc<Shared>,
    given: Option<&Bound<'_, Peer>>,
) -> PyResult<Option<PeerId>> {
    given.map(|given| peer(node, given)).transpose()
}

/// Converts seconds. Returns the default for `None`.
pub(crate) fn timeout(
    py: Python<'_>,
    default: Duration,
    seconds: Option<f64>,
) -> PyResult<Duration> {
    match seconds {
        None => Ok(default),
        Some(seconds) if seconds >= 0.0 => {
            Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
        }
        Some(seconds) => Err(misuse(
            py,
            "argument",
            format!("invalid timeout: {seconds} seconds; use 0 or more"),
        )),
    }
}

pub(crate) fn tag(object: Option<&Bound<'_, PyAny>>) -> PyResult<Tag> {
    let Some(object) = object else { return Ok(Tag::ZERO) };
    if let Ok(low) = object.extract::<u64>() {
        return Ok(Tag::new(low, 0));
    }
    let all: u128 = object.extract()?;
    match u32::try_from(all >> 64) {
        Ok(high) => Ok(Tag::new(all as u64, high)),
        Err(_) => Err(misuse(object.py(), "argument", "tag or mask too long; use at most 96 bits")),
    }
}

pub(crate) fn of_tag(tag: Tag) -> u128 {
    u128::from(tag.hi) << 64 | u128::from(tag.lo)
}

pub(crate) fn compare(py: Python<'_>, name: &str) -> PyResult<Cmp> {
    Ok(match name {
        "==" => Cmp::Eq,
        "!=" => Cmp::Ne,
        ">=" => Cmp::Ge,
        ">" => Cmp::Gt,
        "<=" => Cmp::Le,
        "<" => Cmp::Lt,
        _ => {
            return Err(misuse(
                py,
                "argument",
                format!("invalid comparison: {name:?}; use ==, !=, >=, >, <= or <"),
            ));
        }
    })
}

pub(crate) fn signal(py: Python<'_>, name: &str) -> PyResult<SignalOp> {
    match name {
        "set" => Ok(SignalOp::Set),
        "add" => Ok(SignalOp::Add),
        _ => {
            Err(misuse(py, "argument", format!("invalid signal: {name:?}; use \"set\" or \"add\"")))
        }
    }
}

pub(crate) fn atomic(
    py: Python<'_>,
    name: &str,
    operand: u64,
    compare: u64,
    width: u8,
) -> PyResult<Amo> {
    let op = match name {
        "set" => AmoOp::Set,
        "add" => AmoOp::Add,
        "and" => AmoOp::And,
        "or" => AmoOp::Or,
        "xor" => AmoOp::Xor,
        "swap" => AmoOp::Swap,
        "compare_swap" => AmoOp::CompareSwap,
        "fetch" => AmoOp::Fetch,
        _ => {
            let all = "set, add, and, or, xor, swap, compare_swap or fetch";
            return Err(misuse(py, "argument", format!("invalid atomic: {name:?}; use {all}")));
        }
    };
    Ok(Amo { op, width, operand, compare })
}
