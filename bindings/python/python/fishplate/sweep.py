"""Measures latency and bandwidth by message size, for writes into a tensor of the peer
(direct) and for messages that are copied (relay). Run it twice:

    python -m fishplate.sweep [HOST:PORT] [--sizes 1K,1M] [--path direct,relay] [--check] \\
        >results.jsonl

Rank 0 writes a JSON line for each path and size, which `python -m fishplate.plot` draws."""

from __future__ import annotations

import argparse
import json
import sys
import time

import fishplate
from fishplate.direct import Inlet, Outlet

_SUFFIXES = {"K": 10, "M": 20, "G": 30}


def _number(text: str) -> int:
    shift = _SUFFIXES.get(text[-1:].upper(), 0)
    return int(text[:-1] if shift else text) << shift


def _sizes(text: str) -> list[int]:
    sizes = [_number(size) for size in text.split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a size below 1; use 1 byte or more")
    return sizes


class Bar:
    """A progress bar on standard error, if that is a terminal."""

    def __init__(self, steps: int, shown: bool | None = None) -> None:
        self._steps, self._done = steps, 0
        self._shown = sys.stderr.isatty() if shown is None else shown

    def step(self, what: str) -> None:
        """Shows step `what` and the share of finished steps."""
        if self._shown:
            full = 40 * self._done // self._steps
            bar = "=" * full + " " * (40 - full)
            print(
                f"\r{what:>16} [{bar}] {self._done}/{self._steps}",
                end="",
                file=sys.stderr,
                flush=True,
            )
        self._done += 1

    def close(self) -> None:
        """Clears the line."""
        if self._shown:
            print("\r" + " " * 72 + "\r", end="", file=sys.stderr, flush=True)


def _pattern(size: int, turn: int) -> bytes:
    return bytes((turn + at) & 0xFF for at in range(min(size, 256)))


def _run(
    node: fishplate.Node,
    peer: fishplate.Peer,
    rank: int,
    path: str,
    size: int,
    count: int,
    check: bool,
) -> list[float]:
    """Rank 0 sends data, and rank 1 answers with 1 byte. Returns the seconds of each round at
    rank 0."""
    took, wrong = [], 0
    there = bytearray(1)
    if rank == 0:
        outlet = Outlet(node, peer) if path == "direct" else None
        data = node.alloc(size) if path == "direct" else bytearray(size)
        for turn in range(count):
            if check:
                head = _pattern(size, turn)
                data.write(head) if isinstance(data, fishplate.Memory) else data.__setitem__(
                    slice(0, len(head)), head
                )
            begun = time.perf_counter()
            if outlet:
                outlet.isend_direct(data)
            else:
                node.send(peer, 1, data)
            node.recv(there, peer, 2)
            took.append(time.perf_counter() - begun)
            wrong += there[0]
        if outlet:
            outlet.close()
        if isinstance(data, fishplate.Memory):
            data.free()
    else:
        inbox = node.alloc(size)
        inlet = Inlet(node, peer, inbox) if path == "direct" else None
        place = bytearray(size)
        for turn in range(count):
            if inlet:
                inlet.wait()
            else:
                node.recv(place, peer, 1)
            seen = inbox.read(0, min(size, 256)) if inlet else bytes(place[:256])
            bad = check and seen != _pattern(size, turn)
            if inlet:
                inlet.notify()
            node.send(peer, 2, bytes([bad]))
        node.quiet(peer)
    if wrong:
        raise SystemExit(f"{path}, {size} bytes: {wrong} of {count} had wrong data")
    return took


def main(words: list[str] | None = None) -> None:
    """Runs the sweep of this process."""
    parser = argparse.ArgumentParser(
        "python -m fishplate.sweep", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "place", nargs="?", default="127.0.0.1:7121", help="HOST:PORT for both processes"
    )
    parser.add_argument("--sizes", type=_sizes, default=_sizes("8,64,512,4K,32K,256K,2M,16M"))
    parser.add_argument("--path", default="direct,relay", help="direct, relay or both")
    parser.add_argument(
        "-n", type=_number, default=0, help="rounds per size; the default depends on the size"
    )
    parser.add_argument(
        "--check", action="store_true", help="verify the first bytes of each payload"
    )
    args = parser.parse_args(words)
    paths = args.path.split(",")
    if unknown := [path for path in paths if path not in ("direct", "relay")]:
        parser.error(f"--path: {unknown[0]!r} is neither direct nor relay")
    job = fishplate.Job(args.place, 2)
    with fishplate.Node() as node:
        peer = node.connect(job.exchange(node.address))
        bar = Bar(len(paths) * len(args.sizes), None if job.rank == 0 else False)
        for path in paths:
            for size in args.sizes:
                bar.step(f"{path} {size}")
                count = args.n or max(20, min(2000, (256 << 20) // size))
                took = _run(node, peer, job.rank, path, size, count, args.check)
                job.barrier(node)
                if job.rank == 0:
                    took = sorted(took[count // 10 :])
                    at = [
                        round(1e9 * took[int(part * (len(took) - 1))], 1)
                        for part in (0, 0.5, 0.9, 0.99, 1)
                    ]
                    row = {
                        "schema_version": 1,
                        "test": path,
                        "transport": "python",
                        "size": size,
                        "iters": count,
                        "lat_ns": dict(zip(("min", "p50", "p90", "p99", "max"), at, strict=True)),
                        "bytes_per_s": round(size * len(took) / sum(took), 1),
                    }
                    bar.close()
                    print(json.dumps(row), flush=True)
        job.barrier(node)


if __name__ == "__main__":
    main()
