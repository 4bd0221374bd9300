"""Fixtures: nodes, and jobs of several processes. Tests over libfabric's tcp provider are skipped
if the provider is missing."""

import functools
import multiprocessing
import queue
import socket
import traceback
from types import SimpleNamespace

import pytest

import fishplate

SOON = 20.0
WAYS = {
    "shm": {"fabric": "off"},
    "worker": {"fabric": "off", "worker": True},
    "tcp": {
        "fabric": "required",
        "providers": ["tcp"],
        "interfaces": ["lo"],
        "shared_memory": False,
    },
}


GPUS = {
    "stand-in": {"fabric": "off", "gpu": "stand-in"},
    "cuda": {"fabric": "off", "gpu": "cuda:0"},
}


@functools.cache
def why_not(way):
    """Returns why a node cannot use this transport here, or None."""
    try:
        fishplate.Node(**(WAYS | GPUS)[way]).close()
    except fishplate.Error as error:
        return str(error)


@pytest.fixture(params=WAYS)
def way(request):
    if reason := why_not(request.param):
        pytest.skip(f"SKIPPED {request.param}: {reason}")
    return request.param


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return "127.0.0.1:%d" % server.getsockname()[1]


def _process(address, size, target, way, arguments, results):
    try:
        job = fishplate.Job(address, size, SOON)
        with fishplate.Node(timeout=SOON, **(WAYS | GPUS)[way]) as node:
            peers = {}
            for rank, theirs in enumerate(job.allgather(node.address)):
                if rank != job.rank:
                    peers[rank] = node.connect(theirs)
            result = target(
                SimpleNamespace(job=job, node=node, peers=peers, rank=job.rank), *arguments
            )
            job.barrier(node)
        results.put((job.rank, result, None))
    except BaseException:
        results.put((None, None, traceback.format_exc()))
        raise


def run(size, target, way, *arguments):
    """Runs a function in `size` connected processes, and returns its results by rank."""
    spawn = multiprocessing.get_context("spawn")
    results, address = spawn.Queue(), free_address()
    rest = (address, size, target, way, arguments, results)
    processes = [spawn.Process(target=_process, args=rest, daemon=True) for _ in range(size)]
    for process in processes:
        process.start()
    try:
        by_rank = {}
        for _ in processes:
            try:
                rank, result, error = results.get(timeout=3 * SOON)
            except queue.Empty:
                raise AssertionError("a process has exited early, or hangs") from None
            assert error is None, error
            by_rank[rank] = result
        for process in processes:
            process.join(SOON)
            assert process.exitcode == 0
        return [by_rank[rank] for rank in range(size)]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture
def node():
    """A node connected to itself."""
    with fishplate.Node(fabric="off", timeout=SOON) as node:
        yield node


@pytest.fixture
def own(node):
    """A node connected to itself, with 4 KiB of memory and an import of that memory."""
    peer = node.connect(node.address)
    memory = node.alloc(4096)
    return SimpleNamespace(
        node=node, peer=peer, memory=memory, theirs=peer.import_memory(memory.handle())
    )


@pytest.fixture
def two():
    """Two connected nodes of this process, with workers. Node `a` has 16 regions."""
    with (
        fishplate.Node(fabric="off", timeout=SOON, regions=16, worker=True) as a,
        fishplate.Node(fabric="off", timeout=SOON, worker=True) as b,
    ):
        at_a, at_b = a.connect(b.address), b.connect(a.address)
        while not (at_a.connected() and at_b.connected()):
            pass
        yield SimpleNamespace(a=a, b=b, at_a=at_a, at_b=at_b)
