"""Random sequences of calls with live, freed and foreign objects. Every call returns or raises an
exception that a program can handle, and new nodes work afterwards. Also runs without pytest, as
tests/sanitize.sh does: `python test_fuzz.py [CALLS [SEED [shm|worker|tcp]]]`."""

import asyncio
import gc
import inspect
import os
import random
import sys
import time

import fishplate
from fishplate._native import Memory, Message, Node, Peer, Place, Remote, Request, Slice, _Waker

SOON = 0.005
OPTIONS = {
    "shm": {"timeout": SOON, "patience": SOON, "connect_timeout": 0.05, "fabric": "off"},
    "worker": {
        "timeout": SOON,
        "patience": SOON,
        "connect_timeout": 0.05,
        "fabric": "off",
        "worker": True,
    },
    # Peers are attached at their first use, which waits only for this time.
    "tcp": {
        "timeout": SOON,
        "patience": SOON,
        "connect_timeout": SOON,
        "fabric": "required",
        "providers": ["tcp"],
        "interfaces": ["lo"],
        "shared_memory": False,
    },
}
KINDS = [Node, Peer, Memory, Slice, Remote, Place, Request, Message, _Waker]
SPECIAL = {
    "__len__", "__getitem__", "__buffer__", "__dlpack__", "__enter__", "__exit__", "__eq__",
    "__hash__", "__add__", "__await__", "__dlpack_device__", "__cuda_array_interface__", "__repr__",
    "_try_import",
}  # fmt: skip
# A wrong call raises one of these: the package's errors, or those of Python for wrong types, values
# and buffers.
MAY = (
    fishplate.Error,
    TypeError,
    ValueError,
    OverflowError,
    BufferError,
    AttributeError,
    MemoryError,
)


def calls():
    """Returns the kind and the name of every method and attribute."""
    return [
        (kind, name) for kind in KINDS for name in vars(kind) if name[0] != "_" or name in SPECIAL
    ]


async def inside(call, given, named):
    """Makes a call in the thread of a running loop, where fewer calls wait."""
    return call(*given, **named)


def eventually(call):
    """Repeats a call whose time limit is short."""
    end = time.monotonic() + 30
    while True:
        try:
            return call()
        except (fishplate.NotConnected, fishplate.Timeout):
            if time.monotonic() > end:
                raise


class Fuzz:
    """Makes random calls on pools of objects. Objects that the calls return join the pools."""

    def __init__(self, seed, way):
        self.random = random.Random(seed)
        self.options = OPTIONS[way]
        self.pool = {kind: [] for kind in KINDS}
        self.made, self.raised = set(), set()
        self.loop = asyncio.new_event_loop()
        # Another node, with a worker. The nodes under test must reject its objects.
        self.other = Node(**self.options | {"worker": True})
        theirs = self.other.alloc(4096)
        self.handles = [theirs.handle(), b"", b"x" * 40, self.damaged(theirs.handle())]
        with Node(**self.options) as closed:
            self.addresses = [self.other.address, b"", b"x", closed.address]
        self.addresses += [self.damaged(self.other.address) for _ in range(20)]
        self.pool[Memory].append(theirs)
        self.open()

    def open(self):
        """Adds a node that is connected to itself and to the other node."""
        node = Node(**self.options)
        peer = node.connect(node.address)
        memory = node.alloc(4096)
        self.addresses.append(node.address)
        self.handles.append(memory.handle())
        theirs = eventually(lambda: peer.import_memory(memory.handle()))
        for found in (node, peer, memory, memory.at(8, 64), theirs):
            self.keep(found)
        eventually(lambda: node.send(peer, 1, b"a message"))
        self.keep(eventually(lambda: node.recv(bytearray(16), tag=1)))
        self.keep(node._waker())
        self.keep(node.connect(self.other.address))
        self.keep(node.irecv(bytearray(8), tag=3))

    def damaged(self, some):
        some = bytearray(some)
        some[self.random.randrange(len(some))] ^= self.random.randrange(1, 256)
        return bytes(some)

    def keep(self, found):
        if type(found) in self.pool:
            kept = self.pool[type(found)]
            # Objects that fall out of the pool are dropped, in any state.
            (
                kept.append(found)
                if len(kept) < 12
                else kept.__setitem__(self.random.randrange(12), found)
            )

    def any(self, *kinds):
        kept = self.pool[self.random.choice(kinds)]
        return self.random.choice(kept) if kept else None

    def number(self):
        return self.random.choice(
            [0, 1, 2, 3, 8, 8, 16, 64, 100, 4088, 4096, 2**63, 2**64 - 1, 2**64, -1]
        )

    def buffer(self):
        size = self.random.choice([0, 1, 8, 8, 64, 4096, 100_000])
        return self.random.choice(
            [bytes(size), bytearray(size), memoryview(bytearray(size))[::-1], "text"]
        )

    def argument(self, name):
        """Returns a value for a parameter: usually of the right kind, sometimes of any kind."""
        pick = self.random.random()
        if pick < 0.05:
            value = self.random.choice(
                [None, self.number(), self.buffer(), self.any(*KINDS), 1.5, {}, object()]
            )
            # A number above 0 is a valid timeout, and the call would wait that long.
            is_wait = name == "timeout" and isinstance(value, (int, float))
            return -value if is_wait else value
        match name:
            case "peer" | "source":
                return self.any(Peer)
            case "to" | "signal":
                return self.any(Remote, Place)
            case "at":
                return self.any(Remote, Place, Memory, Slice)
            case "data" | "into" | "buffer":
                return self.any(Memory, Slice) if pick < 0.5 else self.buffer()
            case "timeout":
                return self.random.choice([0, SOON, None, -1.0, float("nan")])
            case "op":
                return self.random.choice(
                    ["set", "add", "and", "or", "xor", "swap", "compare_swap", "fetch", "no"]
                )
            case "compare":
                return self.random.choice(["==", "!=", ">=", ">", "<=", "<", 0, 1, "no"])
            case "width":
                return self.random.choice([1, 2, 4, 8, 3])
            case "address":
                return self.random.choice(self.addresses)
            case "handle":
                return self.random.choice(self.handles)
            case "range":
                return slice(self.number() % 5000, self.number() % 5000)
            case "defer":
                return pick < 0.5
            case "len" | "offset" | "max" | "size":
                return self.number() if pick < 0.3 else self.random.randrange(100)
        return self.number()

    def arguments(self, kind, name):
        match name:
            case "__getitem__":
                return [self.argument("range")], {}
            case "__exit__":
                return [None, None, None], {}
            case "__eq__":
                return [self.argument("peer")], {}
            case "__buffer__":
                return [self.random.choice([0, 1, 0x9C, 0x11C])], {}
        try:
            parameters = list(inspect.signature(getattr(kind, name)).parameters.values())[1:]
        except (TypeError, ValueError):
            parameters = []
        given, named = [], {}
        for parameter in parameters:
            optional = parameter.default is not parameter.empty
            if parameter.kind is parameter.VAR_KEYWORD or (optional and self.random.random() < 0.5):
                continue
            value = self.argument(parameter.name)
            if (
                parameter.kind is parameter.KEYWORD_ONLY
                or (optional and named)
                or (optional and name != "at")
            ):
                named[parameter.name] = value
            else:
                given.append(value)
        return given, named

    def step(self):
        kind, name = self.random.choice(self.calls)
        on = self.any(kind)
        if on is None or (
            kind is Node and name in ("close", "__exit__") and self.random.random() < 0.9
        ):
            return
        self.made.add((kind, name))
        try:
            found = getattr(on, name)
            if callable(found):
                given, named = self.arguments(kind, name)
                if self.random.random() < 0.3:
                    found = self.loop.run_until_complete(inside(found, given, named))
                else:
                    found = found(*given, **named)
            if inspect.iscoroutine(found):
                found.close()
            elif name == "__await__":
                # Only an event loop can run the coroutine.
                found.close()
        except MAY as error:
            self.raised.add(type(error))
            if isinstance(error, fishplate.Error):
                assert str(error) and error.kind not in (
                    "broken",
                    "busy",
                ), f"{kind.__name__}.{name}: {error!r}"
            return
        self.keep(found)
        if type(found) is bytes and name == "handle":
            self.handles[self.random.randrange(len(self.handles))] = found

    def run(self, count):
        self.calls = calls()
        for turn in range(count):
            self.step()
            if turn % 500 == 499 and all(node.closed for node in self.pool[Node]):
                self.open()
            if turn % 1000 == 999:
                self.pool[Request].clear()
                gc.collect()
        missing = set(self.calls) - self.made
        assert count < 20_000 or not missing, missing
        for kept in self.pool.values():
            kept.clear()
        gc.collect()
        self.other.close(SOON)
        self.loop.close()


def works():
    """Checks that a new node still moves data."""
    with Node(fabric="off") as node:
        peer, memory = node.connect(node.address), node.alloc(64)
        there = peer.import_memory(memory.handle())
        node.put_signal(b"still ok", there.at(8), there, 7)
        assert node.wait(memory, "==", 7) == 7 and memory.read(8, 8) == b"still ok"
        there.release()


def fuzz(count, seed, way):
    print(f"seed {seed}, {way}", flush=True)
    begun = time.monotonic()
    it = Fuzz(seed, way)
    it.run(count)
    works()
    print(
        f"{count} calls, {len(it.made)} of {len(it.calls)} methods, "
        f"{time.monotonic() - begun:.1f} s"
    )
    return it


def test_random_calls_raise_or_return(way):
    it = fuzz(3000, int(os.environ.get("FISHPLATE_SEED", os.getpid())), way)
    assert len(it.made) > 80 and fishplate.Misuse in it.raised


if __name__ == "__main__":
    words = sys.argv[1:] + ["20000", str(os.getpid()), "shm"][len(sys.argv) - 1 :]
    fuzz(int(words[0]), int(words[1]), words[2])
