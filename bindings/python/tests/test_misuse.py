"""Tests that each wrong call raises an exception, and that the node continues to work."""

import copy
import math
import os
import pickle
from types import SimpleNamespace

import numpy
import pytest
from conftest import free_address

import fishplate
from fishplate import Misuse

FAR = 2**64 - 1


class Evil:
    """An object that runs other code when it is converted to a number."""

    def __init__(self, act):
        self.act = act

    def __index__(self):
        self.act()
        return 8


def freed(own):
    memory = own.node.alloc(64)
    memory.free()
    return memory


def released(own):
    own.theirs.release()
    return own.theirs


def other(own):
    own.other = fishplate.Node(fabric="off")
    memory = own.other.alloc(64)
    peer = own.other.connect(own.other.address)
    return SimpleNamespace(memory=memory, peer=peer, theirs=peer.import_memory(memory.handle()))


def strided():
    return numpy.zeros((8, 8), numpy.uint8)[:, ::2]


def frozen():
    array = numpy.zeros(8, numpy.uint8)
    array.flags.writeable = False
    return array


def in_environment(name, value, call):
    os.environ[name] = value
    try:
        return call()
    finally:
        del os.environ[name]


def gone(own):
    own.peer.disconnect()
    return own.peer


CALLS = {
    # Opening.
    "fabric of no name": (lambda own: fishplate.Node(fabric="maybe"), Misuse),
    "fabric of no kind": (lambda own: fishplate.Node(fabric=1.5), TypeError),
    "fewer rails than none": (lambda own: fishplate.Node(fabric=-1), (TypeError, OverflowError)),
    "more rails than any": (lambda own: fishplate.Node(fabric=10**6), fishplate.Error),
    "rails of 2**80": (lambda own: fishplate.Node(fabric=2**80), (TypeError, OverflowError)),
    "no such provider": (lambda own: fishplate.Node(providers=["none"]), fishplate.Error),
    "no such interface": (lambda own: fishplate.Node(interfaces=["none"]), fishplate.Error),
    "providers of zeros": (lambda own: fishplate.Node(providers=["\0"]), fishplate.Error),
    "providers of no list": (lambda own: fishplate.Node(providers=7), TypeError),
    "max_rails of none": (lambda own: fishplate.Node(max_rails=0), Misuse),
    "max_rails of many": (lambda own: fishplate.Node(max_rails=99), Misuse),
    "a local rank below none": (lambda own: fishplate.Node(local_rank=-1), OverflowError),
    "a local rank of text": (lambda own: fishplate.Node(local_rank="1"), TypeError),
    "peers of none": (lambda own: fishplate.Node(fabric="off", peers=0), fishplate.Error),
    "peers of many": (lambda own: fishplate.Node(peers=2**16), Misuse),
    "peers below none": (lambda own: fishplate.Node(peers=-1), OverflowError),
    "regions of many": (lambda own: fishplate.Node(regions=2**16), Misuse),
    "imports of many": (lambda own: fishplate.Node(imports=2**31), Misuse),
    "operations of many": (lambda own: fishplate.Node(operations=2**32 - 1), Misuse),
    "receives of many": (lambda own: fishplate.Node(receives=2**21), Misuse),
    "patience of nan": (lambda own: fishplate.Node(patience=math.nan), Misuse),
    "timeout below none": (lambda own: fishplate.Node(timeout=-1), Misuse),
    "connect_timeout of no number": (lambda own: fishplate.Node(connect_timeout="1"), TypeError),
    "worker on no processor": (
        lambda own: fishplate.Node(fabric="off", worker=10**6),
        fishplate.Error,
    ),
    "worker of no kind": (lambda own: fishplate.Node(worker="yes"), TypeError),
    "settings by position": (lambda own: fishplate.Node("off"), TypeError),
    "a setting of no name": (lambda own: fishplate.Node(rails=1), TypeError),
    "a job of none": (lambda own: fishplate.Job("127.0.0.1:0", 0), Misuse),
    "a place without a size": (
        lambda own: in_environment(
            "FISHPLATE_RENDEZVOUS", "tcp://127.0.0.1:1", fishplate.Job.from_env
        ),
        Misuse,
    ),
    "a job of many": (lambda own: fishplate.Job("127.0.0.1:0", 10**6), Misuse),
    "a job nowhere": (lambda own: fishplate.Job("nowhere", 2, 0.1), fishplate.Error),
    "a job at port 0": (lambda own: fishplate.Job("127.0.0.1:0", 2, 0.05), Misuse),
    "a job alone": (lambda own: fishplate.Job(free_address(), 2, 0.05), TimeoutError),
    "an exchange in a job of one": (
        lambda own: fishplate.Job("127.0.0.1:0", 1).exchange(b""),
        Misuse,
    ),
    "a contribution too long": (
        lambda own: fishplate.Job("127.0.0.1:0", 1).allgather(bytes(10**6)),
        Misuse,
    ),
    # Objects that programs cannot create, copy or change.
    "a peer of one's own": (lambda own: fishplate.Peer(), TypeError),
    "memory of one's own": (lambda own: fishplate.Memory(), TypeError),
    "a request of one's own": (lambda own: fishplate.Request.__new__(fishplate.Request), TypeError),
    "a copy of a node": (lambda own: copy.copy(own.node), TypeError),
    "a deep copy of memory": (lambda own: copy.deepcopy(own.memory), TypeError),
    "a node in a pickle": (lambda own: pickle.dumps(own.node), TypeError),
    "a peer in a pickle": (lambda own: pickle.dumps(own.peer), TypeError),
    "a kind of node": (lambda own: type("Mine", (fishplate.Node,), {}), TypeError),
    "another address": (lambda own: setattr(own.node, "address", b""), AttributeError),
    # Peers.
    "an empty address": (lambda own: own.node.connect(b""), Misuse),
    "an address of noise": (lambda own: own.node.connect(b"x" * 42), Misuse),
    "an address cut short": (lambda own: own.node.connect(own.node.address[:-1]), Misuse),
    "an address too long": (lambda own: own.node.connect(own.node.address + b"x"), Misuse),
    "an address of 10 MB": (lambda own: own.node.connect(bytes(10**7)), Misuse),
    "an address of text": (lambda own: own.node.connect("address"), TypeError),
    "no address": (lambda own: own.node.connect(None), TypeError),
    "a disconnected peer": (lambda own: gone(own).connected(), Misuse),
    "disconnected twice": (lambda own: gone(own).disconnect(), Misuse),
    "a message to one disconnected": (lambda own: own.node.send(gone(own), 1, b"x"), Misuse),
    "a receive from one disconnected": (
        lambda own: own.node.irecv(bytearray(8), gone(own)),
        Misuse,
    ),
    "quiet of one disconnected": (lambda own: own.node.quiet(gone(own)), Misuse),
    "fence of one disconnected": (lambda own: own.node.fence(gone(own)), Misuse),
    "memory of one disconnected": (lambda own: (gone(own), own.node.put(b"x", own.theirs)), Misuse),
    "a peer of another node": (lambda own: own.node.send(other(own).peer, 1, b"x"), Misuse),
    "quiet of another's peer": (lambda own: own.node.quiet(other(own).peer), Misuse),
    "a wait for another's peer": (
        lambda own: own.node.wait(own.memory, "==", 1, other(own).peer),
        Misuse,
    ),
    "a peer that is a number": (lambda own: own.node.send(0, 1, b"x"), TypeError),
    "a handle of noise": (lambda own: own.peer.import_memory(b"x" * 64), Misuse),
    "an empty handle": (lambda own: own.peer.import_memory(b""), Misuse),
    "a handle cut short": (lambda own: own.peer.import_memory(own.memory.handle()[:-1]), Misuse),
    "a handle of text": (lambda own: own.peer.import_memory("handle"), TypeError),
    # Memory.
    "no bytes": (lambda own: own.node.alloc(0), fishplate.Error),
    "fewer bytes than none": (lambda own: own.node.alloc(-1), OverflowError),
    "all bytes there are": (lambda own: own.node.alloc(2**63), fishplate.Error),
    "more bytes than there are": (lambda own: own.node.alloc(2**64 - 1), fishplate.Error),
    "an exabyte": (lambda own: own.node.alloc(2**60), fishplate.Error),
    "bytes of text": (lambda own: own.node.alloc("8"), TypeError),
    "a free twice": (lambda own: freed(own).free(), Misuse),
    "a handle of freed memory": (lambda own: freed(own).handle(), Misuse),
    "a read of freed memory": (lambda own: freed(own).read(), Misuse),
    "a write of freed memory": (lambda own: freed(own).write(b"x"), Misuse),
    "a load of freed memory": (lambda own: freed(own).load(), Misuse),
    "a view of freed memory": (lambda own: memoryview(freed(own)), BufferError),
    "a view of a slice of it": (lambda own: memoryview(freed(own)[:8]), BufferError),
    "a wait in freed memory": (lambda own: own.node.wait(freed(own), "==", 1), Misuse),
    "a put from freed memory": (lambda own: own.node.put(freed(own), own.theirs), Misuse),
    "a receive into freed memory": (lambda own: own.node.irecv(freed(own)), Misuse),
    "a read beyond the end": (lambda own: own.memory.read(4090, 8), Misuse),
    "a read far beyond": (lambda own: own.memory.read(FAR, 1), Misuse),
    "a read of too much": (lambda own: own.memory.read(0, 2**62), Misuse),
    "a write beyond the end": (lambda own: own.memory.write(b"x" * 8, 4089), Misuse),
    "a write far beyond": (lambda own: own.memory.write(b"x", FAR), Misuse),
    "a load beyond the end": (lambda own: own.memory.load(4096), Misuse),
    "a load amid a word": (lambda own: own.memory.load(4), Misuse),
    "a store far beyond": (lambda own: own.memory.store(1, FAR - 7), Misuse),
    "a store of too much": (lambda own: own.memory.store(2**64), OverflowError),
    "a place below the start": (lambda own: own.memory.at(-1), OverflowError),
    "a place beyond the end": (lambda own: own.memory.at(4097), Misuse),
    "a slice beyond the end": (lambda own: own.memory.at(0, 4097), Misuse),
    "a slice in steps": (lambda own: own.memory[::2], IndexError),
    "a slice backwards": (lambda own: own.memory[::-1], IndexError),
    "a byte of memory": (lambda own: own.memory[0], TypeError),
    "registration of bytes": (lambda own: own.node.register(b"12345678"), BufferError),
    "registration of no buffer": (lambda own: own.node.register(7), TypeError),
    "registration of none": (lambda own: own.node.register(None), TypeError),
    "registration of strides": (
        lambda own: own.node.register(strided()),
        (ValueError, BufferError),
    ),
    "registration of a frozen array": (
        lambda own: own.node.register(frozen()),
        (ValueError, BufferError),
    ),
    "registration of no bytes": (lambda own: own.node.register(bytearray()), Misuse),
    "registration amid a word": (
        lambda own: own.node.register(memoryview(bytearray(64))[1:]),
        Misuse,
    ),
    "a release twice": (lambda own: released(own).release(), Misuse),
    "a place below the start there": (lambda own: own.theirs.at(-1), OverflowError),
    "a place beyond all there": (lambda own: own.theirs.at(FAR) + 1, Misuse),
    # One-sided operations.
    "a put beyond the end": (lambda own: own.node.put(b"x" * 8, own.theirs.at(4090)), Misuse),
    "a put far beyond": (lambda own: own.node.put(b"x" * 8, own.theirs.at(FAR)), Misuse),
    "a put of too much": (lambda own: own.node.put(bytes(10**6), own.theirs), Misuse),
    "a put to released memory": (lambda own: own.node.put(b"x", released(own)), Misuse),
    "a put to memory of one's own": (lambda own: own.node.put(b"x", own.memory), TypeError),
    "a put to another node's": (lambda own: own.node.put(b"x", other(own).theirs), Misuse),
    "a put from another node's": (lambda own: own.node.put(other(own).memory, own.theirs), Misuse),
    "a put of text": (lambda own: own.node.put("text", own.theirs), TypeError),
    "a put of nothing": (lambda own: own.node.put(None, own.theirs), TypeError),
    "a put of a list": (lambda own: own.node.put([1, 2], own.theirs), TypeError),
    "a put of strides": (
        lambda own: own.node.put(strided(), own.theirs),
        (ValueError, BufferError),
    ),
    "a put to nowhere": (lambda own: own.node.put(b"x", None), TypeError),
    "a put without a place": (lambda own: own.node.put(b"x"), TypeError),
    "an iput beyond the end": (
        lambda own: own.node.iput(bytearray(8), own.theirs.at(4090)),
        Misuse,
    ),
    "a signal amid a word": (lambda own: own.node.signal(own.theirs.at(4)), Misuse),
    "a signal beyond the end": (lambda own: own.node.signal(own.theirs.at(4096)), Misuse),
    "a signal of no kind": (lambda own: own.node.signal(own.theirs, 1, "or"), Misuse),
    "a signal of too much": (lambda own: own.node.signal(own.theirs, 2**64), OverflowError),
    "a signal below none": (lambda own: own.node.signal(own.theirs, -1), OverflowError),
    "a signal after no put": (
        lambda own: own.node.put_signal(b"x" * 8, own.theirs.at(4090), own.theirs),
        Misuse,
    ),
    "a signal to two peers": (
        lambda own: own.node.put_signal(b"x", own.theirs, other(own).theirs),
        Misuse,
    ),
    "a get beyond the end": (lambda own: own.node.get(bytearray(8), own.theirs.at(4090)), Misuse),
    "a get into bytes": (lambda own: own.node.get(b"12345678", own.theirs), BufferError),
    "a get into a frozen array": (
        lambda own: own.node.get(frozen(), own.theirs),
        (ValueError, BufferError),
    ),
    "a get from memory of one's own": (
        lambda own: own.node.get(bytearray(8), own.memory),
        TypeError,
    ),
    "an atomic of no name": (lambda own: own.node.fetch(own.theirs, "nand"), Misuse),
    "an atomic of 3 bytes": (lambda own: own.node.fetch(own.theirs, "add", 1, width=3), Misuse),
    "an atomic of 256 bytes": (
        lambda own: own.node.fetch(own.theirs, "add", 1, width=256),
        OverflowError,
    ),
    "an atomic amid a word": (
        lambda own: own.node.fetch(own.theirs.at(2), "add", 1, width=4),
        Misuse,
    ),
    "an atomic beyond the end": (lambda own: own.node.fetch_add(own.theirs.at(4096)), Misuse),
    "an atomic of a float": (lambda own: own.node.fetch_add(own.theirs, 1.5), TypeError),
    "a silent atomic amid a word": (
        lambda own: own.node.atomic(own.theirs.at(1), "add", 1),
        Misuse,
    ),
    "a wait amid a word": (lambda own: own.node.wait(own.memory.at(4), "==", 1), Misuse),
    "a wait beyond the end": (lambda own: own.node.wait(own.memory.at(4092), "==", 1), Misuse),
    "a wait at another node's": (lambda own: own.node.wait(other(own).memory, "==", 1), Misuse),
    "a wait at a peer's": (lambda own: own.node.wait(own.theirs, "==", 1), TypeError),
    "a wait that compares by no name": (lambda own: own.node.wait(own.memory, "=", 1), Misuse),
    "a wait of nan": (lambda own: own.node.wait(own.memory, "==", 1, timeout=math.nan), Misuse),
    "a wait below none": (lambda own: own.node.wait(own.memory, "==", 1, timeout=-0.1), Misuse),
    "a wait below all": (lambda own: own.node.quiet(timeout=-math.inf), Misuse),
    # Messages.
    "a tag below none": (lambda own: own.node.send(own.peer, -1, b"x"), OverflowError),
    "a tag of 97 bits": (lambda own: own.node.send(own.peer, 2**96, b"x"), Misuse),
    "a tag of 200 bits": (lambda own: own.node.send(own.peer, 2**200, b"x"), OverflowError),
    "a tag of text": (lambda own: own.node.send(own.peer, "1", b"x"), TypeError),
    "a mask of 97 bits": (lambda own: own.node.irecv(bytearray(8), ignore=2**96), Misuse),
    "a receive into bytes": (lambda own: own.node.recv(b"12345678"), BufferError),
    "a receive into nothing": (lambda own: own.node.irecv(None), TypeError),
    "a receive into a peer's": (lambda own: own.node.irecv(own.theirs), TypeError),
    "a receive of all memory": (lambda own: own.node.recv_bytes(max=2**63), MemoryError),
    "a receive of more": (lambda own: own.node.recv_bytes(max=2**62 - 1), MemoryError),
    "a receive below none": (lambda own: own.node.recv_bytes(max=-1), OverflowError),
    "a send of another's memory": (
        lambda own: own.node.send(own.peer, 1, other(own).memory),
        Misuse,
    ),
    "a send beyond the end": (lambda own: own.node.isend(own.peer, 1, freed(own)), Misuse),
    "a probe of another's peer": (lambda own: own.node.probe(other(own).peer), Misuse),
    # Arguments that run Python code when they are converted.
    "memory that is freed meanwhile": (
        lambda own: own.memory.store(1, Evil(lambda: (own.theirs.release(), own.memory.free()))),
        Misuse,
    ),
    "memory that is released meanwhile": (
        lambda own: own.node.signal(own.theirs, Evil(own.theirs.release)),
        Misuse,
    ),
    "an argument that raises": (lambda own: own.node.alloc(Evil(lambda: 1 / 0)), ZeroDivisionError),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_says_so_and_the_node_works_on(own, name):
    call, expected = CALLS[name]
    with pytest.raises(expected) as caught:
        call(own)
    if isinstance(caught.value, fishplate.Error):
        assert str(caught.value) and caught.value.kind not in ("broken", "busy", "failed")
    if hasattr(own, "other"):
        own.other.close()
    # The node still works, with new memory and the same peer or a new one.
    peer = own.node.connect(own.node.address)
    memory = own.node.alloc(64)
    theirs = peer.import_memory(memory.handle())
    own.node.put_signal(b"12345678", theirs.at(8), theirs)
    assert own.node.wait(memory, "==", 1) == 1
    assert memory.read(8, 8) == b"12345678"
    own.node.send(peer, 77, b"well")
    assert own.node.recv_bytes(peer, 77)[1] == b"well"


AFTER = {
    "connect": lambda own: own.node.connect(b"x"),
    "alloc": lambda own: own.node.alloc(8),
    "register": lambda own: own.node.register(bytearray(8)),
    "put": lambda own: own.node.put(b"x", own.theirs),
    "put_signal": lambda own: own.node.put_signal(b"x", own.theirs, own.theirs),
    "signal": lambda own: own.node.signal(own.theirs),
    "iput": lambda own: own.node.iput(bytearray(8), own.theirs),
    "iget": lambda own: own.node.iget(bytearray(8), own.theirs),
    "get": lambda own: own.node.get(bytearray(8), own.theirs),
    "atomic": lambda own: own.node.atomic(own.theirs, "add", 1),
    "fetch_add": lambda own: own.node.fetch_add(own.theirs),
    "wait": lambda own: own.node.wait(own.memory, "==", 1),
    "test": lambda own: own.node.test(own.memory, "==", 1),
    "quiet": lambda own: own.node.quiet(),
    "fence": lambda own: own.node.fence(own.peer),
    "send": lambda own: own.node.send(own.peer, 1, b"x"),
    "isend": lambda own: own.node.isend(own.peer, 1, b"x"),
    "irecv": lambda own: own.node.irecv(bytearray(8)),
    "recv": lambda own: own.node.recv(bytearray(8)),
    "recv_bytes": lambda own: own.node.recv_bytes(),
    "probe": lambda own: own.node.probe(),
    "poll": lambda own: own.node.poll(),
    "stats": lambda own: own.node.stats(),
    "rails": lambda own: own.node.rails(),
    "connected": lambda own: own.peer.connected(),
    "import_memory": lambda own: own.peer.import_memory(b"x"),
    "disconnect": lambda own: own.peer.disconnect(),
    "handle": lambda own: own.memory.handle(),
    "free": lambda own: own.memory.free(),
    "read": lambda own: own.memory.read(),
    "write": lambda own: own.memory.write(b"x"),
    "load": lambda own: own.memory.load(),
    "store": lambda own: own.memory.store(1),
    "release": lambda own: own.theirs.release(),
    "done": lambda own: own.request.done(),
    "finish": lambda own: own.request.wait(),
    "cancel": lambda own: own.request.cancel(),
}


@pytest.mark.parametrize("name", AFTER)
def test_a_closed_node_refuses_every_call(own, name):
    into = bytearray(8)
    own.request = own.node.irecv(into)
    own.node.close(0.5)
    assert own.node.closed and "closed" in repr(own.node)
    into.clear()
    with pytest.raises(fishplate.Closed) as caught:
        AFTER[name](own)
    assert caught.value.kind == "closed"
    own.node.close()


def test_what_needs_no_node_works_after_it(own):
    own.node.close()
    assert len(own.node.address) > 16 and len(own.memory) == 4096 and own.theirs.peer == own.peer
    assert bytes(own.memory[:4]) == bytes(4)
    with own.memory, own.theirs:
        pass


def test_errors_are_told_apart(own):
    assert issubclass(fishplate.Timeout, TimeoutError)
    assert issubclass(fishplate.PeerFailed, ConnectionError)
    assert issubclass(Misuse, ValueError)
    for name in ["Timeout", "PeerFailed", "NotConnected", "Full", "InUse", "Closed", "Misuse"]:
        assert issubclass(getattr(fishplate, name), fishplate.Error)
    with pytest.raises(Misuse) as caught:
        own.node.put(b"x" * 8, own.theirs.at(4090))
    assert caught.value.kind == "range"
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.kind, str(again)) == (Misuse, "range", str(caught.value))
