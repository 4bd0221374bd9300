"""Measures 8-byte put-signals and messages: a ping-pong of two processes, and single calls. Run it
twice: `python latency.py HOST:PORT`. Rank 0 prints half round trips in microseconds."""

import sys
import time
from collections.abc import Callable

import fishplate

ROUNDS = 20_000
BLOCKS = 9


def median(run: Callable[[], None], rounds: int) -> float:
    """Returns the microseconds of one round: the median of several blocks."""
    took = []
    for _ in range(BLOCKS):
        begun = time.perf_counter()
        run()
        took.append((time.perf_counter() - begun) / rounds * 1e6)
    return sorted(took)[BLOCKS // 2]


def main() -> None:
    place = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7119"
    job = fishplate.Job(place, 2)
    with fishplate.Node() as node:
        peer = node.connect(job.exchange(node.address))
        inbox = node.alloc(4096)
        theirs = peer.import_memory(job.exchange(inbox.handle()))
        data, word, to, signal = b"8 bytes.", inbox.at(0), theirs.at(64), theirs.at(0)
        ours, into, first = inbox.at(128, 8), bytearray(8), job.rank == 0
        turn = 0

        def put_signals(source: fishplate.Slice | bytes) -> None:
            nonlocal turn
            for turn in range(turn + 1, turn + 1 + ROUNDS):
                if first:
                    node.put_signal(source, to, signal, turn)
                node.wait(word, "==", turn)
                if not first:
                    node.put_signal(source, to, signal, turn)

        def messages() -> None:
            for _ in range(ROUNDS):
                if first:
                    node.send(peer, 1, data)
                node.recv(into, peer, 1)
                if not first:
                    node.send(peer, 1, data)

        figures = {
            "put-signal of memory, one way": median(lambda: put_signals(ours), 2 * ROUNDS),
            "put-signal from a bytes object, one way": median(
                lambda: put_signals(data), 2 * ROUNDS
            ),
            "message, one way": median(messages, 2 * ROUNDS),
        }
        job.barrier(node)
        if first:

            def alone(source: fishplate.Slice | bytes) -> Callable[[], None]:
                def run() -> None:
                    for _ in range(ROUNDS):
                        node.put_signal(source, to, signal, 1)

                return run

            figures["put-signal of memory, the call"] = median(alone(ours), ROUNDS)
            figures["put-signal of bytes, the call"] = median(alone(data), ROUNDS)
            for name, figure in figures.items():
                print(f"{name}: {figure:.2f} us")
        job.barrier(node)


if __name__ == "__main__":
    main()
