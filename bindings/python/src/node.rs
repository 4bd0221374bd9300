//! The class `Node`.

use std::collections::BTreeMap;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

use fishplate::core::engine::tag::Tag;
use fishplate::core::error::AttachError;
use fishplate::gpu::GpuStats;
use fishplate::node::{Error, Slice};
use fishplate::{Notice, PeerId, Signal};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::arguments::{self, Payload, anyone, data, here, tag, target, there};
use crate::error::Fault;
use crate::inner::Inner;
use crate::lease::{Begun, Brings, Call, Held, Turn};
use crate::memory::{Memory, Pages};
use crate::peer::Peer;
use crate::request::{Message, Request};
use crate::settings::{self, Rails, Tables, Wanted, Worker};
use crate::shared::Shared;
use crate::view::{View, zeroed};
use crate::waker::Waker;

/// The transport of one process: its rails, its peers and its memory.
#[pyclass(frozen, module = "fishplate")]
pub(crate) struct Node {
    pub shared: Arc<Shared>,
}

impl Node {
    fn timeout_of(&self, py: Python<'_>, seconds: Option<f64>) -> PyResult<Duration> {
        arguments::timeout(py, self.shared.timeout, seconds)
    }

    fn begin(
        &self,
        py: Python<'_>,
        held: &Held,
        writes: bool,
        begin: impl Fn(&mut fishplate::Node, Slice) -> Result<Begun, Fault> + Sync,
    ) -> PyResult<Request> {
        let at_once = !held.is_on_device();
        let flight = self.shared.issue(py, at_once, |inner| inner.begin(held, writes, &begin))?;
        Ok(Request::new(&self.shared, flight))
    }

    fn receive(
        &self,
        py: Python<'_>,
        into: &mut [u8],
        from: Option<PeerId>,
        (tag, ignore): (Tag, Tag),
        timeout: Duration,
    ) -> PyResult<Message> {
        // Does not first try with a timeout of zero: a receive that matches in that attempt would
        // get no `patience`.
        let envelope = self.shared.wait(py, timeout, false, |inner, slice| {
            inner.in_turn(Turn::Receive(from, tag, ignore))?;
            Ok(inner.node.recv(from, tag, ignore, into, slice)?)
        })?;
        Ok(Message::new(&self.shared, envelope))
    }
}

#[pymethods]
impl Node {
    #[new]
    #[pyo3(signature = (*, fabric=None, shared_memory=true, providers=None, interfaces=None,
        max_rails=None, local_rank=None, peers=None, regions=None, imports=None, operations=None,
        receives=None, patience=10.0, connect_timeout=10.0, timeout=30.0, worker=None, gpu=None,
        counters=false))]
    #[expect(clippy::too_many_arguments, reason = "settings, all of which have names and defaults")]
    fn open(
        py: Python<'_>,
        fabric: Option<Wanted>,
        shared_memory: bool,
        providers: Option<Vec<String>>,
        interfaces: Option<Vec<String>>,
        max_rails: Option<usize>,
        local_rank: Option<usize>,
        peers: Option<u32>,
        regions: Option<u32>,
        imports: Option<u32>,
        operations: Option<u32>,
        receives: Option<u32>,
        patience: f64,
        connect_timeout: f64,
        timeout: f64,
        worker: Option<Worker>,
        gpu: Option<&str>,
        counters: bool,
    ) -> PyResult<Node> {
        let (providers, interfaces) =
            (providers.unwrap_or_default(), interfaces.unwrap_or_default());
        let rails = Rails { fabric, shared_memory, providers, interfaces, max_rails, local_rank };
        let tables = Tables { peers, regions, imports, operations, receives };
        let seconds = |seconds| arguments::timeout(py, Duration::ZERO, Some(seconds));
        let waits = [seconds(patience)?, seconds(connect_timeout)?, seconds(timeout)?];
        let gpu = gpu.map(|name| settings::gpu(py, name)).transpose()?;
        let builder = settings::builder(py, rails, tables, gpu, worker)?;
        let builder = if counters { builder.counters() } else { builder };
        let opened = py.detach(|| Shared::open(builder, gpu, waits));
        Ok(Node { shared: Arc::new(opened.map_err(|fault| fault.raise(py))?) })
    }

    #[getter]
    fn address<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.shared.address(py))
    }

    #[getter]
    fn closed(&self) -> bool {
        self.shared.is_closed()
    }

    #[getter]
    fn timeout(&self) -> f64 {
        self.shared.timeout.as_secs_f64()
    }

    fn connect(&self, py: Python<'_>, address: &[u8]) -> PyResult<Peer> {
        let id = self.shared.enter(py, |inner| {
            let id = inner.node.connect(address)?;
            if !inner.peers.contains(&id) {
                inner.peers.push(id);
            }
            Ok(id)
        })?;
        Ok(Peer { shared: self.shared.clone(), id })
    }

    fn alloc(&self, py: Python<'_>, len: usize) -> PyResult<Memory> {
        let (memory, segment) = self.shared.blocking(py, |inner| {
            let memory = inner.node.alloc(len)?;
            Ok((memory, inner.node.segment(memory)?))
        })?;
        Ok(Memory::new(&self.shared, memory, Pages::Own(segment)))
    }

    fn alloc_device(&self, py: Python<'_>, len: usize) -> PyResult<Memory> {
        let loan = Arc::new(());
        let (memory, start) = self.shared.blocking(py, |inner| {
            let memory = inner.node.alloc_device(len)?;
            inner.devices.push((memory, loan.clone()));
            Ok((memory, inner.node.device_ptr(memory.at(0))?))
        })?;
        let start = NonNull::new(ptr::without_provenance_mut(start.0 as usize));
        let pages = Pages::Device(start.unwrap_or(NonNull::dangling()), loan);
        Ok(Memory::new(&self.shared, memory, pages))
    }

    fn register(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<Memory> {
        let view = Arc::new(View::to_write(buffer)?);
        let memory = self.shared.blocking(py, |inner| {
            if view.is_on_device() && !view.start().as_ptr().addr().is_multiple_of(8) {
                return Err(Error::from(AttachError::Misaligned).into());
            }
            // `registered` holds the view until the node has released the memory. If peers may have
            // imported the memory, the view stays until they know that the node is closed. If they
            // never learn it, the view stays forever.
            let (memory, _) = inner.register(&view)?;
            inner.registered.insert(memory, view.clone());
            if view.is_on_device() {
                // A peer that receives a message from this memory opens its allocation, as an
                // import would.
                inner.registered.exported(memory);
            }
            Ok(memory)
        })?;
        Ok(Memory::new(&self.shared, memory, Pages::Lent(view)))
    }

    #[pyo3(signature = (data, to))]
    fn put(&self, py: Python<'_>, data: &Bound<'_, PyAny>, to: &Bound<'_, PyAny>) -> PyResult<()> {
        let (data, to) = (self::data(&self.shared, data)?, there(&self.shared, to)?);
        let from = data.payload();
        self.shared.issue(py, from.is_short(), |inner| {
            from.issue(inner, |node, from| Ok(node.put(from, to, Notice::Silent)?))
        })
    }

    #[pyo3(signature = (data, to, signal, value=1, op="set"))]
    fn put_signal(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        to: &Bound<'_, PyAny>,
        signal: &Bound<'_, PyAny>,
        value: u64,
        op: &str,
    ) -> PyResult<()> {
        let (data, to) = (self::data(&self.shared, data)?, there(&self.shared, to)?);
        let signal =
            Signal { at: there(&self.shared, signal)?, op: arguments::signal(py, op)?, value };
        let from = data.payload();
        self.shared.issue(py, from.is_short(), |inner| {
            from.issue(inner, |node, from| Ok(node.put_signal(from, to, signal, Notice::Silent)?))
        })
    }

    #[pyo3(signature = (signal, value=1, op="set"))]
    fn signal(
        &self,
        py: Python<'_>,
        signal: &Bound<'_, PyAny>,
        value: u64,
        op: &str,
    ) -> PyResult<()> {
        let signal =
            Signal { at: there(&self.shared, signal)?, op: arguments::signal(py, op)?, value };
        self.shared.issue(py, true, |inner| {
            inner.node.signal(signal, Notice::Silent)?;
            Ok(())
        })
    }

    #[pyo3(signature = (data, to))]
    fn iput(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        to: &Bound<'_, PyAny>,
    ) -> PyResult<Request> {
        let (data, to) = (self::data(&self.shared, data)?.held()?, there(&self.shared, to)?);
        self.begin(py, &data, false, |node, from| {
            Ok(Begun::Issued(node.put(from, to, Notice::Report(0))?))
        })
    }

    #[pyo3(signature = (into, at))]
    fn iget(
        &self,
        py: Python<'_>,
        into: &Bound<'_, PyAny>,
        at: &Bound<'_, PyAny>,
    ) -> PyResult<Request> {
        let (into, at) = (target(&self.shared, into)?, there(&self.shared, at)?);
        self.begin(py, &into, true, |node, into| {
            Ok(Begun::Issued(node.get(into, at, Notice::Report(0))?))
        })
    }

    #[pyo3(signature = (into, at, timeout=None))]
    fn get(
        &self,
        py: Python<'_>,
        into: &Bound<'_, PyAny>,
        at: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let timeout = self.timeout_of(py, timeout)?;
        self.iget(py, into, at)?.finish(py, timeout)?;
        Ok(())
    }

    #[pyo3(signature = (at, op, operand=0, compare=0, width=8))]
    fn atomic(
        &self,
        py: Python<'_>,
        at: &Bound<'_, PyAny>,
        op: &str,
        operand: u64,
        compare: u64,
        width: u8,
    ) -> PyResult<()> {
        let (at, amo) =
            (there(&self.shared, at)?, arguments::atomic(py, op, operand, compare, width)?);
        self.shared.issue(py, true, |inner| {
            inner.node.amo(at, amo, Notice::Silent)?;
            Ok(())
        })
    }

    #[pyo3(signature = (at, op, operand=0, compare=0, width=8))]
    fn ifetch(
        &self,
        py: Python<'_>,
        at: &Bound<'_, PyAny>,
        op: &str,
        operand: u64,
        compare: u64,
        width: u8,
    ) -> PyResult<Request> {
        let (at, amo) =
            (there(&self.shared, at)?, arguments::atomic(py, op, operand, compare, width)?);
        let flight = self.shared.issue(py, true, |inner| {
            let issued = inner.node.start_fetch(at, amo)?;
            Ok(inner.issued(issued, Brings::Value, None))
        })?;
        Ok(Request::new(&self.shared, flight))
    }

    #[pyo3(signature = (at, op, operand=0, compare=0, width=8, timeout=None))]
    #[expect(clippy::too_many_arguments, reason = "most have defaults")]
    fn fetch(
        &self,
        py: Python<'_>,
        at: &Bound<'_, PyAny>,
        op: &str,
        operand: u64,
        compare: u64,
        width: u8,
        timeout: Option<f64>,
    ) -> PyResult<Py<PyAny>> {
        let timeout = self.timeout_of(py, timeout)?;
        self.ifetch(py, at, op, operand, compare, width)?.finish(py, timeout)
    }

    #[pyo3(signature = (at, value=1, timeout=None))]
    fn fetch_add(
        &self,
        py: Python<'_>,
        at: &Bound<'_, PyAny>,
        value: u64,
        timeout: Option<f64>,
    ) -> PyResult<Py<PyAny>> {
        self.fetch(py, at, "add", value, 0, 8, timeout)
    }

    #[pyo3(signature = (at, compare, value, peer=None, timeout=None))]
    fn wait(
        &self,
        py: Python<'_>,
        at: &Bound<'_, PyAny>,
        compare: &str,
        value: u64,
        peer: Option<&Bound<'_, Peer>>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        let (at, from) = (here(&self.shared, at)?, anyone(&self.shared, peer)?);
        let (compare, timeout) = (arguments::compare(py, compare)?, self.timeout_of(py, timeout)?);
        let wait =
            |inner: &mut Inner, slice| Ok(inner.node.wait(at, compare, value, from, slice)?);
        self.shared.wait(py, timeout, true, wait)
    }

    #[pyo3(signature = (at, compare, value, peer=None))]
    fn test(
        &self,
        py: Python<'_>,
        at: &Bound<'_, PyAny>,
        compare: &str,
        value: u64,
        peer: Option<&Bound<'_, Peer>>,
    ) -> PyResult<Option<u64>> {
        let (at, from) = (here(&self.shared, at)?, anyone(&self.shared, peer)?);
        let compare = arguments::compare(py, compare)?;
        self.shared.enter(py, |inner| {
            inner.reap();
            let looked =
                inner.node.wait(at, compare, value, from, Duration::ZERO).map_err(Fault::from);
            match looked {
                Err(fault) if fault.is_deadline() => Ok(None),
                looked => looked.map(Some),
            }
        })
    }

    #[pyo3(signature = (at, compare, value, peer=None, timeout=None))]
    fn until<'py>(
        slf: &Bound<'py, Self>,
        at: &Bound<'py, PyAny>,
        compare: &Bound<'py, PyAny>,
        value: &Bound<'py, PyAny>,
        peer: Option<&Bound<'py, Peer>>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.py()
            .import("fishplate._aio")?
            .call_method1("until", (slf, at, compare, value, peer, timeout))
    }

    fn _waker(&self) -> Waker {
        Waker { shared: self.shared.clone() }
    }

    #[pyo3(signature = (peer=None, timeout=None))]
    fn quiet(
        &self,
        py: Python<'_>,
        peer: Option<&Bound<'_, Peer>>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let (peer, timeout) = (anyone(&self.shared, peer)?, self.timeout_of(py, timeout)?);
        self.shared.wait(py, timeout, true, |inner, slice| {
            inner.in_turn(Turn::Send(peer))?;
            match peer {
                Some(peer) => inner.node.quiet(peer, slice)?,
                None => inner.node.quiet_all(slice)?,
            }
            inner.leave_later();
            Ok(())
        })
    }

    fn fence(&self, py: Python<'_>, peer: &Bound<'_, Peer>) -> PyResult<()> {
        let peer = arguments::peer(&self.shared, peer)?;
        self.shared.enter(py, |inner| Ok(inner.node.fence(peer)?))
    }

    #[pyo3(signature = (peer, tag, data))]
    fn send(
        &self,
        py: Python<'_>,
        peer: &Bound<'_, Peer>,
        tag: &Bound<'_, PyAny>,
        data: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (peer, tag) = (arguments::peer(&self.shared, peer)?, self::tag(Some(tag))?);
        let data = self::data(&self.shared, data)?;
        let from = data.payload();
        self.shared.issue(py, from.is_short(), |inner| {
            inner.in_turn(Turn::Send(Some(peer)))?;
            let copy = match from {
                Payload::Device(view) => Some(inner.copy_of(view)?),
                _ => None,
            };
            let from = copy.as_deref().map_or(from, Payload::Bytes);
            from.issue(inner, |node, from| Ok(node.send(peer, tag, from, Notice::Silent)?))
        })
    }

    #[pyo3(signature = (peer, tag, data))]
    fn isend(
        &self,
        py: Python<'_>,
        peer: &Bound<'_, Peer>,
        tag: &Bound<'_, PyAny>,
        data: &Bound<'_, PyAny>,
    ) -> PyResult<Request> {
        let (to, tag) = (arguments::peer(&self.shared, peer)?, self::tag(Some(tag))?);
        let data = self::data(&self.shared, data)?.held()?;
        let flight = self.shared.start(py, Call::Send { to, tag, data })?;
        Ok(Request::new(&self.shared, flight))
    }

    #[pyo3(signature = (into, source=None, tag=None, ignore=None))]
    fn irecv(
        &self,
        py: Python<'_>,
        into: &Bound<'_, PyAny>,
        source: Option<&Bound<'_, Peer>>,
        tag: Option<&Bound<'_, PyAny>>,
        ignore: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Request> {
        let (into, from) = (target(&self.shared, into)?, anyone(&self.shared, source)?);
        let (tag, ignore) = (self::tag(tag)?, self::tag(ignore)?);
        let flight = self.shared.start(py, Call::Receive { from, tag, ignore, into })?;
        Ok(Request::new(&self.shared, flight))
    }

    #[pyo3(signature = (into, source=None, tag=None, ignore=None, timeout=None))]
    fn recv(
        &self,
        py: Python<'_>,
        into: &Bound<'_, PyAny>,
        source: Option<&Bound<'_, Peer>>,
        tag: Option<&Bound<'_, PyAny>>,
        ignore: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Py<PyAny>> {
        let (from, timeout) = (anyone(&self.shared, source)?, self.timeout_of(py, timeout)?);
        let (tag, ignore) = (self::tag(tag)?, self::tag(ignore)?);
        let view = View::to_write(into)?;
        if view.is_on_device() {
            let into = Held::View(Arc::new(view));
            let flight = self.shared.start(py, Call::Receive { from, tag, ignore, into })?;
            return Request::new(&self.shared, flight).receive(py, timeout);
        }
        // SAFETY: `to_write` took the view, which is on the host, and this is its only slice.
        let into = unsafe { view.bytes_mut() };
        self.receive(py, into, from, (tag, ignore), timeout)?.into_py_any(py)
    }

    #[pyo3(signature = (source=None, tag=None, ignore=None, max=65536, timeout=None))]
    fn recv_bytes<'py>(
        &self,
        py: Python<'py>,
        source: Option<&Bound<'_, Peer>>,
        tag: Option<&Bound<'_, PyAny>>,
        ignore: Option<&Bound<'_, PyAny>>,
        max: usize,
        timeout: Option<f64>,
    ) -> PyResult<(Message, Bound<'py, PyBytes>)> {
        let (from, timeout) = (anyone(&self.shared, source)?, self.timeout_of(py, timeout)?);
        let (tag, ignore) = (self::tag(tag)?, self::tag(ignore)?);
        let mut bytes = zeroed(max).map_err(|_| {
            PyMemoryError::new_err(format!(
                "no memory for messages of {max} bytes; use a smaller max"
            ))
        })?;
        let message = self.receive(py, &mut bytes, from, (tag, ignore), timeout)?;
        let bytes = PyBytes::new(py, &bytes[..message.len().min(max)]);
        Ok((message, bytes))
    }

    #[pyo3(signature = (source=None, tag=None, ignore=None))]
    fn probe(
        &self,
        py: Python<'_>,
        source: Option<&Bound<'_, Peer>>,
        tag: Option<&Bound<'_, PyAny>>,
        ignore: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Message>> {
        let from = anyone(&self.shared, source)?;
        let (tag, ignore) = (self::tag(tag)?, self::tag(ignore)?);
        let found = self.shared.enter(py, |inner| Ok(inner.node.probe(from, tag, ignore)?))?;
        Ok(found.map(|envelope| Message::new(&self.shared, envelope)))
    }

    fn poll(&self, py: Python<'_>) -> PyResult<u32> {
        self.shared.enter(py, |inner| {
            inner.node.publish_counters();
            let events = inner.node.progress();
            inner.reap();
            Ok(events)
        })
    }

    fn stats(&self, py: Python<'_>) -> PyResult<BTreeMap<&'static str, u64>> {
        let stats = self.shared.enter(py, |inner| Ok(inner.node.stats()))?;
        Ok(BTreeMap::from([
            ("posted", stats.posted),
            ("arrived", stats.arrived),
            ("out_of_order", stats.arrivals_out_of_order),
            ("duplicates", stats.duplicates),
            ("stale", stats.stale),
            ("applied", stats.applied),
            ("acks_alone", stats.acks_alone),
            ("refused", stats.refused),
            ("failed", stats.failed),
            ("passes", stats.passes),
        ]))
    }

    fn gpu_stats(&self, py: Python<'_>) -> PyResult<Option<BTreeMap<&'static str, u64>>> {
        let stats = self.shared.enter(py, |inner| Ok(inner.node.gpu_stats()))?;
        let of = |stats: GpuStats| {
            [("direct", stats.direct), ("relayed", stats.relayed), ("stored", stats.stored)]
        };
        Ok(stats.map(|stats| BTreeMap::from(of(stats))))
    }

    fn defer_device_frees(&self, py: Python<'_>, defer: bool) -> PyResult<()> {
        self.shared.enter(py, |inner| Ok(inner.node.defer_device_frees(defer)?))
    }

    fn rails(&self, py: Python<'_>) -> PyResult<Vec<(String, String)>> {
        self.shared.enter(py, |inner| {
            let names =
                |rail: &fishplate::node::RailInfo| (rail.provider.clone(), rail.interface.clone());
            Ok(inner.node.rails().iter().map(names).collect())
        })
    }

    #[pyo3(signature = (timeout=None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.shared.close(py, self.timeout_of(py, timeout)?)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*error))]
    fn __exit__(&self, py: Python<'_>, error: &Bound<'_, PyTuple>) -> PyResult<()> {
        match error.get_item(0).is_ok_and(|class| !class.is_none()) {
            // After an exception the peers may have failed too, so closing does not wait for them.
            true => _ = self.shared.close(py, Duration::ZERO),
            false => self.shared.close(py, self.shared.timeout)?,
        }
        Ok(())
    }

    fn __repr__(&self) -> &'static str {
        if self.shared.is_closed() { "<fishplate.Node, closed>" } else { "<fishplate.Node>" }
    }
}
