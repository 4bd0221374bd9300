"""Measures 8-byte put-signals and messages: a ping-pong of two processes, and single calls. Run it
twice: `python latency.py HOST:PORT`. Rank 0 prints microseconds."""

import itertools
import sys
import time
from collections.abc import Callable

import fishplate

ROUNDS = 20_000


def median(run: Callable[[], None]) -> float:
    """Returns the microseconds of one round: the median of nine blocks."""
    took = []
    for _ in range(9):
        begun = time.perf_counter()
        run()
        took.append((time.perf_counter() - begun) / ROUNDS * 1e6)
    return sorted(took)[4]


job = fishplate.Job(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7119", 2)
with fishplate.Node() as node:
    peer = node.connect(job.exchange(node.address))
    inbox = node.alloc(4096)
    theirs = peer.import_memory(job.exchange(inbox.handle()))
    data, memory, into = b"8 bytes.", inbox.at(128, 8), bytearray(8)
    word, to, signal, turns = inbox.at(0), theirs.at(64), theirs.at(0), itertools.count(1)

    def call(source: fishplate.Slice | bytes) -> None:
        for turn in itertools.islice(turns, ROUNDS):
            node.put_signal(source, to, signal, turn)

    def put_signals(source: fishplate.Slice | bytes) -> None:
        for turn in itertools.islice(turns, ROUNDS):
            if job.rank == 0:
                node.put_signal(source, to, signal, turn)
            node.wait(word, "==", turn)
            if job.rank == 1:
                node.put_signal(source, to, signal, turn)

    def messages() -> None:
        for _ in range(ROUNDS):
            if job.rank == 0:
                node.send(peer, 1, data)
            node.recv(into, peer, 1)
            if job.rank == 1:
                node.send(peer, 1, data)

    show: Callable[[str], object] = print if job.rank == 0 else str
    show(f"put-signal of memory, one way: {median(lambda: put_signals(memory)) / 2:.2f} us")
    show(f"put-signal of a bytes object, one way: {median(lambda: put_signals(data)) / 2:.2f} us")
    show(f"message, one way: {median(messages) / 2:.2f} us")
    job.barrier(node)
    if job.rank == 0:
        print(f"put-signal of memory, the call: {median(lambda: call(memory)):.2f} us")
        print(f"put-signal of a bytes object, the call: {median(lambda: call(data)):.2f} us")
    job.barrier(node)
